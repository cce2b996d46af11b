"""The kernel's counts for mapped files in this process."""

from __future__ import annotations

from pathlib import Path

from weightstream.store.mapping import FileMapping


def rss_nbytes(mapping: FileMapping) -> int:
    """Resident bytes of a private mapping of a file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    start = f"{mapping.address:x}-"
    next(line for line in lines if line.startswith(start))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10
