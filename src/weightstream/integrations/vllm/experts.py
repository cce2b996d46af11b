"""vLLM's fused experts, called like other modules: by `forward`, one after another, on one stream.

`RoutedExperts` holds the stacks of a layer. vLLM calls it by two other methods, inside a custom operator that looks the
layer up by its name. A wrapper of `forward` would not see these calls, and the weights would have to stay on the
device.

In compiled code weightstream waits and releases by operators of its own, which stop fusion across them. Right before
and after vLLM's custom operator that changes no bits, as its kernels are not fused with others anyway.

[Note: experts by ids]
The kernels behind `forward_modular` take ids, and run over the slots of a cache: [Note: kernels that take ids] in
runtime/experts/rows.py. `expert_map` stays None, as with a map vLLM takes other paths, whose bits differ. That is right
only for kernels that compute each block of tokens of an expert by itself, from nothing but the rows of its id. So those
whose tokens were compared are listed by the names of their classes, and any other kernel reads whole stacks:

- TritonExperts: one program for each block, which takes the order of experts only as its own number.
- CutlassExpertsFp8: one product for each expert, cut into tiles by itself.
- DeepGemmExperts: each row of a block is computed alike, at any place.
- MarlinExperts splits sums at places that depend on the order of the blocks. So blocks are sorted by experts as always,
  and each gets its slot after that. For eight prompts of 32 tokens vLLM does not repeat its own tokens with Marlin.

All tensors with a row for each expert have to be parameters of the layer: weights, scales, biases. One that the kernel
holds besides would be indexed by slots, too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache, cached_property, partial
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from weightstream.runtime.weights.picks import ForwardCall, RowProvider

logger = logging.getLogger("weightstream")
# the first takes the ids of a router that ran before; the second is called where one kernel also does the routing
_ENTRIES = ("forward_modular", "forward_monolithic")
_BY_IDS = _ENTRIES[0]
_ARGUMENTS = ("x", "topk_weights", "topk_ids")
_WEIGHTS = ("w13_weight", "w2_weight")
_SIDES, _FIELDS = ("_w1", "_w2", "_a1", "_a2"), ("scale", "alpha_or_gscale", "zp", "bias")  # of a quantisation
_CHOOSE = "_select_experts_impl"
_SORT = "moe_align_block_size"  # a global name of Marlin's module: the function that sorts tokens by experts
_ID_TYPES = (torch.int32, torch.int64)
_SLOT_OF: ContextVar[torch.Tensor | None] = ContextVar(
    "the slot of each expert for blocks that are sorted", default=None
)


class IdsBecomeSlots(Enum):
    """When the ids of a call become slots."""

    AT_ONCE = "before the kernel"
    SORTED = "once it has sorted its blocks"


PROVED: Mapping[str, IdsBecomeSlots] = MappingProxyType(  # by the name of the kernel's class: [Note: experts by ids]
    {
        "TritonExperts": IdsBecomeSlots.AT_ONCE,
        "CutlassExpertsFp8": IdsBecomeSlots.AT_ONCE,
        "DeepGemmExperts": IdsBecomeSlots.AT_ONCE,
        "MarlinExperts": IdsBecomeSlots.SORTED,
    }
)


def enter_by_forward(layers: Iterable[nn.Module]) -> None:
    """Route calls of these layers' experts through `forward`, and run shared experts on the caller's stream.

    Neither is undone: vLLM's own calls compute the same.
    """
    for module in (module for layer in layers for module in layer.modules()):
        if _are_routed(module) and "forward" not in vars(module):
            module.forward = MethodType(_forward, module)
            for name in _ENTRIES:
                setattr(module, name, MethodType(_entry(name), module))
        # Shared experts would run on a second stream, at the same time as the routed ones. But units take turns in one
        # ring and one decode buffer.
        if isinstance(vars(module).get("_stream"), torch.Stream):
            module._stream = None  # type: ignore[assignment]


def _are_routed(module: nn.Module) -> bool:
    return all(hasattr(type(module), name) for name in _ENTRIES)


def _forward(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(type(self), name)(self, *args, **kwargs)


def _entry(name: str) -> Callable[..., Any]:
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(name, *args, **kwargs)

    return entry


def routed_picks(module: nn.Module, _: nn.Module | None = None) -> RoutedPicks | None:
    """How vLLM's routed experts read single experts; None for any other module."""
    return RoutedPicks(module) if _are_routed(module) else None


