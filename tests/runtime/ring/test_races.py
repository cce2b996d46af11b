"""Races of the engine: none on a real compute queue under delays and poison, and every removed fence is detected."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import weightstream.runtime.ring.engine as engine_module
from rig import Rig, edited, equal_plan, mutated, small_plan
from weightstream.errors import InvariantError
from weightstream.plan.check import prove
from weightstream.plan.plan import Plan
from weightstream.runtime.ring.engine import Engine
from wrapped import Delay, Poison, QueueBackend

PLANS = {
    "one slot": equal_plan(3, 1),
    "5 units in 2 slots": equal_plan(5, 2),
    "4 units in 3 slots": equal_plan(4, 3),
    "unequal extents": small_plan([512, 3000, 1024, 600, 2048, 4096], 6144),
    "a unit twice": equal_plan(4, 2, order=(0, 1, 2, 1, 3)),
    "a unit that no position names": equal_plan(4, 2, order=(0, 2, 3)),
}
SEEDS = range(3)
MOST_S = 0.001


def slow_queues(seed: int, most_s: float = MOST_S) -> Any:
    return Poison(Delay(QueueBackend(), seed, most_s))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PLANS)
def test_no_kernel_of_the_real_engine_sees_other_bytes(name: str) -> None:
    with Rig(PLANS[name], slow_queues(seed=7)) as rig:
        rig.engine.prime()
        for _ in range(50):
            rig.step()
        rig.clock.synchronize()
        assert rig.num_kernels == 50 * len(rig.plan.manifest.order)
        assert rig.mismatches == []
        assert rig.clock.races == []
        assert rig.engine.counters.unplanned_fills == 0


def test_no_kernel_sees_other_bytes_when_units_run_in_any_order() -> None:
    with Rig(PLANS["unequal extents"], slow_queues(seed=3)) as rig:
        rig.engine.prime()
        for order in [(5, 0, 3), (0, 0, 1, 2), (4, 3, 2, 1, 0), (2,), (), (0, 1, 2, 3, 4, 5), (1, 5, 1, 5, 1)] * 4:
            rig.step(order)
        rig.clock.synchronize()
        assert rig.mismatches == []
        assert rig.clock.races == []


# Each takes one fence out of the engine's source, or moves it to where it no longer orders anything.
MUTATIONS = {
    "compute does not wait for the fill": [("self._backend.wait(Side.COMPUTE, fence.filled)", "pass")],
    "the copy does not wait for the last read": [("self._backend.wait(Side.COPY, held.last_read)", "pass")],
    "filled is not recorded": [("self._backend.record(Side.COPY, fence.filled)", "pass")],
    "filled is recorded before the copy": [
        ("self._backend.record(Side.COPY, fence.filled)", "pass"),
        (
            "self._backend.copy(copies)",
            "self._backend.record(Side.COPY, fence.filled); self._backend.copy(copies)",
        ),
    ],
    "drained is not recorded": [("self._backend.record(Side.COMPUTE, fence.drained)", "pass")],
    "drained is recorded before the kernel": [
        ("self._backend.record(Side.COMPUTE, fence.drained)", "pass"),
        ("fence.uses += 1", "fence.uses += 1; self._backend.record(Side.COMPUTE, fence.drained)"),
    ],
    "drained is recorded after the fill that follows": [
        ("self._backend.record(Side.COMPUTE, fence.drained)", "pass"),
        (
            "if due := self._cursor.release(unit):\n            self._fill_due(due)\n",
            "self._fill_due(self._cursor.release(unit)); self._backend.record(Side.COMPUTE, fence.drained)\n",
        ),
    ],
    "a recorded release is not remembered": [("fence.last_read = fence.drained", "pass")],
    "an overwritten neighbour keeps its state": [("held.move(State.EMPTY)", "pass")],
    "a fill waits for its own last read only": [
        ("for other in (unit, *sorted(self.live & self.sharing[unit])):\n", "for other in (unit,):\n"),
    ],
}


def test_every_mutation_matches_the_source() -> None:
    for edits in MUTATIONS.values():
        edited(engine_module, edits)


def mutated_engine(monkeypatch: pytest.MonkeyPatch, edits: list[tuple[str, str]]) -> type[Engine]:
    return mutated(monkeypatch, engine_module, edits).Engine


def test_the_unedited_source_passes_where_mutations_must_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_class = mutated_engine(monkeypatch, [])
    assert engine_class is not Engine
    for seed in SEEDS:
        assert run_and_count(engine_class, seed) == SimpleNamespace(races=0, mismatches=0)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_removed_fence_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_class = mutated_engine(monkeypatch, MUTATIONS[name])
    found = [run_and_count(engine_class, seed) for seed in SEEDS]
    assert all(f.races for f in found), "the clock checker needs no luck"
    assert sum(f.mismatches > 0 for f in found) > len(SEEDS) // 2, found


def run_and_count(engine_class: type[Engine], seed: int) -> SimpleNamespace:
    """Races and wrong bytes in some steps of five units in two slots."""
    with Rig(PLANS["5 units in 2 slots"], slow_queues(seed, 0.003), engine_class) as rig:
        rig.engine.prime()
        for _ in range(8):
            rig.step()
        rig.clock.synchronize()
        assert rig.num_kernels == 8 * 5
        return SimpleNamespace(races=len(rig.clock.races), mismatches=len(rig.mismatches))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_queued_after_its_release_is_detected(seed: int) -> None:
    with Rig(PLANS["5 units in 2 slots"], slow_queues(seed, 0.003)) as rig:
        rig.engine.prime()
        for _ in range(8):
            rig.engine.begin_step()
            for unit in range(5):
                rig.engine.wait(unit)
                rig.engine.release(unit)
                rig.kernel(unit)
        rig.clock.synchronize()
        assert rig.clock.races
        assert rig.mismatches


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_queued_before_its_wait_is_detected(seed: int) -> None:
    with Rig(PLANS["5 units in 2 slots"], slow_queues(seed, 0.003)) as rig:
        rig.engine.prime()
        for _ in range(8):
            rig.engine.begin_step()
            for unit in range(5):
                rig.kernel(unit)
                rig.engine.wait(unit)
                rig.engine.release(unit)
        rig.clock.synchronize()
        assert rig.clock.races
        assert rig.mismatches


def test_a_dropped_release_is_refused_and_does_not_hang() -> None:
    with Rig(PLANS["5 units in 2 slots"], slow_queues(0)) as rig:
        rig.engine.prime()
        rig.engine.begin_step()
        rig.use(0)
        rig.use(1)
        rig.engine.wait(2)
        rig.kernel(2)  # and no release: unit 4 needs these bytes
        rig.use(3)
        assert rig.engine.is_blocked(4)
        with pytest.raises(InvariantError, match="in use"):
            rig.engine.wait(4)
        rig.clock.synchronize()
        assert rig.mismatches == []
        assert rig.clock.races == []


def naive(plan: Plan, num_slots: int) -> Plan:
    """The plan with the rule that is wrong unless the slots divide the units."""
    num = len(plan.manifest.order)
    after = tuple(((position + num_slots) % num,) for position in range(num))
    return replace(plan, after=after)


def test_the_naive_ring_rule_is_refused_by_the_proof() -> None:
    with pytest.raises(InvariantError, match="read before it is filled"):
        prove(naive(equal_plan(5, 2), 2))


def test_the_naive_ring_rule_costs_fills_and_no_wrong_bytes() -> None:
    with Rig(naive(equal_plan(5, 2), 2), slow_queues(0)) as rig:
        rig.engine.prime()
        for _ in range(8):
            rig.step()
        rig.clock.synchronize()
        assert rig.mismatches == []
        assert rig.clock.races == []
        assert rig.engine.counters.unplanned_fills > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_naive_ring_rule_is_detected_in_an_engine_that_trusts_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without states, like the engine that shipped this bug: it fills and waits as the plan says."""
    trusting = mutated_engine(
        monkeypatch,
        [
            ("held.move(State.EMPTY)", "pass"),
            ("if self.fences[unit].state is State.EMPTY and not self.is_blocked(unit):", "if True:"),
            ("if state not in self.state.next", "if False"),
        ],
    )
    results = {}
    for rule, plan in {"right": equal_plan(5, 2), "naive": naive(equal_plan(5, 2), 2)}.items():
        with Rig(plan, slow_queues(seed), trusting) as rig:
            rig.engine.prime()
            for _ in range(8):
                rig.step()
            rig.clock.synchronize()
            results[rule] = bool(rig.clock.races), bool(rig.mismatches)
    assert results == {"right": (False, False), "naive": (True, True)}
