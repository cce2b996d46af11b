"""A cache of rows: slots of the device for some rows of stacks that lie in host memory, found by ids that stay there.

[Note: slots]
A call names the rows that it uses. Those that have a slot are used where they are; each other one takes the slot that
was used longest ago, and is fetched into it from where it lies. Rows of one call never take each other's slots: what is
left over when none is free gets no slot, and is for the next call. Which row is where is known to the device alone: one
kernel finds the slots, a second fetches what was missed, both on the compute stream, before what reads the slots. So no
event orders them, and the host waits for nothing. A CPU does the same with lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_CHUNK = 8192  # bytes that a program of the kernel fetches at a time
_PROGRAMS = 64  # they fill the link, and leave the other units to whoever computes beside
_WARPS, _MOST_WARPS = 4, 16
_PER_WARP = 4096  # comparisons of an id with another, or with a slot
_PUT = 1 << 16  # bytes that a program of the kernel copies from a slot to where whole stacks are


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Bytes of each row that lie in a row in the host's memory, by addresses of the device: flat uint8 for each row.

    In a slot they begin at the byte `at`.
    """

    rows: tuple[torch.Tensor, ...]
    at: int


Stack = tuple[torch.Tensor, Sequence[Piece]]


class Slots:
    """The slots of one unit: `resolve(ids)` gives the slot of each id's row, once it is there.

    `stacks` are each the memory of its slots, uint8 of shape (slots, bytes), and the pieces of its rows.
    """

    def __init__(self, stacks: Sequence[Stack], num_rows: int) -> None:
        self._stacks = [(memory, list(pieces)) for memory, pieces in stacks]
        memory, _ = self._stacks[0]
        self.num, self._num_rows = len(memory), num_rows
        self._table = Lru(self.num)
        self._device = _OnDevice(self._stacks, num_rows) if memory.device.type != "cpu" else None

    def resolve(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of these rows, int64 of the same shape; what has none is fetched before any kernel that follows.

        An id below 0 names none, and its slot is -1; so is that of a row for which no slot is free.
        """
        if self._device is not None:
            return self._device.resolve(ids)
        slots, missed = self._table.resolve(ids.clamp(max=self._num_rows - 1).tolist())
        for row, slot in missed:
            for memory, pieces in self._stacks:
                for piece in pieces:
                    data = piece.rows[row]
                    memory[slot, piece.at : piece.at + data.numel()].copy_(data)
        return torch.tensor(slots, dtype=torch.int64, device="cpu")

    def forget(self) -> None:
        """The rows changed: none has a slot any more."""
        if self._device is not None:
            self._device.forget()
        self._table.forget()

    def counts(self) -> tuple[int, int]:
        """Rows that had a slot when they were named, and rows that were fetched; waits for the device."""
        return self._device.counts() if self._device is not None else (self._table.hits, self._table.misses)


class Lru:
    """Which row is in which slot: what the kernel does, in Python."""

    def __init__(self, num_slots: int) -> None:
        self._owners = [-1] * num_slots
        self._stamps = [-1] * num_slots
        self._step = self.hits = self.misses = 0

    def resolve(self, rows: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """The slot of each, and the rows that have to be fetched, each with its slot."""
        slot_of = {row: slot for slot, row in enumerate(self._owners) if row >= 0}
        named = [row for row in dict.fromkeys(rows) if row >= 0]
        used = {slot_of[row] for row in named if row in slot_of}
        free = sorted((stamp, slot) for slot, stamp in enumerate(self._stamps) if slot not in used)
        missed = [(row, slot) for row, (_, slot) in zip((r for r in named if r not in slot_of), free, strict=False)]
        self.hits += len(used)
        self.misses += len(missed)
        slot_of = {row: slot for row, slot in slot_of.items() if slot in used} | dict(missed)
        for row, slot in slot_of.items():
            self._owners[slot], self._stamps[slot] = row, self._step
        self._step += 1
        return [slot_of.get(row, -1) for row in rows], missed

    def forget(self) -> None:
        """No row has a slot."""
        self._owners = [-1] * len(self._owners)
        self._stamps = [-1] * len(self._stamps)


class _OnDevice:
    """The tables of the kernels, and their launches."""

    def __init__(self, stacks: Sequence[Stack], num_rows: int) -> None:
        from weightstream.runtime import slot_kernels

        num, device = len(stacks[0][0]), stacks[0][0].device

        def table(rows: Any) -> torch.Tensor:
            return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)

        pieces = [piece for _, of_stack in stacks for piece in of_stack]
        self._kernels = slot_kernels
        self._num = num_rows, num
        self._held = (  # the slot of each row; of each slot its row, and when that was used
            torch.full((num_rows,), -1, dtype=torch.int32, device=device),
            torch.full((num,), -1, dtype=torch.int32, device=device),
            torch.full((num,), -1, dtype=torch.int64, device=device),
        )
        self._state = torch.zeros(4, dtype=torch.int64, device=device)
        self._missed = torch.zeros(2 * num, dtype=torch.int32, device=device)
        self._memory = stacks  # the tables have their addresses
        per_row = list(zip(*(piece.rows for piece in pieces), strict=True))
        chunks = list(_chunks(pieces))
        self._places = (
            table([[data.data_ptr() for data in row] for row in per_row]),
            table([[data.numel() for data in row] for row in per_row]),
            table([[m.data_ptr() + piece.at, m.stride(0)] for m, of_stack in stacks for piece in of_stack]),
            table(chunks),
        )
        self._fetch = len(pieces), len(chunks)

    def resolve(self, ids: torch.Tensor) -> torch.Tensor:
        num_ids, (num_rows, num_slots) = ids.numel(), self._num
        found = torch.empty(num_ids, dtype=torch.int64, device=ids.device)
        sizes = num_rows, num_slots, _power_of_2(num_ids), _power_of_2(num_slots)
        missed, state = self._missed, self._state
        warps = min(_MOST_WARPS, max(_WARPS, sizes[2] * max(sizes[2:]) // _PER_WARP))
        self._kernels.resolve[(1,)](ids, num_ids, *self._held, state, found, missed, *sizes, num_warps=warps)
        self._kernels.fetch[(_PROGRAMS,)](*self._places, missed, state, *self._fetch, num_warps=_WARPS)
        return found

    def forget(self) -> None:
        for table in self._held:
            table.fill_(-1)

    def counts(self) -> tuple[int, int]:
        _, _, hits, misses = self._state.tolist()
        return hits, misses


def put_rows(slots: torch.Tensor, target: torch.Tensor, _: object, found: torch.Tensor) -> None:
    """Copy plain rows from these slots, uint8 of shape (slots, bytes), to the first ones of `target`; none where a slot
    is negative."""
    rows = target.view(len(target), -1).view(torch.uint8)
    nbytes = rows.shape[1]
    if slots.device.type == "cpu":
        for row, slot in enumerate(found.tolist()):
            if slot >= 0:
                rows[row] = slots[slot, :nbytes]
        return
    from weightstream.runtime import slot_kernels

    grid = len(found), -(-nbytes // _PUT)
    slot_kernels.put[grid](slots, slots.stride(0), rows, nbytes, found, CHUNK=_PUT, num_warps=_WARPS)


def _chunks(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """The chunks that any row may have: of which piece, and where in it they begin."""
    for index, piece in enumerate(pieces):
        longest = max(data.numel() for data in piece.rows)
        yield from ((index, begin) for begin in range(0, longest, _CHUNK))


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
