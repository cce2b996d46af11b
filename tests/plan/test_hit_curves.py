"""Measured hit rates: the form of each curve, and the choice of one for a model."""

from __future__ import annotations

import itertools

import pytest

from weightstream.plan.hit_curves import CURVES, HitCurve, curve_of

each = pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)


@each
def test_hit_rates_rise_from_0_to_1_and_are_concave(curve: HitCurve) -> None:
    found = [curve.at(k / 1000) for k in range(1001)]
    assert (found[0], found[-1]) == (0.0, 1.0)
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert min(steps) > 0
    assert all(later <= step + 1e-9 for step, later in itertools.pairwise(steps))
    assert curve.at(1.5) == 1.0
    assert all(there >= k / 1000 for k, there in enumerate(found)), "at least the share of the slots"


@each
def test_a_curve_goes_through_its_points(curve: HitCurve) -> None:
    assert all(0 < share < 1 and curve.at(share) == pytest.approx(hits) for share, hits in curve.points)
    assert 0.5 < curve.recall < 0.95


def test_names_are_unique() -> None:
    assert len({curve.name for curve in CURVES}) == len(CURVES)


@each
def test_a_model_has_its_own_curve(curve: HitCurve) -> None:
    expected = "Qwen3-30B-A3B" if curve.name == "gemma-4-26B-A4B" else curve.name
    assert curve_of(curve.num_rows, curve.per_token).name == expected, "the first of those with equal numbers"


@pytest.mark.parametrize(
    ("num_rows", "per_token", "name"),
    [
        (32, 4, "OLMoE-1B-7B"),  # gpt-oss-20b: a token uses an eighth of the experts, not a 32nd as in 120b
        (160, 8, "Qwen3-30B-A3B"),  # GLM-4.6
        (64, 6, "OLMoE-1B-7B"),  # DeepSeek-V2-Lite
        (384, 8, "Qwen3.8-Flash-Next"),  # Kimi-K2
        (256, 8, "Qwen3.6-35B-A3B"),  # DeepSeek-V3
        (4, 1, "Mixtral-8x7B"),
        (2, 2, "Mixtral-8x7B"),
    ],
)
def test_another_model_has_the_curve_of_the_most_similar_one(num_rows: int, per_token: float, name: str) -> None:
    assert curve_of(num_rows, per_token).name == name
