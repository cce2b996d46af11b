"""Models that exceed their host memory budget: they are read from disk as they run, bit for bit. Faults of disks."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_pages import (
    BLOCK_WEIGHTS,
    PAGE,
    UPDATES,
    assert_updates_arrive,
    bits,
    budgeted,
    flip,
    nothing_is_left,  # noqa: F401  # runs around every test here, too
    on_file,
    open_paths,
    pinning,  # noqa: F401
    stream_file,
    threads,
    through_numpy,
    wide,
)
from torch import nn

import weightstream.runtime.devices.opening
from cgroups import limited
from models import MODELS, Model, llama_tensors, model_nbytes, weights
from repeats import only, thinned
from rig import Rig, equal_plan
from streaming import assert_steps_equal, plain, run
from weightstream import Streamer
from weightstream.errors import PlanError, StoreError
from weightstream.measure import bench
from weightstream.runtime.devices import cpu
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.devices.host_stream import STAGING_BUFFERS, STAGING_NBYTES
from weightstream.runtime.weights.sources import OnDisk
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.mapping import _LIBC, FileMapping
from weightstream.store.readers import DirectFile
from wrapped import ClockBackend, Delay, Poison, QueueBackend

PREADV = os.preadv


class Disk:
    """Counts direct reads, and applies `act` to each request, by its number."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.read_nbytes = 0
        self.act: Callable[[int, list[memoryview]], list[memoryview]] = lambda number, views: views
        self._lock = threading.Lock()

    def preadv(self, descriptor: int, views: list[memoryview], offset: int) -> int:
        with self._lock:
            self.num_requests += 1
            number = self.num_requests
        got = PREADV(descriptor, self.act(number, views), offset)
        with self._lock:
            self.read_nbytes += got
        return got


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(os, "preadv", made.preadv)
    return made


def quiet(streamer: Streamer) -> None:
    """Wait for the reads that the last step started for the next one."""
    streamer._backend.synchronize()


def on_disk(streamer: Streamer) -> set[str]:
    """Alias groups whose copies are read from files. All of them must be in the disk tier."""
    found = {alias for alias, home in streamer._homes.homes.items() if isinstance(home.source, OnDisk)}
    assert found <= streamer.plan.disk
    return found


@pytest.fixture
def model() -> Model:
    return wide()


@pytest.fixture
def reference() -> Model:
    return wide()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.safetensors"


@pytest.fixture
def checkpoint(model: Model, path: Path) -> Checkpoint:
    return on_file(model, path)


# -- loaded within a budget --------------------------------------------------------------------------------------------


def saved(name: str, folder: Path, **options: Any) -> Model:
    """The model in a folder, as the library loads it."""
    made = MODELS[name]()
    made.module.save_pretrained(folder, **options)
    return Model(module=type(made.module).from_pretrained(folder, dtype="auto").eval(), inputs=made.inputs)


def loaded(folder: Path, reference: Model, **options: Any) -> Model:
    module = budgeted(
        lambda nbytes: weightstream.from_pretrained(
            folder, device="cpu", device_budget=nbytes, progress=False, **options
        ),
        model_nbytes(reference.module),
    )
    return Model(module=module, inputs=reference.inputs)


