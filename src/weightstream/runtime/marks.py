"""Marks: the stamps of one step, and what they say once their times are known. Knows no device and no schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from weightstream.plan.plan import Plan
from weightstream.runtime.backend import Stamp
from weightstream.runtime.values import tensors_in
from weightstream.trace import Row, Span, SpanKind, Trace


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
    num_fills: int = 0
    filling: dict[int, Fill] = field(default_factory=dict)  # what nobody has waited for yet


@dataclass(eq=False, slots=True)
class Fill:
    """A copy of a unit; of the trace's fills it is the one numbered `flow`."""

    unit: int
    planned: bool
    begin: Stamp
    end: Stamp = None
    flow: int = 0


@dataclass(eq=False, slots=True)
class Wait:
    """Compute comes to a unit, goes on, and releases it; `after` is `before` where there was nothing to wait for."""

    unit: int
    before: Stamp
    after: Stamp
    release: Stamp = None
    flow: int = 0


@dataclass(eq=False, slots=True)
class Marks:
    """The stamps of one step, which `is_whole` unless it is a piece; without an `end`, of what a trace sees between."""

    plan: Plan
    tracing: Tracing | None
    begin: Stamp
    kind: Kind
    is_whole: bool
    step: int = 0
    end: Stamp = None
    host_s: tuple[float, float] = (0.0, 0.0)
    waits: list[Wait] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)

    def stamps(self) -> Iterator[Stamp]:
        """The last of each stream first: until the device has passed it nobody asks for the others."""
        yield self.end
        for fill in reversed(self.fills):
            yield from (fill.end, fill.begin)
        for wait in reversed(self.waits):
            yield from (wait.release, wait.after, wait.before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Seconds of one step: whole, all waits, and by unit."""

    kind: Kind
    step_s: float
    wait_s: float
    copies: dict[int, float]
    waits: dict[int, float]
    computes: dict[int, float]


def sample_of(marks: Marks, at: dict[int, float]) -> Sample:
    """What the stamps of a whole step say, with each `at` so many seconds from its begin, by identity."""
    step_s, waits = at[id(marks.end)], marks.waits
    waited = [(wait.unit, at[id(wait.after)] - at[id(wait.before)]) for wait in waits]
    # The order goes round: what comes before the first unit is computed between the last one and it.
    ends = [at[id(wait.before)] for wait in waits[1:]] + [step_s + at[id(wait.before)] for wait in waits[:1]]
    computed = [(wait.unit, end - at[id(wait.after)]) for wait, end in zip(waits, ends, strict=True)]
    return Sample(
        kind=marks.kind,
        step_s=step_s,
        wait_s=sum(seconds for _, seconds in waited),
        copies=_means((fill.unit, at[id(fill.end)] - at[id(fill.begin)]) for fill in marks.fills),
        waits=_means(waited),
        computes=_means(computed),
    )


def _means(seconds: Iterable[tuple[int, float]]) -> dict[int, float]:
    found: defaultdict[int, list[float]] = defaultdict(list)
    for unit, taken in seconds:
        found[unit].append(taken)
    return {unit: fmean(taken) for unit, taken in found.items()}


def spans(marks: Marks, tracing: Tracing, begin_s: float, at: dict[int, float]) -> Iterator[Span]:
    """What a trace shows of a step that began at `begin_s`, with its stamps `at` so many seconds from there."""

    def span(row: Row, kind: SpanKind, name: str, begin: Stamp, end: Stamp, **more: Any) -> Span:
        began_s, ended_s = begin_s + at[id(begin)], begin_s + at[id(end)]
        return Span(row=row, kind=kind, name=name, begin_s=began_s, end_s=ended_s, step=marks.step, **more)

    if marks.end is not None:
        yield (step := span("compute", "step", f"{marks.kind.what} {marks.step}", marks.begin, marks.end))
        host = [host_s - tracing.host_origin_s for host_s in marks.host_s]
        yield replace(step, row="host", begin_s=host[0], end_s=host[1])
    units, nbytes = marks.plan.manifest.units, marks.plan.unit_nbytes
    for fill in marks.fills:
        more = {"nbytes": nbytes[fill.unit], "planned": fill.planned, "flow": fill.flow}
        yield span("copy", "fill", units[fill.unit].name, fill.begin, fill.end, **more)
    for wait in marks.waits:
        name = units[wait.unit].name
        if wait.after is not wait.before:
            yield span("compute", "wait", name, wait.before, wait.after, flow=wait.flow)
        if wait.release is not None:
            yield span("compute", "unit", name, wait.after, wait.release)
