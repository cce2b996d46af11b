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
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch

from weightstream.codec.chunks import Coder
from weightstream.codec.format import Layout
from weightstream.errors import ConfigError, StoreError
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.shard import HEADER, PAGE_NBYTES, Advance, Mapped, Shard, stored_nbytes

CONVERTED = "converted"  # in the growing folder: tensors that had to be made before they could be written
RECORD = "weightstream.json"
_CODED_ALIGN_NBYTES = 512  # of which coded bytes are multiples
_BESIDE_NBYTES = 256 << 20  # no tokenizer is larger
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".npz", ".pkl")


def lay_out(
    units: Iterable[Mapping[str, torch.Tensor]],
    metadata: Mapping[str, str],
    *,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
    coder: Coder = Coder(),  # noqa: B008  # frozen
    shard_nbytes: int = 5 * 10**9,
) -> list[Shard]:
    """The shards of a pack: a unit that would exceed `shard_nbytes` begins a new one, and so does one that would not
    begin a page; where tensors are coded, 512 bytes. Those that have a layout are coded by `coder`."""
    aligned_nbytes = _CODED_ALIGN_NBYTES if layouts else PAGE_NBYTES
    files: list[dict[str, torch.Tensor]] = []
    end = 0
    for unit in units:
        sizes = {name: stored_nbytes(name, tensor, layouts) for name, tensor in unit.items()}
        nbytes = sum(sizes.values())
        if not files or end % aligned_nbytes or (end and end + nbytes > shard_nbytes):
            files.append({})
            end = 0
        steps = {name: _CODED_ALIGN_NBYTES if name in layouts else tensor.itemsize for name, tensor in unit.items()}
        if any(
            begin % step for begin, step in zip(accumulate(sizes.values(), initial=0), steps.values(), strict=False)
        ):
            unit = {name: unit[name] for name in sorted(unit, key=lambda name: -steps[name])}  # else readers copy it
        files[-1] |= unit
        end += nbytes
    suffixes = [f"-{i:05d}-of-{len(files):05d}" for i in range(1, len(files) + 1)] if len(files) > 1 else [""]
    return [
        Shard(
            name=f"model{suffix}.safetensors",
            tensors=tensors,
            metadata=metadata,
            layouts={name: layouts[name] for name in tensors if name in layouts},
            coder=coder,
        )
        for suffix, tensors in zip(suffixes, files, strict=True)
    ]


def is_packed(out: Path, source: str, codec: str = "none") -> bool:
    """Whether `out` holds a finished pack of `source`, a fingerprint, with this codec; False where nothing is.

    Raises `ConfigError` when something else is there, `StoreError` when a part of the pack is missing.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / RECORD).is_file():
        raise ConfigError(f"{out} exists and is no pack: name another folder, or empty it")
    record = _read_record(out)
    if record.get("source") != source:
        raise ConfigError(f"{out} is a pack of other weights, or these changed: name another folder, or remove it")
    if (made_with := record.get("codec", "none")) != codec:
        raise ConfigError(f"{out} is a pack with --codec {made_with}: name another folder, or remove it")
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
    folder: Path, shards: Sequence[Shard], mappings: Sequence[Mapped], origin: dict[str, str], advance: Advance
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
            done[shard.name] = _write_shard(folder / shard.name, shard, mappings, advance)
            listed = [{"name": s.name, "size": s.nbytes, "sha256": done[s.name]} for s in shards if s.name in done]
            _replace(folder / RECORD, [json.dumps(record | {"shards": listed}, indent=1).encode()])
    if len(shards) > 1:
        total = sum(sum(shard.sizes().values()) for shard in shards)
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _replace(folder / "model.safetensors.index.json", [json.dumps(index, indent=1).encode()])
    for mapping in mappings:  # it may have changed after its last piece was read
        mapping.check()


def _write_shard(path: Path, shard: Shard, mappings: Sequence[Mapped], advance: Advance) -> str:
    sums: dict[str, int] = {}

    def pieces() -> Iterator[Any]:
        for name, piece in shard.pieces(mappings):
            if name in shard.layouts:
                sums[name] = zlib.crc32(piece, sums.get(name, 0))
            yield piece

    return _replace(path, pieces(), advance, (lambda: shard.sealed(sums)) if shard.layouts else None)


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


def verify(folder: Path, shards: Sequence[Shard], mappings: Sequence[Mapped], advance: Advance) -> None:
    """Reads a pack again; raises `StoreError` where it is not what was written, or not what the source holds."""
    sums = {facts["name"]: facts["sha256"] for facts in _read_record(folder)["shards"]}
    for shard in shards:
        digest, wrong = hashlib.sha256(), []
        with open(folder / shard.name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the disk's bytes, not the page cache's
            for name, found, is_same in _compared(folder / shard.name, shard, file, mappings):
                digest.update(found)
                if not is_same:
                    wrong.append(name)
                advance(len(found))
            digest.update(file.read())
        intact = digest.hexdigest() == sums.get(shard.name)
        if wrong or not intact:
            raise StoreError(
                f"{folder / shard.name}: {wrong[0] if wrong else 'nothing'} differs from the source, and the checksum "
                f"is {'' if intact else 'not '}that of when it was written: remove {folder} and pack again"
            )


def _compared(path: Path, shard: Shard, file: BinaryIO, mappings: Sequence[Mapped]) -> Iterator[tuple[str, Any, bool]]:
    """The file's bytes in pieces, each with the tensor's name, and whether that is what the source holds."""
    found: Any
    checkpoint = Checkpoint.open(path) if shard.layouts else None
    sums = {name: entry.crc32 or 0 for name, entry in checkpoint.entries.items()} if checkpoint is not None else {}
    for name, piece in shard.pieces(mappings, uncoded=True):
        if checkpoint is None or name not in shard.layouts:
            expected = np.frombuffer(shard.sealed(sums), np.uint8) if checkpoint and name == HEADER else piece
            found = file.read(len(expected))
            yield name, found, np.array_equal(np.frombuffer(found, np.uint8), expected)
            continue
        begin, end = file.tell(), file.seek(shard.layouts[name].nbytes, os.SEEK_CUR)
        (mapping,) = checkpoint.mappings
        mapping.populate(begin, end)
        stored = mapping.bytes(begin, end)
        found = stored.numpy()
        yield name, found, zlib.crc32(found) == sums.get(name) and shard.is_code_of(name, stored, mappings)


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


def _replace(
    path: Path,
    pieces: Iterable[Any],
    advance: Advance = lambda nbytes: None,
    begin: Callable[[], bytes] | None = None,
) -> str:
    """Writes a file that is there whole or not at all, and returns its checksum; `begin` gives its true beginning."""
    partial, digest = path.with_name(f"{path.name}.tmp"), hashlib.sha256()
    try:
        with open(partial, "w+b") as file:
            for piece in pieces:
                file.write(piece)
                if begin is None:
                    digest.update(piece)
                advance(len(piece))
            if begin is not None:
                file.seek(0)
                file.write(begin())
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256")
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
