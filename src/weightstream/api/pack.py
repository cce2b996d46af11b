"""Packs a checkpoint: chooses the place and the name of each tensor in the pack. Knows models, not file formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weightstream.adapters.hf import private, private_quantised
from weightstream.adapters.hf.hub import ADAPTER, find, is_quantised, names_pipeline
from weightstream.adapters.hf.load import LoadedModel, load_pretrained
from weightstream.adapters.modules.partition import find_units
from weightstream.codec import coding
from weightstream.codec.format import ELEMENTS, Layout
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.measure.progress import lasting
from weightstream.plan.search import always_resident
from weightstream.runtime.weights.alias_groups import groups, manifest, merge_tied
from weightstream.settings.arguments import check_source
from weightstream.settings.config import OffloadConfig
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.header import dtype_name
from weightstream.store.mapping import Memory
from weightstream.store.pack import Shard, check_place, choose, copy_beside, growing, lay_out, write_pack

_SMALL_NBYTES = 4096  # smaller tensors that belong to quantised weights do not go into a unit's file
_Key = tuple[int, tuple[int, ...]]
PhaseAdvance = Callable[[str, int, int], None]


def pack(
    path_or_repo_id: str,
    out: Path,
    *,
    codec: str = "none",
    verify: bool = False,
    trust_remote_code: bool = False,
    variant: str | None = None,
    progress: bool = False,
    advance: PhaseAdvance = lambda phase, total, nbytes: None,
) -> list[Shard]:
    """Write a checkpoint again, in the order in which its weights stream.

    Args:
        path_or_repo_id: a folder of a model or a pipeline, or the name of a repository on the Hub.
        out: the folder of the pack.
        codec: "none", "auto" or "compressed", as in `OffloadConfig`.
        verify: read the pack again and compare it with the checkpoint.
        trust_remote_code: run Python code that comes with the model, as for transformers.
        variant: the variant of a pipeline's files, such as "fp16".
        progress: show a bar while the checkpoint is loaded.
        advance: called with a phase, such as "writing", the bytes of the model that it is for, and the bytes of these
            that are done since the last call. Each phase begins once the one before has ended.

    Returns:
        The files of the pack.

    Raises:
        ConfigError: an argument is wrong, or the folder of the pack cannot be used.
        UnsupportedError: the checkpoint is quantised, or an adapter, in a way that cannot be packed.
        CheckpointError: a file is missing, malformed or of an unsupported format.
    """
    options = _PackOptions(OffloadConfig(codec=codec).codec, verify, advance)  # type: ignore[arg-type]  # pydantic checks it
    check_source(path_or_repo_id)
    out = _place(out.expanduser())
    check_place(out)  # now, not after minutes of download
    if names_pipeline(path_or_repo_id):
        from weightstream.adapters.diffusers.folder import folder_of, specs_of  # needs diffusers

        folder = folder_of(path_or_repo_id, variant)
        _check_outside(out, folder)
        with growing(out) as grown:
            return list(_pipeline(folder, specs_of(folder), grown, options, variant))
    if variant is not None:
        raise ConfigError(f"{path_or_repo_id} is not a diffusers pipeline: leave out variant")
    found = find(path_or_repo_id, trust_remote_code)
    source, folder = found.path, found.folder
    if (adapter := found.adapter or (folder if (folder / ADAPTER).is_file() else None)) is not None:
        raise UnsupportedError(
            f"{adapter}: {ADAPTER} belongs to an adapter, which a pack cannot contain: pack the model without it and "
            "load it with model.load_adapter(folder), or merge it: peft's merge_and_unload(), save_pretrained(), then "
            "pack that"
        )
    may_write = options.may_write(folder)
    _check_outside(out, folder)
    with growing(out) as grown:
        with lasting(f"loading {path_or_repo_id}"):
            loaded = load_pretrained(
                source,
                offload_folder=grown,
                trust_remote_code=trust_remote_code,
                progress=progress,
                may_write=may_write,
                is_kept=True,
            )
        shards = _packed(loaded, grown, options)
        copy_beside(folder, grown, deep=True)
        _describe(grown / "config.json", loaded.model.config)
    return shards


def _describe(path: Path, config: Any) -> None:
    """Make a pack's config.json describe the files of the pack: it names no other file of weights, and it has a dtype.

    Without a dtype transformers would take that of the first tensor in the first file.
    """
    original = json.loads(path.read_bytes())
    described = {key: value for key, value in original.items() if key != "transformers_weights"}
    if described.get("dtype", described.get("torch_dtype")) is None and config.dtype is not None:
        described["dtype"] = str(config.dtype).removeprefix("torch.")
    if described != original:
        path.write_text(json.dumps(described, indent=2))


class _PackOptions(NamedTuple):
    """Options of a pack.

    Attributes:
        codec: which tensors are compressed.
        verify: whether the pack is read again and compared.
        advance: as of `pack`.
    """

    codec: str
    verify: bool
    advance: PhaseAdvance

    def may_write(self, folder: Path) -> bool:
        """Whether loading may write converted tensors to files. Not for quantised weights, which are packed unchanged.

        Raises `UnsupportedError` if quantised weights are to be compressed.
        """
        if not is_quantised(folder):
            return True
        if self.codec != "none":
            raise UnsupportedError(f"{folder}: quantised weights are packed unchanged: leave out codec={self.codec!r}")
        return False


def _pipeline(
    folder: Path, specs: Mapping[str, Any], grown: Path, options: _PackOptions, variant: str | None
) -> Iterator[Shard]:
    """Pack each component of a pipeline, under file names without a variant, and copy all other files."""
    from weightstream.adapters.diffusers import load

    for name, kind in specs.items():
        (grown / name).mkdir()
        may_write = options.may_write(folder / name)
        loaded = load.load_component(kind, folder / name, grown, variant=variant, may_write=may_write)
        stem = "model" if hasattr(loaded.model, "base_model_prefix") else "diffusion_pytorch_model"
        named = options._replace(advance=partial(_of_component, options.advance, name))
        yield from _packed(loaded, grown / name, named, stem)
        copy_beside(folder / name, grown / name)
    for path in folder.iterdir():
        if path.is_dir() and path.name not in specs and not path.name.startswith("."):
            (grown / path.name).mkdir()
            copy_beside(path, grown / path.name)
    copy_beside(folder, grown)


def _of_component(advance: PhaseAdvance, name: str, phase: str, total: int, nbytes: int) -> None:
    advance(f"{phase} {name}", total, nbytes)


def _packed(loaded: LoadedModel, folder: Path, options: _PackOptions, stem: str = "model") -> list[Shard]:
    """Write the files of one model into a folder."""
    *streamed, rest = streaming_order(loaded)
    candidates = {name: tensor for unit in streamed for name, tensor in unit.items()}
    nbytes, rest_nbytes = (sum(t.nbytes for t in tensors.values()) for tensors in (candidates, rest))
    mappings: list[Memory] = [*loaded.mappings, *loaded.lazy]
    dtypes = {dtype_name(tensor) for tensor in candidates.values()} & ELEMENTS.keys()
    device = _device(dtypes if options.codec != "none" else ())
    layouts: dict[str, Layout] = {}
    if options.codec != "none":
        measured = partial(options.advance, "measuring compressed sizes", nbytes)
        layouts = choose(candidates, options.codec, mappings, device, measured)
    units = [unit for unit in (*streamed, rest) if unit]
    shards = lay_out(units, loaded.checkpoint.metadata, layouts=layouts, device=device, stem=stem)
    write_pack(folder, shards, mappings, partial(options.advance, "writing", nbytes + rest_nbytes), stem)
    for shard in shards if options.verify else ():
        verified = partial(options.advance, "verifying", nbytes + rest_nbytes)
        shard.verify(folder / shard.name, mappings, verified)
    if loaded.folder is not None:
        loaded.folder.close()
    return shards


def _place(out: Path) -> Path:
    """The folder of the pack; raises `ConfigError` if a pack there would overwrite something else."""
    if out.is_symlink():
        raise ConfigError(f"{out} is a link to {out.readlink()}: name the folder itself")
    if Path.cwd().is_relative_to(out.resolve()):
        raise ConfigError(f"{out} is or contains the current working directory: name a new folder")
    return out.resolve()


def _check_outside(out: Path, folder: Path) -> None:
    """Raise `ConfigError` if the pack would be in the model's folder."""
    if out.is_relative_to(folder.resolve()):
        raise ConfigError(f"{out} is in the model's folder {folder}: name a folder outside of it")


