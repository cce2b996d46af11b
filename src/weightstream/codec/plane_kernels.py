"""The Triton kernels of weights in two parts: the join, and the product with the draft. planes.py has the format.

Only the reads of escapes have addresses that depend on the bytes of a part. These are bounded, so damaged bytes give
wrong weights, but no access outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import triton
import triton.language as tl

JOINED_TILES = 16  # at once
ROWS = 4  # outputs of a program, which share its loads of x
SHAPE: Mapping[str, int] = MappingProxyType({"ROWS": ROWS, "TILES": 16, "STAGES": 2, "num_warps": 1})


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
    return (x >> (right & 31)) | (x << ((32 - right) & 31))


@triton.constexpr_function
def _mask(bits, k):
    """Bits of a bfloat16, for both of a word, where the planes have them for place k."""
    both = bits * 0x00010001
    by = 4 * (k - 1) % 16
    return (both << by | both >> (32 - by)) & 0xFFFFFFFF


@triton.jit
def _two_drafts(codes, rest, middle, k: tl.constexpr, BITS: tl.constexpr):
    """The drafts of weights 8 k and 8 k + 32 after the first of a word, without their scale. `rest`: the fields of the
    other planes, rotated to the places of this word.

    `xor` for `or` keeps the compiler from regrouping the operations: an instruction has three inputs, but one constant.
    """
    REST: tl.constexpr = 0x8000 if BITS == 1 else (0x8020 if BITS == 2 else 0x8030)
    both = ((codes & _mask(0x03C0, k)) ^ _rotated(middle, 36 - 4 * k)) | (rest & _mask(REST, k))
    both = both if k == 1 else _rotated(both, (28 + 4 * k) % 32)
    return (both << 16).to(tl.float32, bitcast=True), (both & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "row_tiles", "num", "middle"])
def multiply_draft(
    x,
    high,
    bias,
    out,
    rows,
    row_tiles,
    num,
    middle,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS outputs for one of `num` rows of x. Programs of the same outputs are next to each other.

    A thread has halves of tiles: four words of the first plane each. Halves after the end of a row are read again from
    its last tile, and do not count.
    """
    program = tl.program_id(0)
    nth = program % num
    first_row = program // num * ROWS
    first, second, third, bases = _high_places(high, rows.to(tl.int64) * row_tiles, BITS)
    x += nth.to(tl.int64) * (64 * row_tiles)
    half, word = tl.arange(0, 2 * TILES), tl.arange(0, 4)[None, :]
    second_half = (half % 2)[:, None]
    by_pair = (second_half if BITS == 2 else 2 * second_half).to(tl.uint32)
    by_one = (2 * second_half + word // 2).to(tl.uint32)
    middle = middle.to(tl.uint32)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros([2 * TILES], tl.float32),)
    for begin in tl.range(0, row_tiles, TILES, num_stages=STAGES):
        inside = half // 2 + begin < row_tiles
        tile_1d = tl.minimum(half // 2 + begin, row_tiles - 1)
        tile = tile_1d[:, None]
        column = tile * 64 + second_half * 4 + word
        xs = ()
        for k in tl.static_range(8):
            xs += (tl.load(x + column + 8 * k).to(tl.float32),)
        new = ()
        for r in tl.static_range(ROWS):
            at = tl.minimum(first_row + r, rows - 1).to(tl.int64) * row_tiles
            codes = tl.load(first + at * 8 + (tile * 8 + second_half * 4 + word))
            rest = codes
            if BITS != 2:
                rest = _rotated(tl.load(third + at * 2 + (tile * 2 + word % 2)), by_one)
            if BITS > 1:
                pairs = _rotated(tl.load(second + at * 4 + (tile * 4 + word)), by_pair)
                rest = pairs if BITS == 2 else (pairs & 0x33333333) | (rest & 0x88888888)
            products = tl.zeros([2 * TILES, 4], tl.float32)
            for k in tl.static_range(4):
                low, high_one = _two_drafts(codes, rest, middle, k, BITS)
                products += low * xs[k]
                products += high_one * xs[k + 4]
            scale = tl.minimum(tl.load(bases + at + tile_1d).to(tl.uint32) + 7, 254) << 23
            product = tl.sum(products, 1) * scale.to(tl.float32, bitcast=True)
            new += (sums[r] + tl.where(inside, product, 0.0),)
        sums = new
    for r in tl.static_range(ROWS):
        row, total = first_row + r, tl.sum(sums[r], 0)
        if row < rows:
            if bias is not None:
                total += tl.load(bias + row).to(tl.float32)
            tl.store(out + nth.to(tl.int64) * rows + row, total.to(out.dtype.element_ty))


@triton.jit
def _words(plane, tile, nth, PER_WORD: tl.constexpr):
    """For weights of a tile the words of a plane that have them."""
    return tl.load(plane + tile * (64 // PER_WORD) + nth % (64 // PER_WORD))


@triton.jit(do_not_specialize=["rows", "row_tiles", "room"])
def join_rows(high, low, out, rows, row_tiles, room, BITS: tl.constexpr, TILES: tl.constexpr):
    """Join a row, TILES at a time. `room`: bytes of escapes.

    Tiles after the end of the row are its last tile again, and are neither written nor counted.
    """
    row = tl.program_id(0).to(tl.int64)
    num_tiles = rows.to(tl.int64) * row_tiles
    first, second, third, bases = _high_places(high, num_tiles, BITS)
    more = low + 32 * num_tiles
    starts = more if BITS == 3 else more + _aligned((16 if BITS == 1 else 8) * num_tiles)
    escapes = starts + _aligned(4 * (rows.to(tl.int64) + 1))
    low, more = low.to(tl.pointer_type(tl.uint32)), more.to(tl.pointer_type(tl.uint32))
    start = tl.load(starts.to(tl.pointer_type(tl.uint32)) + row).to(tl.int64)
    escapes += start  # of the row
    left = tl.maximum(tl.minimum(room - start, 64 * row_tiles), 0).to(tl.int32)
    nth = tl.arange(0, 64)[None, :]
    rank = 0
    for begin in range(0, row_tiles, TILES):
        tile_1d = begin + tl.arange(0, TILES)
        inside = (tile_1d < row_tiles)[:, None]
        tile = tl.minimum(tile_1d, row_tiles - 1)[:, None] + row * row_tiles
        code = _rotated(_words(first, tile, nth, 8), (4 * (nth // 8) + 2).to(tl.uint32)) & 15
        mantissa = (code & 1) << 6
        code >>= 1
        if BITS == 2:
            word, place = _words(second, tile, nth, 16), (4 * (nth // 8) + nth // 4 % 2).to(tl.uint32)
            sign = _rotated(word, place + 11)
            mantissa |= ((word >> (place + 1)) & 1) << 5
        else:
            sign = _rotated(_words(third, tile, nth, 32), (nth // 2 + 11).to(tl.uint32))
        if BITS == 3:
            mantissa |= ((_words(second, tile, nth, 16) >> (2 * (nth // 4)).to(tl.uint32)) & 3) << 4
        mantissa |= (_words(low, tile, nth, 8) >> (4 * (nth // 8)).to(tl.uint32)) & 15
        if BITS == 2:
            mantissa |= ((_words(more, tile, nth, 32) >> (nth // 2).to(tl.uint32)) & 1) << 4
        elif BITS == 1:
            mantissa |= ((_words(more, tile, nth, 16) >> (2 * (nth // 4)).to(tl.uint32)) & 3) << 4

        escaped = inside & (code == 0)
        counts = tl.cumsum(escaped.to(tl.int32), 1)
        totals = tl.sum(escaped.to(tl.int32), 1)
        places = rank + (tl.cumsum(totals, 0) - totals)[:, None] + counts - 1
        rest = tl.load(escapes + places, mask=escaped & (places < left), other=0).to(tl.uint32)
        exponent = tl.where(code == 0, rest, (tl.load(bases + tile).to(tl.uint32) + code) & 255)
        weight = (((sign & 1) << 15) | (exponent << 7) | mantissa).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(out + (row * row_tiles + begin) * 64 + tl.arange(0, TILES)[:, None] * 64 + nth, weight, mask=inside)
        rank += tl.sum(totals)
