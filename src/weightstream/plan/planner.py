"""The planner: what turns a manifest into a plan, under one configuration and on one machine. Moves and asks nothing.

Each way to place that the configuration allows is planned, and the one with the least predicted time wins: with the
tables of which a step reads a few rows on the device or read from host memory, with a unit far larger than all
others (a head) through the ring or read from there as well, since a ring must hold the largest unit, and with weights
coded or plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from weightstream.config import OffloadConfig, name_matches
from weightstream.errors import PlanError
from weightstream.plan import cost
from weightstream.plan.codes import Codes, Sizes, codings, decoding_less
from weightstream.plan.manifest import Manifest, Profile
from weightstream.plan.placement import (
    always_resident,
    fastest,
    least_compute_s,
    map_to_host,
    place,
    place_homes,
    place_host_bytes,
    place_layers,
)
from weightstream.plan.plan import Plan, buffer_nbytes
from weightstream.plan.work import Op, Workload, unit_seconds

_TABLE_NBYTES = 1 << 20
_LONE = 4  # a unit so many times the next smaller one may be worth reading from host memory
_READ_ROWS = 64  # by kernels that read it once: products with more rows read weights again for each tile of them
_READ_RATE = 0.9  # of the link, that kernels reach [H200: 50 of 55 GB/s]
_SLACK = 50  # a share of free memory that the allocator may lose between blocks
_SLACK_NBYTES = 256 << 20
_WORTH = 0.97  # of its bytes: a code that saves less is none
_BITS: Mapping[str, tuple[int, ...]] = MappingProxyType({"auto": (3, 4), "none": (), "3bit": (3,), "4bit": (4,)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What weights may be placed in: bytes that are free and all that there are, of the device and of the host.

    `maps_host_memory`: kernels can read what is in host memory. `can_decode`: coded weights can be used where the
    planner is to choose. `disk_bytes_per_s` measures, where that takes time.
    """

    profile: Profile
    on_cpu: bool
    free_nbytes: int
    total_nbytes: int
    host_free_nbytes: int
    host_total_nbytes: int
    maps_host_memory: Callable[[], bool] = lambda: True
    can_decode: Callable[[], bool] = lambda: True
    disk_bytes_per_s: Callable[[], float | None] = lambda: None


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What a planner knows of alias groups beside their bytes: all their names; those of which a step reads a few rows;
    those that may be on disk; tensor names that the classic settings leave where they are; those whose coded form is
    in a file, which may be on disk in no other; and, which takes time to find out, of those that can be coded the bytes
    by the bits of each code."""

    names: Mapping[str, tuple[str, ...]]
    by_row: frozenset[str] = frozenset()
    movable: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    coded_in_files: frozenset[str] = frozenset()
    codes: Callable[[], Mapping[str, Mapping[int, int]]] = dict
    can_map: Callable[[], bool] = lambda: True  # until pinning is refused


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a step needs beside weights: the work of each unit by name, bytes of activations, at most, and cache."""

    workload: Workload
    work: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)
    activation_nbytes: int = 0
    cache_nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to place: the model with what is coded, what kernels read from host memory, and what is left without
    that; `sizes` are the bytes of what may be coded, by the bits of each code."""

    manifest: Manifest
    mapped: frozenset[str]
    aside: Manifest
    sizes: Sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Called with a manifest, gives its plan. `unit_s` holds measured seconds by unit name, without decoding, which go
    over the work, and in which the groups `measured_reads` were read from host memory.

    Raises `PlanError` with the arithmetic where no plan fits.
    """

    config: OffloadConfig
    machine: Machine
    weights: Weights
    demand: Demand | None = None
    unit_s: Mapping[str, float] = field(default_factory=dict)
    measured_reads: frozenset[str] = frozenset()

    def __call__(self, manifest: Manifest) -> Plan:
        profile, ways = self.profile(manifest.plain()), list(self._ways(manifest.plain()))
        refused: dict[tuple[bool, int], PlanError] = {}

        def plan_of(index: int) -> Plan | None:
            try:
                plan = self._placed(ways[index], profile)
            except PlanError as error:
                refused[True, -index] = error  # the last way takes the least of the device
                return None
            try:
                return self._within_host_budget(plan, profile)
            except PlanError as error:
                refused[False, index] = error  # and the first the least of the host
                return None

        bounds = ((self._bound_s(way, profile), index) for index, way in enumerate(ways))
        best = fastest(bounds, plan_of)
        if best is None:
            raise refused[min(refused)]
        return self._for_demand(best)

    def _for_demand(self, plan: Plan) -> Plan:
        if (demand := self.demand) is None:
            return plan
        beside = {"activation_nbytes": demand.activation_nbytes, "cache_nbytes": demand.cache_nbytes}
        return replace(plan, workload=demand.workload, **beside)  # type: ignore[arg-type]

    def profile(self, manifest: Manifest) -> Profile:
        """The machine's profile with the seconds of every unit: measured, from its work, or by its bytes."""
        profile = self.machine.profile
        if self.demand is None and not self.unit_s:
            return profile
        work = {} if self.demand is None else self.demand.work
        times: list[tuple[float, float, float]] = []
        for index, unit in enumerate(manifest.plain().units):
            on_device, on_host, after_share = unit_seconds(work.get(unit.name, ()), profile)
            if unit.name in self.unit_s:
                on_device, on_host = self.unit_s[unit.name], 0.0
            elif unit.name not in work:
                on_device, on_host = profile.compute_s(index, unit), 0.0
            times.append((on_device, on_host, after_share))
        unit_s, host_s, after = (tuple(unit[k] for unit in times) for k in range(3))
        return replace(profile, unit_s=unit_s, host_s=host_s, after_share=after).decoding(manifest)

    @property
    def budget(self) -> int | None:
        """Bytes of device memory for weights: as given, else what is free less what a step needs."""
        given = self.config.device_nbytes(self.machine.total_nbytes, on_cpu=self.machine.on_cpu)
        if given is not None or self.config.backend != "none":
            return given
        free = self.machine.free_nbytes
        if self.machine.on_cpu:
            return free
        if self.demand is None:
            return max(0, int(free * 0.9) - (1 << 30))  # nobody knows the activations
        needed = self.demand.activation_nbytes + self.demand.cache_nbytes + self.machine.profile.workspace_nbytes
        return max(0, free - needed - max(free // _SLACK, _SLACK_NBYTES))

    def _ways(self, manifest: Manifest) -> Iterator[Way]:
        """All that are worth a try."""
        for mapped in self._mapped(manifest):
            sizes = self._sizes(manifest.without(mapped))
            for codes in self._codings(manifest.without(mapped), sizes):
                coded = manifest.coded(codes)
                yield Way(manifest=coded, mapped=mapped, aside=coded.without(mapped), sizes=sizes)

    def _bound_s(self, way: Way, profile: Profile) -> float:
        """No plan of this way takes less: it computes, and copies what the budget has no room for."""
        read_s = self._read_nbytes(way.manifest, way.mapped) / profile.link_bytes_per_s
        over = sum(way.aside.read.values()) + buffer_nbytes(way.aside) - (self.budget or 0)
        if over <= 0 and way.aside.codes:
            return read_s  # of what is coded, some may stay plain
        compute_s = least_compute_s(way.aside, profile.decoding(way.aside))
        return max(compute_s, over / profile.link_bytes_per_s if self.budget is not None else 0.0) + read_s

    # -- what is coded ----------------------------------------------------------------------------------------------

    def _codings(self, manifest: Manifest, sizes: Sizes) -> list[Codes]:
        """Alias groups to code, with their bits and bytes: each set that is worth a try."""
        if self.config.codec == "auto" and sizes:
            return codings(manifest, sizes, self.machine.profile)
        return [{alias: code for alias, codes in sizes.items() for code in codes.items()}]  # one for each

    def _sizes(self, manifest: Manifest) -> dict[str, dict[int, int]]:
        """Alias groups that are worth to be coded, where that may be, and their bytes in each code that may be used."""
        if not self._may_code(manifest):
            return {}
        plain = always_resident(manifest)
        if self.config.backend == "prefetch":
            plain |= self._streaming(manifest, self.machine.profile).resident
        sizes: dict[str, dict[int, int]] = {}
        for alias, codes in self.weights.codes().items():
            if alias in plain or alias not in manifest.aliases:
                continue
            allowed = codes if alias in self.weights.coded_in_files else _BITS[self.config.codec]  # in files: in one
            most = _WORTH * manifest.aliases[alias]
            if found := {bits: n for bits, n in codes.items() if bits in allowed and n <= most}:
                sizes[alias] = found
        return sizes

    def _may_code(self, manifest: Manifest) -> bool:
        """Whether codes can be used and, where the planner is to choose, there is a reason to."""
        config = self.config
        if config.codec == "none" or config.backend == "uva":
            return False
        chosen = config.backend == "none" and not self.machine.on_cpu and manifest.nbytes > (self.budget or 0)
        return (config.codec != "auto" or chosen) and self.machine.can_decode()

    # -- what kernels read from host memory -----------------------------------------------------------------------

    def _mapped(self, manifest: Manifest) -> Iterator[frozenset[str]]:
        """Alias groups that kernels read from host memory: each set that is worth a try."""
        named, budget = self._named(), self.budget
        chosen = budget is not None and self.config.backend == "none" and not self.machine.on_cpu
        reads = (named or chosen) and self.weights.can_map() and self.machine.maps_host_memory()
        yield named if reads else frozenset()
        if not (reads and chosen) or manifest.without(named).nbytes <= (budget or 0):
            return
        sizes = manifest.aliases
        tables = frozenset(a for a in self.weights.by_row if sizes.get(a, 0) >= _TABLE_NBYTES)
        if tables:
            yield named | tables
        if lone := self._lone(manifest.without(named | tables)):
            yield named | tables | lone

    def _named(self) -> frozenset[str]:
        patterns = self.config.zero_copy_params
        if not patterns:
            return frozenset()
        return frozenset(a for a, names in self.weights.names.items() if any(map(eligible(patterns), names)))

    def _lone(self, manifest: Manifest) -> frozenset[str]:
        """The weights of a unit without which the ring could be much smaller, if kernels would read them once."""
        none = frozenset[str]()
        if self.demand is None or self.demand.workload.batch > _READ_ROWS or len(manifest.units) < 2:
            return none
        second, largest = sorted(manifest.units, key=lambda unit: unit.nbytes)[-2:]
        rows = self.demand.workload.batch * self.demand.workload.tokens
        if (largest.layer is not None and rows > _READ_ROWS) or largest.enclosing:
            return none
        return frozenset(largest.aliases()) if largest.nbytes > _LONE * second.nbytes else none

    def _placed(self, way: Way, profile: Profile) -> Plan:
        plan = self._streaming(way.aside, profile.decoding(way.aside))
        if plan.manifest.codes and not plan.offloaded_nbytes and self.config.codec == "auto":
            less = decoding_less(plan, way.sizes, profile)
            plan = cost.predicted(less, profile.decoding(less.manifest))
        if not way.mapped:
            return plan
        whole = way.manifest.coded(plan.manifest.codes)
        return map_to_host(plan, whole, self._read_nbytes(whole, way.mapped), profile)

    def priced(self, plan: Plan) -> Plan:
        """A plan, whoever made it, with what this planner predicts for its step."""
        profile, aside = self.profile(plan.manifest), plan.manifest.without(plan.mapped)
        times = cost.predicted(replace(plan, manifest=aside, mapped=frozenset()), profile)
        if plan.mapped:
            times = map_to_host(times, plan.manifest, self._read_nbytes(plan.manifest, plan.mapped), profile)
        return self._for_demand(times)

    def _read_nbytes(self, manifest: Manifest, mapped: frozenset[str]) -> int:
        """Bytes of copies that take as long as what kernels read of these in a step."""
        read = mapped - self.weights.by_row - self.measured_reads
        return round(sum(manifest.aliases.get(alias, 0) for alias in read) / _READ_RATE)

    # -- what streams ---------------------------------------------------------------------------------------------

    def _streaming(self, manifest: Manifest, profile: Profile) -> Plan:
        uva, prefetch, kept = self.config.uva, self.config.prefetch, self.weights.kept
        if self.config.backend == "prefetch":
            return place_layers(
                manifest,
                group_size=prefetch.offload_group_size,
                num_in_group=prefetch.offload_num_in_group,
                prefetch_step=prefetch.offload_prefetch_step,
                eligible=eligible(prefetch.offload_params, kept),
                profile=profile,
            )
        if self.config.backend == "uva":
            return place_host_bytes(
                manifest,
                host_nbytes=int(uva.cpu_offload_gb * 2**30),
                eligible=eligible(uva.cpu_offload_params, kept),
                zero_copy=not self.machine.on_cpu and self.weights.can_map() and self.machine.maps_host_memory(),
                profile=profile,
            )
        return place(manifest, budget=self.budget, profile=profile)

    def _within_host_budget(self, plan: Plan, profile: Profile) -> Plan:
        """Keep on disk what host memory has no room for; without a budget, what is in RAM may stay there."""
        machine = self.machine
        budget = self.config.host_nbytes(machine.host_total_nbytes, on_cpu=machine.on_cpu)
        default = " (the default, 80 % of what this process may still take)" if budget is None else ""
        folder = pack = ""
        coded, in_files = plan.manifest.codes.keys(), self.weights.coded_in_files
        if coded - in_files:
            pack = " Or set codec='auto', or make a coded pack: what a file does not hold coded cannot be on disk."
        elif self.config.offload_folder is None:
            folder = ", name an offload_folder to keep the rest on disk"
        if budget is None:
            budget = max(0, machine.host_free_nbytes - (plan.device_nbytes if machine.on_cpu else 0))
        remedy = f"Raise host_budget{default}{folder}, or raise device_budget.{pack}"
        movable = (self.weights.movable - in_files - coded) | (in_files & coded)  # in the form that a file has
        placed = partial(place_homes, plan, host_budget=budget, movable=movable, remedy=remedy)
        found = placed(profile=profile)
        if found.disk and (measured := machine.disk_bytes_per_s()) is not None:
            return placed(profile=replace(profile, disk_bytes_per_s=measured))
        return found


def eligible(patterns: frozenset[str], kept: frozenset[str] = frozenset()) -> Callable[[str], bool]:
    """Whether a name is none of `kept` and matches a pattern, or there are none."""
    return lambda name: name not in kept and (not patterns or any(name_matches(p, name) for p in patterns))
