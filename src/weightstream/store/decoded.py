"""DecodedMemory: the bytes of a coded tensor, decoded into memory of this process when they are first read.

Until then it is addresses without memory: tensors that view it have shape, dtype and place, and hold zeros, or NaN.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from weightstream.codec import chunks
from weightstream.codec.format import Layout
from weightstream.errors import StoreError
from weightstream.store.header import TensorEntry
from weightstream.store.mapping import FileMapping, give_back, poison, reserve

Decode = Callable[[torch.Tensor, Layout, torch.Tensor], None]


class DecodedMemory:
    """What a `FileMapping` is to a file: offsets are those of the weights, `nbytes` is how many bytes these are.

    `source` gives the coded bytes, on any device; `decode(coded, layout, out)` writes the weights to CPU memory, and
    may be replaced. Of a tensor of a file, `mapping` and `extent` tell where its coded bytes are.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        layout: Layout,
        source: Callable[[], torch.Tensor],
        *,
        decode: Decode = chunks.decode,
        check: Callable[[], None] = lambda: None,
        mapping: FileMapping | None = None,
        extent: tuple[int, int] | None = None,
    ) -> None:
        self.name, self.path, self.layout, self.source, self.decode = name, path, layout, source, decode
        self.check = check
        self.mapping, self.extent = mapping, extent
        self.nbytes = layout.raw_nbytes
        self.identity = mapping.identity if mapping is not None else (self.nbytes, 0, id(self))
        self.is_decoded = False
        self._lock = threading.Lock()
        self._buffer = reserve(self.nbytes, path)
        self.address = ctypes.addressof(self._buffer)

    @classmethod
    def of_entry(cls, entry: TensorEntry, mapping: FileMapping) -> DecodedMemory:
        """That of a coded tensor of a file."""
        assert entry.layout is not None
        extent, check = (entry.begin, entry.end), mapping.check
        source = partial(_coded, mapping, *extent)
        return cls(entry.name, entry.path, entry.layout, source, check=check, mapping=mapping, extent=extent)

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """Returns bytes [begin, end) as a uint8 view, decoded or not; raises `StoreError` outside the tensor."""
        self.check_range(begin, end)
        if begin == end:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=end - begin, offset=begin)

    def locate(self, address: int) -> int | None:
        """Returns the offset that `address` views, or None when it lies outside."""
        return address - self.address if 0 <= address - self.address < self.nbytes else None

    def populate(self, begin: int, end: int) -> None:
        """Makes sure that the bytes can be read: the first time, all are decoded; raises `StoreError`."""
        self.check()
        self.check_range(begin, end)
        if self.is_decoded:
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not self.is_decoded:
                give_back(self._buffer)
                self.decode(self.source(), self.layout, self.bytes(0, self.nbytes))
                self.is_decoded = True

    def poison(self) -> None:
        """Lets whoever reads the memory before it is decoded, and cannot be told from, see NaN."""
        with self._lock:
            if not self.is_decoded:
                poison(self._buffer)

    def forget(self) -> None:
        """Gives the memory back, with whatever was written to it; it is decoded again when it is read again."""
        with self._lock:
            self.is_decoded = False
            give_back(self._buffer)

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Copies bytes [begin, end) into `memory` and returns the view of these; raises as `populate` does."""
        self.populate(begin, end)
        return memory[: end - begin].copy_(self.bytes(begin, end))

    def written(self) -> list[tuple[int, int]] | None:
        """As `FileMapping.written`: once it is decoded, nobody can tell."""
        return None if self.is_decoded else []

    def check_range(self, begin: int, end: int) -> None:
        """Raises `StoreError` unless bytes [begin, end) are in the tensor."""
        if not 0 <= begin <= end <= self.nbytes:
            raise StoreError(f"{self.path}: {self.name!r}: bytes [{begin}, {end}) are not inside its {self.nbytes}")


def _coded(mapping: FileMapping, begin: int, end: int) -> torch.Tensor:
    mapping.populate(begin, end)
    data = mapping.bytes(begin, end)
    return data.clone() if begin % 4 else data  # decoders read words
