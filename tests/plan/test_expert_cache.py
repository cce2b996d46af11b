"""Plans with caches of experts: the possible numbers of slots, the hit rate, and when a cache is worth it at all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from test_planner import H200, Machine, machine, weight

from weightstream.plan import expert_cache
from weightstream.plan.check import prove, violations
from weightstream.plan.correction import Times, corrected
from weightstream.plan.expert_cache import Cached, Counts
from weightstream.plan.hit_curves import curve_of
from weightstream.plan.manifest import Manifest, Op, TensorSpec, UnitSpec, Workload
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Demand, Planner, Weights
from weightstream.plan.planner_inputs import moved_nbytes
from weightstream.runtime.experts.slot_cache import Lru
from weightstream.settings.config import OffloadConfig

NUM_ROWS, NUM_PICKED, NUM_LAYERS = 128, 8, 6
HIDDEN, INNER = 2048, 768
ROW_NBYTES = 2 * 3 * HIDDEN * INNER
SHARE = 0.7
QWEN3 = curve_of(NUM_ROWS, NUM_PICKED)


def mixture(picks: bool = True, num_rows: int = NUM_ROWS) -> Manifest:
    """Layers of an attention and experts, each a unit, whose stacks are nearly all of the bytes, and a head."""
    units = []
    for layer in range(NUM_LAYERS):
        stacks = [weight(f"{layer}.up", num_rows, 2 * INNER, HIDDEN), weight(f"{layer}.down", num_rows, HIDDEN, INNER)]
        units.append(UnitSpec(name=f"{layer}/q", tensors=(weight(f"{layer}.q", 4096, HIDDEN),), layer=layer))
        named = frozenset(t.alias for t in stacks) if picks else frozenset[str]()
        units.append(UnitSpec(name=f"{layer}/experts", tensors=tuple(stacks), layer=layer, stacks=named))
    units.append(UnitSpec(name="head", tensors=(weight("head", 32768, HIDDEN),)))
    return Manifest(units=tuple(units), order=tuple(range(len(units))))


MIXTURE = mixture()
STACKS = frozenset(t.alias for t in MIXTURE.tensors() if len(t.shape) == 3)
STACKS_NBYTES = sum(MIXTURE.aliases[alias] for alias in STACKS)
REST_NBYTES = MIXTURE.nbytes - STACKS_NBYTES
BUFFER_NBYTES = ROW_NBYTES * NUM_ROWS
IN_GRAPHS = machine(profile=H200.without_host())


def ops_of(unit: UnitSpec, picked: int) -> tuple[Op, ...]:
    """The work of experts: a copy of the picked rows, and a product with them."""

    def op(tensor: TensorSpec) -> tuple[Op, ...]:
        if len(tensor.shape) == 2:
            return (Op(rate="half", flops=float(tensor.nbytes), nbytes=tensor.nbytes),)
        nbytes = tensor.nbytes * picked // tensor.shape[0]
        copy = Op(nbytes=2 * nbytes, picked=picked / tensor.shape[0])
        return copy, Op(rate="half", flops=float(nbytes), nbytes=nbytes)

    return tuple(found for tensor in unit.tensors for found in op(tensor))


def planner_of(
    budget: int,
    manifest: Manifest = MIXTURE,
    *,
    on: Machine | None = None,
    workload: Workload = Workload(),  # noqa: B008
    has_work: bool = True,
    **settings: Any,
) -> Planner:
    settings |= {} if "offload_backend" in settings else {"device_budget": budget}
    picked = NUM_PICKED * workload.batch * workload.tokens
    work = {unit.name: ops_of(unit, picked) for unit in manifest.units} if has_work else {}
    sizes = {alias: int(nbytes * SHARE) // 512 * 512 for alias, nbytes in manifest.aliases.items()}
    names = {alias: (alias,) for alias in manifest.aliases}
    return Planner(
        config=OffloadConfig.from_kwargs(**settings),
        machine=on or machine(),
        weights=Weights(names=names, movable=frozenset(names), codes=sizes),
        demand=Demand(workload=workload, work=work),
    )


def ways(budget: int, manifest: Manifest = MIXTURE, **more: Any) -> list[Cached]:
    planner = planner_of(budget, manifest, **more)
    profile, workload = planner.profile(manifest), planner.demand.workload
    return list(expert_cache.caches(manifest, planner.weights.codes, profile, budget, workload))


def is_coded(cached: Cached) -> bool:
    """Whether all of them are compressed. It must be all or none."""
    assert cached.coded.keys() in (set(), cached.sizes.keys())
    return bool(cached.coded)


# -- numbers of slots --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [8, 10, 20, 40, 60])
def test_slots_use_the_available_memory(percent: int) -> None:
    budget = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES * percent // 100
    found = ways(budget)
    assert [is_coded(cached) for cached in found] == [False, True]
    for cached in found:
        assert cached.sizes.keys() == STACKS
        assert cached.buffer_nbytes == BUFFER_NBYTES
        assert cached.slots_nbytes % cached.num_slots == 0
        assert NUM_PICKED <= cached.num_slots < NUM_ROWS
        per_slot = cached.slots_nbytes // cached.num_slots
        assert cached.nbytes + REST_NBYTES <= budget < cached.nbytes + REST_NBYTES + per_slot
        of_plain = SHARE if is_coded(cached) else 1.0
        assert 1 <= per_slot / (NUM_LAYERS * ROW_NBYTES * of_plain) < 1.03
    assert found[0].num_slots < found[1].num_slots


@pytest.mark.parametrize("more", [0, 1, 777])
@pytest.mark.parametrize("waves", [1, 100 << 20])
def test_slots_start_at_an_aligned_address(more: int, waves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the buffer for waves, whatever the budget: rows are viewed in their dtype, and fetched by words."""
    monkeypatch.setattr(expert_cache, "_WAVES_NBYTES", waves + more)
    units = tuple(replace(unit, in_waves=bool(unit.stacks)) for unit in MIXTURE.units)
    manifest = replace(MIXTURE, units=units)
    plan = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4 + more, codec="none")(manifest)
    assert 0 < plan.shared_nbytes < plan.buffer_nbytes
    assert plan.own_buffer_nbytes % 512 == 0
    prove(plan)
    wrong = replace(plan, shared_nbytes=plan.shared_nbytes + 2)
    assert list(violations(wrong)) == [
        f"slots start at byte {wrong.own_buffer_nbytes} of the buffer, which is not aligned"
    ]


