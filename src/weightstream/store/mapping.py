"""FileMapping: one file mapped copy-on-write, as bytes. Knows no formats, tensor names or devices.

`Memory` is the base class that it shares with `LazyMemory` (store/lazy.py), which is filled when it is first read.

The map is private and writable: a write into a tensor that views it stays in this process and never reaches the file.
Pages that were only read belong to the page cache, so a mapped model takes no memory of its own. A window is a second
map of a part of the file, shared and read-only: a device can copy directly from its pages. It does not show writes of
this process.

The kernel reports exactly which pages of a private map were written to: such a page is anonymous and no longer a page
of the file. PAGEMAP_SCAN (Linux 6.7) skips untouched pages; the fallback reads /proc/self/pagemap, 8 bytes per page.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from weightstream.errors import StoreError

_MAP_NORESERVE = 0x4000  # Python 3.11 has no name for it; without it a map larger than RAM may be refused
_MADV_DONTNEED, _MADV_POPULATE_READ = 4, 22
_MAP_FIXED = 0x10
_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
_NUM_REGIONS = 512
_CHUNK_PAGES = 1 << 18
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FAILED = ctypes.c_void_p(-1).value

Buffer = ctypes.Array[ctypes.c_ubyte]  # mapped memory, which is unmapped with its last view

_LIBC = ctypes.CDLL(None, use_errno=True)  # foreign calls release the GIL, so a slow disk stalls one thread only
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def _map(descriptor: int, nbytes: int, path: Path, flags: int, offset: int = 0, at: int | None = None) -> int:
    # Not mmap.mmap: before Python 3.13 it keeps a descriptor per file, and a folder may have thousands of files.
    protection = mmap.PROT_READ if flags & mmap.MAP_SHARED else mmap.PROT_READ | mmap.PROT_WRITE
    address: int | None = _LIBC.mmap(at, nbytes, protection, flags | _MAP_NORESERVE, descriptor, offset)
    if address is None or address == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise StoreError(f"{path}: cannot map {nbytes} bytes: {reason}; see `ulimit -v` and vm.max_map_count")
    return address


def _buffer(address: int, nbytes: int) -> Buffer:
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    # Tensors keep the buffer alive, so the map outlives the FileMapping. Not at exit: other threads may still read.
    weakref.finalize(buffer, _LIBC.munmap, address, nbytes).atexit = False
    return buffer


def reserve(nbytes: int, path: Path) -> Buffer:
    """Reserve whole pages of zeros, for `LazyMemory`: they take no memory until written to. Errors name `path`."""
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return _buffer(_map(-1, nbytes, path, _ANONYMOUS), nbytes)


def is_touched(buffer: Buffer) -> bool:
    """Whether a page of reserved memory was read or written to; True if the kernel does not know.

    `LazyMemory` uses it to find reads before it was filled, which saw zeros.
    """
    nbytes = ctypes.sizeof(buffer)
    in_core = np.empty(nbytes // mmap.PAGESIZE, dtype=np.uint8)  # a byte per page; bit 0: the page is in memory
    return bool(_LIBC.mincore(ctypes.addressof(buffer), nbytes, in_core.ctypes.data)) or bool((in_core & 1).any())


def zero_pages(buffer: Buffer, path: Path) -> None:
    """Replace the pages of reserved memory by new ones, which read as zeros and take no memory until written to."""
    _map(-1, ctypes.sizeof(buffer), path, _ANONYMOUS | _MAP_FIXED, at=ctypes.addressof(buffer))


def _populate(address: int, nbytes: int) -> int:
    """Read pages of a map into memory. Returns an error number, where a plain access would kill the process, or 0."""
    while _LIBC.madvise(address, nbytes, _MADV_POPULATE_READ):
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            return 0 if code == errno.EINVAL else code  # EINVAL: a kernel before 5.14, where accesses read the pages
    return 0


class Memory:
    """Bytes at fixed addresses that may have to be populated before they are read. `title` names them in errors."""

    path: Path
    nbytes: int
    is_filled = True  # whether reading an address gives the true bytes; False for a LazyMemory until it is filled

    def __init__(self, title: str, buffer: Buffer | None) -> None:
        self._title = title
        self._buffer = buffer
        self.address = ctypes.addressof(buffer) if buffer is not None else 0

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """A uint8 view of bytes [begin, end), which may not be populated yet; raises `StoreError` outside."""
        self.check_range(begin, end)
        if begin == end:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=end - begin, offset=begin)

    def locate(self, address: int) -> int | None:
        """The offset of `address` in the memory; None if it is outside."""
        return address - self.address if 0 <= address - self.address < self.nbytes else None

    def check(self) -> None:
        """Raise `StoreError` if the bytes are no longer available."""
        raise NotImplementedError

    def populate(self, begin: int, end: int) -> None:
        """Make bytes [begin, end) readable; raises `StoreError` where a plain access would fail."""
        raise NotImplementedError

    def populated(self, begin: int, end: int) -> torch.Tensor:
        """A readable uint8 view of bytes [begin, end); raises as `populate` does."""
        self.populate(begin, end)
        return self.bytes(begin, end)

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Copy bytes [begin, end) into `memory` and return the view of them; raises as `populate` does."""
        self.populate(begin, end)
        ctypes.memmove(memory.data_ptr(), self.address + begin, end - begin)
        return memory[: end - begin]

    def check_range(self, begin: int, end: int) -> None:
        """Raise `StoreError` unless bytes [begin, end) are inside."""
        if not 0 <= begin <= end <= self.nbytes:
            raise StoreError(f"{self._title}: bytes [{begin}, {end}) are not inside its {self.nbytes} bytes")


