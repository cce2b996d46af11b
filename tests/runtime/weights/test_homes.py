"""Homes on the CPU: which weights move, stay, or spill to the offload folder, and that all of them are restored."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import psutil
import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file, save_file
from torch import nn

import weightstream.runtime.devices.opening
from mapped import rss_nbytes
from repeats import examples
from rig import KIB
from weightstream.adapters.modules.partition import find_units
from weightstream.errors import PlanError, StoreError
from weightstream.plan.manifest import Manifest
from weightstream.plan.plan import Plan
from weightstream.plan.search import place_homes
from weightstream.runtime.devices import host_stream
from weightstream.runtime.devices.backend import Copy
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.weights.alias_groups import groups, manifest
from weightstream.runtime.weights.homes import Homes
from weightstream.runtime.weights.sources import Pinned, Tier
from weightstream.store.arena import Arena
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.folder import OffloadFolder
from wrapped import Limit

WIDTH = 64
WEIGHT_NBYTES = WIDTH * WIDTH * 4


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    made = CpuBackend()
    yield made
    made.close()


def linears(num: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num)]).eval()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_values(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in model.named_parameters()}


def manifest_of(model: nn.Module, homes: Homes) -> Manifest:
    return manifest(find_units(model), {alias: home.group for alias, home in homes.homes.items()})


def streaming_weights(model: nn.Module, homes: Homes, resident: set[int] = frozenset()) -> Plan:  # type: ignore[assignment]
    """Biases and the units in `resident` stay. The other weights stream through one slot."""
    made = manifest_of(model, homes)
    stays = {a for a in made.aliases if a.endswith("bias") or int(a.split(".")[0]) in resident}
    return Plan.build(made, frozenset(stays), WEIGHT_NBYTES)


def whole_units(model: nn.Module, homes: Homes, resident: set[int]) -> Plan:
    """These units stay. The ring has room for all others."""
    made = manifest_of(model, homes)
    stays = {a for a in made.aliases if int(a.split(".")[0]) in resident}
    return Plan.build(made, frozenset(stays), sum(made.aliases.values()))


def within(budget: int, plan: Plan, homes: Homes) -> Plan:
    return place_homes(plan, host_budget=budget, movable=homes.movable, remedy="Raise host_budget.")


def mapped(model: nn.Module, path: Path) -> Checkpoint:
    """Save the model, and make its parameters view the file."""
    save_file(model.state_dict(), path)
    checkpoint = Checkpoint.open(path)
    for name, parameter in model.named_parameters():
        parameter.data = checkpoint.tensor(name)
    return checkpoint


# -- residents ---------------------------------------------------------------------------------------------------------


def test_a_model_in_ram_stays_where_it_is(backend: CpuBackend) -> None:
    model = linears()
    before = addresses(model)
    homes = Homes(groups(model), backend)
    homes.settle(streaming_weights(model, homes))
    assert addresses(model) == before
    num = len(model)
    assert homes.held_nbytes() == {"device": num * WIDTH * 4, "host": num * WEIGHT_NBYTES, "disk": 0}
    homes.restore()
    assert addresses(model) == before
    assert {home.tier for home in homes.homes.values()} == {Tier.HOST}


def test_residents_of_a_mapped_model_are_copied_and_the_rest_stays_mapped(backend: CpuBackend, tmp_path: Path) -> None:
    model = linears()
    checkpoint = mapped(model, tmp_path / "model.safetensors")
    expected = values(model)
    homes = Homes(groups(model), backend, mappings=checkpoint.mappings)
    assert {home.tier for home in homes.homes.values()} == {Tier.DISK}
    homes.settle(streaming_weights(model, homes, {1}))
    (mapping,) = checkpoint.mappings
    in_file = {name for name, address in addresses(model).items() if mapping.locate(address) is not None}
    assert in_file == {"0.weight", "2.weight", "3.weight"}
    assert homes.held_nbytes() == {"device": WEIGHT_NBYTES + 4 * WIDTH * 4, "host": 3 * WEIGHT_NBYTES, "disk": 0}
    assert_values(model, expected)
    homes.restore()
    assert_values(model, expected)


@pytest.fixture
def large(tmp_path: Path) -> tuple[nn.Sequential, Checkpoint]:
    """A file with more bytes than one thread reads."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(1000, 1200), nn.Linear(1200, 900)]).eval()
    return model, mapped(model, tmp_path / "large.safetensors")


