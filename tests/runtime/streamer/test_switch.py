"""A change of plan: which weights move, which stay, refusals, and the way back. Views that outlive their unit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from weightstream.errors import ConfigError, InvariantError, OffloadError
from weightstream.plan.plan import Plan
from weightstream.runtime.weights.homes import Homes
from weightstream.runtime.weights.sources import Tier

WIDTH = 64
NUM_UNITS = 8
UNIT_NBYTES = 2 * WIDTH * WIDTH


def linears() -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(NUM_UNITS)]
    return nn.Sequential(*layers).eval().requires_grad_(False)


def rows(seed: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(params=["none", "compressed"])
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[weightstream.Streamer, nn.Module, nn.Module]]:
    model, plain = linears(), linears()
    budget = 3 * UNIT_NBYTES + (UNIT_NBYTES if request.param == "compressed" else 0)
    with weightstream.offload(model, device="cpu", device_budget=budget, codec=request.param) as streamer:
        for seed in range(3):
            assert torch.equal(model(rows(seed)), plain(rows(seed)))
        yield streamer, model, plain
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def with_residents(plan: Plan, names: set[str]) -> Plan:
    return Plan.build(plan.manifest, frozenset(names), 2 * UNIT_NBYTES)


def assert_runs(streamer: weightstream.Streamer, model: nn.Module, plain: nn.Module) -> None:
    before = streamer.stats().fills
    for seed in range(4):
        assert torch.equal(model(rows(seed)), plain(rows(seed)))
    assert streamer.stats().fills > before


def test_weights_that_keep_their_place_are_not_moved(opened: Any) -> None:
    streamer, model, plain = opened
    homes = streamer._homes.homes
    first = with_residents(streamer.plan, {"1.weight", "5.weight"})
    streamer.switch(first)
    assert streamer.plan == first
    assert {alias for alias, home in homes.items() if home.tier is Tier.DEVICE} == {"1.weight", "5.weight"}
    assert_runs(streamer, model, plain)
    sources = {alias: home.source for alias, home in homes.items()}
    streamer.switch(with_residents(streamer.plan, {"5.weight", "6.weight"}))
    moved = {alias for alias, home in homes.items() if home.source is not sources[alias]}
    assert moved == {"1.weight", "6.weight"}
    assert_runs(streamer, model, plain)
    assert streamer.plan.resident == {"5.weight", "6.weight"}


def test_another_order_moves_no_home(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    streamer, model, plain = opened

    def refuse(*_: object) -> None:
        raise AssertionError("homes are settled anew")

    order = tuple(reversed(streamer.plan.manifest.order))
    monkeypatch.setattr(Homes, "_place", refuse)
    streamer.switch(streamer.plan.reordered(order))
    assert streamer.plan.manifest.order == order
    assert_runs(streamer, model, plain)  # and it learns the true order again
    assert streamer.plan.manifest.order == order[::-1]


@pytest.mark.few(1)
@pytest.mark.parametrize("at", range(3))
def test_after_an_error_the_old_plan_stays_in_force(opened: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever memory runs out: for a resident, the ring, or the buffer."""
    streamer, model, plain = opened
    before, real, calls = streamer.plan, streamer._backend.alloc, []

    def alloc(nbytes: int) -> torch.Tensor:
        calls.append(nbytes)
        if len(calls) == 1 + at:
            raise torch.OutOfMemoryError("no room")
        return real(nbytes)

    monkeypatch.setattr(streamer._backend, "alloc", alloc)
    with pytest.raises(torch.OutOfMemoryError):
        streamer.switch(with_residents(before, {"2.weight"}))
    assert len(calls) > at
    assert streamer.plan == before
    assert_runs(streamer, model, plain)


def test_updates_since_the_last_step_move_along(opened: Any) -> None:
    streamer, model, plain = opened
    with torch.no_grad():
        for either in (model, plain):
            either[2].weight.mul_(3)
            either[3].weight.data[1] = 5
    if not streamer.plan.manifest.codes:
        streamer.switch(with_residents(streamer.plan, {"2.weight", "3.weight"}))
    else:  # updated weights are compressed no more, and stay where a step finds them
        streamer.switch(streamer.plan.reordered(streamer.plan.manifest.order))
    assert_runs(streamer, model, plain)


