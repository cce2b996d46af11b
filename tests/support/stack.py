"""Shared parts of the GPU tests: a model whose copies outlast their launch, plain results, captured steps, delays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from weightstream.runtime.devices.backend import Copy, Event, Side
from weightstream.runtime.devices.cuda import CudaBackend

WIDTH = 1024
ALL = {"offload_group_size": 1, "offload_prefetch_step": 2}  # every block streams, through two slots

Step = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth: int = 7, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def floats(model: Stack, batch: int = 3, num: int = 4) -> list[torch.Tensor]:
    dtype = next(model.parameters()).dtype
    return [torch.randn(batch, model.width, device="cuda", dtype=dtype) for _ in range(num)]


def references(model: Stack, num: int = 4) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    plain, inputs = copy.deepcopy(model).cuda(), floats(model, num=num)
    with torch.no_grad():
        return inputs, [plain(x) for x in inputs]


@torch.no_grad()
def assert_equal(model: Step, inputs: Sequence[torch.Tensor], want: Sequence[torch.Tensor], rounds: int = 3) -> None:
    for turn in range(rounds):
        got = [model(x) for x in inputs]  # queued without a synchronisation in between
        pairs = enumerate(zip(got, want, strict=True))
        wrong = [f"input {index}: {difference(a, b)}" for index, (a, b) in pairs if not torch.equal(a, b)]
        assert not wrong, f"round {turn}: {'; '.join(wrong)}"


def difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """Describe a difference. Many small differences mean another computation; few or large ones mean other bytes."""
    if got.shape != want.shape:
        return f"{tuple(got.shape)} in place of {tuple(want.shape)}"
    apart = (got.double() - want.double()).abs()
    most, whole = apart.nan_to_num(torch.inf).max(), want.double().abs().max()
    return (
        f"{int((got != want).sum())} of {got.numel()} differ, by {most:.3g} at most, where values are up to {whole:.3g}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """An offloaded stack that has made its first step, and the plain one."""

    stack: Stack
    plain: Stack
    streamer: weightstream.Streamer
    inputs: list[torch.Tensor]
    want: list[torch.Tensor]

    def assert_equal(self, step: Step | None = None, rounds: int = 3) -> None:
        assert_equal(step or self.stack, self.inputs, self.want, rounds)

    def captured(self, num: int = 0) -> Captured:
        return captured(self.streamer, self.stack, self.inputs[num])


@contextmanager
def taught(
    share: float | None = None, depth: int = 7, width: int = 512, dtype: torch.dtype = torch.float32, **settings: Any
) -> Iterator[Taught]:
    """Offload at a share of the model's bytes, or with classic settings. Gradients are off inside."""
    with torch.device("cuda"):  # where random weights take no time
        plain = Stack(depth, width).eval().to(dtype)
    stack = copy.deepcopy(plain).cpu()
    inputs = floats(plain)
    if share is not None:
        settings["device_budget"] = int(nbytes(stack) * share)
    with torch.no_grad():
        want = [plain(x) for x in inputs]
        with weightstream.offload(stack, device="cuda", **settings) as streamer:
            assert torch.equal(stack(inputs[0]), want[0])
            yield Taught(stack=stack, plain=plain, streamer=streamer, inputs=inputs, want=want)
        got = stack.cuda()(inputs[1])
        assert torch.equal(got, plain(inputs[1]))  # including updates


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A captured step, called as the model is."""

    streamer: weightstream.Streamer
    graph: torch.cuda.CUDAGraph
    x: torch.Tensor
    y: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.x.copy_(x)
        self.streamer.replay(self.graph)
        return self.y.clone()


@torch.no_grad()
def captured(streamer: weightstream.Streamer, model: Step, x: torch.Tensor) -> Captured:
    graph, x = torch.cuda.CUDAGraph(), x.clone()
    with streamer.capture(graph):
        y = model(x)
    return Captured(streamer=streamer, graph=graph, x=x, y=y)


@contextmanager
def unharmed(model: Taught) -> Iterator[None]:
    """Check that the current stream, random numbers and the streamer are usable after the block in every way."""
    stream = torch.cuda.current_stream()
    torch.manual_seed(5)
    want = torch.rand(9, device="cuda")
    torch.manual_seed(5)
    yield
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.rand(9, device="cuda"), want)
    model.assert_equal()
    with model.streamer.step():
        model.assert_equal()
    model.assert_equal(model.captured())
    model.assert_equal()


class Slow(CudaBackend):
    """Random spins on both streams, and poison before each copy, to show reads or copies that are too early.

    In a capture they become part of the graph, different for each copy and each graph.
    """

    drop: tuple[Side, ...] = ()
    most_cycles = 2_000_000

    def copy(self, copies: Sequence[Copy]) -> None:
        def poison() -> None:
            with torch.cuda.stream(self._copies):
                for c in copies:
                    c.dst.fill_(0xFF)
                self.spin()

        if self._feeder is None:
            poison()
        else:
            self._feeder.submit(poison)
        super().copy(copies)

    def wait(self, side: Side, event: Event) -> None:
        if side not in self.drop:
            super().wait(side, event)
        if side is Side.COMPUTE:
            self.spin()

    def spin(self) -> None:
        torch.cuda._sleep(int(torch.randint(0, self.most_cycles, ())))


def slow(monkeypatch: pytest.MonkeyPatch, *drop: Side, base: type[Slow] = Slow, most_cycles: int = 2_000_000) -> None:
    backend = type("Dropping", (base,), {"drop": drop, "most_cycles": most_cycles})
    monkeypatch.setattr("weightstream.runtime.devices.cuda.CudaBackend", backend)
