"""Operators of a call are timed with their shapes, and the measured times override the estimates from rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from weightstream.adapters.tracing import op_timing
from weightstream.adapters.tracing.footprint import Footprint, follow
from weightstream.adapters.tracing.training import follow_training
from weightstream.plan.manifest import Op, unit_seconds
from weightstream.runtime.devices.cpu import CPU_PROFILE, CpuBackend
from weightstream.runtime.weights.alias_groups import UnitModule
from weightstream.settings.config import TrainConfig

# so slow that every operator is worth timing
SLOW = replace(CPU_PROFILE, half_flops_per_s=1e6, single_flops_per_s=1e6, device_bytes_per_s=1e6)


def seconds_of(found: Footprint) -> dict[Any, float]:
    return {launch: t.device_s for launch, t in op_timing.time_ops(found.launches, SLOW, CpuBackend()).items()}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.conv = nn.Conv1d(64, 64, 3)
        self.norm = nn.LayerNorm(64)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2)
        x = self.norm(x).masked_fill(mask, 0.0)
        return nn.functional.dropout(x, 0.5, True).mul_(2)


def test_operators_are_timed_with_their_shapes() -> None:
    model = Mixed()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    found = follow(model, (torch.full((4, 34), 49), torch.zeros(4, 32, 1, dtype=torch.bool)))
    seconds = seconds_of(found)
    assert torch.equal(torch.get_rng_state(), state)
    names = {launch._func.overloadpacket.__name__ for launch in seconds}
    assert names >= {"embedding", "convolution", "native_layer_norm"}
    assert not any("dropout" in name or "bernoulli" in name or name.endswith("_") for name in names)
    assert all(0 < s < 1 for s in seconds.values())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_attention_that_is_trained_is_timed_with_its_backward(masked: bool, inference: bool) -> None:
    """By the function that models call, as PyTorch chooses its kernel on the device."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.project(x).view(2, 48, 2, 32).transpose(1, 2)
            mask = torch.ones(48, 48, dtype=torch.bool, device=x.device) if masked else None
            return nn.functional.scaled_dot_product_attention(x, x, x, mask, dropout_p=0.5)

    model = Attention().bfloat16()
    with torch.inference_mode(inference):
        found = follow_training(model, TrainConfig(rank=2), [], (torch.randn(2, 48, 64, dtype=torch.bfloat16),))
        state = torch.get_rng_state()
        trials = op_timing.time_ops(found.launches, SLOW, CpuBackend())
    assert torch.equal(torch.get_rng_state(), state)
    seconds = {launch._func.overloadpacket.__name__: trial.device_s for launch, trial in trials.items()}
    kernel = "efficient" if masked else "flash"
    assert seconds[f"_scaled_dot_product_{kernel}_attention"] > 0
    assert seconds[f"_scaled_dot_product_{kernel}_attention_backward"] > 0


def test_measured_times_override_rates() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    found = follow(model, (torch.randn(64, 256),))
    ((launch, num),) = found.launches
    assert num == 2, "one operator, launched twice"
    timed = found.tried({launch: op_timing.Trial(0.125, 0)})
    units = [UnitModule(name=name, module=module) for name, module in model.named_children()]
    assert [unit_seconds(ops, SLOW)[0] for ops in timed.work(units)] == [0.125, 0.125]
    assert timed.activation_nbytes == found.activation_nbytes
    more = found.tried({launch: op_timing.Trial(0.125, 1 << 20)})
    assert more.activation_nbytes == found.activation_nbytes + (1 << 20), "it runs while most memory is alive"
    both = UnitModule(name="both", module=model[0], also=(model[1],))
    assert unit_seconds(timed.work([both])[0], SLOW)[0] == 0.125
    assert Op(flops=1e9, rate="half", device_s=0.5).seconds(SLOW) == 0.5


def test_operators_that_cannot_be_timed_keep_their_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU())
    found = follow(model, (torch.randn(64, 256),))

    def fails(spec: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(op_timing._Operands, "take", lambda self, spec: fails(spec))
    assert seconds_of(found) == {}
    assert found.tried({}).ops == found.ops


@torch.library.custom_op("weightstream_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("its result for these operands is unknown")


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_only_operators_of_torch_are_timed() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(doubled(x))

    found = follow(Own(), (torch.randn(64, 256),))
    assert {launch._func.namespace for launch, _ in found.launches} == {"aten", "weightstream_test"}
    assert {launch._func.namespace for launch in seconds_of(found)} == {"aten"}


def test_an_error_in_a_round_leaves_the_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(op_timing, "_rounds", fails)
    assert seconds_of(follow(nn.Linear(256, 256), (torch.randn(64, 256),))) == {}


def test_operators_shorter_than_their_launch_are_not_timed() -> None:
    found = follow(nn.Linear(4, 4), (torch.ones(1, 4),))
    for op_s in (CPU_PROFILE.op_s, 1e-3):  # a long least time of kernels is no reason
        assert op_timing.time_ops(found.launches, replace(CPU_PROFILE, op_s=op_s), CpuBackend()) == {}


def test_measured_times_come_close_to_the_call() -> None:
    """Matrix products of 8 ms in total: the prediction has the same order of magnitude, whatever else the machine
    does."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).eval()
    x = torch.randn(256, 1024)
    found = follow(model, (x,))
    predicted = sum(
        op.seconds(SLOW) for _, _, op in found.tried(op_timing.time_ops(found.launches, SLOW, CpuBackend())).ops
    )
    backend = CpuBackend()
    with torch.no_grad():
        taken = []
        for _ in range(5):
            begin = backend.stamp(op_timing.Side.COMPUTE)
            model(x)
            end = backend.stamp(op_timing.Side.COMPUTE)
            taken.append(backend.seconds(begin, end) or 0.0)
    assert min(taken) / 4 < predicted < 4 * max(taken)
