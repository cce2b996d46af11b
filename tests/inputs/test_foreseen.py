"""Calls that are traced before they run: plan, order and granularity already fit the first step, and no bit changes."""

from __future__ import annotations

import logging
from collections import UserDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from models import ARCHITECTURES, FIXTURES
from repeats import thinned
from weightstream.errors import ConfigError
from weightstream.inputs import gathering
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.weights.homes import Homes

WIDTH = 64
LAYER = 4 * WIDTH * WIDTH


class Backwards(nn.Module):
    """Its layers run from the last to the first, and the middle one twice."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return self.layers[len(self.layers) // 2](x)  # type: ignore[no-any-return]


class Looks(Backwards):
    """A forward whose path depends on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def models(kind: type[nn.Module] = Backwards) -> tuple[nn.Module, nn.Module]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(kind().eval())
    return found[0], found[1]


def x(seed: int = 0, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def assert_steps(model: nn.Module, plain: nn.Module, num: int = 3, rows: int = 2) -> None:
    with torch.no_grad():
        for seed in range(num):
            assert torch.equal(model(x(seed, rows)), plain(x(seed, rows)))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the time limit of tracing, for busy machines."""
    monkeypatch.setattr(gathering, "_FOLLOW_S", 300.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the calls that were traced."""
    sizes: list[int] = []
    follow = gathering.follow

    def counted(model: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        sizes.append(next(tensors_in((args, kwargs))).numel())
        return follow(model, args, kwargs, **options)

    monkeypatch.setattr(gathering, "follow", counted)
    return sizes


def test_the_first_step_has_no_unplanned_fills() -> None:
    model, plain = models()
    with weightstream.offload(model, device="cpu", device_budget=4 * LAYER) as streamer:
        assert streamer.plan.manifest.order == tuple(range(8))
        assert_steps(model, plain, 1)
        assert streamer.plan.manifest.order == (7, 6, 5, 4, 3, 2, 1, 0, 4)
        assert streamer.stats().unplanned_fills == 0
        assert_steps(model, plain)
        assert streamer.stats().unplanned_fills == 0


REGULAR = [name for name in FIXTURES if name not in ("OptionalBranch", "OrderByInput")]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", thinned([*REGULAR, "vit", "whisper", "t5", "clip"]))
def test_first_steps_of_models_of_every_kind(name: str) -> None:
    made = FIXTURES[name]() if name in FIXTURES else ARCHITECTURES[name]()
    nbytes = sum(parameter.nbytes for parameter in made.module.parameters())
    try:
        streamer = weightstream.offload(made.module, device="cpu", device_budget=max(1, nbytes * 2 // 3))
    except weightstream.PlanError:
        pytest.skip("not in two thirds of its bytes")
    with streamer, torch.no_grad():
        made.module(**made.inputs(0))
        assert streamer.stats().unplanned_fills == 0
        assert streamer.plan.activation_nbytes > 0


def test_example_inputs_are_traced_ahead(asked: list[int]) -> None:
    model, plain = models()
    for example in (x(), (x(),), {"x": x()}, UserDict(x=x())):
        with weightstream.offload(model, device="cpu", device_budget=4 * LAYER, example_inputs=example) as streamer:
            ahead = streamer.plan
            assert ahead.manifest.order == (7, 6, 5, 4, 3, 2, 1, 0, 4)
            assert ahead.activation_nbytes > 0
            assert_steps(model, plain, 1)
            assert streamer.plan.resident == ahead.resident
            assert streamer.stats().unplanned_fills == 0
    assert asked, "only their shapes are used"


@pytest.mark.parametrize("inputs", [{"y": 1}, (1, 2, 3), ()])
def test_an_example_that_the_forward_does_not_accept_is_refused(inputs: Any) -> None:
    model, plain = models()
    with pytest.raises(ConfigError, match=r"example_inputs: Backwards\.forward\(\) does not take them"):
        weightstream.offload(model, device="cpu", device_budget=4 * LAYER, example_inputs=inputs)
    assert_steps(model, plain)


def test_an_example_for_a_forward_without_a_signature_is_no_error() -> None:
    model, _ = models()
    model.forward = torch.relu  # type: ignore[assignment]
    with weightstream.offload(model, device="cpu", device_budget=4 * LAYER, example_inputs=x()):
        assert torch.equal(model(x()), torch.relu(x()))


def test_an_example_that_cannot_be_traced_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = models(Looks)
    with (
        caplog.at_level(logging.WARNING, "weightstream"),
        weightstream.offload(model, device="cpu", device_budget=4 * LAYER, example_inputs=x()) as streamer,
    ):
        assert streamer.plan.manifest.order == tuple(range(8))
        assert_steps(model, plain)
    assert "a call of Looks with example_inputs cannot be traced" in caplog.text


def test_a_call_that_depends_on_values_is_learned_from_its_first_step(asked: list[int]) -> None:
    model, plain = models(Looks)
    with weightstream.offload(model, device="cpu", device_budget=4 * LAYER) as streamer:
        assert_steps(model, plain, 1)
        assert streamer.stats().unplanned_fills > 0
        before = streamer.stats().unplanned_fills
        assert_steps(model, plain, 4)
        assert streamer.stats().unplanned_fills == before
    assert len(asked) == 1, "one attempt per kind"


def test_only_a_few_calls_of_other_sizes_are_traced(asked: list[int]) -> None:
    model, plain = models()
    with weightstream.offload(model, device="cpu", device_budget=4 * LAYER):
        for rows in (2, 3, 2, 3, 16, 17, 2):
            assert_steps(model, plain, 1, rows)
        assert asked == [2 * WIDTH, 16 * WIDTH]
        for power in range(12):
            assert_steps(model, plain, 1, 1 << power)
    assert len(asked) == 8


def test_a_call_of_a_language_model_is_traced_if_its_kind_repeats(asked: list[int]) -> None:
    made = ARCHITECTURES["llama"]()
    nbytes = sum(parameter.nbytes for parameter in made.module.parameters())
    with weightstream.offload(made.module, device="cpu", device_budget=nbytes // 2) as streamer, torch.no_grad():
        assert streamer.plan.workload is not None
        made.module(**made.inputs(0))
        assert (asked, streamer.stats().unplanned_fills) == ([], 0)
        made.module(**made.inputs(0))
        assert len(asked) == 1
        made.module(**made.inputs(0))
        assert len(asked) == 1


def test_an_error_of_tracing_is_no_error_of_the_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(gathering, "follow", breaks)
    model, plain = models()
    with (
        caplog.at_level(logging.WARNING, "weightstream"),
        weightstream.offload(model, device="cpu", device_budget=4 * LAYER),
    ):
        assert_steps(model, plain)
    assert caplog.text.count("is not known before it runs") == 1


def test_a_failed_switch_is_no_error_of_the_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settle, calls = Homes.settle, []

    def fails_once(self: Homes, plan: weightstream.Plan) -> None:
        calls.append(plan)
        if len(calls) == 2:
            raise ZeroDivisionError("a fault of ours")
        settle(self, plan)

    monkeypatch.setattr(Homes, "settle", fails_once)
    model, plain = models()
    with (
        caplog.at_level(logging.WARNING, "weightstream"),
        weightstream.offload(model, device="cpu", device_budget=4 * LAYER) as streamer,
    ):
        assert_steps(model, plain, 1)
        assert calls[2] == calls[0], "the previous plan"
        assert "the plan stays as it is" in caplog.text
        assert_steps(model, plain, 4)
        assert streamer.plan.manifest.order == (7, 6, 5, 4, 3, 2, 1, 0, 4), "learned from its steps"


class Peeks(nn.Module):
    """Reads a layer's weight by itself if the input has 16 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 16:
            x = x @ self.layers[2].weight
        for layer in self.layers:
            x = layer(x)
        return x


def test_weights_kept_for_one_kind_of_calls_stay_for_all() -> None:
    model, plain = models(Peeks)
    with weightstream.offload(model, device="cpu", device_budget=4 * LAYER) as streamer:
        for rows in (2, 16, 64, 256):
            kept = {"layers.2.weight"} if rows >= 16 else set()
            assert_steps(model, plain, 2, rows)
            inputs = streamer._installed.replanning.inputs
            assert all(grain.kept == kept for grain in inputs.grains)
            assert streamer.plan.resident >= kept
        before = streamer.stats().unplanned_fills
        assert_steps(model, plain, 2, 16)
        assert streamer.stats().unplanned_fills == before


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Blocks of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Two() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_plan_of_another_granularity_can_be_put_in_force() -> None:
    model, plain = models(Deep)
    with weightstream.offload(model, device="cpu", device_budget=8 * 4 * LAYER) as streamer:
        found = streamer._installed.replanning.inputs
        assert_steps(model, plain, 2)
        for manifest, planner in zip(found.grains, found.planners, strict=True):
            streamer.switch(planner(manifest))
            assert [unit.name for unit in streamer.plan.manifest.units] == [unit.name for unit in manifest.units]
            before = streamer.stats().unplanned_fills
            assert_steps(model, plain, 4)
            assert streamer.stats().unplanned_fills == before
    assert_steps(model, plain, 1)


class Reads(Two):
    """Computes with a weight of its layer outside of the layer's forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.linear(x, self.up.weight))  # type: ignore[no-any-return]


class DeepReads(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reads() for _ in range(6))


@pytest.mark.usefixtures("nothing_foreseen")
def test_reads_outside_of_finer_units_are_seen_after_a_change_of_granularity() -> None:
    model, plain = models(DeepReads)
    with weightstream.offload(model, device="cpu", device_budget=8 * 4 * LAYER) as streamer:
        found = streamer._installed.replanning.inputs
        blocks, matrices = found.grains[0], found.grains[-1]
        assert len(blocks.units) < len(matrices.units)
        for manifest, outside in ((blocks, 0), (matrices, 6), (blocks, 0)):
            streamer.switch(found.planners[0](manifest))
            assert_steps(model, plain, 1)
            assert len(streamer._learning.read_outside) == outside
            assert_steps(model, plain, 2)


def test_a_failed_switch_to_another_granularity_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = models(Deep)
    with weightstream.offload(model, device="cpu", device_budget=8 * 4 * LAYER) as streamer:
        assert_steps(model, plain, 2)
        found, before = streamer._installed.replanning.inputs, streamer.plan
        other = next(i for i, m in enumerate(found.grains) if len(m.units) != len(before.manifest.units))
        plan = found.planners[other](found.grains[other])
        alloc, calls = streamer._backend.alloc, []

        def fails_once(nbytes: int) -> torch.Tensor:
            calls.append(nbytes)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("no room")
            return alloc(nbytes)

        monkeypatch.setattr(streamer._backend, "alloc", fails_once)
        with pytest.raises(torch.OutOfMemoryError):
            streamer.switch(plan)
        assert streamer.plan.manifest.units == before.manifest.units
        assert_steps(model, plain, 2)


@pytest.mark.parametrize("part", ["mapped", "disk", "ahead", "step_s"])
def test_a_foreseen_plan_is_put_in_force_if_it_acts_differently(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan in force must agree with homes and copies."""
    switched: list[Any] = []
    model, _ = models()
    with weightstream.offload(model, device="cpu", device_budget=4 * LAYER) as streamer:
        learning, plan = streamer._learning, streamer.plan
        monkeypatch.setattr(learning, "_try_switch", lambda plan, **_: switched.append(plan))
        alias = next(iter(plan.opened))
        found = replace(plan, **{part: frozenset({alias}) if part in ("mapped", "disk") else 1})
        learning._change(found)
        assert (switched == [found]) is (part != "step_s")
        assert (streamer.plan is found) is (part == "step_s")


class Mapping(UserDict):  # type: ignore[type-arg]
    """A config whose missing attributes are missing keys."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Positions:
    """A config with a name that transformers gives to a number."""

    max_position_embeddings = (128, 128)


@pytest.mark.parametrize("config", [Mapping(dim=WIDTH), Positions()], ids=["keys", "positions"])
def test_a_config_of_any_kind_is_not_asked(config: Any) -> None:
    """Only a language model's config says which step to plan for."""
    model, plain = models()
    model.config = config
    with weightstream.offload(model, device="cpu", device_budget=3 * LAYER):
        assert_steps(model, plain)
