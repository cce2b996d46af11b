"""The CPU as a device: RAM is its memory, a thread is the copy stream, thread events order it. Knows no model."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Profile
from weightstream.runtime.devices.backend import Copy, Event, Graph, Side
from weightstream.runtime.devices.host_stream import STAGING_BUFFERS, STAGING_NBYTES, Move, Point, Worker, move, staging
from weightstream.store.arena import Arena
from weightstream.store.ending import finalize
from weightstream.store.limits import available_nbytes
from weightstream.store.staging import Staging

# Measured with two cores: memmove in one thread, concurrently with a bf16 matrix-vector product.
CPU_PROFILE = Profile(
    link_bytes_per_s=6e9,
    copy_latency_s=20e-6,
    device_bytes_per_s=8e9,
    half_flops_per_s=100e9,
    single_flops_per_s=20e9,
    attention_flops_per_s=40e9,
    op_s=2e-6,
    product_s=30e-6,
    compute_lost=0.9,
    op_launch_s=5e-6,
    overhead_s=50e-6,
    launch_s=20e-6,
    handover_s=50e-6,
    ranks_bytes_per_s=0.5e9,
    # by the libraries' functions [2 cores of a server, whose memory they read at 3.7 GB/s]
    unpack_mxfp4_bytes_per_s=0.04e9,
    unpack_float8_bytes_per_s=0.10e9,
    unpack_int4_bytes_per_s=0.13e9,
    on_cpu=True,
)


def free_nbytes() -> int:
    """Host memory to plan with if no budget is set: 80 % of what this process may still take, less staging."""
    return max(0, available_nbytes() * 4 // 5 - STAGING_BUFFERS * STAGING_NBYTES)


class CpuEvent:
    """The last recorded point; an event that was never recorded is complete, as on CUDA."""

    __slots__ = ("point",)

    def __init__(self) -> None:
        self.point: Point | None = None


class CpuStamp:
    """The time at which the stream reached the stamp; None before."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s: float | None = None

    def reach(self) -> None:
        self.at_s = time.perf_counter()


class CpuBackend:
    """Compute runs inline on the calling thread, so a wait blocks it; copies run on a thread of their own."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.profile = CPU_PROFILE
        self.pinning = nullcontext()  # nothing is pinned
        self._copies = Worker("weightstream-copy")
        self._close = finalize(self, self._copies.stop)

    def alloc(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def part(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        if begin == end:  # frombuffer refuses an empty buffer
            return self.alloc(0)
        return torch.frombuffer(memory.numpy(), dtype=torch.uint8, count=end - begin, offset=begin)

    def event(self) -> Event:
        return CpuEvent()

    edge = event

    def capturing(self) -> bool:
        return False

    def prepare_graph(self, copies: Iterable[Copy] = ()) -> None:
        pass

    def capture(self, graph: Graph, **options: Any) -> AbstractContextManager[None]:
        raise UnsupportedError("graphs can be captured on a CUDA device only, and this model computes on the CPU")

    def joined(self, graph: Graph) -> AbstractContextManager[None]:
        return self.capture(graph)

    def device_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        return memory

    def record(self, side: Side, event: Event) -> None:
        # None: compute runs inline, so it has passed the event already
        event.point = self._copies.point() if side is Side.COPY else None

    def wait(self, side: Side, event: Event) -> None:
        if (point := event.point) is None:
            return
        if side is Side.COPY:
            self._copies.submit(point.block)
        else:
            point.wait()

    def copy(self, copies: Sequence[Copy]) -> None:
        moves = self._moves(copies)
        self._copies.submit(lambda: move(moves, _put))

    def bring(self, copies: Sequence[Copy]) -> None:
        move(self._moves(copies), _put)

    def _moves(self, copies: Sequence[Copy]) -> list[Move]:
        return [Move(copy, None if copy.read is None else self._staging.start(*copy.read)) for copy in copies]

    @cached_property
    def _staging(self) -> Staging:
        return staging(Arena().take)

    def launch(self, kernel: Callable[[], None]) -> None:
        kernel()

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext()  # runs inline, as compute does

    def stamp(self, side: Side) -> CpuStamp:
        stamp = CpuStamp()
        if side is Side.COPY:
            self._copies.submit(stamp.reach)
        else:
            stamp.reach()
        return stamp

    def seconds(self, begin: CpuStamp, end: CpuStamp) -> float | None:
        return None if begin.at_s is None or end.at_s is None else end.at_s - begin.at_s

    def drain(self, event: Event) -> None:
        CpuBackend.synchronize(self)  # compute runs inline

    def synchronize(self) -> None:
        if self._close.alive:
            self._copies.join()

    def close(self) -> None:
        self._close()
        if "_staging" in vars(self):
            self._staging.close()


def _put(dst: torch.Tensor, src: torch.Tensor) -> None:
    """memmove, not `Tensor.copy_`: it uses one thread, which leaves the other cores to compute, and drops the GIL."""
    if src.dim() > 1:
        dst.view(src.shape).copy_(src)
        return
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), dst.numel())
