"""Compressed weights from the plan to `remove()`: the memory in use, sizes that were estimated too small, failures."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from coded_rig import PLACES, Block, Chain, budgets, exact, offload, random_model, rows
from models import assert_same, step, weights
from repeats import thinned
from weightstream.codec import estimate
from weightstream.errors import StoreError
from weightstream.inputs import gathering
from weightstream.plan.plan import Plan
from weightstream.runtime.devices import opening
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.weights import relocation as moves_module
from weightstream.store.lazy import DecodedMemory
from wrapped import Fault, Limit

HALF = "blocks.1.up.weight"


class Counted(Limit):
    """The device with its allocations counted, and their maximum."""

    def __init__(self) -> None:
        super().__init__(CpuBackend(), 1 << 40)
        self.most_nbytes = 0

    def alloc(self, nbytes: int) -> torch.Tensor:
        memory = super().alloc(nbytes)
        self.most_nbytes = max(self.most_nbytes, self.held_nbytes)
        return memory


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    """The devices of streamers that are opened, in order."""
    made: list[Counted] = []

    def make() -> Counted:
        made.append(Counted())
        return made[-1]

    monkeypatch.setattr(opening, "CpuBackend", make)
    return made


def allocated_nbytes(plan: Plan) -> int:
    """Device bytes of a plan. Uncompressed residents stay where they were."""
    return plan.device_nbytes - sum(
        n for a, n in plan.manifest.aliases.items() if a in plan.resident and a not in plan.manifest.codes
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_the_device_holds_the_bytes_of_the_plan(place: str, counted: list[Counted]) -> None:
    model = random_model()
    streamer = offload(model, place)
    plan, device = streamer.plan, counted[-1]
    assert plan.buffer_nbytes > 0
    assert device.held_nbytes == allocated_nbytes(plan)
    assert plan.budget is not None
    assert streamer.stats().held_nbytes["device"] == plan.device_nbytes <= plan.budget
    for seed in range(3):
        step(model, {"x": rows(seed)})
        assert device.held_nbytes == allocated_nbytes(plan)
    assert device.most_nbytes == allocated_nbytes(plan)
    streamer.remove()
    del streamer
    gc.collect()
    assert device.held_nbytes == 0


def test_a_borrowed_buffer_is_given_back(counted: list[Counted]) -> None:
    model = random_model()
    inner = model.blocks[1]
    model.blocks[3].register_module("up", Twice(model.blocks[3].up, inner))
    with offload(model, "resident") as streamer:
        for seed in range(3):
            step(model, {"x": rows(seed)})
            gc.collect()
            assert counted[-1].held_nbytes == allocated_nbytes(streamer.plan)


class Twice(nn.Module):
    """Runs a block, which is not its own, besides its own linear."""

    def __init__(self, linear: nn.Linear, other: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.others = (other,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.others[0](x)
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("place", ["streams", "resident"])
def test_the_plain_weights_are_freed(place: str) -> None:
    model, plain = random_model(), random_model()
    coded = offload(model, place)
    names = set(coded.plan.manifest.codes)
    coded.remove()
    refs = {name: weakref.ref(model.get_parameter(name).untyped_storage()) for name in names}
    addresses = {name: model.get_parameter(name).data_ptr() for name in names}
    with offload(model, place) as streamer:
        gc.collect()
        assert len(refs) == len(streamer.plan.manifest.codes) > 0
        held = streamer.stats().held_nbytes
        plain_nbytes = sum(home.group.nbytes for home in streamer._homes.homes.values())
        rest = plain_nbytes - streamer.plan.manifest.nbytes
        assert (
            held["host"] + held["device"] - streamer.plan.ring_nbytes - streamer.plan.buffer_nbytes
            == plain_nbytes - rest
        )
        assert all(home.is_undecoded for home in streamer._homes.homes.values() if home.group.alias in names)
    assert addresses.keys() == refs.keys()
    assert exact(model) == exact(plain)


RUN = """
    import gc, json, sys
    import torch, weightstream

    def status(*names):
        gc.collect()
        with open("/proc/self/status") as status:
            return sum(int(line.split()[1]) << 10 for line in status if line.startswith(names))

    def anonymous():
        return status("RssAnon", "RssShmem")

    def linears(num):
        return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(num)])

    torch.manual_seed(0)
    x = torch.randn(2, 2048).bfloat16()
    with torch.no_grad():
        warm = linears(1)
        with weightstream.offload(warm, device="cpu", device_budget="40MiB", codec="compressed"):
            warm(x)
        del warm
        own = anonymous()
        model = linears(8)
        plain = anonymous() - own
        expected = model(x)
        for budget in map(int, sys.argv[1:]):
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak starts again from here
            before = status("VmRSS")
            streamer = weightstream.offload(model, device="cpu", device_budget=budget, codec="compressed")
            found = dict(plain=plain, peak=status("VmHWM") - before, settled=anonymous() - own)
            same = torch.equal(model(x), expected) and torch.equal(model(x), expected)
            found |= dict(after=anonymous() - own, held=streamer.stats().held_nbytes, ring=streamer.plan.ring_nbytes)
            streamer.remove()
            found |= dict(removed=anonymous() - own, same=same and torch.equal(model(x), expected))
            print(json.dumps(found))
