"""OffloadFolder: files for weights that no other file holds in the needed form. Knows tensors, not models.

A process that is killed by a signal cannot remove its folder. So each process keeps a file in its folder locked while
it lives, and a process that makes a folder removes all folders next to it whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from weightstream.errors import StoreError
from weightstream.plan.units import human
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.ending import finalize
from weightstream.store.mapping import FileMapping

_PREFIX, _LOCK = "weightstream-", ".lock"


def _remove(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock the folder. Returns the descriptor that holds the lock; None if the file system has no locks."""
    descriptor = os.open(folder / f"{_LOCK}-new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(folder / f"{_LOCK}-new", folder / _LOCK)  # other processes see it only once it is locked
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that have ended."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # of another user, or locked, or removed meanwhile
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


class OffloadFolder:
    """A new folder in `inside`, or among temporary files, that is removed at close or exit.

    Tensors are written to files, one each, and mapped.
    """

    def __init__(self, inside: Path | None = None) -> None:
        try:
            if inside is not None:
                inside.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=inside))
            lock = _locked(self.path)
            _sweep(self.path.parent)
        except (OSError, ValueError) as error:  # a name that holds a null byte
            raise StoreError(
                f"offload_folder {inside}: cannot create a folder: {error}; name one that can be written"
            ) from error
        self._finalizer = finalize(self, _remove, self.path, lock)
        self.mappings: list[FileMapping] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(mapping.nbytes for mapping in self.mappings)

    def close(self) -> None:
        """Remove the folder; mapped tensors stay readable, but their files are no longer checked."""
        self._finalizer()

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Write `tensor`, and return an equal, contiguous one that views the file; raises `StoreError`."""
        path = self.path / f"{len(self.mappings):06d}.safetensors"
        try:
            if shutil.disk_usage(self.path).free < tensor.nbytes:
                raise OSError("not enough space")
            save_file({name: tensor.detach().cpu().contiguous()}, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            free = shutil.disk_usage(self.path).free if self.path.is_dir() else 0
            raise StoreError(
                f"{self.path}: cannot write {name!r} of shape {tuple(tensor.shape)}: it needs {human(tensor.nbytes)}, "
                f"and {human(free)} are free: {error}; free some space or pass another offload_folder"
            ) from error
        checkpoint = Checkpoint.open(path)
        self.mappings += checkpoint.mappings
        return checkpoint.tensor(name)
