"""Recordings: every kernel of every graph sees its unit's bytes, whatever ran before, and fills are counted right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from graph_rig import ODD, PLANS, Graph, GraphRig, serve_again, take_turns
from repeats import examples, thinned
from rig import equal_plan, small_plan
from weightstream.errors import OffloadError
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import ALIGN_NBYTES
from weightstream.runtime.devices.backend import Event, Side

ROUNDS = 12


def assert_counted(rig: GraphRig) -> None:
    assert rig.engine.counters.filled_nbytes == rig.graphs.moved_nbytes


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PLANS)
def test_whole_steps_in_a_row(name: str) -> None:
    with GraphRig(PLANS[name]) as rig:
        graph = rig.captured()
        rig.replay(graph)
        rig.replay(graph)
        before = rig.graphs.moved_nbytes
        for _ in range(ROUNDS):
            rig.replay(graph)
        rig.assert_right((2 + ROUNDS) * len(rig.plan.manifest.order))
        assert rig.engine.counters.unplanned_fills == 0
        assert rig.graphs.moved_nbytes - before == ROUNDS * rig.plan.step_nbytes
        assert rig.engine.counters.steps == 2 + ROUNDS
        assert_counted(rig)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("piece", [1, 2])
def test_pieces_of_a_step_in_a_chain(name: str, piece: int) -> None:
    with GraphRig(PLANS[name]) as rig:
        order = rig.plan.manifest.order
        graphs = [rig.captured(order[start : start + piece]) for start in range(0, len(order), piece)]
        for graph in graphs:
            rig.replay(graph)
        unplanned = rig.engine.counters.unplanned_fills
        for _ in range(ROUNDS):
            for graph in graphs:
                rig.replay(graph)
        rig.assert_right((1 + ROUNDS) * len(order))
        assert rig.engine.counters.unplanned_fills == unplanned
        assert_counted(rig)


def test_the_next_steps_fills_follow_their_last_read_and_not_the_end() -> None:
    """A copy after the launch does not wait for the rest of the graph."""
    with GraphRig(PLANS["5 units in 2 slots"]) as rig:
        graph = rig.captured()
        rig.replay(graph)
        waited: list[Event] = []
        plain = rig.clock.wait

        def wait(side: Side, event: Event) -> None:
            if side is Side.COPY and not rig.clock.inside:
                waited.append(event)
            plain(side, event)

        rig.clock.wait = wait  # type: ignore[method-assign]
        rig.replay(graph)
        external = rig.captures.recordings[graph]._external
        assert waited == [external[3], external[4]]
        rig.assert_right(10)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "seed"), thinned(PLANS, range(3)))
def test_eager_and_several_graphs_in_turns(name: str, seed: int) -> None:
    with GraphRig(PLANS[name], seed) as rig:
        rig.assert_right(take_turns(rig, seed))
        assert_counted(rig)


@pytest.mark.parametrize("name", ODD)
def test_nested_or_repeated_reads(name: str) -> None:
    with GraphRig(PLANS[name]) as rig:
        rig.assert_right(ODD[name](rig))
        assert_counted(rig)


def test_a_partly_overtaken_copy_is_waited_for() -> None:
    """The graph needs unit 3, whose fill overtakes earlier ones, but not all bytes of unit 2's fill."""
    with GraphRig(small_plan([512, 512, 1024, 1536, 512], 2048)) as rig:
        rig.captured((4, 4))
        graph = rig.captured((4, 0))
        rig.replay(graph)
        rig.assert_right(2)


UNITS = st.lists(st.integers(1, 4).map(lambda n: n * ALIGN_NBYTES - 8), min_size=1, max_size=6)


