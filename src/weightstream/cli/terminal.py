"""The terminal: the options that every command takes for a model, and the lines, tables and files that it writes.

Lines and tables take at most 100 columns, have no colour in a pipe, and are of ASCII where stdout encodes no more.
Colours are those that can be read on light and on dark. Reads settings; loads no model.
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
from weightstream.plan.units import human, milliseconds
from weightstream.settings.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

if TYPE_CHECKING:
    from weightstream.runtime.streamer.stats import Stats

Model = Annotated[str, typer.Argument(help="Folder of a checkpoint, or its repository id on the hub.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; cuda if there is one.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]
_PANEL = "Pipelines of diffusers"
Height = Annotated[
    int | None, typer.Option(min=1, help="Of a pipeline's image, in pixels; default: its own.", rich_help_panel=_PANEL)
]
Width = Annotated[
    int | None, typer.Option(min=1, help="Of a pipeline's image, in pixels; default: its own.", rich_help_panel=_PANEL)
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Denoising steps of a pipeline; default: its own.", rich_help_panel=_PANEL)
]
Frames = Annotated[
    int | None, typer.Option(min=1, help="Frames of a video; default: the pipeline's own.", rich_help_panel=_PANEL)
]
Variant = Annotated[str | None, typer.Option(help="Of a pipeline's files, such as fp16.", rich_help_panel=_PANEL)]
_Dtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    typer.Option(help="Of the weights; auto is the checkpoint's own."),
]
_File = Annotated[Path | None, typer.Option(help="TOML file of settings; flags win over it.")]
_LOADING = MappingProxyType(  # beside the settings: annotation and default
    {"dtype": (_Dtype, "auto"), "trust_remote_code": (TrustRemoteCode, False), "device": (Device, None)}
)


class Loading(TypedDict):
    """The keywords of `from_pretrained` and `plan_model` that the options of a command make."""

    config: OffloadConfig
    device: str | None
    dtype: str
    trust_remote_code: bool


_READ_AS: MappingProxyType[Any, Any] = MappingProxyType({frozenset[str]: list[str], int | str | None: str})
_FIRST = ("device_budget", "device")  # what nearly everybody gives
_COLUMNS, _FEWEST, _LABEL, _BAR = 100, 40, 9, 8
_FACTOR = 2  # that a prediction is off by, if the machine is no longer what was measured


def require(package: str, extra: str, what: str) -> Any:
    """A package that what is asked for needs; to be called before anything that takes time."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        remedy = f"pip install 'weightstream[{extra}]'"
        raise UnsupportedError(f"{what} needs the package {error.name}: {remedy}") from error


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
            given = {name: value for name in settings if (value := values.pop(name)) not in (None, [])}
            read = functools.partial(OffloadConfig.from_toml, config) if config else OffloadConfig.from_kwargs
            loading = Loading(config=read(**given), device=device, dtype=dtype, trust_remote_code=trust_remote_code)
            command(model, loading, **values)

        first = [parameter for parameter in added if parameter.name in _FIRST]
        rest = [parameter for parameter in added if parameter.name not in _FIRST]
        run.__signature__ = signature.replace(parameters=[model, *first, *own, *rest])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def _settings() -> dict[str, Any]:
    """The option of each setting that has a description, as an annotation; the configuration judges the value."""
    classic, options = PrefetchOffloadConfig.model_fields | UVAOffloadConfig.model_fields, {}
    for name, field in (OffloadConfig.model_fields | classic).items():
        if field.description:
            least: Any = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
            panel = "Classic flags, instead of a budget" if name in {*classic, "offload_backend"} else None
            option = typer.Option(help=field.description, rich_help_panel=panel, min=least)
            options[name] = Annotated[_READ_AS.get(field.annotation, field.annotation) | None, option]
    return options


# -- what it writes ----------------------------------------------------------------------------------------------------


def screen() -> Console:
    """The console of stdout. A pipe is as wide as COLUMNS says, else as the widest terminal."""
    console = Console(highlight=False, emoji=False, markup=False)
    is_known = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    console.width = max(_FEWEST, min(_COLUMNS, console.width)) if is_known else _COLUMNS
    return console


