"""Predictions corrected by measured times: of simulated machines, and of streamers planned for another machine."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_planner import DECODE, HEAD, PREFILL, SMALL, TABLE, WIDE, decoder, inputs_of
from torch import nn

import weightstream
from models import TEXT
from weightstream.inputs import machine as machine_inputs
from weightstream.plan import correction, cost
from weightstream.plan.correction import Times, corrected, corrected_unit_s
from weightstream.plan.manifest import Profile, Workload
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Planner
from weightstream.plan.planner_inputs import PlannerInputs, is_worth
from weightstream.runtime.devices import opening
from weightstream.runtime.devices.backend import Copy
from weightstream.runtime.devices.cpu import CPU_PROFILE, CpuBackend
from weightstream.runtime.experts.counters import Tally
from weightstream.runtime.ring.timeline import Kind, Measured
from weightstream.runtime.streamer.replanning import Replanning
from wrapped import Delay, Wrapper

# -- a simulated machine ------------------------------------------------------------------------------------------


def faster(profile: Profile, compute: float, link: float) -> Profile:
    """A machine that computes and copies faster by these factors."""
    seconds = {name: tuple(s / compute for s in getattr(profile, name)) for name in ("unit_s", "host_s")}
    return replace(
        profile,
        link_bytes_per_s=profile.link_bytes_per_s * link,
        overhead_s=profile.overhead_s / compute,
        **seconds,
    )


def on_host(planner: Planner, slow: float) -> Planner:
    """The planner of a machine whose host takes longer by this factor."""
    profile = correction._quicker(planner.machine.profile, slow)
    return replace(planner, machine=replace(planner.machine, profile=profile))


def times_of(plan: Plan, profile: Profile) -> Times:
    """The times that a timeline measures in a step on that machine: from wait to wait, cyclically.

    A wait begins when the device has reached it and the host has queued it. Before that, the previous unit computes.
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


def planned(percent: int, grain: str = "block", **settings: Any) -> tuple[Planner, Plan]:
    """A planner of the small decoder, and its plan for that share of the weights."""
    budget = decoder("block", **SMALL).nbytes * percent // 100
    planner = inputs_of(SMALL, grains=(grain,), device_budget=budget, **settings).planners[0]  # type: ignore[arg-type]
    return planner, planner(decoder(grain, **SMALL))  # type: ignore[arg-type]


