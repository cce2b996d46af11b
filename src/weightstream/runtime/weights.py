"""The weights of a model as movable bytes: alias groups, the tensor objects that view them, units of modules.

Knows `nn.Module` and nothing of devices, plans or architectures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import nn

from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Manifest, TensorSpec, UnitSpec


@dataclass(kw_only=True, slots=True)
class Member:
    """One tensor object of the model (a Parameter or a buffer) and its place in its alias group."""

    tensor: torch.Tensor
    names: list[str]
    spec: TensorSpec
    kind: type[torch.Tensor]
    stride: tuple[int, ...]  # the spec's, until somebody assigns data of another layout

    def view(self, base: torch.Tensor, offset: int) -> torch.Tensor:
        """This tensor over other bytes: `base` is flat uint8, `offset` where the alias group starts in it."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        start = offset + self.spec.offset
        flat = base[start : start + span(self.spec.shape, self.stride) * dtype.itemsize]
        return flat.view(dtype).as_strided(self.spec.shape, self.stride)


@dataclass(kw_only=True, slots=True)
class Group:
    """An alias group: bytes of one storage and every tensor object that views them."""

    alias: str
    home: torch.Tensor
    members: list[Member] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.home.numel()


class Scope(Enum):
    """Which tensors of a module a unit takes."""

    TREE = "tree"  # all in its subtree
    OWN = "own"  # its direct ones: the children are units themselves
    NONE = "none"  # none but the adopted


@dataclass(kw_only=True, slots=True)
class UnitModule:
    """A unit's module: it opens and closes with the module's forward, and with those of `also`.

    `also` are modules with the very same parameters, such as a head that is tied to an embedding. `adopted` names alias
    groups that this module reads though they belong to another; `enclosing` says that other units run inside its
    forward; `layer` is the index of the repeated block that it is, or is a part of.
    """

    name: str
    module: nn.Module
    scope: Scope = Scope.TREE
    adopted: frozenset[str] = frozenset()
    enclosing: bool = False
    layer: int | None = None
    also: tuple[nn.Module, ...] = ()

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensor objects of the unit in module order, shared ones included."""
        if self.scope is Scope.NONE:
            return
        for module in self.module.modules() if self.scope is Scope.TREE else (self.module,):
            for _, tensor in own_tensors(module):
                yield tensor


def merge_tied(units: Iterable[UnitModule], by_alias: dict[str, Group]) -> list[UnitModule]:
    """One unit for modules with the very same parameters: these then have one place on the device."""
    alias_of = {id(m.tensor): alias for alias, group in by_alias.items() for m in group.members}
    merged: dict[object, tuple[UnitModule, set[str]]] = {}
    for unit in units:
        held = {alias_of[id(t)] for t in unit.tensors() if id(t) in alias_of}
        parameters = (t for t in unit.tensors() if isinstance(t, nn.Parameter) and id(t) in alias_of)
        key: object = frozenset(alias_of[id(t)] for t in parameters) or id(unit)
        first, theirs = merged.get(key, (unit, held))
        if not (held <= theirs or held >= theirs):  # buffers of their own
            key, first, theirs = id(unit), unit, held
        large, small = (first, unit) if held <= theirs else (unit, first)
        if small is not large:
            also, enclosing = (*large.also, small.module, *small.also), large.enclosing or small.enclosing
            large = replace(large, also=also, enclosing=enclosing)
        merged[key] = large, held | theirs
    return [unit for unit, _ in merged.values()]


def empty_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The tensors without bytes: nothing to stream, but they must be where the model computes."""
    return [tensor for _, tensor in _named_tensors(model) if not tensor.numel()]


def leave_inference(model: nn.Module) -> None:
    """Make normal tensors of those that were made in inference mode: same objects, same bytes, but versions count."""
    for _, tensor in list(_named_tensors(model)):
        if tensor.is_inference():
            normal = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            normal.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            if isinstance(tensor, nn.Parameter):
                normal = nn.Parameter(normal, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, normal)


