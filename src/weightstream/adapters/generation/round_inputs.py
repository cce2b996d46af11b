"""The arguments of passes of one width, made from those of an earlier pass.

transformers makes positions and masks anew in each round, which is much of the time that a round takes the host, while
the link is idle. For models that have transformers' own method for this, which only lets them grow with the text, they
are those of an earlier pass, moved on. The second pass of each width has both, and compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from weightstream.adapters.hf import private

_METHOD = "prepare_inputs_for_generation"
_IDS, _ROWS = "input_ids", "next_sequence_length"


class RoundInputs:
    """Stands in for a model's `prepare_inputs_for_generation`.

    No function, as to a streamer that would be a change of the model's code. `grows` says whether a later position sees
    all earlier ones, as without a window; it is asked for each pass.
    """

    def __init__(self, model: Any, grows: Callable[[], bool]) -> None:
        self._model = model
        self._prepare = getattr(model, _METHOD)
        self._grows = grows
        self._is_own = not private.prepares_as_all_do(model)  # it may look at the length of a text
        self._first: dict[int, _Pass] = {}  # by number of rows
        self._is_sure: dict[int, bool] = {}  # whether later arguments are those of the first pass, moved on
        update_wrapper(self, self._prepare)  # transformers looks at its signature

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The arguments of the next forward."""
        num = kwargs.get(_ROWS)
        if self._is_own or args or not num or kwargs.get("is_first_iteration") or not self._grows():
            return self._prepare(input_ids, *args, **kwargs)
        first = self._first.get(num)
        if first is not None and self._is_sure.get(num):
            return first.moved_to(input_ids)
        found = self._prepare(input_ids, *args, **kwargs)
        if first is None:
            self._first[num] = _Pass(found, input_ids.shape[1], num)
        elif num not in self._is_sure:
            self._is_sure[num] = first.is_known and _is_same(first.moved_to(input_ids), found)
        return found

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the model's passes get their arguments from here."""
        with private.set_inside(self._model, _METHOD, self):
            yield


class _Mask(NamedTuple):
    """Which keys the rows of a pass see, of shape (batch, heads, rows, keys).

    `ahead`: how far a key lies after a row, of shape (rows, keys). `seen`: those that a row sees sooner or later: what
    is hidden before the text, such as padding, stays hidden.
    """

    ahead: torch.Tensor
    seen: torch.Tensor


class _Pass:
    """The arguments of a pass of `num` rows, the last of which is the last of `length` tokens.

    `is_known`: all tensors among them are ids and positions, of shape (…, rows), or masks of bool.
    """

    def __init__(self, arguments: dict[str, Any], length: int, num: int) -> None:
        self._names = list(arguments)
        self._length = length
        self._num = num
        self._leaves, self._spec = tree_flatten({name: value for name, value in arguments.items() if name != _IDS})
        self._positions: dict[int, torch.Tensor] = {}  # by leaf, as masks
        self._masks: dict[int, _Mask] = {}
        for index, leaf in enumerate(self._leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.dtype == torch.long and leaf.dim() and leaf.shape[-1] == num:
                self._positions[index] = leaf
            elif leaf.dtype == torch.bool and leaf.dim() == 4 and leaf.shape[2] == num:
                keys = torch.arange(leaf.shape[3], device=leaf.device)
                ahead = keys - torch.arange(length - num, length, device=leaf.device)[:, None]
                self._masks[index] = _Mask(ahead, leaf | (ahead > 0))
        num_tensors = sum(isinstance(leaf, torch.Tensor) for leaf in self._leaves)
        self.is_known = num_tensors == len(self._positions) + len(self._masks)

    def moved_to(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """The arguments of the pass at the end of this text."""
        by = input_ids.shape[1] - self._length
        leaves = list(self._leaves)
        for index, positions in self._positions.items():
            leaves[index] = positions + by
        for index, mask in self._masks.items():
            leaves[index] = mask.seen & (mask.ahead <= by)
        ids = input_ids[:, -self._num :].clone(memory_format=torch.contiguous_format)
        found = {_IDS: ids, **tree_unflatten(leaves, self._spec)}
        return {name: found[name] for name in self._names}  # a graph is found by their order, too


def _is_same(made: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether two sets of arguments are equal, with their layouts, by which kernels are chosen."""
    if made.keys() != found.keys():
        return False
    own, own_spec = tree_flatten(made)
    others, spec = tree_flatten({name: found[name] for name in made})
    return own_spec == spec and all(map(_is_equal, own, others))


def _is_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or bool(one == other)
    return _layout(one) == _layout(other) and torch.equal(one, other)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
