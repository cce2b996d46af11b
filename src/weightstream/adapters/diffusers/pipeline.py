"""Pipelines of diffusers: their components, and the calls that they refuse while they stream. Knows no plan."""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weightstream.adapters.modules import device_map
from weightstream.errors import OffloadError
from weightstream.runtime.tensors.leaves import leaves

logger = logging.getLogger("weightstream")

_ENTRY = re.compile(r"(en|de)code(_\w+)?|get_\w+_features")  # methods that compute, besides `forward`
_RESIZES = ("load_textual_inversion", "unload_textual_inversion")  # they resize the embeddings of text encoders
_OFFLOADERS = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")


def is_pipeline(value: object) -> bool:
    """Whether it has components like a pipeline of diffusers, and is not a module itself."""
    return not isinstance(value, nn.Module) and isinstance(getattr(value, "components", None), Mapping)


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """The components with weights, each once, in the order in which they are expected to run."""
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    known = (getattr(pipe, "model_cpu_offload_seq", None) or "").split("->")
    order = [name for name in known if name in modules] + [name for name in modules if name not in known]
    unique: dict[int, str] = {}
    for name in order:
        if any(True for module in modules[name].modules() for _ in leaves(module)):
            unique.setdefault(id(modules[name]), name)
    return {name: modules[name] for name in unique.values()}


@contextmanager
def unlogged() -> Iterator[None]:
    """Inside, modular pipelines log no tracebacks on this thread: the caller handles their errors."""
    thread, log = threading.get_ident(), logging.getLogger("diffusers.modular_pipelines.modular_pipeline")

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def plain_of(module: nn.Module) -> nn.Module:
    """The original of a module that `torch.compile` made; any other module itself."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def inputs_of(pipe: Any) -> set[str]:
    """The keywords in the signature of a call; for a modular pipeline, also those of its blocks."""
    takes = inspect.signature(type(pipe).__call__).parameters
    return {*takes, *(part.name for part in getattr(getattr(pipe, "blocks", None), "inputs", ()))}


def entries_of(module: nn.Module) -> tuple[str, ...]:
    """The methods of its class that compute with its weights, besides `forward`, judged by their names."""
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    names = {name for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)}
    return tuple(sorted(name for name in names if _ENTRY.fullmatch(name)))


def attach_pipeline(pipe: Any, owner: Any, device: torch.device) -> Callable[[], None]:
    """Make `owner` the pipeline's `weightstream`, and refuse calls that move it; returns a function that undoes it."""
    kind = type(pipe)

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = modules_of(self).values()
        options = {key: value for key, value in kwargs.items() if key != "silence_dtype_warnings"}
        if all(device_map.is_there(part, device, args, options) for part in parts):
            others = [part for part in parts if not hasattr(part, "weightstream")]
            for part in others:  # they were added after the offload
                part.to(*args, **options)
            if not others:
                logger.debug("%s computes on %s already: to() changes nothing", kind.__name__, device)
            return self
        raise OffloadError(
            f"{kind.__name__} is offloaded by weightstream to {device}: to move or cast it, call "
            "pipe.weightstream.remove() first, or pass device= to offload_pipeline()"
        )

    def refusing(name: str) -> Callable[..., None]:
        def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
            raise OffloadError(
                f"{name}() does not combine with weightstream: call pipe.weightstream.remove() first; or use less "
                "device memory by a smaller device_budget= of offload_pipeline()"
            )

        return refuse

    def nothing_to_remove(self: Any) -> None:
        logger.debug("weightstream has no hooks of accelerate and no device map: nothing to remove")

    # Fusing an adapter computes with its tensors, which are on the device, and with weights, which are in host memory
    # between steps. So the owner brings the tensors of the adapter to where the weights are meanwhile.
    def adopting(method: Callable[..., Any]) -> Callable[..., Any]:
        def adopt(self: Any, *args: Any, **kwargs: Any) -> Any:
            return owner.changing(lambda: method(self, *args, **kwargs))

        return adopt

    # Resized embeddings are new weights, which are not in the plan. So the owner offloads the text encoders anew.
    def resizing(method: Callable[..., Any]) -> Callable[..., Any]:
        def resize(self: Any, *args: Any, **kwargs: Any) -> Any:
            return owner.resizing(lambda: method(self, *args, **kwargs))

        return resize

    members: dict[str, Any] = {
        "to": to,
        "remove_all_hooks": nothing_to_remove,
        "reset_device_map": nothing_to_remove,
        **{name: refusing(name) for name in _OFFLOADERS if hasattr(kind, name)},
        **{name: adopting(getattr(kind, name)) for name in ("fuse_lora", "unfuse_lora") if hasattr(kind, name)},
        **{name: resizing(getattr(kind, name)) for name in _RESIZES if hasattr(kind, name)},
    }
    undo = device_map.subclass_instance(pipe, members)
    pipe.__dict__["weightstream"] = owner

    def detach() -> None:
        undo()
        if pipe.__dict__.get("weightstream") is owner:
            del pipe.__dict__["weightstream"]

    return detach
