"""`weightstream bench`: compares the offloaded model with the link alone and with the model resident on the device."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from weightstream import __version__
from weightstream.cli import pipelines
from weightstream.cli.messages import shows_bars
from weightstream.cli.terminal import (
    NOT_REPRODUCIBLE,
    AsJson,
    DraftOption,
    Frames,
    Height,
    Loading,
    Model,
    SpeculateMode,
    Steps,
    Variant,
    Width,
    check_figure,
    check_writable,
    expert_line,
    figure,
    grid,
    is_on_cpu,
    prediction_text,
    print_labelled,
    print_table,
    require,
    takes_model,
    write_file,
)
from weightstream.measure.progress import lasting, phase
from weightstream.plan.multi_device import AnyPlan
from weightstream.plan.units import human, milliseconds, per_second, scale

_COLORS = MappingProxyType({"raw link floor": "#b9b2a6", "offloaded": "#2f6f9f", "resident": "#7d8a6a"})
_PREDICTED = "#c05020"
_CPU_CONTEXT = 512  # filling a cache of 4096 positions takes a CPU longer than all that is timed


@takes_model()
def bench(
    model: Model,
    loading: Loading,
    *,
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds to time each of the three.")] = 3.0,
    out: Annotated[Path | None, typer.Option(help="Append the result to this file, as a line of JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this image file, such as a.png.")] = None,
    speculate: SpeculateMode = None,
    draft: DraftOption = None,
    height: Height = None,
    width: Width = None,
    steps: Steps = None,
    frames: Frames = None,
    variant: Variant = None,
    as_json: AsJson = False,
) -> None:
    """Time MODEL offloaded, and compare it with the link alone and with the whole model on the device.

    Three systems in one run:

    - raw link floor: copies of the weights that a step streams, uncompressed,
      and nothing else; while the link is the limit, only compressed weights
      can be faster

    - offloaded: a step of the model while its weights stream

    - resident: the same step with all weights on the device, if they fit

    A step is a forward of --batch sequences with --tokens new tokens each, on a
    KV cache that fills --context positions (default: 4096; on a CPU 512). Outputs of offloaded and resident
    are compared bit by bit; the command exits with 1 if they differ. For a
    pipeline of diffusers whole calls are timed, at least two. With --speculate
    or --draft, passes of several tokens are timed, too.
    """
    if plot is not None:
        check_figure(plot)
    check_writable("--out", out)
    if pipelines.is_diffusers(model):
        pipelines.refuse_options(model, speculate=speculate, draft=draft)
        call = pipelines.call_of(height, width, steps, frames, prompt=pipelines.PROMPT)
        planned, comparison = pipelines.bench_pipeline(
            model, loading, call, variant=variant, seconds=seconds, as_json=as_json
        )
        plan = None
    else:
        pipelines.refuse_options(model, height=height, width=width, steps=steps, frames=frames, variant=variant)
        if loading["config"].context is None and is_on_cpu(loading["device"]):
            context = _context_on_cpu(model, loading["trust_remote_code"])
            loading["config"] = loading["config"].model_copy(update={"context": context})
        options = {**loading, "speculate": speculate, "draft": draft}
        plan, comparison = _compared(model, options, seconds, progress=shows_bars() and not as_json)
    row = environment() | {"model": model} | comparison
    if out is not None:
        write_file("--out", out, json.dumps(row) + "\n", append=True)
    if plot is not None:
        draw_bench("a call" if plan is None else str(plan.workload), row, plot)
    if as_json:
        typer.echo(json.dumps(row))
    elif plan is not None:
        show_bench(plan, row)
    else:
        pipelines.show_pipeline_bench(planned, row, print_systems)
    raise typer.Exit(1 if row["equal"] is False else 0)


def _compared(model: str, options: dict[str, Any], seconds: float, *, progress: bool) -> tuple[AnyPlan, dict[str, Any]]:
    """A comparison of a language model, whose phases are shown."""
    with lasting("loading libraries"):
        require("transformers", "transformers", "weightstream bench")
        from weightstream import from_pretrained
        from weightstream.adapters.steps.decode_steps import DecodeSteps
        from weightstream.measure.comparison import compare

    loaded = from_pretrained(model, progress=progress, **options)
    return compare(loaded, DecodeSteps, seconds, partial(phase, progress=progress))


def _context_on_cpu(model: str, trust_remote_code: bool) -> int:
    """Positions of the cache of a step: the fewer, the sooner it is filled."""
    from weightstream.adapters.hf.hub import config_and_class, find, refused_as_checkpoint

    with refused_as_checkpoint(model, "load"):
        found = config_and_class(find(model, trust_remote_code), None, trust_remote_code)[0].get_text_config()
    return min(_CPU_CONTEXT, getattr(found, "max_position_embeddings", None) or _CPU_CONTEXT)


def environment() -> dict[str, Any]:
    """The machine, the versions and the command of a measurement."""
    import torch

    from weightstream.measure import machine, nvml

    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["weightstream", *sys.argv[1:]]),
        "processor": machine.cpu_name(),
        "cores": os.cpu_count(),
        "driver": nvml.driver_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": metadata.version("transformers"),
        "weightstream": __version__,
    }


def show_bench(plan: AnyPlan, row: dict[str, Any]) -> None:
    print_labelled({"model": f"{row['model']} on {_machine(row)}", "step": str(plan.workload), "plan": row["plan"]})
    print_systems(row["systems"])
    measured = next(system["p50_s"] for system in row["systems"] if system["name"] == "offloaded")
    all_weights = f"all {human(row['nbytes'])} of weights take {milliseconds(row['whole_floor_s'])}"
    lines = plan.predictions()
    if row["predicted_s"]:
        lines["predicted"] = prediction_text(row["predicted_s"], measured, is_rough=row["is_rough"])
    if plan.step_s != row["predicted_s"]:
        lines["predicted"] += f"; {milliseconds(plan.step_s)} from times measured since"
    if row["experts"]:
        lines["experts"] = expert_line(row["experts"])
    lines["link"] = f"{per_second(row['link_bytes_per_s'])} now; {all_weights}"
    if row["skipped"]:
        lines["resident"] = f"left out: {row['skipped']}"
    if row["timed_passes"]:
        lines["passes"] = "of several tokens take " + ", ".join(map(_pass_text, row["timed_passes"]))
    print_labelled(lines | {"equal": _verdict(row)})


def _pass_text(timed: dict[str, Any]) -> str:
    ratios = f"{timed['x_one']:.2f} x one token, {timed['predicted_x_one']:.2f} x predicted"
    return f"{milliseconds(timed['p50_s'])} ({ratios}) for {timed['tokens']}"


def _machine(row: dict[str, Any]) -> str:
    return f"{row['device']} ({row['machine']})" if row["machine"] else str(row["device"])


def print_systems(systems: list[dict[str, Any]]) -> None:
    """Print a row for each system."""
    held_nbytes = [system["peak_nbytes"] or system["weights_nbytes"] for system in systems]
    unit, nbytes_of_one = scale(max((nbytes for nbytes in held_nbytes if nbytes), default=0))
    headings = ("p20 ms", "p50 ms", "p80 ms", "x floor", "x resident", "tokens/s", f"device {unit}")
    table = grid("system", *headings, align_left=("system",))
    for system, nbytes in zip(systems, held_nbytes, strict=True):
        cells = [f"{1e3 * system[key]:,.2f}" for key in ("p20_s", "p50_s", "p80_s")]
        cells += [_cell(system[key], ".3f") for key in ("x_floor", "x_resident")]
        cells += [_cell(system["tokens_per_s"], ",.1f"), _cell(nbytes and nbytes / nbytes_of_one, ".2f")]
        table.add_row(system["name"], *cells)
    print_table(table, drop=("x floor", "p80 ms", "p20 ms"))


def _cell(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _verdict(row: dict[str, Any]) -> str:
    if row["skipped"]:
        return "not compared"
    if not row["reproducible"]:
        return NOT_REPRODUCIBLE
    if row["equal"]:
        return f"yes, {row['num_compared']} outputs of offloaded and resident are bit for bit the same"
    return f"NO: output {row['first_difference']} of {row['num_compared']} differs between offloaded and resident"


def draw_bench(what: str, row: dict[str, Any], path: Path) -> None:
    """Draw a bar for each system, a line from p20 to p80 across its end, and a mark at the prediction."""
    systems, predicted = row["systems"][::-1], 1e3 * (row["predicted_s"] or 0.0)
    names = [system["name"] for system in systems]
    low, ms, high = ([1e3 * system[key] for system in systems] for key in ("p20_s", "p50_s", "p80_s"))
    with figure(path, height=2.6) as axes:
        bars = axes.barh(names, ms, color=[_COLORS[name] for name in names])
        axes.hlines(names, low, high, color="#333333")
        axes.bar_label(bars, [f"{value:,.2f} ms" for value in ms], padding=9)
        label = f"predicted: {predicted:,.2f} ms"
        axes.plot(predicted, "offloaded", "D", color=_PREDICTED, markersize=9, label=label)
        axes.set_xlim(0, 1.25 * max(predicted, *high))
        axes.set_xlabel(f"step, ms (p50; line: p20 to p80); {what}")
        axes.set_title(f"{Path(row['model']).name} on {_machine(row)}", fontsize=10)
        axes.legend()
