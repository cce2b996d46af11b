"""Rows picked from a compressed stack: exactly the reference's bytes, from the whole stack and from slots, and no
access
out of bounds, also with damaged bytes.

Without a GPU the kernel runs in Triton's interpreter, at 0.1 s per tile: so there are few rows of one or two tiles.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from test_codec_kernels import (
    DEVICE,
    GUARD,
    GUARD_NBYTES,
    again,
    assert_guards_hold,
    by_reference,
    each_is_written,
    interpreted,
    kinds,
    watch,
)

from patterns import noise, spread
from repeats import only, thinned
from weightstream.codec import coding, reference, triton_codec
from weightstream.codec.format import ELEMENTS, TILE, Layout

NUM_ROWS = 4
POISON = 77
IDS = [2, 0, 2, 3, 1, 3]


def stack(dtype: str, tiles: int) -> tuple[Layout, torch.Tensor]:
    """Compressed rows of a number of tiles: one row without escapes, one with few, others with many."""
    widths = (0.01, 0.4, 3.0, 9.0) if dtype == "bfloat16" else (0.1, 1.2, 1.6, 3.0)
    data = [spread(dtype, tiles * TILE, 0.5, width, seed=row) for row, width in enumerate(widths)]
    layout, coded = reference.encode(torch.cat(data), dtype)
    starts = coded[layout.starts_at : layout.bases_at].view(torch.int32)[::tiles].tolist()
    assert starts[0] == starts[1] < starts[2] < starts[3] < starts[4] == layout.num_escapes
    return layout, coded


def target(layout: Layout, num: int) -> torch.Tensor:
    """Memory for a number of rows between guards."""
    room = num * layout.raw_nbytes // NUM_ROWS
    whole = torch.full((room + 2 * GUARD_NBYTES,), GUARD, dtype=torch.uint8, device=DEVICE)
    return whole[GUARD_NBYTES:-GUARD_NBYTES]


def on_device(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


class InSlots:
    """Rows in slots as in a cache: the words of each, followed by its escapes at a multiple of 8 bytes.

    There is one more slot than rows, and unused bytes are poisoned.
    """

    def __init__(self, layout: Layout, coded: torch.Tensor) -> None:
        tiles = layout.num_tiles // NUM_ROWS
        words = tiles * layout.tile_nbytes
        starts = coded[layout.starts_at : layout.bases_at].view(torch.int32)[::tiles].tolist()
        spans = [(begin // 8 * 8, -(-end // 8) * 8) for begin, end in pairwise(layout.escapes_at + s for s in starts)]
        most = max(end - begin for begin, end in spans)
        self.slots = torch.full((NUM_ROWS + 1, words + most + 8), POISON, dtype=torch.uint8)
        self.slot_of = {0: 3, 1: 0, 2: 4, 3: 1}
        for row, (begin, end) in enumerate(spans):
            slot = self.slots[self.slot_of[row]]
            slot[:words] = coded[row * words : (row + 1) * words]
            slot[words : words + end - begin] = coded[begin:end]
        self.slots = self.slots.to(DEVICE)
        self.heads = coded[layout.starts_at : layout.escapes_at].to(DEVICE)

    def of(self, ids: list[int]) -> torch.Tensor:
        return on_device([self.slot_of[min(row, NUM_ROWS - 1)] if row >= 0 else -1 for row in ids])


def picked(
    layout: Layout,
    coded: torch.Tensor,
    ids: list[int],
    slots: InSlots | None = None,
    places: list[int] | None = None,
) -> torch.Tensor:
    """The kernel's output, a row per id. Checks that nothing next to it is written."""
    out, there = target(layout, len(ids)), None if places is None else on_device(places)
    if slots is None:
        triton_codec.Picking(coded.to(DEVICE), layout, out, NUM_ROWS)(on_device(ids), places=there)
    else:
        pick = triton_codec.Picking(slots.heads, layout, out, NUM_ROWS, slots.slots)
        pick(on_device(ids), slots.of(ids), places=there)
    assert_guards_hold(out)
    return out.view(len(ids), -1).cpu()


def rows_of(layout: Layout, coded: torch.Tensor) -> torch.Tensor:
    return by_reference(coded, layout).view(NUM_ROWS, -1)


