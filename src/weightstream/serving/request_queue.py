"""Requests take turns at the model: one thread runs them in their order, from a queue of bounded length.

A model whose weights stream is limited by the link, and its steps take turns in any case.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")
_Piece = TypeVar("_Piece")


class QueueFullError(Exception):
    """As many requests are waiting as may."""


class ClosingError(Exception):
    """The server is shutting down."""


class JobError(Exception):
    """The work failed by the error `cause`.

    A future takes no `StopIteration`, and hands no `SystemExit` on to one request alone.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


class Job(Generic[_Piece, _Result]):
    """A request at the model. Made, awaited and cancelled by the event loop; `work` runs in the thread of turns.

    `work(job)` calls `add` with each piece of its result, looks at `is_cancelled`, and returns the result.
    """

    def __init__(self, work: Callable[[Job[_Piece, _Result]], _Result]) -> None:
        self.is_cancelled = False
        self.created_at = time.monotonic()
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[_Piece | None] = asyncio.Queue()  # None: there are no more
        self._result: asyncio.Future[_Result] = self._loop.create_future()
        self._result.add_done_callback(lambda future: future.cancelled() or future.exception())  # it may be unawaited

    def cancel(self) -> None:
        """The result is not wanted any more."""
        self.is_cancelled = True

    def add(self, piece: _Piece) -> None:
        self._in_loop(self._pieces.put_nowait, piece)

    async def next_piece(self) -> _Piece | None:
        """The next piece, once there is one; None: there are no more."""
        return await self._pieces.get()

    async def result(self) -> _Result:
        """The result. Raises `JobError` if the work failed, `ClosingError` if the queue was closed before its end."""
        return await asyncio.shield(self._result)

    def run(self) -> None:
        try:
            result = self._work(self)
        except BaseException as error:  # even an exit: the requests that wait need this thread
            _clear_frames(error)
            self.fail(JobError(error))
        else:
            self._end(self._result.set_result, result)

    def fail(self, error: Exception) -> None:
        self._end(self._result.set_exception, error)

    def _end(self, settle: Callable[..., object], value: object) -> None:
        self._in_loop(self._settle, settle, value)

    def _settle(self, settle: Callable[..., object], value: object) -> None:
        if not self._result.done():  # else it was closed while it ran
            settle(value)
            self._pieces.put_nowait(None)

    def _in_loop(self, call: Callable[..., object], *values: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and its clients have gone
            self._loop.call_soon_threadsafe(call, *values)


def _clear_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: activations, whose memory the next request needs."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class RequestQueue:
    """The thread that runs jobs, and those that wait for it."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job[Any, Any]] = deque()
        self._running: Job[Any, Any] | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="weightstream-requests", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_running(self) -> bool:
        """Whether a job has its turn."""
        return self._running is not None

    @property
    def is_full(self) -> bool:
        """Whether as many jobs wait as may."""
        return len(self._waiting) + self.is_running > self._most_waiting

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closed

    def submit(self, job: Job[Any, Any]) -> None:
        """Queue a job. Raises `QueueFullError` or `ClosingError`."""
        with self._changed:
            if self._is_closed:
                raise ClosingError
            if self.is_full:
                raise QueueFullError
            self._waiting.append(job)
            self._changed.notify()

    def withdraw(self, job: Job[Any, Any]) -> None:
        """Cancel a job. If it waits it leaves the queue, else it ends after its current token."""
        job.cancel()
        with self._changed, suppress(ValueError):
            self._waiting.remove(job)

    def close(self) -> None:
        """Cancel all jobs, and take no more. Their clients get `ClosingError` at once, not after a long step."""
        with self._changed:
            self._is_closed = True
            jobs = [*self._waiting, *filter(None, [self._running])]
            self._waiting.clear()
            self._changed.notify()
        for job in jobs:
            job.fail(ClosingError())  # first, as a cancelled job may end with what it has
            job.cancel()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the running job, after `close`."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                self._running = job = self._waiting.popleft()
            job.run()
