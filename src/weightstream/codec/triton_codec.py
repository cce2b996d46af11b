"""The codec on a GPU: launches of the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch

from weightstream.codec import kernels, reference
from weightstream.codec.format import ELEMENTS, TILE, Layout

WARPS = 4  # a thread per lane: with more lanes in a thread, Triton changes layouts through shared memory
_NEVER = 2**62


def histograms(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """As `reference.histograms`."""
    element = ELEMENTS[dtype]
    count = data.numel() // element.nbytes
    num_tiles = -(-count // TILE)
    counts = torch.empty(num_tiles, 2**element.exponent_bits, dtype=torch.int32, device=data.device)
    kernels.histogram[(num_tiles,)](data, counts, count, EXPONENT=element.exponent_bits, MANTISSA=element.mantissa_bits)
    return counts


def encode(data: torch.Tensor, dtype: str, bits: int) -> tuple[Layout, torch.Tensor]:
    """As `reference.encode`."""
    element = ELEMENTS[dtype]
    count = data.numel() // element.nbytes
    if data.numel() % 4:  # words are read whole
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    layout, coded = reference.prepared(histograms(data[: count * element.nbytes], dtype), dtype, bits, count)
    facts = {"EXPONENT": element.exponent_bits, "MANTISSA": element.mantissa_bits, "BITS": bits}
    kernels.encode[(layout.num_tiles,)](data, coded, count, **facts, num_warps=WARPS)
    return layout, coded


class Decoding:
    """Several coded tensors of one kind, decoded by one launch: each is its coded bytes, their layout and its target.

    A target has room for whole words of 4 bytes. All addresses are fixed.
    """

    def __init__(self, parts: Iterable[tuple[torch.Tensor, Layout, torch.Tensor]]) -> None:
        self._parts = list(parts)
        layouts = [layout for _, layout, _ in self._parts]
        firsts = list(accumulate((layout.num_tiles for layout in layouts), initial=0))
        num = 1 << (len(layouts) - 1).bit_length()
        table = [*firsts[:-1], *[_NEVER] * (num - len(layouts))]
        for coded, layout, out in self._parts:
            table += [coded.data_ptr(), out.data_ptr(), layout.count, layout.num_escapes]
        self._table = torch.tensor(table, dtype=torch.int64, device="cpu").to(self._parts[0][0].device)
        self._grid = (firsts[-1],)
        element = layouts[0].element
        self._facts = {"BITS": layouts[0].bits, "EXPONENT": element.exponent_bits, "MANTISSA": element.mantissa_bits}
        self._facts["NUM"] = num

    def __call__(self) -> None:
        kernels.decode[self._grid](self._table, **self._facts, num_warps=WARPS)
