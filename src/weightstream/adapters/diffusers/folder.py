"""The folder of a pipeline: its components, their classes, files and dtypes, and skeletons of them.

Reads configs and headers, but no tensors.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from weightstream.adapters.diffusers import private
from weightstream.adapters.hf.hub import DESCRIBING, PIPELINE, local_path
from weightstream.errors import CheckpointError, ConfigError
from weightstream.measure.progress import downloading
from weightstream.plan.units import some
from weightstream.store.checkpoint import Checkpoint, within

_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
_COMPUTES = ("bfloat16", "float16", "float32", "float64")
_PASSED_ON = frozenset(("custom_pipeline", "custom_revision", "trust_remote_code"))
_ELSEWHERE = MappingProxyType(
    {
        "device_map": "device= sets where a pipeline computes, and device_budget= how much of its weights stays there",
        "max_memory": "device_budget= sets the device memory for weights",
        "quantization_config": "files are loaded as they are: quantise a component with diffusers and save it, or pass "
        "a quantised component",
    }
)
_Pipeline: Any = diffusers.DiffusionPipeline


def folder_of(name: str | Path, variant: str | None, progress: bool | None = None, **hub: Any) -> Path:
    """The folder of a pipeline, downloaded from the Hub if `name` is not a path; `progress` as for `hub.local_path`.

    Raises `CheckpointError`.
    """
    if (path := Path(name).expanduser()).is_dir():
        return path
    if isinstance(name, Path) or str(name).startswith((".", "/", "~")):
        raise CheckpointError(f"{name}: no such file or folder")
    try:
        with downloading(str(name), progress):
            path = Path(_Pipeline.download(str(name), variant=variant, use_safetensors=True, **hub))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name!r} is not a local folder, and its download from the Hub failed: {error}; "
            "check the name, the network and `hf auth login`, or pass a folder"
        ) from error
    return path


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / PIPELINE).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a pipeline: its {PIPELINE} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise CheckpointError(f"{folder} is not a pipeline: its {PIPELINE} is not a JSON object")
    return facts


def specs_of(folder: Path) -> dict[str, Any]:
    """The classes of the components with weights, by name."""
    parts = {name: value for name, value in _facts(folder).items() if isinstance(value, list) and len(value) == 2}
    if others := [name for name in parts if not name.isidentifier()]:
        raise CheckpointError(f"{folder}: {PIPELINE} names a component {others[0]!r}, which cannot be a folder in it")
    kinds = {name: _kind(library, kind) for name, (library, kind) in parts.items() if library and kind}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def around(folder: Path, keywords: Mapping[str, Any]) -> Any:
    """The pipeline of a folder, with the components in `keywords`; diffusers loads the others, but no pickles."""
    facts = _facts(folder)
    if not keywords.get("trust_remote_code"):
        _refuse_code(folder, facts)
    # its own class: the general one does not know which components are optional, and would load them again
    return _class_of(folder, facts).from_pretrained(str(folder), use_safetensors=True, **keywords)


def _refuse_code(folder: Path, facts: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for code that diffusers would run; before 0.37 it does so without `trust_remote_code`."""
    places = [(folder / name, value[0]) for name, value in facts.items() if isinstance(value, list) and value]
    files = [path / f"{module}.py" for place, module in places for path in (place, folder)]
    for file in (*files, folder / "None.py"):  # diffusers looks for this name if no custom pipeline is set
        if file.is_file():
            raise CheckpointError(f"{file}: code that diffusers would run; read it, then pass trust_remote_code=True")


def _class_of(folder: Path, facts: Mapping[str, Any]) -> Any:
    """The pipeline's class; the general one if its code is in the folder. Raises `CheckpointError`."""
    name = facts.get("_class_name")
    if isinstance(name, list):  # a module in the folder, and a class in it
        return _Pipeline
    if not isinstance(name, str):
        raise CheckpointError(f"{folder} is not a pipeline: its {PIPELINE} has no _class_name")
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, _Pipeline)):
        raise CheckpointError(f"{folder}: diffusers {diffusers.__version__} has no pipeline {name}; a newer one may")
    return kind


def call_keywords(path_or_repo_id: str | Path) -> Collection[str]:
    """The keywords of a call of the pipeline. Raises `CheckpointError`."""
    _, folder = local_path(path_or_repo_id, remote_code=False, files=DESCRIBING)
    return inspect.signature(_class_of(folder, _facts(folder)).__call__).parameters.keys()


def check_keywords(folder: Path, keywords: Iterable[str]) -> None:
    """Raise `ConfigError` for keywords that a pipeline does not take, as diffusers would ignore them."""
    facts = _facts(folder)
    kind = _class_of(folder, facts)
    takes = {*inspect.signature(kind.__init__).parameters, *facts} - {"self", "kwargs", "args"}
    takes = {name for name in takes if not name.startswith("_")}
    if elsewhere := [name for name in keywords if name in _ELSEWHERE]:
        raise ConfigError(f"{elsewhere[0]}: {_ELSEWHERE[elsewhere[0]]}")
    if unknown := sorted(set(keywords) - takes - _PASSED_ON):
        raise ConfigError(f"{kind.__name__} takes no {', '.join(unknown)}: it takes {', '.join(sorted(takes))}")