def test_the_buffer_starts_at_an_aligned_address() -> None:
    """After the slots, as kernels that take ids see slots and what follows as a whole stack."""
    plan = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4, codec="none")(MIXTURE)
    assert plan.shared_nbytes == 0 < plan.slots_nbytes
    prove(plan)
    wrong = replace(plan, slots_nbytes=plan.slots_nbytes - 8)
    assert list(violations(wrong)) == [
        f"the buffer starts after {wrong.slots_nbytes} bytes of slots, which is not aligned"
    ]


def test_caches_for_kernels_that_take_ids() -> None:
    """Their rows are not compressed, and none is prefetched. For more ids than rows there is no cache."""
    units = tuple(replace(unit, ids_per_token=NUM_PICKED * bool(unit.stacks)) for unit in MIXTURE.units)
    manifest, most = replace(MIXTURE, units=units), NUM_ROWS // NUM_PICKED
    budget = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4
    (cached,) = ways(budget, manifest)
    assert (is_coded(cached), cached.ahead, cached.buffer_nbytes) == (False, 0, BUFFER_NBYTES)
    assert cached == ways(budget)[0]._replace(ahead=0)
    assert ways(budget, manifest, workload=Workload(batch=most)) == [cached]
    assert ways(budget, manifest, workload=Workload(batch=most + 1)) == []
    assert ways(budget, workload=Workload(batch=most + 1)) != [], "other forwards read rows in waves"


def test_slots_hold_at_least_the_picks_of_a_step() -> None:
    """With a smaller budget other weights stream instead."""
    least = BUFFER_NBYTES + NUM_PICKED * NUM_LAYERS * (ROW_NBYTES + 2048)
    plain, *_ = ways(least + 2048 * NUM_LAYERS * NUM_PICKED)
    assert (is_coded(plain), plain.num_slots) == (False, NUM_PICKED)
    assert all(map(is_coded, ways(least - NUM_LAYERS * ROW_NBYTES)))
    assert ways(BUFFER_NBYTES) == []


