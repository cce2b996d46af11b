"""The assembly of an offloaded model: weights are found, homes made, a prospect gathered; then a plan is attached."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from weightstream.adapters.hf.lazy_dequant import unpack_late
from weightstream.adapters.hf.ranks import Ranks
from weightstream.adapters.modules import device_map
from weightstream.adapters.modules.partition import called, find_blocks
from weightstream.adapters.tracing import global_state
from weightstream.adapters.tracing.footprint import Footprint
from weightstream.errors import ConfigError
from weightstream.inputs import planner_inputs
from weightstream.measure import multi_gpu_links
from weightstream.measure.profile import doubt, prepare_decoding
from weightstream.measure.progress import lasting
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine
from weightstream.plan.problem import Prospect
from weightstream.plan.units import human
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

_NAMED = 8  # tensors in a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class CallerFacts:
    """What a caller knows of a model: the memories that its weights view, a folder that goes with it, arguments of a
    call, who else has shards of it; or what is wanted of layers that are not a model of their own. `elsewhere` are ids
    of tensors that it shares with another model, whose weights they are. `progress`: whether to say what takes long."""

    memories: Sequence[Memory] = ()
    folder: OffloadFolder | None = None
    example: planner_inputs.Example | None = None
    ranks: Ranks | None = None
    hosted: planner_inputs.Hosted | None = None
    elsewhere: frozenset[int] = frozenset()
    progress: bool | None = None


def rooted(layers: Mapping[str, nn.Module]) -> nn.Module:
    """A module of these alone, under their names."""
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
    model: nn.Module, backend: Backend, config: OffloadConfig, given: CallerFacts
) -> Iterator[OffloadBuilder]:
    """A model about to be offloaded; where the block fails it is as it was.

    Raises what `offload` does.
    """
    forward_patch.refuse_twice(model)
    forward_patch.refuse_foreign(dict(model.named_modules()))
    alias_groups.refuse_unsupported(model)
    alias_groups.leave_inference(model)
    closing, by_alias, made = Undo(), dict[str, alias_groups.Group](), list[OffloadBuilder]()
    try:
        closing.add(unpack_late(model, backend.device))
        by_alias |= _weights(model, given.elsewhere)
        made.append(OffloadBuilder(model, backend, config, given, closing, by_alias))
        yield made[0]
    except BaseException:
        closing()
        # the handler of the error holds its frames, and may offload the model again
        if forward_patch.ATTRIBUTE not in vars(model):
            for assembly in made:
                assembly.forget()
            for group in by_alias.values():
                group.home = torch.empty(0, dtype=torch.uint8, device="cpu")
                group.members.clear()
        raise


class OffloadBuilder:
    """The parts of one model; `prospect` is what is known of it. What `closing` holds goes once the model is plain."""

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        config: OffloadConfig,
        given: CallerFacts,
        closing: Undo,
        by_alias: dict[str, alias_groups.Group],
    ) -> None:
        self.model = model
        self.known: frozenset[Kind] = frozenset()  # kinds of calls that the prospect is for
        self.recast: device_map.Recast | None = None
        self._backend, self._config, self._given, self._closing = backend, config, given, closing
        self._by_alias = by_alias
        expected = planner_inputs.dtypes_to_code(by_alias, backend, config, among=given.ranks is not None)
        prepare_decoding(backend.device, expected, given.progress)
        if any(m.role is Role.ATTRIBUTE for group in self._by_alias.values() for m in group.members):
            closing.add(global_state.forget_cached, model)  # which go by a tensor's device as it was
        # of its own: another model may have weights of the same names
        spill = OffloadFolder(config.offload_folder) if config.offload_folder is not None else None
        arena, pages = pinned(backend, config)
        self._homes = Homes(
            self._by_alias,
            backend,
            empty=alias_groups.empty_tensors(model),
            mappings=given.memories,
            arena=arena,
            pages=pages if given.memories else None,  # nothing else is in files
            spill=spill,
            by_row=planner_inputs.tables_of(model, self._by_alias),
        )
        hosted = given.hosted
        self._blocks = list(hosted.blocks) if hosted else find_blocks(model)
        self._grains = planner_inputs.grains_of(model, self._by_alias, hosted.grains if hosted else None, self._blocks)
        machine = planner_inputs.machine_of(backend, config, self._homes, given.progress, expected)
        if given.ranks is not None:
            config, machine = _among(given.ranks, backend, config, machine)
        about = given.memories, self._grains, given.example, hosted, given.progress
        self.prospect = planner_inputs.prospect_of_model(model, self._homes, backend, config, machine, *about)
        if expected and backend.device.type == "cuda":  # which the caller may capture next: no thread is left to use it
            planner_inputs.can_decode(backend, config, expected, given.progress)
        for owned in (given.folder, spill):
            if owned is not None:
                closing.add(owned.close)

    @property
    def device(self) -> torch.device:
        """Where it is to compute."""
        return self._backend.device

    def close(self) -> None:
        """Let go of a model to which no plan is attached."""
        self._closing()

    def forget(self) -> None:
        """Keep no memory of the weights."""
        for home in self._homes.homes.values():
            home.forget()

    @property
    def elsewhere(self) -> frozenset[int]:
        """Ids of tensors of the model that are another one's weights."""
        return self._given.elsewhere

    def aliases_of(self, tensors: Collection[int]) -> frozenset[str]:
        """The alias groups of tensors, given by their ids."""
        every = self._by_alias.items()
        return frozenset(alias for alias, group in every if any(id(m.tensor) in tensors for m in group.members))

    def narrow(self, prospect: Prospect) -> None:
        """Plan with this one, which has as many grains or only the first."""
        self.prospect, self._grains = prospect, self._grains[: len(prospect.grains)]

    def knowing(self, work: Footprint, entry: str) -> Prospect:
        """The prospect for the work of a call that was followed."""
        work = planner_inputs.tried(work, self.prospect, self._backend)
        return planner_inputs.with_work(self.prospect, self._by_alias, self._grains, work, is_part=entry != "forward")

    def with_facts(self, prospect: Prospect) -> Prospect:
        """The same with what takes time to find out."""
        return planner_inputs.with_facts(
            prospect, self._homes, self._backend, self._given.memories, self._given.progress
        )

    def attach(
        self,
        plan: Plan,
        block: SharedMemory | None = None,
        entries: Sequence[str] = (),
        on_added: Callable[[], None] | None = None,
    ) -> Streamer:
        """Put the plan in force. `on_added` is for models that share a budget: as `Streamer.on_added`."""
        if block is None and (short := self.prospect.shortage(plan)):  # with a block others count, too
            logger.warning("device memory may run out: %s", short)
        replanning = Replanning(self.prospect, self._foresee, partial(doubt, self._backend.device), self.known)
        around = self._homes, self._backend, replanning, plan, called(self._blocks), self._closing
        with lasting(f"moving {human(plan.manifest.nbytes)} of weights", self._given.progress):
            streamer = Streamer(self.model, self._grains, *around, block=block, entries=entries)
        try:
            self._finish(streamer, replanning, on_added)
        except BaseException:
            streamer.remove()
            raise
        return streamer

    def _finish(self, streamer: Streamer, replanning: Replanning, on_added: Callable[[], None] | None) -> None:
        beyond = Beyond(lambda: streamer.stats().held_nbytes["device"], lambda: replanning.prospect.planners[0].budget)
        streamer.on_added(on_added or beyond.tell)
        if streamer.plan.manifest.codes and self._backend.device.type == "cuda":
            cuda.give_back(workspaces=False)  # what encoding took
        self._closing.add(device_map.attach_device_map(self.model, self._backend.device, self.recast))
        self._closing.add(streamer.place_added, None)  # to where the weights are again
        _report(streamer.plan, self._config)
        if self.prospect.whole and streamer.plan.offloaded_nbytes:
            logger.warning("%s", self.prospect.whole)

    def _foresee(self, known: Prospect, entry: str, args: Any, kwargs: Any) -> Prospect | None:
        hosted = self._given.hosted
        whole = (hosted and hosted.model) or self.model  # whose calls these are
        about = self._by_alias, self._grains, whole, self._backend
        found = planner_inputs.foreseen(known, *about, args, kwargs, entry)
        return found and self.with_facts(found)


