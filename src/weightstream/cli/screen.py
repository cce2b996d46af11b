"""What a command writes: lines and tables of 100 columns, without colour in a pipe; whole files, and figures."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightstream.errors import ConfigError

COLUMNS = 100
LABEL = 9


def screen() -> Console:
    """The console of stdout. A pipe is as wide as the widest terminal."""
    console = Console(highlight=False, emoji=False, markup=False)
    console.width = min(COLUMNS, console.width) if console.is_terminal else COLUMNS
    return console


def grid(*headings: str, align_left: Container[str]) -> Table:
    """A table without rows; columns of numbers to the right."""
    shown = Table()
    for heading in headings:
        is_left = heading in align_left
        shown.add_column(heading, justify="left" if is_left else "right", no_wrap=not is_left, overflow="fold")
    return shown


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
