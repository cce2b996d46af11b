"""Experts of transformers: modules with stacks of matrices. A call uses only some of them, named by ids on the device.

They are found by structure. transformers' own functions compute, on a substitute for the module or on the module
itself, so the bits are those of transformers. There are two ways to bring the matrices of a call
(runtime/weights/picks.py): `select` gives substitutes for the stacks, which batched_mm indexes; `place` writes the
matrices to their places in whole stacks, where any implementation finds them.

[Note: grouped instead of batched]
`generate()` decodes with batched_mm, which copies the matrices of each id: for a few sequences that is most of a step.
grouped_mm reads matrices in place, so it runs instead once all matrices that a call uses are in their places, on a
device where both give the same bits. No library promises equal bits. So the first call of each shape runs both on
random states, with ids that occur once and several times, and with one expert's product at a time in the output, where
no sum can hide a difference. The result holds for the process, as kernels and the order of their sums are chosen by
shapes and settings. All of this applies only where torch has a kernel for groups of bfloat16; elsewhere it multiplies
group by group, and the host has to wait for the sizes of the groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from weightstream.adapters.hf import private_quantised
from weightstream.adapters.hf.lazy_dequant import UnpackingForward
from weightstream.adapters.hf.packed_formats import PackedStack, packed_leaves, packed_stacks
from weightstream.adapters.hf.packed_matrices import PackedLayer, PackedMatrices, packed_matrices
from weightstream.plan.units import some
from weightstream.runtime.devices import cuda
from weightstream.runtime.weights.picks import ForwardCall, Picks, RowProvider

logger = logging.getLogger("weightstream")

_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_BY_ROW = "batched_mm"  # the implementation that copies the matrices which it uses; generate() decodes with it
_IN_PLACE = "grouped_mm"  # the implementation that reads matrices in place, and only those which it uses
_EQUAL: dict[_GroupedCase, bool] = {}  # [Note: grouped instead of batched]
_ROUNDS = 8
_OWN_FORWARDS = ("forward", "_compiled_call_impl")  # attributes of an instance that run instead of its class's forward
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
PicksOf = Callable[[nn.Module, nn.Module | None], Picks | None]  # as `picks_of`, for modules of other libraries too


class _StandIn:
    """A substitute for a module: it has these attributes, and all others of the module."""

    def __init__(self, module: Any, others: Mapping[str, Any]) -> None:
        self.__dict__.update(others, _weightstream_module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_weightstream_module"], name)


def _unwatched(module: nn.Module) -> nn.Module:
    """A module with the same tensors that runs the forwards of the classes, without hooks."""
    found: nn.Module = object.__new__(type(module))
    found.__dict__.update({name: value for name, value in vars(module).items() if name not in _OWN_FORWARDS})
    found.__dict__ |= {name: type(hooks)() for name, hooks in vars(module).items() if name in _HOOKS}
    found._modules = {name: None if child is None else _unwatched(child) for name, child in module._modules.items()}
    return found


class _ExpertsCalled(Exception):
    """Ends the forward of a block at the call of its experts, and carries the ids of that call."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.ids = ids


def _end_at_experts(*args: Any, **kwargs: Any) -> None:
    """Stands in for the experts of a block, to get their ids."""
    raise _ExpertsCalled((dict(zip(_ARGUMENTS, args, strict=False)) | kwargs)["top_k_index"])


class _ExpertInputs(NamedTuple):
    """The arguments of a forward of experts, for each token: its state, the experts that it goes to, their weights."""

    hidden: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def of(cls, call: ForwardCall) -> _ExpertInputs | None:
        """None for a call with other arguments."""
        named = dict(zip(_ARGUMENTS, call.args, strict=False)) | call.kwargs
        tensors = [tensor for name in _ARGUMENTS if isinstance(tensor := named.get(name), torch.Tensor)]
        return cls(*tensors) if len(tensors) == len(_ARGUMENTS) else None


class _GroupedCase(NamedTuple):
    """All that kernels are chosen by: two calls with equal cases run the same ones."""

    of: type[nn.Module]
    device: torch.device
    shapes: tuple[torch.Size, ...]  # of states, ids and each stack
    settings: tuple[object, ...]


