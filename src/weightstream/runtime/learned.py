"""What steps teach: the order of the units, and which weights are read outside of them. Knows no device."""

from __future__ import annotations

from collections.abc import Iterable

from weightstream.plan.plan import Plan


class Lessons:
    """The sequence of units in the step under way and in the one before.

    A watched step sees reads outside of units. The first step is watched, and those that follow until one has none.
    """

    def __init__(self) -> None:
        self.watching = True
        self.outside: dict[str, set[str]] = {}  # reading module -> alias groups read outside of their units
        self.sequence: list[int] = []
        self.has_told = False  # that such reads are slow
        self.asked: frozenset[str] = frozenset()  # alias groups that the device was asked to keep
        self._before: tuple[int, ...] | None = None

    def ask(self, kept: Iterable[str]) -> frozenset[str]:
        """Ask for these too; returns all that were asked for."""
        self.asked |= frozenset(kept)
        return self.asked

    @property
    def read_outside(self) -> frozenset[str]:
        """Alias groups that the last watched step read outside of their units."""
        return frozenset(alias for aliases in self.outside.values() for alias in aliases)

    def new_order(self, plan: Plan) -> tuple[int, ...] | None:
        """The order of the step that ended, if it is to be taken over: it is the first, or the second of its kind."""
        sequence, before = tuple(self.sequence), self._before
        self._before = sequence
        planned = tuple(unit for unit in plan.manifest.order if plan.opens(unit))
        return sequence if sequence != planned and before in (None, sequence) else None
