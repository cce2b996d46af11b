"""The machine: processors and memory as /proc and /sys describe them. Knows no torch.

`root` is the folder that holds proc, sys and etc. A fact whose file is missing is unknown.
"""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from weightstream.store.numa import text_of

NO_SPINNING = "export OMP_WAIT_POLICY=passive"

_ROOT = Path("/")
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def nvidia_gpus(root: Path = _ROOT) -> tuple[str, ...]:
    """PCI addresses of NVIDIA's display and compute devices, with or without a driver."""
    folders = sorted(root.glob("sys/bus/pci/devices/*"))
    facts = ((folder.name, text_of(folder / "vendor"), text_of(folder / "class")) for folder in folders)
    return tuple(address for address, vendor, kind in facts if vendor == _NVIDIA and kind.startswith(_DISPLAY))


class HugePages(NamedTuple):
    """Settings of transparent huge pages: `always`, `madvise`, `never`, ...; None: unknown."""

    anonymous: str | None
    shared: str | None


def huge_pages(root: Path = _ROOT) -> HugePages:
    """The settings of transparent huge pages for anonymous and for shared memory."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    chosen = (re.search(r"\[(\w+)\]", text_of(folder / name)) for name in ("enabled", "shmem_enabled"))
    anonymous, shared = (match[1] if match else None for match in chosen)
    return HugePages(anonymous, shared)


def machine_id(root: Path = _ROOT) -> str:
    """Identifies this machine among those that share a home folder; it survives a restart."""
    return text_of(root / "etc/machine-id") or platform.node()


def cpu_name(root: Path = _ROOT) -> str:
    """The processor's name."""
    match = re.search(r"^model name\s*:\s*(.+)$", text_of(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def threads_may_spin(num_threads: int) -> bool:
    """Whether OpenMP lets compute threads spin while they wait for others. A single thread never waits."""
    return num_threads > 1 and os.environ.get("OMP_WAIT_POLICY", "").strip().lower() != "passive"


def cpu_load(seconds: float = 0.1) -> float:
    """The share of all cores that other processes use, sampled for so many `seconds`."""
    began, own_s = time.perf_counter(), time.process_time()
    busy = psutil.cpu_percent(seconds) / 100
    own = (time.process_time() - own_s) / (time.perf_counter() - began) / (psutil.cpu_count() or 1)
    return float(min(1.0, max(0.0, busy - own)))
