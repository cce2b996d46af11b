"""One graph of several devices: what the others do is ordered with the first, which captures and launches it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from weightstream.runtime.devices.backend import Backend, Side


@contextmanager
def captured(backends: Sequence[Backend], graph: Any, **options: Any) -> Iterator[None]:
    """Inside, what is queued on any of these devices becomes the graph."""
    first, *others = backends
    with first.capture(graph, **options), ExitStack() as stack:
        for other in others:
            stack.enter_context(other.joined(graph))
            _follow(other, first)
            stack.callback(_follow, first, other)
        yield


def launch(backends: Sequence[Backend], graph: Any) -> None:
    """Launch it behind what all of these devices compute, and before what they will."""
    first, *others = backends
    for other in others:
        _follow(first, other)
    graph.replay()
    for other in others:
        _follow(other, first)


def _follow(one: Backend, other: Backend) -> None:
    """What is queued to compute on one device from now on runs behind what was on the other."""
    edge = other.edge()
    other.record(Side.COMPUTE, edge)
    one.wait(Side.COMPUTE, edge)
