"""Random delays on both streams and poison before each copy, in every mode. Every omitted wait is detected."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from stack import ALL, Slow, Taught, slow, taught
from weightstream.runtime.devices.backend import Event, Side, StepEnd
from weightstream.runtime.devices.cuda import CudaBackend
from weightstream.runtime.ring.engine import Engine
from weightstream.runtime.ring.recording import Recording
from wrapped import ClockBackend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MOST_CYCLES = 400_000  # as long as a copy of a small block
SMALL: dict[str, Any] = {"depth": 5, "width": 512}
PLANS: dict[str, dict[str, Any]] = {"all": SMALL | ALL, "share": SMALL | {"share": 0.45}}
ROUNDS = 250  # of four steps


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed"])
def test_a_thousand_steps(fixed: bool, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=MOST_CYCLES)
    with taught(**PLANS[plan]) as model, model.streamer.step() if fixed else nullcontext():
        model.assert_equal(rounds=ROUNDS)


def launch(model: Taught, num_graphs: int = 25) -> None:
    """A graph has fixed delays of its own, so there must be many graphs."""
    for _ in range(num_graphs):
        step = model.captured()
        with model.streamer.step():
            model.assert_equal(step, rounds=ROUNDS // num_graphs)


@pytest.mark.parametrize("plan", PLANS)
def test_a_thousand_steps_from_graphs(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=MOST_CYCLES)
    with taught(**PLANS[plan]) as model:
        launch(model)


class Early(Recording):
    """Compute does not wait for the copies inside a graph."""

    def _fill(self, unit: int) -> None:
        super()._fill(unit)
        self._held[unit] = None


class Hasty(Recording):
    """Copies inside a graph do not wait for the last read of the bytes that they overwrite."""

    def _last_reader(self, unit: int) -> int | None:
        return None


@pytest.mark.alone
@pytest.mark.parametrize("kind", [Early, Hasty])
def test_an_omitted_wait_inside_a_graph_is_detected(kind: type[Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=MOST_CYCLES)
    monkeypatch.setattr("weightstream.runtime.ring.graphs.Recording", kind)
    with taught(**PLANS["all"]) as model, pytest.raises(AssertionError):
        launch(model)


class Edge(torch.cuda.Event):
    """An event inside a graph."""


class Unordered(Slow):
    """Omits a stream's waits for events outside of a graph: for fills before it, or reads before a fill."""

    left_out: Side | None = None

    def edge(self) -> Event:
        return Edge()

    def wait(self, side: Side, event: Event) -> None:
        inside = side is Side.COMPUTE
        if side is not self.left_out or self.capturing() is not inside or isinstance(event, Edge):
            super().wait(side, event)


@pytest.mark.alone
@pytest.mark.parametrize("side", [Side.COMPUTE, Side.COPY])
def test_an_omitted_wait_between_a_graph_and_its_neighbours_is_detected(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, base=Unordered, most_cycles=MOST_CYCLES)
    with taught(**PLANS["all"]) as model:
        monkeypatch.setattr(model.streamer._backend, "left_out", side)
        step = model.captured()
        with pytest.raises(AssertionError), model.streamer.step():
            model.assert_equal(step, rounds=ROUNDS)


class Forgetful(ClockBackend):
    """Copies do not wait for reads."""

    def wait(self, side: Side, event: Event) -> None:
        if side is not Side.COPY:
            super().wait(side, event)


def clocked(monkeypatch: pytest.MonkeyPatch, kind: type[ClockBackend]) -> list[ClockBackend]:
    """Give streamers that are opened from now on a clock checker, which gets every unit that compute reads."""
    clocks: list[ClockBackend] = []

    def backend(device: torch.device, **options: Any) -> ClockBackend:
        clocks.append(kind(CudaBackend(device, **options)))
        return clocks[-1]

    plain = Engine.wait

    def wait(self: Engine, unit: int) -> None:
        plain(self, unit)
        clocks[-1].read(self.copies[unit])

    monkeypatch.setattr("weightstream.runtime.devices.cuda.CudaBackend", backend)
    monkeypatch.setattr(Engine, "wait", wait)
    return clocks


@pytest.mark.parametrize("plan", PLANS)
def test_the_clock_checker_agrees(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = clocked(monkeypatch, ClockBackend)
    with taught(**PLANS[plan]) as model:
        for _ in range(5):
            model.assert_equal(rounds=5)
            with model.streamer.step():
                model.assert_equal(rounds=5)
        [clock] = clocks
        assert clock._accesses
        assert clock.races == []


def test_the_clock_checker_detects_an_omitted_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = clocked(monkeypatch, Forgetful)
    with suppress(AssertionError), taught(**PLANS["all"]) as model:  # right or wrong: the clock needs no luck
        for x in model.inputs:
            model.stack(x)
    assert any("no event orders the fill" in race for race in clocks[0].races)


def in_place(weight: torch.Tensor) -> None:
    weight.mul_(-0.5)


def through_data(weight: torch.Tensor) -> None:
    weight.data.mul_(-0.5)


def by_index(weight: torch.Tensor) -> None:
    weight[:] = weight * -0.5


def through_a_view(weight: torch.Tensor) -> None:
    weight.view(-1).mul_(-0.5)


def with_others(weight: torch.Tensor) -> None:
    torch._foreach_mul_([weight], -0.5)


def loaded(weight: torch.Tensor) -> None:
    holder = torch.nn.Module()
    holder.weight = weight
    holder.load_state_dict({"weight": weight * -0.5})


def updates(monkeypatch: pytest.MonkeyPatch, write: Callable[[torch.Tensor], None], fixed: bool = False) -> None:
    """Weights are updated after each step, while its copies are late. As in a plain model, the update comes after
    them."""
    slow(monkeypatch, most_cycles=4_000_000)
    with taught(**SMALL, share=0.4) as model:
        for x in model.inputs * 4:
            with model.streamer.step() if fixed else nullcontext():
                found = model.stack(x)
            want = model.plain(x)
            for stack in (model.stack, model.plain):
                for block in stack.blocks:
                    write(block.down.weight)
            assert torch.equal(found, want)


@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed"])
@pytest.mark.parametrize("write", [in_place, through_data, by_index, through_a_view, with_others, loaded])
def test_an_update_waits_for_the_copies_of_the_previous_step(
    write: Callable[[torch.Tensor], None], fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates(monkeypatch, write, fixed)


@pytest.mark.alone
def test_an_update_that_waits_for_nothing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepEnd, "wait", lambda _: None)
    with pytest.raises(AssertionError):
        updates(monkeypatch, in_place)
