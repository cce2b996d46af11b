"""Captured generation: transformers' `generate`, its decode steps replayed from a graph. Knows no weights.

A graph repeats kernels, not Python. So a step is replayed only if all that its Python looks at is what it was: shapes,
objects and plain values of the arguments, the addresses in the cache, and whether a sliding window is full. How much
the window counts is added by hand; a forward that asks for it runs eager, as the graph would keep the answer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from weightstream.adapters.hf import deferred_stop, private, static_cache
from weightstream.adapters.hf.decode_steps import CACHES, cache_in
from weightstream.adapters.hf.ranks import Ranks, common, least, num_processes, ranks_of
from weightstream.errors import WeightstreamError
from weightstream.runtime.devices import cuda
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.streamer.read_watch import OperatorMode
from weightstream.runtime.tensors.thread_state import restored

logger = logging.getLogger("weightstream")

_STATIC = MappingProxyType({"cache_implementation": "static", "disable_compile": True})
_OTHERWISE = frozenset(CACHES) | frozenset(  # settings that choose another cache or another loop than ours
    "cache_implementation compile_config custom_generate assistant_model use_mtp "  # noqa: SIM905
    "prompt_lookup_num_tokens assistant_early_exit penalty_alpha dola_layers constraints force_words_ids".split()
)
_BETWEEN = ("streamer", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn")  # the caller's code
_SPARE_S = 0.2  # so long may a step be that is run for nothing: what is won over 100 tokens or so
_TEXT = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
_COUNT = private.STATIC_WINDOW_COUNT
_INDEXED = tuple(getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_", "_index_put_impl_"))
_COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy)
_STREAMLESS = frozenset(("quanto.unpack",))  # its kernel is queued in the default stream, whatever the current one is
_WAITING = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How the steps after the prompt ran: `replays` of them from a graph; `reason`: why others did not."""

    replays: int = 0
    reason: str | None = None

    def __str__(self) -> str:
        captured = f"captured, {self.replays} replays"
        eager = f"eager ({self.reason or 'too few steps to capture one'})"
        return eager if not self.replays else captured if self.reason is None else f"{captured}, then {eager}"


class Recorder(NamedTuple):
    """How a graph is made, recorded and launched."""

    new: Callable[[], Any]
    record: Callable[[Any], AbstractContextManager[Any]]
    replay: Callable[[Any], None]


def generate(
    model: Any, inputs: Any = None, *, on_decoding: Callable[[Decoding], None] | None = None, **kwargs: Any
) -> Any:
    """Generate with a transformers model, offloaded or not, replaying decode steps from a CUDA graph where that works.

    It is `model.generate(inputs, cache_implementation="static", disable_compile=True, **kwargs)`, bit for bit. Where
    steps cannot be captured they run eager, and a warning says why; without CUDA, or when an argument asks for another
    cache or loop, it is `model.generate(inputs, **kwargs)`. That a text has ended may be seen a step late; nothing of
    that step is kept.

    Args:
        model: a transformers model.
        inputs: token ids of shape (batch, tokens), as for `model.generate`.
        on_decoding: called at the end with how the steps ran (`replays`, and the `reason` why others were not
            replayed), in place of the warning.
        kwargs: for `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        What `model.generate` raises.
    """
    result, decoding = decode(model, inputs, kwargs, _recorder(model))
    if on_decoding is not None:
        on_decoding(decoding)
    elif decoding.reason is not None:
        logger.warning("generate: %s", decoding)
    return result


@restored
def decode(model: Any, inputs: Any, options: dict[str, Any], recorder: Recorder | None) -> tuple[Any, Decoding]:
    """`generate` with this recorder; None: there are no graphs on the model's device."""
    device: torch.device = model.device  # an offloaded model tells its streamer's
    given = () if inputs is None else (inputs,)  # a model may have another name for it, and get it by that
    ranks, otherwise = ranks_of(model), f"graphs are captured on CUDA, and the model is on {device}"
    reason = common(ranks, _unsuited(model, options, ranks) if recorder else otherwise)
    if recorder is None or reason is not None:
        return model.generate(*given, **options), Decoding(reason=reason)
    if (config := options.get("generation_config")) is None:
        options = {**options, **_STATIC}
    else:  # transformers wants all settings in it, or none
        config = copy.deepcopy(config)
        config.update(**_STATIC)
        options = options | {"generation_config": config}
    with torch.no_grad(), torch.accelerator.device_index(device.index), ExitStack() as stack:
        decoder = Decoder(recorder, device, _Step(_streamer_of(model), stack), ranks)
        stack.enter_context(_standing_in(model, decoder))
        if least(ranks, _may_spare_a_step(model, options)):  # on all ranks, or one would wait for the others in it
            draws = bool(_given(model, options, "do_sample")) or model.training
            stack.enter_context(deferred_stop.a_step_late(lambda: decoder.is_replaying, draws=draws))
        result = model.generate(*given, **options)
    return result, decoder.decoding()


