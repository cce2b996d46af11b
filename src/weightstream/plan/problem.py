"""The prospect of a model: its plans in several grains, at other budgets, and what is short. Decides by predictions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from weightstream.errors import PlanError
from weightstream.plan.candidates import Share
from weightstream.plan.manifest import KEPT, Manifest, Workload
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine, Planner, Refusal, fastest
from weightstream.plan.search import Candidate
from weightstream.plan.units import human

_BISECTIONS = 8
_AS_FAST = 1e-3
_GAIN = 0.03  # of a step's time, below which another plan is not worth moving to
_STEPS = 500  # in which the move must pay
_MOVED_BYTES_PER_S = 5e9  # to memory that is pinned anew


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """One model cut into units in several ways, from blocks to single matrices, and the planner of each.

    `whole`: why each step reads all experts, where it has to.
    """

    grains: tuple[Manifest, ...]
    planners: tuple[Planner, ...]
    whole: str | None = None

    @property
    def workload(self) -> Workload | None:
        """What a language model's step is planned for."""
        return self.planners[0].demand.workload

    def plan(self) -> tuple[int, Plan]:
        """The grain whose plan is predicted to be faster, then smaller, and that plan.

        Finer units need less ring and cost more launches. Raises the finest grain's `PlanError` where none fits.
        """
        every: list[Candidate] = []
        for manifest, planner in zip(self.grains, self.planners, strict=True):
            refusals: list[Refusal] = []  # of the finest, in the end
            every += planner.candidates(manifest, refusals)
        plan = fastest(every, refusals)
        index = self.grain_of(plan.manifest)
        return index, self.planners[index].priced(plan)

    def coarse(self) -> Prospect:
        """The same in the first grain alone, where that has a plan."""
        first = replace(self, grains=self.grains[:1], planners=self.planners[:1])
        return first if first.has_plan() else self

    def has_plan(self) -> bool:
        """Whether any plan fits, which takes less time than to find the best."""
        for manifest, planner in zip(self.grains, self.planners, strict=True):
            for candidate in planner.candidates(manifest, []):
                found = candidate.make()
                if isinstance(found, Plan) or any(True for _ in found or ()):
                    return True
        return False

    def grain_of(self, manifest: Manifest) -> int:
        """Which of the grains a plan's manifest is of."""
        names = _names(manifest)
        return next(index for index, grain in enumerate(self.grains) if _names(grain) == names)

    def within(self, budget: int) -> Prospect:
        """The same with another device budget."""
        config = self.planners[0].config.within(budget)
        return replace(self, planners=tuple(replace(planner, config=config) for planner in self.planners))

    def sharing(self, share: Share | None) -> Prospect:
        """The same in a share of memory that several models have in turn; None: in the whole budget."""
        return replace(self, planners=tuple(replace(planner, share=share) for planner in self.planners))

    def keeping(self, aliases: Collection[str]) -> Prospect:
        """The same with these alias groups on the device for good."""
        return replace(self, grains=tuple(grain.keeping(aliases) for grain in self.grains))

    def plan_at(self, budget: int) -> Plan | None:
        """The plan at another device budget, None where none fits."""
        try:
            return self.within(budget).plan()[1]
        except PlanError:
            return None

    def enough(self, plan: Plan) -> Plan | None:
        """A plan with less device memory that takes the same time, within a thousandth, if there is one.

        Only a step that computes longer than it copies has one. Found by bisection, eight budgets deep.
        """
        if not plan.budget or plan.copy_s >= plan.compute_s or not plan.offloaded_nbytes:
            return None
        low, high, best = 0, plan.budget, None
        for _ in range(_BISECTIONS):
            middle = (low + high) // 2
            found = self.plan_at(middle)
            if found is not None and all(
                getattr(found, name) <= getattr(plan, name) * (1 + _AS_FAST) for name in ("step_s", "graph_s")
            ):
                best, high = found, middle
            else:
                low = middle
        return best

    def shortage(self, plan: Plan) -> str | None:
        """In words, where weights, activations and cache are more than the device has free; None: they fit."""
        machine = self.planners[0].machine
        workspace_nbytes = machine.profile.workspace_nbytes
        needed = plan.device_nbytes + plan.activation_nbytes + plan.cache_nbytes + workspace_nbytes
        known = not machine.on_cpu and machine.free_nbytes and plan.activation_nbytes
        if not known or needed <= machine.free_nbytes:
            return None
        return (
            f"weights {human(plan.device_nbytes)} + activations {human(plan.activation_nbytes)} + cache "
            f"{human(plan.cache_nbytes)} + workspace {human(workspace_nbytes)} = {human(needed)} > "
            f"{human(machine.free_nbytes)} free on the device: lower device_budget, batch or context"
        )


def is_worth(plan: Plan, found: Plan, machine: Machine) -> bool:
    """Whether to move weights from a plan in force to another pays: soon, and without breaking the host."""
    gain_s, moved_s = plan.step_s - found.step_s, moved_nbytes(plan, found) / _MOVED_BYTES_PER_S
    home_again = plan.offloaded_nbytes + plan.resident_nbytes <= machine.host_free_nbytes
    return gain_s > _GAIN * plan.step_s and gain_s * _STEPS > moved_s and home_again


def moved_nbytes(plan: Plan, found: Plan) -> int:
    """Plain bytes of the weights that have another place, or another form, in one plan than in the other."""
    changed = (plan.resident ^ found.resident) | (plan.mapped ^ found.mapped) | (plan.disk ^ found.disk)
    changed |= plan.cached ^ found.cached
    changed |= plan.manifest.codes.keys() ^ found.manifest.codes.keys()
    return sum(nbytes for alias, nbytes in plan.manifest.spans.items() if alias in changed)


def _names(manifest: Manifest) -> list[str]:
    return [unit.name for unit in manifest.units if unit.name != KEPT]
