"""FileMapping: one file mapped copy-on-write, as bytes. It knows nothing of formats, tensors' names or devices.

The map is private and writable: a write into a tensor that views it stays in this process and never reaches the
file. Pages that were only read belong to the page cache, so a mapped model costs no memory of its own. A window is a
second map of a part of the file, shared and read-only: a device can copy from its pages where they are, and pages that
were written to in this process are not in it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weightstream.errors import StoreError
from weightstream.store.pagemap import written_ranges

_MAP_NORESERVE = 0x4000  # Python 3.11 does not name it; without it a map larger than RAM may be refused
_MADV_POPULATE_READ = 22
_MAP_FIXED = 0x10
_POISON_NBYTES = 32 << 20  # so that the maps of a model of 400 GB are fewer than vm.max_map_count
_MAP_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)  # foreign calls release the GIL, so a slow disk stalls one thread only
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(descriptor: int, nbytes: int, path: Path, *, shared: bool = False, offset: int = 0) -> Any:
    # Not mmap.mmap: before Python 3.13 it keeps a descriptor per file, and folders hold thousands of files.
    flags = _MAP_NORESERVE | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    flags |= mmap.MAP_ANONYMOUS if descriptor < 0 else 0
    protection = mmap.PROT_READ if shared else mmap.PROT_READ | mmap.PROT_WRITE
    address = _LIBC.mmap(None, nbytes, protection, flags, descriptor, offset)
    if address == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise StoreError(f"{path}: cannot map {nbytes} bytes: {reason}; see `ulimit -v` and vm.max_map_count")
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    # Tensors hold the buffer, so the map outlives the FileMapping. Not at exit: other threads may still read.
    weakref.finalize(buffer, _LIBC.munmap, address, nbytes).atexit = False
    return buffer


def reserve(nbytes: int, path: Path) -> Any:
    """Zeros in whole pages, which take no memory until they are written to; `path` is what an error names."""
    return _map(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, path)


def give_back(buffer: Any) -> None:
    """Make zeros of reserved memory again, which take none."""
    _put(buffer, 0, ctypes.sizeof(buffer), mmap.MAP_ANONYMOUS, -1)


def poison(buffer: Any) -> None:
    """Make bytes 0xFF of it, NaN in every float, which take no memory either: who reads them sees what they are."""
    descriptor = _nan_file()
    for begin in range(0, ctypes.sizeof(buffer), _POISON_NBYTES) if descriptor >= 0 else ():
        _put(buffer, begin, min(_POISON_NBYTES, ctypes.sizeof(buffer) - begin), 0, descriptor)


def _put(buffer: Any, begin: int, nbytes: int, flags: int, descriptor: int) -> None:
    flags |= _MAP_FIXED | _MAP_NORESERVE | mmap.MAP_PRIVATE
    address = ctypes.addressof(buffer) + begin
    if _LIBC.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) == _MAP_FAILED:
        raise StoreError(f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}; see vm.max_map_count")


@cache
def _nan_file() -> int:
    """A file in memory; -1 where there are none, and what is reserved stays zeros."""
    try:
        descriptor = os.memfd_create("weightstream")
        os.write(descriptor, b"\xff" * _POISON_NBYTES)
    except (AttributeError, OSError):
        return -1
    return descriptor


def _populate(address: int, nbytes: int) -> int:
    """Read pages of a map into memory; returns the error number, where a plain access would kill the process."""
    while _LIBC.madvise(address, nbytes, _MADV_POPULATE_READ):
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            return 0 if code == errno.EINVAL else code  # EINVAL: a kernel before 5.14
    return 0


class FileMapping:
    """Maps the regular file at `path`; raises `StoreError` when it cannot be opened, is no regular file, or changed."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with opened(self.path) as descriptor:
            self.identity = _identity(os.fstat(descriptor))
            self.nbytes = self.identity[0]
            self._buffer = _map(descriptor, self.nbytes, self.path) if self.nbytes else None
        self._address = ctypes.addressof(self._buffer) if self._buffer is not None else 0

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """Returns bytes [begin, end) as a uint8 tensor that views the map; raises `StoreError` outside the file."""
        self.check_range(begin, end)
        if begin == end or self._buffer is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=end - begin, offset=begin)

    def locate(self, address: int) -> int | None:
        """Returns the file offset that `address` views, or None when it lies outside the map."""
        return address - self._address if 0 <= address - self._address < self.nbytes else None

    def check(self) -> None:
        """Raises `StoreError` when the file was replaced, truncated, written or removed since it was mapped."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise StoreError(f"{self.path}: mapped with {self.nbytes} bytes, now gone: {error}") from error
        self.compare(found)

    def compare(self, status: os.stat_result) -> None:
        """Raises `StoreError` when this is not the state of the file that was mapped."""
        found = _identity(status)
        if found != self.identity:
            raise StoreError(
                f"{self.path}: changed since it was mapped: (bytes, mtime ns, inode) was {self.identity}, "
                f"is {found}; load the model again"
            )

    def populate(self, begin: int, end: int) -> None:
        """Reads bytes [begin, end) into memory; raises `StoreError` where a plain access would kill the process."""
        self.check()
        self.check_range(begin, end)
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self.raise_unread(_populate(self._address + start, end - start), begin, end)

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Copies bytes [begin, end) into `memory` and returns the view of these; raises as `populate` does."""
        self.populate(begin, end)
        ctypes.memmove(memory.data_ptr(), self._address + begin, end - begin)
        return memory[: end - begin]

    def raise_unread(self, code: int, begin: int, end: int) -> None:
        """Raises `StoreError` for an error number of `populate`."""
        if code:
            raise StoreError(
                f"{self.path}: reading {end - begin} bytes at offset {begin} failed: {os.strerror(code)} "
                f"({errno.errorcode.get(code, code)}); the file now holds {os.stat(self.path).st_size} bytes"
            )

    def written(self) -> list[tuple[int, int]] | None:
        """Returns the ranges of the file that this process holds bytes of its own for; None where nobody can tell."""
        return written_ranges(self._address, self.nbytes) if self.nbytes else []

    def window(self, begin: int, end: int) -> Window:
        """Maps bytes [begin, end), in whole pages, shared and read-only; raises `StoreError` if the file changed."""
        self.check_range(begin, end)
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        with opened(self.path) as descriptor:
            self.compare(os.fstat(descriptor))
            buffer = _map(descriptor, end - start, self.path, shared=True, offset=start)
        return Window(self, start, torch.frombuffer(buffer, dtype=torch.uint8))

    def check_range(self, begin: int, end: int) -> None:
        """Raises `StoreError` unless bytes [begin, end) are in the file."""
        if not 0 <= begin <= end <= self.nbytes:
            raise StoreError(f"{self.path}: bytes [{begin}, {end}) are not inside its {self.nbytes} bytes")


class Window:
    """Pages of a file, shared with every process that reads it: `memory` holds the bytes from `begin` on."""

    def __init__(self, mapping: FileMapping, begin: int, memory: torch.Tensor) -> None:
        self.mapping, self.begin, self.memory = mapping, begin, memory

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """Returns bytes [begin, end) of the file; raises `IndexError` outside of the window."""
        if not self.begin <= begin <= end <= self.begin + self.memory.numel():
            raise IndexError(f"[{begin}, {end}) is not in a window of {self.memory.numel()} bytes from {self.begin}")
        return self.memory[begin - self.begin : end - self.begin]

    def populate(self, begin: int, end: int) -> None:
        """As `FileMapping.populate`; `begin` is the start of a page."""
        self.mapping.check()
        code = _populate(self.memory.data_ptr() + begin - self.begin, end - begin)
        self.mapping.raise_unread(code, begin, end)


@contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of the regular file at `path`; raises `StoreError` where that cannot be."""
    try:  # O_NONBLOCK: opening a FIFO would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot open: {error}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise StoreError(f"{path}: not a regular file (mode {stat.filemode(mode)})")
        yield descriptor
    finally:
        os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino
