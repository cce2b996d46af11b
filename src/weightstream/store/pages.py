"""PageCache: ranges of files that are read ahead, in the order of need, and pinned where they are. Knows no model.

A device that can copy from registered read-only memory takes weights straight from the page cache: no copy of them in
this process, and one for all processes. A thread brings the ranges in one after the other, which is how a disk reads
fastest, while the first steps run: whoever needs a range waits for that alone.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weightstream.errors import StoreError
from weightstream.store.mapping import FileMapping, Window

logger = logging.getLogger("weightstream")

_PINNED_NBYTES = 512 << 20  # of one registration: the first range is ready soon, and their number stays small
_PIECE_NBYTES = 64 << 20  # close() waits for one

STAGED = "Copies go through a small staging ring instead: the CPU copies each byte once more."

Range = tuple[FileMapping, int, int]


class Pages:
    """One range of a file, on its way into memory or there."""

    def __init__(self, mapping: FileMapping, begin: int, end: int) -> None:
        self.mapping, self.begin, self.end = mapping, begin, end
        self.window: Window | None = None
        self.done = threading.Event()
        self.error: StoreError | None = None

    def source(self, begin: int, end: int) -> torch.Tensor | None:
        """Waits for the range; returns its bytes [begin, end) in pinned memory, or None where they are not pinned.

        Raises `StoreError` where the file could not be read.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.window.bytes(begin, end) if self.window is not None else None


class PageCache:
    """Holds ranges of files in memory. `pin` and `unpin` are the device's; without them ranges are only read ahead."""

    def __init__(
        self,
        pin: Callable[[torch.Tensor], None] | None = None,
        unpin: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._pin, self._unpin = pin, unpin
        self._pinned: list[torch.Tensor] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _release, self._closed, self._pinned, unpin)

    @property
    def nbytes(self) -> int:
        """Bytes pinned so far."""
        return sum(memory.numel() for memory in self._pinned)

    def hold(self, ranges: Sequence[Range]) -> list[Pages]:
        """Starts to bring in these ranges, in this order; returns the pages that each is in."""
        self.close()
        self._closed.clear()
        pages, of_range = _merged(ranges)
        for each in pages if self._pin is None else ():
            each.done.set()  # nobody has to wait: who reads a page first brings it in
        job = _Job(self._pin, self._pinned, self._closed)
        self._thread = threading.Thread(target=job.run, args=(pages,), name="weightstream-pages", daemon=True)
        self._thread.start()
        return of_range

    def close(self) -> None:
        """Stops reading and unpins everything; nothing may copy from it any more. May be called twice."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        _release(self._closed, self._pinned, self._unpin)


class _Job:
    """What the thread does: it holds no PageCache, so that one that is forgotten can go."""

    def __init__(self, pin: Any, pinned: list[torch.Tensor], closed: threading.Event) -> None:
        self._pin, self._pinned, self._closed = pin, pinned, closed

    def run(self, pages: list[Pages]) -> None:
        for each in pages:
            if self._closed.is_set() and self._pin is None:
                return
            try:
                self._bring_in(each)
            except StoreError as error:
                each.error = error
            except BaseException as error:  # told to whoever waits
                each.error = StoreError(f"{each.mapping.path}: cannot be read ahead: {error}")
            finally:
                each.done.set()

    def _bring_in(self, each: Pages) -> None:
        window = each.mapping.window(each.begin, each.end) if self._pin is not None else None
        where: FileMapping | Window = window or each.mapping
        start = each.begin // mmap.PAGESIZE * mmap.PAGESIZE
        for begin in range(start, each.end, _PIECE_NBYTES):
            if self._closed.is_set():  # somebody may wait for it all the same
                raise StoreError(f"{each.mapping.path}: closed while it was read")
            where.populate(begin, min(each.end, begin + _PIECE_NBYTES))
        if window is None:
            return
        try:
            self._pin(window.memory)
        except StoreError as error:
            self._pin = None
            logger.warning("%s %s", error, STAGED)
        else:
            self._pinned.append(window.memory)
            each.window = window


def _merged(ranges: Sequence[Range]) -> tuple[list[Pages], list[Pages]]:
    """Neighbours in one registration; in order of first need, and for each range."""
    by_place = sorted(range(len(ranges)), key=lambda i: (str(ranges[i][0].path), ranges[i][1]))
    found: dict[int, Pages] = {}
    last: Pages | None = None
    for index in by_place:
        mapping, begin, end = ranges[index]
        adjoins = last is not None and last.mapping is mapping and begin - last.end < mmap.PAGESIZE
        if last is None or not adjoins or end - last.begin > _PINNED_NBYTES:
            last = Pages(mapping, begin, end)
        last.end = max(last.end, end)
        found[index] = last
    in_order = dict.fromkeys(found[index] for index in range(len(ranges)))
    return list(in_order), [found[index] for index in range(len(ranges))]


def _release(closed: threading.Event, pinned: list[torch.Tensor], unpin: Callable[[torch.Tensor], None] | None) -> None:
    closed.set()
    while pinned:
        memory = pinned.pop()
        if unpin is not None:
            unpin(memory)
