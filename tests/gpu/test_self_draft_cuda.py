"""A model that drafts for itself on a GPU: drafts and passes in graphs, the bits of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from generating import STATIC, build
from models import TEXT

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.modules.split_weights import DraftWeight, SplitWeight  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = TEXT | {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "max_position_embeddings": 512,
}
NUM, KEPT = 56, {"return_dict_in_generate": True, "output_logits": True}
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "tied": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=2),
}


@pytest.mark.usefixtures("no_loading_bars")
@pytest.mark.parametrize("sample", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_bits_of_the_plain_model(kind: str, sample: dict[str, Any], tmp_path: Path) -> None:
    build(KINDS[kind]()).save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).cuda()
    prompt = torch.randint(3, 1024, (1, 9), generator=torch.Generator().manual_seed(7)).cuda()
    options = {"max_new_tokens": NUM, "pad_token_id": 0, "eos_token_id": None, **KEPT, **sample}
    torch.manual_seed(5)
    want = plain.generate(prompt, **options, **STATIC)
    budget = int(0.6 * sum(p.nbytes for p in plain.parameters()))
    model = weightstream.from_pretrained(
        tmp_path, device_budget=budget, draft="self", speculate="draft", context=128, progress=False
    )
    weight = model.model.layers[0].mlp.up_proj.weight
    assert type(weight) is SplitWeight
    assert weight.high.is_cuda
    draft = model.weightstream.drafting.model
    assert {p.device.type for p in draft.parameters() if type(p) is DraftWeight} == {"cuda"}
    for _ in range(2):
        found: list[DecodeReport] = []
        torch.manual_seed(5)
        got = weightstream.generate(model, prompt, bits="token", on_decoding=found.append, **options)
        assert torch.equal(got.sequences, want.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
        assert found[0].reason is None
        assert found[0].replays
        assert found[0].speculation.draft == "self draft"
        assert found[0].speculation.tokens_per_pass > 1
    assert model.weightstream.stats().unplanned_fills == 0
    model.weightstream.remove()
    assert all(torch.equal(a.cuda(), b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
