"""A substitute for a packed stack gives what the unpacked stack gives, whatever is done with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from packed_rig import mxfp4_leaves
from weightstream.adapters.hf import packed_matrices, private
from weightstream.adapters.hf.packed_formats import PackedStack
from weightstream.adapters.hf.packed_matrices import PackedMatrices

pytest.importorskip("transformers.integrations.moe")  # it registers an operator

NUM, INNER, COLUMNS, ROWS = 8, 96, 64, 20
SHAPE = NUM, INNER, COLUMNS


@pytest.fixture
def stack() -> tuple[PackedMatrices, torch.Tensor]:
    """The substitute, and the unpacked stack."""
    leaves = mxfp4_leaves(SHAPE, torch.Generator().manual_seed(2))
    packed = PackedStack(format=private.MXFP4, leaves=("blocks", "scales"), shape=SHAPE, dtype=torch.bfloat16)
    return PackedMatrices(packed, leaves), private.MXFP4.unpacked(leaves, torch.bfloat16)


USES: dict[str, Callable[[Any], Any]] = {
    "ids": lambda w: w[torch.tensor([3, 1, 3])],
    "ids in two dimensions": lambda w: w[torch.tensor([[3, 1], [0, 7]])],
    "int32 ids": lambda w: w[torch.tensor([3, 1], dtype=torch.int32)],
    "a number": lambda w: w[2],
    "a number from the end": lambda w: w[-1],
    "a tensor of one": lambda w: w[torch.tensor(5)],
    "a mask": lambda w: w[torch.arange(NUM) > 5],
    "a slice": lambda w: w[2:5],
    "transposed": lambda w: w.transpose(-2, -1)[torch.tensor([4, 2])],
    "transposed twice": lambda w: w.transpose(1, 2).transpose(2, 1)[3],
    "other dimensions": lambda w: w.transpose(0, 1),
    "a method": lambda w: w.float(),
    "a function": lambda w: torch.bmm(torch.ones(NUM, 2, INNER, dtype=torch.bfloat16), w),
    "size": lambda w: torch.tensor([*w.shape, w.dim(), w.ndim, w.size(1), len(w), *w.size()]),
}


@pytest.mark.parametrize("use", USES)
def test_each_use_gives_the_same(use: str, stack: tuple[PackedMatrices, torch.Tensor]) -> None:
    packed, plain = stack
    found, wanted = USES[use](packed), USES[use](plain)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()


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
    stack: tuple[PackedMatrices, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows after the last group go to no matrix: their products are not looked at."""
    functions = {
        "functional": torch.nn.functional.grouped_mm,
        "torch": torch._grouped_mm,
        "transformers": torch.ops.transformers.grouped_mm_fallback,
    }
    packed, plain = stack
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", num * plain[0].nbytes)
    x = torch.randn(ROWS, COLUMNS if transposed else INNER, generator=torch.Generator().manual_seed(1)).bfloat16()
    offs = torch.tensor(ends, dtype=torch.int32)
    found, wanted = (functions[name](x, w.transpose(-2, -1) if transposed else w, offs=offs) for w in (packed, plain))
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert torch.equal(found[: ends[-1]], wanted[: ends[-1]])
