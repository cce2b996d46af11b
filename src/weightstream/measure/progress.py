"""Progress: says once what takes seconds, on a terminal or in the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

logger = logging.getLogger("weightstream")


@contextmanager
def told(text: str, progress: bool | None = None, total: int | None = None) -> Iterator[Callable[..., object]]:
    """A bar while the block runs, where stderr is a terminal and `progress` does not hide it; else a line of the log.

    Yields what moves it on by one of `total`, and may give it another `description`. No thread moves it, which what is
    measured would notice.
    """
    if progress is False or not sys.stderr.isatty():
        logger.info("%s", text)
        yield lambda **_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(text, total=total)
        bar.refresh()
        yield partial(bar.update, task, advance=1, refresh=True)
