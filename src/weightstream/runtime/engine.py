"""The engine: fill, wait, release, and the fence of every unit. Obeys a plan; decides nothing about placement.

What orders the two streams (the tests drop each of these in turn):
  fill     the copy stream waits for `drained` of every unit that shares bytes: no overwrite before the last read
  wait     the compute stream waits for `filled` of the unit: no read before the fill
  release  `drained` is recorded after the unit's last kernel, and before any fill that follows
A copy that is overtaken by another into the same bytes needs no event: both run on the copy stream, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from weightstream.errors import InvariantError
from weightstream.plan.plan import Plan
from weightstream.plan.ring import sharing
from weightstream.runtime.backend import Backend, Copy, Event, Side


class State(Enum):
    """The life of an extent's bytes."""

    EMPTY = "empty"  # holds nothing of this unit
    FILLING = "filling"  # the copy is queued
    READY = "ready"  # compute is ordered after the copy
    IN_USE = "in use"  # between wait and release
    DRAINING = "draining"  # released; the bytes are still whole until another unit is filled over them


_NEXT = MappingProxyType(
    {
        State.EMPTY: {State.FILLING},
        State.FILLING: {State.READY, State.EMPTY},
        State.READY: {State.IN_USE, State.EMPTY},
        State.IN_USE: {State.DRAINING},
        State.DRAINING: {State.READY, State.EMPTY},
    }
)


class Fence:
    """The pair of events of one unit's extent, and its state."""

    __slots__ = ("drained", "filled", "reads_pending", "state", "uses")

    def __init__(self, filled: Event, drained: Event) -> None:
        self.state = State.EMPTY
        self.filled = filled
        self.drained = drained
        self.reads_pending = False  # `drained` was recorded and the copy stream has not waited for it yet
        self.uses = 0

    def move(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise InvariantError(f"a fence cannot go from {self.state.value} to {state.value}")
        self.state = state


@dataclass(kw_only=True, slots=True)
class Counters:
    """What an engine has done since the model was offloaded."""

    steps: int = 0
    fills: int = 0
    filled_nbytes: int = 0
    unplanned_fills: int = 0


class Engine:
    """Runs one plan on one backend. Not thread-safe: the streamer lets one step in at a time."""

    def __init__(
        self, plan: Plan, backend: Backend, copies: Sequence[Sequence[Copy]], counters: Counters | None = None
    ) -> None:
        self.plan = plan
        self.counters = counters or Counters()
        self._backend = backend
        self._copies = copies
        self.fences = [Fence(backend.event(), backend.event()) for _ in plan.extents]
        self._sharing = sharing(plan.extents)
        self._cursor = len(plan.manifest.order)  # the next position that has not been released

    def prime(self) -> None:
        """Start the fills that precede the first step."""
        for unit in self.plan.first:
            self._fill(unit)

    def begin_step(self) -> None:
        """Go back to position 0; what the last step left out counts as released."""
        self._pass(len(self.plan.manifest.order))
        self._cursor = 0

    def is_behind(self, unit: int) -> bool:
        """Whether the unit stands in the order, but only before the cursor."""
        order = self.plan.manifest.order
        return unit in order and unit not in order[self._cursor :]

    def is_blocked(self, unit: int) -> bool:
        """Whether a unit in use holds bytes of this one, so that it cannot be filled now."""
        if self.fences[unit].state is not State.EMPTY:
            return False
        return any(self.fences[o].state is State.IN_USE for o in self._sharing[unit])

    def wait(self, unit: int) -> None:
        """Make compute wait until the unit is in its extent; fill it now if nobody has."""
        self._advance(unit)
        fence = self.fences[unit]
        if fence.state is State.EMPTY:
            self.counters.unplanned_fills += 1
            self._fill(unit)
        if fence.state is State.FILLING:
            try:
                self._backend.wait(Side.COMPUTE, fence.filled)
            except BaseException:
                fence.move(State.EMPTY)  # the copy failed: the next wait tries again
                raise
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
        fence.reads_pending = True
        fence.move(State.DRAINING)
        order = self.plan.manifest.order
        if self._cursor < len(order) and order[self._cursor] == unit:
            self._pass(self._cursor + 1)

    def forget(self, units: Iterable[int]) -> None:
        """The home of these units changed: what the ring holds of them is stale."""
        for unit in units:
            if self.fences[unit].state in (State.FILLING, State.READY, State.DRAINING):
                self.fences[unit].move(State.EMPTY)

    def held(self) -> list[int]:
        """Units whose bytes are in the ring or on their way."""
        return [u for u, fence in enumerate(self.fences) if fence.state is not State.EMPTY]

    def close(self) -> None:
        """Let go of the memory that fills read and write."""
        self._copies = ()

    def _advance(self, unit: int) -> None:
        """Move the cursor to the unit's next position; the positions that were left out count as released."""
        order = self.plan.manifest.order
        for position in range(self._cursor, len(order)):
            if order[position] == unit:
                self._pass(position)
                return

    def _pass(self, end: int) -> None:
        """Queue the fills of every position before `end`, but not of units that were left out themselves."""
        order = self.plan.manifest.order
        for position in range(self._cursor, end):
            left_out = order[position + 1 : end]
            for unit in self.plan.after[position]:
                if unit not in left_out and self.fences[unit].state is State.EMPTY and not self.is_blocked(unit):
                    self._fill(unit)
        self._cursor = end

    def _fill(self, unit: int) -> None:
        fence = self.fences[unit]
        for other in (unit, *self._sharing[unit]):
            held = self.fences[other]
            if held.reads_pending:
                self._backend.wait(Side.COPY, held.drained)
                held.reads_pending = False
            if other != unit and held.state is not State.EMPTY:
                held.move(State.EMPTY)
        self._backend.copy(self._copies[unit])
        self._backend.record(Side.COPY, fence.filled)
        fence.move(State.FILLING)
        self.counters.fills += 1
        self.counters.filled_nbytes += self.plan.unit_nbytes[unit]
