"""What a path or a repository on the hub is: its folder, its config, and the class of the model. It reads no tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers

from weightstream.errors import CheckpointError, ConfigError, UnsupportedError, WeightstreamError

_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*")
_SPARED = ("*/*.safetensors", "consolidated*.safetensors")  # second copies of the same weights


def check_dtype(dtype: str | torch.dtype) -> None:
    """Raises `ConfigError` for a name that is no dtype's."""
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"dtype = {dtype!r}: give 'auto' or the name of a torch dtype, such as 'bfloat16'")


def local_path(path_or_repo_id: str | Path, remote_code: bool, *, weights: bool = True, **hub: Any) -> Path:
    """The folder or file of a checkpoint, got from the hub where it is no path; raises `CheckpointError`.

    Without `weights` only its JSON files are got.
    """
    path = Path(path_or_repo_id).expanduser()
    if path.exists():
        return path
    if isinstance(path_or_repo_id, Path) or path.is_absolute() or str(path_or_repo_id).startswith((".", "~")):
        raise CheckpointError(f"{path}: no such file or folder")
    files = [*(_FILES if weights else ["*.json"]), *(["*.py"] if remote_code else [])]
    try:
        found = huggingface_hub.snapshot_download(
            path_or_repo_id, allow_patterns=files, ignore_patterns=list(_SPARED), **hub
        )
    except (OSError, ValueError) as error:  # the hub's errors are of these kinds
        raise CheckpointError(
            f"{path_or_repo_id!r} is no local folder, and getting it from the hub failed: {error}; "
            "check the name, the network and `hf auth login`, or pass a folder"
        ) from error
    return Path(found)


def config_and_class(folder: Path, model_class: Any, remote_code: bool) -> tuple[Any, Any]:
    """The config of a folder and the class of the model that it describes; raises as `load_pretrained`."""
    config = _read_config(folder, remote_code)
    cls = _class_of(config, model_class, remote_code)
    return config if isinstance(config, cls.config_class or object) else config.get_text_config(), cls


def _read_config(folder: Path, remote_code: bool) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: cannot read config.json: {error}") from error
    quantization = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if quantization is not None:
        facts = quantization if isinstance(quantization, dict) else quantization.to_dict()
        method = facts.get("quant_method", "unknown")
        raise UnsupportedError(f"{folder}: quantised with {method}, which is not supported; use the unquantised model")
    return config


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
def refused_as_checkpoint(name: object, verb: str) -> Iterator[None]:
    """Whatever transformers makes of a config or a keyword that it cannot use is a `CheckpointError`."""
    try:
        yield
    except (WeightstreamError, MemoryError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise CheckpointError(f"{name}: transformers cannot {verb} it: {kind}: {error}") from error
