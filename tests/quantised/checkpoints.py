"""Checkpoints of a tiny Llama in the quantised formats that transformers loads, made by their libraries."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
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


def mixture(kind: str) -> Any:
    """A tiny mixture of experts, in bfloat16, of the class of a model that people run."""
    import transformers

    torch.manual_seed(1)
    common: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 128,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    shared: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config: Any
    if kind == "qwen3":
        config = transformers.Qwen3MoeConfig(**common, num_experts=8)
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    elif kind == "glm4":
        config = transformers.Glm4MoeConfig(**common, **shared, n_group=1, topk_group=1)
        model = transformers.Glm4MoeForCausalLM(config)
    else:
        ranks = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
        del common["head_dim"]
        config = transformers.DeepseekV3Config(**common, **shared, **ranks, v_head_dim=32, n_group=2, topk_group=1)
        model = transformers.DeepseekV3ForCausalLM(config)
    model, config.dtype = model.to(torch.bfloat16).eval(), torch.bfloat16
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith(tuple(model._keep_in_fp32_modules_strict or ())):
            tensor.data = tensor.data.float()  # as transformers loads it
        if ".experts." in name:
            tensor.data.normal_(0, 0.05)
    return model


def matrices(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices of a stack of experts, by the names that files have for them; any other tensor is itself."""
    module, _, stack = name.rpartition(".experts.")
    if not module:
        return {name: tensor}
    is_joint, found = stack == "gate_up_proj", {}
    for index, rows in enumerate(tensor):
        parts = zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True) if is_joint else [(stack, rows)]
        found |= {f"{module}.experts.{index}.{part}.weight": matrix for part, matrix in parts}
    return found


def in_blocks(matrix: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8, and the scales of its blocks."""
    rows, columns = matrix.shape
    blocks = matrix.float().reshape(rows // size, size, columns // size, size)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    return (blocks / scales).reshape(rows, columns).to(torch.float8_e4m3fn), scales[:, 0, :, 0]


def float8_mixture(kind: str, scales: str, folder: Path, *, plain_layer: int | None = None) -> None:
    """Experts and attention in block float8. `scales`: float32, powers of two, or their exponents (ue8m0)."""
    model, tensors = mixture(kind), {}
    for stack, whole in model.state_dict().items():
        for name, tensor in matrices(stack, whole).items():
            if "_proj" not in name or f"layers.{plain_layer}." in name:
                tensors[name] = tensor
                continue
            tensors[name], scale = in_blocks(tensor, 32)
            if scales != "float32":
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            if scales == "ue8m0":
                scale = scale.to(torch.float8_e8m0fnu)
            tensors[f"{name}_scale_inv"] = scale
    ignored = ["lm_head"] + [f"model.layers.{plain_layer}"] * (plain_layer is not None)
    model.config.quantization_config = {
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ignored,
    } | ({"scale_fmt": "ue8m0"} if scales == "ue8m0" else {})
    _save(model, tensors, folder)


def compressed_mixture(
    kind: str, weights: dict[str, Any], activations: dict[str, Any] | None, packing: str, folder: Path
) -> None:
    """Experts in a format of compressed-tensors; all else stays as it was."""
    from compressed_tensors import quantization as ct
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model, tensors = mixture(kind), {}
    arguments = ct.QuantizationArgs(**weights)
    inputs = None if activations is None else ct.QuantizationArgs(**activations)
    scheme = ct.QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs, format=packing)
    compress = BaseCompressor.get_value_from_registry(packing).compress
    for stack, whole in model.state_dict().items():
        for name, matrix in matrices(stack, whole).items():
            if name == stack:
                tensors[name] = matrix
                continue
            groups = matrix.float().unflatten(1, (-1, arguments.group_size or matrix.shape[1]))
            scale, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
            parts = {"weight": matrix, "weight_scale": scale.view(len(matrix), -1).to(torch.bfloat16)}
            if not arguments.symmetric:
                parts["weight_zero_point"] = zeros.view(len(matrix), -1).to(torch.int8)
            path = name.removesuffix("weight")
            tensors |= {path + part: value for part, value in compress(parts, scheme).items()}
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    config = ct.QuantizationConfig(
        config_groups={"group_0": scheme}, format=packing, ignore=linear, quantization_status="compressed"
    )
    model.config.quantization_config = config.to_dict() | {"quant_method": "compressed-tensors"}
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


def words_of(model: Any, method: str, settings: dict[str, Any], folder: Path) -> None:
    """GPTQ's and AWQ's 4-bit integers, packed, with scales and zero points."""
    tensors: dict[str, torch.Tensor] = {}
    for stack, whole in model.state_dict().items():
        for name, tensor in matrices(stack, whole).items():
            if "_proj." in name:
                words = random_words(method, *tensor.shape)
                tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in words.items()}
            else:
                tensors[name] = tensor
    model.config.quantization_config = {"quant_method": method, "bits": 4, "group_size": 32, **settings}
    _save(model, tensors, folder)


def _words(method: str, settings: dict[str, Any], folder: Path) -> None:
    words_of(llama().half(), method, settings, folder)


GPTQ = {"desc_act": False, "sym": True, "checkpoint_format": "gptq", "backend": "gptq_torch"}
AWQ = {"version": "gemm", "zero_point": True, "modules_to_not_convert": ["lm_head"], "backend": "torch_awq"}
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
    "fp8 qwen3": ("transformers", functools.partial(float8_mixture, "qwen3", "float32")),
    "fp8 deepseek": ("transformers", functools.partial(float8_mixture, "deepseek", "powers")),
    "fp8 glm4": ("transformers", functools.partial(float8_mixture, "glm4", "ue8m0")),
    "gptq": (
        "gptqmodel",
        functools.partial(_words, "gptq", GPTQ),
    ),
    "awq": ("gptqmodel", functools.partial(_words, "awq", AWQ)),
    "compressed w4a16": (
        "compressed_tensors",
        functools.partial(_compressed, INT4 | {"symmetric": True}, None, "pack-quantized"),
    ),
    "compressed w8a8": ("compressed_tensors", functools.partial(_compressed, INT8, INT8 | TOKEN, "int-quantized")),
    "compressed fp8": ("compressed_tensors", functools.partial(_compressed, FP8, FP8 | TOKEN, "float-quantized")),
    "compressed fp8 glm4": (
        "compressed_tensors",
        functools.partial(compressed_mixture, "glm4", FP8, FP8 | TOKEN, "float-quantized"),
    ),
    "compressed int4 deepseek": (
        "compressed_tensors",
        functools.partial(compressed_mixture, "deepseek", INT4 | {"symmetric": True}, None, "pack-quantized"),
    ),
}

# their experts stay packed in modules of transformers that know no packed weights
MIXTURES = ("fp8 qwen3", "fp8 deepseek", "fp8 glm4", "compressed fp8 glm4", "compressed int4 deepseek")


def merged(names: Iterable[str]) -> set[str]:
    """The names of a model's tensors for those of a file of a mixture."""
    stack = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
    return {re.sub(r"experts\.\d+\.(\w+)\.weight", lambda found: f"experts.{stack[found[1]]}", name) for name in names}
