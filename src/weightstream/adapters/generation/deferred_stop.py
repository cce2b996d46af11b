"""The check of transformers' `generate` whether all texts have ended, made one step late. Knows no weights.

After each token the loop asks the device whether all texts have ended, and queues the next step once it has the answer:
the device is idle for 1 to 3 ms [H200]. transformers can check a step late, and then takes back the surplus step, but
does so on mps only. The names are of transformers 5.17 and later, which does not promise to keep them; a version
without them checks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch

NAME = "DeferredStopCheck"  # a class of transformers
_PLAIN = "_weightstream_plain"  # the attribute in which its replacement keeps it


class _Call(NamedTuple):
    """One `generate`. `is_ahead`: the host need not wait for the last step; `draws`: steps draw at random."""

    is_ahead: Callable[[], bool]
    draws: bool


_CALL: ContextVar[_Call | None] = ContextVar("_CALL", default=None)  # of this thread


class _Replaced:
    """The class of transformers, replaced while there is any call.

    It has no lock, which an interrupt could leave held: a call that begins while the last one ends may check at once.
    """

    def __init__(self) -> None:
        self._calls: set[object] = set()

    def enter(self, call: object) -> None:
        from transformers.generation import utils

        self._calls.add(call)
        kind = getattr(utils, NAME, None)
        if kind is not None and _PLAIN not in vars(kind):
            setattr(utils, NAME, _late(kind))

    def leave(self, call: object) -> None:
        from transformers.generation import utils

        self._calls.discard(call)
        kind = getattr(utils, NAME, None)
        if not self._calls and kind is not None and _PLAIN in vars(kind):
            setattr(utils, NAME, vars(kind)[_PLAIN])


_REPLACED = _Replaced()  # of the process, as the class is


@contextmanager
def a_step_late(is_ahead: Callable[[], bool], *, draws: bool) -> Iterator[None]:
    """Inside, this thread's `generate` checks a step late while it `is_ahead`, where its cache and its device allow it.

    `draws`: steps draw at random, so the random state is taken back with a surplus step.
    """
    call = object()
    try:
        _REPLACED.enter(call)
        token = _CALL.set(_Call(is_ahead, draws))
        try:
            yield
        finally:
            _CALL.reset(token)
    finally:
        _REPLACED.leave(call)


def _has_events(device: torch.device) -> bool:
    return device.type != "cpu"


@cache
def _late(base: Any) -> Any:
    class Late(base):  # type: ignore[misc]
        def __init__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_ids, *args, **kwargs)
            self._call = _CALL.get()
            self._random = torch if input_ids.device.type == "cpu" else torch.get_device_module(input_ids.device)
            self._states: list[torch.Tensor] = []  # random states after each of the last two steps

        @staticmethod
        def is_supported(device: torch.device, *args: Any, **kwargs: Any) -> bool:
            is_late = _CALL.get() is not None and _has_events(device)
            return bool(base.is_supported(torch.device("mps") if is_late else device, *args, **kwargs))

        def __call__(self, unfinished_sequences: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
            if self._call is not None and self._call.draws:
                self._states = [*self._states[-1:], self._random.get_rng_state()]
            if super().__call__(unfinished_sequences, *args, **kwargs):
                return True
            # not ahead: check at once, which waits for the device
            return self._call is not None and not self._call.is_ahead() and bool(unfinished_sequences.max() == 0)

        def finish(self) -> int:
            undone: int = super().finish()
            if undone and self._states and torch.equal(self._states[-1], self._random.get_rng_state()):
                self._random.set_rng_state(self._states[-1 - undone])  # else other code has seeded the generator since
            return undone

    setattr(Late, _PLAIN, base)
    return Late
