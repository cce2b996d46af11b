"""`weightstream pack`: writes a checkpoint again in the order that its weights stream in."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weightstream import __version__
from weightstream.cli.options import require
from weightstream.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from weightstream.adapters.transformers import LoadedModel
    from weightstream.codec.chunks import Coder
    from weightstream.store.checkpoint import Checkpoint
    from weightstream.store.header import TensorEntry
    from weightstream.store.mapping import FileMapping

_DEVICE_TILES = 2048  # 16 MiB of bfloat16


def pack(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its repository id on the hub.")],
    out: Annotated[Path, typer.Argument(help="Folder to write: the same model, to be used in its place.")],
    codec: Annotated[
        Literal["none", "auto", "3bit", "4bit"],
        typer.Option("--codec", help="Code the weights, bit for bit; auto: what gains, each by its smaller code."),
    ] = "none",
    verify: Annotated[bool, typer.Option("--verify", help="Read OUT again and compare it with MODEL.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")
    ] = False,
) -> None:
    """Write MODEL's weights to OUT in the order that they stream in. Interrupted, the same command goes on.

    OUT is an ordinary safetensors checkpoint, and appears once it is whole. Coded, it is smaller, and weightstream
    alone reads it.
    """
    transformers = require("transformers", "transformers", "weightstream pack")
    import torch
    from rich import progress
    from rich.console import Console

    from weightstream.adapters.transformers import load_pretrained, local_path
    from weightstream.plan.plan import human
    from weightstream.store import pack as store
    from weightstream.store import shard
    from weightstream.store.checkpoint import Checkpoint

    began = time.perf_counter()
    source = local_path(model, trust_remote_code)
    folder = source if source.is_dir() else source.parent
    place = _place(out.expanduser(), folder)
    packed = store.is_packed(place, Checkpoint.open(source).fingerprint(), codec)
    if packed and not verify:
        typer.echo(f"{out}: already packed; --verify compares it with {model}")
        return
    shown = sys.stderr.isatty()
    made_by = {package.__name__: package.__version__ for package in (torch, transformers)} | {
        "weightstream": __version__
    }
    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    bar = progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)
    with store.growing(place) as partial_folder:
        converted = partial_folder / store.CONVERTED
        loaded = load_pretrained(source, offload_folder=converted, trust_remote_code=trust_remote_code, progress=shown)
        streamed, rest = streaming_order(loaded)
        mappings: list[shard.Mapped] = [*loaded.mappings, *loaded.decoded]
        coder = _coder()
        candidates = shard.codable({name: tensor for unit in streamed for name, tensor in unit.items()}, codec)
        counted = sum(tensor.nbytes for tensor in candidates.values())
        with bar:
            task = bar.add_task("", total=counted)
            advance = partial(bar.advance, task)
            layouts = shard.choose(candidates, codec, mappings, coder, advance)
            units = [unit for unit in (*streamed, rest) if unit]
            shards = store.lay_out(units, loaded.checkpoint.metadata, layouts=layouts, coder=coder)
            nbytes = sum(file.nbytes for file in shards)
            bar.update(task, total=counted + nbytes * (verify + (not packed)))
            if not packed:
                origin = {"source": loaded.checkpoint.fingerprint(), "codec": codec, **made_by}
                store.write(partial_folder, shards, mappings, origin, advance)
            if verify:
                store.verify(place if packed else partial_folder, shards, mappings, advance)
        if not packed:
            store.finish(partial_folder, place, folder)
    done = " and ".join(["packed"] * (not packed) + ["verified"] * verify)
    count = f"{sum(len(file.tensors) for file in shards)} tensors, {human(nbytes)} ({nbytes} bytes)"
    raw = sum(tensor.nbytes for file in shards for tensor in file.tensors.values())
    count += f", {nbytes / raw:.2f} of {human(raw)}," if layouts else ""
    typer.echo(f"{out}: {done} {count} in {len(shards)} files in {time.perf_counter() - began:.1f} s")


def _place(out: Path, folder: Path) -> Path:
    if out.is_symlink():
        raise ConfigError(f"{out} is a link to {out.readlink()}: name the folder itself")
    if out.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{out} is in the model's folder {folder}: name a folder outside of it")
    if Path.cwd().is_relative_to(out.resolve()):
        raise ConfigError(f"{out} is or holds the folder that this runs in: name a new one")
    return out.resolve()


def _coder() -> Coder:
    """A GPU that codes, else the CPU."""
    import torch

    from weightstream.codec import coding
    from weightstream.codec.chunks import Coder

    device = torch.accelerator.current_accelerator()
    if device is None or coding.why_not(device) is not None:
        return Coder()
    return Coder(encode=coding.encode, device=str(device), num_tiles=_DEVICE_TILES)


def streaming_order(loaded: LoadedModel) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The weights by unit, in the ring's order; and, together, what is too small to stream and what is not used.

    A tensor that views the checkpoint keeps its name there; one that transformers made has the model's, the first of
    tied ones.
    """
    from weightstream.adapters.module import find_units
    from weightstream.adapters.transformers import unused_names
    from weightstream.plan.placement import always_resident
    from weightstream.runtime.weights import groups, manifest, merge_tied

    model, entries = loaded.model, loaded.checkpoint.entries
    files = {mapping.path: mapping for mapping in loaded.checkpoint.mappings}
    state = model.state_dict()
    names = {
        (_address(entry, files, loaded.checkpoint), entry.shape): entry.name
        for entry in entries.values()
        if entry.begin < entry.end
    }
    for name, tensor in state.items():
        if tensor.numel():
            names.setdefault(_key(tensor), name)
    left = {names[_key(tensor)] if tensor.numel() else name: tensor for name, tensor in state.items()}
    by_alias = groups(model)
    plan = manifest(merge_tied(find_units(model), by_alias), by_alias)
    streamed = by_alias.keys() - always_resident(plan)
    units: list[dict[str, torch.Tensor]] = []
    for unit in plan.units:
        members = (member for alias in unit.aliases() if alias in streamed for member in by_alias[alias].members)
        found = (names.get(_key(member.tensor), "") for member in members)
        units.append({name: left.pop(name) for name in found if name in left})
    unused = {name: loaded.checkpoint.tensor(name) for name in unused_names(model, entries)}
    return units, left | unused


def _address(entry: TensorEntry, files: Mapping[Path, FileMapping], checkpoint: Checkpoint) -> int:
    if entry.layout is not None:
        return checkpoint.memory(entry.name).address
    return files[entry.path].bytes(entry.begin, entry.end).data_ptr()


def _key(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """What tied weights have in common, and a tensor with the entry of the checkpoint that it views."""
    return tensor.data_ptr(), tuple(tensor.shape)
