"""Refinement: what the measured times of a plan's steps say of the plan, and of others. Decides; moves nothing.

Compute is measured from the wait of one unit that streams to the wait of the next, so what units between them take
(those that are resident open no wait) is told by the estimates, scaled to the sum that was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from weightstream.errors import PlanError
from weightstream.plan import cost
from weightstream.plan.manifest import Profile
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Planner

_GAIN = 0.03  # of a step's time, below which another plan is not worth moving to
_STEPS = 500  # in which the move must pay
_UNTOLD = 1.1  # a step takes so much longer than its units tell
_MOVED_BYTES_PER_S = 5e9  # to memory that is pinned anew


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Measured seconds of a step, of the host for it, and of its units that stream, by index, `computes` and, with
    their bytes, `copies`. The host takes no longer than so."""

    step_s: float
    host_s: float
    computes: Mapping[int, float]
    copies: Mapping[int, tuple[int, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refined:
    """A planner that knows what was measured, the plan in force as that predicts it, and a plan worth moving to.

    `is_whole`: only the step as a whole told.
    """

    planner: Planner
    plan: Plan
    better: Plan | None
    is_whole: bool = False


def refine(planner: Planner, plan: Plan, times: Times, *, may_move: bool = True) -> Refined:
    """What the planner makes of the measured times of a plan of its own, and, where it may move, of others."""
    profile = planner.machine.profile
    if plan.cached:
        return _counted(planner, plan, times, may_move=may_move)
    if plan.step_nbytes and not times.computes:
        return _as_a_whole(planner, plan, times)
    if plan.limit == "disk":
        profile = replace(profile, disk_bytes_per_s=plan.step_disk_nbytes / times.step_s)
    elif rates := _rates(times, profile.copy_latency_s):
        profile = replace(profile, link_bytes_per_s=median(rates))
    told = planner.profile(plan.manifest)
    host_s, estimates = cost.host_s(plan, told), cost.unit_s(plan, told)
    profile = _quicker(profile, min(1.0, times.host_s / host_s) if host_s else 0.0)
    machine = replace(planner.machine, profile=profile, disk_bytes_per_s=None)
    decodes = {unit.name: told.decode_s(u, unit) for u, unit in enumerate(plan.manifest.units)}
    seconds = {name: max(0.0, s - decodes[name]) for name, s in unit_s(plan, estimates, times).items()}
    found = replace(planner, machine=machine, unit_s=seconds, measured_reads=plan.mapped)
    refined = found.priced(plan)
    if times.step_s > _UNTOLD * refined.step_s:  # others on the device, slower handovers
        return _as_a_whole(found, refined, times)
    return Refined(planner=found, plan=refined, better=_better(found, refined, times.step_s) if may_move else None)


def _quicker(profile: Profile, ratio: float) -> Profile:
    """The same with so much of the host's seconds. What a slower host costs is in what units compute."""
    names = ("op_launch_s", "overhead_s", "show_s", "fill_s", "decoding_launch_s")
    return replace(profile, **{name: getattr(profile, name) * ratio for name in names})


def _as_a_whole(planner: Planner, plan: Plan, times: Times) -> Refined:
    """Where only steps as a whole tell, as of graphs: what is busy longest takes so much more than predicted.

    Nothing tells how another plan would do.
    """
    ratio, limit = times.step_s / plan.step_s if plan.step_s else 1.0, f"{plan.limit}_s"
    names = ("compute_s", "decode_s") if plan.limit == "compute" else ("copy_s" if plan.limit == "link" else limit,)
    busy = {name: getattr(plan, name) * ratio for name in names}
    return Refined(planner=planner, plan=replace(plan, step_s=times.step_s, **busy), better=None, is_whole=True)


def _counted(planner: Planner, plan: Plan, times: Times, *, may_move: bool) -> Refined:
    """Where rows are fetched, what that takes is in the units' times: counts tell it apart, and how others would do."""
    if planner.counts is None:
        return _as_a_whole(planner, plan, times)
    counted = planner.priced(plan)
    is_told = times.step_s <= _UNTOLD * counted.step_s
    better = _better(planner, counted, times.step_s) if may_move and is_told else None
    return replace(_as_a_whole(planner, counted, times), better=better)


def _rates(times: Times, latency_s: float) -> list[float]:
    """Of the large copies: those that ran beside kernels that read over the link are slower, and few."""
    large = max((nbytes for nbytes, _ in times.copies.values()), default=0) / 4
    found = ((nbytes, seconds - latency_s) for nbytes, seconds in times.copies.values() if nbytes >= large)
    return [nbytes / seconds for nbytes, seconds in found if seconds > 0]


def unit_s(plan: Plan, estimates: Sequence[float], times: Times) -> dict[str, float]:
    """Seconds of every unit of the order by name, which sum up to what was measured; none where nothing tells."""
    units, order = plan.manifest.units, plan.manifest.order
    found: dict[str, list[float]] = defaultdict(list)
    for positions, seconds in _spans(plan, times):
        expected = [estimates[order[p]] for p in positions]
        total = sum(expected)
        for position, share in zip(positions, expected, strict=True):
            found[units[order[position]].name].append(seconds * (share / total if total else 1 / len(positions)))
    return {name: fmean(seconds) for name, seconds in found.items()}


def _spans(plan: Plan, times: Times) -> Iterator[tuple[list[int], float]]:
    """Positions from one wait to the next, cyclically, and what they took; all, where nothing streams."""
    order = plan.manifest.order
    waits = [position for position, unit in enumerate(order) if unit in times.computes]
    if not waits:
        yield list(range(len(order))), times.step_s
    for begin, end in pairwise([*waits, *(first + len(order) for first in waits[:1])]):
        yield [position % len(order) for position in range(begin, end)], times.computes[order[begin]]


def _better(planner: Planner, plan: Plan, measured_s: float) -> Plan | None:
    if set(plan.manifest.order) != set(range(len(plan.manifest.units))):
        return None  # of units that the learned order leaves out nothing is known
    try:
        found = planner(plan.manifest)
    except PlanError:
        return None
    return found if is_worth(planner, plan, found, measured_s) else None


def is_worth(planner: Planner, plan: Plan, found: Plan, measured_s: float) -> bool:
    """Whether to move from a plan, whose steps take that long, to another pays: soon, and without breaking the host."""
    step_s = min(plan.step_s, measured_s)  # less was measured where copies go on between the steps
    gain_s, moved_s = step_s - found.step_s, moved_nbytes(plan, found) / _MOVED_BYTES_PER_S
    home_again = plan.offloaded_nbytes + plan.resident_nbytes <= planner.machine.host_free_nbytes
    return gain_s > _GAIN * step_s and gain_s * _STEPS > moved_s and home_again


def moved_nbytes(plan: Plan, found: Plan) -> int:
    """Plain bytes of the weights that have another place, or another form, in one plan than in the other."""
    changed = (plan.resident ^ found.resident) | (plan.mapped ^ found.mapped) | (plan.disk ^ found.disk)
    changed |= plan.cached ^ found.cached
    changed |= plan.manifest.codes.keys() ^ found.manifest.codes.keys()
    return sum(nbytes for alias, nbytes in plan.manifest.spans.items() if alias in changed)
