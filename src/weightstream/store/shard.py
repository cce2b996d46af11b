"""A shard: a safetensors file to be, of tensors as they are and tensors that are coded as they are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from weightstream.codec import chunks
from weightstream.codec.chunks import Coder
from weightstream.codec.format import BITS, Layout, can_code
from weightstream.errors import UnsupportedError
from weightstream.store import coded
from weightstream.store.decoded import DecodedMemory
from weightstream.store.header import CODES
from weightstream.store.mapping import FileMapping

HEADER = "the header"
PAGE_NBYTES = 4096
_PIECE_NBYTES = 16 << 20
_LEAST_CODED = 64 << 10  # weights
_CODES = MappingProxyType({"none": (), "auto": BITS, "3bit": (3,), "4bit": (4,)})
_WORTH = MappingProxyType({"auto": 0.97, "3bit": 1.0, "4bit": 1.0})  # of the bytes: decoding has a price

Mapped = FileMapping | DecodedMemory
Advance = Callable[[int], None]  # told how many more bytes are done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A safetensors file to be: a header of whole pages, and the tensors that follow it without gaps.

    Those that have a layout are coded. Their checksums are known once they are written; `header` leaves room for them.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    layouts: Mapping[str, Layout]
    coder: Coder
    header: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", self.sealed({}))

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor in the file."""
        return {name: stored_nbytes(name, tensor, self.layouts) for name, tensor in self.tensors.items()}

    def sealed(self, sums: Mapping[str, int]) -> bytes:
        """The header, with the checksums of coded tensors."""
        shortest = self._text(sums)
        nbytes = len(self._text({})) if sums else len(shortest)
        text = shortest.ljust(nbytes + -(8 + nbytes) % PAGE_NBYTES)
        return len(text).to_bytes(8, "little") + text

    def _text(self, sums: Mapping[str, int]) -> bytes:
        texts = {"format": "pt", **self.metadata}
        if self.layouts:
            texts[coded.KEY] = coded.text_of(self.layouts, {n: self.tensors[n].shape for n in self.layouts}, sums)
        facts: dict[str, Any] = {"__metadata__": texts}
        end = 0
        for name, nbytes in self.sizes().items():
            dtype, shape = str(self.tensors[name].dtype).removeprefix("torch."), list(self.tensors[name].shape)
            if dtype not in CODES:
                raise UnsupportedError(f"{name} is {dtype}, which safetensors cannot hold")
            begin, end = end, end + nbytes
            code, shape = ("U8", [nbytes]) if name in self.layouts else (CODES[dtype], shape)
            facts[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        return json.dumps(facts, separators=(",", ":")).encode()

    def pieces(self, mappings: Sequence[Mapped], *, uncoded: bool = False) -> Iterator[tuple[str, Any]]:
        """The file's bytes in arrays, each with the tensor's name; raises `StoreError` where a mapped file changed.

        `uncoded` leaves out coded bytes: there is one empty piece for each such tensor.
        """
        yield HEADER, np.frombuffer(self.header, np.uint8)
        for name, tensor in self.tensors.items():
            with _source(tensor, mappings) as (flat, prepare):
                if name in self.layouts and uncoded:
                    yield name, np.empty(0, np.uint8)
                    continue
                if name in self.layouts:
                    for part in self.coder.pieces(flat, self.layouts[name], prepare=prepare):
                        yield name, part.numpy()
                    continue
                for piece in flat.split(_PIECE_NBYTES) if flat.numel() else ():
                    prepare(piece)
                    yield name, piece.numpy()

    def is_code_of(self, name: str, stored: torch.Tensor, mappings: Sequence[Mapped]) -> bool:
        """Whether these coded bytes are, decoded, those of the tensor."""
        with _source(self.tensors[name], mappings) as (flat, prepare):
            begin, is_same = 0, True
            for part in chunks.decoded(stored, self.layouts[name]):
                expected = flat[begin : begin + part.numel()]
                prepare(expected)
                is_same &= torch.equal(part, expected)
                begin += part.numel()
        return is_same


def stored_nbytes(name: str, tensor: torch.Tensor, layouts: Mapping[str, Layout]) -> int:
    """The bytes of a tensor in a file."""
    return layouts[name].nbytes if name in layouts else tensor.nbytes


def codable(tensors: Mapping[str, torch.Tensor], codec: str) -> dict[str, torch.Tensor]:
    """Those that `codec` may make smaller."""
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.numel() >= _LEAST_CODED and any(can_code(kinds[name], bits) for bits in _CODES[codec])
    }


def choose(
    tensors: Mapping[str, torch.Tensor], codec: str, mappings: Sequence[Mapped], coder: Coder, advance: Advance
) -> dict[str, Layout]:
    """The smallest code of each of these that are worth one; all their bytes are read."""
    found: dict[str, Layout] = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        codes = [bits for bits in _CODES[codec] if can_code(dtype, bits)]
        with _source(tensor, mappings) as (flat, prepare):
            layouts = coder.layouts(flat, dtype, codes, prepare=prepare)
        advance(tensor.nbytes)
        best = min(layouts, key=lambda layout: layout.nbytes)
        if best.nbytes < tensor.nbytes and best.nbytes <= _WORTH[codec] * tensor.nbytes:
            found[name] = best
    return found


@contextmanager
def _source(
    tensor: torch.Tensor, mappings: Sequence[Mapped]
) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
    """A tensor's bytes, and what makes sure that a part of them can be read."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    used = [m for m in mappings if flat.numel() and m.locate(flat.data_ptr()) is not None]
    try:
        yield flat, partial(_prepare, used)
    finally:
        for memory in used:
            if isinstance(memory, DecodedMemory):
                memory.forget()  # else a model that was coded would be in memory as a whole


def _prepare(mappings: Sequence[Mapped], part: torch.Tensor) -> None:
    for mapping in mappings:
        if (begin := mapping.locate(part.data_ptr())) is not None:
            mapping.populate(begin, begin + part.numel())
