"""Turns: the components of a pipeline run one after another, and have device memory in turn. Decides; pure values.

All of them pass their streamed weights through one ring, and each may keep a part of the rest for good. What stays
saves its bytes as often as its component runs, so the one that moves most chooses first, and the others have what it
leaves; each keeps at least what a plan of it cannot stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightstream.errors import PlanError
from weightstream.plan.candidates import Share, aligned_nbytes
from weightstream.plan.plan import Plan
from weightstream.plan.problem import Prospect
from weightstream.plan.report import PlanReport
from weightstream.plan.schedule import aligned
from weightstream.plan.search import always_resident
from weightstream.plan.units import human, milliseconds

_BISECTIONS = 10


def shares(prospects: Mapping[str, Prospect], times: Mapping[str, int], budget: int) -> dict[str, tuple[Share, Plan]]:
    """What each component may keep, the ring of all, and its plan, in `budget` bytes; `times` says how often each runs.

    Raises `PlanError` with the arithmetic where they have no room.
    """
    least = {name: _least_kept(prospect) for name, prospect in prospects.items()}
    total = sum(least.values())
    order = sorted(prospects, key=lambda name: -times.get(name, 1) * prospects[name].grains[0].nbytes)
    ring = 0
    for name in order:
        ring = _ring_of(prospects[name], Share(least[name], ring), budget - total)
        if total + ring > budget:
            raise _no_room(prospects, least, budget)
    first, others = order[0], total - least[order[0]]
    plan = prospects[first].within(budget - others).plan()[1]  # the ring that suits it best
    ring = max(ring, min(aligned(plan.ring_nbytes) + plan.buffer_nbytes, budget - total))
    found: dict[str, tuple[Share, Plan]] = {}
    left = budget - total - ring
    for name in order:
        plan = prospects[name].sharing(Share(least[name] + left, ring)).plan()[1]
        kept = max(least[name], min(least[name] + left, aligned_nbytes(plan.manifest, plan.resident)))
        found[name] = Share(kept, ring), plan
        left -= kept - least[name]
    share, plan = found[order[0]]
    found[order[0]] = Share(share.kept_nbytes + left, ring), plan  # for plans that learn
    return found


def _least_kept(prospect: Prospect) -> int:
    """Bytes that stay whatever the budget, in the grain in which these are least."""
    return min(aligned_nbytes(grain, always_resident(grain)) for grain in prospect.grains)


def _ring_of(prospect: Prospect, share: Share, most: int) -> int:
    """The least ring, from that of the share on, through which the component can stream; more than `most`: none."""

    def works(ring: int) -> bool:
        return prospect.sharing(Share(share.kept_nbytes, ring)).has_plan()

    low, high = share.ring_nbytes, most
    if low and works(low):
        return low
    if high <= low or not works(high):
        return max(most, low) + 1
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return aligned(high)


def _no_room(prospects: Mapping[str, Prospect], least: Mapping[str, int], budget: int) -> PlanError:
    """With the budget that would do."""
    total, rings = sum(least.values()), dict[str, int]()
    for name, prospect in prospects.items():
        most = aligned(2 * prospect.grains[0].nbytes)
        rings[name] = _ring_of(prospect, Share(least[name], 0), most)
    name = max(rings, key=rings.__getitem__)
    ring = aligned(rings[name])
    return PlanError(
        f"device budget {human(budget)} ({budget} bytes) < {human(total)} that all components must keep on the device "
        f"+ a ring of {human(ring)} for the largest unit of {name} = {human(total + ring)} ({total + ring} bytes): "
        "raise the budget, or use a smaller dtype"
    )


@dataclass(frozen=True, kw_only=True)
class ComponentTurn:
    """Steps of one component in a row."""

    component: str
    entry: str  # the method that is called
    num: int  # of calls
    plan: Plan  # the one in force, with the predictions of such a step
    cold_s: float  # seconds of the fills that the turn begins with

    @property
    def seconds(self) -> float:
        return self.num * self.plan.step_s + self.cold_s


@dataclass(frozen=True, kw_only=True)
class PipelinePlan(PlanReport):
    """The prediction of one call of a pipeline: the turns of its components, in order, and bytes of device memory."""

    NUMBERS = (
        *("seconds", "bound_s", "copied_s", "computed_s", "copied_nbytes", "device_nbytes", "block_nbytes"),
        *("activation_nbytes", "workspace_nbytes", "peak_nbytes", "shortage"),
    )

    turns: tuple[ComponentTurn, ...]
    plans: Mapping[str, Plan]  # those in force, by component
    block_nbytes: int  # memory that the components have in turn
    workspace_nbytes: int = 0  # memory of libraries and the allocator, besides weights and activations
    free_nbytes: int = 0  # memory of the device for all of these; 0: unknown
    notes: tuple[str, ...] = ()  # what the plan does not cover

    @property
    def seconds(self) -> float:
        """Predicted seconds of a call, without the pipeline's own code."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def device_nbytes(self) -> int:
        """Bytes of weights on the device: those that stay, and the memory that components have in turn."""
        return self.block_nbytes + sum(plan.resident_nbytes for plan in self.plans.values())

    @property
    def activation_nbytes(self) -> int:
        """The most bytes of activations that any step takes."""
        return max((turn.plan.activation_nbytes for turn in self.turns), default=0)

    @property
    def peak_nbytes(self) -> int:
        """Bytes of device memory that a call takes at most."""
        return self.device_nbytes + self.activation_nbytes + self.workspace_nbytes

    @property
    def shortage(self) -> str | None:
        """The arithmetic, where a call takes more than the device has free; None: it fits, or this is unknown."""
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
        """A lower bound of the seconds of these plans: the sum over turns of compute or link, whichever is longer."""
        return sum(turn.num * max(turn.plan.compute_s, turn.plan.copy_s) for turn in self.turns)

    @property
    def copied_s(self) -> float:
        """Seconds that the link is busy in a call."""
        return sum(turn.num * turn.plan.copy_s for turn in self.turns)

    @property
    def computed_s(self) -> float:
        """Seconds that a call computes if it never waits for a copy."""
        return sum(turn.num * turn.plan.compute_s for turn in self.turns)

    def _more_numbers(self) -> dict[str, Any]:
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
        return {"notes": list(self.notes), "turns": turns}

    @property
    def beside(self) -> str:
        """The memory of a call besides weights, as text."""
        workspace = f" and {human(self.workspace_nbytes)} of workspace" if self.workspace_nbytes else ""
        return f"{human(self.activation_nbytes)} of activations at most{workspace}"

    def rows(self) -> list[tuple[str, ...]]:
        """A line for each turn: component, calls, resident, ring, moved, activations, seconds."""
        return [
            (
                turn.component,
                f"{turn.num} x {turn.entry}",
                human(turn.plan.resident_nbytes),
                human(turn.plan.ring_nbytes + turn.plan.buffer_nbytes),
                human(turn.num * turn.plan.step_nbytes),
                human(turn.plan.activation_nbytes) if turn.plan.activation_nbytes else "?",
                milliseconds(turn.seconds),
            )
            for turn in joined(self.turns)
        ]

    def summary(self) -> str:
        """A table of the turns, and what a call takes."""
        heads = ("component", "steps", "resident", "ring", "moves", "activations", "predicted")
        rows = [heads, *self.rows()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(heads))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = f"{self.seconds:.2f} s per call; device: {human(self.device_nbytes)} of weights, {self.beside}"
        return "\n".join([*lines, total])

    def predictions(self) -> dict[str, str]:
        return {"device memory may run out": self.shortage} if self.shortage else {}


def joined(turns: Sequence[ComponentTurn]) -> list[ComponentTurn]:
    """Turns of one component and entry that take the same, as one: components may alternate inside of a step."""
    found: dict[tuple[str, str, float], ComponentTurn] = {}
    for turn in turns:
        key = turn.component, turn.entry, turn.plan.step_s
        before = found.get(key)
        num, cold_s = (before.num, before.cold_s) if before else (0, 0.0)
        found[key] = ComponentTurn(
            component=turn.component, entry=turn.entry, num=num + turn.num, plan=turn.plan, cold_s=cold_s + turn.cold_s
        )
    return list(found.values())
