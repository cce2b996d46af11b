"""Corrects the prediction of a plan by measured times of its steps. Does not predict other plans.

Compute is measured from the wait of one streamed unit to the wait of the next. Resident units in between have no wait.
So the measured time is divided among the units in proportion to their estimates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from weightstream.plan import cost
from weightstream.plan.manifest import Profile
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Planner

_UNEXPLAINED = 1.1  # a step that takes more than this many times the prediction from its units is scaled as a whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Measured seconds of the steps of a plan.

    Attributes:
        step_s: seconds of a step.
        host_s: seconds of the host for a step, an upper bound.
        computes: seconds of compute from a streamed unit's wait to the next one's, by index of the unit.
        copies: bytes and seconds of the copy of each streamed unit, by index of the unit.
    """

    step_s: float
    host_s: float
    computes: Mapping[int, float]
    copies: Mapping[int, tuple[int, float]]


def corrected(planner: Planner, plan: Plan, times: Times) -> Plan:
    """The plan with predictions that agree with the measured times; `planner` predicts all that is not measured."""
    found = _corrected(planner, plan, times)
    return replace(found, basis="steps", graph_s=found.step_s if found.on_cpu else found.graph_s)


def _corrected(planner: Planner, plan: Plan, times: Times) -> Plan:
    profile = replace(planner.machine.profile, compute_lost=0.0)  # measured compute includes it
    if plan.cached:  # the seconds of the units include the fetches of rows, which counts predict
        return _as_it_runs(plan if planner.counts is None else planner.priced(plan), times)
    if plan.step_nbytes and not times.computes:
        return _as_it_runs(plan, times)
    if plan.limit == "disk":
        profile = replace(profile, disk_bytes_per_s=plan.step_disk_nbytes / times.step_s)
    elif rates := _rates(times, profile.copy_latency_s):
        profile = replace(profile, link_bytes_per_s=median(rates))
    estimated = planner.profile(plan.manifest)
    host_s, estimates = cost.host_s(plan, estimated), cost.unit_s(plan, estimated)
    profile = _quicker(profile, min(1.0, times.host_s / host_s) if host_s else 0.0)
    machine = replace(planner.machine, profile=profile, disk_bytes_per_s=None)
    decodes = {unit.name: estimated.decode_s(u, unit) for u, unit in enumerate(plan.manifest.units)}
    seconds = {name: max(0.0, s - decodes[name]) for name, s in corrected_unit_s(plan, estimates, times).items()}
    priced = replace(planner, machine=machine, unit_s=seconds).priced(plan)
    # the cause may be other programs on the device, or slower handovers
    if times.step_s > _UNEXPLAINED * priced.step_s:
        return _as_a_whole(priced, times, in_graphs=False)
    return priced


def _quicker(profile: Profile, ratio: float) -> Profile:
    """The profile with the host's seconds reduced to this share. Not raised: measured compute includes a slow host."""
    names = ("op_launch_s", "overhead_s", "show_s", "fill_s", "decoding_launch_s")
    return replace(profile, **{name: getattr(profile, name) * ratio for name in names})


def _as_a_whole(plan: Plan, times: Times, *, in_graphs: bool) -> Plan:
    """The plan with the measured step, for steps timed only as a whole: the resource that is busiest in them scales."""
    ran = replace(plan, in_graphs=in_graphs)
    ratio = times.step_s / ran.run_s if ran.run_s else 1.0
    busiest = "copy_s" if ran.limit == "link" else f"{ran.limit}_s"
    names = ("compute_s", "graph_compute_s", "decode_s") if ran.limit == "compute" else (busiest,)
    return replace(plan, step_s=times.step_s, **{name: getattr(plan, name) * ratio for name in names})


def _as_it_runs(plan: Plan, times: Times) -> Plan:
    """The same for steps of which no unit was timed, such as graphs: they are timed as `generate` runs them."""
    found = _as_a_whole(plan, times, in_graphs=plan.in_graphs)
    return replace(found, graph_s=times.step_s) if plan.in_graphs else found


def _rates(times: Times, latency_s: float) -> list[float]:
    """Bytes per second of the large copies. The median hides the few that shared the link with reads by kernels."""
    large_nbytes = max((nbytes for nbytes, _ in times.copies.values()), default=0) / 4
    copies = ((nbytes, seconds - latency_s) for nbytes, seconds in times.copies.values() if nbytes >= large_nbytes)
    return [nbytes / seconds for nbytes, seconds in copies if seconds > 0]


def corrected_unit_s(plan: Plan, estimates: Sequence[float], times: Times) -> dict[str, float]:
    """Seconds of every unit in the order, by name; their sum is the measured time."""
    units, order = plan.manifest.units, plan.manifest.order
    by_unit: dict[str, list[float]] = defaultdict(list)
    for positions, seconds in _spans(plan, times):
        expected = [estimates[order[p]] for p in positions]
        total = sum(expected)
        for position, share in zip(positions, expected, strict=True):
            by_unit[units[order[position]].name].append(seconds * (share / total if total else 1 / len(positions)))
    return {name: fmean(seconds) for name, seconds in by_unit.items()}


class _Span(NamedTuple):
    """Consecutive positions of the order, cyclically, and the measured seconds of all of them."""

    positions: list[int]
    seconds: float


def _spans(plan: Plan, times: Times) -> Iterator[_Span]:
    """The spans from one wait to the next; one span of all positions if nothing streams."""
    order = plan.manifest.order
    waits = [position for position, unit in enumerate(order) if unit in times.computes]
    if not waits:
        yield _Span(list(range(len(order))), times.step_s)
    for begin, end in pairwise([*waits, *(first + len(order) for first in waits[:1])]):
        yield _Span([position % len(order) for position in range(begin, end)], times.computes[order[begin]])
