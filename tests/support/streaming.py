"""How the value tests open a streamer on a model of `models`, and the plain model's outputs for the same steps."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from models import MODELS, Model, assert_same, model_nbytes, step, to_device, weights
from weightstream.api.multi_gpu import Stripes
from weightstream.errors import PlanError
from weightstream.inputs import gathering
from weightstream.plan import planner

DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
)


_KNOWN: dict[Any, int] = {}


def once(ask: Callable[..., int], module: nn.Module, device: str, **settings: Any) -> int:
    """Cache the result of `ask`, which takes as long as an offload, for models with the same modules, weights and
    bytes.

    On a GPU it is called each time.
    """
    if device != "cpu":
        return ask(module, device, **settings)
    key = (
        ask,
        *settings.items(),
        facts(module),
        planner.MAX_SHARE["compressed"],
        gathering.GRAINS,
        gathering.estimate,
    )
    if key not in _KNOWN:
        _KNOWN[key] = ask(module, device, **settings)
    return _KNOWN[key]


def facts(module: nn.Module) -> tuple[Any, ...]:
    """Facts about a module that its plan depends on."""
    places: dict[int, int] = {}
    found: list[Any] = [
        (name, type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
        for name, m in module.named_modules(remove_duplicate=False)
    ]
    for name, tensor in weights(module).items():
        where = places.setdefault(tensor.untyped_storage().data_ptr(), len(places)), tensor.storage_offset()
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.append((name, type(tensor), tensor.dtype, tensor.shape, tensor.stride(), where, zlib.crc32(data)))
    return tuple(found)


def least_budget(module: nn.Module, device: str, **settings: Any) -> int:
    """The least budget in bytes that plans, from the message of a refusal."""
    return once(_asked, module, device, **settings)


def _asked(module: nn.Module, device: str, **settings: Any) -> int:
    """Try the budget that a refusal names, since sizes of compressed weights are estimates."""
    budget = 1
    for _ in range(4):
        try:
            weightstream.offload(module, device=device, device_budget=budget, **settings).remove()
            return budget
        except PlanError as error:
            (asked,) = re.findall(r"= \S+ \((\d+) bytes\)", str(error))
            budget = int(asked)
        if not settings:
            return budget
    raise AssertionError(f"{budget} bytes do not do either")


def plans(module: nn.Module, device: str, budget: int) -> bool:
    try:
        weightstream.offload(module, device=device, device_budget=budget).remove()
    except PlanError:
        return False
    return True


def open_streamer(model: Model, device: str) -> weightstream.Streamer:
    """Offload at the least budget, so that as much as possible streams."""
    budget = least_budget(model.module, device)
    return weightstream.offload(model.module, device=device, device_budget=budget)


def place(module: nn.Module, device: str) -> None:
    """Move the storages, so that strides and sharing stay. `.to` would make gapped strides dense, which changes
    bits."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in weights(module).values():
        if tensor.device.type != device:
            old = tensor.untyped_storage()
            new = storages.setdefault(old.data_ptr(), torch.UntypedStorage(old.nbytes(), device=device).copy_(old))
            moved = torch.empty(0, dtype=tensor.dtype, device=device)
            tensor.data = moved.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())


def plain(name: str, device: str) -> Model:
    model = MODELS[name]()
    place(model.module, device)
    return model


def striped(module: nn.Module, num: int, sixteenths: Sequence[int], **settings: Any) -> Stripes:
    """Offload over several devices, at the smallest budget that plans, in sixteenths of the model's bytes."""
    nbytes = model_nbytes(module)
    for share in sixteenths:
        try:
            budgets = dict.fromkeys(range(num), nbytes * share // 16)
            return weightstream.offload(module, device_budget=budgets, **settings)  # type: ignore[no-any-return]
        except PlanError:
            continue
    raise AssertionError("no budget plans")


def run(model: Model, device: str, seed: int) -> list[torch.Tensor]:
    """The outputs of one step on the inputs of `seed`."""
    return step(model.module, to_device(model.inputs(seed), device))


def assert_steps_equal(model: Model, reference: Model, device: str, seeds: range) -> None:
    """Run the same steps on both models. Buffers that a step writes change on both sides."""
    for seed in seeds:
        assert_same(run(model, device, seed), run(reference, device, seed))
