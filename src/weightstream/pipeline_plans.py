"""Plans of a pipeline: how its components share the budget, and what one of its calls takes. Moves no bytes.

The components are those of a pipeline that is loaded, or of a folder whose weights nobody has read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from weightstream import prospects
from weightstream.adapters import diffusers
from weightstream.adapters.diffusers import Call
from weightstream.adapters.shapes import Footprint
from weightstream.config import OffloadConfig
from weightstream.errors import ConfigError, PlanError, UnsupportedError
from weightstream.plan.choices import Share
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine
from weightstream.plan.prospect import Prospect
from weightstream.plan.schedule import aligned
from weightstream.plan.turns import PipelinePlan, Turn, shares

logger = logging.getLogger("weightstream")

_STEPS = 28  # that a denoiser is taken to run where nothing tells
_DENOISERS = ("transformer", "transformer_2", "unet", "controlnet", "prior")


class Part(Protocol):
    """A component, and what is known of it."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def prospect(self) -> Prospect: ...
    def knowing(self, work: Footprint, entry: str) -> Prospect:
        """The prospect for the work of a call that was followed."""
        ...

    def with_facts(self, prospect: Prospect) -> Prospect:
        """The same with what takes time to find out."""
        ...


def rehearsed(pipe: Any, arguments: Mapping[str, Any]) -> list[Call]:
    """The calls of its components in one call of a pipeline, as far as they are known before it runs."""
    calls, reason = diffusers.rehearse(pipe, arguments)
    if reason:
        logger.info("the calls of %s are known up to here only (%s): %s", type(pipe).__name__, len(calls), reason)
    return calls


def heaviest(calls: Sequence[Call]) -> dict[str, Call]:
    """Of each component the kind of call that comes most often, then takes most memory."""
    nums = Counter(id(call.work) for call in calls)
    found: dict[str, Call] = {}
    for call in sorted(calls, key=lambda call: (nums[id(call.work)], call.work.activation_nbytes)):
        found[call.component] = call
    return found


def known_of(parts: Mapping[str, Part], calls: Sequence[Call]) -> dict[str, Prospect]:
    """The prospect of each component, for the kind of call that it is planned for."""
    known = {name: part.prospect for name, part in parts.items()}
    return known | {name: parts[name].knowing(call.work, call.kind.what) for name, call in heaviest(calls).items()}


def shared_out(
    parts: Mapping[str, Part], known: Mapping[str, Prospect], calls: Sequence[Call], budget: int | None = None
) -> dict[str, tuple[Prospect, Plan]]:
    """The plan of each component in its share of the budget, and the prospect that it is of; None: as the settings say.

    Raises `PlanError` where they have no room.
    """
    known = dict(known)
    times = {name: _STEPS if name in _DENOISERS else 1 for name in parts}
    times |= Counter(call.component for call in calls)
    budget = _budget(known, calls) if budget is None else budget
    if sum(prospect.grains[0].nbytes for prospect in known.values()) > budget:  # some of each may have to stream
        none = Share(0, budget)
        known = {name: parts[name].with_facts(prospect.sharing(none)).sharing(None) for name, prospect in known.items()}
    found = shares(known, times, budget)
    ring = block_nbytes([plan for _, plan in found.values()])
    return {
        name: (known[name].sharing(share._replace(ring_nbytes=ring)), plan) for name, (share, plan) in found.items()
    }


def block_nbytes(plans: Sequence[Plan]) -> int:
    """Bytes of the memory that these have in turn."""
    return aligned(max(aligned(plan.ring_nbytes) + plan.buffer_nbytes for plan in plans))


def _budget(known: Mapping[str, Prospect], calls: Sequence[Call]) -> int:
    """Bytes for the weights of all: as given, else what the component leaves that needs most beside them."""
    most = max((call.work.activation_nbytes for call in calls), default=0)
    found = []
    for prospect in known.values():
        planner = prospect.planners[0]
        demand = replace(planner.demand, activation_nbytes=max(most, planner.demand.activation_nbytes))
        budget = replace(planner, demand=demand).budget
        if budget is not None:
            found.append(budget)
    return min(found)


