"""What brings the coded and the cached weights of a unit to the device: all of them, or the rows that ids name.

[Note: rows]
A forward of experts reads those rows of stacks of matrices that ids on the device name, and the host never learns the
ids. Where stacks are coded or cached, the buffer has room for all rows of each. There are two ways:

- `Rows.select`, where a forward copies the rows: what it gives stands in for a stack, and to be indexed gives these
  rows alone, which coded ones are decoded into in place of a copy. So the product sees the values, shapes and strides
  that it would have seen.
- `Rows.place` brings each row that is named to its own place in the buffer, which the weights show. A forward that
  touches no other rows then runs as it is. Where more are named than there are slots, they pass through these in waves.

A forward that asks for nearly all rows, many times over, reads whole stacks from the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.codec import coding
from weightstream.codec.reference import CodedPart
from weightstream.errors import OffloadError
from weightstream.plan.expert_cache import NEARLY_ALL
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import ALIGN_NBYTES, aligned
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.experts.slot_cache import SlotCache
from weightstream.runtime.experts.stacks import WORD, RowReader, Stack
from weightstream.runtime.weights.home import Home
from weightstream.runtime.weights.sources import PageWindow

Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the ring, the one that is decoded into, and slots


def buffers(plan: Plan, backend: Backend) -> Buffers:
    """The memory that a plan has beside its residents."""
    return backend.alloc(plan.ring_nbytes), backend.alloc(plan.buffer_nbytes), backend.alloc(plan.slots_nbytes)


class Picked:
    """A stack of which rows are read: `[ids]` are those that were selected, in memory that the next ones overwrite."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: torch.Tensor) -> torch.Tensor:
        return self._read()


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, neither the watch of a step nor the mode of its caller sees the thousands of views that are made."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


class Opening:
    """What opens the coded and the cached weights of one unit, found out when it is first asked for: so a unit waits
    for its own pages alone. In a capture nothing can be found out."""

    def __init__(self, plan: Plan, index: int, homes: Mapping[str, Home], memory: Buffers, backend: Backend) -> None:
        self._about = plan, index, homes, memory, backend
        self.following: int | None = None  # the unit that opens then, until it was found out early

    def again(self) -> Opening:
        """The same, to be found out anew: its homes are others."""
        made = Opening(*self._about)
        made.following = self.following
        return made

    def then(self) -> int | None:
        """The unit that opens then, the first time."""
        found, self.following = self.following, None
        return found

    @cached_property
    def decode(self) -> Callable[[], None]:
        """What decodes or copies all of them."""
        with _unseen():
            return unit_decoder(*self._about)

    @cached_property
    def rows(self) -> Rows | None:
        """What single rows of its stacks are read by, where that may be in place of all."""
        with _unseen():
            return rows(*self._about)

    @property
    def asked(self) -> Rows | None:
        """The same, if anybody has asked for them yet."""
        found: Rows | None = vars(self).get("rows")
        return found

    def find(self) -> None:
        """Find out all of it now."""
        _ = self.decode, self.rows

    def find_early(self) -> None:
        """The same before its turn, while the device is busy, unless that would wait for pages. Errors are told in its
        turn, as it may have none."""
        plan, index, homes, _, backend = self._about
        sources = (homes[alias].source for alias in plan.decoded(index))
        waits = any(isinstance(source, PageWindow) and source.is_coming for source in sources)
        if not waits and not backend.capturing():
            with suppress(Exception):
                self.find()


def in_turn(plan: Plan, openings: Sequence[Opening]) -> None:
    """Each is followed by what opens next in a step, for the first time."""
    for index, following in pairwise(unit for unit in dict.fromkeys(plan.manifest.order) if plan.decoded(unit)):
        openings[index].following = following


