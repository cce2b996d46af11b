"""Several tokens in one forward with the bits of one token at a time: each module runs them one after the other.

A product of several rows adds in another order than a product of one. But weights that are streamed are on the device
for the whole time of a module, so there is time to run its rows one by one, which gives the bits of decoding one token
at a time. The rows are those of transformers' blocks on a static cache, whose masks and positions have a row for each
token. Where a trial (`row_trial.py`) finds that rows at once have the same bits, they run at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from weightstream.adapters.generation.row_trial import RowTrial
from weightstream.adapters.hf import private
from weightstream.adapters.modules.partition import find_blocks
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.tensors.undo import Undo

logger = logging.getLogger("weightstream")

_TRIALS = "_weightstream_row_trials"  # an attribute of a model


class Mode(Enum):
    """How the rows of a forward run."""

    AT_ONCE = "at once"
    SERIAL = "one after the other"
    TRIAL = "at once, with shapes noted"


class _Part(NamedTuple):
    """A module that runs row by row. `is_leaf`: it computes with tensors of its own alone, such as a linear layer."""

    module: nn.Module
    is_leaf: bool


class TriedStep(NamedTuple):
    """The output of a step of rows at once, whether these have the bits of single ones, and a reason why rows cannot
    run one after the other, or None."""

    output: Any
    is_equal: bool
    reason: str | None


class _Noted(NamedTuple):
    """A call of a module in a trial, and its output on meta. `is_of_rows`: it would run row by row, with outputs joined
    along `dim`."""

    name: str
    is_of_rows: bool
    dim: int | None
    output: Any


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
        self._calls: dict[int, list[_Noted]] = {}  # by id of a module, for each of its calls: of one row, then of all

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

    def try_out(self, step: Callable[[], Any], one: Callable[[], Any], take_back: Callable[[int], None]) -> TriedStep:
        """Run a step of one token, then the step with its rows at once, and compare their operators.

        `take_back` takes a number of tokens out of the cache again.
        """
        trial = RowTrial(self._width)
        self._calls, self.mode = {}, Mode.TRIAL
        try:
            trial.run_single(one)
            take_back(1)
            singles, self._calls = self._calls, {}
            output, differences = trial.run_wide(step)
        finally:
            self.mode = Mode.AT_ONCE
        logger.debug("generate: %d rows at once, operators with other bits: %s", self._width, differences)
        return TriedStep(output, not differences, self._why_not(singles))

    def _why_not(self, singles: dict[int, list[_Noted]]) -> str | None:
        """Reason why a trial has shown that rows cannot run one after the other, or None."""
        name = type(self._model).__name__
        pairs = [
            (call, one)
            for module, calls in self._calls.items()
            for call, one in zip(calls, singles.get(module, ()), strict=False)
            if call.is_of_rows
        ]
        for call, one in pairs:
            if _shapes(_joined([one.output] * self._width, call.dim)) != _shapes(call.output):
                return f"outputs of {call.name} in {name} have no entry for each token"
        if not self._seen >= set(map(id, self._attention)):
            return (
                f"{name} has attention of its own, whose rows cannot run one after the other where parts of a layer "
                "are streamed one by one"
            )
        return None if pairs else f"{name} has no parts whose rows can run one after the other"

    def _run(self, part: _Part, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if getattr(forward, "__func__", None) is type(part.module)._call_impl:
            return forward(*args, **kwargs)  # hooks, and the forward, which comes here too
        leaves, spec = tree_flatten((args, kwargs))
        cuts = [_row_dim(leaf, self._width, is_leaf=part.is_leaf) for leaf in leaves]
        states = [c for c, leaf in zip(cuts, leaves, strict=True) if c is not None and leaf.is_floating_point()]
        dim = states[0] if states and part.is_leaf else None
        if self.mode is Mode.SERIAL and states:  # else a prompt, or a module that sees no tokens
            return self._by_row(forward, leaves, spec, cuts, dim)
        output = forward(*args, **kwargs)
        if self.mode is Mode.TRIAL:
            shapes = tree_map_only(torch.Tensor, lambda tensor: tensor.new_empty(tensor.shape, device="meta"), output)
            call = _Noted(type(part.module).__name__, bool(states), dim, shapes)
            self._calls.setdefault(id(part.module), []).append(call)
        return output

    def _attend(self, attention: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Attention as transformers calls it: with queries of shape (batch, heads, tokens, width), keys and values."""
        leaves, spec = tree_flatten(((module, *args), kwargs))
        if self.mode is Mode.AT_ONCE or args[0].shape[2] != self._width:
            return attention(module, *args, **kwargs)
        self._seen.add(id(module))
        if self.mode is Mode.TRIAL:
            return attention(module, *args, **kwargs)
        of_keys = {id(args[1]), id(args[2])}
        cuts = [
            None if id(leaf) in of_keys else 2 if leaf is args[0] else _row_dim(leaf, self._width, is_leaf=False)
            for leaf in leaves
        ]
        return self._by_row(attention, leaves, spec, cuts, 1)

    def _by_row(
        self, function: Callable[..., Any], leaves: list[Any], spec: TreeSpec, cuts: list[int | None], dim: int | None
    ) -> Any:
        """Call the function for each row of these leaves of its arguments. Outputs are joined along `dim`; None: along
        the dimension that states and masks of their shape have for tokens."""
        rows = []
        for row in range(self._width):
            own = [leaf if c is None else _entry(leaf, c, row) for leaf, c in zip(leaves, cuts, strict=True)]
            args, kwargs = tree_unflatten(own, spec)
            rows.append(function(*args, **kwargs))
        return _joined(rows, dim)


def trials(model: nn.Module) -> dict[object, bool]:
    """What trials with this model have found, by what may decide which kernels run."""
    found: dict[object, bool] = vars(model).setdefault(_TRIALS, {})
    return found


def first_row(args: Any, kwargs: Any, width: int) -> tuple[Any, Any]:
    """The arguments of a model for the first of `width` tokens."""
    leaves, spec = tree_flatten((args, kwargs))
    cuts = [_row_dim(leaf, width, is_leaf=False) for leaf in leaves]
    own = [leaf if c is None else _entry(leaf, c, 0) for c, leaf in zip(cuts, leaves, strict=True)]
    found: tuple[Any, Any] = tree_unflatten(own, spec)
    return found


def _entry(tensor: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """A copy of an entry of a dimension, with the strides of a tensor that never had more: torch chooses a product of
    matrices or of batches by them."""
    part, strides = tensor.narrow(dim, index, 1), tensor.stride()
    order = list(range(part.dim()))
    if all(strides):
        order.sort(key=lambda each: -strides[each])
    made = part.permute(order).clone(memory_format=torch.contiguous_format)
    return made.permute([order.index(each) for each in range(part.dim())])


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
