"""Footprint: the work and the memory of a forward, found from shapes only. It runs no kernel and reads no weight.

A copy of the model on meta runs the forward once. A dispatch mode sees every operator, hooks find its module, and weak
references show when the memory of a result is free again. In inference mode composite operators arrive whole: a linear
layer and fused attention are one kernel each, as on a GPU, and the others are decomposed here. An operator that was
seen with the same shapes before is not run again: the layers of a model are alike, and meta kernels are slow Python.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from weightstream.adapters.hf import private
from weightstream.adapters.steps import croppable_cache, static_cache
from weightstream.adapters.steps.decode_steps import CACHES, cache_in, cached, options_of, shorten, takes_ids
from weightstream.adapters.tracing import global_state, meta_copy, op_cost, process_states
from weightstream.adapters.tracing.known_values import UNKNOWN, KnownValues
from weightstream.adapters.tracing.op_cost import CountedLaunch, Launch
from weightstream.adapters.tracing.op_timing import Trial
from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Op, Workload, mean
from weightstream.plan.schedule import aligned
from weightstream.runtime.streamer.read_watch import OperatorMode
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.weights.alias_groups import UnitModule

logger = logging.getLogger("weightstream")

_CPU = torch.device("cpu")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class ModuleCall(NamedTuple):
    """A module that ran, the index of the call that it ran in (-1: none), and the bytes of tensors that it returned."""

    module: nn.Module
    caller: int
    returned_nbytes: int


class KernelLaunch(NamedTuple):
    """A kernel, the index of the call that launched it (-1: none), and the number of calls that had begun by then."""

    call: int
    num_calls: int
    op: Op


class WeightRead(NamedTuple):
    """A weight, and the index of the call that read it (-1: none)."""

    call: int
    tensor: torch.Tensor


class _StorageRead(NamedTuple):
    """As `WeightRead`, while the forward runs: `storage` is that of the copied weight on meta, by `_cdata`."""

    call: int
    storage: int


class _UnitCall(NamedTuple):
    """A call of a unit, by its index, and the ops that count for it."""

    unit: int
    ops: list[Op]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """Memory and work of one step of a model, apart from its weights.

    Attributes:
        activation_nbytes: the most that is alive besides weights and cache, in this step or in a prompt as long as the
            context.
        cache_nbytes: the cache of all positions.
        calls: the modules that ran, in the order in which their calls began.
        ops: the kernels, in the order of their launches; then the all-reduces of shards.
        launches: the different operators among these.
        reads: the weights that were read.
        captured: the same step as it runs in a CUDA graph, where that differs.
    """

    activation_nbytes: int
    cache_nbytes: int
    calls: tuple[ModuleCall, ...]
    ops: tuple[KernelLaunch, ...]
    launches: tuple[CountedLaunch, ...] = ()
    reads: tuple[WeightRead, ...] = ()
    captured: Footprint | None = None

    def tried(self, trials: Mapping[Launch, Trial]) -> Footprint:
        """This footprint with the measured times and workspaces of the operators in `trials`."""
        known = {id(run.op): replace(run.op, device_s=t.device_s) for run, t in trials.items() if run.op is not None}
        ops = tuple(launch._replace(op=known.get(id(launch.op), launch.op)) for launch in self.ops)
        peaks = (run.alive_nbytes + aligned(t.workspace_nbytes) for run, t in trials.items())
        most = max(self.activation_nbytes, max(peaks, default=0) - self.cache_nbytes)
        return replace(self, ops=ops, launches=(), activation_nbytes=most)

    def states_nbytes(self, units: Sequence[UnitModule]) -> int:
        """The most bytes that a call of a repeated block among these units returned."""
        blocks = {id(unit.module) for unit in units if unit.layer is not None}
        return max((call.returned_nbytes for call in self.calls if id(call.module) in blocks), default=0)

    def order(self, units: Sequence[UnitModule]) -> tuple[int, ...]:
        """The units in the order in which they ran, once for each call."""
        return tuple(call.unit for call in self._unit_calls(units))

    def work(self, units: Sequence[UnitModule]) -> tuple[tuple[Op, ...], ...]:
        """The ops of each unit in one call of it; for several calls their mean, op by op.

        An op counts for the innermost unit around it. An op outside every unit counts for the previous one
        (`after=True`); before the first unit, for the last, as steps are cyclic.
        """
        by_unit: list[list[list[Op]]] = [[] for _ in units]
        for call in self._unit_calls(units):
            by_unit[call.unit].append(call.ops)
        return tuple(map(mean, by_unit))

    def outside(self, units: Sequence[UnitModule]) -> list[torch.Tensor]:
        """The weights of units that were read while no unit that holds them ran, for example by a parent module."""
        index = {id(module): unit for unit in units for module in (unit.module, *unit.also)}
        held = {id(unit): {id(leaf.tensor) for leaf in unit.leaves()} for unit in units}
        every = set().union(*held.values()) if held else set()
        shown: list[frozenset[int]] = []  # call -> the units around it
        for call in self.calls:
            around = shown[call.caller] if call.caller >= 0 else frozenset[int]()
            unit = index.get(id(call.module))
            shown.append(around if unit is None else around | {id(unit)})
        outside = {}
        for read in self.reads:
            around = shown[read.call] if read.call >= 0 else frozenset[int]()
            if id(read.tensor) in every and not any(id(read.tensor) in held[unit] for unit in around):
                outside[id(read.tensor)] = read.tensor
        return list(outside.values())

    def _unit_calls(self, units: Sequence[UnitModule]) -> list[_UnitCall]:
        index = {id(module): i for i, unit in enumerate(units) for module in (unit.module, *unit.also)}
        unit_calls: list[_UnitCall] = []
        around: list[int] = []  # call -> the index of the innermost unit's call around it
        for call in self.calls:
            around.append(around[call.caller] if call.caller >= 0 else -1)
            if id(call.module) in index:
                around[-1] = len(unit_calls)
                unit_calls.append(_UnitCall(index[id(call.module)], []))
        opened = list(accumulate((id(call.module) in index for call in self.calls), initial=0))
        early = []
        for launch in self.ops if unit_calls else ():
            position = around[launch.call] if launch.call >= 0 else -1
            if position >= 0:
                unit_calls[position].ops.append(launch.op)
            elif opened[launch.num_calls]:
                unit_calls[opened[launch.num_calls] - 1].ops.append(replace(launch.op, after=True))
            else:
                early.append(replace(launch.op, after=True))
        for last in unit_calls[-1:]:
            last.ops.extend(early)
        return unit_calls


def follow(
    model: nn.Module,
    args: Any = (),
    kwargs: Any = None,
    *,
    entry: str = "forward",
    limit_s: float = math.inf,
    device: torch.device = _CPU,
    on_output: Callable[[Any], None] = lambda _: None,
    on_values: Callable[[bool], None] = lambda _: None,
) -> Footprint:
    """Follow a call of any model on the shapes of its arguments. Model and arguments do not change; no weight is read.

    Args:
        entry: the method that is called.
        device: the device of a real call. Its random state is restored.
        on_output: called with the output of the call, on meta; it may keep no tensor of it.
        on_values: called with whether the control flow of the call depends on values of integer or mask arguments.

    Raises:
        UnsupportedError: the control flow depends on other values, the model cannot be copied without its weights, or
            its Python code takes longer than `limit_s` seconds.
    """

    def run_once(start: Callable[..., _Forward], _: nn.Module, on_meta: Any, keywords_on_meta: Any) -> list[_Forward]:
        pairs = zip(tensors_in((args, kwargs or {})), tensors_in((on_meta, keywords_on_meta)), strict=True)
        forward = start(on_meta, keywords_on_meta, entry, known := KnownValues(pairs))
        on_values(known.was_asked)
        on_output(forward.output)
        return [forward]

    return _followed(model, run_once, (args, kwargs or {}), limit_s, device)


def observe(model: nn.Module, workload: Workload) -> Footprint:
    """Follow a step of a language model on shapes only; its weights may be on meta, and are neither read nor copied.

    Args:
        model: a causal language model of transformers.
        workload: the step; a model without a cache gets the whole context in each step.

    Raises:
        UnsupportedError: the control flow depends on values, or the model takes other inputs than token ids.
    """
    return _followed(model, partial(_steps, workload))


def observe_passes(model: nn.Module, workload: Workload, widths: Sequence[int]) -> dict[int, Footprint]:
    """Follow passes of several tokens of one text, which give the logits of all of them, as passes that verify drafts.

    Their cache is the one that can be cropped: the same for eager and for captured passes.

    Args:
        model: a causal language model of transformers.
        workload: its context is that of the passes.
        widths: the numbers of tokens.

    Returns:
        A footprint for each width.

    Raises:
        UnsupportedError: as for `observe`, and for a model that has no such cache.
    """
    if (reason := static_cache.unsuited(model)) is not None:
        raise UnsupportedError(reason)
    workload = replace(workload, batch=1)
    return dict(zip(widths, _each_followed(model, partial(_passes, workload, widths)), strict=True))


def _passes(
    workload: Workload, widths: Sequence[int], start: Callable[..., _Forward], model: nn.Module
) -> list[list[_Forward]]:
    """A forward for each width, after that of a prompt, whose footprint is none of theirs."""
    takes = takes_ids(model)
    config: Any = model.config
    config.pad_token_id = None
    options = options_of(takes)

    def forward(num_tokens: int, **more: Any) -> _Forward:
        ids = torch.empty(1, num_tokens, dtype=torch.long, device="meta")
        kept = {"logits_to_keep": num_tokens} if "logits_to_keep" in takes else {}
        return start((), {"input_ids": ids, **options, **kept, **more})

    prompt = start((), {"input_ids": torch.empty(1, 2, dtype=torch.long, device="meta"), **options})
    name = next((name for name in CACHES if name in takes and getattr(prompt.output, name, None) is not None), None)
    if name is None:
        raise UnsupportedError(f"{type(model).__name__} has no cache: no draft is verified")
    cache = croppable_cache.croppable(model, workload.context, max(widths)).cache
    for index, layer in enumerate(getattr(prompt.output, name).layers):
        cache.update(layer.keys, layer.values, index)  # allocates the tensors of a layer, in these shapes
    prompt.output = None
    forwards = []
    with private.decode_step(model, 1):  # `generate` verifies drafts in this context, too
        for width in widths:
            forwards.append(forward(width, **{name: cache, "attention_mask": _mask(config, width, workload.context)}))
            forwards[-1].output = None
            forwards[-1].cache_nbytes = sum(aligned(op_cost.touched_nbytes(tensor)) for tensor in cached(cache))
    return [[each] for each in forwards]


def _steps(workload: Workload, start: Callable[..., _Forward], model: nn.Module) -> list[_Forward]:
    """The prompt's forward; with a cache, also the step after it, and that step as it would be captured."""

    def forward(num_tokens: int, **more: Any) -> _Forward:
        ids = torch.empty(workload.batch, num_tokens, dtype=torch.long, device="meta")
        return start((), {"input_ids": ids, **more})

    takes = takes_ids(model)
    config: Any = model.config
    config.pad_token_id = None  # some models search the ids for it, which have no values here
    options = options_of(takes)
    prompt = forward(max(workload.context, workload.tokens), **options)
    caches = {name: cache for name in CACHES if name in takes and (cache := getattr(prompt.output, name, None))}
    past, steps = workload.context - workload.tokens, [prompt]
    if caches and past > 0:
        prompt.output = None
        for cache in caches.values():
            shorten(cache, past)
        static = [static_cache.static(model, c, workload.context, past) for c in caches.values()]
        with private.decode_step(model, workload.tokens):
            steps.append(forward(workload.tokens, **options, **caches))
            if workload.tokens == 1 and None not in static:
                with suppress(Exception):  # a step that cannot be followed cannot be captured, either
                    steps[-1].captured = forward(1, **options, **dict(zip(caches, static, strict=True)))
    steps[-1].cache_nbytes = sum(aligned(op_cost.touched_nbytes(t)) for cache in caches.values() for t in cached(cache))
    return steps