def test_with_a_slot_for_every_row_there_is_no_cache() -> None:
    room = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES * 72 // 100
    assert [is_coded(cached) for cached in ways(room)] == [False], "all fit compressed"
    assert ways(MIXTURE.nbytes + BUFFER_NBYTES + STACKS_NBYTES // 50) == []


def test_a_batch_has_the_same_slots() -> None:
    """Its rows use them in waves. If it picks nearly all rows, there is no cache."""
    budget = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES * 23 // 100
    alone, four, most = (ways(budget, workload=Workload(batch=batch)) for batch in (1, 4, 32))
    alone, four, most = ([cached._replace(ahead=0) for cached in found] for found in (alone, four, most))
    assert alone == four == most
    assert ways(budget, workload=Workload(batch=33)) == []


@pytest.mark.parametrize(("batch", "percent", "waves"), [(1, 23, 1), (4, 23, 2), (8, 23, 3), (32, 23, 5), (32, 40, 3)])
def test_a_wave_costs_a_call(batch: int, percent: int, waves: int) -> None:
    planner = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES * percent // 100, workload=Workload(batch=batch))
    (cached, *_) = ways(planner.budget or 0)
    profile, workload = planner.profile(MIXTURE), planner.demand.workload
    cached = cached._replace(ahead=0)
    for fetch in expert_cache._fetched(MIXTURE, cached, profile, workload, None).values():
        assert fetch.ahead_nbytes == 0
        assert fetch.calls == waves == -(-min(NUM_ROWS, NUM_PICKED * batch) // cached.num_slots)
        missed = expert_cache._missed(NUM_ROWS, NUM_PICKED * batch, cached.num_slots, workload)
        assert fetch.nbytes == pytest.approx(missed * ROW_NBYTES)


@pytest.mark.parametrize("why", ["no unit picks", "no work is known", "no stacks", "shared"])
def test_there_is_no_cache_if(why: str) -> None:
    budget, manifest = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 5, MIXTURE
    assert ways(budget)
    if why == "no unit picks":
        manifest = mixture(picks=False)
    elif why == "no stacks":
        manifest = MIXTURE.without(STACKS)
    elif why == "shared":  # another unit also has all of them, and may read all rows
        every = tuple(t for t in MIXTURE.tensors() if t.alias in STACKS)
        units = (*MIXTURE.units, UnitSpec(name="other", tensors=every))
        manifest = Manifest(units=units, order=tuple(range(len(units))))
    assert ways(budget, manifest, has_work=why != "no work is known") == []


def test_compression_of_only_some_stacks_is_not_used_in_a_cache() -> None:
    budget = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 5
    planner = planner_of(budget)
    profile, sizes = planner.profile(MIXTURE), dict(planner.weights.codes)
    del sizes["3.up"]
    assert [is_coded(c) for c in expert_cache.caches(MIXTURE, sizes, profile, budget, None)] == [False]


# -- hit rates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "num_picked", "num_slots", "there"),
    [
        (128, 8, 8, 0.366),
        (128, 8, 32, 0.79),
        (128, 4, 32, 0.78),
        (512, 10, 64, 0.67),
        (512, 10, 128, 0.81),
        (8, 2, 4, 0.67),
    ],
)
def test_misses_are_those_of_the_measured_curve(num_rows: int, num_picked: int, num_slots: int, there: float) -> None:
    found = expert_cache._missed(num_rows, num_picked, num_slots, Workload())
    assert found == pytest.approx(num_picked * (1 - there), rel=0.005)
    several = Workload(batch=2, tokens=3)
    assert expert_cache._curve(num_rows, 6 * num_picked, several) == curve_of(num_rows, num_picked)


@pytest.mark.parametrize("workload", [None, Workload(), Workload(batch=2), Workload(batch=7), Workload(tokens=4)])
@pytest.mark.parametrize(("num_rows", "num_picked"), [(128, 8), (64, 6), (8, 2), (32, 4)])
def test_more_slots_miss_less(num_rows: int, num_picked: int, workload: Workload | None) -> None:
    picked = num_picked * (workload.batch * workload.tokens if workload else 1)
    found = [expert_cache._missed(num_rows, picked, slots, workload) for slots in range(num_rows + 1)]
    assert all(more < less for less, more in itertools.pairwise(found))
    assert found[0] <= min(picked, num_rows)
    assert found[-1] == pytest.approx(0)


def test_sequences_do_not_share_hits() -> None:
    """With more sequences, each of their rows is missed more often, down to the hit rate of random rows."""
    shares = []
    for batch in (1, 2, 8, 64, 10_000):
        different = expert_cache._missed(128, 8 * batch, 0, Workload(batch=batch))
        shares.append(1 - expert_cache._missed(128, 8 * batch, 32, Workload(batch=batch)) / different)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.789, abs=1e-3)
    assert shares[-1] == pytest.approx(0.25, abs=0.01)


def test_a_cache_costs_its_fetches() -> None:
    planner = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4)
    profile = planner.profile(MIXTURE)
    (cached, *_) = ways(planner.budget or 0)
    found = expert_cache.profile_with_cache(MIXTURE, cached, profile, Workload())
    missed = expert_cache._missed(NUM_ROWS, NUM_PICKED, cached.num_slots, Workload())
    for index, (unit, before, after) in enumerate(zip(MIXTURE.units, profile.unit_s, found.unit_s, strict=True)):
        more = missed * ROW_NBYTES / (0.92 * H200.link_bytes_per_s) + 7.5e-6 if unit.stacks else 0.0
        assert after - before == pytest.approx(more), index


# -- counted hits ------------------------------------------------------------------------------------------------------

