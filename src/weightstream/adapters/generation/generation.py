"""Captured generation: transformers' `generate` with its decode steps replayed from a graph. Knows no weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Protocol

import torch

from weightstream.adapters.generation import deferred_stop, speculation, static_cache, tree_loop
from weightstream.adapters.generation.decode_steps import CACHES, cache_in
from weightstream.adapters.generation.graph_runner import GraphRunner, LaunchableGraph, Recorder
from weightstream.adapters.generation.pacing import Pacing, drafts_for
from weightstream.adapters.generation.speculation import AssistantSteps, Bits, SpeculationReport, VerifySteps, draft_of
from weightstream.adapters.generation.token_by_token import TokenByToken
from weightstream.adapters.generation.tree_loop import TreeSteps
from weightstream.adapters.hf.ranks import Ranks, common, least, num_processes, ranks_of
from weightstream.errors import UnsupportedError
from weightstream.runtime.devices import cuda
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.streamer.drafting import Speculate
from weightstream.runtime.tensors.thread_state import restored

logger = logging.getLogger("weightstream")

_STATIC = MappingProxyType({"cache_implementation": "static", "disable_compile": True})
_OTHERWISE = frozenset(CACHES) | frozenset(  # settings that choose another cache or another loop than ours
    "cache_implementation compile_config custom_generate penalty_alpha dola_layers constraints "  # noqa: SIM905
    "force_words_ids".split()
)
_BETWEEN = ("streamer", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn")  # the caller's code
_SPARE_S = 0.2  # the longest step that may be run in vain: about the time that deferred stops save in 100 tokens
_TEXT = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport:
    """How the steps after the prompt ran: `replays` of them from a graph; `reason`: why others did not."""

    replays: int = 0
    reason: str | None = None
    speculation: SpeculationReport | None = None
    """How several tokens a pass went; None: there was one a pass."""

    def __str__(self) -> str:
        steps = self._steps()
        return steps if self.speculation is None else f"{steps}; {self.speculation}"

    def _steps(self) -> str:
        captured = f"captured, {self.replays} replays"
        eager = f"eager ({self.reason or 'too few steps to capture one'})"
        return eager if not self.replays else captured if self.reason is None else f"{captured}, then {eager}"


class _Planned(Protocol):
    """A plan of one device or of several."""

    @property
    def graph_s(self) -> float:
        """The predicted seconds of a step in a graph."""


class _CapturableStreamer(Protocol):
    """A streamer of one device or of several."""

    @property
    def plan(self) -> _Planned:
        """The plan in force."""

    @property
    def learned(self) -> bool:
        """Whether a step has taught the order of the weights."""

    def watch(self) -> None:
        """Watch the next step, too."""

    def step(self) -> AbstractContextManager[object]:
        """Inside, weights show fixed addresses."""

    def capture(self, graph: LaunchableGraph, /) -> AbstractContextManager[object]:
        """Inside, what is queued becomes the graph."""

    def replay(self, graph: LaunchableGraph, /) -> None:
        """Launch a captured graph."""


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
        bits: with a draft, "token": text and scores have the bits of one token at a time; "rows": those of passes of
            this width, whatever is drafted. None: "token" where it takes no longer, else "rows".
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
        UnsupportedError: for `assistant_early_exit`, where `bits="token"` cannot be had, as with `tree_nodes`, and for
            `tree_nodes` with another draft, or with layers that see chunks of a text.
        The errors of `model.generate`.
    """
    recorder = _recorder(model)
    drafts = drafts_for(
        model,
        speculate,
        partial(_setting, model, kwargs),
        in_graphs=recorder is not None,
        unsuited=partial(_unsuited_for_drafts, model, inputs, kwargs),
    )
    if drafts is None or tree_nodes is not None:
        result, decoding = decode_with(model, inputs, kwargs, recorder, bits, tree_nodes)
    else:
        result, decoding = speculate_with(model, inputs, kwargs | drafts.settings, recorder, bits, pace=drafts.pace)
    if on_decoding is not None:
        on_decoding(decoding)
    elif decoding.reason is not None:
        logger.warning("generate: %s", decoding)
    return result


