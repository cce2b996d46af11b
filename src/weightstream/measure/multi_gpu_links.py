"""Links of several GPUs: rates alone and all at once, all-reduces, and the time from one GPU to another."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from threading import Barrier

import torch

from weightstream.errors import StoreError
from weightstream.measure.bench import HostMemory, copies_s, host_memory, left_as_found, private_backend, rounds_s
from weightstream.plan.planner import Machine
from weightstream.runtime.devices.backend import Backend

logger = logging.getLogger("weightstream")

_SIZES = [64 << 20] * 4
_HOPS = 64
_STATES_NBYTES = 8192  # of a token's hidden states between two blocks
_SHORT_S = 0.1
_SUMMED_NBYTES = 64 << 20  # as for a long prompt
_NUM_SUMS = 8


@cache
def rates_together(devices: tuple[torch.device, ...]) -> tuple[float, ...]:
    """`rates` of these devices, measured once per process; empty if they cannot be measured."""
    try:
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(left_as_found(device))
            return tuple(rates([stack.enter_context(closing(private_backend(device))) for device in devices], _SHORT_S))
    except (RuntimeError, StoreError) as error:
        logger.warning("links cannot be measured at once; each is assumed to be as fast as alone: %s", error)
        return ()


def shared_link_rate(device: torch.device, meet: Callable[[], object]) -> float:
    """Bytes per second of a device's link while the other ranks measure theirs. Infinite if it cannot be measured.

    `meet` blocks until all ranks have called it, once each; copies begin after that. A rank that cannot measure calls
    it, too, as the others wait for it. Errors of `meet`, and of copies after it, are raised.
    """
    has_met = False

    def ready() -> None:
        nonlocal has_met
        has_met = True
        meet()

    try:
        with left_as_found(device), closing(private_backend(device)) as backend:
            return sum(_SIZES) / statistics.median(copies_s(backend, _SIZES, _SHORT_S, ready))
    except (RuntimeError, StoreError) as error:
        if has_met:  # an error of another rank, or one that the caller has to send to the others
            raise
        logger.warning("the link of %s is assumed to be as fast as alone: %s", device, error)
        meet()
        return math.inf


def all_reduce_rate(backend: Backend, meet: Callable[[], object], add_up: Callable[[torch.Tensor], object]) -> float:
    """Bytes per second of an all-reduce (`add_up`) over all ranks.

    `meet` blocks until all ranks have called it; all-reduces begin after that.
    """
    with left_as_found(backend.device):
        tensor = torch.zeros(_SUMMED_NBYTES // 2, dtype=torch.bfloat16, device=backend.device)
        meet()  # raises if another rank had no memory for its tensor: an all-reduce would wait for that rank forever
        for _ in range(2):  # the first round sets up the connections
            backend.synchronize()
            began = time.perf_counter()
            for _ in range(_NUM_SUMS):
                add_up(tensor)
            backend.synchronize()
        return _NUM_SUMS * tensor.nbytes / (time.perf_counter() - began)


def at_most(machine: Machine, rate: float) -> Machine:
    """The machine with its link slowed to `rate` bytes per second, unless it is slower already."""
    link = min(machine.profile.link_bytes_per_s, rate)
    return replace(machine, profile=replace(machine.profile, link_bytes_per_s=link))


def rates(backends: Sequence[Backend], seconds: float, memory: HostMemory = host_memory) -> list[float]:
    """Bytes per second of each backend's link while all of them copy from `memory` at once."""
    start = Barrier(len(backends))

    def measured(backend: Backend) -> float:
        try:
            return sum(_SIZES) / statistics.median(copies_s(backend, _SIZES, seconds, start.wait, memory))
        except BaseException:
            start.abort()  # else the other threads wait forever
            raise

    with ThreadPoolExecutor(len(backends)) as pool:
        return list(pool.map(measured, backends))


def hops_s(backend: Backend, there: torch.device, seconds: float) -> list[float]:
    """Seconds to move a token's hidden states from the backend's device to another; one number per round."""
    states = torch.ones(_STATES_NBYTES, dtype=torch.uint8, device=backend.device)

    def hops() -> None:
        moved = states
        for _ in range(_HOPS // 2):
            moved = moved.to(there, non_blocking=True).to(backend.device, non_blocking=True)

    return [taken_s / _HOPS for taken_s in rounds_s(backend, hops, seconds)]