def test_a_plan_of_another_model_is_refused(opened: Any) -> None:
    streamer, model, plain = opened
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with weightstream.offload(other, device="cpu", device_budget=2 * 4 * WIDTH * (WIDTH + 1)) as second:
        plan = second.plan
    with pytest.raises(InvariantError, match="other units"):
        streamer.switch(plan)
    assert_runs(streamer, model, plain)


def test_an_engine_with_fixed_addresses_refuses_it(opened: Any) -> None:
    streamer, model, plain = opened
    before = streamer.plan
    streamer.fix()
    try:
        with pytest.raises(OffloadError, match="the engine that drives the layers holds the addresses"):
            streamer.switch(with_residents(before, {"2.weight"}))
        assert streamer.plan is before
        assert torch.equal(model(rows(5)), plain(rows(5)))
    finally:
        streamer.unfix()
    streamer.switch(with_residents(before, {"2.weight"}))
    assert_runs(streamer, model, plain)


def test_a_step_refuses_it(opened: Any) -> None:
    streamer, model, plain = opened
    plan, errors = with_residents(streamer.plan, {"2.weight"}), []

    def switch(*_: object) -> None:
        with pytest.raises(
            OffloadError, match="the plan cannot change now: the streamer is in a watched step"
        ) as caught:
            streamer.switch(plan)
        errors.append(caught.value)

    with model[4].register_forward_hook(switch):
        assert torch.equal(model(rows(5)), plain(rows(5)))
    assert len(errors) == 1
    model(rows(5))  # without the hook, as in steps at fixed addresses
    with streamer.step(), pytest.raises(OffloadError, match="the streamer is inside of step"):
        streamer.switch(plan)
    streamer.switch(plan)
    assert_runs(streamer, model, plain)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, as it imports its compiler
def test_code_compiled_by_the_user_refuses_it(opened: Any) -> None:
    streamer, model, plain = opened
    compiled = torch.compile(model, backend="eager")
    with streamer.step():
        assert torch.equal(compiled(rows(5)), plain(rows(5)))
    with pytest.raises(OffloadError, match=r"code that torch\.compile made of this model holds the addresses"):
        streamer.switch(with_residents(streamer.plan, {"2.weight"}))
    with streamer.step():
        assert torch.equal(compiled(rows(6)), plain(rows(6)))


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_code_compiled_by_us_is_compiled_again(opened: Any) -> None:
    streamer, model, plain = opened
    streamer.compile(backend="eager")
    assert_runs(streamer, model, plain)
    streamer.switch(with_residents(streamer.plan, {"2.weight"}))
    assert_runs(streamer, model, plain)


# -- views that outlive their unit -------------------------------------------------------------------------------------


