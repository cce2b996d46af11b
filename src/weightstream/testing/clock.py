"""The clock checker: vector clocks over backend calls, which prove accesses ordered without any luck in timing.

Each stream counts its records; an event carries the counts that its stream knew when it was recorded, and waiting
takes them over. An access of one stream happens before a later one of the other only if such a chain says so. This
is the order that the protocol promises, not the one that happened: a race is found though it went well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightstream.runtime.backend import Backend, Copy, Event, Side
from weightstream.testing.wrappers import Wrapper

_Clock = dict[Side, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Access:
    """Bytes [begin, end) of device memory, touched by a stream between two of its records.

    A write has the address of its `source`; a read has none.
    """

    side: Side
    epoch: int
    begin: int
    end: int
    source: int | None = None

    def overlaps(self, other: _Access) -> bool:
        return self.begin < other.end and other.begin < self.end

    def is_outdone_by(self, later: _Access) -> bool:
        """Whether whatever is ordered after the later access is ordered after this one, or was reported."""
        inside = later.begin <= self.begin and self.end <= later.end
        return inside and (later.source is not None or (self.source is None and self.side is later.side))

    def __str__(self) -> str:
        what = "read" if self.source is None else f"fill from {self.source:#x}"
        return f"{what} of bytes [{self.begin:#x}, {self.end:#x}) on the {self.side.value} stream"


class _ClockEvent:
    __slots__ = ("clock", "event")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.clock: _Clock = {}


class ClockBackend(Wrapper):
    """Checks the order of copies and reads of the device's memory; put it outermost, around any backend.

    Call `read(copies)` whenever compute reads what these copies fill: between `wait` and `release` of their unit.
    `races` then holds, in words, every pair of conflicting accesses that no chain of events orders, and every read
    of bytes that another copy wrote last.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.races: list[str] = []
        self._clocks: dict[Side, _Clock] = {side: dict.fromkeys(Side, 0) for side in Side}
        for side in Side:
            self._clocks[side][side] = 1
        self._accesses: list[_Access] = []

    def event(self) -> Event:
        return _ClockEvent(self.backend.event())

    def record(self, side: Side, event: Event) -> None:
        clock = self._clocks[side]
        event.clock = dict(clock)
        clock[side] += 1
        self.backend.record(side, event.event)

    def wait(self, side: Side, event: Event) -> None:
        clock = self._clocks[side]
        clock.update({of: max(count, clock[of]) for of, count in event.clock.items()})
        self.backend.wait(side, event.event)

    def copy(self, copies: Sequence[Copy]) -> None:
        for access in self._accesses_of(Side.COPY, copies):
            self._touch(access)
        self.backend.copy(copies)

    def read(self, copies: Sequence[Copy]) -> None:
        """Compute reads the destinations of these copies."""
        for copy, access in zip(copies, self._accesses_of(Side.COMPUTE, copies), strict=True):
            writes = (a for a in reversed(self._accesses) if a.source is not None and a.overlaps(access))
            last = next(writes, None)
            if last is None or (last.source, last.begin, last.end) != (copy.src.data_ptr(), access.begin, access.end):
                self.races.append(f"{access} wants the fill from {copy.src.data_ptr():#x}; the last write: {last}")
            self._touch(access)

    def synchronize(self) -> None:
        self.backend.synchronize()
        for clock in self._clocks.values():
            clock.update({of: max(clock[of], self._clocks[of][of]) for of in Side})

    def _accesses_of(self, side: Side, copies: Sequence[Copy]) -> Iterator[_Access]:
        for copy in copies:
            begin = copy.dst.data_ptr()
            source = copy.src.data_ptr() if side is Side.COPY else None
            epoch = self._clocks[side][side]
            yield _Access(side=side, epoch=epoch, begin=begin, end=begin + copy.dst.numel(), source=source)

    def _touch(self, access: _Access) -> None:
        clock = self._clocks[access.side]
        for old in self._accesses:
            conflict = old.overlaps(access) and (old.source is not None or access.source is not None)
            if conflict and old.side is not access.side and clock[old.side] < old.epoch:
                self.races.append(f"no event orders the {access} after the {old}")
        self._accesses = [old for old in self._accesses if not old.is_outdone_by(access)]
        self._accesses.append(access)
