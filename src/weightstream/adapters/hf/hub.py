"""The model at a path or in a repository on the hub: its folder, its config, its class, and its skeleton.

A skeleton is a transformers model without weights, made from config.json and the headers of shards. Each tensor has the
shape, strides, dtype and ties that it would have once loaded, so a plan of the skeleton is a plan of the model. No
tensor is read.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import huggingface_hub
import torch
import transformers
from torch import nn

from weightstream.adapters.hf import private, surplus, tensor_parallel
from weightstream.errors import CheckpointError, ConfigError, UnsupportedError, WeightstreamError
from weightstream.measure.progress import downloading
from weightstream.store.checkpoint import SUFFIXES, Checkpoint
from weightstream.store.header import read_header, torch_dtype

_LOGGER = logging.getLogger("weightstream")
_INDEX = "model.safetensors.index.json"
PIPELINE = "model_index.json"
ADAPTER = "adapter_config.json"
# errors of the hub, and that of the HTTP library where there is no network, which is no OSError
_HUB_ERRORS: tuple[type[Exception], ...] = (*huggingface_hub.errors.HfHubHTTPError.__bases__, OSError, ValueError)
_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*")
DESCRIBING = ("*.json",)
# methods of quantisation whose weights stream as they are
QUANTISED = frozenset(("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4", "torchao"))
_LIBRARIES = MappingProxyType({"awq": ("gptqmodel",), "gptq": ("gptqmodel", "optimum")})  # that transformers needs
_NOT_OF_CONFIGS = frozenset(
    ("attn_implementation", "experts_implementation", "quantization_config")
)  # options of the load
_SPARED = ("*/*.safetensors", "consolidated*.safetensors")  # second copies of the same weights


def check_dtype(dtype: str | torch.dtype) -> None:
    """Raise `ConfigError` for a dtype that a model cannot be cast to."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ConfigError(
            f"dtype = {dtype!r}: give 'auto', or a floating point dtype of torch or its name, such as 'bfloat16'"
        )


class LocalFiles(NamedTuple):
    """The folder or file of a checkpoint on this machine, and the folder that it is or lies in."""

    path: Path
    folder: Path


class _Download(NamedTuple):
    """The path of a checkpoint, and whether it is the hub's cache that has it while the hub is out of reach."""

    path: Path
    is_cached: bool


class WeightFiles(NamedTuple):
    """The files of weights that a config names: one with an unusual name, and additional ones."""

    named: str | None
    extra: tuple[str, ...]


def local_path(
    name: str | Path,
    remote_code: bool,
    *,
    files: Collection[str] = _FILES,
    subfolder: str = "",
    progress: bool | None = None,
    **hub: Any,
) -> LocalFiles:
    """The files of a checkpoint, downloaded from the hub where `name` is no path.

    Only files whose names match one of the patterns in `files` are downloaded. Without a network the snapshot in the
    hub's cache is used, if there is one. Unless `progress` is False, lines say that a long download lasts. Raises
    `CheckpointError`.
    """
    path = _got(name, remote_code, files, subfolder, progress, hub).path
    return LocalFiles(path, path if path.is_dir() else path.parent)


def _got(
    name: str | Path,
    remote_code: bool,
    files: Collection[str],
    subfolder: str,
    progress: bool | None,
    hub: Mapping[str, Any],
) -> _Download:
    """The path of `local_path`."""
    path = Path(name).expanduser()
    if os.path.exists(path):  # False for a name that is too long, for which Path.exists raises
        return _Download(_inside(path, subfolder), is_cached=False)
    if isinstance(name, Path) or path.is_absolute() or str(name).startswith((".", "~")) or str(name).endswith("/"):
        raise CheckpointError(f"{path}: no such file or folder")
    wanted = [*files, *(["*.py"] if remote_code else [])]
    patterns: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": list(_SPARED)}
    if subfolder:
        patterns = {"allow_patterns": [f"{subfolder}/{pattern}" for pattern in wanted]}
    is_cached = False
    try:
        with downloading(str(name), progress):
            found = Path(huggingface_hub.snapshot_download(name, **patterns, **hub))
    except _HUB_ERRORS as error:
        if (cached := _cached(name, subfolder, error, hub)) is None:
            raise CheckpointError(
                f"{name!r} is no local folder, and getting it from the hub failed: "
                f"{' '.join(str(error).split()).rstrip('.')}; check the name, the network and `hf auth login`, or pass "
                "a folder"
            ) from error
        found, is_cached = cached, True
    return _Download(_inside(found, subfolder), is_cached)


