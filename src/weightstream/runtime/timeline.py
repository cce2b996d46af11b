"""The timeline: when the units of a step were waited for, computed and copied, by the device's own clock.

Few steps are timed: the 2nd to the 5th of one kind in a row, and one in 17; while a trace is recorded, all. Marks are
read once the device has passed them, at a later step or when somebody asks; nobody ever waits for one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch.autograd import profiler

from weightstream.errors import OffloadError
from weightstream.plan.plan import Plan
from weightstream.runtime.backend import Backend, Side
from weightstream.runtime.marks import Kind, Mark, Marks, Sample, Tracing, sample_of, spans
from weightstream.trace import SpanKind, Trace

_WARM = range(2, 6)
_EVERY = 17  # a prime: of generations of 64 tokens the same places would be timed again and again
_WINDOW = 16  # timed steps that medians are taken over, and that may wait to be read


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTimes:
    """Seconds of a unit, medians over timed steps; 0.0 for what happened in none of them.

    `copy_s` is a fill of `nbytes` bytes, `wait_s` what compute waited for it, `compute_s` from there to the next wait,
    of whatever unit, at one position. The last unit's goes on to the end of the step, and from its begin to the first
    wait: waits and compute are the step.
    """

    name: str
    nbytes: int
    copy_s: float
    wait_s: float
    compute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The timed steps of the kind that ran last; `units` by index in the manifest, none where graphs were launched."""

    kind: Kind
    num_steps: int
    step_s: float
    units: tuple[UnitTimes, ...]


