"""Races of decoding, which reads bytes of the ring and writes the buffer that all units share: every order is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graph_rig
import weightstream
from coded_rig import PLACES, budgets, random_model, rows
from graph_rig import PLANS, GraphRig, take_turns
from models import step
from rig import edited, mutated
from weightstream.errors import InvariantError, StoreError
from weightstream.plan.plan import Plan
from weightstream.runtime.devices import opening
from weightstream.runtime.ring import binding as binding_module
from weightstream.runtime.ring import graphs as graphs_module
from weightstream.runtime.ring.binding import Binding
from weightstream.runtime.streamer import active_plan as installation_module
from wrapped import ClockBackend, Delay, Poison, QueueBackend

WIDTH = 128
SEEDS = range(3)

pytestmark = pytest.mark.usefixtures("nothing_foreseen")  # backends count their calls


class Checks(nn.Module):
    """Its forward queues a kernel that reads its weights twice, a moment apart."""

    def __init__(self, inner: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.inner = inner or []
        self.check: Callable[[Checks], None] = lambda block: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.inner:
            x = inner(x)
        self.check(self)
        return x + 1


class Blocks(nn.Module):
    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Checks() for _ in range(5))
        if nested:
            self.blocks[3].inner = [self.blocks[1]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Watch:
    """Five compressed blocks on slow queues, and the values that their kernels saw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: str, seed: int, nested: bool = False) -> None:
        self.model = random_model(lambda: Blocks(nested))
        budget = budgets(self.model, (place,))[place]
        self.expected = [[p.detach().clone() for p in block.parameters()] for block in self.model.blocks]
        self.clock = ClockBackend(Poison(Delay(QueueBackend(), seed, 0.002)))
        self.mismatches: list[str] = []
        self.num_kernels = 0
        for index, block in enumerate(self.model.blocks):
            block.check = lambda block, index=index: self._queue(index, block)
        monkeypatch.setattr(opening, "CpuBackend", lambda: self.clock)
        self.streamer = weightstream.offload(self.model, device="cpu", device_budget=budget, codec="compressed")

    def _queue(self, index: int, block: Checks) -> None:
        seen = [parameter.data for parameter in (block.up, block.down)]

        def same() -> bool:
            return all(torch.equal(a, b) for a, b in zip(seen, self.expected[index], strict=True))

        def kernel() -> None:
            self.num_kernels += 1
            early = same()
            time.sleep(0.0005)
            if not (early and same()):
                self.mismatches.append(f"kernel {self.num_kernels} of block {index}: early={early}")

        self.clock.launch(kernel)

    def run(self, num_steps: int = 4) -> SimpleNamespace:
        """Run eager steps and steps at fixed addresses, and return the values that kernels saw."""
        try:
            for turn in range(num_steps):
                step(self.model, {"x": rows(turn)})
            self._fixed()
            step(self.model, {"x": rows(0)})
            self.clock.synchronize()
        finally:
            self.streamer.remove()
        return SimpleNamespace(mismatches=self.mismatches, races=self.clock.races, num_kernels=self.num_kernels)

    def _fixed(self) -> None:
        if self.model.blocks[3].inner:
            return
        for _ in range(2):
            with self.streamer.step():
                step(self.model, {"x": rows(0)})


