"""The bench: measures in about a second what this machine can do, and times work that follows itself.

What the machine can do is timed with the host's clock, between two points where the device is idle and with so much
queued between them that these do not count. Rounds go over all numbers, and each is the best of its samples: so what
disturbs a round spoils none. Products of many rows come first, in rounds of their own, before which a GPU's clocks
settle at what its power allows. They need no kernel of ours, and the device's own clock times them, so threads that
compile meanwhile do not disturb them.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import psutil
import torch
from torch.nn import functional as F

from weightstream.codec import coding
from weightstream.codec.format import ELEMENTS
from weightstream.errors import StoreError
from weightstream.measure import kernels, machine, unit_overhead
from weightstream.measure.sample_block import SampleBlock
from weightstream.plan.manifest import Profile, decode_rate
from weightstream.runtime.devices import cpu, cuda
from weightstream.runtime.devices.backend import Backend, Copy, Side
from weightstream.runtime.devices.host_stream import staging
from weightstream.store.arena import Arena
from weightstream.store.mapping import FileMapping
from weightstream.store.readers import DirectFile

logger = logging.getLogger("weightstream")

_Work = Callable[[], object]
_Seconds = Callable[[_Work, int], float]  # of a work that is done so often
HostMemory = Callable[[torch.device, int], AbstractContextManager[torch.Tensor]]  # so many bytes for a device
# Yields works, each with how long a sample of it takes, is sent their best seconds, and yields what these tell.
_Measuring = Generator[dict[str, Any], dict[str, float], None]
NUM_ROUNDS = 5
NUM_STEPS = 2 * NUM_ROUNDS  # rounds of products, and of all else
_SAMPLE_S = 0.003
_SETTLE_S = 0.3  # until a GPU's clocks are at what its power allows
_AHEAD_S = 0.02  # of work that is queued ahead of what is timed: longer than a host is late that compiles
_COPY_NBYTES = 64 << 20
_PIECE_NBYTES = 2 << 20  # large enough that the host queues copies faster than the link makes them
_MEASURED_NBYTES = 256 << 20  # of a file
_SETTLING = 2  # rounds timed and not counted: the first finds a ring that was filled while nobody looked
_LEAST, _MOST = 5, 400  # rounds
_SOURCE_NBYTES = 256 << 20  # more than a processor caches
_NUM_WEIGHTS, _WIDTH = 3, 4096
_HOST_SAMPLE_S = 0.015  # of Python code: in shorter ones what it had to load anew varies, by 10 % and more
# A layer of a transformers model takes the host longer per kernel than the bare blocks: keyword arguments, cache
# objects, interfaces. Measured (H200, three processes): 1.18 to 1.27 times in decoding of a Llama, 1.41 to 1.53 in the
# encoder of Whisper.
_FRAMEWORK = 1.25
_TENSOR_OPS = 2  # launches of the host per weight of a block: a decoder layer has 16 kernels to 9 weights


NOT_MEASURED = 1.0  # bytes of plain weights a second, where nothing decodes: no plan is faster with compression then


class _Sizes(NamedTuple):
    """How much is measured with: rows of an activation; heads, positions and width of attention; rows of weights that
    are decoded."""

    out_width: int
    rows: int
    attention: tuple[int, int, int]
    decoded_rows: tuple[int, ...]


_CPU = _Sizes(4096, 16, (4, 512, 64), (256,))
# 336 MiB of weights: no cache holds what is read again. A GPU at rest raises its clock, then lowers it to what its
# power allows. The smaller of what is decoded takes longer than the host takes to launch it.
_GPU = _Sizes(14336, 8192, (32, 8192, 128), (14336, 4096))


def private_backend(device: torch.device) -> Backend:
    """A backend of one's own, which disturbs no other on the device; to be closed."""
    return cpu.CpuBackend() if device.type == "cpu" else cuda.CudaBackend(device)


def measure(
    backend: Backend, advance: Callable[[], object] = lambda: None, dtypes: Collection[str] = ()
) -> tuple[Profile, bool]:
    """What the backend's machine can do, and whether all of it was measured; the rest is the backend's own profile.

    Calls `advance` once a round. The rates of decoding all but these `dtypes` are `NOT_MEASURED`.
    """
    with closing(private_backend(backend.device)) as own, left_as_found(own.device), torch.no_grad():
        numbers, complete = _Bench(own, dtypes).measure(advance)
    if own.device.type == "cpu":
        numbers |= {"machine": machine.cpu_name(), "device_nbytes": psutil.virtual_memory().total}
    else:
        found = cuda.facts(own.device)
        numbers |= {"machine": found.name, "device_nbytes": found.total_nbytes}
    return replace(backend.profile, **numbers), complete


