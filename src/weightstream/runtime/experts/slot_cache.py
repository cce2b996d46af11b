"""A cache of rows: slots of the device for some rows of stacks that lie in host memory, found by ids that stay there.

[Note: slots]
A call names the rows that it uses. Those that have a slot are used where they are; each other one takes the slot that
was used longest ago, and is fetched into it from where it lies. Rows of one call never take each other's slots: what is
left over when none is free gets no slot, and is for the next call. Which row is where is known to the device alone: one
kernel finds the slots, a second fetches what was missed, both on the compute stream, before what reads the slots. So no
event orders them, and the host waits for nothing. A CPU does the same with lists.

[Note: rows ahead]
What the next call will name can be guessed while others compute, and fetched on another stream: a few of these rows
that have no slot, into slots that the last call did not use. They get as old as those slots were, so a wrong guess is
the next to go, and what was used last stays. `resolve` counts which were right. Where few are, guesses cost the link
more than they save: the device itself leaves them out, but for one call in some, which finds out anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weightstream.codec.device import on
from weightstream.plan.expert_cache import MOST_AHEAD
from weightstream.plan.schedule import aligned

_CHUNK = 8192  # bytes that a program of the kernel fetches at a time
_PROGRAMS = 64  # they fill the link, and leave the other units to whoever computes beside
_WARPS, _MOST_WARPS, _GUESS_WARPS = 4, 16, 1  # to guess takes many sums, which a warp has at once
_PER_WARP = 64  # slots or ids
_PUT = 1 << 16  # bytes that a program of the kernel copies from a slot to where whole stacks are
_RECENT, _FEW, _PROBES = 64, 4, 16  # as the kernels have them: [Note: rows ahead]


class Found(NamedTuple):
    """Rows that had a slot when they were named, and rows that were fetched then; rows that were fetched before, and
    those of them that then were named."""

    hits: int = 0
    misses: int = 0
    ahead: int = 0
    used: int = 0


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
        try:
            if self._device is not None:
                return self._device.resolve(ids)
            slots, missed = self._table.resolve(self._clamped(ids))
            self._copy(missed)
            return torch.tensor(slots, dtype=torch.int64, device="cpu")
        except BaseException:
            self.forget()  # rows may have been given slots that they were not fetched into
            raise

    def fetch_ahead(self, ids: torch.Tensor, most: int) -> None:
        """Fetch the first rows of these that have no slot, `most` at most: the next call may name them.

        As `resolve`, by who runs now; both are for one stream at a time.
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
        """The rows changed: none has a slot any more."""
        if self._device is not None:
            self._device.forget()
        self._table.forget()

    def counts(self) -> Found:
        """What was found and fetched so far; waits for the device."""
        return self._device.counts() if self._device is not None else self._table.counts()

    def _clamped(self, ids: torch.Tensor) -> list[int]:
        rows: list[int] = ids.clamp(max=self._num_rows - 1).tolist()
        return rows

    def _copy(self, missed: Sequence[tuple[int, int]]) -> None:
        for row, slot in missed:
            for memory, pieces in self._stacks:
                for piece in pieces:
                    data = piece.rows[row]
                    memory[slot, piece.at : piece.at + data.numel()].copy_(data)


