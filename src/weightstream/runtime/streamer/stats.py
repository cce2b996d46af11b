"""The statistics of a streamer: counters, bytes held, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from weightstream.plan.multi_device import AnyPlan
from weightstream.plan.units import human, milliseconds
from weightstream.runtime.ring.timeline import UnitTimes
from weightstream.runtime.streamer.active_plan import Installation
from weightstream.runtime.streamer.drafting import SpeculationStats
from weightstream.runtime.trace import ExpertTraffic, total

_LONGEST = 3  # waits that are printed


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Counters of a streamer since the model was offloaded, the bytes that it holds now, and times.

    Times are of the device's clock, from the steps that were timed: the 2nd to the 5th of a kind in a row, and one in
    17. Steps are of one kind if their first tensors have as many elements, or if they launch the same graph.
    """

    steps: int
    """Steps that began, of eager forwards and of graphs."""

    fills: int
    """Copies of a unit into the ring, or into memory of its own."""

    filled_nbytes: int
    """Bytes that these moved over the link."""

    unplanned_fills: int
    """Fills that were made on demand, as a unit was skipped, repeated or out of order."""

    stall_s: float
    """Seconds that compute waited for copies in all steps; one that was not timed counts as the last that was."""

    held_nbytes: dict[str, int]
    """Bytes of weights by tier, compressed ones as they are held: "device" (residents, the ring, the decode buffer,
    slots of experts, and tensors that were added to the model since), "host" (RAM, pages of mapped files included) and
    "disk" (read in every step)."""

    model_nbytes: int
    """Bytes of the weights, uncompressed, each once."""

    predicted_step_s: float
    """Seconds of a step by the plan in force, in a CUDA graph if the last timed steps were, else eager."""

    step_s: float | None
    """Median seconds of the last timed steps, those of the kind of the last one; None before any. A training step takes
    from the begin of its forward to the end of its backward pass."""

    units: tuple[UnitTimes, ...]
    """Medians of the same steps for each unit that streams, in the order of the manifest; empty before any timed step,
    and where a graph was launched."""

    experts: ExpertTraffic
    """Sums over all caches of experts, as the device counts them; where there is a cache, `stats()` waits for it."""

    read_in_place: tuple[int, ...]
    """Bytes of each zero-copy weight that kernels read whole in a step; of tables they read a few rows."""

    speculation: SpeculationStats | None = None
    """Counts and times of texts that were generated with drafts; None: there was none."""

    def __str__(self) -> str:
        held = ", ".join(f"{human(nbytes)} {place}" for place, nbytes in self.held_nbytes.items())
        timed = "not timed yet" if self.step_s is None else f"{milliseconds(self.step_s)} each"
        per_step = self.filled_nbytes / max(1, self.steps)
        lines = [
            f"steps: {self.steps}; {timed}, {milliseconds(self.predicted_step_s)} predicted",
            f"fills: {self.fills}, {human(per_step)} per step; {self.unplanned_fills} unplanned",
            f"waits: {milliseconds(self.stall_s)} in all",
            f"held: {held}; the model has {human(self.model_nbytes)}",
        ]
        if self.units:
            longest = sorted(self.units, key=lambda unit: unit.wait_s, reverse=True)[:_LONGEST]
            waits = ", ".join(f"{unit.name or '(root)'} {milliseconds(unit.wait_s)}" for unit in longest)
            lines.append(f"units: {len(self.units)}; longest waits: {waits}")
        if num := self.experts.found + self.experts.fetched:
            fetched = human(self.experts.fetched_nbytes)
            lines.append(f"experts: {self.experts.found} of {num} found in the cache; {fetched} fetched")
        if (drafts := self.speculation) is not None:
            lines.append(f"drafts: {drafts.tokens_per_pass:.2f} tokens a pass, {drafts.acceptance:.0%} accepted")
        return "\n".join(lines)


def of_cache(plan: AnyPlan, experts: ExpertTraffic, num_tokens: int) -> dict[str, Any] | None:
    """The numbers of a plan's cache of experts over this many tokens; None if the plan has no cache."""
    if not plan.cached:
        return None
    num_rows = experts.found + experts.fetched
    return {
        "num_slots": plan.num_slots,
        "found_share": experts.found / num_rows if num_rows else None,
        "ahead_used_share": experts.ahead_used / experts.ahead if experts.ahead else None,
        "fetched_nbytes_per_token": experts.fetched_nbytes / num_tokens,
    }


def over_devices(parts: Sequence[Stats], predicted_step_s: float) -> Stats:
    """The statistics of one model over several devices: a step is one of the model, all else is summed."""
    sums = {
        field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Stats) if field.type == "int"
    }
    return replace(
        parts[0],
        **sums | {"steps": max(part.steps for part in parts)},
        stall_s=sum(part.stall_s for part in parts),
        held_nbytes=dict(sum((Counter(part.held_nbytes) for part in parts), Counter())),
        predicted_step_s=predicted_step_s,
        step_s=max((part.step_s for part in parts if part.step_s is not None), default=None),
        units=tuple(unit for part in parts for unit in part.units),
        experts=total(part.experts for part in parts),
        read_in_place=tuple(nbytes for part in parts for nbytes in part.read_in_place),
    )


def continued(stats: Stats, past: Stats | None) -> Stats:
    """The statistics of a streamer that replaced another one: counters are added to those of the `past` one."""
    if past is None:
        return stats
    counters = ("steps", "fills", "filled_nbytes", "unplanned_fills", "stall_s")
    sums = {name: getattr(stats, name) + getattr(past, name) for name in counters}
    return replace(stats, **sums, step_s=stats.step_s or past.step_s, units=stats.units or past.units)


def stats_of(installed: Installation) -> Stats:
    """The statistics as of now."""
    held, plan, measured = installed.homes.held_nbytes(), installed.plan, installed.timeline.measured()
    memory_nbytes = sum(memory.numel() for memory in installed.binding.memory) - plan.shared_nbytes
    held["device"] += memory_nbytes + installed.modules.adopted_nbytes
    in_graphs = measured is not None and measured.kind.what == "graph"
    return Stats(
        **asdict(installed.counters),
        stall_s=installed.timeline.stall_s,
        held_nbytes=held,
        model_nbytes=plan.manifest.decoded_nbytes,
        predicted_step_s=plan.run_s if in_graphs else plan.step_s,
        step_s=measured.step_s if measured else None,
        units=tuple(unit for unit in measured.units if unit.nbytes) if measured else (),
        experts=total(installed.timeline.tally.read().values()),
        read_in_place=installed.replanning.read_whole(plan),
    )