class _Kernel(NamedTuple):
    """The tensors with a row for each expert that the kernel of a layer reads; or the reason why it must read whole
    stacks."""

    stacks: Sequence[torch.Tensor] = ()
    why_whole: str | None = None


class RoutedPicks:
    """How the kernel of one layer of vLLM's experts reads single rows of its stacks: implements `Picks`."""

    streams: Sequence[Sequence[torch.Tensor]] = ()
    guesses = False

    def __init__(self, module: Any) -> None:
        self._module = module

    @cached_property
    def _kernel(self) -> _Kernel:
        return _kernel_of(self._module)

    @property
    def stacks(self) -> Sequence[torch.Tensor]:
        """As `Picks.stacks`."""
        return self._kernel.stacks

    @property
    def ids_per_token(self) -> int:
        """As `Picks.ids_per_token`."""
        return int(self._module.top_k) if self._kernel.stacks else 0

    def why_whole(self) -> str | None:
        """As `Picks.why_whole`."""
        return self._kernel.why_whole

    def guess(self, states: torch.Tensor) -> torch.Tensor | None:
        """As `Picks.guess`: the router is in another module."""
        return None

    def forward(self, call: ForwardCall, rows: RowProvider) -> Callable[..., Any] | None:
        """As `Picks.forward`."""
        name, *args = call.args or (None,)
        given: dict[str, Any] = dict(zip(_ARGUMENTS, args, strict=False)) | call.kwargs
        states, ids = given.get(_ARGUMENTS[0]), given.get(_ARGUMENTS[-1])
        if name != _BY_IDS or not isinstance(ids, torch.Tensor) or ids.dtype not in _ID_TYPES:
            return None
        if not rows.has_slots or {id(stack) for stack in self.stacks} != set(rows.stacks):
            return None
        experts, num_ids = _kernel_for(self._module, states), ids.numel()
        if not _is_proved(experts) or not _sorts_as_known(experts):
            if num_ids <= rows.most:
                kind = type(experts).__name__
                _warn_once(f"weightstream: some batches read all experts: their kernel {kind} takes whole stacks")
            return None
        # by the number of ids alone: a graph is captured after a step of the same size, which compiles its kernels
        if num_ids <= rows.most:
            return partial(self._in_slots, experts, call.forward, rows, ids)
        is_placed = rows.has_places and num_ids <= len(self.stacks[0])
        return partial(self._place, call.forward, rows, ids) if is_placed else None

    def _in_slots(
        self, experts: Any, forward: Callable[..., Any], rows: RowProvider, ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        slots = rows.slots(ids)
        if PROVED[type(experts).__name__] is IdsBecomeSlots.SORTED:
            with rows.in_slots(), _slots_after_sorting(experts, rows.slot_of()):
                return forward(*args, **kwargs)
        with rows.in_slots():
            return forward(*(slots if arg is ids else arg for arg in args), **_replaced(kwargs, ids, slots))

    def _place(
        self, forward: Callable[..., Any], rows: RowProvider, ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        rows.place(ids)
        return forward(*args, **kwargs)


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _replaced(kwargs: Mapping[str, Any], old: torch.Tensor, new: torch.Tensor) -> dict[str, Any]:
    return {name: new if value is old else value for name, value in kwargs.items()}


@contextmanager
def _slots_after_sorting(experts: Any, slot_of: torch.Tensor) -> Iterator[None]:
    """Inside, blocks that the kernel sorts by experts are given the slots of these."""
    module = sys.modules[type(experts).__module__]
    sort = getattr(module, _SORT)
    if not isinstance(sort, _Sort):
        setattr(module, _SORT, _Sort(sort))  # not undone: outside of this block it is the plain function
    token = _SLOT_OF.set(slot_of)
    try:
        yield
    finally:
        _SLOT_OF.reset(token)


class _Sort:
    """vLLM's function that sorts tokens by experts, in blocks. Inside of `_slots_after_sorting` it returns the slot of
    each block's expert."""

    def __init__(self, sort: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        self._sort = sort

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, experts, num_tokens = self._sort(*args, **kwargs)
        if (slot_of := _SLOT_OF.get()) is None:
            return tokens, experts, num_tokens
        named = experts.clamp(0, len(slot_of) - 1)  # those after the last block in use are any numbers
        return tokens, slot_of.index_select(0, named), num_tokens


def _kernel_of(module: Any) -> _Kernel:
    """The kernel of a layer, once its weights are processed."""
    method = module.quant_method
    kernel = getattr(method, "moe_kernel", None)
    if method.is_monolithic:
        return _Kernel(why_whole=f"the kernel of {type(method).__name__} routes tokens itself, so it takes no ids")
    if kernel is None:
        return _Kernel(why_whole=f"{type(method).__name__} does not name its kernel")
    if not all(hasattr(module, weight) for weight in _WEIGHTS):
        return _Kernel(why_whole=f"the stacks of {type(method).__name__} are not {' and '.join(_WEIGHTS)}")
    experts = _kernel_for(module, torch.empty(1, module.hidden_size, device="meta"))
    name, num = type(experts).__name__, int(module.local_num_experts)
    if not _is_proved(experts):
        known = " or ".join(sorted(PROVED))
        return _Kernel(why_whole=f"the kernel {name} takes whole stacks; {known} would read single experts")
    if module.expert_map is not None or num != module.global_num_experts:
        return _Kernel(why_whole="with expert parallelism the experts of a layer are spread over ranks")
    if getattr(module.moe_config, "is_lora_enabled", False):
        return _Kernel(why_whole="with LoRA the kernel reads adapters by the ids of experts")
    if not _sorts_as_known(experts):
        return _Kernel(why_whole=f"this {name} does not sort by {_SORT}")
    weights = [getattr(module, weight) for weight in _WEIGHTS]
    if any(len(weight) != num for weight in weights):  # such as those of shared experts, which each token names
        return _Kernel(why_whole=f"the stacks of {name} have more rows than the layer has routed experts")
    read = weights + _tensors_of(getattr(experts, "quant_config", None))
    per_expert = [tensor for tensor in read if isinstance(tensor, torch.Tensor) and tensor.dim() and len(tensor) == num]
    per_expert = list({id(tensor): tensor for tensor in per_expert}.values())
    own, stacks = ({id(tensor) for tensor in group} for group in (module.parameters(recurse=False), per_expert))
    held = (value for value in _held_by(kernel.fused_experts) if id(value) not in stacks)
    is_foreign = not stacks <= own or any(_has_different_rows(value, num) for value in held)
    if is_foreign or not all(isinstance(tensor, torch.Tensor) for tensor in read):
        return _Kernel(why_whole=f"{name} holds tensors of its own with a row for each expert")
    return _Kernel(per_expert)


def _kernel_for(module: Any, states: Any) -> Any:
    """The kernel that runs for these tokens: some classes have two, and choose by the size of the batch."""
    experts = module.quant_method.moe_kernel.fused_experts
    choose = getattr(experts, _CHOOSE, None)
    return experts if choose is None else choose(states, *(getattr(module, weight) for weight in _WEIGHTS))


def _held_by(experts: Any) -> list[Any]:
    """What a kernel holds, and those of which it chooses."""
    held = list(vars(experts).values())
    return held + [value for choice in held if _is_proved(choice) for value in vars(choice).values()]


def _is_proved(experts: Any) -> bool:
    return type(experts).__name__ in PROVED


def _sorts_as_known(experts: Any) -> bool:
    is_sorted = PROVED[type(experts).__name__] is IdsBecomeSlots.SORTED
    return not is_sorted or hasattr(sys.modules[type(experts).__module__], _SORT)


def _has_different_rows(value: Any, num: int) -> bool:
    """Whether it is a tensor with a row for each expert, not all of which are equal as those of strides are."""
    has_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == num and value.numel() > 0
    return has_rows and not torch.equal(value, value[:1].expand_as(value))


def _tensors_of(config: Any) -> list[Any]:
    """The scales, zero points and biases of a quantisation; those of some kernels are no tensors."""
    sides = [getattr(config, side, None) for side in _SIDES]
    found = [getattr(side, field, None) for side in sides for field in _FIELDS if side is not None]
    return [value for value in found if value is not None]
