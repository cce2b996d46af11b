"""The printed inputs of the planner, and whether a faster plan is worth moving the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_planner import BATCH, GIB, MIB, PREFILL, SMALL, decoder, inputs_of
from test_planner import machine as machine_of

from weightstream.plan.candidates import Share
from weightstream.plan.expert_cache import Counts
from weightstream.plan.manifest import Profile
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine
from weightstream.plan.planner_inputs import PlannerInputs, is_worth, moved_nbytes
from weightstream.plan.units import human


def planned(percent: int) -> tuple[Machine, Plan]:
    """A machine, and its plan of the small decoder with that share of the weights."""
    manifest = decoder("block", **SMALL)
    planner = inputs_of(SMALL, PREFILL, grains=("block",), device_budget=manifest.nbytes * percent // 100).planners[0]
    return planner.machine, planner(manifest)


def other(plan: Plan, num: int = 2, faster: float = 2.0) -> Plan:
    """A plan with fewer residents whose steps are faster by a factor."""
    return replace(plan, resident=plan.resident - set(sorted(plan.resident)[:num]), step_s=plan.step_s / faster)


def test_a_small_gain_is_not_worth_a_move() -> None:
    machine, plan = planned(60)
    plan = replace(plan, step_s=100.0)
    assert is_worth(plan, other(plan, faster=1 / 0.96), machine)
    assert not is_worth(plan, other(plan, faster=1 / 0.98), machine)
    assert not is_worth(plan, plan, machine)
    assert not is_worth(plan, other(plan, faster=0.5), machine)


def test_a_gain_must_pay_for_the_move_in_500_steps() -> None:
    machine, plan = planned(60)
    found = other(plan)
    moved_s = sum(plan.manifest.aliases[alias] for alias in plan.resident ^ found.resident) / 5e9
    assert moved_s
    for gain_s, pays in ((1.1 * moved_s / 500, True), (0.9 * moved_s / 500, False)):
        assert is_worth(replace(plan, step_s=2 * gain_s), replace(found, step_s=gain_s), machine) is pays


def test_the_host_must_have_memory_for_weights_that_leave_the_device() -> None:
    machine, plan = planned(60)
    plan = replace(plan, step_s=100.0)
    for free_nbytes, fits in ((plan.manifest.nbytes, True), (plan.manifest.nbytes - 1, False)):
        assert is_worth(plan, other(plan), replace(machine, host_free_nbytes=free_nbytes)) is fits


def test_only_weights_with_another_place_or_form_move() -> None:
    _, plan = planned(60)
    aliases = sorted(plan.resident)[:3]
    assert moved_nbytes(plan, plan) == 0
    assert moved_nbytes(plan, replace(plan, ring_nbytes=2 * plan.ring_nbytes)) == 0
    nbytes = sum(plan.manifest.aliases[alias] for alias in aliases)
    for found in (
        replace(plan, resident=plan.resident.difference(aliases)),
        replace(plan, resident=plan.resident.difference(aliases), mapped=plan.mapped.union(aliases)),
        replace(plan, mapped=plan.mapped.union(aliases)),
        replace(plan, disk=frozenset(aliases)),
        replace(plan, manifest=plan.manifest.coded(dict.fromkeys(aliases, (3, 512)))),
    ):
        assert moved_nbytes(plan, found) == moved_nbytes(found, plan) == nbytes


# -- the printed inputs ----------------------------------------------------------------------------------------------

MANIFEST = decoder("matrix", **SMALL)
COMPRESSED = sorted(MANIFEST.aliases)[:5]  # stands for the compressible alias groups
CODES = {alias: MANIFEST.aliases[alias] * 2 // 3 for alias in COMPRESSED}


def rows(inputs: PlannerInputs) -> dict[str, str]:
    """The printed table, by label."""
    lines = [line.split(maxsplit=1) for line in str(inputs).splitlines()]
    table = {line[0]: line[1] for line in lines}
    assert len(table) == len(lines)
    return table


def test_inputs_print_a_row_for_each_fact_of_a_plan() -> None:
    profile = Profile(machine="A GPU", link_bytes_per_s=50e9, decode_bfloat16_bytes_per_s=1.5e12)
    inputs = inputs_of(
        SMALL,
        BATCH,
        on=machine_of(profile=profile, disk_bytes_per_s=3e9),
        weights={"codes": CODES},
        device_budget=60 * MIB,
        activation_nbytes=3 * MIB,
        cache_nbytes=5 * MIB,
    )
    spans = sum(MANIFEST.aliases[alias] for alias in COMPRESSED)
    compressed = f"{human(spans)} of them can be compressed to {human(sum(CODES.values()))}"
    units = ", ".join(str(len(grain.order)) for grain in inputs.grains)
    assert rows(inputs) == {
        "budget": "60.0MiB of device memory for weights",
        "device": "A GPU, 130.0GiB of 140.0GiB free",
        "host": "99.0GiB of 128.0GiB free",
        "rates": "link 50.0 GB/s, disk 3.0 GB/s, decompression of bfloat16 1.5 TB/s",
        "weights": f"{human(MANIFEST.nbytes)} of weights; {compressed}",
        "units": f"{units} in a step, by grain",
        "step": f"{BATCH}, its work is known",
        "besides": "3.0MiB of activations, 5.0MiB of cache",
    }


@pytest.mark.parametrize(
    ("changed", "label", "text"),
    [
        ({}, "device", "a GPU with assumed rates, 130.0GiB of 140.0GiB free"),
        ({}, "rates", "link 50.0 GB/s"),
        ({}, "weights", f"{human(MANIFEST.nbytes)} of weights"),
        ({}, "step", "any call, its work is unknown"),
        ({}, "besides", "activations unknown, 0B of cache"),
        ({"total_nbytes": 0}, "device", "a GPU with assumed rates, its memory is unknown"),
        ({"on_cpu": True}, "device", "the CPU, 130.0GiB of 140.0GiB free"),
        ({"offload_group_size": 2}, "budget", "the prefetch settings"),
        ({"cpu_offload_gb": 1.0}, "budget", "the uva settings"),
    ],
    ids=str,
)
def test_a_row_shows_unknown_and_changed_facts(changed: dict[str, object], label: str, text: str) -> None:
    names = ("total_nbytes", "on_cpu")
    on = machine_of(**{"profile": Profile()} | {name: changed[name] for name in names if name in changed})
    settings = {name: value for name, value in changed.items() if name not in names}
    assert rows(inputs_of(SMALL, None, on=on, **settings))[label] == text


def test_decoding_rates_are_printed_only_if_something_can_be_decoded() -> None:
    inputs = inputs_of(SMALL, weights={"codes": CODES})
    assert "decompression of bfloat16" in rows(inputs)["rates"]
    assert "decompression" not in rows(replace(inputs, machine=replace(inputs.machine, can_decode=False)))["rates"]


def test_a_share_replaces_the_printed_budget() -> None:
    inputs = replace(inputs_of(SMALL, device_budget=60 * MIB), share=Share(2 * GIB, GIB))
    kept_and_ring = "2.0GiB of device memory for resident weights, 1.0GiB for a ring that other models use, too"
    assert rows(inputs)["budget"] == kept_and_ring


def test_facts_about_experts_are_printed_if_there_are_experts() -> None:
    inputs = inputs_of(SMALL)
    assert "experts" not in rows(inputs)
    assert rows(replace(inputs, counts=Counts(8, 30, 10)))["experts"] == "30 hits and 10 misses in 8 slots"
    assert rows(replace(inputs, whole_experts="all are read"))["experts"] == "all are read"