@pytest.mark.usefixtures("nothing_foreseen")
@pytest.mark.parametrize(
    ("name", "share"),
    only(product(("llama", "mixtral", "llama-bf16", "t5"), (0, 1 / 3, 1, 2)), ("llama", 1 / 3)),
)
def test_a_loaded_model_keeps_its_host_budget(name: str, share: float, tmp_path: Path, disk: Disk) -> None:
    """Budgets: nothing, a third, exactly the streamed bytes, and more."""
    reference = saved(name, tmp_path, **({"max_shard_size": "100KB"} if name == "t5" else {}))
    with loaded(tmp_path, reference).module.weightstream as free:
        streamed_nbytes = free.plan.offloaded_nbytes
        assert free.plan.disk == frozenset()
    assert disk.num_requests == 0
    budget = int(streamed_nbytes * share)
    model = loaded(tmp_path, reference, host_budget=budget)
    with model.module.weightstream as streamer:
        assert_steps_equal(model, reference, "cpu", range(5))
        quiet(streamer)
        plan, before = streamer.plan, (streamer.stats(), disk.read_nbytes)
        held = before[0].held_nbytes
        assert held["host"] == plan.host_nbytes <= budget
        assert held["disk"] == plan.disk_nbytes == plan.offloaded_nbytes - plan.host_nbytes
        assert (plan.disk == frozenset()) == (share >= 1)
        assert on_disk(streamer) == plan.disk
        assert_steps_equal(model, reference, "cpu", range(3))
        quiet(streamer)
        after = streamer.stats()
        assert after.filled_nbytes - before[0].filled_nbytes == 3 * plan.step_nbytes
        assert after.unplanned_fills == before[0].unplanned_fills
        a_step = sum(plan.unit_disk_nbytes[u] for fills in plan.after for u in fills)
        num_reads = sum(len(streamer._homes.homes[alias].source.extents) for alias in plan.disk)
        read, padding = disk.read_nbytes - before[1], 2 * PAGE * num_reads
        assert 3 * a_step <= read <= 3 * (a_step + padding)
    assert_steps_equal(model, reference, "cpu", range(2))


FROM_DISK = (
    "Stack",
    "TiedLinears",
    "ParentReadsChildren",
    "ChildrenShareParameter",
    "OptionalBranch",
    "OrderByInput",
    "CalledTwice",
    "SharedBlock",
    "QuantisedWeights",
    "WeightsInBuffers",
    "WrittenBuffers",
    "LinearBatchNormLinear",
)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "training"), thinned(FROM_DISK, [False, True]))
def test_any_module_from_disk(name: str, training: bool, path: Path, disk: Disk) -> None:
    """Modules with skipped, repeated or tied blocks, with weights that others read, or that write to themselves."""
    model, reference = MODELS[name](), plain(name, "cpu")
    checkpoint = on_file(model, path)
    for each in (model, reference):
        each.module.train(training)
    with stream_file(model, checkpoint, host_budget=0) as streamer:
        assert streamer.plan.host_nbytes == 0
        assert_steps_equal(model, reference, "cpu", range(8))
        quiet(streamer)
        assert disk.read_nbytes > 0
    for key, tensor in weights(reference.module).items():
        assert torch.equal(weights(model.module)[key], tensor), key
    assert_steps_equal(model, reference, "cpu", range(2))


@pytest.mark.parametrize("share", [0, 0.4])
def test_a_model_in_ram_is_spilled_and_read_directly(share: float, tmp_path: Path, disk: Disk) -> None:
    model, reference = wide(), wide()
    options: dict[str, Any] = {"device": "cpu", "offload_folder": tmp_path}
    budget = int(share * model_nbytes(model.module))

    def open_at(nbytes: int) -> Streamer:
        return weightstream.offload(model.module, device_budget=nbytes, host_budget=budget, **options)

    streamer: Streamer = budgeted(open_at, model_nbytes(model.module))
    assert_steps_equal(model, reference, "cpu", range(4))
    assert on_disk(streamer) == streamer.plan.disk != frozenset()
    assert streamer.stats().held_nbytes["host"] <= budget
    for name in sorted(streamer.plan.disk & set(BLOCK_WEIGHTS))[::2]:
        for each in (model, reference):
            through_numpy(each.module.get_parameter(name))
        assert_steps_equal(model, reference, "cpu", range(2))
        assert name not in on_disk(streamer)
    assert disk.read_nbytes > 3 * streamer.plan.disk_nbytes
    streamer.remove()
    assert_steps_equal(model, reference, "cpu", range(2))
    del streamer
    assert list(tmp_path.iterdir()) == []


def test_weights_read_outside_of_their_unit_stay_with_the_reader_on_disk(path: Path, disk: Disk) -> None:
    model, reference = MODELS["ParentReadsChildren"](), plain("ParentReadsChildren", "cpu")
    with stream_file(model, on_file(model, path), least=4, host_budget=0) as streamer:
        before = streamer.plan
        assert_steps_equal(model, reference, "cpu", range(3))
        assert streamer.plan.manifest.units != before.manifest.units
        assert on_disk(streamer) == streamer.plan.disk != frozenset()
        quiet(streamer)
        read, fills = disk.read_nbytes, streamer.stats().unplanned_fills
        assert_steps_equal(model, reference, "cpu", range(3))
        quiet(streamer)
        assert disk.read_nbytes - read >= 3 * streamer.plan.disk_nbytes
        assert streamer.stats().unplanned_fills == fills


