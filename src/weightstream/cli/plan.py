"""`weightstream plan`: shows where each weight would live and how fast a step would be, before anything is loaded."""

from __future__ import annotations

import atexit
import gc
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from weightstream.api.other_budgets import MOST_PLANS, AtBudget, reached_text, reaching, swept
from weightstream.cli import pipelines
from weightstream.cli.plan_output import Output, faster_note, machine_line, sweep_rows
from weightstream.cli.terminal import (
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
    add_budget,
    check_figure,
    check_writable,
    drawn,
    figure,
    grid,
    print_labelled,
    print_table,
    takes_model,
    write_file,
)
from weightstream.errors import ConfigError
from weightstream.measure.progress import announced
from weightstream.plan.manifest import UnitSpec
from weightstream.plan.plan import Plan
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.speculation import PRIORS, PassChoice, Passes, choose_width
from weightstream.plan.units import human, rate, roughly, scale
from weightstream.runtime.streamer.drafting import Speculate
from weightstream.settings.arguments import refuse_training
from weightstream.settings.config import OffloadConfig
from weightstream.settings.speeds import Target

if TYPE_CHECKING:
    from weightstream.api.plan_model import MachineChoice

_GIB = 2**30
_BUDGETS = 20
_LESS = 0.98  # a budget that is smaller by this factor is worth a note


