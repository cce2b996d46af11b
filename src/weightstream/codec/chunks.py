"""Coded tensors a few tiles at a time: little memory, and several threads. Knows the layout, not what is in a tile.

Tiles do not depend on each other: their words, bases and escapes follow each other, and starts count on.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Coder:
    """What codes: `encode(data, dtype, bits)` on a device, for so many tiles at once."""

    encode: Callable[[torch.Tensor, str, int], tuple[Layout, torch.Tensor]] = reference.encode
    device: str = "cpu"
    num_tiles: int = _NUM_TILES

    def layouts(self, data: torch.Tensor, dtype: str, codes: Sequence[int]) -> list[Layout]:
        """What flat bytes will be in each code."""

        def num_escapes(part: torch.Tensor) -> list[int]:
            counts = reference.histograms(part.to(self.device), dtype)
            return [int(reference.windows(counts, bits)[1].sum()) for bits in codes]

        count = data.numel() // ELEMENTS[dtype].nbytes
        totals = [sum(found) for found in zip(*_each(num_escapes, self._parts(data, dtype)), strict=True)]
        made = zip(codes, totals, strict=True)
        return [Layout(dtype=dtype, bits=bits, count=count, num_escapes=total) for bits, total in made]

    def pieces(self, data: torch.Tensor, layout: Layout) -> Iterator[torch.Tensor]:
        """The coded form, which must have this layout, in pieces; raises `StoreError` where it has another."""

        def encoded(part: torch.Tensor) -> tuple[Layout, torch.Tensor]:
            found, coded = self.encode(part.to(self.device), layout.dtype, layout.bits)
            return found, coded.cpu()

        starts, bases, escapes, total = [torch.zeros(1, dtype=torch.int64, device="cpu")], [], [], 0
        for part, coded in _each(encoded, self._parts(data, layout.dtype)):
            yield coded[: part.starts_at]
            starts.append(coded[part.starts_at : part.bases_at].view(torch.int32)[1:].to(torch.int64) + total)
            bases.append(coded[part.bases_at : part.escapes_at].clone())
            escapes.append(coded[part.escapes_at : part.escapes_at + part.num_escapes].clone())
            total += part.num_escapes
        if total != layout.num_escapes:
            raise StoreError(f"{total} escapes, {layout.num_escapes} when they were counted: the weights changed")
        rest = torch.cat([torch.cat(starts).to(torch.int32).view(torch.uint8), *bases, *escapes])
        yield torch.nn.functional.pad(rest, (0, layout.nbytes - layout.starts_at - rest.numel()))

    def _parts(self, data: torch.Tensor, dtype: str) -> list[torch.Tensor]:
        return list(data.split(self.num_tiles * TILE * ELEMENTS[dtype].nbytes))


def decode(coded: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    """As `reference.decode`, of any size. Damaged bytes give wrong weights."""

    def decoded(first: int) -> None:
        reference.decode(coded, layout, out, first, min(first + _NUM_TILES, layout.num_tiles))

    deque(_each(decoded, range(0, layout.num_tiles, _NUM_TILES)), maxlen=0)


def _each(work: Callable[[_A], _T], items: Sequence[_A]) -> Iterator[_T]:
    """The results in order, made by all cores, a few ahead of the one that is asked for."""
    workers = min(len(os.sched_getaffinity(0)), len(items))
    if workers < 2:
        yield from map(work, items)
        return
    before = torch.get_num_threads()
    try:
        # Threads whose operations have none of their own: else each would use all cores.
        with ThreadPoolExecutor(workers, initializer=partial(torch.set_num_threads, 1)) as pool:
            waiting: deque[Future[_T]] = deque()
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            yield from (future.result() for future in waiting)
    finally:
        torch.set_num_threads(before)  # what threads to come begin with
