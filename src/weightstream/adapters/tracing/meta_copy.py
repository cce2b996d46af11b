"""A copy of a model on meta: its forward computes only shapes, and does not change the model.

The copy has modules, settings and caches of its own, and no hooks. `global_state` takes care of places outside of the
model.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weightstream.adapters.hf import private, tensor_parallel
from weightstream.errors import UnsupportedError
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.tensors.leaves import leaves
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.tensors.thread_state import unseen

_HOOKS = "_diffusers_hook"  # an attribute with diffusers' hooks on a module, mostly those of caches
_AROUND = "_weightstream_around"  # an attribute with our wrapper of a module's forward (runtime/streamer/forward_patch)
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # on a streamed model, names that are looked up in the model itself
_COPY_FUNCTIONS = (torch.Tensor.__deepcopy__, nn.Parameter.__deepcopy__, torch.Tensor.clone)


class Storages:
    """The storages of tensors on meta, by `_cdata`, as long as anything refers to them."""

    def __init__(self) -> None:
        self._alive = weakref.WeakValueDictionary[int, torch.UntypedStorage]()

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add the storage of a tensor, and return the tensor."""
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = storage
        return tensor

    def __contains__(self, storage: object) -> bool:
        return storage in self._alive

    def __bool__(self) -> bool:
        return bool(self._alive)

    def are_kept(self) -> bool:
        """Whether anything still refers to one of them, except cycles of garbage."""
        if not self:
            return False
        gc.collect()
        return bool(self)


@unseen
def meta_storage(tensor: torch.Tensor) -> int | None:
    """The storage of a tensor on meta, by `_cdata`; None for any other tensor."""
    if not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # it wraps other tensors
        return None


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor on meta with the same shape, strides and dtype; a parameter stays one."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def hooks_of(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """The dictionaries of a module's hooks, by the name of the attribute."""
    return {name: value for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict)}


def forwards_of(module: nn.Module) -> list[Any]:
    """The forwards of the instance itself, and the one that our wrapper runs."""
    own = vars(module)
    forwards = own.get("forward"), getattr(own.get(_AROUND), "patched", None)
    return [forward for forward in forwards if forward is not None]


def is_hooked(module: nn.Module, forward: Any) -> bool:
    """Whether `forward` is that of the module's class, wrapped by hooks of diffusers, perhaps around or inside of our
    stand-in, or by transformers' code for shards. Such a wrapper can be left out of a copy.
    """
    if tensor_parallel.is_of_shard(forward):
        return True
    inner, stands_for = forward, getattr(vars(module).get(_AROUND), "stands_for", lambda found: found)
    while _HOOKS in vars(module) and hasattr(inner, "__wrapped__"):
        if isinstance(inner, MethodType) and stands_for(inner) is inner:
            break
        inner = inner.__wrapped__
    kinds = {getattr(kind, "forward", None) for kind in type(module).__mro__}
    return inner is not forward and getattr(inner, "__func__", None) in kinds


