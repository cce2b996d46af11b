"""Plans of a pipeline: the shares of its components in the budget, and the time and memory of a call. Moves no bytes.

The pipeline is loaded, or it is in a folder whose weights are not read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from weightstream.adapters.diffusers import pipeline
from weightstream.adapters.diffusers.dry_run import ComponentCall, rehearse, runs
from weightstream.errors import ConfigError, OffloadError, PlanError
from weightstream.inputs.gathering import Gatherer, sketch_of
from weightstream.inputs.machine import dtypes_of
from weightstream.plan.candidates import Share
from weightstream.plan.pipeline import ComponentTurn, PipelinePlan, shares
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.schedule import aligned
from weightstream.settings.config import OffloadConfig

logger = logging.getLogger("weightstream")

_ROUNDED_NBYTES = 64 << 20  # for the rounding of the allocator's blocks, and tensors of the pipeline itself
_STEPS = 28  # assumed steps of a denoiser of which no call is known
_DENOISERS = ("transformer", "transformer_2", "unet", "controlnet", "prior")


class Component(Protocol):
    """A component: its planner's inputs, and the gatherer of inputs for a call."""

    @property
    def inputs(self) -> PlannerInputs: ...
    @property
    def gatherer(self) -> Gatherer: ...


class Components:
    """The components of a pipeline, as calls run them: as they are (`plain`), or cast to another dtype."""

    def __init__(
        self, plain: Mapping[str, Component], calls: Sequence[ComponentCall], sketch: Callable[[nn.Module], Component]
    ) -> None:
        self.plain = dict(plain)
        casts = {id(call.cast): call.cast for call in calls if call.cast is not None}
        self._cast = {key: sketch(module) for key, module in casts.items()}

    def of(self, call: ComponentCall) -> Component:
        """The component that the call runs."""
        return self.plain[call.component] if call.cast is None else self._cast[id(call.cast)]

    def inputs_of(self, call: ComponentCall) -> PlannerInputs:
        """The planner's inputs for the work of the call."""
        component = self.of(call)
        return component.gatherer.for_work(component.inputs, call.work, call.kind.what)


class PlannedFor(NamedTuple):
    """A component in the form that its share is planned for, plain or cast, and its planner's inputs."""

    component: Component
    inputs: PlannerInputs


class Shared(NamedTuple):
    """A component's part of the budget: its inputs with that share, and the plan of its weights without a cast."""

    inputs: PlannerInputs
    plan: Plan

    @property
    def share(self) -> Share:
        share = self.inputs.share
        assert share is not None
        return share


class SharedBudget(NamedTuple):
    """The part of each component in a budget, by name, and the bytes of memory that all components use in turn."""

    components: dict[str, Shared]
    block_nbytes: int


class Rehearsal(NamedTuple):
    """The calls of components in one call of a pipeline, and the gaps in this list, a sentence each."""

    calls: list[ComponentCall]
    notes: tuple[str, ...]


def rehearsed(pipe: Any, arguments: Mapping[str, Any]) -> list[ComponentCall]:
    """The calls of components in one call of a pipeline, as far as they are known before it runs."""
    calls, reason = rehearse(pipe, arguments)
    if reason:
        name = type(pipe).__name__
        logger.info("only the first %d calls of %s are known before it runs: %s", len(calls), name, reason)
    return calls


def rehearse_for_plan(pipe: Any, arguments: Mapping[str, Any]) -> Rehearsal:
    """As `rehearsed`, for a plan. A note is added if the last calls are unknown, such as those of a safety checker.

    Raises `OffloadError` if the dry run did not reach a call of a denoiser.
    """
    calls, reason = rehearse(pipe, arguments)
    if not reason:
        return Rehearsal(calls, ())
    if not any(call.component in _DENOISERS for call in calls):
        raise OffloadError(
            f"the calls of {type(pipe).__name__} are not known before it runs: {reason}. Give the keyword arguments of "
            "a typical call, such as prompt=, image=, height= and width="
        )
    note = f"the calls after {calls[-1].component} are not known before the pipeline runs: {reason}"
    return Rehearsal(calls, (note,))


def heaviest(parts: Components, calls: Sequence[ComponentCall]) -> dict[str, ComponentCall]:
    """For each component, the kind of call with the most bytes of weights, then the most frequent, then the one with
    the most activations."""
    nums = Counter(id(call.work) for call in calls)
    by_component: dict[str, ComponentCall] = {}
    for call in sorted(calls, key=lambda c: (_nbytes(parts.of(c).inputs), nums[id(c.work)], c.work.activation_nbytes)):
        by_component[call.component] = call
    return by_component


