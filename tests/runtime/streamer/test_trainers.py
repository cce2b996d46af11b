"""What programs that train do to a model: they move it, replace its forward, wrap it, compile blocks, keep tensors."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from training import WIDTH, Adapted, Net, adapters, assert_equal, moved, net, offloaded, poisoned, square, trained
from weightstream.errors import OffloadError
from weightstream.plan.schedule import TRAIN

__all__ = ["poisoned"]


class Wrapper(nn.Module):
    """Calls `forward` of the model and not the model, as peft does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.forward(x)  # type: ignore[no-any-return]


def without_adapters() -> Net:
    model = net()
    for block in model.blocks:
        block.query, block.wide = block.query.base, block.wide.base
    return model


def with_adapters(model: Net) -> Net:
    for seed, block in enumerate(model.blocks):
        torch.manual_seed(seed)
        for name in ("query", "wide"):
            base = getattr(block, name)
            adapted = Adapted(base.in_features, base.out_features)
            adapted.base = base
            setattr(block, name, adapted)
    return model


@pytest.mark.usefixtures("poisoned")
def test_adapters_that_are_added_later_and_a_move_to_the_same_device() -> None:
    wanted = trained(Wrapper(with_adapters(without_adapters())))
    model = without_adapters()
    with offloaded(model) as streamer:
        wrapped = Wrapper(with_adapters(model)).to("cpu").to(torch.device("cpu"), torch.float32)
        assert streamer.stats().held_nbytes["device"] >= sum(p.nbytes for p in adapters(model))
        with pytest.raises(OffloadError, match="nor change its dtype"):
            wrapped.to(torch.bfloat16)
        with pytest.raises(OffloadError, match="nor change its dtype"):
            wrapped.share_memory()
        assert_equal(trained(wrapped), wanted)


def test_a_forward_that_was_replaced_is_a_step() -> None:
    """As trl and liger do for a fused loss; they call it without the model."""

    def doubled(self: Net, x: torch.Tensor) -> torch.Tensor:
        return 2 * Net.forward(self, x)

    plain, model = net(), net()
    with offloaded(model) as streamer:
        assert_equal(trained(model, 1), trained(plain, 1))
        plain.forward = types.MethodType(doubled, plain)  # type: ignore[method-assign]
        model.forward = types.MethodType(doubled, model)  # type: ignore[method-assign]
        assert_equal(trained(Wrapper(model)), trained(Wrapper(plain)))
        with moved(streamer) as found:
            trained(Wrapper(model), 1)
        assert found["unplanned_fills"] == 0
        assert found["filled_nbytes"] == streamer.plan.step_nbytes_of(TRAIN) + streamer.plan.step_nbytes_of("forward")
    assert model.forward.__func__ is doubled  # type: ignore[attr-defined]


@pytest.fixture
def _group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_distributed_data_parallel_leaves_frozen_weights_alone() -> None:
    plain, model = net(), net()
    with offloaded(model) as streamer:
        trained(model, 1), trained(plain, 1)
        model.zero_grad()
        parallel = nn.parallel.DistributedDataParallel(model)
        names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        assert names <= parallel.parameters_to_ignore
        assert len(parallel._module_parameters) == len(adapters(model))
        before = streamer.stats()
        assert_equal(trained(parallel, 2), trained(plain, 2))
        assert streamer.stats().unplanned_fills == before.unplanned_fills
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


# PyTorch's own, as it imports its compiler, and as that looks at the arguments of the watch
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", ["kept", "recomputed"])
def test_blocks_whose_forward_is_compiled(recompute: Any) -> None:
    plain, model = net(recompute), net(recompute)
    for each in (plain, model):
        for block in each.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
    with offloaded(model, 0.6):
        assert_equal(trained(model, 3), trained(plain, 3))


def kept_on_cpu(model: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return square(model, x)


def checkpointed(model: Net, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False).square().mean()  # type: ignore[no-any-return]


def reentrant(model: Net, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=True).square().mean()  # type: ignore[no-any-return]


def under_autocast(model: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return square(model, x)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("way", [kept_on_cpu, checkpointed, reentrant, under_autocast])
def test_ways_to_keep_less(way: Any) -> None:
    wanted = trained(net(), 3, way)
    model = net()
    with offloaded(model):
        assert_equal(trained(model, 3, way), wanted)


@pytest.mark.parametrize("way", [checkpointed, reentrant])
def test_a_model_that_is_checkpointed_as_a_whole_has_one_order(way: Any) -> None:
    model = net()
    with offloaded(model) as streamer:
        for step in range(4):
            before = streamer.stats()
            way(model, torch.randn(2, WIDTH).requires_grad_()).backward()
            assert step < 2 or streamer.stats().unplanned_fills == before.unplanned_fills
