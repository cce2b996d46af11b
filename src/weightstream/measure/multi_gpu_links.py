"""Several GPUs: their links alone and all at once, and the way from one to another."""

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
from weightstream.measure.bench import HostMemory, backend_of, copies_s, host_memory, left_as_found, rounds_s
from weightstream.plan.planner import Machine
from weightstream.runtime.devices.backend import Backend

logger = logging.getLogger("weightstream")

_SIZES = [64 << 20] * 4
_HOPS = 64
_STATES_NBYTES = 8192  # what a block gives for a token
_SHORT_S = 0.1
_SUMMED_NBYTES, _SUMS = 64 << 20, 8  # as of a long prompt


@cache
def together(devices: tuple[torch.device, ...]) -> tuple[float, ...]:
    """`rates` of these devices, measured once per process; none where they cannot be."""
    try:
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(left_as_found(device))
            return tuple(rates([stack.enter_context(closing(backend_of(device))) for device in devices], _SHORT_S))
    except (RuntimeError, StoreError) as error:
        logger.warning("links cannot be measured at once, and are taken to be as fast as alone: %s", error)
        return ()


def beside(device: torch.device, meet: Callable[[], object]) -> float:
    """Bytes per second of a device's link while other processes measure theirs, from when all of them `meet`: each does
    so once. Infinite where it cannot be measured."""
    is_here = False

    def ready() -> None:
        nonlocal is_here
        is_here = True
        meet()

    try:
        with left_as_found(device), closing(backend_of(device)) as backend:
            return sum(_SIZES) / statistics.median(copies_s(backend, _SIZES, _SHORT_S, ready))
    except (RuntimeError, StoreError) as error:
        if is_here:  # then the others heard nothing of it yet
            raise
        logger.warning("the link of %s is taken to be as fast as alone: %s", device, error)
        meet()
        return math.inf


def summed(backend: Backend, meet: Callable[[], object], add_up: Callable[[torch.Tensor], object]) -> float:
    """Bytes per second of a tensor that this process and others add up, as often each, from when all of them `meet`."""
    with left_as_found(backend.device):
        given = torch.zeros(_SUMMED_NBYTES // 2, dtype=torch.bfloat16, device=backend.device)
        meet()  # a process that has no memory for it is heard here
        for _ in range(2):  # in the first they find the ways to each other
            backend.synchronize()
            began = time.perf_counter()
            for _ in range(_SUMS):
                add_up(given)
            backend.synchronize()
        return _SUMS * given.nbytes / (time.perf_counter() - began)


def at_most(machine: Machine, rate: float) -> Machine:
    """The machine with a link of so many bytes per second, or its own if that has less."""
    link = min(machine.profile.link_bytes_per_s, rate)
    return replace(machine, profile=replace(machine.profile, link_bytes_per_s=link))


def rates(backends: Sequence[Backend], seconds: float, memory: HostMemory = host_memory) -> list[float]:
    """Bytes per second of each link, in the order of the devices, while all of them copy from such memory."""
    start = Barrier(len(backends))

    def measured(backend: Backend) -> float:
        try:
            return sum(_SIZES) / statistics.median(copies_s(backend, _SIZES, seconds, start.wait, memory))
        except BaseException:
            start.abort()  # the others would wait for good
            raise

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
