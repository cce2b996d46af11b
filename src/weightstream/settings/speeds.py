"""Speeds as users write them: the rate of a link to a GPU, and a target for a plan."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import NamedTuple, Self

from weightstream.errors import ConfigError

_LANES_BYTES_PER_S = MappingProxyType({3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9})  # of one, by generation
_REACHED = 0.85  # share of it that large copies reach [H200: 0.88]
_PCIE = re.compile(r"(?:pcie|gen)\s*(?:gen\s*)?(\d)(?:\.0)?\s*(?:[x×]\s*(\d+))?", re.IGNORECASE)
_LANES = (1, 2, 4, 8, 16)
_NUMBER = r"(\d*\.?\d+)\s*"
_RATE = re.compile(_NUMBER + r"(k|m|g|t)b(?:/|p)s", re.IGNORECASE)
_TOKENS = re.compile(_NUMBER + r"(?:tok(?:en)?s?)\s*/\s*s(?:ec(?:ond)?)?", re.IGNORECASE)
_SECONDS = re.compile(_NUMBER + r"(ms|s)", re.IGNORECASE)


class Link(NamedTuple):
    """A link between host and GPU.

    Attributes:
        bytes_per_s: bytes per second of large copies to the GPU.
        text: its name, such as `PCIe 4 x16`.
    """

    bytes_per_s: float
    text: str

    @classmethod
    def of_pcie(cls, generation: int, lanes: int = 16) -> Self:
        """The link of a PCIe generation."""
        if generation not in _LANES_BYTES_PER_S or lanes not in _LANES:
            raise ConfigError(f"link: PCIe {generation} x{lanes}: give PCIe 3 to 6, with x1, x2, x4, x8 or x16")
        return cls(_REACHED * lanes * _LANES_BYTES_PER_S[generation], f"PCIe {generation} x{lanes}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The link in a text such as "PCIe 4", "PCIe 4 x8" or "25GB/s"; raises `ConfigError`."""
        if pcie := _PCIE.fullmatch(text.strip()):
            return cls.of_pcie(int(pcie[1]), int(pcie[2] or 16))
        rate = _RATE.fullmatch(text.strip())
        if rate is None or not float(rate[1]):
            raise ConfigError(f"link = {text!r}: give a rate such as 25GB/s, or PCIe 4, or PCIe 4 x8")
        bytes_per_s = float(rate[1]) * 1e3 ** (1 + "kmgt".index(rate[2].lower()))
        return cls(bytes_per_s, f"a link of {rate[1]} {rate[2].upper()}B/s")


class Target(NamedTuple):
    """A speed that a plan should reach: tokens per second, or seconds of a step. The other one is None.

    Attributes:
        tokens_per_s: new tokens per second of all sequences together.
        seconds: seconds of a step, or of a call of a pipeline.
    """

    tokens_per_s: float | None
    seconds: float | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The target in a text such as "10tok/s" or "100ms"; raises `ConfigError`."""
        text = str(text).strip()
        if (tokens := _TOKENS.fullmatch(text)) and float(tokens[1]):
            return cls(float(tokens[1]), None)
        if (seconds := _SECONDS.fullmatch(text)) and float(seconds[1]):
            return cls(None, float(seconds[1]) * (1e-3 if seconds[2].lower() == "ms" else 1.0))
        raise ConfigError(f"target = {text!r}: give tokens per second or the time of a step, such as 10tok/s or 100ms")

    def step_s(self, num_tokens: int) -> float:
        """The seconds that a step may take in which so many tokens are new; 0: the step is not one of text.

        Raises `ConfigError` for tokens per second of such a step.
        """
        if self.seconds is not None:
            return self.seconds
        assert self.tokens_per_s is not None
        if not num_tokens:
            raise ConfigError("target: tokens per second are for models of text: give a time, such as 100ms or 2s")
        return num_tokens / self.tokens_per_s

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"{self.seconds:g} s" if self.seconds >= 1 else f"{1e3 * self.seconds:g} ms"
        return f"{self.tokens_per_s:g} tokens/s"