MANY = 10**7  # rows, so many that the measured curve has no weight


def counts_of(share: float, num_slots: int = 32, workload: Workload | None = None, num: int = MANY) -> Counts:
    """Counts with this hit rate."""
    found = round(share * num)
    return Counts(num_slots, found, num - found, workload)


def missed(num_slots: int, counts: Counts | None, workload: Workload = Workload()) -> float:  # noqa: B008
    num_picked = NUM_PICKED * workload.batch * workload.tokens
    return expert_cache._missed(NUM_ROWS, num_picked, num_slots, workload, counts)


@pytest.mark.parametrize("num_slots", [8, 32, 100])
@pytest.mark.parametrize("share", [0.03, 0.4, 0.79, 0.995])
def test_the_curve_goes_through_the_counts(share: float, num_slots: int) -> None:
    counts = counts_of(share, num_slots)
    assert missed(num_slots, counts) == pytest.approx(NUM_PICKED * (1 - share), rel=2e-3)
    curve = [missed(slots, counts) for slots in range(NUM_ROWS + 1)]
    assert (curve[0], curve[-1]) == (NUM_PICKED, 0)
    assert all(more <= less for less, more in itertools.pairwise(curve))
    by_law = [missed(slots, None) for slots in range(NUM_ROWS + 1)]
    for counted, law in zip(curve[1:-1], by_law[1:-1], strict=True):
        assert (counted > law) is (curve[num_slots] > by_law[num_slots]), "the whole curve is bent to one side"


def test_few_counts_change_little() -> None:
    for slots in (1, 32, 127):
        assert missed(slots, Counts(32, 0, 0)) == pytest.approx(missed(slots, None))
        assert missed(slots, Counts(32, 0, 1)) == pytest.approx(missed(slots, None), rel=0.06, abs=0.01)
    missed_rows = [missed(32, counts_of(0.2, num=num)) for num in (0, 10, 100, 1000, MANY)]
    assert missed_rows == sorted(missed_rows)
    assert (missed_rows[0], missed_rows[-1]) == pytest.approx((missed(32, None), NUM_PICKED * 0.8), rel=1e-3)


@pytest.mark.parametrize("num_slots", [0, 1, 32, 128, 200])
@pytest.mark.parametrize(("found", "fetched"), [(0, 0), (0, MANY), (MANY, 0)])
def test_all_counts_are_valid(num_slots: int, found: int, fetched: int) -> None:
    for slots in (0, 1, 64, 128):
        assert 0 <= missed(slots, Counts(num_slots, found, fetched)) <= NUM_PICKED


@pytest.mark.few(1)
@pytest.mark.parametrize("workload", [Workload(), Workload(batch=4), Workload(batch=2, tokens=2)], ids=str)
@pytest.mark.parametrize("num_slots", [40, 90])
def test_the_counts_of_a_cache_predict_its_fetches(num_slots: int, workload: Workload) -> None:
    """A row that occurs again in the same step counts once."""
    rng, table, num_steps = random.Random(3), Lru(num_slots), 3000
    num_tokens = workload.batch * workload.tokens
    for _ in range(num_steps):
        table.resolve([row for _ in range(num_tokens) for row in rng.sample(range(NUM_ROWS), NUM_PICKED)])
    counts = Counts(num_slots, table.hits, table.misses, workload)
    assert missed(num_slots, counts, workload) == pytest.approx(table.misses / num_steps, rel=0.05)
    assert abs(missed(num_slots, None, workload) / (table.misses / num_steps) - 1) > 0.3, (
        "the measured curve is of other steps"
    )


def test_counts_of_one_workload_apply_to_another() -> None:
    one, four = Workload(), Workload(batch=4)
    better, worse = counts_of(0.9, workload=one), counts_of(0.6, workload=one)
    assert missed(32, better, four) < missed(32, None, four) < missed(32, worse, four)
    assert missed(32, counts_of(0.789, workload=one), four) == pytest.approx(missed(32, None, four), rel=0.01)


def mixed(percent: int, batch: int, counts: Counts | None = None) -> Planner:
    budget = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES * percent // 100
    planner = planner_of(budget, codec="none", workload=Workload(batch=batch), on=IN_GRAPHS)
    return replace(planner, counts=counts)


@pytest.mark.parametrize(
    ("percent", "batch", "share", "is_cached"),
    [(70, 4, None, True), (70, 4, 0.1, False), (80, 16, None, False), (80, 16, 0.98, True), (25, 1, 0.0, True)],
)
def test_the_counts_choose_between_cache_and_ring(
    percent: int, batch: int, share: float | None, is_cached: bool
) -> None:
    counts = None if share is None else counts_of(share, 90, Workload(batch=batch))
    plan = mixed(percent, batch, counts)(MIXTURE)
    assert bool(plan.cached) is is_cached
    prove(plan)