def groups(model: nn.Module, *, allow_meta: bool = False) -> dict[str, Group]:
    """Every alias group of a model by name; tensors without bytes have none, tensors on meta on request.

    Raises `UnsupportedError` for a tensor that cannot be moved as plain bytes, with its name and class.
    """
    objects: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in _named_tensors(model):
        _check_supported(name, tensor, allow_meta)
        if tensor.numel():
            objects.setdefault(id(tensor), (tensor, []))[1].append(name)
    by_storage: dict[tuple[object, ...], list[tuple[int, int, torch.Tensor, list[str]]]] = {}
    for tensor, names in objects.values():
        start = int(tensor.storage_offset()) * tensor.element_size()
        storage = tensor.untyped_storage()
        key = (tensor.device, storage._cdata if tensor.is_meta else storage.data_ptr())
        by_storage.setdefault(key, []).append(
            (start, start + span(tensor.shape, tensor.stride()) * tensor.element_size(), tensor, names)
        )
    found: list[Group] = []
    for views in by_storage.values():
        found.extend(_merge(views))
    position = {name: i for i, (_, names) in enumerate(objects.values()) for name in names}
    return {group.alias: group for group in sorted(found, key=lambda g: position[g.alias])}


def _merge(views: list[tuple[int, int, torch.Tensor, list[str]]]) -> Iterator[Group]:
    """Group the views of one storage by overlap of their bytes."""
    runs: list[tuple[int, int, list[tuple[int, torch.Tensor, list[str]]]]] = []
    for start, end, tensor, names in sorted(views, key=lambda view: view[:2]):
        if runs and start < runs[-1][1]:
            begin, until, members = runs[-1]
            runs[-1] = (begin, max(until, end), [*members, (start, tensor, names)])
        else:
            runs.append((start, end, [(start, tensor, names)]))
    for begin, end, members in runs:
        alias = members[0][2][0]
        device = members[0][1].device
        home = torch.empty(end - begin if device.type == "meta" else 0, dtype=torch.uint8, device=device)
        if device.type != "meta":
            home.set_(members[0][1].untyped_storage(), begin, (end - begin,), (1,))
        group = Group(alias=alias, home=home)
        for start, tensor, names in members:
            if (start - begin) % tensor.element_size():
                raise UnsupportedError(f"{names[0]} views a shared storage at an odd byte: offload cannot move it")
            spec = TensorSpec(
                name=names[0],
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                dtype=str(tensor.dtype).removeprefix("torch."),
                alias=alias,
                nbytes=end - begin,
                offset=start - begin,
            )
            group.members.append(
                Member(
                    tensor=tensor,
                    names=names,
                    spec=spec,
                    kind=type(tensor),
                    stride=tensor.stride(),
                )
            )
        yield group


def manifest(units: Iterable[UnitModule], by_alias: dict[str, Group]) -> Manifest:
    """The manifest of these units, in the order given."""
    specs = {id(m.tensor): m.spec for group in by_alias.values() for m in group.members}
    found: list[UnitSpec] = []
    for unit in units:
        taken = {id(t): specs[id(t)] for t in unit.tensors() if id(t) in specs}
        for alias in sorted(unit.adopted):
            taken |= {id(m.tensor): m.spec for m in by_alias[alias].members}
        found.append(
            UnitSpec(name=unit.name, tensors=tuple(taken.values()), enclosing=unit.enclosing, layer=unit.layer)
        )
    return Manifest(units=tuple(found), order=tuple(range(len(found))))


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that a module holds itself."""
    for named in (module._parameters, module._buffers):
        for name, tensor in named.items():
            if tensor is not None:
                yield name, tensor


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in own_tensors(module):
            yield f"{prefix}.{name}".lstrip("."), tensor


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last in storage, gaps of a strided view included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _check_supported(name: str, tensor: torch.Tensor, allow_meta: bool) -> None:
    kind = type(tensor)
    if kind not in (torch.Tensor, nn.Parameter):
        raise UnsupportedError(
            f"{name} is a {kind.__module__}.{kind.__name__}: this kind of tensor is not supported yet"
        )
    if tensor.is_meta and not allow_meta:
        raise UnsupportedError(f"{name} is on the meta device: load the weights first, or use from_pretrained")
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(f"{name} is a conjugated or negated view: call resolve_conj().resolve_neg() on it first")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise UnsupportedError(f"{name} is {what}: only dense strided tensors can be streamed")
