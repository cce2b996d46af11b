"""Mixtures whose experts are packed, and the plain models with the stacks that a library makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from expert_rig import built, experts_of
from weightstream.adapters.hf import private_quantised
from weightstream.adapters.hf.packed_formats import PackedFormat, hold_packed, packed_stacks

Leaves = Callable[[tuple[int, ...], torch.Generator], tuple[torch.Tensor, ...]]


class Case(NamedTuple):
    """A format: the mixture of `expert_rig` that is packed in it, and random leaves for a stack of a shape."""

    mixture: str
    format: PackedFormat
    leaves: Leaves


def mxfp4_leaves(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    experts, inner, columns = shape
    blocks = torch.randint(0, 256, (experts, columns, inner // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(117, 121, (experts, columns, inner // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


def float8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)


def block_leaves(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    experts, height, width = shape
    scales = torch.rand((experts, height // 32, width // 32), generator=generator) * 0.1
    return float8(shape, generator), scales


def channel_leaves(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    scales = torch.rand((*shape[:2], 1), generator=generator) * 0.1
    return float8(shape, generator), scales.to(torch.bfloat16)


def matrix_leaves(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """As many scales as matrices were merged: a row of them has 4 or 2 bytes."""
    experts, height, width = shape
    scales = torch.rand((experts, max(1, height // width)), generator=generator) * 0.1
    return float8(shape, generator), scales.to(torch.bfloat16)


def exponent_leaves(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Scales of large blocks as exponents: a row of them has 2 bytes or 1."""
    experts, height, width = shape
    scales = torch.randint(122, 126, (experts, height // 64, width // 64), dtype=torch.uint8, generator=generator)
    return float8(shape, generator), scales.view(torch.float8_e8m0fnu)


def int4_leaves(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    experts, height, width = shape
    words = torch.randint(-(2**31), 2**31, (experts, height, width // 8), generator=generator).to(torch.int32)
    scales = torch.rand((experts, height, width // 32), generator=generator) * 0.02
    return words, scales.to(torch.bfloat16)


INT4 = replace(private_quantised.COMPRESSED_INT, settings=(4, 32), kernel="int4")
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "mxfp4": Case("gpt_oss", private_quantised.MXFP4, mxfp4_leaves),
        "block float8": Case("qwen3_moe", private_quantised.FP8_BLOCKS, block_leaves),
        "block float8, DeepSeek": Case("deepseek_v3", private_quantised.FP8_BLOCKS, block_leaves),
        "float8 by channel": Case("qwen3_moe", private_quantised.COMPRESSED_FLOAT8, channel_leaves),
        "float8 by matrix": Case("qwen3_moe", private_quantised.COMPRESSED_FLOAT8, matrix_leaves),
        "block float8, exponents": Case("deepseek_v3", private_quantised.FP8_BLOCKS, exponent_leaves),
        "int4": Case("qwen3_moe", INT4, int4_leaves),
    }
)
ODD = ("float8 by matrix", "block float8, exponents")  # rows of scales that are no whole words


class Pair(NamedTuple):
    packed: Any
    plain: Any


def both(name: str, implementation: str = "batched_mm", **settings: Any) -> Pair:
    """A model with packed experts, and the plain one. Building them twice gives the same bits."""
    case = CASES[name]
    packed, plain = (built(case.mixture, implementation, **settings) for _ in range(2))
    generator = torch.Generator().manual_seed(7)
    for ours, theirs in zip(experts_of(packed), experts_of(plain), strict=True):
        for stack in ("gate_up_proj", "down_proj"):
            dense = theirs._parameters[stack]
            leaves = case.leaves(tuple(dense.shape), generator)
            dense.data = case.format.unpacked(leaves, dense.dtype)
            named = zip(case.format.suffixes, leaves, strict=True)
            parameters = {stack + suffix: torch.nn.Parameter(leaf, requires_grad=False) for suffix, leaf in named}
            hold_packed(ours, stack, case.format, parameters)
    return Pair(packed, plain)


def packed_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if packed_stacks(module)]
