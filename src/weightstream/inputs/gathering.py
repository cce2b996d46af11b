"""Gathers the planner's inputs of one model: its weights and units, the work of a step, the machine. Decides nothing.

Slow steps (sampling weights, compiling kernels, measuring the speed of files) are taken only where a plan within the
budget can depend on their result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from weightstream.adapters.hf.packed_formats import unpack_kernels_of
from weightstream.adapters.modules.moe import PicksOf, picks_of, why_whole
from weightstream.adapters.modules.partition import GRAINS, Grain, called, find_blocks, find_units, row_tables
from weightstream.adapters.tracing import op_timing
from weightstream.adapters.tracing.footprint import Footprint, follow, observe, observe_passes
from weightstream.adapters.tracing.training import TrainingFootprint, follow_training
from weightstream.adapters.tracing.training_step import trained_of
from weightstream.codec.estimate import ASSUMED_BITS, estimate
from weightstream.codec.format import ELEMENTS, Layout
from weightstream.errors import UnsupportedError
from weightstream.inputs.machine import can_decompress, compressible_dtypes, with_decode_rates, with_unpack_rates
from weightstream.measure import bench
from weightstream.plan.coding import Sizes
from weightstream.plan.manifest import Manifest, Op, Rate, TensorSpec, UnitSpec, Workload
from weightstream.plan.planner import Demand, Machine, Training, Weights
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.schedule import TRAIN, aligned
from weightstream.plan.speculation import MOST_ROWS, WIDTHS
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.tensors.leaves import Role
from weightstream.runtime.weights.alias_groups import Group, UnitModule, groups, manifest, merge_tied
from weightstream.runtime.weights.homes import Homes
from weightstream.settings.config import OffloadConfig, TrainConfig
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.mapping import Memory

logger = logging.getLogger("weightstream")

_TEXT = 512  # tokens of an encoder's input, unless configured
_CONTEXT = 4096  # positions to plan for, unless configured, if the model has that many
_LOGITS_COPIES, _FLOAT_NBYTES = 2, 4  # of a pass that verifies drafts: transformers' loop keeps two, in float32
_FOLLOW_S = 5.0  # limit for tracing a call on shapes; FLUX.1's transformer takes 0.4 s
Grains = list[list[UnitModule]]
Work = TypeVar("Work", Footprint, TrainingFootprint)
Observe = Callable[[nn.Module, Workload], Footprint]
_RATES: Mapping[str, Rate] = MappingProxyType({"bfloat16": "half", "float16": "half", "float32": "single"})


class Example(NamedTuple):
    """Arguments of a call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSubset:
    """Layers of a model that are offloaded without the rest: those that an engine runs, or one device's of several.

    Attributes:
        blocks: the layers.
        kept: names of tensors that stay on the device.
        grains: how layers may be cut into units; parts of layers only where a step is watched before addresses are
            fixed.
        in_graphs: steps are CUDA graphs, in which the host launches no kernel.
        model: the model that the layers are part of, whose steps are planned for; None: an engine runs them.
        cache_share: the share of the model's cache that belongs to the layers.
        elsewhere: whether another device computes a block; None: what is in no block.
        observe: returns the work of the model's step; shared by all devices, so that the step is traced once.
        picks_of: how a module reads single rows of its stacks.
    """

    blocks: tuple[nn.Module, ...]
    kept: frozenset[str] = frozenset()
    grains: tuple[Grain, ...] = ("block",)
    in_graphs: bool = False
    model: nn.Module | None = None
    cache_share: float = 1.0
    elsewhere: Mapping[nn.Module | None, bool] = field(default_factory=dict)
    observe: Observe = observe
    picks_of: PicksOf = picks_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedWeights:
    """The places of a loaded model's weights. Facts that are slow to find, such as compressed sizes, are read there.

    Attributes:
        homes: the homes of its alias groups.
        memories: file mappings and lazily filled memories that its weights are views of.
        progress: whether to show progress; None: only if stderr is a terminal.
    """

    homes: Homes
    memories: Sequence[Memory] = ()
    progress: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gatherer:
    """Gathers the planner's inputs of one model.

    Attributes:
        model: the module whose units are planned.
        by_alias: its weights.
        grains: its units in each grain.
        weights: where its weights may be placed.
        backend: the device on which operators can be timed; None: operators are not timed.
        loaded: the places of its weights; None for a model on meta.
        subset: the layers to offload; None: the whole model.
    """

    model: nn.Module
    by_alias: dict[str, Group]
    grains: Grains
    weights: Weights
    backend: Backend | None = None
    loaded: LoadedWeights | None = None
    subset: LayerSubset | None = None

    @property
    def called(self) -> nn.Module:
        """The module whose calls are planned."""
        whole = self.subset.model if self.subset is not None else None
        return self.model if whole is None else whole

    def aliases_of(self, tensors: Collection[int]) -> frozenset[str]:
        """The alias groups of the tensors with these ids."""
        every = self.by_alias.items()
        return frozenset(alias for alias, group in every if any(id(m.tensor) in tensors for m in group.members))

    def gather(self, config: OffloadConfig, machine: Machine, example: Example | None = None) -> PlannerInputs:
        """The inputs for the model's usual step, or for a forward with the arguments of `example`.

        The usual step of a language model is a decode step, or a training step if the config asks for one. For layers
        that an engine runs, it is a product with every matrix. For any other model, the work of a step is unknown
        before its first call.
        """
        # complete the inputs first: this waits for threads that compile kernels, which would disturb the timing of the
        # example's operators on the device
        inputs = self.complete(self._usual_step(config, machine))
        if example is None:
            return inputs
        entry = "forward" if config.train is None else TRAIN
        for_example = self.for_call(inputs, entry, example.args, example.kwargs)
        if for_example is None:
            logger.warning(
                "a call of %s with example_inputs cannot be traced: its first steps show its work",
                type(self.called).__name__,
            )
        return for_example or inputs

    def with_passes(self, inputs: PlannerInputs, most: int = MOST_ROWS) -> PlannerInputs:
        """The inputs with the work and the memory of passes of several tokens, up to `most`; unchanged where these
        cannot be traced, as for a model whose cache cannot be cropped."""
        workload = _workload(self.called, inputs.config) if self.subset is None else None
        if workload is None or not _generates(self.called):
            return inputs
        try:
            found = observe_passes(self.called, workload, [width for width in WIDTHS if width <= most])
        except UnsupportedError as error:
            logger.info("passes of several tokens are not planned for: %s", error)
            return inputs
        settings: Any = self.called.config
        words, positions = settings.get_text_config().vocab_size, workload.context + max(found)
        passes = {
            width: tuple(
                Demand(
                    workload=replace(workload, batch=1, tokens=width),
                    work=_by_unit(work, units),
                    activation_nbytes=work.activation_nbytes + _LOGITS_COPIES * width * words * _FLOAT_NBYTES,
                    cache_nbytes=work.cache_nbytes * (workload.context + width) // positions,  # traced with the most
                    is_text=inputs.config.pin_memory,
                )
                for units in self.grains
            )
            for width, work in found.items()
        }
        return replace(inputs, passes=passes)

    def for_call(self, inputs: PlannerInputs, entry: str, args: Any, kwargs: Any) -> PlannerInputs | None:
        """The inputs for one call of the method `entry`, with its units in the order in which they run. The entry
        `TRAIN` is a forward with its backward.

        None if the call cannot be traced. Neither the model nor the arguments change. Takes a few seconds at most.
        """
        if inputs.demands[0].training is not None and entry != TRAIN:
            return None  # an evaluation in between: the plan is one for training
        if entry == TRAIN:
            found = self._trained(inputs, Example(args, kwargs))
            return None if found is None else self.complete(found)
        device = self.backend.device if self.backend is not None else torch.device("cpu")
        try:
            work = follow(self.called, args, kwargs, entry=entry, limit_s=_FOLLOW_S, device=device)
        except UnsupportedError as error:
            logger.info("the work of this call is unknown before it runs: %s", error)
            return None
        work = self._timed(work, inputs.machine)
        is_text = inputs.demands[0].is_text
        return self.complete(self._with_work(inputs, work, is_part=entry != "forward", is_text=is_text))

    def for_work(self, inputs: PlannerInputs, work: Footprint, entry: str) -> PlannerInputs:
        """The inputs for a call of the method `entry`, whose trace is `work`."""
        return self._with_work(inputs, self._timed(work, inputs.machine), is_part=entry != "forward")

    def complete(self, inputs: PlannerInputs) -> PlannerInputs:
        """The inputs with facts that are slow to find: those that are missing and that a plan can depend on."""
        loaded, backend, machine, weights = self.loaded, self.backend, inputs.machine, inputs.weights
        if loaded is None or backend is None:
            return inputs
        homes = loaded.homes
        dtypes = compressible_dtypes(self.by_alias) if inputs.may_compress and not weights.codes else frozenset[str]()
        if dtypes and can_decompress(backend, inputs.config, dtypes, loaded.progress):
            for memory in loaded.memories:
                memory.check()
            sizes = sizes_of(self.by_alias, homes.layouts, homes.in_parts, weights.by_row)
            machine = with_decode_rates(machine, backend, dtypes, loaded.progress)
            weights = replace(weights, codes=sizes)
        machine = with_unpack_rates(machine, backend, unpack_kernels_of(self.model), loaded.progress)
        if machine.disk_bytes_per_s is None and inputs.may_use_disk:
            machine = replace(machine, disk_bytes_per_s=bench.rate_of_files(homes.files))
        return replace(inputs, machine=machine, weights=weights)

    def _usual_step(self, config: OffloadConfig, machine: Machine) -> PlannerInputs:
        subset = self.subset
        grains = tuple(manifest(units, self.by_alias) for units in self.grains)
        if subset is not None and subset.model is None:
            return self._engine_step(config, machine, grains, subset)
        inputs = PlannerInputs(
            config=config,
            machine=machine,
            weights=self.weights,
            grains=grains,
            demands=(Demand(),) * len(grains),
            whole_experts=why_whole(self.called),
        )
        if config.train is not None:
            return self._trained(inputs) or inputs
        # the calls of a loaded model that is none of language have shapes of their own: traced when they come
        if self.loaded is not None and not _generates(self.called):
            return inputs
        workload = _workload(self.called, config)
        if workload is None:
            return inputs
        try:
            work = (subset.observe if subset is not None else observe)(self.called, workload)
        except UnsupportedError as error:
            logger.info("activations and compute times are unknown before the first step: %s", error)
            return inputs
        inputs = self._with_work(inputs, work, workload)
        if subset is None:
            return inputs
        cache_nbytes = int(subset.cache_share * inputs.demands[0].cache_nbytes)
        return replace(inputs, demands=tuple(replace(demand, cache_nbytes=cache_nbytes) for demand in inputs.demands))

    def _trained(self, inputs: PlannerInputs, call: Example | None = None) -> PlannerInputs | None:
        """The inputs for a training step: of a call, or of token ids; None if a call cannot be traced."""
        train = inputs.config.train or TrainConfig()
        blocks = called(find_blocks(self.called))
        trained = trained_of(self.called, train.rank, blocks)
        # adapters that the model has already are among its weights
        held_nbytes = 0 if trained.num_added else sum(p.nbytes for p in self.called.parameters() if p.requires_grad)
        training = Training(
            num_trained=trained.num,
            trained_nbytes=max(0, train.parameter_nbytes * trained.num - held_nbytes),
            recomputes=train.checkpoints,
        )
        tokens = min(train.tokens, _positions(self.called) or train.tokens)
        workload = Workload(batch=train.batch, tokens=tokens, context=tokens, trains=True) if call is None else None
        if not train.checkpoints and self._is_single():
            logger.warning(
                "train: the weights are float32, without checkpoints: under autocast, autograd keeps a cast of each of "
                "them, which is not planned for. Load the model in bfloat16"
            )
        if tokens < train.tokens and workload is not None:
            logger.warning("train: %d tokens are planned for, as the model has no more positions", tokens)
        try:
            work = self._followed(train, blocks, call)
            checkpointed_nbytes = 0
            if not work.recomputes:
                other = self._followed(train.model_copy(update={"checkpoints": True}), blocks, call)
                checkpointed_nbytes = other.step.activation_nbytes
        except UnsupportedError as error:
            logger.info("activations and compute times of training are unknown before the first step: %s", error)
            if call is not None:
                return None
            return self._turned(inputs, training, workload if _generates(self.called) else None)
        training = replace(
            training,
            loss_nbytes=work.loss_nbytes,
            recomputes=work.recomputes,
            checkpointed_nbytes=checkpointed_nbytes,
        )
        return self._with_training(inputs, self._timed(work, inputs.machine), training, workload)

    def _is_single(self) -> bool:
        """Whether most of the weights are float32."""
        every = [(p.nbytes, p.dtype) for p in self.called.parameters()]
        return 2 * sum(n for n, dtype in every if dtype is torch.float32) > sum(n for n, _ in every)

    def _followed(self, train: TrainConfig, blocks: Sequence[nn.Module], call: Example | None) -> TrainingFootprint:
        device = self.backend.device if self.backend is not None else torch.device("cpu")
        args, kwargs = call or (None, None)
        limit_s = math.inf if call is None else _FOLLOW_S
        return follow_training(self.called, train, blocks, args, kwargs, limit_s=limit_s, device=device)

    def _turned(self, inputs: PlannerInputs, training: Training, workload: Workload | None) -> PlannerInputs:
        """The inputs for a training step of unknown work, which is assumed to run all units forward and back."""
        kept = self._trained_aliases()
        grains = tuple(
            replace(grain, order=(*grain.order, *reversed(grain.order))).keeping(kept) for grain in inputs.grains
        )
        demands = tuple(
            Demand(workload=workload, training=replace(training, forward_order=grain.order)) for grain in inputs.grains
        )
        return replace(inputs, grains=grains, demands=demands, passes={})

    def _with_training(
        self, inputs: PlannerInputs, work: TrainingFootprint, training: Training, workload: Workload | None
    ) -> PlannerInputs:
        """The inputs for a training step that was traced. Trained weights stay on the device, as do weights that are
        read outside of their units."""
        aliases = self._alias_of_tensor()
        trained = self._trained_aliases()
        manifests, demands = [], []
        for units, grain in zip(self.grains, inputs.grains, strict=True):
            turns, names = work.turns(units), [unit.name for unit in units]
            of_grain = replace(
                training,
                backward=dict(zip(names, turns.backward, strict=True)),
                forward_order=tuple(visit.unit for visit in turns.visits if not visit.is_backward),
            )
            demand = Demand(
                workload=workload,
                work=dict(zip(names, turns.forward, strict=True)),
                activation_nbytes=work.step.activation_nbytes,
                training=of_grain,
            )
            outside = {aliases[id(tensor)] for tensor in work.step.outside(units) if id(tensor) in aliases}
            manifests.append(replace(grain, order=turns.order or grain.order).keeping(outside | trained))
            demands.append(demand)
        return replace(inputs, grains=tuple(manifests), demands=tuple(demands), passes={})

    def _alias_of_tensor(self) -> dict[int, str]:
        """The alias group of each tensor object, by its `id()`."""
        return {id(m.tensor): alias for alias, group in self.by_alias.items() for m in group.members}

    def _trained_aliases(self) -> frozenset[str]:
        """The alias groups that are trained, of a model in which others are frozen."""
        are_trained = {p.requires_grad for p in self.called.parameters() if p.is_floating_point()}
        if len(are_trained) < 2:
            return frozenset()
        every = self.by_alias.items()
        return frozenset(alias for alias, group in every if any(member.requires_grad for member in group.members))

    def _engine_step(
        self, config: OffloadConfig, machine: Machine, grains: tuple[Manifest, ...], subset: LayerSubset
    ) -> PlannerInputs:
        if subset.in_graphs:
            machine = replace(machine, profile=machine.profile.without_host())
        kept = {alias for alias, names in self.weights.names.items() if not subset.kept.isdisjoint(names)}
        return PlannerInputs(
            config=config,
            machine=machine,
            weights=self.weights,
            grains=tuple(grain.keeping(kept) for grain in grains),
            demands=tuple(_engine_demand(grain, config) for grain in grains),
            whole_experts=why_whole(self.model, subset.picks_of),
        )

    def _timed(self, work: Work, machine: Machine) -> Work:
        """The work with the measured seconds of its operators.

        On a CPU the work stays as it is: timing its operators would take as long as a real step.
        """
        if self.backend is None or self.backend.device.type == "cpu":
            return work
        return work.tried(op_timing.time_ops(work.launches, machine.profile, self.backend))

    def _with_work(
        self,
        inputs: PlannerInputs,
        work: Footprint,
        workload: Workload | None = None,
        *,
        is_part: bool = False,
        is_text: bool = False,
    ) -> PlannerInputs:
        """The inputs for a step that was traced. Weights that are read outside of their units stay on the device.

        `is_part`: the call is one of several kinds of steps, and others may run the units that it skips. So unless it
        ran all units, the order of the grain stays. `is_text`: the model later generates text in CUDA graphs.
        """
        aliases = self._alias_of_tensor()
        # a CUDA graph can only contain copies of pinned memory
        is_text |= work.captured is not None and inputs.config.pin_memory
        elsewhere = {} if self.subset is None else self.subset.elsewhere
        manifests, demands = [], []
        for units, grain in zip(self.grains, inputs.grains, strict=True):
            captured = {} if work.captured is None else _by_unit(work.captured, units, elsewhere)
            demand = Demand(
                workload=workload,
                work=_by_unit(work, units, elsewhere),
                captured=captured,
                activation_nbytes=work.activation_nbytes,
                cache_nbytes=work.cache_nbytes,
                states_nbytes=work.states_nbytes(self.grains[0]),
                is_text=is_text,
            )
            order = work.order(units)
            outside = {aliases[id(tensor)] for tensor in work.outside(units) if id(tensor) in aliases}
            # Take over the order of the traced step if it ran all units, or if it is a real call: that needs none of
            # the units that it skips. A synthetic step, made from a workload, is of text only: images may need them.
            has_order = len(set(order)) == len(units) or (workload is None and order and not is_part)
            manifests.append((replace(grain, order=order) if has_order else grain).keeping(outside))
            demands.append(demand)
        return replace(inputs, grains=tuple(manifests), demands=tuple(demands))


