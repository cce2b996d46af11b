"""Checkpoint: a safetensors file, or a folder of shards, mapped and described. It knows no model and no device.

Everything in a header or an index may lie: each number is checked before it is used, and an index can name files of
its own folder only. A coded tensor has memory of its own, which it is decoded into when it is first read.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from weightstream.errors import CheckpointError, StoreError
from weightstream.store.decoded import DecodedMemory, LazyMemory
from weightstream.store.extent import Extent
from weightstream.store.header import REMEDY, TensorEntry, read_header, read_json, torch_dtype
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
        self, mappings: Sequence[FileMapping], entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]
    ) -> None:
        self.mappings, self.entries, self.metadata = tuple(mappings), entries, metadata
        self.lazy: dict[str, LazyMemory] = {}  # of the coded entries that were asked for, what was gathered

    @classmethod
    @_refusing()
    def open(cls, path: Path | str) -> Checkpoint:
        """Maps a model folder, a .safetensors file or a .safetensors.index.json; raises `CheckpointError`."""
        path = Path(path)
        if os.path.isdir(path):  # Path.is_dir raises where a name is too long
            path = within(path, _weights_of(path))
        _refuse_other_format(path, [path])
        weight_map = _read_weight_map(path) if path.suffix == ".json" else {}
        shards = {name: within(path.parent, name) for name in sorted(set(weight_map.values()))}
        mappings = [FileMapping(shard) for shard in shards.values() or [path]]
        entries: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        for mapping in mappings:
            held, more = read_header(mapping)
            metadata |= more
            for key in held.keys() & entries.keys():
                raise CheckpointError(f"{path}: {key!r} is in two shards, {entries[key].path} and {mapping.path}")
            entries |= held
        for key, name in weight_map.items():
            if key not in entries or entries[key].path != shards[name]:
                raise CheckpointError(f"{path}: lists {key!r} in {name!r}, and that shard does not hold it")
        return cls(mappings, entries, metadata)

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
            extent = Extent(entry.mapping, entry.begin, entry.end)
            self.lazy[entry.name] = DecodedMemory(entry.name, entry.path, entry.layout, extents=[extent])
        return self.lazy[entry.name].bytes(0, entry.layout.raw_nbytes)

    def gather(
        self, name: str, parts: Iterable[tuple[str, int, int]], columns: tuple[int, int, int] | None = None
    ) -> torch.Tensor:
        """The bytes [begin, end) of tensors that are not coded, one after another: a view of the file where they lie
        so, else of a `LazyMemory` that is called `name` and holds nothing until it is populated.

        With `columns` (first, last, pitch) parts are rows of `pitch` bytes, and of each these bytes are taken.
        """
        extents: list[Extent] = []
        for source, begin, end in parts:
            entry = self.entries[source]
            mapping, begin, end = entry.mapping, entry.begin + begin, entry.begin + end
            if extents and extents[-1].mapping is mapping and extents[-1].end == begin:
                begin = extents.pop().begin
            extents.append(Extent(mapping, begin, end))
        if columns is not None:
            first, last, pitch = columns
            extents = [
                Extent(m, begin + first, end - pitch + last, last - first, pitch) for m, begin, end, *_ in extents
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


def within(folder: Path, name: str) -> Path:
    """Returns the path of `name` in `folder`, which a link may leave only for its own hub cache's blobs."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name; files outside the folder are refused")
    try:
        root, target = folder.resolve(), (folder / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise CheckpointError(f"{folder}: {name!r} is missing; download the model again ({error})") from error
    # a pipeline's snapshot holds its components in folders
    snapshots = [path.parent for path in (root, root.parent) if path.parent.name == "snapshots"]
    homes = [root, *(path.parent / "blobs" for path in snapshots)]
    if not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(f"{folder}: {name!r} links to {target}, outside the model folder; refused unopened")
    return folder / name


def _crc32(entry: TensorEntry) -> int:
    crc32 = 0
    for begin in range(entry.begin, entry.end, _PIECE_NBYTES):
        end = min(begin + _PIECE_NBYTES, entry.end)
        piece: Any = entry.mapping.populated(begin, end).numpy()
        crc32 = zlib.crc32(piece, crc32)  # without the GIL
    return crc32


def _read_weight_map(path: Path) -> dict[str, str]:
    mapping = FileMapping(path)
    weight_map = read_json(mapping, 0, mapping.nbytes).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: 'weight_map' is absent or empty; it must map tensor names to file names")
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: {key!r} maps to {name!r}, not to a file name")
    return weight_map
