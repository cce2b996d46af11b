"""The link of one process while others measure theirs: each one reaches the barrier once, whatever fails."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightstream.errors import OffloadError
from weightstream.inputs import builder
from weightstream.inputs.machine import machine_elsewhere
from weightstream.measure import multi_gpu_links
from weightstream.runtime.devices.cpu import CPU_PROFILE, CpuBackend
from weightstream.settings.config import OffloadConfig

CPU = torch.device("cpu")


def no_memory(nbytes: int) -> torch.Tensor:
    raise RuntimeError(f"no {nbytes} bytes")


@pytest.mark.stress
def test_processes_measure_after_the_barrier() -> None:
    barrier = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: multi_gpu_links.shared_link_rate(CPU, barrier.wait), range(2)))
    assert all(1e6 < rate < math.inf for rate in found)


def test_a_process_that_cannot_measure_blocks_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_: torch.device) -> CpuBackend:
        backend = CpuBackend()
        backend.alloc = no_memory  # type: ignore[method-assign]
        return backend

    monkeypatch.setattr(multi_gpu_links, "private_backend", failing)
    met: list[None] = []
    assert multi_gpu_links.shared_link_rate(CPU, lambda: met.append(None)) == math.inf
    assert len(met) == 1
    assert "as fast as alone" in caplog.text


def test_a_refusal_of_another_process_is_raised_and_no_barrier_is_entered_twice() -> None:
    met: list[None] = []

    def refused() -> None:
        met.append(None)
        raise OffloadError("rank 1 refused: no memory")

    with pytest.raises(OffloadError, match="rank 1 refused"):
        multi_gpu_links.shared_link_rate(CPU, refused)
    assert len(met) == 1


def test_all_reduces_are_timed_after_the_processes_have_met() -> None:
    calls: list[int | None] = []

    def add_up(tensor: torch.Tensor) -> None:
        time.sleep(0.2 if calls == [None] else 0.01)
        calls.append(tensor.nbytes)

    backend = CpuBackend()
    rate = multi_gpu_links.all_reduce_rate(backend, lambda: calls.append(None), add_up)
    backend.close()
    assert calls == [None, *[64 << 20] * 16]
    assert rate == pytest.approx((64 << 20) / 0.01, rel=0.5)


@pytest.mark.parametrize(("device", "rate"), [("cuda:0", 7e9), ("cpu", CPU_PROFILE.link_bytes_per_s)])
def test_ranks_plan_with_the_rate_that_they_have_together(
    device: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs measure nothing: they share one memory."""
    met: list[None] = []

    def shared_link_rate(_: torch.device, meet: Callable[[], object]) -> float:
        meet()
        return 7e9

    def all_reduce_rate(_: Any, meet: Callable[[], object], add_up: Callable[[Any], object]) -> float:
        meet()
        add_up(None)
        return 3e9

    monkeypatch.setattr(multi_gpu_links, "shared_link_rate", shared_link_rate)
    monkeypatch.setattr(multi_gpu_links, "all_reduce_rate", all_reduce_rate)
    agreed: Any = lambda config, machine: (config, machine)  # noqa: E731
    apart: list[tuple[str, torch.device]] = []
    added: list[Any] = []
    ranks: Any = SimpleNamespace(
        confirm=lambda: met.append(None),
        agreed=agreed,
        apart=lambda *about: apart.append(about),
        add_up=added.append,
    )
    monkeypatch.setattr(builder.cuda, "facts", lambda _: SimpleNamespace(uuid="GPU-7"))
    backend: Any = SimpleNamespace(device=torch.device(device))
    profile = replace(CPU_PROFILE, link_bytes_per_s=rate if device == "cpu" else 55e9)
    config, machine = OffloadConfig(), machine_elsewhere(profile, 0)
    found = builder._agreed(ranks, backend, config, machine)[1]
    sums = CPU_PROFILE.ranks_bytes_per_s if device == "cpu" else 3e9
    assert found.profile == replace(profile, link_bytes_per_s=rate, ranks_bytes_per_s=sums)
    assert len(met) == 2 * len(added) == 2 * (device != "cpu")
    assert apart == ([("GPU-7", torch.device(device))] if device != "cpu" else [])
    assert multi_gpu_links.at_most(machine, math.inf) == machine
