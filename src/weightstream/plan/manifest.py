"""The manifest: what a model's weights are and in which order a step needs them. Knows no torch and no device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One named tensor: a view of the bytes of its alias group.

    Tensors that share bytes (tied weights, views of one storage) carry the same `alias`. `nbytes` is the span of
    the whole group, `offset` the first byte of this view inside it; `stride` counts elements.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    alias: str
    nbytes: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """Tensors that are needed together and move together.

    `enclosing` marks a unit whose forward contains other units: it is in use all the while, so it stays resident.
    `layer` is the index among the repeated blocks, or None; the classic flags select by it.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    enclosing: bool = False
    layer: int | None = None

    def aliases(self) -> dict[str, int]:
        """Alias group -> bytes, in order of first appearance, each once."""
        return {t.alias: t.nbytes for t in self.tensors}

    @property
    def nbytes(self) -> int:
        return sum(self.aliases().values())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All units of a model, and `order`: the positions of a step, each an index into `units`.

    A unit may stand at several positions (a block called twice) or at none (a branch that a step does not take).
    """

    units: tuple[UnitSpec, ...]
    order: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for tensor in self.tensors():
            if sizes.setdefault(tensor.alias, tensor.nbytes) != tensor.nbytes:
                raise ValueError(f"alias group {tensor.alias!r} has two sizes: {sizes[tensor.alias]}, {tensor.nbytes}")
        if bad := [u for u in self.order if not 0 <= u < len(self.units)]:
            raise ValueError(f"order names units {bad} of {len(self.units)}")

    def tensors(self) -> Iterator[TensorSpec]:
        for unit in self.units:
            yield from unit.tensors

    @cached_property
    def aliases(self) -> dict[str, int]:
        """Every alias group of the model -> its bytes."""
        return {t.alias: t.nbytes for t in self.tensors()}

    @property
    def nbytes(self) -> int:
        return sum(self.aliases.values())

    def without(self, aliases: frozenset[str]) -> Manifest:
        """The same units and order, less some of the weights."""
        units = (replace(u, tensors=tuple(t for t in u.tensors if t.alias not in aliases)) for u in self.units)
        return replace(self, units=tuple(units))


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What a machine can do, in bytes per second and seconds.

    `overhead_s` per unit and `launch_s` per tensor are the least time that a unit computes, whatever its bytes;
    `handover_s` passes between a release and a copy that waits for it.
    """

    link_bytes_per_s: float = 50e9
    copy_latency_s: float = 13e-6
    device_bytes_per_s: float = 2e12
    overhead_s: float = 0.5e-3
    launch_s: float = 0.0
    handover_s: float = 0.0
    disk_bytes_per_s: float = 2e9
    unit_s: tuple[float, ...] = ()

    def compute_s(self, index: int, unit: UnitSpec) -> float:
        """Measured seconds of a unit, else the time to read its weights once."""
        if self.unit_s:
            return self.unit_s[index]
        return max(self.overhead_s + self.launch_s * len(unit.tensors), unit.nbytes / self.device_bytes_per_s)

    def copy_s(self, nbytes: int) -> float:
        return self.copy_latency_s + nbytes / self.link_bytes_per_s if nbytes else 0.0
