"""The engine: fill, wait, release, and the fence of every unit. Obeys a plan; decides nothing about placement.

What orders the two streams (the tests drop each of these in turn):
  fill     the copy stream waits for `drained` of every unit that shares bytes: no overwrite before the last read
  wait     the compute stream waits for `filled` of the unit: no read before the fill
  release  `drained` is recorded after the unit's last kernel, and before any fill that follows
A copy that is overtaken by another into the same bytes needs no event: both run on the copy stream, in order.

The cursor says which fills are due (plan/schedule.py, [Note: skipped units]). The engine leaves out those of units
that are there already, which is why a repeated unit costs nothing, and those whose bytes a unit in use holds. A unit
that is waited for and was not filled, for whatever reason, is filled then: no order of units gives wrong bytes.
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
from weightstream.plan.schedule import Cursor, units_sharing_bytes
from weightstream.runtime.devices.backend import Backend, Copy, Event, Side
from weightstream.runtime.ring.shared_memory import SharedMemory, Tenure
from weightstream.runtime.ring.timeline import Timeline, profiler_range


class State(Enum):
    """The life of an extent's bytes."""

    EMPTY = "empty"  # holds nothing of this unit
    FILLING = "filling"  # the copy is queued
    READY = "ready"  # compute is ordered after the copy
    IN_USE = "in use"  # between wait and release
    DRAINING = "draining"  # released; the bytes are still whole until another unit is filled over them

    next: tuple[State, ...]  # on the member, as to hash one is a call in Python


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
        self.last_read: Event = None  # `drained`, or the end of a graph, until the copy stream has waited for it
        self.in_flight = False  # `filled` was recorded and compute has not waited for it yet, whatever the state
        self.uses = 0

    def move(self, state: State) -> None:
        if state not in self.state.next:
            raise InvariantError(f"a fence cannot go from {self.state.value} to {state.value}")
        self.state = state

    def left_by_a_graph(self) -> None:
        """The graph that was launched last leaves the bytes in the ring, whatever was there before."""
        if self.state is State.IN_USE:
            raise InvariantError("a graph was launched while a unit that it uses was in use outside of it")
        self.state = State.DRAINING


@dataclass(kw_only=True, slots=True)
class Counters:
    """What an engine has done since the model was offloaded."""

    steps: int = 0
    fills: int = 0
    filled_nbytes: int = 0
    unplanned_fills: int = 0

    def count(self, nbytes: int, *, planned: bool) -> None:
        """A fill was made."""
        self.fills += 1
        self.filled_nbytes += nbytes
        self.unplanned_fills += not planned


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOutcome:
    """What each launch of a graph does with the ring: it read units, and filled some; `left` of these are there at its
    end, and what is `gone` was filled over."""

    num_fills: int = 0
    filled_nbytes: int = 0
    read: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()


