"""The rig of the recording tests: graphs on queues of a CPU. What a graph holds runs again at each launch, its copies
on a queue of their own, and the part of a streamer that captures is driven as a user drives it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any

from rig import Rig, equal_plan, small_plan
from weightstream.plan.plan import Plan
from weightstream.runtime.backend import Copy, Event, Side
from weightstream.runtime.cpu import Worker
from weightstream.runtime.engine import Engine
from weightstream.runtime.fixed import FixedAddresses
from weightstream.testing import ClockBackend, Delay, Poison, QueueBackend, Wrapper

PLANS = {
    "one slot": equal_plan(3, 1),
    "5 units in 2 slots": equal_plan(5, 2),
    "4 units in 3 slots": equal_plan(4, 3),
    "all fit": equal_plan(3, 3),
    "uneven extents": small_plan([512, 3000, 1024, 600, 2048, 4096], 6144),
    "a wide unit between narrow ones": small_plan([512, 512, 1024, 512, 512], 1024),
    "a unit twice": equal_plan(4, 2, order=(0, 1, 2, 1, 3)),
    "a unit that no position names": equal_plan(4, 2, order=(0, 2, 3)),
}


class Inside(Enum):
    """The stream on which the copies of a graph run: the copy stream is not ordered with it."""

    COPY = "copy inside a graph"


_STREAMS: tuple[Any, ...] = (*Side, *Inside)


class GraphQueues(QueueBackend):
    """Queues, and one more for the copies of the graph that is being launched."""

    def __init__(self) -> None:
        super().__init__()
        self._outside, self._inside = self._copies, Worker("graph-copies")

    def enter(self, inside: bool) -> None:
        self._copies = self._inside if inside else self._outside

    def close(self) -> None:
        self._stop()
        self._inside.stop()
        super().close()


class GraphClock(ClockBackend):
    """The clock checker with one more stream."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self._clocks = {side: {of: int(of is side) for of in _STREAMS} for side in _STREAMS}
        self.inside = False

    def _stream(self, side: Side) -> Any:
        return Inside.COPY if self.inside and side is Side.COPY else side

    def record(self, side: Side, event: Event) -> None:
        stream = self._stream(side)
        event.clock = dict(self._clocks[stream])
        self._clocks[stream][stream] += 1
        self.backend.record(side, event.event)

    def wait(self, side: Side, event: Event) -> None:
        self._join(self._stream(side), event.clock)
        self.backend.wait(side, event.event)

    def _access(self, side: Side, copy: Copy, source: int | None) -> Any:
        return super()._access(self._stream(side), copy, source)


