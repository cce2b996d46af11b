"""Checkpoint: a safetensors file, or a folder of shards, mapped and described. It knows no model and no device.

A file is 8 bytes of little-endian header length, the header (JSON: name -> dtype, shape, data_offsets), and the data,
which the tensors fill without gap or overlap. Everything in a header or an index may lie: each number is checked
before it is used, and an index can name files of its own folder only.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from weightstream.errors import CheckpointError, StoreError
from weightstream.store.mapping import FileMapping

_HEADER_LIMIT = 100_000_000
# fmt: off
DTYPES = MappingProxyType({
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
})
# fmt: on
_SAVE_AGAIN = "save it as safetensors: load it with transformers, then model.save_pretrained(folder)"
_OTHER_FORMATS = MappingProxyType(
    {
        **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), f"PyTorch pickle ({{}}); {_SAVE_AGAIN}"),
        ".gguf": "GGUF ({}); load it with transformers' gguf_file=, then model.save_pretrained(folder)",
        ".h5": f"TensorFlow HDF5 ({{}}); {_SAVE_AGAIN}",
        ".msgpack": f"Flax msgpack ({{}}); {_SAVE_AGAIN}",
        ".onnx": "ONNX ({}); use the safetensors version of the model",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file; `begin` and `end` are absolute file offsets, `dtype` is torch's name."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """Mapped safetensors files; `Checkpoint.open(path)` makes one, and reads headers only."""

    def __init__(
        self, mappings: Sequence[FileMapping], entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]
    ) -> None:
        self.mappings = tuple(mappings)
        self.metadata = MappingProxyType(dict(metadata))
        self.entries = MappingProxyType(dict(entries))
        self._by_path = {mapping.path: mapping for mapping in self.mappings}

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Maps a model folder, a .safetensors file or a .safetensors.index.json; raises `CheckpointError`."""
        path = Path(path)
        if os.path.isdir(path):  # Path.is_dir raises where a name is too long
            path = _within(path, _weights_of(path))
        if path.suffix == ".json":
            return cls._open_index(path)
        _refuse_other_format(path, [path])
        mapping = _mapped(path)
        entries, metadata = _read_header(mapping)
        return cls([mapping], entries, metadata)

    @classmethod
    def _open_index(cls, path: Path) -> Checkpoint:
        weight_map = _read_weight_map(path)
        shards = {name: _within(path.parent, name) for name in sorted(set(weight_map.values()))}
        mappings: list[FileMapping] = []
        entries: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        for shard in shards.values():
            mapping = _mapped(shard)
            held, more = _read_header(mapping)
            metadata |= more
            for key in held.keys() & entries.keys():
                raise CheckpointError(f"{path}: {key!r} is in two shards, {entries[key].path} and {shard}")
            entries.update(held)
            mappings.append(mapping)
        for key, name in weight_map.items():
            if key not in entries or entries[key].path != shards[name]:
                raise CheckpointError(f"{path}: lists {key!r} in {name!r}, and that shard does not hold it")
        return cls(mappings, entries, metadata)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(entry.end - entry.begin for entry in self.entries.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor that views the file; a copy where its offset is not a multiple of the item size."""
        entry = self.entries.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, self.entries, n=3, cutoff=0)
            raise CheckpointError(f"no tensor {name!r} in the checkpoint; the nearest names are {near}")
        mapping = self._by_path[entry.path]
        data = mapping.bytes(entry.begin, entry.end)
        dtype = _torch_dtype(entry.dtype)
        if entry.begin % dtype.itemsize:
            mapping.populate(entry.begin, entry.end)  # else a file that shrank kills the process here
            data = data.clone()
        return data.view(dtype).view(entry.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns `tensor(name)` of every name."""
        return {name: self.tensor(name) for name in self.entries}

    def fingerprint(self) -> str:
        """Returns a hex digest over name, size, mtime and inode of every file; contents are not read."""
        facts = sorted([mapping.path.name, *mapping.identity] for mapping in self.mappings)
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _weights_of(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error}") from error
    found = [name for name in names if name.endswith(".safetensors")]
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if name in names:
            return name
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{folder}: {len(found)} safetensors files and no model.safetensors.index.json to join them: "
            f"{', '.join(found[:4])}, …; pass the path of one file"
        )
    _refuse_other_format(folder, [Path(name) for name in names])
    raise CheckpointError(f"{folder}: no model.safetensors, no model.safetensors.index.json, no *.safetensors")


def _refuse_other_format(where: Path, files: list[Path]) -> None:
    for file in files:
        if message := _OTHER_FORMATS.get(file.suffix):
            raise CheckpointError(f"{where}: unsupported checkpoint format: {message.format(file.name)}")


