"""The plan: the home of every weight and the schedule of a step. Immutable, printable, comparable, JSON both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainSerializer, TypeAdapter, ValidationError

from weightstream.errors import PlanError
from weightstream.plan.manifest import Basis, Manifest, Workload
from weightstream.plan.report import PlanReport
from weightstream.plan.schedule import FORWARD, RingExtent, Schedule, aligned, allocate
from weightstream.plan.speculation import PassSeconds
from weightstream.plan.units import human, milliseconds, rate, rough_seconds, roughly
from weightstream.settings.speeds import Target

_MOSTLY_WAITS = 1.5  # times that of the busiest resource: a step that takes longer waits for a third of its time
_LESS = 0.9  # share of an eager step's time below which the time in a CUDA graph is printed, too
_ORIGINS: Mapping[Basis, str] = MappingProxyType(
    {
        "measured": "measured",
        "measured under load": "measured under load, so roughly",
        "data sheet": "assumed from the data sheet",
        "data sheet and measurements": "assumed from the data sheet and from measurements of such a GPU",
        "assumed": "whose rates are assumed",
        "steps": "as measured in steps of this model",
    }
)

# Fields that determine what a step does. The others are predictions, or record the request.
ACTS = (
    *("resident", "mapped", "disk", "ring_nbytes", "extents", "first", "after"),
    *("cached", "num_slots", "slots_nbytes", "shared_nbytes", "ahead"),
    *("what", "schedules"),
)


@dataclass(frozen=True, kw_only=True)
class Plan(PlanReport):
    """The homes of all weights, the schedule of a step, and its predicted time.

    Weights that are not resident, mapped or cached stream through the ring, from host memory or from disk. Compressed
    weights are decompressed, before their unit computes, into one buffer that all units share.

    Attributes:
        manifest: the units, which of their weights are compressed, and the order of a step.
        resident: alias groups whose home is the device.
        ring_nbytes: bytes of the ring.
        extents: for each unit, the bytes of the ring that belong to it.
        first: units that are filled before the first step.
        after: for each position of `manifest.order`, the units that are filled once it is released.
        budget: bytes of device memory for weights; None: the classic settings chose the placement, or all is resident.
        slot_nbytes: extents start at multiples of this; 0: at any aligned byte.
        by_ends: extents lie at the two ends of the ring in turn.
        step_s: predicted seconds of an eager step.
        graph_s: predicted seconds of a step in a CUDA graph, in which the host launches nothing.
        compute_s: seconds of a step in which the device computes, or the host launches if that takes longer.
        graph_compute_s: seconds of a step in a CUDA graph in which the device computes.
        decode_s: seconds of a step in which the device decompresses; part of both.
        copy_s: seconds of a step in which the link is busy.
        disk_s: seconds of a step in which the disk is busy.
        workload: the step of a language model that is predicted; None for any other model.
        activation_nbytes: bytes of activations at most; 0: unknown.
        cache_nbytes: bytes of the KV cache.
        trained_nbytes: bytes of adapters that are no weights of the model yet, of gradients and of the optimizer.
        machine: name of the machine that the prediction is for; "": its rates are assumed.
        basis: where the rates of the prediction come from.
        on_cpu: the device is the CPU, so no step is in a CUDA graph.
        in_graphs: `generate` runs such steps in CUDA graphs.
        mapped: alias groups in host memory that kernels read over the link (zero-copy).
        disk: alias groups that stream from files.
        cached: alias groups of expert stacks in host memory, of which the device holds some rows in slots. A step
            that reads more rows than there are slots copies whole stacks into the buffer.
        num_slots: slots for each cached stack.
        slots_nbytes: bytes of the slots of all units.
        shared_nbytes: bytes of the buffer that are slots, too. Rows that a step reads in waves pass through the rest. A
            step that reads a whole stack overwrites these slots.
        ahead: rows that a step in a CUDA graph prefetches for the unit that follows.
        found_share: predicted share of a step's rows that are in slots.
        hit_curve: name of the model whose measured hit rates that assumes; "": nothing is cached.
        counted_rows: rows that caches of this model have counted, by which the measured rates are corrected.
        fetched_nbytes: predicted bytes that a step in a CUDA graph fetches into slots.
        passes: predicted seconds of passes of several tokens; empty: none are planned.
        what: the kind of step that `manifest.order` is the order of, and that is predicted.
        schedules: of other kinds of step, over the same extents. A kind without a schedule has that of `what`.
    """

    NUMBERS: ClassVar[tuple[str, ...]] = (
        *("budget", "resident_nbytes", "ring_nbytes", "buffer_nbytes", "device_nbytes", "activation_nbytes"),
        *("cache_nbytes", "trained_nbytes", "host_nbytes", "mapped_nbytes", "disk_nbytes", "step_nbytes"),
        "step_disk_nbytes",
        *("step_s", "graph_s", "compute_s", "graph_compute_s", "decode_s", "copy_s", "disk_s", "limit"),
        *("run_s", "tokens_per_s", "basis", "on_cpu", "in_graphs"),
        *("num_slots", "slots_nbytes", "ahead", "found_share", "counted_rows", "fetched_nbytes"),
    )

    manifest: Manifest
    resident: Annotated[frozenset[str], PlainSerializer(sorted)]
    ring_nbytes: int
    extents: tuple[RingExtent, ...]
    first: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    budget: int | None = None
    slot_nbytes: int = 0
    by_ends: bool = False
    step_s: float = 0.0
    graph_s: float = 0.0
    compute_s: float = 0.0
    graph_compute_s: float = 0.0
    decode_s: float = 0.0
    copy_s: float = 0.0
    disk_s: float = 0.0
    workload: Workload | None = None
    activation_nbytes: int = 0
    cache_nbytes: int = 0
    trained_nbytes: int = 0
    machine: str = ""
    basis: Basis = "assumed"
    on_cpu: bool = False
    in_graphs: bool = False
    mapped: Annotated[frozenset[str], PlainSerializer(sorted)] = frozenset()
    disk: Annotated[frozenset[str], PlainSerializer(sorted)] = frozenset()
    cached: Annotated[frozenset[str], PlainSerializer(sorted)] = frozenset()
    num_slots: int = 0
    slots_nbytes: int = 0
    shared_nbytes: int = 0
    ahead: int = 0
    found_share: float = 0.0
    hit_curve: str = ""
    counted_rows: int = 0
    fetched_nbytes: int = 0
    passes: tuple[PassSeconds, ...] = ()
    what: str = FORWARD
    schedules: tuple[Schedule, ...] = ()

    @classmethod
    def build(
        cls,
        manifest: Manifest,
        resident: frozenset[str],
        ring_nbytes: int,
        *,
        slot_nbytes: int = 0,
        by_ends: bool = False,
        what: str = FORWARD,
    ) -> Plan:
        """The plan for these residents and a ring of `ring_nbytes`; for other arguments see `schedule.allocate`.

        `what`: the kind of step that `manifest.order` is the order of.
        """
        sizes = streamed_nbytes(manifest, resident)
        extents = allocate(manifest.order, sizes, ring_nbytes, slot_nbytes, by_ends=by_ends)
        schedule = Schedule.of(what, manifest.order, extents)
        return cls(
            manifest=manifest,
            resident=resident,
            ring_nbytes=max((e.offset + e.nbytes for e in extents), default=0),
            extents=extents,
            first=schedule.first,
            after=schedule.after,
            slot_nbytes=slot_nbytes,
            by_ends=by_ends,
            what=what,
        )

    def reordered(self, order: tuple[int, ...]) -> Plan:
        """The same homes and ring bytes, scheduled for another execution order."""
        sizes = streamed_nbytes(self.manifest, self.placed)
        extents = allocate(order, sizes, self.ring_nbytes, self.slot_nbytes, by_ends=self.by_ends)
        schedule = Schedule.of(self.what, order, extents)
        return replace(
            self,
            manifest=replace(self.manifest, order=order),
            extents=extents,
            first=schedule.first,
            after=schedule.after,
            schedules=tuple(Schedule.of(other.what, other.order, extents) for other in self.schedules),
        )

    def schedule(self, what: str) -> Schedule:
        """The schedule of a kind of step: its own, or else that of `self.what`."""
        own = next((schedule for schedule in self.schedules if schedule.what == what), None)
        return own or Schedule(what=self.what, order=self.manifest.order, first=self.first, after=self.after)

    def scheduled(self, what: str, order: tuple[int, ...]) -> Plan:
        """The same homes and extents, with this order of units in steps of the kind `what`."""
        schedule = Schedule.of(what, order, self.extents)
        if what == self.what:
            manifest = replace(self.manifest, order=order)
            return replace(self, manifest=manifest, first=schedule.first, after=schedule.after)
        others = (other for other in self.schedules if other.what != what)
        return replace(self, schedules=(*others, schedule))

    def acts_as(self, other: Plan) -> bool:
        """Whether both plans have the same placement and the same schedule; predictions may differ."""
        mine, theirs = self.manifest, other.manifest
        if mine.units != theirs.units or any(getattr(self, name) != getattr(other, name) for name in ACTS):
            return False
        return mine.order == theirs.order or not self.opened

    def has_memory_of(self, other: Plan) -> bool:
        """Whether both plans have all weights at the same addresses; their schedules may differ."""
        names = set(ACTS) - {"first", "after", "what", "schedules"}
        return self.manifest.units == other.manifest.units and all(
            getattr(self, name) == getattr(other, name) for name in names
        )

    @cached_property
    def placed(self) -> frozenset[str]:
        """Alias groups that do not pass through the ring."""
        return self.resident | self.mapped | self.cached

    def streamed(self, unit: int) -> dict[str, int]:
        """Alias groups of a unit that pass through the ring -> byte offset inside the unit's extent."""
        aliases = self.manifest.units[unit].aliases()
        return _spread({alias: n for alias, n in aliases.items() if alias not in self.placed and n})

    def hosted(self, unit: int) -> dict[str, int]:
        """Alias groups of a unit in host memory or on disk -> byte offset: as in the extent, then the cached ones."""
        aliases = self.manifest.units[unit].aliases()
        return _spread(
            {alias: aliases[alias] for alias in (*self.streamed(unit), *(a for a in aliases if a in self.cached))}
        )

    def streams(self, unit: int) -> bool:
        return self.extents[unit].nbytes > 0

    def decoded(self, unit: int) -> dict[str, int]:
        """Alias groups of a unit that are compressed or cached -> byte offset inside the buffer."""
        return _spread(self._in_buffer(unit))

    def _in_buffer(self, unit: int) -> dict[str, int]:
        if not self.cached:
            return self.manifest.decoded[unit]
        aliases = self.manifest.units[unit].aliases()
        decoded = self.manifest.decoded[unit]
        return decoded | {a: n for a, n in aliases.items() if a in self.cached and a not in decoded}

    def opens(self, unit: int) -> bool:
        """Whether the unit has to be opened before it computes: it streams, or uses the buffer."""
        return self.streams(unit) or bool(self._in_buffer(unit))

    def opened_units(self, what: str = FORWARD) -> tuple[int, ...]:
        """The order of the units that open in a step of this kind."""
        return tuple(unit for unit in self.schedule(what).order if self.opens(unit))

    @cached_property
    def opened(self) -> frozenset[str]:
        """Alias groups whose tensors do not show their home while their unit computes: streamed, compressed, cached."""
        streamed = (alias for alias, nbytes in self.manifest.aliases.items() if nbytes and alias not in self.placed)
        return frozenset(streamed).union(self.manifest.codes, self.cached)

    @property
    def moving(self) -> frozenset[str]:
        """Alias groups that stream in several units, and so have no fixed address."""
        users = self.manifest.users
        return frozenset(a for a in self.manifest.aliases if len(users[a]) > 1 and a not in self.placed)

    @cached_property
    def num_shown(self) -> tuple[int, ...]:
        """For each unit, the number of tensors that show the ring or the buffer while it computes."""
        return num_shown(self.manifest, self.resident | self.mapped)  # cached groups show the buffer

    @cached_property
    def buffer_nbytes(self) -> int:
        """Bytes of the buffer: for decompressed weights, and for whole cached stacks where a step reads all of them."""
        return max((sum(map(aligned, self._in_buffer(u).values())) for u in range(len(self.manifest.units))), default=0)

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

    @property
    def own_buffer_nbytes(self) -> int:
        """Bytes of the buffer that are no slots."""
        return self.buffer_nbytes - self.shared_nbytes

    @cached_property
    def mapped_nbytes(self) -> int:
        return sum(n for alias, n in self.manifest.aliases.items() if alias in self.mapped)

    @property
    def device_nbytes(self) -> int:
        """Bytes of weights that the device holds: residents, the ring, the buffer and slots."""
        return self.resident_nbytes + self.ring_nbytes + self.own_buffer_nbytes + self.slots_nbytes

    @cached_property
    def unit_nbytes(self) -> tuple[int, ...]:
        """Bytes that a fill of each unit moves."""
        return tuple(by_unit(self.manifest, {a: n for a, n in self.manifest.aliases.items() if a not in self.placed}))

    @cached_property
    def unit_disk_nbytes(self) -> tuple[int, ...]:
        """Bytes that a fill of each unit reads from disk."""
        read = self.disk - self.placed
        return tuple(by_unit(self.manifest, {a: n for a, n in self.manifest.aliases.items() if a in read}))

    @cached_property
    def step_nbytes(self) -> int:
        """Bytes that a step in the steady state moves, of the kind `what`."""
        return self.step_nbytes_of(self.what)

    def step_nbytes_of(self, what: str) -> int:
        """Bytes that a step of this kind in the steady state moves."""
        return sum(self.unit_nbytes[unit] for unit in self.schedule(what).fills())

    @cached_property
    def step_disk_nbytes(self) -> int:
        """Bytes that a step in the steady state reads from disk."""
        return sum(self.unit_disk_nbytes[u] for fills in self.after for u in fills)

    @property
    def run_compute_s(self) -> float:
        """Seconds of a step as `generate` runs it in which it computes."""
        return self.graph_compute_s if self.in_graphs else self.compute_s

    @property
    def limit(self) -> Literal["compute", "link", "disk"]:
        """The resource that is busy longest in a step as `generate` runs it."""
        if self.disk_s > max(self.run_compute_s, self.copy_s):
            return "disk"
        return "link" if self.copy_s > self.run_compute_s else "compute"

    @property
    def decoded_nbytes(self) -> int:
        """Uncompressed bytes of all weights."""
        return self.manifest.decoded_nbytes

    @property
    def beside_nbytes(self) -> int:
        """Bytes of activations, cache, and of adapters with gradients and optimizer."""
        return self.activation_nbytes + self.cache_nbytes + self.trained_nbytes

    @property
    def run_s(self) -> float:
        """Predicted seconds of a step as `generate` runs it: in a CUDA graph if it can, else eager."""
        return self.graph_s if self.in_graphs else self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens per second of all sequences together."""
        return self.num_tokens / self.run_s if self.num_tokens and self.run_s else None

    @property
    def num_tokens(self) -> int:
        """New tokens of a step; 0: the model is none of language."""
        return self.workload.num_tokens if self.workload else 0

    @property
    def is_measured(self) -> bool:
        """Whether the rates of the machine, or steps of the plan, were measured."""
        return self.basis in ("measured", "measured under load", "steps")

    @property
    def is_rough(self) -> bool:
        """Whether predicted times may be wrong by tens of percent."""
        return self.basis != "steps" and (self.on_cpu or self.basis != "measured")

    @property
    def machine_text(self) -> str:
        device = "the CPU" if self.on_cpu else "a GPU"
        name = f"{device} ({self.machine})" if self.machine and self.on_cpu else self.machine or device
        return f"{name}, {_ORIGINS[self.basis]}"

    def speed_text(self, target: Target) -> str:
        """The predicted speed, in the unit of a target."""
        if target.seconds is not None:
            return f"{self.seconds_text(self.run_s)} per step"
        return f"{self.rate_text(self.tokens_per_s or 0.0)} tokens/s"

    def seconds_text(self, seconds: float) -> str:
        """Predicted seconds with as many digits as they deserve."""
        return rough_seconds(seconds) if self.is_rough else milliseconds(seconds)

    def rate_text(self, per_s: float) -> str:
        """A predicted rate with as many digits as it deserves."""
        return roughly(per_s) if self.is_rough else rate(per_s)

    def summary(self) -> str:
        """The plan in one line."""
        total, buffer = human(self.manifest.nbytes), ""
        if self.manifest.codes:
            total += f" (compressed without loss from {human(self.manifest.decoded_nbytes)})"
            buffer = f" + {human(self.own_buffer_nbytes)} decode buffer"
        elif self.cached:
            buffer = f" + {human(self.own_buffer_nbytes)} buffer"
        if not self.offloaded_nbytes:
            return f"everything fits: {total} resident{buffer}, nothing streams"
        num = sum(extent.nbytes > 0 for extent in self.extents)
        mapped = f" + {human(self.mapped_nbytes)} zero-copy" if self.mapped else ""
        mapped += f" + {human(self.slots_nbytes)} slots for experts" if self.cached else ""
        disk = f", {human(self.step_disk_nbytes)} of it from disk" if self.disk else ""
        return (
            f"{human(self.resident_nbytes)} resident + {human(self.ring_nbytes)} ring{buffer}{mapped} of {total}; "
            f"{num} units stream {human(self.step_nbytes)} per step{disk}"
        )

    def predictions(self) -> dict[str, str]:
        seconds = self.seconds_text
        at = f", {self.rate_text(self.tokens_per_s or 0.0)} tokens/s ({self.workload})" if self.workload else ""
        in_graph = " in a CUDA graph" * self.in_graphs
        lines = {"predicted": f"{seconds(self.run_s)} per step{in_graph}{at}{self._other_time()}"}
        if codes := self.manifest.codes:
            nbytes, span = sum(codes.values()), sum(self.manifest.spans[alias] for alias in codes)
            coded = f"{human(nbytes)} compressed without loss from {human(span)}"
            lines["weights"] = f"{coded}; decoding takes {seconds(self.decode_s)} of a step's compute"
        if self.cached:
            ahead = f", up to {self.ahead} ahead for each layer" if self.ahead else ""
            counted = f", corrected by {self.counted_rows:,} counted ones" if self.counted_rows else ""
            source = f" (hits as measured on {self.hit_curve}{counted})" if self.hit_curve else ""
            lines["experts"] = (
                f"{self.num_slots} slots for those of a layer, {human(self.slots_nbytes)} in all; a step finds about "
                f"{100 * self.found_share:.0f} % there{source} and fetches {human(self.fetched_nbytes)}{ahead}"
            )
        if len(self.passes) > 1:
            lines["passes"] = _passes_text(self.passes, on_cpu=self.on_cpu)
        busy = {"compute": self.run_compute_s, "link": self.copy_s} | ({"disk": self.disk_s} if self.disk else {})
        if any(busy.values()):
            others = ", ".join(f"{name} {seconds(s)}" for name, s in busy.items() if name != self.limit)
            lines["limit"] = f"{self.limit}, busy {seconds(busy[self.limit])} of a step; {others}"
            if self.run_s > _MOSTLY_WAITS * busy[self.limit] and not self.on_cpu:  # there copies slow compute
                lines["limit"] += "; the rest are waits between units"
        return lines

    def _other_time(self) -> str:
        """Text to append to `run_s`: the time of the other kind of step, eager or in a CUDA graph, if that differs."""
        if not self.in_graphs:
            return "" if self.on_cpu else in_a_graph(self.graph_s, self.step_s, self.seconds_text)
        return f"; {self.seconds_text(self.step_s)} eager" if self.graph_s < _LESS * self.step_s else ""

    def numbers(self) -> dict[str, Any]:
        return {
            **super().numbers(),
            "nbytes": self.manifest.decoded_nbytes,
            "held_nbytes": self.manifest.nbytes,
            "machine": self.machine or None,
            "hit_curve": self.hit_curve or None,
            "compressed_nbytes": sum(self.manifest.codes.values()),
            "passes": [asdict(each) for each in self.passes],
        }

    def to_json(self) -> str:
        """The plan as text, which `from_json` reads."""
        return _adapter().dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The plan in a text of `to_json`; raises `PlanError` if the text is not a plan."""
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            raise PlanError(f"not a plan: {error}") from error


