"""Decode steps of a language model for measurements: each is a forward of new random tokens after the same prompt."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import nn

from weightstream.adapters.hf import private
from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Workload
from weightstream.runtime.tensors.pytree import tensors_in

CACHES = ("cache", "past_key_values", "cache_params")  # transformers' name since 5.24, and older ones
_SEED = 7
_NUM_TURNS = 64  # steps with different tokens: with one token over and over a mixture finds all its experts cached


def takes_ids(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a language model's forward. Raises `UnsupportedError` for a model that needs more than ids."""
    config, takes = getattr(model, "config", None), inspect.signature(model.forward).parameters
    if config is None or "input_ids" not in takes or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{type(model).__name__} takes more than token ids: no steps can be made up for it")
    return takes


def options_of(takes: Mapping[str, inspect.Parameter]) -> dict[str, bool | int]:
    """The options that generation passes to a forward, of those that it takes: use a cache, return the last logits
    only."""
    return {name: value for name, value in (("use_cache", True), ("logits_to_keep", 1)) if name in takes}


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a forward, if any."""
    return next(
        (kwargs[name] for name in CACHES if hasattr(kwargs.get(name), "__dict__")), None
    )  # a flag or None has no attributes


def layers_of(cache: Any) -> Iterable[dict[str, Any]]:
    """The attributes of each layer of a cache, or of the cache itself where it has no layers."""
    return map(vars, getattr(cache, "layers", [] if cache is None else [cache]))


def cached(cache: Any) -> list[torch.Tensor]:
    """The tensors of a cache on meta."""
    return [tensor for layer in layers_of(cache) for tensor in tensors_in(layer) if tensor.is_meta and tensor.dim() > 1]


def shorten(cache: Any, num_positions: int) -> None:
    """Make a cache on meta hold fewer positions; a state that does not grow with the positions stays."""
    for layer in layers_of(cache):
        for name in private.BY_POSITION:
            if isinstance(tensor := layer.get(name), torch.Tensor):
                kept = min(num_positions, tensor.shape[-2])
                layer[name] = torch.empty_like(tensor[..., :kept, :], memory_format=torch.contiguous_format)
        if private.WINDOW_COUNT in layer:
            layer[private.WINDOW_COUNT] = num_positions


class DecodeSteps:
    """Steps of one workload with random tokens, each on the cache as the prompt left it. Equal models have equal
    outputs."""

    def __init__(self, model: nn.Module, workload: Workload, device: torch.device) -> None:
        """Run the prompt, `context - tokens` random tokens."""
        takes = takes_ids(model)
        self._model = model
        self._options = options_of(takes)
        config: Any = model.config
        num_words = config.get_text_config().vocab_size
        shape = workload.batch, max(workload.context, workload.tokens)
        chance, past = torch.Generator().manual_seed(_SEED), shape[1] - workload.tokens
        ids = torch.randint(num_words, shape, generator=chance).to(device)
        new = torch.randint(num_words, (_NUM_TURNS, shape[0], workload.tokens), generator=chance).to(device)
        self._caches: dict[str, Any] = {}
        if past:
            output = self._forward(ids[:, :past])
            found = {name: getattr(output, name, None) for name in CACHES if name in takes}
            self._caches = {name: cache for name, cache in found.items() if cache is not None}
        is_whole = past > 0 and not self._caches  # a model without a cache gets the whole context
        self._before = ids[:, : past if is_whole else 0]
        self._turns = cycle(new)
        self._prompt = [dict(layer) for layer in self._layers()]

    def __call__(self) -> torch.Tensor:
        """The logits of the last token, of shape (batch, words)."""
        ids = torch.cat([self._before, next(self._turns)], 1)
        with private.decode_step(self._model, ids.shape[1]):
            logits: torch.Tensor = self._forward(ids).logits[:, -1]
        for layer, prompt in zip(self._layers(), self._prompt, strict=True):
            layer.update(prompt)  # a cache grows into new tensors, so those of the prompt are as they were
        return logits

    def _forward(self, ids: torch.Tensor) -> Any:
        with torch.no_grad():
            return self._model(input_ids=ids, **self._options, **self._caches)

    def _layers(self) -> Iterator[dict[str, Any]]:
        for cache in self._caches.values():
            yield from layers_of(cache)
