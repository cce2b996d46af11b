"""The base of all plans: of a model, of a model over several devices, of a pipeline. Knows no schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar


class PlanReport(ABC):
    """A plan as text and as numbers: `str(plan)` is its summary, a line for each prediction, and its notes."""

    __slots__ = ()

    NUMBERS: ClassVar[tuple[str, ...]]  # attributes that `numbers` holds under their own names
    notes: Sequence[str] = ()  # what the plan does not cover, a sentence each

    @abstractmethod
    def summary(self) -> str:
        """Where the weights are and how many bytes move."""

    @abstractmethod
    def predictions(self) -> dict[str, str]:
        """What is predicted, as text by label."""

    def numbers(self) -> dict[str, Any]:
        """Bytes and predicted seconds by name, for JSON."""
        return {name: getattr(self, name) for name in self.NUMBERS} | self._more_numbers()

    @abstractmethod
    def _more_numbers(self) -> dict[str, Any]:
        """Numbers that are no attributes."""

    def __str__(self) -> str:
        predicted = (f"{label}: {value}" for label, value in self.predictions().items())
        return "\n".join([self.summary(), *predicted, *self.notes])
