"""Speculative decoding in numbers: seconds of passes of several tokens, tokens that they yield, and what a draft gains.

A pass verifies drafted tokens: as many as it has rows, but one, whose token is known. It yields the accepted ones, up
to the first rejected one, and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from types import MappingProxyType
from typing import NamedTuple

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of tokens for which the seconds of a pass are predicted
MOST_ROWS = 16  # of a pass that is planned for: text seldom agrees with a draft for longer
FREE_PASS = (
    1.02  # a pass of several tokens is free if it takes at most this many times as long as one of a single token
)
_WORTH = 1.1  # a pass that is not free must be expected to yield this many times as many tokens per second
# Share of drafted tokens that are accepted, each given that all before it were: tokens per pass of 1.7 for prompt
# lookup, on chats, code and edits [SmolLM2, 6 prompts]; 4.3 for a smaller model of the same kind and 8 drafted tokens
# [Sequoia's 70B with a 7B: 8; SpecExec: 6 to 8, with trees]; MTP heads: 85 to 90 % of their first token and less of
# later ones [DeepSeek-V3, Qwen3]; DFlash: 5 to 6 tokens per pass of 16 [Qwen3-8B].
PRIORS: Mapping[str, float] = MappingProxyType({"prompt lookup": 0.42, "assistant": 0.8, "mtp": 0.72, "dflash": 0.84})


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSeconds:
    """Predicted seconds of a pass of several tokens of one text, at the context that is planned for.

    Attributes:
        tokens: the number of tokens.
        step_s: seconds of an eager pass.
        graph_s: seconds in a CUDA graph.
    """

    tokens: int
    step_s: float
    graph_s: float


class Passes:
    """Seconds of a pass by its number of tokens: in a graph, or eager; linear between the predicted numbers."""

    def __init__(self, predicted: Iterable[PassSeconds], *, in_graphs: bool) -> None:
        self._seconds = {each.tokens: each.graph_s if in_graphs else each.step_s for each in predicted}

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted(self._seconds))

    def seconds(self, tokens: int) -> float:
        points = sorted(self._seconds.items())
        for (low, low_s), (high, high_s) in pairwise(points):
            if tokens <= high:
                return low_s + (high_s - low_s) * (tokens - low) / (high - low)
        return self._seconds[self.widths[-1]]

    def widest_free(self, most: int = MOST_ROWS) -> int:
        """The largest number of tokens, up to `most`, whose pass takes as long as that of one token."""
        return max((w for w in self.widths if w <= most and self.seconds(w) <= FREE_PASS * self.seconds(1)), default=1)


class PassChoice(NamedTuple):
    """A width of passes, and the tokens per second that are expected with it and without drafts.

    Attributes:
        tokens: tokens of a pass; 1: no draft is worth it.
        tokens_per_s: with the draft.
        plain_tokens_per_s: with one token a pass.
    """

    tokens: int
    tokens_per_s: float
    plain_tokens_per_s: float


def tokens_per_pass(acceptances: Sequence[float]) -> float:
    """Expected tokens of a pass: `acceptances` has the probability for each drafted token, given those before it."""
    return float(1 + sum(accumulate(acceptances, mul)))


def choose_width(passes: Passes, acceptance: float, draft_s: float = 0.0, most: int = MOST_ROWS) -> PassChoice:
    """The width of passes with most tokens per second, for a draft that takes `draft_s` seconds for each token.

    A draft that costs nothing gets the widest pass that is free: some texts are accepted for long.
    """

    def rate(width: int) -> float:
        tokens = tokens_per_pass([acceptance] * (width - 1))
        return tokens / (passes.seconds(width) + (width - 1) * draft_s)

    free, plain = passes.widest_free(most), rate(1)
    if free > 1 and not draft_s:
        return PassChoice(free, rate(free), plain)
    best = max((width for width in passes.widths if width <= most), key=rate)
    least = FREE_PASS if best <= free else _WORTH
    return PassChoice(best, rate(best), plain) if rate(best) > least * plain else PassChoice(1, plain, plain)


def best_num_drafted(acceptances: Sequence[float], draft_s: float, pass_s: Callable[[int], float]) -> int:
    """The number of drafted tokens with most tokens per second; 0: a pass of one token yields more.

    Args:
        acceptances: for each token that can be drafted, as for `tokens_per_pass`.
        draft_s: seconds of the draft for each token.
        pass_s: seconds of the pass that verifies so many drafted tokens.
    """

    def rate(num: int) -> float:
        return tokens_per_pass(acceptances[:num]) / (num * draft_s + pass_s(num))

    return max(range(len(acceptances) + 1), key=rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftNeeds:
    """What a draft model takes of the device.

    Attributes:
        name: its folder, or its repository.
        weights_nbytes: bytes of its weights, all of them on the device.
        cache_nbytes: bytes of its KV cache.
        logits_nbytes: bytes of the logits that are verified at once.
        token_s: predicted seconds of one of its tokens.
    """

    name: str
    weights_nbytes: int
    cache_nbytes: int
    logits_nbytes: int
    token_s: float

    @property
    def nbytes(self) -> int:
        """Bytes of the device budget that the draft takes."""
        return self.weights_nbytes + self.cache_nbytes + self.logits_nbytes
