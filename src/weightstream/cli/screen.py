"""What a command prints to: at most 100 columns, without colour where nobody sees it, labels one below the other."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = 100
LABEL = 9


def screen() -> Console:
    """The console of stdout. A pipe is as wide as the widest terminal."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    console.width = min(COLUMNS, console.width) if console.is_terminal else COLUMNS
    return console


def print_labelled(lines: Mapping[str, str]) -> None:
    """Labels right-aligned, so that columns line up though a label and its value stand one space apart."""
    from rich.text import Text

    console, margin = screen(), LABEL + 2
    for label, value in lines.items():
        folded = textwrap.fill(value, COLUMNS - margin, subsequent_indent=" " * margin, break_on_hyphens=False)
        console.print(Text.assemble((f"{label:>{LABEL}}:", "bold"), " ", folded), soft_wrap=True)
