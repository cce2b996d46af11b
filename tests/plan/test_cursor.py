"""The cursor: every small order and every walk over it, compared with a simple rule and with the owner of each byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from test_schedule import GRAIN, capacities, orders, plan_of

from weightstream.plan.plan import Plan
from weightstream.plan.schedule import Cursor


def small_plans(num_units: int, palette: Sequence[int], longest: int) -> Iterator[Plan]:
    """Orders in which units repeat, follow themselves, or have no position at all."""
    for num_positions in range(1, longest + 1):
        for order in orders(num_positions, num_units):
            for sizes in itertools.product(palette, repeat=num_units):
                for capacity in capacities(sizes):
                    yield plan_of([s * GRAIN for s in sizes], order, capacity)


SMALL = [(1, (1,), 3), (2, (1, 2, 3), 4), (3, (1, 2), 4), (4, (1, 2), 4), (5, (1,), 5), (6, (1,), 6)]


def cursor_of(plan: Plan) -> Cursor:
    return Cursor(plan.manifest.order, plan.after)


class Ring:
    """The last writer of each grain. A unit that is waited for and missing is filled on demand."""

    def __init__(self, plan: Plan) -> None:
        self.grains = [range(e.offset // GRAIN, -(-(e.offset + e.nbytes) // GRAIN)) for e in plan.extents]
        self.owner: dict[int, int] = {}
        self.num_unplanned = 0

    def holds(self, unit: int) -> bool:
        return all(self.owner.get(grain) == unit for grain in self.grains[unit])

    def fill(self, units: Sequence[int]) -> None:
        for unit in units:
            self.owner.update(dict.fromkeys(self.grains[unit], unit))

    def use(self, cursor: Cursor, unit: int) -> None:
        self.fill([due for due in cursor.reach(unit) if not self.holds(due)])
        self.num_unplanned += not self.holds(unit)
        self.fill([unit])
        self.fill([due for due in cursor.release(unit) if not self.holds(due)])


def fills_after_skipping(plan: Plan, begin: int, end: int) -> list[int]:
    """The fills that are due when the positions [begin, end) are skipped: those that nothing before `end` reads."""
    order = plan.manifest.order
    due = [(position, unit) for position in range(begin, end) for unit in plan.after[position]]
    return [unit for position, unit in due if all(order[p] != unit for p in range(end) if p > position)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("num_units", "palette", "longest"), SMALL)
def test_every_reach_and_release_from_every_position(num_units: int, palette: Sequence[int], longest: int) -> None:
    for plan in small_plans(num_units, palette, longest):
        order, num = plan.manifest.order, len(plan.manifest.order)
        for begin, unit in itertools.product(range(num + 1), range(num_units)):
            ahead = [position for position in range(begin, num) if order[position] == unit]
            cursor = Cursor(order, plan.after, begin)
            assert cursor.is_behind(unit) == (unit in order[:begin] and not ahead)
            assert [*cursor.reach(unit)] == (fills_after_skipping(plan, begin, ahead[0]) if ahead else [])
            assert cursor.position == (ahead[0] if ahead else begin)
            assert [*cursor.reach(unit)] == []  # a unit inside itself
            assert [*cursor.release(unit)] == ([*plan.after[ahead[0]]] if ahead else [])
            assert cursor.position == (ahead[0] + 1 if ahead else begin)
            cursor = Cursor(order, plan.after, begin)
            assert [*cursor.begin()] == fills_after_skipping(plan, begin, num)
            assert cursor.position == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("num_units", "palette", "longest"), SMALL)
def test_a_walk_in_order_equals_the_plan(num_units: int, palette: Sequence[int], longest: int) -> None:
    for plan in small_plans(num_units, palette, longest):
        cursor, ring = cursor_of(plan), Ring(plan)
        ring.fill(plan.first)
        for _ in range(3):
            assert [*cursor_of(plan).step()] == [*zip(plan.manifest.order, plan.after, strict=True)]
            cursor.begin()
            for unit in plan.manifest.order:
                ring.use(cursor, unit)
        assert ring.num_unplanned == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("num_units", "palette", "longest"), SMALL)
def test_the_need_at_every_position(num_units: int, palette: Sequence[int], longest: int) -> None:
    """The needed unit is filled if a step comes in order, it finds memory at once, and the rest of the step runs
    with it."""
    for plan in small_plans(num_units, palette, longest):
        order, num = plan.manifest.order, len(plan.manifest.order)
        ring, cursor = Ring(plan), cursor_of(plan)
        ring.fill(plan.first)
        cursor.begin()
        assert [u for u in cursor.needed() if plan.streams(u)] == [*plan.first]
        for position in range(num + 1):
            needed = Cursor(order, plan.after, position).needed()
            assert all(ring.holds(unit) for unit in needed)
            alone, rest = Ring(plan), Cursor(order, plan.after, position)
            alone.fill(needed)
            assert all(alone.holds(unit) for unit in needed)
            for unit in (*order[position:], *order):
                if rest.position == num:
                    rest.begin()
                alone.use(rest, unit)
            assert alone.num_unplanned == 0
            for missing in needed:
                without, walk = Ring(plan), Cursor(order, plan.after, position)
                without.fill([unit for unit in needed if unit != missing])
                for unit in (*order[position:], *order[:position]):
                    if walk.position == num:
                        walk.begin()
                    without.use(walk, unit)
                assert without.num_unplanned == (plan.streams(missing))
            if position < num:
                ring.use(cursor, order[position])


@pytest.mark.parametrize(("num_units", "num_slots"), [(3, 1), (4, 2), (5, 2), (5, 3)])
def test_one_step_in_any_order_and_the_next_but_one_runs_as_planned(num_units: int, num_slots: int) -> None:
    plan = plan_of([GRAIN] * num_units, range(num_units), num_slots * GRAIN)
    for length in range(num_units + 1):
        for walk in itertools.product(range(num_units), repeat=length):
            ring, cursor = Ring(plan), cursor_of(plan)
            ring.fill(plan.first)
            before = 0
            for units in (walk, plan.manifest.order, plan.manifest.order):
                before = ring.num_unplanned
                ring.fill([due for due in cursor.begin() if not ring.holds(due)])
                for unit in units:
                    ring.use(cursor, unit)
            assert ring.num_unplanned == before
