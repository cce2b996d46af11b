"""A cache of rows: the stalest are evicted first, and rows of the current step never. The kernels equal the lists, byte
for byte.

Without a GPU the kernels run in Triton's interpreter, which takes tenths of a second for a step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from weightstream.plan.expert_cache import LEAST_USED, MAX_PREFETCHED_ROWS
from weightstream.runtime.experts import slot_cache as slots
from weightstream.runtime.experts import slot_kernels
from weightstream.runtime.experts.slot_cache import Lru, RowPiece, SlotCache, SlotStack, _OnDevice, _State, put_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 77


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter `range` gets arrays of one number, which numpy from 2.4 on does not accept as a
    number."""

    def over(*ends: Any) -> range:
        return range(*(int(end.handle.data.item()) if hasattr(end, "handle") else int(end) for end in ends))

    if DEVICE == "cpu":
        monkeypatch.setattr(slot_kernels, "range", over, raising=False)


class Model:
    """A simple model of the cache, one row at a time."""

    def __init__(self, num_slots: int) -> None:
        self.slot_of: dict[int, int] = {}
        self.empty = list(range(num_slots))
        self.used_at = [-1] * num_slots
        self.guessed: list[int] = []
        self.step = self.hits = self.misses = self.ahead = self.used = 0
        self.late = [0, 0]  # recent predictions: all, and the right ones

    def resolve(self, rows: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        named = set(rows) - {-1}
        there, fetched = named & self.slot_of.keys(), []
        self.hits += len(there)
        for row in sorted(named - there, key=rows.index):
            kept = there | {row for row, _ in fetched}
            olds = self.empty + [slot for owner, slot in self.slot_of.items() if owner not in kept]
            if not olds:
                break
            slot = min(olds, key=lambda slot: (self.used_at[slot], slot))
            self.leave(slot)
            self.slot_of[row] = slot
            fetched.append((row, slot))
        self.misses += len(fetched)
        served = there | {row for row, _ in fetched}
        found = [self.slot_of[row] if row in served else -1 for row in rows]
        for row in served:
            self.used_at[self.slot_of[row]] = self.step
        self.step += 1
        self.judge(named)
        return found, fetched

    def forget(self) -> None:
        self.empty = list(range(len(self.used_at)))
        self.used_at = [-1] * len(self.used_at)
        self.slot_of, self.guessed = {}, []

    def guess(self, rows: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Prefetch into free slots (none before the first step), or into slots of rows that the last step did not use.

        Earlier predictions that were not used count as wrong.
        """
        fetched: list[tuple[int, int]] = []
        self.judge(set())
        all_late, right_late = self.late
        if all_late < 16 or 4 * right_late >= all_late or self.step % 16 == 0:
            for row in dict.fromkeys(rows):
                if len(fetched) == most:
                    break
                if row < 0 or row in self.slot_of:
                    continue
                new = {row for row, _ in fetched}
                empty = [(self.used_at[slot], slot) for slot in self.empty if self.step]
                kept = set(rows) | new
                held = [(self.used_at[slot], slot) for owner, slot in self.slot_of.items() if owner not in kept]
                olds = [old for old in empty + held if old[0] < self.step - 1]
                if not olds:
                    break
                _, slot = min(olds)
                self.leave(slot)
                self.slot_of[row] = slot
                fetched.append((row, slot))
        self.guessed = [row for row, _ in fetched]
        self.ahead += len(fetched)
        return fetched

    def judge(self, named: set[int]) -> None:
        right = len(named & set(self.guessed))
        self.used += right
        self.late = [self.late[0] + len(self.guessed), self.late[1] + right]
        if self.late[0] > 64:
            self.late = [number // 2 for number in self.late]
        self.guessed = []

    def leave(self, slot: int) -> None:
        if slot in self.empty:
            self.empty.remove(slot)
        else:
            del self.slot_of[next(owner for owner, place in self.slot_of.items() if place == slot)]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.hits, self.misses, self.ahead, self.used


def guesses(rows: Sequence[int], num_rows: int, rng: random.Random) -> list[int]:
    """Predictions before a step of these rows: most of them and some others, or for a time only others; duplicates,
    or none."""
    others = rng.choices(range(-1, num_rows), k=3)
    right = [row for row in rows if rng.random() < 0.7]
    return rng.sample(found := right + others, len(found)) if rng.random() < 0.9 else others


def steps(num_rows: int, num_slots: int, count: int, seed: int) -> Iterator[list[int]]:
    """Rows of steps. Some rows are used far more often than others, some are repeated in a step, some steps use all
    slots, and
    some have more rows than slots, with gaps between."""
    rng, rows = random.Random(seed), list(range(num_rows))
    for index in range(count):
        if index % 50 == 0:
            rng.shuffle(rows)
        if index % 5 == 4:
            yield rng.sample(rows, num_slots)
            continue
        if index % 7 == 3:
            more = rng.sample(rows, min(num_rows, 2 * num_slots))
            yield [row if rng.random() < 0.8 else -1 for row in more]
            continue
        named = [
            rows[min(int(rng.expovariate(3 / num_rows)), num_rows - 1)] for _ in range(rng.randint(1, 2 * num_slots))
        ]
        there = list(dict.fromkeys(named))[:num_slots]
        yield [row for row in named if row in there]


@pytest.mark.few(2)
@pytest.mark.parametrize(("num_rows", "num_slots"), [(16, 4), (16, 1), (40, 13), (8, 8), (128, 32)])
def test_lru_equals_a_simple_model(num_rows: int, num_slots: int) -> None:
    table, model = Lru(num_slots), Model(num_slots)
    kinds = set()
    for rows in steps(num_rows, num_slots, 2000, seed=num_slots):
        found, missed = table.resolve(rows)
        assert (found, missed) == model.resolve(rows)
        assert (table.hits, table.misses) == (model.hits, model.misses)
        there = {(row, slot) for row, slot in zip(rows, found, strict=True) if slot >= 0}
        named = set(rows) - {-1}
        assert len(there) == len({slot for _, slot in there}) == min(len(named), num_slots), "two rows share a slot"
        kinds.add((len(missed) > 0, len(named) >= num_slots, len(set(rows)) < len(rows)))
    assert {misses for misses, _, _ in kinds} == {again for *_, again in kinds} == {False, True}
    assert {full for _, full, _ in kinds} == {False, True}
    assert min(table.hits, table.misses) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("recall", [0.0, 0.2, 0.9])
@pytest.mark.parametrize(("num_rows", "num_slots"), [(16, 4), (40, 13), (8, 8), (128, 32)])
def test_predicted_rows_are_prefetched_while_predictions_are_right(
    num_rows: int, num_slots: int, recall: float
) -> None:
    table, model, rng = Lru(num_slots), Model(num_slots), random.Random(num_slots)
    numbers, off = set(), 0
    for step, rows in enumerate(steps(num_rows, num_slots, 2000, seed=num_slots)):
        if step % 3:
            guess = [row if rng.random() < recall else rng.randrange(num_rows) for row in rows]
            most = rng.choice((1, 2, 8))
            last = {row for row, slot in model.slot_of.items() if model.used_at[slot] == model.step - 1}
            fetched = table.guess(guess, most)
            assert fetched == model.guess(guess, most)
            assert last <= model.slot_of.keys(), "a row of the last step was evicted"
            assert len(fetched) <= most
            numbers.add(len(fetched))
            off += not fetched
        assert table.resolve(rows) == model.resolve(rows)
        assert table.counts() == model.counts
    assert numbers >= ({0, 1, 2} if num_rows > num_slots else {0})
    if recall == 0.9 and num_rows == 128:
        assert table.used > 0.5 * table.ahead > 500
    if recall == 0.0 and num_rows == 128:
        assert off > 1000, "wrong predictions continue"
        assert table.ahead > 100, "predictions are not tried again"


def test_a_wrong_prediction_is_evicted_next_and_evicts_nothing_of_the_last_step() -> None:
    table = Lru(4)
    assert table.guess([1, 2], 2) == [], "nothing is known yet"
    table.resolve([0, 1])
    table.resolve([2, 3])
    assert table.guess([0, 9, 8, 7], 3) == [(9, 1)], "0 is predicted, 2 and 3 belong to the last step"
    assert table.resolve([2, 4]) == ([2, 0], [(4, 0)]), "0 and 9 have the same age, and 0 has the first slot"
    assert table.resolve([2, 5]) == ([2, 1], [(5, 1)]), "9 is evicted; 3 and 4 were used since"
    assert table.guess([3, 7, 7, -1, 6], 2) == [(7, 0)]
    assert table.resolve([7, 2]) == ([0, 2], [])
    assert table.counts() == (4, 6, 2, 1)


def test_the_stalest_rows_are_evicted_in_the_order_of_slots() -> None:
    table = Lru(4)
    assert table.resolve([5, 6, 5, 7]) == ([0, 1, 0, 2], [(5, 0), (6, 1), (7, 2)])
    assert table.resolve([7, 8]) == ([2, 3], [(8, 3)])
    assert table.resolve([1]) == ([0], [(1, 0)]), "5 and 6 have the same age: the first slot"
    assert table.resolve([2, 8]) == ([1, 3], [(2, 1)])
    assert table.resolve([3, 7]) == ([0, 2], [(3, 0)]), "7 is the stalest, but belongs to this step"
    assert table.resolve([9, 4, 9, 0]) == ([1, 3, 1, 0], [(9, 1), (4, 3), (0, 0)]), "3 and 7 have the same age"
    assert (table.hits, table.misses) == (3, 10)


def test_rows_without_a_slot_are_left_for_the_next_call() -> None:
    """Each row is fetched once, however few slots there are."""
    table, rows, calls = Lru(3), [4, -1, 0, 1, 2, 3], []
    while set(rows) != {-1}:
        found, _ = table.resolve(rows)
        calls.append([row for row, slot in zip(rows, found, strict=True) if slot >= 0])
        rows = [-1 if slot >= 0 else row for row, slot in zip(rows, found, strict=True)]
    assert calls == [[4, 0, 1], [2, 3]]
    assert (table.hits, table.misses) == (0, 5)
    assert table.resolve([3, 1, 5, 6]) == ([1, 2, 0, -1], [(5, 0)]), "1 was not overwritten, 4 was, then 0"


def test_forgotten_rows_are_fetched_again() -> None:
    table = Lru(4)
    table.resolve([1, 2, 3])
    table.forget()
    assert table.resolve([3, 1]) == ([0, 1], [(3, 0), (1, 1)])
    assert table.resolve([2]) == ([2], [(2, 2)])


# -- memory ------------------------------------------------------------------------------------------------------------

LENGTHS = [0, 1, 8, 61, 8184, 8191, 8192, 8197, 2 * 8192, 20_000]


class Rig:
    """Two stacks: one of two parts, the second of which has rows of different lengths, and one of a single part.

    Most parts begin and end inside of words, in host memory and in slots. Memory is poisoned, including before, between
    and after the parts.
    """

    def __init__(self, num_rows: int, num_slots: int, seed: int = 0) -> None:
        chance, rng = torch.Generator().manual_seed(seed), random.Random(seed)

        def row(nbytes: int) -> torch.Tensor:
            skipped = rng.choice((0, 0, 1, 2, 6, 7))
            data = torch.randint(0, 256, (skipped + nbytes + 8,), dtype=torch.uint8, generator=chance)
            return data.to(DEVICE)[skipped : skipped + nbytes]

        first = RowPiece(rows=tuple(row(8192 + 8) for _ in range(num_rows)), at=0)
        second = RowPiece(rows=tuple(row(rng.choice(LENGTHS)) for _ in range(num_rows)), at=8192 + 61)
        alone = RowPiece(rows=tuple(row(3) for _ in range(num_rows)), at=128)
        self.whole = torch.full((num_slots * 64 * 1024,), POISON, dtype=torch.uint8, device=DEVICE)
        parts = self.whole.view(2, num_slots, 32 * 1024)
        self.stacks = [SlotStack(parts[0], [first, second]), SlotStack(parts[1, :, : 2 * 1024], [alone])]
        self.wanted = self.whole.clone()
        parts = self.wanted.view(2, num_slots, 32 * 1024)
        self._targets = [parts[0], parts[1, :, : 2 * 1024]]

    def fetched(self, missed: Sequence[tuple[int, int]]) -> None:
        """The expected content of memory."""
        for row, slot in missed:
            for target, (_, pieces) in zip(self._targets, self.stacks, strict=True):
                for piece in pieces:
                    target[slot, piece.at : piece.at + piece.rows[row].numel()] = piece.rows[row]


def on_device(rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=DEVICE)


@pytest.mark.few(1)
@pytest.mark.parametrize("kernels", [False, True], ids=["lists", "kernels"])
@pytest.mark.parametrize(("num_rows", "num_slots"), [(12, 4), (7, 5), (5, 1)])
def test_slots_have_the_rows_and_no_other_byte_changes(num_rows: int, num_slots: int, kernels: bool) -> None:
    rig, model = Rig(num_rows, num_slots), Model(num_slots)
    slots = _OnDevice(rig.stacks, num_rows) if kernels else SlotCache(rig.stacks, num_rows)
    numbers, rng, dtypes = set(), random.Random(num_slots), random.Random(num_rows)
    for rows in steps(num_rows, num_slots, 16 if kernels else 400, seed=7):
        if rng.random() < 0.6:
            guess, most = guesses(rows, num_rows, rng), rng.choice((1, 2, MAX_PREFETCHED_ROWS))
            slots.fetch_ahead(on_device(guess), most)
            rig.fetched(model.guess(guess, most))
            assert torch.equal(rig.whole, rig.wanted), guess
        wanted, missed = model.resolve(rows)
        ids = on_device(rows).to(dtypes.choice((torch.int32, torch.int64)))
        found = slots.resolve(ids)
        assert found.dtype is ids.dtype
        assert found.tolist() == wanted
        rig.fetched(missed)
        assert torch.equal(rig.whole, rig.wanted), missed
        numbers.add(len(missed))
    assert slots.counts() == model.counts
    assert {0, 1, min(num_slots, 2)} <= numbers
    assert num_slots == 1 or min(model.counts) > 0


def assert_same_tables(slots: _OnDevice, table: Lru, num_rows: int) -> None:
    assert slots._tables.owner_of.tolist() == table._owners
    assert slots._tables.stamps.tolist() == table._stamps
    owners = {row: slot for slot, row in enumerate(table._owners)}
    assert slots._tables.slot_of.tolist() == [owners.get(row, -1) for row in range(num_rows)]
    step, _, *counted = slots._tables.state.tolist()
    assert step == table._step
    assert counted == [
        table.hits,
        table.misses,
        len(table._ahead),
        table.ahead,
        table.used,
        table._recent,
        table._useful,
    ]
    assert set(slots._tables.first_at.tolist()) == {slot_kernels.NEVER.value}


def assert_missed(pairs: torch.Tensor, missed: Sequence[tuple[int, int]]) -> None:
    assert pairs.view(-1, 2)[: len(missed)].tolist() == [list(pair) for pair in missed]


SIZES = [(9, 1), (9, 3), (9, 4), (16, 7), (5, 8), (1, 2)]  # rows, and slots


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_rows", "num_slots"),
    [pytest.param(*size, marks=[pytest.mark.stress] * (size not in ((9, 3), (5, 8)))) for size in SIZES],
)
def test_the_tables_of_the_kernels_equal_those_of_the_lists(num_rows: int, num_slots: int) -> None:
    """Calls and predictions in any order, invalid ids, and rows that are forgotten in between."""
    rig, table, rng = Rig(num_rows, num_slots), Lru(num_slots), random.Random(4)
    slots, kinds = _OnDevice(rig.stacks, num_rows), []
    for _ in range(28):
        ids = [rng.choice([-1, num_rows, 2**40]) if rng.random() < 0.1 else rng.randrange(num_rows) for _ in range(5)]
        ids = ids[: rng.choice((1, 3, 5))]
        rows, most = [min(row, num_rows - 1) for row in ids], rng.choice((0, 1, 2, 9))
        kinds.append(rng.choices(("resolve", "guess", "forget"), (5, 6, 1))[0])
        if kinds[-1] == "resolve":
            found, missed = table.resolve(rows)
            assert slots.resolve(on_device(ids)).tolist() == found
            assert_missed(slots._tables.missed, missed)
        elif kinds[-1] == "guess":
            missed = table.guess(rows, most)
            slots.fetch_ahead(on_device(ids), most)
            assert_missed(slots._tables.ahead, missed)
        else:
            missed = []
            table.forget()
            slots.forget()
        rig.fetched(missed)
        assert torch.equal(rig.whole, rig.wanted), kinds
        assert_same_tables(slots, table, num_rows)
    assert "guess guess" in " ".join(kinds)


def test_forgotten_predictions_are_not_hits() -> None:
    table = Lru(4)
    for row in range(4):
        table.resolve([row])
    assert table.guess([7, 8], 2)
    table.forget()
    table.resolve([7, 8])
    assert table.counts() == (0, 6, 2, 0)


def test_predictions_for_a_layer_that_is_never_called_end() -> None:
    """The first layer of a second tower follows the last of the first one in the order, and may not run."""
    table, rng = Lru(8), random.Random(0)
    for row in range(8):
        table.resolve([row])
    for _ in range(500):
        table.guess([rng.randrange(64) for _ in range(4)], 4)
    assert table.ahead < 100


def test_no_more_rows_are_predicted_than_the_table_can_hold() -> None:
    rig = Rig(40, 20)
    slots = _OnDevice(rig.stacks, 40)
    whole = torch.full((64,), POISON, dtype=torch.int32, device=DEVICE)
    slots._tables = slots._tables._replace(ahead=whole[: 2 * MAX_PREFETCHED_ROWS])
    for row in range(3):
        slots.resolve(on_device([row]))
    slots.fetch_ahead(on_device(list(range(10, 26))), 12)
    assert slots._tables.state[_State.NUM_AHEAD].item() == MAX_PREFETCHED_ROWS
    assert set(whole[2 * MAX_PREFETCHED_ROWS :].tolist()) == {POISON}


def test_an_invalid_id_has_no_access_outside() -> None:
    """Compressed rows behave like this too: a damaged router must do no harm."""
    rig = Rig(9, 4)
    slots = _OnDevice(rig.stacks, 9)
    assert slots.resolve(on_device([-(2**40), 3, 2**40])).tolist() == [-1, 0, 1]
    rig.fetched([(3, 0), (8, 1)])
    assert torch.equal(rig.whole, rig.wanted)
    assert slots.resolve(on_device([8, 0, 9, -1])).tolist() == [1, 2, 1, -1]
    assert slots.counts() == (1, 3, 0, 0)


@pytest.mark.parametrize("nbytes", [2, 8, 12, 8192, 70_000, 70_006])
@pytest.mark.parametrize("kernels", [False, True], ids=["slices", "kernels"])
def test_rows_are_copied_to_their_place_in_the_stack(kernels: bool, nbytes: int) -> None:
    stride = -(-nbytes // 8) * 8 + 64
    found, places = on_device([2, -1, 0, -1, 2]), on_device([4, 0, 0, -1, 2])
    whole = torch.full((7, nbytes // 2), POISON, dtype=torch.int16, device=DEVICE)
    slots, target = (
        torch.randint(0, 256, (3, stride), dtype=torch.uint8, device=DEVICE),
        whole[1:6].unflatten(1, (-1, 1)),
    )
    wanted = whole.clone()
    for row, slot in ((4, 2), (0, 0), (2, 2)):
        wanted[1 + row] = slots[slot, :nbytes].view(torch.int16)
    if kernels:
        grid, rows = (5, -(-nbytes // 65536)), target.flatten(1).view(torch.uint8)
        slot_kernels.copy_row_chunk[grid](slots, stride, rows, nbytes, found, places, CHUNK=65536)
    else:
        put_rows(slots, target, None, found, places=places)
    assert torch.equal(whole, wanted)


@pytest.mark.parametrize("kernels", [False, True], ids=["lists", "kernels"])
def test_changed_rows_are_fetched_after_they_are_forgotten(kernels: bool) -> None:
    rig = Rig(9, 4)
    slots = _OnDevice(rig.stacks, 9) if kernels else SlotCache(rig.stacks, 9)
    slots.resolve(on_device([1, 2, 3]))
    rig.fetched([(1, 0), (2, 1), (3, 2)])
    for _, pieces in rig.stacks:
        for piece in pieces:
            piece.rows[2].bitwise_not_()
    slots.resolve(on_device([2]))
    assert torch.equal(rig.whole, rig.wanted)
    slots.forget()
    assert slots.resolve(on_device([3, 2])).tolist() == [0, 1]
    rig.fetched([(3, 0), (2, 1)])
    assert torch.equal(rig.whole, rig.wanted)
    assert slots.counts() == (1, 5, 0, 0)


def test_a_slot_that_is_not_fetched_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above fail if one part is not fetched."""
    rig = Rig(9, 4)
    slots = _OnDevice(rig.stacks, 9)
    chunks = slots._tables.chunks
    chunks[-1] = chunks[0]
    slots.resolve(on_device([4]))
    rig.fetched([(4, 0)])
    assert not torch.equal(rig.whole, rig.wanted)


def test_the_lists_rate_predictions_with_the_numbers_of_the_kernels() -> None:
    lists = slots._RECENT, slots._FEW, slots._PROBES, MAX_PREFETCHED_ROWS
    assert 1 / slots._FEW == LEAST_USED
    kernels = slot_kernels._RECENT, slot_kernels._FEW, slot_kernels._PROBES, slot_kernels.MOST_AHEAD
    assert lists == tuple(number.value for number in kernels)


@pytest.mark.stress
def test_useless_predictions_end_on_the_device_too() -> None:
    rig, table = Rig(12, 4), Lru(4)
    device = _OnDevice(rig.stacks, 12)
    fetched = []
    for step in range(40):
        guess = [4 + step % 7]
        device.fetch_ahead(on_device(guess), 2)
        fetched.append(len(table.guess(guess, 2)))
        assert device._tables.state[_State.NUM_AHEAD].item() == fetched[-1]
        rows = [step % 2]
        assert device.resolve(on_device(rows)).tolist() == table.resolve(rows)[0]
    assert sum(fetched[:18]) >= 14
    assert sum(fetched[18:]) == 1, fetched
