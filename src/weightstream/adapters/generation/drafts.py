"""Drafted tokens in steps of one width, from transformers' own candidate generators. Knows no weights and no loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weightstream.adapters.generation.pacing import Pacing, limit
from weightstream.adapters.steps.host_values import on_device

_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


@dataclass(kw_only=True, slots=True)
class DraftCounts:
    """Counts of one `generate`: `passes` of the model after the prompt, `singles` of them of one token, `drafted`
    tokens that were verified, `accepted` ones of them, and `matched` candidates: these, and others by chance."""

    passes: int = 0
    singles: int = 0
    drafted: int = 0
    accepted: int = 0
    matched: int = 0
    length: int = 0
    """Of the text before the pass under way."""
    candidates: list[int] = field(default_factory=list)
    """Of the pass under way, filled up to its width."""

    @property
    def tokens_per_pass(self) -> float:
        return 1 + self.matched / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class FixedWidthDrafts:
    """Stands in for a candidate generator of transformers: each round has exactly `num` candidates.

    So each pass that verifies them has the same shapes, whatever was drafted. Candidates that are missing are filled up
    with a token; the model may say it by chance, and then it is as good as drafted. Candidates end before a token that
    ends the text, which then is the model's own. None are verified together with the prompt: what a draft says must not
    decide which kernels run the prompt.

    With a pace, rounds may have no draft, and then the pass may have one row.

    Logits of the draft are not passed on. With them transformers would accept by comparing two distributions; without
    them a sampled token is accepted if it is the drafted one, so that a text does not depend on its drafts.
    """

    def __init__(
        self,
        generator: Any,
        num: int,
        eos_ids: frozenset[int],
        counts: DraftCounts,
        on_pass: Callable[[int], None],
        step: Callable[[], AbstractContextManager[object]],
        pace: Pacing | None = None,
    ) -> None:
        self._generator = generator
        self._num = num
        self._eos_ids = eos_ids
        self._filler = next(token for token in range(len(eos_ids) + 1) if token not in eos_ids)
        self._counts = counts
        self._on_pass = on_pass
        self._step = step
        self._pace = pace
        self._num_drafted: int | None = None  # in the last round; None: it was the prompt

    def __getattr__(self, name: str) -> Any:  # `requires_model_outputs` and others that the loop reads
        return getattr(self._generator, name)

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """The ids with `num` candidates behind them, but none with the prompt; and no logits."""
        if self._num_drafted is None:
            self._generator.get_candidates(input_ids, **kwargs)
            self._num_drafted = 0
            _forget_round(self._generator)
            return input_ids, None
        num = self._num if self._pace is None else self._pace.begin(input_ids.shape[1])
        new = self._drafted(input_ids, num, kwargs) if num else []
        self._num_drafted = len(new)
        if self._pace is not None and not self._pace.runs_rows(len(new)):
            self._counts.passes += 1
            self._counts.singles += 1
            self._counts.candidates = []
            return input_ids, None
        self._counts.passes += 1
        self._counts.length = input_ids.shape[1]
        self._counts.drafted += len(new)
        self._counts.candidates = [*new, *[self._filler] * (self._num - len(new))]
        candidates = on_device([self._counts.candidates], input_ids.device, input_ids.dtype)
        return torch.cat([input_ids, candidates], 1), None

    def _drafted(self, input_ids: torch.Tensor, num: int, kwargs: Any) -> list[int]:
        """Up to `num` drafted tokens."""
        if self._pace is not None:
            limit(self._generator, num)
        with self._step():
            ids, _ = self._generator.get_candidates(input_ids, **kwargs)
        new: list[int] = ids[0, input_ids.shape[1] :].tolist()[:num]
        ends = [index for index, token in enumerate(new) if token in self._eos_ids]
        return new[: ends[0]] if ends else new

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: Any) -> None:
        self._on_pass(input_ids.shape[1])
        if self._num_drafted is None or scores.shape[1] == 1:  # the prompt, or a pass of one row
            return
        accepted = min(int(num_matches), self._num_drafted)
        self._counts.accepted += accepted
        self._counts.matched += int(num_matches)
        if self._pace is not None:
            self._pace.verified(accepted, int(num_matches))
        if self._num_drafted or self._pace is None:
            self._generator.update_candidate_strategy(input_ids, scores[:, : self._num_drafted + 1], accepted)


def _forget_round(generator: Any) -> None:
    """Have an assistant's generator forget the confidences of a round that is not verified."""
    if isinstance(confidences := getattr(generator, "probs", None), list):
        confidences.clear()


class DrawsByPosition(TorchFunctionMode):
    """Inside, the tokens of a pass are drawn one after the other, up to the first that was not drafted.

    So a text takes the random numbers that it takes with one token a pass: the same seed gives the same text.
    """

    def __init__(self, counts: DraftCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.multinomial or args[0].dim() != 2 or args[0].shape[0] != len(self._counts.candidates) + 1:
            return func(*args, **kwargs)
        drawn: list[torch.Tensor] = []
        for row, drafted in zip(args[0].split(1), [*self._counts.candidates, None], strict=True):
            drawn.append(func(row, *args[1:], **kwargs))
            if drafted is None or int(drawn[-1]) != drafted:
                break
        return torch.cat([*drawn, *drawn[-1:] * (len(args[0]) - len(drawn))])  # those behind are not looked at


def drafting(
    make: Callable[..., Any],
    num: int,
    counts: DraftCounts,
    device: torch.device,
    on_pass: Callable[[int], None],
    step: Callable[[], AbstractContextManager[object]] = nullcontext,
    pace: Pacing | None = None,
) -> Callable[..., FixedWidthDrafts]:
    """Wrap the method by which a model on `device` makes its candidate generator.

    `on_pass` gets the length of the text after a pass. A draft that uses modules of the model runs inside of `step()`.
    """

    def made(generation_config: Any, *args: Any, **kwargs: Any) -> FixedWidthDrafts:
        generator = make(_plain(generation_config), *args, **kwargs)
        is_shared = _compute_at(generator, device)
        eos = getattr(generation_config, "_eos_token_tensor", None)
        eos_ids = frozenset[int]() if eos is None else frozenset(eos.tolist())
        return FixedWidthDrafts(generator, num, eos_ids, counts, on_pass, step if is_shared else nullcontext, pace)

    return made


def _plain(generation_config: Any) -> Any:
    """Settings of the text with which a draft takes its most likely tokens: draws of its own would take random numbers
    from the text. Stop strings are left to the text, as transformers gives an assistant no tokenizer to find them."""
    config = copy.copy(generation_config)
    config.do_sample, config.stop_strings = False, None
    for name in _OF_SAMPLING:  # transformers warns of them where nothing is sampled
        setattr(config, name, None)
    return config


def _compute_at(generator: Any, device: torch.device) -> bool:
    """Have a draft that uses modules of the model compute on `device`, where an offloaded model computes: transformers
    takes the device of its weights, which is another one. Returns whether it is such a draft."""
    if (mtp := getattr(generator, "mtp_model", None)) is not None:
        generator.device = device
        for name in ("layers", "shared_post_norm"):  # all else is the model's
            if (own := getattr(mtp, name, None)) is not None:
                own.to(device)
    if (head := getattr(generator, "main_model_output_embeddings", None)) is not None:
        generator.main_model_output_embeddings = _Head(head, device)
    return mtp is not None or head is not None


class _Head:
    """The output embeddings of a model, as DFlash calls them: `weight` only names the device of their input."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self.weight = torch.empty(0, device=device)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._module(states)
        return logits
