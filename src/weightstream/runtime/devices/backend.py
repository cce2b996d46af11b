"""The protocol of a device: memory, streams besides the compute stream, and events that order them.

Events behave as on CUDA: `record` marks a point in a stream, `wait` orders a stream after the point that was recorded
last at the time of the call; recording again does not change earlier waits.
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

Event = Any  # each backend has a type of its own, and takes only its own
Stamp = Any  # as above


class Graph(Protocol):
    """Captured work, such as a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...


def owners(storage: torch.UntypedStorage) -> int:
    """The number of tensors that view a storage, plus one for the handle `storage`."""
    return torch._C._storage_Use_Count(storage._cdata)


class Side(Enum):
    """The streams of a device: the caller's, the copy stream, and one for kernels that run concurrently with both."""

    COMPUTE = "compute"
    COPY = "copy"
    AHEAD = "ahead"


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Bytes to copy from `src` on the host to `dst` on the device: both uint8, of one size and flat. `src` may also be
    strided rows, of shape `(num_rows, width)`.

    `prepare` runs before the source is read, and raises `StoreError` if the source cannot be read. A source that is not
    `pinned` goes through a staging ring. With `read`, bytes are read from that range of a source, and `src` only
    identifies them.
    """

    dst: torch.Tensor
    src: torch.Tensor
    pinned: bool = False
    prepare: Callable[[], None] | None = None
    read: SourceRange | None = None

    def joined(self, other: Copy) -> Copy | None:
        """One copy for two that are adjacent in source and target; None if they are not.

        The alignment gap between the two is copied, too.
        """
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
    """The operations that the engine needs of a device."""

    device: torch.device
    profile: Profile

    @property
    def pinning(self) -> AbstractContextManager[object]:
        """A lock held while host memory is pinned, and while pinning would disturb a measurement."""

    def alloc(self, nbytes: int) -> torch.Tensor:
        """Flat uint8 memory on the device."""

    def part(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Bytes [begin, end) of `memory` as a separate storage, which `owners` can count; it keeps `memory` alive."""

    def event(self) -> Event:
        """A new event. Recorded inside a capture it can be waited for outside, and the reverse."""

    def edge(self) -> Event:
        """A new event that orders two streams inside one capture."""

    def capturing(self) -> bool:
        """Whether work that is queued now becomes part of a graph."""

    def prepare_graph(self, copies: Iterable[Copy] = ()) -> None:
        """Call before a graph is captured or launched: puts work that still waits in a thread on the device's streams.

        Raises `OffloadError` if a graph cannot make these `copies`.
        """

    def capture(self, graph: Graph, **options: Any) -> AbstractContextManager[None]:
        """Capture work queued inside as the graph; if a capture is under way already, as a part of that."""

    def joined(self, graph: Graph) -> AbstractContextManager[None]:
        """Inside, work queued on this device is part of `graph`, which another device captures. The caller orders the
        compute streams of both devices, at the begin and at the end. Memory allocated inside lives as long as the
        graph."""

    def device_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        """A view of pinned host memory that kernels of the device can read; None if they cannot."""

    def record(self, side: Side, event: Event) -> None:
        """Mark the present end of a stream."""

    def wait(self, side: Side, event: Event) -> None:
        """Order all later work of a stream after the event; raises the error of a copy that failed before it."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Queue copies on the copy stream."""

    def bring(self, copies: Sequence[Copy]) -> None:
        """Make copies now, and wait for them. Nothing else may use their targets."""

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue a kernel on the compute stream: calling `kernel` queues it, or runs it."""

    def aside(self) -> AbstractContextManager[object]:
        """Inside, kernels are queued on the stream that runs concurrently with compute (`Side.AHEAD`)."""

    def stamp(self, side: Side) -> Stamp:
        """A stamp of the time when the device passes the present end of a stream; not inside a capture."""

    def seconds(self, begin: Stamp, end: Stamp) -> float | None:
        """Seconds between two stamps; None until the device has passed both. Does not wait."""

    def drain(self, event: Event) -> None:
        """Block until compute has passed the event and all queued copies are made. Captures of other threads go on."""

    def synchronize(self) -> None:
        """Block until all streams are idle."""

    def close(self) -> None:
        """End threads and free memory; may be called twice."""


class StepEnd:
    """The end of the last step. The next step waits for it, and so do writes to memory that copies may still read."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._event = backend.event()
        self._num_marked = self._num_passed = 0

    def mark(self) -> None:
        """Mark the present end of compute as the end of the step."""
        self._backend.record(Side.COMPUTE, self._event)
        self._num_marked += 1

    def follow(self) -> None:
        """Order the present compute stream after the last step, which may have run on another stream."""
        self._backend.wait(Side.COMPUTE, self._event)

    def wait(self) -> None:
        """Block until the device has passed the end of the step and made all copies."""
        num_marked = self._num_marked  # another thread may mark another end meanwhile
        if self._num_passed != num_marked and not self._backend.capturing():
            self._backend.drain(self._event)
            self._num_passed = num_marked
