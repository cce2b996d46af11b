"""Pages of a file as homes: written pages, windows, the page cache that pins them, whole models."""

from __future__ import annotations

import contextlib
import copy
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import weightstream.api.offload
import weightstream.runtime.devices.opening
from fixtures_structure import Block
from mapped import rss_nbytes
from models import MODELS, Model, floats, model_nbytes, randomise, weights
from repeats import examples, thinned
from streaming import assert_steps_equal, plain, run
from weightstream import Streamer
from weightstream.errors import PlanError, StoreError
from weightstream.inputs.builder import CallerFacts
from weightstream.runtime.weights.homes import Homes
from weightstream.settings.config import OffloadConfig
from weightstream.store import mapping as mapping_module
from weightstream.store import pages as pages_module
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.mapping import FileMapping, Window, written_ranges
from weightstream.store.pages import PageCache, Pages

PAGE = mmap.PAGESIZE


def open_paths() -> set[str]:
    return {file.path for file in psutil.Process().open_files()}


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("weightstream")}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No thread, descriptor or window outlives a test."""
    before, files, folder = threads(), open_paths(), tmp_path_factory.getbasetemp()

    def left() -> list[object]:
        windows = [line for line in maps_of(folder) if " r--s " in line]
        return [*(threads() - before), *(open_paths() - files), *windows]

    yield
    if left():
        gc.collect()  # slow, and few tests make cycles
    assert left() == []


def maps_of(path: Path) -> list[str]:
    """The lines of /proc/self/maps that map the file, or a file of the folder."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


def file_of(path: Path, num_pages: int, extra: int = 0) -> Path:
    """Random bytes: all pages differ."""
    path.write_bytes(torch.randint(0, 256, (num_pages * PAGE + extra,), dtype=torch.uint8).numpy().tobytes())
    return path


# -- pages that were written to ----------------------------------------------------------------------------------------


