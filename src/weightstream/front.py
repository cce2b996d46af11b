"""The front door: `offload()` for any module, `from_pretrained()` for a checkpoint. Chooses parts; moves no bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightstream.adapters.module import find_units
from weightstream.config import OffloadConfig, name_matches, unmatched_patterns
from weightstream.errors import ConfigError, PlanError, UnsupportedError
from weightstream.plan.manifest import Manifest, Profile
from weightstream.plan.placement import place, place_host_bytes, place_layers
from weightstream.plan.plan import Plan
from weightstream.runtime import cpu, cuda, guards
from weightstream.runtime.backend import Backend
from weightstream.runtime.cpu import CpuBackend
from weightstream.runtime.homes import Homes
from weightstream.runtime.streamer import Streamer
from weightstream.runtime.weights import empty_tensors, groups, leave_inference, manifest
from weightstream.store.arena import Arena
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import FileMapping

logger = logging.getLogger("weightstream")

Planner = Callable[[Manifest], Plan]


def offload(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    device_budget: int | str | None = None,
    config: OffloadConfig | None = None,
    **settings: Any,
) -> Streamer:
    """Stream the weights of a model through a small part of the device's memory, in place and bit for bit.

    Args:
        model: any module whose weights are loaded. It stays the same object.
        device: where it computes; default: the current CUDA GPU, else the CPU.
        device_budget: bytes of device memory for weights, as an int or such as `"6GiB"`; activations come on top.
            Default: what is free, less headroom.
        config: every setting; keyword arguments (`device_budget`, `host_budget`, `offload_group_size`, …) go over it.

    Returns:
        The streamer, also at `model.weightstream`; `remove()`, or the end of a `with` block, undoes everything.

    Raises:
        PlanError: the budget cannot work; the message holds the arithmetic.
        ConfigError: a setting is unknown or wrong.
        OffloadError: the model is offloaded already, or holds a kind of tensor that cannot be streamed.

    Example:
        >>> import torch, weightstream
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> with weightstream.offload(model, device="cpu", device_budget="48KiB") as streamer:
        ...     y = model(torch.randn(1, 64))
        >>> streamer.plan.host_nbytes > 0
        True
    """
    config = (config or OffloadConfig()).merged(device_budget=device_budget, **settings).resolved()
    with ExitStack() as on_failure, torch.inference_mode(False), torch.no_grad():
        backend = _backend(device, config)
        on_failure.callback(backend.close)
        streamer = _offload(model, backend, config)
        on_failure.pop_all()
    return streamer


def from_pretrained(
    path_or_repo_id: str | Path,
    *,
    device: torch.device | str | None = None,
    device_budget: int | str | None = None,
    dtype: str | torch.dtype = "auto",
    config: OffloadConfig | None = None,
    offload_folder: str | Path | None = None,
    host_budget: int | str | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Load a transformers model straight from its safetensors and stream it; no second copy of it in RAM.

    Args:
        path_or_repo_id: a folder, or the name of a repository on the Hugging Face Hub.
        device, device_budget, config, host_budget: as for `offload`; its other settings may be given too.
        dtype: "auto" keeps the checkpoint's; another casts once, into `offload_folder`.
        offload_folder: where converted weights are kept for the next load; default: a temporary folder.
        progress: show (True) or hide (False) the loading bar; None leaves it as it is.
        kwargs: passed on to the model class, such as `trust_remote_code`, `revision`, `attn_implementation`.

    Returns:
        The transformers model, in eval mode; its streamer is at `model.weightstream`.

    Raises:
        CheckpointError: a file is missing, malformed or of an unsupported format; the message names it.
        PlanError, ConfigError, OffloadError: as for `offload`.
    """
    try:
        from weightstream.adapters.transformers import load_pretrained
    except ImportError as error:
        raise UnsupportedError(
            f"from_pretrained needs transformers: pip install 'weightstream[transformers]' ({error})"
        ) from error
    settings = OffloadConfig.take_from(kwargs)
    settings |= {"device_budget": device_budget, "offload_folder": offload_folder, "host_budget": host_budget}
    config = (config or OffloadConfig()).merged(**settings).resolved()
    with ExitStack() as on_failure, torch.inference_mode(False):
        backend = _backend(device, config)  # first: a wrong device is told before gigabytes are read
        on_failure.callback(backend.close)
        loaded = load_pretrained(
            path_or_repo_id, dtype=dtype, offload_folder=config.offload_folder, progress=progress, **kwargs
        )
        if loaded.folder is not None:
            on_failure.callback(loaded.folder.close)
        with torch.no_grad():
            _offload(loaded.model, backend, config, loaded.mappings, loaded.folder)
        on_failure.pop_all()
    return loaded.model


