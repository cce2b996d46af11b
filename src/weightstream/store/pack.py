"""A pack: a checkpoint written again so that each unit is contiguous and aligned. Knows tensors and files, no models.

It grows in a folder beside its place, and is renamed into it once it is whole. Its record lists the shards that are
finished with their checksums: a run that was killed goes on after those that still have theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightstream.errors import ConfigError, StoreError, UnsupportedError
from weightstream.store.checkpoint import DTYPES
from weightstream.store.mapping import FileMapping

CONVERTED = "converted"  # in the growing folder: tensors that had to be made before they could be written
RECORD = "weightstream.json"
_PAGE_NBYTES = 4096
_PIECE_NBYTES = 16 << 20
_BESIDE_NBYTES = 256 << 20  # no tokenizer is larger
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".npz", ".pkl")

Advance = Callable[[int], None]  # told how many more bytes are done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A safetensors file to be: a header of whole pages, and the tensors that follow it without gaps."""

    name: str
    header: bytes
    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors.values())

    def pieces(self, mappings: Sequence[FileMapping]) -> Iterator[tuple[str, Any]]:
        """The file's bytes in arrays, each with the tensor's name; raises `StoreError` where a mapped file changed."""
        yield "the header", np.frombuffer(self.header, np.uint8)
        for name, tensor in self.tensors.items():
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for piece in flat.split(_PIECE_NBYTES) if flat.numel() else ():
                for mapping in mappings:
                    if (begin := mapping.locate(piece.data_ptr())) is not None:
                        mapping.populate(begin, begin + piece.numel())
                yield name, piece.numpy()


