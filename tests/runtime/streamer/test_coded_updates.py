"""Compressed weights between steps: reads see their bytes, and writes are detected."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors
from torch import nn
from torch.nn import functional

from coded_rig import PLACES, Block, Chain, exact, offload, random_model, rows, warned
from models import assert_same, step, weights
from repeats import thinned
from weightstream.errors import OffloadError
from weightstream.runtime.weights.home import Home

__all__ = ["warned"]

WHERE = "blocks.1.up.weight"


class Marked(torch.Tensor):
    """A class of another library."""


def saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    return torch.load(io.BytesIO(file.getvalue()))


def in_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found = tensor * 2
    return found.clone()


def on_default_device(tensor: torch.Tensor) -> torch.Tensor:
    with torch.device("meta"):
        return tensor * 2


def with_out(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.mul(tensor, 2, out=torch.empty(tensor.shape, dtype=tensor.dtype))


def assigned(tensor: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(tensor.shape, dtype=tensor.dtype)
    found[:] = tensor
    return found


def as_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of a function of the weight."""
    (found,) = torch.autograd.grad((tensor.float() ** 2).sum(), [tensor])
    return found


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda w: w.float().sum(),
    "an element": lambda w: torch.tensor(w[3, 4].item()),
    "a slice": lambda w: w[1:5, ::2],
    "rows": lambda w: torch.stack(list(w)),
    "a list": lambda w: torch.tensor(w.tolist()),
    "bytes": lambda w: w.detach().view(torch.uint8),
    "transposed": lambda w: w.T.contiguous(),
    "a conversion": lambda w: w.to(torch.float64),
    "a product elsewhere": lambda w: functional.linear(torch.ones(2, 128, dtype=w.dtype), w),
    "an operator": lambda w: torch.ops.aten.mul(w, 2),
    "foreach": lambda w: torch._foreach_mul([w, w], 2)[1],
    "concatenated": lambda w: torch.cat((w, w)),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "out": with_out,
    "copied to another": lambda w: torch.zeros(w.shape, dtype=w.dtype).copy_(w),
    "assigned to another": assigned,
    "a comparison": lambda w: torch.tensor([torch.equal(w, w), bool((w == w).all())]),
    "text": lambda w: torch.tensor(list(repr(w[:2, :2].detach()).encode())),
    "numpy": lambda w: torch.from_numpy(w.detach().view(torch.int16).numpy().copy()),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).clone(),
    "storage": lambda w: torch.tensor(list(bytes(w.untyped_storage())[:64])),
    "a clone by copy": copy.copy,
    "a deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save": saved,
    "safetensors": lambda w: safetensors.load(safetensors.save({"w": w.detach()}))["w"],
    "a subclass beside it": lambda w: (
        torch.ones(w.shape, dtype=w.dtype).as_subclass(Marked).mul(w).as_subclass(torch.Tensor)
    ),
    "inference mode": in_inference,
    "another default device": on_default_device,
    "a gradient": as_gradient,
    "a vector of parameters": lambda w: nn.utils.parameters_to_vector([w]),
    "a module that takes it": lambda w: torch.func.functional_call(
        nn.Linear(128, 256, bias=False, dtype=w.dtype), {"weight": w}, torch.ones(1, 128, dtype=w.dtype)
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", READS)
def test_a_read_between_steps_sees_the_bytes(name: str) -> None:
    model, plain = random_model(), random_model()
    expected = READS[name](plain.get_parameter(WHERE))
    with offload(model, "resident") as streamer:
        assert WHERE in streamer.plan.manifest.codes
        found = READS[name](model.get_parameter(WHERE))
        assert type(found) is type(expected)
        assert_same([found.detach()], [expected.detach()])
        again = READS[name](model.get_parameter(WHERE))  # it has been decoded now
        assert_same([again.detach()], [expected.detach()])
        assert_same(step(model, {"x": rows(0)}), step(plain, {"x": rows(0)}))
    assert exact(model) == exact(plain)


FACTS: dict[str, Callable[[torch.Tensor], object]] = {
    "shape": lambda w: (w.shape, w.size(), w.size(0), w.ndim, w.dim(), len(w)),
    "layout": lambda w: (w.stride(), w.is_contiguous(), w.storage_offset(), w.layout),
    "type": lambda w: (w.dtype, w.device, w.is_floating_point(), w.is_cuda, isinstance(w, nn.Parameter)),
    "size": lambda w: (w.numel(), w.nelement(), w.element_size(), w.nbytes),
    "gradients": lambda w: (w.requires_grad, w.is_leaf, w.grad, w.grad_fn, w.requires_grad_(True) is w),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_weight_decode_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = random_model(), random_model()
    with offload(model):
        monkeypatch.setattr(Home, "check", lambda home: pytest.fail("decoded"))
        assert FACTS[name](model.get_parameter(WHERE)) == FACTS[name](plain.get_parameter(WHERE))
        monkeypatch.undo()


def test_concurrent_reads_see_the_bytes() -> None:
    model, plain = random_model(), random_model()
    found: list[bool] = []

    def read() -> None:
        pairs = zip(weights(model).values(), weights(plain).values(), strict=True)
        found.extend([torch.equal(mine.float(), theirs.float()) for mine, theirs in pairs])

    with offload(model):
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 4 * len(weights(plain))


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_copies_of_an_offloaded_model_are_plain_ones(place: str) -> None:
    model, plain = random_model(), random_model()
    file = io.BytesIO()
    with offload(model, place):
        torch.save(model, file)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(io.BytesIO(file.getvalue()), weights_only=False),
        ]
        for other in copies:
            assert_same(step(other, {"x": rows(0)}), step(plain, {"x": rows(0)}))
            assert exact(other) == exact(plain)
        state = model.state_dict()
        assert_same(list(state.values()), list(plain.state_dict().values()))
        assert_same(step(model, {"x": rows(0)}), step(plain, {"x": rows(0)}))


def seeded(shape: torch.Size, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16) / 8


def load_state(model: nn.Module) -> None:
    model.load_state_dict(
        {name: seeded(tensor.shape, index) for index, (name, tensor) in enumerate(weights(model).items())}
    )


def optimise(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None


def give_new_data(model: nn.Module) -> None:
    weight = model.get_parameter(WHERE)
    weight.data = seeded(weight.shape)


def give_transposed_data(model: nn.Module) -> None:
    weight = model.get_parameter(WHERE)
    weight.data = seeded(weight.shape[::-1]).t()


def swap_values(model: nn.Module) -> None:
    first, second = model.get_parameter(WHERE), model.get_parameter("blocks.3.up.weight")
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def write_to_numpy(model: nn.Module) -> None:
    array = model.get_parameter(WHERE).data.view(torch.int16).numpy()
    array[:] = array[::-1].copy()


UPDATES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda model: model.get_parameter(WHERE).mul_(0.5),
    "an element": lambda model: model.get_parameter(WHERE)[3].zero_(),
    "by index": lambda model: model.get_parameter(WHERE).__setitem__((slice(None), 5), 1.0),
    "through data": lambda model: model.get_parameter(WHERE).data.mul_(0.5),
    "one element through data": lambda model: model.get_parameter(WHERE).data[0].fill_(2.0),
    "through detach": lambda model: model.get_parameter(WHERE).detach().mul_(0.5),
    "through a view": lambda model: model.get_parameter(WHERE).view(-1)[:900].neg_(),
    "through numpy": write_to_numpy,
    "through dlpack": lambda model: torch.from_dlpack(model.get_parameter(WHERE).data).mul_(0.5),
    "copied from another": lambda model: model.get_parameter(WHERE).copy_(seeded(model.get_parameter(WHERE).shape)),
    "out": lambda model: torch.mul(seeded(torch.Size((256, 128))), 2, out=model.get_parameter(WHERE)),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "an optimizer": optimise,
    "initialised": lambda model: nn.init.normal_(
        model.get_parameter(WHERE), generator=torch.Generator().manual_seed(1)
    ),
    "a vector of parameters": lambda model: nn.utils.vector_to_parameters(
        seeded(torch.Size((32768,))), [model.get_parameter(WHERE)]
    ),
    "load_state_dict": load_state,
    "new data": give_new_data,
    "new data of another layout": give_transposed_data,
    "swapped with another": swap_values,
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "place"), thinned(UPDATES, ["streams", "resident"]))
def test_an_update_between_steps_is_in_the_next_and_in_the_restored_model(name: str, place: str) -> None:
    model, plain = random_model(), random_model()
    with offload(model, place) as streamer, torch.no_grad():
        assert WHERE in streamer.plan.manifest.codes
        for turn in range(3):
            for one in (model, plain):
                UPDATES[name](one)
            assert_same(step(model, {"x": rows(turn)}), step(plain, {"x": rows(turn)}))
            assert_same([model.get_parameter(WHERE).detach()], [plain.get_parameter(WHERE).detach()])
            assert_same(step(model.blocks[1], {"x": rows(turn)}), step(plain.blocks[1], {"x": rows(turn)}))
        held = streamer.stats().held_nbytes
        assert held["device"] <= streamer.plan.device_nbytes
        step(model, {"x": rows(3)})
    values = [[data for *_, data in exact(one).values()] for one in (model, plain)]
    assert values[0] == values[1]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", UPDATES)
