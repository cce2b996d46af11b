"""The engine: fill, wait, release, and the fence of every unit. Obeys a plan; decides nothing about placement.

Three waits order the two streams (the tests drop each of them in turn):
  fill     the copy stream waits for `drained` of every unit that shares bytes: no overwrite before the last read
  wait     the compute stream waits for `filled` of the unit: no read before the fill
  release  `drained` is recorded after the unit's last kernel, and before any fill that follows
Two copies into the same bytes need no event between them: both run on the copy stream, in order.

The cursor says which fills are due (plan/schedule.py, [Note: skipped units]). Of these, the engine skips
units that are in the ring already, so a repeated unit costs nothing, and units that share bytes with a unit in use. A
unit that is waited for but was not filled, for any reason, is filled then: no order of units gives wrong bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch.autograd import profiler

from weightstream.errors import InvariantError
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import FORWARD, Cursor, Schedule, units_sharing_bytes
from weightstream.runtime.devices.backend import Backend, Copy, Event, Side
from weightstream.runtime.ring.shared_memory import SharedMemory, Tenure
from weightstream.runtime.ring.timeline import Timeline, profiler_range


class State(Enum):
    """The life of an extent's bytes."""

    EMPTY = "empty"  # the bytes hold nothing of this unit
    FILLING = "filling"  # the copy is queued
    READY = "ready"  # compute is ordered after the copy
    IN_USE = "in use"  # between wait and release
    DRAINING = "draining"  # released; the bytes are still whole until another unit is filled over them

    next: tuple[State, ...]  # an attribute: a lookup in a dict of states would call Python's `Enum.__hash__`


State.EMPTY.next = (State.FILLING,)
State.FILLING.next = (State.READY, State.EMPTY)
State.READY.next = (State.IN_USE, State.EMPTY)
State.IN_USE.next = (State.DRAINING,)
State.DRAINING.next = (State.READY, State.EMPTY)


class Fence:
    """The pair of events of one unit's extent, and its state."""

    __slots__ = ("drained", "filled", "in_flight", "last_read", "state", "uses")

    def __init__(self, filled: Event, drained: Event) -> None:
        self.state = State.EMPTY
        self.filled = filled
        self.drained = drained
        self.last_read: Event = None  # `drained`, or the end of a graph; None once the copy stream has waited for it
        self.in_flight = False  # `filled` was recorded and compute has not waited for it yet, in any state
        self.uses = 0  # forwards of the unit between wait and release

    def move(self, state: State) -> None:
        if state not in self.state.next:
            raise InvariantError(f"a fence cannot go from {self.state.value} to {state.value}")
        self.state = state

    def left_by_a_graph(self) -> None:
        """The graph that was launched last leaves the bytes in the ring, whatever the state was before."""
        if self.state is State.IN_USE:
            raise InvariantError("a graph was launched while a unit that it uses was in use outside of it")
        self.state = State.DRAINING


@dataclass(kw_only=True, slots=True)
class Counters:
    """Counts of a model's steps and fills since it was offloaded, under all plans."""

    steps: int = 0
    fills: int = 0
    filled_nbytes: int = 0
    unplanned_fills: int = 0

    def count(self, nbytes: int, *, planned: bool) -> None:
        """Count a fill."""
        self.fills += 1
        self.filled_nbytes += nbytes
        self.unplanned_fills += not planned


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOutcome:
    """The effect of each launch of a graph on the ring.

    `read`: units that the graph reads. `left`: units whose bytes are in the ring at its end. `gone`: units whose bytes
    the graph overwrites and does not fill again.
    """

    num_fills: int = 0
    filled_nbytes: int = 0
    read: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()


class Copies(Protocol):
    """The copies of a fill, by unit."""

    def __getitem__(self, unit: int, /) -> Sequence[Copy]: ...


