"""What a planner must know of a model and a machine, gathered from both. Reads no weights and decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weightstream.adapters.module import GRAINS, find_units, row_tables
from weightstream.adapters.shapes import Footprint, observe
from weightstream.codec import coding
from weightstream.codec.estimate import ASSUMED_BITS, estimates
from weightstream.codec.format import ELEMENTS, Layout
from weightstream.config import OffloadConfig
from weightstream.errors import UnsupportedError
from weightstream.measure import bench
from weightstream.measure.profile import profile_for
from weightstream.plan.manifest import Profile
from weightstream.plan.planner import Demand, Machine, Planner, Weights
from weightstream.plan.prospect import Prospect
from weightstream.plan.schedule import aligned
from weightstream.plan.work import Workload
from weightstream.runtime import cpu, cuda
from weightstream.runtime.backend import Backend
from weightstream.runtime.homes import Homes
from weightstream.runtime.weights import Group, UnitModule, groups, manifest, merge_tied
from weightstream.store.limits import available_nbytes

logger = logging.getLogger("weightstream")

_CONTEXT = 4096  # positions to plan for when nobody says, where a model has so many
_NONE_CODED: Mapping[str, Layout] = MappingProxyType({})


def machine_of_device(backend: Backend, config: OffloadConfig) -> Machine:
    """What there is to place in on this machine, for a model that is not loaded."""
    on_cpu = backend.device.type == "cpu"
    found = machine_elsewhere(profile_for(backend))
    free, total = (found.host_free_nbytes, found.host_total_nbytes) if on_cpu else cuda.memory(backend.device)
    return replace(
        found,
        on_cpu=on_cpu,
        free_nbytes=free,
        total_nbytes=total,
        maps_host_memory=cache(partial(_maps_host_memory, backend, config)),
        can_decode=partial(can_decode, backend, config),
    )


def can_decode(backend: Backend, config: OffloadConfig) -> bool:
    """Whether coded weights are decoded as they are needed: on a GPU; on the CPU, which is slow, on request."""
    if not uses_codes(config):
        return False
    return config.codec != "auto" if backend.device.type == "cpu" else coding.available(backend.device)


def uses_codes(config: OffloadConfig) -> bool:
    return config.codec != "none" and config.backend != "uva"


def machine_elsewhere(profile: Profile) -> Machine:
    """A GPU that is not here, with this machine's host."""
    return Machine(
        profile=profile,
        on_cpu=False,
        free_nbytes=profile.device_nbytes,
        total_nbytes=profile.device_nbytes,
        host_free_nbytes=cpu.free_nbytes(),
        host_total_nbytes=available_nbytes(),
    )


def machine_of(config: OffloadConfig, backend: Backend, homes: Homes) -> Machine:
    """What there is to place in: memory that this model's weights take now counts as free where they would leave it."""
    machine, there = machine_of_device(backend, config), [h for h in homes.homes.values() if h.file is None]
    host_nbytes = sum(h.group.nbytes for h in there if h.origin.type == "cpu")
    device_nbytes = sum(h.group.nbytes for h in there if h.origin == backend.device)
    return replace(
        machine,
        free_nbytes=machine.free_nbytes + device_nbytes,
        total_nbytes=machine.total_nbytes + (host_nbytes if machine.on_cpu else 0),
        host_free_nbytes=machine.host_free_nbytes + host_nbytes,
        host_total_nbytes=machine.host_total_nbytes + host_nbytes,
        disk_bytes_per_s=cache(partial(bench.rate_of_files, homes.files)),
    )


def prospect_of_checkpoint(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    machine: Machine,
    *,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
) -> Prospect:
    """What `from_pretrained` would plan with, from config.json and the headers of the shards alone."""
    from weightstream.adapters.hub import skeleton

    model, checkpoint = skeleton(path_or_repo_id, dtype=dtype, trust_remote_code=trust_remote_code)
    by_alias = groups(model, allow_meta=True)
    entries = checkpoint.entries if checkpoint is not None else {}
    layouts = {name: entry.layout for name, entry in entries.items() if entry.layout is not None}
    coded = (
        _coded_in_files(by_alias, layouts) if layouts and uses_codes(config) and machine.can_decode() else _NONE_CODED
    )
    by_row, movable = tables_of(model, by_alias), frozenset(by_alias)
    weights = weights_of(by_alias, by_row=by_row, movable=movable, coded=coded)
    return prospect_of(model, by_alias, Planner(config=config, machine=machine, weights=weights))[1]


