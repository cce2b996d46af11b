"""The staging ring: every byte once and in order, never more than the buffers, and every buffer is given back."""

from __future__ import annotations

import gc
import mmap
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weightstream
from repeats import examples
from weightstream.errors import InvariantError, StoreError
from weightstream.store.mapping import FileMapping
from weightstream.store.readers import DirectFile
from weightstream.store.staging import MemorySource, StagedPiece, StagedReading, Staging

PAGE = 4096
PATIENCE_S = 20  # how long a broken ring may hang
T = TypeVar("T")


def aligned(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def buffers(count: int, nbytes: int = PAGE) -> list[torch.Tensor]:
    return [aligned(nbytes) for _ in range(count)]


def noise(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(nbytes).randbytes(max(nbytes, 1))), dtype=torch.uint8)[:nbytes]


def finishes(call: Callable[..., T], *arguments: Any) -> T:
    """The call's result, or its error. The test fails if it hangs."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((call(*arguments), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert result, "it hangs"
    value, error = result.pop()
    if error is not None:
        raise error
    return value


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.001)


def nothing_happens() -> None:
    """Wait long enough for a forbidden event to happen."""
    time.sleep(0.03)


def joined(reading: StagedReading) -> torch.Tensor:
    """The bytes of a reading, whose pieces follow each other without gaps."""
    parts, position = [torch.empty(0, dtype=torch.uint8)], 0
    for piece in reading:
        assert piece.begin == position
        assert piece.end == position + piece.memory.numel() > position
        position = piece.end
        parts.append(piece.memory.clone())
        piece.release()
    return torch.cat(parts)


class Pages:
    """A source of numbered pages that records the begun reads, and holds or fails some of them."""

    def __init__(self, hold: Sequence[int] = (), fail: Sequence[int] = ()) -> None:
        self.begun: list[int] = []
        self.gates = {page: threading.Event() for page in hold}
        self._fail = fail

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        page = begin // PAGE
        self.begun.append(page)
        if page in self.gates:
            assert self.gates[page].wait(PATIENCE_S)
        if page in self._fail:
            raise StoreError(f"page {page} is bad")
        return memory[: end - begin].fill_(page)

    def open(self) -> None:
        for gate in self.gates.values():
            gate.set()


def pages(reading: StagedReading) -> list[int]:
    """The numbers of the pages that a reading of whole pages returns."""
    found = []
    for piece in reading:
        found.extend(piece.memory.unique().tolist())
        piece.release()
    return found


def all_come_back(staging: Staging, count: int) -> bool:
    """Check that all buffers are free, by a reading that takes all of them and gives them back."""

    def hold() -> list[StagedPiece]:
        return list(islice(staging.start(Pages(), 0, count * PAGE), count))

    held = finishes(hold)
    assert len({piece.memory.data_ptr() for piece in held}) == count
    for piece in held:
        piece.release()
    return True


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weightstream-read")]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    if threads():
        gc.collect()  # pytest's record of an error refers to the frames that raised it
    eventually(lambda: not threads())


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Buffers must be given back at once, not when the collector finds a cycle."""
    gc.disable()
    yield
    gc.enable()


# -- values and order ------------------------------------------------------------------------------------------------


@examples(100)
@given(data=st.data(), nbytes=st.integers(1, 12 * PAGE), shape=st.tuples(*[st.integers(1, 4)] * 3))
def test_any_range_through_any_ring(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, nbytes: int, shape: tuple[int, int, int]
) -> None:
    num_buffers, num_pages, num_threads = shape
    begin = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(begin, nbytes))
    path = tmp_path_factory.getbasetemp() / "streamed"
    path.write_bytes(noise(nbytes).numpy().tobytes())
    file = DirectFile(FileMapping(path))
    with closing(Staging(buffers(num_buffers, num_pages * PAGE), num_threads)) as staging:
        for source in (file, MemorySource(noise(nbytes))):
            assert torch.equal(finishes(joined, staging.start(source, begin, end)), noise(nbytes)[begin:end])


def test_pieces_are_cut_at_multiples_of_a_buffer_in_the_source() -> None:
    ring = buffers(2, 2 * PAGE)
    with closing(Staging(ring)) as staging:
        cuts = []
        for piece in staging.start(MemorySource(noise(9 * PAGE)), PAGE + 1, 6 * PAGE + 3):
            assert piece.memory.data_ptr() in {buffer.data_ptr() for buffer in ring}
            cuts.append((piece.begin + PAGE + 1, piece.end + PAGE + 1))
            piece.release()
    assert cuts == [(PAGE + 1, 2 * PAGE), (2 * PAGE, 4 * PAGE), (4 * PAGE, 6 * PAGE), (6 * PAGE, 6 * PAGE + 3)]


