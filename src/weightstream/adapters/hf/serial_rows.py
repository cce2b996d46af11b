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
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from weightstream.adapters.modules.partition import find_blocks
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.tensors.undo import Undo

_ROW_MASKS = ("sdpa", "eager")  # attention implementations whose static masks have a row for each token


class Mode(Enum):
    """How the rows of a forward run."""

    AT_ONCE = "at once"
    SERIAL = "one after the other"
    TRIAL = "one after the other and at once, to compare"


class SerialRows:
    """Runs the modules of a model, which hold all its weights, row by row."""

    def __init__(self, model: nn.Module, width: int) -> None:
        self.mode = Mode.AT_ONCE
        self._width = width
        self._model: Any = model
        self._modules = list(_row_modules(model))
        self._kept = Mode.SERIAL  # of a trial
        self._differs: torch.Tensor | None = None

    @property
    def unsuited(self) -> str | None:
        """Reason why the rows of this model cannot run one after the other, or None."""
        attention = getattr(self._model.config, "_attn_implementation", None)
        if attention not in _ROW_MASKS:
            return f"masks of {attention} attention have no row for each token"
        covered = {id(each) for module in self._modules for each in module.modules()}
        if any(id(module) not in covered for module in _cached_modules(self._model)):
            return "parts of a layer are streamed one by one; with a larger device_budget whole layers are"
        return None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the model's modules run forwards of `width` tokens in the mode that is set."""
        undo = Undo()
        try:
            for module in self._modules:
                undo.add(forward_patch.add_inside(module, partial(self._run, module)))
            yield
        finally:
            undo()

    def try_out(self, step: Callable[[], Any], kept: Mode) -> tuple[Any, bool]:
        """Run a step in both ways. Returns the output of the mode that is kept, and whether both had equal bits.

        Waits for the device.
        """
        self._differs, self._kept, self.mode = None, kept, Mode.TRIAL
        try:
            output = step()
        finally:
            self.mode = Mode.AT_ONCE
        return output, self._differs is not None and not bool(self._differs)

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if (
            getattr(forward, "__func__", None) is type(module)._call_impl
        ):  # hooks, and the forward, which comes here too
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        cuts = [_row_dim(leaf, self._width) for leaf in leaves]
        if self.mode is Mode.AT_ONCE or not any(c == 1 and leaves[i].dim() > 2 for i, c in enumerate(cuts)):
            return forward(*args, **kwargs)  # a prompt, or a module that sees no tokens

        def at_once() -> Any:
            return forward(*args, **kwargs)

        def serially() -> Any:
            rows = []
            for row in range(self._width):
                own = [x if c is None else x.narrow(c, row, 1).clone() for x, c in zip(leaves, cuts, strict=True)]
                own_args, own_kwargs = tree_unflatten(own, spec)
                rows.append(forward(*own_args, **own_kwargs))
            return _joined(rows)

        if self.mode is Mode.SERIAL:
            return serially()
        first, last = (at_once, serially) if self._kept is Mode.SERIAL else (serially, at_once)
        other = first()
        for layer in _cache_layers(module, leaves):
            layer.crop(-self._width)
        output = last()  # later modules and steps read what it leaves
        self._compare(other, output)
        return output

    def _compare(self, at_once: Any, serial: Any) -> None:
        for a, b in zip(tree_flatten(at_once)[0], tree_flatten(serial)[0], strict=True):
            if isinstance(a, torch.Tensor):
                is_other = (_bits(a) != _bits(b)).any()
                self._differs = is_other if self._differs is None else self._differs | is_other.to(self._differs.device)


_TRIALS: WeakKeyDictionary[nn.Module, dict[object, bool]] = WeakKeyDictionary()


def trials(model: nn.Module) -> dict[object, bool]:
    """What trials with this model have found, by what may decide which kernels run."""
    return _TRIALS.setdefault(model, {})


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _row_dim(leaf: Any, width: int) -> int | None:
    """The dimension of an argument that has one entry for each token; None: there is none.

    States are of shape (batch, tokens, …) and positions (…, tokens). What has four dimensions is a mask (batch, heads,
    tokens, keys), or angles of several kinds of positions (kinds, batch, tokens, width).
    """
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return None
    is_position = not leaf.is_floating_point() and leaf.dtype != torch.bool
    dim = leaf.dim() - 1 if is_position else {3: 1, 4: 2}.get(leaf.dim())
    return dim if dim is not None and leaf.shape[dim] == width else None


def _joined(rows: list[Any]) -> Any:
    """The outputs of all rows as one: tensors of one token each are joined, all else is that of the last row."""
    found, spec = zip(*map(tree_flatten, rows), strict=True)
    joined = [
        torch.cat(each, 1) if isinstance(each[0], torch.Tensor) and each[0].dim() > 2 else each[-1]
        for each in zip(*found, strict=True)
    ]
    return tree_unflatten(joined, spec[0])


def _cache_layers(module: nn.Module, leaves: list[Any]) -> list[Any]:
    """The layers of the cache among the arguments that the module updates."""
    indices = {vars(m)["layer_idx"] for m in module.modules() if isinstance(vars(m).get("layer_idx"), int)}
    caches = [leaf for leaf in leaves if hasattr(leaf, "layers") and hasattr(leaf, "crop")]
    return [cache.layers[index] for cache in caches[:1] for index in sorted(indices)]


def _row_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The largest modules that can run row by row: blocks, or parts of a block that are streamed one by one, and
    modules outside of blocks. Not embeddings, which read rows anyway."""
    blocks = {id(block) for block in find_blocks(model)}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if next(module.parameters(), None) is None or isinstance(module, nn.Embedding):
            return
        inner = [each for each in module.modules() if each is not module]
        if any(id(each) in blocks or forward_patch.is_unit(each) for each in inner):
            for child in module.children():
                yield from visit(child)
        else:
            yield module

    yield from {id(module): module for module in visit(model)}.values()


def _cached_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules that have a layer of the cache: attention."""
    found = {id(m): m for m in model.modules() if isinstance(vars(m).get("layer_idx"), int)}
    outer = {id(m) for m in found.values() for each in m.modules() if each is not m and id(each) in found}
    yield from (m for key, m in found.items() if key not in outer)
