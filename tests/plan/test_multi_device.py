"""Several devices for one model: the device of each block, the order of a step, and its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_schedule import GRAIN
from test_search import LINK_BOUND, SMALL_MODELS, model, placed

from repeats import examples
from weightstream.errors import PlanError
from weightstream.plan import cost
from weightstream.plan import multi_device as lanes
from weightstream.plan.manifest import Manifest, Profile
from weightstream.plan.multi_device import HOP_S, Lane, chosen, fastest_deal, predicted_lanes, step_s, walk, whose
from weightstream.plan.planner import Demand, Machine, Weights
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.search import place_within
from weightstream.settings.config import OffloadConfig

BUSY = replace(LINK_BOUND, overhead_s=0.01)


def lane(num_blocks: int, budget: int, profile: Profile = BUSY, first: int = 0, hop_s: float = 0.0) -> Lane:
    """A device with a number of blocks of four grains each."""
    manifest = model(*[(GRAIN, GRAIN, GRAIN, GRAIN)] * num_blocks)
    units = tuple(replace(unit, name=f"blocks.{first + i}") for i, unit in enumerate(manifest.units))
    plan = place_within(replace(manifest, units=units), budget=budget, profile=profile)
    return Lane(plan=plan, simulated=plan, profile=profile, hop_s=hop_s)


@pytest.mark.few(1)
@pytest.mark.parametrize("profile", [Profile(), LINK_BOUND, BUSY, replace(BUSY, overhead_s=2.0, handover_s=0.3)])
def test_one_lane_takes_the_time_of_a_plan(profile: Profile) -> None:
    for manifest in SMALL_MODELS:
        for plan in placed(manifest, profile):
            one = Lane(plan=plan, simulated=plan, profile=profile)
            assert step_s([one], [0] * len(manifest.order)) == pytest.approx(
                cost.simulated_s(plan, profile)[1], rel=1e-12
            )


@pytest.mark.parametrize("num_lanes", [2, 3, 4])
@pytest.mark.parametrize("budget", [4, 5, 7, 9, 14])
def test_the_links_of_striped_lanes_add_up_and_those_of_neighbours_do_not(num_lanes: int, budget: int) -> None:
    lanes = [lane(8, budget * GRAIN) for _ in range(num_lanes)]
    order = [k for _ in range(8) for k in range(num_lanes)]
    striped, contiguous = step_s(lanes, order), step_s(lanes, sorted(order))
    link_s = max(each.plan.copy_s for each in lanes)
    assert link_s <= striped <= 1.1 * link_s + 8 * num_lanes * 0.01
    assert striped <= contiguous
    if budget < 9:
        assert contiguous > 1.4 * striped


@settings(deadline=None)
@given(st.integers(2, 4), st.lists(st.integers(4, 40), min_size=4, max_size=4), st.floats(1e-3, 0.2))
def test_striped_is_hardly_slower_if_links_are_the_bottleneck(num: int, budgets: list[int], compute_s: float) -> None:
    """Devices with equal links and budgets of their own, and the blocks that `whose` assigns to them.

    Where compute takes nearly as long as copies, 3 % were seen.
    """
    room = [budget * GRAIN for budget in budgets[:num]]
    owners = whose([4 * GRAIN] * 6 * num, room, [1.0] * num)[0]
    used = sorted(set(owners))
    profile = replace(LINK_BOUND, overhead_s=compute_s)
    lanes = [lane(owners.count(k), room[k], profile) for k in used]
    assume(min(each.plan.copy_s for each in lanes) >= compute_s * len(owners))
    order = [used.index(k) for k in owners]
    assert step_s(lanes, order) <= 1.05 * step_s(lanes, sorted(order))


PLACES = {f"blocks.{k}": k for k in range(24)}


def dealt(owners: Sequence[int], budgets: Sequence[int], profile: Profile) -> dict[str, PlannerInputs]:
    """The planner's inputs for each device, for this distribution of blocks of four grains."""
    units = [replace(u, name=f"blocks.{u.layer}") for u in model(*[(GRAIN, GRAIN, GRAIN, GRAIN)] * len(owners)).units]
    found = {}
    for k in sorted(set(owners)):
        own = tuple(unit for unit, owner in zip(units, owners, strict=True) if owner == k)
        manifest = Manifest(units=own, order=tuple(range(len(own))))
        free = dict.fromkeys(("free_nbytes", "total_nbytes", "host_free_nbytes", "host_total_nbytes"), 1 << 40)
        found[f"cuda:{k}"] = PlannerInputs(
            config=OffloadConfig(device_budget=budgets[k], codec="none"),
            machine=Machine(profile=profile, on_cpu=False, maps_host_memory=False, **free),
            weights=Weights(names={alias: (alias,) for alias in manifest.aliases}),
            grains=(manifest,),
            demands=(Demand(),),
        )
    return found


