"""The engine: every transition, its refusals, its copies, and a state machine that tries all of them at random."""

from __future__ import annotations

from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from repeats import examples
from rig import Rig, equal_plan, small_plan, spied
from weightstream.errors import InvariantError, StoreError
from weightstream.plan.check import prove
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import ALIGN_NBYTES
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.ring.engine import Fence, State
from wrapped import Fault, Poison

LEGAL = {
    (State.EMPTY, State.FILLING),
    (State.FILLING, State.READY),
    (State.FILLING, State.EMPTY),
    (State.READY, State.IN_USE),
    (State.READY, State.EMPTY),
    (State.IN_USE, State.DRAINING),
    (State.DRAINING, State.READY),
    (State.DRAINING, State.EMPTY),
}


@pytest.mark.parametrize(("before", "after"), list(product(State, State)))
def test_a_fence_makes_only_legal_moves(before: State, after: State) -> None:
    fence = Fence(filled=None, drained=None)
    fence.state = before
    if (before, after) in LEGAL:
        fence.move(after)
        assert fence.state is after
    else:
        with pytest.raises(InvariantError, match=f"from {before.value} to {after.value}"):
            fence.move(after)
        assert fence.state is before


@pytest.fixture
def rig() -> Any:
    """Five equal units in two slots: 0, 2, 4 share one, 1, 3 the other."""
    with Rig(equal_plan(5, 2), Poison(CpuBackend())) as made:
        made.engine.prime()
        yield made
        assert made.mismatches == []
        assert made.clock.races == []


def states(rig: Rig) -> list[State]:
    return [fence.state for fence in rig.engine.fences]


def counts(rig: Rig) -> tuple[int, int]:
    return rig.engine.counters.fills, rig.engine.counters.unplanned_fills


def test_prime_starts_the_first_fills(rig: Rig) -> None:
    assert states(rig) == [State.FILLING, State.FILLING, State.EMPTY, State.EMPTY, State.EMPTY]
    assert rig.engine.held() == [0, 1]
    assert counts(rig) == (2, 0)


def test_the_life_of_a_unit(rig: Rig) -> None:
    rig.engine.begin_step()
    rig.engine.wait(0)
    assert rig.engine.fences[0].state is State.IN_USE
    rig.kernel(0)
    rig.engine.release(0)
    assert states(rig) == [State.EMPTY, State.FILLING, State.FILLING, State.EMPTY, State.EMPTY]
    rig.use(1)
    assert states(rig) == [State.EMPTY, State.EMPTY, State.FILLING, State.FILLING, State.EMPTY]


def test_a_unit_stays_whole_after_its_release_until_it_is_overwritten() -> None:
    with Rig(equal_plan(2, 2), CpuBackend()) as rig:
        rig.engine.prime()
        rig.step()
        assert states(rig) == [State.DRAINING, State.DRAINING]
        rig.step()
        assert counts(rig) == (2, 0)


def test_the_calls_of_a_step_in_their_order() -> None:
    calls: list[str] = []
    with Rig(equal_plan(2, 1), spied(CpuBackend(), calls)) as rig:
        rig.engine.prime()
        assert calls == ["copy", "record copy"]
        calls.clear()
        rig.step()
        unit = ["wait compute", "record compute", "wait copy", "copy", "record copy"]
        assert calls == unit * 2


def test_a_wait_inside_a_wait_holds_the_unit_until_the_last_release(rig: Rig) -> None:
    rig.engine.begin_step()
    rig.engine.wait(0)
    rig.engine.wait(0)
    rig.engine.release(0)
    assert rig.engine.fences[0].state is State.IN_USE
    assert rig.engine.is_blocked(2)
    rig.kernel(0)
    rig.engine.release(0)
    assert rig.engine.fences[0].state is State.EMPTY  # the schedule fills another unit over it
    assert rig.engine.fences[2].state is State.FILLING


@pytest.mark.parametrize("unit", [0, 1, 4])
def test_a_release_without_a_wait_is_refused(rig: Rig, unit: int) -> None:
    rig.engine.begin_step()
    with pytest.raises(InvariantError):
        rig.engine.release(unit)


def test_a_second_release_is_refused_and_changes_nothing() -> None:
    with Rig(equal_plan(2, 2), CpuBackend()) as rig:
        rig.engine.prime()
        rig.engine.begin_step()
        rig.use(0)
        with pytest.raises(InvariantError):
            rig.engine.release(0)
        rig.engine.wait(0)
        rig.engine.release(0)
        assert rig.engine.fences[0].state is State.DRAINING


def test_a_blocked_unit_is_refused_and_works_after_the_release(rig: Rig) -> None:
    rig.engine.begin_step()
    rig.engine.wait(0)
    assert [rig.engine.is_blocked(u) for u in range(5)] == [False, False, True, False, True]
    with pytest.raises(InvariantError, match="in use"):
        rig.engine.wait(2)
    rig.kernel(0)
    rig.engine.release(0)
    assert not rig.engine.is_blocked(2)
    rig.use(2)


