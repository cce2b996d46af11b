"""The collector of cyclic garbage, which runs whenever Python likes, in any thread that makes objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[bool]:
    """Inside, no collection begins by itself. Yields whether one could before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield was_enabled
    finally:
        if was_enabled:
            gc.enable()