class Beyond:
    """Logs once that what came to the device besides planned weights is more than the budget has room for."""

    def __init__(self, held_nbytes: Callable[[], int], budget: Callable[[], int | None]) -> None:
        self._held_nbytes, self._budget = held_nbytes, budget
        self._has_told = False

    def tell(self) -> None:
        """Look whether there is room."""
        if self._has_told or (budget := self._budget()) is None or (held := self._held_nbytes()) <= budget:
            return
        self._has_told = True
        logger.warning(
            "tensors that came after offloading, such as adapters or fused projections, stay on the device, where "
            "weights now take %s (%d bytes): %d bytes more than the budget of %s (%d bytes). To have them planned for, "
            "call remove() and offload again with them; or give a smaller device_budget",
            *(human(held), held, held - budget, human(budget), budget),
        )


def _among(ranks: Ranks, backend: Backend, config: OffloadConfig, machine: Machine) -> tuple[OffloadConfig, Machine]:
    """What the ranks agree on; links are as fast as while all of them copy, as they do in a step."""
    if backend.device.type != "cpu":
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
            "%s are also shown by tensors or arrays outside of the model: what is written through those from now on is "
            "not seen. Write through the model's own, or drop the others before offload()",
            ", ".join(held) if len(held) <= _NAMED else f"{', '.join(held[:_NAMED])} and {len(held) - _NAMED} more",
        )
    return by_alias


def _report(plan: Plan, config: OffloadConfig) -> None:
    patterns = {"prefetch": config.prefetch.offload_params, "uva": config.uva.cpu_offload_params}.get(config.backend)
    names = [tensor.name for tensor in plan.manifest.tensors()]
    for pattern in unmatched_patterns((*(patterns or ()), *config.zero_copy_params), names):
        logger.warning("pattern %r matches no parameter of the model: it selects nothing", pattern)
    if config.zero_copy_params and not plan.mapped:
        logger.warning("zero_copy_params ignored, these weights stream: the device cannot read pinned host memory")
    if config.backend == "uva" and config.use_uva and not plan.mapped:
        logger.warning(
            "the device cannot read pinned host memory, so what cpu_offload_gb places there streams through a ring "
            "(set use_uva=False to say that this is meant)"
        )
    logger.info("%s", plan.summary())
    if not plan.offloaded_nbytes and config.backend != "none":
        logger.warning("the %s settings offload nothing of this model", config.backend)
