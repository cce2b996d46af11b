"""Progress of phases that take seconds: bars on a terminal, lines in the log or on stderr. Measures nothing."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import chain, count
from threading import Event, Thread
from typing import Any

logger = logging.getLogger("weightstream.progress")  # the command line writes it to stderr, also into a pipe

LONG_S = 5.0  # a phase that takes longer gets one more line
_AGAIN_S, _EACH_S = 20.0, 60.0  # another one then, and one each minute
_NOTICED_S = 0.7  # a phase that takes less gets no line
_AWAITED_S = 1.5  # nor does a start that takes less


def say(text: str, progress: bool | None = None) -> None:
    """Write a line to the log if it shows INFO, else to stderr; with `progress=False`, to the log only."""
    if progress is False or (logger.isEnabledFor(logging.INFO) and logger.hasHandlers()):
        logger.info("%s", text)
    elif sys.stderr is not None:  # it is None in a process without a console
        with suppress(OSError, ValueError):  # stderr is closed, or its reader is gone
            print(f"weightstream: {text}", file=sys.stderr, flush=True)


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it was closed
        return False


def bars(progress: bool | None) -> bool | None:
    """The `progress` for a library that draws bars: by default none are drawn into a file. A notebook shows them."""
    return False if progress is None and not _is_terminal() and "ipykernel" not in sys.modules else progress


@contextmanager
def reporting(
    text: str, progress: bool | None = None, total: int | None = None, *, is_announced: bool = False
) -> Iterator[Callable[..., object]]:
    """Show a bar while the block runs if stderr is a terminal and `progress` is not False. Else write a line, unless
    the phase `is_announced` already, and more while it lasts.

    Yields a function that advances the bar by one of `total`; its keyword `description` replaces the text. The bar is
    refreshed by this function only: a refresh thread would disturb what is measured.
    """
    if progress is False or not _is_terminal():
        if not is_announced:
            say(text, progress)
        yield _Steps(text, progress)
        return
    with _bar(auto_refresh=False) as bar:
        task = bar.add_task(text, total=total)
        bar.refresh()
        yield partial(bar.update, task, advance=1, refresh=True)


@contextmanager
def phase(text: str, progress: bool | None = None) -> Iterator[None]:
    """Show a moving bar with the time while the block runs if stderr is a terminal and `progress` is not False. Else
    write a line, and one more after `LONG_S`.

    A thread draws the bar once a second, which changes at most a few of the steps that are timed meanwhile.
    """
    if progress is False or not _is_terminal():
        say(text, progress)
        with lasting(text, progress):
            yield
        return
    with _bar(refresh_per_second=1) as bar:
        bar.add_task(text, total=None)
        yield


def _bar(**options: Any) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, **options)


class _Steps:
    """Called at each step of a phase; writes the lines that say that it lasts."""

    def __init__(self, text: str, progress: bool | None) -> None:
        self._progress = progress
        self._begin_s = time.monotonic()
        self._lines = _still_lines(text)
        self._next = next(self._lines)

    def __call__(self, **_: object) -> None:
        last, seconds = None, time.monotonic() - self._begin_s
        while seconds >= self._next[0]:
            last, self._next = self._next[1], next(self._lines)
        if last is not None:
            say(last, self._progress)


def lasting(text: str, progress: bool | None = None) -> AbstractContextManager[None]:
    """Write a line if the block takes longer than `LONG_S`, and more later. A thread waits meanwhile: do not measure
    inside."""
    return _said_after(_still_lines(text), progress)


def announced(text: str) -> AbstractContextManager[None]:
    """Write a line if the block takes long enough to be noticed on a terminal, one more after `LONG_S`, and more
    later."""
    return _said_after(chain([(_AWAITED_S, text)], _still_lines(text)))


def downloading(name: str, progress: bool | None = None) -> AbstractContextManager[None]:
    """The lines of `announced` for a download from the Hub; on a terminal the first only, as bars follow it there."""
    text = f"downloading {name} from the Hub, if its cache lacks it"
    return _said_after(chain([(_AWAITED_S, text)], () if bars(progress) is not False else _still_lines(text)), progress)


@contextmanager
def _said_after(lines: Iterable[tuple[float, str]], progress: bool | None = None) -> Iterator[None]:
    """Write each line once the block has taken its seconds, and none after the end of the block."""
    is_over = Event()
    thread = _said_until(is_over.wait, lines, progress)
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def announce(work: Future[Any], text: str, progress: bool | None = None) -> None:
    """Write a line if work of other threads takes longer than `_NOTICED_S`, and more later."""
    lines = chain([(_NOTICED_S, text)], _still_lines(text))
    _said_until(lambda timeout_s: not wait([work], timeout_s).not_done, lines, progress)


def _said_until(is_over: Callable[[float], bool], lines: Iterable[tuple[float, str]], progress: bool | None) -> Thread:
    """Start a thread that writes each line once its seconds have passed, until `is_over(timeout_s)`, which waits."""
    begin_s = time.monotonic()

    def watch() -> None:
        for seconds, text in lines:
            if is_over(max(0.0, begin_s + seconds - time.monotonic())):
                return
            say(text, progress)

    thread = Thread(target=watch, name="weightstream-progress", daemon=True)
    thread.start()
    return thread


def _still_lines(text: str) -> Iterator[tuple[float, str]]:
    return ((seconds, _still(text, seconds)) for seconds in chain((LONG_S, _AGAIN_S), count(_EACH_S, _EACH_S)))


def _still(text: str, seconds: float) -> str:
    return f"still {text}, {seconds:.0f} s so far"
