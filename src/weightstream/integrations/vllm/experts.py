"""vLLM's fused experts, called like other modules: by `forward`, one after another, on one stream.

`RoutedExperts` holds the stacks of a layer. vLLM calls it by two other methods, inside a custom operator that looks the
layer up by its name. A wrapper of `forward` would not see these calls, and the weights would have to stay on the
device.

In compiled code weightstream waits and releases by operators of its own, which stop fusion across them. Right before
and after vLLM's custom operator that changes no bits, as its kernels are not fused with others anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

# the first takes the ids of a router that ran before; the second is called where one kernel also does the routing
_ENTRIES = ("forward_modular", "forward_monolithic")


def enter_by_forward(layers: Iterable[nn.Module]) -> None:
    """Route calls of these layers' experts through `forward`, and run shared experts on the caller's stream.

    Neither is undone: vLLM's own calls compute the same.
    """
    for module in (module for layer in layers for module in layer.modules()):
        if all(hasattr(type(module), name) for name in _ENTRIES) and "forward" not in vars(module):
            module.forward = MethodType(_forward, module)
            for name in _ENTRIES:
                setattr(module, name, MethodType(_entry(name), module))
        # Shared experts would run on a second stream, at the same time as the routed ones. But units take turns in one
        # ring and one decode buffer.
        if isinstance(vars(module).get("_stream"), torch.Stream):
            module._stream = None  # type: ignore[assignment]


def _forward(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(type(self), name)(self, *args, **kwargs)


def _entry(name: str) -> Callable[..., Any]:
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(name, *args, **kwargs)

    return entry
