"""Coded tensors a few tiles at a time: little memory, and several threads. Knows the layout, not what is in a tile.

Tiles do not depend on each other: their words, bases and escapes follow each other, and starts count on.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from weightstream.codec import reference
from weightstream.codec.format import ELEMENTS, TILE, Layout
from weightstream.errors import StoreError

_NUM_TILES = 64  # a core's cache holds them, and Python's share of the time stays small
_A = TypeVar("_A")
_T = TypeVar("_T")
Chunk = tuple[int, int]  # bytes of the weights


def _ignore(data: torch.Tensor) -> None:
    """Nothing to be done before data is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coder:
    """What codes: `encode(data, dtype, bits)` on a device, for so many tiles at once."""

    encode: Callable[[torch.Tensor, str, int], tuple[Layout, torch.Tensor]] = reference.encode
    device: str = "cpu"
    num_tiles: int = _NUM_TILES

    def layouts(
        self, data: torch.Tensor, dtype: str, codes: Sequence[int], *, prepare: Callable[[torch.Tensor], None] = _ignore
    ) -> list[Layout]:
        """What flat bytes will be in each code; `prepare` is called for what is about to be read of them."""

        def num_escapes(chunk: Chunk) -> list[int]:
            counts = reference.histograms(self._read(data, chunk, prepare), dtype)
            return [int(reference.windows(counts, bits)[1].sum()) for bits in codes]

        count = data.numel() // ELEMENTS[dtype].nbytes
        totals = [sum(found) for found in zip(*_each(num_escapes, self._chunks(data, dtype)), strict=True)]
        made = zip(codes, totals, strict=True)
        return [Layout(dtype=dtype, bits=bits, count=count, num_escapes=total) for bits, total in made]

    def pieces(
        self, data: torch.Tensor, layout: Layout, *, prepare: Callable[[torch.Tensor], None] = _ignore
    ) -> Iterator[torch.Tensor]:
        """The coded form, which must have this layout, in pieces; raises `StoreError` where it has another."""

        def encoded(chunk: Chunk) -> tuple[Layout, torch.Tensor]:
            part, coded = self.encode(self._read(data, chunk, prepare), layout.dtype, layout.bits)
            return part, coded.cpu()

        starts, bases, escapes, total = [torch.zeros(1, dtype=torch.int64, device="cpu")], [], [], 0
        for part, coded in _each(encoded, self._chunks(data, layout.dtype)):
            yield coded[: part.starts_at]
            starts.append(coded[part.starts_at : part.bases_at].view(torch.int32)[1:].to(torch.int64) + total)
            bases.append(coded[part.bases_at : part.escapes_at].clone())
            escapes.append(coded[part.escapes_at : part.escapes_at + part.num_escapes].clone())
            total += part.num_escapes
        if total != layout.num_escapes:
            raise StoreError(f"{total} escapes, {layout.num_escapes} when they were counted: the weights changed")
        rest = torch.cat([torch.cat(starts).to(torch.int32).view(torch.uint8), *bases, *escapes])
        yield torch.nn.functional.pad(rest, (0, layout.nbytes - layout.starts_at - rest.numel()))

    def _chunks(self, data: torch.Tensor, dtype: str) -> list[Chunk]:
        size = self.num_tiles * TILE * ELEMENTS[dtype].nbytes
        return [(begin, min(begin + size, data.numel())) for begin in range(0, data.numel(), size)]

    def _read(self, data: torch.Tensor, chunk: Chunk, prepare: Callable[[torch.Tensor], None]) -> torch.Tensor:
        part = data[slice(*chunk)]
        prepare(part)
        return part.to(self.device)


def decode(coded: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    """As `reference.decode`, of any size. Damaged bytes give wrong weights, others than there maybe."""
    deque(_each(lambda first: _decode(coded, layout, first, out), _firsts(layout)), maxlen=0)


def decoded(coded: torch.Tensor, layout: Layout) -> Iterator[torch.Tensor]:
    """The weights' bytes in pieces, in order."""
    return _each(lambda first: _decode(coded, layout, first, None), _firsts(layout))


def _firsts(layout: Layout) -> range:
    return range(0, layout.num_tiles, _NUM_TILES)


def _decode(coded: torch.Tensor, layout: Layout, first: int, out: torch.Tensor | None) -> torch.Tensor:
    part, piece = _part(coded, layout, first, min(first + _NUM_TILES, layout.num_tiles))
    begin = first * TILE * layout.element.nbytes
    if out is None:
        out, begin = torch.empty(part.raw_nbytes, dtype=torch.uint8, device=coded.device), 0
    found = out[begin : begin + part.raw_nbytes]
    reference.decode(piece, part, found)
    return found


def _part(coded: torch.Tensor, layout: Layout, first: int, last: int) -> tuple[Layout, torch.Tensor]:
    """Tiles [first, last) as coded weights of their own. Whatever `starts` hold, it is within what there is."""
    num, count = last - first, min(last * TILE, layout.count) - first * TILE
    at = layout.starts_at + 4 * first
    starts = coded[at : at + 4 * (num + 1)].view(torch.int32)
    begin, end = (int(starts[i]) & 2**32 - 1 for i in (0, -1))
    begin = min(begin, layout.num_escapes)
    end = min(max(begin, end), layout.num_escapes, begin + count)
    part = Layout(dtype=layout.dtype, bits=layout.bits, count=count, num_escapes=end - begin)
    made = torch.zeros(part.nbytes, dtype=torch.uint8, device=coded.device)
    made[: part.starts_at] = coded[first * layout.tile_nbytes : last * layout.tile_nbytes]
    made[part.starts_at : part.bases_at] = (starts - starts[0]).view(torch.uint8)
    made[part.bases_at : part.escapes_at] = coded[layout.bases_at + first : layout.bases_at + last]
    escapes = coded[layout.escapes_at + begin : layout.escapes_at + end]
    made[part.escapes_at : part.escapes_at + part.num_escapes] = escapes
    return part, made


def _each(work: Callable[[_A], _T], items: Sequence[_A]) -> Iterator[_T]:
    """The results in order, made by all cores, a few ahead of the one that is asked for."""
    workers = min(len(os.sched_getaffinity(0)), len(items))
    if workers < 2:
        yield from map(work, items)
        return
    with _pool(workers) as pool:
        waiting: deque[Future[_T]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)


@contextmanager
def _pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads whose operations have none of their own: else each would use all cores."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=partial(torch.set_num_threads, 1)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # what threads to come begin with
