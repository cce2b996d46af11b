"""Experts of transformers: modules that hold stacks of matrices, of which ids on the device name those to be used.

Found by structure. transformers' own functions compute, with a stand-in for the module or with itself, so the bits are
their own.

[Note: grouped in place of batched]
`generate()` decodes with batched_mm, which copies the matrices of each id: for a few sequences that is most of a step.
Where all that is used lies in place, grouped_mm reads it there. On a device where both give the same bits it runs
instead. Nobody promises that, so the first call of each shape runs both and compares; what it finds holds for the
process, as the kernels and the order of their sums are chosen by shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_BY_ROW = "batched_mm"  # the implementation that copies the matrices that it uses; generate() decodes with it
_IN_PLACE = "grouped_mm"  # it touches no matrix but those that it uses
_EQUAL: dict[Any, bool] = {}  # [Note: grouped in place of batched]


class _StandIn:
    """In place of a module: these attributes are others, all else is the module's."""

    def __init__(self, module: Any, others: Mapping[str, Any]) -> None:
        self.__dict__.update(others, _weightstream_module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_weightstream_module"], name)


class Experts:
    """How the forward of one module of experts reads single matrices of its stacks."""

    def __init__(self, module: Any, names: Sequence[str]) -> None:
        self._module, self._names = module, names

    def forward(self, forward: Callable[..., Any], args: Any, kwargs: Any, rows: Any) -> Callable[..., Any] | None:
        """As `runtime.weights.Picks`."""
        module, implementation = self._module, self._module.config._experts_implementation
        of_class: Callable[..., Any] = type(module).forward
        plain = getattr(forward, "__func__", None) is of_class and getattr(forward, "__self__", None) is module
        if implementation not in (_BY_ROW, _IN_PLACE) or not plain:
            return None  # or somebody has put another forward in its place
        ids = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        stacks = {name: module._parameters.get(name) for name in self._names}
        read = {id(stack) for stack in stacks.values() if stack is not None}  # one that is computed is no parameter
        if not isinstance(ids, torch.Tensor) or len(read) < len(stacks) or not rows.readings.keys() <= read:
            return None
        by_row = implementation == _BY_ROW
        kind = type(module), ids.device, ids.shape, *((stack.dtype, stack.shape) for stack in stacks.values())
        in_groups = _EQUAL.get(kind) if by_row and len(ids) > 1 else False
        if by_row and ids.numel() <= rows.most and (in_groups is False or (in_groups is None and rows.capturing())):
            return partial(self._select, of_class, stacks, rows, ids)
        if ids.numel() <= rows.most_to_place:
            return partial(self._place, of_class, kind, in_groups, rows, ids)
        return None

    def _select(
        self, of_class: Callable[..., Any], stacks: Mapping[str, Any], rows: Any, ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = rows.select(ids)
        others = {name: found[id(stack)] for name, stack in stacks.items() if id(stack) in found}
        return of_class(_StandIn(self._module, others), *args, **kwargs)

    def _place(
        self,
        of_class: Callable[..., Any],
        kind: Any,
        in_groups: bool | None,
        rows: Any,
        ids: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        """`in_groups`: [Note: grouped in place of batched]; None: nobody knows yet."""
        rows.place(ids)
        module = self._module
        grouped = _StandIn(module, {"config": _StandIn(module.config, {"_experts_implementation": _IN_PLACE})})
        output = of_class(grouped if in_groups else module, *args, **kw)
        if in_groups is None and not rows.capturing():
            with _disable_current_modes():  # who watches the call would see two, and one that waits for the device
                _EQUAL[kind] = torch.equal(output, of_class(grouped, *args, **kw))
        return output


def picks_of(module: nn.Module) -> Experts | None:
    """Of experts, how they read single matrices; None for any other module."""
    num, config = getattr(module, "num_experts", None), getattr(module, "config", None)
    if not isinstance(num, int) or not hasattr(type(module), "_apply_gate"):
        return None
    stacks = {name: param for name in _STACKS if isinstance(param := module._parameters.get(name), nn.Parameter)}
    is_stacked = len(stacks) == 2 and all(param.ndim == 3 and len(param) == num for param in stacks.values())
    return Experts(module, list(stacks)) if is_stacked and hasattr(config, "_experts_implementation") else None
