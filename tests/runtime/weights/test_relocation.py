"""From one plan to another and back: which weights move, which stay, refusals, and that no bit is lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from repeats import thinned
from weightstream.adapters.modules.partition import find_units
from weightstream.codec import coding, reference
from weightstream.errors import StoreError
from weightstream.plan.manifest import Manifest
from weightstream.plan.plan import Plan
from weightstream.plan.search import map_to_host
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.weights.alias_groups import groups, manifest
from weightstream.runtime.weights.homes import Homes
from weightstream.runtime.weights.relocation import CodeOverflow
from weightstream.runtime.weights.sources import Mapped, OnDisk, Pageable, PageWindow, Pinned, Tier
from weightstream.store.arena import Arena
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.file_slice import FileSlice
from weightstream.store.folder import OffloadFolder
from weightstream.store.lazy import DecodedMemory, LazyMemory
from weightstream.store.mapping import FileMapping
from weightstream.store.pages import PageCache
from wrapped import Limit

WIDTH = 96
NBYTES = 2 * WIDTH * WIDTH
NAMES = tuple(f"{unit}.weight" for unit in range(4))
ORIGINS = ("ram", "file", "gathered", "columns", "coded file")
DEVICES = ("plain", "pinned", "pages")  # how the device copies from host memory
PLACES = ("resident", "host", "disk", "mapped", "coded resident", "coded host")


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    made = CpuBackend()
    yield made
    made.close()


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(4)])
    return model.eval().requires_grad_(False)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_values(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def in_parts(tensor: torch.Tensor, path: Path) -> LazyMemory:
    """A tensor gathered from two files, in which its rows are not adjacent."""
    flat, extents = tensor.detach().view(-1).view(torch.uint8).numpy(), []
    cuts = (0, 3 * WIDTH, 10 * WIDTH, NBYTES)
    for index, (begin, end) in enumerate(pairwise(cuts)):
        file = path.with_name(f"{path.name}.{index}")
        file.write_bytes(bytes(11) + flat[begin:end].tobytes())
        extents.append(FileSlice(FileMapping(file), 11, 11 + end - begin))
    return LazyMemory.of_extents(path.name, extents)


def columns_in(tensor: torch.Tensor, path: Path) -> LazyMemory:
    """A tensor that is the last columns of one in a file."""
    save_file({"w": torch.cat([torch.randn(WIDTH, 7).to(tensor), tensor.detach()], dim=1)}, path)
    checkpoint = Checkpoint.open(path.rename(path.with_name(f"{path.name}.safetensors")))
    pitch = checkpoint.entries["w"].nbytes // WIDTH
    checkpoint.gather("w", [("w", 0, WIDTH * pitch)], columns=(7 * tensor.element_size(), pitch, pitch))
    return next(iter(checkpoint.lazy.values()))


def coded_in(tensor: torch.Tensor, path: Path) -> DecodedMemory:
    layout, coded = reference.encode(tensor.detach().view(-1).view(torch.uint8), "bfloat16")
    path.write_bytes(bytes(64) + coded.numpy().tobytes())
    mapping, end = FileMapping(path), 64 + layout.nbytes

    def source() -> torch.Tensor:
        mapping.populate(64, end)
        return mapping.bytes(64, end)

    return DecodedMemory(path.name, path, layout, source, extents=[FileSlice(mapping, 64, end)])


FORMS = {"gathered": in_parts, "columns": columns_in, "coded file": coded_in}


def of(origin: str, model: nn.Module, folder: Path) -> list[Any]:
    """Make the weights come from that place, and return the memories that they are in."""
    folder.mkdir(exist_ok=True)
    if origin == "ram":
        return []
    if origin == "file":
        save_file(model.state_dict(), folder / "model.safetensors")
        checkpoint = Checkpoint.open(folder / "model.safetensors")
        for name, parameter in model.named_parameters():
            parameter.data = checkpoint.tensor(name)
        return list(checkpoint.mappings)
    memories = []
    for name, parameter in model.named_parameters():
        memory = FORMS[origin](parameter, folder / name)
        parameter.data = memory.bytes(0, NBYTES).view(torch.bfloat16).view(WIDTH, WIDTH)
        memories.append(memory)
    return [*memories, *(extent.mapping for memory in memories for extent in memory.extents)]


def device(kind: str) -> dict[str, Any]:
    pin: Callable[[torch.Tensor], None] = lambda memory: None  # noqa: E731
    if kind == "plain":
        return {}
    return {"arena": Arena(pin, pin)} | ({"pages": PageCache(pin, pin)} if kind == "pages" else {})


class Rig:
    def __init__(self, backend: Any, origin: str, kind: str, folder: Path, *, spills: bool = True) -> None:
        self.backend, self.model = backend, linears()
        self.expected = values(self.model)
        self.memories = of(origin, self.model, folder / "model")
        spill = {"spill": OffloadFolder(folder / "spill")} if spills else {}
        self.options = device(kind)
        self.homes = Homes(groups(self.model), backend, mappings=self.memories, **spill, **self.options)
        self.manifest: Manifest = manifest(find_units(self.model), {a: h.group for a, h in self.homes.homes.items()})

    def plan(self, place: str, names: tuple[str, ...] = NAMES[:3], room: int = 1024) -> Plan:
        """A plan with these weights on the device, the others in host memory. Compressed forms have spare bytes."""
        made = self.manifest
        if place.startswith("coded"):
            sizes = {}
            for name in names:
                flat = self.expected[name].view(-1).view(torch.uint8)
                sizes[name] = reference.encode(flat, "bfloat16")[0].nbytes + room
            made = made.coded(sizes)
        resident = frozenset(names if place.endswith("resident") else ())
        mapped = frozenset(names if place == "mapped" else ())
        plan = map_to_host(Plan.build(made.without(mapped), resident, 8 * NBYTES), made, 0)
        return replace(plan, disk=frozenset(names)) if place == "disk" else plan

    def assert_streams(self, plan: Plan) -> None:
        """Check that fills copy the true bytes, compressed if the plan says so, and that reads see them too."""
        ring = torch.zeros(plan.ring_nbytes, dtype=torch.uint8)
        for unit in range(4):
            ring.fill_(1)
            self.backend.copy(self.homes.copies(plan, unit, ring))
            self.backend.synchronize()
            for alias, offset in plan.streamed(unit).items():
                data, home = ring[plan.extents[unit].offset + offset :], self.homes.homes[alias]
                wanted = self.expected[alias].view(-1).view(torch.uint8)
                if alias in plan.manifest.codes:
                    assert home.layout is not None
                    out = torch.empty(NBYTES, dtype=torch.uint8)
                    coding.decode(data[: home.layout.nbytes].clone(), home.layout, out)
                    data = out
                assert torch.equal(data[:NBYTES], wanted), alias
        for alias, home in self.homes.homes.items():
            plain = torch.empty(NBYTES, dtype=torch.uint8)
            home.source.plain_into(plain)
            assert torch.equal(plain, self.expected[alias].view(-1).view(torch.uint8)), alias

    def assert_places(self, plan: Plan) -> None:
        """Writes to the mapping of a file stay in it."""
        for alias, home in self.homes.homes.items():
            if home.file is None and isinstance(home.source, Mapped):
                continue
            tier = Tier.DEVICE if alias in plan.resident else Tier.DISK if alias in plan.disk else Tier.HOST
            assert home.tier is tier, alias
            assert home.is_coded is (alias in plan.manifest.codes), alias

    def finish(self) -> None:
        self.homes.restore()
        assert_values(self.model, self.expected)
        assert {h.tier for h in self.homes.homes.values()} <= {Tier.HOST, Tier.DISK}

    def sources(self) -> dict[str, Any]:
        return {alias: (type(h.source), h.source.view.data_ptr()) for alias, h in self.homes.homes.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize(("origin", "kind"), thinned(ORIGINS, DEVICES))
def test_from_any_place_to_any_other_and_back(origin: str, kind: str, backend: CpuBackend, tmp_path: Path) -> None:
    rig = Rig(backend, origin, kind, tmp_path)
    for first, second in combinations(PLACES, 2):
        for place in (first, second, first):
            plan = rig.plan(place)
            rig.homes.settle(plan)
            rig.assert_places(plan)
            rig.assert_streams(plan)
    rig.finish()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("origin", ORIGINS)
def test_written_weights_stay_written_in_any_place(origin: str, kind: str, backend: CpuBackend, tmp_path: Path) -> None:
    """The writes have no new version, and the next plan finds them all the same."""
    rig = Rig(backend, origin, kind, tmp_path)
    for turn, (first, second) in enumerate(zip(PLACES, PLACES[1:] + PLACES[:1], strict=True)):
        rig.homes.settle(rig.plan(first))
        for name in NAMES[turn % 2 : 4 : 2]:
            rig.homes.homes[name].check()
            for tensor in (rig.model.get_parameter(name).data, rig.expected[name]):
                tensor[turn, 5:9] = turn
        rig.homes.settle(plan := rig.plan(second))
        rig.assert_places(plan)
        rig.assert_streams(plan)
    rig.finish()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("origin", ["ram", "file", "gathered", "columns"])
def test_weights_at_their_place_are_not_moved(origin: str, kind: str, backend: CpuBackend, tmp_path: Path) -> None:
    rig = Rig(backend, origin, kind, tmp_path)
    for place in PLACES:
        rig.homes.settle(rig.plan(place))
        before = rig.sources()
        rig.homes.settle(rig.plan(place))
        assert rig.sources() == before, place
        more = ("2.weight", "3.weight") if place == "resident" else ()
        rig.homes.settle(rig.plan("resident", (*NAMES[:2], *more)))
        assert {a: s for a, s in rig.sources().items() if a in NAMES[:2]} == {
            a: s for a, s in before.items() if a in NAMES[:2]
        } or place != "resident"
    rig.finish()


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("origin", ["file", "gathered", "columns"])
def test_weights_that_left_their_file_return_to_be_read_from_disk(
    origin: str, kind: str, backend: CpuBackend, tmp_path: Path
) -> None:
    """Without an offload folder: the original file still has them."""
    rig = Rig(backend, origin, kind, tmp_path, spills=False)
    assert rig.homes.movable == set(NAMES)
    for away in ("resident", "coded resident", "coded host", "host", "mapped"):
        rig.homes.settle(rig.plan(away))
        assert rig.homes.movable == set(NAMES)
        rig.homes.settle(plan := rig.plan("disk"))
        assert all(isinstance(rig.homes.homes[name].source, OnDisk) for name in NAMES[:3])
        rig.assert_streams(plan)
    rig.homes.settle(plan := rig.plan("host"))
    wanted = {"plain": Mapped, "pinned": Pinned, "pages": PageWindow}[kind]
    assert all(type(home.source) is wanted for home in rig.homes.homes.values())
    rig.assert_streams(plan)
    rig.finish()
    assert all(isinstance(home.source, OnDisk if origin == "file" else Pageable) for home in rig.homes.homes.values())


@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("kind", DEVICES)
def test_updated_weights_cannot_return_to_their_file(
    kind: str, unseen: bool, backend: CpuBackend, tmp_path: Path
) -> None:
    rig = Rig(backend, "file", kind, tmp_path, spills=False)
    rig.homes.settle(before := rig.plan("resident"))
    parameter = rig.model.get_parameter("1.weight")
    (parameter.data if unseen else parameter)[0, 0] = 3
    rig.expected["1.weight"][0, 0] = 3
    assert ("1.weight" in rig.homes.movable) == unseen
    places = rig.sources()
    with pytest.raises(StoreError, match=r"1 weights cannot be on disk, such as 1\.weight.*offload_folder"):
        rig.homes.settle(rig.plan("disk"))
    assert rig.homes.plan is before
    assert rig.sources() == places, "nothing moved"
    assert "1.weight" not in rig.homes.movable
    rig.homes.settle(plan := rig.plan("disk", (NAMES[0], NAMES[2])))
    rig.assert_streams(plan)
    rig.finish()


def test_a_weight_of_ram_on_disk_is_refused_before_anything_moves(backend: CpuBackend, tmp_path: Path) -> None:
    rig = Rig(backend, "ram", "pinned", tmp_path, spills=False)
    assert rig.homes.movable == frozenset()
    places = rig.sources()
    with pytest.raises(StoreError, match=r"3 weights cannot be on disk, such as 0\.weight, 1\.weight, 2\.weight"):
        rig.homes.settle(rig.plan("disk"))
    assert rig.sources() == places
    assert rig.homes.plan is None


def test_spilled_weights_are_not_written_again(
    backend: CpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    real = OffloadFolder.write
    monkeypatch.setattr(OffloadFolder, "write", lambda self, name, t: (written.append(name), real(self, name, t))[1])
    rig = Rig(backend, "ram", "pinned", tmp_path)
    for place in ("disk", "resident", "disk", "host", "disk"):
        rig.homes.settle(plan := rig.plan(place))
        rig.assert_streams(plan)
    assert written == list(NAMES[:3])
    rig.finish()
    assert all(home.file is None for home in rig.homes.homes.values())


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "room", "origin"),
    thinned([("coded resident", 0), *product(("host", "coded host"), (0, 2)), ("mapped", 0)], ORIGINS),
)
def test_an_error_on_the_way_leaves_the_old_plan_in_force(
    first: str, origin: str, room: int, backend: CpuBackend, tmp_path: Path
) -> None:
    """The device has no memory for the last resident."""
    limited = Limit(backend, 1 << 40)
    rig = Rig(limited, origin, "pinned", tmp_path)
    rig.homes.settle(before := rig.plan(first))
    plan = rig.plan("resident", NAMES)
    limited.limit_nbytes = limited.held_nbytes + room * NBYTES
    with pytest.raises(torch.OutOfMemoryError):
        rig.homes.settle(plan)
    assert rig.homes.plan is before
    rig.assert_places(before)
    rig.assert_streams(before)
    limited.limit_nbytes = 1 << 40
    rig.homes.settle(plan)
    assert rig.homes.plan is plan
    rig.assert_streams(plan)
    rig.finish()


@pytest.mark.parametrize("place", ["coded host", "coded resident"])
@pytest.mark.parametrize("kind", DEVICES)
def test_sizes_that_were_too_small_are_reported_together_and_nothing_is_encoded_twice(
    kind: str, place: str, backend: CpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real = coding.encode
    monkeypatch.setattr(coding, "encode", lambda *args: (calls.append(args[1]), real(*args))[1])
    rig = Rig(backend, "ram", kind, tmp_path)
    exact = {name: rig.plan(place, room=0).manifest.codes[name] for name in NAMES[:3]}
    with pytest.raises(CodeOverflow) as overflow:
        rig.homes.settle(rig.plan(place, room=-512))
    assert overflow.value.sizes == exact
    rig.homes.settle(plan := rig.plan(place, room=0))
    assert len(calls) == 3
    rig.assert_places(plan)
    rig.assert_streams(plan)
    rig.finish()


def test_unused_pinned_memory_is_released(backend: CpuBackend, tmp_path: Path) -> None:
    pinned: set[int] = set()
    rig = Rig(backend, "file", "plain", tmp_path)
    arena = Arena(lambda block: pinned.add(block.data_ptr()), lambda block: pinned.remove(block.data_ptr()))
    rig.homes = Homes(groups(rig.model), backend, mappings=rig.memories, arena=arena)
    rig.homes.settle(rig.plan("host"))
    assert len(pinned) == 4
    rig.homes.settle(rig.plan("resident"))
    assert len(pinned) == 1
    assert arena.nbytes == -(-NBYTES // 4096) * 4096
    rig.finish()
    assert not pinned
