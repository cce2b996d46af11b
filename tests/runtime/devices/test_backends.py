"""One conformance suite for every backend and every wrapper, and the properties that each of them adds."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightstream.errors import ConfigError, StoreError
from weightstream.plan.manifest import Profile
from weightstream.runtime.devices.backend import Copy, Side, owners
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.devices.cuda import CudaBackend
from weightstream.runtime.devices.host_stream import STAGING_BUFFERS, STAGING_NBYTES, move
from weightstream.store.staging import MemorySource, Staging
from wrapped import ClockBackend, Delay, Fault, Limit, Poison, QueueBackend, Wrapper

NBYTES = 4096


def cuda() -> CudaBackend:
    return CudaBackend(torch.device("cuda"))


BACKENDS: dict[str, Callable[[], Any]] = {
    "cpu": CpuBackend,
    "queue": QueueBackend,
    "wrapper": lambda: Wrapper(CpuBackend()),
    "delay": lambda: Delay(CpuBackend(), seed=1, most_s=0.001),
    "poison": lambda: Poison(CpuBackend()),
    "fault that never fails": lambda: Fault(CpuBackend(), lambda copy: False),
    "limit": lambda: Limit(CpuBackend(), 1 << 20),
    "clock": lambda: ClockBackend(CpuBackend()),
    "all around a queue": lambda: ClockBackend(Limit(Poison(Delay(QueueBackend(), 1, 0.001)), 1 << 20)),
    "cuda": cuda,
    "clock around cuda": lambda: ClockBackend(Poison(cuda())),
}
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(params=[pytest.param(name, marks=GPU if "cuda" in name else []) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = BACKENDS[request.param]()
    yield made
    made.close()


def host(value: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def fails() -> None:
    raise StoreError("the source is gone")


class Gate:
    """Holds the copy stream at a copy until it is opened. A GPU cannot be held, so there the gate is always open."""

    def __init__(self, backend: Any) -> None:
        self._open = threading.Event()
        if backend.device.type != "cpu":
            self._open.set()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> Copy:
        return Copy(dst=dst, src=src, prepare=self._pass)

    def open(self) -> None:
        self._open.set()

    def _pass(self) -> None:
        assert self._open.wait(30)


def filled_event(backend: Any, copies: list[Copy]) -> Any:
    event = backend.event()
    backend.copy(copies)
    backend.record(Side.COPY, event)
    return event


# -- the protocol ----------------------------------------------------------------------------------------------------


def test_alloc_gives_flat_bytes_on_the_device(backend: Any) -> None:
    memory = backend.alloc(NBYTES)
    assert (memory.shape, memory.dtype, memory.device) == ((NBYTES,), torch.uint8, backend.device)
    assert backend.alloc(0).numel() == 0
    assert isinstance(backend.profile, Profile)


def test_a_part_is_the_same_bytes_under_a_storage_of_its_own(backend: Any) -> None:
    memory = backend.alloc(NBYTES)
    part, other = backend.part(memory, 512, 1536), backend.part(memory, 1536, NBYTES)
    assert (part.shape, part.dtype, part.device) == ((1024,), torch.uint8, backend.device)
    assert part.data_ptr() == memory.data_ptr() + 512
    assert (part.untyped_storage().nbytes(), part.storage_offset()) == (1024, 0)
    backend.copy([Copy(dst=memory, src=host(1)), Copy(dst=part, src=host(2, 1024))])
    backend.synchronize()
    assert torch.equal(memory.cpu(), torch.cat([host(1, 512), host(2, 1024), host(1, NBYTES - 1536)]))
    assert other.cpu().unique().tolist() == [1]
    empty = backend.part(memory, 512, 512)
    assert (empty.shape, empty.dtype, empty.device) == ((0,), torch.uint8, backend.device)


@pytest.mark.parametrize("width", [1, 7, 512, 4096])
@pytest.mark.parametrize("fed", [False, True])
def test_rows_with_gaps_arrive_packed(backend: Any, width: int, fed: bool) -> None:
    """Also together with a copy that goes through the staging ring."""
    num, pitch, on_cpu = 100, 3 * width + 5, backend.device.type == "cpu"
    host_memory = torch.randint(256, (num * pitch,), dtype=torch.uint8, pin_memory=not on_cpu)
    src = host_memory.as_strided((num, width), (pitch, 1), 2)
    memory = backend.alloc(NBYTES + num * width)
    other = Copy(dst=memory[num * width :], src=host(1), pinned=not fed and not on_cpu)
    backend.copy([Copy(dst=memory[: num * width], src=src, pinned=True), other])
    backend.synchronize()
    assert torch.equal(memory[: num * width].cpu(), src.reshape(-1))


def test_a_part_keeps_its_memory_alive(backend: Any) -> None:
    memory = backend.alloc(NBYTES)
    part = backend.part(memory, 0, 512)
    storage = weakref.ref(memory.untyped_storage())
    view = part[:16].view(torch.bfloat16)
    del memory, part
    gc.collect()
    assert storage() is not None
    del view
    gc.collect()
    assert storage() is None


def test_the_owners_of_a_part_show_the_remaining_views(backend: Any) -> None:
    """Torch's own count is private: this test fails if it moves or counts differently."""
    memory = backend.alloc(NBYTES)
    parts = [backend.part(memory, 0, 512), backend.part(memory, 512, 1024)]
    assert [owners(part.untyped_storage()) for part in parts] == [2, 2]  # the tensor, and the handle
    weight = torch.nn.Parameter(parts[0].view(torch.bfloat16).view(16, 16))
    kept = weight.detach()
    assert [owners(part.untyped_storage()) for part in parts] == [4, 2]
    assert torch.empty(0, dtype=torch.uint8, device=backend.device).set_(parts[0]).numel() == 512
    assert owners(parts[0].untyped_storage()) == 4
    del weight
    assert owners(parts[0].untyped_storage()) == 3
    del kept
    assert [owners(part.untyped_storage()) for part in parts] == [2, 2]


