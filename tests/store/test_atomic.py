"""Atomic writes: whole or not at all, flushed before the rename, and without leftovers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightstream.store.atomic import remove_leftovers, replacing


@pytest.mark.parametrize("before", ["nothing", "file"])
def test_a_file_appears_whole(before: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    if before == "file":
        path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.exists() == (before == "file")
        assert partial.parent == tmp_path
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_an_error_leaves_the_old_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def write(partial: Path) -> None:
        if kind == "file":
            partial.write_text("new")
        elif kind == "folder":
            (partial / "deep").mkdir(parents=True)
            (partial / "deep" / "g").write_text("new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        write(partial)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_two_concurrent_writes_do_not_mix(tmp_path: Path) -> None:
    with replacing(tmp_path / "f") as first, replacing(tmp_path / "f") as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "f").read_text() == "first"


def test_it_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def replaced(old: Path, new: Path) -> None:
        events.append("replaced")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with replacing(tmp_path / "f") as partial:
        (partial / "deep").mkdir(parents=True)
        (partial / "deep" / "g").touch()
    written = {str(partial / "deep" / "g"), str(partial / "deep"), str(partial)}
    assert set(events[:3]) == written
    assert events[3:] == ["replaced", str(tmp_path)]


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    with replacing(tmp_path / "out[1]") as mine:
        kept = [mine, tmp_path / f".out2.{dead}.ab.partial", tmp_path / f"out[1].{dead}.ab.partial"]
        gone = [tmp_path / f".out[1].{dead}.ab.partial", tmp_path / f".out[1].{dead}.cd.partial.ef"]
        for path in (*kept, *gone):
            path.mkdir()
            (path / "f").touch()
        remove_leftovers(tmp_path / "out[1]")
        assert set(tmp_path.iterdir()) == set(kept)