def test_an_update_before_the_first_step_is_in_the_restored_model(name: str) -> None:
    model, plain = random_model(), random_model()
    with offload(model), torch.no_grad():
        for one in (model, plain):
            UPDATES[name](one)
    for mine, theirs in zip(weights(model).values(), weights(plain).values(), strict=True):
        assert_same([mine.detach()], [theirs.detach()])
    assert_same(step(model, {"x": rows(0)}), step(plain, {"x": rows(0)}))


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "a view": lambda w: w[3:90],
    "numpy": lambda w: torch.from_numpy(w.data.view(torch.int16).numpy()).view(w.dtype),
    "dlpack": lambda w: torch.from_dlpack(w.data),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("place", ["streams", "resident"])
def test_an_alias_from_before_steps_writes_after_them(name: str, place: str) -> None:
    model, plain = random_model(), random_model()
    with offload(model, place), torch.no_grad():
        step(model, {"x": rows(0)})
        aliases = [ALIASES[name](one.get_parameter(WHERE)) for one in (model, plain)]
        for turn in range(3):
            assert_same(step(model, {"x": rows(turn)}), step(plain, {"x": rows(turn)}))
            for alias in aliases:
                alias.mul_(0.5)
        assert_same(step(model, {"x": rows(3)}), step(plain, {"x": rows(3)}))
    assert exact(model)[WHERE][-1] == exact(plain)[WHERE][-1]


