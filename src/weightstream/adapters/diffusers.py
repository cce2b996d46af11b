"""Pipelines of diffusers: their components, a rehearsal of a call, and what they refuse. Knows no plan and no device.

A rehearsal is a call of the pipeline's own code, on the CPU, with stand-ins for its components: each call of one is
followed on shapes, and answered with zeros of the shapes that it would give. So tokenizers, schedulers and guidance run
as they do, and tell which component runs when, how often, and on what shapes, for any pipeline and any arguments.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightstream.adapters import device_map, meta
from weightstream.adapters.shapes import Footprint, follow
from weightstream.errors import ConfigError, OffloadError, UnsupportedError
from weightstream.runtime.leaves import leaves
from weightstream.runtime.timeline import Kind, kind_of
from weightstream.runtime.values import tensors_in

logger = logging.getLogger("weightstream")

_ENTRY = re.compile(r"(en|de)code(_\w+)?|get_\w+_features")  # methods beside `forward` that compute
_LIMIT_S = 60.0  # of a rehearsal
_CALL_S = 20.0  # of following one call
_PROMPT = "a photo"
_CPU = torch.device("cpu")
_OFFLOADERS = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a component: its kind, and what its work is."""

    component: str
    kind: Kind
    work: Footprint


def is_pipeline(value: object) -> bool:
    """Whether it has components as a pipeline of diffusers has them, and is no module itself."""
    return not isinstance(value, nn.Module) and isinstance(getattr(value, "components", None), Mapping)


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """The components that have weights, each once, in the order in which they are expected to run."""
    found = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    known = (getattr(pipe, "model_cpu_offload_seq", None) or "").split("->")
    order = [name for name in known if name in found] + [name for name in found if name not in known]
    unique: dict[int, str] = {}
    for name in order:
        if any(True for module in found[name].modules() for _ in leaves(module)):
            unique.setdefault(id(found[name]), name)
    return {name: found[name] for name in unique.values()}


def entries_of(module: nn.Module) -> tuple[str, ...]:
    """The methods of its class beside `forward` that compute with its weights, as far as their names tell."""
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    names = {name for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)}
    return tuple(sorted(name for name in names if _ENTRY.fullmatch(name)))


# -- a rehearsal -------------------------------------------------------------------------------------------------------


def rehearse(pipe: Any, arguments: Mapping[str, Any]) -> tuple[list[Call], str]:
    """The calls of components in one call of the pipeline; and why they end early, if they do.

    Neither the pipeline nor its components change, and no weight is read: they may be on meta.
    """
    given = _arguments(pipe, arguments)
    rehearsal = _Rehearsal()
    twin = rehearsal.twin(pipe)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")  # of zeros divided by zeros
        try:
            twin(**given)
        except Exception as error:
            return rehearsal.calls, f"{type(error).__name__}: {error}".partition("\n")[0]
    return rehearsal.calls, ""


