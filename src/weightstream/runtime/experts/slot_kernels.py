"""Triton kernels of a cache of rows: two find slots for rows, one fetches rows into slots, one copies rows from slots.

They return nothing to the host, and their grids are fixed, so that a CUDA graph can hold them. slot_cache.py explains
which row gets which slot: [Note: slots], [Note: rows ahead].

[Note: counts]
    0  calls; a call's number is also the stamp of the slots that it uses
    1  misses of the last call, which are to be fetched
    2  hits of all calls
    3  misses of all calls
    4  rows that were prefetched for the next call, which sets this to 0
    5  rows that were prefetched for all calls
    6  prefetched rows that the next call named
    7  like 5, but recent: halved, together with 8, each time it exceeds 64
    8  like 6, but recent
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(2**31 - 1)  # in `first_at`: the call does not name this row
MOST_AHEAD = tl.constexpr(8)  # the most rows that are prefetched for a call
_RECENT = tl.constexpr(64)  # above this number of recently prefetched rows, the recent counts are halved
# if less than 1 in 4 prefetched rows was used, only 1 in 16 calls prefetches
_FEW, _PROBES = tl.constexpr(4), tl.constexpr(16)


@triton.jit
def resolve(
    ids,
    num_ids,
    slot_of,
    owner_of,
    stamps,
    first_at,
    by_age,
    state,
    slots,
    missed,
    ahead,
    NUM_ROWS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    IDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Give each row that `ids` name a slot, in one program.

    A miss takes the least recently used slot that holds no row of this call; of equally old slots the first one, and
    rows that are named first choose first. `slots` gets the slot of each id: -1 for an id below 0, and where no slot is
    left. `missed` gets pairs of a row and its new slot. `ahead` holds the pairs that `guess` made for this call.
    `state`: [Note: counts]. `first_at` is scratch memory for the first place of a row in `ids`, and is
    NEVER for each row between calls; `by_age` is scratch memory, too. IDS and SLOTS are powers of two.
    """
    # `step` is the stamp of this call. Loaded before the first barrier: threads that finish first store the new counts.
    step, num_ahead = tl.load(state), tl.load(state + 4).to(tl.int32)
    s = tl.arange(0, IDS)
    row = tl.load(ids + s, mask=s < num_ids, other=-1)
    row = tl.minimum(tl.maximum(row, -1), NUM_ROWS - 1).to(tl.int32)
    is_named = row >= 0
    slot = tl.load(slot_of + row, mask=is_named, other=-1)
    tl.atomic_min(first_at + row, s, mask=is_named, sem="relaxed")
    tl.store(stamps + slot, tl.zeros([IDS], tl.int64) + step, mask=slot >= 0)
    tl.debug_barrier()

    n = tl.arange(0, SLOTS)
    is_slot = n < NUM_SLOTS
    age = tl.load(stamps + n, mask=is_slot, other=step)
    hits = tl.sum((is_slot & (age == step)).to(tl.int32))
    misses = is_named & (slot < 0) & (tl.load(first_at + row, mask=is_named, other=NEVER) == s)
    order = tl.cumsum(misses.to(tl.int32)) - 1
    misses &= order < NUM_SLOTS - hits
    num = tl.sum(misses.to(tl.int32))
    a = tl.arange(0, MOST_AHEAD)
    guessed = tl.load(ahead + 2 * a, mask=a < num_ahead, other=0)
    used = tl.sum((tl.load(first_at + guessed, mask=a < num_ahead, other=NEVER) != NEVER).to(tl.int32))
    found = slot
    if num > 0:  # skip the sort for most calls, which miss nothing
        # sort the slots by age: `rank` counts older ones. Slots of this call have the highest stamp, and come last.
        rank = tl.zeros([SLOTS], tl.int32)
        few: tl.constexpr = min(SLOTS, 16)
        for begin in range(0, SLOTS, few):
            other = begin + tl.arange(0, few)
            others = tl.load(stamps + other, mask=other < NUM_SLOTS, other=step)
            is_as_old = (others[None, :] == age[:, None]) & (other[None, :] < n[:, None])
            rank += tl.sum(((others[None, :] < age[:, None]) | is_as_old).to(tl.int32), 1)
        tl.store(by_age + rank, n, mask=is_slot)
        tl.debug_barrier()
        victim = tl.load(by_age + order, mask=misses, other=0)
        owner = tl.load(owner_of + victim, mask=misses, other=-1)
        tl.store(slot_of + owner, tl.full([IDS], -1, tl.int32), mask=misses & (owner >= 0))
        tl.store(slot_of + row, victim, mask=misses)
        tl.store(owner_of + victim, row, mask=misses)
        tl.store(stamps + victim, tl.zeros([IDS], tl.int64) + step, mask=misses)
        tl.store(missed + 2 * order, row, mask=misses)
        tl.store(missed + 2 * order + 1, victim, mask=misses)
        tl.debug_barrier()
        found = tl.load(slot_of + row, mask=is_named, other=-1)
    tl.debug_barrier()

    tl.store(first_at + row, tl.full([IDS], NEVER, tl.int32), mask=is_named)
    tl.store(slots + s, found.to(slots.dtype.element_ty), mask=s < num_ids)
    tl.store(state, step + 1)
    tl.store(state + 1, num.to(tl.int64))
    tl.store(state + 2, tl.load(state + 2) + hits)
    tl.store(state + 3, tl.load(state + 3) + num)
    tl.store(state + 4, tl.zeros([], tl.int64))
    tl.store(state + 6, tl.load(state + 6) + used)
    recent, useful = tl.load(state + 7) + num_ahead, tl.load(state + 8) + used
    tl.store(state + 7, tl.where(recent > _RECENT, recent // 2, recent))
    tl.store(state + 8, tl.where(recent > _RECENT, useful // 2, useful))


@triton.jit
def guess(
    ids,
    num_ids,
    slot_of,
    owner_of,
    stamps,
    guarded,
    state,
    ahead,
    MOST: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    IDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Give slots to the first MOST rows that `ids` name and that have none, before a call names them.

    They take the least recently used slots, except those that the last call used and those of rows that are named here.
    The slots keep their age, so a wrong guess is evicted first. `ahead` gets pairs of a row and its slot, `state` their
    number: [Note: counts]. No row gets a slot if too few of the recent guesses were used. `guarded` is
    scratch memory.
    """
    step = tl.load(state)
    # `state + 4` is not 0 if no call came after the last guess, so that none has counted its rows as recent
    recent, useful = tl.load(state + 7) + tl.load(state + 4), tl.load(state + 8)
    useful = tl.where(recent > _RECENT, useful // 2, useful)
    recent = tl.where(recent > _RECENT, recent // 2, recent)
    is_off = (recent >= _PROBES) & (useful * _FEW < recent) & (step % _PROBES != 0)
    s = tl.arange(0, IDS)
    row = tl.load(ids + s, mask=s < num_ids, other=-1)
    row = tl.minimum(tl.maximum(row, -1), NUM_ROWS - 1).to(tl.int32)
    is_named = row >= 0
    slot = tl.load(slot_of + row, mask=is_named, other=-1)
    tl.store(guarded + slot, tl.zeros([IDS], tl.int64) + step, mask=slot >= 0)
    tl.debug_barrier()

    n = tl.arange(0, SLOTS)
    age = tl.load(stamps + n, mask=n < NUM_SLOTS, other=step)
    may_go = (n < NUM_SLOTS) & (age < step - 1) & (tl.load(guarded + n, mask=n < NUM_SLOTS, other=step) != step)
    tl.debug_barrier()
    tl.store(guarded + slot, tl.full([IDS], -1, tl.int64), mask=slot >= 0)
    misses = is_named & (slot < 0) & (is_off == 0)
    num = tl.zeros([], tl.int32)
    for _ in tl.static_range(MOST):
        place = tl.min(tl.where(misses, s, NEVER))
        oldest = tl.min(tl.where(may_go, age, step))
        if (place < NEVER) & (oldest < step):
            victim = tl.min(tl.where(may_go & (age == oldest), n, SLOTS))
            taken = tl.sum(tl.where(s == place, row, 0))
            owner = tl.load(owner_of + victim)
            if owner >= 0:
                tl.store(slot_of + owner, -1)
            tl.store(slot_of + taken, victim)
            tl.store(owner_of + victim, taken)
            tl.store(ahead + 2 * num, taken)
            tl.store(ahead + 2 * num + 1, victim)
            misses &= row != taken
            may_go &= n != victim
            num += 1
    tl.store(state + 4, num.to(tl.int64))
    tl.store(state + 5, tl.load(state + 5) + num)
    tl.store(state + 7, recent)
    tl.store(state + 8, useful)


@triton.jit
def fetch(sources, lengths, targets, chunks, missed, count, PIECES: tl.constexpr, CHUNKS: tl.constexpr):
    """Copy the pieces of `count` missed rows to their slots, shared evenly among the programs.

    `sources` and `lengths` hold, for each row, the address and the bytes of each piece; `targets`, for each piece, its
    address in slot 0 and the bytes from one slot to the next; `chunks`, for each chunk of a row, its piece and the byte
    where the chunk begins. A chunk is 8192 bytes, counted from the word in which the piece begins: pieces may begin and
    end inside of words, but host memory is read in whole ones, each once.
    """
    total = tl.load(count).to(tl.int32) * CHUNKS
    word = tl.arange(0, 1024)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        miss, chunk = index // CHUNKS, index % CHUNKS
        row, slot = tl.load(missed + 2 * miss), tl.load(missed + 2 * miss + 1)
        piece, begin = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
        at = row * PIECES + piece
        source = tl.load(sources + at)
        skipped = source & 7  # bytes of the first word that are not of the piece
        end = (skipped + tl.load(lengths + at) - begin).to(tl.int32)
        words = tl.load((source - skipped + begin).to(tl.pointer_type(tl.int64)) + word, mask=8 * word < end)
        stride = tl.load(targets + 2 * piece + 1)
        target = tl.load(targets + 2 * piece) + slot.to(tl.int64) * stride + begin - skipped
        _store_bytes(target, words, word, (skipped - begin).to(tl.int32), end)


@triton.jit
def _store_bytes(target, words, word, begin, end):
    """Store the bytes [begin, end) of `words` at the address `target` + their place; other bytes stay as they are."""
    first = 8 * word
    end_of_words = tl.where(target % 8 == 0, end, 0)
    is_whole = (first >= begin) & (first + 8 <= end_of_words)
    tl.store(target.to(tl.pointer_type(tl.int64)) + word, words, mask=is_whole)
    if (begin > 0) | (end_of_words // 8 * 8 < tl.minimum(end, 8192)):
        for k in tl.static_range(8):
            rest = (is_whole == 0) & (first + k >= begin) & (first + k < end)
            byte = (words >> (8 * k)).to(tl.uint8)
            tl.store((target + k).to(tl.pointer_type(tl.uint8)) + first, byte, mask=rest)


@triton.jit
def copy_row_chunk(slots, stride, target, nbytes, found, places, CHUNK: tl.constexpr):
    """Copy a chunk of a row from its slot to its place in the whole stack; nothing where the slot is negative.

    Slots are `stride` bytes apart, a multiple of 8, and rows of the stack `nbytes`.
    """
    index, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(found + index)
    if slot >= 0:
        source = (slots + slot * stride).to(tl.pointer_type(tl.int64))
        place = target.to(tl.int64) + tl.load(places + index) * nbytes
        word = tl.arange(0, 1024)
        for begin in range(chunk * CHUNK, min((chunk + 1) * CHUNK, nbytes), 8192):
            words = tl.load(source + begin // 8 + word, mask=8 * word < nbytes - begin)
            _store_bytes(place + begin, words, word, 0, nbytes - begin)
