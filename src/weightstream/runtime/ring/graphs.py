"""The graphs of a streamer: captures, launches, and the recording that units are waited for and released in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from weightstream.errors import InvariantError, OffloadError
from weightstream.runtime.devices.backend import Backend, Copy
from weightstream.runtime.ring.binding import Binding
from weightstream.runtime.ring.recording import Recording
from weightstream.runtime.ring.timeline import Kind

CAPTURED = "this model is being captured by torch.cuda.graph only: use model.weightstream.capture(graph) instead"


class GraphMode(Enum):
    """How units run now, and whether launches of graphs are announced."""

    IDLE = "idle"  # units run eager; launches are announced, so the engine knows the contents of the ring
    CAPTURING = "capturing"  # inside of `capture`
    UNKNOWN = "unknown"  # since `sync`: graphs may have been launched, so the contents of the ring are unknown
    CAPTURING_PIECE = "capturing a piece"  # inside of a capture that an engine made after `sync`, until `join`


# An engine that only uses the interface of api/offloaders.py announces neither captures nor launches. It calls `sync`
# before each, and `join` inside of a capture. Then:
#
#   sync      The first one after eager steps brings the ring to the start of a step and waits for every copy. From then
#             on the graphs keep the ring in order among themselves ([Note: graphs and the wrap-around]), and nothing
#             more is done until a unit runs eager or a launch is announced: then the ring's contents are forgotten.
#   pieces    The first unit that is waited for or released inside of a capture opens a recording, and `join` ends it.
#             A step may be captured in pieces. Each goes on where the one before ended, with the units that it left in
#             use: a wait may stand in one piece and its release in the next, or several pieces later. Operators that
#             run eager between them read those units too, as a unit in use is not overwritten. A piece without a
#             streamed unit has no recording and changes nothing.
#   errors    A capture that ends without `join` failed. Its piece is dropped, and the one before it is the last again:
#             the engine may capture the piece again, begin the step again, or run eager. A unit that runs eager, or a
#             step that begins before the last one has ended, drops the pieces and the units that they have in use.
#
# A step is all graphs or all eager, and its graphs reach the last unit that streams: `sync` prepares the start of a
# step, since it cannot know which graph comes.


class HasBinding(Protocol):
    """An object with the binding of the plan in force, which changes with the plan."""

    binding: Binding


class Graphs:
    """Captures and launches. Not thread-safe: the streamer lets one step in at a time."""

    def __init__(self, backend: Backend, installed: HasBinding) -> None:
        self.recordings: WeakKeyDictionary[Any, Recording] = WeakKeyDictionary()
        self._backend = backend
        self._installed = installed
        self._mode = GraphMode.IDLE
        self._recording: Recording | None = None  # that of the capture under way
        self._last: Recording | None = None  # the piece captured last, if the step may go on after it

    def __len__(self) -> int:
        return len(self.recordings)

    def clear(self) -> None:
        """Forget all captured graphs: they cannot be launched any more."""
        self.recordings.clear()

    @contextmanager
    def capture(self, graph: Any, within: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Capture a step, or a piece of one, whose launches are announced.

        `within()` is the device's capture; the copies that the graph relies on are queued before it.
        """
        if self._mode is not GraphMode.IDLE:
            self.resume_eager()
        engine = self._installed.binding.engine
        if not self._backend.capturing():
            self._installed.binding.waves.drop()
            if self._last is None:
                engine.prime()  # the fills that the plan has at the start of a step: outside of the graph
            self._backend.prepare_graph(self._copies())
        with within():
            self._recording = recording = Recording(engine, self._backend, self._last)
            self._move(GraphMode.IDLE, GraphMode.CAPTURING)
            try:
                yield
            finally:
                self._recording = None
                self._move(GraphMode.CAPTURING, GraphMode.IDLE)
                self._installed.binding.ahead.join()
                recording.end()
        self._last = self.recordings[graph] = recording

    def replay(self, graph: Any, launch: Callable[[], object]) -> None:
        """Launch a captured graph: the fills that it needs are queued before, those of the next step after it."""
        recording = self.recording_of(graph)
        if self._mode is GraphMode.UNKNOWN:
            self.resume_eager()
        engine = self._installed.binding.engine
        engine.counters.steps += recording.begins
        with engine.timeline.step(Kind("graph", id(graph)), inside=False, whole=recording.is_whole):
            self._installed.binding.waves.drop()  # the graph may use the buffer, and change slots
            engine.before_graph(recording.entry)
            self._backend.prepare_graph()
            try:
                launch()
                recording.after_launch()
            except BaseException:  # the graph may run all the same
                engine.forget_all()
                raise

    def recording_of(self, graph: Any) -> Recording:
        if (recording := self.recordings.get(graph)) is None:
            raise OffloadError(
                "no graph of this streamer's capture(), or since then came remove(), a new layout, or an update of "
                "a weight that copies took from its file: capture it again"
            )
        return recording

    def sync(self) -> None:
        """Before an engine captures or launches a graph: make compute wait for every copy in flight."""
        if self._mode is GraphMode.CAPTURING_PIECE:
            self._drop_failed()
        if self._mode is GraphMode.IDLE:
            self.resume_eager()
            self._installed.binding.abandon()  # units that an error in an eager step left in use
            self._installed.binding.engine.prime()
            self._installed.binding.engine.settle()
            self._move(GraphMode.IDLE, GraphMode.UNKNOWN)
        if not self._backend.capturing():
            self._backend.prepare_graph()

    def join(self) -> None:
        """Inside of an engine's capture, before it ends: make the copies that are due, and join them."""
        if self._mode is GraphMode.CAPTURING_PIECE and self._recording is not None:
            self._last, self._recording = self._recording, None
            self._move(GraphMode.CAPTURING_PIECE, GraphMode.UNKNOWN)
            self._installed.binding.ahead.join()
            self._last.end()

    def wait(self, unit: int) -> None:
        """Order compute after the unit's fill and decode the unit, in the recording or outside of one."""
        binding = self._installed.binding
        recording = self._current()
        if recording is None:
            if self._last is not None or self._mode is GraphMode.UNKNOWN:
                self.resume_eager()
            binding.enter(unit)
            binding.hold(unit)
            binding.decode(unit)
            return
        if recording.restarts(unit) and recording.in_use:
            binding.abandon()
        binding.enter(unit)
        recording.wait(unit)
        binding.decode(unit)

    def release(self, unit: int) -> None:
        """The unit's last kernel is queued."""
        binding = self._installed.binding
        recording = self._current()
        binding.leave(unit)
        if recording is None:
            binding.let_go(unit)
        else:
            recording.release(unit)

    def resume_eager(self) -> None:
        """Prepare for eager units or announced launches, for which the engine has to know the contents of the ring."""
        if self._last is not None and self._last.in_use:
            self._installed.binding.abandon()
        self._last = None
        if self._mode is GraphMode.UNKNOWN:
            self._installed.binding.engine.forget_all()  # unannounced graphs may have been launched
            self._move(GraphMode.UNKNOWN, GraphMode.IDLE)

    def heal(self) -> None:
        """End a capture that was cut short, after which the contents of the ring are unknown."""
        self._recording = self._last = None
        if self._mode is not GraphMode.IDLE and not self._backend.capturing():
            self._mode = GraphMode.IDLE
            self._installed.binding.engine.forget_all()

    def _copies(self) -> Iterator[Copy]:
        """All copies that a step may make."""
        engine = self._installed.binding.engine
        streamed = (unit for unit in range(len(engine.fences)) if engine.plan.streams(unit))
        return chain.from_iterable(engine.copies[unit] for unit in streamed)

    def _current(self) -> Recording | None:
        """The recording for units that are waited for or released now."""
        if self._mode is GraphMode.CAPTURING_PIECE:
            self._drop_failed()
        if self._recording is None and self._backend.capturing():
            if self._mode is GraphMode.IDLE:
                raise OffloadError(CAPTURED)
            self._recording = Recording(self._installed.binding.engine, self._backend, self._last, deferred=False)
            self._move(GraphMode.UNKNOWN, GraphMode.CAPTURING_PIECE)
        return self._recording

    def _drop_failed(self) -> None:
        """Drop the piece whose capture is over without `join`."""
        if not self._backend.capturing():
            self._recording = None
            self._move(GraphMode.CAPTURING_PIECE, GraphMode.UNKNOWN)
            self._installed.binding.abandon()

    def _move(self, before: GraphMode, after: GraphMode) -> None:
        if self._mode is not before:
            raise InvariantError(f"graphs go from {before.value} to {after.value}, and were {self._mode.value}")
        self._mode = after
