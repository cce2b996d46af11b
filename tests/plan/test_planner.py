"""The planner: budgets, zero-copy reads, the disk, the inputs, and the simulated times of its plans."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
from test_search import LINK_BOUND, SMALL_MODELS, budgets, grouped
from test_search import model as model_of

from repeats import only
from weightstream.errors import PlanError
from weightstream.plan import candidates, cost, search
from weightstream.plan.check import prove
from weightstream.plan.manifest import (
    Manifest,
    Op,
    Profile,
    TensorSpec,
    UnitSpec,
    Workload,
    mean,
    unit_seconds,
    unpack_rate,
)
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Demand, Machine, Planner, Weights
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.search import place_layers, place_within
from weightstream.plan.units import human
from weightstream.settings.config import ConfigWarning, OffloadConfig

GIB = 1 << 30
MIB = 1 << 20
H200 = Profile(
    machine="H200",
    link_bytes_per_s=55.4e9,
    copy_latency_s=3e-6,
    device_bytes_per_s=3.7e12,
    half_flops_per_s=684e12,
    op_s=2e-6,
    op_launch_s=14.5e-6,
    overhead_s=60e-6,
    handover_s=6e-6,
    workspace_nbytes=64 * MIB,
    device_nbytes=140 * GIB,
)
Grain = Literal["block", "half", "matrix"]
GRAINS: tuple[Grain, ...] = ("block", "half", "matrix")
SMALL = {"layers": 8, "hidden": 1024, "inner": 4096, "kv": 256, "vocab": 16384}
WIDE = SMALL | {"layers": 12, "vocab": 131072}  # a table and a head of 256 MiB each, blocks of 29
EIGHT = {"layers": 32, "hidden": 4096, "inner": 14336, "kv": 1024, "vocab": 128256}
THIRTY_TWO = {"layers": 64, "hidden": 5120, "inner": 27648, "kv": 1024, "vocab": 152064}
TABLE, HEAD = "embed.weight", "head.weight"
DECODE, BATCH, PREFILL = Workload(), Workload(batch=32), Workload(tokens=8192, context=8192)


def test_an_op_takes_its_least_time_and_its_work() -> None:
    on = Profile(device_bytes_per_s=1e12, half_flops_per_s=1e14, op_s=2e-6, product_s=5e-6, gather_share=0.5)
    on = replace(on, stack_s=10e-6, stack_share=0.25)
    assert Op(nbytes=100).seconds(on) == pytest.approx(2e-6, rel=1e-3)
    assert Op(nbytes=4_000_000).seconds(on) == pytest.approx(6e-6), "latency, then bytes"
    assert Op(nbytes=100, least=4.0).seconds(on) == pytest.approx(8e-6), "several kernels"
    assert Op(nbytes=9_000_000, rate="ranks").seconds(replace(on, ranks_bytes_per_s=1e9)) == pytest.approx(9.002e-3)
    assert Op(nbytes=9_000_000, least=4.0).seconds(on) == pytest.approx(11e-6)
    assert Op(rate="half", flops=1e3, nbytes=100).seconds(on) == pytest.approx(5e-6), "a product"
    assert Op(rate="half", flops=1e9, nbytes=4_000_000).seconds(on) == pytest.approx(12e-6)
    assert Op(nbytes=4_000_000, picked=0.1).seconds(on) == pytest.approx(10e-6), "matrices out of a stack"
    assert Op(rate="half", nbytes=4_000_000, stacked=True).seconds(on) == pytest.approx(26e-6), "and their products"
    slow = replace(on, stack_s=0.0, stack_share=1.0)
    assert Op(rate="half", nbytes=4_000_000, stacked=True).seconds(slow) == pytest.approx(6e-6)
    assert Op(nbytes=100, device_s=1e-3).seconds(on) == 1e-3
    cpu = replace(on, on_cpu=True)
    assert Op(rate="half", flops=1e9, nbytes=4_000_000).seconds(cpu) == pytest.approx(15e-6), "a fixed cost, then work"
    assert Op(nbytes=4_000_000).seconds(cpu) == pytest.approx(6e-6)


@pytest.mark.parametrize("kernel", ["mxfp4", "float8", "int4"])
def test_matrices_are_unpacked_at_the_rate_of_their_kernel(kernel: str) -> None:
    op = Op(nbytes=4_000_000, picked=0.1, unpacks=kernel)
    rates = {unpack_rate(each): 1e9 for each in ("mxfp4", "float8", "int4")} | {unpack_rate(kernel): 2e12}
    assert op.seconds(replace(H200, **rates)) == pytest.approx(H200.op_s + 2e-6)
    assert op.seconds(H200) == pytest.approx(H200.op_s + 4e6 / (0.4 * H200.device_bytes_per_s)), "not measured"
    slower = replace(H200, device_bytes_per_s=H200.device_bytes_per_s / 10)
    assert slower.unpack_bytes_per_s(kernel) == pytest.approx(H200.unpack_bytes_per_s(kernel) / 10)
    assert mean([[op], [op]])[0].seconds(H200) == op.seconds(H200)


# -- decoders in three grains, with the work of a step ------------------------------------------------------------


def weight(name: str, *shape: int) -> TensorSpec:
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorSpec(name=name, shape=shape, stride=stride, dtype="bfloat16", alias=name, nbytes=2 * math.prod(shape))


@cache
def decoder(grain: Grain, layers: int, hidden: int, inner: int, kv: int, vocab: int) -> Manifest:
    units = [UnitSpec(name="embed", tensors=(weight(TABLE, vocab, hidden),))]
    for layer in range(layers):
        rows = {"q": hidden, "k": kv, "v": kv, "o": hidden}
        attention = [weight(f"{layer}.norm1", hidden), *(weight(f"{layer}.{n}", r, hidden) for n, r in rows.items())]
        mlp = [weight(f"{layer}.norm2", hidden), *(weight(f"{layer}.{n}", inner, hidden) for n in ("gate", "up"))]
        mlp.append(weight(f"{layer}.down", hidden, inner))
        cut = {"block": [attention + mlp], "half": [attention, mlp], "matrix": [[t] for t in attention + mlp]}[grain]
        units += [UnitSpec(name=f"{layer}/{part[0].name}", tensors=tuple(part), layer=layer) for part in cut]
    units.append(UnitSpec(name="norm", tensors=(weight("norm", hidden),)))
    units.append(UnitSpec(name="head", tensors=(weight(HEAD, vocab, hidden),)))
    return Manifest(units=tuple(units), order=tuple(range(len(units))))


def ops_of(tensor: TensorSpec, workload: Workload) -> tuple[Op, ...]:
    rows = workload.batch * (1 if tensor.name == HEAD else workload.tokens)
    if tensor.name == TABLE:
        return (Op(nbytes=4 * rows * tensor.shape[1]),)
    if len(tensor.shape) == 1:
        return (Op(nbytes=4 * rows * tensor.shape[0]),) * 2
    return (Op(rate="half", flops=tensor.nbytes * rows, nbytes=tensor.nbytes + 2 * rows * sum(tensor.shape)),)


def demand(manifest: Manifest, workload: Workload, **nbytes: int) -> Demand:
    work = {unit.name: tuple(op for t in unit.tensors for op in ops_of(t, workload)) for unit in manifest.units}
    return Demand(workload=workload, work=work, **nbytes)


def machine(**changed: Any) -> Machine:
    free = {"free_nbytes": 130 * GIB, "total_nbytes": 140 * GIB, "host_free_nbytes": 99 * GIB}
    return Machine(**{"profile": H200, "on_cpu": False, "host_total_nbytes": 128 * GIB, **free, **changed})


def inputs_of(
    shape: Mapping[str, int],
    workload: Workload | None = DECODE,
    *,
    on: Machine | None = None,
    weights: Mapping[str, Any] | None = None,
    grains: tuple[Grain, ...] = GRAINS,
    **settings: Any,
) -> PlannerInputs:
    """The decoder of that shape in these granularities. `settings` configure the planner."""
    manifests = tuple(decoder(grain, **shape) for grain in grains)
    names = {alias: (alias,) for alias in manifests[0].aliases}
    known = Weights(names=names, **{"by_row": frozenset({TABLE}), "movable": frozenset(names), **(weights or {})})
    nbytes = {
        "activation_nbytes": settings.pop("activation_nbytes", 0),
        "cache_nbytes": settings.pop("cache_nbytes", 0),
    }
    return PlannerInputs(
        config=OffloadConfig.from_kwargs(**settings),
        machine=on or machine(),
        weights=known,
        grains=manifests,
        demands=tuple(Demand() if workload is None else demand(m, workload, **nbytes) for m in manifests),
    )


def plan_of(shape: Mapping[str, int], workload: Workload | None = DECODE, **settings: Any) -> Plan:
    _, plan = inputs_of(shape, workload, **settings).plan()
    prove(plan)
    return plan


# -- the budget ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"device_budget": 100 * MIB}, 100 * MIB),
        ({"device_budget": "100MiB"}, 100 * MIB),
        ({"device_budget": "50%"}, 70 * GIB),
        ({"max_memory": {0: "100MiB", "cpu": "30GiB"}}, 100 * MIB),
        ({"max_memory": {0: "50%"}}, 70 * GIB),
        ({"max_memory": {"cpu": "30GiB"}}, 130 * GIB - 64 * MIB - 130 * GIB // 50),
    ],
)
def test_an_explicit_budget(settings: Mapping[str, Any], wanted: int) -> None:
    assert inputs_of(SMALL, **settings).planners[0].budget == wanted


def test_the_default_budget_is_the_memory_that_a_step_leaves_free() -> None:
    found = inputs_of(SMALL, activation_nbytes=3 * GIB, cache_nbytes=5 * GIB).planners[0]
    assert found.budget == (130 - 3 - 5) * GIB - 64 * MIB - 130 * GIB // 50
    little = replace(found, machine=machine(free_nbytes=10 * GIB))
    assert little.budget == (10 - 3 - 5) * GIB - 64 * MIB - 256 * MIB  # the least that is left to the allocator
    none = replace(found, machine=machine(free_nbytes=8 * GIB))
    assert none.budget == 0


def test_the_default_budget_without_a_demand() -> None:
    assert inputs_of(SMALL, None).planners[0].budget == int(130 * GIB * 0.9) - GIB
    assert inputs_of(SMALL, None, on=machine(free_nbytes=GIB)).planners[0].budget == 0


def test_the_default_budget_on_the_cpu_is_the_free_memory() -> None:
    found = inputs_of(SMALL, activation_nbytes=3 * GIB, on=machine(on_cpu=True, free_nbytes=7 * GIB)).planners[0]
    assert found.budget == 7 * GIB


def test_classic_settings_have_no_budget_of_their_own() -> None:
    assert inputs_of(SMALL, offload_group_size=2).planners[0].budget is None
    assert inputs_of(SMALL, cpu_offload_gb=0.1).planners[0].budget is None


def test_a_plan_has_its_workload_and_its_bytes() -> None:
    plan = plan_of(SMALL, BATCH, device_budget=100 * MIB, activation_nbytes=7, cache_nbytes=9)
    assert (plan.workload, plan.activation_nbytes, plan.cache_nbytes, plan.machine) == (BATCH, 7, 9, "H200")
    assert plan.device_nbytes <= 100 * MIB
    bare = plan_of(SMALL, None, device_budget=100 * MIB)
    assert (bare.workload, bare.activation_nbytes, bare.cache_nbytes) == (None, 0, 0)


def test_a_shortage_is_reported_with_its_sum() -> None:
    found = inputs_of(SMALL, device_budget=100 * MIB, activation_nbytes=GIB, cache_nbytes=2 * GIB)
    _, plan = found.plan()
    needed = plan.device_nbytes + 3 * GIB + 64 * MIB

    def shortage(**changed: Any) -> str | None:
        on = machine(**changed)
        return replace(found, machine=on).shortage(plan)

    assert shortage(free_nbytes=needed) is None
    message = shortage(free_nbytes=needed - 1)
    assert message is not None
    for nbytes in (plan.device_nbytes, GIB, 2 * GIB, 64 * MIB, needed):
        assert human(nbytes) in message
    assert "lower device_budget, batch or context" in message
    assert shortage(free_nbytes=needed - 1, on_cpu=True) is None
    assert shortage(free_nbytes=0) is None  # a GPU without known facts


# -- the seconds of units -----------------------------------------------------------------------------------------


def test_a_step_in_a_graph_has_work_of_its_own() -> None:
    """A cache that does not grow costs kernels, or saves copies, only in a graph. The plan stays the same."""
    planner = inputs_of(SMALL, device_budget=GIB, grains=("block",)).planners[0]
    manifest = decoder("block", **SMALL)
    name, work = manifest.units[3].name, planner.demand.work
    tiny, long = Op(), Op(nbytes=round(1e-3 * H200.device_bytes_per_s))
    planner = replace(planner, demand=replace(planner.demand, work=work | {name: (*work[name], long)}))

    def planned(on: Planner, ops: tuple[Op, ...]) -> Plan:
        captured = planner.demand.work | {name: ops}
        return replace(on, demand=replace(planner.demand, captured=captured))(manifest)

    plain = planner(manifest)
    for ops, more_s in (((*work[name], long, tiny, tiny), 2 * H200.op_s), (work[name], -1e-3 - H200.op_s)):
        plan = planned(planner, ops)
        assert plan.graph_s == pytest.approx(plain.graph_s + more_s, rel=1e-9)
        assert plan.graph_compute_s == pytest.approx(plain.graph_compute_s + more_s, rel=1e-9)
        assert replace(plan, graph_s=plain.graph_s, graph_compute_s=plain.graph_compute_s) == plain
    on_cpu = replace(planner, machine=replace(planner.machine, on_cpu=True))
    assert planned(on_cpu, (long, long)) == on_cpu(manifest), "there are no graphs"
    launched = replace(planner, machine=replace(planner.machine, profile=replace(H200, op_s=0.0)))
    both, one = launched.profile(manifest), on_cpu.profile(manifest)
    assert one.unit_s == pytest.approx([a + b for a, b in zip(both.unit_s, both.host_s, strict=True)]), "one processor"
    measured = replace(planner, unit_s={name: 1e-3})
    assert planned(measured, (*work[name], long, tiny)).graph_s == pytest.approx(measured(manifest).graph_s + H200.op_s)


@pytest.mark.parametrize("slow", [1, 3])
def test_for_text_from_graphs_the_host_counts_less(slow: int) -> None:
    """Finer units need a smaller ring, and more of the host's time, which a graph does not need. A slower host still
    matters."""
    host = {name: slow * s for name, s in (("op_launch_s", 14.5e-6), ("overhead_s", 60e-6), ("show_s", 5e-6))}
    budget = decoder("block", **SMALL).nbytes * 7 // 10
    ahead = inputs_of(SMALL, device_budget=budget, on=machine(profile=replace(H200, **host)))
    of_text = tuple(replace(demand, is_text=True) for demand in ahead.demands)
    eager, captured = ahead.plan().plan, replace(ahead, demands=of_text).plan()[1]
    assert captured.graph_s < 0.9 * eager.graph_s
    assert eager.step_s < captured.step_s
    both_s = [plan.graph_s + 0.25 * (plan.step_s - plan.graph_s) for plan in (captured, eager)]
    assert both_s[0] < both_s[1], "the host's additional time counts with a weight of 0.25"


def test_units_take_their_measured_time_or_their_estimated_work() -> None:
    planner = inputs_of(SMALL, device_budget=100 * MIB, grains=("block",)).planners[0]
    manifest, work = decoder("block", **SMALL), demand(decoder("block", **SMALL), DECODE).work
    measured = {manifest.units[2].name: 0.25}
    profile = replace(planner, unit_s=measured).profile(manifest)
    for index, unit in enumerate(manifest.units):
        ops = work[unit.name]
        wanted = 0.25 if index == 2 else max(unit_seconds(ops, H200)[:2])
        assert max(profile.times_s(index, unit)) == wanted


# -- zero-copy reads ----------------------------------------------------------------------------------------------


def test_the_table_is_read_in_place_if_something_must_stream() -> None:
    nbytes = decoder("block", **SMALL).nbytes
    table = decoder("block", **SMALL).aliases[TABLE]
    assert plan_of(SMALL, device_budget=nbytes).mapped == frozenset()
    assert plan_of(SMALL, device_budget=nbytes // 2).mapped == {TABLE}
    less = plan_of(SMALL, device_budget=nbytes - table)
    assert (less.mapped, less.step_nbytes) == ({TABLE}, 0)


@pytest.mark.parametrize(
    "never",
    [
        {"on": machine(maps_host_memory=False)},
        {"on": machine(on_cpu=True)},
        {"weights": {"by_row": frozenset()}, "workload": replace(BATCH, batch=65)},
        {"workload": None, "weights": {"by_row": frozenset()}},
    ],
)
@pytest.mark.parametrize("percent", [50, 90])
def test_tensors_that_are_never_read_in_place(never: Mapping[str, Any], percent: int) -> None:
    budget = decoder("block", **WIDE).nbytes * percent // 100
    assert plan_of(WIDE, **{"device_budget": budget, **never}).mapped == frozenset()


def test_a_small_table_streams() -> None:
    shape = SMALL | {"vocab": 256}
    assert plan_of(shape, device_budget=decoder("block", **shape).nbytes // 2).mapped == frozenset()


def test_a_head_that_the_ring_cannot_hold_is_read_in_place() -> None:
    manifest = decoder("matrix", **WIDE)
    budget = manifest.aliases[HEAD] - MIB
    plan = plan_of(WIDE, device_budget=budget)
    assert plan.mapped == {TABLE, HEAD}
    assert plan.device_nbytes <= budget
    read_s = manifest.aliases[HEAD] / 0.9 / H200.link_bytes_per_s
    assert plan.copy_s == pytest.approx(read_s + plan.step_nbytes / H200.link_bytes_per_s, rel=0.02)
    assert plan.step_s >= plan.copy_s
    with pytest.raises(PlanError, match="the ring must hold the largest unit, 'head'"):
        plan_of(WIDE, replace(DECODE, batch=65), device_budget=budget)


def test_a_head_is_read_in_place_beside_weights_that_are_kept() -> None:
    """What stays on the device is no unit that could be larger than the head."""
    manifest = decoder("matrix", **WIDE)
    matrices = [alias for alias in manifest.aliases if alias not in (HEAD, TABLE)]
    for num in (1, len(matrices) - 1):
        kept = frozenset(matrices[:num])
        budget = manifest.aliases[HEAD] - MIB + sum(manifest.aliases[alias] for alias in kept)
        plan = inputs_of(WIDE, grains=("matrix",), device_budget=budget).keeping(kept).plan().plan
        assert HEAD in plan.mapped
        assert kept <= plan.resident
        assert plan.device_nbytes <= budget


def test_a_refusal_names_the_smallest_budget_that_works() -> None:
    """The table is the largest unit, and need not be on the device."""
    manifest = decoder("matrix", **WIDE).without(frozenset({HEAD}))

    def plan(budget: int) -> Plan:
        return inputs_of(WIDE, grains=("matrix",), device_budget=budget).planners[0](manifest)

    with pytest.raises(PlanError) as error:
        plan(MIB)
    least = int(re.findall(r"\((\d+) bytes\)", str(error.value))[1])
    assert least < manifest.aliases[TABLE]
    assert plan(least).device_nbytes <= least
    with pytest.raises(PlanError):
        plan(least - 512)


def test_a_head_is_read_in_place_if_that_is_faster() -> None:
    """Between the least ring and plenty of memory, the plan is the faster one of both."""
    both = set()
    for percent in (34, 40, 50, 60, 80):
        budget = decoder("block", **WIDE).nbytes * percent // 100
        plan = plan_of(WIDE, device_budget=budget, grains=("block",))
        manifest, planner = decoder("block", **WIDE), inputs_of(WIDE, grains=("block",)).planners[0]
        profile = planner.profile(manifest)
        streams = place_within(
            manifest.without(frozenset({TABLE})), budget=budget, profile=planner.profile(manifest)
        ).step_s
        bare = place_within(manifest.without(frozenset({TABLE, HEAD})), budget=budget, profile=profile)
        reads = bare.step_s + manifest.aliases[HEAD] / 0.9 / H200.link_bytes_per_s
        assert plan.step_s == pytest.approx(min(streams, reads))
        assert (HEAD in plan.mapped) == (reads < streams)
        both.add(HEAD in plan.mapped)
    assert both == {True, False}


def test_only_a_much_larger_unit_is_alone() -> None:
    """A head of at most four times the next unit goes through the ring."""
    shape = SMALL | {"vocab": 4 * 29 * MIB // (2 * 1024), "layers": 4}
    manifest = decoder("block", **shape)
    assert manifest.aliases[HEAD] <= 4 * manifest.units[1].nbytes
    assert HEAD not in plan_of(shape, device_budget=manifest.aliases[HEAD] + MIB, grains=("block",)).mapped


def test_named_weights_are_read_in_place_even_if_everything_fits() -> None:
    nbytes = decoder("block", **SMALL).nbytes
    for budget in (nbytes, nbytes // 2):
        plan = plan_of(SMALL, device_budget=budget, zero_copy_params=["3.q"])
        assert plan.mapped >= {"3.q"}
    assert plan_of(SMALL, on=machine(on_cpu=True), device_budget=nbytes // 2, zero_copy_params=["3.q"]).mapped == {
        "3.q"
    }
    refused = machine(maps_host_memory=False)
    assert plan_of(SMALL, on=refused, device_budget=nbytes // 2, zero_copy_params=["3.q"]).mapped == frozenset()


def test_named_weights_are_read_over_the_link() -> None:
    nbytes = decoder("block", **SMALL).nbytes
    plan = plan_of(SMALL, device_budget=nbytes, zero_copy_params=["3.q"], grains=("block",))
    read_s = 2 * 1024 * 1024 / 0.9 / H200.link_bytes_per_s
    assert plan.step_s == pytest.approx(plan_of(SMALL, device_budget=nbytes, grains=("block",)).step_s + read_s)
    assert plan.copy_s == pytest.approx(read_s)


def test_uva_maps_its_bytes_besides_named_weights() -> None:
    placed = plan_of(SMALL, cpu_offload_gb=0.01, cpu_offload_params=["gate"]).mapped
    assert {alias.partition(".")[2] for alias in placed} == {"gate"}
    both = plan_of(SMALL, cpu_offload_gb=0.01, cpu_offload_params=["gate"], zero_copy_params=["7.down"]).mapped
    assert both == placed | {"7.down"}


@pytest.mark.parametrize("settings", [{"offload_group_size": 4}, {"cpu_offload_gb": 0.01}])
def test_a_budget_that_classic_settings_ignore_changes_nothing(settings: Mapping[str, Any]) -> None:
    for named in ({}, {"zero_copy_params": ["3.q"]}):
        plain = plan_of(SMALL, **settings, **named)
        with pytest.warns(ConfigWarning, match="device_budget"):
            assert plan_of(SMALL, **settings, **named, device_budget=100 * MIB) == plain


# -- the host and the disk ----------------------------------------------------------------------------------------


def test_weights_over_the_host_budget_are_on_disk() -> None:
    device, host = 60 * MIB, 64 * MIB
    plan = plan_of(SMALL, device_budget=device, host_budget=host)
    assert plan.disk
    assert plan.host_nbytes <= host
    assert not plan.disk & (plan.mapped | plan.resident)
    assert plan.disk_s == pytest.approx(plan.step_disk_nbytes / H200.disk_bytes_per_s)
    assert plan.limit == "disk"
    assert plan_of(SMALL, device_budget=device, host_budget=GIB).disk == frozenset()


def test_a_measured_disk_overrides_the_profile() -> None:
    budgets = {"device_budget": 60 * MIB, "host_budget": 64 * MIB}
    slow = plan_of(SMALL, on=machine(disk_bytes_per_s=1e9), **budgets)
    assert slow.disk_s == pytest.approx(slow.step_disk_nbytes / 1e9)
    assert plan_of(SMALL, **budgets).disk_s == pytest.approx(slow.step_disk_nbytes / H200.disk_bytes_per_s, rel=0.2)


def test_the_default_host_budget_is_the_free_memory() -> None:
    device = 60 * MIB
    assert plan_of(SMALL, device_budget=device).disk == frozenset()
    little = machine(host_free_nbytes=64 * MIB)
    assert plan_of(SMALL, device_budget=device, on=little).host_nbytes <= 64 * MIB
    on_cpu = machine(on_cpu=True, host_free_nbytes=64 * MIB + device)
    plan = plan_of(SMALL, device_budget=device, on=on_cpu)
    assert plan.disk
    assert plan.host_nbytes + plan.device_nbytes <= 64 * MIB + device


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"host_budget": MIB}, ["Raise host_budget, name an offload_folder to keep the rest on disk, or raise device"]),
        ({"host_budget": MIB, "offload_folder": "."}, ["Raise host_budget, or raise device_budget."]),
        (
            {"on": machine(host_free_nbytes=MIB)},
            ["Raise host_budget (the default, 80 % of what this process may still"],
        ),
        ({"max_memory": {0: 60 * MIB, "cpu": MIB}, "device_budget": None}, ["host budget 1.0MiB"]),
    ],
)
def test_too_little_host_memory_names_remedies(settings: Mapping[str, Any], parts: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        plan_of(SMALL, weights={"movable": frozenset()}, **{"device_budget": 60 * MIB, **settings})
    for part in parts:
        assert part in str(error.value)


# -- inputs -------------------------------------------------------------------------------------------------------


def test_the_faster_granularity_is_chosen() -> None:
    for percent in (15, 40, 70, 95, 100):
        found = inputs_of(SMALL, device_budget=decoder("block", **SMALL).nbytes * percent // 100)
        index, plan = found.plan()
        steps = [planner(manifest).step_s for manifest, planner in zip(found.grains, found.planners, strict=True)]
        assert plan.step_s == pytest.approx(min(steps), abs=2e-9)
        assert plan.manifest == found.grains[index]


def test_a_budget_that_no_granularity_fits_names_the_finest() -> None:
    with pytest.raises(PlanError) as error:
        inputs_of(SMALL, BATCH, device_budget=3 * MIB).plan()
    text = str(error.value)
    with pytest.raises(PlanError) as of_finest:
        inputs_of(SMALL, BATCH, device_budget=3 * MIB, grains=("matrix",)).plan()
    assert text == str(of_finest.value)
    assert "device budget 3.0MiB (3145728 bytes) < " in text
    assert f"ring {human(decoder('matrix', **SMALL).aliases[HEAD])} " in text
    assert "Raise the budget" in text


def test_a_sweep_plans_each_budget() -> None:
    nbytes = decoder("block", **SMALL).nbytes
    wanted = [MIB, *(nbytes * percent // 100 for percent in range(20, 101, 10))]
    found = inputs_of(SMALL)
    swept = {budget: found.plan_at(budget) for budget in wanted}
    assert swept[MIB] is None
    plans = [plan for plan in swept.values() if plan is not None]
    assert len(plans) == 9
    for plan in plans:
        assert plan == plan_of(SMALL, device_budget=plan.budget)
    for less, more in itertools.pairwise(plans):
        assert more.step_s <= 1.01 * less.step_s


def test_another_device_budget_keeps_the_host_budget() -> None:
    inputs = inputs_of(SMALL, max_memory={0: 100 * MIB, "cpu": 64 * MIB})
    _, plan = inputs.at_budget(60 * MIB).plan()
    assert plan.budget == 60 * MIB
    assert plan == plan_of(SMALL, device_budget=60 * MIB, host_budget=64 * MIB)


def test_enough_is_the_least_memory_with_the_same_time() -> None:
    found = inputs_of(SMALL, PREFILL, device_budget=decoder("block", **SMALL).nbytes * 95 // 100)
    _, plan = found.plan()
    assert plan.limit == "compute"
    less = found.enough(plan)
    assert less is not None
    assert less.budget is not None
    assert less.device_nbytes < plan.device_nbytes
    assert less.device_nbytes <= less.budget < (plan.budget or 0)
    index = next(i for i, grain in enumerate(found.grains) if grain == less.manifest)
    profile = found.planners[index].profile(less.manifest)
    assert cost.simulated_s(less, profile)[1] <= plan.step_s * 1.001


def test_a_step_limited_by_copies_has_no_enough() -> None:
    found = inputs_of(SMALL, DECODE, device_budget=decoder("block", **SMALL).nbytes // 2)
    _, plan = found.plan()
    assert plan.limit == "link"
    assert found.enough(plan) is None


# -- simulated times ----------------------------------------------------------------------------------------------


def unpruned(manifest: Manifest, budget: int, profile: Profile) -> tuple[float, int]:
    """Seconds and bytes of the best of all choices, each of them simulated."""
    chosen = candidates.choices(manifest, search.always_resident(manifest), budget)
    slots = ((r, ring, s, ends) for r, ring, unit_nbytes, ends in chosen for s in {0, unit_nbytes * (not ends)})
    plans = (Plan.build(manifest, r, ring, slot_nbytes=slot, by_ends=ends) for r, ring, slot, ends in slots)
    found = [(cost.simulated_s(plan, profile)[1], plan.device_nbytes) for plan in plans]
    least = min(step_s for step_s, _ in found)
    return least, min(nbytes for step_s, nbytes in found if step_s <= least + 1e-9)


@pytest.mark.parametrize("compute_s", only([0.0, 0.7, 2.0], 0.7))
def test_no_omitted_choice_is_better(compute_s: float) -> None:
    """The bound at which the search stops also holds for steps that read some units twice, or not at all."""
    manifests = [
        *SMALL_MODELS[12:],
        *(model_of(*[sizes] * n) for sizes, n in [((2048, 1024, 512), 5), ((1536, 1024), 7)]),
        replace(model_of(*[(1024, 512)] * 4), order=(0, 1, 2, 3, 2, 1)),
        replace(model_of(*[(1024, 512)] * 5), order=(0, 2, 4)),
    ]
    profile = replace(LINK_BOUND, overhead_s=compute_s, copy_latency_s=0.1, handover_s=0.3)
    for manifest in manifests:
        for budget in budgets(manifest):
            if manifest.nbytes <= budget:
                continue
            try:
                plan = place_within(manifest, budget=budget, profile=profile)
            except PlanError:
                continue
            step_s, nbytes = unpruned(manifest, budget, profile)
            assert plan.step_s == pytest.approx(step_s, abs=1e-9), (manifest.order, budget)
            assert plan.device_nbytes == nbytes, (manifest.order, budget)


CLASSIC = [(g, n, k) for g in (1, 2, 3, 4, 8) for n in (1, 2) for k in (1, 2, 3) if n <= g]
CLASSIC += [(6, 3, 2), (8, 4, 2), (16, 1, 1)]


def classic(found: PlannerInputs) -> Iterator[tuple[int, float, tuple[int, int, int]]]:
    """Device bytes and seconds of thirty settings, with blocks as units."""
    manifest, profile = found.grains[0], found.planners[0].profile(found.grains[0])
    for size, num, step in CLASSIC:
        plan = place_layers(manifest, grouped(size, num, step), profile=profile)
        yield plan.device_nbytes, plan.step_s, (size, num, step)


@pytest.mark.stress
@pytest.mark.parametrize(
    ("shape", "workload", "percents"),
    [
        (EIGHT, DECODE, (10, 25, 50, 75, 85, 88, 93, 95, 99)),
        (EIGHT, BATCH, (25, 75)),
        (EIGHT, PREFILL, (10, 50, 95)),
        (THIRTY_TWO, DECODE, (10, 90)),
        pytest.param(THIRTY_TWO, PREFILL, (25,), marks=pytest.mark.stress),
    ],
    ids=lambda value: str(value) if isinstance(value, Workload) else "",
)
def test_a_step_takes_little_more_than_compute_or_the_link_and_no_more_than_classic_settings(
    shape: Mapping[str, int], workload: Workload, percents: tuple[int, ...]
) -> None:
    """The bound counts every weight that has to cross the link: all that exceed the budget, except tables read in
    place, and
    those whose memory the ring takes."""
    found = inputs_of(shape, workload)
    settings = list(classic(found))
    assert len(settings) == 30
    for percent in percents:
        budget = found.grains[0].nbytes * percent // 100
        index, plan = found.at_budget(budget).plan()
        assert plan.device_nbytes <= budget
        profile = found.planners[index].profile(plan.manifest)
        read = sum(plan.manifest.aliases[alias] for alias in plan.mapped & {TABLE})
        compute_s = sum(max(profile.times_s(u, unit)) for u, unit in enumerate(plan.manifest.units))
        copy_s = (plan.manifest.nbytes - read - budget + plan.ring_nbytes) / H200.link_bytes_per_s
        assert plan.step_s <= 1.05 * max(compute_s, copy_s), f"{percent} %: {plan.summary()}"
        fitting = [(step_s, flags) for nbytes, step_s, flags in settings if nbytes <= budget]
        assert all(plan.step_s <= step_s * (1 + 1e-12) for step_s, _ in fitting), (
            f"{percent} %: {min(fitting)} < {plan.step_s}"
        )


@pytest.mark.parametrize("slower", [1.0, 2.0, 5.0])
def test_with_the_host_as_bottleneck_more_memory_is_not_slower(slower: float) -> None:
    """Plans that stream nothing are compared with the others in the same way."""
    on = machine(profile=replace(H200, op_launch_s=slower * H200.op_launch_s))
    nbytes = decoder("block", **SMALL).nbytes
    budgets = [nbytes * percent // 100 for percent in (90, 94, 97, 99)]
    steps = [inputs_of(SMALL, on=on, grains=("block",), device_budget=b).plan().plan.step_s for b in budgets]
    assert all(more <= 1.001 * less for less, more in itertools.pairwise(steps)), steps
