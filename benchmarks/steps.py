"""The steps of a model from the first on: times, comparison of outputs, and predictions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import rows
import timing
import torch

from weightstream import Streamer

STEPS, LONE = 10, 3
REFINED = 10  # the step after which the prediction is read again, with measured times

Step = Callable[[], torch.Tensor]


def call_of(model: Any, inputs: dict[str, Any]) -> Step:
    """A step, which returns the first tensor of the model's output."""

    def run() -> torch.Tensor:
        output = model(**inputs)
        return output if isinstance(output, torch.Tensor) else output[0]

    return run


def timed(
    run: Step,
    want: torch.Tensor,
    streamer: Streamer | None = None,
    *,
    num: int = STEPS,
    settled: int = 2,
) -> dict[str, Any]:
    """Time the first step alone, then the others without a pause; `ms` is of those after the step `settled`."""
    device = want.device
    timing.synchronize(device)
    started = time.perf_counter()
    differs = is_other(run(), want)
    timing.synchronize(device)
    found: dict[str, Any] = {"first_s": round(time.perf_counter() - started, 4)}
    if streamer:
        found |= {"predicted_ms": round(1e3 * streamer.plan.step_s, 3)}
        found |= {"first_unplanned_fills": streamer.stats().unplanned_fills}
    timing.reset_peak(device)
    marks = [timing.mark(device)]
    for step in range(2, settled + num + 1):
        y = run()
        marks.append(timing.mark(device))
        differs |= is_other(y, want)  # takes a few us; kept outputs would count as memory of the system
        if streamer and step == REFINED:
            found["refined_ms"] = round(1e3 * streamer.plan.step_s, 3)
    timing.synchronize(device)
    steps_ms = [timing.between_ms(a, b) for a, b in itertools.pairwise(marks)][settled - 1 :]
    found |= {"ms": rows.percentiles(steps_ms), "steps_ms": [round(ms, 3) for ms in steps_ms], "steps": len(steps_ms)}
    found |= {"peak_nbytes": timing.peak_nbytes(device), "host_ms": rows.percentiles(hosts_ms(run, device))}
    if streamer:
        found["unplanned_fills"] = streamer.stats().unplanned_fills
    return found | {"equal": not differs.item()}


def hosts_ms(run: Step, device: torch.device) -> list[float]:
    """Time until a call returns that finds the device idle; it waits if it has more kernels than the queue holds."""
    found = []
    for _ in range(LONE):
        timing.synchronize(device)
        started = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - started))
    timing.synchronize(device)
    return found


def is_repeatable(run: Step) -> bool:
    want = run()
    return not any(is_other(run(), want).item() for _ in range(4))


def is_other(y: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Whether any bit differs, as a tensor on the device, without waiting for it."""
    return (y.view(torch.int16) != want.view(torch.int16)).any()
