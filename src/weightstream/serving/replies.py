"""Replies of the OpenAI API: an answer as one object, or as chunks of a stream. Knows no HTTP and no model."""

from __future__ import annotations

import codecs
import itertools
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weightstream.text.stream import Answer, Finish, Piece, TokenLogprobs, TokenText

DONE = "data: [DONE]\n\n"  # the end of a stream


def event(data: object) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def usage_of(num_prompt: int, num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """What all objects of a reply have in common."""

    model: str
    has_logprobs: bool
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def _object(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"{prefix}-{self.number}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply(_Reply):
    """The reply to /v1/chat/completions."""

    def opening(self) -> dict[str, Any] | None:
        """The chunk before all pieces."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, piece: Piece) -> dict[str, Any]:
        return self._chunk({"content": piece.text}, piece.logprobs)

    def ending(self, finish: Finish | None) -> dict[str, Any]:
        return self._chunk({}, None, finish)

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        return self._object("chatcmpl", "chat.completion.chunk", []) | {"usage": usage}

    def whole(self, answer: Answer, num_prompt: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish}
        choice["logprobs"] = self._logprobs(answer.logprobs)
        usage = usage_of(num_prompt, len(answer.ids))
        return self._object("chatcmpl", "chat.completion", [choice]) | {"usage": usage}

    def _chunk(
        self, delta: dict[str, str], logprobs: Sequence[TokenLogprobs] | None, finish: Finish | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        choice["logprobs"] = None if logprobs is None else self._logprobs(logprobs)
        return self._object("chatcmpl", "chat.completion.chunk", [choice])

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        return {
            "content": [
                _entry(each.token, each.logprob) | {"top_logprobs": [_entry(*top) for top in each.top]}
                for each in logprobs
            ],
            "refusal": None,
        }


def _entry(token: TokenText, logprob: float) -> dict[str, Any]:
    utf8 = None if token.utf8 is None else list(token.utf8)
    return {"token": token.text, "logprob": _finite(logprob), "bytes": utf8}


def _finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI's value for what is as good as impossible."""
    return max(logprob, -9999.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionReply(_Reply):
    """The reply to /v1/completions."""

    def opening(self) -> dict[str, Any] | None:
        return None

    def piece(self, piece: Piece) -> dict[str, Any]:
        return self._completion(piece.text, piece.logprobs)

    def ending(self, finish: Finish | None) -> dict[str, Any]:
        return self._completion("", (), finish)

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        return self._object("cmpl", "text_completion", []) | {"usage": usage}

    def whole(self, answer: Answer, num_prompt: int) -> dict[str, Any]:
        found = self._completion(answer.text, answer.logprobs, answer.finish)
        return found | {"usage": usage_of(num_prompt, len(answer.ids))}

    def _completion(self, text: str, logprobs: Sequence[TokenLogprobs], finish: Finish | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": self._logprobs(logprobs)}
        return self._object("cmpl", "text_completion", [choice])

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        return {
            "tokens": [each.token.text for each in logprobs],
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": [{token.text: _finite(value) for token, value in each.top} for each in logprobs],
            "text_offset": _offsets(logprobs),
        }


def _offsets(logprobs: Sequence[TokenLogprobs]) -> list[int]:
    """Where each token begins in the text of its piece. A character belongs to the token that completes it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    tokens = (each.token for each in logprobs)
    texts = (token.text if token.utf8 is None else decoder.decode(token.utf8) for token in tokens)
    return list(itertools.accumulate(map(len, texts), initial=0))[: len(logprobs)]
