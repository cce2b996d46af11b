"""Loading a checkpoint of 16 GB: seconds from the call to the end of the first step, host memory, and later steps.

    python benchmarks/start.py [--only whole,mapped,arena,cold,packed,accelerate,peers] [--folder FOLDER] [--out FILE]

Each case is a process whose clock starts after all imports, before anything is initialised; the time includes
initialising CUDA (`device_s`). Warm: the checkpoint is in the page cache; cold: none of it is.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint
import host
from alone import RESIDENT, Process, Trials, main

WHOLE = "weightstream, all of it resident, warm"
PEERS = {
    "weightstream, uncompressed": "mapped",
    "weightstream, compressed": "compressed",
    "accelerate, weights in RAM": "accelerate",
    "diffusers group offload, block": "diffusers_block",
    "diffusers group offload, leaf": "diffusers_leaf",
    "FlexTensor, memory mode, 2 %": "flextensor",
}
FIRST, AGAIN = "weightstream, mapped, warm", "weightstream, mapped, warm, again"


def mapped(trials: Trials) -> None:
    """From the page cache; and by a second process while the first holds its model."""
    share = host.warm(trials.files)
    with trials.guarded(FIRST), Process(trials.case("mapped", hold=True), timeout_s=120) as first:
        trials.add(FIRST, settings=trials.settings, cached_share=share, **first.result())
        trials.measure("libraries alone", trials.case("no_model"), timeout_s=60)
        with trials.guarded("weightstream, second process"):
            second(trials)


def second(trials: Trials) -> None:
    """The growth of the machine's memory as a share of the weights, without the memory of the resident model's process
    for code and kernels; `all_share` includes that."""
    with Process(trials.case("mapped", steps=2), timeout_s=120) as process:
        found = process.result()
    resident = next((row for row in trials.rows if row["system"] == RESIDENT), None)
    resident = resident or trials.measure(RESIDENT, trials.case("resident")) or {"used_growth_nbytes": 0}
    shares = {
        "used_share": round((found["used_growth_nbytes"] - resident["used_growth_nbytes"]) / trials.nbytes, 5),
        "all_share": round(found["used_growth_nbytes"] / trials.nbytes, 5),
    }
    trials.add("weightstream, second process", base_nbytes=resident["used_growth_nbytes"], **shares, **found)


def arena(trials: Trials) -> None:
    """Loaded to RAM by transformers, then offloaded; and the mapped one again, as clocks drift meanwhile."""
    share = host.warm(trials.files)
    pinned = trials.measure("weightstream, arena", trials.case("arena"), cached_share=share)
    with trials.guarded(AGAIN), Process(trials.case("mapped"), timeout_s=120) as process:
        found = process.result()
        trials.add(AGAIN, settings=trials.settings, **found, **_against(trials, pinned, found))


def _against(trials: Trials, pinned: dict[str, Any] | None, again: dict[str, Any]) -> dict[str, float]:
    first = next((row for row in trials.rows if row["system"] == FIRST and "ms" in row), again)
    if pinned is None:
        return {}
    ms = statistics.median(first["steps_ms"] + again["steps_ms"])
    return {
        "x_arena": round(ms / pinned["ms"]["p50"], 4),
        "x_drift": round(again["ms"]["p50"] / first["ms"]["p50"], 4),
    }


def cold(trials: Trials) -> None:
    _cold(trials, "weightstream, mapped, cold", trials.folder)


def _cold(trials: Trials, system: str, folder: Path) -> None:
    """The weights' bytes over the time to the first step, over the rate of direct reads right before and after."""
    files = checkpoint.files(folder)
    reads = host.DirectReads(files)
    reads.measure()
    buffered_gbps = host.buffered_gbps(files)
    share = host.evict(files)
    with trials.guarded(system), Process(trials.case("mapped", folder=str(folder)), timeout_s=120) as process:
        found = process.result()
        reads.measure()
        gbps = trials.nbytes / found["total_s"] / 1e9
        x_direct = round(gbps / statistics.mean(reads.medians), 4)
        fields = {
            "cached_share": share,
            "read_gbps": round(gbps, 3),
            "floors_gbps": reads.medians,
            "x_direct": x_direct,
            "buffered_gbps": round(buffered_gbps, 3),
            "x_buffered": round(gbps / buffered_gbps, 4),
        }
        trials.add(system, settings=trials.settings, **found, **fields)


def packed(trials: Trials) -> None:
    """The same from a copy by `weightstream pack`, which is deleted afterwards."""
    out = trials.folder.with_name(f"{trials.folder.name}-packed")
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    command = [sys.executable, "-m", "weightstream", "pack", str(trials.folder), str(out)]
    subprocess.run(command, check=True, timeout=240)
    seconds = time.perf_counter() - started
    trials.add("weightstream pack", seconds=round(seconds, 2), pack_gbps=round(trials.nbytes / seconds / 1e9, 3))
    share = host.warm(checkpoint.files(out))
    trials.measure("weightstream, packed, warm", trials.case("mapped", folder=str(out)), cached_share=share)
    _cold(trials, "weightstream, packed, cold", out)
    shutil.rmtree(out, ignore_errors=True)


def accelerate(trials: Trials) -> None:
    share = host.warm(trials.files)
    trials.measure("accelerate, weights in RAM", trials.case("accelerate", steps=2), cached_share=share)


def peers(trials: Trials) -> None:
    """Peak memory of GPU and host, and the time of a step, of each system on this model."""
    share = host.warm(trials.files)
    for system, way in PEERS.items():
        trials.measure(system, trials.case(way, steps=5), timeout_s=240, cached_share=share)


def whole(trials: Trials) -> None:
    """A model that fits the device, in turns with transformers' own load to the device."""
    share = host.warm(trials.files)
    settings = {"device_budget": "48MiB" if trials.smoke else "20GiB"}
    for _ in range(3):
        trials.measure(WHOLE, trials.case("mapped", settings=settings), cached_share=share)
        trials.measure(RESIDENT, trials.case("resident"), cached_share=share)


GROUPS = {
    "whole": whole,
    "mapped": mapped,
    "arena": arena,
    "cold": cold,
    "packed": packed,
    "accelerate": accelerate,
    "peers": peers,
}

if __name__ == "__main__":
    main("start", __doc__, GROUPS)
