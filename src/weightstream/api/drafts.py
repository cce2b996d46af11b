"""A draft model inside of the device budget: what it needs, whether it is worth its bytes, and its load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weightstream.errors import ConfigError, PlanError
from weightstream.inputs.gathering import sketch_of
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.speculation import MOST_ROWS, PRIORS, DraftNeeds, PassChoice, Passes, choose_width
from weightstream.plan.units import human, rate
from weightstream.runtime.streamer.drafting import Speculate
from weightstream.settings.arguments import check_source
from weightstream.settings.config import OffloadConfig

logger = logging.getLogger("weightstream")

_FLOAT_NBYTES = 4  # transformers keeps the draft's logits in float32
GAIN = 1.1  # a draft that is expected to gain less is not worth its load: acceptance is assumed
_PLENTY = 4  # times the weights of a draft: a budget in which all of them are resident


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModel:
    """A draft model that a caller names.

    Attributes:
        name: its folder, or its repository on the Hub.
        needs: what it takes of the device.
        num_words: the size of its vocabulary.
        trust_remote_code: as for the model.
        progress: whether to show progress; None: only if stderr is a terminal.
    """

    name: str
    needs: DraftNeeds
    num_words: int
    trust_remote_code: bool = False
    progress: bool | None = None

    def load(self, device: torch.device) -> Any:
        """The draft model on the device. Raises the errors of `from_pretrained`."""
        from weightstream.adapters.hf.load import load_pretrained

        loaded = load_pretrained(
            self.name,
            trust_remote_code=self.trust_remote_code,
            progress=self.progress,
            decode=lambda dtypes: True,
            device=device,
        )
        for memory in loaded.lazy:
            memory.populate(0, memory.nbytes)
        model = loaded.model
        model._apply(lambda tensor: tensor.to(device, copy=True))  # no view of a file is left
        if loaded.folder is not None:
            loaded.folder.close()
        model.generation_config.num_assistant_tokens_schedule = "constant"  # the pace of a text decides
        return model


class DraftedPlan(NamedTuple):
    """The plan that is faster, of one with a draft model and one without, and what is expected of both.

    Attributes:
        inputs: the inputs of the plan.
        plan: the plan.
        is_drafted: the plan leaves room for the draft model.
        reason: why, with both figures.
    """

    inputs: PlannerInputs
    plan: Plan
    is_drafted: bool
    reason: str


def describe_draft(
    name: str | Path,
    config: OffloadConfig,
    machine: Machine,
    *,
    trust_remote_code: bool = False,
    progress: bool | None = None,
) -> DraftModel:
    """Find what a draft model needs, without loading it. `machine` is that of the model that it drafts for.

    Raises the errors of `plan_model`.
    """
    from weightstream.adapters.hf.load import described

    check_source(name, "draft")
    model, checkpoint = described(name, trust_remote_code=trust_remote_code)
    settings = OffloadConfig(context=config.context, codec="none", device_budget=1)
    inputs = sketch_of(model, checkpoint, settings, machine).inputs
    nbytes = inputs.grains[0].nbytes
    num_words = model.config.get_text_config().vocab_size
    needs = DraftNeeds(
        name=str(name),
        weights_nbytes=nbytes,
        cache_nbytes=inputs.demands[0].cache_nbytes,
        logits_nbytes=MOST_ROWS * num_words * _FLOAT_NBYTES,
        token_s=resident_token_s(inputs),
    )
    return DraftModel(
        name=str(name), needs=needs, num_words=num_words, trust_remote_code=trust_remote_code, progress=progress
    )


def resident_token_s(inputs: PlannerInputs) -> float:
    """Predicted seconds of a token of a model that is resident as a whole."""
    plan = inputs.at_budget(_PLENTY * inputs.grains[0].nbytes + 1).plan().plan
    return plan.step_s if inputs.machine.on_cpu else plan.graph_s


def plan_with_draft(inputs: PlannerInputs, draft: DraftModel, mode: Speculate, num_words: int) -> DraftedPlan:
    """Make the plan with room for a draft model, and the plan without, and return the one with more tokens per second.

    Args:
        inputs: the inputs for the model, with passes of several tokens.
        draft: the draft model.
        mode: "draft" takes the draft model if there is any plan with it.
        num_words: the size of the model's vocabulary.

    Raises:
        ConfigError: the vocabularies differ, or passes of several tokens are unknown.
        PlanError: no plan fits.
    """
    if num_words != draft.num_words:
        raise ConfigError(
            f"draft: {draft.name} has {draft.num_words} words, and the model has {num_words}: both must have the same "
            "tokens. Name another draft, or pass assistant_model with both tokenizers to generate()"
        )
    if not inputs.passes:
        raise ConfigError("draft: this model cannot verify drafts in passes of one width (the log has the reason)")
    reserved = replace(inputs, reserved_nbytes=draft.needs.nbytes)
    with_draft, error = _plan(reserved)
    without, own_error = _plan(inputs)
    size = f"its {human(draft.needs.nbytes)} (weights {human(draft.needs.weights_nbytes)}, cache "
    size += f"{human(draft.needs.cache_nbytes)}, logits {human(draft.needs.logits_nbytes)})"
    if with_draft is None:
        if mode == "draft" or without is None:
            raise own_error or PlanError(f"draft: {draft.name} leaves no room for the model with {size}: {error}")
        return DraftedPlan(inputs, without, False, f"left out {draft.name}: {size} leave no room: {error}")
    assert without is not None  # it has more room
    on_cpu = inputs.machine.on_cpu
    theirs = choice_of(with_draft, PRIORS["assistant"], draft.needs.token_s, on_cpu=on_cpu)
    ours = choice_of(without, PRIORS["prompt lookup"], 0.0, on_cpu=on_cpu)
    figures = (
        f"{rate(theirs.tokens_per_s)} tokens/s are expected with the draft and {size} of the budget, "
        f"{rate(ours.tokens_per_s)} without"
    )
    if mode == "draft" or (theirs.tokens > 1 and theirs.tokens_per_s > GAIN * ours.tokens_per_s):
        return DraftedPlan(reserved, with_draft, True, f"loading {draft.name}: {figures}")
    return DraftedPlan(inputs, without, False, f"left out {draft.name}: {figures}")


class _Made(NamedTuple):
    """A plan, or why there is none."""

    plan: Plan | None
    error: PlanError | None


def _plan(inputs: PlannerInputs) -> _Made:
    try:
        return _Made(inputs.plan().plan, None)
    except PlanError as error:
        return _Made(None, error)


def choice_of(plan: Plan, acceptance: float, token_s: float, *, on_cpu: bool) -> PassChoice:
    """The width of passes with this plan, for a draft of which so many tokens are accepted."""
    return choose_width(Passes(plan.passes, in_graphs=not on_cpu), acceptance, token_s)


Describe = Callable[[Machine], DraftModel]  # machine that the model is planned for -> the draft model
