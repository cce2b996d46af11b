"""Counts of the passes that verified drafts for one model, over all its texts. Knows no draft and no plan."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Speculate = Literal["off", "auto", "lookup", "draft"]
LoadedDraft = Literal["assistant", "self draft"]
_RECENT = 9  # passes whose median counts
_WEIGHT = 2.0  # a prior weighs as much as this many tokens that were verified
_FADE = 0.9  # weight of a count after each later one: about the last 10 count


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationStats:
    """Passes of several tokens since the model was offloaded."""

    passes: int
    """Passes after prompts, of several tokens or of one, of texts with a draft."""

    tokens: int
    """Tokens of the text that these passes yielded."""

    drafted: int
    """Drafted tokens that were verified."""

    accepted: int
    """Those of them that were accepted."""

    draft_s: float
    """Seconds of the drafts."""

    verify_s: float
    """Seconds of the passes, with the loop around them."""

    predicted_tokens_per_s: float | None
    """Tokens per second that the last text was expected to have, at the acceptance and the times known by then; None:
    nothing was known."""

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Acceptances:
    """For each position of a draft, the probability that its token is accepted if all before it were.

    It follows the text: each count fades with later ones. Positions that were never reached are like those before.
    """

    def __init__(self) -> None:
        self._tried: defaultdict[int, float] = defaultdict(float)
        self._accepted: defaultdict[int, float] = defaultdict(float)

    def add(self, num_accepted: int, num_drafted: int) -> None:
        """Count a verified draft."""
        for position in range(min(num_accepted + 1, num_drafted)):
            self._tried[position] = _FADE * self._tried[position] + 1
            self._accepted[position] = _FADE * self._accepted[position] + (position < num_accepted)

    def estimates(self, prior: float, num: int) -> Sequence[float]:
        """The probabilities of the first `num` positions."""
        found: list[float] = []
        for position in range(num):
            accepted, tried = self._accepted.get(position, 0.0), self._tried.get(position, 0.0)
            prior = (_WEIGHT * prior + accepted) / (_WEIGHT + tried)
            found.append(prior)
        return found


@dataclass(kw_only=True, slots=True)
class Drafting:
    """The drafts of one model: who drafts for it, and the counts of all passes.

    Attributes:
        mode: whether `generate` drafts, unless it is called with another mode.
        model: the draft model that was loaded with the model; None: there is none.
        kind: "self draft": it is the model itself, with the high parts of its weights.
        prior: the share of its tokens that is expected to be accepted.
        token_s: predicted seconds of a token of that model.
        predicted_tokens_per_s: of the last text with drafts.
        acceptances: by kind of draft.
        recent_s: seconds of the last passes, by their number of rows.
    """

    mode: Speculate = "off"
    model: Any = None
    kind: LoadedDraft = "assistant"
    prior: float = 0.0
    token_s: float = 0.0
    predicted_tokens_per_s: float | None = None
    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    acceptances: defaultdict[str, Acceptances] = field(default_factory=lambda: defaultdict(Acceptances))
    recent_s: defaultdict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_RECENT)))

    def stats(self) -> SpeculationStats | None:
        """The counts as of now; None: no pass was counted."""
        if not self.passes:
            return None
        names = ("passes", "tokens", "drafted", "accepted", "draft_s", "verify_s", "predicted_tokens_per_s")
        return SpeculationStats(**{name: getattr(self, name) for name in names})