def _coded_in_files(by_alias: Mapping[str, Group], layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Of the groups that are one tensor of a file, as it is there: transformers may convert the others."""
    found: dict[str, Layout] = {}
    for alias, group in by_alias.items():
        spec = group.members[0].spec
        layout = next((layouts[name] for m in group.members for name in m.names if name in layouts), None)
        if layout is not None and (layout.dtype, layout.raw_nbytes) == (spec.dtype, group.nbytes):
            found[alias] = layout
    return found


def prospect_of(
    model: nn.Module, by_alias: dict[str, Group], planner: Planner
) -> tuple[list[list[UnitModule]], Prospect]:
    """The units of a model in every grain, and what is planned with them."""
    footprint = _footprint(model, planner.config)
    grains = [merge_tied(find_units(model, grain), by_alias) for grain in GRAINS]
    planners = tuple(replace(planner, demand=_demand(footprint, units)) for units in grains)
    return grains, Prospect(grains=tuple(manifest(units, by_alias) for units in grains), planners=planners)


def weights_of(
    by_alias: Mapping[str, Group],
    *,
    by_row: frozenset[str] = frozenset(),
    coded: Mapping[str, Layout] = _NONE_CODED,
    in_parts: Mapping[str, Sequence[torch.Tensor]] = MappingProxyType({}),
    before_read: Callable[[], None] = lambda: None,
    **facts: Any,
) -> Weights:
    """What a planner is told of these groups.

    `coded` are those that are in a file in coded form, `in_parts` the bytes of those whose memory holds none yet.
    """
    names = {alias: tuple(name for m in group.members for name in m.names) for alias, group in by_alias.items()}

    @cache
    def codes() -> dict[str, dict[int, int]]:
        before_read()
        return {a: _sizes(group, coded.get(a), in_parts.get(a)) for a, group in by_alias.items() if a not in by_row}

    return Weights(names=names, by_row=by_row, coded_in_files=frozenset(coded), codes=codes, **facts)


def _sizes(group: Group, layout: Layout | None, parts: Sequence[torch.Tensor] | None) -> dict[int, int]:
    """The bytes of a group by the bits of each code: in a file, from a sample, or assumed; parameters can be coded."""
    dtype = group.members[0].spec.dtype
    if layout is not None:
        return {layout.bits: layout.nbytes}
    if dtype not in ELEMENTS or any(m.spec.dtype != dtype or m.kind is not nn.Parameter for m in group.members):
        return {}
    if not group.home.is_meta:
        return estimates(parts or [group.home], dtype)
    count = group.nbytes // ELEMENTS[dtype].nbytes
    least = {bits: Layout(dtype=dtype, bits=bits, count=count, num_escapes=0).nbytes for bits in ASSUMED_BITS[dtype]}
    return {bits: max(n, aligned(round(count * ASSUMED_BITS[dtype][bits] / 8))) for bits, n in least.items()}


def tables_of(model: nn.Module, by_alias: dict[str, Group]) -> frozenset[str]:
    """Alias groups of which a step reads a few rows."""
    rows = row_tables(model)
    return frozenset(a for a, group in by_alias.items() if all(id(m.tensor) in rows for m in group.members))


def _footprint(model: nn.Module, config: OffloadConfig) -> tuple[Footprint, Workload] | None:
    """What a step of a language model takes beside its weights; None where shapes do not tell."""
    settings = getattr(model, "config", None)
    if settings is None:
        return None
    positions = getattr(settings, "max_position_embeddings", None) or _CONTEXT
    context = max(config.tokens, config.context or min(_CONTEXT, positions))
    workload = Workload(batch=config.batch, tokens=config.tokens, context=context)
    try:
        return observe(model, workload), workload
    except UnsupportedError as error:
        logger.info("activations and compute times are not known before the first step: %s", error)
        return None


def _demand(found: tuple[Footprint, Workload] | None, units: Sequence[UnitModule]) -> Demand | None:
    if found is None:
        return None
    footprint, workload = found
    return Demand(
        workload=workload,
        work={unit.name: ops for unit, ops in zip(units, footprint.work(units), strict=True)},
        activation_nbytes=footprint.activation_nbytes,
        cache_nbytes=footprint.cache_nbytes,
    )


def _maps_host_memory(backend: Backend, config: OffloadConfig) -> bool:
    """Whether kernels can read host memory: over the link, pinned, or because the host is the device."""
    if backend.device.type == "cpu":
        return True
    return (
        config.pin_memory
        and config.use_uva
        and backend.device_view(torch.empty(1, device="cpu", pin_memory=True)) is not None
    )
