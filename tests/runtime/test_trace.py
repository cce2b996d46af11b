"""A trace: its spans for every step, its file, its cost and its refusals; the command."""

from __future__ import annotations

import json
import re
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_timeline import BUDGET, DEPTH, WIDTH, Slow, model, opened, settled
from torch import nn
from typer.testing import CliRunner

import weightstream
from models import TEXT
from weightstream.cli import app
from weightstream.errors import OffloadError
from weightstream.runtime.ring.timeline import Timeline
from weightstream.runtime.trace import Span, Trace

pytestmark = pytest.mark.usefixtures("nothing_foreseen")

NBYTES = WIDTH * WIDTH * 4


def x(seed: int, num: int = 2) -> torch.Tensor:
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def traced(module: nn.Module, streamer: weightstream.Streamer, num_steps: int = 3) -> Trace:
    """A trace of steps, each with the plain model's bits."""
    plain = model()
    with streamer.trace() as trace:
        for seed in range(num_steps):
            assert torch.equal(module(x(seed)), plain(x(seed)))
    return trace


def of(trace: Trace, kind: str, row: str | None = None) -> list[Span]:
    return [span for span in trace.spans if span.kind == kind and row in (None, span.row)]


def needs(wait: Span, fills: list[Span]) -> Span | None:
    """The fill that a wait is for, or None if it began before the trace."""
    return next((f for f in reversed(fills) if f.name == wait.name and f.begin_s < wait.end_s), None)


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_every_unit_fill_and_step_is_in_the_trace(num_before: int) -> None:
    module = model()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer, torch.no_grad():
        for seed in range(num_before):
            module(x(seed))
        before = streamer.stats()
        trace = traced(module, streamer)
        after, plan = streamer.stats(), streamer.plan
        streamed = [unit.name for u, unit in enumerate(plan.manifest.units) if plan.streams(u)]
        assert [span.name for span in of(trace, "step", "compute")] == ["forward 1", "forward 2", "forward 3"]
        assert [span.name for span in of(trace, "unit")] == streamed * 3
        fills = of(trace, "fill")
        assert len(fills) == after.fills - before.fills > 0
        assert sum(fill.nbytes for fill in fills) == after.filled_nbytes - before.filled_nbytes
        assert all(fill.planned for fill in fills)
        assert module(x(1)).shape == (2, WIDTH)
        assert len(of(trace, "step", "compute")) == 3  # later steps are not in it


def test_spans_are_at_their_place() -> None:
    module = model()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer:
        trace = traced(module, streamer, 6)
        steps = {span.step: span for span in of(trace, "step", "compute")}
        for span in of(trace, "unit") + of(trace, "wait"):
            assert steps[span.step].begin_s <= span.begin_s <= span.end_s <= steps[span.step].end_s
        for row in ("compute", "copy"):
            for earlier, later in pairwise(span for span in trace.spans if span.row == row and span.kind != "step"):
                assert earlier.end_s <= later.begin_s
        for host, device in zip(of(trace, "step", "host"), of(trace, "step", "compute"), strict=True):
            assert abs(host.begin_s - device.begin_s) < 0.1


def test_a_slow_copy_is_a_long_fill_and_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, module = Slow(0.03), model()
    with opened(monkeypatch, backend, module) as streamer, torch.no_grad():
        module(x(0))
        backend.slow = {module[3].weight.data_ptr()}
        trace = traced(module, streamer)
        fills = of(trace, "fill")
        assert {fill.name for fill in fills if fill.seconds > 0.03} == {"3"}
        waits = [(wait, needed) for wait in of(trace, "wait") if wait.name == "3" and (needed := needs(wait, fills))]
        assert len(waits) >= 2
        for wait, fill in waits:
            assert fill.end_s <= wait.end_s
            assert wait.seconds > 0.02


