"""The ring: fixed extents of the units that stream, and which fill may start after which release.

The ring rule. A unit's bytes are intact from its fill until another unit that shares bytes with it is filled. So
before position p (unit u) the last position q, going backwards and around, whose unit shares bytes with u decides:
if that unit is u itself nothing has to be done, otherwise u is filled right after q is released. Two equal slots
are the special case; `(index + slots) % n` is not this rule whenever n % slots != 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightstream.errors import PlanError

ALIGN_NBYTES = 512  # what the CUDA allocator gives a fresh tensor: kernels choose paths by alignment


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """The bytes [offset, offset + nbytes) of the ring that belong to a unit."""

    offset: int
    nbytes: int

    def overlaps(self, other: Extent) -> bool:
        if not self.nbytes or not other.nbytes:
            return False
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


def allocate(
    order: Sequence[int], unit_nbytes: Sequence[int], capacity: int, slot_nbytes: int = 0
) -> tuple[Extent, ...]:
    """Extents by cyclic bump allocation in order of first use; units that no position names follow behind.

    With `slot_nbytes` every extent starts at a multiple of it: uneven units then never lie across two neighbours.
    """
    extents: dict[int, Extent] = {}
    cursor = 0
    for unit in dict.fromkeys([*order, *range(len(unit_nbytes))]):
        nbytes = aligned(unit_nbytes[unit])
        if nbytes > capacity:
            raise PlanError(f"unit {unit} needs {nbytes} bytes of ring, more than the ring's {capacity}")
        if cursor + nbytes > capacity:
            cursor = 0
        extents[unit] = Extent(offset=cursor, nbytes=nbytes)
        cursor += max(nbytes, slot_nbytes) if nbytes else 0
    return tuple(extents[unit] for unit in range(len(unit_nbytes)))


def sharing(extents: Sequence[Extent]) -> list[tuple[int, ...]]:
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


def previous_holders(order: Sequence[int], extents: Sequence[Extent]) -> list[int | None]:
    """For each position: the last one before it, cyclically, whose unit shares bytes with its own; None if only it."""
    holders: list[int | None] = [None] * len(order)
    spans = [(p, extents[u].offset, extents[u].offset + extents[u].nbytes) for p, u in enumerate(order)]
    spans = [span for span in spans if span[1] < span[2]]
    for place, (position, begin, end) in enumerate(spans):
        for back in range(place - 1, place - len(spans), -1):  # below 0 is around
            holder, other_begin, other_end = spans[back]
            if begin < other_end and other_begin < end:
                holders[position] = holder
                break
    return holders


def refills(order: Sequence[int], extents: Sequence[Extent]) -> tuple[tuple[int, ...], ...]:
    """For each position: the units to fill once it is released, soonest needed first."""
    after: list[list[int]] = [[] for _ in order]
    held = [(q, p) for p, q in enumerate(previous_holders(order, extents)) if q is not None and order[q] != order[p]]
    for q, position in sorted(held, key=lambda pair: pair[0] > pair[1]):  # of the next step: later
        after[q].append(order[position])
    return tuple(map(tuple, after))


def first_fills(order: Sequence[int], extents: Sequence[Extent], after: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The units to fill before the first step: each that a position needs before a release of the step fills it."""
    fills: list[int] = []
    filled: set[int] = set()
    for unit, released in zip(order, after, strict=True):
        if unit not in filled and extents[unit].nbytes:
            fills.append(unit)
        filled.update(released, (unit,))
    return tuple(fills)
