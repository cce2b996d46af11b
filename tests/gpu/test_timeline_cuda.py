"""Times by CUDA events: of copies, waits and steps, eager and captured. Timing and tracing change nothing."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stack import ALL, Taught, slow, taught
from weightstream.runtime.devices.cuda import CudaStamp
from weightstream.runtime.trace import Span, Trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_STEPS = 12
LARGE = ALL | {"depth": 8, "width": 2048}  # 128 MiB a block: copies of 2 ms and more
FED = {"pin_memory": False}


@pytest.fixture(params=[{}, FED], ids=["pinned", "fed"])
def model(request: pytest.FixtureRequest) -> Iterator[Taught]:
    with taught(**LARGE, **request.param) as made:
        yield made


def traced(model: Taught, step: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Trace:
    """A trace of steps, each with the plain model's bits."""
    step = step or model.stack
    with model.streamer.trace() as trace:
        got = [step(model.inputs[i % 4]) for i in range(NUM_STEPS)]
    assert all(torch.equal(y, model.want[i % 4]) for i, y in enumerate(got))
    return trace


def of(trace: Trace, kind: str, row: str | None = None) -> list[Span]:
    return [span for span in trace.spans if span.kind == kind and row in (None, span.row)]


def wall_s(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, num: int = 50) -> float:
    """Seconds of a step among consecutive steps."""
    for _ in range(3):
        step(x)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num):
        step(x)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / num


@pytest.mark.alone
@pytest.mark.parametrize(("settings", "least"), [({}, 5e9), (FED, 0.2e9)], ids=["pinned", "fed"])
def test_copies_are_as_fast_as_the_link_and_follow_each_other(settings: dict[str, bool], least: float) -> None:
    with taught(**LARGE, **settings) as model:
        fills = of(traced(model), "fill")
        assert len(fills) >= NUM_STEPS * len(model.stack.blocks)
        assert all(least < fill.nbytes / fill.seconds < 500e9 for fill in fills)
        assert all(later.begin_s >= earlier.end_s - 2e-6 for earlier, later in pairwise(fills))
        units = model.streamer.stats().units
        assert units
        assert all(least < unit.nbytes / unit.copy_s < 500e9 for unit in units)


def test_a_wait_ends_after_its_fill(model: Taught) -> None:
    trace = traced(model)
    waits, fills = of(trace, "wait"), of(trace, "fill")[::-1]
    needed = [next((f for f in fills if f.name == wait.name and f.begin_s < wait.end_s), None) for wait in waits]
    pairs = [(wait, fill) for wait, fill in zip(waits, needed, strict=True) if fill is not None]
    assert len(pairs) >= (NUM_STEPS - 1) * len(model.stack.blocks)
    assert all(wait.end_s >= fill.end_s - 20e-6 for wait, fill in pairs)
    assert sum(wait.seconds for wait in waits) > 0


def test_no_unit_computes_while_its_bytes_are_written(model: Taught) -> None:
    trace, names = traced(model), [unit.name for unit in model.streamer.plan.manifest.units]
    sharing = {
        names[u]: {names[u], *(names[o] for o in s)} for u, s in enumerate(model.streamer._binding.engine.sharing)
    }
    pairs = [(f, unit) for f in of(trace, "fill") for unit in of(trace, "unit") if unit.name in sharing[f.name]]
    assert len(pairs) > NUM_STEPS
    for fill, unit in pairs:
        assert unit.end_s <= fill.begin_s + 20e-6 or unit.begin_s >= fill.end_s - 20e-6


@pytest.mark.alone
@torch.no_grad()
@pytest.mark.parametrize("how", ["eager", "fixed", "captured"])
def test_the_time_of_a_step_is_the_wall_clock_s(how: str) -> None:
    with taught(**LARGE) as model:
        step = model.captured() if how == "captured" else model.stack
        if how == "fixed":
            with model.streamer.step():
                wall = wall_s(step, model.inputs[0])
        else:
            wall = wall_s(step, model.inputs[0])
        stats = model.streamer.stats()
        assert stats.step_s == pytest.approx(wall, rel=0.05)
        assert bool(stats.units) == (how != "captured")
        if stats.units:
            spent = sum(unit.wait_s + unit.compute_s for unit in stats.units)
            assert spent == pytest.approx(stats.step_s, rel=0.1)  # a sum of medians compared with a median
            assert stats.stall_s == pytest.approx(50 * sum(unit.wait_s for unit in stats.units), rel=0.3)


def test_launches_are_traced_between_their_steps() -> None:
    with taught(**LARGE) as model:
        step = model.captured()
        trace = traced(model, step)
        steps = of(trace, "step", "compute")
        assert [span.name for span in steps] == [f"graph {n + 1}" for n in range(NUM_STEPS)]
        assert all(later.begin_s >= earlier.end_s - 2e-6 for earlier, later in pairwise(steps))
        assert of(trace, "unit") == []


def test_a_captured_forward_holds_no_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a step that would be timed if it were not captured, and while a trace is recorded."""
    record = CudaStamp.record

    def outside(self: CudaStamp, stream: torch.cuda.Stream) -> None:
        assert not torch.cuda.is_current_stream_capturing()
        record(self, stream)

    monkeypatch.setattr(CudaStamp, "record", outside)
    with taught(**ALL) as model:
        for _ in range(20):
            model.assert_equal(model.captured(), rounds=1)
        with model.streamer.trace():
            model.assert_equal(model.captured(), rounds=1)


@pytest.mark.parametrize("settings", [{}, FED], ids=["pinned", "fed"])
def test_tracing_changes_nothing_under_delays(settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=400_000)
    with taught(**ALL, **settings) as model, model.streamer.trace() as trace:
        model.assert_equal(rounds=25)
        with model.streamer.step():
            model.assert_equal(rounds=5)
    assert len(of(trace, "step", "compute")) == 30 * 4


@pytest.mark.alone
def test_timing_costs_less_than_one_in_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock with the usual timed steps, and with none. Many small units have the most events per byte."""
    with taught(share=0.5, depth=40, width=1024) as model, torch.no_grad():
        timeline = model.streamer._binding.engine.timeline
        found: dict[bool, list[float]] = {True: [], False: []}
        for is_timed in (True, False) * 5:
            with monkeypatch.context() as patch:
                if not is_timed:
                    patch.setattr(type(timeline), "_is_due", lambda self: False)
                found[is_timed].append(wall_s(model.stack, model.inputs[0], num=17 * 3))
        assert min(found[True]) < 1.01 * min(found[False])


def test_no_event_is_left_after_remove() -> None:
    gc.collect()
    before = sum(isinstance(o, CudaStamp) for o in gc.get_objects())
    with taught(**ALL) as model:
        for _ in range(5):
            model.stack(model.inputs[0])
        with model.streamer.trace():
            model.stack(model.inputs[0])
    gc.collect()
    assert sum(isinstance(o, CudaStamp) for o in gc.get_objects()) <= before


def test_the_host_and_the_device_share_a_clock(tmp_path: Path) -> None:
    with taught(**LARGE) as model:
        trace = traced(model)
    for host, device in zip(of(trace, "step", "host"), of(trace, "step", "compute"), strict=True):
        assert device.end_s > host.begin_s - 1e-3
    trace.save(tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > len(trace.spans)
