"""The terminal: options that all commands share, and the lines, tables and files that commands write.

Lines and tables take at most 100 columns, have no colour in a pipe, and are ASCII if stdout encodes nothing else.
All colours are legible on light and on dark backgrounds. Reads settings; loads no model.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import typer
from annotated_types import Ge
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightstream.errors import ConfigError, UnsupportedError
from weightstream.plan.units import human, milliseconds, rate, rough_seconds
from weightstream.settings.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

if TYPE_CHECKING:
    from weightstream.runtime.streamer.stats import Stats

NOT_REPRODUCIBLE = "not known: the model itself is not reproducible here, as its bits differ from run to run"
_PANEL, _DRAFTS = "Pipelines of diffusers", "Drafts"
_PLACEMENT, _VLLM = "Loading and placement", "vLLM's offloading flags, instead of a budget"


def _named(model: str) -> str:
    if not model:
        raise ConfigError("MODEL is empty: give a folder, or the name of a repository on the Hub")
    return model


Model = Annotated[str, typer.Argument(help="Folder of a checkpoint, or its repository id on the Hub.", callback=_named)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: cuda if there is one, else cpu.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code from the checkpoint.", rich_help_panel=_PLACEMENT),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Height = Annotated[
    int | None,
    typer.Option(min=1, help="Height of images in pixels. Default: the pipeline's.", rich_help_panel=_PANEL),
]
Width = Annotated[
    int | None, typer.Option(min=1, help="Width of images in pixels. Default: the pipeline's.", rich_help_panel=_PANEL)
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Denoising steps. Default: the pipeline's.", rich_help_panel=_PANEL)
]
Frames = Annotated[
    int | None, typer.Option(min=1, help="Frames of a video. Default: the pipeline's.", rich_help_panel=_PANEL)
]
Variant = Annotated[str | None, typer.Option(help="Variant of the weight files, such as fp16.", rich_help_panel=_PANEL)]
SpeculateMode = Annotated[
    Literal["auto", "off", "lookup", "draft"] | None,
    typer.Option(
        help="Verify several drafted tokens in a pass: auto where that is faster, lookup from the text itself, draft "
        "by --draft, off never. Default: auto with --draft, else off.",
        rich_help_panel=_DRAFTS,
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        help="Small model with the same tokens that drafts, inside of the budget, if that is faster; or self: the "
        "model drafts with the first bits of its own weights.",
        rich_help_panel=_DRAFTS,
    ),
]
_Dtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    typer.Option(help="Dtype of the weights; auto is the checkpoint's.", rich_help_panel=_PLACEMENT),
]
_File = Annotated[
    Path | None, typer.Option(help="TOML file of settings; flags override it.", rich_help_panel=_PLACEMENT)
]
_LOADING = MappingProxyType(  # annotation and default of the options that are no settings
    {"dtype": (_Dtype, "auto"), "trust_remote_code": (TrustRemoteCode, False), "device": (Device, None)}
)


class Loading(TypedDict):
    """The keywords of `from_pretrained` and `plan_model` that the options of a command make."""

    config: OffloadConfig
    device: str | None
    dtype: str
    trust_remote_code: bool


_READ_AS: MappingProxyType[Any, Any] = MappingProxyType({frozenset[str]: list[str], int | str | None: str})
_FIRST = ("device_budget", "device")  # the most frequent ones
_COLUMNS, _FEWEST, _LABEL, _BAR = 100, 40, 9, 8
_FACTOR = 2  # predictions that are off by more are compared by a factor, others in percent


def require(package: str, extra: str, what: str) -> Any:
    """Import a package that `what` needs, or raise an error with the remedy. Call it before anything slow."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        remedy = f"pip install 'weightstream[{extra}]'"
        raise UnsupportedError(f"{what} needs the package {error.name}: {remedy}") from error


def is_on_cpu(device: str | None) -> bool:
    """Whether a model computes on the CPU with this --device."""
    from weightstream.runtime.devices.opening import device_of

    return device_of(device).type == "cpu"


