"""The host as a benchmark sees it: memory of a process and of the machine, the page cache, direct reads of files."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
from rows import percentiles

GIB = 2**30
_LIBC = ctypes.CDLL(None, use_errno=True)
_UNCACHED = 0.01  # of a file's pages may stay in memory: the kernel keeps those that others map


def anon_nbytes() -> int:
    """Anonymous memory of this process."""
    return _fields("/proc/self/status")["RssAnon"]


def held_nbytes() -> int:
    """Anonymous and pinned memory of this process: what cannot be read again from a file."""
    found = _fields("/proc/self/status")
    return found["RssAnon"] + found["RssShmem"]


def peak_rss_nbytes() -> int:
    """The largest memory of this process so far, including pages of files that it maps."""
    return _fields("/proc/self/status")["VmHWM"]


def private_nbytes() -> int:
    """Memory that this process shares with no other one, including pages of files."""
    found = _fields("/proc/self/smaps_rollup")
    return found["Private_Clean"] + found["Private_Dirty"]


def used_nbytes() -> int:
    """Memory of the machine that is neither free nor cache: of all processes and of the kernel."""
    found = _fields("/proc/meminfo")
    return found["MemTotal"] - sum(found[name] for name in ("MemFree", "Buffers", "Cached", "SReclaimable"))


def read_nbytes() -> int:
    """Bytes that were read from disks for this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _fields(path: str) -> dict[str, int]:
    """The lines of a file in /proc that have kilobytes, in bytes."""
    words = (line.split() for line in Path(path).read_text().splitlines())
    return {each[0].rstrip(":"): int(each[1]) * 1024 for each in words if each[-1] == "kB" and len(each) == 3}


class Peak:
    """The peak of one of the functions above in the `with` block, sampled every 20 ms."""

    def __init__(self, sample: Callable[[], int] = anon_nbytes) -> None:
        self._sample = sample

    def __enter__(self) -> Peak:
        self.nbytes = self._sample()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.nbytes = max(self.nbytes, self._sample())


def warm(files: list[Path]) -> float:
    """Read files into the page cache; returns the share of their pages that is in it."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_read_all, files))
    return round(cached_share(files), 4)


def evict(files: list[Path]) -> float:
    """Remove files from the page cache, only these if that works; returns the share of their pages that stays."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # dirty pages stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if (share := cached_share(files)) > _UNCACHED and os.geteuid() == 0:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
        except OSError as error:
            print(f"drop_caches: {error}", flush=True)
        share = cached_share(files)
    return round(share, 4)


def buffered_gbps(files: list[Path]) -> float:
    """GB/s of one process that reads uncached files in order into the page cache."""
    evict(files)
    started = time.perf_counter()
    for path in files:
        _read_all(path)
    return sum(path.stat().st_size for path in files) / (time.perf_counter() - started) / 1e9


def cached_share(files: list[Path]) -> float:
    """The share of files' pages that the page cache holds."""
    found = [flags & 1 for flags in map(_residency, files)]
    return float(sum(int(flags.sum()) for flags in found) / sum(len(flags) for flags in found))


def _residency(path: Path) -> np.ndarray:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        flags = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
        address = ctypes.c_void_p(np.frombuffer(memory, np.uint8).ctypes.data)
        if _LIBC.mincore(address, ctypes.c_size_t(len(memory)), ctypes.c_void_p(flags.ctypes.data)):
            raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
    return flags


def _read_all(path: Path) -> None:
    buffer = bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


class DirectReads:
    """The rate of sequential direct reads of files, with one request in flight and with two: the floor of a disk.

    A sample continues in the files where the last one ended.
    """

    def __init__(self, files: list[Path]) -> None:
        self._block = 8 << 20 if min(path.stat().st_size for path in files) >= 64 << 20 else 1 << 20
        self._sample = min(GIB, sum(path.stat().st_size for path in files)) // self._block
        self._blocks = itertools.cycle(_blocks(files, self._block))
        self.samples: dict[int, list[float]] = {1: [], 2: []}
        self.medians: list[float] = []  # of each `measure`, GB/s

    def measure(self, num: int = 4) -> float:
        """Take samples; returns GB/s, the median of the better number of requests."""
        for threads, samples in self.samples.items():
            samples += [self._read(threads) for _ in range(num)]
        self.medians.append(round(max(statistics.median(each[-num:]) for each in self.samples.values()), 4))
        return self.medians[-1]

    @property
    def threads(self) -> int:
        """The better number of requests so far."""
        return max(self.samples, key=lambda threads: statistics.median(self.samples[threads]))

    def gbps(self) -> dict[str, float]:
        """Percentiles of all samples with that number."""
        return percentiles(self.samples[self.threads])

    def _read(self, threads: int) -> float:
        blocks = deque(itertools.islice(self._blocks, self._sample))
        opened = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in {path for path, _ in blocks}}
        started = time.perf_counter()
        try:
            with ThreadPoolExecutor(threads) as pool:
                for reader in [pool.submit(_read_blocks, blocks, opened, self._block) for _ in range(threads)]:
                    reader.result()
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return self._sample * self._block / (time.perf_counter() - started) / 1e9


def _blocks(files: list[Path], nbytes: int) -> Iterator[tuple[Path, int]]:
    for path in files:
        for index in range(path.stat().st_size // nbytes):
            yield path, index * nbytes


def _read_blocks(blocks: deque[tuple[Path, int]], opened: dict[Path, int], nbytes: int) -> None:
    memory = mmap.mmap(-1, nbytes)  # aligned to pages, as direct reads need
    while True:
        try:
            path, offset = blocks.popleft()
        except IndexError:
            return
        if os.preadv(opened[path], [memory], offset) != nbytes:
            raise OSError(f"{path}: short read at {offset}")