@restored
def decode_with(
    model: Any,
    inputs: Any,
    options: dict[str, Any],
    recorder: Recorder | None,
    bits: Bits | None = None,
    tree_nodes: int | None = None,
) -> tuple[Any, DecodeReport]:
    """`generate` with this recorder; None: the model's device has no graphs. `bits`, `tree_nodes`: see `generate`."""
    speculation.check_bits(bits)
    draft = draft_of(model, partial(_setting, model, options))
    if tree_nodes is not None:
        tree_loop.check(tree_nodes, draft, bits)
    if draft is not None:
        return speculate_with(model, inputs, options, recorder, bits, tree_nodes)
    device: torch.device = model.device  # of an offloaded model, its streamer's
    inputs = () if inputs is None else (inputs,)  # a model may have another name for them, and gets them by that name
    ranks = ranks_of(model)
    reason = common(ranks, _unsuited(model, options, ranks) if recorder else _no_graphs(device))
    if recorder is None or reason is not None:
        return model.generate(*inputs, **options), DecodeReport(reason=reason)
    if (config := options.get("generation_config")) is None:
        options = {**options, **_STATIC}
    else:  # transformers wants either all settings in it, or none
        config = copy.deepcopy(config)
        config.update(**_STATIC)
        options = options | {"generation_config": config}
    with torch.no_grad(), torch.accelerator.device_index(device.index), ExitStack() as stack:
        runner = GraphRunner(recorder, device, ranks)
        decoder = Decoder(runner, _LongStep(_streamer_of(model), stack), ranks, _TokenSteps(runner))
        stack.enter_context(_standing_in(model, decoder))
        if least(ranks, _may_spare_a_step(model, options)):  # all ranks or none: in a step that only some ran they hang
            draws = bool(_setting(model, options, "do_sample")) or model.training
            stack.enter_context(deferred_stop.a_step_late(lambda: decoder.is_replaying, draws=draws))
        result = model.generate(*inputs, **options)
    return result, decoder.report()


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
    setting = partial(_setting, model, options)
    draft = draft_of(model, setting)
    reason = _unsuited_for_drafts(model, inputs, options)
    inputs = () if inputs is None else (inputs,)
    if reason is None and tree_nodes is not None and draft is not None:
        reason = tree_loop.why_no_trees(model, draft, setting)
    if draft is not None and pace is not None:
        draft = draft._replace(num=pace.width - 1)
    if draft is None or reason is not None:
        if bits == "token":
            raise UnsupportedError(f'bits="token": {reason}')
        return model.generate(*inputs, **options), DecodeReport(reason=reason)
    if (config := options.get("generation_config")) is None:
        options = options | {"disable_compile": True}
    else:
        config = copy.deepcopy(config)
        config.update(disable_compile=True)
        options = options | {"generation_config": config}
    device: torch.device = model.device
    streamer = _streamer_of(model)
    with torch.no_grad(), ExitStack() as stack:
        runner = None
        if recorder is not None:
            stack.enter_context(torch.accelerator.device_index(device.index))
            runner = GraphRunner(recorder, device, None, 1 if pace is None else 2)
        verify: VerifySteps | TreeSteps
        ends = TokenByToken(options.get("streamer"))
        if tree_nodes is None:
            free, draws = partial(_serial_is_free, streamer), bool(setting("do_sample"))
            verify = VerifySteps(model, draft, bits, runner, free, ends, draws=draws, pace=pace)
            options = ends.options(options)
        else:
            drafting = _tree_assistant_runner(setting) if draft.kind == "assistant" and runner is not None else None
            verify = TreeSteps(model, draft, tree_nodes, runner, setting, drafting)
            options = verify.options(options)
        decoder = Decoder(runner, _LongStep(None if runner is None else streamer, stack), None, verify)
        stack.enter_context(_standing_in(model, decoder))
        stack.enter_context(verify.installed())
        if isinstance(verify, VerifySteps) and draft.kind == "assistant" and runner is not None:
            stack.enter_context(_captured_assistant(setting, verify))
        result = ends.trimmed(model.generate(*inputs, **options))
    report = verify.report()
    if tree_nodes is None:  # most nodes of a tree are alternatives to each other
        speculation.warn_of_temperature(setting, report)
    reason = decoder.report().reason if recorder is not None else _no_graphs(device)
    return result, replace(decoder.report(), reason=reason, speculation=report)


@contextmanager
def _captured_assistant(setting: Callable[[str], Any], verify: VerifySteps) -> Iterator[None]:
    """Inside, the assistant drafts from graphs of its own, if it is a resident model that works with a static cache."""
    assistant = setting("assistant_model")
    recorder = _assistant_recorder(setting)
    if recorder is None:
        yield
        return
    steps = AssistantSteps(assistant, GraphRunner(recorder, assistant.device, None, AssistantSteps.NUM_WIDTHS), verify)
    with _standing_in(assistant, Decoder(steps.runner, _LongStep(None, ExitStack()), None, steps)), steps.installed():
        yield


