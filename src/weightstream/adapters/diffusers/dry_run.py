"""Dry run of a pipeline: finds the components that a call runs, how often, and on which shapes. Knows no plan.

The pipeline's own code runs on the CPU, with stand-ins for its components: each call of a stand-in is followed on meta
tensors, and answered with zeros in the shapes of its output. Tokenizers, schedulers and guidance run as they do in a
real call. This finds the order, number and shapes of calls for any pipeline and any arguments.
"""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from weightstream.adapters.diffusers.pipeline import entries_of, inputs_of, is_pipeline, modules_of, plain_of, unlogged
from weightstream.adapters.modules import device_map
from weightstream.adapters.tracing import meta_copy, process_states
from weightstream.adapters.tracing.footprint import Footprint, follow
from weightstream.adapters.tracing.known_values import is_small
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.runtime.ring.timeline import Kind, kind_of
from weightstream.runtime.streamer.forward_patch import plain_attributes
from weightstream.runtime.tensors.pytree import tensors_in

_LIMIT_S = 60.0  # of a dry run
_CALL_S = 20.0  # of following one call
_MOST_TRACED = 4  # calls with the same shapes and different values
_PROMPT = "a photo"
_CPU = torch.device("cpu")
_ON_CPU = property(lambda self: _CPU)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentCall:
    """A call of a component: its kind, and its work.

    `cast`: the component on meta in another dtype, if the pipeline cast it to that before this call.
    """

    component: str
    kind: Kind
    work: Footprint
    cast: nn.Module | None = None


class Rehearsed(NamedTuple):
    """The calls of components in one call of a pipeline. `reason`: why the dry run ended early; else it is empty."""

    calls: list[ComponentCall]
    reason: str


class CallRun(NamedTuple):
    """Successive calls of one kind: the last one, and their number."""

    call: ComponentCall
    num: int


def rehearse(pipe: Any, arguments: Mapping[str, Any]) -> Rehearsed:
    """Find the calls of components in one call of the pipeline.

    The pipeline, its components and the arguments do not change. No weight is read: they may be on meta.
    """
    keywords = _arguments(pipe, arguments)
    dry_run = _DryRun()
    twin = dry_run.twin(pipe)
    with warnings.catch_warnings(), process_states.kept(_CPU), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")  # from computing with zeros, such as 0 / 0
        try:
            with process_states.OwnDraws(), unlogged():
                twin(**keywords)
        except Exception as error:
            return Rehearsed(dry_run.calls, f"{type(error).__name__}: {error}".partition("\n")[0])
    return Rehearsed(dry_run.calls, "" if dry_run.calls else "it calls none of its components")


