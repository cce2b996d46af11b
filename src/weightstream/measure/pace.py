"""Pace: seconds of work that follows itself on a device, and of the bare copies that no step can be faster than."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from weightstream.measure.bench import host_memory
from weightstream.runtime.backend import Backend, Copy, Side

_SETTLING = 2  # rounds timed and not counted: the first finds a ring that was filled while nobody looked
_LEAST, _MOST = 5, 400
_SOURCE_NBYTES = 256 << 20  # more than a processor caches


def rounds_s(backend: Backend, work: Callable[[], object], seconds: float, side: Side = Side.COMPUTE) -> list[float]:
    """Seconds of each round of `work`, from one's end to the next one's: nothing waits in between. Takes `seconds`."""
    work()
    backend.synchronize()
    started = time.perf_counter()
    work()
    backend.synchronize()
    num = max(_LEAST, min(_MOST, round(seconds / (time.perf_counter() - started))))
    stamps = [backend.stamp(side)]
    for _ in range(num + _SETTLING):
        work()
        stamps.append(backend.stamp(side))
    backend.synchronize()
    return [backend.seconds(a, b) or 0.0 for a, b in itertools.pairwise(stamps)][_SETTLING:]


def copies_s(backend: Backend, sizes: Sequence[int], seconds: float) -> list[float]:
    """Seconds of each round of copies of these sizes, back to back, from memory that copies start from."""
    largest = max(sizes)
    with host_memory(backend.device, max(largest, min(sum(sizes), _SOURCE_NBYTES))) as source:
        target, copies, begin = backend.alloc(largest), [], 0
        for size in sizes:
            begin = begin if begin + size <= source.numel() else 0
            copies.append(Copy(dst=target[:size], src=source[begin : begin + size], pinned=source.is_pinned()))
            begin += size

        def work() -> None:
            for copy in copies:
                backend.copy([copy])

        return rounds_s(backend, work, seconds, Side.COPY)
