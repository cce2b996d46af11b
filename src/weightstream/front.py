"""The front door: `offload()` for any module, `from_pretrained()` for a checkpoint. Chooses parts; moves no bytes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightstream.adapters.module import find_blocks, find_units, row_tables
from weightstream.config import OffloadConfig, name_matches, unmatched_patterns
from weightstream.errors import ConfigError, PlanError, UnsupportedError
from weightstream.plan.manifest import Manifest, Profile
from weightstream.plan.placement import map_to_host, place, place_homes, place_host_bytes, place_layers
from weightstream.plan.plan import Plan
from weightstream.runtime import cpu, cuda, guards
from weightstream.runtime.backend import Backend
from weightstream.runtime.cpu import CpuBackend
from weightstream.runtime.homes import Homes
from weightstream.runtime.streamer import Streamer
from weightstream.runtime.weights import Group, UnitModule, empty_tensors, groups, leave_inference, manifest, merge_tied
from weightstream.store.arena import Arena
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import FileMapping
from weightstream.store.pages import PageCache

logger = logging.getLogger("weightstream")

Planner = Callable[[Manifest], Plan]

_TABLE_NBYTES = 1 << 20


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


def generate(model: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """Generate with a transformers model, offloaded or not, replaying decode steps from a CUDA graph where that works.

    It is `model.generate(inputs, cache_implementation="static", disable_compile=True, **kwargs)`, bit for bit. Where
    steps cannot be captured they run eager, and a warning says why; without CUDA, or when an argument asks for another
    cache or loop, it is `model.generate(inputs, **kwargs)`.

    Args:
        model: a transformers model.
        inputs: token ids of shape (batch, tokens), as for `model.generate`.
        kwargs: for `model.generate`; and `on_decoding`, called at the end with how the steps ran (`replays`, and the
            `reason` why others were not replayed), in place of the warning.

    Returns:
        What `model.generate` returns.
    """
    from weightstream.adapters import generation

    return generation.generate(model, inputs, **kwargs)


def offload_layers(layers: Sequence[nn.Module], *, device: torch.device | None, config: OffloadConfig) -> Streamer:
    """Stream layers of a model that somebody else owns, each a unit, at fixed addresses from now on.

    What several layers share stays resident, and so do buffers. Raises as `offload`; the layers are restored then.
    """
    config = config.resolved()
    with ExitStack() as on_failure, torch.inference_mode(False), torch.no_grad():
        backend = _backend(device, config)
        on_failure.callback(backend.close)
        streamer = _offload(nn.ModuleList(layers), backend, config, whole_layers=True)
        on_failure.pop_all()
        on_failure.callback(streamer.remove)
        streamer.fix(learned=True)
        on_failure.pop_all()
    return streamer


def _offload(
    model: nn.Module,
    backend: Backend,
    config: OffloadConfig,
    mappings: Sequence[FileMapping] = (),
    folder: OffloadFolder | None = None,
    *,
    whole_layers: bool = False,
) -> Streamer:
    guards.refuse_twice(model)
    guards.refuse_foreign(dict(model.named_modules()))
    leave_inference(model)
    by_alias = groups(model)
    if not by_alias:
        raise ConfigError(f"{type(model).__name__} has no weights to offload")
    shared = _shared_or_buffers(model) if whole_layers else frozenset[str]()
    # of its own: another model may have weights of the same names
    spill = OffloadFolder(None, inside=config.offload_folder) if config.offload_folder is not None else None
    homes = Homes(
        by_alias,
        backend,
        empty=empty_tensors(model),
        mappings=mappings,
        arena=_arena(backend, config),
        pages=_pages(backend, config) if mappings else None,
        spill=spill,
        by_row=_tables(model, by_alias),
    )
    planner = _within_host_budget(config, backend, homes, shared)
    if whole_layers:
        units = [UnitModule(name=name, module=m, layer=i) for i, (name, m) in enumerate(model.named_children())]
    else:
        grains = [merge_tied(find_units(model, leaves=leaves), by_alias) for leaves in (False, True)]
        units = _best_grain(grains, by_alias, planner)
    closing = ExitStack()
    for owned in (folder, spill):
        if owned is not None:
            closing.callback(owned.close)
    streamer = Streamer(model, units, homes, backend, planner, find_blocks(model), on_close=closing.close)
    _report(streamer.plan, config)
    return streamer


def _best_grain(grains: list[list[UnitModule]], by_alias: dict[str, Group], planner: Planner) -> list[UnitModule]:
    """Blocks, or single matrices, which need less ring but cost more launches: whichever is predicted to be faster."""
    plans: list[tuple[float, int, int]] = []
    for index, units in enumerate(grains):
        try:
            plan = planner(manifest(units, by_alias))
        except PlanError:
            if index == len(grains) - 1 and not plans:
                raise
        else:
            plans.append((plan.step_s, plan.device_nbytes, index))
    return grains[min(plans)[2]]


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
    return Arena(partial(cuda.register, device=backend.device), cuda.unregister)


def _pages(backend: Backend, config: OffloadConfig) -> PageCache | None:
    """The page cache as a home: pinned where it is, if the device can; read ahead, where nothing is pinned."""
    if backend.device.type != "cuda" or not config.pin_memory:
        return PageCache()
    if not cuda.reads_pages(backend.device):
        return None
    return PageCache(partial(cuda.register, device=backend.device, read_only=True), cuda.unregister)


def _tables(model: nn.Module, by_alias: dict[str, Group]) -> frozenset[str]:
    rows = row_tables(model)
    return frozenset(a for a, group in by_alias.items() if all(id(m.tensor) in rows for m in group.members))


def _within_host_budget(config: OffloadConfig, backend: Backend, homes: Homes, kept: frozenset[str]) -> Planner:
    """Plans that keep on disk what host memory has no room for; without a budget, what is in RAM may stay there."""
    in_ram = sum(h.group.nbytes for h in homes.homes.values() if h.mapping is None and h.origin.type == "cpu")
    free, on_cpu = cpu.free_nbytes() + in_ram, backend.device.type == "cpu"
    default = " (the default, 80 % of what this process may still take)" if config.host_budget is None else ""
    folder = ", name an offload_folder to keep the rest on disk" if config.offload_folder is None else ""
    remedy = f"Raise host_budget{default}{folder}, or raise device_budget."
    planners = [_planner(config, backend, homes, kept, by_row=by_row) for by_row in (True, False)]

    def within(manifest: Manifest, planner: Planner) -> Plan:
        plan = planner(manifest)
        budget = config.host_budget
        if budget is None:
            budget = max(0, free - plan.device_nbytes if on_cpu else free)
        placed = partial(place_homes, plan, host_budget=budget, movable=homes.movable, remedy=remedy)
        return placed(profile=profile() if placed().disk else backend.profile)

    @cache
    def profile() -> Profile:
        measured = homes.disk_bytes_per_s()
        return backend.profile if measured is None else replace(backend.profile, disk_bytes_per_s=measured)

    def plan(manifest: Manifest) -> Plan:
        try:
            return within(manifest, planners[0])
        except PlanError:  # a table that kernels read by row cannot be on disk
            return within(manifest, planners[1])

    return plan


def _shared_or_buffers(layers: nn.Module) -> frozenset[str]:
    """Names of tensors that have no fixed address of their own, and of those that a forward may write to."""
    holders = Counter(id(p) for layer in layers.children() for p in layer.parameters())
    shared = (name for name, p in layers.named_parameters(remove_duplicate=False) if holders[id(p)] > 1)
    return frozenset(shared) | {name for name, _ in layers.named_buffers(remove_duplicate=False)}


def _planner(config: OffloadConfig, backend: Backend, homes: Homes, kept: frozenset[str], *, by_row: bool) -> Planner:
    """What turns a manifest into a plan under this configuration. The classic settings leave `kept` where it is.

    Kernels read from host memory what `zero_copy_params` names; and with `by_row`, where device memory is short, the
    large tables of which a step reads a few rows.
    """
    plan_rest = _streaming_planner(config, backend, homes, kept)
    by_alias = {alias: home.group for alias, home in homes.homes.items()}
    named = frozenset(a for a, group in by_alias.items() if _named(group, config.zero_copy_params))
    if not named and (backend.device.type == "cpu" or config.backend != "none"):
        return plan_rest
    if not _maps_host_memory(backend, config):
        if named and by_row:
            logger.warning("zero_copy_params ignored, these weights stream: the device cannot read pinned host memory")
        return plan_rest
    large = frozenset(alias for alias in homes.by_row if by_alias[alias].nbytes >= _TABLE_NBYTES)
    read_nbytes = sum(by_alias[alias].nbytes for alias in named - homes.by_row)

    def planner(manifest: Manifest) -> Plan:
        if not homes.can_map:
            return plan_rest(manifest)
        plan = map_to_host(plan_rest(manifest.without(named)), manifest, read_nbytes, backend.profile)
        fits = plan.offloaded_nbytes == plan.mapped_nbytes
        if not by_row or fits or config.backend != "none" or backend.device.type == "cpu":
            return plan
        return map_to_host(plan_rest(manifest.without(named | large)), manifest, read_nbytes, backend.profile)

    return planner


def _named(group: Group, patterns: frozenset[str]) -> bool:
    names = (name for member in group.members for name in member.names)
    return bool(patterns) and any(map(_eligible(patterns), names))


def _streaming_planner(config: OffloadConfig, backend: Backend, homes: Homes, kept: frozenset[str]) -> Planner:
    profile: Profile = backend.profile
    uva, prefetch = config.uva, config.prefetch
    if config.backend == "prefetch":
        return lambda manifest: place_layers(
            manifest,
            group_size=prefetch.offload_group_size,
            num_in_group=prefetch.offload_num_in_group,
            prefetch_step=prefetch.offload_prefetch_step,
            eligible=_eligible(prefetch.offload_params, kept),
            profile=profile,
        )
    if config.backend == "uva":
        return lambda manifest: place_host_bytes(
            manifest,
            host_nbytes=int(uva.cpu_offload_gb * 2**30),
            eligible=_eligible(uva.cpu_offload_params, kept),
            zero_copy=backend.device.type == "cuda" and homes.can_map and _maps_host_memory(backend, config),
            profile=profile,
        )
    budget = config.device_budget
    if budget is None:
        on_cpu = backend.device.type == "cpu"
        free = cpu.free_nbytes() if on_cpu else cuda.free_nbytes(backend.device)
        there = (h for h in homes.homes.values() if h.origin == backend.device and h.mapping is None)
        budget = free + sum(home.group.nbytes for home in there)
    return lambda manifest: place(manifest, budget=budget, profile=profile)


def _maps_host_memory(backend: Backend, config: OffloadConfig) -> bool:
    """Whether kernels can read host memory: over the link, pinned, or because the host is the device."""
    if backend.device.type == "cpu":
        return True
    return (
        config.pin_memory
        and config.use_uva
        and backend.device_view(torch.empty(1, device="cpu", pin_memory=True)) is not None
    )


def _eligible(patterns: frozenset[str], kept: frozenset[str] = frozenset()) -> Callable[[str], bool]:
    return lambda name: name not in kept and (not patterns or any(name_matches(p, name) for p in patterns))


def _report(plan: Plan, config: OffloadConfig) -> None:
    patterns = {"prefetch": config.prefetch.offload_params, "uva": config.uva.cpu_offload_params}.get(config.backend)
    names = [tensor.name for tensor in plan.manifest.tensors()]
    for pattern in unmatched_patterns((*(patterns or ()), *config.zero_copy_params), names):
        logger.warning("pattern %r matches no parameter of the model: it selects nothing", pattern)
    if config.backend == "uva" and config.use_uva and not plan.mapped:
        logger.warning(
            "the device cannot read pinned host memory, so what cpu_offload_gb places there streams through a ring "
            "(set use_uva=False to say that this is meant)"
        )
    logger.info("%s", plan.summary())
    if not plan.offloaded_nbytes and config.backend != "none":
        logger.warning("the %s settings offload nothing of this model", config.backend)
