"""Known values: the values of integers and masks while a call is followed on meta. Knows no model.

Ids, masks and positions decide the control flow of a forward: whether a mask hides anything, or where a sequence ends.
Their values are available and small, as are those of constants that the forward makes. So operators on these only, in
any dtype, run twice: on meta, and here on the CPU, which answers questions that tensors on meta cannot answer.
Activations and weights have no values.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from weightstream.runtime.tensors.pytree import tensors_in

_MOST = 1 << 16  # elements
_CPU = torch.device("cpu")
_ASKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
UNKNOWN = object()


class _Unknown(Exception):
    """A tensor has no value."""


class KnownValues:
    """The values of tensors on meta that follow from the arguments of a call."""

    def __init__(self, arguments: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """`arguments`: tensors of the call, each with its copy on meta. They do not change."""
        self._values = WeakIdKeyDictionary()
        self.was_asked = False
        for real, made in arguments:
            if made.is_meta and not real.is_meta and is_small(real):
                self._values[made] = real.detach().to(_CPU, copy=True)

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The output of an operator that needs values of tensors on meta; `UNKNOWN` if it needs none, or they are
        unknown."""
        if func is torch.ops.aten.index.Tensor:
            return self._indexed(func, args)
        is_copy = func is torch.ops.aten._to_copy.default and _names_cpu(kwargs) and args[0].is_meta
        if not is_copy and not any(tag in func.tags for tag in _ASKS):
            return UNKNOWN
        try:
            output = func(*self._real(args), **self._real(kwargs))
        except _Unknown:
            return UNKNOWN
        self.was_asked = True
        return output if is_copy else tree_map_only(torch.Tensor, self._on_meta, output)

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Note the values of an operator's output, if those of all its inputs are known."""
        made = [tensor for tensor in tensors_in(output) if tensor.is_meta]
        written = _written(func, args, kwargs) if func._schema.is_mutable else []
        if not written and not (made and all(t.numel() <= _MOST and t not in self._values for t in made)):
            return
        is_known = all(t.is_meta for t in written)  # a real tensor is written already, and must not be twice
        is_known &= not any(t.is_meta and t not in self._values for t in tensors_in((args, kwargs)))
        values: list[torch.Tensor] | None = None
        if is_known and torch.Tag.nondeterministic_seeded not in func.tags:
            with suppress(Exception):  # of values that the operator refuses
                values = list(tensors_in(func(*self._real(args), **self._real(kwargs))))
        if values is None or len(values) != len(made):
            for tensor in written:
                self._forget(tensor)
            return
        for tensor, value in zip(made, values, strict=True):
            if value.shape == tensor.shape and value.dtype == tensor.dtype:
                self._values[tensor] = value

    def _real(self, values: Any) -> Any:
        real = tree_map_only(torch.Tensor, self._value, values)
        if isinstance(real, dict) and real.get("device") is not None:
            real["device"] = _CPU
        return real

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        value = self._values.get(tensor)
        if value is None:
            raise _Unknown
        return value  # type: ignore[no-any-return]

    def _on_meta(self, value: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self._values[made] = value
        return made

    def _indexed(self, func: Any, args: Any) -> Any:
        """Index with masks: the number of rows depends on their values."""
        tensor, indices = args
        masks = [index for index in indices if index is not None and index.dtype is torch.bool]
        if not masks or not tensor.is_meta or any(mask.is_meta and mask not in self._values for mask in masks):
            return UNKNOWN
        self.was_asked = True
        places: list[Any] = []
        for index in indices:
            is_mask = index is not None and index.dtype is torch.bool
            places += map(self._on_meta, self._value(index).nonzero(as_tuple=True)) if is_mask else [index]
        return func(tensor, places)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Drop the values of a tensor that is written to, and of all views of the same memory."""
        if (value := self._values.get(tensor)) is not None:
            storage = value.untyped_storage()._cdata
            for other in [key for key, kept in self._values.items() if kept.untyped_storage()._cdata == storage]:
                del self._values[other]


def is_small(tensor: torch.Tensor) -> bool:
    """Whether the values of an argument are followed: not those of floating point, which are activations."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MOST


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments of an operator that it writes to."""
    arguments = func._schema.arguments
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    return [
        tensor
        for argument, value in zip(arguments, values, strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value)
    ]


def _names_cpu(kwargs: dict[str, Any]) -> bool:
    """Whether the output of an operator with these keywords is on the CPU."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"
