"""Finalizers that run only in the process that made the object.

A forked process has the objects but none of the threads, and a lock that a thread held at the fork stays locked there.
A finalizer that stops a thread or takes a lock would wait forever.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Owner = TypeVar("_Owner")


def finalize(owner: _Owner, call: Callable[..., object], *args: Any) -> weakref.finalize[..., _Owner]:
    """As `weakref.finalize`, but the call does nothing in a process forked since."""
    return weakref.finalize(owner, _here, os.getpid(), call, *args)


def _here(process: int, call: Callable[..., object], *args: Any) -> object:
    return call(*args) if os.getpid() == process else None
