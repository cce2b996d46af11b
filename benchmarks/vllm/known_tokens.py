"""A proposer for vLLM whose acceptance is set: it knows the tokens of an earlier run, and is wrong on purpose.

Random weights repeat no text, so the acceptance of a real draft says nothing here. The passes that verify are the real
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

RIGHT, PROPOSED = 2, 3  # of the proposed tokens, so many are right: with the target's own, three tokens a pass


class KnownTokens:
    """vLLM makes it (`"method": "custom_class"`) and asks it after each pass."""

    following: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # prompts with the tokens that follow; empty: no drafts

    def __init__(self, vllm_config: Any) -> None:
        self._vocab = vllm_config.model_config.get_vocab_size()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The next tokens of each sequence that has just got some."""
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]].tolist() for row in range(len(sampled_token_ids))]
        return [self._next(text) if new else [] for text, new in zip(texts, sampled_token_ids, strict=True)]

    def _next(self, text: list[int]) -> list[int]:
        for prompt, following in self.following.items():
            if tuple(text[: len(prompt)]) == prompt:
                done = len(text) - len(prompt)
                known = following[done : done + PROPOSED]
                return [*known[:RIGHT], *((token + 1) % self._vocab for token in known[RIGHT:])]
        return []

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model."""
