"""The operators `wait` and `release`, which keep the order of copies in compiled and captured steps.

Both declare that they mutate the activations, so that no compiler removes them or moves a kernel of the unit past
them. They also declare that they mutate a token that all of them share, so that their own order is fixed.

The unit is a tensor, not a number: a number would be a constant of the graph. Then each block would be compiled by
itself, and compiled code that another process loads, or that a second engine runs, would look for the streamer that it
was compiled with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from weightstream.errors import OffloadError
from weightstream.runtime.tensors.pytree import tensors_in


class Units(Protocol):
    """The units of a streamer, which the operators wait for and release."""

    def wait_unit(self, unit: int) -> None: ...

    def release_unit(self, unit: int) -> None: ...


_UNITS: WeakValueDictionary[int, Units] = WeakValueDictionary()
_HANDLES = itertools.count()
_MOST_UNITS = 1 << 20  # of one streamer
_LIBRARY = torch.library.Library("weightstream", "DEF")


class OpSession:
    """How compiled code finds a streamer; `units` is None if no unit runs compiled.

    `fixed`: whether the weights have fixed addresses now, or nothing `streams`.
    `traced`: whether any compiled code, which then holds addresses, has called the operators since the model was
    attached.
    """

    def __init__(self, units: Units | None = None) -> None:
        self._handle = next(_HANDLES)
        self.token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self.fixed = False
        self.streams = True
        self.traced = False
        if units is not None:
            _UNITS[self._handle] = units

    def tensor_of(self, unit: int) -> torch.Tensor:
        """The tensor by which the operators identify a unit of this streamer."""
        return torch.tensor(self._handle * _MOST_UNITS + unit, device="cpu")

    def close(self) -> None:
        """Forget the streamer: compiled code that is called later raises the reason."""
        _UNITS.pop(self._handle, None)


def wait(session: OpSession, unit: torch.Tensor, arguments: Any) -> None:
    """Order all later kernels after the unit's fill."""
    torch.ops.weightstream.wait(_mutable(arguments), session.token, unit)


def release(session: OpSession, unit: torch.Tensor, outputs: Any) -> None:
    """The unit's last kernel is queued."""
    torch.ops.weightstream.release(_mutable(outputs), session.token, unit)


def _mutable(values: Any) -> list[torch.Tensor]:
    """All tensors except expanded ones: torch refuses writes to tensors whose elements share memory."""
    found = tensors_in(values)
    return [t for t in found if all(step or size == 1 for size, step in zip(t.shape, t.stride(), strict=True))]


def _found(unit: torch.Tensor) -> tuple[Units, int]:
    handle, index = divmod(int(unit), _MOST_UNITS)
    if (units := _UNITS.get(handle)) is None:
        raise OffloadError("a compiled model was called whose streamer was removed: call the model itself")
    return units, index


def _wait(xs: list[torch.Tensor], token: torch.Tensor, unit: torch.Tensor) -> None:
    units, index = _found(unit)
    units.wait_unit(index)


def _release(outs: list[torch.Tensor], token: torch.Tensor, unit: torch.Tensor) -> None:
    units, index = _found(unit)
    units.release_unit(index)


def _define(schema: str, implementation: Callable[..., None]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, lambda *args: None, "Meta")


_define("wait(Tensor(a!)[] xs, Tensor(b!) token, Tensor unit) -> ()", _wait)
_define("release(Tensor(a!)[] outs, Tensor(b!) token, Tensor unit) -> ()", _release)
