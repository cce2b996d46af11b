"""The planner's inputs of a streamer, and what it learns: work of calls, measured times, compressed sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from weightstream.errors import PlanError
from weightstream.plan.check import prove
from weightstream.plan.correction import Times, corrected
from weightstream.plan.expert_cache import Counts
from weightstream.plan.manifest import Manifest
from weightstream.plan.multi_device import Lane
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Planner
from weightstream.plan.planner_inputs import PlannerInputs, is_worth
from weightstream.plan.speculation import PassSeconds
from weightstream.runtime.ring.timeline import Kind, Measured, Timeline, kind_of_workload

logger = logging.getLogger("weightstream")

_EVERY, _AGAIN = 4, 64  # steps
_FROM = 3  # timed steps of one kind
_MISSED = 1.25  # factor between measured and predicted seconds from which measured times correct a known kind again
_DOUBTED = 2.0  # factor from which the profile of the machine is measured again

# (inputs, the method that is called, args, kwargs) -> the inputs for that call
ForCall = Callable[[PlannerInputs, str, Any, Any], PlannerInputs | None]


class Replanning:
    """Plans, and plans again with the work of calls before they run; measured times correct predictions.

    `for_call` returns the inputs for a call, or None if it cannot be traced. `doubt()` is called if the profile was far
    off. `with_passes` adds the work of passes of several tokens to the inputs.
    """

    def __init__(
        self,
        inputs: PlannerInputs,
        for_call: ForCall = lambda *_: None,
        doubt: Callable[[], None] = lambda: None,
        known: Collection[Kind] = (),
        with_passes: Callable[[PlannerInputs], PlannerInputs] = lambda inputs: inputs,
    ) -> None:
        self.inputs = inputs
        self.known = known  # kinds of calls that the inputs were gathered for
        self._for_call = for_call
        self._doubt = doubt
        self._with_passes = with_passes
        self._has_passes = False  # the inputs have them, or they cannot be found
        self.kept = frozenset[str]()  # alias groups that are on the device for good
        self._kind: Kind | None = None  # the kind of steps whose measured times corrected the plan last
        self._foreseen = _planned(inputs)  # the kind for whose traced work the plan's seconds are predicted
        self._looked_at = 0  # the number of steps when measured times were read last

    def plan(self, manifest: Manifest) -> Plan:
        """A plan of the manifest, checked by `prove`. Raises `PlanError`."""
        plan = self._planner_of(manifest)(manifest)
        prove(plan)
        return plan

    def _planner_of(self, manifest: Manifest) -> Planner:
        return self.inputs.planner(self.inputs.grain_of(manifest))

    def replan(self, manifest: Manifest, *, kept: frozenset[str], movable: frozenset[str]) -> Plan:
        """The plan with the alias groups `kept` on the device for good, where those in `movable` can be on disk.

        Raises `PlanError` where that does not fit.
        """
        self.inputs = replace(self.inputs, weights=replace(self.inputs.weights, movable=movable))
        plan = self.plan(manifest.plain().keeping(kept))
        self.kept = kept
        return plan

    def rebudget(self, device_budget: int | str | None) -> Plan:
        """The plan of another budget, which later plans keep. Raises `PlanError` where there is none."""
        inputs = self.inputs.at_budget(device_budget).keeping(self.kept)
        plan = inputs.plan()[1]
        prove(plan)
        self.inputs = inputs
        return plan

    def read_whole(self, plan: Plan) -> tuple[int, ...]:
        """Bytes of each weight that kernels read from host memory; of tables a step reads a few rows."""
        whole = plan.mapped - self.inputs.weights.by_row
        return tuple(nbytes for alias, nbytes in plan.manifest.aliases.items() if alias in whole)

    def pass_seconds(self, plan: Plan) -> tuple[PassSeconds, ...]:
        """Predicted seconds of passes of several tokens with this plan; empty: unknown. Takes about a second once."""
        if not self.inputs.passes and not self._has_passes:
            self.inputs = self._with_passes(self.inputs)
        self._has_passes = True
        return self.inputs.pass_seconds(plan)

    def lane(self, plan: Plan) -> Lane:
        """The lane of a plan, for one of several devices."""
        return Lane.of(plan, self._planner_of(plan.manifest))

    def learn_sizes(self, sizes: Mapping[str, int]) -> None:
        """Take over the true sizes of compressed weights, in bytes, which were estimated before."""
        weights = self.inputs.weights
        self.inputs = replace(self.inputs, weights=replace(weights, codes={**weights.codes, **sizes}))

    def cannot_map(self) -> None:
        """Kernels cannot read host memory after all."""
        self.inputs = replace(self.inputs, machine=replace(self.inputs.machine, maps_host_memory=False))

    def cannot_fetch(self) -> None:
        """Kernels cannot read single rows of stacks where these are."""
        self.inputs = replace(self.inputs, machine=replace(self.inputs.machine, fetches_rows=False))

    def foresee(self, plan: Plan, kind: Kind, args: Any, kwargs: Any) -> Plan | None:
        """The plan for calls with these arguments: the plan in force with their order and predictions, or a better one.

        None: the work of such calls is unknown.
        """
        inputs = self._for_call(self.inputs, kind.what, args, kwargs)
        if inputs is None:
            return None
        # weights that one kind of calls keeps on the device stay for all kinds
        self.inputs = inputs = inputs.keeping(self.kept)
        index = inputs.grain_of(plan.manifest)
        planner, grain = inputs.planner(index), inputs.grains[index]
        same = planner.priced(plan.reordered(grain.order))
        try:
            better = inputs.plan()[1]
        except PlanError as error:  # activations and cache of the call leave no room for a plan: it may still run
            logger.warning("%s", error)
            better = same
        fits = grain.kept <= plan.resident and (planner.budget is None or same.device_nbytes <= planner.budget)
        is_better = is_worth(same, better, planner.machine) and not (better.moving - same.moving)
        chosen = better if not fits or is_better else same
        if short := inputs.shortage(chosen):
            logger.warning("device memory may run out: %s", short)
        logger.info(
            "this call takes %.1f ms by its shapes, %.1f ms predicted without%s",
            1e3 * same.step_s,
            1e3 * plan.step_s,
            f"; a better plan takes {1e3 * better.step_s:.1f} ms" if chosen is better else "",
        )
        self._kind, self._foreseen = None, kind
        prove(chosen)
        return chosen

    def correct(self, plan: Plan, num_steps: int, timeline: Timeline) -> Plan | None:
        """The plan in force with predictions from measured times; None if there are no new ones.

        Steps of a known kind are compared again now and then: other programs may have started or ended, and caches of
        experts have counted more hits and misses.
        """
        is_known = timeline.kind == self._kind
        if timeline.kind is None or num_steps - self._looked_at < (_AGAIN if is_known else _EVERY):
            return None
        self._looked_at = num_steps
        measured = timeline.measured()
        if measured is None or measured.num_steps < _FROM:
            return None
        missed = max(measured.step_s, plan.step_s) / (min(measured.step_s, plan.step_s) or 1e-9)
        if not self._learn_counts(timeline.tally.counts()) and is_known and missed <= _MISSED:
            return None
        if missed > _DOUBTED and timeline.kind == self._foreseen:
            self._doubt()
        self._kind, self._foreseen = measured.kind, None  # from now on predictions hold measured times
        found = corrected(self._planner_of(plan.manifest), plan, _times(measured))
        logger.info(
            "%.1f ms per step, %.1f ms predicted; %.1f ms with measured times",
            1e3 * measured.step_s,
            1e3 * plan.step_s,
            1e3 * found.step_s,
        )
        return found

    def _learn_counts(self, counts: Counts | None) -> bool:
        """Plan with these counts of caches from now on if they are twice as many as before; return whether they are."""
        known = self.inputs.counts
        if counts is None or counts.num_rows < 2 * (known.num_rows if known else 1):
            return False
        self.inputs = replace(self.inputs, counts=counts._replace(workload=self.inputs.workload))
        return True


def _planned(inputs: PlannerInputs) -> Kind | None:
    """The kind of the steps whose work was known before any call."""
    demand = inputs.demands[0]
    return kind_of_workload(demand.workload) if demand.workload is not None and demand.work else None


def _times(measured: Measured) -> Times:
    streamed = {index: unit for index, unit in enumerate(measured.units) if unit.nbytes}
    return Times(
        step_s=measured.step_s,
        host_s=measured.host_s,
        computes={index: unit.compute_s for index, unit in streamed.items()},
        copies={index: (unit.nbytes, unit.copy_s) for index, unit in streamed.items() if unit.copy_s},
    )
