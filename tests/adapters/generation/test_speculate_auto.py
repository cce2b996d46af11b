"""`speculate="auto"`: drafts are made where they gain, for as long as they do, and the text stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weightstream
from fake_cuda import FakeCuda
from generating import MODELS
from models import randomise

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.generation.drafted import speculate_with  # noqa: E402
from weightstream.adapters.generation.generation import generate  # noqa: E402
from weightstream.adapters.generation.pacing import Pacing  # noqa: E402
from weightstream.errors import ConfigError, UnsupportedError  # noqa: E402
from weightstream.plan.speculation import Passes, PassSeconds, tokens_per_pass  # noqa: E402
from weightstream.runtime.streamer.drafting import Drafting  # noqa: E402

WIDTH = 16
ONE_S = 0.08
NUM = 256


class Text:
    """A text that is generated with a pace, on a clock that the passes move on.

    `accepts(position)` is the number of drafted tokens that are accepted there, if so many were drafted.
    """

    def __init__(
        self,
        accepts: Callable[[int], int],
        *,
        ratio: float = 1.0,
        predicted: float | None = None,
        token_s: float = 0.0,
        kind: Any = "prompt lookup",
        allows_one: bool = True,
        drafting: Drafting | None = None,
    ) -> None:
        self.now = 0.0
        self.rows = self.singles = self.drafted = 0
        self._accepts = accepts
        self._rows_s = ratio * ONE_S
        self._token_s = token_s
        seconds = {1: ONE_S, WIDTH: ONE_S * (ratio if predicted is None else predicted)}
        passes = Passes((PassSeconds(tokens=n, step_s=s, graph_s=s) for n, s in seconds.items()), in_graphs=True)
        self.pace = Pacing(kind, WIDTH, passes, drafting or Drafting(), token_s=token_s, clock=lambda: self.now)
        self.pace.allows_one = lambda: allows_one

    def generate(self, num: int = NUM, begin: int = 0) -> float:
        """Generate so many tokens; returns the time that they take, compared with passes of one token."""
        length, begun = begin, self.now
        while length < begin + num:
            wanted = self.pace.begin(length)
            self.now += wanted * self._token_s
            self.drafted += wanted
            if self.pace.runs_rows(wanted):
                self.rows += 1
                self.now += self._rows_s
            else:
                self.singles += 1
                self.now += ONE_S
            accepted = min(wanted, self._accepts(length))
            if wanted:
                self.pace.verified(accepted, accepted)
            length += 1 + accepted
        return (self.now - begun) / ((length - begin) * ONE_S)


@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("ratio", [1.0, 1.01, 1.02, 1.05, 1.3, 2.0, 3.0])
@pytest.mark.parametrize("predicted", [1.0, None, 3.0])
@pytest.mark.parametrize("token_s", [0.0, 0.002, 0.03])
def test_drafts_of_which_none_is_accepted_cost_at_most_three_percent(
    kind: str, ratio: float, predicted: float | None, token_s: float
) -> None:
    # the ratio is predicted right or wrong
    text = Text(lambda _: 0, ratio=ratio, predicted=predicted, token_s=token_s, kind=kind)
    assert text.generate() <= 1 / 0.97


@pytest.mark.parametrize("ratio", [1.0, 1.02, 1.5, 3.0])
@pytest.mark.parametrize("accepted", [1, 3, 15])
def test_drafts_that_gain_are_made_in_nearly_each_round(ratio: float, accepted: int) -> None:
    text = Text(lambda _: accepted, ratio=ratio, predicted=1.0)
    slowdown = text.generate()
    if (1 + accepted) > 1.1 * ratio:
        assert text.drafted >= 0.9 * (WIDTH - 1) * text.rows
        assert text.singles <= 3  # where the plan was wrong
        assert slowdown <= 1.1 * ratio / (1 + accepted) + 4 / NUM
    else:
        assert slowdown <= 1 / 0.97


def test_drafting_ends_and_begins_again_as_the_text_changes() -> None:
    text = Text(lambda position: 7 if position < 200 or position >= 500 else 0, ratio=1.5)
    assert text.generate(200) < 0.3
    before = text.drafted
    assert text.generate(300, begin=200) < 1.06  # the lead of the first part may be spent
    assert text.drafted - before < 0.2 * 300 * (WIDTH - 1)
    assert text.generate(600, begin=500) < 0.5


def test_measured_times_replace_predicted_ones() -> None:
    text = Text(lambda _: 1, ratio=4.0, predicted=1.0)  # two tokens a pass, but it takes as long as four
    assert text.generate() < 1 / 0.97
    assert text.singles > 0.8 * NUM
    assert text.pace.one_s == pytest.approx(ONE_S)
    assert text.pace.rows_s == pytest.approx(4 * ONE_S)


def test_passes_keep_their_rows_where_one_row_has_other_bits_or_takes_as_long() -> None:
    for more in ({"allows_one": False, "ratio": 1.3}, {"ratio": 1.0}):
        text = Text(lambda _: 0, **more)
        text.generate()
        assert text.singles <= 3
    text = Text(lambda _: 0, allows_one=False, ratio=1.3, token_s=0.005)
    text.generate()
    assert text.drafted <= (WIDTH - 1) * 0.2 * NUM


def test_an_assistant_drafts_as_many_tokens_as_gain_most() -> None:
    for token_s, accepted in ((0.001, 15), (0.02, 3), (0.02, 15), (0.05, 1)):
        text = Text(lambda _: accepted, token_s=token_s, kind="assistant")  # noqa: B023
        text.generate()
        rounds = NUM / (1 + accepted)
        best = max(range(WIDTH), key=lambda k: (1 + min(k, accepted)) / (ONE_S + k * token_s))
        assert text.drafted / text.rows == pytest.approx(best, abs=0.34 * best + 0.5), (token_s, accepted, rounds)


def test_counts_of_texts_before_are_used() -> None:
    drafting = Drafting()
    Text(lambda _: 0, ratio=2.0, drafting=drafting).generate()
    again = Text(lambda _: 0, ratio=2.0, drafting=drafting)
    again.generate()
    first = Text(lambda _: 0, ratio=2.0)
    first.generate()
    assert again.drafted <= first.drafted
    stats = drafting.stats()
    assert stats is not None
    assert stats.tokens == stats.passes == 2 * NUM
    assert stats.acceptance == 0


def test_times_of_earlier_texts_do_not_last() -> None:
    drafting = Drafting()
    drafting.recent_s[1] += [1.45 * ONE_S] * 9  # the machine was busy
    drafting.recent_s[WIDTH] += [1.5 * ONE_S] * 9
    text = Text(lambda _: 0, ratio=1.5, drafting=drafting)
    assert text.generate() <= 1 / 0.97
    assert text.pace.one_s == pytest.approx(ONE_S)


def test_estimates_follow_each_position() -> None:
    drafting = Drafting()
    found = drafting.acceptances["assistant"]
    for _ in range(40):
        found.add(3, 8)
    values = list(found.estimates(0.5, 8))
    assert min(values[:3]) > 0.9
    assert values[3] < 0.2
    assert values[4:] == [values[3]] * 4  # never reached, so they are like the one before
    assert 3.5 < tokens_per_pass(values) < 4.5


# -- texts of real models ----------------------------------------------------------------------------------------------

STATIC = {"cache_implementation": "static", "disable_compile": True}
NUM_NEW = 44
FREE = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.5}


def build(seed: int = 11, name: str = "llama") -> Any:
    return randomise(transformers.AutoModelForCausalLM.from_config(MODELS[name]()), seed=seed)


def options(**more: Any) -> dict[str, Any]:
    lengths = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    return lengths | {"return_dict_in_generate": True, "output_logits": True} | more


def repeating(length: int = 21) -> torch.Tensor:
    words = torch.randint(3, 128, (7,), generator=torch.Generator().manual_seed(3))
    return words.repeat(3)[None, :length]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An offloaded model, whose plan predicts the seconds of passes that `predicted` says."""
    model = build()
    predicted = dict(FREE)
    streamer = weightstream.offload(model, device="cpu", device_budget="160KiB")

    def pass_seconds(_: Any) -> tuple[PassSeconds, ...]:
        return tuple(PassSeconds(tokens=n, step_s=s, graph_s=s) for n, s in predicted.items())

    monkeypatch.setattr(type(streamer), "pass_seconds", pass_seconds)
    model.predicted = predicted
    yield model
    streamer.remove()


