"""The codec alone: bits per weight, and the rates at which a GPU decodes and encodes, compared with a plain copy.

    python benchmarks/codec.py [--only gaussian,casts,trained] [--trained FILE] [--out benchmarks/results/codec.jsonl]

Gaussian weights in the shapes of a block of Llama-3.1-8B; the same as float16 and float8; and, with `--trained`, the
weights in a safetensors file. Three sets take turns, so that none is in a cache. Decoded weights are compared bit for
bit.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows
import timing
import torch
from rows import percentiles

from weightstream.codec import reference
from weightstream.codec.format import ELEMENTS, Layout

SHAPES = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
SETS = 3
CASTS = ("float16", "float8_e4m3fn")
LARGEST = 448.0  # of float8_e4m3fn: tensors are scaled to this maximum
TRAINED_NBYTES = 400 << 20  # per set, by repetition: more than any cache
WARM, REFERENCES, ENCODES = 3, 3, 8

Row = dict[str, Any]
Weights = dict[str, torch.Tensor]  # flat bytes
Coded = dict[str, tuple[Layout, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Sets of weights of one dtype, alike in shape; `num_copies` of each are decoded at once, in as many places."""

    name: str
    dtype: str
    sets: tuple[Weights, ...]
    num_copies: int = 1

    @property
    def count(self) -> int:
        return sum(w.numel() for w in self.sets[0].values()) // ELEMENTS[self.dtype].nbytes


def gaussian(args: argparse.Namespace) -> Iterator[Material]:
    yield _gaussian(args, "bfloat16")


def casts(args: argparse.Namespace) -> Iterator[Material]:
    yield from (_gaussian(args, dtype) for dtype in CASTS)


