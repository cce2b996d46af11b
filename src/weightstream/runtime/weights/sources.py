"""Where the true bytes of an alias group are: one class per kind of place. Knows memory and files, no model or plan.

[Note: page cache]
What stays in a file can be copied from three places. `PageWindow`: a second map of the file, shared, whose pages the
device has pinned. `Mapped`: the private map that the tensors view, through a staging ring where the device needs one.
`OnDisk`: direct reads past the page cache, for what host memory has no room for. What is brought to the device once is
read through the page cache (`cached_copy`), where no page has to be mapped. Their bytes are the same until this
process writes to the private map: a page that was written leaves the file for good, and is in the private map alone.
So a source that reads the file (`reads_file`) is right only as long as nothing wrote to the tensors, and
`after_write` gives the one that is right from then on. On a device that cannot pin pages of a file, or on the CPU,
where nothing is pinned, a `PageWindow` has no window, and its copies are those of `Mapped`.

[Note: who may write a weight]
Between steps anybody may write to the tensors of a group, and `view` is what they write to. Three sources tell:
versions of the tensors and the mark of memory that was handed out, which the binding looks at before each step; and
the kernel, which knows every page of a private map that was written, however it was. No copy may start from a file
after that. Memory that was pinned, the device's own and plain RAM are copied from the view itself and need no telling.
A view of pages that the device reads in place (`ZeroCopy`) must not be written by it at all: that would be an error of
the device, so the tensors are guarded and get memory of their own before the first write.

[Note: coded bytes]
A source with a `layout` holds and copies a coded form, of a file or in memory that was coded when the plan settled.
Its plain bytes may be nowhere: the view is then addresses without memory (`lazy`), filled by the first read. Reading
changes nothing but the memory held. After a write the coded form is no longer true, the view is, and there is no way
back: `after_write` gives the decoded memory as a plain source. Gathered tensors work alike: their true bytes lie in
several places of files, or in some columns of a matrix. Copies read them there one after another, and the view is
filled when it is first read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import ClassVar

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
    DISK = "disk"  # a file of which nothing is meant to be in RAM


MemoryPlace = tuple[Memory, int, int]  # where in it


@dataclass(kw_only=True, slots=True, eq=False)
class WeightSource:
    """What every kind answers. `view` is what the tensors show between steps: flat plain bytes.

    `place` is the memory that it is in, if that has to be made readable first: a file's, or one that is filled by the
    first read. With a `layout` the bytes are held and copied in that coded form, as `coded` where it is in memory.
    """

    tier: ClassVar[Tier] = Tier.HOST
    is_in_file: ClassVar[bool] = False

    view: torch.Tensor
    place: MemoryPlace | None = None
    layout: Layout | None = None
    coded: torch.Tensor | None = None

    @property
    def lazy(self) -> LazyMemory | None:
        """The memory of the view, if it is filled by the first read."""
        return self.place[0] if self.place is not None and isinstance(self.place[0], LazyMemory) else None

    @property
    def is_unread(self) -> bool:
        """Whether the view holds nothing yet."""
        return self.place is not None and not self.place[0].is_filled

    @property
    def was_read_early(self) -> bool:
        """Whether the view was read, or written to, while it held nothing."""
        return self.lazy is not None and self.lazy.was_read_early

    @property
    def plain(self) -> torch.Tensor:
        """The plain bytes, once `check` has returned."""
        return self.view

    @property
    def reads_file(self) -> bool:
        """Whether copies take the bytes from where updates made in this process are not."""
        return self.layout is not None

    @property
    def parts(self) -> list[torch.Tensor]:
        """The memory that is in use."""
        return [self.plain] if self.coded is None else [self.plain, self.coded]

    def held(self) -> Counter[Tier]:
        """Bytes on each tier; what was decoded or gathered to be read is in RAM besides."""
        nbytes = Counter({self.tier: self.view.numel() if self.layout is None else self.layout.nbytes})
        if self.lazy is not None and self.lazy.is_filled:
            nbytes[Tier.HOST] += self.view.numel()
        return nbytes

    def check(self) -> None:
        """Make sure that the view can be read here and now; raises `StoreError`."""
        if self.place is not None:
            memory, begin, end = self.place
            memory.populate(begin, end)

    def plain_into(self, target: torch.Tensor) -> None:
        """Copy the plain bytes, to any device; what was not read yet is not kept for it on the host."""
        if self.lazy is not None and self.is_unread:
            self.lazy.write(target)
            return
        self.check()
        target.copy_(self.plain)

    def copies(self, ring: torch.Tensor, backend: Backend) -> list[Copy]:
        """What a fill moves into `ring`; waits for pages that are on their way."""
        raise NotImplementedError

    def after_write(self) -> WeightSource:
        """The source that is true once the view was written to."""
        return self.of_view() if self.reads_file else self

    def of_view(self) -> WeightSource:
        """The view itself as the source, once `check` has returned."""
        if self.place is not None and isinstance(mapping := self.place[0], FileMapping):
            return Mapped(view=self.view, place=self.place, extents=(FileSlice(mapping, *self.place[1:]),))
        return Pageable(view=self.view)


class _InMemory(WeightSource):
    """Bytes in memory, plain or coded."""

    __slots__ = ()
    is_pinned: ClassVar[bool] = False

    @property
    def data(self) -> torch.Tensor:
        """The bytes as they are held."""
        return self.view if self.coded is None else self.coded

    def copies(self, ring: torch.Tensor, backend: Backend) -> list[Copy]:
        nbytes = min(self.data.numel(), ring.numel())  # a coded form has room to spare
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
    """RAM that the device copies from by itself: a part of a block of the arena."""

    __slots__ = ()
    is_pinned = True


@dataclass(kw_only=True, slots=True, eq=False)
class Mapped(WeightSource):
    """Pages of the private maps of files, pageable: the extent that the view is in, or those that it is made of."""

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
        """An extent in the private map; the view where it is that."""
        return self.view if self.lazy is None else self.extents[index].bytes()

    def _copy(self, index: int, dst: torch.Tensor, backend: Backend) -> Copy:
        extent = self.extents[index]
        if backend.device.type != "cpu":
            return Copy(dst=dst, src=self._bytes(index), read=extent.reading())
        return Copy(dst=dst, src=self._bytes(index), prepare=partial(extent.mapping.populate, extent.begin, extent.end))


@dataclass(kw_only=True, slots=True, eq=False)
class PageWindow(Mapped):
    """Pages of the page cache, pinned where they are: one for all processes. They are on their way at first."""

    pages: tuple[Pages, ...]

    @property
    def reads_file(self) -> bool:
        return self.lazy is not None or not all(pages.is_refused for pages in self.pages)

    @property
    def is_coming(self) -> bool:
        """Whether pages are on their way."""
        return not all(pages.done.is_set() for pages in self.pages)

    @property
    def is_refused(self) -> bool:
        """Whether some are known not to be pinned."""
        return any(pages.is_refused for pages in self.pages)

    def window(self, index: int = 0) -> torch.Tensor | None:
        """An extent in pinned memory; None where it could not be pinned. Waits for it."""
        extent = self.extents[index]
        data = self.pages[index].source(extent.begin, extent.end)
        return None if data is None else extent.within(data)

    def shown(self, index: int) -> torch.Tensor | None:
        """The same by addresses of the device, where kernels can read it in a row."""
        extent = self.extents[index]
        return None if extent.pitch else self.pages[index].shown(extent.begin, extent.end)

    def _copy(self, index: int, dst: torch.Tensor, backend: Backend) -> Copy:
        if (memory := self.window(index)) is None:
            return Mapped._copy(self, index, dst, backend)
        return Copy(dst=dst, src=memory, pinned=True, prepare=self.extents[index].mapping.check)


class OnDisk(Mapped):
    """Direct reads, which leave nothing in the page cache; but columns are read through that."""

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
        """One copy of whole rows, read through the page cache; for what is brought to a device once."""
        joined = Joined(self.extents)
        return Copy(dst=dst[: joined.nbytes], src=self.view, read=SourceRange(joined, 0, joined.nbytes))


@dataclass(kw_only=True, slots=True, eq=False)
class ZeroCopy(WeightSource):
    """Host memory that kernels read over the link: `view` has its addresses on the device, `host` is what it shows."""

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
    """What views all of a tensor of files, which nobody has read yet where it is to be made; else None."""
    begin = memory.locate(view.data_ptr())
    if begin is not None and isinstance(memory, FileMapping):
        end = begin + view.numel()
        return OnDisk(view=view, place=(memory, begin, end), extents=(FileSlice(memory, begin, end),))
    if not isinstance(memory, LazyMemory) or memory.is_filled or memory.nbytes != view.numel() or not memory.extents:
        return None
    return OnDisk(view=view, place=(memory, 0, memory.nbytes), layout=memory.layout, extents=memory.extents)


def written(places: Mapping[str, MemoryPlace | None]) -> set[str]:
    """Those of which this process holds bytes of its own in the map of a file, or may: loading may update them too."""
    ranges: dict[FileMapping, list[tuple[int, int]] | None] = {}
    found: set[str] = set()
    for alias, place in places.items():
        if place is None or not isinstance(mapping := place[0], FileMapping):
            continue
        if mapping not in ranges:
            ranges[mapping] = mapping.written()
        _, begin, end = place
        where = ranges[mapping]
        if where is None or any(start < end and begin < stop for start, stop in where):
            found.add(alias)
    return found
