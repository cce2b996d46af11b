"""What a planner must know of a model and a machine, gathered from both. Reads no weights and decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weightstream.adapters.module import GRAINS, find_units, row_tables
from weightstream.adapters.shapes import observe
from weightstream.codec import coding
from weightstream.codec.estimate import ASSUMED_BITS, estimates
from weightstream.codec.format import ELEMENTS, Layout
from weightstream.config import OffloadConfig
from weightstream.errors import UnsupportedError
from weightstream.measure import bench
from weightstream.measure.profile import profile_for
from weightstream.plan.manifest import Profile, Workload
from weightstream.plan.planner import Demand, Machine, Planner, Weights
from weightstream.plan.prospect import Prospect
from weightstream.plan.schedule import aligned
from weightstream.runtime import cpu, cuda
from weightstream.runtime.backend import Backend
from weightstream.runtime.homes import Homes
from weightstream.runtime.weights import Group, UnitModule, groups, manifest, merge_tied
from weightstream.store.limits import available_nbytes
from weightstream.store.mapping import Memory

logger = logging.getLogger("weightstream")

_CONTEXT = 4096  # positions to plan for when nobody says, where a model has so many
Grains = list[list[UnitModule]]


def can_decode(backend: Backend, config: OffloadConfig) -> bool:
    """Whether coded weights are decoded as they are needed: on a GPU; on the CPU, which is slow, on request."""
    if not config.uses_codes:
        return False
    return config.codec != "auto" if backend.device.type == "cpu" else coding.available(backend.device)


def machine_elsewhere(profile: Profile, held_nbytes: int = 0) -> Machine:
    """A GPU that is not here, with this machine's host, where what holds so many bytes would leave it."""
    return Machine(
        profile=profile,
        on_cpu=False,
        free_nbytes=profile.device_nbytes,
        total_nbytes=profile.device_nbytes,
        host_free_nbytes=cpu.free_nbytes() + held_nbytes,
        host_total_nbytes=available_nbytes() + held_nbytes,
    )


def machine_of(backend: Backend, config: OffloadConfig, homes: Homes | None = None) -> Machine:
    """What there is to place in: memory that a model's weights take now counts as free where they would leave it."""
    there = [home for home in homes.homes.values() if home.file is None] if homes else []
    held_nbytes = sum(home.group.nbytes for home in there if home.origin.type == "cpu")
    machine = machine_elsewhere(profile_for(backend), held_nbytes)
    on_cpu, free, total = backend.device.type == "cpu", machine.host_free_nbytes, machine.host_total_nbytes
    if not on_cpu:
        free, total = cuda.memory(backend.device)
        free += sum(home.group.nbytes for home in there if home.origin == backend.device)

    @cache
    def is_readable() -> bool:
        """Whether kernels can read host memory: over the link, pinned, or because the host is the device."""
        is_allowed = config.pin_memory and config.use_uva
        return on_cpu or (is_allowed and backend.device_view(torch.empty(1, pin_memory=True, device="cpu")) is not None)

    return replace(
        machine,
        on_cpu=on_cpu,
        free_nbytes=free,
        total_nbytes=total,
        maps_host_memory=lambda: (homes is None or homes.can_map) and is_readable(),
        can_decode=partial(can_decode, backend, config),
        disk_bytes_per_s=cache(partial(bench.rate_of_files, homes.files if homes else ())),
    )


def planner_of(
    homes: Homes, backend: Backend, config: OffloadConfig, memories: Sequence[Memory], kept: frozenset[str]
) -> Planner:
    """What plans with the weights where they are now, on this machine."""
    by_alias = {alias: home.group for alias, home in homes.homes.items()}
    coded, parts, movable = homes.layouts, homes.in_parts, homes.movable
    weights = weights_of(
        by_alias, memories, by_row=homes.by_row, coded=coded, in_parts=parts, movable=movable, kept=kept
    )
    return Planner(config=config, machine=machine_of(backend, config, homes), weights=weights)


