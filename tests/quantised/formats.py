"""The formats of quantised weights that the tests stream: a small net of each, and a tiny Llama of each that
transformers makes. The libraries do all of the work; nothing here knows the streamer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stack import Block

WIDTH, DEPTH = 64, 6
Build = Callable[[], nn.Module]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(WIDTH) for _ in range(DEPTH))).to(dtype).eval()


def _replaced(model: nn.Module, replace: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, replace(child))
    return model.eval()


def _bnb4(kind: str, double: bool) -> nn.Module:
    import bitsandbytes as bnb

    def replace(linear: nn.Linear) -> nn.Module:
        rows, columns = linear.weight.shape
        made = bnb.nn.Linear4bit(
            columns, rows, compute_dtype=torch.float32, compress_statistics=double, quant_type=kind
        )
        made.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, compress_statistics=double, quant_type=kind, module=made
        )
        made.bias = linear.bias
        return made.to("cpu")

    return _replaced(net(), replace)


def _bnb8() -> nn.Module:
    import bitsandbytes as bnb

    def replace(linear: nn.Linear) -> nn.Module:
        rows, columns = linear.weight.shape
        made = bnb.nn.Linear8bitLt(columns, rows, has_fp16_weights=False, threshold=6.0)
        made.weight = bnb.nn.Int8Params(linear.weight.data.half(), requires_grad=False, has_fp16_weights=False)
        made.bias = linear.bias
        return made.to("cpu")

    return _replaced(net(torch.bfloat16), replace)


def _torchao(name: str, **settings: Any) -> nn.Module:
    from torchao import quantization

    model = net(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, name)(**settings))
    return model


def _gguf(kind: str) -> nn.Module:
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    number = gguf.GGMLQuantizationType[kind]

    def replace(linear: nn.Linear) -> nn.Module:
        rows, columns = linear.weight.shape
        made = GGUFLinear(columns, rows, bias=True, compute_dtype=torch.float32)
        packed = torch.from_numpy(gguf.quantize(linear.weight.detach().numpy(), number).copy())
        made.weight = GGUFParameter(packed, quant_type=number)
        made.bias = linear.bias
        return made

    return _replaced(net(), replace)


def compress(
    model: nn.Module, weights: dict[str, Any], activations: dict[str, Any] | None, kind: str, ignore: Sequence[str] = ()
) -> Any:
    """Bring all linear layers in a format of compressed-tensors; returns its compressor."""
    from compressed_tensors import quantization
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    args = quantization.QuantizationArgs(**weights)
    inputs = activations and quantization.QuantizationArgs(**activations)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs, format=kind)
    config = quantization.QuantizationConfig(config_groups={"all": scheme}, format=kind, ignore=list(ignore))
    quantization.apply_quantization_config(model, config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in ignore:
            parts = module.weight.detach().float().unflatten(1, (-1, args.group_size or module.in_features))
            scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    config.quantization_status = quantization.QuantizationStatus.COMPRESSED
    return compressor


def _compressed(weights: dict[str, Any], activations: dict[str, Any] | None, kind: str) -> nn.Module:
    model = net(torch.bfloat16)
    compress(model, weights, activations, kind)
    return model


def _cast() -> nn.Module:
    from diffusers.hooks import apply_layerwise_casting

    model = net(torch.bfloat16)
    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=["norm"])
    return model


class ScaledLinear(nn.Module):
    """float8 with one scale, as ComfyUI's checkpoints have it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax() / 448
        self.weight = nn.Parameter((linear.weight.detach() / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale_weight = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale_weight.to(x.dtype), self.bias)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKEN = {"strategy": "token", "dynamic": True}

NETS: dict[str, tuple[str | None, Build]] = {  # the library, and what makes the net
    "bnb nf4": ("bitsandbytes", functools.partial(_bnb4, "nf4", False)),
    "bnb nf4 double": ("bitsandbytes", functools.partial(_bnb4, "nf4", True)),
    "bnb fp4": ("bitsandbytes", functools.partial(_bnb4, "fp4", False)),
    "bnb int8": ("bitsandbytes", _bnb8),
    "torchao int8": ("torchao", functools.partial(_torchao, "Int8WeightOnlyConfig", version=2)),
    "torchao int8 dynamic": (
        "torchao",
        functools.partial(_torchao, "Int8DynamicActivationInt8WeightConfig", version=2),
    ),
    "torchao float8": ("torchao", functools.partial(_torchao, "Float8WeightOnlyConfig")),
    "torchao intx": ("torchao", functools.partial(_torchao, "IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    "gguf q8_0": ("gguf", functools.partial(_gguf, "Q8_0")),
    "gguf q4_0": ("gguf", functools.partial(_gguf, "Q4_0")),
    "compressed w4a16": (
        "compressed_tensors",
        functools.partial(_compressed, INT4 | {"symmetric": True}, None, "pack-quantized"),
    ),
    "compressed w4a16 zeros": (
        "compressed_tensors",
        functools.partial(_compressed, INT4 | {"symmetric": False}, None, "pack-quantized"),
    ),
    "compressed w8a8": ("compressed_tensors", functools.partial(_compressed, INT8, INT8 | TOKEN, "int-quantized")),
    "compressed fp8": ("compressed_tensors", functools.partial(_compressed, FP8, FP8 | TOKEN, "float-quantized")),
    "layerwise casting": ("diffusers", _cast),
    "fp8 scaled": (None, lambda: _replaced(net(torch.bfloat16), ScaledLinear)),
}
