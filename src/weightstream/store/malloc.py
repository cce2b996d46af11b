"""The heap of this process: memory that malloc takes from the system, and what it keeps of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

_BLOCK_NBYTES = 64 << 10  # smaller than whatever malloc maps by itself


def trim() -> None:
    """Give freed memory back to the system."""
    # glibc keeps freed tensors between small live blocks: without this, memory grew by half of what was converted
    if trim := getattr(_library(), "malloc_trim", None):
        trim(0)


def room(nbytes: int) -> Callable[[], None]:
    """Have malloc find so many bytes for the calling thread without asking the system, until the result is called.

    It is to be called once. They take a page of each block now, and memory where they are used. Nobody gives them back
    meanwhile, as the last block is in use. What malloc maps by itself, 128 KiB and more at first, is asked for as ever.
    """
    malloc, free = _library().malloc, _library().free
    *blocks, last = [malloc(_BLOCK_NBYTES) for _ in range(max(1, nbytes // _BLOCK_NBYTES))]
    for block in blocks:
        free(block)
    return lambda: free(last)


@cache
def _library() -> Any:
    found = ctypes.CDLL(None)
    found.malloc.argtypes, found.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    found.free.argtypes, found.free.restype = (ctypes.c_void_p,), None
    return found
