"""What every test has: a cache of its own that holds a profile, so that none measures or writes to the home.

Triton's kernels run in its interpreter where there is no GPU; Triton reads that when it is imported.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from repeats import NUM_EXAMPLES
from weightstream.measure import profile
from weightstream.runtime.cpu import CPU_PROFILE
from weightstream.runtime.cuda import CUDA_PROFILE

os.environ.pop("COLUMNS", None)  # tests of screens say how wide these are
_NUM_MODULES = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis has a third of its examples where stress is left out: other ones in each run."""
    if "not stress" in config.getoption("markexpr"):
        settings.register_profile("few", max_examples=NUM_EXAMPLES // 3)
        settings.load_profile("few")


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long goes first, or one worker would wait for it alone in the end."""
    _thin(items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _thin(items: list[pytest.Item]) -> None:
    """Of a test that is marked `few(n)`, all cases but n are for stress: those n that its name draws, so that others
    are drawn of the same grid elsewhere. Where it matters which, `repeats.only` names them."""
    cases = defaultdict[tuple[object, ...], list[pytest.Function]](list)
    for item in items:
        if item.get_closest_marker("few") and not any(item.get_closest_marker(kind) for kind in ("stress", "gpu")):
            assert isinstance(item, pytest.Function)
            cases[item.path, item.cls, item.originalname].append(item)
    for found in cases.values():
        num = next(mark.args[0] for mark in found[0].iter_markers("few"))
        kept = random.Random(found[0].originalname).sample(found, min(num, len(found)))
        for item in (item for item in found if item not in kept):
            item.add_marker("stress")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    _keep_modules(session.config)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a test imported stays: no collection of garbage looks at it again (they took two thirds of the time)."""
    if len(sys.modules) != item.config.stash[_NUM_MODULES] or nextitem is None or nextitem.path != item.path:
        _keep_modules(item.config)


def _keep_modules(config: pytest.Config) -> None:
    config.stash[_NUM_MODULES] = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # As if measured in a year, on an idle machine: steps that others slow down are no reason to measure again.
        kept = {"measured_at": time.time() + 3e7, "load": 0.0}
        profile.save(torch.device("cpu"), replace(CPU_PROFILE, **kept))
        if torch.cuda.is_available():  # beside other tests, or inside of one that delays copies, anything is measured
            profile.save(torch.device("cuda", 0), replace(CUDA_PROFILE, **kept))
        yield


@pytest.fixture(autouse=True)
def _freeze_count() -> Iterator[None]:
    """Something is frozen, all that was imported: to count it looks at each, 25 ms whenever a device is opened."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another one in each run, for tests that draw what they try; they tell it where they fail."""
    return random.SystemRandom().randrange(1 << 30)


@pytest.fixture
def keeps_its_plan(nothing_foreseen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the plan is the first one."""
    monkeypatch.setattr("weightstream.runtime.refinement._MOVES", 0)


@pytest.fixture
def few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search ends after the plans that promise most: of a whole pipeline hundreds would be tried for each budget."""
    monkeypatch.setattr("weightstream.plan.placement._MOST_PLANS", 12)


@pytest.fixture
def own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is measured: for tests that nothing else runs beside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def nothing_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is followed before it runs: the plan is the first one, and the first step finds its own order."""
    monkeypatch.setattr("weightstream.prospects.foreseen", lambda *_: None)


@pytest.fixture
def no_loading_bars() -> Iterator[None]:
    """transformers writes nothing to the terminal while it loads."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
