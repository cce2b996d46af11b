"""The planner: makes a plan from a manifest, for one configuration and one machine. Knows plain values only.

The planner tries every placement that the configuration allows, and the one with the shortest predicted step wins. The
options are:

- tables of which a step reads a few rows: on the device, or read by kernels from host memory;
- a unit far larger than all others, such as a head: through the ring, or read from host memory as well, since the ring
  must hold the largest unit that streams;
- weights: compressed, or uncompressed;
- stacks of experts: like other weights, or in an expert cache.

All options, with all choices of residents and rings in each, are candidates of one search.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add, attrgetter
from typing import NamedTuple

from weightstream.codec.format import MAX_SHARE
from weightstream.errors import PlanError
from weightstream.plan import cost, expert_cache, search
from weightstream.plan.candidates import Share
from weightstream.plan.coding import Sizes, codings, decoding_less
from weightstream.plan.expert_cache import Cached, Counts
from weightstream.plan.manifest import Manifest, Op, Picked, Profile, Seconds, UnitSeconds, Workload, unit_seconds
from weightstream.plan.plan import Plan, buffer_nbytes
from weightstream.plan.schedule import FORWARD, TRAIN
from weightstream.plan.search import Candidate
from weightstream.plan.units import human
from weightstream.settings.arguments import selects
from weightstream.settings.config import OffloadConfig

_TABLE_NBYTES = 1 << 20
_LONE = 4  # a unit more than this many times the next smaller one may be worth reading from host memory
_READ_ROWS = 64  # a kernel with more rows reads the weights again for each tile of rows
_READ_RATE = 0.9  # share of the link's rate that kernels reach [H200: 50 of 55 GB/s]
_HOST_SHARE_OF_TEXT = 0.25  # tokens come from CUDA graphs; only the prompt is an eager step
_SLACK = 50  # 1/50 of the free memory, or 256 MiB if that is more, may be lost between the blocks of the allocator
_SLACK_NBYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The device and the host that a plan is made for.

    Attributes:
        profile: rates and fixed costs.
        on_cpu: the device is the CPU, so device and host memory are the same.
        free_nbytes: free bytes of device memory, with those that the model's own weights take now.
        total_nbytes: bytes of device memory in total; 0: unknown.
        host_free_nbytes: bytes of host memory that this process may still take, and those of the model's own weights.
        host_total_nbytes: bytes of host memory that this process may take in total.
        maps_host_memory: kernels can read pinned host memory.
        fetches_rows: kernels can read single rows there, for expert caches.
        can_decode: compressed weights can be decompressed.
        disk_bytes_per_s: measured bytes per second of reading the model's files; None: the profile's.
    """

    profile: Profile
    on_cpu: bool
    free_nbytes: int
    total_nbytes: int
    host_free_nbytes: int
    host_total_nbytes: int
    maps_host_memory: bool = True
    fetches_rows: bool = True
    can_decode: bool = True
    disk_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Facts about the alias groups that the manifest does not hold.

    Attributes:
        names: all names of the tensors of each alias group.
        by_row: alias groups of which a step reads a few rows, such as embedding tables.
        movable: alias groups that may be on disk.
        kept: names of tensors that the classic settings leave on the device.
        coded_in_files: alias groups that a file holds in compressed form; only in that form may they be on disk.
        codes: compressed bytes of each alias group that can be compressed.
    """

    names: Mapping[str, tuple[str, ...]]
    by_row: frozenset[str] = frozenset()
    movable: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    coded_in_files: frozenset[str] = frozenset()
    codes: Sizes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The needs of a training step in addition to those of a forward.

    Attributes:
        backward: the ops of each unit in the backward, recomputing included, by the unit's name.
        forward_order: the order of the units in a forward alone, as for evaluation; empty: unknown.
        num_trained: elements of trainable parameters.
        trained_nbytes: bytes of adapters that are no weights of the model yet, of gradients and of the optimizer.
        loss_nbytes: bytes by which the loss, with its logits, raises the peak of the activations.
        recomputes: the backward computes each block again, from a checkpoint.
        checkpointed_nbytes: bytes of activations at most with checkpoints, for a step without; else 0.
    """

    backward: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)
    forward_order: tuple[int, ...] = ()
    num_trained: int = 0
    trained_nbytes: int = 0
    loss_nbytes: int = 0
    recomputes: bool = False
    checkpointed_nbytes: int = 0

    def explained(self, activation_nbytes: int) -> str:
        """The memory besides weights in words: with these activations."""
        loss = f" ({human(self.loss_nbytes)} of them for the loss)" if self.loss_nbytes else ""
        text = f"activations {human(activation_nbytes)}{loss}" if activation_nbytes else "unknown activations"
        if self.checkpointed_nbytes:
            text += f" ({human(self.checkpointed_nbytes)} with checkpoints)"
        return f"{text} + adapters, gradients and optimizer {human(self.trained_nbytes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The needs of a step besides weights.

    Attributes:
        workload: the step of a language model; None for any other model.
        work: the ops of each unit, by the unit's name; empty: unknown.
        captured: the same in a CUDA graph; empty: as in an eager step.
        activation_nbytes: bytes of activations at most.
        cache_nbytes: bytes of the KV cache.
        states_nbytes: bytes that a repeated block returns at most.
        is_text: the model generates text in CUDA graphs.
        training: what a backward adds; None: the step is a forward.
    """

    workload: Workload | None = None
    work: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)
    captured: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)
    activation_nbytes: int = 0
    cache_nbytes: int = 0
    states_nbytes: int = 0
    is_text: bool = False
    training: Training | None = None

    @property
    def beside_nbytes(self) -> int:
        """Bytes of device memory besides weights."""
        trained_nbytes = self.training.trained_nbytes if self.training is not None else 0
        return self.activation_nbytes + self.cache_nbytes + trained_nbytes


class Refusal(NamedTuple):
    """Why there is no plan.

    Attributes:
        rank: of all refusals, the one with the smallest rank is reported.
        error: the failed arithmetic.
    """

    rank: int
    error: PlanError


def fastest(candidates: Iterable[Candidate], refusals: list[Refusal]) -> Plan:
    """The fastest of these plans. Raises the error of the refusal with the smallest rank if there is no plan.

    `refusals` may grow while the candidates are made.
    """
    if (plan := search.search(candidates)) is None:
        raise min(refusals, key=attrgetter("rank")).error
    return plan


class PlacementOption(NamedTuple):
    """A way to place the weights of a manifest.

    Attributes:
        mapped: alias groups that kernels read from host memory.
        rest: the manifest without those and without what is cached: residents and streamed weights, compressed or not.
        cached: the expert cache; None: there is none.
    """

    mapped: frozenset[str]
    rest: Manifest
    cached: Cached | None = None

    @property
    def cached_codes(self) -> Sizes:
        """Compressed bytes of the stacks that are cached in compressed form."""
        return self.cached.coded if self.cached else {}


class Simulated(NamedTuple):
    """A plan as a simulation takes it, and the profile for it.

    Attributes:
        plan: the plan without weights that kernels read from host memory and without cached stacks.
        profile: the profile with the seconds of the plan's units.
    """

    plan: Plan
    profile: Profile


class _Turns(NamedTuple):
    """Seconds of a unit in the forward, and in each of its other turns of a training step; `num` counts all."""

    forward: UnitSeconds
    backward: UnitSeconds
    num: int

    @property
    def mean(self) -> UnitSeconds:
        def mean(first: float, others: float) -> float:
            return (first + (self.num - 1) * others) / self.num

        device_s = mean(self.forward.device_s, self.backward.device_s)
        after_s = mean(*(each.after_share * each.device_s for each in self[:2]))
        return UnitSeconds(device_s, mean(self.forward.host_s, self.backward.host_s), after_s / (device_s or 1.0))


def _more_s(order: Sequence[int], turns: Mapping[int, _Turns], on_cpu: bool) -> Iterator[Seconds]:
    """For each position, the seconds more than those of its unit on average."""
    seen: set[int] = set()
    for unit in order:
        turn = turns[unit].backward if unit in seen else turns[unit].forward
        seen.add(unit)
        mean = turns[unit].mean
        device_s, host_s = turn.device_s - mean.device_s, turn.host_s - mean.host_s
        yield Seconds(device_s + host_s, 0.0) if on_cpu else Seconds(device_s, host_s)


class _UnitTimes(NamedTuple):
    """Seconds of a unit, as in the fields of a profile."""

    device_s: float
    host_s: float
    after_share: float
    captured_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Makes the plan of a manifest, when it is called with one.

    The call raises `PlanError` with the failed arithmetic if no plan fits.

    Attributes:
        config: the settings of the caller.
        machine: the device and its host.
        weights: the names of the alias groups, where each may be, and their compressed sizes.
        demand: the needs of a step besides weights.
        unit_s: measured seconds by unit name, which replace those from the unit's work. They leave decompression out,
            and include the time in which kernels read from host memory: they are of the plan that was measured.
        share: replaces the budget where several models use device memory in turn.
        counts: counts of an expert cache that ran; None: its hits are estimated.
        reserved_nbytes: bytes of the budget that another model takes, such as a draft.
    """

    config: OffloadConfig
    machine: Machine
    weights: Weights
    demand: Demand = field(default_factory=Demand)
    unit_s: Mapping[str, float] = field(default_factory=dict)
    share: Share | None = None
    counts: Counts | None = None
    reserved_nbytes: int = 0

    def __call__(self, manifest: Manifest) -> Plan:
        refusals: list[Refusal] = []
        return self.priced(fastest(self.candidates(manifest, refusals), refusals))

    def candidates(self, manifest: Manifest, refusals: list[Refusal]) -> Iterator[Candidate]:
        """Every plan of a manifest that is worth a try. Options without a plan add their reason to `refusals`."""
        manifest = manifest.plain()
        profile, options = self.profile(manifest), list(self._options(manifest))
        # the last option takes the least device memory, so its refusal has the smallest rank
        for rank, option in zip(range(len(options), 0, -1), options, strict=True):
            candidates = partial(self._candidates_of, manifest, option, profile, rank, refusals)
            yield Candidate(self._bound_s(manifest, option, profile), candidates)

    def _candidates_of(
        self, manifest: Manifest, option: PlacementOption, profile: Profile, rank: int, refusals: list[Refusal]
    ) -> Iterator[Candidate]:
        """The plans of one way to place the weights."""
        read_s = self.read_nbytes(manifest, option.mapped) / profile.link_bytes_per_s
        # once: there are hundreds of candidates
        as_coded = manifest.coded({**option.cached_codes, **option.rest.codes})
        profile = self._profile_with_cache(manifest, option.cached, profile)
        planner = self
        if option.cached:
            left_nbytes = (self.budget or 0) - option.cached.nbytes
            planner = replace(self, config=self.config.within(left_nbytes), reserved_nbytes=0)

        def complete(candidate: Candidate) -> Plan | None:
            plan = candidate.plan()
            form = as_coded
            if plan.manifest is not option.rest:
                form = manifest.coded({**option.cached_codes, **plan.manifest.codes})
            plan = self._with_cache(plan, form, option.mapped, option.cached)
            plan = self._with_mapped(plan, form, option.mapped, profile)
            try:
                return self._within_host_budget(plan, profile)
            except PlanError as error:
                # Report the host shortage of the first option, which needs least host memory, before device shortages
                refusals.append(Refusal(-rank, error))
                return None

        try:
            for candidate in planner._placed(option.rest, profile):
                yield Candidate(candidate.bound_s + read_s, partial(complete, candidate))
        except PlanError as error:
            refusals.append(Refusal(rank, self._explained(error)))

    def _explained(self, error: PlanError) -> PlanError:
        """The error with what training takes besides weights."""
        if (training := self.demand.training) is None:
            return error
        besides = training.explained(self.demand.activation_nbytes)
        given = "on top of the budget" if self.config.has_budget else "which the default budget leaves free"
        return PlanError(f"{error} Training takes {besides}, {given}.")

    def profile(self, manifest: Manifest) -> Profile:
        """The machine's profile with the seconds of every unit: measured, or from its work, else from its bytes."""
        profile, work = self.machine.profile, self.demand.work
        if (measured := self.machine.disk_bytes_per_s) is not None:
            profile = replace(profile, disk_bytes_per_s=measured)
        if not work and not self.unit_s:
            return profile
        if self.machine.on_cpu:
            profile = replace(profile, op_s=0.0)  # a part of `op_launch_s`, as kernels run where they are launched
        times: list[_UnitTimes] = []
        picked: list[Picked] = []
        turns = self._turns(manifest, profile)
        for index, unit in enumerate(manifest.plain().units):
            ops = work.get(unit.name, ())
            device_s, host_s, after_share = turns[index].mean if index in turns else unit_seconds(ops, profile)
            captured_ops = (self.demand.captured or work).get(unit.name, ())
            captured_s = 0.0 if index in turns else unit_seconds(captured_ops, profile).device_s - device_s
            picks = [op for op in ops if unit.stacks and op.picked]
            share = max((op.picked for op in picks), default=0.0)
            picked.append(Picked(share, sum(op.seconds(profile) for op in picks if not op.unpacks)))
            if unit.name in self.unit_s:
                device_s = self.unit_s[unit.name]
            elif unit.name not in work:
                device_s, host_s = profile.times_s(index, unit)
            times.append(_UnitTimes(device_s, host_s, after_share, captured_s))
        profile = replace(
            profile,
            unit_s=tuple(unit.device_s for unit in times),
            host_s=tuple(unit.host_s for unit in times),
            after_share=tuple(unit.after_share for unit in times),
            captured_s=tuple(unit.captured_s for unit in times),
            picked=tuple(picked),
            host_share=_HOST_SHARE_OF_TEXT if self.demand.is_text else profile.host_share,
        )
        if self.machine.on_cpu:  # one processor launches and computes, and cannot do both at once
            unit_s = tuple(map(add, profile.unit_s, profile.host_s))
            profile = replace(profile, unit_s=unit_s, host_s=(), captured_s=())
        if turns:
            profile = replace(profile, more_s=tuple(_more_s(manifest.order, turns, self.machine.on_cpu)))
        return profile.decoding(manifest)

    def _turns(self, manifest: Manifest, profile: Profile) -> dict[int, _Turns]:
        """The seconds of each unit in the forward and in each of its turns of the backward; empty without training."""
        if self.demand.training is None:
            return {}
        nums, backward = Counter(manifest.order), self.demand.training.backward
        found: dict[int, _Turns] = {}
        for index, unit in enumerate(manifest.units):
            ops, num = (self.demand.work.get(unit.name, ()), backward.get(unit.name, ())), nums[index]
            forward, back = (unit_seconds(each, profile) for each in ops)
            if num > 1:
                back = UnitSeconds(back.device_s / (num - 1), back.host_s / (num - 1), back.after_share)
                found[index] = _Turns(forward, back, num)
            elif num:  # both in one turn
                found[index] = _Turns(unit_seconds((*ops[0], *ops[1]), profile), back, 1)
        return found

    def _profile_with_cache(self, manifest: Manifest, cached: Cached | None, profile: Profile) -> Profile:
        return expert_cache.profile_with_cache(manifest, cached, profile, self.demand.workload, self.counts)

    @property
    def budget(self) -> int | None:
        """Bytes of device memory for weights: as configured, else the free bytes minus the needs of a step."""
        if self.share is not None:
            return sum(self.share)
        budget = self.config.device_nbytes(self.machine.total_nbytes, on_cpu=self.machine.on_cpu)
        if budget is not None or self.config.backend != "none":
            return budget if budget is None else max(0, budget - self.reserved_nbytes)
        free = max(0, self.machine.free_nbytes - self.reserved_nbytes)
        if self.machine.on_cpu:
            return free
        if not self.demand.work:
            return max(0, int(free * 0.9) - (1 << 30) - self.demand.beside_nbytes)  # activations are unknown
        needed = self.demand.beside_nbytes + self.machine.profile.workspace_nbytes
        return max(0, free - needed - max(free // _SLACK, _SLACK_NBYTES))

    @property
    def _chooses(self) -> bool:
        """Whether the planner chooses the placement, within a budget on a GPU."""
        return self.config.backend == "none" and not self.machine.on_cpu

    def _options(self, manifest: Manifest) -> Iterator[PlacementOption]:
        """The placement options that are worth a try."""
        for mapped in self._mapped(manifest):
            rest = manifest.without(mapped)
            sizes = self._sizes(rest)
            coded = codings(rest, sizes) if self.config.codec == "auto" else [sizes]
            yield from (PlacementOption(mapped, rest.coded(codes)) for codes in coded)
            if (cached := self._cache(rest, sizes)) is not None:
                yield PlacementOption(mapped, rest.without(cached.sizes), cached)

    def _cache(self, manifest: Manifest, sizes: Sizes) -> Cached | None:
        """The expert cache that is worth a try; None if all weights fit, or if rows cannot be fetched from host memory.

        Of the uncompressed and the compressed cache, the one with the shorter time on the device: captured steps do not
        wait for the host.
        """
        is_tried = self._chooses and self.share is None and self.config.pin_memory and self.demand.training is None
        budget = self.budget if is_tried and self.machine.maps_host_memory and self.machine.fetches_rows else None
        if budget is None or manifest.nbytes <= budget or not any(unit.stacks for unit in manifest.units):
            return None
        profile = self.profile(manifest)
        caches = expert_cache.caches(manifest, sizes, profile, budget, self.demand.workload, self.counts)

        def device_s(cached: Cached) -> float:
            return expert_cache.device_s(self._profile_with_cache(manifest, cached, profile))

        return min(caches, key=device_s, default=None)

    def _with_cache(self, plan: Plan, whole: Manifest, mapped: frozenset[str], cached: Cached | None) -> Plan:
        """The plan with the cached stacks added, from a plan of the other weights; mapped ones are in neither."""
        if cached is None:
            return plan
        whole = whole.without(mapped)
        profile = self.profile(whole.plain())
        plan = expert_cache.with_predictions(plan, whole, cached, profile, self.demand.workload, self.counts)
        return replace(plan, budget=self.budget)

    def _bound_s(self, manifest: Manifest, option: PlacementOption, profile: Profile) -> float:
        """A lower bound of the step of any plan of this option: compute, or copies of the bytes over budget."""
        read_s = self.read_nbytes(manifest, option.mapped) / profile.link_bytes_per_s
        profile = self._profile_with_cache(manifest, option.cached, profile)
        cache_nbytes = option.cached.nbytes if option.cached else 0
        is_bounded = self.config.backend == "none" and self.budget is not None
        kept_nbytes = (self.budget or 0) - cache_nbytes - buffer_nbytes(option.rest) if is_bounded else math.inf
        over_nbytes = sum(max(0, sum(read.values()) - kept_nbytes) for read in option.rest.sweeps)
        if option.rest.codes and over_nbytes <= 0:
            return read_s  # some of the compressed weights may be resident uncompressed, which saves decompression
        least_s = search.least_s(option.rest, profile.decoding(option.rest))
        return max(least_s, over_nbytes / profile.link_bytes_per_s) + read_s

    def may_compress(self, manifest: Manifest) -> bool:
        """Whether a plan of this manifest depends on which weights can be compressed."""
        has_reason = self.config.codec != "auto" or (self._chooses and manifest.nbytes > (self.budget or 0))
        return self.config.uses_codes and has_reason

    def may_use_disk(self, manifest: Manifest) -> bool:
        """Whether a plan of this manifest may need the disk."""
        host_budget = self._host_budget
        host_nbytes = self.machine.host_free_nbytes if host_budget is None else host_budget
        return manifest.nbytes - (self.budget or 0) > host_nbytes

    @property
    def _host_budget(self) -> int | None:
        """Bytes of host memory for weights that are not on the device, as configured; None: not configured."""
        return self.config.host_nbytes(self.machine.host_total_nbytes, on_cpu=self.machine.on_cpu)

    def _sizes(self, manifest: Manifest) -> Sizes:
        """The compressed bytes of the alias groups that are worth compressing; empty where none may be."""
        if not (self.may_compress(manifest) and self.machine.can_decode):
            return {}
        plain = search.always_resident(manifest)
        if self.config.backend == "prefetch":
            plain |= self._streaming(manifest, self.machine.profile).resident
        most = {a: MAX_SHARE[self.config.codec] * nbytes for a, nbytes in manifest.aliases.items() if a not in plain}
        return {a: nbytes for a, nbytes in self.weights.codes.items() if nbytes < most.get(a, 0.0)}

    def _mapped(self, manifest: Manifest) -> Iterator[frozenset[str]]:
        """The sets of alias groups in host memory, for kernels to read there, that are worth a try."""
        named = frozenset[str]()
        if patterns := self.config.zero_copy_params:
            named = frozenset(a for a, names in self.weights.names.items() if any(selects(patterns, n) for n in names))
        reads = bool(named or self._chooses) and self.machine.maps_host_memory
        yield named if reads else frozenset()
        if not (reads and self._chooses) or manifest.without(named).nbytes <= (self.budget or 0):
            return
        if tables := frozenset(a for a in self.weights.by_row if manifest.aliases.get(a, 0) >= _TABLE_NBYTES):
            yield named | tables
        if lone := self._lone(manifest.without(named | tables)):
            yield named.union(tables, lone)

    def _lone(self, manifest: Manifest) -> Mapping[str, int]:
        """The weights of the one unit without which the ring could be much smaller, if kernels read them only once."""
        workload = self.demand.workload
        streamed = sorted((unit for unit in manifest.units if not unit.enclosing), key=lambda unit: unit.nbytes)
        if workload is None or workload.trains or workload.batch > _READ_ROWS or len(streamed) < 2:
            return {}
        second, largest = streamed[-2:]
        if largest.layer is not None and workload.batch * workload.tokens > _READ_ROWS:
            return {}
        return largest.aliases() if largest.nbytes > _LONE * second.nbytes else {}

    def _placed(self, manifest: Manifest, profile: Profile) -> Iterator[Candidate]:
        """The plans of weights that are neither mapped nor cached. Raises `PlanError` if there is none."""
        if self.config.backend == "none" and self.budget is not None:
            whole_nbytes = self._whole_nbytes(manifest)
            if whole_nbytes is not None and not search.fits(manifest, whole_nbytes):
                yield from search.candidates(manifest, self.budget, profile.decoding(manifest), self.share)
                return
        plan = self._streaming(manifest, profile.decoding(manifest))
        if plan.manifest.codes and not plan.offloaded_nbytes and self.config.codec == "auto":
            less_coded = decoding_less(plan, profile)
            plan = cost.predicted(less_coded, profile.decoding(less_coded.manifest))
        if self.config.backend == "none":  # the classic settings have one candidate, which is compared with none
            plan = replace(plan, step_s=search.searched_s(plan, profile.decoding(plan.manifest)))
        yield Candidate(0.0, lambda: plan)

    def _whole_nbytes(self, manifest: Manifest) -> int | None:
        """The bytes in which all weights may be resident: the budget, or of a share the kept part and the buffer."""
        buffer = buffer_nbytes(manifest)
        return self.budget if self.share is None else self.share.kept_nbytes + min(buffer, self.share.ring_nbytes)

    def priced(self, plan: Plan) -> Plan:
        """The plan with this planner's predictions; any planner may have made it."""
        manifest, mapped = plan.manifest, plan.mapped
        simulated, profile = self.simulated(plan)
        predicted = cost.predicted(simulated, profile)
        predicted = self._with_cache(predicted, manifest, mapped, expert_cache.of_plan(plan))
        predicted = self._with_mapped(predicted, manifest, mapped, profile)
        predicted = replace(
            predicted,
            budget=plan.budget,
            basis=self.machine.profile.basis,
            on_cpu=self.machine.on_cpu,
            in_graphs=self.demand.is_text and bool(self.demand.captured) and not (self.machine.on_cpu or plan.disk),
            workload=self.demand.workload,
            activation_nbytes=self.demand.activation_nbytes,
            cache_nbytes=self.demand.cache_nbytes,
        )
        if (training := self.demand.training) is None:
            return predicted
        # a step with a backward is in no CUDA graph
        predicted = replace(predicted, what=TRAIN, trained_nbytes=training.trained_nbytes, graph_s=predicted.step_s)
        return predicted.scheduled(FORWARD, training.forward_order) if training.forward_order else predicted

    def simulated(self, plan: Plan) -> Simulated:
        """A plan without mapped and cached weights, and the profile with the seconds of its units."""
        manifest, rest = plan.manifest.plain(), plan.manifest.without(plan.mapped | plan.cached)
        profile = self._profile_with_cache(manifest, expert_cache.of_plan(plan), self.profile(manifest))
        simulated = replace(
            plan, manifest=rest, mapped=frozenset(), cached=frozenset(), slots_nbytes=0, shared_nbytes=0
        )
        return Simulated(simulated, profile.decoding(rest))

    def _with_mapped(self, plan: Plan, whole: Manifest, mapped: frozenset[str], profile: Profile) -> Plan:
        """The plan with the mapped weights added, from the plan of the other weights."""
        return search.map_to_host(plan, whole, self.read_nbytes(whole, mapped), profile) if mapped else plan

    def read_nbytes(self, manifest: Manifest, mapped: frozenset[str]) -> int:
        """Bytes of copies that take as long as the kernels' reads of mapped weights in a step.

        Tables of which a step reads a few rows do not count; and nothing does if measured seconds include the reads.
        """
        whole_reads = frozenset() if self.unit_s else mapped - self.weights.by_row
        return round(sum(manifest.aliases.get(alias, 0) for alias in whole_reads) / _READ_RATE)

    def _streaming(self, manifest: Manifest, profile: Profile) -> Plan:
        config, kept = self.config, self.weights.kept
        if config.backend == "prefetch":
            return search.place_layers(manifest, config.prefetch, kept=kept, profile=profile)
        if config.backend == "uva":
            zero_copy = not self.machine.on_cpu and self.machine.maps_host_memory
            return search.place_host_bytes(manifest, config.uva, zero_copy=zero_copy, kept=kept, profile=profile)
        return search.place_within(manifest, budget=self._whole_nbytes(manifest), profile=profile)

    def _within_host_budget(self, plan: Plan, profile: Profile) -> Plan:
        """The plan, changed so that weights for which host memory has no room are on disk.

        Without a configured budget, the weights that are in RAM may stay there.
        """
        machine, coded, in_files = self.machine, plan.manifest.codes.keys(), self.weights.coded_in_files
        default = folder = pack = ""
        if (budget := self._host_budget) is None:
            budget = max(0, machine.host_free_nbytes - (plan.device_nbytes if machine.on_cpu else 0))
            default = " (the default, 80 % of what this process may still take)"
        if coded - in_files:
            pack = (
                " Or set codec='auto', or make a compressed pack: weights can only be on disk in the form that a file "
                "holds."
            )
        elif self.config.offload_folder is None:
            folder = ", name an offload_folder to keep the rest on disk"
        remedy = f"Raise host_budget{default}{folder}, or raise device_budget.{pack}"
        # weights with a compressed form in a file may be on disk only in that form
        movable = (self.weights.movable - in_files - coded) | (in_files & coded)
        return search.place_homes(plan, host_budget=budget, movable=movable, remedy=remedy, profile=profile)
