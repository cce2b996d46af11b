"""The planner of a streamer, and what it has learned since: measured times, true sizes of coded weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from weightstream.plan.check import prove
from weightstream.plan.manifest import Manifest
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Planner
from weightstream.plan.refine import Refined, Times, refine
from weightstream.runtime.timeline import Kind, Measured, Timeline

logger = logging.getLogger("weightstream")

_EVERY = 4  # steps
_FROM = 3  # timed steps of one kind
_MOVES = 2  # to a better plan, at most: workloads that alternate must not move weights for ever


class Refinement:
    """Plans, and plans again: with the measured times of steps, each kind of them once."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._kind: Kind | None = None  # of the steps that the plan was held against last
        self._num_moves = 0

    def plan(self, manifest: Manifest) -> Plan:
        """The plan of a manifest, proved. Raises `PlanError`."""
        plan = self._planner(manifest)
        prove(plan)
        return plan

    def replan(self, manifest: Manifest, *, kept: frozenset[str], movable: frozenset[str]) -> Plan:
        """The same with the alias groups `kept` on the device for good, now that those `movable` can be on disk.

        Raises `PlanError` where that does not fit.
        """
        self._planner = replace(self._planner, weights=replace(self._planner.weights, movable=movable))
        return self.plan(manifest.plain().keeping(kept))

    def learn_sizes(self, sizes: Mapping[str, Mapping[int, int]]) -> None:
        """Take over what coded weights take, which was estimated before."""
        known = dict(self._planner.weights.codes())
        known |= {alias: {**known.get(alias, {}), **found} for alias, found in sizes.items()}
        weights = replace(self._planner.weights, codes=partial(dict, known))
        self._planner = replace(self._planner, weights=weights)

    def refine(self, plan: Plan, num_steps: int, timeline: Timeline) -> tuple[Plan, Plan | None] | None:
        """The plan in force as measured times predict it, and a better one to move to; None where nothing is new."""
        if num_steps % _EVERY or timeline.kind in (None, self._kind):
            return None
        measured = timeline.measured()
        if measured is None or measured.num_steps < _FROM:
            return None
        refined: Refined = refine(self._planner, plan, _times(measured))
        self._kind = measured.kind
        told = f"{1e3 * measured.step_s:.1f} ms per step, {1e3 * plan.step_s:.1f} predicted"
        coded = refined.plan.manifest.codes  # of a code that moves, what it costs to encode is not known
        if refined.better is None or self._num_moves >= _MOVES or coded:
            logger.info("%s; from what was measured %.1f", told, 1e3 * refined.plan.step_s)
            return refined.plan, None
        logger.info("%s; moving to a plan of %.1f: %s", told, 1e3 * refined.better.step_s, refined.better.summary())
        self._num_moves += 1
        self._kind = None  # the steps of the new plan are to be measured
        prove(refined.better)
        return refined.plan, refined.better


def _times(measured: Measured) -> Times:
    streamed = {index: unit for index, unit in enumerate(measured.units) if unit.nbytes}
    return Times(
        step_s=measured.step_s,
        computes={index: unit.compute_s for index, unit in streamed.items()},
        copies={index: (unit.nbytes, unit.copy_s) for index, unit in streamed.items() if unit.copy_s},
    )