def test_a_skipped_unit_costs_at_most_its_own_fill(rig: Rig) -> None:
    for _ in range(4):
        rig.step((0, 1, 3, 4))
    assert rig.engine.counters.unplanned_fills == 0
    assert rig.engine.counters.fills <= 2 + 4 * 5


def test_skipped_units_are_not_filled(rig: Rig) -> None:
    rig.engine.begin_step()
    rig.use(0)  # starts the fill of 2
    rig.engine.wait(4)  # passes 1, 2 and 3: of their fills only 4 is needed, and 1 is still filled
    assert counts(rig) == (4, 0)
    assert rig.engine.held() == [1, 4]
    rig.kernel(4)
    rig.engine.release(4)


def test_units_skipped_at_the_end_run_in_the_next_step(rig: Rig) -> None:
    rig.step((0, 1))
    rig.step()
    assert rig.engine.counters.unplanned_fills == 0


def test_a_repeated_unit_is_still_filled_or_filled_again(rig: Rig) -> None:
    rig.step((0, 0, 1, 1, 2, 0, 3, 4))
    assert rig.engine.counters.unplanned_fills > 0
    rig.step()


def test_units_in_reverse_order(rig: Rig) -> None:
    for _ in range(3):
        rig.step((4, 3, 2, 1, 0))
    assert rig.engine.counters.unplanned_fills > 0


def test_a_unit_without_a_position_is_filled_on_demand() -> None:
    with Rig(equal_plan(4, 2, order=(0, 2, 3)), CpuBackend()) as rig:
        rig.engine.prime()
        rig.step()
        rig.step((0, 1, 2, 3))
        rig.step((1,))
        rig.step()
        assert rig.mismatches == []
        assert rig.clock.races == []
        assert rig.engine.counters.unplanned_fills >= 2


def test_is_behind_recognises_a_passed_unit(rig: Rig) -> None:
    rig.engine.begin_step()
    assert not any(rig.engine.is_behind(u) for u in range(5))
    rig.use(0)
    rig.use(1)
    assert [rig.engine.is_behind(u) for u in range(5)] == [True, True, False, False, False]


@pytest.mark.parametrize("done", range(6))
def test_an_interrupted_step_leaves_the_next_one_right(rig: Rig, done: int) -> None:
    rig.step(range(done))
    rig.step()
    before = rig.engine.counters.filled_nbytes
    rig.step()
    assert rig.engine.counters.filled_nbytes - before == rig.plan.step_nbytes
    assert rig.engine.counters.unplanned_fills == 0


def test_a_step_that_begins_with_a_unit_in_use_waits_for_its_release(rig: Rig) -> None:
    rig.engine.begin_step()
    rig.engine.wait(0)
    rig.kernel(0)
    rig.engine.begin_step()
    assert rig.engine.fences[0].state is State.IN_USE
    rig.engine.release(0)
    rig.step()


def test_forgotten_units_show_their_new_home(rig: Rig) -> None:
    rig.step()
    for unit in range(5):
        rig.homes[unit].copy_(255 - rig.homes[unit])
    rig.engine.forget(range(5))
    assert rig.engine.held() == []
    rig.step()
    rig.step()


def test_forgetting_spares_a_unit_in_use(rig: Rig) -> None:
    rig.engine.begin_step()
    rig.engine.wait(0)
    rig.engine.forget([0, 1])
    assert states(rig)[:2] == [State.IN_USE, State.EMPTY]
    rig.kernel(0)
    rig.engine.release(0)


def test_a_failed_copy_is_raised_by_the_wait_and_repeated() -> None:
    failing = {"now": False}
    plan = equal_plan(5, 2)
    with Rig(plan, Poison(Fault(CpuBackend(), lambda copy: failing["now"] and int(copy.src[0]) != 0xFF))) as rig:
        rig.engine.prime()
        rig.engine.begin_step()
        failing["now"] = True
        rig.use(0)  # queues the fill of unit 2, which fails
        failing["now"] = False
        rig.use(1)
        with pytest.raises(StoreError, match="Fault"):
            rig.engine.wait(2)
        assert rig.engine.fences[2].state is State.EMPTY
        fills, unplanned = counts(rig)
        rig.use(2)
        assert counts(rig) == (fills + 2, unplanned + 1)  # the second attempt, and the fill after the release
        rig.use(3)
        rig.use(4)
        rig.step()
        assert rig.mismatches == []
        assert rig.clock.races == []


def test_a_failed_copy_that_is_never_read_is_no_error() -> None:
    failing = {"now": True}
    with Rig(equal_plan(3, 1), Fault(CpuBackend(), lambda copy: failing["now"])) as rig:
        rig.engine.prime()  # unit 0, which fails
        failing["now"] = False
        rig.engine.begin_step()
        rig.use(1)
        rig.use(2)
        rig.step()
        assert rig.mismatches == []


