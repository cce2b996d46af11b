"""The proof of a plan: every rule of its schedules, checked by walks over several steps. Trusts no planner."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from weightstream.errors import InvariantError
from weightstream.plan.expert_cache import MAX_PREFETCHED_ROWS
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import ALIGN_NBYTES, Schedule

_STEPS = 3  # the first one, one that wraps around, and one in the steady state


def prove(plan: Plan) -> None:
    """Raise `InvariantError` with every rule that the plan breaks."""
    if broken := list(violations(plan)):
        raise InvariantError("the plan is wrong: " + "; ".join(broken))


def violations(plan: Plan) -> Iterator[str]:
    """The rules that a plan breaks, a sentence each."""
    shape = list(_shape(plan))
    yield from shape
    if not shape:
        yield from _homes(plan)
        yield from _schedules(plan)


def _shape(plan: Plan) -> Iterator[str]:
    num = len(plan.manifest.units)
    if len(plan.extents) != num:
        yield f"{len(plan.extents)} extents for {num} units"
    kinds = [plan.what, *(schedule.what for schedule in plan.schedules)]
    if len(kinds) != len(set(kinds)):
        yield f"two schedules for one kind of step: {kinds}"
    for schedule in (plan.schedule(plan.what), *plan.schedules):
        if len(schedule.after) != len(schedule.order):
            yield f"fills after {len(schedule.after)} positions of {len(schedule.order)}"
        for unit in (*schedule.first, *schedule.fills()):
            if not 0 <= unit < num:
                yield f"a fill names unit {unit} of {num}"
        for unit in schedule.order:
            if not 0 <= unit < num:
                yield f"the order of a {schedule.what} step names unit {unit} of {num}"


def _homes(plan: Plan) -> Iterator[str]:
    if plan.budget is not None and plan.device_nbytes > plan.budget:
        yield f"device bytes {plan.device_nbytes} > budget {plan.budget}"
    aliases = plan.manifest.aliases
    if unknown := plan.resident - aliases.keys():
        yield f"resident alias groups that no unit has: {sorted(unknown)}"
    if wrong := (plan.mapped - aliases.keys()) | (plan.mapped & plan.resident):
        yield f"zero-copy alias groups that no unit has, or that are resident: {sorted(wrong)}"
    if not 0 <= plan.ahead <= MAX_PREFETCHED_ROWS:
        yield f"{plan.ahead} rows are prefetched; at most {MAX_PREFETCHED_ROWS} can be"
    if wrong := (plan.cached - aliases.keys()) | (plan.cached & (plan.resident | plan.mapped)):
        yield f"cached alias groups that no unit has, or that are elsewhere: {sorted(wrong)}"
    if not 0 <= plan.shared_nbytes <= min(plan.buffer_nbytes, plan.slots_nbytes):
        yield f"{plan.shared_nbytes} bytes of the buffer are slots, of {plan.buffer_nbytes} and {plan.slots_nbytes}"
    if plan.own_buffer_nbytes % ALIGN_NBYTES:
        yield f"slots start at byte {plan.own_buffer_nbytes} of the buffer, which is not aligned"
    if plan.slots_nbytes % ALIGN_NBYTES:
        yield f"the buffer starts after {plan.slots_nbytes} bytes of slots, which is not aligned"
    if shared := [alias for alias in sorted(plan.cached & aliases.keys()) if len(plan.manifest.users[alias]) > 1]:
        yield f"cached alias groups of several units, of which each would have slots: {shared}"
    if wrong := (plan.disk - aliases.keys()) | (plan.disk & plan.placed):
        yield f"alias groups on disk that no unit has, or that do not stream: {sorted(wrong)}"
    for index, (unit, extent) in enumerate(zip(plan.manifest.units, plan.extents, strict=True)):
        if extent.offset < 0 or extent.offset + extent.nbytes > plan.ring_nbytes:
            yield f"unit {index} lies at {extent} in a ring of {plan.ring_nbytes}"
        if extent.offset % ALIGN_NBYTES:
            yield f"unit {index} starts at byte {extent.offset}, which is not aligned"
        if unit.enclosing and extent.nbytes:  # it is in use while they run, so its weights must be resident
            yield f"unit {index} encloses others and streams"
        end = 0
        for alias, offset in plan.streamed(index).items():
            if offset < end or offset % ALIGN_NBYTES:
                yield f"{alias} of unit {index} at {offset} overlaps its neighbour or is not aligned"
            end = offset + aliases[alias]
        coded = unit.coded()
        if mixed := coded.keys() & plan.mapped:
            yield f"{sorted(mixed)} of unit {index} are compressed and zero-copy"
        if unit.enclosing and coded:
            yield f"unit {index} encloses others and is compressed: they share the buffer"
        if unit.enclosing and (cached := sorted(plan.cached & unit.aliases().keys())):
            yield f"unit {index} encloses others, which use the buffer, and has {cached} cached"
        if end > extent.nbytes:
            yield f"unit {index} needs {end} bytes, its extent has {extent.nbytes}"


def _schedules(plan: Plan) -> Iterator[str]:
    """Walk steps of each kind, and steps of each kind after those of each other one."""
    every = [plan.schedule(plan.what), *plan.schedules]
    for schedule in every:
        for unit in {*schedule.first, *schedule.fills()} - set(schedule.order):
            yield f"unit {unit} is filled, but no position reads it"
        ring = _Ring(plan)
        for unit in schedule.first:
            yield from ring.fill(unit, "before the first step")
        for step in range(_STEPS):
            yield from ring.step(schedule, f"step {step}")
    for before, after in permutations(every, 2):
        ring = _Ring(plan, can_skip=True)
        for schedule in (before, before, after, after, before):
            yield from ring.begin(schedule)
            yield from ring.step(schedule, f"{before.what} and {after.what} steps in turn, {schedule.what}")


class _Ring:
    """The units in the ring: a fill destroys those that it overwrites, and a position must find its unit intact.

    `can_skip`: fills of units that are in the ring are skipped, as the engine does, and not reported.
    """

    def __init__(self, plan: Plan, *, can_skip: bool = False) -> None:
        self._plan = plan
        self._can_skip = can_skip
        self._intact: set[int] = set()
        self._unread: set[int] = set()

    def begin(self, schedule: Schedule) -> Iterator[str]:
        """Begin a step after one of another kind, whose fills for its own next step may be overwritten unread."""
        self._unread &= set(schedule.first)
        for unit in schedule.first:
            yield from self.fill(unit, f"before a {schedule.what} step")

    def step(self, schedule: Schedule, when: str) -> Iterator[str]:
        for position, (unit, fills) in enumerate(schedule.cursor().step()):
            if self._plan.streams(unit) and unit not in self._intact:
                yield f"{when}, position {position}: unit {unit} is read before it is filled"
            self._unread.discard(unit)
            for refill in fills:
                yield from self.fill(refill, f"{when}, position {position}")

    def fill(self, unit: int, when: str) -> Iterator[str]:
        extents = self._plan.extents
        if unit in self._intact:
            if self._can_skip:
                return
            yield f"{when}: unit {unit} is filled though it is in the ring"
        if not self._plan.streams(unit):
            yield f"{when}: unit {unit} is filled but does not stream"
        for other in [o for o in self._intact if o != unit and extents[o].overlaps(extents[unit])]:
            if other in self._unread:
                yield f"{when}: unit {unit} overwrites unit {other}, which is not read yet"
            self._intact.discard(other)
        self._intact.add(unit)
        self._unread.add(unit)
