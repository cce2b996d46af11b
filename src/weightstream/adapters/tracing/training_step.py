"""One training step of a copy of a model on meta: a forward with gradients, a loss, and the backward. Knows no unit.

Autograd numbers its nodes as they are made. So the number of the node that runs tells, in the backward, which call of
a module an operator belongs to. Functions do what they do on a GPU: attention is one kernel with a backward of its own,
and autocast is in force.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from weightstream.adapters.steps.decode_steps import takes_ids
from weightstream.adapters.tracing import meta_copy
from weightstream.adapters.tracing.block_series import Series
from weightstream.adapters.tracing.forward import Forward
from weightstream.adapters.tracing.known_values import KnownValues
from weightstream.adapters.tracing.op_cost import HALF
from weightstream.errors import UnsupportedError
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.tensors.thread_state import innermost_hooks
from weightstream.settings.config import TrainConfig

_aten = torch.ops.aten
_WIDEST_HEAD = 256  # of fused attention
# What autocast computes in 16 bits and in float32 on CUDA, as far as models use it, by the names of the functions.
_LOWER = frozenset(
    (
        *("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "conv1d"),
        *("conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu"),
        *("scaled_dot_product_attention",),
    )
)
_SINGLE = frozenset(
    (
        *("layer_norm", "group_norm", "softmax", "log_softmax", "softplus", "cross_entropy", "nll_loss"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "exp", "expm1", "log", "log1p", "pow"),
        *("reciprocal", "rsqrt", "cumsum", "cumprod", "prod", "sum", "logsumexp", "cosine_similarity", "cdist"),
        *("norm",),
    )
)


class Segment(NamedTuple):
    """A part of a step for which a peak of memory is found: a followed block, by series and index, or what follows it.

    `is_after`: the block has kept its activations; `is_loss`: from the end of the last block to the backward of it.
    """

    series: int
    block: int
    is_after: bool
    is_loss: bool


class Trained(NamedTuple):
    """Elements of trainable parameters; `num_added` of them are of adapters that the model does not have yet."""

    num: int
    num_added: int


def trained_of(model: nn.Module, rank: int, blocks: Sequence[nn.Module]) -> Trained:
    """The trainable parameters of a model; if it has none, or only such, those of adapters at all linear layers of its
    blocks."""
    floats = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    num = sum(parameter.requires_grad for parameter in floats)
    if num not in (0, len(floats)):  # else it is as it was loaded, or frozen: adapters follow
        num = sum(parameter.numel() for parameter in floats if parameter.requires_grad)
        return Trained(num, 0)
    num = sum(rank * sum(features) for _, features in _linears(model, blocks))
    return Trained(num, num)


class Trainable(NamedTuple):
    """A copy of a model that is ready for a training step.

    Attributes:
        args, kwargs: the arguments of the step.
        trained: elements of trainable parameters of the whole model.
        left_out: blocks that the copy no longer has. Kept, so that no other tensor gets the addresses of their weights.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    trained: Trained
    left_out: Sequence[nn.Module]


def prepare_training(
    made: meta_copy.Copied, model: nn.Module, train: TrainConfig, series: Sequence[Series]
) -> Trainable:
    """Make a copy of a model ready for a training step: trainable parameters, checkpoints, fewer blocks.

    A model without trainable parameters gets adapters at all linear layers of its blocks.
    """
    copies = {
        id(made.originals[key]): module for module in made.model.modules() if (key := id(module)) in made.originals
    }
    args, kwargs = made.values or _token_inputs(made.model, train)
    if "use_cache" in inspect.signature(_base_of(made.model).forward).parameters:
        kwargs = {"use_cache": False, **kwargs}  # what is computed again must not add to a cache
    blocks, left_out = [block for each in series for block in each.blocks], list[Any]()
    trained = trained_of(model, train.rank, blocks)
    if not trained.num:
        raise UnsupportedError(f"{type(model).__name__}: nothing of it is trainable, and it has no linear layers")
    if trained.num_added:
        for linear, features in _linears(model, blocks):
            _adapt(copies[id(linear)], train.rank, features)
    else:
        for own, copy in zip(model.parameters(), made.model.parameters(), strict=True):
            copy.requires_grad_(own.requires_grad and own.is_floating_point())
    for each in series:
        missing = {id(copies[id(each.blocks[index])]) for index in each.missing}
        for module in made.model.modules():
            for name in [name for name, child in module._modules.items() if id(child) in missing]:
                left_out.append(module._modules.pop(name))
    if train.checkpoints and not any(getattr(m, "gradient_checkpointing", False) for m in made.model.modules()):
        for block in (copies[id(block)] for each in series for block in each.blocks[: each.num_followed]):
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    for module in (copies[id(m)] for m in model.modules() if isinstance(m, nn.Embedding) and m._forward_hooks):
        # transformers' `enable_input_require_grads`, which reentrant checkpoints need; a copy has no hooks
        module.register_forward_hook(lambda _, __, output: output.requires_grad_())
    made.model.train()
    return Trainable(args, kwargs, trained, left_out)


