"""Faults from outside, through the public functions: the error says what failed, and the model works afterwards."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import weightstream.runtime.devices.opening
from models import TEXT
from weightstream.errors import InvariantError, OffloadError, PlanError, StoreError, UnsupportedError
from weightstream.runtime.devices.backend import Copy
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.ring.engine import State
from wrapped import ClockBackend, Delay, Fault, Limit, Poison

WIDTH = 64
NUM_BLOCKS = 6
BUDGET = 48 << 10

pytestmark = pytest.mark.usefixtures("nothing_foreseen")  # backends count their calls


class Block(nn.Module):
    """A linear and a tanh. `fault` runs between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if fault := FAULTS.pop(id(self), None):
            fault()
        return x + torch.tanh(y)


FAULTS: dict[int, Callable[[], None]] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No thread outlives a test, even after a failure."""
    before = set(threading.enumerate())
    FAULTS.clear()
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    return Net().eval()


@pytest.fixture
def plain(net: Net) -> Net:
    return copy.deepcopy(net)


def x(seed: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def offload(net: nn.Module) -> weightstream.Streamer:
    streamer = weightstream.offload(net, device="cpu", device_budget=BUDGET)
    assert streamer.plan.host_nbytes > 0
    return streamer


def assert_works(net: nn.Module, plain: nn.Module, steps: int = 3) -> None:
    for seed in range(10, 10 + steps):
        assert torch.equal(net(x(seed)), plain(x(seed)))


def assert_untouched(net: nn.Module, before: dict[str, tuple[int, type]]) -> None:
    """Check that nothing of the runtime remains on the model, and that every tensor is at its old place."""
    assert places(net) == before
    for name, module in net.named_modules():
        left = {"forward", "_apply", "weightstream"} & module.__dict__.keys()
        assert not left, name
        assert [*module._forward_hooks, *module._forward_pre_hooks] == [], name


def places(net: nn.Module) -> dict[str, tuple[int, type]]:
    return {name: (t.data_ptr(), type(t)) for name, t in [*net.named_parameters(), *net.named_buffers()]}


def use_backend(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    monkeypatch.setattr(weightstream.runtime.devices.opening, "CpuBackend", make)


# -- copies and memory that fail ---------------------------------------------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize("nth", range(12))
def test_a_copy_that_fails_once_ends_only_its_step(
    net: Net, plain: Net, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Copy] = []

    def fail(copy: Copy) -> bool:
        copies.append(copy)
        return len(copies) == nth + 1

    use_backend(monkeypatch, lambda: Fault(CpuBackend(), fail))
    failed = 0
    with offload(net):
        for seed in range(6):
            try:
                found = net(x(seed))
            except StoreError:
                failed += 1
            else:
                assert torch.equal(found, plain(x(seed)))
        assert failed == 1
        assert len(copies) > nth + 6
    assert_works(net, plain)


def test_copies_that_always_fail_leave_a_model_that_can_be_removed(
    net: Net, plain: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backend(monkeypatch, lambda: Fault(CpuBackend(), lambda copy: True))
    before = places(net)
    streamer = offload(net)
    for _ in range(3):
        with pytest.raises(StoreError):
            net(x())
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
    streamer.remove()
    assert_untouched(net, before)
    assert_works(net, plain)


def test_a_copy_that_failed_once_is_repeated_by_the_next_sync(net: Net) -> None:
    """The life cycle of an engine: one read error ends one graph, and not the engine."""
    streamer = offload(net)
    for seed in range(3):
        net(x(seed))
    streamer.fix()
    engine = streamer._binding.engine
    unit = next(unit for unit in streamer.plan.first if streamer.plan.streams(unit))
    copies, faults = engine.copies[unit], [StoreError("once"), StoreError("twice")]

    def fail() -> None:
        if faults:
            raise faults.pop()

    engine.copies[unit] = [replace(copy, prepare=fail) for copy in copies]  # type: ignore[index]
    engine.forget([unit])
    for _ in range(2):
        with pytest.raises(StoreError):
            streamer.sync()
    streamer.sync()
    assert engine.fences[unit].state is State.READY
    streamer.remove()


def test_memory_that_weights_pass_through_is_never_taken_for_a_weight(net: Net, plain: Net) -> None:
    streamer = offload(net)
    for seed in range(3):
        net(x(seed))
    weight = net.blocks[2].linear.weight
    ring = streamer._binding.memory[0]
    weight.data = ring[: weight.nbytes].view(weight.dtype).view(weight.shape)
    with pytest.raises(InvariantError, match=re.escape("blocks.2.linear.weight")):
        net(x())
    assert_works(net, plain)  # it has its own bytes again
    streamer.remove()
    assert_works(net, plain)


def test_autocast_caches_no_casts_of_streamed_weights() -> None:
    """They would stay until autocast ends, on top of the budget: here 96 MiB."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(48)]).eval()
    plain, y = copy.deepcopy(model), torch.randn(1, 1024)

    def resident_nbytes() -> int:
        gc.collect()
        return psutil.Process().memory_info().rss

    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget="24MiB", codec="none"):
        for _ in range(3):
            model(y)
        before = resident_nbytes()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = [model(y) for _ in range(2)]
            assert resident_nbytes() - before < 40 << 20
            assert torch.is_autocast_cache_enabled()
            assert all(torch.equal(each, plain(y)) for each in got)


