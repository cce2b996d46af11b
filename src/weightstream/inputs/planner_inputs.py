"""What a planner must know of a model and a machine, gathered from both before anything is planned. Decides nothing.

What takes time to find out (samples of weights, kernels that are compiled, the speed of files) is gathered where a plan
within the budget can depend on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weightstream.adapters.modules.moe import why_whole
from weightstream.adapters.modules.partition import GRAINS, Grain, find_units, row_tables
from weightstream.adapters.tracing import op_timing
from weightstream.adapters.tracing.footprint import Footprint, follow, observe
from weightstream.codec.estimate import ASSUMED_BITS, estimate
from weightstream.codec.format import ELEMENTS, Layout
from weightstream.errors import UnsupportedError
from weightstream.measure import bench
from weightstream.measure.profile import kernels_run, prepare_decoding, profile_for, with_decoding
from weightstream.plan.coding import Sizes
from weightstream.plan.manifest import Manifest, Op, Profile, Rate, Workload, decode_rate
from weightstream.plan.planner import Demand, Machine, Planner, Weights
from weightstream.plan.problem import Prospect
from weightstream.plan.schedule import aligned
from weightstream.runtime.devices import cpu, cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.tensors.leaves import Role
from weightstream.runtime.weights.alias_groups import Group, UnitModule, groups, manifest, merge_tied
from weightstream.runtime.weights.homes import Homes
from weightstream.settings.config import OffloadConfig
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.limits import available_nbytes
from weightstream.store.mapping import Memory

logger = logging.getLogger("weightstream")

_TEXT = 512  # tokens that an encoder is given where nobody says how many
_CONTEXT = 4096  # positions to plan for when nobody says, where a model has so many
_FOLLOW_S = 5.0  # at most, to follow a call on shapes: FLUX.1's transformer takes 0.4
Grains = list[list[UnitModule]]
Example = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a forward
Observe = Callable[[nn.Module, Workload], Footprint]
_RATES: Mapping[str, Rate] = MappingProxyType({"bfloat16": "half", "float16": "half", "float32": "single"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosted:
    """Layers (`blocks`) whose steps an engine runs, or a `model` over several devices of which these are those of one.

    `kept` are names of tensors that are to stay on the device. `grains` are those that units may have: parts of layers
    only where a step is watched before addresses are fixed. `in_graphs`: the host launches no kernel of a step.
    `share`: of the model's cache is theirs. `observe` tells the work of the model, once for all devices.
    """

    blocks: tuple[nn.Module, ...]
    kept: frozenset[str] = frozenset()
    grains: tuple[Grain, ...] = ("block",)
    in_graphs: bool = False
    model: nn.Module | None = None
    share: float = 1.0
    observe: Observe = observe


def can_decode(backend: Backend, config: OffloadConfig, dtypes: Collection[str], progress: bool | None = None) -> bool:
    """Whether compressed weights of these dtypes are decoded as they are needed: on a GPU; on the CPU, which is slow,
    on request."""
    if backend.device.type == "cpu":
        return config.uses_codes and config.codec != "auto"
    return config.uses_codes and kernels_run(backend.device, dtypes, progress=progress)


def with_decode_rates(
    machine: Machine, backend: Backend, dtypes: Collection[str], progress: bool | None = None
) -> Machine:
    """A machine that decodes these dtypes, at the rates of its backend."""
    found = with_decoding(backend, machine.profile, dtypes, progress=progress)
    rates = {name: getattr(found, name) for name in (*map(decode_rate, dtypes), "decoding_s")}
    return replace(machine, can_decode=True, profile=replace(machine.profile, **rates))


def machine_decoding(backend: Backend, config: OffloadConfig, dtypes: Collection[str]) -> Machine:
    """The machine, and whether and how fast it decodes these dtypes. Kernels compile while it is measured."""
    dtypes = dtypes if config.uses_codes else ()
    found = machine_of(backend, config, dtypes=dtypes)
    return with_decode_rates(found, backend, dtypes) if dtypes and can_decode(backend, config, dtypes) else found


class Kernels:
    """The kernels that decode the weights of a load, compiled from when its headers are read."""

    def __init__(self, backend: Backend, config: OffloadConfig, progress: bool | None) -> None:
        self._backend, self._config, self._progress = backend, config, progress
        self._expected: set[str] = set()  # dtypes
        prepare_decoding(backend.device, (), progress)

    def expect(self, dtype: torch.dtype, nbytes: int) -> None:
        """A model of so many bytes is about to be loaded in this dtype."""
        self._expected |= dtypes_to_load(dtype, nbytes, self._backend, self._config)
        prepare_decoding(self._backend.device, self._expected, self._progress)

    def are_missing(self, dtypes: Collection[str]) -> bool:
        """Whether compressed weights of these dtypes cannot be decoded as they are needed."""
        return not can_decode(self._backend, self._config, dtypes, self._progress)

    def wait(self) -> None:
        """Leave nothing to a thread that might use the device later, in a capture."""
        if self._expected:
            can_decode(self._backend, self._config, self._expected, self._progress)


def dtypes_to_code(
    by_alias: Mapping[str, Group], backend: Backend, config: OffloadConfig, *, among: bool = False
) -> frozenset[str]:
    """Dtypes of weights that a plan may compress, where `Planner.may_code` is going to say so: known before there is a
    planner, so that kernels are compiled meanwhile. None where only it can tell, but `among` processes, which agree on
    a machine before they plan."""
    nbytes = sum(group.nbytes for group in by_alias.values())
    here_nbytes = sum(group.nbytes for group in by_alias.values() if group.home.device == backend.device)
    may_code = _may_code(nbytes, backend, config, here_nbytes)
    may_code |= among and config.uses_codes and backend.device.type != "cpu"
    return _codable(by_alias) if may_code else frozenset()


def dtypes_to_load(dtype: torch.dtype, nbytes: int, backend: Backend, config: OffloadConfig) -> frozenset[str]:
    """The same for a model of so many bytes that is about to be loaded in one dtype."""
    found = {str(dtype).removeprefix("torch.")} & ELEMENTS.keys()
    return frozenset(found) if _may_code(nbytes, backend, config) else frozenset()


def dtypes_of(model: nn.Module) -> frozenset[str]:
    """Dtypes of a model's parameters for which there is a code."""
    return frozenset({str(p.dtype).removeprefix("torch.") for p in model.parameters()} & ELEMENTS.keys())


