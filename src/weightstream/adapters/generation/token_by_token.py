"""A pass adds several tokens to a text; its stopping criteria and its streamer see them one by one. Knows no draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weightstream.adapters.hf import private

_IN_THE_LOOP = ("MaxLengthCriteria", "EosTokenCriteria")  # the loop ends a text at these tokens by itself
_BY_TOKEN = ("scores", "logits", "attentions", "hidden_states")  # of a result: they have an entry for each token


class TokenByToken:
    """The end of one text, as with one token a pass.

    transformers checks its criteria once a pass. So a text would run beyond the token that a criterion stops at, up to
    the width of the pass; and the caller's code would see only some lengths of the text.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._has_prompt = False
        self._held: list[torch.Tensor] = []  # tokens of the pass, which the streamer has not seen
        self._length = 0  # of the text after the pass
        self._num_seen = 0  # the tokens of the text that the criteria have seen; 0: none
        self._num_surplus = 0  # tokens of the last pass after the one that a criterion stopped at

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `generate`, with a streamer that holds the tokens of a pass back."""
        return options if self._streamer is None else options | {"streamer": self}

    @contextmanager
    def installed(self, model: Any) -> Iterator[None]:
        """Inside, criteria that the model's `generate` makes are asked token by token."""

        def watched(criteria: Any) -> Callable[..., Any]:
            names = {type(each).__name__ for each in criteria}
            is_plain = names <= set(_IN_THE_LOOP)
            return lambda ids, scores, **kwargs: self._stops(criteria, is_plain, ids, scores, kwargs)

        with private.stopping_by(model, watched):
            yield

    def passed(self, length: int) -> None:
        """Called after each pass with the length of the text, before the criteria are asked."""
        self._length = length

    def _stops(self, criteria: Any, is_plain: bool, ids: torch.Tensor, scores: Any, kwargs: Any) -> Any:
        # transformers 5.17 also asks before a pass, about the tokens to be verified, of which there may be none
        if ids.shape[1] != self._length or self._num_seen == self._length:
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        first = self._num_seen + 1 if self._num_seen else self._length
        for length in range(first, self._length + 1):
            self._num_seen = length
            num_later = self._length - length
            if is_plain and num_later:
                self._show()
                continue
            known = scores[: len(scores) - num_later] if scores else scores
            stops = criteria(ids[:, :length], known, **kwargs)
            self._show()  # after the criteria, as transformers does
            if not num_later or bool(stops.all()):
                self._num_surplus = num_later
                return stops
        raise AssertionError("a pass adds a token")

    def trimmed(self, result: Any) -> Any:
        """What `generate` returned, without the tokens after the one that a criterion stopped at."""
        if not (num := self._num_surplus):
            return result
        if isinstance(result, torch.Tensor):
            return result[:, :-num]
        result.sequences = result.sequences[:, :-num]
        for name in _BY_TOKEN:
            if result.get(name) is not None:
                result[name] = result[name][:-num]
        if (cache := result.get(private.cache_argument())) is not None:
            cache.crop(-num)
        return result

    # -- a streamer ----------------------------------------------------------------------------------------------------

    def put(self, value: torch.Tensor) -> None:
        """Pass the prompt on, and hold the tokens of a pass."""
        if self._has_prompt:
            self._held += value.flatten().split(1)
        else:
            self._has_prompt = True
            self._streamer.put(value)

    def _show(self) -> None:
        if self._held:
            self._streamer.put(self._held.pop(0))

    def end(self) -> None:
        self._streamer.end()
