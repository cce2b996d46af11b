"""A recording: the effect of one captured graph on the ring, what it needs before a launch, and fills it leaves due.

A graph is made of edges. So a copy is placed where its unit is first waited for, after the reads that it must follow,
and still runs as early as the ring allows. The cursor moves as the engine's does; but where the engine queues the fills
that are due, a recording compares with the ring's contents that the plan has at the end of the graph.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from weightstream.errors import InvariantError, OffloadError
from weightstream.plan.schedule import FORWARD, Cursor
from weightstream.runtime.devices.backend import Backend, Event, Side
from weightstream.runtime.ring.engine import Engine, GraphOutcome

# [Note: graphs and the wrap-around]
#
# At its capture a graph has to assume what will be in the ring at its launch. It assumes the units that the plan has in
# the ring at the position where it starts, and it leaves those that the plan has there at the position where it ends
# (`Cursor.needed`), except for bytes of units in use at that point. Both depend on the position only. So graphs may be
# launched in any order in which each starts where the last one ended: one captured step after another, pieces of a
# step captured for different batches, graphs after eager steps.
#
# Units that the plan has in the ring at the end, and that the graph has not filled, belong to the next graph or step
# (at the end of a step: the wrap-around). Inside of the graph these copies would delay its end. So:
#
#   deferred   The launch is announced (`Graphs.replay`). The engine queues these copies after each launch, and they
#              overlap the rest of the graph: each follows an external event, recorded inside of the graph after the
#              last read of the bytes. Such a record takes 40 us (H200), so only reads that a copy of the next step
#              follows have one. Assumed units are filled before each launch where they are missing, so that a wrong
#              assumption costs time only; the graph's reads wait for those copies by external events, too.
#   alone      The graph is launched by an engine that announces nothing except `sync()`. The graph makes these copies
#              itself and ends joined. Assumed units cannot be checked; only the position counts.
#
# A graph is at most one step: only its first unit may begin one. A unit that was waited for in one piece and is
# released in a later one is in use at the start of the later one: it is read there without a wait, and not overwritten.


class DeferredFill(NamedTuple):
    """A fill that each launch leaves due: its copy follows the event of the last read, or the end of the graph."""

    unit: int
    read: Event | None


class Recording:
    """Stands in for the engine during one capture. `before`: the piece of the step that precedes this one."""

    def __init__(
        self, engine: Engine, backend: Backend, before: Recording | None = None, *, deferred: bool = True
    ) -> None:
        plan = engine.plan
        self._engine = engine
        self._backend = backend
        self._deferred = deferred
        position = None if before is None else before._cursor.position
        self._cursor: Cursor = plan.schedule(FORWARD).cursor(position)
        self._in_use: Counter[int] = Counter() if before is None else before._in_use.copy()
        self._is_empty = True  # no unit was waited for or released in this graph
        self._held: dict[int, Event | None] = {}  # units in the ring -> their fill, until compute follows it
        self._assume({*self._needed(), *self._in_use})
        self._held |= dict.fromkeys(self._in_use)
        self._reads: dict[int, Event] = {}  # the last read of each unit, oldest first
        self._external: dict[int, Event] = {}  # of these, reads that a copy outside of the graph can wait for
        self.begins = False  # the first unit of a step is in this graph
        self.entry = set(self._in_use)  # units that this graph reads before it fills them
        self.filled: list[int] = []
        self.due: list[int] = []  # units that belong in the ring at the end and are not there
        self._outcome = GraphOutcome()
        self._deferred_fills: list[DeferredFill] = []
        fork = backend.edge()  # by which the copy stream joins the capture
        backend.record(Side.COMPUTE, fork)
        backend.wait(Side.COPY, fork)

    @property
    def is_whole(self) -> bool:
        """Whether all units of a step that stream are in this graph."""
        return self.begins and not any(map(self._marks_position, self._cursor.order[self._cursor.position :]))

    @property
    def in_use(self) -> bool:
        """Whether a unit was waited for and not released, in this graph or in the pieces before."""
        return bool(self._in_use)

    def restarts(self, unit: int) -> bool:
        """Whether a wait for the unit would begin a step, and not go on with the step of the pieces before."""
        return self._is_empty and (unit in self._in_use or self._cursor.is_behind(unit))

    def wait(self, unit: int) -> None:
        """Order compute after the unit's fill, which is placed now if the unit is not in the ring."""
        if not self._marks_position(unit):
            return
        if self.restarts(unit):
            self._restart()
        self._is_empty = False
        self._cursor.reach(unit)
        self.begins = self.begins or not any(map(self._marks_position, self._cursor.order[: self._cursor.position]))
        if not self._engine.plan.streams(unit):
            return
        if unit not in self._held:
            self._fill(unit)
        elif self._held[unit] is not None:
            self.entry.add(unit)
        if (filled := self._held[unit]) is not None:
            self._backend.wait(Side.COMPUTE, filled)
            self._held[unit] = None
        self._in_use[unit] += 1

    def release(self, unit: int) -> None:
        """The unit's last kernel is recorded."""
        if not self._marks_position(unit):
            return
        if not self._engine.plan.streams(unit):
            self._is_empty = False
            self._cursor.release(unit)
            return
        if not self._in_use[unit]:
            raise InvariantError(f"unit {unit} is released, and no wait for it was captured")
        self._is_empty = False
        self._in_use -= Counter([unit])
        if unit in self._in_use:
            return
        self._external.pop(unit, None)
        self._reads.pop(unit, None)
        self._reads[unit] = self._backend.edge()
        self._backend.record(Side.COMPUTE, self._reads[unit])
        fills = self._cursor.release(unit)
        if self._deferred and not set(fills) <= set(self._cursor.order[self._cursor.position :]):  # the next step's
            self._external[unit] = self._backend.event()
            self._backend.record(Side.COMPUTE, self._external[unit])

    def end(self) -> None:
        """Join the copies that compute does not follow yet, before the capture ends."""
        due = self._missing()
        if not self._deferred:
            for unit in due:
                self._fill(unit)
            due = []
        join = self._backend.edge()
        self._backend.record(Side.COPY, join)
        self._backend.wait(Side.COMPUTE, join)
        # Computed once: a launch reads these and `entry` only.
        self.due = due
        readers = map(self._last_reader, due)  # no copy outside of the graph can wait for an edge
        self._deferred_fills = [
            DeferredFill(unit, None if reader is None else self._external.get(reader))
            for unit, reader in zip(due, readers, strict=True)
        ]
        filled, sharing = set(self.filled), self._engine.sharing
        self._outcome = GraphOutcome(
            num_fills=len(self.filled),
            filled_nbytes=sum(self._engine.plan.unit_nbytes[unit] for unit in self.filled),
            read=frozenset(self._reads),
            left=frozenset(self._held.keys() & (self._reads.keys() | filled)),
            gone=frozenset(filled.union(*(sharing[unit] for unit in filled)) - self._held.keys()),
        )

    def after_launch(self) -> None:
        """Tell the engine the contents of the ring, and queue the fills that are due."""
        end = self._engine.after_graph(self._outcome)
        for unit, read in self._deferred_fills:
            if not self._engine.is_in_ring(unit):
                self._engine.fill(unit, after=end if read is None else read)

    def _missing(self) -> list[int]:
        """Units that belong in the ring now and are not there, in the order in which their bytes were read."""
        missing = [(self._last_reader(unit), unit) for unit in self._needed() if unit not in self._held]
        places = {unit: place for place, unit in enumerate(self._reads)}
        return [unit for _, unit in sorted(missing, key=lambda m: -1 if m[0] is None else places[m[0]])]

    def _needed(self) -> list[int]:
        """Units that the plan has in the ring at the cursor, except those that share bytes with units in use."""
        plan, sharing = self._engine.plan, self._engine.sharing
        return [u for u in self._cursor.needed() if plan.streams(u) and not sharing[u] & self._in_use.keys()]

    def _marks_position(self, unit: int) -> bool:
        """Whether the unit counts in where a step begins and ends: if it streams, or, where none does, if it opens."""
        plan = self._engine.plan
        return plan.streams(unit) or (not plan.ring_nbytes and plan.opens(unit))

    def _assume(self, units: set[int]) -> None:
        self._held = {unit: self._engine.fences[unit].filled if self._deferred else None for unit in units}

    def _restart(self) -> None:
        """Begin a step where the pieces before may have left one midway, after an error in the engine that owns them.

        Their units are in use no more. The earlier pieces may also belong to this step, in another order: the assumed
        contents of the ring are valid either way.
        """
        assumed = self._held.keys()
        self._in_use.clear()
        self.entry.clear()
        self._cursor.begin()
        self._assume({unit for unit in self._needed() if unit in assumed})

    def _last_reader(self, unit: int) -> int | None:
        """The last unit in this graph that read bytes which belong to this one, too."""
        sharing = self._engine.sharing[unit]
        return next((other for other in reversed(self._reads) if other == unit or other in sharing), None)

    def _fill(self, unit: int) -> None:
        # One edge, from the last read, which follows the others: with an edge from each, a copy starts 60 us later.
        if (last := self._last_reader(unit)) is not None:
            self._backend.wait(Side.COPY, self._reads[last])
        for other in (unit, *self._engine.sharing[unit]):
            if self._in_use[other]:
                raise OffloadError(
                    f"unit {unit} and unit {other} are in use at once and share bytes of the ring: such a step cannot "
                    "be captured; run it eager, or give a larger budget"
                )
            self._held.pop(other, None)
        self._backend.copy(self._engine.copies[unit])
        self._held[unit] = self._backend.edge()
        self._backend.record(Side.COPY, self._held[unit])
        self.filled.append(unit)
