"""Arguments of calls besides settings: patterns of names, a dtype under either name, a config of either kind."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weightstream.errors import ConfigError
from weightstream.settings.config import OffloadConfig


def name_matches(pattern: str, name: str) -> bool:
    """Whether the dotted `pattern` is a run of whole segments of `name`: "w2" is not in "mlp.w2_weight"."""
    return f".{pattern}." in f".{name}."


def selects(patterns: Collection[str], name: str) -> bool:
    """Whether one of the patterns matches the name; without patterns every name is selected."""
    return not patterns or any(name_matches(pattern, name) for pattern in patterns)


def unmatched_patterns(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that match none of `names`, sorted."""
    known = tuple(names)
    return sorted(p for p in set(patterns) if not any(name_matches(p, name) for name in known))


def requested_dtype(dtype: Any, torch_dtype: Any) -> Any:
    """The dtype of a load, "auto" by default; `torch_dtype` is the older name of the argument."""
    if dtype is not None and torch_dtype is not None:
        raise ConfigError(f"dtype = {dtype!r} and torch_dtype = {torch_dtype!r} are the same setting: pass one of them")
    return dtype or torch_dtype or "auto"


def check_source(source: object, argument: str = "path_or_repo_id") -> None:
    """Raise `ConfigError` for an argument that names no folder, file or repository."""
    if not isinstance(source, str | os.PathLike) or not str(source):
        raise ConfigError(f"{argument} = {source!r}: give a folder, or the name of a repository")


def resolve_config(config: OffloadConfig | str | Path | None, /, **settings: Any) -> OffloadConfig:
    """The `config`, or the one in a TOML file, with `settings` laid over it.

    A `device_budget` for several devices becomes their `max_memory`. Raises `ConfigError`, also if `config` is the
    config of a model.
    """
    if isinstance(config, str | Path):
        config = OffloadConfig.from_toml(config)
    if config is not None and not isinstance(config, OffloadConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}, not an OffloadConfig or the path of a TOML file; pass the config of "
            "a model to from_pretrained() or plan_model()"
        )
    if isinstance(budgets := settings.get("device_budget"), Mapping):
        if not budgets:
            raise ConfigError("device_budget = {}: set a budget for each GPU, such as {0: '6GiB', 1: '6GiB'}")
        settings |= {"device_budget": None, "max_memory": {**(settings.get("max_memory") or {}), **budgets}}
    return (config or OffloadConfig()).merged(**settings).resolved()


def refuse_training(config: OffloadConfig, *, of: str = "", options: Iterable[str] = (), ranks: bool = False) -> None:
    """Raise `ConfigError` if the config asks for training, and something else in a call rules that out.

    Args:
        config: the settings.
        of: the diffusers pipeline that the call is for.
        options: names of options of the call that are for generation only.
        ranks: the weights are shards of tensor parallelism.
    """
    if config.train is None:
        return
    if of:
        raise ConfigError(
            f"train: {of} is a pipeline, which is not trained as a whole; offload the component that is trained, as in "
            "weightstream.offload(pipe.transformer, train=True)"
        )
    if names := ", ".join(options):
        raise ConfigError(f"train: {names}: only for generation; leave out {names}, or train")
    if config.stripes:
        raise ConfigError("train: a process trains on one GPU; leave out gpus, and start a process for each (DDP)")
    if ranks:
        raise ConfigError("train: shards of tensor parallelism are not trained; start a process for each GPU (DDP)")


class EitherConfig(NamedTuple):
    """The argument `config`: either the settings or the config of a transformers model; the other one is None."""

    settings: OffloadConfig | str | Path | None
    model: Any


def of_model(config: Any) -> EitherConfig:
    """Sort the argument `config`: the config of a transformers model has a `model_type`; anything else is settings."""
    is_transformers = config is not None and hasattr(config, "model_type") and hasattr(config, "to_dict")
    return EitherConfig(None, config) if is_transformers else EitherConfig(config, None)
