"""A cache of rows: device memory for some rows of stacks that are in host memory, found by ids that stay on the device.

[Note: slots]
A call names the rows that it uses. A row that has a slot is a hit and is used there. A miss takes the least recently
used slot, and is fetched into it from host memory. Rows of one call never take each other's slots: if no slot is free,
the rest of the rows get none, and the caller names them again in its next call. Only the device knows which row is in
which slot: one kernel finds the slots and a second one fetches the misses, both on the compute stream, before the
kernels that read the slots. So no event orders them, and the host waits for nothing. A CPU does the same with lists.

[Note: rows ahead]
The rows of the next call can be guessed, and fetched on another stream while this one computes: a few rows that have
no slot, into slots that the last call did not use. These slots keep their age, so a wrong guess is evicted first and
the rows that were used last stay. `resolve` counts which guesses were right. Where few are, guesses cost the link more
than they save, and the kernel itself makes none, except in one call of 16, to see whether that has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from weightstream.codec.device import on
from weightstream.plan.expert_cache import MAX_PREFETCHED_ROWS
from weightstream.plan.schedule import aligned

WORD = 8  # bytes that the kernels read and write at once
_CHUNK = 8192  # bytes that a program of the kernel fetches at a time
_PROGRAMS = 64  # enough to fill the link, and few enough to leave most of the GPU to kernels of other streams
_WARPS, _MOST_WARPS = 4, 16
_GUESS_WARPS = 1  # `guess` computes many sums, which need no barrier within one warp
_PER_WARP = 64  # slots or ids for each warp of `resolve`
_PUT = 1 << 16  # bytes that a program of the kernel copies from a slot to the whole stack
_RECENT, _FEW, _PROBES = 64, 4, 16  # the same numbers as in the kernels: [Note: rows ahead]


class Found(NamedTuple):
    """Counts of rows in calls of a cache."""

    hits: int = 0  # had a slot when they were named
    misses: int = 0  # had none, and were fetched then
    ahead: int = 0  # were prefetched
    used: int = 0  # were prefetched, and named by the next call


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPiece:
    """A contiguous part of every row: for each row flat uint8 in host memory, by addresses of the device.

    In a slot it begins at the byte `at`.
    """

    rows: tuple[torch.Tensor, ...]
    at: int


class SlotStack(NamedTuple):
    """A stack: the memory of its slots, uint8 of shape (slots, bytes), and the pieces of its rows."""

    memory: torch.Tensor
    pieces: Sequence[RowPiece]


class MissedRow(NamedTuple):
    """A row that has to be fetched, and the slot that it takes."""

    row: int
    slot: int


class SlotCache:
    """The slots of one unit: `resolve(ids)` returns the slot of each id's row, and fetches the rows that have none."""

    def __init__(self, stacks: Sequence[SlotStack], num_rows: int) -> None:
        self._stacks = list(stacks)
        memory = self._stacks[0].memory
        self.num = len(memory)
        self.begins_at = memory.data_ptr()  # the address of the first slot
        self._num_rows = num_rows
        self._table = Lru(self.num)
        self._device = _OnDevice(self._stacks, num_rows) if memory.device.type != "cpu" else None

    def resolve(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of these rows, of the same dtype. Misses are fetched before any later kernel of the stream.

        The slot of an id below 0, which names no row, is -1; so is that of a row for which no slot is free.
        """
        try:
            if self._device is not None:
                return self._device.resolve(ids)
            slots, missed = self._table.resolve(self._clamped(ids))
            self._copy(missed)
            return torch.tensor(slots, dtype=ids.dtype, device="cpu")
        except BaseException:
            self.forget()  # rows may have slots that they were not fetched into
            raise

    def fetch_ahead(self, ids: torch.Tensor, most: int) -> None:
        """Fetch the first of these rows that have no slot, up to `most`: the next call may name them.

        It runs on the current stream, and must not run concurrently with `resolve`.
        """
        try:
            if self._device is not None:
                self._device.fetch_ahead(ids, most)
            else:
                self._copy(self._table.guess(self._clamped(ids), most))
        except BaseException:
            self.forget()  # as above
            raise

    def forget(self) -> None:
        """Empty all slots, as the rows changed."""
        if self._device is not None:
            self._device.forget()
        self._table.forget()

    def slots(self) -> Sequence[int]:
        """The slot of each row, -1 for a row without. Waits for the device."""
        if self._device is not None:
            return self._device.slots()
        slot_of = self._table.slot_of()
        return [slot_of.get(row, -1) for row in range(self._num_rows)]

    def slot_of(self) -> torch.Tensor:
        """The slot of each row, int32 on the device, -1 for a row without. On a GPU later calls change it."""
        if self._device is not None:
            return self._device.slot_of
        return torch.tensor(self.slots(), dtype=torch.int32, device="cpu")

    def counts(self) -> Found:
        """The counts so far. Waits for the device."""
        return self._device.counts() if self._device is not None else self._table.counts()

    def _clamped(self, ids: torch.Tensor) -> list[int]:
        """The ids as numbers, those above the last row as the last row: as in the kernels."""
        rows: list[int] = ids.clamp(max=self._num_rows - 1).tolist()
        return rows

    def _copy(self, missed: Sequence[MissedRow]) -> None:
        for row, slot in missed:
            for stack in self._stacks:
                for piece in stack.pieces:
                    data = piece.rows[row]
                    stack.memory[slot, piece.at : piece.at + data.numel()].copy_(data)


class Lru:
    """The table of rows and slots: does in Python what the kernels do."""

    def __init__(self, num_slots: int) -> None:
        self._owners = [-1] * num_slots
        self._stamps = [-1] * num_slots
        self._ahead: list[int] = []  # rows that were prefetched since the last call
        self._recent = 0  # prefetched rows, where older ones count less
        self._useful = 0  # of these, the rows that were named
        self._step = 0
        self.hits = 0
        self.misses = 0
        self.ahead = 0
        self.used = 0

    def resolve(self, rows: Sequence[int]) -> tuple[list[int], list[MissedRow]]:
        """The slot of each row, and the rows that have to be fetched."""
        slot_of = self.slot_of()
        named = [row for row in dict.fromkeys(rows) if row >= 0]
        used = {slot_of[row] for row in named if row in slot_of}
        free = sorted((stamp, slot) for slot, stamp in enumerate(self._stamps) if slot not in used)
        rows_without = (row for row in named if row not in slot_of)
        missed = [MissedRow(row, slot) for row, (_, slot) in zip(rows_without, free, strict=False)]
        self.hits += len(used)
        self.misses += len(missed)
        slot_of = {row: slot for row, slot in slot_of.items() if slot in used} | dict(missed)
        for row, slot in slot_of.items():
            self._owners[slot], self._stamps[slot] = row, self._step
        self._step += 1
        self._judge(set(named))
        return [slot_of.get(row, -1) for row in rows], missed

    def guess(self, rows: Sequence[int], most: int) -> list[MissedRow]:
        """The rows that have to be fetched ahead."""
        self._judge(())  # rows of an earlier guess that are still there: no call came after it, so none was used
        is_off = self._recent >= _PROBES and self._useful * _FEW < self._recent and self._step % _PROBES
        slot_of = self.slot_of()
        guarded = {slot_of[row] for row in rows if row in slot_of}
        old = sorted((stamp, n) for n, stamp in enumerate(self._stamps) if stamp < self._step - 1 and n not in guarded)
        new = [] if is_off else [row for row in dict.fromkeys(rows) if row >= 0 and row not in slot_of][:most]
        missed = [MissedRow(row, slot) for row, (_, slot) in zip(new, old, strict=False)]
        for row, slot in missed:
            self._owners[slot] = row
        self._ahead = [row for row, _ in missed]
        self.ahead += len(missed)
        return missed

    def counts(self) -> Found:
        """As `SlotCache.counts`."""
        return Found(self.hits, self.misses, self.ahead, self.used)

    def forget(self) -> None:
        """No row has a slot."""
        self._owners = [-1] * len(self._owners)
        self._stamps = [-1] * len(self._stamps)
        self._ahead = []

    def slot_of(self) -> dict[int, int]:
        """The slot of each row that has one."""
        return {row: slot for slot, row in enumerate(self._owners) if row >= 0}

    def _judge(self, named: Collection[int]) -> None:
        """Count the guesses that were right."""
        used = len([row for row in self._ahead if row in named])
        self.used += used
        self._recent += len(self._ahead)
        self._useful += used
        if self._recent > _RECENT:
            self._recent //= 2
            self._useful //= 2
        self._ahead = []


class _State(IntEnum):
    """Places of the counts in the kernels' `state`."""

    STEP = 0  # calls of `resolve`
    NUM_MISSED = 1  # rows that the last call fetched
    HITS = 2
    MISSES = 3
    NUM_AHEAD = 4  # rows that were fetched ahead since the last call
    AHEAD = 5
    USED = 6
    RECENT = 7
    USEFUL = 8


class _Tables(NamedTuple):
    """The tensors that the kernels in `slot_kernels` read and write."""

    slot_of: torch.Tensor  # of each row
    owner_of: torch.Tensor  # of each slot: its row
    stamps: torch.Tensor  # of each slot: the step that used it last
    sources: torch.Tensor
    lengths: torch.Tensor
    targets: torch.Tensor
    chunks: torch.Tensor
    state: torch.Tensor
    missed: torch.Tensor
    ahead: torch.Tensor
    first_at: torch.Tensor
    by_age: torch.Tensor
    guarded: torch.Tensor

    @classmethod
    def on_host(cls, stacks: Sequence[SlotStack], num_rows: int) -> _Tables:
        from weightstream.runtime.experts.slot_kernels import NEVER

        def filled(number: int, value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((number,), value, dtype=dtype, device="cpu")

        def numbers(rows: Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(rows, dtype=torch.int64, device="cpu")

        num_slots = len(stacks[0].memory)
        pieces = [piece for stack in stacks for piece in stack.pieces]
        per_row = list(zip(*(piece.rows for piece in pieces), strict=True))
        targets = [(s.memory.data_ptr() + piece.at, s.memory.stride(0)) for s in stacks for piece in s.pieces]
        return cls(
            slot_of=filled(num_rows, -1, torch.int32),
            owner_of=filled(num_slots, -1, torch.int32),
            stamps=filled(num_slots, -1, torch.int64),
            sources=numbers([[data.data_ptr() for data in row] for row in per_row]),
            lengths=numbers([[data.numel() for data in row] for row in per_row]),
            targets=numbers(targets),
            chunks=_chunks(pieces),
            state=filled(len(_State), 0, torch.int64),
            missed=filled(2 * num_slots, 0, torch.int32),
            ahead=filled(2 * MAX_PREFETCHED_ROWS, 0, torch.int32),
            first_at=filled(num_rows, NEVER.value, torch.int32),
            by_age=filled(num_slots, 0, torch.int32),
            guarded=filled(num_slots, -1, torch.int64),
        )


class _OnDevice:
    """The tables of the kernels, and their launches."""

    def __init__(self, stacks: Sequence[SlotStack], num_rows: int) -> None:
        from weightstream.runtime.experts import slot_kernels

        memory = stacks[0].memory
        on_host = _Tables.on_host(stacks, num_rows)
        self._kernels = slot_kernels
        self._num_rows = num_rows
        self._num_slots = len(memory)
        self._num_pieces = sum(len(stack.pieces) for stack in stacks)
        self._num_chunks = len(on_host.chunks)
        tables, self._sent = _copied(on_host, memory.device)  # kept, as the asynchronous copy may still read it
        self._tables = _Tables(*tables)
        self._stacks = stacks  # the tables hold the addresses of their memory

    def resolve(self, ids: torch.Tensor) -> torch.Tensor:
        slots = torch.empty(ids.numel(), dtype=ids.dtype, device=ids.device)
        tables = self._tables
        sizes = self._sizes(ids)
        warps = min(_MOST_WARPS, max(_WARPS, max(sizes) // _PER_WARP))
        with on(ids.device):
            self._kernels.resolve[(1,)](
                ids,
                ids.numel(),
                tables.slot_of,
                tables.owner_of,
                tables.stamps,
                tables.first_at,
                tables.by_age,
                tables.state,
                slots,
                tables.missed,
                tables.ahead,
                *sizes,
                num_warps=warps,
            )
            self._fetch(tables.missed, tables.state[_State.NUM_MISSED :])
        return slots

    def fetch_ahead(self, ids: torch.Tensor, most: int) -> None:
        tables = self._tables
        with on(ids.device):
            self._kernels.guess[(1,)](
                ids,
                ids.numel(),
                tables.slot_of,
                tables.owner_of,
                tables.stamps,
                tables.guarded,
                tables.state,
                tables.ahead,
                min(most, MAX_PREFETCHED_ROWS),
                *self._sizes(ids),
                num_warps=_GUESS_WARPS,
            )
            self._fetch(tables.ahead, tables.state[_State.NUM_AHEAD :])

    def _sizes(self, ids: torch.Tensor) -> tuple[int, int, int, int]:
        """The kernels' NUM_ROWS, NUM_SLOTS, IDS and SLOTS."""
        return self._num_rows, self._num_slots, _power_of_2(ids.numel()), _power_of_2(self._num_slots)

    def _fetch(self, missed: torch.Tensor, count: torch.Tensor) -> None:
        tables = self._tables
        self._kernels.fetch[(_PROGRAMS,)](
            tables.sources,
            tables.lengths,
            tables.targets,
            tables.chunks,
            missed,
            count,
            self._num_pieces,
            self._num_chunks,
            num_warps=_WARPS,
        )

    def forget(self) -> None:
        for table in (self._tables.slot_of, self._tables.owner_of, self._tables.stamps):
            table.fill_(-1)
        self._tables.state[_State.NUM_AHEAD] = 0

    @property
    def slot_of(self) -> torch.Tensor:
        return self._tables.slot_of

    def slots(self) -> list[int]:
        found: list[int] = self._tables.slot_of.tolist()
        return found

    def counts(self) -> Found:
        state = self._tables.state.tolist()
        return Found(state[_State.HITS], state[_State.MISSES], state[_State.AHEAD], state[_State.USED])


def _copied(tensors: Sequence[torch.Tensor], device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """These tensors on a device, by one asynchronous copy; and the host memory to keep alive, which the copy reads."""
    sizes = [aligned(tensor.nbytes) for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    for part, tensor in zip(flat.split(sizes), tensors, strict=True):
        part[: tensor.nbytes] = tensor.view(-1).view(torch.uint8)
    parts = flat.to(device, non_blocking=True).split(sizes)
    return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)], flat


def put_rows(
    slots: torch.Tensor, target: torch.Tensor, _: object, found: torch.Tensor, *, places: torch.Tensor
) -> None:
    """Copy uncompressed rows from their slots to these places of `target`; a row whose slot is negative is left out.

    The arguments are those of the function that `coding.picking` returns; the ids of the rows, which that function
    needs, are ignored. `slots` is uint8 of shape (slots, bytes), `found` has the slot of each row.
    """
    rows = target.view(len(target), -1).view(torch.uint8)
    nbytes = rows.shape[1]
    if slots.device.type == "cpu":
        for place, slot in zip(places.tolist(), found.tolist(), strict=True):
            if slot >= 0:
                rows[place] = slots[slot, :nbytes]
        return
    from weightstream.runtime.experts import slot_kernels

    grid = len(found), -(-nbytes // _PUT)
    with on(slots.device):
        slot_kernels.copy_row_chunk[grid](
            slots, slots.stride(0), rows, nbytes, found, places, CHUNK=_PUT, num_warps=_WARPS
        )


def _chunks(pieces: Sequence[RowPiece]) -> torch.Tensor:
    """The chunks that any row may have, as pairs: the index of the piece, and the byte where the chunk begins, from the
    word in which the piece begins."""
    longest = [max(data.data_ptr() % WORD + data.numel() for data in piece.rows) for piece in pieces]
    parts = [torch.arange(0, nbytes, _CHUNK, dtype=torch.int64, device="cpu") for nbytes in longest]
    return torch.cat([torch.stack((torch.full_like(part, index), part), 1) for index, part in enumerate(parts)])


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
