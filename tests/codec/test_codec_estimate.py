"""Sizes estimated from a sample: not too small for homogeneous weights, hardly too large, and little is read."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch

from patterns import PATTERNS, gaussian, noise, spread
from repeats import thinned
from weightstream.codec import estimate, reference
from weightstream.codec.estimate import ASSUMED_BITS
from weightstream.codec.format import ELEMENTS, TILE, Layout, most_escapes

dtypes = pytest.mark.parametrize("dtype", ELEMENTS)


def true_nbytes(data: torch.Tensor, dtype: str) -> int:
    """The exact size, without encoding the planes."""
    counts, count = reference.histograms(data, dtype), data.numel() // ELEMENTS[dtype].nbytes
    return Layout(dtype=dtype, count=count, num_escapes=int(reference.windows(counts, dtype)[1].sum())).nbytes


@pytest.mark.parametrize(("dtype", "pattern"), thinned(ELEMENTS, PATTERNS))
def test_exact_if_all_tiles_are_sampled(dtype: str, pattern: str) -> None:
    data = PATTERNS[pattern](dtype)
    layout, coded = reference.encode(data, dtype)
    assert estimate.estimate([data], dtype) == coded.numel() == layout.nbytes


@dtypes
@pytest.mark.parametrize("count", [1, 3, 4096, 64 * TILE - 1, 64 * TILE])
def test_exact_up_to_64_tiles(dtype: str, count: int) -> None:
    data = spread(dtype, count, 0.5, 2.0, seed=0)
    assert estimate.estimate([data], dtype) == true_nbytes(data, dtype)


@dtypes
def test_weights_do_not_change(dtype: str) -> None:
    data = gaussian(dtype, 100 * TILE)
    assert estimate.estimate([data], dtype) < data.nbytes
    assert torch.equal(data, gaussian(dtype, 100 * TILE))


@pytest.mark.few(1)
@dtypes
@pytest.mark.parametrize("scale", [0.016, 0.019, 0.0221, 1.0])
def test_gaussian_weights_never_take_more(dtype: str, scale: float) -> None:
    """The margin is 4 standard errors and 0.1 %: among 1,000 tensors of this test, no exception is expected."""
    excess = []
    for seed in range(20):
        data = gaussian(dtype, (65 + 7 * seed) * TILE - seed, scale, seed)
        excess.append(estimate.estimate([data], dtype) / true_nbytes(data, dtype) - 1)
    assert min(excess) > 0
    assert max(excess) < 0.006


@pytest.mark.stress
def test_the_error_is_that_of_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin of one standard error, a sixth of all tensors takes more. Here it is one tensor with shuffled
    tiles."""
    monkeypatch.setattr(estimate, "_STANDARD_ERRORS", 1)
    monkeypatch.setattr(estimate, "_MARGIN", 10**12)
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(600, TILE, generator=source) * 2 ** torch.rand(600, 1, generator=source)
    tiles = rows.to(torch.bfloat16).view(torch.uint8)
    true = true_nbytes(tiles.view(-1), "bfloat16")
    orders = (torch.randperm(600, generator=source) for _ in range(200))
    num_more = sum(estimate.estimate([tiles[order].view(-1)], "bfloat16") < true for order in orders)
    assert 15 < num_more < 55


@pytest.mark.parametrize(("dtype", "scale"), thinned(ELEMENTS, [0.01, 0.19]))
def test_large_gaussian_weights(dtype: str, scale: float) -> None:
    data = gaussian(dtype, 3_000_001, scale)
    true = true_nbytes(data, dtype)
    assert true < estimate.estimate([data], dtype) < 1.006 * true


@dtypes
def test_outlier_rows(dtype: str) -> None:
    """Some rows are large, as in trained models. A tile has parts of several rows."""
    rows = 0.02 * torch.randn(1500, 640, generator=torch.Generator().manual_seed(5))
    rows[::37] *= 30.0
    data = rows.to(getattr(torch, dtype)).view(-1).view(torch.uint8)
    true = true_nbytes(data, dtype)
    assert true < estimate.estimate([data], dtype) < 1.03 * true


@dtypes
def test_random_bits_are_found_incompressible(dtype: str) -> None:
    data = noise(dtype, 200 * TILE)
    true = true_nbytes(data, dtype)
    assert data.numel() < true < estimate.estimate([data], dtype) < 1.006 * true


@dtypes
def test_no_more_escapes_than_weights(dtype: str) -> None:
    """Tiles that differ as much as possible: in half of them, nearly all weights are escapes."""
    data = torch.cat([noise(dtype, 100 * TILE), gaussian(dtype, 100 * TILE)])
    layout = Layout(dtype=dtype, count=200 * TILE, num_escapes=most_escapes(dtype, 200 * TILE))
    assert true_nbytes(data, dtype) < estimate.estimate([data], dtype) <= 1.001 * layout.nbytes


@pytest.mark.parametrize(("dtype", "num_tiles"), thinned(ELEMENTS, [50, 1000]))
def test_bytes_in_several_parts(dtype: str, num_tiles: int) -> None:
    """Experts of different scales, all of which are sampled."""
    scales = (0.01, 1.0, 0.1, 3.0, 0.3)
    parts = [gaussian(dtype, num_tiles * TILE // len(scales) + 100, scale) for scale in scales]
    true = true_nbytes(torch.cat(parts), dtype)
    found = estimate.estimate(parts, dtype)
    assert true == found if num_tiles < 64 else true <= found < 1.01 * true


def test_reads_only_the_sampled_tiles(tmp_path: Path) -> None:
    """Of a mapped file of 512 MiB, it reads 64 tiles and the pages that the system maps around each fault."""
    path, process = tmp_path / "weights", psutil.Process()
    nbytes = 512 * 2**20
    with path.open("wb") as file:
        file.truncate(nbytes)
    data = torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
    estimate.estimate([data[: 65 * 8192]], "bfloat16")  # allocations of a first call
    before = process.memory_info().shared
    found = estimate.estimate([data], "bfloat16")
    grown = process.memory_info().shared - before
    layout = Layout(dtype="bfloat16", count=nbytes // 2, num_escapes=0)
    assert found == layout.nbytes + layout.nbytes // 1000
    assert 64 * 8192 <= grown <= 64 * 2**18


def test_takes_little_time() -> None:
    data = gaussian("bfloat16", 2**22)
    taken = []
    for _ in range(20):
        begin = time.perf_counter()
        estimate.estimate([data], "bfloat16")
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 0.01  # 1.5 ms on an idle core


@dtypes
def test_assumed_bits(dtype: str) -> None:
    """A little more than Gaussian weights take, at the scale at which they take most."""
    data = gaussian(dtype, 2**20, 64 * 0.0221)
    assert set(ASSUMED_BITS) == set(ELEMENTS)
    found = 8 * true_nbytes(data, dtype) / 2**20
    assert found < ASSUMED_BITS[dtype] < found + 0.12
