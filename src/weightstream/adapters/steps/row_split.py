"""Operators of a pass that run once for each row, so that it has the bits of one token at a time.

A row is laid out as the arguments of a single token are, since kernels are chosen by layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from weightstream.runtime.streamer.read_watch import OperatorMode

_ALIGNMENT = 256  # bytes, the largest that cuBLAS asks for
_CPU_ALIGNMENT = 64  # of what torch allocates there
_PLANS = "_weightstream_row_plans"  # an attribute of a model


class TensorLayout(NamedTuple):
    """What a kernel is chosen by, of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int  # bytes from an aligned address

    @classmethod
    def of(cls, leaf: object) -> object:
        """The layout of a tensor; all else as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        alignment = _CPU_ALIGNMENT if leaf.device.type == "cpu" else _ALIGNMENT
        return cls(leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.data_ptr() % alignment)

    @property
    def overlaps(self) -> bool:
        """Whether entries share memory, as those of an expanded tensor do."""
        return any(n > 1 and stride == 0 for n, stride in zip(self.shape, self.strides, strict=True))

    def is_like(self, other: TensorLayout) -> bool:
        """Whether only strides of dimensions of one entry differ, which no address depends on."""
        return self == other._replace(strides=self.strides) and all(
            n == 1 or a == b for n, a, b in zip(self.shape, self.strides, other.strides, strict=True)
        )

    def empty(self) -> torch.Tensor:
        """A tensor of this layout."""
        offset = self.offset // self.dtype.itemsize
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        memory = torch.empty(size + offset, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.strides, offset)

    def holding(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout with these values."""
        found = made = self.empty()
        expanded = [n > 1 and stride == 0 for n, stride in zip(self.shape, self.strides, strict=True)]
        for dim in (dim for dim, is_one in enumerate(expanded) if is_one):
            made, values = made.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        made.copy_(values)
        return found


class Cut(NamedTuple):
    """Where a row is in a tensor: its part of a dimension, to be seen in another shape where `is_folded`."""

    dim: int
    is_folded: bool = False


class Heads(NamedTuple):
    """A tensor that has each head `num` times, but once where a row is alone."""

    num: int


Place = Cut | Heads | None  # None: the tensor has no rows


def cuts_of(wide: list[object], single: list[object], width: int) -> list[Place] | None:
    """Where a row is in each argument; None: somewhere."""
    found: list[Place] = []
    for whole, row in zip(wide, single, strict=True):
        if not isinstance(whole, TensorLayout) or not isinstance(row, TensorLayout):
            if type(whole) is not type(row) or whole != row:
                return None
            found.append(None)
            continue
        if (whole.dtype, whole.device, len(whole.shape)) != (row.dtype, row.device, len(row.shape)):
            return None
        dims = [dim for dim, (a, b) in enumerate(zip(whole.shape, row.shape, strict=True)) if a != b]
        if dims and (len(dims) > 1 or whole.shape[dims[0]] != width * row.shape[dims[0]]):
            return None
        found.append(Cut(dims[0]) if dims else None)
    return found


