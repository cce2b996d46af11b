"""Plans of a pipeline: its components run one after another, and use device memory in turn. Pure values.

All components stream through one ring, and each may keep weights resident in the rest of the budget. A resident weight
saves its copy as often as its component runs. So the component that moves most bytes in a call chooses first, and the
others share the rest. Each component keeps at least the weights that cannot stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from weightstream.errors import PlanError
from weightstream.plan.candidates import Share, aligned_nbytes
from weightstream.plan.plan import Plan
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.report import PlanReport
from weightstream.plan.schedule import aligned
from weightstream.plan.search import always_resident
from weightstream.plan.units import human, rough_seconds
from weightstream.settings.speeds import Target

_BISECTIONS = 10


class PlannedShare(NamedTuple):
    """A component's share of the budget, and its plan in it."""

    share: Share
    plan: Plan


def shares(inputs: Mapping[str, PlannerInputs], times: Mapping[str, int], budget: int) -> dict[str, PlannedShare]:
    """The share of each component in the budget, and its plan. All shares have the same ring.

    Args:
        inputs: the planner's inputs of each component, by name.
        times: the steps of each component in a call, by name; 1 where it is missing.
        budget: bytes of device memory for the weights of all components.

    Raises:
        PlanError: the components do not fit; the message holds the arithmetic.
    """
    least = {name: _least_kept(each) for name, each in inputs.items()}
    total = sum(least.values())
    order = sorted(inputs, key=lambda name: -times.get(name, 1) * inputs[name].grains[0].nbytes)
    ring = 0
    for name in order:
        ring = _ring_of(inputs[name], Share(least[name], ring), budget - total)
        if total + ring > budget:
            raise _no_room(inputs, least, budget)
    first, others = order[0], total - least[order[0]]
    plan = inputs[first].at_budget(budget - others).plan().plan  # its ring is the best one for this component
    ring = max(ring, min(aligned(plan.ring_nbytes) + plan.buffer_nbytes, budget - total))
    planned: dict[str, PlannedShare] = {}
    spare = budget - total - ring
    for name in order:
        plan = replace(inputs[name], share=Share(least[name] + spare, ring)).plan().plan
        kept = max(least[name], min(least[name] + spare, aligned_nbytes(plan.manifest, plan.resident)))
        planned[name] = PlannedShare(Share(kept, ring), plan)
        spare -= kept - least[name]
    share, plan = planned[first]
    # the first component gets the rest, for plans that are made anew once steps were watched
    planned[first] = PlannedShare(Share(share.kept_nbytes + spare, ring), plan)
    return planned


def _least_kept(inputs: PlannerInputs) -> int:
    """Bytes that are resident at any budget, in the grain with the fewest of them."""
    return min(aligned_nbytes(grain, always_resident(grain)) for grain in inputs.grains)


def _ring_of(inputs: PlannerInputs, share: Share, most: int) -> int:
    """Bytes of the smallest ring, at least the share's, through which the component can stream.

    If no ring up to `most` is enough, the result is larger than `most`.
    """

    def works(ring: int) -> bool:
        return replace(inputs, share=Share(share.kept_nbytes, ring)).has_plan()

    low, high = share.ring_nbytes, most
    if low and works(low):
        return low
    if high <= low or not works(high):
        return max(most, low) + 1
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return aligned(high)


def _no_room(inputs: Mapping[str, PlannerInputs], least: Mapping[str, int], budget: int) -> PlanError:
    """The error of a budget that is too small, with the budget that would be enough."""
    total, rings = sum(least.values()), dict[str, int]()
    for name, each in inputs.items():
        most = aligned(2 * each.grains[0].nbytes)
        rings[name] = _ring_of(each, Share(least[name], 0), most)
    name = max(rings, key=rings.__getitem__)
    ring = aligned(rings[name])
    return PlanError(
        f"device budget {human(budget)} ({budget} bytes) < {human(total)} that all components must keep on the device "
        f"+ a ring of {human(ring)} for the largest unit of {name} = {human(total + ring)} ({total + ring} bytes): "
        "raise the budget"
    )


@dataclass(frozen=True, kw_only=True)
class ComponentTurn:
    """Consecutive steps of one component.

    Attributes:
        component: its name in the pipeline.
        entry: the method that is called, such as "forward".
        num: the number of calls.
        plan: its plan in force, with the times that are predicted for such a call.
        cold_s: seconds of the first copy of the turn, which no compute hides.
    """

    component: str
    entry: str
    num: int
    plan: Plan
    cold_s: float

    @property
    def seconds(self) -> float:
        return self.num * self.plan.step_s + self.cold_s


