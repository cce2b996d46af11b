"""Packed experts: the time to pick and unpack the rows of a token, by the kernels and by the libraries' functions.

    python benchmarks/unpack.py [--sweep mxfp4|float8|int4] [--out benchmarks/results/unpack.jsonl]

The rows of each stack of a layer, with random bytes, in slots of a cache, in CUDA graphs. The functions run eager, as
that of mxfp4 cannot be captured; a function that is not installed is left out. "copy" picks rows that were unpacked
before, as plain models do. The bits of each matrix are compared.

"layer": both stacks, as a forward reads them: unpacked by one launch, by one each, or copied; and the same with the
products of a row with each matrix, which read what caches still hold. Turns name other rows, so that no cache holds
what is read next. The share is that of the time of "copy". Both launches write the same bits.

With `--sweep`, other shapes of a kernel's programs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import rows
import timing
import torch
from rows import percentiles

WARM, REPLAYS = 3, 30
NUM_SLOTS = 16
PAD_NBYTES = 512  # between the rows of a leaf, as other leaves are in a slot

Row = dict[str, Any]
Leaves = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Packed stacks of a layer: (outputs, inputs) of a matrix of each, and how many rows a token has. `block`: outputs
    and inputs with one scale."""

    format: str
    matrices: tuple[tuple[int, int], ...]
    num_rows: int
    block: tuple[int, int]
    scales: torch.dtype


