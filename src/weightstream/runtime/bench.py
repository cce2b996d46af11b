"""The bench: measures in a second or two what this machine can do. Knows no files.

Everything is timed with the host's clock, between two points where the device is idle and with so much queued between
them that these do not count. The median of the later samples is taken, once clocks have settled.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional as F

from weightstream.errors import StoreError
from weightstream.plan.manifest import Profile
from weightstream.runtime import cpu, cuda, machine
from weightstream.runtime.backend import Backend, Copy, Side
from weightstream.store.arena import Arena
from weightstream.store.file import DirectFile

logger = logging.getLogger("weightstream")

_SAMPLES = 6
_SAMPLE_S = 0.02  # all samples of a number together, where nothing has to settle
_PIECE_NBYTES = 2 << 20  # large enough that the host queues copies faster than the link makes them
_NUM_KERNELS = 200
# A layer of a transformers model takes the host longer per kernel than the bare blocks below: keyword arguments, cache
# objects, interfaces. Measured (CPU, one thread, bf16, Llama, 4 against 8 layers): 5.2 us against 4.0.
_FRAMEWORK = 1.3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """How much is measured with; `rows` x `width` is a product's activation, `attention` heads, positions, width."""

    copy_nbytes: int
    num_weights: int
    width: int
    out_width: int
    rows: int
    attention: tuple[int, int, int]
    settle_s: float
    num_reads: int  # between two copies, to hide what the host takes to queue them


_GPU = _Sizes(
    copy_nbytes=128 << 20,
    num_weights=4,  # 448 MiB: no cache holds what is read again
    width=4096,
    out_width=14336,
    rows=8192,
    attention=(32, 8192, 128),
    settle_s=0.35,  # a GPU at rest raises its clock, then lowers it to what its power allows
    num_reads=4,
)
_SHORT_GPU = replace(_GPU, copy_nbytes=32 << 20, num_weights=2, rows=1024, attention=(32, 2048, 128))
_CPU = _Sizes(
    copy_nbytes=64 << 20,
    num_weights=4,
    width=4096,
    out_width=4096,
    rows=16,
    attention=(4, 512, 64),
    settle_s=_SAMPLE_S,
    num_reads=0,
)
_GPU_NBYTES = 5 << 28  # what measuring in full takes


def measure(backend: Backend) -> tuple[Profile, bool]:
    """What the backend's machine can do, and whether all of it was measured; the rest is the backend's own profile.

    On streams of its own, so that the backend is not disturbed.
    """
    own: Backend = cpu.CpuBackend() if backend.device.type == "cpu" else cuda.CudaBackend(backend.device)
    numbers, complete = _known(own.device), True
    try:
        with _left_as_found(own.device), torch.no_grad():
            bench = _Bench(own)
            for measuring in (bench.products, bench.attention, bench.kernels, bench.modules, bench.link):
                try:
                    numbers |= measuring()
                except (RuntimeError, StoreError) as error:
                    logger.warning("%s: the %s cannot be measured: %s", own.device, measuring.__name__, error)
                    complete = False
            del bench, measuring
    finally:
        own.close()
    return replace(backend.profile, **numbers), complete


def _known(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"machine": machine.processor(), "device_nbytes": psutil.virtual_memory().total}
    found = cuda.facts(device)
    return {"machine": found.name, "device_nbytes": found.total_nbytes}


