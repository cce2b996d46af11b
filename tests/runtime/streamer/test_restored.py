"""The state after `remove()`, and the refusals of an offloaded model: moves, a second offload, hooks."""

from __future__ import annotations

import gc
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from models import MODELS, Model, assert_same, model_nbytes, weights
from repeats import thinned
from streaming import DEVICES, assert_steps_equal, open_streamer, plain, run
from weightstream.errors import OffloadError, PlanError

NAMES = (
    "Stack",
    "TiedLinears",
    "StridedParameters",
    "QuantisedWeights",
    "ViewsOfOneStorage",
    "Recurrent",
    "Parametrised",
    "SharedBlock",
    "llama-bf16",
    "albert",
)


def tensor_identity(module: nn.Module, device: str = "cpu") -> dict[str, tuple[Any, ...]]:
    """All properties of a restored weight. Its address is among them only if the weights never moved."""
    return {
        name: (
            id(tensor),
            (tensor.data_ptr(), tensor.storage_offset()) if device == "cpu" else None,
            (tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf),
        )
        for name, tensor in weights(module).items()
    }


PYTHON = {"__slotnames__"}  # a first `copy.deepcopy` of an instance adds it to the class


def attributes(module: nn.Module) -> dict[str, tuple[type, tuple[str, ...], tuple[str, ...], str]]:
    """For each submodule: class, instance attributes, class attributes, forward signature."""
    return {
        name: (type(m), tuple(vars(m)), tuple(sorted(vars(type(m)).keys() - PYTHON)), str(inspect.signature(m.forward)))
        for name, m in module.named_modules()
    }


def hooks(module: nn.Module) -> dict[str, list[int]]:
    """The ids of the functions in every non-empty hook dictionary of every submodule."""
    return {
        f"{name}.{key}": [id(function) for function in value.values()]
        for name, submodule in module.named_modules()
        for key, value in vars(submodule).items()
        if key.endswith("_hooks") and value
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "num_steps"), thinned(NAMES, [0, 3]))
def test_remove_restores_exactly(name: str, num_steps: int, device: str) -> None:
    model = MODELS[name]()
    next(p for p in model.module.parameters() if p.dim() > 1).requires_grad_(False)
    expected = tensor_identity(model.module, device), attributes(model.module), hooks(model.module)
    values = [tensor.detach().clone() for tensor in weights(model.module).values()]
    streamer = open_streamer(model, device)
    for seed in range(num_steps):
        run(model, device, seed)
    streamer.remove()
    assert (tensor_identity(model.module, device), attributes(model.module), hooks(model.module)) == expected
    assert not hasattr(model.module, "weightstream")
    assert_same(list(weights(model.module).values()), values)
    assert_steps_equal(model, MODELS[name](), "cpu", range(2))


def test_remove_leaves_no_hooks() -> None:
    """The comparison above relies on this: a model that was offloaded and removed has no hooks."""
    model = MODELS["llama"]()
    before = hooks(model.module)
    with open_streamer(model, "cpu"):
        run(model, "cpu", 0)
    assert hooks(model.module) == before
    assert not any(key.endswith(("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")) for key in before)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["Stack", "KeywordOnly", "llama", "t5"])
def test_requires_grad_class_and_signature_are_kept_while_offloaded(name: str) -> None:
    model = MODELS[name]()
    frozen = next(model.module.parameters())
    frozen.requires_grad_(False)
    flags = {key: p.requires_grad for key, p in model.module.named_parameters()}
    signature, model_class = inspect.signature(model.module.forward), type(model.module)
    with open_streamer(model, "cpu"):
        for seed in range(2):
            assert {key: p.requires_grad for key, p in model.module.named_parameters()} == flags
            assert inspect.signature(model.module.forward) == signature
            assert isinstance(model.module, model_class)
            run(model, "cpu", seed)


def test_hooks_of_the_user_fire_and_stay() -> None:
    model = MODELS["Stack"]()
    calls: list[str] = []
    model.module.register_forward_pre_hook(lambda *_: calls.append("root"))
    model.module.blocks[1].register_forward_hook(lambda *_: calls.append("block"))
    before = hooks(model.module)
    with open_streamer(model, "cpu"):
        run(model, "cpu", 0)
        assert calls == ["root", "block"]
    assert hooks(model.module) == before
    run(model, "cpu", 0)
    assert calls == ["root", "block"] * 2


def test_a_hook_of_the_user_sees_true_weights_and_may_change_the_output() -> None:
    model, reference = MODELS["Stack"](), MODELS["Stack"]()
    for module in (model.module, reference.module):
        module.blocks[4].register_forward_hook(lambda block, _, output: output + block.up.weight.sum())
    with open_streamer(model, "cpu"):
        assert_steps_equal(model, reference, "cpu", range(4))


@pytest.mark.parametrize("device", DEVICES)
def test_the_streamer_is_found_on_the_model_and_removes_itself(device: str) -> None:
    model, num_threads = MODELS["Stack"](), threading.active_count()
    with open_streamer(model, device) as streamer:
        assert model.module.weightstream is streamer
        run(model, device, 0)
    assert not hasattr(model.module, "weightstream")
    assert threading.active_count() == num_threads
    streamer.remove()
    assert_steps_equal(model, MODELS["Stack"](), "cpu", range(2))


