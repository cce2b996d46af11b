"""Staging: a ring of equal buffers that threads fill from a source, ahead of the consumer.

A thread takes the next piece and the next free buffer under one lock, so a later piece cannot hold a buffer that an
earlier piece waits for. Readings must be consumed in the order in which they were started, or concurrently. A piece
without references returns its buffer from `__del__`, which may run in any allocation; so it only puts into a
SimpleQueue, which is reentrant.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from weightstream.errors import InvariantError, StoreError
from weightstream.store.ending import finalize
from weightstream.store.numa import Node, on_node

_Drained = Callable[[], None] | None  # blocks until the buffer's last use is over


class _FreeBuffer(NamedTuple):
    """A buffer that may be written once `drained` has returned, if there is such a call."""

    memory: torch.Tensor
    drained: _Drained


_Free = SimpleQueue[_FreeBuffer | None]  # None wakes a thread that waits, at the end

_PATIENCE_S = 1.0  # a process that ends waits so long for reads under way


class StagingSource(Protocol):
    """Bytes with offsets, such as a file; several threads read at once."""

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor: ...


class SourceRange(NamedTuple):
    """Bytes [begin, end) of a source."""

    source: StagingSource
    begin: int
    end: int


class MemorySource(NamedTuple):
    """Pageable host memory as a source."""

    memory: torch.Tensor

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        # memmove, not Tensor.copy_: it uses one thread, which leaves the other cores to compute, and drops the GIL.
        ctypes.memmove(memory.data_ptr(), self.memory[begin:end].data_ptr(), end - begin)
        return memory[: end - begin]


class StagedPiece:
    """Bytes [begin, end) of a reading in `memory`, until the piece is released or has no references."""

    memory: torch.Tensor

    def __init__(self, source: StagingSource, origin: int, begin: int, end: int, free: _Free) -> None:
        self.begin = begin - origin
        self.end = end - origin
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.dropped = False
        self._source = source
        self._begin = begin
        self._end = end
        self._free = free
        self._buffers: list[torch.Tensor] = []

    def fill(self, buffer: torch.Tensor, drained: _Drained) -> None:
        try:
            if drained is not None:
                drained()
            self.memory = self._source.read(self._begin, self._end, buffer)
            self._buffers.append(buffer)
        except BaseException as error:  # any error is raised in the consumer
            self._free.put(_FreeBuffer(buffer, drained))  # `drained` may have failed
            self.error = error
        self.done.set()

    def drop(self, reason: str) -> None:
        self.dropped = True
        if not self.done.is_set():
            self.error = StoreError(f"bytes [{self._begin}, {self._end}): the reading {reason}")
            self.done.set()

    def release(self, drained: _Drained = None) -> None:
        """Return the buffer, which is written again once `drained` has returned. Only the first call counts."""
        if self._buffers:
            self._free.put(_FreeBuffer(self._buffers.pop(), drained))

    def __del__(self) -> None:
        self.release()


class StagedReading:
    """Yields the pieces of one range in order, each as soon as it is read. Iterate over it once."""

    def __init__(self, pieces: Sequence[StagedPiece], staging: Staging) -> None:
        self._num = len(pieces)
        self._pieces = deque(pieces)
        self._staging = staging  # keeps it open
        finalize(self, _forget, self._pieces)

    def __iter__(self) -> Iterator[StagedPiece]:
        try:
            for _ in range(self._num):
                yield self._next()
        finally:
            self.cancel()

    def _next(self) -> StagedPiece:
        try:
            piece = self._pieces[0]
        except IndexError:
            raise StoreError("the reading has ended or was cancelled") from None
        piece.done.wait()
        error, piece.error = piece.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error, piece  # the traceback refers to this frame: break the cycle
        with suppress(IndexError):  # cancelled meanwhile; this piece is complete all the same
            self._pieces.popleft()
        return piece

    def cancel(self) -> None:
        """Drop pieces that are not consumed, and return their buffers. A thread that waits gets `StoreError`."""
        with suppress(IndexError):  # the last first, so that no returned buffer goes to a piece that is dropped next
            while True:
                self._pieces.pop().drop("has ended or was cancelled")


def _forget(pieces: deque[StagedPiece]) -> None:
    """No thread waits for these pieces. Sets no event: a finalizer may run while the lock of an event is held."""
    for piece in pieces:
        piece.dropped = True
    pieces.clear()


class _Queues:
    """The queues from which threads take pieces and buffers."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.pieces: SimpleQueue[StagedPiece | None] = SimpleQueue()  # None: closed
        self.free: _Free = SimpleQueue()
        for buffer in buffers:
            self.free.put(_FreeBuffer(buffer, None))
        self._turn = threading.Lock()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.free.put(None)
        self.pieces.put(None)

    def run(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Read one piece; False once closed. A function of its own, so that a waiting thread refers to no tensor."""
        with self._turn:
            piece = self.pieces.get()
            if piece is None:
                self.pieces.put(None)  # for the other threads
                return False
            if piece.dropped:
                return True
            lent = self.free.get()
        if lent is None or self.is_closed:
            self.free.put(lent)
            piece.drop("ended early: its staging ring was closed")
        else:
            piece.fill(*lent)
        return True


def _end(queues: _Queues, reader: weakref.ref[threading.Thread]) -> None:
    """At exit, wait for reads under way: a thread inside torch would abort the process. A read that hangs is left."""
    queues.close()
    if (thread := reader()) is not None:
        thread.join(_PATIENCE_S)


class Staging:
    """Reads ahead into `buffers`: flat uint8, page-aligned, of one size."""

    def __init__(self, buffers: Sequence[torch.Tensor], num_threads: int = 3, node: Node | None = None) -> None:
        self._step = buffers[0].numel()
        self._queues = _Queues(buffers)
        self._num_threads = num_threads
        self._node = node
        self._threads: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._close = finalize(self, self._queues.close)

    def start(self, source: StagingSource, begin: int, end: int) -> StagedReading:
        """Start to read bytes [begin, end) of `source`, and return at once. Consume readings in the order of starts."""
        cuts = [begin, *range((begin // self._step + 1) * self._step, end, self._step), end]  # aligned inside
        ranges = pairwise(cuts) if begin < end else ()
        pieces = [StagedPiece(source, begin, first, last, self._queues.free) for first, last in ranges]
        with self._lock:
            if self._queues.is_closed:
                raise InvariantError(f"bytes [{begin}, {end}) are requested from a closed staging ring")
            while len(self._threads) < self._num_threads:
                run = on_node(self._queues.run, self._node)
                thread = threading.Thread(target=run, name="weightstream-read", daemon=True)
                thread.start()
                finalize(thread, _end, self._queues, weakref.ref(thread))  # a thread object lives while it runs
                self._threads.append(thread)
            for piece in pieces:
                self._queues.pieces.put(piece)
        reading = StagedReading(pieces, self)
        if self._queues.is_closed:  # closed meanwhile at exit: no thread may have seen these pieces
            reading.cancel()
        return reading

    def close(self) -> None:
        """End the threads after the requests under way; unfinished readings raise `StoreError`."""
        with self._lock:
            self._close()
            threads = self._threads
            self._threads = []
        for thread in threads:
            thread.join()
