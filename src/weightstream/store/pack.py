"""A pack: a checkpoint rewritten so that each unit is contiguous and aligned. Knows tensors and files, no models.

It is written to a temporary folder next to its final path, and renamed once it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from weightstream.codec import coding
from weightstream.codec.format import CODED_ALIGN_NBYTES, ELEMENTS, MAX_SHARE, Layout
from weightstream.errors import ConfigError, StoreError, UnsupportedError
from weightstream.plan.units import human
from weightstream.store.atomic import remove_leftovers, replacing
from weightstream.store.checkpoint import SUFFIXES, Checkpoint
from weightstream.store.header import CODED, CODES, coded_text, dtype_name
from weightstream.store.lazy import LazyMemory
from weightstream.store.mapping import Memory

_PAGE_NBYTES = 4096
_PIECE_NBYTES = 16 << 20
_LEAST_CODED = 64 << 10  # weights of a tensor that is compressed

_OTHER_NBYTES = 256 << 20  # of a file besides weights, at most: no tokenizer is larger
_PICKLE_NBYTES = 16 << 20
_STEMS = ("pytorch_model", "diffusion_pytorch_model", "model", "consolidated", "adapter_model", "optimizer")
_TEXTS = frozenset((".py", ".json", ".txt", ".jinja"))

Advance = Callable[[int], None]  # called with the number of further bytes of tensors that are done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A safetensors file to be written: a header of whole pages, followed by the tensors without gaps.

    Tensors with a layout are compressed. Their checksums are known once they are written; the header reserves space.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    layouts: Mapping[str, Layout]
    device: torch.device  # that compresses

    @property
    def nbytes(self) -> int:
        return len(self.header({})) + sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor in the file."""
        return {name: _stored_nbytes(name, tensor, self.layouts) for name, tensor in self.tensors.items()}

    def header(self, sums: Mapping[str, int]) -> bytes:
        """The header, whose length does not depend on the checksums; raises `UnsupportedError` for a dtype."""
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
        """Write the file; raises `OSError` if that fails, `StoreError` if a mapped file changed."""
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
        """The stored bytes of a tensor, in arrays."""
        with _readable(self.tensors[name], mappings) as data:
            layout = self.layouts.get(name)
            pieces = coding.pieces(data, layout, self.device) if layout else data.split(_PIECE_NBYTES)
            yield from (piece.numpy() for piece in pieces)

    def verify(self, path: Path, mappings: Sequence[Memory], advance: Advance) -> None:
        """Read the file again; raises `StoreError` or `CheckpointError` if it differs from the source."""
        with open(path, "rb") as file:  # read from the disk, not from the page cache
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        written = Checkpoint.open(path)
        written.verify()
        if written.entries.keys() != self.tensors.keys() or written.metadata != {"format": "pt", **self.metadata}:
            raise StoreError(f"{path}: the header differs from the source: the disk or the memory may be failing")
        for name, tensor in self.tensors.items():
            stored = written.tensor(name)
            memories: list[Memory] = [*written.mappings, *written.lazy.values()]
            with _readable(tensor, mappings) as expected, _readable(stored, memories) as data:
                same = (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape) and torch.equal(data, expected)
            if not same:
                raise StoreError(f"{path}: {name} differs from the source: the disk or the memory may be failing")
            advance(tensor.nbytes)


def _stored_nbytes(name: str, tensor: torch.Tensor, layouts: Mapping[str, Layout]) -> int:
    """Bytes of a tensor in a file, compressed or not."""
    return layouts[name].nbytes if name in layouts else tensor.nbytes


