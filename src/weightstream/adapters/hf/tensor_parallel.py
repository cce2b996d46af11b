"""Names of transformers' tensor parallelism that it does not promise to keep, and no other file spells one.

A test of each (tests/adapters/hf/test_tensor_parallel.py) says which one a new version has lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weightstream.adapters.hf.checkpoint_ranges import Gathered
from weightstream.adapters.hf.private import set_inside
from weightstream.adapters.hf.ranks import NAMES, Ranks, imagined
from weightstream.errors import ConfigError
from weightstream.runtime.tensors.leaves import rewrapped

_LIKE, _EQUAL = "_dtensor_from_local_like", "_tied_params_are_equal"
_OF_TORCH, _OF_TRANSFORMERS = "torch.distributed.", "transformers.distributed."  # where their code is


def wanted(kwargs: dict[str, Any]) -> Any | None:
    """The `DistributedConfig` that keywords of `from_pretrained` ask for, by one of `ranks.NAMES`; None: one process.

    They have it by the first of these alone from then on, if it wants several. Raises `ConfigError`.
    """
    given = kwargs.pop("distributed_config", None)
    older = {name: kwargs.pop(name, None) for name in NAMES[1:]}
    older = {name: value for name, value in older.items() if value is not None}
    if given is None and not older:
        return None
    from transformers.distributed import DistributedConfig

    if given is not None and older:
        raise ConfigError(f"{', '.join(older)} beside distributed_config: name it in that alone")
    try:
        found = (
            given if isinstance(given, DistributedConfig) else DistributedConfig(**(older if given is None else given))
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"distributed_config = {given or older}: {error}") from error
    if type(found.tp_size) is not int:
        raise ConfigError(f"distributed_config: tp_size = {found.tp_size!r} is no number of processes")
    if found.tp_size != 1:
        kwargs["distributed_config"] = found
    return found


@contextmanager
def on_host(kind: Any) -> Iterator[None]:
    """Inside, `from_pretrained` of this class leaves each rank's shards where they are: views of files, which no device
    has seen. transformers would bring each to the device of its rank, and copy columns."""
    from transformers import core_model_loading, modeling_utils
    from transformers.distributed.sharding_utils import DtensorShardOperation

    prepare, shard = kind.prepare_distribute_model, DtensorShardOperation.shard_tensor

    def prepared(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        config, device_map, *others = prepare(*args, **kwargs)
        return config, device_map and torch.device("cpu"), *others

    def sharded(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        is_piece = kwargs.get("tensor_idx") is not None  # of what a conversion joins
        if not isinstance(source, Gathered) or is_piece or kwargs.get("dtype") not in (None, source.dtype):
            return shard(self, source, *args, **kwargs)
        cuts = [placement for placement in self.placements if not placement.is_replicate()]
        dims = {placement.dim % len(source.shape) for placement in cuts}
        is_plain = all(placement.is_shard() for placement in cuts) or len(source.shape) - 1 not in dims
        found = source.shard(partial(shard, self), dims) if is_plain else None
        return shard(self, source, *args, **kwargs) if found is None else found

    with ExitStack() as stack:
        stack.enter_context(set_inside(DtensorShardOperation, "shard_tensor", sharded))
        stack.enter_context(set_inside(kind, "prepare_distribute_model", staticmethod(prepared)))
        stack.enter_context(set_inside(modeling_utils, _EQUAL, torch.equal))  # as transformers had up to 5.22
        stack.enter_context(_Asking())
        for module in (core_model_loading, modeling_utils):
            stack.enter_context(set_inside(module, _LIKE, _like))
        yield


def shard(model: Any, wanted: Any) -> None:
    """Leave of a model on meta, not yet tied, what the first of so many processes would have of it.

    Raises `ConfigError`, and as `ranks.imagined`. A GPU is neither needed nor woken.
    """
    with ExitStack() as stack:
        if not stack.enter_context(imagined(wanted.tp_size)):
            stack.enter_context(set_inside(torch._C, "_get_accelerator", lambda *_: torch.device("cpu")))
        try:
            config, _, mesh = model.prepare_distribute_model(wanted)
            model.maybe_distribute_model(model, config, mesh)
        except ValueError as error:
            raise ConfigError(f"distributed_config: {error}") from error


def is_of_shard(forward: Any) -> bool:
    """Whether it is what transformers runs around the forward of a module with shards."""
    return str(getattr(forward, "__module__", "")).startswith(_OF_TRANSFORMERS)


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor`."""
    return any(kind.__module__.startswith(_OF_TORCH) for kind in type(tensor).__mro__)


def adds_up(module: torch.nn.Module, weights: Iterable[Any]) -> bool:
    """Whether the ranks add up what a module gives that has these weights, as each has a part of what a linear layer
    multiplies, of the rows of an embedding, or of every expert. What they join end to end is not told."""
    cuts = [
        (weight.dim(), placement.dim % weight.dim())
        for weight in weights
        if is_shard(weight) and weight.dim() > 1
        for placement in weight.placements
        if not placement.is_replicate()
    ]
    if isinstance(module, torch.nn.Linear):
        return any(dim == num_dims - 1 for num_dims, dim in cuts)
    return bool(cuts) and (not isinstance(module, torch.nn.Embedding) or any(dim == 0 for _, dim in cuts))


def is_of_processes(value: Any) -> bool:
    """Whether it is a mesh of processes, which have no copies."""
    return type(value).__module__.startswith((_OF_TORCH, _OF_TRANSFORMERS))


class _Asking(TorchFunctionMode):
    """Asks all ranks whether shards are equal, where a rank that refused is heard: nobody waits in a sum for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.equal or len(args) != 2 or not any(map(is_shard, args)):
            return func(*args, **kwargs or {})
        one, other = args
        alike = one.shape == other.shape and getattr(one, "placements", ()) == getattr(other, "placements", ())
        return all(Ranks().gather(alike and torch.equal(one.to_local(), other.to_local())))


def _like(local: torch.Tensor, reference: Any) -> Any:
    """A shard as a `DTensor` of the same mesh and placements as this one; neither moved nor copied."""
    return rewrapped(reference, type(reference), _local_tensor=local)