class ExpertForward:
    """How the forward of one module of experts reads single matrices of its stacks: implements `Picks`."""

    def __init__(self, module: Any, names: Mapping[str, Sequence[str]], block: Any = None) -> None:
        self._module = module
        self._names = names  # of its stacks, and of the parameters that hold each
        self._block = block
        self._of_class: Callable[..., Any] = type(module).forward
        self._repeats: bool | None = None  # whether the block guessed the ids of a call; None: not tried yet

    def forward(self, call: ForwardCall, rows: RowProvider) -> Callable[..., Any] | None:
        """As `Picks.forward`."""
        implementation = self._module.config._experts_implementation
        if implementation not in (_BY_ROW, _IN_PLACE) or not self._is_plain(call.forward):
            return None
        inputs, stacks = _ExpertInputs.of(call), self.stacks
        num_stacks = sum(map(len, self._names.values()))  # one that is computed from others is not a parameter
        if inputs is None or len(stacks) < num_stacks or not {id(stack) for stack in stacks}.issuperset(rows.stacks):
            return None
        num_ids, by_row = inputs.ids.numel(), implementation == _BY_ROW
        places = rows.places(num_ids)  # asked in each call, as it remembers the number of ids
        case = self._case(inputs, stacks) if by_row else None
        # a case that was not tried yet is tried in `_place`, which a capture does not allow
        may_group = case is not None and _EQUAL.get(case, not rows.capturing())
        if by_row and not may_group and num_ids <= rows.most:
            return partial(self._select, rows, inputs)
        if places:
            return partial(self._place, rows, inputs, case)
        has_all = len(rows.stacks) == num_stacks  # some leaves may stay on the device
        # by row, matrices are unpacked for each id, as the plain model copies them
        is_stream = self.streams and has_all and rows.streams() and not (by_row and rows.has_places)
        return partial(self._stream, rows) if is_stream else None

    @property
    def stacks(self) -> list[torch.Tensor]:
        """As `Picks.stacks`."""
        parameters, names = self._module._parameters, chain.from_iterable(self._names.values())
        return [stack for name in names if (stack := parameters.get(name)) is not None]

    @property
    def streams(self) -> list[list[torch.Tensor]]:
        """As `Picks.streams`."""
        packed = packed_stacks(self._module)
        are_packed = packed.keys() == self._names.keys()
        return [packed_leaves(self._module, packed[name]) for name in self._names] if are_packed else []

    @property
    def ids_per_token(self) -> int:
        return 0

    def _is_plain(self, forward: Any) -> bool:
        """Whether this runs the forward of the module's class; another one may have been assigned."""
        if isinstance(forward, UnpackingForward):
            return forward.runs_class_of(self._module)
        is_of_class = getattr(forward, "__func__", None) is self._of_class
        return is_of_class and getattr(forward, "__self__", None) is self._module

    def _select(self, rows: RowProvider, inputs: _ExpertInputs, *args: Any, **kwargs: Any) -> Any:
        selected = rows.select(inputs.ids)
        self._look_ahead(rows, inputs)
        packed, others = packed_stacks(self._module), dict[str, Any]()
        unpacked = _Unpacked(inputs.ids)
        for name, leaves in self._names.items():
            parameters = [self._module._parameters[leaf] for leaf in leaves]
            found = [selected.get(id(parameter), parameter) for parameter in parameters]
            others[name] = unpacked.stack(packed[name], found) if name in packed else found[0]
        return self._of_class(_StandIn(self._module, others), *args, **kwargs)

    def _stream(self, rows: RowProvider, *args: Any, **kwargs: Any) -> Any:
        others = {
            name: PackedMatrices(stack, rows.stream([id(leaf) for leaf in packed_leaves(self._module, stack)]))
            for name, stack in packed_stacks(self._module).items()
        }
        return self._of_class(_StandIn(self._module, others), *args, **kwargs)

    def _place(
        self, rows: RowProvider, inputs: _ExpertInputs, case: _GroupedCase | None, *args: Any, **kwargs: Any
    ) -> Any:
        rows.place(inputs.ids)
        self._look_ahead(rows, inputs)
        whole = packed_matrices(self._module)
        module = _StandIn(self._module, whole) if whole else self._module
        grouped = _StandIn(module, {"config": _StandIn(module.config, {"_experts_implementation": _IN_PLACE})})
        if case is not None and case not in _EQUAL and not rows.capturing():
            with _disable_current_modes():  # a mode that watches the call would see operators that are not the model's
                _EQUAL[case] = _is_equal(partial(self._of_class, module), partial(self._of_class, grouped), inputs)
        return self._of_class(grouped if case is not None and _EQUAL.get(case) else module, *args, **kwargs)

    def _look_ahead(self, rows: RowProvider, inputs: _ExpertInputs) -> None:
        if rows.look_ahead is None or self._module.training:  # in training some blocks add noise to their states
            return
        if self._repeats is None and not rows.capturing():
            with torch.no_grad(), _disable_current_modes():  # the comparison waits for the device; the model does not
                guessed = self.guess(inputs.hidden)
                is_like_ids = guessed is not None and guessed.shape == inputs.ids.shape
                self._repeats = guessed is not None and is_like_ids and bool(guessed.eq(inputs.ids).all())
            if not self._repeats:
                logger.debug("the ids of %s cannot be guessed ahead", type(self._module).__name__)
        rows.look_ahead(inputs.hidden)

    @property
    def guesses(self) -> bool:
        """Whether its block, run up to the experts, gave the same ids as a call of the model."""
        return bool(self._repeats) and not self._module.training

    def guess(self, states: torch.Tensor) -> torch.Tensor | None:
        """The ids that the block would pass to its experts for these states of tokens; None if they cannot be found.

        The forward of the block runs up to the call of its experts, with its router only: other children return their
        input.
        """
        if self._block is None:
            return None
        inside: dict[str, Any] = {}
        for name, child in self._block.named_children():
            # a router has a row of weights for each expert
            is_router = any(p.ndim and len(p) == self._module.num_experts for p in child.parameters())
            inside[name] = _end_at_experts if child is self._module else _unwatched(child) if is_router else _as_is
        try:
            type(self._block).forward(_StandIn(self._block, inside), states.unsqueeze(0))
        except _ExpertsCalled as call:
            return call.ids
        except Exception:  # a block whose forward takes other arguments
            logger.debug("a block of experts does not run without them", exc_info=True)
        return None

    def _case(self, inputs: _ExpertInputs, stacks: Collection[torch.Tensor]) -> _GroupedCase | None:
        """The case of a call; None where groups are not worth a trial, or a trial would run more than kernels."""
        hidden, ids = inputs.hidden, inputs.ids
        if len(ids) < 2 or not cuda.multiplies_groups(hidden.device):
            return None
        inner = (module for module in self._module.modules() if module is not self._module)
        has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in inner)
        if has_hooks or {hidden.dtype, *(stack.dtype for stack in stacks)} != {torch.bfloat16}:  # others if packed
            return None
        shapes = hidden.shape, ids.shape, *(stack.shape for stack in stacks)
        return _GroupedCase(type(self._module), hidden.device, shapes, cuda.product_settings())

    def why_whole(self) -> str | None:
        """As `Picks.why_whole`."""
        module, kind = self._module, type(self._module).__name__
        implementation = module.config._experts_implementation
        if not self._is_plain(module.forward):
            return f"their forward is not that of {kind}"
        if implementation not in (_BY_ROW, _IN_PLACE):
            return f'experts_implementation "{implementation}" reads whole stacks: set "{_BY_ROW}"'
        return None


