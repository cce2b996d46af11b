"""An error at a chosen line of the library's own code, or a signal at any moment."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import weightstream

_SOURCE = weightstream.__path__[0]


class Cut(BaseException):
    """The error that is raised at a line. It is not caught as an error of a forward or of a library."""


Visit = tuple[str, int, int]  # file, line, how many times the thread has reached it


class Lines:
    """Counts the library's lines that the calling thread reaches, and raises at the `at`-th one (0: at none).

    `withs` are the last visits of `with` statements, which are visited again at the end of their blocks. `visit` is a
    visit to raise at.
    """

    def __init__(self, at: int = 0, error: type[BaseException] = Cut, visit: Visit | None = None) -> None:
        self.num, self.where = 0, ""
        self.withs: dict[tuple[str, int], int] = {}
        self._at, self._error, self._visit = at, error, visit

    def __enter__(self) -> Lines:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        # Python ignores errors in a `__del__`
        return self._line if code.co_filename.startswith(_SOURCE) and code.co_name != "__del__" else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.num += 1
            path, line = frame.f_code.co_filename, frame.f_lineno
            if linecache.getline(path, line).lstrip().startswith("with "):
                self.withs[path, line] = self.withs.get((path, line), 0) + 1
            visit = path, line, self.withs.get((path, line), 0)
            if self.num == self._at or visit == self._visit:
                self.where = f"{frame.f_code.co_filename.removeprefix(_SOURCE)}:{frame.f_lineno}"
                sys.settrace(None)
                raise self._error(self.where)
        return self._line


@contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread by a signal, `after_s` seconds after the block began, if it lasts."""
    done, main = threading.Event(), threading.main_thread().ident

    def interrupt(*_: object) -> None:
        if not done.is_set():
            raise KeyboardInterrupt

    def send() -> None:
        time.sleep(after_s)
        if not done.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)  # type: ignore[arg-type]

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        yield
    finally:
        done.set()
        sender.join()
        time.sleep(0)  # a pending signal arrives here, and does nothing
        signal.signal(signal.SIGUSR1, before)


def is_free(lock: Any) -> bool:
    """Whether another thread can acquire a lock."""
    found: list[bool] = []

    def take() -> None:
        if got := lock.acquire(timeout=2.0):
            lock.release()
        found.append(got)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def num_lines(act: Callable[[], object]) -> int:
    """Number of lines of the library that `act` runs on this thread."""
    with Lines() as lines:
        act()
    return lines.num
