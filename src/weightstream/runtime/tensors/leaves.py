"""The leaves of a module: the plain tensors that its parameters, buffers and attributes consist of, by path.

A parameter may be a wrapper subclass around other tensors (`__tensor_flatten__`: torchao, DTensor), or have more
tensors in its attributes, such as bitsandbytes' `quant_state`. Modules may keep tensors in attributes of their own.
Only the plain strided tensors at the end of all these paths can be moved as bytes.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightstream.errors import UnsupportedError

_SKIPPED = frozenset(nn.Module().__dict__)  # attributes of every module: parameters, buffers and children among them
_OURS = ("weightstream", "_weightstream")  # begins of the names of attributes that the package sets
_FACTS = (NoneType, bool, int, float, str, torch.dtype, torch.device)
_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]  # a class may report another
_DEPTH = 2  # of lists, dicts and holders inside of an attribute: `weight.quant_state.state2.absmax`


class Role(Enum):
    """How a module holds the tensor that a leaf belongs to."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"  # like any other value: `.to()` skips it, and a forward may replace it


class Leaf(NamedTuple):
    """A plain tensor, and the wrapper subclasses around it, the innermost first."""

    path: str
    tensor: torch.Tensor
    shells: tuple[torch.Tensor, ...]
    role: Role


@dataclass(eq=False, slots=True)
class Shell:
    """A wrapper subclass, of class `kind`. It reports a device of its own, which follows the leaves when they move.

    `is_blind`: its class sees no call of torch, and passes the one tensor inside to kernels without a call that the
    inner tensor's class would see, as DTensor does.
    """

    tensor: torch.Tensor
    kind: type[torch.Tensor] = field(init=False)
    is_blind: bool = field(init=False)
    # names of the tensors inside, kept as listing them takes as long as showing one
    _names: tuple[str, ...] = field(init=False)
    # devices of the tensors inside -> a wrapper that reports the device for these
    _on: dict[tuple[torch.device, ...], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kind = type(self.tensor)
        self._names = tuple(name for name, _ in _inside(self.tensor))
        sees_none = self.kind.__torch_function__ == torch._C._disabled_torch_function_impl
        self.is_blind = sees_none and len(self._names) == 1

    def follow(self) -> None:
        """Report the device that the class would report for the tensors inside, which have moved."""
        devices = tuple([getattr(self.tensor, name).device for name in self._names])
        if devices not in self._on:
            self._on[devices] = self._like_this(devices[0])
        if self._on[devices].device != self.tensor.device:
            torch.Tensor.data.__set__(self.tensor, self._on[devices])  # type: ignore[attr-defined]

    def _like_this(self, device: torch.device) -> Any:
        try:
            return rewrapped(self.tensor, self.kind)
        except Exception:  # the class packs for another device, or takes no tensors on several devices
            made = {"strides": self.tensor.stride(), "dtype": _DTYPE(self.tensor), "device": device}
            return torch.Tensor._make_wrapper_subclass(self.kind, self.tensor.size(), **made)


def rewrapped(shell: Any, kind: Any, **others: torch.Tensor) -> Any:
    """A new wrapper of this class like `shell`, around the same tensors; `others` replace some of them, by name."""
    names, context = shell.__tensor_flatten__()
    inside = {name: getattr(shell, name) for name in names} | others
    return kind.__tensor_unflatten__(inside, context, shell.size(), shell.stride())


def moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor, copied to a device. A wrapper is copied as bytes, so that its weights are not packed again for it."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach().to(device)
    inside = {name: moved_to(inner, device) for name, inner in _inside(tensor)}
    return rewrapped(tensor, type(tensor), **inside)


def leaves(module: nn.Module, name: str = "") -> Iterator[Leaf]:
    """The plain tensors that a module holds itself; those of parameters first. Paths begin with `name`.

    Raises `UnsupportedError` for a value that hides its tensors, with its path.
    """
    prefix = f"{name}." if name else ""
    for role, named in ((Role.PARAMETER, module._parameters), (Role.BUFFER, module._buffers)):
        for key, tensor in named.items():
            if tensor is not None:
                yield from behind(prefix + key, tensor, role)
    computed = computed_by_hooks(module) if module._forward_pre_hooks else ()
    for key, value in tuple(module.__dict__.items()):
        if key not in _SKIPPED and type(value) not in _FACTS and not key.startswith(_OURS) and key not in computed:
            yield from _held(prefix + key, value, Role.ATTRIBUTE, _DEPTH)


def computed_by_hooks(module: nn.Module) -> frozenset[str]:
    """The attributes with tensors that forward pre-hooks of a module compute before each call: attributes that these
    hooks store, or set by a name that they hold, as those of weight_norm, spectral_norm and pruning do."""
    stored: set[str] = set()
    for hook in module._forward_pre_hooks.values():
        stored |= _stored_by(hook)
    return frozenset(name for name in stored if isinstance(module.__dict__.get(name), torch.Tensor))


def _stored_by(hook: Any) -> set[str]:
    """Names of attributes that a function, or an object that is called, may set."""
    named: list[object] = []
    while isinstance(hook, partial):
        named += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    if isinstance(hook, MethodType):
        named += vars(hook.__self__).values() if hasattr(hook.__self__, "__dict__") else ()
        hook = hook.__func__
    elif not isinstance(hook, FunctionType):
        named += vars(hook).values() if hasattr(hook, "__dict__") else ()
        hook = type(hook).__call__
    found = set[str]()
    if isinstance(hook, FunctionType):
        found = {step.argval for step in dis.get_instructions(hook) if step.opname == "STORE_ATTR"}
        if "setattr" in hook.__code__.co_names:
            named += [*hook.__code__.co_consts, *(cell.cell_contents for cell in hook.__closure__ or ())]
            named += hook.__defaults__ or ()
            return found.union(name for name in named if isinstance(name, str))
    return found


def leaves_of(model: nn.Module) -> Iterator[Leaf]:
    """The leaves of a module and all below it, shared modules under each of their names."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield from leaves(module, name)


def plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """These tensors, with each wrapper replaced by the plain tensors inside of it."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from plain_tensors(inner for _, inner in _inside(tensor))
        else:
            yield tensor


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; wrappers and sparse tensors have none of their own."""
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    return storage


def _inside(shell: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors directly inside of a wrapper; DTensor lists its mesh besides."""
    found = ((name, getattr(shell, name)) for name in shell.__tensor_flatten__()[0])
    return ((name, inner) for name, inner in found if isinstance(inner, torch.Tensor))


def behind(path: str, tensor: torch.Tensor, role: Role, shells: tuple[torch.Tensor, ...] = ()) -> Iterator[Leaf]:
    """The leaves of one tensor: the tensor itself, or those inside of it, and those that its attributes hold."""
    if type(tensor) not in (nn.Parameter, torch.Tensor) and is_traceable_wrapper_subclass(tensor):
        for name, inner in _inside(tensor):
            if inner is not getattr(tensor, name):
                raise UnsupportedError(f"{path}.{name} is another tensor at each access: it cannot be moved")
            yield from behind(f"{path}.{name}", inner, role, (tensor, *shells))
        return  # other attributes describe it: `__tensor_flatten__` lists all tensors
    yield Leaf(path, tensor, shells, role)
    for name, value in tuple(tensor.__dict__.items()):
        if type(value) not in _FACTS and not name.startswith(_OURS):
            yield from _held(f"{path}.{name}", value, role, _DEPTH)


def _held(path: str, value: object, role: Role, depth: int) -> Iterator[Leaf]:
    """The leaves of any value that an attribute may have."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, torch.Tensor):
        yield from behind(path, value, role)
    elif isinstance(value, torch.ScriptObject):
        raise UnsupportedError(f"{path} is a {value._type()}: what it packs cannot be moved")
    elif depth and isinstance(value, dict):
        items = tuple(value.items())
    elif depth and isinstance(value, list | tuple):
        items = enumerate(value)
    elif depth and _is_holder(value):
        items = tuple(vars(value).items())
    for key, item in items:
        if type(item) not in _FACTS:
            yield from _held(f"{path}.{key}", item, role, depth - 1)


def _is_holder(value: object) -> bool:
    """Whether a value may be a plain holder of tensors: no module, function or class, and no object of torch itself."""
    if callable(value) or isinstance(value, ModuleType) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] != "torch"