def known_of(parts: Components, calls: Sequence[ComponentCall]) -> dict[str, PlannedFor]:
    """The form and the inputs for which each component is planned.

    They are those of its `heaviest` call; or of the plain form, for the usual step, if there is no call, or if the form
    that the call runs has fewer bytes.
    """
    known = {name: PlannedFor(part, part.inputs) for name, part in parts.plain.items()}
    for name, call in heaviest(parts, calls).items():
        if _nbytes(parts.of(call).inputs) >= _nbytes(known[name].inputs):
            known[name] = PlannedFor(parts.of(call), parts.inputs_of(call))
    return known


def _nbytes(inputs: PlannerInputs) -> int:
    return inputs.grains[0].nbytes


def share_budget(
    parts: Components,
    known: Mapping[str, PlannedFor],
    calls: Sequence[ComponentCall],
    budget: int | None = None,
) -> SharedBudget:
    """The part of each component in the budget; `budget=None`: the budget of the settings.

    Raises `PlanError` if the components do not fit.
    """
    every = {name: planned_for.inputs for name, planned_for in known.items()}
    times = {name: _STEPS if name in _DENOISERS else 1 for name in every}
    times |= Counter(call.component for call in calls)
    budget = budget_of(every, calls) if budget is None else budget
    if sum(map(_nbytes, every.values())) > budget:  # any of them may have to stream
        # `complete` finds the facts that are slow to find, such as compressed sizes, if a plan within this budget can
        # depend on them. The parts of the budget are not known yet, so each component is asked with all of it.
        whole_budget = Share(0, budget)
        for name, planned_for in known.items():
            gatherer = planned_for.component.gatherer
            complete = gatherer.complete(replace(planned_for.inputs, share=whole_budget))
            every[name] = replace(complete, share=None)
    planned = shares(every, times, budget)
    ring_nbytes = block_nbytes([component.plan for component in planned.values()])
    shared: dict[str, Shared] = {}
    for name, (share, plan) in planned.items():
        share = share._replace(ring_nbytes=ring_nbytes)
        inputs, plain = replace(every[name], share=share), parts.plain[name]
        if known[name].component is not plain:  # the share was planned for the cast form; between calls it is plain
            inputs = replace(plain.inputs, share=share)
            plan = inputs.plan().plan
        shared[name] = Shared(inputs, plan)
    return SharedBudget(shared, ring_nbytes)


def block_nbytes(plans: Sequence[Plan]) -> int:
    """Bytes of the memory that these plans use in turn."""
    return aligned(max(aligned(plan.ring_nbytes) + plan.buffer_nbytes for plan in plans))


def budget_of(every: Mapping[str, PlannerInputs], calls: Sequence[ComponentCall]) -> int:
    """Bytes for the weights of all components: as configured, else the free memory minus the largest activations."""
    most = max((call.work.activation_nbytes for call in calls), default=0)
    budgets = []
    for inputs in every.values():
        planner = inputs.planner(0)
        demand = replace(planner.demand, activation_nbytes=max(most, planner.demand.activation_nbytes))
        budget = replace(planner, demand=demand).budget
        if budget is not None:
            budgets.append(budget)
    return min(budgets)


def plan_of_shares(
    calls: Sequence[ComponentCall],
    parts: Components,
    shared: SharedBudget,
    notes: tuple[str, ...] = (),
) -> PipelinePlan:
    """The plan of these calls, if each component has the plan of its part of the budget."""
    plans = {name: component.plan for name, component in shared.components.items()}
    shares_of = {name: component.share for name, component in shared.components.items()}
    return plan_of_call(calls, parts, plans, shares_of, shared.block_nbytes, notes)