def _may_code(nbytes: int, backend: Backend, config: OffloadConfig, here_nbytes: int = 0) -> bool:
    """Whether a plan of weights of so many bytes, some of them on the device now, may compress them; a CPU does so on
    request only."""
    if backend.device.type == "cpu" or not config.uses_codes:
        return config.uses_codes and config.codec != "auto"
    free, total = cuda.memory(backend.device)
    budget = config.device_nbytes(total)
    is_over = nbytes > (free + here_nbytes if budget is None else budget)
    return config.codec != "auto" or (config.backend == "none" and is_over)


def _codable(by_alias: Mapping[str, Group]) -> frozenset[str]:
    """Dtypes of weights for which there is a code."""
    members = (group.members[0] for group in by_alias.values())
    return frozenset(m.spec.dtype for m in members if m.spec.dtype in ELEMENTS and m.role is Role.PARAMETER)


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


def machine_of(
    backend: Backend,
    config: OffloadConfig,
    homes: Homes | None = None,
    progress: bool | None = None,
    dtypes: Collection[str] = (),
) -> Machine:
    """What there is to place in: memory that a model's weights take now counts as free where they would leave it.

    `dtypes`: of weights that a plan may compress, as far as they are known.
    """
    there = [home for home in homes.homes.values() if home.file is None] if homes else []
    held_nbytes = sum(home.group.nbytes for home in there if home.origin.type == "cpu")
    on_cpu, profile = backend.device.type == "cpu", profile_for(backend, dtypes=dtypes, progress=progress)
    machine = machine_elsewhere(profile, held_nbytes)
    free, total = machine.host_free_nbytes, machine.host_total_nbytes
    if not on_cpu:
        free, total = cuda.memory(backend.device)
        free += sum(home.group.nbytes for home in there if home.origin == backend.device)
    return replace(
        machine,
        on_cpu=on_cpu,
        free_nbytes=free,
        total_nbytes=total,
        maps_host_memory=(homes is None or homes.can_map) and _reads_host(backend, config),
        can_decode=False,  # until it is asked for: kernels are compiled for that
    )


def _reads_host(backend: Backend, config: OffloadConfig) -> bool:
    """Whether kernels can read host memory: over the link, pinned, or because the host is the device."""
    if backend.device.type == "cpu":
        return True
    is_allowed = config.pin_memory and config.use_uva
    return is_allowed and backend.device_view(torch.empty(1, pin_memory=True, device="cpu")) is not None


