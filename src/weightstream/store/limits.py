"""Limits of this process's host memory, and the bytes left below them. Knows no weights and no device.

Cgroups of version 1, 2 or both are found through /proc/self/cgroup and /proc/self/mountinfo. In a container the path of
the group may not exist below the mount: then the root of the mount is the group.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

import psutil

from weightstream.plan.units import human

_NO_LIMIT = 1 << 62  # version 1 writes the largest multiple of a page below 2**63, version 2 "max"


class _Version(NamedTuple):
    controller: str  # in the second field of /proc/self/cgroup
    kind: str  # of the file system
    limits: tuple[str, ...]
    usage: str
    page_cache: tuple[str, ...]  # keys of memory.stat: pages that the kernel reclaims before it refuses memory


class _Group(NamedTuple):
    """A cgroup: its path, and the folder of its files."""

    path: PurePosixPath
    folder: Path


class _Limit(NamedTuple):
    name: str
    limit_nbytes: int
    free_nbytes: int


_V1_CACHE, _V2_CACHE = ("total_inactive_file", "total_active_file"), ("inactive_file", "active_file")
_V1 = _Version("memory", "cgroup", ("memory.limit_in_bytes",), "memory.usage_in_bytes", _V1_CACHE)
_V2 = _Version("", "cgroup2", ("memory.max", "memory.high"), "memory.current", _V2_CACHE)
_RLIMITS = MappingProxyType({"vms": ("ulimit -v", resource.RLIMIT_AS), "data": ("ulimit -d", resource.RLIMIT_DATA)})


def available_nbytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take; `root` is the folder of proc and sys."""
    return max(0, min([_ram_nbytes(), *(limit.free_nbytes for limit in _limits(root))]))


def describe_limits(root: Path = Path("/")) -> str:
    """One line for a warning: the memlock limit, the tightest other limit if there is one, and free RAM."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    parts = [f"memlock {'unlimited' if memlock == resource.RLIM_INFINITY else human(memlock)}"]
    if tightest := min(_limits(root), key=lambda limit: limit.free_nbytes, default=None):
        free = human(max(0, tightest.free_nbytes))
        parts.append(f"{tightest.name} {human(tightest.limit_nbytes)} of which {free} are free")
    return ", ".join([*parts, f"{human(_ram_nbytes())} of RAM available"])


def _ram_nbytes() -> int:
    return int(psutil.virtual_memory().available)


def _limits(root: Path) -> Iterator[_Limit]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for version in (version for version in (_V1, _V2) if version.controller in controllers.split(",")):
            yield from filter(None, (_limit(version, group) for group in _groups(root, version, path)))
    for field, (name, kind) in _RLIMITS.items():
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            free = limit - getattr(psutil.Process().memory_info(), field)
            yield _Limit(name, limit, free)


def _limit(version: _Version, group: _Group) -> _Limit | None:
    path, folder = group
    limit = min(_number(folder / name, _NO_LIMIT) for name in version.limits)
    if limit >= _NO_LIMIT:
        return None
    statistics = [line.split() for line in _lines(folder / "memory.stat")]
    pairs = [pair for pair in statistics if len(pair) == 2 and re.fullmatch(r"[0-9]{1,20}", pair[1])]
    # Version 2 may update the statistics seconds after the usage, so `used` is bounded: at most the limit is free.
    used = _number(folder / version.usage, 0) - sum(int(size) for name, size in pairs if name in version.page_cache)
    return _Limit(f"cgroup {os.fsencode(path).decode(errors='replace')}", limit, limit - max(0, used))


def _groups(root: Path, version: _Version, path: str) -> list[_Group]:
    """The group at `path` and its ancestors, as far as they are mounted."""
    mounts = list(_mounts(root, version))
    for top, point in mounts:
        inner = PurePosixPath(path)
        if inner.is_relative_to(top) and ".." not in inner.parts:
            inner = inner.relative_to(top)
            if os.path.isdir(point / inner):  # Path.is_dir raises where a name is too long
                return [_Group(top / level, point / level) for level in (inner, *inner.parents)]
    return mounts


def _mounts(root: Path, version: _Version) -> Iterator[_Group]:
    """The group at the root of each mount of the memory controller."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        fields, facts = mount.split(), file_system.split()
        is_whole = len(fields) >= 5 and len(facts) >= 3
        if is_whole and facts[0] == version.kind and version.controller in ("", *facts[2].split(",")):
            top, point = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field) for field in fields[3:5])
            yield _Group(PurePosixPath(top), root / point.lstrip("/"))


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):  # a file that cannot be read sets no limit
        return path.read_text(errors="surrogateescape").splitlines()
    return []


def _number(path: Path, default: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        number = int(path.read_text())
        return number if number >= 0 else default
    return default
