"""Zero-copy on a GPU: weights in pinned host memory that kernels read, in every mode, and together with streamed
ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from stack import Block, Stack, assert_equal, captured, nbytes, taught
from weightstream.runtime.devices.cuda import CudaBackend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH = 512
BLOCK_NBYTES = nbytes(Block(WIDTH))
GIB = 2**30
HALF = 3 * BLOCK_NBYTES + BLOCK_NBYTES // 2  # of seven blocks; ends inside of the fourth


@pytest.mark.parametrize("host_nbytes", [GIB, HALF], ids=["all", "half"])
def test_in_order_until_the_bytes_are_reached(host_nbytes: int) -> None:
    with taught(cpu_offload_gb=host_nbytes / GIB) as model:
        plan, held = model.streamer.plan, model.streamer.stats().held_nbytes
        wanted, taken = set(), 0
        for name, parameter in model.stack.named_parameters():
            if taken < host_nbytes:
                wanted.add(name)
                taken += parameter.nbytes
            assert parameter.device.type == "cuda"
        assert plan.mapped == wanted
        assert plan.ring_nbytes == 0
        assert (0 < len({name for name in wanted if name.startswith("blocks.3.")}) < 6) == (host_nbytes == HALF)
        assert held == {"device": nbytes(model.stack) - taken, "host": taken, "disk": 0}
        assert 0 <= model.streamer._homes._arena.nbytes - taken < 4096
        model.assert_equal()
        assert model.streamer.stats().fills == 0


def test_nothing_on_the_device() -> None:
    stack = Stack(7, WIDTH).eval()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with weightstream.offload(stack, device="cuda", cpu_offload_gb=1):
        assert torch.cuda.memory_allocated() - before < 4096


def graphed(model: nn.Module, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step captured like that of any model."""
    graph, held = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        y = model(held)

    def step(x: torch.Tensor) -> torch.Tensor:
        held.copy_(x)
        graph.replay()
        return y.clone()

    return step


@pytest.mark.parametrize("host_nbytes", [GIB, HALF], ids=["all", "half"])
def test_inside_a_plain_graph_and_ours(host_nbytes: int) -> None:
    with taught(cpu_offload_gb=host_nbytes / GIB) as model:
        step = graphed(model.stack, model.inputs[0])
        model.assert_equal(step, rounds=6)
        model.assert_equal()
        model.assert_equal(model.captured())


@pytest.mark.parametrize("host_nbytes", [GIB, HALF], ids=["all", "half"])
def test_compiled_as_any_model_is(host_nbytes: int) -> None:
    torch._dynamo.reset()
    with taught(cpu_offload_gb=host_nbytes / GIB, dtype=torch.bfloat16) as model:
        plain = torch.compile(model.plain, fullgraph=True)
        want = [plain(x) for x in model.inputs]
        torch._dynamo.reset()
        step = torch.compile(model.stack, fullgraph=True)
        assert_equal(step, model.inputs, want)
    torch._dynamo.reset()


class Language(nn.Module):
    """A table of 2 MiB, blocks, and a head of the same shape that may be tied to it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, WIDTH)
        self.blocks = Stack(5, WIDTH).blocks
        self.head = nn.Linear(WIDTH, 1024, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@contextmanager
def language(tied: bool, **settings: Any) -> Iterator[tuple[Language, weightstream.Streamer, list[Any], list[Any]]]:
    model = Language(tied).eval()
    plain = copy.deepcopy(model).cuda()
    inputs = [torch.randint(0, 1024, (2, 5), device="cuda") for _ in range(4)]
    with torch.no_grad():
        want = [plain(x) for x in inputs]
        with weightstream.offload(model, device="cuda", **settings) as streamer:
            assert_equal(model, inputs, want)
            yield model, streamer, inputs, want
        assert (model.head.weight is model.embed.weight) == tied
        assert_equal(model.cuda(), inputs, want, rounds=1)


TIGHT = int(nbytes(Language(False)) * 0.3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_table_together_with_streamed_weights(tied: bool, named: bool) -> None:
    """Under a tight budget a large table is read in place by default, unless a matrix product reads it whole."""
    settings: dict[str, Any] = {"zero_copy_params": {"embed"}} if named else {}
    with language(tied, device_budget=TIGHT, **settings) as (model, streamer, inputs, want):
        plan = streamer.plan
        assert plan.mapped == ({"embed.weight"} if named or not tied else set())
        assert streamer.stats().fills > 0
        assert plan.device_nbytes <= TIGHT
        if named or not tied:
            assert model.embed.weight.device.type == "cuda"
            assert_equal(captured(streamer, model, inputs[0]), inputs, want, rounds=5)
        assert_equal(model, inputs, want)


def test_a_table_stays_on_the_device_if_everything_fits() -> None:
    with language(False, device_budget="1GiB") as (_, streamer, _, _):
        assert streamer.plan.mapped == frozenset()
        assert streamer.stats().held_nbytes["host"] == 0


def test_tied_weights_are_held_once() -> None:
    with language(True, cpu_offload_gb=1) as (model, streamer, inputs, want):
        assert streamer.stats().held_nbytes["host"] == nbytes(model)
        assert streamer._homes._arena.nbytes - nbytes(model) < 4096
        assert_equal(graphed(model, inputs[0]), inputs, want)


@pytest.mark.parametrize("why", ["use_uva", "pin_memory", "no view"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_stream_where_kernels_cannot_read_them(tied: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {why: False} if why != "no view" else {}
    if why == "no view":
        monkeypatch.setattr(CudaBackend, "device_view", lambda self, memory: None)
    for more in ({"cpu_offload_gb": 1}, {"device_budget": TIGHT, "zero_copy_params": {"embed"}}):
        with language(tied, **settings, **more) as (model, streamer, inputs, want):
            assert streamer.plan.mapped == frozenset()
            assert streamer.plan.ring_nbytes > 0
            assert_equal(model, inputs, want)
            assert streamer.stats().fills > 0


def test_state_and_copies_are_true_and_remove_restores() -> None:
    stack = Stack(3, WIDTH).eval()
    before = {name: (p, p.detach().clone()) for name, p in stack.named_parameters()}
    plain, x = copy.deepcopy(stack).cuda(), torch.randn(3, WIDTH, device="cuda")
    with torch.no_grad(), weightstream.offload(stack, device="cuda", cpu_offload_gb=1):
        want = plain(x)
        assert torch.equal(stack(x), want)
        state = stack.state_dict()
        assert all(torch.equal(state[name].cpu(), value) for name, (_, value) in before.items())
        copied = copy.deepcopy(stack)
        assert copied.weightstream is None
        for parameter in stack.parameters():
            parameter.zero_()
        assert torch.equal(copied(x), want)
        stack.load_state_dict({name: value for name, (_, value) in before.items()})
        assert torch.equal(stack(x), want)
    for name, parameter in stack.named_parameters():
        assert parameter is before[name][0]
        assert (parameter.device.type, parameter.is_pinned()) == ("cpu", False)
        assert torch.equal(parameter, before[name][1])
    assert torch.equal(copied(x), want)


def test_an_update_is_seen_by_the_next_step_and_stays() -> None:
    with taught(cpu_offload_gb=1) as model:
        step = graphed(model.stack, model.inputs[0])
        for name in ("blocks.0.up.weight", "blocks.6.norm.bias"):
            for module in (model.stack, model.plain):
                module.get_parameter(name).add_(0.25)
            want = [model.plain(x) for x in model.inputs]
            assert_equal(model.stack, model.inputs, want)
            assert_equal(step, model.inputs, want)
