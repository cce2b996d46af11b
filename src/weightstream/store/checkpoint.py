"""Checkpoint: a safetensors file, or a folder of shards, mapped and described. Knows no model and no device.

Headers and indices are not trusted: each number is checked before it is used, and an index can name only files of its
own folder. A compressed tensor has memory of its own, into which it is decoded when it is first read.

transformers uses only the names of shards from an index: it reads all shards in the order of their names, and the last
one wins if several hold the same tensor. So does this module; `notes` says where the index disagrees.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from weightstream.errors import CheckpointError, StoreError
from weightstream.plan.units import some
from weightstream.store.file_slice import FileSlice
from weightstream.store.header import REMEDY, TensorEntry, read_header, read_json, torch_dtype
from weightstream.store.lazy import DecodedMemory, LazyMemory
from weightstream.store.mapping import FileMapping

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
_ALIGN_NBYTES = 8  # the size of the largest items, such as float64
_PIECE_NBYTES = 16 << 20
SUFFIXES = (".safetensors", *_OTHER_FORMATS, ".ot", ".npz", ".pkl")  # of files with weights


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn errors of mapping or reading a file into `CheckpointError`."""
    try:
        yield
    except StoreError as error:
        raise CheckpointError(str(error)) from error


class Columns(NamedTuple):
    """Bytes [first, last) of each row of `pitch` bytes."""

    first: int
    last: int
    pitch: int


