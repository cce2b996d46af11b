"""Packed experts give the bits of the stacks that the library unpacks: resident, streaming whole, and in slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

import weightstream
from expert_rig import Selected, built, caches, counts, experts_of, generated, held, prompt, same, selected
from models import model_nbytes
from weightstream.adapters.hf import packed_matrices, private
from weightstream.adapters.hf.packed_formats import PackedFormat, hold_packed, packed_stacks

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.usefixtures("nothing_foreseen")]

__all__ = ["selected"]

IMPLEMENTATIONS = ("batched_mm", "grouped_mm", "eager")
Leaves = Callable[[tuple[int, ...], torch.Generator], tuple[torch.Tensor, ...]]


def mxfp4_leaves(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    experts, inner, columns = shape
    blocks = torch.randint(0, 256, (experts, columns, inner // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(117, 121, (experts, columns, inner // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


FORMATS: Mapping[str, tuple[str, PackedFormat, Leaves]] = MappingProxyType(
    {"mxfp4": ("gpt_oss", private.MXFP4, mxfp4_leaves)}
)
formats = pytest.mark.parametrize("name", FORMATS)


def both(name: str, implementation: str = "batched_mm") -> tuple[Any, Any]:
    """A model with packed experts, and the plain model with the stacks that its library makes of them."""
    kind, packed_format, leaves_of = FORMATS[name]
    packed, plain = (built(kind, implementation) for _ in range(2))
    generator = torch.Generator().manual_seed(7)
    for ours, theirs in zip(experts_of(packed), experts_of(plain), strict=True):
        for stack in ("gate_up_proj", "down_proj"):
            dense = theirs._parameters[stack]
            leaves = leaves_of(tuple(dense.shape), generator)
            dense.data = packed_format.unpacked(leaves, dense.dtype)
            named = zip(packed_format.suffixes, leaves, strict=True)
            parameters = {stack + suffix: torch.nn.Parameter(leaf, requires_grad=False) for suffix, leaf in named}
            hold_packed(ours, stack, packed_format, parameters)
    return packed, plain


def assert_equal(model: Any, plain: Any, *lengths: int) -> None:
    for length in lengths or (3, 5, 9):
        assert same(generated(model, prompt(length), 6), generated(plain, prompt(length), 6)), length


@formats
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("share", [0.3, 2.0])
def test_without_a_cache(name: str, implementation: str, share: float, selected: Selected) -> None:
    model, plain = both(name, implementation)
    with weightstream.offload(model, device="cpu", device_budget=int(share * model_nbytes(model)), codec="none"):
        assert_equal(model, plain)
    assert_equal(model, plain, 4)


@formats
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
@pytest.mark.parametrize("num_slots", [2, 4, 8])
def test_rows_from_slots(name: str, implementation: str, num_slots: int, selected: Selected) -> None:
    model, plain = both(name, implementation)
    with held(model, "cached", num_slots) as streamer:
        for cache in caches(streamer):  # what no fetch has written is not to be read
            for stack in cache._stacks:
                stack.memory.fill_(255)
        assert_equal(model, plain)
        assert counts(streamer)[1] > 0
        assert set(selected.ways) == ({"select"} if implementation == "batched_mm" else {"place"})
        for each in (model, plain):
            each.set_experts_implementation("batched_mm")
        assert_equal(model, plain, 4)


@formats
def test_only_picked_rows_are_unpacked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both(name)
    unpacked: list[int] = []
    plain_unpacked = PackedFormat.unpacked

    def spied(self: PackedFormat, rows: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        unpacked.append(len(rows[0]))
        return plain_unpacked(self, rows, dtype)

    monkeypatch.setattr(PackedFormat, "unpacked", spied)
    ids, half = prompt(1), model_nbytes(model) // 2
    with held(model, "cached"):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    with weightstream.offload(model, device="cpu", device_budget=half, codec="none"):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert set(unpacked) == {2}, "a token names two experts"


@formats
@pytest.mark.parametrize("num", [1, 3])
def test_groups_are_multiplied_in_waves(name: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = both(name, "grouped_mm")
    matrix = max(experts_of(plain)[0].gate_up_proj[0].nbytes, experts_of(plain)[0].down_proj[0].nbytes)
    monkeypatch.setattr(packed_matrices, "WAVE_NBYTES", num * matrix)
    with weightstream.offload(model, device="cpu", device_budget=model_nbytes(model) // 2, codec="none"):
        for length in (1, 2, 7, 40):
            ids = prompt(length)
            assert torch.equal(model(ids).logits, plain(ids).logits), length


@formats
def test_an_update_of_a_leaf_reaches_the_slots(name: str) -> None:
    model, plain = both(name)
    with held(model, "cached", 8):
        assert_equal(model, plain, 3)
        packed = [module for module in model.modules() if packed_stacks(module)]
        for ours, theirs in zip(packed, experts_of(plain), strict=True):
            packed_format = FORMATS[name][1]
            leaves = [getattr(ours, "down_proj" + suffix) for suffix in packed_format.suffixes]
            with torch.no_grad():
                leaves[0].copy_(leaves[0].flip(0))
            theirs.down_proj.data = packed_format.unpacked(
                tuple(leaf.detach().clone() for leaf in leaves), torch.bfloat16
            )
        assert_equal(model, plain, 3)
