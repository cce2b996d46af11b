"""The Triton kernels of weights in two parts: the join, and the product with the draft. planes.py has the format.

Only the reads of escapes have addresses that depend on the bytes of a part. These are bounded, so damaged bytes give
wrong weights, but no access outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import triton
import triton.language as tl

COLUMNS = 1024  # that are joined at once
ROWS = 4  # outputs of a program, which share its loads of x
SHAPE: Mapping[str, int] = MappingProxyType({"ROWS": ROWS, "TILES": 32, "num_warps": 4})


@triton.jit
def _aligned(nbytes):
    return (nbytes + 15) // 16 * 16


@triton.jit
def _high_places(high, num_tiles, BITS: tl.constexpr):
    """Addresses in the high part: words of its planes, of which the last is the second if there is no third; bases."""
    second = high + 32 * num_tiles
    third = second + _aligned((8 if BITS == 1 else 16) * num_tiles)
    bases = third + _aligned(8 * num_tiles) if BITS == 3 else third
    word = tl.pointer_type(tl.uint32)
    return high.to(word), second.to(word), (third if BITS == 3 else second).to(word), bases


@triton.jit
def _rotated(x, right):
    return (x >> right) | (x << ((32 - right) & 31))


@triton.jit
def _float(half):
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "row_tiles", "num"])
def multiply_draft(
    x, high, bias, out, rows, row_tiles, num, BITS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr
):
    """ROWS outputs for one of `num` rows of x. The rows of x for the same outputs are next to each other."""
    program = tl.program_id(0)
    x += (program % num).to(tl.int64) * (64 * row_tiles)
    row = program // num * ROWS + tl.arange(0, ROWS)
    first, second, third, bases = _high_places(high, rows.to(tl.int64) * row_tiles, BITS)
    tile = tl.minimum(row, rows - 1).to(tl.int64) * row_tiles
    word = tl.arange(0, 8 * TILES)  # of the first plane
    of_pair, of_one = word // 8 * 4 + word % 4, word // 8 * 2 + word % 2
    by_pair, by_one = (word // 4 % 2 * 2).to(tl.uint32)[None, :], (word // 2 % 4).to(tl.uint32)[None, :]
    column = word // 8 * 64 + word % 8
    sums = tl.zeros([ROWS, TILES], tl.float32)
    for begin in range(0, row_tiles, TILES):
        left = row_tiles - begin
        inside = word < 8 * left
        mask = inside[None, :]
        codes = tl.load(first + ((tile + begin) * 8)[:, None] + word[None, :], mask=mask, other=0)
        if BITS > 1:
            pairs = tl.load(second + ((tile + begin) * 4)[:, None] + of_pair[None, :], mask=mask, other=0)
            pairs = _rotated(pairs, by_pair) if BITS == 2 else pairs >> by_pair
        if BITS != 2:
            ones = tl.load(third + ((tile + begin) * 2)[:, None] + of_one[None, :], mask=mask, other=0) >> by_one
        products = tl.zeros([ROWS, 8 * TILES], tl.float32)
        for k in tl.static_range(4):
            # two float16: weights 8 k and 8 k + 32 after the first of the word
            HALF: tl.constexpr = (1 << (9 - BITS)) * 0x00010001
            shifted = codes >> 3 if k == 3 else codes << (9 - 4 * k)
            both = (shifted & 0x1E001E00) | HALF
            if BITS == 1:
                both |= (ones << (15 - 4 * k)) & 0x80008000
            elif BITS == 2:
                both |= (pairs if k == 2 else _rotated(pairs, (24 + 4 * k) % 32)) & 0x81008100
            else:
                both |= (pairs << (7 - 4 * k) if k < 2 else pairs >> (4 * k - 7)) & 0x01800180
                both |= (ones << (15 - 4 * k)) & 0x80008000
            x0 = tl.load(x + begin * 64 + column + 8 * k, mask=inside, other=0).to(tl.float32)
            x1 = tl.load(x + begin * 64 + column + (8 * k + 32), mask=inside, other=0).to(tl.float32)
            products += _float(both & 0xFFFF) * x0[None, :]
            products += _float(both >> 16) * x1[None, :]
        nth = tl.arange(0, TILES)[None, :]
        base = tl.load(bases + (tile + begin)[:, None] + nth, mask=nth < left, other=0).to(tl.uint32)
        scale = (tl.minimum(base + 15, 254) << 23).to(tl.float32, bitcast=True)
        sums += tl.sum(tl.reshape(products, [ROWS, TILES, 8]), 2) * scale
    total = tl.sum(sums, 1)
    if bias is not None:
        total += tl.load(bias + row, mask=row < rows, other=0).to(tl.float32)
    tl.store(out + (program % num).to(tl.int64) * rows + row, total.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _field(words, tile, nth, WIDTH: tl.constexpr, mask):
    """The bits of weights in a plane, from bit 0 on; `nth` is the place of each in its tile. Other bits follow."""
    word = tl.load(words + tile * (2 * WIDTH) + nth % (2 * WIDTH), mask=mask, other=0)
    return _rotated(word, (nth // (2 * WIDTH) * WIDTH).to(tl.uint32))


@triton.jit(do_not_specialize=["rows", "row_tiles", "room"])
def join_rows(high, low, out, rows, row_tiles, room, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    """Join a row, COLUMNS at a time. `room`: bytes of escapes."""
    row = tl.program_id(0).to(tl.int64)
    num_tiles = rows.to(tl.int64) * row_tiles
    first, second, third, bases = _high_places(high, num_tiles, BITS)
    more = low + 32 * num_tiles
    starts = more if BITS == 3 else more + _aligned((16 if BITS == 1 else 8) * num_tiles)
    escapes = starts + _aligned(4 * (rows.to(tl.int64) + 1))
    low, more = low.to(tl.pointer_type(tl.uint32)), more.to(tl.pointer_type(tl.uint32))
    rank = tl.load(starts.to(tl.pointer_type(tl.uint32)) + row).to(tl.int64)
    for begin in range(0, 64 * row_tiles, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = column < 64 * row_tiles
        tile, nth = row * row_tiles + column // 64, column % 64
        code = _field(first, tile, nth, 4, mask) & 15
        mantissa = (code & 1) << 6
        code >>= 1
        if BITS == 1:
            sign = _field(third, tile, nth, 1, mask)
        elif BITS == 2:
            pair = _field(second, tile, nth, 2, mask)
            mantissa |= (pair & 1) << 5
            sign = pair >> 7
        else:
            mantissa |= (_field(second, tile, nth, 2, mask) & 3) << 4
            sign = _field(third, tile, nth, 1, mask)
        mantissa |= _field(low, tile, nth, 4, mask) & 15
        if BITS < 3:
            mantissa |= (_field(more, tile, nth, 3 - BITS, mask) & ((1 << (3 - BITS)) - 1)) << 4
        escaped = mask & (code == 0)
        count = tl.cumsum(escaped.to(tl.int32), 0)
        place = rank + count - 1
        rest = tl.load(escapes + place, mask=escaped & (place < room), other=0).to(tl.uint32)
        base = tl.load(bases + tile, mask=mask, other=0).to(tl.uint32)
        exponent = tl.where(code == 0, rest, (base + code) & 255)
        weight = ((sign & 1) << 15) | (exponent << 7) | mantissa
        tl.store(out + row * (64 * row_tiles) + column, weight.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
        rank += tl.sum(escaped.to(tl.int32))
