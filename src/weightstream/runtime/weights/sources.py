"""Where the true bytes of an alias group are: one class per kind of place. Knows memory and files, no model or plan.

[Note: page cache]
Weights that stay in a file can be copied from three places. `PageWindow`: a second map of the file, shared, whose
pages the device has pinned. `Mapped`: the private map that the tensors view, through a staging ring where the device
needs one. `OnDisk`: direct reads past the page cache, for weights that host memory has no room for. Weights that are
brought to the device once are read through the page cache (`cached_copy`), so that no page has to be mapped. The bytes
of all three are the same until this process writes to the private map: a page that was written to leaves the file for
good, and is in the private map only. So a source that reads the file (`reads_file`) is right only until the first write
to the tensors, and `after_write` gives the source that is right from then on. On a device that cannot pin pages of a
file, or on the CPU, where nothing is pinned, a `PageWindow` has no window, and its copies are those of `Mapped`.

[Note: writes to a weight]
Between steps any code may write to the tensors of a group, that is, to `view`. Three facts show it: versions of the
tensors and the mark of memory that was handed out, which the binding reads before each step; and the kernel's record of
every page of a private map that was written to in any way. No copy may start from a file after that. Pinned memory, the
device's own and plain RAM are copied from the view itself, where a write needs no notice. A view of pages that the
device reads in place (`ZeroCopy`) must never be written to by the device, which would fault; so the tensors are guarded
and get memory of their own before the first write.

[Note: coded bytes]
A source with a `layout` holds and copies a compressed form, of a file, or in memory since the plan settled. Its
uncompressed bytes may be nowhere: the view is then addresses without memory (`lazy`), filled by the first read, which
changes only the memory held. After a write the view is true, and the compressed form is not, for good: `after_write`
gives the decoded memory as an uncompressed source. Gathered tensors work alike: their true bytes lie in several places
of files, or in some columns of a matrix. Copies read them there one after another, and the view is filled by the first
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import ClassVar, NamedTuple

import torch

from weightstream.codec.format import Layout
from weightstream.runtime.devices.backend import Backend, Copy
from weightstream.store.file_slice import FileSlice, Joined
from weightstream.store.lazy import LazyMemory
from weightstream.store.mapping import FileMapping, Memory
from weightstream.store.pages import Pages
from weightstream.store.readers import DirectFile
from weightstream.store.staging import SourceRange


class Tier(Enum):
    """Where a home is."""

    DEVICE = "device"
    HOST = "host"  # RAM, pages of a file in the page cache included
    DISK = "disk"  # a file whose pages are not to stay in RAM


class MemoryPlace(NamedTuple):
    """Bytes [begin, end) of a memory."""

    memory: Memory
    begin: int
    end: int


@dataclass(kw_only=True, slots=True, eq=False)
class WeightSource:
    """Where the bytes of a group are: the questions that every kind of place answers."""

    tier: ClassVar[Tier] = Tier.HOST
    is_in_file: ClassVar[bool] = False

    view: torch.Tensor  # flat uncompressed bytes, which the tensors show between steps
    place: MemoryPlace | None = None  # of the view, if it is in a file, or filled by the first read
    layout: Layout | None = None  # of the compressed form that is held and copied; None: none
    coded: torch.Tensor | None = None  # that form, where it is in memory

    @property
    def lazy(self) -> LazyMemory | None:
        """The memory of the view, if it is filled by the first read."""
        memory = None if self.place is None else self.place.memory
        return memory if isinstance(memory, LazyMemory) else None

    @property
    def is_unread(self) -> bool:
        """Whether the view's memory is not filled yet."""
        return self.place is not None and not self.place.memory.is_filled

    @property
    def was_read_early(self) -> bool:
        """Whether the view was read, or written to, before its memory was filled."""
        return self.lazy is not None and self.lazy.was_read_early

    @property
    def plain(self) -> torch.Tensor:
        """The uncompressed bytes, once `check` has returned."""
        return self.view

    @property
    def reads_file(self) -> bool:
        """Whether copies read a file or a compressed form, which lack updates made in this process."""
        return self.layout is not None

    @property
    def parts(self) -> list[torch.Tensor]:
        """The memory that is in use."""
        return [self.plain] if self.coded is None else [self.plain, self.coded]

    def held(self) -> Counter[Tier]:
        """Bytes on each tier; bytes that were decoded or gathered for a read are in RAM besides."""
        nbytes = Counter({self.tier: self.view.numel() if self.layout is None else self.layout.nbytes})
        if self.lazy is not None and self.lazy.is_filled:
            nbytes[Tier.HOST] += self.view.numel()
        return nbytes

    def check(self) -> None:
        """Make sure that the view can be read; raises `StoreError`."""
        if self.place is not None:
            self.place.memory.populate(self.place.begin, self.place.end)

    def plain_into(self, target: torch.Tensor) -> None:
        """Copy the uncompressed bytes, to any device, without filling a view that was not read yet."""
        if self.lazy is not None and self.is_unread:
            self.lazy.write(target)
            return
        self.check()
        target.copy_(self.plain)

    def copies(self, ring: torch.Tensor, backend: Backend) -> list[Copy]:
        """The copies of a fill into `ring`; waits for pages that are being pinned."""
        raise NotImplementedError

    def after_write(self) -> WeightSource:
        """The source to use after a write to the view."""
        return self.of_view() if self.reads_file else self

    def of_view(self) -> WeightSource:
        """The view itself as the source, once `check` has returned."""
        if self.place is not None and isinstance(mapping := self.place.memory, FileMapping):
            extent = FileSlice(mapping, self.place.begin, self.place.end)
            return Mapped(view=self.view, place=self.place, extents=(extent,))
        return Pageable(view=self.view)


