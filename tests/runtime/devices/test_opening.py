"""State of the process after a device was opened."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import weightstream
from weightstream.errors import ConfigError, PlanError, UnsupportedError
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.opening import backend_of, opened_backend
from weightstream.settings.config import OffloadConfig

CONFIG = OffloadConfig().resolved()


@pytest.fixture(autouse=True)
def _freeze_count() -> None:
    """Leave the count of frozen objects as it is, which conftest.py replaces for other tests."""


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_garbage_is_not_collected_meanwhile() -> None:
    with opened_backend("cpu", CONFIG) as backend:
        assert not gc.isenabled()
        with opened_backend("cpu", CONFIG) as other:
            other.close()
        assert not gc.isenabled()
        backend.close()
    assert gc.isenabled()


def test_disabled_collection_stays_disabled() -> None:
    gc.disable()
    with opened_backend("cpu", CONFIG) as backend:
        backend.close()
    assert not gc.isenabled()


def test_an_error_enables_it_again() -> None:
    with pytest.raises(ZeroDivisionError), opened_backend("cpu", CONFIG):
        _ = 1 / 0
    assert gc.isenabled()
    for device, error in (("nonsense", ConfigError), ("meta", UnsupportedError)):
        with pytest.raises(error), opened_backend(device, CONFIG):
            pass
        assert gc.isenabled()


def test_rocm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="ROCm"):
        backend_of("cuda", CONFIG)


class _Capture:
    """Stands for a context manager of `torch.cuda`."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> None:
        assert not gc.isenabled()

    def __exit__(self, *_: object) -> None:
        assert not gc.isenabled()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_not_collected_in_a_capture(was_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(device=None, device_index=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", _Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(cuda, "_captures", lambda _: None)
    if not was_enabled:
        gc.disable()
    with cuda.recording(object()):
        assert not gc.isenabled()
    assert gc.isenabled() is was_enabled
    with pytest.raises(ZeroDivisionError), cuda.recording(object()):
        _ = 1 / 0
    assert gc.isenabled() is was_enabled


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^device 'gpu': give cuda, cuda:1 or cpu$"), opened_backend("gpu", CONFIG):
        pass


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    num = gc.get_freeze_count()
    with opened_backend("cpu", CONFIG) as backend:
        backend.close()
    assert abs(gc.get_freeze_count() - num) < num / 2


@pytest.mark.parametrize("budget", ["40KiB", "1KiB"], ids=["let go of", "refused"])
def test_a_dropped_model_is_freed_before_the_next_is_loaded(budget: str) -> None:
    """With its streamer it is a cycle, and loaded objects count as old: without a collection it would stay."""
    left: list[weakref.ref[nn.Module]] = []
    for _ in range(3):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        with contextlib.suppress(PlanError):
            weightstream.offload(model, device="cpu", device_budget=budget)
        left.append(weakref.ref(model))
        del model
    with opened_backend("cpu", CONFIG, loads=True) as backend:
        assert [reference() for reference in left] == [None] * 3
        backend.close()
