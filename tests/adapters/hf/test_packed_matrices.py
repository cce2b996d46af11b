"""A substitute for a packed stack gives what the unpacked stack gives, whatever is done with it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch

from packed_rig import CASES, ODD
from repeats import thinned
from unpack_launches import launches_from_now
from weightstream.adapters.hf import packed_matrices
from weightstream.adapters.hf.packed_formats import PackedFormat, PackedStack
from weightstream.adapters.hf.packed_matrices import PackedLayer, PackedMatrices
from weightstream.codec import unpack_kernels, unpacking

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


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("use", ["ids", "a number", "a slice", "a function", "transposed"])
def test_functions_of_libraries_unpack_some_matrices_at_a_time(
    pair: tuple[PackedMatrices, torch.Tensor], use: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need several times the memory of their result."""
    packed, plain = pair
    numbers: list[int] = []

    def counted(self: PackedFormat, rows: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        numbers.append(len(rows[0]))
        return unpacked(self, rows, dtype)

    unpacked = PackedFormat.unpacked
    monkeypatch.setattr(PackedFormat, "unpacked", counted)
    monkeypatch.setattr(packed_matrices, "PART_NBYTES", most * plain[0].nbytes + 1)
    assert torch.equal(USES[use](packed), USES[use](plain))
    assert max(numbers) <= most


# -- one launch for both stacks of a layer -----------------------------------------------------------------------------


class Layer(NamedTuple):
    """Substitutes for two stacks of a call, the unpacked stacks, and the number of stacks of each launch so far."""

    packed: list[PackedMatrices]
    plain: list[torch.Tensor]
    launches: list[int]


Rows = list[tuple[int, torch.Tensor, list[int]]]  # a stack, the result of an index of it, the rows that it should have


def ids_of(*rows: int) -> torch.Tensor:
    return torch.tensor(rows)


def other_ids(first: Any, second: Any) -> Rows:
    return [(0, first[ids_of(3, 1)], [3, 1]), (1, second[ids_of(3, 1)], [3, 1])]


def the_same_ids(first: Any, second: Any) -> Rows:
    ids = ids_of(3, 1, 3)
    return [(0, first[ids], [3, 1, 3]), (1, second[ids], [3, 1, 3])]


def ids_from_the_end(first: Any, second: Any) -> Rows:
    ids = ids_of(-1, 2, -NUM)
    return [(0, first[ids], [NUM - 1, 2, 0]), (1, second[ids], [NUM - 1, 2, 0])]


def one_id(first: Any, second: Any) -> Rows:
    ids = ids_of(6)
    return [(0, first[ids], [6]), (1, second[ids], [6])]


def the_second_stack_first(first: Any, second: Any) -> Rows:
    ids = ids_of(0, 7)
    return [(1, second[ids], [0, 7]), (0, first[ids], [0, 7])]


def int32_ids(first: Any, second: Any) -> Rows:
    ids = ids_of(0, 7).int()
    return [(0, first[ids], [0, 7]), (1, second[ids], [0, 7])]


def ids_that_are_written_to(first: Any, second: Any) -> Rows:
    found: Rows = [(0, first[ids := ids_of(3, 1)], [3, 1])]
    ids.add_(1)
    return [*found, (1, second[ids], [4, 2])]


def ids_that_a_view_writes_to(first: Any, second: Any) -> Rows:
    found: Rows = [(0, first[ids := ids_of(3, 1)], [3, 1])]
    ids[:1].fill_(7)
    return [*found, (1, second[ids], [7, 1])]


def ids_in_inference(first: Any, second: Any) -> Rows:
    """Writes to these are not counted."""
    with torch.inference_mode():
        found: Rows = [(0, first[ids := ids_of(3, 1)], [3, 1])]
        ids.add_(1)
        return [*found, (1, second[ids], [4, 2])]


def the_first_stack_twice(first: Any, second: Any) -> Rows:
    ids = ids_of(3, 1)
    return [(0, first[ids], [3, 1]), (0, first[ids], [3, 1]), (1, second[ids], [3, 1])]


def several_calls(first: Any, second: Any) -> Rows:
    ids, others = ids_of(3, 1), ids_of(2)
    found: Rows = [(0, first[ids], [3, 1]), (0, first[others], [2]), (1, second[others], [2]), (1, second[ids], [3, 1])]
    return found


def one_after_the_other(first: Any, second: Any) -> Rows:
    """As a loop over experts does, which does not hold matrices of two stacks at a time."""
    return [(k, stack[ids_of(2, 5)[1]], [5]) for k, stack in enumerate((first, second))]


def only_one_stack(first: Any, second: Any) -> Rows:
    return [(1, second[ids_of(3)], [3])]


LAUNCHES: dict[Callable[[Any, Any], Rows], list[int]] = {
    the_same_ids: [2],
    ids_from_the_end: [2],
    one_id: [2],
    the_second_stack_first: [2],
    int32_ids: [2],
    other_ids: [2, 1],
    ids_that_are_written_to: [2, 1],
    ids_that_a_view_writes_to: [2, 1],
    ids_in_inference: [1, 1],
    the_first_stack_twice: [2, 1],
    several_calls: [2, 1, 1, 1],
    one_after_the_other: [1, 1],
    only_one_stack: [2],
}


ALIKE = [name for name in CASES if name not in ODD]  # a layer's stacks have blocks of scales of one size


@pytest.fixture
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layer:
    """Of the format that is the parameter. Kernels run in Triton's interpreter, in few programs."""
    launches = launches_from_now(monkeypatch)
    monkeypatch.setattr(unpacking, "unpacks_equally", lambda *_: True)
    monkeypatch.setattr(packed_matrices, "KERNELS_ON", "cpu")
    monkeypatch.setattr(packed_matrices, "_EQUAL", {})
    monkeypatch.setattr(unpack_kernels, "MXFP4_SHAPE", {"TILES": 16, "GROUPS": 4, "num_warps": 2})
    monkeypatch.setattr(unpack_kernels, "UNPACK_SHAPE", {"ROWS": 32, "WORDS": 16, "STEPS": 4, "num_warps": 4})
    pairs = [made(request.param, shape) for shape in ((NUM, 64, 96), (NUM, 64, 64))]
    together = PackedLayer()
    packed = [PackedMatrices(each._stack, each._held, layer=together) for each, _ in pairs]
    return Layer(packed, [plain for _, plain in pairs], launches)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize(
    ("layer", "use"),
    thinned(ALIKE, LAUNCHES, every=len(ALIKE)),
    indirect=["layer"],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_the_first_index_unpacks_both_stacks(layer: Layer, use: Callable[[Any, Any], Rows]) -> None:
    """The second index takes these only for the same ids."""
    for stack, found, rows in use(*layer.packed):
        assert torch.equal(found.view(-1, *layer.plain[stack].shape[1:]), layer.plain[stack][rows])
    assert layer.launches == LAUNCHES[use]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("layer", ["int4"], indirect=True)
@pytest.mark.parametrize("is_shared", [True, False])
def test_fixed_rows_are_unpacked_together_if_they_are_the_same(layer: Layer, is_shared: bool) -> None:
    """As those in slots of a cache: whatever an index names, also in inference mode."""
    together, slots = PackedLayer(), ids_of(5, 0)
    rows = [slots, slots if is_shared else slots.clone()]
    first, second = (
        PackedMatrices(each._stack, each._held, own, layer=together)
        for each, own in zip(layer.packed, rows, strict=True)
    )
    with torch.inference_mode():
        found = first[ids_of(3, 1)], second[ids_of(1, 3)]
    for matrices, plain in zip(found, layer.plain, strict=True):
        assert torch.equal(matrices, plain[[5, 0]])
    assert layer.launches == ([2] if is_shared else [1, 1])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("layer", ["block float8"], indirect=True)
@pytest.mark.parametrize("is_taken", [True, False])
def test_matrices_that_were_unpacked_early_are_not_kept(layer: Layer, is_taken: bool) -> None:
    """Once they were taken, or the call is over: without garbage collection."""
    first, second = layer.packed
    layer.packed.clear()
    ids = ids_of(3, 1)
    gc.disable()
    try:
        first[ids]
        (early,) = first._layer._early.values()
        kept = weakref.ref(early.matrices)
        del early
        assert kept() is not None
        if is_taken:
            second[ids]
        else:
            del first, second
        assert kept() is None
    finally:
        gc.enable()
