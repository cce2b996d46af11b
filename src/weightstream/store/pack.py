"""A pack: a checkpoint written again so that each unit is contiguous and aligned. Knows tensors and files, no models.

It grows in a folder beside its place, and is renamed into it once it is whole.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import torch

from weightstream.codec.chunks import Coder
from weightstream.codec.format import ALIGN_NBYTES, Layout
from weightstream.errors import ConfigError, StoreError
from weightstream.store.atomic import remove_leftovers, replacing
from weightstream.store.checkpoint import SUFFIXES
from weightstream.store.shard import PAGE_NBYTES, Advance, Mapped, Shard, stored_nbytes

_BESIDE_NBYTES = 256 << 20  # no tokenizer is larger


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
    aligned_nbytes = ALIGN_NBYTES if layouts else PAGE_NBYTES
    files: list[dict[str, torch.Tensor]] = []
    end = 0
    for unit in units:
        sizes = {name: stored_nbytes(name, tensor, layouts) for name, tensor in unit.items()}
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


def write(folder: Path, shards: Sequence[Shard], mappings: Sequence[Mapped], advance: Advance) -> None:
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
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for mapping in mappings:  # it may have changed after its last piece was read
        mapping.check()


def copy_beside(source: Path, folder: Path) -> None:
    """Copies what the folder `source` holds beside weights."""
    for path in source.iterdir():
        is_ours = path.name.endswith((*SUFFIXES, ".index.json")) or path.name.startswith(".")
        if not is_ours and path.is_file() and path.stat().st_size <= _BESIDE_NBYTES:
            shutil.copyfile(path, folder / path.name)
