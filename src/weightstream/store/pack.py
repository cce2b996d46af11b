"""A pack: a checkpoint written again so that each unit is contiguous and aligned. Knows tensors and files, no models.

It grows in a folder beside its place, and is renamed into it once it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from weightstream.codec import coding
from weightstream.codec.format import ALIGN_NBYTES, ELEMENTS, MAX_SHARE, Layout
from weightstream.errors import ConfigError, StoreError, UnsupportedError
from weightstream.store.atomic import remove_leftovers, replacing
from weightstream.store.checkpoint import SUFFIXES, Checkpoint
from weightstream.store.header import CODED, CODES, coded_text, dtype_name
from weightstream.store.lazy import LazyMemory
from weightstream.store.mapping import Memory

_PAGE_NBYTES = 4096
_PIECE_NBYTES = 16 << 20
_LEAST_CODED = 64 << 10  # weights

_BESIDE_NBYTES = 256 << 20  # no tokenizer is larger
_PICKLE_NBYTES = 16 << 20
_STEMS = ("pytorch_model", "diffusion_pytorch_model", "model", "consolidated", "adapter_model", "optimizer")
_TEXTS = frozenset((".py", ".json", ".txt", ".jinja"))

Advance = Callable[[int], None]  # told how many more bytes of tensors are done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A safetensors file to be: a header of whole pages, and the tensors that follow it without gaps.

    Those that have a layout are coded. Their checksums are known once they are written; the header has room for them.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    layouts: Mapping[str, Layout]
    device: torch.device  # that codes

    @property
    def nbytes(self) -> int:
        return len(self.header({})) + sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor in the file."""
        return {name: _stored_nbytes(name, tensor, self.layouts) for name, tensor in self.tensors.items()}

    def header(self, sums: Mapping[str, int]) -> bytes:
        """The beginning of the file, as long whatever the checksums are; raises `UnsupportedError` for a dtype."""
        nbytes = -(-(8 + len(self._text({}))) // _PAGE_NBYTES) * _PAGE_NBYTES - 8
        return nbytes.to_bytes(8, "little") + self._text(sums).ljust(nbytes)

    def _text(self, sums: Mapping[str, int]) -> bytes:
        texts = {"format": "pt", **self.metadata}
        if self.layouts:
            texts[CODED] = coded_text(self.layouts, {n: self.tensors[n].shape for n in self.layouts}, sums)
        facts: dict[str, Any] = {"__metadata__": texts}
        end = 0
        for name, nbytes in self.sizes().items():
            dtype, shape = dtype_name(self.tensors[name]), list(self.tensors[name].shape)
            if dtype not in CODES:
                raise UnsupportedError(f"{name} is {dtype}, which safetensors cannot hold")
            begin, end = end, end + nbytes
            code, shape = ("U8", [nbytes]) if name in self.layouts else (CODES[dtype], shape)
            facts[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        return json.dumps(facts, separators=(",", ":")).encode()

    def write(self, path: Path, mappings: Sequence[Memory], advance: Advance) -> None:
        """Writes the file; raises `OSError` where that fails, `StoreError` where a mapped file changed."""
        sums = dict.fromkeys(self.layouts, 0)
        with open(path, "wb") as file:
            file.seek(len(self.header(sums)))
            for name, tensor in self.tensors.items():
                for piece in self.pieces(name, mappings):
                    file.write(piece)
                    if name in sums:
                        sums[name] = zlib.crc32(piece, sums[name])
                advance(tensor.nbytes)
            file.seek(0)
            file.write(self.header(sums))

    def pieces(self, name: str, mappings: Sequence[Memory]) -> Iterator[Any]:
        """The bytes of a tensor in the file, in arrays."""
        with _readable(self.tensors[name], mappings) as data:
            layout = self.layouts.get(name)
            pieces = coding.pieces(data, layout, self.device) if layout else data.split(_PIECE_NBYTES)
            yield from (piece.numpy() for piece in pieces)

    def verify(self, path: Path, mappings: Sequence[Memory], advance: Advance) -> None:
        """Reads the file again; raises `StoreError` or `CheckpointError` where it is not what the source holds."""
        with open(path, "rb") as file:  # the disk's bytes, not the page cache's
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        written = Checkpoint.open(path)
        written.verify()
        if written.entries.keys() != self.tensors.keys() or written.metadata != {"format": "pt", **self.metadata}:
            raise StoreError(f"{path}: the header differs from the source: the disk or the memory may be failing")
        for name, tensor in self.tensors.items():
            found = written.tensor(name)
            homes: list[Memory] = [*written.mappings, *written.lazy.values()]
            with _readable(tensor, mappings) as expected, _readable(found, homes) as data:
                same = (found.dtype, found.shape) == (tensor.dtype, tensor.shape) and torch.equal(data, expected)
            if not same:
                raise StoreError(f"{path}: {name} differs from the source: the disk or the memory may be failing")
            advance(tensor.nbytes)


def _stored_nbytes(name: str, tensor: torch.Tensor, layouts: Mapping[str, Layout]) -> int:
    """The bytes of a tensor in a file."""
    return layouts[name].nbytes if name in layouts else tensor.nbytes


def choose(
    tensors: Mapping[str, torch.Tensor], codec: str, mappings: Sequence[Memory], device: torch.device, advance: Advance
) -> dict[str, Layout]:
    """The compressed form of each of these that are worth it; all bytes of those that can be compressed are read."""
    layouts: dict[str, Layout] = {}
    for name, tensor in tensors.items():
        dtype = dtype_name(tensor)
        if codec != "none" and tensor.numel() >= _LEAST_CODED and dtype in ELEMENTS:
            with _readable(tensor, mappings) as data:
                layout = coding.counted_layout(data, dtype, device)
            if layout.nbytes < MAX_SHARE[codec] * tensor.nbytes:
                layouts[name] = layout
        advance(tensor.nbytes)
    return layouts


@contextlib.contextmanager
def _readable(tensor: torch.Tensor, memories: Sequence[Memory]) -> Iterator[torch.Tensor]:
    """The bytes of a tensor, brought in where it views one of `memories`; raises `StoreError` where that changed."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    memory = next((m for m in memories if m.locate(data.data_ptr()) is not None), None) if data.numel() else None
    try:
        if memory is not None:
            begin = data.data_ptr() - memory.address
            memory.populate(begin, begin + data.numel())
        yield data
    finally:
        if isinstance(memory, LazyMemory):
            memory.forget()  # else a model that is not in its file as it is would be in memory as a whole


def lay_out(
    units: Iterable[Mapping[str, torch.Tensor]],
    metadata: Mapping[str, str],
    *,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
    device: torch.device = torch.device("cpu"),  # noqa: B008  # it cannot change
    shard_nbytes: int = 5 * 10**9,
    stem: str = "model",
) -> list[Shard]:
    """The shards of a pack: a unit that would exceed `shard_nbytes` begins a new one, and so does one that would not
    begin a page; where tensors are coded, 512 bytes. Those that have a layout are coded on `device`. Names of files
    begin with `stem`."""
    aligned_nbytes = ALIGN_NBYTES if layouts else _PAGE_NBYTES
    files: list[dict[str, torch.Tensor]] = []
    end = 0
    for unit in units:
        sizes = {name: _stored_nbytes(name, tensor, layouts) for name, tensor in unit.items()}
        nbytes = sum(sizes.values())
        if not files or end % aligned_nbytes or (end and end + nbytes > shard_nbytes):
            files.append({})
            end = 0
        steps = {name: ALIGN_NBYTES if name in layouts else tensor.itemsize for name, tensor in unit.items()}
        begins = accumulate(sizes.values(), initial=0)
        if any(begin % step for begin, step in zip(begins, steps.values(), strict=False)):
            unit = {name: unit[name] for name in sorted(unit, key=lambda name: -steps[name])}  # else readers copy it
        files[-1] |= unit
        end += nbytes
    shards = []
    for number, tensors in enumerate(files, 1):
        place = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        name = f"{stem}{place}.safetensors"
        coded = {name: layouts[name] for name in tensors if name in layouts}
        shards.append(Shard(name=name, tensors=tensors, metadata=metadata, layouts=coded, device=device))
    return shards


@contextlib.contextmanager
def growing(out: Path) -> Iterator[Path]:
    """The folder that the pack `out` grows in, which takes its place at the end; what a killed run left goes first.

    Raises `ConfigError` where something is in its place, `StoreError` where files cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists: name another folder, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out)
        with replacing(out) as folder:
            folder.mkdir()
            yield folder
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error}") from error