def _mask(config: Any, num_tokens: int, num_positions: int) -> Any:
    """The mask that `generate` makes for a static cache before each forward."""
    dtype = torch.bool if config._attn_implementation == "sdpa" else config.dtype
    mask = torch.empty(1, 1, num_tokens, num_positions, dtype=dtype, device="meta")
    kinds = getattr(config.get_text_config(), "layer_types", None)
    return mask if kinds is None else dict.fromkeys(kinds, mask)


def _followed(
    model: nn.Module,
    steps: Callable[..., list[_Forward]],
    values: tuple[Any, ...] = (),
    limit_s: float = math.inf,
    device: torch.device = _CPU,
) -> Footprint:
    """Copy a model to meta, run forwards of the copy, and return the footprint of the last one, with the largest memory
    of all.

    `steps(start, copy, *values)` runs the forwards: each call `start(args, kwargs)` is one, and returns its `_Forward`.
    `values` are the arguments of the real call; `steps` gets copies of them on meta. Errors of the forwards and of the
    copying become `UnsupportedError`.
    """
    return _each_followed(model, lambda *args: [steps(*args)], values, limit_s, device)[0]


def _each_followed(
    model: nn.Module,
    steps: Callable[..., list[list[_Forward]]],
    values: tuple[Any, ...] = (),
    limit_s: float = math.inf,
    device: torch.device = _CPU,
) -> list[Footprint]:
    """As `_followed`, for several lists of forwards of one copy of the model: the footprint of each list."""
    storages = meta_copy.Storages()
    until_s = time.perf_counter() + limit_s

    def run() -> list[Footprint]:
        with torch.no_grad():
            made = meta_copy.copied(model, *values, storages=storages)
            with torch.inference_mode():
                start = partial(_Forward, made.model, made.weights, until_s, storages)
                try:
                    return [_footprint(forwards, made) for forwards in steps(start, made.model, *made.values)]
                finally:
                    meta_copy.untie(made)

    footprints, failed = None, ""
    try:
        global_state.refuse_side_effects(model, values)
        with global_state.without(storages, model), process_states.kept(device):
            footprints = copy_context().run(run)
    except UnsupportedError as error:
        failed = str(error)
    except Exception as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        failed = f"{type(model).__name__}: its work cannot be found from shapes before it runs: {message}"
    if storages.are_kept():  # the copy is gone now, and so are the frames of an error
        logger.warning("%s keeps tensors outside of its modules: one without values may be left", type(model).__name__)
    if footprints is None:
        raise UnsupportedError(failed)
    return footprints


