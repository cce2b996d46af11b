"""The Triton kernels of weights in two parts: the join, and the product with the draft. planes.py has the format.

Only the reads of escapes have addresses that depend on the bytes of a part. These are bounded, so damaged bytes give
wrong weights, but no access outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import triton
import triton.language as tl

# Of the programs of the join, and of the product. TILES are at once, ROWS are outputs that share loads of x.
JOIN_SHAPE: Mapping[str, int] = MappingProxyType({"TILES": 16, "num_warps": 1})
SHAPE: Mapping[str, int] = MappingProxyType({"ROWS": 4, "TILES": 16, "num_warps": 1})
PROGRAMS = 2048  # with fewer outputs than ROWS times this, programs have fewer ROWS


def shape_of_product(rows: int) -> Mapping[str, int]:
    """SHAPE with as many ROWS as leave enough programs to fill a GPU."""
    most = SHAPE["ROWS"]
    while most > 1 and rows < most * PROGRAMS:
        most //= 2
    return {**SHAPE, "ROWS": most}


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
    for begin in range(0, row_tiles, TILES):
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
def _two_weights(codes, rest, lowest, base, k: tl.constexpr):
    """Weights 8 k and 8 k + 32 after the first of a word, if they are no escapes."""
    both = (codes & _mask(0x03C0, k)) | (rest & _mask(0x8030, k)) | (lowest & _mask(0x000F, k))
    return _rotated(both, (28 + 4 * k) % 32) + base * 0x00800080


@triton.jit
def _four(a, b, c, d):
    return tl.join(tl.join(a, b), tl.join(c, d)).to(tl.uint16)


@triton.jit(do_not_specialize=["rows", "row_tiles", "room"])
def join_rows(high, low, out, rows, row_tiles, room, BITS: tl.constexpr, TILES: tl.constexpr):
    """Join a row, TILES at a time. `room`: bytes of escapes.

    A thread has whole words of the first plane. Those after the end of the row are undefined, and are neither counted
    nor written. Tensors have one dimension: with two, Triton gives loads of escapes another layout, and moves all that
    depends on them between layouts.
    """
    row = tl.program_id(0).to(tl.int64)
    first_tile = row * row_tiles
    num_tiles = rows.to(tl.int64) * row_tiles
    first, second, third, bases = _high_places(high, num_tiles, BITS)
    more = low + 32 * num_tiles
    starts = more if BITS == 3 else more + _aligned((16 if BITS == 1 else 8) * num_tiles)
    escapes = starts + _aligned(4 * (rows.to(tl.int64) + 1))
    low, more = low.to(tl.pointer_type(tl.uint32)), more.to(tl.pointer_type(tl.uint32))
    start = tl.minimum(tl.load(starts.to(tl.pointer_type(tl.uint32)) + row).to(tl.int64), room)
    escapes += start  # of the row
    last = (tl.minimum(room - start, 64 * row_tiles) - 1).to(tl.int32)  # a byte of the starts if there are none
    ones = more if BITS == 2 else third  # the planes of one bit and of two
    pairs = more if BITS == 1 else second
    first, low, bases, out = first + first_tile * 8, low + first_tile * 8, bases + first_tile, out + first_tile * 64
    ones, pairs = ones + first_tile * 2, pairs + first_tile * 4
    nth_word, nth_weight = tl.arange(0, 8 * TILES), tl.arange(0, 64 * TILES)
    nth_tile, word = nth_word // 8, nth_word % 8
    by_pair = (word // 4 if BITS == 2 else word // 4 * 2).to(tl.uint32)
    by_one = (word // 2).to(tl.uint32)
    rank = 0
    for begin in range(0, row_tiles, TILES):
        inside = begin * 8 + nth_word < row_tiles * 8
        tile = begin + nth_tile
        codes = tl.load(first + (begin * 8 + nth_word), mask=inside)
        lowest = _rotated(tl.load(low + (begin * 8 + nth_word), mask=inside), 4)
        one = _rotated(tl.load(ones + (tile * 2 + nth_word % 2), mask=inside), by_one)
        pair = _rotated(tl.load(pairs + (tile * 4 + nth_word % 4), mask=inside), by_pair)
        rest = (pair & 0xAAAAAAAA) | (one & 0x11111111) if BITS == 2 else (pair & 0x33333333) | (one & 0x88888888)
        base = tl.minimum(tl.load(bases + tile, mask=inside).to(tl.uint32), 248)

        shifted = _rotated(codes, 3)
        all_escaped = tl.where(inside, 0x11111111, 0).to(tl.uint32)
        escaped = ((shifted | (shifted >> 1) | (shifted >> 2)) & all_escaped) ^ all_escaped  # bit 4 j for place j
        count = ((escaped * 0x11111111) >> 28).to(tl.int32)
        place = rank + tl.cumsum(count, 0) - count
        rank += tl.sum(count)
        a = _two_weights(codes, rest, lowest, base, 0)
        b = _two_weights(codes, rest, lowest, base, 1)
        c = _two_weights(codes, rest, lowest, base, 2)
        d = _two_weights(codes, rest, lowest, base, 3)
        nth = 0
        while tl.max(escaped.to(tl.int32)) > 0:  # the next escape of each word; two rounds are usual
            exponent = tl.load(escapes + tl.minimum(place + nth, last)).to(tl.uint32)
            change, sixteenth = exponent * 128 - base * 128, exponent * 8 - base * 8
            its = escaped & (0 - escaped)
            a += change * (its & 0x00010001)
            b += sixteenth * (its & 0x00100010)
            c += change * ((its >> 8) & 0x00010001)
            d += sixteenth * ((its >> 8) & 0x00100010)
            escaped ^= its
            nth += 1
        places = tl.join(_four(a, b, c, d), _four(a >> 16, b >> 16, c >> 16, d >> 16))
        tiles = tl.permute(tl.reshape(places, [TILES, 8, 2, 2, 2]), (0, 4, 3, 2, 1))
        weights = tl.reshape(tiles, [64 * TILES]).to(tl.bfloat16, bitcast=True)
        tl.store(out + begin * 64 + nth_weight, weights, mask=begin * 64 + nth_weight < row_tiles * 64)
