"""Wrappers that change one property of a backend: its speed, bytes, errors or memory."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from weightstream.errors import StoreError
from weightstream.runtime.devices.backend import Backend, Copy, Event, Side, Stamp


class Wrapper:
    """Passes every call on: the base of a backend that changes one property of another."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.device = backend.device
        self.profile = backend.profile

    @property
    def pinning(self) -> AbstractContextManager[object]:
        return self.backend.pinning

    def alloc(self, nbytes: int) -> torch.Tensor:
        return self.backend.alloc(nbytes)

    def part(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        return self.backend.part(memory, begin, end)

    def event(self) -> Event:
        return self.backend.event()

    def edge(self) -> Event:
        return self.backend.edge()

    def capturing(self) -> bool:
        return self.backend.capturing()

    def prepare_graph(self, copies: Iterable[Copy] = ()) -> None:
        self.backend.prepare_graph(copies)

    def capture(self, graph: Any, **options: Any) -> AbstractContextManager[None]:
        return self.backend.capture(graph, **options)

    def joined(self, graph: Any) -> AbstractContextManager[None]:
        return self.backend.joined(graph)

    def device_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        return self.backend.device_view(memory)

    def record(self, side: Side, event: Event) -> None:
        self.backend.record(side, event)

    def wait(self, side: Side, event: Event) -> None:
        self.backend.wait(side, event)

    def copy(self, copies: Sequence[Copy]) -> None:
        self.backend.copy(copies)

    def bring(self, copies: Sequence[Copy]) -> None:
        self.backend.bring(copies)

    def launch(self, kernel: Callable[[], None]) -> None:
        self.backend.launch(kernel)

    def stamp(self, side: Side) -> Stamp:
        return self.backend.stamp(side)

    def seconds(self, begin: Stamp, end: Stamp) -> float | None:
        return self.backend.seconds(begin, end)

    def drain(self, event: Event) -> None:
        self.backend.drain(event)

    def synchronize(self) -> None:
        self.backend.synchronize()

    def close(self) -> None:
        self.backend.close()


class Delay(Wrapper):
    """Sleeps up to `most_s` seconds, drawn from `seed`, before every copy and kernel, on the stream that runs it.

    Delays alone can hide a race as well as show it: put a `Poison` around them.
    """

    def __init__(self, backend: Backend, seed: int, most_s: float) -> None:
        super().__init__(backend)
        self._random = random.Random(seed)
        self._most_s = most_s

    def copy(self, copies: Sequence[Copy]) -> None:
        self.backend.copy([replace(copy, prepare=self._late(copy.prepare)) for copy in copies])

    def launch(self, kernel: Callable[[], None]) -> None:
        super().launch(self._late(kernel))

    def _late(self, work: Callable[[], None] | None) -> Callable[[], None]:
        pause_s = self._random.uniform(0, self._most_s)  # drawn in the caller's order, the same in every run

        def late() -> None:
            time.sleep(pause_s)
            if work is not None:
                work()

        return late


class Poison(Wrapper):
    """Fills the destination with 0xFF, NaN in every float dtype, before each copy and on the copy stream."""

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            poison = torch.full((copy.dst.numel(),), 0xFF, dtype=torch.uint8)
            self.backend.copy([Copy(dst=copy.dst, src=poison)])
            self.backend.copy([copy])


class Fault(Wrapper):
    """Makes each copy for which `fail(copy)` is true raise `StoreError` where its source would be read."""

    def __init__(self, backend: Backend, fail: Callable[[Copy], bool]) -> None:
        super().__init__(backend)
        self._fail = fail

    def copy(self, copies: Sequence[Copy]) -> None:
        # not pinned: the source of a pinned copy is read by the device, where nothing can raise
        self.backend.copy([replace(c, prepare=_refuse, pinned=False) if self._fail(c) else c for c in copies])


def _refuse() -> None:
    raise StoreError("this copy fails because a Fault wrapper was asked to fail it")


class Limit(Wrapper):
    """A device of `nbytes` bytes: an allocation that would hold more raises `torch.OutOfMemoryError`."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        super().__init__(backend)
        self.limit_nbytes = nbytes
        self.held_nbytes = 0

    def alloc(self, nbytes: int) -> torch.Tensor:
        if self.held_nbytes + nbytes > self.limit_nbytes:
            raise torch.OutOfMemoryError(f"held {self.held_nbytes} + wanted {nbytes} > limit {self.limit_nbytes} bytes")
        memory = self.backend.alloc(nbytes)
        self.held_nbytes += nbytes
        weakref.finalize(memory.untyped_storage(), self._free, nbytes)  # the storage outlives views of the tensor
        return memory

    def _free(self, nbytes: int) -> None:
        self.held_nbytes -= nbytes
