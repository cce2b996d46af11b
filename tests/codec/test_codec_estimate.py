"""Sizes told from a sample: not too small for weights that are alike all over, hardly too large; little is read."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch

from patterns import KINDS, PATTERNS, gaussian, noise, spread
from repeats import thinned
from weightstream.codec import estimate, reference
from weightstream.codec.estimate import ASSUMED_BITS, estimates
from weightstream.codec.format import ELEMENTS, TILE, Layout, most_escapes

kinds = pytest.mark.parametrize(("dtype", "bits"), KINDS)
dtypes = pytest.mark.parametrize("dtype", ELEMENTS)


def codes(dtype: str) -> list[int]:
    return [bits for kind, bits in KINDS if kind == dtype]


def true_nbytes(data: torch.Tensor, dtype: str) -> dict[int, int]:
    """As encoding would find, without the planes."""
    counts, count = reference.histograms(data, dtype), data.numel() // ELEMENTS[dtype].nbytes
    escapes = {bits: int(reference.windows(counts, bits)[1].sum()) for bits in codes(dtype)}
    return {b: Layout(dtype=dtype, bits=b, count=count, num_escapes=num).nbytes for b, num in escapes.items()}


@pytest.mark.parametrize(("dtype", "bits", "pattern"), thinned(KINDS, PATTERNS))
def test_exact_where_all_tiles_are_looked_at(dtype: str, bits: int, pattern: str) -> None:
    data = PATTERNS[pattern](dtype)
    layout, coded = reference.encode(data, dtype, bits)
    assert estimates([data], dtype)[bits] == coded.numel() == layout.nbytes


@kinds
@pytest.mark.parametrize("count", [1, 3, 4096, 64 * TILE - 1, 64 * TILE])
def test_exact_up_to_64_tiles(dtype: str, bits: int, count: int) -> None:
    data = spread(dtype, count, 0.5, 2.0, seed=0)
    assert estimates([data], dtype)[bits] == true_nbytes(data, dtype)[bits]


@dtypes
def test_one_pass_gives_all_codes(dtype: str) -> None:
    data = gaussian(dtype, 100 * TILE)
    assert list(estimates([data], dtype)) == codes(dtype)
    assert torch.equal(data, gaussian(dtype, 100 * TILE))


@pytest.mark.few(1)
@dtypes
@pytest.mark.parametrize("scale", [0.016, 0.019, 0.0221, 1.0])
def test_gaussian_weights_never_take_more(dtype: str, scale: float) -> None:
    """4 standard errors and 0.1 %: at 1,000 tensors of this test, none is expected."""
    excess = []
    for seed in range(20):
        data = gaussian(dtype, (65 + 7 * seed) * TILE - seed, scale, seed)
        true = true_nbytes(data, dtype)
        excess += [nbytes / true[bits] - 1 for bits, nbytes in estimates([data], dtype).items()]
    assert min(excess) > 0
    assert max(excess) < 0.006


@pytest.mark.stress
def test_the_error_is_that_of_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin of one standard error, a sixth of all tensors takes more: here, one with its tiles in any order."""
    monkeypatch.setattr(estimate, "_STANDARD_ERRORS", 1)
    monkeypatch.setattr(estimate, "_MARGIN", 10**12)
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(600, TILE, generator=source) * 2 ** torch.rand(600, 1, generator=source)
    tiles = rows.to(torch.bfloat16).view(torch.uint8)
    true = true_nbytes(tiles.view(-1), "bfloat16")[3]
    orders = (torch.randperm(600, generator=source) for _ in range(200))
    num_more = sum(estimates([tiles[order].view(-1)], "bfloat16")[3] < true for order in orders)
    assert 15 < num_more < 55


@pytest.mark.parametrize(("dtype", "scale"), thinned(ELEMENTS, [0.01, 0.19]))
def test_large_gaussian_weights(dtype: str, scale: float) -> None:
    data = gaussian(dtype, 3_000_001, scale)
    true = true_nbytes(data, dtype)
    assert all(true[bits] < nbytes < 1.006 * true[bits] for bits, nbytes in estimates([data], dtype).items())


@dtypes
def test_outlier_rows(dtype: str) -> None:
    """Some rows are large, as in trained models; a tile has parts of several."""
    rows = 0.02 * torch.randn(1500, 640, generator=torch.Generator().manual_seed(5))
    rows[::37] *= 30.0
    data = rows.to(getattr(torch, dtype)).view(-1).view(torch.uint8)
    true = true_nbytes(data, dtype)
    assert all(true[bits] < nbytes < 1.03 * true[bits] for bits, nbytes in estimates([data], dtype).items())


@kinds
def test_random_bits_are_seen_to_gain_nothing(dtype: str, bits: int) -> None:
    data = noise(dtype, 200 * TILE)
    true = true_nbytes(data, dtype)[bits]
    assert data.numel() < true < estimates([data], dtype)[bits] < 1.006 * true


@kinds
def test_no_more_escapes_than_weights(dtype: str, bits: int) -> None:
    """Tiles that differ as much as tiles can: half of them escape nearly all."""
    data = torch.cat([noise(dtype, 100 * TILE), gaussian(dtype, 100 * TILE)])
    layout = Layout(dtype=dtype, bits=bits, count=200 * TILE, num_escapes=most_escapes(200 * TILE, bits))
    assert true_nbytes(data, dtype)[bits] < estimates([data], dtype)[bits] <= 1.001 * layout.nbytes


@pytest.mark.parametrize(("dtype", "bits", "num_tiles"), thinned(KINDS, [50, 1000]))
def test_bytes_that_lie_in_parts(dtype: str, bits: int, num_tiles: int) -> None:
    """Experts of different scales, of which all are looked at."""
    scales = (0.01, 1.0, 0.1, 3.0, 0.3)
    parts = [gaussian(dtype, num_tiles * TILE // len(scales) + 100, scale) for scale in scales]
    true = true_nbytes(torch.cat(parts), dtype)[bits]
    found = estimates(parts, dtype)[bits]
    assert true == found if num_tiles < 64 else true <= found < 1.01 * true


def test_reads_the_sampled_tiles_alone(tmp_path: Path) -> None:
    """Of a mapped file of 512 MiB, 64 tiles and what the system maps around each fault."""
    path, process = tmp_path / "weights", psutil.Process()
    nbytes = 512 * 2**20
    with path.open("wb") as file:
        file.truncate(nbytes)
    data = torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
    estimates([data[: 65 * 8192]], "bfloat16")  # what a first call takes
    before = process.memory_info().shared
    found = estimates([data], "bfloat16")
    grown = process.memory_info().shared - before
    layout = Layout(dtype="bfloat16", bits=3, count=nbytes // 2, num_escapes=0)
    assert found[3] == layout.nbytes + layout.nbytes // 1000
    assert 64 * 8192 <= grown <= 64 * 2**18


def test_takes_little_time() -> None:
    data = gaussian("bfloat16", 2**22)
    taken = []
    for _ in range(20):
        begin = time.perf_counter()
        estimates([data], "bfloat16")
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 0.01  # 1.5 ms alone on a core


@kinds
def test_assumed_bits(dtype: str, bits: int) -> None:
    """A little above what Gaussian weights take, at the scale where it is most."""
    data = gaussian(dtype, 2**20, 64 * 0.0221)
    assert set(ASSUMED_BITS) == set(ELEMENTS)
    assert set(ASSUMED_BITS[dtype]) == set(codes(dtype))
    found = 8 * true_nbytes(data, dtype)[bits] / 2**20
    assert found < ASSUMED_BITS[dtype][bits] < found + 0.12
