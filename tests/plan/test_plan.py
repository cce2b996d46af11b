"""The plan as a value: JSON both ways, equality, the printed lines, and the bytes that it promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import GRAIN, equal_plan, lazy_fills, plan_of, unit_of

from repeats import examples
from weightstream.errors import PlanError
from weightstream.plan.check import prove
from weightstream.plan.manifest import Manifest, TensorSpec, UnitSpec, Workload
from weightstream.plan.plan import ACTS, Plan
from weightstream.plan.speculation import PassSeconds
from weightstream.plan.units import exact, human, milliseconds, per_second, rate, rough_seconds, roughly, some

MIB = 1 << 20


@st.composite
def plans(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Plan:
    """Any model with ties, odd names, views, enclosing units, repeated positions; any residents; any ring."""
    sizes = draw(st.lists(st.integers(0, 5000), min_size=1, max_size=8))
    groups = {f"group {i}": nbytes for i, nbytes in enumerate(sizes)}
    units = []
    for index in range(draw(st.integers(1, 6))):
        aliases = draw(st.lists(st.sampled_from(sorted(groups)), max_size=4))
        tensors = tuple(
            TensorSpec(
                name=f"{draw(st.text(max_size=5))}.{index}.{j}",
                shape=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
                stride=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
                dtype=draw(st.sampled_from(["bfloat16", "float8_e4m3fn", "int64"])),
                alias=alias,
                nbytes=groups[alias],
                offset=draw(st.integers(0, 64)),
            )
            for j, alias in enumerate(aliases)
        )
        layer = draw(st.none() | st.integers(0, 99))
        units.append(UnitSpec(name=draw(st.text(max_size=8)), tensors=tensors, layer=layer))
    manifest = Manifest(units=tuple(units), order=tuple(draw(st.lists(st.integers(0, len(units) - 1), max_size=9))))
    resident = frozenset(draw(st.sets(st.sampled_from(sorted(manifest.aliases) or ["none"])))) & manifest.aliases.keys()
    slots = [sum(-(-n // GRAIN) * GRAIN for a, n in u.aliases().items() if a not in resident) for u in units]
    ring = max(slots) + draw(st.integers(0, 8)) * GRAIN
    plan = Plan.build(manifest, frozenset(resident), ring)
    budget = draw(st.none() | st.integers(plan.device_nbytes, 1 << 50))
    streamed = sorted(manifest.aliases.keys() - resident)
    disk = frozenset(draw(st.sets(st.sampled_from(streamed)))) if streamed else frozenset()
    return replace(plan, budget=budget, step_s=draw(st.floats(0, 1e6)), disk=disk)


@examples(150)
@given(plan=plans())
def test_json_restores_the_plan(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.summary() == plan.summary()
    assert Plan.from_json(plan.to_json().encode()) == plan
    prove(again)


@examples(150)
@given(plan=plans())
def test_a_step_moves_the_bytes_of_the_plan(plan: Plan) -> None:
    """A ring that fetches missing tensors at each position moves as many bytes, tensor by tensor, without padding."""

    def own_nbytes(unit: int) -> int:
        return sum(n for a, n in plan.manifest.units[unit].aliases().items() if a not in plan.resident)

    assert plan.step_nbytes == sum(own_nbytes(unit) for unit in lazy_fills(plan))
    assert plan.unit_nbytes == tuple(own_nbytes(unit) for unit in range(len(plan.manifest.units)))


@examples(100)
@given(plan=plans())
def test_tensors_of_a_unit_are_aligned_and_apart(plan: Plan) -> None:
    for index, unit in enumerate(plan.manifest.units):
        taken: set[int] = set()
        streamed = plan.streamed(index)
        assert streamed.keys() == {a for a, n in unit.aliases().items() if n and a not in plan.resident}
        for alias, offset in streamed.items():
            assert offset % GRAIN == 0
            grains = range(offset // GRAIN, -(-(offset + plan.manifest.aliases[alias]) // GRAIN))
            assert not taken.intersection(grains)
            taken.update(grains)
        assert len(taken) * GRAIN == plan.extents[index].nbytes
        assert plan.streams(index) == bool(taken)


def test_bytes_on_host_and_device_add_up() -> None:
    manifest = Manifest(units=(unit_of(0, 1000, 512), unit_of(1, 2000)), order=(0, 1))
    plan = Plan.build(manifest, frozenset({"blocks.0.0"}), 2048)
    assert plan.resident_nbytes == 1000
    assert plan.host_nbytes == 2512
    assert plan.ring_nbytes == 2048
    assert plan.device_nbytes == 3048
    assert plan.unit_nbytes == (512, 2000)
    assert plan.step_nbytes == 2512


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    plan: dict[str, Any] = json.loads(equal_plan(3, 2).to_json())
    change(plan)
    return json.dumps(plan)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        "3",
        '"plan"',
        b"\xff\xfe",
        "[" * 100_000,
        broken(lambda p: p.pop("manifest")),
        broken(lambda p: p.pop("after")),
        broken(lambda p: p.update(ring_nbytes="many")),
        broken(lambda p: p.update(ring_nbytes=1.5)),
        broken(lambda p: p.update(first=[None])),
        broken(lambda p: p.update(extents=[[0, 512]])),
        broken(lambda p: p.update(resident=[1])),
        broken(lambda p: p["extents"][0].pop("offset")),
        broken(lambda p: p["manifest"].update(order=[3])),
        broken(lambda p: p["manifest"].update(order=[-1])),
        broken(lambda p: p["manifest"]["units"][0].update(tensors={})),
        broken(lambda p: p["manifest"]["units"][0]["tensors"][0].pop("alias")),
        broken(lambda p: p["manifest"]["units"][0]["tensors"][0].update(alias="blocks.1.0", nbytes=7)),
    ],
    ids=lambda text: repr(text)[:24],
)
def test_bad_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(PlanError, match="not a plan: "):
        Plan.from_json(text)


def test_json_has_no_derived_values() -> None:
    plan = equal_plan(3, 2)
    assert plan.step_nbytes > 0  # the cached value must not be in the text, nor in the comparison
    assert plan == equal_plan(3, 2)
    assert json.loads(plan.to_json()).keys() == {field.name for field in fields(Plan)}


def test_plans_are_frozen() -> None:
    plan = equal_plan(3, 2)
    for value, name in [
        (plan, "budget"),
        (plan, "after"),
        (plan.manifest, "order"),
        (plan.manifest.units[0], "tensors"),
        (plan.manifest.units[0].tensors[0], "nbytes"),
        (plan.extents[0], "offset"),
    ]:
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)


def test_plans_compare_by_value_and_can_be_keys() -> None:
    plan = equal_plan(4, 2)
    assert {plan: 1}[equal_plan(4, 2)] == 1
    others = [
        equal_plan(4, 1),
        equal_plan(5, 2),
        replace(plan, budget=1 << 30),
        replace(plan, step_s=1.0),
        replace(plan, resident=frozenset({"blocks.0.0"})),
        plan.reordered((3, 2, 1, 0)),
    ]
    assert len({plan, *others}) == 7


def test_manifests_are_checked() -> None:
    twice = UnitSpec(name="b", tensors=(replace(unit_of(0, 512).tensors[0], nbytes=513),))
    with pytest.raises(ValueError, match=r"alias group 'blocks\.0\.0' has two sizes: 512, 513"):
        Manifest(units=(unit_of(0, 512), twice))
    with pytest.raises(ValueError, match=r"order names units \[2, -1\] of 2"):
        Manifest(units=(unit_of(0, 512), unit_of(1, 512)), order=(0, 2, 1, -1))


@examples(150)
@given(data=st.data())
def test_reordering_keeps_homes_and_ring(data: st.DataObject) -> None:
    plan = data.draw(plans())
    order = tuple(data.draw(st.lists(st.integers(0, len(plan.manifest.units) - 1), max_size=9)))
    other = plan.reordered(order)
    assert other.manifest == replace(plan.manifest, order=order)
    assert (other.resident, other.budget, other.step_s) == (plan.resident, plan.budget, plan.step_s)
    assert other.device_nbytes <= plan.device_nbytes
    prove(other)


def test_reordering_there_and_back_is_the_same_plan() -> None:
    """The ring's bytes are allocated once: an order that needs fewer must not shrink it."""
    plan = plan_of([3 * GRAIN, 2 * GRAIN, 2 * GRAIN], (0, 1, 2), 4 * GRAIN)
    assert plan.ring_nbytes == 4 * GRAIN
    other = plan.reordered((1, 0, 2))
    assert other.ring_nbytes == plan.ring_nbytes
    assert other.reordered((0, 1, 2)) == plan


