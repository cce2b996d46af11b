"""What a path or a repository on the hub is: its folder, its config, the class of the model, and its skeleton.

A skeleton is a transformers model without weights, told from config.json and the headers of shards. Each tensor has the
shape, strides, dtype and ties that it would have once loaded: a plan of the skeleton is a plan of the model. Reads no
tensor.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import os
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn

from weightstream.adapters import hf_private, hf_sharded
from weightstream.errors import CheckpointError, ConfigError, UnsupportedError, WeightstreamError
from weightstream.store.checkpoint import SUFFIXES, Checkpoint

_LOGGER = logging.getLogger("weightstream")
_INDEX = "model.safetensors.index.json"
PIPELINE = "model_index.json"
_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*")
DESCRIBING = ("*.json",)
# methods whose weights stream as they are
QUANTISED = frozenset(("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4", "torchao"))
_LIBRARIES = MappingProxyType({"awq": ("gptqmodel",), "gptq": ("gptqmodel", "optimum")})  # as transformers asks for
_NOT_OF_CONFIGS = frozenset(("attn_implementation", "experts_implementation", "quantization_config"))  # for the load
_SPARED = ("*/*.safetensors", "consolidated*.safetensors")  # second copies of the same weights


def check_dtype(dtype: str | torch.dtype) -> None:
    """Raises `ConfigError` for what names no dtype that a model can be cast to."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ConfigError(
            f"dtype = {dtype!r}: give 'auto', or a floating point dtype of torch or its name, such as 'bfloat16'"
        )


def local_path(
    name: str | Path, remote_code: bool, *, files: Collection[str] = _FILES, subfolder: str = "", **hub: Any
) -> tuple[Path, Path]:
    """The folder or file of a checkpoint, got from the hub where it is no path, and its folder.

    Raises `CheckpointError`. Of `files` only those whose names are like one of these are got.
    """
    path = Path(name).expanduser()
    if path.exists():
        path = _inside(path, subfolder)
        return path, path if path.is_dir() else path.parent
    if isinstance(name, Path) or path.is_absolute() or str(name).startswith((".", "~")):
        raise CheckpointError(f"{path}: no such file or folder")
    wanted = [*files, *(["*.py"] if remote_code else [])]
    about: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": list(_SPARED)}
    if subfolder:
        about = {"allow_patterns": [f"{subfolder}/{pattern}" for pattern in wanted]}
    try:
        found = huggingface_hub.snapshot_download(name, **about, **hub)
    except (OSError, ValueError) as error:  # the hub's errors are of these kinds
        raise CheckpointError(
            f"{name!r} is no local folder, and getting it from the hub failed: {error}; "
            "check the name, the network and `hf auth login`, or pass a folder"
        ) from error
    path = _inside(Path(found), subfolder)
    return path, path


def _inside(folder: Path, subfolder: str) -> Path:
    """A folder in a folder, and nowhere else. Raises `CheckpointError`."""
    path = folder / subfolder
    if subfolder and (not path.is_dir() or not path.resolve().is_relative_to(folder.resolve())):
        raise CheckpointError(f"{folder}: no folder {subfolder!r} in it")
    return path


def config_and_class(
    folder: Path, model_class: Any, remote_code: bool, given: Any = None, options: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """The config of a folder, or the one `given`, and the class of the model that it describes.

    What the config has of `options` is taken out of these and set there, as transformers does. Raises as
    `load_pretrained`.
    """
    config = _checked(folder, _read_config(folder, remote_code) if given is None else copy.deepcopy(given))
    _override(config, {} if options is None else options)
    cls = _class_of(config, model_class, remote_code)
    if isinstance(config, cls.config_class or object):
        return config, cls
    text = config.get_text_config()
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization  # as transformers' Auto classes hand it on
    return text, cls


def is_pipeline(path_or_repo_id: str | Path) -> bool:
    """Whether a folder, or a repository on the hub, is of a pipeline of diffusers."""
    path = Path(path_or_repo_id).expanduser()
    if path.exists() or isinstance(path_or_repo_id, Path):
        return (path / PIPELINE).is_file()
    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(str(path_or_repo_id), PIPELINE), str):
            return True
        return huggingface_hub.file_exists(str(path_or_repo_id), PIPELINE)
    except (OSError, ValueError):  # who gets its files next says what is wrong
        return False


