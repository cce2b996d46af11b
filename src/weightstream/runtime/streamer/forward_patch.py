"""What a model refuses while it is offloaded, and what its copies do not inherit. Knows no plan and no device."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
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
OUTER = "_weightstream_decoder"  # marks a forward of ours that runs steps: none begins around it
_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_PLAIN = "_weightstream_plain"  # where a module keeps what some attributes of its copies are
_AROUND = "_weightstream_around"  # where a module keeps what it runs in place of its forward
_AS_IT_RUNS: ContextVar[bool] = ContextVar("copies of modules have what these run with", default=False)
Run = Callable[..., Any]  # (forward, args, kwargs) -> output


class Around:
    """What runs around the forward of a module: `run(forward, args, kwargs)`, the one added last outermost.

    [Note: two stand-ins]
    An attribute `forward` of the instance stands in for the module's forward, and one `_call_impl` for what calls it.
    Not hooks: PyTorch's fused paths, and so the bits, change with hooks. The plain forward is looked up at each call:
    one that is changed on the class meanwhile, or by another `__class__`, is the one that runs. `_call_impl` sees what
    the other cannot. Where another forward was assigned to the instance, or ours was deleted, a new stand-in is put
    around that. Where a unit has hooks, which may read its weights, it opens before they run, and again inside.

    In a session whose addresses are fixed a compiler traces the plain forward between two operators, which know the
    unit by the tensor `unit`.
    """

    def __init__(self, module: nn.Module, session: custom_ops.OpSession) -> None:
        self.module: Any = module  # None: it was let go
        self.session = session
        self.unit: torch.Tensor | None = None
        self.opens_early = False  # a unit, whose hooks run inside; a step begins at the forward
        self.hidden = False  # from compilers
        self.run: Run = _run_plain
        self.forward: Any = None  # the stand-in in force, bound to the module
        # Those that somebody holds, and what each stands in for: code that patches a forward in each call drops them.
        self._made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._runs: list[Run] = []
        self.call = types.MethodType(_call_for(self), module)
        module.__dict__.update({_AROUND: self, "_call_impl": self.call})
        self.stand_in(module)

    @property
    def patched(self) -> Any:
        """The instance's own forward that is stood in for; None: that of its class."""
        return self.stands_for(self.forward)

    def stands_for(self, forward: Any) -> Any:
        """The same for a value of the instance's `forward`, which may be none of ours."""
        return self._made.get(forward, forward) if type(forward) is types.MethodType else forward

    def stand_in(self, module: nn.Module) -> None:
        """Stand in for the forward that the instance has now."""
        given = module.__dict__.get("forward")
        if hasattr(given, OUTER):
            return
        if type(given) is not types.MethodType or given not in self._made:  # else it was put back
            made = types.MethodType(_forward_for(self, given), module)
            self._made[made] = given
            given = module.__dict__["forward"] = made
        self.forward = given

    def add(self, run: Run) -> Callable[[], None]:
        """Run this, too, outermost; returns what undoes it."""
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
        """The module is plain again; what was assigned to it meanwhile stays."""
        module = self.module
        if module is not None and module.__dict__.get(_AROUND) is self:
            plain = plain_attributes(module.__dict__)
            for name in ("_call_impl", "forward"):
                if name in plain:
                    module.__dict__[name] = plain[name]
                else:
                    module.__dict__.pop(name, None)
            del module.__dict__[_AROUND]
        self.module = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.patched,)  # a class copied its attributes in its own way: the copy is plain


