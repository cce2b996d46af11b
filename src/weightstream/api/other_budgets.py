"""Plans of one model at other budgets: a sweep that never gets slower, and the least budget that reaches a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from weightstream.errors import PlanError
from weightstream.plan.pipeline import PipelinePlan
from weightstream.plan.plan import Plan
from weightstream.plan.units import exact, human
from weightstream.settings.speeds import Target

P = TypeVar("P", Plan, PipelinePlan)
P_co = TypeVar("P_co", Plan, PipelinePlan, covariant=True)
# The least budget is found to 1/256 to 1/512 of the memory that the fastest plan takes, and to 1 KiB at least: in 8 to
# 16 steps, of which one is bisected.
_BITS, _BISECTIONS, _LEAST_BITS = 9, 5, 10
MOST_PLANS = (1 << (_BITS - _BISECTIONS)) + _BISECTIONS


class Planning(Protocol[P_co]):
    """A model, or a pipeline, that is planned at any budget."""

    def plan_at(self, device_budget: int, /) -> P_co | None:
        """The plan for a budget in bytes; None: no plan fits."""


class AtBudget(NamedTuple, Generic[P]):
    """A plan, and a budget in bytes that it fits in."""

    budget: int
    plan: P


def _nothing() -> None:
    """The default of a function that is called after each plan, such as to advance a bar."""


def swept(
    planning: Planning[P], first: AtBudget[P], budgets: Iterable[int], advance: Callable[[], object] = _nothing
) -> list[AtBudget[P]]:
    """The `first` plan and plans for these budgets, by budget. No plan is slower than one for less memory.

    A plan for less memory fits in more. The search compares plans by a weighted mean of the times of prompts and of
    tokens. So its plan for a budget may have slower tokens than that for less memory, which then takes its place.
    Budgets for which there is no plan are left out.
    """

    def planned() -> Iterator[AtBudget[P]]:
        yield first
        for budget in budgets:
            if budget != first.budget and (plan := planning.plan_at(budget)) is not None:
                yield AtBudget(budget, plan)
            advance()

    return list(never_slower(sorted(planned(), key=lambda at: at.budget)))


def never_slower(by_budget: Iterable[AtBudget[P]]) -> Iterator[AtBudget[P]]:
    """The same budgets, which ascend, each with the fastest plan of those so far."""
    best: P | None = None
    for budget, plan in by_budget:
        best = plan if best is None or plan.run_s <= best.run_s else best
        yield AtBudget(budget, best)


def reaching(
    planning: Planning[P], first: AtBudget[P], target: Target, advance: Callable[[], object] = _nothing
) -> AtBudget[P]:
    """The least budget that reaches a target, and its plan.

    Budgets are tried from the smallest one on, in coarse steps, and then by bisection of the first step that reaches
    the target: the plans of the search may get slower with more memory, see `swept`.

    Args:
        planning: makes the plans.
        first: the plan for the largest budget.
        target: the speed.
        advance: called after each further plan; there are up to `MOST_PLANS`.

    Raises:
        PlanError: no plan that was tried reaches it; the text has the speed of the fastest.
    """
    limit_s, held, fastest = target.step_s(first.plan.num_tokens), first.plan.device_nbytes, first.plan

    def reached(budget: int) -> AtBudget[P] | None:
        nonlocal fastest
        plan = planning.plan_at(budget)
        advance()
        if plan is None:
            return None
        fastest = min(fastest, plan, key=lambda each: each.run_s)
        return AtBudget(budget, plan) if plan.run_s <= limit_s else None

    grain = 1 << max(_LEAST_BITS, held.bit_length() - _BITS)
    step = grain << _BISECTIONS
    tried = (reached(budget) for budget in range(step, min(held + step, first.budget + 1), step))
    best = next((at for at in tried if at is not None), first)
    if best.plan.run_s > limit_s:
        raise PlanError(
            f"target {target} is out of reach: {fastest.speed_text(target)} at best, with "
            f"{human(fastest.device_nbytes)} of weights on {fastest.machine_text}"
        )
    low = (best.budget - 1) // step * step  # the step before
    if best is first and low >= held:
        return first  # a search for just the bytes that it takes does not find it
    while (middle := (low + best.budget) // (2 * grain) * grain) > low:
        at = reached(middle)
        low, best = (middle, best) if at is None else (low, at)
    return best


def reached_text(at: AtBudget[P], target: Target) -> str:
    """A line on the budget that reaches a target."""
    return f"{target} takes --device-budget {exact(at.budget)}, which gives {at.plan.speed_text(target)}"