def _streamer_of(model: Any) -> Any:
    """Its own, or that of the model that it wraps; None: there is none."""
    return getattr(model, forward_patch.ATTRIBUTE, None)


def _recorder(model: Any) -> Recorder | None:
    if model.device.type != "cuda":
        return None
    if (streamer := _streamer_of(model)) is not None:
        return Recorder(new=cuda.new_graph, record=streamer.capture, replay=streamer.replay)
    return Recorder(new=cuda.new_graph, record=cuda.recording, replay=lambda graph: graph.replay())


def _unsuited(model: Any, options: dict[str, Any], ranks: Ranks | None) -> str | None:
    """Why `generate` should run as it is for this model and these arguments; None: it need not."""
    given = partial(_given, model, options)
    # "hybrid" is what old checkpoints say, and transformers ignores it
    if chosen := [name for name in sorted(_OTHERWISE) if given(name) not in (None, False, "hybrid")]:
        return f"{', '.join(chosen)} was given"
    if given("use_cache") is False or (given("num_beams") or 1) > 1:
        return "only greedy search and sampling, with a cache, are captured"
    # what it leads to was not seen by the call that teaches a streamer the order
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


def _given(model: Any, options: dict[str, Any], name: str) -> Any:
    """A setting of `generate`, from where it looks; None: nobody has set it."""
    configs = options.get("generation_config"), model.generation_config
    places = options.get(name), *(getattr(config, name, None) for config in configs)
    return next((value for value in places if value is not None), None)


def _may_spare_a_step(model: Any, options: dict[str, Any]) -> bool:
    """Whether a text may end a step late: nothing tells the caller, and it takes little of the time of a text."""
    streamer = _streamer_of(model)
    is_short = streamer is None or streamer.plan.graph_s <= _SPARE_S
    is_told = any(options.get(name) is not None for name in _BETWEEN)
    return is_short and not is_told and not _given(model, options, "return_dict_in_generate")  # of a static cache


class _Step:
    """One step of the streamer, if there is one, that all of `generate` becomes once its order is learned."""

    def __init__(self, streamer: Any, stack: ExitStack) -> None:
        self.is_entered = streamer is None
        self._streamer = streamer
        self._stack = stack
        self._num_waited = 0

    def is_due(self) -> bool:
        """Before a forward. What no call has taught is seen in the prompt and in the token behind it, which may read
        other weights."""
        self._num_waited += 1
        if self._num_waited == 2:
            self._streamer.watch()
        return self._num_waited > 2 or (self._num_waited == 1 and self._streamer.learned)

    def enter(self) -> str | None:
        """Returns why it cannot be."""
        self.is_entered = True
        try:
            self._stack.enter_context(self._streamer.step())
        except Exception as error:  # it runs eager, whatever it is
            return str(error)
        return None


@contextmanager
def _standing_in(model: Any, decoder: Decoder) -> Iterator[None]:
    """The decoder runs in place of `model.forward`, which transformers also asks for its signature."""
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


class _Ready(IntEnum):
    """What a step is ready for. Ranks do what all are ready for: a graph repeats what they tell each other, too."""

    WATCH = 1  # it is like none before
    CAPTURE = 2  # it is like the one before
    REPLAY = 3  # it is like the one in the graph


