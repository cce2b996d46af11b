"""Answers are those of `weightstream.generate`: greedy, drawn from a seed, with log-probabilities, and cut short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from chat_model import saved, streaming
from weightstream.text.engine import PromptError, TextModel
from weightstream.text.sampling import Sampling

PROMPT = "w5 w9 w23"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    with streaming(tmp_path_factory.mktemp("llama")) as loaded:
        yield loaded


def generated(model: TextModel, **options: Any) -> Any:
    ids = model.encode(PROMPT)["input_ids"]
    found = weightstream.generate(model.model, ids, max_new_tokens=NUM_TOKENS, **options)
    return found[0, ids.shape[1] :].tolist() if isinstance(found, torch.Tensor) else found


def test_greedy_text_is_that_of_generate(model: TextModel) -> None:
    pieces: list[str] = []
    sampling = Sampling(max_new_tokens=NUM_TOKENS, temperature=0.0)
    answer = model.generate(model.encode(PROMPT), sampling, on_piece=lambda piece: pieces.append(piece.text))
    assert answer.ids == generated(model, do_sample=False)
    assert answer.text == "".join(pieces) == model.tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert len(pieces) > 4


@pytest.mark.parametrize("given", [{"temperature": 0.7}, {"top_p": 0.8}, {"temperature": 1.4, "top_p": 0.9}])
def test_a_seed_draws_the_tokens_of_generate(model: TextModel, given: dict[str, float]) -> None:
    inputs, before = model.encode(PROMPT), torch.get_rng_state()
    answers = [
        model.generate(inputs, Sampling(max_new_tokens=NUM_TOKENS, seed=seed, **given)).ids for seed in (5, 6, 5)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert answers[0] == answers[2] == generated(model, do_sample=True, top_k=0, **given)
    assert answers[1] != answers[0]


def test_a_temperature_that_would_overflow_is_greedy(model: TextModel) -> None:
    answer = model.generate(model.encode(PROMPT), Sampling(max_new_tokens=NUM_TOKENS, temperature=1e-40))
    assert answer.ids == generated(model, do_sample=False)


def test_what_is_left_out_is_as_in_the_checkpoint(tmp_path: Path) -> None:
    made = TextModel(str(saved(tmp_path, do_sample=True, temperature=0.6, top_k=3)))
    made.load(device="cpu", device_budget="512KiB")
    torch.manual_seed(5)
    expected = generated(made)
    assert made.generate(made.encode(PROMPT), Sampling(max_new_tokens=NUM_TOKENS, seed=5)).ids == expected
    assert Sampling(max_new_tokens=1, top_p=0.5).options(made.model.generation_config)["top_k"] == 3
    made.streamer.remove()


def test_logprobs_are_those_of_the_logits(model: TextModel) -> None:
    sampling = Sampling(max_new_tokens=NUM_TOKENS, temperature=0.5, seed=5, top_logprobs=3)
    answer = model.generate(model.encode(PROMPT), sampling)
    torch.manual_seed(5)
    found = generated(model, do_sample=True, temperature=0.5, top_k=0, output_logits=True, return_dict_in_generate=True)
    expected = [logits[0].log_softmax(-1) for logits in found.logits]
    assert [each.logprob for each in answer.logprobs] == [
        row[token].item() for row, token in zip(expected, answer.ids, strict=True)
    ]
    for each, row in zip(answer.logprobs, expected, strict=True):
        assert [value for _, value in each.top] == row.topk(3).values.tolist()


def test_a_stop_string_ends_generation(model: TextModel) -> None:
    whole = model.generate(model.encode(PROMPT), Sampling(max_new_tokens=NUM_TOKENS, temperature=0.0))
    stop = " ".join(whole.text.split()[3:5])
    steps = model.streamer.stats().steps
    cut = model.generate(model.encode(PROMPT), Sampling(max_new_tokens=NUM_TOKENS, temperature=0.0, stop=(stop,)))
    assert (cut.text, cut.finish) == (whole.text[: whole.text.index(stop)], "stop")
    assert model.streamer.stats().steps - steps == len(cut.ids) < NUM_TOKENS


@pytest.mark.stress
def test_drafted_answers_have_the_bits_of_one_token_at_a_time(tmp_path: Path) -> None:
    made = TextModel(str(saved(tmp_path)))
    made.load(device="cpu", device_budget="512KiB", speculate="lookup")
    drafts = made.exact_drafts(64)
    assert drafts == {"bits": "token"}
    sampling = Sampling(max_new_tokens=NUM_TOKENS, temperature=0.0, top_logprobs=2)
    prompt = made.encode("w5 w9 w23 w5 w9 w23 w5 w9")
    drafted = made.generate(prompt, sampling, cache_length=64, **drafts)
    plain = made.generate(prompt, sampling, cache_length=64, speculate="off")
    assert drafted.decoding is not None
    assert drafted.decoding.speculation is not None
    assert drafted.decoding.speculation.bits == "token"
    assert plain.decoding is not None
    assert plain.decoding.speculation is None
    assert drafted.ids == plain.ids
    made.streamer.remove()


def test_prompts_that_are_refused(model: TextModel) -> None:
    for bad in ([5, 128], [-1, 5]):
        with pytest.raises(PromptError, match="from 0 to 127"):
            model.encode_ids(bad)
    with pytest.raises(PromptError, match="has no tokens"):
        model.encode_ids([])
    model.tokenizer.add_tokens(["w999"])  # the tokenizer has more tokens than the model
    with pytest.raises(PromptError, match="from 0 to 127, and the prompt has 128"):
        model.encode("w5 w999")
    with pytest.raises(PromptError, match="has no tokens"):
        model.encode(" ")
    with pytest.raises(PromptError, match="chat template refuses"):
        model.encode_chat([{"role": "user", "content": "w5"}, 3])  # type: ignore[list-item]
