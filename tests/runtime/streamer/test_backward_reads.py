"""Which unit a node of autograd reads: weights that a unit passes to another, paths that change, checkpoints inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import training
import weightstream
from models import randomise
from training import (
    RANK,
    WIDTH,
    Keeps,
    Recompute,
    assert_equal,
    inputs,
    offloaded,
    poisoned,
    run_blocks,
    square,
    trained,
)
from weightstream.errors import OffloadError

__all__ = ["poisoned"]
pytestmark = pytest.mark.usefixtures("poisoned")


class Adapter(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False))


class Shared(nn.Module):
    """A unit that others call, perhaps with a weight of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(x @ self.weight)
        return y if other is None else torch.tanh(y @ other) + y


class Block(nn.Module):
    way = "plain"

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.own, self.adapter = nn.Linear(WIDTH, WIDTH, bias=False), Adapter()
        self.outside = [shared]  # no child of this block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.adapter(x)
        if self.way == "checkpointed":
            return x + (checkpoint(self.around, x, use_reentrant=True) if torch.is_grad_enabled() else self.around(x))
        if self.way == "passed":
            return x + torch.tanh(self.own(self.outside[0](x, self.own.weight)))
        return x + (Keeps.apply(x, self.own.weight) if self.way == "kept" else self.own(x))

    def around(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(self.outside[0](torch.tanh(self.own(x)))))


class Net(nn.Module):
    def __init__(self, recompute: Recompute) -> None:
        super().__init__()
        self.shared = Shared()
        self.blocks, self.recompute = nn.ModuleList(Block(self.shared) for _ in range(4)), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run_blocks(self.blocks, x, self.recompute)


def net(recompute: Recompute, way: str) -> Net:
    model = randomise(Net(recompute), 5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    for block in model.blocks:
        block.way = way
    return model.train()  # type: ignore[return-value]


def in_grain(streamer: weightstream.Streamer, index: int) -> None:
    replanning = streamer._installed.replanning
    streamer.switch(replanning.plan(replanning.inputs.grains[index]))


@pytest.mark.parametrize("recompute", ["kept", "recomputed", "reentrant"])
def test_a_weight_that_a_unit_passes_to_another(recompute: str) -> None:
    wanted, model = trained(net(recompute, "passed"), 2), net(recompute, "passed")
    with offloaded(model) as streamer:
        in_grain(streamer, 0)
        assert_equal(trained(model, 2), wanted)
        assert "blocks.3.own.weight" not in streamer.plan.resident


@pytest.mark.parametrize("recompute", ["kept", "recomputed", "reentrant"])
def test_nodes_that_keep_weights_and_that_come_in_a_later_step(recompute: str) -> None:
    """They save nothing, so that only a hook of their own opens the unit."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.step = getattr(model, "step", 0) + 1
        for block in model.blocks:
            block.way = "kept" if model.step > 2 else "plain"
        return square(model, x)

    wanted, model = trained(net(recompute, "plain"), 3, loss), net(recompute, "plain")
    with offloaded(model) as streamer:
        in_grain(streamer, 0)
        assert_equal(trained(model, 3, loss), wanted)


def test_a_checkpoint_in_a_unit_around_a_call_of_another_is_not_silently_wrong() -> None:
    """What is computed again reads weights of the unit, which closes where the other one opens."""
    model = net("reentrant", "checkpointed")
    with offloaded(model) as streamer:
        in_grain(streamer, 0)
        with pytest.raises(OffloadError, match=r"reads weights of blocks\.\d, which is closed.* run this step again"):
            trained(model, 1)


def test_a_change_of_units_after_a_training_step() -> None:
    """The order that the step has shown is of the former units."""
    plain, model = net("reentrant", "plain"), net("reentrant", "plain")
    with offloaded(model, 0.5) as streamer:
        for grain in (2, 0, 2):
            in_grain(streamer, grain)
            assert_equal(trained(model, 1), trained(plain, 1))
            for each in (model, plain):
                square(each, inputs(0, each)).backward()
                each.zero_grad()


class _Viewing(training.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.view, self.stored = self.back.weight.t(), None
        return output


def test_a_view_that_a_training_step_keeps_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = training.net()
    for block in model.blocks:
        block.__class__ = _Viewing
    with offloaded(model, 0.9) as streamer:
        for step in range(2):
            loss = square(model, inputs(step, model))
            loss.backward()
        assert "outlived its forward" in caplog.text
        assert any(name.endswith("back.weight") for name in streamer.plan.resident)


def test_forwards_under_one_autocast_share_casts_of_adapters() -> None:
    """So their gradients are added before they are cast back, as in the plain model."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square(model, x) + square(model, x * 2)

    wanted, model = trained(training.net(), 2, loss), training.net()
    with offloaded(model):
        assert_equal(trained(model, 2, loss), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the compiler's own code
@pytest.mark.parametrize("recompute", ["kept", "recomputed"])
def test_compiled_parts_of_units_stay_compiled_after_the_watched_step(recompute: training.Recompute) -> None:
    calls = list[int]()

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    model = training.net(recompute)
    for block in model.blocks:
        block.eval()
        block.back.forward = torch.compile(block.back.forward, backend=backend)
    with offloaded(model, 0.6):
        square(model, inputs(0, model)).backward()
        assert not calls, "the watch sees operators of eager code"
        model.zero_grad()
        square(model, inputs(0, model)).backward()
        assert calls
