"""Look-ahead: rows for the unit that picks next are fetched while this one computes.

[Note: look-ahead]
States change little from one layer to the next. So the router of the next layer, if it is asked with the states of this
one, names most of the rows that it will name. Those that have no slot are fetched on a stream of their own, from where
the rows of this unit have come to where the next one asks for its own: compute waits there. A unit gets the rows that
it names, whatever was guessed. On a GPU this is done in graphs alone: elsewhere the host is what a step waits for, and
a guess would take more of it. But for one guess before the first graph: it loads kernels, and their workspace. Under
autocast there is none: what a router is cast to is kept for all, and nobody would wait until it is there.
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
    """A fetch on its way: the event at its end, and the states that it reads, which live as long."""

    end: Event
    states: torch.Tensor


class Ahead:
    """What a plan fetches ahead, `most` rows for each of the units that pick. At most one fetch is on its way."""

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
        """Compute comes to a unit that picks, behind what was fetched for it: as `Picks.forward`."""
        self.join()
        if self._most:
            rows.look_ahead = lambda states: self._begin(unit, states)
        return self._picks[unit].forward(call, rows)

    def join(self) -> None:
        """Order compute after what was fetched."""
        running, self._running = self._running, None
        if running is not None:
            self._backend.wait(Side.COMPUTE, running.end)

    def drop(self) -> None:
        """The capture that it was part of failed."""
        self._running = None

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
        self._running = _Fetch(end, states)