def generated(model: Any, **more: Any) -> tuple[Any, DecodeReport]:
    reports: list[DecodeReport] = []
    return generate(model, repeating(), **options(**more), on_decoding=reports.append), reports[0]


def is_same(a: Any, b: Any) -> bool:
    return torch.equal(a.sequences, b.sequences) and torch.equal(torch.stack(a.logits), torch.stack(b.logits))


@pytest.mark.parametrize(
    "more",
    [
        {"speculation_type": "dflash"},
        {"speculation_type": "dflash", "prompt_lookup_num_tokens": 3},
        {"use_mtp": True, "prompt_lookup_num_tokens": 3},
    ],
)
def test_of_several_drafts_in_the_settings_the_pace_takes_that_of_transformers(
    streamed: Any, more: dict[str, Any]
) -> None:
    """Prompt lookup comes before all others, and without an assistant there is no DFlash."""
    want = build().generate(repeating(), **options(), **STATIC)
    got, decoding = generated(streamed, speculate="auto", bits="token", **more)
    assert is_same(got, want)
    assert decoding.speculation is not None
    assert decoding.speculation.draft == "prompt lookup"
    assert decoding.speculation.width == 8  # of the plan, not of the settings


@pytest.mark.few(1)
@pytest.mark.parametrize("draft", ["lookup", "assistant", "other assistant"])
def test_a_text_with_a_pace_has_the_bits_of_one_token_at_a_time(streamed: Any, draft: str) -> None:
    want = build().generate(repeating(), **options(), **STATIC)
    more = {} if draft == "lookup" else {"assistant_model": build(11 if draft == "assistant" else 12)}
    got, decoding = generated(streamed, speculate="auto", bits="token", **more)
    assert is_same(got, want)
    assert decoding.speculation is not None
    assert decoding.speculation.bits == "token"
    assert decoding.speculation.width == 8  # the widest that is predicted to be free
    assert decoding.speculation.passes < NUM_NEW or draft == "other assistant"
    stats = streamed.weightstream.stats().speculation
    assert stats.passes == decoding.speculation.passes
    assert stats.tokens == NUM_NEW - 1
    assert stats.tokens_per_pass == pytest.approx(decoding.speculation.tokens_per_pass, abs=0.5)
    assert stats.draft_s > 0
    assert stats.verify_s > 0
    assert stats.predicted_tokens_per_s > 1  # a pass is predicted to take a second