@pytest.mark.parametrize(
    ("dtype", "place", "tiles"),
    only(
        [(kind, place, tiles) for kind, place, tiles in product(ELEMENTS, ["the stack", "slots"], [1, 2])],
        ("bfloat16", "slots", 1),
    ),
)
def test_picked_rows_equal_those_of_the_reference(tiles: int, place: str, dtype: str) -> None:
    layout, coded = stack(dtype, tiles)
    slots = InSlots(layout, coded) if place == "slots" else None
    assert torch.equal(picked(layout, coded, IDS, slots), rows_of(layout, coded)[IDS])


@pytest.mark.parametrize("place", only(["the stack", "slots", "the reference"], "the stack", "the reference"))
def test_picked_rows_go_to_their_targets(place: str) -> None:
    layout, coded = stack("float16", 1)
    ids, places = [2, -1, 0, 3], [3, 0, 0, 1]
    if place == "the reference":
        out = target(layout, len(ids)).cpu()
        coding._picked(coded, layout, out, NUM_ROWS, torch.tensor(ids), places=torch.tensor(places))
        found = out.view(len(ids), -1)
    else:
        found = picked(layout, coded, ids, InSlots(layout, coded) if place == "slots" else None, places)
    assert torch.equal(found[[3, 0, 1]], rows_of(layout, coded)[[2, 0, 3]])
    assert (found[2] == GUARD).all()


NONE = [-1, NUM_ROWS, -(2**40), 2**40, 2]


def assert_none(layout: Layout, coded: torch.Tensor, found: torch.Tensor) -> None:
    """An id that is too large gives the last row. For a negative one nothing is written."""
    assert torch.equal(found[[1, 3, 4]], rows_of(layout, coded)[[3, 3, 2]])
    assert (found[[0, 2]] == GUARD).all()


@pytest.mark.parametrize("dtype", only(["bfloat16", "float8_e4m3fn"], "bfloat16"))
def test_an_invalid_id_reads_nothing_outside_of_slots(dtype: str) -> None:
    layout, coded = stack(dtype, 1)
    assert_none(layout, coded, picked(layout, coded, NONE, InSlots(layout, coded)))


