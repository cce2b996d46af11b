"""What opening a device leaves behind in the process."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
from torch import nn

import weightstream
from weightstream.errors import ConfigError, PlanError, UnsupportedError
from weightstream.runtime.devices.opening import opened
from weightstream.settings.config import OffloadConfig

CONFIG = OffloadConfig().resolved()


@pytest.fixture(autouse=True)
def _freeze_count() -> None:
    """What is frozen is counted here."""


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_nobody_looks_for_garbage_meanwhile() -> None:
    with opened("cpu", CONFIG) as backend:
        assert not gc.isenabled()
        with opened("cpu", CONFIG) as other:
            other.close()
        assert not gc.isenabled()
        backend.close()
    assert gc.isenabled()


def test_who_has_disabled_collection_finds_it_disabled() -> None:
    gc.disable()
    with opened("cpu", CONFIG) as backend:
        backend.close()
    assert not gc.isenabled()


def test_an_error_enables_it_again() -> None:
    with pytest.raises(ZeroDivisionError), opened("cpu", CONFIG):
        _ = 1 / 0
    assert gc.isenabled()
    for device, error in (("nonsense", ConfigError), ("meta", UnsupportedError)):
        with pytest.raises(error), opened(device, CONFIG):
            pass
        assert gc.isenabled()


def test_a_name_that_is_none_is_answered_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"^device 'gpu': give cuda, cuda:1 or cpu$"), opened("gpu", CONFIG):
        pass


def test_what_was_frozen_stays_frozen() -> None:
    gc.freeze()
    num = gc.get_freeze_count()
    with opened("cpu", CONFIG) as backend:
        backend.close()
    assert abs(gc.get_freeze_count() - num) < num / 2


@pytest.mark.parametrize("budget", ["40KiB", "1KiB"], ids=["let go of", "refused"])
def test_a_model_that_is_nobodys_goes_before_the_next_is_loaded(budget: str) -> None:
    """With its streamer it is a cycle, and what was loaded counts as old: it would stay without a look."""
    left: list[weakref.ref[nn.Module]] = []
    for _ in range(3):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        with contextlib.suppress(PlanError):
            weightstream.offload(model, device="cpu", device_budget=budget)
        left.append(weakref.ref(model))
        del model
    with opened("cpu", CONFIG, loads=True) as backend:
        assert [reference() for reference in left] == [None] * 3
        backend.close()