# -- updates -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(("update", "warm"), thinned(UPDATES, [0, 3]))
def test_updates_of_weights_on_disk_reach_the_next_step(
    update: Callable[[nn.Parameter], None], warm: int, model: Model, reference: Model, checkpoint: Checkpoint
) -> None:
    with stream_file(model, checkpoint, host_budget=0) as streamer:
        assert_steps_equal(model, reference, "cpu", range(warm))
        names = sorted(on_disk(streamer) & set(BLOCK_WEIGHTS))
        assert len(names) >= 8
        assert_updates_arrive(model, reference, names, update, lambda: on_disk(streamer))
    assert_steps_equal(model, reference, "cpu", range(2))


def test_weights_written_by_the_load_are_not_read_from_the_file(
    model: Model, reference: Model, checkpoint: Checkpoint
) -> None:
    for each in (model, reference):
        for name in BLOCK_WEIGHTS[::3]:
            flip(bits(each.module.get_parameter(name)))
    with stream_file(model, checkpoint, host_budget=0) as streamer:
        assert not on_disk(streamer) & set(BLOCK_WEIGHTS[::3])
        assert on_disk(streamer) & set(BLOCK_WEIGHTS[1::3])
        assert_steps_equal(model, reference, "cpu", range(4))


def present_pages(mapping: FileMapping, begin: int, end: int) -> int:
    """Number of pages of a range that this process has mapped in."""
    address = mapping.bytes(begin, end).data_ptr()
    with open("/proc/self/pagemap", "rb") as entries:
        entries.seek(address // PAGE * 8)
        data = entries.read(-(-(address % PAGE + end - begin) // PAGE) * 8)
    return sum(entry >> 63 for entry in memoryview(data).cast("Q"))


def test_steps_map_no_pages_of_weights_on_disk(model: Model, reference: Model, checkpoint: Checkpoint) -> None:
    """Only direct reads are made. Otherwise a model bigger than RAM would be read twice, page by page."""
    (mapping,) = checkpoint.mappings
    with stream_file(model, checkpoint, host_budget=0) as streamer:
        assert_steps_equal(model, reference, "cpu", range(2))
        assert _LIBC.madvise(mapping.bytes(0, 1).data_ptr(), mapping.nbytes, mmap.MADV_DONTNEED) == 0
        assert present_pages(mapping, 0, mapping.nbytes) == 0
        assert_steps_equal(model, reference, "cpu", range(4))
        assert present_pages(mapping, 0, mapping.nbytes) == 0
        assert on_disk(streamer) == streamer.plan.disk


# -- default budgets ---------------------------------------------------------------------------------------------------

STAGED = STAGING_BUFFERS * STAGING_NBYTES * 5 // 4  # a default budget may not use 80 % of this


@pytest.mark.few(1)
@pytest.mark.parametrize(("device_share", "available_share"), thinned([None, 0.3], [0.5, 0.9, 2]))
def test_the_default_budget_is_the_available_memory(
    device_share: float | None, available_share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = saved("llama", tmp_path)
    nbytes = model_nbytes(reference.module)
    monkeypatch.setattr(cpu, "available_nbytes", lambda: int(nbytes * available_share) + STAGED)
    device = None if device_share is None else int(nbytes * device_share)
    module = weightstream.from_pretrained(tmp_path, device="cpu", device_budget=device, progress=False)
    with module.weightstream as streamer:
        plan = streamer.plan
        assert plan.device_nbytes + plan.host_nbytes <= int(nbytes * available_share) * 4 // 5
        assert (plan.disk == frozenset()) == (available_share == 2)
        assert_steps_equal(Model(module=module, inputs=reference.inputs), reference, "cpu", range(3))


def test_weights_in_ram_may_stay_there_if_little_is_available(
    model: Model, reference: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available_nbytes", lambda: (200 << 10) + STAGED)  # for the ring
    with weightstream.offload(model.module, device="cpu", device_budget="150KiB") as streamer:
        assert streamer.plan.disk == frozenset()
        assert streamer.plan.host_nbytes > 0
        assert_steps_equal(model, reference, "cpu", range(3))


def places(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in weights(module).items()}


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "default"])
def test_no_memory_and_no_folder_is_refused_before_anything_moves(
    explicit: bool, model: Model, reference: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(self: CpuBackend, nbytes: int) -> torch.Tensor:
        raise AssertionError(f"{nbytes} bytes were allocated")

    monkeypatch.setattr(CpuBackend, "alloc", forbidden)
    monkeypatch.setattr(cpu, "available_nbytes", lambda: 0)
    before = places(model.module), threads(), open_paths()
    options: dict[str, Any] = {"host_budget": "20KiB"} if explicit else {}
    with pytest.raises(PlanError, match=r"host budget .* < .*in host memory.*offload_folder.*device_budget"):
        weightstream.offload(model.module, device="cpu", device_budget="150KiB", **options)
    assert (places(model.module), threads(), open_paths()) == before
    assert_steps_equal(model, reference, "cpu", range(1))


def test_a_weight_without_a_file_needs_a_folder_to_be_spilled(tmp_path: Path) -> None:
    """It is new, in RAM, and is not in the checkpoint."""
    folder, missing = tmp_path / "model", "model.layers.3.mlp.up_proj.weight"
    inputs = saved("llama", folder).inputs(0)
    tensors = load_file(folder / "model.safetensors")
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options: dict[str, Any] = {"device": "cpu", "device_budget": 200 << 10, "host_budget": 0, "progress": False}
    options["allow_missing"] = True
    before = threads()
    with pytest.raises(PlanError, match="offload_folder"):
        weightstream.from_pretrained(folder, **options)
    assert threads() <= before
    module = weightstream.from_pretrained(folder, **options, offload_folder=tmp_path / "folder")
    with module.weightstream as streamer, torch.no_grad():
        assert missing in on_disk(streamer)
        found = [module(**inputs).logits for _ in range(3)]
    with torch.no_grad():
        assert all(torch.equal(logits, module(**inputs).logits) for logits in found)


def test_the_disk_is_measured_where_it_is_used(
    model: Model, checkpoint: Checkpoint, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_MEASURED_NBYTES", 100 << 10)
    stream_file(model, checkpoint).remove()
    assert disk.num_requests == 0, "nothing is on disk: nothing is measured"
    disk.act = lambda number, views: (time.sleep(0.1), views)[1]
    with stream_file(model, checkpoint, host_budget=0) as streamer:
        assert streamer.plan.step_s > streamer.plan.disk_nbytes / (100 << 10) * 0.05

    def broken(number: int, views: list[memoryview]) -> list[memoryview]:
        raise OSError(errno.EIO, "Input/output error")

    disk.act = broken
    with pytest.raises(StoreError, match="EIO"):
        stream_file(model, checkpoint, host_budget=0)


# -- faults ------------------------------------------------------------------------------------------------------------


class Fault(contextlib.AbstractContextManager[None]):
    """A reversible fault of a file: afterwards its bytes, inode and change time are as before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = path.with_name("kept")
        self.before = path.stat()
        self.content = path.read_bytes()

    def __enter__(self) -> None:
        raise NotImplementedError

    def __exit__(self, *error: object) -> None:
        os.utime(self.path, ns=(self.before.st_atime_ns, self.before.st_mtime_ns))


class Truncated(Fault):
    def __enter__(self) -> None:
        os.truncate(self.path, 3 * PAGE)

    def __exit__(self, *error: object) -> None:
        with self.path.open("r+b") as file:
            file.write(self.content)
        super().__exit__()


class Touched(Fault):
    def __enter__(self) -> None:
        os.utime(self.path, ns=(5, 5))


class Removed(Fault):
    def __enter__(self) -> None:
        os.rename(self.path, self.kept)

    def __exit__(self, *error: object) -> None:
        os.replace(self.kept, self.path)


class Replaced(Removed):
    def __enter__(self) -> None:
        super().__enter__()
        self.path.write_bytes(bytes(len(self.content)))
        os.utime(self.path, ns=(self.before.st_atime_ns, self.before.st_mtime_ns))


FAULTS = (Truncated, Touched, Removed, Replaced)


def steps_that_fail(model: Model, path: Path, num: int = 2) -> list[StoreError]:
    """Run `num` failing steps, and return their errors, which refer to the frames that they passed through."""
    errors = []
    for _ in range(num):
        with pytest.raises(StoreError, match=str(path)) as raised:
            run(model, "cpu", 0)
        errors.append(raised.value)
    return errors


def steps_or_error(model: Model, reference: Model, seed: int) -> StoreError | None:
    """The error of one step, or None after a check of its outputs."""
    try:
        found = run(model, "cpu", seed)
    except StoreError as error:
        return error
    assert torch.equal(found[0], run(reference, "cpu", seed)[0])
    return None


@pytest.mark.few(2)
@pytest.mark.parametrize("home", ["disk", "host", "pinned pages"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_changes_between_steps(
    fault: type[Fault],
    home: str,
    model: Model,
    reference: Model,
    path: Path,
    checkpoint: Checkpoint,
    request: pytest.FixtureRequest,
) -> None:
    if home == "pinned pages":
        request.getfixturevalue("pinning")
    with stream_file(model, checkpoint, host_budget=0 if home == "disk" else None) as streamer:
        for _ in range(2):
            assert_steps_equal(model, reference, "cpu", range(2))
            quiet(streamer)
            with fault(path):
                errors = steps_that_fail(model, path)
                quiet(streamer)
            assert_steps_equal(model, reference, "cpu", range(3))
            assert len(errors) == 2
    assert_steps_equal(model, reference, "cpu", range(2))


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_whose_file_changed_can_be_removed(
    fault: type[Fault], model: Model, reference: Model, path: Path, checkpoint: Checkpoint
) -> None:
    before = threads()
    streamer = stream_file(model, checkpoint, host_budget=0)
    assert_steps_equal(model, reference, "cpu", range(2))
    quiet(streamer)
    with fault(path):
        steps_that_fail(model, path)
        streamer.remove()
        assert threads() <= before
    assert_steps_equal(model, reference, "cpu", range(2))


# A device continues to read pinned pages of a truncated file. Here such a read would end the process.
DURING = [("disk", fault) for fault in FAULTS] + [("pinned pages", fault) for fault in FAULTS if fault is not Truncated]


@pytest.mark.few(2)
@pytest.mark.parametrize(("home", "fault", "block"), thinned(DURING, [0, 3, 5]))
def test_a_file_that_changes_during_a_step(
    home: str,
    fault: type[Fault],
    block: int,
    model: Model,
    reference: Model,
    path: Path,
    checkpoint: Checkpoint,
    request: pytest.FixtureRequest,
) -> None:
    """The step, and each later one, gives the right bits or an error, until the file is restored."""
    happening = contextlib.ExitStack()
    if home == "pinned pages":
        request.getfixturevalue("pinning")
    with stream_file(model, checkpoint, host_budget=0 if home == "disk" else None) as streamer:
        assert_steps_equal(model, reference, "cpu", range(2))
        armed = [fault(path)]
        hook = model.module[block].register_forward_hook(
            lambda *args: happening.enter_context(armed.pop()) if armed else None
        )
        errors = [steps_or_error(model, reference, 0) for _ in range(3)]
        failed = [str(error) for error in errors if error is not None]
        assert len(failed) == 3 if block == 0 else len(failed) >= 2, "the other pieces are not read any more"
        assert all(str(path) in message for message in failed)
        hook.remove()
        quiet(streamer)
        happening.close()
        assert_steps_equal(model, reference, "cpu", range(3))


@pytest.mark.few(2)
@pytest.mark.parametrize("number", [1, 2, 5, 9, 14])
def test_a_failed_read_ends_its_step_and_no_other(
    number: int, model: Model, reference: Model, path: Path, checkpoint: Checkpoint, disk: Disk
) -> None:
    """An error that is kept, as by a notebook, keeps no buffer of the staging ring."""
    kept: list[BaseException] = []
    with stream_file(model, checkpoint, host_budget=0) as streamer:
        assert_steps_equal(model, reference, "cpu", range(2))
        for _ in range(4):
            quiet(streamer)
            broken = disk.num_requests + number

            def act(request: int, views: list[memoryview], broken: int = broken) -> list[memoryview]:
                if request == broken:
                    raise OSError(errno.EIO, "Input/output error")
                return views

            disk.act = act
            errors = [steps_or_error(model, reference, seed) for seed in range(3)]
            kept += [error for error in errors if error is not None]
    assert all(f"{path}: reading" in str(error) and "EIO" in str(error) for error in kept)
    assert len(kept) == 4
    assert_steps_equal(model, reference, "cpu", range(2))


class Experts(nn.Module):
    """A block with more matrices than the staging ring has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(2 * STAGING_BUFFERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x


@pytest.mark.few(2)
@pytest.mark.parametrize("number", [1, 2, 20])
def test_later_steps_read_although_an_error_is_kept(number: int, path: Path, disk: Disk) -> None:
    torch.manual_seed(4)
    model = Model(module=nn.Sequential(*(Experts() for _ in range(4))), inputs=wide().inputs)
    wanted, kept = run(model, "cpu", 0), []
    streamer = stream_file(model, on_file(model, path), host_budget=0)
    run(model, "cpu", 0)
    quiet(streamer)
    first = disk.num_requests

    def act(request: int, views: list[memoryview]) -> list[memoryview]:
        if request == first + number:
            raise OSError(errno.EIO, "Input/output error")
        return views

    def steps() -> None:
        for _ in range(4):
            try:
                assert torch.equal(run(model, "cpu", 0)[0], wanted[0])
            except StoreError as error:
                kept.append(error)
        kept.append(None)

    disk.act = act
    thread = threading.Thread(target=steps, daemon=True)  # a daemon, so that a hang fails only this test
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it hangs"
    assert len(kept) == 2
    streamer.remove()


@pytest.mark.parametrize("seed", range(3))
def test_short_reads_are_continued(
    seed: int, model: Model, reference: Model, checkpoint: Checkpoint, disk: Disk
) -> None:
    cut, lock = random.Random(seed), threading.Lock()

    def act(number: int, views: list[memoryview]) -> list[memoryview]:
        with lock:
            nbytes = cut.choice([1, PAGE - 1, PAGE, 2 * PAGE, len(views[0])])
        return [views[0][: -(-min(nbytes, len(views[0])) // PAGE) * PAGE]]

    disk.act = act
    with stream_file(model, checkpoint, host_budget=0) as streamer:
        assert_steps_equal(model, reference, "cpu", range(4))
        quiet(streamer)
        assert disk.num_requests > 4 * len(streamer.plan.disk)


def test_a_read_that_returns_nothing_is_an_error(
    model: Model, reference: Model, path: Path, checkpoint: Checkpoint, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stream_file(model, checkpoint, host_budget=0) as streamer:
        assert_steps_equal(model, reference, "cpu", range(2))
        quiet(streamer)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda *args: 0)
            with pytest.raises(StoreError, match=rf"{path}: short read at offset \d+: wanted \d+ bytes, got 0"):
                run(model, "cpu", 0)
            quiet(streamer)
        assert_steps_equal(model, reference, "cpu", range(3))


# -- slow disks --------------------------------------------------------------------------------------------------------


def slow(disk: Disk, seed: int, most_s: float = 0.003) -> None:
    pause, lock = random.Random(seed), threading.Lock()

    def act(number: int, views: list[memoryview]) -> list[memoryview]:
        with lock:
            pause_s = pause.uniform(0, most_s)
        time.sleep(pause_s)
        return views

    disk.act = act


class Watched(nn.Linear):
    """Calls `on_forward` while its unit is open."""

    on_forward: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.on_forward()
        return super().forward(x)


@pytest.mark.few(2)
@pytest.mark.usefixtures("nothing_foreseen")
@pytest.mark.parametrize("seed", range(3))
def test_slow_reads_change_no_bit_and_cause_no_race(
    seed: int, model: Model, reference: Model, checkpoint: Checkpoint, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ClockBackend(Poison(Delay(CpuBackend(), seed, 0.001)))
    monkeypatch.setattr(weightstream.runtime.devices.opening, "CpuBackend", lambda: clock)
    slow(disk, seed)
    for module in model.module.modules():
        module.__class__ = Watched if isinstance(module, nn.Linear) else type(module)
    with stream_file(model, checkpoint, host_budget=0) as streamer:
        plan, reads = streamer.plan, 0
        names = {unit.name: index for index, unit in enumerate(plan.manifest.units)}

        def reader(unit: int) -> Callable[[], None]:
            def read() -> None:
                nonlocal reads
                copies = streamer._homes.copies(plan, unit, streamer._binding.memory[0])
                clock.read(copies)
                reads += bool(copies)

            return read

        for name, module in model.module.named_modules():
            if isinstance(module, Watched):
                module.on_forward = reader(names[name] if name in names else names[name.split(".")[0]])
        assert_steps_equal(model, reference, "cpu", range(5))
        assert reads > 5 * 6
        assert clock.races == []


@pytest.mark.parametrize("seed", range(3))
def test_kernels_on_a_queue_see_the_bytes_that_were_read(seed: int, path: Path, disk: Disk) -> None:
    slow(disk, seed)
    with Rig(equal_plan(5, 2), Poison(Delay(QueueBackend(), seed, 0.001))) as rig:
        path.write_bytes(b"".join(home.numpy().tobytes() for home in rig.homes))
        mapping, begin = FileMapping(path), 0
        file = DirectFile(mapping)
        for unit, home in enumerate(rig.homes):
            read = (file, begin, begin + home.numel())
            rig.copies[unit][:] = [replace(copy, read=read) for copy in rig.copies[unit]]
            begin += home.numel()
        rig.engine.prime()
        for order in [None] * 8 + [(4, 3, 2, 1, 0), (1, 1, 4), None]:
            rig.step(order)
        rig.clock.synchronize()
        assert rig.num_kernels == 9 * 5 + 5 + 3
        assert disk.num_requests > 40
        assert rig.mismatches == []
        assert rig.clock.races == []


# -- a real limit ------------------------------------------------------------------------------------------------------

LIMITED = """
import json, sys, torch, transformers, weightstream
import transformers.models.llama.modeling_llama

def anonymous():
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))

own = anonymous()
prompt = torch.arange(1, 9)[None]
options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
if sys.argv[2] == "plain":
    model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
    print(json.dumps(dict(tokens=model.generate(prompt, **options).tolist(), own=own)))
else:
    model = weightstream.from_pretrained(sys.argv[1], device="cpu", progress=False)
    plan = model.weightstream.plan
    tokens = model.generate(prompt, **options).tolist()
    print(json.dumps(dict(tokens=tokens, disk=plan.disk_nbytes, device=plan.device_nbytes, host=plan.host_nbytes,
                          summary=str(plan), anonymous=anonymous(), own=own)))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 560 MiB, whose file is not in the page cache."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 10, "num_attention_heads": 12}
    tensors = dict(llama_tensors(folder, **sizes, vocab_size=1024))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def alone(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout.splitlines()[-1]


@pytest.mark.stress
@pytest.mark.slow
def test_a_model_of_one_and_a_half_times_the_memory_generates(large: Path) -> None:
    python = (sys.executable, "-c", LIMITED)
    file = large / "model.safetensors"
    nbytes, wanted = file.stat().st_size, json.loads(alone(*python, str(large), "plain"))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the cgroup is charged for these reads
    with limited(wanted["own"] + int(nbytes / 1.5)) as enter:
        found = json.loads(alone(*enter, *python, str(large), "streamed"))
    assert found["tokens"] == wanted["tokens"]
    assert found["disk"] > 0.2 * nbytes
    assert found["device"] + found["host"] <= nbytes / 1.5
    assert found["anonymous"] - found["own"] <= nbytes / 1.5
    assert "from disk" in found["summary"]
