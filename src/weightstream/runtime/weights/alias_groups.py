"""The weights of a model as movable bytes: alias groups, the tensor objects that view them, units of modules.

A parameter may be a wrapper subclass around plain tensors, such as a DTensor. The plain tensors are the members of
alias groups, and the wrappers around each are its *shells* (runtime/tensors/leaves.py). A shell is *blind* if neither
its class nor that of the tensor inside sees a call of torch on the shell, as with DTensor. Knows `nn.Module`, and no
devices, plans or architectures.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Manifest, TensorSpec, UnitSpec
from weightstream.runtime.tensors import guarded
from weightstream.runtime.tensors.guarded import Access
from weightstream.runtime.tensors.leaves import Leaf, Role, Shell, leaves, leaves_of, storage_of
from weightstream.runtime.tensors.thread_state import unseen
from weightstream.runtime.weights.picks import Picks


@dataclass(kw_only=True, slots=True)
class Member:
    """One tensor object of the model, by itself or inside of a wrapper, and its place in its alias group."""

    tensor: torch.Tensor
    names: list[str]
    begin: int  # in its storage, in bytes
    spec: TensorSpec = field(init=False)  # set once its group is known
    kind: type[torch.Tensor]
    stride: tuple[int, ...]  # the spec's, until data of another layout is assigned
    role: Role
    shells: tuple[Shell, ...]
    touched: bool = False  # since the last step, it may have been assigned other data, or written to through a view
    lent: bool = False  # its memory was handed out: writes to it cannot be noticed any more
    written: bool | None = None  # its module's forward writes to it without raising the version; None: not known yet
    blind: tuple[Shell, ...] = field(init=False)  # its blind shells; a write through one raises that shell's version

    def __post_init__(self) -> None:
        self.blind = tuple(shell for shell in self.shells if shell.is_blind)

    @property
    def end(self) -> int:
        """The byte after its last one in its storage."""
        return self.begin + span(self.tensor.shape, self.tensor.stride()) * self.tensor.element_size()

    @property
    def requires_grad(self) -> bool:
        """Whether autograd computes a gradient of it, or of the wrapper that it is in."""
        return self.tensor.requires_grad or any(shell.tensor.requires_grad for shell in self.shells)

    @property
    def version(self) -> int:
        """Grows with every update in place that torch sees."""
        own = self.tensor._version
        return own + sum(shell.tensor._version for shell in self.blind) if self.blind else own

    def view(self, base: torch.Tensor, offset: int) -> torch.Tensor:
        """This tensor over other bytes: `base` is flat uint8, `offset` where the alias group starts in it."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        start = offset + self.spec.offset
        flat = base[start : start + span(self.spec.shape, self.stride) * dtype.itemsize]
        return flat.view(dtype).as_strided(self.spec.shape, self.stride)

    def guard(self, on_access: Callable[[Access], None]) -> None:
        """Call `on_access` from now on before any call that needs the tensor's memory."""
        guarded.guard(self.tensor, self.kind, on_access)
        for shell in self.blind:
            guarded.guard(shell.tensor, shell.kind, on_access)

    def unguard(self) -> None:
        """Make the tensor plain again."""
        guarded.unguard(self.tensor, self.kind)
        for shell in self.blind:
            guarded.unguard(shell.tensor, shell.kind)

    @unseen
    def shown(self) -> torch.Tensor:
        """A view of the bytes that the tensor shows."""
        found: torch.Tensor = torch.Tensor.data.__get__(self.tensor)  # type: ignore[attr-defined]
        return found

    @unseen
    def show(self, view: torch.Tensor) -> None:
        """Make the tensor a view of these bytes; its version does not change."""
        torch.Tensor.data.__set__(self.tensor, view)  # type: ignore[attr-defined]
        for shell in self.shells:
            shell.follow()


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
    """Which tensors of a module belong to its unit."""

    TREE = "tree"  # all in its subtree
    OWN = "own"  # its direct ones: the children are units themselves


