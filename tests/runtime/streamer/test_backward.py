"""Backward passes in all their ways: stored tensors, retained and dropped graphs, errors, threads, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import weightstream
from training import (
    Block,
    Keeps,
    Net,
    Recompute,
    adapters,
    assert_equal,
    inputs,
    moved,
    net,
    offloaded,
    poisoned,
    square,
    trained,
)
from weightstream.errors import OffloadError
from weightstream.runtime.ring.state import StepState
from weightstream.runtime.streamer.backward import Backward

__all__ = ["poisoned"]
pytestmark = pytest.mark.usefixtures("poisoned")
recomputes = pytest.mark.parametrize("recompute", ["kept", "recomputed", "reentrant"])


def gradients(model: Net) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in adapters(model) if parameter.grad is not None]
    assert found
    return found


def of_stored(model: Net, x: torch.Tensor) -> torch.Tensor:
    """The graph is entered by tensors that blocks have stored, before any output, and without the last blocks'."""
    output = model(x)
    return model.stored() + output[0, 0] * 0.1


def only_stored(model: Net, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return model.stored()


def in_two_forwards(model: Net, x: torch.Tensor) -> torch.Tensor:
    return square(model, x) + square(model, x * 2)


def with_reference(model: Net, x: torch.Tensor) -> torch.Tensor:
    """As for preferences: a forward without gradients comes between a forward and its backward pass."""
    own = square(model, x)
    with torch.no_grad():
        reference = square(model, x)
    return own / (1 + reference)


def twice(model: Net, x: torch.Tensor) -> torch.Tensor:
    loss = square(model, x)
    loss.backward(retain_graph=True)
    return loss


def accumulated(model: Net, x: torch.Tensor) -> torch.Tensor:
    for scale in (1, 2):
        square(model, x * scale).backward()
    return square(model, x * 3)


def dropped(model: Net, x: torch.Tensor) -> torch.Tensor:
    square(model, x)
    return square(model, x * 2)


def of_inputs(model: Net, x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(square(model, x), x)
    return square(model, x + found)


WAYS = [of_stored, only_stored, in_two_forwards, with_reference, twice, accumulated, dropped, of_inputs]


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", ["none", "compressed"])
def test_ways_to_train(way: Any, codec: Any) -> None:
    dtype = torch.bfloat16 if codec == "compressed" else torch.float32
    wanted = trained(net(dtype=dtype), 3, way)
    model = net(dtype=dtype)
    with offloaded(model, codec=codec) as streamer:
        assert_equal(trained(model, 3, way), wanted)
        assert streamer._gate.mode is StepState.IDLE


@pytest.mark.parametrize("way", [with_reference, in_two_forwards, twice])
def test_forwards_and_passes_of_one_step_have_one_order(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # no poison, which needs more fills
    model = net()
    with offloaded(model) as streamer:
        for step in range(4):
            with moved(streamer) as found:
                way(model, inputs(step, model)).backward()
        assert found["unplanned_fills"] == 0
        assert found["filled_nbytes"] == streamer.plan.step_nbytes_of("train")


@pytest.mark.few(2)
@recomputes
def test_an_error_in_a_pass(recompute: Recompute) -> None:
    """The units close, the next step is right, and other threads get the turn."""
    plain, model = net(recompute), net(recompute)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in a hook")

    with offloaded(model) as streamer:
        for _ in range(2):
            model.blocks[1].query.down.weight.register_hook(fail)
            before = [parameter.clone() for parameter in plain.parameters()]
            with pytest.raises(ValueError, match="in a hook"):
                square(model, inputs(0, model)).backward()
            model.blocks[1].query.down.weight._backward_hooks.clear()
            assert not any(unit.opened for unit in streamer._binding.units)
            assert all(map(torch.equal, model.parameters(), before))
            model.zero_grad()
            assert_equal(in_thread(lambda: trained(model, 1)), in_thread(lambda: trained(plain, 1)))


def test_a_failed_pass_whose_end_is_cut_short_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a second interrupt, where Python ignores errors: the next step is right, in this thread and others."""
    plain, model = net(), net()
    with offloaded(model) as streamer:
        for is_elsewhere in (False, True, False):
            num_cut: list[str] = []
            kept: list[BaseException] = []

            def cut(name: str, *_: Any, num_cut: list[str] = num_cut) -> None:
                num_cut.append(name)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                for name in ("_close_current", "_fail"):
                    patch.setattr(Backward, name, partial(cut, name))
                patch.setattr("sys.unraisablehook", lambda error: None)  # pytest's keeps the error, and its frames
                with pytest.raises(KeyboardInterrupt) as raised:
                    square(model, inputs(0, model)).backward()
                kept.append(raised.value)  # with its frames, as the last error of a notebook
            assert num_cut == ["_close_current", "_fail"]
            assert streamer._gate.mode is StepState.BACKWARD
            model.zero_grad()
            steps = partial(trained, model, 1), partial(trained, plain, 1)
            assert_equal(*(in_thread(step) if is_elsewhere else step() for step in steps))
            assert streamer._gate.mode is StepState.IDLE


def in_thread(work: Callable[[], Any]) -> Any:
    found, errors = [], list[BaseException]()

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a hang"
    if errors:
        raise errors[0]
    return found[0]


class _Nested(torch.autograd.Function):
    """Runs a backward pass inside of its own; more than 60 inside of each other go to other threads of autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, work: Callable[[], None]) -> torch.Tensor:
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.depth == 0:
            ctx.work()
        else:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                _Nested.apply(x, ctx.depth - 1, ctx.work).backward()
        return grad, None, None


def in_pool(work: Callable[[], None]) -> None:
    _Nested.apply(torch.ones(1, requires_grad=True), 70, work).backward()


@pytest.mark.few(3)
@recomputes
@pytest.mark.parametrize("run", [in_thread, in_pool])
def test_passes_in_other_threads(recompute: Recompute, run: Callable[[Callable[[], None]], None]) -> None:
    plain, model, threads = net(recompute), net(recompute), set[int]()

    def step(each: Net, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        each.zero_grad()
        loss = square(each, inputs(seed, each))

        def work() -> None:
            threads.add(threading.get_ident())
            loss.backward()

        run(work)
        return gradients(each)

    with offloaded(model):
        for seed in range(3):
            assert_equal(step(model, seed), step(plain, seed))
    assert threads != {threading.get_ident()}


def test_a_forward_of_another_thread_waits_for_the_pass() -> None:
    plain, model = net(), net()
    plain.eval()
    x, outputs, threads = inputs(5, plain).detach(), list[torch.Tensor](), list[threading.Thread]()

    def forward() -> None:
        with torch.no_grad():
            outputs.append(model(x))

    def begin(grad: torch.Tensor) -> None:
        threads.append(threading.Thread(target=forward))
        threads[-1].start()
        threads[-1].join(0.2)
        assert not outputs, "the pass has the turn"

    with offloaded(model):
        trained(model, 1), trained(plain.train(), 1)
        model.eval(), plain.eval()
        for seed in range(3):
            for each in (model, plain):
                hook = each.blocks[2].query.up.weight.register_hook(begin) if each is model else None
                each.zero_grad()
                square(each, inputs(seed, each)).backward()
                if hook is not None:
                    hook.remove()
            threads[-1].join(60)
            with torch.no_grad():
                assert torch.equal(outputs.pop(), plain(x))
            assert_equal(gradients(model), gradients(plain))


def test_two_passes_at_once_in_two_threads() -> None:
    """The second waits for the end of the first."""
    plain, model = net(), net()
    losses = {}
    with offloaded(model):
        for each in (model, plain):
            trained(each, 1)
            losses[each] = [square(each.eval(), inputs(seed, each)) for seed in range(2)]
        barrier = threading.Barrier(2)
        found: dict[int, Any] = {}

        def work(index: int) -> None:
            barrier.wait()
            found[index] = torch.autograd.grad(losses[model][index], adapters(model))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for index in range(2):
            assert_equal([*found[index]], [*torch.autograd.grad(losses[plain][index], adapters(plain))])


def directly(work: Callable[[], None]) -> None:
    work()


@pytest.mark.parametrize("run", [directly, in_pool])
def test_a_pass_inside_of_a_forward(run: Callable[[Callable[[], None]], None]) -> None:
    """As on a GPU, it may run in a thread of autograd, while the forward has the turn and waits."""

    class Inner(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: list[torch.Tensor] = []
            with torch.enable_grad():
                y = super().forward(x.detach().requires_grad_()).sum()
                run(lambda: found.extend(torch.autograd.grad(y, self.blocks[0].query.up.weight)))
            return super().forward(x) * found[0].sum()

    plain, model = net(), net()
    plain.__class__ = model.__class__ = Inner
    wanted = trained(plain, 2)
    with offloaded(model):
        assert_equal(trained(model, 2), wanted)


@pytest.mark.parametrize("change", ["remove", "switch"])
def test_a_change_between_a_forward_and_its_backward(change: str) -> None:
    plain, model = net(), net()
    with offloaded(model) as streamer:
        trained(model, 2), trained(plain, 2)
        x = inputs(0, model)
        loss = square(model, x)
        if change == "remove":
            streamer.remove()
            with pytest.raises(OffloadError, match=r"remove\(\) was called, between a forward and its backward"):
                loss.backward()
        else:
            with pytest.raises(OffloadError, match="the graph of a forward is alive"):
                streamer.switch(streamer.plan)
            loss.backward()
            for block in model.blocks:
                block.stored = None  # its graph is alive, too
            streamer.switch(streamer.plan)
        model.zero_grad()
        plain.zero_grad()
        assert_equal(trained(model, 1), trained(plain, 1))


class _KeepingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.stored = Keeps.apply(x, self.query.base.weight)
        return output if self.hides else output + self.stored

    hides = False


@pytest.mark.few(3)
@pytest.mark.parametrize(("hides", "share"), [(False, 0.5), (True, 0.5), (True, 0.9)])
@pytest.mark.parametrize("way", [square, only_stored])
def test_nodes_that_keep_weights_without_saving_them(way: Any, hides: bool, share: float) -> None:
    """Those that only a stored tensor leads to are found in the first step: their units stay on the device."""
    plain, model = net(), net()
    for block in (*plain.blocks[2:], *model.blocks[2:]):
        block.__class__ = _KeepingBlock
        block.hides = hides
    with offloaded(model, share) as streamer:
        assert_equal(trained(model, 3, way), trained(plain, 3, way))
        staying = {f"blocks.{i}.query.base.weight" for i in (2, 3, 4)}
        assert (staying <= streamer.plan.resident) == (hides and share > 0.5)


def test_a_read_of_a_closed_unit_in_the_first_pass_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, before = net(), net(), is_in_torch_dispatch_mode()
    with offloaded(model, 0.6) as streamer:
        with monkeypatch.context() as patch:
            patch.setattr(Backward, "_enter", lambda *_: None)
            with pytest.raises(OffloadError, match=r"blocks\.4\S* reads weights of blocks\.4\S*, which is closed"):
                square(model, inputs(0, model)).backward()
        assert is_in_torch_dispatch_mode() == before, "torch.compile would skip everything"
        model.zero_grad()
        assert_equal(trained(model, 2), trained(plain, 2))
        assert streamer._learning._to_stay


def test_a_pass_inside_of_step_is_refused() -> None:
    plain, model = net(), net()
    with offloaded(model) as streamer:
        trained(model, 2), trained(plain, 2)
        model.eval(), plain.eval()
        with torch.no_grad():
            model(inputs(0, model))
        loss = square(model, inputs(0, model))
        with streamer.step(), pytest.raises(OffloadError, match=r"inside of its step\(\)"):
            loss.backward()
        losses = [square(each, inputs(0, each)) for each in (model, plain)]
        for each in (model, plain):
            each.zero_grad()
        torch.stack(losses).sum().backward()
        assert_equal(gradients(model), gradients(plain))


def test_second_derivatives_are_refused() -> None:
    model = net()
    with offloaded(model):
        x = inputs(0, model)
        with pytest.raises(OffloadError, match="second derivatives"):
            torch.autograd.grad(square(model, x), x, create_graph=True)
        square(model, x).backward()


def test_a_streamed_weight_that_is_trained_is_refused_by_name() -> None:
    model = net()
    with offloaded(model):
        model.requires_grad_(True)
        with pytest.raises(OffloadError, match=r"blocks\.4\.\S+ is trained \(requires_grad\) and streams") as error:
            square(model, inputs(0, model)).backward()
        assert "requires_grad_(False)" in str(error.value)
        assert "stay on the device" in str(error.value)


def test_a_saved_tensor_that_was_changed_is_refused_as_by_torch() -> None:
    model = net()
    with offloaded(model):
        loss = square(model, inputs(0, model))
        with torch.no_grad():
            model.blocks[1].query.up.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_weight_that_is_unfrozen_later_stays_on_the_device_from_then_on() -> None:
    plain, model = net(), net()
    with offloaded(model) as streamer:
        trained(model, 2), trained(plain, 2)
        for each in (model, plain):
            each.blocks[1].norm.requires_grad_(True)
            each.zero_grad()
        assert_equal(trained(model, 2), trained(plain, 2))
        assert {"blocks.1.norm.weight", "blocks.1.norm.bias"} <= streamer.plan.resident


def test_nothing_of_a_graph_is_kept_alive() -> None:
    model = net()
    with offloaded(model) as streamer:
        loss = square(model, inputs(0, model))
        assert streamer._installed.graphs_alive
        loss.backward()
        del loss
        for block in model.blocks:
            block.stored = None
        assert not streamer._installed.graphs_alive
        assert not any(unit.num_views() for unit in streamer._binding.units)
        assert isinstance(streamer, weightstream.Streamer)
