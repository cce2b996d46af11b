"""Units of models whose containers have no forward, and of modules that are not called: they stream in order,
whether or
not a call can be traced before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from models import randomise

WIDTH = 32


def parts() -> dict[str, nn.Module]:
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    return {"a": attention, "b": nn.Linear(WIDTH, WIDTH), "c": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())}


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, part in parts().items():
            setattr(self, name, part)


class Uncalled(Bare):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Tree(Bare):
    """With a list in a dict, and a parameter of its own that the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.ModuleDict({"inner": nn.ModuleList([self.c])})


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "list": lambda: nn.ModuleList(parts().values()),
    "dict": lambda: nn.ModuleDict(parts()),
    "bare": Bare,
    "uncalled": Uncalled,
    "tree": Tree,
}


def called(layer: Any) -> list[Any]:
    if isinstance(layer, nn.ModuleList):
        return list(layer)
    if isinstance(layer, nn.ModuleDict):
        return list(layer.values())
    return [layer.a, layer.b, layer.c["inner"][0] if isinstance(layer, Tree) else layer.c]


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], by_value: bool) -> None:
        super().__init__()
        self.layers, self.by_value = nn.ModuleList(make() for _ in range(6)), by_value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_value and x.abs().max().item() > 1e9:
            x = x.clamp(-1, 1)
        for layer in self.layers:
            attention, *others = called(layer)
            x = x + attention(x, x, x, need_weights=False)[0]
            for other in others:
                x = x + torch.tanh(other(x))
        return x


@pytest.mark.few(6)
@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("share", [0.4, 0.7])
@pytest.mark.parametrize("name", LAYERS)
def test_no_weight_is_copied_on_demand(name: str, share: float, by_value: bool) -> None:
    model, x = randomise(Net(LAYERS[name], by_value), 0).eval(), torch.randn(1, 8, WIDTH)
    nbytes = sum(p.nbytes for p in model.parameters())
    with torch.no_grad():
        want = model(x)
        with weightstream.offload(model, device="cpu", device_budget=int(share * nbytes)) as streamer:
            for _ in range(5):
                assert torch.equal(model(x), want)
            assert streamer.learned
            before = streamer.stats()
            for _ in range(2):
                assert torch.equal(model(x), want)
            assert streamer.stats().fills > before.fills
            assert streamer.stats().unplanned_fills == before.unplanned_fills


@pytest.mark.parametrize("kind", [nn.ParameterList, nn.ParameterDict])
def test_containers_of_parameters(kind: Any) -> None:
    """The model reads them: they stay on the device if they fit, and are right if they do not."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
            scales = {str(i): nn.Parameter(torch.empty(WIDTH)) for i in range(6)}
            self.scales = kind(scales.values() if kind is nn.ParameterList else scales)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.abs().max().item() > 1e9:
                return x
            for index, block in enumerate(self.blocks):
                x = block(x) * self.scales[index if kind is nn.ParameterList else str(index)]
            return x

    model, x = randomise(Reading(), 0).eval(), torch.randn(2, WIDTH)
    with torch.no_grad():
        want = model(x)
        with weightstream.offload(model, device="cpu", device_budget="12KiB") as streamer:
            for _ in range(4):
                assert torch.equal(model(x), want)
            before = streamer.stats()
            assert torch.equal(model(x), want)
            assert streamer.learned
            assert streamer.stats().unplanned_fills == before.unplanned_fills


def test_the_called_blocks_are_compiled() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for first, second in self.layers:
                x = second(torch.tanh(first(x)))
            return x

    model, x = randomise(Pairs(), 0).eval(), torch.randn(2, WIDTH)
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget="16KiB") as streamer:
        want = model(x)
        streamer.compile("blocks", backend="eager")
        assert torch.equal(model(x), want)
        assert all(part._compiled_call_impl is not None for layer in model.layers for part in layer)
    assert all(part._compiled_call_impl is None for layer in model.layers for part in layer)
