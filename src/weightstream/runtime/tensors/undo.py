"""Undoes changes, the last one first. After an interrupt it goes on where it stopped. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Undo:
    """Steps, each of which undoes one change. They must be safe to repeat: one that was cut or failed runs again."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[..., object], *args: Any) -> None:
        """Add a step: `step(*args)` runs before all steps that were added so far."""
        self._steps.append(partial(step, *args) if args else step)

    def __call__(self) -> None:
        """Run all remaining steps. If a step fails twice, run the others, and then raise the first such error."""
        errors: list[Exception] = []
        while self._steps:
            step = self._steps[-1]
            try:
                step()
            except Exception:
                try:
                    step()
                except Exception as error:
                    errors.append(error)
            self._steps.pop()
        if errors:
            raise errors[0]