# -- random plans ------------------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Up to six units of one to four aligned blocks, or a few bytes less, in any order, and any ring that holds
    them."""
    sizes = draw(st.lists(st.integers(1, 4 * ALIGN_NBYTES), min_size=1, max_size=6))
    blocks = [-(-nbytes // ALIGN_NBYTES) for nbytes in sizes]
    ring = draw(st.integers(max(blocks), sum(blocks))) * ALIGN_NBYTES
    order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else None
    if order is None:
        order = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=9))
    return small_plan(sizes, ring, order)


@examples(150, print_blob=True)
@given(plans())
def test_the_steady_state_moves_the_bytes_of_the_plan(plan: Plan) -> None:
    prove(plan)
    with Rig(plan, CpuBackend()) as rig:
        rig.engine.prime()
        assert rig.engine.counters.fills == len(plan.first)
        rig.step()
        for _ in range(2):
            before = rig.engine.counters.filled_nbytes
            rig.step()
            assert rig.engine.counters.filled_nbytes - before == plan.step_nbytes
        assert rig.engine.counters.unplanned_fills == 0
        assert rig.clock.races == []
        assert rig.mismatches == []


class EngineMachine(RuleBasedStateMachine):
    """Waits, releases, steps, updates and failing copies in any order: never wrong bytes, never an illegal move."""

    rig: Rig | None = None

    @initialize(plan=plans())
    def start(self, plan: Plan) -> None:
        self.fail_next = False
        self.failed: set[int] = set()
        self.moved_nbytes = 0
        self.rig = Rig(plan, Poison(Fault(CpuBackend(), self.fails)))
        self.engine = self.rig.engine
        self.open: list[int] = []
        self.engine.prime()

    def fails(self, copy: Any) -> bool:
        assert self.rig is not None
        filled = [u for u, home in enumerate(self.rig.homes) if copy.src.data_ptr() == home.data_ptr()]
        if not filled:
            return False  # the poison
        self.moved_nbytes += copy.src.numel()
        self.failed -= set(filled)
        if self.fail_next:
            self.failed |= set(filled)
        failing, self.fail_next = self.fail_next, False
        return failing

    def pick(self, data: st.DataObject) -> int:
        assert self.rig is not None
        return data.draw(st.integers(0, len(self.rig.homes) - 1))

    def wait(self, unit: int) -> None:
        assert self.rig is not None
        if self.engine.is_blocked(unit):
            with pytest.raises(InvariantError):
                self.engine.wait(unit)
            return
        try:
            self.engine.wait(unit)
        except StoreError:
            assert unit in self.failed
            assert self.engine.fences[unit].state is State.EMPTY
            return
        assert unit not in self.failed
        self.open.append(unit)
        self.rig.kernel(unit)

    @rule(data=st.data())
    def open_unit(self, data: st.DataObject) -> None:
        self.wait(self.pick(data))

    @precondition(lambda self: self.rig and self.open)
    @rule(data=st.data())
    def close_unit(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(self.open))
        assert self.rig is not None
        self.rig.kernel(unit)
        self.open.remove(unit)
        self.engine.release(unit)

    @rule(data=st.data())
    def use_unit(self, data: st.DataObject) -> None:
        unit, count = self.pick(data), len(self.open)
        self.wait(unit)
        if len(self.open) > count:
            self.open.remove(unit)
            self.engine.release(unit)

    @rule()
    def run_step(self) -> None:
        assert self.rig is not None
        self.engine.begin_step()
        for unit in self.rig.plan.manifest.order:
            count = len(self.open)
            self.wait(unit)
            if len(self.open) > count:
                self.open.remove(unit)
                self.engine.release(unit)

    @rule()
    def begin_step(self) -> None:
        self.engine.begin_step()

    @rule(data=st.data())
    def update_home(self, data: st.DataObject) -> None:
        assert self.rig is not None
        unit = self.pick(data)
        if unit not in self.open:
            home = self.rig.homes[unit]
            home.copy_((home + 1) % 255)
            self.engine.forget([unit])

    @rule()
    def fail_the_next_copy(self) -> None:
        self.fail_next = True

    @invariant()
    def is_right(self) -> None:
        if self.rig is None:
            return
        assert self.rig.clock.races == []
        assert self.rig.mismatches == []
        assert self.engine.counters.filled_nbytes == self.moved_nbytes
        held = self.engine.held()
        extents = self.rig.plan.extents
        assert not [(a, b) for a, b in product(held, held) if a < b and extents[a].overlaps(extents[b])]
        in_use = {u for u in held if self.engine.fences[u].state is State.IN_USE}
        assert in_use == set(self.open)
        assert all(self.engine.fences[u].uses == self.open.count(u) for u in range(len(extents)))

    def teardown(self) -> None:
        if self.rig is not None:
            self.rig.close()


EngineMachine.TestCase.settings = examples(60, stateful_step_count=30, print_blob=True)
TestEngineMachine = EngineMachine.TestCase
