"""A cgroup with a memory limit for one test. Needs root, and a machine with writable cgroups."""

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
    """Yield the prefix of a command that makes it run in a new cgroup of `nbytes`. Skip if none can be made.

    The last item of the prefix is the cgroup's folder. Processes that still run in it at the end are killed.
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
    """Mount point of the memory controller, enabled for children in cgroup version 2."""
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
