"""NUMA nodes: host memory, and threads that fill it, at the node of the device that copies from it. Knows no device.

A node is preferred, not required: if it has no memory left, memory comes from another node, and copies are slower.
Torch's own threads touch the memory first, so the policy is set on the memory, not on threads. A process that was
started under a policy, as by `numactl`, keeps that.
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
_MOST = 1024  # nodes in a mask
_NUMBERS = MappingProxyType(  # of system calls that the C library has no functions for
    {
        "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239},
        "aarch64": {"mbind": 235, "set_mempolicy": 237, "get_mempolicy": 236},
    }
)


@dataclass(frozen=True, slots=True)
class Node:
    """A memory node and its processors."""

    index: int
    cores: frozenset[int]

    def hold(self, memory: torch.Tensor) -> torch.Tensor:
        """Place the pages of `memory`, which begins at a page, on this node when they are first touched; returns it."""
        _call("mbind", ctypes.c_void_p(memory.data_ptr()), memory.numel(), *self._preferred, 0)
        return memory

    @contextmanager
    def first(self) -> Iterator[None]:
        """Inside, memory that the calling thread touches first is placed on this node."""
        _call("set_mempolicy", *self._preferred)
        try:
            yield
        finally:
            _call("set_mempolicy", _DEFAULT, None, 0)

    def settle(self) -> None:
        """Run the calling thread on this node's processors that its process may use, with memory of the node."""
        if cores := self.cores & os.sched_getaffinity(0):
            with suppress(OSError):  # the system may forbid it; the thread has to run all the same
                os.sched_setaffinity(0, cores)
        _call("set_mempolicy", *self._preferred)

    @property
    def _preferred(self) -> tuple[Any, ...]:
        mask = (ctypes.c_ulong * (_MOST // 64))()
        mask[self.index // 64] = 1 << self.index % 64
        return _PREFERRED, mask, _MOST


def on_node(job: Callable[[], None], node: Node | None) -> Callable[[], None]:
    """The job of a thread, run at the node if there is one."""

    def run() -> None:
        if node is not None:
            node.settle()
        job()

    return run


def node_of(address: str, root: Path = _ROOT) -> int | None:
    """The memory node that a PCI device is attached to; None: unknown."""
    text = text_of(root / "sys/bus/pci/devices" / address.lower() / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: the machine has one node, or does not report it


def cores_of(node: int, root: Path = _ROOT) -> frozenset[int]:
    """The processors of a memory node."""
    return frozenset(int(path.name[3:]) for path in root.glob(f"sys/devices/system/node/node{node}/cpu[0-9]*"))


def nearest(address: str, root: Path = _ROOT) -> Node | None:
    """The node of a PCI device; None if the machine has one node, it is unknown, or the process has a policy."""
    node, nodes = node_of(address, root), list(root.glob("sys/devices/system/node/node[0-9]*"))
    policy = ctypes.c_int()
    is_known = node is not None and len(nodes) > 1 and _call("get_mempolicy", ctypes.byref(policy), None, 0, None, 0)
    return Node(node, cores_of(node, root)) if node is not None and is_known and policy.value == _DEFAULT else None


def text_of(path: Path) -> str:
    """The text of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _call(name: str, *arguments: Any) -> bool:
    """Make a system call. Returns whether it succeeded; it fails on a system without NUMA."""
    numbers = _NUMBERS.get(platform.machine())
    converted = [
        ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments
    ]  # as wide as registers
    return numbers is not None and _library().syscall(ctypes.c_ulong(numbers[name]), *converted) == 0


@cache
def _library() -> Any:
    return ctypes.CDLL(None)
