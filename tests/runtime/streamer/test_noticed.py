"""Updates that are easily missed: through other objects, other layouts, parents. Guards must not change other
behaviour."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weightstream

WIDTH = 64
UNIT_NBYTES = 4 * WIDTH * (WIDTH + 1)


def assert_equal_steps(build: Callable[[], nn.Module], update: Callable[[Any], object], budget: int) -> None:
    """Update both models alike after every step, and check that they stay equal."""
    model, plain = build(), build()
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    with weightstream.offload(model, device="cpu", device_budget=budget) as streamer, torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(x), plain(x))
            update(model)
            update(plain)
        assert streamer.stats().fills > 0
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


def linears(num: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num)]).requires_grad_(False)


def two_objects() -> nn.Sequential:
    """Two parameters over the same memory, in two units."""
    model = linears()
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    return model


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda weight: weight.data.mul_(1.5),
    "numpy": lambda weight: weight.detach().numpy().__imul__(1.5),
    "storage": lambda weight: weight.untyped_storage().__setitem__(3, 1),
    "in place": lambda weight: weight.mul_(1.5),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("index", [0, 1])
def test_a_write_through_one_of_two_objects_reaches_both_units(index: int, write: str) -> None:
    assert_equal_steps(two_objects, lambda model: WRITES[write](model[index].weight), 5 * UNIT_NBYTES)


class Turned(nn.Module):
    """Changes its layout in its own forward."""

    def __init__(self, turn: Callable[[nn.Parameter], object] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=False)
        self._turn = turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        if self._turn is not None:
            self._turn(self.weight)
        return y


TURNS: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.t_(),
    "assigned": lambda weight: setattr(weight, "data", weight.data.t()),
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("other", [2, 5])
def test_another_layout_of_a_tied_weight_is_adopted_everywhere(other: int, turn: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [Turned(TURNS[turn] if index == 1 else None) for index in range(8)]
        layers[other].weight = layers[1].weight
        return nn.Sequential(*layers)

    assert_equal_steps(build, lambda model: None, 5 * UNIT_NBYTES)


class Parent(nn.Module):
    """Updates the weight of a child that has run, while no unit is open."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        memory = torch.randn(8 * WIDTH * WIDTH + 8) / 8
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)).requires_grad_(False)
        for index, layer in enumerate(self.layers):  # not aligned, so that a read of the home is a copy
            begin = 1 + index * WIDTH * WIDTH
            layer.weight.data = memory[begin : begin + WIDTH * WIDTH].view(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 3:
                self.layers[2].weight.mul_(0.5)
        return x


def test_a_parent_updates_a_child_in_the_first_step() -> None:
    assert_equal_steps(Parent, lambda model: None, 5 * UNIT_NBYTES)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_parents_that_check_the_class_of_weights_run_as_before() -> None:
    """torch skips padded positions only if no weight has a class of its own."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, dropout=0.0)
    plain = nn.TransformerEncoder(layer, 6).eval().requires_grad_(False)
    model = copy.deepcopy(plain)
    x = torch.randn(2, 7, WIDTH)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = True
    nbytes = sum(parameter.nbytes for parameter in plain.parameters())
    with torch.no_grad():
        want = plain(x, src_key_padding_mask=mask)
        assert (want[1, 4:] == 0).all()
        with weightstream.offload(model, device="cpu", device_budget=int(0.6 * nbytes)) as streamer:
            for _ in range(4):
                assert torch.equal(model(x, src_key_padding_mask=mask), want)
            assert streamer.stats().fills > 0


def test_pickles_and_copies_of_weights_have_no_guard() -> None:
    model = linears()
    model[2].weight.tag = "mine"  # type: ignore[assignment]
    plain = copy.deepcopy(model[2].weight)
    with weightstream.offload(model, device="cpu", device_budget=4 * UNIT_NBYTES):
        weight = model[2].weight
        for made in (pickle.loads(pickle.dumps(weight)), copy.copy(weight), copy.deepcopy(weight)):
            assert type(made) is nn.Parameter
            assert not [name for name in vars(made) if name.startswith("_weightstream")]
            assert torch.equal(made, plain)
        assert pickle.loads(pickle.dumps(weight)).tag == "mine"
        torch.save(model, file := io.BytesIO())
        assert type(weight) is not nn.Parameter, "it is guarded nevertheless"
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)[2].weight, plain)


# -- what offload() and remove() cost and leave -----------------------------------------------------------------------


def test_offload_searches_all_objects_only_if_memory_has_other_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a collection of garbage takes up to a second")

    model = linears()
    gc.disable()  # removed streamers leave no views, collected or not
    try:
        monkeypatch.setattr(gc, "collect", refuse)
        for _ in range(3):
            with weightstream.offload(model, device="cpu", device_budget=4 * UNIT_NBYTES):
                model(torch.randn(2, WIDTH))
        view = model[3].weight.detach()
        with pytest.raises(AssertionError, match="collection of garbage"):
            weightstream.offload(model, device="cpu", device_budget=4 * UNIT_NBYTES)
        assert view is not None
    finally:
        gc.enable()


def test_a_removed_streamer_holds_no_weight() -> None:
    model = linears()
    streamer = weightstream.offload(model, device="cpu", device_budget=4 * UNIT_NBYTES)
    model(torch.randn(2, WIDTH))
    streamer.remove()
    storages = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    plan = streamer.plan
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert [ref for ref in storages if ref() is not None] == []
    assert streamer.plan is plan
    assert streamer.stats().steps == 1


TOUCHES: dict[str, Callable[[torch.Tensor], object]] = {
    "a view": lambda weight: weight.view(-1),
    "the address": lambda weight: weight.data_ptr(),
    "an item": lambda weight: weight.__setitem__(0, 1.0),
    "with others": lambda weight: torch._foreach_mul_([weight], 1.5),
    "as asked": lambda weight: nn.functional.relu(weight, inplace=True),
    "an operator": lambda weight: torch.ops.aten.relu_.default(weight),
}
READS: dict[str, Callable[[torch.Tensor], object]] = {
    "a sum": lambda weight: weight.sum(),
    "facts": lambda weight: (weight.shape, weight.device, weight.stride()),
    "a copy": lambda weight: weight.clone(),
}


@torch.no_grad()
@pytest.mark.parametrize("name", [*WRITES, *TOUCHES, *READS])
def test_a_possible_write_waits_once_for_the_copies_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, waited = linears(), torch.randn(3, WIDTH), []
    with weightstream.offload(model, device="cpu", device_budget=3 * UNIT_NBYTES) as streamer:
        drain = streamer._backend.drain
        monkeypatch.setattr(streamer._backend, "drain", lambda event: waited.append(drain(event)))
        for turn in range(1, 4):
            model(x)
            for _ in range(2):
                (WRITES | TOUCHES | READS)[name](model[5].weight)
            assert len(waited) == (0 if name in READS else turn)