def test_the_summary_says_when_everything_fits() -> None:
    manifest = Manifest(units=(unit_of(0, MIB),), order=(0,))
    plan = Plan.build(manifest, frozenset(manifest.aliases), 0)
    assert plan.summary() == "everything fits: 1.0MiB resident, nothing streams"


def test_formatted_bytes() -> None:
    assert [human(n) for n in (0, 512, 1024, 96 * MIB, 5 << 30, 2.0**40)] == [
        "0B",
        "512B",
        "1.0KiB",
        "96.0MiB",
        "5.0GiB",
        "1.0TiB",
    ]


def test_formatted_rates_and_seconds() -> None:
    assert [per_second(55.2e9), per_second(684e12, "FLOP")] == ["55.2 GB/s", "684.0 TFLOP/s"]
    assert [milliseconds(s) for s in (0, 12e-6, 0.0125, 13.91)] == ["0.0 ms", "12 us", "12.5 ms", "13.9 s"]
    assert [rate(n) for n in (0.01234, 4.567, 78.94, 1234.5)] == ["0.0123", "4.57", "78.9", "1,234"]
    assert [rough_seconds(s) for s in (0, 12.3e-6, 0.0125, 0.6171, 0.9996, 13.91)] == [
        "0 ms",
        "~12 us",
        "~12 ms",
        "~620 ms",
        "~1 s",
        "~14 s",
    ]
    assert [roughly(n) for n in (0.01234, 1.56, 12345.6, 1234567.8)] == ["~0.012", "~1.6", "~12,000", "~1,200,000"]
    assert [exact(n) for n in (5, 96 * MIB, 5 << 30, 1000 << 10)] == ["5", "96MiB", "5GiB", "1000KiB"]


