"""A training step from shapes only: its work in forward, recompute and backward, and the memory that it keeps.

What `footprint.py` is for a forward. `training_step.py` runs the step, and `block_series.py` completes it by the blocks
that were left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from weightstream.adapters.tracing import meta_copy
from weightstream.adapters.tracing.block_series import Series, Visit, series_of
from weightstream.adapters.tracing.footprint import Footprint, footprint_of
from weightstream.adapters.tracing.forward import run_on_copy
from weightstream.adapters.tracing.known_values import KnownValues
from weightstream.adapters.tracing.op_cost import CountedLaunch, Launch
from weightstream.adapters.tracing.op_timing import Trial
from weightstream.adapters.tracing.training_step import Trained, TrainingStep, autocast_dtype, prepare_training
from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Op, mean
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.weights.alias_groups import UnitModule
from weightstream.settings.config import TrainConfig

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingFootprint:
    """Memory and work of a training step, apart from weights.

    Attributes:
        step: its calls, operators and reads, those of the backward after those of the forward. The activations are
            those of the whole model, without gradients of parameters.
        num_forward_calls: calls of modules in the forward; others recompute.
        num_forward_ops: operators of the forward and of the loss.
        trained: elements of trainable parameters.
        loss_nbytes: bytes by which the loss, with its logits, raises the peak of the activations.
        series: the lists of repeated blocks.
    """

    step: Footprint
    num_forward_calls: int
    num_forward_ops: int
    trained: Trained
    loss_nbytes: int
    series: tuple[Series, ...]

    @property
    def recomputes(self) -> bool:
        """Whether the backward computes parts of the forward again."""
        return self.num_forward_calls < len(self.step.calls)

    @property
    def launches(self) -> tuple[CountedLaunch, ...]:
        """The different operators of the step."""
        return self.step.launches

    def tried(self, trials: Mapping[Launch, Trial]) -> TrainingFootprint:
        """This footprint with the measured times of the operators in `trials`; their workspaces are known already."""
        step = self.step.tried(trials)
        return replace(self, step=replace(step, activation_nbytes=self.step.activation_nbytes))

    def turns(self, units: Sequence[UnitModule]) -> Turns:
        """The turns of these units in a step."""
        index = {id(module): i for i, unit in enumerate(units) for module in (unit.module, *unit.also)}
        visits = _Followed(self, units, index).visits
        for series in self.series:
            visits = list(series.completed(visits, units, index))
        return Turns(len(units), visits)


class Turns(NamedTuple):
    """The turns of units in a training step, in order; `num` is the number of units."""

    num: int
    visits: Sequence[Visit]

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(visit.unit for visit in self.visits)

    @property
    def forward(self) -> tuple[tuple[Op, ...], ...]:
        """The ops of each unit in one call of the forward; for several calls their mean, op by op."""
        calls: list[list[list[Op]]] = [[] for _ in range(self.num)]
        for visit in self.visits:
            if not visit.is_backward:
                calls[visit.unit].append(visit.ops)
        return tuple(map(mean, calls))

    @property
    def backward(self) -> tuple[tuple[Op, ...], ...]:
        """The ops of each unit in all its turns of the backward, recomputing included."""
        ops: list[list[Op]] = [[] for _ in range(self.num)]
        for visit in self.visits:
            if visit.is_backward:
                ops[visit.unit] += visit.ops
        return tuple(map(tuple, ops))


class _Followed:
    """The turns of the units that were followed, from the calls and the operators of a step."""

    def __init__(self, of: TrainingFootprint, units: Sequence[UnitModule], index: Mapping[int, int]) -> None:
        self.visits: list[Visit] = []
        self._units, self._index = units, index
        self._around: list[int] = []  # call -> the innermost unit around it
        self._visit_of: list[Visit | None] = []  # call -> the turn that the unit's call around it began
        early: list[Op] = []
        for position, launch in enumerate(of.step.ops):
            self._begin(of, launch.num_calls)
            is_backward = position >= of.num_forward_ops
            unit = self._around[launch.call] if launch.call >= 0 else -1
            if not is_backward and unit >= 0 and (visit := self._visit_of[launch.call]) is not None:
                visit.ops.append(launch.op)
            elif is_backward and unit >= 0 and not units[unit].enclosing:
                self._turn_back(unit)
                self.visits[-1].ops.append(launch.op)
            elif self.visits:
                self.visits[-1].ops.append(replace(launch.op, after=True))
            else:
                early.append(replace(launch.op, after=True))
        self._begin(of, len(of.step.calls))
        for last in self.visits[-1:]:
            last.ops.extend(early)

    def _begin(self, of: TrainingFootprint, num_calls: int) -> None:
        """Take note of the calls that have begun, of which there are `num_calls`."""
        for number, call in enumerate(of.step.calls[len(self._around) : num_calls], len(self._around)):
            self._around.append(self._around[call.caller] if call.caller >= 0 else -1)
            self._visit_of.append(self._visit_of[call.caller] if call.caller >= 0 else None)
            unit = self._index.get(id(call.module))
            if unit is None:
                continue
            self._around[-1] = unit
            if number < of.num_forward_calls:
                self.visits.append(Visit(unit, False, []))
                self._visit_of[-1] = self.visits[-1]
            elif not self._units[unit].enclosing:
                self._turn_back(unit)

    def _turn_back(self, unit: int) -> None:
        """The unit is open in the backward: its turn begins, unless it is open already."""
        last = self.visits[-1] if self.visits else None
        if last is None or not last.is_backward or last.unit != unit:
            self.visits.append(Visit(unit, True, []))


def follow_training(
    model: nn.Module,
    train: TrainConfig,
    blocks: Sequence[nn.Module],
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    limit_s: float = math.inf,
    device: torch.device = _CPU,
) -> TrainingFootprint:
    """Follow a training step on shapes only. Model and arguments do not change; no weight is read.

    If the model has no trainable parameters, it gets adapters of rank `train.rank` at every linear layer of its blocks,
    in float32. A model in 16 bits is assumed to train under autocast, as peft's adapters do.

    Args:
        model: the model.
        train: the step; its `batch` and `tokens` count only without arguments.
        blocks: the repeated blocks of the model.
        args, kwargs: the arguments of a call; both None: token ids, which a causal language model of transformers
            takes. The loss is that of the output, or a mean of squares.
        limit_s: seconds that it may take.
        device: the device of a real call. Its random state is restored.

    Raises:
        UnsupportedError: the control flow depends on values, the model cannot be copied without its weights, it takes
            other inputs, or its Python code takes too long.
    """
    values = () if args is None and kwargs is None else (tuple(args or ()), dict(kwargs or {}))
    dtype = autocast_dtype(model, device)
    short = tuple(series_of(model, blocks))
    whole = tuple(each.whole() for each in short)
    try:
        return run_on_copy(model, partial(_trained, model, train, short, values, dtype), values, limit_s, device)
    except UnsupportedError:
        if short == whole:
            raise
    # it may be that the model's code needs the blocks that were left out
    return run_on_copy(model, partial(_trained, model, train, whole, values, dtype), values, limit_s, device)


@torch.inference_mode(False)
def _trained(
    model: nn.Module,
    train: TrainConfig,
    series: tuple[Series, ...],
    values: tuple[Any, ...],
    dtype: torch.dtype | None,
    made: meta_copy.Copied,
    until_s: float,
    storages: meta_copy.Storages,
) -> TrainingFootprint:
    trainable = prepare_training(made, model, train, series)
    known = KnownValues(zip(tensors_in(values), tensors_in(made.values), strict=True))
    step = TrainingStep(made, trainable, series, until_s, storages, known, dtype)
    return TrainingFootprint(
        step=replace(footprint_of([step], made), activation_nbytes=step.peak_nbytes()),
        num_forward_calls=step.num_forward_calls,
        num_forward_ops=step.num_forward_ops,
        trained=trainable.trained,
        loss_nbytes=step.peak_nbytes() - step.peak_nbytes(with_loss=False),
        series=series,
    )