@dataclass(kw_only=True, slots=True)
class UnitModule:
    """A unit's module: it opens and closes with the module's forward, and with those of `also`.

    `also` are modules with the very same parameters, such as a head that is tied to an embedding. `enclosing` says that
    other units run inside its forward; `layer` is the index of the repeated block that it is, or is a part of.
    """

    name: str
    module: nn.Module
    scope: Scope = Scope.TREE
    enclosing: bool = False
    layer: int | None = None
    also: tuple[nn.Module, ...] = ()
    picks: Picks | None = None

    def leaves(self) -> Iterator[Leaf]:
        """The tensor objects of the unit in module order, shared ones included."""
        for module in self.module.modules() if self.scope is Scope.TREE else (self.module,):
            yield from leaves(module)


def merge_tied(units: Iterable[UnitModule], by_alias: dict[str, Group]) -> list[UnitModule]:
    """Merge units with the very same parameters, such as a tied embedding and head: their bytes then have one place.

    The unit with more alias groups opens for the forwards of all. Units of which each has buffers that the other one
    lacks stay apart.
    """
    member_of = _members(by_alias)
    merged: dict[object, tuple[UnitModule, set[str]]] = {}
    for unit in units:
        members = _held(unit, member_of)
        aliases = {member.spec.alias for member in members}
        key: object = frozenset(m.spec.alias for m in members if m.role is Role.PARAMETER) or id(unit)
        first, first_aliases = merged.get(key, (unit, aliases))
        if not (aliases <= first_aliases or aliases >= first_aliases):
            key, first, first_aliases = id(unit), unit, aliases
        large, small = (first, unit) if aliases <= first_aliases else (unit, first)
        if small is not large:
            also, enclosing = (*large.also, small.module, *small.also), large.enclosing or small.enclosing
            large = replace(large, also=also, enclosing=enclosing)
        merged[key] = large, aliases | first_aliases
    return [unit for unit, _ in merged.values()]


def shared_between(models: Mapping[str, nn.Module]) -> dict[str, dict[int, str]]:
    """For each model, the tensors that it shares with others of these models: id -> name of the model that offloads it.

    That is the largest of the models that have the tensor.
    """
    holders: dict[int, dict[str, None]] = {}
    for name, model in models.items():
        for leaf in leaves_of(model):
            holders.setdefault(id(leaf.tensor), {})[name] = None
    found: dict[str, dict[int, str]] = {}
    shared = {tensor: names for tensor, names in holders.items() if len(names) > 1}
    among = {name for names in shared.values() for name in names}
    nbytes = {name: sum(leaf.tensor.nbytes for leaf in leaves_of(models[name])) for name in among}
    for tensor, names in shared.items():
        for name in names:
            found.setdefault(name, {})[tensor] = max(names, key=nbytes.__getitem__)
    return found


def empty_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The tensors without bytes: they do not stream, but must be on the device of the model."""
    return [leaf.tensor for leaf in leaves_of(model) if not leaf.tensor.numel()]


def refuse_unsupported(model: nn.Module) -> None:
    """Raise `UnsupportedError`, with the name, for a tensor without one shape, a lazy or a strided nested one, and for
    TorchScript."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(f"{name or 'the model'} is TorchScript: offload the model that it was made from")
    for path, tensor, *_ in leaves_of(model):
        if is_lazy(tensor):
            raise UnsupportedError(f"{path} has no shape yet: call the model once before it is offloaded")
        if tensor.is_nested and tensor.layout is torch.strided:
            raise UnsupportedError(f"{path} is a nested tensor of layout torch.strided: make it one of torch.jagged")