def test_an_empty_range_has_no_pieces() -> None:
    with closing(Staging(buffers(1))) as staging:
        assert finishes(list, staging.start(Pages(), 5, 5)) == []


def test_pieces_come_in_order_whichever_read_ends_first() -> None:
    source = Pages(hold=[0])
    with closing(Staging(buffers(4), num_threads=2)) as staging:
        reading = staging.start(source, 0, 4 * PAGE)
        eventually(lambda: len(source.begun) == 4)  # one thread continues while the other is held at the first page
        source.open()
        assert finishes(pages, reading) == [0, 1, 2, 3]


def test_a_piece_is_returned_before_the_next_is_read() -> None:
    source = Pages(hold=[1])
    with closing(Staging(buffers(2))) as staging:
        pieces = iter(staging.start(source, 0, 2 * PAGE))
        assert finishes(next, pieces).memory.unique().tolist() == [0]
        source.open()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_requests_in_flight(num_threads: int) -> None:
    barrier, most, inside = threading.Barrier(num_threads), 0, 0
    lock = threading.Lock()

    class Together(Pages):
        def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
            nonlocal most, inside
            with lock:
                inside += 1
                most = max(most, inside)
            barrier.wait(PATIENCE_S)
            with lock:
                inside -= 1
            return super().read(begin, end, memory)

    with closing(Staging(buffers(4), num_threads)) as staging:
        assert finishes(pages, staging.start(Together(), 0, 6 * PAGE)) == list(range(6))
    assert most == num_threads


def test_start_returns_at_once_and_reads_ahead() -> None:
    source = Pages(hold=range(2))
    with closing(Staging(buffers(3), num_threads=1)) as staging:
        assert threads() == []
        reading = staging.start(source, 0, 2 * PAGE)
        eventually(lambda: source.begun == [0])
        source.open()
        eventually(lambda: source.begun == [0, 1])  # nothing has been requested yet
        assert finishes(pages, reading) == [0, 1]


# -- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_no_more_is_read_than_fits_the_buffers(num_buffers: int) -> None:
    source = Pages()
    with closing(Staging(buffers(num_buffers), num_threads=4)) as staging:
        reading = iter(staging.start(source, 0, 10 * PAGE))
        for page in range(10):
            eventually(lambda page=page: len(source.begun) == min(page + num_buffers, 10))
            nothing_happens()
            assert len(source.begun) == min(page + num_buffers, 10)
            piece = finishes(next, reading)
            assert piece.memory.unique().tolist() == [page]
            piece.release()


def test_a_buffer_is_overwritten_only_after_it_is_drained() -> None:
    source, gate, entered = Pages(), threading.Event(), threading.Event()

    def drained() -> None:
        entered.set()
        assert gate.wait(PATIENCE_S)

    with closing(Staging(buffers(1))) as staging:
        reading = iter(staging.start(source, 0, 2 * PAGE))
        first = finishes(next, reading)
        first.release(drained)
        assert entered.wait(PATIENCE_S)
        nothing_happens()
        assert source.begun == [0]
        assert first.memory.unique().tolist() == [0]
        gate.set()
        assert finishes(next, reading).memory.unique().tolist() == [1]


def test_a_draining_buffer_blocks_no_other() -> None:
    source, gate = Pages(), threading.Event()
    with closing(Staging(buffers(2), num_threads=2)) as staging:
        reading = iter(staging.start(source, 0, 4 * PAGE))
        held = finishes(lambda: [next(reading), next(reading)])
        held[0].release(lambda: [None, gate.wait(PATIENCE_S)][0])
        held[1].release()
        eventually(lambda: sorted(source.begun) == [0, 1, 3])
        gate.set()
        assert finishes(lambda: [piece.memory.unique().tolist() for piece in reading]) == [[2], [3]]


def test_a_failed_drain_is_the_error_of_the_next_piece() -> None:
    calls: list[int] = []

    def drained() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise StoreError("the device is gone")

    with closing(Staging(buffers(1))) as staging:
        reading = iter(staging.start(Pages(), 0, 2 * PAGE))
        finishes(next, reading).release(drained)
        with pytest.raises(StoreError, match="the device is gone"):
            finishes(next, reading)
        assert all_come_back(staging, 1)
    assert calls == [0, 1]  # it was never drained, so it is not written


