"""The environments of scripts/: none is made in the folder of another tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
# Stands for Python: it makes no environment, and records that it was asked to.
PYTHON = """#!/bin/sh
case "$*" in
*venv*) echo "$@" >asked; exit 1 ;;
*version_info\\[*) echo 3.11.0 ;;
esac
"""


def asked_for(tree: Path, script: str) -> bool:
    """Whether a script asks for an environment in a tree."""
    for name in ("environment", "setup", "site", "vllm", *(path.name for path in SCRIPTS.glob("requirements*.txt"))):
        (tree / "scripts").mkdir(exist_ok=True)
        shutil.copy(SCRIPTS / name, tree / "scripts")
    (tree / "pyproject.toml").touch()
    (python := tree / "python").write_text(PYTHON)
    python.chmod(0o755)
    (tree / "asked").unlink(missing_ok=True)
    env = {**os.environ, "PYTHON": str(python), "VLLM": ""}
    ran = subprocess.run(["bash", "-c", script], cwd=tree, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode
    was_asked = (tree / "asked").exists()
    assert was_asked or "is a link" in ran.stderr, ran.stderr
    return was_asked


@pytest.mark.parametrize("made_for", ["nobody", "another tree"])
def test_no_environment_is_emptied_through_a_link(tmp_path: Path, made_for: str) -> None:
    (tree := tmp_path / "tree").mkdir()
    (other := tmp_path / "other").mkdir()
    (other / "stamp").write_text(f"{tmp_path}/another 3.11.0" if made_for == "another tree" else "")
    scripts = {".venv": "source scripts/setup", ".venv-site": "bash scripts/site", ".venv-vllm": "bash scripts/vllm"}
    for name, script in scripts.items():
        (tree / name).symlink_to(other)
        assert not asked_for(tree, script)


@pytest.mark.parametrize("is_empty", [True, False])
def test_an_environment_of_its_own_may_be_behind_a_link(tmp_path: Path, is_empty: bool) -> None:
    (tree := tmp_path / "tree").mkdir()
    (own := tmp_path / "own").mkdir()
    (tree / ".venv").symlink_to(own)
    if not is_empty:
        (own / "stamp").write_text(f"{tree} 3.11.0 of other pins")
    assert asked_for(tree, "source scripts/setup")
