"""vLLM's fused experts, made modules like others: called by `forward`, one after another, on one stream.

`RoutedExperts` holds the stacks of a layer, and vLLM calls it by two other methods, inside of an operator that looks
the layer up by its name. So nothing that stands around a `forward` would see it, and its weights would stay on the
device. An operator at the edge of this one changes no bits, as its kernels are fused with no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

_ENTRIES = ("forward_modular", "forward_monolithic")  # of a kernel that is given ids, and of one that finds them


def enter_by_forward(layers: Iterable[nn.Module]) -> None:
    """Let experts of these layers be entered by `forward`, and run what vLLM gives a stream of its own on the caller's.

    Both stay so: vLLM's own calls do what they did.
    """
    for module in (module for layer in layers for module in layer.modules()):
        if all(hasattr(type(module), name) for name in _ENTRIES) and "forward" not in vars(module):
            module.forward = MethodType(_forward, module)
            for name in _ENTRIES:
                setattr(module, name, MethodType(_entry(name), module))
        if isinstance(vars(module).get("_stream"), torch.Stream):  # shared experts beside the others, in one buffer
            module._stream = None  # type: ignore[assignment]


def _forward(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(type(self), name)(self, *args, **kwargs)


def _entry(name: str) -> Callable[..., Any]:
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(name, *args, **kwargs)

    return entry
