"""OffloadFolder: where weights are written that no file holds as they are needed. It knows tensors, not models."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from weightstream.errors import StoreError
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.mapping import FileMapping


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a fork that ends must not take its parent's files along
        shutil.rmtree(folder, ignore_errors=True)


class OffloadFolder:
    """A folder of its own, in `inside` or where temporary files go, that is removed at close or exit.

    It writes tensors to files, one each, and maps them.
    """

    def __init__(self, inside: Path | None = None) -> None:
        try:
            if inside is not None:
                inside.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix="weightstream-", dir=inside))
        except OSError as error:
            raise StoreError(f"offload_folder {inside}: cannot create it: {error}") from error
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())
        self.mappings: list[FileMapping] = []

    @property
    def nbytes(self) -> int:
        """The bytes of the files."""
        return sum(mapping.nbytes for mapping in self.mappings)

    def close(self) -> None:
        """Removes the folder; tensors already mapped stay readable, but are no longer checked."""
        self._finalizer()

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Writes `tensor` and returns an equal, contiguous one that views the file; raises `StoreError`."""
        path = self.path / f"{len(self.mappings):06d}.safetensors"
        try:
            if shutil.disk_usage(self.path).free < tensor.nbytes:
                raise OSError("not enough space")
            save_file({name: tensor.detach().cpu().contiguous()}, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            free = shutil.disk_usage(self.path).free if self.path.is_dir() else 0
            raise StoreError(
                f"{self.path}: cannot write {name!r}: needs {tensor.nbytes} bytes, {free} are free: {error}; "
                "free some space or pass another offload_folder"
            ) from error
        checkpoint = Checkpoint.open(path)
        self.mappings += checkpoint.mappings
        return checkpoint.tensor(name)
