"""`speculate="auto"` on a GPU: passes of both widths are captured, and the text is that of one token at a time."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from generating import STATIC, build, options
from models import TEXT

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.generation.generation import generate  # noqa: E402
from weightstream.adapters.generation.pacing import Pacing  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 1024}
TOKENS = 60
KEPT = {"return_dict_in_generate": True, "output_logits": True}


def model_of(layers: int = 12) -> Any:
    sizes = TEXT | SIZES | {"num_hidden_layers": layers, "max_position_embeddings": 512}
    return build(transformers.LlamaConfig(**sizes, num_key_value_heads=2))


def prompt() -> torch.Tensor:
    words = torch.randint(3, 1024, (7,), generator=torch.Generator().manual_seed(3))
    return words.repeat(3)[None].cuda()


def held_nbytes() -> int:
    """Bytes that are allocated, without the workspaces of cuBLAS: 32 MiB for each stream with a product [H200]."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def is_same(a: Any, b: Any) -> bool:
    return torch.equal(a.sequences, b.sequences) and torch.equal(torch.stack(a.logits), torch.stack(b.logits))


@pytest.mark.parametrize("mode", ["auto", "lookup"])
def test_passes_of_one_token_and_of_all_rows_are_replayed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = model_of().cuda().generate(prompt(), **options(TOKENS, **KEPT), **STATIC)
    model = model_of()
    rounds: list[int] = []

    def wanted(self: Pacing) -> int:
        rounds.append(0 if mode == "auto" and len(rounds) % 9 > 4 else self.width - 1)
        return rounds[-1]

    monkeypatch.setattr(Pacing, "_num_wanted", wanted)
    monkeypatch.setattr("weightstream.adapters.generation.pacing._ROUND_S", 0.0)  # the model is small
    with weightstream.offload(model, device_budget="10MiB", codec="none") as streamer:
        found: list[DecodeReport] = []
        got = generate(
            model, prompt(), **options(TOKENS, **KEPT), speculate=mode, bits="token", on_decoding=found.append
        )
        assert is_same(got, want)
        report = found[0].speculation
        if report is None:
            pytest.skip(f"no pass of several tokens is expected to gain here: {streamer.plan.passes}")
        assert found[0].reason is None
        assert (report.singles > 2) is (mode == "auto")
        assert found[0].replays >= report.passes - 8
        assert streamer.stats().unplanned_fills == 0


def test_predicted_seconds_of_passes_are_those_of_a_streaming_model() -> None:
    model = model_of()
    with weightstream.offload(model, device_budget="10MiB", codec="none") as streamer:
        seconds = [each.graph_s for each in streamer.pass_seconds()]
        assert seconds == sorted(seconds)
        assert seconds[4] <= 1.1 * seconds[0]  # 16 tokens: the link is the limit


def test_a_draft_is_loaded_inside_of_the_budget_and_drafts_from_graphs(tmp_path: Path) -> None:
    target, small = tmp_path / "target", tmp_path / "small"
    model_of().save_pretrained(target)
    model_of(layers=1).save_pretrained(small)
    plain = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).cuda()
    want = plain.generate(prompt(), **options(TOKENS, **KEPT), **STATIC)
    del plain
    before = held_nbytes()
    model = weightstream.from_pretrained(
        target, device_budget="24MiB", speculate="draft", draft=small, context=128, codec="none"
    )
    with model.weightstream as streamer:
        draft = streamer.drafting.model
        assert draft.device.type == "cuda"
        # a draft of 9 MiB that the budget of 24 MiB does not count would exceed this
        assert 9 << 20 < sum(param.nbytes for param in draft.parameters()) < held_nbytes() - before <= 25 << 20
        found: list[DecodeReport] = []
        got = generate(model, prompt(), **options(TOKENS, **KEPT), bits="token", on_decoding=found.append)
        assert is_same(got, want)
        assert found[0].speculation is not None
        assert found[0].speculation.draft == "assistant"