def _token_inputs(model: nn.Module, train: TrainConfig) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a language model for a step that is made up."""
    base = _base_of(model)
    takes, config = takes_ids(base), base.config
    config.pad_token_id = None  # some models search the ids for it, which have no values here
    tokens = min(train.tokens, getattr(config, "max_position_embeddings", None) or train.tokens)
    ids = torch.empty(train.batch, tokens, dtype=torch.long, device="meta")
    return (), {"input_ids": ids} | ({"labels": ids} if "labels" in takes else {})


def _base_of(model: Any) -> Any:
    """The model that a wrapper of peft adapts; any other model itself."""
    return getattr(model, "get_base_model", lambda: model)()


class _Features(NamedTuple):
    """The sizes of a linear layer's input and output."""

    inputs: int
    outputs: int


def _linears(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, _Features]]:
    """The linear layers of the blocks, or of a model without blocks."""
    for module in dict.fromkeys(module for block in blocks or (model,) for module in block.modules()):
        if isinstance(module, nn.Linear):
            yield module, _Features(module.in_features, module.out_features)
        elif type(module).__name__ == "Conv1D":  # transformers' linear layer of GPT-2
            weight: Any = module.weight
            yield module, _Features(*weight.shape)


def _adapt(linear: nn.Module, rank: int, features: _Features) -> None:
    """Add an adapter with float32 parameters, as peft's."""
    down = nn.Parameter(torch.empty(rank, features.inputs, dtype=torch.float32, device="meta"))
    up = nn.Parameter(torch.empty(features.outputs, rank, dtype=torch.float32, device="meta"))
    linear.register_parameter("weightstream_down", down)
    linear.register_parameter("weightstream_up", up)

    def add(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        x = args[0].float()  # peft casts to the dtype of the adapter, and autocast back
        return (output + F.linear(F.linear(x, down), up) * 1.0).to(output.dtype)

    linear.register_forward_hook(add)


class TrainingStep(Forward):
    """A training step: its calls and operators, those of the backward after those of the forward, and its memory.

    Gradients of parameters do not count as activations. They are in memory for longer than a step.

    Attributes:
        num_forward_calls: calls of modules in the forward; the others recompute.
        num_forward_ops: operators of the forward and of the loss.
    """

    def __init__(
        self,
        made: meta_copy.Copied,
        trainable: Trainable,
        series: Sequence[Series],
        until_s: float,
        storages: meta_copy.Storages,
        known: KnownValues,
        dtype: torch.dtype | None,
    ) -> None:
        self._dtype = dtype  # of autocast
        self.num_forward_calls = self.num_forward_ops = 0
        self._series = series
        copies = {id(original): key for key, original in made.originals.items()}
        self._blocks = {  # id of a copied block -> its series and index
            copies[id(block)]: (number, index)
            for number, each in enumerate(series)
            for index, block in enumerate(each.blocks[: each.num_followed])
        }
        self._block_of: list[tuple[int, int] | None] = []  # call -> the block around it
        self._numbers: list[int] = []  # of the next node where a call begins or ends
        self._calls_from: list[int] = []  # the innermost call from there on
        self._is_backward = False
        self._called: list[int] = []  # series in the order of their first calls
        self._entered: dict[tuple[int, int], int] = {}  # block -> the bytes that are alive at its call
        self._segment: Segment | None = None
        self._peaks: dict[Segment | None, int] = {}
        trained = [parameter for parameter in made.model.parameters() if parameter.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(lambda p: self.memory.discount(p.grad)) for p in trained]
        try:
            with torch.enable_grad(), without_hooks(), _AsOnGpu(self._dtype):
                super().__init__(
                    made.model,
                    made.weights,
                    until_s,
                    storages,
                    trainable.args,
                    dict(trainable.kwargs),
                    known=known,
                )
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in trained:
                parameter.grad = None

    def _compute(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        loss = _loss_of(call(*args, **kwargs))
        self.num_forward_calls, self.num_forward_ops = len(self.calls), len(self.ops)
        self._is_backward = True
        loss.backward()
        self._end_segment()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._is_backward and not self._open:  # in a backward no such mode is in force
            self._recomputing = _AsOnGpu(self._dtype)
            self._recomputing.__enter__()  # type: ignore[no-untyped-call]
        super()._enter(module, args)
        call = self.calls[-1]
        block = self._blocks.get(id(module)) or (self._block_of[call.caller] if call.caller >= 0 else None)
        self._block_of.append(block)
        self._mark()
        if block is not None and not self._is_backward and id(module) in self._blocks:
            self._go(Segment(*block, is_after=False, is_loss=False))
            self._called += [block[0]] * (block[0] not in self._called)
            if block in self._entered and any(each.missing for each in self._series):
                raise UnsupportedError("a block runs twice")
            self._entered.setdefault(block, self.memory.live_nbytes)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._leave(module, args, output)
        if self._is_backward and not self._open:
            self._recomputing.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._mark()
        if not self._is_backward and (block := self._blocks.get(id(module))) is not None:
            is_last = block[1] == self._series[block[0]].num_followed - 1
            self._go(Segment(*block, is_after=True, is_loss=is_last))

    def _mark(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._calls_from.append(self._open[-1] if self._open else -1)

    def _place(self) -> int:
        if self._open or not self._is_backward or (node := torch._C._current_autograd_node()) is None:
            return super()._place()
        mark = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._calls_from[mark] if mark >= 0 else -1

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_backward and (place := self._place()) >= 0 and (block := self._block_of[place]) is not None:
            self._go(Segment(*block, is_after=False, is_loss=False))
        return super()._run(func, args, kwargs)

    def _go(self, segment: Segment | None) -> None:
        """Begin a segment."""
        if segment != self._segment:
            self._end_segment()
            self._segment = segment

    def _end_segment(self) -> None:
        self._peaks[self._segment] = max(self._peaks.get(self._segment, 0), self.memory.peak_nbytes)
        self.memory.peak_nbytes = self.memory.live_nbytes

    def peak_nbytes(self, *, with_loss: bool = True) -> int:
        """The most bytes of activations in a step of the whole model; also without the loss and what it reads."""
        peaks = [(at, n) for at, n in self._peaks.items() if with_loss or at is None or not at.is_loss]
        return max(nbytes + self._left_out(at) for at, nbytes in peaks)

    def _left_out(self, segment: Segment | None) -> int:
        """The bytes that blocks keep before this segment, if it is that of the last block of its kind in the model."""
        if segment is None or segment.series not in self._called:
            return 0
        series, before = self._series[segment.series], self._called[: self._called.index(segment.series)]
        whole = sum(self._kept(number, block) for number in before for block in self._series[number].missing)
        last = series.last(segment.block) if series.missing else segment.block
        blocks = range(segment.block + segment.is_after, last + segment.is_after)
        return whole + sum(self._kept(segment.series, block) for block in blocks)

    def _kept(self, number: int, block: int) -> int:
        """The bytes that a block keeps for the backward."""
        series, followed = self._series[number], self._series[number].num_followed
        if block >= followed - 1:  # no call of the series follows that one
            alike = [index for index in range(1, followed - 1) if series.kinds[index] == series.kinds[block]]
            block = (alike or [followed - 2])[-1]
        return max(0, self._entered[number, block + 1] - self._entered[number, block])


def _loss_of(output: Any) -> torch.Tensor:
    """A loss: that of the output, or a mean of squares."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    for tensor in tensors_in(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            return (tensor.float() - torch.empty_like(tensor, dtype=torch.float32)).pow(2).mean()
    raise UnsupportedError("its output has no gradient")


class _AsOnGpu(TorchFunctionMode):
    """Inside, functions on meta do what they do on a GPU: fused attention where it has a kernel, and autocast.

    `dtype`: that of autocast; None: there is none. Operators on meta do not see autocast themselves.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self._dtype is not None and (name in _LOWER or name in _SINGLE):
            dtype = self._dtype if name in _LOWER else torch.float32
            args, kwargs = tree_map_only(torch.Tensor, partial(_cast, dtype=dtype), (args, kwargs))
        if func is F.scaled_dot_product_attention and (output := _attend(*args, **kwargs)) is not None:
            return output
        return func(*args, **kwargs)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_float = tensor.is_meta and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if is_float else tensor


def autocast_dtype(model: nn.Module, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast in the present block; without it, that of a model in 16 bits, whose adapters are usually
    trained under autocast. None for any other model."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    floats = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    nums = Counter({dtype: sum(p.numel() for p in floats if p.dtype is dtype) for dtype in {p.dtype for p in floats}})
    usual = max(nums, key=nums.__getitem__, default=None)
    return usual if usual in HALF else None


@contextmanager
def without_hooks() -> Iterator[None]:
    """Inside, no saved-tensor hooks of the caller are in force, as those of a checkpoint around the whole model."""
    outer = []
    while (pair := innermost_hooks()) is not None:
        outer.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(outer):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """The output of fused attention; None if there is no kernel for these arguments."""
    if not query.is_meta or query.dim() != 4 or query.dtype is torch.float64:
        return None
    is_square = query.shape[-1] == value.shape[-1] <= _WIDEST_HEAD
    if query.dtype in HALF and attn_mask is None and is_square:
        return _aten._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if query.shape[1] != key.shape[1]:
        return None
    if attn_mask is not None:
        shape = (*query.shape[:3], key.shape[2])
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype, device="meta").expand(shape)
    return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
