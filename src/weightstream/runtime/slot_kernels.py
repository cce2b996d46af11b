"""Triton kernels of a cache of rows: one finds slots for rows, one fetches those that are in none, one copies them.

None tells the host anything, and their grids are fixed: they run in a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NEVER = tl.constexpr(2**62)


@triton.jit
def resolve(
    ids,
    num_ids,
    slot_of,
    owner_of,
    stamps,
    state,
    slots,
    missed,
    NUM_ROWS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    IDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Give each row that `ids` name a slot, in one program.

    A row that has none takes the one that was used longest ago, of those that hold none of this call; of slots as old
    the first, and of rows the one that is named first. Where none is left, and of an id below 0, the slot is -1.
    `state` counts calls, rows missed in this one, rows that had a slot, and rows missed in all. `missed` gets pairs of
    a row and its new slot. IDS and SLOTS are powers of two.
    """
    step = tl.load(state)  # before any thread can have counted this call
    s = tl.arange(0, IDS)
    row = tl.load(ids + s, mask=s < num_ids, other=-1)
    row = tl.minimum(tl.maximum(row, -1), NUM_ROWS - 1).to(tl.int32)
    given = row >= 0
    row = tl.where(given, row, -1 - s)  # those that are none are all different
    slot = tl.load(slot_of + row, mask=given, other=-1)
    same = row[:, None] == row[None, :]
    first = given & (tl.sum((same & (s[None, :] < s[:, None])).to(tl.int32), 1) == 0)
    n = tl.arange(0, SLOTS)
    there = n < NUM_SLOTS
    used = tl.sum((slot[:, None] == n[None, :]).to(tl.int32), 0) > 0
    hits = tl.sum(used.to(tl.int32))
    misses = first & (slot < 0)
    order = tl.cumsum(misses.to(tl.int32)) - 1
    misses &= order < NUM_SLOTS - hits
    num = tl.sum(misses.to(tl.int32))

    stamp = tl.load(stamps + n, mask=there, other=0)
    key = tl.where(used | (n >= NUM_SLOTS), _NEVER, stamp)
    before = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (n[None, :] < n[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    victim = tl.sum(tl.where(rank[None, :] == order[:, None], n[None, :], 0), 1)
    found = tl.where(slot < 0, tl.sum(tl.where(same & misses[None, :], victim[None, :] + 1, 0), 1) - 1, slot)

    owner = tl.load(owner_of + victim, mask=misses, other=-1)
    tl.store(slot_of + owner, tl.full([IDS], -1, tl.int32), mask=misses & (owner >= 0))
    tl.store(slot_of + row, victim, mask=misses)
    tl.store(owner_of + victim, row, mask=misses)
    tl.store(missed + 2 * order, row, mask=misses)
    tl.store(missed + 2 * order + 1, victim, mask=misses)
    tl.store(slots + s, found.to(tl.int64), mask=s < num_ids)
    tl.store(stamps + n, tl.zeros([SLOTS], tl.int64) + step, mask=there & (used | (rank < num)))
    tl.store(state, step + 1)
    tl.store(state + 1, num.to(tl.int64))
    tl.store(state + 2, tl.load(state + 2) + hits)
    tl.store(state + 3, tl.load(state + 3) + num)


@triton.jit
def fetch(sources, lengths, targets, chunks, missed, state, PIECES: tl.constexpr, CHUNKS: tl.constexpr):
    """Copy the pieces of all rows that were missed to their slots, shared evenly among the programs.

    `sources` and `lengths` hold, for each row, the address and the bytes of each piece; `targets` for each piece where
    it is in slot 0, and the bytes from a slot to the next; `chunks` for each chunk of a row its piece, and where in it
    the chunk begins. Addresses and lengths are multiples of 8 bytes, and a chunk is 8192.
    """
    total = tl.load(state + 1).to(tl.int32) * CHUNKS
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
def put(slots, stride, target, nbytes, found, CHUNK: tl.constexpr):
    """Copy a chunk of a row from its slot to where it is in a stack of such rows; nothing where the slot is negative.

    Slots are `stride` bytes from each other, rows `nbytes`, both multiples of 8.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(found + row)
    if slot >= 0:
        source = (slots + slot * stride).to(tl.pointer_type(tl.int64))
        place = (target + row.to(tl.int64) * nbytes).to(tl.pointer_type(tl.int64))
        for begin in range(chunk * CHUNK // 8, min((chunk + 1) * CHUNK, nbytes) // 8, 1024):
            word = begin + tl.arange(0, 1024)
            tl.store(place + word, tl.load(source + word, mask=word < nbytes // 8), mask=word < nbytes // 8)
