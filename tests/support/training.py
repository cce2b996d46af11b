"""Tiny models that are trained through adapters, steps of training, and poison for memory that no unit owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import weightstream
from models import randomise
from weightstream.runtime.ring.binding import Binding
from weightstream.runtime.ring.engine import Engine

Recompute = Literal["kept", "recomputed", "reentrant"]
WIDTH, DEPTH, RANK = 64, 5, 2


class Adapted(nn.Module):
    """A frozen linear layer and an adapter of low rank, with dropout in training mode."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width_out)
        self.down, self.up = nn.Linear(width_in, RANK, bias=False), nn.Linear(RANK, width_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = functional.dropout(x, 0.1, self.training)
        return self.base(x) + self.up(self.down(dropped))


class Block(nn.Module):
    """Stores a tensor beside its output, and updates a buffer in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(WIDTH), nn.Conv1d(1, 1, 3, padding=1)
        self.query, self.wide, self.back = Adapted(WIDTH, WIDTH), Adapted(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.stored: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = self.query(y) + self.conv(y.unsqueeze(1)).squeeze(1)
        self.stored = functional.silu(self.back(self.wide(y)))
        return x + torch.tanh(self.back(self.wide(torch.tanh(y))))


class Keeps(torch.autograd.Function):
    """A product whose node keeps the weight without saving it, as those of bitsandbytes do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight.t()
        return x @ ctx.weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad @ ctx.weight.t(), None


def run_blocks(blocks: Iterable[nn.Module], x: torch.Tensor, recompute: Recompute) -> torch.Tensor:
    """Run the blocks one after another; with gradients, each in a checkpoint unless its activations are kept."""
    for block in blocks:
        if recompute == "kept" or not torch.is_grad_enabled():
            x = block(x)
        else:
            x = checkpoint(block, x, use_reentrant=recompute == "reentrant")
    return x


class Net(nn.Module):
    def __init__(self, recompute: Recompute = "kept") -> None:
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(Block() for _ in range(DEPTH)), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run_blocks(self.blocks, x, self.recompute)

    def stored(self) -> torch.Tensor:
        """A loss over the tensors that blocks have stored, whose graph no output of a block leads to."""
        found = [block.stored for block in self.blocks if isinstance(block, Block) and block.stored is not None]
        return sum((each.square().mean() for each in found), torch.zeros(()))


def net(recompute: Recompute = "kept", *, dtype: torch.dtype = torch.float32) -> Net:
    """A net whose adapters alone are trained. The first block's input needs a gradient for a reentrant checkpoint."""
    model = randomise(Net(recompute), 3).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".up." in name or ".down." in name)
    return model.train()  # type: ignore[return-value]


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def inputs(seed: int, like: nn.Module, device: str = "cpu") -> torch.Tensor:
    first = next(like.parameters())
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device, first.dtype)
    return x.requires_grad_()


def offloaded(model: nn.Module, share: float = 0.4, device: str = "cpu", **settings: Any) -> weightstream.Streamer:
    """Offload with this share of the frozen bytes on the device, so that the rest streams."""
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    settings = {"codec": "none"} | settings
    return weightstream.offload(model, device=device, device_budget=int(share * frozen) + trained, **settings)


Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def square(model: Net, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def trained(model: Any, num_steps: int = 4, loss: Loss = square, device: str = "cpu") -> list[torch.Tensor]:
    """All values of some steps: losses, gradients, outputs without gradients, adapters."""
    found, own = [], adapters(model)
    optimizer = torch.optim.AdamW(own, lr=0.02)
    for seed in range(num_steps):
        torch.manual_seed(seed)  # of the dropout
        found.append(loss(model, inputs(seed, model, device)))
        found[-1].backward()
        found += [parameter.grad.clone() for parameter in own if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(inputs(seed + 100, model, device)))
    return [value.detach().clone() for value in (*found, *own)]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    wrong = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"{len(wrong)} of {len(wanted)} differ, first {wrong[:5]}"
    assert all(torch.isfinite(value).all() for value in found)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a unit in the ring and in the buffer become NaN as soon as the unit closes."""
    release, close = Engine.release, Binding.close

    def release_poisoned(engine: Engine, unit: int) -> None:
        is_last = engine.fences[unit].uses == 1
        if is_last:  # before other fills begin
            with _disable_current_modes():
                for copy in engine.copies[unit]:
                    copy.dst.fill_(0xFF)
        release(engine, unit)
        if is_last:
            engine.forget([unit])

    def close_poisoned(binding: Binding, index: int, *args: Any, **kwargs: Any) -> bool:
        try:
            return close(binding, index, *args, **kwargs)
        finally:
            if not any(unit.coded and unit.opened and unit.borrowed is None for unit in binding.units):
                with _disable_current_modes():
                    binding.memory.buffer.fill_(0xFF)

    monkeypatch.setattr(Engine, "release", release_poisoned)
    monkeypatch.setattr(Binding, "close", close_poisoned)


@contextmanager
def moved(streamer: weightstream.Streamer) -> Iterator[dict[str, int]]:
    """Counts of the fills inside of the block, known at its end."""
    before, found = streamer.stats(), dict[str, int]()
    yield found
    after = streamer.stats()
    for name in ("fills", "filled_nbytes", "unplanned_fills"):
        found[name] = getattr(after, name) - getattr(before, name)
