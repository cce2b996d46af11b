"""Bit patterns that a codec must restore: every value, special values, weights as models have them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weightstream.codec.format import ELEMENTS


def flat(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Integers as the bytes of as many floats."""
    words = {1: torch.uint8, 2: torch.int16}[ELEMENTS[dtype].nbytes]
    return values.reshape(-1).to(torch.int64).to(words).view(torch.uint8)


def joined(sign: torch.Tensor, exponent: torch.Tensor, mantissa: torch.Tensor, dtype: str) -> torch.Tensor:
    """The bytes of floats from their fields."""
    element = ELEMENTS[dtype]
    both = exponent << element.mantissa_bits | mantissa & 2**element.mantissa_bits - 1
    return flat(sign << 8 * element.nbytes - 1 | both, dtype)


def gaussian(dtype: str, count: int, scale: float = 0.02, seed: int = 0) -> torch.Tensor:
    values = scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return values.to(getattr(torch, dtype)).view(torch.uint8)


def noise(dtype: str, count: int, seed: int = 0) -> torch.Tensor:
    nbytes = count * ELEMENTS[dtype].nbytes
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def spread(dtype: str, count: int, centre: float, width: float, seed: int) -> torch.Tensor:
    """Exponents around a centre, and random signs and mantissas."""
    source, element = torch.Generator().manual_seed(seed), ELEMENTS[dtype]
    most = 2**element.exponent_bits - 1
    exponent = (centre * most + width * torch.randn(count, generator=source)).round().clamp(0, most).to(torch.int64)
    raw = torch.randint(0, 2**element.raw_bits, (count,), generator=source)
    return joined(raw & 1, exponent, raw >> 1, dtype)


def every(dtype: str) -> torch.Tensor:
    """All values in order, as integers."""
    return torch.arange(2 ** (8 * ELEMENTS[dtype].nbytes))


def _shuffled(dtype: str) -> torch.Tensor:
    values = every(dtype)
    return flat(values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))], dtype)


def _with_exponent(dtype: str, exponent: int, count: int = 5000) -> torch.Tensor:
    i = torch.arange(count)
    return joined(i % 3 & 1, torch.full_like(i, exponent), i, dtype)


def _outlier_rows(dtype: str) -> torch.Tensor:
    """Some rows of 512 are up to 2**9 times as large as the others."""
    rows = 0.01 * torch.randn(40, 512, generator=torch.Generator().manual_seed(2))
    rows[3::9] *= 2.0 ** torch.arange(5, 10)[: len(rows[3::9]), None]
    return rows.to(getattr(torch, dtype)).view(-1).view(torch.uint8)


PATTERNS: dict[str, Callable[[str], torch.Tensor]] = {
    "every value": lambda dtype: flat(every(dtype), dtype),
    "every value, shuffled": _shuffled,
    "every value, again and again": lambda dtype: flat(every(dtype)[-300:].repeat(40), dtype),
    "random bits": lambda dtype: noise(dtype, 20_001),
    "zeros": lambda dtype: flat(torch.zeros(9000), dtype),
    "negative zeros": lambda dtype: joined(
        torch.ones(5000).long(), torch.zeros(5000).long(), torch.zeros(1).long(), dtype
    ),
    "constant": lambda dtype: flat(torch.full((4100,), 0x5A5A), dtype),
    "infinities and NaN payloads": lambda dtype: _with_exponent(dtype, 2 ** ELEMENTS[dtype].exponent_bits - 1),
    "subnormals": lambda dtype: _with_exponent(dtype, 0),
    "Gaussian, small": lambda dtype: gaussian(dtype, 12_345, 1e-3),
    "Gaussian": lambda dtype: gaussian(dtype, 12_345),
    "Gaussian, large": lambda dtype: gaussian(dtype, 12_345, 30.0),
    "outlier rows": _outlier_rows,
    "wide": lambda dtype: spread(dtype, 8193, 0.5, 5.0, 3),
}
SIZES = [1, 2, 3, 5, 127, 255, 256, 257, 4095, 4096, 4097, 12_345]
