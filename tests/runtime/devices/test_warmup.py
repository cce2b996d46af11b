"""Kernels that are loaded ahead: all warm-up launches run, whatever the settings of the process."""

from __future__ import annotations

import threading
from threading import Event

import pytest
import torch

from weightstream.runtime.devices import warmup

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that ran."""
    found: list[str] = []
    for name in ("_inputs", "_attention", "_experts", "_token"):

        def stage(*given: torch.Tensor, name: str = name, real: object = getattr(warmup, name)) -> object:
            found.append(name)
            assert callable(real)
            return real(*given)

        monkeypatch.setattr(warmup, name, stage)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_warmup_launches_run(dtype: torch.dtype, launched: list[str]) -> None:
    before, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(dtype)
    try:
        warmup._launch(CPU, Event(), generates=True)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert launched == ["_inputs", "_attention", "_experts", "_token"]


@pytest.mark.parametrize("deterministic", [True, False])
def test_without_generation_or_with_deterministic_algorithms_there_is_one_product(
    deterministic: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    warmup._launch(CPU, Event(), generates=deterministic)
    assert launched == []


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_it_runs_on_a_thread_only_for_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[torch.device, bool, bool]] = []
    here = threading.get_ident()

    def launch(device: torch.device, failed: Event, *, generates: bool) -> None:
        ran.append((device, threading.get_ident() == here, generates))

    monkeypatch.setattr(warmup, "_launch", launch)
    for generates in (True, False):
        with warmup.preloading(device, generates=generates):
            pass
    assert ran == ([] if device == CPU else [(device, False, True), (device, False, False)])


def test_a_failing_load_waits_for_only_one_stage(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, inputs, launch = Event(), Event(), warmup._inputs, warmup._launch

    def slow(ids: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go_on.wait(30)
        return inputs(ids)

    def on_cpu(_: torch.device, failed: Event, *, generates: bool) -> None:
        real = failed.set
        monkeypatch.setattr(failed, "set", lambda: (real(), go_on.set()))
        launch(CPU, failed, generates=generates)

    monkeypatch.setattr(warmup, "_inputs", slow)
    monkeypatch.setattr(warmup, "_launch", on_cpu)

    def load() -> None:
        assert begun.wait(30)
        raise KeyError("no such weight")

    with pytest.raises(KeyError), warmup.preloading(CUDA, generates=True):
        load()
    assert launched == ["_inputs"]


def test_its_errors_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device, failed: Event, *, generates: bool) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(warmup, "_launch", fail)
    with warmup.preloading(CUDA, generates=True):
        pass
