"""Speculative decoding through transformers' own assisted loop: a draft proposes tokens, one pass verifies them all.

transformers keeps the loop, its candidate generators, sampling and the end of a text. What changes is what makes a pass
repeatable: each has the same number of rows, on a cache with fixed addresses, so that it is captured as a graph; the
prompt is a step of its own; and where it is asked for, rows have the bits of one token at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from weightstream.adapters.generation.call import streamer_of
from weightstream.adapters.generation.drafts import DraftCounts, DrawsByPosition, drafting
from weightstream.adapters.generation.pacing import Pacing
from weightstream.adapters.generation.round_inputs import RoundInputs
from weightstream.adapters.generation.token_by_token import TokenByToken
from weightstream.adapters.hf import private
from weightstream.adapters.steps.croppable_cache import CroppableCache, croppable, is_croppable
from weightstream.adapters.steps.decode_steps import cache_in
from weightstream.adapters.steps.graph_runner import GraphRunner, run_step
from weightstream.adapters.steps.row_split import RowPlan, RowSplit, first_row, plans, structure, switches
from weightstream.adapters.steps.row_trial import RowTrial
from weightstream.errors import ConfigError, UnsupportedError

logger = logging.getLogger("weightstream")

Bits = Literal["token", "rows"]
_EARLY_EXIT = "assistant_early_exit"
_ASSISTANT_TOKENS = 20  # transformers' default
FREE = 1.05  # operators that run row by row are free where they make a step this much longer at most
_FEW = 0.2  # a share of accepted tokens that is worth a word


class Draft(NamedTuple):
    """Where drafted tokens come from, and how many a pass verifies at most."""

    kind: Literal["prompt lookup", "assistant", "self draft", "mtp", "dflash"]
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationReport:
    """How several tokens a pass went.

    `passes` of the model after the prompt, each of `width` tokens, or of one in `singles` of them, which had no draft.
    `tokens_per_pass`: tokens of the text for each of them. `acceptance`: the share of drafted tokens that were
    accepted. `bits`: "token" if the text and its scores have the bits of one token at a time, else "rows". `rows`: how
    the rows of a pass ran.
    """

    draft: str
    width: int
    passes: int
    tokens_per_pass: float
    acceptance: float
    bits: Bits
    rows: str
    singles: int = 0

    def __str__(self) -> str:
        singles = f" ({self.singles} of {self.passes} passes had one)" if self.singles else ""
        return (
            f"{self.tokens_per_pass:.2f} tokens per pass of {self.width} rows{singles}, {self.acceptance:.0%} of the "
            f'tokens drafted by {self.draft} accepted, bits="{self.bits}" (rows {self.rows})'
        )


def draft_of(model: Any, setting: Callable[[str], Any]) -> Draft | None:
    """The draft that these settings of `generate` choose, in the order of transformers; None: they choose none.

    Raises:
        UnsupportedError: for `assistant_early_exit`, whose text differs from that of the model in transformers, too.
    """
    if setting(_EARLY_EXIT) is not None:
        raise UnsupportedError(
            f"{_EARLY_EXIT}: the first layers of a model that was not trained for it draft a fifth of a token a pass, "
            "and the text differs from that of the model; use prompt_lookup_num_tokens or an assistant_model"
        )
    if (num := setting("prompt_lookup_num_tokens")) is not None:
        return Draft("prompt lookup", int(num))
    if setting("use_mtp"):
        return Draft("mtp", int(getattr(model.config.get_text_config(), "num_mtp_layers", None) or 1))
    if (assistant := setting("assistant_model")) is None:
        return None
    if setting("speculation_type") == "dflash":
        return Draft("dflash", int(assistant.config.block_size) - 1)
    return Draft("assistant", int(assistant.generation_config.num_assistant_tokens or _ASSISTANT_TOKENS))


def why_not_drafted(model: Any, setting: Callable[[str], Any], inputs: torch.Tensor | None) -> str | None:
    """Reason against passes of one width for this call, or None; `generate` may still run it in transformers' way."""
    if inputs is None or inputs.dim() != 2 or inputs.shape[0] != 1:
        return "several tokens a pass need the ids of one text"
    if setting("assistant_model") is model:
        return "assistant_model is the model itself"
    if setting("assistant_ensemble_weight") is not None:
        return "assistant_ensemble_weight mixes the draft's distribution into the text"
    return None


def check_bits(bits: object) -> None:
    """Raise a `ConfigError` for a value of `bits` that `generate` does not know."""
    if bits is not None and bits not in get_args(Bits):
        raise ConfigError(f'bits={bits!r}: it is "token", "rows" or None')