def plan_of_call(
    calls: Sequence[ComponentCall],
    parts: Components,
    plans: Mapping[str, Plan],
    shared: Mapping[str, Share],
    nbytes: int,
    notes: tuple[str, ...] = (),
) -> PipelinePlan:
    """The plan of these calls, with predicted time and memory.

    Args:
        calls: the calls of components, in order.
        parts: the components.
        plans: the plan in force of each component, by name.
        shared: the share of each component in the budget, by name.
        nbytes: bytes of memory that the components use in turn.
        notes: gaps in the list of calls.

    Raises:
        PlanError: a component does not fit in its share once it is cast.
    """
    priced: dict[int, tuple[Plan, PlannerInputs]] = {}
    turns: list[ComponentTurn] = []
    for first, num in runs(calls):
        if id(first.work) not in priced:
            inputs, plan = parts.inputs_of(first), plans[first.component]
            if first.cast is not None:
                plan = replace(parts.of(first).inputs, share=shared[first.component]).plan().plan
            priced[id(first.work)] = _priced(plan, inputs), inputs
        plan, inputs = priced[id(first.work)]
        is_next = bool(turns) and turns[-1].component == first.component
        cold_s = 0.0
        if plan.first and not is_next:  # no compute hides the first copy of a turn
            cold_s = inputs.machine.profile.copy_s(plan.unit_nbytes[plan.first[0]])
        turns.append(ComponentTurn(component=first.component, entry=first.kind.what, num=num, plan=plan, cold_s=cold_s))
    machine = max((component.inputs.machine for component in parts.plain.values()), key=lambda m: m.free_nbytes)
    workspace = 0 if machine.on_cpu else machine.profile.workspace_nbytes + _ROUNDED_NBYTES
    free = 0 if machine.on_cpu else machine.free_nbytes
    return PipelinePlan(
        turns=tuple(turns),
        plans=dict(plans),
        block_nbytes=nbytes,
        workspace_nbytes=workspace,
        free_nbytes=free,
        notes=notes,
    )


def _priced(plan: Plan, inputs: PlannerInputs) -> Plan:
    """The plan with predictions for the work of a call."""
    index = inputs.grain_of(plan.manifest)
    order = inputs.grains[index].order
    return inputs.planner(index).priced(plan if order == plan.manifest.order else plan.reordered(order))


class PipelineSketch:
    """A pipeline of which only shapes are known. Makes plans of one of its calls, at any budget."""

    def __init__(self, parts: Components, calls: Sequence[ComponentCall], notes: tuple[str, ...] = ()) -> None:
        self._parts = parts
        self._calls = calls
        self._notes = notes
        self._known = known_of(parts, calls)
        self.budget = budget_of({name: planned_for.inputs for name, planned_for in self._known.items()}, calls)

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of all weights."""
        return sum(part.inputs.grains[0].plain().nbytes for part in self._parts.plain.values())

    def plan(self, budget: int | None = None) -> PipelinePlan:
        """The plan of the call; raises `PlanError` if the components do not fit."""
        budget = self.budget if budget is None else budget
        shared = share_budget(self._parts, self._known, self._calls, budget)
        return plan_of_shares(self._calls, self._parts, shared, self._notes)

    def plan_at(self, budget: int) -> PipelinePlan | None:
        """As `plan`, but None if the components do not fit."""
        try:
            return self.plan(budget)
        except PlanError:
            return None


def sketch_of_files(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    machine_of: Callable[[Collection[str]], Machine],
    *,
    dtype: str | torch.dtype = "auto",
    variant: str | None = None,
    call: Mapping[str, Any],
) -> PipelineSketch:
    """The sketch of a pipeline in a folder, or in a repository on the Hub, whose weights are not read.

    Args:
        path_or_repo_id: the folder, or the name of the repository.
        config: all settings.
        machine_of: returns the machine to plan for, from the dtypes of weights that a plan may compress.
        dtype, variant: as for `pipeline_from_pretrained`.
        call: keyword arguments of the call to plan.

    Raises:
        CheckpointError, ConfigError, OffloadError, UnsupportedError: as for `pipeline_from_pretrained`.
    """
    from weightstream.adapters.diffusers.load import sketch_components

    check_given(config, call)
    pipe, checkpoints = sketch_components(path_or_repo_id, dtype=dtype, variant=variant)
    calls, notes = rehearse_for_plan(pipe, call)
    modules = pipeline.modules_of(pipe)
    machine = machine_of(frozenset().union(*map(dtypes_of, modules.values())))
    plain = {name: sketch_of(module, checkpoints.get(name), config, machine) for name, module in modules.items()}
    cast = partial(sketch_of, checkpoint=None, config=config, machine=machine)
    return PipelineSketch(Components(plain, calls, cast), calls, notes)


def check_given(config: OffloadConfig, call: object) -> None:
    """Raise `ConfigError` for settings that pipelines do not take, and for an example that is not a mapping."""
    if config.backend != "none" or config.host_budget is not None or dict(config.max_memory).get("cpu") is not None:
        raise ConfigError("a pipeline takes device_budget, but neither host_budget nor the classic settings of layers")
    if call is not None and not isinstance(call, Mapping):
        raise ConfigError(
            f"example_inputs: a pipeline takes keyword arguments of a call, such as {{'prompt': ..., 'height': 768}}, "
            f"not {type(call).__name__}"
        )
