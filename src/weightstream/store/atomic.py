"""A file or a folder that is in its place whole, or not at all. Knows paths, and nothing of what they hold."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside `path`: what is written there takes the place of `path` at the end, or goes on an error.

    It is on the disk before it is in its place, so that a power cut leaves none of it or all.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        for child in [*partial.rglob("*"), partial]:
            _sync(child)
        os.replace(partial, path)
        _sync(path.parent)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Removes what processes that were killed left beside `path`."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial*"):
        pid = left.name.removeprefix(f".{path.name}.").split(".")[0]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            # The process may live where its number is not seen, in another container: without its folder it fails.
            moved = left.rename(left.with_name(f"{left.name}.{secrets.token_hex(4)}"))
            shutil.rmtree(moved, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
