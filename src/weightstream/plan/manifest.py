"""The manifest: a model's weights, their order and the work of a step, and the rates of a machine. Knows no torch.

An op takes `op_s`, the fixed time of a kernel, plus the larger of two times: its floating-point operations over the
rate of their kind, and its bytes over the bandwidth of device memory. Matrix products, and ops that launch several
kernels, have a minimum time of their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Literal, NamedTuple

KEPT = "(kept on the device)"  # the name of a unit without a module
Rate = Literal["half", "single", "attention", "none", "ranks"]
# Where the rates of a prediction come from; "steps": measured steps of the same plan have corrected it.
Basis = Literal["measured", "measured under load", "data sheet", "data sheet and measurements", "assumed", "steps"]
NOT_MEASURED = 1.0  # bytes per second of kernels that were not measured
QUIET = 0.2  # share of a device that other programs may use while it is measured
_UNPACK_SHARE = 0.4  # of the bandwidth of device memory, in unpacked bytes [H200: mxfp4 0.38, float8 0.50]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One named tensor: a view of the bytes of its alias group.

    Attributes:
        name: the first name of the tensor in the model.
        shape: its size in each dimension.
        stride: its strides, in elements.
        dtype: its dtype without the prefix `torch.`, such as "bfloat16".
        alias: the alias group; tensors that share bytes (tied weights, views of one storage) have the same one.
        nbytes: bytes of the whole group as it is held and moved: of its compressed form, if it is compressed.
        offset: the first byte of this view in the uncompressed group.
        decoded_nbytes: uncompressed bytes of a compressed group; 0 for any other group.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    alias: str
    nbytes: int
    offset: int = 0
    decoded_nbytes: int = 0

    @property
    def is_coded(self) -> bool:
        return self.decoded_nbytes > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """Tensors that are needed together and are copied together.

    Attributes:
        name: the name of the module in the model.
        tensors: its tensors.
        enclosing: its forward contains other units. It is in use while they run, so its weights stay resident.
        layer: the index of its block among the repeated blocks; None outside of them. The classic settings select by
            this index.
        stacks: alias groups of which its forward may read only some rows, as a mixture of experts does.
        in_waves: its forward can read all rows of these a few at a time.
        ids_per_token: rows of these that each token names to kernels, which read them in their slots; 0: a traced step
            shows how many rows its forward copies.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    enclosing: bool = False
    layer: int | None = None
    stacks: frozenset[str] = frozenset()
    in_waves: bool = False
    ids_per_token: int = 0

    def aliases(self) -> dict[str, int]:
        """Alias group -> bytes, in order of first appearance, each once."""
        return {t.alias: t.nbytes for t in self.tensors}

    def coded(self) -> dict[str, TensorSpec]:
        """The alias groups that are held and moved in compressed form -> one tensor of each."""
        return {t.alias: t for t in self.tensors if t.is_coded}

    @property
    def nbytes(self) -> int:
        return sum(self.aliases().values())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All units of a model, and their order in a step.

    A unit may stand at several positions of the order (a block called twice) or at none (a branch not taken).

    Attributes:
        units: the units.
        order: the positions of a step, each an index into `units`.
    """

    units: tuple[UnitSpec, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        forms: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors():
            form = (tensor.nbytes, tensor.decoded_nbytes)
            if (first := forms.setdefault(tensor.alias, form)) != form:
                sizes, index = ("sizes", 0) if first[0] != form[0] else ("uncompressed sizes", 1)
                raise ValueError(f"alias group {tensor.alias!r} has two {sizes}: {first[index]}, {form[index]}")
        if bad := [u for u in self.order if not 0 <= u < len(self.units)]:
            raise ValueError(f"order names units {bad} of {len(self.units)}")

    def tensors(self) -> Iterator[TensorSpec]:
        for unit in self.units:
            yield from unit.tensors

    @cached_property
    def aliases(self) -> dict[str, int]:
        """Every alias group of the model -> its bytes."""
        return {t.alias: t.nbytes for t in self.tensors()}

    @cached_property
    def nbytes(self) -> int:
        return sum(self.aliases.values())

    @cached_property
    def read(self) -> dict[str, int]:
        """The alias groups that a step reads -> their bytes."""
        return {alias: n for unit in set(self.order) for alias, n in self.units[unit].aliases().items()}

    @cached_property
    def sweeps(self) -> tuple[dict[str, int], ...]:
        """For the forward of a step, and for the backward if it has one: the alias groups that are read -> their bytes.

        The backward begins with the first unit that has a position before.
        """
        first = dict(zip(reversed(self.order), reversed(range(len(self.order))), strict=True))  # unit -> its first turn
        turn = next((p for p, unit in enumerate(self.order) if first[unit] < p), len(self.order))
        parts = [part for part in (self.order[:turn], self.order[turn:]) if part]
        return tuple({a: n for unit in set(part) for a, n in self.units[unit].aliases().items()} for part in parts)

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """Every alias group of the model -> the units that use it."""
        users: dict[str, list[int]] = {alias: [] for alias in self.aliases}
        for index, unit in enumerate(self.units):
            for alias in unit.aliases():
                users[alias].append(index)
        return users

    @cached_property
    def shown(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """For each unit: the number of its compressed tensors, and the alias groups of its other tensors, which show
        the ring if they stream."""
        plain = (tuple(t.alias for t in unit.tensors if not t.is_coded and t.nbytes) for unit in self.units)
        return tuple((sum(t.is_coded for t in u.tensors), rest) for u, rest in zip(self.units, plain, strict=True))

    @cached_property
    def spans(self) -> dict[str, int]:
        """Every alias group of the model -> its uncompressed bytes."""
        return {t.alias: t.decoded_nbytes or t.nbytes for t in self.tensors()}

    @property
    def decoded_nbytes(self) -> int:
        """Uncompressed bytes of all weights."""
        return sum(self.spans.values())

    @cached_property
    def codes(self) -> dict[str, int]:
        """The compressed alias groups -> their bytes in that form."""
        return {t.alias: t.nbytes for t in self.tensors() if t.is_coded}

    @cached_property
    def decoded(self) -> tuple[dict[str, int], ...]:
        """For each unit, its compressed alias groups -> their uncompressed bytes."""
        return tuple({t.alias: t.decoded_nbytes for t in unit.tensors if t.is_coded} for unit in self.units)

    def coded(self, codes: Mapping[str, int]) -> Manifest:
        """The same manifest with the alias groups of `codes` compressed to these bytes, and all others uncompressed."""
        if codes == self.codes:
            return self

        def form(spec: TensorSpec) -> TensorSpec:
            span = spec.decoded_nbytes or spec.nbytes
            form = (codes[spec.alias], span) if spec.alias in codes else (span, 0)
            changed = form != (spec.nbytes, spec.decoded_nbytes)
            return replace(spec, nbytes=form[0], decoded_nbytes=form[1]) if changed else spec

        units = (replace(unit, tensors=tuple(map(form, unit.tensors))) for unit in self.units)
        return replace(self, units=tuple(units))

    def plain(self) -> Manifest:
        """The same manifest with all weights uncompressed."""
        return self.coded({})

    def without(self, aliases: Collection[str]) -> Manifest:
        """The same units and order without these alias groups."""
        if not aliases:
            return self
        units = (replace(u, tensors=tuple(t for t in u.tensors if t.alias not in aliases)) for u in self.units)
        return replace(self, units=tuple(units))

    @property
    def kept(self) -> frozenset[str]:
        """The alias groups that `keeping` has fixed on the device."""
        return frozenset(alias for unit in self.units if unit.name == KEPT for alias in unit.aliases())

    def keeping(self, aliases: Collection[str]) -> Manifest:
        """The same manifest with these alias groups fixed on the device, in addition to those that are already.

        They are in a unit of their own, which encloses others and stands at no position of the order.
        """
        wanted = self.kept.union(aliases)
        kept = {spec.name: spec for spec in self.tensors() if spec.alias in wanted}
        if not kept:
            return self
        unit = UnitSpec(name=KEPT, tensors=tuple(kept.values()), enclosing=True)
        return replace(self, units=(*(u for u in self.units if u.name != KEPT), unit))


def decode_rate(dtype: str) -> str:
    """The name of the profile's field with the rate at which weights of this dtype are decompressed."""
    return f"decode_{dtype}_bytes_per_s"


