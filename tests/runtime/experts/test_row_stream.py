"""A stream of rows brings the rows that are asked for, in order, in waves; copies run ahead of their readers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from stream_rig import NUM_ROWS, Clocks, HostStack, buffer_of, host_stacks, streams_of, with_slots
from weightstream.errors import InvariantError
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.experts.row_stream import RowStream
from weightstream.runtime.weights.picks import RowsAt

EVERY = list(range(NUM_ROWS))


def read(stream: RowStream, stacks: Sequence[HostStack], rows: Sequence[int], most: int) -> list[int]:
    """Read a whole stream, and compare; returns the rows in the order in which they came."""
    waves, found = stream.cut(rows, most), list[int]()
    for wave, leaves in zip(waves, stream.bring(waves), strict=True):
        assert 0 < len(wave.rows) <= (most if wave.at is RowsAt.SLOTS else min(most, stream.most))
        for stack, leaf in zip(stacks, leaves, strict=True):
            held = leaf[list(wave.places)].view(torch.uint8)
            assert torch.equal(held, stack.values[list(wave.rows)].view(torch.uint8))
        found += wave.rows
    return found


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


@pytest.mark.parametrize("rows", [EVERY, [7], [0, 1, 2, 5, 6, 11], [3, 4, 2], []], ids=str)
@pytest.mark.parametrize("most", [1, 4, 100])
@pytest.mark.parametrize("slotted", [(), (0, 3, 4, 11)])
def test_waves_hold_their_rows(rows: list[int], most: int, slotted: tuple[int, ...], backend: CpuBackend) -> None:
    """Rows that have a slot are read there: their host memory holds other bytes."""
    stacks = host_stacks()
    cache = with_slots(stacks, slotted) if slotted else None
    (stream,) = streams_of(stacks, buffer_of(backend), 1, cache)
    assert 5 <= stream.most < NUM_ROWS
    for _ in range(3):
        held = [row for row in rows if row in slotted]
        assert read(stream, stacks, rows, most) == held + [row for row in rows if row not in slotted]


def test_copies_run_ahead_as_far_as_there_is_room(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the next unit's rows; rows of a wave that the next unit does not read are left out, with waves of such."""
    stacks, copied = host_stacks(), list[tuple[int, list[int]]]()
    first, second, third = streams_of(stacks, buffer_of(backend, num_rows=2), 3)
    plain_copied = RowStream.copied

    def spied(self: RowStream, rows: Sequence[int], memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memory.fill_(255)  # what is not copied is not read
        copied.append((self.unit, list(rows)))
        return plain_copied(self, rows, memory)

    monkeypatch.setattr(RowStream, "copied", spied)
    pairs = [EVERY[at : at + 2] for at in range(0, NUM_ROWS, 2)]
    assert read(first, stacks, EVERY, 2) == EVERY
    assert copied == [(0, pair) for pair in pairs] + [(1, pair) for pair in pairs[:5]]
    copied.clear()
    assert read(second, stacks, [1, 6, 7, 8, 9, 10], 2) == [1, 6, 7, 8, 9, 10]
    assert copied == [(1, [10])] + [(2, pair) for pair in pairs[:5]], "the first ten rows of unit 1 had come"
    copied.clear()
    assert read(third, stacks, [8, 2, 1], 2) == [8, 2, 1]
    assert copied == [(2, [8, 2]), (2, [1])], "rows in another order are copied again"


@pytest.mark.parametrize("slotted", [EVERY[2:], EVERY[::2], EVERY])
def test_copies_run_ahead_to_several_streams(
    slotted: list[int], backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows those of several streams have room: each is copied once."""
    stacks, copied = host_stacks(), list[tuple[int, list[int]]]()
    cache = with_slots(stacks, slotted)
    streams = streams_of(stacks, buffer_of(backend, num_rows=2), 5, cache)
    plain_copied = RowStream.copied

    def spied(self: RowStream, rows: Sequence[int], memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memory.fill_(255)
        copied.append((self.unit, list(rows)))
        return plain_copied(self, rows, memory)

    monkeypatch.setattr(RowStream, "copied", spied)
    left = [row for row in EVERY if row not in slotted]
    for stream, asked in zip(streams, (EVERY, EVERY[1:], EVERY, EVERY[:3], EVERY), strict=True):
        assert sorted(read(stream, stacks, asked, 2)) == asked
    assert sorted(copied) == sorted((unit, left[at : at + 2]) for unit in range(5) for at in range(0, len(left), 2))


@pytest.mark.parametrize("order", ["other stream", "fewer at a time"])
def test_waves_of_another_call_are_copied_again(order: str, backend: CpuBackend) -> None:
    stacks = host_stacks()
    first, second, third = streams_of(stacks, buffer_of(backend), 3)
    assert read(first, stacks, EVERY, 3) == EVERY
    if order == "other stream":
        assert read(third, stacks, EVERY, 3) == EVERY
    assert read(second, stacks, EVERY, 2) == EVERY
    assert read(first, stacks, EVERY, 5) == EVERY


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_compute_and_copies_wait_for_each_other(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave is read after its copy, and overwritten after its last read: by events, whatever runs first."""
    clocks = Clocks()
    stacks = host_stacks()
    buffer = buffer_of(clocks, num_rows)
    streams = streams_of(stacks, buffer, 3)
    monkeypatch.setattr(RowStream, "copied", clocks.watched(RowStream.copied))
    generator = torch.Generator().manual_seed(num_rows)
    for turn in range(40):
        clocks.use(buffer.memory)  # decoding, before the step
        for stream in streams:
            share = torch.rand((), generator=generator).item()
            rows = [row for row in EVERY if torch.rand((), generator=generator).item() < share]
            waves = stream.cut(rows, 1 + turn % 3)
            for index, leaves in enumerate(stream.bring(waves)):
                clocks.read(leaves)
                if turn % 7 == 6 and index == 1:
                    break  # the forward fails, or does not ask for more
        if turn % 2:
            buffer.drop()
            clocks.use(buffer.memory)
        else:
            buffer.drop()
    assert clocks.num_reads > 100


def test_an_error_in_a_copy_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute waits for the copies that were queued before it, although their wave was never begun."""
    clocks = Clocks()
    stacks = host_stacks()
    buffer = buffer_of(clocks)
    first, *_ = streams_of(stacks, buffer, 2)
    plain_copied = clocks.watched(RowStream.copied)

    def failing(self: RowStream, rows: Sequence[int], memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain_copied(self, rows, memory)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RowStream, "copied", failing)
        with pytest.raises(KeyboardInterrupt):
            read(first, stacks, EVERY, 3)
    buffer.drop()  # as after every failed step
    clocks.use(buffer.memory)
    assert read(first, stacks, EVERY, 3) == EVERY


def test_a_wave_that_was_not_begun(backend: CpuBackend) -> None:
    """Waves that other code has dropped are not read."""
    stacks = host_stacks()
    buffer = buffer_of(backend)
    (stream,) = streams_of(stacks, buffer, 1)
    coming = stream.cut(EVERY, 4)
    assert read(stream, stacks, EVERY, 4) == EVERY
    with pytest.raises(InvariantError, match="not begun"):
        next(stream.bring([wave._replace(at=RowsAt.COMING) for wave in coming]))


def test_a_failed_forward_that_is_freed_late(backend: CpuBackend) -> None:
    """A traceback keeps its stream, and may be freed by any later step."""
    stacks = host_stacks()
    buffer = buffer_of(backend, num_rows=1)
    (stream,) = streams_of(stacks, buffer, 1)
    failed = stream.bring(stream.cut(EVERY, 1))
    next(failed)
    buffer.drop()
    waves = stream.cut(EVERY, 1)
    for wave, leaves in zip(waves, stream.bring(waves), strict=True):
        failed.close()
        for stack, leaf in zip(stacks, leaves, strict=True):
            held = leaf[list(wave.places)].view(torch.uint8)
            assert torch.equal(held, stack.values[list(wave.rows)].view(torch.uint8))


@pytest.mark.parametrize("again", [EVERY, EVERY[:2], EVERY[3:], [8, 1]], ids=str)
def test_a_stream_that_was_left_in_the_middle(again: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of it is overwritten only after these reads."""
    clocks = Clocks()
    stacks = host_stacks()
    first, second, _ = streams_of(stacks, buffer_of(clocks, 2), 3)
    monkeypatch.setattr(RowStream, "copied", clocks.watched(RowStream.copied))
    assert read(first, stacks, EVERY, 2) == EVERY
    for _ in range(3):
        coming = second.bring(second.cut(EVERY, 2))
        clocks.read(next(coming))
        clocks.read(next(coming))
        waves = second.cut(again, 2)
        for leaves in second.bring(waves):
            clocks.read(leaves)
    assert clocks.num_reads >= 3 * (2 + len(again[::2]))


def test_a_call_of_few_rows_copies_none_of_the_next_unit(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next unit reads as few, and which ones is unknown."""
    stacks, copied = host_stacks(), list[tuple[int, list[int]]]()
    streams = streams_of(stacks, buffer_of(backend), 3)
    plain_copied = RowStream.copied

    def spied(self: RowStream, rows: Sequence[int], memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copied.append((self.unit, list(rows)))
        return plain_copied(self, rows, memory)

    monkeypatch.setattr(RowStream, "copied", spied)
    for _ in range(2):
        copied.clear()
        for stream, rows in zip(streams, ([2, 7], [1, 2, 3], [5]), strict=True):
            assert read(stream, stacks, rows, 4) == rows
        assert copied == [(0, [2, 7]), (1, [1, 2, 3]), (2, [5])]
