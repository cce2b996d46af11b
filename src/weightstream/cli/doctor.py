"""`weightstream doctor`: shows what this machine can do, what is missing or broken, and how to fix it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from weightstream.cli.terminal import AsJson, Device, check_writable, print_folded, screen, write_file
from weightstream.measure.progress import lasting

if TYPE_CHECKING:
    from weightstream.measure.checks import Finding

_MARKS = MappingProxyType(  # symbol, style, and the word for its number in the last line
    {
        "ok": ("ok", "green", ""),
        "note": ("", "", ""),
        "broken": ("X", "bold red", "broken"),
        "better": ("!", "magenta", "could be better"),  # yellow is hard to read on white
    }
)


def doctor(
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder of a model, to measure its disk, as with --path.", show_default=False),
    ] = None,
    device: Device = None,
    path: Annotated[
        Path, typer.Option(help="Measure the disk of this folder, with a scratch file of 256 MiB.", show_default="here")
    ] = Path(),
    measure: Annotated[bool, typer.Option("--measure", help="Measure again, even if there are measurements.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the measured profile, for `weightstream plan --profile`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine can do, what is missing or broken, and how to fix it.

    Speeds are measured the first time, in a second or two, and kept until the driver, torch or the
    device changes. Exits with 1 if something is broken.
    """
    check_writable("--save", save)
    with lasting("loading libraries"):
        from weightstream.measure.checks import examine
        from weightstream.measure.profile import to_json

    findings, profile = examine(device, (model or path).expanduser(), anew=measure)
    if save is not None:
        write_file("--save", save, to_json(profile) + "\n")
    if as_json:
        rows = [finding._asdict() | {"section": section} for section, finding in findings]
        typer.echo(json.dumps({"profile": asdict(profile), "findings": rows}, indent=2))
    else:
        _print(findings)
        if save is not None:
            typer.echo(f"The profile is in {save}: weightstream plan MODEL --profile {save}")
    raise typer.Exit(1 if any(finding.mark == "broken" for _, finding in findings) else 0)


def _print(findings: Sequence[tuple[str, Finding]]) -> None:
    """Print one line for each finding, and its remedy below."""
    width = max(len(finding.label) for _, finding in findings)
    for section, rows in groupby(findings, itemgetter(0)):
        screen().print(section, style="bold")
        for _, finding in rows:
            symbol, style, _ = _MARKS[finding.mark]
            print_folded(Text.assemble((f"{symbol:>4}", style), f"  {finding.label:<{width}} "), finding.text)
            if finding.remedy:
                print_folded(Text(f"{'-> ':>{width + 7}}", "italic"), finding.remedy, "italic")
    counts = Counter(finding.mark for _, finding in findings)
    verdict = ", ".join(f"{counts[mark]} {text}" for mark, (_, _, text) in _MARKS.items() if text and counts[mark])
    typer.echo(f"\n{verdict if counts['broken'] else f'It works; {verdict}' if verdict else 'All is well'}.")
