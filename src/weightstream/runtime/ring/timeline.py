"""The timeline: when the units of a step were waited for, computed and copied, by the device's clock.

Few steps are timed: the 2nd to the 5th of one kind in a row, and one in 17. A trace keeps the same marks of all steps.
Marks are read once the device has passed them, at a later step or when `measured` is called: nothing waits for a mark.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.autograd import profiler

from weightstream.errors import OffloadError
from weightstream.plan.manifest import Workload
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import FORWARD, TRAIN
from weightstream.runtime.devices.backend import Backend, Side, Stamp
from weightstream.runtime.experts.counters import Tally, since
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.trace import ExpertTraffic, Row, Span, SpanKind, Trace

logger = logging.getLogger("weightstream")

_SIDES = MappingProxyType({"wait": Side.COMPUTE, "fill": Side.COPY})
_WARM = range(2, 6)
_EVERY = 17  # a prime: else generations of, say, 64 tokens would have the same positions timed each time
_WINDOW = 16  # timed steps that medians are taken over, and that may wait to be read


class Kind(NamedTuple):
    """The kind of a step. Steps of one workload are of one kind, and are timed together."""

    what: str  # "forward", "compiled", "fixed", "graph", or the method of the model that was called
    size: int  # number of elements of the first tensor; for a graph, its id


def kind_of(args: Any, kwargs: Any, what: str = "forward") -> Kind:
    """The kind of a step, from the arguments of its call: by the size of the first tensor among them."""
    first = next(tensors_in((args, kwargs)), None)
    return Kind(what, 0 if first is None else int(first.numel()))  # a tensor while torch.jit traces


def kind_of_workload(workload: Workload) -> Kind:
    """The kind of the forwards of a language model's workload."""
    return Kind(TRAIN if workload.trains else FORWARD, workload.batch * workload.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTimes:
    """Seconds of a unit, medians over timed steps; 0.0 where none was timed. Waits and compute add up to the step."""

    name: str
    nbytes: int  # of a fill
    copy_s: float  # a fill
    wait_s: float  # compute's wait for the fill
    compute_s: float  # from the end of the wait to the next wait; of the last unit, around the end to the first wait


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The timed steps of the kind that ran last."""

    kind: Kind
    num_steps: int
    step_s: float  # the median
    host_s: float  # shortest time in which a call returned; may include waits of the host for the device
    units: tuple[UnitTimes, ...]  # by index in the manifest; empty where graphs were launched


@dataclass(eq=False, slots=True)
class Mark:
    """A unit's wait, its fill or its release, or a step. A mark without a duration has one stamp as begin and end."""

    kind: SpanKind
    unit: int
    begin: Stamp
    end: Stamp
    planned: bool = True


class MarkTimes(NamedTuple):
    """A mark, and the seconds from the begin of its step to its own begin and end."""

    mark: Mark
    begin_s: float
    end_s: float


class TracedMark(NamedTuple):
    """A mark of a trace, and the fields of its span except the times."""

    mark: Mark
    name: str
    step: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The seconds of one step."""

    kind: Kind
    step_s: float
    host_s: float
    wait_s: float  # of all waits
    means: dict[tuple[SpanKind, int], float]  # the mean of a unit's fills, waits or compute, by (kind of span, unit)


@dataclass(eq=False, slots=True)
class TimedStep:
    """The marks of one step, of which the step's own comes last."""

    plan: Plan
    kind: Kind
    begin: Stamp
    host_s: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    def sample(self, seconds: Callable[[Stamp, Stamp], float | None]) -> Sample | None:
        """The seconds between the marks; None until the device has passed all. The last one is read first."""
        timed: list[MarkTimes] = []
        for mark in reversed(self.marks):
            begin_s, end_s = seconds(self.begin, mark.begin), seconds(self.begin, mark.end)
            if begin_s is None or end_s is None:
                return None
            timed.append(MarkTimes(mark, begin_s, end_s))
        *units, (_, _, step_s) = reversed(timed)
        found: defaultdict[tuple[SpanKind, int], list[float]] = defaultdict(list)
        for mark, begin_s, end_s in units:
            found[mark.kind, mark.unit].append(end_s - begin_s)
        waits = [(mark.unit, begin_s, end_s) for mark, begin_s, end_s in units if mark.kind == "wait"]
        # The order is cyclic: compute before the first unit counts for the last one.
        ends = [begin_s for _, begin_s, _ in waits[1:]] + [step_s + begin_s for _, begin_s, _ in waits[:1]]
        for (unit, _, resumed_s), next_s in zip(waits, ends, strict=True):
            found["unit", unit].append(next_s - resumed_s)
        wait_s = sum(end_s - begin_s for _, begin_s, end_s in waits)
        means = {what: fmean(values) for what, values in found.items()}
        return Sample(kind=self.kind, step_s=step_s, host_s=self.host_s, wait_s=wait_s, means=means)


@dataclass(eq=False, slots=True)
class Tracing:
    """A trace that is being recorded."""

    trace: Trace
    origin: Stamp
    host_origin_s: float
    experts: Mapping[str, ExpertTraffic]  # the counts before the trace began
    num_steps: int = 0
    step: int = 0  # the one under way; 0 between two
    marks: list[TracedMark] = field(default_factory=list)

    def add(self, mark: Mark, name: str, nbytes: int = 0) -> None:
        """Record a mark, unless the trace is full."""
        if len(self.marks) <= self.trace.limit:
            self.marks.append(TracedMark(mark, name, self.step, nbytes))

    def add_step(self, mark: Mark, what: str, host_begin_s: float) -> None:
        """Record a step's mark, and the host's time of it."""
        self.add(mark, name := f"{what} {self.step}")
        begin_s, end_s = host_begin_s - self.host_origin_s, time.perf_counter() - self.host_origin_s
        host = Span(row="host", kind="step", name=name, begin_s=begin_s, end_s=end_s, step=self.step)
        self.trace.spans.append(host)

    def finish(self, seconds: Callable[[Stamp, Stamp], float | None]) -> None:
        """Make spans of the marks, all of which the device has passed. A unit computes from the end of its wait."""
        resumed: dict[int, Stamp] = {}
        for mark, name, step, nbytes in self.marks:
            if mark.kind == "wait":
                resumed[mark.unit] = mark.end
            begin = resumed.get(mark.unit, mark.end) if mark.kind == "unit" else mark.begin
            begin_s, end_s = seconds(self.origin, begin), seconds(self.origin, mark.end)
            if begin is not mark.end and begin_s is not None and end_s is not None:
                row: Row = "copy" if mark.kind == "fill" else "compute"
                self.trace.spans.append(
                    Span(
                        row=row,
                        kind=mark.kind,
                        name=name,
                        begin_s=begin_s,
                        end_s=end_s,
                        step=step,
                        nbytes=nbytes,
                        planned=mark.planned,
                    )
                )
        self.trace.spans.sort(key=lambda span: span.begin_s)
        if max(len(self.marks), len(self.trace.spans)) > self.trace.limit:  # waits for nothing are marks, not spans
            logger.warning("the trace is full at %s spans: later steps are not in it; trace fewer", self.trace.limit)
            del self.trace.spans[self.trace.limit :]


class _Open(NamedTuple):
    """A step under way."""

    timed: TimedStep
    is_due: bool
    tracing: Tracing | None
    host_begin_s: float


class Timeline:
    """Times steps of one streamer, under one plan after the other."""

    def __init__(self, backend: Backend, tally: Tally | None = None) -> None:
        self.stall_s = 0.0  # compute's waits in all steps, estimated
        self.tally = tally or Tally()  # counts of all caches of experts, in all steps
        self._backend = backend
        self._plan: Plan
        self._num_steps = self._in_a_row = 0
        self._last_kind: Kind | None = None
        self.is_on = False  # whether marks of units are recorded now; most steps record none, so the engine checks this
        self._open: _Open | None = None  # a step that goes on after its block
        self._timed: TimedStep | None = None  # the step that gets these marks
        self._pending: deque[TimedStep] = deque()
        self._samples: deque[Sample] = deque(maxlen=_WINDOW)
        self._reading = threading.RLock()
        self._tracing: Tracing | None = None  # the trace that gets these marks

    def _mark_in(self, timed: TimedStep | None, tracing: Tracing | None) -> None:
        self._timed = timed
        self._tracing = tracing
        self.is_on = timed is not None or tracing is not None

    def bind(self, plan: Plan) -> None:
        """Forget the times of the previous plan, as another plan comes into force."""
        with self._reading:
            self._plan = plan
            self._num_steps = 0
            self._in_a_row = 0
            self._samples.clear()

    @property
    def kind(self) -> Kind | None:
        """The kind of the last timed step that was read; None before any."""
        return self._samples[-1].kind if self._samples else None

    def measured(self) -> Measured | None:
        """Medians over the timed steps of the last kind, as far as the device has run them; None before any."""
        self._read()
        with self._reading:
            plan = self._plan
            samples = [sample for sample in self._samples if sample.kind == self._samples[-1].kind]
        if not samples:
            return None
        has_units = any(what == "unit" for sample in samples for what, _ in sample.means)
        return Measured(
            kind=samples[-1].kind,
            num_steps=len(samples),
            step_s=median(sample.step_s for sample in samples),
            host_s=min(sample.host_s for sample in samples),
            units=tuple(_times(plan, unit, samples) for unit in range(len(plan.extents)) if has_units),
        )

    def heal(self) -> None:
        """End a step that was cut short."""
        self._open = None
        self._mark_in(None, self._tracing)
        if self._tracing is not None:
            self._tracing.step = 0

    def close(self) -> None:
        """Drop all marks; measured times stay."""
        self.end_trace()
        self._pending.clear()

    # -- called by the streamer --------------------------------------------------------------------------------------

    @contextmanager
    def step(self, kind: Kind, *, inside: bool = True, whole: bool = True, ends: bool = True) -> Iterator[None]:
        """Time a step, or a piece of one, and with `inside` the units in it. A step that fails is not timed.

        Without `ends` the step goes on after the block, until `end_step`; the begin of another step ends it untimed.
        """
        if self._open is not None:
            self.heal()
        is_due, tracing = self._count(kind, whole), self._tracing
        if (not is_due and tracing is None) or self._backend.capturing():
            yield
            return
        host_begin_s, begin = time.perf_counter(), self._backend.stamp(Side.COMPUTE)
        timed = TimedStep(self._plan, kind, begin)
        self._mark_in(timed if is_due and inside else None, tracing)
        if tracing is not None:
            tracing.num_steps += whole
            tracing.step = tracing.num_steps
        step = _Open(timed, is_due, tracing, host_begin_s)
        if not ends:
            self._open = step
            yield
            return
        try:
            yield
            self._end(step)
        finally:
            self._mark_in(None, self._tracing)
            if tracing is not None:
                tracing.step = 0

    def end_step(self) -> None:
        """End the step that goes on after its block, if there is one."""
        step, self._open = self._open, None
        if step is not None:
            self._end(step)
            self.heal()

    def _end(self, step: _Open) -> None:
        mark = Mark("step", -1, step.timed.begin, self._backend.stamp(Side.COMPUTE))
        step.timed.host_s = time.perf_counter() - step.host_begin_s
        if step.is_due:
            step.timed.marks.append(mark)
            self._pending.append(step.timed)
        if step.tracing is not None:
            step.tracing.add_step(mark, step.timed.kind.what, step.host_begin_s)

    def _count(self, kind: Kind, whole: bool) -> bool:
        """Count a step; returns whether it is to be timed. For one that is not, add the last timed step's waits."""
        if whole:
            self._num_steps += 1
            self._in_a_row = self._in_a_row + 1 if kind == self._last_kind else 1
            self._last_kind = kind
        self._read()
        if is_due := whole and self._is_due():
            return is_due
        with self._reading:
            if self.kind == kind:
                self.stall_s += self._samples[-1].wait_s
        return False

    def _is_due(self) -> bool:
        return (self._in_a_row in _WARM or self._num_steps % _EVERY == 0) and len(self._pending) < _WINDOW

    # -- called by the engine ----------------------------------------------------------------------------------------

    def begins(self, kind: SpanKind, unit: int, *, planned: bool = True) -> Mark:
        """Mark where compute comes to the unit's wait, or where the unit's copy may begin; pass the mark to `ends`."""
        now = self._backend.stamp(_SIDES[kind])
        mark = Mark(kind, unit, now, now, planned)
        if self._timed is not None:
            self._timed.marks.append(mark)
        if self._tracing is not None:
            nbytes = self._plan.unit_nbytes[unit] if kind == "fill" else 0
            self._tracing.add(mark, self._plan.manifest.units[unit].name, nbytes)
        return mark

    def ends(self, mark: Mark) -> None:
        """Mark the end of the wait, or of the copy."""
        mark.end = self._backend.stamp(_SIDES[mark.kind])

    def releases(self, unit: int) -> None:
        """The unit's last kernel is queued."""
        if self._tracing is not None:
            now = self._backend.stamp(Side.COMPUTE)
            self._tracing.add(Mark("unit", unit, now, now), self._plan.manifest.units[unit].name)

    # -- a trace -----------------------------------------------------------------------------------------------------

    def refuse_second_trace(self) -> None:
        """Raise `OffloadError` while a trace is recorded."""
        if self._tracing is not None:
            raise OffloadError("trace() inside of trace(): this streamer is recording one already")

    def begin_trace(self, trace: Trace) -> None:
        """Record all steps until `end_trace`; the device is idle."""
        stamp = self._backend.stamp(Side.COMPUTE)
        self._mark_in(self._timed, Tracing(trace, stamp, time.perf_counter(), self.tally.read()))

    def end_trace(self) -> None:
        """Write the recorded marks to the trace; the device is idle."""
        tracing = self._tracing
        self._mark_in(self._timed, None)
        if tracing is not None:
            tracing.finish(self._backend.seconds)
            tracing.trace.experts = since(tracing.experts, self.tally.read())

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the marks of steps that the device has passed."""
        if not self._pending or self._backend.capturing():  # to query an event would end the capture
            return
        with self._reading:
            while self._pending and (sample := self._pending[0].sample(self._backend.seconds)) is not None:
                timed = self._pending.popleft()
                if timed.plan is self._plan:
                    self._samples.append(sample)
                    self.stall_s += sample.wait_s


def _times(plan: Plan, unit: int, samples: list[Sample]) -> UnitTimes:
    def typical(what: SpanKind) -> float:
        return median([sample.means[what, unit] for sample in samples if (what, unit) in sample.means] or [0.0])

    return UnitTimes(
        name=plan.manifest.units[unit].name,
        nbytes=plan.unit_nbytes[unit],
        copy_s=typical("fill"),
        wait_s=typical("wait"),
        compute_s=typical("unit"),
    )


def profiler_range(name: str, what: str = "") -> AbstractContextManager[Any]:
    """A range of that name for torch's profiler; where it is off this costs 0.2 us."""
    return profiler.record_function(f"weightstream::{what}{name}") if profiler._is_profiler_enabled else nullcontext()
