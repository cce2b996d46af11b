"""State that torch keeps for each thread: the package's code changes it, and restores it wherever that code is cut.

A `with` block does not ensure this. An interrupt may come after its last line and before its exit, and a mode that was
left entered stays for good. With gradients off a model could not train any more; with calls hidden from the classes of
tensors, an update of a weight between steps would not be seen.
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
    """Call it; the classes of tensors, such as guarded ones, do not see the calls of torch inside."""
    return _without_classes(func, (), args, kwargs)  # enters and leaves in C, so that no interrupt comes in between


def unseen(method: _Method) -> _Method:
    """A function that is always called so."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _without_classes(method, (), args, kwargs)

    return cast(_Method, call)


class ThreadState:
    """Grad mode, hooks of saved tensors, modes of operators and functions, and whether autocast caches its casts, of
    the calling thread.

    With `device`, an accelerator, also which device and which of its streams are current.
    """

    __slots__ = ("_grad", "_hooks", "_index", "_keeps_casts", "_num_dispatch", "_num_function", "_stream")

    def __init__(self, device: torch.device | None = None) -> None:
        self._grad = torch.is_grad_enabled()
        self._keeps_casts = torch.is_autocast_cache_enabled()
        self._hooks = _hooks()
        self._num_function = _len_torch_function_stack()
        self._num_dispatch = _len_torch_dispatch_stack()
        has_streams = device is not None and device.type != "cpu"
        self._index = torch.accelerator.current_device_index() if has_streams else None
        self._stream = torch.accelerator.current_stream(device) if has_streams else None

    def restore(self) -> None:
        """Restore the state; leave modes and hooks that were entered since."""
        torch.set_grad_enabled(self._grad)
        torch.set_autocast_cache_enabled(self._keeps_casts)
        # A pair of hooks that is entered again inside of itself counts as one: torch gives no depth.
        while (found := _hooks()) is not None and found != self._hooks:
            _autograd._pop_saved_tensors_default_hooks()
        while _len_torch_function_stack() > self._num_function:
            _leave(_get_current_function_mode(), _pop_torch_function_stack)
        while _len_torch_dispatch_stack() > self._num_dispatch:
            _leave(_get_current_dispatch_mode(), _pop_mode)
        if self._stream is not None and self._index is not None:
            torch.accelerator.set_stream(self._stream)  # makes its device the current one
            torch.accelerator.set_device_index(self._index)


def _hooks() -> object:
    """The hooks of saved tensors that were entered last."""
    return _autograd._top_saved_tensors_default_hooks(True)


def _leave(mode: Any, pop: Callable[[], Any]) -> None:
    try:
        mode.__exit__(None, None, None)
    except IndexError:  # it was being left when it was cut
        pop()


def restoring(work: Callable[[], _Result], device: torch.device | None = None) -> _Result:
    """Run it; where it fails, the thread's state is as before."""
    state = ThreadState(device)
    try:
        return work()
    except BaseException:
        state.restore()
        raise


def restored(method: _Method) -> _Method:
    """A function that is always run so."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return restoring(partial(method, *args, **kwargs))

    return cast(_Method, call)


@contextmanager
def restored_block(device: torch.device | None = None) -> Iterator[None]:
    """The same for a block that fails inside; an interrupt between its last line and its exit is not seen."""
    state = ThreadState(device)
    try:
        yield
    except BaseException:
        state.restore()
        raise
