"""The clock checker: vector clocks over backend calls, which prove the order of accesses without luck in timing.

Each stream counts its records. An event carries the counts that its stream knew, and a wait adopts them. Only such a
chain orders accesses of two streams, so a race is found even if it caused no error in this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from weightstream.runtime.devices.backend import Backend, Copy, Event, Side
from wrapped.wrappers import Wrapper

_Clock = dict[Side, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Access:
    """Device bytes [begin, end) touched by a stream between two of its records. `source` is None for a read."""

    side: Side
    epoch: int
    begin: int
    end: int
    source: int | None

    def overlaps(self, other: _Access) -> bool:
        return self.begin < other.end and other.begin < self.end

    def __str__(self) -> str:
        what = "read" if self.source is None else f"fill from {self.source:#x}"
        return f"{what} of bytes [{self.begin:#x}, {self.end:#x}) on the {self.side.value} stream"


class ClockBackend(Wrapper):
    """Checks the order of copies and reads of the device's memory. It must be the outermost wrapper of a backend.

    Call `read(copies)` whenever compute reads what these copies fill: between `wait` and `release` of their unit.
    `races`
    then describes every pair of conflicting accesses that no chain of events orders, and every read of bytes that
    another copy wrote last.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.races: list[str] = []
        self._clocks: dict[Side, _Clock] = {side: {of: int(of is side) for of in Side} for side in Side}
        self._accesses: list[_Access] = []

    def edge(self) -> Event:
        return self.event()

    def event(self) -> Event:
        return SimpleNamespace(event=self.backend.event(), clock={})

    def record(self, side: Side, event: Event) -> None:
        event.clock = dict(self._clocks[side])
        self._clocks[side][side] += 1
        self.backend.record(side, event.event)

    def wait(self, side: Side, event: Event) -> None:
        self._join(side, event.clock)
        self.backend.wait(side, event.event)

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._touch(self._access(Side.COPY, copy, copy.src.data_ptr()))
        self.backend.copy(copies)

    def read(self, copies: Sequence[Copy]) -> None:
        """Compute reads the destinations of these copies."""
        for copy in copies:
            access, wanted = self._access(Side.COMPUTE, copy, None), copy.src.data_ptr()
            last = next((a for a in reversed(self._accesses) if a.source is not None and a.overlaps(access)), None)
            if last is None or (last.source, last.begin, last.end) != (wanted, access.begin, access.end):
                self.races.append(f"{access} wants the fill from {wanted:#x}; the last write: {last}")
            self._touch(access)

    def synchronize(self) -> None:
        self.backend.synchronize()
        for side in Side:
            self._join(side, {of: self._clocks[of][of] for of in Side})

    def _join(self, side: Side, known: _Clock) -> None:
        self._clocks[side].update({of: max(count, self._clocks[side][of]) for of, count in known.items()})

    def _access(self, side: Side, copy: Copy, source: int | None) -> _Access:
        begin, epoch = copy.dst.data_ptr(), self._clocks[side][side]
        return _Access(side=side, epoch=epoch, begin=begin, end=begin + copy.dst.numel(), source=source)

    def _touch(self, access: _Access) -> None:
        kept: list[_Access] = []
        for old in self._accesses:
            one_writes = access.source is not None or old.source is not None
            is_known = old.side is access.side or self._clocks[access.side][old.side] >= old.epoch
            if old.overlaps(access) and one_writes and not is_known:
                self.races.append(f"no event orders the {access} after the {old}")
            covered = access.begin <= old.begin and old.end <= access.end
            if not covered or (access.source is None and old.source is not None):
                kept.append(old)
        self._accesses = [*kept, access]
