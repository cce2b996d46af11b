"""Small models with random weights, in files: the dummy values that vLLM makes depend on a weight's place."""

from __future__ import annotations

import json
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
_WIDE: dict[str, Any] = {"hidden_size": 1024, "moe_intermediate_size": 1024}
_SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 256, "norm_topk_prob": True}
_BIASED: dict[str, Any] = {  # a bias that the router reads, and that the gate owns
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # and 64: the sizes that attention kernels support
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "first_k_dense_replace": 8,
}
_OSS: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 128,
    "sliding_window": 64,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0}
    | {"truncate": False, "original_max_position_embeddings": 256},
}
_STATES: dict[str, Any] = {"num_heads": 8, "state_size": 64, "n_groups": 1, "expand": 2, "head_dim": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "latent": ("DeepseekV2Config", _SHAPE | _LATENT),
    "states": ("Mamba2Config", _SHAPE | _STATES),
    "llama": ("LlamaConfig", _SHAPE),
    "qwen2": ("Qwen2Config", _SHAPE),
    "qwen3": ("Qwen3Config", _SHAPE),
    "tied": ("LlamaConfig", _SHAPE | {"tie_word_embeddings": True}),
    "moe": ("Qwen3MoeConfig", _SHAPE | _MOE),
    "mixtral": ("MixtralConfig", _SHAPE | {"num_local_experts": 8, "intermediate_size": 128}),
    "shared": ("Qwen2MoeConfig", _SHAPE | _MOE | _SHARED),
    "biased": ("Glm4MoeConfig", _SHAPE | _MOE | _BIASED),
    "gpt_oss": ("GptOssConfig", _SHAPE | _OSS),
    "gptq": ("LlamaConfig", _SHAPE),
    "awq": ("LlamaConfig", _SHAPE),
    "nvfp4": ("LlamaConfig", _SHAPE),
    "nvfp4_moe": ("Qwen3MoeConfig", _SHAPE | _MOE),
    "wide": ("Qwen3MoeConfig", _SHAPE | _MOE | _WIDE),
    "wide_nvfp4": ("Qwen3MoeConfig", _SHAPE | _MOE | _WIDE),
    "gemma": ("Gemma3TextConfig", _SHAPE | {"sliding_window": 64, "query_pre_attn_scalar": 64}),
}
LAYERS_NBYTES = 8 * 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 512 + 2 * 256)  # of "llama", bfloat16
LAYER_NBYTES = LAYERS_NBYTES // 8


def make(name: str, folder: Path) -> Path:
    """Write a model of this kind."""
    import transformers

    if name == "eagle3":
        return _make_eagle(folder)
    config_class, shape = KINDS[name]
    config = getattr(transformers, config_class)(**shape)
    generator = torch.Generator().manual_seed(len(name))
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                std = 3 * parameter.shape[-1] ** -0.5  # so large that tokens never tie
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    if name in _QUANTISED:
        _quantise(folder, name, generator)
    return folder


_GROUP = 64  # weights that share a scale
_FLOAT4: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_NVFP4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "nvfp4-pack-quantized",
            "weights": _FLOAT4 | {"symmetric": True, "dynamic": False},
            "input_activations": _FLOAT4 | {"symmetric": True, "dynamic": "local"},
        }
    },
}
_QUANTISED: dict[str, dict[str, Any]] = {
    "nvfp4": _NVFP4,
    "nvfp4_moe": _NVFP4,
    "wide_nvfp4": _NVFP4,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
}


def _quantise(folder: Path, method: str, generator: torch.Generator) -> None:
    """Replace the weights of all linear layers but the head by 4-bit weights of the format."""
    from safetensors.torch import load_file, save_file

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64).to(torch.int32)

    weights = load_file(folder / "model.safetensors")
    for name in [key for key in weights if "_proj.weight" in key]:
        rows, columns = weights.pop(name).shape
        at, groups = name.removesuffix("weight"), columns // _GROUP
        if method.endswith(("nvfp4", "nvfp4_moe")):  # a weight is a code, its group's scale, and one scale for all
            scales = 0.5 + torch.rand(rows, columns // 16, generator=generator)
            weights[at + "weight_packed"] = torch.randint(256, (rows, columns // 2), generator=generator).byte()
            weights[at + "weight_scale"] = scales.to(torch.float8_e4m3fn)
            weights[at + "weight_global_scale"] = torch.tensor([1.4 * columns**0.5])
            weights[at + "input_global_scale"] = torch.tensor([448 * 6 / 20.0])
            continue
        scales = (0.5 + torch.rand(groups, rows, generator=generator)) * 0.4 * columns**-0.5
        weights[at + "scales"] = scales.to(torch.float16)
        if method == "gptq":
            weights[at + "qweight"] = words(columns // 8, rows)
            weights[at + "qzeros"] = torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)
            weights[at + "g_idx"] = torch.arange(columns, dtype=torch.int32) // _GROUP
        else:
            weights[at + "qweight"] = words(columns, rows // 8)
            weights[at + "qzeros"] = words(groups, rows // 8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _QUANTISED[method]}))


def _make_eagle(folder: Path) -> Path:
    """An EAGLE-3 draft for "llama": one layer over three of its hidden states and the embedding."""
    from safetensors.torch import save_file

    generator, hidden, inner = torch.Generator().manual_seed(5), _SHAPE["hidden_size"], _SHAPE["intermediate_size"]
    sizes = {"self_attn.q_proj": (256, 2 * hidden), "self_attn.k_proj": (128, 2 * hidden)}
    sizes |= {"self_attn.v_proj": (128, 2 * hidden), "self_attn.o_proj": (hidden, 256)}
    sizes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    sizes = {f"midlayer.{name}": size for name, size in sizes.items()}
    sizes |= {"fc": (hidden, 3 * hidden), "lm_head": (_SHAPE["vocab_size"], hidden)}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    weights = {name: torch.randn(size, generator=generator) * size[-1] ** -0.5 for name, size in sizes.items()}
    weights |= {name: 1 + 0.1 * torch.randn(hidden, generator=generator) for name in norms}
    folder.mkdir(exist_ok=True)
    save_file({f"{name}.weight": t.bfloat16() for name, t in weights.items()}, folder / "model.safetensors")
    config = _SHAPE | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"draft_vocab_size": _SHAPE["vocab_size"], "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return folder


def make_adapter(folder: Path, rank: int = 8) -> Path:
    """A LoRA adapter of "llama" for all linear layers."""
    from safetensors.torch import save_file

    generator, hidden, inner = torch.Generator().manual_seed(3), _SHAPE["hidden_size"], _SHAPE["intermediate_size"]
    sizes = {"self_attn.q_proj": (256, hidden), "self_attn.k_proj": (128, hidden), "self_attn.v_proj": (128, hidden)}
    sizes |= {"self_attn.o_proj": (hidden, 256), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    sizes |= {"mlp.down_proj": (hidden, inner)}
    weights = {}
    for layer in range(_SHAPE["num_hidden_layers"]):
        for name, (rows, columns) in sizes.items():
            at = f"base_model.model.model.layers.{layer}.{name}.lora_"
            weights[at + "A.weight"] = torch.randn(rank, columns, generator=generator) * 0.2
            weights[at + "B.weight"] = torch.randn(rows, rank, generator=generator) * 0.2
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    modules = sorted({name.partition(".")[2] for name in sizes})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
