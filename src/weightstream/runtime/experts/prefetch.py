"""Prefetch of expert rows: while a unit computes, the rows that the next unit will probably read are fetched.

[Note: look-ahead]
Hidden states change little from one layer to the next. So the router of the next layer, run on the states of this
layer, names most of the rows that it will name in its turn. Those without a slot are fetched on a stream of their own.
The fetch begins when the rows of this unit are there, and compute waits for its end when the next unit asks for its
rows. A unit always gets the rows that it names, whatever was guessed.

On a GPU rows are prefetched only in graphs: eager steps wait for the host, and a guess takes host time. The exception
is one guess before the first graph, which loads kernels and their workspace. Under autocast there is no prefetch:
autocast caches the cast weights of a router for all streams, and no other stream would wait until they are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.runtime.devices.backend import Backend, Event, Side
from weightstream.runtime.experts.rows import Rows
from weightstream.runtime.weights.picks import ForwardCall, Picks


class _Fetch(NamedTuple):
    """A fetch in flight: the event at its end, the states that it reads, which have to live as long, and whether it is
    part of a capture."""

    end: Event
    states: torch.Tensor
    is_captured: bool


class Ahead:
    """The prefetch of a plan: up to `most` rows for each unit that picks rows. At most one fetch is in flight."""

    def __init__(
        self, backend: Backend, most: int, picks: Mapping[int, Picks], rows_of: Callable[[int], Rows | None]
    ) -> None:
        self._backend = backend
        self._most = most
        self._picks = picks
        self._rows_of = rows_of
        self._is_warm = backend.device.type == "cpu"
        self._running: _Fetch | None = None

    def reach(self, unit: int, call: ForwardCall, rows: Rows) -> Callable[..., Any] | None:
        """As `Picks.forward` of the unit, after the rows that were prefetched for it."""
        self.join()
        if self._most:
            rows.look_ahead = lambda states: self._begin(unit, states)
        return self._picks[unit].forward(call, rows)

    def join(self) -> None:
        """Order compute after the fetch in flight, if there is one."""
        running, self._running = self._running, None
        if running is not None:
            self._backend.wait(Side.COMPUTE, running.end)

    def drop(self) -> None:
        """Forget the fetch in flight if a capture that it was part of has failed; order compute after any other."""
        if self._running is not None and self._running.is_captured:
            self._running = None
        self.join()

    def _begin(self, unit: int, states: torch.Tensor) -> None:
        backend, kind = self._backend, self._backend.device.type
        coming = min((other for other in self._picks if other > unit), default=unit)
        picks, rows = self._picks[coming], self._rows_of(coming)
        runs = (kind == "cpu" or backend.capturing() or not self._is_warm) and not torch.is_autocast_enabled(kind)
        if coming == unit or rows is None or rows.cache is None or not runs or not picks.guesses:
            return
        self._is_warm = True
        begin, end = backend.edge(), backend.edge()
        backend.record(Side.COMPUTE, begin)
        backend.wait(Side.AHEAD, begin)
        with backend.aside(), torch.no_grad(), _disable_current_modes():
            if (ids := picks.guess(states)) is not None:
                rows.cache.fetch_ahead(ids.reshape(-1).to(torch.int64).contiguous(), self._most)
            backend.record(Side.AHEAD, end)
        self._running = _Fetch(end, states, backend.capturing())
