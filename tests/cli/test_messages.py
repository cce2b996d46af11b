"""What stderr shows: -q and -v, and lines while something takes long. And the list of stored profiles."""

from __future__ import annotations

import builtins
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from weightstream.cli import Commands, app, chat
from weightstream.cli.messages import with_messages
from weightstream.errors import UnsupportedError
from weightstream.measure import profile, progress
from weightstream.runtime.devices.cpu import CPU_PROFILE


def speak(text: str) -> None:
    assert os.environ["TQDM_DISABLE"] == "1", "stderr is no terminal"
    logger = logging.getLogger("weightstream")
    logger.debug("a detail of %s", text)
    logger.info("a fact")
    logger.warning("a doubt")
    logging.getLogger("weightstream.progress").info("a phase")
    warnings.warn("a setting", UserWarning, stacklevel=1)
    typer.echo(text)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), ["doubt", "phase", "setting"]),
        (("-q",), []),
        (("--verbose",), ["fact", "doubt", "phase", "setting"]),
        (("-vv",), ["detail of x", "fact", "doubt", "phase", "setting"]),
    ],
)
@pytest.mark.filterwarnings("default")
def test_flags_choose_what_stderr_shows(
    flags: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    speaking = typer.Typer()
    speaking.command()(with_messages(speak))
    loggers = [logging.getLogger(name) for name in ("weightstream", "weightstream.progress")]
    before = [(each.level, each.propagate, list(each.handlers)) for each in loggers]
    result = CliRunner().invoke(speaking, ["x", *flags])
    assert result.exit_code == 0, result.output
    assert result.stdout == "x\n"
    assert [line.partition(" a ")[2] or line for line in result.stderr.splitlines()] == expected
    assert [(each.level, each.propagate, list(each.handlers)) for each in loggers] == before
    assert "TQDM_DISABLE" not in os.environ


def cut_in_a_library() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise UnsupportedError("the model's code does not load") from None


def cut_at_a_prompt() -> None:
    """An error after Ctrl-C has left a line of a chat."""
    lines = chat._typed()
    assert next(lines) == "w1"
    with pytest.raises(StopIteration):
        next(lines)
    raise UnsupportedError("unrelated")


@pytest.mark.parametrize(("work", "status"), [(cut_in_a_library, 130), (cut_at_a_prompt, 2)])
def test_an_interrupt_is_one_whatever_libraries_make_of_it(
    work: Callable[[], None], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: Iterator[str] = iter(["w1", "", "end"])

    def ask(_: str) -> str:
        line = next(typed)
        if not line:
            signal.raise_signal(signal.SIGINT)
        if line == "end":
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", ask)
    working = typer.Typer(cls=Commands)
    working.command()(with_messages(work))
    working.callback()(lambda: None)
    handler = signal.getsignal(signal.SIGINT)
    result = CliRunner().invoke(working, [work.__name__.replace("_", "-")])
    assert result.exit_code == status, result.output
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_long_start_is_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_AWAITED_S", 0.1)
    monkeypatch.setattr(progress, "LONG_S", 0.2)
    with progress.announced("loading libraries"):
        time.sleep(0.5)
    assert capsys.readouterr().err.splitlines() == [
        "weightstream: loading libraries",
        "weightstream: still loading libraries, 0 s so far",
    ]
    with progress.announced("loading libraries"):
        pass
    time.sleep(0.3)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("configured", "shown"),
    [
        ("", ["weightstream: a doubt"]),
        ("logging.getLogger('weightstream').setLevel(logging.INFO)", ["weightstream: a fact", "weightstream: a doubt"]),
        ("logging.getLogger('weightstream').setLevel(logging.ERROR)", []),
        ("logging.basicConfig()", ["WARNING:weightstream:a doubt"]),
        ("logging.getLogger('weightstream').addHandler(logging.NullHandler())", []),
        ("logging.basicConfig(); logging.getLogger('weightstream').propagate = False", ["weightstream: a doubt"]),
        ("import importlib; importlib.reload(weightstream)", ["weightstream: a doubt"]),
    ],
)
def test_the_log_of_a_program_that_configures_none_has_a_prefix(configured: str, shown: list[str]) -> None:
    speaks = "log = logging.getLogger('weightstream'); log.info('a fact'); log.warning('a doubt')"
    code = f"import logging, weightstream\n{configured}\n{speaks}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr.splitlines() == shown


def test_a_line_that_a_handler_of_its_own_logger_shows_is_not_shown_twice(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import logging, sys, weightstream
log = logging.getLogger("weightstream.progress")
log.addHandler(logging.StreamHandler())
log.warning("a phase")
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    assert capfd.readouterr().err == "a phase\n"


AT_ONCE = """
import io, sys
from contextlib import redirect_stderr, redirect_stdout

HEAVY = ("torch", "transformers", "diffusers", "numpy", "starlette", "uvicorn")


class Refusing:
    def find_spec(self, name, *_):
        if name in HEAVY:
            raise SystemExit(f"{name} is imported")


sys.meta_path.insert(0, Refusing())
from weightstream.cli import Commands, app, chat

for line in sys.stdin.read().splitlines():
    shown = io.StringIO()
    try:
        with redirect_stderr(shown), redirect_stdout(shown):
            app(line.split())
    except SystemExit as ended:
        print(line.split()[0], "|", ended.code, "|", *shown.getvalue().splitlines())
"""


def test_every_command_writes_a_line_before_it_imports_libraries(tmp_path: Path) -> None:
    lines = {name: f"{name} {tmp_path}" for name in ("bench", "doctor", "plan", "run", "serve", "trace")}
    lines |= {"pack": f"pack {tmp_path} {tmp_path}/out", "profiles": "profiles"}
    assert lines.keys() == {command.callback.__name__ for command in app.registered_commands if command.callback}
    given = "\n".join([*lines.values(), "doctor -q"])
    ran = subprocess.run([sys.executable, "-c", AT_ONCE], input=given, capture_output=True, text=True, timeout=60)
    found = [[part.strip() for part in line.split("|")] for line in ran.stdout.splitlines()]
    assert [name for name, *_ in found] == [*lines, "doctor"], ran.stderr
    *said, (_, _, quiet) = found
    assert all("is imported" in why for _, why, _ in found)
    assert [line for *_, line in said] == ["weightstream: loading libraries"] * len(lines)
    assert not quiet


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_named() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "weightstream", "profiles"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "error: cannot write: No space left on device"


def test_profiles_are_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def call(*flags: str) -> str:
        result = CliRunner().invoke(app, ["profiles", *flags])
        assert result.exit_code == 0, result.output
        return result.stdout

    folder = tmp_path / "weightstream" / "profiles"
    assert call() == f"no profiles in {folder}: `weightstream doctor` measures this machine\n"
    profile.save_profile(torch.device("cpu"), CPU_PROFILE)
    (folder / "old.json").write_text("{")
    shown = call()
    assert str(folder) in shown
    assert "of another version" in shown
    assert next(folder.glob("*[0-9a-f].json")).name in shown
    (folder / "old.json").unlink()
    assert call("--clear").startswith("1 profile removed")
    assert not list(folder.iterdir())