def plan_of_call(
    calls: Sequence[Call], plans: Mapping[str, Plan], prospect_of: Callable[[Call], Prospect], nbytes: int
) -> PipelinePlan:
    """What these calls take where the plans are in force, with `nbytes` of memory that all have in turn."""
    priced: dict[int, tuple[Plan, Prospect]] = {}
    turns: list[Turn] = []
    for first, num in diffusers.runs(calls):
        if id(first.work) not in priced:
            prospect = prospect_of(first)
            priced[id(first.work)] = _priced(plans[first.component], prospect), prospect
        plan, prospect = priced[id(first.work)]
        is_next = bool(turns) and turns[-1].component == first.component
        cold_s = 0.0
        if plan.first and not is_next:  # of the copy that a turn begins with, which nothing hides
            cold_s = prospect.planners[0].machine.profile.copy_s(plan.unit_nbytes[plan.first[0]])
        turns.append(Turn(component=first.component, entry=first.kind.what, num=num, plan=plan, cold_s=cold_s))
    return PipelinePlan(turns=tuple(turns), plans=dict(plans), block_nbytes=nbytes)


def _priced(plan: Plan, prospect: Prospect) -> Plan:
    """A plan as it is predicted for the work of a call."""
    index = prospect.grain_of(plan.manifest)
    order = prospect.grains[index].order
    return prospect.planners[index].priced(plan if order == plan.manifest.order else plan.reordered(order))


class PipelineSketch:
    """A pipeline of which shapes are known: plans of one of its calls, at any budget."""

    def __init__(self, pipe: Any, parts: Mapping[str, Part], calls: Sequence[Call]) -> None:
        self._parts, self._calls = parts, calls
        self._known = known_of(parts, calls)
        self.name = type(pipe).__name__
        self.budget = _budget(self._known, calls)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, in plain form."""
        return sum(prospect.grains[0].plain().nbytes for prospect in self._known.values())

    def plan(self, budget: int | None = None) -> PipelinePlan:
        """The plan of the call; raises `PlanError` where components have no room."""
        found = shared_out(self._parts, self._known, self._calls, self.budget if budget is None else budget)
        plans = {name: plan for name, (_, plan) in found.items()}
        return plan_of_call(self._calls, plans, self._prospect_of, block_nbytes(list(plans.values())))

    def plan_at(self, budget: int) -> PipelinePlan | None:
        """The same; None where components have no room."""
        try:
            return self.plan(budget)
        except PlanError:
            return None

    def _prospect_of(self, call: Call) -> Prospect:
        return self._parts[call.component].knowing(call.work, call.kind.what)


def sketch_of_files(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    machine: Machine,
    *,
    dtype: str | torch.dtype = "auto",
    variant: str | None = None,
    call: Mapping[str, Any],
) -> PipelineSketch:
    """The pipeline in a folder, or in a repository on the hub, whose weights nobody reads, and a call of it.

    Raises `CheckpointError`, `ConfigError`, `UnsupportedError`.
    """
    from weightstream.adapters.pipeline_files import sketched

    check_config(config)
    pipe, checkpoints = sketched(path_or_repo_id, dtype=dtype, variant=variant)
    calls, reason = diffusers.rehearse(pipe, call)
    if reason:
        raise UnsupportedError(f"the calls of {type(pipe).__name__} cannot be told before it runs: {reason}")
    parts = {
        name: prospects.sketch_of(module, checkpoints.get(name), config, machine)
        for name, module in diffusers.modules_of(pipe).items()
    }
    return PipelineSketch(pipe, parts, calls)


def check_config(config: OffloadConfig) -> None:
    """Raises `ConfigError` for settings that pipelines do not take."""
    if config.backend != "none" or config.host_budget is not None or dict(config.max_memory).get("cpu") is not None:
        raise ConfigError("a pipeline takes device_budget; not host_budget, nor the classic settings of layers")
