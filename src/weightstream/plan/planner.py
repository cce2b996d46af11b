"""The planner: what turns a manifest into a plan, under one configuration and on one machine. Moves and asks nothing.

Each way to place that the configuration allows is planned, and the one with the least predicted time wins: with the
tables of which a step reads a few rows on the device or read from host memory, with a unit far larger than all
others (a head) through the ring or read from there as well, since a ring must hold the largest unit, and with weights
coded or plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from weightstream.config import OffloadConfig, name_matches
from weightstream.errors import PlanError
from weightstream.plan import cost
from weightstream.plan.manifest import Manifest, Profile, UnitSpec
from weightstream.plan.placement import (
    always_resident,
    decoding_less,
    map_to_host,
    place,
    place_homes,
    place_host_bytes,
    place_layers,
)
from weightstream.plan.plan import Plan, buffer_nbytes, human
from weightstream.plan.work import Op, Workload, after_share, device_s, host_s

_TABLE_NBYTES = 1 << 20
_LONE = 4  # a unit so many times the next smaller one may be worth reading from host memory
_READ_ROWS = 64  # by kernels that read it once: products with more rows read weights again for each tile of them
_READ_RATE = 0.9  # of the link, that kernels reach [H200: 50 of 55 GB/s]
_SLACK = 50  # a share of free memory that the allocator may lose between blocks
_SLACK_NBYTES = 256 << 20
_BISECTIONS = 8
_WORTH = 0.97  # of its bytes: a code that saves less is none
_AS_FAST = 1e-3


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
        plain = manifest.plain()
        profile, ways = self.profile(plain), list(self._ways(plain))
        bounds = sorted((self._bound_s(*way, profile), index) for index, way in enumerate(ways))
        best: Plan | None = None
        refused: dict[tuple[bool, int], PlanError] = {}
        for bound_s, index in bounds:
            if best is not None and bound_s > best.step_s:
                break  # none behind is faster
            try:
                plan = self._placed(*ways[index], profile)
            except PlanError as error:
                refused[True, -index] = error  # the last takes the least of the device
                continue
            try:
                plan = self._within_host_budget(plan, profile)
            except PlanError as error:
                refused[False, index] = error  # and the first the least of the host
                continue
            if best is None or (plan.step_s, plan.device_nbytes) < (best.step_s, best.device_nbytes):
                best = plan
        if best is None:
            raise refused[min(refused)]
        return self._for_demand(best)

    def _for_demand(self, plan: Plan) -> Plan:
        if self.demand is None:
            return plan
        beside = {"activation_nbytes": self.demand.activation_nbytes, "cache_nbytes": self.demand.cache_nbytes}
        return replace(plan, workload=self.demand.workload, **beside)  # type: ignore[arg-type]

    def profile(self, manifest: Manifest) -> Profile:
        """The machine's profile with the seconds of every unit: measured, from its work, or by its bytes."""
        profile = self.machine.profile
        if self.demand is None and not self.unit_s:
            return profile
        plain, work = manifest.plain(), {} if self.demand is None else self.demand.work

        def seconds(index: int, unit: UnitSpec) -> tuple[float, float]:
            if unit.name in self.unit_s:
                return self.unit_s[unit.name], 0.0
            ops = work.get(unit.name)
            return (
                (profile.compute_s(index, unit), 0.0) if ops is None else (device_s(ops, profile), host_s(ops, profile))
            )

        both = [seconds(index, unit) for index, unit in enumerate(plain.units)]
        found = replace(
            profile,
            unit_s=tuple(device for device, _ in both),
            host_s=tuple(host for _, host in both),
            after_share=tuple(after_share(work.get(unit.name, ()), profile) for unit in plain.units),
        )
        return found.decoding(manifest)

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

    def _ways(self, manifest: Manifest) -> Iterator[tuple[Manifest, frozenset[str]]]:
        """The manifest with what is coded, and what kernels read from host memory: all that are worth a try."""
        for mapped in self._mapped(manifest):
            yield from ((manifest.coded(codes), mapped) for codes in self._codings(manifest.without(mapped)))

    def _bound_s(self, manifest: Manifest, mapped: frozenset[str], profile: Profile) -> float:
        """No plan of this way takes less: it computes, and copies what the budget has no room for."""
        aside, profile = manifest.without(mapped), profile.decoding(manifest)
        read_s = self._read_nbytes(manifest, mapped) / profile.link_bytes_per_s
        in_order = {alias: n for u in set(aside.order) for alias, n in aside.units[u].aliases().items()}
        over = sum(in_order.values()) + buffer_nbytes(aside) - (self.budget or 0)
        if over <= 0 and manifest.codes:
            return read_s  # of what is coded, some may stay plain
        compute_s = sum(profile.compute_s(u, unit) for u, unit in ((u, aside.units[u]) for u in aside.order))
        return max(compute_s, over / profile.link_bytes_per_s if self.budget is not None else 0.0) + read_s

    # -- what is coded ----------------------------------------------------------------------------------------------

    def _codings(self, manifest: Manifest) -> Iterator[dict[str, tuple[int, int]]]:
        """Alias groups to code, with their bits and bytes: each set that is worth a try.

        All in the code that is asked for; else in the smaller code of each, or in the one that saves most in the time
        that it takes, without large units that would set the size of the buffer alone; all of them; and none.
        """
        sizes = self._sizes(manifest)
        if self.config.codec != "auto" or not sizes:
            yield {alias: (bits, n) for alias, codes in sizes.items() for bits, n in codes.items()}
            return
        smallest: dict[str, tuple[int, int]] = {}
        cheapest: dict[str, tuple[int, int]] = {}
        for alias, codes in sizes.items():
            saved = {bits: manifest.aliases[alias] - n for bits, n in codes.items()}
            in_time = {bits: n * self.machine.profile.decode_bytes_per_s(bits) for bits, n in saved.items()}
            for found, gains in ((smallest, saved), (cheapest, in_time)):
                bits = max(gains, key=gains.__getitem__)
                found[alias] = bits, codes[bits]
        tried = [*(_worth_the_buffer(manifest, codes) for codes in (smallest, cheapest)), smallest, {}]
        yield from (codes for index, codes in enumerate(tried) if codes not in tried[:index])

    def _sizes(self, manifest: Manifest) -> dict[str, dict[int, int]]:
        """Alias groups that are worth to be coded, where that may be, and their bytes in each code that may be used."""
        if not self._may_code(manifest):
            return {}
        plain = always_resident(manifest)
        if self.config.backend == "prefetch":
            plain |= self._streaming(manifest, self.machine.profile).resident
        found: dict[str, dict[int, int]] = {}
        for alias, codes in self.weights.codes().items():
            if alias in manifest.aliases and alias not in plain:
                most = _WORTH * manifest.aliases[alias]
                allowed = codes if alias in self.weights.coded_in_files else self.asked  # in a file it is in one alone
                found[alias] = {bits: n for bits, n in codes.items() if bits in allowed and n <= most}
        return {alias: codes for alias, codes in found.items() if codes}

    @property
    def asked(self) -> tuple[int, ...]:
        """Bits of the codes that the configuration allows."""
        return {"3bit": (3,), "4bit": (4,), "none": ()}.get(self.config.codec, (3, 4))

    def movable(self, manifest: Manifest) -> frozenset[str]:
        """What may be on disk, in the form that it has in this manifest."""
        coded, in_files = manifest.coded_aliases, self.weights.coded_in_files
        return (self.weights.movable - in_files - coded) | (in_files & coded)

    def _may_code(self, manifest: Manifest) -> bool:
        """Whether codes can be used and, where the planner is to choose, there is a reason to."""
        config = self.config
        if not self.asked or config.backend == "uva":
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
        workload = self.demand.workload if self.demand is not None else None
        if workload is None or workload.batch > _READ_ROWS:
            return frozenset()
        by_size = sorted(manifest.units, key=lambda unit: unit.nbytes)
        if len(by_size) < 2:
            return frozenset()
        second, largest = by_size[-2:]
        rows = workload.batch * workload.tokens
        if (largest.layer is not None and rows > _READ_ROWS) or largest.enclosing:
            return frozenset()
        return frozenset(largest.aliases()) if largest.nbytes > _LONE * second.nbytes else frozenset()

    def _placed(self, manifest: Manifest, mapped: frozenset[str], profile: Profile) -> Plan:
        plan = self._streaming(manifest.without(mapped), profile.decoding(manifest))
        if plan.manifest.codes and not plan.offloaded_nbytes and self.config.codec == "auto":
            fuller = decoding_less(plan, self._sizes(plan.manifest.plain()), profile)
            plan = cost.predicted(fuller, profile.decoding(fuller.manifest))
        if not mapped:
            return plan
        whole = manifest.plain().coded(plan.manifest.codes)
        return map_to_host(plan, whole, self._read_nbytes(whole, mapped), profile)

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
        return round(sum(manifest.aliases[alias] for alias in read if alias in manifest.aliases) / _READ_RATE)

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
        if plan.manifest.coded_aliases - self.weights.coded_in_files:
            pack = " Or set codec='auto', or make a coded pack: what a file does not hold coded cannot be on disk."
        elif self.config.offload_folder is None:
            folder = ", name an offload_folder to keep the rest on disk"
        if budget is None:
            budget = max(0, machine.host_free_nbytes - (plan.device_nbytes if machine.on_cpu else 0))
        remedy = f"Raise host_budget{default}{folder}, or raise device_budget.{pack}"
        placed = partial(place_homes, plan, host_budget=budget, movable=self.movable(plan.manifest), remedy=remedy)
        found = placed(profile=profile)
        if found.disk and (measured := machine.disk_bytes_per_s()) is not None:
            return placed(profile=replace(profile, disk_bytes_per_s=measured))
        return found


