"""What a model refuses while it is offloaded, and what its copies do not inherit. Knows no plan and no device."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import nn

from weightstream.errors import OffloadError, UnsupportedError
from weightstream.runtime import ops

ATTRIBUTE = "weightstream"  # where a model keeps its streamer
_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_AROUND = "_weightstream_around"  # where a module keeps what it runs in place of its forward


class Around:
    """What a module runs in place of its forward: `run(forward, args, kwargs)`, the one added last outermost.

    Not hooks: PyTorch's fused paths, and so the bits, change with hooks. In a session whose addresses are fixed a
    compiler traces the plain forward between two operators instead, which know the unit by the tensor `unit`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.forward = module.forward
        self.patched = module.__dict__.get("forward")  # somebody's own, on this instance
        self.runs: list[Callable[..., Any]] = []
        self.session: ops.Session | None = None
        self.unit: torch.Tensor | None = None
        self.hidden = False  # from compilers
        self.is_wrapped = False  # somebody's forward runs ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.forward
        for run in self.runs:
            forward = functools.partial(_run, run, forward)
        return forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.patched,)  # a copy or pickle of the module is a plain one


def _run(run: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(forward, args, kwargs)


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
def _outside(around: Around, *args: Any, **kwargs: Any) -> Any:
    return torch.compiler.disable(around)(*args, **kwargs)


@_untraced(
    "this module of an offloaded model computes with its weights alone, or returns a view of them: compiled, that may "
    "come before they are there. It runs eager: leave out fullgraph=True, or keep its weights resident."
)
def _hidden(around: Around, *args: Any, **kwargs: Any) -> Any:
    return torch.compiler.disable(around)(*args, **kwargs)


def hide(module: nn.Module) -> None:
    """Let compilers run the module eager, and not look into it."""
    module.__dict__[_AROUND].hidden = True


def _stand_in(own: Around) -> Callable[..., Any]:
    """A forward for one instance, to be bound to it, so that a copy of the instance binds it to the copy."""
    plain = own.forward
    of_class = getattr(plain, "__func__", plain)  # `type(self).forward` is none in a class that compilers leave whole

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        around = getattr(self, _AROUND, None)
        if own.is_wrapped or not isinstance(around, Around):  # we stand around the wrapper; or it is a copy
            patched = own.patched if around is None or isinstance(around, Around) else around
            return type(self).forward(self, *args, **kwargs) if patched is None else patched(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return around(*args, **kwargs)
        if around.session is None or (around.session.streams and not around.session.fixed):
            return _outside(around, *args, **kwargs)
        if around.hidden:
            return _hidden(around, *args, **kwargs)
        if around.unit is not None:
            ops.wait(around.session, around.unit, (args, kwargs))
        # The class's function where it can be: compiled code is then shared by all modules of a class.
        output = of_class(self, *args, **kwargs) if around.patched is None else around.patched(*args, **kwargs)
        if around.unit is not None:
            ops.release(around.session, around.unit, output)
        return output

    functools.update_wrapper(forward, plain)
    with suppress(ValueError):  # a builtin has none
        signature = inspect.signature(plain)
        bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[bound, *signature.parameters.values()])  # type: ignore[attr-defined]
    forward.__name__ = "forward"  # by which a pickle finds the plain one
    return forward


def surround(
    module: nn.Module, run: Callable[..., Any], session: ops.Session, unit: int | None = None
) -> Callable[[], None]:
    """Run `run(forward, args, kwargs)` whenever the module's forward is called; returns what undoes it."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(f"{type(module).__name__} is a ScriptModule: its forward cannot be followed")
    found = module.__dict__.get(_AROUND)
    if not isinstance(found, Around):
        if _AROUND in module.__dict__:
            _put_back(module, found)  # a copy of an offloaded module
        found = Around(module)
        stand_in = types.MethodType(_stand_in(found), module)
        module.__dict__.update({_AROUND: found, "forward": stand_in})
    found.session = session
    found.runs.append(run)
    if unit is not None:
        found.unit = session.tensor_of(unit)
    return functools.partial(_leave, module, found, module.__dict__["forward"])


def _leave(module: nn.Module, around: Around, stand_in: Callable[..., Any]) -> None:
    if module.__dict__.get(_AROUND) is around:
        if module.__dict__.get("forward") is stand_in:
            _put_back(module, around.patched)
        else:
            around.is_wrapped = True  # or replaced
    module.__dict__.pop(_AROUND, None)


def _put_back(module: nn.Module, patched: Callable[..., Any] | None) -> None:
    del module.__dict__[_AROUND], module.__dict__["forward"]
    if patched is not None:
        module.__dict__["forward"] = patched


class Entry:
    """Stands in for a method of a model beside its forward that is a step: `run(method, args, kwargs)` in its place."""

    def __init__(self, model: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self._model, self._name, self._run = model, name, run
        self._method = getattr(model, name)
        functools.update_wrapper(self, self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._method, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy is a plain module: give it the method of its class.
        return functools.partial, (getattr(type(self._model), self._name), self._model)


def enter_by(model: nn.Module, name: str, run: Callable[..., Any]) -> Callable[[], None]:
    """Run `run(method, args, kwargs)` whenever the method is called; returns what undoes it."""
    if isinstance(model.__dict__.get(name), functools.partial):
        del model.__dict__[name]  # a copy of an offloaded model
    return put(model, name, Entry(model, name, run))


def put(module: nn.Module, name: str, value: Callable[..., Any]) -> Callable[[], None]:
    """Make it an attribute of this instance; returns what undoes that, where nobody has put another there since."""
    given = module.__dict__.get(name)
    module.__dict__[name] = value

    def undo() -> None:
        if module.__dict__.get(name) is value:
            del module.__dict__[name]
            if given is not None:
                module.__dict__[name] = given

    return undo


class RefuseApply:
    """Stands in for a module's `_apply`, through which `.to()`, `.cuda()`, `.half()` and their like all go."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self.name = name

    def __call__(self, fn: object, recurse: bool = True) -> nn.Module:
        raise OffloadError(
            "You can't move a model that has some modules offloaded, nor change its dtype: weightstream keeps the "
            f"weights of {self.name or type(self._module).__name__} where its plan put them. Call "
            "model.weightstream.remove() first, or pass device= and dtype= when you offload or load."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy is a plain module: give it the method of its class.
        return functools.partial, (type(self._module)._apply, self._module)


def refuse_moves(model: nn.Module) -> Callable[[], None]:
    """Refuse moves and dtype changes of every module of the model; returns what undoes it."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        module.__dict__["_apply"] = RefuseApply(module, name)

    def undo() -> None:
        for module in modules.values():
            module.__dict__.pop("_apply", None)

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
        if owner := _owner(module.__dict__):
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
            where = name or apply.name or type(module).__name__
            raise OffloadError(f"{where} is already offloaded by weightstream: call its streamer's remove() first")
