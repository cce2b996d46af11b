"""Adapters trained over streamed frozen weights: losses, gradients and adapters are those of the plain model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from training import Recompute, adapters, assert_equal, inputs, moved, net, offloaded, poisoned, square, trained
from weightstream.plan.schedule import TRAIN
from weightstream.runtime.streamer.backward import Backward

__all__ = ["poisoned"]
recomputes = pytest.mark.parametrize("recompute", ["kept", "recomputed", "reentrant"])


@pytest.mark.few(3)
@recomputes
@pytest.mark.parametrize("codec", ["none", "compressed"])
@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.usefixtures("poisoned")
def test_bits(recompute: Recompute, codec: Any, share: float) -> None:
    dtype = torch.bfloat16 if codec == "compressed" else torch.float32
    wanted = trained(net(recompute, dtype=dtype))
    model = net(recompute, dtype=dtype)
    with offloaded(model, share, codec=codec) as streamer:
        print(streamer.plan.summary())
        assert_equal(trained(model), wanted)


@pytest.mark.few(1)
@recomputes
@pytest.mark.usefixtures("poisoned")
def test_without_opening_units_again_gradients_are_wrong(recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(Backward, "_enter", lambda *_: None)
    monkeypatch.setattr(Backward, "hook_watched", lambda *_: None)
    plain, model = net(recompute), net(recompute)
    with offloaded(model):
        for each in (plain, model):
            torch.manual_seed(1)
            square(each, inputs(0, each)).backward()
    wrong = [a for a, b in zip(adapters(plain), adapters(model), strict=True) if not torch.equal(a.grad, b.grad)]
    assert len(wrong) > len(adapters(plain)) / 2


@pytest.mark.few(3)
@recomputes
@pytest.mark.parametrize("share", [0.2, 0.4])
def test_bytes_of_a_step(recompute: Recompute, share: float) -> None:
    """From the third step on no fill is unplanned, in training steps and in evaluations between them."""
    model = net(recompute)
    with offloaded(model, share) as streamer:
        for step in range(5):
            with moved(streamer) as training:
                square(model, inputs(step, model)).backward()
            with moved(streamer) as evaluation, torch.no_grad():
                model(inputs(step, model))
            print(training, evaluation, streamer.plan.step_nbytes_of(TRAIN), streamer.plan.step_nbytes)
            if step > 1:
                assert training["unplanned_fills"] == evaluation["unplanned_fills"] == 0
                assert training["filled_nbytes"] == streamer.plan.step_nbytes_of(TRAIN)
                assert evaluation["filled_nbytes"] == streamer.plan.step_nbytes_of("forward")


def test_a_training_step_is_timed_to_the_end_of_its_backward_pass() -> None:
    model = net()
    with offloaded(model) as streamer:
        with streamer.trace() as trace:
            for step in range(6):
                began_s = time.perf_counter()
                square(model, inputs(step, model)).backward()
                took_s = time.perf_counter() - began_s
        steps = [span for span in trace.spans if span.kind == "step" and span.row == "compute"]
        waits = [span for span in trace.spans if span.kind == "unit" and span.step == 5]
        assert [span.name for span in steps] == [f"train {number}" for number in range(1, 7)]
        assert len(waits) == len(streamer.plan.opened_units(TRAIN)) == 10
        assert streamer.stats().step_s is not None
        assert steps[-1].end_s - steps[-1].begin_s > 0.5 * took_s
