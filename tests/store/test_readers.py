"""Direct reads: the bytes of the file or a clear error, whatever the file, the disk or a signal does meanwhile."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import logging
import mmap
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mapped import rss_nbytes
from repeats import examples
from weightstream.errors import InvariantError, StoreError
from weightstream.store.mapping import FileMapping
from weightstream.store.readers import CachedFile, DirectFile

PAGE = 4096
NBYTES = 10 * PAGE + 123

open_file, read_vector = os.open, os.preadv


def aligned(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)


def direct(path: Path) -> DirectFile:
    return DirectFile(FileMapping(path))


def content(nbytes: int = NBYTES) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def read(file: DirectFile, begin: int, end: int, fill: int = 0xEE) -> bytes:
    """The bytes that a read returns. Memory that it does not write shows `fill`."""
    memory = aligned(-(-end // PAGE) * PAGE - begin // PAGE * PAGE).fill_(fill)
    view = file.read(begin, end, memory)
    assert begin == end or view.data_ptr() == memory.data_ptr() + begin % PAGE
    return bytes(view.numpy())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    made.write_bytes(content())
    return made


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Check that the test closes all that it opens."""
    gc.collect()
    before = psutil.Process().num_fds()
    yield
    gc.collect()  # pytest's record of an error refers to the frames that raised it
    assert psutil.Process().num_fds() == before


def num_cached(path: Path) -> int:
    """Pages of the file in the page cache. (A read with RWF_NOWAIT would find out too, but reads them in.)"""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-len(mapped) // PAGE))()
        assert ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(mapped)), pages) == 0
        del first  # or the map could not be closed
    return sum(page & 1 for page in pages)


def forget(path: Path) -> None:
    """Drop the file from the page cache. Skip the test if that has no effect."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if num_cached(path):
        pytest.skip(f"the file system of {path} keeps what it read")


def refuse_open(path: Any, flags: int, *rest: Any, **options: Any) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return open_file(path, flags, *rest, **options)


def is_direct(number: int) -> bool:
    return bool(fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT)


# -- values ----------------------------------------------------------------------------------------------------------


@examples(150)
@given(data=st.data(), nbytes=st.integers(1, 5 * PAGE))
def test_any_range_of_any_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, nbytes: int) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content(nbytes))
    begin = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(begin, nbytes))
    file = direct(path)
    assert read(file, begin, end) == content(nbytes)[begin:end]


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 512, 3 * PAGE])
def test_the_tail_of_a_file(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "tail").write_bytes(content(nbytes))
    file = direct(tmp_path / "tail")
    for length in (0, 1, nbytes // 2, nbytes):
        assert read(file, nbytes - length, nbytes) == content(nbytes)[nbytes - length :]


def test_nothing_is_written_outside_the_aligned_span(path: Path) -> None:
    memory = aligned(4 * PAGE).fill_(7)
    direct(path).read(PAGE + 5, 2 * PAGE - 5, memory)
    assert bytes(memory[:PAGE].numpy()) == content()[PAGE : 2 * PAGE]
    assert memory[PAGE:].unique().tolist() == [7]


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (5, 4), (0, NBYTES + 1), (NBYTES + 1, NBYTES + 1)])
def test_a_range_outside_the_file_is_refused(path: Path, begin: int, end: int) -> None:
    with pytest.raises(StoreError, match=rf"model.safetensors: bytes \[{begin}, {end}\) are not inside its {NBYTES}"):
        direct(path).read(begin, end, aligned(20 * PAGE))


def test_memory_of_the_wrong_size_is_refused(path: Path) -> None:
    file = direct(path)
    with pytest.raises(InvariantError, match=r"\[4000, 4100\) need 8192 bytes at a multiple of 4096; got 4096 bytes"):
        file.read(4000, 4100, aligned(PAGE))
    with pytest.raises(InvariantError, match="got 8192 bytes at 0x"):
        file.read(0, 100, aligned(3 * PAGE)[512 : 512 + 2 * PAGE])


# -- past the page cache ---------------------------------------------------------------------------------------------


def test_reads_are_direct_and_leave_nothing_in_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(path)
    flags: list[tuple[bool, int]] = []

    def preadv(number: int, *rest: Any) -> int:
        flags.append((is_direct(number), fcntl.fcntl(number, fcntl.F_GETFD)))
        return read_vector(number, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(direct(path), 0, NBYTES) == content()
    assert flags == [(True, fcntl.FD_CLOEXEC)]
    monkeypatch.undo()
    assert num_cached(path) == 0
    path.read_bytes()
    assert num_cached(path) == 11  # or the line before proves nothing


def test_written_bytes_that_are_not_on_disk_yet_are_read(path: Path) -> None:
    file, before = direct(path), os.stat(path).st_mtime_ns
    assert read(file, 0, 100) == content()[:100]
    with path.open("r+b") as handle:
        handle.write(b"new")
    os.utime(path, ns=(before, before))
    assert read(file, 0, 100) == b"new" + content()[3:100]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_a_file_system_that_refuses_to_open_direct(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget(path)
    monkeypatch.setattr(os, "open", refuse_open)
    with caplog.at_level(logging.INFO):
        file = direct(path)
        for begin, end in [(0, NBYTES), (PAGE + 7, 3 * PAGE + 1), (NBYTES - 1, NBYTES)]:
            assert read(file, begin, end) == content()[begin:end]
    assert said(caplog) == [f"{path}: no direct reads here; reading through the page cache"]
    assert num_cached(path) == 0  # including the last, partial page


def test_a_file_system_that_refuses_only_direct_reads(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Four reads are refused at the same time. All of them succeed, one message is logged, and no direct read is
    tried again."""
    forget(path)
    barrier, refused = threading.Barrier(4), []

    def preadv(number: int, *rest: Any) -> int:
        if is_direct(number):
            barrier.wait(10)
            refused.append(number)
            raise OSError(errno.EINVAL, "Invalid argument")
        return read_vector(number, *rest)

    def drop(*about: int) -> None:  # a page that another thread uses at the moment would stay
        are_read.wait(10)
        with one_by_one:
            give_up(*about)

    monkeypatch.setattr(os, "preadv", preadv)
    file, give_up, are_read, one_by_one = direct(path), os.posix_fadvise, threading.Barrier(4), threading.Lock()
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fadvise", drop)
            assert list(pool.map(lambda i: read(file, i, NBYTES - i), range(4))) == [
                content()[i : NBYTES - i] for i in range(4)
            ]
        assert num_cached(path) == 0
        assert read(file, 5, 6) == content()[5:6]
    assert len(refused) == 4
    assert len(said(caplog)) == 1


