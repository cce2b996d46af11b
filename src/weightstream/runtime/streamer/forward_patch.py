"""Patches of an offloaded model: calls around its forwards, refused methods, and attributes that copies do not inherit.

Knows no plan and no device.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightstream.errors import OffloadError, UnsupportedError
from weightstream.runtime.streamer import custom_ops
from weightstream.runtime.tensors import guarded
from weightstream.runtime.tensors.leaves import leaves, moved_to
from weightstream.runtime.tensors.undo import Undo

ATTRIBUTE = "weightstream"  # where a model keeps its streamer
OUTER = "_weightstream_decoder"  # marks a forward set by the package that runs whole steps, so is no step itself
_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_HOOKS = frozenset({"_hf_hook", "_diffusers_hook"})
_PLAIN = "_weightstream_plain"  # where a module keeps the values that some attributes have in its copies
_AROUND = "_weightstream_around"  # where a module keeps its `Around`
_AS_IT_RUNS: ContextVar[bool] = ContextVar("copies of modules keep the attributes that these run with", default=False)
Run = Callable[..., Any]  # (forward, args, kwargs) -> output
InnerForward = Callable[[nn.Module, Any], Any]  # (module, forward) -> the forward inside of hooks that read no weights


class Around:
    """The functions `run(forward, args, kwargs)` that wrap the forward of a module; the one added last is outermost.

    [Note: two stand-ins]
    An attribute `forward` of the instance stands in for the module's forward, and an attribute `_call_impl` for the
    method that calls it. Not hooks: PyTorch's fused paths, and so the bits, change with hooks. The plain forward is
    looked up at each call, so that one which was changed on the class, or by another `__class__`, is the one that runs.
    `_call_impl` handles two cases that `forward` cannot. Where another forward was assigned to the instance, or the
    stand-in was deleted, it puts a new stand-in around that, as the other forward may read weights. If `inner_forward`
    finds that it reads none and leads to the stand-in, it stays outside, and may skip the unit. Where a unit has hooks,
    which may read its weights, `_call_impl` opens the unit before they run; the forward inside opens it again.

    Compiled code runs none of these functions. At fixed addresses a compiler traces the plain forward between two
    operators, `wait` and `release`, which get the unit as the tensor `unit`.
    """

    def __init__(self, module: nn.Module, session: custom_ops.OpSession) -> None:
        self.module: Any = module  # None: the module is plain again
        self.session = session
        self.unit: torch.Tensor | None = None
        self.opens_early = False  # a unit opens before the module's hooks; a step begins at the forward
        self.hidden = False  # compilers run the module eager
        self.inner_forward: InnerForward = outermost
        self.run: Run = _run_plain
        self.forward: Any = None  # the instance's forward that is, or leads to, a stand-in bound to the module
        # Stand-in -> the forward that it replaces. Weak, as code that patches a forward at each call drops stand-ins.
        self._made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._runs: list[Run] = []
        self.call = types.MethodType(_call_for(self), module)
        module.__dict__.update({_AROUND: self, "_call_impl": self.call})
        self.stand_in(module)

    @property
    def patched(self) -> Any:
        """The instance's own forward, which the stand-in replaces; None: that of its class."""
        return self.stands_for(self.forward)

    def stands_for(self, forward: Any) -> Any:
        """The forward that `forward` replaces if it is one of our stand-ins, else `forward` itself."""
        return self._made.get(forward, forward) if type(forward) is types.MethodType else forward

    def stand_in(self, module: nn.Module) -> None:
        """Stand in for the forward that the instance has now."""
        forward = module.__dict__.get("forward")
        if hasattr(forward, OUTER):
            return
        # otherwise code has put an earlier stand-in back, or assigned a forward that leads to one
        inner = self.inner_forward(module, forward)
        if type(inner) is not types.MethodType or inner not in self._made:
            stand_in = types.MethodType(_forward_for(self, forward), module)
            self._made[stand_in] = forward
            forward = module.__dict__["forward"] = stand_in
        self.forward = forward

    def add(self, run: Run) -> Callable[[], None]:
        """Wrap the forward in `run`, outside of the functions so far; returns a function that undoes it."""
        self._runs.append(run)
        self.run = _composed(self._runs)

        def undo() -> None:
            if run in self._runs:
                self._runs.remove(run)
            self.run = _composed(self._runs)
            if not self._runs:
                self._leave()

        return undo

    def _leave(self) -> None:
        """Make the module plain again; attributes that were assigned meanwhile stay."""
        module = self.module
        if module is not None and module.__dict__.get(_AROUND) is self:
            with copying_as_it_runs():  # what others set stays, such as a forward that unpacks weights
                plain = plain_attributes(module.__dict__)
            for name in ("_call_impl", "forward"):
                if name in plain:
                    module.__dict__[name] = plain[name]
                else:
                    module.__dict__.pop(name, None)
            del module.__dict__[_AROUND]
        self.module = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Only a `__deepcopy__` of the module's class copies this. The copy is to be plain: it gets the instance's own
        # forward, or None, in this place. `_forward_for` and `surround` handle that value under `_AROUND`.
        return _same, (self.patched,)