class Copies(Protocol):
    """What a fill of each unit moves."""

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
        self.plan = plan
        self.open_units = open_units  # those whose forwards run
        self._block = block  # whose memory other models have in turn
        self.counters = counters or Counters()
        self.timeline = timeline or Timeline(backend)
        self.timeline.bind(plan)
        self._backend = backend
        self.copies: Copies = copies
        self.fences = [Fence(backend.event(), backend.event()) for _ in plan.extents]
        self.sharing = [frozenset(units) for units in units_sharing_bytes(plan.extents)]
        self.live: set[int] = set()  # all whose bytes are in the ring or still read, and maybe more
        self._cursor = Cursor(plan.manifest.order, plan.after)
        self._tenure = Tenure()

    def prime(self) -> None:
        """End the step, and start the fills that the next one begins with, where they are not made."""
        self._fill_due(self._cursor.end())
        self._fill_due(self.plan.first)

    def begin_step(self) -> None:
        """Go back to position 0."""
        due = self._cursor.begin()
        if self._block is None:
            self._fill_due(due)
            return
        self._tenure.step()
        self._fill_due(self.plan.first)  # another model may have had the memory, or was to have it now

    def is_behind(self, unit: int) -> bool:
        """Whether the unit stands in the order, but only before the cursor."""
        return self._cursor.is_behind(unit)

    def begin_if_behind(self, unit: int) -> None:
        """Where no caller says when a step begins: it does when a unit comes again that the order has passed."""
        if self._cursor.is_behind(unit):
            self.counters.steps += 1
            self.begin_step()

    def is_blocked(self, unit: int) -> bool:
        """Whether a unit in use, of another model too, holds bytes of this one, so that it cannot be filled now."""
        if self._block is not None and self._block.is_held_against(self):
            return True
        if self.fences[unit].state is not State.EMPTY:
            return False
        for other in self.live & self.sharing[unit]:  # noqa: SIM110 - runs twice a unit; a generator is 3 calls
            if self.fences[other].state is State.IN_USE:
                return True
        return False

    def wait(self, unit: int) -> None:
        """Make compute wait until the unit is in its extent; fill it now if nobody has."""
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
        """Release what an error kept from being released."""
        for unit, fence in enumerate(self.fences):
            if fence.state is State.IN_USE:
                fence.uses = 1
                self.release(unit)

    def settle(self, spared: Iterable[int] = ()) -> None:
        """Make compute wait for every copy in flight but those of `spared`, that of a unit overtaken since too."""
        for unit, fence in enumerate(self.fences):
            if fence.in_flight and unit not in spared:
                self._follow(fence)
                if fence.state is State.FILLING:
                    fence.move(State.READY)

    def _follow(self, fence: Fence) -> None:
        """Make compute wait for the copy that is on its way."""
        try:
            self._backend.wait(Side.COMPUTE, fence.filled)
        except BaseException:  # the copy failed, or the wait was cut short: it is made again when it is needed
            if fence.state is State.FILLING:
                fence.move(State.EMPTY)
            fence.in_flight = False
            raise
        fence.in_flight = False

    def take_over(self, *, decodes: bool = False) -> None:
        """Have the memory that several models share; `decodes`: a kernel writes there, and no fill comes before it."""
        if self._block is not None:
            self._block.enter(self, decodes=decodes)

    def yield_up(self) -> None:
        """Another model has the memory from now on: nothing of this one is there, and nobody need wait for it."""
        for fence in self.fences:
            if fence.state is not State.EMPTY:
                fence.move(State.EMPTY)
            fence.last_read, fence.in_flight = None, False
        self.live.clear()
        self._tenure.end()

    def forget(self, units: Iterable[int]) -> None:
        """The home of these units changed: what the ring holds of them is stale."""
        for unit in units:
            if self.fences[unit].state in (State.FILLING, State.READY, State.DRAINING):
                self.fences[unit].move(State.EMPTY)

    def forget_all(self) -> None:
        """What is in the ring is not known: all is filled anew, behind whatever was queued to read it."""
        now = self._backend.event()
        self._backend.record(Side.COMPUTE, now)
        self._backend.wait(Side.COPY, now)
        self.forget(self.held())

    def is_in_ring(self, unit: int) -> bool:
        """Whether its bytes are in the ring or on their way."""
        return self.fences[unit].state is not State.EMPTY

    def held(self) -> list[int]:
        """Units whose bytes are in the ring or on their way."""
        return [u for u, fence in enumerate(self.fences) if fence.state is not State.EMPTY]

    def close(self) -> None:
        """Let go of the memory that fills read and write."""
        self.copies = ()

    def before_graph(self, reads: AbstractSet[int]) -> None:
        """Fill the units that a graph reads before it fills them; make compute wait for all copies but theirs.

        The graph waits for theirs where it reads them. No other may be on its way into bytes that the graph fills.
        """
        self.take_over()
        for unit in reads:
            if self.fences[unit].state is State.EMPTY:
                self.fill(unit, planned=False)
        self.settle(reads)

    def after_graph(self, outcome: GraphOutcome) -> Event:
        """A graph was launched. What it read or filled may be overwritten once it has ended; returns that event."""
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
        """Queue the fills that the plan asks for now; a unit that cannot be filled is when it is waited for."""
        if (
            self._block is not None and self._tenure.is_last_step
        ):  # another model is next: it fills over what is for a step after this
            left = set(self._cursor.order[self._cursor.position :])
            units = [unit for unit in units if unit in left]
        for unit in units:
            if self.fences[unit].state is State.EMPTY and not self.is_blocked(unit):
                self.fill(unit)

    def fill(self, unit: int, after: Event | None = None, *, planned: bool = True) -> None:
        """Queue the unit's copy behind `after`, or behind the last read of every unit that shares bytes."""
        fence, copies = self.fences[unit], self.copies[unit]  # an error of the source changes nothing
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
