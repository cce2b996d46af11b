"""Zero-copy and finer units on the CPU: weights that are read in place never stream, and plans list them separately."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_search import model as manifest_of
from test_search import tensor
from torch import nn

import weightstream
from fixtures_structure import Stack
from models import MODELS, assert_same, randomise
from streaming import plain, run
from weightstream.adapters.modules.partition import find_blocks, find_units, row_tables
from weightstream.errors import InvariantError, PlanError
from weightstream.plan.check import prove
from weightstream.plan.manifest import Manifest, Profile, UnitSpec
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Demand, Machine, Refusal, Weights
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.search import Candidate, map_to_host, place_host_bytes, place_layers, place_within
from weightstream.runtime.weights.alias_groups import groups, manifest, merge_tied
from weightstream.settings.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

STREAMED = 10 << 10


def streamed(plan: Plan) -> set[str]:
    return {name for unit in range(len(plan.manifest.units)) for name in plan.streamed(unit)}


@pytest.mark.parametrize(
    "patterns", [{"up"}, {"blocks.2"}, {"head", "tail.weight"}, {"weight"}, {"up", "blocks.1.down"}]
)
def test_named_weights_are_read_in_place(patterns: set[str]) -> None:
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    addresses = {name: p.data_ptr() for name, p in model.module.named_parameters()}
    with weightstream.offload(
        model.module, device="cpu", device_budget=STREAMED, zero_copy_params=patterns
    ) as streamer:
        named = {n for n in addresses if any(f".{p}." in f".{n}." for p in patterns)}
        assert streamer.plan.mapped == named
        assert not streamed(streamer.plan) & named
        prove(streamer.plan)
        assert Plan.from_json(streamer.plan.to_json()) == streamer.plan
        for seed in range(4):
            before = streamer.stats().filled_nbytes
            assert_same(run(model, "cpu", seed), run(reference, "cpu", seed))
        assert streamer.stats().filled_nbytes - before == streamer.plan.step_nbytes
        assert {n: p.data_ptr() for n, p in model.module.named_parameters() if n in named} == {
            n: addresses[n] for n in named
        }
        with streamer.step():
            assert_same(run(model, "cpu", 3), run(reference, "cpu", 3))


def test_zero_copy_together_with_the_classic_flags() -> None:
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    with weightstream.offload(
        model.module, device="cpu", offload_group_size=2, zero_copy_params=["down.weight"]
    ) as streamer:
        assert streamed(streamer.plan) == {
            f"blocks.{i}.{t}" for i in (1, 3, 5) for t in ("up.weight", "up.bias", "down.bias")
        }
        for seed in range(4):
            assert_same(run(model, "cpu", seed), run(reference, "cpu", seed))


def test_ties_are_mapped_under_any_of_their_names() -> None:
    model, reference = MODELS["TiedLinears"](), plain("TiedLinears", "cpu")
    with weightstream.offload(
        model.module, device="cpu", device_budget=24 << 10, zero_copy_params={"tail"}
    ) as streamer:
        assert streamer.plan.mapped == {"head.weight"}
        for seed in range(3):
            assert_same(run(model, "cpu", seed), run(reference, "cpu", seed))


def test_a_pattern_without_a_match_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with weightstream.offload(Stack(), device="cpu", device_budget=STREAMED, zero_copy_params={"up", "experts"}):
        pass
    assert [r.getMessage() for r in caplog.records if "matches no" in r.getMessage()] == [
        "pattern 'experts' matches no parameter of the model: it selects nothing"
    ]


def mapped_plan() -> tuple[Manifest, Plan]:
    manifest = manifest_of((4096, 512), (4096, 512), (4096, 512))
    named = frozenset({next(iter(manifest.units[1].aliases()))})
    return manifest, map_to_host(place_within(manifest.without(named), budget=5120), manifest, 4096)


def test_a_plan_with_mapped_weights_adds_up_and_names_them() -> None:
    manifest, plan = mapped_plan()
    prove(plan)
    assert plan.mapped_nbytes == 4096
    assert plan.host_nbytes + plan.resident_nbytes == manifest.nbytes
    assert Plan.from_json(plan.to_json()) == plan
    assert "zero-copy" in str(plan)
    assert "zero-copy" not in str(place_within(manifest, budget=8192))
    reordered = plan.reordered((2, 1, 0))
    assert reordered.mapped == plan.mapped
    prove(reordered)


@pytest.mark.parametrize("wrong", ["unknown", "resident"])
def test_wrong_mapped_weights_are_proved_wrong(wrong: str) -> None:
    _, plan = mapped_plan()
    alias = next(iter(plan.mapped))
    bad = (
        replace(plan, mapped=plan.mapped | {"nobody"})
        if wrong == "unknown"
        else replace(plan, resident=plan.resident | {alias})
    )
    with pytest.raises(InvariantError, match="zero-copy alias groups that no unit has, or that are resident"):
        prove(bad)


def test_a_step_reads_mapped_weights_over_the_link() -> None:
    manifest, plan = mapped_plan()
    without = place_within(manifest.without(plan.mapped), budget=5120)
    assert plan.step_s == without.step_s + 4096 / Profile().link_bytes_per_s


@pytest.mark.parametrize("host_nbytes", [0, 1, 4096, 4097, 9216, 10**6])
def test_host_bytes_in_order_up_to_the_tensor_that_reaches_them(host_nbytes: int) -> None:
    manifest = manifest_of((4096, 512), (4096, 512), (4096, 512))
    plan = place_host_bytes(manifest, UVAOffloadConfig(cpu_offload_gb=host_nbytes / 2**30), zero_copy=True)
    prove(plan)
    taken = [t.alias for t in manifest.tensors()][: len(plan.mapped)]
    assert plan.mapped == set(taken)
    assert plan.ring_nbytes == 0
    sizes = [manifest.aliases[alias] for alias in taken]
    assert sum(sizes) >= min(host_nbytes, manifest.nbytes)
    assert sum(sizes[:-1]) < host_nbytes or not taken


def leaves_of(num_layers: int) -> Manifest:
    """Two leaf units per layer, as in the finest granularity."""
    units = tuple(
        UnitSpec(name=f"{layer}.{part}", layer=layer, tensors=(tensor(f"{layer}.{part}.w", nbytes),))
        for layer in range(num_layers)
        for part, nbytes in (("up", 2048), ("down", 1024))
    )
    return Manifest(units=units, order=tuple(range(len(units))))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_layers_of_leaf_units_have_a_ring_of_whole_layers(step: int) -> None:
    plan = place_layers(leaves_of(8), PrefetchOffloadConfig(offload_group_size=2, offload_prefetch_step=step))
    prove(plan)
    assert plan.ring_nbytes == step * 3072
    assert streamed(plan) == {f"{layer}.{part}.w" for layer in (1, 3, 5, 7) for part in ("up", "down")}


def test_leaf_units_carry_the_index_of_their_block() -> None:
    model = Stack()
    leaves = find_units(model, "matrix")
    assert [(u.name, u.layer) for u in leaves] == [
        ("head", None),
        *((f"blocks.{i}.{part}", i) for i in range(6) for part in ("up", "down")),
        ("tail", None),
    ]
    assert [u.layer for u in find_units(model)] == [None, *range(6), None]
    assert find_blocks(model) == list(model.blocks)


@pytest.mark.parametrize("name", ["Stack", "NestedLists", "SharedBlock", "TiedLinears", "FusedEncoder", "Recurrent"])
def test_leaf_units_have_every_weight_once(name: str) -> None:
    module = MODELS[name]().module
    held = [id(leaf.tensor) for unit in find_units(module, "matrix") for leaf in unit.leaves()]
    assert set(held) == {id(t) for t in [*module.parameters(), *module.buffers()]}


class Tied(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 64, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_modules_with_the_very_same_weights_are_one_unit() -> None:
    model: Any = randomise(Tied(), 3)
    units = merge_tied(find_units(model), groups(model))
    assert units[0].name == "embed"
    assert units[0].also == (model.head,)
    assert len(units) == 5
    other: Any = Tied(bias=True)
    assert len(merge_tied(find_units(other), groups(other))) == 6
    tokens = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        want = model(tokens)
        with weightstream.offload(model, device="cpu", device_budget=17 << 10) as streamer:
            assert streamer.plan.host_nbytes
            for _ in range(3):
                assert torch.equal(model(tokens), want)
            with streamer.step():
                for _ in range(3):
                    assert torch.equal(model(tokens), want)


def test_tables_are_weights_of_embeddings_only() -> None:
    model: Any = Tied()
    assert row_tables(model) == set()
    model.head.weight = nn.Parameter(torch.empty(64, 32))
    assert row_tables(model) == {id(model.embed.weight)}
    model.embed.max_norm = 1.0
    assert row_tables(model) == set()


def test_the_granularity_that_is_predicted_to_be_faster_then_smaller_wins() -> None:
    model = randomise(Stack(), 1)
    by_alias = groups(model)
    grains = tuple(manifest(merge_tied(find_units(model, grain), by_alias), by_alias) for grain in ("block", "matrix"))

    def chosen(*times: float | None) -> int:
        def planner(step_s: float | None) -> Any:
            def candidates(manifest: Manifest, refusals: list[Refusal]) -> Iterator[Candidate]:
                if step_s is None:
                    refusals.append(Refusal(1, PlanError("does not fit")))
                    return
                plan = replace(place_within(manifest, budget=STREAMED * 2), step_s=step_s)
                yield Candidate(0.0, lambda: plan)

            return SimpleNamespace(candidates=candidates, priced=lambda plan: plan)

        class Inputs(PlannerInputs):
            def planner(self, grain: int) -> Any:
                return planner(times[grain])

        machine = Machine(
            profile=Profile(), on_cpu=False, free_nbytes=0, total_nbytes=0, host_free_nbytes=0, host_total_nbytes=0
        )
        demands = (Demand(),) * len(grains)
        inputs = Inputs(
            config=OffloadConfig(), machine=machine, weights=Weights(names={}), grains=grains, demands=demands
        )
        return inputs.plan().grain

    assert chosen(1.0, 2.0) == 0
    assert chosen(2.0, 1.0) == 1
    assert chosen(None, 1.0) == 1
    assert chosen(1.0, None) == 0
    assert chosen(1.0, 1.0) == 1  # half of the ring
    with pytest.raises(PlanError, match="does not fit"):
        chosen(None, None)
