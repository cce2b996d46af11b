"""Weights in two parts: a high one that drafts by itself, and a low one that makes it exact. Knows no model.

A matrix of bfloat16 has a row for each output. A *tile* is 64 consecutive columns of a row. Its *base* is a byte: the
largest exponent of the tile minus 7, and at least 0. The *code* of a weight is its exponent minus the base, from 0 to
7. Code 0 is an *escape*: the exponent is the base or less, and is a byte of the low part. The high part has the sign,
the code and the first m bits of the mantissa (m is 1, 2 or 3), the low part has the other 7 - m bits:

| m | planes of the high part, before bases   | planes of the low part, before starts and escapes  |
|---|-----------------------------------------|----------------------------------------------------|
| 1 | code and 1st bit; sign                  | 4th to 7th bit; 2nd and 3rd bit                    |
| 2 | code and 1st bit; 2nd bit and sign      | 4th to 7th bit; 3rd bit                            |
| 3 | code and 1st bit; 2nd and 3rd bit; sign | 4th to 7th bit                                     |

A plane has 4, 2 or 1 bits of each weight. With w bits it has 2 w words of 32 bits for each tile, and weight i of the
tile is in word i % (2 w) at place k = i // (2 w). In the low part its bits begin at bit w k. In the high part they are
where a few operations on a word of each plane make bfloat16 of two weights, i and i + 32: each bit that they store is
where a bfloat16 has it, in a rotation that all planes share. So modulo 32 begin

- code and 1st bit: 4 k + 2,
- sign: k + 11, and for m = 2: 4 (k // 2) + k % 2 + 11,
- 2nd bit for m = 2: 4 (k // 2) + k % 2 + 1,
- 2nd and 3rd bit: 2 k.

`starts` are rows + 1 unsigned words of 32 bits: the number of escapes in the rows before. Escapes are in the order of
rows, tiles, words of the first plane, and places in a word. Each plane, bases, starts and escapes begin at a multiple
of 16 bytes; zeros fill the gaps.

The *draft* of a weight is the middle of the values that its bits of the high part leave, with base plus code as its
exponent (the base counts as 247 at most). So the draft of an escape is less than twice 2 ** (base - 127). Drafts are
exact in bfloat16.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from weightstream.codec.device import on
from weightstream.errors import InvariantError

TILE_COLUMNS = 64
HIGH_WIDTHS: Mapping[int, tuple[int, ...]] = MappingProxyType({1: (4, 1), 2: (4, 2), 3: (4, 2, 1)})
LOW_WIDTHS: Mapping[int, tuple[int, ...]] = MappingProxyType({1: (4, 2), 2: (4, 1), 3: (4,)})
GAUSSIAN_ESCAPES = 0.0251  # largest share of escapes among Gaussian weights; by their scale it is 0.0215 or more
# By bits: half of the last step of a draft and 120 as its exponent, at their places in a bfloat16.
MIDDLES: Mapping[int, int] = MappingProxyType({bits: 120 << 7 | 1 << 6 - bits for bits in (1, 2, 3)})
# The bit of a word of the high part from which a field of each of its weights begins.
_FIRST = tuple((4 * k + 2) % 32 for k in range(8))
_SIGN = tuple((k + 11) % 32 for k in range(32))
_SECOND = tuple(4 * (k // 2) + k % 2 + 1 for k in range(16))
_SECOND_SIGN = tuple((place + 10) % 32 for place in _SECOND)
_PAIR = tuple(range(0, 32, 2))
_ALIGN_NBYTES = 16
_CHUNK = 1 << 22  # weights for which temporary tensors are made at once, of about 100 bytes a weight
_MOST = 2**32 - 1  # escapes: starts are words
_LIBRARY = torch.library.Library("weightstream", "FRAGMENT")


class PlaneLayout(NamedTuple):
    """The place of each plane of a matrix, in bytes. `bits`: bits of each mantissa in the high part."""

    rows: int
    columns: int
    bits: int

    @property
    def row_tiles(self) -> int:
        return self.columns // TILE_COLUMNS

    @property
    def num_tiles(self) -> int:
        return self.rows * self.row_tiles

    @property
    def bases_at(self) -> int:
        """Offset in the high part, after its planes."""
        return self._end(HIGH_WIDTHS[self.bits])

    @property
    def high_nbytes(self) -> int:
        return _aligned(self.bases_at + self.num_tiles)

    @property
    def starts_at(self) -> int:
        """Offset in the low part, after its planes."""
        return self._end(LOW_WIDTHS[self.bits])

    @property
    def escapes_at(self) -> int:
        """Offset in the low part, after the starts."""
        return _aligned(self.starts_at + 4 * (self.rows + 1))

    def low_nbytes(self, num_escapes: int) -> int:
        return _aligned(self.escapes_at + num_escapes)

    def planes(self, part: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """The planes of a part: words of shape (rows, tiles of a row, words of a tile)."""
        found, at = [], 0
        for width in widths:
            words = part[at : at + 8 * width * self.num_tiles].view(torch.int32)
            found.append(words.view(self.rows, self.row_tiles, 2 * width))
            at = self._end([width], at)
        return found

    def high_planes(self, high: torch.Tensor) -> list[torch.Tensor]:
        """The planes of a high part, and its bases as (rows, tiles of a row)."""
        bases = high[self.bases_at : self.bases_at + self.num_tiles].view(self.rows, self.row_tiles)
        return [*self.planes(high, HIGH_WIDTHS[self.bits]), bases]

    def _end(self, widths: Sequence[int], at: int = 0) -> int:
        return at + sum(_aligned(8 * width * self.num_tiles) for width in widths)


class Planes(NamedTuple):
    """A matrix in two parts, each a flat tensor of bytes."""

    high: torch.Tensor
    low: torch.Tensor
    layout: PlaneLayout


def can_split(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether weights can be split: a matrix of bfloat16 whose rows are whole tiles."""
    if dtype is not torch.bfloat16 or len(shape) != 2:
        return False
    rows, columns = shape
    return rows > 0 and columns > 0 and columns % TILE_COLUMNS == 0 and rows * columns <= _MOST