"""


@pytest.mark.stress
def test_the_process_has_memory_for_the_compressed_form_only() -> None:
    budgets = 30 << 20, 1 << 30
    exact_heap = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # the C library keeps no freed memory
    run = [sys.executable, "-c", textwrap.dedent(RUN), *map(str, budgets)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=120, env=os.environ | exact_heap)
    assert done.returncode == 0, done.stderr
    nbytes, slack = 8 * 2 * 2048**2, 6 << 20
    for budget, line in zip(budgets, done.stdout.splitlines(), strict=True):
        print(line)
        found = json.loads(line)
        held = found["held"]
        assert found["same"]
        assert abs(found["plain"] - nbytes) < slack
        assert (found["ring"] > 0) is (budget < nbytes)
        assert (held["host"] if found["ring"] else held["device"] - 2 * 2048**2) < 0.72 * nbytes
        assert found["after"] < held["host"] + held["device"] + slack
        assert found["settled"] < found["after"] + slack
        assert abs(found["removed"] - nbytes) < slack
        assert found["peak"] < 40 << 20, (
            "encoded one by one: all compressed and all plain weights together take 47 MiB more"
        )


# -- sizes that were estimated too small -------------------------------------------------------------------------------


def estimate_less(monkeypatch: pytest.MonkeyPatch, share: float, most: int = 1 << 40) -> list[str]:
    """Make estimates of tensors up to `most` bytes too small by this share, and return the estimates."""
    found: list[str] = []

    def less(parts: Sequence[torch.Tensor], dtype: str) -> int:
        found.append(dtype)
        size, nbytes = estimate.estimate(parts, dtype), sum(part.numel() for part in parts)
        return int(size * share) // 512 * 512 if nbytes <= most else size

    monkeypatch.setattr(gathering, "estimate", less)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("place", "share"), thinned(PLACES, [0.98, 0.5]))
def test_sizes_estimated_too_small_are_planned_again(
    place: str, share: float, monkeypatch: pytest.MonkeyPatch, counted: list[Counted]
) -> None:
    model, plain = random_model(), random_model()
    budget = budgets(model, (place,))[place]
    real = _codes(model, budget)
    estimated = estimate_less(monkeypatch, share)
    with weightstream.offload(model, device="cpu", device_budget=budget, codec="compressed") as streamer:
        assert estimated
        assert streamer.plan.manifest.codes == real
        assert counted[-1].held_nbytes == allocated_nbytes(streamer.plan)
        assert streamer.plan.device_nbytes <= budget
        for seed in range(4):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
    assert exact(model) == exact(plain)


def _codes(model: nn.Module, budget: int) -> dict[str, int]:
    with weightstream.offload(model, device="cpu", device_budget=budget, codec="compressed") as streamer:
        return dict(streamer.plan.manifest.codes)


def test_a_size_estimated_too_large_wastes_only_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = random_model(), random_model()
    estimate_less(monkeypatch, 1.2)
    with offload(model) as streamer:
        assert streamer.plan.manifest.codes
        for seed in range(4):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
    assert exact(model) == exact(plain)


class Strays(Chain):
    """The root reads a weight of a block, which the first step shows: then units are cut again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.functional.linear(x, self.blocks[2].up.weight)[:, :128]


