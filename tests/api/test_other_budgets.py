"""Plans at other budgets: sweeps that never get slower, and the least budget that reaches a target."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from test_planner import MIB, inputs_of, machine

from weightstream.api.other_budgets import MOST_PLANS, AtBudget, reaching, swept
from weightstream.errors import PlanError
from weightstream.plan.check import prove
from weightstream.plan.plan import Plan
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.runtime.devices.cuda import CUDA_PROFILE
from weightstream.settings.speeds import Target

RISING = 0  # a seed with which a plan of the search has slower tokens than one for less memory
_BUDGETS = 12


def drawn(seed: int) -> PlannerInputs:
    """A small decoder on a machine of any proportions; two of three generate text in graphs."""
    draw = random.Random(seed)
    shape = {
        "layers": draw.randint(3, 8),
        "hidden": 256 * draw.choice([1, 2, 4]),
        "inner": 256 * draw.choice([2, 4, 8]),
        "kv": 256,
        "vocab": draw.choice([1024, 8192, 32768]),
    }
    profile = replace(
        CUDA_PROFILE,
        link_bytes_per_s=10 ** draw.uniform(9.5, 11),
        device_bytes_per_s=10 ** draw.uniform(11, 12.6),
        op_launch_s=10 ** draw.uniform(-6, -4.5),
        overhead_s=10 ** draw.uniform(-5, -3.5),
    )
    inputs = inputs_of(shape, on=machine(profile=profile), device_budget=MIB, codec="none")
    is_text = seed == RISING or draw.random() < 2 / 3
    return replace(inputs, demands=tuple(replace(d, captured=d.work, is_text=is_text) for d in inputs.demands))


def budgets_of(inputs: PlannerInputs) -> list[int]:
    return [inputs.grains[0].nbytes * k // _BUDGETS for k in range(1, _BUDGETS + 1)]


def fastest(inputs: PlannerInputs) -> AtBudget[Plan]:
    budget = inputs.grains[0].nbytes
    plan = inputs.plan_at(budget)
    assert plan is not None
    return AtBudget(budget, plan)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_known", [True, False])
def test_no_plan_of_a_sweep_is_slower_than_one_for_less_memory(is_known: bool, seed: int) -> None:
    seed = RISING if is_known else seed
    print(f"{seed=}")
    inputs = drawn(seed)
    advanced: list[int] = []
    found = swept(inputs, fastest(inputs), budgets_of(inputs), lambda: advanced.append(1))
    assert len(advanced) == _BUDGETS
    times = [at.plan.run_s for at in found]
    assert times == sorted(times, reverse=True)
    own = {at.budget: inputs.plan_at(at.budget) for at in found}
    for at in found:
        assert at.plan.device_nbytes <= at.budget
        assert at.plan.run_s == min(plan.run_s for budget, plan in own.items() if plan and budget <= at.budget)
        prove(at.plan)
    assert is_known <= any(at.plan != own[at.budget] for at in found), "the search alone would not do"


def test_a_target_is_reached_with_the_least_budget(seed: int) -> None:
    """A step of the bisection below, the target is missed, and so it is with all of the coarser steps."""
    print(f"{seed=}")
    inputs = drawn(seed)
    first = fastest(inputs)
    limit_s = 1.5 * first.plan.run_s
    target, advanced = Target.parse(f"{1e3 * limit_s}ms"), list[int]()
    found = reaching(inputs, first, target, lambda: advanced.append(1))
    assert found.plan == inputs.plan_at(found.budget)
    assert found.plan.device_nbytes <= found.budget <= first.budget
    assert 0 < len(advanced) <= MOST_PLANS
    grain = 1 << (first.plan.device_nbytes.bit_length() - 9)
    for budget in (found.budget - grain, *range(32 * grain, found.budget, 32 * grain)):
        below = inputs.plan_at(budget)
        assert below is None or below.run_s > limit_s
    assert found.plan.run_s <= limit_s * (1 + 1e-9)


@pytest.mark.stress
def test_a_larger_first_budget_finds_about_the_same_one(seed: int) -> None:
    print(f"{seed=}")
    inputs = drawn(seed)
    first = fastest(inputs)
    limit_s = 1.5 * first.plan.run_s
    target = Target.parse(f"{1e3 * limit_s}ms")
    grain = 1 << (first.plan.device_nbytes.bit_length() - 9)
    found = reaching(inputs, first, target)
    larger = reaching(inputs, first._replace(budget=5 * first.budget), target)
    assert larger.plan == inputs.plan_at(larger.budget)
    assert larger.plan.run_s <= limit_s * (1 + 1e-9)
    assert larger.budget < found.budget + 32 * grain


def test_a_target_that_only_the_largest_budget_reaches() -> None:
    """As for a budget of which the fastest plan leaves bytes unused, which a search for just these does not find."""

    class Alone:
        def plan_at(self, _: int, /) -> Plan | None:
            return None

    first = fastest(drawn(RISING))._replace(budget=64 * MIB + 1)
    assert reaching(Alone(), first, Target.parse("1s")) == first


def test_a_target_that_the_largest_budget_misses_may_be_reached_with_less() -> None:
    inputs = drawn(RISING)
    less, largest = (AtBudget(b, plan) for b in budgets_of(inputs)[1:3] if (plan := inputs.plan_at(b)) is not None)
    assert less.plan.run_s < 0.95 * largest.plan.run_s
    found = reaching(inputs, largest, Target.parse(f"{1e3 * 0.95 * largest.plan.run_s}ms"))
    assert found.plan == inputs.plan_at(found.budget)
    assert found.plan.run_s <= 0.95 * largest.plan.run_s
    with pytest.raises(PlanError, match=rf"out of reach: {found.plan.rate_text(1 / less.plan.run_s)} tokens/s at best"):
        reaching(inputs, largest._replace(budget=less.budget), Target.parse("1000000000tok/s"))


def test_a_target_out_of_reach_names_the_best_speed() -> None:
    inputs = drawn(RISING)
    first = fastest(inputs)
    speed = first.plan.tokens_per_s
    assert speed is not None
    with pytest.raises(PlanError, match=rf"target {2 * speed:g} tokens/s is out of reach: ~[\d,.]+ tokens/s"):
        reaching(inputs, first, Target.parse(f"{2 * speed:f}tok/s"))
