"""Captured generation: transformers' `generate` with its decode steps replayed from a graph. Knows no weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from weightstream.adapters.generation import deferred_stop, speculation, tree_loop
from weightstream.adapters.generation.call import (
    check_generates,
    check_ids,
    no_graphs,
    recorder_of,
    setting_of,
    streamer_of,
    why_not_captured,
    with_settings,
)
from weightstream.adapters.generation.decoder import Decoder, DecodeReport, LongStep, TokenSteps, standing_in
from weightstream.adapters.generation.drafted import speculate_with, why_not_drafted_for
from weightstream.adapters.generation.pacing import Pacing, drafts_for
from weightstream.adapters.generation.speculation import Bits, draft_of
from weightstream.adapters.hf.ranks import common, least, ranks_of
from weightstream.adapters.steps.graph_runner import GraphRunner, Recorder
from weightstream.runtime.streamer.drafting import Speculate
from weightstream.runtime.tensors.thread_state import restored

logger = logging.getLogger("weightstream")

_STATIC = MappingProxyType({"cache_implementation": "static", "disable_compile": True})
_BETWEEN = ("streamer", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn")  # the caller's code
_SPARE_S = 0.2  # the longest step that may be run in vain: about the time that deferred stops save in 100 tokens


def generate(
    model: Any,
    inputs: Any = None,
    *,
    bits: Bits | None = None,
    tree_nodes: int | None = None,
    speculate: Speculate | None = None,
    on_decoding: Callable[[DecodeReport], None] | None = None,
    **kwargs: Any,
) -> Any:
    """Generate with a transformers model, offloaded or not, replaying decode steps from a CUDA graph where that works.

    It is `model.generate(inputs, cache_implementation="static", disable_compile=True, **kwargs)`, bit for bit. Where
    steps cannot be captured they run eagerly, and a warning says why; without CUDA, or when an argument asks for
    another cache or loop, it is `model.generate(inputs, **kwargs)`. The end of a text may be noticed a step late;
    nothing of that step is kept.

    With `prompt_lookup_num_tokens`, `assistant_model`, `use_mtp` or `speculation_type="dflash"` a draft proposes
    tokens, and one pass verifies them all: transformers' assisted generation, in passes of one width, which are
    captured. See docs/speculation.md.

    Args:
        model: a transformers model.
        inputs: token ids of shape (batch, tokens), as for `model.generate`.
        bits: with a draft, "token": text and scores have the bits of one token at a time, with a static cache; "rows":
            those of passes of this width, whatever is drafted. None: "token" where it takes no longer, else "rows".
        tree_nodes: with `prompt_lookup_num_tokens` or `assistant_model`, a pass verifies so many drafted tokens: a tree
            of several continuations, none longer than the draft's number of tokens. None: a single continuation.
        speculate: "auto": draft where the plan says that it is faster, by prompt lookup or by the draft model that was
            loaded with the model, and only as long as it is; "lookup" or "draft": always by that one; "off": only as
            the other arguments say. None: as the model was loaded.
        on_decoding: called at the end with how the steps ran (`replays`, and the `reason` why others were not
            replayed), instead of the warning.
        kwargs: for `model.generate`.

    Returns:
        The return value of `model.generate`.

    Raises:
        ConfigError: for inputs that are no tensor, such as text.
        UnsupportedError: for a model that transformers does not generate with, for `assistant_early_exit`, where
            `bits="token"` cannot be had, as with `tree_nodes`, and for `tree_nodes` with another draft, or with layers
            that see chunks of a text.
        Exception: whatever `model.generate` raises.
    """
    check_generates(model)
    check_ids(inputs if inputs is not None else kwargs.get("input_ids"))
    recorder, own = recorder_of(model), draft_of(model, partial(setting_of, model, kwargs))
    drafts = drafts_for(
        model,
        speculate,
        None if own is None else own.kind,
        in_graphs=recorder is not None,
        unsuited=partial(why_not_drafted_for, model, inputs, kwargs),
    )
    if drafts is None or tree_nodes is not None:
        result, decoding = decode_with(model, inputs, kwargs, recorder, bits, tree_nodes)
    else:
        options = kwargs | drafts.settings
        result, decoding = decode_with(model, inputs, options, recorder, bits, pace=drafts.pace)
    if on_decoding is not None:
        on_decoding(decoding)
    elif decoding.reason is not None:  # without CUDA it is what is expected
        logger.log(logging.INFO if recorder is None else logging.WARNING, "generate: %s", decoding)
    return result


@restored
def decode_with(
    model: Any,
    inputs: Any,
    options: dict[str, Any],
    recorder: Recorder | None,
    bits: Bits | None = None,
    tree_nodes: int | None = None,
    pace: Pacing | None = None,
) -> tuple[Any, DecodeReport]:
    """`generate` with this recorder; None: the model's device has no graphs. `bits`, `tree_nodes`: see `generate`."""
    speculation.check_bits(bits)
    draft = draft_of(model, partial(setting_of, model, options))
    if tree_nodes is not None:
        tree_loop.check(tree_nodes, draft, bits)
    if draft is not None:
        return speculate_with(model, inputs, options, recorder, bits, tree_nodes, pace)
    device: torch.device = model.device  # of an offloaded model, its streamer's
    inputs = () if inputs is None else (inputs,)  # a model may have another name for them, and gets them by that name
    ranks = ranks_of(model)
    reason = common(ranks, why_not_captured(model, options, ranks) if recorder else no_graphs(device))
    if recorder is None or reason is not None:
        return model.generate(*inputs, **options), DecodeReport(reason=reason)
    options = with_settings(options, _STATIC)
    with torch.no_grad(), torch.accelerator.device_index(device.index), ExitStack() as stack:
        runner = GraphRunner(recorder, device, ranks)
        decoder = Decoder(runner, LongStep(streamer_of(model), stack), ranks, TokenSteps(runner))
        stack.enter_context(standing_in(model, decoder))
        if least(ranks, _may_spare_a_step(model, options)):  # all ranks or none: in a step that only some ran they hang
            draws = bool(setting_of(model, options, "do_sample")) or model.training
            stack.enter_context(deferred_stop.a_step_late(lambda: decoder.is_replaying, draws=draws))
        result = model.generate(*inputs, **options)
    return result, decoder.report()


def _may_spare_a_step(model: Any, options: dict[str, Any]) -> bool:
    """Whether a text may end a step late: no code of the caller would see that step, and it is short."""
    streamer = streamer_of(model)
    is_short = streamer is None or streamer.plan.graph_s <= _SPARE_S
    is_seen = any(options.get(name) is not None for name in _BETWEEN)
    # with return_dict_in_generate the static cache is returned, from which a step cannot be taken back
    return is_short and not is_seen and not setting_of(model, options, "return_dict_in_generate")
