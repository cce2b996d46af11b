"""A slot cache of rows: the time to look rows up, to fetch missing ones, and to prefetch guesses, in CUDA graphs.

    python benchmarks/slots.py

128 rows of the size of experts of Qwen3-30B-A3B in pinned host memory, uncompressed and with lengths of compressed
ones; a graph of 50 calls. Of the rows that a call names, so many are in no slot; the time beyond that of a call with
hits only is the time of the link.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import rows
import torch

from weightstream.runtime.devices.cuda import CudaBackend
from weightstream.runtime.experts.slot_cache import RowPiece, SlotCache, SlotStack

CALLS, REPEATS = 50, 9
# Bytes of a row of each stack, by pieces.
LENGTHS = {"plain": ((6291456,), (3145728,)), "coded": ((4325376, 87040), (2162688, 43520))}
SIZES = ((128, 42), (128, 64), (256, 128))


def cache_of(backend: CudaBackend, form: str, num_rows: int, num_slots: int) -> tuple[SlotCache, int]:
    """A slot cache with random rows, and the mean bytes of a row. If there are two pieces, the second has another
    length in each row."""
    rng, stacks, nbytes = random.Random(1), [], 0
    for lengths in LENGTHS[form]:
        memory = torch.empty(num_slots, sum(lengths) * 9 // 8 // 512 * 512, dtype=torch.uint8, device="cuda")
        pieces, at = [], 0
        for index, length in enumerate(lengths):
            host = torch.randint(256, (num_rows, length * 9 // 8), dtype=torch.uint8, device="cuda").cpu().pin_memory()
            shown = backend.device_view(host.view(-1))
            assert shown is not None
            ends = [length if index == 0 else length + rng.randrange(-100, 100) * 8 for _ in range(num_rows)]
            pieces.append(
                RowPiece(rows=tuple(r[:n] for r, n in zip(shown.view(num_rows, -1), ends, strict=True)), at=at)
            )
            nbytes, at = nbytes + sum(ends) // num_rows, at + length
        stacks.append(SlotStack(memory, pieces))
    return SlotCache(stacks, num_rows), nbytes


def calls(num_rows: int, num_ids: int, missing: int) -> Iterator[list[int]]:
    """Ids of which so many miss: they return only after all slots have had other rows."""
    fixed, others = list(range(num_ids - missing)), itertools.cycle(range(num_ids, num_rows))
    while True:
        yield fixed + [next(others) for _ in range(missing)]


def us_of(slots: SlotCache, named: Iterator[list[int]], *, guess: bool = False) -> list[float]:
    """Microseconds per call in graphs of calls with changing ids."""
    graphs = []
    for _ in range(REPEATS + 2):
        ids = [torch.tensor(next(named), device="cuda") for _ in range(CALLS)]
        slots.resolve(ids[0])
        if guess:
            slots.fetch_ahead(ids[0], 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for one in ids:
                slots.fetch_ahead(one, 2) if guess else slots.resolve(one)
        graphs.append((graph, ids))
    found = []
    for graph, _ in graphs:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / CALLS)
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "slots.jsonl")
    args = parser.parse_args()
    backend, common = CudaBackend(torch.device("cuda", torch.cuda.current_device())), rows.environment()

    def write(system: str, us: list[float], **more: object) -> None:
        row = {"system": system, "us": rows.percentiles(us), **more}
        rows.append(args.out, [row], common)
        print(row, flush=True)

    for form, (num_rows, num_slots) in itertools.product(LENGTHS, SIZES):
        if form == "coded" and num_rows > 128:
            continue
        slots, nbytes = cache_of(backend, form, num_rows, num_slots)
        about = {"rows": num_rows, "slots": num_slots, "row_nbytes": nbytes}
        what = f"{form}, {num_slots} of {num_rows} rows in slots"
        base = 0.0
        for missing in (0, 1, 2, 4, 8):
            us = us_of(slots, calls(num_rows, 8, missing))
            middle = sorted(us)[len(us) // 2]
            base = middle if not missing else base
            rate = missing * nbytes / (middle - base) / 1e3 if missing else None
            write(f"8 ids, {missing} missing, {what}", us, gb_per_s=rate and round(rate, 1), **about)
        if num_slots >= 64:
            write(f"64 ids, none missing, {what}", us_of(slots, calls(num_rows, 64, 0)), **about)
        write(f"a guess of 8 ids, none missing, {what}", us_of(slots, calls(num_rows, 8, 0), guess=True), **about)
    backend.close()


if __name__ == "__main__":
    main()
