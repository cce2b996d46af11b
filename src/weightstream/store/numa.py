"""Near: host memory, and threads that fill it, at the memory node of the device that reads it. Knows no device.

A node is preferred, not demanded: where it has no memory left, memory is elsewhere, and copies are slower. Torch's own
threads touch what is copied, so it is the memory that is told, not they. Who runs the process under a policy, as
`numactl` does, has decided.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

_ROOT = Path("/")
_DEFAULT, _PREFERRED = 0, 1  # MPOL_
_MOST = 1024  # nodes
_NUMBERS = MappingProxyType(  # of system calls for which the C library has no names
    {
        "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239},
        "aarch64": {"mbind": 235, "set_mempolicy": 237, "get_mempolicy": 236},
    }
)


@dataclass(frozen=True, slots=True)
class Node:
    """A memory node, and the processors at it."""

    index: int
    cores: frozenset[int]

    def hold(self, memory: torch.Tensor) -> torch.Tensor:
        """The memory, whose pages will be here when they are first touched; it begins at a page."""
        _call("mbind", ctypes.c_void_p(memory.data_ptr()), memory.numel(), *self._preferred, 0)
        return memory

    @contextmanager
    def first(self) -> Iterator[None]:
        """Inside, what the calling thread allocates is here."""
        _call("set_mempolicy", *self._preferred)
        try:
            yield
        finally:
            _call("set_mempolicy", _DEFAULT, None, 0)

    def settle(self) -> None:
        """From now on the calling thread runs here, where its process may, and what it allocates or reads is here."""
        if cores := self.cores & os.sched_getaffinity(0):
            with suppress(OSError):  # a system that forbids it; who waits for the thread must not wait for good
                os.sched_setaffinity(0, cores)
        _call("set_mempolicy", *self._preferred)

    @property
    def _preferred(self) -> tuple[Any, ...]:
        mask = (ctypes.c_ulong * (_MOST // 64))()
        mask[self.index // 64] = 1 << self.index % 64
        return _PREFERRED, mask, _MOST


def settled(job: Callable[[], None], node: Node | None) -> Callable[[], None]:
    """What a thread is to run, at the node if there is one."""

    def run() -> None:
        if node is not None:
            node.settle()
        job()

    return run


def node_of(address: str, root: Path = _ROOT) -> int | None:
    """The memory node that a PCI device is attached to."""
    text = text_of(root / "sys/bus/pci/devices" / address.lower() / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: the machine has one, or does not say


def cores_of(node: int, root: Path = _ROOT) -> frozenset[int]:
    """The processors of a memory node."""
    return frozenset(int(path.name[3:]) for path in root.glob(f"sys/devices/system/node/node{node}/cpu[0-9]*"))


def nearest(address: str, root: Path = _ROOT) -> Node | None:
    """The node of a PCI device; None where all memory is as near, nobody says, or the process has a policy."""
    node, nodes = node_of(address, root), list(root.glob("sys/devices/system/node/node[0-9]*"))
    policy = ctypes.c_int()
    is_known = node is not None and len(nodes) > 1 and _call("get_mempolicy", ctypes.byref(policy), None, 0, None, 0)
    return Node(node, cores_of(node, root)) if node is not None and is_known and policy.value == _DEFAULT else None


def text_of(path: Path) -> str:
    """What a file of the system says; nothing where it is not there."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _call(name: str, *arguments: Any) -> bool:
    """Whether the system did it; without nodes it does not."""
    numbers = _NUMBERS.get(platform.machine())
    given = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]  # as wide as registers
    return numbers is not None and _library().syscall(ctypes.c_ulong(numbers[name]), *given) == 0


@cache
def _library() -> Any:
    return ctypes.CDLL(None)