class Engine:
    """Runs one plan on one backend. Not thread-safe: the streamer lets one step in at a time."""

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        copies: Copies,
        counters: Counters | None = None,
        timeline: Timeline | None = None,
        block: SharedMemory | None = None,
        open_units: Sequence[object] = (),
    ) -> None:
        self.plan: Plan
        self.open_units = open_units  # units whose forwards run now
        self._block = block  # memory that several models use in turn; None: the ring is only this model's
        self.counters = counters or Counters()
        self.timeline = timeline or Timeline(backend)
        self.timeline.bind(plan)
        self._backend = backend
        self.copies: Copies = copies
        self.fences = [Fence(backend.event(), backend.event()) for _ in plan.extents]
        self.sharing = [frozenset(units) for units in units_sharing_bytes(plan.extents)]
        self.live: set[int] = set()  # at least all units whose bytes are in the ring, or are still read
        self._cursors: dict[str, Cursor] = {}  # by kind of step
        self._cursor: Cursor  # of the step under way, or of the last one
        self.reschedule(plan)
        self._tenure = Tenure()

    def reschedule(self, plan: Plan) -> None:
        """Follow the schedules of a plan that has all weights at the same addresses, from the next step on."""
        self.plan = plan
        every = (plan.schedule(plan.what), *plan.schedules)
        self._cursors = {schedule.what: schedule.cursor() for schedule in every}
        self._cursor = self._cursors[plan.schedule(FORWARD).what]

    def prime(self) -> None:
        """End the step, and start the fills that the next forward begins with, unless they were started."""
        schedule = self.plan.schedule(FORWARD)
        if self._is_at(schedule):
            self._fill_due(self._cursor.end())
        self._fill_due(schedule.first)

    def begin_step(self, what: str = FORWARD) -> None:
        """Begin a step at position 0 of the order of its kind."""
        schedule = self.plan.schedule(what)
        is_same = self._is_at(schedule)
        due = self._cursor.begin()
        if self._block is not None:
            self._tenure.step()
        # otherwise another kind of step, or another model, left the ring
        self._fill_due(due if is_same and self._block is None else schedule.first)

    def resume(self, what: str) -> None:
        """Go on with the last step of a kind where it stood, after a step of another kind."""
        if not self._is_at(self.plan.schedule(what)):
            self._fill_due(self._cursor.needed())

    def comes_to_forward(self, what: str) -> bool:
        """Whether the next position in the order of this kind of step has the first unit again: a second forward."""
        cursor = self._cursors[self.plan.schedule(what).what]
        return 0 < cursor.position < len(cursor.order) and cursor.order[cursor.position] == cursor.order[0]

    def _is_at(self, schedule: Schedule) -> bool:
        """Whether the cursor was that of this schedule; it is from now on."""
        before, self._cursor = self._cursor, self._cursors[schedule.what]
        return before is self._cursor

    def is_behind(self, unit: int) -> bool:
        """Whether the unit stands in the order, but only before the cursor."""
        return self._cursor.is_behind(unit)

    def begin_if_behind(self, unit: int) -> None:
        """For callers that announce no steps: begin one if the unit is in the order, but only before the cursor."""
        if self._cursor.is_behind(unit):
            self.counters.steps += 1
            self.begin_step()

    def is_blocked(self, unit: int) -> bool:
        """Whether a unit in use, of this model or another, shares bytes with this unit, which then cannot be filled."""
        if self._block is not None and self._block.is_held_against(self):
            return True
        if self.fences[unit].state is not State.EMPTY:
            return False
        for other in self.live & self.sharing[unit]:  # noqa: SIM110 - runs twice a unit; a generator is 3 calls
            if self.fences[other].state is State.IN_USE:
                return True
        return False

    def wait(self, unit: int) -> None:
        """Make compute wait until the unit is in its extent; fill the unit now if no fill was queued."""
        if due := self._cursor.reach(unit):
            self._fill_due(due)
        fence = self.fences[unit]
        waited = self.timeline.begins("wait", unit) if self.timeline.is_on else None
        if fence.state is State.EMPTY:
            self.fill(unit, planned=False)
        if fence.state is State.FILLING:
            self._follow(fence)
            if waited is not None:
                self.timeline.ends(waited)
            fence.move(State.READY)
        elif fence.state is State.DRAINING:
            fence.move(State.READY)
        if fence.state is State.READY:
            fence.move(State.IN_USE)
        fence.uses += 1

    def release(self, unit: int) -> None:
        """The unit's last kernel is queued: start the fills that waited for it."""
        fence = self.fences[unit]
        if fence.state is not State.IN_USE:
            raise InvariantError(f"unit {unit} is released while it is {fence.state.value}")
        fence.uses -= 1
        if fence.uses:
            return
        self._backend.record(Side.COMPUTE, fence.drained)
        if self.timeline.is_on:
            self.timeline.releases(unit)
        fence.last_read = fence.drained
        fence.move(State.DRAINING)
        if due := self._cursor.release(unit):
            self._fill_due(due)

    def abandon(self) -> None:
        """Release all units that an error has left in use."""
        for unit, fence in enumerate(self.fences):
            if fence.state is State.IN_USE:
                fence.uses = 1
                self.release(unit)

    def settle(self, spared: Iterable[int] = ()) -> None:
        """Make compute wait for all copies in flight, except those of `spared`; also for copies overwritten since."""
        for unit, fence in enumerate(self.fences):
            if fence.in_flight and unit not in spared:
                self._follow(fence)
                if fence.state is State.FILLING:
                    fence.move(State.READY)

    def _follow(self, fence: Fence) -> None:
        """Make compute wait for the unit's copy in flight."""
        try:
            self._backend.wait(Side.COMPUTE, fence.filled)
        except BaseException:  # the copy failed, or the wait was cut short: the unit is filled again when it is needed
            if fence.state is State.FILLING:
                fence.move(State.EMPTY)
            fence.in_flight = False
            raise
        fence.in_flight = False

    def take_over(self, *, decodes: bool = False) -> None:
        """Take the memory that several models share; `decodes`: a kernel writes to it next, before any fill."""
        if self._block is not None:
            self._block.enter(self, decodes=decodes)

    def yield_up(self) -> None:
        """Take note that another model has the memory: it holds no unit of this model, and no copy waits for one."""
        for fence in self.fences:
            if fence.state is not State.EMPTY:
                fence.move(State.EMPTY)
            fence.last_read, fence.in_flight = None, False
        self.live.clear()
        self._tenure.end()

    def forget(self, units: Iterable[int]) -> None:
        """Have these units filled again: their homes changed, so their bytes in the ring are stale."""
        for unit in units:
            if self.fences[unit].state in (State.FILLING, State.READY, State.DRAINING):
                self.fences[unit].move(State.EMPTY)

    def forget_all(self) -> None:
        """The contents of the ring are unknown: fill every unit again, after the kernels that may read it."""
        now = self._backend.event()
        self._backend.record(Side.COMPUTE, now)
        self._backend.wait(Side.COPY, now)
        self.forget(self.held())

    def is_in_ring(self, unit: int) -> bool:
        """Whether the unit's bytes are in the ring or in flight."""
        return self.fences[unit].state is not State.EMPTY

    def held(self) -> list[int]:
        """Units whose bytes are in the ring or in flight."""
        return [u for u, fence in enumerate(self.fences) if fence.state is not State.EMPTY]

    def close(self) -> None:
        """Drop all references to the memory that fills read and write."""
        self.copies = ()

    def before_graph(self, reads: AbstractSet[int]) -> None:
        """Fill the units that a graph reads before it fills them, and make compute wait for all other copies.

        The graph itself waits for the copies of `reads`. No other copy may be in flight into bytes that it fills.
        """
        self.take_over()
        for unit in reads:
            if self.fences[unit].state is State.EMPTY:
                self.fill(unit, planned=False)
        self.settle(reads)

    def after_graph(self, outcome: GraphOutcome) -> Event:
        """Account for a launched graph; returns the event of its end, after which its units may be overwritten."""
        end = self._backend.event()
        self._backend.record(Side.COMPUTE, end)
        self.counters.fills += outcome.num_fills
        self.counters.filled_nbytes += outcome.filled_nbytes
        self.forget(outcome.gone)
        for unit in outcome.left:
            self.fences[unit].left_by_a_graph()
        for unit in outcome.read:
            self.fences[unit].last_read = end
        self.live |= outcome.left
        self.live |= outcome.read
        return end

    def _fill_due(self, units: Iterable[int]) -> None:
        """Queue the fills that are due; a unit that cannot be filled now is filled when it is waited for."""
        # after the last step before another model's turn: the other one overwrites fills for a step after this
        if self._block is not None and self._tenure.is_last_step:
            left = set(self._cursor.order[self._cursor.position :])
            units = [unit for unit in units if unit in left]
        for unit in units:
            if self.fences[unit].state is State.EMPTY and not self.is_blocked(unit):
                self.fill(unit)

    def fill(self, unit: int, after: Event | None = None, *, planned: bool = True) -> None:
        """Queue the unit's copy after the event `after`, or after the last read of every unit that shares bytes."""
        fence = self.fences[unit]
        copies = self.copies[unit]  # may raise an error of the source: before any change
        if self._block is not None:
            self._block.enter(self)
        if after is not None:
            self._backend.wait(Side.COPY, after)
        for other in (unit, *sorted(self.live & self.sharing[unit])):
            held = self.fences[other]
            if held.last_read is not None and after is None:
                self._backend.wait(Side.COPY, held.last_read)
                held.last_read = None
            if other != unit and held.state is not State.EMPTY:
                held.move(State.EMPTY)
            if held.last_read is None:
                self.live.discard(other)
        self.live.add(unit)
        timed = self.timeline.begins("fill", unit, planned=planned) if self.timeline.is_on else None
        if profiler._is_profiler_enabled:
            self._copy_profiled(unit)
        else:
            self._backend.copy(copies)
        if timed is not None:
            self.timeline.ends(timed)
        self._backend.record(Side.COPY, fence.filled)
        fence.in_flight = True
        fence.move(State.FILLING)
        self.counters.count(self.plan.unit_nbytes[unit], planned=planned)

    def _copy_profiled(self, unit: int) -> None:
        """The same copy, with a range of the unit's name in torch's profiler."""
        with profiler_range(self.plan.manifest.units[unit].name, "fill "):
            self._backend.copy(self.copies[unit])
