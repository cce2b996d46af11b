"""Streams of the host: a thread that runs jobs in order, points in it, and copies that it makes. Knows no device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import cast

import torch

from weightstream.runtime.backend import Copy
from weightstream.store.near import Node
from weightstream.store.staging import Reading, Staging

STAGING_NBYTES, STAGING_BUFFERS = 8 << 20, 8
_THREADS = 3, 8  # that read, a half of the cores: a disk has work with the least, in memory one copies 3 to 5 GB/s

Move = tuple[Copy, Reading | None]  # a copy, and the reading that its bytes come from, if not from its source


class Point:
    """One recorded point of a stream: reached once, with the error of what ran before it, if it `takes` that."""

    __slots__ = ("_ahead", "error", "takes")

    def __init__(self, *, takes: bool = True) -> None:
        self._ahead = threading.Lock()  # held until then; a threading.Event takes five times as many calls
        self._ahead.acquire()
        self.takes = takes
        self.error: BaseException | None = None

    def reach(self) -> None:
        self._ahead.release()

    def block(self) -> None:
        """Block until the stream is here."""
        with self._ahead:
            pass

    def wait(self) -> None:
        """Block until the stream is here, and raise what failed before."""
        with self._ahead:
            pass
        if self.error is not None:
            raise self.error


class Worker:
    """A stream: a thread that runs jobs in order, from the first one on. The first error stays until a recorded point
    carries it away. Jobs are given by one thread at a time."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | Point | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._num_given = self._num_run = 0  # jobs, without points
        self._name, self._thread = name, cast(threading.Thread | None, None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Point):
                if job.takes:
                    job.error, self._error = self._error, None
                job.reach()
            else:
                self._run_one(job)
            del job  # the closure holds tensors; an idle thread must not

    def _run_one(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # carried to the thread that waits, whatever it is
            self._error = self._error or error
        self._num_run += 1

    def _put(self, job: Callable[[], None] | Point) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def submit(self, job: Callable[[], None]) -> None:
        self._num_given += 1
        self._put(job)

    def point(self) -> Point:
        """The present end of the stream."""
        self._put(point := Point())
        return point

    @property
    def is_idle(self) -> bool:
        """Whether every job so far has run, and no error waits for a point."""
        return self._num_run == self._num_given and self._error is None

    def join(self) -> None:
        """Block until every job so far has run. An error goes on waiting."""
        if self._num_run < self._num_given:
            self._put(point := Point(takes=False))
            point.block()

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if threading.current_thread() is not thread:
                thread.join()


class Feeder(Worker):
    """A stream whose jobs run at once, in the thread that gives them. Only where one is submitted, as it waits for what
    is read, it runs on a thread, and so do all that follow, until there is none left."""

    def do(self, job: Callable[[], None]) -> None:
        """Run a job behind all before it."""
        if self.is_idle:
            job()
        else:
            self.submit(job)

    def end(self) -> Point | None:
        """The present end of the stream; None where it is reached, without an error."""
        return None if self.is_idle else self.point()


def staging(take: Callable[[int], torch.Tensor], node: Node | None = None) -> Staging:
    """The staging ring of a device, in memory from `take`, it and its threads at a node."""
    with nullcontext() if node is None else node.first():
        memory = take(STAGING_BUFFERS * STAGING_NBYTES)
    num_threads = min(max(_THREADS[0], len(os.sched_getaffinity(0)) // 2), _THREADS[1])
    return Staging(memory.split(STAGING_NBYTES)[:STAGING_BUFFERS], num_threads, node)


def move(
    moves: Sequence[Move],
    put: Callable[[torch.Tensor, torch.Tensor], object],
    drained: Callable[[], Callable[[], None]] | None = None,
) -> None:
    """Make copies with `put`. Where it only queues them, what `drained` gives blocks until a buffer is free again."""
    try:
        for copy, reading in moves:
            if copy.prepare is not None:
                copy.prepare()
            if reading is None:
                put(copy.dst, copy.src)
                continue
            for piece in reading:
                put(copy.dst[piece.begin : piece.end], piece.memory)
                piece.release(None if drained is None else drained())
    except BaseException:
        for _, reading in moves:  # else whoever holds the error holds their buffers, and all wait
            if reading is not None:
                reading.cancel()
        raise


def bring(stream: Worker, moves: Sequence[Move], run: Callable[[Sequence[Move]], None]) -> None:
    """Have a stream make copies by `run`, and wait; raises what one failed with. What is not read yet when somebody
    interrupts that is read no more."""
    stream.submit(lambda: run(moves))
    end = stream.point()
    try:
        end.wait()
    except BaseException:
        for _, reading in moves:
            if reading is not None:
                reading.cancel()
        end.block()  # whatever the rest fails with is told nobody else
        raise
