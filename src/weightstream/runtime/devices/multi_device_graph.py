"""One graph of several devices: the first captures and launches it, and the others are ordered with the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from weightstream.runtime.devices.backend import Backend, Graph, Side


@contextmanager
def captured(backends: Sequence[Backend], graph: Graph, **options: Any) -> Iterator[None]:
    """Capture work queued inside on any of these devices as the graph."""
    first, *others = backends
    with first.capture(graph, **options), ExitStack() as stack:
        for other in others:
            stack.enter_context(other.joined(graph))
            _follow(other, first)
            stack.callback(_follow, first, other)
        yield


def launch(backends: Sequence[Backend], graph: Graph) -> None:
    """Launch the graph after all work queued to compute on these devices, and before all later work."""
    first, *others = backends
    for other in others:
        _follow(first, other)
    graph.replay()
    for other in others:
        _follow(other, first)


def _follow(one: Backend, other: Backend) -> None:
    """Order later compute work of `one` device after compute work queued so far on the `other`."""
    edge = other.edge()
    other.record(Side.COMPUTE, edge)
    one.wait(Side.COMPUTE, edge)
