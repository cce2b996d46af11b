"""The codec on a GPU: launches of the Triton kernels.

Triton compiles a kernel anew for each kind of its arguments, which takes a second. So launches differ only in dtype and
in whether all tiles are whole: addresses are aligned, counts have 64 bits, and tables have one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import triton

from weightstream.codec import kernels, reference
from weightstream.codec.device import on
from weightstream.codec.format import ELEMENTS, TILE, Element, Layout
from weightstream.codec.reference import CodedPart, Encoded

WARPS = 4  # a thread per lane: with more lanes in a thread, Triton changes layouts through shared memory
_MOST = 32  # tensors in a launch: a warp finds its tensor in one step
_NEVER = 2**62
_ALIGN = 16  # by which Triton distinguishes kinds of addresses


def histograms(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """As `reference.histograms`."""
    element = ELEMENTS[dtype]
    count = data.numel() // element.nbytes
    num_tiles = -(-count // TILE)
    counts = torch.empty(num_tiles, 2**element.exponent_bits, dtype=torch.int32, device=data.device)
    with on(data.device):
        kernels.histogram[(num_tiles,)](data, counts, count, EXPONENT=element.exponent_bits)
    return counts


def encode(data: torch.Tensor, dtype: str, counts: torch.Tensor | None = None) -> Encoded:
    """As `reference.encode`; `counts` are the histograms, if they are known."""
    element = ELEMENTS[dtype]
    count = data.numel() // element.nbytes
    if data.numel() % 4:  # words are read whole
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    elif data.data_ptr() % _ALIGN:
        data = data.clone()
    if counts is None:
        counts = histograms(data[: count * element.nbytes], dtype)
    layout, coded = reference.prepared(counts, dtype, count)
    with on(data.device):
        kernels.encode[(layout.num_tiles,)](data, coded, count, EXPONENT=element.exponent_bits, num_warps=WARPS)
    return Encoded(layout, coded)


def warm_triton() -> None:
    """Initialise Triton once, before several threads would do so at the same time."""
    triton.runtime.driver.active.get_current_device()


class DecodeLaunch:
    """Decodes several compressed tensors of one kind together.

    A target has room for whole words of 4 bytes. All addresses are fixed. The kernel of bfloat16 reads words again that
    it wrote: nothing else may write to the same target meanwhile.
    """

    def __init__(self, parts: Iterable[CodedPart]) -> None:
        self._parts = list(parts)
        coded, layout, _ = self._parts[0]
        rows = [_row(self._parts[begin : begin + _MOST]) for begin in range(0, len(self._parts), _MOST)]
        tables = torch.tensor([table for table, _ in rows], dtype=torch.int64, device="cpu").to(coded.device)
        element = layout.element
        is_whole = all(layout.count % TILE == 0 for _, layout, _ in self._parts)
        constants = _MOST, int(is_whole), element.exponent_bits
        pairs = zip(tables, rows, strict=True)
        self._launches = [((num_tiles, 1, 1), (table, *constants)) for table, (_, num_tiles) in pairs]
        self._compiled: list[Callable[[], object]] = []

    def __call__(self) -> None:
        # Triton looks a kernel up by all of its arguments, which takes the host four times as long as the launch, so
        # compiled kernels are kept. Triton's interpreter returns None.
        with on(self._parts[0][0].device):
            if self._compiled:
                for launch in self._compiled:
                    launch()
                return
            options = _options(self._parts[0][1].element)
            launched = [(kernels.decode[grid](*args, **options), grid, args) for grid, args in self._launches]
        # an address instead of a tensor, whose attributes Triton would look up
        self._compiled = [
            partial(k[grid], table.data_ptr(), *constants) for k, grid, (table, *constants) in launched if k is not None
        ]


class Picking:
    """Decodes some rows of a compressed tensor into a target: the k-th to the k-th place, or to the k-th of `places`.
    Ids and places are int64, on the device.

    There are `num_rows` rows, each of whole tiles. The words of the rows are in the tensor; or in slots, followed by
    their escapes, and `coded` is the rest: starts, bases. `heads`: starts and bases in other memory. Addresses are
    fixed. No two rows may have one place.
    """

    def __init__(
        self,
        coded: torch.Tensor,
        layout: Layout,
        out: torch.Tensor,
        num_rows: int,
        slots: torch.Tensor | None = None,
        heads: torch.Tensor | None = None,
    ) -> None:
        tiles, at, most = layout.num_tiles // num_rows, coded.data_ptr(), layout.num_escapes
        words_at, stride, starts_at = at, tiles * layout.tile_nbytes, at + layout.starts_at
        escapes_at = at + layout.escapes_at
        if slots is not None:
            most = slots.shape[1] - stride - 8
            words_at, stride, starts_at = slots.data_ptr(), slots.shape[1], at
            escapes_at = at + layout.escapes_at - layout.starts_at  # only its lowest bits are used
        elif heads is not None:
            starts_at = heads.data_ptr()
        bases_at = starts_at + layout.bases_at - layout.starts_at
        table = [words_at, stride, most, out.data_ptr(), num_rows, tiles, starts_at, bases_at, escapes_at]
        self._memory = coded, slots, heads, out  # kept alive: the table has only addresses
        self._in_order = torch.arange(out.nbytes * num_rows // layout.raw_nbytes, dtype=torch.int64, device=out.device)
        self._table = torch.tensor(table, dtype=torch.int64, device="cpu").to(out.device)
        self._tiles = tiles
        self._constants = int(slots is not None), layout.element.exponent_bits
        self._options = _options(layout.element)
        self._compiled: Any = None

    def __call__(
        self, ids: torch.Tensor, slots: torch.Tensor | None = None, *, places: torch.Tensor | None = None
    ) -> None:
        grid = self._tiles, ids.numel(), 1
        arguments = self._table, ids, ids if slots is None else slots, self._in_order if places is None else places
        with on(self._table.device):
            if self._compiled is not None:
                self._compiled[grid](*(tensor.data_ptr() for tensor in arguments), *self._constants)
                return
            self._compiled = kernels.pick[grid](*arguments, *self._constants, **self._options)


def _options(element: Element) -> dict[str, int]:
    """Compiler options. Without a limit, rare cases in a tile of bfloat16 would take registers from everything else
    [H200: 1.60 TB/s instead of 1.83]."""
    return {"num_warps": WARPS} | ({"maxnreg": 32} if element.is_dense else {})


def _row(parts: Sequence[CodedPart]) -> tuple[list[int], int]:
    """The table of a launch, and its number of programs."""
    firsts = list(accumulate((layout.num_tiles for _, layout, _ in parts), initial=0))
    row = [*firsts[:-1], *[_NEVER] * (_MOST - len(parts))]
    for coded, layout, out in parts:
        row += [coded.data_ptr(), out.data_ptr(), layout.count, layout.num_escapes]
    return [*row, *[0] * (5 * _MOST - len(row))], firsts[-1]
