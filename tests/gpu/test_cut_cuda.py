"""Errors at any line of the library, and interrupts at any moment, on a GPU, like test_cut.py on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_turn import Threaded, recomputed, stack

from cut_rig import Case, case, cut, interrupt, offloaded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("few_plans")]

PATHS = ("eager", "alone", "step", "capture", "replay", "coded", "updates", "experts", "generation")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[Case]:
    found = case(request.param, request, "cuda")
    with torch.no_grad():
        for _ in range(6):
            found.output(False)
        found.act()
    yield found
    found.remove()


def test_an_error_at_any_line_leaves_the_model_whole(path: Case, seed: int) -> None:
    cut(path, 25, seed, "cuda")


def test_interrupts_leave_the_model_whole(seed: int) -> None:
    interrupt(100, seed, "cuda")


def test_a_unit_that_runs_in_the_thread_of_autograd_belongs_to_the_step() -> None:
    model, plain = Threaded(recomputed).eval(), stack().to("cuda")
    x = torch.randn(1, plain[0].in_features, device="cuda")
    with torch.no_grad():
        wanted = x
        for layer in plain:
            wanted = torch.tanh(layer(wanted))
        with offloaded(model, "cuda", codec="none") as streamer:
            for _ in range(5):
                assert torch.equal(model(x), wanted)
            before = streamer.stats().unplanned_fills
            for _ in range(5):
                assert torch.equal(model(x), wanted)
            assert streamer.stats().unplanned_fills == before


@pytest.mark.usefixtures("nothing_foreseen")
def test_autocast_caches_no_casts_of_streamed_weights() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(48)]).eval()
    x = torch.randn(1, 1024, device="cuda")
    with torch.no_grad(), offloaded(model, "cuda", codec="none"):
        for _ in range(3):
            model(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(x)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            model(x)
            torch.cuda.synchronize()
            assert torch.cuda.max_memory_allocated() - before < 16 << 20, "48 casts are 96 MiB"
