"""`weightstream plan`: shows where every weight would live and how fast a step would be, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from weightstream.cli import report
from weightstream.cli.options import AsJson, Model, require, takes_model
from weightstream.cli.screen import LABEL, figure, grid, print_labelled, screen, write
from weightstream.plan.amounts import human, milliseconds, rate
from weightstream.plan.plan import Plan
from weightstream.plan.prospect import Prospect

_GIB = 2**30
_BAR, _CODE = 18, 7  # columns of a table
_BUDGETS = 20
_LESS = 0.98  # a smaller budget that is worth a word


@takes_model()
def plan(
    model: Model,
    loading: dict[str, Any],
    *,
    profile: Annotated[
        Path | None, typer.Option(help="Predict for the machine in this file, from `weightstream doctor --save`.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also show the step time at other budgets.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw step time over budget into this file, such as a.png.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where MODEL's weights would live and how fast a step would be. Loads no weights, needs no GPU.

    Reads config.json and the headers of the checkpoint's files. Without --device-budget, the plan is for what is free.
    """
    if plot is not None:
        require("matplotlib", "plot", "--plot")
    from weightstream.front import prospect

    ahead = prospect(model, profile=profile, **loading)
    planned = ahead.plan()[1]
    plans = _swept(ahead, planned) if sweep or plot is not None else []
    if save is not None:
        write("--save", save, planned.to_json())
    if plot is not None:
        draw(model, planned, plans, plot)
    if as_json:
        swept = {"sweep": [p.numbers() for p in plans if p is not planned]} if plans else {}
        typer.echo(json.dumps({"model": model, **facts(ahead, planned), **swept}))
        return
    show(model, planned, advice(ahead, planned))
    if sweep:
        screen().print("\nstep time over budget", style="bold")
        screen().print(_sweep_table(planned, plans))


