"""A device that is nearly full, two streamers, two threads, and steps that fail midway. Memory is flat and is
released."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import weightstream
from stack import ALL, Stack, Step, Taught, assert_equal, captured, floats, nbytes, slow, taught, unharmed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 1 << 20
MODES: dict[str, Callable[[Taught], Step]] = {
    "eager": lambda model: model.stack,
    "fixed": lambda model: fixed(model),
    "captured": lambda model: model.captured(),
}


def fixed(model: Taught) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        with model.streamer.step():
            return model.stack(x)

    return step


@pytest.mark.alone
def test_a_device_that_is_nearly_full() -> None:
    """Activations fit only if the allocator gives back its cache: batches of two sizes alternate."""
    with taught(share=0.3, width=1024) as model:
        batches = [floats(model.plain, batch, num=1)[0] for batch in (3000, 4000)]
        want = [model.plain(x) for x in batches]
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        hog = torch.empty(free - 400 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info()[0] < 450 * MIB
        for step in (model.stack, fixed(model)):
            for _ in range(3):
                for x, wanted in zip(batches, want, strict=True):
                    assert torch.equal(step(x), wanted)
            model.assert_equal(step)
        model.assert_equal(model.captured())
        with pytest.raises(torch.OutOfMemoryError):
            model.stack(torch.cat(batches * 4))
        del hog
        torch.cuda.empty_cache()
        with unharmed(model):
            assert torch.equal(model.stack(batches[1]), want[1])


def test_two_streamers_in_turns() -> None:
    with taught(share=0.3) as first, taught(**ALL, depth=5) as second:
        steps = [(model, mode(model)) for mode in MODES.values() for model in (first, second)]
        turns = []
        for inside in (False, True):
            with first.streamer.step() if inside else nullcontext():
                for num in range(4):
                    for model, step in steps:
                        turns.append((step(model.inputs[num]), model.want[num]))
        assert [i for i, (got, want) in enumerate(turns) if not torch.equal(got, want)] == []


@pytest.mark.parametrize("modes", [("eager", "eager"), ("eager", "captured"), ("captured", "fixed")])
def test_two_streamers_in_two_threads(modes: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=200_000)
    with taught(share=0.3) as first, taught(**ALL, depth=5) as second:
        models = (first, second)
        steps = [MODES[mode](model) for mode, model in zip(modes, models, strict=True)]
        torch.cuda.synchronize()

        def run(model: Taught, step: Step) -> None:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                model.assert_equal(step, rounds=30)

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(run, *each) for each in zip(models, steps, strict=True)]:
                done.result()


def test_two_threads_over_one_streamer() -> None:
    with taught(share=0.3) as model:
        step = fixed(model)

        def run() -> list[torch.Tensor]:
            with torch.no_grad():
                return [(step if num % 2 else model.stack)(model.inputs[num % 4]) for num in range(40)]

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(run) for _ in range(2)]:
                assert all(torch.equal(got, model.want[num % 4]) for num, got in enumerate(done.result()))


class Fault:
    """A hook that fails once it is `due`. A capture needs a step that was watched with it."""

    def __init__(self) -> None:
        self.is_due = False

    def __call__(self, *_: Any) -> None:
        if self.is_due:
            raise ZeroDivisionError


@pytest.mark.parametrize("settings", [ALL, {"share": 0.3}], ids=["all", "share"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_fails_midway(mode: str, settings: dict[str, Any]) -> None:
    entering: dict[str, Callable[[Taught], AbstractContextManager[None]]] = {
        "eager": lambda model: nullcontext(),
        "fixed": lambda model: model.streamer.step(),
        "captured": lambda model: model.streamer.capture(torch.cuda.CUDAGraph()),
    }
    with taught(**settings) as model:
        earlier = model.captured()
        for inside in (nullcontext, model.streamer.step):
            with unharmed(model):
                hook = model.stack.blocks[3].up.register_forward_pre_hook(fault := Fault())
                model.stack(model.inputs[0])
                fault.is_due = True
                with inside():
                    with pytest.raises(ZeroDivisionError), entering[mode](model):
                        model.stack(model.inputs[0])
                    hook.remove()
                    model.assert_equal()
                    model.assert_equal(earlier)


def held() -> tuple[int, int]:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize("mode", MODES)
def test_memory_is_flat_from_the_second_step_on(mode: str) -> None:
    with taught(share=0.3) as model:
        step, found = MODES[mode](model), []
        for num in range(10):
            step(model.inputs[num % 4])
            found.append(held())
        assert len(set(found[1:])) == 1, found


@pytest.mark.parametrize("settings", [ALL, {"cpu_offload_gb": 0.05}, {}], ids=["streams", "zero-copy", "share"])
def test_nothing_remains_allocated(settings: dict[str, Any]) -> None:
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # PyTorch's own, one for each stream
        return torch.cuda.memory_allocated()

    inputs = list(torch.randn(2, 3, 512, device="cuda"))
    before = allocated()
    with torch.no_grad():
        stack = Stack(5, 512).eval()
        size = nbytes(stack)
        streamer = weightstream.offload(stack, device="cuda", **settings or {"device_budget": size // 2})
        want = [stack(x) for x in inputs]
        step = captured(streamer, stack, inputs[0])
        assert_equal(step, inputs, want)
        with streamer.step():
            assert_equal(stack, inputs, want)
        assert allocated() > before
        streamer.remove()
        assert {p.device.type for p in stack.parameters()} == {"cpu"}
    del streamer, step, want, stack
    assert allocated() == before
