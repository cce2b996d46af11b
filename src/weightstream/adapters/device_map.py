"""What tools that know accelerate find on an offloaded model: `device`, `hf_device_map`, `_hf_hook`. Knows no weights.

All three say where the model computes, not where weights live. Tools ask to learn where inputs go and that the model is
not to be moved. A "cpu" or "disk" in the map tells them more: that weights are on the meta device and that accelerate's
hooks hold the true ones, so that saving, adapters and generation would go ways that are wrong here.

They live in a class made for the instance, as a copy or a pickle of the model must not have them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weightstream.errors import OffloadError


class Placement:
    """Stands where accelerate keeps its hook. Without one, `generate` adds its own to the encoder of a model."""

    io_same_device = False  # asked for by tools: inputs and outputs of an encoder are on the device as it is

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device

    def detach_hook(self, module: nn.Module) -> nn.Module:
        raise OffloadError(
            f"{type(module).__name__} is offloaded by weightstream; accelerate has no hook on it to remove: "
            "call model.weightstream.remove()"
        )


def attach(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Give them to every transformers or diffusers model in `model`; returns what takes them away."""
    placed = [(module, type(module)) for module in model.modules() if _is_pretrained(module)]
    for module, kind in placed:
        module.__class__ = _placed(kind, device)

    def detach() -> None:
        for module, kind in placed:
            module.__class__ = kind

    return detach


def _is_pretrained(module: nn.Module) -> bool:
    return hasattr(module, "save_pretrained") and isinstance(getattr(type(module), "device", None), property)


def _placed(base: type[nn.Module], device: torch.device) -> type[nn.Module]:
    def new(cls: type, *args: Any, **kwargs: Any) -> nn.Module:  # `type(model)(config)` is another, plain model
        return base(*args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        made: Any = base.__reduce_ex__(self, 0)  # later ones insist on the object's own class
        return made[0], tuple(base if arg is placed else arg for arg in made[1]), *made[2:]

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__new__": new,
        "__reduce_ex__": reduce,
        "device": property(lambda self: device),
        # a number for a GPU, as accelerate has it; "cpu" would mean offloaded, and an equal torch.device does not
        "hf_device_map": {"": device if device.index is None else device.index},
        "_hf_hook": Placement(device),
    }
    placed = type(base.__name__, (base,), members)
    return placed