def _assistant_recorder(setting: Callable[[str], Any]) -> Recorder | None:
    """The recorder of an assistant of which steps can be captured; None: of this one they cannot."""
    assistant = setting("assistant_model")
    if setting("assistant_tokenizer") is not None or _streamer_of(assistant) is not None:
        return None
    return None if _unsuited(assistant, {}, ranks_of(assistant)) is not None else _recorder(assistant)


def _tree_assistant_runner(setting: Callable[[str], Any]) -> GraphRunner | None:
    recorder = _assistant_recorder(setting)
    return None if recorder is None else GraphRunner(recorder, setting("assistant_model").device, None)


def _unsuited_for_drafts(model: Any, inputs: Any, options: dict[str, Any]) -> str | None:
    """Reason against passes of one width for this model and these arguments, or None."""
    setting, ids, ranks = partial(_setting, model, options), options.get("input_ids"), ranks_of(model)
    if (reason := speculation.why_not_drafted(model, setting, ids if inputs is None else inputs)) is not None:
        return reason
    if (reason := _unsuited(model, options, ranks)) is not None:
        return reason
    if (setting("num_return_sequences") or 1) > 1:
        return "several tokens a pass need one text for each call"
    if ranks is not None:
        return "the model is sharded over several processes, which would have to agree on each draft"
    streamer = _streamer_of(model)
    return None if streamer is None or hasattr(streamer.plan, "manifest") else "the model is spread over several GPUs"


def _serial_is_free(streamer: Any, width: int) -> bool:
    """Whether a step in which `width` tokens run one after the other takes as long as one of a single token."""
    if streamer is None:
        return False
    plan = streamer.plan
    one_s = plan.compute_s - plan.decode_s
    return bool(plan.decode_s + width * one_s <= speculation.FREE * max(plan.copy_s, plan.disk_s, plan.compute_s))


def _no_graphs(device: torch.device) -> str:
    return f"graphs are captured on CUDA, and the model is on {device}"


def _streamer_of(model: Any) -> _CapturableStreamer | None:
    """The streamer of the model, or of the model that it wraps; None: there is none."""
    streamer: _CapturableStreamer | None = getattr(model, forward_patch.ATTRIBUTE, None)
    return streamer


def _recorder(model: Any) -> Recorder | None:
    if model.device.type != "cuda":
        return None
    if (streamer := _streamer_of(model)) is not None:
        return Recorder(new=cuda.new_graph, record=streamer.capture, replay=streamer.replay)
    return Recorder(new=cuda.new_graph, record=cuda.recording, replay=lambda graph: graph.replay())


def _unsuited(model: Any, options: dict[str, Any], ranks: Ranks | None) -> str | None:
    """Reason to run `generate` as it is for this model and these arguments, or None."""
    setting = partial(_setting, model, options)
    # "hybrid" is in old checkpoints, and transformers ignores it
    if chosen := [name for name in sorted(_OTHERWISE) if setting(name) not in (None, False, "hybrid")]:
        return f"{', '.join(chosen)} was given"
    if setting("use_cache") is False or (setting("num_beams") or 1) > 1:
        return "only greedy search and sampling, with a cache, are captured"
    # the call that taught a streamer its order had none of these, and they may lead to other weights
    if others := [name for name, v in options.items() if isinstance(v, torch.Tensor) and name not in _TEXT]:
        return f"{', '.join(others)}: only text is decoded from a graph"
    if "generate" in vars(model):
        return "generate() is code that came with the checkpoint"
    if (reason := static_cache.unsuited(model)) is not None:
        return reason
    if forward_patch.ATTRIBUTE not in model.__dict__ and len({param.device for param in model.parameters()}) > 1:
        return "the model is spread over several devices"
    if ranks is None and num_processes() > 1:
        return "it runs in several processes, and is not sharded as tensor parallelism has it"
    if hasattr(model.__dict__.get("forward"), forward_patch.OUTER):
        return "generate() is running with this model already"
    return None


def _setting(model: Any, options: dict[str, Any], name: str) -> Any:
    """A setting of `generate`, from the places where transformers looks; None: it is not set."""
    configs = options.get("generation_config"), model.generation_config
    places = options.get(name), *(getattr(config, name, None) for config in configs)
    return next((value for value in places if value is not None), None)


