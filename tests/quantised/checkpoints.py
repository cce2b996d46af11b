"""Checkpoints of a tiny Llama in the quantised formats that transformers loads, made by their libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from formats import FP8, INT4, INT8, TOKEN, compress, random_words

Make = Callable[[Path], None]


def llama() -> Any:
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def _bnb(settings: dict[str, Any], folder: Path) -> None:
    import transformers

    quantised(folder, transformers.BitsAndBytesConfig(**settings)).save_pretrained(folder)


def _torchao(name: str, settings: dict[str, Any], folder: Path) -> None:
    import transformers
    from torchao import quantization

    config = transformers.TorchAoConfig(getattr(quantization, name)(**settings))
    quantised(folder, config).save_pretrained(folder)


def quantised(folder: Path, config: Any) -> Any:
    """The tiny Llama, quantised by transformers on the CPU."""
    import transformers

    plain = folder / "plain"
    llama().save_pretrained(plain)
    return transformers.LlamaForCausalLM.from_pretrained(plain, quantization_config=config, device_map={"": "cpu"})


def _compressed(weights: dict[str, Any], activations: dict[str, Any] | None, kind: str, folder: Path) -> None:
    model = llama()
    compressor = compress(model, weights, activations, kind, ignore=["lm_head"])
    _save(model, model.state_dict(), folder)
    compressor.update_config(folder)


def _save(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Save these tensors with the config of a model."""
    from safetensors.torch import save_file

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def _float8(folder: Path) -> None:
    """Float8 with a scale for each block of 64 x 64, as DeepSeek's."""
    model, tensors = llama(), {}
    for name, tensor in model.state_dict().items():
        if "_proj." in name:
            rows, columns = tensor.shape
            blocks = tensor.float().reshape(rows // 64, 64, columns // 64, 64)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0]
            tensor = (blocks / scale).reshape(rows, columns).to(torch.float8_e4m3fn)
        tensors[name] = tensor
    model.config.quantization_config = {
        "quant_method": "fp8",
        "weight_block_size": [64, 64],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    _save(model, tensors, folder)


def _mxfp4(folder: Path) -> None:
    """Two numbers per byte, and an exponent for each 32 of them, as gpt-oss. Random bytes are valid."""
    import transformers

    torch.manual_seed(1)
    config = transformers.GptOssConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
        eos_token_id=2,
    )
    model, tensors = transformers.GptOssForCausalLM(config).to(torch.bfloat16).eval(), {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(119, 122, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            tensors[name] = tensor
    model.config.quantization_config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    _save(model, tensors, folder)


def _words(method: str, settings: dict[str, Any], folder: Path) -> None:
    """GPTQ's and AWQ's 4-bit integers, packed, with scales and zero points."""
    model, tensors = llama().half(), {}
    for name, tensor in model.state_dict().items():
        if "_proj." in name:
            words = random_words(method, *tensor.shape)
            tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in words.items()}
        else:
            tensors[name] = tensor
    model.config.quantization_config = {"quant_method": method, "bits": 4, "group_size": 32, **settings}
    _save(model, tensors, folder)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}


def on_the_fly(kind: str) -> Any:
    """Arguments that make transformers quantise a plain checkpoint while it loads."""
    import transformers

    if kind == "bnb nf4":
        return transformers.BitsAndBytesConfig(**NF4)
    if kind == "bnb int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    return transformers.TorchAoConfig(
        {"torchao int8": Int8WeightOnlyConfig(version=2), "torchao float8": Float8WeightOnlyConfig()}[kind]
    )


CHECKPOINTS: dict[str, tuple[str, Make]] = {
    "bnb nf4": ("bitsandbytes", functools.partial(_bnb, NF4)),
    "bnb nf4 double": ("bitsandbytes", functools.partial(_bnb, NF4 | {"bnb_4bit_use_double_quant": True})),
    "bnb int8": ("bitsandbytes", functools.partial(_bnb, {"load_in_8bit": True})),
    "torchao int8": ("torchao", functools.partial(_torchao, "Int8WeightOnlyConfig", {"version": 2})),
    "torchao float8": ("torchao", functools.partial(_torchao, "Float8WeightOnlyConfig", {})),
    "fp8": ("transformers", _float8),
    "mxfp4": ("transformers", _mxfp4),
    "gptq": (
        "gptqmodel",
        functools.partial(
            _words, "gptq", {"desc_act": False, "sym": True, "checkpoint_format": "gptq", "backend": "gptq_torch"}
        ),
    ),
    "awq": (
        "gptqmodel",
        functools.partial(
            _words,
            "awq",
            {"version": "gemm", "zero_point": True, "modules_to_not_convert": ["lm_head"], "backend": "torch_awq"},
        ),
    ),
    "compressed w4a16": (
        "compressed_tensors",
        functools.partial(_compressed, INT4 | {"symmetric": True}, None, "pack-quantized"),
    ),
    "compressed w8a8": ("compressed_tensors", functools.partial(_compressed, INT8, INT8 | TOKEN, "int-quantized")),
    "compressed fp8": ("compressed_tensors", functools.partial(_compressed, FP8, FP8 | TOKEN, "float-quantized")),
}
