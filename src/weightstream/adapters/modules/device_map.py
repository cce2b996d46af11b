"""The attributes that tools made for accelerate look for on an offloaded model: `device`, `hf_device_map`, `_hf_hook`.

All three name the device where the model computes, not where its weights are. Tools read them to send inputs there, and
to see that the model must not be moved. A "cpu" or "disk" in the map would mean more to them: that weights are on the
meta device and that accelerate's hooks hold the true ones. Saving, adapters and generation would then do what is wrong
here.

The attributes are in a class made for the instance, as a copy or a pickle of the model must not have them. This module
knows no weights.

[Note: patches of the class]
Code that patches a class for a while sets a member of `type(model)`, and at the end restores or deletes it. It means
the class of all such models. So members that are set on or deleted from the class of one instance are passed on to the
base class. The class of the instance has no such member of its own before the patch, so code that looks there deletes
the member at the end, instead of setting the earlier value. This module then sets the earlier value in the base class.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightstream.errors import OffloadError
from weightstream.runtime.tensors.undo import Undo

logger = logging.getLogger("weightstream")

_BASE = "_weightstream_base"
_NESTED = 16  # changes of one member whose earlier values are kept, [Note: patches of the class]
_KEPT = frozenset(("__new__", "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", _BASE))


class Placement:
    """Takes the place of accelerate's hook: without one, `generate` adds its own to the encoder of a model."""

    io_same_device = False  # read by tools; inputs and outputs of an encoder are on the device anyway

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device

    def detach_hook(self, module: nn.Module) -> nn.Module:
        raise OffloadError(
            f"{type(module).__name__} is offloaded by weightstream; accelerate has no hook on it to remove: "
            "call model.weightstream.remove(). A pipeline is offloaded as a whole: weightstream.offload_pipeline(pipe)"
        )


Recast = Callable[[Callable[[], object]], None]  # runs a function that casts a model, while the model does not stream


def attach_device_map(
    model: nn.Module,
    device: torch.device,
    recast: Recast | None = None,
    devices: Mapping[str, torch.device] | None = None,
) -> Callable[[], None]:
    """Set the attributes on every transformers or diffusers model in `model`; returns a function that removes them.

    `recast` runs a cast of `model` itself; without it casts are refused. `devices` are those of its modules, by name,
    where it computes on several.
    """
    undo = Undo()
    for module in model.modules():
        if _is_pretrained(module):
            members = _members(type(module), device, recast if module is model else None)
            if devices is not None and module is model:
                members["hf_device_map"] = {name: _device_map_entry(where) for name, where in devices.items()}
            undo.add(subclass_instance(module, members))
    return undo


def subclass_instance(owner: Any, members: Mapping[str, Any]) -> Callable[[], None]:
    """Give an instance a class of its own with these members; returns a function that undoes it.

    If another class was assigned to the instance in between, it stays. It may be derived from ours, so ours then loses
    its members.
    """
    kind = type(owner)
    owner.__class__ = placed = derived(kind, members)

    def undo() -> None:
        if type(owner) is placed:
            owner.__class__ = kind
        placed.leave()

    return undo


