"""What a call of `generate` asks for, and why it cannot be captured. Knows no loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from weightstream.adapters.hf.ranks import Ranks, num_processes
from weightstream.adapters.steps import static_cache
from weightstream.adapters.steps.decode_steps import CACHES
from weightstream.adapters.steps.graph_runner import LaunchableGraph, Recorder
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.runtime.devices import cuda
from weightstream.runtime.streamer import forward_patch

_OTHERWISE = frozenset(CACHES) | frozenset(  # settings that choose another cache or another loop than ours
    "cache_implementation compile_config custom_generate penalty_alpha dola_layers constraints "  # noqa: SIM905
    "force_words_ids".split()
)
_TEXT = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")


class _Planned(Protocol):
    """A plan of one device or of several."""

    @property
    def graph_s(self) -> float:
        """The predicted seconds of a step in a graph."""


class CapturableStreamer(Protocol):
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


def check_generates(model: Any) -> None:
    """Raise `UnsupportedError` if the model is none that transformers generates with."""
    lacking = [name for name in ("generate", "device", "generation_config") if not hasattr(model, name)]
    if lacking:
        raise UnsupportedError(
            f"{type(model).__name__} has no {' and no '.join(lacking)}: weightstream.generate takes a transformers "
            "model that generates text"
        )


def check_ids(ids: object) -> None:
    """Raise `ConfigError` for token ids that are no tensor; None: they are not given."""
    if ids is None or isinstance(ids, torch.Tensor):
        return
    remedy = "pass a tensor of token ids of shape (batch, tokens)"
    if isinstance(ids, str):
        remedy = "tokenize it: generate(model, **tokenizer(text, return_tensors='pt'))"
    elif isinstance(ids, Mapping):
        remedy = "pass its tensors as keywords: generate(model, **tokenizer(text, return_tensors='pt'))"
    raise ConfigError(f"the inputs are a {type(ids).__name__}, not token ids: {remedy}")


def setting_of(model: Any, options: dict[str, Any], name: str) -> Any:
    """A setting of `generate`, from the places where transformers looks; None: it is not set."""
    configs = options.get("generation_config"), model.generation_config
    places = options.get(name), *(getattr(config, name, None) for config in configs)
    return next((value for value in places if value is not None), None)


def with_settings(options: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `generate` with more settings. transformers wants either all in a `generation_config`, or none."""
    if (config := options.get("generation_config")) is None:
        return {**options, **settings}
    config = copy.deepcopy(config)
    config.update(**settings)
    return options | {"generation_config": config}


def streamer_of(model: Any) -> CapturableStreamer | None:
    """The streamer of the model, or of the model that it wraps; None: there is none."""
    streamer: CapturableStreamer | None = getattr(model, forward_patch.ATTRIBUTE, None)
    return streamer


def recorder_of(model: Any) -> Recorder | None:
    if model.device.type != "cuda":
        return None
    if (streamer := streamer_of(model)) is not None:
        return Recorder(new=cuda.new_graph, record=streamer.capture, replay=streamer.replay)
    return resident_recorder()


def resident_recorder() -> Recorder:
    """The recorder of a model that does not stream, on a GPU."""
    return Recorder(new=cuda.new_graph, record=cuda.recording, replay=lambda graph: graph.replay())


def no_graphs(device: torch.device) -> str:
    return f"graphs are captured on CUDA, and the model is on {device}"


def why_not_captured(model: Any, options: dict[str, Any], ranks: Ranks | None) -> str | None:
    """Reason to run `generate` as it is for this model and these arguments, or None."""
    setting = partial(setting_of, model, options)
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