def test_a_lasting_refusal_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(*_: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StoreError, match=r"reading 4096 bytes at offset 4096 failed: Invalid argument \(EINVAL\)"):
        read(direct(path), PAGE, PAGE + 1)


def test_a_file_in_memory() -> None:
    """Kernels differ in whether such a file can be opened for direct reads."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    path = Path(f"/dev/shm/weightstream-test-{os.getpid()}")
    try:
        path.write_bytes(content())
        for begin, end in [(0, NBYTES), (PAGE - 1, PAGE + 1), (NBYTES - 5, NBYTES)]:
            assert read(direct(path), begin, end) == content()[begin:end]
    finally:
        path.unlink()


# -- faults ----------------------------------------------------------------------------------------------------------


def shortened(limits: Callable[[], int]) -> Callable[..., int]:
    """A disk that returns at most `limit` bytes per request, and other bytes after them."""

    def preadv(number: int, views: list[memoryview], offset: int) -> int:
        got = min(read_vector(number, views, offset), limits())
        views[0][got:] = b"\xee" * (len(views[0]) - got)
        return got

    return preadv


@examples(60)
@given(begin=st.integers(0, NBYTES), limit=st.integers(PAGE, 3 * PAGE))
def test_short_reads_are_continued(tmp_path_factory: pytest.TempPathFactory, begin: int, limit: int) -> None:
    path = tmp_path_factory.getbasetemp() / "short"
    path.write_bytes(content())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", shortened(lambda: limit))
        assert read(direct(path), begin, NBYTES) == content()[begin:]


def test_a_short_read_is_continued_at_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is, from the page in which it ended, since requests are aligned. Nothing else is read twice."""
    offsets: list[int] = []
    limits = iter([PAGE + 1, 2 * PAGE, 512, 3 * PAGE, NBYTES])

    def limit() -> int:
        return next(limits)

    inner = shortened(limit)

    def preadv(number: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return inner(number, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(direct(path), 0, NBYTES) == content()
    assert offsets == [0, PAGE, 3 * PAGE, 3 * PAGE, 6 * PAGE]


@pytest.mark.parametrize(
    ("limits", "got"), [([0], 0), ([1, 1], 0), ([PAGE + 200, 100], PAGE + 200 - 10), ([2 * PAGE, 0], 2 * PAGE - 10)]
)
def test_a_read_that_stops_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, limits: list[int], got: int
) -> None:
    left = iter(limits)
    monkeypatch.setattr(os, "preadv", shortened(lambda: next(left)))
    with pytest.raises(StoreError, match=rf"{path}: short read at offset 10: wanted {NBYTES - 20} bytes, got {got}$"):
        read(direct(path), 10, NBYTES - 10)
    assert next(left, None) is None


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.ESTALE])
def test_an_error_of_the_disk_names_file_offset_and_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, descriptors: None
) -> None:
    failed: list[int] = []

    def preadv(number: int, views: list[memoryview], offset: int) -> int:
        if offset >= 2 * PAGE and not failed:  # a second try would hide it
            failed.append(offset)
            raise OSError(code, os.strerror(code))
        return min(read_vector(number, views, offset), 2 * PAGE)

    monkeypatch.setattr(os, "preadv", preadv)
    file = direct(path)
    message = rf"{path}: reading {9 * PAGE} bytes at offset {2 * PAGE} failed: .* \({errno.errorcode[code]}\)"
    with pytest.raises(StoreError, match=message) as caught:
        read(file, 0, NBYTES)
    assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    assert read(file, 0, NBYTES) == content()  # the file outlives the error


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no pthread_kill")
def test_signals_during_reads_do_not_surface(path: Path) -> None:
    """Not SIGALRM, which the watchdog uses."""
    count, stop, main = 0, threading.Event(), threading.get_ident()

    def handler(*_: Any) -> None:
        nonlocal count
        count += 1

    def shoot() -> None:
        while not stop.wait(0.0002):
            signal.pthread_kill(main, signal.SIGUSR1)

    old = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=shoot)
    thread.start()
    try:
        file, reads = direct(path), 0
        while count < 50 or reads < 100:
            assert read(file, reads, NBYTES - reads) == content()[reads : NBYTES - reads]
            reads = (reads + 1) % (NBYTES // 2) if count < 50 else reads + 1
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, old)


