"""Experts that an engine runs inside an operator of its own, by other methods than `forward`, as vLLM does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from models import floats, randomise
from weightstream.api.offloaders import BudgetOffloader, PrefetchOffloader
from weightstream.integrations.vllm.experts import enter_by_forward

NUM_LAYERS, NUM_EXPERTS, WIDTH = 6, 4, 64
RUNNERS: dict[str, nn.Module] = {}


class Routed(nn.Module):
    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias  # owned by the gate
        self.w13_weight = nn.Parameter(torch.empty(NUM_EXPERTS, 2 * WIDTH, WIDTH))
        self.w2_weight = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, WIDTH))

    def forward(self, *args: Any) -> torch.Tensor:
        raise AssertionError("one of the other methods is to be called")

    def forward_modular(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = (scores + self.bias).argmax(-1)
        gate, up = torch.einsum("th,toh->to", x, self.w13_weight[ids]).chunk(2, -1)
        return torch.einsum("th,toh->to", gate.tanh() * up, self.w2_weight[ids])

    def forward_monolithic(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return -self.forward_modular(x, scores)


class Runner(nn.Module):
    """Looks itself up by name inside an operator, which no dispatch mode sees into."""

    def __init__(self, name: str, bias: nn.Parameter, method: str) -> None:
        super().__init__()
        self.routed_experts = Routed(bias)
        self._name, self._method = name, method
        RUNNERS[name] = self

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.ops.weightstream_tests.moe_forward(x, scores, self._name)

    def run(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return getattr(self.routed_experts, self._method)(x, scores)


@torch.library.custom_op("weightstream_tests::moe_forward", mutates_args=())
def moe_forward(x: torch.Tensor, scores: torch.Tensor, name: str) -> torch.Tensor:
    return RUNNERS[name].run(x, scores)  # type: ignore[operator]


class Layer(nn.Module):
    def __init__(self, name: str, method: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = Runner(name, self.gate.bias, method)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x, self.gate(x))


def layers(owner: str, method: str) -> list[nn.Module]:
    return [randomise(Layer(f"{owner}.{index}", method), index) for index in range(NUM_LAYERS)]


def run(modules: list[nn.Module], seed: int) -> torch.Tensor:
    x = floats(seed, 3, WIDTH)
    with torch.no_grad():
        for module in modules:
            x = module(x)
    return x.clone()


def step_of(modules: list[nn.Module]) -> Callable[[], None]:
    def step() -> None:
        run(modules, 0)

    return step


@pytest.fixture(params=["forward_modular", "forward_monolithic"])
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    RUNNERS.clear()
    yield request.param
    RUNNERS.clear()


@pytest.mark.parametrize("has_budget", [True, False])
def test_experts_are_units_that_stream(method: str, has_budget: bool) -> None:
    plain, modules = layers("plain", method), layers("ours", method)
    nbytes = sum(p.nbytes for module in modules for p in module.parameters())
    offloader = BudgetOffloader(nbytes // 2, codec="none") if has_budget else PrefetchOffloader(1, 1, 2)
    assert offloader.wrap_modules(modules) == modules
    enter_by_forward(modules)
    offloader.post_init(step_of(modules), is_compiled=True)
    found = offloader.streamer
    assert found is not None
    plan = found.plan
    streamed = {plan.manifest.units[unit].name for unit in range(len(plan.manifest.units)) if plan.streams(unit)}
    assert len(streamed) >= NUM_LAYERS // 2
    assert all(name.endswith("routed_experts" if has_budget else ("routed_experts", "gate")) for name in streamed)
    assert all(f"{layer}.gate.bias" in plan.resident for layer in range(NUM_LAYERS))  # two modules read it
    for seed in range(2 * NUM_LAYERS):
        assert torch.equal(run(modules, seed), run(plain, seed))
    assert found.stats().fills > 0
    assert found.stats().unplanned_fills == 0


def test_other_callers_enter_them_as_before(method: str) -> None:
    plain, modules = layers("plain", method), layers("ours", method)
    for _ in range(2):  # a failed engine may be started again
        enter_by_forward(modules)
    assert torch.equal(run(modules, 1), run(plain, 1))


def test_shared_experts_use_no_stream_of_their_own() -> None:
    module = nn.Linear(2, 2)
    module._stream = torch.Stream(stream_id=0, device_index=0, device_type=1)  # of a GPU, also where there is none
    module._streams = ["not one"]
    enter_by_forward([nn.Sequential(module)])
    assert module._stream is None
    assert module._streams == ["not one"]
