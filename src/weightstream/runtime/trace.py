"""A trace: spans of what host, compute and copies did, written for Perfetto and chrome://tracing. Knows no device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Row = Literal["host", "compute", "copy"]
SpanKind = Literal["step", "wait", "unit", "fill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time on a row; `step` counts from 1 in the trace, 0 is between two. A fill is of `nbytes`.

    `device`: whose row, where there are several.
    """

    row: Row
    kind: SpanKind
    name: str
    begin_s: float
    end_s: float
    step: int
    nbytes: int = 0
    planned: bool = True
    device: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Experts(NamedTuple):
    """What the cache of a unit was asked for: rows that it had, rows that were fetched then, and bytes of all that were
    fetched. `ahead` were fetched before, as a guess, and `ahead_used` of these are among those that it had."""

    found: int = 0
    fetched: int = 0
    fetched_nbytes: int = 0
    ahead: int = 0
    ahead_used: int = 0


def total(experts: Iterable[Experts]) -> Experts:
    """The sums over units."""
    return Experts(*map(sum, zip(Experts(), *experts, strict=True)))


class Trace:
    """The spans of a `with streamer.trace()` block, complete once it ends; at most `limit` of them.

    `experts` are those that each unit with a cache of them found and fetched meanwhile.
    """

    def __init__(self, name: str, limit: int = 100_000) -> None:
        self.name = name
        self.limit = limit
        self.spans: list[Span] = []
        self.experts: dict[str, Experts] = {}

    def save(self, path: str | Path) -> None:
        """Write the Trace Event Format, to be opened at https://ui.perfetto.dev or chrome://tracing."""
        devices = sorted({span.device for span in self.spans}) or [""]
        rows = {key: number for number, key in enumerate(product(devices, get_args(Row)), 1)}
        events = [_meta("process_name", 0, name=self.name)]
        for (device, row), number in rows.items():
            name = f"{device} {row}".lstrip()
            events += [_meta("thread_name", number, name=name), _meta("thread_sort_index", number, sort_index=number)]
        events += [_event(span, rows[span.device, span.row]) for span in self.spans]
        if self.experts:
            events += [_meta("thread_name", len(rows) + 1, name="experts"), self._of_experts(len(rows) + 1)]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

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
