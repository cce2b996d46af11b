"""Experts of transformers: modules that hold stacks of matrices, of which ids on the device name those to be used.

Found by structure. transformers' own function computes with a stand-in for the module, so the bits are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from weightstream.adapters import hf_private
from weightstream.codec.format import TILE

_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_BY_ROW = "batched_mm"  # the implementation that copies the matrices that it uses; generate() decodes with it
_SWAPPED = "grouped_mm"  # in whose place generate() puts it, on a GPU
_FUSED = "w13_weight"  # of vLLM's experts


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

    def why_whole(self, generates: bool) -> str | None:
        """Why their stacks are read whole whatever is asked for; None: they need not be."""
        module, kind = self._module, type(self._module).__name__
        given = module.config._experts_implementation
        if "forward" in vars(module):
            return f"their forward is not that of {kind}"
        if given != _BY_ROW and not (given == _SWAPPED and generates):
            return f'experts_implementation "{given}" reads whole stacks: set "{_BY_ROW}"'
        if any(prod(module._parameters[name].shape[1:]) % TILE for name in self._names):
            return f"their matrices are not multiples of {TILE} weights"
        return None


def picks_of(module: nn.Module) -> Experts | None:
    """Of experts, how they read single matrices; None for any other module.

    Stacks of one byte a weight go to a kernel, with the ids (`FP8Experts`): nothing may stand in for these.
    """
    num, config = getattr(module, "num_experts", None), getattr(module, "config", None)
    if not isinstance(num, int) or not hasattr(type(module), "_apply_gate"):
        return None
    stacks = {name: param for name in _STACKS if isinstance(param := module._parameters.get(name), nn.Parameter)}
    is_stacked = len(stacks) == 2 and all(param.ndim == 3 and len(param) == num for param in stacks.values())
    is_indexed = is_stacked and all(param.dtype.itemsize > 1 for param in stacks.values())
    return Experts(module, list(stacks)) if is_indexed and hasattr(config, "_experts_implementation") else None


def why_whole(model: nn.Module) -> str | None:
    """Why each step reads all experts of a model, in a line; None: it need not, or there are none.

    Experts are told by their name here: nothing but the line depends on it.
    """
    generates = bool(getattr(model, "can_generate", bool)())
    found: dict[str, list[str]] = {}
    every: list[str] = []
    for name, module in model.named_modules():
        if not _are_experts(name, module) or any(name.startswith(f"{outer}.") for outer in every):
            continue
        every.append(name)
        if reason := _why_whole(module, generates):
            found.setdefault(reason, []).append(name)
    if not found:
        return None
    reason, names = max(found.items(), key=lambda item: len(item[1]))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"each step reads all experts of {names[0]}{more}: {reason}"


def _are_experts(name: str, module: nn.Module) -> bool:
    last, kind = name.rpartition(".")[2].lower(), type(module).__name__
    is_named = last == "experts" or ("Experts" in kind and "shared" not in last)
    return is_named and any(True for _ in module.parameters())


def _why_whole(module: nn.Module, generates: bool) -> str | None:
    kind = type(module).__name__
    if hf_private.has_mxfp4(module):
        return f"{kind} unpacks whole stacks of mxfp4"
    if (picks := picks_of(module)) is not None:
        return picks.why_whole(generates)
    if any(name.endswith(_FUSED) for name, _ in module.named_parameters()):
        return f"kernels of vLLM take whole stacks from {kind}, inside of its operator: none are cached yet"
    packed = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.dtype.itemsize == 1})
    if packed:
        return f"{kind} gives its kernels whole stacks of {' and '.join(packed)}"
    return f"{kind} does not take rows of stacks by ids, as {_BY_ROW} of transformers does"