def leave_inference(model: nn.Module) -> None:
    """Turn tensors that were made in inference mode into normal ones: same objects and bytes, with a version."""
    for _, tensor, _, _ in list(leaves_of(model)):
        if tensor.is_inference():
            normal = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            normal.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            if type(tensor) is not torch.Tensor:
                normal = torch.Tensor._make_subclass(type(tensor), normal, tensor.requires_grad)
            normal.__dict__.update(tensor.__dict__)
            torch.utils.swap_tensors(tensor, normal)


def groups(model: nn.Module, *, allow_meta: bool = False, without: Collection[int] = frozenset()) -> dict[str, Group]:
    """Every alias group of a model by name, except tensors without bytes, and tensors whose ids are in `without`.

    Attributes on another device than all parameters and buffers are left out, as they are there on purpose. Raises
    `UnsupportedError`, with name and class, for a tensor that cannot be moved as plain bytes, and for one on meta
    unless `allow_meta`.
    """
    # attributes last: one that refers to a parameter is then only another name of it
    found = sorted(leaves_of(model), key=lambda leaf: leaf.role is Role.ATTRIBUTE)
    devices = {leaf.tensor.device for leaf in found if leaf.role is not Role.ATTRIBUTE}
    shells = {id(shell): Shell(shell) for leaf in found for shell in leaf.shells}
    members: dict[int, Member] = {}
    by_storage: dict[tuple[object, ...], list[Member]] = {}
    for path, tensor, around, role in found:
        if id(tensor) in without:
            continue
        if role is Role.ATTRIBUTE and (tensor.is_meta or (devices and tensor.device not in devices)):
            continue
        _check_supported(path, tensor, allow_meta)
        if id(tensor) in members:
            members[id(tensor)].names.append(path)
        elif tensor.numel():
            members[id(tensor)] = member = Member(
                tensor=tensor,
                names=[path],
                begin=int(tensor.storage_offset()) * tensor.element_size(),
                kind=type(tensor),
                stride=tensor.stride(),
                role=role,
                shells=tuple(shells[id(shell)] for shell in around),
            )
            storage = tensor.untyped_storage()
            key = (tensor.device, storage._cdata if tensor.is_meta else storage.data_ptr())
            by_storage.setdefault(key, []).append(member)
    made = [_group(run) for of_storage in by_storage.values() for run in _overlapping(of_storage)]
    position = {member.names[0]: index for index, member in enumerate(members.values())}
    return {group.alias: group for group in sorted(made, key=lambda group: position[group.alias])}


def _overlapping(members: list[Member]) -> Iterator[list[Member]]:
    """The members of one storage, in runs whose bytes overlap."""
    run: list[Member] = []
    for member in sorted(members, key=lambda member: (member.begin, member.end)):
        if run and member.begin >= max(other.end for other in run):
            yield run
            run = []
        run.append(member)
    yield run


def _group(members: list[Member]) -> Group:
    """The alias group of members that overlap, in the order of their bytes."""
    first, begin = members[0].tensor, members[0].begin
    nbytes = max(member.end for member in members) - begin
    home = torch.empty(nbytes if first.is_meta else 0, dtype=torch.uint8, device=first.device)
    if not first.is_meta:
        home.set_(first.untyped_storage(), begin, (nbytes,), (1,))
    for member in members:
        tensor, name = member.tensor, member.names[0]
        if (member.begin - begin) % tensor.element_size():
            raise UnsupportedError(f"{name} views a shared storage at an odd byte: offload cannot move it")
        member.spec = TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            alias=members[0].names[0],
            nbytes=nbytes,
            offset=member.begin - begin,
        )
    return Group(alias=members[0].names[0], home=home, members=members)


