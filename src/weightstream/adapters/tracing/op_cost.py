"""Op cost: arithmetic, bytes and workspace of one operator on a GPU, found from its shapes. It knows no model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from weightstream.adapters.hf import private
from weightstream.adapters.hf.packed_matrices import UNPACK
from weightstream.plan.manifest import Op, Rate
from weightstream.runtime.tensors.pytree import tensors_in

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention
HALF = frozenset((torch.bfloat16, torch.float16))
_FREE = frozenset((_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.detach_))
_IN_PLACE = frozenset(  # they change only values
    getattr(_aten, name)
    for name in ("add_", "sub_", "mul_", "div_", "masked_fill_", "copy_", "index_copy_", "index_put_")
)
_BY_ROW = frozenset(  # of their first argument, a table, they touch only the rows that the others name
    getattr(_aten, name)
    for name in ("embedding", "index", "index_select", "gather", "index_put_", "index_copy_", "index_add_", "scatter_")
)
# The least time of an operator, in units of a small norm kernel of 1.45 us [H200, in graphs: attention of one row
# 5.8 us, with a mask, which is made into a bias, 11.2 us, topk of 128 8.4 us, sums and maxima 4.5 and 4.7 us, a product
# of one row with a bias, which takes two kernels, 8.1 us].
_LEAST = MappingProxyType(
    {_ATTENTION: 4.0, _aten.topk: 6.0, _aten.sort: 6.0, _aten.sum: 3.0, _aten.max: 3.0, _aten.amax: 3.0}
)
_MASKED = 8.0
_BIASED = 5.5
_SUMMED = 4.0  # 6 to 7 us up to 64 KiB [two H200s, NVLink]


class _Fused(NamedTuple):
    """Fused attention with gradients: the indices of its arguments, and the number of products of all pairs of
    positions, where a forward has two. A backward has the gradient of the output first."""

    query: int
    mask: int | None
    is_causal: int
    num_products: int

    def run(self, args: Any, kwargs: Any) -> Callable[[], Any]:
        """A function that runs it on these tensors, without dropout, by the kernel that PyTorch chooses for them."""
        query, key, value = (tensor.detach().requires_grad_() for tensor in args[self.query : self.query + 3])
        mask = None if self.mask is None else args[self.mask]
        is_causal = len(args) > self.is_causal and args[self.is_causal]
        attend = torch.enable_grad()(
            partial(
                torch.nn.functional.scaled_dot_product_attention,
                *(query, key, value, mask),
                is_causal=is_causal,
                scale=kwargs.get("scale"),
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
        if not self.query:
            return attend
        return partial(torch.autograd.grad, attend(), (query, key, value), args[0], retain_graph=True)


_FUSED = MappingProxyType(
    {
        _aten._scaled_dot_product_flash_attention: _Fused(0, None, 4, 2),
        _aten._scaled_dot_product_efficient_attention: _Fused(0, 3, 6, 2),
        _aten._scaled_dot_product_flash_attention_backward: _Fused(1, None, 11, 5),
        _aten._scaled_dot_product_efficient_attention_backward: _Fused(1, 4, 11, 5),
    }
)
_GROUPED = frozenset(("aten::_grouped_mm", private.GROUPED_MM))


@dataclass(frozen=True, slots=True)
class Spec:
    """The properties of a tensor except its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tensor.shape, tensor.stride(), tensor.dtype)


