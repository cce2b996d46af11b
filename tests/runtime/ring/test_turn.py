"""Threads that call one model: the threads of a step belong to it, all others wait for its end."""

from __future__ import annotations

import copy
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import weightstream
from models import randomise
from weightstream.runtime.ring.turn import StepTurn

WIDTH, DEPTH = 64, 8


def offloaded(model: nn.Module, share: float = 0.4) -> Any:
    budget = int(share * sum(p.nbytes for p in model.parameters()))
    streamer = weightstream.offload(model, device="cpu", device_budget=budget, codec="none")
    assert streamer.plan.host_nbytes > 0
    return streamer


def stack(seed: int = 1) -> nn.Sequential:
    return randomise(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]), seed).eval()  # type: ignore[return-value]


@contextmanager
def repeating(call: Callable[[], None]) -> Iterator[list[int]]:
    """Another thread repeats the call during the block, and must finish it several times."""
    ended, done, errors = [0], threading.Event(), queue.SimpleQueue[BaseException]()

    def run() -> None:
        try:
            with torch.no_grad():
                while not done.is_set():
                    call()
                    ended[0] += 1
        except BaseException as error:
            errors.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ended
    finally:
        done.set()
        thread.join()
    if not errors.empty():
        raise errors.get()


def test_another_threads_call_of_a_unit_waits_for_the_step_to_end() -> None:
    model = stack()
    plain, x = copy.deepcopy(model), torch.randn(1, WIDTH)
    with torch.no_grad(), offloaded(model) as streamer:
        whole, part = plain(x), plain[3](x)
        for _ in range(5):
            assert torch.equal(model(x), whole)
        before, order = streamer.stats(), streamer.plan.manifest.order

        def alone() -> None:
            assert torch.equal(model[3](x), part)

        with repeating(alone) as ended:
            for _ in range(150):
                assert torch.equal(model(x), whole)
        assert ended[0] > 15, "a thread that runs step after step does not block others"
        assert streamer.stats().unplanned_fills == before.unplanned_fills
        assert streamer.plan.manifest.order == order
        assert not any(unit.opened for unit in streamer._binding.units)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


class Threaded(nn.Module):
    """Runs each of its blocks in a thread of its own, by `run(block, x)`."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(stack()), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(self.run(block, x))
        return x


def in_thread(block: nn.Module, x: torch.Tensor, wait: Callable[[threading.Thread], None]) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def run() -> None:
        with torch.no_grad():
            found.append(block(x))

    thread = threading.Thread(target=run)
    thread.start()
    wait(thread)
    return found[0]


def joined(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return in_thread(block, x, threading.Thread.join)


def polled(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward waits in a loop of its own, which no stack frame shows."""

    def wait(thread: threading.Thread) -> None:
        while thread.is_alive():
            time.sleep(1e-3)

    return in_thread(block, x, wait)


def recomputed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Runs the block in a backward pass, as reversible layers do: on a GPU in autograd's thread."""
    found: list[torch.Tensor] = []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            with torch.no_grad():
                found.append(block(x))
            return grad

    with torch.enable_grad():
        y = torch.zeros(1, device=x.device, requires_grad=True)
        Backward.apply(y).sum().backward()
    return found[0]


def pooled() -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Threads that are older than the step get work from its forward."""
    pool = ThreadPoolExecutor(2)
    return lambda block, x: pool.submit(torch.no_grad()(block), x).result()


def queued() -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """The same with queues."""
    work, found = queue.Queue[Any](), queue.Queue[torch.Tensor]()

    def serve() -> None:
        while True:
            block, x = work.get()
            with torch.no_grad():
                found.put(block(x))

    threading.Thread(target=serve, daemon=True).start()

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        work.put((block, x))
        return found.get()

    return run


@pytest.mark.parametrize("kind", ["joined", "polled", "pooled", "queued", "recomputed"])
def test_threads_that_work_for_a_step_belong_to_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightstream.runtime.ring.turn._STALLED_S", 0.05)
    run = {"joined": joined, "polled": polled, "recomputed": recomputed}.get(kind) or {
        "pooled": pooled,
        "queued": queued,
    }[kind]()
    model = Threaded(run).eval()
    plain, x = stack(), torch.randn(1, WIDTH)
    plain.load_state_dict(dict(model.blocks.state_dict()))
    with torch.no_grad():
        wanted = x
        for layer in plain:
            wanted = torch.tanh(layer(wanted))
        with offloaded(model) as streamer:
            for _ in range(4):
                assert torch.equal(model(x), wanted)
            before = streamer.stats()
            for _ in range(2 if kind == "polled" else 6):
                assert torch.equal(model(x), wanted)
            after = streamer.stats()
            assert after.unplanned_fills == before.unplanned_fills
            assert after.steps > before.steps
            assert not any(unit.opened for unit in streamer._binding.units)


@pytest.mark.usefixtures("nothing_foreseen")
def test_units_in_threads_may_wait_for_each_other() -> None:
    meeting = threading.Barrier(2)

    class Meeting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            meeting.wait(30)
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.ModuleList(nn.ModuleList([Meeting(WIDTH, WIDTH), Meeting(WIDTH, WIDTH)]) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for pair in self.pairs:
                with ThreadPoolExecutor(2) as pool:
                    x = torch.tanh(sum(pool.map(torch.no_grad()(lambda block: block(x)), pair)))  # noqa: B023
            return x

    model = Net().eval()
    plain, x = copy.deepcopy(model), torch.randn(1, WIDTH)
    with torch.no_grad(), offloaded(model, 0.5) as streamer:
        for _ in range(4):
            assert torch.equal(model(x), plain(x))
        assert not any(unit.opened for unit in streamer._binding.units)


def test_a_step_ends_after_the_threads_that_joined_it() -> None:
    """A forward does not wait for a thread that is in one of its units. The step ends after that unit is closed."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait()
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Slow(WIDTH, WIDTH), *stack()])
            self.threads: list[threading.Thread] = []
            self.found: list[torch.Tensor] = []
            self.starts = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.starts:
                y = x.clone()
                thread = threading.Thread(target=lambda: self.found.append(self.blocks[0](y).detach()))
                self.threads.append(thread)
                thread.start()
                inside.wait()
                threading.Timer(0.1, go_on.set).start()
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    model = Net().eval()
    plain, x = copy.deepcopy(model), torch.randn(1, WIDTH)
    with torch.no_grad(), offloaded(model, 0.25) as streamer:
        assert streamer.plan.streams(0)
        wanted, first = plain(x), plain.blocks[0](x)
        for _ in range(4):
            assert torch.equal(model(x), wanted)
        model.starts = True
        assert torch.equal(model(x), wanted)
        assert go_on.is_set()
        model.threads[0].join()
        assert torch.equal(model.found[0], first)
        model.starts = False
        assert torch.equal(model(x), wanted)
        assert not any(unit.opened for unit in streamer._binding.units)


