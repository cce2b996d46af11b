"""The benchmark of memory runs at a tiny shape, each system in a process of its own, and tokens are equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.stress
def test_rows_of_memory(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ["--smoke", "--budget", "16MiB", "--tokens", "4", "--folder", str(tmp_path / "model"), "--out", str(out)]
    command = [sys.executable, "benchmarks/ram.py", *flags, "--systems", "resident,ours,flextensor"]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, cwd=ROOT, env=environ, check=True, timeout=300)
    resident, ours, failed = (json.loads(line) for line in out.read_text().splitlines())
    assert ours["same"]
    assert (ours["system"], ours["budget"], resident["budget"]) == ("ours", "16MiB", None)
    for row in (resident, ours):
        assert 0 < row["ms"]["p20"] <= row["ms"]["p80"]
        assert 0 <= row["host_gib"][1] <= row["host_gib"][0] < row["rss_gib"][0]
    assert "error" in failed  # it needs a GPU; what fails is a row, too
