"""`train=` in the public functions: what is planned for, what stays on the device, and which settings are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from models import MODELS
from weightstream import ConfigError, OffloadConfig, PlanError
from weightstream.plan.check import prove
from weightstream.plan.schedule import FORWARD, TRAIN
from weightstream.settings.config import TrainConfig

pytest.importorskip("transformers")
KIB = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "llama"
    MODELS["llama"]().module.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, None),
        (False, None),
        (True, TrainConfig()),
        ({"tokens": 512, "rank": 8}, TrainConfig(tokens=512, rank=8)),
        (TrainConfig(checkpoints=False), TrainConfig(checkpoints=False)),
    ],
)
def test_values_of_the_setting(value: Any, wanted: TrainConfig | None) -> None:
    assert OffloadConfig(train=value).train == wanted
    assert OffloadConfig(train=True).merged(train=value).train == (TrainConfig() if value is None else wanted)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"token": 512}, r"train\.token = 512: there is no such option; did you mean tokens\?"),
        ({"rank": 0}, r"train\.rank = 0: Input should be greater than or equal to 1; give a whole number >= 1"),
        ("yes", r'train = .yes.: .*; give True, or the step to plan for, such as {"batch": 1'),
        (3, r"train = 3: .*; give True, or the step"),
    ],
)
def test_wrong_values_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadConfig(train=value)


def test_a_loaded_model_is_frozen_and_its_plan_is_that_of_plan_model(folder: Path) -> None:
    train = {"tokens": 16, "rank": 2}
    planned = weightstream.plan_model(folder, device="cpu", device_budget=140 * KIB, train=train)
    model = weightstream.from_pretrained(folder, device="cpu", device_budget=140 * KIB, train=train, progress=False)
    with model.weightstream as streamer:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        plan = streamer.plan
        prove(plan)
        assert plan.acts_as(planned)
        assert (plan.what, plan.trained_nbytes) == (TRAIN, planned.trained_nbytes)
        assert len(plan.manifest.order) > len(plan.schedule(FORWARD).order)
        assert plan.workload is not None
        assert plan.workload.trains
    plain = weightstream.from_pretrained(folder, device="cpu", device_budget=140 * KIB, progress=False)
    assert all(parameter.requires_grad for parameter in plain.parameters())


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x).relu() + self.up(self.down(x))


def test_trainable_parameters_of_any_module_stay_on_the_device() -> None:
    model = nn.Sequential(*(Adapted() for _ in range(8)))
    example, trained = torch.randn(3, 64), 8 * 2 * 4 * 64
    with weightstream.offload(
        model, device="cpu", device_budget=64 * KIB, train={"checkpoints": False}, example_inputs=example
    ) as streamer:
        plan = streamer.plan
        names = {tensor.alias: tensor.name for tensor in plan.manifest.tensors()}
        on_device = {names[alias] for alias in plan.resident}
        assert {name for name, p in model.named_parameters() if p.requires_grad} <= on_device
        assert plan.offloaded_nbytes
        assert plan.trained_nbytes == (16 - 4) * trained, "gradients and optimizer: the adapters are weights"
        assert plan.activation_nbytes > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "self"}, "train: draft: only for generation; leave out draft, or train"),
        ({"speculate": "lookup"}, "train: speculate: only for generation"),
        ({"gpus": 2}, "train: a process trains on one GPU; leave out gpus"),
        ({"tp_plan": "auto", "tp_size": 2}, "train: shards of tensor parallelism are not trained"),
    ],
)
def test_options_of_generation_are_refused_with_training(folder: Path, options: dict[str, Any], message: str) -> None:
    for function in (weightstream.from_pretrained, weightstream.plan_model):
        with pytest.raises(ConfigError, match=message):
            function(folder, device_budget=64 * KIB, train=True, **options)


def test_work_that_is_unknown_is_planned_for_as_a_forward_and_its_reverse(caplog: pytest.LogCaptureFixture) -> None:
    """A module that no step can be made up for: units turn around, and nothing is predicted of tokens."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with weightstream.offload(model, device="cpu", device_budget=40 * KIB, train=True) as streamer:
        plan = streamer.plan
        prove(plan)
        assert (plan.what, plan.workload) == (TRAIN, None)
        assert plan.trained_nbytes == 16 * 6 * 16 * (64 + 64)
        model.requires_grad_(False)
        for _ in range(3):
            model(torch.randn(2, 64, requires_grad=True)).sum().backward()
        assert streamer.stats().unplanned_fills == 0
    with weightstream.offload(model, device="cpu", device_budget=40 * KIB, train={"checkpoints": False}):
        assert "train: the weights are float32, without checkpoints" in caplog.text
    with pytest.raises(PlanError, match=r"Training takes unknown activations \+ adapters, gradients and optimizer 192"):
        weightstream.offload(model, device="cpu", device_budget=1024, train=True)


def test_more_tokens_than_a_model_has_positions_are_not_planned_for(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = weightstream.plan_model(folder, device_budget=140 * KIB, train={"tokens": 10**6, "rank": 2})
    assert plan.workload is not None
    assert f"train: {plan.workload.tokens} tokens are planned for" in caplog.text


def test_a_pipeline_is_not_trained_as_a_whole() -> None:
    with pytest.raises(
        ConfigError, match=r"Pipe is a pipeline, .*weightstream\.offload\(pipe\.transformer, train=True"
    ):
        weightstream.offload(type("Pipe", (), {})(), train=True)


def test_a_model_that_trains_is_planned_for_at_its_first_step() -> None:
    """Without `train=`: the first step shows it, and an evaluation does not undo it."""
    model = nn.Sequential(*(Adapted() for _ in range(8)))
    x = torch.randn(3, 64)
    with weightstream.offload(model, device="cpu", device_budget=64 * KIB) as streamer:
        assert streamer.plan.what == FORWARD
        for _ in range(3):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
        plan = streamer.plan
        prove(plan)
        assert plan.what == TRAIN
        assert plan.step_s > 0
        assert plan.activation_nbytes > 0
        blocks = len(plan.schedule(FORWARD).order)
        assert len(plan.manifest.order) == 2 * blocks - 1 or len(plan.manifest.order) == 2 * blocks
        unplanned = streamer.stats().unplanned_fills
        model(x).sum().backward()
        assert streamer.stats().unplanned_fills == unplanned
