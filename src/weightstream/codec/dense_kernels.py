"""The Triton kernels of bfloat16: the same bytes as the reference.

docs/codec.md has the format: symbols, then digits in two levels, of which the second is for weights whose first digit
is 3, then bytes for weights whose second digit is 7. A lane works on all 32 of its weights at once: a word holds one
bit of each. A *mask* has a bit for each weight that has a digit of a level. In memory the digits of a level are packed,
without places for weights that have none. So their bits are spread to the places of a mask, by the moves of Hacker's
Delight, section 7-5. A few logical operations then make four planes of the exponents minus their base. For loops see
[Note: loops] in kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def popcount(x):
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _move(mask, zeros, BY: tl.constexpr):
    """One of the five moves. `zeros`: zeros to the right that no move has counted yet (`mk` in the book).

    Returns the bits of `mask` that move by BY, the mask after the move, and `zeros` after the move.
    """
    odd = zeros ^ (zeros << 1)
    odd ^= odd << 2
    odd ^= odd << 4
    odd ^= odd << 8
    odd ^= odd << 16
    moved = odd & mask
    return moved, (mask ^ moved) | (moved >> BY), zeros ^ (zeros & odd)


@triton.jit
def _moves(mask):
    """The moves by 1, 2, 4, 8 and 16 that bring bits from the lowest places to those of a mask."""
    a, mask, zeros = _move(mask, (mask ^ 0xFFFFFFFF) << 1, 1)
    b, mask, zeros = _move(mask, zeros, 2)
    c, mask, zeros = _move(mask, zeros, 4)
    d, mask, zeros = _move(mask, zeros, 8)
    e, mask, zeros = _move(mask, zeros, 16)
    return a, b, c, d, e


@triton.jit
def _level(mask, begin):
    """For the digits of a level, of the weights in a mask: the index of each lane's first digit, counted from `begin`;
    the number of digits of all lanes; the moves that spread them."""
    num = popcount(mask)
    return tl.cumsum(num) - num + begin, tl.sum(num), _moves(mask)


@triton.jit
def _spread(x, mask, moves):
    """Move the lowest bits of x to the places of a mask."""
    a, b, c, d, e = moves
    x ^= (x ^ (x << 16)) & e
    x ^= (x ^ (x << 8)) & d
    x ^= (x ^ (x << 4)) & c
    x ^= (x ^ (x << 2)) & b
    x ^= (x ^ (x << 1)) & a
    return x & mask


@triton.jit
def _window(words, at, limit):
    """The 32 bits of an array of words from its bit `at` on; words from `limit` on count as 0."""
    place, shift = at >> 5, (at & 31).to(tl.uint32)
    low = tl.load(words + place, mask=place < limit, other=0)
    high = tl.load(words + place + 1, mask=place + 1 < limit, other=0)
    return (low >> shift) | ((high << (shift ^ 31)) << 1)


@triton.jit
def decode_tile(words, start, base, escapes, num_escapes, out, room, MASKED: tl.constexpr):
    """Decode a tile. Per lane: the address `words` of its compressed words, and `out`, to which it may write the words
    whose offset is below `room`."""
    limit = num_escapes >> 2
    start = tl.minimum(tl.maximum(start >> 2, 0), limit)
    digits, limit = escapes.to(tl.pointer_type(tl.uint32)) + start, limit - start

    low, high = tl.load(words + 1024), tl.load(words + 1152)  # of symbols
    mask = low & high  # symbol 3: has a first digit, whose two bits are in planes of `num_first` bits
    at, num_first, moves = _level(mask, 0)
    first0 = _spread(_window(digits, at, limit), mask, moves)
    first1 = _spread(_window(digits, at + num_first, limit), mask, moves)

    mask = first0 & first1  # first digit 3: has a second digit, whose three bits are in planes of `num_second` bits
    at, num_second, moves = _level(mask, 2 * num_first)
    second0 = _spread(_window(digits, at, limit), mask, moves)
    second1 = _spread(_window(digits, at + num_second, limit), mask, moves)
    second2 = _spread(_window(digits, at + 2 * num_second, limit), mask, moves)

    flags = second0 & second1 & second2  # second digit 7: has a byte
    num = popcount(flags)
    rank = tl.cumsum(num) - num + (2 * num_first + 3 * num_second + 7) // 8
    rests = digits.to(tl.pointer_type(tl.uint8)) + rank
    # A byte is 5 minus the rest, so a weight with a byte has the number 13 = 5 + 8 in the planes below, from which the
    # byte is subtracted. The loop over words does that with the first byte of each lane, at word `word_of_byte`; `more`
    # is minus that byte, at the weight's half of the word. The last loop subtracts the other bytes.
    others = flags & (flags - 1)
    rest = tl.load(rests, mask=(flags != 0) & (rank < 4 * limit), other=0).to(tl.uint32)
    place, flags = popcount((flags ^ others) - 1), others
    more = ((0 - rest) & 511) << (7 + (place & 16)).to(tl.uint32)
    word_of_byte = place & 15  # word k has the weights at places k and k + 16

    # Four planes of exponents minus (base - 8), which are numbers from 0 to 13: the rest of each weight, plus 8. Then
    # four words of eight such numbers: `n0` has those of places 0, 4, 8 to 28, `n1` those of places 1, 5, 9 to 29.
    p3 = ((first0 | first1) ^ 0xFFFFFFFF) | (second1 & second2)
    p2 = (first0 ^ first1) | second2
    p1 = (high & ((first0 & first1) ^ 0xFFFFFFFF)) | (second1 & (second2 ^ 0xFFFFFFFF))
    p0 = (low & (first1 ^ 0xFFFFFFFF)) | second0
    x0 = (p0 & 0x55555555) | ((p1 & 0x55555555) << 1)
    x1 = ((p0 >> 1) & 0x55555555) | (p1 & 0xAAAAAAAA)
    y0 = (p2 & 0x55555555) | ((p3 & 0x55555555) << 1)
    y1 = ((p2 >> 1) & 0x55555555) | (p3 & 0xAAAAAAAA)
    n0 = (x0 & 0x33333333) | ((y0 & 0x33333333) << 2)
    n1 = (x1 & 0x33333333) | ((y1 & 0x33333333) << 2)
    n2 = ((x0 >> 2) & 0x33333333) | (y0 & 0xCCCCCCCC)
    n3 = ((x1 >> 2) & 0x33333333) | (y1 & 0xCCCCCCCC)

    # Both exponents of a word are added up at once, each in 9 bits from bit 7 or 23 on. They are right modulo 256: a
    # carry leaves the low one for bits that are masked out.
    base = ((base.to(tl.uint32) + 504) & 511) * 0x00800080
    for four in range(4):
        for nth in tl.static_range(4):
            k = 4 * four + nth
            # the numbers of places k and k + 16, moved to bits 7 and 23
            number = n0 if nth == 0 else n1 if nth == 1 else n2 if nth == 2 else n3
            number = (number << tl.maximum(7 - 4 * four, 0)) >> tl.maximum(4 * four - 7, 0)
            exponent = base + (number & 0x07800780) + tl.where(word_of_byte == k, more, 0)
            if nth % 2 == 0:
                raw = tl.load(words + (k // 2) * 128)
                x = raw
            else:
                x = ((raw >> 7) & 0x007F007F) | ((raw << 1) & 0x80008000)
            word = (x & 0x807F807F) | (exponent & 0x7F807F80)
            tl.store(out + k * 128, word, mask=room > k * 128 if MASKED else None)

    # Lanes with more than one byte, which are rare. A lane may read again the words that it wrote.
    num_subtracted, most = 1, tl.max(num)
    while num_subtracted < most:
        inside = flags != 0
        others = flags & (flags - 1)
        place, flags = popcount((flags ^ others) - 1), others
        at, shift = 128 * (place & 15), (7 + (place & 16)).to(tl.uint32)
        inside &= room > at
        word = tl.load(out + at, mask=inside, other=0)
        rest = tl.load(rests + num_subtracted, mask=inside & (rank + num_subtracted < 4 * limit), other=0).to(tl.uint32)
        exponent = word >> shift
        tl.store(out + at, word ^ (((exponent ^ (exponent - rest)) & 255) << shift), mask=inside)
        num_subtracted += 1


@triton.jit
def _gather(x, mask, moves):
    """Move the bits of x at the places of a mask to the lowest places."""
    a, b, c, d, e = moves
    x &= mask
    moved = x & a
    x = (x ^ moved) | (moved >> 1)
    moved = x & b
    x = (x ^ moved) | (moved >> 2)
    moved = x & c
    x = (x ^ moved) | (moved >> 4)
    moved = x & d
    x = (x ^ moved) | (moved >> 8)
    moved = x & e
    return (x ^ moved) | (moved >> 16)


@triton.jit
def _put(words, at, bits):
    """Set bits in an array of words from its bit `at` on. Atomic: two lanes may write to one word."""
    place, shift = at >> 5, (at & 31).to(tl.uint32)
    low, high = (bits << shift).to(tl.int32, bitcast=True), ((bits >> 1) >> (shift ^ 31)).to(tl.int32, bitcast=True)
    tl.atomic_or(words + place, low, mask=low != 0, sem="relaxed")
    tl.atomic_or(words + place + 1, high, mask=high != 0, sem="relaxed")


@triton.jit
def _rest(word, field: tl.constexpr, base, left):
    """The exponent of one float of a word minus its base; 0 after the end."""
    return tl.where(left > field, ((word >> (16 * field + 7)) & 255).to(tl.int32) - base, 0)


@triton.jit
def encode_tile(source, words, start, base, escapes, left):
    """Write the planes of a tile, and the digits and bytes after its symbols, into zeros; `left` is the number of
    weights from a lane's first word on."""
    base, zero = base.to(tl.int32), tl.zeros([128], tl.uint32)
    low, high, first0, first1, second0, second1, second2 = zero, zero, zero, zero, zero, zero, zero
    for pair in range(8):
        raw = zero
        for odd in tl.static_range(2):
            k = 2 * pair + odd
            word = tl.load(source + k * 128, mask=left > k * 256, other=0)
            if odd == 0:
                raw |= word & 0x807F807F
            else:
                raw |= ((word & 0x007F007F) << 7) | ((word & 0x80008000) >> 1)
            for field in tl.static_range(2):
                rest = _rest(word, field, base, left - k * 256)
                symbol = tl.where((rest < 0) | (rest > 2), 3, rest).to(tl.uint32)
                first = tl.where(rest == 3, 0, tl.where((rest == -1) | (rest == -2), -rest, 3)).to(tl.uint32)
                second = tl.where((rest >= -8) & (rest <= -3), rest + 8, tl.where(rest == 4, 6, 7)).to(tl.uint32)
                place = k + 16 * field
                low |= (symbol & 1) << place
                high |= (symbol >> 1) << place
                first0 |= (first & 1) << place
                first1 |= (first >> 1) << place
                second0 |= (second & 1) << place
                second1 |= ((second >> 1) & 1) << place
                second2 |= (second >> 2) << place
        tl.store(words + pair * 128, raw)
    tl.store(words + 1024, low)
    tl.store(words + 1152, high)

    digits = escapes.to(tl.pointer_type(tl.int32)) + (start >> 2)
    mask = low & high
    at, num_first, moves = _level(mask, 0)
    _put(digits, at, _gather(first0, mask, moves))
    _put(digits, at + num_first, _gather(first1, mask, moves))

    mask &= first0 & first1
    at, num_second, moves = _level(mask, 2 * num_first)
    _put(digits, at, _gather(second0, mask, moves))
    _put(digits, at + num_second, _gather(second1, mask, moves))
    _put(digits, at + 2 * num_second, _gather(second2, mask, moves))

    num = popcount(mask & second0 & second1 & second2)
    rank = tl.cumsum(num) - num
    rests = digits.to(tl.pointer_type(tl.uint8)) + (2 * num_first + 3 * num_second + 7) // 8
    for field in tl.static_range(2):
        for k in range(16):
            word = tl.load(source + k * 128, mask=left > k * 256, other=0)
            rest = _rest(word, field, base, left - k * 256)
            flag = (rest < -8) | (rest > 4)
            tl.store(rests + rank, ((5 - rest) & 255).to(tl.uint8), mask=flag)
            rank += flag.to(tl.int32)
