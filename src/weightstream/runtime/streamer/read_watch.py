"""The watch of a step: sees reads of weights outside of their unit's forward. Knows no plan and no device.

A parent may read a child's weight without calling the child, so that no unit opens. During a watched step a dispatch
mode sees every operator with its arguments. In its backward pass another one sees those of the units' nodes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightstream.runtime.tensors.leaves import plain_tensors
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.tensors.thread_state import leave_dispatch_mode

_COMPILER = "torch._dynamo.eval_frame"  # a module that takes a second to import


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that sees operators of higher order, too, and does not load the compiler."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, a second, to keep itself out of `__torch_dispatch__`


class EagerStance:
    """From `begin` to `end`, functions of torch.compile run eager. Under a mode they would be given up for good.

    Torch has one stance for all threads. After an interrupt at any line, `end` restores the one before.
    """

    def __init__(self) -> None:
        self._before: Any = None  # torch's, if it is to be restored

    def begin(self) -> None:
        compiler: Any = sys.modules.get(_COMPILER)
        if compiler is None or compiler._stance.stance == "force_eager":  # by the user, or by another thread's watch
            return
        self._before = compiler._stance
        try:
            torch.compiler.set_stance("force_eager")
        except RuntimeError:  # in a function that torch.compile has compiled, and that runs this one eager
            self._before = None

    def end(self) -> None:
        if self._before is not None:
            sys.modules[_COMPILER]._set_stance(self._before)
            self._before = None


class ReadWatch(OperatorMode):
    """Calls `on_read(tensor)` before any operator that takes one of the watched tensor objects.

    Calls `on_early()` after an operator that takes only watched tensors and other `weights`, and no activations: a
    compiler would be free to run it before the fill. This is a dispatch mode, as a function mode would turn PyTorch's
    fused paths off and change bits.
    """

    def __init__(
        self,
        watched: Iterable[torch.Tensor],
        weights: Iterable[torch.Tensor],
        on_read: Callable[[torch.Tensor], None],
        on_early: Callable[[], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = {id(t) for t in watched}
        # also views of weights; kept alive, so that no other tensor gets their ids
        self._weights = {id(t): t for t in weights}
        self._streamed = set(self._watched)
        self._on_read = on_read
        self._on_early = on_early
        self.made: list[weakref.ref[torch.Tensor]] = []  # outputs of operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:  # `tensor.data = …`, to show a view
            return func(*args, **(kwargs or {}))
        read = list(plain_tensors(tensors_in((args, kwargs))))
        for tensor in read:
            if id(tensor) in self._watched:
                self._on_read(tensor)
        output = func(*args, **(kwargs or {}))
        self.made += map(weakref.ref, tensors_in(output))
        if any(id(t) in self._streamed for t in read) and all(id(t) in self._weights for t in read):
            if not func.is_view:
                self._on_early()
            else:
                views = {id(t): t for t in plain_tensors(tensors_in(output))}
                self._weights |= views
                self._streamed |= views.keys()
        return output


class MemoryWatch(OperatorMode):
    """Calls `on_read(tensor)` before any operator that is given memory in one of the spans, except to make a view."""

    def __init__(self, spans: Sequence[tuple[int, int]], on_read: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spans = spans
        self._on_read = on_read

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def cancel(self) -> None:
        """End it after an error, when autograd has restored the thread's modes, but not what torch counts of them."""
        torch._C._push_on_torch_dispatch_stack(self)
        leave_dispatch_mode(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and func is not torch.ops.aten._has_compatible_shallow_copy_type.default:
            for tensor in plain_tensors(tensors_in((args, kwargs))):
                at = address_of(tensor)
                if tensor.numel() and any(begin <= at < end for begin, end in self._spans):
                    self._on_read(tensor)
        return func(*args, **(kwargs or {}))


def address_of(tensor: torch.Tensor) -> int:
    """The address of the tensor's first element; 0 if it has no memory of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def reading_module(known: dict[int, str]) -> str | None:
    """The name of the innermost of the known modules whose method is on this thread's stack; None if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in known:
            return known[id(owner)]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def calling_method(model: nn.Module) -> str | None:
    """The name of the outermost public method of the model's class that is on this thread's stack; None for none."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_locals.get("self") is model and not name.startswith("_") and not hasattr(nn.Module, name):
            found = name if callable(getattr(type(model), name, None)) else found
        frame = frame.f_back  # type: ignore[assignment]
    return found
