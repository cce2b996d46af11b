"""The collector of cyclic garbage, which runs whenever Python likes, in any thread that makes objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[bool]:
    """Inside, no collection begins by itself. Yields whether one could before.

    The switch belongs to the process: where two threads are inside and the first leaves, it is on for the other.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield was_enabled
    finally:
        if was_enabled:
            gc.enable()
