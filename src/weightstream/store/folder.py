"""OffloadFolder: where converted weights are written once and mapped from. It knows tensors, not models."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import urllib.parse
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from weightstream.errors import StoreError
from weightstream.store.atomic import replacing
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.mapping import FileMapping

_NAME_LIMIT = 160  # a file system allows 255 bytes; the rest is for suffixes


def file_name(name: str) -> str:
    """Returns the file name of a tensor: distinct for distinct names, and plain whatever the name holds."""
    quoted = urllib.parse.quote(name, safe="", errors="surrogatepass")
    if len(quoted) > _NAME_LIMIT:  # a quoted name never holds a comma, so the two kinds cannot collide
        digest = hashlib.sha256(quoted.encode()).hexdigest()
        quoted = f"{quoted[: _NAME_LIMIT - 70]},{digest}"
    return f"{quoted}.safetensors"


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a fork that ends must not take its parent's files along
        shutil.rmtree(folder, ignore_errors=True)


class OffloadFolder:
    """Writes tensors to `folder` and maps them; None is a private folder in `inside` that goes at close or exit."""

    def __init__(self, folder: Path | None, *, inside: Path | None = None) -> None:
        self.is_private = folder is None
        self._finalizer = None
        try:
            if folder is None:
                if inside is not None:
                    inside.mkdir(parents=True, exist_ok=True)
                self.path = Path(tempfile.mkdtemp(prefix="weightstream-", dir=inside))
                self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())
            else:
                self.path = Path(folder)
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"offload_folder {folder or inside}: cannot create it: {error}") from error
        self._mappings: dict[Path, FileMapping] = {}

    @property
    def mappings(self) -> tuple[FileMapping, ...]:
        """The files written or read so far, mapped."""
        return tuple(self._mappings.values())

    @property
    def nbytes(self) -> int:
        """The bytes of those files."""
        return sum(mapping.nbytes for mapping in self._mappings.values())

    def close(self) -> None:
        """Removes a private folder; tensors already mapped stay readable, but are no longer checked."""
        if self._finalizer is not None:
            self._finalizer()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder against other loads that would write the same files; waits for its turn."""
        try:
            file = open(self.path / ".lock", "w")  # noqa: SIM115
        except OSError as error:
            raise StoreError(f"{self.path}: cannot write to it: {error}; pass another offload_folder") from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Writes `tensor` and returns an equal, contiguous one that views the file; raises `StoreError`."""
        try:
            if shutil.disk_usage(self.path).free < tensor.nbytes:
                raise OSError("not enough space")
            # A private folder does not outlive the process, so it need not outlive a power cut.
            with replacing(self.path / file_name(name), durable=not self.is_private) as partial:
                save_file({name: tensor.detach().cpu().contiguous()}, partial)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self.path).free if self.path.is_dir() else 0
            raise StoreError(
                f"{self.path}: cannot write {name!r}: needs {tensor.nbytes} bytes, {free} are free: {error}; "
                "free some space or pass another offload_folder"
            ) from error
        return self.read(name)

    def remove(self, name: str) -> None:
        """Removes what was written as `name`."""
        self._mappings.pop(self.path / file_name(name), None)
        (self.path / file_name(name)).unlink(missing_ok=True)

    def read(self, name: str) -> torch.Tensor:
        """Returns the tensor written as `name`, mapped; raises `CheckpointError` when it is absent or damaged."""
        checkpoint = Checkpoint.open(self.path / file_name(name))
        tensor = checkpoint.tensor(name)
        for mapping in checkpoint.mappings:
            self._mappings.pop(mapping.path, None)  # the one read last stands last
            self._mappings[mapping.path] = mapping
        return tensor

    def save_index(self, key: str, payload: dict[str, Any]) -> None:
        """Records `payload` under `key`."""
        with replacing(self._index_path(key)) as partial:
            partial.write_text(json.dumps(payload))

    def load_index(self, key: str) -> dict[str, Any] | None:
        """Returns what was recorded under `key`; None when it is absent or damaged."""
        with contextlib.suppress(OSError, ValueError):
            payload = json.loads(self._index_path(key).read_text())
            return payload if isinstance(payload, dict) else None
        return None

    def _index_path(self, key: str) -> Path:
        return self.path / f"{urllib.parse.quote(key, safe='')}.index.json"
