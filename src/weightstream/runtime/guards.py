"""What a model refuses while it is offloaded, and what its copies do not inherit. Knows no plan and no device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from weightstream.errors import OffloadError, UnsupportedError

ATTRIBUTE = "weightstream"  # where a model keeps its streamer


class Around:
    """Stands in for a module's `forward`. Not a hook: PyTorch's fused paths, and so the bits, change with hooks.

    `run` gets the plain forward and its arguments. A deepcopy or pickle of the module gets the plain forward.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module = module
        self._run = run
        self._forward = module.forward
        self._patched = module.__dict__.get("forward")  # somebody's own, on this instance
        functools.update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._forward, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._patched is not None:
            return _same, (self._patched,)
        return functools.partial, (type(self._module).forward, self._module)

    def undo(self) -> None:
        """Put back what was there, unless somebody has replaced us since."""
        if self._module.__dict__.get("forward") is not self:
            return
        del self._module.__dict__["forward"]
        if self._patched is not None:
            self._module.__dict__["forward"] = self._patched


def _same(value: Any) -> Any:
    return value


def surround(module: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Run `run(forward, args, kwargs)` whenever the module's forward is called; returns what undoes it."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(f"{type(module).__name__} is a ScriptModule: its forward cannot be followed")
    around = module.__dict__["forward"] = Around(module, run)
    return around.undo


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


def refuse_foreign(modules: dict[str, nn.Module]) -> None:
    """Raise `OffloadError` if another library offloads one of these modules, or weightstream does already."""
    for name, module in modules.items():
        for attribute, owner in (("_hf_hook", "accelerate"), ("_diffusers_hook", "diffusers")):
            if attribute in module.__dict__ and getattr(module, attribute) is not None:
                raise OffloadError(
                    f"{name or type(module).__name__} is already managed by {owner} ({attribute}): remove its hooks "
                    "first. Two kinds of offloading on one model cannot both know where a weight is."
                )


def refuse_twice(model: nn.Module) -> None:
    """Raise `OffloadError` if the model or a part of it is offloaded by weightstream."""
    for name, module in model.named_modules():
        apply = module.__dict__.get("_apply")
        if isinstance(apply, RefuseApply):
            where = name or apply.name or type(module).__name__
            raise OffloadError(f"{where} is already offloaded by weightstream: call its streamer's remove() first")
