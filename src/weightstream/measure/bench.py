"""The bench: measures the speeds of a machine in about a second, and times work repeated back to back.

Speeds are timed with the host's clock between two points where the device is idle, with so much work queued between
them that the idle ends do not count. Each round samples all numbers, and each number is the best of its samples, so a
disturbance of one round spoils no number. Matrix products of many rows come first, in rounds of their own, once a GPU's
clocks have settled at its power limit. They need no kernel of ours and are timed with the device's clock, so threads
that compile kernels meanwhile do not disturb them.
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
from weightstream.codec.reference import CodedPart
from weightstream.errors import StoreError
from weightstream.measure import kernels, machine, unit_overhead, unpack_rates
from weightstream.measure.sample_block import SampleBlock
from weightstream.plan.manifest import NOT_MEASURED, Profile, decode_rate
from weightstream.runtime.devices import cpu, cuda
from weightstream.runtime.devices.backend import Backend, Copy, Side
from weightstream.runtime.devices.host_stream import staging
from weightstream.store.arena import Arena
from weightstream.store.mapping import FileMapping
from weightstream.store.readers import DirectFile

logger = logging.getLogger("weightstream")

_Work = Callable[[], object]
_Seconds = Callable[[_Work, int], float]  # seconds of one run, from a work and its number of repeats
HostMemory = Callable[[torch.device, int], AbstractContextManager[torch.Tensor]]  # for a device, of so many bytes


class _TimedWork(NamedTuple):
    """Work to be timed, and the seconds of a sample, in which it is repeated."""

    run: _Work
    sample_s: float


# A measurement is a generator. It yields its works by name, is sent the best seconds of each work, and then yields the
# fields of a profile that follow from them.
_Measuring = Generator[dict[str, Any], dict[str, float], None]
NUM_ROUNDS = 5  # samples of each number
NUM_STEPS = 2 * NUM_ROUNDS  # rounds of products, then rounds of everything else
_SAMPLE_S = 0.003
_SETTLE_S = 0.3  # until a GPU's clocks have settled at its power limit
_AHEAD_S = 0.02  # of work queued ahead of what is timed: longer than compiler threads delay the host
_COPY_NBYTES = 64 << 20
_SHARED_NBYTES = 16 << 20  # of a copy beside products
_OUTLASTS = 2.5  # products run for this many times the seconds of that copy
_PIECE_NBYTES = 2 << 20  # large enough that the host queues copies faster than the link makes them
_MEASURED_NBYTES = 256 << 20  # of a file
# Of `rounds_s`: the first rounds do not count, as the ring was filled before the clock started.
_NUM_UNCOUNTED = 2
_LEAST_COUNTED, _MOST_COUNTED = 5, 400
_SOURCE_NBYTES = 256 << 20  # more than a processor caches
_NUM_WEIGHTS, _WIDTH = 3, 4096
_HOST_SAMPLE_S = 0.015  # of Python code: shorter samples vary by 10 % and more with the code that is not cached
# A layer of a transformers model takes the host longer per kernel than the bare blocks: keyword arguments, cache
# objects, interfaces. Measured (H200, three processes): 1.18 to 1.27 times in decoding of a Llama, 1.41 to 1.53 in the
# encoder of Whisper.
_FRAMEWORK = 1.25
_TENSOR_OPS = 2  # kernels that the host launches per weight: a decoder layer has 16 kernels and 9 weights, rounded up


class Measurement(NamedTuple):
    """A measured profile; it `is_complete` unless some of its numbers could not be measured and are assumed."""

    profile: Profile
    is_complete: bool


class _Numbers(NamedTuple):
    """Measured fields of a profile; `is_complete` unless some could not be measured."""

    fields: dict[str, Any]
    is_complete: bool


class _AttentionShape(NamedTuple):
    heads: int
    positions: int
    width: int


class _Sizes(NamedTuple):
    """The sizes of the weights and activations of the measurements."""

    out_width: int  # rows of a weight
    rows: int  # of an activation
    attention: _AttentionShape
    decoded_rows: tuple[int, ...]  # rows of each weight that is decoded


_CPU = _Sizes(4096, 16, _AttentionShape(4, 512, 64), (256,))
# 336 MiB of weights: no cache holds them until they are read again. An idle GPU raises its clock, then lowers it to its
# power limit. The smaller weight that is decoded takes the device longer than the host takes to launch the kernel.
_GPU = _Sizes(14336, 8192, _AttentionShape(32, 8192, 128), (14336, 4096))


def private_backend(device: torch.device) -> Backend:
    """A new backend, which disturbs no other on the device; the caller closes it."""
    return cpu.CpuBackend() if device.type == "cpu" else cuda.CudaBackend(device)


def measure(
    backend: Backend, advance: Callable[[], object] = lambda: None, dtypes: Collection[str] = ()
) -> Measurement:
    """Measure the machine of a backend. Numbers that cannot be measured are those of the backend's own profile.

    Calls `advance` once a round. Decode rates are measured for `dtypes`; those of others are `NOT_MEASURED`.
    """
    with closing(private_backend(backend.device)) as private, left_as_found(private.device), torch.no_grad():
        fields, is_complete = _Bench(private, dtypes).measure(advance)
    if backend.device.type == "cpu":
        fields |= {"machine": machine.cpu_name(), "device_nbytes": psutil.virtual_memory().total}
    else:
        facts = cuda.facts(private.device)
        fields |= {"machine": facts.name, "device_nbytes": facts.total_nbytes}
    return Measurement(replace(backend.profile, **fields), is_complete)


def measure_decoding(backend: Backend, advance: Callable[[], object], dtypes: Collection[str]) -> dict[str, Any]:
    """The fields of a profile about decoding these dtypes, as far as they can be measured."""
    with closing(private_backend(backend.device)) as private, left_as_found(private.device), torch.no_grad():
        bench = _Bench(private, dtypes)
        return bench.measure_parts((bench.decoding, *bench.on_gpu), advance, bench.seconds).fields


def measure_unpacking(backend: Backend, advance: Callable[[], object], kernels: Collection[str]) -> dict[str, Any]:
    """The fields of a profile about these kernels, which unpack matrices, as far as they can be measured."""
    with closing(private_backend(backend.device)) as private, left_as_found(private.device), torch.no_grad():
        bench = _Bench(private, unpacked=kernels)
        return bench.measure_parts((bench.unpacking,), advance, bench.seconds).fields


@contextmanager
def left_as_found(device: torch.device) -> Iterator[None]:
    """On exit, return to the driver the memory that PyTorch's allocator caches because of the measurements inside."""
    if device.type == "cpu":
        yield
        return
    idle = not cuda.allocated_nbytes(device)  # else a live graph may use the present workspaces
    with torch.accelerator.device_index(device.index):
        try:
            yield
        finally:
            cuda.give_back(workspaces=idle)


