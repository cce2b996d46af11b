"""Footprint: the work and the memory of a forward, found from shapes only. It runs no kernel and reads no weight.

A copy of the model on meta runs the forward once. A dispatch mode sees every operator, hooks find its module, and weak
references show when the memory of a result is free again. In inference mode composite operators arrive whole: a linear
layer and fused attention are one kernel each, as on a GPU, and the others are decomposed here. An operator that was
seen with the same shapes before is not run again: the layers of a model are alike, and meta kernels are slow Python.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from weightstream.adapters.hf import private
from weightstream.adapters.steps import croppable_cache, static_cache
from weightstream.adapters.steps.decode_steps import CACHES, cached, options_of, shorten, takes_ids
from weightstream.adapters.tracing import meta_copy, op_cost
from weightstream.adapters.tracing.forward import Forward, KernelLaunch, ModuleCall, run_on_copy
from weightstream.adapters.tracing.known_values import KnownValues
from weightstream.adapters.tracing.op_cost import CountedLaunch, Launch
from weightstream.adapters.tracing.op_timing import Trial
from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Op, Workload, mean
from weightstream.plan.schedule import aligned
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.weights.alias_groups import UnitModule

_CPU = torch.device("cpu")


class WeightRead(NamedTuple):
    """A weight, and the index of the call that read it (-1: none)."""

    call: int
    tensor: torch.Tensor


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

    def work(
        self, units: Sequence[UnitModule], elsewhere: Mapping[nn.Module | None, bool] = MappingProxyType({})
    ) -> tuple[tuple[Op, ...], ...]:
        """The ops of each unit in one call of it; for several calls their mean, op by op.

        An op counts for the innermost unit around it. An op outside every unit counts for the previous one
        (`after=True`); before the first unit, for the last, as steps are cyclic. `elsewhere` says of modules whether
        another device runs them; the innermost one around an op counts, and None if there is none.
        """
        by_unit: list[list[list[Op]]] = [[] for _ in units]
        for call in self._unit_calls(units, elsewhere):
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

    def _unit_calls(
        self, units: Sequence[UnitModule], elsewhere: Mapping[nn.Module | None, bool] = MappingProxyType({})
    ) -> list[_UnitCall]:
        index = {id(module): i for i, unit in enumerate(units) for module in (unit.module, *unit.also)}
        unit_calls: list[_UnitCall] = []
        around: list[int] = []  # call -> the index of the innermost unit's call around it
        away: list[bool] = []  # call -> whether another device runs it
        is_outside_away = elsewhere.get(None, False)
        for call in self.calls:
            away.append(elsewhere.get(call.module, away[call.caller] if call.caller >= 0 else is_outside_away))
            around.append(around[call.caller] if call.caller >= 0 else -1)
            if id(call.module) in index:
                around[-1] = len(unit_calls)
                unit_calls.append(_UnitCall(index[id(call.module)], []))
        opened = list(accumulate((id(call.module) in index for call in self.calls), initial=0))
        early: list[Op] = []
        for launch in self.ops if unit_calls else ():
            position = around[launch.call] if launch.call >= 0 else -1
            if position >= 0:
                unit_calls[position].ops.append(launch.op)
                continue
            is_away = away[launch.call] if launch.call >= 0 else is_outside_away
            op = replace(launch.op, after=True, elsewhere=is_away)
            (unit_calls[opened[launch.num_calls] - 1].ops if opened[launch.num_calls] else early).append(op)
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

    def run_once(start: Callable[..., Forward], _: nn.Module, on_meta: Any, keywords_on_meta: Any) -> list[Forward]:
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
    workload: Workload, widths: Sequence[int], start: Callable[..., Forward], model: nn.Module
) -> list[list[Forward]]:
    """A forward for each width, after that of a prompt, whose footprint is none of theirs."""
    takes = takes_ids(model)
    config: Any = model.config
    config.pad_token_id = None
    options = options_of(takes)

    def forward(num_tokens: int, **more: Any) -> Forward:
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


def _steps(workload: Workload, start: Callable[..., Forward], model: nn.Module) -> list[Forward]:
    """The prompt's forward; with a cache, also the step after it, and that step as it would be captured."""

    def forward(num_tokens: int, **more: Any) -> Forward:
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
    steps: Callable[..., list[Forward]],
    values: tuple[Any, ...] = (),
    limit_s: float = math.inf,
    device: torch.device = _CPU,
) -> Footprint:
    """Copy a model to meta, run forwards of the copy, and return the footprint of the last one, with the largest memory
    of all.

    `steps(start, copy, *values)` runs the forwards: each call `start(args, kwargs)` is one, and returns its `Forward`.
    `values` are the arguments of the real call; `steps` gets copies of them on meta. Errors of the forwards and of the
    copying become `UnsupportedError`.
    """
    return _each_followed(model, lambda *args: [steps(*args)], values, limit_s, device)[0]


def _each_followed(
    model: nn.Module,
    steps: Callable[..., list[list[Forward]]],
    values: tuple[Any, ...] = (),
    limit_s: float = math.inf,
    device: torch.device = _CPU,
) -> list[Footprint]:
    """As `_followed`, for several lists of forwards of one copy of the model: the footprint of each list."""

    def run(made: meta_copy.Copied, until_s: float, storages: meta_copy.Storages) -> list[Footprint]:
        with torch.inference_mode():
            start = partial(Forward, made.model, made.weights, until_s, storages)
            return [footprint_of(forwards, made) for forwards in steps(start, made.model, *made.values)]

    return run_on_copy(model, run, values, limit_s, device)


def footprint_of(forwards: Sequence[Forward], made: meta_copy.Copied) -> Footprint:
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
        captured=footprint_of([last.captured], made) if last.captured is not None else None,
        launches=tuple(
            CountedLaunch(launch, nums[id(launch.op)]) for launch in last.launches.values() if id(launch.op) in nums
        ),
        reads=tuple(WeightRead(read.call, tensor) for read in last.reads for tensor in made.weights[read.storage]),
    )
