"""Several tokens a pass on a GPU: real graphs, tokens and scores of one token at a time, resident and offloaded."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weightstream
from drafting import MtpModel, dflash, save_mtp
from generating import MODELS, STATIC, add_noise, build, options

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.generation.drafts import DraftCounts, FixedWidthDrafts  # noqa: E402
from weightstream.adapters.generation.generation import generate  # noqa: E402
from weightstream.adapters.steps.row_split import plans  # noqa: E402
from weightstream.adapters.steps.row_trial import RowTrial  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TOKENS = 40
KEPT = {"return_dict_in_generate": True, "output_scores": True}
FULL = [name for name in MODELS if name not in ("gemma2", "mistral")]  # without a window shorter than the text


def prompt(length: int = 9) -> torch.Tensor:
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length)).cuda()


def drafted(model: Any, **more: Any) -> tuple[Any, DecodeReport]:
    found: list[DecodeReport] = []
    torch.manual_seed(5)
    result = generate(model, prompt(), on_decoding=found.append, **options(TOKENS, **KEPT, **more))
    return result, found[0]


def noised(model: Any) -> Any:
    """A draft that is often right."""
    draft = copy.deepcopy(model).cuda()
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.assistant_confidence_threshold = 0.0
    add_noise(draft)
    return draft


def drafts(kind: str, model: Any) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": 4} if kind == "lookup" else {"assistant_model": noised(model)}


@pytest.mark.parametrize("splits_all", [False, True], ids=["as found", "all split"])
@pytest.mark.parametrize("sample", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("share", [None, 0.7, 0.15], ids=["resident", "offloaded", "in parts"])
@pytest.mark.parametrize("name", FULL)
def test_tokens_and_scores_are_those_of_one_token_at_a_time(
    name: str, share: float | None, kind: str, sample: dict[str, Any], splits_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = build(MODELS[name]()).cuda(), build(MODELS[name]())
    torch.manual_seed(5)
    want = plain.generate(prompt(), **options(TOKENS, **KEPT, **sample), **STATIC)
    more = drafts(kind, model)
    if share is None:
        model.cuda()
    elif name == "qwen3-moe" and share < 0.5:
        pytest.skip("its experts are one unit, which is larger")
    else:
        weightstream.offload(model, device="cuda", device_budget=int(sum(p.nbytes for p in model.parameters()) * share))
    if splits_all:
        monkeypatch.setattr(RowTrial, "_probe", lambda _, probe, wide, *rest: f"{wide} differs")
    plans(model).clear()
    for _ in range(2):  # the second time, the streamer knows the order, and what the trial has found
        got, decoding = drafted(model, bits="token", **more, **sample)
        assert torch.equal(got.sequences, want.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.scores, want.scores, strict=True))
        assert decoding.reason is None
        assert decoding.replays
        assert decoding.speculation is not None
        assert decoding.speculation.bits == "token"
        assert decoding.speculation.rows.startswith("at once, except ") or not splits_all
    if share is not None:
        assert model.weightstream.stats().unplanned_fills == 0


@pytest.mark.parametrize("name", MODELS)
def test_passes_of_an_offloaded_model_have_the_bits_of_the_resident_model(name: str) -> None:
    resident, model = build(MODELS[name]()).cuda(), build(MODELS[name]())
    lookup, _ = drafted(resident, bits="rows", prompt_lookup_num_tokens=4)
    with weightstream.offload(
        model, device="cuda", device_budget=int(sum(p.nbytes for p in model.parameters()) * 0.7)
    ) as streamer:
        for kind in ("lookup", "assistant"):
            got, decoding = drafted(model, bits="rows", **drafts(kind, resident))
            assert torch.equal(got.sequences, lookup.sequences)
            assert all(torch.equal(a, b) for a, b in zip(got.scores, lookup.scores, strict=True))
            assert decoding.replays
        assert streamer.stats().unplanned_fills == 0


@pytest.mark.usefixtures("no_loading_bars")
@pytest.mark.parametrize("share", [None, 0.8], ids=["resident", "offloaded"])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_drafts_that_use_modules_of_the_model(kind: str, share: float | None, tmp_path: Path) -> None:
    """Weights of an offloaded model are on the CPU, where transformers would compute the draft."""
    if kind == "mtp":
        save_mtp(tmp_path)
        plain, model = (MtpModel.from_pretrained(tmp_path).eval() for _ in range(2))
        draft: dict[str, Any] = {"use_mtp": True}
    else:
        plain, model, draft = build(MODELS["llama"]()), build(MODELS["llama"]()), dflash()
        draft["assistant_model"].to(torch.bfloat16).cuda()
    want = plain.cuda().generate(prompt(), **options(TOKENS, **KEPT), **STATIC)
    if share is None:
        model.cuda()
    else:
        weightstream.offload(model, device="cuda", device_budget=int(sum(p.nbytes for p in model.parameters()) * share))
    for _ in range(2):
        got, decoding = drafted(model, bits="token", **draft)
        assert torch.equal(got.sequences, want.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.scores, want.scores, strict=True))
        assert decoding.speculation is not None
        assert decoding.speculation.draft == kind
    assert "generate" not in vars(model)


def test_candidates_reach_the_device_without_a_wait() -> None:
    """The host waits once a round, for the tokens of the draft, and not to copy them with those that fill them up."""
    ids = prompt()
    draft = SimpleNamespace(get_candidates=lambda ids, **_: (torch.cat([ids, ids[:, :2]], 1), None))
    drafts = FixedWidthDrafts(draft, 5, frozenset(), DraftCounts(), lambda _: None, nullcontext)
    drafts.get_candidates(ids)  # the prompt
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = [drafts.get_candidates(ids)[0] for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [each.tolist() for each in found] == [[[*ids[0].tolist(), *ids[0, :2].tolist(), 0, 0, 0]]] * 3
    assert sum("synchroniz" in str(warning.message) for warning in seen) == 3
