"""One token through the decoder under the sources of several commits, in turns: whether a change made it slower.

    git archive 50f27ab src | tar -x --one-top-level=OLD
    python benchmarks/turns.py 50f27ab=OLD main=. [--only none,auto] [--rounds 2] [--out benchmarks/results/turns.jsonl]

Each turn is a process of its own, as a process has one version. The floor of a turn is the link's time for the bytes
that the plan streams, measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rows import RESULTS, append, environment, percentiles

GIB = 2**30
CASES: dict[str, dict[str, Any]] = {
    "none": {"device_budget": int(2.72 * GIB), "codec": "none"},
    "auto": {"device_budget": int(2.72 * GIB), "codec": "auto"},
    "small": {"device_budget": int(0.45 * GIB), "codec": "auto"},
    "large": {"device_budget": int(79.875 * GIB), "codec": "auto"},  # the 70B shape
}
SETTLING, STEPS, LONE = 8, 12, 4
TIMEOUT_S = 300


def measure(case: str, smoke: bool) -> None:
    """Print a turn: milliseconds per step, and of the host to queue one.

    It prints before `remove()`, which fails for a model that is larger than the GPU.
    """
    import coded
    import timing
    import torch
    from bench import Bench

    shape = coded.LARGE if case == "large" and not smoke else None
    args = SimpleNamespace(smoke=smoke, layers=32, out=Path(os.devnull))
    bench = Bench("turns", args, shape, floor_steps=4)  # type: ignore[arg-type]
    settings = {"device_budget": bench.ring_budget(), "codec": "none"} if smoke else CASES[case]
    with bench.streamed(**settings) as (model, streamer):
        x = torch.randn(1, 1, bench.shape.hidden, device=bench.device, dtype=torch.bfloat16)
        for _ in range(SETTLING):
            model(x)
        before = streamer.stats()
        ms = percentiles(timing.steps_ms(model, x, STEPS))
        after, queued = streamer.stats(), []
        for _ in range(LONE):
            timing.synchronize(bench.device)
            started = time.perf_counter()
            model(x)
            queued.append(1e3 * (time.perf_counter() - started))
        floor_ms = bench.floor_ms * streamer.plan.step_nbytes / bench.nbytes
        found = {
            "ms": ms,
            "step_floor_ms": round(floor_ms, 4),
            "x_step_floor": round(ms["p50"] / floor_ms, 4),
            "host_ms": percentiles(queued),
            "unplanned_fills": after.unplanned_fills - before.unplanned_fills,
            "plan": streamer.plan.summary(),
        }
        print(json.dumps(found), flush=True)


def turn(tree: Path, case: str, smoke: bool) -> dict[str, Any]:
    """The same in a process with the source of this tree; raises if that fails."""
    command = [sys.executable, __file__, "--case", case, *(["--smoke"] if smoke else [])]
    if not (source := tree.resolve() / "src" / "weightstream").is_dir():
        sys.exit(f"{source} is no folder")  # the installed version would run
    path = os.pathsep.join([str(source.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{tree}, {case}: exit status {done.returncode}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="COMMIT=FOLDER")
    parser.add_argument("--only", default="none,auto,small", help=f"of {','.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "turns.jsonl")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--case", choices=CASES, help="measure this case in this process, and print it")
    args = parser.parse_args()
    if args.case:
        measure(args.case, args.smoke)
        return
    trees = [(commit, Path(folder)) for commit, _, folder in (text.partition("=") for text in args.trees)]
    common = environment()
    for case in args.only.split(","):
        for number in range(args.rounds):
            for commit, tree in trees:
                row = {"bench": "turns", "system": case, "round": number, **turn(tree, case, args.smoke)}
                print(f"{case}, {commit}: {row['ms']['p50']:.2f} ms, {row['x_step_floor']:.4f} x the floor", flush=True)
                append(args.out, [row], common | {"commit": commit})


if __name__ == "__main__":
    main()