MODELS = {
    "gpt-oss": Model(
        format="mxfp4", matrices=((5760, 2880), (2880, 2880)), num_rows=4, block=(1, 32), scales=torch.uint8
    ),
    "DeepSeek-V3": Model(
        format="float8", matrices=((4096, 7168), (7168, 2048)), num_rows=8, block=(128, 128), scales=torch.float32
    ),
    "Qwen3-30B-A3B": Model(
        format="float8", matrices=((1536, 2048), (2048, 768)), num_rows=8, block=(128, 128), scales=torch.float32
    ),
    "GLM-4.6": Model(
        format="float8", matrices=((3072, 5120), (5120, 1536)), num_rows=8, block=(1, 0), scales=torch.bfloat16
    ),
    "Kimi-K2": Model(
        format="int4", matrices=((4096, 7168), (7168, 2048)), num_rows=8, block=(1, 32), scales=torch.bfloat16
    ),
}
SHAPES: dict[str, list[dict[str, int]]] = {
    "mxfp4": [
        {"TILES": tiles, "GROUPS": groups, "num_warps": tiles * groups // 32}
        for tiles, groups in [(8, 4), (4, 8), (16, 2), (16, 4), (8, 8), (32, 4), (16, 8), (64, 4), (32, 8)]
    ],
    "float8": [
        {"ROWS": rows, "WORDS": words, "STEPS": steps, "num_warps": rows * words // 32}
        for rows, words, steps in [(2, 64, 8), (1, 128, 8), (4, 32, 8), (2, 64, 4), (2, 64, 16), (1, 64, 8), (4, 64, 4)]
    ],
}
SHAPES["int4"] = SHAPES["float8"]
# the registers of a thread with which most programs run at a time: Triton 3.6 takes 72 on sm_90
SHAPES["mxfp4"] += [shape | {"maxnreg": 64} for shape in SHAPES["mxfp4"][:2]]


def random_bytes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def in_slots(leaf: torch.Tensor) -> torch.Tensor:
    """The rows of a leaf, apart."""
    nbytes, size = leaf[0].nbytes, leaf.element_size()
    memory = torch.zeros(len(leaf), (nbytes + 15) // 16 * 16 + PAD_NBYTES, dtype=torch.uint8, device=leaf.device)
    memory[:, :nbytes] = leaf.view(torch.uint8).view(len(leaf), -1)
    strides = (memory.stride(0) // size, *leaf.stride()[1:])
    return torch.as_strided(memory.view(-1)[: memory.numel() // size * size].view(leaf.dtype), leaf.shape, strides)


def leaves_of(model: Model, matrix: tuple[int, int], num_slots: int, device: torch.device) -> Leaves:
    outputs, inputs = matrix
    height, width = model.block
    grid = (num_slots, -(-outputs // height), -(-inputs // width) if width else 1)
    if model.format == "mxfp4":
        scales = torch.randint(110, 130, grid, device=device).to(torch.uint8)
        return in_slots(random_bytes((num_slots, outputs, inputs // 32, 16), device)), in_slots(scales)
    scales = in_slots((0.01 * torch.randn(grid, device=device)).to(model.scales))
    if model.format == "int4":
        return in_slots(random_bytes((num_slots, outputs, inputs // 2), device).view(torch.int32)), scales
    weight = random_bytes((num_slots, outputs, inputs), device) & 0xBF  # no NaN
    return in_slots(weight.view(torch.float8_e4m3fn)), scales


def matrix_shape(model: Model, matrix: tuple[int, int]) -> tuple[int, int]:
    return matrix[::-1] if model.format == "mxfp4" else matrix


def library(model: Model) -> Callable[..., torch.Tensor] | None:
    """The library's function for rows that are picked, or None if it is not installed."""
    try:
        if model.format == "mxfp4":
            convert = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
            return lambda blocks, scales: convert(blocks, scales, dtype=torch.bfloat16)
        if model.format == "float8":
            one = importlib.import_module("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
            return lambda weight, scales: one._dequantize_one(weight, scales, torch.bfloat16)
        return compressed_tensors(model)
    except ImportError:
        return None


def compressed_tensors(model: Model) -> Callable[..., torch.Tensor]:
    quantization = importlib.import_module("compressed_tensors.quantization")
    compressors = importlib.import_module("compressed_tensors.compressors")
    args = quantization.QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")

    def unpack(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((packed.shape[1], 8 * packed.shape[2]))
        stored = [
            {"weight_packed": p, "weight_scale": s, "weight_shape": shape} for p, s in zip(packed, scales, strict=True)
        ]
        return torch.stack([compressor.decompress(each, scheme)["weight"] for each in stored])

    return unpack


def pick(leaf: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows by index, which float8 has not on all versions."""
    words = leaf.view(torch.uint8) if leaf.dtype == torch.float8_e4m3fn else leaf
    return words[ids].view(leaf.dtype)


def by_function(function: Callable[..., torch.Tensor], leaves: Leaves, ids: torch.Tensor) -> torch.Tensor:
    return function(*(pick(leaf, ids) for leaf in leaves))


def times_us(work: Callable[[], object], device: torch.device, *, capture: bool) -> dict[str, float]:
    work()
    timing.synchronize(device)
    replay = work
    if capture and device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay = graph.replay
    marks = []
    for _ in range(WARM + (REPLAYS if device.type == "cuda" else 1)):
        begin = timing.mark(device)
        replay()
        marks.append((begin, timing.mark(device)))
    timing.synchronize(device)
    return percentiles([1e3 * timing.between_ms(*pair) for pair in marks[WARM:]])


def measure(name: str, model: Model, args: argparse.Namespace) -> list[Row]:
    """Rows for each stack: of the kernel, the function, and the copy."""
    unpacking, found = importlib.import_module("weightstream.codec.unpacking"), []
    for matrix in model.matrices:
        leaves = leaves_of(model, matrix, args.slots, args.device)
        ids = torch.randperm(args.slots, device=args.device)[: model.num_rows]
        out = torch.empty(len(ids), *matrix_shape(model, matrix), dtype=torch.bfloat16, device=args.device)
        kernel = partial(unpacking.unpack_rows_into, model.format, (), leaves, ids, out)
        works: dict[str, tuple[Callable[[], object], bool]] = {"kernel": (kernel, True)}
        function = library(model)
        if function is not None:
            expected = by_function(function, leaves, ids)
            kernel()
            if not torch.equal(out.view(torch.int16), expected.view(torch.int16)):
                raise SystemExit(f"{name}, {matrix}: the kernel's bits are not those of the library")
            works["function"] = (partial(by_function, function, leaves, ids), False)
        dense = torch.zeros(args.slots, *out.shape[1:], dtype=torch.bfloat16, device=args.device)
        works["copy"] = (partial(torch.index_select, dense, 0, ids, out=out), True)
        packed_nbytes = sum(leaf[0].nbytes for leaf in leaves) * len(ids)
        for system, (work, capture) in works.items():
            us = times_us(work, args.device, capture=capture)
            read = out.nbytes if system == "copy" else packed_nbytes
            row = {"bench": "unpack", "system": system, "model": name, "format": model.format, "matrix": list(matrix)}
            row |= {"rows": len(ids), "us": us, "written_tbps": round(out.nbytes / us["p50"] / 1e6, 3)}
            found.append(row | {"gbps": round((out.nbytes + read) / us["p50"] / 1e3, 1), "captured": capture})
    return found


class Layer:
    """Both stacks of a layer: packed, unpacked, and memory for the rows of a token, whose ids differ in each turn."""

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        self._unpacking = importlib.import_module("weightstream.codec.unpacking")
        self._is_transposed = model.format == "mxfp4"
        self._format, device, num = model.format, args.device, model.num_rows
        shapes = [matrix_shape(model, matrix) for matrix in model.matrices]
        new = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.stacks = [leaves_of(model, matrix, args.slots, device) for matrix in model.matrices]
        self.dense = [new(args.slots, *shape) for shape in shapes]
        self.outs = [torch.empty(num, *shape, dtype=torch.bfloat16, device=device) for shape in shapes]
        self.states = [
            new(num, 1, inputs) if self._is_transposed else new(num, inputs, 1) for _, inputs in model.matrices
        ]
        self.turns = list(torch.randperm(args.slots, device=device)[: args.slots // num * num].view(-1, num))

    @property
    def written_nbytes(self) -> int:
        return sum(out.nbytes for out in self.outs)

    @property
    def packed_nbytes(self) -> int:
        return sum(leaf[0].nbytes for leaves in self.stacks for leaf in leaves) * len(self.turns[0])

    def one_launch(self, ids: torch.Tensor, multiply: Callable[[int], object]) -> None:
        """The stack that is multiplied first is unpacked last, as in a forward."""
        self._unpacking.unpack_stacks_into(self._format, (), self.stacks[::-1], ids, self.outs[::-1])
        for index in range(len(self.outs)):
            multiply(index)

    def two_launches(self, ids: torch.Tensor, multiply: Callable[[int], object]) -> None:
        for index, (leaves, out) in enumerate(zip(self.stacks, self.outs, strict=True)):
            self._unpacking.unpack_rows_into(self._format, (), leaves, ids, out)
            multiply(index)

    def copy(self, ids: torch.Tensor, multiply: Callable[[int], object]) -> None:
        for index, (dense, out) in enumerate(zip(self.dense, self.outs, strict=True)):
            torch.ops.aten.index.Tensor_out(dense, [ids], out=out)  # as `dense[ids]`
            multiply(index)

    def product(self, index: int) -> None:
        out, states = self.outs[index], self.states[index]
        torch.bmm(states, out) if self._is_transposed else torch.bmm(out, states)

    def each_turn(self, way: Callable[..., None], multiply: Callable[[int], object]) -> None:
        for ids in self.turns:
            way(ids, multiply)

    def check(self, name: str) -> None:
        """Raise an error unless one launch writes the bits of two."""
        found = []
        for way in (self.one_launch, self.two_launches):
            for out in self.outs:
                out.fill_(float("nan"))
            way(self.turns[0], lambda _: None)
            found.append([out.view(torch.int16).clone() for out in self.outs])
        if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
            raise SystemExit(f"{name}: one launch for both stacks has other bits than two")


def measure_layer(name: str, model: Model, args: argparse.Namespace) -> list[Row]:
    """Rows for both stacks, without products and with them."""
    layer, found = Layer(model, args), []
    layer.check(name)
    ways = {"one launch": layer.one_launch, "two launches": layer.two_launches, "copy": layer.copy}
    for products in (False, True):
        rows_of_ways = []
        for system, way in ways.items():
            work = partial(layer.each_turn, way, layer.product if products else lambda _: None)
            us = {key: value / len(layer.turns) for key, value in times_us(work, args.device, capture=True).items()}
            read = layer.written_nbytes if system == "copy" else layer.packed_nbytes
            row = {"bench": "unpack", "system": system, "model": name, "format": model.format, "matrix": "layer"}
            row |= {"rows": model.num_rows, "us": us, "written_tbps": round(layer.written_nbytes / us["p50"] / 1e6, 3)}
            row |= {"gbps": round((layer.written_nbytes + read) / us["p50"] / 1e3, 1), "captured": True}
            rows_of_ways.append(row | {"products": products})
        copy_us = rows_of_ways[-1]["us"]["p50"]
        found += [row | {"share_of_copy": round(row["us"]["p50"] / copy_us, 3)} for row in rows_of_ways]
    return found


def sweep(args: argparse.Namespace) -> list[Row]:
    """The kernel's rows of each shape of its programs."""
    kernels = importlib.import_module("weightstream.codec.unpack_kernels")
    found = []
    for shape in SHAPES[args.sweep][:2] if args.smoke else SHAPES[args.sweep]:
        setattr(kernels, "MXFP4_SHAPE" if args.sweep == "mxfp4" else "UNPACK_SHAPE", shape)
        for name, model in args.models.items():
            if model.format == args.sweep:
                measured = (*measure(name, model, args), *measure_layer(name, model, args))
                swept = [row | {"program": shape} for row in measured if row["system"] in ("kernel", "one launch")]
                report(swept)
                found += swept
    return found


def report(found: list[Row]) -> None:
    for row in found:
        products = " and products" if row.get("products") else ""
        share = f" {row['share_of_copy']:6.3f} of copy" if "share_of_copy" in row else ""
        print(
            f"{row['model']:14} {row['matrix']!s:13} {row['system'] + products:25} {row['us']['p50']:9.1f} us"
            f" {row['written_tbps']:7.3f} TB/s written{share} {row.get('program', '')}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=list(SHAPES), help="only the shapes of a kernel's programs")
    parser.add_argument("--smoke", action="store_true", help="tiny matrices in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "unpack.jsonl")
    args = parser.parse_args()
    args.device = torch.device("cpu" if args.smoke else "cuda")
    args.slots, args.models = NUM_SLOTS, MODELS
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        args.slots = 3
        tiny = {"matrices": ((32, 64), (64, 32)), "num_rows": 1}
        args.models = {
            name: replace(model, **tiny) for name, model in MODELS.items() if name in ("gpt-oss", "GLM-4.6", "Kimi-K2")
        }
    torch.manual_seed(time.time_ns() % 2**31)
    common = rows.environment()
    if args.sweep:
        rows.append(args.out, sweep(args), common)
        return
    for name, model in args.models.items():
        found = [*measure(name, model, args), *measure_layer(name, model, args)]
        rows.append(args.out, found, common)
        report(found)


if __name__ == "__main__":
    with torch.no_grad():
        main()
