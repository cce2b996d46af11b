"""Cases of captured generation, on the CPU and on a GPU: configurations, and options of `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models import TEXT

transformers = pytest.importorskip("transformers")

STATIC = {"cache_implementation": "static", "disable_compile": True}
WINDOW = 12
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=128, n_embd=64, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, pad_token_id=0
    ),
    "gemma2": lambda: transformers.Gemma2Config(**TEXT, num_key_value_heads=2, head_dim=16, sliding_window=WINDOW),
    "mistral": lambda: transformers.MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=WINDOW),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **TEXT, num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48
    ),
}


def options(num: int = 24, **more: Any) -> dict[str, Any]:
    lengths = {"max_new_tokens": num, "min_new_tokens": num}
    return lengths | {"do_sample": False, "repetition_penalty": 2.0, "pad_token_id": 0} | more


def add_noise(draft: Any, share: float = 0.02) -> None:
    """Make a copy of a model a draft that is often right."""
    torch.manual_seed(3)
    for weight in draft.parameters():
        if weight.dim() == 2:
            weight.data.add_(torch.randn_like(weight) * weight.std() * share)


def build(config: Any, cls: Any = None) -> Any:
    """A model in bfloat16 whose logits differ from token to token."""
    torch.manual_seed(11)
    config.initializer_range = 0.1
    model = cls(config) if cls else transformers.AutoModelForCausalLM.from_config(config)
    return model.eval().to(torch.bfloat16)