def test_a_plan_reports_its_curve_and_the_counts() -> None:
    plan = mixed(25, 1).priced(replace(mixed(25, 1)(MIXTURE), ahead=0))
    row_nbytes = STACKS_NBYTES // NUM_ROWS
    assert plan.found_share == pytest.approx(QWEN3.at(plan.num_slots / NUM_ROWS))
    assert (plan.hit_curve, plan.counted_rows) == (QWEN3.name, 0)
    assert "(hits as measured on Qwen3-30B-A3B) and fetches" in str(plan)
    assert "measured on" not in str(replace(plan, hit_curve="")), "a plan that was saved before curves had names"
    for share in (0.2, 0.95):
        counted = mixed(25, 1, counts_of(share, plan.num_slots)).priced(plan)
        assert counted.found_share == pytest.approx(share, abs=1e-4)
        assert counted.fetched_nbytes == pytest.approx((1 - share) * NUM_PICKED * row_nbytes, rel=1e-3)
        fetched_s = (counted.fetched_nbytes - plan.fetched_nbytes) / (0.92 * H200.link_bytes_per_s)
        assert counted.step_s - plan.step_s == pytest.approx(fetched_s, rel=0.01)
        assert f"finds about {100 * share:.0f} % there" in str(counted)
        assert "(hits as measured on Qwen3-30B-A3B, corrected by 10,000,000 counted ones) and" in str(counted)
        numbers = counted.numbers()
        assert numbers["found_share"] == counted.found_share
        assert (numbers["hit_curve"], numbers["counted_rows"]) == (QWEN3.name, MANY)
        assert Plan.from_json(counted.to_json()) == counted


# -- prefetched rows ---------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("recall", [0.66, 0.85])
@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("num_slots", [24, 42])
def test_predicted_prefetches_equal_those_of_a_cache(num_slots: int, most: int, recall: float) -> None:
    """Predictions are right with this probability, otherwise any row. Tokens draw from recently used rows."""
    rng, table, num_steps = random.Random(3), Lru(num_slots), 4000
    order = list(range(NUM_ROWS))
    for step in range(num_steps):
        places = sorted({min(int(rng.expovariate(1 / 30)), NUM_ROWS - 1) for _ in range(9)})[:NUM_PICKED]
        rows = [order[place] for place in places]
        order = rows + [row for row in order if row not in rows]
        if step:
            guess = [row if rng.random() < recall else rng.randrange(NUM_ROWS) for row in rows]
            table.guess(rng.sample(guess, len(guess)), most)
        table.resolve(rows)
    ahead, used = table.ahead / num_steps, table.used / num_steps
    there = (table.hits - table.used) / num_steps
    different = (table.hits + table.misses) / num_steps
    guessed = partial(expert_cache._guessed, different - there, different, num_slots, NUM_ROWS, most, recall)
    predicted = guessed(None)
    assert (predicted.fetched, predicted.used) == pytest.approx((ahead, used), rel=0.2)
    assert len(predicted.odds) == most + 1
    assert sum(predicted.odds) == pytest.approx(1)
    counts = Counts(num_slots, MANY, MANY, ahead=10 * MANY, used=4 * MANY)
    counted = guessed(counts)
    assert counted.used == pytest.approx(0.4 * counted.fetched, rel=1e-3)
    assert 0 < counted.fetched < most


@pytest.mark.parametrize("num_slots", [8, 9, 12])
def test_no_more_rows_are_prefetched_than_slots_are_free(num_slots: int) -> None:
    """A prefetch uses no slot of the last call: with as many slots as a token picks, nothing can be prefetched."""
    rng, table, num_steps = random.Random(3), Lru(num_slots), 2000
    for step in range(num_steps):
        rows = rng.sample(range(NUM_ROWS), NUM_PICKED)
        if step:
            table.guess([row if rng.random() < 0.75 else rng.randrange(NUM_ROWS) for row in rows], 8)
        table.resolve(rows)
    missed_rows = (table.misses + table.used) / num_steps
    ahead = expert_cache._guessed(missed_rows, NUM_PICKED, num_slots, NUM_ROWS, 8, 0.75, None)
    assert ahead.fetched == pytest.approx(table.ahead / num_steps, rel=0.25, abs=0.05)