class Lru:
    """Which row is in which slot: what the kernels do, in Python."""

    def __init__(self, num_slots: int) -> None:
        self._owners = [-1] * num_slots
        self._stamps = [-1] * num_slots
        self._ahead: list[int] = []  # rows that were fetched since the last call
        self._recent = self._useful = 0  # such rows of late, and those of them that were named
        self._step = self.hits = self.misses = self.ahead = self.used = 0

    def resolve(self, rows: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """The slot of each, and the rows that have to be fetched, each with its slot."""
        slot_of = self._slot_of()
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
        self._judge(set(named))
        return [slot_of.get(row, -1) for row in rows], missed

    def guess(self, rows: Sequence[int], most: int) -> list[tuple[int, int]]:
        """The rows that have to be fetched ahead, each with its slot."""
        self._judge(())  # what was guessed before was for no call
        is_off = self._recent >= _PROBES and self._useful * _FEW < self._recent and self._step % _PROBES
        slot_of = self._slot_of()
        guarded = {slot_of[row] for row in rows if row in slot_of}
        old = sorted((stamp, n) for n, stamp in enumerate(self._stamps) if stamp < self._step - 1 and n not in guarded)
        new = [] if is_off else [row for row in dict.fromkeys(rows) if row >= 0 and row not in slot_of][:most]
        missed = [(row, slot) for row, (_, slot) in zip(new, old, strict=False)]
        for row, slot in missed:
            self._owners[slot] = row
        self._ahead = [row for row, _ in missed]
        self.ahead += len(missed)
        return missed

    def counts(self) -> Found:
        """As `Slots.counts`."""
        return Found(self.hits, self.misses, self.ahead, self.used)

    def forget(self) -> None:
        """No row has a slot."""
        self._owners = [-1] * len(self._owners)
        self._stamps = [-1] * len(self._stamps)
        self._ahead = []

    def _slot_of(self) -> dict[int, int]:
        return {row: slot for slot, row in enumerate(self._owners) if row >= 0}

    def _judge(self, named: Collection[int]) -> None:
        """Count which guesses were right."""
        used = len([row for row in self._ahead if row in named])
        self.used += used
        self._recent, self._useful = self._recent + len(self._ahead), self._useful + used
        if self._recent > _RECENT:
            self._recent, self._useful = self._recent // 2, self._useful // 2
        self._ahead = []


class _OnDevice:
    """The tables of the kernels, and their launches."""

    def __init__(self, stacks: Sequence[Stack], num_rows: int) -> None:
        from weightstream.runtime.experts import slot_kernels

        num, device = len(stacks[0][0]), stacks[0][0].device

        def table(rows: Any) -> torch.Tensor:
            return torch.tensor(rows, dtype=torch.int64, device="cpu")

        def full(number: int, value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((number,), value, dtype=dtype, device="cpu")

        pieces = [piece for _, of_stack in stacks for piece in of_stack]
        self._kernels = slot_kernels
        self._num = num_rows, num
        per_row = list(zip(*(piece.rows for piece in pieces), strict=True))
        chunks = _chunks(pieces)
        tables = (
            full(num_rows, -1, torch.int32),  # the slot of each row
            full(num, -1, torch.int32),  # of each slot its row, and when that was used
            full(num, -1, torch.int64),
            table([[data.data_ptr() for data in row] for row in per_row]),
            table([[data.numel() for data in row] for row in per_row]),
            table([[m.data_ptr() + piece.at, m.stride(0)] for m, of_stack in stacks for piece in of_stack]),
            chunks,
            full(9, 0, torch.int64),
            full(2 * num, 0, torch.int32),
            full(2 * MOST_AHEAD, 0, torch.int32),
            full(num_rows, slot_kernels.NEVER.value, torch.int32),
            full(num, 0, torch.int32),
            full(num, -1, torch.int64),
        )
        found, sent = _brought(tables, device)
        self._memory = stacks, sent  # the tables have their addresses; the device may come to read them later
        self._held, self._places = found[:3], found[3:7]
        self._state, self._missed, self._ahead, self._first_at, self._by_age, self._guarded = found[7:]
        self._pieces = len(pieces), len(chunks)

    def resolve(self, ids: torch.Tensor) -> torch.Tensor:
        found = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
        tables = *self._held, self._first_at, self._by_age, self._state, found, self._missed, self._ahead
        sizes = self._sizes(ids)
        warps = min(_MOST_WARPS, max(_WARPS, max(sizes) // _PER_WARP))
        with on(ids.device):
            self._kernels.resolve[(1,)](ids, ids.numel(), *tables, *sizes, num_warps=warps)
            self._fetch(self._missed, self._state[1:])
        return found

    def fetch_ahead(self, ids: torch.Tensor, most: int) -> None:
        tables, most = (*self._held, self._guarded, self._state, self._ahead), min(most, MOST_AHEAD)
        with on(ids.device):
            self._kernels.guess[(1,)](ids, ids.numel(), *tables, most, *self._sizes(ids), num_warps=_GUESS_WARPS)
            self._fetch(self._ahead, self._state[4:])

    def _sizes(self, ids: torch.Tensor) -> tuple[int, int, int, int]:
        num_rows, num_slots = self._num
        return num_rows, num_slots, _power_of_2(ids.numel()), _power_of_2(num_slots)

    def _fetch(self, missed: torch.Tensor, count: torch.Tensor) -> None:
        self._kernels.fetch[(_PROGRAMS,)](*self._places, missed, count, *self._pieces, num_warps=_WARPS)

    def forget(self) -> None:
        for table in self._held:
            table.fill_(-1)
        self._state[4] = 0

    def counts(self) -> Found:
        _, _, hits, misses, _, ahead, used, *_ = self._state.tolist()
        return Found(hits, misses, ahead, used)


def _brought(tensors: Sequence[torch.Tensor], device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The same on a device, by one copy, for which the host does not wait; and what it reads."""
    sizes = [aligned(tensor.nbytes) for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    for part, tensor in zip(flat.split(sizes), tensors, strict=True):
        part[: tensor.nbytes] = tensor.view(-1).view(torch.uint8)
    parts = flat.to(device, non_blocking=True).split(sizes)
    return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)], flat


def put_rows(
    slots: torch.Tensor, target: torch.Tensor, _: object, found: torch.Tensor, *, places: torch.Tensor
) -> None:
    """Copy plain rows from these slots, uint8 of shape (slots, bytes), to these places of `target`; none where a slot
    is negative."""
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
        slot_kernels.put[grid](slots, slots.stride(0), rows, nbytes, found, places, CHUNK=_PUT, num_warps=_WARPS)


def _chunks(pieces: Sequence[Piece]) -> torch.Tensor:
    """The chunks that any row may have: of which piece, and where in it they begin."""
    longest = [max(data.numel() for data in piece.rows) for piece in pieces]
    parts = [torch.arange(0, nbytes, _CHUNK, dtype=torch.int64, device="cpu") for nbytes in longest]
    return torch.cat([torch.stack((torch.full_like(part, index), part), 1) for index, part in enumerate(parts)])


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