@interpreted
@pytest.mark.parametrize("dtype", only(["bfloat16", "float8_e4m3fn"], "float8_e4m3fn"))
def test_an_invalid_id_reads_nothing_outside_of_a_stack(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, coded = stack(dtype, 1)
    out, ids = target(layout, len(NONE)), on_device(NONE)
    pick = triton_codec.Picking(coded, layout, out, NUM_ROWS)
    with monkeypatch.context() as patch:
        watch(patch, [coded, pick._table, pick._in_order, ids, *again(dtype, out)], [out])
        pick(ids)
    assert_none(layout, coded, out.view(len(NONE), -1).cpu())


def test_picking_again_reads_again() -> None:
    """All addresses are fixed except those of ids and slots. The bytes at them may change."""
    layout, coded = stack("float16", 1)
    out, there = target(layout, 2), coded.to(DEVICE)
    pick = triton_codec.Picking(there, layout, out, NUM_ROWS)
    for ids in ([1, 1], [3, 0], [2]):
        pick(on_device(ids))
        wanted = rows_of(layout, coded)[ids]
        assert torch.equal(out.view(2, -1)[: len(ids)].cpu(), wanted)
    before = out[: layout.raw_nbytes // NUM_ROWS].clone()
    there[: layout.tile_nbytes].bitwise_not_()
    there[2 * layout.tile_nbytes : 3 * layout.tile_nbytes] = there[: layout.tile_nbytes]
    pick(on_device([2]))
    assert torch.equal(out.view(2, -1)[0].cpu(), rows_of(layout, there)[2])
    assert not torch.equal(out[: layout.raw_nbytes // NUM_ROWS], before)


@pytest.mark.parametrize("place", only(["the stack", "slots"], "slots"))
def test_a_row_with_other_bytes_is_detected(place: str) -> None:
    """The checks above fail if an escape, or a word, differs."""
    layout, coded = stack("float16", 1)
    wanted = rows_of(layout, coded)[[3]]
    for at in (3 * layout.tile_nbytes + 5, layout.escapes_at + layout.num_escapes - 1):
        wrong = coded.clone()
        wrong[at] ^= 3
        slots = InSlots(layout, wrong) if place == "slots" else None
        assert not torch.equal(picked(layout, wrong, [3], slots), wanted)


# -- damaged bytes -----------------------------------------------------------------------------------------------------

STARTS: dict[str, Any] = {
    "huge": lambda starts: torch.full_like(starts, 2**31 - 1),
    "negative": lambda starts: torch.full_like(starts, -(2**31)),
    "falling": lambda starts: starts.flip(0),
    "far apart": lambda starts: torch.where(torch.arange(len(starts)) % 2 == 0, -(2**31), 2**31 - 1).to(torch.int32),
    "noise": lambda starts: noise("float8_e4m3fn", 4 * len(starts), 5).view(torch.int32),
    "a little more": lambda starts: starts + 3,
}


def damaged(layout: Layout, coded: torch.Tensor, how: str) -> torch.Tensor:
    coded = coded.clone()
    starts = coded[layout.starts_at : layout.bases_at].view(torch.int32)
    starts.copy_(STARTS[how](starts.clone()))
    return coded


@pytest.mark.parametrize(
    ("how", "dtype"),
    only([(how, kind) for how, kind in product(STARTS, ELEMENTS)], ("a little more", "bfloat16")),
)
def test_damaged_starts_in_slots_have_no_access_out_of_bounds(
    how: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are wrong, but nothing is written next to the target, and nothing is read next to the slots and
    tables."""
    layout, coded = stack(dtype, 1)
    slots, out = InSlots(layout, coded), target(layout, 4)
    slots.heads = damaged(layout, coded, how)[layout.starts_at : layout.escapes_at].to(DEVICE)
    pick, ids = triton_codec.Picking(slots.heads, layout, out, NUM_ROWS, slots.slots), [3, 1, 0, 9]
    arguments = on_device(ids), slots.of(ids)
    with monkeypatch.context() as patch:
        reads = [slots.slots, slots.heads, pick._table, pick._in_order, *arguments, *again(dtype, out)]
        seen = watch(patch, reads, [out]) if DEVICE == "cpu" else None
        pick(*arguments)
    assert seen is None or each_is_written(seen, dtype, out)
    assert_guards_hold(out)


@pytest.mark.few(1)
@interpreted
@pytest.mark.parametrize(("how", "dtype"), thinned(STARTS, ELEMENTS, every=3))
def test_damaged_starts_of_a_stack_have_no_access_out_of_bounds(
    how: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, coded = stack(dtype, 1)
    there, out = damaged(layout, coded, how), target(layout, 2)
    pick, ids = triton_codec.Picking(there, layout, out, NUM_ROWS), on_device([3, 1])
    with monkeypatch.context() as patch:
        reads = [there[: layout.escapes_at + layout.num_escapes], pick._table, pick._in_order, ids, *again(dtype, out)]
        seen = watch(patch, reads, [out])
        pick(ids)
    assert each_is_written(seen, dtype, out)
    assert_guards_hold(out)


# -- without kernels ---------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("tiles", [1, 2])
def test_picking_without_kernels(tiles: int, dtype: str) -> None:
    layout, coded = stack(dtype, tiles)
    room = layout.raw_nbytes + GUARD_NBYTES
    out = torch.full((room,), GUARD, dtype=torch.uint8)
    pick = coding.picking(coded, layout, out, NUM_ROWS)
    for ids in ([1], [3, 0, 3], [2, -1, 1]):
        out.fill_(GUARD)
        pick(torch.tensor(ids))
        end = len(ids) * layout.raw_nbytes // NUM_ROWS
        wanted = rows_of(layout, coded)[ids]
        wanted[[index for index, row in enumerate(ids) if row < 0]] = GUARD
        assert torch.equal(out[:end].view(len(ids), -1), wanted)
        assert (out[end:] == GUARD).all()


def test_slots_need_the_kernel_on_any_device() -> None:
    """There is no other implementation for them."""
    layout, coded = stack("float16", 1)
    slots, out = InSlots(layout, coded), target(layout, 2)
    pick = coding.picking(slots.heads, layout, out, NUM_ROWS, slots.slots)
    pick(on_device([2, 3]), slots.of([2, 3]))
    assert torch.equal(out.view(2, -1).cpu(), rows_of(layout, coded)[[2, 3]])
