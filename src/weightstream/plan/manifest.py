"""The manifest: a model's weights and their order, what a step computes, what a machine can do. Knows no torch.

An op takes the least time of a kernel, and beyond it the larger of its arithmetic over the rate of its kind and its
bytes over the bandwidth of device memory; a product, or what is several kernels, has a least time of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Literal

KEPT = "(kept on the device)"  # the name of a unit without a module
Rate = Literal["half", "single", "attention", "none", "ranks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One named tensor: a view of the bytes of its alias group.

    Tensors that share bytes (tied weights, views of one storage) carry the same `alias`. `nbytes` is the span of
    the whole group, `offset` the first byte of this view inside it; `stride` counts elements. Of a
    compressed group `nbytes` is what that form takes, and `decoded_nbytes` the span; of others this is 0.
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
    """Tensors that are needed together and move together.

    `enclosing` marks a unit whose forward contains other units: it is in use all the while, so it stays resident.
    `layer` is the index among the repeated blocks, or None; the classic flags select by it. `picks`: its forward may
    read some of the matrices of its stacks alone.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    enclosing: bool = False
    layer: int | None = None
    picks: bool = False

    def aliases(self) -> dict[str, int]:
        """Alias group -> bytes, in order of first appearance, each once."""
        return {t.alias: t.nbytes for t in self.tensors}

    def coded(self) -> dict[str, TensorSpec]:
        """The alias groups that are held and moved in coded form -> one tensor of each."""
        return {t.alias: t for t in self.tensors if t.is_coded}

    @property
    def nbytes(self) -> int:
        return sum(self.aliases().values())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All units of a model, and `order`: the positions of a step, each an index into `units`.

    A unit may stand at several positions (a block called twice) or at none (a branch that a step does not take).
    """

    units: tuple[UnitSpec, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        forms: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors():
            form = (tensor.nbytes, tensor.decoded_nbytes)
            if (first := forms.setdefault(tensor.alias, form)) != form:
                what, index = ("sizes", 0) if first[0] != form[0] else ("sizes in plain form", 1)
                raise ValueError(f"alias group {tensor.alias!r} has two {what}: {first[index]}, {form[index]}")
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
    def users(self) -> dict[str, list[int]]:
        """Every alias group of the model -> the units that use it."""
        users: dict[str, list[int]] = {alias: [] for alias in self.aliases}
        for index, unit in enumerate(self.units):
            for alias in unit.aliases():
                users[alias].append(index)
        return users

    @cached_property
    def shown(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Of each unit: how many of its tensors are decoded, and the alias groups of those that show the ring if they
        stream."""
        plain = (tuple(t.alias for t in unit.tensors if not t.is_coded and t.nbytes) for unit in self.units)
        return tuple((sum(t.is_coded for t in u.tensors), found) for u, found in zip(self.units, plain, strict=True))

    @cached_property
    def spans(self) -> dict[str, int]:
        """Every alias group of the model -> its bytes in plain form."""
        return {t.alias: t.decoded_nbytes or t.nbytes for t in self.tensors()}

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of all weights in plain form."""
        return sum(self.spans.values())

    @cached_property
    def codes(self) -> dict[str, int]:
        """The compressed alias groups -> their bytes in that form."""
        return {t.alias: t.nbytes for t in self.tensors() if t.is_coded}

    @cached_property
    def decoded(self) -> tuple[dict[str, int], ...]:
        """Of each unit, the coded alias groups -> their bytes in plain form."""
        return tuple({t.alias: t.decoded_nbytes for t in unit.tensors if t.is_coded} for unit in self.units)

    def coded(self, codes: Mapping[str, int]) -> Manifest:
        """The same with these alias groups compressed to so many bytes, and all others plain."""
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
        """The same with nothing coded."""
        return self.coded({})

    def without(self, aliases: Collection[str]) -> Manifest:
        """The same units and order, less some of the weights."""
        if not aliases:
            return self
        units = (replace(u, tensors=tuple(t for t in u.tensors if t.alias not in aliases)) for u in self.units)
        return replace(self, units=tuple(units))

    @property
    def kept(self) -> frozenset[str]:
        """The alias groups that are to stay on the device."""
        return frozenset(alias for unit in self.units if unit.name == KEPT for alias in unit.aliases())

    def keeping(self, aliases: Collection[str]) -> Manifest:
        """The same with one more unit that no position names, which keeps these alias groups on the device, and those
        that were kept before."""
        wanted = self.kept.union(aliases)
        kept = {spec.name: spec for spec in self.tensors() if spec.alias in wanted}
        if not kept:
            return self
        unit = UnitSpec(name=KEPT, tensors=tuple(kept.values()), enclosing=True)
        return replace(self, units=(*(u for u in self.units if u.name != KEPT), unit))


def decode_rate(dtype: str) -> str:
    """The field of a profile for the rate at which weights of a dtype are decompressed."""
    return f"decode_{dtype}_bytes_per_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What a machine can do, in bytes, operations and seconds; `machine` names the one that was measured.

    The link copies from pinned host memory. `half_flops_per_s` and `single_flops_per_s` are matrix products in 16-bit
    floats and in float32, `attention_flops_per_s` fused attention. A kernel takes `op_s` of the device beside its work,
    a matrix product `product_s` in all, at least (0.0: as any kernel), and a launch `op_launch_s` of the host.
    Copies of matrices out of a stack reach `gather_share` of `device_bytes_per_s`; products of each of them with a row
    take, at least, `stack_s` beside their bytes at `stack_share` of it. `decode_bfloat16_bytes_per_s` and the like are
    bytes of decompressed weights of a dtype (1.0: not measured); each dtype of a unit takes `decoding_s` in addition.
    Processes that share a model add up `ranks_bytes_per_s`. `workspace_nbytes` is what libraries keep on the device,
    `device_nbytes` all of its memory (0: unknown). `handover_s` passes between a release and a copy that waits for it.
    `measured_at` is in seconds since the epoch (0: unknown), and `load` the share of the GPU, or of the processor, that
    others used right before (-1: unknown).

    Where the work of the units is known, `unit_s` holds their seconds on the device, decoding too, and `host_s` those
    that the host takes to launch them; there are none where the host is the device. To these, or else to the former,
    `overhead_s` comes for a unit that streams, or less `fill_s` for one that is only decoded, `show_s` for each of its
    tensors that does, and `decoding_launch_s` where any is decoded; `after_share` is the share of a unit's seconds for
    ops that follow its release, before the next unit opens; `picked` holds the share of its stacks that a unit reads,
    and the seconds to copy that; `captured_s` are seconds that a unit takes beside in a CUDA graph, or less, as steps
    there have another cache. A search counts `host_share` of what the host adds to a step.

    Else a unit takes the time to read its weights once, and at least `overhead_s`, and `launch_s` per tensor.
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
    disk_bytes_per_s: float = 2e9
    decode_bfloat16_bytes_per_s: float = 1.15e12
    decode_float16_bytes_per_s: float = 1.05e12
    decode_float8_e4m3fn_bytes_per_s: float = 0.75e12
    decoding_s: float = 0.0
    ranks_bytes_per_s: float = 200e9
    workspace_nbytes: int = 0
    device_nbytes: int = 0
    measured_at: float = 0.0
    load: float = -1.0
    unit_s: tuple[float, ...] = ()
    host_s: tuple[float, ...] = ()
    after_share: tuple[float, ...] = ()
    picked: tuple[tuple[float, float], ...] = ()
    captured_s: tuple[float, ...] = ()
    host_share: float = 0.95  # it varies by 1.7 from minute to minute [H200]

    def times_s(self, index: int, unit: UnitSpec, *, shown: int = 0, streams: bool = True) -> tuple[float, float]:
        """Seconds of the device and of the host, which runs ahead, for a unit at one of its positions.

        `shown`: how many of its tensors stream or are decoded; `streams`: whether any does.
        """
        if self.unit_s:
            opening_s = self._opening_s(unit, shown, streams) if shown else 0.0
            if not self.host_s:
                return self.unit_s[index] + opening_s, 0.0
            return self.unit_s[index], self.host_s[index] + opening_s
        nbytes = unit.nbytes + sum(t.decoded_nbytes - t.nbytes for t in unit.coded().values())
        device_s = nbytes / self.device_bytes_per_s + self.decode_s(index, unit)
        return max(self.overhead_s + self.launch_s * len(unit.tensors), device_s), 0.0

    def _opening_s(self, unit: UnitSpec, shown: int, streams: bool) -> float:
        """Seconds of the host."""
        opens_s = self.overhead_s + self.show_s * shown - (0.0 if streams else self.fill_s)
        return opens_s + (self.decoding_launch_s if any(t.is_coded for t in unit.tensors) else 0.0)

    def decode_s(self, index: int, unit: UnitSpec) -> float:
        """Seconds that the device takes to decode a unit's weights before it computes; of what it picks that alone."""
        coded = unit.coded().values()
        seconds = sum(t.decoded_nbytes / self.decode_bytes_per_s(t.dtype) for t in coded)
        return self.read_share(index) * seconds + self.decoding_s * len({t.dtype for t in coded})

    def read_share(self, index: int) -> float:
        """Of the stacks of a unit, what it reads at most; 1.0 of one that picks nothing."""
        return min(1.0, (self.picked[index][0] if self.picked else 0.0) or 1.0)

    def _spared_s(self, index: int, unit: UnitSpec) -> float:
        """Seconds to copy what a unit picks, which goes away with what is decoded in place of a copy."""
        copy_s = self.picked[index][1] if self.picked else 0.0
        coded, every = (sum(t.decoded_nbytes or t.nbytes for t in ts) for ts in (unit.coded().values(), unit.tensors))
        return copy_s * coded / every if coded else 0.0

    def decode_bytes_per_s(self, dtype: str) -> float:
        """Bytes of decompressed weights of this dtype."""
        rate: float = getattr(self, decode_rate(dtype))
        return rate

    def decoding(self, manifest: Manifest) -> Profile:
        """The profile of a manifest whose units take `unit_s` in plain form."""
        if not self.unit_s or not manifest.codes:
            return self
        decodes = [self.decode_s(u, unit) - self._spared_s(u, unit) for u, unit in enumerate(manifest.units)]
        unit_s = tuple(s + more for s, more in zip(self.unit_s, decodes, strict=True))
        shares = zip(self.after_share, self.unit_s, unit_s, strict=False)
        return replace(self, unit_s=unit_s, after_share=tuple(share * s / (all_s or 1) for share, s, all_s in shares))

    def without_host(self) -> Profile:
        """The profile of steps that are CUDA graphs: the host launches nothing."""
        free = replace(self, op_launch_s=0.0, overhead_s=0.0, launch_s=0.0, show_s=0.0, fill_s=0.0)
        return replace(free, decoding_launch_s=0.0)

    def copy_s(self, nbytes: int) -> float:
        return self.copy_latency_s + nbytes / self.link_bytes_per_s if nbytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a step is given: `batch` sequences of `tokens` new tokens each, `context` positions once they are in."""

    batch: int = 1
    tokens: int = 1
    context: int = 4096

    def __str__(self) -> str:
        return f"batch {self.batch}, tokens {self.tokens}, context {self.context}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One kernel: floating-point operations, bytes read and written, and what limits its arithmetic.

    `half` and `single` are matrix products in 16-bit floats and in float32; `ranks` adds up a tensor that each of
    several processes has. `after`: it runs once the unit is released, before the next one opens. `device_s` are
    measured seconds, in place of what the others tell; 0.0: none. `picked`: it copies so large a share of the matrices
    of a stack. `stacked`: each matrix of a stack is multiplied by a row of its own. `least`: it takes as long as so
    many small kernels, at least.
    """

    rate: Rate = "none"
    flops: float = 0.0
    nbytes: int = 0
    after: bool = False
    device_s: float = 0.0
    picked: float = 0.0
    stacked: bool = False
    least: float = 1.0

    def seconds(self, profile: Profile) -> float:
        return self.device_s or max(self._least_s(profile), profile.op_s + self.work_s(profile))

    def work_s(self, profile: Profile) -> float:
        """Seconds of its arithmetic or its bytes alone."""
        rates = {"half": profile.half_flops_per_s, "single": profile.single_flops_per_s}
        rates["attention"] = profile.attention_flops_per_s
        share = profile.gather_share if self.picked else 1.0
        bandwidth = profile.ranks_bytes_per_s if self.rate == "ranks" else share * profile.device_bytes_per_s
        return max(self.flops / rates.get(self.rate, math.inf), self.nbytes / bandwidth)

    def _least_s(self, profile: Profile) -> float:
        kernels_s = self.least * profile.op_s
        if self.stacked:
            return max(kernels_s, profile.stack_s + self.nbytes / (profile.stack_share * profile.device_bytes_per_s))
        return max(kernels_s, profile.product_s) if self.rate in ("half", "single") else kernels_s


def unit_seconds(ops: Sequence[Op], profile: Profile) -> tuple[float, float, float]:
    """Seconds of a unit of these ops on the device and of their launches on the host, and the share of those on the
    device that follow the unit's release."""
    seconds = [op.seconds(profile) for op in ops]
    after = sum(s for s, op in zip(seconds, ops, strict=True) if op.after)
    return sum(seconds), profile.op_launch_s * len(ops), after / (sum(seconds) or 1.0)


def mean(calls: Sequence[Sequence[Op]]) -> tuple[Op, ...]:
    """The ops of one of several calls, op by op."""
    if len(calls) < 2:
        return tuple(calls[0]) if calls else ()
    return tuple(
        Op(
            rate=max(ops, key=lambda op: op.flops).rate,
            flops=sum(op.flops for op in ops) / len(calls),
            nbytes=sum(op.nbytes for op in ops) // len(calls),
            after=any(op.after for op in ops),
            device_s=sum(op.device_s for op in ops) / len(calls) if all(op.device_s for op in ops) else 0.0,
            stacked=all(op.stacked for op in ops),
            least=max(op.least for op in ops),
        )
        for ops in zip_longest(*calls, fillvalue=Op())
    )
