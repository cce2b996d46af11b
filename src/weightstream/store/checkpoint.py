"""Checkpoint: a safetensors file, or a folder of shards, mapped and described. It knows no model and no device.

Everything in a header or an index may lie: each number is checked before it is used, and an index can name files of
its own folder only. A coded tensor has memory of its own, which it is decoded into when it is first read.

Of an index transformers takes the names of the shards alone: it reads all of them in the order of their names, and a
tensor that two of them hold is the last one's. So does this; `notes` says where the index has it otherwise.
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
from typing import Any

import torch

from weightstream.errors import CheckpointError, StoreError
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
_ALIGN_NBYTES = 8  # of the largest items
_PIECE_NBYTES = 16 << 20
SUFFIXES = (".safetensors", *_OTHER_FORMATS, ".ot", ".npz", ".pkl")  # of weights


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What keeps a file from being mapped or read is an error of the checkpoint."""
    try:
        yield
    except StoreError as error:
        raise CheckpointError(str(error)) from error


class Checkpoint:
    """Mapped safetensors files; `Checkpoint.open(path)` makes one, and reads headers only."""

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
        self.lazy: dict[str, LazyMemory] = {}  # of the coded entries that were asked for, what was gathered

    @classmethod
    @_refusing()
    def open(cls, path: Path | str, name: str | None = None, extra: Iterable[str] = ()) -> Checkpoint:
        """Maps a model folder, a .safetensors file or a .safetensors.index.json; raises `CheckpointError`.

        `name`: the file or index of a folder that is not to be found by its usual name. `extra`: more files of the
        folder, where they exist, whose tensors replace others of the same name.
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
            held, more = read_header(mapping)
            metadata |= more
            overlaid |= {key: entries[key] for key in held.keys() & entries.keys()}
            entries |= held
        notes = tuple(_notes(path, weight_map, entries, overlaid))
        return cls(mappings, entries, metadata, index=index, notes=notes)

    @property
    def plain_nbytes(self) -> int:
        """Bytes of all tensors, uncompressed."""
        return sum(math.prod(e.shape) * torch_dtype(e.dtype).itemsize for e in self.entries.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor that views the file; a copy where its offset is not a multiple of the item size.

        That of a coded one views its `DecodedMemory`, and holds nothing until that is populated.
        """
        entry = self.entries[name]
        data, dtype = self.bytes(entry), torch_dtype(entry.dtype)
        if entry.layout is None and entry.begin % dtype.itemsize:
            data = entry.mapping.populated(entry.begin, entry.end).clone()  # else a file that shrank kills us
        return data.view(dtype).view(entry.shape)

    def bytes(self, entry: TensorEntry) -> torch.Tensor:
        """The bytes of a tensor where they are: a view of the file, or of what a coded one is decoded into."""
        if entry.layout is None:
            return entry.mapping.bytes(entry.begin, entry.end)
        if entry.name not in self.lazy:  # one for all that view it
            extent = FileSlice(entry.mapping, entry.begin, entry.end)
            self.lazy[entry.name] = DecodedMemory(entry.name, entry.path, entry.layout, extents=[extent])
        return self.lazy[entry.name].bytes(0, entry.layout.raw_nbytes)

    def gather(
        self, name: str, parts: Iterable[tuple[str, int, int]], columns: tuple[int, int, int] | None = None
    ) -> torch.Tensor:
        """The bytes [begin, end) of tensors that are not coded, one after another: a view of the file where they lie
        so, else of a `LazyMemory` that is called `name` and holds nothing until it is populated.

        With `columns` (first, last, pitch) parts are rows of `pitch` bytes, and of each these bytes are taken.
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
        """Raises `CheckpointError` where coded bytes do not have the checksum that the file tells."""
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
            f"{', '.join(found[:4])}, …; pass the path of one file"
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
    """Returns the path of `name` in `folder`, which a link may leave only for its own hub cache's blobs."""
    is_outside = not name or name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/"))
    if is_outside or any(character in name for character in "\\\0"):
        raise CheckpointError(f"{folder}: {name!r} is no file name inside of it; files outside the folder are refused")
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
    """Whether it links to an entry of the blobs of its hub cache, which may themselves be links to another disk."""
    if not path.is_symlink():
        return False
    entry = (path.parent / path.readlink()).parent.resolve()
    # a pipeline's snapshot holds its components in folders
    places = {place for start in (folder.absolute(), folder.resolve()) for place in (start, *start.parents[:2])}
    return any(entry == (p.parents[1] / "blobs").resolve() for p in places if p.parent.name == "snapshots")


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
    """A line for the tensors that several files hold, and one for those that the index has elsewhere."""
    if overlaid:
        key = min(overlaid)
        taken, other = entries[key].path.name, overlaid[key].path.name
        listed = f", though the index lists it in {weight_map[key]}" if weight_map.get(key, taken) != taken else ""
        yield (
            f"{path}: {len(overlaid)} tensors are in several files. As in transformers the last one by the name of its "
            f"file counts: {key!r} of {taken}, not of {other}{listed}"
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
