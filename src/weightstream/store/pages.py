"""PageCache: ranges of files that are read ahead, in the order of need, and pinned where they are. Knows no model.

A device that can copy from registered read-only memory takes weights straight from the page cache: no copy of them in
this process, and one for all processes. A thread brings the ranges in one after the other, which is how a disk reads
fastest, while the first steps run: whoever needs a range waits for that alone.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from weightstream.store.arena import Arena, Pin
from weightstream.store.mapping import FileMapping, Window

_PINNED_NBYTES = 512 << 20  # of one registration: the first range is ready soon, and their number stays small
_PIECE_NBYTES = 64 << 20  # close() waits for one

Range = tuple[FileMapping, int, int]
Show = Callable[[torch.Tensor], torch.Tensor | None]


class Pages:
    """One range of a file, on its way into memory or there; `ranges` are those that were asked for."""

    def __init__(self, mapping: FileMapping, begin: int, end: int) -> None:
        self.mapping, self.begin, self.end = mapping, begin, end
        self.ranges: set[Range] = set()
        self.window: Window | None = None
        self.done = threading.Event()
        self._shown: torch.Tensor | None = None  # the window, as a device has it

    def source(self, begin: int, end: int) -> torch.Tensor | None:
        """Waits for the range; returns its bytes [begin, end) in pinned memory, or None where they are not pinned.

        None, too, where they could not be read ahead: who reads them then is told why, or has more luck.
        """
        self.done.wait()
        return self.window.bytes(begin, end) if self.window is not None else None

    def shown(self, begin: int, end: int, show: Show) -> torch.Tensor | None:
        """The same as a device has it, if it can: `show` is asked once for all that was pinned together."""
        self.done.wait()
        if self.window is None:
            return None
        if self._shown is None:
            self._shown = show(self.window.memory)
        return None if self._shown is None else self._shown[begin - self.window.begin : end - self.window.begin]


class PageCache:
    """Holds ranges of files in memory. `pin` and `unpin` are the device's; without them ranges are only read ahead."""

    def __init__(self, pin: Pin | None = None, unpin: Pin | None = None) -> None:
        self._arena, self._pins = Arena(pin, unpin), pin is not None
        self._pages: list[Pages] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._closed.set)  # the thread ends then, and with it the arena, which unpins

    @property
    def nbytes(self) -> int:
        """Bytes pinned so far."""
        return self._arena.nbytes

    def hold(self, ranges: Sequence[Range], on_refusal: Callable[[Exception], None]) -> list[Pages]:
        """Starts to bring in these ranges, in this order; returns the pages that each is in.

        Pages that are pinned and still wanted as a whole stay where they are; what is not wanted is unpinned.
        `on_refusal` is told when a range cannot be pinned; what comes after it is not, either.
        """
        self._stop()
        kept = [each for each in self._pages if each.window is not None and each.ranges <= set(ranges)]
        self._arena.keep(each.window.memory for each in kept if each.window is not None)
        pages = _merged([each for each in ranges if not any(each in held.ranges for held in kept)])
        self._pages = [*kept, *pages]
        for each in () if self._pins else pages:
            each.done.set()  # no copy waits: the first read of a page brings it in
        self._closed.clear()
        job = partial(_bring_in, pages, self._arena if self._pins else None, self._closed, on_refusal)
        # no daemon: an interpreter that ends while one is busy with tensors may abort; it stops when the main one ends
        self._thread = threading.Thread(target=job, name="weightstream-pages", daemon=False)
        self._thread.start()
        of_range = {asked: each for each in self._pages for asked in each.ranges}
        return [of_range[asked] for asked in ranges]

    def close(self) -> None:
        """Stops reading and unpins everything; nothing may copy from it any more. May be called twice."""
        self._stop()
        self._pages.clear()
        self._arena.close()

    def _stop(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _bring_in(
    pages: list[Pages], arena: Arena | None, closed: threading.Event, on_refusal: Callable[[Exception], None]
) -> None:
    """What the thread does: it holds no PageCache, so that one that is forgotten can go."""
    for each in pages:
        try:
            _bring_in_one(each, arena, closed)
        except Exception as error:
            if arena is not None:
                on_refusal(error)
            arena = None
        finally:
            each.done.set()  # whatever happened: somebody may wait for it


def _bring_in_one(each: Pages, arena: Arena | None, closed: threading.Event) -> None:
    window = each.mapping.window(each.begin, each.end) if arena is not None else None
    where: FileMapping | Window = window or each.mapping
    start = each.begin // mmap.PAGESIZE * mmap.PAGESIZE
    for begin in range(start, each.end, _PIECE_NBYTES):
        if closed.is_set() or not threading.main_thread().is_alive():
            return
        where.populate(begin, min(each.end, begin + _PIECE_NBYTES))
    if window is not None and arena is not None:
        arena.pin(window.memory)
        each.window = window


def _merged(ranges: Sequence[Range]) -> list[Pages]:
    """Neighbours in one registration, in order of first need."""
    first_need = {each: index for index, each in reversed(list(enumerate(ranges)))}
    found: list[Pages] = []
    for mapping, begin, end in sorted(first_need, key=lambda each: (str(each[0].path), each[1])):
        last = found[-1] if found else None
        adjoins = last is not None and last.mapping is mapping and begin - last.end < mmap.PAGESIZE
        if last is None or not adjoins or end - last.begin > _PINNED_NBYTES:
            last = Pages(mapping, begin, end)
            found.append(last)
        last.end = max(last.end, end)
        last.ranges.add((mapping, begin, end))
    return sorted(found, key=lambda pages: min(first_need[each] for each in pages.ranges))
