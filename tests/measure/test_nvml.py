"""Facts of a GPU from NVML. Facts that NVML does not report are unknown. The library is a fake."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightstream.measure import nvml
from weightstream.measure.nvml import PciLink

ADDRESS = "0000:18:00.0"
BEST = PciLink(generation=5, width=16)


class Library(ModuleType):
    """`pynvml` of a machine with one GPU; `fails` names calls that are not supported."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.fails: set[str] = set()
        self.num_open = 0
        self.link = {"CurrPcieLinkGeneration": 1, "CurrPcieLinkWidth": 8}
        self.link |= {"MaxPcieLinkGeneration": 5, "MaxPcieLinkWidth": 16}
        self.pids: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name in self.fails:
            raise self.NVMLError("Not Supported")
        if name in ("nvmlInit", "nvmlShutdown"):
            return lambda: self._count(1 if name == "nvmlInit" else -1)
        assert self.num_open == 1, f"{name} is called while the library is not open"
        if name == "nvmlSystemGetDriverVersion":
            return lambda: "580.95.05"
        if name == "nvmlDeviceGetHandleByPciBusId":
            return self._gpu
        found: dict[str, Any] = {f"nvmlDeviceGet{key}": value for key, value in self.link.items()}
        found["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=35, memory=2)
        found["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=pid) for pid in self.pids]
        return lambda gpu: found[name] if gpu == "the GPU" else None

    def _count(self, num: int) -> None:
        self.num_open += num

    def _gpu(self, address: str) -> str:
        if address != ADDRESS:
            raise self.NVMLError("Not Found")
        return "the GPU"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def answers(address: str = ADDRESS) -> tuple[object, ...]:
    return nvml.driver_version(), nvml.link_now(address), nvml.link_at_best(address), nvml.gpu_load(address)


def test_the_rate_of_a_link_is_that_of_its_lanes_less_encoding() -> None:
    assert round(BEST.bytes_per_s / 1e9, 2) == 63.02
    assert PciLink(generation=1, width=4).bytes_per_s == 1e9
    assert PciLink(generation=3, width=8).bytes_per_s * 2 == PciLink(generation=4, width=8).bytes_per_s
    assert str(BEST) == "generation 5 x16"


def test_a_gpu(library: Library) -> None:
    assert answers() == ("580.95.05", PciLink(generation=1, width=8), BEST, 0.35)
    assert library.num_open == 0


def test_a_missing_gpu(library: Library) -> None:
    assert answers("0000:99:00.0") == ("580.95.05", None, None, -1.0)
    assert library.num_open == 0


@pytest.mark.parametrize(
    ("pids", "load"), [([], 0.35), ([os.getpid()], 0.0), ([os.getpid(), 1], 0.35), ([os.getpid() + 1], 0.35)]
)
def test_the_load_is_that_of_other_processes(library: Library, pids: list[int], load: float) -> None:
    """Many containers show no processes, including this one."""
    library.pids = pids
    assert nvml.gpu_load(ADDRESS) == load


@pytest.mark.parametrize(
    ("name", "value"), [("Generation", 0), ("Generation", 8), ("Width", 0), ("Width", 33), ("Width", 255)]
)
def test_a_link_of_a_virtual_machine(library: Library, name: str, value: int) -> None:
    library.link |= {f"CurrPcieLink{name}": value, f"MaxPcieLink{name}": value}
    assert nvml.link_now(ADDRESS) is None
    assert nvml.link_at_best(ADDRESS) is None


def test_unsupported_facts_are_unknown(library: Library) -> None:
    library.fails = {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetCurrPcieLinkWidth"}
    assert answers() == ("580.95.05", None, BEST, -1.0)
    assert library.num_open == 0


def test_without_a_driver_everything_is_unknown(library: Library) -> None:
    library.fails = {"nvmlInit"}
    assert answers() == (None, None, None, -1.0)


def test_without_the_package_everything_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert answers() == (None, None, None, -1.0)
