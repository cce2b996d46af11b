"""Memory and threads at a node of the host. This machine's first node stands for the nearest one."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from weightstream.store import numa, pages
from weightstream.store.arena import Arena
from weightstream.store.mapping import FileMapping
from weightstream.store.numa import Node, nearest
from weightstream.store.pages import PageCache
from weightstream.store.staging import MemorySource, Staging

ADDRESS = "0000:0a:00.0"
PREFERRED, OF_ADDRESS = 1, 2
HERE = Node(0, frozenset(sorted(os.sched_getaffinity(0))[:1]))


def policy(memory: torch.Tensor | None = None) -> tuple[int, int]:
    """The policy at the address of some memory, or of the calling thread: a mode, and nodes as bits."""
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    where = (None, 0) if memory is None else (ctypes.c_void_p(memory.data_ptr()), OF_ADDRESS)
    assert numa._call("get_mempolicy", ctypes.byref(mode), nodes, 1024, *where)
    return mode.value, nodes[0]


def policy_and_cores() -> tuple[tuple[int, int], set[int]]:
    return policy(), os.sched_getaffinity(0)


@pytest.fixture
def root(tmp_path: Path) -> Callable[[int, int], Path]:
    """The system files of a machine with a number of nodes, and a GPU at one of them."""

    def made(at: int, num: int) -> Path:
        for node in range(num):
            for core in (2 * node, 2 * node + 1):
                (tmp_path / f"sys/devices/system/node/node{node}/cpu{core}").mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / ADDRESS).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / ADDRESS / "numa_node").write_text(f"{at}\n")
        return tmp_path

    return made


@pytest.fixture(autouse=True)
def system() -> None:
    if not numa._call("get_mempolicy", None, None, 0, None, 0):
        pytest.skip("the system knows of no memory nodes")


def test_the_node_of_a_device(root: Callable[[int, int], Path]) -> None:
    where = root(1, 2)
    assert nearest(ADDRESS.upper(), where) == Node(1, frozenset({2, 3}))
    assert nearest("0000:0b:00.0", where) is None


@pytest.mark.parametrize(("at", "num"), [(0, 1), (-1, 2)])
def test_no_node_if_all_memory_has_the_same_distance(at: int, num: int, root: Callable[[int, int], Path]) -> None:
    assert nearest(ADDRESS, root(at, num)) is None


def test_no_node_under_a_policy_of_the_user(root: Callable[[int, int], Path]) -> None:
    where = root(1, 2)
    with HERE.first():
        assert nearest(ADDRESS, where) is None
    assert nearest(ADDRESS, where) is not None


def test_memory() -> None:
    assert policy(Arena(node=HERE).take(1 << 20)) == (PREFERRED, 1)
    assert policy(Arena().take(1 << 20))[0] != PREFERRED
    with HERE.first():
        assert policy() == (PREFERRED, 1)
    assert policy() == (0, 0)
    block = Node(9, frozenset()).hold(Arena().take(1 << 12))  # this node does not exist, so the memory is elsewhere
    assert block.fill_(7).sum() == 7 << 12


def test_reading_threads_move_to_the_node() -> None:
    found = []

    class PolicySource(MemorySource):
        def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
            found.append(policy_and_cores())
            return super().read(begin, end, memory)

    data = torch.arange(16, dtype=torch.uint8)
    before = policy_and_cores()
    with closing(Staging([torch.empty(4096, dtype=torch.uint8)], num_threads=1, node=HERE)) as staging:
        (piece,) = staging.start(PolicySource(data), 0, 16)
        assert torch.equal(piece.memory, data)
    assert found == [((PREFERRED, 1), set(HERE.cores))]
    assert policy_and_cores() == before


def test_a_thread_stays_on_the_cores_of_its_process() -> None:
    found = []
    elsewhere = Node(0, frozenset({max(os.sched_getaffinity(0)) + 1}))
    thread = threading.Thread(target=numa.on_node(lambda: found.append(policy_and_cores()), elsewhere))
    thread.start()
    thread.join()
    assert found == [((PREFERRED, 1), os.sched_getaffinity(0))]


def test_a_system_that_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    data = torch.arange(16, dtype=torch.uint8)
    with closing(Staging([torch.empty(4096, dtype=torch.uint8)], num_threads=1, node=HERE)) as staging:
        (piece,) = staging.start(MemorySource(data), 0, 16)
        assert torch.equal(piece.memory, data)


def test_pages_are_read_in_at_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, is_there = [], pages._Ahead._is_there
    monkeypatch.setattr(pages._Ahead, "_is_there", lambda *args: (found.append(policy_and_cores()), is_there(*args))[1])
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(1 << 16))
    with closing(PageCache(lambda memory: found.append(policy_and_cores()), lambda memory: None, HERE)) as cache:
        (held,) = cache.hold([(FileMapping(path), 0, 1 << 16)], lambda error: None)
        assert held.source(0, 1 << 16) is not None
    assert found == [((PREFERRED, 1), set(HERE.cores))] * 2
