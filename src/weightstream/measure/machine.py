"""The machine: what the system says about its processors, links and memory in /proc and /sys. Knows no torch.

Every function takes `root`, the folder that holds proc, sys and etc, and takes a file that is not there for unknown.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_GENERATIONS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)  # transfers per second and lane of generation 1, 2, ..., in 1e9
_NVIDIA, _DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True, kw_only=True, slots=True)
class PciLink:
    """A PCIe link: its generation and the number of its lanes."""

    generation: int
    width: int

    @property
    def bytes_per_s(self) -> float:
        """What is left of the line rate after its encoding; packets take some 10 % more."""
        coded = 8 / 10 if self.generation < 3 else 128 / 130 if self.generation < 6 else 242 / 256
        return _GENERATIONS[self.generation - 1] * 1e9 / 8 * self.width * coded

    def __str__(self) -> str:
        return f"generation {self.generation} x{self.width}"


def link_now(address: str, root: Path = _ROOT) -> PciLink | None:
    """The link of the device at a PCI address as it is; an idle GPU slows its link down."""
    return _link(_device(address, root), "current")


def link_at_best(address: str, root: Path = _ROOT) -> PciLink | None:
    """What both ends of the link could do: the device, and the port above it where that is known."""
    device = _device(address, root).resolve()
    if (own := _link(device, "max")) is None:
        return None
    port = _link(device.parent, "max") or own
    return PciLink(generation=min(own.generation, port.generation), width=min(own.width, port.width))


def numa_node(address: str, root: Path = _ROOT) -> int | None:
    """The memory node that a PCI device is attached to."""
    text = _text(_device(address, root) / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: the machine has one, or does not say


def cores_of_node(node: int, root: Path = _ROOT) -> frozenset[int]:
    """The processors of a memory node."""
    return frozenset(int(path.name[3:]) for path in root.glob(f"sys/devices/system/node/node{node}/cpu[0-9]*"))


def nvidia_gpus(root: Path = _ROOT) -> tuple[str, ...]:
    """PCI addresses of NVIDIA's display and compute devices, whether or not a driver runs them."""
    folders = sorted(root.glob("sys/bus/pci/devices/*"))
    facts = ((folder.name, _text(folder / "vendor"), _text(folder / "class")) for folder in folders)
    return tuple(address for address, vendor, kind in facts if vendor == _NVIDIA and kind.startswith(_DISPLAY))


def driver_version(root: Path = _ROOT) -> str | None:
    """The version of NVIDIA's kernel driver, such as `580.95.05`."""
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _text(root / "proc/driver/nvidia/version"))
    return match[0] if match else _text(root / "sys/module/nvidia/version") or None


def huge_pages(root: Path = _ROOT) -> tuple[str | None, str | None]:
    """The setting of transparent huge pages, for anonymous and for shared memory: `always`, `madvise`, `never`, ..."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    chosen = (re.search(r"\[(\w+)\]", _text(folder / name)) for name in ("enabled", "shmem_enabled"))
    anonymous, shared = (match[1] if match else None for match in chosen)
    return anonymous, shared


def machine_id(root: Path = _ROOT) -> str:
    """What tells this machine from others that share a home folder, the same after a restart."""
    return _text(root / "etc/machine-id") or platform.node()


def processor(root: Path = _ROOT) -> str:
    """The processor's name."""
    match = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _device(address: str, root: Path) -> Path:
    return root / "sys/bus/pci/devices" / address.lower()


def _link(folder: Path, which: str) -> PciLink | None:
    speed = re.match(r"([\d.]+) GT/s", _text(folder / f"{which}_link_speed"))
    width = _text(folder / f"{which}_link_width")
    if not speed or float(speed[1]) not in _GENERATIONS or not width.isdecimal() or not 1 <= int(width) <= 32:
        return None  # `Unknown`, 0 or 255 lanes: a virtual machine
    return PciLink(generation=_GENERATIONS.index(float(speed[1])) + 1, width=int(width))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
