"""Weights in two parts: a high one that stays on the device and drafts by itself, and a low one that streams.

A model whose matrices are split is its own draft. The high parts alone make a model of fewer bits, which proposes
tokens without waiting for the link. As the high parts are resident bytes of the weights themselves, the draft takes
almost no memory of its own. `codec/planes.py` has the format.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from weightstream.adapters.modules.partition import find_blocks, row_tables
from weightstream.codec import planes
from weightstream.codec.planes import PlaneLayout
from weightstream.errors import UnsupportedError
from weightstream.runtime.tensors.leaves import leaves_of
from weightstream.runtime.tensors.undo import Undo

BITS = (3, 2, 1)  # of each mantissa in the high part, the best draft first
_MOSTLY = 0.9  # share of the blocks that has to be split: the rest stays on the device
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _refused(what: object) -> UnsupportedError:
    return UnsupportedError(f"{what} would write to a weight that is in two parts: load the model without draft='self'")


class _Planes(torch.Tensor):
    """A bfloat16 matrix that is made from parts for each function that reads it. What would write to it is refused."""

    parts: PlaneLayout

    @classmethod
    def _of(cls, parts: PlaneLayout, device: torch.device) -> Self:
        shape = parts.rows, parts.columns
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=device)
        return made

    def dense(self) -> torch.Tensor:
        """The matrix."""
        raise NotImplementedError

    def same(self) -> Self:
        """Another tensor object of the same parts."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and not isinstance(args[1], _Planes):
            raise _refused("an assignment to `data`")
        # not that of torch.Tensor, which would make its class of every output
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _VIEWS:
            return args[0].same()
        kwargs = kwargs or {}
        values = [*zip(func._schema.arguments, args, strict=False)]
        values += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
        written = tree_leaves([value for each, value in values if each.is_write])
        if any(isinstance(value, _Planes) for value in written):
            raise _refused(func)
        args, kwargs = tree_map_only(_Planes, lambda weight: weight.dense(), (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain matrix in host memory: the copy of a model is a plain model, and larger than its device budget."""
        made = nn.Parameter(self.dense().to("cpu"), requires_grad=False)
        memo[id(self)] = made
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, bits={self.parts.bits}, device={self.device})"


class SplitWeight(_Planes):
    """A matrix whose bits are in two tensors of bytes, `high` and `low`. Whatever reads it gets the exact matrix."""

    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor, parts: PlaneLayout) -> SplitWeight:
        return cls._of(parts, high.device)

    def __init__(self, high: torch.Tensor, low: torch.Tensor, parts: PlaneLayout) -> None:
        self.high, self.low, self.parts = high, low, parts

    def dense(self) -> torch.Tensor:
        return planes.join_planes(self.high, self.low.to(self.high.device), self.parts)

    def same(self) -> SplitWeight:
        return SplitWeight(self.high, self.low, self.parts)

    def __tensor_flatten__(self) -> tuple[list[str], PlaneLayout]:
        return ["high", "low"], self.parts

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], parts: PlaneLayout, size: Any, stride: Any) -> SplitWeight:
        return SplitWeight(inner["high"], inner["low"], parts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and len(args) > 1 and type(args[1]) is cls:
            # one operator, as with a plain matrix: taken apart into others, it would reach other kernels
            return func(args[0], args[1].dense(), *args[2:], **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


class DraftWeight(_Planes):
    """The matrix that the high part of a weight is by itself."""

    high: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, parts: PlaneLayout) -> DraftWeight:
        return cls._of(parts, high.device)

    def __init__(self, high: torch.Tensor, parts: PlaneLayout) -> None:
        self.high, self.parts = high, parts

    def dense(self) -> torch.Tensor:
        return planes.drafted(self.high, self.parts)

    def same(self) -> DraftWeight:
        return DraftWeight(self.high, self.parts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weight = args[1] if len(args) > 1 else None
        if type(weight) is cls and func is functional.linear:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return planes.draft_linear(args[0], weight.high, weight.parts, bias)
        if type(weight) is cls and func is functional.embedding:
            return planes.drafted_rows(args[0], weight.high, weight.parts)
        return super().__torch_function__(func, types, args, kwargs)


class SplitModel(NamedTuple):
    """A model whose matrices are split, and its draft."""

    draft: Any
    """The same model with the high parts alone. It shares all tensors that are not split."""
    kept: frozenset[int]
    """Ids of the tensors that have to be on the device while the draft runs."""
    tables: frozenset[int]
    """Ids of embedding tables, of which the draft reads rows."""
    copies: tuple[torch.Tensor, ...]
    """High parts that only the draft has: of matrices outside of blocks, which stream whole."""
    largest_nbytes: int
    """Bytes of the largest matrix that is joined."""
    undo: Undo
    """Makes the weights of the model plain again."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device besides the weights: parts that only the draft has, and the matrix that is joined."""
        return sum(high.nbytes for high in self.copies) + self.largest_nbytes

    def follow(self, device: torch.device) -> None:
        """Have the draft on the device to which the model's weights have moved."""
        for high in self.copies:
            high.data = high.data.to(device)
        for weight in self.draft.parameters():
            if type(weight) is DraftWeight:  # it reports the device that its high part had
                _SET_DATA(weight, weight.same())


def why_not_split(model: nn.Module) -> str | None:
    """Reason why the weights of a model cannot be split, or None."""
    blocks = find_blocks(model)
    total = sum(leaf.tensor.nbytes for block in blocks for leaf in leaves_of(block))
    weights = (module._parameters["weight"] for block in blocks for module in block.modules() if _can_split(module))
    split = sum(weight.nbytes for weight in weights if weight is not None)
    if split < _MOSTLY * total or not split:
        return (
            f"{split / max(total, 1):.0%} of the blocks of {type(model).__name__} are linear layers in bfloat16 whose "
            "width is a multiple of 64, and all other weights would have to stay on the device: leave draft out, or "
            "load weights of another dtype with dtype='bfloat16'"
        )
    return None


def _can_split(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    weight: torch.Tensor = module.weight
    return type(weight) is nn.Parameter and planes.can_split(weight.shape, weight.dtype)


@torch.no_grad()
def split_model(model: Any, bits: int, device: torch.device) -> SplitModel:
    """Split the matrices of a model's blocks on a device, one by one, with `bits` bits of each mantissa in the high
    part. On meta only shapes are split.

    Raises:
        UnsupportedError: too few of the weights can be split.
    """
    if (reason := why_not_split(model)) is not None:
        raise UnsupportedError(f"draft='self': {reason}")
    held = list(leaves_of(model))
    in_blocks = {id(module) for block in find_blocks(model) for module in block.modules()}
    others = (module for module in model.modules() if id(module) not in in_blocks)
    outside = {id(weight) for module in others for weight in module._parameters.values()}
    weights: dict[int, nn.Parameter] = {}  # by that which each replaces
    of_draft: dict[int, torch.Tensor] = {id(leaf.tensor): leaf.tensor for leaf in held}
    copies: list[torch.Tensor] = []
    for plain in {id(module.weight): module.weight for module in model.modules() if _can_split(module)}.values():
        high, low, parts = planes.split(plain.detach().to(device), bits)
        if id(plain) in outside:
            copies.append(high)
        else:
            high, low = high.to(plain.device), low.to(plain.device)
            weights[id(plain)] = nn.Parameter(SplitWeight(high, low, parts), requires_grad=False)
        of_draft[id(plain)] = nn.Parameter(DraftWeight(high, parts), requires_grad=False)
    draft = copy.deepcopy(model, of_draft)
    undo = Undo()
    for module in model.modules():
        for name, plain in module._parameters.items():
            if id(plain) in weights:
                undo.add(module._parameters.__setitem__, name, plain)
                undo.add(module.register_state_dict_post_hook(_make_dense).remove)
                module._parameters[name] = weights[id(plain)]
    tables = row_tables(model)
    whole = tables.union(id(leaf.tensor) for leaf in held if type(of_draft[id(leaf.tensor)]) is DraftWeight)
    streamed = whole.union(id(weight.low) for weight in weights.values())  # type: ignore[attr-defined]
    return SplitModel(
        draft=draft,
        kept=frozenset(id(leaf.tensor) for leaf in leaves_of(model)) - streamed,
        tables=frozenset(tables),
        copies=tuple(copies),
        largest_nbytes=max(weight.nbytes for weight in weights.values()),
        undo=undo,
    )


def _make_dense(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Have a state dict hold the exact matrices, in host memory."""
    for name, value in state.items():
        if isinstance(value, SplitWeight):
            state[name] = value.dense().to("cpu")
