"""Marks: the stamps of one step, and what they say once their times are known. Knows no device and no schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from weightstream.plan.plan import Plan
from weightstream.runtime.backend import Stamp
from weightstream.runtime.values import tensors_in
from weightstream.trace import Span, SpanKind, Trace


class Kind(NamedTuple):
    """What tells the steps of one workload from those of another: the size of a forward's first tensor, or a graph."""

    what: str
    size: int


def kind_of(args: Any, kwargs: Any) -> Kind:
    """The kind of a forward with these arguments."""
    first = next(tensors_in((args, kwargs)), None)
    return Kind("forward", 0 if first is None else first.numel())


@dataclass(eq=False, slots=True)
class Tracing:
    """A trace that is being recorded, and when it began on the device and on the host."""

    trace: Trace
    origin: Stamp
    host_origin_s: float
    num_steps: int = 0


@dataclass(eq=False, slots=True)
class Mark:
    """A span to be, of a unit or of the step. A wait ends where it begins if there was nothing to wait for."""

    kind: SpanKind
    unit: int
    begin: Stamp
    end: Stamp
    planned: bool = True


Timed = tuple[Mark, float, float]  # a mark's begin and end, in seconds from the step's begin


@dataclass(eq=False, slots=True)
class Marks:
    """The marks of one step, which `is_whole` unless it is a piece; or of all that a trace sees outside of steps."""

    plan: Plan
    tracing: Tracing | None
    begin: Stamp
    kind: Kind
    is_whole: bool
    step: int = 0
    host_s: tuple[float, float] = (0.0, 0.0)
    marks: list[Mark] = field(default_factory=list)

    def last_wait(self, unit: int | None = None) -> Mark | None:
        """The last wait, or the last for a unit."""
        waits = (mark for mark in reversed(self.marks) if mark.kind == "wait" and unit in (None, mark.unit))
        return next(waits, None)

    def timed(self, seconds: Callable[[Stamp, Stamp], float | None]) -> list[Timed] | None:
        """The marks with their times; None until the device has passed them all. The last is asked for first."""
        found: list[Timed] = []
        for mark in reversed(self.marks):
            if (end_s := seconds(self.begin, mark.end)) is None or (begin_s := seconds(self.begin, mark.begin)) is None:
                return None
            found.append((mark, begin_s, end_s))
        return found[::-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Seconds of one step, of all its waits, and by unit the mean of its fills, its waits and what it computed."""

    kind: Kind
    step_s: float
    wait_s: float
    means: dict[tuple[SpanKind, int], float]


def sample_of(kind: Kind, timed: Sequence[Timed]) -> Sample:
    """What the marks of a whole step say."""
    step_s = timed[-1][2]
    waits = [(mark.unit, begin_s, end_s) for mark, begin_s, end_s in timed if mark.kind == "wait"]
    found: defaultdict[tuple[SpanKind, int], list[float]] = defaultdict(list)
    for mark, begin_s, end_s in timed:
        if mark.kind in ("fill", "wait"):
            found[mark.kind, mark.unit].append(end_s - begin_s)
    # The order goes round: what comes before the first unit is computed between the last one and it.
    ends = [begin_s for _, begin_s, _ in waits[1:]] + [step_s + begin_s for _, begin_s, _ in waits[:1]]
    for (unit, _, went_on_s), next_s in zip(waits, ends, strict=True):
        found["unit", unit].append(next_s - went_on_s)
    means = {what: fmean(seconds) for what, seconds in found.items()}
    return Sample(kind=kind, step_s=step_s, wait_s=sum(end_s - begin_s for _, begin_s, end_s in waits), means=means)


def spans(marks: Marks, tracing: Tracing, begin_s: float, timed: Iterable[Timed]) -> Iterator[Span]:
    """What a trace shows of a step that began at `begin_s`."""
    units, nbytes = marks.plan.manifest.units, marks.plan.unit_nbytes
    for mark, began_s, ended_s in timed:
        is_step, is_fill = mark.kind == "step", mark.kind == "fill"
        span = Span(
            row="copy" if is_fill else "compute",
            kind=mark.kind,
            name=f"{marks.kind.what} {marks.step}" if is_step else units[mark.unit].name,
            begin_s=begin_s + began_s,
            end_s=begin_s + ended_s,
            step=marks.step,
            nbytes=nbytes[mark.unit] if is_fill else 0,
            planned=mark.planned,
        )
        if mark.begin is not mark.end:
            yield span
        if is_step:
            host = [host_s - tracing.host_origin_s for host_s in marks.host_s]
            yield replace(span, row="host", begin_s=host[0], end_s=host[1])