def gatherer_of_homes(
    model: nn.Module,
    homes: Homes,
    backend: Backend,
    grains: Grains,
    *,
    memories: Sequence[Memory] = (),
    subset: LayerSubset | None = None,
    progress: bool | None = None,
) -> Gatherer:
    """The gatherer of a loaded model, whose weights are in these homes."""
    by_alias = {alias: home.group for alias, home in homes.homes.items()}
    weights = Weights(
        names=_names(by_alias),
        by_row=homes.by_row,
        coded_in_files=frozenset(homes.layouts),
        movable=homes.movable,
        kept=subset.kept if subset is not None else frozenset(),
    )
    return Gatherer(
        model=model,
        by_alias=by_alias,
        grains=grains,
        weights=weights,
        backend=backend,
        loaded=LoadedWeights(homes=homes, memories=memories, progress=progress),
        subset=subset,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sketch:
    """A model of which only shapes are known: it is on meta, or its weights are not read.

    Attributes:
        gatherer: its gatherer.
        inputs: its planner's inputs.
    """

    gatherer: Gatherer
    inputs: PlannerInputs


def sketch_of(
    model: nn.Module,
    checkpoint: Checkpoint | None,
    config: OffloadConfig,
    machine: Machine,
    subset: LayerSubset | None = None,
) -> Sketch:
    """The sketch of a model on meta, or of one whose weights must not be read.

    Args:
        model: the model.
        checkpoint: the files of its weights; None: they are not on this machine, or not needed.
        config: all settings.
        machine: the machine to plan for.
        subset: the layers of one device, if several share the model.
    """
    by_alias = groups(model, allow_meta=True)
    entries = checkpoint.entries if checkpoint is not None else {}
    layouts = {name: entry.layout for name, entry in entries.items() if entry.layout is not None}
    compressed = _compressed_in_files(by_alias, layouts) if config.uses_codes and machine.can_decode else {}
    by_row = tables_of(model, by_alias)
    weights = Weights(
        names=_names(by_alias),
        by_row=by_row,
        movable=frozenset(by_alias),
        coded_in_files=frozenset(compressed),
        codes=sizes_of(by_alias, compressed, {}, by_row) if config.uses_codes else {},
    )
    grains = grains_of(model, by_alias, None, list(subset.blocks) if subset is not None else None)
    gatherer = Gatherer(model=model, by_alias=by_alias, grains=grains, weights=weights, subset=subset)
    return Sketch(gatherer=gatherer, inputs=gatherer.gather(config, machine))


def grains_of(
    model: nn.Module,
    by_alias: dict[str, Group],
    grains: Sequence[Grain] | None = None,
    blocks: list[nn.Module] | None = None,
    picks_of: PicksOf = picks_of,
) -> Grains:
    """The units of a model in each of these grains; default: in every grain. `blocks` are its repeated blocks, if the
    caller knows them."""
    return [merge_tied(find_units(model, grain, blocks, picks_of), by_alias) for grain in grains or GRAINS]


def tables_of(model: nn.Module, by_alias: Mapping[str, Group]) -> frozenset[str]:
    """Alias groups of which a step reads a few rows."""
    rows = row_tables(model)
    return frozenset(a for a, group in by_alias.items() if all(id(m.tensor) in rows for m in group.members))


def sizes_of(
    by_alias: Mapping[str, Group],
    in_files: Mapping[str, Layout],
    in_parts: Mapping[str, Sequence[torch.Tensor]],
    by_row: frozenset[str],
) -> Sizes:
    """The compressed bytes of each alias group that can be compressed. Reads samples of the weights.

    Args:
        by_alias: the alias groups.
        in_files: the layouts of groups that are compressed in a file.
        in_parts: the bytes of groups whose memory is not filled yet.
        by_row: tables of which a step reads a few rows. They are left out.
    """
    sizes = {a: _size(group, in_files.get(a), in_parts.get(a)) for a, group in by_alias.items() if a not in by_row}
    return {alias: nbytes for alias, nbytes in sizes.items() if nbytes is not None}


def _size(group: Group, layout: Layout | None, parts: Sequence[torch.Tensor] | None) -> int | None:
    """The compressed bytes of a group: from a file, from a sample, or assumed. None: it cannot be compressed, as it is
    no parameter or its dtype has no code."""
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


def _compressed_in_files(by_alias: Mapping[str, Group], layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """The layouts of groups that are exactly one tensor of a file. Others may be converted by transformers."""
    in_files: dict[str, Layout] = {}
    for alias, group in by_alias.items():
        spec = group.members[0].spec
        layout = next((layouts[name] for m in group.members for name in m.names if name in layouts), None)
        if layout is not None and (layout.dtype, layout.raw_nbytes) == (spec.dtype, group.nbytes):
            in_files[alias] = layout
    return in_files


def _names(by_alias: Mapping[str, Group]) -> dict[str, tuple[str, ...]]:
    """All names of each alias group."""
    return {alias: tuple(name for m in group.members for name in m.names) for alias, group in by_alias.items()}


def _workload(model: nn.Module, config: OffloadConfig) -> Workload | None:
    """The step of a transformers model to plan for; None for any other model."""
    settings = getattr(model, "config", None)
    if settings is None:
        return None
    positions = _positions(model) or _CONTEXT
    usual = min(_CONTEXT if _generates(model) else _TEXT, positions)
    context = max(config.tokens, config.context or usual)
    tokens = config.tokens if _generates(model) else context  # an encoder takes the whole input in one step
    return Workload(batch=config.batch, tokens=tokens, context=context)


def _positions(model: nn.Module) -> int | None:
    """The most positions that a model takes; None: unknown."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def _generates(model: nn.Module) -> bool:
    """Whether the model generates text. Any other model shows its work in its first call."""
    return bool(getattr(model, "can_generate", bool)())


def _by_unit(
    work: Footprint, units: Sequence[UnitModule], elsewhere: Mapping[nn.Module | None, bool] = MappingProxyType({})
) -> dict[str, tuple[Op, ...]]:
    """The operators of each unit, by its name; `elsewhere` as for `Footprint.work`."""
    return {unit.name: ops for unit, ops in zip(units, work.work(units, elsewhere), strict=True)}


def _engine_demand(grain: Manifest, config: OffloadConfig) -> Demand:
    """The demand of an engine's step. Its workload matters only for experts that are named by ids."""
    work = _products(grain, config.batch * config.tokens)
    if not any(unit.ids_per_token for unit in grain.units):
        return Demand(work=work)
    context = max(config.tokens, config.context or _CONTEXT)
    return Demand(work=work, workload=Workload(batch=config.batch, tokens=config.tokens, context=context))


def _products(grain: Manifest, rows: int) -> dict[str, tuple[Op, ...]]:
    """The work of units in which `rows` rows are multiplied by every matrix.

    Stacks of matrices, such as experts, count with their bytes only: a step uses some of the matrices, but may read
    all. If its kernels take ids, it reads those that are named.
    """

    def op(unit: UnitSpec, tensor: TensorSpec) -> Op:
        if unit.ids_per_token and tensor.alias in unit.stacks:
            share = rows * unit.ids_per_token / tensor.shape[0]
            return Op(nbytes=round(min(1.0, share) * tensor.nbytes), picked=share)
        rate = _RATES.get(tensor.dtype, "none") if len(tensor.shape) == 2 else "none"
        return Op(rate=rate, flops=2.0 * rows * math.prod(tensor.shape), nbytes=tensor.nbytes)

    return {unit.name: tuple(op(unit, t) for t in unit.tensors if len(t.shape) > 1) for unit in grain.units}