def takes_model(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `command(model, loading, *, own options)` take MODEL and all settings but those `left_out`.

    `loading` is a `Loading`.
    """
    settings = {name: kind for name, kind in _settings().items() if name not in left_out}
    shared = {**_LOADING, "config": (_File, None), **{name: (kind, None) for name, kind in settings.items()}}
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=d, annotation=kind) for name, (kind, d) in shared.items()]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        model, _, *own = signature.parameters.values()

        @functools.wraps(command)
        def run(
            model: str, config: Path | None, device: str | None, dtype: str, trust_remote_code: bool, **values: Any
        ) -> None:
            flags = {name: value for name in settings if (value := values.pop(name)) not in (None, [])}
            read = functools.partial(OffloadConfig.from_toml, config) if config else OffloadConfig.from_kwargs
            loading = Loading(config=read(**flags), device=device, dtype=dtype, trust_remote_code=trust_remote_code)
            command(model, loading, **values)

        first = [parameter for parameter in added if parameter.name in _FIRST]
        rest = [parameter for parameter in added if parameter.name not in _FIRST]
        run.__signature__ = signature.replace(parameters=[model, *first, *own, *rest])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def _settings() -> dict[str, Any]:
    """An annotation with an option for each setting that has a description; the configuration validates the value."""
    classic, options = PrefetchOffloadConfig.model_fields | UVAOffloadConfig.model_fields, {}
    for name, field in (OffloadConfig.model_fields | classic).items():
        if field.description:
            least: Any = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
            kind, panel = _READ_AS.get(field.annotation, field.annotation), None if name in _FIRST else _PLACEMENT
            panel = _VLLM if name in {*classic, "offload_backend"} else panel
            several = " May be given several times." if kind == list[str] else ""
            option = typer.Option(help=f"{field.description}{several}", rich_help_panel=panel, min=least)
            options[name] = Annotated[kind | None, option]
    return options


# -- output ------------------------------------------------------------------------------------------------------------


def screen(*, err: bool = False) -> Console:
    """The console of stdout, or of stderr. A pipe is as wide as COLUMNS says, else 100 columns."""
    console = Console(highlight=False, emoji=False, markup=False, stderr=err)
    is_known = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    console.width = max(_FEWEST, min(_COLUMNS, console.width)) if is_known else _COLUMNS
    return console


def drawn(text: str, plain: str) -> str:
    """`text`, or `plain` if stdout cannot encode it."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return plain
    return text


def grid(*headings: str, align_left: Container[str]) -> Table:
    """A table without rows; columns are right-aligned, as for numbers, except `align_left`."""
    shown = Table()
    for heading in headings:
        is_left = heading in align_left
        shown.add_column(heading, justify="left" if is_left else "right", no_wrap=not is_left, overflow="fold")
    return shown


def add_budget(shown: Table, cells: Sequence[str], share: float, *, is_own: bool) -> None:
    """Add a row of a sweep over budgets, with a bar of `share` of the full length. The row of the plan is marked."""
    mark = f"{drawn('▶', '>')} " * is_own
    bar = drawn("█", "#") * max(1, round(_BAR * share))
    shown.add_row(mark + cells[0], *cells[1:], bar, style="bold" if is_own else None)


def print_table(shown: Table, title: str = "", *, drop: Container[str] = ()) -> None:
    """Print a table below its title. If it is too wide, headings are broken, then columns of `drop` go from the end."""
    console = screen()
    endless = console.options.update(max_width=10 * _COLUMNS)

    def is_wide() -> bool:
        return console.measure(shown, options=endless).maximum > console.width

    less_important = [column for column in shown.columns if column.header in drop]
    if is_wide():
        for column in shown.columns:
            column.header = str(column.header).replace(" ", "\n").replace("/", "\n/")
    while less_important and is_wide():
        shown.columns.remove(less_important.pop())
    if title:
        console.print(f"\n{title}", style="bold")
    console.print(shown)


def print_folded(head: Text, body: str, style: str = "", *, err: bool = False) -> None:
    """Print a line whose continuation is indented by the length of its head."""
    console, margin = screen(err=err), " " * len(head)
    options = {"initial_indent": margin, "subsequent_indent": margin, "break_on_hyphens": False}
    folded = textwrap.fill(body, console.width, **options)  # type: ignore[arg-type]
    console.print(Text.assemble(head, (folded[len(head) :], style)), soft_wrap=True)


def print_message(text: str, *, err: bool = True) -> None:
    """Print a message on stderr, or stdout; on a terminal it is broken between words."""
    lines = text.splitlines()
    if (console := Console(stderr=err)).is_terminal:
        options = {"break_on_hyphens": False, "break_long_words": False}
        lines = [textwrap.fill(line, max(_FEWEST, console.width), **options) for line in lines]  # type: ignore[arg-type]
    typer.echo("\n".join(lines), err=err)


def print_labelled(lines: Mapping[str, str], *, err: bool = False) -> None:
    """Print lines with right-aligned labels, so that values line up one space after their labels."""
    for label, value in lines.items():
        print_folded(Text.assemble((f"{label:>{_LABEL}}:", "bold"), " "), value, err=err)


def prediction_text(
    predicted_s: float,
    measured_s: float,
    text: Callable[[float], str] = milliseconds,
    *,
    is_rough: bool = False,
    step: object = None,
) -> str:
    """A prediction, for `step` if it is known, compared with the measurement."""
    ratio = measured_s / predicted_s
    is_far = not 1 / _FACTOR <= ratio <= _FACTOR
    off = f"{max(ratio, 1 / ratio):.1f} times" if is_far else f"{abs(ratio - 1):.0%}".replace("%", " %")
    verdict = "as predicted" if off == "0 %" else f"{off} {'slower' if ratio > 1 else 'faster'}"
    planned = (rough_seconds if is_rough else text)(predicted_s) + (f" ({step})" if step else "")
    return f"{planned}, measured {text(measured_s)}: {verdict}"


def numbers_of(stats: Stats) -> dict[str, Any]:
    """The fields of stats for `--json`, with counts of experts by name."""
    numbers = dataclasses.asdict(stats) | {"experts": stats.experts._asdict()}
    if (found := stats.speculation) is not None:
        numbers["speculation"] |= {"tokens_per_pass": found.tokens_per_pass, "acceptance": found.acceptance}
    return numbers


def speculation_line(found: Mapping[str, Any], measured_tokens_per_s: float) -> str:
    """The tokens per pass, the times and the prediction of texts with drafts, as text."""
    draft_s, verify_s, predicted = found["draft_s"], found["verify_s"], found["predicted_tokens_per_s"]
    speed = (
        "" if predicted is None else f"; {rate(predicted)} tokens/s predicted, {rate(measured_tokens_per_s)} measured"
    )
    return (
        f"{found['tokens_per_pass']:.2f} tokens per pass, {found['acceptance']:.0%} of {found['drafted']} drafted ones "
        f"accepted; drafts took {draft_s:.2f} s, passes {verify_s:.2f} s{speed}"
    )


def expert_line(experts: Mapping[str, Any]) -> str:
    """The hit rate and traffic of an expert cache, as text."""
    share, nbytes = experts["found_share"], human(experts["fetched_nbytes_per_token"])
    hits = "none were looked up" if share is None else f"{100 * share:.1f} % hits, {nbytes} fetched per token"
    used = experts["ahead_used_share"]
    prefetched = "" if used is None else f"; {100 * used:.0f} % of prefetched experts were used"
    return f"{experts['num_slots']} slots per layer; {hits}{prefetched}"


def write_file(flag: str, path: Path, text: str, *, append: bool = False) -> None:
    """Write the file that a flag names."""
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; name a file that can be written") from error


def check_writable(flag: str, path: Path | None) -> None:
    """Raise `ConfigError` now, not after minutes, if the file that a flag names cannot be written."""
    if path is None or path.is_fifo():  # the reader of a pipe would see its end
        return
    path = path.resolve()  # what would be removed is the file, and no link to it
    existed = path.exists()
    write_file(flag, path, "", append=True)
    if not existed:
        path.unlink()


def check_figure(path: Path) -> None:
    """Raise `ConfigError` now, not after minutes, if the figure of --plot cannot be written."""
    require("matplotlib", "plot", "--plot")
    from matplotlib.figure import Figure

    if path.suffix.lower().removeprefix(".") not in Figure().canvas.get_supported_filetypes():
        raise ConfigError(f"--plot {path}: no kind of figure ends so; name a .png file that can be written")
    check_writable("--plot", path)


@contextmanager
def figure(path: Path, height: float) -> Iterator[Any]:
    """The axes of a figure with a white background, also for dark pages; it is written at the end. No window opens."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, height), dpi=150, facecolor="white", layout="constrained")
    yield drawn.add_subplot()
    try:
        drawn.savefig(path)
    except (OSError, ValueError) as error:  # a missing folder, or no suffix of an image
        raise ConfigError(f"--plot {path}: {error}; name a .png file that can be written") from error
