"""NVIDIA's management library (NVML), through the package nvidia-ml-py: driver, PCIe links, load. Knows no torch.

A fact is unknown if the package is missing, or the driver or GPU does not report it. PCI addresses identify GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

_GENERATIONS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # 1e9 transfers per second and lane, by generation from 1
_LANES = range(1, 33)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PciLink:
    """A PCIe link: its generation and the number of its lanes."""

    generation: int
    width: int

    @property
    def bytes_per_s(self) -> float:
        """The line rate less its encoding; packet headers take some 10 % of this."""
        efficiency = 8 / 10 if self.generation < 3 else 128 / 130 if self.generation < 6 else 242 / 256
        return _GENERATIONS[self.generation - 1] * 1e9 / 8 * self.width * efficiency

    def __str__(self) -> str:
        return f"generation {self.generation} x{self.width}"


def driver_version() -> str | None:
    """The version of NVIDIA's kernel driver, such as `580.95.05`."""
    return _answer(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def link_now(address: str) -> PciLink | None:
    """The link's present state; an idle GPU slows it down."""
    return _link(address, "Curr")


def link_at_best(address: str) -> PciLink | None:
    """The fastest link that the GPU and its slot support."""
    return _link(address, "Max")


def gpu_load(address: str) -> float:
    """The share of the last second or less in which kernels of other processes ran; -1: unknown.

    If other processes use the GPU, the kernels of this process count, too.
    """

    def question(nvml: Any) -> float:
        gpu = nvml.nvmlDeviceGetHandleByPciBusId(address)
        if [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)] == [os.getpid()]:
            return 0.0
        return float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu) / 100

    load = _answer(question)
    return -1.0 if load is None else load


def _link(address: str, which: str) -> PciLink | None:
    def question(nvml: Any) -> PciLink | None:
        gpu = nvml.nvmlDeviceGetHandleByPciBusId(address)
        generation = getattr(nvml, f"nvmlDeviceGet{which}PcieLinkGeneration")(gpu)
        width = getattr(nvml, f"nvmlDeviceGet{which}PcieLinkWidth")(gpu)
        if not 1 <= generation <= len(_GENERATIONS) or width not in _LANES:
            return None  # a virtual machine may report such values
        return PciLink(generation=generation, width=width)

    return _answer(question)


def _answer(question: Callable[[Any], _T]) -> _T | None:
    with suppress(ImportError):
        nvml = import_module("pynvml")
        with suppress(nvml.NVMLError):  # no driver, or a GPU that does not report this
            nvml.nvmlInit()
            try:
                return question(nvml)
            finally:
                nvml.nvmlShutdown()
    return None
