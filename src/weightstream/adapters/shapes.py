"""Footprint: what a forward computes and allocates, told from shapes alone. It runs no kernel and reads no weight.

The forward runs once on meta tensors. A dispatch mode sees every operator, hooks say whose it is, and weak references
tell when the memory of a result is free again. In inference mode composite operators arrive whole: a linear layer and
fused attention are one kernel each, as on a GPU, and the others are taken apart here. An operator that was seen with
the same shapes before is not run again: the layers of a model are alike, and meta kernels are slow Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import nn

from weightstream.adapters import hf_private, launch
from weightstream.adapters.launch import Launch
from weightstream.adapters.steps import CACHES, layers_of, options_of, takes_ids
from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Op, Workload
from weightstream.plan.schedule import aligned
from weightstream.runtime.values import tensors_in
from weightstream.runtime.watch import OperatorMode
from weightstream.runtime.weights import UnitModule

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """What one step of a model takes beside its weights.

    `cache_nbytes` is the cache of all positions; `activation_nbytes` the most that is alive beside weights and cache,
    in this step or in a prompt as long as the context. `calls` are the modules that ran, each with the call that it
    ran in (-1: none), and `ops` the kernels, each with the call that launched it and the number of calls until then.
    """

    activation_nbytes: int
    cache_nbytes: int
    calls: tuple[tuple[nn.Module, int], ...]
    ops: tuple[tuple[int, int, Op], ...]

    def work(self, units: Sequence[UnitModule]) -> tuple[tuple[Op, ...], ...]:
        """The ops of each unit in one call of it: where it is called several times, the mean of these, op by op.

        An op counts for the innermost unit around it; outside of all, for the one before (`after`), or the first.
        """
        by_unit: list[list[list[Op]]] = [[] for _ in units]
        for unit, ops in self._positions(units):
            by_unit[unit].append(ops)
        return tuple(map(_mean, by_unit))

    def _positions(self, units: Sequence[UnitModule]) -> list[tuple[int, list[Op]]]:
        index = {id(module): i for i, unit in enumerate(units) for module in (unit.module, *unit.also)}
        positions: list[tuple[int, list[Op]]] = []
        around: list[int] = []  # call -> the position of the innermost unit around it
        for module, caller in self.calls:
            around.append(around[caller] if caller >= 0 else -1)
            if id(module) in index:
                around[-1] = len(positions)
                positions.append((index[id(module)], []))
        opened = list(accumulate((id(module) in index for module, _ in self.calls), initial=0))
        for call, num_calls, op in self.ops if positions else ():
            position = around[call] if call >= 0 else -1
            if position < 0:
                position, op = max(0, opened[num_calls] - 1), replace(op, after=opened[num_calls] > 0)
            positions[position][1].append(op)
        return positions


def observe(model: nn.Module, workload: Workload) -> Footprint:
    """Follow a step of a language model on shapes alone; its weights may be on meta, and are neither read nor copied.

    Args:
        model: a causal language model of transformers.
        workload: the step; a model without a cache is given the whole context in each.

    Raises:
        UnsupportedError: what the model computes depends on values, or it takes other inputs than token ids.
    """

    def forward(num_tokens: int, **more: Any) -> _Forward:
        ids = torch.empty(workload.batch, num_tokens, dtype=torch.long, device="meta")
        return _Forward(model, (), {"input_ids": ids, **more})

    with _on_meta(model), torch.inference_mode():
        takes = takes_ids(model)
        config: Any = model.config
        config.pad_token_id = None  # some models look for it in the ids
        options = options_of(takes)
        prompt = forward(max(workload.context, workload.tokens), **options)
        caches = {name: cache for name in CACHES if name in takes and (cache := getattr(prompt.output, name, None))}
        past = workload.context - workload.tokens
        if not caches or past <= 0:
            return _footprint([prompt], *caches.values())
        prompt.output = None
        for cache in caches.values():
            _shorten(cache, past)
        return _footprint([prompt, forward(workload.tokens, **options, **caches)], *caches.values())


def _footprint(forwards: Sequence[_Forward], cache: Any = None) -> Footprint:
    """What the last of these forwards did, and the most memory that one of them took."""
    cache_nbytes = sum(aligned(launch.nbytes_of(tensor)) for tensor in _cached(cache))
    return Footprint(
        activation_nbytes=max(0, max(forward.memory.peak_nbytes for forward in forwards) - cache_nbytes),
        cache_nbytes=cache_nbytes,
        calls=tuple(forwards[-1].calls),
        ops=tuple(forwards[-1].ops),
    )


def _cached(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in layers_of(cache) for tensor in tensors_in(layer) if tensor.is_meta and tensor.dim() > 1]


def _shorten(cache: Any, num_positions: int) -> None:
    """Makes a cache of shapes one that holds fewer positions; a state that does not grow with them stays."""
    for layer in layers_of(cache):
        for name in hf_private.BY_POSITION:
            if isinstance(tensor := layer.get(name), torch.Tensor):
                kept = min(num_positions, tensor.shape[-2])
                layer[name] = torch.empty_like(tensor[..., :kept, :], memory_format=torch.contiguous_format)
        if hf_private.WINDOW_COUNT in layer:
            layer[hf_private.WINDOW_COUNT] = num_positions


class _Forward(OperatorMode):
    """One forward on meta tensors: who called whom, what was launched, and how much memory was alive."""

    def __init__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[nn.Module, int]] = []
        self.ops: list[tuple[int, int, Op]] = []
        self.memory = _Memory((*model.parameters(), *model.buffers()))
        self._call = -1
        self._launches: dict[Any, Launch] = {}
        for tensor in (*tensors_in((args, kwargs)), *_cached(kwargs.get("past_key_values"))):
            self.memory.hold(tensor)
        with ExitStack() as hooks, self:
            for module in model.modules():
                hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                hooks.callback(module.register_forward_hook(self._leave).remove)
            self.output = model(*args, **kwargs)

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.calls.append((module, self._call))
        self._call = len(self.calls) - 1

    def _leave(self, *_: Any) -> None:
        self._call = self.calls[self._call][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func) and not launch.is_kernel(func, args, kwargs):
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        key = func, _signed(args), _signed(tuple(kwargs.items()))
        seen = self._launches.get(key)
        if seen is not None and seen.is_repeatable:
            output = seen.repeat()
        else:
            output = launch.run(func, args, kwargs)
            seen = self._launches[key] = Launch(func, args, kwargs, output)
        for tensor in tensors_in(output):
            self.memory.hold(tensor)
        if seen.op is not None:
            self.ops.append((self._call, len(self.calls), seen.op))
            self.memory.touch(seen.workspace_nbytes)
        return output


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(_COMPOSITE))


class _Memory:
    """The bytes of storages that are alive, weights apart, in blocks as PyTorch's allocator on CUDA takes them."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._held: dict[int, weakref.ref[Any]] = {}
        self._live_nbytes = self.peak_nbytes = 0

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, aligned(storage.nbytes())
        if not tensor.is_meta or key in self._held or key in self._weights:
            return

        def drop(_: Any) -> None:
            self._live_nbytes -= nbytes
            del self._held[key]

        self._held[key] = weakref.ref(storage, drop)
        self._live_nbytes += nbytes
        self.touch()

    def touch(self, nbytes: int = 0) -> None:
        """That many bytes more are there for a moment."""
        self.peak_nbytes = max(self.peak_nbytes, self._live_nbytes + aligned(nbytes))


