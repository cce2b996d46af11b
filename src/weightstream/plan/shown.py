"""A plan as text: its memory as a bar, its units as a table, and what is predicted. Formats; decides nothing."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Plan = Any  # of plan.plan, which imports this module

COLUMNS = 100
_BAR = 88
# Each its own fill, so that the bar can be read without colour.
_FILLS = (("█", "blue"), ("▓", "magenta"), ("▒", "cyan"), ("░", "yellow"), ("·", "bright_black"))


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

    shares = ["resident", *["zero-copy"] * bool(plan.mapped), "streams", *["from disk"] * bool(plan.disk)]
    shown = grid("unit", "units", *shares, left=("unit",))
    shown.columns[0].no_wrap, shown.columns[0].overflow = True, "ellipsis"
    for names, cells in _rows(plan):
        shown.add_row(Text(_span(names)), str(len(names)), *cells)
    return shown


def _rows(plan: Plan) -> list[tuple[list[str], list[str]]]:
    """Names and cells of each kind of unit: names differ in numbers alone, with the same bytes in the same places."""
    kinds: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for index, unit in enumerate(plan.manifest.units):
        streamed = plan.unit_nbytes[index]
        mapped = sum(nbytes for alias, nbytes in unit.aliases().items() if alias in plan.mapped)
        shares = [unit.nbytes - mapped - streamed, *[mapped] * bool(plan.mapped), streamed]
        shares += [plan.unit_disk_nbytes[index]] * bool(plan.disk)
        cells = tuple(map(human, shares))
        alike = kinds.setdefault(re.sub(r"\d+", "#", unit.name), {})
        alike.setdefault(cells, []).append(unit.name or "(root)")
    return [(names, list(cells)) for alike in kinds.values() for cells, names in alike.items()]


def _span(names: list[str]) -> str:
    """`layers.0…7.mlp`."""
    last = iter(re.findall(r"\d+", names[-1]))
    return re.sub(r"\d+", lambda n: n[0] if n[0] == (end := next(last)) else f"{n[0]}…{end}", names[0])


def memory(plan: Plan) -> tuple[Text, Text]:
    """The device's memory that the plan speaks of, as a bar and its legend."""
    from rich.text import Text

    names = ("resident", "ring", "cache", "activations", "free")
    sizes = [plan.resident_nbytes, plan.ring_nbytes, plan.cache_nbytes, plan.activation_nbytes]
    sizes.append(max(0, (plan.budget or 0) - plan.device_nbytes))
    total = sum(sizes)
    unit, size = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    bar, legend = Text(), Text()
    for name, nbytes, num, (fill, colour) in zip(names, sizes, _cells(sizes, _BAR), _FILLS, strict=True):
        if nbytes:
            bar.append(fill * num, colour)
            legend.append(fill, colour).append(f" {name} {_short(nbytes / size)}  ")
    return bar, legend.append(f"= {_short(total / size)} {unit}")


def _short(number: float) -> str:
    """Three digits, so that five of them fit a line."""
    return f"{number:.{sum(number < limit for limit in (10, 100))}f}"


def _cells(sizes: Sequence[int], width: int) -> list[int]:
    """How many of `width` cells each size takes: what is there takes one at least, the largest gives way."""
    total = max(1, sum(sizes))
    cells = [max(1, round(width * size / total)) if size else 0 for size in sizes]
    cells[cells.index(max(cells))] += width - sum(cells)
    return cells


def predictions(plan: Plan) -> dict[str, str]:
    """What is predicted of a step, as lines with a label each."""
    at = f", {rate(plan)} tokens/s ({workload(plan)})" if plan.workload else ""
    lines = {"predicted": f"{milliseconds(plan.step_s)} per step{at}"}
    busy = {"compute": plan.compute_s, "link": plan.copy_s} | ({"disk": plan.disk_s} if plan.disk else {})
    if any(busy.values()):
        others = ", ".join(f"{name} {milliseconds(s)}" for name, s in busy.items() if name != plan.limit)
        lines["limit"] = f"{plan.limit}, busy {milliseconds(busy[plan.limit])} of a step; {others}"
    return lines


def numbers(plan: Plan) -> dict[str, Any]:
    """The plan's bytes and predicted seconds."""
    names = ["budget", "resident_nbytes", "ring_nbytes", "device_nbytes", "activation_nbytes", "cache_nbytes"]
    names += ["host_nbytes", "mapped_nbytes", "disk_nbytes", "step_nbytes", "step_disk_nbytes"]
    names += ["step_s", "compute_s", "copy_s", "disk_s", "limit"]
    found = {name: getattr(plan, name) for name in names} | {"machine": plan.machine or None}
    return found | {"nbytes": plan.manifest.nbytes, "tokens_per_s": tokens_per_s(plan)}


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
