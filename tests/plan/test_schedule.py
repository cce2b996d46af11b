"""The ring rule for all small cases, compared with an independent simulation of the owner of every byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repeats import examples
from weightstream.errors import PlanError
from weightstream.plan.check import prove, violations
from weightstream.plan.manifest import Manifest, TensorSpec, UnitSpec
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import RingExtent, allocate, neighbours_nbytes, previous_holders, refills

GRAIN = 512  # the alignment of every extent, written out, so that the tests do not take it from schedule.py


@cache
def unit_of(index: int, *sizes: int) -> UnitSpec:
    name = f"blocks.{index}"
    return UnitSpec(
        name=name,
        layer=index,
        tensors=tuple(
            TensorSpec(name=f"{name}.{j}", shape=(n,), stride=(1,), dtype="bfloat16", alias=f"{name}.{j}", nbytes=n)
            for j, n in enumerate(sizes)
        ),
    )


def plan_of(sizes: Sequence[int], order: Sequence[int], capacity: int, *, by_ends: bool = False) -> Plan:
    """Units of one tensor each, all of which stream through `capacity` bytes."""
    units = tuple(unit_of(index, nbytes) for index, nbytes in enumerate(sizes))
    return Plan.build(Manifest(units=units, order=tuple(order)), frozenset(), capacity, by_ends=by_ends)


def equal_plan(num_units: int, num_slots: int) -> Plan:
    return plan_of([GRAIN] * num_units, range(num_units), num_slots * GRAIN)


def faults(plan: Plan, steps: int = 4) -> set[str]:
    """Errors of a plan on a ring in which every grain of bytes remembers its last writer.

    stale: a position reads bytes of another unit. again: a fill of a unit that is complete. late: the position whose
    release a fill waits for shares no bytes with it. unread: a fill is overwritten before it is read.
    """
    grains = [frozenset(range(e.offset // GRAIN, -(-(e.offset + e.nbytes) // GRAIN))) for e in plan.extents]
    owner: dict[int, int] = {}
    unread: set[int] = set()
    found: set[str] = set()

    def fill(unit: int) -> None:
        if all(owner.get(g) == unit for g in grains[unit]):
            found.add("again")
        if unread & ({owner.get(g) for g in grains[unit]} - {unit}):
            found.add("unread")
        owner.update(dict.fromkeys(grains[unit], unit))
        unread.add(unit)

    for unit in plan.first:
        fill(unit)
    for _ in range(steps):
        for position, unit in enumerate(plan.manifest.order):
            if any(owner.get(g) != unit for g in grains[unit]):
                found.add("stale")
            unread.discard(unit)
            for refill in plan.after[position]:
                if not grains[refill] & grains[unit]:
                    found.add("late")
                fill(refill)
    return found


def lazy_fills(plan: Plan) -> list[int]:
    """The units that a steady step fetches if each is fetched at its position, and only if it is incomplete."""
    grains = [range(e.offset // GRAIN, -(-(e.offset + e.nbytes) // GRAIN)) for e in plan.extents]
    owner: dict[int, int] = {}
    fetched: list[int] = []
    for _ in range(2):
        fetched = []
        for unit in plan.manifest.order:
            if any(owner.get(g) != unit for g in grains[unit]):
                fetched.append(unit)
            owner.update(dict.fromkeys(grains[unit], unit))
    return fetched


def assert_right(plan: Plan, capacity: int) -> None:
    for unit, extent in zip(plan.manifest.units, plan.extents, strict=True):
        assert extent.offset % GRAIN == 0
        assert extent.nbytes >= unit.nbytes
        assert extent.offset >= 0
        assert extent.offset + extent.nbytes <= plan.ring_nbytes <= capacity
    prove(plan)
    assert faults(plan) == set()
    assert sorted(unit for fills in plan.after for unit in fills) == sorted(lazy_fills(plan))


def capacities(sizes: Sequence[int]) -> Iterator[int]:
    """Every ring from the largest unit to one grain more than all units."""
    return (grains * GRAIN for grains in range(max(sizes), sum(sizes) + 2))


def orders(num_positions: int, num_units: int) -> Iterator[tuple[int, ...]]:
    """Every order, up to renaming of units: a new unit is always the next one. The last units may have no position."""

    def grow(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == num_positions:
            yield order
            return
        for unit in range(min(num_units, max(order, default=-1) + 2)):
            yield from grow((*order, unit))

    return grow(())


# The number of units, and the sizes in grains that are tried in all combinations.
DENSE: list[tuple[int, tuple[int, ...]]] = [(num_units, (0, 1, 2, 3)) for num_units in range(1, 6)] + [(6, (1, 2, 3))]
SPARSE: list[tuple[int, tuple[int, ...]]] = [
    (num_units, palette) for num_units in (7, 8) for palette in ((1, 2), (1, 3), (2, 3))
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_units", "palette"), DENSE + [pytest.param(*each, marks=pytest.mark.stress) for each in SPARSE]
)
def test_every_small_plan_in_order(num_units: int, palette: tuple[int, ...]) -> None:
    for sizes in itertools.product(palette, repeat=num_units):
        for capacity in capacities(sizes):
            assert_right(plan_of([s * GRAIN for s in sizes], range(num_units), capacity), capacity)


@pytest.mark.parametrize(
    ("num_units", "palette", "longest"),
    [
        (1, (0, 1), 4),
        (2, (0, 1, 2, 3), 6),
        pytest.param(3, (0, 1, 2), 6, marks=pytest.mark.stress),
        pytest.param(4, (1, 2), 5, marks=pytest.mark.stress),
        pytest.param(4, (1, 2), 6, marks=pytest.mark.stress),
        pytest.param(5, (1, 2), 5, marks=pytest.mark.stress),
    ],
)
def test_every_small_order(num_units: int, palette: tuple[int, ...], longest: int) -> None:
    """Orders in which units repeat, follow themselves, or have no position at all."""
    for num_positions in range(longest + 1):
        for order in orders(num_positions, num_units):
            for sizes in itertools.product(palette, repeat=num_units):
                for capacity in capacities(sizes):
                    assert_right(plan_of([s * GRAIN for s in sizes], order, capacity), capacity)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_units", range(1, 6))
def test_every_small_plan_by_the_ends_of_the_ring(num_units: int) -> None:
    """Neighbours share bytes only if the ring cannot hold both, or around the end of an odd number of units."""
    for sizes in itertools.product((0, 1, 2, 3), repeat=num_units):
        nbytes = [s * GRAIN for s in sizes]
        for capacity in capacities(sizes):
            plan = plan_of(nbytes, range(num_units), capacity, by_ends=True)
            assert_right(plan, capacity)
            extents = [e for e in plan.extents if e.nbytes]
            for one, other in itertools.pairwise(extents):
                assert one.overlaps(other) == (one.nbytes + other.nbytes > capacity)
        apart = [
            c
            for c in range(max(sizes), sum(sizes) + 1)
            if are_apart(plan_of(nbytes, range(num_units), c * GRAIN, by_ends=True))
        ]
        assert neighbours_nbytes(range(num_units), nbytes) == apart[0] * GRAIN
        assert apart == [*range(apart[0], sum(sizes) + 1)]


def are_apart(plan: Plan) -> bool:
    """Whether neighbours share no bytes; the last and the first count where they are at different ends."""
    extents = [e for e in plan.extents if e.nbytes]
    around = extents[:1] if len(extents) % 2 == 0 else []
    return not any(one.overlaps(other) for one, other in itertools.pairwise([*extents, *around]))


def test_units_without_a_position_fit_between_the_ends() -> None:
    """One of them is larger than any two neighbours, and the ring is not a multiple of the alignment."""
    nbytes = [GRAIN, 2 * GRAIN, GRAIN, 9 * GRAIN]
    assert neighbours_nbytes(range(3), nbytes) == 9 * GRAIN
    plan = plan_of(nbytes, range(3), 9 * GRAIN + 7, by_ends=True)
    assert_right(plan, 9 * GRAIN + 7)
    assert plan.ring_nbytes == 9 * GRAIN


@pytest.mark.parametrize("num_units", range(1, 11))
def test_every_ring_of_equal_slots(num_units: int) -> None:
    for num_slots in range(1, num_units + 2):
        plan = equal_plan(num_units, num_slots)
        assert_right(plan, num_slots * GRAIN)
        assert plan.ring_nbytes == min(num_slots, num_units) * GRAIN
        assert [e.offset // GRAIN for e in plan.extents] == [u % num_slots for u in range(num_units)]
        assert plan.first == tuple(range(min(num_slots, num_units)))


@pytest.mark.parametrize(
    ("num_units", "num_slots", "expected"),
    [
        (3, 1, [1, 2, 0]),
        (3, 2, [2, None, 0]),
        (4, 2, [2, 3, 0, 1]),
        (5, 2, [2, 3, 4, 1, 0]),
        (3, 3, [None, None, None]),
        (3, 4, [None, None, None]),
        (3, 9, [None, None, None]),
        (1, 1, [None]),
    ],
)
def test_the_refill_table(num_units: int, num_slots: int, expected: list[int | None]) -> None:
    after = equal_plan(num_units, num_slots).after
    assert after == tuple(() if unit is None else (unit,) for unit in expected)


def naive_plan(num_units: int, num_slots: int) -> Plan:
    """The tempting rule: after unit i, fill (i + slots) % units."""
    after = tuple(((unit + num_slots) % num_units,) for unit in range(num_units))
    return replace(equal_plan(num_units, num_slots), after=after)


@pytest.mark.parametrize("num_units", range(1, 11))
def test_the_naive_rule_is_detected_exactly_when_it_is_wrong(num_units: int) -> None:
    for num_slots in range(1, num_units + 3):
        plan = naive_plan(num_units, num_slots)
        found = list(violations(plan))
        if num_slots >= num_units:
            assert found, f"{num_units} units, {num_slots} slots: copies complete units again"
            assert all("filled though it is in the ring" in text for text in found)
            assert faults(plan) >= {"again"}
        elif num_units % num_slots:
            assert any("read before it is filled" in text for text in found), f"{num_units} units, {num_slots} slots"
            assert "stale" in faults(plan)
        else:
            assert found == []
            assert plan == equal_plan(num_units, num_slots)


@examples(150)
@given(data=st.data())
def test_mixed_sizes_and_any_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 6000), min_size=1, max_size=24))
    order = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=40))
    grains = [-(-n // GRAIN) for n in sizes]
    capacity = data.draw(st.integers(max(grains), sum(grains) + 1)) * GRAIN
    assert_right(plan_of(sizes, order, capacity, by_ends=data.draw(st.booleans())), capacity)


def test_a_ring_used_by_its_ends_keeps_at_most_one_unit_forever() -> None:
    for sizes in itertools.product((1, 2, 3), repeat=7):
        nbytes = [s * GRAIN for s in sizes]
        ring = neighbours_nbytes(range(7), nbytes)
        plan = plan_of(nbytes, range(7), ring, by_ends=True)
        assert sum(nbytes) <= 2 * ring or sum(nbytes) - plan.step_nbytes <= max(nbytes)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_ring_that_wraps_twice_keeps_at_most_one_unit_forever(num_slots: int) -> None:
    """The search for a placement uses this as the least that a step copies."""
    held = set()
    for sizes in itertools.product((1, 2, 3), repeat=7):
        largest, streamed = max(sizes) * GRAIN, sum(sizes) * GRAIN
        for slot_nbytes in (0, largest):
            if streamed > 2 * num_slots * largest:
                manifest = plan_of([s * GRAIN for s in sizes], range(7), sum(sizes) * GRAIN).manifest
                plan = Plan.build(manifest, frozenset(), num_slots * largest, slot_nbytes=slot_nbytes)
                held.add((streamed - plan.step_nbytes) / largest)
    assert max(held) <= 1
    assert num_slots == 1 or max(held) > 0.5


def test_a_unit_larger_than_the_ring_is_refused_with_both_sizes() -> None:
    with pytest.raises(PlanError, match=r"unit 1 needs 1536 bytes of ring, more than the ring's 1024"):
        allocate([0, 1], [512, 1025], 1024)


def test_units_without_a_position_have_an_extent_and_no_fill() -> None:
    plan = plan_of([GRAIN] * 4, (0, 1), 3 * GRAIN)
    assert [e.offset // GRAIN for e in plan.extents] == [0, 1, 2, 0]
    assert plan.first == (0, 1)
    assert plan.after == ((), ())


def test_previous_holder_goes_back_and_around() -> None:
    slots = [RingExtent(offset=0, nbytes=512), RingExtent(offset=512, nbytes=512), RingExtent(offset=0, nbytes=1024)]
    assert previous_holders((0, 1, 2), slots) == [2, 2, 1]
    assert previous_holders((0, 1), slots) == [None, None]
    assert previous_holders((0, 1, 0), slots) == [2, None, 0]


def test_fills_after_one_release_are_in_order_of_need() -> None:
    """Unit 1 covers both others: unit 2 is read next, unit 0 only in the next step."""
    extents = [RingExtent(offset=0, nbytes=512), RingExtent(offset=0, nbytes=1024), RingExtent(offset=512, nbytes=512)]
    assert refills((0, 1, 2), extents) == ((1,), (2, 0), ())


def test_empty_extents_share_nothing() -> None:
    empty = RingExtent(offset=256, nbytes=0)
    assert not empty.overlaps(RingExtent(offset=0, nbytes=512))
    assert not RingExtent(offset=0, nbytes=512).overlaps(empty)