def prospect_of_checkpoint(path: str | Path, config: OffloadConfig, machine: Machine, **options: Any) -> Prospect:
    """What `from_pretrained` would plan with, from config.json and the headers of the shards alone.

    `options` are the `dtype` and `trust_remote_code` of a load.
    """
    from weightstream.adapters.hub import skeleton

    model, checkpoint = skeleton(path, **options)
    by_alias = groups(model, allow_meta=True)
    entries = checkpoint.entries if checkpoint is not None else {}
    layouts = {name: entry.layout for name, entry in entries.items() if entry.layout is not None}
    decodes = bool(layouts) and config.uses_codes and machine.can_decode()
    coded = _coded_in_files(by_alias, layouts) if decodes else {}
    weights = weights_of(by_alias, by_row=tables_of(model, by_alias), movable=frozenset(by_alias), coded=coded)
    planner = Planner(config=config, machine=machine, weights=weights)
    return prospect_of(model, by_alias, grains_of(model, by_alias), planner)


def _coded_in_files(by_alias: Mapping[str, Group], layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Of the groups that are one tensor of a file, as it is there: transformers may convert the others."""
    found: dict[str, Layout] = {}
    for alias, group in by_alias.items():
        spec = group.members[0].spec
        layout = next((layouts[name] for m in group.members for name in m.names if name in layouts), None)
        if layout is not None and (layout.dtype, layout.raw_nbytes) == (spec.dtype, group.nbytes):
            found[alias] = layout
    return found


def grains_of(model: nn.Module, by_alias: dict[str, Group]) -> Grains:
    """The units of a model in every grain."""
    return [merge_tied(find_units(model, grain), by_alias) for grain in GRAINS]


def prospect_of(model: nn.Module, by_alias: dict[str, Group], grains: Grains, planner: Planner) -> Prospect:
    """What is planned with a model in these grains."""
    planners = tuple(replace(planner, demand=demand) for demand in _demands(model, planner.config, grains))
    return Prospect(grains=tuple(manifest(units, by_alias) for units in grains), planners=planners)


def weights_of(
    by_alias: Mapping[str, Group],
    memories: Sequence[Memory] = (),
    *,
    coded: Mapping[str, Layout] = MappingProxyType({}),
    by_row: frozenset[str] = frozenset(),
    in_parts: Mapping[str, Sequence[torch.Tensor]] = MappingProxyType({}),
    **facts: frozenset[str],
) -> Weights:
    """What a planner is told of these groups, whose bytes lie in `memories`.

    `coded` are those that are in a file in coded form, `in_parts` the bytes of those whose memory holds none yet.
    """
    names = {alias: tuple(name for m in group.members for name in m.names) for alias, group in by_alias.items()}

    @cache
    def codes() -> dict[str, dict[int, int]]:
        for memory in memories:
            memory.check()
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


def _demands(model: nn.Module, config: OffloadConfig, grains: Grains) -> list[Demand]:
    """What a step of a language model takes beside its weights, in each grain; unknown where shapes do not tell."""
    settings = getattr(model, "config", None)
    if settings is None:
        return [Demand() for _ in grains]
    positions = getattr(settings, "max_position_embeddings", None) or _CONTEXT
    context = max(config.tokens, config.context or min(_CONTEXT, positions))
    workload = Workload(batch=config.batch, tokens=config.tokens, context=context)
    try:
        found = observe(model, workload)
    except UnsupportedError as error:
        logger.info("activations and compute times are not known before the first step: %s", error)
        return [Demand() for _ in grains]
    known = Demand(workload=workload, activation_nbytes=found.activation_nbytes, cache_nbytes=found.cache_nbytes)
    works = ({unit.name: ops for unit, ops in zip(units, found.work(units), strict=True)} for units in grains)
    return [replace(known, work=work) for work in works]
