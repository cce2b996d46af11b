"""A stack of matrices: a weight of which single rows are read, and the memory where each row is.

A row is one matrix, such as that of one expert. Each row is whole tiles of the codec, so it can be decompressed by
itself. Its compressed bytes are in two places: its tiles, all of one size, and its *escapes*, of any length. `starts`
hold the number of escapes before each tile, `bases` a byte per tile (codec/format.py).

Knows homes and sources, no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.codec import coding
from weightstream.codec.format import TILE
from weightstream.errors import InvariantError, OffloadError
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.experts.slot_cache import WORD, RowPiece, put_rows
from weightstream.runtime.weights.home import Home
from weightstream.runtime.weights.sources import Mapped, PageWindow, Pinned


class RowReader(NamedTuple):
    """How rows of a stack are read. Both functions take the ids of rows; for a cached stack also the slots of the rows.

    `put` also takes `places`, and writes each row to its place in the buffer, except rows whose id or slot is negative.
    `read` returns the rows, in memory that the next call overwrites. `memory` are the slots of an uncompressed stack.
    """

    put: Callable[..., None]
    read: Callable[..., torch.Tensor]
    memory: torch.Tensor | None = None  # of shape (slots, *row)


@dataclass(kw_only=True, slots=True)
class Stack:
    """A weight that is a stack of rows, compressed ones of whole tiles, and its place in the buffer, `out`."""

    home: Home
    shape: tuple[int, ...]
    dtype: torch.dtype
    out: torch.Tensor

    @classmethod
    def of(cls, home: Home, buffer: torch.Tensor) -> Stack | None:
        """The group as a stack; None unless it is one contiguous tensor, and its rows whole tiles if compressed."""
        (member, *others) = home.group.members
        shape, dtype = member.spec.shape, getattr(torch, member.spec.dtype)
        is_flat = len(shape) > 0 and member.view(home.group.home, 0).is_contiguous() and not others
        is_cut = home.layout is not None and prod(shape[1:]) % TILE > 0
        if not is_flat or is_cut or home.group.nbytes != prod(shape) * dtype.itemsize:
            return None
        return cls(home=home, shape=shape, dtype=dtype, out=buffer[: home.group.nbytes])

    @property
    def key(self) -> int:
        return id(self.home.group.members[0].tensor)

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of an uncompressed row."""
        return self.home.group.nbytes // self.num_rows

    def picking(self, coded: torch.Tensor) -> RowReader:
        """A reader that decompresses rows of this stack from `coded`, the compressed bytes of all of it."""
        assert self.home.layout is not None
        put, target = coding.picking(coded, self.home.layout, self.out, self.num_rows), self._target()
        return RowReader(put=put, read=partial(_put_first, put, target))

    def reading(self, slots: torch.Tensor) -> RowReader:
        """A reader of rows from slots, which hold rows in the home's form, compressed or not."""
        layout, target = self.home.layout, self._target()
        if layout is None:
            memory = slots[:, : self.nbytes].view(self.dtype).view(len(slots), *self.shape[1:])
            return RowReader(put=partial(put_rows, slots, target), read=lambda _, found: memory[found], memory=memory)
        put = coding.picking(self.heads().to(slots.device), layout, self.out, self.num_rows, slots)
        return RowReader(put=put, read=partial(_put_first, put, target))

    def heads(self) -> torch.Tensor:
        """The `starts` and `bases` of a compressed stack, in host memory."""
        layout = self.home.layout
        assert layout is not None
        return self._data()[layout.starts_at : layout.escapes_at]

    def _target(self) -> torch.Tensor:
        return self.out.view(self.dtype).view(self.shape)

    def _data(self) -> torch.Tensor:
        """The bytes of the home in the form that it holds, compressed or not."""
        source = self.home.source
        if isinstance(source, PageWindow):
            window = source.window()
            assert window is not None
            return window
        return source.view if source.coded is None else source.coded

    def why_unread(self, backend: Backend, *, waits: bool) -> str | None:
        """Reason why single rows of this stack cannot be fetched from their place, or None.

        Without `waits`, this does not wait for pages of a file that are being pinned. None then means that no reason is
        known yet.
        """
        source = self.home.source
        extents = source.extents if isinstance(source, Mapped) else ()
        if any(extent.pitch for extent in extents):
            return "it is columns of tensors in files"
        if not waits and isinstance(source, PageWindow) and not source.is_refused:
            return None
        return None if self.segments(backend) else f"it is in {source.tier.value} memory that the device cannot read"

    def pieces(self, backend: Backend) -> list[RowPiece]:
        """The pieces of the rows, in host memory that the device reads; empty if it cannot read that memory.

        A compressed row is two pieces: its tiles, and its escapes.
        """
        if (segments := self.segments(backend)) is None:
            return []
        if (layout := self.home.layout) is None:
            return pieces_of_rows(segments, self.num_rows, self.nbytes)
        (data,) = segments
        tiles = layout.num_tiles // self.num_rows
        stride = tiles * layout.tile_nbytes
        words = RowPiece(rows=data[: self.num_rows * stride].split(stride), at=0)  # the tiles
        starts = self._data()[layout.starts_at : layout.bases_at].view(torch.int32)[::tiles].tolist()
        spans = list(pairwise(layout.escapes_at + max(0, min(start, layout.num_escapes)) for start in starts))
        # whole words around the escapes of each row, so that these keep their place in a word; and at least one
        words_around = [(begin // WORD * WORD, -(-max(begin + 1, end) // WORD) * WORD) for begin, end in spans]
        escapes = tuple(data[min(begin, data.numel() - WORD) : end] for begin, end in words_around)
        return [words, RowPiece(rows=escapes, at=stride)]

    def segments(self, backend: Backend) -> list[torch.Tensor] | None:
        """The bytes of the home, in order, as views that kernels of the device can read; None if they cannot."""
        source = self.home.source
        parts: Sequence[torch.Tensor | None]
        # on the CPU not from files: a file may change before a read, and only reads of whole stacks check for that
        if backend.device.type == "cpu":
            parts = [source.view if source.place is None else None]
        elif isinstance(source, PageWindow):
            parts = [source.shown(k) for k in range(len(source.extents))]
        else:
            parts = [backend.device_view(source.data) if isinstance(source, Pinned) else None]
        word = 1 if self.home.layout is None else WORD  # compressed rows are read in place, too
        readable = [part for part in parts if part is not None and not part.data_ptr() % word]
        return readable if len(readable) == len(parts) else None


def _put_first(put: Callable[..., None], target: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """Put the rows to the beginning of `target`, and return these. `rows`: ids, and perhaps slots."""
    put(*rows)
    return target[: len(rows[0])]


def copy_function(home: Home, out: torch.Tensor, backend: Backend) -> Callable[[], None]:
    """A function that copies all of a cached stack from its home to `out`, and decompresses it.

    A graph can hold that copy if the device can read the home. If it cannot, the function raises `OffloadError` in a
    capture.
    """
    stack = Stack.of(home, out)
    segments = stack.segments(backend) if stack is not None and backend.device.type != "cpu" else None
    if stack is None or segments is None:
        return partial(_copy_plain, home, out[: home.group.nbytes], backend)
    if home.layout is None:
        sizes = [segment.numel() for segment in segments]
        return partial(_copy_each, out[: home.group.nbytes].split(sizes), segments)
    pick = coding.picking(segments[0], home.layout, out, stack.num_rows, heads=stack.heads().to(out.device))
    return partial(pick, torch.arange(stack.num_rows, device=out.device))


def _copy_plain(home: Home, out: torch.Tensor, backend: Backend) -> None:
    if backend.capturing():
        raise OffloadError(f"{home.group.alias} is read whole, and the device cannot read it where it lies")
    home.source.plain_into(out)


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():  # hidden from the watch of a step
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def unread(aliases: Collection[str], homes: Mapping[str, Home], backend: Backend, *, waits: bool = True) -> str | None:
    """Reason why single rows of one of these stacks cannot be fetched from their place; None if those of all can."""
    for alias in sorted(aliases):
        stack = Stack.of(homes[alias], torch.empty(0, dtype=torch.uint8, device="cpu"))
        why = "it is no stack of whole rows" if stack is None else stack.why_unread(backend, waits=waits)
        if why is not None:
            return f"rows of {alias} cannot be fetched one by one, as {why}"
    return None


def pieces_of_rows(segments: Sequence[torch.Tensor], num_rows: int, nbytes: int) -> list[RowPiece]:
    """The pieces of rows of `nbytes` bytes that follow each other in these segments.

    Segments may end anywhere. Where one ends inside a row, all rows are cut there, so that a piece has one place in all
    slots. There are few such places, as files usually end between matrices.
    """
    ends = list(accumulate(segment.numel() for segment in segments))
    if ends[-1] != num_rows * nbytes:
        raise InvariantError(f"{num_rows} rows of {nbytes} bytes are not the {ends[-1]} bytes of their segments")
    cuts = sorted({0, nbytes} | {end % nbytes for end in ends})
    # one segment per row, as in files with a tensor for each expert
    if ends == list(range(nbytes, (num_rows + 1) * nbytes, nbytes)):
        return [RowPiece(rows=tuple(segments), at=0)]
    found: list[list[torch.Tensor]] = [[] for _ in cuts[1:]]
    index = begin = 0  # of the segment
    for row in range(num_rows):
        for piece, (start, end) in zip(found, pairwise(cuts), strict=True):
            while row * nbytes + start >= ends[index]:
                begin, index = ends[index], index + 1
            at = row * nbytes - begin
            piece.append(segments[index][at + start : at + end])
    return [RowPiece(rows=tuple(rows), at=start) for rows, start in zip(found, cuts, strict=False)]