class _InMemory(WeightSource):
    """Bytes in memory, compressed or uncompressed."""

    __slots__ = ()
    is_pinned: ClassVar[bool] = False

    @property
    def data(self) -> torch.Tensor:
        """The bytes as they are held."""
        return self.view if self.coded is None else self.coded

    def copies(self, ring: torch.Tensor, backend: Backend) -> list[Copy]:
        nbytes = min(self.data.numel(), ring.numel())  # the memory of a compressed form may be larger
        return [Copy(dst=ring[:nbytes], src=self.data[:nbytes], pinned=self.is_pinned)]


class Resident(_InMemory):
    """Memory of the device."""

    __slots__ = ()
    tier = Tier.DEVICE


class Pageable(_InMemory):
    """Plain RAM."""

    __slots__ = ()

    def pinned(self) -> Pinned:
        """The same, once its memory is pinned."""
        return Pinned(view=self.view, place=self.place, layout=self.layout, coded=self.coded)


class Pinned(_InMemory):
    """Pinned RAM, which the device copies from by itself: a part of a block of the arena."""

    __slots__ = ()
    is_pinned = True


@dataclass(kw_only=True, slots=True, eq=False)
class Mapped(WeightSource):
    """Pageable pages of private maps of files: the extent that the view is in, or those that it is gathered from."""

    is_in_file = True

    extents: tuple[FileSlice, ...]

    @property
    def reads_file(self) -> bool:
        return self.lazy is not None

    def copies(self, ring: torch.Tensor, backend: Backend) -> list[Copy]:
        found, at = [], 0
        for index, extent in enumerate(self.extents):
            found.append(self._copy(index, ring[at : at + extent.nbytes], backend))
            at += extent.nbytes
        return found

    def mapped(self) -> Mapped:
        return Mapped(view=self.view, place=self.place, layout=self.layout, extents=self.extents)

    def windowed(self, pages: Sequence[Pages]) -> PageWindow:
        """The same, copied from these pages, one for each extent."""
        parts = tuple(pages)
        return PageWindow(view=self.view, place=self.place, layout=self.layout, extents=self.extents, pages=parts)

    def _bytes(self, index: int) -> torch.Tensor:
        """An extent in the private map, which is the view itself if that was not gathered."""
        return self.view if self.lazy is None else self.extents[index].bytes()

    def _copy(self, index: int, dst: torch.Tensor, backend: Backend) -> Copy:
        extent = self.extents[index]
        if backend.device.type != "cpu":
            return Copy(dst=dst, src=self._bytes(index), read=extent.reading())
        return Copy(dst=dst, src=self._bytes(index), prepare=partial(extent.mapping.populate, extent.begin, extent.end))