def _swept(ahead: Prospect, planned: Plan) -> list[Plan]:
    """The plan in its place among those at even shares of the model's bytes, where one fits."""
    budgets = [planned.manifest.decoded_nbytes * k // _BUDGETS for k in range(1, _BUDGETS + 1)]
    others = [plan for _, plan in ahead.sweep(budgets) if plan is not None and plan.budget != planned.budget]
    return sorted((planned, *others), key=_budget)


def show(model: str, planned: Plan, notes: dict[str, str]) -> None:
    """Print the plan."""
    num, dtype = report.parameters(planned)
    size = f"{_count(num)} parameters, {human(planned.manifest.decoded_nbytes)}, {dtype}"
    assumed = (
        "assumed bandwidths, as no device was measured: `weightstream doctor` measures this machine, and --profile "
        "takes the numbers of another"
    )
    machine = f"{planned.machine}, measured" if planned.machine else assumed
    print_labelled({"model": f"{model} ({size})", "machine": machine})
    bar, legend, total = report.memory(planned)
    screen().print(Text.assemble((f"{'memory':>{LABEL}}: ", "bold"), bar))
    screen().print(Text(f"{total:>{LABEL}} ").append_text(legend))
    screen().print(report.table(planned))
    print_labelled({"moves": _moved(planned), **planned.predictions(), **notes})


def _count(num: int) -> str:
    """A number of parameters for a person: `405.9B`."""
    size, unit = next(((s, u) for u, s in (("B", 1e9), ("M", 1e6), ("K", 1e3)) if num >= s), (1, ""))
    return f"{num / size:.1f}{unit}" if unit else str(num)


def _moved(planned: Plan) -> str:
    """What a step moves, and where what is not on the device is kept."""
    if not planned.offloaded_nbytes:
        return "nothing: all weights stay on the device"
    kept = [f"{human(planned.host_nbytes)} in host memory"] if planned.host_nbytes else []
    kept += [f"{human(planned.disk_nbytes)} on disk"] if planned.disk else []
    mapped = f"; kernels read {human(planned.mapped_nbytes)} in place" if planned.mapped else ""
    return f"{human(planned.step_nbytes)} over the link per step, of {' and '.join(kept)}{mapped}"


def advice(ahead: Prospect, planned: Plan) -> dict[str, str]:
    """What to do with the budget, as a labelled line: nothing, less, or more."""
    if shortage := ahead.shortage(planned):
        return {"shortage": shortage}
    if not planned.offloaded_nbytes and planned.manifest.codes:
        plain, saved = human(planned.manifest.decoded_nbytes), milliseconds(planned.decode_s)
        return {"note": f"everything fits, coded; in plain form it would take {plain}, and {saved} less per step"}
    if not planned.offloaded_nbytes:
        return {"note": "everything fits and nothing streams: leave out the budget, offloading gains nothing here"}
    enough = ahead.enough(planned)
    if enough is not None and _budget(enough) < _LESS * _budget(planned):
        return {"note": f"a budget of {human(_budget(enough))} would be as fast"}
    moved = {"link": (planned.copy_s, planned.step_nbytes), "disk": (planned.disk_s, planned.step_disk_nbytes)}
    busy_s, nbytes = moved.get(planned.limit, (0.0, 0))
    if not nbytes:
        return {}
    saved_s = min(_GIB * busy_s / nbytes, busy_s - planned.compute_s)
    return {"note": f"1 GiB more on the device would take about {milliseconds(saved_s)} off a step"}


def _sweep_table(planned: Plan, plans: Sequence[Plan]) -> Table:
    coded = any(plan.manifest.codes for plan in plans)
    headings = ("", "budget GiB", "resident GiB", "ring GiB", *["code"] * coded, "step ms", "tokens/s", "limit", "")
    table, bar = grid(*headings, align_left=("", "limit")), _BAR - _CODE * coded
    slowest = max(plan.step_s for plan in plans) or 1.0
    for plan in plans:
        sizes = (_budget(plan), plan.resident_nbytes, plan.ring_nbytes)
        table.add_row(
            "▶" if plan is planned else "",
            *(f"{nbytes / _GIB:.2f}" for nbytes in sizes),
            *["+".join(str(bits) for bits in sorted({bits for bits, _ in plan.manifest.codes.values()}))] * coded,
            f"{1e3 * plan.step_s:,.1f}",
            rate(plan.tokens_per_s or 0.0),
            plan.limit if plan.offloaded_nbytes else "all fits",
            "█" * max(1, round(bar * plan.step_s / slowest)),
            style="bold" if plan is planned else None,
        )
    return table


def _budget(plan: Plan) -> int:
    return plan.budget or plan.device_nbytes


def facts(ahead: Prospect, planned: Plan) -> dict[str, Any]:
    """All that the screen tells, in bytes and seconds, and the plan itself."""
    enough, (num, dtype) = ahead.enough(planned), report.parameters(planned)
    return {
        "num_parameters": num,
        "dtype": dtype,
        **planned.numbers(),
        "enough_budget": enough.budget if enough else None,
        "shortage": ahead.shortage(planned),
        "plan": json.loads(planned.to_json()),
    }


def draw(model: str, planned: Plan, plans: Sequence[Plan], path: Path) -> None:
    """Step time over budget, with what no schedule can go below: the link's time and the compute's."""
    budgets = [_budget(plan) / _GIB for plan in plans]
    with figure(path, height=4.5) as axes:
        axes.plot(budgets, [1e3 * plan.step_s for plan in plans], ".-", linewidth=3, label="predicted step")
        axes.plot(budgets, [1e3 * plan.copy_s for plan in plans], "--", label="link busy")
        axes.plot(budgets, [1e3 * plan.compute_s for plan in plans], ":", label="compute busy")
        own = f"this plan: {_budget(planned) / _GIB:.2f} GiB, {milliseconds(planned.step_s)}"
        axes.plot(_budget(planned) / _GIB, 1e3 * planned.step_s, "o", markersize=9, label=own)
        title = f"{Path(model).name} on {planned.machine or 'an assumed machine'}"
        title += f", {planned.workload}" if planned.workload else ""
        axes.set(xlabel="device budget for weights, GiB", ylabel="step, ms", title=title)
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
