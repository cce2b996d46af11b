"""The prediction of a plan, corrected by the measured times of its steps. It says nothing of other plans.

Compute is measured from the wait of one unit that streams to the wait of the next, so what units between them take
(those that are resident open no wait) is told by the estimates, scaled to the sum that was measured.
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

_UNTOLD = 1.1  # a step takes so much longer than its units tell


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Measured seconds of a step, of the host for it, and of its units that stream, by index, `computes` and, with
    their bytes, `copies`. The host takes no longer than so."""

    step_s: float
    host_s: float
    computes: Mapping[int, float]
    copies: Mapping[int, tuple[int, float]]


def corrected(planner: Planner, plan: Plan, times: Times) -> Plan:
    """The plan with predictions that agree with the measured times; `planner` predicts the rest."""
    profile = planner.machine.profile
    if plan.cached:  # the seconds of the units include the fetches of rows, which counts predict
        return _as_a_whole(plan if planner.counts is None else planner.priced(plan), times)
    if plan.step_nbytes and not times.computes:
        return _as_a_whole(plan, times)
    if plan.limit == "disk":
        profile = replace(profile, disk_bytes_per_s=plan.step_disk_nbytes / times.step_s)
    elif rates := _rates(times, profile.copy_latency_s):
        profile = replace(profile, link_bytes_per_s=median(rates))
    told = planner.profile(plan.manifest)
    host_s, estimates = cost.host_s(plan, told), cost.unit_s(plan, told)
    profile = _quicker(profile, min(1.0, times.host_s / host_s) if host_s else 0.0)
    machine = replace(planner.machine, profile=profile, disk_bytes_per_s=None)
    decodes = {unit.name: told.decode_s(u, unit) for u, unit in enumerate(plan.manifest.units)}
    seconds = {name: max(0.0, s - decodes[name]) for name, s in corrected_unit_s(plan, estimates, times).items()}
    found = replace(planner, machine=machine, unit_s=seconds).priced(plan)
    if times.step_s > _UNTOLD * found.step_s:  # others on the device, slower handovers
        return _as_a_whole(found, times)
    return found


def _quicker(profile: Profile, ratio: float) -> Profile:
    """The same with so much of the host's seconds. What a slower host costs is in what units compute."""
    names = ("op_launch_s", "overhead_s", "show_s", "fill_s", "decoding_launch_s")
    return replace(profile, **{name: getattr(profile, name) * ratio for name in names})


def _as_a_whole(plan: Plan, times: Times) -> Plan:
    """Where only the time of whole steps is known, as of graphs: what is busy longest takes so much more or less."""
    ratio, limit = times.step_s / plan.step_s if plan.step_s else 1.0, f"{plan.limit}_s"
    names = ("compute_s", "decode_s") if plan.limit == "compute" else ("copy_s" if plan.limit == "link" else limit,)
    return replace(plan, step_s=times.step_s, **{name: getattr(plan, name) * ratio for name in names})


def _rates(times: Times, latency_s: float) -> list[float]:
    """Of the large copies: those that ran beside kernels that read over the link are slower, and few."""
    large = max((nbytes for nbytes, _ in times.copies.values()), default=0) / 4
    found = ((nbytes, seconds - latency_s) for nbytes, seconds in times.copies.values() if nbytes >= large)
    return [nbytes / seconds for nbytes, seconds in found if seconds > 0]


def corrected_unit_s(plan: Plan, estimates: Sequence[float], times: Times) -> dict[str, float]:
    """Seconds of every unit of the order by name, which sum up to what was measured; none where nothing tells."""
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
    """Positions from one wait to the next, cyclically, and what they took; all, where nothing streams."""
    order = plan.manifest.order
    waits = [position for position, unit in enumerate(order) if unit in times.computes]
    if not waits:
        yield _Span(list(range(len(order))), times.step_s)
    for begin, end in pairwise([*waits, *(first + len(order) for first in waits[:1])]):
        yield _Span([position % len(order) for position in range(begin, end)], times.computes[order[begin]])
