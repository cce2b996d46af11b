"""The static KV cache of captured decode steps: which models can use it, its shapes, and the lengths of its layers.

transformers' static layers keep the number of positions that they have seen as a tensor on the device. A layer with a
sliding window also keeps it as a Python int, and decides by that int how to update itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weightstream.adapters.hf import private
from weightstream.errors import UnsupportedError

_COUNT = private.STATIC_WINDOW_COUNT  # the int, of sliding windows only
_LENGTH = private.WINDOW_COUNT  # the tensor
_LENGTH_METHOD = "get_seq_length"  # returns the tensor, or the int of a sliding window


def unsuited(model: Any) -> str | None:
    """Reason why a decode step of this model cannot run on a static cache of attention layers alone, or None."""
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    if model.config.is_encoder_decoder or not getattr(model, "_can_compile_fullgraph", False):
        return f"{type(model).__name__} does not work with a static cache alone"
    layers = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=2).layers
    others = {type(layer).__name__ for layer in layers} - {StaticLayer.__name__, StaticSlidingWindowLayer.__name__}
    return f"the cache has layers of other kinds than attention: {', '.join(sorted(others))}" if others else None


def is_static(cache: Any) -> bool:
    from transformers.cache_utils import StaticCache

    return type(cache) is StaticCache


def tell_lengths_at(cache: Any, device: torch.device) -> None:
    """Have the layers of a model on several GPUs return their length on `device`, where positions and masks are
    computed from it."""
    layers = getattr(cache, "layers", None)
    for layer in layers if isinstance(layers, list) else ():
        own = getattr(layer, "__dict__", {})
        if isinstance(own.get(_LENGTH), torch.Tensor) and _LENGTH_METHOD not in own:  # else it is done already
            length = layer.get_seq_length()
            if length is own[_LENGTH] and length.device != device:
                own[_LENGTH_METHOD] = partial(_at, length, device)  # without the layer, which would be a cycle


def _at(length: torch.Tensor, device: torch.device) -> torch.Tensor:
    return length.to(device, non_blocking=True)


def static(model: Any, cache: Any, num_positions: int, num_filled: int) -> Any | None:
    """A static cache on meta, like the one that captured steps use instead of this dynamic `cache`; None if the model's
    steps cannot be captured.

    It has `num_positions`, of which `num_filled` are filled.
    """
    from transformers.cache_utils import DynamicCache, StaticCache

    if type(cache) is not DynamicCache or unsuited(model) is not None:
        return None
    made = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=num_positions)
    for index, layer in enumerate(cache.layers):
        made.update(layer.keys, layer.values, index)  # allocates the tensors of a layer, in these shapes
    for layer in made.layers:
        if _COUNT in vars(layer):  # the update counted the window's positions only
            setattr(layer, _COUNT, num_filled)
    return made


@contextmanager
def guarded(windows: Sequence[Any]) -> Iterator[list[int]]:
    """During a capture, layers with a sliding window refuse to return their length, and copy nothing from the host.

    A graph would keep what the model computes in Python from this length, though it changes in each step. Yields the
    counts of the windows. Restores them at the end, as the layers count a step that the capture did not run.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError("the model computes with the length of a sliding window in Python")

    counts = [getattr(window, _COUNT) for window in windows]
    for window in windows:
        update = partial(_on_device, window.update)
        vars(window).update(get_seq_length=refuse, get_mask_sizes=refuse, update=update)
    try:
        yield counts
    finally:
        for window, count in zip(windows, counts, strict=True):
            del window.get_seq_length, window.get_mask_sizes, window.update
            setattr(window, _COUNT, count)


def _on_device(update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _MadeOnDevice():
        return update(*args, **kwargs)


class _MadeOnDevice(TorchFunctionMode):
    """Makes `torch.tensor([…])` by kernels: it would copy from pageable memory, which no capture allows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            return torch.stack([torch.full((), value, **kwargs) for value in args[0]])
        return func(*args, **(kwargs or {}))