class VerifySteps:
    """The forwards of one `generate` with a draft: passes of `width` tokens on a cache that can be cropped."""

    def __init__(
        self,
        model: Any,
        draft: Draft,
        bits: Bits | None,
        runner: GraphRunner | None,
        splits_are_free: Callable[[RowPlan], bool],
        ends: TokenByToken,
        *,
        draws: bool,
        pace: Pacing | None = None,
    ) -> None:
        self.width = draft.num + 1
        self.counts = DraftCounts()
        self.ends = ends
        self._model = model
        self._draft = draft
        self._wanted = bits
        self._bits: Bits | None = None  # None: not decided yet
        self._runner = runner
        self._pace = pace
        if pace is not None:
            pace.allows_one = self._allows_one
        self._splits_are_free = splits_are_free
        self._draws = draws  # tokens are sampled
        self._key: object = None  # of the trial that counts for this call
        self._plan = RowPlan()
        self._split: RowSplit | None = None  # None: all rows at once
        self._cache: CroppableCache | None = None
        self.max_length = 0  # the positions that a text of this call may fill

    @property
    def cache(self) -> Any:
        """The text's cache; None before it is made."""
        return None if self._cache is None else self._cache.cache

    @property
    def num_positions(self) -> int:
        """The positions of the text's cache."""
        return 0 if self._cache is None else int(self._cache.cache.layers[0].max_cache_len)

    def report(self) -> SpeculationReport:
        return SpeculationReport(
            draft=self._draft.kind,
            width=self.width,
            passes=self.counts.passes,
            tokens_per_pass=self.counts.tokens_per_pass,
            acceptance=self.counts.acceptance,
            bits=self._bits or self._wanted or "token",  # undecided: no pass had several rows
            rows="at once" if self._split is None else str(self._plan),
            singles=self.counts.singles,
        )

    def _allows_one(self) -> bool:
        """Whether rounds without a draft may have passes of one token.

        With the bits of passes of `width` rows, scores would depend on the pace. That is accepted only where these
        passes take longer, and no bits were asked for.
        """
        is_slow = self._pace is not None and not self._pace.is_free
        return self._bits == "token" or (self._bits == "rows" and self._wanted is None and is_slow)

    @contextmanager
    def installed(self, make_drafts: Callable[..., Any] | None = None) -> Iterator[None]:
        """Inside, the model's `generate` drafts in steps of one width, on a cache that can be cropped.

        `make_drafts` stands in for transformers' method that makes a candidate generator; None: that method itself.
        """

        def put_cache(config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, length: int) -> None:
            self.max_length = length
            self._cache = croppable(self._model, private.static_cache_length(self._model, config, length), self.width)
            model_kwargs[private.cache_argument()] = self._cache.cache

        method = make_drafts or private.candidate_generator_method(self._model)
        streamer = streamer_of(self._model)
        step = nullcontext if streamer is None else streamer.step
        make = drafting(method, self.width - 1, self.counts, self._model.device, self.ends.passed, step, self._pace)
        draws = DrawsByPosition(self.counts) if self._draws else nullcontext()
        with (
            private.generating(self._model, make_candidates=make, put_cache=put_cache),
            self.ends.installed(self._model),
            RoundInputs(self._model, self._sees_all).installed(),
            draws,
        ):
            yield

    def _sees_all(self) -> bool:
        """Whether attention sees all earlier positions of the text: no window ends within the cache."""
        return self._cache is not None and not self._cache.widens_windows

    def owns(self, kwargs: dict[str, Any]) -> bool:
        """Whether a forward is a pass after the prompt: of all rows, or of one token in a round without a draft."""
        ids = kwargs.get("input_ids")
        return ids is not None and ids.shape[-1] in (self.width, 1) and is_croppable(cache_in(kwargs))

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, may_capture: bool) -> Any:
        """The output of a pass after the prompt. `may_capture`: it may run in a graph."""
        is_single = kwargs["input_ids"].shape[-1] == 1
        kwargs = kwargs if is_single else self._in_range(kwargs)
        with private.decode_step(self._model, 1):  # 5.17 does so in steps of one token only
            if self._bits is None and not is_single:
                output = self._try(forward, args, kwargs)
                if output is not None:
                    return output
            if self._split is None or is_single:
                return run_step(self._runner, forward, args, kwargs, may_capture=may_capture)
            output = run_step(self._runner, self._split.around(forward), args, kwargs, may_capture=may_capture)
        if self._split.unknown is not None and self._bits == "token":
            plans(self._model).pop(self._key, None)
            self._settle_for_rows(self._split.unknown)
        return output

    def _in_range(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a pass, with positions that the text can have.

        Tokens beyond its last position are rejected, whatever their own is. A table of positions may end there.
        """
        positions = kwargs.get("position_ids")
        num = self.max_length - (self.counts.length - 1)  # rows from the last token of the text on
        if positions is None or num >= self.width:
            return kwargs
        last = positions[..., num - 1 : num].expand(*positions.shape[:-1], self.width - num)
        return kwargs | {"position_ids": torch.cat([positions[..., :num], last], -1)}

    def _try(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any | None:
        """Decide about bits, by a trial if need be. Returns the output of the step if the trial has made it."""
        if self._wanted == "rows" or self._cache is None:
            self._bits = "rows"
            return None
        if (reason := self._unsuited()) is not None:
            self._settle_for_rows(reason)
            return None
        config, known = self._model.config, plans(self._model)
        kernels = str(self._model.dtype), str(self._model.device), config._attn_implementation
        experts = str(getattr(config, "_experts_implementation", None))
        self._key = key = (self.width, self.num_positions, *kernels, experts, *switches(), structure(self._model))
        if key in known:
            self._choose(known[key])
            return None
        one_args, one_kwargs = first_row(args, kwargs, self.width)
        take_back, trial = self._cache.cache.crop, RowTrial(self.width)
        trial.run_single(lambda: forward(*one_args, **one_kwargs))
        take_back(-1)
        output, known[key] = trial.run_wide(lambda: forward(*args, **kwargs))
        logger.debug("generate: %d rows at once, operators with other bits: %s", self.width, known[key].differences)
        self._choose(known[key])
        if self._split is None:
            return output
        take_back(-self.width)  # the step runs again, with operators row by row
        return None

    def _unsuited(self) -> str | None:
        """Reason why passes cannot be compared with those of one token, or None."""
        kind = getattr(self._model.config, "_attn_implementation", None)
        if kind not in ("sdpa", "eager"):
            return f"masks of {kind} attention have no row for each token"
        if self._cache is not None and self._cache.widens_windows:
            return "the text is longer than a sliding window, which a static cache forgets and a draft may need again"
        return None

    def _choose(self, plan: RowPlan) -> None:
        """Choose how rows run, now that it is known which operators have other bits for rows at once."""
        if plan.reason is not None:
            self._settle_for_rows(plan.reason + private.remedy_of_experts(self._model))
        elif not plan.calls:
            self._bits = "token"
        elif self._wanted == "token" or self._splits_are_free(plan):
            self._plan, self._split, self._bits = plan, RowSplit(plan, self.width), "token"
        else:
            num = plan.calls.total()
            self._settle_for_rows(
                f"{num} operators have other bits, and a pass in which they run row by row takes longer"
            )

    def _settle_for_rows(self, reason: str) -> None:
        if self._wanted == "token":
            raise UnsupportedError(f'bits="token": {reason}')
        logger.info('generate: bits="rows", as %s', reason)
        self._bits = "rows"


class AssistantSteps:
    """The forwards by which an assistant drafts, on a cache that can be cropped: of one token, and the first of a round
    of two, as the cache lacks the last tokens of the text."""

    NUM_WIDTHS = 2

    def __init__(self, assistant: Any, runner: GraphRunner, verify: VerifySteps) -> None:
        self._assistant = assistant
        self.runner = runner
        self._verify = verify

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the assistant's `generate` uses one cache for the whole text."""

        def put_cache(config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, length: int) -> None:
            name = private.cache_argument()
            if model_kwargs.get(name) is None:
                model_kwargs[name] = croppable(self._assistant, max(length, self._verify.num_positions), 0).cache

        with private.generating(self._assistant, put_cache=put_cache):
            yield

    def owns(self, kwargs: dict[str, Any]) -> bool:
        ids = kwargs.get("input_ids")
        is_short = ids is not None and ids.shape[-1] <= self.NUM_WIDTHS
        return is_short and self.runner.reason is None and is_croppable(cache_in(kwargs))

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, may_capture: bool) -> Any:
        return run_step(self.runner, forward, args, kwargs, may_capture=may_capture)


def warn_of_temperature(setting: Callable[[str], Any], report: SpeculationReport) -> None:
    """Warn where sampling accepts few of the drafted tokens."""
    if setting("do_sample") and report.passes > 8 and report.acceptance < _FEW:
        logger.warning(
            "generate: at temperature %s only %.0f %% of the drafted tokens are accepted; at a lower one more are",
            setting("temperature") or 1.0,
            100 * report.acceptance,
        )
