"""Counts of the caches of experts: in the stats of a streamer, in a trace, and in the correction of a plan."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weightstream
from expert_rig import NUM_EXPERTS, NUM_LAYERS, TOP_K, built, counts, held, plan_of
from models import model_nbytes
from weightstream.cli.terminal import expert_line
from weightstream.measure.comparison import compare
from weightstream.plan.expert_cache import Counts
from weightstream.runtime.experts import counters
from weightstream.runtime.experts.counters import Cache, Tally
from weightstream.runtime.experts.slot_cache import Found
from weightstream.runtime.streamer.stats import of_cache
from weightstream.runtime.trace import ExpertTraffic, Span, Trace, total
from weightstream.text.stream import Answer

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("nothing_foreseen")

MOST = 4
ROW_NBYTES = 2 * 3 * 64 * 64  # bfloat16, of up, gate and down


def steps(model: Any, num: int, first: int = 0) -> None:
    """Logits of steps of one token each, all different."""
    with torch.no_grad():
        for token in range(first, first + num):
            model(torch.tensor([[3 + 7 * token % 120]]))


def traffic(streamer: weightstream.Streamer) -> tuple[int, int, int]:
    found, fetched, nbytes, ahead, used = streamer.stats().experts
    assert (ahead, used) == (0, 0)
    return found, fetched, nbytes


# -- the stats of a streamer -----------------------------------------------------------------------------------------


def test_stats_equal_the_counters_of_the_caches() -> None:
    model = built()
    with held(model, "cached", MOST) as streamer:
        steps(model, 6)
        found, fetched, nbytes = traffic(streamer)
        assert (found, fetched) == counts(streamer)
        assert found + fetched == 6 * NUM_LAYERS * TOP_K, "the first, watched step also reads single rows"
        assert nbytes == fetched * ROW_NBYTES > 0


def test_counts_outlive_a_plan_and_the_streamer() -> None:
    model = built()
    with held(model, "cached", MOST) as streamer:
        steps(model, 6)
        before = traffic(streamer)
        for form, more in (("cached", 3), ("coded", 0), ("cached", 6)):
            streamer.switch(plan_of(streamer, "cached", MOST + more) if form == "cached" else streamer.plan)
            assert traffic(streamer) == before
            steps(model, 4)
            now = traffic(streamer)
            assert sum(now[:2]) > sum(before[:2])
            before = now
    assert traffic(streamer) == before


def test_without_a_cache_nothing_is_counted() -> None:
    model = built()
    with weightstream.offload(model, device="cpu", device_budget=model_nbytes(model) // 2, codec="none") as streamer:
        with streamer.trace() as trace:
            steps(model, 6)
        assert traffic(streamer) == (0, 0, 0)
        assert trace.experts == {}
        assert streamer._installed.timeline.tally.counts() is None
        assert of_cache(streamer.plan, streamer.stats().experts, 6) is None


class FixedCounts:
    """Slots with fixed counts."""

    def __init__(self) -> None:
        self.now: tuple[int, ...] = (0, 0)

    def counts(self) -> Found:
        return Found(*self.now)


def test_counts_begin_when_slots_are_full() -> None:
    """Rows that are fetched into empty slots predict nothing about later steps."""
    slots: list[Any] = [FixedCounts(), FixedCounts()]
    found = Tally(lambda: [Cache(f"{k}", each, 4, 10.0) for k, each in enumerate(slots)])
    for now in ((0, 0), (10, 12), (20, 12), (21, 13)):
        slots[0].now = now  # of 32 ids; the third is the first count that is used
        assert found.counts() == (None if now != (21, 13) else Counts(4, 1, 1))
    slots[1].now = (100, 30)
    assert found.counts() == Counts(4, 1, 1)
    slots[1].now = (107, 33)
    assert found.counts() == Counts(4, 8, 4)
    slots[1].now = (110, 33, 5, 2)
    assert found.counts() == Counts(4, 9, 6, ahead=5, used=2), "two of the hits were prefetched"
    slots[1].now = (107, 33)
    assert found.read() == {"0": ExpertTraffic(21, 13, 130), "1": ExpertTraffic(107, 33, 330)}
    slots[1] = FixedCounts()  # the stacks have moved
    assert found.counts() == Counts(4, 1, 1)


# -- their effect on the plan ----------------------------------------------------------------------------------------


@pytest.fixture
def warm_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_WARM", 1)
    monkeypatch.setattr("weightstream.plan.expert_cache._WORTH", 0.01)


@pytest.mark.few(1)
@pytest.mark.usefixtures("warm_at_once")
@pytest.mark.parametrize("num_slots", [2, 6])
def test_the_plan_follows_the_counts(num_slots: int) -> None:
    model = built()
    with held(model, "cached", num_slots) as streamer:
        by_law = streamer._installed.replanning.inputs.planners[0].priced(streamer.plan)
        steps(model, 4)
        assert streamer._installed.replanning.inputs.planners[0].counts is None
        begun = traffic(streamer)
        steps(model, 128, 4)
        found, fetched, nbytes = (b - a for a, b in zip(begun, traffic(streamer), strict=True))
        known = streamer._installed.replanning.inputs.planners[0].counts
        assert known == Counts(num_slots, found, fetched, streamer.plan.workload)
        assert found + fetched == 128 * NUM_LAYERS * TOP_K
        assert streamer.plan.fetched_nbytes == pytest.approx(nbytes / 128, rel=0.01)
        assert streamer.plan.found_share == pytest.approx(found / (found + fetched), rel=0.01)
        assert by_law.found_share != pytest.approx(streamer.plan.found_share, rel=0.05)
        assert streamer.plan.cached
        if (measured_s := streamer.stats().step_s) is not None:
            assert streamer.plan.step_s == pytest.approx(measured_s, rel=0.5)


@pytest.mark.stress
@pytest.mark.usefixtures("warm_at_once")
def test_counts_are_read_rarely_and_used_when_they_have_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = built(), [0]
    counts_of = Tally.counts

    def spied(self: Tally) -> Counts | None:
        reads[0] += 1
        return counts_of(self)

    monkeypatch.setattr(Tally, "counts", spied)
    with held(model, "cached", MOST) as streamer:
        replanning, known = streamer._installed.replanning, []
        for k in range(10):
            steps(model, 64, 64 * k)
            now = replanning.inputs.planners[0].counts
            known.append(now.num_rows // (NUM_LAYERS * TOP_K) if now is not None else 0)
    assert known == [0, 64, 128, 128, 256, 256, 256, 256, 512, 512], "steps since the first look"
    assert reads[0] <= 12


@pytest.mark.usefixtures("warm_at_once")
def test_another_budget_is_planned_with_the_counts() -> None:
    model = built()
    with held(model, "cached", MOST) as streamer:
        steps(model, 68)
        known = streamer._installed.replanning.inputs.planners[0].counts
        assert known is not None
        streamer.rebudget(model_nbytes(model))
        assert {planner.counts for planner in streamer._installed.replanning.inputs.planners} == {known}
        steps(model, 70)
        assert streamer._installed.replanning.inputs.planners[0].counts == known, "streamed experts have no counts"


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_trace_has_the_counts_of_its_time(tmp_path: Path) -> None:
    model = built()
    with held(model, "cached", MOST) as streamer:
        steps(model, 6)
        before = traffic(streamer)
        with streamer.trace() as trace:
            steps(model, 5, 6)
            during = traffic(streamer)
        steps(model, 5, 11)
        names = [unit.name for unit in streamer.plan.manifest.units if unit.stacks]
        plan = streamer.plan
    assert list(trace.experts) == names
    assert len(names) == NUM_LAYERS
    assert total(trace.experts.values())[:3] == tuple(b - a for a, b in zip(before, during, strict=True))
    for found, fetched, nbytes, *_ in trace.experts.values():
        assert found + fetched == 5 * TOP_K
        assert nbytes == fetched * ROW_NBYTES
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    (event,) = (e for e in events if e.get("cat") == "experts")
    assert rows[event["tid"]] == "experts"
    last = max(span.end_s for span in trace.spans)
    assert (event["ts"], event["dur"]) == (0, pytest.approx(1e6 * last))
    sums = total(trace.experts.values())
    assert event["name"] == f"{sums.found} found, {sums.fetched} fetched"
    assert event["args"] == sums._asdict() | {"units": {u: e._asdict() for u, e in trace.experts.items()}}
    assert plan.cached


def test_a_trace_continues_through_a_change_of_plan_and_ends_with_the_streamer() -> None:
    model = built()
    with held(model, "cached", MOST) as streamer:
        steps(model, 6)
        before = traffic(streamer)
        context = streamer.trace()
        trace = context.__enter__()
        steps(model, 4)
        streamer.switch(plan_of(streamer, "cached", MOST + 2))
        steps(model, 5)
    assert total(trace.experts.values())[:3] == tuple(b - a for a, b in zip(before, traffic(streamer), strict=True))
    context.__exit__(None, None, None)
    assert sum(total(trace.experts.values())[:2]) > 0


def test_a_trace_without_experts_has_no_row_for_them(tmp_path: Path) -> None:
    trace = Trace("model")
    trace.spans.append(Span(row="compute", kind="step", name="forward 1", begin_s=0.0, end_s=1.0, step=1))
    trace.save(tmp_path / "trace.json")
    assert "experts" not in (tmp_path / "trace.json").read_text()


# -- output of commands ------------------------------------------------------------------------------------------------


def test_a_comparison_reports_hits_and_fetched_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    from weightstream.adapters.steps.decode_steps import DecodeSteps

    model = built()
    with held(model, "cached", MOST) as streamer:
        streamer._binding.plan = replace(streamer.plan, workload=streamer._installed.replanning.inputs.workload)
        plan, found = compare(model, DecodeSteps, 0.05)
    assert plan.cached
    assert found["equal"] is True
    assert found["experts"]["num_slots"] == found["num_slots"] == MOST
    share, once = found["experts"]["found_share"], NUM_LAYERS * TOP_K * ROW_NBYTES
    assert 0.3 < share < 0.9, "each of its steps has other tokens"
    assert found["experts"]["fetched_nbytes_per_token"] == pytest.approx((1 - share) * once)
    importlib.import_module("weightstream.cli.bench").show_bench(plan, {"model": "mixture", **found})
    assert f"experts: {expert_line(found['experts'])}"[:60] in capsys.readouterr().out


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["cached", "coded"])
def test_a_run_reports_hits_and_fetched_bytes(form: str) -> None:
    cli = importlib.import_module("weightstream.cli.run")
    model, answer = built(), Answer(None)
    with held(model, form, MOST) as streamer:
        steps(model, 8)
        named = SimpleNamespace(name="mixture", streamer=streamer)
        answer.ids, answer.times = [1] * 8, [0.0, *(1.0 + k for k in range(8))]
        planned = replace(streamer.plan, step_s=7.0, basis="assumed")
        report = cli.report_of(named, {"input_ids": torch.zeros(1, 1)}, answer, planned)
        stats = streamer.stats()
    lines = cli.report_lines(report, answer)
    assert lines["predicted"].startswith("~7 s"), "as planned before the run"
    if form == "coded":
        assert report["experts"] is None
        assert "experts" not in lines
        return
    num_ids = stats.experts.found + stats.experts.fetched
    assert report["experts"] == {
        "num_slots": MOST,
        "found_share": stats.experts.found / num_ids,
        "ahead_used_share": None,
        "fetched_nbytes_per_token": stats.experts.fetched_nbytes / 8,
    }
    assert report["stats"]["experts"] == stats.experts._asdict()
    assert lines["experts"] == expert_line(report["experts"])


def test_the_counts_in_words() -> None:
    model = built()
    with held(model, "cached", MOST) as streamer:
        plan = streamer.plan
    some = of_cache(plan, ExpertTraffic(75, 25, 25 << 20), 10)
    of_steps = {"num_slots": MOST, "found_share": 0.75, "fetched_nbytes_per_token": 2.5 * (1 << 20)}
    assert some == of_steps | {"ahead_used_share": None}
    line = "4 slots per layer; 75.0 % hits, 2.5MiB fetched per token"
    assert expert_line(some) == line
    more = of_cache(plan, ExpertTraffic(75, 25, 25 << 20, 8, 6), 10)
    assert more == of_steps | {"ahead_used_share": 0.75}
    assert expert_line(more) == f"{line}; 75 % of prefetched experts were used"
    none = of_cache(plan, ExpertTraffic(0, 0, 0), 10)
    assert none is not None
    assert expert_line(none) == "4 slots per layer; none were looked up"
    assert NUM_EXPERTS > MOST
