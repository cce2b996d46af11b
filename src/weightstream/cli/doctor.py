"""`weightstream doctor`: shows what this machine can do, what is in the way, and how to fix it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from weightstream.cli.terminal import AsJson, Device, print_folded, screen, write

if TYPE_CHECKING:
    from weightstream.measure.findings import Sections

_MARKS = MappingProxyType(  # symbol, style, and what the last line counts
    {
        "ok": ("ok", "green", ""),
        "note": ("", "", ""),
        "broken": ("X", "bold red", "broken"),
        "better": ("!", "magenta", "could be better"),  # yellow is hard to read on white
        "missing": ("-", "magenta", "missing"),
    }
)


def doctor(
    model: Annotated[
        Path | None, typer.Argument(help="Folder of a model, to measure its disk; as --path.", show_default=False)
    ] = None,
    device: Device = None,
    path: Annotated[
        Path, typer.Option(help="Measure the disk of this folder, with a scratch file of 256 MiB.", show_default="here")
    ] = Path(),
    measure: Annotated[bool, typer.Option("--measure", help="Measure again what was measured before.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the measured profile, for `weightstream plan --profile`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine can do, what is in the way, and how to fix it.

    Speeds are measured the first time, in a second or two, and kept until the driver, torch or the device changes.
    Exits with 1 if something is broken.
    """
    from weightstream.measure.findings import examine
    from weightstream.measure.profile import to_json

    sections, profile = examine(device, (model or path).expanduser(), anew=measure)
    if save is not None:
        write("--save", save, to_json(profile) + "\n")
    findings = [finding._asdict() | {"section": name} for name, part in sections.items() for finding in part]
    if as_json:
        typer.echo(json.dumps({"profile": asdict(profile), "findings": findings}, indent=2))
    else:
        show(sections)
        if save is not None:
            typer.echo(f"The profile is in {save}: weightstream plan MODEL --profile {save}")
    raise typer.Exit(1 if any(finding["mark"] == "broken" for finding in findings) else 0)


def show(sections: Sections) -> None:
    """One line per finding, the remedy below it."""
    for name, part in sections.items():
        if part:
            screen().print(name, style="bold")
        for finding in part:
            symbol, style, _ = _MARKS[finding.mark]
            print_folded(Text.assemble((f"{symbol:>4}", style), f"  {finding.label:<14}"), finding.text)
            if finding.remedy:
                print_folded(Text(f"{'-> ':>20}", "italic"), finding.remedy, "italic")
    counts = Counter(finding.mark for part in sections.values() for finding in part)
    verdict = ", ".join(f"{counts[mark]} {text}" for mark, (_, _, text) in _MARKS.items() if text and counts[mark])
    typer.echo(f"\n{verdict or 'All is well'}.")
