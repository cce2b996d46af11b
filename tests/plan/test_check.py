"""The proof of a plan: each rule is broken by hand in correct plans, and the violation is reported in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import GRAIN, equal_plan, faults, orders, plan_of, unit_of

from repeats import examples
from weightstream.errors import InvariantError
from weightstream.plan.check import prove, violations
from weightstream.plan.manifest import Manifest, UnitSpec
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import TRAIN, RingExtent, Schedule
from weightstream.plan.search import map_to_host

Fills = tuple[tuple[int, ...], ...]


def right_plans() -> list[Plan]:
    """Plans with rings that wrap, uneven units, repeated positions and units without a position."""
    plans = [equal_plan(n, k) for n in range(2, 7) for k in range(1, n)]
    for sizes in itertools.product((1, 2, 3), repeat=4):
        plans += [plan_of([s * GRAIN for s in sizes], range(4), c * GRAIN) for c in range(max(sizes), sum(sizes))]
    plans += [plan_of([GRAIN] * 3, order, k * GRAIN) for order in orders(5, 3) for k in (1, 2)]
    return plans


RIGHT = right_plans()
TWO_SLOTS = equal_plan(4, 2)
to_break = pytest.mark.parametrize(
    "plans", [RIGHT[::4], pytest.param(RIGHT, marks=pytest.mark.stress)], ids=["each fourth", "all"]
)


def moved(plan: Plan, unit: int, extent: RingExtent) -> Plan:
    return replace(plan, extents=(*plan.extents[:unit], extent, *plan.extents[unit + 1 :]))


def without(fills: Fills, position: int, unit: int) -> Fills:
    kept = tuple(u for u in fills[position] if u != unit)
    return (*fills[:position], kept, *fills[position + 1 :])


def also(fills: Fills, position: int, unit: int) -> Fills:
    return (*fills[:position], (*fills[position], unit), *fills[position + 1 :])


def scheduled(plan: Plan) -> Iterator[tuple[int, int]]:
    """(position, unit) of every fill of the steady state."""
    return ((position, unit) for position, fills in enumerate(plan.after) for unit in fills)


def assert_judged_by_the_bytes(plan: Plan) -> set[str]:
    """Check that the schedule is reported exactly if the simulated ring has a wrong byte or an unnecessary fill."""
    found = list(violations(plan))
    harm = faults(plan)
    assert any("is read before it is filled" in text for text in found) == ("stale" in harm)
    assert any("is filled though it is in the ring" in text for text in found) == ("again" in harm)
    assert any("which is not read yet" in text for text in found) == ("unread" in harm)
    return harm


def reported(plan: Plan, words: str) -> None:
    found = list(violations(plan))
    assert any(words in text for text in found), f"{words!r} is not in {found} for {plan.after} {plan.extents}"
    with pytest.raises(InvariantError, match="the plan is wrong: ") as error:
        prove(plan)
    assert all(text in str(error.value) for text in found)


def test_the_unbroken_plans_are_correct() -> None:
    assert len(RIGHT) > 400
    assert sum(1 for plan in RIGHT if any(plan.after)) > 300
    for plan in RIGHT:
        assert list(violations(plan)) == []
        prove(plan)


@to_break
def test_a_dropped_fill(plans: list[Plan]) -> None:
    for plan in plans:
        for position, unit in scheduled(plan):
            reported(replace(plan, after=without(plan.after, position, unit)), f"unit {unit} is read before it is fill")


@to_break
def test_a_dropped_first_fill(plans: list[Plan]) -> None:
    for plan in plans:
        for unit in plan.first:
            first = tuple(u for u in plan.first if u != unit)
            reported(replace(plan, first=first), f"unit {unit} is read before it is filled")


@to_break
def test_a_fill_one_release_earlier_overwrites_unread_bytes(plans: list[Plan]) -> None:
    for plan in plans:
        for position, unit in scheduled(plan):
            after = also(without(plan.after, position, unit), (position - 1) % len(plan.after), unit)
            reported(replace(plan, after=after), "is read before it is filled")


@to_break
def test_a_fill_after_its_position_is_too_late(plans: list[Plan]) -> None:
    for plan in plans:
        order = plan.manifest.order
        for position, unit in scheduled(plan):
            needed = next(q % len(order) for q in range(position + 1, 3 * len(order)) if order[q % len(order)] == unit)
            if needed != position:
                after = also(without(plan.after, position, unit), needed, unit)
                reported(replace(plan, after=after), "is read before it is filled")


@to_break
def test_two_fills_swapped(plans: list[Plan]) -> None:
    for plan in plans:
        for (p, u), (q, w) in itertools.combinations(scheduled(plan), 2):
            if p != q and plan.extents[u].overlaps(plan.extents[w]) and u != w:
                after = also(also(without(without(plan.after, p, u), q, w), p, w), q, u)
                reported(replace(plan, after=after), "is read before it is filled")


@to_break
def test_a_fill_of_a_complete_unit(plans: list[Plan]) -> None:
    for plan in plans:
        for position, unit in enumerate(plan.manifest.order):
            if unit in plan.first and not any(unit in fills for fills in plan.after):
                reported(replace(plan, after=also(plan.after, position, unit)), "is filled though it is in the ring")
            for refill in plan.after[position]:
                again = also(plan.after, position, refill)
                reported(replace(plan, after=again), f"unit {refill} is filled though it is in the ring")


@to_break
def test_two_first_fills_over_the_same_bytes(plans: list[Plan]) -> None:
    for plan in plans:
        for unit in set(range(len(plan.manifest.units))) - set(plan.first):
            if any(plan.extents[unit].overlaps(plan.extents[other]) for other in plan.first):
                reported(replace(plan, first=(*plan.first, unit)), f"unit {unit} overwrites unit ")
                reported(replace(plan, first=(unit, *plan.first)), f"overwrites unit {unit}, which is not read yet")


def test_a_fill_of_a_unit_that_does_not_stream() -> None:
    plan = plan_of([GRAIN, 0, GRAIN], range(3), GRAIN)
    reported(replace(plan, first=(*plan.first, 1)), "unit 1 is filled but does not stream")
    reported(replace(plan, after=also(plan.after, 0, 1)), "unit 1 is filled but does not stream")


def test_a_fill_that_is_overwritten_before_it_is_read() -> None:
    """It corrupts nothing, but moves bytes that no step uses."""
    plan = equal_plan(3, 1)
    wasteful = replace(plan, after=((2, 1), *plan.after[1:]))
    assert faults(wasteful) == {"unread"}
    assert wasteful.step_nbytes > plan.step_nbytes
    reported(wasteful, "unit 1 overwrites unit 2, which is not read yet")


def test_a_fill_that_no_position_reads() -> None:
    plan = plan_of([GRAIN] * 3, (0, 1), 3 * GRAIN)
    assert list(violations(replace(plan, first=(0, 1, 2)))), "unit 2 is copied, but has no position"


@examples(400)
@given(data=st.data())
def test_any_schedule_is_judged_like_its_bytes(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 4))
    order = tuple(data.draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=5)))
    sizes = data.draw(st.lists(st.integers(1, 2), min_size=num, max_size=num))
    plan = plan_of([s * GRAIN for s in sizes], order, sum(sizes) * GRAIN)
    offsets = [data.draw(st.integers(0, sum(sizes) - s)) for s in sizes]
    units = st.lists(st.integers(0, num - 1), max_size=2).map(tuple)
    extents = tuple(RingExtent(offset=o * GRAIN, nbytes=s * GRAIN) for o, s in zip(offsets, sizes, strict=True))
    right = Plan.build(plan.manifest, frozenset(), plan.ring_nbytes)
    after = data.draw(st.one_of(st.just(right.after), st.tuples(*[units] * len(order))))
    assert_judged_by_the_bytes(replace(plan, extents=extents, after=after))


@to_break
def test_a_shifted_extent_is_judged_like_its_bytes(plans: list[Plan]) -> None:
    num_harmful = 0
    for plan in plans:
        for unit, extent in enumerate(plan.extents):
            for offset in range(0, plan.ring_nbytes - extent.nbytes + 1, GRAIN):
                shifted = moved(plan, unit, replace(extent, offset=offset))
                num_harmful += "stale" in assert_judged_by_the_bytes(shifted)
    assert num_harmful > 100


@to_break
def test_an_extent_outside_of_the_ring(plans: list[Plan]) -> None:
    for plan in plans:
        for unit, extent in enumerate(plan.extents):
            reported(moved(plan, unit, replace(extent, offset=-GRAIN)), f"unit {unit} lies at ")
            behind = replace(extent, offset=plan.ring_nbytes - extent.nbytes + GRAIN)
            reported(moved(plan, unit, behind), f"in a ring of {plan.ring_nbytes}")
        reported(replace(plan, ring_nbytes=plan.ring_nbytes - 1), f"in a ring of {plan.ring_nbytes - 1}")


@pytest.mark.few(1)
@pytest.mark.parametrize("shift", [1, 16, 256, 511])
def test_a_misaligned_extent(shift: int) -> None:
    for plan in RIGHT:
        for unit, extent in enumerate(plan.extents):
            shifted = moved(plan, unit, replace(extent, offset=extent.offset + shift))
            reported(shifted, f"unit {unit} starts at byte {extent.offset + shift}, which is not aligned")


@to_break
def test_an_extent_smaller_than_its_unit(plans: list[Plan]) -> None:
    for plan in plans:
        for unit, extent in enumerate(plan.extents):
            smaller = moved(plan, unit, replace(extent, nbytes=extent.nbytes - 1))
            reported(smaller, f"unit {unit} needs {extent.nbytes} bytes, its extent has {extent.nbytes - 1}")
            reported(moved(plan, unit, replace(extent, nbytes=0)), "its extent has 0")


@to_break
def test_over_budget_by_one_byte(plans: list[Plan]) -> None:
    for plan in plans:
        exact = replace(plan, budget=plan.device_nbytes)
        assert list(violations(exact)) == []
        reported(replace(exact, budget=plan.device_nbytes - 1), f"device bytes {plan.device_nbytes} > budget")


def test_residents_count_against_the_budget() -> None:
    manifest = Manifest(units=(unit_of(0, 700, 512), unit_of(1, 512)), order=(0, 1))
    plan = replace(Plan.build(manifest, frozenset({"blocks.0.0"}), GRAIN), budget=700 + GRAIN)
    prove(plan)
    reported(replace(plan, budget=700 + GRAIN - 1), f"device bytes {700 + GRAIN} > budget {700 + GRAIN - 1}")


def test_an_unknown_resident() -> None:
    for plan in (TWO_SLOTS, replace(TWO_SLOTS, resident=frozenset({"blocks.0.0"}))):
        reported(replace(plan, resident=plan.resident | {"lm_head", "ghost"}), "no unit has: ['ghost', 'lm_head']")


def test_a_missing_resident() -> None:
    """The extents were computed without it, and the unit is larger now."""
    manifest = Manifest(units=(unit_of(0, 512, 1024), unit_of(1, 512)), order=(0, 1))
    plan = Plan.build(manifest, frozenset({"blocks.0.1"}), GRAIN)
    prove(plan)
    reported(replace(plan, resident=frozenset()), "unit 0 needs 1536 bytes, its extent has 512")


@to_break
def test_an_enclosing_unit_that_streams(plans: list[Plan]) -> None:
    for plan in plans:
        for index, unit in enumerate(plan.manifest.units):
            units = list(plan.manifest.units)
            units[index] = replace(unit, enclosing=True)
            manifest = replace(plan.manifest, units=tuple(units))
            reported(replace(plan, manifest=manifest), f"unit {index} encloses others and streams")


def test_an_enclosing_unit_that_stays_is_correct() -> None:
    units = (replace(unit_of(0, 512), enclosing=True), unit_of(1, 512))
    prove(Plan.build(Manifest(units=units, order=(0, 1)), frozenset({"blocks.0.0"}), GRAIN))


class Laid(Plan):
    """A plan whose unit 0 is laid out by hand, since the layout follows from the manifest and cannot be set."""

    layout: dict[str, int]

    def streamed(self, unit: int) -> dict[str, int]:
        return self.layout if unit == 0 else super().streamed(unit)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ((0, 1024), None),
        ((0, 512), "blocks.0.1 of unit 0 at 512 overlaps"),
        ((512, 0), "blocks.0.1 of unit 0 at 0 overlaps"),
        ((0, 1000), "blocks.0.1 of unit 0 at 1000 overlaps its neighbour or is not aligned"),
        ((0, 1100), "blocks.0.1 of unit 0 at 1100 overlaps its neighbour or is not aligned"),
        ((0, 1536), "unit 0 needs 2048 bytes, its extent has 1536"),
    ],
)
def test_tensors_inside_a_unit(offsets: tuple[int, int], words: str | None) -> None:
    manifest = Manifest(units=(unit_of(0, 1000, 512), unit_of(1, 512)), order=(0, 1))
    right = Plan.build(manifest, frozenset(), 1536)
    assert right.streamed(0) == {"blocks.0.0": 0, "blocks.0.1": 1024}
    plan = Laid(**{field.name: getattr(right, field.name) for field in fields(Plan)})
    object.__setattr__(plan, "layout", dict(zip(("blocks.0.0", "blocks.0.1"), offsets, strict=True)))
    assert (list(violations(plan)) == []) == (words is None)
    if words is not None:
        reported(plan, words)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda p: replace(p, extents=p.extents[:-1]), "3 extents for 4 units"),
        (lambda p: replace(p, extents=(*p.extents, p.extents[0])), "5 extents for 4 units"),
        (lambda p: replace(p, extents=()), "0 extents for 4 units"),
        (lambda p: replace(p, after=p.after[:-1]), "fills after 3 positions of 4"),
        (lambda p: replace(p, after=(*p.after, ())), "fills after 5 positions of 4"),
        (lambda p: replace(p, first=(0, 4)), "a fill names unit 4 of 4"),
        (lambda p: replace(p, first=(-1,)), "a fill names unit -1 of 4"),
        (lambda p: replace(p, after=also(p.after, 3, 4)), "a fill names unit 4 of 4"),
        (lambda p: replace(p, after=also(p.after, 0, -1)), "a fill names unit -1 of 4"),
    ],
)
def test_wrong_lengths_and_indices(broken: Callable[[Plan], Plan], words: str) -> None:
    reported(broken(TWO_SLOTS), words)


def test_every_broken_rule_is_named_in_one_error() -> None:
    plan = replace(TWO_SLOTS, budget=1, resident=frozenset({"ghost"}), first=(0,))
    with pytest.raises(InvariantError) as error:
        prove(plan)
    assert "> budget 1" in str(error.value)
    assert "['ghost']" in str(error.value)
    assert "unit 1 is read before it is filled" in str(error.value)


def test_a_model_without_units_or_positions_is_correct() -> None:
    prove(Plan.build(Manifest(units=()), frozenset(), 0))
    prove(Plan.build(Manifest(units=(UnitSpec(name="", tensors=()),), order=(0,)), frozenset(), 0))
    prove(Plan.build(Manifest(units=(unit_of(0, 512),), order=()), frozenset(), 512))


@pytest.mark.parametrize("wrong", ["unknown", "resident", "mapped"])
def test_only_streamed_weights_are_on_disk(wrong: str) -> None:
    manifest = Manifest(units=tuple(unit_of(i, GRAIN, GRAIN) for i in range(3)), order=(0, 1, 2))
    aside = manifest.without({"blocks.1.0"})
    plan = map_to_host(Plan.build(aside, frozenset({"blocks.0.0"}), 2 * GRAIN), manifest, 0)
    alias = {"unknown": "blocks.9.0", "resident": "blocks.0.0", "mapped": "blocks.1.0"}[wrong]
    assert list(violations(replace(plan, disk=frozenset({"blocks.0.1", "blocks.2.0"})))) == []
    reported(replace(plan, disk=frozenset({"blocks.0.1", alias})), "alias groups on disk that no unit has")
    found = next(v for v in violations(replace(plan, disk=frozenset({alias}))) if "on disk" in v)
    assert alias in found


def trained_plans() -> list[Plan]:
    """Plans with a schedule of training steps, which run the units forward and then backward, or in any order."""
    plans = [
        equal_plan(num, slots).scheduled(TRAIN, (*range(num), *reversed(range(num))))
        for num in range(2, 7)
        for slots in range(1, num)
    ]
    sizes = [2 * GRAIN, GRAIN, 3 * GRAIN, GRAIN]
    plans += [plan_of(sizes, range(4), 4 * GRAIN).scheduled(TRAIN, order) for order in orders(5, 4)]
    return plans


def test_every_schedule_is_proved_and_every_change_between_two_kinds_of_step() -> None:
    for plan in trained_plans():
        assert list(violations(plan)) == [], plan.schedules
        (train,) = plan.schedules
        for position, unit in ((p, u) for p, fills in enumerate(train.after) for u in fills):
            broken = replace(train, after=without(train.after, position, unit))
            reported(replace(plan, schedules=(broken,)), f"unit {unit} is read before it is filled")


def test_a_step_of_another_kind_begins_with_its_first_units() -> None:
    """The training order begins with other units than the forward: without `first`, only a change-over goes wrong."""
    plan = equal_plan(4, 2).scheduled(TRAIN, (2, 3, 0, 1, 1, 0, 3, 2))
    (train,) = plan.schedules
    assert set(train.first) != set(plan.first)
    assert list(violations(plan)) == []
    reported(replace(plan, schedules=(replace(train, first=()),)), "is read before it is filled")


@pytest.mark.parametrize(
    ("schedules", "words"),
    [
        (lambda train: (train, train), "two schedules for one kind of step"),
        (lambda train: (replace(train, what="forward"),), "two schedules for one kind of step"),
        (lambda train: (replace(train, after=train.after[1:]),), "fills after 7 positions of 8"),
        (lambda train: (replace(train, order=(*train.order[:-1], 4)),), "the order of a train step names unit 4 of 4"),
    ],
)
def test_the_shape_of_schedules(schedules: Callable[[Schedule], tuple[Schedule, ...]], words: str) -> None:
    plan = equal_plan(4, 2).scheduled(TRAIN, (0, 1, 2, 3, 3, 2, 1, 0))
    reported(replace(plan, schedules=schedules(plan.schedules[0])), words)


def test_a_training_step_moves_twice_the_bytes_that_the_ring_does_not_hold() -> None:
    for num, slots in itertools.product(range(2, 9), range(1, 8)):
        if slots < num:
            plan = equal_plan(num, slots).scheduled(TRAIN, (*range(num), *reversed(range(num))))
            assert plan.step_nbytes_of(TRAIN) == 2 * (num - slots) * GRAIN
            assert plan.step_nbytes_of("forward") == plan.step_nbytes
            assert Plan.from_json(plan.to_json()) == plan
            assert not plan.acts_as(equal_plan(num, slots))
            assert plan.has_memory_of(equal_plan(num, slots))
            assert plan.reordered(plan.manifest.order) == plan
