"""Arguments and outputs of a forward in any call style: nested tuples, lists, dicts and dataclasses of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in an output or argument: nested tuples, lists, dicts and dataclasses, and what is derived of these.

    It runs around every unit, and in compiled code. pytree would take three times as long and leave out derived
    classes; `is_dataclass` asks with `hasattr`, which torch 2.11 cannot trace for None.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    else:
        for name in getattr(type(value), "__dataclass_fields__", ()):
            yield from tensors_in(getattr(value, name, None))


def moved(value: Any, device: torch.device) -> Any:
    """The same arguments with their CPU tensors on the device. What holds none of them stays the same object."""
    if device.type == "cpu":
        return value

    def stays(part: Any) -> bool:
        return all(tensor.device == device or tensor.device.type != "cpu" for tensor in tensors_in(part))

    return tree_map_only(torch.Tensor, lambda tensor: tensor if stays(tensor) else tensor.to(device), value, stays)