@takes_model()
def plan(
    model: Model,
    loading: Loading,
    *,
    profile: Annotated[
        Path | None, typer.Option(help="Predict for the machine in this file, from `weightstream doctor --save`.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help='Predict for this GPU, such as "RTX 4090", by its data sheet. Default: the device here.'),
    ] = None,
    link: Annotated[str | None, typer.Option(help='Link to the GPU: "PCIe 3", "PCIe 4 x8", or 25GB/s.')] = None,
    target: Annotated[
        str | None, typer.Option(help="Find the least budget for this speed: 10tok/s, or 100ms for a step.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also show the step time at other budgets.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw step time over budget into this file, such as a.png.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    train: Annotated[
        bool,
        typer.Option("--train", help="Plan a training step of adapters, of --batch sequences of --tokens tokens."),
    ] = False,
    rank: Annotated[int | None, typer.Option(min=1, help="Rank of the adapters. Default: 16.")] = None,
    checkpoints: Annotated[
        bool | None, typer.Option(help="Recompute blocks in the backward. Default: on.", show_default=False)
    ] = None,
    tp: Annotated[
        bool,
        typer.Option("--tp", help="With --gpus: tensor parallelism, a process for each GPU; shows the plan of one."),
    ] = False,
    speculate: SpeculateMode = None,
    draft: DraftOption = None,
    height: Height = None,
    width: Width = None,
    steps: Steps = None,
    frames: Frames = None,
    variant: Variant = None,
    as_json: AsJson = False,
) -> None:
    """Show where MODEL's weights would live and how fast a step would be. Loads no weights, needs no GPU.

    The plan is that of `weightstream run` with the same options and --context on this machine, or one
    for the GPU of --gpu or --profile. Reads config.json and the headers of the checkpoint's files. Without
    --device-budget, the plan is for the free memory. For a pipeline of diffusers it shows the time of
    a call, by component. With --train it shows the time and the memory of a training step of adapters
    over the frozen model. With --speculate or --draft it also shows the time of passes of several
    tokens, and what drafts gain.
    """
    if plot is not None:
        check_figure(plot)
    check_writable("--save", save)
    loading["config"] = _with_training(loading["config"], train=train, rank=rank, checkpoints=checkpoints)
    output = Output(sweep=sweep, plot=plot, save=save, as_json=as_json)
    is_pipeline = pipelines.is_diffusers(model)
    from weightstream.api.plan_model import machine_choice, requested_target

    where = machine_choice(loading["config"], device=loading["device"], profile=profile, gpu=gpu, link=link)
    wanted = requested_target(target, loading["config"], speculate, draft)
    if is_pipeline:
        refuse_training(loading["config"], of=model)
        pipelines.refuse_options(model, tp=tp, speculate=speculate, draft=draft)
        pipelines.plan_pipeline(
            model,
            loading,
            pipelines.call_of(height, width, steps, frames),
            variant=variant,
            where=where,
            target=wanted,
            output=output,
        )
        return
    pipelines.refuse_options(model, height=height, width=width, steps=steps, frames=frames, variant=variant)
    drafts = {"--draft": draft is not None, "--speculate": speculate not in (None, "off")}
    refuse_training(loading["config"], options=[name for name, is_set in drafts.items() if is_set], ranks=tp)
    if loading["config"].stripes and not tp:
        if flags := [f"--{name}" for name, value in (("sweep", sweep), ("plot", plot), ("save", save)) if value]:
            raise ConfigError(f"{', '.join(flags)}: only for one GPU; leave out --gpus")
        if flags := [f"--{name}" for name, value in (("speculate", speculate), ("draft", draft)) if value]:
            raise ConfigError(f"{', '.join(flags)}: only for one GPU; leave out --gpus")
        _on_several(model, loading, where, as_json=as_json)
        return
    if tp and draft:
        raise ConfigError("--draft: only for one GPU; leave out --tp")
    num_shards = len(loading["config"].stripes) if tp else None
    if tp:
        loading["config"] = _config_of_shard(loading["config"])
    mode: Speculate = speculate or ("auto" if draft else "off")
    _on_one(model, loading, where, num_shards, wanted, output, mode=mode, draft=draft)


def _with_training(config: OffloadConfig, *, train: bool, rank: int | None, checkpoints: bool | None) -> OffloadConfig:
    """The settings with the training step of these flags. Raises `ConfigError` for flags that are only for it."""
    given = {name: value for name, value in (("rank", rank), ("checkpoints", checkpoints)) if value is not None}
    if not train:
        if given:
            raise ConfigError(
                f"{', '.join(f'--{name}' for name in given)}: only for a training step; pass --train, too"
            )
        return config
    tokens = {"tokens": config.tokens} if "tokens" in config.model_fields_set else {}
    return config.merged(train={"batch": config.batch, **tokens, **given})


def _on_one(
    model: str,
    loading: Loading,
    where: MachineChoice,
    num_shards: int | None,
    target: Target | None,
    output: Output,
    *,
    mode: Speculate,
    draft: str | None,
) -> None:
    """Plan for one GPU: the whole model, or, with tensor parallelism, one of `num_shards` shards of it."""
    from weightstream.api.plan_model import plan_drafted, planner_inputs_of

    options: dict[str, Any] = {**loading, **where}
    shards = {} if num_shards is None else {"tp_size": num_shards}
    sharding: dict[str, Any] = {} if num_shards is None else {"distributed_config": shards}
    gc.disable()  # no garbage arises here, and collections, now or at the end, take a quarter of the time
    atexit.register(_leave)
    try:
        with announced("planning"):
            drafted = plan_drafted(model, draft=draft, mode=mode, **options) if draft is not None else None
            if drafted is not None:
                inputs, planned = drafted.inputs, drafted.plan
            else:
                inputs = planner_inputs_of(model, speculates=mode != "off", **options, **sharding)
                planned = inputs.plan()[1]
        notes = {} if drafted is None else {"draft": drafted.reason}
        if target is not None:
            with output.progress("finding the least budget", MOST_PLANS) as advance:
                found = reaching(inputs, AtBudget(_budget(planned), planned), target, advance)
            planned, notes = found.plan, {"target": reached_text(found, target)}
        if output.save is not None:
            write_file("--save", output.save, planned.to_json())
        if not output.as_json:
            name = model
            if num_shards is not None:
                name, notes = f"a shard of {model}", {"ranks": _ranks_note(inputs, num_shards), **notes}
            notes = _notes(inputs, planned, notes, has_lookup=mode != "off")
            show_plan(name, machine_line(planned, where), planned, notes)
        plans: list[AtBudget[Plan]] = []
        if output.has_sweep:
            budgets = [planned.manifest.decoded_nbytes * k // _BUDGETS for k in range(1, _BUDGETS + 1)]
            with output.progress("planning for other budgets", _BUDGETS) as advance:
                plans = swept(inputs, AtBudget(_budget(planned), planned), budgets, advance)
    finally:
        gc.enable()
    if output.plot is not None:
        draw_plan(model, planned, plans, output.plot)
    if output.as_json:
        facts: dict[str, Any] = {"model": model, **shards, **json_facts(inputs, planned)}
        if plans:
            facts["sweep"] = sweep_rows(plans)
        if mode != "off":
            facts["speculation"] = _expected(planned)._asdict()
        if drafted is not None:
            facts["draft"] = {"is_loaded": drafted.is_drafted, "reason": drafted.reason}
        typer.echo(json.dumps(facts))
    elif output.sweep:
        print_table(_sweep_table(planned, plans), "step time over budget", drop=("ring", "compressed", ""))
        print_labelled(faster_note(AtBudget(_budget(planned), planned), plans))


def _ranks_note(inputs: PlannerInputs, num_shards: int) -> str:
    assumed = rate(inputs.machine.profile.ranks_bytes_per_s / 1e9)
    return f"one of {num_shards} processes with equal plans; their all-reduces are assumed to take {assumed} GB/s"


def _notes(inputs: PlannerInputs, planned: Plan, notes: dict[str, str], *, has_lookup: bool) -> dict[str, str]:
    """Labelled lines below a plan."""
    if inputs.whole_experts and planned.offloaded_nbytes:
        notes = notes | {"experts": inputs.whole_experts}
    if has_lookup:
        expected, text = _expected(planned), planned.rate_text
        speed = f"{text(expected.tokens_per_s)} tokens/s, {text(expected.plain_tokens_per_s)} without"
        gain = f"passes of {expected.tokens} tokens are expected to make {speed}"
        notes = notes | {"lookup": gain if expected.tokens > 1 else "passes of several tokens gain nothing here"}
    return notes | _training_notes(inputs) | advice(inputs, planned)


def _training_notes(inputs: PlannerInputs) -> dict[str, str]:
    """A labelled line on the memory of a training step; empty for any other step."""
    demand = inputs.demands[0]
    if (training := demand.training) is None:
        return {}
    note = f"{_count(training.num_trained)} trainable parameters: {training.explained(demand.activation_nbytes)}"
    if training.loss_nbytes > demand.activation_nbytes / 2:
        note += "; a loss in chunks, as that of TRL's SFTTrainer or of Liger kernels, takes less"
    return {"training": note}


def _expected(planned: Plan) -> PassChoice:
    """The width of passes for drafts from the text itself, and the tokens per second that are expected."""
    if len(planned.passes) < 2:
        return PassChoice(1, planned.tokens_per_s or 0.0, planned.tokens_per_s or 0.0)
    return choose_width(Passes(planned.passes, in_graphs=True), PRIORS["prompt lookup"])


def _config_of_shard(config: OffloadConfig) -> OffloadConfig:
    """The settings of one GPU, of several that have a shard each. Raises `ConfigError`."""
    if not config.stripes:
        raise ConfigError("--tp shards a model over several GPUs: pass --gpus 2 or more, too")
    budget, *others = set(config.stripes.values())
    if others:
        raise ConfigError("--tp: all processes have the same budget: pass --device-budget and --gpus, not max_memory")
    return config.within(budget)


def _on_several(model: str, loading: Loading, where: MachineChoice, *, as_json: bool) -> None:
    """The plan over several GPUs."""
    from weightstream.api.plan_model import plan_stripes

    options: dict[str, Any] = {**loading, **where}
    planned = plan_stripes(model, **options)
    if as_json:
        typer.echo(json.dumps({"model": model, **planned.numbers()}))
        return
    shown = grid("device", "resident", "ring", "streams", "link ms", align_left=("device",))
    for name, part in planned.plans.items():
        cells = map(human, (part.resident_nbytes, part.ring_nbytes + part.buffer_nbytes, part.step_nbytes))
        shown.add_row(name, *cells, table_ms(part, part.copy_s))
    num = len(planned.plans)
    size = f"{human(planned.decoded_nbytes)} of weights over {num} GPU{'s' * (num != 1)}"
    print_labelled(
        {"model": f"{model}: {size}", "step": str(planned.workload), "machine": machine_line(planned.every[0], where)}
    )
    print_table(shown, "a step streams", drop=("ring",))
    print_labelled(planned.predictions())


def _leave() -> None:
    """Skip the last garbage collection, unless Triton is loaded, which would report the objects as leaks."""
    if "triton" not in sys.modules:
        gc.freeze()


def show_plan(model: str, machine: str, planned: Plan, notes: dict[str, str]) -> None:
    """Print the plan."""
    numbers = parameters(planned)
    count = [f"{_count(numbers.num)} parameters"] if numbers.is_of_parameters else []
    size = ", ".join([*count, human(planned.manifest.decoded_nbytes), numbers.dtype])
    print_labelled({"model": f"{model} ({size})", "machine": machine, **memory_lines(planned)})
    print_table(table(planned), drop=("plain each",))
    print_labelled({"moves": _moved(planned), **planned.predictions(), **notes})


def table_ms(plan: Plan, seconds: float) -> str:
    """Predicted seconds in a column of milliseconds."""
    return roughly(1e3 * seconds) if plan.is_rough else f"{1e3 * seconds:,.1f}"


def _count(num: int) -> str:
    """A number of parameters, such as `405.9B`."""
    size, unit = next(((s, u) for u, s in (("B", 1e9), ("M", 1e6), ("K", 1e3)) if num >= s), (1, ""))
    return f"{num / size:.1f}{unit}" if unit else str(num)


def _moved(planned: Plan) -> str:
    """The bytes that a step moves, and where they are kept."""
    if not planned.offloaded_nbytes:
        return "nothing: all weights stay on the device"
    kept = [f"{human(planned.host_nbytes)} in host memory"] if planned.host_nbytes else []
    kept += [f"{human(planned.disk_nbytes)} on disk"] if planned.disk else []
    mapped = f"; kernels read {human(planned.mapped_nbytes)} in place" if planned.mapped else ""
    return f"{human(planned.step_nbytes)} over the link per step, of {' and '.join(kept)}{mapped}"


def advice(inputs: PlannerInputs, planned: Plan) -> dict[str, str]:
    """A labelled line with advice on the budget: enough, too much, or too little."""
    if shortage := inputs.shortage(planned):
        return {"shortage": shortage}
    if not planned.offloaded_nbytes and planned.manifest.codes:
        plain, saved = human(planned.manifest.decoded_nbytes), planned.seconds_text(planned.decode_s)
        return {"note": f"everything fits compressed; uncompressed it would take {plain} and save {saved} per step"}
    if not planned.offloaded_nbytes:
        remedy = ": leave out the budget, as offloading gains nothing here" * inputs.config.has_budget
        return {"note": f"everything fits and nothing streams{remedy}"}
    enough = inputs.enough(planned)
    if enough is not None and _budget(enough) < _LESS * _budget(planned):
        return {"note": f"a budget of {human(_budget(enough))} would be as fast"}
    moved = {"link": (planned.copy_s, planned.step_nbytes), "disk": (planned.disk_s, planned.step_disk_nbytes)}
    busy_s, nbytes = moved.get(planned.limit, (0.0, 0))
    if not nbytes:
        return {}
    saved_s = min(_GIB * busy_s / nbytes, busy_s - planned.run_compute_s)
    about = "" if planned.is_rough else "about "
    return {"note": f"1 GiB more on the device would take {about}{planned.seconds_text(saved_s)} off a step"}


def _sweep_table(planned: Plan, plans: Sequence[AtBudget[Plan]]) -> Table:
    """A row for each budget, with sizes in the unit of the budget."""
    unit, nbytes_of_one = scale(max(at.budget for at in plans))
    headings = (f"budget {unit}", "resident", "ring", "compressed", "step ms", "tokens/s", "limit", "")
    table, slowest = grid(*headings, align_left=("", "limit")), max(at.plan.run_s for at in plans) or 1.0
    for budget, plan in plans:
        sizes = (budget, plan.resident_nbytes, plan.ring_nbytes)
        cells = (
            *(f"{nbytes / nbytes_of_one:.2f}" for nbytes in sizes),
            "yes" if plan.manifest.codes else "",
            table_ms(plan, plan.run_s),
            plan.rate_text(plan.tokens_per_s or 0.0),
            plan.limit if plan.offloaded_nbytes else "all fits",
        )
        add_budget(table, cells, plan.run_s / slowest, is_own=budget == _budget(planned))
    return table


def _budget(plan: Plan) -> int:
    return plan.budget or plan.device_nbytes


def json_facts(inputs: PlannerInputs, planned: Plan) -> dict[str, Any]:
    """The values on the screen, in bytes and seconds, and the plan itself."""
    enough, numbers = inputs.enough(planned), parameters(planned)
    return {
        "num_parameters": numbers.num if numbers.is_of_parameters else None,
        "dtype": numbers.dtype,
        **planned.numbers(),
        "enough_budget": enough.budget if enough else None,
        "shortage": inputs.shortage(planned),
        "experts": inputs.whole_experts,
        "plan": json.loads(planned.to_json()),
    }


def draw_plan(model: str, planned: Plan, plans: Sequence[AtBudget[Plan]], path: Path) -> None:
    """Draw step time over budget, with the lower bounds of any schedule: the time of the link and of compute."""
    unit, nbytes_of_one = scale(max(at.budget for at in plans))
    budgets = [at.budget / nbytes_of_one for at in plans]
    with figure(path, height=4.5) as axes:
        axes.plot(budgets, [1e3 * at.plan.run_s for at in plans], ".-", linewidth=3, label="predicted step")
        axes.plot(budgets, [1e3 * at.plan.copy_s for at in plans], "--", label="link busy")
        axes.plot(budgets, [1e3 * at.plan.run_compute_s for at in plans], ":", label="compute busy")
        own = f"this plan: {human(_budget(planned))}, {planned.seconds_text(planned.run_s)}"
        axes.plot(_budget(planned) / nbytes_of_one, 1e3 * planned.run_s, "o", markersize=9, label=own)
        title = f"{Path(model).name} on {planned.machine_text}"
        title += f", {planned.workload}" if planned.workload else ""
        axes.set(xlabel=f"device budget for weights, {unit}", ylabel="step, ms", title=title)
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()


# -- memory by use, units by kind --------------------------------------------------------------------------------------


def table(plan: Plan) -> Table:
    """A row for each kind of unit: the number of units, and the bytes of one by the place where they live.

    The names of units of one kind differ only in numbers, and they have the same uncompressed bytes in the same places.
    Compressed sizes differ slightly: the mean is shown.
    """
    is_compressed = bool(plan.manifest.codes)
    places = ["resident", *["zero-copy"] * bool(plan.mapped), *["cached"] * bool(plan.cached), "streams"]
    places += ["from disk"] * bool(plan.disk)
    kinds: defaultdict[tuple[str, ...], list[tuple[str, list[int]]]] = defaultdict(list)
    for unit in plan.manifest.units:
        held, plain = (_shares(plan, unit, places, sizes) for sizes in (plan.manifest.aliases, plan.manifest.spans))
        kind = re.sub(r"\d+", "#", unit.name), *map(human, plain), *map(str, {t.is_coded for t in unit.tensors})
        kinds[kind].append((unit.name or "(root)", [*[sum(plain)] * is_compressed, *held]))
    headings = [*["plain"] * is_compressed, *places]
    shown = grid("unit", "units", *(f"{heading} each" for heading in headings), align_left=("unit",))
    for units in kinds.values():
        columns = zip(*(sizes for _, sizes in units), strict=True)
        cells = (human(sum(sizes) / len(units)) for sizes in columns)
        shown.add_row(Text(_span([name for name, _ in units])), str(len(units)), *cells)
    return shown


def _shares(plan: Plan, unit: UnitSpec, places: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """The bytes of a unit in each place."""
    aliases = unit.aliases().keys()
    streams = aliases - plan.placed
    groups = {"resident": aliases & plan.resident, "zero-copy": aliases & plan.mapped, "streams": streams}
    groups["cached"] = aliases & plan.cached
    groups["from disk"] = streams & plan.disk
    return [sum(sizes[alias] for alias in groups[place]) for place in places]


def _span(names: list[str]) -> str:
    """The names of a kind as one: `layers.0…7.mlp`."""
    last, to = iter(re.findall(r"\d+", names[-1])), drawn("…", "..")
    return re.sub(r"\d+", lambda n: n[0] if n[0] == (end := next(last)) else f"{n[0]}{to}{end}", names[0])


def memory_lines(plan: Plan) -> dict[str, str]:
    """Labelled lines with the device memory of the plan, by use: in the budget, and besides it."""
    sizes = {"resident": plan.resident_nbytes, "ring": plan.ring_nbytes, "buffer": plan.own_buffer_nbytes}
    sizes |= {"slots": plan.slots_nbytes, "spare": max(0, (plan.budget or 0) - plan.device_nbytes)}
    besides = {"cache": plan.cache_nbytes, "activations": plan.activation_nbytes, "training": plan.trained_nbytes}
    lines = {"memory": f"{_sum(sizes)} for weights"}
    return lines | ({"besides": _sum(besides)} if any(besides.values()) else {})


def _sum(sizes: Mapping[str, int]) -> str:
    """A sum of bytes by name, without those that are zero."""
    parts = [f"{name} {human(nbytes)}" for name, nbytes in sizes.items() if nbytes]
    return f"{' + '.join(parts)} = {human(sum(sizes.values()))}" if len(parts) != 1 else parts[0]


class StoredNumbers(NamedTuple):
    """The number of elements of tensors as they are stored, and their dtype."""

    num: int
    dtype: str

    @property
    def is_of_parameters(self) -> bool:
        """Whether each is a parameter: quantised formats store several in one integer."""
        return "float" in self.dtype


def parameters(plan: Plan) -> StoredNumbers:
    """The number of elements of all weights, tied ones counted once, and the dtype that most elements have."""
    stored: dict[str, StoredNumbers] = {}
    for tensor in plan.manifest.tensors():
        numbers = StoredNumbers(math.prod(tensor.shape), tensor.dtype.removeprefix("torch."))
        stored[tensor.alias] = max(stored.get(tensor.alias, numbers), numbers)  # the largest of those that share bytes
    nums: Counter[str] = Counter()
    for numbers in stored.values():
        nums[numbers.dtype] += numbers.num
    return StoredNumbers(nums.total(), max(nums, key=lambda dtype: nums[dtype], default="nothing"))
