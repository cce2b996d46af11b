"""The chart of the README shows rows of one run."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GIB = 2**30


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("chart")
    sys.modules.pop("chart")


def row(system: str, gib: float, ms: float, time: str) -> dict[str, Any]:
    facts = {"gpu": "H", "torch": "2.11.0+cu130", "accelerate": "1", "diffusers": "2", "flextensor": "3"}
    taken = int(gib * GIB)
    return {"system": system, "tokens": 1, "taken_nbytes": taken, "ms": {"p50": ms}, "time": time} | facts


def test_bars_are_of_the_last_run_that_measured_most_groups_with_peers(chart: ModuleType) -> None:
    runs = [
        [
            row("resident, eager", 13, 10, time),
            row("accelerate cpu_offload", 0.2, 1000, time),
            row("FlexTensor, memory mode", 2.8, 4 * ms, time),
            row("weightstream, codec auto, eager", 2.81, 2 * ms, time),
            row("weightstream, codec auto, CUDA graph", 2.7, ms, time) | {"than_taken_nbytes": int(2.8 * GIB)},
            row("weightstream, codec none, eager", 9, ms, time),
        ]
        for ms, time in ((50, "2026-01-01"), (20, "2026-01-02"))
    ]
    without = [
        row("FlexTensor, memory mode", 2.8, 1, "2026-01-03"),
        row("weightstream, codec auto", 5, 1, "2026-01-04"),
    ]
    found = chart.run_with_peers([*runs[1], *runs[0], *without])
    assert chart.grouped(found) == {
        "under 1 GiB": [("accelerate", 1.0)],
        "2.8 GiB": [("FlexTensor", 12.5), ("weightstream", 50.0)],
    }
    heights = dict(re.findall(r'height="([\d.]+)" rx="2" fill="(#\w+)"', chart.drawn(found, chart.THEMES["light"])))
    bars = {color: float(height) for height, color in heights.items() if height != "11"}
    ours, peer = (bars[chart.THEMES["light"].bars[name]] for name in ("weightstream", "FlexTensor"))
    assert ours == pytest.approx(4 * peer, abs=0.2)


def test_figures_are_those_of_the_rows(chart: ModuleType) -> None:
    """After a run is added, `python benchmarks/chart.py` draws them again."""
    rows = [json.loads(line) for line in (BENCHMARKS / "results" / "coded.jsonl").read_text().splitlines()]
    run = chart.run_with_peers(rows)
    for name, theme in chart.THEMES.items():
        assert (BENCHMARKS / "results" / f"tokens-{name}.svg").read_text() == chart.drawn(run, theme)
