"""The modules of an offloaded model: what runs in place of their forwards, and what tells that they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weightstream.plan.plan import Plan
from weightstream.runtime import guards, ops
from weightstream.runtime.leaves import Role, leaves_of
from weightstream.runtime.watch import reading_module
from weightstream.runtime.weights import UnitModule

Run = Callable[..., Any]  # (forward, args, kwargs) -> output; of a unit its index comes first


class Attachment:
    """Stands around the forwards of a model and of its units, from `attach` to `detach`."""

    def __init__(
        self, model: nn.Module, units: Sequence[UnitModule], streamer: ops.Units, run_step: Run, run_unit: Run
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.session = ops.Session(streamer)  # by which compiled code finds the streamer
        self._streamer = streamer
        self._run_step = run_step
        self._run_unit = run_unit
        self._undo: list[Callable[[], None]] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._known: frozenset[int] = frozenset()

    def attach(self, plan: Plan) -> None:
        """Run `run_step` in place of the model's forward, and `run_unit` in place of every unit's that opens."""
        opened = [index for index in range(len(self.units)) if plan.opens(index)]
        self.session.streams, self.session.traced = bool(opened), False
        for index in opened:
            for module in (self.units[index].module, *self.units[index].also):
                self._undo.append(guards.surround(module, partial(self._run_unit, index), self.session, index))
        self._undo.append(guards.surround(self.model, self._run_step, self.session))
        self._undo.append(guards.refuse_moves(self.model))
        self._known = self._tensor_ids()
        setattr(self.model, guards.ATTRIBUTE, self._streamer)
        self._undo.append(lambda: self.model.__dict__.pop(guards.ATTRIBUTE, None))

    def detach(self) -> None:
        """Give the modules back as they were; may be called twice."""
        while self._undo:
            self._undo.pop()()

    def was_replaced(self) -> bool:
        """Whether parameters or modules were added or replaced since `attach`."""
        return self._tensor_ids() != self._known

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor object of the model."""
        return (leaf.tensor for leaf in leaves_of(self.model))

    def refuse_foreign(self) -> None:
        """Raise `OffloadError` if another library has put its hooks on a unit since."""
        guards.refuse_foreign({unit.name: unit.module for unit in self.units})

    def trains(self, unit: int) -> bool:
        """Whether a module of the unit is in training mode, in which norms update their buffers."""
        return any(module.training for module in self.units[unit].module.modules())

    def hide(self, unit: int) -> None:
        """Compilers may not look into the unit: its kernels might run before its weights are there."""
        for module in (self.units[unit].module, *self.units[unit].also):
            guards.hide(module)

    def reader(self) -> str:
        """The name of the innermost module whose method is on this thread's stack; empty if none is."""
        return reading_module(self._names) or ""

    def _tensor_ids(self) -> frozenset[int]:
        return frozenset(id(leaf.tensor) for leaf in leaves_of(self.model) if leaf.role is not Role.ATTRIBUTE)
