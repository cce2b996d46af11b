"""The link of one process while others measure theirs: each comes to the point where they meet once, whatever fails."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightstream import assembly
from weightstream.config import OffloadConfig
from weightstream.errors import OffloadError
from weightstream.measure import links
from weightstream.prospects import machine_elsewhere
from weightstream.runtime.cpu import CPU_PROFILE, CpuBackend

CPU = torch.device("cpu")


def no_memory(nbytes: int) -> torch.Tensor:
    raise RuntimeError(f"no {nbytes} bytes")


def test_processes_measure_from_when_they_meet() -> None:
    barrier = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: links.beside(CPU, barrier.wait), range(2)))
    assert all(1e6 < rate < math.inf for rate in found)


def test_who_cannot_measure_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def failing(_: torch.device) -> CpuBackend:
        backend = CpuBackend()
        backend.alloc = no_memory  # type: ignore[method-assign]
        return backend

    monkeypatch.setattr(links, "backend_of", failing)
    met: list[None] = []
    assert links.beside(CPU, lambda: met.append(None)) == math.inf
    assert len(met) == 1
    assert "as fast as alone" in caplog.text


def test_what_others_refuse_is_raised_and_nobody_meets_twice() -> None:
    met: list[None] = []

    def refused() -> None:
        met.append(None)
        raise OffloadError("rank 1 refused: no memory")

    with pytest.raises(OffloadError, match="rank 1 refused"):
        links.beside(CPU, refused)
    assert len(met) == 1


@pytest.mark.parametrize(("device", "rate"), [("cuda:0", 7e9), ("cpu", CPU_PROFILE.link_bytes_per_s)])
def test_ranks_plan_with_the_link_that_they_have_together(
    device: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs nothing is measured: their memory is one."""
    met: list[None] = []

    def beside(_: torch.device, meet: Callable[[], object]) -> float:
        meet()
        return 7e9

    monkeypatch.setattr(links, "beside", beside)
    agreed: Any = lambda config, machine: (config, machine)  # noqa: E731
    apart: list[tuple[str, torch.device]] = []
    ranks: Any = SimpleNamespace(
        confirm=lambda: met.append(None), agreed=agreed, apart=lambda *about: apart.append(about)
    )
    monkeypatch.setattr(assembly.cuda, "facts", lambda _: SimpleNamespace(uuid="GPU-7"))
    backend: Any = SimpleNamespace(device=torch.device(device))
    profile = replace(CPU_PROFILE, link_bytes_per_s=rate if device == "cpu" else 55e9)
    config, machine = OffloadConfig(), machine_elsewhere(profile, 0)
    found = assembly._among(ranks, backend, config, machine)[1]
    assert found.profile == replace(profile, link_bytes_per_s=rate)
    assert len(met) == (device != "cpu")
    assert apart == ([("GPU-7", torch.device(device))] if device != "cpu" else [])
    assert links.at_most(machine, math.inf) == machine
