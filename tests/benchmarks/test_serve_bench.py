"""The benchmark of the server runs at a tiny shape, and answers are equal."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("serve")
    for name in ("serve", "checkpoint", "rows"):
        sys.modules.pop(name, None)


@pytest.mark.stress
@pytest.mark.usefixtures("no_loading_bars")
def test_rows_of_the_server(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ["--smoke", "--budget", "3MiB", "--folder", str(tmp_path / "model"), "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["serve.py", *flags])
    benchmark.main()
    generate, serve = (json.loads(line) for line in out.read_text().splitlines())
    assert (generate["system"], serve["system"]) == ("generate", "serve")
    assert generate["x_generate"] == pytest.approx({"first": 1.0, "token": 1.0}, abs=0.02)
    assert 0 < serve["first_s"]["p20"] <= serve["first_s"]["p80"]
    assert serve["tokens_s"]["p50"] > 0
