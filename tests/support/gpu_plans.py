"""Plans on a CPU as a GPU would have them, and memory of plans that nobody has written to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weightstream.inputs import builder
from weightstream.plan.plan import Plan
from weightstream.runtime.weights.decompression import PlanMemory

Assign = Callable[[Any, str, Any], None]  # `setattr`, or that of a monkeypatch
POISON = 255  # NaN, in each dtype


def plan_for_a_slow_link(assign: Assign, link_bytes_per_s: float) -> None:
    """Have models planned for a link of this rate; on a CPU also as for a GPU, which has all of the host's memory."""
    inner = builder.machine_of

    def machine_of(*args: Any, **kwargs: Any) -> Any:
        machine = inner(*args, **kwargs)
        machine = replace(machine, profile=replace(machine.profile, link_bytes_per_s=link_bytes_per_s))
        return replace(machine, on_cpu=False, total_nbytes=machine.host_total_nbytes) if machine.on_cpu else machine

    assign(builder, "machine_of", machine_of)


def poison_plans(assign: Assign) -> None:
    """Have the memory of plans begin as NaN."""
    inner = PlanMemory.allocate

    def allocate(plan: Plan, backend: Any) -> PlanMemory:
        found = inner(plan, backend)
        for part in found:
            part.fill_(POISON)
        return found

    assign(PlanMemory, "allocate", allocate)