@pytest.mark.few(3)
@pytest.mark.parametrize("grain", ["block", "half", "matrix"])
@pytest.mark.parametrize("percent", [20, 45, 70, 90, 100])
@pytest.mark.parametrize("workload", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_corrected_plan_predicts_the_measured_times(percent: int, grain: str, workload: Workload) -> None:
    planner, plan = planned(percent, grain, workload=workload)
    for compute, link in itertools.product((0.2, 0.9, 6), (0.3, 1.1, 4)):
        times = times_of(plan, faster(planner.profile(plan.manifest), compute, link))
        found = corrected(planner, plan, times)
        assert found.step_s == pytest.approx(times.step_s, rel=0.02), (compute, link)
        on_host_s = min(times.host_s, cost.host_s(plan, planner.profile(plan.manifest)))
        on_device_s = sum(times.computes.values()) or times.step_s
        assert found.compute_s == pytest.approx(max(on_device_s, on_host_s), rel=1e-6)
        assert replace(found, **predictions(plan)) == plan


def predictions(plan: Plan) -> dict[str, Any]:
    names = ("step_s", "graph_s", "compute_s", "graph_compute_s", "copy_s", "disk_s", "machine", "basis")
    return {name: getattr(plan, name) for name in names}


def test_seconds_are_divided_by_the_estimates_and_sum_up() -> None:
    """Residents have no wait: the time of several units in one span is divided as predicted."""
    planner, plan = planned(60)
    assert not all(plan.streams(unit) for unit in plan.manifest.order)
    true = faster(planner.profile(plan.manifest), 0.3, 1)
    times = times_of(plan, true)
    estimate = planner.profile(plan.manifest)
    estimates = [max(estimate.times_s(u, unit, shown=plan.num_shown[u])) for u, unit in enumerate(plan.manifest.units)]
    found = corrected_unit_s(plan, estimates, times)
    assert found.keys() == {unit.name for unit in plan.manifest.units}
    assert sum(found.values()) == pytest.approx(sum(times.computes.values()))
    first = next(unit for unit in plan.manifest.order if plan.streams(unit))
    last = max(unit for unit in plan.manifest.order if plan.streams(unit))
    wrapped = [*range(last, len(plan.manifest.units)), *range(first)]  # the last wait's span continues from the start
    names = [plan.manifest.units[unit].name for unit in wrapped]
    assert sum(found[name] for name in names) == pytest.approx(times.computes[last])
    for name, unit in zip(names, wrapped, strict=True):
        assert found[name] / times.computes[last] == pytest.approx(estimates[unit] / sum(estimates[u] for u in wrapped))


@pytest.mark.parametrize("in_graphs", [True, False])
def test_the_time_of_a_graph_is_that_in_which_tokens_come(in_graphs: bool) -> None:
    """Graphs are timed as a whole, without their units. The busiest resource takes as long as they show."""
    planner, plan = planned(45)
    plan = replace(plan, in_graphs=in_graphs, step_s=9.0, graph_s=4.0, copy_s=3.0, graph_compute_s=1.0)
    found = corrected(planner, plan, Times(step_s=2.0, host_s=0.1, computes={}, copies={}))
    assert (found.run_s, found.basis, found.limit) == (2.0, "steps", "link")
    assert found.graph_s == (2.0 if in_graphs else 4.0)
    assert found.copy_s == pytest.approx(3.0 * 2.0 / (4.0 if in_graphs else 9.0))


def test_a_slow_eager_step_is_no_slow_link() -> None:
    """Of a plan whose steps in graphs would wait for the link: the host may be what is slow in eager ones."""
    _, plan = planned(45)
    plan = replace(plan, in_graphs=True, compute_s=9.0, graph_compute_s=1.0, copy_s=2.0, step_s=9.0, graph_s=2.0)
    slow = Times(step_s=18.0, host_s=18.0, computes={}, copies={})
    found = correction._as_a_whole(plan, slow, in_graphs=False)
    assert (found.step_s, found.compute_s, found.copy_s) == (18.0, 18.0, 2.0)


def test_on_a_cpu_the_time_in_a_graph_follows_that_of_a_step() -> None:
    planner, plan = planned(45)
    plan = replace(plan, on_cpu=True)
    assert corrected(planner, plan, Times(step_s=9.0, host_s=9.0, computes={}, copies={})).graph_s == 9.0


def test_without_streaming_the_step_is_divided() -> None:
    planner, plan = planned(100)
    assert not plan.step_nbytes
    times = Times(step_s=0.5, host_s=0.5, computes={}, copies={})
    assert corrected(planner, plan, times).step_s == pytest.approx(0.5)
    assert sum(corrected_unit_s(plan, [0.0] * len(plan.manifest.units), times).values()) == pytest.approx(0.5)


def test_a_unit_at_two_positions_counts_at_both() -> None:
    planner, plan = planned(30)
    order = (0, 1, 2, 3, 2, 4, 5, 6, 7, 8, 9, 10)
    plan = plan.reordered(order)
    times = times_of(plan, faster(planner.profile(plan.manifest), 0.25, 1))
    assert corrected(planner, plan, times).step_s == pytest.approx(times.step_s, rel=0.02)


def test_time_outside_of_units_counts_for_the_whole_step() -> None:
    """If other work uses the device in between, a step takes longer than its units."""
    planner, plan = planned(70, workload=PREFILL)
    assert plan.limit == "compute"
    times = times_of(plan, faster(planner.profile(plan.manifest), 40, 1))
    by_units = corrected(planner, plan, times)
    for factor in (1.2, 3.0):
        found = corrected(planner, plan, replace(times, step_s=factor * times.step_s))
        assert found.step_s == factor * times.step_s
        busy = {name: getattr(by_units, name) for name in ("compute_s", "copy_s")}
        busy["copy_s" if by_units.limit == "link" else "compute_s"] *= found.step_s / by_units.step_s
        assert {name: getattr(found, name) for name in busy} == pytest.approx(busy)


def test_a_profile_of_a_slow_host_is_corrected_by_a_step() -> None:
    """Also if its steps do take that long, since the plan for it has a shallow ring: the host was not the cause."""
    planner, _ = planned(60)
    slow, true = on_host(planner, 40), on_host(planner, 8)
    plan = slow(decoder("block", **SMALL))
    assert plan.step_s == pytest.approx(cost.host_s(plan, slow.profile(plan.manifest)))
    times = times_of(plan, true.profile(plan.manifest))
    found, wanted = corrected(slow, plan, times), true.priced(plan)
    assert found.step_s == pytest.approx(times.step_s, rel=0.02)
    assert found.compute_s == pytest.approx(wanted.compute_s, rel=0.02)
    assert found.step_s < 0.5 * plan.step_s


def test_a_host_that_waited_is_not_assumed_to_be_slower() -> None:
    """It waits for the device if a step has more kernels than the queue, or if the model reads a number."""
    planner, plan = planned(60)
    profile = planner.profile(plan.manifest)
    on_time = replace(times_of(plan, profile), host_s=cost.host_s(plan, profile))
    assert corrected(planner, plan, replace(on_time, host_s=1e3)) == corrected(planner, plan, on_time)


def test_the_rate_of_the_link_is_that_of_the_copies() -> None:
    planner, plan = planned(50)
    copies = {2: (3 << 20, 0.375), 4: (1 << 20, 0.125), 6: (9, 1.0)}
    times = Times(step_s=0.01, host_s=1.0, computes={2: 0.01}, copies=copies)
    profile = planner.machine.profile
    slower = replace(profile, link_bytes_per_s=(1 << 20) / (0.125 - profile.copy_latency_s))
    assert corrected(planner, plan, times).copy_s == pytest.approx(cost.copy_s(plan, slower), rel=1e-4)
    assert corrected(planner, plan, replace(times, copies={})).copy_s == cost.copy_s(plan, profile)


def test_a_disk_that_is_the_bottleneck_is_corrected() -> None:
    planner, plan = planned(40, host_budget=20 << 20)
    assert plan.limit == "disk"
    true = replace(planner.profile(plan.manifest), disk_bytes_per_s=planner.machine.profile.disk_bytes_per_s / 3)
    found = corrected(planner, plan, times_of(plan, true))
    assert found.step_s == pytest.approx(cost.simulated_s(plan, true)[1], rel=0.01)
    assert found.disk_s == pytest.approx(cost.disk_s(plan, true), rel=0.01)


def test_units_that_did_not_run_are_ignored() -> None:
    planner, plan = planned(70, workload=PREFILL)
    partial = plan.reordered(plan.manifest.order[:-1])
    times = times_of(partial, faster(planner.profile(plan.manifest), 40, 1))
    assert corrected(planner, partial, times).step_s == pytest.approx(times.step_s, rel=0.01)


def test_a_head_that_is_read_in_place_is_not_counted_twice() -> None:
    budget = decoder("block", **WIDE).aliases[HEAD] - (1 << 20)
    planner = inputs_of(WIDE, grains=("block",), device_budget=budget).planners[0]
    manifest = decoder("block", **WIDE)
    plan = planner(manifest)
    assert plan.mapped == {TABLE, HEAD}
    profile = planner.profile(manifest)
    head = len(manifest.units) - 1
    read_s = manifest.aliases[HEAD] / profile.link_bytes_per_s
    slow = tuple(s + read_s * (unit == head) for unit, s in enumerate(profile.unit_s))
    times = times_of(plan, replace(profile, unit_s=slow))
    assert corrected(planner, plan, times).step_s == pytest.approx(times.step_s, rel=0.01)


# -- streamers ----------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 64, 8
LAYER = 4 * WIDTH * WIDTH
BUDGET = 5 * LAYER
COPY_S = 0.01


class Slow(Wrapper):
    """Makes every copy take `COPY_S` longer."""

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
    """Opens a streamer on a machine whose profile differs from the measured steps."""
    streamers: list[weightstream.Streamer] = []

    def open_on(
        module: nn.Module, backend: Any = None, profile: Profile = CPU_PROFILE, **settings: Any
    ) -> weightstream.Streamer:
        monkeypatch.setattr(machine_inputs, "profile_for", lambda _, **__: profile)
        monkeypatch.setattr(opening, "CpuBackend", lambda: backend or CpuBackend())
        streamers.append(weightstream.offload(module, device="cpu", **{"device_budget": BUDGET, **settings}))
        return streamers[-1]

    yield open_on
    for streamer in streamers:
        streamer.remove()


def step(module: nn.Module, seed: int, rows: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)))