def _signed(value: Any) -> Any:
    """What an operator may look at in an argument, to be compared."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_signed, value))
    return type(value), value


def _mean(calls: Sequence[Sequence[Op]]) -> tuple[Op, ...]:
    if len(calls) < 2:
        return tuple(calls[0]) if calls else ()
    return tuple(
        Op(
            rate=max(ops, key=lambda op: op.flops).rate,
            flops=sum(op.flops for op in ops) / len(calls),
            nbytes=sum(op.nbytes for op in ops) // len(calls),
            after=any(op.after for op in ops),
        )
        for ops in zip_longest(*calls, fillvalue=Op())
    )


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Shapes in place of weights; in the end modules and config have what they had, whatever the forward left there.

    What a forward makes of tensors without values becomes an `UnsupportedError`.
    """
    made: dict[int, torch.Tensor] = {}  # ties stay ties
    tables: list[dict[str, Any]] = [
        table for m in model.modules() for table in (vars(m), m._parameters, m._buffers, m._modules)
    ]
    if (config := getattr(getattr(model, "config", None), "__dict__", None)) is not None:
        tables.append(config)
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor):
                    table[name] = made.setdefault(id(tensor), _meta(tensor))
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UnsupportedError(
            f"{type(model).__name__}: its work cannot be told from shapes before it runs: {message}"
        ) from error
    finally:
        for table, entries in zip(tables, before, strict=True):
            for name in table.keys() - entries.keys():
                del table[name]
            table.update(entries)
