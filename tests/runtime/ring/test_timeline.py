"""The timeline: which parts of a step are timed, that they add up, which steps are timed, and that nothing waits for
it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import weightstream
from graph_rig import GraphRig, Graphs, take_turns
from rig import equal_plan
from weightstream.plan.plan import Plan
from weightstream.runtime.devices.backend import Copy, Side
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.ring.engine import Engine
from weightstream.runtime.ring.timeline import Kind, Measured, Timeline
from weightstream.runtime.streamer import replanning
from weightstream.runtime.trace import Trace
from wrapped import Wrapper

pytestmark = pytest.mark.usefixtures("nothing_foreseen")

DECODE, PREFILL = Kind("forward", 1), Kind("forward", 100)
MARKS = 2 + 5 * 4  # of a step of five units, each of which is filled once
WIDTH, DEPTH = 64, 6
BUDGET = 5 * WIDTH * WIDTH * 4 // 2  # the ring holds two layers and a part


@dataclass(eq=False)
class Tick:
    """A stamp. Its time is the number of earlier stamps."""

    at: int
    side: Side


@dataclass
class Ticks:
    """The stamps of a backend, as long as they are referenced."""

    num: int = 0
    passed: float = float("inf")  # the device has passed the stamps before this one
    held: weakref.WeakSet[Tick] = field(default_factory=weakref.WeakSet)

    def stamp(self, side: Side) -> Tick:
        self.held.add(tick := Tick(self.num, side))
        self.num += 1
        return tick

    def seconds(self, begin: Tick, end: Tick) -> float | None:
        return float(end.at - begin.at) if max(begin.at, end.at) < self.passed else None


class Counted(Wrapper):
    """Every stamp is a second after the previous one. No call may wait for the device."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.ticks = Ticks()
        self.stamp, self.seconds = self.ticks.stamp, self.ticks.seconds  # type: ignore[method-assign]


@pytest.fixture
def backend() -> Iterator[Counted]:
    made = Counted(CpuBackend())
    yield made
    made.close()


class Steps:
    """An engine whose steps are reported to its timeline."""

    def __init__(self, backend: Any, plan: Plan | None = None) -> None:
        self.plan = plan or equal_plan(5, 2)
        ring = backend.alloc(self.plan.ring_nbytes)
        homes = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in self.plan.unit_nbytes]
        copies = [
            [Copy(dst=ring[e.offset : e.offset + e.nbytes], src=home)]
            for e, home in zip(self.plan.extents, homes, strict=True)
        ]
        self.engine = Engine(self.plan, backend, copies)
        self.timeline = self.engine.timeline
        self.engine.prime()

    def run(self, num: int = 1, kind: Kind = DECODE, order: Sequence[int] | None = None) -> None:
        for _ in range(num):
            with self.timeline.step(kind):
                self.engine.begin_step()
                for unit in self.plan.manifest.order if order is None else order:
                    self.engine.wait(unit)
                    self.engine.release(unit)

    def measured(self) -> Measured:
        found = self.timeline.measured()
        assert found is not None
        return found


def test_every_mark_is_at_its_place(backend: Counted) -> None:
    """Two slots, five units. A steady step has these marks: begin; per unit before, after and, after its release,
    the two
    marks of the fill that became due; then the end."""
    steps = Steps(backend)
    steps.run(2)
    found = steps.measured()
    assert (found.kind, found.num_steps, found.step_s) == (DECODE, 1, MARKS - 1)
    assert [unit.name for unit in found.units] == [f"u{u}" for u in range(5)]
    assert {(unit.wait_s, unit.copy_s) for unit in found.units} == {(1.0, 1.0)}
    assert [unit.compute_s for unit in found.units] == [3.0, 3.0, 3.0, 3.0, 3.0 + 1.0]  # the time before the first wait
    assert {unit.nbytes for unit in found.units} == set(steps.plan.unit_nbytes)


@pytest.mark.parametrize("order", [None, (0, 1, 1, 2), (4, 3, 0), (2,), (0, 1, 0, 1, 0)])
def test_waits_and_compute_add_up_to_the_step(backend: Counted, order: Sequence[int] | None) -> None:
    steps = Steps(backend)
    steps.run(2, order=order)
    order = range(5) if order is None else order
    units = steps.measured().units
    assert sum(units[u].wait_s + units[u].compute_s for u in order) == steps.measured().step_s
    assert all(units[u].compute_s == 0 for u in set(range(5)) - set(order))