@pytest.fixture
def told_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report the bytes that decoding reads to the clock, when it is queued."""
    use(monkeypatch, Binding)


def use(monkeypatch: pytest.MonkeyPatch, binding_class: type[Any]) -> None:
    class TracedBinding(binding_class):  # type: ignore[misc]
        def decode(self, unit: int) -> None:
            if self.plan.streams(unit):
                self._backend.read(self._copies[unit])
            super().decode(unit)

    monkeypatch.setattr(installation_module, "Binding", TracedBinding)


@pytest.mark.few(1)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.stress) for seed in SEEDS[1:])])
@pytest.mark.usefixtures("told_reads")
def test_no_kernel_sees_other_bytes(place: str, seed: int, nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Watch(monkeypatch, place, seed, nested).run()
    assert found.mismatches == []
    assert found.races == []
    assert found.num_kernels == (5 + nested) * 5 + (0 if nested else 10)


# Each takes one piece of order out of the source, or moves it to where it orders nothing.
WAIT = "        if unit.streams:\n            self.engine.wait(unit.index)\n"
DECODE = "        if unit.coded:\n            self.decode(unit.index)\n"
MUTATIONS = {
    "decoding is queued before the fill is waited for": [(WAIT + DECODE, DECODE + WAIT)],
    "decoding is not queued": [(WAIT + DECODE, WAIT)],
    "decoding runs ahead of the queue": [
        ("self._backend.launch(self.units[index].opening.decode)", "self.units[index].opening.decode()")
    ],
    "a unit is let go before it is decoded": [(WAIT + DECODE, WAIT + "        self.let_go(unit.index)\n" + DECODE)],
    "a fill that decoding reads is not waited for": [(WAIT + DECODE, DECODE)],
}


def test_the_unedited_source_passes_where_mutations_must_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, mutated(monkeypatch, binding_module, []).Binding)
    for seed in SEEDS:
        found = Watch(monkeypatch, "streams", seed).run()
        assert (found.mismatches, found.races) == ([], [])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MUTATIONS)
def test_decoding_out_of_order_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, mutated(monkeypatch, binding_module, MUTATIONS[name]).Binding)
    assert any(is_seen(Watch(monkeypatch, "streams", seed)) for seed in SEEDS)


def is_seen(watch: Watch) -> bool:
    try:
        found = watch.run()
    except (InvariantError, StoreError):
        return True
    assert found.num_kernels > 0
    return bool(found.mismatches or found.races)


def test_use_of_the_buffer_by_an_open_unit_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    others = "any(o.coded for o in self.open_units if o is not unit and o.borrowed is None)"
    edits = [(f"return bool(unit.coded) and {others}", "return False")]
    use(monkeypatch, mutated(monkeypatch, binding_module, edits).Binding)
    found = Watch(monkeypatch, "resident", 0, nested=True).run()
    assert found.mismatches


# -- graphs ------------------------------------------------------------------------------------------------------------


class CodedGraphRig(GraphRig):
    """A rig whose kernels read the ring through a copy in a buffer that all units share."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        super().__init__(plan, seed)
        self.buffer = self.clock.alloc(max(extent.nbytes for extent in plan.extents))
        self.binding.decode = self._decode

    def _decode(self, unit: int) -> None:
        def decode() -> None:
            self.clock.read(self.copies[unit])
            ring = self.copies[unit][0].dst
            self.clock.launch(lambda: self.buffer[: ring.numel()].copy_(ring))

        self.graphs.run(decode)

    def kernel(self, unit: int) -> None:
        def kernel() -> None:
            self.num_kernels += 1
            home = self.homes[unit]
            if not torch.equal(self.buffer[: home.numel()], home):
                self.mismatches.append(f"kernel {self.num_kernels} of unit {unit}")

        self.graphs.run(lambda: self.clock.launch(kernel))


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PLANS)
def test_no_kernel_of_a_graph_sees_other_bytes(name: str, seed: int) -> None:
    with CodedGraphRig(PLANS[name], seed) as rig:
        rig.assert_right(take_turns(rig, seed, num_turns=20))


# (text in the source of graphs, its replacement)
IN_GRAPH, IN_GRAPH_DECODE = "        recording.wait(unit)\n", "        binding.decode(unit)\n"
EAGER, EAGER_DECODE = "            binding.hold(unit)\n", "            binding.decode(unit)\n"
GRAPH_MUTATIONS = {
    "inside of a graph, before the fill is waited for": (IN_GRAPH + IN_GRAPH_DECODE, IN_GRAPH_DECODE + IN_GRAPH),
    "inside of a graph, not at all": (IN_GRAPH + IN_GRAPH_DECODE, IN_GRAPH),
    "outside of one, before the fill is waited for": (EAGER + EAGER_DECODE, EAGER_DECODE + EAGER),
    "outside of one, not at all": (EAGER + EAGER_DECODE, EAGER),
}


def test_every_mutation_matches_the_source() -> None:
    for edits in MUTATIONS.values():
        edited(binding_module, edits)
    for edit in GRAPH_MUTATIONS.values():
        edited(graphs_module, [edit])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", GRAPH_MUTATIONS)
def test_decoding_out_of_order_in_steps_at_fixed_addresses_is_detected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = mutated(monkeypatch, graphs_module, [GRAPH_MUTATIONS[name]])
    monkeypatch.setattr(graph_rig, "StreamerGraphs", wrong.Graphs)
    seen = []
    for seed in SEEDS:
        with CodedGraphRig(PLANS["5 units in 2 slots"], seed) as rig:
            take_turns(rig, seed, num_turns=20)
            rig.clock.synchronize()
            seen.append(bool(rig.clock.races or rig.mismatches))
    assert all(seen)
