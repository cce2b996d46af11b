"""A copy of a model on meta: a forward of it computes shapes alone, and changes nothing that the model has.

The copy has modules, settings and caches of its own, and no hooks. What lies outside of both (random states, what is
kept in modules of Python) is put back, as far as tensors on meta would be found there.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode

from weightstream.errors import UnsupportedError
from weightstream.runtime.leaves import leaves
from weightstream.runtime.values import tensors_in

_COPIED = (torch.Tensor.__deepcopy__, nn.Parameter.__deepcopy__, torch.Tensor.clone)
_HOLDERS = 3  # containers around a tensor that somebody has kept, at most, until the one that can let go of it


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor on meta with the same shape, strides and dtype; a parameter stays one."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


class _Shapes(TorchFunctionMode):
    """Inside, a copy of a tensor is one of its shape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return shape_of(args[0]) if func in _COPIED else func(*args, **(kwargs or {}))


class Copied(NamedTuple):
    """A copy of a model on meta: which module of the model stands behind each of it, by id, and which weights behind
    a storage, by `_cdata`; and copies of the values that came along."""

    model: nn.Module
    originals: dict[int, nn.Module]
    weights: dict[int, list[torch.Tensor]]
    values: tuple[Any, ...]


def copied(model: nn.Module, *values: Any) -> Copied:
    """What model and values share, such as a cache, is one in the copies too. Raises what `copy.deepcopy` does."""
    memo: dict[int, Any] = {}
    weights: dict[int, list[torch.Tensor]] = {}
    modules = list(model.modules())
    for module in modules:
        for leaf in leaves(module):
            outer = leaf.shells[-1] if leaf.shells else leaf.tensor  # what wraps others is a plain tensor here
            made = memo.setdefault(id(outer), shape_of(outer))
            weights.setdefault(made.untyped_storage()._cdata, []).append(leaf.tensor)
        hooks = (value for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict))
        memo |= {id(value): OrderedDict() for value in hooks}
    memo |= {id(tensor): shape_of(tensor) for tensor in tensors_in(values)}
    with _Shapes():
        made, given = copy.deepcopy((model, values), memo)
    return Copied(made, {id(memo[id(module)]): module for module in modules}, weights, given)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Inside, a forward may run that nobody asked for: random states are put back at the end.

    Raises `UnsupportedError` where hooks of all modules would tell others of it.
    """
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        raise UnsupportedError("hooks of all modules are in force, which would see it")
    numpy: Any = sys.modules.get("numpy")
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        yield


def forget(storages: Callable[[], Collection[int]]) -> None:
    """Take tensors on meta out of the caches where somebody keeps them; `storages()` are those alive, by `_cdata`."""
    if not storages() or not (gc.collect(), storages())[1]:
        return
    left = storages()
    gc.unfreeze()  # what is frozen is not found; to freeze again would keep for ever what is garbage since
    found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.is_meta]
    kept = [t for t in found if t.untyped_storage()._cdata in left]
    del found
    while kept:
        _let_go(kept.pop(), _HOLDERS)


def _let_go(value: Any, depth: int) -> None:
    """Empty the containers that hold a value, or the ones around it where these cannot be changed."""
    holders = [h for h in gc.get_referrers(value) if not hasattr(h, "f_code") and type(h).__name__ != "list_iterator"]
    while holders:
        holder = holders.pop()
        if isinstance(holder, dict):
            for key in [key for key, item in holder.items() if item is value]:
                del holder[key]
        elif isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, tuple) and depth:
            _let_go(holder, depth - 1)
        elif isinstance(holder, list) and holder is not holders:
            holder[:] = [item for item in holder if item is not value]
