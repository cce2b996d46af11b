"""The model that every benchmark runs: a decoder of Llama-3.1-8B's shape. Knows no system and no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8


TINY = Shape(layers=8, hidden=64, intermediate=128, heads=4, kv_heads=2)


class Block(nn.Module):
    """A pre-norm decoder layer: grouped-query attention without positions, then a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.hidden // shape.heads
        self.norm1 = nn.RMSNorm(shape.hidden)
        self.norm2 = nn.RMSNorm(shape.hidden)
        self.q, self.o = (nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.hidden, shape.kv_heads * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.hidden, shape.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, -1, self.head).transpose(1, 2)
        k = self.k(y).view(batch, length, -1, self.head).transpose(1, 2)
        v = self.v(y).view(batch, length, -1, self.head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, hidden))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """The layers and the last norm: no embedding, no head, no cache, so that every system does the same work."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)  # diffusers prefetches blocks only next to another module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def build(shape: Shape, device: torch.device, seed: int) -> Decoder:
    """Random weights, drawn on the device: the same for the same seed."""
    return draw(empty(shape), device, seed)


def draw(module: Any, device: torch.device, seed: int) -> Any:
    """The same for the parameters of an empty module."""
    module.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.02 if parameter.dim() > 1 else 1, generator=generator)
    return module


def wrap(shape: Shape, tensors: Iterator[torch.Tensor]) -> Decoder:
    """A model over existing tensors, in the order of its parameters; nothing is copied."""
    model = empty(shape)
    for name, _ in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(next(tensors), requires_grad=False))
    return model


def empty(shape: Shape) -> Decoder:
    with torch.device("meta"):
        return Decoder(shape).bfloat16().eval().requires_grad_(False)
