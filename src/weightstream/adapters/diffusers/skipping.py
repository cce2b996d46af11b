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


@contextmanager
def lifted(model: nn.Module) -> Iterator[None]:
    """Take hooks that may skip from their modules, and put the same hooks back after the block: they are then outside
    of what it has put around the modules.

    A module keeps hooks of other kinds, whose order would change, and hooks that something else was put around.
    """
    taken: list[tuple[Any, str, Any]] = []
    try:
        for module in model.modules():
            registry = vars(module).get("_diffusers_hook")
            if registry is None or len(_inside(module, vars(module).get("forward"))) < len(registry.hooks):
                continue
            for name in registry._hook_order[::-1]:
                taken.append((registry, name, registry.hooks[name]))
                registry.remove_hook(name, recurse=False)
        yield
    finally:
        for registry, name, hook in reversed(taken):
            if name not in registry.hooks:
                registry.register_hook(hook, name)


def inner_forward(module: nn.Module, forward: Any) -> Any:
    """The forward inside the outermost hooks around `forward`, as far as these are known to read no weights."""
    return [forward, *_inside(module, forward)][-1]


def _inside(module: nn.Module, forward: Any) -> list[Any]:
    """The forwards inside of each of these hooks, the outermost first."""
    registry, found = vars(module).get("_diffusers_hook"), list[Any]()
    if registry is None:
        return found
    for name, functions in zip(reversed(registry._hook_order), reversed(registry._fn_refs), strict=True):
        # A hook that was removed from between two others still runs, as does a forward that was assigned over them.
        is_of_hook = isinstance(forward, partial) and vars(forward).get("__wrapped__") is functions.original_forward
        kind = type(registry.hooks[name])
        if not is_of_hook or (kind.__module__, kind.__qualname__) not in SKIPPING:
            break
        forward = functions.original_forward
        found.append(forward)
    return found
