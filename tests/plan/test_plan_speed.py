"""`weightstream plan` on the largest Llama in a new process: its time and its memory."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from test_skeleton import LLAMA_405B

from weightstream.measure import profile as profiles
from weightstream.plan.manifest import Profile

pytest.importorskip("transformers")

GIB = 2**30
COMMAND = """
import atexit, runpy, sys
atexit.register(lambda: sys.stderr.write(open("/proc/self/status").read()))
runpy.run_module("weightstream", run_name="__main__")
"""


def children_s() -> float:
    """CPU time of child processes that have ended, since a shared machine may have other work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def planned(tmp_path: Path, *flags: str) -> tuple[str, float]:
    """The output of the command, and its seconds of CPU time. It must take less than 1 GiB."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    machine = tmp_path / "profile.json"  # of a GPU that this machine lacks: nothing is measured
    machine.write_text(profiles.to_json(Profile(machine="Test GPU", device_nbytes=80 * GIB)))
    flags = (str(tmp_path), "--profile", str(machine), "--device-budget", "80GiB", "--host-budget", "1024GiB", *flags)
    before_s = children_s()
    done = subprocess.run([sys.executable, "-c", COMMAND, "plan", *flags], capture_output=True, text=True, check=True)
    seconds = children_s() - before_s
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", done.stderr, re.MULTILINE)
    assert peak is not None, done.stderr
    print(f"{seconds:.1f} s, {int(peak[1]) / 1024:.0f} MiB")
    assert "torchao" not in done.stderr  # transformers imports it, and it would log missing parts
    assert "405.9B parameters" in " ".join(done.stdout.split())  # lines are folded after a long path
    assert int(peak[1]) * 1024 < GIB
    return done.stdout, seconds


@pytest.mark.stress
def test_a_plan_takes_seconds_and_little_memory(tmp_path: Path) -> None:
    """3.6 s and 380 MiB on two idle cores, mostly for imports, whose time shows how slow a machine is."""
    seconds, before_s = planned(tmp_path)[1], children_s()
    subprocess.run([sys.executable, "-c", "import torch, transformers.modeling_utils"], check=True)
    assert seconds < max(7.5, 3 * (children_s() - before_s))


@pytest.mark.slow
@pytest.mark.stress
def test_a_sweep_takes_some_seconds_longer(tmp_path: Path) -> None:
    """20 s on one core, a third of which searches for tensors to compress."""
    text, seconds = planned(tmp_path, "--sweep")
    assert len(re.findall(r"│ *\d+\.\d\d │", text)) >= 20
    assert seconds < 40
