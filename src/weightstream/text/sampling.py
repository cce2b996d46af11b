"""How the tokens of one answer are chosen, and where it ends, as settings of `generate`. Knows no model's weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightstream.errors import ConfigError

_COLDEST = 1e-5  # lower temperatures are greedy: divided by them, logits overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters of one answer. What is None is as in the checkpoint's generation_config.json."""

    max_new_tokens: int

    temperature: float | None = None
    """0 is greedy."""

    top_p: float | None = None

    seed: int | None = None
    """None: the random state of the process goes on."""

    stop: tuple[str, ...] = ()
    """Strings before which the answer ends."""

    top_logprobs: int | None = None
    """Log-probabilities of the chosen token, and of that many most likely ones; None: none at all."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what `generate` would refuse late, or silently ignore."""
        _check("max_new_tokens", self.max_new_tokens, "at least 1", lambda num: num >= 1)
        _check("temperature", self.temperature, "finite and at least 0", lambda value: 0 <= value < math.inf)
        _check("top_p", self.top_p, "from 0 to 1", lambda share: 0 <= share <= 1)
        check_seed(self.seed)

    def greedy_by_default(self) -> Sampling:
        """Greedy, unless a temperature or top-p is given."""
        is_given = self.temperature is not None or self.top_p is not None
        return self if is_given else replace(self, temperature=0.0)

    def options(self, generation_config: Any) -> dict[str, Any]:
        """The keyword arguments of `generate`.

        Where a temperature or top-p is given and the checkpoint has no top-k, there is none: transformers' own default
        of 50 would cut the distribution.
        """
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": 1}
        if self.temperature is not None and self.temperature < _COLDEST:
            return options | {"do_sample": False}
        given = {name: value for name in ("temperature", "top_p") if (value := getattr(self, name)) is not None}
        if given:
            options |= {**given, "do_sample": True, "top_k": generation_config.top_k or 0}
        return options


def check_seed(seed: int | None) -> None:
    """Raise `ConfigError` for a seed that torch does not take."""
    _check("seed", seed, "from -2^63 to 2^64 - 1", lambda seed: -(2**63) <= seed < 2**64)


def _check(name: str, value: Any, rule: str, is_met: Callable[[Any], bool]) -> None:
    if value is not None and not is_met(value):
        raise ConfigError(f"{name}={value}: it is {rule}")


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Inside, tokens are drawn from this seed; afterwards the random state is what it was. None: nothing changes."""
    if seed is None:
        yield
        return
    forked = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**forked):
        torch.manual_seed(seed)
        yield