def _cached(name: str, subfolder: str, error: Exception, hub: Mapping[str, Any]) -> Path | None:
    """The snapshot in the hub's cache, if the error means that the hub is out of reach.

    It may lack files, as the cache has only those that were needed before.
    """
    if isinstance(error, huggingface_hub.errors.HfHubHTTPError | ValueError):  # the hub has answered, or was not asked
        return None
    place = {key: hub.get(key) for key in ("cache_dir", "revision")}
    for file in ("config.json", ADAPTER, PIPELINE):
        inside = f"{subfolder}/{file}" if subfolder else file
        found = huggingface_hub.try_to_load_from_cache(name, inside, **place)
        if isinstance(found, str):
            return Path(found.removesuffix(f"/{inside}"))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as transformers finds it, and its files on this machine."""

    name: str  # a folder, or a repository on the hub
    hub: Mapping[str, Any]  # keywords of `from_pretrained` for this name
    base: str  # the same name; for a folder with an adapter only, the name of the adapter's model
    path: Path  # the folder or file of the weights
    folder: Path  # of config.json
    adapter: Path | None  # the folder of an adapter that is loaded with the model

    @property
    def subfolder(self) -> str:
        """The folder inside of the repository or folder that has all of the model."""
        return str(self.hub.get("subfolder") or "")

    @property
    def code(self) -> private.CodeSource:
        """The source of the code that comes with the model."""
        return private.CodeSource(self.base, self.hub)

    def files_of(self, config: Any) -> WeightFiles:
        """The files of weights that a config names, or config.json for None."""
        extra = getattr(type(config), "extra_files", ()) if self.path.is_dir() else ()
        return WeightFiles(weights_named(self.path, config), tuple(extra))

    def checkpoint(self, config: Any) -> Checkpoint:
        """Open the files of weights that transformers would load; logs where their index is wrong."""
        files = self.files_of(config)
        found = Checkpoint.open(self.path, files.named, files.extra)
        for note in found.notes:
            _LOGGER.warning("%s", note)
        return found


def find(
    name: str | Path,
    remote_code: bool,
    *,
    files: Collection[str] = _FILES,
    subfolder: str = "",
    progress: bool | None = None,
    **hub: Any,
) -> ModelSource:
    """The source of a model. If transformers would load an adapter from its folder, the source has that, too.

    For the folder of an adapter, it is the source of the model that the adapter is for.

    Arguments as of `local_path`. Raises `CheckpointError`.
    """
    path, is_cached = _got(name, remote_code, files, subfolder, progress, hub)
    folder, local = path if path.is_dir() else path.parent, Path(name).expanduser()
    passed = {} if local.exists() else {key: hub[key] for key in hub if key != "force_download"}  # that is done now
    passed |= {"subfolder": subfolder} if subfolder else {}
    passed |= {"local_files_only": True} if is_cached else {}
    if local.is_file():
        name = local.parent
    elif local.is_dir() and not os.path.isdir(name):  # it begins with ~
        name = local
    found = ModelSource(name=str(name), base=str(name), hub=passed, path=path, folder=folder, adapter=None)
    if not (folder / ADAPTER).is_file():
        return found
    is_alone = not (folder / "config.json").exists()
    if path.is_file() and is_alone:
        return found
    base = _base_of(folder)
    if not is_alone and not any(_is_of_model(file) for file in os.listdir(folder)) and not weights_named(folder, None):
        raise CheckpointError(
            f"{folder} has an adapter and a config.json, and no weights of a model: load the model that it belongs to"
            f", {base or 'which adapter_config.json does not name'}, then model.load_adapter({str(folder)!r})"
        )
    if not transformers.utils.is_peft_available():
        if is_alone:
            raise CheckpointError(f"{folder} is an adapter of {base}: pip install peft loads that model with it")
        _LOGGER.warning(
            "%s: its adapter is not loaded, and transformers would not load it either: pip install peft", folder
        )
        return found
    if not is_alone:
        return replace(found, adapter=folder)
    if not base:
        raise CheckpointError(f"{folder} is an adapter, and adapter_config.json does not name the model of it")
    path, inner = local_path(base, remote_code, files=files, subfolder=subfolder, progress=progress, **hub)
    return replace(found, base=base, path=path, folder=inner, adapter=folder)


def _base_of(folder: Path) -> str | None:
    """The name of the model that the adapter in a folder is for, if the adapter names it."""
    base = _facts(folder / ADAPTER).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def _is_of_model(file: str) -> bool:
    """Whether a file, by its name, has weights of a model, not of an adapter."""
    return file.endswith(SUFFIXES) and not file.startswith("adapter_model.")


def weights_named(path: Path, config: Any) -> str | None:
    """The file of weights that a config names, or config.json for None; None where it names none.

    Raises `CheckpointError`.
    """
    if not path.is_dir():
        return None
    facts = _facts(path / "config.json") if config is None else vars(config)
    name = facts.get("transformers_weights")
    if name is None:
        return None
    if not isinstance(name, str) or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise CheckpointError(
            f"{path}: transformers_weights = {name!r} in config.json is neither a .safetensors file nor an index"
        )
    return name


def _inside(folder: Path, subfolder: str) -> Path:
    """A folder inside of a folder. Raises `CheckpointError` where it is elsewhere."""
    path = folder / subfolder
    if subfolder and (not path.is_dir() or not path.resolve().is_relative_to(folder.resolve())):
        raise CheckpointError(f"{folder}: no folder {subfolder!r} in it")
    return path


def config_and_class(
    source: ModelSource, model_class: Any, remote_code: bool, given: Any = None, options: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """The config of a model, or the one that is given, and the class of the model that it describes.

    Options that the config has are taken out of `options` and set in the config, as transformers does. Raises as
    `load_pretrained`.
    """
    folder = source.folder
    config = _checked(folder, _read_config(source, remote_code) if given is None else copy.deepcopy(given))
    cls = _class_of(config, model_class, remote_code, source)
    kind: Any = cls.config_class or object
    if given is None and not isinstance(config, kind) and not isinstance(config.get_text_config(), kind):
        if model_class is None:
            raise CheckpointError(
                f"{folder}: config.json is of model_type {config.model_type!r}, and its architecture {cls.__name__} is "
                f"of {kind.model_type!r}; pass model_class=transformers.AutoModelForCausalLM, or whichever class it is"
            )
        config = _checked(folder, kind.from_pretrained(folder))
    _override(config, {} if options is None else options)
    if not isinstance(config, kind):
        whole, config = config, config.get_text_config()
        if (quantization := getattr(whole, "quantization_config", None)) is not None:
            config.quantization_config = quantization  # as transformers' Auto classes do
    config.name_or_path = source.base  # a class may look for files there when it is constructed
    return config, cls


def names_pipeline(path_or_repo_id: str | Path) -> bool:
    """Whether a folder, or a repository on the hub, is of a pipeline of diffusers."""
    path = Path(path_or_repo_id).expanduser()
    if os.path.exists(path) or isinstance(path_or_repo_id, Path):
        return (path / PIPELINE).is_file()
    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(str(path_or_repo_id), PIPELINE), str):
            return True
        return huggingface_hub.file_exists(str(path_or_repo_id), PIPELINE)
    except _HUB_ERRORS:  # the download that follows raises a better error
        return False


def is_quantised(folder: Path) -> bool:
    """Whether the config.json of a folder has a quantization_config."""
    facts = _facts(folder / "config.json")
    return bool(facts.get("quantization_config") or facts.get("compression_config"))


def _override(config: Any, options: dict[str, Any]) -> None:
    """Move the options that the config has into it; a dict for a sub-config is merged into that."""
    for name in [name for name in options if hasattr(config, name) and name not in _NOT_OF_CONFIGS]:
        value, part = options.pop(name), getattr(config, name)
        if isinstance(value, dict) and isinstance(part, transformers.PreTrainedConfig):
            value = type(part)(**{**part.to_dict(), **value})
        setattr(config, name, value)


def _read_config(source: ModelSource, remote_code: bool) -> Any:
    place = source.code if remote_code else private.CodeSource(str(source.folder), {})
    try:
        return transformers.AutoConfig.from_pretrained(place.name, trust_remote_code=remote_code, **place.hub)
    except (OSError, ValueError, KeyError) as error:
        folder, cause = source.folder, error.__context__
        if isinstance(cause, json.JSONDecodeError):
            raise CheckpointError(f"{folder}/config.json is not valid JSON: {cause}") from error
        raise CheckpointError(f"{folder}: {_elsewhere(folder) or f'cannot read config.json: {error}'}") from error


def _elsewhere(folder: Path) -> str:
    """Advice for a folder that is, or may be, of diffusers; empty for any other."""
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
    """The config; raises `UnsupportedError` for a method of quantisation that is not supported."""
    quantization = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if quantization:
        config.quantization_config = quantization
        refuse_quantised(folder, quantization, QUANTISED)
    return config


def refuse_quantised(what: object, quantization: Any, supported: Collection[str]) -> None:
    """Raise `UnsupportedError` unless the method is one of these and the libraries that it needs are installed."""
    if not isinstance(quantization, dict) and not hasattr(quantization, "to_dict"):
        raise ConfigError(f"{what}: {type(quantization).__name__} is no config of a quantisation")
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


def _class_of(config: Any, model_class: Any, remote_code: bool, source: ModelSource) -> Any:
    if model_class is None:
        model_class = _named_class(config, remote_code, source.folder)
    if hasattr(model_class, "config_class"):
        return model_class
    return private.class_behind(model_class, config, source.code if remote_code else None)


def _named_class(config: Any, remote_code: bool, folder: Path) -> Any:
    """The class of the first architecture that is known, or the Auto class through which its code is loaded."""
    names = config.architectures or []
    if not names:
        raise CheckpointError(f"{folder}: config.json names no architectures; pass model_class=")
    code = {auto: str(ref) for auto, ref in (getattr(config, "auto_map", None) or {}).items() if "AutoModel" in auto}
    of_code = {ref.rpartition(".")[2]: auto for auto, ref in reversed(code.items())}
    for name in names if remote_code else ():
        if name in of_code:
            return getattr(transformers, of_code[name])
    for name in names:
        kind = getattr(transformers, name, None)
        is_of_a_kind = getattr(kind, "config_class", None) is not None  # the base of all classes is not
        if isinstance(kind, type) and (is_of_a_kind or hasattr(kind, "_model_mapping")):
            return kind
    if remote_code and len(of_code) == 1:  # under another name than the config's
        return getattr(transformers, *of_code.values())
    remedy = "pass model_class=transformers.AutoModelForCausalLM, or whichever class it is"
    if code and not remote_code:
        remedy = f"pass trust_remote_code=True to run the code with it that has {', '.join(of_code)}, or model_class="
    raise CheckpointError(
        f"{folder}: config.json names the architecture {', '.join(map(repr, names))}, and transformers "
        f"{transformers.__version__} has no class of this name; {remedy}"
    )


@contextlib.contextmanager
def refused_as_checkpoint(name: object, verb: str, library: str = "transformers") -> Iterator[None]:
    """Inside, any error of a library about a config or a keyword is raised as `CheckpointError`."""
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
    """Build the model that `load_pretrained` would load, on the meta device and in evaluation mode.

    A folder needs no more than its config.json, and of a repository on the hub only JSON files are downloaded. The
    checkpoint is None where not all of its weights are on this machine, and with a `distributed_config`, as shards are
    not in the files as they are. Raises `CheckpointError`, `UnsupportedError`, `ConfigError`.
    """
    check_dtype(dtype)
    source = find(path_or_repo_id, trust_remote_code, files=DESCRIBING)
    with refused_as_checkpoint(path_or_repo_id, "build"):
        config, cls = config_and_class(source, model_class, trust_remote_code, model_config)
        checkpoint = source.checkpoint(config) if is_whole(source.path, config) else None
        loaded = dtype_of(dtype, config, checkpoint, source.path)
        model = build(cls, config, loaded, distributed_config)
        if checkpoint is not None:
            _compare(source.folder, model, checkpoint)
        if source.adapter is not None:
            private.add_adapter(model, source.adapter, loaded)
    return model.eval(), checkpoint if distributed_config is None else None


def is_whole(path: Path, config: Any = None) -> bool:
    """Whether all files of the weights of a folder are there, as named by `config`, or by config.json for None."""
    names, name = os.listdir(path) if path.is_dir() else [path.name], weights_named(path, config)
    index = name or _INDEX
    if name is not None and not (path / name).is_file():
        return False
    if path.is_dir() and index.endswith(".json") and index in names and (name or "model.safetensors" not in names):
        with contextlib.suppress(
            OSError, ValueError, TypeError, KeyError, AttributeError
        ):  # `Checkpoint.open` raises a better error
            return set(json.loads((path / index).read_bytes())["weight_map"].values()) <= set(names)
    return name is not None or not path.is_dir() or any(_is_of_model(file) for file in names)


def dtype_of(dtype: str | torch.dtype, config: Any, checkpoint: Checkpoint | None, path: Path) -> torch.dtype:
    """The dtype that transformers would load. For "auto" it is the config's, else that in an index, else that of the
    first floating point tensor, by name, of the first file."""
    first: dict[str, torch.dtype] = {}
    if checkpoint is not None:
        index: Any = checkpoint.index
        entries = read_header(checkpoint.mappings[0])[0]  # also those that a later file replaces
        first = {name: torch_dtype(entries[name].dtype) for name in sorted(entries)}
    else:  # the index may be here without the files
        index = _facts(path / _INDEX)
    metadata = (index or {}).get("metadata")
    return private.loaded_dtype(dtype, config, metadata if isinstance(metadata, dict) else None, first)


def _facts(path: Path) -> dict[str, Any]:
    """A JSON file, or nothing where it cannot be read: code that needs it raises a better error later."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def build(cls: Any, config: Any, dtype: torch.dtype, distributed_config: Any = None) -> Any:
    """A model on meta whose tensors have the dtypes and strides that they would have once loaded in `dtype`; with a
    `distributed_config` it has the first rank's shards."""
    model = private.build_on_meta(cls, config, dtype)
    kept = private.kept_dtype(model, dtype)
    empty: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                wanted = kept(f"{prefix}.{name}") or param.dtype
                module._parameters[name] = empty.setdefault(id(param), _loaded(param, wanted))
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="meta")
            elif buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    if distributed_config is not None:
        tensor_parallel.shard(model, distributed_config)
    private.tie(model)
    return model


def _loaded(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if param.is_meta and param.is_contiguous() and param.dtype is dtype:
        return param
    return nn.Parameter(torch.empty(param.shape, dtype=dtype, device="meta"), requires_grad=param.requires_grad)


def _compare(folder: Path, model: Any, checkpoint: Checkpoint) -> None:
    """Warn where the headers have another number of weights than the model. Dtypes and names may differ."""
    once: set[int] = set()
    wanted = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in once or name in checkpoint.entries:
            wanted += tensor.numel()
        once.add(id(tensor))
    sizes = {name: prod(entry.shape) for name, entry in checkpoint.entries.items()}
    num_in_files = sum(sizes.values())
    if num_in_files != wanted:
        num_in_files -= sum(sizes[name] for name in private.unused_names(model, sizes))
        if layers := surplus.layers(model.state_dict(), private.unexpected_names(model, sizes)):
            _LOGGER.warning("%s: %s", folder, layers)
    if num_in_files != wanted:
        _LOGGER.warning(
            "%s: the headers hold %d weights that %s takes, and by config.json it has %d: the plan is of the latter",
            *(folder, num_in_files, type(model).__name__, wanted),
        )
