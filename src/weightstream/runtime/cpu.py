"""The CPU as a device: RAM is its memory, a thread is the copy stream, thread events order it. Knows no model."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Profile
from weightstream.runtime.backend import Copy, Event, Side
from weightstream.store.arena import Arena
from weightstream.store.limits import available_nbytes
from weightstream.store.staging import Reading, Staging

# Measured with two cores: one thread's memmove beside a bf16 matrix-vector product.
CPU_PROFILE = Profile(
    link_bytes_per_s=6e9,
    copy_latency_s=20e-6,
    device_bytes_per_s=8e9,
    half_flops_per_s=100e9,
    single_flops_per_s=20e9,
    attention_flops_per_s=40e9,
    op_s=2e-6,
    op_launch_s=5e-6,
    overhead_s=50e-6,
    launch_s=20e-6,
    handover_s=50e-6,
)


STAGING_NBYTES, STAGING_BUFFERS = 8 << 20, 8


def free_nbytes() -> int:
    """Host memory to plan with when no budget was given: 80 % of what this process may still take."""
    return available_nbytes() * 4 // 5


def staging(take: Callable[[int], torch.Tensor]) -> Staging:
    """The staging ring of a device, in memory from `take`."""
    memory = take(STAGING_BUFFERS * STAGING_NBYTES)
    return Staging(memory.split(STAGING_NBYTES)[:STAGING_BUFFERS])


class _Mark:
    """One recorded point: set once, with the error of what ran before it."""

    __slots__ = ("error", "reached")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None


class CpuEvent:
    """Holds the last recorded point; an event that was never recorded is complete, as on CUDA."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        self.mark: _Mark | None = None


class CpuStamp:
    """A time, once it is `reached`."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s: float | None = None

    def reach(self) -> None:
        self.at_s = time.perf_counter()


class Worker:
    """A stream: a thread that runs jobs in order. The first error stays until a recorded point carries it away."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # carried to the thread that waits, whatever it is
                self._error = self._error or error
            del job  # the closure holds tensors; an idle thread must not

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def record(self, event: CpuEvent) -> _Mark:
        mark = event.mark = _Mark()

        def reach() -> None:
            mark.error, self._error = self._error, None
            mark.reached.set()

        self._jobs.put(reach)
        return mark

    def wait(self, event: CpuEvent) -> None:
        if (mark := event.mark) is not None:
            self._jobs.put(lambda: (mark.reached.wait(), None)[1])

    def join(self) -> None:
        """Block until every job so far has run."""
        self.record(CpuEvent()).reached.wait()

    def stop(self) -> None:
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


class CpuBackend:
    """Compute runs inline on the calling thread, so a wait blocks it; copies run on a thread of their own."""

    def __init__(self, profile: Profile = CPU_PROFILE) -> None:
        self.device = torch.device("cpu")
        self.profile = profile
        self._copies = Worker("weightstream-copy")
        self._staging: Staging | None = None
        self._close = weakref.finalize(self, self._copies.stop)

    def alloc(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def event(self) -> Event:
        return CpuEvent()

    edge = event

    def capturing(self) -> bool:
        return False

    def capture(self, graph: Any, **options: Any) -> AbstractContextManager[None]:
        raise UnsupportedError("a graph can be captured on a CUDA device only, and this model computes on the CPU")

    def device_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        return memory

    def record(self, side: Side, event: Event) -> None:
        if side is Side.COPY:
            self._copies.record(event)
        else:
            event.mark = _Mark()
            event.mark.reached.set()

    def wait(self, side: Side, event: Event) -> None:
        if side is Side.COPY:
            self._copies.wait(event)
            return
        if event.mark is None:
            return
        event.mark.reached.wait()
        if event.mark.error is not None:
            raise event.mark.error

    def copy(self, copies: Sequence[Copy]) -> None:
        moves = [(copy, self._read(copy)) for copy in copies]
        self._copies.submit(lambda: _move(moves))

    def _read(self, copy: Copy) -> Reading | None:
        """Starts to read now, not when the copy's turn comes: the disk works ahead, as far as the staging ring goes."""
        if copy.read is None:
            return None
        if self._staging is None:
            self._staging = staging(Arena().take)
        return self._staging.start(*copy.read)

    def launch(self, kernel: Callable[[], None]) -> None:
        kernel()

    def stamp(self, side: Side) -> CpuStamp:
        stamp = CpuStamp()
        if side is Side.COPY:
            self._copies.submit(stamp.reach)
        else:
            stamp.reach()
        return stamp

    def seconds(self, begin: CpuStamp, end: CpuStamp) -> float | None:
        return None if begin.at_s is None or end.at_s is None else end.at_s - begin.at_s

    def synchronize(self) -> None:
        if self._close.alive:
            self._copies.join()

    def close(self) -> None:
        self._close()
        if self._staging is not None:
            self._staging.close()


def _move(moves: Sequence[tuple[Copy, Reading | None]]) -> None:
    with ending(moves):
        for copy, reading in moves:
            if copy.prepare is not None:
                copy.prepare()
            # memmove, not Tensor.copy_: one thread, so that copying leaves the other cores to compute; drops the GIL.
            if reading is None:
                ctypes.memmove(copy.dst.data_ptr(), copy.src.data_ptr(), copy.dst.numel())
                continue
            for piece in reading:
                ctypes.memmove(copy.dst.data_ptr() + piece.begin, piece.memory.data_ptr(), piece.memory.numel())
                piece.release()


@contextmanager
def ending(moves: Sequence[tuple[Copy, Reading | None]]) -> Iterator[None]:
    """On an error the other readings give their buffers back: else whoever holds the error holds them, and all wait."""
    try:
        yield
    except BaseException:
        for _, reading in moves:
            if reading is not None:
                reading.cancel()
        raise