def split(weight: torch.Tensor, bits: int) -> Planes:
    """Split a matrix into two parts, with `bits` (1 to 3) bits of each mantissa in the high one.

    Runs in plain torch on the matrix's device, some rows at a time. On meta the low part has the size that Gaussian
    weights take.
    """
    rows, columns = weight.shape
    layout = PlaneLayout(rows, columns, bits)
    if weight.is_meta:
        nbytes = layout.low_nbytes(round(GAUSSIAN_ESCAPES * weight.numel()))
        return Planes(_empty(layout.high_nbytes, weight), _empty(nbytes, weight), layout)
    chunks = list(_chunks(layout))
    counts = [_fields(weight[chunk]).escapes.sum((1, 2)) for chunk in chunks]
    starts = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
    begins = starts.tolist()
    high = _empty(layout.high_nbytes, weight).zero_()
    low = _empty(layout.low_nbytes(begins[-1]), weight).zero_()
    low[layout.starts_at : layout.starts_at + 4 * (rows + 1)] = starts.to(torch.int32).view(torch.uint8)
    *planes, bases = layout.high_planes(high)
    planes += layout.planes(low, LOW_WIDTHS[bits])
    for chunk in chunks:
        fields = _fields(weight[chunk])
        for plane, words in zip(planes, _packed(fields, bits), strict=True):
            plane[chunk] = words
        bases[chunk] = fields.bases.to(torch.uint8)
        begin, end = (layout.escapes_at + begins[row] for row in (chunk.start, chunk.stop))
        low[begin:end] = _by_word(fields.exponents)[_by_word(fields.escapes)].to(torch.uint8)
    return Planes(high, low, layout)