def test_during_step_other_threads_wait_whatever_its_thread_does() -> None:
    model = stack()
    plain, x = copy.deepcopy(model), torch.randn(1, WIDTH)
    with torch.no_grad(), offloaded(model) as streamer:
        for _ in range(3):
            model(x)
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(model[2](x)))
        with streamer.step():
            thread.start()
            thread.join(0.2)
            assert not found
            assert torch.equal(model(x), plain(x))
        thread.join()
        assert torch.equal(found[0], plain[2](x))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


def test_stats_can_be_called_while_the_plan_changes() -> None:
    model = nn.Sequential(*[Pair() for _ in range(8)]).eval()
    plain, x = copy.deepcopy(model), torch.randn(1, 32)
    with torch.no_grad(), offloaded(model) as streamer:
        for _ in range(6):
            model(x)
        inputs = streamer._installed.replanning.inputs
        plans = [planner(grain) for planner, grain in zip(inputs.planners, inputs.grains, strict=True)]
        assert len({len(plan.extents) for plan in plans}) > 1

        def ask() -> None:
            time.sleep(1e-3)  # otherwise the threads would pass the GIL to and fro for minutes
            stats = streamer.stats()
            assert stats.held_nbytes["host"] > 0
            assert len(stats.units) <= len(inputs.grains[-1].units)

        with repeating(ask) as ended:
            for index in range(20):
                streamer.switch(plans[index % len(plans)])
                for _ in range(5):
                    assert torch.equal(model(x), plain(x))
        assert ended[0] > 5


def test_a_turn_without_a_thread_is_free_again() -> None:
    """An error at the very end of a step leaves such a turn."""
    turn = StepTurn()
    turn.run(lambda is_first: is_first)
    turn._lock.acquire()
    assert turn.run(lambda is_first: is_first)
    assert not turn._lock.locked()


class _Holder:
    """What a turn can belong to."""


def test_a_turn_of_an_object_ends_once() -> None:
    turn, holder, other = StepTurn(), _Holder(), _Holder()
    ref = weakref.ref(holder)
    assert turn.begin(ref, lambda: None)
    assert turn.is_mine
    turn.finish(weakref.ref(other))  # does not have it
    assert turn.is_mine
    turn.finish(ref)
    turn.finish(ref)
    assert not turn.is_mine
    assert turn.run(lambda is_first: is_first)


@pytest.mark.parametrize("asks", ["the same thread", "another thread", "a waiting thread"])
def test_a_turn_whose_object_is_freed_is_free_again(asks: str) -> None:
    """As after an interrupt that cut short the end of a backward pass."""
    turn, holders, found = StepTurn(), [_Holder()], list[bool]()
    assert turn.begin(weakref.ref(holders[0]), lambda: None)
    if asks == "a waiting thread":
        thread = threading.Thread(target=lambda: found.append(turn.run(lambda is_first: is_first)))
        thread.start()
        while not turn._waiting:
            time.sleep(1e-3)
    holders.clear()
    if asks == "another thread":
        thread = threading.Thread(target=lambda: found.append(turn.run(lambda is_first: is_first)))
        thread.start()
    if asks == "the same thread":
        assert not turn.is_mine
        found.append(turn.run(lambda is_first: is_first))
    else:
        thread.join(timeout=10)
    assert found == [True]
    assert not turn._lock.locked()


def test_a_call_inside_a_turn_is_not_a_step() -> None:
    turn = StepTurn()
    assert turn.run(lambda is_first: (is_first, turn.run(lambda is_first: is_first))) == (True, False)
    with turn.taken() as outer, turn.taken() as inner:
        assert (outer, inner) == (True, False)
    assert not turn.threads


def test_recomputing_in_a_checkpoint_still_refuses_to_train_streamed_weights() -> None:
    model = stack()
    with offloaded(model):
        x = torch.randn(1, WIDTH, requires_grad=True)
        with pytest.raises(weightstream.OffloadError, match="backward"):
            checkpoint(model, x, use_reentrant=False).sum().backward()
        with torch.no_grad():
            assert torch.isfinite(model(x)).all()