def test_an_event_never_recorded_is_complete(backend: Any) -> None:
    for side in Side:
        backend.wait(side, backend.event())
    backend.synchronize()


def test_compute_waits_for_the_copy(backend: Any) -> None:
    ring, gate = backend.alloc(NBYTES), Gate(backend)
    event = filled_event(backend, [gate.copy(ring, host(7))])
    threading.Timer(0.02, gate.open).start()
    backend.wait(Side.COMPUTE, event)
    seen: list[int] = []
    launch = getattr(backend, "launch", lambda kernel: kernel())
    launch(lambda: seen.extend(ring.unique().tolist()))
    backend.synchronize()
    assert seen == [7]


def test_a_wait_sees_the_last_record_at_the_time_of_its_call(backend: Any) -> None:
    """Recording again must not move an earlier wait: the copy stream waits for a point that compute has passed."""
    ring, gate = backend.alloc(NBYTES), Gate(backend)
    event = backend.event()
    backend.record(Side.COMPUTE, event)
    backend.wait(Side.COPY, event)
    copied = filled_event(backend, [gate.copy(ring, host(3))])
    backend.record(Side.COPY, event)  # after the gate: an earlier wait for this point would never end
    gate.open()
    backend.wait(Side.COMPUTE, copied)
    backend.wait(Side.COMPUTE, event)
    backend.synchronize()
    assert torch.equal(ring.cpu(), host(3))


def test_recording_again_replaces_the_point(backend: Any) -> None:
    """A wait after the second record waits for the second copy."""
    ring, gate = backend.alloc(NBYTES), Gate(backend)
    event = filled_event(backend, [Copy(dst=ring, src=host(1))])
    backend.copy([gate.copy(ring, host(2))])
    backend.record(Side.COPY, event)
    threading.Timer(0.02, gate.open).start()
    backend.wait(Side.COMPUTE, event)
    seen: list[int] = []
    getattr(backend, "launch", lambda kernel: kernel())(lambda: seen.extend(ring.unique().tolist()))
    backend.synchronize()
    assert seen == [2]


