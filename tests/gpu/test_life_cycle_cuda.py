"""The life cycle on a GPU: peak memory while a model is built, weights that change before `post_init`, graphs."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from stack import Block, Stack, assert_equal, floats, nbytes
from weightstream import PrefetchOffloader, UVAOffloader
from weightstream.api.offloaders import StreamingOffloader
from weightstream.runtime.devices.cuda import CudaBackend
from weightstream.runtime.streamer import custom_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEPTH, WIDTH = 7, 512
BLOCK_NBYTES = nbytes(Block(WIDTH))

KINDS: dict[str, Callable[[], StreamingOffloader]] = {
    "1 of 1, 1 ahead": lambda: PrefetchOffloader(1, 1, 1),
    "1 of 2, 1 ahead": lambda: PrefetchOffloader(2, 1, 1),
    "2 of 3, 2 ahead": lambda: PrefetchOffloader(3, 2, 2),
    "some parameters": lambda: PrefetchOffloader(1, 1, 2, {"up.weight", "norm"}),
    "all on the host": lambda: UVAOffloader(1 << 30),
    "half on the host": lambda: UVAOffloader(DEPTH * BLOCK_NBYTES // 2),
}


def layers() -> Iterator[Any]:
    """The same weights each time, built on the device."""
    for seed in range(DEPTH):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            block = Block(WIDTH)
        yield block.eval()


def stacked(blocks: list[nn.Module]) -> Stack:
    stack = Stack(0, WIDTH)
    stack.blocks = nn.ModuleList(blocks)
    return stack


class Built:
    """A model of wrapped layers, changed before `post_init`, and the plain one, changed alike."""

    def __init__(self, offloader: StreamingOffloader, change: Callable[[Any], None] = lambda block: None) -> None:
        self.offloader = offloader
        self.plain, self.stack = stacked(list(layers())), stacked(offloader.wrap_modules(layers()))
        for block in (*self.plain.blocks, *self.stack.blocks):
            change(block)
        offloader.post_init()
        self.inputs = floats(self.plain)
        self.want = [self.plain(x) for x in self.inputs]

    def assert_equal(self, step: Any = None, rounds: int = 3) -> None:
        assert_equal(step or self.stack, self.inputs, self.want, rounds)


class Graphs:
    """Steps in pieces that an engine captures and launches, knowing only the life cycle."""

    def __init__(self, built: Built, *cuts: int) -> None:
        self.offloader = built.offloader
        self.tensors = [built.inputs[0].clone()]
        self.graphs = []
        for begin, end in zip((0, *cuts), (*cuts, DEPTH), strict=True):
            graph, y = torch.cuda.CUDAGraph(), self.tensors[-1]
            self.offloader.sync_prev_onload()
            with torch.cuda.graph(graph):
                for block in built.stack.blocks[begin:end]:
                    y = block(y)
                self.offloader.join_after_forward()
            self.tensors.append(y)
            self.graphs.append(graph)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.tensors[0].copy_(x)
        for graph in self.graphs:
            self.offloader.sync_prev_onload()
            graph.replay()
        return self.tensors[-1].clone()


class Served:
    """Steps of an engine that captures several batch sizes, in pieces or whole. Each layer is cut before an eager
    operator
    between two pieces, so that it is waited for in one piece and released in the next."""

    def __init__(self, built: Built) -> None:
        assert built.offloader.streamer is not None
        self.offloader, self.session = built.offloader, built.offloader.streamer._modules.session
        units = {id(unit.module): index for index, unit in enumerate(built.offloader.streamer._modules.units)}
        self.layers = [(block, self.session.tensor_of(units[id(block)])) for block in built.stack.blocks]
        self.graphs: dict[tuple[int, bool], tuple[list[torch.cuda.CUDAGraph], list[torch.Tensor]]] = {}

    def pieces(self, x: torch.Tensor) -> Generator[torch.Tensor, torch.Tensor, None]:
        for block, unit in self.layers:
            custom_ops.wait(self.session, unit, x)
            x = x + block.down((yield block.up(block.norm(x))))
            custom_ops.release(self.session, unit, x)
        yield x

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        pieces = self.pieces(x)
        y = next(pieces)
        for _ in self.layers:
            y = pieces.send(nn.functional.gelu(y))
        return y

    def capture(self, x: torch.Tensor, whole: bool, fails_in: int = -1) -> None:
        x = x.clone()
        graphs, tensors = [], [x]  # the input of the first piece, its output, that of the second, ...
        pieces = self.pieces(x)
        for index in range(1 if whole else DEPTH + 1):
            graph = torch.cuda.CUDAGraph()
            self.offloader.sync_prev_onload()
            with torch.cuda.graph(graph):
                y = self.eager(x) if whole else pieces.send(tensors[-1]) if index else next(pieces)
                if index == fails_in:
                    raise ZeroDivisionError
                self.offloader.join_after_forward()
            graphs.append(graph)
            tensors += [y, nn.functional.gelu(y)]
        self.graphs[len(x), whole] = graphs, tensors

    def launch(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        graphs, tensors = self.graphs[len(x), whole]
        tensors[0].copy_(x)
        for index, graph in enumerate(graphs):
            self.offloader.sync_prev_onload()
            graph.replay()
            tensors[2 * index + 2].copy_(nn.functional.gelu(tensors[2 * index + 1]))
        return tensors[-2].clone()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    torch.cuda.synchronize()  # no copy is in flight when a streamer is collected without remove()
    gc.collect()


@pytest.mark.parametrize("cuts", [(), (2, 5)], ids=["whole", "pieces"])
@pytest.mark.parametrize("kind", KINDS)
def test_eager_captured_eager(kind: str, cuts: tuple[int, ...]) -> None:
    built = Built(KINDS[kind]())
    addresses = [p.data_ptr() for p in built.stack.parameters()]
    built.assert_equal()
    step = Graphs(built, *cuts)
    built.assert_equal(step, rounds=6)
    built.assert_equal()
    built.assert_equal(step)
    assert [p.data_ptr() for p in built.stack.parameters()] == addresses
    assert {p.device.type for p in built.stack.parameters()} == {"cuda"}
    streamer = built.offloader.streamer
    assert streamer is not None
    assert (streamer.stats().filled_nbytes > 0) == (streamer.plan.ring_nbytes > 0)
    assert streamer.plan.host_nbytes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_captured_steps_in_a_row(kind: str) -> None:
    """Nothing waits for the device in between, and no sync comes before an eager step."""
    built = Built(KINDS[kind]())
    built.assert_equal(rounds=1)
    eager, graph = built.stack, Graphs(built)
    turns = [eager, graph, graph, eager, graph, eager, eager, graph] * 3
    got = [step(built.inputs[turn % 4]) for turn, step in enumerate(turns)]
    assert [turn for turn, y in enumerate(got) if not torch.equal(y, built.want[turn % 4])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_several_sizes_in_pieces_that_cut_layers_and_whole(kind: str) -> None:
    """Eager steps run between captures. Nothing waits for the device between steps."""
    built, chance = Built(KINDS[kind]()), random.Random(kind)
    steps, sizes = Served(built), (8, 4, 2, 1)
    inputs = {size: floats(built.plain, batch=size) for size in sizes}
    want = {size: [built.plain(x) for x in inputs[size]] for size in sizes}
    for whole in (False, True):
        for size in sizes:
            assert torch.equal(steps.eager(inputs[size][0]), want[size][0])
            steps.capture(inputs[size][0], whole)
    turns = [(chance.choice(sizes), chance.randrange(4), chance.choice((False, True, None))) for _ in range(60)]
    got = [
        steps.eager(inputs[size][num]) if whole is None else steps.launch(inputs[size][num], whole)
        for size, num, whole in turns
    ]
    assert [turn for turn, y in zip(turns, got, strict=True) if not torch.equal(y, want[turn[0]][turn[1]])] == []


@pytest.mark.parametrize("fails_in", [0, 3])
def test_a_piece_whose_capture_fails_harms_nothing(fails_in: int) -> None:
    built = Built(KINDS["2 of 3, 2 ahead"]())
    steps = Served(built)
    with pytest.raises((ZeroDivisionError, RuntimeError)):  # torch's own error, if copies were not joined
        steps.capture(built.inputs[0], False, fails_in)
    for whole in (False, True):
        steps.capture(built.inputs[0], whole)
        built.assert_equal(steps.eager)
        built.assert_equal(partial(steps.launch, whole=whole))


@pytest.mark.parametrize("kind", ["1 of 1, 1 ahead", "1 of 2, 1 ahead", "2 of 3, 2 ahead", "all on the host"])
def test_building_holds_the_residents_and_one_layer(kind: str) -> None:
    offloader = KINDS[kind]()
    size = {"1 of 2, 1 ahead": 2, "2 of 3, 2 ahead": 3}.get(kind, 1)
    residents = [size > 1 and index % size == 0 for index in range(DEPTH)]  # the first of each group
    gc.collect()
    torch.cuda.synchronize()
    base, held = torch.cuda.memory_allocated(), []

    def watched() -> Iterator[nn.Module]:
        for index, block in enumerate(layers()):
            held.append((sum(residents[:index]), torch.cuda.memory_allocated() - base))
            yield block

    stack = stacked(offloader.wrap_modules(watched()))
    assert len(held) == DEPTH
    assert all(nbytes <= (num + 1.1) * BLOCK_NBYTES for num, nbytes in held), held
    offloader.post_init()
    slots = {"all on the host": 0, "2 of 3, 2 ahead": 2}.get(kind, 1)
    assert torch.cuda.memory_allocated() - base <= (sum(residents) + slots + 0.1) * BLOCK_NBYTES
    assert sum(p.device.type == "cuda" for p in stack.parameters()) == 6 * DEPTH


def transpose(block: Any) -> None:
    block.up.weight.data = block.up.weight.data.t().contiguous().t()


def replace(block: Any) -> None:
    block.up.weight = nn.Parameter((block.up.weight.detach() * 2).cuda())


def quantise(block: Any) -> None:
    up, weight = block.up, block.up.weight.detach()
    del up.weight
    up.register_parameter("q", nn.Parameter((weight * 1000).to(torch.int8), requires_grad=False))
    up.scale = nn.Parameter(torch.full((4 * WIDTH, 1), 0.001, device=weight.device))
    up.forward = lambda x: nn.functional.linear(x, up.q.to(x.dtype) * up.scale, up.bias)


def add(block: Any) -> None:
    block.shift = nn.Parameter(block.norm.bias.detach() + 0.25)
    block.forward = lambda x: Block.forward(block, x) + block.shift


def delete(block: Any) -> None:
    block.down.bias = None


def load(block: Any) -> None:
    for parameter in block.parameters():
        parameter.data.copy_(torch.linspace(-0.05, 0.05, parameter.numel()).view_as(parameter))


@pytest.mark.parametrize("change", [transpose, replace, quantise, add, delete, load])
@pytest.mark.parametrize("kind", ["1 of 2, 1 ahead", "2 of 3, 2 ahead", "half on the host"])
def test_weights_may_change_until_post_init(kind: str, change: Callable[[Any], None]) -> None:
    built = Built(KINDS[kind](), change)
    layouts = [[(p.shape, p.stride(), p.dtype) for p in model.parameters()] for model in (built.stack, built.plain)]
    assert layouts[0] == layouts[1]
    built.assert_equal()
    built.assert_equal(Graphs(built))


def test_out_of_memory_has_advice_and_leaves_the_layers_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = PrefetchOffloader(1, 1, 4)
    plain, stack = stacked(list(layers())), stacked(offloader.wrap_modules(layers()))
    inputs = floats(plain)
    want = [plain(x) for x in inputs]
    before = [(p, p.device, p.detach().clone()) for p in stack.parameters()]
    real = CudaBackend.alloc

    def alloc(self: CudaBackend, size: int) -> torch.Tensor:
        if size >= 8 << 20:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return real(self, size)

    monkeypatch.setattr(CudaBackend, "alloc", alloc)
    with pytest.raises(torch.OutOfMemoryError) as failure:
        offloader.post_init()
    monkeypatch.undo()
    assert "the model is as it was" in "".join(failure.value.__notes__)
    for parameter, (same, device, value) in zip(stack.parameters(), before, strict=True):
        assert parameter is same
        assert parameter.device == device
        assert torch.equal(parameter, value)
    offloader.post_init()
    assert_equal(stack, inputs, want)