@pytest.fixture(params=["scan", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to find written pages: PAGEMAP_SCAN, and reading an entry per page, the only way in older kernels."""
    if request.param == "read":
        monkeypatch.setattr(mapping_module, "_SCAN", 0)  # no such request
    else:
        monkeypatch.setattr(
            mapping_module, "_read_entries", lambda *args: pytest.skip("this kernel has no PAGEMAP_SCAN")
        )
    return str(request.param)


def written_pages(address: int, nbytes: int) -> set[int]:
    """Numbers of the reported pages. Page 0 has the first byte of the range."""
    found = written_ranges(address, nbytes)
    assert found is not None
    base = address // PAGE * PAGE - address
    numbers: list[int] = []
    for start, stop in found:
        assert start < stop
        assert (start - base) % PAGE == (stop - base) % PAGE == 0
        numbers += range((start - base) // PAGE, (stop - base) // PAGE)
    assert len(numbers) == len(set(numbers)), "a page is reported twice"
    return set(numbers)


WRITES = st.lists(st.tuples(st.integers(0, 40 * PAGE - 1), st.integers(1, 3 * PAGE)), max_size=6)


@examples(80)
@given(writes=WRITES, reads=WRITES, begin=st.integers(0, 9 * PAGE), nbytes=st.integers(1, 30 * PAGE))
@pytest.mark.parametrize("request_code", [mapping_module._SCAN, 0])
def test_exactly_the_written_pages_are_reported(
    request_code: int,
    writes: list[tuple[int, int]],
    reads: list[tuple[int, int]],
    begin: int,
    nbytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "forty-pages"
    if not path.exists():
        file_of(path, 40)
    mapping, before = FileMapping(path), mapping_module._SCAN
    data = mapping.bytes(0, mapping.nbytes)
    wanted: set[int] = set()
    for start, length in reads:
        data[start : start + length].sum()
    for start, length in writes:
        data[start : start + length] += 1
        wanted |= {page for page in range(start // PAGE, 40) if page * PAGE < start + length}
    first = begin // PAGE
    inside = range(first, -(-(begin + nbytes) // PAGE))
    try:
        mapping_module._SCAN = request_code
        found = written_pages(data.data_ptr() + begin, nbytes)
    finally:
        mapping_module._SCAN = before
    assert found == {page - first for page in wanted & set(inside)}


@pytest.mark.usefixtures("way")
def test_more_regions_than_one_answer_has(tmp_path: Path) -> None:
    num = 2 * 512 + 7
    mapping = FileMapping(file_of(tmp_path / "file", 2 * num))
    data = mapping.bytes(0, mapping.nbytes)
    assert written_pages(data.data_ptr(), mapping.nbytes) == set()
    data[:: 2 * PAGE] ^= 1
    assert written_pages(data.data_ptr(), mapping.nbytes) == set(range(0, 2 * num, 2))
    data[PAGE :: 2 * PAGE] ^= 1
    assert written_pages(data.data_ptr(), mapping.nbytes) == set(range(2 * num))


@pytest.mark.usefixtures("way")
def test_a_mapping_reports_positions_in_its_file_and_an_empty_one_reports_none(tmp_path: Path) -> None:
    mapping = FileMapping(file_of(tmp_path / "file", 4, extra=100))
    mapping.bytes(4 * PAGE + 99, 4 * PAGE + 100).add_(1)  # the last byte, in a partial page
    assert mapping.written() == [(4 * PAGE, 5 * PAGE)]
    (tmp_path / "empty").write_bytes(b"")
    assert FileMapping(tmp_path / "empty").written() == []


@pytest.mark.usefixtures("way")
def test_unmapped_pages_are_not_reported_and_writes_stay(tmp_path: Path) -> None:
    mapping = FileMapping(file_of(tmp_path / "file", 64))
    before = mapping.bytes(0, 64 * PAGE).clone()
    assert rss_nbytes(mapping) == 64 * PAGE
    for page in (10, 30):
        mapping.bytes(page * PAGE, page * PAGE + 1).add_(1)
    mapping.leave(PAGE - 1, 64 * PAGE - 1)  # only whole pages: neither the first nor the last
    assert rss_nbytes(mapping) == 4 * PAGE
    changed = (mapping.bytes(0, 64 * PAGE) != before).nonzero().flatten().tolist()
    assert changed == [10 * PAGE, 30 * PAGE]
    for begin, end in ((0, 0), (5, PAGE - 1), (7 * PAGE + 1, 9 * PAGE - 1)):
        mapping.leave(begin, end)
    assert rss_nbytes(mapping) == 64 * PAGE


@pytest.mark.parametrize(("request_code", "gib"), [(mapping_module._SCAN, 64), (0, 8)])
def test_a_huge_untouched_mapping_is_scanned_fast(
    request_code: int, gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge"
    path.touch()
    os.truncate(path, gib << 30)  # sparse
    monkeypatch.setattr(mapping_module, "_SCAN", request_code)
    mapping = FileMapping(path)
    place = (gib << 29) + 5 * PAGE
    mapping.bytes(place, place + 1).fill_(1)
    started = time.process_time()
    assert mapping.written() == [(place, place + PAGE)]
    assert time.process_time() - started < (0.05 if request_code else 1.0)


def test_without_reports_of_the_kernel_the_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping, real = FileMapping(file_of(tmp_path / "file", 2)), os.open

    def no_proc(path: str, *args: int) -> int:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return real(path, *args)

    def fails(*args: object) -> bytes:
        raise PermissionError("no entries here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_proc)
        assert mapping.written() is None
    with monkeypatch.context() as patch:
        patch.setattr(mapping_module, "_SCAN", 0)
        patch.setattr(os, "pread", fails)
        assert mapping.written() is None
    assert mapping.written() == []


# -- windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, PAGE), (1, 2), (PAGE - 1, PAGE + 1), (PAGE, 3 * PAGE + 70)])
def test_a_window_shows_the_file_and_no_private_write(tmp_path: Path, begin: int, end: int) -> None:
    path = file_of(tmp_path / "file", 3, extra=70)
    mapping = FileMapping(path)
    before = len(maps_of(path))
    mapping.bytes(0, mapping.nbytes).fill_(7)
    window = mapping.window(begin, end)
    window.populate(window.begin, end)
    assert window.begin == begin // PAGE * PAGE
    assert window.memory.data_ptr() % PAGE == 0
    content = path.read_bytes()
    assert window.memory.numpy().tobytes() == content[window.begin : end]
    for a, b in [(begin, end), (begin, begin), (window.begin, begin + 1), (end - 1, end)]:
        assert window.bytes(a, b).numpy().tobytes() == content[a:b]
    (line,) = (line for line in maps_of(path) if f"{window.memory.data_ptr():x}-" in line)
    assert line.split()[1] == "r--s", "shared and read-only"
    for a, b in [(window.begin - 1, end), (begin, end + 1), (end, begin), (end + 1, end + 1)]:
        if a != b:
            with pytest.raises(IndexError, match="is not in a window"):
                window.bytes(a, b)
    mapping.bytes(begin, end).fill_(9)
    assert window.bytes(begin, end).numpy().tobytes() == content[begin:end]
    memory = window.bytes(begin, end)
    del window
    gc.collect()
    assert len(maps_of(path)) == before + 1, "a tensor of it keeps it mapped"
    assert memory.numpy().tobytes() == content[begin:end]
    del memory
    gc.collect()
    assert len(maps_of(path)) == before


def touch(path: Path) -> None:
    os.utime(path, ns=(5, 5))


def truncate(path: Path) -> None:
    os.truncate(path, PAGE)


def replace_file(path: Path) -> None:
    times = path.stat()
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))  # only the inode differs
    os.replace(other, path)


CHANGES = (touch, truncate, replace_file, Path.unlink)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_window_of_a_file_that_changed_is_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = file_of(tmp_path / "file", 8)
    mapping = FileMapping(path)
    window = mapping.window(PAGE, 3 * PAGE)
    change(path)
    with pytest.raises(StoreError, match=str(path)):
        mapping.window(PAGE, 3 * PAGE)
    with pytest.raises(StoreError, match=str(path)):
        window.populate(PAGE, 3 * PAGE)


def test_a_window_outside_of_the_file_is_refused(tmp_path: Path) -> None:
    mapping = FileMapping(file_of(tmp_path / "file", 2))
    for begin, end in [(0, 2 * PAGE + 1), (-1, 5), (9, 8)]:
        with pytest.raises(StoreError, match="are not inside its 8192 bytes"):
            mapping.window(begin, end)


# -- the page cache ----------------------------------------------------------------------------------------------------


class Device:
    """Records pins. `refuse_from` is the first registration that it refuses."""

    def __init__(self, refuse_from: int = 1 << 30) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.unpinned: list[tuple[int, int]] = []
        self.refuse_from = refuse_from
        self.calls = 0

    def pin(self, memory: torch.Tensor) -> None:
        self.calls += 1
        if self.calls > self.refuse_from:
            raise StoreError("memlock is 64 KiB.")
        self.pinned.append((memory.data_ptr(), memory.numel()))

    def unpin(self, memory: torch.Tensor) -> None:
        self.unpinned.append((memory.data_ptr(), memory.numel()))

    def holds(self, memory: torch.Tensor) -> bool:
        """Whether the memory is pinned now."""
        first, last = memory.data_ptr(), memory.data_ptr() + memory.numel()
        # the system may map other memory at the same addresses later
        there = Counter(self.pinned) - Counter(self.unpinned)
        return any(start <= first and last <= start + nbytes for start, nbytes in there)


@pytest.fixture
def mapping(tmp_path: Path) -> FileMapping:
    return FileMapping(file_of(tmp_path / "file", 64))


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def cache(device: Device) -> Iterator[PageCache]:
    made = PageCache(device.pin, device.unpin)
    yield made
    made.close()
    assert sorted(device.unpinned) == sorted(device.pinned)


def extents(pages: list[Pages]) -> list[tuple[int, int]]:
    return [(each.begin, each.end) for each in pages]


def hold(
    cache: PageCache, mapping: FileMapping, *ranges: tuple[int, int], refused: Callable[[Exception], None] | None = None
) -> list[Pages]:
    return cache.hold([(mapping, begin, end) for begin, end in ranges], refused or (lambda error: None))


def test_every_range_is_pinned_in_place(cache: PageCache, device: Device, mapping: FileMapping) -> None:
    ranges = [(5, 900), (900, 3 * PAGE), (9 * PAGE + 1, 9 * PAGE + 2), (20 * PAGE, 64 * PAGE)]
    content = mapping.path.read_bytes()
    for (begin, end), pages in zip(ranges, hold(cache, mapping, *ranges), strict=True):
        found = pages.source(begin, end)
        assert found is not None
        assert found.numpy().tobytes() == content[begin:end]
        assert device.holds(found)
    assert cache.nbytes == sum(nbytes for _, nbytes in device.pinned) == 3 * PAGE + 2 + 44 * PAGE
    assert mapping.written() == [], "no page is private to this process"


def test_neighbours_are_one_registration_up_to_the_limit(
    cache: PageCache, mapping: FileMapping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "_PINNED_NBYTES", 4 * PAGE)
    other = FileMapping(file_of(tmp_path / "other", 4))
    near, far = 3 * PAGE - 1, 3 * PAGE  # the gap is less than a page, or a page
    cache.close()
    found = hold(cache, mapping, (0, 10), (10, 2 * PAGE), (near + 2 * PAGE, 5 * PAGE))
    assert extents(found) == [(0, 2 * PAGE), (0, 2 * PAGE), (near + 2 * PAGE, 5 * PAGE)]
    cache.close()
    found = hold(cache, mapping, (0, PAGE), (2 * PAGE - 1, far))
    assert extents(found) == [(0, far)] * 2
    cache.close()
    found = hold(cache, mapping, (0, PAGE), (2 * PAGE, far))
    assert extents(found) == [(0, PAGE), (2 * PAGE, far)]
    cache.close()
    found = hold(cache, mapping, *((i * PAGE, (i + 1) * PAGE) for i in range(10)))
    assert extents(found) == [(0, 4 * PAGE)] * 4 + [(4 * PAGE, 8 * PAGE)] * 4 + [(8 * PAGE, 10 * PAGE)] * 2
    cache.close()
    found = hold(cache, mapping, (0, 9 * PAGE), (9 * PAGE, 10 * PAGE), (PAGE, 2 * PAGE), (0, 9 * PAGE))
    assert extents(found)[0] == (0, 9 * PAGE), "a single range is not cut"
    assert all(
        p.begin <= a and b <= p.end for p, (a, b) in zip(found[2:], [(PAGE, 2 * PAGE), (0, 9 * PAGE)], strict=True)
    )
    cache.close()
    found = cache.hold([(mapping, 0, PAGE), (other, PAGE, 2 * PAGE), (mapping, PAGE, 2 * PAGE)], print)
    assert found[0] is found[2] is not found[1]
    assert (found[0].mapping, found[1].mapping) == (mapping, other)


RANGES = st.lists(st.tuples(st.integers(0, 64 * PAGE - 1), st.integers(1, 9 * PAGE)), min_size=1, max_size=12)


@examples(100)
@given(ranges=RANGES, limit=st.integers(1, 20 * PAGE))
def test_ranges_share_pages_and_each_gives_its_bytes(
    ranges: list[tuple[int, int]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "sixty-four-pages"
    if not path.exists():
        file_of(path, 64)
    mapping, device, before = FileMapping(path), Device(), pages_module._PINNED_NBYTES
    content = path.read_bytes()
    spans = [(begin, min(begin + nbytes, 64 * PAGE)) for begin, nbytes in ranges]
    cache = PageCache(device.pin, device.unpin)
    try:
        pages_module._PINNED_NBYTES = limit
        found = hold(cache, mapping, *spans)
    finally:
        pages_module._PINNED_NBYTES = before
    for (begin, end), pages in zip(spans, found, strict=True):
        assert pages.begin <= begin < end <= pages.end
        assert pages.end - pages.begin <= max(limit, *(b - a for a, b in spans))
        memory = pages.source(begin, end)
        assert memory is not None
        assert memory.numpy().tobytes() == content[begin:end]
        assert device.holds(memory)
    sources = {id(p): p.window.memory.data_ptr() for p in found if p.window is not None}
    assert [start for start, _ in device.pinned] == list(sources.values()), "in the order of first need, each once"
    cache.close()
    assert sorted(device.unpinned) == sorted(device.pinned)


def test_the_first_range_needed_is_pinned_first_and_does_not_wait_for_the_rest(
    mapping: FileMapping, device: Device
) -> None:
    let, arrived = threading.Event(), threading.Event()

    def pin(memory: torch.Tensor) -> None:
        if len(device.pinned) == 1:
            arrived.set()
            assert let.wait(30)
        device.pin(memory)

    cache = PageCache(pin, device.unpin)
    late, early = (0, PAGE), (32 * PAGE, 33 * PAGE)
    pages = hold(cache, mapping, early, late, (early[0] + 5, early[1]))
    assert pages[0].source(*early) is not None
    assert pages[2].source(early[0] + 5, early[1]) is not None
    assert arrived.wait(30)
    assert not pages[1].done.is_set()
    found: list[torch.Tensor | None] = []
    waits = threading.Thread(target=lambda: found.append(pages[1].source(*late)))
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    let.set()
    waits.join(30)
    (memory,) = found
    assert memory is not None
    assert memory.numpy().tobytes() == mapping.path.read_bytes()[slice(*late)]
    cache.close()


def apart(num: int) -> list[tuple[int, int]]:
    return [(2 * i * PAGE, (2 * i + 1) * PAGE) for i in range(num)]


def test_a_refusal_is_reported_once_and_pinned_ranges_stay(
    mapping: FileMapping,
) -> None:
    device, refusals = Device(refuse_from=2), []
    cache = PageCache(device.pin, device.unpin)
    ranges = apart(5)
    held = hold(cache, mapping, *ranges, refused=refusals.append)
    found = [pages.source(*span) for pages, span in zip(held, ranges, strict=True)]
    cache.close()
    assert [memory is not None for memory in found] == [True, True, False, False, False]
    assert device.calls == 3, "after a refusal the device is not asked again"
    (refusal,) = refusals
    assert "memlock is 64 KiB." in str(refusal)
    assert sorted(device.unpinned) == sorted(device.pinned)
    assert len(device.pinned) == 2


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_an_error_of_the_device_wakes_all_waiting_threads(mapping: FileMapping, error: type[Exception]) -> None:
    refusals: list[Exception] = []

    def pin(memory: torch.Tensor) -> None:
        raise error("the driver is gone")

    cache = PageCache(pin, lambda memory: None)
    ranges = apart(3)
    for pages, span in zip(hold(cache, mapping, *ranges, refused=refusals.append), ranges, strict=True):
        assert pages.source(*span) is None
    cache.close()
    (refusal,) = refusals
    assert "the driver is gone" in str(refusal)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_unreadable_file_pins_nothing_and_its_readers_get_the_error(
    cache: PageCache, mapping: FileMapping, device: Device, change: Callable[[Path], None]
) -> None:
    change(mapping.path)
    for pages, span in zip(hold(cache, mapping, *apart(3)), apart(3), strict=True):
        assert pages.source(*span) is None
        with pytest.raises(StoreError, match=str(mapping.path)):
            mapping.populate(*span)
    cache.close()
    assert device.calls == 0


def test_a_temporary_read_error_does_not_affect_later_reads(
    mapping: FileMapping, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that failed once must not fail for ever."""
    populate = Window.populate
    monkeypatch.setattr(Window, "populate", lambda *args: mapping.raise_unread(5, 0, 1))
    cache = PageCache(device.pin, device.unpin)
    (pages,) = hold(cache, mapping, (0, PAGE))
    assert pages.source(0, PAGE) is None
    monkeypatch.setattr(Window, "populate", populate)
    mapping.populate(0, PAGE)
    (pages,) = hold(cache, mapping, (0, PAGE))
    assert pages.source(0, PAGE) is not None
    cache.close()


class Slow:
    """A disk that reads a piece only when released, with an empty page cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, self.let = threading.Semaphore(0), threading.Semaphore(0)
        real = Window.populate

        def populate(window: Window, begin: int, end: int) -> None:
            self.reads.release()
            assert self.let.acquire(timeout=30)
            real(window, begin, end)

        monkeypatch.setattr(Window, "populate", populate)
        monkeypatch.setattr(Window, "is_cached", lambda window: False)


def test_closing_during_reads_and_waits(mapping: FileMapping, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_PIECE_NBYTES", PAGE)
    slow, cache = Slow(monkeypatch), PageCache(device.pin, device.unpin)
    pages = hold(cache, mapping, (0, 40 * PAGE), (50 * PAGE, 51 * PAGE))
    assert slow.reads.acquire(timeout=30)
    found: list[torch.Tensor | None] = []
    waits = [threading.Thread(target=lambda p=p: found.append(p.source(p.begin, p.end))) for p in pages]
    closes = threading.Thread(target=cache.close)
    for thread in (*waits, closes):
        thread.start()
    closes.join(0.05)
    assert closes.is_alive()
    slow.let.release()
    for thread in (*waits, closes):
        thread.join(30)
        assert not thread.is_alive()
    assert found == [None, None]
    assert not slow.reads.acquire(blocking=False), "reading has stopped"
    assert device.calls == 0


class Mapped:
    """Records which threads map which pages, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_cached: bool) -> None:
        self.begins: list[int] = []
        self.threads: set[threading.Thread] = set()
        real = Window.populate

        def populate(window: Window, begin: int, end: int) -> None:
            self.begins.append(begin)
            self.threads.add(threading.current_thread())
            real(window, begin, end)

        monkeypatch.setattr(Window, "populate", populate)
        monkeypatch.setattr(Window, "is_cached", lambda window: is_cached)


def test_cached_pages_are_mapped_ahead_of_pinning(
    mapping: FileMapping, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, let = Mapped(monkeypatch, is_cached=True), threading.Event()

    def pin(memory: torch.Tensor) -> None:
        assert let.wait(30)
        device.pin(memory)

    cache = PageCache(pin, device.unpin)
    pages = hold(cache, mapping, *apart(20))
    deadline = time.monotonic() + 30
    while len(mapped.begins) < 20:
        assert time.monotonic() < deadline, "no page is mapped while the first is pinned"
        time.sleep(0.001)
    assert not any(each.done.is_set() for each in pages)
    let.set()
    assert all(each.source(each.begin, each.end) is not None for each in pages)
    assert [begin for begin, _ in device.pinned] == [each.window.memory.data_ptr() for each in pages if each.window]
    assert sorted(mapped.begins) == [begin for begin, _ in apart(20)], "each once"
    cache.close()


@pytest.mark.parametrize("is_cached", [True, False])
def test_all_windows_are_created_before_pages_are_read_in(
    mapping: FileMapping, device: Device, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """Creating a window waits for threads that read pages in or pin them, and first touches of memory wait for both."""
    mapped, made, window = Mapped(monkeypatch, is_cached), list[int](), FileMapping.window
    monkeypatch.setattr(FileMapping, "window", lambda *about: made.append(len(mapped.begins)) or window(*about))
    cache = PageCache(device.pin, device.unpin)
    for num in (20, 10):
        mapped.begins.clear()
        made.clear()
        cache.close()
        pages = hold(cache, mapping, *apart(num))
        assert all(each.source(each.begin, each.end) is not None for each in pages)
        assert made == [0] * num, "each once"
        assert sorted(mapped.begins) == [begin for begin, _ in apart(num)]
    cache.close()


def test_a_changed_file_is_reported_in_order(mapping: FileMapping, device: Device) -> None:
    """All windows are created at once, but ranges before the failing one are pinned."""
    errors, real = list[Exception](), FileMapping.window
    begins = [begin for begin, _ in apart(6)]

    def window(self: FileMapping, begin: int, end: int) -> Window:
        if begin == begins[3]:
            raise StoreError("changed since it was mapped")
        return real(self, begin, end)

    cache = PageCache(device.pin, device.unpin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileMapping, "window", window)
        pages = cache.hold([(mapping, *span) for span in apart(6)], errors.append)
        assert [each.source(each.begin, each.end) is not None for each in pages] == [True] * 3 + [False] * 3
    assert [str(error) for error in errors] == ["changed since it was mapped"]
    cache.close()


def test_no_windows_are_created_after_closing(mapping: FileMapping, device: Device) -> None:
    let, made, real = threading.Event(), list[int](), FileMapping.window

    def window(self: FileMapping, begin: int, end: int) -> Window:
        made.append(begin)
        assert let.wait(30)
        return real(self, begin, end)

    cache = PageCache(device.pin, device.unpin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileMapping, "window", window)
        pages = hold(cache, mapping, *apart(20))
        cache._closed.set()
        let.set()
        assert [each.source(each.begin, each.end) for each in pages] == [None] * 20
    assert len(made) <= 1
    assert device.calls == 0
    cache.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "weightstream-pages"]


def test_pages_on_disk_are_read_in_order_by_one_thread(
    mapping: FileMapping, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, cache = Mapped(monkeypatch, is_cached=False), PageCache(device.pin, device.unpin)
    pages = hold(cache, mapping, *apart(20)[::-1])
    assert all(each.source(each.begin, each.end) is not None for each in pages)
    assert mapped.begins == [begin for begin, _ in apart(20)[::-1]]
    assert len(mapped.threads) == 1
    cache.close()


def test_a_window_knows_whether_it_is_cached(tmp_path: Path) -> None:
    path = tmp_path / "holes"
    path.touch()
    os.truncate(path, 64 * PAGE)  # no page was ever read
    window = FileMapping(path).window(8 * PAGE, 40 * PAGE + 5)
    assert not window.is_cached()
    window.populate(8 * PAGE, 40 * PAGE)
    window.populate(40 * PAGE, 40 * PAGE + 5)
    assert window.is_cached()


def test_new_ranges_replace_the_first_ones(cache: PageCache, device: Device, mapping: FileMapping) -> None:
    (first,) = hold(cache, mapping, (0, PAGE))
    assert first.source(0, PAGE) is not None
    (second,) = hold(cache, mapping, (PAGE, 3 * PAGE))
    memory = second.source(PAGE, 3 * PAGE)
    assert memory is not None
    assert device.unpinned == device.pinned[:1]
    assert device.holds(memory)
    assert cache.nbytes == 2 * PAGE
    cache.close()
    cache.close()
    assert cache.nbytes == 0
    assert device.unpinned == device.pinned, "each once"
    (third,) = hold(cache, mapping, (PAGE, 3 * PAGE))
    assert third.source(PAGE, 3 * PAGE) is not None
    hold(cache, mapping)
    assert cache.nbytes == 0


def test_without_a_device_ranges_are_read_without_waits(mapping: FileMapping, monkeypatch: pytest.MonkeyPatch) -> None:
    started, let, read = threading.Event(), threading.Event(), []
    real = FileMapping.populate

    def populate(self: FileMapping, begin: int, end: int) -> None:
        started.set()
        assert let.wait(30)
        read.append((begin, end))
        real(self, begin, end)

    monkeypatch.setattr(FileMapping, "populate", populate)
    cache = PageCache()
    pages = hold(cache, mapping, (9 * PAGE, 10 * PAGE), (0, PAGE))
    assert started.wait(30)
    assert [each.source(each.begin, each.end) for each in pages] == [None, None]
    let.set()
    thread = cache._thread
    assert thread is not None
    thread.join(30)
    assert read == [(9 * PAGE, 10 * PAGE), (0, PAGE)]
    cache.close()


def test_a_collected_cache_unpins_everything_once(mapping: FileMapping, device: Device) -> None:
    cache = PageCache(device.pin, device.unpin)
    pages = hold(cache, mapping, *apart(3))
    assert all(each.source(each.begin, each.end) is not None for each in pages)
    assert cache._thread is not None
    cache._thread.join(30)  # it refers to pinned memory until it ends
    del cache
    gc.collect()
    assert sorted(device.unpinned) == sorted(device.pinned)
    assert len(device.pinned) == 3


def test_a_cache_collected_while_it_pins_leaves_nothing_pinned(mapping: FileMapping, device: Device) -> None:
    pins, let = threading.Event(), threading.Event()

    def pin(memory: torch.Tensor) -> None:
        pins.set()
        assert let.wait(30)
        device.pin(memory)

    cache = PageCache(pin, device.unpin)
    pages = hold(cache, mapping, *apart(3))
    thread = cache._thread
    assert thread is not None
    assert pins.wait(30)
    del cache
    gc.collect()
    let.set()
    thread.join(30)
    assert all(each.done.is_set() for each in pages)
    assert device.unpinned == device.pinned
    assert len(device.pinned) == 1


AT_EXIT = """
import atexit, sys, time
from pathlib import Path
from weightstream.store.mapping import FileMapping, Window
from weightstream.store.pages import PageCache
pinned, populate = [], Window.populate

def slow(*args):
    time.sleep(0.02)
    populate(*args)

def pin(memory):
    pinned.append(memory.data_ptr())

def unpin(memory):
    print("unpinned", pinned.index(memory.data_ptr()), flush=True)

Window.populate = slow
mapping = FileMapping(Path(sys.argv[1]))
cache = PageCache(pin, unpin)
pages = cache.hold([(mapping, i * 8192, i * 8192 + 4096) for i in range(30)], print)
assert pages[1].source(8192, 8193) is not None
atexit.register(lambda: print(len(pinned), flush=True))
"""


def test_an_interpreter_exit_while_reading_unpins_everything(mapping: FileMapping) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(mapping.path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    num, *unpinned = done.stdout.splitlines()
    assert 2 <= int(num) < 30, "it does not read to the end"
    assert sorted(unpinned) == sorted(f"unpinned {i}" for i in range(int(num)))


# -- whole models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Copy models from pinned pages of their checkpoint, as on a GPU."""
    device = Device()
    monkeypatch.setattr(
        weightstream.inputs.builder, "pinned", lambda *args: (None, PageCache(device.pin, device.unpin))
    )
    yield device
    assert sorted(device.unpinned) == sorted(device.pinned), "each once"
    assert device.pinned


def wide() -> Model:
    """Six blocks whose weights have pages of their own."""
    torch.manual_seed(0)
    module = randomise(nn.Sequential(*(Block(64, 96) for _ in range(6))), 5)
    return Model(module=module, inputs=lambda seed: {"input": floats(seed, 3, 64)})


def budgeted(open_at: Callable[[int], Any], nbytes: int, least: int = 1) -> Any:
    """Offload at the smallest budget that plans, from a number of eighths of the model on."""
    for eighths in range(least, 8):
        with contextlib.suppress(PlanError):
            return open_at(nbytes * eighths // 8)
    raise AssertionError("no budget plans")


def on_file(model: Model, path: Path) -> Checkpoint:
    """Make every weight view a checkpoint, as in a loaded model."""
    named = {name: tensor for name, tensor in weights(model.module).items() if tensor.numel()}
    kept: dict[int, str] = {}
    for name, tensor in named.items():
        kept.setdefault(id(tensor), name)
    save_file({name: named[name].detach().contiguous().clone() for name in kept.values()}, path)
    checkpoint = Checkpoint.open(path)
    for name in kept.values():
        named[name].data = checkpoint.tensor(name)
    return checkpoint


def stream_file(model: Model, checkpoint: Checkpoint, least: int = 1, **options: Any) -> Streamer:
    def open_at(budget: int) -> Streamer:
        config = OffloadConfig().merged(device_budget=budget, **options).resolved()
        with contextlib.ExitStack() as on_failure, torch.inference_mode(False), torch.no_grad():
            backend = weightstream.runtime.devices.opening.CpuBackend()
            on_failure.callback(backend.close)
            opened = weightstream.api.offload._offload(
                model.module, backend, config, CallerFacts(memories=checkpoint.mappings)
            )
            on_failure.pop_all()
            return opened

    streamer: Streamer = budgeted(open_at, model_nbytes(model.module), least)
    assert streamer.plan.offloaded_nbytes > 0
    return streamer


def copied_from_windows(streamer: Streamer, device: Device) -> set[str]:
    """Streamed alias groups whose copies start in pinned memory."""
    homes, plan, found = streamer._homes, streamer.plan, set()
    for unit in range(len(plan.manifest.units)):
        for alias in plan.streamed(unit):
            home = homes.homes[alias]
            ring, plain = (torch.empty(home.group.nbytes, dtype=torch.uint8) for _ in range(2))
            sources = [copy.src for copy in home.source.copies(ring, streamer._backend)]
            home.source.plain_into(plain)
            assert torch.equal(torch.cat(sources), plain), f"{alias}: the source has other bytes than the home"
            if all(map(device.holds, sources)):
                found.add(alias)
    return found


def streamed_aliases(streamer: Streamer) -> set[str]:
    plan = streamer.plan
    return {alias for unit in range(len(plan.manifest.units)) for alias in plan.streamed(unit)}


LOADED = ("llama", "llama-bf16", "gpt2", "bert", "t5", "mixtral", "qwen3_moe-bf16")


@pytest.mark.few(1)
@pytest.mark.usefixtures("nothing_foreseen")
@pytest.mark.parametrize(("name", "shards"), thinned(LOADED, ["one file", "shards"]))
def test_loaded_models_are_copied_from_their_files(name: str, shards: str, pinning: Device, tmp_path: Path) -> None:
    made = MODELS[name]()
    options = {"max_shard_size": "60KB"} if shards == "shards" else {}
    made.module.save_pretrained(tmp_path, **options)
    reference = Model(module=type(made.module).from_pretrained(tmp_path, dtype="auto").eval(), inputs=made.inputs)
    loaded = budgeted(
        lambda budget: weightstream.from_pretrained(tmp_path, device="cpu", device_budget=budget, progress=False),
        model_nbytes(reference.module),
    )
    with loaded.weightstream as streamer:
        model = Model(module=loaded, inputs=made.inputs)
        assert copied_from_windows(streamer, pinning) == streamed_aliases(streamer) != set()
        if shards == "shards":
            assert len(streamer._homes.files) > 3
        assert_steps_equal(model, reference, "cpu", range(5))
        assert streamer.stats().held_nbytes["disk"] == 0
        assert streamer.stats().filled_nbytes >= 4 * streamer.plan.step_nbytes > 0
        assert copied_from_windows(streamer, pinning) == streamed_aliases(streamer)
    assert_steps_equal(model, reference, "cpu", range(2))


FIXTURES = (
    "Stack",
    "TiedLinears",
    "ParentReadsChildren",
    "ChildrenShareParameter",
    "OptionalBranch",
    "CalledTwice",
    "QuantisedWeights",
    "Parametrised",
    "WeightsInBuffers",
    "WrittenBuffers",
)


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "least"), thinned(FIXTURES, [1, 4]))
def test_any_module_on_a_file(name: str, least: int, pinning: Device, tmp_path: Path) -> None:
    """Modules are regrouped and reordered as they run, and unchanged after `remove()`."""
    model, reference = MODELS[name](), plain(name, "cpu")
    checkpoint = on_file(model, tmp_path / "file.safetensors")
    with stream_file(model, checkpoint, least) as streamer:
        assert copied_from_windows(streamer, pinning) != set()
        assert_steps_equal(model, reference, "cpu", range(6))
        assert copied_from_windows(streamer, pinning) != set()
        assert_steps_equal(model, reference, "cpu", range(2))
    for key, tensor in weights(reference.module).items():
        assert torch.equal(weights(model.module)[key], tensor), key
    assert_steps_equal(model, reference, "cpu", range(3))


def bits(parameter: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Flip bytes, unseen by every version counter."""
    found: npt.NDArray[np.uint8] = parameter.detach().view(-1).view(torch.uint8).numpy()
    return found


def flip(data: npt.NDArray[np.uint8]) -> None:
    """Flip one bit of one element, far from both ends and from the places that a sample reads."""
    data[data.size * 5 // 9 // 4 * 4 + 2] ^= 0x40


def in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(-0.5)


def in_data(parameter: nn.Parameter) -> None:
    parameter.data[3, 5] += 1.0


def through_numpy(parameter: nn.Parameter) -> None:
    flip(bits(parameter))


def assigned(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.flip(0).contiguous()


UPDATES = (in_place, in_data, through_numpy, assigned)


def assert_updates_arrive(
    model: Model,
    reference: Model,
    names: list[str],
    update: Callable[[nn.Parameter], None],
    from_file: Callable[[], set[str]],
) -> None:
    """Update each of these three times. The first update moves it away from its file; the others stay there."""
    for index, name in enumerate(names):
        for _ in range(3):
            before = run(reference, "cpu", 0)
            for each in (model, reference):
                update(each.module.get_parameter(name))
            assert not torch.equal(run(reference, "cpu", 0)[0], before[0]), "the update does not change the output"
            assert_steps_equal(model, reference, "cpu", range(2))
            left = from_file()
            assert name not in left
        assert left >= set(names[index + 2 :]), "the others stay"


@pytest.mark.few(1)
@pytest.mark.parametrize(("update", "warm"), thinned(UPDATES, [0, 1, 3], every=3))
def test_updates_of_any_kind_reach_the_next_step(
    update: Callable[[nn.Parameter], None], warm: int, pinning: Device, tmp_path: Path
) -> None:
    """Each weight is updated three times, in the ring or not. The first update moves it away from its window."""
    model, reference = wide(), wide()
    with stream_file(model, on_file(model, tmp_path / "file.safetensors")) as streamer:
        assert_steps_equal(model, reference, "cpu", range(warm))
        names = sorted(alias for alias in streamed_aliases(streamer) if alias.endswith(".weight"))
        assert len(names) >= 8
        assert_updates_arrive(model, reference, names, update, lambda: copied_from_windows(streamer, pinning))
    assert_steps_equal(model, reference, "cpu", range(2))


@pytest.mark.few(1)
@pytest.mark.parametrize("warm", [0, 1, 3])
def test_an_alias_from_before_offloading_is_watched(warm: int, pinning: Device, tmp_path: Path) -> None:
    """An alias that was taken before `offload()` writes a single bit before each step."""
    model, reference = wide(), wide()
    checkpoint = on_file(model, tmp_path / "file.safetensors")
    held = {name: [bits(each.module.get_parameter(name)) for each in (model, reference)] for name in BLOCK_WEIGHTS}
    with stream_file(model, checkpoint) as streamer:
        assert_steps_equal(model, reference, "cpu", range(warm))
        names = sorted(streamed_aliases(streamer) & held.keys())
        assert len(names) >= 8
        for name in names * 3:
            for data in held[name]:
                flip(data)
            assert_steps_equal(model, reference, "cpu", range(1))


def test_loaded_state_reaches_the_next_step(pinning: Device, tmp_path: Path) -> None:
    model, reference = wide(), wide()
    states = [randomise(wide().module, seed).state_dict() for seed in (7, 8, 9)]
    with stream_file(model, on_file(model, tmp_path / "file.safetensors")) as streamer:
        assert_steps_equal(model, reference, "cpu", range(2))
        for state in states:
            for each in (model, reference):
                each.module.load_state_dict(state)
            assert_steps_equal(model, reference, "cpu", range(2))
            assert copied_from_windows(streamer, pinning) == set()
    assert_steps_equal(model, reference, "cpu", range(1))


def add(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(0.125)


@pytest.mark.few(2)
@pytest.mark.parametrize("update", [add, in_data, through_numpy], ids=lambda update: update.__name__)
@pytest.mark.parametrize(("written", "writer"), thinned([0, 2, 3, 5], [0, 2, 5]))
def test_a_block_that_updates_another_inside_its_forward(
    update: Callable[[nn.Parameter], None], writer: int, written: int, pinning: Device, tmp_path: Path
) -> None:
    """The update counts in the same step if it has a new version, otherwise in the next step."""
    model, reference = wide(), wide()
    armed: list[int] = []

    def hook(parameter: nn.Parameter) -> Callable[..., None]:
        return lambda *args: update(parameter) if armed else None

    for each in (model, reference):
        each.module[writer].register_forward_hook(hook(each.module[written].down.weight))
    with stream_file(model, on_file(model, tmp_path / "file.safetensors")) as streamer:
        assert_steps_equal(model, reference, "cpu", range(2))
        for _ in range(3):
            armed.append(1)
            pair = run(model, "cpu", 3), run(reference, "cpu", 3)
            armed.clear()
            if update is add:
                assert torch.equal(pair[0][0], pair[1][0])
            assert_steps_equal(model, reference, "cpu", range(2))
        if f"{written}.down.weight" in streamed_aliases(streamer):
            assert f"{written}.down.weight" not in copied_from_windows(streamer, pinning)


def test_a_norm_in_training_mode(pinning: Device, tmp_path: Path) -> None:
    model, reference = MODELS["LinearBatchNormLinear"](), plain("LinearBatchNormLinear", "cpu")
    with stream_file(model, on_file(model, tmp_path / "file.safetensors")):
        for each in (model, reference):
            each.module.train()
        assert_steps_equal(model, reference, "cpu", range(4))
        for each in (model, reference):
            each.module.eval()
        assert_steps_equal(model, reference, "cpu", range(3))
    assert int(model.module.batchnorm.num_batches_tracked) == 4


BLOCK_WEIGHTS = tuple(f"{block}.{part}.weight" for block in range(6) for part in ("up", "down"))


def test_weights_written_by_the_load_are_never_copied_from_the_file(pinning: Device, tmp_path: Path) -> None:
    model, reference = wide(), wide()
    checkpoint = on_file(model, tmp_path / "file.safetensors")
    for each in (model, reference):
        for name in BLOCK_WEIGHTS[::3]:
            flip(bits(each.module.get_parameter(name)))
    with stream_file(model, checkpoint) as streamer:
        streamed = streamed_aliases(streamer)
        assert not copied_from_windows(streamer, pinning) & set(BLOCK_WEIGHTS[::3])
        assert copied_from_windows(streamer, pinning) & set(BLOCK_WEIGHTS[1::3])
        assert streamed & set(BLOCK_WEIGHTS[::3])
        assert_steps_equal(model, reference, "cpu", range(4))


def test_without_reports_of_the_kernel_nothing_is_copied_from_the_file(
    pinning: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = wide(), wide()
    checkpoint = on_file(model, tmp_path / "file.safetensors")
    first = stream_file(model, checkpoint)
    assert copied_from_windows(first, pinning) == streamed_aliases(first)
    first.remove()
    monkeypatch.setattr(FileMapping, "written", lambda self: None)
    with stream_file(model, checkpoint) as streamer:
        assert copied_from_windows(streamer, pinning) == set()
        assert_steps_equal(model, reference, "cpu", range(3))
        through_numpy(model.module[3].up.weight)
        through_numpy(reference.module[3].up.weight)
        for each in (model, reference):
            in_place(each.module[3].up.weight)
        assert_steps_equal(model, reference, "cpu", range(3))


def test_a_unit_called_on_its_own_sees_its_update(pinning: Device, tmp_path: Path) -> None:
    model, reference = wide(), wide()
    with stream_file(model, on_file(model, tmp_path / "file.safetensors")), torch.no_grad():
        assert_steps_equal(model, reference, "cpu", range(2))
        for index in [*range(6), 3, 0] * 2:
            for each in (model, reference):
                through_numpy(each.module[index].up.weight)
            x = floats(index, 2, 64)
            assert torch.equal(model.module[index](x), reference.module[index](x))


def test_a_deepcopy_has_the_true_bytes(pinning: Device, tmp_path: Path) -> None:
    model, reference = wide(), wide()
    with stream_file(model, on_file(model, tmp_path / "file.safetensors")):
        assert_steps_equal(model, reference, "cpu", range(2))
        through_numpy(model.module[2].up.weight)
        through_numpy(reference.module[2].up.weight)
        twin = Model(module=copy.deepcopy(model.module), inputs=model.inputs)
        assert_steps_equal(twin, reference, "cpu", range(2))
        with torch.no_grad():
            for parameter in twin.module.parameters():
                parameter.zero_()
        assert_steps_equal(model, reference, "cpu", range(3))


@pytest.mark.parametrize("place", ["_settle_unit", "_map", "_hold_pages"])
def test_an_error_while_weights_move_releases_everything(
    place: str, pinning: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = wide(), wide()
    path = tmp_path / "file.safetensors"
    checkpoint, calls, real = on_file(model, path), [0], getattr(Homes, place)
    stream_file(model, checkpoint).remove()
    gc.collect()
    before = len(maps_of(path))

    def fails(*args: Any) -> None:
        real(*args)
        calls[0] += 1
        if calls[0] == (3 if place == "_settle_unit" else 1):
            raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Homes, place, fails)
        with pytest.raises(MemoryError, match="no room"):
            stream_file(model, checkpoint)
    assert sorted(pinning.unpinned) == sorted(pinning.pinned) != []
    gc.collect()
    assert len(maps_of(path)) <= before
    assert_steps_equal(model, reference, "cpu", range(2))
    with stream_file(model, checkpoint):
        assert_steps_equal(model, reference, "cpu", range(3))


def test_no_thread_waits_for_the_pause_after_a_pinned_range(
    mapping: FileMapping, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin(memory: torch.Tensor) -> None:
        time.sleep(0.06)
        device.pin(memory)

    monkeypatch.setattr(pages_module, "_PAUSE", 1000)
    monkeypatch.setattr(pages_module, "_LONGEST_PAUSE_S", 60)
    cache, begin = PageCache(pin, device.unpin), time.perf_counter()
    first, second = hold(cache, mapping, (0, PAGE), (8 * PAGE, 9 * PAGE))
    assert first.source(0, PAGE) is not None
    time.sleep(0.2)
    assert not second.done.is_set(), "the pinning thread lets others use the driver meanwhile"
    cache.close()
    assert second.done.is_set()
    assert time.perf_counter() - begin < 30


def test_the_pinning_thread_asks_for_the_devices_address(mapping: FileMapping, device: Device) -> None:
    asked: list[str] = []

    def show(memory: torch.Tensor) -> torch.Tensor | None:
        asked.append(threading.current_thread().name)
        return memory if len(asked) == 1 else None

    with contextlib.closing(PageCache(device.pin, device.unpin, show=show)) as cache:
        first, second = hold(cache, mapping, (5, 900), (8 * PAGE, 9 * PAGE))
        shown, source = first.shown(7, 800), first.source(7, 800)
        assert shown is not None
        assert source is not None
        assert shown.data_ptr() == source.data_ptr()
        assert torch.equal(shown, source)
        assert second.source(8 * PAGE, 9 * PAGE) is not None
        assert second.shown(8 * PAGE, 9 * PAGE) is None, "the device cannot show it"
    assert asked == ["weightstream-pages"] * 2


def test_memory_without_a_device_address_is_pinned_all_the_same(mapping: FileMapping, device: Device) -> None:
    def show(memory: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room for a view")

    refused: list[Exception] = []
    with contextlib.closing(PageCache(device.pin, device.unpin, show=show)) as cache:
        found = hold(cache, mapping, (5, 900), (8 * PAGE, 9 * PAGE), refused=refused.append)
        assert [pages.source(pages.begin, pages.end) is None for pages in found] == [False, False]
        assert [pages.shown(pages.begin, pages.end) for pages in found] == [None, None]
    assert not refused


@pytest.mark.parametrize("num", [0, 2])
def test_fewer_threads_map_pages_if_the_system_has_no_more(
    num: int, mapping: FileMapping, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, start = list[threading.Thread](), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(begun) > num:  # the first one pins
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    content = mapping.path.read_bytes()
    with contextlib.closing(PageCache(device.pin, device.unpin)) as cache, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        for pages in hold(cache, mapping, *((4 * n * PAGE, (4 * n + 1) * PAGE) for n in range(8))):
            memory = pages.source(pages.begin, pages.end)
            assert memory is not None
            assert memory.numpy().tobytes() == content[pages.begin : pages.end]
    assert len(begun) == num + 1
