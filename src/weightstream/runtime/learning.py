"""What the first step teaches: weights that are read outside of their unit's forward. Knows no plan and no device.

A parent may read a child's weight without calling the child, so that no hook fires. During the first step a function
mode sees every torch call with its arguments; whoever reads a streamed tensor that is not open is remembered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# Calls that look at a tensor and not at its values.
_METADATA = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_pinned", "is_same_size", "type"),
        *("data_ptr", "untyped_storage", "requires_grad_", "__len__", "__hash__", "__repr__", "__format__"),
    )
)
_VALUE_PROPERTIES = frozenset(getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH"))


class ReadWatch(TorchFunctionMode):
    """Calls `on_read(tensor)` before any torch call that reads one of the watched tensor objects."""

    def __init__(self, watched: Iterable[torch.Tensor], on_read: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._watched = {id(t) for t in watched}
        self._on_read = on_read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _reads_values(func):
            for tensor in _shallow((*args, *(kwargs or {}).values())):
                if id(tensor) in self._watched:
                    self._on_read(tensor)
        return func(*args, **(kwargs or {}))


def _reads_values(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func in _VALUE_PROPERTIES
    return name not in _METADATA and name != "__set__"


def _shallow(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, torch.Tensor))


def reading_module(known: dict[int, str]) -> str | None:
    """The name of the innermost of the known modules whose method is on this thread's stack; None if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in known:
            return known[id(owner)]
        frame = frame.f_back  # type: ignore[assignment]
    return None
