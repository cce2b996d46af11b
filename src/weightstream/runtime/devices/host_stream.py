"""Streams of the host: a thread that runs jobs in order, recorded points, and copies. Knows no device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import NamedTuple

import torch

from weightstream.runtime.devices.backend import Copy
from weightstream.store.numa import Node
from weightstream.store.staging import StagedReading, Staging

STAGING_NBYTES, STAGING_BUFFERS = 8 << 20, 8
# Reading threads, half as many as cores: the least keep a disk busy; from memory each copies 3 to 5 GB/s.
_MIN_THREADS, _MAX_THREADS = 3, 8


class Move(NamedTuple):
    """A copy, and the reading that supplies its bytes; None: they are read from the copy's source."""

    copy: Copy
    reading: StagedReading | None


class Point:
    """A recorded point of a stream. It is reached once, and then has the error of the jobs before it, if any."""

    __slots__ = ("_ahead", "error")

    def __init__(self) -> None:
        self._ahead = threading.Lock()  # held until the point is reached; an Event takes five times as many calls
        self._ahead.acquire()
        self.error: BaseException | None = None

    def reach(self) -> None:
        self._ahead.release()

    def block(self) -> None:
        """Block until the stream has reached the point."""
        with self._ahead: pass  # fmt: skip # noqa: E701 - an interrupt between two lines would leave it locked

    def wait(self) -> None:
        """Block until the stream has reached the point, and raise the error of an earlier job."""
        with self._ahead: pass  # fmt: skip # noqa: E701 - as above
        if self.error is not None:
            raise self.error


class Worker:
    """A stream: a thread that runs jobs in order. The first error is kept until a recorded point takes it over."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # any error is raised in the waiting thread
                self._error = self._error or error
            del job  # it refers to tensors, which an idle thread must not keep

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def point(self) -> Point:
        """Record the present end of the stream."""
        point = Point()

        def reach() -> None:
            point.error = self._error
            self._error = None
            point.reach()

        self._jobs.put(reach)
        return point

    def join(self) -> None:
        """Block until all jobs so far have run. Returns at once in a job, where a finalizer may call it."""
        if threading.current_thread() is not self._thread:
            self.point().block()

    def stop(self) -> None:
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def staging(take: Callable[[int], torch.Tensor], node: Node | None = None) -> Staging:
    """The staging ring of a device, in memory from `take`; memory and threads are at `node` if there is one."""
    with nullcontext() if node is None else node.first():
        memory = take(STAGING_BUFFERS * STAGING_NBYTES)
    num_threads = min(max(_MIN_THREADS, len(os.sched_getaffinity(0)) // 2), _MAX_THREADS)
    return Staging(memory.split(STAGING_NBYTES)[:STAGING_BUFFERS], num_threads, node)


def move(
    moves: Sequence[Move],
    put: Callable[[torch.Tensor, torch.Tensor], object],
    drained: Callable[[], Callable[[], None]] | None = None,
) -> None:
    """Make copies with `put`. If `put` only queues them, `drained` returns a call that blocks until they are made."""
    try:
        for copy, reading in moves:
            if copy.prepare is not None:
                copy.prepare()
            if reading is None:
                put(copy.dst, copy.src)
                continue
            for piece in reading:
                try:
                    put(copy.dst[piece.begin : piece.end], piece.memory)
                finally:  # else the error's traceback would keep the buffer
                    piece.release(None if drained is None else drained())
    except BaseException:
        for _, reading in moves:  # else the traceback would keep their buffers, and all readings wait
            if reading is not None:
                reading.cancel()
        raise
