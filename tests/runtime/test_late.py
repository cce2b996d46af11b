"""What comes at a bad moment: updates before the pages are there, regroups, files that go, writes where none may be."""

from __future__ import annotations

import copy
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weightstream
import weightstream.front
import weightstream.store.pages
from weightstream.assembly import Given
from weightstream.errors import ConfigError, StoreError
from weightstream.runtime.cpu import CpuBackend
from weightstream.runtime.parameter import Access, guard, unguard
from weightstream.runtime.sources import Tier
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.pages import PageCache
from weightstream.store.staging import Staging

WIDTH = 256
WEIGHT_NBYTES = WIDTH * WIDTH * 4


def linears(num: int = 12) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num))).eval().requires_grad_(False)


def test_an_update_before_the_pages_arrive_is_in_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of that weight is made once its pages are there, and these do not hold the update."""
    monkeypatch.setattr(weightstream.store.pages, "_PINNED_NBYTES", WEIGHT_NBYTES)
    gate, calls = threading.Event(), []

    def pin(memory: torch.Tensor) -> None:
        calls.append(memory)
        assert len(calls) <= 4 or gate.wait(20)

    model, plain, x = linears(), linears(), torch.randn(3, WIDTH)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        parameter.data = checkpoint.tensor(name)
    config = weightstream.OffloadConfig(device_budget=3 * WEIGHT_NBYTES)
    monkeypatch.setattr(
        weightstream.assembly, "pinned", lambda backend, config: (None, PageCache(pin, lambda memory: None))
    )
    streamer = weightstream.front._offload(model, CpuBackend(), config, Given(memories=checkpoint.mappings))
    try:
        with torch.no_grad():
            for either in model, plain:
                either[10].weight.data.fill_(0.01)
            threading.Timer(0.2, gate.set).start()
            for _ in range(3):
                assert torch.equal(model(x), plain(x))
    finally:
        gate.set()
        streamer.remove()


class Reader(nn.Module):
    """Reads a weight of a child outside of the child's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.layers(x), self.layers[2].weight)


def test_weights_on_disk_survive_a_regroup_and_leave_no_second_file(tmp_path: Path) -> None:
    model, x = Reader().eval(), torch.randn(1, WIDTH)
    want = model(x)
    streamer = weightstream.offload(
        model, device="cpu", device_budget=800 << 10, host_budget=500 << 10, offload_folder=tmp_path
    )
    for _ in range(3):
        assert torch.equal(model(x), want)
    held = {home.file.extents[0].mapping for home in streamer._homes.homes.values() if home.tier is Tier.DISK}
    assert len(held) == len(streamer.plan.disk) > 0
    gc.collect()
    deleted = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert not any("(deleted)" in line for line in deleted)
    streamer.remove()
    assert torch.equal(model(x), want)


def test_remove_after_a_spilled_file_was_cut_raises_once_and_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model, x = linears(), torch.randn(1, WIDTH)
    streamer = weightstream.offload(
        model, device="cpu", device_budget=3 * WEIGHT_NBYTES, host_budget=0, offload_folder=tmp_path
    )
    model(x)
    os.truncate(next(tmp_path.rglob("*.safetensors")), 100)
    with pytest.raises(StoreError, match="changed since it was mapped"):
        streamer.remove()
    streamer.remove()
    assert set(threading.enumerate()) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["1 %%", "6,5GiB", "12GiB/2", "96MiB!", "", "GiB"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="host_budget"):
        weightstream.OffloadConfig(host_budget=size)


def test_a_reading_that_is_forgotten_while_an_event_is_set_ends_no_thread() -> None:
    """The collector runs wherever memory is allocated: here inside of the lock that the event of a piece holds."""

    class Source:
        def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
            return memory[: end - begin]

    staging = Staging([torch.empty(4096, dtype=torch.uint8)], num_threads=1)
    reading = staging.start(Source(), 0, 3 * 4096)
    pieces = list(reading._pieces)
    pieces[0].done.wait(20)
    with pieces[1].done._cond:  # type: ignore[attr-defined]
        del reading
        gc.collect()
    assert [piece.dropped for piece in pieces] == [True] * 3
    assert not pieces[1].done.is_set()
    del pieces
    staging.close()


# -- tensors that nobody may write to --------------------------------------------------------------------------------


def _detached(tensor: torch.Tensor) -> None:
    tensor.detach().add_(1)


WRITES: dict[str, Any] = {
    "in place": lambda t: t.add_(1),
    "operator": lambda t: t.__iadd__(1),
    "item": lambda t: t.__setitem__(0, 7),
    "copy": lambda t: t.copy_(torch.ones_like(t)),
    "out": lambda t: torch.add(t, 1, out=t),
    "data": lambda t: t.data.mul_(2),
    "assigned": lambda t: setattr(t, "data", torch.zeros(4, 4)),
    "numpy": lambda t: t.numpy().fill(3),
    "row": lambda t: t[1].fill_(2),
    "detached": _detached,
    "foreach": lambda t: torch._foreach_add_([t], 1),
}
READS: dict[str, Any] = {
    "clone": lambda t: t.clone(),
    "product": lambda t: torch.ones(2, 4) @ t,
    "rows": lambda t: nn.functional.embedding(torch.tensor([1, 2]), t),
    "equal": lambda t: torch.equal(t, t),
    "facts": lambda t: (t.shape, t.device, t.dtype, t.is_contiguous(), t.requires_grad_(False)),
    "copied": lambda t: copy.deepcopy(t),
}


def guarded(kind: type) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """A tensor, the memory that it must not write to, and the calls for memory of its own."""
    memory, calls = torch.arange(16.0).view(4, 4), []
    tensor = memory.view(4, 4) if kind is torch.Tensor else nn.Parameter(memory.view(4, 4), requires_grad=False)

    def on_access(access: Access) -> None:
        if access is not Access.READ:
            calls.append(1)
            unguard(tensor, kind)
            tensor.data = memory.clone()

    guard(tensor, kind, on_access)
    return tensor, memory, calls


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_finds_memory_of_its_own(kind: type, name: str) -> None:
    tensor, memory, calls = guarded(kind)
    with torch.no_grad():
        WRITES[name](tensor)
    assert torch.equal(memory, torch.arange(16.0).view(4, 4))
    assert calls == [1]
    assert type(tensor) is kind
    assert not torch.equal(tensor, memory)


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
@pytest.mark.parametrize("name", READS)
def test_a_read_does_not(kind: type, name: str) -> None:
    tensor, _, calls = guarded(kind)
    found = READS[name](tensor)
    assert calls == []
    assert not isinstance(found, torch.Tensor) or type(found) in (torch.Tensor, nn.Parameter)
    unguard(tensor, kind)
    assert type(tensor) is kind