def test_the_number_of_prefetched_rows_pays_off() -> None:
    """The link must have time for them, and they must be worth their bytes. Nothing is prefetched if predictions are
    wrong, in steps of several tokens, or if a layer takes no time compared with a row."""
    budget, numbers = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4, []
    planner = planner_of(budget, on=IN_GRAPHS)
    (cached, *_) = ways(budget)
    for times in (0.01, 1, 4, 20):
        unit_s = tuple(times * s for s in planner.profile(MIXTURE).unit_s)
        profile = replace(planner.profile(MIXTURE), unit_s=unit_s)

        def best(counts: Counts | None = None, profile: Any = profile, workload: Any = None) -> int:
            return expert_cache._best_ahead(MIXTURE, cached, profile, workload, counts)

        numbers.append(best())
        assert best(Counts(cached.num_slots, MANY, MANY, ahead=MANY, used=0)) == 0
        assert best(workload=Workload(tokens=2)) == 0
        fetches = expert_cache._fetched(MIXTURE, cached._replace(ahead=numbers[-1]), profile, None, None)
        assert [fetch.ahead_nbytes > 0 for fetch in fetches.values()] == [False] + [numbers[-1] > 0] * (NUM_LAYERS - 1)
    assert numbers[0] == 0
    assert numbers == sorted(numbers)
    assert numbers[-1] == expert_cache.MAX_PREFETCHED_ROWS


@pytest.mark.parametrize("most", [1, 2, 4])
def test_compute_hides_a_prefetch_only_if_it_is_short(most: int) -> None:
    """The number of rows varies: a layer waits for many, although it could hide their mean number."""
    profile = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4).profile(MIXTURE)
    ahead = expert_cache._guessed(1.0, 4.0, 40, NUM_ROWS, most, 0.75, None)
    row_s, rng = ROW_NBYTES / (0.92 * profile.link_bytes_per_s), random.Random(1)
    hidden_s = 1.3 * row_s
    numbers = rng.choices(range(most + 1), ahead.odds, k=20_000)
    late_s = sum(max(0.0, num * row_s - hidden_s) for num in numbers) / len(numbers)
    fetch, waited = (expert_cache._Fetch(ROW_NBYTES, 0.5, each, 1) for each in (ahead, expert_cache._NOTHING))
    more_s = fetch.seconds(profile, hidden_s) - waited.seconds(profile, hidden_s)
    assert more_s == pytest.approx(late_s, rel=0.05, abs=1e-12)
    assert (more_s > 0) == (most > 1)


def test_a_plan_reports_its_prefetches() -> None:
    plan = mixed(25, 1)(MIXTURE)
    none, two = (mixed(25, 1).priced(replace(plan, ahead=ahead)) for ahead in (0, 2))
    assert (none.ahead, two.ahead) == (0, 2)
    assert two.found_share > none.found_share
    assert two.fetched_nbytes > none.fetched_nbytes, "some predictions are wrong"
    assert "ahead" not in str(none)
    assert "up to 2 ahead for each layer" in str(two)
    assert two.numbers()["ahead"] == 2
    assert Plan.from_json(two.to_json()) == two


# -- a cache whose steps were measured ---------------------------------------------------------------------------------


def times_of(step_s: float) -> Times:
    return Times(step_s=step_s, host_s=step_s, computes={}, copies={})


def test_measured_steps_of_a_cache_keep_its_counts() -> None:
    plan = mixed(70, 4)(MIXTURE)
    counts = counts_of(0.8, plan.num_slots, Workload(batch=4))
    found = corrected(mixed(70, 4, counts), plan, times_of(1.04 * plan.step_s))
    counted = mixed(70, 4, counts).priced(plan)
    assert found.step_s == pytest.approx(1.04 * plan.step_s)
    assert found.fetched_nbytes == counted.fetched_nbytes != plan.fetched_nbytes
    assert found.cached == plan.cached
    by_law = corrected(mixed(70, 4), plan, times_of(1.04 * plan.step_s))
    assert by_law.fetched_nbytes == plan.fetched_nbytes
    assert by_law.acts_as(plan)


# -- when a cache is worth it ------------------------------------------------------------------------------------------


