"""The requirements of vLLM's own tests of offloading (tests/basic_correctness/prefetch_offload and cpu_offload).

vLLM's tests of functions that only its own offloaders have are left out: the next index of a slot, pinned memory for a
fallback, and which names are experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import asked, engine, group, streamer, tokens

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def plain(folder: Folder) -> list[list[int]]:
    with engine(folder("llama")) as llm:
        return tokens(llm)


def test_the_mlps_of_two_layers_in_eight(folder: Folder, plain: list[list[int]]) -> None:
    flags: dict[str, Any] = group(1, 8, 2) | {"offload_params": {"gate_up_proj", "down_proj"}}
    with engine(folder("llama"), **asked(), **flags) as llm:
        assert tokens(llm) == plain
        plan = streamer().plan
        streamed = {name for unit in range(len(plan.manifest.units)) for name in plan.streamed(unit)}
        assert streamed == {f"{layer}.mlp.{name}.weight" for layer in (6, 7) for name in ("gate_up_proj", "down_proj")}


@pytest.mark.parametrize("without_pinning", [False, True])
@pytest.mark.parametrize("without_uva", [False, True])
def test_a_gigabyte_on_the_host(
    folder: Folder, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch, without_pinning: bool, without_uva: bool
) -> None:
    from vllm import envs

    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY", str(int(without_pinning)))
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", str(int(without_uva)))
    getattr(envs, "disable_envs_cache", lambda: None)()
    with engine(folder("llama"), **asked(), cpu_offload_gb=1) as llm:
        assert tokens(llm) == plain
        config = streamer()._installed.replanning.inputs.planners[0].config
        assert (config.pin_memory, config.use_uva) == (not without_pinning, not without_uva)
        assert streamer().plan.offloaded_nbytes > 0
