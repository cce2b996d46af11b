"""A trace: spans of host, compute and copies, written for Perfetto and chrome://tracing. Knows no device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from weightstream.errors import StoreError

Row = Literal["host", "compute", "copy"]
SpanKind = Literal["step", "wait", "unit", "fill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A piece of work on a row, in seconds from the begin of the trace."""

    row: Row
    kind: SpanKind
    name: str  # of the unit, or of the step
    begin_s: float
    end_s: float
    step: int  # counts from 1 in the trace; 0 is between two steps
    nbytes: int = 0  # of a fill
    planned: bool = True  # False: a fill on demand
    device: str = ""  # the device of the row, where there are several

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class ExpertTraffic(NamedTuple):
    """Counts of the cache of experts of a unit: hits, misses and prefetched rows."""

    found: int = 0  # rows that steps read and the cache had
    fetched: int = 0  # rows that steps read and the cache fetched then
    fetched_nbytes: int = 0  # bytes of all fetched rows, prefetched ones included
    ahead: int = 0  # rows that were prefetched, as a guess
    ahead_used: int = 0  # of these, rows that a step then read, which count in `found`, too


def total(experts: Iterable[ExpertTraffic]) -> ExpertTraffic:
    """The sums over units."""
    return ExpertTraffic(*map(sum, zip(ExpertTraffic(), *experts, strict=True)))


class Trace:
    """The spans of a `with streamer.trace()` block, at most `limit`; complete once the block ends.

    `experts` has the counts of each unit with a cache of experts, of these steps.
    """

    def __init__(self, name: str, limit: int = 100_000) -> None:
        self.name = name
        self.limit = limit
        self.spans: list[Span] = []
        self.experts: dict[str, ExpertTraffic] = {}

    def save(self, path: str | Path) -> None:
        """Write the Trace Event Format, to be opened at https://ui.perfetto.dev or chrome://tracing.

        Raises `StoreError` if the file cannot be written.
        """
        devices = sorted({span.device for span in self.spans}) or [""]
        rows = {key: number for number, key in enumerate(product(devices, get_args(Row)), 1)}
        events = [_meta("process_name", 0, name=self.name)]
        for (device, row), number in rows.items():
            name = f"{device} {row}".lstrip()
            events += [_meta("thread_name", number, name=name), _meta("thread_sort_index", number, sort_index=number)]
        events += [_event(span, rows[span.device, span.row]) for span in self.spans]
        if self.experts:
            events += [_meta("thread_name", len(rows) + 1, name="experts"), self._of_experts(len(rows) + 1)]
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}; name a file that can be written") from error

    def _of_experts(self, thread: int) -> dict[str, Any]:
        """An event as long as the trace: the counts of each unit, and their sums."""
        units = {unit or "(root)": of_unit._asdict() for unit, of_unit in self.experts.items()}
        sums = total(self.experts.values())
        ends = max((span.end_s for span in self.spans), default=0.0)
        name = f"{sums.found} found, {sums.fetched} fetched"
        at = {"ph": "X", "pid": 1, "tid": thread, "ts": 0, "dur": round(1e6 * ends, 3)}
        return at | {"name": name, "cat": "experts", "args": sums._asdict() | {"units": units}}


def _meta(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": thread, "args": args}


def _event(span: Span, thread: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.step}
    if span.kind != "step":
        args["unit"] = span.name
    if span.kind == "fill":
        args |= {"nbytes": span.nbytes, "planned": span.planned}
        if span.seconds > 0:
            args["GB/s"] = round(span.nbytes / span.seconds / 1e9, 2)
    name = f"wait {span.name}" if span.kind == "wait" else span.name
    begin_us, took_us = round(1e6 * span.begin_s, 3), round(1e6 * span.seconds, 3)
    at = {"ph": "X", "pid": 1, "tid": thread, "ts": begin_us, "dur": took_us}
    return at | {"name": name, "cat": span.kind, "args": args}
