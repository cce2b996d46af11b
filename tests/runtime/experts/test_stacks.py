"""The places of rows of stacks: wherever segments, files and windows end, a slot gets the bytes of its row."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from weightstream.errors import InvariantError, StoreError
from weightstream.runtime.experts.slot_cache import RowPiece, SlotCache, SlotStack
from weightstream.runtime.experts.stacks import Stack, pieces_of_rows, unread
from weightstream.runtime.weights.alias_groups import groups
from weightstream.runtime.weights.home import Home
from weightstream.runtime.weights.sources import Pinned, in_file
from weightstream.store import pages as pages_module
from weightstream.store.file_slice import FileSlice
from weightstream.store.lazy import LazyMemory
from weightstream.store.mapping import FileMapping
from weightstream.store.pages import PageCache

NUM_ROWS, ROW = 6, 8192  # bytes: one tile of bfloat16


def fetched(pieces: Sequence[RowPiece], nbytes: int = ROW) -> torch.Tensor:
    """All rows, as a cache fetches them."""
    memory = torch.full((NUM_ROWS, nbytes + 64), 77, dtype=torch.uint8)
    slots = SlotCache([SlotStack(memory, pieces)], NUM_ROWS).resolve(torch.arange(NUM_ROWS))
    assert (memory[:, nbytes:] == 77).all()
    return memory[slots, :nbytes]


def data_of(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (NUM_ROWS * ROW,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


ENDS = {
    "one segment": [],
    "a segment for each row": [row * ROW for row in range(1, NUM_ROWS)],
    "two for each, as gate and up": [half * ROW // 2 for half in range(1, 2 * NUM_ROWS)],
    "two for each, but some rows lie in a row": [ROW // 2, ROW, 3 * ROW, 3 * ROW + ROW // 2, 4 * ROW],
    "several rows in each": [2 * ROW, 5 * ROW],
    "a row over two": [2 * ROW + 4096],
    "rows over two, at other places": [ROW + 8, 3 * ROW + 4096, 5 * ROW + 8184],
    "a row over three": [ROW + 64, ROW + 72],
    "inside of words": [ROW - 1, 2 * ROW + 3, 4 * ROW + 4090],
}


@pytest.mark.parametrize("name", ENDS)
def test_rows_are_found_wherever_segments_end(name: str) -> None:
    data = data_of()
    segments = [data[begin:end].clone() for begin, end in pairwise([0, *ENDS[name], len(data)])]
    pieces = pieces_of_rows(segments, NUM_ROWS, ROW)
    assert torch.equal(fetched(pieces), data.view(NUM_ROWS, ROW))
    assert len(pieces) <= 1 + len({end % ROW for end in ENDS[name]} - {0})


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_found_in_segments_of_any_length(seed: int) -> None:
    rng, data = random.Random(seed), data_of(seed)
    ends = sorted(rng.sample(range(1, len(data), rng.choice((1, 8))), rng.randint(0, 12)))
    segments = [data[begin:end].clone() for begin, end in pairwise([0, *ends, len(data)])]
    assert torch.equal(fetched(pieces_of_rows(segments, NUM_ROWS, ROW)), data.view(NUM_ROWS, ROW))


def test_segments_with_other_bytes_than_the_rows_are_an_error() -> None:
    with pytest.raises(InvariantError, match="6 rows of 8192 bytes"):
        pieces_of_rows([data_of()[:-8]], NUM_ROWS, ROW)


# -- pages of files ----------------------------------------------------------------------------------------------------


class Device:
    """A device with memory at its own address. It counts the questions about addresses."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.asked: list[int] = []

    def device_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        self.asked.append(memory.numel())
        return memory


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def cache(device: Device) -> Iterator[PageCache]:
    made = PageCache(lambda memory: None, lambda memory: None, show=device.device_view)
    yield made
    made.close()