class Reordered(nn.Module):
    """Runs its layers in the order of `order`, which no plan knows in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.order = model(), list(range(DEPTH))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            y = self.layers[index](y)
        return y


def test_a_fill_on_demand_is_not_planned() -> None:
    module = Reordered()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer, torch.no_grad():
        module(x(0))
        before = streamer.stats().unplanned_fills
        module.order = [0, 1, 2, 3, 0, 4, 5]
        with streamer.trace() as trace:
            module(x(0))
        on_demand = [fill.name for fill in of(trace, "fill") if not fill.planned]
        assert "layers.0" in on_demand
        assert len(on_demand) == streamer.stats().unplanned_fills - before


def test_a_unit_outside_of_a_step_belongs_to_none() -> None:
    module = model()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer, torch.no_grad():
        module(x(0))
        with streamer.trace() as trace:
            module[4](x(0))
            module[1](x(0))
        assert [span.name for span in of(trace, "unit")] == ["4", "1"]
        assert {span.step for span in trace.spans} == {0}


def test_names_follow_when_the_order_is_learned_meanwhile() -> None:
    module = Reordered()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer, torch.no_grad():
        module.order.reverse()
        with streamer.trace() as trace:
            for seed in range(3):
                module(x(seed))
        streamed = [f"layers.{i}" for i in module.order if streamer.plan.streams(i)]
        assert [span.name for span in of(trace, "unit")] == streamed * 3


# -- the file ----------------------------------------------------------------------------------------------------------


def saved(trace: Trace, path: Path) -> list[dict[str, Any]]:
    trace.save(path)
    return json.loads(path.read_text())["traceEvents"]


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    module = model()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer:
        trace = traced(module, streamer)
    events = saved(trace, tmp_path / "trace.json")
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(named.values()) == ["compute", "copy", "host"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["Sequential on cpu"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(trace.spans)
    for event, span in zip(complete, trace.spans, strict=True):
        assert (event["cat"], named[event["tid"]], event["args"]["step"]) == (span.kind, span.row, span.step)
        assert event["ts"] == pytest.approx(1e6 * span.begin_s, abs=1e-3)
        assert event["dur"] == pytest.approx(1e6 * span.seconds, abs=1e-3)
        if span.kind == "fill":
            assert event["args"]["unit"] == span.name
            assert event["args"]["nbytes"] == NBYTES
            assert event["args"]["planned"] is True
            assert event["args"]["GB/s"] == pytest.approx(NBYTES / span.seconds / 1e9, abs=0.01)


# -- cost and refusals -------------------------------------------------------------------------------------------------


def test_a_full_trace_is_reported_once_and_the_steps_continue(caplog: pytest.LogCaptureFixture) -> None:
    module, plain = model(), model()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer, torch.no_grad():
        module(x(0))
        with streamer.trace() as trace:
            trace.limit = 50
            for seed in range(12):
                assert torch.equal(module(x(seed)), plain(x(seed)))
        assert 30 < len(trace.spans) <= 50
        assert [r.levelname for r in caplog.records if "full at 50 spans" in r.message] == ["WARNING"]
        units = settled(streamer).units
        assert all(unit.compute_s > 0 for unit in units)
        with streamer.trace() as trace:
            module(x(0))
        assert len(trace.spans) > DEPTH


def test_two_at_once_and_one_after_remove_are_refused() -> None:
    module = model()
    streamer = weightstream.offload(module, device="cpu", device_budget=BUDGET)
    with streamer.trace(), pytest.raises(OffloadError, match="inside of trace"), streamer.trace():
        pass
    with streamer.trace(), torch.no_grad():
        module(x(0))
    streamer.remove()
    with pytest.raises(OffloadError, match="after remove"), streamer.trace():
        pass


@torch.no_grad()
def test_removed_inside_a_trace() -> None:
    module, plain = model(), model()
    streamer = weightstream.offload(module, device="cpu", device_budget=BUDGET)
    with streamer.trace() as trace:
        module(x(0))
        streamer.remove()
        assert torch.equal(module(x(1)), plain(x(1)))
    assert len(of(trace, "step", "compute")) == 1


@torch.no_grad()
def test_an_error_inside_ends_the_trace() -> None:
    module = model()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer:
        with pytest.raises(RuntimeError), streamer.trace():
            module(torch.ones(1, WIDTH + 1))
        assert len(of(traced(module, streamer), "step", "compute")) == 3


def test_steps_of_other_threads_are_traced_too() -> None:
    module, plain = model(), model()
    same: list[bool] = []

    def run() -> None:
        with torch.no_grad():
            same.extend(torch.equal(module(x(seed)), plain(x(seed))) for seed in range(10))

    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer, torch.no_grad():
        module(x(0))
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        with streamer.trace() as trace:
            for seed in range(5):
                same.append(torch.equal(module(x(seed)), plain(x(seed))))
            for thread in threads:
                thread.join()
    assert same == [True] * 35
    steps = of(trace, "step", "compute")
    assert 5 <= len(steps) <= 35
    assert all(earlier.end_s <= later.begin_s for earlier, later in pairwise(steps))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    from words import tokenizer

    path = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def command(folder: Path, *flags: object) -> Any:
    arguments = ["trace", str(folder), "--device", "cpu", "--prompt", "w5 w9 w23", *map(str, flags)]
    return CliRunner().invoke(app, arguments)


def test_the_command_writes_the_prompt_and_the_steps(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    result = command(folder, "--device-budget", "512KiB", "--max-new-tokens", 4, "--out", out)
    assert result.exit_code == 0, result.output
    events = json.loads(out.read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "step"] == [f"forward {n}" for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in result.output
    labels = [line.partition(":")[0].strip() for line in lines if line[:10].endswith(":")]
    labels = [label for label in labels if label != "advice"]  # shown on a busy machine
    assert labels[:6] == ["plan", "prompt", "decode", "predicted", "compute", "copies"]
    assert labels[6:] in (["waits", "trace"], ["trace"])
    assert f"{out}(" in "".join(result.stdout.split())  # wherever the line breaks
    assert "https://ui.perfetto.dev" in lines[-1]
    moved = sum(e["args"]["nbytes"] for e in events if e["ph"] == "X" and e["cat"] == "fill")
    assert f"({moved} bytes) at " in result.stdout
    if labels[6] == "waits":
        waited = {e["args"]["unit"] for e in events if e.get("cat") == "wait"}
        named = re.findall(r"(\S+) \([\d.,]+ [mu]s\)", result.stdout.partition("longest for ")[2])
        assert 0 < len(named) <= 5
        assert set(named) <= waited


def test_the_command_refuses_pipelines(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    result = command(tmp_path)
    assert result.exit_code == 2
    assert "is a pipeline of diffusers" in result.stderr


def test_the_command_if_nothing_streams(folder: Path, tmp_path: Path) -> None:
    result = command(folder, "--device-budget", "1GiB", "--out", tmp_path / "t.json")
    assert result.exit_code == 0, result.output
    assert "copies: " not in result.stdout
    assert "longest for" not in result.stdout


def test_an_impossible_file_is_reported_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    result = command(tmp_path / "no model", "--out", tmp_path / "none" / "t.json")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --out {tmp_path}/none/t.json: No such file or directory; ")
    assert command(folder, "--out", "/sys/t.json").stderr.startswith("error: --out /sys/t.json: ")


def test_an_interrupt_at_the_begin_of_a_trace_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    with weightstream.offload(module, device="cpu", device_budget=BUDGET) as streamer:
        begin = Timeline.begin_trace

        def interrupted(timeline: Timeline, trace: Trace) -> None:
            begin(timeline, trace)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Timeline, "begin_trace", interrupted)
            with pytest.raises(KeyboardInterrupt), streamer.trace():
                pytest.fail("the block is not entered")
        assert of(traced(module, streamer), "step")
        with streamer.trace() as outer:
            with pytest.raises(OffloadError, match="inside of trace"), streamer.trace():
                pytest.fail("the block is not entered")
            module(x(0))
        assert of(outer, "step"), "the second one did not end it"
