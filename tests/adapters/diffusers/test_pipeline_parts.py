"""Components that come and go, or that share modules: the plain pipeline's bits, and its memory."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from models import randomise
from weightstream.runtime.ring.binding import Binding

diffusers = pytest.importorskip("diffusers")

WIDTH = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Pipe(diffusers.DiffusionPipeline):  # type: ignore[misc]
    def __init__(self, net: Any, control: Any) -> None:
        super().__init__()
        self.register_modules(net=net, control=control)

    def __call__(self, x: torch.Tensor, steps: int = 5) -> torch.Tensor:
        for _ in range(steps):
            x = self.net(x + self.control(x)) if self.control is not None else self.net(x)
        return x


def built(shared: int = 0) -> Pipe:
    """A pipeline whose two components share a number of blocks, as a ControlNet shares those of the transformer."""
    pipe = Pipe(randomise(Net(), 0), randomise(Net(), 1))
    for index in range(shared):
        pipe.control.blocks[index] = pipe.net.blocks[index]
    return pipe


def offloaded(pipe: Pipe, budget: str) -> Any:
    weightstream.offload_pipeline(pipe, device="cpu", device_budget=budget, example_inputs={"x": torch.randn(2, WIDTH)})
    return pipe.weightstream


@pytest.mark.parametrize("shared", [1, 2, 6])
@pytest.mark.parametrize("budget", ["36KiB", "70KiB", "110KiB"])
def test_shared_blocks_of_two_components(
    shared: int, budget: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, plain, stale = built(shared), built(shared), list[object]()
    seen = Binding._stale
    monkeypatch.setattr(Binding, "_stale", lambda self, updated: (stale.extend(updated), seen(self, updated))[1])
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        streamer = offloaded(pipe, budget)
        for _ in range(3):
            assert torch.equal(pipe(x), plain(x))
        assert stale == []
        num = len({id(p) for net in (pipe.net, pipe.control) for p in net.parameters()})
        assert sum(len(s.plan.manifest.aliases) for s in streamer.components.values()) == num
        for own, component in ((plain.net, pipe.net), (plain.control, pipe.control)):
            own.blocks[0].weight.mul_(1.5)
            component.blocks[0].weight.mul_(1.5)
            assert torch.equal(pipe(x), plain(x))
        streamer.remove()
        assert torch.equal(pipe(x), plain(x))
    assert not [record for record in caplog.records if "outside of the model" in record.message]


def fills_of(shared: int) -> int:
    pipe, x = built(shared), torch.randn(2, WIDTH)
    with torch.no_grad(), offloaded(pipe, "70KiB") as streamer:
        pipe(x)
        pipe(x)
        before = sum(stats.fills for stats in streamer.stats().components.values())
        pipe(x)
        return sum(stats.fills for stats in streamer.stats().components.values()) - before


def test_shared_blocks_are_not_filled_more_often() -> None:
    assert fills_of(2) <= fills_of(0)


def test_a_tensor_shared_by_modules_of_two_components() -> None:
    pipe, x = built(), torch.randn(2, WIDTH)
    pipe.control.blocks[2].weight = pipe.net.blocks[3].weight
    plain = copy.deepcopy(pipe)
    plain.control.blocks[2].weight = plain.net.blocks[3].weight
    with torch.no_grad(), offloaded(pipe, "70KiB"):
        for _ in range(3):
            assert torch.equal(pipe(x), plain(x))
        plain.net.blocks[3].weight.mul_(2)
        pipe.net.blocks[3].weight.mul_(2)
        assert torch.equal(pipe(x), plain(x))


@pytest.mark.parametrize("way", ["none", "del"])
def test_a_dropped_component_is_freed(way: str) -> None:
    pipe, plain, x = built(), built(), torch.randn(2, WIDTH)
    with torch.no_grad(), offloaded(pipe, "70KiB") as streamer:
        pipe(x)
        before, gone = streamer.stats().held_nbytes, weakref.ref(pipe.control)
        pipe.register_modules(control=None)
        if way == "del":
            del pipe.control
            pipe.control = None
        gc.collect()
        assert gone() is None
        assert sum(streamer.stats().held_nbytes.values()) < sum(before.values())
        assert list(streamer.components) == ["net"]
        plain.control = None
        for _ in range(2):
            assert torch.equal(pipe(x), plain(x))
    assert torch.equal(pipe(x), plain(x))


def test_a_dropped_component_that_is_held_elsewhere_keeps_streaming() -> None:
    pipe, plain, x = built(), built(), torch.randn(2, WIDTH)
    with torch.no_grad(), offloaded(pipe, "70KiB"):
        control = pipe.control
        pipe.control = None
        gc.collect()
        assert torch.equal(control(x), plain.control(x))
        assert torch.equal(pipe.net(x), plain.net(x))
    assert torch.equal(control(x), plain.control(x))


def test_bytes_beyond_the_budget_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    pipe, x = built(), torch.randn(2, WIDTH)
    with torch.no_grad(), offloaded(pipe, "70KiB") as streamer, caplog.at_level(logging.WARNING, "weightstream"):
        pipe(x)
        assert not caplog.records
        plans = {name: s.plan for name, s in streamer.components.items()}
        for _ in range(3):
            for block in pipe.net.blocks:
                block.wide = nn.Linear(WIDTH, WIDTH)
            pipe(x)
        (record,) = caplog.records
        assert f"than the budget of 70.0KiB ({70 << 10} bytes)" in record.message
        held = streamer.stats().held_nbytes["device"]
        assert f"({held} bytes)" in record.message
        assert {name: s.plan.resident for name, s in streamer.components.items()} == {
            name: plan.resident for name, plan in plans.items()
        }