class FileIdentity(NamedTuple):
    """Facts that differ once a file was replaced, truncated or written to."""

    nbytes: int
    mtime_ns: int
    inode: int


class FileMapping(Memory):
    """A map of the regular file at `path`; raises `StoreError` if it cannot be opened or is not a regular file."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with opened_file(self.path) as descriptor:
            self.identity = _identity(os.fstat(descriptor))
            self.nbytes = self.identity.nbytes
            address = _map(descriptor, self.nbytes, self.path, mmap.MAP_PRIVATE) if self.nbytes else 0
            super().__init__(str(path), _buffer(address, self.nbytes) if address else None)

    def check(self) -> None:
        """Raise `StoreError` if the file was replaced, truncated, written to or removed since it was mapped."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise StoreError(f"{self.path}: mapped with {self.nbytes} bytes, now gone: {error}") from error
        self.compare(status)

    def compare(self, status: os.stat_result) -> None:
        """Raise `StoreError` if this is not the status of the file that was mapped."""
        identity = _identity(status)
        if identity != self.identity:
            raise StoreError(
                f"{self.path}: changed since it was mapped: (bytes, mtime ns, inode) was {tuple(self.identity)}, "
                f"is {tuple(identity)}; load the model again"
            )

    def populate(self, begin: int, end: int) -> None:
        """Read bytes [begin, end) into memory; raises `StoreError` where a plain access would kill the process."""
        self.check()
        self.check_range(begin, end)
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self.raise_unread(_populate(self.address + start, end - start), begin, end)

    def raise_unread(self, code: int, begin: int, end: int) -> None:
        """Raise `StoreError` for an error number of `_populate`."""
        if code:
            raise StoreError(
                f"{self.path}: reading {end - begin} bytes at offset {begin} failed: {os.strerror(code)} "
                f"({errno.errorcode.get(code, code)}); the file now holds {os.stat(self.path).st_size} bytes"
            )

    def written(self) -> list[tuple[int, int]] | None:
        """The ranges (begin, end) that this process has written to, in whole pages; None: unknown."""
        return written_ranges(self.address, self.nbytes) if self.nbytes else []

    def leave(self, begin: int, end: int) -> None:
        """Unmap the pages inside [begin, end) that this process did not write to. Called when a copy of them exists.

        The next read maps them again. Written pages stay: they exist only in this process.
        """
        start, stop = -(-(self.address + begin) // mmap.PAGESIZE), (self.address + end) // mmap.PAGESIZE
        if start >= stop or (written := written_ranges(start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE)) is None:
            return
        at, last = start * mmap.PAGESIZE, stop * mmap.PAGESIZE
        # unmap each gap between written ranges; the empty range at the end closes the last gap
        for first, after in [(at + first, at + after) for first, after in written] + [(last, last)]:
            if at < first:
                _LIBC.madvise(at, first - at, _MADV_DONTNEED)
            at = after

    def window(self, begin: int, end: int) -> Window:
        """Map bytes [begin, end), in whole pages, shared and read-only; raises `StoreError` if the file changed."""
        self.check_range(begin, end)
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        with opened_file(self.path) as descriptor:
            self.compare(os.fstat(descriptor))
            buffer = _buffer(_map(descriptor, end - start, self.path, mmap.MAP_SHARED, start), end - start)
        return Window(self, start, torch.frombuffer(buffer, dtype=torch.uint8))


class Window:
    """Pages of a file, shared with all processes that read it: `memory` views its bytes from `begin` on."""

    def __init__(self, mapping: FileMapping, begin: int, memory: torch.Tensor) -> None:
        self.mapping = mapping
        self.begin = begin
        self.memory = memory

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """A view of bytes [begin, end) of the file; raises `IndexError` outside the window."""
        if not self.begin <= begin <= end <= self.begin + self.memory.numel():
            raise IndexError(f"[{begin}, {end}) is not in a window of {self.memory.numel()} bytes from {self.begin}")
        return self.memory[begin - self.begin : end - self.begin]

    def is_cached(self) -> bool:
        """Whether all pages are in the page cache; for files of other users the kernel always says so."""
        in_core = np.empty(-(-self.memory.numel() // mmap.PAGESIZE), dtype=np.uint8)
        return not _LIBC.mincore(self.memory.data_ptr(), self.memory.numel(), in_core.ctypes.data) and bool(
            (in_core & 1).all()
        )

    def populate(self, begin: int, end: int) -> None:
        """As `FileMapping.populate`; `begin` is the start of a page."""
        self.mapping.check()
        code = _populate(self.memory.data_ptr() + begin - self.begin, end - begin)
        self.mapping.raise_unread(code, begin, end)


class FileRange(NamedTuple):
    """Bytes [begin, end) of a file."""

    mapping: FileMapping
    begin: int
    end: int


def written_ranges(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """The ranges (begin, end) of written pages, in bytes relative to `address`; None: unknown."""
    first, end = address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        with opened_file(Path("/proc/self/pagemap")) as descriptor:
            try:
                found = _scan(descriptor, first, end)
            except OSError:  # an older kernel
                found = _read_entries(descriptor, first, end)
    except OSError:
        return None
    return [(start - address, stop - address) for start, stop in found]


def _scan(descriptor: int, start: int, end: int) -> list[tuple[int, int]]:
    regions = (ctypes.c_uint64 * (3 * _NUM_REGIONS))()
    found: list[tuple[int, int]] = []
    while start < end:
        # struct pm_scan_arg: size, flags, start, end, walk_end (set by the kernel), vec, vec_len, max_pages (no limit)
        words = [96, 0, start, end, 0, ctypes.addressof(regions), _NUM_REGIONS, 0]
        # then category_inverted, category_mask, category_anyof_mask, return_mask. Inverting _FILE and requiring it
        # selects pages that are not of a file; of these, the ones that are present or swapped out.
        argument = (ctypes.c_uint64 * 12)(*words, _FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT)
        num = fcntl.ioctl(descriptor, _SCAN, argument)
        found += [(regions[3 * i], regions[3 * i + 1]) for i in range(num)]
        start = argument[4]
    return found


def _read_entries(descriptor: int, start: int, end: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first in range(start // mmap.PAGESIZE, end // mmap.PAGESIZE, _CHUNK_PAGES):
        num = min(_CHUNK_PAGES, end // mmap.PAGESIZE - first)
        entries = np.frombuffer(os.pread(descriptor, 8 * num, 8 * first), dtype=np.uint64)
        flags = entries >> np.uint64(61)  # bit 0: of a file or shared; bit 1: swapped out; bit 2: present
        anonymous = np.flatnonzero((flags > 1) & (flags % 2 == 0)).tolist()
        found += [((first + index) * mmap.PAGESIZE, (first + index + 1) * mmap.PAGESIZE) for index in anonymous]
    return found


@contextmanager
def opened_file(path: Path, flags: int = 0) -> Iterator[int]:
    """Open the regular file at `path` and yield its descriptor; raises `StoreError` if that is not possible."""
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


def _identity(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino)