def _offload(
    model: nn.Module,
    backend: Backend,
    config: OffloadConfig,
    mappings: Sequence[FileMapping] = (),
    folder: OffloadFolder | None = None,
) -> Streamer:
    guards.refuse_twice(model)
    guards.refuse_foreign(dict(model.named_modules()))
    leave_inference(model)
    by_alias = groups(model)
    if not by_alias:
        raise ConfigError(f"{type(model).__name__} has no weights to offload")
    planner = _planner(config, backend, sum(g.nbytes for g in by_alias.values() if g.home.device == backend.device))
    units = find_units(model)
    try:
        planner(manifest(units, by_alias))
    except PlanError:
        units = find_units(model, leaves=True)  # single matrices need less ring than blocks
    # of its own: another model may have weights of the same names
    spill = OffloadFolder(None, inside=config.offload_folder) if config.offload_folder is not None else None
    homes = Homes(
        by_alias,
        backend,
        empty=empty_tensors(model),
        mappings=mappings,
        arena=_arena(backend, config),
        spill=spill,
        host_budget=config.host_budget,
    )
    closing = ExitStack()
    for owned in (folder, spill):
        if owned is not None:
            closing.callback(owned.close)
    streamer = Streamer(model, units, homes, backend, planner, on_close=closing.close)
    _report(streamer.plan, config)
    return streamer


def _backend(device: torch.device | str | None, config: OffloadConfig) -> Backend:
    try:
        device = torch.device(device if device is not None else "cuda" if cuda.available() else "cpu")
    except RuntimeError as error:
        raise ConfigError(f"device {device!r}: {error}") from error
    if device.type == "cpu":
        return CpuBackend()
    if device.type == "cuda":
        return cuda.CudaBackend(device, pin_memory=config.pin_memory)
    raise UnsupportedError(f"device {device}: weightstream runs on 'cuda' and 'cpu'")


def _arena(backend: Backend, config: OffloadConfig) -> Arena | None:
    """Pinned memory, where the device copies from host memory asynchronously and pinning is allowed."""
    if backend.device.type != "cuda" or not config.pin_memory:
        return None
    return Arena(cuda.register, cuda.unregister)


def _planner(config: OffloadConfig, backend: Backend, already_there: int) -> Planner:
    """What turns a manifest into a plan under this configuration. `already_there`: the model's bytes on the device."""
    profile: Profile = backend.profile
    uva, prefetch = config.uva, config.prefetch
    if config.backend == "prefetch":
        return lambda manifest: place_layers(
            manifest,
            group_size=prefetch.offload_group_size,
            num_in_group=prefetch.offload_num_in_group,
            prefetch_step=prefetch.offload_prefetch_step,
            eligible=_eligible(prefetch.offload_params),
            profile=profile,
        )
    if config.backend == "uva":
        return lambda manifest: place_host_bytes(
            manifest,
            host_nbytes=int(uva.cpu_offload_gb * 2**30),
            eligible=_eligible(uva.cpu_offload_params),
            profile=profile,
        )
    budget = config.device_budget
    if budget is None:
        on_cpu = backend.device.type == "cpu"
        free = cpu.free_nbytes() if on_cpu else cuda.free_nbytes(backend.device)
        budget = free + already_there
    return lambda manifest: place(manifest, budget=budget, profile=profile)


def _eligible(patterns: frozenset[str]) -> Callable[[str], bool]:
    return lambda name: not patterns or any(name_matches(p, name) for p in patterns)


def _report(plan: Plan, config: OffloadConfig) -> None:
    patterns = {"prefetch": config.prefetch.offload_params, "uva": config.uva.cpu_offload_params}.get(config.backend)
    for pattern in unmatched_patterns(patterns or (), [t.name for t in plan.manifest.tensors()]):
        logger.warning("pattern %r matches no parameter of the model: it selects nothing", pattern)
    if config.backend == "uva" and config.use_uva:
        logger.warning(
            "zero-copy reads are not there yet: what cpu_offload_gb places on the host streams through a ring instead "
            "(set use_uva=False to say that this is meant)"
        )
    logger.info("%s", plan.summary())
    if not plan.host_nbytes and config.backend != "none":
        logger.warning("the %s settings offload nothing of this model", config.backend)
