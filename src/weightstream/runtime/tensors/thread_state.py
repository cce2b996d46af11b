"""State that torch keeps for each thread. The package's code changes it, and restores it after an error or interrupt.

A `with` block does not ensure this. An interrupt may come after its last line and before its exit; the block is then
never left, and its mode stays on for good. With gradients off a model could not train any more; with calls hidden from
the classes of tensors, an update of a weight between steps would not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch._C import _autograd, _len_torch_dispatch_stack, _len_torch_function_stack, _pop_torch_function_stack
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")

_without_classes: Any = torch._C._disabled_torch_function_impl


def quietly(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call `func` so that the classes of tensors, such as guarded ones, do not see its calls of torch."""
    return _without_classes(func, (), args, kwargs)  # enters and leaves in C, so that no interrupt comes in between


def unrecorded(work: Callable[[], _Result]) -> _Result:
    """Run `work` so that `torch.jit.trace`, if it records this thread, does not see its calls of torch."""
    state = torch._C._get_tracing_state()
    if state is None:
        return work()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return work()
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def unseen(method: _Method) -> _Method:
    """Decorate a method so that it always runs as in `quietly`."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _without_classes(method, (), args, kwargs)

    return cast(_Method, call)


class ThreadState:
    """The calling thread's grad mode, saved-tensor hooks, dispatch and function modes, and autocast cache switch.

    With `device`, an accelerator, also which device and which of its streams are current.
    """

    __slots__ = ("_grad", "_hooks", "_index", "_keeps_casts", "_num_dispatch", "_num_function", "_stream")

    def __init__(self, device: torch.device | None = None) -> None:
        self._grad = torch.is_grad_enabled()
        self._keeps_casts = torch.is_autocast_cache_enabled()
        self._hooks = innermost_hooks()
        self._num_function = _len_torch_function_stack()
        self._num_dispatch = _len_torch_dispatch_stack()
        has_streams = device is not None and device.type != "cpu"
        self._index = torch.accelerator.current_device_index() if has_streams else None
        self._stream = torch.accelerator.current_stream(device) if has_streams else None

    def restore(self) -> None:
        """Restore the state; leave modes and hooks that were entered since."""
        torch.set_grad_enabled(self._grad)
        torch.set_autocast_cache_enabled(self._keeps_casts)
        # Torch reports only the innermost pair of hooks, not how many are entered. So a pair that is entered again
        # inside of itself counts as entered once.
        while (innermost := innermost_hooks()) is not None and innermost != self._hooks:
            _autograd._pop_saved_tensors_default_hooks()
        while _len_torch_function_stack() > self._num_function:
            _leave(_get_current_function_mode(), _pop_torch_function_stack)
        while _len_torch_dispatch_stack() > self._num_dispatch:
            leave_dispatch_mode(_get_current_dispatch_mode())
        if self._stream is not None and self._index is not None:
            torch.accelerator.set_stream(self._stream)  # makes its device the current one
            torch.accelerator.set_device_index(self._index)


def innermost_hooks() -> Any:
    """The hooks of saved tensors that were entered last, a pair (pack, unpack); None if none is in force."""
    return _autograd._top_saved_tensors_default_hooks(True)


def leave_dispatch_mode(mode: Any) -> None:
    """Leave the innermost dispatch mode, also where an interrupt has cut its entry or exit."""
    _leave(mode, _pop_mode)


def _leave(mode: Any, pop: Callable[[], Any]) -> None:
    try:
        mode.__exit__(None, None, None)
    except IndexError:  # an interrupt cut its entry, or its exit, which had undone a part already
        pop()


def restoring(work: Callable[[], _Result], device: torch.device | None = None) -> _Result:
    """Run `work`; if it fails, restore the thread's state as it was before."""
    state = ThreadState(device)
    try:
        return work()
    except BaseException:
        state.restore()
        raise


def restored(method: _Method) -> _Method:
    """Decorate a method so that it always runs as in `restoring`."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return restoring(partial(method, *args, **kwargs))

    return cast(_Method, call)


@contextmanager
def restored_block(device: torch.device | None = None) -> Iterator[None]:
    """As `restoring`, for a `with` block. An interrupt between the block's last line and its exit is not seen."""
    state = ThreadState(device)
    try:
        yield
    except BaseException:
        state.restore()
        raise
