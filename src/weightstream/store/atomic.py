"""Atomic writes: a file or folder appears whole or not at all. Knows paths, not contents."""

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
    """Yield a path next to `path` to write to. The result replaces `path` at the end, or is removed on an error.

    It is synced to disk before the rename, so a power cut leaves all of it or nothing.
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
    """Remove the partial files of killed processes next to `path`."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial*"):
        pid = leftover.name.removeprefix(f".{path.name}.").split(".")[0]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            # The process may live in another container, where its id is not visible: it fails without its folder.
            moved = leftover.rename(leftover.with_name(f"{leftover.name}.{secrets.token_hex(4)}"))
            shutil.rmtree(moved, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
