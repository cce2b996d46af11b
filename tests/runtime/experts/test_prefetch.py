"""Prefetch: rows that the next layer's router is predicted to choose are fetched early, and change no bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from expert_rig import (
    CONFIGS,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_PICKING,
    TOP_K,
    built,
    caches,
    experts_of,
    generated,
    held,
    prompt,
    same,
)
from models import cache_name
from weightstream.adapters.modules import moe as adapter
from weightstream.runtime.devices.backend import Side
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.experts.prefetch import Ahead
from weightstream.runtime.experts.slot_cache import Lru

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("nothing_foreseen")

SLOTS, NEW = 5, 24  # of 8 experts, of which a token uses two
ROW_NBYTES = 2 * 3 * 64 * 64  # bfloat16, of up, gate and down


@torch.no_grad()
def alike(name: str) -> Any:
    """A mixture whose tokens use different experts, and whose layers use nearly the same: all route by one matrix,
    and add
    little to the states."""
    model = built(name)
    scale = torch.randn(NUM_EXPERTS, 64, generator=torch.Generator().manual_seed(1))
    for key, parameter in model.named_parameters():
        if key.endswith(("router.weight", "gate.weight")) and parameter.shape == scale.shape:
            parameter.copy_(scale)
        elif "layernorm" in key:
            parameter.fill_(1.0)
        elif any(f".{kind}_proj" in key for kind in ("down", "o")):
            parameter.mul_(0.02)
        elif key.endswith("router.bias"):
            parameter.zero_()
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.zero_()
    return model


def guessing(model: Any) -> list[bool]:
    """For each unit that picks rows, whether its block prefetched the ids of a call."""
    return [unit.picks.guesses for unit in model.weightstream._modules.units if unit.picks is not None]


@torch.no_grad()
def decoded(model: Any, num: int = 40) -> list[torch.Tensor]:
    """The logits of different tokens, one by one."""
    caching = {cache_name(model): transformers.DynamicCache(config=model.config), "use_cache": True}
    found = []
    for token in range(num):
        ids = torch.tensor([[3 + 37 * token % 125]])
        found.append(model(ids, **caching).logits.clone())
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_equal_the_plain_ones_and_some_predictions_are_right(name: str) -> None:
    model, num = alike(name), NUM_PICKING.get(name, NUM_LAYERS)
    wanted = decoded(model)
    with held(model, "cached", SLOTS, ahead=2) as streamer:
        decoded(model, 2)  # the first step is watched, and reads whole stacks
        begun = streamer.stats().experts
        assert same(decoded(model), wanted)
        assert guessing(model) == [True] * num
        found, fetched, nbytes, ahead, used = (b - a for a, b in zip(begun, streamer.stats().experts, strict=True))
        assert used > 0.7 * ahead > 0.1 * TOP_K * num * len(wanted)
        assert found + fetched == len(wanted) * num * TOP_K
        assert nbytes == (fetched + ahead) * ROW_NBYTES
        assert [cache.counts().ahead > 0 for cache in caches(streamer)] == [False, *[True] * (num - 1)]


def test_batches_in_waves_prefetch_too() -> None:
    model, ids = built(), prompt(3, 4)
    wanted = generated(model, ids, NEW)
    with held(model, "cached", SLOTS, ahead=3) as streamer:
        assert same(generated(model, ids, NEW), wanted)
        assert streamer.stats().experts.ahead > 0


@torch.no_grad()
def test_a_prediction_is_the_next_routers_choice_for_the_current_states() -> None:
    model = built()
    blocks = [layer.mlp for layer in model.model.layers]
    states = torch.randn(3, 64, dtype=torch.bfloat16)
    for block in blocks:
        picks = adapter.picks_of(block.experts, block)
        assert picks is not None
        assert picks.guesses is False, "no call has been compared yet"
        _, _, ids = block.gate(states)
        found = picks.guess(states)
        assert found is not None
        assert torch.equal(found, ids)
    alone = adapter.picks_of(blocks[0].experts)
    assert alone is not None
    assert alone.guess(states) is None


class Calls(TorchDispatchMode):
    """Records the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_a_mode_that_watches_a_step_sees_no_prefetch_and_no_wait() -> None:
    """Code that captures steps looks for operators that wait for the device. The trial of a prediction does so,
    once."""
    model, counted = built(), []
    with held(model, "cached", SLOTS, ahead=2):
        decoded(model, 1)
        for _ in range(2):
            with Calls() as calls:
                decoded(model, 1)
            counted.append(calls.names)
        assert guessing(model) == [True] * NUM_LAYERS
    for names in counted:
        assert not [name for name in names if "_local_scalar_dense" in name]
        assert sum("topk" in name for name in names) == NUM_LAYERS


