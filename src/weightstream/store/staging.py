"""Staging: a ring of equal buffers that threads fill from sources, ahead of the consumer. It knows no device.

A thread takes the next piece and the next free buffer together, under one lock, so a later reading cannot hold a
buffer that an earlier one waits for: readings end if they are consumed in the order of their start, or side by side.
Threads know neither Staging nor Reading, so both can be forgotten. Finalizers run wherever Python allocates, under
any lock, so all they do is to put into a SimpleQueue, which allows that.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from weightstream.errors import InvariantError, StoreError

_Drained = Callable[[], None] | None  # blocks until the last use of a buffer is over
_Free = SimpleQueue[tuple[torch.Tensor, _Drained] | None]  # None only wakes


class Source(Protocol):
    """Bytes by position, such as a file's. Several threads read at once."""

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor: ...


class MemorySource:
    """Pageable memory as a source; `prepare` is called with the range before it is read, and may raise."""

    def __init__(self, memory: torch.Tensor, prepare: Callable[[int, int], None] | None = None) -> None:
        self._memory = memory
        self._prepare = prepare

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Copies bytes [begin, end) to the start of `memory`, flat uint8; returns the view of exactly these."""
        if not 0 <= begin <= end <= self._memory.numel() or end - begin > memory.numel():
            raise InvariantError(f"[{begin}, {end}) of {self._memory.numel()} bytes do not go into {memory.numel()}")
        if self._prepare is not None:
            self._prepare(begin, end)
        # memmove, not Tensor.copy_: one thread, so that copying leaves the other cores to compute; drops the GIL.
        ctypes.memmove(memory.data_ptr(), self._memory.data_ptr() + begin, end - begin)
        return memory[: end - begin]


class Piece:
    """Bytes [begin, end) of a reading. `memory` is theirs until `release`, or until nobody holds the piece."""

    def __init__(self, begin: int, memory: torch.Tensor, buffer: torch.Tensor, free: _Free) -> None:
        self.begin = begin
        self.end = begin + memory.numel()
        self.memory = memory
        self._buffer = buffer
        self._free = free
        self._lent = weakref.finalize(self, free.put, (buffer, None))

    def release(self, drained: _Drained = None) -> None:
        """Gives the buffer back, to be written once `drained` has returned. Only the first call counts."""
        if self._lent.detach() is not None:
            self._free.put((self._buffer, drained))


class _Request:
    """What a reading shares with the threads: what is to be read and what was."""

    def __init__(self, source: Source, begin: int, end: int, step: int) -> None:
        self.source = source
        self.begin = begin
        self.end = end
        self._step = step
        self._position = begin
        self._done: SimpleQueue[tuple[int, Piece | BaseException] | None] = SimpleQueue()  # None: dropped
        self._early: dict[int, Piece | BaseException] = {}
        self._dropped = ""

    def next_range(self) -> tuple[int, int] | None:
        """Cuts at multiples of a buffer in the source's own positions, so that a piece fits one when aligned."""
        begin = self._position
        if self._dropped or begin >= self.end:
            return None
        self._position = min(self.end, (begin // self._step + 1) * self._step)
        return begin, self._position

    def deliver(self, begin: int, result: Piece | BaseException) -> None:
        self._done.put((begin - self.begin, result))
        if self._dropped:
            self.drop()

    def receive(self, begin: int) -> Piece:
        """Blocks until the piece that begins there was read; raises its error."""
        while (result := self._early.pop(begin, None)) is None:
            if (arrived := self._done.get()) is None:
                raise StoreError(f"bytes [{self.begin}, {self.end}): the reading {self._dropped}")
            self._early.update([arrived])
            del arrived
        try:
            if isinstance(result, Piece):
                return result
            raise result
        finally:
            del result  # an error holds the frame that raised it, which must not hold the error

    def drop(self, reason: str = "has ended or was cancelled") -> None:
        """Forgets what was read, reads no more and wakes the consumer; again for every piece that comes late."""
        self._dropped = self._dropped or reason
        self._early.clear()
        with suppress(Empty):
            while True:
                self._done.get_nowait()
        self._done.put(None)


class Reading:
    """The pieces of one range, in order, each as soon as it was read. They can be iterated over once."""

    def __init__(self, request: _Request, staging: Staging) -> None:
        self._request = request
        self._staging = staging  # whoever reads keeps it open
        weakref.finalize(self, request.drop)

    def __iter__(self) -> Iterator[Piece]:
        position, nbytes = 0, self._request.end - self._request.begin
        try:
            while position < nbytes:
                piece = self._request.receive(position)
                position = piece.end
                yield piece
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Drops what is not yet handed out: its buffers go back. A thread that waits for a piece gets `StoreError`."""
        self._request.drop()


class _Desk:
    """Where the threads take work and buffers."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.requests: SimpleQueue[_Request | None] = SimpleQueue()  # None: closed
        self._request: _Request | None = None
        self._free: _Free = SimpleQueue()
        for buffer in buffers:
            self._free.put((buffer, None))
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._free.put(None)
        self.requests.put(None)

    def run(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Reads one piece; False when closed. A call of its own: a thread that waits for work holds no tensor."""
        with self._lock:
            taken = self._take()
        if taken is None:
            return False
        request, begin, end, buffer, drained = taken
        try:
            if drained is not None:
                drained()
            piece = Piece(begin - request.begin, request.source.read(begin, end, buffer), buffer, self._free)
        except BaseException as error:  # carried to the consumer, whatever it is
            self._free.put((buffer, drained))  # it may be what failed
            request.deliver(begin, error)
        else:
            request.deliver(begin, piece)
        return True

    def _take(self) -> tuple[_Request, int, int, torch.Tensor, _Drained] | None:
        while True:
            if self._request is None or (span := self._request.next_range()) is None:
                self._request = None  # before the wait
                self._request = self.requests.get()
                if self._request is None:
                    self.requests.put(None)  # for the other threads
                    return None
                continue
            lent = self._free.get()
            if lent is not None and not self._closed:
                return self._request, *span, *lent
            self._free.put(lent)
            self._request.drop("ended early: its staging ring was closed")


class Staging:
    """Reads ahead into `buffers`: flat uint8, page-aligned, of one size; never more at once than fit them."""

    def __init__(self, buffers: Sequence[torch.Tensor], num_threads: int = 3) -> None:
        self._step = buffers[0].numel()
        self._desk = _Desk(buffers)
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, self._desk.close)

    def start(self, source: Source, begin: int, end: int) -> Reading:
        """Begins to read bytes [begin, end) of `source` and returns at once."""
        request = _Request(source, begin, end, self._step)
        with self._lock:
            if not self._close.alive:
                raise InvariantError(f"bytes [{begin}, {end}) are asked of a staging ring that was closed")
            while len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._desk.run, name="weightstream-read", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._desk.requests.put(request)
        return Reading(request, self)

    def close(self) -> None:
        """Ends the threads, waiting for the requests under way; readings that are not done raise `StoreError`."""
        with self._lock:
            self._close()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()
