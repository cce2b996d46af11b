"""The modules of an offloaded model: replaces their forwards, and detects changes of their code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, takewhile
from types import FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from weightstream.plan.plan import Plan
from weightstream.runtime.ring.turn import StepTurn
from weightstream.runtime.streamer import custom_ops, distributed, forward_patch
from weightstream.runtime.streamer.forward_patch import InnerForward, Run
from weightstream.runtime.streamer.read_watch import calling_method, reading_module
from weightstream.runtime.tensors.leaves import Leaf, Role, computed_by_hooks, leaves_of
from weightstream.runtime.tensors.undo import Undo
from weightstream.runtime.weights.alias_groups import UnitModule

_NOTHING = object()
_FLAGS = frozenset((bool, str, NoneType))
# classes of attributes whose value may decide which code a forward runs
_DECIDING = _FLAGS | {FunctionType, MethodType, partial}
_LOOKED_AT = frozenset(("forward", "training"))  # these attributes are looked at by themselves


class Attachment:
    """Replaces the forwards of a model and of its units, from `attach` to `detach`."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitModule],
        streamer: custom_ops.Units,
        run_step: Run,
        run_unit: Run,  # the index of the unit comes first
        entries: Sequence[str] = (),
        device: torch.device | None = None,
        inner_forward: InnerForward = forward_patch.outermost,
    ) -> None:
        self.model = model
        self._device = device
        self._inner_forward = inner_forward
        self.entries = set(entries)  # methods besides `forward` that are steps
        self.units = tuple(units)
        self.session = custom_ops.OpSession(streamer)  # by which compiled code finds the streamer
        self._streamer = streamer
        self._run_step = run_step
        self._run_unit = run_unit
        self._undo = Undo()
        self._weights = {id(leaf.tensor): leaf.tensor for leaf in self._leaves()}  # the weights of the plans, by id
        self._adopted: dict[int, torch.Tensor] = {}  # tensors that were added since, by id
        self.adopted_nbytes = 0  # of these, which stay on the device
        self.on_adopted: Callable[[], None] = lambda: None  # called when `adopted_nbytes` changes
        self.has_new = True  # a module may have got a parameter, a buffer or a child
        self._modules = frozenset[int]()  # ids of the modules of the model, as of the last look at them
        self._code: _Code
        self.is_other_code = False  # the code has changed, and no watched step has run with it

    def attach(self, plan: Plan) -> None:
        """Run `run_step` instead of the model's forward, and `run_unit` instead of that of each unit that opens."""
        opened = [index for index in range(len(self.units)) if plan.opens(index)]
        self.session.streams, self.session.traced = bool(opened), False
        for index in opened:
            whole = self.units[index].picks is None  # else its known forward reads single rows
            for module in (self.units[index].module, *self.units[index].also):
                run = _forgetting(module, partial(self._run_unit, index))
                self._undo.add(
                    forward_patch.surround(
                        module, run, self.session, index, opens_early=whole, inner_forward=self._inner_forward
                    )
                )
            if plan.cached & plan.manifest.units[index].aliases().keys():
                self.hide(index)  # compiled code would read whole stacks
        self._undo.add(forward_patch.surround(self.model, self._run_step, self.session))
        for name in self.entries:
            self._enter_by(name)
        self._undo.add(forward_patch.refuse_moves(self.model, self._device, self._stays))
        self._undo.add(distributed.leave_alone(self.model, self._frozen))
        self._undo.add(_notice(self))
        setattr(self.model, forward_patch.ATTRIBUTE, self._streamer)
        self._undo.add(lambda: self.model.__dict__.pop(forward_patch.ATTRIBUTE, None))
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._code = _Code(self.model)

    def _stays(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether `fn` changes no tensor that is on the device. If so, tensors that were added come to the device."""
        if self._device is None:
            return False
        for dtype in {tensor.dtype for tensor in self._weights.values()}:
            probe = torch.empty(1, dtype=dtype, device=self._device)
            at = probe.data_ptr()
            try:
                is_same = fn(probe) is probe and probe.data_ptr() == at  # `share_memory_` returns the same tensor
            except Exception:  # there is no such device: refused with the reason
                is_same = False
            if not is_same:
                return False
        self.adopt(self._device)
        return True

    def _frozen(self) -> list[torch.Tensor]:
        return [tensor for tensor in self._weights.values() if not tensor.requires_grad]

    def _enter_by(self, name: str) -> None:
        self._undo.add(forward_patch.enter_by(self.model, name, partial(self._run_step, what=name)))

    def learn_entry(self) -> None:
        """For a unit that runs outside of any step: the model's public method that called it, or the forward that was
        assigned to the model since, is a step from now on."""
        forward_patch.stand_in_again(self.model)
        name = calling_method(self.model)
        if name is not None and name not in self.entries and "forward" not in (name, *self.entries):
            self.entries.add(name)
            self._enter_by(name)

    def detach(self) -> None:
        """Make the modules plain again; may be called twice."""
        self._undo()

    def was_replaced(self) -> bool:
        """Whether tensors were added since the last step began, perhaps instead of weights; the next adopts them."""
        has_new = not {id(leaf.tensor) for leaf in self._leaves()} <= self._weights.keys() | self._adopted.keys()
        self.has_new |= has_new
        return has_new

    def has_other_code(self, *, looks_closely: bool = False) -> bool:
        """Whether modules, their classes, forwards or hooks have changed since a step was watched: weights may be read
        outside of their units now. `looks_closely`: also look at flags and methods of instances, which takes longer."""
        known = self._code
        if self.has_new:
            modules = list(self.model.modules())
            is_same = [id(module) for module in modules] == [id(module) for module in known.modules]
        else:
            is_same = True
        if not is_same or known.has_changed(looks_closely):
            self._names = {id(module): name for name, module in self.model.named_modules()}
            self._code = _Code(self.model, known)
            self.is_other_code = True
        return self.is_other_code

    def watched(self) -> None:
        """Take note that a step was watched. Attributes that it changed itself, such as a counter, are not code."""
        self.is_other_code = False
        self._code.settle()

    def hold(self, turn: StepTurn) -> Callable[[], None]:
        """Have calls of modules, which are plain while the plan changes, wait for the turn; returns a function that
        ends this."""
        undo = Undo()
        for module in {id(m): m for m in (self.model, *self._unit_modules())}.values():
            undo.add(forward_patch.hold(module, partial(_wait_for_turn, turn, module), self.session))

        def end() -> None:
            undo()
            self._code = _Code(self.model, self._code)  # without the attributes that were removed

        return end

    def _unit_modules(self) -> Iterator[nn.Module]:
        for unit in self.units:
            yield from (unit.module, *unit.also)

    def adopt(self, device: torch.device | None, *, again: bool = False) -> None:
        """Move tensors that were added to the model, such as adapters, to `device`.

        None: move each to the device of the weight with the most similar path. Looks for added tensors only if a module
        has got a tensor or a child, or with `again`.
        """
        if not (self.has_new or again):
            return
        self._look()
        every, before = self._leaves(), self.adopted_nbytes
        added = {id(leaf.tensor): leaf for leaf in every if id(leaf.tensor) not in self._weights}
        self._adopted = {id(leaf.tensor): leaf.tensor for leaf in added.values()}
        self.adopted_nbytes = sum(leaf.tensor.nbytes for leaf in added.values())
        weights = [leaf for leaf in every if id(leaf.tensor) in self._weights] if device is None else []
        with torch.inference_mode(False), torch.no_grad():
            for leaf in added.values():
                to = device or _beside(leaf.path, weights)
                if to is not None and leaf.tensor.device != to:
                    to_device(leaf, to)
        if self.adopted_nbytes != before:
            self.on_adopted()

    def _look(self) -> None:
        self.has_new = False
        self._modules = frozenset(map(id, self.model.modules()))

    def trains_any(self) -> bool:
        """Whether a parameter requires a gradient, an added one or a weight of the plan."""
        return any(tensor.requires_grad for tensor in chain(self._adopted.values(), self._weights.values()))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor object of the model."""
        return (leaf.tensor for leaf in leaves_of(self.model))

    def refuse_foreign(self) -> None:
        """Raise `OffloadError` if another library has added its hooks to a unit."""
        forward_patch.refuse_foreign({unit.name: unit.module for unit in self.units})

    def trains(self, unit: int) -> bool:
        """Whether a module of the unit is in training mode, in which norms update their buffers."""
        return any(module.training for module in self.units[unit].module.modules())

    def hide(self, unit: int) -> None:
        """Hide the unit from compilers: compiled, its kernels might run before its fill."""
        for module in (self.units[unit].module, *self.units[unit].also):
            forward_patch.hide(module)

    def reader(self) -> str:
        """The name of the innermost module whose method is on this thread's stack; empty if none is."""
        return reading_module(self._names) or ""

    def _leaves(self) -> list[Leaf]:
        """Parameters and buffers, and tensors inside of these; not plain attributes, which a forward may replace."""
        return [leaf for leaf in leaves_of(self.model) if leaf.role is not Role.ATTRIBUTE]


class _Code:
    """A snapshot of a model's code, compared in microseconds: the classes of modules and the members of these, forwards
    and hooks of instances; in a closer look also flags and methods of instances.

    Attributes that a watched step changes itself are state and no code, unless they are functions.
    """

    def __init__(self, model: nn.Module, before: _Code | None = None) -> None:
        self.modules = list(model.modules())
        self._attributes = [vars(module) for module in self.modules]
        self._hooks = [hooks for m in self.modules for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        kinds = {kind for module in self.modules for kind in type(module).__mro__}
        self._kinds = [kind for kind in kinds if issubclass(kind, nn.Module) and kind is not nn.Module]
        self._state: set[tuple[int, str]] = before._state if before is not None else set()  # by id, and name
        self._take()

    def has_changed(self, looks_closely: bool) -> bool:
        if (found := self._found()) != self._known and self._is_code(found):
            return True
        return looks_closely and any(
            (id(own), name) not in self._state
            for own, flags, known in zip(self._attributes, self._flags(), self._known_flags, strict=True)
            if flags != known
            for name, _ in flags.items() ^ known.items()
        )

    def settle(self) -> None:
        """Accept all differences, as a step has run and made them."""
        for kind, known in zip(self._kinds, self._held, strict=True):
            self._state |= {(id(kind), name) for name in _differing(vars(kind), known) if not _is_code(kind, name)}
        for own, flags, known in zip(self._attributes, self._flags(), self._known_flags, strict=True):
            now, before = ({n: v for n, v in found.items() if type(v) in _FLAGS} for found in (flags, known))
            self._state |= {(id(own), name) for name in _differing(now, before)}
        self._take()

    def _take(self) -> None:
        self._take_classes(self._found())
        self._known_flags = list(self._flags())

    def _take_classes(self, found: tuple[list[Any], ...]) -> None:
        self._held = [dict(vars(kind)) for kind in self._kinds]  # so that no other object has their ids
        self._known = found

    def _is_code(self, found: tuple[list[Any], ...]) -> bool:
        """Whether more than the state of classes differs. If not, accept the difference; flags are compared later."""
        if found[1:] != self._known[1:]:
            return True
        every = zip(self._kinds, self._held, strict=True)
        if any((id(k), name) not in self._state for k, held in every for name in _differing(vars(k), held)):
            return True
        self._take_classes(found)
        return False

    def _flags(self) -> Iterator[dict[str, Any]]:
        for own in self._attributes:
            yield {
                name: value
                for name, value in own.items()
                if type(value) in _DECIDING and name[0] != "_" and name not in _LOOKED_AT
            }

    def _found(self) -> tuple[list[Any], ...]:
        # no calls: this runs before every eager step
        members = [list(map(id, kind.__dict__.values())) for kind in self._kinds]
        forwards: list[Any] = ["forward" in own and own["forward"] for own in self._attributes]
        hooks = [hooks and (*hooks,) for hooks in self._hooks]
        if hasattr(forwards[0], forward_patch.OUTER):
            forwards[0] = forwards[0].__wrapped__
        return members, list(map(type, self.modules)), forwards, hooks


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Names whose values are other objects."""
    return [name for name in {**now, **before} if now.get(name, _NOTHING) is not before.get(name, _NOTHING)]


def _is_code(kind: type, name: str) -> bool:
    return callable(vars(kind).get(name))


def _wait_for_turn(turn: StepTurn, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs instead of a module's forward while the plan changes."""
    if turn.is_mine:
        return forward(*args, **kwargs)
    with turn.taken():
        # looked up again: the module may be a unit by now
        return forward_patch.present_forward(module)(*args, **kwargs)


def to_device(leaf: Leaf, device: torch.device) -> None:
    """Move a tensor that is no weight of the plan."""
    leaf.tensor.data = leaf.tensor.data.to(device)


def _forgetting(module: nn.Module, run: Run) -> Run:
    """Run the unit, then bring tensors that its pre-hooks have computed back to where they were before: kept on the
    device, copies of all weights would accumulate there."""
    every = ((vars(part), computed_by_hooks(part)) for part in module.modules() if part._forward_pre_hooks)
    before = [(own, name, own[name]) for own, names in every for name in names]
    if not before:
        return run

    def run_and_forget(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return run(forward, args, kwargs)
        finally:
            for own, name, tensor in before:
                if name in own and own[name].device != tensor.device:
                    own[name] = own[name].detach().to(tensor.device)

    return run_and_forget


def _notice(attachment: Attachment) -> Callable[[], None]:
    """Set `has_new` when a module of the model gets a parameter, a buffer or a child; returns a function that ends it.

    Others do not count, such as a slice of a list of layers, which some models make in every forward. torch's hooks
    hold the attachment weakly.
    """
    found = weakref.ref(attachment)

    def on_registration(module: nn.Module, name: str, value: object) -> None:
        if (noticing := found()) is not None and id(module) in noticing._modules:
            noticing.has_new = True

    ends = Undo()
    ends.add(register_module_parameter_registration_hook(on_registration).remove)
    ends.add(register_module_buffer_registration_hook(on_registration).remove)
    ends.add(register_module_module_registration_hook(on_registration).remove)
    return weakref.finalize(attachment, ends)


def _beside(path: str, weights: Sequence[Leaf]) -> torch.device | None:
    """The device of the weight whose path has most in common with this one."""

    def common(leaf: Leaf) -> int:
        pairs = zip(path.split("."), leaf.path.split("."), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(weights, key=common).tensor.device if weights else None