# -- the file changes ------------------------------------------------------------------------------------------------


def replace(path: Path) -> None:
    old = os.stat(path)
    other = path.with_name("other")
    other.write_bytes(bytes(NBYTES))
    os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
    os.replace(other, path)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def truncate(path: Path) -> None:
    old = os.stat(path)
    os.truncate(path, PAGE)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


def grow(path: Path) -> None:
    old = os.stat(path)
    os.truncate(path, NBYTES + 1)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


@pytest.mark.parametrize("opened", [False, True], ids=["unopened", "opened"])
@pytest.mark.parametrize("change", [replace, touch, truncate, grow])
def test_a_file_that_changed_is_refused(path: Path, change: Callable[[Path], None], opened: bool) -> None:
    file = direct(path)
    if opened:
        read(file, 0, 10)
    change(path)
    with pytest.raises(StoreError, match=rf"{path}: changed since .* was \({NBYTES}, .*; load the model again"):
        read(file, 0, 10)


@pytest.mark.parametrize("change", [replace, touch, truncate, grow])
def test_a_file_that_changes_while_it_is_read_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    def preadv(*rest: Any) -> int:
        change(path)
        return read_vector(*rest)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StoreError, match=rf"{path}: changed since .* was \({NBYTES}, .*; load the model again"):
        read(direct(path), 2 * PAGE, NBYTES)


@pytest.mark.parametrize("opened", [False, True], ids=["unopened", "opened"])
def test_a_missing_file_is_refused(path: Path, opened: bool) -> None:
    file = direct(path)
    if opened:
        read(file, 0, 10)
    path.unlink()
    with pytest.raises(StoreError, match=rf"{path}: mapped with {NBYTES} bytes, now gone"):
        read(file, 0, 10)


def test_a_fifo_in_its_place_is_not_opened(path: Path) -> None:
    """Opening it would wait for a writer."""
    file = direct(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreError, match="changed since"):
        read(file, 0, 10)