def test_leaving_the_context_by_an_exception_removes_too() -> None:
    model = MODELS["Stack"]()
    before = tensor_identity(model.module), attributes(model.module)
    with pytest.raises(KeyError), open_streamer(model, "cpu"):
        raise KeyError("of the user")
    assert (tensor_identity(model.module), attributes(model.module)) == before


def test_a_dropped_streamer_does_not_keep_the_model_alive() -> None:
    model, num_threads = MODELS["Stack"](), threading.active_count()
    open_streamer(model, "cpu")
    run(model, "cpu", 0)
    alive = weakref.ref(model.module)
    del model
    gc.collect()
    assert alive() is None
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("name", ["Stack", "llama", "Recurrent"])
def test_an_impossible_budget_does_not_change_the_model(name: str) -> None:
    model = MODELS[name]()
    before = tensor_identity(model.module), attributes(model.module), hooks(model.module)
    with pytest.raises(PlanError, match=r"1.0KiB.*\d+ bytes"):
        weightstream.offload(model.module, device="cpu", device_budget="1KiB")
    assert (tensor_identity(model.module), attributes(model.module), hooks(model.module)) == before
    assert_steps_equal(model, MODELS[name](), "cpu", range(2))


def test_a_budget_as_text_equals_the_budget_in_bytes() -> None:
    model = MODELS["llama"]()
    budget = model_nbytes(model.module) // 2048
    with weightstream.offload(model.module, device="cpu", device_budget=f"{budget}KiB") as streamer:
        in_words = streamer.plan
    with weightstream.offload(model.module, device="cpu", device_budget=budget * 1024) as streamer:
        assert streamer.plan == in_words


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "to(cpu)": lambda m: m.to("cpu"),
    "to(meta)": lambda m: m.to("meta"),
    "to(float16)": lambda m: m.to(torch.float16),
    "to(tensor)": lambda m: m.to(torch.zeros(1, dtype=torch.float64)),
    "cuda": lambda m: m.cuda(),
    "cpu": lambda m: m.cpu(),
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "block.to": lambda m: m.blocks[0].to("cpu"),
    "block.half": lambda m: m.blocks[3].half(),
    "leaf.to": lambda m: m.blocks[5].up.to(torch.float64),
    "list.float": lambda m: m.blocks.float(),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_moving_and_converting_are_refused(conversion: str, device: str) -> None:
    """Except those that change nothing."""
    model, reference = MODELS["Stack"](), plain("Stack", device)
    nothing = {"float", "list.float"} | ({"to(cpu)", "cpu", "block.to"} if device == "cpu" else {"cuda"})
    with open_streamer(model, device):
        for seed in range(2):
            with nullcontext() if conversion in nothing else pytest.raises(OffloadError, match="remove"):
                CONVERSIONS[conversion](model.module)
            assert_steps_equal(model, reference, device, range(seed, seed + 2))
    model.module.double()
    assert {p.dtype for p in model.module.parameters()} == {torch.float64}


def refuse(module: nn.Module, name: str) -> None:
    """Check that a further offload of `module` is refused with its name."""
    with pytest.raises(OffloadError, match=re.escape(name)):
        weightstream.offload(module, device="cpu", device_budget="1GiB")


@pytest.fixture
def offloaded() -> Iterator[Model]:
    model = MODELS["Stack"]()
    with open_streamer(model, "cpu"):
        yield model
        assert_steps_equal(model, MODELS["Stack"](), "cpu", range(3))


def test_offloading_twice_is_refused(offloaded: Model) -> None:
    refuse(offloaded.module, "Stack")


def test_offloading_a_part_of_an_offloaded_model_is_refused(offloaded: Model) -> None:
    refuse(offloaded.module.blocks[2], "blocks.2")
    refuse(offloaded.module.blocks[2].up, "blocks.2.up")


def test_offloading_a_model_with_an_offloaded_part_is_refused(offloaded: Model) -> None:
    refuse(nn.Sequential(nn.Linear(32, 32), offloaded.module), "1")


def test_offloading_again_after_remove_works() -> None:
    model, reference = MODELS["Stack"](), MODELS["Stack"]()
    for _ in range(3):
        with open_streamer(model, "cpu"):
            assert_steps_equal(model, reference, "cpu", range(3))


def test_hooks_of_accelerate_are_refused() -> None:
    hooks_of_accelerate = pytest.importorskip("accelerate.hooks")
    model = MODELS["Stack"]()
    hooks_of_accelerate.add_hook_to_module(model.module.blocks[1], hooks_of_accelerate.ModelHook())
    before = tensor_identity(model.module), attributes(model.module)
    refuse(model.module, "blocks.1")
    assert (tensor_identity(model.module), attributes(model.module)) == before
    assert_steps_equal(model, MODELS["Stack"](), "cpu", range(2))