class Graph:
    """The calls that were made during a capture; `replay` makes them again."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        self._graphs.enter(True)
        for call in self.calls:
            call()
        self._graphs.enter(False)


class Graphs(Wrapper):
    """Keeps calls for later while a capture is under way. An edge works inside of its own capture alone."""

    def __init__(self, clock: GraphClock, queues: GraphQueues) -> None:
        super().__init__(clock)
        self._clock, self._queues = clock, queues
        self._captured: Graph | None = None
        self._tail: Event | None = None  # the edge at the end of the copies captured so far
        self.joined = True
        self.moved_nbytes = 0

    def enter(self, inside: bool) -> None:
        self._clock.inside = inside
        self._queues.enter(inside)

    def run(self, call: Callable[[], None]) -> None:
        if self._captured is None:
            call()
        else:
            self._captured.calls.append(call)

    def edge(self) -> Event:
        event = self.backend.event()
        event.capture = self._captured
        return event

    def capturing(self) -> bool:
        return self._captured is not None

    @contextmanager
    def capture(self, graph: Any, **options: Any) -> Iterator[None]:
        self._captured = graph
        try:
            yield
        finally:
            self._captured = None
        assert self.joined, "a capture ends while copies that it started are not joined"

    def record(self, side: Side, event: Event) -> None:
        self._check(event)
        if side is Side.COPY:
            self._tail = event
        self.run(lambda: super(Graphs, self).record(side, event))

    def wait(self, side: Side, event: Event) -> None:
        self._check(event)
        self._moves_on(side)
        self.joined |= side is Side.COMPUTE and event is self._tail
        self.run(lambda: super(Graphs, self).wait(side, event))

    def copy(self, copies: Sequence[Copy]) -> None:
        def copy() -> None:
            self.moved_nbytes += sum(c.dst.numel() for c in copies)
            super(Graphs, self).copy(copies)

        self._moves_on(Side.COPY)
        self.run(copy)

    def _moves_on(self, side: Side) -> None:
        if side is Side.COPY:
            self._tail, self.joined = None, self._captured is None

    def _check(self, event: Event) -> None:
        if hasattr(event, "capture"):
            assert event.capture is not None
            assert event.capture is self._captured, "an edge is used outside of its capture"


class GraphRig(Rig, FixedAddresses):
    """The part of a streamer that captures, over a rig: what a test calls is what a user calls."""

    step = FixedAddresses.step

    def __init__(self, plan: Plan, seed: int = 0, most_s: float = 0.001) -> None:
        queues = GraphQueues()
        Rig.__init__(self, plan, Poison(Delay(queues, seed, most_s)))
        self.clock = GraphClock(self.clock.backend)
        self._backend = self.graphs = Graphs(self.clock, queues)
        self.engine = Engine(plan, self.graphs, self.copies)
        buffer = dict.fromkeys(("enter", "leave", "decode"), lambda unit: None)
        self._binding: Any = SimpleNamespace(
            engine=self.engine, hold=self._hold, let_go=self.engine.release, abandon=self.engine.abandon, **buffer
        )
        self._counters = self.engine.counters
        self._lock = self._turn = threading.RLock()
        FixedAddresses.__init__(self, ())
        self._session.fixed = True

    def _hold(self, unit: int) -> None:
        self.engine.begin_if_behind(unit)
        self.engine.wait(unit)

    def _refuse_forked(self) -> None:
        pass

    def kernel(self, unit: int) -> None:
        self.graphs.run(lambda: Rig.kernel(self, unit))

    def forward(self, order: Sequence[int] | None = None) -> None:
        for unit in self.plan.manifest.order if order is None else order:
            self.wait_unit(unit)
            self.kernel(unit)
            self.release_unit(unit)

    def captured(self, order: Sequence[int] | None = None) -> Graph:
        graph = Graph(self.graphs)
        with self.capture(graph):
            self.forward(order)
        return graph

    def captured_alone(self, order: Sequence[int] | None = None) -> Graph:
        """As an engine does that knows the life cycle only."""
        graph = Graph(self.graphs)
        self.sync()
        with self.graphs.capture(graph):
            self.forward(order)
            self.join()
        return graph

    def launch_alone(self, graph: Graph) -> None:
        self.sync()
        graph.replay()

    def assert_right(self, num_kernels: int) -> None:
        self.clock.synchronize()
        assert self.num_kernels == num_kernels
        assert self.mismatches == []
        assert self.clock.races == []


def take_turns(rig: GraphRig, seed: int, num_turns: int = 30) -> int:
    """Eager steps, captures and launches of several graphs, with units left out, repeated and in other orders."""
    chance = random.Random(seed)
    num = len(rig.plan.extents)
    orders = [rig.plan.manifest.order, *([chance.randrange(num) for _ in range(length)] for length in (1, 2, 6))]
    graphs: list[tuple[Graph, Sequence[int]]] = []
    num_kernels = 0
    for _ in range(num_turns):
        order, what = chance.choice(orders), chance.choice(("eager", "capture", "replay", "replay", "replay"))
        if what == "eager":
            rig.forward(order)
        elif what == "capture" or not graphs:
            graphs.append((rig.captured(order), order))
            continue
        else:
            graph, order = chance.choice(graphs)
            rig.replay(graph)
        num_kernels += len(order)
    return num_kernels


def nest(rig: GraphRig) -> int:
    """A unit that was read, and is read again around another."""
    graph = Graph(rig.graphs)
    with rig.capture(graph):
        rig.forward((3,))
        rig.wait_unit(3)
        rig.forward((4,))
        rig.kernel(3)
        rig.release_unit(3)
    for _ in range(3):
        rig.replay(graph)
    return 9


def read_again(rig: GraphRig) -> int:
    """A graph without the wide unit, which is due behind the second read of a narrow one."""
    graph = rig.captured((1, 3, 4, 3))
    for _ in range(3):
        rig.replay(graph)
    return 12


ODD = {"5 units in 2 slots": nest, "a wide unit between narrow ones": read_again}
