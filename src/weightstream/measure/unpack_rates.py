"""Rates of unpacking: the rows of a token of both stacks of a layer, picked and unpacked by the launch of a forward.

Leaves are random bytes, as a kernel takes equally long for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from weightstream.codec import unpacking
from weightstream.measure.kernels import replayed
from weightstream.plan.manifest import unpack_rate
from weightstream.runtime.devices.backend import Backend

_DTYPE = torch.bfloat16
_TURNS = 2  # sets of rows that are unpacked alternately, so that no cache holds those that are unpacked next
_GROUP, _BLOCK = 32, 128  # weights with one scale


class ExpertLayer(NamedTuple):
    """Stacks of matrices (outputs, inputs), and the rows that a token picks of each."""

    matrices: tuple[tuple[int, int], tuple[int, int]]
    num_rows: int

    @property
    def nbytes(self) -> int:
        """Bytes that a token unpacks."""
        return _DTYPE.itemsize * self.num_rows * sum(outputs * inputs for outputs, inputs in self.matrices)


LAYERS: tuple[ExpertLayer, ...] = (
    ExpertLayer(((1536, 2048), (2048, 768)), 8),  # of Qwen3-30B-A3B: 75 MB
    ExpertLayer(((3072, 5120), (5120, 1536)), 4),  # of GLM-4.6, half of a token's: 189 MB
)


def unpack_works(
    backend: Backend, kernels: Collection[str], layers: Sequence[ExpertLayer], random: torch.Generator
) -> dict[str, Callable[[], object]]:
    """A work for each of these kernels and layers, in this order, by name."""
    most = max(layer.nbytes for layer in layers)
    memory = torch.empty(most, dtype=torch.uint8, device=backend.device)  # all unpack to the same memory
    works: dict[str, Callable[[], object]] = {}
    for kernel in kernels:
        for layer in layers:
            work = _work(kernel, layer, memory, random)
            works[f"{kernel}, {layer.nbytes}"] = replayed(backend, work) if backend.device.type == "cuda" else work
    return works


def unpack_fields(seconds: Mapping[str, float], layers: Sequence[ExpertLayer], op_s: float) -> dict[str, float]:
    """Fields of a profile from the seconds of each work of `unpack_works`, less the fixed time of a kernel."""
    nbytes, by_kernel = sum(layer.nbytes for layer in layers), dict[str, float]()
    for name, work_s in seconds.items():
        kernel = name.partition(",")[0]
        by_kernel[kernel] = by_kernel.get(kernel, 0.0) + max(work_s / 2, work_s - _TURNS * op_s) / _TURNS
    return {unpack_rate(kernel): nbytes / all_s for kernel, all_s in by_kernel.items()}


def _work(kernel: str, layer: ExpertLayer, memory: torch.Tensor, random: torch.Generator) -> Callable[[], object]:
    device, num = memory.device, _TURNS * layer.num_rows
    outs, begin = [], 0
    for outputs, inputs in layer.matrices:
        shape = (layer.num_rows, inputs, outputs) if kernel == "mxfp4" else (layer.num_rows, outputs, inputs)
        end = begin + _DTYPE.itemsize * layer.num_rows * outputs * inputs
        outs.append(memory[begin:end].view(_DTYPE).view(shape))
        begin = end
    stacks = [_leaves(kernel, num, *matrix, random) for matrix in layer.matrices]
    turns = [torch.arange(turn, num, _TURNS, device=device) for turn in range(_TURNS)]
    return partial(_unpack_each, kernel, stacks, turns, outs)


def _unpack_each(
    kernel: str, stacks: Sequence[unpacking.Leaves], turns: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> None:
    for rows in turns:
        unpacking.unpack_stacks_into(kernel, (), stacks, rows, outs)


def _leaves(kernel: str, num: int, outputs: int, inputs: int, random: torch.Generator) -> unpacking.Leaves:
    """Random packed matrices: of block float8 with scales in float32, of int4 in bfloat16."""

    def filled(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        size = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=random, device=random.device).view(dtype)

    if kernel == "mxfp4":
        groups = inputs // _GROUP
        return filled(num, outputs, groups, 16), filled(num, outputs, groups)
    if kernel == "int4":
        scales = filled(num, outputs, inputs // _GROUP, dtype=torch.bfloat16)
        return filled(num, outputs, inputs // 8, dtype=torch.int32), scales
    scales = filled(num, -(-outputs // _BLOCK), -(-inputs // _BLOCK), dtype=torch.float32)
    return filled(num, outputs, inputs, dtype=torch.float8_e4m3fn), scales