def _run_plain(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def outermost(module: nn.Module, forward: Any) -> Any:
    """The `InnerForward` by which no hook may skip a call."""
    return forward


def _composed(runs: Sequence[Run]) -> Run:
    """One function that nests these, the first innermost."""
    found, *others = runs or (_run_plain,)
    for run in others:
        found = functools.partial(_run_inside, found, run)
    return found


def _run_inside(inner: Run, outer: Run, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return outer(lambda *args, **kwargs: inner(forward, args, kwargs), args, kwargs)


def _same(value: Any) -> Any:
    return value


def untraced(reason: str) -> Callable[[_Callable], _Callable]:
    """Mark a function that compilers do not trace. torch.compiler.disable would import the compiler, for a second."""

    def mark(function: _Callable) -> _Callable:
        function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        return function

    return mark


@untraced(
    "the weights of an offloaded model have no fixed address outside of `with model.weightstream.step():`. Call the "
    "compiled model inside of it, or let model.weightstream.compile() do both."
)
def _outside(run: Callable[..., Any], *args: Any) -> Any:
    return torch.compiler.disable(run)(*args)


@untraced(
    "this module of an offloaded model computes with its weights alone, or returns a view of them: compiled, that may "
    "come before they are there; or it reads single rows from a cache. It runs eager: leave out fullgraph=True, or "
    "keep its weights resident."
)
def _hidden(run: Callable[..., Any], *args: Any) -> Any:
    return torch.compiler.disable(run)(*args)


def hide(module: nn.Module) -> None:
    """Have compilers run the module eager, without tracing it."""
    module.__dict__[_AROUND].hidden = True


def _forward_for(home: Around, own_forward: Callable[..., Any] | None) -> Callable[..., Any]:
    """A stand-in for the instance's own forward, or, with None, for that of its class at the time of the call.

    The caller binds it to the instance, so that a deep copy of the attributes binds it to the copy.
    """

    # whether the class's forward is no plain function: looked up once, not per call, as that takes long
    is_static = not isinstance(inspect.getattr_static(type(home.module), "forward", None), types.FunctionType)
    known = _known_to_dynamo(home.module, "forward")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        around: Any = home
        if home.module is not self:  # `self` is a copy, or this stand-in is old: use the `Around` of `self`, if any
            around = getattr(self, _AROUND, None)
            if type(around) is not Around or around.module is not self:
                # none that is in force: run the plain forward. `around` may be a forward: see `Around.__reduce__`.
                patched = own_forward if around is None or type(around) is Around else around
                if patched is not None:
                    return patched(*args, **kwargs)
                function = type(self).forward if known is None or not torch.compiler.is_compiling() else known
                return function(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            plain = own_forward
            if plain is None:
                plain = type(self).forward
                is_plain = type(plain) is types.FunctionType and not is_static
                plain = types.MethodType(plain, self) if is_plain else _forward_of(self)
            return around.run(plain, args, kwargs)
        if around.session.streams and not around.session.fixed:
            return _outside(_run_forward, around, self, own_forward, args, kwargs)
        if around.hidden:
            return _hidden(_run_forward, around, self, own_forward, args, kwargs)
        if around.unit is not None:
            custom_ops.wait(around.session, around.unit, (args, kwargs))
        # The class's function where it can be: compiled code is then shared by all modules of a class.
        if own_forward is not None:
            output = own_forward(*args, **kwargs)
        else:
            output = (type(self).forward if known is None else known)(self, *args, **kwargs)
        if around.unit is not None:
            custom_ops.release(around.session, around.unit, output)
        return output

    model = home.module.forward
    functools.update_wrapper(forward, model)
    with suppress(ValueError):  # a builtin has none
        signature = inspect.signature(model)
        bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[bound, *signature.parameters.values()])  # type: ignore[attr-defined]
    forward.__name__ = "forward"  # by which a pickle finds the plain one
    return forward


def _known_to_dynamo(module: nn.Module, name: str) -> Any:
    """The present function of that name of a class that is allowed in graphs, such as those of diffusers' blocks; None
    for other classes. In code that Dynamo traces, such a class is an operator, whose attributes cannot be read."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")  # there if anything was allowed
    return getattr(type(module), name) if rules is not None and rules.is_callable_allowed(type(module)) else None


def anew(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function that makes a call again, with the module's present stand-ins.

    `forward`: what the call has led to, a plain forward or a plain `_call_impl`.
    """
    module: Any = forward.__self__  # type: ignore[attr-defined]
    is_call = getattr(forward, "__func__", None) is type(module)._call_impl
    return module if is_call else present_forward(module)  # type: ignore[no-any-return]


def present_forward(module: Any) -> Any:
    """The module's forward with its present stand-ins, without the hooks outside, which have run and did not skip."""
    around = _in_force(module)
    return module.forward if around is None else around.inner_forward(module, module.forward)


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward of the module's class, bound to the module. It need not be a function."""
    held: Any = inspect.getattr_static(type(module), "forward")
    bound: Callable[..., Any] = held.__get__(module, type(module)) if hasattr(type(held), "__get__") else held
    return bound


def _run_forward(
    around: Around, module: nn.Module, own_forward: Callable[..., Any] | None, args: Any, kwargs: Any
) -> Any:
    return around.run(_forward_of(module) if own_forward is None else own_forward, args, kwargs)


def _call_for(around: Around) -> Callable[..., Any]:
    """A stand-in for `_call_impl`, which the caller binds to the module: [Note: two stand-ins]."""
    known = _known_to_dynamo(around.module, "_call_impl")

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain_call = type(self)._call_impl if known is None or not torch.compiler.is_compiling() else known
        opens = around.opens_early and (self._forward_pre_hooks or self._forward_hooks)
        if (self.forward is around.forward and not opens) or around.module is not self:
            return plain_call(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            return _run_call(around, self, opens, args, kwargs)
        if around.unit is None or not around.opens_early:
            return plain_call(self, *args, **kwargs)
        if around.session.streams and not around.session.fixed:
            return _outside(_run_call, around, self, opens, args, kwargs)
        if around.hidden:
            return _hidden(_run_call, around, self, opens, args, kwargs)
        custom_ops.wait(around.session, around.unit, (args, kwargs))
        output = plain_call(self, *args, **kwargs)
        custom_ops.release(around.session, around.unit, output)
        return output

    call.__name__ = "_call_impl"  # by which a pickle finds the plain one
    return call


def _run_call(around: Around, module: Any, opens: object, args: Any, kwargs: Any) -> Any:
    if module.forward is not around.forward:
        around.stand_in(module)
    plain = types.MethodType(type(module)._call_impl, module)
    return around.run(plain, args, kwargs) if opens else plain(*args, **kwargs)


def _in_force(module: nn.Module) -> Around | None:
    """The `Around` of the module; None: there is none, or it is that of the module which this one is a copy of."""
    around = module.__dict__.get(_AROUND)
    return around if type(around) is Around and around.module is module else None


def hold(module: nn.Module, run: Run, session: custom_ops.OpSession) -> Callable[[], None]:
    """Wrap calls of the module in `run`, as `surround` does, but leave its session and its unit as they are."""
    if (around := _in_force(module)) is None:
        return surround(module, run, session)
    return around.add(run)


def surround(
    module: nn.Module,
    run: Run,
    session: custom_ops.OpSession,
    unit: int | None = None,
    *,
    opens_early: bool = True,
    inner_forward: InnerForward = outermost,
) -> Callable[[], None]:
    """Run `run(forward, args, kwargs)` whenever the module's forward is called; returns a function that undoes it.

    `unit`: the index of the module's unit; None: its forward is a step. `opens_early`: the unit opens before the hooks
    of the module run, which may read its weights. `inner_forward`: the forward inside of those that may skip the call.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(f"{type(module).__name__} is a ScriptModule: its forward cannot be followed")
    if (around := _in_force(module)) is None:
        if _AROUND in module.__dict__:  # a copy by a `__deepcopy__` of the class's own: see `Around.__reduce__`
            attributes = module.__dict__
            attributes["forward"] = attributes.pop(_AROUND)
            if attributes["forward"] is None:
                del attributes["forward"]
        around = Around(module, session)
    around.session = session
    around.opens_early = unit is not None and opens_early
    around.inner_forward = inner_forward
    if unit is None:
        return around.add(run)
    undo, around.unit = around.add(run), session.tensor_of(unit)

    def leave() -> None:
        around.unit, around.opens_early = None, False
        undo()

    return leave


class _StandsIn:
    """Stands in for a method of a module, as an attribute of the instance. `replaced`: its value before, or None."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.replaced = module.__dict__.get(name)
        self._users: set[object] = set()

    def method(self) -> Callable[..., Any]:
        """The method that this stands in for, as it is now."""
        if self.replaced is not None:
            return self.replaced  # type: ignore[no-any-return]
        return types.MethodType(getattr(type(self.module), self.name), self.module)

    def attach(self) -> Callable[[], None]:
        """Stand in; returns a function that undoes it. Models that share a module share one until the last undo."""
        before = self.module.__dict__.get(self.name)
        in_force = before if type(before) is type(self) and before.module is self.module else self
        in_force._users.add(user := object())
        self.module.__dict__[self.name] = in_force

        def undo() -> None:
            in_force._users.discard(user)
            if not in_force._users and in_force.module.__dict__.get(in_force.name) is in_force:
                in_force._restore()

        return undo

    def _restore(self) -> None:
        if self.replaced is not None:
            self.module.__dict__[self.name] = self.replaced
        else:
            del self.module.__dict__[self.name]

    def __reduce__(self) -> tuple[Any, ...]:
        # Only a `__deepcopy__` of the module's class copies this. The copy is to be plain: give it its class's method.
        return functools.partial, (getattr(type(self.module), self.name), self.module)


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that a plain copy of a module gets: those of the module, without stand-ins and the streamer."""
    found = dict(attributes)
    around = found.pop(_AROUND, None)
    replaced = {name: value.replaced for name, value in found.items() if isinstance(value, _StandsIn)}
    if type(around) is Around:
        replaced["forward"] = around.stands_for(found.get("forward"))
        if found.get("_call_impl") is around.call:
            replaced["_call_impl"] = None
    found |= replaced
    entries = () if _AS_IT_RUNS.get() else found.pop(_PLAIN, ())
    for name, plain in reversed(entries):  # undone in reverse, as each entry replaced the value of the one before
        found[name] = plain(found.get(name))
    for name in {*replaced, *(name for name, _ in entries)}:
        if found.get(name) is None:
            found.pop(name, None)
    if ATTRIBUTE in found:
        found[ATTRIBUTE] = None
    return found


@contextmanager
def copying_as_it_runs() -> Iterator[None]:
    """Inside, copies of modules that this thread makes keep the values of `set_attribute` and `copied_as`."""
    token = _AS_IT_RUNS.set(True)
    try:
        yield
    finally:
        _AS_IT_RUNS.reset(token)


class Copyable(_StandsIn):
    """Stands in for `__getstate__`, by which modules are copied and pickled, so that copies are plain modules.

    Otherwise the stand-ins in a shallow copy would be bound to the original, and compute with its attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "__getstate__")

    def __call__(self) -> Any:
        state = self.method()()
        return plain_attributes(state) if isinstance(state, dict) else state


class Saving(_StandsIn):
    """Stands in for `_save_to_state_dict`, for libraries that unpack quantised weights there.

    They compare classes of tensors exactly, so tensors have their plain classes meanwhile. They may unpack only on the
    device that they packed for, so if saving fails, copies on the device are saved.
    """

    def __init__(self, module: nn.Module, device: torch.device | None) -> None:
        super().__init__(module, "_save_to_state_dict")
        self._device = device

    def __call__(self, destination: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        found = list(leaves(self.module))
        with guarded.plainly(t for leaf in found for t in (leaf.tensor, *leaf.shells)):
            try:
                self.method()(destination, *args, **kwargs)
            except Exception as error:
                if self._device is None or not any(leaf.shells for leaf in found):
                    raise
                try:
                    self._save_on(self._device, destination, *args, **kwargs)
                except Exception:
                    raise error from None

    def _save_on(self, device: torch.device, destination: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save the weights in wrapper subclasses from copies on the device, which are freed afterwards."""
        copied = copy.copy(self.module)  # a plain module
        parameters: dict[str, Any] = dict(copied._parameters)
        for key, tensor in copied._parameters.items():
            if is_traceable_wrapper_subclass(tensor):
                parameters[key] = moved_to(tensor, device)
        copied._parameters = parameters
        saved: dict[str, Any] = {}
        copied._save_to_state_dict(saved, *args, **kwargs)
        for key, value in saved.items():
            destination[key] = value.cpu() if isinstance(value, torch.Tensor) else value


def stand_in_again(module: nn.Module) -> None:
    """Stand in for a forward that was assigned to the instance, and that was called without the module."""
    around = _in_force(module)
    if around is not None and module.forward is not around.forward:
        around.stand_in(module)


class Entry(_StandsIn):
    """Stands in for another method than the forward that starts a step: runs `run(method, args, kwargs)`."""

    def __init__(self, model: nn.Module, name: str, run: Run) -> None:
        super().__init__(model, name)
        self._run = run
        functools.update_wrapper(self, getattr(model, name), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.method(), args, kwargs)


def enter_by(model: nn.Module, name: str, run: Run) -> Callable[[], None]:
    """Run `run(method, args, kwargs)` whenever the method is called; returns a function that undoes it."""
    return Entry(model, name, run).attach()


def set_attribute(module: nn.Module, name: str, value: Callable[..., Any]) -> Callable[[], None]:
    """Set an attribute of this instance, but not of its copies.

    Returns a function that undoes it, unless the attribute was set to another value meanwhile.
    """
    before = module.__dict__.get(name)
    module.__dict__[name] = value
    copied = copied_as(module, name, lambda now: before if now is value else now)

    def undo() -> None:
        copied()
        if module.__dict__.get(name) is not value:
            return
        if before is not None:
            module.__dict__[name] = before
        else:
            del module.__dict__[name]

    return undo


def copied_as(module: nn.Module, name: str, plain: Callable[[Any], Any]) -> Callable[[], None]:
    """Have copies and pickles of the module hold `plain(value)` as this attribute, or lack it if that is None.

    Returns a function that undoes it.
    """
    entry = name, plain
    module.__dict__.setdefault(_PLAIN, []).append(entry)

    def undo() -> None:
        entries = module.__dict__.get(_PLAIN, [])
        if entry in entries:
            entries.remove(entry)
        if not entries:
            module.__dict__.pop(_PLAIN, None)

    return undo


def wrap_forward(module: nn.Module, run: Run) -> Callable[[], None]:
    """Run `run(module, forward, args, kwargs)` instead of the module's forward, but not in its copies; returns a
    function that undoes it."""
    own_forward = module.__dict__.get("forward")
    function = type(module).forward
    if own_forward is not None:  # in a copy, a bound method is bound to the copy; any other callable stays as it is
        function = getattr(own_forward, "__func__", lambda _, *args, **kwargs: own_forward(*args, **kwargs))

    @functools.wraps(own_forward or type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, functools.partial(function, self), args, kwargs)

    return set_attribute(module, "forward", types.MethodType(forward, module))


class RefuseApply(_StandsIn):
    """Stands in for a module's `_apply`, which `.to()`, `.cuda()`, `.half()` and similar methods call.

    `stays(fn)`: whether `fn` would change no tensor that is on the device.
    """

    def __init__(self, module: nn.Module, path: str, stays: Callable[[Any], bool]) -> None:
        super().__init__(module, "_apply")
        self.path = path
        self._stays = stays

    def __call__(self, fn: Any, recurse: bool = True) -> nn.Module:
        if self._stays(fn):
            return self.module
        raise OffloadError(
            "You can't move a model that has some modules offloaded, nor change its dtype: weightstream keeps the "
            f"weights of {self.path or type(self.module).__name__} where its plan put them. Call "
            "model.weightstream.remove() first, or pass device= and dtype= when you offload or load."
        )


def refuse_moves(
    model: nn.Module, device: torch.device | None = None, stays: Callable[[Any], bool] = lambda fn: False
) -> Callable[[], None]:
    """Refuse moves and dtype changes of every module of the model, and make copies and saved tensors plain; returns a
    function that undoes it.

    `stays(fn)`: whether `fn`, which is to be applied to every tensor, would change none on the device.
    """
    undo = Undo()
    for path, module in model.named_modules():
        undo.add(RefuseApply(module, path, stays).attach())
        undo.add(Copyable(module).attach())
        undo.add(Saving(module, device).attach())
    return undo


def refuse_backward(unit: str, reason: str = "") -> AbstractContextManager[None]:
    """Inside, autograd saves no tensors, and a backward pass that needs one raises `OffloadError` with the reason."""
    why = reason or "its forward read single rows of its weights, as in a captured step or with model.eval()"

    def refuse(nothing: object) -> torch.Tensor:
        raise OffloadError(
            f"a backward pass reached {unit or 'the model'}: {why}. To train adapters, call model.train(), and freeze "
            "streamed weights before the forward (requires_grad_(False)). To train weights of the model, freeze all "
            "others before you offload, so that the trained ones stay on the device; or call remove() first"
        )

    found: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, refuse)
    return found if torch.is_grad_enabled() else nullcontext()


def refuse_transforms() -> None:
    """Raise `OffloadError` inside torch.export, or inside a gradient of torch.func, where saved-tensor hooks fail."""
    if torch.compiler.is_exporting():
        raise OffloadError("torch.export copies weights: call model.weightstream.remove() first")
    try:
        with refuse_backward(""):
            return  # not `pass`: CPython keeps that outside of the block, so an error at it would leave the hooks
    except RuntimeError as error:
        raise OffloadError(
            "gradients by torch.func through streamed weights, whose bytes are overwritten after a forward: call "
            "remove() first, or backward() on an output"
        ) from error


def refuse_foreign(modules: dict[str, nn.Module]) -> None:
    """Raise `OffloadError` if another library offloads one of these modules."""
    for name, module in modules.items():
        attributes = module.__dict__
        seems_owned = not _HOOKS.isdisjoint(attributes) or type(attributes["_parameters"]) is not dict
        if seems_owned and (owner := _owner(attributes)):
            raise OffloadError(
                f"{name or type(module).__name__} is already managed by {owner}: undo that first. Two kinds of "
                "offloading on one model cannot both know where a weight is."
            )


def _owner(attributes: dict[str, Any]) -> str:
    if attributes.get("_hf_hook") is not None:
        return "accelerate (_hf_hook)"
    registry = attributes.get("_diffusers_hook")  # of hooks of any purpose
    if registry is not None and any("offload" in name for name in registry.hooks):
        return "diffusers (_diffusers_hook)"
    kind = type(attributes["_parameters"])  # of compressed-tensors or DeepSpeed: a mapping that moves what it holds
    return "" if kind in (dict, OrderedDict) else f"{kind.__module__.partition('.')[0]} ({kind.__name__})"


def refuse_twice(model: nn.Module) -> None:
    """Raise `OffloadError` if the model or a part of it with parameters is offloaded by weightstream, or by FSDP."""
    for name, module in model.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            raise OffloadError(f"{name or 'the model'} is sharded by FSDP, which brings and frees its weights itself")
        apply = module.__dict__.get("_apply")
        if isinstance(apply, RefuseApply) and any(True for _ in module.parameters()):
            where = name or apply.path or type(module).__name__
            raise OffloadError(
                f"{where} is already offloaded by weightstream: call its streamer's remove() first. It streams "
                "wherever it is called; pass modules that are used with it to weightstream.offload() by themselves"
            )