@dataclass(frozen=True, kw_only=True)
class PipelinePlan(PlanReport):
    """Predicted time and device memory of one call of a pipeline.

    Attributes:
        turns: the turns of its components, in order.
        plans: the plan in force of each component, by name.
        block_nbytes: bytes of device memory that the components use in turn.
        workspace_nbytes: bytes that libraries and the allocator keep besides weights and activations.
        free_nbytes: free bytes of device memory for all of these; 0: unknown.
        notes: parts of the call that the plan leaves out, a sentence each.
    """

    NUMBERS: ClassVar[tuple[str, ...]] = (
        *("seconds", "bound_s", "copied_s", "computed_s", "copied_nbytes", "device_nbytes", "block_nbytes"),
        *("activation_nbytes", "workspace_nbytes", "peak_nbytes", "shortage"),
    )

    turns: tuple[ComponentTurn, ...]
    plans: Mapping[str, Plan]
    block_nbytes: int
    workspace_nbytes: int = 0
    free_nbytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Predicted seconds of a call, without the pipeline's own computations between components."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def run_s(self) -> float:
        """As `seconds`: the time by which plans for different budgets are compared."""
        return self.seconds

    @property
    def num_tokens(self) -> int:
        """A call makes no text."""
        return 0

    @property
    def machine_text(self) -> str:
        return self._any.machine_text

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return self._any.on_cpu

    @property
    def is_measured(self) -> bool:
        """Whether the rates of the machine were measured."""
        return self._any.is_measured

    @property
    def _any(self) -> Plan:
        """The plan of any component: all have the same machine."""
        return next(iter(self.plans.values()))

    @property
    def is_rough(self) -> bool:
        """Whether predicted times may be wrong by tens of percent."""
        return any(plan.is_rough for plan in self.plans.values())

    def speed_text(self, target: Target) -> str:
        """The predicted speed, in the unit of a target, which is seconds of a call."""
        return f"{self.seconds_text(self.seconds)} per call"

    def seconds_text(self, seconds: float) -> str:
        """Predicted seconds with as many digits as they deserve."""
        return rough_seconds(seconds) if self.is_rough else f"{seconds:.2f} s"

    @property
    def device_nbytes(self) -> int:
        """Bytes of weights on the device: residents, and the memory that is used in turn."""
        return self.block_nbytes + sum(plan.resident_nbytes for plan in self.plans.values())

    @property
    def activation_nbytes(self) -> int:
        """Bytes of activations of the step that needs most."""
        return max((turn.plan.activation_nbytes for turn in self.turns), default=0)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of device memory that a call takes."""
        return self.device_nbytes + self.activation_nbytes + self.workspace_nbytes

    @property
    def shortage(self) -> str | None:
        """The arithmetic, if that is more than the free bytes of the device; None: it fits, or that is unknown."""
        if not self.free_nbytes or self.peak_nbytes <= self.free_nbytes:
            return None
        return (
            f"weights {human(self.device_nbytes)} + activations {human(self.activation_nbytes)} + workspace "
            f"{human(self.workspace_nbytes)} = {human(self.peak_nbytes)} > {human(self.free_nbytes)} free on the "
            "device: lower device_budget, or the size or number of images"
        )

    @property
    def copied_nbytes(self) -> int:
        """Bytes that cross the link in a call."""
        return sum(turn.num * turn.plan.step_nbytes for turn in self.turns)

    @property
    def bound_s(self) -> float:
        """Lower bound of the seconds of a call with these plans: per turn, the longer time of compute or link."""
        return sum(turn.num * max(turn.plan.compute_s, turn.plan.copy_s) for turn in self.turns)

    @property
    def copied_s(self) -> float:
        """Seconds that the link is busy in a call."""
        return sum(turn.num * turn.plan.copy_s for turn in self.turns)

    @property
    def computed_s(self) -> float:
        """Seconds of a call that never waits for a copy."""
        return sum(turn.num * turn.plan.compute_s for turn in self.turns)

    def numbers(self) -> dict[str, Any]:
        """Bytes and predicted seconds by name, for JSON: of the call, and of each of its turns."""
        turns = [
            {
                "component": turn.component,
                "entry": turn.entry,
                "num": turn.num,
                "seconds": turn.seconds,
                **turn.plan.numbers(),
            }
            for turn in joined(self.turns)
        ]
        return {**super().numbers(), "notes": list(self.notes), "turns": turns}

    @property
    def beside(self) -> str:
        """The device memory that a call needs besides weights, as text."""
        workspace = f" and {human(self.workspace_nbytes)} of workspace" if self.workspace_nbytes else ""
        return f"{human(self.activation_nbytes)} of activations at most{workspace}"

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the summary, a row per turn: component, calls, resident, ring, moved, activations, seconds."""
        return [
            (
                turn.component,
                f"{turn.num} x {turn.entry}",
                human(turn.plan.resident_nbytes),
                human(turn.plan.ring_nbytes + turn.plan.buffer_nbytes),
                human(turn.num * turn.plan.step_nbytes),
                human(turn.plan.activation_nbytes) if turn.plan.activation_nbytes else "?",
                turn.plan.seconds_text(turn.seconds),
            )
            for turn in joined(self.turns)
        ]

    def summary(self) -> str:
        """A table of the turns, and the time and device memory of a call."""
        heads = ("component", "steps", "resident", "ring", "moves", "activations", "predicted")
        rows = [heads, *self.rows()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(heads))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = (
            f"{self.seconds_text(self.seconds)} per call; device: {human(self.device_nbytes)} of weights, {self.beside}"
        )
        return "\n".join([*lines, total])

    def predictions(self) -> dict[str, str]:
        return {"device memory may run out": self.shortage} if self.shortage else {}


def joined(turns: Sequence[ComponentTurn]) -> list[ComponentTurn]:
    """The turns with those merged that have the same component, entry and time: components may alternate in a step."""
    found: dict[tuple[str, str, float], ComponentTurn] = {}
    for turn in turns:
        key = turn.component, turn.entry, turn.plan.step_s
        before = found.get(key)
        num, cold_s = (before.num, before.cold_s) if before else (0, 0.0)
        found[key] = ComponentTurn(
            component=turn.component, entry=turn.entry, num=num + turn.num, plan=turn.plan, cold_s=cold_s + turn.cold_s
        )
    return list(found.values())
