"""Stacks in host memory for streams of rows, each row in one piece or two, adjacent or scattered; and a backend that
checks the order of copies and reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from weightstream.plan.schedule import aligned
from weightstream.runtime.devices.backend import Backend, Side
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.experts.row_stream import RowLeaf, RowStream, StreamBuffer
from weightstream.runtime.experts.slot_cache import RowPiece, SlotCache, SlotStack

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
    flat = take(whole.flatten().clone())
    begins, ends = take(cut[:, :32].flatten()), take(cut[:, 32:].flatten())
    rows_of_cut = [RowPiece(rows=begins.split(32), at=0), RowPiece(rows=ends.split(16), at=32)]
    alone = tuple(take(row.clone()) for row in scattered)
    return [
        HostStack(whole, RowLeaf([RowPiece(rows=flat.split(80), at=0)], (5, 16), torch.uint8, 80)),
        HostStack(cut, RowLeaf(rows_of_cut, (48,), torch.uint8, 48)),
        HostStack(scattered.view(torch.float32), RowLeaf([RowPiece(rows=alone, at=0)], (2,), torch.float32, 8)),
    ]


def with_slots(stacks: list[HostStack], rows: Sequence[int], device: str = "cpu") -> SlotCache:
    """Put these rows in slots, and other bytes in their place in host memory. Changes `stacks`."""
    memories = [torch.full((len(rows) + 1, aligned(80)), 255, dtype=torch.uint8, device=device) for _ in stacks]
    pieces = [stack.leaf.pieces for stack in stacks]
    cache = SlotCache([SlotStack(*each) for each in zip(memories, pieces, strict=True)], NUM_ROWS)
    cache.resolve(torch.tensor(rows[::-1], device=device))
    if device != "cpu":
        torch.cuda.synchronize()
    for index, (values, leaf) in enumerate(stacks):
        for piece in leaf.pieces:
            for row in rows:
                piece.rows[row].fill_(170)
        slots = memories[index][:, : leaf.nbytes].view(leaf.dtype).view(-1, *leaf.shape)
        stacks[index] = HostStack(values, leaf._replace(slots=slots))
    return cache


def buffer_of(backend: Backend, num_rows: int = 5) -> StreamBuffer:
    """A buffer for four waves of as many rows, or five if these are two."""
    nbytes = 4 * aligned(num_rows * (80 + 48 + 8) + 3 * aligned(1))
    return StreamBuffer(torch.full((nbytes,), 255, dtype=torch.uint8, device=backend.device), backend)


def streams_of(
    stacks: Sequence[HostStack], buffer: StreamBuffer, num: int, cache: SlotCache | None = None
) -> list[RowStream]:
    """Streams of as many units, each with all stacks."""
    leaves = [stack.leaf for stack in stacks]
    streams = [RowStream(leaves, buffer, num_rows=NUM_ROWS, unit=unit, cache=cache) for unit in range(num)]
    buffer._following = lambda unit: streams[unit : unit + 3]
    return streams


class Clocks(CpuBackend):
    """Checks, by the events only, that copies and reads of the same bytes are ordered.

    Each of the two streams has a clock that counts its work, and knows the time of the other one up to which it has
    waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = {Side.COMPUTE: 0, Side.AHEAD: 0}
        self._knows = {Side.COMPUTE: 0, Side.AHEAD: 0}  # of the other stream
        self._last: dict[tuple[Side, int], int] = {}  # when a stream last used a byte
        self.num_reads = 0

    def record(self, side: Side, event: Any) -> None:
        event.point = side, self._now[side], self._knows[side]

    def wait(self, side: Side, event: Any) -> None:
        if event.point is not None:
            of, now, knows = event.point
            self._knows[side] = max(self._knows[side], knows if of is side else now)

    def watched(self, copied: Callable[..., Any]) -> Callable[..., Any]:
        """`RowStream.copied`, checked."""

        def spy(stream: RowStream, rows: Sequence[int], memory: torch.Tensor) -> Any:
            self._use(Side.AHEAD, memory)
            return copied(stream, rows, memory)

        return spy

    def read(self, leaves: Sequence[torch.Tensor]) -> None:
        self.num_reads += 1
        for leaf in leaves:
            self.use(leaf)

    def use(self, memory: torch.Tensor) -> None:
        """Compute reads or writes this memory."""
        self._use(Side.COMPUTE, memory)

    def _use(self, side: Side, memory: torch.Tensor) -> None:
        other = Side.AHEAD if side is Side.COMPUTE else Side.COMPUTE
        self._now[side] += 1
        for byte in range(memory.data_ptr(), memory.data_ptr() + memory.nbytes, 8):
            at = byte // 8
            assert self._last.get((other, at), 0) <= self._knows[side], "bytes are in use"
            self._last[side, at] = self._now[side]