def test_a_file_replaced_before_it_is_opened_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced between two checks of the path, and restored before the second."""
    other, file = path.with_name("other"), direct(path)
    other.write_bytes(bytes(NBYTES))
    monkeypatch.setattr(os, "open", lambda path, *rest: open_file(other, *rest))
    with pytest.raises(StoreError, match="changed since"):
        read(file, 0, 10)
    monkeypatch.undo()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_a_file_that_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The page cache is not used instead, even if that could be opened."""

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return open_file(path, flags, *rest)

    file = direct(path)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match=f"{path}: cannot open: .*{os.strerror(code)}"):
        read(file, 0, 10)


# -- descriptors and threads -----------------------------------------------------------------------------------------


def test_a_read_leaves_no_descriptor_and_reads_run_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None
) -> None:
    barrier, numbers = threading.Barrier(4), set()

    def preadv(number: int, *rest: Any) -> int:
        numbers.add(number)
        barrier.wait(10)  # all four are in flight
        return read_vector(number, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    file = direct(path)
    before = psutil.Process().num_fds()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: read(file, i, NBYTES), range(4))) == [content()[i:] for i in range(4)]
    assert len(numbers) == 4
    assert psutil.Process().num_fds() == before


def test_a_refused_file_closes(path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None) -> None:
    file = direct(path)
    monkeypatch.setattr(os, "open", lambda _, *rest: open_file(__file__, *rest))
    with pytest.raises(StoreError, match="changed since"):
        read(file, 0, 10)


# -- through the page cache --------------------------------------------------------------------------------------------


@examples(100)
@given(data=st.data(), nbytes=st.integers(1, 5 * PAGE), limit=st.integers(1, 2 * PAGE))
def test_any_range_through_the_page_cache(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, nbytes: int, limit: int
) -> None:
    """At any address of memory, and however few bytes a request returns, nothing else is written."""
    path = tmp_path_factory.getbasetemp() / "cached"
    path.write_bytes(content(nbytes))
    begin = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(begin, nbytes))
    memory = torch.full((nbytes + 3,), 7, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", shortened(lambda: limit))
        found = CachedFile(FileMapping(path)).read(begin, end, memory[1:])
    assert bytes(found.numpy()) == content(nbytes)[begin:end]
    assert memory[0] == 7
    assert memory[1 + end - begin :].unique().tolist() == [7]


def test_the_page_cache_is_read_and_kept_and_no_page_is_mapped(path: Path) -> None:
    forget(path)
    mapping = FileMapping(path)
    mapping.bytes(0, 4).fill_(9)  # private to this process
    before = rss_nbytes(mapping)
    memory = torch.empty(NBYTES, dtype=torch.uint8)
    assert bytes(CachedFile(mapping).read(0, NBYTES, memory).numpy()) == content()
    assert num_cached(path) == 11
    assert rss_nbytes(mapping) == before


@pytest.mark.parametrize("change", [replace, touch, truncate, grow])
def test_a_changed_file_is_refused_by_the_page_cache_too(path: Path, change: Callable[[Path], None]) -> None:
    file, memory = CachedFile(FileMapping(path)), torch.empty(NBYTES, dtype=torch.uint8)
    file.read(0, 10, memory)
    change(path)
    with pytest.raises(StoreError, match=rf"{path}: changed since .*; load the model again"):
        file.read(0, 10, memory)


def test_errors_of_the_page_cache_name_file_and_offset(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memory = CachedFile(FileMapping(path)), torch.empty(NBYTES, dtype=torch.uint8)
    with pytest.raises(StoreError, match=rf"bytes \[5, {NBYTES + 1}\) are not inside its {NBYTES}"):
        file.read(5, NBYTES + 1, memory)
    monkeypatch.setattr(os, "preadv", shortened(iter([100, 0]).__next__))
    with pytest.raises(StoreError, match=rf"{path}: short read at offset 5: wanted 200 bytes, got 100"):
        file.read(5, 205, memory)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StoreError, match=rf"{path}: reading 10 bytes at offset 7 failed: Input/output error \(EIO\)"):
        file.read(7, 17, memory)


def test_a_file_that_changes_while_the_page_cache_is_read_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, memory = CachedFile(FileMapping(path)), torch.empty(NBYTES, dtype=torch.uint8)

    def preadv(*about: Any) -> int:
        touch(path)
        return read_vector(*about)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StoreError, match=rf"{path}: changed since"):
        file.read(0, 10, memory)
