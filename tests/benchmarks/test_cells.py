"""The benchmark that compares plans with their steps: its rows compare outputs of the same steps."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from weightstream.plan.manifest import Workload
from weightstream.runtime.devices.cpu import CpuBackend

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAME = "decode, batch 1"


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("cells")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
    monkeypatch.setitem(module.SHAPES, "tiny", shape)
    monkeypatch.setitem(module.WORKLOADS, NAME, Workload(batch=1, tokens=1, context=16))
    made = object.__new__(module.Cells)  # without a profile of this machine
    made.model, made.device, made.seconds = module.build("tiny", torch.device("cpu")), torch.device("cpu"), 0.0
    made.backend, made.want, made.equal = CpuBackend(), {}, False
    yield made
    made.backend.close()
    sys.modules.pop("cells")


def test_equality_compares_the_same_steps(cells: Any) -> None:
    cells.timed(NAME)
    assert cells.equal
    nbytes = sum(p.numel() * p.element_size() for p in cells.model.parameters())
    with weightstream.offload(cells.model, device="cpu", device_budget=int(0.6 * nbytes), context=16):
        cells.timed(NAME)
    assert cells.equal
    with torch.no_grad():
        cells.model.lm_head.weight[:, 0] += 1
    cells.timed(NAME)
    assert not cells.equal
