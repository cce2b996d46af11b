"""Refinement: simulated machines that are not as predicted, and streamers whose plans were made for another machine."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_planner import DECODE, HEAD, PREFILL, SMALL, TABLE, WIDE, decoder, prospect
from torch import nn

import weightstream
from models import TEXT
from weightstream import prospects
from weightstream.plan import cost
from weightstream.plan import refine as refinement
from weightstream.plan.manifest import Manifest, Profile, Workload
from weightstream.plan.placement import search
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Planner, Refusal, Way
from weightstream.plan.prospect import Prospect
from weightstream.plan.refine import Refined, Times, refine, unit_s
from weightstream.runtime import devices
from weightstream.runtime.backend import Copy
from weightstream.runtime.cpu import CPU_PROFILE, CpuBackend
from weightstream.runtime.refinement import Refinement
from weightstream.runtime.timeline import Kind, Measured
from wrapped import Delay, Wrapper

# -- a machine that is simulated ----------------------------------------------------------------------------------


def faster(profile: Profile, compute: float, link: float) -> Profile:
    """A machine that computes and copies so many times faster."""
    seconds = {name: tuple(s / compute for s in getattr(profile, name)) for name in ("unit_s", "host_s")}
    return replace(
        profile,
        link_bytes_per_s=profile.link_bytes_per_s * link,
        overhead_s=profile.overhead_s / compute,
        **seconds,
    )


def on_host(planner: Planner, slow: float) -> Planner:
    """The planner of a machine whose host takes so many times longer."""
    profile = refinement._quicker(planner.machine.profile, slow)
    return replace(planner, machine=replace(planner.machine, profile=profile))


def times_of(plan: Plan, profile: Profile) -> Times:
    """What a timeline measures of a step on that machine: from wait to wait, cyclically.

    A wait begins once the device comes to it and the host has queued it: before that the unit ahead computes.
    """
    order = plan.manifest.order
    resumed, waits = {}, list[tuple[int, float, float]]()
    filled, now, copied, launched, step_s = dict.fromkeys(plan.first, 0.0), 0.0, 0.0, 0.0, 0.0
    for fill in plan.first:
        filled[fill] = copied = max(copied, profile.handover_s) + profile.copy_s(plan.unit_nbytes[fill])
    for _ in range(4):
        begun, queued, waits = now, launched, []
        for position, unit in enumerate(order):
            device_s, host_s = profile.times_s(
                unit, plan.manifest.units[unit], shown=plan.num_shown[unit], streams=plan.streams(unit)
            )
            resumed[unit] = max(now, filled.get(unit, 0.0))
            if plan.streams(unit):
                waits.append((unit, max(now, launched), max(now, launched, filled[unit])))
            launched += host_s
            now = max(resumed[unit] + device_s, launched)
            after_s = device_s * (profile.after_share[unit] if profile.after_share else 0.0)
            for fill in plan.after[position]:
                copied = max(copied, now - after_s + profile.handover_s) + profile.copy_s(plan.unit_nbytes[fill])
                filled[fill] = copied
        step_s = now - begun
    computes: dict[int, list[float]] = {}
    ends = [begin_s for _, begin_s, _ in waits[1:]] + [step_s + begin_s for _, begin_s, _ in waits[:1]]
    for (unit, _, resumed_s), end_s in zip(waits, ends, strict=True):
        computes.setdefault(unit, []).append(end_s - resumed_s)
    copied_units = {unit for fills in plan.after for unit in fills}
    return Times(
        step_s=cost.simulated_s(plan, profile)[1] if plan.disk else step_s,
        host_s=launched - queued,
        computes={unit: sum(seconds) / len(seconds) for unit, seconds in computes.items()},
        copies={unit: (plan.unit_nbytes[unit], profile.copy_s(plan.unit_nbytes[unit])) for unit in copied_units},
    )


def planned(percent: int, grain: str = "block", **given: Any) -> tuple[Planner, Plan]:
    """A planner of the small decoder, and its plan for that share of the weights."""
    budget = decoder("block", **SMALL).nbytes * percent // 100
    planner = prospect(SMALL, grains=(grain,), device_budget=budget, **given).planners[0]  # type: ignore[arg-type]
    return planner, planner(decoder(grain, **SMALL))  # type: ignore[arg-type]


@pytest.mark.few(3)
@pytest.mark.parametrize("grain", ["block", "half", "matrix"])
@pytest.mark.parametrize("percent", [20, 45, 70, 90, 100])
@pytest.mark.parametrize("workload", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_refined_plan_predicts_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, percent: int, grain: str, workload: Workload
) -> None:
    monkeypatch.setattr(refinement, "_better", lambda *_: None)  # takes its time, and is not looked at
    planner, plan = planned(percent, grain, workload=workload)
    for compute, link in itertools.product((0.2, 0.9, 6), (0.3, 1.1, 4)):
        times = times_of(plan, faster(planner.profile(plan.manifest), compute, link))
        refined = refine(planner, plan, times)
        assert refined.plan.step_s == pytest.approx(times.step_s, rel=0.02), (compute, link)
        on_host_s = min(times.host_s, cost.host_s(plan, planner.profile(plan.manifest)))
        on_device_s = sum(times.computes.values()) or times.step_s
        assert refined.plan.compute_s == pytest.approx(max(on_device_s, on_host_s), rel=1e-6)
        assert replace(refined.plan, **predictions(plan)) == plan


def predictions(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in ("step_s", "graph_s", "compute_s", "copy_s", "disk_s", "machine")}


def test_seconds_are_told_apart_by_the_estimates_and_sum_up() -> None:
    """Residents open no wait: what the units of a span took together is split as was predicted."""
    planner, plan = planned(60)
    assert not all(plan.streams(unit) for unit in plan.manifest.order)
    true = faster(planner.profile(plan.manifest), 0.3, 1)
    times = times_of(plan, true)
    estimate = planner.profile(plan.manifest)
    estimates = [max(estimate.times_s(u, unit, shown=plan.num_shown[u])) for u, unit in enumerate(plan.manifest.units)]
    found = unit_s(plan, estimates, times)
    assert found.keys() == {unit.name for unit in plan.manifest.units}
    assert sum(found.values()) == pytest.approx(sum(times.computes.values()))
    first = next(unit for unit in plan.manifest.order if plan.streams(unit))
    last = max(unit for unit in plan.manifest.order if plan.streams(unit))
    wrapped = [*range(last, len(plan.manifest.units)), *range(first)]  # the last wait's span goes on from the start
    names = [plan.manifest.units[unit].name for unit in wrapped]
    assert sum(found[name] for name in names) == pytest.approx(times.computes[last])
    for name, unit in zip(names, wrapped, strict=True):
        assert found[name] / times.computes[last] == pytest.approx(estimates[unit] / sum(estimates[u] for u in wrapped))


def test_where_nothing_streams_the_step_is_split() -> None:
    planner, plan = planned(100)
    assert not plan.step_nbytes
    times = Times(step_s=0.5, host_s=0.5, computes={}, copies={})
    refined = refine(planner, plan, times)
    assert refined.plan.step_s == pytest.approx(0.5)
    assert refined.better is None
    assert sum(unit_s(plan, [0.0] * len(plan.manifest.units), times).values()) == pytest.approx(0.5)


def test_a_unit_at_two_positions_counts_at_both() -> None:
    planner, plan = planned(30)
    order = (0, 1, 2, 3, 2, 4, 5, 6, 7, 8, 9, 10)
    plan = plan.reordered(order)
    times = times_of(plan, faster(planner.profile(plan.manifest), 0.25, 1))
    refined = refine(planner, plan, times)
    assert refined.plan.step_s == pytest.approx(times.step_s, rel=0.02)


def test_what_no_unit_tells_counts_as_a_whole() -> None:
    """Where others use the device in between, a step takes longer than its units do: nothing tells of another plan."""
    planner, plan, times = misjudged()
    assert refine(planner, plan, replace(times, step_s=1.05 * times.step_s)).better is not None
    for factor in (1.2, 3.0):
        refined = refine(planner, plan, replace(times, step_s=factor * times.step_s))
        assert refined.plan.step_s == factor * times.step_s
        assert refined.better is None


def test_a_profile_of_a_slow_host_is_mended_by_a_step() -> None:
    """Also where its steps do take so long, as the plan for it has a shallow ring: the host was not what they took."""
    planner, _ = planned(60)
    slow, true = on_host(planner, 40), on_host(planner, 8)
    plan = slow(decoder("block", **SMALL))
    assert plan.step_s == pytest.approx(cost.host_s(plan, slow.profile(plan.manifest)))
    times = times_of(plan, true.profile(plan.manifest))
    refined = refine(slow, plan, times)
    assert refined.plan.step_s == pytest.approx(times.step_s, rel=0.02)
    profile = true.machine.profile
    for name in ("op_launch_s", "overhead_s", "show_s", "fill_s", "decoding_launch_s"):
        assert getattr(refined.planner.machine.profile, name) == pytest.approx(getattr(profile, name), rel=1e-6)


def test_a_host_that_was_held_up_is_not_taken_to_be_slower() -> None:
    """It waits for the device where a step has more kernels than the queue, or where the model asks for a number."""
    planner, plan = planned(60)
    times = replace(times_of(plan, planner.profile(plan.manifest)), host_s=1e3)
    assert refine(planner, plan, times).planner.machine.profile.op_launch_s == planner.machine.profile.op_launch_s


def test_the_link_is_what_the_copies_took() -> None:
    planner, plan = planned(50)
    copies = {2: (3 << 20, 0.375), 4: (1 << 20, 0.125), 6: (9, 1.0)}
    times = Times(step_s=1.0, host_s=1.0, computes={2: 0.01}, copies=copies)
    latency_s = planner.machine.profile.copy_latency_s
    profile = refine(planner, plan, times).planner.machine.profile
    assert profile.link_bytes_per_s == pytest.approx((1 << 20) / (0.125 - latency_s), rel=1e-4)
    none = refine(planner, plan, replace(times, copies={})).planner.machine.profile
    assert none.link_bytes_per_s == planner.machine.profile.link_bytes_per_s


def test_a_disk_that_limits_is_refined() -> None:
    planner, plan = planned(40, host_budget=20 << 20)
    assert plan.limit == "disk"
    true = replace(planner.profile(plan.manifest), disk_bytes_per_s=planner.machine.profile.disk_bytes_per_s / 3)
    refined = refine(planner, plan, times_of(plan, true))
    assert refined.plan.step_s == pytest.approx(cost.simulated_s(plan, true)[1], rel=0.01)
    assert refined.planner.machine.profile.disk_bytes_per_s == pytest.approx(true.disk_bytes_per_s, rel=0.01)


# -- a better plan ------------------------------------------------------------------------------------------------


def misjudged(slow: int = 40, **given: Any) -> tuple[Planner, Plan, Times]:
    """A plan for a compute-bound step, with a deep ring, of a machine that computes as much faster."""
    planner, plan = planned(70, workload=PREFILL, **given)
    assert plan.limit == "compute"
    return planner, plan, times_of(plan, faster(planner.profile(plan.manifest), slow, 1))


def test_a_plan_for_the_wrong_limit_is_improved() -> None:
    planner, plan, times = misjudged()
    refined = refine(planner, plan, times)
    assert refined.better is not None
    assert refined.better.step_s < 0.97 * refined.plan.step_s
    assert refined.better.device_nbytes <= (plan.budget or 0)
    true = faster(planner.profile(plan.manifest), 40, 1)
    assert cost.simulated_s(refined.better, true)[1] < 0.97 * cost.simulated_s(plan, true)[1]


def test_a_plan_as_predicted_stays() -> None:
    for percent in (20, 50, 80):
        planner, plan = planned(percent)
        assert refine(planner, plan, times_of(plan, planner.profile(plan.manifest))).better is None


def test_a_small_gain_is_not_worth_a_move() -> None:
    planner, plan = planned(50, workload=PREFILL)
    refined = refine(planner, plan, times_of(plan, faster(planner.profile(plan.manifest), 1.1, 1)))
    found = refined.planner(plan.manifest)
    assert 0.97 * refined.plan.step_s < found.step_s < refined.plan.step_s
    assert refined.better is None


def test_a_gain_must_pay_for_the_move_in_500_steps() -> None:
    planner, plan, times = misjudged()
    profile = replace(planner.machine.profile, handover_s=0.0, copy_latency_s=0.0)
    planner = replace(planner, machine=replace(planner.machine, profile=profile))

    def at(scale: float) -> Refined:
        """The same machine, `scale` times slower in everything."""
        scaled = Times(
            step_s=scale * times.step_s,
            host_s=scale * times.host_s,
            computes={unit: scale * s for unit, s in times.computes.items()},
            copies={unit: (nbytes, scale * s) for unit, (nbytes, s) in times.copies.items()},
        )
        return refine(on_host(planner, scale), plan, scaled)

    better = at(1).better
    assert better is not None
    changed = plan.resident ^ better.resident  # nothing else moves
    assert changed
    gain_s, moved_s = at(1).plan.step_s - better.step_s, sum(plan.manifest.aliases[a] for a in changed) / 5e9
    pays = moved_s / (500 * gain_s)
    assert at(1.1 * pays).better is not None
    assert at(0.9 * pays).better is None


def test_what_moves_is_what_has_another_place_or_form() -> None:
    _, plan = planned(60)
    aliases = sorted(plan.resident)[:3]
    assert refinement.moved_nbytes(plan, plan) == 0
    assert refinement.moved_nbytes(plan, replace(plan, ring_nbytes=2 * plan.ring_nbytes)) == 0
    nbytes = sum(plan.manifest.aliases[alias] for alias in aliases)
    for other in (
        replace(plan, resident=plan.resident.difference(aliases)),
        replace(plan, resident=plan.resident.difference(aliases), mapped=plan.mapped.union(aliases)),
        replace(plan, mapped=plan.mapped.union(aliases)),
        replace(plan, disk=frozenset(aliases)),
        replace(plan, manifest=plan.manifest.coded(dict.fromkeys(aliases, (3, 512)))),
    ):
        assert refinement.moved_nbytes(plan, other) == refinement.moved_nbytes(other, plan) == nbytes


def test_steps_with_pauses_between_them_are_no_gain() -> None:
    """Copies for the next step go on in the pauses, so that less is measured than of steps in a row."""
    planner, plan, times = misjudged()
    better = refine(planner, plan, times).better
    assert better is not None
    assert refine(planner, plan, replace(times, step_s=1.02 * better.step_s)).better is None
    assert refine(planner, plan, replace(times, step_s=1.1 * better.step_s)).better is not None


def test_the_host_must_hold_what_comes_home() -> None:
    planner, plan, times = misjudged()
    nbytes = plan.manifest.nbytes
    for free, moves in ((nbytes, True), (nbytes - 1, False)):
        on = replace(planner.machine, host_free_nbytes=free)
        given = replace(planner, machine=on, config=planner.config.merged(host_budget=nbytes))
        assert (refine(given, plan, times).better is not None) == moves


def test_of_units_that_did_not_run_nothing_is_concluded() -> None:
    planner, plan, _ = misjudged()
    partial = plan.reordered(plan.manifest.order[:-1])
    times = times_of(partial, faster(planner.profile(plan.manifest), 40, 1))
    refined = refine(planner, partial, times)
    assert refined.better is None
    assert refined.plan.step_s == pytest.approx(times.step_s, rel=0.01)


def placed(planner: Planner, manifest: Manifest, mapped: frozenset[str]) -> Plan:
    profile, refusals = planner.profile(manifest), list[Refusal]()
    found = search(planner._opened(manifest, Way(mapped, manifest.without(mapped)), profile, 1, refusals))
    assert found is not None, refusals
    return planner.priced(found)


def test_reading_in_place_costs_what_it_did_before() -> None:
    """A head that streams was not read in place when it was measured: a plan that would do so pays for the reads."""
    budget = decoder("block", **WIDE).nbytes * 60 // 100
    planner = prospect(WIDE, grains=("block",), device_budget=budget).planners[0]
    manifest = decoder("block", **WIDE)
    plan = planner(manifest)
    assert plan.mapped == {TABLE}
    refined = refine(planner, plan, times_of(plan, planner.profile(manifest)))
    both = placed(refined.planner, manifest, frozenset({TABLE, HEAD}))
    assert both.copy_s >= manifest.aliases[HEAD] / refined.planner.machine.profile.link_bytes_per_s
    assert refined.better is None


def test_a_head_that_is_read_in_place_is_not_paid_twice() -> None:
    budget = decoder("block", **WIDE).aliases[HEAD] - (1 << 20)
    planner = prospect(WIDE, grains=("block",), device_budget=budget).planners[0]
    manifest = decoder("block", **WIDE)
    plan = planner(manifest)
    assert plan.mapped == {TABLE, HEAD}
    profile = planner.profile(manifest)
    head = len(manifest.units) - 1
    read_s = manifest.aliases[HEAD] / profile.link_bytes_per_s
    slow = tuple(s + read_s * (unit == head) for unit, s in enumerate(profile.unit_s))
    times = times_of(plan, replace(profile, unit_s=slow))
    refined = refine(planner, plan, times)
    assert refined.plan.step_s == pytest.approx(times.step_s, rel=0.01)
    again = placed(refined.planner, manifest, plan.mapped)
    assert again.step_s <= refined.plan.step_s * 1.001


# -- streamers ----------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 64, 8
LAYER = 4 * WIDTH * WIDTH
BUDGET = 5 * LAYER
COPY_S = 0.01


class Slow(Wrapper):
    """Every copy takes `COPY_S` more."""

    def copy(self, copies: Any) -> None:
        self.backend.copy([replace(copy, prepare=self._late(copy)) for copy in copies])

    def _late(self, copy: Copy) -> Callable[[], None]:
        def late() -> None:
            time.sleep(COPY_S)
            if copy.prepare is not None:
                copy.prepare()

        return late


def layers(seed: int = 0, depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)]).eval()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, nothing_foreseen: None) -> Iterator[Callable[..., weightstream.Streamer]]:
    """Opens a streamer on a machine whose profile says something else than what its steps take."""
    monkeypatch.setattr("weightstream.runtime.refinement._WORSE", 1e9)  # steps of this machine vary
    streamers: list[weightstream.Streamer] = []

    def open_on(
        module: nn.Module, backend: Any = None, profile: Profile = CPU_PROFILE, **given: Any
    ) -> weightstream.Streamer:
        monkeypatch.setattr(prospects, "profile_for", lambda _, **__: profile)
        monkeypatch.setattr(devices, "CpuBackend", lambda: backend or CpuBackend())
        streamers.append(weightstream.offload(module, device="cpu", **{"device_budget": BUDGET, **given}))
        return streamers[-1]

    yield open_on
    for streamer in streamers:
        streamer.remove()


def step(module: nn.Module, seed: int, rows: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)))


def assert_steps(module: nn.Module, num: int, plain: nn.Module | None = None, rows: int = 2) -> None:
    """That many steps, each bitwise that of the plain layers."""
    plain = layers() if plain is None else plain
    for seed in range(num):
        assert torch.equal(step(module, seed, rows), step(plain, seed, rows))


# so slow a computation that copies hide behind it, and the plan takes the least memory
SLOW_COMPUTE = replace(CPU_PROFILE, overhead_s=0.05)


def test_the_plan_is_held_against_what_was_measured(
    opened: Callable[..., weightstream.Streamer], caplog: pytest.LogCaptureFixture
) -> None:
    module = layers()
    streamer = opened(module, Slow(CpuBackend()))
    streamer._installed.refinement._num_moves = 2
    planned_s, homes = streamer.plan.step_s, streamer.plan.resident
    assert planned_s < COPY_S
    with caplog.at_level(logging.INFO, logger="weightstream"):
        assert_steps(module, 8)
    measured_s = streamer.stats().step_s
    assert measured_s is not None
    assert measured_s > 2 * COPY_S
    assert streamer.plan.step_s == pytest.approx(measured_s, rel=0.25)
    assert streamer.stats().predicted_step_s == streamer.plan.step_s
    assert streamer.plan.resident == homes
    assert f"{1e3 * planned_s:.1f} predicted; from what was measured {1e3 * streamer.plan.step_s:.1f}" in caplog.text


def test_delays_that_nobody_predicted_change_no_bit(opened: Callable[..., weightstream.Streamer]) -> None:
    module = layers()
    streamer = opened(module, Delay(CpuBackend(), 3, 0.004), SLOW_COMPUTE)
    assert_steps(module, 24)
    assert streamer.plan.step_s < SLOW_COMPUTE.overhead_s * DEPTH / 2
    streamer.remove()
    assert torch.equal(step(module, 1), step(layers(), 1))


def look(learned: Refinement, plan: Plan, num_steps: int, measured: Measured) -> tuple[Plan, Plan | None]:
    """What becomes of the plan in force after steps that were measured so."""
    timeline: Any = SimpleNamespace(kind=measured.kind, measured=lambda: measured)
    found = learned.refine(plan, num_steps, timeline)
    assert found is not None
    return found


def steps_of(seconds: float) -> Measured:
    return Measured(kind=Kind("forward", 1), num_steps=4, step_s=seconds, host_s=seconds, units=())


@pytest.mark.parametrize(("size", "num_doubts"), [(2 * WIDTH, 1), (3 * WIDTH, 0)])
def test_a_profile_is_doubted_by_steps_of_the_call_that_was_foreseen(
    size: int, num_doubts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of its class, but of another size, may well take another time."""
    monkeypatch.setattr(prospects, "profile_for", lambda _, **__: CPU_PROFILE)
    with weightstream.offload(layers(), device="cpu", device_budget=BUDGET) as streamer:
        given, doubts = streamer._installed.refinement.prospect, []
        plan = given.planners[0](given.grains[0])
        learned = Refinement(given, lambda *_: given, lambda: doubts.append(1))
        learned.foresee(plan, Kind("forward", 2 * WIDTH), (), {})
        look(learned, plan, 4, replace(steps_of(3 * plan.step_s), kind=Kind("forward", size), num_steps=3))
        assert len(doubts) == num_doubts


