"""The text of an answer while its tokens come: whole characters, and the end at a stop string."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weightstream.serving.replies import ChatReply, CompletionReply
from weightstream.text.stream import Answer, Detokenizer, LogprobRecorder, StopStrings, TokenLogprobs, token_text
from words import tokenizer

transformers = pytest.importorskip("transformers")


def bytewise() -> object:
    """A tokenizer with a token for each byte, as byte-level BPE without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def sentencepiece() -> object:
    """A tokenizer as of SentencePiece: spaces begin words, and letters that it does not know are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"naive x"]
    of = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(of, [], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence(list(steps))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("kind", [bytewise, sentencepiece])
def test_the_bytes_of_tokens_are_those_of_the_text(kind: Callable[[], Any]) -> None:
    """Also of half characters. OpenAI's offsets are those of whole characters."""
    words, text = kind(), "naïve x🙂\ufffd x"
    ids = words(text)["input_ids"]
    tokens = [token_text(words, token, is_first=index == 0) for index, token in enumerate(ids)]
    assert b"".join(token.utf8 or b"?" for token in tokens) == text.encode()
    logprobs = [TokenLogprobs(token, 0.0, ((token, 0.0),)) for token in tokens]
    answer = Answer(words)
    answer.logprobs = logprobs
    reply = CompletionReply(model="m", has_logprobs=True).whole(answer, 1)["choices"][0]["logprobs"]
    begins = [text[begin : begin + 1] for begin in reply["text_offset"]]
    assert begins == [*"naï", "ï", *"ve x", *4 * "🙂", *3 * "\ufffd", *" x"]
    entries = ChatReply(model="m", has_logprobs=True).whole(answer, 1)["choices"][0]["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == [token.utf8 for token in tokens]


def test_the_bytes_of_half_a_character_may_be_hidden() -> None:
    """By a tokenizer whose names of tokens are not known."""
    words = bytewise()
    words.convert_ids_to_tokens = lambda token: "◌"  # type: ignore[attr-defined]
    assert token_text(words, words("🙂")["input_ids"][0]) == ("\ufffd", None)
    assert token_text(words, words("a")["input_ids"][0]) == ("a", b"a")


@pytest.mark.parametrize("text", ["naïve – 大きい 🙂🙂 x", "\n\n  w\u0301 ", "🏳️‍🌈 ffi"])
def test_characters_come_whole(text: str) -> None:
    words = bytewise()
    detokenizer, pieces = Detokenizer(words), []
    for token in words(text)["input_ids"]:
        pieces.append(detokenizer.push(token))
        assert "\ufffd" not in pieces[-1]
    assert "".join([*pieces, detokenizer.end()]) == text
    assert len(pieces) == len(text.encode())


def test_the_bytes_of_half_a_character_come_at_the_end() -> None:
    words = bytewise()
    ids = words("a🙂")["input_ids"][:3]
    detokenizer = Detokenizer(words)
    assert [detokenizer.push(token) for token in ids] == ["a", "", ""]
    assert detokenizer.end() == words.decode(ids)[1:]


def test_words_keep_the_spaces_of_the_whole_text() -> None:
    words = tokenizer()
    ids = [5, 2, 9, 0, 0, 23, 1]  # special ones have no text
    detokenizer = Detokenizer(words)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join([*pieces, detokenizer.end()]) == words.decode(ids, skip_special_tokens=True)
    assert pieces[:3] == ["w5", "", " w9"]


@pytest.mark.parametrize("seed", range(40))
def test_text_ends_before_the_stop_string_that_is_complete_first(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("ab") for _ in range(draw.randrange(30)))
    stops = ["".join(draw.choice("ab") for _ in range(draw.randrange(2, 7))) for _ in range(draw.randrange(4))]
    found = [(end, end - len(stop)) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    ends_at = min(found, default=(0, len(text)))[1]
    search, shown = StopStrings(stops), ""
    for letter in text:
        shown += search.push(letter)
        assert text[:ends_at].startswith(shown)
        if search.is_found:
            break
    assert shown + search.end() == text[:ends_at]
    assert search.is_found is bool(found)


def ids_of(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


def test_an_answer_ends_at_a_stop_string_within_a_pass() -> None:
    """A pass that verified drafts brings several tokens: those after the stop string are none of the answer."""
    shown: list[str] = []
    answer = Answer(tokenizer(), ("w9 w23",), on_piece=lambda piece: shown.append(piece.text))
    assert not answer(ids_of(7, 8, 5), None).any()
    assert not answer(ids_of(7, 8, 5, 9), None).any()
    assert answer(ids_of(7, 8, 5, 9, 23, 40, 41), None).all()
    answer.end([2])
    assert (answer.text, answer.ids, answer.finish) == ("w5 ", [5, 9, 23], "stop")
    assert shown == ["w5", " "]


def test_a_stop_string_may_be_a_special_token() -> None:
    """It has no text. The unknown token, as which other strings would be read, stops nothing."""
    answer = Answer(tokenizer(), ("<eos>", "w9 w23", "nothing"))
    assert not answer(ids_of(7, 8, 0), None).any()
    assert answer(ids_of(7, 8, 0, 5, 9, 2), None).all()
    answer.end([])
    assert (answer.text, answer.finish) == ("w5 w9", "stop")


@pytest.mark.parametrize(
    ("tokens", "is_cancelled", "finish"),
    [((5, 2), False, "stop"), ((5, 9), False, "length"), ((5, 9), True, "cancelled"), ((5, 2), True, "stop")],
)
def test_why_an_answer_ended(tokens: tuple[int, int], is_cancelled: bool, finish: str) -> None:
    answer = Answer(tokenizer(), is_cancelled=lambda: is_cancelled)
    answer(ids_of(7, 8, tokens[0]), None)
    assert answer(ids_of(7, 8, *tokens), None).all() == is_cancelled
    answer.end([2])
    assert answer.finish == finish


def test_logprobs_are_those_of_the_pass_that_chose_the_token() -> None:
    """A position of a rejected draft is computed again."""
    recorder = LogprobRecorder(tokenizer(), 1)
    torch.manual_seed(0)
    rejected, accepted, later = torch.randn(3, 1, 128)
    recorder(ids_of(7, 8), rejected)
    recorder(ids_of(7, 8, 9), later)
    assert recorder(ids_of(7, 8), accepted) is accepted
    found, expected = recorder.take(2, 17), accepted[0].log_softmax(-1)
    assert (found.token, found.logprob) == ((" w17", b" w17"), expected[17].item())
    best = int(accepted.argmax())
    assert found.top == (((f" w{best}", f" w{best}".encode()), expected[best].item()),)
    assert recorder.take(3, 17).logprob == later[0].log_softmax(-1)[17].item()
    with pytest.raises(KeyError):
        recorder.take(2, 17)
