"""The codec's Triton kernels: the same bytes as the reference, at the speed of device memory.

docs/codec.md has the format and its terms: tile (4096 weights), lane (one of 128 columns of a tile's 32-bit words),
plane, symbol, base, escape. A program decodes or encodes a tile, and each of its threads one lane. A thread handles a
word at a time, which holds two weights of 16 bits or four of 8. The code for tiles of bfloat16 (`_is_dense`) is in
dense_kernels.py.

Only the reads of a tile's escapes have addresses that depend on compressed bytes. These are bounded, so damaged bytes
give wrong weights, but no access outside.

Names: `words` is the address of a lane's words in the compressed tile. `a`, `b`, `c` are the three words of a plane of
3-bit fields: the low two bits of the first half of the fields, those of the second half, and the third bits of all.
`EXPONENT` is the number of exponent bits, which identifies the dtype.

[Note: loops]
Triton's coalescing pass visits all connected operations once for each load and store, in time that is quadratic in
their number: 97 % of the 9 s in which the unrolled encoder of bfloat16 compiled. So a loop is unrolled here
(`static_range`) only where it has to be: in `_write`, whose body is too long for LLVM to unroll, and which reaches the
speed of memory only if it is unrolled. LLVM unrolls the short loop of the decoder of bfloat16 to the same instructions.
The encoders are far faster than the link either way. For the same reason whole tiles, which nearly all weights have,
and partial tiles have two kernels, not two branches in one: few models need the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weightstream.codec import dense_kernels


@triton.constexpr_function
def _is_dense(exponent):
    """As `Element.is_dense`, from the number of exponent bits."""
    return exponent == 8


@triton.constexpr_function
def _width(exponent):
    """Bits of a float, and words of a lane in a decoded tile."""
    return 8 if exponent == 4 else 16


@triton.constexpr_function
def _mantissa(exponent):
    """Bits of the mantissa."""
    return _width(exponent) - 1 - exponent


@triton.constexpr_function
def _tile_words(exponent):
    """Words of a compressed tile: 128 for each bit of a compressed weight."""
    return 128 * (1 + _mantissa(exponent) + (2 if _is_dense(exponent) else 3))


@triton.jit
def _three(a, b, c, k: tl.constexpr, HALF: tl.constexpr, ONES: tl.constexpr):
    """The k-th 3-bit field of each weight in a word, at the place of that weight. `a`, `b`, `c`: see the module."""
    SHIFT: tl.constexpr = 2 * (k % HALF)
    if k < HALF:
        field = ((a >> SHIFT) & (3 * ONES)) | (((c >> SHIFT) & ONES) << 2)
    else:
        field = ((b >> SHIFT) & (3 * ONES)) | (((c >> (SHIFT + 1)) & ONES) << 2)
    return field


@triton.jit
def _places(coded, count, tile, EXPONENT: tl.constexpr):
    """For a tile: addresses of its words, one per lane; number of escapes before it; base; address of the first escape
    of the whole tensor."""
    WORDS: tl.constexpr = _tile_words(EXPONENT)
    num_tiles = tl.cdiv(count, 4096).to(tl.int32)
    words = coded.to(tl.pointer_type(tl.uint32)) + tile.to(tl.int64) * WORDS + tl.arange(0, 128)
    starts_at = coded + num_tiles.to(tl.int64) * (4 * WORDS)
    bases_at = starts_at + 4 * (num_tiles + 1)
    start = tl.load(starts_at.to(tl.pointer_type(tl.int32)) + tile)
    length = (num_tiles + 3) // 4 * 4 if _is_dense(EXPONENT) else num_tiles
    return words, start, tl.load(bases_at + tile), bases_at + length


@triton.jit
def _write(
    words,
    out,
    room,
    a,
    b,
    c,
    base,
    escapes,
    rank,
    sound,
    EXPONENT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decode the words of all lanes of a tile to `out`. `a`, `b`, `c` are the words of the symbols, `rank` is the index
    of each lane's next escape, and `room` the number of words that each lane may write."""
    WIDTH: tl.constexpr = _width(EXPONENT)
    ONES: tl.constexpr = 0x01010101 if WIDTH == 8 else 0x00010001
    if EXPONENT == 5:
        ma = tl.load(words + 1024)
        mb = tl.load(words + 1152)
        mc = tl.load(words + 1280)
    for k in tl.static_range(WIDTH):
        if k % 2 == 0:
            raw = tl.load(words + (k // 2) * 128)
        low = (raw >> ((WIDTH // 2) * (k % 2))) & ((2 ** (WIDTH // 2) - 1) * ONES)
        symbol = _three(a, b, c, k, WIDTH // 2, ONES)
        exponent = symbol + base
        flags = ((symbol + ONES) >> 3) & ONES  # 1 where the symbol is 7, an escape
        for field in tl.static_range(32 // WIDTH):
            flag = ((flags >> (WIDTH * field)) & 1).to(tl.int32)
            escape = tl.load(escapes + rank, mask=sound & (flag != 0), other=0).to(tl.uint32)
            exponent += (escape & (2**EXPONENT - 1)) << (WIDTH * field)
            rank += flag
        exponent &= (2**EXPONENT - 1) * ONES
        if EXPONENT == 5:
            top = _three(ma, mb, mc, k, 8, ONES)
            word = low | ((top & 0x00030003) << 8) | (exponent << 10) | ((top & 0x00040004) << 13)
        else:
            word = (low & 0x07070707) | ((low & 0x08080808) << 4) | (exponent << 3)
        tl.store(out + k * 128, word, mask=room > k * 128 if MASKED else None)


@triton.jit
def _decode_tile(
    words,
    start,
    base,
    escapes,
    num_escapes,
    target,
    left,
    EXPONENT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Decode a tile to `target`. Its first escape is the `start`th of `escapes`. `left` weights fit into the target; a
    WHOLE tile fits completely, so its stores need no mask."""
    PER_WORD: tl.constexpr = 32 // _width(EXPONENT)
    OUT: tl.constexpr = 4096 // PER_WORD  # words of a decoded tile
    SYMBOLS: tl.constexpr = 128 * (1 + _mantissa(EXPONENT))
    lane = tl.arange(0, 128)
    room = tl.minimum(tl.cdiv(left, PER_WORD), OUT).to(tl.int32) - lane
    if _is_dense(EXPONENT):
        dense_kernels.decode_tile(words, start, base, escapes, num_escapes, target + lane, room, not WHOLE)
    else:
        a = tl.load(words + SYMBOLS)
        b = tl.load(words + (SYMBOLS + 128))
        c = tl.load(words + (SYMBOLS + 256))
        base = (base.to(tl.uint32) & (2**EXPONENT - 1)) * (0x01010101 if EXPONENT == 4 else 0x00010001)
        flags = ((a & (a >> 1) & 0x55555555) | ((b & (b >> 1) & 0x55555555) << 1)) & c  # a bit per escape of a lane
        num_of_lane = dense_kernels.popcount(flags)
        total = tl.sum(num_of_lane)
        # A tile with more escapes than the tensor is damaged, and none of its escapes is read. The condition has a
        # value per lane, as Triton's interpreter has no scalar masks.
        sound = tl.broadcast_to(total, [128]) <= num_escapes
        rank = tl.maximum(tl.minimum(start, num_escapes - total), 0) + tl.cumsum(num_of_lane) - num_of_lane
        _write(words, target + lane, room, a, b, c, base, escapes, rank, sound, EXPONENT, not WHOLE)


@triton.jit
def decode(table, NUM: tl.constexpr, WHOLE: tl.constexpr, EXPONENT: tl.constexpr):
    """Decode a tile of one of at most NUM tensors. WHOLE: all tensors consist of whole tiles.

    `table` has the first program of each tensor, then for each tensor its source, target, number of weights and number
    of escapes.
    """
    program = tl.program_id(0)
    tensor = tl.sum((tl.load(table + tl.arange(0, NUM)) <= program).to(tl.int32)) - 1
    row = table + NUM + 4 * tensor
    tile = program - tl.load(table + tensor).to(tl.int32)
    source = tl.load(row).to(tl.pointer_type(tl.uint8))
    target = tl.load(row + 1).to(tl.pointer_type(tl.uint32))
    count = tl.load(row + 2)
    num_escapes = tl.load(row + 3).to(tl.int32)

    OUT: tl.constexpr = 128 * _width(EXPONENT)  # words of a decoded tile
    words, start, base, escapes = _places(source, count, tile, EXPONENT)
    target += tile.to(tl.int64) * OUT
    left = 4096 if WHOLE else count - tile.to(tl.int64) * 4096
    _decode_tile(words, start, base, escapes, num_escapes, target, left, EXPONENT, WHOLE)


@triton.jit
def pick(table, ids, slots, places, IN_SLOTS: tl.constexpr, EXPONENT: tl.constexpr):
    """Decode a tile of one of the rows `ids` of a tensor to its place in the target.

    IN_SLOTS: rows are read from the slots of a cache, each of which holds the words of a row, then its escapes. Else
    they are read from the whole compressed tensor, where the words of all rows come before the escapes of all rows.

    A row consists of whole tiles. Nothing is written for a negative id or slot; an id that is too large gives the last
    row.

    `table`, in order: the address of slot 0 (or of row 0), the bytes from one slot (or row) to the next, and the
    largest number of escape bytes of a row (or of the tensor); the target; the number of rows, the tiles of a row, and
    the addresses of the starts and of the bases of all tiles; the address of the escapes of all rows. For slots only
    the lowest 3 bits of that address count: rows are fetched in words of 8 bytes, so the escapes of a row begin at the
    same offset modulo 8 in a slot as in the tensor.
    """
    part, index = tl.program_id(0), tl.program_id(1)
    row = tl.load(ids + index)
    slot = tl.load(slots + index) if IN_SLOTS else row
    if (row < 0) | (slot < 0):  # before any other load, as many ids are negative
        return
    stride, most = tl.load(table + 1), tl.load(table + 2).to(tl.int32)
    target = tl.load(table + 3).to(tl.pointer_type(tl.uint32))
    num_rows, tiles = tl.load(table + 4).to(tl.int32), tl.load(table + 5).to(tl.int32)
    starts = tl.load(table + 6).to(tl.pointer_type(tl.int32))
    bases = tl.load(table + 7).to(tl.pointer_type(tl.uint8))

    OUT: tl.constexpr = 128 * _width(EXPONENT)
    WORDS: tl.constexpr = _tile_words(EXPONENT)
    row = tl.minimum(row, num_rows - 1).to(tl.int32)
    place = tl.load(table) + (slot if IN_SLOTS else row.to(tl.int64)) * stride
    first = tl.load(starts + row * tiles)
    if _is_dense(EXPONENT):  # its escapes are read as words of 4 bytes
        first &= -4
    if not IN_SLOTS:  # `first` is added to an address, and in damaged bytes it may be any number
        first = tl.minimum(tl.maximum(first, 0), most)
        most -= first
    num_escapes = tl.minimum(tl.maximum(tl.load(starts + (row + 1) * tiles) - first, 0), most)
    words = (place + part * (4 * WORDS)).to(tl.pointer_type(tl.uint32)) + tl.arange(0, 128)
    escapes_at = tl.load(table + 8) + first
    if IN_SLOTS:
        escapes_at = place + tiles * (4 * WORDS) + (escapes_at & 7)
    escapes = escapes_at.to(tl.pointer_type(tl.uint8))
    tile = row * tiles + part
    start, base = tl.load(starts + tile) - first, tl.load(bases + tile)
    target += (tl.load(places + index) * tiles + part) * OUT
    _decode_tile(words, start, base, escapes, num_escapes, target, 4096, EXPONENT, True)


@triton.jit(do_not_specialize=["count"])
def histogram(data, counts, count: tl.int64, EXPONENT: tl.constexpr):
    """Count each exponent in a tile."""
    tile = tl.program_id(0)
    place = tile.to(tl.int64) * 4096 + tl.arange(0, 4096)
    source = data.to(tl.pointer_type(tl.uint8 if EXPONENT == 4 else tl.uint16))
    values = tl.load(source + place, mask=place < count, other=0).to(tl.int32)
    num_of_exponent = tl.histogram((values >> _mantissa(EXPONENT)) & (2**EXPONENT - 1), 2**EXPONENT)
    exponent = tl.arange(0, 2**EXPONENT)
    # places after the end were loaded as 0, and counted as exponent 0
    num_after_end = tl.maximum((tile.to(tl.int64) + 1) * 4096 - count, 0).to(tl.int32)
    tl.store(counts + tile * 2**EXPONENT + exponent, num_of_exponent - tl.where(exponent == 0, num_after_end, 0))


@triton.jit
def _field(word, field: tl.constexpr, base, left, EXPONENT: tl.constexpr):
    """The exponent of one float of a word minus its base; 0 after the end."""
    WIDTH: tl.constexpr = _width(EXPONENT)
    exponent = ((word >> (WIDTH * field + _mantissa(EXPONENT))) & (2**EXPONENT - 1)).to(tl.int32)
    return tl.where(left > field, exponent - base, 0)


@triton.jit
def _encode_tile(source, words, start, base, escapes, left, EXPONENT: tl.constexpr):
    """Write the planes and the escapes of a tile; `left` is the number of weights from a lane's first word to the end.

    The first pass over the weights writes symbols, and counts the escapes of each lane. The sum of the counts of all
    lanes before a lane is where its escapes begin. A second pass writes them.
    """
    WIDTH: tl.constexpr = _width(EXPONENT)
    PER_WORD: tl.constexpr = 32 // WIDTH
    ONES: tl.constexpr = 0x01010101 if WIDTH == 8 else 0x00010001
    SYMBOLS: tl.constexpr = 128 * (1 + _mantissa(EXPONENT))
    ESCAPE: tl.constexpr = 7
    PER_PLANE: tl.constexpr = WIDTH // 2  # words of weights in a word of symbols

    base = base.to(tl.int32)
    zero = tl.zeros([128], tl.uint32)
    s_high = zero
    num_escapes = tl.zeros([128], tl.int32)
    for plane in range(2):
        s, raw = zero, zero  # the words under construction
        for nth in tl.static_range(PER_PLANE):
            k = plane * PER_PLANE + nth
            room = left - k * (128 * PER_WORD)
            word = tl.load(source + k * 128, mask=room > 0, other=0)
            symbol = zero
            for field in tl.static_range(PER_WORD):
                rest = _field(word, field, base, room, EXPONENT)
                escaped = (rest < 0) | (rest >= ESCAPE)
                num_escapes += escaped.to(tl.int32)
                symbol |= tl.where(escaped, ESCAPE, rest).to(tl.uint32) << (WIDTH * field)
            x = word & 0x00FF00FF if EXPONENT == 5 else (word & 0x07070707) | ((word >> 4) & 0x08080808)
            if nth % 2 == 0:
                raw = x
            else:
                tl.store(words + (k // 2) * 128, raw | (x << (WIDTH // 2)))
            s |= (symbol & (3 * ONES)) << (2 * nth)
            s_high |= ((symbol >> 2) & ONES) << (2 * nth + plane)
        tl.store(words + (SYMBOLS + plane * 128), s)
    tl.store(words + (SYMBOLS + 256), s_high)
    if EXPONENT == 5:  # the upper three of 11 raw bits
        m_high = zero
        for plane in range(2):
            m = zero
            for nth in tl.static_range(8):
                k = plane * 8 + nth
                word = tl.load(source + k * 128, mask=left > k * (128 * PER_WORD), other=0)
                top = ((word >> 8) & 0x00030003) | ((word >> 13) & 0x00040004)
                m |= (top & 0x00030003) << (2 * nth)
                m_high |= ((top >> 2) & ONES) << (2 * nth + plane)
            tl.store(words + (1024 + plane * 128), m)
        tl.store(words + 1280, m_high)
    rank = start + tl.cumsum(num_escapes) - num_escapes
    for k in range(WIDTH):
        room = left - k * (128 * PER_WORD)
        word = tl.load(source + k * 128, mask=room > 0, other=0)
        for field in tl.static_range(PER_WORD):
            rest = _field(word, field, base, room, EXPONENT)
            escaped = (rest < 0) | (rest >= ESCAPE)
            value = ((rest - ESCAPE) & (2**EXPONENT - 1)).to(tl.uint8)
            tl.store(escapes + rank, value, mask=escaped)
            rank += escaped.to(tl.int32)


@triton.jit(do_not_specialize=["count"])
def encode(data, coded, count: tl.int64, EXPONENT: tl.constexpr):
    """Write the planes and the escapes of a tile. The caller has written starts and bases (`reference.prepared`)."""
    WIDTH: tl.constexpr = _width(EXPONENT)
    PER_WORD: tl.constexpr = 32 // WIDTH

    tile = tl.program_id(0)
    lane = tl.arange(0, 128)
    words, start, base, escapes = _places(coded, count, tile, EXPONENT)
    source = data.to(tl.pointer_type(tl.uint32)) + tile.to(tl.int64) * (128 * WIDTH) + lane
    left = count - tile.to(tl.int64) * 4096 - lane * PER_WORD  # weights from the lane's first word on
    if _is_dense(EXPONENT):
        dense_kernels.encode_tile(source, words, start, base, escapes, left)
    else:
        _encode_tile(source, words, start, base, escapes, left, EXPONENT)
