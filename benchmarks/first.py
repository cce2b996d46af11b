"""The first offload of a process, against the second one of an equal model, which only moves weights.

    python benchmarks/first.py [--trials 3] [--device cuda] [--out FILE]

Each trial is a process with CUDA initialised. Cold: no profile of the machine and no compiled kernel is kept, in caches
of its own; warm: both are, from the trial before. `beyond_s` is the first less the second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rows
import torch
from torch import nn

import weightstream

NUM_LAYERS, WIDTH = 16, 5120  # 0.8 GiB in bf16


def child(device: torch.device) -> None:
    """Two models one after the other; prints the seconds of both."""
    torch.zeros(1, device=device).sum().item()
    found = {}
    for which in ("first_s", "second_s"):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
        model = nn.Sequential(*layers).to("cpu").eval()
        budget = sum(p.nbytes for p in model.parameters()) // 2
        began = time.perf_counter()
        with weightstream.offload(model, device=device, device_budget=budget):
            found[which] = time.perf_counter() - began
    print(json.dumps(found))


def trial(device: str, caches: Path) -> dict[str, Any]:
    env = os.environ | {"XDG_CACHE_HOME": str(caches / "cache"), "TRITON_CACHE_DIR": str(caches / "triton")}
    command = [sys.executable, __file__, "--child", "--device", device]
    out = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3, help="of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "first.jsonl")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(torch.device(args.device))
        return
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(args.trials):
        with tempfile.TemporaryDirectory() as caches:
            for seconds in found.values():
                seconds.append(trial(args.device, Path(caches)))
    told = [
        {
            "bench": "first",
            "system": f"first offload, {which}",
            "trials": args.trials,
            **{name: rows.percentiles([s[name] for s in seconds]) for name in ("first_s", "second_s")},
            "beyond_s": rows.percentiles([s["first_s"] - s["second_s"] for s in seconds]),
        }
        for which, seconds in found.items()
    ]
    rows.append(args.out, told)
    for row in told:
        print(row["system"], row["beyond_s"], "s beyond", row["second_s"], flush=True)


if __name__ == "__main__":
    main()
