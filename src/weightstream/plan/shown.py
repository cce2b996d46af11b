"""A plan as text: its memory as a bar, its units as a table, and what is predicted. Formats; decides nothing."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Plan = Any  # of plan.plan, which imports this module

COLUMNS = 100
_BAR = 88
# Each its own fill, so that the bar can be read without colour.
_FILLS = (
    *(("█", "blue"), ("▓", "magenta"), ("▚", "green")),
    *(("▒", "cyan"), ("░", "yellow"), ("·", "bright_black")),
)


def human(nbytes: float) -> str:
    """Bytes for a person: `96.0MiB`."""
    return ByteSize(round(nbytes)).human_readable()


def per_second(number: float, unit: str = "B") -> str:
    """A rate for a person: `55.2 GB/s`, `684.0 TFLOP/s`."""
    return ByteSize(round(number)).human_readable(decimal=True, separator=" ")[:-1] + f"{unit}/s"


def milliseconds(seconds: float) -> str:
    """Seconds for a person: `12.5 ms`, from 10 s on `13.9 s`."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 or not seconds else f"{1e6 * seconds:.3g} us"


def workload(plan: Plan) -> str:
    at = plan.workload
    return f"batch {at.batch}, tokens {at.tokens}, context {at.context}" if at else ""


def text(plan: Plan) -> str:
    """The plan in one line, the table of its units, and what is predicted."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=COLUMNS, color_system=None, markup=False, emoji=False).print(table(plan))
    predicted = "\n".join(f"{label}: {value}" for label, value in predictions(plan).items())
    return f"{plan.summary()}\n{out.getvalue().rstrip()}\n{predicted}"


def grid(*headings: str, left: Container[str]) -> Table:
    """A table without rows; columns of numbers to the right."""
    from rich.table import Table

    shown = Table()
    for heading in headings:
        is_left = heading in left
        shown.add_column(heading, justify="left" if is_left else "right", no_wrap=not is_left, overflow="fold")
    return shown


def table(plan: Plan) -> Table:
    """A row per kind of unit: how many there are, and the bytes of one of them by where they live."""
    from rich.text import Text

    shown = grid("unit", "units", *["plain"] * bool(plan.manifest.codes), *_places(plan), left=("unit",))
    shown.columns[0].no_wrap, shown.columns[0].overflow = True, "ellipsis"
    for names, cells in _rows(plan):
        shown.add_row(Text(_span(names)), str(len(names)), *cells)
    return shown


def _places(plan: Plan) -> list[str]:
    return ["resident", *["zero-copy"] * bool(plan.mapped), "streams", *["from disk"] * bool(plan.disk)]


def _rows(plan: Plan) -> list[tuple[list[str], list[str]]]:
    """Names and cells of each kind of unit: names differ in numbers alone, with the same bytes in the same places.

    The same in plain form: of coded ones, whose bytes are never quite the same, the mean is shown.
    """
    kinds: dict[tuple[str, ...], list[tuple[str, list[int]]]] = {}
    for unit in plan.manifest.units:
        coded, plain = (list(_shares(plan, unit, sizes)) for sizes in (plan.manifest.aliases, plan.manifest.spans))
        kind = re.sub(r"\d+", "#", unit.name), *map(human, plain), *map(str, {t.bits for t in unit.tensors})
        whole = [sum(plain)] * bool(plan.manifest.codes)
        kinds.setdefault(kind, []).append((unit.name or "(root)", [*whole, *coded]))
    cells = (
        [human(sum(sizes) / len(found)) for sizes in zip(*(c for _, c in found), strict=True)]
        for found in kinds.values()
    )
    return [([name for name, _ in found], shown) for found, shown in zip(kinds.values(), cells, strict=True)]


def _shares(plan: Plan, unit: Any, sizes: Mapping[str, int]) -> Iterator[int]:
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
    from rich.text import Text

    names = ("resident", "ring", "buffer", "cache", "activations", "free")
    sizes = [plan.resident_nbytes, plan.ring_nbytes, plan.buffer_nbytes, plan.cache_nbytes, plan.activation_nbytes]
    sizes.append(max(0, (plan.budget or 0) - plan.device_nbytes))
    total = sum(sizes)
    unit, size = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    bar, legend = Text(), list[Text]()
    for name, nbytes, num, (fill, colour) in zip(names, sizes, _cells(sizes, _BAR), _FILLS, strict=True):
        if nbytes:
            bar.append(fill * num, colour)
            legend.append(Text.assemble((fill, colour), f" {name} {_short(nbytes / size)}"))
    return bar, Text("  ").join(legend), f"{_short(total / size)} {unit}"


def _short(number: float) -> str:
    """Three digits, so that six of them fit a line."""
    return f"{number:.{sum(number < limit for limit in (10, 100))}f}"


def _cells(sizes: Sequence[int], width: int) -> list[int]:
    """How many of `width` cells each size takes: what is there takes one at least, the largest gives way."""
    total = max(1, sum(sizes))
    cells = [max(1, round(width * size / total)) if size else 0 for size in sizes]
    cells[cells.index(max(cells))] += width - sum(cells)
    return cells


def coded(plan: Plan) -> str:
    """What is coded, in words: `9.1GiB in place of 13.0GiB, in the 3-bit code`; empty where nothing is."""
    codes = plan.manifest.codes
    if not codes:
        return ""
    nbytes, span = sum(n for _, n in codes.values()), sum(plan.manifest.spans[alias] for alias in codes)
    return f"{human(nbytes)} in place of {human(span)}, in the {code(plan)} code"


def code(plan: Plan) -> str:
    """The codes in use: `3-bit`, `3-bit and 4-bit`; empty where nothing is coded."""
    return " and ".join(f"{bits}-bit" for bits in sorted({bits for bits, _ in plan.manifest.codes.values()}))


def predictions(plan: Plan) -> dict[str, str]:
    """What is predicted of a step, as lines with a label each."""
    at = f", {rate(plan)} tokens/s ({workload(plan)})" if plan.workload else ""
    lines = {"predicted": f"{milliseconds(plan.step_s)} per step{at}"}
    if plan.manifest.codes:
        lines["coded"] = f"{coded(plan)}; decoding takes {milliseconds(plan.decode_s)} of a step's compute"
    busy = {"compute": plan.compute_s, "link": plan.copy_s} | ({"disk": plan.disk_s} if plan.disk else {})
    if any(busy.values()):
        others = ", ".join(f"{name} {milliseconds(s)}" for name, s in busy.items() if name != plan.limit)
        lines["limit"] = f"{plan.limit}, busy {milliseconds(busy[plan.limit])} of a step; {others}"
    return lines


def numbers(plan: Plan) -> dict[str, Any]:
    """The plan's bytes and predicted seconds."""
    names = ["budget", "resident_nbytes", "ring_nbytes", "buffer_nbytes", "device_nbytes", "activation_nbytes"]
    names += ["cache_nbytes", "host_nbytes", "mapped_nbytes", "disk_nbytes", "step_nbytes", "step_disk_nbytes"]
    names += ["step_s", "compute_s", "decode_s", "copy_s", "disk_s", "limit"]
    found = {name: getattr(plan, name) for name in names} | {"machine": plan.machine or None}
    found |= {"nbytes": plan.manifest.decoded_nbytes, "held_nbytes": plan.manifest.nbytes, "code": code(plan) or None}
    return found | {"tokens_per_s": tokens_per_s(plan)}


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


def tokens_per_s(plan: Plan) -> float | None:
    """New tokens per second of all sequences together."""
    at = plan.workload
    return at.batch * at.tokens / plan.step_s if at and plan.step_s else None


def rate(plan: Plan) -> str:
    """Tokens per second for a person, with three digits at least."""
    found = tokens_per_s(plan) or 0.0
    return f"{found:.3g}" if found < 1 else _short(found) if found < 1000 else f"{found:,.0f}"
