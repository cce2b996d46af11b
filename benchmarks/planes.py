"""Weights in two parts: the time of a product with the high part alone, of the join, and of rivals.

    python benchmarks/planes.py [--sweep product|join] [--out benchmarks/results/planes.jsonl]

The matrices of a block of Llama-3.1-8B and its head, with Gaussian weights and one token, in CUDA graphs. Each of 32
blocks has its own copy, so that no matrix is in a cache. A token is all matrices of all blocks and, except for the
join, the head. The rivals are `torch.nn.functional.linear` in bfloat16, and 4-bit weights with a scale and a zero for
each 64.

With `--sweep`, other shapes of a kernel's programs, for 2 bits of each mantissa.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rows
import timing
import torch
from rows import percentiles

BLOCK = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
BLOCK |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
HEAD = (128256, 4096)
SHOWN = ("q", "k", "gate", "down", "head")
DEPTH = 32
WARM, REPLAYS = 3, 12
SHAPES = [  # of the product: ROWS, warps of 16 TILES, PROGRAMS (0: no fewer ROWS for small matrices)
    ({"ROWS": rows, "TILES": 16 * warps, "num_warps": warps}, programs)
    for rows, warps, programs in [(4, 1, 0), (4, 1, 2048), (4, 1, 4096), (4, 2, 0), (4, 4, 0), (2, 4, 0)]
]
JOIN_SHAPES = [
    {"TILES": tiles, "num_warps": warps} for tiles, warps in [(16, 1), (32, 1), (64, 1), (32, 2), (64, 2), (64, 4)]
]

Row = dict[str, Any]
Held = tuple[Any, ...]
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A way to hold a matrix: `multiply(x, *hold(weight))` is the product with `dense(*hold(weight))`."""

    name: str
    hold: Callable[[torch.Tensor], Held]
    multiply: Callable[..., torch.Tensor]
    dense: Callable[..., torch.Tensor]


def systems() -> list[System]:
    planes, int4 = (importlib.import_module(name) for name in ("weightstream.codec.planes", "int4"))

    def product(x: torch.Tensor, high: torch.Tensor, layout: Any) -> torch.Tensor:
        found: torch.Tensor = planes.launch_draft_linear(x, high, layout)
        return found

    linear = torch.nn.functional.linear
    found = [System(name="bfloat16", hold=lambda weight: (weight,), multiply=linear, dense=lambda weight: weight)]
    for bits in (1, 2, 3):
        hold = _high_part(planes, bits)
        found.append(System(name=f"planes, m = {bits}", hold=hold, multiply=product, dense=planes.drafted))
    found.append(System(name="int4", hold=int4.quantise, multiply=int4.multiply, dense=int4.dequantise))
    return found


def _high_part(planes: Any, bits: int) -> Callable[[torch.Tensor], Held]:
    return lambda weight: planes.split(weight, bits)[::2]


def times_us(works: list[Work], device: torch.device) -> dict[str, float]:
    """Microseconds of all works one after another, in a CUDA graph."""
    if device.type != "cuda":
        started = time.perf_counter()
        for work in works:
            work()
        return percentiles([1e6 * (time.perf_counter() - started)])
    works[0]()
    timing.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    marks = []
    for _ in range(WARM + REPLAYS):
        begin = timing.mark(device)
        graph.replay()
        marks.append((begin, timing.mark(device)))
    timing.synchronize(device)
    return percentiles([1e3 * timing.between_ms(*pair) for pair in marks[WARM:]])


def nbytes_of(held: Held) -> int:
    return sum(part.nbytes for part in held if isinstance(part, torch.Tensor))


def copies(held: Held, num: int) -> list[Held]:
    """The same matrix in several places."""
    return [held] + [tuple(p.clone() if isinstance(p, torch.Tensor) else p for p in held) for _ in range(num - 1)]


def errors(weight: torch.Tensor, dense: torch.Tensor) -> Row:
    """The root mean square of the error, and its maximum, as shares of those of the weights."""
    difference, exact = dense.float() - weight.float(), weight.float()
    return {
        "rms_error": round(float(difference.norm() / exact.norm()), 5),
        "max_error": round(float(difference.abs().amax() / exact.abs().amax()), 5),
    }


def check(system: System, x: torch.Tensor, held: Held) -> None:
    expected = torch.nn.functional.linear(x.float(), system.dense(*held).float())
    difference = (system.multiply(x, *held).float() - expected).norm() / expected.norm()
    if not difference < 1e-2:
        raise SystemExit(f"{system.name}: a product differs from the plain one by {difference:.2g} of its norm")


def measure(system: System, weights: dict[str, torch.Tensor], args: argparse.Namespace) -> list[Row]:
    """A row for each shape of matrix, and one for a token."""
    held = {name: copies(system.hold(weight), 1 if name == "head" else args.depth) for name, weight in weights.items()}
    xs = {name: torch.randn(1, w.shape[1], device=args.device, dtype=w.dtype) for name, w in weights.items()}

    def works(name: str, layers: range) -> list[Work]:
        return [lambda each=each: system.multiply(xs[name], *each) for each in held[name][layers.start : layers.stop]]

    found = []
    for name in SHOWN:
        weight, one, num = weights[name], held[name][0], len(held[name])
        check(system, xs[name], one)
        us = {key: round(value / num, 2) for key, value in times_us(works(name, range(num)), args.device).items()}
        row = {
            "matrix": name,
            "shape": list(weight.shape),
            "us": us,
            "gbps": round(nbytes_of(one) / us["p50"] / 1e3, 1),
        }
        row |= {"bits_per_weight": round(8 * nbytes_of(one) / weight.numel(), 4)}
        found.append(row | errors(weight[:4096], system.dense(*one)[:4096]))
    token = [work for layer in range(args.depth) for name in BLOCK for work in works(name, range(layer, layer + 1))]
    us = times_us(token + works("head", range(1)), args.device)
    nbytes = sum(nbytes_of(each) for copies in held.values() for each in copies)
    found.append({"matrix": "token", "us": us, "gbps": round(nbytes / us["p50"] / 1e3, 1), "nbytes": nbytes})
    return [{"bench": "planes", "system": system.name} | row for row in found]