def write(
    folder: Path, shards: Sequence[Shard], mappings: Sequence[Memory], advance: Advance, stem: str = "model"
) -> None:
    """Writes the shards; raises `StoreError` where there is no room or a mapped file changed, `OSError`."""
    needed, free = sum(shard.nbytes for shard in shards), shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(f"{folder}: {needed} bytes to write > {free} bytes free: make room for {needed - free} more")
    for shard in shards:
        shard.write(folder / shard.name, mappings, advance)
    if len(shards) > 1:
        total = sum(sum(shard.sizes().values()) for shard in shards)
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for mapping in mappings:  # it may have changed after its last piece was read
        mapping.check()


def copy_beside(source: Path, folder: Path, *, deep: bool = False) -> None:
    """Copies what the folder `source` holds beside weights; with `deep` code and texts of folders in it, too."""
    for path in source.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_file() and not _is_of_weights(path) and path.stat().st_size <= _BESIDE_NBYTES:
            shutil.copyfile(path, folder / path.name)
        elif deep and path.is_dir():
            for text in (file for file in path.rglob("*") if file.suffix in _TEXTS and file.is_file()):
                (folder / text.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(text, folder / text.relative_to(source))


def _is_of_weights(path: Path) -> bool:
    """Whether a file is of a model's weights. A small pickle with a name of its own is something else that the code of
    a model reads, such as the voices of Qwen2.5-Omni."""
    if path.suffix in (".pt", ".pth", ".bin") and path.stat().st_size <= _PICKLE_NBYTES:
        return path.name.startswith(_STEMS)
    return path.name.endswith(SUFFIXES) or ".index." in path.name
