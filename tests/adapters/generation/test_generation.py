"""Captured generation on the CPU, with a graph that records and repeats operators instead of a CUDA graph."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from fake_cuda import DEVICE, FakeCuda, Graph, Lane, Lanes
from generating import MODELS, STATIC, options
from models import cache_name, randomise

transformers = pytest.importorskip("transformers")

from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer  # noqa: E402

from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.generation.generation import decode_with, generate  # noqa: E402
from weightstream.adapters.steps import graph_runner, static_cache  # noqa: E402
from weightstream.adapters.steps.graph_runner import Recorder  # noqa: E402
from weightstream.adapters.tracing.footprint import observe  # noqa: E402
from weightstream.api.multi_gpu import Stripes, stripe  # noqa: E402
from weightstream.errors import ConfigError, OffloadError, PlanError  # noqa: E402
from weightstream.inputs.builder import CallerFacts  # noqa: E402
from weightstream.inputs.gathering import Sketch, sketch_of  # noqa: E402
from weightstream.inputs.machine import machine_elsewhere  # noqa: E402
from weightstream.plan.manifest import Profile, Workload  # noqa: E402
from weightstream.plan.planner_inputs import PlannerInputs  # noqa: E402
from weightstream.runtime.streamer import activation_transfer  # noqa: E402
from weightstream.settings.config import OffloadConfig  # noqa: E402

CACHE = cache_name(transformers.LlamaForCausalLM)


def build(name: str, layers: int = 4) -> Any:
    config = MODELS[name]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model = randomise(transformers.AutoModelForCausalLM.from_config(config), seed=11)
    if name == "qwen3-moe":
        model.set_experts_implementation("batched_mm")  # as transformers decodes on a GPU
    return model


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param, layers=2)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama", layers=2)


def prompt(length: int = 5, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(length))


def captured(
    model: Any, ids: torch.Tensor, cuda: FakeCuda | None = None, **more: Any
) -> tuple[Any, DecodeReport, FakeCuda]:
    cuda = cuda or FakeCuda()
    result, decoding = decode_with(model, ids, options(**more), cuda.recorder)
    return result, decoding, cuda


def is_sliding(model: Any) -> bool:
    return bool(getattr(model.config, "sliding_window", None)) and model.config.model_type != "qwen3_moe"


@pytest.mark.few(1)
def test_tokens_equal_those_of_a_static_cache(model: Any) -> None:
    for ids in (prompt(5), prompt(9)):  # twice, with another length
        want = model.generate(ids, **options(), **STATIC)
        got, decoding, cuda = captured(model, ids)
        assert torch.equal(got, want)
        assert len(set(got[0].tolist())) > 8
        # a window that fills up makes a second graph; the first step of each runs eager
        assert len(cuda.graphs) == (2 if is_sliding(model) else 1)
        assert decoding == DecodeReport(replays=23 - len(cuda.graphs))
        assert cuda.replays == decoding.replays


@pytest.mark.few(1)
def test_sampling_draws_the_same_tokens(model: Any) -> None:
    sampled = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "num_return_sequences": 2}
    torch.manual_seed(5)
    want = model.generate(prompt(), **options(**sampled), **STATIC)
    torch.manual_seed(5)
    got, decoding, _ = captured(model, prompt(), **sampled)
    assert torch.equal(got, want)
    assert not torch.equal(got[0], got[1])
    assert decoding.replays > 15


@pytest.mark.few(1)
def test_logits_and_states_of_all_steps_are_returned(model: Any) -> None:
    kept = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    want = model.generate(prompt(), **options(**kept), **STATIC)
    got, decoding, _ = captured(model, prompt(), **kept)
    assert decoding.replays > 15
    assert torch.equal(torch.stack(got.logits), torch.stack(want.logits))
    for ours, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for ours, theirs in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == 5 + 23


@pytest.mark.few(1)
def test_left_padding(model: Any) -> None:
    ids = prompt(6, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :1] = 0
    want = model.generate(ids, attention_mask=mask, **options(), **STATIC)
    got, decoding, _ = captured(model, ids, attention_mask=mask)
    assert torch.equal(got, want)
    assert decoding.replays > 15


def test_a_prompt_of_one_token(llama: Any) -> None:
    want = llama.generate(prompt(1), **options(), **STATIC)
    got, decoding, _ = captured(llama, prompt(1))
    assert torch.equal(got, want)
    assert decoding.replays == 22


def test_streamers_and_criteria_see_every_token(llama: Any) -> None:
    class Tokens:
        def __init__(self) -> None:
            self.ids: list[int] = []

        def put(self, ids: torch.Tensor) -> None:
            self.ids += ids.flatten().tolist()

        def end(self) -> None:
            self.ids.append(-1)

    tokens = Tokens()
    stop = transformers.StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 15])])
    want = llama.generate(prompt(), **options(), stopping_criteria=stop, **STATIC)
    got, _, cuda = captured(llama, prompt(), streamer=tokens, stopping_criteria=stop)
    assert torch.equal(got, want)
    assert got.shape[1] == 15
    assert tokens.ids == [*got[0].tolist(), -1]
    assert cuda.replays == 15 - 5 - 1 - 1


def test_a_generation_config_is_used_and_not_changed(llama: Any) -> None:
    config = transformers.GenerationConfig(max_new_tokens=9, min_new_tokens=9, repetition_penalty=1.7, pad_token_id=0)
    want = llama.generate(prompt(), generation_config=config)
    cuda = FakeCuda()
    got, decoding = decode_with(llama, prompt(), {"generation_config": config}, cuda.recorder)
    assert got.shape == want.shape
    assert decoding.replays == 7
    assert config.cache_implementation is None


def test_ids_may_be_a_keyword(llama: Any) -> None:
    want = llama.generate(prompt(), **options(), **STATIC)
    got, decoding = decode_with(llama, None, options(input_ids=prompt()), FakeCuda().recorder)
    assert torch.equal(got, want)
    assert decoding.replays == 22


@pytest.mark.parametrize("fails", [False, True])
def test_forward_is_restored(fails: bool) -> None:
    llama = build("llama")
    for patched in (None, llama.forward):
        if patched is not None:
            llama.forward = patched
        before = dict(llama.__dict__)
        signatures = []

        def look(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            signatures.append(inspect.signature(llama.forward))  # noqa: B023
            if fails:
                raise KeyError("of the caller")
            return torch.tensor([False])

        criteria = transformers.StoppingCriteriaList([look])
        if fails:
            with pytest.raises(KeyError, match="of the caller"):
                captured(llama, prompt(), stopping_criteria=criteria)
        else:
            captured(llama, prompt(), stopping_criteria=criteria)
        assert set(signatures) == {inspect.signature(type(llama).forward.__get__(llama))}
        after = {name: value for name, value in llama.__dict__.items() if name != "_previous_max_cache_length"}
        assert after == {name: value for name, value in before.items() if name != "_previous_max_cache_length"}
        assert llama.__dict__.get("forward") is patched


# -- what runs eager ------------------------------------------------------------------------------------------------


def test_without_cuda_it_calls_generate(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    found: list[DecodeReport] = []
    want = llama.generate(prompt(), **options())
    with caplog.at_level(logging.INFO, "weightstream"):
        assert torch.equal(generate(llama, prompt(), **options()), want)
        assert caplog.record_tuples == [
            ("weightstream", logging.INFO, "generate: eager (graphs are captured on CUDA, and the model is on cpu)")
        ]
        assert torch.equal(generate(llama, prompt(), on_decoding=found.append, **options()), want)
    assert len(caplog.records) == 1
    assert found == [DecodeReport(reason="graphs are captured on CUDA, and the model is on cpu")]


@pytest.mark.parametrize(
    ("inputs", "remedy"), [("a text", "tokenizer"), ({"input_ids": 1}, "keywords"), ([1, 2], "shape")]
)
def test_inputs_that_are_no_token_ids_are_refused(llama: Any, inputs: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"{type(inputs).__name__}, not token ids: .*{remedy}"):
        generate(llama, inputs)
    with pytest.raises(ConfigError, match=f"{type(inputs).__name__}, not token ids"):
        generate(llama, input_ids=inputs)


def test_an_offloaded_model_without_cuda() -> None:
    llama = build("llama")
    want = llama.generate(prompt(), **options())
    with weightstream.offload(llama, device="cpu", device_budget="200KiB"):
        for _ in range(2):
            assert torch.equal(generate(llama, prompt(), on_decoding=lambda _: None, **options()), want)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"cache_implementation": "dynamic"}, "cache_implementation was given"),
        ({"num_beams": 3}, "only greedy search and sampling"),
        ({"use_cache": False}, "only greedy search and sampling"),
        ({"generation_config": transformers.GenerationConfig(num_beams=2)}, "only greedy search and sampling"),
    ],
)
@pytest.mark.filterwarnings("default")
def test_another_cache_or_loop_runs_eager(llama: Any, more: dict[str, Any], reason: str) -> None:
    want = llama.generate(prompt(), **options(**more))
    got, decoding, cuda = captured(llama, prompt(), **more)
    assert torch.equal(got, want)
    assert decoding.reason.startswith(reason)
    assert not cuda.graphs


def test_a_cache_of_the_callers_is_used(llama: Any) -> None:
    cache = transformers.DynamicCache(config=llama.config)
    _, decoding, _ = captured(llama, prompt(), **{CACHE: cache})
    assert decoding == DecodeReport(reason=f"{CACHE} was given")
    assert cache.get_seq_length() == 5 + 23


def test_models_without_a_static_cache() -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0)
    mamba = transformers.MambaForCausalLM(config).eval()
    want = mamba.generate(prompt(), **options())
    got, decoding, cuda = captured(mamba, prompt())
    assert torch.equal(got, want)
    assert decoding.reason is not None
    assert not cuda.graphs


def test_too_short_to_capture(llama: Any) -> None:
    for num in (1, 2):
        _, decoding, cuda = captured(llama, prompt(), num=num)
        assert str(decoding) == "eager (too few steps to capture one)"
        assert not cuda.graphs
    assert captured(llama, prompt(), num=3)[1] == DecodeReport(replays=1)


class Reading(transformers.LlamaForCausalLM):
    """A forward that reads a value of its input."""

    calls = 0

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        output = super().forward(input_ids=input_ids, **kwargs)
        if int(input_ids[0, -1]) % 2:
            output.logits = output.logits.flip(-1)
        return output


def test_a_forward_that_reads_values_is_not_captured() -> None:
    torch.manual_seed(0)
    model = Reading(MODELS["llama"]()).eval()
    want = model.generate(prompt(), **options(), **STATIC)
    model.calls = 0
    got, decoding, cuda = captured(model, prompt())
    assert torch.equal(got, want)
    assert decoding == DecodeReport(reason="the model waits for the device in aten._local_scalar_dense.default")
    assert not cuda.graphs
    assert model.calls == 24  # no step ran twice


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_failed_capture_is_repeated_eager(name: str) -> None:
    model = build(name)
    want = model.generate(prompt(), **options(), **STATIC)
    got, decoding, cuda = captured(model, prompt(), FakeCuda(refused="aten.tanh" if name == "gemma2" else "aten.silu"))
    assert torch.equal(got, want)
    message = "the capture failed: RuntimeError: operation not permitted when stream is capturing"
    assert decoding == DecodeReport(reason=message)
    assert len(cuda.graphs) == 1  # no later step tries again
    assert cuda.replays == 0


def test_a_window_whose_second_capture_fails_continues_eager() -> None:
    model = build("mistral")
    want = model.generate(prompt(), **options(), **STATIC)
    got, decoding, _ = captured(model, prompt(), FakeCuda(refused="aten.roll"))
    assert torch.equal(got, want)
    assert str(decoding).startswith("captured, 6 replays, then eager (the capture failed: RuntimeError: ")


class Counting(transformers.MistralForCausalLM):
    """A forward that computes with the number of tokens in the cache."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seen = kwargs[CACHE].get_seq_length()
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.roll(seen, -1)
        return output


