"""Shared parts of the tests of compressed weights: models whose floats are compressed, however small, and offloaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from models import MODELS, Model, model_nbytes, randomise, weights
from streaming import least_budget, once
from weightstream.plan import planner

KINDS = (torch.bfloat16, torch.float16)
PLACES = ("streams", "in part", "resident")


@pytest.fixture
def code_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compress tensors of any size, though a tile takes more bytes than a small matrix."""
    monkeypatch.setattr(planner, "MAX_SHARE", {"auto": 0.97, "compressed": 100.0})


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert all float32 weights to another dtype, storage by storage, so that ties, strides and views stay."""
    storages: dict[int, torch.Tensor] = {}
    for tensor in weights(module).values():
        if tensor.dtype is torch.float32:
            old = tensor.untyped_storage()
            if old.data_ptr() not in storages:
                storages[old.data_ptr()] = torch.empty(0).set_(old).to(dtype)
            new = storages[old.data_ptr()].untyped_storage()
            view = torch.empty(0, dtype=dtype).set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())
            tensor.data = view
            storages[new.data_ptr()] = storages[old.data_ptr()]
    return module


def built(name: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    """A model of `models` with weights and inputs in this dtype. Building it twice gives the same bits."""
    model = MODELS[name]()

    def inputs(seed: int) -> dict[str, Any]:
        batch = model.inputs(seed)
        return {
            k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()
        }

    return Model(module=cast(model.module, dtype), inputs=inputs)


class Block(nn.Module):
    """A residual pair of linears whose matrices become smaller when they are compressed."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks in a row."""

    def __init__(self, num_blocks: int = 5, width: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def random_model(module_class: type[nn.Module] = Chain, dtype: torch.dtype = torch.bfloat16, **args: Any) -> Any:
    """A model in eval mode with seeded weights. Building it twice gives the same bits."""
    return cast(randomise(module_class(**args), 5), dtype)


def rows(seed: int, width: int = 128, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(3 + seed, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def offload(module: nn.Module, place: str = "streams", **settings: Any) -> weightstream.Streamer:
    """Offload with compressed weights: at the least budget, half-way to all of them, or with room for all."""
    budget = budgets(module, (place,))[place]
    return weightstream.offload(module, device="cpu", device_budget=budget, codec="compressed", **settings)


def budgets(module: nn.Module, places: Sequence[str] = PLACES) -> dict[str, int]:
    """Budget in bytes for each place: the least one, from a refusal; half-way; and enough for all weights."""
    most = once(_held, module, "cpu", codec="compressed")
    least = most if set(places) == {"resident"} else least_budget(module, "cpu", codec="compressed")
    return {"streams": least, "in part": (least + most) // 2, "resident": most}


def _held(module: nn.Module, device: str, codec: str) -> int:
    """Bytes of the plan with all weights on the device."""
    room = 16 * model_nbytes(module) + (1 << 20)
    with weightstream.offload(module, device=device, device_budget=room, codec=codec) as streamer:
        return streamer.plan.device_nbytes


def exact(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Everything about a module's tensors: type, attributes, shape, stride, bytes, and shared memory."""
    places: dict[tuple[str, int], int] = {}
    found = {}
    for name, tensor in weights(module).items():
        where = places.setdefault((str(tensor.device), tensor.untyped_storage().data_ptr()), len(places))
        data = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.dim() else tensor.detach()
        facts = (
            type(tensor),
            dict(vars(tensor)),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
        )
        found[name] = (*facts, where, data.tolist())
    return found


class Messages(list[str]):
    """The warnings that weightstream has logged so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__()
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        records = (record for record in self._caplog.records if record.name.startswith("weightstream"))
        return iter([record.getMessage() for record in records if record.levelno >= logging.WARNING])

    def __len__(self) -> int:
        return len(list(iter(self)))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.WARNING, logger="weightstream")
    return Messages(caplog)
