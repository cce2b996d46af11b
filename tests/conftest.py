"""Fixtures and hooks of all tests: a cache folder with a stored profile, so that no test measures or writes to the
home.

Without a GPU, Triton's kernels run in its interpreter. Triton reads that variable when it is imported.
"""

from __future__ import annotations

import gc
import os
import random
import shlex
import signal
import subprocess
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
from weightstream.codec import unpacking
from weightstream.measure import profile, progress
from weightstream.plan.manifest import unpack_rate
from weightstream.runtime.devices.cpu import CPU_PROFILE
from weightstream.runtime.devices.cuda import CUDA_PROFILE

_NUM_MODULES = pytest.StashKey[int]()
_SEED = "WEIGHTSTREAM_SEED"  # an environment variable
_OF_A_SHELL = (  # settings of the library, of terminals, and of launchers of several processes
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TERM", "TTY_COMPATIBLE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("WEIGHTSTREAM_DISABLE_PIN_MEMORY", "WEIGHTSTREAM_DISABLE_UVA"),
)


def _start_plainly() -> None:
    """Set signals and the environment as in an interactive shell, also in a background job."""
    for name in _OF_A_SHELL:
        os.environ.pop(name, None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


_start_plainly()


def _seed() -> str:
    """Seed of the cases of `few`: the commit, so that over many commits all cases of a grid run."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "no commit"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write the result, seconds and name of each test to this file as soon as it ends, and why it failed"
    parser.addoption("--results", metavar="FILE", help=text)


class _Results:
    """A file with a line per test: result, seconds, name, and the reason of a failure. Complete even if the run is
    killed."""

    def __init__(self, path: str) -> None:
        self.file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.running = dict[str, list[pytest.TestReport]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reports = self.running.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when in ("setup", "call"):
            return  # its teardown follows; a report by xdist of a dead worker has another phase
        del self.running[report.nodeid]
        results = {each.outcome for each in reports}
        result = next(result for result in ("failed", "skipped", "passed") if result in results)
        seconds = sum(each.duration for each in reports)
        self.file.write(f"{result:7} {seconds:7.2f} s  {report.nodeid}\n")
        for each in reports:
            if each.failed:
                self.file.write(f"{each.longreprtext.rstrip()}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Give Hypothesis a third of its examples in runs without stress tests. Each run draws others."""
    if (path := config.getoption("results")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Results(path))
    if "not stress" in config.getoption("markexpr"):
        settings.register_profile("few", max_examples=NUM_EXAMPLES // 3)
        settings.load_profile("few")
    os.environ.setdefault(_SEED, _seed())  # inherited by the workers of xdist


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seed = os.environ[_SEED]
    terminalreporter.write_line(f"few cases were drawn by {_SEED}={shlex.quote(seed)}")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first. Otherwise one worker would run the last of them while the others are idle."""
    _thin(items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _thin(items: list[pytest.Item]) -> None:
    """Mark all but n cases of a test with `few(n)` as stress. The commit and the test's name draw them.

    `repeats.only` names the cases instead, if it matters which of them run.
    """
    cases = defaultdict[tuple[object, ...], list[pytest.Function]](list)
    for item in items:
        if item.get_closest_marker("few") and not any(item.get_closest_marker(kind) for kind in ("stress", "gpu")):
            assert isinstance(item, pytest.Function)
            cases[item.path, item.cls, item.originalname].append(item)
    for group in cases.values():
        num = next(mark.args[0] for mark in group[0].iter_markers("few"))
        about = os.environ[_SEED], group[0].path.name, group[0].originalname
        kept = random.Random(" ".join(about)).sample(group, min(num, len(group)))
        for item in (item for item in group if item not in kept):
            item.add_marker("stress")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    _keep_modules(session.config)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exempt imported modules from garbage collection, which took two thirds of the time."""
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
        # Measured in a year, on an idle machine: slow steps under load are then no reason to measure again.
        kept = {"measured_at": time.time() + 3e7, "load": 0.0}
        # Copies that cost compute nothing: else plans keep more weights resident, and tests stream fewer.
        profile.save_profile(torch.device("cpu"), replace(CPU_PROFILE, compute_lost=0.0, **kept))
        if torch.cuda.is_available():  # parallel tests, and tests that delay copies, would measure anything
            kept |= {unpack_rate(kernel): 1.5e12 for kernel in unpacking.FORMATS}
            profile.save_profile(torch.device("cuda", 0), replace(CUDA_PROFILE, **kept))
        yield


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """No lines of progress because this machine is busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "LONG_S", 1000.0)
        patch.setattr(progress, "_AWAITED_S", 1000.0)
        yield


@pytest.fixture(autouse=True)
def _freeze_count() -> Iterator[None]:
    """Avoid counting the frozen objects, which visits each of them: 25 ms whenever a device is opened."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """A test compiles its own code: torch would run that of an earlier test if it fits, and keeps eight versions."""
    yield
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None and any(compiler.counters.values()):
        torch._dynamo.reset()
        compiler.counters.clear()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A new seed in each run, for tests that draw their cases. They print it when they fail."""
    return random.SystemRandom().randrange(1 << 30)


@pytest.fixture
def few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a search after the most promising plans: a whole pipeline has hundreds for each budget."""
    monkeypatch.setattr("weightstream.plan.search._MOST_PLANS", 12)


@pytest.fixture
def own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the device: for tests that run while no other test does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def nothing_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace no call ahead: the first plan stays, and the first step finds its own order."""
    monkeypatch.setattr("weightstream.inputs.gathering.Gatherer.for_call", lambda *_: None)


@pytest.fixture
def no_loading_bars() -> Iterator[None]:
    """Silence transformers' progress bars while it loads."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
