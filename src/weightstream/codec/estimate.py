"""Estimate the compressed size of weights from a sample of their tiles. Reads only these, and compresses nothing."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import torch

from weightstream.codec.format import ELEMENTS, TILE, Layout, most_escapes
from weightstream.codec.reference import histograms, windows

# Compressed bits per weight if weights cannot be read: of trained and Gaussian ones, rounded up (docs/codec.md).
ASSUMED_BITS: Mapping[str, float] = MappingProxyType({"bfloat16": 10.85, "float16": 14.3, "float8_e4m3fn": 7.3})

_SAMPLE_TILES = 64
_STANDARD_ERRORS = 4
_MARGIN = 1000  # a thousandth is added, for tensors in which some rows have larger weights than others


def estimate(parts: Sequence[torch.Tensor], dtype: str) -> int:
    """An upper bound of the compressed size, in bytes, of weights on any device; exact up to 64 tiles.

    `parts` are the weights' bytes, one after another. A part is a matrix of bytes, whose rows may be strided. Above 64
    tiles, 64 evenly spaced ones are sampled. If weights vary by chance only, fewer than one in 1,000 tensors exceeds
    the bound. A sample can miss large values that are all in one place.
    """
    count = sum(part.numel() for part in parts) // ELEMENTS[dtype].nbytes
    counts = histograms(_sample(parts, TILE * ELEMENTS[dtype].nbytes), dtype)
    return _nbytes(windows(counts, dtype).num_escapes, dtype, count)


def _sample(parts: Sequence[torch.Tensor], tile_nbytes: int) -> torch.Tensor:
    """A copy of all bytes, or of some whole tiles of each part; nothing else of a mapped file is read."""
    rows_per_tile = [-(-tile_nbytes // part[0].numel()) for part in parts]
    # the number of whole tiles before each part; the last entry is the number of all
    tiles_before = list(
        accumulate((len(part) // rows for part, rows in zip(parts, rows_per_tile, strict=True)), initial=0)
    )
    if sum(part.numel() for part in parts) <= _SAMPLE_TILES * tile_nbytes or tiles_before[-1] < _SAMPLE_TILES:
        return torch.cat([part.reshape(-1) for part in parts])
    tiles = []
    for tile in (number * tiles_before[-1] // _SAMPLE_TILES for number in range(_SAMPLE_TILES)):
        index = bisect(tiles_before, tile) - 1
        rows = rows_per_tile[index]
        of_tile = parts[index][(tile - tiles_before[index]) * rows :][:rows]
        tiles.append(of_tile.reshape(-1)[:tile_nbytes])
    return torch.cat(tiles)


def _nbytes(escapes: torch.Tensor, dtype: str, count: int) -> int:
    """The compressed size of `count` weights. `escapes`: the number of escapes in each sampled tile."""
    num_tiles, num_sampled = -(-count // TILE), len(escapes)
    if num_sampled == num_tiles:
        return Layout(dtype=dtype, count=count, num_escapes=int(escapes.sum())).nbytes
    variance, mean = torch.var_mean(escapes.double())
    # standard error of the sum over all tiles, for a sample without replacement
    error = (float(variance) * num_tiles * (num_tiles - num_sampled) / num_sampled) ** 0.5
    num_escapes = min(most_escapes(dtype, count), round(float(mean) * num_tiles + _STANDARD_ERRORS * error))
    nbytes = Layout(dtype=dtype, count=count, num_escapes=num_escapes).nbytes
    return nbytes + nbytes // _MARGIN