class Timeline:
    """Times steps of one streamer, under one plan after the other. `stall_s` is what all steps waited, estimated."""

    def __init__(self, backend: Backend) -> None:
        self.stall_s = 0.0
        self._backend = backend
        self._plan: Plan
        self._num_steps = self._in_a_row = 0
        self._last_kind: Kind | None = None
        self._marks: Marks | None = None  # where the marks of units go now
        self._between: Marks | None = None  # where those of a trace go that belong to no step
        self._pending: deque[Marks] = deque()
        self._samples: deque[Sample] = deque(maxlen=_WINDOW)
        self._reading = threading.Lock()
        self._tracing: Tracing | None = None

    def bind(self, plan: Plan) -> None:
        """Another plan comes into force: what was measured under the one before says nothing of it."""
        with self._reading:
            self._plan, self._num_steps, self._in_a_row = plan, 0, 0
            self._samples.clear()
        self._leave_between()

    @property
    def kind(self) -> Kind | None:
        """The kind of the last timed step that was read; None before any."""
        return self._samples[-1].kind if self._samples else None

    def measured(self) -> Measured | None:
        """Medians over the timed steps of the last kind, as far as the device has run them; None before any."""
        self._read()
        with self._reading:
            samples = [sample for sample in self._samples if sample.kind == self._samples[-1].kind]
        if not samples:
            return None
        has_units = any(what == "unit" for sample in samples for what, _ in sample.means)
        return Measured(
            kind=samples[-1].kind,
            num_steps=len(samples),
            step_s=median(sample.step_s for sample in samples),
            units=tuple(self._times(unit, samples) for unit in range(len(self._plan.extents)) if has_units),
        )

    def _times(self, unit: int, samples: list[Sample]) -> UnitTimes:
        def typical(what: SpanKind) -> float:
            return median([sample.means[what, unit] for sample in samples if (what, unit) in sample.means] or [0.0])

        return UnitTimes(
            name=self._plan.manifest.units[unit].name,
            nbytes=self._plan.unit_nbytes[unit],
            copy_s=typical("fill"),
            wait_s=typical("wait"),
            compute_s=typical("unit"),
        )

    def close(self) -> None:
        """Let go of every mark; what was measured stays."""
        self.end_trace()
        self._pending.clear()

    # -- what the streamer tells -------------------------------------------------------------------------------------

    @contextmanager
    def step(self, kind: Kind, *, inside: bool = True, whole: bool = True) -> Iterator[None]:
        """Around a step, or a piece of one; `inside` of it units are timed. One that fails is not timed."""
        marks = self._begin(kind, inside, whole)
        try:
            yield
            if marks is not None:
                marks.marks.append(Mark("step", -1, marks.begin, self._backend.stamp(Side.COMPUTE)))
                marks.host_s = marks.host_s[0], time.perf_counter()
                self._pending.append(marks)
        finally:
            self._marks = self._between

    def _begin(self, kind: Kind, inside: bool, whole: bool) -> Marks | None:
        self._num_steps += whole
        if whole:
            self._in_a_row = self._in_a_row + 1 if kind == self._last_kind else 1
            self._last_kind = kind
        self._read()
        tracing = self._tracing
        if tracing is None and not (whole and self._is_due()):
            with self._reading:
                self.stall_s += self._samples[-1].wait_s if self._samples and self._samples[-1].kind == kind else 0.0
            return None
        if self._backend.capturing():
            return None
        marks = Marks(self._plan, tracing, self._backend.stamp(Side.COMPUTE), kind, whole)
        marks.host_s = time.perf_counter(), 0.0
        if tracing is not None:
            tracing.num_steps += whole
            marks.step = tracing.num_steps
        self._marks = marks if inside or tracing is not None else None
        return marks

    def _is_due(self) -> bool:
        return (self._in_a_row in _WARM or self._num_steps % _EVERY == 0) and len(self._pending) < _WINDOW

    # -- what the engine tells ---------------------------------------------------------------------------------------

    def arrives(self, unit: int) -> None:
        """Compute has come to where the unit is needed."""
        if self._marks is not None:
            now = self._backend.stamp(Side.COMPUTE)
            self._marks.marks.append(Mark("wait", unit, now, now))

    def resumes(self) -> None:
        """What compute has waited for is there."""
        if self._marks is not None and (wait := self._marks.last_wait()) is not None:
            wait.end = self._backend.stamp(Side.COMPUTE)

    def releases(self, unit: int) -> None:
        """The unit's last kernel is queued."""
        marks = self._marks
        if marks is not None and marks.tracing is not None and (wait := marks.last_wait(unit)) is not None:
            marks.marks.append(Mark("unit", unit, wait.end, self._backend.stamp(Side.COMPUTE)))

    def fills(self, unit: int, planned: bool) -> Mark | None:
        """The copy of a unit may begin now; what is returned goes to `filled`."""
        if self._marks is None:
            return None
        now = self._backend.stamp(Side.COPY)
        return Mark("fill", unit, now, now, planned)

    def filled(self, fill: Mark | None) -> None:
        """The copy is queued."""
        if fill is not None and self._marks is not None:
            fill.end = self._backend.stamp(Side.COPY)
            self._marks.marks.append(fill)

    # -- a trace -----------------------------------------------------------------------------------------------------

    def begin_trace(self, trace: Trace) -> None:
        """Record all that comes until `end_trace`; the device is idle."""
        if self._tracing is not None:
            raise OffloadError("trace() inside of trace(): this streamer is recording one already")
        self._tracing = Tracing(trace, self._backend.stamp(Side.COMPUTE), time.perf_counter())
        self._leave_between()

    def end_trace(self) -> None:
        """The device is idle: what was recorded is in the trace now."""
        tracing, self._tracing = self._tracing, None
        self._leave_between()
        self._read()
        if tracing is not None:
            tracing.trace.spans.sort(key=lambda span: span.begin_s)

    def _leave_between(self) -> None:
        """What comes between steps is of the plan and the trace of now."""
        if self._between is not None:
            self._pending.append(self._between)
        self._between = None
        if (tracing := self._tracing) is not None:
            self._between = Marks(self._plan, tracing, tracing.origin, Kind("", 0), False)
        self._marks = self._between

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take in the steps that the device has passed."""
        if not self._pending or self._backend.capturing():  # to ask for an event would end the capture
            return
        with self._reading:
            while self._pending and (timed := self._pending[0].timed(self._backend.seconds)) is not None:
                marks = self._pending.popleft()
                if marks.is_whole and marks.plan is self._plan:
                    self._samples.append(sample_of(marks.kind, timed))
                    self.stall_s += self._samples[-1].wait_s
                if (tracing := marks.tracing) is not None:
                    begin_s = self._backend.seconds(tracing.origin, marks.begin) or 0.0
                    tracing.trace.add(spans(marks, tracing, begin_s, timed))


def is_profiled() -> bool:
    """Whether torch's profiler looks on."""
    return bool(profiler._is_profiler_enabled)


def profiled(name: str, what: str = "") -> AbstractContextManager[Any]:
    """A range of that name where torch's profiler looks on; elsewhere it costs 0.2 us."""
    return profiler.record_function(f"weightstream::{what}{name}") if profiler._is_profiler_enabled else nullcontext()
