"""Progress: says what takes seconds, on a terminal, in the log, or on stderr. Measures nothing."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread, Timer
from typing import Any

logger = logging.getLogger("weightstream.progress")  # shown by the command line, where there are no bars too

LONG_S = 5.0  # a phase that takes longer gets one more line
_NOTICED_S = 0.7  # what takes less needs no line


def say(text: str, progress: bool | None = None) -> None:
    """A line of the log where INFO is shown, else of stderr, but with `progress=False`."""
    if progress is False or (logger.isEnabledFor(logging.INFO) and logger.hasHandlers()):
        logger.info("%s", text)
    elif sys.stderr is not None:  # as where a process has no console
        with suppress(OSError, ValueError):  # it was closed, or nobody reads it any more
            print(f"weightstream: {text}", file=sys.stderr, flush=True)


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it was closed
        return False


@contextmanager
def reporting(text: str, progress: bool | None = None, total: int | None = None) -> Iterator[Callable[..., object]]:
    """A bar while the block runs, where stderr is a terminal and `progress` does not hide it; else a line, and one more
    where it takes long.

    Yields what moves it on by one of `total`, and may give it another `description`. No thread moves it, which what is
    measured would notice.
    """
    if progress is False or not _is_terminal():
        say(text, progress)
        yield _Steps(text, progress)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(text, total=total)
        bar.refresh()
        yield partial(bar.update, task, advance=1, refresh=True)


class _Steps:
    """Called at each step of a phase; says once that it takes long."""

    def __init__(self, text: str, progress: bool | None) -> None:
        self._text, self._progress = text, progress
        self._due_s = time.monotonic() + LONG_S

    def __call__(self, **_: object) -> None:
        if time.monotonic() >= self._due_s:
            self._due_s = float("inf")
            say(_still(self._text), self._progress)


@contextmanager
def lasting(text: str, progress: bool | None = None) -> Iterator[None]:
    """Says so where the block takes long. A thread waits for that meanwhile: not for what is measured."""
    timer = Timer(LONG_S, say, (_still(text), progress))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def announce(work: Future[Any], text: str, progress: bool | None = None) -> None:
    """Says so where work of other threads takes a moment, and again where it takes long."""

    def watch() -> None:
        if wait([work], _NOTICED_S).not_done:
            say(text, progress)
            if wait([work], LONG_S - _NOTICED_S).not_done:
                say(_still(text), progress)

    Thread(target=watch, name="weightstream-progress", daemon=True).start()


def _still(text: str) -> str:
    return f"still {text}, {LONG_S:.0f} s so far"