def fail_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """The disk fails at this read, counted from here."""
    real, reads = os.preadv, count(1)

    def preadv(*about: Any) -> int:
        if next(reads) == number:
            raise OSError(errno.EIO, "Input/output error")
        return real(*about)

    patch.setattr(os, "preadv", preadv)


def test_residents_are_read_by_threads_and_no_page_is_mapped(
    backend: CpuBackend, large: tuple[nn.Sequential, Checkpoint]
) -> None:
    model, checkpoint = large
    expected = load_file(checkpoint.mappings[0].path)
    (mapping,) = checkpoint.mappings
    assert torch.equal(model[0].weight, expected["0.weight"]), "reading it maps its pages"
    homes = Homes(groups(model), backend, mappings=checkpoint.mappings)
    homes.settle(streaming_weights(model, homes, {0, 1}))
    assert rss_nbytes(mapping) <= 1 << 16, "its header"
    assert {home.tier for home in homes.homes.values()} == {Tier.DEVICE}
    assert all(mapping.locate(address) is None for address in addresses(model).values())
    assert_values(model, expected)
    homes.restore()
    assert_values(model, expected)


def test_updated_residents_are_not_read_from_their_file(
    backend: CpuBackend, large: tuple[nn.Sequential, Checkpoint]
) -> None:
    model, checkpoint = large
    model[0].weight.data[3, 4] = 9.0
    model[1].bias.data.numpy()[5] = 7.0
    expected = values(model)
    homes = Homes(groups(model), backend, mappings=checkpoint.mappings)
    homes.settle(streaming_weights(model, homes, {0, 1}))
    assert_values(model, expected)
    assert model[0].weight[3, 4] == 9.0
    assert model[1].bias[5] == 7.0