def _within(folder: Path, name: str) -> Path:
    """Returns the path of `name` in `folder`, which a link may leave only for its own hub cache's blobs."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name; files outside the folder are refused")
    try:
        root, target = folder.resolve(), (folder / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise CheckpointError(f"{folder}: {name!r} is missing; download the model again ({error})") from error
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(f"{folder}: {name!r} links to {target}, outside the model folder; refused unopened")
    return folder / name


def _mapped(path: Path) -> FileMapping:
    try:
        return FileMapping(path)
    except StoreError as error:
        raise CheckpointError(str(error)) from error


def _read(mapping: FileMapping, begin: int, end: int) -> bytes:
    try:
        mapping.populate(begin, end)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    return mapping.bytes(begin, end).numpy().tobytes()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} occurs twice")
    return found


def _read_json(mapping: FileMapping, begin: int, end: int) -> dict[str, Any]:
    if end - begin > _HEADER_LIMIT:
        raise CheckpointError(f"{mapping.path}: {end - begin} bytes of JSON, over the limit of {_HEADER_LIMIT}")
    text = _read(mapping, begin, end)
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if rb"\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()  # an escaped lone surrogate is no text
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{mapping.path}: bytes [{begin}, {end}) are not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{mapping.path}: JSON holds a {type(found).__name__}, not an object")
    return found


def _read_weight_map(path: Path) -> dict[str, str]:
    mapping = _mapped(path)
    weight_map = _read_json(mapping, 0, mapping.nbytes).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: 'weight_map' is absent or empty; it must map tensor names to file names")
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: {key!r} maps to {name!r}, not to a file name")
    return weight_map


def _read_header(mapping: FileMapping) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    if mapping.nbytes < 8:
        raise CheckpointError(f"{mapping.path}: {mapping.nbytes} bytes, a safetensors file has at least 8")
    length = int.from_bytes(_read(mapping, 0, 8), "little")
    data_begin = 8 + length
    if data_begin > mapping.nbytes:
        raise CheckpointError(
            f"{mapping.path}: header length {length} + 8 > {mapping.nbytes} bytes of file: truncated or not safetensors"
        )
    header = _read_json(mapping, 8, data_begin)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{mapping.path}: __metadata__ must hold texts, is {str(metadata)[:80]}")
    entries = {name: _entry(mapping, name, facts, data_begin) for name, facts in header.items()}
    _check_layout(mapping, entries, data_begin)
    return entries, metadata


def _check_layout(mapping: FileMapping, entries: Mapping[str, TensorEntry], data_begin: int) -> None:
    end, previous = data_begin, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            kind = "overlaps" if entry.begin < end else "leaves a gap after"
            raise CheckpointError(
                f"{mapping.path}: {entry.name!r} begins at byte {entry.begin} and {kind} {previous!r}, ending at {end}"
            )
        end, previous = entry.end, entry.name
    if end != mapping.nbytes:
        raise CheckpointError(f"{mapping.path}: tensors end at byte {end}, the file at {mapping.nbytes}")


def _entry(mapping: FileMapping, name: str, facts: Any, data_begin: int) -> TensorEntry:
    where = f"{mapping.path}: tensor {name!r}"
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: needs exactly dtype, shape and data_offsets, has {str(facts)[:80]}")
    code, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES or not hasattr(torch, DTYPES[code]):
        raise CheckpointError(f"{where}: dtype {str(code)[:40]!r} is not supported; known: {', '.join(DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: shape {str(shape)[:80]}, offsets {str(offsets)[:80]}: need integers >= 0")
    begin, end = data_begin + offsets[0], data_begin + offsets[1]
    if not begin <= end <= mapping.nbytes:
        raise CheckpointError(f"{where}: bytes [{begin}, {end}) of a file of {mapping.nbytes} bytes; truncated?")
    nbytes = _nbytes(shape, _torch_dtype(DTYPES[code]).itemsize)
    if nbytes != end - begin:
        raise CheckpointError(f"{where}: {code} {str(shape)[:80]} is {nbytes} bytes, the header gives {end - begin}")
    return TensorEntry(name=name, path=mapping.path, dtype=DTYPES[code], shape=tuple(shape), begin=begin, end=end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _nbytes(shape: list[int], itemsize: int) -> float:
    """Returns the bytes of a tensor; infinity where torch, which counts zeros as ones in strides, would overflow."""
    count = itemsize
    for size in shape:
        count *= max(size, 1)
        if count >= 2**63:
            return float("inf")
    return 0 if 0 in shape else count


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
