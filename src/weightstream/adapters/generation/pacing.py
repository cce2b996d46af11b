"""Decides pass by pass whether a draft is worth it, and how many tokens to draft. Knows no weights and no loop.

A round is a draft and the pass that verifies it. transformers' loop waits for the device in each round, so the host's
clock shows what a round costs. A round yields the tokens that are accepted, and one more. It is worth it if that is
more tokens per second than a pass of one token yields. Times are those of earlier rounds of both kinds, where there
are some, else the plan's.

Where rounds lose, nothing is drafted. Now and then one round is drafted anyway, as the text may have changed. Its loss
is known, so that all losses together stay below a share of the time: `_MOST_LOST`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from weightstream.adapters.generation.call import streamer_of
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.plan.speculation import (
    MOST_ROWS,
    PRIORS,
    PassChoice,
    Passes,
    PassSeconds,
    best_num_drafted,
    choose_width,
    tokens_per_pass,
)
from weightstream.runtime.streamer.drafting import Drafting, Speculate

logger = logging.getLogger("weightstream")

DraftKind = Literal["prompt lookup", "assistant", "self draft"]
_FREE: DraftKind = "prompt lookup"  # drafts that take no time
_SETTLING = 2  # first passes of a width: one is watched, one captured
_MOST_LOST = 0.01  # share of the time that drafts may lose
_ALLOWED = 1.0  # passes of one token that they may lose before that
_PROBE = 8  # rounds without a draft before the next one is tried where drafts lose
_DOUBT = 1.15  # times the predicted time of a pass, from which that of one token is measured, too
_UNSURE = 1.2  # gain by which drafts are made although this text has measured no pass of one token
_RECENT = 9  # rounds whose median counts
_LED = 8.0  # passes of one token: no larger lead is remembered, so that a text that changes is noticed
_MATTERS = 0.99  # a pass of one token is run instead of a wider one if it takes at most this share of its time
_ROUND_S = 1e-3  # seconds by which a round of transformers' assisted loop exceeds its captured pass
_MOST_ROUND = 0.03  # share of a pass that this may be


@dataclass(slots=True)
class _Times:
    """Seconds of the last rounds of one kind.

    Attributes:
        earlier: of all texts.
        num: rounds of this text.
        own: of this text, which replace those of earlier ones: other programs may have started or ended.
    """

    earlier: deque[float]
    num: int = 0
    own: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, seconds: float) -> None:
        self.num += 1
        if self.num > _SETTLING:
            self.own.append(seconds)
            self.earlier.append(seconds)

    @property
    def seconds(self) -> float | None:
        found = self.own or self.earlier
        return median(found) if found else None


class Pacing:
    """The pace of one text, whose passes have `width` rows or one.

    Args:
        kind: where drafted tokens come from.
        width: rows of a pass.
        passes: predicted seconds of passes.
        drafting: the counts of the model, which are kept from text to text.
        may_stop: drafts may be turned off; else each round has one.
        token_s: predicted seconds of a drafted token.
    """

    def __init__(
        self,
        kind: DraftKind,
        width: int,
        passes: Passes,
        drafting: Drafting,
        *,
        may_stop: bool = True,
        token_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.kind: DraftKind = kind
        self.width = width
        self.allows_one: Callable[[], bool] = lambda: True  # whether a pass of one token has the bits of the others
        self._passes = passes
        self._drafting = drafting
        self._acceptances = drafting.acceptances[kind]
        self._may_stop = may_stop
        self._token_s = token_s
        self._clock = clock
        self._rows = _Times(drafting.recent_s[width])
        self._one = _Times(drafting.recent_s[1])
        # for each drafted token; the first draft may read the whole text
        self._draft_s = _Times(drafting.recent_s[0], _SETTLING - 1)
        # of rounds with drafts, for the lead: tokens that they yielded, their seconds, and passes that are not in these
        self._yielded = 0.0
        self._spent_s = 0.0
        self._num_unsettled = 0
        self._elapsed_s = 0.0
        self._num_quiet = 0  # rounds since the last draft
        self._began: float | None = None  # None: no round has begun
        self._drafted_at = 0.0
        self._num_tokens = 0
        self._num_drafted = 0
        self._is_rows = False

    # -- times -------------------------------------------------------------------------------------------------------

    @property
    def _ratio(self) -> float:
        """The predicted time of a pass of all rows, compared with one of one token."""
        one_s = self._passes.seconds(1)
        return self._passes.seconds(self.width) / one_s if one_s else 1.0

    @property
    def rows_s(self) -> float:
        """Seconds of a pass of all rows."""
        if self._rows.seconds is not None:
            return self._rows.seconds
        return self._passes.seconds(self.width) if self._one.seconds is None else self._one.seconds * self._ratio

    @property
    def one_s(self) -> float:
        """Seconds of a pass of one token."""
        if self._one.seconds is not None:
            return self._one.seconds
        return self._passes.seconds(1) if self._rows.seconds is None else self._rows.seconds / self._ratio

    @property
    def _lead_s(self) -> float:
        """Seconds by which rounds with drafts are ahead of passes of one token."""
        return self._yielded * self._plain_s - self._spent_s - self._num_unsettled * self.rows_s

    @property
    def is_free(self) -> bool:
        """Whether a pass of all rows is predicted to take as long as one of one token."""
        return self._passes.widest_free(self.width) >= self.width

    @property
    def _plain_s(self) -> float:
        """Seconds of a pass in a round without a draft."""
        return self.one_s if self.allows_one() else self.rows_s

    @property
    def token_s(self) -> float:
        """Seconds of a drafted token."""
        return self._token_s if self._draft_s.seconds is None else self._draft_s.seconds

    def expected_tokens_per_s(self) -> float:
        """Tokens per second of rounds with a draft, at the acceptance and the times that are known by now."""
        num = self.width - 1
        if self.kind != _FREE:
            num = best_num_drafted(self._expected(num), self.token_s, lambda k: self.rows_s if k else self.one_s)
        return tokens_per_pass(self._expected(num)) / (self.rows_s + num * self.token_s)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def begin(self, num_tokens: int) -> int:
        """Begin a round on a text of so many tokens. Returns the number of tokens to draft at most."""
        now = self._clock()
        if self._began is not None:
            self._end(now, num_tokens - self._num_tokens)
        self._began = self._drafted_at = now
        self._num_tokens = num_tokens
        return self._num_wanted()

    def runs_rows(self, num_drafted: int) -> bool:
        """Begin the pass that follows a draft. Returns whether it has all its rows; else it has one."""
        self._drafting.passes += 1
        self._drafting.tokens += 1
        self._drafted_at, self._num_drafted = self._clock(), num_drafted
        matters = not self._one.own or self.one_s < _MATTERS * self.rows_s
        self._is_rows = bool(num_drafted) or not (self._may_stop and matters and self.allows_one())
        return self._is_rows

    def verified(self, num_accepted: int, num_matches: int) -> None:
        """Count the drafted tokens that a pass has accepted, and with them those that filled up its rows."""
        self._drafting.tokens += num_matches
        if self._num_drafted:
            self._drafting.drafted += self._num_drafted
            self._drafting.accepted += num_accepted
            self._acceptances.add(num_accepted, self._num_drafted)

    def _end(self, now: float, num_new: int) -> None:
        """Count the round that ends now, which yielded so many tokens."""
        assert self._began is not None
        verify_s, draft_s = now - self._drafted_at, self._drafted_at - self._began
        times = self._rows if self._is_rows else self._one
        times.add(verify_s)
        if self._num_drafted:
            self._draft_s.add(draft_s / self._num_drafted)
        settled = times.num > _SETTLING
        self._drafting.draft_s += draft_s
        self._drafting.verify_s += verify_s
        if settled:  # a pass that is captured is slow with drafts and without
            self._elapsed_s += verify_s + draft_s
        if self._num_drafted:
            self._yielded += num_new
            self._spent_s += draft_s + verify_s * settled
            self._num_unsettled += not settled
            if self._lead_s > _LED * self._plain_s:
                self._yielded, self._spent_s, self._num_unsettled = _LED, 0.0, 0
            self._num_quiet = 0
        else:
            self._num_quiet += 1
        self._num_drafted = 0

    def _num_wanted(self) -> int:
        most = self.width - 1
        if not self._may_stop:
            return most
        if self._is_doubtful():
            return 0
        left_s = _ALLOWED * self._plain_s + _MOST_LOST * self._elapsed_s + min(0.0, self._lead_s)
        if (best := self._best_num(most)) and left_s >= 0:
            return best
        return most if self._num_quiet >= _PROBE and self._cost_s(most) <= left_s else 0

    def _best_num(self, most: int) -> int:
        """The number of drafted tokens with most tokens per second; 0: none are worth it."""
        expected, plain_s, rows_s = self._expected(most), self._plain_s, self.rows_s
        best = most
        if self.kind != _FREE:
            best = best_num_drafted(expected, self.token_s, lambda num: rows_s if num else plain_s)
        least = _UNSURE if self.allows_one() and not self._one.own else 1.0
        gain = tokens_per_pass(expected[:best]) * plain_s / (rows_s + best * self.token_s)
        return best if gain > least else 0

    def _is_doubtful(self) -> bool:
        """Whether the plan was wrong about the pass, so that it does not tell what one of one token takes."""
        measured_s = self._rows.seconds if self._one.seconds is None and self.allows_one() else None
        return measured_s is not None and measured_s > _DOUBT * self._passes.seconds(self.width)

    def _cost_s(self, num: int) -> float:
        """Seconds that a round loses whose drafted tokens are all rejected."""
        return max(0.0, self.rows_s + num * self.token_s - self._plain_s)

    def _expected(self, num: int) -> list[float]:
        return list(self._acceptances.estimates(_prior(self.kind, self._drafting), num))


# -- the choice of a draft ---------------------------------------------------------------------------------------------


class DraftChoice(NamedTuple):
    """A draft for a call of `generate`: its settings, and its pace."""

    settings: dict[str, Any]
    pace: Pacing


def drafts_for(
    model: Any,
    speculate: Speculate | None,
    own: str | None,
    *,
    in_graphs: bool,
    unsuited: Callable[[], str | None],
) -> DraftChoice | None:
    """The draft for a call of `generate`; None: one token a pass, or drafts as the settings have them.

    Args:
        model: the model.
        speculate: the mode of this call; None: that with which the model was loaded.
        own: the kind of draft that the settings of `generate` choose; None: they choose none.
        in_graphs: passes are captured.
        unsuited: the reason against passes of one width for this call.

    Raises:
        ConfigError: for another mode.
        UnsupportedError: for "draft" where no draft was loaded with the model.
    """
    if speculate not in (None, *get_args(Speculate)):
        modes = ", ".join(map(repr, get_args(Speculate)))
        raise ConfigError(f"speculate={speculate!r}: it is {modes} or None")
    streamer = streamer_of(model)
    drafting: Drafting = getattr(streamer, "drafting", None) or Drafting()
    mode = speculate or drafting.mode
    if mode == "off" or own not in (None, *get_args(DraftKind)):
        return None
    if mode == "draft" and own is None and drafting.model is None:
        raise UnsupportedError(
            'speculate="draft": no draft was loaded with the model, or it was not worth its memory; pass draft= to '
            "from_pretrained, or assistant_model= here"
        )
    if (reason := unsuited()) is not None:
        logger.info("generate: one token a pass: %s", reason)
        return None
    predicted: tuple[PassSeconds, ...] = getattr(streamer, "pass_seconds", tuple)()
    if not (is_known := len(predicted) > 1):
        if mode == "auto":
            logger.info("generate: one token a pass: the time of passes of several tokens is not known")
            return None
        predicted = tuple(PassSeconds(tokens=n, step_s=1.0, graph_s=1.0) for n in (1, MOST_ROWS))
    passes = Passes(predicted, in_graphs=in_graphs)
    choices = _choices(mode, own, drafting, passes)
    kind = max(choices, key=lambda each: choices[each].tokens_per_s)
    choice = choices[kind]
    is_slow = choice.tokens == 1 or (in_graphs and _MOST_ROUND * passes.seconds(1) < _ROUND_S)
    if mode == "auto" and own is None and is_slow:
        logger.info(
            "generate: one token a pass: %.1f tokens/s are expected with drafts by %s, and %.1f without",
            choice.tokens_per_s,
            kind,
            choice.plain_tokens_per_s,
        )
        return None
    width = choice.tokens if choice.tokens > 1 else 2 if mode == "auto" else MOST_ROWS
    token_s = _token_s(kind, drafting)
    pace = Pacing(kind, width, passes, drafting, may_stop=mode == "auto", token_s=token_s)
    drafting.predicted_tokens_per_s = pace.expected_tokens_per_s() if is_known else None
    return DraftChoice({} if own else _settings_of(kind, width, drafting), pace)


def _choices(mode: Speculate, own: str | None, drafting: Drafting, passes: Passes) -> Mapping[DraftKind, PassChoice]:
    """The kinds of drafts that may be used, and what is expected of each."""
    kinds: list[DraftKind] = ["prompt lookup", drafting.kind]
    if own is not None:
        kinds = [kind for kind in get_args(DraftKind) if kind == own]
    elif mode == "lookup" or drafting.model is None:
        kinds = kinds[:1]
    elif mode == "draft":
        kinds = kinds[1:]
    return {
        kind: choose_width(
            passes,
            max(prior, *drafting.acceptances[kind].estimates(prior, 1)),  # the last text may be unlike
            _token_s(kind, drafting),
        )
        for kind in kinds
        for prior in (_prior(kind, drafting),)
    }


def _prior(kind: DraftKind, drafting: Drafting) -> float:
    """The share of tokens of such a draft that is expected to be accepted."""
    return PRIORS.get(kind, drafting.prior)


def _token_s(kind: DraftKind, drafting: Drafting) -> float:
    """The predicted seconds of a token of such a draft."""
    return drafting.token_s if kind == drafting.kind else 0.0


def _settings_of(kind: DraftKind, width: int, drafting: Drafting) -> dict[str, Any]:
    """The settings of `generate` that choose this draft."""
    if kind == "assistant":
        return {"assistant_model": drafting.model}
    return {"prompt_lookup_num_tokens": width - 1}  # transformers knows no self draft


def limit(generator: Any, num: int) -> None:
    """Have a candidate generator of transformers draft so many tokens at most."""
    for name in ("num_assistant_tokens", "num_output_tokens"):
        if isinstance(getattr(generator, name, None), int):
            setattr(generator, name, num)