class _Bench:
    """Measurements on a backend, with weights and activations of their own; decoding is measured for `dtypes`, and the
    kernels in `unpacked` unpack."""

    def __init__(self, backend: Backend, dtypes: Collection[str] = (), unpacked: Collection[str] = ()) -> None:
        self._backend = backend
        self._device = backend.device
        self._dtypes = sorted(dtypes)
        self._unpacked = sorted(unpacked)
        self._on_gpu = self._device.type == "cuda"
        self._sizes = _GPU if self._on_gpu else _CPU
        self._random = torch.Generator(self._device).manual_seed(0)  # not the user's
        rows = self._tensor(1024, _WIDTH)  # repeated: random numbers are slow on a CPU
        self._weights = [rows.repeat(self._sizes.out_width // 1024, 1) for _ in range(_NUM_WEIGHTS)]

    @property
    def on_gpu(self) -> tuple[Callable[[], _Measuring], ...]:
        """Measurements for a GPU only: a CPU backend computes while units are opened."""
        return (self.opening,) if self._on_gpu else ()

    @cached_property
    def _decoded(self) -> list[str]:
        """The dtypes whose decode kernels run; waits until they are compiled."""
        return [dtype for dtype in self._dtypes if not self._on_gpu or coding.available(self._device, dtype)]

    def measure(self, advance: Callable[[], object]) -> _Numbers:
        """Measure everything that can be measured."""
        # Products of many rows draw so much power that everything right after them is slower, decoding by a fifth. So
        # they are followed by `link` and `modules`, which hardly use the device. `decoding` waits until its kernels are
        # compiled, as compiler threads use the device and the host. Only after that the host's time to open units is
        # measured, and graphs are captured, for `kernels`.
        workspace = self._workspace()
        decoding = (self.decoding,) if self._dtypes else ()
        sharing = () if self._on_gpu else (self.sharing,)  # with a GPU, copies take no core from compute
        products = self.measure_parts((self.products, self.attention), advance, self.queued_s)
        rest = self.measure_parts(
            (self.link, self.modules, *decoding, *self.on_gpu, self.kernels, *sharing), advance, self.seconds
        )
        fields: dict[str, Any] = dict.fromkeys(map(decode_rate, ELEMENTS), NOT_MEASURED)
        fields |= workspace | products.fields | rest.fields
        return _Numbers(fields, products.is_complete and rest.is_complete)

    def measure_parts(
        self,
        measurings: Sequence[Callable[[], _Measuring]],
        advance: Callable[[], object],
        seconds: _Seconds,
    ) -> _Numbers:
        """Measure in rounds over all of `measurings`, timed by `seconds`."""
        fields: dict[str, Any] = {}
        parts = self._tried({measuring.__name__: partial(_Part, measuring, self, seconds) for measuring in measurings})
        for _ in range(NUM_ROUNDS):
            parts = self._tried({part.name: part.sample for part in parts})
            advance()
        for part in parts:
            fields |= part.numbers()
        return _Numbers(fields, is_complete=len(parts) == len(measurings))

    def _tried(self, works: dict[str, Callable[[], _Part]]) -> list[_Part]:
        """The parts that did not fail; each failure is logged."""
        parts = []
        for name, work in works.items():
            try:
                parts.append(work())
            except (RuntimeError, StoreError) as error:
                logger.warning("%s: the %s cannot be measured: %s", self._device, name, error)
        return parts

    def _tensor(self, *shape: int) -> torch.Tensor:
        """Random bf16: products of equal numbers draw less power, and so run faster, than those of a model."""
        return torch.randn(*shape, generator=self._random, device=self._device, dtype=torch.bfloat16)

    def seconds(self, work: _Work, repeats: int) -> float:
        """Seconds of one run of `work`, repeated back to back, by the host's clock."""
        self._backend.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self._backend.synchronize()
        return (time.perf_counter() - started) / repeats

    def queued_s(self, work: _Work, repeats: int) -> float:
        """As `seconds`, by the GPU's clock, with so much work queued ahead that a delay of the host does not count."""
        if not self._on_gpu:
            return self.seconds(work, repeats)
        for _ in range(self._num_ahead):
            self._bf16_product()
        begin = self._backend.stamp(Side.COMPUTE)
        for _ in range(repeats):
            work()
        end = self._backend.stamp(Side.COMPUTE)
        self._backend.synchronize()
        return (self._backend.seconds(begin, end) or math.inf) / repeats

    @cached_property
    def _rows(self) -> torch.Tensor:
        return self._tensor(self._sizes.rows, _WIDTH)

    def _bf16_product(self) -> object:
        """A product of many rows."""
        return F.linear(self._rows, self._weights[0])

    @cached_property
    def _num_ahead(self) -> int:
        """The number of products that take the GPU `_AHEAD_S`, once its clocks have settled."""
        self.seconds(self._bf16_product, self.repeats(self._bf16_product, _SETTLE_S))
        return self.repeats(self._bf16_product, _AHEAD_S)

    def repeats(self, work: _Work, sample_s: float) -> int:
        """The number of runs of `work` that fit into a sample."""
        self.seconds(work, 1)  # loads kernels
        return max(1, round(sample_s / self.seconds(work, 1)))

    def _workspace(self) -> dict[str, int]:
        """The workspace that libraries allocate at a first product and keep; unknown if the process has it already."""
        weight, before = self._weights[0], cuda.allocated_nbytes(self._device) if self._on_gpu else 0
        for bias in (None, weight.flatten()[: len(weight)]):  # products with a bias may use another library
            F.linear(weight[:1], weight, bias)
        grown = cuda.allocated_nbytes(self._device) - before if self._on_gpu else 0
        return {"workspace_nbytes": grown} if grown else {}

    def products(self) -> _Measuring:
        """Products of many rows in bf16 and float32."""
        rows, weight = self._rows, self._weights[0]
        single_rows, single_weight = rows[: len(rows) // 4].float(), weight[: len(weight) // 4].float()
        single = partial(F.linear, single_rows, single_weight)
        best = yield {"half": _TimedWork(self._bf16_product, 3 * _SAMPLE_S), "single": _TimedWork(single, _SAMPLE_S)}
        yield {
            "half_flops_per_s": 2 * len(rows) * weight.numel() / best["half"],
            "single_flops_per_s": 2 * len(single_rows) * single_weight.numel() / best["single"],
        }

    def attention(self) -> _Measuring:
        heads, positions, width = self._sizes.attention
        queries, keys, values = (self._tensor(1, heads, positions, width) for _ in range(3))
        flops = 4 * heads * positions**2 * width / 2  # causal: half of all pairs
        work = partial(F.scaled_dot_product_attention, queries, keys, values, is_causal=True)
        best = yield {"attention": _TimedWork(work, 2 * _SAMPLE_S)}
        yield {"attention_flops_per_s": flops / best["attention"]}

    def kernels(self) -> _Measuring:
        """The rate of reading weights for one row, and the least times of kernels."""
        works = kernels.kernel_works(self._backend, self._weights)
        best = yield {name: _TimedWork(work, _SAMPLE_S) for name, work in works.items()}
        yield kernels.kernel_fields(best, sum(weight.nbytes for weight in self._weights), len(self._weights))

    def modules(self) -> _Measuring:
        """Host time to launch a kernel from a model's code."""
        blocks = [SampleBlock(self._device) for _ in range(4)]
        for parameter in (p for block in blocks for p in block.parameters()):
            parameter.fill_(0.01)
        x, turn = self._tensor(1, 1, SampleBlock.width), self._tensor(1, 1, 1, SampleBlock.width // SampleBlock.heads)
        past = self._tensor(1, SampleBlock.heads, 15, turn.shape[-1])

        def work() -> None:
            y = x
            for block in blocks:
                y = block(y, turn, past)

        best = yield {"blocks": _TimedWork(work, _HOST_SAMPLE_S)}
        launch_s = _FRAMEWORK * best["blocks"] / (SampleBlock.num_kernels * len(blocks))
        on_gpu = {"launch_s": _TENSOR_OPS * launch_s} if self._on_gpu else {}
        yield {"op_launch_s": launch_s, **on_gpu}

    def opening(self) -> _Measuring:
        """Host time to open and close units, for which the device waits."""
        with unit_overhead.overhead_works(self._backend, next(iter(self._decoded), None)) as works:
            best = yield {name: _TimedWork(work, _SAMPLE_S) for name, work in works.items()}
        yield unit_overhead.overhead_fields(best)

    def link(self) -> _Measuring:
        """Bulk copies, the fixed cost of a copy, and the handover from a kernel to a copy after it and back."""
        nbytes, backend = _COPY_NBYTES, self._backend
        with host_memory(self._device, nbytes) as source:
            bulk = Copy(dst=backend.alloc(nbytes), src=source, pinned=source.is_pinned())
            pairs = zip(bulk.dst.split(_PIECE_NBYTES), source.split(_PIECE_NBYTES), strict=True)
            pieces = [partial(backend.copy, [replace(bulk, dst=dst, src=src)]) for dst, src in pairs]
            works: dict[str, _Work] = {"pieces": partial(_run_all, pieces), "rounds": partial(self._rounds, pieces[:8])}
            works |= {"reads": partial(kernels.read_products, self._weights)} if self._on_gpu else {}
            best = yield {"bulk": _TimedWork(partial(backend.copy, [bulk]), 4 * _SAMPLE_S)} | {
                name: _TimedWork(work, _SAMPLE_S) for name, work in works.items()
            }
        piece_s, bytes_per_s = best["pieces"] / len(pieces), nbytes / best["bulk"]
        yield {
            "link_bytes_per_s": bytes_per_s,
            "copy_latency_s": max(1e-7, piece_s - _PIECE_NBYTES / bytes_per_s),  # no copy is free
            "handover_s": max(0.0, best["rounds"] / 8 - piece_s - best.get("reads", 0.0)),
        }

    def sharing(self) -> _Measuring:
        """What compute loses to a concurrent copy. The products outlast the copy."""
        read, backend = partial(kernels.read_products, self._weights), self._backend
        with host_memory(self._device, _SHARED_NBYTES) as source:
            bulk = Copy(dst=backend.alloc(_SHARED_NBYTES), src=source)
            copy = partial(backend.copy, [bulk])
            reads = [read] * math.ceil(_OUTLASTS * self.seconds(copy, 3) / self.seconds(read, 3))
            works = {"copy": [copy], "reads": reads, "both": [copy, *reads]}
            best = yield {name: _TimedWork(partial(_run_all, work), _SAMPLE_S) for name, work in works.items()}
        lost_s = best["both"] - best["reads"]
        yield {"compute_lost": min(max(0.0, lost_s / best["copy"]), 1.0)}

    def decoding(self) -> _Measuring:
        """Decoded bytes per second of each dtype, and the fixed cost of a launch."""
        works: dict[str, _TimedWork] = {}
        sizes: dict[str, list[int]] = {}
        for dtype in self._decoded:
            weights = [self._weights[0][:rows].to(getattr(torch, dtype)) for rows in self._sizes.decoded_rows]
            plain = [weight.view(-1).view(torch.uint8) for weight in weights]
            sizes[dtype], out = [data.nbytes for data in plain], torch.empty_like(plain[0])
            for data in plain:
                layout, coded = coding.encode(data, dtype)
                decode = coding.decoding([CodedPart(coded, layout, out[: data.nbytes])])
                works[f"{dtype}, {data.nbytes}"] = _TimedWork(decode, _SAMPLE_S)
        best = yield works
        seconds = {dtype: [best[f"{dtype}, {n}"] for n in nbytes] for dtype, nbytes in sizes.items()}
        yield decoding_parts(seconds, sizes) if sizes else {}

    def unpacking(self) -> _Measuring:
        """Unpacked bytes per second of each kernel."""
        layers = unpack_rates.LAYERS
        works = unpack_rates.unpack_works(self._backend, self._unpacked, layers, self._random)
        best = yield {name: _TimedWork(work, _SAMPLE_S) for name, work in works.items()}
        yield unpack_rates.unpack_fields(best, layers, self._backend.profile.op_s)

    def _rounds(self, copies: Sequence[_Work]) -> None:
        """Kernel, copy, kernel, copy, ...: each waits for the previous one."""
        drained, filled = self._backend.event(), self._backend.event()
        for copy in copies:
            if self._on_gpu:  # hides the host time to queue the copies
                kernels.read_products(self._weights)
            self._backend.record(Side.COMPUTE, drained)
            self._backend.wait(Side.COPY, drained)
            copy()
            self._backend.record(Side.COPY, filled)
            self._backend.wait(Side.COMPUTE, filled)


def decoding_parts(seconds: Mapping[str, Sequence[float]], sizes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Fields of a profile from the seconds that each dtype takes for its `sizes` in bytes, the largest first.

    With two sizes per dtype, seconds are a fixed time plus bytes over a rate: a line through two points. The fixed time
    is bounded, as a slow host would lengthen it.
    """
    fixed_s = 0.0
    if all(len(nbytes) > 1 for nbytes in sizes.values()):
        ratios = {dtype: smaller / larger for dtype, (larger, smaller) in sizes.items()}
        intercepts = ((s[1] - ratios[dtype] * s[0]) / (1 - ratios[dtype]) for dtype, s in seconds.items())
        fixed_s = min(max(0.0, statistics.median(intercepts)), min(s[0] for s in seconds.values()) / 4)
    rates = {decode_rate(dtype): sizes[dtype][0] / (s[0] - fixed_s) for dtype, s in seconds.items()}
    return {"decoding_s": fixed_s} | rates


class _Part:
    """A measurement under way: its works, and the best seconds of each so far."""

    def __init__(self, measuring: Callable[[], _Measuring], bench: _Bench, seconds: _Seconds) -> None:
        self.name = measuring.__name__
        self._measuring = measuring()
        self._seconds = seconds
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
    """Host memory to copy from; for a GPU it is pinned, at the GPU's NUMA node, unless pinning is refused."""
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
    """Run `work` in rounds, back to back, for `seconds`; returns the seconds from the end of each round to the next."""
    work()
    backend.synchronize()
    started = time.perf_counter()
    work()
    backend.synchronize()
    num = max(_LEAST_COUNTED, min(_MOST_COUNTED, round(seconds / (time.perf_counter() - started))))
    stamps = [backend.stamp(side)]
    for _ in range(num + _NUM_UNCOUNTED):
        work()
        stamps.append(backend.stamp(side))
    backend.synchronize()
    return [backend.seconds(a, b) or 0.0 for a, b in itertools.pairwise(stamps)][_NUM_UNCOUNTED:]


def copies_s(
    backend: Backend,
    sizes: Sequence[int],
    seconds: float,
    ready: Callable[[], object] = lambda: None,
    memory: HostMemory = host_memory,
) -> list[float]:
    """Seconds of each round of back-to-back copies of these `sizes` in bytes, from `memory`.

    Calls `ready` once all memory is allocated.
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
    """The rate of direct reads of the first `nbytes` of a file, several at a time."""
    with closing(staging(Arena().take)) as ring:
        started = time.perf_counter()
        for piece in ring.start(file, 0, nbytes):
            piece.release()
        return nbytes / (time.perf_counter() - started)


def rate_of_files(mappings: Sequence[FileMapping]) -> float | None:
    """`disk_bytes_per_s` of the largest file, in a tenth of a second; None if no file is large enough."""
    largest = max(mappings, key=lambda mapping: mapping.nbytes, default=None)
    if largest is None or largest.nbytes < _MEASURED_NBYTES:
        return None
    return disk_bytes_per_s(DirectFile(largest), _MEASURED_NBYTES)
