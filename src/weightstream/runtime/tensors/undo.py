"""Undo changes, the last one first; after an interrupt, go on where it was. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Undo:
    """Steps that each undo one change. A step may run twice: one that was cut short, or that failed, is tried again."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[..., object], *args: Any) -> None:
        """Add a step: `step(*args)` runs before all steps that were added so far."""
        self._steps.append(partial(step, *args) if args else step)

    def __call__(self) -> None:
        """Run all steps that have not run; raises the first error of one that failed twice, once all others have."""
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