def test_a_step_without_units_has_a_time(backend: Counted) -> None:
    steps = Steps(backend)
    steps.run(2, order=())
    assert steps.measured().step_s > 0
    assert steps.measured().units == ()


def test_the_second_to_the_fifth_and_then_one_in_seventeen_are_timed(backend: Counted) -> None:
    steps, timed = Steps(backend), []
    for step in range(1, 70):
        before = backend.ticks.num
        steps.run()
        if backend.ticks.num > before:
            timed.append(step)
    assert timed == [2, 3, 4, 5, 17, 34, 51, 68]


def test_the_hosts_time_is_that_of_the_quickest_timed_call(backend: Counted) -> None:
    """By the host's own clock: the device may be far behind, and some calls wait for it."""
    steps = Steps(backend)
    steps.run()
    for pause_s in (0.2, 0.01, 0.1):  # all of these are timed
        with steps.timeline.step(DECODE):
            time.sleep(pause_s)
    found = steps.measured()
    assert found.num_steps == 3
    assert 0.01 <= found.host_s < 0.1
    assert found.step_s == 1.0, "a tick of the device's clock"
    assert replanning._times(found).host_s == found.host_s


def test_marks_that_the_device_has_not_passed_are_read_later(backend: Counted) -> None:
    steps = Steps(backend)
    backend.ticks.passed = 0
    steps.run(5)
    assert steps.timeline.measured() is None
    assert steps.timeline.stall_s == 0
    backend.ticks.passed = 2 * MARKS + 1  # the 2nd and the 3rd step, and the begin of the 4th
    assert steps.measured().num_steps == 2
    backend.ticks.passed = float("inf")
    assert steps.measured().num_steps == 4


def test_marks_and_samples_are_bounded(backend: Counted) -> None:
    steps = Steps(backend)
    backend.ticks.passed = 0
    steps.run(17 * 40)
    gc.collect()
    assert len(backend.ticks.held) == 16 * MARKS
    backend.ticks.passed = float("inf")
    assert steps.measured().num_steps == 16
    steps.run(17 * 20)
    assert steps.measured().num_steps == 16
    gc.collect()
    assert len(backend.ticks.held) <= MARKS


def test_two_workloads_are_not_mixed(backend: Counted) -> None:
    steps = Steps(backend)
    steps.run(3, PREFILL, order=(0, 1, 2, 3, 4))
    long_s = steps.measured().step_s
    steps.run(2, DECODE, order=(0, 1))
    assert (steps.measured().kind, steps.measured().num_steps) == (DECODE, 1)  # the first of a kind is not timed
    assert steps.measured().step_s < long_s
    steps.run(11, DECODE)
    steps.run(1, PREFILL)
    assert (steps.measured().kind, steps.measured().num_steps) == (PREFILL, 3)


def test_another_plan_begins_again(backend: Counted) -> None:
    steps = Steps(backend)
    steps.run(6)
    timeline = steps.timeline
    Engine(equal_plan(4, 2), backend, (), timeline=timeline)
    assert timeline.measured() is None
    before = backend.ticks.num
    with timeline.step(DECODE):
        pass
    assert backend.ticks.num == before  # the first step of each kind
    with timeline.step(DECODE):
        pass
    assert timeline.measured() is not None


def test_marks_of_another_plan_are_ignored(backend: Counted) -> None:
    steps = Steps(backend)
    backend.ticks.passed = 0
    steps.run(3)
    backend.ticks.passed = float("inf")
    Engine(equal_plan(4, 2), backend, (), timeline=steps.timeline)
    assert steps.timeline.measured() is None


def test_a_failing_step_is_not_timed(backend: Counted) -> None:
    steps = Steps(backend)
    steps.run()
    with pytest.raises(IndexError):
        steps.run(order=(0, 1, 9))
    assert steps.timeline.measured() is None
    steps.run()
    assert steps.measured().num_steps == 1