def _kind(library: str, name: str) -> Any:
    """The class `name` of a library that pipelines name, if it is a class of models.

    None for any other class, and for one that only diffusers' own lookup finds.
    """
    module = getattr(diffusers.pipelines, library, None)
    if module is None and library in ("diffusers", "transformers"):
        module = importlib.import_module(library)
    kind = getattr(module, name, None)
    models = (diffusers.ModelMixin, transformers.PreTrainedModel)
    return kind if isinstance(kind, type) and issubclass(kind, models) else None


def weights_file(folder: Path, variant: str | None) -> Path | None:
    """The safetensors file of a component, or the index of several: of the variant if there is one, else without.

    Raises `CheckpointError` for a link that leaves the folder.
    """
    names = _names_in(folder)
    tags = [f".{variant}", ""] if variant else [""]
    for tag in tags:
        for stem in _STEMS:
            for name in (
                f"{stem}{tag}.safetensors",
                f"{stem}.safetensors{tag}.index.json",
                f"{stem}.safetensors.index{tag}.json",
            ):
                if name in names:
                    return within(folder, name)
    return None


def check_variant(folder: Path, names: Iterable[str], variant: str | None) -> None:
    """Raise `CheckpointError` if no component has files of the variant, as after a typo; others would be loaded."""
    files = [weights_file(folder / name, variant) for name in names if (folder / name).is_dir()] if variant else []
    if any(files) and not any(f".{variant}." in file.name for file in files if file is not None):
        raise CheckpointError(f"{folder}: no component has files of the variant {variant!r}")


def weights_if_any(folder: Path, variant: str | None) -> Path | None:
    """As `weights_file`, but raises `CheckpointError` if there are safetensors files under other names only."""
    is_there = any(name.endswith(".safetensors") for name in _names_in(folder))
    return required(folder, variant) if is_there else None


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def required(folder: Path, variant: str | None) -> Path:
    """As `weights_file`, but raises `CheckpointError` if there is none."""
    if (file := weights_file(folder, variant)) is not None:
        return file
    others = [name for name in _names_in(folder) if name.endswith((".safetensors", ".bin", ".index.json"))]
    remedy = f"; it has {some(others)}: pass variant=, or save it as safetensors" if others else ""
    raise CheckpointError(f"{folder}: no {_STEMS[0]}.safetensors and no model.safetensors{remedy}")


def load_dtype(dtype: str | torch.dtype, checkpoint: Checkpoint | None) -> torch.dtype:
    """The dtype to load in; "auto" is the dtype of most bytes in the checkpoint, among those that models compute in."""
    if dtype == "auto":
        nbytes: Counter[str] = Counter()
        for entry in checkpoint.entries.values() if checkpoint is not None else ():
            kind = entry.layout.dtype if entry.layout is not None else entry.dtype
            nbytes[kind] += (entry.end - entry.begin) * (kind in _COMPUTES)
        dtype = max(nbytes, key=lambda kind: nbytes[kind]) if any(nbytes.values()) else "bfloat16"
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def open_checkpoints(folder: Path, names: Iterable[str], variant: str | None) -> dict[str, Checkpoint | None]:
    """The checkpoint of each component, headers only; None where its files are not here. Raises `CheckpointError`."""
    files = {name: weights_if_any(folder / name, variant) for name in names}
    return {name: None if file is None else Checkpoint.open(file) for name, file in files.items()}


def common_dtype(folder: Path, checkpoints: Mapping[str, Checkpoint | None]) -> torch.dtype:
    """The dtype of components whose files are not here: the most common one in the files and configs of the others."""
    nums: Counter[torch.dtype] = Counter()
    for component, checkpoint in checkpoints.items():
        if checkpoint is not None and checkpoint.index is None:
            nums[load_dtype("auto", checkpoint)] += 1
        elif checkpoint is None and (path := folder / component / "config.json").is_file():
            facts = json.loads(path.read_bytes())
            name = str(facts.get("dtype") or facts.get("torch_dtype") or "")
            if name in _COMPUTES:
                nums[getattr(torch, name)] += 1
    return max(nums, key=lambda dtype: nums[dtype]) if nums else torch.bfloat16


def skeleton_of(kind: Any, folder: Path, dtype: torch.dtype, *, is_own: bool) -> nn.Module:
    """A model of diffusers on meta.

    `is_own`: `dtype` was requested, or is that of the model's files. Else it is the common dtype of other components,
    and an index of the model's shards takes precedence over it.
    """
    with torch.device("meta"):
        model: nn.Module = kind.from_config(kind.load_config(str(folder)))
    wanted = dtype if is_own else _indexed_dtype(folder, model) or dtype
    for name, param in model.named_parameters():
        kept = private.is_kept_in_float32(kind, name)
        param.data = param.data.to(torch.float32 if kept else wanted)
    return model.eval()


def _indexed_dtype(folder: Path, model: nn.Module) -> torch.dtype | None:
    """The dtype by the bytes per weight in the index of shards that are not here; None without an index."""
    for path in folder.glob("*.index*.json"):
        facts = json.loads(path.read_bytes())
        per_weight = facts.get("metadata", {}).get("total_size", 0) / max(1, sum(p.numel() for p in model.parameters()))
        return torch.float32 if per_weight > 3 else None  # two bytes: float16 or bfloat16, which the index does not say
    return None
