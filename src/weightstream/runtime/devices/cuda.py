"""A CUDA GPU as a device: a copy stream, events, pinned sources. The only file that spells `torch.cuda`.

[Note: the feeder]
Copies from pinned memory are queued on the copy stream at once. Other bytes first have to come through a staging ring,
and the caller must not wait for that. So from the first such copy on, a thread, the *feeder*, does all work of the copy
stream, in order: copies, events that are recorded, events that are waited for. An event that the feeder is still to
record has a `point` in the feeder's queue: compute first blocks the host until the feeder is there, and then waits for
the event. The feeder is no part of a capture, so before one it ends, and copies that need it are refused.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from threading import Lock
from typing import Any, NamedTuple

import torch

from weightstream.errors import ConfigError, OffloadError, StoreError, UnsupportedError
from weightstream.plan.manifest import Profile
from weightstream.plan.schedule import aligned
from weightstream.runtime.devices import cuda_driver
from weightstream.runtime.devices.backend import Copy, Event, Side
from weightstream.runtime.devices.collector import uncollected
from weightstream.runtime.devices.host_stream import Move, Worker, move, staging
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.store.arena import Arena
from weightstream.store.ending import finalize
from weightstream.store.limits import describe_limits
from weightstream.store.numa import Node, nearest
from weightstream.store.staging import MemorySource, SourceRange, StagedReading, Staging

logger = logging.getLogger("weightstream")

CUDA_PROFILE = Profile(  # `workspace_nbytes` is that of an H200; older GPUs take 8 MiB
    copy_latency_s=3e-6,
    overhead_s=60e-6,
    fill_s=40e-6,
    show_s=5e-6,
    decoding_launch_s=15e-6,
    launch_s=50e-6,
    handover_s=150e-6,
    workspace_nbytes=33 << 20,
)
is_available = torch.cuda.is_available
allocated_nbytes = torch.cuda.memory_allocated
new_graph: Any = torch.cuda.CUDAGraph
_READ_ONLY = 8  # flag of cudaHostRegister: read-only pages, such as those of a file
_ALLOCATED = "allocated_bytes.all.allocated"  # counts from the start of the process
_PORTABLE = 1  # flag of cudaHostRegister: pinned for all devices, not only for the current one
_NEEDS_FEEDER = (
    "this model copies weights that are read from disk, that could not be pinned, or that were updated since they were "
    "loaded from a file: a captured graph cannot copy these. Run it eagerly; or raise host_budget or the limits on "
    "pinning, or save the updated model and load that"
)


class DeviceMemory(NamedTuple):
    free_nbytes: int
    total_nbytes: int


def memory(device: torch.device) -> DeviceMemory:
    """Free and total bytes of a device's memory."""
    return DeviceMemory(*torch.cuda.mem_get_info(device))


def workspace_nbytes(device: torch.device, work: Callable[[], Any]) -> int:
    """Bytes that `work` allocates besides its result: the sum, an upper bound of its peak.

    Uses counters that only grow: resetting the peaks of the process would disturb the user.
    """
    before = torch.cuda.memory_stats(device).get(_ALLOCATED, 0)
    result = work()
    taken = torch.cuda.memory_stats(device).get(_ALLOCATED, 0) - before
    kept = {t.untyped_storage()._cdata: aligned(t.untyped_storage().nbytes()) for t in tensors_in(result)}
    return max(0, int(taken) - sum(kept.values()))