@contextmanager
def _left_as_found(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    idle = not cuda.allocated_nbytes(device)  # else a graph may be alive, which uses the workspaces that there are
    with torch.accelerator.device_index(device.index):
        try:
            yield
        finally:
            cuda.give_back(workspaces=idle)


class _Bench:
    """Measures one number after the other on a backend, with weights and activations of its own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._device = backend.device
        self._sizes = _CPU
        if self._device.type == "cuda":
            self._sizes = _GPU if cuda.allocatable_nbytes(self._device) >= _GPU_NBYTES else _SHORT_GPU
        self._random = torch.Generator(self._device).manual_seed(0)  # not the user's
        rows = self._tensor(1024, self._sizes.width)  # of which the others are copies: random numbers take the CPU long
        self._weights = [rows.repeat(self._sizes.out_width // 1024, 1) for _ in range(self._sizes.num_weights)]

    def _tensor(self, *shape: int) -> torch.Tensor:
        """Random bf16, as a product of equal numbers takes less power, and so runs faster, than any in a model."""
        return torch.randn(*shape, generator=self._random, device=self._device, dtype=torch.bfloat16)

    def _sample(self, work: Callable[[], object], repeats: int) -> float:
        self._backend.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self._backend.synchronize()
        return (time.perf_counter() - started) / repeats

    def _seconds(
        self,
        work: Callable[[], object],
        at_least_s: float = _SAMPLE_S,
        choose: Callable[[Sequence[float]], float] = statistics.median,
    ) -> float:
        """Seconds of `work` where it follows itself. `choose=min` where only what else the machine does adds to it."""
        self._sample(work, 1)  # loads kernels
        repeats = max(1, round(at_least_s / _SAMPLES / self._sample(work, 1)))
        samples = [self._sample(work, repeats) for _ in range(_SAMPLES)]
        return choose(samples[_SAMPLES // 2 :])

    def products(self) -> dict[str, float]:
        """Reading weights for one row, then products of many rows in bf16 and float32."""
        sizes, weight = self._sizes, self._weights[0]
        flops = 2 * sizes.rows * sizes.width * sizes.out_width
        found = self._workspace()
        found["device_bytes_per_s"] = sum(w.nbytes for w in self._weights) / self._seconds(self._read)
        rows = self._tensor(sizes.rows, sizes.width)
        found["half_flops_per_s"] = flops / self._seconds(lambda: F.linear(rows, weight), sizes.settle_s)
        rows, weight = rows[: sizes.rows // 4].float(), weight.float()
        found["single_flops_per_s"] = flops / 4 / self._seconds(lambda: F.linear(rows, weight))
        return found

    @property
    def _row(self) -> torch.Tensor:
        return self._weights[0][:1]

    def _read(self) -> None:
        row = self._row
        for weight in self._weights:
            F.linear(row, weight)

    def _workspace(self) -> dict[str, float]:
        """What a library takes at the first product, and keeps; if that was before our time it is not known."""
        if self._device.type == "cpu":
            return {}
        before = cuda.allocated_nbytes(self._device)
        bias = self._weights[0].flatten()[: self._sizes.out_width]  # products with a bias may be of another library
        for addend in (None, bias):
            F.linear(self._row, self._weights[0], addend)
        grown = cuda.allocated_nbytes(self._device) - before
        return {"workspace_nbytes": grown} if grown else {}

    def attention(self) -> dict[str, float]:
        heads, positions, width = self._sizes.attention
        queries, keys, values = (self._tensor(1, heads, positions, width) for _ in range(3))
        flops = 4 * heads * positions**2 * width / 2  # causal: half of all pairs
        work = partial(F.scaled_dot_product_attention, queries, keys, values, is_causal=True)
        return {"attention_flops_per_s": flops / self._seconds(work, self._sizes.settle_s / 4)}

    def kernels(self) -> dict[str, float]:
        """The least time of a kernel: in a graph, where the host is not in the way."""
        small = self._tensor(16)

        def work() -> None:
            for _ in range(_NUM_KERNELS):
                small.mul_(1.0)

        if self._device.type == "cuda":
            work()
            graph = cuda.new_graph()
            with self._backend.capture(graph):
                work()
            return {"op_s": self._seconds(graph.replay, choose=min) / _NUM_KERNELS}
        return {"op_s": self._seconds(work, choose=min) / _NUM_KERNELS}

    def modules(self) -> dict[str, float]:
        """What the host takes to launch a kernel from a model's code.

        From blocks of our own: importing transformers takes longer than all else here (2.5 s).
        """
        blocks = [_Block().to_empty(device=self._device).bfloat16() for _ in range(4)]
        for parameter in (p for block in blocks for p in block.parameters()):
            parameter.fill_(0.01)
        x, turn = self._tensor(1, 1, _Block.width), self._tensor(1, 1, 1, _Block.width // _Block.heads)
        past = self._tensor(1, _Block.heads, 15, turn.shape[-1])

        def work() -> None:
            y = x
            for block in blocks:
                y = block(y, turn, past)

        return {"op_launch_s": _FRAMEWORK * self._seconds(work, choose=min) / (_Block.num_kernels * len(blocks))}

    def link(self) -> dict[str, float]:
        """Bulk copies, the fixed cost of a copy, and what passes from a kernel to a copy that waits for it and back."""
        sizes, backend = self._sizes, self._backend
        with host_memory(self._device, sizes.copy_nbytes) as source:
            bulk = Copy(dst=backend.alloc(sizes.copy_nbytes), src=source, pinned=source.is_pinned())
            bytes_per_s = sizes.copy_nbytes / self._seconds(lambda: backend.copy([bulk]), 4 * _SAMPLE_S)
            pairs = zip(bulk.dst.split(_PIECE_NBYTES), source.split(_PIECE_NBYTES), strict=True)
            pieces = [replace(bulk, dst=dst, src=src) for dst, src in pairs]

            def scatter() -> None:
                for piece in pieces:
                    backend.copy([piece])

            piece_s = self._seconds(scatter) / len(pieces)
            round_s = self._seconds(partial(self._rounds, pieces[:8])) / 8
        reads_s = self._seconds(self._read) if sizes.num_reads else 0.0
        return {
            "link_bytes_per_s": bytes_per_s,
            "copy_latency_s": max(1e-7, piece_s - _PIECE_NBYTES / bytes_per_s),  # no copy is free
            "handover_s": max(0.0, round_s - piece_s - reads_s),
        }

    def _rounds(self, pieces: list[Copy]) -> None:
        """Kernel, copy, kernel, copy, ...: each waits for the one before it."""
        drained, filled = self._backend.event(), self._backend.event()
        for piece in pieces:
            if self._sizes.num_reads:
                self._read()
            self._backend.record(Side.COMPUTE, drained)
            self._backend.wait(Side.COPY, drained)
            self._backend.copy([piece])
            self._backend.record(Side.COPY, filled)
            self._backend.wait(Side.COMPUTE, filled)


@contextmanager
def host_memory(device: torch.device, nbytes: int) -> Iterator[torch.Tensor]:
    """Memory that copies start from: pinned for a GPU, or, where that is refused, not."""
    arena = Arena(partial(cuda.register, device=device), cuda.unregister) if device.type == "cuda" else Arena()
    memory = arena.take(nbytes).fill_(1)
    try:
        arena.pin(memory)
    except StoreError as error:
        logger.warning("%s", error)
    try:
        yield memory
    finally:
        arena.close()


@contextmanager
def busy_link(backend: Backend) -> Iterator[None]:
    """Copies for some 0.2 s, by the backend's profile, are on their way inside: an idle link runs slower."""
    with host_memory(backend.device, _GPU.copy_nbytes) as source:
        bulk = Copy(dst=backend.alloc(source.numel()), src=source, pinned=source.is_pinned())
        backend.copy([bulk] * round(1 + 0.2 * backend.profile.link_bytes_per_s / source.numel()))
        try:
            yield
        finally:
            backend.synchronize()


def disk_bytes_per_s(file: DirectFile, nbytes: int) -> float:
    """What direct reads of the first `nbytes` of a file reach, several at a time."""
    ring = cpu.staging(Arena().take)
    started = time.perf_counter()
    try:
        for piece in ring.start(file, 0, nbytes):
            piece.release()
        return nbytes / (time.perf_counter() - started)
    finally:
        ring.close()


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class _Block(nn.Module):
    """A decoder's block as eager code: norms of single operators, rotary positions, a growing cache, a gated MLP."""

    width, heads = 64, 4
    num_kernels = 40  # in bf16

    def __init__(self) -> None:
        super().__init__()
        w = self.width
        linear = partial(nn.Linear, bias=False, device="meta")  # initialised by nobody: the user's random state stays
        self.norms = nn.ModuleList(_Norm(w) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(w, w) for _ in range(4))
        self.gate, self.up, self.down = linear(w, 2 * w), linear(w, 2 * w), linear(2 * w, w)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor, turn: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (part(y).view(1, 1, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (p * turn + torch.cat((-p.chunk(2, -1)[1], p.chunk(2, -1)[0]), -1) * turn for p in (q, k))
        k, v = (torch.cat((past, p), -2) for p in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).reshape(1, 1, -1))
        y = self.norms[1](x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]
