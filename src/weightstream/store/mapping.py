"""FileMapping: one file mapped copy-on-write, as bytes. It knows nothing of formats, tensors' names or devices.

The map is private and writable: a write into a tensor that views it stays in this process and never reaches the
file. Pages that were only read belong to the page cache, so a mapped model costs no memory of its own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import weakref
from pathlib import Path

import torch

from weightstream.errors import StoreError

_MAP_NORESERVE = 0x4000  # Python 3.11 does not name it; without it a map larger than RAM may be refused
_MADV_POPULATE_READ = 22
_MAP_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)  # foreign calls release the GIL, so a slow disk stalls one thread only
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(descriptor: int, nbytes: int, path: Path) -> ctypes.Array[ctypes.c_ubyte]:
    # Not mmap.mmap: before Python 3.13 it keeps a descriptor per file, and folders hold thousands of files.
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    address = _LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise StoreError(f"{path}: cannot map {nbytes} bytes: {reason}; see `ulimit -v` and vm.max_map_count")
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    # Tensors hold the buffer, so the map outlives the FileMapping. Not at exit: other threads may still read.
    weakref.finalize(buffer, _LIBC.munmap, address, nbytes).atexit = False
    return buffer


class FileMapping:
    """Maps the regular file at `path`; raises `StoreError` when it cannot be opened, is no regular file, or changed."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:  # O_NONBLOCK: opening a FIFO would wait for a writer
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path}: cannot open: {error}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"{self.path}: not a regular file (mode {stat.filemode(status.st_mode)})")
            self.nbytes = status.st_size
            self.identity = (status.st_size, status.st_mtime_ns, status.st_ino)
            self._buffer = _map(descriptor, self.nbytes, self.path) if self.nbytes else None
        finally:
            os.close(descriptor)
        self._address = ctypes.addressof(self._buffer) if self._buffer is not None else 0

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """Returns bytes [begin, end) as a uint8 tensor that views the map; raises `StoreError` outside the file."""
        self._check_range(begin, end)
        if begin == end or self._buffer is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=end - begin, offset=begin)

    def locate(self, address: int) -> int | None:
        """Returns the file offset that `address` views, or None when it lies outside the map."""
        return address - self._address if 0 <= address - self._address < self.nbytes else None

    def check(self) -> None:
        """Raises `StoreError` when the file was replaced, truncated, written or removed since it was mapped."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise StoreError(f"{self.path}: mapped with {self.nbytes} bytes, now gone: {error}") from error
        found = (status.st_size, status.st_mtime_ns, status.st_ino)
        if found != self.identity:
            raise StoreError(
                f"{self.path}: changed since it was mapped: (bytes, mtime ns, inode) was {self.identity}, "
                f"is {found}; load the model again"
            )

    def populate(self, begin: int, end: int) -> None:
        """Reads bytes [begin, end) into memory; raises `StoreError` where a plain access would kill the process."""
        self.check()
        code = self._advise(begin, end, _MADV_POPULATE_READ)
        if code not in (0, errno.EINVAL):  # EINVAL: a kernel before 5.14; the check above is all there is
            size = os.stat(self.path).st_size
            raise StoreError(
                f"{self.path}: reading {end - begin} bytes at offset {begin} failed: {os.strerror(code)} "
                f"({errno.errorcode.get(code, code)}); the file now holds {size} bytes"
            )

    def _advise(self, begin: int, end: int, advice: int) -> int:
        self._check_range(begin, end)
        if begin == end:
            return 0
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        while _LIBC.madvise(self._address + start, end - start, advice):
            code = ctypes.get_errno()
            if code not in (errno.EINTR, errno.EAGAIN):
                return code
        return 0

    def _check_range(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= self.nbytes:
            raise StoreError(f"{self.path}: bytes [{begin}, {end}) are not inside its {self.nbytes} bytes")
