"""Drafts of a model whose weights are split: the high parts alone propose tokens, on the KV cache of the text itself.

The draft is the model with fewer bits, so what the exact model has cached of the text serves both: the draft needs no
prompt and no cache of its own. Its keys lie after the text's, where the pass that verifies overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weightstream.adapters.generation.tree import NodePass
from weightstream.adapters.generation.tree_drafts import Start
from weightstream.adapters.steps.croppable_cache import is_croppable
from weightstream.adapters.steps.graph_runner import GraphRunner, run_step


class SelfDrafts:
    """A candidate generator of transformers: the most likely tokens of the draft, one after the other, for which the
    host does not wait.

    `draft`: the model with the high parts. `cache_of` returns the cache of the text. `runner` captures the draft's
    steps; None: they run eagerly.
    """

    requires_model_outputs = False

    def __init__(
        self, draft: Any, start: Start, cache_of: Callable[[], Any], num: int, runner: GraphRunner | None
    ) -> None:
        self.num_assistant_tokens = num  # at most, which the pace of a text changes
        self._draft = draft
        self._start = start
        self._cache_of = cache_of
        self._runner = runner
        self._pass: NodePass | None = None

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """The ids with drafted tokens after them; none before the prompt is in the cache."""
        cache = self._cache_of()
        if not is_croppable(cache):
            return input_ids, None
        if self._pass is None:
            num_seen = cache.layers[0].max_cache_len
            self._pass = NodePass(self._draft, cache, self._start.seen(num_seen), self._forward)
            self._alone = torch.ones(1, 1, dtype=torch.bool, device=input_ids.device)
            self._depth = torch.zeros(1, dtype=torch.long, device=input_ids.device)
        length = input_ids.shape[1] - 1  # the last token is not in the cache yet
        num = min(self.num_assistant_tokens, self._start.max_length - length - 1)
        tokens = [input_ids[0, -1:]]
        for index in range(num):
            position = self._depth + self._start.position_at(length + index)
            logits = self._pass.logits(tokens[-1], position, length + index, self._alone, self._depth, self._depth)
            tokens.append(logits.argmax(-1))
        if num:
            cache.crop(-num)
        return torch.cat([input_ids, *(token[None] for token in tokens[1:])], 1), None

    def update_candidate_strategy(self, *_: Any) -> None:
        """Nothing is learned here: the pace of a text counts what is accepted."""

    def _forward(self, **kwargs: Any) -> Any:
        return run_step(self._runner, self._draft, (), kwargs, may_capture=True)
