"""A tensor whose bytes are decoded when somebody reads them: between steps the memory behind it holds nothing.

It is of a class that sees every call of torch. All but those that ask for facts, such as its shape, first run what
decodes the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weightstream.runtime.readonly import plainly
from weightstream.runtime.values import tensors_in

_BEFORE_READ = "_weightstream_before_read"
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_DOORS = frozenset(("numpy", "__array__", "__dlpack__"))
_PROPERTIES = (
    *(
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "ndim",
        "itemsize",
        "nbytes",
        "is_meta",
        "is_cpu",
    ),
    *("is_cuda", "is_sparse", "is_quantized", "grad", "grad_fn", "_version", "_base", "_backward_hooks", "output_nr"),
)
_METHODS = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_conj", "is_neg", "is_inference", "get_device", "requires_grad_"),
    *("__len__", "__hash__"),
)
_FACTS = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS]
)


def guard(tensor: torch.Tensor, kind: type[torch.Tensor], before_read: Callable[[bool], None]) -> None:
    """From now on `before_read` runs before the memory of `tensor`, of a plain kind, is read or given away; it is told
    whether the memory itself is."""
    tensor.__dict__[_BEFORE_READ] = before_read
    tensor.__class__ = _LAZY[kind]


def unguard(tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    if tensor.__dict__.pop(_BEFORE_READ, None) is not None:
        tensor.__class__ = kind


def _lazy(base: type) -> type:
    def intercept(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _FACTS:
                for tensor in tensors_in((args, kwargs)):
                    _read(tensor, func == _DATA or func.__name__ in _DOORS)
            return func(*args, **(kwargs or {}))

    def read_first(call: Callable[..., Any]) -> Callable[..., Any]:
        plain = plainly(base, call)

        def method(self: torch.Tensor, *args: Any) -> Any:
            _read(self, False)
            return call(self, *args) if type(self) is not ours else plain(self, *args)

        return method

    members: dict[str, Any] = {"__torch_function__": classmethod(intercept), "__module__": base.__module__}
    members["__deepcopy__"] = read_first(copy.deepcopy)
    members["__reduce_ex__"] = read_first(lambda tensor, protocol: tensor.__reduce_ex__(protocol))
    ours = type(base.__name__, (base,), members)
    return ours


def _read(tensor: torch.Tensor, takes_memory: bool) -> None:
    if (before_read := tensor.__dict__.get(_BEFORE_READ)) is not None:
        before_read(takes_memory)


_LAZY: Mapping[type, type] = MappingProxyType({base: _lazy(base) for base in (nn.Parameter, torch.Tensor)})
