"""Wherever a call is cut, the calling thread keeps its modes. If tensor classes bypass the guards, an update is
either
applied or an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from cut_rig import language_model, offloaded, simple, striped, thread_state
from cutting import Cut, Lines
from weightstream.errors import OffloadError
from weightstream.runtime.streamer.read_watch import OperatorMode
from weightstream.runtime.tensors.thread_state import ThreadState, quietly, unseen

Act = Callable[[], object]


def loaded() -> tuple[nn.Module, nn.Module, torch.Tensor, Any]:
    model, plain, x = simple(5, codec="compressed")
    return model, plain, x, offloaded(model, codec="compressed")


def offloading() -> Act:
    model, _, _ = simple(5, codec="compressed")
    return lambda: offloaded(model, codec="compressed")


def first_step() -> Act:
    model, _, x, _ = loaded()
    return lambda: model(x)


def fixed_step() -> Act:
    model, _, x, streamer = loaded()
    with torch.no_grad():
        for _ in range(6):
            model(x)

    def act() -> None:
        with streamer.step():
            model(x)

    return act


def reading() -> Act:
    model, _, _, _ = loaded()
    return lambda: [weight.sum() for weight in model.parameters()]


def removing() -> Act:
    return loaded()[3].remove  # type: ignore[no-any-return]


def striped_removal() -> Act:
    found = striped().removal
    assert found is not None
    return found


def cut_as_blocks_end(prepare: Callable[[], Act], seed: int, most: int = 4, share: float = 0.7) -> None:
    """Cut `act` at the ends of up to `most` blocks of the library. It must reach a `share` of them again."""
    before = thread_state()
    prepare()()  # without one-time work
    act = prepare()
    with Lines() as lines:
        act()
    num_cut, visits = 0, random.Random(seed).sample(list(lines.withs.items()), min(most, len(lines.withs)))
    for (path, line), visit in visits:
        act = prepare()
        cut = Lines(visit=(path, line, visit))
        with suppress(Cut), cut:  # some visits depend on times
            act()
        assert thread_state() == before, f"{cut.where}, seed {seed}"
        num_cut += bool(cut.where)
    assert num_cut >= share * len(visits)


def test_a_cut_of_captured_generation_leaves_the_thread_unchanged(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    act = language_model(monkeypatch, "cpu").act
    cut_as_blocks_end(lambda: act, seed, share=0.25)  # after a cut less is captured


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some visits are in finalizers
@pytest.mark.usefixtures("nothing_foreseen")  # it searches all modules of the process, which is slow with a tracer
@pytest.mark.parametrize("prepare", [offloading, first_step, fixed_step, reading, removing, striped_removal])
@pytest.mark.parametrize("grad", [True, False])
def test_a_cut_at_the_end_of_any_block_leaves_the_thread_unchanged(
    prepare: Callable[[], Act], grad: bool, seed: int
) -> None:
    with torch.set_grad_enabled(grad):
        cut_as_blocks_end(prepare, seed)


def test_functions_run_without_class_hooks_and_keep_the_state() -> None:
    @unseen
    def sees(value: int, *, more: int = 0) -> tuple[int, bool]:
        """The current state."""
        return value + more, torch._C._is_torch_function_enabled()

    def fails() -> None:
        raise Cut

    assert sees(1, more=2) == (3, False)
    assert sees.__doc__ == "The current state."
    with pytest.raises(Cut):
        quietly(fails)
    assert torch._C._is_torch_function_enabled()
    with torch._C.DisableTorchFunctionSubclass():
        assert sees(1) == (1, False)
        assert not torch._C._is_torch_function_enabled()


def test_a_state_is_restored_and_later_modes_are_left() -> None:
    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    hooks = torch.autograd.graph.saved_tensors_hooks
    with torch.enable_grad(), OperatorMode(), hooks(lambda t: t, lambda t: t):  # type: ignore[no-untyped-call]
        before, state = thread_state(), ThreadState()
        torch.set_grad_enabled(False)
        torch.set_autocast_cache_enabled(not torch.is_autocast_cache_enabled())
        for mode in (OperatorMode(), Functions(), OperatorMode()):  # type: ignore[no-untyped-call]
            mode.__enter__()
        for _ in range(2):
            hooks(lambda t: t, lambda t: t).__enter__()
        assert thread_state() != before
        state.restore()
        assert thread_state() == before


@pytest.mark.parametrize("change", ["update", "read"])
def test_an_update_that_no_class_sees_is_not_lost_silently(change: str) -> None:
    """It would go to memory that is not decoded yet, and decoding would overwrite it."""
    model, plain, x, streamer = loaded()
    coded = list(streamer.plan.manifest.codes)
    weight = dict(model.named_parameters())[coded[0]]
    with torch.no_grad():
        with torch._C.DisableTorchFunctionSubclass():
            weight.add_(1) if change == "update" else weight.sum()
        if change == "read":
            assert torch.equal(weight.cpu(), dict(plain.named_parameters())[coded[0]]), (
                "zeros before, the true bytes afterwards"
            )
            assert torch.equal(model(x), plain(x))
            return
        for _ in range(2):
            with pytest.raises(OffloadError, match=r"before it was decoded.*Call remove\(\)"):
                model(x)
        streamer.remove()
        assert torch.equal(model(x), plain(x))
