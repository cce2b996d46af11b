"""Graphs of an inference engine that knows only the life cycle: steps in pieces, cut where attention runs eager."""

from __future__ import annotations

import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from graph_rig import PLANS, CaptureFailed, GraphRig, Served
from repeats import examples, thinned
from rig import equal_plan, small_plan
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import ALIGN_NBYTES

SIZES = (8, 4, 2, 1)


class CodedRig(GraphRig):
    """A rig whose units are all decoded into one buffer, which only one unit at a time may use."""

    def __init__(self, plan: Plan, seed: int = 0, most_s: float = 0.001) -> None:
        super().__init__(plan, seed, most_s)
        self.in_buffer: list[int] = []
        self.binding.enter, self.binding.leave = self._enter, self.in_buffer.remove
        self.binding.abandon = self._abandon

    def _enter(self, unit: int) -> None:
        assert not self.in_buffer, f"unit {unit} is decoded over unit {self.in_buffer}"
        self.in_buffer.append(unit)

    def _abandon(self) -> None:
        self.engine.abandon()
        self.in_buffer.clear()


def served(rig: GraphRig, cuts: Sequence[int] | None = None) -> Served:
    """Every unit is cut, as every layer is at its attention, unless `cuts` lists the cut ones."""
    order = rig.plan.manifest.order
    return Served(rig, order, range(len(order)) if cuts is None else cuts)


def assert_right_in_any_order(rig: GraphRig, steps: Served, seed: int, num_turns: int = 16) -> None:
    chance = random.Random(seed)
    for _ in range(num_turns):
        steps.launch(chance.choice(steps.sizes))
    rig.assert_right(steps.num_kernels)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PLANS)
def test_a_unit_is_waited_for_in_one_piece_and_released_in_the_next(name: str) -> None:
    with CodedRig(PLANS[name]) as rig:
        steps = served(rig)
        steps.eager()
        steps.capture(1)
        for _ in range(8):
            steps.launch(1)
        rig.assert_right(steps.num_kernels)


@pytest.mark.few(2)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", PLANS)
def test_several_sizes_in_pieces_and_whole_launched_in_any_order(name: str, warm: bool) -> None:
    """Mixed batches run in pieces, decode steps in one graph. Eager warm-ups come before each capture, or do not."""
    with CodedRig(PLANS[name], seed=1) as rig:
        steps = served(rig)
        for whole in (False, True):
            for size in SIZES:
                for _ in range(warm):
                    steps.eager()
                steps.capture((size, whole), whole=whole)
        assert_right_in_any_order(rig, steps, seed=1)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "seed"), thinned(PLANS, range(3)))
def test_eager_steps_and_more_captures_between_launches(name: str, seed: int) -> None:
    chance = random.Random(seed)
    with CodedRig(PLANS[name], seed) as rig:
        steps = served(rig, [place for place in range(len(rig.plan.manifest.order)) if chance.random() < 0.7])
        steps.capture(0)
        for turn in range(1, 25):
            what = chance.choice(("eager", "capture", "launch", "launch", "launch"))
            if what == "eager":
                steps.eager()
            elif what == "capture":
                steps.capture(turn, whole=chance.random() < 0.3)
            else:
                steps.launch(chance.choice(steps.sizes))
        rig.assert_right(steps.num_kernels)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "fails_in", "where", "again"),
    thinned(
        ["5 units in 2 slots", "all fit", "uneven extents", "a unit twice"],
        range(5),
        ["inside of a piece", "between two"],
        ["eager", "capture"],
    ),
)
def test_a_capture_that_fails_midway_does_no_harm(name: str, fails_in: int, where: str, again: str) -> None:
    with CodedRig(PLANS[name]) as rig:
        steps = served(rig)
        steps.capture("before")
        fails_in = min(fails_in, steps.num_pieces - 1)
        with pytest.raises(CaptureFailed):
            steps.capture("failed", fails_in=fails_in, early=where == "inside of a piece")
        if again == "eager":
            steps.eager()
        steps.capture("behind")
        steps.capture("whole", whole=True)
        assert steps.sizes == ["before", "behind", "whole"]
        assert_right_in_any_order(rig, steps, fails_in, num_turns=10)


def test_a_piece_with_only_kernels_keeps_units_open() -> None:
    with CodedRig(equal_plan(5, 2)) as rig:
        steps = served(rig, [0, 0, 2, 2, 2, 4, 4])
        for size in (2, 1):
            steps.eager()
            steps.capture(size)
        assert_right_in_any_order(rig, steps, 0)


@examples(60)
@given(data=st.data())
def test_any_plan_cut_anywhere(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4).map(lambda n: max(n * ALIGN_NBYTES - 8, 0)), min_size=1, max_size=6))
    num_lines = data.draw(st.integers(max(-(-s // ALIGN_NBYTES) for s in sizes), 12))
    order = data.draw(st.permutations(range(len(sizes))))
    plan: Plan = small_plan(sizes, num_lines * ALIGN_NBYTES, order)
    cuts = data.draw(st.lists(st.sampled_from(range(len(order))), max_size=8))
    with CodedRig(plan, most_s=0.0002) as rig:
        steps = served(rig, cuts)
        for size in range(data.draw(st.integers(1, 3))):
            for _ in range(data.draw(st.integers(0, 1))):
                steps.eager()
            steps.capture(size, whole=data.draw(st.booleans()))
        for turn in data.draw(st.lists(st.sampled_from(["eager", *steps.sizes]), max_size=6)):
            if turn == "eager":
                steps.eager()
            else:
                steps.launch(turn)
        rig.assert_right(steps.num_kernels)
