"""Lent links: idle neighbours feed a device, too. Each brings a part of a copy over its own link, and passes it on.

A copy is shared out by bytes, so that all links end together. The device's own link takes its share in one piece. A
neighbour's share goes in small pieces from the host into a ring of buffers on the neighbour, and from there is pulled
by a copy engine of the device, which takes a fraction of the time where a fast link joins the two. A neighbour waits
for nothing but a buffer to be pulled, so it fills buffers for the next copies while the device waits for a release.

Whoever asks for a copy sees one copy stream, which ends after all pulls of the copy. That costs the own link the time
of the last pull, once: from then on the neighbour is ahead by it. No step is captured, as the copies of a graph would
take the own link alone. Eager ones do, too, once a source was not pinned: a thread queues such copies, and events that
it has not recorded yet would hold back nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NoReturn

import torch

from weightstream.errors import OffloadError
from weightstream.runtime.backend import Backend, Copy, Event, Side

logger = logging.getLogger("weightstream")

PIECE_NBYTES = 16 << 20
_BUFFERS = 16  # of a neighbour, as large as a piece: so far it works ahead
_LEAST_NBYTES = 2 << 20  # of a share: the calls for a smaller one take the host as long as the link
_EAGER = "with lent_links steps run eager: the copies of a graph would take one link alone. Leave one of the two out"
_ALIGN_NBYTES = 256  # of where a share begins


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
        made = [_Buffer(there.alloc(PIECE_NBYTES), there.edge(), pull.edge()) for _ in range(_BUFFERS)]
        self._buffers = cycle(made)
        self.pulled: Event = made[-1].pulled  # the end of all pulls so far

    def bring(self, copies: Sequence[Copy], released: Event) -> None:
        """Queue copies. Their destinations are written after `released`, their sources are read before."""
        self.pull.wait(Side.COPY, released)
        for copy in copies:
            for dst, src in zip(copy.dst.split(PIECE_NBYTES), copy.src.split(PIECE_NBYTES), strict=True):
                self._pass(dst, src)

    def _pass(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        buffer = next(self._buffers)
        memory = buffer.memory[: src.numel()]
        self.there.wait(Side.COPY, buffer.pulled)
        self.there.copy([Copy(dst=memory, src=src, pinned=True)])
        self.there.record(Side.COPY, buffer.filled)
        self.pull.wait(Side.COPY, buffer.filled)
        self.pull.copy([Copy(dst=dst, src=memory, pinned=True)])
        self.pull.record(Side.COPY, buffer.pulled)
        self.pulled = buffer.pulled


class Borrowing:
    """A backend that copies over its own link and over those of neighbours; all else is the backend's."""

    def __init__(self, own: Backend, neighbours: Sequence[Neighbour]) -> None:
        self._own, self._neighbours = own, tuple(neighbours)
        self.num_links = 1 + len(self._neighbours)
        self._ahead = [0] * self.num_links  # bytes that each link was given beyond the one that was given least
        self._released = own.edge()
        self._is_alone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def capture(self, graph: Any, **options: Any) -> NoReturn:
        """Raises `OffloadError`."""
        raise OffloadError(_EAGER)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Queue copies on the copy stream."""
        if self._own.capturing():
            raise OffloadError(_EAGER)
        if not self._is_alone and not all(copy.pinned for copy in copies):
            self._is_alone = True
            logger.warning("lent_links are not used any more: weights that are not pinned, or on disk, are copied.")
        if self._is_alone:
            self._own.copy(copies)
            return
        for copy in copies:
            if copy.prepare is not None:
                copy.prepare()
        own, *theirs = self._divided(copies)
        busy = [(neighbour, parts) for neighbour, parts in zip(self._neighbours, theirs, strict=True) if parts]
        if busy:
            self._own.record(Side.COPY, self._released)  # what is there may be read until then
        self._own.copy(own)
        try:
            for neighbour, parts in busy:
                neighbour.bring(parts, self._released)
        finally:  # where one fails, others are on their way
            for neighbour, _ in busy:
                self._own.wait(Side.COPY, neighbour.pulled)

    def _divided(self, copies: Sequence[Copy]) -> list[list[Copy]]:
        """What each link brings: consecutive parts of each copy."""
        found: list[list[Copy]] = [[] for _ in self._ahead]
        most = _BUFFERS * PIECE_NBYTES  # further a neighbour cannot use the time in which the own link has more to do
        for copy in copies:
            whole, begin = [copy.src.numel(), *[0] * len(self._neighbours)], 0
            given = shares(copy.src.numel(), self._ahead) if copy.src.dim() == 1 else whole  # rows are not divided
            for parts, nbytes in zip(found, given, strict=True):
                end = begin + nbytes
                if nbytes:
                    parts.append(Copy(dst=copy.dst[begin:end], src=copy.src[begin:end], pinned=True))
                begin = end
            after = [ahead + nbytes for ahead, nbytes in zip(self._ahead, given, strict=True)]
            self._ahead = [min(ahead - min(after), most) for ahead in after]
        return found

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


def shares(nbytes: int, ahead: Sequence[int]) -> list[int]:
    """Bytes of a copy for each link, the own one first, so that all links were given as many with it.

    A copy for which that makes a share too small goes to fewer links, a small copy to the own one, which needs the
    fewest calls. The next copies make up for it, as `ahead` has what each link was given beyond another.
    """
    found = [0] * len(ahead)
    links = sorted(range(len(ahead)), key=ahead.__getitem__) if nbytes >= _LEAST_NBYTES else [0]
    while (level := (nbytes + sum(ahead[k] for k in links)) // len(links)) - ahead[links[-1]] < _LEAST_NBYTES:
        if len(links) == 1:
            break
        links.pop()
    for link in links:
        found[link] = (level - ahead[link]) // _ALIGN_NBYTES * _ALIGN_NBYTES
    found[max(links)] += nbytes - sum(found)
    return found