def test_the_copy_stream_waits_for_compute(backend: Any) -> None:
    ring = backend.alloc(NBYTES)
    backend.wait(Side.COMPUTE, filled_event(backend, [Copy(dst=ring, src=host(1))]))
    seen: list[int] = []

    def kernel() -> None:
        time.sleep(0.02)
        seen.extend(ring.unique().tolist())

    getattr(backend, "launch", lambda kernel: kernel())(kernel)
    drained = backend.event()
    backend.record(Side.COMPUTE, drained)
    backend.wait(Side.COPY, drained)
    backend.copy([Copy(dst=ring, src=host(2))])
    backend.synchronize()
    assert seen == [1]
    assert torch.equal(ring.cpu(), host(2))


def test_copies_keep_their_order(backend: Any) -> None:
    ring = backend.alloc(NBYTES)
    for value in range(50):
        backend.copy([Copy(dst=ring, src=host(200)), Copy(dst=ring[: NBYTES // 2], src=host(value, NBYTES // 2))])
    backend.synchronize()
    assert torch.equal(ring.cpu(), torch.cat([host(49, NBYTES // 2), host(200, NBYTES // 2)]))


def test_a_copy_touches_only_its_own_bytes(backend: Any) -> None:
    ring = backend.alloc(NBYTES)
    backend.copy([Copy(dst=ring, src=host(1)), Copy(dst=ring[512:1000], src=host(9, 488))])
    backend.synchronize()
    assert torch.equal(ring.cpu(), torch.cat([host(1, 512), host(9, 488), host(1, NBYTES - 1000)]))


def test_an_error_reaches_only_the_waits_for_it(backend: Any) -> None:
    ring = backend.alloc(NBYTES)
    before = filled_event(backend, [Copy(dst=ring, src=host(1))])
    backend.wait(Side.COMPUTE, before)
    backend.synchronize()

    def fill_and_wait() -> None:  # a backend may raise at any of these
        event = filled_event(backend, [Copy(dst=ring, src=host(2), prepare=fails)])
        backend.wait(Side.COMPUTE, event)
        backend.synchronize()

    with pytest.raises(StoreError, match="the source is gone"):
        fill_and_wait()
    after = filled_event(backend, [Copy(dst=ring, src=host(3))])
    backend.wait(Side.COMPUTE, before)
    backend.wait(Side.COMPUTE, after)
    backend.synchronize()
    assert torch.equal(ring.cpu(), host(3))


@pytest.mark.few(1)
def test_fetched_bytes_are_there_at_once_and_an_error_leaves_nothing(backend: Any) -> None:
    """More than the staging ring holds, in pieces and from several sources."""
    size = STAGING_NBYTES * (STAGING_BUFFERS + 1) + 5
    sources = [torch.randint(0, 256, (num,), dtype=torch.uint8) for num in (size, 3, STAGING_NBYTES)]
    rings = [torch.empty(len(source), dtype=torch.uint8, device=backend.device) for source in sources]
    copies = [
        Copy(dst=ring, src=source, read=(MemorySource(source), 0, len(source)))
        for ring, source in zip(rings, sources, strict=True)
    ]
    with pytest.raises(StoreError, match="gone"):
        backend.bring([*copies[:2], replace(copies[2], prepare=fails), copies[0]])
    backend.bring(copies)
    for ring, source in zip(rings, sources, strict=True):
        assert torch.equal(ring.cpu(), source)
    again = backend.alloc(NBYTES)
    backend.wait(Side.COMPUTE, filled_event(backend, [Copy(dst=again, src=host(9))]))
    backend.synchronize()
    assert torch.equal(again.cpu(), host(9))


def test_an_error_without_a_wait_does_not_stop_the_copies(backend: Any) -> None:
    if backend.device.type == "cuda":
        pytest.skip("raises at once")
    ring = backend.alloc(NBYTES)
    filled_event(backend, [Copy(dst=ring, src=host(2), prepare=fails)])
    backend.wait(Side.COMPUTE, filled_event(backend, [Copy(dst=ring, src=host(3))]))
    backend.synchronize()
    assert torch.equal(ring, host(3))


def test_stamps_have_the_time_of_each_stream_once_it_has_passed_them(backend: Any) -> None:
    ring, gate = backend.alloc(NBYTES), Gate(backend)
    begin = backend.stamp(Side.COPY)
    filled_event(backend, [gate.copy(ring, host(1))])
    end, event = backend.stamp(Side.COPY), backend.event()
    backend.record(Side.COPY, event)  # after the stamp, which other work on the device may delay
    is_held = backend.device.type == "cpu"
    if is_held:
        assert backend.seconds(begin, end) is None
    threading.Timer(0.1, gate.open).start()
    before = backend.stamp(Side.COMPUTE)
    backend.wait(Side.COMPUTE, event)
    after = backend.stamp(Side.COMPUTE)
    backend.synchronize()
    assert 0.01 * is_held < backend.seconds(begin, end) < 30
    assert 0.001 * is_held <= backend.seconds(before, after) < 30
    assert backend.seconds(begin, begin) == 0
    assert backend.seconds(begin, after) >= backend.seconds(begin, end) - 1e-4  # one clock


def test_a_stamp_does_not_consume_the_error_of_a_copy(backend: Any) -> None:
    if backend.device.type == "cuda":
        pytest.skip("raises at once")
    ring = backend.alloc(NBYTES)
    backend.copy([Copy(dst=ring, src=host(2), prepare=fails)])
    stamp = backend.stamp(Side.COPY)
    event = backend.event()
    backend.record(Side.COPY, event)

    def wait() -> None:  # a backend may raise at either
        backend.wait(Side.COMPUTE, event)
        backend.synchronize()

    with pytest.raises(StoreError, match="the source is gone"):
        wait()
    assert backend.seconds(stamp, stamp) == 0


def test_close_ends_every_thread_and_may_be_called_twice() -> None:
    for name, make in BACKENDS.items():
        if "cuda" in name and not torch.cuda.is_available():
            continue
        before = set(threading.enumerate())
        made = make()
        ring = made.alloc(NBYTES)
        made.copy([Copy(dst=ring, src=host(5))])
        made.close()
        assert torch.equal(ring.cpu(), host(5)), name  # queued work has run
        made.close()
        made.synchronize()
        assert set(threading.enumerate()) <= before, name


@pytest.mark.parametrize("make", [CpuBackend, QueueBackend])
def test_a_forgotten_backend_ends_its_threads(make: Callable[[], Any]) -> None:
    before = set(threading.enumerate())
    made = make()
    assert set(threading.enumerate()) > before
    del made
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_a_failed_copy_gives_its_buffer_back() -> None:
    """Even while its error is alive, and with it the frames that refer to the piece."""
    with closing(Staging([torch.empty(NBYTES, dtype=torch.uint8) for _ in range(2)])) as staging:
        source, out = host(3), torch.zeros(NBYTES, dtype=torch.uint8)

        def moves() -> list[Any]:
            copy = Copy(dst=out, src=source)
            return [(copy, staging.start(MemorySource(source), 0, NBYTES))]

        def refuse(*_: Any) -> None:
            raise RuntimeError("no")

        errors = []
        for _ in range(4):
            with pytest.raises(RuntimeError, match="no") as error:
                move(moves(), refuse)
            errors.append(error)
        move(moves(), lambda dst, src: dst.copy_(src))
        assert torch.equal(out, source)


def test_an_idle_copy_thread_keeps_no_memory_alive() -> None:
    backend = CpuBackend()
    source = host(1)
    references = len(gc.get_referrers(source))
    backend.wait(Side.COMPUTE, filled_event(backend, [Copy(dst=backend.alloc(NBYTES), src=source)]))
    backend.close()
    assert len(gc.get_referrers(source)) == references


# -- CUDA without a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_is_refused_on_a_machine_without_it() -> None:
    with pytest.raises(ConfigError, match=r"device cuda:1: .*no CUDA GPU; use device='cpu'"):
        CudaBackend(torch.device("cuda", 1))


@pytest.mark.parametrize("code", [0, 201])
def test_a_copy_that_the_driver_refuses_is_made_by_torch(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """201: a thread without a context."""
    asked, entered = [], []
    driver = SimpleNamespace(cuMemcpyAsync=lambda *args: asked.append(args) or code)
    monkeypatch.setattr("weightstream.runtime.devices.cuda_driver._driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered.append(stream) or nullcontext())
    backend, copies = object.__new__(CudaBackend), SimpleNamespace(cuda_stream=7)
    backend._copies = copies  # type: ignore[assignment]
    dst, src = torch.zeros(NBYTES, dtype=torch.uint8), torch.randint(1, 255, (NBYTES,), dtype=torch.uint8)
    backend._queue(dst, src)
    assert asked == [(dst.data_ptr(), src.data_ptr(), NBYTES, 7)]
    assert entered == ([copies] if code else [])
    assert torch.equal(dst, src) == bool(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_index_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device cuda:99: there are \d+ CUDA devices"):
        CudaBackend(torch.device("cuda", 99))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pin_memory", [True, False])
def test_pageable_sources_larger_than_the_staging_buffers_arrive_whole(pin_memory: bool) -> None:
    backend = CudaBackend(torch.device("cuda"), pin_memory=pin_memory)
    source = torch.randint(0, 255, ((64 << 20) + 12345,), dtype=torch.uint8)
    ring = backend.alloc(source.numel())
    backend.wait(Side.COMPUTE, filled_event(backend, [Copy(dst=ring, src=source)] * 3))
    assert torch.equal(ring.cpu(), source)
    backend.close()


# -- properties of the wrappers ----------------------------------------------------------------------------------------


def test_queue_runs_kernels_asynchronously_and_in_order() -> None:
    backend, gate, seen = QueueBackend(), threading.Event(), []
    backend.launch(lambda: seen.append(gate.wait(30)))
    backend.launch(lambda: seen.append("second"))
    assert seen == []
    gate.set()
    backend.synchronize()
    assert seen == [True, "second"]
    backend.close()


def test_queue_raises_the_error_of_a_kernel_once() -> None:
    backend = QueueBackend()
    backend.launch(fails)
    with pytest.raises(StoreError, match="the source is gone"):
        backend.synchronize()
    backend.synchronize()
    backend.close()


def test_poison_is_visible_from_the_queueing_to_the_end_of_a_copy() -> None:
    backend, gate = Poison(CpuBackend()), threading.Event()
    ring = backend.alloc(NBYTES).fill_(1)
    poisoned = threading.Event()

    def hold() -> None:
        poisoned.set()
        assert gate.wait(30)

    backend.copy([Copy(dst=ring[:1024], src=host(2, 1024), prepare=hold)])
    assert poisoned.wait(30)
    assert torch.equal(ring, torch.cat([host(0xFF, 1024), host(1, NBYTES - 1024)]))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
        assert ring[:1024].view(dtype).to(torch.float32).isnan().all(), dtype
    gate.set()
    backend.synchronize()
    assert torch.equal(ring[:1024], host(2, 1024))
    backend.close()


def test_fault_fails_only_the_chosen_copies() -> None:
    backend = Fault(CpuBackend(), lambda copy: int(copy.src[0]) == 2)
    ring = backend.alloc(NBYTES)
    for value in (1, 2, 3):
        event = filled_event(backend, [Copy(dst=ring, src=host(value))])
        if value == 2:
            with pytest.raises(StoreError, match="Fault"):
                backend.wait(Side.COMPUTE, event)
            assert torch.equal(ring, host(1))
        else:
            backend.wait(Side.COMPUTE, event)
    assert torch.equal(ring, host(3))
    backend.close()


def test_limit_counts_held_memory_and_returns_freed_memory() -> None:
    backend = Limit(CpuBackend(), 1000)
    first = backend.alloc(600)
    with pytest.raises(torch.OutOfMemoryError, match="held 600 \\+ wanted 401 > limit 1000 bytes"):
        backend.alloc(401)
    view = first[:10]
    del first
    gc.collect()
    assert backend.held_nbytes == 600, "a view keeps the memory"
    del view
    gc.collect()
    assert backend.held_nbytes == 0
    assert backend.alloc(1000).numel() == 1000
    backend.close()


@pytest.mark.parametrize("side", Side)
def test_delays_are_those_of_the_seed(side: Side) -> None:
    pauses = random.Random(1)
    backend = Delay(QueueBackend(), seed=1, most_s=0.01)
    started, expected = time.perf_counter(), 0.0
    for _ in range(6):
        expected += pauses.uniform(0, 0.01)
        if side is Side.COPY:
            backend.copy([Copy(dst=backend.alloc(NBYTES), src=host(1))])
        else:
            backend.launch(lambda: None)
    backend.synchronize()
    assert time.perf_counter() - started >= expected
    backend.close()


# -- the clock checker -------------------------------------------------------------------------------------------------


class Clocked:
    """A clock checker over a backend, with two units in the same bytes."""

    def __init__(self) -> None:
        self.backend = ClockBackend(CpuBackend())
        ring = self.backend.alloc(NBYTES)
        self.first = [Copy(dst=ring[:1024], src=host(1, 1024))]
        self.second = [Copy(dst=ring[512:2048], src=host(2, 1536))]
        self.event = self.backend.event()

    def fill(self, copies: list[Copy]) -> None:
        self.backend.copy(copies)
        self.backend.record(Side.COPY, self.event)


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    made = Clocked()
    yield made
    made.backend.close()


def test_clock_accepts_a_fenced_read_and_overwrite(clocked: Clocked) -> None:
    drained = clocked.backend.event()
    for copies in [clocked.first, clocked.second] * 3:
        clocked.backend.wait(Side.COPY, drained)
        clocked.fill(copies)
        clocked.backend.wait(Side.COMPUTE, clocked.event)
        clocked.backend.read(copies)
        clocked.backend.record(Side.COMPUTE, drained)
    assert clocked.backend.races == []


def test_clock_reports_a_read_without_a_wait(clocked: Clocked) -> None:
    clocked.fill(clocked.first)
    clocked.backend.read(clocked.first)
    assert len(clocked.backend.races) == 1
    assert "no event orders the read" in clocked.backend.races[0]


def test_clock_reports_a_wait_for_an_event_recorded_too_early(clocked: Clocked) -> None:
    clocked.backend.record(Side.COPY, clocked.event)
    clocked.backend.copy(clocked.first)
    clocked.backend.wait(Side.COMPUTE, clocked.event)
    clocked.backend.read(clocked.first)
    assert len(clocked.backend.races) == 1


def test_clock_reports_an_overwrite_that_no_event_orders(clocked: Clocked) -> None:
    clocked.fill(clocked.first)
    clocked.backend.wait(Side.COMPUTE, clocked.event)
    clocked.backend.read(clocked.first)
    clocked.fill(clocked.second)
    assert len(clocked.backend.races) == 1
    assert "no event orders the fill" in clocked.backend.races[0]


def test_clock_reports_a_read_of_bytes_that_another_fill_wrote(clocked: Clocked) -> None:
    clocked.fill(clocked.first)
    clocked.fill(clocked.second)
    clocked.backend.wait(Side.COMPUTE, clocked.event)
    clocked.backend.read(clocked.first)
    assert len(clocked.backend.races) == 1
    assert "the last write" in clocked.backend.races[0]


def test_clock_reports_a_read_of_unwritten_bytes(clocked: Clocked) -> None:
    clocked.backend.read(clocked.first)
    assert len(clocked.backend.races) == 1


def test_clock_accepts_synchronize_as_an_order(clocked: Clocked) -> None:
    clocked.fill(clocked.first)
    clocked.backend.synchronize()
    clocked.backend.read(clocked.first)
    clocked.backend.synchronize()
    clocked.fill(clocked.second)
    assert clocked.backend.races == []


def test_clock_ignores_disjoint_bytes(clocked: Clocked) -> None:
    clocked.fill(clocked.first)
    clocked.backend.wait(Side.COMPUTE, clocked.event)
    clocked.backend.read(clocked.first)
    ring = clocked.first[0].dst
    clocked.backend.copy([Copy(dst=ring.as_strided((512,), (1,), 2048), src=host(3, 512))])
    assert clocked.backend.races == []
