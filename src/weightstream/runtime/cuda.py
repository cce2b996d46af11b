"""A CUDA GPU as a device: a copy stream, events, pinned sources. The only file that spells `torch.cuda`."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from weightstream.errors import ConfigError, StoreError
from weightstream.plan.manifest import Profile
from weightstream.runtime.backend import Copy, Event, Side

CUDA_PROFILE = Profile(copy_latency_s=3e-6, overhead_s=60e-6, launch_s=50e-6, handover_s=150e-6)
_STAGING_NBYTES = 32 << 20
_TIMED = 11  # one wait in so many is timed: two events around each cost a prefill of 7 matrices a layer 1 %
_PORTABLE = 1  # pinned for every device, not for the current one alone
_HEADROOM_NBYTES = 1 << 30  # for activations, workspaces and a short cache when no budget was given


def available() -> bool:
    return torch.cuda.is_available()


def free_nbytes(device: torch.device) -> int:
    """Device memory to plan with when no budget was given: what is free, less headroom for activations."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(free * 0.9) - _HEADROOM_NBYTES)


def new_graph() -> Any:
    return torch.cuda.CUDAGraph()


@contextmanager
def recording(graph: Any, **options: Any) -> Iterator[None]:
    """Work queued inside becomes the graph. Other threads may go on using the device.

    PyTorch leaves stream, allocator and random state in the middle of a capture that became invalid: put right here.
    """
    stream = torch.cuda.current_stream()
    options = {"capture_error_mode": "thread_local", "pool": torch.cuda.graph_pool_handle()} | options
    try:
        with torch.cuda.graph(graph, **options):
            yield
    except BaseException:
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it ended
            torch._C._cuda_endAllocateToPool(stream.device_index, options["pool"])
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):  # ends what the random state began
            torch.zeros(1, device=stream.device)
        raise


def register(memory: torch.Tensor) -> None:
    """Pin host memory in place; raises `StoreError` when the system refuses."""
    _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE), memory.numel())


def unregister(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _check(code: object, nbytes: int) -> None:
    number = int(getattr(code, "value", code))  # type: ignore[call-overload]
    if number:
        with suppress(RuntimeError):  # the error is handled here: the next kernel's check must not report it
            torch.zeros(1, device="cuda")
        raise StoreError(
            f"the system refused to pin {nbytes} bytes of host memory (CUDA error {number}). "
            "Raise the memlock limit (ulimit -l) or the container's memory, or set pin_memory=False (slower)."
        )


class _Mapped:
    """Host memory under its address on the device; a tensor made of it keeps it alive."""

    def __init__(self, memory: torch.Tensor, pointer: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class CudaBackend:
    """One GPU: compute runs on the caller's current stream, copies on a stream of their own."""

    def __init__(self, device: torch.device, *, pin_memory: bool = True, profile: Profile = CUDA_PROFILE) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device {device}: this torch ({torch.__version__}) sees no CUDA GPU; use device='cpu'")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device {device}: there are {torch.cuda.device_count()} CUDA devices")
        self.device = torch.device("cuda", index)
        self.profile = profile
        self._pin = pin_memory
        self._copies = torch.cuda.Stream(self.device)
        self._staging: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._stall_ms = 0.0
        self._num_waits = 0

    def alloc(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # The allocator may hand out bytes that work queued on this stream still uses; copies come from the other.
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        memory.record_stream(self._copies)  # and back to the allocator only when copies into it are done
        return memory

    def event(self) -> Event:
        return torch.cuda.Event(external=True)

    def edge(self) -> Event:
        return torch.cuda.Event()

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def capture(self, graph: Any, **options: Any) -> Iterator[None]:
        if self.capturing():
            yield
            return
        with recording(graph, **options):
            yield

    def device_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        pointer = ctypes.c_uint64()
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(memory.data_ptr()), 0):
            return None
        view = torch.as_tensor(_Mapped(memory, pointer.value), device=self.device)
        return view if view.data_ptr() == pointer.value else None

    def _stream(self, side: Side) -> torch.cuda.Stream:
        return self._copies if side is Side.COPY else torch.cuda.current_stream(self.device)

    def record(self, side: Side, event: Event) -> None:
        event.record(self._stream(side))

    def wait(self, side: Side, event: Event) -> None:
        stream = self._stream(side)
        self._num_waits += side is Side.COMPUTE
        if side is Side.COPY or self._num_waits % _TIMED or self.capturing():
            stream.wait_event(event)
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._waits.append((before, after))
        if len(self._waits) > 1024:
            self._harvest()

    def copy(self, copies: Sequence[Copy]) -> None:
        with torch.cuda.stream(self._copies):
            for copy in copies:
                if copy.pinned:
                    copy.dst.copy_(copy.src, non_blocking=True)
                else:
                    self._staged(copy)

    def _staged(self, copy: Copy) -> None:
        """Through two pinned buffers: a copy from pageable memory would synchronise and break the overlap."""
        if copy.prepare is not None:
            copy.prepare()
        if not self._pin:
            copy.dst.copy_(copy.src)
            return
        while len(self._staging) < 2:
            memory = torch.empty(_STAGING_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._staging.append((memory, torch.cuda.Event()))
        for start in range(0, copy.src.numel(), _STAGING_NBYTES):
            source = copy.src[start : start + _STAGING_NBYTES]
            memory, drained = self._staging[0]
            self._staging.rotate(-1)
            drained.synchronize()
            part = memory[: source.numel()].copy_(source)
            copy.dst[start : start + _STAGING_NBYTES].copy_(part, non_blocking=True)
            drained.record(self._copies)

    def _harvest(self) -> None:
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._stall_ms += _TIMED * before.elapsed_time(after)

    def stall_s(self) -> float:
        self._harvest()
        return self._stall_ms / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)  # all streams: a step may have run on another than the caller's

    def close(self) -> None:
        self.synchronize()
        self._staging.clear()
        self._waits.clear()
