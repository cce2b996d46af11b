"""The bench: measures in a second or two what this machine can do, and times work that follows itself.

What the machine can do is timed with the host's clock, between two points where the device is idle and with so much
queued between them that these do not count. The median of the later samples is taken, once clocks have settled.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.nn import functional as F

from weightstream.codec import coding
from weightstream.codec.format import BITS
from weightstream.errors import StoreError
from weightstream.measure import machine
from weightstream.plan.manifest import Profile
from weightstream.runtime import cpu, cuda
from weightstream.runtime.backend import Backend, Copy, Side
from weightstream.runtime.streams import staging
from weightstream.store.arena import Arena
from weightstream.store.file import DirectFile
from weightstream.store.mapping import FileMapping

logger = logging.getLogger("weightstream")

_Work = Callable[[], object]
_SAMPLES = 6
_SAMPLE_S = 0.02  # all samples of a number together, where nothing has to settle
_PIECE_NBYTES = 2 << 20  # large enough that the host queues copies faster than the link makes them
_NUM_KERNELS = 200
_MEASURED_NBYTES = 256 << 20  # of a file
_SETTLING = 2  # rounds timed and not counted: the first finds a ring that was filled while nobody looked
_LEAST, _MOST = 5, 400  # rounds
_SOURCE_NBYTES = 256 << 20  # more than a processor caches
_NUM_WEIGHTS, _WIDTH = 4, 4096
# A layer of a transformers model takes the host longer per kernel than the bare blocks below: keyword arguments, cache
# objects, interfaces. Measured (one H200, decode of Llama's 8B and 32B shapes, three machines): 1.16 to 1.39 times.
_FRAMEWORK = 1.25
# What the host takes beside a GPU, in launches: per weight of a block (a decoder layer has 16 kernels to 9 weights),
# and to open and close a unit (H200, where a launch takes 15 us: 30 us where it is decoded, 60 where it streams).
_TENSOR_OPS, _OPENING_OPS = 2, 3


class _Sizes(NamedTuple):
    """How much is measured with: rows of an activation; heads, positions and width of attention."""

    copy_nbytes: int
    out_width: int
    rows: int
    attention: tuple[int, int, int]
    settle_s: float
    decoded_rows: int


_CPU = _Sizes(64 << 20, 4096, 16, (4, 512, 64), _SAMPLE_S, 256)
# 448 MiB of weights: no cache holds what is read again. A GPU at rest raises its clock, then lowers it to what its
# power allows.
_GPU = _Sizes(128 << 20, 14336, 8192, (32, 8192, 128), 0.35, 14336)


def backend_of(device: torch.device) -> Backend:
    """A backend of one's own, which disturbs no other on the device; to be closed."""
    return cpu.CpuBackend() if device.type == "cpu" else cuda.CudaBackend(device)