def unpack_rate(kernel: str) -> str:
    """The name of the profile's field with the rate of the kernel that unpacks matrices of this format."""
    return f"unpack_{kernel}_bytes_per_s"


class Seconds(NamedTuple):
    """Seconds of the device, and of the host, which runs ahead of it."""

    device_s: float
    host_s: float


class Picked(NamedTuple):
    """The matrices that a unit copies out of its stacks in a step.

    Attributes:
        share: the share of the matrices of a stack; 0.0: the unit picks none.
        copy_s: seconds on the device to copy them; without those of packed matrices, which are unpacked instead.
    """

    share: float
    copy_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Rates and fixed costs of a machine, and the seconds of one model's units where their work is known.

    `weightstream doctor --save` writes the fields of the machine, which `measure/` measures; the source of each field
    is in brackets. Where it was not measured, a backend's assumed profile holds (`CUDA_PROFILE`, `CPU_PROFILE`). The
    fields of the units are empty there: `Planner.profile` fills them in for one model. Without them a unit takes
    the time to read its weights once, and at least `overhead_s` plus `launch_s` per tensor.

    The device:
        machine: name of the measured GPU or CPU; "": the rates are assumed. [bench.measure]
        device_nbytes: bytes of device memory in total; 0: unknown. [bench.measure]
        workspace_nbytes: bytes that libraries allocate at the first matrix product and keep; 0: unknown.
            [bench.measure]
        measured_at: time of the measurement, in seconds since the epoch; 0: unknown. [profile.profile_for]
        load: share of the GPU, or of the CPU, that other programs used just before; -1: unknown.
            [profile.profile_for]
        on_cpu: the device is a CPU. [CPU_PROFILE]
        assumed_from: where rates that nobody measured on the machine come from; "": they were. [known_gpus.py]

    Copies:
        link_bytes_per_s: bytes per second of a large copy from pinned host memory to the device. [bench.measure]
        copy_latency_s: fixed seconds of each copy, in addition to its bytes. [bench.measure]
        handover_s: seconds from the end of a kernel to the start of a copy that waits for it. [bench.measure]
        compute_lost: share of its speed that compute loses while a copy runs, where both share cores and memory
            bandwidth. [bench.measure, CPU]
        disk_bytes_per_s: bytes per second read from files. [assumed; a loaded model's files: bench.rate_of_files]
        ranks_bytes_per_s: bytes per second of a tensor in the all-reduces of tensor parallelism.
            [assumed; with other ranks: multi_gpu_links.summed]

    Kernels:
        device_bytes_per_s: bytes per second that kernels read of device memory. [kernels.kernel_fields]
        half_flops_per_s: FLOP/s of large matrix products in 16-bit floats. [bench.measure, in bfloat16]
        single_flops_per_s: FLOP/s of large matrix products in float32. [bench.measure]
        attention_flops_per_s: FLOP/s of fused, causal attention. [bench.measure]
        op_s: fixed seconds of each kernel on the device, in addition to its work. [kernels.kernel_fields]
        product_s: minimum seconds of a matrix product, all included; 0.0: as any kernel. On a CPU, fixed seconds of a
            product in 16-bit floats, in addition to its work. [kernels.kernel_fields]
        gather_share: share of `device_bytes_per_s` that copies of matrices out of a stack reach.
            [kernels.kernel_fields, GPU]
        stack_s: fixed seconds of a batched product of such matrices with a row each. [kernels.kernel_fields, GPU]
        stack_share: share of `device_bytes_per_s` at which these products read their bytes.
            [kernels.kernel_fields, GPU]

    The host:
        op_launch_s: seconds of the host to launch a kernel from the code of a model. [bench.measure]
        launch_s: seconds of the host per tensor of a unit of which the work is unknown. [bench.measure, GPU]
        overhead_s: seconds of the host to open and close a unit that streams. [unit_overhead.overhead_fields, GPU]
        fill_s: the part of `overhead_s` that a unit without a copy saves: one that is only decompressed.
            [unit_overhead.overhead_fields, GPU]
        show_s: seconds of the host per tensor of a unit that streams or is decompressed.
            [unit_overhead.overhead_fields, GPU]
        decoding_launch_s: seconds of the host to launch the decompression of a unit.
            [unit_overhead.overhead_fields, GPU]

    Decompression:
        decode_bfloat16_bytes_per_s, decode_float16_bytes_per_s, decode_float8_e4m3fn_bytes_per_s: uncompressed bytes
            per second, by dtype; 1.0: not measured. [bench.measure_decoding]
        decoding_s: fixed seconds on the device for each dtype in a unit that is decompressed; the time for its bytes
            comes on top. [bench.measure_decoding]

    Packed experts:
        unpack_mxfp4_bytes_per_s, unpack_float8_bytes_per_s, unpack_int4_bytes_per_s: unpacked bytes per second of
            matrices that are picked out of packed stacks, by the format of these; 1.0: not measured, so a share of
            `device_bytes_per_s` is assumed. [bench.measure_unpacking, GPU; assumed, CPU]

    The units of one model, each a tuple with a value per unit of the manifest:
        unit_s: seconds on the device at one position: compute, and decompression. [Planner.profile: work of the unit
            over the rates above, or measured steps; fetches of experts: expert_cache.profile_with_cache]
        host_s: seconds of the host to launch the kernels; empty if the device is the CPU. The overhead of a unit
            that streams or is decompressed comes on top, or on top of `unit_s` if this is empty. [Planner.profile]
        after_share: share of `unit_s` for ops that run after the release of the unit, before the next one opens.
            [Planner.profile]
        picked: the share of its stacks that the unit reads, and the seconds to copy that out. [Planner.profile]
        captured_s: seconds in a CUDA graph minus those in an eager step; captured steps use another KV cache.
            [Planner.profile; expert caches: expert_cache.profile_with_cache]
        more_s: for each position of the order, the seconds of the device and of the host that it takes more than those
            of its unit: a backward takes more than a forward; empty: none does. Not per unit. [Planner.profile]
        host_share: weight in the search of the seconds that the host adds to a step; not per unit. [assumed; it is
            below 1 as the host's time varies by a factor of 1.7 from minute to minute on an H200; Planner.profile
            lowers it for text from CUDA graphs]
    """

    machine: str = ""
    link_bytes_per_s: float = 50e9
    copy_latency_s: float = 13e-6
    device_bytes_per_s: float = 2e12
    half_flops_per_s: float = 200e12
    single_flops_per_s: float = 30e12
    attention_flops_per_s: float = 150e12
    op_s: float = 2e-6
    product_s: float = 0.0
    gather_share: float = 1.0
    stack_s: float = 0.0
    stack_share: float = 1.0
    op_launch_s: float = 10e-6
    overhead_s: float = 0.5e-3
    launch_s: float = 0.0
    show_s: float = 0.0
    fill_s: float = 0.0
    decoding_launch_s: float = 0.0
    handover_s: float = 0.0
    compute_lost: float = 0.0
    disk_bytes_per_s: float = 2e9
    decode_bfloat16_bytes_per_s: float = 1.15e12
    decode_float16_bytes_per_s: float = 1.05e12
    decode_float8_e4m3fn_bytes_per_s: float = 0.75e12
    decoding_s: float = 0.0
    unpack_mxfp4_bytes_per_s: float = NOT_MEASURED
    unpack_float8_bytes_per_s: float = NOT_MEASURED
    unpack_int4_bytes_per_s: float = NOT_MEASURED
    ranks_bytes_per_s: float = 200e9
    workspace_nbytes: int = 0
    device_nbytes: int = 0
    measured_at: float = 0.0
    load: float = -1.0
    on_cpu: bool = False
    assumed_from: Literal["", "data sheet", "data sheet and measurements"] = ""
    unit_s: tuple[float, ...] = ()
    host_s: tuple[float, ...] = ()
    after_share: tuple[float, ...] = ()
    picked: tuple[Picked, ...] = ()
    captured_s: tuple[float, ...] = ()
    more_s: tuple[Seconds, ...] = ()
    host_share: float = 0.95

    @property
    def basis(self) -> Basis:
        """The origin of the machine's rates."""
        if self.assumed_from:
            return self.assumed_from
        if not self.machine:
            return "assumed"
        return "measured under load" if self.load > QUIET else "measured"

    def times_s(self, index: int, unit: UnitSpec, *, shown: int = 0, streams: bool = True) -> Seconds:
        """Seconds of the device and of the host for a unit at one of its positions. The host runs ahead of the device.

        Args:
            index: the index of the unit in the manifest.
            unit: the unit.
            shown: the number of its tensors that stream or are decompressed.
            streams: whether any of them streams.
        """
        if self.unit_s:
            opening_s = self._opening_s(unit, shown, streams) if shown else 0.0
            if not self.host_s:
                return Seconds(self.unit_s[index] + opening_s, 0.0)
            return Seconds(self.unit_s[index], self.host_s[index] + opening_s)
        nbytes = unit.nbytes + sum(t.decoded_nbytes - t.nbytes for t in unit.coded().values())
        device_s = nbytes / self.device_bytes_per_s + self.decode_s(index, unit)
        return Seconds(max(self.overhead_s + self.launch_s * len(unit.tensors), device_s), 0.0)

    def _opening_s(self, unit: UnitSpec, shown: int, streams: bool) -> float:
        """Seconds of the host to open and close a unit."""
        opens_s = self.overhead_s + self.show_s * shown - (0.0 if streams else self.fill_s)
        return opens_s + (self.decoding_launch_s if any(t.is_coded for t in unit.tensors) else 0.0)

    def decode_s(self, index: int, unit: UnitSpec) -> float:
        """Seconds of the device to decompress a unit before it computes: of its stacks only the part that it reads."""
        coded = unit.coded().values()
        seconds = sum(t.decoded_nbytes / self.decode_bytes_per_s(t.dtype) for t in coded)
        return self.read_share(index) * seconds + self.decoding_s * len({t.dtype for t in coded})

    def read_share(self, index: int) -> float:
        """The share of its stacks that a unit reads at most; 1.0 for a unit that picks nothing."""
        return min(1.0, (self.picked[index].share if self.picked else 0.0) or 1.0)

    def _spared_s(self, index: int, unit: UnitSpec) -> float:
        """Seconds of copies out of compressed stacks, which are saved: the picked matrices are decompressed instead."""
        copy_s = self.picked[index].copy_s if self.picked else 0.0
        coded, every = (sum(t.decoded_nbytes or t.nbytes for t in ts) for ts in (unit.coded().values(), unit.tensors))
        return copy_s * coded / every if coded else 0.0

    def decode_bytes_per_s(self, dtype: str) -> float:
        """Uncompressed bytes per second of this dtype."""
        rate: float = getattr(self, decode_rate(dtype))
        return rate

    def unpack_bytes_per_s(self, kernel: str) -> float:
        """Unpacked bytes per second of the kernel for this format: measured, or assumed."""
        rate: float = getattr(self, unpack_rate(kernel))
        return rate if rate > NOT_MEASURED else _UNPACK_SHARE * self.device_bytes_per_s

    def decoding(self, manifest: Manifest) -> Profile:
        """The profile for a partly compressed manifest, from one whose `unit_s` are those of uncompressed units."""
        if not self.unit_s or not manifest.codes:
            return self
        decodes = [self.decode_s(u, unit) - self._spared_s(u, unit) for u, unit in enumerate(manifest.units)]
        unit_s = tuple(s + more for s, more in zip(self.unit_s, decodes, strict=True))
        shares = zip(self.after_share, self.unit_s, unit_s, strict=False)
        return replace(self, unit_s=unit_s, after_share=tuple(share * s / (all_s or 1) for share, s, all_s in shares))

    def without_host(self) -> Profile:
        """The profile for steps in CUDA graphs, in which the host launches no kernel."""
        free = replace(self, op_launch_s=0.0, overhead_s=0.0, launch_s=0.0, show_s=0.0, fill_s=0.0)
        return replace(free, decoding_launch_s=0.0)

    def copy_s(self, nbytes: int) -> float:
        return self.copy_latency_s + nbytes / self.link_bytes_per_s if nbytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The input of a step of a language model.

    Attributes:
        batch: the number of sequences.
        tokens: new tokens of each sequence.
        context: positions of each sequence, with the new tokens.
        trains: the step is a forward, a loss and the backward.
    """

    batch: int = 1
    tokens: int = 1
    context: int = 4096
    trains: bool = False

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences together."""
        return self.batch * self.tokens

    def __str__(self) -> str:
        if self.trains:
            return f"training, batch {self.batch}, tokens {self.tokens}"
        return f"batch {self.batch}, tokens {self.tokens}, context {self.context}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One kernel: its floating-point operations, its bytes, and the rates that limit it.

    Attributes:
        rate: the kind of its arithmetic. "half" and "single": matrix products in 16-bit floats and in float32;
            "attention": fused attention; "ranks": an all-reduce of tensor parallelism; "none": only bytes count.
        flops: floating-point operations.
        nbytes: bytes that it reads and writes.
        after: it runs after the release of the unit, before the next unit opens.
        elsewhere: another device runs it, between units of this one.
        device_s: measured seconds on the device, which replace the estimate; 0.0: not measured.
        picked: the share of the matrices of a stack that it copies; 0.0: it copies none.
        unpacks: the kernel that unpacks the matrices that it picks, whose rate then limits it; its `nbytes` are those
            that it writes. "": it unpacks none.
        stacked: it multiplies each matrix of a stack by a row of its own.
        least: it takes at least as long as this many small kernels.
    """

    rate: Rate = "none"
    flops: float = 0.0
    nbytes: int = 0
    after: bool = False
    elsewhere: bool = False
    device_s: float = 0.0
    picked: float = 0.0
    unpacks: str = ""
    stacked: bool = False
    least: float = 1.0

    def seconds(self, profile: Profile) -> float:
        """Seconds on the device."""
        return self.device_s or max(self._least_s(profile), profile.op_s + self.work_s(profile))

    def work_s(self, profile: Profile) -> float:
        """Seconds of its arithmetic or of its bytes, without the fixed cost of a kernel."""
        if self.unpacks:
            return self.nbytes / profile.unpack_bytes_per_s(self.unpacks)
        rates = {"half": profile.half_flops_per_s, "single": profile.single_flops_per_s}
        rates["attention"] = profile.attention_flops_per_s
        share = profile.gather_share if self.picked else 1.0
        bandwidth = profile.ranks_bytes_per_s if self.rate == "ranks" else share * profile.device_bytes_per_s
        return max(self.flops / rates.get(self.rate, math.inf), self.nbytes / bandwidth)

    def _least_s(self, profile: Profile) -> float:
        kernels_s = self.least * profile.op_s
        if self.stacked:
            return max(kernels_s, profile.stack_s + self.nbytes / (profile.stack_share * profile.device_bytes_per_s))
        if profile.on_cpu:
            return max(kernels_s, profile.product_s + self.work_s(profile)) if self.rate == "half" else kernels_s
        return max(kernels_s, profile.product_s) if self.rate in ("half", "single") else kernels_s


class UnitSeconds(NamedTuple):
    """Seconds of the ops of a unit.

    Attributes:
        device_s: seconds on the device.
        host_s: seconds of the host to launch them.
        after_share: share of `device_s` after the release of the unit.
    """

    device_s: float
    host_s: float
    after_share: float


def unit_seconds(ops: Sequence[Op], profile: Profile) -> UnitSeconds:
    """Seconds of these ops of a unit."""
    seconds = [op.seconds(profile) for op in ops]
    after_s = sum(s for s, op in zip(seconds, ops, strict=True) if op.after)
    return UnitSeconds(sum(seconds), profile.op_launch_s * len(ops), after_s / (sum(seconds) or 1.0))


def mean(calls: Sequence[Sequence[Op]]) -> tuple[Op, ...]:
    """The ops of an average call, op by op."""
    if len(calls) < 2:
        return tuple(calls[0]) if calls else ()
    return tuple(
        Op(
            rate=max(ops, key=lambda op: op.flops).rate,
            flops=sum(op.flops for op in ops) / len(calls),
            nbytes=sum(op.nbytes for op in ops) // len(calls),
            after=any(op.after for op in ops),
            elsewhere=any(op.elsewhere for op in ops),
            device_s=sum(op.device_s for op in ops) / len(calls) if all(op.device_s for op in ops) else 0.0,
            unpacks=ops[0].unpacks if len({op.unpacks for op in ops}) == 1 else "",
            stacked=all(op.stacked for op in ops),
            least=max(op.least for op in ops),
        )
        for ops in zip_longest(*calls, fillvalue=Op())
    )
