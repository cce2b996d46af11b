"""Placement: every budget of small models compared with brute force, the classic rules, and the predicted time."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import GRAIN, equal_plan, plan_of, unit_of

from repeats import examples
from weightstream.errors import PlanError
from weightstream.plan import candidates as choices
from weightstream.plan import cost, search
from weightstream.plan.check import prove
from weightstream.plan.manifest import Manifest, Profile, TensorSpec, UnitSpec
from weightstream.plan.plan import Plan
from weightstream.plan.search import candidates, map_to_host, place_homes, place_host_bytes, place_layers, place_within
from weightstream.plan.units import human
from weightstream.settings.config import PrefetchOffloadConfig, UVAOffloadConfig

# One grain takes a second on the link, and computing takes no time: the predicted time counts streamed bytes.
LINK_BOUND = Profile(link_bytes_per_s=GRAIN, copy_latency_s=0.0, overhead_s=0.0, device_bytes_per_s=1e30)


def tensor(name: str, nbytes: int, alias: str | None = None) -> TensorSpec:
    return TensorSpec(
        name=name, shape=(nbytes // 2,), stride=(1,), dtype="bfloat16", alias=alias or name, nbytes=nbytes
    )


def model(*blocks: Sequence[int], outer: Sequence[UnitSpec] = ()) -> Manifest:
    """Blocks with these tensor sizes, after units that are not blocks."""
    units = (*outer, *(unit_of(i, *sizes) for i, sizes in enumerate(blocks)))
    return Manifest(units=units, order=tuple(range(len(units))))


def grouped(size: int, num: int, step: int, **names: frozenset[str]) -> PrefetchOffloadConfig:
    return PrefetchOffloadConfig(offload_group_size=size, offload_num_in_group=num, offload_prefetch_step=step, **names)


def on_host(nbytes: int, **names: frozenset[str]) -> UVAOffloadConfig:
    return UVAOffloadConfig(cpu_offload_gb=nbytes / 2**30, **names)


def root(nbytes: int, *, enclosing: bool) -> UnitSpec:
    return UnitSpec(name="", enclosing=enclosing, tensors=(tensor("embed.weight", nbytes),))


def tied_model() -> Manifest:
    """Head and embedding are one alias group; so are the second tensors of blocks 0 and 1."""
    return Manifest(
        units=(
            UnitSpec(name="embed", tensors=(tensor("embed.weight", 2048),)),
            UnitSpec(name="b.0", layer=0, tensors=(tensor("b.0.up", 1024), tensor("b.0.tied", 512, "shared"))),
            UnitSpec(name="b.1", layer=1, tensors=(tensor("b.1.up", 1024), tensor("b.1.tied", 512, "shared"))),
            UnitSpec(name="head", tensors=(tensor("head.weight", 2048, "embed.weight"),)),
        ),
        order=(0, 1, 2, 3),
    )


def decoder(num_layers: int, hidden: int, inner: int, kv: int, vocab: int) -> Manifest:
    """The skeleton of a decoder in bfloat16: nine tensors per block."""
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }

    def weight(name: str, shape: tuple[int, ...]) -> TensorSpec:
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return TensorSpec(
            name=name, shape=shape, stride=stride, dtype="bfloat16", alias=name, nbytes=2 * math.prod(shape)
        )

    units = [UnitSpec(name="embed_tokens", tensors=(weight("embed_tokens.weight", (vocab, hidden)),))]
    for layer in range(num_layers):
        name = f"layers.{layer}"
        tensors = tuple(weight(f"{name}.{part}.weight", shape) for part, shape in shapes.items())
        units.append(UnitSpec(name=name, layer=layer, tensors=tensors))
    units.append(UnitSpec(name="lm_head", tensors=(weight("lm_head.weight", (vocab, hidden)),)))
    return Manifest(units=tuple(units), order=tuple(range(len(units))))


SMALL_MODELS = [
    *(model(*sizes) for n in (1, 2, 3) for sizes in itertools.product([(512,), (1024,), (1536, 512)], repeat=n)),
    *(model(*[sizes] * 3) for sizes in [(512, 512), (1536, 1024), (2560, 512)]),
    *(model(*[(1024, 512)] * 2, outer=[root(n, enclosing=e)]) for n in (512, 2048, 4096) for e in (True, False)),
    *(model(*[(1024,)] * n, outer=[root(512, enclosing=True)]) for n in (4, 5)),
    tied_model(),
    replace(model((512,), (1024,), (1536,)), order=(0, 1, 0, 2, 1)),
    replace(model((512,), (1024,), (1536,)), order=(0, 1)),
    replace(model((512,), (1024,)), order=()),
]
PROFILES = [Profile(), LINK_BOUND, replace(LINK_BOUND, overhead_s=2.0)]


def budgets(manifest: Manifest) -> range:
    return range(0, manifest.nbytes + 2 * GRAIN, GRAIN)


def placed(manifest: Manifest, profile: Profile) -> Iterator[Plan]:
    """The plans of every budget that has one, smallest budget first."""
    for budget in budgets(manifest):
        try:
            yield place_within(manifest, budget=budget, profile=profile)
        except PlanError:
            continue


def kept_anyway(manifest: Manifest) -> set[str]:
    """Tensors that must not stream: those of enclosing units, and those of 1/256 of the largest unit or less."""
    largest = max(unit.nbytes for unit in manifest.units)
    return {
        alias
        for alias, nbytes in manifest.aliases.items()
        if nbytes * 256 <= largest or any(u.enclosing for u in manifest.units if alias in u.aliases())
    }


def smallest_budget(manifest: Manifest) -> int:
    """The least device bytes of any choice of residents with a ring of one slot, or of all of them."""
    kept = kept_anyway(manifest)
    free = sorted(manifest.aliases.keys() - kept)
    least = manifest.nbytes
    for num in range(len(free)):
        for chosen in itertools.combinations(free, num):
            resident = kept.union(chosen)
            slot = max(
                sum(-(-n // GRAIN) * GRAIN for a, n in u.aliases().items() if a not in resident) for u in manifest.units
            )
            least = min(least, sum(manifest.aliases[a] for a in resident) + slot)
    return least


@pytest.mark.few(1)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_budget_of_small_models(profile: Profile) -> None:
    for manifest in SMALL_MODELS:
        for plan in placed(manifest, profile):
            assert plan.budget is not None
            assert plan.device_nbytes <= plan.budget
            assert plan.resident >= kept_anyway(manifest)
            assert plan.step_s == cost.simulated_s(plan, profile)[1]
            prove(plan)


def test_a_budget_is_refused_only_if_no_choice_fits() -> None:
    for manifest in SMALL_MODELS:
        assert len(manifest.aliases) <= 6
        least = smallest_budget(manifest)
        for budget in range(0, manifest.nbytes + GRAIN, GRAIN // 2):
            if budget < least:
                with pytest.raises(PlanError):
                    place_within(manifest, budget=budget)
            else:
                assert place_within(manifest, budget=budget).device_nbytes <= budget


def test_odd_sizes_are_refused_at_most_one_grain_per_resident_too_early() -> None:
    """Residents are counted at the alignment that an allocator gives them."""
    for sizes in itertools.product([(700,), (513, 511), (1024, 1)], repeat=3):
        manifest = model(*sizes, outer=[root(1000, enclosing=True)])
        least = smallest_budget(manifest)
        for budget in range(0, manifest.nbytes, 64):
            try:
                plan = place_within(manifest, budget=budget)
            except PlanError:
                assert budget < least + GRAIN * len(manifest.aliases)
                continue
            assert least <= plan.device_nbytes <= budget
            prove(plan)


def most_regained(plans: Iterable[Plan]) -> int:
    """How many more bytes a plan streams than the plan of some smaller budget."""
    least, regained = math.inf, 0
    for plan in plans:
        least = min(least, plan.step_nbytes)
        regained = max(regained, plan.step_nbytes - int(least))
    return regained


def test_streamed_bytes_do_not_rise_with_the_budget_if_only_they_count() -> None:
    for manifest in SMALL_MODELS:
        if manifest.order == tuple(range(len(manifest.units))):
            assert most_regained(placed(manifest, LINK_BOUND)) == 0


@pytest.mark.stress
@pytest.mark.parametrize(
    "shape",
    [(32, 4096, 14336, 1024, 128256), pytest.param((28, 1024, 3072, 1024, 151936), marks=pytest.mark.stress)],
)
def test_streamed_bytes_of_a_decoder_rise_by_less_than_a_block(shape: tuple[int, int, int, int, int]) -> None:
    """The slack: a larger budget may be used for a deeper ring, to stream a little more in less time."""
    manifest = decoder(*shape)
    block = max(unit.nbytes for unit in manifest.units if unit.layer is not None)
    budgets = [manifest.nbytes * i // 100 for i in range(30, 101)]
    for profile, slack in [(LINK_BOUND, 0), (replace(Profile(), overhead_s=0.0), block)]:
        plans = [place_within(manifest, budget=budget, profile=profile) for budget in budgets]
        assert most_regained(plans) <= slack
        assert plans[0].step_nbytes > 0.65 * manifest.nbytes > plans[-1].step_nbytes == 0


def test_residents_are_weights_that_the_step_reads() -> None:
    """A larger unit that no position reads stays on the host, and the ring holds both of those that are read."""
    manifest = replace(model((512,), (1024,), (1536,)), order=(0, 1))
    moved = {plan.budget: plan.step_nbytes for plan in placed(manifest, LINK_BOUND)}
    assert moved == {1536: 0, 2048: 0, 2560: 0, 3072: 0, 3584: 0}


def test_more_budget_predicts_no_slower_step_beyond_one_copy() -> None:
    """The plan of a smaller budget fits the larger one too. The search tries only a part of all plans, and may miss
    one tensor."""
    worse: list[str] = []
    manifests = [model(*[sizes] * n) for n in (4, 5) for sizes in [(1024, 512), (2048, 512), (1536, 1024)]]
    for manifest in manifests:
        for profile in (LINK_BOUND, *(replace(LINK_BOUND, overhead_s=float(s)) for s in (1, 2, 3))):
            for less, more in itertools.pairwise(placed(manifest, profile)):
                if more.step_s > less.step_s + max(manifest.aliases.values()) / GRAIN:
                    worse.append(
                        f"{len(manifest.units)} blocks of {manifest.units[0].nbytes}, compute {profile.overhead_s} s: "
                        f"budget {less.budget} -> {more.budget}, step {less.step_s} -> {more.step_s} s"
                    )
    assert not worse, f"{len(worse)} cases: " + "; ".join(worse[:6])


def block_nbytes(plan: Plan) -> list[int]:
    return [n for unit, n in zip(plan.manifest.units, plan.unit_nbytes, strict=True) if unit.layer is not None]


def test_blocks_stream_about_the_same_share() -> None:
    """No two blocks differ by more than the largest tensor."""
    uneven: list[str] = []
    for sizes in [(512,), (1024, 512), (2048, 1024, 512), (1536, 1024), (4096, 512)]:
        for num_blocks in (2, 3, 5, 8):
            for plan in placed(model(*[sizes] * num_blocks), LINK_BOUND):
                streamed = block_nbytes(plan)
                if max(streamed) - min(streamed) > max(sizes):
                    uneven.append(f"blocks of {sizes}, budget {plan.budget}: {streamed}")
    assert not uneven, f"{len(uneven)} cases: " + "; ".join(uneven[:4])


def test_a_partial_column_is_spread_over_the_depth() -> None:
    manifest = model(*[(1024,)] * 8)
    for plan in placed(manifest, LINK_BOUND):
        kept = [index for index, nbytes in enumerate(block_nbytes(plan)) if not nbytes]
        for half in (range(4), range(4, 8)):
            assert abs(len([k for k in kept if k in half]) * 2 - len(kept)) <= 1


def test_small_tensors_stay() -> None:
    """A norm of exactly 1/256 of the largest unit stays; a larger one is worth a copy."""
    block = 256 * 512
    plan = place_within(model(*[(block - 512, 512)] * 4), budget=block + 4 * 512, profile=LINK_BOUND)
    assert plan.resident == {f"blocks.{i}.1" for i in range(4)}
    larger = place_within(model(*[(block, 1024)] * 4), budget=block + 1024, profile=LINK_BOUND)
    assert larger.resident == frozenset()


def test_a_unit_that_is_small_as_a_whole_stays() -> None:
    """A final norm is small compared with the largest unit, not with its own."""
    norm = UnitSpec(name="norm", tensors=(tensor("norm.weight", 512),))
    plan = place_within(model((1 << 18,), (1 << 18,), outer=[norm]), budget=(1 << 18) + 512, profile=LINK_BOUND)
    assert plan.resident == {"norm.weight"}


def test_a_block_of_many_equal_tensors_can_stream() -> None:
    """128 experts of three matrices: each is below 1/256 of the block, together they are the block."""
    manifest = model(*[(3 << 20,) * 384] * 4)
    plan = place_within(manifest, budget=2 * manifest.units[0].nbytes)
    assert plan.step_nbytes >= manifest.nbytes // 2


def test_enclosing_units_stay_with_all_tied_weights() -> None:
    outer = UnitSpec(name="", enclosing=True, tensors=(tensor("embed.weight", 2048),))
    head = UnitSpec(name="head", tensors=(tensor("head.weight", 2048, "embed.weight"), tensor("head.bias", 512)))
    manifest = Manifest(units=(outer, unit_of(0, 1024), unit_of(1, 1024), head), order=(0, 1, 2, 3))
    plans = list(placed(manifest, LINK_BOUND))
    assert plans[0].device_nbytes == 2048 + 1024
    for plan in plans:
        assert "embed.weight" in plan.resident
        assert plan.unit_nbytes[0] == 0
        assert "embed.weight" not in plan.streamed(3)
        prove(plan)


def test_tied_weights_are_counted_once() -> None:
    manifest = tied_model()
    assert manifest.nbytes == 2048 + 2 * 1024 + 512
    for plan in placed(manifest, LINK_BOUND):
        assert plan.resident_nbytes == sum(manifest.aliases[a] for a in plan.resident)
        assert plan.host_nbytes == manifest.nbytes - plan.resident_nbytes
    everything = place_within(manifest, budget=manifest.nbytes)
    assert everything.device_nbytes == manifest.nbytes
    assert everything.step_nbytes == 0


@pytest.mark.parametrize("manifest", [SMALL_MODELS[0], tied_model(), model((700,), (1, 3)), Manifest(units=())])
def test_a_model_that_fits_does_not_stream(manifest: Manifest) -> None:
    for budget in (manifest.nbytes, manifest.nbytes + 1, 1 << 60, None):
        plan = place_within(manifest, budget=budget)
        assert plan.resident == manifest.aliases.keys()
        assert plan.ring_nbytes == plan.step_nbytes == plan.host_nbytes == 0
        assert plan.first == ()
        assert not any(plan.after)
        assert plan.device_nbytes == manifest.nbytes
        assert "everything fits" in plan.summary()
        prove(plan)


def test_a_refusal_prints_arithmetic_that_adds_up() -> None:
    for manifest in SMALL_MODELS:
        for budget in range(0, smallest_budget(manifest), GRAIN):
            with pytest.raises(PlanError) as error:
                place_within(manifest, budget=budget)
            text = str(error.value)
            kept = sum(manifest.aliases[a] for a in kept_anyway(manifest))
            total = [int(n) for n in re.findall(r"\((\d+) bytes\)", text)]
            assert total == [budget, smallest_budget(manifest)]
            assert f"{human(budget)} ({budget} bytes) < resident {human(kept)} + ring {human(total[1] - kept)}" in text
            assert f"= {human(total[1])} ({total[1]} bytes)" in text
            assert "Raise the budget" in text


def test_a_refusal_names_the_largest_unit() -> None:
    with pytest.raises(PlanError, match=r"the largest unit, 'blocks\.1'\. Raise the budget\.$"):
        place_within(model((512,), (2048,), (1024,)), budget=1024)
    with pytest.raises(PlanError, match=r"the largest unit, '\(root\)'\. "):
        place_within(model((512,), (512,), outer=[root(4096, enclosing=False)]), budget=1024)


def test_a_refusal_says_what_helps() -> None:
    """What takes most of the bytes; a smaller dtype where there is one; and what a few bytes were meant to be."""
    enclosed = model((512,), (512,), outer=[root(8192, enclosing=True)])
    with pytest.raises(
        PlanError, match=r"bytes\): 'embed.weight' must stay on the device, as .*\. Raise the budget\.$"
    ):
        place_within(enclosed, budget=1024)
    floats = tuple(
        replace(unit, tensors=tuple(replace(t, dtype="float32") for t in unit.tensors)) for unit in enclosed.units
    )
    with pytest.raises(PlanError, match=r"Raise the budget, or use bfloat16\.$"):
        place_within(Manifest(units=floats, order=enclosed.order), budget=1024)
    with pytest.raises(PlanError, match=r"6B \(6 bytes\) < .* Did you mean device_budget='6GiB'\?$"):
        place_within(enclosed, budget=6)


def test_the_budget_of_a_refusal_is_enough() -> None:
    manifest = decoder(32, 4096, 14336, 1024, 128256)
    with pytest.raises(PlanError) as error:
        place_within(manifest, budget=100 << 20)
    enough = int(re.findall(r"\((\d+) bytes\)", str(error.value))[1])
    prove(place_within(manifest, budget=enough))
    with pytest.raises(PlanError):
        place_within(manifest, budget=enough - GRAIN)


@pytest.mark.parametrize(
    ("group_size", "num_in_group", "layers"),
    [
        (8, 2, [6, 7, 14, 15, 22, 23]),
        (1, 1, list(range(24))),
        (4, 1, [3, 7, 11, 15, 19, 23]),
        (4, 4, list(range(24))),
        (5, 2, [3, 4, 8, 9, 13, 14, 18, 19, 23]),
        (30, 2, []),
        (24, 1, [23]),
    ],
)
@pytest.mark.parametrize("prefetch_step", [1, 2, 3, 5])
def test_the_classic_rule(group_size: int, num_in_group: int, layers: list[int], prefetch_step: int) -> None:
    manifest = model(*[(1024, 512)] * 24, outer=[root(2048, enclosing=False)])
    plan = place_layers(manifest, grouped(group_size, num_in_group, prefetch_step))
    streaming = [manifest.units[u].layer for u in range(len(manifest.units)) if plan.streams(u)]
    assert streaming == layers
    assert plan.ring_nbytes == min(prefetch_step, len(layers)) * 1536
    assert plan.host_nbytes == len(layers) * 1536
    assert plan.budget is None
    assert plan.step_s == cost.simulated_s(plan, Profile())[1]
    prove(plan)


def test_the_classic_rule_does_not_move_ineligible_tensors() -> None:
    manifest = model(*[(1024, 512)] * 4)
    plan = place_layers(manifest, grouped(2, 1, 1, offload_params=frozenset({"1.1", "3.1"})))
    assert plan.manifest.aliases.keys() - plan.resident == {"blocks.1.1", "blocks.3.1"}
    assert plan.unit_nbytes == (0, 512, 0, 512)
    assert plan.ring_nbytes == 512
    prove(plan)


def test_the_classic_rule_without_an_eligible_tensor_streams_nothing() -> None:
    plan = place_layers(model((512,)), grouped(1, 1, 1, offload_params=frozenset({"other"})))
    assert plan.step_nbytes == plan.ring_nbytes == 0


def test_the_classic_rule_keeps_weights_shared_by_an_enclosing_unit_and_a_layer() -> None:
    tied = UnitSpec(
        name="blocks.1", layer=1, tensors=(tensor("blocks.1.w", 512), tensor("blocks.1.tied", 1024, "embed.weight"))
    )
    manifest = Manifest(units=(root(1024, enclosing=True), unit_of(0, 512), tied), order=(0, 1, 2))
    plan = place_layers(manifest, grouped(1, 1, 1))
    prove(plan)
    assert plan.manifest.aliases.keys() - plan.resident == {"blocks.0.0", "blocks.1.w"}


def test_host_bytes_take_tensors_in_order() -> None:
    manifest = model((1024, 512), (1024, 512), (1024, 512))
    in_order = [t for unit in manifest.units for t in unit.tensors]
    for asked in range(0, manifest.nbytes + GRAIN, 256):
        plan = place_host_bytes(manifest, on_host(asked), zero_copy=False)
        gone = manifest.aliases.keys() - plan.resident
        assert gone == {t.alias for t in in_order[: len(gone)]}
        assert plan.host_nbytes >= min(asked, manifest.nbytes)
        if gone:
            assert plan.host_nbytes - in_order[len(gone) - 1].nbytes < asked
        prove(plan)


def test_host_bytes_skip_ineligible_tensors_and_count_ties_once() -> None:
    manifest = model((1024, 512), (1024, 512))
    plan = place_host_bytes(manifest, on_host(1000, cpu_offload_params=frozenset({"0.1", "1.1"})), zero_copy=False)
    assert manifest.aliases.keys() - plan.resident == {"blocks.0.1", "blocks.1.1"}
    tied = place_host_bytes(tied_model(), on_host(2048 + 1024 + 512), zero_copy=False)
    assert tied_model().aliases.keys() - tied.resident == {"embed.weight", "b.0.up", "shared"}
    assert tied.host_nbytes == 2048 + 1024 + 512
    prove(tied)


def test_host_bytes_are_not_spent_on_enclosing_units() -> None:
    manifest = model((1024,), (1024,), (1024,), outer=[root(2048, enclosing=True)])
    for asked in (512, 1024, 2048, 3072):
        plan = place_host_bytes(manifest, on_host(asked), zero_copy=False)
        prove(plan)
        assert plan.host_nbytes >= asked, f"asked for {asked} bytes on the host, {plan.host_nbytes} are"


def profiles_of(num_units: int) -> st.SearchStrategy[Profile]:
    """Whole seconds, so that sums are exact."""
    seconds = st.integers(0, 9).map(float)
    return st.builds(
        Profile,
        link_bytes_per_s=st.sampled_from([1.0 * GRAIN, 0.25 * GRAIN]),
        copy_latency_s=st.sampled_from([0.0, 1.0]),
        compute_lost=st.sampled_from([0.0, 0.5]),
        overhead_s=st.sampled_from([0.0, 2.0]),
        unit_s=st.tuples(*[seconds] * num_units),
        host_s=st.one_of(st.just(()), st.tuples(*[seconds] * num_units)),
        host_share=st.sampled_from([0.25, 0.95]),
    )


def lower_bound_s(plan: Plan, profile: Profile) -> float:
    """No schedule of these homes is faster: max(compute, copies, reads)."""
    return max(cost.compute_s(plan, profile), cost.copy_s(plan, profile), cost.disk_s(plan, profile))


def closed_form_s(plan: Plan, profile: Profile) -> float:
    """The lower bound plus the copies that nothing can hide: those whose unit follows the release that they wait
    for."""
    exposed = 0.0
    computes, order = cost.unit_s(plan, profile), plan.manifest.order
    for position, fills in enumerate(plan.after):
        following = order[(position + 1) % len(order)]
        if following in fills:
            exposed += min(profile.copy_s(plan.unit_nbytes[following]), computes[order[position]])
    return lower_bound_s(plan, profile) + exposed


@examples(150)
@given(data=st.data())
def test_the_simulation_lies_between_the_lower_bound_and_the_serial_time(data: st.DataObject) -> None:
    grains = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    order = data.draw(
        st.one_of(st.just(range(len(grains))), st.lists(st.integers(0, len(grains) - 1), min_size=1, max_size=16))
    )
    capacity = data.draw(st.integers(max(grains), sum(grains) + 1)) * GRAIN
    plan = plan_of([g * GRAIN for g in grains], order, capacity)
    profile = data.draw(profiles_of(len(grains)))
    predicted = cost.simulated_s(plan, profile)[1]
    assert lower_bound_s(plan, profile) <= closed_form_s(plan, profile)
    assert lower_bound_s(plan, profile) <= predicted
    assert predicted <= cost.compute_s(plan, profile) + cost.copy_s(plan, profile)


@pytest.mark.parametrize("num_units", range(1, 11))
def test_the_closed_form_of_equal_blocks(num_units: int) -> None:
    """Exact up to half the blocks, when the slots divide the blocks, and when nothing streams; never above the
    simulation, and below it by at most half a slot's wait for each slot beyond half the blocks."""
    for num_slots in range(1, num_units + 2):
        plan = equal_plan(num_units, num_slots)
        beyond = 2 * num_slots - num_units
        exact = beyond <= 0 or num_units % num_slots == 0 or num_slots >= num_units
        for compute, copy in itertools.product([1.0, 2.0, 3.0, 5.0, 8.0], repeat=2):
            profile = Profile(
                link_bytes_per_s=GRAIN / copy, copy_latency_s=0.0, overhead_s=compute, device_bytes_per_s=1e30
            )
            gap = cost.simulated_s(plan, profile)[1] - closed_form_s(plan, profile)
            assert 0 <= gap <= (0 if exact else math.ceil(beyond / 2) * min(compute, copy))


