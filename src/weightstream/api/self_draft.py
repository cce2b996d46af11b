"""A model that is its own draft: how many bits its high parts have, whether it is worth it, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from weightstream.adapters.modules.split_weights import BITS, SplitModel, split_model, why_not_split
from weightstream.api.drafts import GAIN, choice_of, resident_token_s
from weightstream.errors import PlanError, UnsupportedError
from weightstream.inputs.gathering import Gatherer, Sketch, sketch_of
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.speculation import MOST_ROWS, PRIORS
from weightstream.plan.units import rate
from weightstream.runtime.streamer.drafting import Speculate
from weightstream.settings.config import OffloadConfig
from weightstream.store.checkpoint import Checkpoint

SELF = "self"  # the name of a draft that is the model itself
# The share of tokens that is accepted, by the bits of each mantissa: SmolLM2-135M with 8 drafted tokens, six prompts
# [benchmarks/results/acceptance.jsonl]: 3.5, 5.3 and 7.0 tokens per pass. Larger models lose less by rounding.
_PRIORS: Mapping[int, float] = MappingProxyType({1: 0.73, 2: 0.86, 3: 0.94})


class SelfDraftedPlan(NamedTuple):
    """The plan that is faster, of one with a self draft and one without, and what is expected of both."""

    inputs: PlannerInputs
    plan: Plan
    bits: int | None
    """The bits of each mantissa that the draft has; None: the plan without is faster."""
    prior: float
    """The share of its tokens that is expected to be accepted."""
    token_s: float
    """The predicted seconds of one of its tokens."""
    reason: str
    """Why, with both figures."""


def plan_self_drafted(
    model: Any,
    checkpoint: Checkpoint | None,
    config: OffloadConfig,
    machine: Machine,
    mode: Speculate,
    most_rows: int = MOST_ROWS,
) -> SelfDraftedPlan:
    """Make the plan of a model on meta as its own draft, with as many bits as fit in the budget, and the plan without,
    and return the one with more tokens per second. `mode`: "draft" takes the draft wherever it fits.

    Raises:
        PlanError: neither fits.
        UnsupportedError: the weights cannot be split, or passes of several tokens are unknown.
    """
    if (reason := why_not_split(model)) is not None:
        raise UnsupportedError(f"draft='self': {reason}")
    plain = _with_passes(sketch_of(model, checkpoint, config, machine), most_rows)
    if not plain.passes:
        raise UnsupportedError(
            "draft='self': the model cannot verify drafts in passes of one width; the log at level INFO has the reason"
        )
    on_cpu = machine.on_cpu
    try:
        without = plain.plan().plan
        ours = choice_of(without, PRIORS["prompt lookup"], 0.0, on_cpu=on_cpu)
    except PlanError:
        without = None
    token_s = resident_token_s(plain)  # as if the draft had all bits: measured later
    errors: list[str] = []
    for bits in BITS:
        split = split_model(model, bits, torch.device("meta"))
        try:
            sketch = sketch_of(model, None, config, machine)
            inputs = with_split(_with_passes(sketch, most_rows), split, sketch.gatherer)
            plan = inputs.plan().plan
        except PlanError as error:
            errors.append(str(error))
            continue
        finally:
            split.undo()
        theirs = choice_of(plan, _PRIORS[bits], token_s, on_cpu=on_cpu)
        figures = f"{rate(theirs.tokens_per_s)} tokens/s are expected with {bits} bits of each mantissa as the draft"
        if without is not None:
            figures += f", {rate(ours.tokens_per_s)} without"
        if mode == "draft" or without is None or (theirs.tokens > 1 and theirs.tokens_per_s > GAIN * ours.tokens_per_s):
            return SelfDraftedPlan(inputs, plan, bits, _PRIORS[bits], token_s, f"drafting by itself: {figures}")
        return SelfDraftedPlan(plain, without, None, 0.0, 0.0, f"not drafting by itself: {figures}")
    if mode == "draft" or without is None:
        raise PlanError(f"draft='self': no part of the weights that could draft fits: {errors[-1]}")
    reason = f"not drafting by itself: the high parts of the weights do not fit: {errors[-1]}"
    return SelfDraftedPlan(plain, without, None, 0.0, 0.0, reason)


def with_split(inputs: PlannerInputs, split: SplitModel, gatherer: Gatherer) -> PlannerInputs:
    """The inputs of a model whose weights are split: what the draft needs is resident, or read from host memory."""
    kept, tables = gatherer.aliases_of(split.kept), gatherer.aliases_of(split.tables)
    config = inputs.config
    if inputs.machine.maps_host_memory:
        names = {name for alias in tables for name in inputs.weights.names[alias]}
        config = config.model_copy(update={"zero_copy_params": config.zero_copy_params | names})
    else:
        kept |= tables
    return replace(inputs.keeping(kept), config=config, reserved_nbytes=inputs.reserved_nbytes + split.nbytes)


def _with_passes(sketch: Sketch, most_rows: int) -> PlannerInputs:
    return sketch.gatherer.with_passes(sketch.inputs, most_rows).with_memory_of(MOST_ROWS)