def split_block(bits: int, weights: dict[str, torch.Tensor]) -> dict[str, Held]:
    planes = importlib.import_module("weightstream.codec.planes")
    return {name: tuple(planes.split(weights[name], bits)) for name in BLOCK}


def measure_join(
    system: str, parts: dict[str, Held], weights: dict[str, torch.Tensor], args: argparse.Namespace
) -> list[Row]:
    """A row for each shape of matrix of a block, and one for a token."""
    planes = importlib.import_module("weightstream.codec.planes")
    outs = {name: torch.empty_like(weights[name]) for name in BLOCK}
    works: dict[str, list[Work]] = {
        name: [lambda each=each, out=outs[name]: planes.launch_join(*each, out) for each in copies(held, args.depth)]
        for name, held in parts.items()
    }
    nbytes = {name: nbytes_of(held) for name, held in parts.items()}
    found = []
    for name in SHOWN[:-1]:
        out = outs[name].zero_()
        us = {key: round(value / args.depth, 2) for key, value in times_us(works[name], args.device).items()}
        if not torch.equal(out.view(torch.int16), weights[name].view(torch.int16)):
            raise SystemExit(f"{system}, {name}: the joined parts are not the matrix")
        row = {"matrix": name, "shape": list(out.shape), "us": us}
        row |= {"gbps": round((nbytes[name] + out.nbytes) / us["p50"] / 1e3, 1)}
        row |= {"bits_per_weight": round(8 * nbytes[name] / out.numel(), 4)}
        found.append(row | {"low_bits_per_weight": round(8 * parts[name][1].nbytes / out.numel(), 4)})
    us = times_us([works[name][layer] for layer in range(args.depth) for name in BLOCK], args.device)
    total = args.depth * sum(nbytes[name] + out.nbytes for name, out in outs.items())
    found.append({"matrix": "token", "us": us, "gbps": round(total / us["p50"] / 1e3, 1), "nbytes": total})
    return [{"bench": "planes", "system": system} | row for row in found]


def sweep_product(weights: dict[str, torch.Tensor], args: argparse.Namespace) -> list[Row]:
    """A token for each shape of the programs."""
    kernels, system, found = importlib.import_module("weightstream.codec.plane_kernels"), systems()[2], []
    held = {id(weight): system.hold(weight) for weight in weights.values()}
    system = replace(system, hold=lambda weight: held[id(weight)])
    for shape, programs in SHAPES[:2] if args.smoke else SHAPES:
        kernels.SHAPE, kernels.PROGRAMS = shape, programs
        for row in measure(system, weights, args):
            show(row | {"system": f"{system.name}, {shape}, PROGRAMS {programs}"})
            found.append(row | {"program": shape | {"PROGRAMS": programs}, "system": f"{system.name}, swept"})
    return found


def sweep_join(weights: dict[str, torch.Tensor], args: argparse.Namespace) -> list[Row]:
    """A token for each shape of the programs."""
    kernels, parts, found = importlib.import_module("weightstream.codec.plane_kernels"), split_block(2, weights), []
    for shape in JOIN_SHAPES[:2] if args.smoke else JOIN_SHAPES:
        kernels.JOIN_SHAPE = shape
        for row in measure_join(f"join, m = 2, {shape}", parts, weights, args):
            show(row)
            found.append(row | {"program": shape, "system": "join, m = 2, swept"})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=["product", "join"], help="only the shapes of a kernel's programs")
    parser.add_argument("--smoke", action="store_true", help="tiny matrices in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "planes.jsonl")
    args = parser.parse_args()
    args.device = torch.device("cpu" if args.smoke else "cuda")
    args.depth = 2 if args.smoke else DEPTH
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    common = rows.environment()
    torch.manual_seed(time.time_ns() % 2**31)
    shapes = BLOCK if args.sweep == "join" else BLOCK | {"head": HEAD}
    if args.smoke:
        shapes = {name: (height // 4096 + 1, width // 4096 * 64) for name, (height, width) in shapes.items()}
    weights = {
        name: torch.randn(shape, device=args.device, dtype=torch.bfloat16).mul_(0.02) for name, shape in shapes.items()
    }
    if args.sweep:
        rows.append(args.out, (sweep_join if args.sweep == "join" else sweep_product)(weights, args), common)
        return
    for system in systems():
        report(measure(system, weights, args), args, common)
    for bits in (1, 2, 3):
        report(measure_join(f"join, m = {bits}", split_block(bits, weights), weights, args), args, common)


def report(found: list[Row], args: argparse.Namespace, common: Row) -> None:
    rows.append(args.out, found, common)
    for row in found:
        show(row)


def show(row: Row) -> None:
    bits, rms = row.get("bits_per_weight"), row.get("rms_error")
    print(
        f"{row['system']:14} {row['matrix']:6} {row['us']['p50']:10.1f} us {row['gbps']:8.1f} GB/s"
        + (f"  {bits:7.3f} bits" if bits is not None else "")
        + (f"  rms error {rms:.4f}, max {row['max_error']:.4f}" if rms is not None else ""),
        flush=True,
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
