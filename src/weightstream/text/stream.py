"""The text of one answer while its tokens are generated: whole characters, up to a stop string. Knows no model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from weightstream.adapters.generation.decoder import DecodeReport

Finish = Literal["stop", "length", "cancelled"]

_INCOMPLETE = "\ufffd"  # what tokenizers decode the first bytes of a character to
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # a byte in SentencePiece
# In byte-level BPE, bytes that are no visible letter of Latin-1 are named by the letters from 256 on.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = MappingProxyType(
    {chr(byte): byte for byte in _VISIBLE}
    | {chr(0x100 + n): byte for n, byte in enumerate(sorted(set(range(0x100)) - set(_VISIBLE)))}
)


class Detokenizer:
    """Turns tokens into text one by one. A character comes with the token that holds its last byte.

    Tokenizers decode a token differently at the begin of a text, so each is decoded after its predecessors.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last tokens whose text is known, and those after them
        self._num_known = 0

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(token)
        return self._new_text(is_last=False)

    def end(self) -> str:
        """What is left: the bytes of an incomplete character."""
        return self._new_text(is_last=True)

    def _new_text(self, *, is_last: bool) -> str:
        known, text = self._decoded(self._ids[: self._num_known]), self._decoded(self._ids)
        if len(text) <= len(known) or (text.endswith(_INCOMPLETE) and not is_last):
            return ""
        self._ids = self._ids[self._num_known :]
        self._num_known = len(self._ids)
        return text[len(known) :]

    def _decoded(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may be the begin of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        text = self._held + text
        found = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self.is_found, self._held = True, ""
            return text[: min(found)]
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        num_held = next((n for n in range(min(longest, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def end(self) -> str:
        """The text that was held back, as no stop string followed."""
        text, self._held = self._held, ""
        return text

    def _may_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


class TokenText(NamedTuple):
    """What a token adds to a text, and as UTF-8; None if the tokenizer hides the bytes of half a character."""

    text: str
    utf8: bytes | None


def token_text(tokenizer: Any, token: int, *, is_first: bool = False) -> TokenText:
    """The text of a token inside of an answer, or at its begin, where some tokenizers drop a space."""
    alone: str = tokenizer.decode([token])
    text = alone if is_first else tokenizer.decode([token, token])[len(alone) :]
    is_half = _INCOMPLETE in alone
    return TokenText(text, _half_character(tokenizer, token, alone) if is_half else text.encode(errors="replace"))


def _half_character(tokenizer: Any, token: int, text: str) -> bytes | None:
    name: Any = tokenizer.convert_ids_to_tokens(token)  # bytes with some tokenizers that a checkpoint brings
    if isinstance(name, str) and _INCOMPLETE in name:  # it is a character of the token
        return text.encode()
    if isinstance(name, str) and (found := _BYTE_TOKEN.fullmatch(name)):
        return bytes.fromhex(found[1])
    if isinstance(name, str) and _BYTE_OF.keys() >= set(name):
        name = bytes(_BYTE_OF[letter] for letter in name)
    utf8 = name if isinstance(name, bytes) else b""
    return utf8 if utf8.decode(errors="replace") == text else None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the probability of a token, before temperature, and of the most likely ones."""

    token: TokenText
    logprob: float
    top: tuple[tuple[TokenText, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer: its text, and the log-probabilities of the tokens since the last piece."""

    text: str
    logprobs: Sequence[TokenLogprobs]


class LogprobRecorder:
    """A logits processor of transformers that changes nothing: it keeps the log-probabilities of each position.

    A pass that verifies drafted tokens has several positions, of which some are rejected and come again.
    """

    def __init__(self, tokenizer: Any, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._rows: dict[int, torch.Tensor] = {}

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._rows[ids.shape[1]] = scores[0].float().log_softmax(-1)
        return scores

    def take(self, position: int, token: int, *, is_first: bool = False) -> TokenLogprobs:
        """The log-probabilities of the token at a position. Those of earlier ones are forgotten.

        `is_first`: an answer begins with the token.
        """
        row = self._rows[position]
        self._rows = {at: kept for at, kept in self._rows.items() if at > position}
        values, ids = row.topk(self._num_top)
        text = partial(token_text, self._tokenizer, is_first=is_first)
        top = zip(map(text, ids.tolist()), values.tolist(), strict=True)
        return TokenLogprobs(text(token), row[token].item(), tuple(top))


def _special_token(tokenizer: Any, text: str) -> int | None:
    """The special token that is written like this, or None."""
    token: int | None = tokenizer.convert_tokens_to_ids(text)  # of any other text, perhaps the unknown token
    if token is None or tokenizer.decode([token]) != text or tokenizer.decode([token], skip_special_tokens=True):
        return None
    return token


class Answer:
    """An answer while it is generated, and afterwards. As a stopping criterion of transformers it sees each token.

    Args:
        tokenizer: of the model.
        stop: strings before which the answer ends.
        logprobs: None: log-probabilities are not wanted.
        on_piece: called with each piece. Its text is empty only where log-probabilities are left at the end.
        is_cancelled: asked after each token; true ends the answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        logprobs: LogprobRecorder | None = None,
        on_piece: Callable[[Piece], object] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.ids: list[int] = []
        self.times: list[float] = [time.perf_counter()]
        """The begin, and the time of each pass; one that verified drafts has several tokens."""
        self.logprobs: list[TokenLogprobs] = []
        self.decoding: DecodeReport | None = None  # set when generation ends, as is `finish`
        self.finish: Finish | None = None
        self._pieces: list[str] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._stop_ids = {_special_token(tokenizer, text) for text in stop}
        self._recorder = logprobs
        self._on_piece = on_piece
        self._is_cancelled = is_cancelled
        self._was_cancelled = False
        self._num_prompt: int | None = None
        self._num_first = 0  # tokens that came first
        self._num_passed = 0  # tokens whose log-probabilities are passed on

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self._num_prompt is None:
            self._num_prompt = ids.shape[1] - 1  # the prompt is a pass of its own
        num_before = self._num_prompt + len(self.ids)
        for token in ids[0, num_before:].tolist():
            if not self._stops.is_found:
                self._add(token)
        self.times.append(time.perf_counter())
        self._num_first = self._num_first or len(self.ids)
        self._was_cancelled = self._is_cancelled is not None and self._is_cancelled()
        ends = self._stops.is_found or self._was_cancelled
        return torch.full((len(ids),), ends, dtype=torch.bool, device=ids.device)

    def _add(self, token: int) -> None:
        if self._recorder is not None and self._num_prompt is not None:
            position = self._num_prompt + len(self.ids)
            self.logprobs.append(self._recorder.take(position, token, is_first=not self.ids))
        self.ids.append(token)
        self._show(self._stops.push(self._detokenizer.push(token)))
        if token in self._stop_ids:  # special tokens have no text, in which a stop string could be found
            self._show_held()
            self._stops.is_found = True

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._pass_on(text)

    def _show_held(self) -> None:
        """Show what may be the begin of a character or of a stop string: it does not go on."""
        self._show(self._stops.push(self._detokenizer.end()))
        self._show(self._stops.end())

    def _pass_on(self, text: str) -> None:
        logprobs, self._num_passed = self.logprobs[self._num_passed :], len(self.logprobs)
        if self._on_piece is not None:
            self._on_piece(Piece(text, logprobs))

    def end(self, ends: Sequence[int]) -> None:
        """Show what was held back, and find out why the answer has ended. `ends`: the end-of-text tokens."""
        if not self._stops.is_found:
            self._show_held()
        if self._num_passed < len(self.logprobs):
            self._pass_on("")
        has_ended = self._stops.is_found or (bool(self.ids) and self.ids[-1] in ends)
        self.finish = "stop" if has_ended else "cancelled" if self._was_cancelled else "length"

    def set_decoding(self, decoding: DecodeReport) -> None:
        self.decoding = decoding

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token."""
        return self.times[1] - self.times[0]

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def tokens_per_s(self) -> float:
        """The rate of the tokens after the first, whose step reads the prompt; with one token, the rate of that one."""
        first = min(1, len(self.times) - 2)
        num_before = self._num_first if first else 0
        return (len(self.ids) - num_before) / (self.times[-1] - self.times[first])