@dataclass(kw_only=True, slots=True, eq=False)
class PageWindow(Mapped):
    """Pages of the page cache, pinned in place: all processes share them. A thread pins them in the background."""

    pages: tuple[Pages, ...]

    @property
    def reads_file(self) -> bool:
        return self.lazy is not None or not all(pages.is_refused for pages in self.pages)

    @property
    def is_coming(self) -> bool:
        """Whether some pages are still being pinned."""
        return not all(pages.done.is_set() for pages in self.pages)

    @property
    def is_refused(self) -> bool:
        """Whether some pages could not be pinned."""
        return any(pages.is_refused for pages in self.pages)

    def window(self, index: int = 0) -> torch.Tensor | None:
        """An extent in pinned memory; None where it could not be pinned. Waits for it."""
        extent = self.extents[index]
        data = self.pages[index].source(extent.begin, extent.end)
        return None if data is None else extent.within(data)

    def shown(self, index: int) -> torch.Tensor | None:
        """An extent by addresses of the device, where kernels can read it as one piece."""
        extent = self.extents[index]
        return None if extent.pitch else self.pages[index].shown(extent.begin, extent.end)

    def _copy(self, index: int, dst: torch.Tensor, backend: Backend) -> Copy:
        if (memory := self.window(index)) is None:
            return Mapped._copy(self, index, dst, backend)
        return Copy(dst=dst, src=memory, pinned=True, prepare=self.extents[index].mapping.check)


class OnDisk(Mapped):
    """Direct reads, which leave nothing in the page cache; except columns, which are read through it."""

    __slots__ = ()
    tier = Tier.DISK

    @property
    def reads_file(self) -> bool:
        return True

    def _copy(self, index: int, dst: torch.Tensor, backend: Backend) -> Copy:
        extent = self.extents[index]
        direct = SourceRange(DirectFile(extent.mapping), extent.begin, extent.end)
        return Copy(dst=dst, src=self._bytes(index), read=extent.reading() if extent.pitch else direct)

    def cached_copy(self, dst: torch.Tensor) -> Copy:
        """One copy of whole rows, read through the page cache; for weights that are brought to a device once."""
        joined = Joined(self.extents)
        return Copy(dst=dst[: joined.nbytes], src=self.view, read=SourceRange(joined, 0, joined.nbytes))


@dataclass(kw_only=True, slots=True, eq=False)
class ZeroCopy(WeightSource):
    """Host memory, `host`, that kernels read over the link; `view` has its addresses on the device."""

    host: PageWindow | Pinned

    @property
    def is_read_only(self) -> bool:
        """Whether it is pages of a file."""
        return self.host.is_in_file

    @property
    def plain(self) -> torch.Tensor:
        return self.host.view

    def check(self) -> None:
        self.host.check()

    def copies(self, ring: torch.Tensor, backend: Backend) -> list[Copy]:
        return self.host.copies(ring, backend)


def in_file(view: torch.Tensor, memory: Memory) -> OnDisk | None:
    """The source in files of a view of a whole tensor, in one place or to be gathered or decoded; None for others."""
    begin = memory.locate(view.data_ptr())
    if begin is not None and isinstance(memory, FileMapping):
        end = begin + view.numel()
        return OnDisk(view=view, place=MemoryPlace(memory, begin, end), extents=(FileSlice(memory, begin, end),))
    if not isinstance(memory, LazyMemory) or memory.is_filled or memory.nbytes != view.numel() or not memory.extents:
        return None
    place = MemoryPlace(memory, 0, memory.nbytes)
    return OnDisk(view=view, place=place, layout=memory.layout, extents=memory.extents)


def written(places: Mapping[str, MemoryPlace | None]) -> set[str]:
    """The groups of which this process holds, or may hold, bytes of its own in the map of a file, also from loading."""
    ranges: dict[FileMapping, list[tuple[int, int]] | None] = {}
    found: set[str] = set()
    for alias, place in places.items():
        if place is None or not isinstance(mapping := place.memory, FileMapping):
            continue
        if mapping not in ranges:
            ranges[mapping] = mapping.written()
        where = ranges[mapping]
        if where is None or any(start < place.end and place.begin < stop for start, stop in where):
            found.add(alias)
    return found