def assert_sound(plan: Plan) -> None:
    prove(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.cached == STACKS
    assert plan.device_nbytes <= (plan.budget or 0)
    assert plan.slots_nbytes > 0
    assert plan.device_nbytes == plan.resident_nbytes + plan.ring_nbytes + plan.buffer_nbytes + plan.slots_nbytes
    assert plan.buffer_nbytes >= BUFFER_NBYTES
    assert not plan.opened & plan.resident - plan.manifest.codes.keys()
    for index, unit in enumerate(plan.manifest.units):
        assert bool(unit.stacks) <= plan.opens(index)
        if unit.stacks:
            assert plan.streamed(index) == {}
            assert plan.decoded(index).keys() == plan.hosted(index).keys() == unit.aliases().keys()
            assert list(plan.decoded(index).values()) == [0, unit.tensors[0].decoded_nbytes or unit.tensors[0].nbytes]
    assert " slots for experts of " in plan.summary()


@pytest.mark.parametrize("codec", ["none", "auto", "compressed"])
@pytest.mark.parametrize("percent", [10, 25, 50])
def test_a_small_budget_has_a_cache(percent: int, codec: str) -> None:
    budget = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES * percent // 100
    plan = planner_of(budget, codec=codec)(MIXTURE)
    assert_sound(plan)
    coded = plan.manifest.codes.keys() & STACKS
    assert coded in (set(), STACKS)
    assert not coded or codec != "none"
    assert plan.budget == budget
    found = ways(budget)
    assert plan.slots_nbytes in [cached.slots_nbytes for cached in found]
    streams = planner_of(budget, mixture(picks=False), codec=codec)(mixture(picks=False))
    assert not streams.cached
    assert plan.step_s < streams.step_s / 2


@pytest.mark.parametrize("on", [IN_GRAPHS, machine()], ids=["in graphs", "eager"])
def test_more_memory_is_never_slower(on: Machine) -> None:
    plans = [planner_of(MIXTURE.nbytes * k // 20, on=on)(MIXTURE) for k in range(5, 23)]
    for less, more in itertools.pairwise(plans):
        assert more.graph_s <= 1.01 * less.graph_s, "the time by which a cache is chosen"
    assert sum(bool(plan.cached) for plan in plans) > 5
    assert not plans[-1].cached


def made(candidates: Iterable[Any]) -> Iterator[Plan]:
    """The plans that these may become."""
    for candidate in candidates:
        found = candidate.make()
        if isinstance(found, Plan):
            yield found
        elif found is not None:
            yield from made(found)


@pytest.mark.parametrize("on", [IN_GRAPHS, machine()], ids=["in graphs", "eager"])
@pytest.mark.parametrize("codec", ["none", "compressed"])
def test_fetches_and_streamed_units_share_the_link(codec: str, on: Machine) -> None:
    share = SHARE if codec == "compressed" else 1.0
    least = BUFFER_NBYTES + round(1.02 * share * NUM_PICKED * NUM_LAYERS * (ROW_NBYTES + 2048))
    planner = planner_of(least + REST_NBYTES * 3 // 4, codec=codec, on=on)
    plan = planner(MIXTURE)
    assert plan.num_slots == NUM_PICKED
    assert plan.step_nbytes > 0
    assert_sound(plan)
    least_s = (plan.step_nbytes + plan.fetched_nbytes) / H200.link_bytes_per_s
    assert min(plan.step_s, plan.graph_s) >= least_s
    assert plan.graph_s < 1.2 * least_s
    found = list(made(planner.candidates(MIXTURE, [])))
    assert sum(bool(each.cached) for each in found) > 1
    for each in found:
        assert planner.priced(each).step_s == pytest.approx(each.step_s), "the time that a search compares"
        assert each.step_s >= plan.step_s * (1 - 1e-9)


@pytest.mark.parametrize("share", [0.93, 1.1])
def test_a_model_that_fits_compressed_or_plain_has_no_cache(share: float) -> None:
    plan = planner_of(int(MIXTURE.nbytes * share), on=IN_GRAPHS)(MIXTURE)
    assert not plan.cached
    assert plan.slots_nbytes == 0
    assert plan.offloaded_nbytes == 0
    assert bool(plan.manifest.codes) is (share < 1)


UNABLE: dict[str, Mapping[str, Any]] = {
    "host memory is not read": {"on": machine(maps_host_memory=False)},
    "rows are not fetched where they lie": {"on": machine(fetches_rows=False)},
    "host memory is not pinned": {"pin_memory": False},
    "no unit picks": {"manifest": mixture(picks=False)},
    "classic": {"offload_backend": "prefetch", "offload_group_size": 2},
    "no work is known": {"has_work": False},
}


@pytest.mark.parametrize("why", UNABLE)
def test_without_its_requirements_there_is_no_cache(why: str) -> None:
    budget = REST_NBYTES + 2 * BUFFER_NBYTES + STACKS_NBYTES // 4
    planner = planner_of(budget, **UNABLE[why])
    assert not planner(UNABLE[why].get("manifest", MIXTURE)).cached


def test_opening_a_cached_unit_takes_the_host_as_long_as_decoding() -> None:
    plan = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4)(MIXTURE)
    assert plan.cached
    slow = machine(profile=replace(H200, overhead_s=5e-3))
    assert planner_of(plan.budget or 0, on=slow).priced(plan).step_s > NUM_LAYERS * 5e-3


@pytest.mark.parametrize("codec", ["none", "compressed"])
def test_a_plan_that_is_evaluated_again_keeps_its_cache(codec: str) -> None:
    planner = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4, codec=codec)
    plan = planner(MIXTURE)
    again = planner.priced(plan)
    assert_sound(again)
    assert (again.cached, again.slots_nbytes, again.budget) == (plan.cached, plan.slots_nbytes, plan.budget)
    assert replace(again, step_s=plan.step_s) == plan
    assert again.step_s == pytest.approx(plan.step_s, rel=0.02)
    slower = replace(planner.machine, profile=replace(H200, link_bytes_per_s=H200.link_bytes_per_s / 10))
    assert replace(planner, machine=slower).priced(plan).step_s > 2 * plan.step_s


def test_a_move_into_a_cache_is_counted() -> None:
    planner = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4, codec="none")
    plan = planner(MIXTURE)
    one = frozenset({"2.up"})
    nbytes = MIXTURE.aliases["2.up"]
    assert moved_nbytes(plan, plan) == 0
    streams = replace(plan, cached=plan.cached - one)
    assert moved_nbytes(plan, streams) == moved_nbytes(streams, plan) == nbytes
    stays = replace(streams, resident=plan.resident | one)
    assert moved_nbytes(plan, stays) == moved_nbytes(stays, plan) == nbytes


def test_cached_weights_are_nowhere_else() -> None:
    plan = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4)(MIXTURE)
    for wrong in (
        replace(plan, resident=plan.resident | {"2.up"}, budget=None),
        replace(plan, mapped=frozenset({"2.up"})),
        replace(plan, cached=plan.cached | {"nobody's"}),
    ):
        assert any("cached alias groups that no unit has, or that are elsewhere" in text for text in violations(wrong))
    on_disk = replace(plan, disk=frozenset({"2.up"}))
    assert any("alias groups on disk" in text for text in violations(on_disk))
    over = replace(plan, slots_nbytes=plan.slots_nbytes + (plan.budget or 0))
    assert any("device bytes" in text for text in violations(over))