@pytest.mark.stress
def test_rounds_without_a_draft_have_passes_of_one_token_and_drafts_begin_again(
    streamed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = build().generate(repeating(), **options(), **STATIC)
    for assistant in (None, build(12), build(11)):
        rounds: list[int] = []

        def wanted(_: Any, most: int, rounds: list[int] = rounds) -> int:
            rounds.append(0 if len(rounds) % 9 > 4 else most)
            return rounds[-1]

        monkeypatch.setattr(Pacing, "_num_wanted", lambda self: wanted(self, self.width - 1))
        more = {} if assistant is None else {"assistant_model": assistant}
        got, decoding = generated(streamed, speculate="auto", bits="token", **more)
        assert is_same(got, want)
        assert decoding.speculation is not None
        assert 0 in rounds
        assert decoding.speculation.singles >= rounds.count(0) > 0


def test_scores_do_not_depend_on_the_pace_where_rows_have_other_bits(
    streamed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, _ = generated(streamed, prompt_lookup_num_tokens=7, bits="rows")
    monkeypatch.setattr(Pacing, "_num_wanted", lambda self: 0)
    got, decoding = generated(streamed, speculate="auto", bits="rows")
    assert is_same(got, want)
    assert decoding.speculation is not None
    assert (decoding.speculation.singles, decoding.speculation.acceptance) == (0, 0)
    assert decoding.speculation.passes > 1


def test_one_token_a_pass_where_drafts_are_not_expected_to_gain(
    streamed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    streamed.predicted |= dict.fromkeys((2, 4, 8, 16), 9.0)
    want = build().generate(repeating(), **options())
    with caplog.at_level("INFO", logger="weightstream"):
        got, decoding = generated(streamed, speculate="auto")
    assert is_same(got, want)
    assert decoding.speculation is None
    assert "tokens/s are expected with drafts by prompt lookup" in caplog.text
    forced, decoding = generated(streamed, speculate="lookup")
    assert torch.equal(forced.sequences, want.sequences)
    assert decoding.speculation is not None
    assert decoding.speculation.width == 16


@pytest.mark.few(2)
@pytest.mark.parametrize("num_prompts", [1, 2])
@pytest.mark.parametrize(
    "more", [{"num_beams": 2}, {"use_cache": False}, {"num_return_sequences": 2, "do_sample": True}]
)
def test_calls_that_no_draft_suits_run_as_they_are(streamed: Any, num_prompts: int, more: dict[str, Any]) -> None:
    ids, plain = repeating().repeat(num_prompts, 1), build()
    torch.manual_seed(1)
    want = plain.generate(ids, **options(output_logits=False, **more))
    torch.manual_seed(1)
    got = generate(streamed, ids, **options(output_logits=False, **more), speculate="auto")
    assert torch.equal(got.sequences, want.sequences)


def test_a_model_that_does_not_stream_has_no_plan_and_no_drafts() -> None:
    model = build()
    got, decoding = generated(model, speculate="auto")
    assert decoding.speculation is None
    assert is_same(got, model.generate(repeating(), **options()))
    forced, decoding = generated(model, speculate="lookup")
    assert decoding.speculation is not None
    assert torch.equal(forced.sequences, got.sequences)


def test_the_mode_of_the_model_is_that_of_calls_without_one(streamed: Any) -> None:
    assert generated(streamed)[1].speculation is None
    streamed.weightstream.drafting.mode = "auto"
    assert generated(streamed)[1].speculation is not None
    assert generated(streamed, speculate="off")[1].speculation is None


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_passes_of_both_widths_are_replayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cuda = build(name=name), FakeCuda()
    want = model.generate(repeating(), **options(), **STATIC)
    turns = iter([*[7] * 6, *[0] * 6, *[7] * 60])
    monkeypatch.setattr(Pacing, "_num_wanted", lambda _: next(turns))
    passes = Passes((PassSeconds(tokens=n, step_s=s, graph_s=s) for n, s in {1: 1.0, 8: 2.0}.items()), in_graphs=True)
    pace = Pacing("prompt lookup", 8, passes, Drafting())
    lookup = options(prompt_lookup_num_tokens=7)
    got, decoding = speculate_with(
        model, repeating(), lookup, cuda.recorder, None if name == "gemma2" else "token", pace=pace
    )
    assert torch.equal(got.sequences, want.sequences)
    assert decoding.reason is None
    assert decoding.speculation is not None
    assert decoding.speculation.singles > 2
    assert len(cuda.graphs) == 2
    assert decoding.replays == cuda.replays > decoding.speculation.passes - 8


@pytest.mark.stress
@pytest.mark.few(1)
@pytest.mark.parametrize("ratio", [1.05, 1.5])
def test_generate_is_not_slowed_down_by_drafts_of_which_none_is_accepted(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other, now, num = build(), build(12), [0.0], 172
    other.generation_config.assistant_confidence_threshold = 0.0
    seconds = {1: 1.0, 8: 1.0}  # as the plan says
    passes = Passes((PassSeconds(tokens=n, step_s=s, graph_s=s) for n, s in seconds.items()), in_graphs=False)
    pace = Pacing("assistant", 8, passes, Drafting(), clock=lambda: now[0])

    def tick(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        now[0] += {1: 1.0, 8: ratio}.get(kwargs["input_ids"].shape[-1], 0.0)

    def tick_draft(*_: Any) -> None:
        now[0] += 0.01

    model.register_forward_pre_hook(tick, with_kwargs=True)
    other.register_forward_pre_hook(tick_draft)
    lengths = {"max_new_tokens": num, "min_new_tokens": num}
    _, decoding = speculate_with(model, repeating(), options(assistant_model=other) | lengths, None, "token", pace=pace)
    assert decoding.speculation is not None
    yielded = decoding.speculation.passes * decoding.speculation.tokens_per_pass
    assert yielded == pytest.approx(num - 1)
    assert decoding.speculation.acceptance < 0.1
    assert now[0] <= (num - 1) / 0.97


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_samples_are_drawn_as_without_a_draft(streamed: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, more = build(), {} if kind == "lookup" else {"assistant_model": build()}
    sampled = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    torch.manual_seed(7)
    want = plain.generate(repeating(), **options(**sampled), **STATIC)
    rounds: list[int] = []

    def wanted(self: Pacing) -> int:
        rounds.append(0 if len(rounds) % 5 > 2 else self.width - 1)
        return rounds[-1]

    monkeypatch.setattr(Pacing, "_num_wanted", wanted)
    torch.manual_seed(7)
    got, decoding = generated(streamed, speculate="auto", bits="token", **sampled, **more)
    assert is_same(got, want)
    assert decoding.speculation is not None
    assert decoding.speculation.singles > 0


@pytest.mark.parametrize(
    ("mode", "error", "text"),
    [("maybe", ConfigError, "it is 'off', 'auto', 'lookup', 'draft' or None"), ("draft", UnsupportedError, "no draft")],
)
def test_a_mode_that_cannot_be_is_an_error(mode: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        generate(build(), repeating(), speculate=mode, max_new_tokens=2)


def test_bits_are_checked_with_a_pace_too() -> None:
    with pytest.raises(ConfigError, match='it is "token", "rows" or None'):
        generate(build(), repeating(), speculate="lookup", bits="bit", max_new_tokens=2)
