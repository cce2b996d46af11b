"""Passes of several tokens in numbers: their widths, the tokens that they yield, and when a draft is worth them."""

from __future__ import annotations

from itertools import product

import pytest

from weightstream.plan.speculation import (
    FREE_PASS,
    Passes,
    PassSeconds,
    best_num_drafted,
    choose_width,
    tokens_per_pass,
)

WIDTHS = (1, 2, 4, 8, 16, 32)


def passes(seconds: dict[int, float], eager: float = 1.0) -> Passes:
    return Passes((PassSeconds(tokens=n, step_s=eager, graph_s=s) for n, s in seconds.items()), in_graphs=True)


def test_seconds_between_the_predicted_widths_are_linear() -> None:
    found = passes({1: 1.0, 4: 4.0, 8: 5.0})
    assert [found.seconds(n) for n in (1, 2, 3, 4, 6, 8, 99)] == [1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.0]


def test_eager_passes_have_times_of_their_own() -> None:
    both = [PassSeconds(tokens=n, step_s=n, graph_s=1.0) for n in WIDTHS]
    assert Passes(both, in_graphs=False).widest_free() == 1
    assert Passes(both, in_graphs=True).widest_free() == 16


def test_the_widest_free_pass_is_within_two_percent_and_sixteen_rows() -> None:
    for last in range(len(WIDTHS)):
        found = passes({n: 1.0 if index <= last else 1.03 * FREE_PASS for index, n in enumerate(WIDTHS)})
        assert found.widest_free() == min(16, WIDTHS[last])
        assert found.widest_free(4) == min(4, WIDTHS[last])


def test_tokens_of_a_pass() -> None:
    assert tokens_per_pass([]) == 1
    assert tokens_per_pass([0.5, 0.5]) == 1.75
    assert tokens_per_pass([1.0] * 7) == 8
    assert tokens_per_pass([0.0, 1.0]) == 1


def test_a_free_draft_gets_the_widest_free_pass() -> None:
    choice = choose_width(passes(dict.fromkeys(WIDTHS, 0.1)), 0.4)
    assert choice.tokens == 16
    assert choice.plain_tokens_per_s == pytest.approx(10)
    assert choice.tokens_per_s == pytest.approx(10 * tokens_per_pass([0.4] * 15))


@pytest.mark.parametrize(("slope", "acceptance"), list(product((0.3, 0.5, 0.8, 1.0), (0.1, 0.4, 0.9))))
def test_passes_whose_time_grows_are_used_where_they_yield_more(slope: float, acceptance: float) -> None:
    found = passes({n: 1 + slope * (n - 1) for n in WIDTHS})
    choice = choose_width(found, acceptance)
    gains = {n: tokens_per_pass([acceptance] * (n - 1)) / found.seconds(n) for n in WIDTHS}
    assert choice.tokens == (max(gains, key=gains.__getitem__) if max(gains.values()) > 1.1 else 1)
    if acceptance <= slope:
        assert choice.tokens == 1


def test_a_slow_draft_gets_fewer_tokens_and_none_if_it_gains_nothing() -> None:
    flat = passes(dict.fromkeys(WIDTHS, 1.0))
    widths = [choose_width(flat, 0.8, draft_s).tokens for draft_s in (0.0, 0.01, 0.1, 0.4, 2.0)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 16
    assert 1 < widths[2] < 16
    assert widths[-1] == 1


def test_the_number_of_drafted_tokens_is_the_best_of_all() -> None:
    for acceptance, draft_s, slope in product((0.0, 0.3, 0.8, 1.0), (0.0, 0.05, 0.5), (0.0, 0.2)):
        expected = [acceptance * 0.95**n for n in range(12)]

        def pass_s(num: int) -> float:
            return 1 + slope * num  # noqa: B023

        found = best_num_drafted(expected, draft_s, pass_s)
        rates = [tokens_per_pass(expected[:k]) / (k * draft_s + pass_s(k)) for k in range(13)]
        assert rates[found] == max(rates)
