"""Arguments and outputs of a forward in any call style: nested tuples, lists, dicts and dataclasses of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in an output or argument: nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name, None))


def moved(value: Any, device: torch.device) -> Any:
    """The same arguments with their CPU tensors on the device. Objects of other kinds, such as caches, stay."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.device.type == "cpu" else value
    if type(value) is dict:
        items = {key: moved(item, device) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        parts = [moved(item, device) for item in value]
        return type(value)(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value
