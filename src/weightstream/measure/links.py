"""Several GPUs: their links alone and all at once, and the way from one to another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from weightstream.measure.bench import copies_s, rounds_s
from weightstream.runtime.backend import Backend

_SIZES = [64 << 20] * 4
_HOPS = 64
_STATES_NBYTES = 8192  # what a block gives for a token


def rates(backends: Sequence[Backend], seconds: float) -> list[float]:
    """Bytes per second of each link, in the order of the devices, while all of them copy."""
    start = Barrier(len(backends))

    def measured(backend: Backend) -> float:
        start.wait()
        return sum(_SIZES) / statistics.median(copies_s(backend, _SIZES, seconds))

    with ThreadPoolExecutor(len(backends)) as pool:
        return list(pool.map(measured, backends))


def hops_s(backend: Backend, there: torch.device, seconds: float) -> list[float]:
    """Seconds until what is on the backend's device is on another, of a token's states: of each round of many."""
    states = torch.ones(_STATES_NBYTES, dtype=torch.uint8, device=backend.device)

    def hops() -> None:
        moved = states
        for _ in range(_HOPS // 2):
            moved = moved.to(there, non_blocking=True).to(backend.device, non_blocking=True)

    return [taken_s / _HOPS for taken_s in rounds_s(backend, hops, seconds)]