def with_unit(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    units = list(manifest.units)
    units[index] = replace(units[index], **changes)
    return replace(manifest, units=tuple(units))


def test_cached_weights_belong_to_one_unit_that_encloses_none() -> None:
    """Inner units would overwrite the buffer, and several units would each need slots of their own."""
    plan = planner_of(REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 4, codec="none")(MIXTURE)
    assert plan.cached
    assert list(violations(plan)) == []
    of_layer = next(u for u, unit in enumerate(MIXTURE.units) if unit.name == "2/experts")
    enclosing = replace(plan, manifest=with_unit(MIXTURE, of_layer, enclosing=True))
    expected = f"unit {of_layer} encloses others, which use the buffer, and has ['2.down', '2.up'] cached"
    assert list(violations(enclosing)) == [expected]
    other = next(u for u, unit in enumerate(MIXTURE.units) if unit.name == "head")
    (up,) = (t for t in MIXTURE.units[of_layer].tensors if t.alias == "2.up")
    shared = with_unit(MIXTURE, other, tensors=(*MIXTURE.units[other].tensors, up))
    expected = "cached alias groups of several units, of which each would have slots: ['2.up']"
    assert list(violations(replace(plan, manifest=shared, budget=None))) == [expected]


def test_no_cache_is_planned_for_enclosing_units() -> None:
    budget = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES // 5
    of_layer = next(u for u, unit in enumerate(MIXTURE.units) if unit.stacks)
    manifest = with_unit(MIXTURE, of_layer, enclosing=True)
    (cached, *_) = ways(budget, manifest)
    assert cached.sizes.keys() == STACKS - MIXTURE.units[of_layer].aliases().keys()
    plan = planner_of(budget + STACKS_NBYTES // NUM_LAYERS, manifest)(manifest)
    prove(plan)
    assert plan.cached == cached.sizes.keys()


@pytest.mark.parametrize(("slow", "percent"), [(1, 70), (2, 80), (3, 80)])
def test_a_slow_host_counts_as_much_with_a_cache_as_without(slow: int, percent: int) -> None:
    """Prefetched rows make graphs faster, which must not matter if no text is generated from graphs."""
    host = {"op_launch_s": 14.5e-6, "overhead_s": 60e-6, "show_s": 5e-6, "decoding_launch_s": 20e-6}
    on = machine(profile=replace(H200, **{name: slow * seconds for name, seconds in host.items()}))
    budget = REST_NBYTES + BUFFER_NBYTES + STACKS_NBYTES * percent // 100
    planner = planner_of(budget, on=on, codec="auto")
    without = replace(planner, machine=replace(on, fetches_rows=False))
    taken, other = (
        plan.graph_s + H200.host_share * (plan.step_s - plan.graph_s) for plan in (planner(MIXTURE), without(MIXTURE))
    )
    assert taken <= other * (1 + 1e-6)