def _arguments(pipe: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the call, with what it cannot do without."""
    takes = inspect.signature(type(pipe).__call__).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in takes.values()) and (unknown := sorted(given.keys() - takes.keys())):
        raise ConfigError(f"{type(pipe).__name__} takes no {', '.join(unknown)}: it takes {', '.join(takes)}")
    defaults = {"output_type": "pt"} if "output_type" in takes else {}
    if "prompt" in takes and not any("prompt" in name for name in given):
        defaults["prompt"] = _PROMPT
    return defaults | dict(given)


class _Rehearsal:
    """The calls so far, and what was answered to each kind of them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._known: dict[Any, tuple[Footprint, Any]] = {}
        self._until_s = time.perf_counter() + _LIMIT_S

    def twin(self, pipe: Any) -> Any:
        """The same pipeline with stand-ins for its components, on the CPU."""
        on_cpu = property(lambda self: _CPU)
        kind = type(pipe)
        members = {"device": on_cpu, "_execution_device": on_cpu, "__module__": kind.__module__}
        twin: Any = object.__new__(type(kind.__name__, (kind,), members))
        names = {id(module): name for name, module in modules_of(pipe).items()}
        twins = {key: self._stand_in(name, getattr(pipe, name)) for key, name in names.items()}
        twin.__dict__.update({name: twins.get(id(value), value) for name, value in vars(pipe).items()})
        twin.__dict__["_progress_bar_config"] = {"disable": True}
        if (scheduler := vars(pipe).get("scheduler")) is not None:
            twin.__dict__["scheduler"] = copy.deepcopy(scheduler)
        return twin

    def _stand_in(self, name: str, module: nn.Module) -> Any:
        """A shallow copy of a component whose calls are answered here."""

        def answering(entry: str) -> Callable[..., Any]:
            def answer(_: Any, *args: Any, **kwargs: Any) -> Any:
                return self._answer(name, module, entry, args, kwargs)

            answer.__signature__ = inspect.signature(getattr(type(module), entry))  # type: ignore[attr-defined]
            return answer

        kind = type(module)
        entries = ("forward", *entries_of(module))
        members: dict[str, Any] = {entry: answering(entry) for entry in entries}
        members |= {"device": property(lambda self: _CPU), "__module__": kind.__module__}
        twin: Any = object.__new__(type(kind.__name__, (kind,), members))
        hooks: dict[str, Any] = {key: OrderedDict() for key in meta.hooks_of(module)}
        own = {key: value for key, value in vars(module).items() if key not in entries and "weightstream" not in key}
        twin.__dict__.update(own | hooks)
        return twin

    def _answer(self, name: str, module: nn.Module, entry: str, args: Any, kwargs: Any) -> Any:
        if time.perf_counter() > self._until_s:
            raise UnsupportedError(f"the rehearsal takes more than {_LIMIT_S:.0f} s")
        key = name, entry, tuple(_signed((args, kwargs)))
        if key not in self._known:
            try:
                self._known[key] = _followed(module, entry, args, kwargs)
            except UnsupportedError:
                unmasked = _unmasked(module, entry, args, kwargs)
                if unmasked is None:
                    raise
                self._known[key] = _followed(module, entry, (), unmasked)
        work, output = self._known[key]
        self.calls.append(Call(component=name, kind=kind_of(args, kwargs, entry), work=work))
        return copy.deepcopy(output)


def _followed(module: nn.Module, entry: str, args: Any, kwargs: Any) -> tuple[Footprint, Any]:
    """The work of a call, and what answers it."""
    outputs: list[Any] = []

    def answer(output: Any) -> None:
        outputs.append(meta.zeros_for(output))

    work = follow(module, args, kwargs, entry=entry, limit_s=_CALL_S, on_output=answer)
    return work, outputs[0]


def _unmasked(module: nn.Module, entry: str, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments without masks: transformers asks whether these hide anything. None where there are none."""
    try:
        given = inspect.signature(getattr(type(module), entry)).bind(module, *args, **kwargs).arguments
    except TypeError:
        return None
    masks = [name for name, value in given.items() if "mask" in name and isinstance(value, torch.Tensor)]
    given = {name: value for name, value in list(given.items())[1:] if name not in masks}
    return given | given.pop("kwargs", {}) if masks else None


def _signed(values: Any) -> Iterable[Any]:
    """What tells calls apart: shapes, and plain values."""
    for tensor in tensors_in(values):
        yield tuple(tensor.shape), tensor.dtype
    args, kwargs = values
    plain = (bool, int, str, type(None))
    yield from (value for value in args if isinstance(value, plain))
    yield from ((key, value) for key, value in sorted(kwargs.items()) if isinstance(value, plain))


# -- manners -----------------------------------------------------------------------------------------------------------


def attach(pipe: Any, owner: Any, device: torch.device, matching: Mapping[str, str]) -> Callable[[], None]:
    """Make `owner` the pipeline's `weightstream`, and have it say what it refuses; returns what undoes it.

    `matching`: for each way to offload of diffusers, by the name of its method, the budget that takes as much.
    """
    kind = type(pipe)

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = modules_of(self).values()
        given = {key: value for key, value in kwargs.items() if key != "silence_dtype_warnings"}
        if all(device_map.is_there(part, device, args, given) for part in parts):
            logger.debug("%s computes on %s already: to() changes nothing", kind.__name__, device)
            return self
        raise OffloadError(
            f"{kind.__name__} is offloaded by weightstream to {device}: call pipe.weightstream.remove() before it is "
            "moved or cast, or give device= to offload_pipeline()"
        )

    def refusing(name: str) -> Callable[..., None]:
        def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
            raise OffloadError(
                f"{name}() beside weightstream: call pipe.weightstream.remove() first, or stay and offload with "
                f"device_budget={matching[name]!r}, which takes as much of the device"
            )

        return refuse

    def left(self: Any) -> None:
        logger.debug("weightstream has no hooks of accelerate and no device map: nothing to remove")

    def adopting(method: Callable[..., Any]) -> Callable[..., Any]:
        def adopt(self: Any, *args: Any, **kwargs: Any) -> Any:
            return owner.changing(lambda: method(self, *args, **kwargs))

        return adopt

    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__init__": kind.__init__,
        "to": to,
        "remove_all_hooks": left,
        "reset_device_map": left,
        **{name: refusing(name) for name in _OFFLOADERS if hasattr(kind, name)},
        **{name: adopting(getattr(kind, name)) for name in ("fuse_lora", "unfuse_lora") if hasattr(kind, name)},
    }
    placed = type(kind.__name__, (kind,), members)
    pipe.__class__ = placed
    pipe.__dict__["weightstream"] = owner

    def detach() -> None:
        if type(pipe) is placed:
            pipe.__class__ = kind
        if pipe.__dict__.get("weightstream") is owner:
            del pipe.__dict__["weightstream"]

    return detach


def runs(calls: Sequence[Call]) -> list[tuple[Call, int]]:
    """Calls of one kind in a row, and how many."""
    found: list[tuple[Call, int]] = []
    for call in calls:
        last = found[-1] if found else None
        if last is not None and last[0].work is call.work:
            found[-1] = call, last[1] + 1
        else:
            found.append((call, 1))
    return found
