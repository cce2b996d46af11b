"""Pipelines, chat, generate and save_pretrained of transformers on an offloaded model give the plain model's
results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from models import TEXT, assert_same
from streaming import DEVICES, least_budget
from words import tokenizer

transformers = pytest.importorskip("transformers")

NUM_WORDS = 8192  # a table so large that it stays in host memory on a GPU
GREEDY = {"do_sample": False, "max_new_tokens": 6}
CHAT = ({"role": "user", "content": "w5 w9"}, {"role": "assistant", "content": "w4"})


def build(device: str) -> Any:
    torch.manual_seed(7)
    options = {"num_key_value_heads": 2, "initializer_range": 0.3}  # so large that greedy tokens vary
    config = transformers.LlamaConfig(**TEXT | {"vocab_size": NUM_WORDS}, **options)
    return transformers.LlamaForCausalLM(config).eval().to(device)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(device: str) -> Any:
    return build(device)


@pytest.fixture(scope="module")
def model(device: str) -> Iterator[Any]:
    model = build(device)
    with weightstream.offload(model, device=device, device_budget=least_budget(model, device)):
        yield model


def pipe(model: Any, task: str = "text-generation", **options: Any) -> Any:
    return transformers.pipeline(task, model=model, tokenizer=tokenizer(num_words=NUM_WORDS), **options)


def _both(model: Any, plain: Any, device: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Both models, the options of a pipeline, and a check that the offloaded model streamed its weights."""
    before = model.weightstream.stats().fills
    yield model, {}
    assert model.weightstream.stats().fills > before
    yield plain, {"device": device}


def both(model: Any, plain: Any, device: str, prompt: Any, **options: Any) -> tuple[Any, Any]:
    """Results of the pipelines over the offloaded and the plain model."""
    return tuple(pipe(found, **where)(prompt, **GREEDY | options) for found, where in _both(model, plain, device))


def test_the_device_is_the_one_that_computes(model: Any, device: str) -> None:
    assert model.device == model.weightstream.device == pipe(model).device
    assert model.device.type == device
    assert any(parameter.device.type == "cpu" for parameter in model.parameters())  # streamed weights


def test_a_prompt(model: Any, plain: Any, device: str) -> None:
    got, want = both(model, plain, device, "w5 w9 w23")
    assert got == want
    assert len(set(got[0]["generated_text"].split())) > 4


def test_scores_are_the_same_bits(model: Any, plain: Any, device: str) -> None:
    ids = torch.tensor([[5, 9, 23]], device=device)
    options = GREEDY | {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    got, want = (m.generate(ids, attention_mask=torch.ones_like(ids), **options) for m in (model, plain))
    assert torch.equal(torch.stack(got.logits), torch.stack(want.logits))


def test_chat(model: Any, plain: Any, device: str) -> None:
    chat = [*CHAT, {"role": "user", "content": "w12 w13"}]
    got, want = both(model, plain, device, chat)
    assert got == want
    assert got[0]["generated_text"][:-1] == chat
    assert got[0]["generated_text"][-1]["role"] == "assistant"


def test_a_batch_of_chats(model: Any, plain: Any, device: str) -> None:
    chats = [[{"role": "user", "content": content}] for content in ("w3", "w40 w41 w42", "w5 w6")]
    got, want = both(model, plain, device, chats, batch_size=2)
    assert got == want
    assert len(got) == 3


def test_a_batch_of_prompts(model: Any, plain: Any, device: str) -> None:
    got, want = both(model, plain, device, ["w5", "w5 w9 w23", "w60 w61", "w7 w8 w9 w10"], batch_size=3)
    assert got == want
    assert len({answer[0]["generated_text"] for answer in got}) == 4


def test_an_iterator_of_prompts(model: Any, plain: Any, device: str) -> None:
    def prompts() -> Iterator[str]:
        yield from (f"w{i} w{i + 1}" for i in range(20, 25))

    answers, want = (list(pipe(m, **o)(prompts(), **GREEDY)) for m, o in _both(model, plain, device))
    assert answers == want
    assert len(answers) == 5


def test_sampling(model: Any, plain: Any, device: str) -> None:
    """Both models draw random numbers on the device that computes."""
    answers = []
    for found, where in _both(model, plain, device):
        torch.manual_seed(5)
        answers.append(pipe(found, **where)("w5 w9", do_sample=True, temperature=3.0, max_new_tokens=8))
    assert answers[0] == answers[1]


def test_another_task(model: Any, plain: Any, device: str) -> None:
    got, want = (torch.tensor(pipe(m, "feature-extraction", **o)("w5 w9")) for m, o in _both(model, plain, device))
    assert torch.equal(got, want)


def test_text_is_streamed(model: Any, plain: Any, device: str) -> None:
    words = tokenizer(num_words=NUM_WORDS)
    streamer = transformers.TextIteratorStreamer(words, skip_prompt=True, timeout=60)
    answer = pipe(model)("w5 w9 w23", streamer=streamer, return_full_text=False, **GREEDY)
    assert "".join(streamer).split() == answer[0]["generated_text"].split()


def test_another_device_is_refused(model: Any, device: str) -> None:
    with pytest.raises(ValueError, match="discard the `device` argument"):
        pipe(model, device=device)


def test_save_pretrained_writes_the_true_weights(model: Any, plain: Any, tmp_path: Path) -> None:
    """Also in shards, and without transformers' advice for models that accelerate offloads."""
    for size in ("1GB", "200KB"):
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / size)
        assert type(again) is type(plain)
        assert_same([*again.state_dict().values()], [value.cpu() for value in plain.state_dict().values()])
    assert len(list((tmp_path / "200KB").glob("*.safetensors"))) > 5


def test_a_pipeline_saves_them_as_well(model: Any, plain: Any, device: str, tmp_path: Path) -> None:
    pipe(model).save_pretrained(tmp_path)
    again = transformers.pipeline("text-generation", str(tmp_path), device=device)
    assert again("w5 w9", **GREEDY) == pipe(plain, device=device)("w5 w9", **GREEDY)
