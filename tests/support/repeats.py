"""Grids of cases, of which CI runs a part: each value is there, and each pair of values where there are three axes;
and numbers of examples, of which CI has a share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

NUM_EXAMPLES = 100  # that Hypothesis has of a test unless told otherwise


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


def examples(num: int, **more: Any) -> settings:
    """So many examples of Hypothesis, or the share that CI has of them."""
    return settings(max_examples=num * settings().max_examples // NUM_EXAMPLES, deadline=None, **more)


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
