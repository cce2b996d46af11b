"""A tensor that kernels read from pages of a file: nobody may write there, or the device fails for good.

Between steps it is of a class that sees every call of torch. One that would write to the memory, or hand it out, first
gets the tensor memory of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weightstream.runtime.values import tensors_in

_BEFORE_WRITE = "_weightstream_before_write"
_OUT = ("numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "data_ptr")


def guard(tensor: torch.Tensor, before_write: Callable[[], None]) -> None:
    """From now on `before_write` runs before the memory of `tensor` is written to or given away."""
    tensor.__dict__[_BEFORE_WRITE] = before_write
    tensor.__class__ = _GUARDED[type(tensor)] if type(tensor) in _GUARDED else type(tensor)


def unguard(tensor: torch.Tensor) -> None:
    """Plain again: for a step, and for good once the memory is the tensor's own."""
    tensor.__class__ = type(tensor).__mro__[1] if type(tensor) in _GUARDED.values() else type(tensor)
    tensor.__dict__.pop(_BEFORE_WRITE, None)


def _guarded(base: type) -> type:
    def intercept(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = [t for t in tensors_in((args, kwargs)) if _BEFORE_WRITE in t.__dict__]
        with torch._C.DisableTorchFunctionSubclass():
            if _writes(func.__name__, kwargs):
                _release(ours)
                return func(*args, **kwargs)
            held = {_storage(tensor) for tensor in ours}
            result = func(*args, **kwargs)
            others = (tensor for tensor in tensors_in(result) if not any(tensor is our for our in ours))
            if not any(_storage(tensor) in held for tensor in others):
                return result
            _release(ours)  # whoever has a view may write through it
            return func(*args, **kwargs)

    members: dict[str, Any] = {"__torch_function__": classmethod(intercept), "__module__": base.__module__}
    members["__deepcopy__"] = plainly(base, copy.deepcopy)
    members["__reduce_ex__"] = plainly(base, lambda tensor, protocol: tensor.__reduce_ex__(protocol))
    return type(base.__name__, (base,), members)


def plainly(base: type, call: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does what the plain class does: copies and pickles are of it."""

    def method(self: torch.Tensor, *args: Any) -> Any:
        ours = type(self)
        self.__class__ = base
        try:
            return call(self, *args)
        finally:
            self.__class__ = ours

    return method


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return in_place or operator or name in ("__setitem__", "__set__", *_OUT) or "out" in kwargs


def _release(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if (before_write := tensor.__dict__.get(_BEFORE_WRITE)) is not None:
            before_write()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_GUARDED: Mapping[type, type] = MappingProxyType({base: _guarded(base) for base in (nn.Parameter, torch.Tensor)})
