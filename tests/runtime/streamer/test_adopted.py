"""Tensors besides weights that come and go, such as adapters: they are moved to the device each time."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from models import randomise
from weightstream.errors import OffloadError
from weightstream.runtime.streamer import attachment

WIDTH = 32
THERE = torch.device("cpu", 0)  # by its name, another device than that of any tensor


class Adapted(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.low = inner, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.low(x)


def adapt(model: nn.Sequential) -> list[torch.Tensor]:
    for index in range(len(model)):
        model[index] = Adapted(model[index])
    return [block.low.weight for block in model]


def unload(model: nn.Sequential) -> None:
    for index in range(len(model)):
        model[index] = model[index].inner


def built() -> nn.Sequential:
    return randomise(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]), 0).eval()


def test_adapters_are_adopted_again_after_known_ones_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, moved = built(), torch.randn(2, WIDTH), list[tuple[torch.Tensor, torch.device]]()
    monkeypatch.setattr(attachment, "to_device", lambda leaf, device: moved.append((leaf.tensor, device)))
    adapt(model)
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget="14KiB") as streamer:
        modules: Any = streamer._modules
        model(x)
        assert modules.adopted_nbytes == 0
        for _ in range(3):
            unload(model)
            model(x)
            assert modules.adopted_nbytes == 0
            assert not modules.was_replaced()
            added = adapt(model)
            moved.clear()
            modules.adopt(THERE)
            assert all(any(weight is tensor for tensor, _ in moved) for weight in added)
            assert len(moved) == len(added)
            assert modules.adopted_nbytes == sum(weight.nbytes for weight in added)
            assert streamer.stats().held_nbytes["device"] >= modules.adopted_nbytes
        unload(model)
        want = built()(x)
        assert torch.equal(model(x), want)


def test_a_replacement_of_a_weight_is_adopted() -> None:
    model, x = built(), torch.randn(2, WIDTH)
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget="14KiB") as streamer:
        modules: Any = streamer._modules
        model(x)
        before = model[2].weight
        model[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        modules.adopt(THERE)
        assert modules.adopted_nbytes == model[2].weight.nbytes
        model[2].weight = before
        modules.adopt(THERE)
        assert modules.adopted_nbytes == 0
        assert torch.equal(model(x), built()(x))


def test_an_undetectable_replacement_of_a_weight_is_an_error_with_the_reason() -> None:
    model, x = built(), torch.randn(2, WIDTH)
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget="14KiB"):
        model(x)
        before = model[2]._parameters["weight"]
        model[2]._parameters["weight"] = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta").t()[:, :5])
        with pytest.raises(OffloadError, match="were replaced while it is offloaded"):
            model(x)
        model[2]._parameters["weight"] = before
        assert torch.equal(model(x), built()(x))


def test_an_error_of_the_model_stays_its_own_after_adapters_are_gone() -> None:
    model, x = built(), torch.randn(2, WIDTH)
    adapt(model)
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget="14KiB"):
        model(x)
        unload(model)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(2, WIDTH + 1))


def test_bytes_beyond_the_budget_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = built(), torch.randn(2, WIDTH)
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget="14KiB") as streamer:
        model(x)
        plan = streamer.plan
        with caplog.at_level(logging.WARNING, "weightstream"):
            for _ in range(3):
                adapt(model)
                model(x)
                unload(model)
                model(x)
        assert [record.message for record in caplog.records if "than the budget of 14.0KiB" in record.message]
        assert len(caplog.records) == 1
        assert streamer.plan.resident == plan.resident


def test_the_result_of_a_pre_hook_does_not_count_as_a_weight() -> None:
    model = built()
    for block in model:
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(block)
    nbytes, x = sum(p.nbytes for p in model.parameters()), torch.randn(2, WIDTH)
    with torch.no_grad():
        want = model(x)
        with weightstream.offload(model, device="cpu", device_budget=nbytes // 2) as streamer:
            computed = [block.weight for block in model]
            for _ in range(4):
                assert torch.equal(model(x), want)
            assert streamer.plan.manifest.nbytes == nbytes
            assert streamer.stats().unplanned_fills == 0
            units = streamer.plan.manifest.units
            opened = [int(unit.name) for i, unit in enumerate(units) if streamer.plan.opens(i)]
            assert opened
            # results of a unit stay where they were; otherwise all weights would be moved to the device
            assert all(torch.equal(model[index].weight, computed[index]) for index in opened)


class Sliced(nn.Module):
    """Makes a list of layers in each forward, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(built())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: len(self.layers)]:
            x = layer(x)
        return x


def test_a_slice_of_a_list_of_layers_is_no_new_module() -> None:
    model, x = Sliced().eval(), torch.randn(2, WIDTH)
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget="14KiB") as streamer:
        modules: Any = streamer._modules
        for _ in range(2):
            model(x)
            assert not modules.has_new
        model.layers[2] = Adapted(model.layers[2])
        assert modules.has_new
        model(x)
        assert not modules.has_new
        model.layers[2].low.extra = nn.Parameter(torch.ones(1))
        assert modules.has_new, "a module that was added is of the model, too"
