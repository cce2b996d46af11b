"""The names of tensors that `DistributedDataParallel` leaves alone: every rank streams its frozen weights itself.

It would broadcast them at its start and copy them to the device for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from weightstream.runtime.streamer import forward_patch

_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"
_PREFIXES = ("", "base_model.model.")  # of the model itself, and of one that peft has wrapped


class _Names:
    """Iterates over the present names of these tensors, as adapters that wrap a layer change them."""

    def __init__(self, model: nn.Module, frozen: Callable[[], Iterable[torch.Tensor]], before: Iterable[str]) -> None:
        self._model = model
        self._frozen = frozen
        self._before = tuple(before)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._before,)  # a copy of the model streams nothing

    def __iter__(self) -> Iterator[str]:
        yield from self._before
        frozen = {id(tensor) for tensor in self._frozen()}
        every = (*self._model.named_parameters(), *self._model.named_buffers())
        for name in (name for name, tensor in every if id(tensor) in frozen):
            yield from (prefix + name for prefix in _PREFIXES)


def leave_alone(model: nn.Module, frozen: Callable[[], Iterable[torch.Tensor]]) -> Callable[[], None]:
    """Have `DistributedDataParallel` leave the tensors `frozen()` alone; returns a function that undoes it."""
    before = getattr(model, _ATTRIBUTE, ())
    return forward_patch.set_attribute(model, _ATTRIBUTE, _Names(model, frozen, before))  # type: ignore[arg-type]