def _may_spare_a_step(model: Any, options: dict[str, Any]) -> bool:
    """Whether a text may end a step late: no code of the caller would see that step, and it is short."""
    streamer = _streamer_of(model)
    is_short = streamer is None or streamer.plan.graph_s <= _SPARE_S
    is_seen = any(options.get(name) is not None for name in _BETWEEN)
    # with return_dict_in_generate the static cache is returned, from which a step cannot be taken back
    return is_short and not is_seen and not _setting(model, options, "return_dict_in_generate")


class _LongStep:
    """One long step of the streamer, if there is one. It is entered in a `generate` once the order of the units is
    known, and lasts until that ends."""

    def __init__(self, streamer: _CapturableStreamer | None, stack: ExitStack) -> None:
        self.is_entered = streamer is None
        self._streamer = streamer
        self._stack = stack
        self._num_forwards = 0  # before the step was entered

    def is_due(self) -> bool:
        """Called before each forward: whether to enter the step now.

        If the order of the units is not known, two eager forwards are watched first: the prompt, and the token after
        it, which may read other weights.
        """
        if self._streamer is None:
            return False
        self._num_forwards += 1
        if self._num_forwards == 2:
            self._streamer.watch()
        return self._num_forwards > 2 or (self._num_forwards == 1 and self._streamer.learned)

    def enter(self) -> str | None:
        """Enter the step. Returns the reason if that fails, else None."""
        self.is_entered = True
        try:
            if self._streamer is not None:
                self._stack.enter_context(self._streamer.step())
        except Exception as error:  # whatever it is, `generate` can run eagerly
            return str(error)
        return None


@contextmanager
def _standing_in(model: Any, decoder: Decoder) -> Iterator[None]:
    """Inside, `model.forward` is the decoder's. It keeps the signature of the forward, which transformers reads."""
    patched, forward = model.__dict__.get("forward"), model.forward

    @wraps(forward)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return decoder.run(forward, args, kwargs)

    setattr(stand_in, forward_patch.OUTER, decoder)
    model.__dict__["forward"] = stand_in
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if patched is not None:
            model.__dict__["forward"] = patched


class _Steps(Protocol):
    """The steps of a `generate` that are alike, so that they may be captured."""

    def owns(self, kwargs: dict[str, Any], /) -> bool:
        """Whether a forward is such a step."""

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, /, *, may_capture: bool) -> Any:
        """The output of a step. `may_capture`: it may run in a graph."""


class Decoder:
    """The forwards of one `generate`. `steps` run those that are alike, once the streamer's long step is entered."""

    def __init__(self, runner: GraphRunner | None, step: _LongStep, ranks: Ranks | None, steps: _Steps) -> None:
        self._runner = runner  # of graphs; None: the device has none
        self._step = step
        self._ranks = ranks
        self._steps = steps
        self.is_replaying = False  # whether the last forward was a replay

    def report(self) -> DecodeReport:
        runner = self._runner
        if runner is None:
            return DecodeReport()
        if runner.reason is None and not runner.num_replays and runner.num_steps > 2:
            return DecodeReport(reason="no two steps in a row were alike")
        return DecodeReport(replays=runner.num_replays, reason=runner.reason)

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.is_replaying = False
        runner = self._runner
        num_replays = 0 if runner is None else runner.num_replays
        if runner is not None and runner.reason is None and not self._step.is_entered:  # noqa: SIM102 - ranks agree
            if least(self._ranks, self._step.is_due()):
                runner.reason = common(self._ranks, self._step.enter())
        if not self._steps.owns(kwargs):
            return forward(*args, **kwargs)
        output = self._steps.run(forward, args, kwargs, may_capture=self._step.is_entered)
        self.is_replaying = runner is not None and runner.num_replays > num_replays
        return output


class _TokenSteps:
    """Steps of one token on a static cache that the prompt has filled."""

    def __init__(self, runner: GraphRunner) -> None:
        self._runner = runner

    def owns(self, kwargs: dict[str, Any]) -> bool:
        cache, ids = cache_in(kwargs), kwargs.get("input_ids")
        if self._runner.reason is not None or not static_cache.is_static(cache) or ids is None or ids.shape[-1] != 1:
            return False
        return all(layer.is_initialized for layer in cache.layers)  # else it is a prompt of one token

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, may_capture: bool) -> Any:
        if not may_capture:
            return forward(*args, **kwargs)
        return self._runner.run(forward, args, kwargs, cache_in(kwargs).layers)
