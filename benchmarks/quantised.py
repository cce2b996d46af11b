"""Quantised weights, all layers offloaded: an 8B shape in each format, one token, eager and in a CUDA graph.

    python benchmarks/quantised.py [--only "bnb nf4,…"] [--seconds 2] [--out benchmarks/results/quantised.jsonl]

The link floor of a format is for its own bytes, in copies of one layer back to back. Every output is compared with that
of the same quantised model, resident on the GPU. Models that compressed-tensors unpacks to bf16 are also offloaded
unpacked. The formats are those of the tests (tests/quantised/formats.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import timing
import torch
from bench import GIB, Bench, Case
from bench import show as show_rows
from rows import RESULTS, percentiles
from systems import graphed

import weightstream

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "quantised")]

import formats  # noqa: E402

SYSTEMS = (
    "bnb nf4",
    "bnb int8 whole",
    "torchao int8",
    "torchao float8 dynamic",
    "gguf q4_k",
    "gguf q8_0",
    "compressed w4a16",
    "compressed fp8",
)
UNCAPTURED = (
    "gguf q4_k",
    "compressed fp8",
)  # nor when resident: their libraries make tensors from numbers
GPU_ONLY = ("torchao float8 dynamic", "gguf q4_k")  # the tiny model has too few columns for the latter
RING = {"offload_group_size": 1, "offload_prefetch_step": 2}
MOST = {"bnb nf4": (1.03, 0.4)}  # times the link floor of its bytes; GiB of the device
MOST_OF_UNPACKED = {"compressed w4a16": 0.30}  # of a step's time


def measure(bench: Bench, name: str) -> None:
    form = formats.ON_GPUS[name]

    def model() -> Any:
        return form.quantise(bench.model().to(form.dtype if form.dtype is torch.float16 else torch.bfloat16))

    plain = model()
    held = formats.held_nbytes(plain)
    x = [torch.randn(1, 1, bench.shape.hidden, device=bench.device, dtype=plain.norm.weight.dtype) for _ in range(3)]
    want = [plain(value) for value in x]
    case = Case(tokens=1, x=tuple(v.cpu() for v in x), want=tuple(w.cpu() for w in want), resident_ms=0.0)
    bench.measure(f"resident, {name}", plain, case)
    if name.startswith("compressed"):  # the library has unpacked it
        offloaded(bench, f"{name}, unpacked by its library", plain, case)
    unpacked_ms = last_ms(bench)  # the resident model's for a library that does not unpack: not in a row
    del plain
    bench.fresh()
    floor = percentiles(timing.floor_ms(bench.shape.layers, held // bench.shape.layers, bench.device))
    bench.add(f"link floor, {name}", ms=floor, nbytes=held, gbps=round(held / floor["p50"] / 1e6, 2))
    bench.fresh()
    offloaded(bench, name, model(), case, held_nbytes=held, floor_ms=floor["p50"])
    tell(bench, name, floor["p50"], unpacked_ms)


def offloaded(bench: Bench, name: str, model: Any, case: Case, **facts: Any) -> None:
    with weightstream.offload(model, device=bench.device, codec="none", **RING) as streamer:
        fields: dict[str, Any] = {"streamer": streamer, "settings": RING, **facts}
        bench.measure(f"weightstream, {name}, eager", model, case, **fields)
        if bench.device.type == "cuda" and name.partition(",")[0] not in UNCAPTURED:
            with graphed(model, case.x[0].to(bench.device), streamer) as run:
                bench.measure(f"weightstream, {name}, CUDA graph", run, case, **fields)


def last_ms(bench: Bench) -> float:
    return float(bench.rows[-1]["ms"]["p50"])


def tell(bench: Bench, name: str, floor_ms: float, unpacked_ms: float) -> None:
    row = bench.rows[-1]
    taken = row["taken_nbytes"] / GIB
    line = f"  {name}: {last_ms(bench) / floor_ms:.3f} x its link floor, {taken:.3f} GiB of the device at its peak"
    if name in MOST:
        line += f" (at most {MOST[name][0]} and {MOST[name][1]})"
    if name in MOST_OF_UNPACKED:
        line += f"; {last_ms(bench) / unpacked_ms:.3f} x unpacked (at most {MOST_OF_UNPACKED[name]})"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SYSTEMS), help="names in tests/quantised/formats.py")
    parser.add_argument("--seconds", type=float, default=2, help="seconds to time a system, for at least 5 steps")
    parser.add_argument("--steps", type=int, default=100, help="most steps to time of a system")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, to check that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "quantised.jsonl")
    args = parser.parse_args()
    with torch.no_grad():
        bench = Bench("quantised", args)
        ours = [name for name in args.only.split(",") if not (args.smoke and name in GPU_ONLY)]
        for name in ours:
            with bench.guarded(f"weightstream, {name}"):
                measure(bench, name)
        show_rows(bench.rows)


if __name__ == "__main__":
    main()
