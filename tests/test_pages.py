"""Pages of a file as homes: which were written to, windows on them, the page cache that pins them, whole models."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightstream.errors import StoreError
from weightstream.store import pagemap
from weightstream.store import pages as pages_module
from weightstream.store.mapping import FileMapping, Window
from weightstream.store.pagemap import written_ranges
from weightstream.store.pages import PageCache, Pages

PAGE = mmap.PAGESIZE


def open_paths() -> set[str]:
    return {file.path for file in psutil.Process().open_files()}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No thread, descriptor or map of a file outlives a test."""
    threads, files = set(threading.enumerate()), open_paths()
    yield
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert open_paths() <= files
    assert maps_of(tmp_path_factory.getbasetemp()) == []


def maps_of(path: Path) -> list[str]:
    """The lines of /proc/self/maps that map the file, or a file of the folder."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


def file_of(path: Path, num_pages: int, extra: int = 0) -> Path:
    """Random bytes: no two pages are alike."""
    path.write_bytes(torch.randint(0, 256, (num_pages * PAGE + extra,), dtype=torch.uint8).numpy().tobytes())
    return path


# -- pages that were written to ----------------------------------------------------------------------------------------


@pytest.fixture(params=["scan", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to ask: PAGEMAP_SCAN, and reading an entry per page, which is all that an older kernel has."""
    if request.param == "read":
        monkeypatch.setattr(pagemap, "_SCAN", 0)  # no such request
    else:
        monkeypatch.setattr(pagemap, "_read", lambda *args: pytest.skip("this kernel has no PAGEMAP_SCAN"))
    return str(request.param)


