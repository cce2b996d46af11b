"""Arguments and outputs of a forward in any call style: nested tuples, lists, dicts and dataclasses of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in an output or argument: nested tuples, lists, dicts and dataclasses, and classes derived of these.

    It runs around every unit, and in compiled code. torch's pytree would take three times as long and skip derived
    classes; `is_dataclass` calls `hasattr`, which torch 2.11 cannot trace for None.
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
    """The arguments with CPU tensors copied to the device. Containers without CPU tensors stay the same objects."""
    if device.type == "cpu":
        return value

    def stays(part: Any) -> bool:
        return all(tensor.device == device or tensor.device.type != "cpu" for tensor in tensors_in(part))

    return tree_map_only(torch.Tensor, lambda tensor: tensor if stays(tensor) else tensor.to(device), value, stays)


def with_tensors(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    memo: dict[int, Any],
    copied: Callable[[Any, Any], object] = lambda *_: None,
) -> Any:
    """The same value with `change(tensor)` for each tensor that `tensors_in` finds.

    A container without changed tensors stays the same object. Others are copied, once however often they occur;
    `copied(original, copy)` is called for mutable ones. `memo` has the copy by the id of the container, which must
    live as long as the memo.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if id(value) in memo:
        return memo[id(value)]
    items = items_of(value)
    new = {key: with_tensors(item, change, memo, copied) for key, item in items.items()}
    if all(new[key] is item for key, item in items.items()):
        return value
    if isinstance(value, tuple):
        found = value._make(new.values()) if hasattr(value, "_make") else type(value)(new.values())
    else:
        set_items(found := copy.copy(value), new)
        copied(value, found)
    memo[id(value)] = found
    return found


def set_items(value: Any, items: dict[Any, Any]) -> None:
    """Make these the items of a list, a dict or a dataclass, in this order."""
    if isinstance(value, list):
        value[:] = items.values()
    elif isinstance(value, dict):
        if list(value) != list(items):
            for key in list(value):
                del value[key]
        for key, item in items.items():
            value[key] = item
    else:
        for name, item in items.items():
            object.__setattr__(value, name, item)


def items_of(value: Any) -> dict[Any, Any]:
    """The items of a tuple, list, dict or dataclass, by index, key or name; no items for other objects."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    names = getattr(type(value), "__dataclass_fields__", ())
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object of a derived class, or a dataclass, has besides its items."""
    items = items_of(value)
    return {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in items}
