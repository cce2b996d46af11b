"""Several tokens in one forward with the bits of one token at a time: each module runs them one after the other.

A product of several rows adds in another order than a product of one. But weights that are streamed are on the device
for the whole time of a module, so there is time to run its rows one by one, which gives the bits of decoding one token
at a time. The rows are those of transformers' blocks on a static cache, whose masks and positions have a row for each
token. Where a trial finds that rows at once have the same bits, they run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from weightstream.adapters.hf import private
from weightstream.adapters.modules.partition import find_blocks
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.tensors.undo import Undo

_TRIALS = "_weightstream_row_trials"  # an attribute of a model


class Mode(Enum):
    """How the rows of a forward run."""

    AT_ONCE = "at once"
    SERIAL = "one after the other"
    TRIAL = "both, to compare"


class _Part(NamedTuple):
    """A module that runs row by row. `is_leaf`: it computes with tensors of its own alone, such as a linear layer."""

    module: nn.Module
    is_leaf: bool


class Trial(NamedTuple):
    """The output of a step, whether rows at once have the bits of single ones, and a reason why no rows can be single
    ones, or None."""

    output: Any
    is_equal: bool
    reason: str | None


class SerialRows:
    """Runs the modules of a model, which hold all its weights, row by row.

    These are whole blocks, unless parts of a block are streamed one by one. Then each part runs its rows while its
    weights are there, and so does attention, which has no weights; all else in a block treats rows alone anyway.
    """

    def __init__(self, model: nn.Module, width: int) -> None:
        self.mode = Mode.AT_ONCE
        self._width = width
        self._model: Any = model
        self._parts = list(_parts(model))
        covered = {id(each) for part in self._parts for each in part.module.modules()}
        self._attention = [module for module in _attention(model) if id(module) not in covered]
        self._seen: set[int] = set()  # ids of attention modules that ran row by row
        self._differs: torch.Tensor | None = None
        self._misfit: str | None = None  # a module whose rows do not make up its output
        self.num_compared = 0  # values of both ways, in all trials
        self._keeps_serial = False

    @property
    def unsuited(self) -> str | None:
        """Reason why the rows of this model cannot run one after the other, or None."""
        kind = getattr(self._model.config, "_attn_implementation", None)
        if kind not in ("sdpa", "eager"):
            return f"masks of {kind} attention have no row for each token"
        if kind == "eager" and self._attention:
            return "parts of a layer are streamed one by one, which needs sdpa attention; its attention is eager"
        return None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the model's modules run forwards of `width` tokens in the mode that is set."""
        undo = Undo()
        try:
            for part in self._parts:
                undo.add(forward_patch.add_inside(part.module, partial(self._run, part)))
            for module in self._attention:
                undo.add(private.attend_by(module, self._attend))
            yield
        finally:
            undo()

    def try_out(self, step: Callable[[], Any], *, keeps_serial: bool) -> Trial:
        """Run a step in both ways, module by module, and compare all outputs. Waits for the device.

        `keeps_serial`: modules pass on what they computed row by row, else what they computed at once.
        """
        self._differs, self._misfit, self.mode, self._keeps_serial = None, None, Mode.TRIAL, keeps_serial
        try:
            output = step()
        finally:
            self.mode = Mode.AT_ONCE
        return Trial(output, self._differs is not None and not bool(self._differs), self._why_not())

    def _why_not(self) -> str | None:
        """Reason why a trial has shown that rows cannot run one after the other, or None."""
        name = type(self._model).__name__
        if self._misfit is not None:
            return f"outputs of {self._misfit} in {name} have no entry for each token"
        if not self._seen >= set(map(id, self._attention)):
            return (
                f"{name} has attention of its own, whose rows cannot run one after the other where parts of a layer "
                "are streamed one by one"
            )
        return f"{name} has no parts whose rows can run one after the other" if self._differs is None else None

    def _run(self, part: _Part, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if getattr(forward, "__func__", None) is type(part.module)._call_impl:
            return forward(*args, **kwargs)  # hooks, and the forward, which comes here too
        leaves, spec = tree_flatten((args, kwargs))
        cuts = [_row_dim(leaf, self._width, is_leaf=part.is_leaf) for leaf in leaves]
        is_state = (c is not None and leaf.is_floating_point() for c, leaf in zip(cuts, leaves, strict=True))
        if self.mode is Mode.AT_ONCE or not any(is_state):
            return forward(*args, **kwargs)  # or a prompt, or a module that sees no tokens
        dim = next(c for c, leaf in zip(cuts, leaves, strict=True) if c is not None and leaf.is_floating_point())

        def serial() -> Any:
            return self._by_row(forward, leaves, spec, cuts, dim if part.is_leaf else None)

        def take_back() -> None:
            for layer in _cache_layers(part.module, leaves):
                layer.crop(-self._width)

        return self._ran(part.module, serial, lambda: forward(*args, **kwargs), take_back)

    def _attend(self, attention: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Attention as transformers calls it: with queries of shape (batch, heads, tokens, width), keys and values."""
        leaves, spec = tree_flatten(((module, *args), kwargs))
        if self.mode is Mode.AT_ONCE or args[0].shape[2] != self._width:
            return attention(module, *args, **kwargs)
        self._seen.add(id(module))
        of_keys = {id(args[1]), id(args[2])}
        cuts = [
            None if id(leaf) in of_keys else 2 if leaf is args[0] else _row_dim(leaf, self._width, is_leaf=False)
            for leaf in leaves
        ]
        return self._ran(
            module, lambda: self._by_row(attention, leaves, spec, cuts, 1), lambda: attention(module, *args, **kwargs)
        )

    def _ran(
        self,
        module: nn.Module,
        serial: Callable[[], Any],
        at_once: Callable[[], Any],
        take_back: Callable[[], None] = lambda: None,
    ) -> Any:
        """The output of a module in the mode that is set. `take_back` takes the tokens out of the cache again."""
        if self.mode is Mode.SERIAL:
            return serial()
        dropped, kept = (at_once, serial) if self._keeps_serial else (serial, at_once)
        other = dropped()
        take_back()
        output = kept()  # last, as the cache holds the keys of the last one
        if _shapes(other) != _shapes(output):
            self._misfit = type(module).__name__
            return other if self._keeps_serial else output
        self._compare(other, output)
        return output

    def _by_row(
        self, function: Callable[..., Any], leaves: list[Any], spec: TreeSpec, cuts: list[int | None], dim: int | None
    ) -> Any:
        """Call the function for each row of these leaves of its arguments. Outputs are joined along `dim`; None: along
        the dimension that states and masks of their shape have for tokens."""
        rows = []
        for row in range(self._width):
            own = [leaf if c is None else leaf.narrow(c, row, 1).clone() for leaf, c in zip(leaves, cuts, strict=True)]
            args, kwargs = tree_unflatten(own, spec)
            rows.append(function(*args, **kwargs))
        return _joined(rows, dim)

    def _compare(self, first: Any, second: Any) -> None:
        for a, b in zip(tree_flatten(first)[0], tree_flatten(second)[0], strict=True):
            if isinstance(a, torch.Tensor):
                is_other = (_bits(a) != _bits(b)).any()
                self.num_compared += a.numel()
                self._differs = is_other if self._differs is None else self._differs | is_other.to(self._differs.device)


def trials(model: nn.Module) -> dict[object, bool]:
    """What trials with this model have found, by what may decide which kernels run."""
    found: dict[object, bool] = vars(model).setdefault(_TRIALS, {})
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _row_dim(leaf: Any, width: int, *, is_leaf: bool) -> int | None:
    """The dimension of an argument that has one entry for each token; None: there is none.

    A block's states are of shape (batch, tokens, …) and positions (…, tokens). What has four dimensions is a mask
    (batch, heads, tokens, keys), or angles of several kinds of positions (kinds, batch, tokens, width). A leaf module
    has only states: (tokens, …), (batch, tokens, …), or (batch, heads, tokens, width).
    """
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return None
    if is_leaf:
        dims = [0] if leaf.dim() == 2 else [1, 2] if leaf.dim() > 2 else []
    elif leaf.is_floating_point() or leaf.dtype == torch.bool:
        dims = [leaf.dim() - 2] if leaf.dim() in (3, 4) else []
    else:
        dims = [leaf.dim() - 1]
    return next((dim for dim in dims if leaf.shape[dim] == width), None)


def _joined(rows: list[Any], dim: int | None) -> Any:
    """The outputs of all rows as one: tensors of one token each are joined, all else is that of the last row."""
    found, spec = zip(*map(tree_flatten, rows), strict=True)
    joined = []
    for each in zip(*found, strict=True):
        num_dims = each[0].dim() if isinstance(each[0], torch.Tensor) else 0
        own = dim if dim is not None else {3: 1, 4: 2}.get(num_dims)
        joined.append(torch.cat(each, own) if own is not None and num_dims > max(own, 1) else each[-1])
    return tree_unflatten(joined, spec[0])


def _shapes(output: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]


def _cache_layers(module: nn.Module, leaves: list[Any]) -> list[Any]:
    """The layers of the cache among the arguments that the module updates."""
    indices = {vars(m)["layer_idx"] for m in module.modules() if isinstance(vars(m).get("layer_idx"), int)}
    caches = [leaf for leaf in leaves if hasattr(leaf, "layers") and hasattr(leaf, "crop")]
    return [cache.layers[index] for cache in caches[:1] for index in sorted(indices)]


def _parts(model: nn.Module) -> Iterator[_Part]:
    """The largest modules that can run row by row: blocks, or parts of a block that are streamed one by one, and
    modules outside of blocks. Not embeddings, which read rows anyway."""
    blocks = {id(block) for block in find_blocks(model)}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if next(module.parameters(), None) is None or isinstance(module, nn.Embedding):
            return
        inner = [each for each in module.modules() if each is not module]
        is_outer = id(module) not in blocks and any(isinstance(each, nn.Embedding) for each in inner)
        is_outer |= isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if is_outer or any(id(each) in blocks or forward_patch.is_unit(each) for each in inner):
            for child in module.children():
                yield from visit(child)
        else:
            yield module

    for module in {id(module): module for module in visit(model)}.values():
        is_leaf = all(next(child.parameters(), None) is None for child in module.children())
        yield _Part(module, is_leaf and id(module) not in blocks)


def _attention(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules that have a layer of the cache: attention."""
    found = {id(m): m for m in model.modules() if isinstance(vars(m).get("layer_idx"), int)}
    outer = {id(m) for m in found.values() for each in m.modules() if each is not m and id(each) in found}
    yield from (m for key, m in found.items() if key not in outer)