def written_pages(address: int, nbytes: int) -> set[int]:
    """Numbers of the pages that are told, the first that holds a byte of the range being 0."""
    found = written_ranges(address, nbytes)
    assert found is not None
    base = address // PAGE * PAGE - address
    numbers: list[int] = []
    for start, stop in found:
        assert start < stop
        assert (start - base) % PAGE == (stop - base) % PAGE == 0
        numbers += range((start - base) // PAGE, (stop - base) // PAGE)
    assert len(numbers) == len(set(numbers)), "a page is told twice"
    return set(numbers)


WRITES = st.lists(st.tuples(st.integers(0, 40 * PAGE - 1), st.integers(1, 3 * PAGE)), max_size=6)


@settings(max_examples=80, deadline=None)
@given(writes=WRITES, reads=WRITES, begin=st.integers(0, 9 * PAGE), nbytes=st.integers(1, 30 * PAGE))
@pytest.mark.parametrize("request_code", [pagemap._SCAN, 0])
def test_exactly_the_pages_that_were_written_are_told(
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
    mapping, before = FileMapping(path), pagemap._SCAN
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
        pagemap._SCAN = request_code
        found = written_pages(data.data_ptr() + begin, nbytes)
    finally:
        pagemap._SCAN = before
    assert found == {page - first for page in wanted & set(inside)}


@pytest.mark.usefixtures("way")
def test_more_regions_than_one_answer_holds(tmp_path: Path) -> None:
    num = 2 * 512 + 7
    mapping = FileMapping(file_of(tmp_path / "file", 2 * num))
    data = mapping.bytes(0, mapping.nbytes)
    assert written_pages(data.data_ptr(), mapping.nbytes) == set()
    data[:: 2 * PAGE] ^= 1
    assert written_pages(data.data_ptr(), mapping.nbytes) == set(range(0, 2 * num, 2))
    data[PAGE :: 2 * PAGE] ^= 1
    assert mapping.written() == [(0, mapping.nbytes)] or written_pages(data.data_ptr(), mapping.nbytes) == set(
        range(2 * num)
    )


@pytest.mark.usefixtures("way")
def test_a_mapping_tells_positions_in_its_file_and_an_empty_one_tells_none(tmp_path: Path) -> None:
    mapping = FileMapping(file_of(tmp_path / "file", 4, extra=100))
    mapping.bytes(4 * PAGE + 99, 4 * PAGE + 100).add_(1)  # the last byte, in a page that is not full
    assert mapping.written() == [(4 * PAGE, 5 * PAGE)]
    (tmp_path / "empty").write_bytes(b"")
    assert FileMapping(tmp_path / "empty").written() == []


@pytest.mark.parametrize(("request_code", "gib"), [(pagemap._SCAN, 64), (0, 8)])
def test_a_huge_mapping_that_nobody_touched_is_told_fast(
    request_code: int, gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge"
    path.touch()
    os.truncate(path, gib << 30)  # sparse
    monkeypatch.setattr(pagemap, "_SCAN", request_code)
    mapping = FileMapping(path)
    place = (gib << 29) + 5 * PAGE
    mapping.bytes(place, place + 1).fill_(1)
    started = time.process_time()
    assert mapping.written() == [(place, place + PAGE)]
    assert time.process_time() - started < (0.05 if request_code else 1.0)


def test_where_nobody_can_tell_the_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        patch.setattr(pagemap, "_SCAN", 0)
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
    assert line.split()[1] == "r--s", "shared, and nobody can write to it"
    for a, b in [(window.begin - 1, end), (begin, end + 1), (end, begin), (end + 1, end + 1)]:
        if a != b:
            with pytest.raises(IndexError, match="is not in a window"):
                window.bytes(a, b)
    mapping.bytes(begin, end).fill_(9)
    assert window.bytes(begin, end).numpy().tobytes() == content[begin:end]
    memory = window.bytes(begin, end)
    del window
    gc.collect()
    assert len(maps_of(path)) == before + 1, "a tensor of it keeps it"
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
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))  # all that differs is the inode
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
    """Pins by writing down; `refuse_from` is the first registration that it refuses."""

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
        there = [p for p in self.pinned if p not in self.unpinned]
        return any(start <= first and last <= start + nbytes for start, nbytes in there)


@pytest.fixture
def mapping(tmp_path: Path) -> FileMapping:
    return FileMapping(file_of(tmp_path / "file", 64))


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def cache(device: Device) -> Iterator[PageCache]:
    made = PageCache(device.pin, device.unpin, lambda: "the limits")
    yield made
    made.close()
    assert sorted(device.unpinned) == sorted(device.pinned)


def extents(pages: list[Pages]) -> list[tuple[int, int]]:
    return [(each.begin, each.end) for each in pages]


def hold(cache: PageCache, mapping: FileMapping, *ranges: tuple[int, int]) -> list[Pages]:
    return cache.hold([(mapping, begin, end) for begin, end in ranges])


def test_every_range_is_pinned_where_it_is(cache: PageCache, device: Device, mapping: FileMapping) -> None:
    ranges = [(5, 900), (900, 3 * PAGE), (9 * PAGE + 1, 9 * PAGE + 2), (20 * PAGE, 64 * PAGE)]
    content = mapping.path.read_bytes()
    for (begin, end), pages in zip(ranges, hold(cache, mapping, *ranges), strict=True):
        found = pages.source(begin, end)
        assert found is not None
        assert found.numpy().tobytes() == content[begin:end]
        assert device.holds(found)
    assert cache.nbytes == sum(nbytes for _, nbytes in device.pinned) == 3 * PAGE + PAGE // PAGE * 2 + 44 * PAGE
    assert mapping.written() == [], "nothing of it is this process's own"


def test_neighbours_are_one_registration_up_to_the_limit(
    cache: PageCache, mapping: FileMapping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "_PINNED_NBYTES", 4 * PAGE)
    other = FileMapping(file_of(tmp_path / "other", 4))
    near, far = 3 * PAGE - 1, 3 * PAGE  # less than a page lies between, or a page
    found = hold(cache, mapping, (0, 10), (10, 2 * PAGE), (near + 2 * PAGE, 5 * PAGE))
    assert extents(found) == [(0, 2 * PAGE), (0, 2 * PAGE), (near + 2 * PAGE, 5 * PAGE)]
    found = hold(cache, mapping, (0, PAGE), (2 * PAGE - 1, far))
    assert extents(found) == [(0, far)] * 2
    found = hold(cache, mapping, (0, PAGE), (2 * PAGE, far))
    assert extents(found) == [(0, PAGE), (2 * PAGE, far)]
    found = hold(cache, mapping, *((i * PAGE, (i + 1) * PAGE) for i in range(10)))
    assert extents(found) == [(0, 4 * PAGE)] * 4 + [(4 * PAGE, 8 * PAGE)] * 4 + [(8 * PAGE, 10 * PAGE)] * 2
    found = hold(cache, mapping, (0, 9 * PAGE), (9 * PAGE, 10 * PAGE), (PAGE, 2 * PAGE), (0, 9 * PAGE))
    assert extents(found)[0] == (0, 9 * PAGE), "one range alone is not cut"
    assert all(
        p.begin <= a and b <= p.end for p, (a, b) in zip(found[2:], [(PAGE, 2 * PAGE), (0, 9 * PAGE)], strict=True)
    )
    found = cache.hold([(mapping, 0, PAGE), (other, PAGE, 2 * PAGE), (mapping, PAGE, 2 * PAGE)])
    assert found[0] is found[2] is not found[1]
    assert (found[0].mapping, found[1].mapping) == (mapping, other)


RANGES = st.lists(st.tuples(st.integers(0, 64 * PAGE - 1), st.integers(1, 9 * PAGE)), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(ranges=RANGES, limit=st.integers(1, 20 * PAGE))
def test_any_ranges_lie_in_their_pages_and_each_gives_its_bytes(
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
    first = {id(pages): index for index, pages in reversed(list(enumerate(found)))}
    order = [pages.begin // PAGE * PAGE for _, pages in sorted((i, found[i]) for i in first.values())]
    sources = {id(p): p.window.memory.data_ptr() for p in found if p.window is not None}
    assert [start for start, _ in device.pinned] == [sources[key] for key in first], order
    cache.close()
    assert sorted(device.unpinned) == sorted(device.pinned)


def test_what_is_needed_first_comes_first_and_nobody_waits_for_the_rest(mapping: FileMapping, device: Device) -> None:
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


def test_a_refusal_is_told_once_and_what_was_pinned_stays(
    mapping: FileMapping, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(refuse_from=2)
    cache = PageCache(device.pin, device.unpin, lambda: "memlock 64KiB")
    ranges = apart(5)
    with caplog.at_level(logging.WARNING, "weightstream"):
        found = [pages.source(*span) for pages, span in zip(hold(cache, mapping, *ranges), ranges, strict=True)]
        cache.close()
    assert [memory is not None for memory in found] == [True, True, False, False, False]
    assert device.calls == 3, "once refused, it is not asked again"
    (told,) = [record.getMessage() for record in caplog.records]
    for part in ("memlock is 64 KiB.", "(memlock 64KiB)", "staging ring"):
        assert part in told
    assert sorted(device.unpinned) == sorted(device.pinned)
    assert len(device.pinned) == 2


@pytest.mark.parametrize("error", [RuntimeError("the driver is gone"), MemoryError("no memory for it")])
def test_an_error_of_the_device_lets_nobody_wait_for_ever(
    mapping: FileMapping, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def pin(memory: torch.Tensor) -> None:
        raise error

    cache = PageCache(pin, lambda memory: None)
    ranges = apart(3)
    with caplog.at_level(logging.WARNING, "weightstream"):
        for pages, span in zip(hold(cache, mapping, *ranges), ranges, strict=True):
            assert pages.source(*span) is None
    cache.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert str(error) in told


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_cannot_be_read_pins_nothing_and_who_reads_it_is_told(
    cache: PageCache, mapping: FileMapping, device: Device, change: Callable[[Path], None]
) -> None:
    change(mapping.path)
    for pages, span in zip(hold(cache, mapping, *apart(3)), apart(3), strict=True):
        assert pages.source(*span) is None
        with pytest.raises(StoreError, match=str(mapping.path)):
            mapping.populate(*span)
    cache.close()
    assert device.calls == 0


def test_an_error_of_reading_that_passes_harms_nobody_later(
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
    """A disk that reads a piece when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, self.let = threading.Semaphore(0), threading.Semaphore(0)
        real = Window.populate

        def populate(window: Window, begin: int, end: int) -> None:
            self.reads.release()
            assert self.let.acquire(timeout=30)
            real(window, begin, end)

        monkeypatch.setattr(Window, "populate", populate)


def test_closing_while_it_reads_and_while_somebody_waits(
    mapping: FileMapping, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert not slow.reads.acquire(blocking=False), "it reads no further"
    assert device.calls == 0


def test_holding_again_lets_the_first_ranges_go(cache: PageCache, device: Device, mapping: FileMapping) -> None:
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


def test_without_a_device_ranges_are_read_and_nobody_waits(
    mapping: FileMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_cache_that_is_forgotten_unpins_everything_once(mapping: FileMapping, device: Device) -> None:
    cache = PageCache(device.pin, device.unpin)
    pages = hold(cache, mapping, *apart(3))
    assert all(each.source(each.begin, each.end) is not None for each in pages)
    del cache
    gc.collect()
    assert sorted(device.unpinned) == sorted(device.pinned)
    assert len(device.pinned) == 3


def test_a_cache_that_is_forgotten_while_it_pins_leaves_nothing_pinned(mapping: FileMapping, device: Device) -> None:
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
import sys, threading
from pathlib import Path
from weightstream.store.mapping import FileMapping
from weightstream.store.pages import PageCache
pinned, forever = [], threading.Event()

def pin(memory):
    if len(pinned) == 2:
        forever.wait()  # the thread is in the middle of it
    pinned.append(memory.data_ptr())

def unpin(memory):
    print("unpinned", pinned.index(memory.data_ptr()), flush=True)

mapping = FileMapping(Path(sys.argv[1]))
cache = PageCache(pin, unpin)
pages = cache.hold([(mapping, i * 8192, i * 8192 + 4096) for i in range(3)])
for each in pages[:2]:
    assert each.source(each.begin, each.end) is not None
"""


def test_an_interpreter_that_ends_unpins_what_it_pinned(mapping: FileMapping) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(mapping.path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["unpinned 0", "unpinned 1"]
    assert done.stderr == ""
