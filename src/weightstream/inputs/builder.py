"""The builder of an offloaded model: finds weights, gives them homes, gathers the planner's inputs, attaches a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from weightstream.adapters.diffusers.skipping import inner_forward, lifted
from weightstream.adapters.hf.lazy_dequant import unpack_late
from weightstream.adapters.hf.ranks import Ranks
from weightstream.adapters.modules import device_map
from weightstream.adapters.modules.partition import called, find_blocks
from weightstream.adapters.tracing import global_state
from weightstream.errors import ConfigError
from weightstream.inputs.gathering import Example, LayerSubset, gatherer_of_homes, grains_of, tables_of
from weightstream.inputs.machine import can_decompress, dtypes_to_compress, machine_of
from weightstream.measure import multi_gpu_links
from weightstream.measure.profile import doubt, prepare_decoding
from weightstream.measure.progress import lasting
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.units import human, some
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.devices.opening import pinned
from weightstream.runtime.ring.shared_memory import SharedMemory
from weightstream.runtime.ring.timeline import Kind
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.streamer.replanning import Replanning
from weightstream.runtime.streamer.streamer import Streamer
from weightstream.runtime.tensors.leaves import Role
from weightstream.runtime.tensors.undo import Undo
from weightstream.runtime.weights import alias_groups
from weightstream.runtime.weights.homes import Homes
from weightstream.settings.arguments import unmatched_patterns
from weightstream.settings.config import OffloadConfig
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import Memory

logger = logging.getLogger("weightstream")

_NAMED = 8  # tensors that a warning names


@dataclass(frozen=True, kw_only=True, slots=True)
class CallerFacts:
    """Facts about a model that its caller knows.

    Attributes:
        memories: file mappings and lazily filled memories that its weights are views of.
        folder: a folder that is deleted with the model.
        example: arguments of a call to plan for.
        ranks: the processes of tensor parallelism that hold the other shards.
        subset: the layers to offload, if they are not a model of their own.
        elsewhere: ids of tensors that are weights of another offloaded model.
        progress: whether to show progress; None: only if stderr is a terminal.
        most_rows: tokens of the widest pass that is planned for, if drafts are to be verified; 1: none are.
        restored: called once the model is plain again.
    """

    memories: Sequence[Memory] = ()
    folder: OffloadFolder | None = None
    example: Example | None = None
    ranks: Ranks | None = None
    subset: LayerSubset | None = None
    elsewhere: frozenset[int] = frozenset()
    progress: bool | None = None
    most_rows: int = 1
    restored: Callable[[], None] | None = None


def rooted(layers: Mapping[str, nn.Module]) -> nn.Module:
    """A module that contains only these layers, under their names."""
    root = nn.Module()
    for name, layer in layers.items():
        *outer, last = name.split(".")
        parent = root
        for part in outer:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, layer)
    return root


@contextmanager
def assembled(
    model: nn.Module, backend: Backend, config: OffloadConfig, facts: CallerFacts
) -> Iterator[OffloadBuilder]:
    """The builder of a model. If the block fails, the model is restored.

    Raises the errors of `offload`.
    """
    forward_patch.refuse_twice(model)
    alias_groups.refuse_unsupported(model)
    forward_patch.refuse_foreign(dict(model.named_modules()))
    alias_groups.leave_inference(model)
    closing = Undo()
    if facts.restored is not None:
        closing.add(facts.restored)
    by_alias: dict[str, alias_groups.Group] = {}
    builder: OffloadBuilder | None = None
    try:
        closing.add(unpack_late(model, backend.device))
        by_alias |= _weights(model, facts.elsewhere)
        builder = OffloadBuilder(model, backend, config, facts, closing, by_alias)
        yield builder
    except BaseException:
        closing()
        # While a handler holds the error, its traceback keeps these frames and their locals alive. The handler may
        # offload the model again: so these frames must hold no memory of the weights.
        if forward_patch.ATTRIBUTE not in vars(model):  # else a streamer is still attached, and uses it
            if builder is not None:
                builder.forget()
            _forget(by_alias)
        raise


def _forget(by_alias: Mapping[str, alias_groups.Group]) -> None:
    """Drop the references of these groups to the memory of the weights."""
    for group in by_alias.values():
        group.home = torch.empty(0, dtype=torch.uint8, device="cpu")
        group.members.clear()


class OffloadBuilder:
    """Prepares one model, and attaches a plan to it.

    Attributes:
        model: the module.
        gatherer: gathers the planner's inputs for calls of the model.
        inputs: the planner's inputs, for the usual step.
        known: kinds of calls that the inputs are for.
        recast: casts the component when diffusers asks for another dtype; None: the model is in no pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        config: OffloadConfig,
        facts: CallerFacts,
        closing: Undo,
        by_alias: dict[str, alias_groups.Group],
    ) -> None:
        self.model = model
        self.known: frozenset[Kind] = frozenset()
        self.recast: device_map.Recast | None = None
        self._backend = backend
        self._config = config
        self._facts = facts
        self._closing = closing  # runs once the model is plain again
        self._by_alias = by_alias
        expected = dtypes_to_compress(by_alias, backend, config, among=facts.ranks is not None)
        prepare_decoding(backend.device, expected, facts.progress)
        if any(m.role is Role.ATTRIBUTE for group in self._by_alias.values() for m in group.members):
            closing.add(global_state.forget_cached, model)  # caches that depend on the earlier device of a tensor
        # a folder per model: another model may have weights of the same names
        spill = OffloadFolder(config.offload_folder) if config.offload_folder is not None else None
        arena, pages = pinned(backend, config)
        self._homes = Homes(
            self._by_alias,
            backend,
            empty=alias_groups.empty_tensors(model),
            mappings=facts.memories,
            arena=arena,
            pages=pages if facts.memories else None,  # other weights are not in files
            spill=spill,
            by_row=tables_of(model, self._by_alias),
        )
        subset = facts.subset
        self._blocks = list(subset.blocks) if subset else find_blocks(model)
        how = (subset.grains, self._blocks, subset.picks_of) if subset else (None, self._blocks)
        grains = grains_of(model, self._by_alias, *how)
        machine = machine_of(backend, config, self._homes, facts.progress, expected)
        if facts.ranks is not None:
            config, machine = _agreed(facts.ranks, backend, config, machine)
        self.gatherer = gatherer_of_homes(
            model,
            self._homes,
            backend,
            grains,
            memories=facts.memories,
            subset=subset,
            progress=facts.progress,
        )
        self.inputs = self.gatherer.gather(config, machine, facts.example)
        if facts.most_rows > 1:
            self.inputs = self.gatherer.with_passes(self.inputs, facts.most_rows).with_memory_of(facts.most_rows)
        if expected and backend.device.type == "cuda":
            # the caller may capture next: wait for threads that compile, as they use the device
            can_decompress(backend, config, expected, facts.progress)
        for owned in (facts.folder, spill):
            if owned is not None:
                closing.add(owned.close)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._backend.device

    def close(self) -> None:
        """Restore a model to which no plan is attached. Another builder may be made for it then."""
        self._closing()
        self.forget()
        _forget(self._by_alias)

    def forget(self) -> None:
        """Drop all references to the memory of the weights."""
        for home in self._homes.homes.values():
            home.forget()

    @property
    def elsewhere(self) -> frozenset[int]:
        """Ids of tensors of the model that are weights of another model."""
        return self._facts.elsewhere

    def plan_with(self, inputs: PlannerInputs) -> None:
        """Replace the planner's inputs. The new inputs have the same grains, or only the coarsest ones."""
        self.inputs = inputs
        self.gatherer = replace(self.gatherer, grains=self.gatherer.grains[: len(inputs.grains)])

    def attach(
        self,
        plan: Plan,
        block: SharedMemory | None = None,
        entries: Sequence[str] = (),
        on_added: Callable[[], None] | None = None,
    ) -> Streamer:
        """Put the plan in force.

        Args:
            plan: the plan.
            block: memory that several models use in turn.
            entries: the methods of the model that start a step, besides its forward.
            on_added: as for `Streamer.on_added`, for models that share a budget.
        """
        if block is None and (short := self.inputs.shortage(plan)):  # shared memory counts once, for all models
            logger.warning("device memory may run out: %s", short)
        # passing a bound method keeps the builder alive as long as its streamer: a pipeline has only weak references
        replanning = Replanning(
            self.inputs,
            self._inputs_for_call,
            partial(doubt, self._backend.device),
            self.known,
            self._inputs_with_passes,
        )
        is_whole = self._facts.subset is None
        with (
            lasting(f"moving {human(plan.manifest.nbytes)} of weights", self._facts.progress),
            lifted(self.model) if is_whole else nullcontext(),
        ):
            streamer = Streamer(
                self.model,
                self.gatherer.grains,
                self._homes,
                self._backend,
                replanning,
                plan,
                called(self._blocks),
                self._closing,
                block=block,
                entries=entries,
                # a block of another GPU copies its inputs there, which it may not skip
                inner_forward=inner_forward if is_whole else forward_patch.outermost,
            )
        try:
            self._finish(streamer, replanning, on_added)
        except BaseException:
            streamer.remove()
            raise
        return streamer

    def _inputs_for_call(self, inputs: PlannerInputs, entry: str, args: Any, kwargs: Any) -> PlannerInputs | None:
        return self.gatherer.for_call(inputs, entry, args, kwargs)

    def _inputs_with_passes(self, inputs: PlannerInputs) -> PlannerInputs:
        return self.gatherer.with_passes(inputs)

    def _finish(self, streamer: Streamer, replanning: Replanning, on_added: Callable[[], None] | None) -> None:
        def budget() -> int | None:
            planned = replanning.inputs.budget
            return planned if planned is None else planned + streamer.plan.trained_nbytes  # adapters are planned for

        budget_check = BudgetCheck(lambda: streamer.stats().held_nbytes["device"], budget)
        streamer.on_added(on_added or budget_check.check)
        if streamer.plan.manifest.codes and self._backend.device.type == "cuda":
            cuda.give_back(workspaces=False)  # memory that compressing took
        self._closing.add(device_map.attach_device_map(self.model, self._backend.device, self.recast))
        self._closing.add(streamer.place_added, None)  # added tensors, such as adapters, follow the weights back
        _report(streamer.plan, self._config)
        if self.inputs.whole_experts and streamer.plan.offloaded_nbytes:
            logger.warning("%s", self.inputs.whole_experts)


