"""Rows of stacks in waves, past the slots: copies to the device run ahead of its work, into a buffer.

A prompt names nearly all rows of a stack, each for many tokens. They are read a few at a time. Those that have a slot
are read there, the others are copied from host memory. The host knows the rows, so prompts are not captured.

[Note: waves ahead]
For long prompts attention takes longer than copying the experts of a layer does. So copies run as far ahead as the
buffer has room: after the last wave of a stack come those of the unit's next stack, and then those of the next unit,
if no unit in between uses the buffer. Which rows that unit will read is not known yet. After a call that read at least
half of its rows, all of them are copied, and some for nothing; after a call that read fewer, none. Rows in slots are
read after the waves that have come, as these make room for others. Anything else that uses the buffer or changes slots
calls `drop` first: also a launch of a graph, which does both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.errors import InvariantError
from weightstream.plan.schedule import ALIGN_NBYTES, aligned
from weightstream.runtime.devices.backend import Backend, Event, Side
from weightstream.runtime.experts.slot_cache import RowPiece, SlotCache
from weightstream.runtime.weights.picks import RowsAt, RowWave


class RowLeaf(NamedTuple):
    """A stack: the pieces of its rows in host memory, how a row looks, and its slots, if it has some."""

    pieces: Sequence[RowPiece]
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int  # of a row
    slots: torch.Tensor | None = None  # of shape (slots, *row)


class _Wave(NamedTuple):
    """A wave whose copy has begun, and its bytes in the buffer."""

    stream: RowStream
    rows: Sequence[int]
    leaves: tuple[torch.Tensor, ...]
    filled: Event
    begin: int
    end: int


class _Read(NamedTuple):
    """Bytes of the buffer that compute has read, up to the event."""

    begin: int
    end: int
    event: Event


class StreamBuffer:
    """Memory on the device that waves of all units pass through, as a ring: [Note: waves ahead].

    Args:
        memory: flat uint8. Other code may use it after a call of `drop`.
        following: the streams of a unit and of the next one, in the order in which they are read.
    """

    def __init__(
        self, memory: torch.Tensor, backend: Backend, following: Callable[[int], Sequence[RowStream]] = lambda _: ()
    ) -> None:
        self.memory = memory
        self._backend = backend
        self._following = following
        self._sizes: dict[tuple[int, ...], int] = {}  # rows of a wave, by the bytes of a row in each leaf
        self._slots: dict[SlotCache, Sequence[int]] = {}  # the slot of each row, until `drop`
        self._begun: deque[_Wave] = deque()  # waves that were not read yet
        self._read: list[_Read] = []  # of bytes that no wave has overwritten since
        self._at = 0  # where the next wave begins
        self._newest: Event | None = None  # the end of the last copies; None: compute waits for all copies

    def drop(self) -> None:
        """Forget all waves, and order compute after their copies: the buffer or the slots are about to change."""
        if self._newest is not None:
            end = self._backend.event()  # another one: an error may have come before `_newest` was recorded
            self._backend.record(Side.AHEAD, end)
            self._backend.wait(Side.COMPUTE, end)
        self._begun.clear()
        self._read.clear()
        self._slots.clear()
        self._newest = None

    def close(self) -> None:
        """Drop the reference to the memory."""
        self.drop()
        self.memory = self.memory[:0].clone()

    def begun_for(self, stream: RowStream, rows: Sequence[int], most: int) -> list[RowWave]:
        """The waves of a stream whose copies have begun, each with the rows of it that are asked for: the first ones of
        `rows`, in their order. Other waves of the stream are forgotten."""
        self._sizes[stream.row_nbytes] = most
        own = list(takewhile(lambda wave: wave.stream is stream, self._begun))
        later = list(self._begun)[len(own) :]
        asked = set(rows)
        found = [_among(wave.rows, asked) for wave in own]
        named = [row for wave in found for row in wave.rows]
        fits = named == list(rows[: len(named)]) and all(len(wave.rows) <= most for wave in found)
        if not fits or (later and len(named) < len(rows)):  # waves are read in the order of their copies
            self.drop()
            return []
        both = list(zip(own, found, strict=True))
        # a forward that failed may have begun to read a wave without any of these rows
        self._read += [_Read(wave.begin, wave.end, self._now()) for wave, its in both if not its.rows]
        self._begun = deque([*(wave for wave, its in both if its.rows), *later])
        return [wave for wave in found if wave.rows]

    def after(self, stream: RowStream, rows: Sequence[int]) -> list[tuple[RowStream, Sequence[int]]]:
        """The waves to be begun after a stream of these rows, as far as their sizes are known."""
        has_begun = {(wave.stream, row) for wave in self._begun for row in wave.rows}
        found: list[tuple[RowStream, Sequence[int]]] = []
        for later in self._streams_after(stream):
            is_unknown = later.unit != stream.unit and 2 * len(rows) < stream.num_rows
            if is_unknown or (size := self._sizes.get(later.row_nbytes)) is None:
                break
            _, its_rows = later.parted(rows if later.unit == stream.unit else range(later.num_rows))
            left = [row for row in its_rows if (later, row) not in has_begun]
            found += [(later, part) for part in _parts(left, size)]
        return found

    def find_slots(self, stream: RowStream) -> None:
        """Read the slots of this unit and the next one. Waits for the device, so that `begin` does not have to."""
        for each in (stream, *self._streams_after(stream)):
            self.slots(each.cache)

    def slots(self, cache: SlotCache | None) -> Sequence[int]:
        """The slot of each row of a unit, -1 without; empty if it has no slots."""
        if cache is None:
            return ()
        if (found := self._slots.get(cache)) is None:
            found = self._slots[cache] = cache.slots()
        return found

    def begin(self, stream: RowStream, rows: Sequence[int]) -> bool:
        """Begin to copy a wave; returns False if there is no room, because other waves have yet to be read."""
        backend, nbytes = self._backend, stream.nbytes(len(rows))
        begin = self._at if self._at + nbytes <= self.memory.numel() else 0
        end = begin + nbytes

        def overlaps(other: _Wave | _Read) -> bool:
            return other.begin < end and begin < other.end

        if any(map(overlaps, self._begun)):
            return False
        over = list(filter(overlaps, self._read))
        if not self._begun and not self._read:
            over.append(_Read(begin, end, self._now()))  # earlier work may use the buffer
        self._newest = filled = backend.event()  # before any copy: `drop` waits for it even if an error cuts this call
        for read in over:
            backend.wait(Side.AHEAD, read.event)
        with backend.aside(), _disable_current_modes(), torch.no_grad():
            leaves = stream.copied(rows, self.memory[begin:end])
        backend.record(Side.AHEAD, filled)
        self._read = [read for read in self._read if read not in over]
        self._begun.append(_Wave(stream, rows, leaves, filled, begin, end))
        self._at = end
        return True

    def arrived(self, stream: RowStream) -> tuple[torch.Tensor, ...]:
        """The leaves of the next wave, which is of this stream. Work that is queued from now on may read them."""
        wave = self._begun[0] if self._begun else None
        if wave is None or wave.stream is not stream:
            raise InvariantError("a wave of rows is read that was not begun")
        self._backend.wait(Side.COMPUTE, wave.filled)
        if wave.filled is self._newest:
            self._newest = None
        return wave.leaves

    def passed(self) -> None:
        """The work that reads the next wave is queued: its bytes may be overwritten after it."""
        if self._begun:  # else it was dropped meanwhile
            wave = self._begun[0]
            self._read.append(_Read(wave.begin, wave.end, self._now()))
            self._begun.popleft()

    def _now(self) -> Event:
        event = self._backend.event()
        self._backend.record(Side.COMPUTE, event)
        return event

    def _streams_after(self, stream: RowStream) -> Sequence[RowStream]:
        streams = self._following(stream.unit)
        return streams[streams.index(stream) + 1 :] if stream in streams else ()


class RowStream:
    """Brings rows of some stacks of a unit to the device, wave by wave: implements `RowWaves`.

    The buffer holds at least two rows of all of the stacks.
    """

    def __init__(
        self,
        leaves: Sequence[RowLeaf],
        buffer: StreamBuffer,
        *,
        num_rows: int,
        unit: int,
        cache: SlotCache | None = None,
    ) -> None:
        self.unit = unit
        self.num_rows = num_rows
        self.cache = cache
        self.device = buffer.memory.device
        self.row_nbytes = tuple(leaf.nbytes for leaf in leaves)
        self._leaves = leaves
        self._buffer = buffer
        self.most = self._fitting(4) or min(1, self._fitting(2))  # the more waves, the further ahead copies run

    def _fitting(self, num_waves: int) -> int:
        """The largest number of rows for which the buffer holds so many waves."""
        nbytes = self._buffer.memory.numel() // num_waves // ALIGN_NBYTES * ALIGN_NBYTES
        return max(0, nbytes - len(self._leaves) * aligned(1)) // sum(self.row_nbytes)

    def nbytes(self, num: int) -> int:
        """Bytes of this many rows in the buffer."""
        return sum(aligned(num * nbytes) for nbytes in self.row_nbytes)

    def parted(self, rows: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Those of the rows that are read in slots, and those that are copied."""
        slots = self._buffer.slots(self.cache)
        if not slots or any(leaf.slots is None for leaf in self._leaves):
            return (), rows
        return [row for row in rows if slots[row] >= 0], [row for row in rows if slots[row] < 0]

    def cut(self, rows: Sequence[int], most: int) -> list[RowWave]:
        """As `RowWaves.cut`."""
        size = min(most, self.most)
        held, left = self.parted(rows)
        begun = self._buffer.begun_for(self, left, size)
        left = left[sum(len(wave.rows) for wave in begun) :]
        self._buffer.find_slots(self)
        slots = self._buffer.slots(self.cache)
        in_slots = [RowWave(part, [slots[row] for row in part], RowsAt.SLOTS) for part in _parts(held, most)]
        return [*begun, *in_slots, *(RowWave(part, range(len(part))) for part in _parts(left, size))]

    def bring(self, waves: Sequence[RowWave]) -> Iterator[tuple[torch.Tensor, ...]]:
        """As `RowWaves.bring`."""
        buffer = self._buffer
        coming = deque((self, wave.rows) for wave in waves if wave.at is RowsAt.HOST)
        coming.extend(buffer.after(self, [row for wave in waves for row in wave.rows]))

        def advance() -> None:
            while coming and buffer.begin(*coming[0]):
                coming.popleft()

        # nothing is undone if the caller fails: its traceback may be freed, and close this, in any later step
        for wave in waves:
            advance()
            if wave.at is RowsAt.SLOTS:
                yield tuple(leaf.slots for leaf in self._leaves if leaf.slots is not None)
                continue
            yield buffer.arrived(self)
            buffer.passed()
        advance()

    def copied(self, rows: Sequence[int], memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queue copies of these rows, for each leaf to memory of shape (rows, *row)."""
        found, begin = [], 0
        for leaf, joined in zip(self._leaves, self._joined, strict=True):
            part = memory[begin : begin + len(rows) * leaf.nbytes].view(len(rows), leaf.nbytes)
            begin += aligned(part.numel())
            for piece, joins in zip(leaf.pieces, joined, strict=True):
                for first, last in _runs(rows, joins):
                    source = piece.rows[rows[first]]
                    target = part[first : last + 1, piece.at : piece.at + source.numel()].view(-1)
                    target.copy_(source.as_strided((target.numel(),), (1,)))
            found.append(part.view(leaf.dtype).view(len(rows), *leaf.shape))
        return tuple(found)

    @cached_property
    def _joined(self) -> list[list[list[bool]]]:
        """For each piece of each leaf, and each row: whether the next row follows it in host memory, both whole."""
        return [
            [
                [len(a) == len(b) == leaf.nbytes and _follows(a, b) for a, b in pairwise(piece.rows)]
                for piece in leaf.pieces
            ]
            for leaf in self._leaves
        ]


def _among(rows: Sequence[int], asked: Collection[int]) -> RowWave:
    """The part of a wave of these rows that is asked for."""
    places = [place for place, row in enumerate(rows) if row in asked]
    return RowWave([rows[place] for place in places], places, RowsAt.COMING)


def _parts(rows: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    return (rows[begin : begin + most] for begin in range(0, len(rows), most))


def _runs(rows: Sequence[int], joins: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The first and the last place of each run of rows that follow each other in host memory."""
    first = 0
    for place in range(1, len(rows) + 1):
        before = rows[place - 1]
        if place == len(rows) or rows[place] != before + 1 or not joins[before]:
            yield first, place - 1
            first = place


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether `after` begins where `before` ends, in the same storage."""
    is_next = after.storage_offset() == before.storage_offset() + before.numel()
    return is_next and after.untyped_storage()._cdata == before.untyped_storage()._cdata
