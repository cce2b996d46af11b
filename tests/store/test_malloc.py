"""The heap: allocations that fit into reserved memory do not call the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
from pathlib import Path
from weightstream.store import malloc as heap

malloc, free = heap._library().malloc, heap._library().free


def end():
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next(int(line.split()[0].split("-")[1], 16) for line in maps if line.endswith("[heap]"))


def grown(nbytes):
    begin, blocks = end(), [malloc(100 << 10) for _ in range(nbytes // (100 << 10))]
    for address in blocks:
        ctypes.memset(address, 1, 100 << 10)  # it is memory
    found = end() - begin
    for address in blocks:
        free(address)
    return found


heap.trim()
before, without = end(), grown(8 << 20)
heap.trim()
leave = heap.room(16 << 20)
room, within, again = end(), grown(8 << 20), grown(8 << 20)
heap.trim()
print(without > 6 << 20, room - before > 12 << 20, within, again, grown(8 << 20))
leave()
heap.trim()
print(end() - before < 4 << 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_a_reserved_heap_does_not_grow_until_it_is_released() -> None:
    settings = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.split() == ["True", "True", "0", "0", "0"]
    assert second == "True"
