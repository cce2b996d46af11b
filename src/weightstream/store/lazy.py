"""LazyMemory: bytes that are filled when they are first read, by decoding a tensor or by joining parts of files.

Until then it is reserved addresses without memory: tensors that view it have shape, dtype and address, and hold zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from weightstream.codec import coding
from weightstream.codec.format import Layout
from weightstream.store.file_slice import FileSlice
from weightstream.store.mapping import Memory, is_touched, reserve, zero_pages

Decode = Callable[[torch.Tensor, Layout, torch.Tensor], None]


class LazyMemory(Memory):
    """`extents` are the slices of files that it is filled from, in order; empty if it is filled from memory."""

    is_filled = False
    layout: Layout | None = None  # of the compressed form that it is filled from

    def __init__(self, name: str, path: Path, nbytes: int, extents: Sequence[FileSlice]) -> None:
        self.path = path
        self.nbytes = nbytes
        self.extents = tuple(extents)
        self._lock = threading.RLock()
        self._reserved = reserve(nbytes, path)
        super().__init__(f"{path}: {name!r}", self._reserved)

    @classmethod
    def of_extents(cls, name: str, extents: Sequence[FileSlice]) -> LazyMemory:
        """Memory that is filled with the bytes of the slices, one after another."""
        for extent in extents:
            extent.mapping.check_range(extent.begin, extent.end)
        return cls(name, extents[0].mapping.path, sum(extent.nbytes for extent in extents), extents)

    def check(self) -> None:
        for mapping in {extent.mapping for extent in self.extents}:
            mapping.check()

    def write(self, out: torch.Tensor) -> None:
        """Write the bytes to `out`, on any device, without keeping them; raises `StoreError`."""
        self.check()
        with torch.inference_mode(False), torch.no_grad():
            self._write(out)

    def _write(self, out: torch.Tensor) -> None:
        at = 0
        for extent in self.extents:
            data = extent.populated()
            out[at : at + extent.nbytes].view(data.shape).copy_(data)
            at += extent.nbytes

    def populate(self, begin: int, end: int) -> None:
        """Make the bytes readable. The first call fills all of them; raises `StoreError`."""
        self.check_range(begin, end)
        with self._lock:
            if self.is_filled:
                self.check()
            else:
                try:
                    with torch.inference_mode(False):  # a tensor made in inference mode could not be written to
                        self.write(self.bytes(0, self.nbytes))
                    self.is_filled = True
                except BaseException:
                    self.forget()  # it may be filled in part
                    raise

    @property
    def was_read_early(self) -> bool:
        """Whether the bytes were read or written to before they were filled."""
        with self._lock:
            return not self.is_filled and bool(self.nbytes) and is_touched(self._reserved)

    def forget(self) -> None:
        """Free the memory and everything written to it; the next read fills it again."""
        with self._lock:
            self.is_filled = False
            zero_pages(self._reserved, self.path)


class DecodedMemory(LazyMemory):
    """The uncompressed bytes of a compressed tensor.

    `source` returns the compressed bytes, on any device; by default they are the one slice in `extents`.
    `decode(coded, layout, out)` writes the weights. Both can be replaced later.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        layout: Layout,
        source: Callable[[], torch.Tensor] | None = None,
        *,
        decode: Decode = coding.decode,
        extents: Sequence[FileSlice] = (),
    ) -> None:
        super().__init__(name, path, layout.raw_nbytes, extents)
        self.layout: Layout = layout
        self.source = source or partial(_coded, self.extents[0])
        self.decode = decode

    def hold(self, source: Callable[[], torch.Tensor], layout: Layout) -> None:
        """Decode from the bytes of `source` from now on, which are the same weights in another layout."""
        with self._lock:
            self.source = source
            self.layout = layout

    def _write(self, out: torch.Tensor) -> None:
        self.decode(self.source(), self.layout, out)


def _coded(extent: FileSlice) -> torch.Tensor:
    data = extent.populated()
    return data.clone() if extent.begin % 4 else data  # decoders read whole words