def test_untimed_steps_are_assumed_to_wait_as_long_as_the_last_timed_one(backend: Counted) -> None:
    steps = Steps(backend)
    steps.run(5)
    steps.measured()
    assert steps.timeline.stall_s == 4 * 5
    steps.run(8)
    assert steps.timeline.stall_s == (4 + 8) * 5
    steps.run(2, PREFILL)  # of this kind no step was timed
    assert steps.timeline.stall_s == (4 + 8) * 5


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphRig]:
    """No stamp may be taken, or read, inside a capture."""
    for name in ("stamp", "seconds"):
        plain = getattr(Graphs, name)

        def outside(self: Graphs, *args: Any, plain: Any = plain) -> Any:
            assert not self.capturing(), "a stamp inside a capture"
            return plain(self, *args)

        monkeypatch.setattr(Graphs, name, outside)
    with GraphRig(equal_plan(5, 2)) as made:
        yield made


def test_launches_have_a_time_but_their_units_have_none(rig: GraphRig) -> None:
    graph = rig.captured()
    for _ in range(6):
        rig.replay(graph)
    rig.clock.synchronize()
    found = rig.engine.timeline.measured()
    assert found is not None
    assert (found.kind, found.num_steps, found.units) == (Kind("graph", id(graph)), 4, ())
    assert found.step_s > 5 * 0.0002  # the kernels of the rig
    rig.assert_right(6 * 5)


def test_a_piece_of_a_step_is_not_a_step(rig: GraphRig) -> None:
    pieces = [rig.captured((0, 1, 2)), rig.captured((3, 4))]
    for _ in range(6):
        for piece in pieces:
            rig.replay(piece)
    rig.clock.synchronize()
    assert rig.engine.timeline.measured() is None


@pytest.mark.parametrize("seed", range(3))
def test_all_kinds_of_steps_while_tracing(rig: GraphRig, seed: int) -> None:
    trace = Trace("graphs")
    rig.engine.timeline.begin_trace(trace)
    num_kernels = take_turns(rig, seed)
    rig.assert_right(num_kernels)
    rig.engine.timeline.end_trace()
    rows = {span.row for span in trace.spans}
    assert rows == {"host", "compute", "copy"}
    assert sum(span.kind == "fill" for span in trace.spans) <= rig.engine.counters.fills
    unplanned = sum(span.kind == "fill" and not span.planned for span in trace.spans)
    assert unplanned == rig.engine.counters.unplanned_fills


# -- a model -----------------------------------------------------------------------------------------------------------


class Slow(Wrapper):
    """Make the copies of some units take `seconds` longer. A unit is recognised by its bytes on the host."""

    def __init__(self, seconds: float) -> None:
        super().__init__(CpuBackend())
        self._pause_s = seconds
        self.slow: set[int] = set()

    def copy(self, copies: Sequence[Copy]) -> None:
        def late(prepare: Callable[[], None] | None) -> Callable[[], None]:
            return lambda: (time.sleep(self._pause_s), prepare and prepare())[1]

        is_slow = any(copy.src.data_ptr() in self.slow for copy in copies)
        self.backend.copy([replace(c, prepare=late(c.prepare)) for c in copies] if is_slow else copies)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]).eval()


def opened(monkeypatch: pytest.MonkeyPatch, backend: Any, module: nn.Module, **settings: Any) -> weightstream.Streamer:
    monkeypatch.setattr("weightstream.runtime.devices.opening.CpuBackend", lambda *_: backend)
    return weightstream.offload(module, device="cpu", **{"device_budget": BUDGET} | settings)


def settled(streamer: weightstream.Streamer) -> weightstream.Stats:
    """Wait until the fills for the next step are done, and thus the last step."""
    streamer._backend.synchronize()
    return streamer.stats()


@torch.no_grad()
def test_a_slow_copy_is_a_wait_for_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, module, plain = Slow(0.03), model(), model()
    with opened(monkeypatch, backend, module) as streamer:
        want = [plain(torch.full((2, WIDTH), float(i))) for i in range(6)]
        backend.slow = {module[3].weight.data_ptr()}
        assert all(torch.equal(module(torch.full((2, WIDTH), float(i))), y) for i, y in enumerate(want))
        stats = settled(streamer)
        units = {unit.name: unit for unit in stats.units}
        slow = units.pop("3")
        assert slow.copy_s > 0.03
        assert slow.wait_s > 0.02
        assert max(unit.wait_s for unit in units.values()) < 0.02
        assert slow.nbytes == WIDTH * WIDTH * 4
        assert stats.step_s > 0.03
        assert stats.stall_s > 0.02 * 4
        assert stats.predicted_step_s == streamer.plan.step_s > 0


