"""How many bytes weights take coded, told from a few of their tiles. Reads no others, and encodes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from weightstream.codec.format import BITS, ELEMENTS, TILE, Layout, can_code
from weightstream.codec.reference import histograms, windows

# Coded bits per weight where weights cannot be read: trained and Gaussian ones, a little rounded up (docs/codec.md).
ASSUMED_BITS: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "bfloat16": MappingProxyType({3: 11.3, 4: 12.05}),
        "float16": MappingProxyType({3: 14.3, 4: 15.05}),
        "float8_e4m3fn": MappingProxyType({3: 7.3}),
    }
)

_SAMPLE_TILES = 64
_STANDARD_ERRORS = 4
_MARGIN = 1000  # one in as many bytes, for what is not alike all over: rows that are larger than others


def estimates(data: torch.Tensor, dtype: str) -> dict[int, int]:
    """Code -> at most how many bytes flat bytes on any device take in it: exact up to 64 tiles.

    Above that, from 64 tiles that lie evenly apart: as weights differ within a tensor by chance, not one in 1,000
    takes more. An own place for large values can be missed.
    """
    count = data.numel() // ELEMENTS[dtype].nbytes
    counts = histograms(_sample(data, TILE * ELEMENTS[dtype].nbytes), dtype)
    return {bits: _nbytes(windows(counts, bits)[1], dtype, bits, count) for bits in BITS if can_code(dtype, bits)}


def _sample(data: torch.Tensor, tile_nbytes: int) -> torch.Tensor:
    """A copy of all, or of some of the whole tiles: of mapped files, nothing else is read."""
    num_whole = data.numel() // tile_nbytes
    if data.numel() <= _SAMPLE_TILES * tile_nbytes:
        return data.clone()
    tiles = torch.arange(_SAMPLE_TILES, device=data.device) * num_whole // _SAMPLE_TILES
    return data[: num_whole * tile_nbytes].view(num_whole, tile_nbytes)[tiles].view(-1)


def _nbytes(escapes: torch.Tensor, dtype: str, bits: int, count: int) -> int:
    """Bytes of `count` weights from how many escapes are in each of some tiles."""
    num_tiles, num_sampled = -(-count // TILE), len(escapes)
    if num_sampled == num_tiles:
        return Layout(dtype=dtype, bits=bits, count=count, num_escapes=int(escapes.sum())).nbytes
    variance, mean = torch.var_mean(escapes.double())
    error = (float(variance) * num_tiles * (num_tiles - num_sampled) / num_sampled) ** 0.5
    num_escapes = min(count, round(float(mean) * num_tiles + _STANDARD_ERRORS * error))
    nbytes = Layout(dtype=dtype, bits=bits, count=count, num_escapes=num_escapes).nbytes
    return nbytes + nbytes // _MARGIN
