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
    for unit in [*order, *range(len(unit_nbytes))]:
        if unit in extents:
            continue
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


def previous_holder(position: int, order: Sequence[int], extents: Sequence[Extent]) -> int | None:
    """The last position before this one, cyclically, whose unit shares bytes with this one's; None if only itself."""
    mine = extents[order[position]]
    for back in range(1, len(order)):
        q = (position - back) % len(order)
        if extents[order[q]].overlaps(mine):
            return q
    return None


def refills(order: Sequence[int], extents: Sequence[Extent]) -> tuple[tuple[int, ...], ...]:
    """For each position: the units to fill once it is released, soonest needed first."""
    after: list[list[tuple[int, int]]] = [[] for _ in order]
    for position, unit in enumerate(order):
        if not extents[unit].nbytes:
            continue
        q = previous_holder(position, order, extents)
        if q is not None and order[q] != unit:
            after[q].append(((position - q) % len(order), unit))
    return tuple(tuple(unit for _, unit in sorted(fills)) for fills in after)


def first_fills(order: Sequence[int], extents: Sequence[Extent]) -> tuple[int, ...]:
    """The units to fill before the first step: each whose bytes no earlier position of the step uses."""
    fills: list[int] = []
    for position, unit in enumerate(order):
        if not extents[unit].nbytes or unit in fills:
            continue
        if not any(extents[order[q]].overlaps(extents[unit]) for q in range(position)):
            fills.append(unit)
    return tuple(fills)
