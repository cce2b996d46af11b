"""All names of transformers' tensor parallelism that it does not promise to keep; no other file spells one.

A test of each name (tests/adapters/hf/test_tensor_parallel.py) fails where a new version has lost it.
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
_OF_TORCH, _OF_TRANSFORMERS = "torch.distributed.", "transformers.distributed."  # modules of their code


def wanted(kwargs: dict[str, Any]) -> Any | None:
    """The `DistributedConfig` that keywords of `from_pretrained` ask for, by any of `ranks.NAMES`; None: one process.

    Takes these keywords out of `kwargs`, and puts it back as `distributed_config` if it asks for several processes.
    Raises `ConfigError`.
    """
    given = kwargs.pop("distributed_config", None)
    older = {name: kwargs.pop(name, None) for name in NAMES[1:]}
    older = {name: value for name, value in older.items() if value is not None}
    if given is None and not older:
        return None
    from transformers.distributed import DistributedConfig

    if given is not None and older:
        raise ConfigError(f"{', '.join(older)} as well as distributed_config: give one of them")
    try:
        found = (
            given if isinstance(given, DistributedConfig) else DistributedConfig(**(older if given is None else given))
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"distributed_config = {given or older}: {error}") from error
    if type(found.tp_size) is not int:
        raise ConfigError(f"distributed_config: tp_size = {found.tp_size!r} is not a number of processes")
    if found.tp_size != 1:
        kwargs["distributed_config"] = found
    return found


@contextmanager
def on_host(kind: Any) -> Iterator[None]:
    """Inside, `from_pretrained` of this class leaves the shards of each rank on the host, as views of files.

    transformers would move each shard to the device of its rank, and copy columns.
    """
    from transformers import core_model_loading, modeling_utils
    from transformers.distributed.sharding_utils import DtensorShardOperation

    prepare, shard = kind.prepare_distribute_model, DtensorShardOperation.shard_tensor

    def prepared(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        config, device_map, *others = prepare(*args, **kwargs)
        return config, device_map and torch.device("cpu"), *others

    def sharded(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        is_piece = kwargs.get("tensor_idx") is not None  # of a tensor that a conversion joins
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
        stack.enter_context(set_inside(modeling_utils, _EQUAL, torch.equal))  # as in transformers up to 5.22
        stack.enter_context(_Asking())
        for module in (core_model_loading, modeling_utils):
            stack.enter_context(set_inside(module, _LIKE, _like))
        yield


def shard(model: Any, wanted: Any) -> None:
    """Replace the weights of a model on meta, not yet tied, by the shards of the first of `wanted.tp_size` processes.

    Raises `ConfigError`, also as `ranks.imagined`. No GPU is needed or initialised.
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
    """Whether a function is the wrapper of transformers around the forward of a module with shards."""
    return str(getattr(forward, "__module__", "")).startswith(_OF_TRANSFORMERS)


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a `DTensor`."""
    return any(kind.__module__.startswith(_OF_TORCH) for kind in type(tensor).__mro__)


def adds_up(module: torch.nn.Module, weights: Iterable[Any]) -> bool:
    """Whether the output of a module with these weights is all-reduced.

    It is where each rank has a part of the inputs of a linear layer, of the rows of an embedding, or of every expert.
    Outputs that the ranks concatenate do not count.
    """
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
    """Whether a value is a mesh of processes, which cannot be copied."""
    return type(value).__module__.startswith((_OF_TORCH, _OF_TRANSFORMERS))


class _Asking(TorchFunctionMode):
    """Compares shards by `Ranks.gather`, which receives the error of a rank that refused; an all-reduce would hang."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.equal or len(args) != 2 or not any(map(is_shard, args)):
            return func(*args, **kwargs or {})
        one, other = args
        alike = one.shape == other.shape and getattr(one, "placements", ()) == getattr(other, "placements", ())
        return all(Ranks().gather(alike and torch.equal(one.to_local(), other.to_local())))


def _like(local: torch.Tensor, reference: Any) -> Any:
    """A shard as a `DTensor` with the mesh and placements of `reference`; neither moved nor copied."""
    return rewrapped(reference, type(reference), _local_tensor=local)