def is_capturing() -> bool:
    """Whether work that is queued now becomes part of a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def multiplies_groups(device: torch.device) -> bool:
    """Whether torch has a grouped matrix product for bfloat16 on the device; else it reads group sizes on the host."""
    is_new = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return is_new and not torch.is_autocast_enabled("cuda")


def product_settings() -> tuple[object, ...]:
    """The settings, besides shapes, by which kernels of bfloat16 products are chosen."""
    matmul = torch.backends.cuda.matmul
    reduced, library = matmul.allow_bf16_reduced_precision_reduction, torch.backends.cuda.preferred_blas_library()
    return reduced, str(library), torch.are_deterministic_algorithms_enabled()


@cache
def _captures(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # PyTorch's own capture stream is on the device of its first capture


@contextmanager
def recording(graph: Any, device: torch.device | None = None, **options: Any) -> Iterator[None]:
    """Capture work queued inside, on `device` or the current one, as the graph. Other threads may use the device.

    Garbage is not collected inside: a graph or pinned memory that is freed while its thread captures makes the capture
    invalid. What is made inside may be collected: young garbage from before is freed first. After an invalid capture,
    PyTorch leaves stream, allocator and random state as they were inside it; they are restored here.
    """
    stream = torch.cuda.current_stream(device)
    defaults: dict[str, Any] = {"pool": torch.cuda.graph_pool_handle(), "stream": _captures(stream.device_index)}
    options = {"capture_error_mode": "thread_local"} | defaults | options
    with torch.cuda.device(stream.device), uncollected():
        gc.collect(0)
        try:
            with torch.cuda.graph(graph, **options):
                yield
        except BaseException:
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):  # it has ended already
                torch._C._cuda_endAllocateToPool(stream.device_index, options["pool"])
            with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=defaults["stream"]):
                torch.zeros(1, device=stream.device)  # ends the capture of the random state
            raise


def pin_in_place(memory: torch.Tensor, device: torch.device | None = None, *, read_only: bool = False) -> None:
    """Pin host memory in place; raises `StoreError` when the system refuses. Any thread may call it."""
    with torch.cuda.device(device):
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        code: object = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), flags)
        if number := int(getattr(code, "value", code)):  # type: ignore[call-overload]
            with suppress(RuntimeError):  # clears the error, which the check of the next kernel would report
                torch.zeros(1, device="cuda")
            raise StoreError(
                f"the system refused to pin {memory.numel()} bytes of host memory (CUDA error {number}; "
                f"{describe_limits()}). Raise the memlock limit (ulimit -l) or the container's memory, or set "
                "pin_memory=False (slower)."
            )


def unregister(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class _Addresses:
    """Bytes at a device address in `memory`; a tensor made of them keeps `memory` alive."""

    def __init__(self, memory: torch.Tensor, pointer: int, nbytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class CudaStamp:
    """A timing event. CUDA reports an event that was never recorded as complete, and the feeder may record it later: so
    whether it was recorded is tracked."""

    __slots__ = ("_is_passed", "_is_recorded", "event")

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self._is_recorded = self._is_passed = False

    def record(self, stream: torch.cuda.Stream) -> None:
        self.event.record(stream)
        self._is_recorded = True

    def is_passed(self) -> bool:
        self._is_passed = self._is_passed or (self._is_recorded and self.event.query())
        return self._is_passed


class CudaBackend:
    """One GPU: compute runs on the caller's current stream, copies and `Side.AHEAD` on streams of their own."""

    def __init__(self, device: torch.device, *, pin_memory: bool = True) -> None:
        if torch.version.hip:  # it calls its GPUs "cuda", and has no CUDA driver
            raise UnsupportedError(f"device {device}: this torch ({torch.__version__}) is for ROCm; use device='cpu'")
        if not torch.cuda.is_available():
            raise ConfigError(f"device {device}: this torch ({torch.__version__}) sees no CUDA GPU; use device='cpu'")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device {device}: there are {torch.cuda.device_count()} CUDA devices, from cuda:0")
        self.device = torch.device("cuda", index)
        self.profile = CUDA_PROFILE
        self.pinning = Lock()
        self._pin = pin_memory
        self._copies = torch.cuda.Stream(self.device)
        self._computes: dict[int, torch.cuda.Stream] = {}  # by handle: PyTorch takes 4 us to make a Stream
        self._feeder: Worker | None = None  # [Note: the feeder]; None: all copies are queued directly
        self._was_fed = False  # there has been a feeder

    def alloc(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # The allocator may reuse bytes that work queued on this stream still uses, and copies run on another stream.
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        memory.record_stream(self._copies)  # the allocator reuses it only after copies into it are done
        return memory

    def part(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        if begin == end:  # an empty tensor has no address
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_Addresses(memory, memory.data_ptr() + begin, end - begin), device=self.device)

    def event(self) -> Event:
        return torch.cuda.Event(external=True)

    def edge(self) -> Event:
        return torch.cuda.Event()

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def prepare_graph(self, copies: Iterable[Copy] = ()) -> None:
        if not all(copy.pinned for copy in copies):
            raise OffloadError(_NEEDS_FEEDER)
        self._stop_feeding()

    @contextmanager
    def capture(self, graph: Any, **options: Any) -> Iterator[None]:
        with nullcontext() if self.capturing() else recording(graph, self.device, **options):
            yield

    @contextmanager
    def joined(self, graph: Any) -> Iterator[None]:
        pool, here = (self.device.index, torch.cuda.graph_pool_handle()), torch.cuda.device(torch.cuda.current_device())
        # not a `torch.cuda.MemPool`: that would free its memory at once, even inside a capture
        torch._C._cuda_beginAllocateCurrentThreadToPool(*pool)
        weakref.finalize(graph, torch._C._cuda_releasePool, *pool).atexit = False
        try:
            with torch.cuda.stream(_captures(self.device.index)), here:
                yield
        finally:
            torch._C._cuda_endAllocateToPool(*pool)

    def device_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        with self._current():
            if (pointer := cuda_driver.device_address(memory)) is None:
                return None
            view = torch.as_tensor(_Addresses(memory, pointer, memory.numel()), device=self.device)
        return view if view.data_ptr() == pointer else None

    def _stream(self, side: Side) -> torch.cuda.Stream:
        if side is not Side.COMPUTE:
            return self._copies if side is Side.COPY else self._asides
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if (found := self._computes.get(handle)) is None:
            found = self._computes[handle] = torch.cuda.current_stream(self.device)
        return found

    def _current(self) -> AbstractContextManager[object]:
        """Inside, this device is the current one. It mostly is already: a check takes a tenth of the time to set it."""
        return nullcontext() if torch.cuda.current_device() == self.device.index else torch.cuda.device(self.device)

    def record(self, side: Side, event: Event) -> None:
        if side is not Side.COPY or self._feeder is None:
            event.record(self._stream(side))
            if self._was_fed:
                event.point = None  # this recording replaces one by a feeder, whose point may still be here
        elif self.capturing():
            raise OffloadError(_NEEDS_FEEDER)
        else:
            self._feeder.submit(lambda: event.record(self._copies))
            event.point = self._feeder.point()

    def wait(self, side: Side, event: Event) -> None:
        if side is Side.COPY and self._feeder is not None:
            if self.capturing():
                raise OffloadError(_NEEDS_FEEDER)
            self._feeder.submit(lambda: self._copies.wait_event(event))
            return
        if side is Side.COMPUTE and (point := getattr(event, "point", None)) is not None:
            point.wait()  # until the feeder has recorded the event
        self._stream(side).wait_event(event)

    def copy(self, copies: Sequence[Copy]) -> None:
        if self._feeder is None and all(copy.pinned for copy in copies):
            with self._current():
                move([Move(copy, None) for copy in copies], self._queue)
            return
        if self.capturing():
            raise OffloadError(_NEEDS_FEEDER)
        if self._feeder is None:
            self._was_fed = True
            self._feeder = Worker("weightstream-feed")
            self._stop = finalize(self, self._feeder.stop)
        moves = self._moves(copies)
        self._feeder.submit(lambda: self._move(moves))

    def _stop_feeding(self) -> None:
        """Put all queued copies on the copy stream; later copies are queued there directly."""
        if (feeder := self._feeder) is not None:
            feeder.join()  # before `_feeder` is reset: if this is interrupted, later copies still go through the feeder
            self._feeder = None
            self._stop()

    def bring(self, copies: Sequence[Copy]) -> None:
        self._move(self._moves(copies))
        self._copies.synchronize()

    def _moves(self, copies: Sequence[Copy]) -> list[Move]:
        return [Move(copy, None if copy.pinned else self._read(copy)) for copy in copies]

    def _move(self, moves: Sequence[Move]) -> None:
        with torch.cuda.stream(self._copies):
            move(moves, self._put, self._drained)

    def _put(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy by PyTorch, which keeps the source alive until it is made.

        PyTorch would gather strided rows first, so the driver copies these: unlike other sources they are always
        pinned.
        """
        if src.dim() > 1:
            self._queue(dst, src)
        else:
            dst.copy_(src, non_blocking=True)

    def _queue(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy of pinned bytes by the driver, as PyTorch takes the host three times as long.

        PyTorch's pinned allocator does not know of the copy: the owner of such memory waits for it before freeing.
        """
        if not cuda_driver.copy(dst, src, self._copies.cuda_stream):
            with torch.cuda.stream(self._copies):  # the driver refused: PyTorch raises the error
                dst.view(src.shape).copy_(src, non_blocking=True)

    def _drained(self) -> Callable[[], None]:
        return self._copies.record_event().synchronize  # type: ignore[no-any-return]

    def _read(self, copy: Copy) -> StagedReading:
        """Start to read before the feeder reaches the copy: the disk reads ahead, as far as staging has room."""
        return self._staging.start(*(copy.read or SourceRange(MemorySource(copy.src), 0, copy.src.numel())))

    @cached_property
    def _staging(self) -> Staging:
        return staging(self._staging_memory, node(self.device))

    def _staging_memory(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pin)
        except RuntimeError as error:
            text = "%s (%s): the staging ring is not pinned, so copies do not overlap with compute."
            logger.warning(text, error, describe_limits())
            return Arena().take(nbytes)

    def launch(self, kernel: Callable[[], None]) -> None:
        kernel()

    def aside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._asides)

    @cached_property
    def _asides(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def stamp(self, side: Side) -> CudaStamp:
        stamp, stream = CudaStamp(), self._stream(side)
        if side is Side.COPY and self._feeder is not None:
            self._feeder.submit(lambda: stamp.record(stream))
        else:
            stamp.record(stream)
        return stamp

    def seconds(self, begin: CudaStamp, end: CudaStamp) -> float | None:
        return begin.event.elapsed_time(end.event) / 1e3 if begin.is_passed() and end.is_passed() else None

    def drain(self, event: Event) -> None:
        if self._feeder is not None and self._stop.alive:
            self._feeder.join()
        self._copies.synchronize()
        event.synchronize()

    def synchronize(self) -> None:
        if self._feeder is not None:
            self._feeder.join()
        torch.cuda.synchronize(self.device)  # all streams: a step may have run on a stream that is not the caller's

    def close(self) -> None:
        self._stop_feeding()
        self.synchronize()
        if "_staging" in vars(self):
            self._staging.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts about a device from its driver. `driver` is the newest CUDA version that the driver supports."""

    name: str
    uuid: str
    pci: str
    capability: str
    driver: str
    total_nbytes: int


def facts(device: torch.device) -> Facts:
    properties: Any = torch.cuda.get_device_properties(device)
    return Facts(
        name=properties.name,
        uuid=str(properties.uuid),
        pci=f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0",
        capability=f"{properties.major}.{properties.minor}",
        driver=cuda_driver.version(),
        total_nbytes=properties.total_memory,
    )


def node(device: torch.device) -> Node | None:
    """The memory node that the device is attached to; None if no other node is farther."""
    return nearest(facts(device).pci)


def allocatable_nbytes(device: torch.device) -> int:
    """Bytes that can be allocated now: free memory, and what the allocator caches for reuse."""
    return memory(device).free_nbytes + torch.cuda.memory_reserved(device) - allocated_nbytes(device)


def peers(device: torch.device, others: Sequence[torch.device]) -> list[bool]:
    """For each of the others, whether the device copies to it directly, not through host memory."""
    return [torch.cuda.can_device_access_peer(device, other) for other in others]


def give_back(*, workspaces: bool) -> None:
    """Return the allocator's cached memory of the current device to the driver; with `workspaces` also cuBLAS's.

    Pass `workspaces` only while no captured graph is alive: a graph goes on using the workspaces of its capture.
    """
    if workspaces:
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