class Decoder:
    """The forwards of one `generate`: of steps that are alike the first is watched, the second captured."""

    def __init__(self, recorder: Recorder, device: torch.device, step: _Step, ranks: Ranks | None) -> None:
        self._recorder = recorder
        self._device = device
        self._step = step
        self._ranks = ranks
        self._num_steps = 0
        self._replays = 0
        self._watched: Any = None  # the signature of the step before
        self._graph: _Graph | None = None
        self.reason: str | None = None
        self.is_replaying = False  # the last step was

    def decoding(self) -> Decoding:
        if self.reason is None and not self._replays and self._num_steps > 2:
            self.reason = "no two steps in a row were alike"
        return Decoding(replays=self._replays, reason=self.reason)

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.is_replaying = False
        if self.reason is None and not self._step.is_entered and least(self._ranks, self._step.is_due()):
            self.reason = common(self._ranks, self._step.enter())
        cache, ids = cache_in(kwargs), kwargs.get("input_ids")
        if self.reason is not None or not static_cache.is_static(cache) or ids is None or ids.shape[-1] != 1:
            return forward(*args, **kwargs)
        if not all(layer.is_initialized for layer in cache.layers):  # a prompt of one token, which fills the cache
            return forward(*args, **kwargs)
        if not self._step.is_entered:
            return forward(*args, **kwargs)
        self._num_steps += 1
        leaves, spec = tree_flatten((args, kwargs))
        signature = spec, [_sign(leaf) for leaf in leaves], [_state(layer) for layer in cache.layers]
        is_captured = self._graph is not None and self._graph.signature == signature
        ready = _Ready.REPLAY if is_captured else _Ready.CAPTURE if self._watched == signature else _Ready.WATCH
        ready = _Ready(least(self._ranks, ready))
        if ready is _Ready.WATCH:
            self._watched = signature
            with _HostWatch() as watch:  # type: ignore[no-untyped-call]
                output = forward(*args, **kwargs)
            self.reason = common(self._ranks, watch.found)
            return output
        if ready is _Ready.CAPTURE:
            step = forward, leaves, spec
            self.reason = common(self._ranks, self._capture(signature, cache.layers, *step))
        if self._graph is None or self.reason is not None:
            self._graph = None
            return forward(*args, **kwargs)
        self._replays += 1
        self.is_replaying = True
        return self._graph.replay(leaves)

    def _capture(self, signature: Any, layers: Any, forward: Callable[..., Any], leaves: Any, spec: Any) -> str | None:
        """Make the graph. Returns why it could not be: the error would hold what is broken."""
        self._graph = None  # its memory first
        errors: list[Exception] = []  # an end of the capture that fails hides what ended it

        def step() -> Any:
            try:
                return forward(*own_args, **own_kwargs)
            except Exception as error:
                errors.append(error)
                raise

        try:
            inputs = [leaf.to(self._device, copy=True) if torch.is_tensor(leaf) else leaf for leaf in leaves]
            own_args, own_kwargs = tree_unflatten(inputs, spec)
            self._graph = _Graph(self._recorder, signature, inputs, step, layers)
        except Exception as error:  # whatever the forward, the capture or the driver makes of it
            reason = _told([*errors, error][0])
            errors.clear()  # they hold this frame
            return reason
        return None


def _told(error: Exception) -> str:
    message = str(error).partition("\n")[0]
    return message if isinstance(error, WeightstreamError) else f"the capture failed: {type(error).__name__}: {message}"


class _Graph:
    """A captured step: the tensors that it reads its arguments from, its output, and what it counts in Python."""

    def __init__(
        self, recorder: Recorder, signature: Any, inputs: list[Any], step: Callable[[], Any], layers: Sequence[Any]
    ) -> None:
        self.signature = signature
        self._inputs = inputs
        self._recorder = recorder
        self._graph = recorder.new()
        windows = [layer for layer in layers if _COUNT in vars(layer)]
        with static_cache.guarded(windows) as counts, recorder.record(self._graph):
            self._output = step()
            self._advances = [(w, getattr(w, _COUNT) - count) for w, count in zip(windows, counts, strict=True)]

    def replay(self, leaves: Sequence[Any]) -> Any:
        for own, leaf in zip(self._inputs, leaves, strict=True):
            if torch.is_tensor(leaf):
                own.copy_(leaf)
        self._recorder.replay(self._graph)
        for window, advance in self._advances:
            setattr(window, _COUNT, getattr(window, _COUNT) + advance)
        return tree_map_only(torch.Tensor, torch.clone, self._output)  # the next replay writes over it


def _sign(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return leaf if isinstance(leaf, (bool, int, float, str, torch.dtype, type(None))) else id(leaf)


def _state(layer: Any) -> dict[str, Any]:
    """What a step's Python may look at in a layer of the cache: values, and tensors by address."""
    state = {name: v.data_ptr() if isinstance(v, torch.Tensor) else v for name, v in vars(layer).items()}
    return state | {_COUNT: state.get(_COUNT, -1) >= layer.max_cache_len}  # all that `update` asks of it


class _HostWatch(OperatorMode):
    """Finds an operator that no capture allows, or has, before a capture meets it.

    A capture that fails half-way leaves PyTorch's stream, memory pool and random state behind it in pieces.
    """

    found: str | None = None  # why nothing is captured

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # wrapped tensors: what their class does with those inside is seen then
        output = func(*args, **(kwargs or {}))
        if self.found is None and _waits(func, args, output):
            self.found = f"the model waits for the device in {func}"
        elif self.found is None and str(getattr(func, "overloadpacket", "")) in _STREAMLESS:
            self.found = f"{func} ignores CUDA streams, so that a graph would compute without it"
        return output


def _waits(func: Any, args: Any, output: Any) -> bool:
    """Whether the host waits for the device: for a value, a number of elements, or a copy of pageable memory."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _INDEXED:
        if len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu" and not any(args[3:4]):
            return False  # it fills what a mask says
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if packet in _COPIES:
        sides = (output, args[packet is torch.ops.aten.copy_])
        host = [side for side in sides if side.device.type == "cpu"]
        return len(host) == 1 and not host[0].is_pinned()
    return bool(_WAITING & set(getattr(func, "tags", ())))
