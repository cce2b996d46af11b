"""DirectFile and CachedFile: one file, read past the page cache or through it. Neither knows formats, names or devices.

A direct request begins and ends at multiples of 4096 and goes to memory that does, so a read brings in a little more
than was asked for. Each read opens the file: microseconds beside milliseconds, and no descriptor is kept of the
thousands of files that a folder may have.
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
    """The file of a mapping, unchanged since that was made."""

    def __init__(self, mapping: FileMapping) -> None:
        self.path = mapping.path
        self._mapping = mapping
        self.is_direct = True  # until the file system has refused it, so that reads go through the page cache

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Reads bytes [begin, end) into `memory` and returns the view of exactly these; several threads may call it.

        `memory`: flat uint8 at a multiple of 4096, with room for [begin, end) when both are rounded outwards to one.
        Raises `StoreError` when the file changed or cannot be read.
        """
        self._mapping.check()
        self._mapping.check_range(begin, end)
        if begin == end:
            return memory[:0]
        start = begin // _ALIGNMENT * _ALIGNMENT
        span = -(-end // _ALIGNMENT) * _ALIGNMENT - start
        if memory.numel() < span or memory.data_ptr() % _ALIGNMENT:  # else the page cache would be used in silence
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
        """Reads until `end` is reached or no more comes; returns how far. After a short read it goes on aligned."""
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
        if self.is_direct:  # said once, though several reads are refused at a time
            self.is_direct = False
            logger.info("%s: no direct reads here; reading through the page cache", self.path)
        return self._fill(view, start, end)


class CachedFile(NamedTuple):
    """The file of a mapping, unchanged since that was made, as the page cache has it. What this process wrote to the
    mapping is not in it; and no page is mapped, which takes longer than to copy it."""

    mapping: FileMapping

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        """Reads bytes [begin, end) into `memory` and returns the view of these; several threads may call it.

        Raises `StoreError` when the file changed or cannot be read.
        """
        path, numpy = self.mapping.path, cast(Any, memory.numpy())
        self.mapping.check_range(begin, end)
        view, reached, num = memoryview(numpy)[: end - begin], begin, 1
        with opened_file(path) as descriptor:
            self.mapping.compare(os.fstat(descriptor))
            while num and reached < end:
                num = _request(path, descriptor, view[reached - begin :], reached)
                reached += num
            self.mapping.compare(os.fstat(descriptor))  # not while it was read
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
