"""Packed experts are planned from a dry run, which shows how many rows of each leaf a token reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_planner import H200, machine

import weightstream
from models import model_nbytes
from packed_rig import CASES, both, packed_modules
from weightstream.adapters.hf import packed_matrices
from weightstream.adapters.hf.lazy_dequant import unpack_late
from weightstream.adapters.hf.packed_formats import packed_stacks, unpack_kernels_of
from weightstream.inputs.gathering import sketch_of
from weightstream.plan import expert_cache
from weightstream.plan.check import prove
from weightstream.plan.manifest import Profile, unpack_rate
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


TOKENS, EXPERTS, PICKED = 64, 8, 2


def planned(model: Any, tokens: int, rates: Mapping[str, float]) -> Plan:
    """The plan of a step of so many tokens, with all weights on the device."""
    on = machine(profile=replace(H200, **{unpack_rate(kernel): rate for kernel, rate in rates.items()}))
    config = OffloadConfig.from_kwargs(device_budget=4 * model_nbytes(model), codec="none", tokens=tokens)
    return sketch_of(model, None, config, on).inputs.plan().plan


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_step_takes_as_long_as_its_matrices_are_unpacked(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a token, or all, in waves, for a prompt. Rates of other formats do not count."""
    model = both(name, "batched_mm" if tokens == 1 else "grouped_mm").packed
    stacks = [stack for module in packed_modules(model) for stack in packed_stacks(module).values()]
    sizes = [math.prod(stack.shape[1:]) * stack.dtype.itemsize for stack in stacks]
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", 2 * max(sizes))  # then 2 or 4 of 8 matrices are a wave
    unpack_late(model, torch.device("meta"))
    kernel, num = str(CASES[name].format.kernel), PICKED if tokens == 1 else EXPERTS
    slow, slower = (planned(model, tokens, {kernel: rate}) for rate in (1e7, 5e6))
    assert slower.step_s - slow.step_s == pytest.approx(num * sum(sizes) / 1e7, rel=1e-3)
    others = {"mxfp4", "float8", "int4"} - {kernel}
    assert planned(model, tokens, {kernel: 1e7} | dict.fromkeys(others, 1e3)).step_s == slow.step_s


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_a_token_unpacks_both_stacks_by_one_operator(name: str) -> None:
    """Its time is not saved where packed rows are compressed, too."""
    model = both(name).packed
    unpack_late(model, torch.device("meta"))
    assert unpack_kernels_of(model) == {CASES[name].format.kernel}
    config = OffloadConfig.from_kwargs(device_budget=4 * model_nbytes(model), codec="none")
    inputs = sketch_of(model, None, config, machine()).inputs
    unpacks = [op for ops in inputs.demands[0].work.values() for op in ops if op.unpacks]
    assert {op.unpacks for op in unpacks} == unpack_kernels_of(model)
    assert len(unpacks) == len(packed_modules(model))
    assert all(op.picked == PICKED / EXPERTS for op in unpacks)
    stack_nbytes = sum(math.prod(s.shape[1:]) for s in packed_stacks(packed_modules(model)[0]).values()) * 2
    assert inputs.demands[0].activation_nbytes > PICKED * stack_nbytes, "rows of both stacks, at a time"
    last = len(inputs.grains) - 1  # experts are units of their own
    picked = inputs.planner(last).profile(inputs.grains[last]).picked
    assert {(each.share, each.copy_s) for each in picked} == {(0.0, 0.0), (PICKED / EXPERTS, 0.0)}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_rates_of_the_formats_of_a_model_are_requested(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is offloaded, and predictions use them. A plain model needs none."""
    asked: list[frozenset[str]] = []

    def with_unpacking(_: object, profile: Profile, kernels: frozenset[str], **__: object) -> Profile:
        asked.append(kernels)
        return replace(profile, **{unpack_rate(kernel): 1e4 for kernel in kernels})

    monkeypatch.setattr("weightstream.inputs.machine.with_unpacking", with_unpacking)
    seconds = []
    for model in both(name):
        budget = 4 * model_nbytes(model)
        with weightstream.offload(model, device="cpu", device_budget=budget, codec="none") as streamer:
            seconds.append(streamer.plan.step_s)
    kernel = CASES[name].format.kernel
    assert asked == [{kernel}, set()]
    assert seconds[0] > 1 > seconds[1], "unpacking takes seconds at that rate"