def stack_in(extents: Sequence[FileSlice], cache: PageCache) -> Stack:
    """A stack with these bytes, in pinned windows."""
    memory = LazyMemory.of_extents("w", extents)
    tensor = memory.bytes(0, memory.nbytes).view(torch.bfloat16).view(NUM_ROWS, 64, 64)
    module = torch.nn.Module()
    module.register_buffer("w", tensor)
    (group,) = groups(module).values()
    file = in_file(group.home, memory)
    assert file is not None
    source = file.windowed(cache.hold([extent.range for extent in file.extents], lambda error: None))
    stack = Stack.of(Home(group=group, origin=torch.device("cpu"), source=source), torch.empty(0, dtype=torch.uint8))
    assert stack is not None
    return stack


def shards(folder: Path, data: torch.Tensor, num: int, before: int = 4096) -> list[FileSlice]:
    """Halves of rows in a number of files. Those of one file follow each other, with other bytes between them."""
    halves, files = data.view(-1, ROW // 2), [bytearray(before) for _ in range(num)]
    places = []
    for index, half in enumerate(halves):
        file = index * num // len(halves)
        places.append((file, len(files[file]), len(files[file]) + ROW // 2))
        files[file] += half.numpy().tobytes() + bytes(64)
    for index, file in enumerate(files):
        (folder / f"{index}").write_bytes(file)
    mappings = [FileMapping(folder / f"{index}") for index in range(num)]
    return [FileSlice(mappings[file], begin, end) for file, begin, end in places]


@pytest.mark.parametrize("num", [1, 3, 5, 12])
def test_rows_are_fetched_from_windows_of_several_files(num: int, tmp_path: Path, cache: PageCache) -> None:
    data = data_of()
    stack = stack_in(shards(tmp_path, data, num), cache)
    assert torch.equal(fetched(stack.pieces(Device())), data.view(NUM_ROWS, ROW))


def test_rows_are_fetched_from_several_windows_of_one_file(
    tmp_path: Path, cache: PageCache, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "_PINNED_NBYTES", 2 * ROW)
    data = data_of()
    stack = stack_in(shards(tmp_path, data, 1), cache)
    assert torch.equal(fetched(stack.pieces(device)), data.view(NUM_ROWS, ROW))
    assert len(device.asked) > 2


def test_a_device_is_asked_once_for_each_window(tmp_path: Path, cache: PageCache, device: Device) -> None:
    stack = stack_in(shards(tmp_path, data_of(), 3), cache)
    assert len(stack.home.source.extents) == 2 * NUM_ROWS
    for _ in range(2):
        stack.pieces(device)
    assert len(device.asked) == 3


def reason(stack: Stack, device: Device | None = None, *, waits: bool = True) -> str:
    alias = stack.home.group.alias
    return unread([alias], {alias: stack.home}, device or Device(), waits=waits) or ""


@pytest.mark.parametrize("before", [4097, 4098, 4103])
def test_rows_may_begin_inside_of_words(before: int, tmp_path: Path, cache: PageCache) -> None:
    """Files of other libraries have tensors after any number of bytes."""
    data = data_of()
    stack = stack_in(shards(tmp_path, data, 2, before), cache)
    assert reason(stack) == ""
    assert torch.equal(fetched(stack.pieces(Device())), data.view(NUM_ROWS, ROW))


def test_a_row_may_be_cut_inside_of_a_word(tmp_path: Path, cache: PageCache) -> None:
    path, data = tmp_path / "0", data_of()
    path.write_bytes(data[:-3].numpy().tobytes() + bytes(12) + data[-3:].numpy().tobytes())
    mapping, cut = FileMapping(path), len(data) - 3
    stack = stack_in([FileSlice(mapping, 0, cut), FileSlice(mapping, cut + 12, cut + 15)], cache)
    assert reason(stack) == ""
    assert torch.equal(fetched(stack.pieces(Device())), data.view(NUM_ROWS, ROW))


@pytest.mark.parametrize("num", [1, 3])
def test_pages_that_are_not_pinned_are_refused(num: int, tmp_path: Path) -> None:
    """Pages of the first window, or from the third window on."""
    windows: list[torch.Tensor] = []

    def refuse(memory: torch.Tensor) -> None:
        windows.append(memory)
        if len(windows) == num:
            raise StoreError("no more")

    cache = PageCache(refuse, lambda memory: None, show=lambda memory: memory)
    stack = stack_in(shards(tmp_path, data_of(), 3), cache)
    assert "host memory that the device cannot read" in reason(stack)
    assert stack.pieces(Device()) == []
    cache.close()


@pytest.mark.parametrize("refused", [None, 1, 3])
def test_without_waits_nothing_waits_for_pages_and_the_device_is_not_asked(refused: int | None, tmp_path: Path) -> None:
    """Only the pinning thread asks. Each question to the driver waits for a pin, which takes seconds for 400
    windows."""
    let, windows, asking = threading.Event(), list[torch.Tensor](), set[str]()

    def pin(memory: torch.Tensor) -> None:
        assert let.wait(30)
        windows.append(memory)
        if len(windows) == refused:
            raise StoreError("no more")

    def show(memory: torch.Tensor) -> torch.Tensor:
        asking.add(threading.current_thread().name)
        return memory

    cache, device = PageCache(pin, lambda memory: None, show=show), Device()
    stack = stack_in(shards(tmp_path, data_of(), 3), cache)
    assert reason(stack, device, waits=False) == "", "the pages are being pinned"
    let.set()
    for each in stack.home.source.pages:
        assert each.done.wait(30)
    assert bool(reason(stack, device, waits=False)) is (refused is not None)
    assert bool(reason(stack, device)) is (refused is not None)
    assert not device.asked
    assert asking <= {"weightstream-pages"}
    assert bool(asking) is (refused != 1)
    cache.close()


def test_columns_of_files_are_refused_at_once(tmp_path: Path, cache: PageCache) -> None:
    (tmp_path / "0").write_bytes(bytes(4 * NUM_ROWS * ROW))
    columns = FileSlice(FileMapping(tmp_path / "0"), 0, 2 * NUM_ROWS * ROW - ROW // 2, pitch=ROW, width=ROW // 2)
    stack, device = stack_in([columns], cache), Device()
    for waits in (False, True):
        assert "it is columns of tensors in files" in reason(stack, device, waits=waits)
    assert not device.asked


def test_a_stack_on_disk_is_refused(tmp_path: Path, cache: PageCache) -> None:
    stack = stack_in(shards(tmp_path, data_of(), 3), cache)
    assert reason(stack) == ""
    stack.home.source = in_file(stack.home.group.home, stack.home.source.lazy)
    assert "disk memory that the device cannot read" in reason(stack)


def test_a_weight_that_is_not_a_stack_is_refused() -> None:
    module = torch.nn.Module()
    module.register_buffer("weight", torch.zeros(64, 64).t())
    (group,) = groups(module).values()
    home = Home(group=group, origin=torch.device("cpu"), source=Pinned(view=group.home))
    assert "no stack of whole rows" in (unread(["weight"], {"weight": home}, Device()) or "")


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 1), (3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_rows_are_of_any_shape_and_number_of_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Such as one scale of each matrix."""
    values = torch.randint(0, 256, (NUM_ROWS, *shape), generator=torch.Generator().manual_seed(3)).to(dtype)
    module = torch.nn.Module()
    module.register_buffer("w", values)
    (group,) = groups(module).values()
    home = Home(group=group, origin=torch.device("cpu"), source=Pinned(view=group.home))
    stack = Stack.of(home, torch.empty(group.nbytes, dtype=torch.uint8))
    assert stack is not None
    assert reason(stack) == ""
    memory = torch.full((NUM_ROWS, 512), 77, dtype=torch.uint8)
    rows = torch.tensor([4, 0, 3])
    slots = SlotCache([SlotStack(memory, stack.pieces(Device()))], NUM_ROWS).resolve(rows)
    reader = stack.reading(memory)
    assert reader.memory is not None
    assert torch.equal(reader.memory[slots], values[rows])
    stack.out.fill_(77)
    reader.put(rows, slots, places=rows)
    assert torch.equal(stack.out.view(dtype).view(values.shape)[rows], values[rows])