def from_disk() -> Plan:
    """Four blocks of 1 and 2 MiB. The larger tensors of the last three are on disk, and block 0 is read twice."""
    manifest = Manifest(units=tuple(unit_of(i, MIB, 2 * MIB) for i in range(4)), order=(0, 1, 2, 3, 0))
    plan = Plan.build(manifest, frozenset({"blocks.0.0"}), 6 * MIB)
    return replace(plan, disk=frozenset(f"blocks.{i}.1" for i in (1, 2, 3)), step_s=0.0125)


def test_a_plan_is_printed_as_its_summary_and_predictions() -> None:
    plan = replace(from_disk(), machine="Test GPU", basis="measured")
    lines = str(plan).splitlines()
    assert lines == [plan.summary(), "machine: Test GPU, measured", "predicted: 12.5 ms per step"]
    assert lines[0].endswith(", 6.0MiB of it from disk")
    assert "disk" not in str(replace(plan, disk=frozenset()))
    busy = replace(plan, copy_s=0.012, compute_s=0.001, disk_s=0.002, workload=Workload(batch=2))
    assert str(busy).splitlines()[2:] == [
        "predicted: 12.5 ms per step, 160 tokens/s (batch 2, tokens 1, context 4096)",
        "limit: link, busy 12.0 ms of a step; compute 1.0 ms, disk 2.0 ms",
    ]


def test_steps_in_graphs_are_predicted_as_they_run() -> None:
    """The tokens per second and the limit are those of the graphs in which `generate` decodes."""
    times: Any = {"step_s": 0.0125, "graph_s": 0.005, "compute_s": 0.0125, "graph_compute_s": 0.002, "copy_s": 0.005}
    plan = replace(from_disk(), disk=frozenset(), basis="measured", workload=Workload(), **times)
    assert plan.predictions()["predicted"].endswith("context 4096); 5.0 ms in a CUDA graph")
    assert (plan.limit, plan.tokens_per_s) == ("compute", 80)
    plan = replace(plan, in_graphs=True)
    assert plan.predictions() == {
        "predicted": "5.0 ms per step in a CUDA graph, 200 tokens/s (batch 1, tokens 1, context 4096); 12.5 ms eager",
        "limit": "link, busy 5.0 ms of a step; compute 2.0 ms",
    }


