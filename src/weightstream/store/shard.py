"""A shard: a safetensors file to be, of tensors as they are and tensors that are coded as they are written."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from weightstream.codec.chunks import Coder
from weightstream.codec.format import BITS, Layout, can_code
from weightstream.errors import StoreError, UnsupportedError
from weightstream.store import coded
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.decoded import LazyMemory
from weightstream.store.header import CODES, dtype_name
from weightstream.store.mapping import FileMapping

PAGE_NBYTES = 4096
_PIECE_NBYTES = 16 << 20
_LEAST_CODED = 64 << 10  # weights
_CODES = MappingProxyType({"none": (), "auto": BITS, "3bit": (3,), "4bit": (4,)})
_WORTH = MappingProxyType({"auto": 0.97, "3bit": 1.0, "4bit": 1.0})  # of the bytes: decoding has a price

Mapped = FileMapping | LazyMemory
Advance = Callable[[int], None]  # told how many more bytes of tensors are done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A safetensors file to be: a header of whole pages, and the tensors that follow it without gaps.

    Those that have a layout are coded. Their checksums are known once they are written; the header has room for them.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    layouts: Mapping[str, Layout]
    coder: Coder

    @property
    def nbytes(self) -> int:
        return len(self.header({})) + sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor in the file."""
        return {name: stored_nbytes(name, tensor, self.layouts) for name, tensor in self.tensors.items()}

    def header(self, sums: Mapping[str, int]) -> bytes:
        """The beginning of the file, as long whatever the checksums are; raises `UnsupportedError` for a dtype."""
        nbytes = -(-(8 + len(self._text({}))) // PAGE_NBYTES) * PAGE_NBYTES - 8
        return nbytes.to_bytes(8, "little") + self._text(sums).ljust(nbytes)

    def _text(self, sums: Mapping[str, int]) -> bytes:
        texts = {"format": "pt", **self.metadata}
        if self.layouts:
            texts[coded.KEY] = coded.text_of(self.layouts, {n: self.tensors[n].shape for n in self.layouts}, sums)
        facts: dict[str, Any] = {"__metadata__": texts}
        end = 0
        for name, nbytes in self.sizes().items():
            dtype, shape = dtype_name(self.tensors[name]), list(self.tensors[name].shape)
            if dtype not in CODES:
                raise UnsupportedError(f"{name} is {dtype}, which safetensors cannot hold")
            begin, end = end, end + nbytes
            code, shape = ("U8", [nbytes]) if name in self.layouts else (CODES[dtype], shape)
            facts[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        return json.dumps(facts, separators=(",", ":")).encode()

    def write(self, path: Path, mappings: Sequence[Mapped], advance: Advance) -> None:
        """Writes the file; raises `OSError` where that fails, `StoreError` where a mapped file changed."""
        sums = dict.fromkeys(self.layouts, 0)
        with open(path, "wb") as file:
            file.seek(len(self.header(sums)))
            for name, tensor in self.tensors.items():
                for piece in self.pieces(name, mappings):
                    file.write(piece)
                    if name in sums:
                        sums[name] = zlib.crc32(piece, sums[name])
                advance(tensor.nbytes)
            file.seek(0)
            file.write(self.header(sums))

    def pieces(self, name: str, mappings: Sequence[Mapped]) -> Iterator[Any]:
        """The bytes of a tensor in the file, in arrays."""
        with readable(self.tensors[name], mappings) as data:
            if name in self.layouts:
                yield from (piece.numpy() for piece in self.coder.pieces(data, self.layouts[name]))
            elif data.numel():
                yield from (piece.numpy() for piece in data.split(_PIECE_NBYTES))

    def verify(self, path: Path, mappings: Sequence[Mapped], advance: Advance) -> None:
        """Reads the file again; raises `StoreError` or `CheckpointError` where it is not what the source holds."""
        with open(path, "rb") as file:  # the disk's bytes, not the page cache's
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        written = Checkpoint.open(path)
        written.verify()
        if written.entries.keys() != self.tensors.keys() or written.metadata != {"format": "pt", **self.metadata}:
            raise StoreError(f"{path}: the header differs from the source: the disk or the memory may be failing")
        for name, tensor in self.tensors.items():
            found = written.tensor(name)
            homes: list[Mapped] = [*written.mappings, *written.lazy.values()]
            with readable(tensor, mappings) as expected, readable(found, homes) as data:
                same = (found.dtype, found.shape) == (tensor.dtype, tensor.shape) and torch.equal(data, expected)
            if not same:
                raise StoreError(f"{path}: {name} differs from the source: the disk or the memory may be failing")
            advance(tensor.nbytes)


def stored_nbytes(name: str, tensor: torch.Tensor, layouts: Mapping[str, Layout]) -> int:
    """The bytes of a tensor in a file."""
    return layouts[name].nbytes if name in layouts else tensor.nbytes


def choose(
    tensors: Mapping[str, torch.Tensor], codec: str, mappings: Sequence[Mapped], coder: Coder, advance: Advance
) -> dict[str, Layout]:
    """The smallest code of each of these that are worth one; all bytes of those that can be coded are read."""
    layouts: dict[str, Layout] = {}
    for name, tensor in tensors.items():
        dtype = dtype_name(tensor)
        codes = [bits for bits in _CODES[codec] if tensor.numel() >= _LEAST_CODED and can_code(dtype, bits)]
        if codes:
            with readable(tensor, mappings) as data:
                best = min(coder.layouts(data, dtype, codes), key=lambda layout: layout.nbytes)
            if best.nbytes < tensor.nbytes and best.nbytes <= _WORTH[codec] * tensor.nbytes:
                layouts[name] = best
        advance(tensor.nbytes)
    return layouts


@contextlib.contextmanager
def readable(tensor: torch.Tensor, mappings: Sequence[Mapped]) -> Iterator[torch.Tensor]:
    """The bytes of a tensor, in memory as far as it views one of `mappings`; raises `StoreError` where that changed."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    places = [(mapping, mapping.locate(data.data_ptr())) for mapping in mappings if data.numel()]
    viewed = [(mapping, begin) for mapping, begin in places if begin is not None]
    try:
        for mapping, begin in viewed:
            mapping.populate(begin, begin + data.numel())
        yield data
    finally:
        for mapping, _ in viewed:
            if isinstance(mapping, LazyMemory):
                mapping.forget()  # else a model that is not in its file as it is would be in memory as a whole