@pytest.mark.parametrize(("num_tokens", "num_doubts"), [(1, 1), (7, 0)])
def test_a_profile_is_doubted_by_the_steps_that_were_planned_for(num_tokens: int, num_doubts: int) -> None:
    """Those of a language model are known before any call."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    with weightstream.offload(model, device="cpu", device_budget="80KiB") as streamer:
        doubts: list[int] = []
        learned = Refinement(streamer._installed.refinement.prospect, doubt=lambda: doubts.append(1))
        plan = streamer.plan
        kind = Kind("forward", num_tokens)
        look(learned, plan, 4, replace(steps_of(3 * plan.step_s), kind=kind, num_steps=3))
        assert len(doubts) == num_doubts


def test_a_better_plan_is_moved_to_and_measured_again(
    opened: Callable[..., weightstream.Streamer], caplog: pytest.LogCaptureFixture
) -> None:
    module = layers()
    streamer = opened(module, Slow(CpuBackend()), SLOW_COMPUTE)
    before = streamer.plan
    with caplog.at_level(logging.INFO, logger="weightstream"):
        assert_steps(module, 8)
        after = streamer.plan
        assert after.step_nbytes < before.step_nbytes
        assert after.device_nbytes <= BUDGET
        assert "moving to a plan of" in caplog.text
        assert streamer.stats().held_nbytes["device"] == after.device_nbytes
        before_nbytes = streamer.stats().filled_nbytes
        assert_steps(module, 1)
        assert streamer.stats().filled_nbytes - before_nbytes == after.step_nbytes
        assert_steps(module, 11)
    measured_s = streamer.stats().step_s
    assert measured_s is not None
    assert streamer.plan.step_s == pytest.approx(measured_s, rel=0.25)
    assert caplog.text.count("from what was measured") + caplog.text.count("moving to") >= 2


@pytest.fixture
def always_better(monkeypatch: pytest.MonkeyPatch) -> list[Times]:
    """Whatever was measured, another plan seems better: one more or one less layer resident. What was asked so far."""
    asked: list[Times] = []

    def found(planner: Planner, plan: Plan, times: Times, *, may_move: bool) -> Refined:
        asked.append(times)
        resident = frozenset(sorted(plan.manifest.aliases)[: 2 if len(plan.resident) != 2 else 1])
        better = replace(Plan.build(plan.manifest, resident, 2 * LAYER), budget=BUDGET)
        plan = replace(plan, step_s=times.step_s)
        return Refined(planner=planner, plan=plan, better=better if may_move else None)

    monkeypatch.setattr("weightstream.runtime.refinement.refine", found)
    return asked


@pytest.mark.parametrize(("after_s", "is_undone"), [(1.2, True), (1.05, False)])
def test_a_move_that_makes_steps_longer_is_undone(
    after_s: float, is_undone: bool, always_better: list[Times], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prospects, "profile_for", lambda _, **__: CPU_PROFILE)
    with weightstream.offload(layers(), device="cpu", device_budget=BUDGET) as streamer:
        given = streamer._installed.refinement.prospect
        before, learned = given.planners[0](given.grains[0]), Refinement(given)
    _, after = look(learned, before, 64, steps_of(1.0))
    assert after is not None
    _, again = look(learned, after, 128, steps_of(after_s))
    assert again is not None
    assert (again.resident == before.resident) == is_undone
    assert again.step_s == 1.0 or not is_undone
    assert look(learned, again, 192, steps_of(1.0))[1] is None, "no move is left"


def test_what_a_move_was_undone_for_is_not_gone_back_to(
    always_better: list[Times], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow steps get afterwards."""
    monkeypatch.setattr(prospects, "profile_for", lambda _, **__: CPU_PROFILE)
    with weightstream.offload(layers(), device="cpu", device_budget=BUDGET) as streamer:
        given = streamer._installed.refinement.prospect
        plan, learned = given.planners[0](given.grains[0]), Refinement(given)
    moved = []
    for num, step_s in enumerate((1.0, 1.2, 2.0, 4.0), 1):
        same, better = look(learned, plan, 64 * num, steps_of(step_s))
        moved.append(better is not None)
        plan = better or same
    assert moved == [True, True, False, False]