def measure(backend: Backend) -> tuple[Profile, bool]:
    """What the backend's machine can do, and whether all of it was measured; the rest is the backend's own profile."""
    with closing(backend_of(backend.device)) as own, _left_as_found(own.device), torch.no_grad():
        numbers: dict[str, Any] = {}
        complete, bench = True, _Bench(own)
        for measuring in (bench.products, bench.attention, bench.kernels, bench.modules, bench.link, bench.decoding):
            try:
                numbers |= measuring()
            except (RuntimeError, StoreError) as error:
                logger.warning("%s: the %s cannot be measured: %s", own.device, measuring.__name__, error)
                complete = False
        del bench, measuring
    if own.device.type == "cpu":
        numbers |= {"machine": machine.processor(), "device_nbytes": psutil.virtual_memory().total}
    else:
        found = cuda.facts(own.device)
        numbers |= {"machine": found.name, "device_nbytes": found.total_nbytes}
    return replace(backend.profile, **numbers), complete


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
        self._backend, self._device = backend, backend.device
        self._on_gpu = self._device.type == "cuda"
        self._sizes = _GPU if self._on_gpu else _CPU
        self._random = torch.Generator(self._device).manual_seed(0)  # not the user's
        rows = self._tensor(1024, _WIDTH)  # of which the others are copies: random numbers take the CPU long
        self._weights = [rows.repeat(self._sizes.out_width // 1024, 1) for _ in range(_NUM_WEIGHTS)]

    def _tensor(self, *shape: int) -> torch.Tensor:
        """Random bf16, as a product of equal numbers takes less power, and so runs faster, than any in a model."""
        return torch.randn(*shape, generator=self._random, device=self._device, dtype=torch.bfloat16)

    def _sample(self, work: _Work, repeats: int) -> float:
        self._backend.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self._backend.synchronize()
        return (time.perf_counter() - started) / repeats

    def _seconds(
        self, work: _Work, at_least_s: float = _SAMPLE_S, choose: Callable[[list[float]], float] = statistics.median
    ) -> float:
        """Seconds of `work` where it follows itself. `choose=min` where only what else the machine does adds to it."""
        self._sample(work, 1)  # loads kernels
        repeats = max(1, round(at_least_s / _SAMPLES / self._sample(work, 1)))
        samples = [self._sample(work, repeats) for _ in range(_SAMPLES)]
        return choose(samples[_SAMPLES // 2 :])

    def _workspace(self) -> dict[str, int]:
        """What libraries take at the first product, and keep; not known where that was before us."""
        weight, before = self._weights[0], cuda.allocated_nbytes(self._device) if self._on_gpu else 0
        for bias in (None, weight.flatten()[: len(weight)]):  # products with a bias may be of another library
            F.linear(weight[:1], weight, bias)
        grown = cuda.allocated_nbytes(self._device) - before if self._on_gpu else 0
        return {"workspace_nbytes": grown} if grown else {}

    def products(self) -> dict[str, float]:
        """Reading weights for one row, then products of many rows in bf16 and float32."""
        num_rows, weight, settle_s = self._sizes.rows, self._weights[0], self._sizes.settle_s
        flops = 2 * num_rows * weight.numel()
        workspace = self._workspace()
        read_s = self._seconds(self._read)
        rows = self._tensor(num_rows, _WIDTH)
        half_s = self._seconds(lambda: F.linear(rows, weight), settle_s)
        rows, weight = rows[: num_rows // 4].float(), weight.float()
        single_s = self._seconds(lambda: F.linear(rows, weight))
        return workspace | {
            "device_bytes_per_s": sum(w.nbytes for w in self._weights) / read_s,
            "half_flops_per_s": flops / half_s,
            "single_flops_per_s": flops / 4 / single_s,
        }

    def _read(self) -> None:
        for weight in self._weights:
            F.linear(self._weights[0][:1], weight)

    def attention(self) -> dict[str, float]:
        heads, positions, width = self._sizes.attention
        queries, keys, values = (self._tensor(1, heads, positions, width) for _ in range(3))
        flops = 4 * heads * positions**2 * width / 2  # causal: half of all pairs
        work = partial(F.scaled_dot_product_attention, queries, keys, values, is_causal=True)
        return {"attention_flops_per_s": flops / self._seconds(work, self._sizes.settle_s / 4)}

    def kernels(self) -> dict[str, float]:
        """The least time of a kernel: in a graph, where the host is not in the way."""
        small = self._tensor(16)
        work: _Work = partial(_run_all, [partial(small.mul_, 1.0)] * _NUM_KERNELS)
        if self._on_gpu:
            work()
            graph = cuda.new_graph()
            with self._backend.capture(graph):
                work()
            work = graph.replay
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

        launch_s = _FRAMEWORK * self._seconds(work, choose=min) / (_Block.num_kernels * len(blocks))
        on_gpu = {"launch_s": _TENSOR_OPS * launch_s, "overhead_s": _OPENING_OPS * launch_s} if self._on_gpu else {}
        return {"op_launch_s": launch_s, **on_gpu}

    def link(self) -> dict[str, float]:
        """Bulk copies, the fixed cost of a copy, and what passes from a kernel to a copy that waits for it and back."""
        nbytes, backend = self._sizes.copy_nbytes, self._backend
        with host_memory(self._device, nbytes) as source:
            bulk = Copy(dst=backend.alloc(nbytes), src=source, pinned=source.is_pinned())
            bytes_per_s = nbytes / self._seconds(lambda: backend.copy([bulk]), 4 * _SAMPLE_S)
            pairs = zip(bulk.dst.split(_PIECE_NBYTES), source.split(_PIECE_NBYTES), strict=True)
            pieces = [partial(backend.copy, [replace(bulk, dst=dst, src=src)]) for dst, src in pairs]
            piece_s = self._seconds(partial(_run_all, pieces)) / len(pieces)
            round_s = self._seconds(partial(self._rounds, pieces[:8])) / 8
        reads_s = self._seconds(self._read) if self._on_gpu else 0.0
        return {
            "link_bytes_per_s": bytes_per_s,
            "copy_latency_s": max(1e-7, piece_s - _PIECE_NBYTES / bytes_per_s),  # no copy is free
            "handover_s": max(0.0, round_s - piece_s - reads_s),
        }

    def decoding(self) -> dict[str, float]:
        """Bytes of plain weights that come out of each code, weight by weight into the same memory.

        One a second where nothing decodes them: then no plan is faster with codes.
        """
        decodes = not self._on_gpu or coding.available(self._device)
        return {f"decode{bits}_bytes_per_s": self._decoded_per_s(bits) if decodes else 1.0 for bits in BITS}

    def _decoded_per_s(self, bits: int) -> float:
        weights = self._weights if self._on_gpu else self._weights[:1]
        weights = [weight[: self._sizes.decoded_rows].view(-1).view(torch.uint8) for weight in weights]
        out = self._backend.alloc(weights[0].numel())
        coded = [coding.encode(weight, "bfloat16", bits) for weight in weights]
        runs = [coding.decoding([(data, layout, out)]) for layout, data in coded]
        return sum(weight.nbytes for weight in weights) / self._seconds(partial(_run_all, runs))

    def _rounds(self, copies: Sequence[_Work]) -> None:
        """Kernel, copy, kernel, copy, ...: each waits for the one before it."""
        drained, filled = self._backend.event(), self._backend.event()
        for copy in copies:
            if self._on_gpu:  # hides what the host takes to queue the copies
                self._read()
            self._backend.record(Side.COMPUTE, drained)
            self._backend.wait(Side.COPY, drained)
            copy()
            self._backend.record(Side.COPY, filled)
            self._backend.wait(Side.COMPUTE, filled)


def _run_all(works: Sequence[_Work]) -> None:
    for work in works:
        work()


@contextmanager
def host_memory(device: torch.device, nbytes: int) -> Iterator[torch.Tensor]:
    """Memory that copies start from: pinned for a GPU, or, where that is refused, not."""
    arena = Arena(partial(cuda.register, device=device), cuda.unregister) if device.type == "cuda" else Arena()
    with closing(arena):
        memory = arena.take(nbytes).fill_(1)
        try:
            arena.pin(memory)
        except StoreError as error:
            logger.warning("%s", error)
        yield memory


def rounds_s(backend: Backend, work: _Work, seconds: float, side: Side = Side.COMPUTE) -> list[float]:
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
            copy = Copy(dst=target[:size], src=source[begin : begin + size], pinned=source.is_pinned())
            copies.append(partial(backend.copy, [copy]))
            begin += size
        return rounds_s(backend, partial(_run_all, copies), seconds, Side.COPY)


def disk_bytes_per_s(file: DirectFile, nbytes: int) -> float:
    """What direct reads of the first `nbytes` of a file reach, several at a time."""
    with closing(staging(Arena().take)) as ring:
        started = time.perf_counter()
        for piece in ring.start(file, 0, nbytes):
            piece.release()
        return nbytes / (time.perf_counter() - started)


def rate_of_files(mappings: Sequence[FileMapping]) -> float | None:
    """`disk_bytes_per_s` of the largest file, in a tenth of a second; None where no file is large enough to tell."""
    largest = max(mappings, key=lambda mapping: mapping.nbytes, default=None)
    if largest is None or largest.nbytes < _MEASURED_NBYTES:
        return None
    return disk_bytes_per_s(DirectFile(largest), _MEASURED_NBYTES)


class _Block(nn.Module):
    """A decoder's block as eager code: norms of single operators, rotary positions, a growing cache, a gated MLP."""

    width, heads = 64, 4
    num_kernels = 40  # in bf16

    def __init__(self) -> None:
        super().__init__()
        w, linear = self.width, partial(nn.Linear, bias=False, device="meta")  # not random: the user's state stays
        self.scale = nn.Parameter(torch.empty(w, device="meta"))
        self.q, self.k, self.v, self.o = (linear(w, w) for _ in range(4))
        self.gate, self.up, self.down = linear(w, 2 * w), linear(w, 2 * w), linear(2 * w, w)
        self.act = nn.SiLU()

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.scale * y.to(x.dtype)

    def forward(self, x: torch.Tensor, turn: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        y = self._norm(x)
        q, k, v = (part(y).view(1, 1, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (p * turn + torch.cat((-p.chunk(2, -1)[1], p.chunk(2, -1)[0]), -1) * turn for p in (q, k))
        k, v = (torch.cat((past, p), -2) for p in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).reshape(1, 1, -1))
        y = self._norm(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]
