"""The predicted time of a step: the busy times of compute, link and disk, and an event simulation of all three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from weightstream.plan.manifest import Manifest, Profile, Seconds
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import Cursor

_KERNELS_OF_ROW = 2
_LAUNCHES_OF_ROW = 6  # what Python takes for a row, in launches of a kernel
_STEPS = 3  # from the second step on, the fills that wrap around are in their steady state


class StepSeconds(NamedTuple):
    """Seconds of a step in the steady state.

    Attributes:
        graph_s: without a host, so that launches take no time.
        step_s: with the host that launches its kernels.
    """

    graph_s: float
    step_s: float


class _Simulation(NamedTuple):
    """Seconds of a step, and whether the device waits for the host anywhere in it."""

    step_s: float
    is_late: bool


def predicted(plan: Plan, profile: Profile) -> Plan:
    """The plan with its predicted times."""
    graph_s, step_s = simulated_s(plan, profile)
    return replace(
        plan,
        step_s=step_s,
        graph_s=_captured_s(plan, profile) if any(profile.captured_s) else graph_s,
        compute_s=compute_s(plan, profile),
        graph_compute_s=sums_s(plan.manifest, times_s(plan, profile, captured=True)).device_s,
        decode_s=sum(profile.decode_s(u, plan.manifest.units[u]) for u in plan.manifest.order),
        copy_s=copy_s(plan, profile),
        disk_s=disk_s(plan, profile),
        machine=profile.machine,
    )


def compute_s(plan: Plan, profile: Profile) -> float:
    """Seconds of a step that never waits for a copy: of the device, or of the host if its launches take longer."""
    return max(sums_s(plan.manifest, times_s(plan, profile)))


def host_s(plan: Plan, profile: Profile) -> float:
    """Seconds that the host takes to launch a step."""
    return sums_s(plan.manifest, times_s(plan, profile)).host_s


def sums_s(manifest: Manifest, times: Sequence[Seconds]) -> Seconds:
    """Seconds of a step, from the seconds of each unit at one of its positions."""
    return Seconds(sum(times[u].device_s for u in manifest.order), sum(times[u].host_s for u in manifest.order))


def unit_s(plan: Plan, profile: Profile) -> list[float]:
    """Seconds of each unit at one of its positions under this plan: of the device, or the host if that takes longer."""
    return [max(times) for times in times_s(plan, profile)]


def times_s(plan: Plan, profile: Profile, *, captured: bool = False) -> list[Seconds]:
    """Seconds of each unit at one of its positions.

    `captured`: in a CUDA graph, in which the host launches nothing, and units take `Profile.captured_s` more or less.
    """
    units = enumerate(plan.manifest.units)
    times = [profile.times_s(u, unit, shown=plan.num_shown[u], streams=plan.streams(u)) for u, unit in units]
    if not captured:
        return times
    captured_s = profile.captured_s or [0.0] * len(times)
    return [Seconds(max(0.0, unit.device_s + more), 0.0) for unit, more in zip(times, captured_s, strict=True)]


def afters_s(times: Sequence[Seconds], profile: Profile) -> list[float]:
    """Seconds of the ops that run after the release of each unit, out of its seconds."""
    shares = zip(times, profile.after_share, strict=False)
    return [unit.device_s * share for unit, share in shares] or [0.0] * len(times)


def copy_s(plan: Plan, profile: Profile) -> float:
    """Seconds that the link is busy in a step."""
    return sum(profile.copy_s(plan.unit_nbytes[u]) for fills in plan.after for u in fills)


def disk_s(plan: Plan, profile: Profile) -> float:
    """Seconds that the disk is busy in a step."""
    return plan.step_disk_nbytes / profile.disk_bytes_per_s


class Splits(NamedTuple):
    """Operators of a pass of several rows that run once for each row.

    Attributes:
        calls: the number of their calls in a pass.
        rows: the rows of a pass.
        nbytes: bytes of their arguments without rows, such as weights, which a call reads for each row.
    """

    calls: int
    rows: int
    nbytes: int


def split_pass_s(plan: Plan, profile: Profile, splits: Splits, *, in_graphs: bool) -> float:
    """Predicted seconds of a pass with these splits: of the device, the host, the link or the disk, the longest.

    The device runs two kernels more for each row, one of which puts its output to those of the others, and reads
    arguments without rows again. `in_graphs`: the host launches nothing. Without a graph it also runs Python for each
    row, as long as several launches take. A CPU is both device and host, so all of that adds to a step.
    """
    one = sums_s(plan.manifest, times_s(plan, profile, captured=in_graphs))
    num = splits.calls * splits.rows
    again_s = (splits.rows - 1) * splits.nbytes / profile.device_bytes_per_s
    more_device_s = num * _KERNELS_OF_ROW * profile.op_s + again_s
    more_host_s = num * _LAUNCHES_OF_ROW * profile.op_launch_s
    if profile.on_cpu:
        return plan.step_s + more_device_s + more_host_s
    host_s = 0.0 if in_graphs else one.host_s + more_host_s
    return max(one.device_s + more_device_s, host_s, plan.copy_s, plan.disk_s)


def simulated_s(plan: Plan, profile: Profile) -> StepSeconds:
    """Seconds of a step in the steady state."""
    times = times_s(plan, profile)
    step_s, is_late = _simulated(plan, profile, times, has_host=True)
    graph_s = _simulated(plan, profile, times, has_host=False).step_s if is_late else step_s
    return StepSeconds(graph_s, step_s)


def _captured_s(plan: Plan, profile: Profile) -> float:
    """Seconds of a step in a CUDA graph, with `Profile.captured_s`. The search leaves these out, as its bounds do."""
    return _simulated(plan, profile, times_s(plan, profile, captured=True), has_host=False).step_s


def _simulated(plan: Plan, profile: Profile, unit_times: Sequence[Seconds], *, has_host: bool) -> _Simulation:
    """A step in the steady state. If the device never waits for the host, the step takes as long without the host.

    Copies run in the order in which they were queued, each after the release that it waits for. No unit ends before the
    host has launched it. The host is assumed to wait for nothing, although it waits for copies that a thread feeds.
    Reads from disk start when their copy is queued, one after another. While a copy runs, compute loses the share
    `compute_lost` of its speed.
    """
    units = plan.manifest.units
    num, more, lost = len(plan.manifest.order), profile.more_s, profile.compute_lost
    more = more if len(more) == num else (Seconds(0.0, 0.0),) * num
    times = [*unit_times, Seconds(0.0, 0.0)]  # the last entry stands for the time before the first step
    computes, hosts = [device_s for device_s, _ in times], [host_s * has_host for _, host_s in times]
    after = [*afters_s(unit_times, profile), 0.0]
    copies = [profile.copy_s(nbytes) for nbytes in plan.unit_nbytes]
    reads = [nbytes / profile.disk_bytes_per_s for nbytes in plan.unit_disk_nbytes] if plan.disk else [0.0] * len(units)
    filled = [0.0] * len(computes)
    copy_free = disk_free = now = started = launched = 0.0
    is_late = False
    turns = Cursor(plan.manifest.order, plan.after).step()
    step = tuple((unit, fills, *extra) for (unit, fills), extra in zip(turns, more, strict=True))
    for positions in (((len(units), plan.first, 0.0, 0.0),), *(step,) * _STEPS):
        started = now
        for unit, fills, device_s, host_s in positions:
            launched += hosts[unit] + host_s * has_host
            begun = now if now > filled[unit] else filled[unit]
            ended = begun + max(0.0, computes[unit] + device_s)
            if lost and (copying := copy_free - begun) > 0.0:
                ended = min(ended + lost * copying, begun + (ended - begun) / max(1 - lost, 1e-9))
            if launched > ended:
                ended, is_late = launched, True
            if fills:
                released = ended - after[unit]
                handed = released + profile.handover_s
                for fill in fills:
                    copy_free = (copy_free if copy_free > handed else handed) + copies[fill]
                    if reads[fill]:
                        disk_free = max(disk_free, released) + reads[fill]
                        copy_free = max(copy_free, disk_free)
                    filled[fill] = copy_free
            now = ended
    launches_s = launched / _STEPS
    return _Simulation(max(now - started, launches_s), is_late or launches_s > now - started)
