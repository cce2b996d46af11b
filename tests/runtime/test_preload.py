"""Kernels that are loaded ahead: what is launched for it runs, whatever the settings of the process."""

from __future__ import annotations

import threading

import pytest
import torch

from weightstream.runtime import preload

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_that_is_launched_runs(dtype: torch.dtype) -> None:
    before, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(dtype)
    try:
        preload._launch(CPU)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")])
def test_it_runs_on_a_thread_for_a_gpu_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[torch.device, bool]] = []
    here = threading.get_ident()
    monkeypatch.setattr(preload, "_launch", lambda d: ran.append((d, threading.get_ident() == here)))
    with preload.preloading(device):
        pass
    assert ran == ([] if device == CPU else [(device, False)])


def test_where_operators_are_to_be_deterministic_none_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[torch.device] = []
    monkeypatch.setattr(preload, "_launch", ran.append)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with preload.preloading(torch.device("cuda")):
        pass
    assert ran == []


def test_what_it_fails_with_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(preload, "_launch", fail)
    with preload.preloading(torch.device("cuda")):
        pass
