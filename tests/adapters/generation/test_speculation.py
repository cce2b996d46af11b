"""Several tokens a pass on the CPU: texts, scores and logits equal those of one token a pass, whatever is drafted."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weightstream
from drafting import (
    CACHE,
    LENGTH,
    LOOKUP,
    NUM,
    OUTPUTS,
    SAMPLED,
    WIDTH,
    MtpModel,
    assert_equal,
    build,
    dflash,
    drafted,
    drafts,
    noised,
    options,
    plainly,
    prompt,
    save_mtp,
    scripted,
)
from fake_cuda import FakeCuda, Graph, Lane, Lanes
from generating import MODELS, STATIC, WINDOW
from models import ARCHITECTURES, TEXT, randomise

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation import drafted as drafted_module  # noqa: E402
from weightstream.adapters.generation import speculation  # noqa: E402
from weightstream.adapters.generation.drafts import DrawsByPosition, drafting  # noqa: E402
from weightstream.adapters.generation.generation import decode_with, generate  # noqa: E402
from weightstream.adapters.steps import row_trial  # noqa: E402
from weightstream.adapters.steps.graph_runner import Recorder  # noqa: E402
from weightstream.adapters.steps.row_split import RowPlan, plans  # noqa: E402
from weightstream.adapters.steps.row_trial import RowTrial  # noqa: E402
from weightstream.api.multi_gpu import stripe  # noqa: E402
from weightstream.errors import ConfigError, UnsupportedError  # noqa: E402
from weightstream.inputs.builder import CallerFacts  # noqa: E402
from weightstream.plan.cost import Splits, split_pass_s  # noqa: E402
from weightstream.settings.config import OffloadConfig  # noqa: E402

DECODERS = (  # of the architectures
    *(
        "llama",
        "llama-bf16",
        "qwen2",
        "qwen3-bf16",
        "mistral",
        "gemma2",
        "gemma3-bf16",
        "gpt2",
        "gpt_neox",
        "opt",
        "phi",
    ),
    *("phi3-bf16", "olmo2", "smollm3", "falcon-bf16", "bloom", "mixtral", "qwen2_moe", "qwen3_moe-bf16"),
)
KINDS = ("lookup", "assistant")
WAYS = ("eager", "captured")


def draft_for(kind: str, model: Any) -> dict[str, Any]:
    return LOOKUP if kind == "lookup" else drafts(noised(model))


def recorder(way: str) -> FakeCuda | None:
    return FakeCuda() if way == "captured" else None


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def text(llama: Any) -> list[int]:
    """The text of the model, with its prompt."""
    found: list[int] = plainly(llama, prompt()).sequences[0].tolist()
    return found


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_texts_have_the_bits_of_one_token_at_a_time(name: str, kind: str, sampled: bool) -> None:
    model = build(name)
    draft, how = draft_for(kind, model), SAMPLED if sampled else {}
    want = plainly(model, prompt(), **how)
    for way in WAYS:
        cuda = recorder(way)
        got, decoding = drafted(model, prompt(), "token", cuda, **draft, **how)
        assert_equal(got, want)
        assert decoding.speculation is not None
        assert (decoding.speculation.bits, decoding.speculation.width) == ("token", WIDTH)
        assert decoding.replays == (0 if cuda is None else cuda.replays)
        if kind == "assistant" and not sampled:
            assert decoding.speculation.tokens_per_pass > 1.5
            assert cuda is None or decoding.replays > 1
    assert "forward" not in vars(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("grain", [None, "half", "matrix"])
@pytest.mark.parametrize("name", DECODERS)
def test_architectures(name: str, grain: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned and rotary positions, ALiBi, parallel blocks, experts, tied heads."""
    model = ARCHITECTURES[name]().module
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 64
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # as transformers decodes on a GPU
    want = plainly(model, prompt())
    if grain is None:
        for way in WAYS:
            assert_equal(drafted(model, prompt(), "token", recorder(way), **LOOKUP)[0], want)
        return
    streamer, streamed = offloaded(model, 0.6, monkeypatch, grain)
    with streamer:
        for way in (None, streamed):
            assert_equal(drafted(model, prompt(), "token", way, **LOOKUP)[0], want)


def test_rows_at_once_are_other_bits_on_this_machine(llama: Any) -> None:
    """So equal bits above are no coincidence."""
    want = plainly(llama, prompt())
    got, decoding = drafted(llama, prompt(), "rows", **drafts(noised(llama)))
    assert decoding.speculation.rows == "at once"
    assert not torch.equal(torch.stack(got.scores), torch.stack(want.scores))


