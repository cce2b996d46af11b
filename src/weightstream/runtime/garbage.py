"""Garbage collection, where thousands of objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nobody looks for garbage inside: hardly any is made, and among all that is loaded a look takes a quarter of a
    second. What was made counts as old then, so that none of the next looks is at it."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
