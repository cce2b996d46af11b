"""A result row: what was measured, on what, by which command. Appended to `results/*.jsonl`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import weightstream

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("accelerate", "deepspeed", "diffusers", "flextensor", "peft", "transformers", "triton")


def percentiles(values: list[float]) -> dict[str, float]:
    """p20, p50 and p80 of a list of timings."""
    return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (20, 50, 80)}


def environment() -> dict[str, Any]:
    """Hardware and versions of this machine, the commit, the full command, and the time, which names the run."""
    cuda = torch.cuda.is_available()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in PACKAGES},
        "weightstream": weightstream.__version__,
        "commit": os.environ.get("WEIGHTSTREAM_COMMIT") or _commit(),
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
    }


@contextmanager
def guarded(write: Callable[..., object], system: str, **fields: Any) -> Iterator[None]:
    """Turn an error into a row: `write(system=…, error=…, …)`."""
    try:
        yield
    except Exception as error:  # a peer may raise anything
        traceback.print_exc()
        write(system=system, error=f"{type(error).__name__}: {error}"[:500], **fields)


def append(path: Path, rows: list[dict[str, Any]], common: dict[str, Any] | None = None) -> None:
    """Append rows, each with the environment (or with `common`, taken earlier), as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    common = environment() if common is None else common
    with path.open("a") as out:
        for row in rows:
            out.write(json.dumps(row | common) + "\n")


def read(path: Path, *, last_commit: bool = True) -> list[dict[str, Any]]:
    """The rows of the last measured commit in a file, or of all commits; for several runs of a system on equal GPUs,
    the last that worked."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if "error" not in row and (row["commit"] == rows[-1]["commit"] or not last_commit)]
    keys = [(row["system"], row.get("tokens"), row.get("planned_for"), row["gpu"], row.get("gpus")) for row in rows]
    return list(dict(zip(keys, rows, strict=True)).values())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    found = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
