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

from weightstream.adapters.generation import static_cache
from weightstream.adapters.generation.croppable_cache import croppable
from weightstream.adapters.hf import private

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


def has_window_within(model: Any, num_positions: int) -> bool:
    """Whether a layer sees fewer positions than these, which the mask of a tree does not provide for."""
    return croppable(model, num_positions, 0).widens_windows


def cache_length(num_positions: int) -> int:
    """A length of a cache for these positions."""
    return math.ceil(num_positions / _ALIGNED) * _ALIGNED


def mask_of(seen: torch.Tensor, length: int, ancestors: torch.Tensor) -> torch.Tensor:
    """The mask of nodes, of shape (nodes, positions): the positions before `length` that are `seen`, and the ancestors,
    whose keys lie from `length` on."""
    positions = torch.arange(len(seen), device=seen.device)
    mask = (seen & (positions < length)).repeat(len(ancestors), 1)
    mask[:, length : length + ancestors.shape[1]] = ancestors
    return mask


def run_nodes(
    model: Callable[..., Any],
    cache: Any,
    config: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The logits of a pass over nodes, of shape (nodes, words). Its arguments have the same shapes in each pass."""
    if config._attn_implementation == "eager":  # it adds the mask
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    output = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask=mask[None, None],
        use_cache=True,
        return_dict=True,
        **{private.cache_argument(): cache},
    )
    logits: torch.Tensor = output.logits[0]
    return logits


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
