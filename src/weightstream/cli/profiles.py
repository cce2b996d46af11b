"""`weightstream profiles`: the measured speeds of devices that are stored on this machine."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer

from weightstream.cli.terminal import grid, print_table
from weightstream.plan.units import per_second


def profiles(
    clear: Annotated[bool, typer.Option("--clear", help="Remove them all: the next call measures again.")] = False,
) -> None:
    """List the stored profiles, which are the measured speeds of this machine's devices, or remove them.

    weightstream measures a device once, before the first plan for it.
    """
    from weightstream.measure.profile import profiles_folder, stored_profiles

    folder, found = profiles_folder(), stored_profiles()
    if clear:
        for each in found:
            with suppress(FileNotFoundError):  # another process was first
                each.path.unlink()
        typer.echo(f"{len(found)} {'profile' if len(found) == 1 else 'profiles'} removed from {folder}")
        return
    if not found:
        typer.echo(f"no profiles in {folder}: `weightstream doctor` measures this machine")
        return
    shown = grid("file", "measured", "link", "device", align_left=("file", "measured", "device"))
    for path, profile in found:
        if profile is None:
            shown.add_row(path.name, "?", "?", "of another version: it is not used")
        else:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(profile.measured_at))
            shown.add_row(path.name, when, per_second(profile.link_bytes_per_s), profile.machine)
    print_table(shown, str(folder))
