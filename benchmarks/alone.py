"""Trials: cases that run one after the other, each in a process of its own; each becomes a row, or an error row.

A process that exceeds its time limit is killed. Each row is written at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import checkpoint
import torch
from bench import show
from cases import Case
from host import DirectReads
from rows import RESULTS, append, environment, guarded

HERE = Path(__file__).parent
DEVICE_BUDGET, TINY_BUDGET = "1200MiB", "12MiB"  # they fit the head, which is the largest matrix
RESIDENT = "resident, transformers"
_LEAVING_S = 30


class Process:
    """A running case. `prefix` goes before its command; the process is gone at the end of the `with` block."""

    def __init__(self, case: Case, *, timeout_s: float, prefix: Sequence[str] = ()) -> None:
        self._case = case
        self._timeout_s = timeout_s
        self._prefix = prefix

    def __enter__(self) -> Process:
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, str(HERE / "cases.py"), json.dumps(asdict(self._case))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._deadline = time.monotonic() + self._timeout_s
        return self

    def result(self) -> dict[str, Any]:
        """Wait for the figures; raises if the process fails or takes too long."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, self._deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no result within {self._timeout_s} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"exit status {self._process.wait(_LEAVING_S)} (see its output above)")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()  # with `hold` it waits for the end of its input
        try:
            self._process.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Trials:
    """The checkpoint, the common settings of the cases, and the rows of one benchmark."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = f"{name}, NF4" if args.nf4 else name
        self.smoke = args.smoke
        self.folder = args.folder
        self._out = args.out
        self._started = time.perf_counter()
        self._common = environment()
        self.device = "cpu" if args.smoke else "cuda"
        command = [sys.executable, str(HERE / "checkpoint.py"), "--folder", str(self.folder)]
        flags = [flag for flag, given in (("--smoke", args.smoke), ("--nf4", args.nf4)) if given]
        subprocess.run([*command, *flags], check=True, timeout=240)
        self.files = checkpoint.files(self.folder)
        self.nbytes = checkpoint.weights_nbytes(self.folder)
        self.settings = {"device_budget": TINY_BUDGET if args.smoke else DEVICE_BUDGET}
        self.reads = DirectReads(self.files)
        self.rows: list[dict[str, Any]] = []
        self._reference = self._reference_path()
        if not self._reference.exists():
            self.measure(RESIDENT, self.case("resident"))

    def _reference_path(self) -> Path:
        """The file of reference logits, by weights, device and versions: others may round differently."""
        written = (self.folder / checkpoint.INDEX).stat().st_mtime_ns
        versions = f"{torch.__version__}-{importlib.metadata.version('transformers')}"
        return self.folder.with_name(f"{self.folder.name}-reference-{self.device}-{versions}-{written}.pt")

    def case(self, way: str, **fields: Any) -> Case:
        fields = {"folder": str(self.folder), "device": self.device, "reference": str(self._reference)} | fields
        if way in ("mapped", "compressed", "arena"):
            fields["settings"] = self.settings | fields.get("settings", {})
        return Case(way=way, **fields)

    def measure(self, system: str, case: Case, timeout_s: float = 120, **fields: Any) -> dict[str, Any] | None:
        """Run a case and add its row; returns it, or None if it failed."""
        with self.guarded(system), Process(case, timeout_s=timeout_s) as process:
            return self.add(system, settings=case.settings, **process.result(), **fields)
        return None

    def guarded(self, system: str, **fields: Any) -> AbstractContextManager[None]:
        """Turn an error into a row. Nests: if a part fails, the others run."""
        return guarded(self.add, system, **fields)

    def floor_gbps(self) -> float:
        """GB/s of direct reads now; its row has all samples so far."""
        found = self.reads.measure()
        self.add(
            "direct reads", read_gbps=self.reads.gbps(), threads=self.reads.threads, medians_gbps=self.reads.medians
        )
        return found

    def add(self, system: str, **fields: Any) -> dict[str, Any]:
        """Write a row and show it."""
        row: dict[str, Any] = {"bench": self.name, "system": system, "nbytes": self.nbytes} | fields
        self.rows.append(row)
        append(self._out, [row], self._common)
        shown = {
            key: row[key] for key in ("error", "total_s", "read_gbps", "x_direct", "seconds", "equal") if key in row
        }
        if "ms" in row:
            shown["ms"] = row["ms"]["p50"]
        print(f"{time.perf_counter() - self._started:6.1f} s  {system}: {shown}", flush=True)
        return row


Group = Callable[[Trials], None]


def main(name: str, doc: str, groups: Mapping[str, Group]) -> None:
    """Parse the command line, make the checkpoint if it is missing, and run the chosen groups."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--only", default=",".join(groups), help=f"of {', '.join(groups)}; others are ignored")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, to check that it runs")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint, which is made if it is missing")
    parser.add_argument("--nf4", action="store_true", help="layers in bitsandbytes' NF4")
    parser.add_argument("--out", type=Path, help=f"results/{name}.jsonl, or results/quantised.jsonl with --nf4")
    args = parser.parse_args()
    args.folder = args.folder or checkpoint.default_folder(args.smoke, args.nf4)
    args.out = args.out or RESULTS / f"{'quantised' if args.nf4 else name}.jsonl"
    wanted = [group for group in groups if group in args.only.split(",")]
    if not wanted:
        return
    trials = Trials(name, args)
    for group in wanted:
        with trials.guarded(f"weightstream, group {group}"):
            groups[group](trials)
    show(trials.rows)