def held_elsewhere(by_alias: dict[str, Group]) -> list[str]:
    """Names of tensors whose memory is also shown by a tensor outside of the model.

    This finds arrays made by `tensor.numpy()`, which hold such a tensor. It does not find arrays that a tensor was made
    from, as by `torch.from_numpy`, and does not count owners without a Python object, such as views in autograd graphs.
    """
    handles = {alias: group.home.untyped_storage() for alias, group in by_alias.items()}
    showing = Counter({handle._cdata: 1 for handle in handles.values()})  # a handle is an owner too
    bases: dict[int, torch.Tensor] = {}  # tensors that members are views of, and so keep alive
    for alias, group in by_alias.items():
        bases |= {id(m.tensor._base): m.tensor._base for m in group.members if m.tensor._base is not None}
        showing[handles[alias]._cdata] += 1 + len(group.members)
    members = {id(member.tensor) for group in by_alias.values() for member in group.members}
    showing.update(base.untyped_storage()._cdata for key, base in bases.items() if key not in members)
    suspects = {storage for storage, num in showing.items() if torch._C._storage_Use_Count(storage) > num}
    if not suspects:
        return []  # before the walk over all objects, which takes up to a second
    gc.collect()  # tensors that unreachable cycles hold do not count
    own = members | bases.keys() | {id(group.home) for group in by_alias.values()}
    tensors = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and id(o) not in own)
    suspects &= {_memory_of(tensor) for tensor in tensors}
    return [m.names[0] for alias, group in by_alias.items() if handles[alias]._cdata in suspects for m in group.members]


def _memory_of(tensor: torch.Tensor) -> int | None:
    """A number that identifies a storage. Not its address: storages of fake tensors have none, and warn."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def manifest(units: Iterable[UnitModule], by_alias: dict[str, Group]) -> Manifest:
    """The manifest of these units, in this order."""
    member_of = _members(by_alias)
    found: list[UnitSpec] = []
    for unit in units:
        specs = tuple({id(member): member.spec for member in _held(unit, member_of)}.values())
        found.append(
            UnitSpec(
                name=unit.name,
                tensors=specs,
                enclosing=unit.enclosing,
                layer=unit.layer,
                stacks=_stacks(unit, member_of),
                in_waves=unit.picks is not None and bool(unit.picks.streams),
                ids_per_token=0 if unit.picks is None else unit.picks.ids_per_token,
            )
        )
    return Manifest(units=tuple(found), order=tuple(range(len(found))))


def _stacks(unit: UnitModule, member_of: dict[int, Member]) -> frozenset[str]:
    """The alias groups of which the unit's forward reads single rows."""
    stacks = () if unit.picks is None else unit.picks.stacks
    return frozenset(member_of[id(stack)].spec.alias for stack in stacks if id(stack) in member_of)


def _members(by_alias: dict[str, Group]) -> dict[int, Member]:
    return {id(member.tensor): member for group in by_alias.values() for member in group.members}


def _held(unit: UnitModule, member_of: dict[int, Member]) -> list[Member]:
    """The members that a unit holds. An attribute that refers to a parameter or buffer does not count as holding it."""
    found: dict[int, Member] = {}
    for leaf in unit.leaves():
        member = member_of.get(id(leaf.tensor))
        if member is not None and (leaf.role is not Role.ATTRIBUTE or member.role is Role.ATTRIBUTE):
            found.setdefault(id(member), member)
    return list(found.values())


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements from the first to the last in storage, with the gaps of a strided view."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _check_supported(name: str, tensor: torch.Tensor, allow_meta: bool) -> None:
    if tensor.is_meta and not allow_meta:
        raise UnsupportedError(f"{name} is on the meta device: load the weights first, or use from_pretrained")
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(f"{name} is a conjugated or negated view: call resolve_conj().resolve_neg() on it first")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise UnsupportedError(f"{name} is {what}: only dense strided tensors can be streamed")
    storage = storage_of(tensor)
    if storage is None or (tensor.numel() and not tensor.is_meta and storage.data_ptr() == 0):
        kind = type(tensor)
        raise UnsupportedError(
            f"{name} is a {kind.__module__}.{kind.__name__}, which has no memory of its own and does not name the "
            "tensors inside (__tensor_flatten__): it is not supported"
        )