def attention_cuts(wide: list[object], single: list[object], width: int) -> list[Place] | None:
    """As `cuts_of`, of attention's queries, keys and values (batch, heads, tokens, …), or its output alone.

    transformers may pack the queries of all heads that share keys, where there is one token: then these are its tokens.
    """
    found: list[Place] = []
    for index, (whole, row) in enumerate(zip(wide, single, strict=True)):
        is_keys = index in (1, 2)
        if not isinstance(whole, TensorLayout) or not isinstance(row, TensorLayout) or whole[0] == row[0]:
            place = cuts_of([whole], [row], width)
        elif len(whole.shape) != 4 or len(row.shape) != 4 or whole.dtype != row.dtype:
            place = None
        else:
            (heads, tokens), (own_heads, own_tokens) = whole.shape[1:3], row.shape[1:3]
            is_packed = heads == own_heads * own_tokens and tokens == width
            is_shared = heads % own_heads == 0 and tokens == own_tokens
            place = [Heads(heads // own_heads)] if is_keys and is_shared else None
            place = [Cut(2, is_folded=own_tokens > 1)] if not is_keys and is_packed else place
        if place is None or (is_keys and isinstance(place[0], Cut)):
            return None
        found += place
    return found


def row_of(whole: Any, place: Place, row: int, layout: Any) -> Any:
    """The entries of a row, laid out as they are where it is alone. Large ones are not copied."""
    if not isinstance(whole, torch.Tensor):
        return whole
    if isinstance(place, Heads):
        part = whole[:, :: place.num]
    elif place is None:
        part = whole
    elif place.is_folded:
        part = whole.narrow(place.dim, row, 1).reshape(layout.shape)
    else:
        size = layout.shape[place.dim]
        part = whole.narrow(place.dim, row * size, size)
    own: Any = TensorLayout.of(part)
    if own == layout:
        return part
    if own.is_like(layout):
        return part.as_strided(layout.shape, layout.strides)
    return layout.holding(part)


def put_row(whole: torch.Tensor, place: Cut, row: int, values: torch.Tensor) -> None:
    """The inverse of `row_of`."""
    size = 1 if place.is_folded else values.shape[place.dim]
    part = whole.narrow(place.dim, row * size, size)
    part.copy_(values.reshape(part.shape))


class Split(NamedTuple):
    """How a call runs once for each row.

    `singles`: the layouts of its arguments for one row, of those that have rows. `outputs`: for each output its layout
    for all rows, and where a row is in it; one without rows, which none reads, is that of the last row.
    """

    cuts: tuple[Place, ...]
    singles: tuple[object, ...]
    outputs: tuple[tuple[object, Place], ...]

    def run(self, function: Any, leaves: list[Any], spec: TreeSpec, width: int) -> Any:
        placed = list(zip(leaves, self.cuts, self.singles, strict=True))
        common = [row_of(leaf, cut, 0, single) if isinstance(cut, Heads) else leaf for leaf, cut, single in placed]
        made: list[Any] = []
        for row in range(width):
            own = [
                row_of(leaf, cut, row, single) if isinstance(cut, Cut) else same
                for same, (leaf, cut, single) in zip(common, placed, strict=True)
            ]
            args, kwargs = tree_unflatten(own, spec)
            outputs, output_spec = tree_flatten(function(*args, **kwargs))
            if row == 0:
                made = [layout.empty() if isinstance(place, Cut) else None for layout, place in self.outputs]  # type: ignore[attr-defined]
            for index, (output, (_, place)) in enumerate(zip(outputs, self.outputs, strict=True)):
                if isinstance(place, Cut):
                    put_row(made[index], place, row, output)
                else:
                    made[index] = output
        return tree_unflatten(made, output_spec)


def key_of(spec: TreeSpec, leaves: list[Any]) -> object:
    """By what splits of an operator are looked up: all arguments but for the addresses and values of tensors."""
    return spec, *map(_key, leaves)


def _key(leaf: Any) -> object:
    if not isinstance(leaf, torch.Tensor):
        return str(leaf)
    strides = [stride if n > 1 else 0 for n, stride in zip(leaf.shape, leaf.stride(), strict=True)]
    return leaf.shape, *strides, leaf.dtype, leaf.device


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """How a pass of several rows has the bits of one token at a time.

    Attributes:
        reason: why it cannot have them, or None.
        differences: how operators of rows at once differ from those of single ones.
        splits: by operator and `key_of` its arguments, how a call runs row by row; None: it runs at once.
        calls: calls that run row by row, by name of their operator.
        nbytes: of arguments without rows, such as weights, which these calls read for each row.
    """

    reason: str | None = None
    differences: list[str] = field(default_factory=list)
    splits: Mapping[Any, Mapping[object, Split | None]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0

    def __str__(self) -> str:
        if not self.calls:
            return "at once"
        (name, num), *more = self.calls.most_common()
        others = f" and {sum(num for _, num in more)} of others" if more else ""
        return f"at once, except {num} calls of {name}{others}"


class _Plans(dict[object, RowPlan]):
    """Not those of a copy of the model, which may be changed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Plans, ()


def plans(model: nn.Module) -> dict[object, RowPlan]:
    """What trials with this model have found, by what may decide which kernels run."""
    found: dict[object, RowPlan] = vars(model).setdefault(_PLANS, _Plans())
    return found


def switches() -> tuple[object, ...]:
    """Settings of torch that decide which kernels run."""
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    attention = cuda.cudnn_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.flash_sdp_enabled()
    sums = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    common = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    return (*attention, *sums, *common, torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled)


def structure(model: nn.Module) -> int:
    """A number that changes where the code of a model's forward does: with other modules, parameters or hooks."""
    kinds = (
        (
            *(type(module), len(module._forward_pre_hooks), len(module._forward_hooks)),
            *(name for name, parameter in module._parameters.items() if parameter is not None),
        )
        for module in model.modules()
    )
    device = next((str(parameter.device.type) for parameter in model.parameters()), "cpu")
    return hash((*kinds, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))


class RowSplit(OperatorMode):
    """Runs the operators of a plan row by row, and all others as they are."""

    def __init__(self, plan: RowPlan, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._splits = plan.splits
        self._width = width
        self.unknown: str | None = None  # a call of a split operator that no trial has seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # wrapped tensors: the operators on the inner ones are seen later
        splits = self._splits.get(func)
        if splits is None:
            return func(*args, **(kwargs or {}))
        leaves, spec = tree_flatten((args, kwargs or {}))
        key = key_of(spec, leaves)
        split = splits.get(key)
        if split is not None:
            return split.run(func, leaves, spec, self._width)
        if key not in splits:
            shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.unknown = f"{func} of {shapes} was not in the pass that was tried; call generate again"
        return func(*args, **(kwargs or {}))

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a pass, with its operators split."""

        @wraps(forward)
        def split(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return split


# -- arguments of a model ----------------------------------------------------------------------------------------------


def first_row(args: Any, kwargs: Any, width: int) -> tuple[Any, Any]:
    """The arguments of a model for the first of `width` tokens."""
    leaves, spec = tree_flatten((args, kwargs))
    cuts = [_row_dim(leaf, width) for leaf in leaves]
    own = [leaf if c is None else first_entry(leaf, c) for c, leaf in zip(cuts, leaves, strict=True)]
    found: tuple[Any, Any] = tree_unflatten(own, spec)
    return found


def first_entry(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy of the first entry of a dimension, with the strides of a tensor that never had more: torch chooses a
    product of matrices or of batches by them."""
    part, strides = tensor.narrow(dim, 0, 1), tensor.stride()
    order = list(range(part.dim()))
    if all(strides):
        order.sort(key=lambda each: -strides[each])
    made = part.permute(order).clone(memory_format=torch.contiguous_format)
    return made.permute([order.index(each) for each in range(part.dim())])


def _row_dim(leaf: Any, width: int) -> int | None:
    """The dimension of a model's argument that has one entry for each token; None: there is none.

    States are of shape (batch, tokens, …) and positions (…, tokens). What has four dimensions is a mask (batch, heads,
    tokens, keys).
    """
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return None
    if leaf.is_floating_point() or leaf.dtype == torch.bool:
        dim = leaf.dim() - 2 if leaf.dim() in (3, 4) else None
    else:
        dim = leaf.dim() - 1
    return dim if dim is not None and leaf.shape[dim] == width else None