def test_after_a_step_that_counted_as_a_whole_a_move_may_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others used the device when it was looked at first."""
    planner, plan = planned(60)
    learned, asked = Refinement(Prospect(grains=(plan.manifest,), planners=(planner,))), []

    def found(planner: Planner, plan: Plan, times: Times, *, may_move: bool) -> Refined:
        asked.append(may_move)
        plan = replace(plan, step_s=times.step_s)
        return Refined(planner=planner, plan=plan, better=None, is_whole=len(asked) == 1)

    monkeypatch.setattr("weightstream.runtime.refinement.refine", found)
    for num, step_s in enumerate((4.0, 2.0, 1.0), 1):
        plan, _ = look(learned, plan, 64 * num, steps_of(step_s))
    assert asked == [True, True, False]


def test_steps_of_a_known_kind_are_looked_at_once_enough_came_since() -> None:
    """A generation is looked at once, at its end, after any number of steps."""
    planner, plan = planned(60)
    learned = Refinement(Prospect(grains=(plan.manifest,), planners=(planner,)))
    looks = []
    for num_steps, step_s in ((23, 1.0), (46, 2.0), (69, 2.0), (92, 4.0), (138, 4.0), (161, 8.0)):
        measured = steps_of(step_s)
        timeline: Any = SimpleNamespace(kind=measured.kind, measured=lambda measured=measured: measured)
        found = learned.refine(plan, num_steps, timeline, may_move=False)
        plan = found[0] if found is not None else plan
        looks.append((num_steps, plan.step_s))
    assert looks == [(23, 1.0), (46, 1.0), (69, 1.0), (92, 4.0), (138, 4.0), (161, 8.0)]


def test_it_moves_twice_at_most(opened: Callable[..., weightstream.Streamer], always_better: list[Times]) -> None:
    module = layers()
    streamer = opened(module)
    plans = {id(streamer.plan): streamer.plan}
    for seed in range(60):
        assert torch.equal(step(module, seed, 2 + seed // 12), step(layers(), seed, 2 + seed // 12))
        streamer._backend.synchronize()
        plans[id(streamer.plan)] = streamer.plan
    residents = [plan.resident for plan in plans.values()]
    assert len(always_better) > 3
    assert sum(a != b for a, b in itertools.pairwise(residents)) == 2
    for times in always_better:
        assert times.step_s > 0
        assert times.computes


def test_one_kind_of_steps_is_looked_at_once(
    opened: Callable[..., weightstream.Streamer], always_better: list[Times]
) -> None:
    module = layers()
    opened(module)._installed.refinement._num_moves = 2
    assert_steps(module, 40)
    assert len(always_better) == 1


def test_fixed_and_captured_steps_move_nothing(
    opened: Callable[..., weightstream.Streamer], always_better: list[Times]
) -> None:
    module = layers()
    streamer = opened(module)
    assert_steps(module, 1)
    places = streamer.plan.resident
    with streamer.step():
        for seed in range(12):
            assert torch.equal(step(module, seed), step(layers(), seed))
    streamer._backend.synchronize()
    with streamer.step():
        assert torch.equal(step(module, 0), step(layers(), 0))
    assert always_better, "what was measured goes into what is predicted"
    assert streamer.plan.step_s == always_better[-1].step_s
    graph = nn.Identity()  # anything that can be held weakly
    streamer.graphs.recordings[graph] = None  # type: ignore[assignment]
    assert_steps(module, 12)
    assert streamer.plan.resident == places
    del streamer.graphs.recordings[graph]
    assert_steps(module, 8, rows=4)
    assert streamer.plan.resident != places


def test_classic_settings_are_measured_and_stay(opened: Callable[..., weightstream.Streamer]) -> None:
    module = layers()
    streamer = opened(module, Slow(CpuBackend()), device_budget=None, offload_group_size=2)
    before = streamer.plan
    assert_steps(module, 12)
    assert streamer.plan.step_s > COPY_S > before.step_s
    assert replace(streamer.plan, **predictions(before)) == before


def test_a_move_that_fails_leaves_the_model_whole(
    opened: Callable[..., weightstream.Streamer], always_better: list[Times], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = layers()
    streamer = opened(module)
    before = dict(module.named_parameters())

    def refuse(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    assert_steps(module, 2)
    monkeypatch.setattr(streamer._backend, "alloc", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        assert_steps(module, 12)
    assert always_better
    assert not hasattr(module, "weightstream")
    assert dict(module.named_parameters()) == before
    assert torch.equal(step(module, 5), step(layers(), 5))
