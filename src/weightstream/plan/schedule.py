"""The schedule: fixed extents of the units in the ring, which fill may start after which release, and who is next.

The ring rule. A unit's bytes are intact from its fill until another unit that shares bytes with it is filled. So
before position p (unit u) the last position q, going backwards and around, whose unit shares bytes with u decides:
if that unit is u itself nothing has to be done, otherwise u is filled right after q is released. Two equal slots
are the special case; `(index + slots) % n` is not this rule whenever n % slots != 0.

[Note: skipped units] A step need not follow the order. One rule says what is due then, and all that walk a schedule
(engine, recording, proof, simulation) take it from `Cursor`:

  skipped    a unit that is reached ahead of the cursor moves it there, and the positions in between count as
             released: their fills are due, but not those of a unit that is skipped too, as nothing would read it
  repeated   a unit that stands behind the cursor alone moves nothing; whoever runs it fills it on demand
  reordered  the first unit out of order is skipped to; those that it passed over are then repeated ones
  unnamed    a unit that no position names moves nothing
  cut short  the end of a step, which the begin of the next one implies, releases what is left of the order

Only a caller knows whether a unit behind the cursor begins the next step or is a repeated one: it calls `begin`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from weightstream.errors import PlanError

ALIGN_NBYTES = 512  # what the CUDA allocator gives a fresh tensor: kernels choose paths by alignment


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class RingExtent:
    """The bytes [offset, offset + nbytes) of the ring that belong to a unit."""

    offset: int
    nbytes: int

    def overlaps(self, other: RingExtent) -> bool:
        return max(self.offset, other.offset) < min(self.offset + self.nbytes, other.offset + other.nbytes)


def allocate(
    order: Sequence[int], unit_nbytes: Sequence[int], capacity: int, slot_nbytes: int = 0, *, by_ends: bool = False
) -> tuple[RingExtent, ...]:
    """Extents by cyclic bump allocation in order of first use; units that no position names follow behind.

    With `slot_nbytes` every extent starts at a multiple of it: uneven units then never lie across two neighbours.
    `by_ends`: at one end of the ring and at the other in turn, so that neighbours share no bytes if it holds both; but
    for the last and the first of an odd number of units.
    """
    extents: dict[int, RingExtent] = {}
    cursor, at_end, end = 0, False, capacity // ALIGN_NBYTES * ALIGN_NBYTES
    for unit in dict.fromkeys([*order, *range(len(unit_nbytes))]):
        nbytes = aligned(unit_nbytes[unit])
        if nbytes > capacity:
            raise PlanError(f"unit {unit} needs {nbytes} bytes of ring, more than the ring's {capacity}")
        if by_ends:
            cursor, at_end = (end - nbytes if at_end and nbytes else 0), at_end != (nbytes > 0)
        elif cursor + nbytes > capacity:
            cursor = 0
        extents[unit] = RingExtent(offset=cursor, nbytes=nbytes)
        cursor += max(nbytes, slot_nbytes) if nbytes else 0
    return tuple(extents[unit] for unit in range(len(unit_nbytes)))


def neighbours_nbytes(order: Sequence[int], unit_nbytes: Sequence[int]) -> int:
    """Of a ring by whose ends they lie: the most that two units take which follow each other, and that any takes."""
    sizes = [aligned(unit_nbytes[unit]) for unit in dict.fromkeys(order) if unit_nbytes[unit]]
    around = sizes[:1] if len(sizes) % 2 == 0 else []  # else the last and the first are at the same end
    pairs = (a + b for a, b in pairwise([*sizes, *around]))
    return max([*pairs, *map(aligned, unit_nbytes)], default=0)


def units_sharing_bytes(extents: Sequence[RingExtent]) -> list[tuple[int, ...]]:
    """For each unit: the others that share bytes with it."""
    found: list[list[int]] = [[] for _ in extents]
    by_offset = sorted((u for u, extent in enumerate(extents) if extent.nbytes), key=lambda u: extents[u].offset)
    for place, unit in enumerate(by_offset):
        for other in by_offset[place + 1 :]:
            if not extents[other].overlaps(extents[unit]):
                break  # none behind starts earlier
            found[unit].append(other)
            found[other].append(unit)
    return [tuple(sorted(others)) for others in found]


def previous_holders(order: Sequence[int], extents: Sequence[RingExtent]) -> list[int | None]:
    """For each position: the last one before it, cyclically, whose unit shares bytes with its own; None if only it."""
    holders: list[int | None] = [None] * len(order)
    spans = [(p, e.offset, e.offset + e.nbytes) for p, e in enumerate(map(extents.__getitem__, order)) if e.nbytes]
    for place, (position, begin, end) in enumerate(spans):
        for back in range(place - 1, place - len(spans), -1):  # below 0 is around
            holder, other_begin, other_end = spans[back]
            if begin < other_end and other_begin < end:
                holders[position] = holder
                break
    return holders


def refills(order: Sequence[int], extents: Sequence[RingExtent]) -> tuple[tuple[int, ...], ...]:
    """For each position: the units to fill once it is released, soonest needed first."""
    after: list[list[int]] = [[] for _ in order]
    held = [(q, p) for p, q in enumerate(previous_holders(order, extents)) if q is not None and order[q] != order[p]]
    for q, position in sorted(held, key=lambda pair: pair[0] > pair[1]):  # of the next step: later
        after[q].append(order[position])
    return tuple(map(tuple, after))


def first_fills(order: Sequence[int], extents: Sequence[RingExtent], after: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The units to fill before the first step."""
    return tuple(unit for unit in Cursor(order, after, 0).needed() if extents[unit].nbytes)


