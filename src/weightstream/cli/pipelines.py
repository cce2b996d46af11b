"""Pipelines of diffusers on the command line: the plan of a call, a run that writes images or videos, a comparison."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from weightstream.api.other_budgets import MOST_PLANS, AtBudget, reached_text, reaching, swept
from weightstream.cli.messages import shows_bars
from weightstream.cli.plan_output import Output, faster_note, machine_line, sweep_rows
from weightstream.cli.terminal import (
    NOT_REPRODUCIBLE,
    Loading,
    add_budget,
    check_writable,
    figure,
    grid,
    numbers_of,
    prediction_text,
    print_labelled,
    print_message,
    print_table,
    require,
    write_file,
)
from weightstream.errors import ConfigError, OffloadError, UnsupportedError
from weightstream.measure.progress import announced, lasting, phase
from weightstream.plan.pipeline import PipelinePlan, joined
from weightstream.plan.units import human, milliseconds, scale
from weightstream.settings.speeds import Target

if TYPE_CHECKING:
    from weightstream.api.pipelines import PipelineStats
    from weightstream.api.plan_model import MachineChoice

PROMPT = "a photo of a cat on the moon"
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_VIDEOS = (".gif", ".webp", ".mp4")
_WRITERS = ("imageio", "imageio_ffmpeg")  # of .mp4
_BUDGETS = 8


def call_of(
    height: int | None, width: int | None, steps: int | None, frames: int | None, **more: Any
) -> dict[str, Any]:
    """The keywords of a call, without those that are None."""
    named = {"height": height, "width": width, "num_inference_steps": steps, "num_frames": frames, **more}
    return {name: value for name, value in named.items() if value is not None}


def is_diffusers(model: str) -> bool:
    """Whether MODEL is a pipeline of diffusers. Most commands ask this first, and wait for libraries."""
    with lasting("loading libraries"):
        from weightstream.api.plan_model import is_pipeline_checkpoint

        return is_pipeline_checkpoint(model)


def refuse_options(model: str, **options: Any) -> None:
    """Raise `ConfigError` if options of the other kind of model are set."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if flags := [f"--{name.replace('_', '-')}" for name in given]:
        kind = "a pipeline of diffusers" if is_diffusers(model) else "not a pipeline of diffusers"
        raise ConfigError(f"{model} is {kind}: leave out {', '.join(flags)}")


# -- plan --------------------------------------------------------------------------------------------------------------


