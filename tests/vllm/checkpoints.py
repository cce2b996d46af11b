"""Small models with random weights, in files: values that vLLM makes up depend on where a weight is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SHAPE),
    "qwen3": ("Qwen3Config", _SHAPE),
    "tied": ("LlamaConfig", _SHAPE | {"tie_word_embeddings": True}),
    "moe": ("Qwen3MoeConfig", _SHAPE | _MOE),
    "gemma": ("Gemma3TextConfig", _SHAPE | {"sliding_window": 64, "query_pre_attn_scalar": 64}),
}
LAYERS_NBYTES = 8 * 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 512 + 2 * 256)  # of "llama", bfloat16
LAYER_NBYTES = LAYERS_NBYTES // 8


def make(name: str, folder: Path) -> Path:
    """Write a model of this kind."""
    import transformers

    config_class, shape = KINDS[name]
    config = getattr(transformers, config_class)(**shape)
    generator = torch.Generator().manual_seed(len(name))
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                std = 3 * parameter.shape[-1] ** -0.5  # far from ties between tokens
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder
