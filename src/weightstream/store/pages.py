"""PageCache: ranges of files, read ahead in the order of need, and pinned in the page cache. Knows no model.

A device that can copy from registered read-only memory takes weights directly from the page cache: this process needs
no copy of them, and all processes share one. While the first steps run, one thread reads the ranges one after another,
which is fastest for a disk; a step waits only for the ranges that it needs. Other threads map pages that are in the
page cache already, ahead of that thread: they need no disk.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from weightstream.store.arena import Arena, Pin
from weightstream.store.ending import finalize
from weightstream.store.mapping import FileMapping, FileRange, Window
from weightstream.store.numa import Node, on_node

_PINNED_NBYTES = 256 << 20  # of one registration, 13 ms: meanwhile no other thread gets memory from the system
_PIECE_NBYTES = 64 << 20  # close() waits for one such piece
# Share of the time of a registration, after it: the driver lets no other thread in meanwhile, and without a pause the
# pinning thread would be the first to enter again.
_PAUSE = 1 / 6
_LONGEST_PAUSE_S = 0.01  # a registration may have waited for a measurement of the device
_AHEAD = 4  # threads: each maps 10 to 15 GB/s in pages of 4 KiB, and the pinning thread waits for them

Show = Callable[[torch.Tensor], torch.Tensor | None]


class Pages:
    """One range of a file that is being read or is in memory; `ranges` are the requested ranges in it."""

    def __init__(self, mapping: FileMapping, begin: int, end: int) -> None:
        self.mapping = mapping
        self.begin = begin
        self.end = end
        self.ranges: set[FileRange] = set()
        self.window: Window | None = None
        self.view: torch.Tensor | None = None  # the window, mapped by a device
        self.done = threading.Event()

    @property
    def is_refused(self) -> bool:
        """Whether the range is known not to be pinned."""
        return self.done.is_set() and self.window is None

    def source(self, begin: int, end: int) -> torch.Tensor | None:
        """Wait for the range; returns its bytes [begin, end) in pinned memory, or None if they are not pinned.

        Also None if reading ahead failed: the caller reads the bytes itself, and gets the error if that fails, too.
        """
        self.done.wait()
        return self.window.bytes(begin, end) if self.window is not None else None

    def shown(self, begin: int, end: int) -> torch.Tensor | None:
        """The same bytes as the device addresses them; None if it cannot."""
        self.done.wait()
        if self.window is None or self.view is None:
            return None
        return self.view[begin - self.window.begin : end - self.window.begin]


class PageCache:
    """Ranges of files that threads read into the page cache, at their NUMA `node`, and pin.

    `pin` and `unpin` are the device's; without them ranges are only read ahead. `show` maps pinned memory for the
    device, if it can.
    """

    def __init__(
        self, pin: Pin | None = None, unpin: Pin | None = None, node: Node | None = None, show: Show | None = None
    ) -> None:
        self.pins = pin is not None
        self._show = show
        self._arena = Arena(pin, unpin)
        self._node = node
        self._pages: list[Pages] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        finalize(self, self._closed.set)  # then the thread ends, and with it the arena, which unpins

    @property
    def nbytes(self) -> int:
        """Bytes pinned so far."""
        return self._arena.nbytes

    def hold(self, ranges: Sequence[FileRange], on_refusal: Callable[[Exception], None]) -> list[Pages]:
        """Start to read these ranges, in this order; returns the pages that hold each range.

        Pinned pages whose ranges are all still wanted stay; others are unpinned. `on_refusal` is called with the error
        if a range cannot be pinned; the ranges after it are only read.
        """
        self._stop()
        wanted = set(ranges)
        kept = [each for each in self._pages if each.window is not None and each.ranges <= wanted]
        self._arena.keep(each.window.memory for each in kept if each.window is not None)
        held = set[FileRange]().union(*(each.ranges for each in kept))
        pages = _merged([each for each in ranges if each not in held])
        self._pages = [*kept, *pages]
        for each in () if self.pins else pages:
            each.done.set()  # no copy has to wait: the first access reads a page
        self._closed.clear()
        ahead = _Ahead(pages, self._closed, self._node) if self.pins and pages else None
        arena = self._arena if ahead is not None else None
        job = partial(_bring_in, pages, arena, ahead, self._show, self._closed, on_refusal)
        # not a daemon: the interpreter may abort if it ends while a daemon uses tensors; ends with the main thread
        self._thread = threading.Thread(target=on_node(job, self._node), name="weightstream-pages", daemon=False)
        self._thread.start()
        of_range = {asked: each for each in self._pages for asked in each.ranges}
        return [of_range[asked] for asked in ranges]

    def close(self) -> None:
        """Stop reading and unpin everything; no copy may be under way. May be called twice."""
        self._stop()
        self._pages.clear()
        self._arena.close()

    def _stop(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class _Waiting(NamedTuple):
    window: Window
    pages: Pages


class _WindowState(NamedTuple):
    """A window that can be pinned if it `is_there`, and is to be read first if not."""

    window: Window
    is_there: bool


class _Ahead:
    """Threads that map pages which need no disk, ahead of the thread that pins them.

    They begin when all windows are made, as the kernel makes a window only while no thread populates or pins pages.
    """

    def __init__(self, pages: list[Pages], closed: threading.Event, node: Node | None) -> None:
        self._found: dict[Pages, Future[_WindowState]] = {each: Future() for each in pages}
        self._waiting = deque[_Waiting]()
        self._closed = closed
        self._threads = list[threading.Thread]()  # not a pool: at exit the interpreter would wait for all its jobs
        self._node = node

    def begin(self) -> None:
        """Make windows up to the first that fails, whose error is raised by `window`; then start the threads."""
        for each, found in self._found.items():
            if _has_ended(self._closed):
                break
            try:
                self._waiting.append(_Waiting(each.mapping.window(each.begin, each.end), each))
            except Exception as error:
                found.set_exception(error)
                break
        with suppress(RuntimeError):  # the system has no more threads
            for _ in range(min(_AHEAD, len(self._found))):
                thread = threading.Thread(target=on_node(self._run, self._node), name="weightstream-pages")
                thread.start()
                self._threads.append(thread)
        if not self._threads:
            self._run()

    def _run(self) -> None:
        with suppress(IndexError):  # no window is left
            while True:
                window, each = self._waiting.popleft()
                found = self._found[each]
                try:
                    found.set_result(_WindowState(window, self._is_there(window, each)))
                except Exception as error:
                    found.set_exception(error)

    def _is_there(self, window: Window, each: Pages) -> bool:
        """Map the pages if they are in the page cache. Returns whether all are mapped; not after close()."""
        return not _has_ended(self._closed) and window.is_cached() and _populate(window, each, self._closed)

    def window(self, each: Pages) -> _WindowState:
        """Wait for the window of pages."""
        return self._found[each].result()

    def close(self) -> None:
        self._waiting.clear()
        for thread in self._threads:
            thread.join()


def _bring_in(
    pages: list[Pages],
    arena: Arena | None,
    ahead: _Ahead | None,
    show: Show | None,
    closed: threading.Event,
    on_refusal: Callable[[Exception], None],
) -> None:
    """The thread's work. It has no reference to the PageCache, so that an unused one can be collected."""
    if ahead is not None:
        ahead.begin()
    for each in pages:
        took_s = 0.0
        try:
            if arena is None or ahead is None:
                _populate(each.mapping, each, closed)
            else:
                took_s = _pin(each, arena, ahead, show, closed)
        except Exception as error:
            if arena is not None:
                on_refusal(error)
            if ahead is not None:
                ahead.close()
            arena = ahead = None
        finally:
            each.done.set()  # also after an error: a step may wait for it
        closed.wait(min(took_s * _PAUSE, _LONGEST_PAUSE_S))
    if ahead is not None:
        ahead.close()


def _pin(each: Pages, arena: Arena, ahead: _Ahead, show: Show | None, closed: threading.Event) -> float:
    """Pin the pages. Returns the seconds that pinning took."""
    if _has_ended(closed):  # then some pages have no window
        return 0.0
    window, is_there = ahead.window(each)
    if not is_there:
        _populate(window, each, closed)
    if _has_ended(closed):
        return 0.0
    begin = time.perf_counter()
    arena.pin(window.memory)
    each.window = window
    with suppress(RuntimeError):  # it is pinned all the same; a device that cannot map it copies from it
        each.view = None if show is None else show(window.memory)
    return time.perf_counter() - begin


def _populate(where: FileMapping | Window, each: Pages, closed: threading.Event) -> bool:
    """Read the pages into memory. Returns whether all are there; not after close()."""
    start = each.begin // mmap.PAGESIZE * mmap.PAGESIZE
    for begin in range(start, each.end, _PIECE_NBYTES):
        if _has_ended(closed):
            return False
        where.populate(begin, min(each.end, begin + _PIECE_NBYTES))
    return True


def _has_ended(closed: threading.Event) -> bool:
    return closed.is_set() or not threading.main_thread().is_alive()


def _merged(ranges: Sequence[FileRange]) -> list[Pages]:
    """Join neighbouring ranges into one registration each, in order of first need."""
    first_need = {each: index for index, each in reversed(list(enumerate(ranges)))}
    joined: list[Pages] = []
    for mapping, begin, end in sorted(first_need, key=lambda each: (str(each[0].path), each[1])):
        last = joined[-1] if joined else None
        adjoins = last is not None and last.mapping is mapping and begin - last.end < mmap.PAGESIZE
        if last is None or not adjoins or end - last.begin > _PINNED_NBYTES:
            last = Pages(mapping, begin, end)
            joined.append(last)
        last.end = max(last.end, end)
        last.ranges.add(FileRange(mapping, begin, end))
    return sorted(joined, key=lambda pages: min(first_need[each] for each in pages.ranges))
