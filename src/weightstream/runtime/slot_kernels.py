"""Triton kernels of a cache of rows: one finds the slots of a step, one fetches the rows that are in none.

Neither tells the host anything, and their grids are fixed: they run in a CUDA graph.
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

    A row that has none takes the one that was used longest ago, of those that hold none of this step; of slots as old
    the first, and of rows the one that is named first. `state` counts steps, rows missed in this step, ids that had a
    slot, and rows missed in all. `missed` gets pairs of a row and its new slot. IDS and SLOTS are powers of two.
    """
    s = tl.arange(0, IDS)
    given = s < num_ids
    row = tl.load(ids + s, mask=given, other=0).to(tl.int32)
    row = tl.where(given, tl.minimum(tl.maximum(row, 0), NUM_ROWS - 1), -1 - s)  # those that are none are all different
    slot = tl.load(slot_of + row, mask=given, other=-1)
    same = row[:, None] == row[None, :]
    first = given & (tl.sum((same & (s[None, :] < s[:, None])).to(tl.int32), 1) == 0)
    misses = first & (slot < 0)
    order = tl.cumsum(misses.to(tl.int32)) - 1
    num = tl.sum(misses.to(tl.int32))

    n = tl.arange(0, SLOTS)
    there = n < NUM_SLOTS
    used = tl.sum((slot[:, None] == n[None, :]).to(tl.int32), 0) > 0
    stamp = tl.load(stamps + n, mask=there, other=0)
    key = tl.where(used | (n >= NUM_SLOTS), _NEVER, stamp)
    before = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (n[None, :] < n[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    victim = tl.sum(tl.where(rank[None, :] == order[:, None], n[None, :], 0), 1)
    found = tl.where(slot < 0, tl.sum(tl.where(same & misses[None, :], victim[None, :], 0), 1), slot)

    owner = tl.load(owner_of + victim, mask=misses, other=-1)
    tl.store(slot_of + owner, tl.full([IDS], -1, tl.int32), mask=misses & (owner >= 0))
    tl.store(slot_of + row, victim, mask=misses)
    tl.store(owner_of + victim, row, mask=misses)
    tl.store(missed + 2 * order, row, mask=misses)
    tl.store(missed + 2 * order + 1, victim, mask=misses)
    tl.store(slots + s, found.to(tl.int64), mask=given)
    step = tl.load(state)
    tl.store(stamps + n, tl.zeros([SLOTS], tl.int64) + step, mask=there & (used | (rank < num)))
    hits = tl.sum((given & (slot >= 0)).to(tl.int32))
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
