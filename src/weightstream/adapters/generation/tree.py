"""A tree of drafted tokens: the mask of the pass that verifies it, its accepted path, and the keys that stay cached.

All of it is computed on the device in shapes that depend on the number of nodes only, so that passes can be captured
and the host waits for nothing. Node 0 is the last token of the text, whose key is not cached yet. The keys of a pass
lie in the cache in the order of the nodes, so a node's place there is not its position in the text.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from weightstream.adapters.hf import private
from weightstream.adapters.steps import static_cache
from weightstream.errors import UnsupportedError

_FULL, _SLIDING = "full_attention", "sliding_attention"  # transformers' names of layers and of their masks
MASKS = ("sdpa", "eager")  # attention implementations that take a mask of any form
_EDGES = 1 << 32  # more than there are tokens: a parent and a token are one number
_ALIGNED = 16  # positions of a cache: kernels of attention differ with the alignment of its mask


class Tree(NamedTuple):
    """Tokens that one pass verifies, of shape (nodes,), and their places in the tree.

    A node that is not in use is its own parent, and no path leads to it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor
    """(nodes, nodes), bool: a row has the node itself and all nodes above it."""
    depths: torch.Tensor


def tree(tokens: torch.Tensor, parents: torch.Tensor, max_depth: int) -> Tree:
    """The tree of these parents, none of which is deeper than `max_depth`."""
    num, device = len(parents), parents.device
    above = torch.zeros(num, num, device=device).scatter_(1, parents[:, None], 1.0)
    above = (above + torch.eye(num, device=device)).clamp_(max=1)
    for _ in range(math.ceil(math.log2(max(max_depth, 1)))):  # each product doubles the number of levels
        above = (above @ above).clamp_(max=1)
    return Tree(tokens, parents, above > 0, above.sum(1).long() - 1)