def prospect_of_model(
    model: nn.Module,
    homes: Homes,
    backend: Backend,
    config: OffloadConfig,
    machine: Machine,
    memories: Sequence[Memory],
    grains: Grains,
    example: Example | None = None,
    hosted: Hosted | None = None,
    progress: bool | None = None,
) -> Prospect:
    """What is planned with the weights where they are now.

    `example` are arguments of a forward, of which the work is told; else it is that of a language model's step, or of
    one product with every matrix where an engine runs the steps.
    """
    by_alias, told = _groups(homes), hosted or Hosted(blocks=())
    coded = frozenset(homes.layouts)
    weights = weights_of(by_alias, by_row=homes.by_row, coded_in_files=coded, movable=homes.movable, kept=told.kept)
    planner = Planner(config=config, machine=machine, weights=weights)
    model = told.model or model
    found = prospect_of(model if _generates(model) else None, by_alias, grains, planner, told.observe)
    found = replace(found, whole=why_whole(model))
    found = _hosted(found, hosted) if hosted and hosted.model is None else _with_share(found, told.share)
    if example is not None:
        found = with_facts(found, homes, backend, memories, progress)  # a trial shares the device with no compiler
        known = foreseen(found, by_alias, grains, model, backend, *example)
        if known is None:
            logger.warning("example_inputs tell nothing of %s ahead: its first steps will", type(model).__name__)
        found = known or found
    return with_facts(found, homes, backend, memories, progress)


def _hosted(prospect: Prospect, hosted: Hosted) -> Prospect:
    """The same for layers whose steps an engine runs."""
    planner = prospect.planners[0]
    rows = planner.config.batch * planner.config.tokens
    if hosted.in_graphs:
        planner = replace(planner, machine=replace(planner.machine, profile=planner.machine.profile.without_host()))
    kept = {alias for alias, names in planner.weights.names.items() if not hosted.kept.isdisjoint(names)}
    demands = (replace(planner.demand, work=_products(grain, rows), captured={}) for grain in prospect.grains)
    return replace(
        prospect,
        grains=tuple(grain.keeping(kept) for grain in prospect.grains),
        planners=tuple(replace(planner, demand=demand) for demand in demands),
    )


def _with_share(prospect: Prospect, share: float) -> Prospect:
    """The same with so much of the cache."""
    every = [(planner, int(share * planner.demand.cache_nbytes)) for planner in prospect.planners]
    planners = (replace(planner, demand=replace(planner.demand, cache_nbytes=nbytes)) for planner, nbytes in every)
    return replace(prospect, planners=tuple(planners))


def _products(manifest: Manifest, rows: int) -> dict[str, tuple[Op, ...]]:
    """The work of units in which so many rows are multiplied by every matrix; of stacks of them, such as experts, not
    all are used, and all may be read."""

    def op(shape: tuple[int, ...], dtype: str, nbytes: int) -> Op:
        rate = _RATES.get(dtype, "none") if len(shape) == 2 else "none"
        return Op(rate=rate, flops=2.0 * rows * math.prod(shape), nbytes=nbytes)

    units = ((unit.name, [t for t in unit.tensors if len(t.shape) > 1]) for unit in manifest.units)
    return {name: tuple(op(t.shape, t.dtype, t.nbytes) for t in tensors) for name, tensors in units}


def _groups(homes: Homes) -> dict[str, Group]:
    return {alias: home.group for alias, home in homes.homes.items()}


def with_facts(
    prospect: Prospect, homes: Homes, backend: Backend, memories: Sequence[Memory], progress: bool | None = None
) -> Prospect:
    """The same with what takes time to find out, as far as a plan may depend on it and nobody has found it out yet."""
    planner, plain = prospect.planners[-1], prospect.grains[-1]
    machine, weights = planner.machine, planner.weights
    is_open = planner.may_code(plain) and not weights.codes
    dtypes = _codable(_groups(homes)) if is_open else ()
    if dtypes and can_decode(backend, planner.config, dtypes, progress):
        for memory in memories:
            memory.check()
        codes = sizes_of(_groups(homes), homes.layouts, homes.in_parts, weights.by_row)
        machine, weights = with_decode_rates(machine, backend, dtypes, progress), replace(weights, codes=codes)
    if machine.disk_bytes_per_s is None and planner.may_use_disk(plain):
        machine = replace(machine, disk_bytes_per_s=bench.rate_of_files(homes.files))
    planners = (replace(planner, machine=machine, weights=weights) for planner in prospect.planners)
    return replace(prospect, planners=tuple(planners))


