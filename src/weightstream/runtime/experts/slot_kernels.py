"""Triton kernels of a cache of rows: two find slots for rows, one fetches those that are in none, one copies them.

None tells the host anything, and their grids are fixed: they run in a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(2**31 - 1)  # a place in a call where no row is named
MOST_AHEAD = tl.constexpr(8)  # rows that are fetched before a call, at most
_RECENT = tl.constexpr(64)  # such rows, of which half are forgotten when there are more
_FEW, _PROBES = tl.constexpr(4), tl.constexpr(16)  # where not one in so many was used, only one call in so many guesses


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

    A row that has none takes the one that was used longest ago, of those that hold none of this call; of slots as old
    the first, and of rows the one that is named first. Where none is left, and of an id below 0, the slot is -1.
    `missed` gets pairs of a row and its new slot. `first_at`, NEVER for each row, and `by_age` are room for the threads
    to tell each other. IDS and SLOTS are powers of two. `state` counts: calls, rows missed in this one, rows that had a
    slot, rows missed in all, rows that were fetched before this call, those in all, those that were used, and the last
    two of late.
    """
    step, num_ahead = tl.load(state), tl.load(state + 4).to(tl.int32)  # before any thread can have counted this call
    s = tl.arange(0, IDS)
    row = tl.load(ids + s, mask=s < num_ids, other=-1)
    row = tl.minimum(tl.maximum(row, -1), NUM_ROWS - 1).to(tl.int32)
    given = row >= 0
    slot = tl.load(slot_of + row, mask=given, other=-1)
    tl.atomic_min(first_at + row, s, mask=given, sem="relaxed")
    tl.store(stamps + slot, tl.zeros([IDS], tl.int64) + step, mask=slot >= 0)
    tl.debug_barrier()

    n = tl.arange(0, SLOTS)
    there = n < NUM_SLOTS
    age = tl.load(stamps + n, mask=there, other=step)
    hits = tl.sum((there & (age == step)).to(tl.int32))
    misses = given & (slot < 0) & (tl.load(first_at + row, mask=given, other=NEVER) == s)
    order = tl.cumsum(misses.to(tl.int32)) - 1
    misses &= order < NUM_SLOTS - hits
    num = tl.sum(misses.to(tl.int32))
    a = tl.arange(0, MOST_AHEAD)
    guessed = tl.load(ahead + 2 * a, mask=a < num_ahead, other=0)
    used = tl.sum((tl.load(first_at + guessed, mask=a < num_ahead, other=NEVER) != NEVER).to(tl.int32))
    found = slot
    if num > 0:  # mostly there is nothing to do
        rank = tl.zeros([SLOTS], tl.int32)  # those of this call come last
        few: tl.constexpr = min(SLOTS, 16)
        for begin in range(0, SLOTS, few):
            other = begin + tl.arange(0, few)
            others = tl.load(stamps + other, mask=other < NUM_SLOTS, other=step)
            is_as_old = (others[None, :] == age[:, None]) & (other[None, :] < n[:, None])
            rank += tl.sum(((others[None, :] < age[:, None]) | is_as_old).to(tl.int32), 1)
        tl.store(by_age + rank, n, mask=there)
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
        found = tl.load(slot_of + row, mask=given, other=-1)
    tl.debug_barrier()

    tl.store(first_at + row, tl.full([IDS], NEVER, tl.int32), mask=given)
    tl.store(slots + s, found.to(tl.int64), mask=s < num_ids)
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
    """Give the first MOST of the rows that `ids` name, and that have no slot, one before a call may ask for them.

    They take those that were used longest ago, but none that the last call used or that holds a row which is named
    here. The slots stay as old as they are, so a wrong guess is the next to go. `ahead` gets pairs of a row and its
    slot, `state` their number, 0 where too few of late were used. `guarded` is room for the threads.
    """
    step = tl.load(state)
    recent, useful = (
        tl.load(state + 7) + tl.load(state + 4),
        tl.load(state + 8),
    )  # what was guessed last was for no call
    useful = tl.where(recent > _RECENT, useful // 2, useful)
    recent = tl.where(recent > _RECENT, recent // 2, recent)
    is_off = (recent >= _PROBES) & (useful * _FEW < recent) & (step % _PROBES != 0)
    s = tl.arange(0, IDS)
    row = tl.load(ids + s, mask=s < num_ids, other=-1)
    row = tl.minimum(tl.maximum(row, -1), NUM_ROWS - 1).to(tl.int32)
    given = row >= 0
    slot = tl.load(slot_of + row, mask=given, other=-1)
    tl.store(guarded + slot, tl.zeros([IDS], tl.int64) + step, mask=slot >= 0)
    tl.debug_barrier()

    n = tl.arange(0, SLOTS)
    age = tl.load(stamps + n, mask=n < NUM_SLOTS, other=step)
    may_go = (n < NUM_SLOTS) & (age < step - 1) & (tl.load(guarded + n, mask=n < NUM_SLOTS, other=step) != step)
    tl.debug_barrier()
    tl.store(guarded + slot, tl.full([IDS], -1, tl.int64), mask=slot >= 0)
    misses = given & (slot < 0) & (is_off == 0)
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
    """Copy the pieces of the rows that were missed, `count` of them, to their slots, shared evenly among the programs.

    `sources` and `lengths` hold, for each row, the address and the bytes of each piece; `targets` for each piece where
    it is in slot 0, and the bytes from a slot to the next; `chunks` for each chunk of a row its piece, and where in it
    the chunk begins. Addresses and lengths are multiples of 8 bytes, and a chunk is 8192.
    """
    total = tl.load(count).to(tl.int32) * CHUNKS
    word = tl.arange(0, 1024)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        miss, chunk = index // CHUNKS, index % CHUNKS
        row, slot = tl.load(missed + 2 * miss), tl.load(missed + 2 * miss + 1)
        piece, begin = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
        at = row * PIECES + piece
        left = ((tl.load(lengths + at) - begin) // 8).to(tl.int32)
        source = (tl.load(sources + at) + begin).to(tl.pointer_type(tl.int64))
        stride = tl.load(targets + 2 * piece + 1)
        target = (tl.load(targets + 2 * piece) + slot.to(tl.int64) * stride + begin).to(tl.pointer_type(tl.int64))
        tl.store(target + word, tl.load(source + word, mask=word < left), mask=word < left)


@triton.jit
def put(slots, stride, target, nbytes, found, places, CHUNK: tl.constexpr):
    """Copy a chunk of a row from its slot to its place in a stack of such rows; nothing where the slot is negative.

    Slots are `stride` bytes from each other, rows `nbytes`, both multiples of 8.
    """
    index, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(found + index)
    if slot >= 0:
        source = (slots + slot * stride).to(tl.pointer_type(tl.int64))
        place = (target + tl.load(places + index) * nbytes).to(tl.pointer_type(tl.int64))
        for begin in range(chunk * CHUNK // 8, min((chunk + 1) * CHUNK, nbytes) // 8, 1024):
            word = begin + tl.arange(0, 1024)
            tl.store(place + word, tl.load(source + word, mask=word < nbytes // 8), mask=word < nbytes // 8)
