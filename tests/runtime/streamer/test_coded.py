"""Compressed weights give the plain model's bits: every fixture, dtype and budget, and forwards that are hard on the
one
buffer that units are decoded into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import weightstream
from coded_rig import PLACES, Block, Chain, budgets, built, code_all, exact, offload, random_model, rows
from models import FIXTURES, assert_same, step
from repeats import only, thinned
from weightstream.api.offloaders import create_offloader
from weightstream.errors import OffloadError
from weightstream.settings.config import OffloadConfig, PrefetchOffloadConfig

# Weights of one dtype are required: no complex ones. Convolutional nets are slow here.
NAMES = sorted(FIXTURES.keys() - {"OddTensors", "AutoencoderKL", "WeightsInBuffers"})
ONE_UNIT = ("BareParameters",)
WIDTH = 128

__all__ = ["code_all"]


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize(
    ("dtype", "places", "name"),
    [  # each has one dtype at the least budget, which is the hardest, and every fourth has all budgets
        pytest.param(
            dtype, places, name, marks=[pytest.mark.stress] * ((i % 3 == 0) is (dtype is torch.bfloat16) or left)
        )
        for i, name in enumerate(NAMES)
        for dtype in (torch.bfloat16, torch.float16)
        for places, left in ((("streams",), i % 4 == 1), (PLACES, i % 4 != 1))
    ],
)
@pytest.mark.usefixtures("code_all")
def test_steps_of_a_fixture_are_equal_and_it_is_restored(name: str, dtype: torch.dtype, places: Sequence[str]) -> None:
    model, plain = built(name, dtype), built(name, dtype)
    for place, budget in budgets(model.module, places).items():
        with weightstream.offload(model.module, device="cpu", device_budget=budget, codec="compressed") as streamer:
            assert streamer.plan.manifest.codes
            assert (streamer.plan.step_nbytes == 0) is (place == "resident" or name in ONE_UNIT)
            for seed in range(5):
                assert_same(step(model.module, model.inputs(seed)), step(plain.module, plain.inputs(seed)))
        assert exact(model.module) == exact(plain.module)


class Narrow(nn.Module):
    """A float8 weight, widened when it is read, and another of the activations' dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(functional.linear(x, self.up.to(x.dtype))))


class ReturnsView(Block):
    """Returns a part of a weight, and the weight itself."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.up.weight[: len(x)], self.down.weight


class Norm(Block):
    """Running statistics, which training mode updates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Around(nn.Module):
    """Runs `inner`, which is not its child, between its reads of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.inner: list[Callable[..., torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(functional.linear(x, self.up))
        for inner in self.inner:
            x = inner(x)
        return x + functional.linear(x, self.down)


class Parent(Around):
    """Its inner block is a child."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.child = Parent(depth - 1) if depth else nn.Identity()
        self.inner = [self.child]


class Recursive(Around):
    """Runs itself, twice."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = torch.tanh(functional.linear(x, self.up))
        if depth:
            x = self(self(x, depth - 1), 0)
        return x + functional.linear(x, self.down)


class Frame(nn.Module):
    """Four blocks of one class, in a row."""

    def __init__(self, block_class: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block_class() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Gives(Frame):
    """Uses the outputs of blocks after all of them have run."""

    def forward(self, x: torch.Tensor) -> Any:
        given = [block(x) for block in self.blocks]
        mixed = sum(y @ whole @ whole.t() for y, _, whole in given)
        return {"mixed": mixed, "parts": [part for _, part, _ in given]}


class OneInAnother(Frame):
    """Each block runs the previous one inside, and one also runs on its own."""

    def __init__(self) -> None:
        super().__init__(Around)
        for before, block in zip(self.blocks, list(self.blocks)[1:], strict=False):
            block.inner = [before]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[3](x) + self.blocks[1](x)


class Wide(Around):
    """Weights that cannot be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.float64))
        self.down = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(functional.linear(x.double(), self.up))
        for inner in self.inner:
            wide = inner(wide.to(x.dtype)).double()
        return x + functional.linear(wide, self.down).to(x.dtype)


class CodedInUncoded(Frame):
    """Each compressed block runs inside an uncompressed one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Wide() for _ in range(2)), *(Around() for _ in range(2))])
        for outer, inner in zip(list(self.blocks)[:2], list(self.blocks)[2:], strict=True):
            outer.inner = [inner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


class TakesTurns(Frame):
    """The nesting of two blocks changes from step to step."""

    def __init__(self) -> None:
        super().__init__(Around)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outer, inner = self.blocks[:2] if len(x) % 3 else (self.blocks[1], self.blocks[0])
        outer.inner, inner.inner = [inner], []
        return super().forward(x)


class SideBySide(Frame):
    """A thread for every block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[Any] = [None] * len(self.blocks)

        def run(index: int) -> None:
            with torch.no_grad():
                found[index] = self.blocks[index](x)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(self.blocks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.stack(found).sum(0)


HARD: dict[str, Callable[[], nn.Module]] = {
    "float8": lambda: Frame(Narrow),
    "gives weights": lambda: Gives(ReturnsView),
    "a child inside": lambda: Frame(Parent),
    "itself inside": lambda: Frame(Recursive),
    "one in another": OneInAnother,
    "one in another, in turns": TakesTurns,
    "coded in uncoded": CodedInUncoded,
    "side by side": SideBySide,
}


def made(name: str) -> nn.Module:
    module: nn.Module = random_model(HARD[name])
    return module


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "place"), thinned(HARD, PLACES, every=4))
def test_hard_forwards_are_equal(name: str, place: str) -> None:
    model, plain = made(name), made(name)
    with offload(model, place) as streamer:
        assert streamer.plan.manifest.codes
        for seed in range(6):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
        for block, other in zip(model.blocks, plain.blocks, strict=True):  # also a unit on its own, outside of a step
            assert_same(step(block, {"x": rows(7)}), step(other, {"x": rows(7)}))
    assert exact(model) == exact(plain)


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_norms_in_training_mode_keep_their_statistics(place: str) -> None:
    model, plain = random_model(lambda: Frame(Norm)).train(), random_model(lambda: Frame(Norm)).train()
    with offload(model, place):
        for seed in range(4):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
    assert exact(model) == exact(plain)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "place"), thinned(["float8", "a child inside", "itself inside"], PLACES))
