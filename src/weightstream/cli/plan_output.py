"""What `weightstream plan` writes, for models and for pipelines alike: which files and tables, bars, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weightstream.api.other_budgets import AtBudget, P
from weightstream.cli.messages import is_quiet
from weightstream.measure.progress import reporting
from weightstream.plan.pipeline import PipelinePlan
from weightstream.plan.plan import Plan
from weightstream.plan.units import exact

if TYPE_CHECKING:
    from weightstream.api.plan_model import MachineChoice

_WORTH = 0.99  # a plan for less memory is worth a note if it takes less than this share of the time


class Output(NamedTuple):
    """What the command writes besides the plan.

    Attributes:
        sweep: a table of plans at other budgets.
        plot: a figure of these into this file.
        save: the plan into this file.
        as_json: one JSON object, and nothing else.
    """

    sweep: bool
    plot: Path | None
    save: Path | None
    as_json: bool

    @property
    def has_sweep(self) -> bool:
        """Whether plans at other budgets are needed."""
        return self.sweep or self.plot is not None

    @contextmanager
    def progress(self, text: str, num_plans: int) -> Iterator[Callable[[], object]]:
        """Show a bar over this many plans; the function that it yields advances it. Without a terminal, a line."""
        with reporting(text, False if is_quiet() else None, num_plans) as advance:
            yield advance


def machine_line(planned: Plan | PipelinePlan, where: MachineChoice) -> str:
    """The machine that a plan is for, and how to choose another one if none was named."""
    text = planned.machine_text
    if any(value is not None for value in where.values()):
        return text
    if planned.on_cpu:
        return f'{text}; no GPU here: try --gpu "RTX 4090"'
    return text if planned.is_measured else f"{text}: `weightstream doctor` measures this machine"


def sweep_rows(plans: Sequence[AtBudget[P]]) -> list[dict[str, Any]]:
    """The rows of a sweep for `--json`, also that of the chosen budget: the budget, and the numbers of its plan."""
    return [at.plan.numbers() | {"budget": at.budget} for at in plans]


def faster_note(own: AtBudget[P], plans: Sequence[AtBudget[P]]) -> dict[str, str]:
    """A labelled line if a plan for less memory is faster than the one for the chosen budget; else empty."""
    fast_s = _WORTH * own.plan.run_s
    least = next((at for at in plans if at.budget < own.budget and at.plan.run_s < fast_s), None)
    if least is None:
        return {}
    return {"note": f"a plan for less memory is faster: --device-budget {exact(least.budget)}"}
