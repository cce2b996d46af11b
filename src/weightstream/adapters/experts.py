"""Experts of transformers: modules that hold stacks of matrices, of which ids on the device name those to be used.

Found by structure. transformers' own function computes with a stand-in for the module, so the bits are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_BY_ROW = "batched_mm"  # the implementation that copies the matrices that it uses; generate() decodes with it


class _StandIn:
    """In place of experts: single matrices of their stacks are read, all else is theirs."""

    def __init__(self, module: nn.Module, rows: Mapping[str, Any]) -> None:
        self.__dict__.update(rows, _weightstream_module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_weightstream_module"], name)


class Experts:
    """How the forward of one module of experts reads single matrices of its stacks."""

    def __init__(self, module: Any, names: Sequence[str]) -> None:
        self._module, self._names = module, names

    def forward(self, forward: Callable[..., Any], args: Any, kwargs: Any, rows: Any) -> Callable[..., Any] | None:
        """As `runtime.weights.Picks`."""
        module = self._module
        of_class: Callable[..., Any] = type(module).forward
        plain = getattr(forward, "__func__", None) is of_class and getattr(forward, "__self__", None) is module
        if module.config._experts_implementation != _BY_ROW or not plain:
            return None  # or somebody has put another forward in its place
        ids = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        stacks = [module._parameters.get(name) for name in self._names]  # one that is computed is no parameter
        if not isinstance(ids, torch.Tensor) or ids.numel() > rows.most or any(stack is None for stack in stacks):
            return None

        def picked(*args: Any, **kwargs: Any) -> Any:
            found, named = rows.select(ids), zip(self._names, stacks, strict=True)
            return of_class(_StandIn(module, {n: found[id(s)] for n, s in named if id(s) in found}), *args, **kwargs)

        return picked


def picks_of(module: nn.Module) -> Experts | None:
    """Of experts, how they read single matrices; None for any other module."""
    num, config = getattr(module, "num_experts", None), getattr(module, "config", None)
    if not isinstance(num, int) or not hasattr(type(module), "_apply_gate"):
        return None
    stacks = {name: param for name in _STACKS if isinstance(param := module._parameters.get(name), nn.Parameter)}
    is_stacked = len(stacks) == 2 and all(param.ndim == 3 and len(param) == num for param in stacks.values())
    return Experts(module, list(stacks)) if is_stacked and hasattr(config, "_experts_implementation") else None