class BudgetCheck:
    """Warns once if tensors that were added after planning exceed the budget."""

    def __init__(self, held_nbytes: Callable[[], int], budget: Callable[[], int | None]) -> None:
        self._held_nbytes = held_nbytes
        self._budget = budget
        self._has_warned = False

    def check(self) -> None:
        """Compare the bytes on the device with the budget."""
        if self._has_warned or (budget := self._budget()) is None or (held := self._held_nbytes()) <= budget:
            return
        self._has_warned = True
        logger.warning(
            "tensors that were added after offloading, such as adapters or fused projections, stay on the device, "
            "where weights now take %s (%d bytes): %d bytes more than the budget of %s (%d bytes). To include them in "
            "the plan, call remove() and offload again; or give a smaller device_budget",
            human(held),
            held,
            held - budget,
            human(budget),
            budget,
        )


def _agreed(ranks: Ranks, backend: Backend, config: OffloadConfig, machine: Machine) -> tuple[OffloadConfig, Machine]:
    """The configuration and the machine that all ranks agree on, with each link's rate while all ranks copy."""
    if backend.device.type != "cpu":
        # raises if two ranks have one device
        ranks.apart(cuda.facts(backend.device).uuid, backend.device)
        machine = multi_gpu_links.at_most(machine, multi_gpu_links.shared_link_rate(backend.device, ranks.confirm))
        rate = multi_gpu_links.all_reduce_rate(backend, ranks.confirm, ranks.add_up)
        machine = replace(machine, profile=replace(machine.profile, ranks_bytes_per_s=rate))
    return ranks.agreed(config, machine)


