"""Kernels: device times of small kernels, of reading weights, and of matrices that are picked out of a stack.

On a GPU the works are replayed from graphs, which leaves out host time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend, Graph

NUM_NORMS, NUM_IN_NORM, NUM_PRODUCTS = 25, 8, 50  # [H200: 1.45 us a kernel, 1.0 if elementwise; a product 4.8]
_WIDTH, _OUT_WIDTH, _OUT_WIDTH_ON_CPU = 2048, 512, 64  # of a product whose bytes do not count
TURNS = 2  # sets of matrices that are copied alternately, so that no cache holds those that are copied next
_Work = Callable[[], object]


class PickedMatrices(NamedTuple):
    """Matrices of bfloat16 that are picked out of a stack, such as the experts of a token."""

    num: int
    num_rows: int
    width: int

    @property
    def nbytes(self) -> int:
        return 2 * self.num * self.num_rows * self.width


SMALL_EXPERTS = PickedMatrices(8, 1536, 2048)  # of Qwen3-30B-A3B: 50 MB
LARGE_EXPERTS = PickedMatrices(2, 7168, 4096)  # 117 MB


def kernel_works(backend: Backend, weights: Sequence[torch.Tensor]) -> dict[str, _Work]:
    """Named works to be timed: kernels of norms, as most small kernels of a model are; products of a row with small
    matrices and with `weights`; and, on a GPU, products with matrices picked out of a stack."""
    num = _OUT_WIDTH_ON_CPU if backend.device.type == "cpu" else _OUT_WIDTH
    row, small = (torch.ones(n, _WIDTH, device=backend.device, dtype=torch.bfloat16) for n in (1, num))

    def norms() -> None:
        x = row
        for _ in range(NUM_NORMS):
            x = _norm(x, small[0])

    def products() -> None:
        for _ in range(NUM_PRODUCTS):
            F.linear(row, small)

    works: dict[str, _Work] = {"norms": norms, "products": products, "read": partial(read_products, weights)}
    if backend.device.type == "cuda":
        works |= picked_products(weights[0], weights[-1])
        works = {name: replayed(backend, work) for name, work in works.items()}
    return works


def read_products(weights: Sequence[torch.Tensor]) -> None:
    """Products of a row with each of these weights."""
    for weight in weights:
        F.linear(weights[0][:1], weight)


def _norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In single kernels, as transformers does it: casts and means take longer than elementwise sums."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scale * y.to(x.dtype)


def picked_products(weight: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[str, _Work]]:
    """Yield works that copy matrices out of `weight`, viewed as a stack, into `other`, and works that also multiply by
    the copies.

    As in a model, the copies are in the device's caches when they are multiplied. Their sources are not, as each turn
    picks other matrices.
    """
    flat, copies = weight.view(-1), other.view(-1)
    for name, (num, rows, width) in (("small", SMALL_EXPERTS), ("large", LARGE_EXPERTS)):
        stack = flat[: flat.numel() // (rows * width) * rows * width].view(-1, rows, width)
        places = torch.arange(num, device=weight.device) * (len(stack) // num)
        picked = copies[: num * rows * width].view(num, rows, width)
        columns = flat[: num * width].view(num, width, 1)
        ids = [(places + turn) % len(stack) for turn in range(TURNS)]
        turns = [partial(torch.ops.aten.index.Tensor_out, stack, [each], out=picked) for each in ids]
        yield name, partial(_run, turns)
        yield f"{name} multiplied", partial(_run, turns, partial(torch.bmm, picked, columns))


def _run(works: Sequence[_Work], after_each: _Work = lambda: None) -> None:
    for work in works:
        work()
        after_each()


def kernel_fields(seconds: Mapping[str, float], read_nbytes: int, num_reads: int) -> dict[str, float]:
    """Fields of a profile from the seconds of each work of `kernel_works`."""
    op_s = seconds["norms"] / (NUM_NORMS * NUM_IN_NORM)
    bytes_per_s = read_nbytes / max(seconds["read"] / 2, seconds["read"] - num_reads * op_s)
    fields = {"op_s": op_s, "product_s": seconds["products"] / NUM_PRODUCTS, "device_bytes_per_s": bytes_per_s}
    if "small" not in seconds:
        return fields
    small_nbytes, large_nbytes = SMALL_EXPERTS.nbytes, LARGE_EXPERTS.nbytes
    copies_s = (seconds["small"] + seconds["large"]) / TURNS - 2 * op_s
    small_s, large_s = ((seconds[f"{name} multiplied"] - seconds[name]) / TURNS for name in ("small", "large"))
    # Seconds are `stack_s` plus bytes times `per_byte_s`: a line through the small and the large size. A byte takes at
    # least as long as in weights that are not picked.
    per_byte_s = max(1 / bytes_per_s, (large_s - small_s) / (large_nbytes - small_nbytes))
    fields |= {"gather_share": min(1.0, 2 * (small_nbytes + large_nbytes) / (copies_s * bytes_per_s))}
    fields |= {"stack_s": max(0.0, small_s - small_nbytes * per_byte_s), "stack_share": 1 / (per_byte_s * bytes_per_s)}
    return fields


def replayed(backend: Backend, work: _Work) -> _Work:
    """The work in a graph."""
    work()  # loads kernels
    graph = cuda.new_graph()
    with backend.capture(graph):
        work()
    return partial(_replay, graph, work)


def _replay(graph: Graph, _: _Work) -> None:
    """Replay the graph. The work is an argument to keep the tensors that the graph reads alive."""
    graph.replay()