def is_there(module: Any, device: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether arguments of `to()` name the device where a model computes, and no dtype other than its own."""
    values = _targets(args, kwargs)
    for value in values:
        if isinstance(value, torch.dtype):
            if value != module.dtype:
                return False
        elif isinstance(value, str | int | torch.device):
            wanted = torch.device(value)
            if wanted.type != device.type or wanted.index not in (None, device.index):
                return False
        else:
            return False
    return bool(values)


def _targets(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of `to()` that name a device or a dtype, whether positional or by keyword."""
    return [value for value in (*args, *kwargs.values()) if value is not None and not isinstance(value, bool)]


def _is_pretrained(module: nn.Module) -> bool:
    return hasattr(module, "save_pretrained") and isinstance(getattr(type(module), "device", None), property)


def _dtype_in(device: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that arguments of `to()` name, where the device that they name, if any, is that of the model."""
    values = _targets(args, kwargs)
    dtypes = [value for value in values if isinstance(value, torch.dtype)]
    others = [value for value in values if not isinstance(value, torch.dtype)]
    return dtypes[0] if dtypes and (not others or is_there(None, device, others, {})) else None


def _members(base: Any, device: torch.device, recast: Recast | None) -> dict[str, Any]:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_there(self, device, args, kwargs):
            logger.debug("%s computes on %s already: to() changes nothing", base.__name__, device)
            return self
        dtype = _dtype_in(device, args, kwargs)
        if recast is None or dtype is None:
            return base.to(self, *args, **kwargs)
        recast(lambda: base.to(self, dtype))
        return self

    def cuda(self: Any, index: int | None = None) -> Any:
        return to(self, "cuda" if index is None else f"cuda:{index}")

    def casting(dtype: torch.dtype) -> Callable[[Any], Any]:
        return lambda self: to(self, dtype)

    def compile_repeated_blocks(self: Any, *args: Any, **kwargs: Any) -> None:
        if args or not hasattr(self, "weightstream"):
            base.compile_repeated_blocks(self, *args, **kwargs)
        else:
            self.weightstream.compile("blocks", **kwargs)

    def delete(self: Any, name: str) -> None:
        if name == "hf_device_map":  # as compressed-tensors and llm-compressor do, before they move weights
            raise OffloadError(
                f"{base.__name__} is offloaded by weightstream, so other libraries cannot take over its weights: call "
                "model.weightstream.remove() first"
            )
        base.__delattr__(self, name)

    return {
        **({"compile_repeated_blocks": compile_repeated_blocks} if hasattr(base, "compile_repeated_blocks") else {}),
        "to": to,
        "cuda": cuda,
        "float": casting(torch.float32),
        "half": casting(torch.float16),
        "bfloat16": casting(torch.bfloat16),
        "device": property(lambda self: device),
        "hf_device_map": {"": _device_map_entry(device)},
        "_hf_hook": Placement(device),
        "__delattr__": delete,
    }


def _device_map_entry(device: torch.device) -> torch.device | int:
    """The index of a GPU, as in accelerate's maps; else the torch.device, as the string "cpu" would mean offloaded."""
    return device if device.index is None else device.index


def derived(base: Any, members: Mapping[str, Any]) -> Any:
    """A class for one instance of `base`, with these members. Copies and pickles of the instance are of `base`."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:  # `type(model)(config)` makes another, plain model
        if cls is placed:
            return base(*args, **kwargs)
        return base.__new__(cls) if base.__new__ is object.__new__ else base.__new__(cls, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # protocol 0, as later ones insist on the object's own class
        function, arguments, *state = base.__reduce_ex__(self, 0)
        return function, tuple(base if arg is placed else arg for arg in arguments), *state

    of_class = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__new__": new,
        "__reduce_ex__": reduce,
        _BASE: base,
    }
    placed = _meta_of(base)(base.__name__, (base,), {**of_class, **members})
    return placed


def _meta_of(base: Any) -> Any:
    """The metaclass of the class for one instance of `base`, which passes changes of members on to `base`,
    [Note: patches of the class]."""
    before: dict[str, deque[Any]] = {}  # the earlier values in `base` of members that were set here
    absent = object()

    def is_placed(cls: Any) -> bool:
        return _BASE in vars(cls)

    def set_member(cls: Any, name: str, value: Any) -> None:
        if not is_placed(cls) or (name.startswith("__") and name.endswith("__")):
            type.__setattr__(cls, name, value)
            return
        before.setdefault(name, deque(maxlen=_NESTED)).append(vars(base).get(name, absent))
        setattr(base, name, value)

    def delete_member(cls: Any, name: str) -> None:
        if not is_placed(cls) or not before.get(name):
            type.__delattr__(cls, name)
            return
        value = before[name].pop()
        if value is absent:
            delattr(base, name)
        else:
            setattr(base, name, value)

    def leave(cls: Any) -> None:
        """Delete all members, so that instances of derived classes behave like those of `base` again."""
        for name in [name for name in vars(cls) if name not in _KEPT]:
            type.__delattr__(cls, name)

    members = {
        # diffusers' `from_pipe` takes over a component whose type equals one of those that it expects
        "__eq__": lambda cls, other: other is cls or (is_placed(cls) and other is base),
        "__hash__": lambda cls: hash(base) if is_placed(cls) else type.__hash__(cls),
        "__setattr__": set_member,
        "__delattr__": delete_member,
        "leave": leave,
    }
    return type("Placed", (type(base),), members)


def plain(kind: type) -> Any:
    """The class that `kind` was derived from by `derived`, or `kind` itself."""
    return vars(kind).get(_BASE, kind)
