"""Staging: a ring of equal buffers that threads fill with what is read from a source, ahead of its consumer.

A thread takes the next piece together with the next free buffer, under one lock: a later piece cannot hold a buffer
that an earlier one waits for. So readings are to be consumed in the order in which they were started, or side by side.
A piece that nobody holds any more gives its buffer back. That may happen wherever memory is allocated, so it only puts
into a SimpleQueue, which allows it.
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

_PATIENCE_S = 1.0  # that a process which ends waits for reads under way


class StagingSource(Protocol):
    """Bytes with positions, such as a file; several threads read at once."""

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor: ...


class SourceRange(NamedTuple):
    """Bytes [begin, end) of a source."""

    source: StagingSource
    begin: int
    end: int


class MemorySource(NamedTuple):
    """Pageable memory as a source."""

    memory: torch.Tensor

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        # memmove, not Tensor.copy_: one thread, which leaves the other cores to compute; drops the GIL.
        ctypes.memmove(memory.data_ptr(), self.memory[begin:end].data_ptr(), end - begin)
        return memory[: end - begin]


class StagedPiece:
    """Bytes [begin, end) of a reading in `memory`, until it is released or nobody holds it."""

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
        self._lent: list[torch.Tensor] = []

    def fill(self, buffer: torch.Tensor, drained: _Drained) -> None:
        try:
            if drained is not None:
                drained()
            self.memory = self._source.read(self._begin, self._end, buffer)
            self._lent.append(buffer)
        except BaseException as error:  # carried to the consumer, whatever it is
            self._free.put(_FreeBuffer(buffer, drained))  # it may be what failed
            self.error = error
        self.done.set()

    def drop(self, reason: str) -> None:
        self.dropped = True
        if not self.done.is_set():
            self.error = StoreError(f"bytes [{self._begin}, {self._end}): the reading {reason}")
            self.done.set()

    def release(self, drained: _Drained = None) -> None:
        """Gives the buffer back, to be written once `drained` has returned. Only the first call counts."""
        if self._lent:
            self._free.put(_FreeBuffer(self._lent.pop(), drained))

    def __del__(self) -> None:
        self.release()


class StagedReading:
    """The pieces of one range, in order, each as soon as it was read. They can be iterated over once."""

    def __init__(self, pieces: Sequence[StagedPiece], staging: Staging) -> None:
        self._num = len(pieces)
        self._pieces = deque(pieces)
        self._staging = staging  # whoever reads keeps it open
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
                del error, piece  # its traceback holds this frame, which must not hold it
        with suppress(IndexError):  # cancelled meanwhile; this one is whole all the same
            self._pieces.popleft()
        return piece

    def cancel(self) -> None:
        """Drops what is not yet handed out: its buffers go back. A thread that waits for a piece gets `StoreError`."""
        with suppress(IndexError):  # the last first: a buffer that comes back is not for those that follow
            while True:
                self._pieces.pop().drop("has ended or was cancelled")


def _forget(pieces: deque[StagedPiece]) -> None:
    """Nobody can wait for these. A finalizer may run in the middle of an event's own lock, so it sets no event."""
    for piece in pieces:
        piece.dropped = True
    pieces.clear()


class _Desk:
    """Where the threads take work and buffers."""

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
        """Reads one piece; False when closed. A call of its own: a thread that waits for work holds no tensor."""
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


def _end(desk: _Desk, reader: weakref.ref[threading.Thread]) -> None:
    """The process ends, and a thread in torch would abort it: waits for what it reads. A read that hangs is left."""
    desk.close()
    if (thread := reader()) is not None:
        thread.join(_PATIENCE_S)


class Staging:
    """Reads ahead into `buffers`: flat uint8, page-aligned, of one size; never more at once than fit them."""

    def __init__(self, buffers: Sequence[torch.Tensor], num_threads: int = 3, node: Node | None = None) -> None:
        self._step = buffers[0].numel()
        self._desk = _Desk(buffers)
        self._num_threads = num_threads
        self._node = node
        self._threads: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._close = finalize(self, self._desk.close)

    def start(self, source: StagingSource, begin: int, end: int) -> StagedReading:
        """Begins to read bytes [begin, end) of `source` and returns at once. Consume readings in this order."""
        cuts = [begin, *range((begin // self._step + 1) * self._step, end, self._step), end]  # aligned inside
        ranges = pairwise(cuts) if begin < end else ()
        pieces = [StagedPiece(source, begin, first, last, self._desk.free) for first, last in ranges]
        with self._lock:
            if self._desk.is_closed:
                raise InvariantError(f"bytes [{begin}, {end}) are asked of a staging ring that was closed")
            while len(self._threads) < self._num_threads:
                run = on_node(self._desk.run, self._node)
                thread = threading.Thread(target=run, name="weightstream-read", daemon=True)
                thread.start()
                finalize(thread, _end, self._desk, weakref.ref(thread))  # it lives as long as it runs
                self._threads.append(thread)
            for piece in pieces:
                self._desk.pieces.put(piece)
        reading = StagedReading(pieces, self)
        if self._desk.is_closed:  # since: the process ends, and no thread may have seen these pieces
            reading.cancel()
        return reading

    def close(self) -> None:
        """Ends the threads, waiting for the requests under way; readings that are not done raise `StoreError`."""
        with self._lock:
            self._close()
            threads = self._threads
            self._threads = []
        for thread in threads:
            thread.join()
