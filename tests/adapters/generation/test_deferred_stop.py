"""A text whose end is checked one step late ends at the same token, with the same random state afterwards."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weightstream
from fake_cuda import FakeCuda
from generating import MODELS, STATIC
from models import randomise

transformers = pytest.importorskip("transformers")

from transformers.generation import utils  # noqa: E402

from weightstream.adapters.generation import deferred_stop, generation  # noqa: E402
from weightstream.adapters.generation.generation import decode_with  # noqa: E402

MANY = 24


class Event:
    """Pretend that the CPU has events. It is never late."""

    def __init__(self, device: Any = None, *, blocking: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_stop, "_has_events", lambda device: True)
    monkeypatch.setattr(torch, "Event", Event)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest) -> Any:
    return randomise(transformers.AutoModelForCausalLM.from_config(MODELS[request.param]()), seed=11)


@pytest.fixture(scope="module")
def llama() -> Any:
    return randomise(transformers.AutoModelForCausalLM.from_config(MODELS["llama"]()), seed=11)


def prompt(rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, 5), generator=torch.Generator().manual_seed(5))


def drawn(run: Any) -> tuple[Any, torch.Tensor]:
    """The result of `run`, and random numbers drawn afterwards."""
    torch.manual_seed(3)
    return run(), torch.rand(4)


def ending(model: Any, at: int, rows: int = 1, **more: Any) -> dict[str, Any]:
    """Options with which the first text ends at that token at the latest."""
    options = {"max_new_tokens": MANY, "pad_token_id": 0, "eos_token_id": None} | more
    (ids, *_), _ = drawn(lambda: model.generate(prompt(rows), **options, **STATIC))
    return options | {"eos_token_id": int(ids[4 + at])}


SAMPLED = {"do_sample": True, "temperature": 1.5}
GREEDY = {"do_sample": False, "repetition_penalty": 2.0}


@pytest.mark.few(2)
@pytest.mark.parametrize("at", [1, 2, 3, 10])
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_text_that_ends_early(model: Any, how: dict[str, Any], at: int) -> None:
    options = ending(model, at, **how)
    want, drawn_then = drawn(lambda: model.generate(prompt(), **options, **STATIC))
    cuda = FakeCuda()
    (got, decoding), drawn_now = drawn(lambda: decode_with(model, prompt(), options, cuda.recorder))
    assert got.shape[1] <= 5 + at < 5 + MANY
    assert torch.equal(got, want)
    assert torch.equal(drawn_now, drawn_then)
    steps = got.shape[1] - 5 - 1  # after the prompt; the first step is watched
    if "llama" in model.config.model_type:
        assert decoding.replays == (steps if steps > 1 else 0)  # one more than plain steps, once they are replayed
    assert cuda.replays == decoding.replays


@pytest.mark.few(1)
def test_texts_that_end_at_different_tokens(model: Any) -> None:
    options = ending(model, 6, rows=3, **SAMPLED)
    want, drawn_then = drawn(lambda: model.generate(prompt(3), **options, **STATIC))
    (got, _), drawn_now = drawn(lambda: decode_with(model, prompt(3), options, FakeCuda().recorder))
    assert torch.equal(got, want)
    assert torch.equal(drawn_now, drawn_then)


@pytest.mark.few(1)
def test_a_text_of_maximum_length_takes_no_extra_step(model: Any) -> None:
    options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, **SAMPLED}
    want, drawn_then = drawn(lambda: model.generate(prompt(), **options, **STATIC))
    (got, decoding), drawn_now = drawn(lambda: decode_with(model, prompt(), options, FakeCuda().recorder))
    assert torch.equal(got, want)
    assert torch.equal(drawn_now, drawn_then)
    assert decoding.replays == 6 - 1 - 1


class Tokens:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.steps: list[int] = []

    def put(self, ids: torch.Tensor) -> None:
        self.ids += ids.flatten().tolist()

    def end(self) -> None:
        self.ids.append(-1)


def test_the_callers_code_sees_each_token_at_once_and_no_extra_one(llama: Any) -> None:
    options = ending(llama, 10, **GREEDY)
    want = llama.generate(prompt(), **options, **STATIC)
    lengths: list[int] = []
    tokens = Tokens()

    def seen(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return scores

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        lengths.append(len(ids))
        return list(range(128))

    def stops(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        lengths.append(ids.shape[1] - 1)
        return torch.tensor([False])

    calls: list[dict[str, Any]] = [
        {"streamer": tokens},
        {"logits_processor": transformers.LogitsProcessorList([seen])},
        {"prefix_allowed_tokens_fn": allowed},
        {"stopping_criteria": transformers.StoppingCriteriaList([stops])},
    ]
    for more in calls:
        lengths.clear()
        cuda = FakeCuda()
        got, _ = decode_with(llama, prompt(), options | more, cuda.recorder)
        assert torch.equal(got, want)
        assert cuda.replays == got.shape[1] - 5 - 1 - 1, more
        assert lengths == ([] if "streamer" in more else list(range(5, got.shape[1]))), more
    assert tokens.ids == [*want[0].tolist(), -1]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_eager_steps_include_no_extra_step(name: str) -> None:
    """The caller's hooks see each step."""
    config = MODELS[name]()
    config._attn_implementation = "eager"  # with it, the layers of Gemma 2 run the operator that is refused
    model = randomise(transformers.AutoModelForCausalLM.from_config(config), seed=11)
    options = ending(model, 10, **SAMPLED)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    want, drawn_then = drawn(lambda: model.generate(prompt(), **options, **STATIC))
    plain, refused = len(seen), "aten.tanh" if name == "gemma2" else "aten.silu"
    seen.clear()
    (got, decoding), drawn_now = drawn(
        lambda: decode_with(model, prompt(), options, FakeCuda(refused=refused).recorder)
    )
    assert torch.equal(got, want)
    assert torch.equal(drawn_now, drawn_then)
    assert "capture failed" in (decoding.reason or "")
    assert len(seen) == plain


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_seeds_set_meanwhile_by_other_code_stay(
    llama: Any, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a greedy text at any time; otherwise after the extra step has drawn."""
    options = ending(llama, 10, **how)
    cuda = FakeCuda()
    if how is GREEDY:
        replay = cuda.recorder.replay
        recorder = cuda.recorder._replace(replay=lambda graph: (replay(graph), torch.manual_seed(77))[0])
    else:
        recorder = cuda.recorder
        monkeypatch.setattr(Event, "synchronize", lambda self: torch.manual_seed(77))
    decode_with(llama, prompt(), options, recorder)
    found = torch.rand(4)
    torch.manual_seed(77)
    assert torch.equal(found, torch.rand(4))


def test_a_returned_cache_has_no_extra_token(llama: Any) -> None:
    options = ending(llama, 10, **GREEDY) | {"return_dict_in_generate": True, "output_logits": True}
    want = llama.generate(prompt(), **options, **STATIC)
    got, decoding = decode_with(llama, prompt(), options, FakeCuda().recorder)
    assert torch.equal(got.sequences, want.sequences)
    assert torch.equal(torch.stack(got.logits), torch.stack(want.logits))
    assert decoding.replays == len(got.logits) - 1 - 1
    for ours, theirs in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length())


@pytest.mark.few(1)
@pytest.mark.parametrize("is_long", [False, True])
def test_no_long_step_is_discarded(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomise(transformers.AutoModelForCausalLM.from_config(MODELS["llama"]()), seed=11)
    options = ending(model, 10, **GREEDY)
    want = model.generate(prompt(), **options, **STATIC)
    streamer = weightstream.offload(model, device="cpu", device_budget="200KiB")
    assert streamer.plan.graph_s > 0
    monkeypatch.setattr(generation, "_SPARE_S", streamer.plan.graph_s * (0.5 if is_long else 2))
    lates: list[bool] = []
    wanted = deferred_stop.a_step_late
    monkeypatch.setattr(deferred_stop, "a_step_late", lambda *a, **kw: (lates.append(True), wanted(*a, **kw))[1])
    model.generate(prompt(), max_new_tokens=2)  # shows the order of units
    got, _ = decode_with(model, prompt(), options, FakeCuda(refused="aten.silu").recorder)  # its graphs open no unit
    assert torch.equal(got, want)
    assert lates == [True] * (not is_long)
    streamer.remove()


def test_ranks_take_the_extra_step_only_together(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Ranks:
        def least(self, number: int) -> int:
            asked.append(number)
            return min(number, len(asked) > 1 and number)  # the other rank has a long step

        def common(self, reason: str | None) -> str | None:
            return reason

    monkeypatch.setattr(generation, "ranks_of", lambda model: Ranks())
    options = ending(llama, 10, **GREEDY)
    want = llama.generate(prompt(), **options, **STATIC)
    got, decoding = decode_with(llama, prompt(), options, FakeCuda().recorder)
    assert torch.equal(got, want)
    assert asked[0] is True
    assert decoding.replays == got.shape[1] - 5 - 1 - 1


def late() -> Any:
    return deferred_stop.a_step_late(lambda: True, draws=False)


def is_late() -> bool:
    return bool(utils.DeferredStopCheck.is_supported(torch.device("cuda"), None, False, is_assistant=False))


def test_the_patch_affects_one_thread_and_is_restored() -> None:
    before = utils.DeferredStopCheck
    elsewhere: list[bool] = []
    is_inside, may_end = threading.Event(), threading.Event()

    def another() -> None:
        elsewhere.append(is_late())
        with late():  # which ends after the first
            elsewhere.append(is_late())
            is_inside.set()
            may_end.wait(60)

    thread = threading.Thread(target=another)
    with late():
        thread.start()
        assert is_inside.wait(60)
        assert (is_late(), elsewhere) == (True, [False, True])
    assert utils.DeferredStopCheck is not before
    assert not is_late()
    may_end.set()
    thread.join()
    assert utils.DeferredStopCheck is before
    assert not is_late()
    with pytest.raises(ZeroDivisionError), late():
        _ = 1 / 0
    assert utils.DeferredStopCheck is before


def test_a_device_without_events_and_a_transformers_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with late():
        assert is_late()
        assert not utils.DeferredStopCheck.is_supported(torch.device("cpu"), None, False, is_assistant=False)
    monkeypatch.delattr(utils, deferred_stop.NAME)
    with late():
        assert not hasattr(utils, deferred_stop.NAME)


def test_whether_an_extra_step_is_allowed() -> None:
    def model(graph_s: float | None = None, **settings: Any) -> Any:
        found = SimpleNamespace(generation_config=transformers.GenerationConfig(**settings))
        if graph_s is not None:
            found.weightstream = SimpleNamespace(plan=SimpleNamespace(graph_s=graph_s))
        return found

    may = generation._may_spare_a_step
    assert may(model(), {"streamer": None, "generation_config": transformers.GenerationConfig()})
    assert may(model(0.2), {})
    assert not may(model(0.21), {})
    for name in ("streamer", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn"):
        assert not may(model(), {name: []})
    settings: dict[str, Any] = {"return_dict_in_generate": True}
    assert not may(model(), settings)
    assert not may(model(), {"generation_config": transformers.GenerationConfig(**settings)})
    assert not may(model(**settings), {})
