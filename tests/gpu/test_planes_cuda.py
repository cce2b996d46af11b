"""Weights in two parts on a GPU: exact, the same in graphs, safe with any bytes, and within memory."""

from __future__ import annotations

import pytest
import torch

from weightstream.codec import planes
from weightstream.codec.planes import PlaneLayout, Planes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

all_bits = pytest.mark.parametrize("bits", [1, 2, 3])
# Of the last two, a program has two and four outputs.
SHAPES = [(1, 64), (37, 192), (1024, 4096), (515, 14336), (4098, 192), (8195, 128)]
HEAD = (128256, 4096)


def random(rows: int, columns: int) -> torch.Tensor:
    """Gaussian weights, and every bit pattern in the first rows if there is room."""
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    if weight.numel() > 1 << 18:
        weight.view(-1)[: 1 << 16] = torch.randperm(1 << 16, device="cuda").to(torch.int16).view(torch.bfloat16)
    return weight


def finite(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).mul_(0.02)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@all_bits
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_parts_are_those_of_the_cpu_and_joined_are_the_matrix(rows: int, columns: int, bits: int) -> None:
    weight = random(rows, columns)
    parts, expected = planes.split(weight, bits), planes.split(weight.cpu(), bits)
    assert torch.equal(parts.high.cpu(), expected.high)
    assert torch.equal(parts.low.cpu(), expected.low)
    assert_same_bits(planes.join_planes(*parts), weight)
    out = torch.empty_like(weight)
    planes._joined(*parts, out)
    assert_same_bits(out, weight)


@all_bits
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_product_with_the_draft(rows: int, columns: int, bits: int, dtype: torch.dtype) -> None:
    high, _, layout = planes.split(finite(rows, columns), bits)
    x, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((2, 2, columns), (rows,)))
    found = planes.draft_linear(x, high, layout, bias)
    expected = torch.nn.functional.linear(x.double(), planes.drafted(high, layout).double(), bias.double())
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=step, atol=1e-4)
    for index in range(2):  # each row by itself, and again
        assert torch.equal(planes.draft_linear(x[index, :1], high, layout, bias), found[index, :1])


@all_bits
def test_graphs_read_the_parts_again(bits: int) -> None:
    first, second = (planes.split(finite(520, 1024), bits) for _ in range(2))
    room = max(len(first.low), len(second.low))
    high, low = torch.empty_like(first.high), torch.empty(room, dtype=torch.uint8, device="cuda")
    x = torch.randn(1, 1024, device="cuda", dtype=torch.bfloat16)

    def fill(parts: Planes) -> None:
        high.copy_(parts.high)
        low[: len(parts.low)] = parts.low

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return planes.join_planes(high, low, first.layout), planes.draft_linear(x, high, first.layout)

    low.random_(0, 256)
    high.random_(0, 256)
    both()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        joined, product = both()
    for parts in (first, second, first):
        fill(parts)
        graph.replay()
        assert_same_bits(joined, planes.join_planes(*parts))
        assert torch.equal(product, planes.draft_linear(x, parts.high, parts.layout))


@all_bits
@pytest.mark.parametrize("fill", [None, 0, 127, 255])
def test_any_bytes_are_read_inside(bits: int, fill: int | None) -> None:
    """The kernel's weights are those of plain torch, which checks its indices."""
    high, low, layout = planes.split(finite(300, 2048 + 64), bits)
    for part in (high, low):
        part.random_(0, 256) if fill is None else part.fill_(fill)
    expected = torch.empty(layout.rows, layout.columns, dtype=torch.bfloat16, device="cuda")
    planes._joined(high, low, layout, expected)
    assert_same_bits(planes.join_planes(high, low, layout), expected)
    planes.draft_linear(torch.ones(1, layout.columns, device="cuda"), high, layout)
    torch.cuda.synchronize()


@pytest.mark.alone
def test_a_head_is_split_in_little_memory_and_its_draft_is_read_completely() -> None:
    """More than 2**31 bits in a plane."""
    weight = torch.randn(HEAD, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    high, low, layout = planes.split(weight, 3)
    assert torch.cuda.max_memory_allocated() - before < len(high) + len(low) + (1 << 30)
    assert layout == PlaneLayout(*HEAD, 3)
    assert_same_bits(planes.join_planes(high, low, layout), weight)
    x = torch.randn(1, HEAD[1], device="cuda", dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), planes.drafted(high, layout).float())
    torch.testing.assert_close(planes.draft_linear(x, high, layout).float(), expected, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(planes.draft_linear(x.float(), high, layout), expected, rtol=1e-3, atol=1e-2)


def test_rows_of_the_draft_in_a_graph() -> None:
    high, _, layout = planes.split(finite(100, 256), 2)
    ids = torch.tensor([[3, 99]], device="cuda")
    planes.drafted_rows(ids, high, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = planes.drafted_rows(ids, high, layout)
    ids.copy_(torch.tensor([[0, 7]]))
    graph.replay()
    assert_same_bits(found, planes.drafted(high, layout)[[0, 7]][None])