def foreseen(
    prospect: Prospect,
    by_alias: Mapping[str, Group],
    grains: Grains,
    model: nn.Module,
    backend: Backend,
    args: Any,
    kwargs: Any,
    entry: str = "forward",
) -> Prospect | None:
    """The same for the work of one call with these arguments, in the order in which units run; None: nothing tells.

    `entry`: the method that is called. Neither the model nor the arguments change. It takes a few seconds at most.
    """
    try:
        found = follow(model, args, kwargs, entry=entry, limit_s=_FOLLOW_S, device=backend.device)
    except UnsupportedError as error:
        logger.info("the work of this call is not known before it ran: %s", error)
        return None
    known, is_text = tried(found, prospect, backend), prospect.planners[0].demand.is_text
    return with_work(prospect, by_alias, grains, known, is_part=entry != "forward", is_text=is_text)


def tried(found: Footprint, prospect: Prospect, backend: Backend) -> Footprint:
    """The same with what its operators took in a trial; on a CPU a step takes as long as one, and tells more."""
    if backend.device.type == "cpu":
        return found
    return found.tried(op_timing.time_ops(found.launches, prospect.planners[0].machine.profile, backend))


def with_work(
    prospect: Prospect,
    by_alias: Mapping[str, Group],
    grains: Grains,
    found: Footprint,
    workload: Workload | None = None,
    *,
    is_part: bool = False,
    is_text: bool = False,
) -> Prospect:
    """The same for a step that was followed; weights that units read outside of them are to stay on the device.

    `is_part`: other steps run other units, so that the order is of all of them. `is_text`: text from graphs is behind.
    """
    aliases = {id(m.tensor): alias for alias, group in by_alias.items() for m in group.members}
    nbytes = {name: getattr(found, name) for name in ("activation_nbytes", "cache_nbytes")}
    # a graph can only hold copies of pinned memory
    is_text |= found.captured is not None and prospect.planners[0].config.pin_memory
    known = Demand(workload=workload, states_nbytes=found.states_nbytes(grains[0]), is_text=is_text, **nbytes)
    manifests, planners = [], []
    for units, grain, planner in zip(grains, prospect.grains, prospect.planners, strict=True):
        steps = (found, found.captured) if found.captured is not None else (found,)
        work, *captured = ({u.name: ops for u, ops in zip(units, f.work(units), strict=True)} for f in steps)
        planners.append(replace(planner, demand=replace(known, work=work, captured=captured[0] if captured else {})))
        order, outside = found.order(units), {aliases[id(t)] for t in found.outside(units) if id(t) in aliases}
        # What a call leaves out it does not need; but a made-up step of text says nothing of images.
        is_all = len(set(order)) == len(units) or (workload is None and order and not is_part)
        manifests.append((replace(grain, order=order) if is_all else grain).keeping(outside))
    return replace(prospect, grains=tuple(manifests), planners=tuple(planners))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sketch:
    """A model of which shapes are known, its weights in units of each grain, and what is planned with."""

    model: nn.Module
    by_alias: dict[str, Group]
    grains: Grains
    prospect: Prospect

    def knowing(self, work: Footprint, entry: str) -> Prospect:
        """The prospect for the work of a call that was followed."""
        return with_work(self.prospect, self.by_alias, self.grains, work, is_part=entry != "forward")

    def with_facts(self, prospect: Prospect) -> Prospect:
        """The same: nothing more can be found out."""
        return prospect


def sketch_of(
    model: nn.Module, checkpoint: Checkpoint | None, config: OffloadConfig, machine: Machine, told: Hosted | None = None
) -> Sketch:
    """What is planned with for a model on meta, or one whose tensors nobody has read, or for what is one device's of a
    model over several; `checkpoint`: the files of its weights, where these are here."""
    by_alias = groups(model, allow_meta=True)
    entries = checkpoint.entries if checkpoint is not None else {}
    layouts = {name: entry.layout for name, entry in entries.items() if entry.layout is not None}
    coded = _coded_in_files(by_alias, layouts) if layouts and config.uses_codes and machine.can_decode else {}
    by_row, movable = tables_of(model, by_alias), frozenset(by_alias)
    codes = sizes_of(by_alias, coded, {}, by_row) if config.uses_codes else {}
    weights = weights_of(by_alias, by_row=by_row, movable=movable, coded_in_files=frozenset(coded), codes=codes)
    planner = Planner(config=config, machine=machine, weights=weights)
    grains = grains_of(model, by_alias, None, list(told.blocks) if told else None)
    told = told or Hosted(blocks=())
    found = prospect_of(told.model or model, by_alias, grains, planner, told.observe)
    found = _with_share(replace(found, whole=why_whole(model)), told.share)
    return Sketch(model=model, by_alias=by_alias, grains=grains, prospect=found)


