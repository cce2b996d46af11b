"""Progress: work of seconds is reported within one second, and again if it takes long, also if stderr is not a
terminal."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import weightstream
from weightstream.errors import CheckpointError
from weightstream.measure import progress
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.runtime.weights.homes import Homes

TEXT = "measuring it"
STILL = f"weightstream: still {TEXT}"


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for _ in range(100):
        if set(threading.enumerate()) <= before:
            return
        time.sleep(0.01)
    raise AssertionError("a thread is left")


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_NOTICED_S", 0.01)
    monkeypatch.setattr(progress, "LONG_S", 0.03)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
@pytest.mark.parametrize("asked", [None, True, False])
def test_a_line_goes_to_the_log_or_to_stderr(
    level: int, asked: bool | None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(level, "weightstream"):
        progress.say(TEXT, asked)
    is_logged = level == logging.INFO
    assert caplog.messages == ([TEXT] if is_logged else [])
    wanted = "" if is_logged or asked is False else f"weightstream: {TEXT}\n"
    assert capsys.readouterr().err == wanted


def test_a_phase_of_steps_is_reported_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps look at the clock; no thread does."""
    now, threads, said = [100.0], set(threading.enumerate()), ""
    monkeypatch.setattr(progress, "LONG_S", 5.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.reporting(TEXT) as advance:
        for second, lines in ((104.9, 1), (105.1, 2), (106.0, 2), (121.0, 3), (130.0, 3), (300.0, 4)):
            now[0] = second
            advance()
            said += capsys.readouterr().err
            assert said.count("\n") == lines
            assert set(threading.enumerate()) == threads
    assert said.splitlines() == [f"weightstream: {TEXT}", *(f"{STILL}, {s} s so far" for s in (5, 20, 180))]


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("takes_s", [0.0, 0.3])
def test_long_work_is_reported_once(takes_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.lasting(TEXT):
        time.sleep(takes_s)
    assert capsys.readouterr().err.count(STILL) == (takes_s > 0)


@pytest.mark.usefixtures("_at_once")
def test_a_phase_is_a_line_and_one_more_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.phase(TEXT):
        time.sleep(0.3)
    assert capsys.readouterr().err.splitlines() == [f"weightstream: {TEXT}", f"{STILL}, 0 s so far"]


def test_a_phase_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_is_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.phase(TEXT):
        assert "weightstream: " not in capsys.readouterr().err
    monkeypatch.setattr(progress, "_is_terminal", lambda: False)
    assert (progress.bars(None), progress.bars(True), progress.bars(False)) == (False, True, False)
    monkeypatch.setitem(sys.modules, "ipykernel", progress)
    assert (progress.bars(None), progress.bars(False)) == (None, False)


@pytest.mark.parametrize("shown", [progress.announced, progress.lasting])
def test_no_line_comes_after_the_end(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is being written is waited for."""
    begun, said = threading.Event(), list[str]()

    def say(text: str, _: object = None) -> None:
        begun.set()
        time.sleep(0.2)
        said.append(text)

    monkeypatch.setattr(progress, "say", say)
    for name in ("_AWAITED_S", "LONG_S"):
        monkeypatch.setattr(progress, name, 0.01)
    with shown(TEXT):
        assert begun.wait(10)
    assert said


def test_long_work_is_reported_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_S", 0.01)
    monkeypatch.setattr(progress, "_AGAIN_S", 0.02)
    monkeypatch.setattr(progress, "_EACH_S", 0.6)
    with progress.lasting(TEXT):
        time.sleep(1.5)
    assert capsys.readouterr().err.splitlines() == [f"{STILL}, {seconds} s so far" for seconds in (0, 0, 1, 1)]


@pytest.mark.usefixtures("_at_once")
def test_an_error_ends_the_report_of_long_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), progress.lasting(TEXT):
        raise ZeroDivisionError
    time.sleep(0.1)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("_at_once")
def test_work_of_other_threads_is_announced_if_it_takes_a_moment(capsys: pytest.CaptureFixture[str]) -> None:
    work: Future[None] = Future()
    progress.announce(work, TEXT)
    said, until = "", time.monotonic() + 10
    while said.count("\n") < 2 and time.monotonic() < until:
        time.sleep(0.01)
        said += capsys.readouterr().err
    work.set_result(None)
    lines = said.splitlines()
    assert lines[0] == f"weightstream: {TEXT}"
    assert lines[1].startswith(STILL)
    assert len(lines) == 2
    progress.announce(work, TEXT)
    time.sleep(0.05)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("kind", ["none", "closed", "nobody reads"])
def test_a_broken_stderr_stops_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "nobody reads":
        reader, writer = os.pipe()
        os.close(reader)
        stderr = open(writer, "w")  # noqa: SIM115
    else:
        stderr = (tmp_path / "stderr").open("w")
        stderr.close()
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else stderr)
    progress.say(TEXT)
    with progress.reporting(TEXT) as advance:
        advance()
    monkeypatch.undo()
    assert capsys.readouterr().out == ""
    with suppress(OSError):
        stderr.close()


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    ("owner", "name", "said"), [(Homes, "settle", "moving 130.0KiB of weights"), (PlannerInputs, "plan", "planning")]
)
def test_long_phases_of_an_offload_are_reported(
    owner: type, name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = getattr(owner, name)

    def slow(*args: object) -> object:
        time.sleep(0.3)
        return plain(*args)

    monkeypatch.setattr(owner, name, slow)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    weightstream.offload(model, device="cpu", device_budget="48KiB").remove()
    assert capsys.readouterr().err.splitlines().count(f"weightstream: still {said}, 0 s so far") == 1


def model_files(name: str, shown: bool | None) -> None:
    from weightstream.adapters.hf.hub import find

    find(name, False, progress=shown)


def pipeline_files(name: str, shown: bool | None) -> None:
    from weightstream.adapters.diffusers.folder import folder_of

    folder_of(name, None, shown)


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("download", [model_files, pipeline_files])
@pytest.mark.parametrize(("is_terminal", "shown", "num"), [(False, None, 2), (True, None, 1), (False, False, 0)])
def test_long_downloads_are_reported(
    download: Callable[[str, bool | None], None],
    is_terminal: bool,
    shown: bool | None,
    num: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a terminal, bars of the Hub's library follow the first line."""

    def slow(*_: object, **__: object) -> None:
        time.sleep(0.1)
        raise OSError("the network is gone")

    diffusers = pytest.importorskip("diffusers")
    monkeypatch.setattr("huggingface_hub.snapshot_download", slow)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", slow)
    monkeypatch.setattr(progress, "_AWAITED_S", 0.01)
    monkeypatch.setattr(progress, "_is_terminal", lambda: is_terminal)
    with pytest.raises(CheckpointError, match="the network is gone"):
        download("org/model", shown)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("weightstream: ")]
    text = "downloading org/model from the Hub, if its cache lacks it"
    assert said == [f"weightstream: {text}", f"weightstream: still {text}, 0 s so far"][:num]


FIRST = """
import sys, time
import torch
from weightstream import offload
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
stderr, began, lines = sys.stderr, time.perf_counter(), []


class Clocked:
    def write(self, text):
        lines.append(time.perf_counter() - began)
        return stderr.write(text)

    def __getattr__(self, name):
        return getattr(stderr, name)


sys.stderr = Clocked()
offload(model, device="cpu", device_budget="48KiB")
print(lines[0] if lines else "nothing")
"""


def test_a_first_offload_is_reported_within_a_second(tmp_path: Path) -> None:
    """In a process whose stderr is not a terminal, without any stored profile or kernel."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    said = [line for line in run.stderr.splitlines() if line.startswith("weightstream: ")]
    assert "no profile of cpu yet" in said[0]
    assert sum("measuring" in line for line in said) == 1
    assert float(run.stdout) < 1
