"""What tools that know accelerate find on an offloaded model: `device`, `hf_device_map`, `_hf_hook`. Knows no weights.

All three say where the model computes, not where weights live. Tools ask to learn where inputs go and that the model is
not to be moved. A "cpu" or "disk" in the map tells them more: that weights are on the meta device and that accelerate's
hooks hold the true ones, so that saving, adapters and generation would go ways that are wrong here.

They live in a class made for the instance, as a copy or a pickle of the model must not have them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightstream.errors import OffloadError

logger = logging.getLogger("weightstream")


class Placement:
    """Stands where accelerate keeps its hook. Without one, `generate` adds its own to the encoder of a model."""

    io_same_device = False  # asked for by tools: inputs and outputs of an encoder are on the device as it is

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device

    def detach_hook(self, module: nn.Module) -> nn.Module:
        raise OffloadError(
            f"{type(module).__name__} is offloaded by weightstream; accelerate has no hook on it to remove: "
            "call model.weightstream.remove(). A pipeline is offloaded as a whole: weightstream.offload_pipeline(pipe)"
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


def is_there(module: Any, device: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether arguments of `to()` name where a model computes, and the dtype that it has, if any."""
    given = [value for value in (*args, *kwargs.values()) if value is not None and not isinstance(value, bool)]
    for value in given:
        if isinstance(value, torch.dtype):
            if value != module.dtype:
                return False
        elif isinstance(value, str | int | torch.device):
            wanted = torch.device(value)
            if wanted.type != device.type or wanted.index not in (None, device.index):
                return False
        else:
            return False
    return bool(given)


def _is_pretrained(module: nn.Module) -> bool:
    return hasattr(module, "save_pretrained") and isinstance(getattr(type(module), "device", None), property)


def _placed(base: type[nn.Module], device: torch.device) -> type[nn.Module]:
    def new(cls: type, *args: Any, **kwargs: Any) -> nn.Module:  # `type(model)(config)` is another, plain model
        return base(*args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        made: Any = base.__reduce_ex__(self, 0)  # later ones insist on the object's own class
        return made[0], tuple(base if arg is placed else arg for arg in made[1]), *made[2:]

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_there(self, device, args, kwargs):
            logger.debug("%s computes on %s already: to() changes nothing", base.__name__, device)
            return self
        return base.to(self, *args, **kwargs)

    def cuda(self: Any, index: int | None = None) -> Any:
        return to(self, "cuda" if index is None else f"cuda:{index}")

    members = {
        "to": to,
        "cuda": cuda,
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
    # diffusers' `from_pipe` takes over a component whose type is among those that it expects: equal is enough
    equal = {"__eq__": lambda cls, other: other is cls or other is base, "__hash__": lambda cls: hash(base)}
    kind: Any = type("Placed", (type(base),), equal)
    placed: type[nn.Module] = kind(base.__name__, (base,), members)
    return placed
