"""Errors at any line of the library, and interrupts at any moment: no weight is lost, and nothing stays open.

Each path is cut at lines that are drawn from all of its lines. Stress tests cut it at a thousand lines.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import MappingProxyType

import pytest
import torch

from cut_rig import Case, case, cut, cut_once, interrupt, offloaded, simple
from cutting import num_lines

NUM_CUTS = 24
PATHS = MappingProxyType(  # and the number of cuts in CI, chosen by the time that they take
    dict.fromkeys(("eager", "alone", "step", "capture", "replay", "updates", "pipeline", "striped"), NUM_CUTS)
    | {"coded": 12, "training": 12, "training coded": 6, "watched": 12, "training watched": 6}
    | {"experts": 6, "waves": 6, "generation": 4}
)

pytestmark = pytest.mark.usefixtures("few_plans")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[Case]:
    found = case(request.param, request)
    found.num_cuts = PATHS[request.param]
    with torch.no_grad():
        for _ in range(6):  # the order is learned, steps are timed, and the plan may change
            found.output(False)
        found.act()
    yield found
    found.remove()


@pytest.mark.few(5)
def test_an_error_at_any_line_leaves_the_model_whole(path: Case, seed: int) -> None:
    cut(path, path.num_cuts, seed)


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_an_error_at_each_of_a_thousand_lines_leaves_the_model_whole(path: Case, seed: int) -> None:
    cut(path, 1000, seed)


def test_interrupts_leave_the_model_whole(seed: int) -> None:
    interrupt(40, seed)


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_two_thousand_interrupts_leave_the_model_whole(seed: int) -> None:
    interrupt(2000, seed)


def removed(num_cuts: int, seed: int) -> None:
    draw = random.Random(seed)
    for index in range(num_cuts):
        codec = ("none", "compressed")[index % 2]
        model, plain, x = simple(index, codec=codec)
        streamer = offloaded(model, codec=codec)
        with torch.no_grad():
            model(x)
            if index < 2:
                probe, _, _ = simple(index, codec=codec)
                num = num_lines(offloaded(probe, codec=codec).remove)
        _, where = cut_once(streamer.remove, num, draw, seed)
        assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values())), where
        with torch.no_grad():
            assert torch.equal(model(x), plain(x)), where
        streamer.remove()
        assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values())), where
        with torch.no_grad():
            assert torch.equal(model(x), plain(x)), where
        assert not {"forward", "_apply", "weightstream"} & vars(model).keys(), where
        assert not any({"forward", "_apply"} & vars(module).keys() for module in model.modules()), where


def test_an_interrupted_removal_is_completed_by_the_next(seed: int) -> None:
    removed(8, seed)


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_a_removal_interrupted_at_a_thousand_lines_is_completed_by_the_next(seed: int) -> None:
    removed(1000, seed)
