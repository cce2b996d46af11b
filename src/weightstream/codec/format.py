"""The compressed form of a tensor, version 1: the place of each bit. Knows no device. Specified in docs/codec.md.

A float is a sign, an exponent and a mantissa. Sign and mantissa are stored unchanged. The exponents of trained weights
carry 2.5 to 2.8 bits; each is stored as a symbol of 2 bits (bfloat16) or 3 bits (float16 and float8), relative to a
base. The last symbol is an escape, which is completed by a byte; symbols of 2 bits, which have many escapes, are
completed by digits of 2 and 3 bits before a byte is needed. Weights are compressed in tiles of 4096, and a tile has 128
lanes of 32 weights: each lane owns every 128th word of 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from weightstream.errors import StoreError

VERSION = 1
TILE = 4096
LANES = 128
CODED_ALIGN_NBYTES = 512  # as in the layout of units, so that adjacent tensors are one copy
# By the setting `codec`: a tensor is compressed if that takes less than this share of its bytes; decoding costs time.
MAX_SHARE: Mapping[str, float] = MappingProxyType({"auto": 0.97, "compressed": 1.0})
_MAX_ESCAPES = 2**31 - 1  # ranks are signed
_MOST_DENSE = TILE * (2 + 3 + 8) // 8  # bytes after the symbols of a tile


class UnknownCodeError(StoreError):
    """Weights are compressed with symbols that this version does not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """A float format: the bits of its exponent, of its mantissa, and of a symbol; one more bit is its sign."""

    exponent_bits: int
    mantissa_bits: int
    symbol_bits: int

    @property
    def nbytes(self) -> int:
        return (1 + self.exponent_bits + self.mantissa_bits) // 8

    @property
    def raw_bits(self) -> int:
        """Bits of sign and mantissa, which are stored unchanged."""
        return 1 + self.mantissa_bits

    @property
    def is_dense(self) -> bool:
        """Whether digits follow the symbols of a tile, in whole words; else each escape is a byte."""
        return self.symbol_bits == 2


ELEMENTS: Mapping[str, Element] = MappingProxyType(
    {
        "bfloat16": Element(exponent_bits=8, mantissa_bits=7, symbol_bits=2),
        "float16": Element(exponent_bits=5, mantissa_bits=10, symbol_bits=3),
        "float8_e4m3fn": Element(exponent_bits=4, mantissa_bits=3, symbol_bits=3),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of `count` compressed weights of a dtype: tiles, starts, bases, escapes, in this order.

    A tile is `tile_nbytes` long: a plane of w bits per weight takes w words of each lane, planes of raw bits first.
    `starts` are `num_tiles` + 1 unsigned words of 32 bits: the number of escapes in the tiles before. `bases` has a
    byte per tile, `escapes` one per escape; for bfloat16, `num_escapes` also counts bytes of digits. Zeros fill up to
    a multiple of 512 bytes.
    """

    dtype: str
    count: int
    num_escapes: int

    @property
    def element(self) -> Element:
        return ELEMENTS[self.dtype]

    @property
    def num_tiles(self) -> int:
        return -(-self.count // TILE)

    @property
    def tile_nbytes(self) -> int:
        return TILE // 8 * (self.element.raw_bits + self.element.symbol_bits)

    @property
    def starts_at(self) -> int:
        return self.num_tiles * self.tile_nbytes

    @property
    def bases_at(self) -> int:
        return self.starts_at + 4 * (self.num_tiles + 1)

    @property
    def escapes_at(self) -> int:
        end = self.bases_at + self.num_tiles
        return -(-end // 4) * 4 if self.element.is_dense else end

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed form."""
        return -(-(self.escapes_at + self.num_escapes) // CODED_ALIGN_NBYTES) * CODED_ALIGN_NBYTES

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the weights themselves."""
        return self.count * self.element.nbytes

    def check(self) -> None:
        """Raise `StoreError` if the number of escapes is impossible for these weights, or too large for a word."""
        most = min(most_escapes(self.dtype, self.count), _MAX_ESCAPES)
        if type(self.num_escapes) is not int or not 0 <= self.num_escapes <= most:
            raise StoreError(f"{str(self.num_escapes)[:20]!r} escapes among {self.count} weights")
        if self.element.is_dense and self.num_escapes % 4:
            raise StoreError(f"{self.num_escapes} bytes of escapes are no whole words of 4 bytes")


def most_escapes(dtype: str, count: int) -> int:
    """The greatest number of bytes of escapes that `count` weights can take."""
    return -(-count // TILE) * _MOST_DENSE if ELEMENTS[dtype].is_dense else count


def layout_of(dtype: str, count: int, record: Mapping[str, Any], nbytes: int) -> Layout:
    """The layout that the `record` of a file describes; raises `StoreError` if it does not take exactly `nbytes`.

    A decoder then reads nothing outside these bytes, whatever they contain.
    """
    bits, num_escapes = record.get("bits"), record.get("escapes")
    if type(bits) is not int or dtype not in ELEMENTS or bits != ELEMENTS[dtype].symbol_bits:
        known = ", ".join(f"{element.symbol_bits} for {name}" for name, element in ELEMENTS.items())
        raise UnknownCodeError(f"{str(bits)[:20]!r} bits for each exponent of {dtype}: this version reads {known}")
    layout = Layout(dtype=dtype, count=count, num_escapes=num_escapes)  # type: ignore[arg-type]  # checked
    layout.check()
    if layout.nbytes != nbytes:
        raise StoreError(
            f"{count} weights of {dtype} with {num_escapes} escapes take {layout.nbytes} bytes, the file has {nbytes}"
        )
    return layout