def _is_equal(batched: Callable[..., Any], grouped: Callable[..., Any], inputs: _ExpertInputs) -> bool:
    """Whether both give the same bits, of random states: [Note: grouped instead of batched]."""
    hidden, ids, scores = inputs
    generator = torch.Generator(hidden.device).manual_seed(len(ids))
    try:
        for turn in range(_ROUNDS):
            states = torch.randn(hidden.shape, generator=generator, device=hidden.device).to(hidden.dtype)
            shuffle = torch.randint(ids.numel(), ids.shape, generator=generator, device=ids.device)
            one = torch.zeros_like(scores)
            one[:, turn % scores.shape[1]] = 1
            drawn = states, ids if turn % 2 else ids.flatten()[shuffle], one
            output, other = batched(*drawn), grouped(*drawn)
            if not output.any() or not torch.equal(output.view(torch.uint8), other.view(torch.uint8)):
                return False  # an output of zeros shows nothing
    except Exception:  # a function that takes no such states; the forward of the model runs as it is
        logger.debug("experts are not tried in groups", exc_info=True)
        return False
    return True


class _Unpacked:
    """Makes substitutes for the packed stacks of a module, of which rows are selected by ids."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids.flatten()
        self._layer = PackedLayer()

    @cached_property
    def _in_order(self) -> torch.Tensor:
        return torch.arange(len(self._ids), device=self._ids.device)

    def stack(self, stack: PackedStack, leaves: Sequence[Any]) -> PackedMatrices:
        """The substitute for a stack that is held as these leaves. A leaf on the device is whole."""
        held, rows = leaves, None
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            memories = [None if isinstance(leaf, torch.Tensor) else leaf.memory for leaf in leaves]
            if all(memory is not None for memory in memories):
                held, rows = memories, leaves[0].slots
            else:
                held, rows = [leaf[self._ids] for leaf in leaves], self._in_order
        return PackedMatrices(stack, held, rows, layer=self._layer)


def _as_is(states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return states


def picks_of(module: nn.Module, block: nn.Module | None = None) -> ExpertForward | None:
    """How a module of experts reads single matrices; None for any other module. `block` holds the experts and the
    router.

    None also for stacks of one byte a weight (`FP8Experts`): they go to a kernel, which takes no substitute. And for
    stacks that are wrappers around other tensors (torchao).
    """
    num, config = getattr(module, "num_experts", None), getattr(module, "config", None)
    is_known = isinstance(num, int) and hasattr(type(module), "_apply_gate")
    if not is_known or not hasattr(config, "_experts_implementation"):
        return None
    packed, parameters = packed_stacks(module), module._parameters
    names = {name: packed[name].leaves if name in packed else (name,) for name in _STACKS}
    stacks = {
        name: leaves for name, leaves in names.items() if all(parameters.get(leaf) is not None for leaf in leaves)
    }
    shapes = [packed[name].shape if name in packed else parameters[name].shape for name in stacks]  # type: ignore[union-attr]
    is_stacked = len(stacks) == 2 and all(len(shape) == 3 and shape[0] == num for shape in shapes)
    is_indexed = all(name in packed or _is_indexed(parameters[name]) for name in stacks)
    return ExpertForward(module, stacks, block) if is_stacked and is_indexed else None


def _is_indexed(stack: torch.Tensor | None) -> bool:
    """Whether batched_mm of transformers indexes this stack."""
    return stack is not None and stack.dtype.itemsize > 1 and not is_traceable_wrapper_subclass(stack)


def why_whole(model: nn.Module, picks_of: PicksOf = picks_of) -> str | None:
    """Reason why each step reads all experts of a model, in one line; None where it does not, or has no experts.

    Experts are recognised by their names here. Nothing but this message depends on that.
    """
    found: dict[str, list[str]] = {}
    every: list[str] = []
    for name, module in model.named_modules():
        if not _are_experts(name, module) or any(name.startswith(f"{outer}.") for outer in every):
            continue
        every.append(name)
        if reason := _why_whole(module, picks_of):
            found.setdefault(reason, []).append(name)
    if not found:
        return None
    reason, names = max(found.items(), key=lambda item: len(item[1]))
    return f"each step reads all experts of {some(names, 1)}: {reason}"


def _are_experts(name: str, module: nn.Module) -> bool:
    last, kind = name.rpartition(".")[2].lower(), type(module).__name__
    is_named = last == "experts" or ("Experts" in kind and "shared" not in last)
    return is_named and any(True for _ in module.parameters())


def _why_whole(module: nn.Module, picks_of: PicksOf) -> str | None:
    kind = type(module).__name__
    for inner in module.modules():  # the module of the stacks may be inside
        if (picks := picks_of(inner, None)) is not None:
            return picks.why_whole()
    packed = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.dtype.itemsize == 1})
    if packed:
        remedy = (
            ". weightstream.from_pretrained() reads single experts of such a checkpoint, with the outputs of the "
            "dequantised model"
        )
        is_known = private_quantised.fp8_use(module).are_experts
        return f"{kind} gives its kernels whole stacks of {' and '.join(packed)}{remedy * is_known}"
    wrapped = sorted({type(p).__name__ for p in module.parameters() if is_traceable_wrapper_subclass(p)})
    if wrapped:
        return f"{kind} holds its stacks as {' and '.join(wrapped)}"
    return f"{kind} does not take rows of stacks by ids, as {_BY_ROW} of transformers does"
