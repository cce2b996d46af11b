"""What is done at the end of an object, by the process that made it alone.

A process that was forked has the objects and none of the threads, and a lock that one of these held stays locked there
for good: what stops a thread, or hands something back, would wait for ever.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Owner = TypeVar("_Owner")


def finalize(owner: _Owner, call: Callable[..., object], *args: Any) -> weakref.finalize[..., _Owner]:
    """As `weakref.finalize`; does nothing in a process that was forked since."""
    return weakref.finalize(owner, _here, os.getpid(), call, *args)


def _here(process: int, call: Callable[..., object], *args: Any) -> object:
    return call(*args) if os.getpid() == process else None
