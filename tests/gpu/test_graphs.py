"""Graphs: whole steps, pieces, several over one streamer, by hand, refused ones, failed ones, and the state after a
launch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from stack import ALL, Captured, Taught, captured, floats, taught, unharmed
from weightstream.errors import OffloadError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PLANS: dict[str, dict[str, Any]] = {
    "ring of one block": ALL | {"offload_prefetch_step": 1},
    "ring of two": ALL,
    "ring of three": ALL | {"offload_prefetch_step": 3},
    "every third": {"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": 2},
    "least budget": {"share": 0.12},
    "a third": {"share": 0.3},
    "a half": {"share": 0.45},
    "most": {"share": 0.8},
}


@pytest.mark.parametrize("name", PLANS)
def test_whole_steps_in_a_row(name: str) -> None:
    with taught(**PLANS[name]) as model:
        step = model.captured()
        model.assert_equal(step)  # each launch enters step() itself
        with model.streamer.step():
            model.assert_equal(step, rounds=1)
            before = model.streamer.stats()
            model.assert_equal(step, rounds=8)
            after = model.streamer.stats()
        assert after.steps - before.steps == 8 * 4
        assert after.filled_nbytes - before.filled_nbytes == 8 * 4 * model.streamer.plan.step_nbytes > 0
        assert after.unplanned_fills == 0


def by_hand(model: Taught) -> Captured:
    graph, x = torch.cuda.CUDAGraph(), model.inputs[0].clone()
    with model.streamer.step(), torch.cuda.graph(graph), model.streamer.capture(graph):
        y = model.stack(x)
    return Captured(streamer=model.streamer, graph=graph, x=x, y=y)


@pytest.mark.parametrize("name", ["ring of one block", "ring of two", "a half"])
def test_by_hand(name: str) -> None:
    with taught(**PLANS[name]) as model:
        step = by_hand(model)
        model.assert_equal(step, rounds=6)
        model.assert_equal()
        model.assert_equal(step)


def halve(model: Taught, name: str) -> None:
    torch.cuda.synchronize()  # a step in flight may read either
    for module in (model.stack, model.plain):
        module.get_parameter(name).mul_(0.5)
    for want, x in zip(model.want, model.inputs, strict=True):
        want.copy_(model.plain(x))


def test_by_hand_after_an_update() -> None:
    """The ring is not full when the capture starts."""
    with taught(**ALL) as model:
        halve(model, "blocks.0.up.weight")
        model.assert_equal(by_hand(model), rounds=6)


@pytest.mark.parametrize("inside", [False, True], ids=["outside of step", "inside of step"])
def test_a_capture_by_torch_alone_is_refused_and_harms_nothing(inside: bool) -> None:
    with (
        taught(share=0.3) as model,
        unharmed(model),
        model.streamer.step() if inside else nullcontext(),
        pytest.raises(OffloadError, match=r"use model\.weightstream\.capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model.stack(model.inputs[0] + 1)  # so that the graph is not empty


@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_eager_fixed_and_captured_steps_in_turns(name: str, num_streams: int) -> None:
    """Results are compared at the end. A step orders itself after the previous one, on any stream."""
    chance = random.Random(name)
    with taught(**PLANS[name]) as model:
        steps = [model.captured(num) for num in range(2)]
        streams = [torch.cuda.Stream() for _ in range(num_streams)]
        turns: list[tuple[int, torch.Tensor]] = []
        torch.cuda.synchronize()
        for _ in range(40):
            num, step = chance.randrange(4), chance.choice([model.stack, *steps])
            fixed = step is not model.stack or chance.random() < 0.5
            with torch.cuda.stream(chance.choice(streams)), model.streamer.step() if fixed else nullcontext():
                turns.append((num, step(model.inputs[num])))
        torch.cuda.synchronize()
        assert [i for i, (num, got) in enumerate(turns) if not torch.equal(got, model.want[num])] == []


def test_several_graphs_over_one_streamer() -> None:
    chance = random.Random(1)
    with taught(share=0.3) as model:
        large = floats(model.plain, batch=64)
        want = [model.plain(x) for x in large]
        model.stack(large[0])
        graphs = [
            (model.captured(), model.inputs, model.want),
            (captured(model.streamer, model.stack, large[0]), large, want),
            (model.captured(3), model.inputs, model.want),
        ]
        turns = []
        for inside in (False, True):
            with model.streamer.step() if inside else nullcontext():
                for _ in range(30):
                    (step, inputs, wants), num = chance.choice(graphs), chance.randrange(4)
                    turns.append((step(inputs[num]), wants[num]))
        assert [i for i, (got, want) in enumerate(turns) if not torch.equal(got, want)] == []


@pytest.mark.parametrize("name", ["ring of one block", "ring of two", "ring of three", "a half"])
def test_pieces_of_a_step_in_order(name: str) -> None:
    with taught(**PLANS[name]) as model, model.streamer.step():
        x = model.inputs[0].clone()
        pieces: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []
        for part in (model.stack.blocks[:3], model.stack.blocks[3:5], model.stack.blocks[5:]):
            graph, y = torch.cuda.CUDAGraph(), pieces[-1][1] if pieces else x
            with model.streamer.capture(graph):
                for block in part:
                    y = block(y)
            pieces.append((graph, y))

        def step(value: torch.Tensor) -> torch.Tensor:
            x.copy_(value)
            for graph, _ in pieces:
                model.streamer.replay(graph)
            return pieces[-1][1].clone()

        model.assert_equal(step, rounds=1)
        before = model.streamer.stats()
        model.assert_equal(step, rounds=6)
        after = model.streamer.stats()
        assert after.unplanned_fills == before.unplanned_fills
        assert after.filled_nbytes - before.filled_nbytes == 6 * 4 * model.streamer.plan.step_nbytes


@pytest.mark.parametrize("settings", [ALL, {"share": 0.45}], ids=["all", "share"])
def test_an_update_between_launches_is_seen_by_the_next(settings: dict[str, Any]) -> None:
    with taught(**settings) as model:
        step = model.captured()
        model.assert_equal(step, rounds=2)
        for block in (0, 1, 3, 6):
            for name in ("up.weight", "down.bias"):
                halve(model, f"blocks.{block}.{name}")
                model.assert_equal(step, rounds=2)
        model.assert_equal()


def test_a_graph_is_refused_after_remove() -> None:
    with taught(share=0.3) as model:
        step = model.captured()
        model.assert_equal(step)
        model.streamer.remove()
        with pytest.raises(OffloadError, match=r"no graph of this streamer"):
            model.streamer.replay(step.graph)


def test_a_capture_that_fails_inside_harms_nothing() -> None:
    """A value is read in the middle of a step, which breaks the capture."""

    def read(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        inputs[0].sum().item()

    with taught(share=0.3) as model:
        earlier = model.captured()
        model.assert_equal(earlier)
        for entered in (nullcontext, model.streamer.step):
            with unharmed(model):
                hook = model.stack.blocks[3].up.register_forward_pre_hook(read)
                with entered(), pytest.raises(RuntimeError), model.streamer.capture(torch.cuda.CUDAGraph()):
                    model.stack(model.inputs[0])
                hook.remove()
            model.assert_equal(earlier)


class Slept(nn.Linear):
    """Computes for a number of cycles."""

    cycles = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        torch.cuda._sleep(self.cycles)
        return y


def timed_ms(call: Callable[[], Any], num: int = 8) -> float:
    """The least of three means."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(3):
        begin.record()
        for _ in range(num):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / num)
    return min(found)


