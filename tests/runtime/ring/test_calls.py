"""The Python calls of an eager step, and of the launch of a graph: the host must be faster than a GPU."""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import nn

import weightstream
from models import randomise
from rig import equal_plan
from weightstream.runtime.ring.engine import Engine
from weightstream.runtime.ring.recording import Recording

NUM_UNITS = 64
NUM_STEPS = 48


def num_calls(run: Callable[[], object], num_units: int = NUM_UNITS) -> float:
    """Calls of Python and C functions per unit, on this thread, in the median step. Some steps are timed, or plan
    again."""
    found = []
    for _ in range(NUM_STEPS):
        profile = cProfile.Profile()
        profile.enable()
        run()
        profile.disable()
        found.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    return median(found) / num_units


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
            with streamer.step():
                fixed = num_calls(lambda: model(x))
    assert fills > 0.9 * NUM_UNITS
    assert plain < 12
    assert calls < 97, "eager"
    assert fixed < 79, "in step()"  # with torch 2.15; one call of a step less with 2.13


class Silent:
    """A backend whose calls cost nothing."""

    device = torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[..., object]:
        return nothing


def nothing(*_: object) -> None:
    return None


def launch_of(num_units: int, slots: int) -> Callable[[], None]:
    """The work of the engine and the recording around the launch of a graph of a whole step."""
    plan, backend = equal_plan(num_units, slots), Silent()
    engine = Engine(plan, backend, [[] for _ in range(num_units)])  # type: ignore[arg-type]
    engine.prime()
    recording = Recording(engine, backend)  # type: ignore[arg-type]
    for unit in range(num_units):
        recording.wait(unit)
        recording.release(unit)
    recording.end()
    assert len(recording.due) == slots

    def launch() -> None:
        engine.before_graph(recording.entry)
        recording.after_launch()

    return launch


def num_opcodes(run: Callable[[], object]) -> int:
    """Python instructions, including loops without calls."""
    num = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num
        frame.f_trace_opcodes = True
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return num


def test_calls_of_a_launch() -> None:
    assert num_calls(launch_of(256, 4), 256) < 1.6
    assert num_calls(launch_of(256, 32), 256) < 4.2


def test_a_launch_takes_time_proportional_to_its_units() -> None:
    """Also if the ring holds several times as many units, all of which are filled after the graph."""
    short, long, wide = (num_opcodes(launch_of(*sizes)) for sizes in ((64, 8), (512, 8), (512, 64)))
    assert long < 8 * short
    assert wide < 8.2 * short
