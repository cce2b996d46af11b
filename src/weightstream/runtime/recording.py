"""A recording: what one captured graph does with the ring, what it needs before its launch and leaves to do after.

A graph is made of edges, so a copy is placed where its unit is first waited for, behind the reads that it must follow:
it runs as early as the ring allows all the same. What the plan fills for the next step is not in the graph, as the
graph would end with it: it is queued after each launch, behind an external event recorded inside (these cost 40 us
each in a graph, so only such reads have one). A graph that stands alone (`deferred=False`), launched by somebody who
tells nobody, holds these copies too and ends joined.
"""

from __future__ import annotations

from weightstream.errors import OffloadError
from weightstream.runtime.backend import Backend, Event, Side
from weightstream.runtime.engine import Engine, State


class Recording:
    """Stands in for the engine during one capture. `held`: the units in the ring when the graph starts; `before`: the
    piece of the step that precedes this one."""

    def __init__(
        self,
        engine: Engine,
        backend: Backend,
        held: set[int],
        before: Recording | None = None,
        *,
        deferred: bool = True,
    ) -> None:
        self._engine = engine
        self._backend = backend
        self.deferred = deferred
        self._order = engine.plan.manifest.order
        self._cursor: int | None = None if before is None else before._cursor
        self._inside: dict[int, Event] = {}  # units filled in here -> their fill
        self._outside = set(held)  # units filled before the graph starts, and not overwritten yet
        self._ordered: set[int] = set()  # units that compute was ordered after
        self._in_use: dict[int, int] = (
            {} if before is None else {unit: uses for unit, uses in before._in_use.items() if uses}
        )
        self._reads: dict[int, Event] = {}  # the last read of each unit, oldest first
        self._external: dict[int, Event] = {}  # of these: reads that a copy outside can wait for
        self._due: dict[int, None] = {}  # planned fills whose unit was not waited for yet
        self._ordered |= self._in_use.keys()
        self.begins = False  # the first unit of a step is in here
        self.entry = set(self._in_use)
        self.filled: set[int] = set()
        self.num_fills = 0
        self.filled_nbytes = 0
        fork = backend.edge()  # what comes first on the copy stream joins the capture by it
        backend.record(Side.COMPUTE, fork)
        backend.wait(Side.COPY, fork)

    @property
    def held(self) -> set[int]:
        """Units in the ring at the end."""
        return self._outside | set(self._inside)

    @property
    def due(self) -> list[int]:
        """Units to fill after the launch, in order of need."""
        return [unit for unit in self._due if unit not in self.held]

    @property
    def left(self) -> set[int]:
        """Units in the ring once those are filled."""
        left = self.held
        for unit in self.due:
            left = left - set(self._engine.sharing[unit]) | {unit}
        return left

    @property
    def is_whole(self) -> bool:
        """Whether all that streams in a step is in here."""
        after = () if self._cursor is None else self._order[self._cursor + 1 :]
        return self.begins and not any(map(self._engine.plan.streams, after))

    def wait(self, unit: int) -> None:
        """Order compute after the unit's fill, which is placed now if the unit is not in the ring."""
        self._due.pop(unit, None)
        self._advance(unit)
        if not self._engine.plan.streams(unit):
            return
        if unit not in self._inside and unit not in self._outside:
            self._fill(unit)
        if unit not in self._ordered:
            if unit in self._inside:
                self._backend.wait(Side.COMPUTE, self._inside[unit])
            else:
                self.entry.add(unit)
                if self.deferred:
                    self._backend.wait(Side.COMPUTE, self._engine.fences[unit].filled)
            self._ordered.add(unit)
        self._in_use[unit] = self._in_use.get(unit, 0) + 1

    def release(self, unit: int) -> None:
        """The unit's last kernel is recorded."""
        if not self._engine.plan.streams(unit):
            return
        self._in_use[unit] -= 1
        if self._in_use[unit]:
            return
        self._external.pop(unit, None)
        self._reads.pop(unit, None)
        self._reads[unit] = self._backend.edge()
        self._backend.record(Side.COMPUTE, self._reads[unit])
        if self._cursor is None or self._order[self._cursor] != unit:
            return
        following = self._order[self._cursor + 1 :]
        for refill in self._engine.plan.after[self._cursor]:
            self._due[refill] = None
            if refill not in following and self.deferred:  # the next step's
                self._external[unit] = self._backend.event()
        if unit in self._external:
            self._backend.record(Side.COMPUTE, self._external[unit])

    def end(self) -> None:
        """Join the copies that nobody waited for, before the capture ends."""
        if not self.deferred:
            for unit in self.due:
                self._fill(unit)
        join = self._backend.edge()
        self._backend.record(Side.COPY, join)
        self._backend.wait(Side.COMPUTE, join)

    def before_launch(self) -> None:
        """Fill what the graph expects in the ring; nothing else may be on its way into bytes that the graph fills."""
        for unit in self.entry:
            if self._engine.fences[unit].state is State.EMPTY:
                self._engine.fill(unit, planned=False)
        self._engine.settle(self.entry)

    def after_launch(self) -> None:
        """Tell the engine what is in the ring now, and queue the fills that are due."""
        engine = self._engine
        end = self._backend.event()
        self._backend.record(Side.COMPUTE, end)
        engine.counters.fills += self.num_fills
        engine.counters.filled_nbytes += self.filled_nbytes
        overwritten = {other for unit in self.filled for other in engine.sharing[unit]} | self.filled
        engine.forget(overwritten - self.held)
        for unit in self.held & (self._reads.keys() | self.filled):
            engine.fences[unit].left_by_a_graph()
            engine.live.add(unit)
        for unit in self._reads:
            engine.fences[unit].last_read, engine.fences[unit].reads_pending = end, True
            engine.live.add(unit)
        for unit in self.due:
            if engine.fences[unit].state is State.EMPTY:
                last = self._last_reader(unit)  # of an edge nobody outside knows: then the end of the graph
                engine.fill(unit, after=end if last is None else self._external.get(last, end))

    def _last_reader(self, unit: int) -> int | None:
        """The unit that was last to read the bytes of this one in here."""
        sharing = {unit, *self._engine.sharing[unit]}
        return next((other for other in reversed(self._reads) if other in sharing), None)

    def _fill(self, unit: int) -> None:
        # One edge, from the last read, which is behind the others: with an edge from each a copy starts 60 us late.
        if (last := self._last_reader(unit)) is not None:
            self._backend.wait(Side.COPY, self._reads[last])
        for other in (unit, *self._engine.sharing[unit]):
            if self._in_use.get(other):
                raise OffloadError(
                    f"unit {unit} and unit {other} are in use at once and share bytes of the ring: such a step cannot "
                    "be captured; run it eager, or give a larger budget"
                )
            if self.deferred and other in self._outside and other not in self._reads:
                # its fill may still be on its way
                self._backend.wait(Side.COPY, self._engine.fences[other].filled)
                self.entry.add(other)
            self._outside.discard(other)
            self._inside.pop(other, None)
            self._ordered.discard(other)
        self._backend.copy(self._engine.copies[unit])
        self._inside[unit] = self._backend.edge()
        self._backend.record(Side.COPY, self._inside[unit])
        self.filled.add(unit)
        self.num_fills += 1
        self.filled_nbytes += self._engine.plan.unit_nbytes[unit]

    def _advance(self, unit: int) -> None:
        """Move to the unit's next position; what the plan fills after the positions passed over is due."""
        start = 0 if self._cursor is None else self._cursor + 1
        if unit not in self._order[start:]:
            start = 0
        if unit not in self._order:
            return
        position = self._order.index(unit, start)
        for passed in range(start if self._cursor is not None else position, position):
            self._due |= dict.fromkeys(self._engine.plan.after[passed])
        self._due.pop(unit, None)
        self._cursor = position
        self.begins = self.begins or not any(map(self._engine.plan.streams, self._order[:position]))