def _weights(model: nn.Module, elsewhere: frozenset[int]) -> dict[str, alias_groups.Group]:
    """The weights of a model that can be offloaded, by alias group."""
    by_alias = alias_groups.groups(model, without=elsewhere)
    if not by_alias:
        raise ConfigError(f"{type(model).__name__} has no weights to offload")
    if held := alias_groups.held_elsewhere(by_alias):
        logger.warning(
            "the memory of %s is also used by tensors or arrays outside of the model: writes through these are not "
            "seen from now on. Write to the model's own tensors, or drop the others before offload()",
            some(held, _NAMED),
        )
    return by_alias


def _report(plan: Plan, config: OffloadConfig) -> None:
    """Log the plan, and warn of settings that have no effect."""
    patterns = {"prefetch": config.prefetch.offload_params, "uva": config.uva.cpu_offload_params}.get(config.backend)
    names = [tensor.name for tensor in plan.manifest.tensors()]
    for pattern in unmatched_patterns((*(patterns or ()), *config.zero_copy_params), names):
        logger.warning("pattern %r matches no parameter of the model: it selects nothing", pattern)
    if config.zero_copy_params and not plan.mapped:
        logger.warning("zero_copy_params ignored, these weights stream: the device cannot read pinned host memory")
    if config.backend == "uva" and config.use_uva and not plan.mapped:
        logger.warning(
            "the device cannot read pinned host memory, so weights that cpu_offload_gb places there stream through a "
            "ring (set use_uva=False to say that this is meant)"
        )
    logger.info("%s", plan.summary())
    if not plan.offloaded_nbytes and config.backend != "none":
        logger.warning("the %s settings offload nothing of this model", config.backend)