def assert_steps(module: nn.Module, num: int, plain: nn.Module | None = None, rows: int = 2) -> None:
    """Run `num` steps, each bitwise equal to the plain layers."""
    plain = layers() if plain is None else plain
    for seed in range(num):
        assert torch.equal(step(module, seed, rows), step(plain, seed, rows))


# compute is so slow that copies hide behind it, so the plan takes the least memory
SLOW_COMPUTE = replace(CPU_PROFILE, overhead_s=0.05, compute_lost=0.0)


def test_predictions_are_compared_with_measured_times(
    opened: Callable[..., weightstream.Streamer], caplog: pytest.LogCaptureFixture
) -> None:
    module = layers()
    streamer = opened(module, Slow(CpuBackend()))
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
    assert f"{1e3 * planned_s:.1f} ms predicted; {1e3 * streamer.plan.step_s:.1f} ms with measured times" in caplog.text


def test_unpredicted_delays_change_no_bit(opened: Callable[..., weightstream.Streamer]) -> None:
    module = layers()
    streamer = opened(module, Delay(CpuBackend(), 3, 0.004), SLOW_COMPUTE)
    assert_steps(module, 24)
    assert streamer.plan.step_s < SLOW_COMPUTE.overhead_s * DEPTH / 2
    streamer.remove()
    assert torch.equal(step(module, 1), step(layers(), 1))


