"""A guarded tensor: an object that calls back before its memory is read, written to or handed out.

A guarded tensor has a derived class whose `__torch_function__` sees every call of torch. There is one derived class for
each class of tensors. Calls that only read facts, such as a shape, pass. Copies and pickles are of the plain class.

[Note: a call that runs twice]
The guard is called before the memory is used, except for views: only the result shows that a call has made one. If the
guard then moves the tensor to other memory, as it does for weights in read-only pages of a file, the view is of the old
memory. So the call runs again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import nn

from weightstream.runtime.tensors.leaves import storage_of
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.tensors.thread_state import quietly, restored

_GUARD = "_weightstream_guard"
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_TAKING = frozenset(("numpy", "__array__", "__dlpack__"))
_WRITING = frozenset(("__setitem__", "__set__", "untyped_storage", "storage", "data_ptr"))
_MEMORY = frozenset(("data", "real", "imag", "T", "H", "mT", "mH"))  # all other properties are facts
_METHODS = """size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_floating_point
    is_complex is_conj is_neg is_inference is_signed is_distributed is_same_size is_coalesced get_device dim_order
    sparse_dim dense_dim _is_view _is_zerotensor _use_count result_type requires_grad_ retain_grad
    register_hook register_post_accumulate_grad_hook __len__ __hash__ __dlpack_device__ __sizeof__
    new_empty new_empty_strided new_zeros new_ones new_full
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like"""
_FACTS = frozenset(
    [
        call
        for name, found in vars(torch._C.TensorBase).items()
        if type(found) is GetSetDescriptorType and name not in _MEMORY
        for call in (found.__get__, found.__set__, found.__delete__)
    ]
    + [getattr(owner, n) for n in _METHODS.split() for owner in (torch.Tensor, torch) if hasattr(owner, n)]
)
_LIKE_ANOTHER = frozenset(  # these read only facts of their second argument
    getattr(torch.Tensor, name) for name in ("to", "type_as", "view_as", "expand_as", "reshape_as")
)


class Access(Enum):
    """How a call uses the memory of a tensor."""

    READ = "read"
    WRITE = "write"  # it writes, or returns the address
    VIEW = "view"  # it has made a view: [Note: a call that runs twice]
    TAKE = "take"  # it hands the memory out to code whose writes raise no version


def guard(tensor: torch.Tensor, kind: type[torch.Tensor], on_access: Callable[[Access], None]) -> None:
    """Call `on_access` from now on before any call that needs the memory of `tensor`, whose plain class is `kind`."""
    tensor.__dict__[_GUARD] = on_access
    tensor.__class__ = _guarded(kind)


def unguard(tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Give the tensor its plain class back."""
    if _GUARD in tensor.__dict__:
        del tensor.__dict__[_GUARD]
    tensor.__class__ = kind


@restored
def before(tensor: torch.Tensor, access: Access) -> None:
    """Call the guard of the tensor, if there is one."""
    if (on_access := tensor.__dict__.get(_GUARD)) is not None:
        quietly(on_access, access)


@contextmanager
def plainly(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, these have their plain classes, as libraries look at `type(tensor)`.

    Uses inside are not seen, so the guard of each is called for a read and a view before.
    """
    guarded = {id(tensor): (tensor, type(tensor)) for tensor in tensors if _GUARD in tensor.__dict__}.values()
    for tensor, kind in guarded:
        before(tensor, Access.READ)
        before(tensor, Access.VIEW)
        (plain,) = kind.__bases__
        tensor.__class__ = plain
    try:
        yield
    finally:
        for tensor, kind in guarded:
            if _GUARD in tensor.__dict__:  # else it was unguarded meanwhile, as a step has begun
                tensor.__class__ = kind


@cache
def _guarded(base: type[torch.Tensor]) -> type[torch.Tensor]:
    # The `__torch_function__` of these two adds nothing to a call, whose arguments may be of any other class: `run`
    # skips it. That of a subclass must run.
    plain = base in (torch.Tensor, nn.Parameter)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        if not plain:
            return base.__torch_function__(func, (base,), args, kwargs)
        return quietly(func, *args, **kwargs)

    def intercept(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            return run(func, args, kwargs)
        read = args[:1] if func in _LIKE_ANOTHER else (args, kwargs)
        guarded = [tensor for tensor in tensors_in(read) if _GUARD in tensor.__dict__]
        access = _access(func, kwargs)
        for tensor in guarded:
            before(tensor, access)
        by_address = {_address(tensor): tensor for tensor in guarded}
        result = run(func, args, kwargs)
        views = [t for t in tensors_in(result) if _address(t) in by_address and not any(t is own for own in guarded)]
        for view in views:
            before(by_address[_address(view)], Access.VIEW)
        has_moved = views and any(_address(tensor) != address for address, tensor in by_address.items())
        return run(func, args, kwargs) if has_moved else result  # [Note: a call that runs twice]

    members: dict[str, Any] = {"__torch_function__": classmethod(intercept), "__module__": base.__module__}
    members["__deepcopy__"] = _as_plain_class(base, copy.deepcopy)
    members["__reduce_ex__"] = _as_plain_class(base, lambda tensor, protocol: tensor.__reduce_ex__(protocol))
    return type(base.__name__, (base,), members)


def _as_plain_class(base: type[torch.Tensor], call: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reports a read to the guard, and then runs `call` while the tensor has its plain class."""

    def method(self: torch.Tensor, *args: Any) -> Any:
        before(self, Access.READ)
        ours, kept = type(self), self.__dict__
        # another dictionary, as the result of `__reduce_ex__` may hold the dictionary itself
        self.__dict__ = {name: value for name, value in kept.items() if name != _GUARD}
        self.__class__ = base
        try:
            return call(self, *args)
        finally:
            self.__dict__ = kept
            if _GUARD in kept:
                self.__class__ = ours

    return method


def _access(func: Any, kwargs: dict[str, Any]) -> Access:
    name: str = func.__name__.partition(".")[0]  # without the overload of an operator
    if func == _DATA or name in _TAKING:
        return Access.TAKE
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    is_mutable = getattr(getattr(func, "_schema", None), "is_mutable", False)
    writes = in_place or operator or name in _WRITING or "out" in kwargs or kwargs.get("inplace") or is_mutable
    return Access.WRITE if writes else Access.READ


def _address(tensor: torch.Tensor) -> int | None:
    storage = quietly(storage_of, tensor)
    return None if storage is None else storage.data_ptr()
