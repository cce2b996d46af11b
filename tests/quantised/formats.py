"""The formats of quantised weights that the tests stream: a small net of each, and a tiny Llama of each that
transformers
makes. The libraries do all of the work; nothing here imports the streamer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from parts import PartsLinear
from torch import nn

from stack import Block
from weightstream.runtime.tensors.leaves import leaves_of

WIDTH, DEPTH = 64, 6
Quantise = Callable[[nn.Module], nn.Module]


def _replaced(model: nn.Module, replace: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, replace(child))
    return model.eval()


def _bnb4(kind: str, double: bool, model: nn.Module) -> nn.Module:
    import bitsandbytes as bnb

    def replace(linear: nn.Linear) -> nn.Module:
        rows, columns = linear.weight.shape
        settings: dict[str, Any] = {"compress_statistics": double, "quant_type": kind}
        has_bias = linear.bias is not None
        made = bnb.nn.Linear4bit(columns, rows, has_bias, linear.weight.dtype, device="meta", **settings)
        made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, module=made, **settings)
        made.bias = linear.bias
        return made.to(linear.weight.device)

    return _replaced(model, replace)


def _bnb8(threshold: float, model: nn.Module) -> nn.Module:
    import bitsandbytes as bnb

    def replace(linear: nn.Linear) -> nn.Module:
        rows, columns = linear.weight.shape
        made = bnb.nn.Linear8bitLt(
            columns, rows, linear.bias is not None, has_fp16_weights=False, threshold=threshold, device="meta"
        )
        made.weight = bnb.nn.Int8Params(linear.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
        made.bias = linear.bias
        return made.to(linear.weight.device)

    return _replaced(model, replace)


def _torchao(name: str, settings: dict[str, Any], model: nn.Module) -> nn.Module:
    from torchao import quantization

    quantization.quantize_(model, getattr(quantization, name)(**settings))
    return model


def _gguf(kind: str, model: nn.Module) -> nn.Module:
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    number = gguf.GGMLQuantizationType[kind]

    def replace(linear: nn.Linear) -> nn.Module:
        rows, columns = linear.weight.shape
        made = GGUFLinear(columns, rows, linear.bias is not None, linear.weight.dtype, device="meta")
        made.weight = GGUFParameter(_blocks(rows, columns, number, linear.weight.device), quant_type=number)
        made.bias = linear.bias
        return made

    return _replaced(model, replace)


def _blocks(rows: int, columns: int, kind: Any, device: torch.device) -> torch.Tensor:
    """Random bytes with small scales: gguf reads more formats than it writes."""
    import gguf

    length, nbytes = gguf.GGML_QUANT_SIZES[kind]
    num_scales = 2 if kind is gguf.GGMLQuantizationType.Q4_K else 1
    on: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(rows)}
    blocks = torch.randint(0, 256, (rows, columns // length, nbytes), dtype=torch.uint8, **on)
    scales = torch.rand(*blocks.shape[:-1], num_scales, **on) * 2e-4
    blocks[..., : 2 * num_scales] = scales.half().view(torch.uint8)
    return blocks.flatten(-2)


def compress(
    model: nn.Module, weights: dict[str, Any], activations: dict[str, Any] | None, kind: str, ignore: Sequence[str] = ()
) -> Any:
    """Convert all linear layers to a format of compressed-tensors, and return its compressor."""
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


def _compressed(weights: dict[str, Any], activations: dict[str, Any] | None, kind: str, model: nn.Module) -> nn.Module:
    compress(model, weights, activations, kind)
    return model


def packed(values: torch.Tensor, dim: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Pack eight 4-bit numbers along `dim` into one int32, the lowest first in this order."""
    parts = values.unflatten(dim, (-1, 8)).movedim(dim + 1, -1)[..., list(order)].to(torch.int64)
    words = (parts << (torch.arange(8, device=values.device) * 4)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def random_words(method: str, rows: int, columns: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """A weight of `rows` outputs in GPTQ or AWQ, in groups of 32: random 4-bit numbers with small scales."""
    on: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(rows + columns)}
    num_groups = columns // 32
    weight, zeros = torch.randint(0, 16, (columns, rows), **on), torch.randint(5, 10, (num_groups, rows), **on)
    scales = (torch.rand(num_groups, rows, **on) * 0.02).half()
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": packed(weight, 1, order), "qzeros": packed(zeros, 1, order), "scales": scales}
    index = (torch.arange(columns, device=device) // 32).to(torch.int32)
    return {"qweight": packed(weight, 0), "qzeros": packed(zeros, 1), "scales": scales, "g_idx": index}


def _gptqmodel(method: str, model: nn.Module) -> nn.Module:
    """GPTQ's and AWQ's kernels in torch, for any device."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    kind = {"gptq": TorchLinear, "awq": AwqTorchLinear}[method]

    def replace(linear: nn.Linear) -> nn.Module:
        rows, columns = linear.weight.shape
        settings: dict[str, Any] = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}
        made = kind(in_features=columns, out_features=rows, bias=linear.bias is not None, **settings)
        for name, tensor in random_words(method, rows, columns, linear.weight.device).items():
            made.register_buffer(name, tensor)
        if linear.bias is not None:
            made.register_buffer("bias", linear.bias.detach())
        made.optimized = True  # else it is compiled, up to a limit of variants, so bits would depend on earlier runs
        made.post_init()
        return made

    return _replaced(model, replace)


def _cast(model: nn.Module) -> nn.Module:
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=["norm"])
    return model


def _quanto(kind: str, model: nn.Module) -> nn.Module:
    from optimum import quanto

    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    return model


class ScaledLinear(nn.Module):
    """float8 with one scale, as in ComfyUI's checkpoints."""

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

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Format:
    """The library, if any, its change to a plain net, and the dtype of the plain one."""

    library: str | None
    quantise: Quantise
    dtype: torch.dtype = torch.float32
    num_columns: int = WIDTH  # the least that the format supports


def _of_torchao(name: str, **settings: Any) -> Format:
    return Format("torchao", functools.partial(_torchao, name, settings), BF16)


def _of_compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> Format:
    return Format("compressed_tensors", functools.partial(_compressed, weights, activations, kind), BF16)


FORMATS: dict[str, Format] = {
    "bnb nf4": Format("bitsandbytes", functools.partial(_bnb4, "nf4", False)),
    "bnb nf4 double": Format("bitsandbytes", functools.partial(_bnb4, "nf4", True), BF16),
    "bnb fp4": Format("bitsandbytes", functools.partial(_bnb4, "fp4", False)),
    "bnb int8": Format("bitsandbytes", functools.partial(_bnb8, 6.0), torch.float16),
    "bnb int8 whole": Format("bitsandbytes", functools.partial(_bnb8, 0.0), torch.float16),
    "torchao int8": _of_torchao("Int8WeightOnlyConfig", version=2),
    "torchao int8 dynamic": _of_torchao("Int8DynamicActivationInt8WeightConfig", version=2),
    "torchao float8": _of_torchao("Float8WeightOnlyConfig"),
    "torchao intx": _of_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "gguf q8_0": Format("gguf", functools.partial(_gguf, "Q8_0")),
    "gguf q4_0": Format("gguf", functools.partial(_gguf, "Q4_0")),
    "gguf q4_k": Format("gguf", functools.partial(_gguf, "Q4_K"), num_columns=256),
    "compressed w4a16": _of_compressed("pack-quantized", INT4 | {"symmetric": True}),
    "compressed w4a16 zeros": _of_compressed("pack-quantized", INT4 | {"symmetric": False}),
    "compressed w8a8": _of_compressed("int-quantized", INT8, INT8 | TOKEN),
    "compressed fp8": _of_compressed("float-quantized", FP8, FP8 | TOKEN),
    "gptq": Format("gptqmodel", functools.partial(_gptqmodel, "gptq"), torch.float16),
    "awq": Format("gptqmodel", functools.partial(_gptqmodel, "awq"), torch.float16),
    "layerwise casting": Format("diffusers", _cast, BF16),
    "quanto int8": Format("optimum.quanto", functools.partial(_quanto, "qint8"), BF16),
    "quanto int4": Format("optimum.quanto", functools.partial(_quanto, "qint4"), torch.float32),
    "quanto int4 packed": Format("optimum.quanto", functools.partial(_quanto, "qint4"), BF16, num_columns=256),
    "quanto float8": Format("optimum.quanto", functools.partial(_quanto, "qfloat8"), BF16),
    "parts": Format(None, lambda model: _replaced(model, PartsLinear)),
    "fp8 scaled": Format(None, lambda model: _replaced(model, ScaledLinear), BF16),
}
ON_GPUS: dict[str, Format] = FORMATS | {  # CPUs have no operators for the others
    "torchao float8 dynamic": _of_torchao("Float8DynamicActivationFloat8WeightConfig"),
}


def build(name: str, device: str = "cpu", width: int = WIDTH) -> nn.Module:
    """The same net at each call: blocks of a norm and linear layers of `width` and of four times `width`."""
    form = ON_GPUS[name]
    torch.manual_seed(3)
    width = max(width, form.num_columns)
    return form.quantise(nn.Sequential(*(Block(width) for _ in range(DEPTH))).to(device, form.dtype).eval())


def inputs(model: nn.Module, sizes: Sequence[int] = (2, 3, 4), device: str = "cpu") -> list[torch.Tensor]:
    """A batch of each size."""
    norm: Any = model[0].norm  # type: ignore[index]
    (width,) = norm.normalized_shape
    dtype = BF16 if norm.weight.element_size() == 1 else norm.weight.dtype
    generator = torch.Generator(device).manual_seed(len(sizes))
    return [torch.randn(size, width, generator=generator, device=device).to(dtype) for size in sizes]


def held_nbytes(model: nn.Module) -> int:
    """Bytes of all memory that a model uses."""
    storages = [leaf.tensor.untyped_storage() for leaf in leaves_of(model)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
