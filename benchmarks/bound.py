"""The bound of a step: the least time that any schedule of a model's weights has within a device budget.

    plain = max(resident step, (bytes - budget) / link)
    coded = max(resident step + decoding, (coded bytes - (budget - decode buffer)) / link)
    bound = min(plain, coded)

`bytes` are those of all weights without tables, of which a step reads a few rows. Compressed ("coded") bytes, buffer
and decoding are those of the plans with `codec="compressed"` at this budget, in the grain with the least bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from weightstream import OffloadConfig, Plan, PlanError
from weightstream.inputs.gathering import sketch_of, tables_of
from weightstream.inputs.machine import dtypes_of, machine_with_rates
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.weights.alias_groups import groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """For a model and a budget: bytes of weights without tables, of tables, and the compressed plans of all grains."""

    budget: int
    nbytes: int
    tables_nbytes: int
    coded: Sequence[Plan]

    def row(self, resident_s: float, link_bytes_per_s: float, forward_s: float | None = None) -> dict[str, Any]:
        """The bound and its parts, for these times of the resident model and rate of the link.

        With `forward_s`, of `resident_s`, the step trains: it passes over the weights twice. As bytes that the backward
        needs do not fit before it begins, `bound_passes_ms` has the larger of compute and link for each pass.
        """
        passes = [resident_s] if forward_s is None else [forward_s, resident_s - forward_s]
        found: dict[str, Any] = {"budget_nbytes": self.budget, "plain_nbytes": self.nbytes}
        bounds = {"plain": _bound(passes, 0.0, (self.nbytes - self.budget) / link_bytes_per_s)}
        for plan in self.coded:
            nbytes = plan.manifest.nbytes - self.tables_nbytes
            over = nbytes - (self.budget - plan.buffer_nbytes)
            seconds = _bound(passes, plan.decode_s, over / link_bytes_per_s)
            if seconds < bounds.setdefault("coded", (float("inf"), 0.0)):
                bounds["coded"] = seconds
                found |= {"coded_nbytes": nbytes, "coded_buffer_nbytes": plan.buffer_nbytes}
                found |= {"coded_decode_ms": round(1e3 * len(passes) * plan.decode_s, 3)}
        found |= {f"bound_{form}_ms": round(1e3 * seconds, 4) for form, (seconds, _) in bounds.items()}
        found |= {"bound_ms": round(1e3 * min(bounds.values())[0], 4), "resident_ms": round(1e3 * resident_s, 4)}
        if forward_s is not None:
            found |= {"bound_passes_ms": round(1e3 * min(by_pass for _, by_pass in bounds.values()), 4)}
        return found | {"link_gbps": round(link_bytes_per_s / 1e9, 3)}


def _bound(passes: Sequence[float], decode_s: float, link_s: float) -> tuple[float, float]:
    """Of the whole step, and the sum of each pass's; `decode_s` and `link_s` are those of one pass."""
    num = len(passes)
    return max(sum(passes) + num * decode_s, num * link_s), sum(max(taken + decode_s, link_s) for taken in passes)


def bounds_of(model: nn.Module, budgets: Iterable[int], backend: Backend) -> dict[int, Bound]:
    """The bound of each budget, from the planner, before the model is offloaded; keeps nothing of the model."""
    by_alias, config = groups(model), OffloadConfig(codec="compressed")
    tables, found = tables_of(model, by_alias), {}
    nbytes = sum(group.nbytes for group in by_alias.values())
    tables_nbytes = sum(by_alias[alias].nbytes for alias in tables)
    machine = replace(machine_with_rates(backend, config, dtypes_of(model)), host_free_nbytes=2 * nbytes)
    inputs = sketch_of(model, None, config, machine).inputs
    for budget in budgets:
        coded = []
        for grain, planner in zip(inputs.grains, inputs.at_budget(budget).planners, strict=True):
            with suppress(PlanError):
                coded.append(planner(grain))
        found[budget] = Bound(budget=budget, nbytes=nbytes - tables_nbytes, tables_nbytes=tables_nbytes, coded=coded)
    return found
