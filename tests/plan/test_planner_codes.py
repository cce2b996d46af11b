"""The planner with compression: which weights are compressed, the cost, and the gain, with made-up compressed sizes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from test_planner import (
    DECODE,
    EIGHT,
    GIB,
    H200,
    HEAD,
    MIB,
    SMALL,
    TABLE,
    WIDE,
    Machine,
    Plan,
    Workload,
    decoder,
    inputs_of,
    machine,
    unpruned,
)
from test_search import LINK_BOUND, SMALL_MODELS, budgets, kept_anyway

from repeats import only, thinned
from weightstream.errors import PlanError
from weightstream.plan import cost
from weightstream.plan.check import prove, violations
from weightstream.plan.coding import decoding_less
from weightstream.plan.correction import Times, corrected
from weightstream.plan.manifest import Manifest, decode_rate
from weightstream.plan.plan import buffer_nbytes
from weightstream.plan.planner import Planner, Weights
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.search import place_within

SEVENTY = {"layers": 80, "hidden": 8192, "inner": 28672, "kv": 1024, "vocab": 128256}
SHARE = 0.7
LARGE = machine(host_free_nbytes=500 * GIB, host_total_nbytes=512 * GIB)
Sizes = Mapping[str, int]
Shape = Mapping[str, int]


def sizes_of(manifest: Manifest, noise: float = 0.0) -> dict[str, int]:
    """Compressed bytes of all weights except the table, in units of 512 bytes. With noise, hardly any two are equal."""
    chance = random.Random(0)
    found: dict[str, int] = {}
    for alias, nbytes in manifest.aliases.items():
        if alias != TABLE:
            found[alias] = -(-int(nbytes * SHARE * (1 + noise * chance.random())) // 512) * 512
    return found


@cache
def known(layers: int, hidden: int, inner: int, kv: int, vocab: int, noise: float) -> Sizes:
    return sizes_of(decoder("block", layers, hidden, inner, kv, vocab), noise)


def ahead(shape: Shape, workload: Workload | None = DECODE, *, noise: float = 0.0, **settings: Any) -> PlannerInputs:
    codes = known(**shape, noise=noise)
    weights = {"codes": codes} | settings.pop("weights", {})
    return inputs_of(shape, workload, weights=weights, **settings)


def plan_of(shape: Shape, workload: Workload | None = DECODE, **settings: Any) -> Plan:
    plan = ahead(shape, workload, **settings).plan().plan
    assert_sound(plan)
    return plan


def assert_sound(plan: Plan) -> None:
    """Check a plan: it is proved, survives JSON, and its compressed tensors lie in the buffer without overlap."""
    prove(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.device_nbytes == plan.resident_nbytes + plan.ring_nbytes + plan.buffer_nbytes
    assert plan.manifest.plain().decoded_nbytes == plan.manifest.decoded_nbytes == plan.manifest.plain().nbytes
    for index, unit in enumerate(plan.manifest.units):
        offsets, end = plan.decoded(index), 0
        assert offsets.keys() == unit.coded().keys()
        assert plan.opens(index) == bool(offsets or plan.streamed(index))
        for alias, offset in offsets.items():
            assert offset >= end
            assert offset % 512 == 0
            end = offset + plan.manifest.spans[alias]
        assert end <= plan.buffer_nbytes


# -- the gain -----------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(("percent", "noise"), thinned([6, 15, 30], [0.0, 0.004]))
def test_a_step_that_streams_nearly_everything_takes_the_time_of_the_compressed_bytes(
    percent: int, noise: float
) -> None:
    budget = decoder("block", **EIGHT).nbytes * percent // 100
    raw, plan = (plan_of(EIGHT, noise=noise, device_budget=budget, codec=codec) for codec in ("none", "auto"))
    assert (raw.limit, plan.limit) == ("link", "link")
    assert raw.manifest.codes == {}
    assert plan.manifest.codes
    assert plan.step_s < 0.72 * raw.step_s
    assert plan.device_nbytes <= budget


@pytest.mark.stress
@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.stress), 0.004])
def test_more_memory_is_never_slower(noise: float) -> None:
    whole = decoder("block", **EIGHT)
    plans = [plan_of(EIGHT, noise=noise, device_budget=whole.nbytes * k // 12) for k in range(1, 13)]
    for less, more in itertools.pairwise(plans):
        assert more.step_s <= 1.01 * less.step_s
        assert more.device_nbytes <= (more.budget or 0)
    assert plans[-1].step_s < plans[0].step_s / 30
    assert plans[-1].manifest.codes == {}, "everything fits uncompressed"
    assert all(plan.manifest.codes for plan in plans[:-1])


@pytest.mark.few(1)
@pytest.mark.parametrize("percent", [76, 80, 85, 90])
def test_a_model_that_fits_compressed_does_not_stream(percent: int) -> None:
    """Remaining bytes are used for uncompressed weights: the more memory, the less is decoded."""
    whole = decoder("block", **EIGHT)
    plan = plan_of(EIGHT, noise=0.004, device_budget=whole.nbytes * percent // 100)
    assert plan.step_nbytes == 0
    assert plan.offloaded_nbytes == plan.mapped_nbytes == whole.aliases[TABLE]
    assert plan.manifest.codes
    assert plan.device_nbytes > 0.99 * (plan.budget or 0)
    assert HEAD not in plan.manifest.codes, "its buffer would be larger than its saving"
    raw = plan_of(EIGHT, noise=0.004, device_budget=plan.budget, codec="none")
    assert plan.step_s < 0.7 * raw.step_s


@pytest.mark.stress
def test_a_model_of_1_4_times_the_memory_is_resident() -> None:
    whole = decoder("block", **SEVENTY)
    plan = plan_of(SEVENTY, on=LARGE, device_budget=100 * GIB)
    assert whole.nbytes > 1.3 * 100 * GIB
    assert plan.step_nbytes == 0
    assert plan.step_s < 0.25 * plan_of(SEVENTY, on=LARGE, device_budget=100 * GIB, codec="none").step_s


@pytest.mark.parametrize("noise", only([0.0, 0.004], 0.004))
def test_70b_in_80_gib_is_three_times_as_fast(noise: float) -> None:
    raw, plan = (
        plan_of(SEVENTY, noise=noise, on=LARGE, device_budget=80 * GIB, codec=codec) for codec in ("none", "auto")
    )
    assert 3 * plan.step_s < raw.step_s


def test_if_compute_is_the_bottleneck_nothing_is_compressed() -> None:
    for budget in (2 * GIB, 8 * GIB):
        plan = plan_of(EIGHT, Workload(tokens=16384, context=16384), device_budget=budget)
        assert plan.manifest.codes == {}
        assert plan.limit == "compute"
        assert plan.step_s < 1.003 * plan.compute_s


def test_decoding_is_part_of_compute() -> None:
    beside_s = 8e-6
    found = ahead(EIGHT, on=machine(profile=replace(H200, decoding_s=beside_s)), device_budget=8 * GIB)
    index, plan = found.plan()
    profile, plain = (found.planners[index].profile(m) for m in (plan.manifest, plan.manifest.plain()))
    decode_s = sum(plan.manifest.spans[alias] for alias in plan.manifest.codes) / H200.decode_bfloat16_bytes_per_s
    decode_s += beside_s * sum(bool(unit.coded()) for unit in plan.manifest.units)
    assert plan.decode_s == pytest.approx(decode_s)
    assert sum(profile.unit_s) == pytest.approx(sum(plain.unit_s) + decode_s)
    assert plan.step_s == pytest.approx(cost.simulated_s(plan, profile)[1])
    assert found.planners[index].priced(plan).step_s == pytest.approx(plan.step_s)
    after = [share * s for share, s in zip(profile.after_share, profile.unit_s, strict=True)]
    assert after == pytest.approx([share * s for share, s in zip(plain.after_share, plain.unit_s, strict=True)])


@pytest.mark.parametrize(
    ("dtypes", "num"),
    [
        ((), 0),
        (("bfloat16",), 1),
        (("bfloat16", "bfloat16"), 1),
        (("bfloat16", "float16"), 2),
        (("float8_e4m3fn", "float16", "float8_e4m3fn"), 2),
    ],
)
def test_each_dtype_of_a_unit_takes_a_launch_and_has_a_rate(dtypes: tuple[str, ...], num: int) -> None:
    rates = {"bfloat16": 3e11, "float16": 2e11, "float8_e4m3fn": 1e11}
    profile = replace(H200, decoding_s=8e-6, **{decode_rate(dtype): rate for dtype, rate in rates.items()})
    unit = next(unit for unit in decoder("block", **SMALL).units if len(unit.aliases()) > 3)
    tensors = tuple(replace(tensor, dtype=dtype) for tensor, dtype in zip(unit.tensors, dtypes, strict=False))
    whole = Manifest(units=(replace(unit, tensors=(*tensors, *unit.tensors[len(dtypes) :])),))
    coded = whole.coded({tensor.alias: 512 for tensor in tensors})
    seconds = sum(tensor.nbytes / rates[tensor.dtype] for tensor in tensors)
    assert profile.decode_s(0, coded.units[0]) == pytest.approx(seconds + num * 8e-6)


def test_for_a_device_that_decodes_slowly_nothing_is_compressed() -> None:
    slow = machine(profile=replace(H200, decode_bfloat16_bytes_per_s=1.0))
    assert plan_of(SMALL, on=slow, device_budget=60 * MIB) == plan_of(SMALL, device_budget=60 * MIB, codec="none")


# -- where compression is allowed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "none"},
        {"weights": {"codes": {}}},
        {"on": machine(can_decode=False)},
        {"on": machine(on_cpu=True)},
        {"cpu_offload_gb": 0.05},
        {"offload_group_size": 2},
    ],
)
def test_without_compression_plans_are_unchanged(settings: Mapping[str, Any]) -> None:
    """On the CPU, and with the classic settings, nothing is compressed unless that is requested."""
    budget = {"device_budget": 60 * MIB} if not settings.keys() & {"cpu_offload_gb", "offload_group_size"} else {}
    plain = {name: value for name, value in settings.items() if name not in ("codec", "weights")}
    expected = inputs_of(SMALL, **budget, **plain, codec="none").plan().plan
    assert plan_of(SMALL, **budget, **settings) == expected


@pytest.mark.parametrize("on", [machine(), machine(on_cpu=True, free_nbytes=4 * GIB)])
@pytest.mark.parametrize("percent", [30, 100, 200])
def test_requested_compression_is_used_everywhere(on: Machine, percent: int) -> None:
    whole = decoder("block", **SMALL)
    plan = plan_of(SMALL, on=on, device_budget=whole.nbytes * percent // 100, codec="compressed")
    plain = whole.aliases.keys() - plan.manifest.codes.keys() - plan.mapped
    assert plain - {TABLE} == {alias for alias in plain if whole.aliases[alias] <= 2 * SMALL["hidden"]}
    assert (plan.offloaded_nbytes == 0) == (percent > 30)


def test_classic_settings_compress_streamed_weights() -> None:
    raw, plan = (plan_of(SMALL, offload_group_size=2, codec=codec) for codec in ("none", "compressed"))
    streamed = raw.manifest.aliases.keys() - raw.resident
    assert plan.manifest.aliases.keys() - plan.resident == streamed
    assert plan.manifest.codes.keys() == {alias for alias in streamed if "norm" not in alias}
    assert plan.step_nbytes == pytest.approx(0.7 * raw.step_nbytes, rel=1e-3)


@pytest.mark.parametrize(
    ("codec", "share", "gains"),
    [("auto", 0.96, True), ("auto", 0.98, False), ("compressed", 0.98, True), ("compressed", 1.0, False)],
)
def test_weights_that_gain_nothing_stay_uncompressed(codec: str, share: float, gains: bool) -> None:
    """By default a small gain does not count, since decoding has a cost. With "compressed", only no tensor may grow."""
    aliases, codes = decoder("block", **SMALL).aliases, dict(known(**SMALL, noise=0.0))
    codes |= {alias: int(aliases[alias] * share) for alias in codes if "gate" in alias}
    plan = plan_of(SMALL, weights={"codes": codes}, device_budget=60 * MIB, codec=codec)
    assert plan.manifest.codes
    assert any("gate" in alias for alias in plan.manifest.codes) is gains


def test_weights_that_kernels_read_in_place_are_not_compressed() -> None:
    plan = plan_of(SMALL, device_budget=60 * MIB, zero_copy_params=["3.q"])
    assert "3.q" in plan.mapped
    assert plan.manifest.codes
    assert not plan.manifest.codes.keys() & plan.mapped


def test_weights_of_enclosing_units_are_not_compressed() -> None:
    whole = decoder("block", **SMALL)
    units = tuple(replace(u, enclosing=u.layer == 3) for u in whole.units)
    found = ahead(SMALL, None, device_budget=100 * MIB, grains=("block",)).planners[0]
    plan = found(replace(whole, units=units))
    prove(plan)
    assert plan.manifest.codes
    assert not any(alias.startswith("3.") for alias in plan.manifest.codes)


# -- a head, which sets the size of the buffer ---------------------------------------------------------------------


def test_a_head_that_fits_nowhere_is_read_in_place_uncompressed() -> None:
    head = decoder("matrix", **WIDE).aliases[HEAD]
    plan = plan_of(WIDE, device_budget=head - MIB)
    assert plan.mapped == {TABLE, HEAD}
    assert plan.manifest.codes
    assert plan.buffer_nbytes < head / 8


@pytest.mark.parametrize("percent", [40, 50, 55])
def test_the_buffer_does_not_grow_for_a_head(percent: int) -> None:
    whole = decoder("block", **WIDE)
    plan = plan_of(WIDE, device_budget=whole.nbytes * percent // 100)
    assert HEAD in plan.resident - plan.manifest.codes.keys()
    assert 0 < plan.buffer_nbytes <= whole.units[1].nbytes


@pytest.mark.parametrize("can_map", [True, False])
def test_a_unit_that_is_nearly_the_whole_model_stays_uncompressed(can_map: bool) -> None:
    """Decoding it takes more memory than storing it."""
    shape = SMALL | {"layers": 1, "vocab": 131072}
    plan = plan_of(shape, on=machine(maps_host_memory=can_map), device_budget=500 * MIB)
    assert HEAD not in plan.manifest.codes
    one = decoder("block", **shape).without(
        frozenset({TABLE, *(f"0.{part}" for part in ("q", "k", "v", "o", "norm1"))})
    )
    planner = ahead(shape, None, on=machine(maps_host_memory=can_map), device_budget=260 * MIB).planners[0]
    assert planner(one).manifest.codes == {}


def test_the_size_of_the_buffer_pays_off() -> None:
    """Units have three sizes. A few of the second size are not worth a buffer for one of them; many are."""
    aliases = known(**SMALL, noise=0.0)
    whole = decoder("matrix", **SMALL)
    few = whole.without(frozenset(a for a in whole.aliases if "gate" in a or "up" in a or "down" in a) - {"0.gate"})
    on = machine(profile=replace(H200, overhead_s=0.0))
    planner = ahead(SMALL, None, on=on, grains=("matrix",), device_budget=24 * MIB).planners[0]
    found = planner(few.without(frozenset({TABLE, HEAD}))).manifest.codes
    assert found.keys() == {alias for alias in aliases if alias in few.aliases and alias[2:] in ("q", "o", "k", "v")}


def test_a_budget_exceeded_by_the_buffer_is_refused_with_the_sum() -> None:
    with pytest.raises(PlanError, match=r"ring \S+ \+ decode buffer \S+ = \S+ \(\d+ bytes\)") as error:
        plan_of(SMALL, on=machine(on_cpu=True), device_budget=40 * MIB, codec="compressed")
    needed = int(str(error.value).split("(")[2].split()[0])
    assert plan_of(SMALL, on=machine(on_cpu=True), device_budget=needed, codec="compressed").device_nbytes <= needed


# -- the host and the disk ----------------------------------------------------------------------------------------


def test_compressed_weights_take_less_host_memory() -> None:
    """Nothing may be on disk, and only the compressed weights fit the host budget."""
    kept = {"movable": frozenset[str]()}
    budget = 200 * MIB
    plan = plan_of(SMALL, weights=kept, device_budget=100 * MIB, host_budget=budget)
    assert plan.host_nbytes <= budget
    assert plan.manifest.codes
    with pytest.raises(PlanError, match="host budget"):
        plan_of(SMALL, weights=kept, device_budget=100 * MIB, host_budget=budget, codec="none")


def test_weights_compressed_in_memory_cannot_be_on_disk() -> None:
    """A tensor that is uncompressed in its file is read from disk uncompressed, or not at all."""
    settings = {"device_budget": 60 * MIB, "host_budget": 100 * MIB}
    plan = plan_of(SMALL, **settings)
    assert plan.disk
    assert not plan.disk & plan.manifest.codes.keys()


def test_weights_compressed_in_a_file_stay_compressed_on_disk() -> None:
    every = frozenset(known(**SMALL, noise=0.0))
    weights = {"coded_in_files": every}
    settings = {"device_budget": 60 * MIB, "host_budget": 100 * MIB, "weights": weights}
    plan = plan_of(SMALL, **settings)
    assert plan.disk
    assert plan.disk <= plan.manifest.codes.keys()
    assert plan.host_nbytes <= 100 * MIB
    assert plan.disk_s < plan_of(SMALL, **{**settings, "weights": {}}).disk_s
    with pytest.raises(PlanError, match="must be in host memory"):
        plan_of(SMALL, **settings, codec="none")


# -- all small models ----------------------------------------------------------------------------------------------

CODED_MODELS = [
    replace(
        model,
        units=tuple(replace(u, tensors=tuple(replace(t, nbytes=8 * t.nbytes) for t in u.tensors)) for u in model.units),
    )
    for model in SMALL_MODELS
]


def coded(manifest: Manifest, *, uneven: bool) -> Manifest:
    """Compressed bytes of all compressible tensors: about three quarters, and for every other one a little more, or
    not."""
    aliases = sorted(manifest.aliases.keys() - kept_anyway(manifest))
    more = itertools.cycle((0, 512) if uneven else (0,))
    return manifest.coded({a: manifest.aliases[a] * 3 // 4 // 512 * 512 + next(more) for a in aliases})


@pytest.mark.few(1)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("compute_s", [0.0, 4.0])
def test_every_budget_of_small_models(compute_s: float, uneven: bool) -> None:
    """Each plan is proved, and no choice that the search leaves out is faster."""
    profile = replace(LINK_BOUND, overhead_s=compute_s, decode_bfloat16_bytes_per_s=1e30)
    num = 0
    for plain in CODED_MODELS:
        manifest = coded(plain, uneven=uneven)
        buffer = buffer_nbytes(manifest)
        for budget in list(budgets(plain))[::3]:
            try:
                plan = place_within(manifest, budget=budget, profile=profile)
            except PlanError:
                assert budget < manifest.nbytes + buffer
                continue
            assert_sound(plan)
            if plan.offloaded_nbytes:
                best_s, _ = unpruned(manifest, budget - buffer, profile)
                assert plan.step_s == pytest.approx(best_s, abs=1e-9)
                num += 1
    assert num > 200


@pytest.mark.few(1)
@pytest.mark.parametrize("uneven", [False, True])
def test_remaining_memory_is_used_for_uncompressed_weights(uneven: bool) -> None:
    """For every small model and budget: never over the budget, never slower than without compression."""
    profile = replace(LINK_BOUND, decode_bfloat16_bytes_per_s=1000.0)
    for plain in CODED_MODELS:
        manifest = coded(plain, uneven=uneven)
        least = manifest.nbytes + buffer_nbytes(manifest)
        seconds = []
        for budget in range(least, plain.nbytes + buffer_nbytes(manifest) + 512, 512):
            first = place_within(manifest, budget=budget, profile=profile)
            plan = cost.predicted(decoding_less(first, profile), profile)
            assert_sound(plan)
            assert plan.offloaded_nbytes == 0
            assert plan.decode_s <= first.decode_s
            seconds.append(plan.decode_s)
        assert seconds[-1] == 0
        assert seconds[0] > 0 or not manifest.codes or not manifest.order


# -- manifests and proofs ------------------------------------------------------------------------------------------


def test_a_compressed_manifest_converts_back() -> None:
    whole = decoder("half", **SMALL)
    codes = known(**SMALL, noise=0.0)
    manifest = whole.coded(codes)
    assert manifest.plain() == whole
    assert manifest.codes == codes
    assert manifest.spans == whole.aliases
    assert manifest.aliases == whole.aliases | codes
    assert whole.coded({}) is whole is whole.plain()


def test_an_alias_group_has_one_form() -> None:
    whole = decoder("matrix", **SMALL)
    tensor = whole.units[3].tensors[0]
    other = replace(tensor, decoded_nbytes=2 * tensor.nbytes)
    with pytest.raises(ValueError, match=r"has two uncompressed sizes: 0, 1048576"):
        Manifest(units=(*whole.units, replace(whole.units[3], tensors=(other,))))


def test_a_plan_that_breaks_a_rule_of_compression_is_found() -> None:
    plan = plan_of(SMALL, device_budget=100 * MIB, grains=("block",))
    layer = next(index for index, unit in enumerate(plan.manifest.units) if unit.coded())

    def changed(**changes: Any) -> list[str]:
        units = list(plan.manifest.units)
        tensors = tuple(replace(t, **changes.get("tensor", {})) if t.is_coded else t for t in units[layer].tensors)
        units[layer] = replace(units[layer], tensors=tensors, enclosing=changes.get("enclosing", False))
        return list(violations(replace(plan, manifest=replace(plan.manifest, units=tuple(units)))))

    assert changed() == []
    assert any("they share the buffer" in text for text in changed(enclosing=True))
    assert any("device bytes" in text for text in changed(tensor={"decoded_nbytes": GIB}))
    mapped = replace(plan, mapped=frozenset(plan.manifest.units[layer].coded()))
    assert any("compressed and zero-copy" in text for text in violations(replace(mapped, resident=frozenset())))


def test_another_order_keeps_the_compression() -> None:
    plan = plan_of(SMALL, device_budget=100 * MIB)
    other = plan.reordered(tuple(reversed(plan.manifest.order)))
    prove(other)
    assert other.manifest.codes == plan.manifest.codes
    assert other.device_nbytes <= plan.device_nbytes


def test_a_planner_accepts_a_compressed_manifest() -> None:
    found = ahead(SMALL, device_budget=100 * MIB, grains=("block",))
    planner: Planner = found.planners[0]
    plan = planner(found.grains[0])
    assert plan.manifest.codes
    assert planner(plan.manifest) == plan
    assert Weights(names={}).codes == {}


@pytest.mark.parametrize("budget", [6 * GIB, 13 * GIB])
def test_measured_seconds_include_decoding_once(budget: int) -> None:
    """If a plan's steps take the predicted time, the prediction from measured times is the same."""
    found = ahead(EIGHT, device_budget=budget, grains=("block",), on=machine(maps_host_memory=False))
    planner, plan = found.planners[0], found.plan().plan
    assert plan.manifest.codes
    assert (plan.step_nbytes > 0) == (budget == 6 * GIB)
    computes = cost.unit_s(plan, planner.profile(plan.manifest))
    computes = [s * plan.compute_s / sum(computes) for s in computes]  # the host runs ahead from unit to unit
    opened = [unit for unit in plan.manifest.order if plan.opens(unit)]
    copies = {u: (n, H200.copy_s(n)) for u, n in enumerate(plan.unit_nbytes) if n}
    first = opened[0]
    spans = {u: sum(computes[u:v]) for u, v in itertools.pairwise([*opened, len(computes)])}
    spans[opened[-1]] += sum(computes[:first])
    found = corrected(planner, plan, Times(step_s=plan.step_s, host_s=plan.step_s, computes=spans, copies=copies))
    assert found.step_s == pytest.approx(plan.step_s, rel=0.02)
    assert found.compute_s == pytest.approx(sum(computes), rel=1e-6)


# -- output -------------------------------------------------------------------------------------------------------


def test_a_compressed_plan_is_printed_so() -> None:
    plan = plan_of(EIGHT, noise=0.004, device_budget=6 * GIB)
    summary = plan.summary()
    assert " decode buffer" in summary
    assert "(compressed without loss from 15.0GiB)" in summary
    text = str(plan)
    assert "weights: 9.1GiB compressed without loss from 13.0GiB; decoding takes 12.1 ms of a step's compute" in text


def test_a_model_that_fits_compressed_is_printed_so() -> None:
    plan = plan_of(EIGHT, device_budget=13 * GIB, on=machine(maps_host_memory=False))
    assert plan.offloaded_nbytes == 0
    assert plan.summary().startswith("everything fits: 12.")
    assert "(compressed without loss from 15.0GiB) resident + 336.0MiB decode buffer, nothing streams" in plan.summary()