class _Copies(TorchFunctionMode):
    """Inside, `copy_tensor` makes the copy where code copies a tensor, such as `copy.deepcopy`."""

    def __init__(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._copy_tensor = copy_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._copy_tensor(args[0]) if func in _COPY_FUNCTIONS else func(*args, **(kwargs or {}))


def zeros_for(output: Any) -> Any:
    """A copy of the output of a call on meta, with zeros on the CPU instead of its tensors."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    memo: dict[int, Any] = {id(tensor): zeros(tensor) for tensor in tensors_in(output)}
    with torch.inference_mode(False), _Copies(zeros):
        return copy.deepcopy(output, memo)


class Copied(NamedTuple):
    """A copy of a model on meta.

    `originals`: the module of the model for the id of each copied one. `weights`: the weights of the model for the
    `_cdata` of each copied storage. `values`: copies of the values. `summed`: the ids of the model's modules whose
    outputs are all-reduced over the ranks.
    """

    model: nn.Module
    originals: dict[int, nn.Module]
    weights: dict[int, list[torch.Tensor]]
    values: tuple[Any, ...]
    summed: frozenset[int]


def copied(model: nn.Module, *values: Any, storages: Storages | None = None) -> Copied:
    """Copy a model and values. Objects that they share, such as a cache, are shared by the copies, too.

    A shard becomes a plain tensor of its size on this rank, and its module does not communicate: that changes no shape
    of a layer. `storages` gets every tensor that is made. Raises the errors of `copy.deepcopy`.

    `copy.deepcopy` looks each object up in a memo, from its id to its copy. Entries that are set here in advance decide
    what becomes of tensors (on meta), hooks (none) and forwards that are left out (None).
    """
    noted = Storages() if storages is None else storages

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        return noted.note(_shape_of(tensor))

    memo: dict[int, Any] = {}
    weights: dict[int, list[torch.Tensor]] = {}
    modules, hooked, summed = list(model.modules()), list[nn.Module](), set[int]()
    for module in modules:
        outers = list[torch.Tensor]()
        for leaf in leaves(module):
            # the outermost tensor of a leaf: a tensor subclass that wraps others is copied as one plain tensor
            outers.append(outer := leaf.shells[-1] if leaf.shells else leaf.tensor)
            is_shard = bool(leaf.shells) and tensor_parallel.is_shard(outer)
            made = memo.setdefault(
                id(outer), nn.Parameter(shape_of(leaf.tensor), requires_grad=False) if is_shard else shape_of(outer)
            )
            weights.setdefault(made.untyped_storage()._cdata, []).append(leaf.tensor)
        memo |= {id(value): OrderedDict() for value in hooks_of(module).values()}
        if any(wraps := [forward for forward in forwards_of(module) if is_hooked(module, forward)]):
            # a cache of diffusers skips blocks depending on values; in the copy no block is skipped
            hooked.append(module)
            memo |= dict.fromkeys(map(id, wraps))
            if any(map(tensor_parallel.is_of_shard, wraps)) and tensor_parallel.adds_up(module, outers):
                summed.add(id(module))
        memo |= {id(vars(module).get(name)): None for name in (_HOOKS, _IGNORED)}
        memo |= {id(value): None for value in vars(module).values() if tensor_parallel.is_of_processes(value)}
    memo |= {id(tensor): shape_of(tensor) for tensor in tensors_in(values)}
    with _Copies(shape_of), forward_patch.copying_as_it_runs():
        made, copied_values = copy.deepcopy((model, values), memo)
    for module in modules:
        twin = memo.get(id(module), module)
        if twin is module or any(_is_shared(value, vars(twin).get(name)) for name, value in vars(module).items()):
            raise UnsupportedError(f"{type(module).__name__} or an object in it cannot be copied: its copy is itself")
    for module in made.modules():
        private.forget_hooks(module)
        vars(module).pop(_HOOKS, None)
    for module in hooked:
        for name in ("forward", _AROUND):
            vars(memo[id(module)]).pop(name, None)
    originals = {id(memo[id(module)]): module for module in modules}
    return Copied(made, originals, weights, copied_values, frozenset(summed))


def _is_shared(value: Any, made: Any) -> bool:
    """Whether the copy holds the same object as the model, because its class refuses to be copied.

    A forward of the copy might change the model through it. Values that nothing can change, such as numbers, may be
    shared.
    """
    may_refuse = hasattr(type(value), "__deepcopy__") or isinstance(value, weakref.ref)
    return made is value and may_refuse and not isinstance(value, Enum)


def untie(made: Copied) -> None:
    """Free a copy: delete bound methods of a module among its own attributes, which are reference cycles."""
    for module in list(made.model.modules()):
        if id(module) in made.originals:  # others are not ours: a forward may have added them
            own = vars(module)
            for name in [name for name, value in own.items() if getattr(value, "__self__", None) is module]:
                del own[name]
