"""LazyMemory: bytes that are made when they are first read, by decoding a coded tensor or by gathering parts of files.

Until then it is addresses without memory: tensors that view it have shape, dtype and place, and hold zeros.
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
    """`extents` are the bytes of files that it is made of, one after another; none where it is made of memory."""

    is_filled = False
    layout: Layout | None = None  # of the coded form that it is made of

    def __init__(self, name: str, path: Path, nbytes: int, extents: Sequence[FileSlice]) -> None:
        self.path = path
        self.nbytes = nbytes
        self.extents = tuple(extents)
        self._lock = threading.RLock()
        super().__init__(f"{path}: {name!r}", reserve(nbytes, path))

    @classmethod
    def of_extents(cls, name: str, extents: Sequence[FileSlice]) -> LazyMemory:
        """A tensor whose bytes are those of the extents, one after another, just as they are in the files."""
        for extent in extents:
            extent.mapping.check_range(extent.begin, extent.end)
        return cls(name, extents[0].mapping.path, sum(extent.nbytes for extent in extents), extents)

    def check(self) -> None:
        for mapping in {extent.mapping for extent in self.extents}:
            mapping.check()

    def write(self, out: torch.Tensor) -> None:
        """Writes the bytes to `out`, on any device, and keeps none of them; raises `StoreError`."""
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
        """Makes sure that the bytes can be read: the first time, all are made; raises `StoreError`."""
        self.check_range(begin, end)
        with self._lock:
            if self.is_filled:
                self.check()
            else:
                try:
                    with torch.inference_mode(False):  # else what it makes could not be written to in `write`
                        self.write(self.bytes(0, self.nbytes))
                    self.is_filled = True
                except BaseException:
                    self.forget()  # a part of it, or what only seems to be all of it
                    raise

    @property
    def was_read_early(self) -> bool:
        """Whether its bytes were read, or written to, before they were made."""
        with self._lock:
            return not self.is_filled and bool(self.nbytes) and is_touched(self._buffer)

    def forget(self) -> None:
        """Gives the memory back, with whatever was written to it; the bytes are made again when they are read again."""
        with self._lock:
            self.is_filled = False
            zero_pages(self._buffer, self.path)


class DecodedMemory(LazyMemory):
    """The plain bytes of a coded tensor.

    `source` gives the coded bytes, on any device, else these are the one extent; `decode(coded, layout, out)` writes
    the weights; both can change.
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
        """From now on the coded bytes are those of `source`, in a layout of the same weights."""
        with self._lock:
            self.source = source
            self.layout = layout

    def _write(self, out: torch.Tensor) -> None:
        self.decode(self.source(), self.layout, out)


def _coded(extent: FileSlice) -> torch.Tensor:
    data = extent.populated()
    return data.clone() if extent.begin % 4 else data  # decoders read words
