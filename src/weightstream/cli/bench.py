"""`weightstream bench`: times a model offloaded, beside the link alone and the whole model on the device."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightstream import __version__
from weightstream.cli import figure
from weightstream.cli.comparison import NUM_COMPARED, Comparison, compare
from weightstream.cli.options import Chosen, switch, takes_model
from weightstream.cli.screen import print_labelled, screen
from weightstream.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from weightstream.plan.work import Workload

_GIB = 2**30
_COLORS = MappingProxyType({"link floor": "#b9b2a6", "offloaded": "#2f6f9f", "resident": "#7d8a6a"})
_PREDICTED = "#c05020"


@takes_model("batch", "context", "tokens", "plan_file")
def bench(
    chosen: Chosen,
    *,
    seconds: Annotated[float, typer.Option(min=0.05, help="How long to time each of the three.")] = 3.0,
    out: Annotated[Path | None, typer.Option(help="Append the result to this file, as a line of JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this picture, such as a.png.")] = None,
    as_json: Annotated[bool, switch("--json", "Print one JSON object, and nothing else.")] = False,
) -> None:
    """Time MODEL offloaded, beside the link alone and the whole model on the device.

    Three systems in one run:

    - link floor: copies of the bytes that a step streams, and nothing else;
      no schedule can be faster while the link is the limit

    - offloaded: a step of the model while its weights stream

    - resident: the same step with all weights on the device, if they fit

    A step is a forward of --batch sequences by --tokens new tokens each, behind
    a KV cache of --context positions. Outputs of offloaded and resident are
    compared bit by bit; it exits with 1 if they differ.
    """
    if plot is not None:
        figure.require_matplotlib()
    from weightstream import from_pretrained

    if out is not None:
        _append(out, "")  # a file that cannot be written is told now, not after minutes
    model = from_pretrained(chosen.model, progress=sys.stderr.isatty() and not as_json, **chosen.loading)
    found = compare(model, seconds)
    row = environment() | {"model": chosen.model} | found.facts()
    if out is not None:
        _append(out, json.dumps(row) + "\n")
    if plot is not None:
        draw(chosen.model, found, plot)
    if as_json:
        typer.echo(json.dumps(row))
    else:
        show(chosen.model, found)
    raise typer.Exit(1 if found.difference else 0)


# -- the row ------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What this was measured with: the machine, versions and the command."""
    import torch

    from weightstream.runtime import machine

    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["weightstream", *sys.argv[1:]]),
        "processor": machine.processor(),
        "cores": os.cpu_count(),
        "driver": machine.driver_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": metadata.version("transformers"),
        "weightstream": __version__,
    }


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}; name a file that can be written") from error


# -- the screen ---------------------------------------------------------------------------------------------------


def show(model: str, found: Comparison) -> None:
    about = {"model": f"{model} on {_machine(found)}", "step": _step(found.workload), "plan": found.plan.summary()}
    print_labelled(about)
    screen().print(_table(found))
    print_labelled(_remarks(found))


def _step(at: Workload) -> str:
    return f"batch {at.batch}, tokens {at.tokens}, context {at.context}"


def _machine(found: Comparison) -> str:
    return f"{found.device} ({found.plan.machine})" if found.plan.machine else found.device


def _table(found: Comparison) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("system", no_wrap=True)
    for heading in ("p20 ms", "p50 ms", "p80 ms", "x floor", "x resident", "tokens/s", "device GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for system in found.systems:
        cells = [f"{1e3 * s:,.2f}" for s in (system.p20_s, system.p50_s, system.p80_s)]
        cells += [_cell(found.times(system, over), ".3f") for over in (found.floor, found.resident)]
        nbytes = system.peak_nbytes or system.weights_nbytes
        cells += [_cell(found.tokens_per_s(system), ",.1f"), _cell(nbytes and nbytes / _GIB, ".3f")]
        table.add_row(system.name, *cells)
    return table


def _cell(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _remarks(found: Comparison) -> dict[str, str]:
    from weightstream.plan.shown import human, milliseconds

    plan, whole_s = found.plan, found.plan.manifest.nbytes / found.link_bytes_per_s
    predicted = f"{milliseconds(found.planned.step_s)} before it ran; measured {milliseconds(found.offloaded.p50_s)}"
    lines = {"predicted": f"{predicted}, {100 * found.off_by:+.1f} %"}
    if plan.step_s != found.planned.step_s:
        lines["predicted"] += f"; {milliseconds(plan.step_s)} from what was measured since"
    busy = {"compute": plan.compute_s, "link": plan.copy_s} | ({"disk": plan.disk_s} if plan.disk else {})
    shares = ", ".join(f"{name} {milliseconds(s)}" for name, s in busy.items())
    lines["limit"] = f"{plan.limit} (in a step they are busy, as predicted: {shares})"
    all_weights = f"all {human(plan.manifest.nbytes)} of weights take {milliseconds(whole_s)}"
    lines["link"] = f"{found.link_bytes_per_s / 1e9:.1f} GB/s now; {all_weights}"
    if found.resident is None:
        lines["resident"] = f"left out: {found.skipped}"
    lines["equal"] = _verdict(found)
    return lines


def _verdict(found: Comparison) -> str:
    if found.resident is None:
        return "not compared"
    if found.difference is None:
        return f"yes, {NUM_COMPARED} outputs of offloaded and resident are the same bits"
    return f"NO: output {found.difference} of {NUM_COMPARED} differs between offloaded and resident"


# -- the picture --------------------------------------------------------------------------------------------------


def draw(model: str, found: Comparison, path: Path) -> None:
    """A bar for each system, from p20 to p80 a line across its end, and a mark at what was predicted."""
    drawn, axes = figure.new_figure(height=2.6)
    systems = found.systems[::-1]
    names, ms = [system.name for system in systems], [1e3 * system.p50_s for system in systems]
    below = [1e3 * (system.p50_s - system.p20_s) for system in systems]
    above = [1e3 * (system.p80_s - system.p50_s) for system in systems]
    colors = [_COLORS[name] for name in names]
    bars = axes.barh(names, ms, xerr=[below, above], color=colors, ecolor="#333333", capsize=3)
    axes.bar_label(bars, [f"{value:,.2f} ms" for value in ms], padding=6)
    predicted = 1e3 * found.planned.step_s
    mark = {"color": _PREDICTED, "markeredgecolor": "white", "markersize": 9}
    axes.plot(predicted, "offloaded", "D", label=f"predicted: {predicted:,.2f} ms", **mark)
    axes.set_xlim(0, 1.25 * max(predicted, *map(sum, zip(ms, above, strict=True))))
    axes.set_xlabel(f"step, ms (p50, and a line from p20 to p80); {_step(found.workload)}")
    axes.set_title(f"{Path(model).name} on {_machine(found)}", fontsize=10)
    axes.legend(loc="best", fontsize=9)
    figure.save(drawn, path)
