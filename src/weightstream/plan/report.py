"""The report of a plan: of a model, of a model over several devices, or of a pipeline. Knows no schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar


class PlanReport(ABC):
    """A plan as text and as numbers: `str(plan)` has a line for each prediction.

    Attributes:
        NUMBERS: names of the attributes that `numbers` returns.
        notes: limits of the prediction, a sentence each.
    """

    __slots__ = ()

    NUMBERS: ClassVar[tuple[str, ...]]
    notes: Sequence[str] = ()

    @property
    @abstractmethod
    def machine_text(self) -> str:
        """The machine that the predictions are for, and where its rates come from."""

    @abstractmethod
    def summary(self) -> str:
        """The places of the weights and the bytes that a step moves, in one line or a table."""

    @abstractmethod
    def predictions(self) -> dict[str, str]:
        """The predictions, as text by label."""

    def numbers(self) -> dict[str, Any]:
        """Bytes and predicted seconds by name, for JSON."""
        return {name: getattr(self, name) for name in self.NUMBERS}

    def __str__(self) -> str:
        lines = {"machine": self.machine_text, **self.predictions()}
        return "\n".join([self.summary(), *(f"{label}: {value}" for label, value in lines.items()), *self.notes])
