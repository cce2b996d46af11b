"""Slices of files: a range of bytes, or some columns of a matrix; and several slices read as one source.

Knows no model or device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from weightstream.store.mapping import FileMapping, FileRange
from weightstream.store.readers import CachedFile
from weightstream.store.staging import SourceRange


class FileSlice(NamedTuple):
    """Bytes [begin, end) of a file; with a `pitch`, only the first `width` bytes of every `pitch`."""

    mapping: FileMapping
    begin: int
    end: int
    width: int = 0
    pitch: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the slice, without the gaps between its rows."""
        return self.num_rows * self.width if self.pitch else self.end - self.begin

    @property
    def num_rows(self) -> int:
        return -(-(self.end - self.begin) // self.pitch) if self.pitch else 1

    @property
    def range(self) -> FileRange:
        """The range of the file from its first to its last byte, gaps included."""
        return FileRange(self.mapping, self.begin, self.end)

    def within(self, data: torch.Tensor) -> torch.Tensor:
        """The bytes of the slice out of those of its range: flat, or of shape `(num_rows, width)`."""
        return data.as_strided((self.num_rows, self.width), (self.pitch, 1)) if self.pitch else data

    def bytes(self) -> torch.Tensor:
        """A view of the bytes in the private map, which may not be read from disk yet."""
        return self.within(self.mapping.bytes(self.begin, self.end))

    def populated(self) -> torch.Tensor:
        """The same view, once its pages are in memory; raises `StoreError`."""
        return self.within(self.mapping.populated(self.begin, self.end))

    def reading(self) -> SourceRange:
        """The bytes of the slice as a range of a source, to be read in pieces."""
        return SourceRange(_Rows(self), 0, self.nbytes) if self.pitch else SourceRange(*self.range)


class _Rows(NamedTuple):
    """The rows of a slice, one after another, as a source."""

    extent: FileSlice

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        extent = self.extent
        first, last = begin // extent.width, -(-end // extent.width)
        start, stop = extent.begin + first * extent.pitch, extent.begin + (last - 1) * extent.pitch + extent.width
        packed = extent._replace(begin=start, end=stop).populated().reshape(-1)
        return memory[: end - begin].copy_(packed[begin - first * extent.width :][: end - begin])


class Joined:
    """Slices without a pitch, one after another, as a source that reads through the page cache."""

    def __init__(self, extents: Sequence[FileSlice]) -> None:
        self._parts = [(CachedFile(extent.mapping), extent.begin) for extent in extents]
        self._starts = list(accumulate((extent.nbytes for extent in extents), initial=0))
        self.nbytes = self._starts[-1]

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Read bytes [begin, end) into `memory` and return the view of them; raises `StoreError`."""
        at, index = begin, bisect_right(self._starts, begin) - 1
        while at < end:
            (file, offset), start = self._parts[index], self._starts[index]
            stop = min(end, self._starts[index + 1])
            file.read(offset + at - start, offset + stop - start, memory[at - begin : stop - begin])
            at, index = stop, index + 1
        return memory[: end - begin]