def test_hooks_of_the_router_see_no_prediction() -> None:
    model, calls = built(), [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(count)
    with held(model, "cached", SLOTS, ahead=2) as streamer:
        generated(model, prompt(2), NEW)
        assert streamer.stats().experts.ahead > 0
        assert calls[0] == NEW * NUM_LAYERS


def other_ids(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, ids, scores = args
    return hidden, (ids + 1) % 8, scores


def test_experts_that_get_other_ids_than_their_block_chooses_are_not_prefetched() -> None:
    model = built()
    for experts in experts_of(model)[1:]:
        experts.register_forward_pre_hook(other_ids)
    wanted = generated(model, prompt(2), NEW)
    with held(model, "cached", SLOTS, ahead=2) as streamer:
        assert same(generated(model, prompt(2), NEW), wanted)
        assert guessing(model) == [True, False, False]
        assert streamer.stats().experts.ahead == 0


def test_a_block_that_cannot_run_without_its_experts_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    block = type(model.model.layers[0].mlp)
    forward = block.forward

    def reads_experts(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        assert self.experts.down_proj is not None
        return forward(self, hidden)

    monkeypatch.setattr(block, "forward", reads_experts)
    wanted = generated(model, prompt(2), NEW)
    with held(model, "cached", SLOTS, ahead=2) as streamer:
        assert same(generated(model, prompt(2), NEW), wanted)
        assert guessing(model) == [False] * NUM_LAYERS
        assert streamer.stats().experts.ahead == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_plan_sets_the_number_of_prefetched_rows(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, numbers = built(), []
    guess = Lru.guess

    def spied(self: Lru, rows: list[int], most: int) -> list[tuple[int, int]]:
        numbers.append(most)
        return guess(self, rows, most)

    monkeypatch.setattr(Lru, "guess", spied)
    with held(model, "cached", SLOTS, ahead=ahead):
        generated(model, prompt(2), NEW)
    assert set(numbers) == ({1} if ahead else set())
    assert len(numbers) >= ahead * (NUM_LAYERS - 1) * (NEW - 3)


def test_an_expert_written_after_its_prefetch_is_fetched_again() -> None:
    """The update comes between the prediction for a layer and its forward."""
    model, other = built(), built()

    def write(_: Any, args: Any) -> None:
        if args[0].shape[1] == 1:
            with torch.no_grad():
                model.model.layers[1].mlp.experts.down_proj.mul_(1.5)

    def write_plain(_: Any, args: Any) -> None:
        if args[0].shape[1] == 1:
            with torch.no_grad():
                other.model.layers[1].mlp.experts.down_proj.mul_(1.5)

    model.model.layers[1].register_forward_pre_hook(write)
    other.model.layers[1].register_forward_pre_hook(write_plain)
    wanted = generated(other, prompt(2), 8)
    with held(model, "cached", SLOTS, ahead=2) as streamer:
        assert same(generated(model, prompt(2), 8), wanted)
        assert streamer.stats().experts.ahead > 0


def test_a_block_in_training_predicts_nothing() -> None:
    """In training, blocks of Mixtral, MiniMax and Phi-MoE multiply their input states by noise."""
    model, ids = built("mixtral", router_jitter_noise=0.25).train(), prompt(2)
    torch.manual_seed(1)
    wanted = decoded(model, 8)
    with held(model, "cached", SLOTS, ahead=2) as streamer:
        decoded(model, 2)
        torch.manual_seed(1)
        assert same(decoded(model, 8), wanted)
        assert streamer.stats().experts.ahead == 0
        model.eval()
        generated(model, ids, NEW)
        assert streamer.stats().experts.ahead > 0


def test_under_autocast_nothing_is_prefetched() -> None:
    """Autocast caches the cast of a router, and the router itself would use the cached cast before it is computed."""
    model = alike("qwen3_moe")
    with held(model, "cached", SLOTS, ahead=2) as streamer:
        decoded(model, 4)
        before = streamer.stats().experts.ahead
        with torch.autocast("cpu", dtype=torch.bfloat16):
            decoded(model, 8)
        assert streamer.stats().experts.ahead == before > 0
        decoded(model, 8)
        assert streamer.stats().experts.ahead > before


def test_the_first_step_after_a_change_of_plan_prefetches_too() -> None:
    model = alike("qwen3_moe")
    with held(model, "cached", SLOTS, ahead=2) as streamer:
        decoded(model, 8)
        streamer.switch(replace(streamer.plan, ahead=1))
        before, numbers = streamer.stats().experts.ahead, []
        for unit in streamer._binding.units:
            if unit.rows is not None and unit.rows.cache is not None:
                fetch = unit.rows.cache.fetch_ahead
                unit.rows.cache.fetch_ahead = lambda *args, fetch=fetch: (numbers.append(args[1]), fetch(*args))  # type: ignore[method-assign]
        decoded(model, 1)
        assert numbers == [1] * (NUM_LAYERS - 1)
        assert streamer.stats().experts.ahead >= before


def test_no_state_of_a_prediction_is_kept_alive() -> None:
    block = built().model.layers[0].mlp
    picks = adapter.picks_of(block.experts, block)
    assert picks is not None
    gc.collect()
    gc.disable()
    try:
        for width, is_guessed in ((64, True), (63, False)):
            block.gate._parameters["weight"] = torch.nn.Parameter(torch.randn(8, width, dtype=torch.bfloat16))
            states = torch.randn(3, 64, dtype=torch.bfloat16)
            kept = weakref.ref(states)
            with torch.no_grad():
                assert (picks.guess(states) is not None) is is_guessed
            del states
            assert kept() is None
    finally:
        gc.enable()


class Graph:
    """Arguments of a capture."""


@torch.no_grad()
def test_a_capture_that_ends_between_two_layers_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, inside = alike("qwen3_moe"), torch.tensor([[5]]), [False]

    @contextmanager
    def capture(_: Any, **__: Any) -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    with held(model, "cached", SLOTS, ahead=2) as streamer:
        decoded(model, 3)
        with streamer.step():
            backend, ahead = streamer._backend, streamer._binding.ahead
            monkeypatch.setattr(backend, "capture", capture)
            monkeypatch.setattr(backend, "capturing", lambda: inside[0])
            with streamer.capture(Graph()):
                states = model.model.embed_tokens(ids)
                places = model.model.rotary_emb(states, torch.zeros(1, 1, dtype=torch.long))
                model.model.layers[0](states, position_embeddings=places)
                assert ahead._running is not None
                assert ahead._running[1].shape == (1, 64), "the states are kept until the join"
            assert ahead._running is None


# -- order -------------------------------------------------------------------------------------------------------------


class Log(CpuBackend):
    """A device that logs its calls, and captures."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, Any]] = []
        self.number = 0
        self.captures = True

    def capturing(self) -> bool:
        return self.captures

    def edge(self) -> Any:
        self.number += 1
        return self.number

    def record(self, side: Side, event: Any) -> None:
        self.log.append((f"{side.value} records", event))

    def wait(self, side: Side, event: Any) -> None:
        self.log.append((f"{side.value} waits", event))

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.log.append(("aside", None))
        yield
        self.log.append(("compute", None))


class Picking:
    """A unit that picks rows, with ids from its argument."""

    guesses = True

    def __init__(self, log: Log) -> None:
        self.log = log

    def forward(self, *_: Any) -> None:
        self.log.log.append(("forward", None))

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        return states

    cache = property(lambda self: self)

    def fetch_ahead(self, ids: torch.Tensor, most: int) -> None:
        self.log.log.append((f"fetch {most}", ids.tolist()))


def test_compute_waits_when_the_next_unit_requests_rows() -> None:
    log = Log()
    units: list[Any] = [Picking(log) for _ in range(3)]
    ahead = Ahead(log, 2, {2 * index: unit for index, unit in enumerate(units)}, lambda index: units[index // 2])

    def reach(index: int) -> None:
        ahead.reach(index, (None, None, None), units[index // 2])

    reach(0)
    units[0].look_ahead(torch.tensor([[3, 1]]))
    assert log.log[1:] == [
        ("compute records", 1),
        ("ahead waits", 1),
        ("aside", None),
        ("fetch 2", [3, 1]),
        ("ahead records", 2),
        ("compute", None),
    ]
    log.log.clear()
    reach(2)
    assert log.log == [("compute waits", 2), ("forward", None)]
    log.log.clear()
    reach(4)
    units[2].look_ahead(torch.tensor([[3, 1]]))
    assert log.log == [("forward", None)], "no unit follows the last one"
    reach(0)
    units[0].look_ahead(torch.tensor([[3, 1]]))
    ahead.join()
    assert log.log[-1] == ("compute waits", 4), "the capture joins the copies at its end"
    log.log.clear()
    units[0].look_ahead(torch.tensor([[3, 1]]))
    ahead.drop()
    ahead.join()
    assert log.log[-1] == ("compute", None), "nothing waits for a fetch of a failed capture"
    log.captures = False
    units[0].look_ahead(torch.tensor([[3, 1]]))
    ahead.drop()
    assert log.log[-1] == ("compute waits", 8), "a failed step may be followed by one that uses the slot"
    log.close()