def look(learned: Replanning, plan: Plan, num_steps: int, measured: Measured) -> Plan | None:
    """The current plan as corrected by these measured steps, or None if there is no correction."""
    timeline: Any = SimpleNamespace(kind=measured.kind, measured=lambda: measured, tally=Tally())
    return learned.correct(plan, num_steps, timeline)


def steps_of(seconds: float) -> Measured:
    return Measured(kind=Kind("forward", 1), num_steps=4, step_s=seconds, host_s=seconds, units=())


@pytest.mark.parametrize(("size", "num_doubts"), [(2 * WIDTH, 1), (3 * WIDTH, 0)])
def test_a_profile_is_doubted_by_steps_of_the_traced_call(
    size: int, num_doubts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of its kind, but of another size, may take another time."""
    monkeypatch.setattr(machine_inputs, "profile_for", lambda _, **__: CPU_PROFILE)
    with weightstream.offload(layers(), device="cpu", device_budget=BUDGET) as streamer:
        inputs, doubts = streamer._installed.replanning.inputs, []
        plan = inputs.planners[0](inputs.grains[0])
        learned = Replanning(inputs, lambda *_: inputs, lambda: doubts.append(1))
        learned.foresee(plan, Kind("forward", 2 * WIDTH), (), {})
        look(learned, plan, 4, replace(steps_of(3 * plan.step_s), kind=Kind("forward", size), num_steps=3))
        assert len(doubts) == num_doubts


@pytest.mark.parametrize(("num_tokens", "num_doubts"), [(1, 1), (7, 0)])
def test_a_profile_is_doubted_by_the_planned_steps(num_tokens: int, num_doubts: int) -> None:
    """Steps of a language model are known before any call."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    with weightstream.offload(model, device="cpu", device_budget="80KiB") as streamer:
        doubts: list[int] = []
        learned = Replanning(streamer._installed.replanning.inputs, doubt=lambda: doubts.append(1))
        plan = streamer.plan
        kind = Kind("forward", num_tokens)
        look(learned, plan, 4, replace(steps_of(3 * plan.step_s), kind=kind, num_steps=3))
        assert len(doubts) == num_doubts


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["eager", "step", "compiled"])
def test_a_plan_stays_if_another_would_be_faster(way: str, opened: Callable[..., weightstream.Streamer]) -> None:
    """Only the prediction follows the measured times."""
    module = layers()
    streamer = opened(module, Slow(CpuBackend()), SLOW_COMPUTE)
    before, found = streamer.plan, streamer._installed.replanning.inputs
    profile = replace(CPU_PROFILE, link_bytes_per_s=LAYER / COPY_S)
    there = replace(found.planners[0], machine=replace(found.planners[0].machine, profile=profile))
    assert is_worth(there.priced(before), there(found.grains[0]), there.machine)
    assert_steps(module, 1)
    if way == "compiled":
        streamer.compile(backend="eager")
    for rows in (2, 6):
        for _ in range(2):
            with streamer.step() if way == "step" else nullcontext():
                assert_steps(module, 6, rows=rows)
    assert streamer.plan.acts_as(before)
    assert COPY_S < streamer.plan.step_s < 0.5 * before.step_s
    assert streamer.stats().held_nbytes["device"] == before.device_nbytes
    filled_nbytes = streamer.stats().filled_nbytes
    assert_steps(module, 1)
    assert streamer.stats().filled_nbytes - filled_nbytes == before.step_nbytes


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Times]:
    """The measured times of all corrections so far, each of which predicts its measured time."""
    asked: list[Times] = []

    def found(planner: Planner, plan: Plan, times: Times) -> Plan:
        asked.append(times)
        return replace(plan, step_s=times.step_s)

    monkeypatch.setattr("weightstream.runtime.streamer.replanning.corrected", found)
    return asked