def lay_out(
    units: Iterable[Mapping[str, torch.Tensor]], metadata: Mapping[str, str], *, shard_nbytes: int = 5 * 10**9
) -> list[Shard]:
    """The shards of a pack: a unit that would not begin a page, or exceed `shard_nbytes`, begins a new one."""
    files: list[dict[str, torch.Tensor]] = []
    end = 0
    for unit in units:
        nbytes = sum(tensor.nbytes for tensor in unit.values())
        if not files or end % _PAGE_NBYTES or (end and end + nbytes > shard_nbytes):
            files.append({})
            end = 0
        begins = accumulate((tensor.nbytes for tensor in unit.values()), initial=0)
        if any(begin % tensor.itemsize for begin, tensor in zip(begins, unit.values(), strict=False)):
            unit = dict(sorted(unit.items(), key=lambda named: -named[1].itemsize))  # else a reader has to copy it
        files[-1] |= unit
        end += nbytes
    suffixes = [f"-{i:05d}-of-{len(files):05d}" for i in range(1, len(files) + 1)] if len(files) > 1 else [""]
    return [
        Shard(name=f"model{suffix}.safetensors", header=_header(tensors, metadata), tensors=tensors)
        for suffix, tensors in zip(suffixes, files, strict=True)
    ]


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    codes = {name: code for code, name in DTYPES.items()}
    facts: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in codes:
            raise UnsupportedError(f"{name} is {dtype}, which safetensors cannot hold")
        begin, end = end, end + tensor.nbytes
        facts[name] = {"dtype": codes[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE_NBYTES)
    return len(text).to_bytes(8, "little") + text


def is_packed(out: Path, source: str) -> bool:
    """Whether `out` holds a finished pack of `source`, a fingerprint; False where nothing is.

    Raises `ConfigError` when something else is there, `StoreError` when a part of the pack is missing.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / RECORD).is_file():
        raise ConfigError(f"{out} exists and is no pack: name another folder, or empty it")
    record = _read_record(out)
    if record.get("source") != source:
        raise ConfigError(f"{out} is a pack of other weights, or these changed: name another folder, or remove it")
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    if lost := [facts["name"] for facts in record["shards"] if sizes.get(facts["name"]) != facts["size"]]:
        raise StoreError(f"{out}: {', '.join(lost)} missing or cut: remove the folder and pack again")
    return True


@contextlib.contextmanager
def growing(out: Path) -> Iterator[Path]:
    """The folder that the pack `out` grows in, held against other processes; it goes unless a shard is finished."""
    folder = out.with_name(f".{out.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be made: {error}") from error
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield folder
            finally:
                if not (folder / RECORD).exists():
                    shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError as error:
            raise StoreError(f"{out} is being packed by another process, in {folder}: wait for it") from error
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{error}; what is finished is kept in {folder}: run it again to continue") from error


def write(
    folder: Path, shards: Sequence[Shard], mappings: Sequence[FileMapping], origin: dict[str, str], advance: Advance
) -> None:
    """Writes the shards that `folder` does not hold yet; `origin` is the `source`, a fingerprint, and what read it.

    Raises `StoreError` when there is no room or a mapped file changed, `OSError` when a write fails.
    """
    record = {"format": 1, **origin, "layout": hashlib.sha256(b"".join(s.header for s in shards)).hexdigest()}
    done = _finished(folder, record, advance)
    needed, free = sum(s.nbytes for s in shards if s.name not in done), shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(f"{folder}: {needed} bytes to write > {free} bytes free: make room for {needed - free} more")
    for shard in shards:
        if shard.name not in done:
            done[shard.name] = _replace(folder / shard.name, (piece for _, piece in shard.pieces(mappings)), advance)
            listed = [{"name": s.name, "size": s.nbytes, "sha256": done[s.name]} for s in shards if s.name in done]
            _replace(folder / RECORD, [json.dumps(record | {"shards": listed}, indent=1).encode()])
    if len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors.values())
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _replace(folder / "model.safetensors.index.json", [json.dumps(index, indent=1).encode()])
    for mapping in mappings:  # it may have changed after its last piece was read
        mapping.check()


def _finished(folder: Path, record: Mapping[str, Any], advance: Advance) -> dict[str, str]:
    """The checksums of the shards that are whole; whatever else an earlier run left is removed."""
    found: dict[str, Any] = {"shards": []}
    with contextlib.suppress(StoreError):
        found = _read_record(folder)
    done: dict[str, str] = {}
    for facts in found["shards"] if found == {**record, "shards": found["shards"]} else ():
        with contextlib.suppress(OSError), open(folder / facts["name"], "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == facts["sha256"]:
                done[facts["name"]] = facts["sha256"]
                advance(facts["size"])
    for path in folder.iterdir():
        if path.name not in {*done, CONVERTED, RECORD}:
            path.unlink()
    return done


def verify(folder: Path, shards: Sequence[Shard], mappings: Sequence[FileMapping], advance: Advance) -> None:
    """Reads a pack again; raises `StoreError` where it is not what was written, or not what the source holds."""
    sums = {facts["name"]: facts["sha256"] for facts in _read_record(folder)["shards"]}
    for shard in shards:
        digest, wrong = hashlib.sha256(), []
        with open(folder / shard.name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the disk's bytes, not the page cache's
            for name, piece in shard.pieces(mappings):
                found = file.read(len(piece))
                digest.update(found)
                if not np.array_equal(np.frombuffer(found, np.uint8), piece):
                    wrong.append(name)
                advance(len(piece))
            digest.update(file.read())
        intact = digest.hexdigest() == sums.get(shard.name)
        if wrong or not intact:
            raise StoreError(
                f"{folder / shard.name}: {wrong[0] if wrong else 'nothing'} differs from the source, and the checksum "
                f"is {'' if intact else 'not '}that of when it was written: remove {folder} and pack again"
            )


def finish(folder: Path, out: Path, source: Path) -> None:
    """Copies what the folder `source` holds beside weights, and puts `folder` in its place."""
    for path in sorted(source.iterdir()):
        is_ours = path.name == RECORD or path.name.endswith((*SUFFIXES, ".index.json")) or path.name.startswith(".")
        if not is_ours and path.is_file() and path.stat().st_size <= _BESIDE_NBYTES:
            _replace(folder / path.name, [path.read_bytes()])
    shutil.rmtree(folder / CONVERTED, ignore_errors=True)
    _sync(folder)
    os.rename(folder, out)
    _sync(out.parent)


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_bytes())
        record["shards"] = [{key: facts[key] for key in ("name", "size", "sha256")} for facts in record["shards"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{folder / RECORD} is damaged: {error!r}: remove {folder} and pack again") from error
    return record


def _replace(path: Path, pieces: Iterable[Any], advance: Advance = lambda nbytes: None) -> str:
    """Writes a file that is there whole or not at all, and returns its checksum."""
    partial, digest = path.with_name(f"{path.name}.tmp"), hashlib.sha256()
    try:
        with open(partial, "wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                advance(len(piece))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
