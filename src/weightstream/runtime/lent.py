"""Lent links: idle neighbours feed a device, too. Each brings pieces of a copy over its own link, and passes them on.

A piece goes from the host into one of a few buffers of the neighbour, and from there is pulled by the device's copy
engine, which takes a fraction of the time where a fast link joins the two. Whoever asks for a copy sees one copy
stream, which waits for all pieces. Sources that are not pinned, and copies of a graph, take the device's own link.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from weightstream.runtime.backend import Backend, Copy, Event, Side

PIECE_NBYTES = 16 << 20
_BUFFERS = 4  # of a neighbour: one is filled while another is pulled
_LEAST_NBYTES = 2 << 20  # of a copy that is worth to be cut


@dataclass(slots=True)
class _Buffer:
    """Memory of a neighbour, and the ends of its last fill and of its last pull."""

    memory: torch.Tensor
    filled: Event
    pulled: Event


class Neighbour:
    """A link that is lent: `there` fills buffers on the neighbour, `pull` is another copy stream of the device."""

    def __init__(self, there: Backend, pull: Backend) -> None:
        self.there, self.pull = there, pull
        made = (_Buffer(there.alloc(PIECE_NBYTES), there.edge(), pull.edge()) for _ in range(_BUFFERS))
        self._buffers = cycle(list(made))

    def bring(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue the copy of a piece, behind what `pull` waits for."""
        buffer = next(self._buffers)
        memory = buffer.memory[: src.numel()]
        self.there.wait(Side.COPY, buffer.pulled)
        self.there.copy([Copy(dst=memory, src=src, pinned=True)])
        self.there.record(Side.COPY, buffer.filled)
        self.pull.wait(Side.COPY, buffer.filled)
        self.pull.copy([Copy(dst=dst, src=memory, pinned=True)])
        self.pull.record(Side.COPY, buffer.pulled)


class Borrowing:
    """A backend that copies over its own link and over those of neighbours; all else is the backend's."""

    def __init__(self, own: Backend, neighbours: Sequence[Neighbour]) -> None:
        self._own, self._neighbours = own, tuple(neighbours)
        self.num_links = 1 + len(self._neighbours)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Queue copies on the copy stream."""
        if self._own.capturing() or not all(copy.pinned and copy.prepare is None for copy in copies):
            self._own.copy(copies)
            return
        released, ends = self._own.edge(), []
        self._own.record(Side.COPY, released)
        for neighbour in self._neighbours:
            neighbour.pull.wait(Side.COPY, released)  # what is there may be read until then
        ways = cycle([None, *self._neighbours])
        for copy in copies:
            for dst, src in _pieces(copy):
                way = next(ways) if src.numel() >= _LEAST_NBYTES else None
                if way is None:
                    self._own.copy([Copy(dst=dst, src=src, pinned=True)])
                else:
                    way.bring(dst, src)
        for neighbour in self._neighbours:
            ends.append(neighbour.pull.edge())
            neighbour.pull.record(Side.COPY, ends[-1])
        for end in ends:
            self._own.wait(Side.COPY, end)

    def synchronize(self) -> None:
        """Block until all streams are idle, those of neighbours too: they read the host's memory."""
        for neighbour in self._neighbours:
            neighbour.there.synchronize()
            neighbour.pull.synchronize()
        self._own.synchronize()

    def close(self) -> None:
        """End threads and free what the backends hold; may be called twice."""
        with ExitStack() as stack:
            for backend in (self._own, *(b for n in self._neighbours for b in (n.pull, n.there))):
                stack.callback(backend.close)
            self.synchronize()


def _pieces(copy: Copy) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A copy in pieces of one size, nearly: as many as there would be full ones, none of which is small."""
    num = max(1, -(-copy.src.numel() // PIECE_NBYTES))
    size = -(-copy.src.numel() // num)
    return list(zip(copy.dst.split(size), copy.src.split(size), strict=True)) if copy.src.numel() else []