def taken_s(deal: dict[str, PlannerInputs]) -> float:
    return predicted_lanes({name: lane for name, (_, lane) in chosen(deal, PLACES).items()}, PLACES).step_s


def test_neighbours_are_together_if_compute_is_the_bottleneck_and_that_is_faster() -> None:
    budgets, profile = [23 * GRAIN, 27 * GRAIN], replace(LINK_BOUND, overhead_s=0.2)
    in_turn, apart = (dealt(o, budgets, profile) for o in whose([4 * GRAIN] * 12, budgets, [1.0, 1.0]))
    best, planned = fastest_deal([in_turn, apart], PLACES)
    assert best == 1
    assert any(lane.plan.step_nbytes for _, lane in planned.values())
    assert taken_s(in_turn) > 1.4 * taken_s(apart)
    assert taken_s(apart) == pytest.approx(12 * 0.2, rel=0.01), "nothing waits for the links"


def test_neighbours_are_not_planned_together_if_links_are_the_bottleneck() -> None:
    budgets = [8 * GRAIN, 8 * GRAIN]

    def deals() -> Iterator[dict[str, PlannerInputs]]:
        yield dealt(whose([4 * GRAIN] * 12, budgets, [1.0, 1.0])[0], budgets, BUSY)
        raise AssertionError("the other deal is asked for")

    assert fastest_deal(deals(), PLACES)[0] == 0


@pytest.mark.stress
@examples(40)
@given(st.integers(2, 3), st.lists(st.integers(8, 40), min_size=3, max_size=3), st.floats(1e-3, 3.0))
def test_no_faster_distribution_is_omitted(num: int, budgets: list[int], compute_s: float) -> None:
    budgets, profile = [budget * GRAIN for budget in budgets[:num]], replace(LINK_BOUND, overhead_s=compute_s)
    deals = [dealt(owners, budgets, profile) for owners in whose([4 * GRAIN] * 12, budgets, [1.0] * num)]
    best, planned = fastest_deal(deals, PLACES)
    found_s = predicted_lanes({name: lane for name, (_, lane) in planned.items()}, PLACES).step_s
    assert found_s == taken_s(deals[best])
    assert found_s <= min(map(taken_s, deals)) / 0.99


def test_moves_between_devices_take_time() -> None:
    order, near_s = [0, 1, 0, 1, 0, 1], step_s([lane(3, 12 * GRAIN)] * 2, [0, 1, 0, 1, 0, 1])
    far = [lane(3, 12 * GRAIN, hop_s=9.0), lane(3, 12 * GRAIN, hop_s=0.25)]
    assert step_s(far, order) == pytest.approx(near_s + 6 * 0.25), "nothing moves to the first device"
    assert step_s(far, sorted(order)) == pytest.approx(near_s + 6 * 0.25), (
        "modules between blocks are on the first device"
    )