class Late(Chain):
    """Reads a weight outside of its unit, only in some steps."""

    def forward(self, x: torch.Tensor, late: bool = False) -> torch.Tensor:
        x = super().forward(x)
        return x * self.blocks[1].up.weight.float().norm().to(x.dtype) if late else x


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_weight_read_outside_of_its_unit_long_after_the_first_step(place: str) -> None:
    model, plain = random_model(Late), random_model(Late)
    with offload(model, place):
        for seed in range(6):
            inputs = {"x": rows(seed), "late": seed > 2}
            assert_same(step(model, inputs), step(plain, inputs))


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["from the start", "later"])
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_reads_and_updates_weights_of_other_units(place: str, when: str) -> None:
    model, plain = random_model(), random_model()
    seen: dict[int, list[float]] = {id(model): [], id(plain): []}

    def add_hook(one: Chain) -> None:
        def hook(module: nn.Module, args: Any) -> None:
            with torch.no_grad():
                seen[id(one)].extend(block.up.weight.float().sum().item() for block in one.blocks)
                one.blocks[4].down.weight.mul_(0.5)
                one.blocks[0].down.weight.add_(0.25)
                module.up.weight.neg_()

        one.blocks[2].register_forward_pre_hook(hook)

    with offload(model, place):
        for seed in range(6):
            if seed == (0 if when == "from the start" else 3):
                add_hook(model)
                add_hook(plain)
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
            assert seen[id(model)] == seen[id(plain)]
    assert exact(model) == exact(plain)


class Decays(Block):
    """Its forward updates its own weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        with torch.no_grad():
            self.down.weight.mul_(0.75)
        return x


class Decaying(Chain):
    """Every block runs twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Decays() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


@pytest.mark.few(1)
@pytest.mark.usefixtures("nothing_foreseen")  # another plan may leave the updated weights uncompressed
@pytest.mark.parametrize("place", PLACES)
def test_a_forward_that_updates_its_own_weights(place: str) -> None:
    model, plain = random_model(Decaying), random_model(Decaying)
    with offload(model, place) as streamer:
        for seed in range(4):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
        with pytest.raises(OffloadError, match=r"updated by the model's own forward|read outside"), streamer.step():
            pass
    assert exact(model) == exact(plain)


def test_gradients_are_turned_off_and_on_again() -> None:
    model, plain = random_model(), random_model()
    with offload(model):
        for one in (model, plain):
            one.requires_grad_(False)
            one.blocks[0].up.weight.requires_grad = True
        assert_same(step(model, {"x": rows(0)}), step(plain, {"x": rows(0)}))
    assert exact(model) == exact(plain)


def test_weights_that_are_only_read_stay_compressed(warned: list[str]) -> None:
    model = random_model()
    with offload(model) as streamer:
        coded = {alias for alias, home in streamer._homes.homes.items() if home.layout is not None}
        assert coded == streamer.plan.manifest.codes.keys()
        for seed in range(3):
            step(model, {"x": rows(seed)})
            model.get_parameter(WHERE).float().sum()
            model.state_dict()
        assert {alias for alias, home in streamer._homes.homes.items() if home.layout is not None} == coded
        with torch.no_grad():
            model.get_parameter(WHERE).mul_(2)
        step(model, {"x": rows(0)})
        assert {alias for alias, home in streamer._homes.homes.items() if home.layout is not None} == coded - {WHERE}
    assert list(warned) == []


def test_memory_shared_by_multiprocessing() -> None:
    model, plain = random_model(), random_model()
    with offload(model), warnings.catch_warnings():
        model.get_parameter(WHERE).share_memory_()
        model.get_parameter("blocks.2.up.weight").detach().share_memory_()
        for seed in range(3):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
    for mine, theirs in zip(weights(model).values(), weights(plain).values(), strict=True):
        assert_same([mine.detach()], [theirs.detach()])