def root_only(device: torch.device) -> Tree:
    """The tree of a pass in which nothing was drafted."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return tree(zero, zero, 0)


# -- the pass --------------------------------------------------------------------------------------------------------


def why_no_tree(model: Any, name: str) -> str | None:
    """Reason why a pass of this model cannot verify a tree, or None. `name` is that of the model in the reason."""
    if (reason := static_cache.unsuited(model)) is not None:
        return f"{name}: {reason}"
    if model.config._attn_implementation not in MASKS:
        return f"{name}: {model.config._attn_implementation} attention does not take the mask of a tree"
    config = model.config.get_text_config(decoder=True)
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False):
        return f"{name}: its attention takes positions from the order of the keys, which a tree does not keep"
    return None


def windows_of(model: Any, num_positions: int) -> dict[str, int | None]:
    """The windows of a model's layers in a cache of this length, by kind of layer; None: they see all of it. If all
    layers are alike, their kind has no name.

    Raises:
        UnsupportedError: for windows that no mask of a tree is known for.
    """
    from transformers.cache_utils import StaticCache

    config = model.config.get_text_config(decoder=True)
    seen = [layer.max_cache_len for layer in StaticCache(config=config, max_cache_len=num_positions).layers]
    windows = {num if num < num_positions else None for num in seen}
    if len(windows) == 1 and getattr(config, "attention_chunk_size", None) is None:
        return {"": windows.pop()}
    if windows == {None}:
        return {"": None}
    kinds = dict(zip(getattr(config, "layer_types", None) or (), seen, strict=False))
    if len(windows) > 2 or set(kinds) != {_FULL, _SLIDING}:
        raise UnsupportedError(
            f"tree_nodes: layers of {type(model).__name__} see {min(seen)} of the cache's {num_positions} positions in "
            "a way for which there is no mask of a tree; use a smaller max_new_tokens, or no tree_nodes"
        )
    return {_FULL: None, _SLIDING: kinds[_SLIDING]}


def cache_length(num_positions: int) -> int:
    """A length of a cache for these positions."""
    return math.ceil(num_positions / _ALIGNED) * _ALIGNED


class NodePass:
    """Passes of a model over nodes after a text, whose arguments have the same shapes each time.

    `seen`: the positions of the cache that attention may see, bool.
    """

    def __init__(self, model: Any, cache: Any, seen: torch.Tensor, forward: Callable[..., Any] | None = None) -> None:
        self._model = model
        self._cache = cache
        self._seen = seen
        self._forward = model if forward is None else forward
        self._windows = windows_of(model, len(seen))

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        ancestors: torch.Tensor,
        depths: torch.Tensor,
        key_depths: torch.Tensor,
    ) -> torch.Tensor:
        """The logits of nodes, of shape (nodes, words).

        Their text has `length` tokens. `ancestors`: of shape (nodes, keys), which keys a node sees of those that lie
        after the text. `depths`, `key_depths`: how many tokens are between the text and a node, or a key.
        """
        masks: Any = {
            kind: self._mask(length, ancestors, depths, key_depths, window) for kind, window in self._windows.items()
        }
        output = self._forward(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=masks if len(masks) > 1 else masks[""],
            use_cache=True,
            return_dict=True,
            **{private.cache_argument(): self._cache},
        )
        found: torch.Tensor = output.logits[0]
        return found

    def _mask(
        self,
        length: int,
        ancestors: torch.Tensor,
        depths: torch.Tensor,
        key_depths: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        mask = mask_of(self._seen, length, ancestors)
        if window is not None:
            places = torch.arange(len(self._seen), device=mask.device)
            places[length : length + len(key_depths)] = key_depths + length
            mask &= places > (depths + (length - window))[:, None]
        if self._model.config._attn_implementation == "eager":  # it adds the mask
            dtype = self._model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
        return mask[None, None]


def mask_of(seen: torch.Tensor, length: int, ancestors: torch.Tensor) -> torch.Tensor:
    """The mask of nodes, of shape (nodes, positions): the positions before `length` that are `seen`, and the ancestors,
    whose keys lie from `length` on."""
    positions = torch.arange(len(seen), device=seen.device)
    mask = (seen & (positions < length)).repeat(len(ancestors), 1)
    mask[:, length : length + ancestors.shape[1]] = ancestors
    return mask


# -- what is accepted ------------------------------------------------------------------------------------------------


class Path(NamedTuple):
    """The way from the root to the first token that was not drafted, filled up to the largest depth + 1."""

    nodes: torch.Tensor
    """The accepted nodes, the root first."""
    tokens: torch.Tensor
    """The token that was chosen at each of them."""
    num_accepted: torch.Tensor
    """Nodes after the root. One token more was chosen."""


def accepted_path(nodes: Tree, max_depth: int, choose: Callable[[torch.Tensor], torch.Tensor], *, waits: bool) -> Path:
    """Choose a token at the root and go on at the child that has it, until none has.

    This is exact for any tree: each token is chosen as without a draft (SpecExec, arXiv 2406.02532, for sampling).
    `choose` gets a node and returns a token, both of shape (1,). At the nodes that fill up the path it is called in
    vain, unless the host `waits` at each node to see whether it was the last.
    """
    index = torch.arange(len(nodes.tokens), device=nodes.tokens.device)
    edges = torch.where(nodes.depths > 0, nodes.parents * _EDGES + nodes.tokens, -1)
    node = index[:1]
    path: list[torch.Tensor] = [node]
    chosen: list[torch.Tensor] = []
    for _ in range(max_depth + 1):
        chosen.append(choose(node))
        node = ((edges == node * _EDGES + chosen[-1]) * index).amax(0, keepdim=True)  # the root if there is none
        path.append(node)
        if waits and not int(node):
            break
    filler = [index[:1]] * (max_depth + 1 - len(chosen))
    found = torch.cat([*path, *filler])
    num = (found[1:] > 0).cumprod(0).sum(0, keepdim=True)
    return Path(found[:-1], torch.cat([*chosen, *filler]), num)


def keep_path(layers: Sequence[Any], length: int, nodes: torch.Tensor) -> None:
    """Move the keys of these nodes to the places after `length` cached positions."""
    source, end = nodes + length, length + len(nodes)
    for layer in layers:
        for tensor in (layer.keys, layer.values):
            tensor[:, :, length:end] = tensor.index_select(2, source)