@pytest.mark.parametrize("what", ["graph", "forward"])
def test_steps_are_compared_with_the_prediction_of_their_kind(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    times = Measured(kind=Kind(what, 1), num_steps=1, step_s=0.5, host_s=0.5, units=())
    monkeypatch.setattr(Plan, "run_s", property(lambda plan: 7.0))
    monkeypatch.setattr(Timeline, "measured", lambda _: times)
    with weightstream.offload(model(), device="cpu", device_budget=BUDGET) as streamer:
        assert streamer.stats().predicted_step_s == (7.0 if what == "graph" else streamer.plan.step_s)


def test_before_any_step_there_are_no_times() -> None:
    with weightstream.offload(model(), device="cpu", device_budget=BUDGET) as streamer:
        stats = streamer.stats()
        assert (stats.step_s, stats.units, stats.stall_s) == (None, (), 0.0)


@torch.no_grad()
def test_fixed_steps_are_timed_with_their_units() -> None:
    module, x = model(), torch.ones(1, WIDTH)
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer:
        want = module(x)
        with streamer.step():
            for _ in range(5):
                assert torch.equal(module(x), want)
        stats = settled(streamer)
        assert stats.step_s is not None
        assert len(stats.units) == sum(map(streamer.plan.streams, range(DEPTH))) > 0
        assert all(unit.compute_s > 0 for unit in stats.units)


@torch.no_grad()
def test_the_size_of_the_first_tensor_distinguishes_workloads() -> None:
    module = model()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer:
        for num in (9, 9, 1, 1, 1):
            module(torch.ones(num, WIDTH))
        settled(streamer)
        found = streamer._binding.engine.timeline.measured()
        assert found is not None
        assert (found.kind.size, found.num_steps) == (WIDTH, 2)


@torch.no_grad()
def test_reading_stats_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, module = Counted(CpuBackend()), model()
    with opened(monkeypatch, backend, module) as streamer:
        module(torch.ones(1, WIDTH))
        with monkeypatch.context() as patch:
            patch.setattr(backend, "synchronize", lambda: pytest.fail("it waits"))
            for _ in range(5):
                module(torch.ones(1, WIDTH))
                streamer.stats()


@torch.no_grad()
@pytest.mark.parametrize("is_traced", [False, True])
def test_no_mark_remains_after_remove(monkeypatch: pytest.MonkeyPatch, is_traced: bool) -> None:
    backend, module = Counted(CpuBackend()), model()
    streamer = opened(monkeypatch, backend, module)
    backend.ticks.passed = 0
    tracing = streamer.trace()
    if is_traced:
        tracing.__enter__()
    for _ in range(5):
        module(torch.ones(1, WIDTH))
    assert backend.ticks.held
    streamer.remove()
    gc.collect()
    assert not backend.ticks.held
    assert streamer.stats().step_s is None
    if is_traced:
        tracing.__exit__(None, None, None)


# -- torch's profiler --------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("is_fixed", [False, True])
def test_the_profiler_shows_units_and_fills_by_name(is_fixed: bool) -> None:
    module, x = model(), torch.ones(1, WIDTH)
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer:
        want = module(x)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            if is_fixed:
                with streamer.step():
                    assert torch.equal(module(x), want)
            else:
                assert torch.equal(module(x), want)
        counts: dict[str, int] = {}
        for event in profiled.events():
            counts[event.name] = counts.get(event.name, 0) + 1
        streamed = [spec.name for u, spec in enumerate(streamer.plan.manifest.units) if streamer.plan.streams(u)]
        fills = [name for name in counts if name.startswith("weightstream::fill ")]
        assert {f"weightstream::{name}" for name in streamed} <= counts.keys()
        assert sum(counts[name] for name in fills) == sum(map(len, streamer.plan.after))
        assert {name.removeprefix("weightstream::fill ") for name in fills} <= set(streamed)


@torch.no_grad()
def test_without_a_profiler_nothing_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET):
        module(torch.ones(1, WIDTH))
        monkeypatch.setattr("torch.autograd.profiler.record_function", lambda name: pytest.fail(name))
        module(torch.ones(1, WIDTH))