@dataclass(kw_only=True, slots=True)
class Rows:
    """What reads single rows of the stacks of a unit, by the ids of their tensor objects.

    `select` takes `most` ids at a time. `rest` brings what is no stack. `capturing` tells whether a graph is captured.
    `look_ahead` is to be told the states of a call once its rows have come, where rows are fetched ahead.
    """

    num_rows: int
    capturing: Callable[[], bool]
    readings: Mapping[int, RowReader]
    cache: SlotCache | None = None
    rest: Callable[[], None] | None = None
    look_ahead: Callable[[torch.Tensor], None] | None = None
    num_named: int = 0

    @property
    def most(self) -> int:
        return self.num_rows if self.cache is None else self.cache.num

    def places(self, num_ids: int) -> bool:
        """Whether the call which names so many may have them placed. Each is to ask.

        Where they name nearly all rows, to copy the stacks in order is faster. That leaves the slots as they are, too:
        so it does where a call names more ids than there are slots, more than the call before, as prompts do, and so
        many that it would fetch about as much. What is captured is a step.
        """
        before, self.num_named = self.num_named, num_ids
        few = max(self.most, self.num_rows // 2, before)
        is_step = self.cache is None or num_ids <= few or self.capturing()
        return is_step and num_ids <= NEARLY_ALL * self.num_rows

    def forget(self) -> None:
        """Stacks were written to: what is in slots is stale."""
        if self.cache is not None:
            self.cache.forget()

    def select(self, ids: torch.Tensor) -> dict[int, Picked]:
        """Stand-ins for the stacks, for these rows: on the device."""
        ids = ids.reshape(-1).to(torch.int64).contiguous()
        if self.rest is not None:
            self.rest()
        rows = (ids,) if self.cache is None else (ids, self.cache.resolve(ids))
        return {key: Picked(partial(reading.read, *rows)) for key, reading in self.readings.items()}

    def place(self, ids: torch.Tensor) -> None:
        """Bring these rows to where they are in the whole stacks."""
        ids = ids.reshape(-1).to(torch.int64)
        ids = ids.clamp(0, self.num_rows - 1)  # one that is none would be an access outside
        rows = torch.full((self.num_rows,), -1, dtype=torch.int64, device=ids.device).scatter_(0, ids, ids)
        if self.rest is not None:
            self.rest()
        left = min(len(ids), self.num_rows)
        while left > 0:
            rows = rows.sort(descending=True).values[:left].contiguous()  # where none is named costs a kernel, too
            slots = None if self.cache is None else self.cache.resolve(rows)
            for reading in self.readings.values():
                reading.put(rows, slots, places=rows)
            left -= self.most
            if slots is not None:
                rows = rows.masked_fill(slots >= 0, -1)


def unit_decoder(
    plan: Plan,
    index: int,
    homes: Mapping[str, Home],
    memory: Buffers,
    backend: Backend,
    only: Collection[str] | None = None,
) -> Callable[[], None]:
    """What decodes the coded weights of a unit, all or `only` some; those that are coded no more, or cached, are copied
    as they are."""
    parts, plain = [], []
    copies: list[Callable[[], None]] = []
    for alias, offset in plan.decoded(index).items():
        if only is not None and alias not in only:
            continue
        home = homes[alias]
        out = memory[1][offset : offset + aligned(home.group.nbytes)]
        if alias in plan.cached:
            copies.append(_copying(home, out, backend))
        elif home.layout is None:
            plain.append((home, out[: home.group.nbytes]))
        else:
            parts.append(CodedPart(_coded(plan, index, home, memory[0]), home.layout, out))
    run = coding.decoding(parts) if parts else None

    def decode() -> None:
        if plain and backend.capturing():
            raise OffloadError(f"{plain[0][0].group.alias} was updated since it was coded: offload the model again")
        for home, out in plain:
            home.source.plain_into(out)
        for copy in copies:
            copy()
        if run is not None:
            run()

    return decode


def _copying(home: Home, out: torch.Tensor, backend: Backend) -> Callable[[], None]:
    """What copies all of a stack that is cached, decoded, from where it lies; in a graph too, where the device reads
    it there."""
    stack = Stack.of(home, out)
    segments = stack.segments(backend) if stack is not None and backend.device.type != "cpu" else None
    if stack is None or segments is None:
        return partial(_copy_plain, home, out[: home.group.nbytes], backend)
    if home.layout is None:
        sizes = [segment.numel() for segment in segments]
        return partial(_copy_each, out[: home.group.nbytes].split(sizes), segments)
    pick = coding.picking(segments[0], home.layout, out, stack.num_rows, heads=stack.heads().to(out.device))
    return partial(pick, torch.arange(stack.num_rows, device=out.device))


def _copy_plain(home: Home, out: torch.Tensor, backend: Backend) -> None:
    if backend.capturing():
        raise OffloadError(f"{home.group.alias} is read whole, and the device does not read it where it lies")
    home.source.plain_into(out)


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    with _unseen():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def rows(plan: Plan, index: int, homes: Mapping[str, Home], memory: Buffers, backend: Backend) -> Rows | None:
    """What reads single rows of the stacks of a unit; None where not all that opens can be read so."""
    decoded = plan.decoded(index)
    stacks = {alias: Stack.of(homes[alias], memory[1][offset:]) for alias, offset in decoded.items()}
    found = [stack for stack in stacks.values() if stack is not None]
    rest = [alias for alias, stack in stacks.items() if stack is None]
    cached = plan.cached.intersection(stacks)
    if not found or len({stack.num_rows for stack in found}) > 1 or (cached and cached != stacks.keys() - set(rest)):
        return None
    if cached:
        made = _cached_rows(found, _share(plan, index, memory[2]), backend)
    elif any(stack.home.layout is None for stack in found):
        return None  # it was written to since it was coded
    else:
        readings = {stack.key: stack.picking(_coded(plan, index, stack.home, memory[0])) for stack in found}
        made = Rows(num_rows=found[0].num_rows, capturing=backend.capturing, readings=readings)
    if made is not None and rest:
        made.rest = unit_decoder(plan, index, homes, memory, backend, rest)
    return made


def _cached_rows(stacks: Sequence[Stack], room: torch.Tensor, backend: Backend) -> Rows | None:
    """The same of stacks that are cached, with as many slots as there is room for."""
    pieces = [stack.pieces(backend) for stack in stacks]
    if not all(pieces):
        return None
    strides = [max(piece.at + max(row.numel() for row in piece.rows) for piece in of_stack) for of_stack in pieces]
    strides = [aligned(stride + WORD) for stride in strides]
    num_slots = min(stacks[0].num_rows, room.numel() // sum(strides))
    if not num_slots:
        return None
    parts = room[: num_slots * sum(strides)].split([num_slots * stride for stride in strides])
    views = [part.view(num_slots, stride) for part, stride in zip(parts, strides, strict=True)]
    readings = {stack.key: stack.reading(view) for stack, view in zip(stacks, views, strict=True)}
    cache = SlotCache(list(zip(views, pieces, strict=True)), stacks[0].num_rows)
    return Rows(num_rows=stacks[0].num_rows, capturing=backend.capturing, readings=readings, cache=cache)


def _share(plan: Plan, index: int, memory: torch.Tensor) -> torch.Tensor:
    """The part of the slots' memory that a unit has: as much as any other."""
    users = [u for u, unit in enumerate(plan.manifest.units) if unit.aliases().keys() & plan.cached]
    nbytes = memory.numel() // len(users) // ALIGN_NBYTES * ALIGN_NBYTES
    begin = users.index(index) * nbytes
    return memory[begin : begin + nbytes]


def _coded(plan: Plan, index: int, home: Home, ring: torch.Tensor) -> torch.Tensor:
    """The coded bytes of a weight, in the ring or where they stay."""
    assert home.layout is not None
    streamed = plan.streamed(index)
    alias = home.group.alias
    memory = ring[plan.extents[index].offset + streamed[alias] :] if alias in streamed else home.coded
    assert memory is not None
    return memory[: home.layout.nbytes]
