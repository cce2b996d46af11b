"""`generate` with a draft: passes that verify several tokens, and an assistant, in graphs of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weightstream.adapters.generation import speculation, tree_loop
from weightstream.adapters.generation.call import (
    no_graphs,
    recorder_of,
    resident_recorder,
    setting_of,
    streamer_of,
    why_not_captured,
    with_settings,
)
from weightstream.adapters.generation.decoder import Decoder, DecodeReport, LongStep, standing_in
from weightstream.adapters.generation.pacing import Pacing
from weightstream.adapters.generation.self_drafts import SelfDrafts
from weightstream.adapters.generation.speculation import FREE, AssistantSteps, Bits, Draft, VerifySteps, draft_of
from weightstream.adapters.generation.token_by_token import TokenByToken
from weightstream.adapters.generation.tree_drafts import Start
from weightstream.adapters.generation.tree_loop import TreeSteps
from weightstream.adapters.hf.ranks import ranks_of
from weightstream.adapters.steps.graph_runner import GraphRunner, Recorder
from weightstream.adapters.steps.row_split import RowPlan
from weightstream.errors import UnsupportedError
from weightstream.plan.cost import Splits, split_pass_s
from weightstream.runtime.tensors.thread_state import restored


@restored
def speculate_with(
    model: Any,
    inputs: Any,
    options: dict[str, Any],
    recorder: Recorder | None,
    bits: Bits | None = None,
    tree_nodes: int | None = None,
    pace: Pacing | None = None,
) -> tuple[Any, DecodeReport]:
    """`generate` with the draft that the options choose, and with this recorder; None: the device has no graphs."""
    setting = partial(setting_of, model, options)
    draft = draft_of(model, setting)
    reason = why_not_drafted_for(model, inputs, options)
    inputs = () if inputs is None else (inputs,)
    if reason is None and tree_nodes is not None and draft is not None:
        reason = tree_loop.why_no_trees(model, draft, setting)
    if draft is not None and pace is not None:
        draft = draft._replace(num=pace.width - 1)
        if pace.kind == "self draft":
            draft = draft._replace(kind=pace.kind)
    if draft is None or reason is not None:
        if bits == "token":
            raise UnsupportedError(f'bits="token": {reason}')
        return model.generate(*inputs, **options), DecodeReport(reason=reason)
    options = with_settings(options, {"disable_compile": True})
    device: torch.device = model.device
    streamer = streamer_of(model)
    with torch.no_grad(), ExitStack() as stack:
        runner = None
        if recorder is not None:
            stack.enter_context(torch.accelerator.device_index(device.index))
            runner = GraphRunner(recorder, device, None, 1 if pace is None else 2)
        verify: VerifySteps | TreeSteps
        ends = TokenByToken(options.get("streamer"))
        if tree_nodes is None:
            free, draws = partial(_splits_are_free, streamer, runner is not None, draft), bool(setting("do_sample"))
            verify = VerifySteps(model, draft, bits, runner, free, ends, draws=draws, pace=pace)
            options = ends.options(options)
        else:
            drafting = _tree_assistant_runner(setting) if draft.kind == "assistant" and runner is not None else None
            verify = TreeSteps(model, draft, tree_nodes, runner, setting, drafting)
            options = verify.options(options)
        decoder = Decoder(runner, LongStep(None if runner is None else streamer, stack), None, verify)
        stack.enter_context(standing_in(model, decoder))
        if isinstance(verify, VerifySteps) and draft.kind == "self draft":
            stack.enter_context(verify.installed(_self_drafts(model, verify, runner is not None)))
        else:
            stack.enter_context(verify.installed())
        if isinstance(verify, VerifySteps) and draft.kind == "assistant" and runner is not None:
            stack.enter_context(_captured_assistant(setting, verify))
        result = ends.trimmed(model.generate(*inputs, **options))
    report = verify.report()
    if tree_nodes is None:  # most nodes of a tree are alternatives to each other
        speculation.warn_of_temperature(setting, report)
    reason = decoder.report().reason if recorder is not None else no_graphs(device)
    return result, replace(decoder.report(), reason=reason, speculation=report)


def why_not_drafted_for(model: Any, inputs: Any, options: dict[str, Any]) -> str | None:
    """Reason against passes of one width for this model and these arguments, or None."""
    setting, ids, ranks = partial(setting_of, model, options), options.get("input_ids"), ranks_of(model)
    if (reason := speculation.why_not_drafted(model, setting, ids if inputs is None else inputs)) is not None:
        return reason
    if (reason := why_not_captured(model, options, ranks)) is not None:
        return reason
    if (setting("num_return_sequences") or 1) > 1:
        return "several tokens a pass need one text for each call"
    if ranks is not None:
        return "the model is sharded over several processes, which would have to agree on each draft"
    streamer = streamer_of(model)
    return None if streamer is None or hasattr(streamer.plan, "manifest") else "the model is spread over several GPUs"


def _self_drafts(model: Any, verify: VerifySteps, in_graphs: bool) -> Callable[..., SelfDrafts]:
    """Makes the candidate generator of a model that drafts with the high parts of its weights."""
    streamer: Any = streamer_of(model)
    draft: Any = streamer.drafting.model

    def make(generation_config: Any, input_ids: torch.Tensor, *, model_kwargs: Any, **_: Any) -> SelfDrafts:
        runner = GraphRunner(resident_recorder(), input_ids.device, None) if in_graphs else None
        start = Start.of(input_ids, input_ids.device, model_kwargs, verify.max_length)
        return SelfDrafts(draft, start, lambda: verify.cache, verify.width - 1, runner)

    return make


@contextmanager
def _captured_assistant(setting: Callable[[str], Any], verify: VerifySteps) -> Iterator[None]:
    """Inside, the assistant drafts from graphs of its own, if it is a resident model that works with a static cache."""
    assistant = setting("assistant_model")
    recorder = _assistant_recorder(setting)
    if recorder is None:
        yield
        return
    steps = AssistantSteps(assistant, GraphRunner(recorder, assistant.device, None, AssistantSteps.NUM_WIDTHS), verify)
    with standing_in(assistant, Decoder(steps.runner, LongStep(None, ExitStack()), None, steps)), steps.installed():
        yield


def _assistant_recorder(setting: Callable[[str], Any]) -> Recorder | None:
    """The recorder of an assistant of which steps can be captured; None: of this one they cannot."""
    assistant = setting("assistant_model")
    if setting("assistant_tokenizer") is not None or streamer_of(assistant) is not None:
        return None
    return None if why_not_captured(assistant, {}, ranks_of(assistant)) is not None else recorder_of(assistant)


def _tree_assistant_runner(setting: Callable[[str], Any]) -> GraphRunner | None:
    recorder = _assistant_recorder(setting)
    return None if recorder is None else GraphRunner(recorder, setting("assistant_model").device, None)


def _splits_are_free(streamer: Any, in_graphs: bool, draft: Draft, rows: RowPlan) -> bool:
    """Whether a pass some of whose operators run row by row takes as long as one of a single token."""
    if streamer is None:
        return False
    plan, profile = streamer.plan, streamer.lane.profile
    one_s: float = plan.graph_s if in_graphs else plan.step_s
    splits = Splits(calls=rows.calls.total(), rows=draft.num + 1, nbytes=rows.nbytes)
    return split_pass_s(plan, profile, splits, in_graphs=in_graphs) <= FREE * one_s
