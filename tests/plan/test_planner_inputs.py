"""Whether a plan that is predicted to be faster is worth the move of weights to it."""

from __future__ import annotations

from dataclasses import replace

from test_planner import PREFILL, SMALL, decoder, inputs_of

from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine
from weightstream.plan.planner_inputs import is_worth, moved_nbytes


def planned(percent: int) -> tuple[Machine, Plan]:
    """A machine, and the plan of the small decoder there for that share of the weights."""
    manifest = decoder("block", **SMALL)
    planner = inputs_of(SMALL, PREFILL, grains=("block",), device_budget=manifest.nbytes * percent // 100).planners[0]
    return planner.machine, planner(manifest)


def other(plan: Plan, num: int = 2, faster: float = 2.0) -> Plan:
    """A plan with fewer residents whose steps are so many times faster."""
    return replace(plan, resident=plan.resident - set(sorted(plan.resident)[:num]), step_s=plan.step_s / faster)


def test_a_small_gain_is_not_worth_a_move() -> None:
    machine, plan = planned(60)
    plan = replace(plan, step_s=100.0)
    assert is_worth(plan, other(plan, faster=1 / 0.96), machine)
    assert not is_worth(plan, other(plan, faster=1 / 0.98), machine)
    assert not is_worth(plan, plan, machine)
    assert not is_worth(plan, other(plan, faster=0.5), machine)


def test_a_gain_must_pay_for_the_move_in_500_steps() -> None:
    machine, plan = planned(60)
    found = other(plan)
    moved_s = sum(plan.manifest.aliases[alias] for alias in plan.resident ^ found.resident) / 5e9
    assert moved_s
    for gain_s, pays in ((1.1 * moved_s / 500, True), (0.9 * moved_s / 500, False)):
        assert is_worth(replace(plan, step_s=2 * gain_s), replace(found, step_s=gain_s), machine) is pays


def test_the_host_must_hold_what_comes_home() -> None:
    machine, plan = planned(60)
    plan = replace(plan, step_s=100.0)
    for free_nbytes, fits in ((plan.manifest.nbytes, True), (plan.manifest.nbytes - 1, False)):
        assert is_worth(plan, other(plan), replace(machine, host_free_nbytes=free_nbytes)) is fits


def test_what_moves_is_what_has_another_place_or_form() -> None:
    _, plan = planned(60)
    aliases = sorted(plan.resident)[:3]
    assert moved_nbytes(plan, plan) == 0
    assert moved_nbytes(plan, replace(plan, ring_nbytes=2 * plan.ring_nbytes)) == 0
    nbytes = sum(plan.manifest.aliases[alias] for alias in aliases)
    for found in (
        replace(plan, resident=plan.resident.difference(aliases)),
        replace(plan, resident=plan.resident.difference(aliases), mapped=plan.mapped.union(aliases)),
        replace(plan, mapped=plan.mapped.union(aliases)),
        replace(plan, disk=frozenset(aliases)),
        replace(plan, manifest=plan.manifest.coded(dict.fromkeys(aliases, (3, 512)))),
    ):
        assert moved_nbytes(plan, found) == moved_nbytes(found, plan) == nbytes