def trained(args: argparse.Namespace) -> Iterator[Material]:
    """All matrices of the file, by dtype."""
    if args.trained is None:
        return
    from safetensors.torch import load_file

    found: dict[str, Weights] = {}
    for name, tensor in load_file(args.trained, device=str(args.device)).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype in ELEMENTS and tensor.dim() > 1:
            found.setdefault(dtype, {})[name] = tensor.contiguous().view(torch.uint8).view(-1)
    for dtype, weights in found.items():
        wanted = 1 << 16 if args.smoke else TRAINED_NBYTES
        num = max(1, -(-wanted // sum(w.numel() for w in weights.values())))
        yield Material(name=args.trained.stem, dtype=dtype, sets=(weights,) * SETS, num_copies=num)


GROUPS: dict[str, Callable[[argparse.Namespace], Iterator[Material]]] = {
    "gaussian": gaussian,
    "casts": casts,
    "trained": trained,
}


def _gaussian(args: argparse.Namespace, dtype: str) -> Material:
    shapes = tuple((n // 256, m // 64) for n, m in SHAPES) if args.smoke else SHAPES
    sets = []
    for _ in range(SETS):
        drawn = {f"{i}": torch.randn(shape, device=args.device).mul_(0.02) for i, shape in enumerate(shapes)}
        sets.append({name: _cast(values, dtype).view(torch.uint8).view(-1) for name, values in drawn.items()})
    return Material(name="Gaussian", dtype=dtype, sets=tuple(sets))


def _cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype == "float8_e4m3fn":
        values = values * (LARGEST / values.abs().amax())
    return values.to(getattr(torch, dtype))


class Sets:
    """The sets of a material, compressed, and the decoding of each into targets that all share."""

    def __init__(self, material: Material, codec: Any) -> None:
        self.material = material
        self.coded = [
            {name: codec.encode(data, material.dtype) for name, data in weights.items()} for weights in material.sets
        ]
        first = material.sets[0]
        self.outs = [{name: torch.empty_like(data) for name, data in first.items()} for _ in range(material.num_copies)]
        self._decodings = [self._decoding(coded, codec) for coded in self.coded]

    def _decoding(self, coded: Coded, codec: Any) -> Any:
        parts: list[Any] = []
        for index, outs in enumerate(self.outs):
            for name, (layout, data) in coded.items():
                parts.append((data.clone() if index else data, layout, outs[name]))
        return codec.Decoding(parts)

    def decode(self, index: int) -> None:
        self._decodings[index % SETS]()

    def decode_in_torch(self, index: int) -> None:
        for name, (layout, data) in self.coded[index % SETS].items():
            reference.decode(data, layout, self.outs[0][name])

    def equal(self, decode: Callable[[int], None], *, num_copies: int) -> bool:
        """Whether every set comes back bit for bit, into memory that held other bytes."""
        for index, weights in enumerate(self.material.sets):
            for outs in self.outs[:num_copies]:
                for out in outs.values():
                    out.fill_(0xA5)
            decode(index)
            if not all(torch.equal(outs[n], data) for outs in self.outs[:num_copies] for n, data in weights.items()):
                return False
        return True


def measure(material: Material, codec: Any, args: argparse.Namespace) -> Row:
    """The row of one material."""
    sets = Sets(material, codec)
    equal = sets.equal(sets.decode, num_copies=material.num_copies) and sets.equal(sets.decode_in_torch, num_copies=1)
    if not equal:
        raise SystemExit(f"{material.name}, {material.dtype}: decoded weights differ from what was encoded")
    once, num = sum(data.numel() for data in material.sets[0].values()), 3 if args.smoke else args.steps
    nbytes = once * material.num_copies
    ms = percentiles(laps_ms(sets.decode, num, args.device))
    copy_ms = percentiles(copies_ms(nbytes, num, args.device))
    reference_ms = statistics.median(laps_ms(sets.decode_in_torch, REFERENCES, args.device))
    encode_ms = encodes_ms(material, codec, args.device)
    sizes = {name: layout.nbytes for name, (layout, _) in sets.coded[0].items()}
    return {
        "bench": "codec",
        "system": f"{material.name}, {material.dtype}",
        "weights": material.name,
        "dtype": material.dtype,
        "count": material.count,
        "bits_per_weight": round(8 * sum(sizes.values()) / material.count, 4),
        "tensor_bits": _tensor_bits(material, sizes) if material.num_copies > 1 else None,
        "nbytes": nbytes,
        "ms": ms,
        "decode_tbps": _rates(nbytes, ms, 1e9),
        "copy_ms": copy_ms,
        "copy_tbps": round(nbytes / copy_ms["p50"] / 1e9, 4),
        "x_copy": round(ms["p50"] / copy_ms["p50"], 4),
        "encode_gbps": _rates(once, encode_ms, 1e6),
        "reference_tbps": round(once / reference_ms / 1e9, 4),
        "equal": equal,
    }


def _tensor_bits(material: Material, sizes: dict[str, int]) -> dict[str, float]:
    width = 8 * ELEMENTS[material.dtype].nbytes
    return {name: round(width * sizes[name] / data.numel(), 4) for name, data in material.sets[0].items()}


def _rates(nbytes: int, ms: dict[str, float], unit: float) -> dict[str, float]:
    """Percentiles of bytes over time, the slowest first."""
    return {p: round(nbytes / ms[q] / unit, 4) for p, q in (("p20", "p80"), ("p50", "p50"), ("p80", "p20"))}


def laps_ms(run: Callable[[int], object], num: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `num` runs, queued back to back, so that the previous run hides a launch."""
    marks = []
    for index in range(num + WARM):
        begin = timing.mark(device)
        run(index)
        marks.append((begin, timing.mark(device)))
    timing.synchronize(device)
    return [timing.between_ms(*pair) for pair in marks[WARM:]]


def copies_ms(nbytes: int, num: int, device: torch.device) -> list[float]:
    """The floor: as many bytes from device memory to device memory, in one copy."""
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1) for _ in range(2))
    return laps_ms(lambda _: target.copy_(source), num, device)


def encodes_ms(material: Material, codec: Any, device: torch.device) -> dict[str, float]:
    """Milliseconds of a whole set, in wall-clock time: encoding waits for the count of escapes."""
    found = []
    for index in range(2 + ENCODES):
        timing.synchronize(device)
        started = time.perf_counter()
        for data in material.sets[index % SETS].values():
            codec.encode(data, material.dtype)
        timing.synchronize(device)
        found.append(1e3 * (time.perf_counter() - started))
    return percentiles(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--trained", type=Path, help="safetensors with trained weights")
    parser.add_argument("--steps", type=int, default=40, help="timed decodings of each kind, at least 20")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny tensors in Triton's interpreter, to check that it runs"
    )
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "codec.jsonl")
    args = parser.parse_args()
    args.steps, args.device = max(20, args.steps), torch.device("cpu" if args.smoke else "cuda")
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    codec, common = importlib.import_module("weightstream.codec.triton_codec"), rows.environment()
    torch.manual_seed(time.time_ns() % 2**31)
    for group in (group for group in GROUPS if group in args.only.split(",")):
        for material in GROUPS[group](args):
            row = measure(material, codec, args)
            rows.append(args.out, [row], common)
            show(row)


def show(row: Row) -> None:
    print(
        f"{row['system']:48} {row['bits_per_weight']:7.3f} bits  decode {row['decode_tbps']['p50']:.3f} TB/s, "
        f"in torch {row['reference_tbps']:.3f}  copy {row['copy_tbps']:.3f} (x {row['x_copy']:.2f})  "
        f"encode {row['encode_gbps']['p50']:.1f} GB/s  equal {row['equal']}",
        flush=True,
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
