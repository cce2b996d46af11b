"""The terminal: the wording of predictions, and the characters that a stream can show."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from weightstream.cli import terminal
from weightstream.cli.serve import _name_of


@pytest.mark.parametrize(
    ("predicted_s", "measured_s", "said"),
    [
        (80.2e-3, 87.4e-3, "80.2 ms, measured 87.4 ms: 9 % slower"),
        (0.1, 0.08, "100.0 ms, measured 80.0 ms: 20 % faster"),
        (0.1, 0.1001, "100.0 ms, measured 100.1 ms: as predicted"),
    ],
)
def test_a_prediction_is_compared_with_the_measured_time(predicted_s: float, measured_s: float, said: str) -> None:
    assert terminal.prediction_text(predicted_s, measured_s) == said


def test_a_rough_prediction_has_two_digits_and_its_step() -> None:
    said = terminal.prediction_text(0.1142, 3.1468, is_rough=True, step="batch 1")
    assert said == "~110 ms (batch 1), measured 3146.8 ms: 27.6 times slower"


def test_a_pipe_is_not_opened_before_there_is_something_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(terminal, "write_file", lambda flag, path, *_, **__: opened.append(path))
    os.mkfifo(pipe := tmp_path / "pipe")
    terminal.check_writable("--out", pipe)
    assert not opened


def test_a_link_to_a_file_that_is_to_be_written_stays(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(target := tmp_path / "target")
    terminal.check_writable("--save", link)
    assert link.is_symlink()
    assert not target.exists()


@pytest.mark.parametrize(("columns", "width"), [(None, 100), ("60", 60), ("250", 100), ("3", 40), ("many", 100)])
def test_the_width_of_a_pipe_follows_columns(columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert terminal.screen().width == width


@pytest.mark.parametrize(("encoding", "drawn"), [("utf-8", "█"), ("latin-1", "#"), ("ascii", "#"), ("cp437", "█")])
def test_output_is_ascii_if_the_encoding_needs_it(encoding: str, drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert terminal.drawn("█", "#") == drawn


def test_a_served_model_is_named_as_its_link(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "mine").symlink_to("model")
    assert _name_of(str(tmp_path / "mine")) == "mine"
    assert _name_of("owner/name") == "owner/name"


def test_the_cpu_has_two_names() -> None:
    assert terminal.is_on_cpu("cpu")
    assert terminal.is_on_cpu("cpu:0")
    assert not terminal.is_on_cpu("cuda:1")
