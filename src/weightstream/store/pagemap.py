"""Which pages of a private mapping were written to: they left their file for good. Knows addresses only.

The kernel tells exactly: a page that was written is anonymous and no page of the file any more. It is asked with
PAGEMAP_SCAN (Linux 6.7), which skips what nobody touched, or by reading /proc/self/pagemap, 8 bytes per page.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import numpy as np

_PAGE = mmap.PAGESIZE
_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
_NUM_REGIONS = 512
_CHUNK_PAGES = 1 << 18


def written_ranges(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Returns ranges of bytes, relative to `address`, that hold every written page; None where nobody can tell."""
    first, end = address // _PAGE * _PAGE, -(-(address + nbytes) // _PAGE) * _PAGE
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        try:
            found = _scan(descriptor, first, end)
        except OSError:  # an older kernel
            found = _read(descriptor, first, end)
        return [(start - address, stop - address) for start, stop in found]
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _scan(descriptor: int, start: int, end: int) -> list[tuple[int, int]]:
    regions = (ctypes.c_uint64 * (3 * _NUM_REGIONS))()
    found: list[tuple[int, int]] = []
    while start < end:
        # size, flags, start, end, walk end, regions, their number, most pages; then the pages wanted: not of a file,
        # and present or swapped out
        words = [96, 0, start, end, 0, ctypes.addressof(regions), _NUM_REGIONS, 0]
        argument = (ctypes.c_uint64 * 12)(*words, _FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT)
        num = fcntl.ioctl(descriptor, _SCAN, argument)
        found += [(regions[3 * i], regions[3 * i + 1]) for i in range(num)]
        start = argument[4]
    return found


def _read(descriptor: int, start: int, end: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first in range(start // _PAGE, end // _PAGE, _CHUNK_PAGES):
        num = min(_CHUNK_PAGES, end // _PAGE - first)
        entries = np.frombuffer(os.pread(descriptor, 8 * num, 8 * first), dtype=np.uint64)
        kinds = entries >> np.uint64(61)  # present, swapped, of a file or shared
        anonymous = np.flatnonzero((kinds > 1) & (kinds % 2 == 0)).tolist()
        found += [((first + index) * _PAGE, (first + index + 1) * _PAGE) for index in anonymous]
    return found