def drawn(text: str, plain: str) -> str:
    """The text, or a plain one where stdout cannot encode it."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return plain
    return text


def grid(*headings: str, align_left: Container[str]) -> Table:
    """A table without rows; columns of numbers to the right."""
    shown = Table()
    for heading in headings:
        is_left = heading in align_left
        shown.add_column(heading, justify="left" if is_left else "right", no_wrap=not is_left, overflow="fold")
    return shown


def add_budget(shown: Table, cells: Sequence[str], share: float, *, is_own: bool) -> None:
    """A row of a sweep over budgets, with a bar of the largest one's `share`; that of what was asked for is marked."""
    mark = f"{drawn('▶', '>')} " * is_own
    bar = drawn("█", "#") * max(1, round(_BAR * share))
    shown.add_row(mark + cells[0], *cells[1:], bar, style="bold" if is_own else None)


def print_table(shown: Table, title: str = "", *, drop: Container[str] = ()) -> None:
    """A table below its title; where it is too wide, its headings are broken, and then the last of `drop` goes."""
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


def print_folded(head: Text, body: str, style: str = "") -> None:
    """A line that goes on below the end of its head."""
    console, margin = screen(), " " * len(head)
    options = {"initial_indent": margin, "subsequent_indent": margin, "break_on_hyphens": False}
    folded = textwrap.fill(body, console.width, **options)  # type: ignore[arg-type]
    console.print(Text.assemble(head, (folded[len(head) :], style)), soft_wrap=True)


def tell(text: str, *, err: bool = True) -> None:
    """A message on stderr, or stdout; a terminal breaks it between words."""
    lines = text.splitlines()
    if (console := Console(stderr=err)).is_terminal:
        options = {"break_on_hyphens": False, "break_long_words": False}
        lines = [textwrap.fill(line, max(_FEWEST, console.width), **options) for line in lines]  # type: ignore[arg-type]
    typer.echo("\n".join(lines), err=err)


def print_labelled(lines: Mapping[str, str]) -> None:
    """Labels right-aligned, so that columns line up though a label and its value stand one space apart."""
    for label, value in lines.items():
        print_folded(Text.assemble((f"{label:>{_LABEL}}:", "bold"), " "), value)


def foretold(predicted_s: float, measured_s: float, text: Callable[[float], str] = milliseconds) -> dict[str, str]:
    """What was predicted beside what was measured, as labelled lines."""
    ratio = measured_s / predicted_s
    is_far = not 1 / _FACTOR <= ratio <= _FACTOR
    off = f"{max(ratio, 1 / ratio):.1f} times" if is_far else f"{abs(ratio - 1):.0%}".replace("%", " %")
    verdict = "as predicted" if off == "0 %" else f"{off} {'slower' if ratio > 1 else 'faster'} than predicted"
    lines = {"predicted": f"{text(predicted_s)}, measured {text(measured_s)}: {verdict}"}
    if is_far:
        lines["advice"] = "measure again with `weightstream doctor --measure`"
    return lines


def numbers_of(stats: Stats) -> dict[str, Any]:
    """What `--json` says of stats: counts of experts by name."""
    return dataclasses.asdict(stats) | {"experts": stats.experts._asdict()}


def counted(experts: Mapping[str, Any]) -> str:
    """What was counted in a cache of experts."""
    share, nbytes = experts["found_share"], human(experts["fetched_nbytes_per_token"])
    found = "none was read there" if share is None else f"{100 * share:.1f} % found there, {nbytes} fetched per token"
    used = experts["ahead_used_share"]
    ahead = "" if used is None else f"; of those fetched ahead {100 * used:.0f} % were used"
    return f"{experts['num_slots']} slots for those of a layer; {found}{ahead}"


def write_file(flag: str, path: Path, text: str, *, append: bool = False) -> None:
    """Write the file that a flag names."""
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; name a file that can be written") from error


@contextmanager
def figure(path: Path, height: float) -> Iterator[Any]:
    """The axes of a figure on white, for light pages and dark ones; it is written at the end. No window is opened."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, height), dpi=150, facecolor="white", layout="constrained")
    yield drawn.add_subplot()
    try:
        drawn.savefig(path)
    except (OSError, ValueError) as error:  # a folder that is not there, an ending that is no picture's
        raise ConfigError(f"--plot {path}: {error}; name a .png file that can be written") from error
