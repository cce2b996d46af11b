"""Packed experts are planned from a dry run, which shows how many rows of each leaf a token reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_planner import H200, machine

from models import model_nbytes
from packed_rig import CASES, both, packed_modules
from weightstream.adapters.hf.lazy_dequant import unpack_late
from weightstream.adapters.hf.packed_formats import packed_stacks
from weightstream.inputs.gathering import sketch_of
from weightstream.plan import expert_cache
from weightstream.plan.check import prove
from weightstream.plan.plan import Plan
from weightstream.settings.config import OffloadConfig

pytest.importorskip("transformers")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shared", [False, True])
def test_packed_rows_get_slots(name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shared`: the buffer for whole stacks is larger than that for waves, and lies in slots."""
    if shared:
        monkeypatch.setattr(expert_cache, "_WAVES_NBYTES", 1)
    model = both(name, hidden_size=256, intermediate_size=256).packed
    unpack_late(model, torch.device("meta"))
    stacks = sum(t.nbytes for module in packed_modules(model) for t in module.parameters(recurse=False))
    budget = model_nbytes(model) - stacks // 3
    slow = machine(profile=replace(H200, link_bytes_per_s=1e8))  # as slow for these sizes as a real link for real ones
    sketch = sketch_of(model, None, OffloadConfig.from_kwargs(device_budget=budget, codec="none"), slow)
    plan = sketch.inputs.plan().plan
    num_leaves = sum(len(stack.leaves) for module in packed_modules(model) for stack in packed_stacks(module).values())
    assert len(plan.cached) == num_leaves
    assert 2 <= plan.num_slots < 8
    assert 0 < plan.found_share < 1
    assert (plan.shared_nbytes > 0) is shared
    assert plan.device_nbytes <= budget
    rest_nbytes = plan.device_nbytes - plan.resident_nbytes - plan.ring_nbytes
    assert rest_nbytes == max(plan.buffer_nbytes, plan.own_buffer_nbytes + plan.slots_nbytes)
    prove(plan)
    assert Plan.from_json(plan.to_json()).acts_as(plan)
