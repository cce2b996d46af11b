"""Grids of cases, of which CI runs a part with each value, and with three axes each pair of values;
and numbers of examples, of which CI runs a share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

NUM_EXAMPLES = 100  # Hypothesis's default for a test


def thinned(*axes: Iterable[Any], every: int = 2) -> list[Any]:
    """All combinations of values, with tuples spread into arguments of their own.

    A combination is a stress case if the sum of its places in the axes is not a multiple of `every`.
    """
    cases = []
    for each in product(*map(enumerate, axes)):
        places, values = zip(*each, strict=True)
        flat = [part for value in values for part in _parts(value)]
        cases.append(pytest.param(*flat, marks=[pytest.mark.stress] * (sum(places) % every != 0)))
    return cases


def only(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All values, with tuples spread into arguments of their own. All but `kept` are stress cases."""
    cases = list(values)
    assert set(kept) <= set(cases), set(kept) - set(cases)
    return [pytest.param(*_parts(value), marks=[pytest.mark.stress] * (value not in kept)) for value in cases]


def examples(num: int, **more: Any) -> settings:
    """`num` examples of Hypothesis, or CI's share of them."""
    return settings(max_examples=num * settings().max_examples // NUM_EXAMPLES, deadline=None, **more)


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