def join_planes(
    high: torch.Tensor, low: torch.Tensor, layout: PlaneLayout, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The matrix that was split, exactly; written to `out`, a contiguous bfloat16 matrix, if that is given.

    Damaged bytes give wrong weights, but no access outside of the parts.
    """
    if out is None:
        joined: torch.Tensor = torch.ops.weightstream.join_planes(high, low, *layout)
        return joined
    torch.ops.weightstream.join_planes_out(high, low, *layout, out)
    return out


def drafted(high: torch.Tensor, layout: PlaneLayout) -> torch.Tensor:
    """The draft of a matrix: a bfloat16 matrix, in plain torch."""
    planes = layout.high_planes(high)
    out = high.new_empty(layout.rows, layout.columns, dtype=torch.bfloat16)
    for chunk in _chunks(layout):
        out[chunk] = _draft([plane[chunk] for plane in planes], layout.bits)
    return out


def drafted_rows(rows: torch.Tensor, high: torch.Tensor, layout: PlaneLayout) -> torch.Tensor:
    """Some rows of the draft, as `torch.nn.functional.embedding` gives them; in plain torch."""
    found = [plane[rows.reshape(-1)] for plane in layout.high_planes(high)]
    return _draft(found, layout.bits).view(*rows.shape, layout.columns)


def draft_linear(
    x: torch.Tensor, high: torch.Tensor, layout: PlaneLayout, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`torch.nn.functional.linear` with the draft of a matrix, which reads only the high part.

    Sums are in float32, in a fixed order; the result has the dtype of `x`. Time grows with the rows of `x`.
    """
    found: torch.Tensor = torch.ops.weightstream.draft_linear(x, high, *layout, bias)
    return found


class _Fields(NamedTuple):
    """The fields of some rows of weights: int32 of shape (rows, tiles of a row, 64), except bases."""

    signs: torch.Tensor
    exponents: torch.Tensor
    mantissas: torch.Tensor
    bases: torch.Tensor
    escapes: torch.Tensor

    @property
    def codes(self) -> torch.Tensor:
        return (self.exponents - self.bases[..., None]).clamp_(min=0)


def _fields(weight: torch.Tensor) -> _Fields:
    words = weight.contiguous().view(torch.int16).to(torch.int32).view(len(weight), -1, TILE_COLUMNS)
    exponents = words >> 7 & 255
    bases = (exponents.amax(2) - 7).clamp_(min=0)
    return _Fields(words >> 15 & 1, exponents, words & 127, bases, exponents <= bases[..., None])


def _packed(fields: _Fields, bits: int) -> Iterator[torch.Tensor]:
    """The words of all planes of weights, those of the high part first."""
    signs, mantissas = fields.signs, fields.mantissas
    yield _pack(fields.codes << 1 | mantissas >> 6, _FIRST)
    if bits == 2:
        yield _pack(mantissas >> 5 & 1, _SECOND) | _pack(signs, _SECOND_SIGN)
    elif bits == 3:
        yield _pack(mantissas >> 4 & 3, _PAIR)
    if bits != 2:
        yield _pack(signs, _SIGN)
    yield _pack(mantissas & 15, range(0, 32, 4))
    if bits < 3:
        yield _pack(mantissas >> 4 & 2 ** (3 - bits) - 1, range(0, 32, 3 - bits))


def _pack(values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """The words of a plane, of which each has a weight at each of the places."""
    by_place = values.unflatten(2, (len(places), -1))
    words = torch.zeros_like(by_place[:, :, 0])
    for k, place in enumerate(places):
        words |= by_place[:, :, k] << place
        words |= by_place[:, :, k] >> min(32 - place, 31)  # what is beyond the end
    return words


def _unpack(words: torch.Tensor, places: Sequence[int], width: int) -> torch.Tensor:
    """The values of a plane, as `_pack` takes them."""
    ends = (words << 32 - place if place + width > 32 else 0 for place in places)
    inside = (2 ** min(32 - place, width) - 1 for place in places)
    found = [words >> place & ones | end for place, ones, end in zip(places, inside, ends, strict=True)]
    return torch.stack(found, 2).bitwise_and_(2**width - 1).flatten(2)


def _by_word(values: torch.Tensor) -> torch.Tensor:
    """Values of weights in the order of their words of the first plane, or back from that order."""
    by_place: torch.Tensor = values.unflatten(2, (8, 8))
    return by_place.transpose(2, 3).flatten(2)


def _high_fields(planes: Sequence[torch.Tensor], bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Signs, codes, and the first `bits` bits of the mantissas, from the planes of a high part."""
    first = _unpack(planes[0], _FIRST, 4)
    codes, mantissas = first >> 1, first & 1
    if bits == 1:
        return _unpack(planes[1], _SIGN, 1), codes, mantissas
    if bits == 2:
        return _unpack(planes[1], _SECOND_SIGN, 1), codes, mantissas << 1 | _unpack(planes[1], _SECOND, 1)
    return _unpack(planes[2], _SIGN, 1), codes, mantissas << 2 | _unpack(planes[1], _PAIR, 2)


def _draft(planes: Sequence[torch.Tensor], bits: int) -> torch.Tensor:
    """The draft of weights from the planes of their high part and their bases."""
    signs, codes, mantissas = _high_fields(planes, bits)
    near_one = signs << 15 | codes << 7 | mantissas << 7 - bits | MIDDLES[bits]
    scales = (planes[-1].to(torch.int32) + 7).clamp_(max=254) << 23  # 2 ** (base - 120)
    values = near_one.to(torch.int16).view(torch.bfloat16) * scales.view(torch.float32)[..., None]
    return values.to(torch.bfloat16).flatten(1)


def _joined(high: torch.Tensor, low: torch.Tensor, layout: PlaneLayout, out: torch.Tensor) -> None:
    """Join in plain torch."""
    bits = layout.bits
    high_planes, low_planes = layout.high_planes(high), layout.planes(low, LOW_WIDTHS[bits])
    starts = low[layout.starts_at : layout.starts_at + 4 * layout.rows].view(torch.int32).to(torch.int64) & _MOST
    rests = low[layout.escapes_at - 1 :]  # with a byte before them, if there are none
    for chunk in _chunks(layout):
        signs, codes, mantissas = _high_fields([plane[chunk] for plane in high_planes], bits)
        mantissas = mantissas << 7 - bits | _unpack(low_planes[0][chunk], range(0, 32, 4), 4)
        if bits < 3:
            mantissas |= _unpack(low_planes[1][chunk], range(0, 32, 3 - bits), 3 - bits) << 4
        escapes = codes == 0
        ranks = _by_word(escapes).flatten(1).cumsum(1).add_(starts[chunk, None]).clamp_(max=len(rests) - 1)
        exponents = codes + high_planes[-1][chunk].to(torch.int32).clamp_(max=248)[..., None]
        exponents = torch.where(escapes, _by_word(rests[ranks.view_as(codes)].to(torch.int32)), exponents)
        out[chunk] = (signs << 15 | exponents << 7 | mantissas).to(torch.int16).view(torch.bfloat16).flatten(1)


def _chunks(layout: PlaneLayout) -> Iterator[slice]:
    """Some rows at a time."""
    step = max(1, _CHUNK // layout.columns)
    yield from (slice(row, min(row + step, layout.rows)) for row in range(0, layout.rows, step))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES


def _empty(nbytes: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


# Operators: kernels on a GPU, else plain torch


@cache
def _has_kernels(device_type: str) -> bool:
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


def _join_out(high: torch.Tensor, low: torch.Tensor, rows: int, columns: int, bits: int, out: torch.Tensor) -> None:
    layout = PlaneLayout(rows, columns, bits)
    (launch_join if _has_kernels(high.device.type) else _joined)(high, low, layout, out)


def _join(high: torch.Tensor, low: torch.Tensor, rows: int, columns: int, bits: int) -> torch.Tensor:
    out = _matrix(high, low, rows, columns, bits)
    _join_out(high, low, rows, columns, bits, out)
    return out


def _matrix(high: torch.Tensor, low: torch.Tensor, rows: int, columns: int, bits: int) -> torch.Tensor:
    return high.new_empty(rows, columns, dtype=torch.bfloat16)


def _draft_linear(
    x: torch.Tensor, high: torch.Tensor, rows: int, columns: int, bits: int, bias: torch.Tensor | None
) -> torch.Tensor:
    layout = PlaneLayout(rows, columns, bits)
    if _has_kernels(high.device.type):
        return launch_draft_linear(x, high, layout, bias)
    weight = drafted(high, layout).to(torch.float32)
    found = torch.nn.functional.linear(x.to(torch.float32), weight, None if bias is None else bias.to(torch.float32))
    return found.to(x.dtype)


def _products(
    x: torch.Tensor, high: torch.Tensor, rows: int, columns: int, bits: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _check_size(what: str, size: int, needed: int) -> None:
    """Kernels go by addresses, and would read or write what follows."""
    if size < needed:
        raise InvariantError(f"{what} has {size} elements, its layout needs {needed}")


def launch_join(high: torch.Tensor, low: torch.Tensor, layout: PlaneLayout, out: torch.Tensor) -> None:
    """Join by the kernel."""
    from weightstream.codec import plane_kernels

    _check_size("the high part", len(high), layout.high_nbytes)
    _check_size("the low part", len(low), layout.escapes_at)
    _check_size("the matrix", out.numel(), layout.rows * layout.columns)
    room = len(low) - layout.escapes_at
    with on(high.device):
        plane_kernels.join_rows[(layout.rows,)](
            high, low, out, layout.rows, layout.row_tiles, room, BITS=layout.bits, **plane_kernels.JOIN_SHAPE
        )


def launch_draft_linear(
    x: torch.Tensor, high: torch.Tensor, layout: PlaneLayout, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`draft_linear` by the kernel."""
    from weightstream.codec import plane_kernels

    _check_size("the high part", len(high), layout.high_nbytes)
    if x.shape[-1] != layout.columns:
        raise InvariantError(f"a row of x has {x.shape[-1]} elements, its layout needs {layout.columns}")
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], layout.rows)
    num = math.prod(x.shape[:-1])
    shape = plane_kernels.shape_of_product(layout.rows)
    grid = (-(-layout.rows // shape["ROWS"]) * num,)
    if num:
        with on(high.device):
            plane_kernels.multiply_draft[grid](
                x,
                high,
                bias,
                out,
                layout.rows,
                layout.row_tiles,
                num,
                MIDDLES[layout.bits] * 0x00010001,
                BITS=layout.bits,
                **shape,
            )
    return out


def _define(schema: str, implementation: Callable[..., Any], meta: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, meta, "Meta")


_PARTS = "Tensor high, Tensor low, int rows, int columns, int bits"
_define(f"join_planes({_PARTS}) -> Tensor", _join, _matrix)
_define(f"join_planes_out({_PARTS}, Tensor(a!) out) -> ()", _join_out, lambda *args: None)
_define(
    "draft_linear(Tensor x, Tensor high, int rows, int columns, int bits, Tensor? bias) -> Tensor",
    _draft_linear,
    _products,
)