def is_quantised(folder: Path) -> bool:
    """Whether config.json says so."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # who reads it next says what is wrong
        facts = json.loads((folder / "config.json").read_bytes())
        return bool(facts.get("quantization_config") or facts.get("compression_config"))
    return False


def _override(config: Any, options: dict[str, Any]) -> None:
    """Set what the config has of these, and take it out of them; a dict of a part goes into that part."""
    for name in [name for name in options if hasattr(config, name) and name not in _NOT_OF_CONFIGS]:
        value, part = options.pop(name), getattr(config, name)
        if isinstance(value, dict) and isinstance(part, transformers.PreTrainedConfig):
            value = type(part)(**{**part.to_dict(), **value})
        setattr(config, name, value)


def _read_config(folder: Path, remote_code: bool) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: {_elsewhere(folder) or f'cannot read config.json: {error}'}") from error


def _elsewhere(folder: Path) -> str:
    """Who loads it, if it is of diffusers, or may be."""
    try:
        kind = json.loads((folder / "config.json").read_bytes()).get("_class_name")
    except FileNotFoundError:
        return (
            "no config.json there. A single file with a pipeline of diffusers is loaded by "
            "weightstream.pipeline_from_pretrained; of a transformers model give the folder with its config.json"
        )
    except (OSError, ValueError, AttributeError):
        return ""
    return kind and (
        f"a component of a pipeline of diffusers, {kind}: weightstream.pipeline_from_pretrained loads the pipeline; or "
        "load the component with diffusers and give it to weightstream.offload()"
    )


def _checked(folder: Path, config: Any) -> Any:
    """The config, unless it is of a method of quantisation that is not supported."""
    quantization = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if quantization:
        config.quantization_config = quantization
        refuse_quantised(folder, quantization, QUANTISED)
    return config


def refuse_quantised(what: object, quantization: Any, supported: Collection[str]) -> None:
    """Raise `UnsupportedError` unless its method is one of these, and the libraries that it needs are there."""
    facts = quantization if isinstance(quantization, dict) else quantization.to_dict()
    found = facts.get("quant_method", "unknown")
    method = str(getattr(found, "value", found))
    if method not in supported:
        raise UnsupportedError(
            f"{what}: quantised with {method}, which is not supported ({', '.join(sorted(supported))} are); use the "
            "unquantised model, or load it with its library and give it to offload()"
        )
    if missing := [name for name in _LIBRARIES.get(method, ()) if importlib.util.find_spec(name) is None]:
        raise UnsupportedError(f"{what}: quantised with {method}: pip install {' '.join(missing)}")


def _class_of(config: Any, model_class: Any, remote_code: bool) -> Any:
    names = config.architectures or []
    if model_class is None and not names:
        raise CheckpointError(f"{config.name_or_path}: config.json names no architectures; pass model_class=")
    if model_class is None and not (remote_code and getattr(config, "auto_map", None)):
        model_class = getattr(transformers, names[0], transformers.AutoModel)
    if model_class is None:
        ours = (auto for auto, reference in config.auto_map.items() if str(reference).endswith(f".{names[0]}"))
        model_class = getattr(transformers, next(ours, "AutoModel"))
    if hasattr(model_class, "config_class"):
        return model_class
    with torch.device("meta"):  # an Auto class: a model without weights tells which class it stands for
        return type(model_class.from_config(config, trust_remote_code=remote_code))


@contextlib.contextmanager
def refused_as_checkpoint(name: object, verb: str, library: str = "transformers") -> Iterator[None]:
    """Whatever a library makes of a config or a keyword that it cannot use is a `CheckpointError`."""
    try:
        yield
    except (WeightstreamError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{name}: {library} cannot {verb} it: {type(error).__name__}: {error}") from error


def skeleton(
    path_or_repo_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    model_class: type | None = None,
    trust_remote_code: bool = False,
    model_config: Any = None,
    distributed_config: Any = None,
) -> tuple[Any, Checkpoint | None]:
    """Builds the model that `load_pretrained` would load, with shapes in place of weights, in evaluation mode.

    The checkpoint is None where its weights are not all on this machine: a folder needs no more than its config.json,
    and of a repository on the hub only JSON files are got. So it is where a `distributed_config` leaves shards of them,
    which are in no file as they are. Raises `CheckpointError`, `UnsupportedError`, `ConfigError`.
    """
    check_dtype(dtype)
    path, folder = local_path(path_or_repo_id, trust_remote_code, files=DESCRIBING)
    checkpoint = weights_in(path)
    with refused_as_checkpoint(path_or_repo_id, "build"):
        config, cls = config_and_class(folder, model_class, trust_remote_code, model_config)
        model = build(cls, config, dtype, checkpoint, distributed_config)
        if checkpoint is not None:
            _compare(folder, model, checkpoint)
    model.name_or_path = model.config.name_or_path = str(path_or_repo_id)
    return model.eval(), checkpoint if distributed_config is None else None


def weights_in(path: Path) -> Checkpoint | None:
    """The checkpoint of a folder or file; None where its weights are not all there."""
    names = os.listdir(path) if path.is_dir() else [path.name]
    if path.is_dir() and _INDEX in names and "model.safetensors" not in names:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # `open` says what is wrong
            if not set(json.loads((path / _INDEX).read_bytes())["weight_map"].values()) <= set(names):
                return None
    elif path.is_dir() and not any(name.endswith(SUFFIXES) for name in names):
        return None
    return Checkpoint.open(path)


def _dtype(dtype: str | torch.dtype, config: Any, checkpoint: Checkpoint | None) -> torch.dtype:
    """The dtype that transformers would load: "auto" is the config's, or that of the first floats in the file."""
    if dtype == "auto":
        entries = checkpoint.entries.values() if checkpoint is not None else ()
        kinds = (entry.dtype for entry in entries if entry.dtype in ("float16", "bfloat16", "float32", "float64"))
        dtype = config.dtype or next(kinds, "float32")
    found: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return found


