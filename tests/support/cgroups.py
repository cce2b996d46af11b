"""A cgroup with a limit of memory, made for one test: as root, on a machine whose cgroups may be written."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[list[str]]:
    """Yields what to put before a command, so that it runs in a new cgroup of `nbytes`; skips where none can be made.

    The last of what is yielded is the cgroup's folder. What still runs in it at the end is killed.
    """
    folder = _mounted() / f"weightstream-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        _limit(folder, nbytes)
        yield ["/bin/sh", "-c", _ENTER, str(folder)]
    finally:
        _remove(folder)


def _mounted() -> Path:
    """Returns where the memory controller is mounted, and sees to it that children of version 2 get it."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ", 2)
        point = Path(mount.split()[4])
        if kind == "cgroup" and "memory" in options.split(","):
            return point
        if kind == "cgroup2" and "memory" in (point / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):  # then the child has no memory.max, and the test skips
                (point / "cgroup.subtree_control").write_text("+memory")
            return point
    pytest.skip("no cgroup with a memory controller is mounted")


def _limit(folder: Path, nbytes: int) -> None:
    names = {"memory.limit_in_bytes", "memory.max"} & {path.name for path in folder.iterdir()}
    try:
        (folder / names.pop()).write_text(str(nbytes))
    except (KeyError, OSError) as error:
        pytest.skip(f"{folder} takes no limit: {error!r}")
    for name, value in (("memory.memsw.limit_in_bytes", nbytes), ("memory.swap.max", 0)):
        if (folder / name).exists():  # absent where swap is not accounted
            (folder / name).write_text(str(value))


def _remove(folder: Path) -> None:
    for _ in range(200):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            return folder.rmdir()
        except OSError:  # a process that was killed is still there for a moment
            time.sleep(0.05)
    raise RuntimeError(f"{folder} cannot be removed")