def test_steps_of_a_known_kind_are_used_after_enough_new_ones() -> None:
    """A generation is used once, at its end, after any number of steps."""
    planner, plan = planned(60)
    learned = Replanning(
        PlannerInputs(
            config=planner.config,
            machine=planner.machine,
            weights=planner.weights,
            grains=(plan.manifest,),
            demands=(planner.demand,),
        )
    )
    looks = []
    for num_steps, step_s in ((23, 1.0), (46, 2.0), (69, 2.0), (92, 4.0), (138, 4.0), (161, 8.0)):
        plan = look(learned, plan, num_steps, steps_of(step_s)) or plan
        looks.append((num_steps, plan.step_s))
    assert looks == [(23, 1.0), (46, 1.0), (69, 1.0), (92, 4.0), (138, 4.0), (161, 8.0)]


def test_one_kind_of_steps_is_used_once(opened: Callable[..., weightstream.Streamer], asked: list[Times]) -> None:
    module = layers()
    opened(module)
    assert_steps(module, 40)
    assert len(asked) == 1


def test_fixed_and_captured_steps_correct_predictions(
    opened: Callable[..., weightstream.Streamer], asked: list[Times]
) -> None:
    module = layers()
    streamer = opened(module)
    assert_steps(module, 1)
    with streamer.step():
        assert_steps(module, 12)
    streamer._backend.synchronize()
    with streamer.step():
        assert_steps(module, 1)
    assert len(asked) == 1
    assert streamer.plan.step_s == asked[-1].step_s
    graph = nn.Identity()  # any object that can be weakly referenced
    streamer.graphs.recordings[graph] = None  # type: ignore[assignment]
    assert_steps(module, 8, rows=4)
    assert len(asked) == 2
    assert streamer.plan.step_s == asked[-1].step_s


def test_classic_settings_are_measured_and_stay(opened: Callable[..., weightstream.Streamer]) -> None:
    module = layers()
    streamer = opened(module, Slow(CpuBackend()), device_budget=None, offload_group_size=2)
    before = streamer.plan
    assert_steps(module, 12)
    assert streamer.plan.step_s > COPY_S > before.step_s
    assert replace(streamer.plan, **predictions(before)) == before