def _made(spec: Spec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


class Launch:
    """An operator on tensors of certain shapes: its `op` (None: no kernel), and how to make its result again.

    `is_repeatable`: `repeat` can replace a run, as all results are new and the operator changes nothing.
    `is_in_place`: `repeat` can, too, as it returns the first argument, of which the operator changes only values.
    `alive_nbytes`: the most bytes that are alive right after it, over all launches.
    """

    __slots__ = (
        *("_args", "_func", "_kwargs", "_result"),
        *("alive_nbytes", "is_in_place", "is_repeatable", "op", "workspace_nbytes"),
    )

    def __init__(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        inputs, made = list(tensors_in((args, kwargs))), list(tensors_in(output))
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        is_new = [tensor.is_meta and tensor.untyped_storage()._cdata not in storages for tensor in made]
        changes: bool = func._schema.is_mutable
        self.is_repeatable = bool(made) and all(is_new) and not changes
        self.is_in_place = func.overloadpacket in _IN_PLACE and output is inputs[0]
        self._func = func
        self._args, self._kwargs = tree_map_only(torch.Tensor, _spec, (args, kwargs))
        self._result = tree_map_only(torch.Tensor, _spec, output)
        self.op: Op | None = None
        self.workspace_nbytes = self.alive_nbytes = 0
        runs = any(is_new) or (changes and any(tensor.is_meta for tensor in made))
        if runs and func.overloadpacket not in _FREE and any(tensor.numel() for tensor in made):
            self.op = _op(func, args, kwargs, output, nbytes_read=sum(map(touched_nbytes, inputs)))
            self.workspace_nbytes = _workspace_nbytes(args) if func.overloadpacket is _ATTENTION else 0

    def call(self, tensor: Callable[[Spec], torch.Tensor]) -> Callable[[], Any] | None:
        """A function that runs the operator on tensors that `tensor` makes from their specs.

        None for an operator that changes its arguments, returns them or views of them, draws random numbers, launches
        no kernel, or is not one of PyTorch's own (aten).
        """
        func, args, kwargs = self._func, self._args, self._kwargs
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if func.overloadpacket in _FUSED:
            draws = False  # it is timed without dropout
        if func.overloadpacket is _ATTENTION:
            draws = bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
        if not self.is_repeatable or draws or self.op is None or func.namespace != "aten":
            return None
        args, kwargs = tree_map_only(Spec, tensor, (args, kwargs))
        if (fused := _FUSED.get(func.overloadpacket)) is not None and not args[0].is_meta:
            return fused.run(args, kwargs)
        return partial(func, *args, **kwargs)

    def repeat(self, args: Any) -> Any:
        """New output of the operator, as for the arguments that it was run with, without running it."""
        if self.is_in_place:
            return args[0]
        if isinstance(self._result, Spec):
            return _made(self._result)
        return tree_map_only(Spec, _made, self._result)


class CountedLaunch(NamedTuple):
    """An operator, and how often a call launches it."""

    launch: Launch
    num: int


def simpler(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The two most frequent composite operators as a kernel and a view; any other operator unchanged."""
    if func is _aten.to.dtype and len(args) == 2 and not kwargs and args[0].dtype is not args[1]:
        return _aten._to_copy.default, args[:1], {"dtype": args[1]}
    if func is _aten.reshape.default:
        with suppress(RuntimeError):  # its strides may not let it be a view
            args[0].view(args[1])
            return _aten.view.default, args, kwargs
    return func, args, kwargs


def is_kernel(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a GPU runs this composite operator as one kernel."""
    if func.overloadpacket is not _ATTENTION:
        return func.overloadpacket in (_aten.linear, _aten.rms_norm)
    query, _, value = args[:3]
    if kwargs.get("enable_gqa"):
        return query.dtype in HALF and _mask(args) is None and query.shape[-1] == value.shape[-1] <= 256
    return query.dim() == 4 and query.dtype is not torch.float64


def run_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on meta tensors. Where the meta kernel's output differs from a GPU's, return that of the GPU."""
    if func.overloadpacket is _ATTENTION:
        query, _, value = args[:3]
        if _mask(args) is None and query.shape[-1] == value.shape[-1]:
            return torch.empty_like(query)
        shape = query.shape
        return query.new_empty(shape[0], shape[2], shape[1], value.shape[-1]).transpose(1, 2)
    if func.name() in _GROUPED and args[1].dim() == 3:
        return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
    return func(*args, **kwargs)


def touched_nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; bytes that several elements share count once."""
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(size for size, step in shape if step or not size)


def sum_of(nbytes: int) -> Op:
    """The op of an all-reduce of a tensor over ranks."""
    return Op(rate="ranks", nbytes=nbytes, least=_SUMMED)


def _op(func: Any, args: Any, kwargs: Any, output: Any, nbytes_read: int) -> Op:
    packet = func.overloadpacket
    rate: Rate = "half" if args and isinstance(args[0], torch.Tensor) and args[0].dtype in HALF else "single"
    nbytes = nbytes_read + sum(map(touched_nbytes, tensors_in(output)))
    if packet is _ATTENTION:
        query, key, value = args[:3]
        causal = len(args) > 5 and args[5] and query.shape[-2] == key.shape[-2]
        products = query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        mask = _mask(args)
        least = _MASKED if mask is not None and mask.dtype is torch.bool else _LEAST[packet]
        kind: Rate = "attention" if rate == "half" else rate
        return Op(rate=kind, flops=(1 if causal else 2) * products, nbytes=nbytes, least=least)
    if (fused := _FUSED.get(packet)) is not None:
        query, key, value = args[fused.query : fused.query + 3]
        causal = len(args) > fused.is_causal and args[fused.is_causal] and query.shape[-2] == key.shape[-2]
        products = query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]) / 2
        flops = (1 if causal else 2) * fused.num_products * products
        return Op(rate="attention" if rate == "half" else rate, flops=flops, nbytes=nbytes, least=_LEAST[_ATTENTION])
    if packet is _aten.linear:
        least = 1.0 if len(args) < 3 or args[2] is None else _BIASED
        return Op(rate=rate, flops=2 * args[0].numel() * args[1].shape[0], nbytes=nbytes, least=least)
    if func.name() in _GROUPED and args[1].dim() == 3:
        (rows, _), (groups, inner, columns) = args[0].shape, args[1].shape
        # with fewer rows than groups, at least the rest of the groups has no row, and its matrices are not read
        idle_nbytes = max(0, groups - rows) * inner * columns * args[1].element_size()
        return Op(rate=rate, flops=2 * rows * inner * columns, nbytes=nbytes - idle_nbytes)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=output)
        return Op(rate=rate, flops=flops, nbytes=nbytes, stacked=packet is _aten.bmm and 1 in output.shape[1:])
    if packet is _aten.index and args[0].dim() > 2 and len(args[1]) == 1:
        return Op(nbytes=2 * (nbytes - nbytes_read), picked=output.shape[0] / args[0].shape[0])
    if packet is UNPACK:
        leaves, rows, *_, kernel = args
        nbytes_written = nbytes - nbytes_read
        return Op(nbytes=nbytes_written, picked=len(rows) / len(leaves[0]), unpacks=kernel)
    if packet in _BY_ROW:
        others = nbytes_read - touched_nbytes(args[0])
        return Op(nbytes=2 * others if func._schema.is_mutable else 2 * (nbytes - nbytes_read) + others)
    return Op(nbytes=nbytes, least=_LEAST.get(packet, 1.0))


def _mask(args: Any) -> torch.Tensor | None:
    return args[3] if len(args) > 3 else None


def _workspace_nbytes(args: Any) -> int:
    """Fused attention keeps a float per row while it runs, and makes a mask into a bias of the query's dtype."""
    query, mask = args[0], _mask(args)
    rows: int = query[..., 0].numel()
    return 4 * rows + (0 if mask is None else mask.numel() * query.element_size())
