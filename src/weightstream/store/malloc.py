"""The heap of this process: return freed memory to the system, and reserve memory in the heap."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

_BLOCK_NBYTES = 64 << 10  # smaller than blocks that malloc maps one by one


def trim() -> None:
    """Return freed memory to the system."""
    # glibc keeps freed tensors between small live blocks: without this, memory grew by half of the converted bytes
    if trim := getattr(_library(), "malloc_trim", None):
        trim(0)


def room(nbytes: int) -> Callable[[], None]:
    """Reserve `nbytes` in the calling thread's heap until the result is called; malloc asks the system for none of it.

    Call the result once. The reserve takes a page of each block now, and more memory only when it is used. The heap
    does not shrink meanwhile, as its last block is in use. Blocks that malloc maps one by one, at first of 128 KiB and
    more, are not served from it.
    """
    malloc, free = _library().malloc, _library().free
    *blocks, last = [malloc(_BLOCK_NBYTES) for _ in range(max(1, nbytes // _BLOCK_NBYTES))]
    for block in blocks:
        free(block)
    return lambda: free(last)


@cache
def _library() -> Any:
    library = ctypes.CDLL(None)
    library.malloc.argtypes = (ctypes.c_size_t,)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = (ctypes.c_void_p,)
    library.free.restype = None
    return library
