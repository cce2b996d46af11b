"""The predicted time of a step: lower bound, closed form and an event simulation of disk, link and compute."""

from __future__ import annotations

from weightstream.plan.manifest import Profile
from weightstream.plan.plan import Plan

_STEPS = 4  # the wrap-around fills settle after the second


def compute_s(plan: Plan, profile: Profile) -> float:
    """Seconds that a step computes if every weight were resident."""
    units = plan.manifest.units
    return sum(profile.compute_s(u, units[u]) for u in plan.manifest.order)


def copy_s(plan: Plan, profile: Profile) -> float:
    """Seconds that the link is busy in a step."""
    return sum(profile.copy_s(plan.unit_nbytes[u]) for fills in plan.after for u in fills)


def disk_s(plan: Plan, profile: Profile) -> float:
    """Seconds that the disk is busy in a step."""
    return plan.step_disk_nbytes / profile.disk_bytes_per_s


def lower_bound_s(plan: Plan, profile: Profile) -> float:
    """No schedule of these homes is faster: max(compute, copies, reads)."""
    return max(compute_s(plan, profile), copy_s(plan, profile), disk_s(plan, profile))


def closed_form_s(plan: Plan, profile: Profile) -> float:
    """The lower bound plus the copies that nothing can hide: those whose unit follows the release they wait for."""
    exposed = 0.0
    order = plan.manifest.order
    for position, fills in enumerate(plan.after):
        following = order[(position + 1) % len(order)]
        if following in fills:
            exposed += min(
                profile.copy_s(plan.unit_nbytes[following]),
                profile.compute_s(order[position], plan.manifest.units[order[position]]),
            )
    return lower_bound_s(plan, profile) + exposed


def simulate_s(plan: Plan, profile: Profile) -> float:
    """Seconds of a step in the steady state: copies in queue order, each after the release that it waits for.

    What is on disk is read from when the copy is queued, after what was queued before.
    """
    filled = [0.0] * len(plan.manifest.units)
    copy_free = disk_free = now = started = 0.0

    def fill(unit: int) -> None:
        nonlocal copy_free, disk_free
        copy_free = max(copy_free, now + profile.handover_s) + profile.copy_s(plan.unit_nbytes[unit])
        if nbytes := plan.unit_disk_nbytes[unit]:
            disk_free = max(disk_free, now) + nbytes / profile.disk_bytes_per_s
            copy_free = max(copy_free, disk_free)
        filled[unit] = copy_free

    for unit in plan.first:
        fill(unit)
    for _ in range(_STEPS):
        started = now
        for position, unit in enumerate(plan.manifest.order):
            now = max(now, filled[unit]) + profile.compute_s(unit, plan.manifest.units[unit])
            for refill in plan.after[position]:
                fill(refill)
    return now - started