def _device(dtypes: Collection[str]) -> torch.device:
    """The current GPU if it has kernels for these dtypes, else the CPU."""
    device = torch.accelerator.current_accelerator()
    has_kernels = device is not None and all(coding.why_not(device, dtype) is None for dtype in dtypes)
    return device if device is not None and has_kernels else torch.device("cpu")


def streaming_order(loaded: LoadedModel) -> list[dict[str, torch.Tensor]]:
    """The weights of each unit in streaming order. The last entry holds all weights that do not stream or are not used.

    A tensor that views the checkpoint keeps its name there. A tensor that transformers made has its name in the model,
    the first one of tied weights. Of a quantised checkpoint each tensor is kept, whatever modules its library makes.
    """
    model, checkpoint = loaded.model, loaded.checkpoint
    as_it_is = private_quantised.is_loaded_quantised(model)
    state = {name: checkpoint.tensor(name) for name in checkpoint.entries} if as_it_is else model.state_dict()
    names = _names(checkpoint, state)
    remaining = {names[_key(tensor)] if tensor.numel() else name: tensor for name, tensor in state.items()}
    by_alias = groups(model)
    plan = manifest(merge_tied(find_units(model), by_alias), by_alias)
    streamed = by_alias.keys() - always_resident(plan)
    units: list[dict[str, torch.Tensor]] = []
    for unit in plan.units:
        members = (member for alias in unit.aliases() if alias in streamed for member in by_alias[alias].members)
        large = (m for m in members if m.tensor.nbytes >= _SMALL_NBYTES or not as_it_is)
        of_unit = (names.get(_key(member.tensor), "") for member in large)
        units.append({name: remaining.pop(name) for name in of_unit if name in remaining})
    is_transformers = hasattr(model, "base_model_prefix")  # transformers skips weights that its class does not use
    names_unused = private.unused_names(model, checkpoint.entries) if is_transformers and not as_it_is else []
    unused = {name: checkpoint.tensor(name) for name in names_unused}
    return [*units, remaining | unused]


def _names(checkpoint: Checkpoint, state: Mapping[str, torch.Tensor]) -> dict[_Key, str]:
    """The name of each tensor, by its memory and shape. Names of the checkpoint take precedence."""
    entries = [entry for entry in checkpoint.entries.values() if entry.begin < entry.end]
    names = {(checkpoint.bytes(entry).data_ptr(), entry.shape): entry.name for entry in entries}
    for name, tensor in state.items():
        if tensor.numel():
            names.setdefault(_key(tensor), name)
    return names


def _key(tensor: torch.Tensor) -> _Key:
    """The memory and shape of a tensor: equal for tied weights, and for an entry of a checkpoint and its views."""
    return tensor.data_ptr(), tuple(tensor.shape)