@pytest.mark.alone
def test_the_next_steps_fills_are_not_joined_at_the_end_of_the_graph() -> None:
    """Four units in two slots compute 15 % longer than their copies. A fill that is joined at the end would cost a
    fifth."""
    width = 6144
    with torch.device("cuda"):
        model = nn.Sequential(*(Slept(width, width, bias=False) for _ in range(4))).eval()
        x, target = torch.randn(1, width), torch.empty(width, width)
    source = torch.empty(width, width, pin_memory=True)
    copy_ms = timed_ms(lambda: target.copy_(source, non_blocking=True))
    cycles_per_ms = 1e8 / timed_ms(lambda: torch.cuda._sleep(100_000_000), num=1)
    for unit in model:
        unit.cycles = int(1.15 * copy_ms * cycles_per_ms)
    plain, graph = copy.deepcopy(model), torch.cuda.CUDAGraph()
    with torch.no_grad(), weightstream.offload(model, device="cuda", **ALL) as streamer:
        want = plain(x)
        with torch.cuda.graph(graph):
            plain(x)
        compute_ms = timed_ms(graph.replay)
        model(x)
        step = captured(streamer, model, x)
        recording, plan = streamer.graphs.recordings[step.graph], streamer.plan
        assert recording.due == [0, 1]
        assert len(recording.filled) + len(recording.due) == sum(map(len, plan.after)) == 4
        with streamer.step():
            assert torch.equal(step(x), want)
            step_ms = timed_ms(lambda: streamer.replay(step.graph))
            assert torch.equal(step(x), want)
    assert step_ms < compute_ms + 0.6 * copy_ms, (step_ms, compute_ms, copy_ms)