class Cursor:
    """A walk over an order of units: which fills are due as units are reached and released ([Note: skipped units]).

    `position` is the first that has not been released; before the first step all have been. A unit is in use between
    `reach` and `release`, and the cursor stands at it.
    """

    def __init__(self, order: Sequence[int], after: Sequence[Sequence[int]], position: int | None = None) -> None:
        self.order = order
        self.after = after
        self.position = len(order) if position is None else position

    def is_behind(self, unit: int) -> bool:
        """Whether the unit stands in the order, but only before the cursor."""
        if self.position < len(self.order) and self.order[self.position] == unit:
            return False  # as in most steps
        return self._next(unit) is None and unit in self.order

    def reach(self, unit: int) -> Sequence[int]:
        """Move to the unit's next position, if there is one; returns the fills of those that were skipped."""
        if self.position < len(self.order) and self.order[self.position] == unit:
            return ()
        found = self._next(unit)
        return () if found is None else self._skip_to(found)

    def release(self, unit: int) -> Sequence[int]:
        """The unit's last kernel is queued; returns the fills that waited for it."""
        if self.position == len(self.order) or self.order[self.position] != unit:
            return ()
        self.position += 1
        return self.after[self.position - 1]

    def end(self) -> Sequence[int]:
        """The step is over; returns the fills of the positions that it did not come to."""
        return self._skip_to(len(self.order))

    def begin(self) -> Sequence[int]:
        """End the step and go back to the start of the order."""
        fills = self.end()
        self.position = 0
        return fills

    def step(self) -> Iterator[tuple[int, Sequence[int]]]:
        """A step in order: each unit, and the fills that wait for its release."""
        self.begin()
        for unit in self.order:
            yield unit, self.release(unit)  # the cursor stands at it already

    def needed(self) -> tuple[int, ...]:
        """The units that must be in the ring here: each that is read before a release from here on fills it.

        They share no bytes with each other, and are what a step in order leaves there.
        """
        found: list[int] = []
        filled: set[int] = set()
        for at in (*range(self.position, len(self.order)), *range(self.position)):
            if self.order[at] not in filled:
                found.append(self.order[at])
            filled.update(self.after[at], (self.order[at],))
        return tuple(found)

    def _next(self, unit: int) -> int | None:
        """The unit's next position."""
        try:
            return self.order.index(unit, self.position)
        except ValueError:
            return None

    def _skip_to(self, end: int) -> list[int]:
        fills: list[int] = []
        for at in range(self.position, end):
            fills += [unit for unit in self.after[at] if unit not in self.order[at + 1 : end]]
        self.position = end
        return fills