def build(
    cls: Any, config: Any, dtype: str | torch.dtype, checkpoint: Checkpoint | None, distributed_config: Any = None
) -> Any:
    """A model on meta, whose tensors have the dtypes and strides that they would have once loaded; with a
    `distributed_config` its shards."""
    loaded = _dtype(dtype, config, checkpoint)
    model = hf_private.build_on_meta(cls, config, loaded)
    kept = hf_private.kept_dtype(model, loaded)
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                wanted = kept(f"{prefix}.{name}") or param.dtype
                module._parameters[name] = made.setdefault(id(param), _loaded(param, wanted))
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="meta")
            elif buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    if distributed_config is not None:
        hf_sharded.shard(model, distributed_config)
    hf_private.tie(model)
    return model


def _loaded(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if param.is_meta and param.is_contiguous() and param.dtype is dtype:
        return param
    return nn.Parameter(torch.empty(param.shape, dtype=dtype, device="meta"), requires_grad=param.requires_grad)


def _compare(folder: Path, model: Any, checkpoint: Checkpoint) -> None:
    """Warns where the headers hold another number of weights than the model: dtypes may differ, and names."""
    once: set[int] = set()
    wanted = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in once or name in checkpoint.entries:
            wanted += tensor.numel()
        once.add(id(tensor))
    sizes = {name: prod(entry.shape) for name, entry in checkpoint.entries.items()}
    held = sum(sizes.values())
    if held != wanted:
        held -= sum(sizes[name] for name in hf_private.unused_names(model, sizes))
    if held != wanted:
        _LOGGER.warning(
            "%s: the headers hold %d weights that %s takes, and by config.json it has %d: the plan is of the latter",
            *(folder, held, type(model).__name__, wanted),
        )
