"""The benchmark that loads a mixture of experts, at a tiny shape: its checkpoint loads, and its row is right."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightstream.store.checkpoint import Checkpoint

transformers = pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("experts")
    for path in BENCHMARKS.glob("experts*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.stress
@pytest.mark.usefixtures("no_loading_bars")
@pytest.mark.parametrize("shape", ["qwen3", "gpt_oss"])
def test_a_row_of_a_load(shape: str, benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "model", tmp_path / "rows.jsonl"
    fresh, rows = benchmark.experts_first.fresh, []

    def once(folder: Path) -> dict[str, object]:
        """The timed process is the second one. Of the first, the row has only the time."""
        rows.append({"total_s": 0.5} if not rows else fresh(folder))
        return rows[-1]

    monkeypatch.setattr(benchmark.experts_first, "fresh", once)
    settings = ["--first", "--tiny", "--shape", shape, "--layers", "6", "--folder", str(folder), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["experts.py", *settings])
    benchmark.main()
    (row,) = map(json.loads, out.read_text().splitlines())
    assert len(rows) == 2
    assert row["cold_s"] == 0.5
    assert rows[1].items() <= row.items()
    entries = Checkpoint.open(folder).entries
    nbytes = sum(entry.nbytes for entry in entries.values())
    assert nbytes < row["nbytes"] < nbytes + 500_000
    assert row["files"] == len(list(folder.glob("*.safetensors"))) > 1
    assert row["layers"] == 6
    layer = sum(entry.nbytes for name, entry in entries.items() if ".layers.5." in name)
    whole = nbytes + layer * (benchmark.SHAPES[shape].num_layers - 6)
    assert row["scaled_s"] == pytest.approx(row["total_s"] * whole / row["nbytes"], abs=0.01)
    assert row["total_s"] == pytest.approx(row["device_s"] + row["load_s"] + row["first_s"], abs=0.005)
    experts = sum(entry.nbytes for name, entry in entries.items() if "experts" in name)
    assert row["budget_gib"] == pytest.approx((nbytes - 0.75 * experts) / 2**30, abs=0.001)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.randint(0, 500, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert row["token"] == int(model(ids).logits[0, -1].argmax())