def _coded_in_files(by_alias: Mapping[str, Group], layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Of the groups that are one tensor of a file, as it is there: transformers may convert the others."""
    found: dict[str, Layout] = {}
    for alias, group in by_alias.items():
        spec = group.members[0].spec
        layout = next((layouts[name] for m in group.members for name in m.names if name in layouts), None)
        if layout is not None and (layout.dtype, layout.raw_nbytes) == (spec.dtype, group.nbytes):
            found[alias] = layout
    return found


def grains_of(
    model: nn.Module,
    by_alias: dict[str, Group],
    grains: Sequence[Grain] | None = None,
    blocks: list[nn.Module] | None = None,
) -> Grains:
    """The units of a model in each of these grains, else in every one; `blocks` are those that the caller knows."""
    return [merge_tied(find_units(model, grain, blocks), by_alias) for grain in grains or GRAINS]


def prospect_of(
    model: nn.Module | None, by_alias: dict[str, Group], grains: Grains, planner: Planner, observes: Observe = observe
) -> Prospect:
    """What is planned with a model in these grains: the step of a language model, or one of which nothing is known."""
    manifests = tuple(manifest(units, by_alias) for units in grains)
    found = Prospect(grains=manifests, planners=(planner,) * len(grains))
    config, settings = planner.config, getattr(model, "config", None)
    if model is None or settings is None:
        return found
    positions = getattr(settings, "max_position_embeddings", None) or _CONTEXT
    usual = min(_CONTEXT if _generates(model) else _TEXT, positions)
    context = max(config.tokens, config.context or usual)
    tokens = config.tokens if _generates(model) else context  # what does not generate is given all at once
    workload = Workload(batch=config.batch, tokens=tokens, context=context)
    try:
        return with_work(found, by_alias, grains, observes(model, workload), workload)
    except UnsupportedError as error:
        logger.info("activations and compute times are not known before the first step: %s", error)
        return found


def _generates(model: nn.Module) -> bool:
    """Whether the steps of a model are those of a language model; the work of any other is told by its first call."""
    return bool(getattr(model, "can_generate", bool)())


def weights_of(by_alias: Mapping[str, Group], **facts: Any) -> Weights:
    """What a planner is told of these groups."""
    names = {alias: tuple(name for m in group.members for name in m.names) for alias, group in by_alias.items()}
    return Weights(names=names, **facts)


def sizes_of(
    by_alias: Mapping[str, Group],
    coded: Mapping[str, Layout],
    in_parts: Mapping[str, Sequence[torch.Tensor]],
    by_row: frozenset[str],
) -> Sizes:
    """What those of these groups that can be compressed take then. Reads samples of the weights.

    `coded` are those that are compressed in a file, `in_parts` the bytes of those whose memory holds none yet.
    """
    every = ((a, _size(group, coded.get(a), in_parts.get(a))) for a, group in by_alias.items() if a not in by_row)
    return {alias: nbytes for alias, nbytes in every if nbytes is not None}


def _size(group: Group, layout: Layout | None, parts: Sequence[torch.Tensor] | None) -> int | None:
    """The bytes of a compressed group: in a file, from a sample, or assumed; parameters can be compressed."""
    dtype = group.members[0].spec.dtype
    if layout is not None:
        return layout.nbytes
    if dtype not in ELEMENTS or any(m.spec.dtype != dtype or m.role is not Role.PARAMETER for m in group.members):
        return None
    if not group.home.is_meta:
        return estimate(parts or [group.home], dtype)
    count = group.nbytes // ELEMENTS[dtype].nbytes
    least = Layout(dtype=dtype, count=count, num_escapes=0).nbytes
    return max(least, aligned(round(count * ASSUMED_BITS[dtype] / 8)))


def tables_of(model: nn.Module, by_alias: dict[str, Group]) -> frozenset[str]:
    """Alias groups of which a step reads a few rows."""
    rows = row_tables(model)
    return frozenset(a for a, group in by_alias.items() if all(id(m.tensor) in rows for m in group.members))
