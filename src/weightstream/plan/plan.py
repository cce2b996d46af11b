"""The plan: where every weight lives and the schedule of a step. Immutable, printable, comparable, JSON both ways."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated

from pydantic import ByteSize, PlainSerializer, TypeAdapter, ValidationError

from weightstream.errors import PlanError
from weightstream.plan.manifest import Manifest, UnitSpec
from weightstream.plan.ring import Extent, aligned, allocate, first_fills, refills


def human(nbytes: float) -> str:
    """Bytes for a person: `96.0MiB`."""
    return ByteSize(round(nbytes)).human_readable()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The schedule of a step.

    `resident` holds alias groups whose home is the device; `mapped` those that kernels read from host memory over the
    link (zero-copy). The others stream, from host memory or, those in `disk`, from files: unit u owns `extents[u]` of
    the ring; `first` are filled before the first step, `after[p]` once position p of `manifest.order` is released.
    `budget` is in bytes, None when a placement was asked for by other means; `step_s` is the predicted time of a step;
    extents start at multiples of `slot_nbytes` unless that is 0.
    """

    manifest: Manifest
    resident: Annotated[frozenset[str], PlainSerializer(sorted)]
    ring_nbytes: int
    extents: tuple[Extent, ...]
    first: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    budget: int | None = None
    slot_nbytes: int = 0
    step_s: float = 0.0
    mapped: Annotated[frozenset[str], PlainSerializer(sorted)] = frozenset()
    disk: Annotated[frozenset[str], PlainSerializer(sorted)] = frozenset()

    @classmethod
    def build(
        cls,
        manifest: Manifest,
        resident: frozenset[str],
        ring_nbytes: int,
        *,
        slot_nbytes: int = 0,
        budget: int | None = None,
        mapped: frozenset[str] = frozenset(),
    ) -> Plan:
        """The plan that follows from a choice of residents and a ring; see `ring.allocate` for `slot_nbytes`."""
        sizes = streamed_nbytes(manifest, resident | mapped)
        extents = allocate(manifest.order, sizes, ring_nbytes, slot_nbytes)
        return cls(
            manifest=manifest,
            resident=resident,
            ring_nbytes=max((e.offset + e.nbytes for e in extents), default=0),
            extents=extents,
            first=first_fills(manifest.order, extents),
            after=refills(manifest.order, extents),
            budget=budget,
            slot_nbytes=slot_nbytes,
            mapped=mapped,
        )

    def reordered(self, order: tuple[int, ...]) -> Plan:
        """The same homes and ring bytes, scheduled for another execution order."""
        manifest = replace(self.manifest, order=order)
        options = {"slot_nbytes": self.slot_nbytes, "budget": self.budget, "mapped": self.mapped}
        plan = Plan.build(manifest, self.resident, self.ring_nbytes, **options)  # type: ignore[arg-type]
        return replace(plan, ring_nbytes=self.ring_nbytes, step_s=self.step_s, disk=self.disk)

    def streamed(self, unit: int) -> dict[str, int]:
        """Alias groups of a unit that pass through the ring -> byte offset inside the unit's extent."""
        return dict(_layout(self.manifest.units[unit], self.resident | self.mapped))

    def streams(self, unit: int) -> bool:
        return self.extents[unit].nbytes > 0

    @cached_property
    def resident_nbytes(self) -> int:
        return sum(n for alias, n in self.manifest.aliases.items() if alias in self.resident)

    @cached_property
    def disk_nbytes(self) -> int:
        return sum(n for alias, n in self.manifest.aliases.items() if alias in self.disk)

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes of weights that do not live on the device."""
        return self.manifest.nbytes - self.resident_nbytes

    @property
    def host_nbytes(self) -> int:
        return self.offloaded_nbytes - self.disk_nbytes

    @cached_property
    def mapped_nbytes(self) -> int:
        return sum(n for alias, n in self.manifest.aliases.items() if alias in self.mapped)

    @property
    def device_nbytes(self) -> int:
        """Bytes of weights that the device holds: residents and the ring."""
        return self.resident_nbytes + self.ring_nbytes

    @cached_property
    def unit_nbytes(self) -> tuple[int, ...]:
        """Bytes that a fill of each unit moves."""
        aliases = self.manifest.aliases
        return tuple(sum(aliases[a] for a in self.streamed(u)) for u in range(len(self.manifest.units)))

    @cached_property
    def unit_disk_nbytes(self) -> tuple[int, ...]:
        """Bytes of these that are read from disk."""
        aliases, units = self.manifest.aliases, range(len(self.manifest.units))
        return tuple(sum(aliases[a] for a in self.streamed(u) if a in self.disk) for u in units)

    @cached_property
    def step_nbytes(self) -> int:
        """Bytes that a step in the steady state moves."""
        return sum(self.unit_nbytes[u] for fills in self.after for u in fills)

    @cached_property
    def step_disk_nbytes(self) -> int:
        """Bytes of these that are read from disk."""
        return sum(self.unit_disk_nbytes[u] for fills in self.after for u in fills)

    def summary(self) -> str:
        """The plan in one line."""
        total = human(self.manifest.nbytes)
        if not self.offloaded_nbytes:
            return f"everything fits: {total} resident, nothing streams"
        num = sum(self.streams(u) for u in range(len(self.manifest.units)))
        mapped = f" + {human(self.mapped_nbytes)} zero-copy" if self.mapped else ""
        disk = f", {human(self.step_disk_nbytes)} of it from disk" if self.disk else ""
        return (
            f"{human(self.resident_nbytes)} resident + {human(self.ring_nbytes)} ring{mapped} of {total}; "
            f"{num} units stream {human(self.step_nbytes)} per step{disk}"
        )

    def to_json(self) -> str:
        return _adapter().dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read a plan back; raises `PlanError` when the text is none."""
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            raise PlanError(f"not a plan: {error}") from error

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table()
        shares = ("resident", *(["zero-copy"] if self.mapped else []), "streams", *(["from disk"] if self.disk else []))
        for heading in ("unit", "tensors", *shares):
            table.add_column(heading, justify="left" if heading == "unit" else "right")
        for row in self._rows():
            table.add_row(*row)
        out = io.StringIO()
        Console(file=out, width=100, color_system=None, markup=False, emoji=False).print(table)
        predicted = f"predicted: {1e3 * self.step_s:.1f} ms per step"
        return f"{self.summary()}\n{out.getvalue().rstrip()}\n{predicted}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """One row per run of neighbouring units that look alike."""
        run: list[str] = []
        shown: tuple[str, ...] | None = None
        for index, unit in enumerate(self.manifest.units):
            streamed = self.unit_nbytes[index]
            mapped = sum(nbytes for alias, nbytes in unit.aliases().items() if alias in self.mapped)
            shares = [unit.nbytes - mapped - streamed, *([mapped] if self.mapped else []), streamed]
            if self.disk:
                shares.append(self.unit_disk_nbytes[index])
            cells = (str(len(unit.tensors)), *map(human, shares))
            if cells != shown and shown is not None:
                yield (_span(run), *shown)
                run = []
            run.append(unit.name or "(root)")
            shown = cells
        if shown is not None:
            yield (_span(run), *shown)


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} units)"


def _layout(unit: UnitSpec, resident: frozenset[str]) -> Iterator[tuple[str, int]]:
    cursor = 0
    for alias, nbytes in unit.aliases().items():
        if alias not in resident and nbytes:
            yield alias, cursor
            cursor += aligned(nbytes)


def streamed_nbytes(manifest: Manifest, resident: frozenset[str]) -> list[int]:
    """Bytes of ring that each unit needs: its groups that are not resident, each aligned."""
    return [sum(aligned(n) for a, n in unit.aliases().items() if a not in resident) for unit in manifest.units]


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)
