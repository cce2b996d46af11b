"""Rows of stacks in waves, past the slots: while the device computes with one wave, the next one is copied.

A prompt names nearly all rows of a stack, each for many tokens. Their host memory is copied in order, to two halves of
the buffer in turn. The host knows the rows, so prompts are not captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.plan.schedule import aligned
from weightstream.runtime.devices.backend import Backend, Side
from weightstream.runtime.experts.slot_cache import RowPiece


class RowLeaf(NamedTuple):
    """A stack in host memory: the pieces of its rows, and how a row looks."""

    pieces: Sequence[RowPiece]
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Wave(NamedTuple):
    """Rows that are on the device: their numbers, and for each leaf memory of shape (rows, *row)."""

    rows: Sequence[int]
    leaves: tuple[torch.Tensor, ...]


class Stage(NamedTuple):
    """The stacks of a unit, by the `id()` of their tensor objects, and memory for waves of their rows."""

    leaves: Mapping[int, RowLeaf]
    memory: torch.Tensor
    backend: Backend

    def stream(self, leaves: Sequence[RowLeaf]) -> RowStream:
        return RowStream(leaves, self.memory, self.backend)


class RowStream:
    """Brings rows of some stacks to the device, wave by wave, in `memory`, which holds at least two rows."""

    def __init__(self, leaves: Sequence[RowLeaf], memory: torch.Tensor, backend: Backend) -> None:
        half = memory.numel() // 2
        self._leaves = leaves
        self._halves = memory[:half], memory[half : 2 * half]
        self._backend = backend
        gaps = sum(aligned(1) for _ in leaves)  # the memory of each leaf begins at an aligned address
        self.most = (half - gaps) // sum(leaf.nbytes for leaf in leaves)
        self.device = memory.device

    def waves(self, rows: Sequence[int], most: int) -> Iterator[Wave]:
        """These rows in order, up to `most` at a time. A wave may be read by work that is queued before the next one
        is asked for."""
        num, backend = min(most, self.most), self._backend
        waves = [rows[begin : begin + num] for begin in range(0, len(rows), num)]
        read, filled = [[backend.event(), backend.event()] for _ in range(2)]
        for event in read:
            backend.record(Side.COMPUTE, event)  # earlier work may read the buffer
        ready: list[Wave] = []

        def begin(index: int) -> None:
            backend.wait(Side.AHEAD, read[index % 2])
            with backend.aside(), _disable_current_modes(), torch.no_grad():
                ready.append(self._copied(waves[index], self._halves[index % 2]))
            backend.record(Side.AHEAD, filled[index % 2])

        try:
            for index in range(len(waves)):
                if not index:
                    begin(0)
                else:
                    backend.record(Side.COMPUTE, read[(index - 1) % 2])
                if index + 1 < len(waves):
                    begin(index + 1)
                backend.wait(Side.COMPUTE, filled[index % 2])
                yield ready[index]
        finally:  # a forward may fail between two waves
            for event in filled:
                backend.wait(Side.COMPUTE, event)

    def _copied(self, rows: Sequence[int], memory: torch.Tensor) -> Wave:
        found, begin = [], 0
        for leaf in self._leaves:
            part = memory[begin : begin + len(rows) * leaf.nbytes].view(len(rows), leaf.nbytes)
            begin += aligned(part.numel())
            for piece in leaf.pieces:
                for first, last in _runs(rows, piece, leaf.nbytes):
                    source = piece.rows[rows[first]]
                    target = part[first : last + 1, piece.at : piece.at + source.numel()].view(-1)
                    target.copy_(source.as_strided((target.numel(),), (1,)))
            found.append(part.view(leaf.dtype).view(len(rows), *leaf.shape))
        return Wave(rows, tuple(found))


def _runs(rows: Sequence[int], piece: RowPiece, nbytes: int) -> Iterator[tuple[int, int]]:
    """The first and the last place of each run of whole rows, of `nbytes`, that follow each other in host memory."""
    first = 0
    for place in range(1, len(rows) + 1):
        if place < len(rows):
            before, after = piece.rows[rows[place - 1]], piece.rows[rows[place]]
            if before.numel() == after.numel() == nbytes and _follows(before, after):
                continue
        yield first, place - 1
        first = place


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether `after` begins where `before` ends, in the same storage."""
    is_next = after.storage_offset() == before.storage_offset() + before.numel()
    return is_next and after.untyped_storage()._cdata == before.untyped_storage()._cdata