@pytest.mark.few(3)
@pytest.mark.parametrize("window", [WINDOW, 64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_scores_of_rows_do_not_depend_on_the_draft(name: str, way: str, window: int) -> None:
    model = build(name, window=window)
    first = drafted(model, prompt(), "rows", **LOOKUP)[0]
    known = first.sequences[0].tolist()
    wrong = drafts(scripted([(token + 1) % 128 for token in known]))
    right = drafts(scripted(known))
    per_pass = set()
    assistant = noised(build(name))  # with a long window: transformers 5.17 fails with a short one
    for draft in (LOOKUP, drafts(assistant), wrong, right):
        got, decoding = drafted(model, prompt(), "rows", recorder(way), **draft)
        assert_equal(got, first)
        assert (decoding.speculation.bits, decoding.speculation.rows) == ("rows", "at once")
        per_pass.add(decoding.speculation.tokens_per_pass)
    assert {1.0, (NUM - 1) / 4} <= per_pass


class AsOnGpu(transformers.Qwen3MoeForCausalLM):
    """A mixture whose experts decode by another function than they run prompts, as transformers does on a GPU."""

    @contextmanager
    def _optimize_model_for_decode(self) -> Iterator[None]:
        before = self.get_experts_implementation()
        self.set_experts_implementation("batched_mm")
        try:
            yield
        finally:
            self.set_experts_implementation(before)


def test_experts_verify_by_the_function_by_which_they_decode() -> None:
    model = randomise(AsOnGpu(build("qwen3-moe").config).eval(), 11)
    model.set_experts_implementation("grouped_mm")
    want = plainly(model, prompt())
    wrong = drafts(scripted([(token + 1) % 128 for token in want.sequences[0].tolist()]))
    for way in WAYS:
        assert_equal(drafted(model, prompt(), "token", recorder(way), **LOOKUP)[0], want)
        first, second = (drafted(model, prompt(), "rows", recorder(way), **draft)[0] for draft in (LOOKUP, wrong))
        assert_equal(first, second)


def test_a_window_that_fills_up_has_no_bits_of_single_tokens() -> None:
    for name in ("gemma2", "mistral"):
        model = build(name, window=WINDOW)
        with pytest.raises(UnsupportedError, match='bits="token": the text is longer than a sliding window'):
            drafted(model, prompt(), "token", **LOOKUP)
        assert drafted(model, prompt(), None, **LOOKUP)[1].speculation.bits == "rows"


def test_attention_of_another_kind() -> None:
    """Its masks may have no row for each token, as those of flex attention."""
    model = build("llama")
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface.register("own", interface._global_mapping["sdpa"])
    model.set_attn_implementation("own")
    with pytest.raises(UnsupportedError, match='bits="token": masks of own attention have no row for each token'):
        drafted(model, prompt(), "token", **LOOKUP)
    assert drafted(model, prompt(), None, **LOOKUP)[1].speculation.bits == "rows"


@pytest.mark.parametrize("is_free", [False, True])
def test_a_choice_of_bits_lasts(is_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first text is no exception, though a trial runs its first pass in both ways."""
    monkeypatch.setattr(drafted_module, "_splits_are_free", lambda *_: is_free)
    model, chosen = build("llama"), "token" if is_free else "rows"
    want = drafted(build("llama"), prompt(), chosen, **LOOKUP)[0]
    for _ in range(2):
        got, decoding = drafted(model, prompt(), None, **LOOKUP)
        assert decoding.speculation.bits == chosen
        assert_equal(got, want)
    assert all(plan.calls for plan in plans(model).values())


def test_rows_run_at_once_where_a_trial_finds_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(RowTrial, "_try", lambda *_: row_trial._Tried())
    for _ in range(2):
        _, decoding = drafted(model, prompt(), "token", **LOOKUP)
        assert (decoding.speculation.bits, decoding.speculation.rows) == ("token", "at once")
    assert [str(plan) for plan in plans(model).values()] == ["at once"]


@pytest.mark.stress
def test_a_trial_counts_for_its_kernels_only(llama: Any) -> None:
    model = build("llama")
    drafted(model, prompt(), "token", **LOOKUP)
    drafted(model, prompt(), "token", **LOOKUP)
    assert len(plans(model)) == 1
    drafted(model, prompt(), "token", **LOOKUP | {"prompt_lookup_num_tokens": 3})
    model.set_attn_implementation("eager")
    got, _ = drafted(model, prompt(), "token", **LOOKUP)
    assert_equal(got, plainly(model, prompt()))
    drafted(model.double(), prompt(), "token", **LOOKUP)
    drafted(model, prompt(25), "token", **LOOKUP)
    assert len(plans(model)) == 5
    for setting in ("cudnn", "mem_efficient"):
        enable = getattr(torch.backends.cuda, f"enable_{setting}_sdp")
        enable(False)
        try:
            drafted(model, prompt(25), "token", **LOOKUP)
        finally:
            enable(True)
    assert len(plans(model)) == 7


@pytest.mark.few(1)
@pytest.mark.parametrize("seed_of_weights", [14, 20])
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_equal_bits_of_few_values_are_no_evidence(name: str, seed_of_weights: int) -> None:
    """In bfloat16, sums that differ often round alike. The first passes of these models show no difference."""
    model = randomise(build(name), seed_of_weights).to(torch.bfloat16)
    got, _ = drafted(model, prompt(), "token", prompt_lookup_num_tokens=3)
    assert all(plan.calls for plan in plans(model).values())
    assert_equal(got, plainly(model, prompt()))


class Odd(transformers.LlamaForCausalLM):
    """A model with a product whose tokens are in an unusual place, an operator of its own, and means of all tokens."""

    is_mixing = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.router = torch.nn.Linear(config.vocab_size, config.vocab_size)

    def forward(  # type: ignore[override]
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        states = torch.ops.rowsplit.scaled(self.router(output.logits).transpose(1, 2))
        output.logits = (states - states.mean(-1, keepdim=True) if self.is_mixing else states).transpose(1, 2)
        return output


library = torch.library.Library("rowsplit", "DEF")
library.define("scaled(Tensor states) -> Tensor")
library.impl("scaled", lambda states: states * 2.0 ** states.shape[-1], "CompositeExplicitAutograd")


def test_an_operator_that_no_trial_knows_runs_row_by_row() -> None:
    model = randomise(Odd(build("llama").config).eval(), 3)
    for way in WAYS:
        got, decoding = drafted(model, prompt(), "token", recorder(way), **LOOKUP)
        assert_equal(got, plainly(model, prompt()))
    (plan,) = plans(model).values()
    assert plan.calls["rowsplit.scaled.default"] == 1
    assert f"at once, except {plan.calls.most_common(1)[0][1]} calls of " in decoding.speculation.rows


@pytest.mark.parametrize("is_free", [False, True])
def test_an_operator_that_mixes_rows(is_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafted_module, "_splits_are_free", lambda *_: is_free)
    model = randomise(Odd(build("llama").config).eval(), 3)
    model.is_mixing = True
    for _ in range(2):
        got, decoding = drafted(model, prompt(), None, **LOOKUP)
        assert (decoding.speculation.bits, decoding.speculation.rows) == ("rows", "at once")
        assert_equal(got, drafted(model, prompt(), "rows", **LOOKUP)[0])
        with pytest.raises(UnsupportedError, match=r"outputs of aten.mean.dim of .* have no entry for each row"):
            drafted(model, prompt(), "token", **LOOKUP)


def test_experts_that_meet_their_tokens_together(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3-moe")
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(
        UnsupportedError, match=r'set_experts_implementation\("batched_mm"\) runs experts token by token'
    ):
        drafted(model, prompt(), "token", **LOOKUP)
    with caplog.at_level(logging.INFO, "weightstream"):
        assert drafted(model, prompt(), None, **LOOKUP)[1].speculation.bits == "rows"
    assert 'bits="rows", as ' in caplog.text


def test_operators_of_a_layout_that_was_not_tried_have_no_bits_of_single_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    drafted(model, prompt(), "token", **LOOKUP)
    (plan,) = plans(model).values()
    packed = next(splits for function, splits in plan.splits.items() if "mm" in str(function))
    packed.clear()
    monkeypatch.setattr(drafted_module, "_splits_are_free", lambda *_: True)
    assert drafted(model, prompt(), None, **LOOKUP)[1].speculation.bits == "rows"
    assert not plans(model), "it is tried again"
    assert drafted(model, prompt(), None, **LOOKUP)[1].speculation.bits == "token"
    for plan in plans(model).values():
        for splits in plan.splits.values():
            splits.clear()
    with pytest.raises(UnsupportedError, match=r'bits="token": aten.* was not in the pass that was tried'):
        drafted(model, prompt(), "token", **LOOKUP)
    assert_equal(drafted(model, prompt(), "token", **LOOKUP)[0], plainly(model, prompt()))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_of_one_block(name: str) -> None:
    model = build(name, layers=1)
    for num in (1, WIDTH - 1):
        got, decoding = drafted(model, prompt(), "token", prompt_lookup_num_tokens=num)
        assert decoding.speculation.rows.startswith("at once, except ")
        assert_equal(got, plainly(model, prompt()))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_bfloat16(name: str, kind: str) -> None:
    model = build(name).to(torch.bfloat16)
    want = plainly(model, prompt())
    for way in WAYS:
        assert_equal(drafted(model, prompt(), "token", recorder(way), **draft_for(kind, model))[0], want)


@pytest.mark.parametrize("before", [False, True])
def test_the_cache_is_as_long_as_without_a_draft(before: bool) -> None:
    """transformers keeps the length of the longest text for later ones, and kernels depend on it."""
    model = build("llama")
    if before:
        plainly(model, prompt(), max_new_tokens=40)
    else:
        drafted(model, prompt(), **LOOKUP, max_new_tokens=40)
    for num in (NUM, 7):
        got = drafted(model, prompt(), **LOOKUP, max_new_tokens=num)[0]
        want = plainly(model, prompt(), max_new_tokens=num)
        assert_equal(got, want)
        caches = [result[CACHE].layers[0] for result in (got, want)]
        assert [layer.max_cache_len for layer in caches] == [48, 48]
        assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length()) == LENGTH + num - 1
        filled = LENGTH + num - 1
        assert torch.equal(caches[0].keys[:, :, :filled], caches[1].keys[:, :, :filled])


@pytest.mark.parametrize("way", WAYS)
def test_a_text_may_end_at_the_last_position_of_a_table(way: str) -> None:
    """GPT-2 has 64 learned positions. The last passes verify tokens that would lie beyond."""
    model = build("gpt2")
    for length in (33, 41):
        want = plainly(model, prompt(length), max_new_tokens=64 - length)
        assert want.sequences.shape[1] == 64
        for draft in (LOOKUP, drafts(noised(model))):
            got, _ = drafted(model, prompt(length), "token", recorder(way), **draft, max_new_tokens=64 - length)
            assert_equal(got, want)


def test_states_of_all_tokens_are_returned(llama: Any) -> None:
    kept = {"output_hidden_states": True}
    want = plainly(llama, prompt(), **kept)
    got, _ = drafted(llama, prompt(), **drafts(noised(llama)), **kept)
    assert_equal(got, want)
    for ours, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# -- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [2, 4, 100])
@pytest.mark.parametrize("way", WAYS)
def test_a_scripted_draft_has_the_acceptance_that_it_was_given(
    llama: Any, text: list[int], way: str, every: int
) -> None:
    script = [(token + 1) % 128 if index % every == 0 else token for index, token in enumerate(text)]
    want = plainly(llama, prompt())
    got, decoding = drafted(llama, prompt(), "token", recorder(way), **drafts(scripted(script)))
    assert_equal(got, want)
    known, passes, accepted, proposed = LENGTH + 1, 0, 0, 0
    while known < LENGTH + NUM:
        num = min(WIDTH - 1, LENGTH + NUM - known - 1)  # one token of a pass is the model's own
        right = [script[known + index] == text[known + index] for index in range(num)]
        matches = next((index for index, is_right in enumerate(right) if not is_right), num)
        passes, accepted, proposed, known = passes + 1, accepted + matches, proposed + num, known + matches + 1
    found = decoding.speculation
    assert found.passes == passes
    assert found.acceptance == accepted / proposed
    assert found.tokens_per_pass == pytest.approx((NUM - 1) / passes)
    assert f"{found.tokens_per_pass:.2f} tokens per pass of {WIDTH} rows" in str(decoding)


def test_tokens_that_match_by_chance_are_not_the_drafts() -> None:
    """Candidates end before a drafted end of text, and are filled up with a token that this model always says."""
    model, draft = scripted([0] * (LENGTH + NUM)), drafts(scripted([5] * (LENGTH + NUM)))
    got, decoding = drafted(model, prompt(), "rows", **draft, eos_token_id=5)
    assert got.sequences[0, LENGTH:].tolist() == [0] * NUM
    assert decoding.speculation.acceptance == 0
    assert decoding.speculation.tokens_per_pass == (NUM - 1) / 4


def test_without_a_pass_there_is_nothing_to_report(llama: Any) -> None:
    _, decoding = drafted(llama, prompt(), "token", max_new_tokens=1, **LOOKUP)
    assert (decoding.speculation.passes, decoding.speculation.bits) == (0, "token")


class Positions(transformers.LlamaForCausalLM):
    """A model that counts the tokens of each forward."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        self.widths.append(input_ids.shape[1])
        return super().forward(input_ids=input_ids, **kwargs)


def test_passes_have_one_width_and_the_prompt_is_a_step_of_its_own() -> None:
    model = randomise(Positions(build("llama").config).eval(), 11)
    model.widths = []
    drafted(model, prompt(), "rows", **drafts(noised(build("llama"))))
    assert model.widths[0] == LENGTH
    assert set(model.widths[1:]) == {WIDTH}


def characters(letters: str) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<s>", "</s>", "<unk>", *letters]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


LETTERS = "".join(map(chr, [*range(33, 127), *range(0x391, 0x3A2), *range(0x3B1, 0x3BE)]))


@pytest.mark.few(1)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_an_assistant_with_another_tokenizer(llama: Any, sampled: bool) -> None:
    config = MODELS["llama"]()
    config.num_hidden_layers, config.vocab_size = 1, 94
    assistant = randomise(transformers.LlamaForCausalLM(config).eval(), 3)
    before = assistant.lm_head
    draft = drafts(assistant) | {"tokenizer": characters(LETTERS), "assistant_tokenizer": characters(LETTERS[:89:-1])}
    how = SAMPLED if sampled else {}
    want = plainly(llama, prompt(), **how)
    for way in WAYS:
        got, decoding = drafted(llama, prompt(), "token", recorder(way), **draft, **how)
        assert_equal(got, want)
        assert decoding.speculation.passes < NUM
    assert assistant.lm_head is before, "the assistant is not changed"


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp(tmp_path_factory.mktemp("mtp"))


@pytest.mark.usefixtures("no_loading_bars")
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_layer_of_the_checkpoint_that_predicts_a_further_token(mtp_folder: Path, how: dict[str, Any]) -> None:
    model = MtpModel.from_pretrained(mtp_folder).eval()
    want = plainly(model, prompt(), **how)
    for way in WAYS:
        got, decoding = drafted(model, prompt(), "token", recorder(way), use_mtp=True, **how)
        assert_equal(got, want)
        assert (decoding.speculation.draft, decoding.speculation.width) == ("mtp", 2)
        assert decoding.speculation.tokens_per_pass > (1.2 if how else 1.9)


@pytest.mark.stress
@pytest.mark.few(1)
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_of_a_block_at_once(how: dict[str, Any]) -> None:
    model, draft = build("llama", layers=4), dflash()
    want = plainly(model, prompt(), **how)
    for way in WAYS:
        got, decoding = drafted(model, prompt(), "token", recorder(way), **draft, **how)
        assert_equal(got, want)
        assert (decoding.speculation.draft, decoding.speculation.width) == ("dflash", WIDTH)


def test_drafts_that_use_modules_of_the_model_compute_where_it_does() -> None:
    """transformers takes the device of its weights, which of an offloaded model is another one."""
    layers, head = torch.nn.ModuleList([torch.nn.Linear(2, 2)]), torch.nn.Linear(2, 3)
    mtp = SimpleNamespace(layers=layers, shared_head=head)
    generator = SimpleNamespace(mtp_model=mtp, device=torch.device("cpu"), main_model_output_embeddings=head)
    meta = torch.device("meta")
    drafting(lambda *_: generator, 3, SimpleNamespace(), meta, print)(transformers.GenerationConfig())
    assert generator.device == generator.main_model_output_embeddings.weight.device == meta
    assert {param.device for param in layers.parameters()} == {meta}
    assert head.weight.device.type == "cpu", "the model's own weights stay"
    assert generator.main_model_output_embeddings(torch.ones(1, 2)).shape == (1, 3)


# -- ends of a text, and what the caller sees --------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_ends_at_its_end_of_text(llama: Any, text: list[int], kind: str) -> None:
    draft = draft_for(kind, llama)
    for eos in (text[LENGTH], text[LENGTH + 7], [text[LENGTH + 17], 5], [5, 6]):
        want = plainly(llama, prompt(), eos_token_id=eos)
        for way in WAYS:
            got, _ = drafted(llama, prompt(), "token", recorder(way), **draft, eos_token_id=eos)
            assert_equal(got, want)


def test_a_drafted_end_of_text_ends_it(llama: Any, text: list[int]) -> None:
    """The draft is right, so that all tokens before the end are accepted; it goes on after the end."""
    first = {token: text.index(token, LENGTH) for token in text[LENGTH:]}
    for eos, index in first.items():
        want = plainly(llama, prompt(), eos_token_id=eos)
        got, decoding = drafted(llama, prompt(), **drafts(scripted(text)), eos_token_id=eos)
        assert_equal(got, want)
        assert got.sequences.shape[1] == index + 1
        assert decoding.speculation.acceptance in (0.0, 1.0)


@pytest.mark.few(4)
@pytest.mark.parametrize("num", range(1, WIDTH + 3))
def test_short_texts(llama: Any, text: list[int], num: int) -> None:
    want = plainly(llama, prompt(), max_new_tokens=num)
    for draft in (LOOKUP, drafts(scripted(text))):
        for way in WAYS:
            assert_equal(drafted(llama, prompt(), "token", recorder(way), **draft, max_new_tokens=num)[0], want)


def allowed(_: int, ids: torch.Tensor) -> list[int]:
    return list(range(3, 60)) if len(ids) % 2 else list(range(40, 128))


CHOICES: dict[str, dict[str, Any]] = {
    "max_length": {"max_new_tokens": ..., "max_length": LENGTH + NUM},
    "min_new_tokens": {"eos_token_id": 16, "min_new_tokens": 9},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "suppress_tokens": {"suppress_tokens": [16, 115]},
    "attention_mask": {"attention_mask": (torch.arange(LENGTH) >= 3).long()[None]},
    "a mask of ones": {"attention_mask": torch.ones(1, LENGTH, dtype=torch.long)},
    "position_ids": {"position_ids": torch.arange(3, LENGTH + 3)[None]},
    "input_ids": {"input_ids": prompt()},
    "sampled with a penalty": SAMPLED | {"repetition_penalty": 1.3, "top_p": 0.9},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CHOICES)
def test_options_of_generate(llama: Any, name: str) -> None:
    chosen = CHOICES[name]
    ids = None if "input_ids" in chosen else prompt()
    want = plainly(llama, ids, **chosen)
    for kind, way in (("lookup", "captured"), ("assistant", "eager")):
        assert_equal(drafted(llama, ids, "token", recorder(way), **draft_for(kind, llama), **chosen)[0], want)


def test_a_prompt_of_one_token(llama: Any) -> None:
    want = plainly(llama, prompt(1), max_new_tokens=32)
    for kind, way in itertools.product(KINDS, WAYS):
        got, _ = drafted(llama, prompt(1), "token", recorder(way), **draft_for(kind, llama), max_new_tokens=32)
        assert_equal(got, want)


def test_settings_may_be_an_object(llama: Any) -> None:
    config = transformers.GenerationConfig(**options(num_beams=1))
    want = llama.generate(prompt(), generation_config=config, **STATIC)
    chosen = transformers.GenerationConfig(**options(**LOOKUP))
    found: list[Any] = []
    got = generate(llama, prompt(), bits="token", generation_config=chosen, on_decoding=found.append)
    assert_equal(got, want)
    assert found[0].speculation.passes
    assert not chosen.disable_compile
    assert chosen.cache_implementation is None


def test_settings_of_the_checkpoint(text: list[int]) -> None:
    model = build("llama")
    model.generation_config.prompt_lookup_num_tokens = WIDTH - 1
    found: list[Any] = []
    got = generate(model, prompt(), bits="token", on_decoding=found.append, **options())
    assert got.sequences[0].tolist() == text
    assert found[0].speculation.draft == "prompt lookup"


class Seen:
    """A streamer, and criteria, that note all calls. Criteria end the text at the first `last` after the prompt."""

    def __init__(self, last: int | None) -> None:
        self.calls: list[Any] = []
        self._last = last

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls.append((ids.tolist(), len(scores), float(scores[-1].sum())))
        return torch.tensor([self._last in ids[0, LENGTH:].tolist()])


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [*KINDS, "right"])
@pytest.mark.parametrize("index", [None, 0, 7, 11, 17])
def test_streamers_and_criteria_see_each_token(llama: Any, text: list[int], kind: str, index: int | None) -> None:
    """transformers itself shows them the tokens of a whole pass at a time, and the text runs on to its end."""
    last = None if index is None else text[LENGTH + index]
    draft = drafts(scripted(text)) if kind == "right" else draft_for(kind, llama)

    def seen() -> tuple[Seen, dict[str, Any]]:
        made = Seen(last)
        return made, {"streamer": made, "stopping_criteria": transformers.StoppingCriteriaList([made])}

    before, chosen = seen()
    want = plainly(llama, prompt(), **chosen)
    for way in WAYS:
        after, chosen = seen()
        got, _ = drafted(llama, prompt(), "token", recorder(way), **draft, **chosen)
        assert_equal(got, want)
        assert after.calls == before.calls
        assert int(got[CACHE].get_seq_length()) == int(want[CACHE].get_seq_length())
        plain = drafted(llama, prompt(), **draft, **chosen | OUTPUTS | {"return_dict_in_generate": False}
                        | {"streamer": None, "stopping_criteria": None})[0]  # fmt: skip
        assert plain[0].tolist() == text
    assert "_get_stopping_criteria" not in vars(llama)


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings(llama: Any, text: list[int], kind: str) -> None:
    tokenizer = characters(LETTERS)
    chosen = {"stop_strings": [tokenizer.decode(text[LENGTH + 6 : LENGTH + 8])], "tokenizer": tokenizer}
    want = plainly(llama, prompt(), **chosen)
    assert want.sequences.shape[1] < LENGTH + NUM
    assert_equal(drafted(llama, prompt(), **draft_for(kind, llama), **chosen)[0], want)
    ids = drafted(llama, prompt(), **draft_for(kind, llama), **chosen, return_dict_in_generate=False,
                  output_scores=False, output_logits=False)[0]  # fmt: skip
    assert torch.equal(ids, want.sequences)


# -- offloaded --------------------------------------------------------------------------------------------------------


def offloaded(
    model: Any, share: float, monkeypatch: pytest.MonkeyPatch, grain: str | None = None
) -> tuple[Any, Recorder]:
    """A streamer of a device that captures, and its recorder."""
    lanes = Lanes()
    with monkeypatch.context() as patch:
        patch.setattr("weightstream.runtime.devices.opening.CpuBackend", lambda *_: Lane(lanes))
        if grain is not None:
            patch.setattr("weightstream.inputs.gathering.GRAINS", (grain,))
        budget = int(share * sum(param.nbytes for param in model.parameters()))
        streamer = weightstream.offload(model, device="cpu", device_budget=budget, codec="none")
    return streamer, Recorder(new=Graph, record=streamer.capture, replay=streamer.replay)


@pytest.mark.few(1)
@pytest.mark.parametrize("share", [0.45, 0.7, 1.2])
@pytest.mark.parametrize("grain", ["block", "half", "matrix"])
@pytest.mark.parametrize("name", MODELS)
def test_an_offloaded_model_is_equal_to_a_resident_one(
    name: str, grain: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = build(name, layers=4), build(name, layers=4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = ["token", "rows"]
    draft = drafts(noised(reference))
    want = {bits: drafted(reference, prompt(), bits, **draft)[0] for bits in kinds}
    streamer, streamed = offloaded(model, share, monkeypatch, grain)
    with streamer:
        for _ in range(2):  # a streamer that has not learned an order, and one that has
            got, decoding = drafted(model, prompt(), kinds[0], streamed, **draft)
            assert_equal(got, want[kinds[0]])
            assert decoding.reason is None
            assert decoding.replays > 1
        unplanned = streamer.stats().unplanned_fills
        for bits, way in itertools.product(kinds, (None, streamed)):
            rows = {"prompt_lookup_num_tokens": 2}
            got, _ = drafted(model, prompt(), bits, way, **rows)
            assert_equal(got, drafted(reference, prompt(), bits, **rows)[0])
        assert streamer.stats().unplanned_fills == unplanned
        assert (streamer.stats().fills > 0) == (share < 1)
    assert_equal(drafted(model, prompt(), "token", **draft)[0], plainly(reference, prompt()))
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_matrices_that_are_streamed_one_by_one_with_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = build("llama", layers=4), build("llama", layers=4)
    for each in (model, reference):
        each.set_attn_implementation("eager")
    want = plainly(reference, prompt())
    streamer, streamed = offloaded(model, 0.6, monkeypatch, "matrix")
    with streamer:
        for way in (None, streamed):
            assert_equal(drafted(model, prompt(), "token", way, **LOOKUP)[0], want)


@pytest.mark.stress
@pytest.mark.few(1)
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_inside_a_step_and_with_an_offloaded_assistant(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = build("llama", layers=4), build("llama", layers=4)
    assistant = noised(reference)
    draft, want = drafts(assistant), plainly(reference, prompt(), **how)
    streamer, streamed = offloaded(model, 0.6, monkeypatch)
    with streamer, weightstream.offload(assistant, device="cpu", device_budget="300KiB"):
        for way in (None, streamed):
            got, decoding = drafted(model, prompt(), "token", way, **draft, **how)
            assert_equal(got, want)
            assert decoding.speculation.tokens_per_pass > 1
        with streamer.step():
            for way in (None, streamed):
                assert_equal(drafted(model, prompt(), "token", way, **draft, **how)[0], want)
    streamer.remove()
    assert_equal(drafted(model, prompt(), "token", **draft, **how)[0], want)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_an_offloaded_model_see_all_tokens_of_a_pass(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers collects states by hooks; a unit with hooks opens before they run."""
    model, reference, kept = build("llama", layers=4), build("llama", layers=4), {"output_hidden_states": True}
    draft, want, widths = drafts(noised(reference)), plainly(reference, prompt(), **kept), set()
    model.model.layers[2].register_forward_hook(lambda *call: widths.add(call[2].shape[1]))
    streamer, streamed = offloaded(model, 0.6, monkeypatch, "block")
    with streamer:
        got, _ = drafted(model, prompt(), "token", streamed if way == "captured" else None, **draft, **kept)
    assert_equal(got, want)
    assert widths == {LENGTH, 1, WIDTH}  # one token to compare with, before the first pass
    for ours, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("no_loading_bars")
@pytest.mark.stress
def test_drafts_that_use_modules_of_an_offloaded_model(mtp_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for draft, build_one in (
        (dflash(), lambda: build("llama", layers=4)),
        ({"use_mtp": True}, lambda: MtpModel.from_pretrained(mtp_folder).eval()),
    ):
        model, reference = build_one(), build_one()
        want = {bits: drafted(reference, prompt(), bits, **draft)[0] for bits in ("token", "rows")}
        streamer, streamed = offloaded(model, 0.8, monkeypatch, "block")
        with streamer:
            for bits, way in itertools.product(want, (None, streamed)):
                got, decoding = drafted(model, prompt(), bits, way, **draft)
                assert_equal(got, want[bits])
                assert decoding.replays == 0 if way is None else decoding.replays > 2
            assert_equal(decode_with(model, prompt(), options(), streamed)[0], plainly(reference, prompt()))
        assert "generate" not in vars(model)


# -- what is refused, or runs in transformers' way ---------------------------------------------------------------------


def test_a_wrong_value_of_bits_names_the_values(llama: Any) -> None:
    for more in ({}, LOOKUP):
        with pytest.raises(ConfigError, match='bits=\'tokens\': it is "token", "rows" or None'):
            generate(llama, prompt(), bits="tokens", **more)


def test_an_early_exit_is_refused(llama: Any) -> None:
    with pytest.raises(UnsupportedError, match="assistant_early_exit: the first layers"):
        generate(llama, prompt(), assistant_early_exit=1)


def test_what_transformers_refuses_stays_its_error(llama: Any) -> None:
    with pytest.raises(ValueError, match="batch_size = 1"):
        drafted(llama, prompt(rows=2), None, **LOOKUP)
    with pytest.raises(ValueError, match="num_return_sequences has to be 1"):
        drafted(llama, prompt(), None, **LOOKUP, **SAMPLED, num_return_sequences=2)
    with pytest.raises(ValueError, match="Invalid max_matching_ngram_size or num_output_tokens"):
        drafted(llama, prompt(), None, prompt_lookup_num_tokens=0)


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2, **LOOKUP}, "only greedy search and sampling, with a cache, are captured"),
    "a mixed draft": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight mixes"),
    "a cache of the caller's": ({CACHE: ..., **LOOKUP}, f"{CACHE} was given"),
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.filterwarnings("default")
def test_what_runs_in_the_way_of_transformers(llama: Any, name: str) -> None:
    chosen, reason = REASONS[name]
    if name == "a mixed draft":
        chosen = chosen | drafts(noised(llama))

    def options_now() -> dict[str, Any]:
        made = {"cache": transformers.DynamicCache(config=llama.config)}
        return options(**{key: made["cache"] if value is ... else value for key, value in chosen.items()})

    want = llama.generate(prompt(), **options_now())
    got, decoding = drafted(llama, prompt(), None, FakeCuda(), **options_now())
    assert torch.equal(got.sequences, want.sequences)
    assert decoding.reason.startswith(reason)
    assert decoding.speculation is None
    with pytest.raises(UnsupportedError, match=f'bits="token": {reason}'):
        drafted(llama, prompt(), "token", **options_now())


def test_a_model_may_be_its_own_assistant(llama: Any) -> None:
    draft = {"assistant_model": llama}
    got, decoding = drafted(llama, prompt(), None, FakeCuda(), **draft)
    assert torch.equal(got.sequences, plainly(llama, prompt()).sequences)
    assert decoding.reason == "assistant_model is the model itself"


def t5() -> Any:
    sizes = {"vocab_size": 128, "d_model": 64, "d_ff": 160, "d_kv": 16, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
    )


def linear_attention() -> Any:
    sizes = TEXT | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 48}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    config = transformers.Qwen3NextConfig(
        **sizes, **linear, linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2,
        shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (t5, "T5ForConditionalGeneration does not work with a static cache alone"),
        (linear_attention, "the cache has layers of other kinds than attention"),
    ],
)
def test_models_without_a_static_cache(make: Any, reason: str) -> None:
    model = randomise(make().eval(), 3)
    try:
        want = model.generate(prompt(), **options(**LOOKUP))
    except (ValueError, NotImplementedError) as error:  # of transformers 5.17
        with pytest.raises(type(error)):
            drafted(model, prompt(), None, **LOOKUP)
    else:
        got, decoding = drafted(model, prompt(), None, FakeCuda(), **LOOKUP)
        assert torch.equal(got.sequences, want.sequences)
        assert decoding.reason.startswith(reason)
    with pytest.raises(UnsupportedError, match=f'bits="token": {reason}'):
        drafted(model, prompt(), "token", **LOOKUP)


def test_a_state_space_model_is_refused_by_transformers() -> None:
    config = transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0)
    model = randomise(transformers.MambaForCausalLM(config).eval(), 3)
    with pytest.raises(ValueError, match="stateful"):
        drafted(model, prompt(), None, **LOOKUP)
    with pytest.raises(UnsupportedError, match='bits="token": MambaForCausalLM does not work with a static cache'):
        drafted(model, prompt(), "token", **LOOKUP)


def test_over_several_devices_texts_run_in_the_way_of_transformers() -> None:
    model, reference = build("llama", layers=4), build("llama", layers=4)
    nbytes, lanes = sum(param.nbytes for param in model.parameters()), Lanes()
    config = OffloadConfig(max_memory=dict.fromkeys(range(2), nbytes // 2), codec="none")
    want = reference.generate(prompt(), **options(**LOOKUP))
    with stripe(model, [Lane(lanes) for _ in range(2)], config, CallerFacts()):
        got, decoding = drafted(model, prompt(), None, FakeCuda(), **LOOKUP)
        assert_equal(got, want)
        assert decoding.reason == "the model is spread over several GPUs"
        with pytest.raises(UnsupportedError, match='bits="token": the model is spread over several GPUs'):
            drafted(model, prompt(), "token", **LOOKUP)


def test_over_several_processes_texts_run_in_the_way_of_transformers(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafted_module, "ranks_of", lambda _: object())
    got, decoding = drafted(llama, prompt(), None, FakeCuda(), **LOOKUP)
    assert_equal(got, llama.generate(prompt(), **options(**LOOKUP)))
    assert "sharded over several processes" in str(decoding.reason)
    with pytest.raises(UnsupportedError, match='bits="token": the model is sharded over several processes'):
        drafted(llama, prompt(), "token", **LOOKUP)


def test_an_error_in_a_pass_leaves_the_model_as_it_was(llama: Any) -> None:
    def fails(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if ids.shape[1] > LENGTH + 5:
            raise KeyError("of the caller")
        return torch.tensor([False])

    plans(llama)
    before = dict(vars(llama))
    with pytest.raises(KeyError, match="of the caller"):
        drafted(llama, prompt(), **LOOKUP, stopping_criteria=transformers.StoppingCriteriaList([fails]))
    assert vars(llama) == before
    assert_equal(drafted(llama, prompt(), **LOOKUP)[0], plainly(llama, prompt()))


# -- the public function -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_generate_on_the_cpu(llama: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weightstream"):
        got = weightstream.generate(llama, prompt(), bits="token", **draft_for(kind, llama), **options())
    assert_equal(got, plainly(llama, prompt()))
    message = caplog.messages[-1]
    assert message.startswith("generate: eager (graphs are captured on CUDA, and the model is on cpu); ")
    assert 'bits="token" (rows at once, except ' in message


def test_a_temperature_at_which_few_tokens_are_accepted_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    with caplog.at_level(logging.WARNING, "weightstream"):
        weightstream.generate(model, prompt(), on_decoding=lambda _: None, **LOOKUP, **options(do_sample=True, top_k=0))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("generate: at temperature 1.0 only ")


# -- the distribution of sampled text ----------------------------------------------------------------------------------

NUM_BINS = 20
CRITICAL = 43.8  # chi-square with 19 degrees of freedom: exceeded by one of 1,000 fair texts


class Biased(DrawsByPosition):
    """Accepts a drafted token that was not drawn in half of the cases."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = super().__torch_function__(func, types, args, kwargs)
        candidates = self._counts.candidates
        if func is torch.multinomial and len(args[0]) == len(candidates) + 1 and candidates and torch.rand(()) < 1 / 2:
            drawn[0] = candidates[0]
        return drawn


def chi_square(texts: list[list[int]], model: Any, length: int) -> float:
    """How far tokens are from draws of the model's distribution: ranks, most likely word first, must be uniform."""
    ids = torch.tensor(texts)
    with torch.no_grad():
        chances = model(ids).logits[:, length - 1 : -1].double().softmax(-1)
    ordered, order = chances.sort(descending=True)
    rank = (order == ids[:, length:, None]).int().argmax(-1, keepdim=True)
    own = ordered.gather(-1, rank)[..., 0]
    below = ordered.cumsum(-1).gather(-1, rank)[..., 0] - own
    places = below + own * torch.rand(own.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = torch.histc(places, NUM_BINS, 0, 1)
    expected = places.numel() / NUM_BINS
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.stress
def test_sampled_text_has_the_distribution_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MODELS["llama"]()
    config.num_hidden_layers, config.vocab_size = 1, 32
    model = randomise(transformers.LlamaForCausalLM(config).eval(), 7)
    model.lm_head.weight.data *= 2  # some words are likely
    draft, ids = drafts(noised(model, 0.05), 2), torch.tensor([[5, 9, 17]])
    text = {"output_scores": False, "output_logits": False, "return_dict_in_generate": False, "max_new_tokens": 40}
    chosen = options(do_sample=True, top_k=0, **text)
    acceptance = []

    def texts(first: int, **more: Any) -> list[list[int]]:
        made = []
        for seed in range(first, first + 10):
            torch.manual_seed(seed)
            made.append(generate(model, ids, on_decoding=found.append, **chosen, **more)[0].tolist())
            acceptance.append(found.pop().speculation)
        return made

    found: list[Any] = []
    assert chi_square(texts(0), model, 3) < CRITICAL
    acceptance.clear()
    assert chi_square(texts(1000, bits="rows", **draft), model, 3) < CRITICAL
    assert sum(each.acceptance for each in acceptance) / len(acceptance) > 0.08
    monkeypatch.setattr(speculation, "DrawsByPosition", Biased)
    assert chi_square(texts(1000, bits="rows", **draft), model, 3) > CRITICAL, "a draft that is accepted too often"


def test_operators_row_by_row_are_free_where_copies_take_longer() -> None:
    model, draft = build("llama"), speculation.Draft("prompt lookup", 3)
    with weightstream.offload(model, device="cpu", device_budget=sum(p.nbytes for p in model.parameters())) as streamer:
        plan, profile = streamer.plan, dataclasses.replace(streamer.lane.profile, op_s=2e-6, on_cpu=False)
        few, many, wide = (Splits(*facts) for facts in ((5, 4, 1 << 20), (50, 4, 1 << 20), (50, 8, 1 << 20)))
        for in_graphs in (False, True):
            seconds = [split_pass_s(plan, profile, each, in_graphs=in_graphs) for each in (few, many, wide)]
            assert seconds == sorted(seconds)
            assert seconds[0] < seconds[1] < seconds[2]
            again = split_pass_s(plan, profile, wide._replace(nbytes=1 << 40), in_graphs=in_graphs)
            assert again == pytest.approx(7 * 2**40 / profile.device_bytes_per_s, rel=0.1)
        assert split_pass_s(plan, profile, wide, in_graphs=True) < split_pass_s(plan, profile, wide, in_graphs=False)
        slow = dataclasses.replace(plan, copy_s=1e3)
        assert split_pass_s(slow, profile, wide, in_graphs=True) == 1e3
        cpu = streamer.lane.profile
        assert split_pass_s(plan, cpu, Splits(0, 4, 0), in_graphs=False) == plan.step_s
        assert split_pass_s(plan, cpu, wide, in_graphs=False) >= plan.step_s + 50 * 8 * cpu.op_launch_s
        rows = RowPlan(calls=Counter({"mm": 10**6}))
        assert not drafted_module._splits_are_free(streamer, False, draft, rows)
        assert drafted_module._splits_are_free(streamer, True, draft, RowPlan())
        assert not drafted_module._splits_are_free(None, False, draft, RowPlan())