def _worth_the_buffer(manifest: Manifest, codes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Those of the units up to the size with which most is saved, less a buffer for the largest of them."""
    sizes = manifest.aliases
    units = [[alias for alias in unit.aliases() if alias in codes] for unit in manifest.units]
    units.sort(key=lambda unit: sum(map(sizes.__getitem__, unit)))
    saved, most, num, taken = 0, 0, 0, set[str]()
    for index, unit in enumerate(units, 1):
        saved += sum(sizes[alias] - codes[alias][1] for alias in unit if alias not in taken)
        taken.update(unit)
        if (left := saved - sum(map(sizes.__getitem__, unit))) > most:
            most, num = left, index
    return {alias: codes[alias] for unit in units[:num] for alias in unit}


def eligible(patterns: frozenset[str], kept: frozenset[str] = frozenset()) -> Callable[[str], bool]:
    """Whether a name is none of `kept` and matches a pattern, or there are none."""
    return lambda name: name not in kept and (not patterns or any(name_matches(p, name) for p in patterns))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """One model cut into units in several ways, from blocks to single matrices, and the planner of each."""

    grains: tuple[Manifest, ...]
    planners: tuple[Planner, ...]

    @property
    def machine(self) -> Machine:
        return self.planners[0].machine

    def plan(self) -> tuple[int, Plan]:
        """The grain whose plan is predicted to be faster, then smaller, and that plan.

        Finer units need less ring and cost more launches. Raises the finest grain's `PlanError` where none fits.
        """
        plans: list[tuple[float, int, int, Plan]] = []
        refused: PlanError | None = None
        for index, (manifest, planner) in enumerate(zip(self.grains, self.planners, strict=True)):
            try:
                plan = planner(manifest)
            except PlanError as error:
                refused = error
            else:
                plans.append((plan.step_s, plan.device_nbytes, index, plan))
        if not plans:
            assert refused is not None
            raise refused
        _, _, index, plan = min(plans, key=lambda found: found[:3])
        return index, plan

    def within(self, budget: int) -> Prospect:
        """The same with another device budget."""
        host = tuple(entry for entry in self.planners[0].config.max_memory if entry[0] == "cpu")
        over = {"device_budget": budget, "max_memory": host}
        planners = (replace(p, config=p.config.model_copy(update=over)) for p in self.planners)
        return replace(self, planners=tuple(planners))

    def sweep(self, budgets: Iterable[int]) -> Iterator[tuple[int, Plan | None]]:
        """The plan at each budget, None where none fits."""
        for budget in budgets:
            try:
                yield budget, self.within(budget).plan()[1]
            except PlanError:
                yield budget, None

    def enough(self, plan: Plan) -> Plan | None:
        """A plan with less device memory that takes the same time, within a thousandth, if there is one.

        Only a step that computes longer than it copies has one. Found by bisection, eight budgets deep.
        """
        if not plan.budget or plan.copy_s >= plan.compute_s or not plan.offloaded_nbytes:
            return None
        low, high, best = 0, plan.budget, None
        for _ in range(_BISECTIONS):
            ((middle, found),) = self.sweep([(low + high) // 2])
            if found is not None and found.step_s <= plan.step_s * (1 + _AS_FAST):
                best, high = found, middle
            else:
                low = middle
        return best

    def shortage(self, plan: Plan) -> str | None:
        """In words, where weights, activations and cache are more than the device has free; None: they fit."""
        workspace_nbytes = self.machine.profile.workspace_nbytes
        needed = plan.device_nbytes + plan.activation_nbytes + plan.cache_nbytes + workspace_nbytes
        if (
            self.machine.on_cpu
            or not (self.machine.free_nbytes and plan.activation_nbytes)
            or needed <= self.machine.free_nbytes
        ):
            return None
        return (
            f"weights {human(plan.device_nbytes)} + activations {human(plan.activation_nbytes)} + cache "
            f"{human(plan.cache_nbytes)} + workspace {human(workspace_nbytes)} = {human(needed)} > "
            f"{human(self.machine.free_nbytes)} free on the device: lower device_budget, batch or context"
        )