def test_steps_at_fixed_addresses_are_equal(name: str, place: str) -> None:
    model, plain = made(name), made(name)
    with offload(model, place) as streamer:
        step(model, {"x": rows(0)})
        with streamer.step():
            for seed in range(3):
                assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
        assert_same(step(model, {"x": rows(1)}), step(plain, {"x": rows(1)}))


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["one in another", "coded in uncoded"])
def test_units_that_need_the_same_bytes_at_once_are_refused_at_fixed_addresses(name: str, place: str) -> None:
    model, plain = made(name), made(name)
    with offload(model, place) as streamer:
        step(model, {"x": rows(0)})
        units, extents = [unit.name for unit in streamer.plan.manifest.units], streamer.plan.extents
        ring = {name: extents[units.index(f"blocks.{name}")] for name in range(4)}
        # otherwise nothing is shared: the outer one decodes nothing
        alone = name == "coded in uncoded" and not (ring[0].overlaps(ring[2]) or ring[1].overlaps(ring[3]))
        expected = nullcontext() if alone else pytest.raises(OffloadError, match="runs inside of another")
        with expected, streamer.step():
            assert_same(step(model, {"x": rows(1)}), step(plain, {"x": rows(1)}))
        for seed in range(3):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))


@pytest.mark.parametrize("place", only(PLACES, "streams"))
def test_a_compiled_step_is_equal(place: str) -> None:
    model, plain = random_model(), random_model()
    with offload(model, place) as streamer:
        streamer.compile(backend="eager")
        for seed in (0, 0, 0, 0):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_layers_of_the_life_cycle_are_compressed(size: int) -> None:
    prefetch = PrefetchOffloadConfig(offload_group_size=size, offload_num_in_group=1, offload_prefetch_step=2)
    config = OffloadConfig(offload_backend="prefetch", codec="compressed", prefetch=prefetch)
    layers, plain = ([*random_model().blocks, *random_model().blocks] for _ in range(2))
    offloader = create_offloader(config)
    assert offloader.wrap_modules(iter(layers)) == layers
    offloader.post_init()
    assert offloader.streamer is not None
    assert len(offloader.streamer.plan.manifest.codes) == 2 * len(layers) // size
    for seed in range(6):
        x = y = rows(seed)
        for layer, other in zip(layers, plain, strict=True):
            with torch.no_grad():
                x, y = layer(x), other(y)
        assert_same([x], [y])
    offloader.streamer.remove()
    for layer, other in zip(layers, plain, strict=True):
        assert exact(layer) == exact(other)


def test_two_models_take_turns() -> None:
    models = [random_model(lambda n=n: Chain(num_blocks=n)) for n in (3, 5)]
    plain = [random_model(lambda n=n: Chain(num_blocks=n)) for n in (3, 5)]
    with offload(models[0]), offload(models[1], "in part"):
        for seed in range(4):
            for model, other in zip(models, plain, strict=True):
                assert_same(step(model, {"x": rows(seed)}), step(other, {"x": rows(seed)}))


def test_threads_that_call_one_model_take_turns() -> None:
    model, plain = random_model(), random_model()
    expected = [step(plain, {"x": rows(seed)}) for seed in range(6)]
    found: dict[int, list[torch.Tensor]] = {}

    def call(first: int) -> None:
        for seed in range(first, 6, 3):
            found[seed] = step(model, {"x": rows(seed)})

    with offload(model):
        threads = [threading.Thread(target=call, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == list(range(6))
    for seed, tensors in found.items():
        assert_same(tensors, expected[seed])


@pytest.mark.parametrize("codec", ["auto", "none"])
def test_on_a_cpu_nothing_is_compressed_unless_requested(codec: str) -> None:
    model = random_model()
    with weightstream.offload(model, device="cpu", device_budget="200KiB", codec=codec) as streamer:
        assert not streamer.plan.manifest.codes
        assert streamer.plan.buffer_nbytes == 0


def test_incompressible_weights_move_uncompressed() -> None:
    model, plain = built("Stack", torch.float32), built("Stack", torch.float32)
    with weightstream.offload(model.module, device="cpu", device_budget="32KiB", codec="compressed") as streamer:
        assert not streamer.plan.manifest.codes
        for seed in range(3):
            assert_same(step(model.module, model.inputs(seed)), step(plain.module, plain.inputs(seed)))
