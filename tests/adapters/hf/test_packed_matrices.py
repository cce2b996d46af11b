"""A substitute for a packed stack gives what the unpacked stack gives, whatever is done with it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from packed_rig import CASES
from weightstream.adapters.hf import packed_matrices
from weightstream.adapters.hf.packed_formats import PackedStack
from weightstream.adapters.hf.packed_matrices import PackedMatrices

pytest.importorskip("transformers.integrations.moe")  # it registers an operator

NUM, INNER, COLUMNS, ROWS = 8, 96, 64, 20


def made(name: str, shape: tuple[int, ...]) -> tuple[PackedMatrices, torch.Tensor]:
    """The substitute for a stack in this format, and the unpacked stack."""
    case = CASES[name]
    leaves = case.leaves(shape, torch.Generator().manual_seed(3))
    plain = case.format.unpacked(leaves, torch.bfloat16)
    stack = PackedStack(format=case.format, leaves=(), shape=tuple(plain.shape), dtype=plain.dtype)
    return PackedMatrices(stack, leaves), plain


USES: dict[str, Callable[[Any], Any]] = {
    "ids": lambda w: w[torch.tensor([3, 1, 3])],
    "ids in two dimensions": lambda w: w[torch.tensor([[3, -1], [0, 7]])],
    "int32 ids": lambda w: w[torch.tensor([3, 1], dtype=torch.int32)],
    "no ids": lambda w: w[torch.tensor([], dtype=torch.int64)],
    "a number": lambda w: w[2],
    "numbers from the end": lambda w: torch.cat([w[0], w[-1], w[-NUM]]),
    "a tensor of one": lambda w: w[torch.tensor(5)],
    "a mask": lambda w: w[torch.arange(NUM) > 5],
    "a slice": lambda w: w[2:5],
    "true": lambda w: w[True],
    "several indices": lambda w: w[torch.tensor([1]), 2],
    "each": lambda w: torch.stack(list(islice(w, 2 * NUM))),
    "transposed": lambda w: w.transpose(-2, -1)[torch.tensor([4, 2])],
    "one of transposed ones": lambda w: w.transpose(-2, -1)[3],
    "transposed twice": lambda w: w.transpose(1, 2).transpose(2, 1)[3],
    "other dimensions": lambda w: w.transpose(0, 1),
    "a method": lambda w: w.float(),
    "a function": lambda w: torch.bmm(torch.ones(NUM, 2, w.shape[1], dtype=torch.bfloat16), w),
    "size": lambda w: torch.tensor([*w.shape, w.dim(), w.ndim, w.size(1), len(w), *w.size()]),
}


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest) -> tuple[PackedMatrices, torch.Tensor]:
    """The substitute, and the unpacked stack."""
    return made(request.param, (NUM, 64, 96))


@pytest.mark.parametrize("use", USES)
def test_each_use_gives_the_same(use: str, pair: tuple[PackedMatrices, torch.Tensor]) -> None:
    found, wanted = (USES[use](each) for each in pair)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize("index", [NUM, -NUM - 1, torch.tensor([0, NUM])], ids=str)
def test_an_index_out_of_bounds_is_refused(pair: tuple[PackedMatrices, torch.Tensor], index: Any) -> None:
    for each in pair:
        with pytest.raises(IndexError, match="out of"):
            each[index]


ENDS = (
    [0, 3, 3, 7, 12, 12, 17, 20],
    [0] * 8,
    [20] * 8,
    [0] * 7 + [20],
    [2, 4, 6, 8, 10, 12, 14, 16],
    [0, 0, 1, 1, 1, 1, 1, 5],
)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("num", [1, 3, 7, 8])
@pytest.mark.parametrize("name", ["functional", "torch", "transformers"])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_groups(
    ends: list[int],
    num: int,
    name: str,
    transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows after the last group go to no matrix: their products are not looked at."""
    functions = {
        "functional": torch.nn.functional.grouped_mm,
        "torch": torch._grouped_mm,
        "transformers": torch.ops.transformers.grouped_mm_fallback,
    }
    packed, plain = made("mxfp4", (NUM, INNER, COLUMNS))
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", num * plain[0].nbytes)
    x = torch.randn(ROWS, COLUMNS if transposed else INNER, generator=torch.Generator().manual_seed(1)).bfloat16()
    offs = torch.tensor(ends, dtype=torch.int32)
    found, wanted = (functions[name](x, w.transpose(-2, -1) if transposed else w, offs=offs) for w in (packed, plain))
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert torch.equal(found[: ends[-1]], wanted[: ends[-1]])


@pytest.mark.parametrize("num_rows", [1, 2, 40])
@pytest.mark.parametrize("num", [1, 2, NUM - 1])
def test_a_wave_is_tried_with_any_number_of_rows(num_rows: int, num: int) -> None:
    """Else a call with few rows would unpack the whole stack."""
    product, rows = torch.nn.functional.grouped_mm, torch.ones(num_rows, 96, dtype=torch.bfloat16)
    packed = made("block float8", (NUM, 64, 96))[0].transpose(-2, -1)

    def depends_on_groups(rows: torch.Tensor, stack: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        return product(rows, stack, offs=offs) + len(offs)

    assert packed._is_equal(product, rows, num)
    assert not packed._is_equal(depends_on_groups, rows, num)
