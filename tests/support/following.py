"""A language model is followed once on shapes: what was seen is kept for the next model that is made in the same way.

Most tests offload small models that were built before, and to follow one takes as long as all of their steps. A model
that somebody hooked, or whose forward is its own, is followed each time; so are all by tests of `observe` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weightstream.adapters.shapes import Footprint

Names = tuple[list[str], list[str], Any]
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def once(observe: Callable[..., Footprint]) -> Callable[..., Footprint]:
    """`observe`, but models that are alike share what it found; their own modules and weights are named in it."""
    known: dict[Hashable, tuple[Footprint, Names]] = {}

    def observed(model: nn.Module, workload: Any) -> Footprint:
        key = (*of, workload) if (of := _facts(model)) is not None else None
        if key is not None and key in known:
            return _of(model, *known[key])
        found = observe(model, workload)
        names = _names(model, found)
        if key is not None and names is not None:
            known[key] = _bare(found), names
        return found

    return observed


def _facts(model: nn.Module) -> tuple[Hashable, ...] | None:
    """What a made-up step follows from; None: from more than can be told."""
    facts: list[Hashable] = []
    for name, module in model.named_modules(remove_duplicate=False):
        own, config = vars(module), getattr(module, "config", None)
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or hasattr(module, "_hf_hook"):
            return None
        plain = tuple((key, value) for key, value in own.items() if isinstance(value, _PLAIN))
        ways = tuple(getattr(config, f"_{kind}_implementation", None) for kind in ("attn", "experts"))
        told = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else None
        facts.append((name, type(module), type(module).forward, plain, ways, told))
    places: dict[int, int] = {}
    for name, tensor in _tensors(model).items():
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return None  # what a class of its own holds is not told by its shape, and it may have no storage
        where = places.setdefault(tensor.untyped_storage().data_ptr(), len(places)), tensor.storage_offset()
        facts.append((name, type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), where))
    return tuple(facts)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _names(model: nn.Module, found: Footprint) -> Names | None:
    """Of the modules that ran and of the weights that were read; None: one is not the model's."""
    modules = {id(module): name for name, module in model.named_modules()}
    tensors = {id(tensor): name for name, tensor in reversed(_tensors(model).items())}
    captured = _names(model, found.captured) if found.captured is not None else None
    if found.captured is not None and captured is None:
        return None
    try:
        return [modules[id(m)] for m, _ in found.calls], [tensors[id(t)] for _, t in found.reads], captured
    except KeyError:
        return None


def _bare(found: Footprint) -> Footprint:
    """Without modules and weights, which nothing here keeps alive."""
    calls: Any = tuple((None, caller) for _, caller in found.calls)
    reads: Any = tuple((call, None) for call, _ in found.reads)
    captured = _bare(found.captured) if found.captured is not None else None
    return replace(found, calls=calls, reads=reads, captured=captured)


def _of(model: nn.Module, found: Footprint, names: Names) -> Footprint:
    tensors, (ran, read, inner) = _tensors(model), names
    calls = tuple((model.get_submodule(name), caller) for name, (_, caller) in zip(ran, found.calls, strict=True))
    reads = tuple((call, tensors[name]) for name, (call, _) in zip(read, found.reads, strict=True))
    captured = _of(model, found.captured, inner) if found.captured is not None else None
    return replace(found, calls=calls, reads=reads, captured=captured)
