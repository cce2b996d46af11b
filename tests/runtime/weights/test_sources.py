"""One suite for all kinds of sources: the copied bytes, the checks, the state after a write, and the bytes held."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightstream.codec import coding, reference
from weightstream.errors import StoreError
from weightstream.runtime.devices.backend import Copy
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.weights.alias_groups import groups
from weightstream.runtime.weights.home import Home
from weightstream.runtime.weights.sources import (
    Mapped,
    MemoryPlace,
    OnDisk,
    Pageable,
    PageWindow,
    Pinned,
    Resident,
    Tier,
    WeightSource,
    ZeroCopy,
    in_file,
)
from weightstream.store.file_slice import FileSlice
from weightstream.store.lazy import DecodedMemory, LazyMemory
from weightstream.store.mapping import FileMapping
from weightstream.store.pages import PageCache

COUNT = 3 * 4096 + 40
NBYTES = 2 * COUNT
IN_MEMORY = {"resident": Resident, "pageable": Pageable, "pinned": Pinned}
FORMS = ("plain", "coded", "gathered", "columns")
KINDS = (*IN_MEMORY, "mapped", "window", "no window", "disk", "zero-copy")
CASES = [
    (kind, form)
    for kind in KINDS
    for form in FORMS
    if not (form in ("gathered", "columns") and kind in IN_MEMORY) and not (kind == "zero-copy" and form != "plain")
]
IN_FILE = [(kind, form) for kind, form in CASES if kind not in (*IN_MEMORY, "zero-copy")]


class Rig:
    """A source of random weights in a file and in memory."""

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randn(COUNT, generator=generator).to(torch.bfloat16).view(torch.uint8)
        self.layout, self.code = reference.encode(self.data, "bfloat16")
        self.backend, self.cache = CpuBackend(), PageCache(lambda memory: None, lambda memory: None)
        self.folder = folder
        self.path = folder / "file"

    def close(self) -> None:
        self.cache.close()
        self.backend.close()

    def source(self, kind: str, form: str) -> WeightSource:
        if kind in IN_MEMORY:
            return self.in_memory(kind, form)
        if kind == "zero-copy":
            return ZeroCopy(view=self.data, host=Pinned(view=self.data))
        made = {"plain": self.plain_file, "coded": self.coded_file, "gathered": self.gathered_file}
        file = (made | {"columns": self.columns_file})[form]()
        if kind == "disk":
            return file
        if kind == "mapped":
            return file.mapped()
        cache = self.cache if kind == "window" else PageCache()
        pages = cache.hold([extent.range for extent in file.extents], lambda error: None)
        for each in pages:
            each.done.wait()
        cache.close() if kind == "no window" else None
        return file.windowed(pages)

    def in_memory(self, kind: str, form: str) -> WeightSource:
        if form == "plain":
            return IN_MEMORY[kind](view=self.data.clone())
        lazy = DecodedMemory("w", Path("w"), self.layout, lambda: self.code, decode=coding.decode)
        memory = torch.cat([self.code, torch.zeros(512, dtype=torch.uint8)])  # the plan estimated a little more
        view, place = lazy.bytes(0, NBYTES), MemoryPlace(lazy, 0, NBYTES)
        return IN_MEMORY[kind](view=view, place=place, layout=self.layout, coded=memory)

    def written(self, path: Path, data: torch.Tensor, before: int = 4096) -> tuple[FileMapping, int, int]:
        path.write_bytes(bytes(before) + data.numpy().tobytes() + bytes(77))
        return FileMapping(path), before, before + data.numel()

    def plain_file(self) -> OnDisk:
        mapping, begin, end = self.written(self.path, self.data)
        return self.found(mapping.bytes(begin, end), mapping)

    def coded_file(self) -> OnDisk:
        mapping, begin, end = self.written(self.path, self.code)
        lazy = DecodedMemory(
            "w",
            self.path,
            self.layout,
            lambda: (mapping.populate(begin, end), mapping.bytes(begin, end))[1],
            extents=[FileSlice(mapping, begin, end)],
        )
        return self.found(lazy.bytes(0, NBYTES), lazy)

    def gathered_file(self) -> OnDisk:
        cuts = (0, 1000, 1001, 9000, NBYTES)  # in two files, in no order, at odd offsets
        paths = (self.path, self.folder / "other", self.path, self.folder / "other")
        whole = {path: self.written(path, torch.cat([self.data, self.data]), 33)[0] for path in set(paths)}
        extents = [
            FileSlice(whole[path], 33 + a + NBYTES * (i % 2), 33 + b + NBYTES * (i % 2))
            for i, (path, a, b) in enumerate(zip(paths, cuts[:-1], cuts[1:], strict=True))
        ]
        lazy = LazyMemory.of_extents("w", extents)
        return self.found(lazy.bytes(0, NBYTES), lazy)

    def columns_file(self) -> OnDisk:
        width, before, after = NBYTES // 16, 5, 9  # of rows that are separated by an odd number of bytes
        rows = torch.full((16, before + width + after), 255, dtype=torch.uint8)
        rows[:, before : before + width] = self.data.view(16, width)
        mapping, begin, end = self.written(self.path, rows.view(-1), 33)
        lazy = LazyMemory.of_extents("w", [FileSlice(mapping, begin + before, end - after, width, rows.shape[1])])
        return self.found(lazy.bytes(0, NBYTES), lazy)

    def found(self, view: torch.Tensor, memory: FileMapping | LazyMemory) -> OnDisk:
        source = in_file(view, memory)
        assert source is not None
        return source

    def filled(self, source: WeightSource) -> torch.Tensor:
        """The bytes that a fill of the source leaves in a ring, with guards around them."""
        size = NBYTES if source.layout is None else source.layout.nbytes
        ring = torch.full((size + 2000,), 7, dtype=torch.uint8)
        copies = source.copies(ring[1000 : 1000 + size], self.backend)
        assert all(isinstance(copy, Copy) for copy in copies)
        self.backend.copy(copies)
        self.backend._copies.point().wait()
        assert (ring[:1000] == 7).all()
        assert (ring[1000 + size :] == 7).all()
        return ring[1000 : 1000 + size]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_fill_copies_exactly_the_bytes_and_reads_nothing_else(kind: str, form: str, rig: Rig) -> None:
    source = rig.source(kind, form)
    for _ in range(2):
        assert torch.equal(rig.filled(source), rig.code if form == "coded" else rig.data)
    assert source.is_unread == (form != "plain"), "only a read fills the view"
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    source.plain_into(target)
    assert torch.equal(target, rig.data)
    assert source.is_unread == (form != "plain")
    source.check()
    assert not source.is_unread
    assert torch.equal(source.plain, rig.data)
    assert torch.equal(rig.filled(source), rig.code if form == "coded" else rig.data)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_write_is_in_the_next_fill(kind: str, form: str, rig: Rig) -> None:
    source = rig.source(kind, form)
    source.check()
    reads_file = form != "plain" or kind in ("window", "disk")
    assert source.reads_file == reads_file
    source.view[5000:5100] ^= 255
    expected = rig.data.clone()
    if kind != "zero-copy":  # its view is the data itself
        expected[5000:5100] ^= 255
    after = source.after_write()
    assert (after is source) == (not reads_file)
    assert after.view is source.view
    assert after.layout is None
    assert not after.reads_file
    assert after.after_write() is after
    assert torch.equal(rig.filled(after), expected)
    after.view[5000:5100] ^= 255
    assert torch.equal(rig.filled(after), rig.data)
    assert isinstance(after, Mapped) == (form == "plain" and kind in ("mapped", "window", "no window", "disk"))


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_held_bytes_and_tiers(kind: str, form: str, rig: Rig) -> None:
    source = rig.source(kind, form)
    tier = {"resident": Tier.DEVICE, "disk": Tier.DISK}.get(kind, Tier.HOST)
    nbytes = rig.layout.nbytes if form == "coded" else NBYTES
    assert source.tier is tier
    assert source.held() == {tier: nbytes}
    assert source.is_in_file == isinstance(source, Mapped)
    source.check()
    copy = {Tier.HOST: NBYTES} if form != "plain" else {}
    assert source.held() == {t: (nbytes if t is tier else 0) + copy.get(t, 0) for t in {tier, *copy}}
    assert source.after_write().held()[Tier.HOST] == (NBYTES if kind != "resident" or form == "coded" else 0)


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def replace_file(path: Path) -> None:
    other = path.with_name("new")
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)


@pytest.mark.parametrize("change", [cut, replace_file, Path.unlink], ids=lambda change: change.__name__)
@pytest.mark.parametrize(("kind", "form"), IN_FILE)
def test_a_file_that_changed_is_an_error(kind: str, form: str, change: object, rig: Rig) -> None:
    source = rig.source(kind, form)
    assert callable(change)
    change(rig.path)
    for read in (source.check, lambda: source.plain_into(torch.empty(NBYTES, dtype=torch.uint8))):
        with pytest.raises(StoreError, match=str(rig.path)):
            read()
    with pytest.raises(StoreError, match=str(rig.path)):
        rig.filled(source)
    assert source.is_unread == (form != "plain")


def test_pages_that_kernels_read_belong_to_their_file_whatever_happens_to_it(rig: Rig) -> None:
    """Otherwise they would not be kept, and the old plan could not be restored."""
    window = rig.source("window", "plain")
    assert isinstance(window, PageWindow)
    file = OnDisk(view=window.view, place=window.place, extents=window.extents)
    (group,) = groups(torch.nn.Linear(COUNT, 1, bias=False)).values()
    home = Home(group=group, origin=torch.device("cpu"), source=ZeroCopy(view=rig.data.clone(), host=window), file=file)
    os.utime(rig.path, ns=(0, 0))
    home.forget_other_file()
    assert home.file is file
    home.source = Pinned(view=rig.data.clone())
    home.forget_other_file()
    assert home.file is None


def test_a_part_outside_of_a_file_is_refused(rig: Rig) -> None:
    mapping, _, _ = rig.written(rig.path, rig.data)
    with pytest.raises(StoreError, match="are not inside"):
        LazyMemory.of_extents(
            "w", [FileSlice(mapping, 0, 10), FileSlice(mapping, mapping.nbytes - 1, mapping.nbytes + 1)]
        )


def test_read_weights_and_parts_are_in_no_file(rig: Rig) -> None:
    source = rig.gathered_file()
    assert source.lazy is not None
    assert in_file(source.view[:100], source.lazy) is None
    source.check()
    assert in_file(source.view, source.lazy) is None
