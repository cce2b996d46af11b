"""Names of transformers' tensor parallelism that it does not promise to keep, and no other file spells one.

A test of each (tests/adapters/test_tensor_parallel.py) says which one a new version has lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from weightstream.adapters.hf_private import set_inside
from weightstream.errors import ConfigError
from weightstream.runtime.leaves import rewrapped

_LIKE = "_dtensor_from_local_like"
_OF_TORCH, _OF_TRANSFORMERS = "torch.distributed.", "transformers.distributed."  # where their code is


def wanted(kwargs: dict[str, Any]) -> Any | None:
    """The `DistributedConfig` that keywords of `from_pretrained` ask for, by this name, or as `tp_plan` and `tp_size`;
    None: one process. They have it by its name alone from then on. Raises `ConfigError`."""
    given = kwargs.pop("distributed_config", None)
    older = {name: kwargs.pop(name, None) for name in ("tp_plan", "tp_size")}
    older = {name: value for name, value in older.items() if value is not None}
    if given is None and not older:
        return None
    from transformers.distributed import DistributedConfig

    if given is not None and older:
        raise ConfigError(f"{', '.join(older)} beside distributed_config: name it in that alone")
    try:
        if isinstance(given, Mapping):
            given = DistributedConfig.from_dict(dict(given))
        kwargs["distributed_config"] = found = given if given is not None else DistributedConfig(**older)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"distributed_config: {error}") from error
    return found


@contextmanager
def on_host(kind: Any) -> Iterator[None]:
    """Inside, `from_pretrained` of this class leaves each rank's shards where they are: views of files, which no device
    has seen. transformers would bring each to the device of its rank, and copy columns."""
    from transformers import core_model_loading, modeling_utils

    prepare = kind.prepare_distribute_model

    def prepared(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        config, device_map, *others = prepare(*args, **kwargs)
        return config, device_map and torch.device("cpu"), *others

    with ExitStack() as stack:
        stack.enter_context(set_inside(kind, "prepare_distribute_model", staticmethod(prepared)))
        for module in (core_model_loading, modeling_utils):
            stack.enter_context(set_inside(module, _LIKE, _like))
        yield


def is_of_shard(forward: Any) -> bool:
    """Whether it is what transformers runs around the forward of a module with shards."""
    return str(getattr(forward, "__module__", "")).startswith(_OF_TRANSFORMERS)


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor`."""
    return any(kind.__module__.startswith(_OF_TORCH) for kind in type(tensor).__mro__)


def is_of_processes(value: Any) -> bool:
    """Whether it is a mesh of processes, which have no copies."""
    return type(value).__module__.startswith((_OF_TORCH, _OF_TRANSFORMERS))


def _like(local: torch.Tensor, reference: Any) -> Any:
    """A shard as a `DTensor` of the same mesh and placements as this one; neither moved nor copied."""
    return rewrapped(reference, type(reference), _local_tensor=local)
