"""What an eager step asks of Python: the host must queue units faster than a GPU computes them."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

import weightstream
from models import randomise

NUM_UNITS = 64
NUM_STEPS = 48


def num_calls(run: Callable[[], object]) -> float:
    """Calls of Python and C functions per unit, on this thread, in the median step: some are timed, or plan again."""
    found = []
    for _ in range(NUM_STEPS):
        profile = cProfile.Profile()
        profile.enable()
        run()
        profile.disable()
        found.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    return median(found) / NUM_UNITS


def test_calls_of_a_streamed_unit() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(NUM_UNITS)]).eval()
    randomise(model, 0)
    x = torch.randn(1, 64)
    with torch.no_grad():
        plain = num_calls(lambda: model(x))
        with weightstream.offload(model, device="cpu", device_budget=6 * 64 * 65 * 4) as streamer:
            for _ in range(6):  # it learns the order, and times steps
                model(x)
            before = streamer.stats()
            calls = num_calls(lambda: model(x))
            fills = (streamer.stats().fills - before.fills) / NUM_STEPS
    assert fills > 0.9 * NUM_UNITS
    assert plain < 12
    assert calls < 130
