"""Tests inside vLLM on the CPU, run by scripts/vllm. Without vLLM, there is nothing to collect."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_PLAIN = str(Path(__file__).parent / "plain")
_FOUND = importlib.util.find_spec("vllm")  # a folder of that name looks like a namespace
_IS_THERE = bool(_FOUND and _FOUND.origin)
collect_ignore_glob = [] if _IS_THERE else ["test_*"]

if _IS_THERE:  # before vLLM is imported. Otherwise threads are bound to one core each, and spin.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # these tests have used the GPU by then
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [_PLAIN, os.environ.get("PYTHONPATH")])),
    }
    if _PLAIN not in sys.path:
        sys.path.insert(0, _PLAIN)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a small model with random weights, by name, made once."""
    from checkpoints import make

    made: dict[str, Path] = {}

    def found(name: str) -> Path:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return found


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's cache of compiled code, kept for the whole run, as users have it, but not longer."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.getbasetemp() / "vllm"))
    return
