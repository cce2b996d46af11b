"""Grids of cases, of which CI runs a part: each value is there, and each pair of values where there are three axes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], every: int = 2) -> list[Any]:
    """All combinations, tuples of an axis as arguments of their own. Those whose places in the axes do not add up to a
    multiple of `every` are for stress."""
    cases = []
    for each in product(*map(enumerate, axes)):
        places, values = zip(*each, strict=True)
        flat = [part for value in values for part in _parts(value)]
        cases.append(pytest.param(*flat, marks=[pytest.mark.stress] * (sum(places) % every != 0)))
    return cases


def only(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All values, tuples as arguments of their own, of which all but those that are kept are for stress."""
    found = list(values)
    assert set(kept) <= set(found), set(kept) - set(found)
    return [pytest.param(*_parts(value), marks=[pytest.mark.stress] * (value not in kept)) for value in found]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