def test_the_parts_of_a_block_move_its_tensors_once() -> None:
    parts = [replace(unit, layer=index // 2) for index, unit in enumerate(model(*[(GRAIN,)] * 4).units)]
    plan = place_within(Manifest(units=tuple(parts), order=(0, 1, 2, 3)), budget=8 * GRAIN, profile=BUSY)
    lanes = [lane(1, 8 * GRAIN), Lane(plan=plan, simulated=plan, profile=BUSY, hop_s=0.25)]
    assert step_s(lanes, [0, 1, 1, 1, 1]) == pytest.approx(5 * 0.01 + 4 * 0.25)


def test_more_bytes_take_longer_to_another_device() -> None:
    [known] = dealt([0] * 4, [20 * GRAIN], BUSY).values()
    [planner], (_, plan) = known.planners, known.plan()
    near, far = (replace(planner, demand=Demand(states_nbytes=nbytes)) for nbytes in (0, 3 * GRAIN))
    assert (Lane.of(plan, near).hop_s, Lane.of(plan, far).hop_s) == (HOP_S, 3.0 + HOP_S)


def test_a_lane_decodes_while_others_compute() -> None:
    """Two matrices that decode in 4 s each, and compute in 4 s: serially if one device has both."""
    manifest = model((4 * GRAIN,), (4 * GRAIN,))
    coded = manifest.coded(dict.fromkeys(manifest.aliases, 2 * GRAIN))
    profile = replace(
        LINK_BOUND, decode_bfloat16_bytes_per_s=GRAIN, link_bytes_per_s=1e30, unit_s=(8.0, 8.0), device_bytes_per_s=1e30
    )
    plan = place_within(coded, budget=40 * GRAIN, profile=profile)
    both = Lane(plan=plan, simulated=plan, profile=profile)
    assert step_s([both], [0, 0]) == pytest.approx(16.0)
    single = model((4 * GRAIN,))
    one = place_within(single.coded(dict.fromkeys(single.aliases, 2 * GRAIN)), budget=40 * GRAIN, profile=profile)
    halves = [Lane(plan=one, simulated=one, profile=replace(profile, unit_s=(8.0,)), hop_s=0.0)] * 2
    assert step_s(halves, [0, 1]) == pytest.approx(8.0)


def test_the_order_of_a_step() -> None:
    places = {"embed": 1, "blocks.0": 2, "blocks.1": 3, "blocks.2": 4, "blocks.3": 5, "rotary": 6, "norm": 7}
    orders = [["embed", "rotary", "blocks.0", "blocks.2", "norm"], ["blocks.1", "blocks.3"]]
    assert walk(orders, places) == [0, 0, 0, 1, 0, 1, 0], "the last registered block runs early"
    assert walk([[], ["blocks.1"]], places) == [1]


def test_the_common_plan() -> None:
    found = {"cuda:0": lane(2, 4 * GRAIN), "cuda:1": lane(2, 8 * GRAIN, first=2)}
    plan = predicted_lanes(found, {f"blocks.{k}": k for k in range(4)})
    assert plan.step_s == step_s(list(found.values()), [0, 0, 1, 1])
    assert plan.step_nbytes == found["cuda:0"].plan.step_nbytes + found["cuda:1"].plan.step_nbytes
    assert plan.decoded_nbytes == 16 * GRAIN
    assert set(plan.numbers()["devices"]) == {"cuda:0", "cuda:1"}
    for words in ("cuda:0: ", "cuda:1: everything fits", "per step over 1 links"):
        assert words in str(plan)
    assert (plan.cached, plan.num_slots, plan.workload) == (frozenset(), 0, None)


def launched(host_s: float, more_s: float, host_share: float = 0.25) -> Profile:
    """Units of 0.2 s on the device and `host_s` to launch, which take `more_s` longer in a graph."""
    times = {"unit_s": (0.2,) * 3, "host_s": (host_s,) * 3, "captured_s": (more_s,) * 3, "show_s": 0.0, "fill_s": 0.0}
    return replace(LINK_BOUND, overhead_s=0.0, host_share=host_share, **times)


@pytest.mark.parametrize(("more_s", "graph_s"), [(0.0, 1.2), (0.1, 1.8), (-0.1, 0.6)])
def test_a_step_in_a_graph_does_not_wait_for_the_host(more_s: float, graph_s: float) -> None:
    profile = launched(0.5, more_s)
    found = {f"cuda:{k}": lane(3, 40 * GRAIN, profile, first=3 * k) for k in range(2)}
    plan = predicted_lanes(found, {f"blocks.{k}": k for k in range(6)})
    assert plan.step_s == pytest.approx(6 * 0.5), "the host sets the pace"
    assert plan.graph_s == pytest.approx(graph_s)
    assert plan.numbers()["graph_s"] == plan.graph_s
    assert "in a CUDA graph" in plan.predictions()["predicted"]


def test_the_choice_weighs_the_hosts_additional_time() -> None:
    """Of two distributions one is faster in eager mode, and the other in a graph."""
    slow_host, slow_device = launched(0.5, 0.0), replace(launched(0.0, 0.0), unit_s=(0.3,) * 3)
    ways = {"a": slow_host, "b": slow_device}
    for share, wanted in ((0.25, "a"), (0.95, "b")):
        taken = {}
        for name, profile in ways.items():
            one = lane(3, 40 * GRAIN, replace(profile, host_share=share))
            taken[name] = lanes._taken_s({"cuda:0": lanes.PlannedLane(None, one)}, {f"blocks.{k}": k for k in range(3)})  # type: ignore[arg-type]
        assert min(taken, key=taken.__getitem__) == wanted


def test_the_bound_of_one_turn_holds_in_graphs() -> None:
    one = lane(3, 40 * GRAIN, launched(0.0, -0.1))
    assert lanes._one_turn_s(one) == pytest.approx(3 * 0.1)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_the_device_of_each_block(nbytes: list[int], budgets: list[int], outside_nbytes: int) -> None:
    for found in whose(nbytes, budgets, [1.0] * len(budgets), outside_nbytes):
        assert_fair(found, nbytes, budgets, outside_nbytes)


def assert_fair(found: list[int], nbytes: list[int], budgets: list[int], outside_nbytes: int) -> None:
    assert len(found) == len(nbytes)
    held = [outside_nbytes * (lane == 0) for lane in range(len(budgets))]
    for size, lane in zip(nbytes, found, strict=True):
        held[lane] += size
    if all(h <= budget for h, budget in zip(held, budgets, strict=True)):
        return
    room = [budgets[0] - outside_nbytes, *budgets[1:]]
    ideal = next(more for more in range(sum(nbytes) + 60) if sum(max(0, r + more) for r in room) >= sum(nbytes))
    for lane in set(found):  # with indivisible blocks, no device streams much more than with some divisible ones
        assert held[lane] - budgets[lane] <= ideal + 2 * max(nbytes)


def test_streamed_blocks_take_turns_and_blocks_that_fit_stay_together() -> None:
    assert whose([4] * 6, [4, 4], [1, 1]) == [[0, 1, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1]]
    assert whose([4] * 6, [8, 4], [1, 1]) == [[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert whose([4] * 6, [12, 12], [1, 1]) == [[0, 0, 0, 1, 1, 1]]
    assert whose([4] * 6, [16, 20], [1, 1], outside_nbytes=8) == [[0, 0, 1, 1, 1, 1]]
    assert whose([4] * 6, [4, 20], [1, 1], outside_nbytes=8) == [[1, 1, 1, 1, 1, 1]], "the first device is full"


def test_a_slower_link_has_fewer_blocks() -> None:
    found, apart = whose([4] * 12, [1, 1], [50e9, 25e9])
    assert found.count(0) == apart.count(0) == 8
    assert found[:3].count(1) == 1


def test_without_a_budget_there_is_no_plan() -> None:
    with pytest.raises(PlanError):
        lane(4, 1)