class Keeping(nn.Module):
    """Keeps a view of its weights beyond its forward."""

    def __init__(self, views: list[torch.Tensor], take: Callable[[nn.Parameter], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self._views, self._take = views, take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._views[:] = [self._take(self.linear.weight)]
        return self.linear(x).relu()


TAKES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "row": lambda weight: weight[3],
    "transposed": lambda weight: weight.detach().t(),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
}


class Peeking(nn.Sequential):
    """Reads the weight of its last layer without calling it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self[:-1]:
            x = layer(x)
        return x @ self[-1].weight


@pytest.mark.few(2)
@pytest.mark.parametrize("num_calls", range(3))
def test_newly_streamed_weights_are_watched_before_compiled_code_reads_them(num_calls: int) -> None:
    """At first everything fits, so nothing shows the reads. A step is allowed all the same: the caller vouches for
    it."""
    model, plain = Peeking(*linears()), Peeking(*linears())
    with weightstream.offload(model, device="cpu", device_budget=64 * UNIT_NBYTES, codec="none") as streamer:
        assert torch.equal(model(rows(0)), plain(rows(0)))
        streamer.switch(with_residents(streamer.plan, {"1.weight", "2.weight"}))
        assert not streamer.learned
        assert streamer.why_not_fixed() is None
        for seed in range(num_calls):
            assert torch.equal(model(rows(seed)), plain(rows(seed)))
        streamer.compile(backend="eager")
        for seed in range(4):
            assert torch.equal(model(rows(seed)), plain(rows(seed)))
        assert streamer.learned
        assert "7.weight" in streamer.plan.resident


@pytest.mark.usefixtures("nothing_foreseen")
def test_fixed_addresses_wait_if_an_automatic_change_opens_units() -> None:
    """A view outlives its forward. Its unit displaces a weight that is read outside of its module."""
    model, plain = (Peeking(*linears()) for _ in range(2))
    for each in (model, plain):
        keeping = Keeping([], lambda weight: weight[0]).bfloat16()
        keeping.linear.weight.data = each[2].weight.data  # type: ignore[union-attr, assignment]
        each[2] = keeping.eval().requires_grad_(False)
    with weightstream.offload(model, device="cpu", device_budget=64 * UNIT_NBYTES, codec="none") as streamer:
        assert torch.equal(model(rows(0)), plain(rows(0)))
        with pytest.raises(ConfigError, match="device_budget = 'x'"):
            streamer.rebudget("x")
        streamer.rebudget(f"{3 * UNIT_NBYTES}B")
        streamer.switch(with_residents(streamer.plan, {"7.weight"}))
        assert streamer.why_not_fixed() is None  # a caller who changes the plan vouches for it
        assert torch.equal(model(rows(1)), plain(rows(1)))
        assert streamer.plan.resident == {"2.linear.weight"}
        with pytest.raises(OffloadError, match="call the model once first"), streamer.step():
            pass
        for seed in range(3):
            assert torch.equal(model(rows(seed)), plain(rows(seed)))
        assert "7.weight" in streamer.plan.resident
        with streamer.step():
            assert torch.equal(model(rows(3)), plain(rows(3)))


def keeping(take: str, views: list[torch.Tensor]) -> nn.Sequential:
    torch.manual_seed(8)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)]
    blocks[2] = Keeping(views, TAKES[take])
    return nn.Sequential(*blocks).eval().requires_grad_(False)


@pytest.mark.usefixtures("nothing_foreseen")  # another plan may keep the unit on the device at once
@pytest.mark.parametrize("take", TAKES)
def test_a_kept_view_is_logged_and_its_unit_stays(take: str, caplog: pytest.LogCaptureFixture) -> None:
    views: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    model, plain = keeping(take, views), keeping(take, others)
    x = torch.randn(2, WIDTH)
    unit_nbytes = 4 * WIDTH * (WIDTH + 1)
    with (
        caplog.at_level(logging.WARNING, "weightstream"),
        weightstream.offload(model, device="cpu", device_budget=4 * unit_nbytes) as streamer,
    ):
        assert "2.linear.weight" not in streamer.plan.resident
        for _ in range(5):
            assert torch.equal(model(x), plain(x))
        messages = [record.getMessage() for record in caplog.records if "outlived its forward" in record.getMessage()]
        assert len(messages) == 1
        assert "weights of 2" in messages[0]
        assert "The unit has memory of its own from now on; make the view again" in messages[0]
        assert "2.linear.weight" in streamer.plan.resident
        assert streamer.stats().fills > 0
        assert torch.equal(views[0], others[0])  # it was made again, and always shows the true weights
        model(x)
        assert torch.equal(views[0], others[0])


@pytest.mark.usefixtures("nothing_foreseen")  # another plan may keep the unit on the device at once
def test_a_kept_view_of_a_unit_that_cannot_stay(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = keeping("detach", []), keeping("detach", [])
    x = torch.randn(2, WIDTH)
    unit_nbytes = 4 * WIDTH * (WIDTH + 1)
    with (
        caplog.at_level(logging.WARNING, "weightstream"),
        weightstream.offload(model, device="cpu", device_budget=unit_nbytes + 2048) as streamer,
    ):
        before = streamer.plan.resident
        for _ in range(5):
            assert torch.equal(model(x), plain(x))
        messages = [record.getMessage() for record in caplog.records if "outlived its forward" in record.getMessage()]
        assert len(messages) == 1
        assert "The unit cannot have memory of its own: device budget" in messages[0]
        assert streamer.plan.resident == before


def test_a_view_in_a_garbage_cycle_does_not_count_as_kept(caplog: pytest.LogCaptureFixture) -> None:
    class Cycle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cycle: dict[str, Any] = {"view": self.linear.weight.detach()}
            cycle["self"] = cycle
            return self.linear(x)

    torch.manual_seed(9)
    model = nn.Sequential(*[Cycle() for _ in range(6)]).eval().requires_grad_(False)
    with (
        caplog.at_level(logging.WARNING, "weightstream"),
        weightstream.offload(model, device="cpu", device_budget=3 * 4 * WIDTH * (WIDTH + 1)) as streamer,
    ):
        for _ in range(5):
            model(torch.randn(2, WIDTH))
        assert streamer.stats().fills > 0
    assert caplog.records == []
