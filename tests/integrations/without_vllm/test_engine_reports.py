"""What the plug-in reports of an engine: an untried version of vLLM, and a KV cache that takes host memory."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightstream.integrations.vllm import memory
from weightstream.integrations.vllm.versions import TRIED, why_untried

GIB = 1 << 30


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0", "0.33.1rc2.dev7+cpu"])
def test_a_version_that_was_tried_gives_no_warning(version: str) -> None:
    assert why_untried(version) is None


@pytest.mark.parametrize("version", ["0.23.0", "0.3.3", "0.330.0", "1.24.0"])
def test_another_version_is_named_with_those_that_were_tried(version: str) -> None:
    warning = why_untried(version) or ""
    assert f"vLLM {version} was not tried" in warning
    assert all(f"{number} ({where})" in warning for number, where in TRIED.items())


def test_the_documentation_names_the_versions_that_were_tried() -> None:
    text = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    rows = re.findall(r"^\| (0\.\d+)\S* \|.*?\b(GPU|CPU)\b", text, re.MULTILINE)
    assert dict(rows) == dict(TRIED)


def engine_of(connector: str | None, ranks: int = 1, **extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    return SimpleNamespace(
        kv_transfer_config=transfer if connector or extra else None,
        parallel_config=SimpleNamespace(world_size=ranks),
    )


COMBINED = {
    "connectors": [
        {"kv_connector": "NixlConnector"},
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 6 * GIB}},
    ]
}


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (engine_of(None), None),
        (engine_of("OffloadingConnector", cpu_bytes_to_use=3.0 * GIB), "OffloadingConnector will take 3.0GiB"),
        (engine_of("OffloadingConnector", 2, cpu_bytes_to_use=3 * GIB), "will take 1.5GiB"),
        (engine_of("SimpleCPUOffloadConnector", 2, cpu_bytes_to_use_per_rank=GIB), "will take 1.0GiB"),
        (engine_of("MultiConnector", 3, **COMBINED), "MultiConnector will take 2.0GiB"),
        (engine_of("LMCacheMPConnector"), "LMCacheMPConnector may take host memory"),
    ],
)
@pytest.mark.parametrize("available", [GIB // 2, 64 * GIB])
def test_host_memory_of_an_offloaded_cache_is_logged(
    engine: Any, text: str | None, available: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_nbytes", lambda: available)
    with caplog.at_level(logging.INFO, logger="weightstream"):
        memory.report_cache_offload(engine)
    infos, warnings = (
        [r.getMessage() for r in caplog.records if r.levelname == level] for level in ("INFO", "WARNING")
    )
    assert [text in message for message in infos] == [True] * (text is not None) if text else not infos
    assert len(warnings) == (available < GIB and text is not None and "will" in text)
    assert all("512.0MiB of host memory are left" in message for message in warnings)
