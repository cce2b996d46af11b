"""A trace: spans of what host, compute and copies did, written for Perfetto and chrome://tracing. Knows no device."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

logger = logging.getLogger("weightstream")

Row = Literal["host", "compute", "copy"]
SpanKind = Literal["step", "wait", "unit", "fill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time on a row; `step` counts from 1 in the trace, 0 is between two.

    A fill of `nbytes` bytes and the wait that needs it carry the same `flow`; 0: there is no such wait, or fill.
    """

    row: Row
    kind: SpanKind
    name: str
    begin_s: float
    end_s: float
    step: int
    nbytes: int = 0
    planned: bool = True
    flow: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Trace:
    """The spans of a `with streamer.trace()` block, complete once it ends; at most `limit` of them."""

    def __init__(self, name: str, limit: int = 100_000) -> None:
        self.name = name
        self.limit = limit
        self.spans: list[Span] = []
        self.is_full = False
        self._num_marked = 0

    def make_room(self, num: int) -> bool:
        """Whether so many spans more may come; says it once when not."""
        if not self.is_full and self._num_marked + num > self.limit:
            self.is_full = True
            logger.warning("the trace is full at %s spans: later steps are not in it; trace fewer", self.limit)
        self._num_marked += num
        return not self.is_full

    def save(self, path: str | Path) -> None:
        """Write the Trace Event Format, to be opened at https://ui.perfetto.dev or chrome://tracing."""
        rows = {row: number for number, row in enumerate(get_args(Row), 1)}
        names = [_meta("process_name", 0, name=self.name)]
        for row, number in rows.items():
            names += [_meta("thread_name", number, name=row), _meta("thread_sort_index", number, sort_index=number)]
        events = names + [event for span in self.spans for event in _events(span, rows[span.row])]
        events += list(_arrows(self.spans, rows))
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def covered_s(spans: Iterable[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, reached))
        reached = max(reached, span.end_s)
    return total


def _meta(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": thread, "args": args}


def _events(span: Span, thread: int) -> Iterator[dict[str, Any]]:
    args: dict[str, Any] = {"step": span.step}
    if span.kind != "step":
        args["unit"] = span.name
    if span.kind == "fill":
        args |= {"nbytes": span.nbytes, "planned": span.planned}
        if span.seconds > 0:
            args["GB/s"] = round(span.nbytes / span.seconds / 1e9, 2)
    name = f"wait {span.name}" if span.kind == "wait" else span.name
    yield _at(span.begin_s, thread) | {
        "ph": "X",
        "name": name,
        "cat": span.kind,
        "dur": round(1e6 * span.seconds, 3),
        "args": args,
    }


def _arrows(spans: Iterable[Span], rows: dict[Row, int]) -> Iterator[dict[str, Any]]:
    """From the begin of each fill into the wait that needs it, which may begin earlier, but ends later: viewers want
    the ends of an arrow in order, and inside of their spans."""
    waits = {span.flow: span for span in spans if span.kind == "wait" and span.flow}
    for fill in spans:
        if fill.kind == "fill" and (wait := waits.get(fill.flow)) is not None:
            arrow = {"name": "needs", "cat": "fill", "id": fill.flow}
            yield _at(fill.begin_s, rows[fill.row]) | arrow | {"ph": "s"}
            yield _at(max(fill.begin_s, wait.begin_s), rows[wait.row]) | arrow | {"ph": "f", "bp": "e"}


def _at(begin_s: float, thread: int) -> dict[str, Any]:
    return {"pid": 1, "tid": thread, "ts": round(1e6 * begin_s, 3)}
