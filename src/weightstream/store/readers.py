"""DirectFile and CachedFile: read one file past the page cache or through it. Knows no formats, names or devices.

A direct request begins and ends at multiples of 4096, in the file and in memory, so a read brings in a little more than
was requested. Each read opens the file, which takes microseconds where the read takes milliseconds, so that no
descriptor is kept for each of thousands of files.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from weightstream.errors import InvariantError, StoreError
from weightstream.store.mapping import FileMapping, opened_file

_ALIGNMENT = 4096  # no disk in use has larger logical blocks

logger = logging.getLogger("weightstream")


class DirectFile:
    """The file of a mapping, read directly; it must not have changed since it was mapped."""

    def __init__(self, mapping: FileMapping) -> None:
        self.path = mapping.path
        self._mapping = mapping
        self.is_direct = True  # until the file system refuses: then reads go through the page cache

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Read bytes [begin, end) into `memory` and return the view of exactly these; several threads may call it.

        `memory`: flat uint8 at a multiple of 4096, with room for [begin, end) rounded outwards to multiples of 4096.
        Raises `StoreError` if the file changed or cannot be read.
        """
        self._mapping.check()
        self._mapping.check_range(begin, end)
        if begin == end:
            return memory[:0]
        start = begin // _ALIGNMENT * _ALIGNMENT
        span = -(-end // _ALIGNMENT) * _ALIGNMENT - start
        if memory.numel() < span or memory.data_ptr() % _ALIGNMENT:  # else the page cache would be used silently
            raise InvariantError(
                f"{self.path}: [{begin}, {end}) need {span} bytes at a multiple of {_ALIGNMENT}; "
                f"got {memory.numel()} bytes at {memory.data_ptr():#x}"
            )
        numpy: Any = memory.numpy()
        reached = self._fill(memoryview(numpy)[:span], start, end)
        self._mapping.check()
        _refuse_short(self.path, begin, end, reached)
        return memory[begin - start : end - start]

    def _fill(self, view: memoryview, start: int, end: int) -> int:
        """Read until `end` or the end of the file; returns the offset reached. Continues aligned after a short read."""
        direct, reached, before = os.O_DIRECT if self.is_direct else 0, start, -1
        try:
            with opened_file(self.path, direct) as descriptor:
                self._mapping.compare(os.fstat(descriptor))
                while before < reached < end:
                    offset = reached // _ALIGNMENT * _ALIGNMENT
                    before, reached = reached, offset + _request(self.path, descriptor, view[offset - start :], offset)
                if not direct:
                    os.posix_fadvise(descriptor, start, len(view), os.POSIX_FADV_DONTNEED)
            return max(before, reached)
        except StoreError as error:
            if not direct or getattr(error.__cause__, "errno", None) != errno.EINVAL:
                raise
        if self.is_direct:  # logged once, though several reads may be refused at once
            self.is_direct = False
            logger.info("%s: no direct reads here; reading through the page cache", self.path)
        return self._fill(view, start, end)


class CachedFile(NamedTuple):
    """The file of a mapping, read through the page cache; it must not have changed since it was mapped.

    The bytes do not include what this process wrote to the mapping. No page is mapped: that takes longer than a copy.
    """

    mapping: FileMapping

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Read bytes [begin, end) into `memory` and return the view of them; several threads may call it.

        Raises `StoreError` if the file changed or cannot be read.
        """
        path, numpy = self.mapping.path, cast(Any, memory.numpy())
        self.mapping.check_range(begin, end)
        view, reached, num = memoryview(numpy)[: end - begin], begin, 1
        with opened_file(path) as descriptor:
            self.mapping.compare(os.fstat(descriptor))
            while num and reached < end:
                num = _request(path, descriptor, view[reached - begin :], reached)
                reached += num
            self.mapping.compare(os.fstat(descriptor))  # it may have changed during the read
        _refuse_short(path, begin, end, reached)
        return memory[: end - begin]


def _refuse_short(path: Path, begin: int, end: int, reached: int) -> None:
    if reached < end:
        raise StoreError(
            f"{path}: short read at offset {begin}: wanted {end - begin} bytes, got {max(reached - begin, 0)}"
        )


def _request(path: Path, descriptor: int, view: memoryview, offset: int) -> int:
    try:
        return os.preadv(descriptor, [view], offset)
    except OSError as error:
        raise StoreError(
            f"{path}: reading {len(view)} bytes at offset {offset} failed: {error.strerror} "
            f"({errno.errorcode.get(error.errno or 0, error.errno)})"
        ) from error