def test_a_second_release_does_nothing() -> None:
    source = Pages()
    with closing(Staging(buffers(1))) as staging:
        reading = iter(staging.start(source, 0, 3 * PAGE))
        first = finishes(next, reading)
        first.release()
        first.release()
        second = finishes(next, reading)
        first.release()
        nothing_happens()
        assert sorted(source.begun) == [0, 1]
        assert second.memory.unique().tolist() == [1]
        second.release()


# -- many readings ---------------------------------------------------------------------------------------------------


def test_a_later_reading_gets_no_buffer_before_an_earlier_one() -> None:
    """While the first page is held, the first reading gets both buffers, and later readings wait."""
    slow, later = Pages(hold=[0]), [Pages() for _ in range(4)]
    with closing(Staging(buffers(2), num_threads=4)) as staging:
        readings = [staging.start(source, 0, 3 * PAGE) for source in [slow, *later]]
        eventually(lambda: sorted(slow.begun) == [0, 1])
        nothing_happens()
        assert [source.begun for source in later] == [[]] * 4
        slow.open()
        assert finishes(lambda: [pages(reading) for reading in readings]) == [[0, 1, 2]] * 5


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_many_readings_end_when_consumed_in_order(num_buffers: int) -> None:
    """A buffer for a later piece, before an earlier one has its own, would cause a deadlock here."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with closing(Staging(buffers(num_buffers), num_threads=4)) as staging:
            for round_ in range(20):
                readings = [staging.start(Pages(), 0, (1 + (i + round_) % 4) * PAGE) for i in range(12)]
                found = finishes(lambda readings=readings: [pages(reading) for reading in readings])
                assert found == [list(range(1 + (i + round_) % 4)) for i in range(12)]
    finally:
        sys.setswitchinterval(old)


def test_two_readings_are_consumed_concurrently() -> None:
    with closing(Staging(buffers(2), num_threads=3)) as staging:
        found: dict[int, list[int]] = {}

        def consume(number: int) -> None:
            found[number] = pages(staging.start(Pages(), 0, 20 * PAGE))

        consumers = [threading.Thread(target=consume, args=(number,), daemon=True) for number in range(5)]
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join(PATIENCE_S)
        assert found == {number: list(range(20)) for number in range(5)}


# -- errors and leaving early ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 2, 5])
def test_an_error_comes_at_its_piece_and_affects_no_other_reading(bad: int, without_gc: None) -> None:
    with closing(Staging(buffers(3), num_threads=2)) as staging:
        before = staging.start(Pages(), 0, 2 * PAGE)
        failing = staging.start(Pages(fail=[bad]), 0, 6 * PAGE)
        after = staging.start(Pages(), 0, 4 * PAGE)
        assert finishes(pages, before) == [0, 1]
        found: list[int] = []

        def consume() -> None:
            for piece in failing:
                found.extend(piece.memory.unique().tolist())
                piece.release()

        with pytest.raises(StoreError, match=f"page {bad} is bad"):
            finishes(consume)
        assert found == list(range(bad))
        assert finishes(pages, after) == [0, 1, 2, 3]
        assert all_come_back(staging, 3)


def test_after_an_error_reading_stops() -> None:
    source = Pages(fail=[1])
    with closing(Staging(buffers(3), num_threads=1)) as staging:
        with pytest.raises(StoreError, match="page 1 is bad"):
            finishes(lambda: pages(staging.start(source, 0, 100 * PAGE)))
        assert all_come_back(staging, 3)
        assert len(source.begun) < 10


def test_an_error_is_not_part_of_a_cycle(without_gc: None) -> None:
    """Its traceback refers to frames, and these to the source: a cycle would keep the file open."""
    source = Pages(fail=[0])
    gone = weakref.ref(source)
    with closing(Staging(buffers(1))) as staging:
        reading = staging.start(source, 0, PAGE)
        with suppress(StoreError):
            pages(reading)
            raise AssertionError("no error came")
        del source, reading
        assert all_come_back(staging, 1)
        eventually(lambda: gone() is None)


def leave_released(reading: StagedReading) -> None:
    for piece in reading:
        piece.release()
        break


def leave_held(reading: StagedReading) -> None:
    for _ in reading:
        break


def leave_by_error(reading: StagedReading) -> None:
    with suppress(ZeroDivisionError):
        for piece in reading:
            print(piece.begin // 0)


def leave_later(reading: StagedReading) -> None:
    for number, piece in enumerate(reading):
        piece.release()
        if number == 4:
            break


def cancel(reading: StagedReading) -> None:
    reading.cancel()
    reading.cancel()


def forget(reading: StagedReading) -> None:
    pass


LEAVES = [leave_released, leave_held, leave_by_error, leave_later, cancel, forget]


@pytest.mark.parametrize("leave", LEAVES, ids=lambda leave: leave.__name__)
def test_leaving_early_gives_all_buffers_back(leave: Callable[[StagedReading], None]) -> None:
    with closing(Staging(buffers(3), num_threads=2)) as staging:
        for _ in range(3):
            source = Pages()
            reading = staging.start(source, 0, 50 * PAGE)
            leave(reading)
            del reading
            assert all_come_back(staging, 3)
            assert len(source.begun) < 12


@pytest.mark.parametrize("how", ["cancelled", "forgotten"])
def test_a_reading_that_ends_while_its_pages_are_read(how: str, without_gc: None) -> None:
    """Pages that arrive late are given back too, even if the reading lives on."""
    source = Pages(hold=[0, 1])
    with closing(Staging(buffers(2), num_threads=2)) as staging:
        reading = staging.start(source, 0, 5 * PAGE)
        eventually(lambda: len(source.begun) == 2)
        if how == "cancelled":
            reading.cancel()
        else:
            del reading
        source.open()
        assert all_come_back(staging, 2)


def test_a_reading_cancelled_in_the_loop_gives_back_early_pages(without_gc: None) -> None:
    """Pages 1 and 2 arrive before page 0, and so wait in the reading."""
    source = Pages(hold=[0])
    with closing(Staging(buffers(3), num_threads=2)) as staging:
        pieces = iter(reading := staging.start(source, 0, 3 * PAGE))
        eventually(lambda: len(source.begun) == 3)
        source.open()
        first = finishes(next, pieces)
        reading.cancel()
        first.release()
        assert all_come_back(staging, 3)
        with pytest.raises(StoreError, match="has ended or was cancelled"):
            finishes(next, pieces)


def test_cancelling_wakes_the_consumer() -> None:
    source = Pages(hold=[0])
    with closing(Staging(buffers(1))) as staging:
        reading = staging.start(source, 0, 2 * PAGE)
        threading.Timer(0.02, reading.cancel).start()
        with pytest.raises(StoreError, match=r"bytes \[0, 4096\): the reading has ended or was cancelled"):
            finishes(pages, reading)
        source.open()
        assert all_come_back(staging, 1)


def test_a_reading_is_iterated_once() -> None:
    with closing(Staging(buffers(1))) as staging:
        reading = staging.start(Pages(), 0, 2 * PAGE)
        assert finishes(pages, reading) == [0, 1]
        for _ in range(2):
            with pytest.raises(StoreError, match="has ended or was cancelled"):
                finishes(pages, reading)


def test_a_file_that_changes_during_a_reading(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(noise(10 * PAGE).numpy().tobytes())
    file = DirectFile(FileMapping(path))
    with closing(Staging(buffers(2))) as staging:
        reading = iter(staging.start(file, 0, 10 * PAGE))
        finishes(next, reading).release()
        os.truncate(path, PAGE)
        with pytest.raises(StoreError, match="changed since it was mapped"):
            finishes(lambda: [piece.release() for piece in reading])
        assert all_come_back(staging, 2)


# -- memory as a source ----------------------------------------------------------------------------------------------


def test_memory_is_one_piece() -> None:
    memory = noise(3 * PAGE)
    with closing(Staging(buffers(2), num_threads=1)) as staging:
        assert torch.equal(joined(staging.start(MemorySource(memory), 10, 9000)), memory[10:9000])


# -- the end ---------------------------------------------------------------------------------------------------------


def test_closing_with_work_pending() -> None:
    """One page is being read, one waits for a buffer, and a whole reading waits."""
    source = Pages(hold=[1])
    staging = Staging(buffers(2), num_threads=2)
    first, second = staging.start(source, 0, 5 * PAGE), staging.start(Pages(), 0, 2 * PAGE)
    pieces = iter(first)
    piece = finishes(next, pieces)
    eventually(lambda: sorted(source.begun) == [0, 1])
    running = threads()
    assert len(running) == 2
    threading.Timer(0.02, source.open).start()
    finishes(staging.close)
    assert not any(thread.is_alive() for thread in running)
    for reading in (pieces, second):
        with pytest.raises(StoreError, match="ended early: its staging ring was closed"):
            finishes(list, reading)
    assert piece.memory.unique().tolist() == [0]
    assert sorted(source.begun) == [0, 1]
    finishes(staging.close)
    with pytest.raises(InvariantError, match=r"\[0, 4096\) are requested from a closed staging ring"):
        staging.start(Pages(), 0, PAGE)


def test_closing_stops_reads_although_buffers_are_free() -> None:
    source = Pages(hold=[0])
    staging = Staging(buffers(4), num_threads=1)
    reading = staging.start(source, 0, 4 * PAGE)
    eventually(lambda: source.begun == [0])
    closer = threading.Thread(target=staging.close)
    closer.start()

    def closed() -> bool:
        try:
            staging.start(Pages(), 0, 0)
        except InvariantError:
            return True
        return False

    eventually(closed)
    source.open()
    closer.join(PATIENCE_S)
    assert source.begun == [0]
    with pytest.raises(StoreError, match="its staging ring was closed"):
        finishes(list, reading)


def test_closing_wakes_a_consumer() -> None:
    """It waits for a piece that has no buffer, since it holds the only one itself."""
    staging = Staging(buffers(1))
    reading = iter(staging.start(Pages(), 0, 2 * PAGE))
    held = finishes(next, reading)
    threading.Timer(0.02, staging.close).start()
    with pytest.raises(StoreError, match="its staging ring was closed"):
        finishes(next, reading)
    held.release()


def test_closing_an_unused_ring() -> None:
    staging = Staging(buffers(1))
    staging.close()
    with pytest.raises(InvariantError, match="closed"):
        staging.start(Pages(), 0, PAGE)


def test_the_threads_of_a_collected_ring_end(without_gc: None) -> None:
    ring = buffers(2)
    staging = Staging(ring, num_threads=2)
    assert finishes(pages, staging.start(Pages(), 0, 5 * PAGE)) == list(range(5))
    gone = [weakref.ref(staging), *map(weakref.ref, ring)]
    assert len(threads()) == 2
    del staging, ring
    eventually(lambda: not threads() and all(ref() is None for ref in gone))


def test_a_reading_keeps_its_staging_open(without_gc: None) -> None:
    reading = Staging(buffers(2)).start(Pages(), 0, 20 * PAGE)
    assert finishes(pages, reading) == list(range(20))
    del reading
    eventually(lambda: not threads())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_idle_thread_keeps_nothing_alive(num_threads: int, without_gc: None) -> None:
    source = Pages()
    gone = weakref.ref(source)
    with closing(Staging(buffers(4), num_threads)) as staging:
        reading = staging.start(source, 0, 4 * PAGE)
        pieces = finishes(list, reading)
        held = [weakref.ref(piece.memory) for piece in pieces]
        del source, reading, pieces
        eventually(lambda: gone() is None and all(memory() is None for memory in held))
        assert len(threads()) == num_threads


def test_a_reading_started_at_process_exit_fails() -> None:
    staging = Staging(buffers(2), num_threads=1)
    desk = staging._queues

    class Ending(SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            if not desk.is_closed:
                desk.close()
            super().put(item)

    desk.pieces = Ending()
    reading = staging.start(Pages(), 0, 4 * PAGE)
    with pytest.raises(StoreError, match="cancelled"):
        finishes(list, reading)
    with pytest.raises(InvariantError, match="closed staging ring"):
        staging.start(Pages(), 0, PAGE)


@pytest.mark.stress
def test_an_interpreter_exits_with_work_pending() -> None:
    """A read that never ends, one that is in torch, an abandoned reading, and a buffer that never drains.

    The ring of the read in torch has been collected already.
    """
    code = """
import threading, time, torch
from weightstream.store.staging import MemorySource, Staging

class Stuck:
    def read(self, begin, end, memory):
        begun.set()
        threading.Event().wait()

class Slow:
    def read(self, begin, end, memory):
        slow.set()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            view = memory[: end - begin]  # drops the GIL; a thread that finds Python gone there aborts the process
        return view

begun, slow = threading.Event(), threading.Event()
def ring(): return [torch.empty(4096, dtype=torch.uint8) for _ in range(2)]
source = MemorySource(torch.zeros(1 << 20, dtype=torch.uint8))
stagings = [Staging(ring(), num_threads=2) for _ in range(4)]
readings = [stagings[0].start(Stuck(), 0, 1 << 20), *(s.start(source, 0, 1 << 20) for s in stagings[1:3])]
late = stagings[3].start(Slow(), 0, 4096)
filled = [piece for reading in readings[1:3] for piece in list(reading._pieces)[:2]]
next(iter(readings[2])).release(threading.Event().wait)
assert begun.wait(20)
assert all(piece.done.wait(20) for piece in filled)
assert sum(thread.name.startswith("weightstream-read") for thread in threading.enumerate()) == 8
assert slow.wait(20)
del late, stagings[3]
print("end")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(weightstream.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")
