"""The planner's inputs: one frozen value with everything that a plan of a model depends on, and the plans made from it.

A model is cut into units in several grains, from blocks to single matrices; each grain has a planner of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from weightstream.errors import PlanError
from weightstream.plan.candidates import Share
from weightstream.plan.expert_cache import Counts
from weightstream.plan.manifest import KEPT, Manifest, Workload
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Demand, Machine, Planner, Refusal, Weights, fastest
from weightstream.plan.search import Candidate
from weightstream.plan.speculation import PassSeconds
from weightstream.plan.units import human, per_second
from weightstream.settings.config import OffloadConfig

_BISECTIONS = 8
_AS_FAST = 1e-3
_GAIN = 0.03  # a smaller share of a step's time is not worth a change of plan
_STEPS = 500  # within which a change must pay
_MOVED_BYTES_PER_S = 5e9  # includes the time to pin new host memory


class ChosenPlan(NamedTuple):
    """The fastest plan over all grains, and the index of its grain."""

    grain: int
    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerInputs:
    """Everything that a planner must know of one model on one machine. Prints as a table.

    Attributes:
        config: what the caller asks for.
        machine: memory, links and rates of the device and its host.
        weights: names of the alias groups, where each may be placed, and their compressed sizes.
        grains: the model in units, one manifest per grain, coarsest first.
        demands: what a step needs besides weights, one per grain.
        share: device memory of this model where several take turns in one budget; None: the config's budget.
        counts: hits and misses of an expert cache that ran; None: assumed.
        whole_experts: why every step reads all experts, in words; None: it does not.
        passes: what passes of several tokens need, by their number, each like `demands`; empty: none are planned.
        reserved_nbytes: bytes of the budget that another model takes, such as a draft.
    """

    config: OffloadConfig
    machine: Machine
    weights: Weights
    grains: tuple[Manifest, ...]
    demands: tuple[Demand, ...]
    share: Share | None = None
    counts: Counts | None = None
    whole_experts: str | None = None
    passes: Mapping[int, tuple[Demand, ...]] = field(default_factory=dict)
    reserved_nbytes: int = 0

    @property
    def planners(self) -> tuple[Planner, ...]:
        """The planner of each grain."""
        return tuple(map(self.planner, range(len(self.grains))))

    def planner(self, grain: int) -> Planner:
        """The planner of one grain, by its index."""
        return Planner(
            config=self.config,
            machine=self.machine,
            weights=self.weights,
            demand=self.demands[grain],
            share=self.share,
            counts=self.counts,
            reserved_nbytes=self.reserved_nbytes,
        )

    @property
    def budget(self) -> int | None:
        """Bytes of device memory for weights; None: as many as the classic settings leave there."""
        return self.planner(0).budget

    @property
    def workload(self) -> Workload | None:
        """The step of a language model that is planned for; None for any other model."""
        return self.demands[0].workload

    @property
    def may_compress(self) -> bool:
        """Whether a plan can depend on which weights can be compressed."""
        return self.planner(-1).may_compress(self.grains[-1])

    @property
    def may_use_disk(self) -> bool:
        """Whether a plan may leave weights on disk."""
        return self.planner(-1).may_use_disk(self.grains[-1])

    def plan(self) -> ChosenPlan:
        """The plan with the shortest predicted step over all grains; if equal, that with the fewest device bytes.

        Finer units need a smaller ring, but more launches. Where a backward recomputes whole blocks, finer units are
        tried only if blocks have no plan: each would open three times in a step. Raises the finest grain's `PlanError`
        if no plan fits.
        """
        training = self.demands[0].training
        if training is not None and training.recomputes and len(self.grains) > 1:
            try:
                return self._fastest(self.grains[:1])
            except PlanError:
                pass  # a smaller ring may do
        return self._fastest(self.grains)

    def _fastest(self, grains: Sequence[Manifest]) -> ChosenPlan:
        candidates: list[Candidate] = []
        for manifest, planner in zip(grains, self.planners, strict=False):
            refusals: list[Refusal] = []  # of the finest grain, after the loop
            candidates += planner.candidates(manifest, refusals)
        plan = fastest(candidates, refusals)
        grain = self.grain_of(plan.manifest)
        plan = self.planner(grain).priced(plan)
        return ChosenPlan(grain, replace(plan, passes=self.pass_seconds(plan)))

    def pass_seconds(self, plan: Plan) -> tuple[PassSeconds, ...]:
        """The predicted seconds of passes of several tokens with this plan, for each number of `passes`."""
        if not self.passes:
            return ()
        grain = self.grain_of(plan.manifest)
        planner = self.planner(grain)
        priced = {n: replace(planner, demand=each[grain]).priced(plan) for n, each in sorted(self.passes.items())}
        return tuple(PassSeconds(tokens=n, step_s=p.step_s, graph_s=p.graph_s) for n, p in priced.items())

    def with_memory_of(self, tokens: int) -> PlannerInputs:
        """The same inputs, with room for the cache and the logits of a pass of so many tokens."""
        width = min((n for n in self.passes if n >= tokens), default=None)
        if width is None:
            return self
        demands = tuple(
            replace(
                demand,
                activation_nbytes=max(demand.activation_nbytes, more.activation_nbytes),
                cache_nbytes=max(demand.cache_nbytes, more.cache_nbytes),
            )
            for demand, more in zip(self.demands, self.passes[width], strict=True)
        )
        return replace(self, demands=demands)

    def coarse(self) -> PlannerInputs:
        """The same inputs with only the coarsest grain, if that has a plan; else unchanged."""
        passes = {tokens: demands[:1] for tokens, demands in self.passes.items()}
        coarsest = replace(self, grains=self.grains[:1], demands=self.demands[:1], passes=passes)
        return coarsest if coarsest.has_plan() else self

    def has_plan(self) -> bool:
        """Whether any plan fits. Takes less time than `plan`."""
        for manifest, planner in zip(self.grains, self.planners, strict=True):
            for candidate in planner.candidates(manifest, []):
                plan = candidate.make()
                if isinstance(plan, Plan) or any(True for _ in plan or ()):
                    return True
        return False

    def grain_of(self, manifest: Manifest) -> int:
        """The index of the grain that a plan's manifest belongs to."""
        names = _names(manifest)
        return next(index for index, grain in enumerate(self.grains) if _names(grain) == names)

    def keeping(self, aliases: Collection[str]) -> PlannerInputs:
        """The same inputs with these alias groups resident in every plan."""
        return replace(self, grains=tuple(grain.keeping(aliases) for grain in self.grains))

    def at_budget(self, device_budget: int | str | None) -> PlannerInputs:
        """The same inputs with another device budget, in bytes or as a share."""
        return replace(self, config=self.config.within(device_budget))

    def plan_at(self, device_budget: int) -> Plan | None:
        """The plan at another device budget, in bytes; None if no plan fits."""
        try:
            return self.at_budget(device_budget).plan().plan
        except PlanError:
            return None

    def enough(self, plan: Plan) -> Plan | None:
        """A plan at a smaller budget whose step takes at most a thousandth longer; None if none was found.

        There can only be one if a step computes longer than it copies. Eight steps of bisection over budgets.
        """
        if not plan.budget or plan.copy_s >= plan.run_compute_s or not plan.offloaded_nbytes:
            return None
        low, high, best = 0, plan.budget, None
        for _ in range(_BISECTIONS):
            middle = (low + high) // 2
            smaller = self.plan_at(middle)
            if smaller is not None and all(
                getattr(smaller, name) <= getattr(plan, name) * (1 + _AS_FAST) for name in ("step_s", "graph_s")
            ):
                best, high = smaller, middle
            else:
                low = middle
        return best

    def shortage(self, plan: Plan) -> str | None:
        """The arithmetic, if weights, activations and cache are more than the free device memory; None: they fit."""
        machine = self.machine
        workspace_nbytes = machine.profile.workspace_nbytes
        needed = plan.device_nbytes + plan.beside_nbytes + workspace_nbytes
        needed += self.reserved_nbytes
        is_known = not machine.on_cpu and machine.free_nbytes and plan.activation_nbytes
        if not is_known or needed <= machine.free_nbytes:
            return None
        training = self.demands[0].training
        if training is not None:
            checkpoints = "use checkpoints, " if training.checkpointed_nbytes else ""
            return (
                f"weights {human(plan.device_nbytes)} + {training.explained(plan.activation_nbytes)} + workspace "
                f"{human(workspace_nbytes)} = {human(needed)} > {human(machine.free_nbytes)} free on the device: "
                f"{checkpoints}lower device_budget, or train on fewer tokens at once"
            )
        draft = f"draft {human(self.reserved_nbytes)} + " if self.reserved_nbytes else ""
        return (
            f"{draft}weights {human(plan.device_nbytes)} + activations {human(plan.activation_nbytes)} + cache "
            f"{human(plan.cache_nbytes)} + workspace {human(workspace_nbytes)} = {human(needed)} > "
            f"{human(machine.free_nbytes)} free on the device: lower device_budget, batch or context"
        )

    def __str__(self) -> str:
        return "\n".join(f"{label:<12}{text}" for label, text in self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        machine, demand = self.machine, self.demands[0]
        device = "the CPU" if machine.on_cpu else machine.profile.machine or "a GPU with assumed rates"
        memory = f"{human(machine.free_nbytes)} of {human(machine.total_nbytes)} free"
        step = str(demand.workload) if demand.workload is not None else "one call" if demand.work else "any call"
        activations = f"{human(demand.activation_nbytes)} of activations" if demand.activation_nbytes else ""
        yield "budget", self._budget_text()
        yield "device", f"{device}, {memory if machine.total_nbytes else 'its memory is unknown'}"
        host = f"{human(machine.host_free_nbytes)} of {human(machine.host_total_nbytes)} free"
        yield "host", "as much memory as needed" if machine.profile.assumed_from else host
        yield "rates", ", ".join(self._rates())
        yield "weights", self._weights_text()
        yield "units", f"{', '.join(str(len(grain.order)) for grain in self.grains)} in a step, by grain"
        yield "step", f"{step}, its work is {'known' if demand.work else 'unknown'}"
        yield "besides", f"{activations or 'activations unknown'}, {human(demand.cache_nbytes)} of cache"
        if self.counts is not None:
            yield (
                "experts",
                f"{self.counts.found} hits and {self.counts.fetched} misses in {self.counts.num_slots} slots",
            )
        if self.whole_experts is not None:
            yield "experts", self.whole_experts

    def _budget_text(self) -> str:
        if self.share is not None:
            kept, ring = human(self.share.kept_nbytes), human(self.share.ring_nbytes)
            return f"{kept} of device memory for resident weights, {ring} for a ring that other models use, too"
        if self.budget is not None:
            return f"{human(self.budget)} of device memory for weights"
        return "all weights on the device" if self.config.backend == "none" else f"the {self.config.backend} settings"

    def _weights_text(self) -> str:
        manifest, codes = self.grains[-1].plain(), self.weights.codes
        text = f"{human(manifest.nbytes)} of weights"
        if not codes:
            return text
        plain_nbytes = sum(manifest.aliases.get(alias, 0) for alias in codes)
        return f"{text}; {human(plain_nbytes)} of them can be compressed to {human(sum(codes.values()))}"

    def _rates(self) -> Iterator[str]:
        """Rates of the machine that a plan can depend on."""
        machine, profile = self.machine, self.machine.profile
        yield f"link {per_second(profile.link_bytes_per_s)}"
        if machine.disk_bytes_per_s is not None:
            yield f"disk {per_second(machine.disk_bytes_per_s)}"
        if machine.can_decode:
            for dtype in sorted({t.dtype for t in self.grains[-1].tensors() if t.alias in self.weights.codes}):
                yield f"decompression of {dtype} {per_second(profile.decode_bytes_per_s(dtype))}"


def is_worth(plan: Plan, found: Plan, machine: Machine) -> bool:
    """Whether a change from the plan in force to another one pays, within 500 steps, and the host has room for it."""
    gain_s, moved_s = plan.step_s - found.step_s, moved_nbytes(plan, found) / _MOVED_BYTES_PER_S
    home_again = plan.offloaded_nbytes + plan.resident_nbytes <= machine.host_free_nbytes
    return gain_s > _GAIN * plan.step_s and gain_s * _STEPS > moved_s and home_again


def moved_nbytes(plan: Plan, found: Plan) -> int:
    """Uncompressed bytes of the weights whose place or form differs between two plans."""
    changed = (plan.resident ^ found.resident) | (plan.mapped ^ found.mapped) | (plan.disk ^ found.disk)
    changed |= plan.cached ^ found.cached
    changed |= plan.manifest.codes.keys() ^ found.manifest.codes.keys()
    return sum(nbytes for alias, nbytes in plan.manifest.spans.items() if alias in changed)


def _names(manifest: Manifest) -> list[str]:
    return [unit.name for unit in manifest.units if unit.name != KEPT]