def _run_plain(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _composed(runs: Sequence[Run]) -> Run:
    """Runs the first of these innermost."""
    found, *others = runs or (_run_plain,)
    for run in others:
        found = functools.partial(_run_inside, found, run)
    return found


def _run_inside(inner: Run, outer: Run, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return outer(lambda *args, **kwargs: inner(forward, args, kwargs), args, kwargs)


def _same(value: Any) -> Any:
    return value


def _untraced(reason: str) -> Callable[[_Callable], _Callable]:
    """Marks what compilers leave alone, as torch.compiler.disable does, which would import the compiler, a second."""

    def mark(function: _Callable) -> _Callable:
        function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        return function

    return mark


@_untraced(
    "the weights of an offloaded model have no fixed address outside of `with model.weightstream.step():`. Call the "
    "compiled model inside of it, or let model.weightstream.compile() do both."
)
def _outside(run: Callable[..., Any], *args: Any) -> Any:
    return torch.compiler.disable(run)(*args)


@_untraced(
    "this module of an offloaded model computes with its weights alone, or returns a view of them: compiled, that may "
    "come before they are there. It runs eager: leave out fullgraph=True, or keep its weights resident."
)
def _hidden(run: Callable[..., Any], *args: Any) -> Any:
    return torch.compiler.disable(run)(*args)


def hide(module: nn.Module) -> None:
    """Let compilers run the module eager, and not look into it."""
    module.__dict__[_AROUND].hidden = True


def _forward_for(home: Around, given: Callable[..., Any] | None) -> Callable[..., Any]:
    """A stand-in for the instance's own forward, `given`, else for that of its class at the time of the call.

    It is to be bound to the instance, so that a deep copy of the attributes binds it to the copy.
    """

    # one of a class, too, that is no method: to find that out at each call takes long
    is_static = not isinstance(inspect.getattr_static(type(home.module), "forward", None), types.FunctionType)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        around: Any = home
        if home.module is not self:  # another attachment, or none; or this is a copy
            around = getattr(self, _AROUND, None)
            if type(around) is not Around or around.module is not self:
                patched = given if around is None or type(around) is Around else around
                return type(self).forward(self, *args, **kwargs) if patched is None else patched(*args, **kwargs)
        if not torch.compiler.is_compiling():
            plain = given
            if plain is None:
                plain = type(self).forward
                is_plain = type(plain) is types.FunctionType and not is_static
                plain = types.MethodType(plain, self) if is_plain else _forward_of(self)
            return around.run(plain, args, kwargs)
        if around.session.streams and not around.session.fixed:
            return _outside(_run_forward, around, self, given, args, kwargs)
        if around.hidden:
            return _hidden(_run_forward, around, self, given, args, kwargs)
        if around.unit is not None:
            custom_ops.wait(around.session, around.unit, (args, kwargs))
        # The class's function where it can be: compiled code is then shared by all modules of a class.
        output = type(self).forward(self, *args, **kwargs) if given is None else given(*args, **kwargs)
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


def anew(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The call again that led to a plain forward, or to a plain `_call_impl`: by what stands around the module now."""
    module: Any = forward.__self__  # type: ignore[attr-defined]
    is_call = getattr(forward, "__func__", None) is type(module)._call_impl
    return module if is_call else module.forward  # type: ignore[no-any-return]


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward that the module has from its class, which need be no function."""
    held: Any = inspect.getattr_static(type(module), "forward")
    bound: Callable[..., Any] = held.__get__(module, type(module)) if hasattr(type(held), "__get__") else held
    return bound


def _run_forward(around: Around, module: nn.Module, given: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    return around.run(_forward_of(module) if given is None else given, args, kwargs)


def _call_for(around: Around) -> Callable[..., Any]:
    """A stand-in for `_call_impl`, to be bound to the instance."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        opens = around.opens_early and (self._forward_pre_hooks or self._forward_hooks)
        if (self.forward is around.forward and not opens) or around.module is not self:
            return type(self)._call_impl(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            return _run_call(around, self, opens, args, kwargs)
        if around.unit is None or not around.opens_early:
            return type(self)._call_impl(self, *args, **kwargs)
        if around.session.streams and not around.session.fixed:
            return _outside(_run_call, around, self, opens, args, kwargs)
        if around.hidden:
            return _hidden(_run_call, around, self, opens, args, kwargs)
        custom_ops.wait(around.session, around.unit, (args, kwargs))
        output = type(self)._call_impl(self, *args, **kwargs)
        custom_ops.release(around.session, around.unit, output)
        return output

    call.__name__ = "_call_impl"  # by which a pickle finds the plain one
    return call


def _run_call(around: Around, module: Any, opens: object, args: Any, kwargs: Any) -> Any:
    if module.forward is not around.forward:
        around.stand_in(module)
    plain = types.MethodType(type(module)._call_impl, module)
    return around.run(plain, args, kwargs) if opens else plain(*args, **kwargs)


def hold(module: nn.Module, run: Run, session: custom_ops.OpSession) -> Callable[[], None]:
    """As `surround`, outermost, whatever else stands around the module; returns what undoes it."""
    around = module.__dict__.get(_AROUND)
    if type(around) is not Around or around.module is not module:
        return surround(module, run, session)
    return around.add(run)


def surround(
    module: nn.Module, run: Run, session: custom_ops.OpSession, unit: int | None = None, *, opens_early: bool = True
) -> Callable[[], None]:
    """Run `run(forward, args, kwargs)` whenever the module's forward is called, as a step, or as that of a unit;
    returns what undoes it. `opens_early`: hooks of the unit run inside, too."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(f"{type(module).__name__} is a ScriptModule: its forward cannot be followed")
    around = module.__dict__.get(_AROUND)
    if type(around) is not Around or around.module is not module:
        if _AROUND in module.__dict__:  # a copy, of a class that copies its attributes in its own way
            own = module.__dict__
            own["forward"] = own.pop(_AROUND)
            if own["forward"] is None:
                del own["forward"]
        around = Around(module, session)
    around.session = session
    around.opens_early = unit is not None and opens_early
    if unit is None:
        return around.add(run)
    undo, around.unit = around.add(run), session.tensor_of(unit)

    def leave() -> None:
        around.unit, around.opens_early = None, False
        undo()

    return leave


class _StandsIn:
    """Stands in for a method of a module, as an attribute of the instance; `given` is what was there."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.given = module.__dict__.get(name)
        self._users: set[object] = set()

    def method(self) -> Callable[..., Any]:
        """The method as it is now without this."""
        if self.given is not None:
            return self.given  # type: ignore[no-any-return]
        return types.MethodType(getattr(type(self.module), self.name), self.module)

    def attach(self) -> Callable[[], None]:
        """Stand in, unless another of the kind does, of a model that shares the module; returns what undoes it."""
        found = self.module.__dict__.get(self.name)
        kept = found if type(found) is type(self) and found.module is self.module else self
        kept._users.add(user := object())
        self.module.__dict__[self.name] = kept

        def undo() -> None:
            kept._users.discard(user)
            if not kept._users and kept.module.__dict__.get(kept.name) is kept:
                kept._restore()

        return undo

    def _restore(self) -> None:
        if self.given is not None:
            self.module.__dict__[self.name] = self.given
        else:
            del self.module.__dict__[self.name]

    def __reduce__(self) -> tuple[Any, ...]:
        # A class copied its attributes in its own way. The copy is a plain module: give it the method of its class.
        return functools.partial, (getattr(type(self.module), self.name), self.module)


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a module as they are without what stands in for some of them."""
    found = dict(attributes)
    around = found.pop(_AROUND, None)
    given = {name: value.given for name, value in found.items() if isinstance(value, _StandsIn)}
    if type(around) is Around:
        given["forward"] = around.stands_for(found.get("forward"))
        if found.get("_call_impl") is around.call:
            given["_call_impl"] = None
    found |= given
    entries = () if _AS_IT_RUNS.get() else found.pop(_PLAIN, ())
    for name, plain in reversed(entries):  # the last one stands in for the one before
        found[name] = plain(found.get(name))
    for name in {*given, *(name for name, _ in entries)}:
        if found.get(name) is None:
            found.pop(name, None)
    if ATTRIBUTE in found:
        found[ATTRIBUTE] = None
    return found


@contextmanager
def copying_as_it_runs() -> Iterator[None]:
    """Inside, copies that this thread makes of offloaded modules have the attributes that these run with."""
    token = _AS_IT_RUNS.set(True)
    try:
        yield
    finally:
        _AS_IT_RUNS.reset(token)


class Copyable(_StandsIn):
    """In place of `__getstate__`, by which modules are copied and pickled: copies are plain modules.

    A stand-in in a shallow copy would compute with the attributes of the original, to which it is bound.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "__getstate__")

    def __call__(self) -> Any:
        state = self.method()()
        return plain_attributes(state) if isinstance(state, dict) else state


class Saving(_StandsIn):
    """In place of `_save_to_state_dict`: libraries that take weights apart there compare classes of tensors exactly,
    and may unpack on the device alone that they packed for."""

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
        """Save copies of the wrapped weights that lie on the device while that lasts."""
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


class Entry(_StandsIn):
    """In place of a method besides the forward that is a step: `run(method, args, kwargs)`."""

    def __init__(self, model: nn.Module, name: str, run: Run) -> None:
        super().__init__(model, name)
        self._run = run
        functools.update_wrapper(self, getattr(model, name), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.method(), args, kwargs)


def enter_by(model: nn.Module, name: str, run: Run) -> Callable[[], None]:
    """Run `run(method, args, kwargs)` whenever the method is called; returns what undoes it."""
    return Entry(model, name, run).attach()


def set_attribute(module: nn.Module, name: str, value: Callable[..., Any]) -> Callable[[], None]:
    """Make it an attribute of this instance, and not of its copies; returns what undoes that, where nobody has put
    another there since."""
    given = module.__dict__.get(name)
    module.__dict__[name] = value
    copied = copied_as(module, name, lambda now: given if now is value else now)

    def undo() -> None:
        copied()
        if module.__dict__.get(name) is not value:
            return
        if given is not None:
            module.__dict__[name] = given
        else:
            del module.__dict__[name]

    return undo


def copied_as(module: nn.Module, name: str, plain: Callable[[Any], Any]) -> Callable[[], None]:
    """Copies and pickles of the module have `plain(value)` as their attribute; None: they lack it. Returns what undoes
    it."""
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
    """Have `run(module, forward, args, kwargs)` run in place of the module's forward, but not of its copies'; returns
    what undoes it."""
    given = module.__dict__.get("forward")
    function = type(module).forward
    if given is not None:  # a bound method is bound to the copy in a copy, anything else is called as it is
        function = getattr(given, "__func__", lambda _, *args, **kwargs: given(*args, **kwargs))

    @functools.wraps(given or type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, functools.partial(function, self), args, kwargs)

    return set_attribute(module, "forward", types.MethodType(forward, module))


class RefuseApply(_StandsIn):
    """In place of a module's `_apply`, through which `.to()`, `.cuda()`, `.half()` and their like all go."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module, "_apply")
        self.path = path

    def __call__(self, fn: object, recurse: bool = True) -> nn.Module:
        raise OffloadError(
            "You can't move a model that has some modules offloaded, nor change its dtype: weightstream keeps the "
            f"weights of {self.path or type(self.module).__name__} where its plan put them. Call "
            "model.weightstream.remove() first, or pass device= and dtype= when you offload or load."
        )


def refuse_moves(model: nn.Module, device: torch.device | None = None) -> Callable[[], None]:
    """Refuse moves and dtype changes of every module of the model, and have copies and saved tensors be plain; returns
    what undoes it."""
    undo = Undo()
    for path, module in model.named_modules():
        undo.add(RefuseApply(module, path).attach())
        undo.add(Copyable(module).attach())
        undo.add(Saving(module, device).attach())
    return undo


def refuse_backward(unit: str) -> AbstractContextManager[None]:
    """Inside, autograd keeps nothing for a backward pass, and a pass that needs it fails with the reason."""

    def refuse(nothing: object) -> torch.Tensor:
        raise OffloadError(
            f"a backward pass reached {unit or 'the model'}, whose weights are streamed: their bytes were overwritten "
            "after its forward, so its gradients would be wrong. Offloading is for inference: call remove() to train."
        )

    found: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, refuse)
    return found if torch.is_grad_enabled() else nullcontext()


def refuse_transforms() -> None:
    """Raise `OffloadError` inside of an export or a gradient of torch.func, which allows no hooks of saved tensors."""
    if torch.compiler.is_exporting():
        raise OffloadError("torch.export copies weights: call model.weightstream.remove() first")
    try:
        with refuse_backward(""):
            pass
    except RuntimeError as error:
        raise OffloadError(
            "gradients through streamed weights, whose bytes are overwritten after a forward: offloading is for "
            "inference, call remove() first"
        ) from error


def refuse_foreign(modules: dict[str, nn.Module]) -> None:
    """Raise `OffloadError` if another library offloads one of these modules."""
    for name, module in modules.items():
        attributes = module.__dict__
        if ("_hf_hook" in attributes or "_diffusers_hook" in attributes) and (owner := _owner(attributes)):
            raise OffloadError(
                f"{name or type(module).__name__} is already managed by {owner}: remove its hooks first. Two kinds of "
                "offloading on one model cannot both know where a weight is."
            )


def _owner(attributes: dict[str, Any]) -> str:
    if attributes.get("_hf_hook") is not None:
        return "accelerate (_hf_hook)"
    registry = attributes.get("_diffusers_hook")  # of hooks of any purpose
    if registry is not None and any("offload" in name for name in registry.hooks):
        return "diffusers (_diffusers_hook)"
    return ""


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
