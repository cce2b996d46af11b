"""How the value tests open a streamer on a model of `models`, and what the plain model gives for the same steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weightstream
from models import MODELS, Model, assert_same, model_nbytes, step, to_device, weights
from weightstream.errors import PlanError

DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
)
# of a model's bytes: how far above the least budget that plans the search may stop
_RESOLUTION = 32


_LEAST: dict[object, int] = {}  # the search plans and offloads six times, and many tests are of one model


def least_budget(module: nn.Module, device: str) -> int:
    """A budget in bytes that plans, and within 1/32 of the model's bytes of one that does not."""
    tensors = weights(module)
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    forms = [(t.shape, t.stride(), t.dtype, places.index(at)) for t, at in zip(tensors.values(), places, strict=True)]
    key = device, type(module), tuple(tensors), tuple(forms)
    if key not in _LEAST:
        _LEAST[key] = _search(module, device)
    return _LEAST[key]


def _search(module: nn.Module, device: str) -> int:
    low, high = 0, 2 * model_nbytes(module)
    while high - low > model_nbytes(module) // _RESOLUTION:
        middle = (low + high) // 2
        if plans(module, device, middle):
            high = middle
        else:
            low = middle
    return high


def plans(module: nn.Module, device: str, budget: int) -> bool:
    try:
        weightstream.offload(module, device=device, device_budget=budget).remove()
    except PlanError:
        return False
    return True


def open_streamer(model: Model, device: str) -> weightstream.Streamer:
    """Offload at the least budget, so that as much streams as can."""
    budget = least_budget(model.module, device)
    return weightstream.offload(model.module, device=device, device_budget=budget)


def place(module: nn.Module, device: str) -> None:
    """Move the storages, so that strides and sharing stay: `.to` makes gapped strides dense, and the bits others."""
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


def run(model: Model, device: str, seed: int) -> list[torch.Tensor]:
    """The outputs of one step on the inputs of `seed`."""
    return step(model.module, to_device(model.inputs(seed), device))


def assert_steps_equal(model: Model, reference: Model, device: str, seeds: range) -> None:
    """Both models run the same steps; buffers that a step writes follow along on both sides."""
    for seed in seeds:
        assert_same(run(model, device, seed), run(reference, device, seed))