def _passes_text(passes: Sequence[PassSeconds], *, on_cpu: bool) -> str:
    """The time of passes of several tokens, compared with that of one token; on a GPU in a graph."""
    one_s = passes[0].graph_s or 1.0
    ratios = ", ".join(f"{each.tokens} tokens {each.graph_s / one_s:.2f} x" for each in passes[1:])
    return f"of several tokens take, compared with one token{'' if on_cpu else ', in a CUDA graph'}: {ratios}"


def in_a_graph(graph_s: float, step_s: float, text: Callable[[float], str] = milliseconds) -> str:
    """Text to append to the time of an eager step: the time in a CUDA graph, if that is clearly less; else empty."""
    return f"; {text(graph_s)} in a CUDA graph" if 0 < graph_s < _LESS * step_s else ""


def _spread(sizes: Mapping[str, int]) -> dict[str, int]:
    """The byte offsets of these groups, laid out one after another, aligned."""
    return dict(zip(sizes, accumulate(map(aligned, sizes.values()), initial=0), strict=False))


def buffer_nbytes(manifest: Manifest) -> int:
    """Bytes of a buffer that holds the compressed weights of any one unit, decompressed."""
    return max((sum(map(aligned, sizes.values())) for sizes in manifest.decoded), default=0)


def num_shown(manifest: Manifest, placed: frozenset[str]) -> tuple[int, ...]:
    """For each unit, the number of tensors that stream, as all do that are not `placed`, or are decompressed."""
    return tuple(num + sum([alias not in placed for alias in aliases]) for num, aliases in manifest.shown)


def streamed_nbytes(manifest: Manifest, resident: frozenset[str]) -> list[int]:
    """Bytes of the ring that each unit needs: of its groups that are not resident, each aligned."""
    return by_unit(manifest, {a: aligned(n) for a, n in manifest.aliases.items() if a not in resident})


def by_unit(manifest: Manifest, nbytes: Mapping[str, int]) -> list[int]:
    """The bytes of each unit, from the bytes of alias groups."""
    totals = [0] * len(manifest.units)
    for alias, num in nbytes.items():
        for unit in manifest.users[alias]:
            totals[unit] += num
    return totals


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)