@examples(60)
@given(data=st.data())
def test_any_plan_with_any_graphs_in_any_order(data: st.DataObject) -> None:
    sizes = data.draw(UNITS)
    num_lines = data.draw(st.integers(max(-(-s // ALIGN_NBYTES) for s in sizes), 12))
    some = st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=7)
    orders = data.draw(st.lists(some, min_size=1, max_size=3))
    plan = small_plan(sizes, num_lines * ALIGN_NBYTES, data.draw(st.one_of(st.none(), st.just(orders[0]))))
    with GraphRig(plan, most_s=0.0002) as rig:
        graphs = [rig.captured(order) for order in orders]
        kernels = 0
        for index, is_eager in data.draw(st.lists(st.tuples(st.sampled_from(range(len(orders))), st.booleans()))):
            kernels += len(orders[index])
            if is_eager:
                rig.forward(orders[index])
            else:
                rig.replay(graphs[index])
        rig.assert_right(kernels)
        assert_counted(rig)


@examples(40)
@given(data=st.data())
def test_any_plan_captured_in_pieces_by_an_engine(data: st.DataObject) -> None:
    """The engine knows only the life cycle: pieces of a step in their order, with eager steps between."""
    sizes = data.draw(UNITS)
    num_lines = data.draw(st.integers(max(-(-s // ALIGN_NBYTES) for s in sizes), 12))
    order = data.draw(st.permutations(range(len(sizes))))
    cuts = sorted({0, len(order), *data.draw(st.lists(st.sampled_from(range(len(order)))))})
    with GraphRig(small_plan(sizes, num_lines * ALIGN_NBYTES, order), most_s=0.0002) as rig:
        graphs = [rig.captured_alone(order[begin:end]) for begin, end in pairwise(cuts)]
        turns = data.draw(st.lists(st.booleans(), max_size=6))
        for is_eager in turns:
            if is_eager:
                rig.forward()
            else:
                for graph in graphs:
                    rig.launch_alone(graph)
        rig.assert_right(len(turns) * len(order))


def test_units_in_use_at_once_that_share_bytes_are_refused_without_harm() -> None:
    with GraphRig(equal_plan(3, 1)) as rig:
        with rig.capture(Graph(rig.graphs)):
            rig.wait_unit(0)
            with pytest.raises(OffloadError, match="unit 1 and unit 0 are in use at once"):
                rig.wait_unit(1)
            rig.release_unit(0)
        graph = rig.captured()
        rig.replay(graph)
        rig.replay(graph)
        rig.assert_right(6)


def test_a_graph_of_another_streamer_is_refused() -> None:
    with GraphRig(equal_plan(3, 1)) as rig, pytest.raises(OffloadError, match="no graph of this streamer"):
        rig.replay(Graph(rig.graphs))


class TestAlone:
    """Graphs that are launched without notice to the streamer: the life cycle."""

    @pytest.mark.parametrize("name", PLANS)
    def test_whole_steps(self, name: str) -> None:
        with GraphRig(PLANS[name]) as rig:
            rig.forward()
            graphs = [rig.captured_alone(), rig.captured_alone()]
            for index in range(ROUNDS):
                rig.launch_alone(graphs[index * index % 3 % 2])
            rig.assert_right((1 + ROUNDS) * len(rig.plan.manifest.order))

    @pytest.mark.few(2)
    @pytest.mark.parametrize("name", PLANS)
    @pytest.mark.parametrize("piece", [1, 2])
    def test_pieces_in_their_order(self, name: str, piece: int) -> None:
        with GraphRig(PLANS[name]) as rig:
            order = rig.plan.manifest.order
            rig.forward()
            graphs = [rig.captured_alone(order[start : start + piece]) for start in range(0, len(order), piece)]
            for _ in range(ROUNDS):
                for graph in graphs:
                    rig.launch_alone(graph)
            rig.assert_right((1 + ROUNDS) * len(order))

    def test_pieces_of_a_step_that_repeats_a_unit(self) -> None:
        with GraphRig(small_plan([512, 1536], 1536, order=(0, 1, 0))) as rig:
            graphs = [rig.captured_alone((0, 1)), rig.captured_alone((0,))]
            for graph in graphs * 3:
                rig.launch_alone(graph)
            rig.assert_right(9)

    def test_pieces_of_a_step_in_which_the_first_unit_comes_again(self) -> None:
        with GraphRig(PLANS["5 units in 2 slots"]) as rig:
            rig.assert_right(serve_again(rig))

    @pytest.mark.few(2)
    @pytest.mark.parametrize(("name", "seed"), thinned(PLANS, range(3)))
    def test_eager_steps_in_between(self, name: str, seed: int) -> None:
        chance = random.Random(seed)
        with GraphRig(PLANS[name], seed) as rig:
            graphs = [rig.captured_alone(), rig.captured_alone()]
            for _ in range(20):
                if chance.random() < 0.3:
                    rig.forward()
                else:
                    rig.launch_alone(chance.choice(graphs))
            rig.assert_right(20 * len(rig.plan.manifest.order))

    @pytest.mark.parametrize("order", [(1, 2, 3, 4), (0, 1, 3, 4), (4, 3, 2, 1, 0), (0, 1, 0, 2, 3, 4)])
    def test_a_step_in_another_order_than_planned(self, order: Sequence[int]) -> None:
        with GraphRig(equal_plan(5, 2)) as rig:
            rig.forward()
            graph = rig.captured_alone(order)
            for _ in range(4):
                rig.launch_alone(graph)
            rig.assert_right(5 + 4 * len(order))

    def test_a_graph_of_the_streamer_after_an_unannounced_one(self) -> None:
        with GraphRig(PLANS["5 units in 2 slots"]) as rig:
            ours = rig.captured()
            rig.replay(ours)
            alone = rig.captured_alone((0, 1, 2))
            rig.launch_alone(alone)
            rig.replay(ours)
            rig.assert_right(13)

    def test_without_sync_a_capture_is_refused(self) -> None:
        with GraphRig(equal_plan(5, 2)) as rig:
            graph = Graph(rig.graphs)
            with rig.graphs.capture(graph), pytest.raises(OffloadError, match=r"use model\.weightstream\.capture"):
                rig.wait_unit(0)


@pytest.mark.parametrize("piece", [1, 2, 3])
def test_steps_that_stream_nothing_are_counted_and_timed(piece: int) -> None:
    """A cache of experts may be all that opens: here in 3 of 5 units."""
    manifest, opened = equal_plan(5, 2).manifest, (1, 2, 4)
    cached = frozenset(alias for unit in opened for alias in manifest.units[unit].aliases())
    plan = replace(Plan.build(manifest, frozenset(manifest.aliases), 0), cached=cached)
    with GraphRig(plan) as rig:
        graphs = [rig.captured(opened[start : start + piece]) for start in range(0, 3, piece)]
        recordings = [rig.captures.recordings[graph] for graph in graphs]
        assert [recording.begins for recording in recordings] == [True] + [False] * (len(graphs) - 1)
        assert [recording.is_whole for recording in recordings] == [piece == 3] + [False] * (len(graphs) - 1)
        for _ in range(ROUNDS):
            for graph in graphs:
                rig.replay(graph)
        assert rig.engine.counters.steps == ROUNDS
        assert rig.graphs.moved_nbytes == rig.engine.counters.fills == 0