def test_a_device_without_memory_for_the_ring_leaves_the_model_unchanged(
    net: Net, plain: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backend(monkeypatch, lambda: Limit(CpuBackend(), 1000))
    before = places(net)
    with pytest.raises(torch.OutOfMemoryError):
        offload(net)
    assert_untouched(net, before)
    assert_works(net, plain)
    monkeypatch.undo()
    with offload(net):
        assert_works(net, plain)


def test_an_impossible_budget_leaves_the_model_unchanged(net: Net, plain: Net) -> None:
    before = places(net)
    with pytest.raises(PlanError, match="Raise the budget"):
        weightstream.offload(net, device="cpu", device_budget=1000)
    assert_untouched(net, before)
    assert_works(net, plain)


def test_an_offload_folder_that_is_a_file_leaves_the_model_unchanged(net: Net, plain: Net, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    before = places(net)
    with pytest.raises(StoreError, match="offload_folder"):
        weightstream.offload(net, device="cpu", device_budget=BUDGET, host_budget=0, offload_folder=tmp_path / "file")
    assert_untouched(net, before)
    assert_works(net, plain)


def test_slow_poisoned_copies_change_nothing(net: Net, plain: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, lambda: Poison(Delay(CpuBackend(), 5, 0.002)))
    with offload(net):
        assert_works(net, plain, steps=8)


def test_every_read_of_a_step_is_ordered(net: Net, plain: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock checker with a whole model: each unit's forward reads the bytes that its fill wrote."""
    clock = ClockBackend(Poison(CpuBackend()))
    use_backend(monkeypatch, lambda: clock)
    reads = 0
    with offload(net) as streamer:
        plan = streamer.plan
        copies = {
            unit.name: streamer._homes.copies(plan, u, streamer._binding.memory[0])
            for u, unit in enumerate(plan.manifest.units)
        }

        def reader(unit: str) -> Callable[..., None]:
            def read(*args: object) -> None:
                nonlocal reads
                clock.read(copies[unit])
                reads += bool(copies[unit])

            return read

        hooks = [b.linear.register_forward_hook(reader(f"blocks.{i}")) for i, b in enumerate(net.blocks)]
        assert_works(net, plain, steps=4)
        for hook in hooks:
            hook.remove()
    assert reads == 4 * sum(plan.streams(u) for u in range(len(plan.manifest.units))) > 0
    assert clock.races == []


# -- a step that ends early --------------------------------------------------------------------------------------------


class Oops(Exception):
    pass


def raising(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


@pytest.mark.few(2)
@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("where", range(NUM_BLOCKS))
@pytest.mark.parametrize("error", [Oops("in a block"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_an_error_in_a_block_ends_only_its_step(
    net: Net, plain: Net, error: BaseException, where: int, warm: int
) -> None:
    with offload(net):
        assert_works(net, plain, steps=warm)
        FAULTS[id(net.blocks[where])] = raising(error)
        with pytest.raises(type(error)):
            net(x())
        for name, parameter in net.named_parameters():  # true values, whatever was open
            assert torch.equal(parameter, plain.get_parameter(name))
        assert_works(net, plain)


@pytest.mark.parametrize("error", [Oops("in a block"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_removing_after_an_error_restores_exactly(net: Net, plain: Net, error: BaseException) -> None:
    before = places(net)
    streamer = offload(net)
    FAULTS[id(net.blocks[3])] = raising(error)
    with pytest.raises(type(error)):
        net(x())
    streamer.remove()
    assert_untouched(net, before)
    assert_works(net, plain)


def test_an_interrupted_thread_does_not_lock_others_out(net: Net, plain: Net) -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            net(x())
        except KeyboardInterrupt as error:
            caught.append(error)

    with offload(net):
        FAULTS[id(net.blocks[2])] = raising(KeyboardInterrupt())
        for _ in range(2):
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
        assert len(caught) == 1
        assert_works(net, plain)


def test_removing_inside_a_step_is_refused_or_clean(net: Net, plain: Net) -> None:
    streamer = offload(net)
    FAULTS[id(net.blocks[2])] = streamer.remove
    worked: list[bool] = []

    def run() -> None:
        with contextlib.suppress(OffloadError):
            assert torch.equal(net(x()), plain(x()))
        streamer.remove()
        assert_works(net, plain)
        worked.append(True)

    thread = threading.Thread(target=run, daemon=True)  # a daemon, so that a hang fails only this test
    thread.start()
    thread.join(20)
    assert worked, "hangs" if thread.is_alive() else "raised"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_unit_that_runs_inside_another_and_inside_itself_is_released(net: Net, plain: Net, depth: int) -> None:
    """The inner unit needs the bytes of the outer one, so it is served from memory of its own."""

    def call_third(of: Net, left: int) -> Callable[[], None]:
        def call() -> None:
            if left > 1:
                FAULTS[id(of.blocks[3])] = call_third(of, left - 1)
            results.append(of.blocks[3](x(7)))

        return call

    results: list[torch.Tensor] = []
    with weightstream.offload(net, device="cpu", device_budget=20 << 10) as streamer:  # a ring of one unit
        for _ in range(3):
            results.clear()
            FAULTS[id(net.blocks[1])] = call_third(net, depth)
            found = net(x())
            inner = list(results)
            results.clear()
            FAULTS[id(plain.blocks[1])] = call_third(plain, depth)
            assert torch.equal(found, plain(x()))
            assert len(inner) == depth
            assert all(torch.equal(a, b) for a, b in zip(inner, results, strict=True))
        assert_works(net, plain)
        before = streamer.stats().unplanned_fills
        assert_works(net, plain)
        assert streamer.stats().unplanned_fills == before, "a unit was not released"


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_that_call_one_model_get_their_own_results(net: Net, plain: Net) -> None:
    num_threads, num_steps = 4, 12
    wanted = {seed: plain(x(seed, rows=1 + seed % 3)) for seed in range(num_threads * num_steps)}
    found: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []

    def run(first: int) -> None:
        try:
            for seed in range(first, first + num_steps):
                found[seed] = net(x(seed, rows=1 + seed % 3))
        except BaseException as error:
            errors.append(error)

    with offload(net) as streamer:
        threads = [threading.Thread(target=run, args=(n * num_steps,), daemon=True) for n in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert streamer.stats().steps == num_threads * num_steps
    assert errors == []
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[seed], wanted[seed]) for seed in wanted)


def test_a_model_is_removed_between_the_steps_of_another_thread(net: Net, plain: Net) -> None:
    wanted = plain(x())
    found: list[torch.Tensor] = []
    started = threading.Event()

    def run() -> None:
        for _ in range(40):
            found.append(net(x()))
            started.set()

    streamer = offload(net)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    streamer.remove()
    thread.join(60)
    assert len(found) == 40
    assert all(torch.equal(y, wanted) for y in found)


# -- copies of the model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_an_offloaded_model_is_plain_and_its_own(
    net: Net, plain: Net, how: Callable[[nn.Module], nn.Module], steps: int
) -> None:
    with offload(net) as streamer:
        assert_works(net, plain, steps)
        twin = how(net)
        moved = streamer.stats().fills
        assert_works(twin, plain)
        assert streamer.stats().fills == moved
        assert not any(id(a) == id(b) for a, b in zip(twin.parameters(), net.parameters(), strict=True))
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        twin.half()
        assert_works(net, plain)
    assert_works(net, plain)


def test_a_copy_can_be_offloaded(net: Net, plain: Net) -> None:
    with offload(net):
        twin = copy.deepcopy(net)
        with offload(twin):
            for seed in range(3):
                assert torch.equal(twin(x(seed)), plain(x(seed)))
                assert torch.equal(net(x(seed)), plain(x(seed)))


# -- tensors that are refused ------------------------------------------------------------------------------------------


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.empty(4, 4, device="meta"), "on the meta device"),
        (lambda: torch.eye(4).to_sparse(), "torch.sparse_coo"),
        (lambda: quantized(), "quantized"),
    ],
    ids=["meta", "sparse", "quantized"],
)
@pytest.mark.parametrize("as_parameter", [True, False], ids=["parameter", "buffer"])
def test_a_tensor_that_cannot_stream_is_refused_by_name(
    net: Net, plain: Net, make: Callable[[], torch.Tensor], said: str, as_parameter: bool
) -> None:
    tensor = make()
    if as_parameter:
        net.blocks[2].odd = nn.Parameter(tensor, requires_grad=False)
    else:
        net.blocks[2].register_buffer("odd", tensor)
    with pytest.raises(UnsupportedError, match=r"^blocks\.2\.odd is ") as refused:
        offload(net)
    assert said in str(refused.value)
    del net.blocks[2].odd
    with offload(net):
        assert_works(net, plain)


# -- files that change while they stream -------------------------------------------------------------------------------

CHANGES = """
import os, sys, torch, weightstream
from pathlib import Path
file = Path(sys.argv[1], "model.safetensors")
ids = torch.arange(12).reshape(2, 6)
kept = file.read_bytes()

def truncate():
    os.truncate(file, 4096)

def replace():
    other = file.with_name("other")
    other.write_bytes(bytes(len(kept)))
    os.replace(other, file)

for change in (truncate, replace):
    file.write_bytes(kept)
    budget = int(len(kept) * 0.6)
    model = weightstream.from_pretrained(file.parent, device="cpu", device_budget=budget, progress=False)
    streamer = model.weightstream
    assert streamer.plan.host_nbytes > 0
    with torch.no_grad():
        wanted = [model(input_ids=ids).logits for _ in range(3)][-1]
        streamer._backend.synchronize()  # a copy that is under way when the file shrinks cannot be saved
        change()
        for _ in range(2):
            try:
                model(input_ids=ids)
                print("no error")
            except weightstream.StoreError as error:
                assert str(file) in str(error), error
                print("StoreError")
        streamer.remove()
        if change is truncate:
            with open(file, "r+b") as target:
                target.write(kept)
        assert torch.equal(model(input_ids=ids).logits, wanted)
        print("works again")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(folder)
    return folder


@pytest.mark.stress
def test_a_checkpoint_that_changes_is_an_error_and_not_a_crash(checkpoint: Path) -> None:
    """In a process of its own: reading a page that the file no longer has would kill it."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:weightstream", "-c", CHANGES, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-3000:]}"
    assert done.stdout.splitlines() == ["StoreError", "StoreError", "works again"] * 2
