"""Rows of the stacks of one unit, named by ids on the device, and how a forward gets to read them.

[Note: rows]
A forward of experts reads those rows of its stacks that ids on the device name, and the host never learns the ids.
Where stacks are compressed or cached, the buffer has room for all of their rows. There are two ways to read some:

- `Rows.select` is for a forward that copies the rows which it uses. It returns a substitute for each stack; indexing
  it gives the selected rows, decompressed into memory where the forward would have copied them. So the products see
  the same values, shapes and strides.
- `Rows.place` brings each row to its own place in the buffer, which the weights show. A forward that touches no other
  rows then runs unchanged. If more rows are named than there are slots, they pass through the slots in waves.

[Note: kernels that take ids]
Some kernels take ids themselves, and read rows in place. They run unchanged with the slots of the ids for ids, and with
stacks that show the slots as their first rows: the shapes, from which kernels choose their tiles, are those of whole
stacks. The rest of such a stack is memory behind the slots, which no id names. Rows in slots are as far apart as in a
whole stack.

A forward that uses nearly all rows, many of them several times, reads whole stacks from the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from weightstream.errors import InvariantError
from weightstream.plan.expert_cache import NEARLY_ALL
from weightstream.plan.schedule import ALIGN_NBYTES, aligned
from weightstream.runtime.experts.row_stream import RowLeaf, RowStream, StreamBuffer
from weightstream.runtime.experts.slot_cache import WORD, SlotCache, SlotStack
from weightstream.runtime.experts.stacks import RowReader, Stack
from weightstream.runtime.weights.alias_groups import Member
from weightstream.runtime.weights.decompression import BufferedUnit, unit_decoder
from weightstream.runtime.weights.picks import Picks


class SelectedRows:
    """A substitute for a stack: `[ids]` returns the selected rows, in memory that the next selection overwrites.

    `memory` and `slots`: as of `IndexedStack`.
    """

    def __init__(self, read: Callable[[], torch.Tensor], memory: torch.Tensor | None, slots: torch.Tensor) -> None:
        self._read = read
        self.memory = memory
        self.slots = slots

    def __getitem__(self, _: torch.Tensor) -> torch.Tensor:
        return self._read()


class SlotView(NamedTuple):
    """A stack, and its slots as the first rows of a whole stack: [Note: kernels that take ids]."""

    stack: Member
    view: torch.Tensor


@dataclass(kw_only=True, slots=True)
class Rows:
    """Brings single rows of the stacks of a unit: implements `RowProvider`."""

    unit: int
    num_rows: int  # of each stack
    capturing: Callable[[], bool]
    buffer: StreamBuffer
    readings: Mapping[int, RowReader]  # by the `id()` of the stack's tensor object
    cache: SlotCache | None = None  # None: the stacks are compressed, and not cached
    has_places: bool = True  # as `RowProvider.has_places`
    leaves: Mapping[int, RowLeaf] = field(default_factory=dict)  # of stacks whose rows can pass the slots
    views: Sequence[SlotView] = ()  # of all stacks, if kernels may read rows in slots
    rest: Callable[[], None] | None = None  # brings the unit's weights that are not stacks
    look_ahead: Callable[[torch.Tensor], None] | None = None
    num_named: int = 0  # number of ids in the last call
    _streams: dict[tuple[int, ...], RowStream] = field(default_factory=dict)

    @property
    def stacks(self) -> Collection[int]:
        return self.readings.keys()

    @property
    def most(self) -> int:
        return self.num_rows if self.cache is None else self.cache.num

    def places(self, num_ids: int) -> bool:
        """As `RowProvider.places`: whether fetching the named rows is worth it.

        If nearly all rows are named, it is faster to copy whole stacks in order. That also leaves the slots as they
        are. So a prompt copies whole stacks as well: a call that names more ids than there are slots, more than the
        call before, and so many that it would fetch about as much. A captured call is always a decode step.
        """
        before, self.num_named = self.num_named, num_ids
        if not self.has_places:
            return False
        few = max(self.most, self.num_rows // 2, before)
        is_step = self.cache is None or num_ids <= few or self.capturing()
        return is_step and num_ids <= NEARLY_ALL * self.num_rows

    def forget(self) -> None:
        """Empty the slots, as the stacks were written to."""
        if self.cache is not None:
            self.cache.forget()

    def select(self, ids: torch.Tensor) -> dict[int, SelectedRows]:
        """As `RowProvider.select`."""
        self.buffer.drop()
        ids = ids.reshape(-1).to(torch.int64).contiguous()
        if self.rest is not None:
            self.rest()
        rows = (ids,) if self.cache is None else (ids, self.cache.resolve(ids))
        return {
            key: SelectedRows(partial(reading.read, *rows), reading.memory, rows[-1])
            for key, reading in self.readings.items()
        }

    def place(self, ids: torch.Tensor) -> None:
        """As `RowProvider.place`."""
        self.buffer.drop()
        ids = ids.reshape(-1).to(torch.int64)
        ids = ids.clamp(0, self.num_rows - 1)  # an id that names no row would be an access out of bounds
        rows = torch.full((self.num_rows,), -1, dtype=torch.int64, device=ids.device).scatter_(0, ids, ids)
        if self.rest is not None:
            self.rest()
        left = min(len(ids), self.num_rows)
        while left > 0:
            rows = rows.sort(descending=True).values[:left].contiguous()  # even a place without a row costs a kernel
            slots = None if self.cache is None else self.cache.resolve(rows)
            for reading in self.readings.values():
                reading.put(rows, slots, places=rows)
            left -= self.most
            if slots is not None:
                rows = rows.masked_fill(slots >= 0, -1)

    @property
    def has_slots(self) -> bool:
        return bool(self.views)

    def slots(self, ids: torch.Tensor) -> torch.Tensor:
        """As `RowProvider.slots`."""
        self.buffer.drop()
        if self.rest is not None:
            self.rest()
        return self._cache.resolve(ids.reshape(-1).contiguous()).view(ids.shape)  # a column may have gaps

    def slot_of(self) -> torch.Tensor:
        """As `RowProvider.slot_of`."""
        return self._cache.slot_of()

    @property
    def _cache(self) -> SlotCache:
        if self.cache is None:
            raise InvariantError("rows without a cache have no slots")
        return self.cache

    @contextmanager
    def in_slots(self) -> Iterator[None]:
        """As `RowProvider.in_slots`."""
        whole = [shown.stack.shown() for shown in self.views]
        try:
            for stack, view in self.views:
                stack.show(view)
            yield
        finally:
            for (stack, _), view in zip(self.views, whole, strict=True):
                stack.show(view)

    def streams(self) -> bool:
        """As `RowProvider.streams`. Weights besides the stacks would use the same memory."""
        return bool(self.leaves) and self.rest is None and not self.capturing()

    def stream(self, stacks: Sequence[int]) -> RowStream:
        """As `RowProvider.stream`."""
        if (found := self._streams.get(tuple(stacks))) is None:
            leaves = [self.leaves[key] for key in stacks]
            found = RowStream(leaves, self.buffer, num_rows=self.num_rows, unit=self.unit, cache=self.cache)
            self._streams[tuple(stacks)] = found
        return found

    def streams_of(self, picks: Picks) -> list[RowStream]:
        """The streams by which a forward reads all rows, in its order; empty if it does not."""
        keys = [[id(tensor) for tensor in stack] for stack in picks.streams] if self.streams() else []
        are_here = all(self.leaves.keys() >= set(stack) for stack in keys)
        return [self.stream(stack) for stack in keys] if are_here else []


def rows_of(unit: BufferedUnit, buffer: StreamBuffer) -> Rows | None:
    """The rows of a unit's stacks, streamed by this buffer; None where not all that opens with the unit can be read
    so."""
    named = unit.plan.manifest.units[unit.index].stacks
    stacks = {
        alias: Stack.of(unit.homes[alias], unit.room(alias)) if alias in named else None for alias in unit.offsets
    }
    found = [stack for stack in stacks.values() if stack is not None]
    rest = [alias for alias, stack in stacks.items() if stack is None]
    cached = unit.plan.cached.intersection(stacks)
    if not found or len({stack.num_rows for stack in found}) > 1 or (cached and cached != stacks.keys() - set(rest)):
        return None
    ends = [unit.offsets[alias] + unit.homes[alias].group.nbytes for alias in rest]
    if cached and max(ends, default=0) > unit.plan.own_buffer_nbytes:
        return None  # they would overwrite slots
    rows: Rows | None
    if cached:
        rows = _cached_rows(found, unit, buffer)
    elif any(stack.home.layout is None for stack in found):
        return None  # it was updated since it was compressed
    else:
        readings = {stack.key: stack.picking(unit.compressed(stack.home.group.alias)) for stack in found}
        capturing = unit.backend.capturing
        rows = Rows(unit=unit.index, num_rows=found[0].num_rows, capturing=capturing, buffer=buffer, readings=readings)
    if rows is not None and rest:
        rows.rest = unit_decoder(unit, rest)
    return rows


def _cached_rows(stacks: Sequence[Stack], unit: BufferedUnit, buffer: StreamBuffer) -> Rows | None:
    """The rows of cached stacks, with as many slots as there is room for; None where the device cannot read them."""
    room, backend = _share(unit), unit.backend
    pieces = [stack.pieces(backend) for stack in stacks]
    if not all(pieces):
        return None
    in_slots = unit.plan.manifest.units[unit.index].ids_per_token > 0
    if in_slots and any(stack.home.layout is not None for stack in stacks):
        return None
    strides = [max(piece.at + max(row.numel() for row in piece.rows) for piece in of_stack) for of_stack in pieces]
    if not in_slots:
        strides = [aligned(stride + WORD) for stride in strides]
    num_slots = _fitting(room.numel(), strides, stacks[0].num_rows)
    if not num_slots:
        return None
    sizes = [aligned(num_slots * stride) for stride in strides]
    parts = room[: sum(sizes)].split(sizes)
    views = [part[: num_slots * stride].view(num_slots, stride) for part, stride in zip(parts, strides, strict=True)]
    readings = {stack.key: stack.reading(view) for stack, view in zip(stacks, views, strict=True)}
    cache = SlotCache([SlotStack(*each) for each in zip(views, pieces, strict=True)], stacks[0].num_rows)
    leaves = {
        stack.key: RowLeaf(of_stack, stack.shape[1:], stack.dtype, stack.nbytes, readings[stack.key].memory)
        for stack, of_stack in zip(stacks, pieces, strict=True)
        if stack.home.layout is None
    }
    rows = Rows(
        unit=unit.index,
        num_rows=stacks[0].num_rows,
        capturing=backend.capturing,
        buffer=buffer,
        readings=readings,
        cache=cache,
        has_places=not unit.plan.shared_nbytes and not any(stride % WORD for stride in strides),
        leaves=leaves if len(leaves) == len(stacks) else {},
        views=[_as_whole(stack, view) for stack, view in zip(stacks, views, strict=True)] if in_slots else (),
    )
    if rows.leaves and not rows.stream(list(leaves)).most:
        rows.leaves = {}
    return rows


def _fitting(nbytes: int, strides: Sequence[int], most: int) -> int:
    """The number of slots, up to `most`, for which there is room: of each stack together, from an aligned address."""
    num = min(most, nbytes // sum(strides))
    while num and sum(aligned(num * stride) for stride in strides) > nbytes:
        num -= 1
    return num


def _as_whole(stack: Stack, slots: torch.Tensor) -> SlotView:
    """The slots as the first rows of a whole stack."""
    (member,) = stack.home.group.members
    rows = slots.view(-1).view(stack.dtype)
    return SlotView(member, rows.as_strided(stack.shape, member.stride))


def _share(unit: BufferedUnit) -> torch.Tensor:
    """The unit's part of the memory for slots, which all units with cached stacks share equally."""
    plan, memory = unit.plan, unit.memory.slots
    users = [index for index, spec in enumerate(plan.manifest.units) if spec.aliases().keys() & plan.cached]
    nbytes = memory.numel() // len(users) // ALIGN_NBYTES * ALIGN_NBYTES
    begin = users.index(unit.index) * nbytes
    return memory[begin : begin + nbytes]