def measure_decoding(backend: Backend, advance: Callable[[], object], dtypes: Collection[str]) -> dict[str, Any]:
    """What a profile says of decoding these dtypes, where it can be measured."""
    with closing(private_backend(backend.device)) as own, left_as_found(own.device), torch.no_grad():
        bench = _Bench(own, dtypes)
        return bench.measure_parts((bench.decoding, *bench.on_gpu), advance)[0]


@contextmanager
def left_as_found(device: torch.device) -> Iterator[None]:
    """What the allocator keeps of what runs inside goes back to the driver."""
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
    """Measures on a backend, with weights and activations of its own; and how fast weights of these dtypes decode."""

    def __init__(self, backend: Backend, dtypes: Collection[str] = ()) -> None:
        self._backend, self._device, self._dtypes = backend, backend.device, sorted(dtypes)
        self._on_gpu = self._device.type == "cuda"
        self._sizes = _GPU if self._on_gpu else _CPU
        self._random = torch.Generator(self._device).manual_seed(0)  # not the user's
        rows = self._tensor(1024, _WIDTH)  # of which the others are copies: random numbers take the CPU long
        self._weights = [rows.repeat(self._sizes.out_width // 1024, 1) for _ in range(_NUM_WEIGHTS)]

    @property
    def on_gpu(self) -> tuple[Callable[[], _Measuring], ...]:
        """What is measured on a GPU alone: a CPU computes as it opens."""
        return (self.opening,) if self._on_gpu else ()

    @cached_property
    def _decoded(self) -> list[str]:
        """The dtypes that can be decoded; waits for their kernels."""
        return [dtype for dtype in self._dtypes if not self._on_gpu or coding.available(self._device, dtype)]

    def measure(self, advance: Callable[[], object]) -> tuple[dict[str, Any], bool]:
        """All numbers that can be measured, and whether these are all."""
        numbers: dict[str, Any] = self._workspace()
        # Products of many rows take so much power that for a while all is slower behind them, decoding by a fifth. So
        # what follows them in the first round hardly uses the device. Decoding waits until its kernels are there, which
        # threads compile that use the device and the host: only then a graph may be captured, for the kernels, and
        # what the host takes is timed.
        decoding = (self.decoding,) if self._dtypes else ()
        numbers |= dict.fromkeys(map(decode_rate, ELEMENTS), NOT_MEASURED)
        is_complete = True
        rest = (self.link, self.modules, *decoding, *self.on_gpu, self.kernels)
        for measurings, seconds in (((self.products, self.attention), self.queued_s), (rest, self.seconds)):
            found, is_all = self.measure_parts(measurings, advance, seconds)
            numbers |= found
            is_complete &= is_all
        return numbers, is_complete

    def measure_parts(
        self,
        measurings: Sequence[Callable[[], _Measuring]],
        advance: Callable[[], object],
        seconds: _Seconds | None = None,
    ) -> tuple[dict[str, Any], bool]:
        """The numbers of those that can be measured, in rounds over all of them, and whether these are all."""
        numbers: dict[str, Any] = {}
        about = self, seconds or self.seconds
        parts = self._tried({measuring.__name__: partial(_Part, measuring, *about) for measuring in measurings})
        for _ in range(NUM_ROUNDS):
            parts = self._tried({part.name: part.sample for part in parts})
            advance()
        for part in parts:
            numbers |= part.numbers()
        return numbers, len(parts) == len(measurings)

    def _tried(self, works: dict[str, Callable[[], _Part]]) -> list[_Part]:
        """The parts that did not fail."""
        parts = []
        for name, work in works.items():
            try:
                parts.append(work())
            except (RuntimeError, StoreError) as error:
                logger.warning("%s: the %s cannot be measured: %s", self._device, name, error)
        return parts

    def _tensor(self, *shape: int) -> torch.Tensor:
        """Random bf16, as a product of equal numbers takes less power, and so runs faster, than any in a model."""
        return torch.randn(*shape, generator=self._random, device=self._device, dtype=torch.bfloat16)

    def seconds(self, work: _Work, repeats: int) -> float:
        """Seconds of `work` where it follows itself."""
        self._backend.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self._backend.synchronize()
        return (time.perf_counter() - started) / repeats

    def queued_s(self, work: _Work, repeats: int) -> float:
        """The same by the clock of a GPU, which has so much to do first that the host may be late."""
        if not self._on_gpu:
            return self.seconds(work, repeats)
        for _ in range(self._num_ahead):
            self._half()
        begin = self._backend.stamp(Side.COMPUTE)
        for _ in range(repeats):
            work()
        end = self._backend.stamp(Side.COMPUTE)
        self._backend.synchronize()
        return (self._backend.seconds(begin, end) or math.inf) / repeats

    @cached_property
    def _rows(self) -> torch.Tensor:
        return self._tensor(self._sizes.rows, _WIDTH)

    def _half(self) -> object:
        """The product of many rows."""
        return F.linear(self._rows, self._weights[0])

    @cached_property
    def _num_ahead(self) -> int:
        """Products that take the GPU `_AHEAD_S`, once its clocks have settled."""
        self.seconds(self._half, self.repeats(self._half, _SETTLE_S))
        return self.repeats(self._half, _AHEAD_S)

    def repeats(self, work: _Work, sample_s: float) -> int:
        """How often `work` fits into a sample."""
        self.seconds(work, 1)  # loads kernels
        return max(1, round(sample_s / self.seconds(work, 1)))

    def _workspace(self) -> dict[str, int]:
        """What libraries take at the first product, and keep; not known where that was before us."""
        weight, before = self._weights[0], cuda.allocated_nbytes(self._device) if self._on_gpu else 0
        for bias in (None, weight.flatten()[: len(weight)]):  # products with a bias may be of another library
            F.linear(weight[:1], weight, bias)
        grown = cuda.allocated_nbytes(self._device) - before if self._on_gpu else 0
        return {"workspace_nbytes": grown} if grown else {}

    def products(self) -> _Measuring:
        """Products of many rows in bf16 and float32."""
        rows, weight = self._rows, self._weights[0]
        few, part = rows[: len(rows) // 4].float(), weight[: len(weight) // 4].float()
        single = partial(F.linear, few, part)
        best = yield {"half": (self._half, 3 * _SAMPLE_S), "single": (single, _SAMPLE_S)}
        yield {
            "half_flops_per_s": 2 * len(rows) * weight.numel() / best["half"],
            "single_flops_per_s": 2 * len(few) * part.numel() / best["single"],
        }

    def attention(self) -> _Measuring:
        heads, positions, width = self._sizes.attention
        queries, keys, values = (self._tensor(1, heads, positions, width) for _ in range(3))
        flops = 4 * heads * positions**2 * width / 2  # causal: half of all pairs
        work = partial(F.scaled_dot_product_attention, queries, keys, values, is_causal=True)
        best = yield {"attention": (work, 2 * _SAMPLE_S)}
        yield {"attention_flops_per_s": flops / best["attention"]}

    def kernels(self) -> _Measuring:
        """Reading weights for one row, and what kernels take at least."""
        works = kernels.kernel_works(self._backend, self._weights)
        best = yield {name: (work, _SAMPLE_S) for name, work in works.items()}
        yield kernels.kernel_fields(best, sum(weight.nbytes for weight in self._weights), len(self._weights))

    def modules(self) -> _Measuring:
        """What the host takes to launch a kernel from a model's code."""
        blocks = [SampleBlock(self._device) for _ in range(4)]
        for parameter in (p for block in blocks for p in block.parameters()):
            parameter.fill_(0.01)
        x, turn = self._tensor(1, 1, SampleBlock.width), self._tensor(1, 1, 1, SampleBlock.width // SampleBlock.heads)
        past = self._tensor(1, SampleBlock.heads, 15, turn.shape[-1])

        def work() -> None:
            y = x
            for block in blocks:
                y = block(y, turn, past)

        best = yield {"blocks": (work, _HOST_SAMPLE_S)}
        launch_s = _FRAMEWORK * best["blocks"] / (SampleBlock.num_kernels * len(blocks))
        on_gpu = {"launch_s": _TENSOR_OPS * launch_s} if self._on_gpu else {}
        yield {"op_launch_s": launch_s, **on_gpu}

    def opening(self) -> _Measuring:
        """What the host takes to open and close units; the device waits for it."""
        with unit_overhead.overhead_works(self._backend, next(iter(self._decoded), None)) as works:
            best = yield {name: (work, _SAMPLE_S) for name, work in works.items()}
        yield unit_overhead.overhead_fields(best)

    def link(self) -> _Measuring:
        """Bulk copies, the fixed cost of a copy, and what passes from a kernel to a copy that waits for it and back."""
        nbytes, backend = _COPY_NBYTES, self._backend
        with host_memory(self._device, nbytes) as source:
            bulk = Copy(dst=backend.alloc(nbytes), src=source, pinned=source.is_pinned())
            pairs = zip(bulk.dst.split(_PIECE_NBYTES), source.split(_PIECE_NBYTES), strict=True)
            pieces = [partial(backend.copy, [replace(bulk, dst=dst, src=src)]) for dst, src in pairs]
            works: dict[str, _Work] = {"pieces": partial(_run_all, pieces), "rounds": partial(self._rounds, pieces[:8])}
            works |= {"reads": partial(kernels.read_products, self._weights)} if self._on_gpu else {}
            best = yield {"bulk": (partial(backend.copy, [bulk]), 4 * _SAMPLE_S)} | {
                name: (work, _SAMPLE_S) for name, work in works.items()
            }
        piece_s, bytes_per_s = best["pieces"] / len(pieces), nbytes / best["bulk"]
        yield {
            "link_bytes_per_s": bytes_per_s,
            "copy_latency_s": max(1e-7, piece_s - _PIECE_NBYTES / bytes_per_s),  # no copy is free
            "handover_s": max(0.0, best["rounds"] / 8 - piece_s - best.get("reads", 0.0)),
        }

    def decoding(self) -> _Measuring:
        """Bytes of plain weights that come out of the code of each dtype."""
        works: dict[str, tuple[_Work, float]] = {}
        sizes: dict[str, list[int]] = {}
        for dtype in self._decoded:
            weights = [self._weights[0][:rows].to(getattr(torch, dtype)) for rows in self._sizes.decoded_rows]
            plain = [weight.view(-1).view(torch.uint8) for weight in weights]
            sizes[dtype], out = [data.nbytes for data in plain], torch.empty_like(plain[0])
            for data in plain:
                layout, coded = coding.encode(data, dtype)
                decode = coding.decoding([(coded, layout, out[: data.nbytes])])
                works[f"{dtype}, {data.nbytes}"] = decode, _SAMPLE_S
        best = yield works
        seconds = {dtype: [best[f"{dtype}, {n}"] for n in nbytes] for dtype, nbytes in sizes.items()}
        yield decoding_parts(seconds, sizes) if sizes else {}

    def _rounds(self, copies: Sequence[_Work]) -> None:
        """Kernel, copy, kernel, copy, ...: each waits for the one before it."""
        drained, filled = self._backend.event(), self._backend.event()
        for copy in copies:
            if self._on_gpu:  # hides what the host takes to queue the copies
                kernels.read_products(self._weights)
            self._backend.record(Side.COMPUTE, drained)
            self._backend.wait(Side.COPY, drained)
            copy()
            self._backend.record(Side.COPY, filled)
            self._backend.wait(Side.COMPUTE, filled)


def decoding_parts(seconds: Mapping[str, Sequence[float]], sizes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Fields of a profile, from the seconds that each dtype takes for so many bytes, the most first. With a second size
    they are on a straight line, which begins above zero, though not far above where the host was in the way."""
    beside_s = 0.0
    if all(len(nbytes) > 1 for nbytes in sizes.values()):
        shares = {dtype: part / most for dtype, (most, part) in sizes.items()}
        begins = ((s[1] - shares[dtype] * s[0]) / (1 - shares[dtype]) for dtype, s in seconds.items())
        beside_s = min(max(0.0, statistics.median(begins)), min(s[0] for s in seconds.values()) / 4)
    rates = {decode_rate(dtype): sizes[dtype][0] / (found[0] - beside_s) for dtype, found in seconds.items()}
    return {"decoding_s": beside_s} | rates


class _Part:
    """What is measured together: its works, and the best seconds of each so far."""

    def __init__(self, measuring: Callable[[], _Measuring], bench: _Bench, seconds: _Seconds) -> None:
        self.name = measuring.__name__
        self._measuring, self._seconds = measuring(), seconds
        works = next(self._measuring)
        self._works = {name: (work, bench.repeats(work, sample_s)) for name, (work, sample_s) in works.items()}
        self._best = dict.fromkeys(works, float("inf"))

    def sample(self) -> _Part:
        for name, (work, repeats) in self._works.items():
            self._best[name] = min(self._best[name], self._seconds(work, repeats))
        return self

    def numbers(self) -> dict[str, Any]:
        return self._measuring.send(self._best)


def _run_all(works: Sequence[_Work]) -> None:
    for work in works:
        work()


@contextmanager
def host_memory(device: torch.device, nbytes: int) -> Iterator[torch.Tensor]:
    """Memory that copies start from: pinned for a GPU, at its node, or, where that is refused, not."""
    pin = partial(cuda.pin_in_place, device=device)
    arena = Arena(pin, cuda.unregister, cuda.node(device)) if device.type == "cuda" else Arena()
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


def copies_s(
    backend: Backend,
    sizes: Sequence[int],
    seconds: float,
    ready: Callable[[], object] = lambda: None,
    memory: HostMemory = host_memory,
) -> list[float]:
    """Seconds of each round of copies of these sizes, back to back, from `memory`.

    Calls `ready` once all memory is there.
    """
    largest = max(sizes)
    with memory(backend.device, max(largest, min(sum(sizes), _SOURCE_NBYTES))) as source:
        target, copies, begin = backend.alloc(largest), [], 0
        for size in sizes:
            begin = begin if begin + size <= source.numel() else 0
            copy = Copy(dst=target[:size], src=source[begin : begin + size], pinned=source.is_pinned())
            copies.append(partial(backend.copy, [copy]))
            begin += size
        ready()
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
