"""The clock of the benchmarks: times between marks on the compute stream, peak memory, the link's floor."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable

import torch

Run = Callable[[torch.Tensor], torch.Tensor]

SETTLING = 2  # first steps, which are not counted: the ring was filled before them


def steps_ms(run: Run, x: torch.Tensor, num: int) -> list[float]:
    """Milliseconds of each step, from one step's end to the next one's: nothing synchronises in between."""
    marks = [mark(x.device)]
    for _ in range(num + SETTLING):
        run(x)
        marks.append(mark(x.device))
    synchronize(x.device)
    return [between_ms(a, b) for a, b in itertools.pairwise(marks)][SETTLING:]


def once_ms(run: Run, x: torch.Tensor) -> float:
    """One step with nothing else queued."""
    synchronize(x.device)
    started = time.perf_counter()
    run(x)
    synchronize(x.device)
    return 1e3 * (time.perf_counter() - started)


def floor_ms(num_copies: int, nbytes: int, device: torch.device, num: int = 10) -> list[float]:
    """The same bytes over the link: copies of one layer each, back to back, from pinned memory."""
    drawn = torch.empty(nbytes, dtype=torch.uint8).random_(0, 256)
    source = [drawn, drawn.clone()]
    if device.type == "cuda":
        source = [tensor.pin_memory() for tensor in source]
    target = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def copies(_: torch.Tensor) -> torch.Tensor:
        for index in range(num_copies):
            target[index % 2].copy_(source[index % 2], non_blocking=True)
        return target[0]

    return steps_ms(copies, target[0], num)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: torch.device) -> None:
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_nbytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def allocated_nbytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def clear(device: torch.device) -> int:
    """Free unreferenced memory; returns the bytes of device memory that are still allocated."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def mark(device: torch.device) -> torch.cuda.Event | float:
    """Mark this point of the compute stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(a: torch.cuda.Event | float, b: torch.cuda.Event | float) -> float:
    return 1e3 * (b - a) if isinstance(a, float) else a.elapsed_time(b)
