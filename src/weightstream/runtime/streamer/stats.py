"""What a streamer tells of itself: counters, bytes held, times."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weightstream.plan.multi_device import AnyPlan
from weightstream.runtime.ring.timeline import UnitTimes
from weightstream.runtime.streamer.active_plan import Installation
from weightstream.runtime.trace import Experts, total


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What a streamer has done so far, and what it holds.

    `fills` moved `filled_nbytes` bytes; `unplanned_fills` of them were made on demand because a unit was skipped,
    repeated or out of order. `held_nbytes` counts weights by tier, coded ones as they are held: "device" (residents,
    the ring, the decode buffer, and what was added to the model since), "host" (RAM, pages of mapped files included)
    and "disk" (read in every step); `model_nbytes` counts them once, and plain.

    Times are of the device, from the steps that were timed: the 2nd to the 5th of a kind in a row, and one in 17.
    `step_s` and `units` are medians over the last of them that are of one kind (calls with as many elements in their
    first tensor, launches of one graph): None and empty before any. The units of a graph are not timed. `stall_s` is
    the time that compute waited for copies in all steps, taking one that was not timed for the last that was.

    `experts` sums the counts of all caches of experts. Where there is a cache, `stats()` waits for the device.

    `read_in_place` are the bytes of each zero-copy weight that kernels read whole in a step; of tables they read a few
    rows.
    """

    steps: int
    fills: int
    filled_nbytes: int
    unplanned_fills: int
    stall_s: float
    held_nbytes: dict[str, int]
    model_nbytes: int
    predicted_step_s: float
    step_s: float | None
    units: tuple[UnitTimes, ...]
    experts: Experts
    read_in_place: tuple[int, ...]


def of_cache(plan: AnyPlan, experts: Experts, num_tokens: int) -> dict[str, Any] | None:
    """What the cache of a plan did for so many tokens; None where there is none."""
    if not plan.cached:
        return None
    num_rows = experts.found + experts.fetched
    return {
        "num_slots": plan.num_slots,
        "found_share": experts.found / num_rows if num_rows else None,
        "ahead_used_share": experts.ahead_used / experts.ahead if experts.ahead else None,
        "fetched_nbytes_per_token": experts.fetched_nbytes / num_tokens,
    }


def stats_of(installed: Installation) -> Stats:
    """The statistics as of now."""
    held, plan, measured = installed.homes.held_nbytes(), installed.plan, installed.timeline.measured()
    held["device"] += sum(memory.numel() for memory in installed.binding.memory) + installed.modules.adopted_nbytes
    return Stats(
        **asdict(installed.counters),
        stall_s=installed.timeline.stall_s,
        held_nbytes=held,
        model_nbytes=plan.manifest.decoded_nbytes,
        predicted_step_s=plan.step_s,
        step_s=measured.step_s if measured else None,
        units=tuple(unit for unit in measured.units if unit.nbytes) if measured else (),
        experts=total(installed.timeline.tally.read().values()),
        read_in_place=installed.replanning.read_whole(plan),
    )
