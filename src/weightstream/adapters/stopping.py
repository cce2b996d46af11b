"""When the loop of transformers' `generate` looks whether its texts have ended. Knows no weights.

After each token it asks the device whether all texts have ended, and queues the next step when it has the answer: the
device waits for 1 to 3 ms [H200]. It can ask a step late, and takes back the step that is one too many; it does so on
mps alone. Names that transformers does not promise to keep, of 5.17 and later; one without them looks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch

from weightstream.adapters import hf_private

NAME = "DeferredStopCheck"  # of a class


class _Call(NamedTuple):
    """A `generate`. `is_ahead`: the host need not wait for what it queued last; `draws`: steps draw at random."""

    is_ahead: Callable[[], bool]
    draws: bool


_CALL: ContextVar[_Call | None] = ContextVar("_CALL", default=None)  # of this thread


class _Replaced:
    """That class, replaced while any call is inside."""

    def __init__(self) -> None:
        self._lock, self._calls, self._around = Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        from transformers.generation import utils

        with self._lock:
            if not self._calls and hasattr(utils, NAME):
                self._around.enter_context(hf_private.set_inside(utils, NAME, _late(getattr(utils, NAME))))
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if not self._calls:
                self._around.close()


_REPLACED = _Replaced()  # of the process, as the class is


@contextmanager
def a_step_late(is_ahead: Callable[[], bool], *, draws: bool) -> Iterator[None]:
    """Inside, this thread's `generate` looks a step late while it `is_ahead`, where its cache and its device allow it.
    `draws`: what a step draws at random is taken back with it."""
    with _REPLACED:
        token = _CALL.set(_Call(is_ahead, draws))
        try:
            yield
        finally:
            _CALL.reset(token)


def _has_events(device: torch.device) -> bool:
    return device.type != "cpu"


@cache
def _late(base: Any) -> Any:
    class Late(base):  # type: ignore[misc]
        def __init__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_ids, *args, **kwargs)
            self._call = _CALL.get()
            self._random = torch if input_ids.device.type == "cpu" else torch.get_device_module(input_ids.device)
            self._states: list[torch.Tensor] = []  # behind the last two steps

        @staticmethod
        def is_supported(device: torch.device, *args: Any, **kwargs: Any) -> bool:
            is_late = _CALL.get() is not None and _has_events(device)
            return bool(base.is_supported(torch.device("mps") if is_late else device, *args, **kwargs))

        def __call__(self, unfinished_sequences: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
            if self._call is not None and self._call.draws:
                self._states = [*self._states[-1:], self._random.get_rng_state()]
            if super().__call__(unfinished_sequences, *args, **kwargs):
                return True
            return self._call is not None and not self._call.is_ahead() and bool(unfinished_sequences.max() == 0)

        def finish(self) -> int:
            undone: int = super().finish()
            if undone and self._states and torch.equal(self._states[-1], self._random.get_rng_state()):
                self._random.set_rng_state(self._states[-1 - undone])  # else another has seeded it since
            return undone

    return Late