@pytest.mark.parametrize(
    ("facts", "machine", "predicted"),
    [
        ({}, "a GPU, whose rates are assumed", "~12 ms"),
        ({"machine": "RTX", "basis": "data sheet"}, "RTX, assumed from the data sheet", "~12 ms"),
        ({"machine": "RTX", "basis": "measured under load"}, "RTX, measured under load, so roughly", "~12 ms"),
        ({"machine": "Xeon", "basis": "measured", "on_cpu": True}, "the CPU (Xeon), measured", "~12 ms"),
        ({"machine": "Xeon", "basis": "steps", "on_cpu": True}, "the CPU (Xeon), as measured in steps", "12.5 ms"),
        ({"basis": "assumed", "on_cpu": True}, "the CPU, whose rates are assumed", "~12 ms"),
    ],
)
def test_rough_predictions_have_two_digits(facts: dict[str, Any], machine: str, predicted: str) -> None:
    plan = replace(from_disk(), **facts)
    assert plan.machine_text.startswith(machine)
    assert plan.predictions()["predicted"] == f"{predicted} per step"


def test_on_a_cpu_nothing_is_said_to_be_in_a_graph() -> None:
    passes = tuple(PassSeconds(tokens=n, step_s=1.0, graph_s=0.5) for n in (1, 2))
    plan = replace(from_disk(), graph_s=0.001, passes=passes, workload=Workload())
    assert "in a CUDA graph" in str(plan)
    assert "graph" not in str(replace(plan, on_cpu=True))


def test_bytes_on_disk_are_not_on_the_host() -> None:
    plan = from_disk()
    assert plan.disk_nbytes == 6 * MIB
    assert plan.offloaded_nbytes == 11 * MIB
    assert plan.host_nbytes == 5 * MIB
    assert plan.unit_disk_nbytes == (0, 2 * MIB, 2 * MIB, 2 * MIB)


def test_another_order_keeps_the_tensors_on_disk() -> None:
    plan = from_disk()
    again = plan.reordered((3, 1, 0, 2))
    assert (again.disk, again.step_s, again.ring_nbytes) == (plan.disk, plan.step_s, plan.ring_nbytes)
    prove(again)
    text = json.loads(plan.to_json())
    assert text["disk"] == ["blocks.1.1", "blocks.2.1", "blocks.3.1"]
    del text["disk"]
    assert Plan.from_json(json.dumps(text)) == replace(plan, disk=frozenset()), (
        "a plan from before there was a disk tier"
    )


PREDICTED = (  # and requested values
    *("step_s", "graph_s", "compute_s", "graph_compute_s", "decode_s", "copy_s", "disk_s"),
    *("found_share", "fetched_nbytes", "hit_curve", "counted_rows", "basis", "on_cpu", "in_graphs"),
    *(
        "workload",
        "passes",
        "activation_nbytes",
        "cache_nbytes",
        "trained_nbytes",
        "machine",
        "budget",
        "slot_nbytes",
        "by_ends",
    ),
)


def another(value: Any) -> Any:
    """A different value."""
    if isinstance(value, frozenset):
        return value ^ {"1"}
    if isinstance(value, tuple):
        return value[:-1] if value else (1,)
    return "other" if isinstance(value, str) else (value or 0) + 1


@pytest.mark.parametrize("name", ACTS)
def test_plans_with_different_steps_act_differently(name: str) -> None:
    plan = equal_plan(5, 2)
    other = replace(plan, **{name: another(getattr(plan, name))})
    assert other != plan
    assert not plan.acts_as(other)
    assert not other.acts_as(plan)


@pytest.mark.parametrize("name", PREDICTED)
def test_plans_with_different_predictions_act_alike(name: str) -> None:
    plan = equal_plan(5, 2)
    other = replace(plan, **{name: another(getattr(plan, name))})
    assert other != plan
    assert plan.acts_as(other)


def test_each_field_of_a_plan_acts_or_is_predicted() -> None:
    assert sorted((*ACTS, *PREDICTED, "manifest")) == sorted(field.name for field in fields(Plan))


def test_another_order_acts_differently_if_anything_opens() -> None:
    plan, turned = equal_plan(4, 2), (0, 2, 1, 3)
    assert not plan.acts_as(replace(plan, manifest=replace(plan.manifest, order=turned)))
    resident = Plan.build(plan.manifest, frozenset(plan.manifest.aliases), 0)
    assert resident.acts_as(replace(resident, manifest=replace(plan.manifest, order=turned)))


@pytest.mark.parametrize(("num", "text"), [(0, ""), (1, "a"), (3, "a, b, c"), (4, "a, b, c and 1 more")])
def test_the_first_of_many_names(num: int, text: str) -> None:
    assert some("abcdefg"[:num], 3) == text
