"""A static KV cache from which positions can be taken back, with room for tokens that may be rejected."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch


class CroppableCache(NamedTuple):
    """The cache, and whether layers with a sliding window hold all positions in it, not only those of their window."""

    cache: Any
    widens_windows: bool


def croppable(model: Any, num_positions: int, num_spare: int) -> CroppableCache:
    """A static cache of `num_positions`, as attention sees them, with memory for `num_spare` more.

    Attention reads tensors of the same shapes as on transformers' static cache of `num_positions`, so that it runs the
    same kernels. Tokens behind the last position are stored in the spare ones, which nothing reads. A layer with a
    window that is shorter than the cache keeps all positions: the ones that fell out of a window could not be taken
    back. Its mask excludes them. `static_cache.unsuited` names models with layers of other kinds.
    """
    from transformers.cache_utils import StaticCache

    plain = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=num_positions)
    cache_class, layer_class = _classes()
    made = cache_class(config=model.config.get_text_config(decoder=True), max_cache_len=num_positions)
    made.layers = [layer_class(num_positions, num_spare) for _ in made.layers]
    return CroppableCache(made, any(layer.max_cache_len < num_positions for layer in plain.layers))


def is_croppable(cache: Any) -> bool:
    """Whether the cache is one of `croppable`, and a prompt has filled it."""
    return type(cache) is _classes()[0] and all(layer.is_initialized for layer in cache.layers)


@cache
def _classes() -> tuple[Any, Any]:
    """The class of the cache and that of its layers. transformers is imported here, as the import takes seconds."""
    from transformers.cache_utils import StaticCache, StaticLayer

    class StaticCacheOfDrafts(StaticCache):  # type: ignore[misc]
        """transformers 5.17 refuses a `StaticCache` with an assistant, by exact type: the lengths could not shrink."""

        def crop(self, tokens_to_remove: Any) -> None:
            """Take back positions of all layers, in one kernel; their number is negative, as transformers passes it."""
            torch._foreach_add_([layer.cumulative_length for layer in self.layers], int(tokens_to_remove))

    class Layer(StaticLayer):  # type: ignore[misc]
        """A layer whose attention sees `max_cache_len` positions, of `num_spare` more in memory."""

        def __init__(self, max_cache_len: int, num_spare: int) -> None:
            super().__init__(max_cache_len=max_cache_len)
            self.num_spare = num_spare

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            num_positions = int(self.max_cache_len)  # type: ignore[has-type]
            self.max_cache_len = num_positions + self.num_spare
            try:
                super().lazy_initialization(*args, **kwargs)
            finally:
                self.max_cache_len = num_positions

        def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = super().update(*args, **kwargs)
            return keys[:, :, : self.max_cache_len], values[:, :, : self.max_cache_len]

        def crop(self, tokens_to_remove: int) -> None:
            """Take back positions; their number is negative."""
            self.cumulative_length.add_(tokens_to_remove)  # in place: graphs know its address

    return StaticCacheOfDrafts, Layer