@pytest.mark.few(1)
@pytest.mark.usefixtures("nothing_foreseen")
@pytest.mark.parametrize(("place", "share"), thinned(PLACES, [0.5, 1.0]))
def test_weights_that_get_a_new_unit_are_compressed_again(
    place: str, share: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = random_model(Strays), random_model(Strays)
    budget = 2 * budgets(model, (place,))[place]
    estimate_less(monkeypatch, share)
    caplog.set_level(logging.INFO, logger="weightstream")
    with weightstream.offload(model, device="cpu", device_budget=budget, codec="compressed") as streamer:
        for seed in range(5):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
        assert any("read outside" in record.getMessage() for record in caplog.records)
        assert streamer.plan.manifest.codes
        assert all(h.layout is not None for a, h in streamer._homes.homes.items() if a in streamer.plan.manifest.codes)
    assert exact(model) == exact(plain)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(("place", "less"), thinned(PLACES, [1, 1 << 14, 1 << 30]))
def test_a_device_with_less_memory_than_reported_leaves_the_model_unchanged(
    place: str, less: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = random_model(), random_model()
    streamer = offload(model, place)
    budget, needed = streamer.plan.budget, allocated_nbytes(streamer.plan)
    streamer.remove()
    device = Limit(CpuBackend(), max(0, needed - less))
    monkeypatch.setattr(opening, "CpuBackend", lambda: device)
    with pytest.raises(torch.OutOfMemoryError):
        weightstream.offload(model, device="cpu", device_budget=budget, codec="compressed")
    gc.collect()
    assert device.held_nbytes == 0
    assert exact(model) == exact(plain)
    monkeypatch.undo()
    with offload(model, place):
        assert_same(step(model, {"x": rows(0)}), step(plain, {"x": rows(0)}))


FAILURES: dict[str, type[Exception]] = {"no memory": MemoryError, "a file": StoreError, "anything": RuntimeError}


@pytest.mark.few(2)
@pytest.mark.parametrize(("place", "after", "kind"), thinned(PLACES, [0, 3], FAILURES))
def test_failed_encoding_leaves_the_model_unchanged(
    place: str, after: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = random_model(), random_model()
    budget = budgets(model, (place,))[place]
    real, calls = moves_module.coding.encode, []

    def encode(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > after:
            raise FAILURES[kind]("armed")
        return real(*args)

    monkeypatch.setattr(moves_module.coding, "encode", encode)
    with pytest.raises(FAILURES[kind], match="armed"):
        weightstream.offload(model, device="cpu", device_budget=budget, codec="compressed")
    del calls[:]
    assert exact(model) == exact(plain)
    assert not hasattr(model, "weightstream")
    monkeypatch.undo()
    with offload(model, place):
        assert_same(step(model, {"x": rows(0)}), step(plain, {"x": rows(0)}))


def test_a_failed_copy_is_reported_and_the_next_step_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = random_model(), random_model()
    budget = budgets(model, ("streams",))["streams"]
    num, failing = [0], [5, 6, 11]

    def fail(copy: Any) -> bool:
        num[0] += 1
        return num[0] in failing

    monkeypatch.setattr(opening, "CpuBackend", lambda: Fault(CpuBackend(), fail))
    errors = 0
    with weightstream.offload(model, device="cpu", device_budget=budget, codec="compressed"):
        for seed in range(6):
            try:
                found = step(model, {"x": rows(seed)})
            except StoreError:
                errors += 1
                continue
            assert_same(found, step(plain, {"x": rows(seed)}))
    assert errors
    assert exact(model) == exact(plain)


class Raises(Block):
    """Fails inside its forward when it is `armed`."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.armed:
            raise ValueError("armed")
        return x


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_failing_forward_gives_the_buffer_back(place: str) -> None:
    def build() -> Any:
        made = random_model(lambda: Chain(num_blocks=4))
        made.blocks[2].__class__ = Raises
        return made

    model, plain = build(), build()
    with offload(model, place) as streamer:
        for fixed in (False, True):
            for armed in (False, True, False):
                model.blocks[2].armed = armed
                with streamer.step() if fixed else pytest.MonkeyPatch.context():
                    if armed:
                        with pytest.raises(ValueError, match="armed"):
                            step(model, {"x": rows(1)})
                    else:
                        assert_same(step(model, {"x": rows(1)}), step(plain, {"x": rows(1)}))
    assert exact(model) == exact(plain)


# -- the end -----------------------------------------------------------------------------------------------------------


ENDS: dict[str, Callable[[Any], object]] = {
    "once": lambda streamer: streamer.remove(),
    "twice": lambda streamer: (streamer.remove(), streamer.remove()),
    "a with block": lambda streamer: streamer.__exit__(None, None, None),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "end"),
    [
        pytest.param(place, end, marks=[pytest.mark.stress] * ((i + j) % 3 != 0))
        for i, place in enumerate(PLACES)
        for j, end in enumerate(ENDS)
    ],
)
def test_remove_restores_everything_and_the_model_can_be_offloaded_again(place: str, end: str) -> None:
    model, plain = random_model(), random_model()
    identities = {name: id(tensor) for name, tensor in weights(model).items()}
    for turn, codec in enumerate(("compressed", "none", "compressed")):
        with_codes = codec != "none"
        budget = budgets(model, (place,))[place]
        settings = {"device_budget": budget if with_codes else 1 << 30, "codec": codec}
        streamer = weightstream.offload(model, device="cpu", **settings)
        assert bool(streamer.plan.manifest.codes) is with_codes
        for seed in range(turn):
            assert_same(step(model, {"x": rows(seed)}), step(plain, {"x": rows(seed)}))
        ENDS[end](streamer)
        assert exact(model) == exact(plain)
        assert {name: id(tensor) for name, tensor in weights(model).items()} == identities
    assert_same(step(model, {"x": rows(0)}), step(plain, {"x": rows(0)}))


def test_freezing_a_compressed_model_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """peft does so before it adds adapters, and optimizers read `requires_grad`."""
    model = random_model()
    expected = step(model, {"x": rows(0)})
    with offload(model):
        monkeypatch.setattr(DecodedMemory, "_write", lambda *_: pytest.fail("it is decoded"))
        for parameter in model.parameters():
            parameter.requires_grad = False
        model.requires_grad_(requires_grad=False)
        model.zero_grad()
        assert not [p for p in model.parameters() if p.requires_grad or p.grad is not None]
        assert sum(p.numel() * p.element_size() for p in model.parameters())
        monkeypatch.undo()
        assert_same(step(model, {"x": rows(0)}), expected)
