"""A packed stack is indexed as the tensor that it stands in for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from packed_rig import CASES
from weightstream.adapters.hf.packed_formats import PackedStack
from weightstream.adapters.hf.packed_matrices import PackedMatrices

pytest.importorskip("transformers")

NUM = 5
INDICES: dict[str, Callable[[Any], Any]] = {
    "first and last": lambda stack: torch.cat([stack[0], stack[-1], stack[-NUM]]),
    "some": lambda stack: stack[torch.tensor([[3, -1], [0, 3]])],
    "one": lambda stack: stack[torch.tensor(2)],
    "none": lambda stack: stack[torch.tensor([], dtype=torch.int64)],
    "narrow": lambda stack: stack[torch.tensor([4, 1], dtype=torch.int32)],
    "mask": lambda stack: stack[torch.tensor([True, False, True, False, False])],
    "slice": lambda stack: stack[1:3],
    "true": lambda stack: stack[True],
    "several": lambda stack: stack[torch.tensor([1]), 2],
    "transposed": lambda stack: stack.transpose(-2, -1)[3],
    "each": lambda stack: torch.stack(list(islice(stack, 2 * NUM))),
}


@pytest.fixture(params=CASES)
def pair(request: Any) -> tuple[PackedMatrices, torch.Tensor]:
    case, shape = CASES[request.param], (NUM, 64, 96)
    leaves = case.leaves(shape, torch.Generator().manual_seed(3))
    plain = case.format.unpacked(leaves, torch.bfloat16)
    stack = PackedStack(format=case.format, leaves=(), shape=tuple(plain.shape), dtype=plain.dtype)
    return PackedMatrices(stack, leaves), plain


@pytest.mark.parametrize("index", INDICES)
def test_indices(pair: tuple[PackedMatrices, torch.Tensor], index: str) -> None:
    found, wanted = (INDICES[index](each) for each in pair)
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("index", [NUM, -NUM - 1, torch.tensor([0, NUM])], ids=str)
def test_an_index_out_of_bounds_is_refused(pair: tuple[PackedMatrices, torch.Tensor], index: Any) -> None:
    for each in pair:
        with pytest.raises(IndexError, match="out of"):
            each[index]


@pytest.mark.parametrize("num_rows", [1, 2, 40])
@pytest.mark.parametrize("num", [1, 2, NUM - 1])
def test_a_wave_is_tried_with_any_number_of_rows(num_rows: int, num: int) -> None:
    """Else a call with few rows would unpack the whole stack."""
    case, product = CASES["block float8"], torch.nn.functional.grouped_mm
    leaves = case.leaves((NUM, 64, 96), torch.Generator().manual_seed(3))
    stack = PackedStack(format=case.format, leaves=(), shape=(NUM, 64, 96), dtype=torch.bfloat16)
    packed, rows = PackedMatrices(stack, leaves).transpose(-2, -1), torch.ones(num_rows, 96, dtype=torch.bfloat16)

    def depends_on_groups(rows: torch.Tensor, stack: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        return product(rows, stack, offs=offs) + len(offs)

    assert packed._is_equal(product, rows, num)
    assert not packed._is_equal(depends_on_groups, rows, num)
