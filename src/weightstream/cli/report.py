"""A plan as tables for people and as numbers for scripts: its memory as a bar, its units by kind. Decides nothing."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from weightstream.cli.screen import grid
from weightstream.plan.amounts import human, short
from weightstream.plan.manifest import UnitSpec
from weightstream.plan.plan import Plan

_BAR = 88
# Each its own fill, so that the bar can be read without colour.
_FILLS = (
    *(("█", "blue"), ("▓", "magenta"), ("▚", "green")),
    *(("▒", "cyan"), ("░", "yellow"), ("·", "bright_black")),
)


def table(plan: Plan) -> Table:
    """A row per kind of unit: how many there are, and the bytes of one of them by where they live."""
    shown = grid("unit", "units", *["plain"] * bool(plan.manifest.codes), *_places(plan), align_left=("unit",))
    shown.columns[0].no_wrap, shown.columns[0].overflow = True, "ellipsis"
    for names, cells in _rows(plan):
        shown.add_row(Text(_span(names)), str(len(names)), *cells)
    return shown


def _places(plan: Plan) -> list[str]:
    return ["resident", *["zero-copy"] * bool(plan.mapped), "streams", *["from disk"] * bool(plan.disk)]


def _rows(plan: Plan) -> Iterator[tuple[list[str], list[str]]]:
    """Names and cells of each kind of unit: names differ in numbers alone, with the same bytes in the same places.

    The same in plain form: of coded ones, whose bytes are never quite the same, the mean is shown.
    """
    kinds: defaultdict[tuple[str, ...], list[tuple[str, list[int]]]] = defaultdict(list)
    for unit in plan.manifest.units:
        held, plain = (list(_shares(plan, unit, sizes)) for sizes in (plan.manifest.aliases, plan.manifest.spans))
        kind = re.sub(r"\d+", "#", unit.name), *map(human, plain), *map(str, {t.bits for t in unit.tensors})
        kinds[kind].append((unit.name or "(root)", [*[sum(plain)] * bool(plan.manifest.codes), *held]))
    for units in kinds.values():
        columns = zip(*(sizes for _, sizes in units), strict=True)
        yield [name for name, _ in units], [human(sum(sizes) / len(units)) for sizes in columns]


def _shares(plan: Plan, unit: UnitSpec, sizes: Mapping[str, int]) -> Iterator[int]:
    """The bytes of a unit in each of the places."""
    aliases = unit.aliases().keys()
    streams = aliases - plan.resident - plan.mapped
    groups = {"resident": aliases & plan.resident, "zero-copy": aliases & plan.mapped, "streams": streams}
    groups["from disk"] = streams & plan.disk
    yield from (sum(sizes[alias] for alias in groups[place]) for place in _places(plan))


def _span(names: list[str]) -> str:
    """`layers.0…7.mlp`."""
    last = iter(re.findall(r"\d+", names[-1]))
    return re.sub(r"\d+", lambda n: n[0] if n[0] == (end := next(last)) else f"{n[0]}…{end}", names[0])


def memory(plan: Plan) -> tuple[Text, Text, str]:
    """The device's memory that the plan speaks of, as a bar, its legend and all of it."""
    names = ("resident", "ring", "buffer", "cache", "activations", "free")
    sizes = [plan.resident_nbytes, plan.ring_nbytes, plan.buffer_nbytes, plan.cache_nbytes, plan.activation_nbytes]
    sizes.append(max(0, (plan.budget or 0) - plan.device_nbytes))
    total = sum(sizes)
    unit, size = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    bar, legend = Text(), list[Text]()
    for name, nbytes, num, (fill, colour) in zip(names, sizes, _cells(sizes, _BAR), _FILLS, strict=True):
        if nbytes:
            bar.append(fill * num, colour)
            legend.append(Text.assemble((fill, colour), f" {name} {short(nbytes / size)}"))
    return bar, Text("  ").join(legend), f"{short(total / size)} {unit}"


def _cells(sizes: Sequence[int], width: int) -> list[int]:
    """How many of `width` cells each size takes: what is there takes one at least, the largest gives way."""
    total = max(1, sum(sizes))
    cells = [max(1, round(width * size / total)) if size else 0 for size in sizes]
    cells[cells.index(max(cells))] += width - sum(cells)
    return cells


def parameters(plan: Plan) -> tuple[int, str]:
    """How many numbers the model's weights are, tied ones once, and the dtype that most of them have."""
    sizes: dict[str, tuple[int, str]] = {}
    for tensor in plan.manifest.tensors():
        found = math.prod(tensor.shape), tensor.dtype.removeprefix("torch.")
        sizes[tensor.alias] = max(sizes.get(tensor.alias, found), found)  # the largest of those that share bytes
    counted: Counter[str] = Counter()
    for num, kind in sizes.values():
        counted[kind] += num
    return counted.total(), max(counted, key=lambda kind: counted[kind], default="nothing")
