"""What callers give beside settings: a dtype under either name, patterns of names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from weightstream.errors import ConfigError
from weightstream.settings.config import OffloadConfig


def name_matches(pattern: str, name: str) -> bool:
    """Whether the dotted `pattern` is a run of whole segments of `name`: "w2" is not in "mlp.w2_weight"."""
    return f".{pattern}." in f".{name}."


def selects(patterns: Collection[str], name: str) -> bool:
    """Whether one of the patterns matches the name; where there are none, every name is selected."""
    return not patterns or any(name_matches(pattern, name) for pattern in patterns)


def unmatched_patterns(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Those of `patterns` that match none of `names`, sorted."""
    known = tuple(names)
    return sorted(p for p in set(patterns) if not any(name_matches(p, name) for name in known))


def dtype_given(dtype: Any, torch_dtype: Any) -> Any:
    """The dtype of a load, "auto" where none is given; `torch_dtype` is its older name."""
    if dtype is not None and torch_dtype is not None:
        raise ConfigError(f"dtype = {dtype!r} and torch_dtype = {torch_dtype!r} are the same setting: give one of them")
    return dtype or torch_dtype or "auto"


def settled(config: OffloadConfig | None, /, **settings: Any) -> OffloadConfig:
    """The settings with these laid over them; a `device_budget` of several devices is their `max_memory`.

    Raises `ConfigError`, also where `config` is a model's.
    """
    if config is not None and not isinstance(config, OffloadConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}: an OffloadConfig is taken here; the config of a model goes to "
            "from_pretrained() or plan_model()"
        )
    if isinstance(budgets := settings.get("device_budget"), Mapping):
        if not budgets:
            raise ConfigError("device_budget = {}: give a budget for each GPU, such as {0: '6GiB', 1: '6GiB'}")
        settings |= {"device_budget": None, "max_memory": {**(settings.get("max_memory") or {}), **budgets}}
    return (config or OffloadConfig()).merged(**settings).resolved()


def of_model(config: Any) -> tuple[OffloadConfig | None, Any]:
    """Whose config it is: ours, or a model's of transformers."""
    is_models = config is not None and hasattr(config, "model_type") and hasattr(config, "to_dict")
    return (None, config) if is_models else (config, None)
