"""The protocol of a device: memory, streams beside the compute stream, and events that order them.

An event carries the meaning it has on CUDA: `record` marks a point in a stream, `wait` orders a stream after the
point that was recorded last at the time of the call; recording again does not disturb earlier waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch

from weightstream.plan.manifest import Profile
from weightstream.plan.schedule import ALIGN_NBYTES
from weightstream.store.staging import SourceRange

Event = Any  # made by a backend and understood by that backend alone
Stamp = Any  # likewise


def owners(storage: torch.UntypedStorage) -> int:
    """How many tensors show a storage, and one more: the handle that is asked with."""
    return torch._C._storage_Use_Count(storage._cdata)


class Side(Enum):
    """The streams of a device: that of the caller, that of copies, and one for kernels that run beside the former."""

    COMPUTE = "compute"
    COPY = "copy"
    AHEAD = "ahead"


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Bytes to move: `src` on the host into `dst` on the device, both uint8 of one size and flat; but `src` may be rows
    that lie apart, `[num_rows, width]`.

    `prepare` runs before the source is read, and raises `StoreError` if it cannot be. A source that is not `pinned`
    goes through a staging ring. With `read`, a source and a range in it, the bytes are read from there, and `src` only
    tells which they are.
    """

    dst: torch.Tensor
    src: torch.Tensor
    pinned: bool = False
    prepare: Callable[[], None] | None = None
    read: SourceRange | None = None

    def joined(self, other: Copy) -> Copy | None:
        """One copy for two that are neighbours at both ends, the alignment gap between them included."""
        if not (self.pinned and other.pinned and self.prepare == other.prepare):
            return None
        if self.src.dim() > 1 or other.src.dim() > 1:
            return None
        if self.src.untyped_storage().data_ptr() != other.src.untyped_storage().data_ptr():
            return None
        distance = other.src.storage_offset() - self.src.storage_offset()
        if other.dst.storage_offset() - self.dst.storage_offset() != distance:
            return None
        if not self.src.numel() <= distance < self.src.numel() + ALIGN_NBYTES:
            return None
        size = (distance + other.src.numel(),)
        return replace(self, dst=self.dst.as_strided(size, (1,)), src=self.src.as_strided(size, (1,)))


class Backend(Protocol):
    """What the engine asks of a device."""

    device: torch.device
    profile: Profile

    @property
    def pinning(self) -> AbstractContextManager[object]:
        """Held while host memory is pinned, and while that would disturb what is timed."""

    def alloc(self, nbytes: int) -> torch.Tensor:
        """Flat uint8 memory on the device."""

    def part(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Bytes [begin, end) of `memory`, which they keep alive, as a storage of their own that `owners` can count."""

    def event(self) -> Event:
        """A new event that nothing waits for. Recorded inside a capture it works outside too, and the reverse."""

    def edge(self) -> Event:
        """An event that orders two streams inside one capture."""

    def capturing(self) -> bool:
        """Whether the work queued now becomes part of a graph."""

    def prepare_graph(self, copies: Iterable[Copy] = ()) -> None:
        """Before a graph is captured, or launched: what was queued so far is on the device's streams then. Raises
        `OffloadError` where a graph cannot make these copies."""

    def capture(self, graph: Any, **options: Any) -> AbstractContextManager[None]:
        """Work queued inside becomes the graph; where a capture is under way already, part of that."""

    def joined(self, graph: Any) -> AbstractContextManager[None]:
        """Inside, what is queued on this device is part of `graph`, which another device captures: whoever calls orders
        the compute streams of both, at the begin and at the end. Its memory lives as long as the graph."""

    def device_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        """Pinned host memory as kernels of the device can read it, if they can."""

    def record(self, side: Side, event: Event) -> None:
        """Mark the present end of a stream."""

    def wait(self, side: Side, event: Event) -> None:
        """Order all later work of a stream after the event; raises the error of the copy that failed before it."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Queue copies on the copy stream."""

    def bring(self, copies: Sequence[Copy]) -> None:
        """Make copies now, into memory that nothing else reads or writes, and wait for them."""

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue a kernel on the compute stream: `kernel` queues it, or is it."""

    def aside(self) -> AbstractContextManager[object]:
        """Inside, kernels are queued on the stream that runs beside compute."""

    def stamp(self, side: Side) -> Stamp:
        """The time at which the device will have passed the present end of a stream; not inside of a capture."""

    def seconds(self, begin: Stamp, end: Stamp) -> float | None:
        """From one to the other; None while the device has not passed both. Does not wait."""

    def drain(self, event: Event) -> None:
        """Block until compute has passed the event and all copies are made that were queued. Captures of other threads
        go on."""

    def synchronize(self) -> None:
        """Block until both streams are idle."""

    def close(self) -> None:
        """End threads and free what the backend holds; may be called twice."""


class StepEnd:
    """The end of the last step, which the next one runs behind, and whoever writes to what copies may still read."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._event = backend.event()
        self._num_marked = self._num_passed = 0

    def mark(self) -> None:
        """It is here."""
        self._backend.record(Side.COMPUTE, self._event)
        self._num_marked += 1

    def follow(self) -> None:
        """The next step may run on another stream."""
        self._backend.wait(Side.COMPUTE, self._event)

    def wait(self) -> None:
        """Block until the device is there, and has made all copies."""
        num_marked = self._num_marked  # another thread may run a step meanwhile
        if self._num_passed != num_marked and not self._backend.capturing():
            self._backend.drain(self._event)
            self._num_passed = num_marked
