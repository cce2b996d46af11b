"""The schedule: fixed extents of the units in the ring, the fills that follow each release, and the next unit.

The ring rule. A unit's bytes are intact from its fill until another unit that shares bytes with it is filled. So for
position p (unit u), look backwards and around for the last position q whose unit shares bytes with u. If that unit is
u itself, nothing has to be done. Otherwise u is filled right after q is released. Two equal slots are a special case;
`(index + slots) % n` is not this rule whenever n % slots != 0.

[Note: skipped units] A step need not follow the order. One rule determines the fills that are due then. Engine,
recording, proof and simulation all take it from `Cursor`:

  skipped    if a unit ahead of the cursor is reached, the cursor moves there. The positions in between count as
             released: their fills are due, except those of units that are skipped, too, as nothing would read them
  repeated   a unit that has positions only before the cursor does not move it; it is filled on demand
  reordered  the first unit out of order counts as a skip; the units that it passed over are then repeated ones
  unnamed    a unit without a position does not move the cursor
  cut short  the end of a step releases the rest of the order; the begin of the next step implies it

Only the caller knows whether a unit before the cursor begins the next step or is a repeated one: it calls `begin`.

[Note: kinds of step]
Steps of several kinds run the units in orders of their own: a training step runs them forward and then backward. Each
kind has a `Schedule`, and all share the extents. Where steps of another kind begin, the units of their `first` are
filled, unless they are in the ring, which is then as it is between two steps of that kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from weightstream.errors import PlanError

FORWARD, TRAIN = "forward", "train"  # kinds of step: without gradients; a forward and its backward pass
ALIGN_NBYTES = 512  # as the CUDA allocator aligns a new tensor: kernels choose code paths by alignment


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
    """The extents of all units, by cyclic bump allocation in the order of first use.

    Args:
        order: the positions of a step. Units without a position come last.
        unit_nbytes: bytes of each unit in the ring.
        capacity: bytes of the ring.
        slot_nbytes: every extent starts at a multiple of this, so units of different sizes overlap with only one
            neighbour; 0: at any aligned byte.
        by_ends: extents lie at the two ends of the ring in turn. Neighbours in the order share no bytes if the ring
            holds both, except the last and the first of an odd number of units.

    Raises:
        PlanError: a unit is larger than the ring.
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
    """Bytes of a ring for extents at its two ends: for any two units in a row, and for any single unit."""
    sizes = [aligned(unit_nbytes[unit]) for unit in dict.fromkeys(order) if unit_nbytes[unit]]
    around = sizes[:1] if len(sizes) % 2 == 0 else []  # if odd, the last and the first unit are at the same end
    pairs = (a + b for a, b in pairwise([*sizes, *around]))
    return max([*pairs, *map(aligned, unit_nbytes)], default=0)


def units_sharing_bytes(extents: Sequence[RingExtent]) -> list[tuple[int, ...]]:
    """For each unit, the other units that share bytes with it."""
    sharing: list[list[int]] = [[] for _ in extents]
    by_offset = sorted((u for u, extent in enumerate(extents) if extent.nbytes), key=lambda u: extents[u].offset)
    for place, unit in enumerate(by_offset):
        for other in by_offset[place + 1 :]:
            if not extents[other].overlaps(extents[unit]):
                break  # all that follow start even later
            sharing[unit].append(other)
            sharing[other].append(unit)
    return [tuple(sorted(others)) for others in sharing]


def previous_holders(order: Sequence[int], extents: Sequence[RingExtent]) -> list[int | None]:
    """For each position, the last one before it, cyclically, whose unit shares bytes with its own; None: no unit."""
    holders: list[int | None] = [None] * len(order)
    spans = [(p, e.offset, e.offset + e.nbytes) for p, e in enumerate(map(extents.__getitem__, order)) if e.nbytes]
    for place, (position, begin, end) in enumerate(spans):
        for back in range(place - 1, place - len(spans), -1):  # negative indices wrap around
            holder, other_begin, other_end = spans[back]
            if begin < other_end and other_begin < end:
                holders[position] = holder
                break
    return holders


def refills(order: Sequence[int], extents: Sequence[RingExtent]) -> tuple[tuple[int, ...], ...]:
    """For each position, the units to fill once it is released, the one that is needed first at the start."""
    after: list[list[int]] = [[] for _ in order]
    held = [(q, p) for p, q in enumerate(previous_holders(order, extents)) if q is not None and order[q] != order[p]]
    for q, position in sorted(held, key=lambda pair: pair[0] > pair[1]):  # fills for the next step come last
        after[q].append(order[position])
    return tuple(map(tuple, after))


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The order of units in steps of one kind, and their fills, [Note: kinds of step].

    Attributes:
        what: the kind of step, such as `FORWARD` or `TRAIN`.
        order: the positions of a step.
        first: units that are filled before the first step.
        after: for each position, the units that are filled once it is released.
    """

    what: str
    order: tuple[int, ...]
    first: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, what: str, order: tuple[int, ...], extents: Sequence[RingExtent]) -> Schedule:
        """The schedule of an order over these extents."""
        after = refills(order, extents)
        return cls(what=what, order=order, first=first_fills(order, extents, after), after=after)

    def cursor(self, position: int | None = None) -> Cursor:
        """A walk over the order."""
        return Cursor(self.order, self.after, position)

    def fills(self) -> Iterator[int]:
        """The units that a step in the steady state fills."""
        for units in self.after:
            yield from units


def first_fills(order: Sequence[int], extents: Sequence[RingExtent], after: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The units to fill before the first step."""
    return tuple(unit for unit in Cursor(order, after, 0).needed() if extents[unit].nbytes)


class Cursor:
    """A walk over the order of units. Returns the fills that are due as units are reached and released.

    [Note: skipped units]. A unit is in use between `reach` and `release`; the cursor stands at its position.

    Attributes:
        order: the positions of a step.
        after: for each position, the units to fill once it is released.
        position: the first position that is not released. Before the first step all positions count as released.
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
        """Move to the unit's next position, if there is one; returns the fills of the skipped positions."""
        if self.position < len(self.order) and self.order[self.position] == unit:
            return ()
        position = self._next(unit)
        return () if position is None else self._skip_to(position)

    def release(self, unit: int) -> Sequence[int]:
        """Move past the unit, whose last kernel is queued; returns the fills that waited for it."""
        if self.position == len(self.order) or self.order[self.position] != unit:
            return ()
        self.position += 1
        return self.after[self.position - 1]

    def end(self) -> Sequence[int]:
        """End the step; returns the fills of the positions that it did not reach."""
        return self._skip_to(len(self.order))

    def begin(self) -> Sequence[int]:
        """End the step and go back to the start of the order; returns the fills of `end`."""
        fills = self.end()
        self.position = 0
        return fills

    def step(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Walk a step in order: yields each unit, and the fills that wait for its release."""
        self.begin()
        for unit in self.order:
            yield unit, self.release(unit)  # without `reach`: the cursor stands there already

    def needed(self) -> tuple[int, ...]:
        """The units that must be in the ring now: those that are read before any later release fills them.

        They share no bytes with each other. A step in order leaves them in the ring.
        """
        needed: list[int] = []
        filled: set[int] = set()
        for at in (*range(self.position, len(self.order)), *range(self.position)):
            if self.order[at] not in filled:
                needed.append(self.order[at])
            filled.update(self.after[at], (self.order[at],))
        return tuple(needed)

    def _next(self, unit: int) -> int | None:
        """The unit's next position; None if it has none from the cursor on."""
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