def _footprint(forwards: Sequence[_Forward], made: meta_copy.Copied) -> Footprint:
    last, peak_nbytes = forwards[-1], max(forward.memory.peak_nbytes for forward in forwards)
    nums = Counter(id(launch.op) for launch in last.ops)
    calls = [call._replace(module=made.originals.get(id(call.module), call.module)) for call in last.calls]
    # the copy does not communicate: the all-reduces after modules with shards are added here
    summed = [
        KernelLaunch(index, index + 1, op_cost.sum_of(call.returned_nbytes))
        for index, call in enumerate(calls)
        if id(call.module) in made.summed
    ]
    return Footprint(
        activation_nbytes=max(0, peak_nbytes - last.cache_nbytes),
        cache_nbytes=last.cache_nbytes,
        calls=tuple(calls),
        ops=(*last.ops, *summed),
        captured=_footprint([last.captured], made) if last.captured is not None else None,
        launches=tuple(
            CountedLaunch(launch, nums[id(launch.op)]) for launch in last.launches.values() if id(launch.op) in nums
        ),
        reads=tuple(WeightRead(read.call, tensor) for read in last.reads for tensor in made.weights[read.storage]),
    )


class _Forward(OperatorMode):
    """One forward on meta tensors: the calls of modules, the launches of operators, and the memory that was alive.

    A forward may also make small tensors with values on the CPU, such as constants. Operators on these alone are run,
    and do not count as launches. They may write only to tensors that this forward made: any other is not a copy, and
    belongs to the model or its caller.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Collection[int],
        until_s: float,
        storages: meta_copy.Storages,
        args: Any,
        kwargs: dict[str, Any],
        entry: str = "forward",
        known: KnownValues | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._known = known if known is not None else KnownValues()
        self.reads: dict[_StorageRead, None] = {}  # each once, in order
        self._own_storages = weakref.WeakValueDictionary[int, Any]()  # of tensors with values that this forward made
        self.calls: list[ModuleCall] = []
        self.ops: list[KernelLaunch] = []
        self.launches: dict[Any, Launch] = {}
        self.memory = _Memory((*model.parameters(), *model.buffers()), storages)
        self._draws = process_states.Draws()
        self.cache_nbytes = 0
        self.captured: _Forward | None = None  # the same step, with another cache
        self._call = -1
        self._until_s = until_s
        for tensor in (*tensors_in((args, kwargs)), *cached(cache_in(kwargs))):
            self.memory.hold(tensor)
        with ExitStack() as hooks, self:
            for module in model.modules():
                hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                hooks.callback(module.register_forward_hook(self._leave).remove)
            self.output = (model if entry == "forward" else getattr(model, entry))(*args, **kwargs)

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.calls.append(ModuleCall(module, self._call, 0))
        self._call = len(self.calls) - 1

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        call = self.calls[self._call]
        self.calls[self._call] = call._replace(returned_nbytes=sum(map(op_cost.touched_nbytes, tensors_in(output))))
        self._call = call.caller

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = self._known.answer(func, args, kwargs)
        if output is UNKNOWN:
            output = self._run(func, args, kwargs)
            self._known.follow(func, args, kwargs, output)
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        for tensor in tensors:
            if (storage := _memory_of(tensor)) in self._weights:
                self.reads[_StorageRead(self._call, storage)] = None
        if time.perf_counter() > self._until_s:
            raise UnsupportedError("following it takes too long")
        real = [tensor for tensor in tensors if not tensor.is_meta]
        writes = func._schema.is_mutable and func.overloadpacket is not torch.ops.aten.detach_
        is_foreign = writes and any(_memory_of(tensor) not in self._own_storages for tensor in real)
        if is_foreign or kwargs.get("generator") is not None:
            raise UnsupportedError(f"{func} writes to a tensor that is not a copy")
        if len(real) == len(tensors) and _device_of(kwargs) != "meta":
            if process_states.draws(func) and not process_states.takes_generator(func) and _is_composite(func):
                with self:  # a random operator without a generator argument: the operators that it consists of take one
                    return func.decompose(*args, **kwargs)
            # the model may keep the result, and later use it in calls with gradients, which refuse inference tensors
            with torch.inference_mode(False):
                output = self._draws.run(func, args, kwargs)
            for tensor in tensors_in(output):
                self._own_storages[_memory_of(tensor)] = tensor.untyped_storage()
            return output
        # the most frequent composite operators as a kernel or a view: decomposing them would take longer
        func, args, kwargs = op_cost.simpler(func, args, kwargs)
        if _is_composite(func) and not op_cost.is_kernel(func, args, kwargs):
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        key = func, _signed(args), _signed(tuple(kwargs.items()))
        seen = self.launches.get(key)
        # `repeat` makes results of the same shapes, or returns the first argument of an operator that works in place
        if seen is not None and (seen.is_repeatable or seen.is_in_place):
            output = seen.repeat(args)
        else:
            output = op_cost.run_on_meta(func, args, kwargs)
            seen = self.launches[key] = Launch(func, args, kwargs, output)
        for tensor in tensors_in(output):
            self.memory.hold(tensor)
        if seen.op is not None:
            self.ops.append(KernelLaunch(self._call, len(self.calls), seen.op))
            self.memory.touch(seen.workspace_nbytes)
            seen.alive_nbytes = max(seen.alive_nbytes, self.memory.live_nbytes)
        return output


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _device_of(kwargs: dict[str, Any]) -> str:
    device = kwargs.get("device")
    return "" if device is None else torch.device(device).type


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(_COMPOSITE))


class _Memory:
    """The bytes of live storages except weights, in blocks as PyTorch's CUDA allocator takes them."""

    def __init__(self, weights: Iterable[torch.Tensor], storages: meta_copy.Storages) -> None:
        self._storages = storages  # of all forwards
        self._held: dict[int, weakref.ref[Any]] = {}
        self.live_nbytes = self.peak_nbytes = 0
        for weight in weights:
            self.hold(weight, counts=False)

    def hold(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        storage, key = tensor.untyped_storage(), _memory_of(tensor)
        nbytes = aligned(storage.nbytes()) * counts
        if not tensor.is_meta or key in self._held:
            return

        def drop(_: Any) -> None:
            self.live_nbytes -= nbytes
            del self._held[key]

        self._storages.note(tensor)
        self._held[key] = weakref.ref(storage, drop)
        self.live_nbytes += nbytes
        self.touch()

    def touch(self, nbytes: int = 0) -> None:
        """Count `nbytes` more at this moment, such as the workspace of a kernel, for the peak only."""
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes + aligned(nbytes))


def _signed(value: Any) -> Any:
    """The properties of an argument that an operator may depend on, as a key."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_signed, value))
    return type(value), value