@pytest.mark.parametrize("why", ["a read", "room"])
def test_a_failed_switch_keeps_the_residents_of_the_old_plan(
    why: str, backend: CpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has hardly more memory than these take, and the error, with all objects in its frames, is still
    alive."""
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(8)]).eval()
    checkpoint = mapped(model, tmp_path / "large.safetensors")
    expected = values(model)
    unit = 1000 * 1001 * 4
    limited = Limit(backend, 5 * unit if why == "a read" else 4 * unit)
    homes = Homes(groups(model), limited, mappings=checkpoint.mappings)
    before = whole_units(model, homes, {0, 1, 2, 3})
    homes.settle(before)
    if why == "a read":
        fail_at(3, monkeypatch)
    errors = StoreError if why == "a read" else torch.OutOfMemoryError
    with pytest.raises(errors) as error:
        homes.settle(whole_units(model, homes, {0, 4, 5, 6} if why == "a read" else {1, 4, 5, 6, 7}))
    assert error.value.__traceback__ is not None
    assert homes.plan is before
    assert homes.held_nbytes()["device"] == 4 * unit
    assert limited.held_nbytes == 4 * unit
    assert_values(model, expected)
    monkeypatch.undo()
    homes.settle(whole_units(model, homes, {4, 5, 6, 7}))
    assert_values(model, expected)


def test_an_interrupt_while_residents_are_read(
    backend: CpuBackend, large: tuple[nn.Sequential, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residents that have not been read at that moment are not read any more."""
    model, checkpoint = large
    expected = values(model)
    homes = Homes(groups(model), backend, mappings=checkpoint.mappings)
    real, num, begun = os.preadv, Counter[str](), threading.Event()
    monkeypatch.setattr(host_stream, "STAGING_NBYTES", 1 << 16)

    def preadv(*about: Any) -> int:
        num["reads"] += 1
        begun.set()
        time.sleep(0.05)
        return real(*about)

    def interrupt() -> None:
        begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            homes.settle(streaming_weights(model, homes, {0, 1}))
        thread.join()
        read = num["reads"]
        backend.synchronize()
        assert num["reads"] <= read + 3, "those in flight"
        assert read < 40, "of 139"
    assert_values(model, expected)
    homes.settle(streaming_weights(model, homes, {0, 1}))
    assert_values(model, expected)


def test_unreadable_residents_stay_where_they_are(
    backend: CpuBackend, large: tuple[nn.Sequential, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoint = large
    expected = values(model)
    homes = Homes(groups(model), backend, mappings=checkpoint.mappings)
    with monkeypatch.context() as patch:
        fail_at(2, patch)
        with pytest.raises(StoreError, match=r"large.safetensors: reading .* failed: Input/output error"):
            homes.settle(streaming_weights(model, homes, {0, 1}))
    assert {home.tier for home in homes.homes.values()} == {Tier.DISK}
    assert_values(model, expected)
    homes.settle(streaming_weights(model, homes, {0, 1}))
    assert_values(model, expected)


def test_ties_and_views_stay_views_of_one_home_on_every_tier(backend: CpuBackend, tmp_path: Path) -> None:
    model = linears(3)
    model[2].weight = model[0].weight
    model[1].register_buffer("columns", model[1].weight.data[:, ::2])
    expected = values(model)
    homes = Homes(groups(model), backend, spill=OffloadFolder(tmp_path))
    homes.settle(within(0, streaming_weights(model, homes), homes))
    assert model[2].weight is model[0].weight
    assert model[1].columns.data_ptr() == model[1].weight.data_ptr()
    assert model[1].columns.stride() == (WIDTH, 2)
    assert homes.held_nbytes()["disk"] == 2 * WEIGHT_NBYTES
    assert_values(model, expected)
    homes.restore()
    assert model[1].columns.data_ptr() == model[1].weight.data_ptr()
    assert_values(model, expected)


# -- spilling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(5))
def test_weights_over_the_host_budget_go_to_the_folder_and_return(
    backend: CpuBackend, tmp_path: Path, kept: int
) -> None:
    model = linears()
    expected = values(model)
    folder = OffloadFolder(tmp_path / "folder")
    homes = Homes(groups(model), backend, spill=folder)
    plan = within(kept * WEIGHT_NBYTES, streaming_weights(model, homes), homes)
    homes.settle(plan)
    held = homes.held_nbytes()
    assert held == {"device": 4 * WIDTH * 4, "host": kept * WEIGHT_NBYTES, "disk": (4 - kept) * WEIGHT_NBYTES}
    on_disk = [m for m in folder.mappings if any(m.locate(a) is not None for a in addresses(model).values())]
    assert len(on_disk) == 4 - kept
    assert_values(model, expected)
    ring = backend.alloc(plan.ring_nbytes)
    for unit in range(4):
        copies = homes.copies(plan, unit, ring)
        backend.copy(copies)
        backend.synchronize()
        weight = expected[f"{unit}.weight"]
        assert torch.equal(ring[: weight.nbytes].view(weight.dtype).view(weight.shape), weight)
    homes.restore()
    assert homes.held_nbytes() == {"device": 0, "host": 4 * (WEIGHT_NBYTES + WIDTH * 4), "disk": 0}
    assert not any(m.locate(a) is not None for m in folder.mappings for a in addresses(model).values())
    assert_values(model, expected)


def test_without_a_folder_the_budget_is_refused_with_its_arithmetic(backend: CpuBackend) -> None:
    model = linears()
    before = addresses(model)
    homes = Homes(groups(model), backend)
    with pytest.raises(PlanError) as refused:
        homes.settle(within(WEIGHT_NBYTES, streaming_weights(model, homes), homes))
    for part in ("host budget 16.0KiB (16384 bytes) < 64.0KiB", "of 64.0KiB outside of the device. Raise host_budget"):
        assert part in str(refused.value)
    assert addresses(model) == before
    assert {home.tier for home in homes.homes.values()} == {Tier.HOST}


def test_an_unwritable_folder_leaves_the_model_unchanged(
    backend: CpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = linears()
    expected = values(model)
    folder = OffloadFolder(tmp_path)
    homes = Homes(groups(model), backend, spill=folder)
    write = folder.write

    def third_fails(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "2.weight":
            raise StoreError("no space left")
        return write(name, tensor)

    monkeypatch.setattr(folder, "write", third_fails)
    with pytest.raises(StoreError, match="no space left"):
        homes.settle(within(0, streaming_weights(model, homes), homes))
    assert_values(model, expected)
    assert homes.held_nbytes()["disk"] == 0
    assert not any(m.locate(a) is not None for m in folder.mappings for a in addresses(model).values())


def test_a_device_without_memory_for_the_residents_leaves_the_model_unchanged(
    backend: CpuBackend, tmp_path: Path
) -> None:
    model = linears()
    checkpoint = mapped(model, tmp_path / "model.safetensors")
    expected = values(model)
    limited = Limit(backend, WEIGHT_NBYTES + WIDTH * 4)
    homes = Homes(groups(model), limited, mappings=checkpoint.mappings)
    with pytest.raises(torch.OutOfMemoryError):
        homes.settle(streaming_weights(model, homes, {0, 2}))
    assert_values(model, expected)
    assert {home.tier for home in homes.homes.values()} == {Tier.DISK}, "all are still in their file"


def test_restoring_twice_changes_nothing(backend: CpuBackend, tmp_path: Path) -> None:
    model = linears()
    expected = values(model)
    homes = Homes(groups(model), backend, spill=OffloadFolder(tmp_path))
    homes.settle(within(0, streaming_weights(model, homes), homes))
    homes.restore()
    once = addresses(model)
    homes.restore()
    assert addresses(model) == once
    assert_values(model, expected)


# -- the arena and pinning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nbytes", [1, 511, mmap.PAGESIZE - 1, mmap.PAGESIZE, mmap.PAGESIZE + 1, 10 * mmap.PAGESIZE + 7]
)
def test_the_arena_rounds_up_to_a_page_and_no_further(nbytes: int) -> None:
    arena = Arena()
    block = arena.take(nbytes)
    pages = -(-nbytes // mmap.PAGESIZE)
    assert block.numel() == pages * mmap.PAGESIZE
    assert block.data_ptr() % mmap.PAGESIZE == 0
    assert arena.nbytes == 0, "none of it is pinned"
    block.fill_(7)  # all of it can be written


def test_the_arena_unpins_its_memory_once() -> None:
    pinned: list[int] = []
    unpinned: list[int] = []
    arena = Arena(lambda block: pinned.append(block.data_ptr()), lambda block: unpinned.append(block.data_ptr()))
    blocks = [arena.take(1) for _ in range(3)]
    for block in blocks[:2]:
        arena.pin(block)
    assert pinned == [block.data_ptr() for block in blocks[:2]]
    arena.close()
    arena.close()
    assert sorted(unpinned) == sorted(pinned)


def test_streamed_units_move_into_one_block_each_if_the_device_wants_pinned_memory(backend: CpuBackend) -> None:
    model = linears()
    expected = values(model)
    unpinned: list[int] = []
    arena = Arena(lambda block: None, lambda block: unpinned.append(block.numel()))
    homes = Homes(groups(model), backend, arena=arena)
    made = manifest_of(model, homes)
    plan = Plan.build(made, frozenset(), 17 * KIB)
    homes.settle(plan)
    for unit in range(4):  # the same distances in the block as in the ring, so that one copy can move both
        weight, bias = model[unit].weight, model[unit].bias
        layout = plan.streamed(unit)
        assert bias.data_ptr() - weight.data_ptr() == layout[f"{unit}.bias"] - layout[f"{unit}.weight"]
        assert weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
    unit_nbytes = WEIGHT_NBYTES + 512
    assert arena.nbytes == 4 * -(-unit_nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert_values(model, expected)
    homes.restore()
    assert_values(model, expected)
    assert len(unpinned) == 4


def test_memory_that_cannot_be_pinned_is_used_unpinned_with_one_warning(
    backend: CpuBackend, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(block: torch.Tensor) -> None:
        raise StoreError("the system refused.")

    model = linears()
    expected = values(model)
    homes = Homes(groups(model), backend, arena=Arena(refuse, refuse))
    with caplog.at_level(logging.WARNING):
        homes.settle(streaming_weights(model, homes))
    assert [r.getMessage() for r in caplog.records] == [
        "the system refused. Copies go through a small staging ring instead: the CPU copies each byte once more."
    ]
    assert not any(isinstance(home.source, Pinned) for home in homes.homes.values())
    assert_values(model, expected)
    homes.restore()
    assert_values(model, expected)


# -- joined copies -----------------------------------------------------------------------------------------------------

RING_NBYTES = 4096


def two_copies(first: int, gap: int, second: int, **other: Any) -> tuple[Copy, Copy]:
    """Neighbours `gap` bytes apart at both ends, 100 bytes into the source and 300 into the destination."""
    src = torch.arange(RING_NBYTES).remainder(251).to(torch.uint8)
    dst = torch.full((RING_NBYTES,), 255, dtype=torch.uint8)
    starts = (0, first), (first + gap, first + gap + second)
    a, b = (
        Copy(dst=dst[300 + x : 300 + y], src=src[100 + x : 100 + y], pinned=other.get("pinned", True))
        for x, y in starts
    )
    return a, b


@examples(100)
@given(st.integers(1, 700), st.integers(0, 511), st.integers(1, 700))
def test_a_joined_copy_covers_exactly_both_and_the_gap(first: int, gap: int, second: int) -> None:
    a, b = two_copies(first, gap, second)
    joined = a.joined(b)
    assert joined is not None
    assert joined.pinned
    total = first + gap + second
    assert (joined.src.data_ptr(), joined.src.numel()) == (a.src.data_ptr(), total)
    assert (joined.dst.data_ptr(), joined.dst.numel()) == (a.dst.data_ptr(), total)
    backend = CpuBackend()
    backend.copy([joined])
    backend.close()
    assert torch.equal(a.dst, a.src)
    assert torch.equal(b.dst, b.src)
    whole = torch.empty(0, dtype=torch.uint8).set_(a.dst.untyped_storage())
    assert (whole[:300] == 255).all()
    assert (whole[300 + total :] == 255).all()


def test_copies_of_a_whole_unit_join_into_one() -> None:
    src, dst = torch.arange(RING_NBYTES).remainder(251).to(torch.uint8), torch.zeros(RING_NBYTES, dtype=torch.uint8)
    parts = [(0, 500), (512, 1024), (1024, 1025), (1536, 2000)]
    copies = [Copy(dst=dst[a:b], src=src[a:b], pinned=True) for a, b in parts]
    joined = copies[0]
    for copy in copies[1:]:
        following = joined.joined(copy)
        assert following is not None
        joined = following
    assert joined.src.numel() == 2000


def test_copies_that_are_not_neighbours_stay_separate() -> None:
    a, b = two_copies(100, 20, 50)
    elsewhere = torch.zeros(RING_NBYTES, dtype=torch.uint8)
    assert b.joined(a) is None, "in the wrong order"
    assert a.joined(Copy(dst=b.dst, src=elsewhere[:50], pinned=True)) is None, "another storage"
    assert a.joined(Copy(dst=b.dst, src=b.src)) is None, "pageable"
    assert Copy(dst=a.dst, src=a.src).joined(b) is None, "pageable"
    far, away = two_copies(100, 512, 50)
    assert far.joined(away) is None, "the gap is more than an alignment gap"
    shifted = Copy(dst=b.dst.as_strided((50,), (1,), b.dst.storage_offset() + 4), src=b.src, pinned=True)
    assert a.joined(shifted) is None, "other distances at the two ends"
    over, lap = two_copies(100, -10, 50)
    assert over.joined(lap) is None, "overlapping"


# -- leftovers ---------------------------------------------------------------------------------------------------------


def open_paths() -> set[str]:
    return {file.path for file in psutil.Process().open_files()}


def test_remove_leaves_no_thread_file_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    threads, files = set(threading.enumerate()), open_paths()
    model = linears(6)
    expected = values(model)
    x = torch.randn(2, WIDTH)
    wanted = model(x)
    streamer = weightstream.offload(
        model, device="cpu", device_budget=48 * KIB, host_budget=20 * KIB, offload_folder=tmp_path / "folder"
    )
    assert streamer.stats().held_nbytes["disk"] > 0
    assert streamer.stats().held_nbytes["host"] <= 20 * KIB
    for _ in range(3):
        assert torch.equal(model(x), wanted)
    assert set(threading.enumerate()) > threads
    streamer._backend.synchronize()  # a read in flight has its file open
    assert {path for path in open_paths() if not path.endswith("/.lock")} == files, "except the folder's own"
    streamer.remove()
    assert set(threading.enumerate()) == threads
    assert open_paths() == files
    assert list((tmp_path / "temporary").glob("weightstream-*")) == []
    assert_values(model, expected)
    assert torch.equal(model(x), wanted)
    del streamer
    gc.collect()
    maps = {m.path for m in psutil.Process().memory_maps()}
    assert not any(path.startswith(str(tmp_path)) for path in maps)


def test_remove_frees_the_ring_while_the_streamer_is_still_held(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Limit(CpuBackend(), 1 << 20)
    monkeypatch.setattr(weightstream.runtime.devices.opening, "CpuBackend", lambda: limited)
    model = linears(6)
    streamer = weightstream.offload(model, device="cpu", device_budget=48 * KIB)
    model(torch.ones(1, WIDTH))
    assert limited.held_nbytes == streamer.plan.ring_nbytes > 0
    streamer.remove()
    gc.collect()
    assert limited.held_nbytes == 0


def test_a_refused_host_budget_leaves_nothing(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    model = linears(6)
    before, wanted = addresses(model), model(torch.ones(1, WIDTH))
    with pytest.raises(PlanError, match=r"host budget .*offload_folder"):
        weightstream.offload(model, device="cpu", device_budget=48 * KIB, host_budget=20 * KIB)
    assert set(threading.enumerate()) == threads
    assert addresses(model) == before
    assert torch.equal(model(torch.ones(1, WIDTH)), wanted)


def test_a_manifest_of_homes_has_every_byte_once(backend: CpuBackend) -> None:
    model = linears(3)
    model[2].weight = model[0].weight
    made: Manifest = manifest(find_units(model), groups(model))
    assert made.nbytes == 2 * WEIGHT_NBYTES + 3 * WIDTH * 4


def test_two_models_share_an_offload_folder_and_leave_nothing_in_it(tmp_path: Path) -> None:
    one, two = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for _ in range(2))
    x = torch.randn(2, 64)
    with torch.no_grad():
        want = one(x), two(x)
        settings = {"device": "cpu", "device_budget": "40KiB", "host_budget": 0, "offload_folder": tmp_path}
        first = weightstream.offload(one, **settings)
        second = weightstream.offload(two, **settings)
        for _ in range(3):
            assert torch.equal(one(x), want[0])
            assert torch.equal(two(x), want[1])
        first.remove()
        assert torch.equal(two(x), want[1])
        second.remove()
        assert torch.equal(one(x), want[0])
    assert not list(tmp_path.iterdir())