def plan_pipeline(
    model: str,
    loading: Loading,
    call: dict[str, Any],
    *,
    variant: str | None,
    where: MachineChoice,
    target: Target | None,
    output: Output,
) -> None:
    """`weightstream plan` for a pipeline."""
    from weightstream.api.plan_model import sketch_pipeline

    with announced("planning"):
        sketch = sketch_pipeline(model, loading["config"], **where, dtype=loading["dtype"], call=call, variant=variant)
        own, notes = AtBudget(sketch.budget, sketch.plan()), {}
    if target is not None:
        with output.progress("finding the least budget", MOST_PLANS) as advance:
            own = reaching(sketch, own, target, advance)
        notes = {"target": reached_text(own, target)}
    if output.save is not None:
        write_file("--save", output.save, json.dumps(own.plan.numbers(), indent=1) + "\n")
    if not output.as_json:
        _show(model, machine_line(own.plan, where), sketch.nbytes, own.plan, notes)
    plans: list[AtBudget[PipelinePlan]] = []
    if output.has_sweep:
        budgets = [sketch.nbytes * k // _BUDGETS for k in range(1, _BUDGETS + 1)]
        with output.progress("planning for other budgets", _BUDGETS) as advance:
            plans = swept(sketch, own, budgets, advance)
    if output.plot is not None:
        _draw(model, plans, output.plot)
    if output.as_json:
        rows = {"sweep": sweep_rows(plans)} if plans else {}
        typer.echo(json.dumps({"model": model, "nbytes": sketch.nbytes, **own.plan.numbers(), **rows}))
    elif output.sweep:
        _show_sweep(own, plans)
        print_labelled(faster_note(own, plans))


def _show(model: str, machine: str, nbytes: int, planned: PipelinePlan, notes: dict[str, str]) -> None:
    resident = planned.device_nbytes - planned.block_nbytes
    parts = f"resident {human(resident)} + shared ring {human(planned.block_nbytes)} = {human(planned.device_nbytes)}"
    head = {
        "model": f"{model} ({human(nbytes)} of weights)",
        "machine": machine,
        "memory": f"{parts} for weights",
        "besides": planned.beside,
    }
    print_labelled(head)
    columns = ("component", "steps", "resident", "ring", "moves", "activations", "predicted")
    table = grid(*columns, align_left=("component", "steps"))
    for row in planned.rows():
        table.add_row(*row)
    print_table(table, drop=("activations", "ring"))
    limit, text = "the link" if planned.copied_s > planned.computed_s else "compute", planned.seconds_text
    print_labelled(
        {
            "moves": f"{human(planned.copied_nbytes)} over the link per call",
            "predicted": f"{text(planned.seconds)} per call; limit: {limit} (at least {text(planned.bound_s)})",
            **notes,
            **({"shortage": planned.shortage} if planned.shortage else {}),
            **({"note": "; ".join(planned.notes)} if planned.notes else {}),
        }
    )


def _show_sweep(own: AtBudget[PipelinePlan], plans: Sequence[AtBudget[PipelinePlan]]) -> None:
    table = grid("budget", "resident", "ring", "moves", "seconds", "", align_left=("",))
    slowest = max(at.plan.seconds for at in plans)
    for budget, plan in plans:
        resident = plan.device_nbytes - plan.block_nbytes
        sizes = (budget, resident, plan.block_nbytes, plan.copied_nbytes)
        cells = [*map(human, sizes), plan.seconds_text(plan.seconds).removesuffix(" s")]
        add_budget(table, cells, plan.seconds / slowest, is_own=budget == own.budget)
    print_table(table, "seconds per call over budget", drop=("ring", ""))


def _draw(model: str, plans: Sequence[AtBudget[PipelinePlan]], path: Path) -> None:
    unit, nbytes_of_one = scale(max(at.budget for at in plans))
    budgets = [at.budget / nbytes_of_one for at in plans]
    with figure(path, height=4.5) as axes:
        axes.plot(budgets, [at.plan.seconds for at in plans], ".-", linewidth=3, label="predicted call")
        axes.plot(budgets, [at.plan.copied_s for at in plans], "--", label="link busy")
        axes.plot(budgets, [at.plan.computed_s for at in plans], ":", label="compute busy")
        axes.set(xlabel=f"device budget for weights, {unit}", ylabel="call, s", title=Path(model).name)
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()


# -- run ---------------------------------------------------------------------------------------------------------------


class TimedOutput(NamedTuple):
    """The output of a call, and the seconds that it took."""

    output: Any
    seconds: float


class PipelineSession:
    """A pipeline that streams, and one call of it, which can be repeated."""

    def __init__(
        self, model: str, loading: Loading, variant: str | None, call: dict[str, Any], *, progress: bool
    ) -> None:
        from weightstream import pipeline_from_pretrained

        takes = _taken(model)
        self.call = {name: value for name, value in call.items() if name != "prompt" or "prompt" in takes}
        self.seed = 0
        remote_code: dict[str, Any] = {"trust_remote_code": True} if loading["trust_remote_code"] else {}
        self.pipe = pipeline_from_pretrained(
            model,
            config=loading["config"],
            device=loading["device"],
            dtype=loading["dtype"],
            variant=variant,
            example_inputs=self.call,
            progress=progress,
            **remote_code,
        )
        self.device = self.pipe.weightstream.device
        self.pipe.set_progress_bar_config(disable=not progress)
        self.planned: PipelinePlan | None = None
        try:
            self.planned = self.pipe.weightstream.plan(**self.call)
        except OffloadError as error:
            print_message(f"warning: {error}")

    def run(self, **more: Any) -> TimedOutput:
        """Run the call, with more keywords."""
        import torch

        generator = torch.Generator("cpu").manual_seed(self.seed)
        began = time.perf_counter()
        try:
            output = self.pipe(**self.call, generator=generator, **more)
        except (ValueError, TypeError) as error:  # how pipelines refuse keywords
            named = ", ".join(f"{name}={value!r}" for name, value in self.call.items())
            raise ConfigError(f"{type(self.pipe).__name__} cannot run with {named}: {error}") from error
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return TimedOutput(output, time.perf_counter() - began)

    def values(self) -> TimedOutput:
        """Run the call; the output is one tensor of the images or frames on the host."""
        timed = self.run(output_type="pt")
        return TimedOutput(_media(timed.output).cpu(), timed.seconds)

    def plain(self) -> None:
        """Stop streaming, and move all components to the device."""
        import torch

        self.pipe.weightstream.remove()
        try:
            for part in self.pipe.components.values():
                if isinstance(part, torch.nn.Module):
                    for tensor in (*part.parameters(), *part.buffers()):
                        # the last bits of some kernels depend on alignment, which differs in a mapped file
                        tensor.data = tensor.data.clone()
                    part.to(self.device)
        except torch.OutOfMemoryError as error:
            raise OffloadError(f"the whole pipeline does not fit on {self.device}: {error}") from error


def _taken(model: str) -> Collection[str]:
    """The keywords of a call of the pipeline."""
    require("diffusers", "diffusers", "a pipeline")
    from weightstream.adapters.diffusers.folder import call_keywords

    return call_keywords(model)


def _media(output: Any) -> Any:
    """The images or the frames of a call."""
    for name in ("images", "frames"):
        if (media := getattr(output, name, None)) is not None:
            return media
    raise UnsupportedError(f"{type(output).__name__} has neither images nor frames")


def place_of(out: Path | None, takes: Collection[str]) -> Path:
    """The file for the output of a call. `takes`: the keywords of the call.

    Raises `ConfigError` or `UnsupportedError` if such a file cannot be written.
    """
    is_video = "num_frames" in takes
    out = out or Path("video.gif" if is_video else "image.png")
    kinds = _VIDEOS if is_video else _PICTURES
    if out.suffix.lower() not in kinds:
        raise ConfigError(f"--out {out}: {'a video' if is_video else 'an image'} is written as {', '.join(kinds)}")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist")
    if out.suffix.lower() == ".mp4" and not all(map(find_spec, _WRITERS)):
        raise UnsupportedError(f"--out {out}: it takes pip install imageio imageio-ffmpeg; a .gif needs neither")
    return out


def save_media(output: Any, out: Path) -> list[Path]:
    """Write the images of PIL, or the videos, of a call; several get numbers in their names. Returns the files."""
    from diffusers.utils import export_to_gif, export_to_video

    media = _media(output)
    paths = [out if len(media) == 1 else out.with_stem(f"{out.stem}-{number}") for number in range(1, len(media) + 1)]
    for path, item in zip(paths, media, strict=True):
        if not isinstance(item, list):
            item.save(path)
        elif path.suffix.lower() == ".mp4":
            export_to_video(item, str(path))
        else:
            export_to_gif(item, str(path))  # or an animated .webp: PIL goes by the suffix
    return paths


def run_pipeline(
    model: str,
    loading: Loading,
    call: dict[str, Any],
    *,
    variant: str | None,
    out: Path | None,
    seed: int,
    verify: bool,
    as_json: bool,
) -> bool | None:
    """`weightstream run` for a pipeline. Returns whether the resident pipeline gives the same bits.

    None: not asked for, or the resident pipeline does not repeat its own bits.
    """
    import torch

    from weightstream.measure.comparison import verdict_of

    takes = _taken(model)
    out = place_of(out, takes)
    check_writable("--out", out)
    session = PipelineSession(model, loading, variant, call, progress=shows_bars() and not as_json)
    session.seed = seed
    output, taken_s = session.run(output_type="pil")
    written = save_media(output, out)
    stats = session.pipe.weightstream.stats()
    identical = None
    if verify:
        offloaded = session.values().output
        session.plain()
        resident = session.values().output
        identical = verdict_of([offloaded], [resident], lambda: [session.values().output], torch.equal).equal
    if as_json:
        planned = session.planned
        row = {
            "model": model,
            "device": str(session.device),
            "files": list(map(str, written)),
            "identical": identical,
            "seconds": taken_s,
            "predicted_s": planned and planned.seconds,
            "plan": planned and planned.numbers(),
            "stats": {name: numbers_of(part) for name, part in stats.components.items()},
            "held_nbytes": stats.held_nbytes,
        }
        typer.echo(json.dumps(row))
    else:
        _report(session, written, taken_s, stats)
        if verify:
            verdicts = {None: NOT_REPRODUCIBLE, True: "yes", False: "no"}
            print_labelled({"identical": verdicts[identical]})
    return identical


def _report(session: PipelineSession, files: Sequence[Path], taken_s: float, stats: PipelineStats) -> None:
    """Print the report of a run."""
    planned = session.planned
    lines = {"image": ", ".join(map(str, files))}
    if planned is not None:
        lines["predicted"] = prediction_text(planned.seconds, taken_s, _seconds, is_rough=planned.is_rough)
    else:
        lines["took"] = _seconds(taken_s)
    model_nbytes = sum(part.model_nbytes for part in stats.components.values())
    lines["device"] = f"{human(stats.held_nbytes['device'])} held on {session.device}, of {human(model_nbytes)}"
    moved = sum(part.filled_nbytes for part in stats.components.values())
    waited_s = sum(part.stall_s for part in stats.components.values())
    lines["streamed"] = f"{human(moved)}; waited {waited_s:.2f} s for copies"
    print_labelled(lines)
    table = grid("component", "steps", "measured", "predicted", "moved", align_left=("component",))
    for name, part in stats.components.items():
        measured = "" if part.step_s is None else milliseconds(part.step_s)
        predicted = milliseconds(part.predicted_step_s)
        table.add_row(name, str(part.steps), measured, predicted, human(part.filled_nbytes))
    print_table(table)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


# -- a comparison ------------------------------------------------------------------------------------------------------


def bench_pipeline(
    model: str, loading: Loading, call: dict[str, Any], *, variant: str | None, seconds: float, as_json: bool
) -> tuple[PipelinePlan | None, dict[str, Any]]:
    """Time calls of the offloaded pipeline, the link alone, and the resident pipeline."""
    import torch

    from weightstream.measure.comparison import floor_of_calls, timed_calls

    progress = shows_bars() and not as_json
    session = PipelineSession(model, loading, variant, call, progress=progress)
    session.pipe.set_progress_bar_config(disable=True)  # the bars below show all calls
    planned = session.planned
    resident, reproducible, equal, skipped = None, True, None, ""
    with phase("timing calls of the offloaded pipeline", progress):
        offloaded, ours = timed_calls("offloaded", session.values, seconds, session.device)
    stats = session.pipe.weightstream.stats()
    offloaded["weights_nbytes"] = stats.held_nbytes["device"]
    with phase("timing calls of the resident pipeline", progress):
        try:
            session.plain()
            resident, theirs = timed_calls("resident", session.values, seconds, session.device)
            resident["weights_nbytes"] = sum(part.model_nbytes for part in stats.components.values())
            reproducible = all(torch.equal(theirs[0], other) for other in theirs[1:])
            equal = all(torch.equal(theirs[0], output) for output in ours) if reproducible else None
        except (OffloadError, torch.OutOfMemoryError) as error:
            skipped = str(error).partition("\n")[0]
    with phase("timing the link alone", progress):
        turns = [(turn.num, turn.plan) for turn in joined(planned.turns)] if planned else []
        floor = floor_of_calls(turns, seconds, session.device)
    systems = [system for system in (floor, offloaded, resident) if system]
    for system in systems:
        system["x_floor"] = system["p50_s"] / floor["p50_s"] if floor else None
        system["x_resident"] = system["p50_s"] / resident["p50_s"] if resident else None
        system["tokens_per_s"] = None
    return planned, {
        "device": str(session.device),
        "call": {name: value for name, value in call.items() if isinstance(value, str | int | float)},
        "predicted_s": planned and planned.seconds,
        "bound_s": planned and planned.bound_s,
        "plan": planned and planned.numbers(),
        "systems": systems,
        "skipped": skipped or None,
        "num_compared": len(ours),
        "reproducible": reproducible,
        "equal": equal,
    }


def show_pipeline_bench(
    planned: PipelinePlan | None, row: dict[str, Any], print_systems: Callable[[Any], None]
) -> None:
    """Print a comparison."""
    turns = joined(planned.turns) if planned else []
    calls = ", ".join(f"{turn.num} x {turn.component}.{turn.entry}" for turn in turns)
    print_labelled({"model": f"{row['model']} on {row['device']}", "call": calls or "not known before it runs"})
    print_systems(row["systems"])
    lines = {}
    if planned is not None:
        measured = next(system["p50_s"] for system in row["systems"] if system["name"] == "offloaded")
        lines["predicted"] = prediction_text(planned.seconds, measured, _seconds, is_rough=planned.is_rough)
    if row["skipped"]:
        lines["resident"] = f"left out: {row['skipped']}"
    verdicts = {True: "yes, all images are bit for bit the same", False: "NO: images differ"}
    unknown = "not compared" if row["reproducible"] else NOT_REPRODUCIBLE
    print_labelled(lines | {"equal": verdicts.get(row["equal"], unknown)})
