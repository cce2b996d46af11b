"""Captured generation: transformers' `generate`, its decode steps replayed from a graph. Knows no weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch

from weightstream.adapters import hf_private
from weightstream.adapters.decoder import Decoder, Decoding, Recorder
from weightstream.runtime import cuda, guards

logger = logging.getLogger("weightstream")

_STATIC = MappingProxyType({"cache_implementation": "static", "disable_compile": True})
_OTHERWISE = frozenset(  # settings that choose another cache or another loop than ours
    "past_key_values cache_params cache_implementation compile_config custom_generate assistant_model use_mtp "  # noqa: SIM905
    "prompt_lookup_num_tokens assistant_early_exit penalty_alpha dola_layers constraints force_words_ids".split()
)
_TEXT = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")


def generate(
    model: Any, inputs: Any = None, *, on_decoding: Callable[[Decoding], None] | None = None, **kwargs: Any
) -> Any:
    """`weightstream.generate`, whose docstring says the rest."""
    result, decoding = decode(model, inputs, kwargs, _recorder(model))
    if on_decoding is not None:
        on_decoding(decoding)
    elif decoding.reason is not None:
        logger.warning("generate: %s", decoding)
    return result


def decode(model: Any, inputs: Any, options: dict[str, Any], recorder: Recorder | None) -> tuple[Any, Decoding]:
    """`generate` with this recorder; None: there are no graphs on the model's device."""
    device = _device(model)
    reason = _unsuited(model, options) if recorder else f"graphs are captured on CUDA, and the model is on {device}"
    if recorder is None or reason is not None:
        return model.generate(inputs, **options), Decoding(reason=reason)
    if (config := options.get("generation_config")) is None:
        options = {**options, **_STATIC}
    else:  # transformers wants all settings in it, or none
        config = copy.deepcopy(config)
        config.update(**_STATIC)
        options = options | {"generation_config": config}
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(torch.accelerator.device_index(device.index))
        decoder = Decoder(recorder, device)
        if (streamer := getattr(model, guards.ATTRIBUTE, None)) is not None:
            decoder.reason = _enter_step(model, streamer, stack)
        stack.enter_context(_standing_in(model, decoder))
        result = model.generate(inputs, **options)
    return result, decoder.decoding()


def _device(model: Any) -> torch.device:
    streamer = getattr(model, guards.ATTRIBUTE, None)
    device: torch.device = model.device if streamer is None else streamer.device
    return device


def _recorder(model: Any) -> Recorder | None:
    if _device(model).type != "cuda":
        return None
    if (streamer := getattr(model, guards.ATTRIBUTE, None)) is not None:
        return Recorder(new=cuda.new_graph, record=streamer.capture, replay=streamer.replay)
    return Recorder(new=cuda.new_graph, record=cuda.recording, replay=lambda graph: graph.replay())


def _unsuited(model: Any, options: dict[str, Any]) -> str | None:
    """Why `generate` should run as it is for this model and these arguments; None: it need not."""
    config = options.get("generation_config")

    def given(name: str) -> Any:
        places = (options.get(name), getattr(config, name, None), getattr(model.generation_config, name, None))
        return next((value for value in places if value is not None), None)

    # "hybrid" is what old checkpoints say, and transformers ignores it
    if chosen := [name for name in sorted(_OTHERWISE) if given(name) not in (None, False, "hybrid")]:
        return f"{', '.join(chosen)} was given"
    if given("use_cache") is False or (given("num_beams") or 1) > 1:
        return "only greedy search and sampling, with a cache, are captured"
    # what it leads to was not seen by the call that teaches a streamer the order
    if others := [name for name, v in options.items() if isinstance(v, torch.Tensor) and name not in _TEXT]:
        return f"{', '.join(others)}: only text is decoded from a graph"
    if (reason := hf_private.unsuited_to_static_cache(model)) is not None:
        return reason
    if guards.ATTRIBUTE not in model.__dict__ and len({p.device for p in model.parameters()}) > 1:
        return "the model is spread over several devices"
    if hasattr(model.__dict__.get("forward"), "_weightstream_decoder"):
        return "generate() is running with this model already"
    return None


def _enter_step(model: Any, streamer: Any, stack: ExitStack) -> str | None:
    """All of `generate` becomes one step of the streamer's; returns why it cannot."""
    try:
        for _ in range(2):  # a weight that is read outside of its unit takes a second call
            if not streamer.learned:
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=streamer.device), use_cache=False)
        stack.enter_context(streamer.step())
    except Exception as error:  # a forward that wants other arguments, too
        return str(error)
    return None


@contextmanager
def _standing_in(model: Any, decoder: Decoder) -> Iterator[None]:
    """The decoder runs in place of `model.forward`, which transformers also asks for its signature."""
    patched, forward = model.__dict__.get("forward"), model.forward

    @wraps(forward)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return decoder.run(forward, args, kwargs)

    stand_in._weightstream_decoder = decoder  # type: ignore[attr-defined]
    model.__dict__["forward"] = stand_in
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if patched is not None:
            model.__dict__["forward"] = patched