def _arguments(pipe: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the dry run: with a prompt if one is needed, without callbacks, which have effects outside."""
    takes = inspect.signature(type(pipe).__call__).parameters
    has_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if not has_any and (unknown := sorted(arguments.keys() - takes.keys())):
        raise ConfigError(f"{type(pipe).__name__} takes no {', '.join(unknown)}: it takes {', '.join(takes)}")
    inputs = inputs_of(pipe)
    keywords = {"output_type": "pt"} if "output_type" in inputs else {}
    if "prompt" in inputs and not any("prompt" in name for name in arguments):
        keywords["prompt"] = _PROMPT
    return keywords | {name: _private(value) for name, value in arguments.items() if not name.startswith("callback")}


def _private(value: Any) -> Any:
    """An argument on the CPU whose use has no effect on the caller's, such as another generator."""
    if isinstance(value, torch.Generator):
        return torch.Generator()
    if type(value) in (list, tuple):
        return type(value)(map(_private, value))
    return value.to(_CPU) if isinstance(value, torch.Tensor) else value


class _Answer(NamedTuple):
    """The work of a call, and the output that answers it."""

    work: Footprint
    output: Any


@dataclass(slots=True)
class _Alike:
    """Calls of the same shapes: their answers, by the values of masks and ids if these matter (`by_values`)."""

    known: dict[Any, _Answer]
    by_values: bool = False


class _DryRun:
    """The calls so far, and the answers to each kind of call."""

    def __init__(self) -> None:
        self.calls: list[ComponentCall] = []
        self._like: dict[Any, _Alike] = {}
        self._until_s = time.perf_counter() + _LIMIT_S

    def twin(self, pipe: Any) -> Any:
        """The same pipeline with stand-ins for its components, on the CPU."""
        modules = modules_of(pipe).items()
        return self._twin(pipe, {id(module): self._stand_in(name, plain_of(module)) for name, module in modules})

    def _twin(self, pipe: Any, twins: dict[int, Any]) -> Any:
        """`twins`: stand-ins for components, and twins of nested pipelines, by the id of the original."""
        kind = device_map.plain(type(pipe))
        members = {"device": _ON_CPU, "_execution_device": _ON_CPU, "__module__": kind.__module__}
        twin: Any = object.__new__(type(kind.__name__, (kind,), members))
        twins[id(pipe)] = twin
        for value in vars(pipe).values():
            if id(value) not in twins and is_pipeline(value):
                self._twin(value, twins)
        twin.__dict__.update({name: twins.get(id(value), value) for name, value in vars(pipe).items()})
        twin.__dict__["_progress_bar_config"] = {"disable": True}
        if (scheduler := vars(pipe).get("scheduler")) is not None:
            twin.__dict__["scheduler"] = copy.deepcopy(scheduler)
        return twin

    def _stand_in(self, name: str, module: nn.Module) -> Any:
        """A shallow copy of a component whose calls are answered here. A cast of it casts a copy on meta."""
        casts = _Casts(module)

        def answering(entry: str) -> Callable[..., Any]:
            def answer(_: Any, *args: Any, **kwargs: Any) -> Any:
                return self._answer(name, casts, entry, args, kwargs)

            answer.__signature__ = inspect.signature(getattr(type(module), entry))  # type: ignore[attr-defined]
            return answer

        def apply(self: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            self.__dict__.update(casts.cast(change))
            return self

        kind = device_map.plain(type(module))
        entries = ("forward", *entries_of(module))
        members: dict[str, Any] = {entry: answering(entry) for entry in entries}
        members |= {"device": _ON_CPU, "_apply": apply, "__module__": kind.__module__}
        twin: Any = object.__new__(type(kind.__name__, (kind,), members))
        hooks: dict[str, Any] = {key: OrderedDict() for key in meta_copy.hooks_of(module)}
        hidden = {*entries, "_apply"}
        plain = plain_attributes(vars(module))
        own = {key: value for key, value in plain.items() if key not in hidden and "weightstream" not in key}
        twin.__dict__.update(own | hooks | casts.held())
        return twin

    def _answer(self, name: str, casts: _Casts, entry: str, args: Any, kwargs: Any) -> Any:
        if time.perf_counter() > self._until_s:
            raise UnsupportedError(f"the dry run takes more than {_LIMIT_S:.0f} s")
        module = casts.now
        known = self._known_of(module, entry, args, kwargs)
        cast = None if module is casts.module else module
        self.calls.append(ComponentCall(component=name, kind=kind_of(args, kwargs, entry), work=known.work, cast=cast))
        return copy.deepcopy(known.output)

    def _known_of(self, module: nn.Module, entry: str, args: Any, kwargs: Any) -> _Answer:
        """The answer to a call; calls of the same shapes share one, unless their control flow depends on values.

        Beyond `_MOST_TRACED` different values the latest answer serves for all others.
        """
        like = self._like.setdefault((id(module), entry, tuple(_signature((args, kwargs)))), _Alike({}))
        key = tuple(_values((args, kwargs))) if like.by_values else ()
        if key not in like.known and len(like.known) < _MOST_TRACED:
            were_values_used: list[bool] = []
            with process_states.no_modes():
                answer = _followed(module, entry, args, kwargs, were_values_used.append)
            like.by_values |= any(were_values_used)  # only following a call shows it, so the key may change here
            key = tuple(_values((args, kwargs))) if like.by_values else ()
            like.known[key] = answer
        return like.known.get(key) or next(reversed(like.known.values()))


class _Casts:
    """A component that a pipeline casts: `now` is the component itself, or a copy on meta in another dtype."""

    def __init__(self, module: nn.Module) -> None:
        self.module = self.now = module
        self._made: dict[torch.dtype, nn.Module] = {}

    def held(self) -> dict[str, Any]:
        """The attributes of a stand-in that come from `now`."""
        return {name: dict(vars(self.now)[name]) for name in ("_modules", "_parameters", "_buffers")}

    def cast(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Cast, and return the attributes of a stand-in; `change` is the function that `nn.Module._apply` takes."""
        floats = {tensor.dtype for tensor in self.now.parameters() if tensor.is_floating_point()}
        wanted = {change(torch.empty(0, dtype=dtype, device=_CPU)).dtype for dtype in floats}
        if len(wanted) != 1 or wanted == floats:
            return self.held()
        (dtype,) = wanted
        if all(tensor.dtype == dtype for tensor in self.module.parameters() if tensor.is_floating_point()):
            self.now = self.module
        else:
            if dtype not in self._made:
                self._made[dtype] = nn.Module.to(meta_copy.copied(self.module).model, dtype)
            self.now = self._made[dtype]
        return self.held()


def _followed(module: nn.Module, entry: str, args: Any, kwargs: Any, on_values: Callable[[bool], None]) -> _Answer:
    outputs: list[Any] = []

    def answer(output: Any) -> None:
        outputs.append(meta_copy.zeros_for(output))

    work = follow(module, args, kwargs, entry=entry, limit_s=_CALL_S, on_output=answer, on_values=on_values)
    return _Answer(work, outputs[0])


def _values(values: Any) -> Iterable[Any]:
    """The values that calls of the same shapes may differ in: ids and masks."""
    for tensor in tensors_in(values):
        if is_small(tensor) and not tensor.is_meta:
            yield tuple(tensor.flatten().tolist())


def _signature(values: Any) -> Iterable[Any]:
    """The key of a call: shapes, and plain values."""
    for tensor in tensors_in(values):
        yield tuple(tensor.shape), tensor.dtype
    args, kwargs = values
    plain = (bool, int, str, type(None))
    yield from (value for value in args if isinstance(value, plain))
    yield from ((key, value) for key, value in sorted(kwargs.items()) if isinstance(value, plain))


def runs(calls: Sequence[ComponentCall]) -> list[CallRun]:
    """The calls as runs of one kind each."""
    found_runs: list[CallRun] = []
    for call in calls:
        if found_runs and found_runs[-1].call.work is call.work:
            found_runs[-1] = CallRun(call, found_runs[-1].num + 1)
        else:
            found_runs.append(CallRun(call, 1))
    return found_runs