def test_a_forward_that_reads_the_length_of_a_window_is_not_captured() -> None:
    torch.manual_seed(0)
    model = Counting(MODELS["mistral"]()).eval()
    want = model.generate(prompt(), **options(), **STATIC)
    got, decoding, _ = captured(model, prompt())
    assert torch.equal(got, want)
    assert decoding == DecodeReport(reason="the model computes with the length of a sliding window in Python")


def test_a_cache_that_counts_in_python_is_not_captured(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = StaticLayer.update

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_updates = getattr(self, "num_updates", 0) + 1
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(StaticLayer, "update", counting)
    want = llama.generate(prompt(), **options(), **STATIC)
    got, decoding, cuda = captured(llama, prompt())
    assert torch.equal(got, want)
    assert decoding.reason == "no two steps in a row were alike"
    assert not cuda.graphs


def test_a_nested_generate_runs_unchanged(llama: Any) -> None:
    inner: list[Any] = []

    def again(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if not inner:
            inner.append(captured(llama, prompt(4), num=6))
        return torch.tensor([False])

    want = llama.generate(prompt(), **options(), **STATIC)
    got, decoding, _ = captured(llama, prompt(), stopping_criteria=transformers.StoppingCriteriaList([again]))
    assert torch.equal(got, want)
    assert decoding == DecodeReport(replays=22)
    assert inner[0][1] == DecodeReport(reason="generate() is running with this model already")
    assert torch.equal(inner[0][0], llama.generate(prompt(4), **options(6)))


def test_the_window_makes_its_index_on_the_device() -> None:
    layer = StaticSlidingWindowLayer(max_cache_len=4, sliding_window=4)
    keys = [torch.randn(1, 2, 1, 3) for _ in range(6)]
    for key in keys[:4]:
        layer.update(key, key)
    with static_cache.guarded([layer]):
        for key in keys[4:]:
            layer.update(key, key)
    assert torch.equal(layer.keys, torch.cat(keys[2:], 2))
    assert set(vars(layer)) >= {"keys", "values"}
    assert not {"update", "get_seq_length", "get_mask_sizes"} & set(vars(layer))


@pytest.mark.few(1)
@pytest.mark.parametrize("called_before", [False, True])
def test_an_offloaded_model_learns_its_order_first(called_before: bool) -> None:
    llama = build("llama")
    want = llama.generate(prompt(), **options(), **STATIC)
    with weightstream.offload(llama, device="cpu", device_budget="200KiB") as streamer:
        if called_before:
            llama(prompt())
        steps = streamer.stats().steps
        got, decoding, _ = captured(llama, prompt(), FakeCuda(refused="aten"))
        assert torch.equal(got, want)
        assert decoding.reason.startswith("the capture failed")  # since this graph cannot hold a streamer's copies
        assert streamer.stats().steps - steps == 24 + 1  # one in the capture, which runs here
        assert torch.equal(generate(llama, prompt(), **options()), llama.generate(prompt(), **options()))
    assert "forward" not in llama.__dict__


def test_an_offloaded_model_that_cannot_enter_a_step_runs_eager_with_the_reason() -> None:
    llama = build("llama")
    want = llama.generate(prompt(), **options(), **STATIC)
    with weightstream.offload(llama, device="cpu", device_budget="200KiB") as streamer:
        streamer.why_not_fixed = lambda: "of this test"
        got, decoding, cuda = captured(llama, prompt())
        assert torch.equal(got, want)
        assert decoding == DecodeReport(reason="the weights cannot have fixed addresses now: of this test")
        assert not cuda.graphs


class ReadsByToken(transformers.LlamaForCausalLM):
    """A model whose steps of one token read a weight of another module."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        if input_ids.shape[1] == 1:
            output.logits = output.logits + self.model.layers[2].mlp.down_proj.weight.float().sum()
        return output


@pytest.mark.stress
def test_a_weight_that_only_steps_of_one_token_read_is_not_forgotten() -> None:
    """The budget is so small that the weight cannot stay on the device."""
    llama = randomise(ReadsByToken(build("llama").config).eval(), 11)
    want = llama.generate(prompt(), **options(), **STATIC)
    with weightstream.offload(llama, device="cpu", device_budget="60KiB"):
        for _ in range(3):
            got, decoding, _ = captured(llama, prompt(), FakeCuda(refused="aten"))
            assert "are read outside of their module's forward" in str(decoding.reason)
            assert torch.equal(got, want)
            assert torch.equal(llama.generate(prompt(), **options(), **STATIC), want)


def test_inputs_may_have_another_name() -> None:
    """For Whisper they are `input_features`: a model without `inputs` gets none."""
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "vocab_size": 64}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **tokens, max_source_positions=50, max_target_positions=32)
    model = randomise(transformers.WhisperForConditionalGeneration(config).eval(), 3)
    x = torch.randn(1, 8, 100, generator=torch.Generator().manual_seed(0))
    more = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(generate(model, input_features=x, **more), model.generate(input_features=x, **more))


def is_text(planned: PlannerInputs) -> bool:
    """Whether plans are made for text from graphs."""
    (found,) = {planner.demand.is_text for planner in planned.planners}
    return found


def test_plans_are_made_for_text_from_graphs_and_do_not_change_at_a_prompt() -> None:
    """Otherwise the first prompt, which is eager, would move weights for itself only."""
    model = build("llama")
    budget = sum(param.nbytes for param in model.parameters()) // 2
    with weightstream.offload(model, device="cpu", device_budget=budget) as streamer:
        assert is_text(streamer._installed.replanning.inputs)
        for _ in range(2):
            model(prompt(9))
        found = streamer._installed.replanning.inputs
        assert found.workload is None, "the workload of the prompt"
        assert is_text(found)


def test_plans_are_made_for_eager_steps_if_graphs_are_impossible() -> None:
    model = build("llama")
    machine = machine_elsewhere(Profile(device_nbytes=1 << 30))

    def sketch(**settings: Any) -> Sketch:
        return sketch_of(model, None, weightstream.OffloadConfig(device_budget=100_000, **settings), machine)

    assert is_text(sketch().inputs)
    assert not is_text(sketch(pin_memory=False).inputs), "no graph holds such copies"
    call = observe(model, Workload(tokens=8, context=8))
    found = sketch()
    assert not is_text(found.gatherer.for_work(found.inputs, call, "forward")), "a pipeline generates no text with it"
    assert observe(model, Workload()).captured is not None
    other, about = torch.nn.Linear(4, 4), {"device": "cpu", "device_budget": 1 << 20}
    with weightstream.offload(other, example_inputs=(torch.ones(4),), **about) as streamer:
        assert not is_text(streamer._installed.replanning.inputs)


def over_lanes(model: Any, num: int) -> Stripes:
    """A model over devices that capture, at the smallest of some budgets that plans."""
    nbytes = sum(param.nbytes for param in model.parameters())
    lanes = Lanes()
    for sixteenths in (3, 4, 6, 8, 12):
        config = OffloadConfig(max_memory=dict.fromkeys(range(num), nbytes * sixteenths // 16), codec="none")
        try:
            return stripe(model, [Lane(lanes) for _ in range(num)], config, CallerFacts())
        except PlanError:
            continue
    raise AssertionError("no budget plans")


@pytest.mark.stress
@pytest.mark.few(1)
@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_over_several_devices_one_graph_holds_the_step_of_all(name: str, num: int) -> None:
    model, reference = build(name), build(name)
    with over_lanes(model, num) as stripes:
        assert stripes.plan.step_nbytes
        recorder = Recorder(new=Graph, record=stripes.capture, replay=stripes.replay)
        for length in (5, 3):
            want = reference.generate(prompt(length), **options(), **STATIC)
            got, decoding = decode_with(model, prompt(length), options(), recorder)
            assert torch.equal(got, want)
            assert decoding.replays > 8
            assert decoding.reason is None
        first, *others = stripes.backends
        assert not first.joins
        assert all(other.joins for other in others)
        assert torch.equal(reference.generate(prompt(), **options()), model.generate(prompt(), **options()))
    assert torch.equal(reference.generate(prompt(), **options()), model.generate(prompt(), **options()))


class Masked(nn.Module):
    """A block that gets another tensor besides its states, which changes between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * mask


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(8))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.body(x, mask)


@pytest.mark.few(1)
@torch.no_grad()
@pytest.mark.parametrize("part", ["the model", "a part of it"])
def test_arguments_of_blocks_are_copied_in_each_graph(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device acts as one with separate memory. A launch writes to the copies without a new version."""
    model = randomise(Whole().eval(), seed=3)
    reference, (x, mask) = copy.deepcopy(model), torch.randn(2, 2, 64)
    with over_lanes(model, 2) as stripes:
        for _ in range(3):
            model(x.clone(), mask.clone())
        monkeypatch.setattr(activation_transfer.DeviceCrossing, "goes", lambda way, _: way is stripes._crossings[1])
        monkeypatch.setattr(
            activation_transfer.DeviceCrossing, "copied", staticmethod(lambda tensor, _: tensor.clone())
        )
        call, made = (model if part == "the model" else model.body), []
        with stripes.step():
            call(x, mask)
        for _ in range(2):
            with stripes.capture(graph := Graph()):
                made.append((graph, call(x, mask)))
        with stripes.step():
            assert torch.equal(call(x, mask), reference(x, mask))
            for graph, out in reversed(made):
                mask.copy_(torch.randn(2, 64))
                stripes.replay(graph)
                assert torch.equal(out, reference(x, mask))
                assert torch.equal(call(x, mask), reference(x, mask))


@torch.no_grad()
@pytest.mark.parametrize("num", [2, 3])
def test_a_launch_is_ordered_after_and_before_the_work_of_all_devices(num: int) -> None:
    model = randomise(Whole().eval(), seed=3)
    x, mask = torch.randn(2, 2, 64)
    with over_lanes(model, num) as stripes:
        first, *others = stripes.backends
        for _ in range(3):
            model(x, mask)
        with stripes.capture(graph := Graph()):
            model(x, mask)
        lanes, launched = first._lanes, []
        lanes.orders.clear()
        graph.calls.append((DEVICE, lambda: launched.append(list(lanes.orders)), None, None))
        stripes.replay(graph)
        assert launched == [[(first, other) for other in others]]
        assert lanes.orders[len(others) :] == [(other, first) for other in others]


@torch.no_grad()
def test_a_graph_that_one_device_has_lost_is_not_launched_partially() -> None:
    model = randomise(Whole().eval(), seed=3)
    x, mask = torch.randn(2, 2, 64)
    with over_lanes(model, 2) as stripes:
        for lane in range(2):
            for _ in range(3):
                model(x, mask)
            with stripes.capture(graph := Graph()):
                model(x, mask)
            [*stripes.parts.values()][lane].graphs.clear()
            steps = [part.stats().steps for part in stripes.parts.values()]
            with pytest.raises(OffloadError, match="no graph of this streamer"):
                stripes.replay(graph)
            assert [part.stats().steps for part in stripes.parts.values()] == steps


def test_cache_layers_elsewhere_report_their_length_on_the_device_of_masks() -> None:
    layers = [StaticLayer(max_cache_len=4) for _ in range(3)]
    for layer in layers[:2]:
        layer.update(torch.randn(1, 2, 1, 3), torch.randn(1, 2, 1, 3))
    cache, meta = SimpleNamespace(layers=layers), torch.device("meta")
    static_cache.tell_lengths_at(cache, torch.device("cpu"))
    assert not any("get_seq_length" in vars(layer) for layer in layers), "already on that device"
    for _ in range(2):
        static_cache.tell_lengths_at(cache, meta)
        assert [getattr(layer.get_seq_length(), "device", None) for layer in layers] == [meta, meta, None]
    for other in (copy.deepcopy(layers[0]), pickle.loads(pickle.dumps(layers[0]))):
        assert vars(other)["get_seq_length"].args[0] is other.cumulative_length
    gone = weakref.ref(layers[0].keys), weakref.ref(layers[0])
    gc.disable()
    try:
        del cache, layer, layers, other
        assert [ref() for ref in gone] == [None, None], "their memory is freed at once"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "layers", [4, {}, [(torch.ones(1), torch.ones(1))], [object()]], ids=["number", "map", "tuples", "objects"]
)
def test_caches_of_other_kinds_are_left_alone(layers: Any) -> None:
    static_cache.tell_lengths_at(SimpleNamespace(layers=layers), torch.device("meta"))
    static_cache.tell_lengths_at(None, torch.device("meta"))


def test_a_failed_capture_reports_the_first_error_and_keeps_nothing(llama: Any) -> None:
    cuda, refs = FakeCuda(refused="aten.silu"), []

    @contextmanager
    def record(graph: Any) -> Iterator[None]:
        refs.append(weakref.ref(graph))
        try:
            with cuda.recorder.record(graph):
                yield
        except RuntimeError as error:
            raise ValueError("the end of a capture that failed") from error

    def new() -> Any:
        cuda.recorder.new()
        return cuda.graphs.pop()

    gc.disable()
    try:
        _, decoding = decode_with(llama, prompt(), options(), cuda.recorder._replace(new=new, record=record))
        assert decoding.reason == "the capture failed: RuntimeError: operation not permitted when stream is capturing"
        assert [ref() for ref in refs] == [None]
    finally:
        gc.enable()


@pytest.mark.stress
def test_only_the_first_text_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` replaces the forward for a text. That does not count as a changed forward of the model."""
    lanes = Lanes()
    monkeypatch.setattr("weightstream.runtime.devices.opening.CpuBackend", lambda *_: Lane(lanes))
    model, reference = build("llama"), build("llama")
    nbytes = sum(param.nbytes for param in model.parameters())
    with weightstream.offload(model, device="cpu", device_budget=nbytes // 2, codec="none") as streamer:
        recorder = Recorder(new=Graph, record=streamer.capture, replay=streamer.replay)
        watched: list[int] = []
        for length in (5, 3, 5):
            got, decoding = decode_with(model, prompt(length), options(), recorder)
            assert torch.equal(got, reference.generate(prompt(length), **options(), **STATIC))
            assert decoding.replays > 8
            if not watched:
                monkeypatch.setattr(type(streamer._learning), "watched", lambda *_: watched.append(1))
            assert streamer.learned
        assert not watched


class Waits(torch.Tensor):
    """A wrapper whose matrix products read a value on the host."""

    def __new__(cls, inner: torch.Tensor) -> Waits:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner: Any = [arg.inner if isinstance(arg, Waits) else arg for arg in args]
        return func(inner[0] * inner[1].sum().item(), *inner[1:])


@pytest.mark.parametrize(
    ("streamless", "reason"),
    [
        ((), "the model waits for the device in aten.item.default"),
        (("aten.sum",), "aten.sum.default ignores CUDA streams, so that a graph would compute without it"),
    ],
)
def test_operators_that_prevent_a_graph_are_found_inside_wrappers(
    streamless: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner, "_STREAMLESS", frozenset(streamless))
    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    with torch.no_grad(), graph_runner._HostWatch() as watch:  # type: ignore[no-untyped-call]
        found = torch.mm(x, Waits(weight))
        plain = torch.zeros(4, dtype=torch.uint8).view(torch.int32)
        assert torch.equal(plain.detach(), plain)
    assert torch.equal(found, torch.mm(x * weight.sum().item(), weight))
    assert watch.found == reason
