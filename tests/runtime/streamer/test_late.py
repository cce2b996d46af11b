"""Events at a bad moment: updates before the pages are pinned, regroups, lost files, writes to guarded memory."""

from __future__ import annotations

import copy
import gc
import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import GetSetDescriptorType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weightstream
import weightstream.api.offload
import weightstream.store.pages
from weightstream.errors import ConfigError, StoreError
from weightstream.inputs.builder import CallerFacts
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.tensors.guarded import Access, guard, unguard
from weightstream.runtime.weights.sources import Tier
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
    """The copy of that weight is made after its pages are pinned, which do not have the update."""
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
        weightstream.inputs.builder, "pinned", lambda backend, config: (None, PageCache(pin, lambda memory: None))
    )
    streamer = weightstream.api.offload._offload(model, CpuBackend(), config, CallerFacts(memories=checkpoint.mappings))
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


def test_remove_after_a_spilled_file_was_truncated_raises_once_and_leaves_no_thread(tmp_path: Path) -> None:
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
def test_an_invalid_size_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="host_budget"):
        weightstream.OffloadConfig(host_budget=size)


def test_a_reading_collected_while_an_event_is_set_ends_no_thread() -> None:
    """The collector runs wherever memory is allocated: here inside the lock of a piece's event."""

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


# -- tensors that must not be written to -----------------------------------------------------------------------------


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
    """A tensor, the memory that it must not write to, and the requests for memory of its own."""
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
def test_a_write_moves_to_its_own_memory(kind: type, name: str) -> None:
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


def _hooked(tensor: torch.Tensor) -> None:
    tensor.requires_grad = True
    tensor.register_hook(lambda _: None).remove()
    tensor.register_post_accumulate_grad_hook(lambda _: None).remove()
    tensor.retain_grad()
    tensor.requires_grad_(False)


def _with_grad(tensor: torch.Tensor) -> None:
    tensor.grad = torch.ones(4, 4)
    assert tensor.grad is not None
    tensor.grad = None
    del tensor.grad


_HANDS_OUT = {"data", "real", "imag", "T", "H", "mT", "mH"}
PROPERTIES = [n for n, v in vars(torch._C.TensorBase).items() if type(v) is GetSetDescriptorType and n[:2] != "__"]
FACTS: dict[str, Any] = {
    **{name: partial(lambda name, t: getattr(t, name, None), name) for name in PROPERTIES if name not in _HANDS_OUT},
    "set requires_grad": lambda t: (setattr(t, "requires_grad", True), setattr(t, "requires_grad", False)),
    "requires_grad_": lambda t: (t.requires_grad_(), t.requires_grad_(requires_grad=False)),
    "set grad": _with_grad,
    "set _grad": lambda t: setattr(t, "_grad", None),
    "hooks": _hooked,
    "sizes": lambda t: (t.size(), t.size(0), t.stride(), t.dim(), t.ndimension(), t.numel(), t.nelement(), len(t)),
    "layout": lambda t: (t.is_contiguous(), t.element_size(), t.storage_offset(), t.dim_order(), t.get_device()),
    "kinds": lambda t: (
        t.is_floating_point(),
        t.is_complex(),
        t.is_signed(),
        t.is_inference(),
        t.is_conj(),
        t.is_neg(),
    ),
    "functions": lambda t: (torch.is_floating_point(t), torch.numel(t), torch.is_complex(t), torch.result_type(t, 1.0)),
    "another": lambda t: (t.is_same_size(torch.ones(4, 4)), torch.ones(4, 4).is_same_size(t), t.__dlpack_device__()),
    "new": lambda t: (
        t.new_empty(3),
        t.new_zeros(3),
        t.new_ones(3),
        t.new_full((2,), 1.0),
        t.new_empty_strided((1,), (1,)),
    ),
    "like": lambda t: (
        torch.empty_like(t),
        torch.zeros_like(t),
        torch.ones_like(t, dtype=torch.int8),
        torch.rand_like(t),
    ),
    "as another": lambda t: [getattr(torch.ones(16), n)(t) for n in ("to", "type_as", "view_as", "reshape_as")],
    "expanded": lambda t: torch.ones(4).expand_as(t),
    "hash": lambda t: ({t: 1}[t], t is t, isinstance(t, nn.Parameter), id(t)),
    "module": lambda t: nn.Module.register_parameter(nn.Module(), "x", t if isinstance(t, nn.Parameter) else None),
    "frozen": lambda t: nn.ParameterList([t]).requires_grad_(requires_grad=False) if isinstance(t, nn.Parameter) else t,
}


@pytest.mark.filterwarnings("ignore")  # some of them warn when they are read
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
@pytest.mark.parametrize("name", FACTS)
def test_facts_need_no_memory(kind: type, name: str) -> None:
    """Reading or setting them decodes nothing: adapters set `requires_grad` on every weight."""
    plain = torch.zeros(4, 4)
    tensor = plain if kind is torch.Tensor else nn.Parameter(plain, requires_grad=False)
    guard(tensor, kind, lambda access: pytest.fail(f"{name}: {access}"))
    with suppress(RuntimeError, NotImplementedError):
        FACTS[name](tensor)


@pytest.mark.parametrize("name", sorted(_HANDS_OUT - {"imag"}))
def test_properties_that_expose_memory_are_reported(name: str) -> None:
    tensor, requests = nn.Parameter(torch.zeros(4, 4)), []
    guard(tensor, nn.Parameter, requests.append)
    getattr(tensor, name)
    assert requests


def test_a_weight_that_is_both_pattern_and_source_is_read() -> None:
    tensor, requests = nn.Parameter(torch.zeros(4, 4)), []
    guard(tensor, nn.Parameter, requests.append)
    tensor.to(tensor)
    assert requests
