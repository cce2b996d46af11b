"""Hooks of diffusers that may skip the forward of a module, mostly those of caches. Knows no plan.

Does not import diffusers: a module that has its hooks has imported it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

# Each of these either calls the forward that it replaced or returns values that it computes from arguments and former
# outputs: its `new_forward` reads no weight of the module. Not in the list: hooks that compute with weights themselves
# (TextKVCacheBlockHook), that pass the module to a function of the user (FasterCache, AttentionProcessorSkipHook), or
# that never skip (those on whole models).
SKIPPING = frozenset(
    {
        ("diffusers.hooks.first_block_cache", "FBCHeadBlockHook"),
        ("diffusers.hooks.first_block_cache", "FBCBlockHook"),
        ("diffusers.hooks.mag_cache", "MagCacheHeadHook"),
        ("diffusers.hooks.mag_cache", "MagCacheBlockHook"),
        ("diffusers.hooks.taylorseer_cache", "TaylorSeerCacheHook"),
        ("diffusers.hooks.pyramid_attention_broadcast", "PyramidAttentionBroadcastHook"),
        ("diffusers.hooks.sea_cache", "SeaCacheLeaderBlockHook"),
        ("diffusers.hooks.sea_cache", "SeaCacheBlockHook"),
        ("diffusers.hooks.sea_cache", "SeaCachePostNormHook"),
        ("diffusers.hooks.layer_skip", "TransformerBlockSkipHook"),
        ("diffusers.hooks.layer_skip", "FeedForwardSkipHook"),
    }
)

_OF_MODELS = frozenset({("diffusers.hooks.sea_cache", "SeaCacheRootHook")})  # hooks of the same caches on whole models


@contextmanager
def enabled_anew(model: nn.Module) -> Iterator[None]:
    """Enable a cache that the model has again after the block, so that its hooks are outside of what the block puts
    around modules. A model that has other hooks as well, whose order would change, stays as it is."""
    config: Any = getattr(model, "_cache_config", None)
    registries = (vars(module).get("_diffusers_hook") for module in model.modules())
    kinds = {type(hook) for registry in registries if registry is not None for hook in registry.hooks.values()}
    is_known = {(kind.__module__, kind.__qualname__) for kind in kinds} <= SKIPPING | _OF_MODELS
    if config is None or not kinds or not is_known:
        yield
        return
    cached: Any = model
    cached.disable_cache()
    try:
        yield
    finally:
        cached.enable_cache(config)


def inner_forward(module: nn.Module, forward: Any) -> Any:
    """The forward inside the outermost hooks around `forward`, as far as these are known to read no weights."""
    registry = vars(module).get("_diffusers_hook")
    if registry is None:
        return forward
    for name, functions in zip(reversed(registry._hook_order), reversed(registry._fn_refs), strict=True):
        # A hook that was removed from between two others still runs, as does a forward that was assigned over them.
        is_of_hook = isinstance(forward, partial) and vars(forward).get("__wrapped__") is functions.original_forward
        kind = type(registry.hooks[name])
        if not is_of_hook or (kind.__module__, kind.__qualname__) not in SKIPPING:
            break
        forward = functions.original_forward
    return forward
