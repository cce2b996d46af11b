"""Stacks in host memory for streams of rows: each row in one piece or two, adjacent or scattered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from weightstream.runtime.experts.row_stream import RowLeaf
from weightstream.runtime.experts.slot_cache import RowPiece

NUM_ROWS = 12


class HostStack(NamedTuple):
    values: torch.Tensor  # of shape (rows, *row)
    leaf: RowLeaf


def host_stacks(take: Callable[[torch.Tensor], torch.Tensor] = lambda memory: memory) -> list[HostStack]:
    """`take` gives memory of the host that the device reads, with the same bytes."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator)

    whole, cut, scattered = drawn(NUM_ROWS, 5, 16), drawn(NUM_ROWS, 48), drawn(NUM_ROWS, 8)
    flat = take(whole.flatten())
    begins, ends = take(cut[:, :32].flatten()), take(cut[:, 32:].flatten())
    rows_of_cut = [RowPiece(rows=begins.split(32), at=0), RowPiece(rows=ends.split(16), at=32)]
    alone = tuple(take(row.clone()) for row in scattered)
    return [
        HostStack(whole, RowLeaf([RowPiece(rows=flat.split(80), at=0)], (5, 16), torch.uint8, 80)),
        HostStack(cut, RowLeaf(rows_of_cut, (48,), torch.uint8, 48)),
        HostStack(scattered.view(torch.float32), RowLeaf([RowPiece(rows=alone, at=0)], (2,), torch.float32, 8)),
    ]
