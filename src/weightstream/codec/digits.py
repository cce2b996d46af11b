"""The digits after the symbols of bfloat16, in plain torch: first of 2 bits, then of 3 bits, then bytes.

Each level is in the order of escapes, and its digits are in planes: the lowest bit of all, then the next one. A `rest`
is an exponent minus the base of its tile; shapes are (tiles, 4096).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_FIRST = (3, -1, -2)  # the rest of each digit; the next greater digit refers to the next level
_SECOND = (-8, -7, -6, -5, -4, -3, 4)
_BYTE = 5  # minus a byte is a rest


class _Level(NamedTuple):
    """The rest of each digit, and the number of planes of a digit."""

    rests: tuple[int, ...]
    num_planes: int


_LEVELS = (_Level(_FIRST, 2), _Level(_SECOND, 3))


class _Selected(NamedTuple):
    """The weights that have a digit at a level: their places in order, their tiles, their ranks in these, and the
    number of such weights in each tile."""

    places: torch.Tensor
    tiles: torch.Tensor
    ranks: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, places: torch.Tensor, shape: torch.Size) -> _Selected:
        tiles = places // shape[1]
        counts = torch.bincount(tiles, minlength=shape[0])
        ranks = torch.arange(len(places), device=places.device) - (counts.cumsum(0) - counts)[tiles]
        return cls(places, tiles, ranks, counts)


def nbytes(counts: torch.Tensor) -> torch.Tensor:
    """Bytes after the symbols of each tile, for each base, from the tiles' histograms: (tiles, bases)."""
    num = counts.shape[1]
    sums = torch.nn.functional.pad(counts, (1 - min(_SECOND), max(_SECOND))).cumsum(1, dtype=torch.int32)

    def num_between(first: int, last: int) -> torch.Tensor:
        """The number of weights whose rest is in [first, last]."""
        below, end = (at - min(_SECOND) for at in (first, last + 1))
        return sums[:, end : end + num - 2] - sums[:, below : below + num - 2]

    first = sums[:, -1:] - num_between(0, 2)
    second = first - num_between(3, 3) - num_between(-2, -1)
    bits = 2 * first + 3 * second + 8 * (second - num_between(-8, -3) - num_between(4, 4))
    return (bits + 31) // 32 * 4


def write_rests(rest: torch.Tensor, starts: torch.Tensor, escapes: torch.Tensor) -> None:
    """Write the digits and bytes of each tile to flat `escapes`, from its start in `starts`."""
    bits = torch.zeros(8 * escapes.numel(), dtype=torch.uint8, device=rest.device)
    at, flat = 8 * starts.long(), rest.reshape(-1)
    selected = _Selected.of(((flat < 0) | (flat > 2)).nonzero()[:, 0], rest.shape)
    for rests_of_digits, num_planes in _LEVELS:
        here = flat[selected.places]
        digits = torch.full_like(here, len(rests_of_digits))
        for digit, meaning in enumerate(rests_of_digits):
            digits[here == meaning] = digit
        for plane in range(num_planes):
            bits[at[selected.tiles] + selected.ranks] = (digits >> plane & 1).to(torch.uint8)
            at = at + selected.counts
        selected = _Selected.of(selected.places[digits == len(rests_of_digits)], rest.shape)
    escapes.copy_((bits.view(-1, 8) << torch.arange(8, device=bits.device)).sum(1))
    escapes[(at[selected.tiles] + 7) // 8 + selected.ranks] = (_BYTE - flat[selected.places] & 255).to(torch.uint8)


def read_rests(there: torch.Tensor, starts: torch.Tensor, escapes: torch.Tensor) -> torch.Tensor:
    """The rests, modulo 256, of the weights that are `there`; 0 for all others.

    A start outside `escapes` counts as the nearest inside, and bits outside count as 0.
    """
    num_bytes = len(escapes) // 4 * 4
    data = escapes if num_bytes else escapes.new_zeros(1)

    def byte(places: torch.Tensor) -> torch.Tensor:
        return torch.where(places < num_bytes, data[places.clamp(max=max(num_bytes - 1, 0))], 0)

    rests = torch.zeros(there.numel(), dtype=torch.int32, device=there.device)
    at = 32 * (starts >> 2).long().clamp(0, num_bytes // 4)
    selected = _Selected.of(there.reshape(-1).nonzero()[:, 0], there.shape)
    for rests_of_digits, num_planes in _LEVELS:
        digits = torch.zeros_like(selected.tiles)
        for plane in range(num_planes):
            places = at[selected.tiles] + selected.ranks
            digits |= (byte(places >> 3).long() >> (places & 7) & 1) << plane
            at = at + selected.counts
        meanings = torch.tensor((*rests_of_digits, _BYTE), dtype=torch.int32, device=there.device)
        rests[selected.places] = meanings[digits]
        selected = _Selected.of(selected.places[digits == len(rests_of_digits)], there.shape)
    rests[selected.places] -= byte((at[selected.tiles] + 7) // 8 + selected.ranks).to(torch.int32)
    return rests.view(there.shape)