def choose(
    tensors: Mapping[str, torch.Tensor], codec: str, mappings: Sequence[Memory], device: torch.device, advance: Advance
) -> dict[str, Layout]:
    """The layouts of the tensors that are worth compressing; reads all bytes of those that can be compressed."""
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
    """The bytes of a tensor, populated if it views one of `memories`; raises `StoreError` if a file changed."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    memory = next((m for m in memories if m.locate(data.data_ptr()) is not None), None) if data.numel() else None
    try:
        if memory is not None:
            begin = data.data_ptr() - memory.address
            memory.populate(begin, begin + data.numel())
        yield data
    finally:
        if isinstance(memory, LazyMemory):
            memory.forget()  # else a model that is decoded or gathered would be in memory as a whole


def lay_out(
    units: Iterable[Mapping[str, torch.Tensor]],
    metadata: Mapping[str, str],
    *,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
    device: torch.device = torch.device("cpu"),  # noqa: B008  # immutable
    shard_nbytes: int = 5 * 10**9,
    stem: str = "model",
) -> list[Shard]:
    """Divide units into the shards of a pack. Tensors with a layout are compressed, on `device`.

    A unit that would exceed `shard_nbytes`, or would not begin at a page (of 512 bytes, if there are layouts), begins a
    new shard. Names of files begin with `stem`.
    """
    aligned_nbytes = CODED_ALIGN_NBYTES if layouts else _PAGE_NBYTES
    files: list[dict[str, torch.Tensor]] = []
    end = 0
    for unit in units:
        sizes = {name: _stored_nbytes(name, tensor, layouts) for name, tensor in unit.items()}
        nbytes = sum(sizes.values())
        if not files or end % aligned_nbytes or (end and end + nbytes > shard_nbytes):
            files.append({})
            end = 0
        steps = {name: CODED_ALIGN_NBYTES if name in layouts else tensor.itemsize for name, tensor in unit.items()}
        begins = accumulate(sizes.values(), initial=0)
        if any(begin % step for begin, step in zip(begins, steps.values(), strict=False)):
            unit = {
                name: unit[name] for name in sorted(unit, key=lambda name: -steps[name])
            }  # sorted by alignment, else readers would copy
        files[-1] |= unit
        end += nbytes
    shards = []
    for number, tensors in enumerate(files, 1):
        place = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        name = f"{stem}{place}.safetensors"
        coded = {name: layouts[name] for name in tensors if name in layouts}
        shards.append(Shard(name=name, tensors=tensors, metadata=metadata, layouts=coded, device=device))
    return shards


def check_place(out: Path) -> None:
    """Raise `ConfigError` if `out` exists, `StoreError` if no folder can be made there. Makes no folder that stays."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists: name a new folder")
        existing = next(folder for folder in out.parents if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=f".{out.name}.", dir=existing))
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}; name another folder") from error


@contextlib.contextmanager
def growing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes the pack `out` at the end; removes the leftovers of killed runs first.

    Raises as `check_place` does, and `StoreError` if files cannot be written.
    """
    check_place(out)
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


def write_pack(
    folder: Path, shards: Sequence[Shard], mappings: Sequence[Memory], advance: Advance, stem: str = "model"
) -> None:
    """Write the shards; raises `StoreError` if a mapped file changed, and `OSError`, also if space is lacking."""
    needed, free = sum(shard.nbytes for shard in shards), shutil.disk_usage(folder).free
    if needed > free:  # `growing` adds the name of the pack: the folder has another one until it is complete
        raise OSError(f"{human(needed)} to write > {human(free)} free: free {human(needed - free)} more")
    for shard in shards:
        shard.write(folder / shard.name, mappings, advance)
    if len(shards) > 1:
        total = sum(sum(shard.sizes().values()) for shard in shards)
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for mapping in mappings:  # a file may have changed after its last piece was read
        mapping.check()


def copy_beside(source: Path, folder: Path, *, deep: bool = False) -> None:
    """Copy the files of the folder `source` that are not weights; with `deep` also code and texts in its folders."""
    for path in source.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_file() and not _is_of_weights(path) and path.stat().st_size <= _OTHER_NBYTES:
            shutil.copyfile(path, folder / path.name)
        elif deep and path.is_dir():
            for text in (file for file in path.rglob("*") if file.suffix in _TEXTS and file.is_file()):
                (folder / text.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(text, folder / text.relative_to(source))


def _is_of_weights(path: Path) -> bool:
    """Whether a file holds weights of a model. A small pickle with another name does not: the code of a model reads it,
    such as the voices of Qwen2.5-Omni."""
    if path.suffix in (".pt", ".pth", ".bin") and path.stat().st_size <= _PICKLE_NBYTES:
        return path.name.startswith(_STEMS)
    return path.name.endswith(SUFFIXES) or ".index." in path.name
