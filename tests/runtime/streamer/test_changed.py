"""Models that users change before, during or after offloading have the bits of the plain model with the same changes.

Each entry of WAYS changes a model and returns the undo. Classes are created for each model, so that a change of a class
affects only the models of one test.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import weightstream
from models import randomise

WIDTH = 32
Undo = Callable[[], object]


class Model(NamedTuple):
    """Two models of the same classes with the same weights, one of which will be offloaded."""

    plain: Any
    streamed: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.plain, self.streamed))


def classes() -> tuple[Any, Any]:
    """A block, and a model of six."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.gain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.gain * self.mixed(torch.tanh(self.up(x)))

        def mixed(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.last(self.scaled(x))

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

    return Block, Net


def models() -> Model:
    _, net = classes()
    model = randomise(net(), 0).eval()
    return Model(model, copy.deepcopy(model))


def attribute(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute, and return the function that restores it."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if had else delattr(owner, name)


def each(owners: Any, change: Callable[[Any], Undo]) -> Undo:
    undone = [change(owner) for owner in owners]
    return lambda: [undo() for undo in reversed(undone)]


def bound(module: Any, function: Callable[..., Any]) -> Any:
    return types.MethodType(function, module)


def class_forward(kind: Any) -> Undo:
    forward = kind.forward
    return attribute(kind, "forward", lambda self, x: 2 * forward(self, x))


def other_class(module: Any) -> Undo:
    kind = type(module)

    class Merged(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0.75

    module.__class__ = Merged
    return lambda: setattr(module, "__class__", kind)


def own_forward(module: Any) -> Undo:
    kind = type(module)
    return attribute(module, "forward", bound(module, lambda self, x: kind.forward(self, x) * 1.5))


def wrapped_forward(module: Any) -> Undo:
    inner = module.forward

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) * 1.25

    module.forward = wrapper
    return lambda: setattr(module, "forward", inner)  # as hooks of diffusers do


def hooked(module: Any) -> Undo:
    """A hook that reads a weight, and one that changes the output."""
    first = next(iter(module.parameters()))
    handles = (
        module.register_forward_pre_hook(lambda _, args: (args[0] + first.mean(),)),
        module.register_forward_hook(lambda _, args, output: output * first.std()),
    )
    return lambda: [handle.remove() for handle in handles]


class Low(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.b(self.a(x))


def adapter(block: Any) -> Undo:
    before = block.up
    block.up = Low(before)
    return lambda: setattr(block, "up", before)


def wider(block: Any) -> Undo:
    """Another linear layer, with more inputs, replaces one."""
    before = block.down

    class Padded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cat((x, x), -1))

    with torch.random.fork_rng():
        torch.manual_seed(2)
        block.down = Padded(2 * WIDTH, WIDTH)
    return lambda: setattr(block, "down", before)


def fused(block: Any) -> Undo:
    """A projection that joins the weights of both linear layers replaces them."""
    block.both = nn.Linear(WIDTH, 2 * WIDTH)
    with torch.no_grad():
        block.both.weight.copy_(torch.cat((block.up.weight, block.down.weight)))
        block.both.bias.copy_(torch.cat((block.up.bias, block.down.bias)))
    undo = attribute(block, "mixed", lambda x: torch.tanh(block.both(x)).sum(-1, keepdim=True) * x)

    def unfused() -> None:
        undo()
        del block.both

    return unfused


def shallow(model: Any) -> Undo:
    """A shallow copy of a block with another attribute replaces it."""
    before = model.blocks[2]
    model.blocks[2] = copy.copy(before)
    model.blocks[2].gain = 3.0
    return lambda: model.blocks.__setitem__(2, before)


def deep(model: Any) -> Undo:
    before = model.blocks[2]
    model.blocks[2] = copy.deepcopy(before)
    model.blocks[2].gain = 3.0
    return lambda: model.blocks.__setitem__(2, before)


def shared(model: Any) -> Undo:
    """One block in two places."""
    before = model.blocks[3]
    model.blocks[3] = model.blocks[0]
    return lambda: model.blocks.__setitem__(3, before)


def parametrized(block: Any) -> Undo:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    parametrize.register_parametrization(block.up, "weight", Doubled())
    return lambda: parametrize.remove_parametrizations(block.up, "weight", leave_parametrized=False)


def normed(norm: Callable[[nn.Module], object], remove: Callable[[nn.Module], object]) -> Callable[[Any], Undo]:
    """A pre-hook computes the weights of each block from others, before each call."""

    def change(model: Any) -> Undo:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")  # a deprecated function
            torch.manual_seed(3)
            for block in model.blocks:
                norm(block.up)
        return lambda: [remove(block.up) for block in model.blocks]

    return change


def trainable(model: Any) -> Undo:
    flags = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(not flags[0])
    return lambda: [p.requires_grad_(flag) for p, flag in zip(model.parameters(), flags, strict=True)]


def rescaled(block: Any) -> Undo:
    """New values in the same parameters, as in hotswapping."""
    before = block.down.weight.data.clone()
    block.down.weight.data.mul_(3)
    return lambda: block.down.weight.data.copy_(before)


def in_dict(model: Any) -> Undo:
    """The blocks move into a container of another class."""
    before = model.blocks
    model.blocks = nn.ModuleDict({str(i): block for i, block in enumerate(before)})
    undo = attribute(
        model, "forward", bound(model, lambda self, x: self.last(self.scaled(_through(self.blocks.values(), x))))
    )
    return lambda: (undo(), setattr(model, "blocks", before))


def _through(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


class Way(NamedTuple):
    change: Callable[[Any], Undo]  # of one model
    of_class: bool = False  # it changes both models at once
    autocast: bool = False
    compiles: bool = True


WAYS = {
    "class forward of a model": Way(lambda model: class_forward(type(model)), of_class=True),
    "class forward of blocks": Way(lambda model: class_forward(type(model.blocks[0])), of_class=True),
    "method of a class": Way(
        lambda model: attribute(type(model.blocks[0]), "mixed", lambda self, x: self.down(x) * 7), of_class=True
    ),
    "another class of blocks": Way(lambda model: each(model.blocks, other_class)),
    "another class of the model": Way(other_class),
    "forward of a block": Way(lambda model: own_forward(model.blocks[2])),
    "forward of the model": Way(own_forward),
    "wrapped forward of blocks": Way(lambda model: each(model.blocks, wrapped_forward)),
    "wrapped forward of the model": Way(wrapped_forward),
    "method of the model": Way(lambda model: attribute(model, "scaled", lambda x: 9 * x)),
    "hooks": Way(lambda model: each(model.blocks, hooked)),
    "adapters": Way(lambda model: each(model.blocks, adapter)),
    "wider weights": Way(lambda model: wider(model.blocks[1])),
    "fused projections": Way(lambda model: fused(model.blocks[1])),
    "shallow copy of a block": Way(shallow),
    "deep copy of a block": Way(deep),
    "shared block": Way(shared),
    "parametrized weights": Way(lambda model: each(model.blocks, parametrized)),
    "weight_norm": Way(normed(nn.utils.weight_norm, nn.utils.remove_weight_norm), compiles=False),
    "spectral_norm": Way(normed(nn.utils.spectral_norm, nn.utils.remove_spectral_norm), compiles=False),
    "pruned weights": Way(
        normed(partial(prune.l1_unstructured, name="weight", amount=9), partial(prune.remove, name="weight")),
        compiles=False,
    ),
    "requires_grad": Way(trainable),
    "other values": Way(lambda model: each(model.blocks, rescaled)),
    "container": Way(in_dict),
    "autocast": Way(lambda model: lambda: None, autocast=True, compiles=False),
}
MOMENTS = ("before", "while", "after")


def changed(way: Way, pair: Model) -> Undo:
    return way.change(pair.plain) if way.of_class else each(pair, way.change)


def assert_alike(pair: Model, way: Way, num: int = 3) -> None:
    for seed in range(num):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=way.autocast):
            assert torch.equal(pair.streamed(x), pair.plain(x))


def offloaded(model: Any, share: float = 0.6) -> weightstream.Streamer:
    nbytes = sum(p.nbytes for p in model.parameters())
    return weightstream.offload(model, device="cpu", device_budget=int(share * nbytes))


@pytest.fixture(params=["block", "matrix"])
def grain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Granularities of all units: only in some a change is inside a unit, or around it."""
    monkeypatch.setattr("weightstream.inputs.gathering.GRAINS", (request.param,))
    return str(request.param)


@pytest.mark.few(80)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_changed_model_computes_like_the_plain_one(name: str, moment: str, grain: str) -> None:
    way, pair = WAYS[name], models()
    undo: Undo = (lambda: None) if moment != "before" else changed(way, pair)
    with offloaded(pair.streamed) as streamer:
        assert_alike(pair, way)
        if moment == "while":
            undo = changed(way, pair)
            assert_alike(pair, way)
        if streamer.why_not_fixed() is None:
            with streamer.step():
                assert_alike(pair, way)
        assert streamer.stats().fills > 0
        if moment == "while":
            undo()
            assert_alike(pair, way)
            undo = changed(way, pair)
            assert_alike(pair, way)
    if moment == "after":
        undo = changed(way, pair)
    assert_alike(pair, way)
    for ours, plain in zip(pair.streamed.modules(), pair.plain.modules(), strict=True):
        assert vars(ours).keys() == vars(plain).keys()
    undo()
    assert_alike(pair, way)


@pytest.mark.few(2)
@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.compiles])
def test_a_changed_compiled_model(name: str, scope: Any) -> None:
    """Compiled code detects only some changes of a class."""
    way, pair = WAYS[name], models()
    with offloaded(pair.streamed) as streamer:
        streamer.compile(scope, backend="aot_eager")
        assert_alike(pair, way)
        undo = changed(way, pair)
        assert_alike(pair, way, 4)
        undo()
        assert_alike(pair, way)
    assert_alike(pair, way)


@pytest.mark.parametrize("of", ["model", "block"])
def test_a_shallow_copy_computes_with_its_own_attributes(of: str) -> None:
    pair, x = models(), torch.randn(2, WIDTH)
    with torch.no_grad():
        with offloaded(pair.streamed):
            assert torch.equal(pair.streamed(x), pair.plain(x))
            ours, plain = ((copy.copy(m) if of == "model" else copy.copy(m.blocks[1])) for m in pair)
            for each_copy in (ours, plain):
                each_copy.gain, each_copy.scaled = 5.0, lambda x: 7 * x
            assert torch.equal(ours(x), plain(x))
            assert torch.equal(ours.forward(x), plain.forward(x))
            assert torch.equal(pair.streamed(x), pair.plain(x))
        assert torch.equal(ours(x), plain(x))
        assert torch.equal(pair.streamed(x), pair.plain(x))


def test_a_flag_is_seen_in_a_model_that_counts_in_its_class() -> None:
    """A counter of steps is state. Adopting its new value must not adopt a flag that was changed meanwhile."""

    class Counting(nn.Module):
        num_calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.is_fused = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).num_calls += 1
            if self.is_fused:  # reads a weight outside of its module
                return self.b(x) @ self.a.weight
            return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]

    torch.manual_seed(4)
    model = nn.Sequential(*[Counting() for _ in range(6)]).eval()
    plain, x = copy.deepcopy(model), torch.randn(2, 64)
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget="40KiB", codec="none") as streamer:
        for _ in range(4):
            assert torch.equal(model(x), plain(x))
        for each in (*model, *plain):
            each.is_fused = True
        assert torch.equal(model(x), plain(x))  # an eager step counts, and does not look at flags
        assert streamer._modules.has_other_code(looks_closely=True)
        with streamer.step():  # so the next one is watched
            assert torch.equal(model(x), plain(x))
