"""Plans of training steps: bytes of forward and backward, their times, memory besides weights, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from test_planner import GIB, GRAINS, H200, HEAD, MIB, SMALL, TABLE, decoder, demand, inputs_of, machine

from weightstream.errors import PlanError
from weightstream.plan import cost, search
from weightstream.plan.check import prove
from weightstream.plan.manifest import Manifest, Op, Workload
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Training
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.schedule import FORWARD, TRAIN

STEP = Workload(batch=1, tokens=2048, context=2048, trains=True)
TRAINED = 640 * MIB
BUDGET = 60 * MIB  # of 250; a block is 25 MiB, table and head are 32 each


def turned(manifest: Manifest) -> Manifest:
    return replace(manifest, order=(*manifest.order, *reversed(manifest.order)))


def training_inputs(
    *, tokens: int = 2048, recomputes: bool = False, shape: Mapping[str, int] = SMALL, **settings: Any
) -> PlannerInputs:
    """The small decoder in a training step whose backward takes three times as long as its forward."""
    inputs = inputs_of(shape, replace(STEP, tokens=tokens), **settings)
    demands = []
    for manifest in inputs.grains:
        work = demand(manifest, replace(STEP, tokens=tokens))
        training = Training(
            backward={name: tuple(replace(op, flops=3 * op.flops, nbytes=3 * op.nbytes) for op in ops)
                      for name, ops in work.work.items()},
            forward_order=manifest.order, num_trained=40_000_000, trained_nbytes=TRAINED, loss_nbytes=2 * GIB,
            recomputes=recomputes,
        )  # fmt: skip
        demands.append(replace(work, activation_nbytes=3 * GIB, training=training))
    return replace(inputs, grains=tuple(map(turned, inputs.grains)), demands=tuple(demands))


def planned(**settings: Any) -> Plan:
    plan = training_inputs(**settings).plan().plan
    prove(plan)
    return plan


@pytest.mark.parametrize("budget", [BUDGET, 120 * MIB])
def test_a_step_copies_twice_what_device_memory_lacks(budget: int) -> None:
    plan = planned(device_budget=budget, codec="none")
    streamed = plan.manifest.nbytes - plan.resident_nbytes - plan.mapped_nbytes
    most = max(plan.unit_nbytes)
    assert streamed > plan.ring_nbytes
    assert 0 <= plan.step_nbytes - 2 * (streamed - plan.ring_nbytes) <= 2 * most


def test_plans_are_of_training_with_a_schedule_for_evaluation() -> None:
    plan = planned(device_budget=BUDGET)
    num = len(plan.manifest.order) // 2
    assert (plan.what, plan.workload, plan.trained_nbytes) == (TRAIN, replace(STEP), TRAINED)
    assert plan.schedule(FORWARD).order == plan.manifest.order[:num]
    assert plan.graph_s == plan.step_s
    assert plan.beside_nbytes == 3 * GIB + TRAINED
    assert "training, batch 1, tokens 2048" in str(plan)


def test_no_plan_is_below_its_bound() -> None:
    """The search drops candidates by their bounds: one that is too high would hide the best plan."""
    inputs = training_inputs(device_budget=BUDGET, codec="none")
    num = 0
    for grain, manifest in enumerate(inputs.grains[:2]):
        planner = inputs.planner(grain)
        profile = planner.profile(manifest)
        for candidate in search.candidates(manifest, BUDGET, profile):
            assert candidate.plan().step_s >= candidate.bound_s - 1e-12
            num += 1
        for option in planner.candidates(manifest, []):
            plans = [each.plan() for each in option.make() or ()]  # type: ignore[union-attr]
            assert not plans or min(plan.step_s for plan in plans) >= option.bound_s - 1e-12
    assert num > 10


def test_a_turn_of_the_backward_takes_longer() -> None:
    """Whatever a forward copies, it waits for; a backward computes longer than it copies. One mean would hide that."""
    inputs = training_inputs(tokens=8192, device_budget=BUDGET, codec="none")
    planner, manifest = inputs.planner(0), inputs.grains[0]
    profile = planner.profile(manifest)
    seconds = {}
    for position, unit in enumerate(manifest.order):
        seconds.setdefault(unit, []).append(profile.unit_s[unit] + profile.more_s[position].device_s)
    for forward, backward in seconds.values():
        assert backward > 1.5 * forward
    resident = cost.predicted(Plan.build(manifest, frozenset(manifest.aliases), 0), profile)
    assert resident.graph_s == pytest.approx(sum(map(sum, seconds.values())))
    streaming = Plan.build(manifest, frozenset({TABLE, HEAD}), 2 * max(manifest.units[1].nbytes, MIB) + MIB)
    one_mean = cost.simulated_s(streaming, replace(profile, more_s=()))
    assert cost.simulated_s(streaming, profile).graph_s > 1.05 * one_mean.graph_s


def test_the_default_budget_leaves_room_for_training() -> None:
    inputs = training_inputs()
    workspace = H200.workspace_nbytes
    assert inputs.budget == 130 * GIB - 3 * GIB - TRAINED - workspace - 130 * GIB // 50


def test_refusals_contain_the_memory_of_training() -> None:
    besides = r"activations 3.0GiB \(2.0GiB of them for the loss\) \+ adapters, gradients and optimizer 640.0MiB"
    with pytest.raises(PlanError, match=rf"largest unit.*Training takes {besides}, on top of the budget\.$"):
        planned(device_budget=5 * MIB)
    small = training_inputs(device_budget=BUDGET, on=machine(free_nbytes=3 * GIB))
    assert small.shortage(small.plan().plan) == (
        f"weights {small.plan().plan.device_nbytes / MIB:.1f}MiB + activations 3.0GiB (2.0GiB of them for the loss) + "
        "adapters, gradients and optimizer 640.0MiB + workspace 64.0MiB = 3.7GiB > 3.0GiB free on the device: lower "
        "device_budget, or train on fewer tokens at once"
    )


@pytest.mark.parametrize(("budget", "grain"), [(BUDGET, 0), (16 * MIB, 2)])
def test_units_are_blocks_where_these_are_recomputed_and_fit(budget: int, grain: int) -> None:
    table = {"zero_copy_params": ["embed", "head"]}
    inputs = training_inputs(recomputes=True, device_budget=budget, codec="none", **table)
    found = inputs.plan()
    assert found.grain == grain
    assert GRAINS[found.grain] == ("block" if budget == BUDGET else "matrix")


def test_work_without_a_turn_in_the_backward_counts_once() -> None:
    inputs = training_inputs(device_budget=BUDGET, codec="none")
    manifest = decoder("block", **SMALL)
    manifest = replace(manifest, order=(*manifest.order, *reversed(manifest.order[1:])))  # the table has one turn
    ops = (Op(nbytes=1000),)
    training = inputs.demands[0].training
    assert training is not None
    own = replace(training, backward={**training.backward, "embed": ops})
    planner = replace(inputs.planner(0), demand=replace(inputs.demands[0], training=own))
    profile = planner.profile(manifest)
    assert profile.more_s[0] == (0.0, 0.0)
    assert profile.unit_s[0] == pytest.approx(sum(op.seconds(profile) for op in (*planner.demand.work["embed"], *ops)))
