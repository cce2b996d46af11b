"""What a command writes: lines of at most 100 columns, without colour in a pipe; and whole files, and figures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from weightstream.errors import ConfigError

COLUMNS = 100
LABEL = 9


def screen() -> Console:
    """The console of stdout. A pipe is as wide as the widest terminal."""
    console = Console(highlight=False, emoji=False, markup=False)
    console.width = min(COLUMNS, console.width) if console.is_terminal else COLUMNS
    return console


def print_folded(head: Text, body: str, style: str = "") -> None:
    """A line that goes on below the end of its head."""
    console, margin = screen(), " " * len(head)
    options = {"initial_indent": margin, "subsequent_indent": margin, "break_on_hyphens": False}
    folded = textwrap.fill(body, console.width, **options)  # type: ignore[arg-type]
    console.print(Text.assemble(head, (folded[len(head) :], style)), soft_wrap=True)


def print_labelled(lines: Mapping[str, str]) -> None:
    """Labels right-aligned, so that columns line up though a label and its value stand one space apart."""
    for label, value in lines.items():
        print_folded(Text.assemble((f"{label:>{LABEL}}:", "bold"), " "), value)


def write(flag: str, path: Path, text: str, *, append: bool = False) -> None:
    """Write the file that a flag names."""
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; name a file that can be written") from error


def new_figure(width: float = 8, height: float = 4.5) -> tuple[Any, Any]:
    """A figure of inches on white, for light pages and dark ones, and its axes. No window, no state outside of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    return figure, figure.add_subplot()


def save_figure(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # a folder that is not there, an ending that is no picture's
        raise ConfigError(f"--plot {path}: {error}; name a .png file that can be written") from error
