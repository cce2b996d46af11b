"""Ctrl-C while the command line starts, before it knows the command."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weightstream import __version__

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["weightstream"]
INTERRUPTED_IN = """
import os, runpy, signal, sys
from importlib.metadata import EntryPoint

how, handler, module, script = sys.argv[1:]
sys.argv[1:] = ["--version"]

class Finder:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, getattr(signal, handler))
if how == "script":
    EntryPoint("weightstream", script, "console_scripts").load()()
else:
    runpy.run_module("weightstream", run_name="__main__")
"""


def interrupted(how: str, module: str, handler: str) -> subprocess.CompletedProcess[str]:
    """`weightstream --version`, which gets SIGINT once it imports this module."""
    return subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN, how, handler, module, SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


@pytest.mark.parametrize(
    ("how", "module"),
    [("script", "weightstream.settings.config"), ("script", "typer.rich_utils"), ("module", "pydantic")],
)
def test_an_interrupted_start_is_quiet(how: str, module: str) -> None:
    ended = interrupted(how, module, "default_int_handler")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_job_that_ignores_interrupts_starts() -> None:
    ended = interrupted("script", "weightstream.settings.config", "SIG_IGN")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"weightstream {__version__}\n", "")


def test_a_thread_may_run_the_command() -> None:
    """It cannot change how signals are handled."""
    code = """
import runpy, sys, threading
sys.argv[1:] = ["--version"]
thread = threading.Thread(target=lambda: runpy.run_module("weightstream", run_name="__main__"))
thread.start()
thread.join()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ended.stdout == f"weightstream {__version__}\n", ended.stderr