def test_two_slots_hide_the_smaller_of_compute_and_copies_and_one_slot_hides_nothing() -> None:
    for compute, copy in [(1.0, 4.0), (4.0, 1.0), (2.0, 2.0)]:
        profile = Profile(
            link_bytes_per_s=GRAIN / copy, copy_latency_s=0.0, overhead_s=compute, device_bytes_per_s=1e30
        )
        assert cost.simulated_s(equal_plan(6, 2), profile)[1] == 6 * max(compute, copy)
        assert cost.simulated_s(equal_plan(6, 1), profile)[1] == 6 * (compute + copy)
        assert cost.simulated_s(equal_plan(6, 6), profile)[1] == 6 * compute
        shared = replace(profile, compute_lost=0.5)
        step_s = 6 * max(compute + 0.5 * copy, copy)
        assert cost.simulated_s(equal_plan(6, 2), shared)[1] == pytest.approx(step_s), "copies take from compute"
        assert cost.simulated_s(equal_plan(6, 1), shared)[1] == 6 * (compute + copy), "nothing runs during a copy"
        assert cost.simulated_s(equal_plan(6, 6), shared)[1] == 6 * compute
        assert cost.copy_s(equal_plan(6, 6), profile) == 0


def test_the_host_runs_ahead_of_the_device() -> None:
    """The host's time for a unit is hidden by compute of earlier units, and a step takes at least all launches."""
    manifest = model((GRAIN,), (GRAIN,))
    plan = place_within(manifest, budget=None)
    fast = Profile(overhead_s=0.0)
    for unit_s, host_s, step_s in (
        ((8.0, 1.0), (1.0, 5.0), 9.0),
        ((1.0, 1.0), (4.0, 3.0), 7.0),
        ((8.0, 1.0), (5.0, 5.0), 10.0),
        ((2.0, 2.0), (), 4.0),
    ):
        profile = replace(fast, unit_s=unit_s, host_s=host_s)
        assert cost.simulated_s(plan, profile)[1] == pytest.approx(step_s)
        assert cost.compute_s(plan, profile) == step_s
    opened = plan_of([GRAIN, GRAIN], (0, 1), GRAIN)
    profile = replace(fast, unit_s=(0.0, 0.0), host_s=(1.0, 1.0), overhead_s=2.0, link_bytes_per_s=1e30)
    assert cost.simulated_s(opened, profile)[1] == pytest.approx(6.0)
    on_cpu = replace(profile, host_s=())
    assert cost.compute_s(opened, on_cpu) == 4.0
    coded = manifest.coded({next(iter(manifest.aliases)): (3, GRAIN // 2)})
    profile = replace(fast, unit_s=(0.0, 0.0), host_s=(1.0, 0.0), overhead_s=50.0, fill_s=30.0, show_s=5.0)
    decoded = Plan.build(coded, frozenset(coded.aliases), 0)
    profile = replace(profile, decoding_launch_s=12.0)
    assert cost.simulated_s(decoded, profile)[1] == pytest.approx(1 + 50 - 30 + 5 + 12)


def test_a_late_host_delays_the_copies_after_it() -> None:
    """With one slot, each copy waits for the release before it, which the host has not reached."""
    profile = Profile(
        link_bytes_per_s=GRAIN, copy_latency_s=0.0, overhead_s=0.0, unit_s=(0.0,) * 4, host_s=(3.0, 0.0, 0.0, 0.0)
    )
    in_turn = replace(profile, host_s=(0.0,) * 4)
    assert cost.simulated_s(equal_plan(4, 1), in_turn)[1] == 4.0
    late = [cost.simulated_s(equal_plan(4, 1), replace(profile, host_s=(s, 0.0, 0.0, 0.0)))[1] for s in (3.0, 5.0)]
    assert late == [4.0, 5.0]


@examples(200)
@given(data=st.data())
def test_no_plan_takes_less_than_its_candidates_bound(data: st.DataObject) -> None:
    """Otherwise a search would skip it."""
    sizes = data.draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=6))
    manifest = model(*[[s * GRAIN for s in unit] for unit in sizes])
    profile = data.draw(profiles_of(len(sizes)))
    budget = data.draw(st.integers(1, 1 + manifest.nbytes // GRAIN)) * GRAIN
    try:
        found = list(candidates(manifest, budget, profile))
    except PlanError:
        return
    for candidate in found:
        assert candidate.bound_s <= candidate.plan().step_s + 1e-9


def test_with_the_host_as_bottleneck_the_device_still_counts() -> None:
    """Rings of any depth have the same predicted time. If the host is quicker than predicted, the shallowest would
    wait."""
    manifest = model(*[(GRAIN,) * 4] * 8)
    copies = Profile(copy_latency_s=0.0, link_bytes_per_s=GRAIN, overhead_s=0.5, unit_s=(2.0,) * 8, host_s=(9.0,) * 8)
    chosen = place_within(manifest, budget=16 * GRAIN, profile=copies)
    careless = place_within(manifest, budget=16 * GRAIN, profile=replace(copies, host_share=1.0))
    assert chosen.step_s == careless.step_s == cost.host_s(chosen, copies), "the reported time is the predicted one"
    assert careless.ring_nbytes < chosen.ring_nbytes
    on_device = [cost.simulated_s(plan, copies)[0] for plan in (chosen, careless)]
    assert on_device[0] < 0.9 * on_device[1]
    no_host = replace(copies, host_s=(0.0,) * 8, overhead_s=0.0)
    assert on_device == [cost.simulated_s(plan, no_host)[1] for plan in (chosen, careless)]


def test_measured_seconds_replace_the_estimate_and_small_units_pay_their_overhead() -> None:
    small, large = model((1,), (10**9,)).units
    assert Profile(unit_s=(3.0, 4.0)).times_s(1, large) == (4.0, 0.0)
    assert Profile(overhead_s=0.25).times_s(0, small) == (0.25, 0.0)
    assert Profile(overhead_s=0.25, launch_s=0.5).times_s(0, small) == (0.75, 0.0)
    assert Profile(device_bytes_per_s=1e9).times_s(0, large) == (1.0, 0.0)
    assert Profile(copy_latency_s=0.5, link_bytes_per_s=100.0).copy_s(100) == 1.5
    assert Profile(copy_latency_s=0.5).copy_s(0) == 0.0


@lru_cache(maxsize=1)
def decoder_100b() -> Manifest:
    return decoder(96, 9216, 32256, 1152, 128256)


@lru_cache(maxsize=1)
def decoder_405b() -> Manifest:
    return decoder(126, 16384, 53248, 1024, 128256)


@pytest.mark.few(2)
@pytest.mark.parametrize(("skeleton", "num_billion"), [(decoder_100b, 100), (decoder_405b, 400)], ids=["100B", "405B"])
@pytest.mark.parametrize("share", [0.05, 0.33, 0.9])
def test_a_huge_model_is_planned_in_a_second(skeleton: Callable[[], Manifest], num_billion: int, share: float) -> None:
    manifest = skeleton()
    assert manifest.nbytes >= num_billion * 2e9
    budget = int(manifest.nbytes * share)
    started = time.process_time()
    plan = place_within(manifest, budget=budget)
    prove(plan)
    assert time.process_time() - started < 1.0
    assert plan.device_nbytes <= budget
    assert plan.step_nbytes == plan.host_nbytes
    assert plan.host_nbytes - (manifest.nbytes - budget) <= 4 * max(u.nbytes for u in manifest.units)


# -- homes within a host budget ----------------------------------------------------------------------------------------

REMEDY = "Do something about it."


@st.composite
def unplaced(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[Plan, Profile]:
    """Plans of odd models: with ties, units read twice or never, some weights resident, and some read in place."""
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=9))
    groups = {f"group {i}": nbytes for i, nbytes in enumerate(sizes)}
    units = tuple(
        UnitSpec(
            name=f"unit {index}",
            layer=draw(st.none() | st.just(index)),
            tensors=tuple(
                tensor(f"unit {index}.{alias}", groups[alias], alias)
                for alias in draw(st.lists(st.sampled_from(sorted(groups)), max_size=4, unique=True))
            ),
        )
        for index in range(draw(st.integers(1, 6)))
    )
    manifest = Manifest(units=units, order=tuple(draw(st.lists(st.integers(0, len(units) - 1), max_size=9))))
    aliases = st.sampled_from(sorted(manifest.aliases) or ["none"])
    mapped = frozenset(draw(st.sets(aliases, max_size=2))) & manifest.aliases.keys()
    rest = manifest.without(mapped)
    resident = frozenset(draw(st.sets(aliases, max_size=3))) & rest.aliases.keys()
    slots = [sum(-(-n // GRAIN) * GRAIN for a, n in u.aliases().items() if a not in resident) for u in rest.units]
    plan = Plan.build(rest, resident, max(slots) + draw(st.integers(0, 6)) * GRAIN)
    profile = replace(draw(profiles_of(len(units))), disk_bytes_per_s=draw(st.sampled_from([0.125, 1.0, 8.0])) * GRAIN)
    plan = replace(plan, step_s=search.searched_s(plan, profile))
    return map_to_host(plan, manifest, 0, profile), profile


@pytest.mark.stress
@examples(150)
@given(drawn=unplaced())
def test_a_host_that_is_never_late_costs_no_time(drawn: tuple[Plan, Profile]) -> None:
    alone_s, step_s = cost.simulated_s(*drawn)
    with_host, without = (
        cost._simulated(*drawn, cost.times_s(*drawn), has_host=has_host).step_s for has_host in (True, False)
    )
    assert (step_s, alone_s) == (with_host, without)
    assert alone_s <= step_s
    assert alone_s == step_s or drawn[1].host_s


@examples(200)
@given(drawn=unplaced(), data=st.data())
def test_homes_keep_the_host_budget_or_are_refused(drawn: tuple[Plan, Profile], data: st.DataObject) -> None:
    plan, profile = drawn
    aliases = plan.manifest.aliases
    movable = frozenset(data.draw(st.sets(st.sampled_from(sorted(aliases) or ["none"]))) | {"not in the plan"})
    budget = data.draw(st.integers(0, plan.offloaded_nbytes + 10))
    stuck = sum(n for a, n in aliases.items() if a not in plan.resident and (a not in movable or a in plan.mapped))
    if budget < min(stuck, plan.offloaded_nbytes):
        with pytest.raises(PlanError) as refused:
            place_homes(plan, host_budget=budget, movable=movable, remedy=REMEDY, profile=profile)
        numbers = [int(n) for n in re.findall(r"\((\d+) bytes\)", str(refused.value))]
        assert numbers == [budget, stuck]
        for part in (f"host budget {human(budget)}", f"of {human(plan.offloaded_nbytes)} outside", REMEDY):
            assert part in str(refused.value)
        return
    placed = place_homes(plan, host_budget=budget, movable=movable, remedy=REMEDY, profile=profile)
    prove(placed)
    assert placed.host_nbytes <= budget
    assert placed.disk <= movable - plan.resident - plan.mapped
    assert placed.disk <= aliases.keys()
    assert replace(placed, disk=frozenset(), step_s=plan.step_s, disk_s=plan.disk_s) == plan
    assert all(placed.host_nbytes + aliases[a] > budget for a in placed.disk if aliases[a]), "it would have fitted"
    if budget >= plan.offloaded_nbytes:
        assert placed is plan
    assert placed.disk_nbytes + placed.host_nbytes == plan.offloaded_nbytes
    assert placed.step_s >= plan.step_s
    assert placed.step_s >= cost.disk_s(placed, profile) - 1e-9
    assert placed.step_s <= plan.step_s + cost.disk_s(placed, profile) + cost.copy_s(placed, profile) + 1e-9
    order = data.draw(st.permutations(plan.manifest.order))
    again = placed.reordered(tuple(order))
    assert (again.disk, again.resident, again.mapped) == (placed.disk, placed.resident, placed.mapped)
    assert Plan.from_json(placed.to_json()) == placed


@pytest.mark.parametrize("sizes", [(512,), (1024, 512), (2048, 1024, 512), (1536, 1024), (4096, 512)])
@pytest.mark.parametrize("num_blocks", [2, 3, 5, 8])
def test_equal_blocks_read_about_the_same_share_from_disk(sizes: tuple[int, ...], num_blocks: int) -> None:
    """No two blocks differ by more than the largest tensor, and none is far from its share."""
    manifest = model(*[sizes] * num_blocks)
    plan = Plan.build(manifest, frozenset(), 2 * manifest.units[0].nbytes)
    movable = frozenset(manifest.aliases)
    for budget in range(0, manifest.nbytes + GRAIN, GRAIN):
        placed = place_homes(plan, host_budget=budget, movable=movable, remedy=REMEDY)
        read = placed.unit_disk_nbytes
        assert max(read) - min(read) <= max(sizes), f"budget {budget}: {read}"
        assert max(read) <= placed.disk_nbytes / num_blocks + max(sizes)


def test_a_decoder_on_disk_is_read_evenly_at_the_rate_of_the_disk() -> None:
    manifest = decoder(32, 4096, 14336, 1024, 128256)
    plan = place_within(manifest, budget=manifest.nbytes // 5)
    profile = Profile(disk_bytes_per_s=2e9)
    placed = place_homes(
        plan, host_budget=manifest.nbytes // 4, movable=frozenset(manifest.aliases), remedy=REMEDY, profile=profile
    )
    read = [n for unit, n in zip(manifest.units, placed.unit_disk_nbytes, strict=True) if unit.layer is not None]
    assert max(read) - min(read) <= 2 * 4096 * 14336
    assert 0.999999 * placed.disk_nbytes / 2e9 <= placed.step_s <= 1.15 * placed.disk_nbytes / 2e9
    assert manifest.nbytes // 4 - placed.host_nbytes < min(manifest.aliases[a] for a in placed.disk)


@pytest.mark.stress
@examples(200)
@given(drawn=unplaced(), data=st.data())
def test_with_a_disk_the_simulation_lies_between_its_bounds(drawn: tuple[Plan, Profile], data: st.DataObject) -> None:
    plan, profile = drawn
    free = sorted(plan.manifest.aliases.keys() - plan.resident - plan.mapped)
    placed = replace(plan, disk=frozenset(data.draw(st.sets(st.sampled_from(free)))) if free else frozenset())
    predicted = cost.simulated_s(placed, profile)[1]
    assert lower_bound_s(placed, profile) <= predicted
    assert lower_bound_s(placed, profile) <= closed_form_s(placed, profile)
    most = cost.compute_s(placed, profile) + cost.copy_s(placed, profile) + cost.disk_s(placed, profile)
    assert predicted <= most


def test_a_disk_sets_the_pace_only_if_it_is_slower_than_the_link() -> None:
    plan = replace(equal_plan(6, 2), disk=frozenset(f"blocks.{i}.0" for i in range(6)))
    for disk, wanted in [(GRAIN / 4, 24.0), (GRAIN * 1000.0, 6.0)]:
        profile = replace(LINK_BOUND, disk_bytes_per_s=disk)
        assert cost.simulated_s(plan, profile)[1] == pytest.approx(wanted, rel=0.01)
    assert cost.disk_s(plan, replace(LINK_BOUND, disk_bytes_per_s=GRAIN / 4)) == 24.0
    assert cost.disk_s(equal_plan(6, 2), LINK_BOUND) == 0.0


def test_a_unit_without_a_position_may_be_the_largest() -> None:
    manifest = Manifest(
        units=tuple(unit_of(i, n * GRAIN) for i, n in enumerate([10] * 6 + [26])), order=tuple(range(6))
    )
    for budget in range(26, 80):
        plan = place_within(manifest, budget=budget * GRAIN)
        assert plan.device_nbytes <= budget * GRAIN
        prove(plan)


def test_uneven_units_use_the_two_ends_of_the_ring() -> None:
    """The largest matrix of a layer has as many bytes as all others together. While one is used, the next is copied.
    A ring
    that is filled in order has no place for it."""
    sizes = (2, 1, 9, 4) * 6
    manifest = Manifest(units=tuple(unit_of(i, n * GRAIN) for i, n in enumerate(sizes)), order=tuple(range(24)))
    profile = replace(LINK_BOUND, overhead_s=0.9)  # of work per unit, and a second per grain that is copied
    ring = 13 * GRAIN
    found = place_within(manifest, budget=ring, profile=profile)
    assert (found.by_ends, found.ring_nbytes) == (True, ring)
    in_order = cost.simulated_s(Plan.build(manifest, found.resident, ring), profile)[1]
    assert found.step_s < in_order - 2
    assert found.step_s < sum(sizes) + 2
    assert found.reordered(tuple(reversed(manifest.order))).by_ends
    assert Plan.from_json(found.to_json()) == found


def test_streamed_bytes_follow_uneven_compute_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one half compute twice as long as those of the other, and all of compute takes as long as all
    copies.

    The same columns of every block would make compute wait in one half, and copies in the other.
    """
    blocks = model(*[[GRAIN] * 4 for _ in range(80)])
    profile = replace(LINK_BOUND, unit_s=(2.0,) * 40 + (4.0,) * 40)
    budget = 80 * GRAIN + 8 * GRAIN  # a quarter stays, besides a ring of two blocks
    plan = place_within(blocks, budget=budget, profile=profile)
    assert plan.device_nbytes <= budget
    prove(plan)
    assert plan.step_s == pytest.approx(plan.compute_s) == 240
    monkeypatch.setattr(choices, "_in_step", lambda *_: iter(()))
    assert place_within(blocks, budget=budget, profile=profile).step_s > 1.1 * plan.step_s


def test_a_share_has_the_plan_that_it_was_made_for() -> None:
    """A shared ring is as large as the plan of one model needs, which may not be a multiple of its largest unit."""
    blocks = model(*[[2 * GRAIN, 5 * GRAIN, 5 * GRAIN, 2 * GRAIN]] * 20, *[[3 * GRAIN, 4 * GRAIN, GRAIN]] * 20)
    profile = replace(LINK_BOUND, unit_s=(6.6,) * 20 + (11.0,) * 20)
    budget = 152 * GRAIN
    alone = place_within(blocks, budget=budget, profile=profile)
    share = choices.Share(choices.aligned_nbytes(blocks, alone.resident), alone.ring_nbytes)
    shared = search.search(search.candidates(blocks, budget, profile, share))
    assert shared is not None
    assert shared.ring_nbytes <= share.ring_nbytes
    assert shared.step_s == pytest.approx(alone.step_s)
