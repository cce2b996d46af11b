"""What follows the symbols of bfloat16, in plain torch: digits of 2 bits, then of 3 bits, then bytes.

All of a level is in the order of escapes, its digits in planes: a bit of each, then the next one. `rest` is what an
exponent is above its tile's base; shapes are (tiles, 4096).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_FIRST = (3, -1, -2)  # what digits say that rests are; the next one sends to the next level
_SECOND = (-8, -7, -6, -5, -4, -3, 4)
_LEVELS = ((_FIRST, 2), (_SECOND, 3))  # and how many planes they take
_BYTE = 5  # less a byte


class _Found(NamedTuple):
    """The weights of tiles that are at a level: their places, in order; their tiles; how many of theirs are before."""

    places: torch.Tensor
    tiles: torch.Tensor
    ranks: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, places: torch.Tensor, shape: torch.Size) -> _Found:
        tiles = places // shape[1]
        counts = torch.bincount(tiles, minlength=shape[0])
        ranks = torch.arange(len(places), device=places.device) - (counts.cumsum(0) - counts)[tiles]
        return cls(places, tiles, ranks, counts)


def nbytes(counts: torch.Tensor) -> torch.Tensor:
    """What follows the symbols of each tile, for each base, from the tiles' histograms: (tiles, bases)."""
    num = counts.shape[1]
    sums = torch.nn.functional.pad(counts, (1 - min(_SECOND), max(_SECOND))).cumsum(1, dtype=torch.int32)

    def found(first: int, last: int) -> torch.Tensor:
        """Weights whose rest is in [first, last]."""
        below, end = (at - min(_SECOND) for at in (first, last + 1))
        return sums[:, end : end + num - 2] - sums[:, below : below + num - 2]

    first = sums[:, -1:] - found(0, 2)
    second = first - found(3, 3) - found(-2, -1)
    bits = 2 * first + 3 * second + 8 * (second - found(-8, -3) - found(4, 4))
    return (bits + 31) // 32 * 4


def write_rests(rest: torch.Tensor, starts: torch.Tensor, escapes: torch.Tensor) -> None:
    """Write what follows the symbols of tiles to flat bytes, in which they begin at `starts`."""
    bits = torch.zeros(8 * escapes.numel(), dtype=torch.uint8, device=rest.device)
    at, flat = 8 * starts.long(), rest.reshape(-1)
    left = _Found.of(((flat < 0) | (flat > 2)).nonzero()[:, 0], rest.shape)
    for told, planes in _LEVELS:
        here = flat[left.places]
        digits = torch.full_like(here, len(told))
        for digit, meaning in enumerate(told):
            digits[here == meaning] = digit
        for plane in range(planes):
            bits[at[left.tiles] + left.ranks] = (digits >> plane & 1).to(torch.uint8)
            at = at + left.counts
        left = _Found.of(left.places[digits == len(told)], rest.shape)
    escapes.copy_((bits.view(-1, 8) << torch.arange(8, device=bits.device)).sum(1))
    escapes[(at[left.tiles] + 7) // 8 + left.ranks] = (_BYTE - flat[left.places] & 255).to(torch.uint8)


def read_rests(there: torch.Tensor, starts: torch.Tensor, escapes: torch.Tensor) -> torch.Tensor:
    """The rests of the weights of tiles that are `there`, modulo 256, and 0 of all others.

    A start that is outside counts as the nearest that is not, and bits that are outside count as 0.
    """
    num_bytes = len(escapes) // 4 * 4
    data = escapes if num_bytes else escapes.new_zeros(1)

    def byte(places: torch.Tensor) -> torch.Tensor:
        return torch.where(places < num_bytes, data[places.clamp(max=max(num_bytes - 1, 0))], 0)

    rests = torch.zeros(there.numel(), dtype=torch.int32, device=there.device)
    at = 32 * (starts >> 2).long().clamp(0, num_bytes // 4)
    left = _Found.of(there.reshape(-1).nonzero()[:, 0], there.shape)
    for told, planes in _LEVELS:
        digits = torch.zeros_like(left.tiles)
        for plane in range(planes):
            places = at[left.tiles] + left.ranks
            digits |= (byte(places >> 3).long() >> (places & 7) & 1) << plane
            at = at + left.counts
        meanings = torch.tensor((*told, _BYTE), dtype=torch.int32, device=there.device)
        rests[left.places] = meanings[digits]
        left = _Found.of(left.places[digits == len(told)], there.shape)
    rests[left.places] -= byte((at[left.tiles] + 7) // 8 + left.ranks).to(torch.int32)
    return rests.view(there.shape)