class Checkpoint:
    """Mapped safetensors files. `Checkpoint.open(path)` reads only their headers."""

    def __init__(
        self,
        mappings: Sequence[FileMapping],
        entries: Mapping[str, TensorEntry],
        metadata: Mapping[str, str],
        *,
        index: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.mappings = tuple(mappings)
        self.entries = entries
        self.metadata = metadata
        self.index = index
        self.notes = tuple(notes)
        self.lazy: dict[str, LazyMemory] = {}  # by name: compressed entries in use, and gathered tensors

    @classmethod
    @_refusing()
    def open(cls, path: Path | str, name: str | None = None, extra: Iterable[str] = ()) -> Checkpoint:
        """Map a model folder, a .safetensors file or a .safetensors.index.json; raises `CheckpointError`.

        `name`: the file or index in the folder, if it does not have the usual name. `extra`: more files of the folder;
        if they exist, their tensors replace others of the same name.
        """
        path = Path(path)
        if os.path.isdir(path):  # Path.is_dir raises where a name is too long
            path = within(path, name or _weights_of(path))
        _refuse_other_format(path, [path])
        index = _read_index(path) if path.suffix == ".json" else None
        weight_map: dict[str, str] = index["weight_map"] if index else {}
        shards = [within(path.parent, shard) for shard in sorted(set(weight_map.values()))] or [path]
        shards += [within(path.parent, file) for file in extra if (path.parent / file).exists()]
        mappings = [FileMapping(shard) for shard in dict.fromkeys(shards)]
        entries: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        overlaid: dict[str, TensorEntry] = {}
        for mapping in mappings:
            header = read_header(mapping)
            metadata |= header.metadata
            overlaid |= {key: entries[key] for key in header.entries.keys() & entries.keys()}
            entries |= header.entries
        notes = tuple(_notes(path, weight_map, entries, overlaid))
        return cls(mappings, entries, metadata, index=index, notes=notes)

    @property
    def plain_nbytes(self) -> int:
        """Bytes of all tensors, uncompressed."""
        return sum(math.prod(e.shape) * torch_dtype(e.dtype).itemsize for e in self.entries.values())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor that views the file; a copy if its offset is not a multiple of the item size.

        A compressed tensor views its `DecodedMemory`, and has its values once that is populated.
        """
        entry = self.entries[name]
        data, dtype = self.bytes(entry), torch_dtype(entry.dtype)
        if entry.layout is None and entry.begin % dtype.itemsize:
            data = entry.mapping.populated(
                entry.begin, entry.end
            ).clone()  # reading a mapped file that shrank would kill the process
        return data.view(dtype).view(entry.shape)

    def bytes(self, entry: TensorEntry) -> torch.Tensor:
        """The bytes of a tensor: a view of the file, or of the memory that a compressed one is decoded into."""
        if entry.layout is None:
            return entry.mapping.bytes(entry.begin, entry.end)
        if entry.name not in self.lazy:  # one memory for all views
            extent = FileSlice(entry.mapping, entry.begin, entry.end)
            self.lazy[entry.name] = DecodedMemory(entry.name, entry.path, entry.layout, extents=[extent])
        return self.lazy[entry.name].bytes(0, entry.layout.raw_nbytes)

    def gather(self, name: str, parts: Iterable[tuple[str, int, int]], columns: Columns | None = None) -> torch.Tensor:
        """Join the parts (tensor, begin, end) of uncompressed tensors.

        Returns a view of the file if the parts are contiguous in it. Else it returns a view of a `LazyMemory` called
        `name`, which has its values once it is populated. With `columns` the parts are rows of `pitch` bytes, of which
        only bytes [first, last) are taken.
        """
        extents: list[FileSlice] = []
        for source, begin, end in parts:
            entry = self.entries[source]
            mapping, begin, end = entry.mapping, entry.begin + begin, entry.begin + end
            if extents and extents[-1].mapping is mapping and extents[-1].end == begin:
                begin = extents.pop().begin
            extents.append(FileSlice(mapping, begin, end))
        if columns is not None:
            first, last, pitch = columns
            extents = [
                FileSlice(m, begin + first, end - pitch + last, last - first, pitch) for m, begin, end, *_ in extents
            ]
        elif not extents[1:] and extents[0].begin % _ALIGN_NBYTES == 0:
            return extents[0].bytes()
        memory = self.lazy[name] = LazyMemory.of_extents(name, extents)
        return memory.bytes(0, memory.nbytes)

    @_refusing()
    def verify(self) -> None:
        """Raise `CheckpointError` if the compressed bytes of a tensor do not have the checksum in the file."""
        coded = [entry for entry in self.entries.values() if entry.layout is not None]
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            for entry, crc32 in zip(coded, pool.map(_crc32, coded), strict=True):
                if crc32 != entry.crc32:
                    raise CheckpointError(
                        f"{entry.path}: tensor {entry.name!r}, bytes [{entry.begin}, {entry.end}): checksum "
                        f"{crc32:08x}, was {entry.crc32:08x} when it was packed; {REMEDY}"
                    )


def _weights_of(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error}") from error
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if name in names:
            return name
    adapters = [name for name in names if name.startswith("adapter_model.")]
    found = [name for name in names if name.endswith(".safetensors") and name not in adapters]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{folder}: {len(found)} safetensors files and no model.safetensors.index.json to join them: "
            f"{some(found)}; pass the path of one file"
        )
    if adapters:
        raise CheckpointError(
            f"{folder}: {adapters[0]} is an adapter, and there are no weights of a model with it: load the model that "
            "adapter_config.json names, then model.load_adapter(folder)"
        )
    _refuse_other_format(folder, [Path(name) for name in names])
    raise CheckpointError(f"{folder}: no model.safetensors, no model.safetensors.index.json, no *.safetensors")


def _refuse_other_format(where: Path, files: list[Path]) -> None:
    for file in files:
        if message := _OTHER_FORMATS.get(file.suffix):
            raise CheckpointError(f"{where}: unsupported checkpoint format: {message.format(file.name)}")


def within(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`. A link may point out of the folder only to the blobs of its own hub cache."""
    is_outside = not name or name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/"))
    if is_outside or any(character in name for character in "\\\0"):
        raise CheckpointError(
            f"{folder}: {name!r} is not the name of a file inside the folder; files outside are refused"
        )
    path = folder / name
    try:
        root, target = folder.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise CheckpointError(f"{folder}: {name!r} is missing; download the model again ({error})") from error
    if not target.is_relative_to(root) and not _is_blob(folder, path):
        raise CheckpointError(
            f"{folder}: {name!r} links to {target}, outside the model folder; refused unopened: pass {target.parent} "
            f"if all of the model is there, or put a copy in place of the link: cp -L {name} {name}.copy && "
            f"mv {name}.copy {name}"
        )
    return path


def _is_blob(folder: Path, path: Path) -> bool:
    """Whether the path links to a blob of its hub cache; blobs may be links to another disk.

    In a hub cache <repository>/snapshots/<commit>/<file> links to <repository>/blobs/<name>.
    """
    if not path.is_symlink():
        return False
    target_folder = (path.parent / path.readlink()).parent.resolve()
    # the commit's folder may be above this one: a pipeline's snapshot has a folder for each component
    folders = {place for start in (folder.absolute(), folder.resolve()) for place in (start, *start.parents[:2])}
    return any(target_folder == (f.parents[1] / "blobs").resolve() for f in folders if f.parent.name == "snapshots")


def _crc32(entry: TensorEntry) -> int:
    crc32 = 0
    for begin in range(entry.begin, entry.end, _PIECE_NBYTES):
        end = min(begin + _PIECE_NBYTES, entry.end)
        piece: Any = entry.mapping.populated(begin, end).numpy()
        crc32 = zlib.crc32(piece, crc32)  # without the GIL
    return crc32


def _read_index(path: Path) -> dict[str, Any]:
    mapping = FileMapping(path)
    index = read_json(mapping, 0, mapping.nbytes)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: 'weight_map' is absent or empty; it must map tensor names to file names")
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: {key!r} maps to {name!r}, not to a file name")
    return index


def _notes(
    path: Path, weight_map: Mapping[str, str], entries: Mapping[str, TensorEntry], overlaid: Mapping[str, TensorEntry]
) -> Iterator[str]:
    """A note about tensors that several files hold, and one about tensors that the index lists in a wrong file."""
    if overlaid:
        key = min(overlaid)
        taken, other = entries[key].path.name, overlaid[key].path.name
        listed = f", though the index lists it in {weight_map[key]}" if weight_map.get(key, taken) != taken else ""
        yield (
            f"{path}: {len(overlaid)} tensors are in several files. As in transformers, the last file by name counts: "
            f"{key!r} is read from {taken}, not from {other}{listed}"
        )
    elsewhere = {
        key: name for key, name in weight_map.items() if key not in entries or entries[key].path != path.parent / name
    }
    if stale := sorted(elsewhere.keys() - overlaid.keys()):
        key = stale[0]
        found = f"it is in {entries[key].path.name}" if key in entries else "no file has it"
        yield (
            f"{path}: the index is stale: {len(stale)} tensors are not where it lists them, such as {key!r} in "
            f"{elsewhere[key]}: {found}"
        )
