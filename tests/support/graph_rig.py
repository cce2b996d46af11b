"""The rig of the recording tests: graphs on queues of a CPU. The calls of a graph run again at each launch, its
copies on
a queue of their own, and the capturing part of a streamer is driven as a user drives it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from rig import Rig, equal_plan, small_plan
from weightstream.plan.plan import Plan
from weightstream.runtime.devices.backend import Copy, Event, Side
from weightstream.runtime.devices.host_stream import Worker
from weightstream.runtime.experts.prefetch import Ahead
from weightstream.runtime.experts.row_stream import StreamBuffer
from weightstream.runtime.ring.engine import Engine
from weightstream.runtime.ring.graphs import Graphs as StreamerGraphs
from wrapped import ClockBackend, Delay, Poison, QueueBackend, Wrapper

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
    """The stream on which the copies of a graph run. The copy stream is not ordered with it."""

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
    """The calls that were made during a capture. `replay` makes them again."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        self._graphs.enter(True)
        for call in self.calls:
            call()
        self._graphs.enter(False)


class Graphs(Wrapper):
    """Keeps calls for later during a capture. An edge works only inside its own capture."""

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
        self._captured, self._tail, self.joined = graph, None, True
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


class GraphRig(Rig):
    """The capturing part of a streamer over a rig, with the calls that a user makes."""

    def __init__(self, plan: Plan, seed: int = 0, most_s: float = 0.001) -> None:
        queues = GraphQueues()
        Rig.__init__(self, plan, Poison(Delay(queues, seed, most_s)))
        self.clock = GraphClock(self.clock.backend)
        self._backend = self.graphs = Graphs(self.clock, queues)
        self.engine = Engine(plan, self.graphs, self.copies)
        buffer = dict.fromkeys(("enter", "leave", "decode"), lambda unit: None)
        self.binding: Any = SimpleNamespace(
            engine=self.engine,
            hold=self._hold,
            let_go=self.engine.release,
            abandon=self.engine.abandon,
            ahead=Ahead(self.graphs, 0, {}, lambda unit: None),
            waves=StreamBuffer(torch.empty(0, dtype=torch.uint8), self.graphs),
            **buffer,
        )
        self.captures = StreamerGraphs(self.graphs, self)
        self.sync, self.join = self.captures.sync, self.captures.join
        self.wait_unit, self.release_unit = self.captures.wait, self.captures.release

    def capture(self, graph: Graph) -> AbstractContextManager[None]:
        return self.captures.capture(graph, partial(self.graphs.capture, graph))

    def replay(self, graph: Graph) -> None:
        self.captures.replay(graph, graph.replay)

    def _hold(self, unit: int) -> None:
        self.engine.begin_if_behind(unit)
        self.engine.wait(unit)

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
        """Capture as an engine does that knows only the life cycle."""
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


class CaptureFailed(Exception):
    """An error of a kernel that ends a capture."""


class Served:
    """Steps of an inference engine that knows only the life cycle, with a count of their kernels.

    Units at the places `cuts` of the order are cut where an operator runs eager; a place that is named twice is cut
    twice. Such a unit is waited for in one piece of the step and released in a later one. Each batch size has its own
    graphs.
    """

    def __init__(self, rig: GraphRig, order: Sequence[int], cuts: Sequence[int]) -> None:
        self._rig = rig
        self._pieces: list[list[tuple[str, int]]] = [[]]
        for place, unit in enumerate(order):
            self._pieces[-1] += [("wait", unit), ("kernel", unit)]
            self._pieces += [[("kernel", unit)] for cut in cuts if cut == place]
            self._pieces[-1].append(("release", unit))
        self.num_pieces = len(self._pieces)
        self.num_kernels = 0
        self._graphs: dict[object, list[Graph]] = {}

    @property
    def sizes(self) -> list[object]:
        return list(self._graphs)

    def capture(self, size: object, *, whole: bool = False, fails_in: int | None = None, early: bool = True) -> None:
        """Capture a step of one size. The piece `fails_in` ends in an error: before its last call if `early`, else
        after it."""
        pieces = [[call for piece in self._pieces for call in piece]] if whole else self._pieces
        graphs = []
        for index, piece in enumerate(pieces):
            graph, fails = Graph(self._rig.graphs), index == fails_in
            self._rig.sync()
            with self._rig.graphs.capture(graph):
                self._run(piece[:-1] if fails and early else piece)
                if fails and early:
                    raise CaptureFailed
                self._rig.join()
            if fails:
                raise CaptureFailed  # in eager code between two pieces
            graphs.append(graph)
        self._graphs[size] = graphs

    def eager(self) -> None:
        for index, piece in enumerate(self._pieces):
            self._run(piece)
            self._attend(index)
        self.num_kernels += self._num_captured

    def launch(self, size: object) -> None:
        graphs = self._graphs[size]
        for index, graph in enumerate(graphs):
            self._rig.sync()
            graph.replay()
            if len(graphs) == self.num_pieces:
                self._attend(index)
        self.num_kernels += self._num_captured

    @property
    def _num_captured(self) -> int:
        return sum(name == "kernel" for piece in self._pieces for name, _ in piece)

    def _attend(self, index: int) -> None:
        """Run the eager kernel between two pieces, which reads weights of the unit that is open across them."""
        if index + 1 < self.num_pieces:
            self._rig.kernel(self._pieces[index][-1][1])
            self.num_kernels += 1

    def _run(self, piece: Sequence[tuple[str, int]]) -> None:
        calls = {"wait": self._rig.wait_unit, "kernel": self._rig.kernel, "release": self._rig.release_unit}
        for name, unit in piece:
            calls[name](unit)


def take_turns(rig: GraphRig, seed: int, num_turns: int = 30) -> int:
    """Eager steps, captures and launches of several graphs, with units left out, repeated and reordered."""
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
    """A unit that has been read is read again around another one."""
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
    """A graph without the wide unit, which is due after the second read of a narrow one."""
    graph = rig.captured((1, 3, 4, 3))
    for _ in range(3):
        rig.replay(graph)
    return 12


def serve(rig: GraphRig) -> int:
    """An engine's graphs of two sizes, in pieces that are cut inside of units."""
    order = rig.plan.manifest.order
    steps = Served(rig, order, range(len(order)))
    for size in (2, 1):
        steps.eager()
        steps.capture(size)
    for size in (1, 2, 2, 1):
        steps.launch(size)
    return steps.num_kernels


def serve_again(rig: GraphRig) -> int:
    """An engine's pieces of a step in which the first unit comes again, as if a step began."""
    pieces = [(0, 1, 2), (0,), (3, 4)]
    graphs = [rig.captured_alone(piece) for piece in pieces]
    for graph in graphs * 4:
        rig.launch_alone(graph)
    return 4 * sum(map(len, pieces))


ODD = {"5 units in 2 slots": nest, "a wide unit between narrow ones": read_again}
