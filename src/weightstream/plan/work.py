"""The work of a unit: what it computes, op by op, and how long a machine takes for it. Knows shapes, no tensors.

An op takes the larger of its arithmetic over the rate of its kind, its bytes over the bandwidth of device memory, and
the least time of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weightstream.plan.manifest import Profile

Rate = Literal["half", "single", "attention", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a step is given: `batch` sequences of `tokens` new tokens each, `context` positions once they are in."""

    batch: int = 1
    tokens: int = 1
    context: int = 4096

    def __str__(self) -> str:
        return f"batch {self.batch}, tokens {self.tokens}, context {self.context}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One kernel: floating-point operations, bytes read and written, and what limits its arithmetic.

    `half` and `single` are matrix products in 16-bit floats and in float32. `after`: it runs once the unit is released,
    before the next one opens.
    """

    rate: Rate = "none"
    flops: float = 0.0
    nbytes: int = 0
    after: bool = False

    def seconds(self, profile: Profile) -> float:
        rates = {
            "half": profile.half_flops_per_s,
            "single": profile.single_flops_per_s,
            "attention": profile.attention_flops_per_s,
            "none": float("inf"),
        }
        return max(self.flops / rates[self.rate], self.nbytes / profile.device_bytes_per_s, profile.op_s)


def unit_seconds(ops: Sequence[Op], profile: Profile) -> tuple[float, float, float]:
    """Seconds of a unit of these ops on the device and of their launches on the host, and the share of those on the
    device that follow the unit's release."""
    seconds = [op.seconds(profile) for op in ops]
    after = sum(s for s, op in zip(seconds, ops, strict=True) if op.after)
    return sum(seconds), profile.op_launch_s * len(ops), after / (sum(seconds) or 1.0)
