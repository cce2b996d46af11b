"""Names of transformers' quantisation that it does not promise to keep: as private.py, for quantised checkpoints.

Experts may stay packed, in the plain class of a model, although transformers would unpack them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from weightstream.adapters.hf import gptq
from weightstream.adapters.hf.packed_formats import PackedFormat, hold_packed
from weightstream.adapters.hf.private import LOADED, conversions_of, set_inside
from weightstream.errors import CheckpointError, UnsupportedError

FP8 = "transformers.integrations.finegrained_fp8"
MXFP4_MODULE = "transformers.integrations.mxfp4"


class Fp8Use(NamedTuple):
    """Whether a module is a linear layer of fine-grained float8, and whether it is experts of that."""

    is_linear: bool
    are_experts: bool


def packing_quantizer(quantization: Any) -> Any | None:
    """The quantizer of transformers for a checkpoint whose experts may stay packed, as they are not dequantised at
    load; else None."""
    from transformers.quantizers import AutoHfQuantizer

    config = dict(quantization if isinstance(quantization, dict) else quantization.to_dict())
    if config.get("quant_method") not in _PARTS or config.get("dequantize"):
        return None
    quantizer: Any = AutoHfQuantizer.from_config(config, pre_quantized=True)
    with _without_fp8_checks():
        quantizer.validate_environment()
    return quantizer


def use_quantizer(model: Any, quantizer: Any, dtype: torch.dtype) -> None:
    """Replace modules of an unquantised model on meta by those that a quantised checkpoint is loaded into."""
    quantizer.preprocess_model(model=model, dtype=dtype)
    model.hf_quantizer = quantizer


@contextlib.contextmanager
def keeping_quantised(metadata: Mapping[str, str], experts: PackedExperts | None = None) -> Iterator[None]:
    """Inside, float8 and mxfp4 are loaded packed, with or without kernels, and torchao finds the metadata of its
    tensors, which transformers would read from the header of a file.

    `experts` hold their stacks as the leaves that the file has; None: as transformers' own modules, which need kernels.
    """
    from transformers.integrations.mxfp4 import Mxfp4Dequantize
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    def without_kernels(self: Any, *args: Any, **kwargs: Any) -> None:
        self.quantization_config.dequantize = True  # the modules of the unquantised model are wanted

    def packed(self: Any, model: Any, **kwargs: Any) -> Any:
        self.quantization_config.dequantize = False
        return super(Mxfp4HfQuantizer, self).postprocess_model(model, **kwargs)

    with contextlib.ExitStack() as stack:
        for kind, name, value in (
            (TorchAoHfQuantizer, "metadata", dict(metadata)),
            (Mxfp4HfQuantizer, "validate_environment", without_kernels),
            (Mxfp4HfQuantizer, "postprocess_model", packed),
            (Mxfp4Dequantize, "convert", _keep_mxfp4),
        ):
            stack.enter_context(set_inside(kind, name, value))
        stack.enter_context(_without_fp8_checks())
        if experts is not None:
            stack.enter_context(_merging_parts())
            stack.enter_context(_holding(experts))
        yield


def _without_fp8_checks() -> AbstractContextManager[None]:
    """Inside, float8 stays as it is where transformers finds no kernels for it."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    return set_inside(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


@contextlib.contextmanager
def quantising_on(device: torch.device, then: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Inside, transformers quantises weights on this device; `then` is called with each module afterwards."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.quantizers_utils import get_module_from_name

    class There(ConversionOps):  # type: ignore[misc]
        def __init__(self, op: Any) -> None:
            self.op = op

        def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            converted: dict[str, Any] = self.op.convert(
                tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), input_dict), **kwargs
            )
            if not converted:  # the operation has set the module's tensors itself
                then(get_module_from_name(kwargs["model"], kwargs["full_layer_name"])[0])
            return converted

        @property
        def reverse_op(self) -> Any:
            return self.op.reverse_op

    def get(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda quantizer: There(plain(quantizer))

    kinds = {
        kind: kind.__dict__["get_quantize_ops"]
        for kind in AUTO_QUANTIZER_MAPPING.values()
        if "get_quantize_ops" in kind.__dict__
    }
    with contextlib.ExitStack() as stack:
        for kind, plain in kinds.items():
            stack.enter_context(set_inside(kind, "get_quantize_ops", get(plain)))
        yield


@contextlib.contextmanager
def kernels_for(device: torch.device, then: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Inside, gptqmodel chooses its kernels for this device, though the weights are loaded on the CPU.

    A module whose kernel needs its tensors in another order reorders them on the device; `then` is called with it.
    """
    from transformers.quantizers.quantizer_awq import AwqQuantizer
    from transformers.quantizers.quantizer_gptq import GptqHfQuantizer

    before, after = "_process_model_before_weight_loading", "_process_model_after_weight_loading"

    def choosing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def process(self: Any, model: Any, **kwargs: Any) -> Any:
            settings = self.__dict__.get("optimum_quantizer", self.quantization_config)
            with contextlib.ExitStack() as stack:
                if device.type == "cpu" and settings.backend in ("auto", None):
                    stack.enter_context(set_inside(settings, "backend", "torch"))
                result = plain(self, model, **kwargs | {"device_map": {"": device}})
            gptq.refuse_kernels(model, device)
            return result

        return process

    def ordering(plain: Callable[..., Any]) -> Callable[..., Any]:
        def process(self: Any, model: Any, **kwargs: Any) -> Any:
            modules = [module for module in model.modules() if gptq.is_of_gptqmodel(module)]
            loaded = {m: {name: t for name, t in m._buffers.items() if t is not None} for m in modules}
            for module in modules:
                if "qzeros" in loaded[module]:  # post_init may add to them in place, and so write to pages of a file
                    module._buffers["qzeros"] = loaded[module]["qzeros"].clone()
            with contextlib.ExitStack() as stack:
                for kind in {type(module) for module in modules}:
                    there = gptq.ordered_on(device, kind.post_init, loaded, then)
                    stack.enter_context(set_inside(kind, "post_init", there))
                return plain(self, model, **kwargs)

        return process

    with contextlib.ExitStack() as stack:
        for kind in (AwqQuantizer, GptqHfQuantizer):
            stack.enter_context(set_inside(kind, before, choosing(getattr(kind, before))))
            stack.enter_context(set_inside(kind, after, ordering(getattr(kind, after))))
        yield


def is_loaded_quantised(model: Any) -> bool:
    """Whether transformers has loaded the model quantised."""
    return getattr(model, "hf_quantizer", None) is not None


def only_linear(model: Any) -> str | None:
    """The method that a model is quantised with, if transformers quantises linear layers only in it; else None."""
    quantizer = getattr(model, "hf_quantizer", None)
    method = None if quantizer is None else str(getattr(quantizer.quantization_config.quant_method, "value", ""))
    return method if method in ("awq", "bitsandbytes", "gptq", "torchao") else None


def only_linear_in_checkpoint(model: Any) -> str | None:
    """As `only_linear`; None for a model that was quantised while it was loaded."""
    return only_linear(model) if is_loaded_quantised(model) and model.hf_quantizer.pre_quantized else None


def plain_experts(model: torch.nn.Module) -> list[str]:
    """The paths of experts whose stacks of matrices are not quantised."""
    return [
        path
        for path, module in model.named_modules()
        if path.rpartition(".")[2] == "experts"
        and any(p.ndim == 3 and p.dtype.itemsize > 1 and type(p.data) is torch.Tensor for p in module.parameters(False))
    ]


def fp8_use(module: Any) -> Fp8Use:
    """Whether a module, by its class, is a linear layer or experts with weights in fine-grained float8."""
    names = {kind.__name__ for kind in type(module).__mro__ if kind.__module__ == FP8}
    is_linear = "FP8Linear" in names and module.weight.element_size() == 1
    return Fp8Use(is_linear=is_linear, are_experts="FP8Experts" in names)


def refuse_swizzled(module: Any) -> None:
    """Raise `UnsupportedError` for experts in mxfp4 that transformers has brought into the order of its kernels."""
    kind = type(module)
    is_mxfp4 = (kind.__module__, kind.__name__) == (MXFP4_MODULE, "Mxfp4GptOssExperts")
    if is_mxfp4 and "down_proj" not in module._parameters:
        raise UnsupportedError(
            f"{kind.__name__} holds its weights in the order of hub kernels, in objects that are no parameters, so "
            "they cannot be moved: load the checkpoint with weightstream.from_pretrained(), which keeps mxfp4 packed, "
            "with the outputs of the dequantised model; or dequantise it at load, by "
            "quantization_config=Mxfp4Config(dequantize=True)"
        )


def has_fp8_kernels(device: torch.device) -> bool:
    """Whether transformers finds kernels for fine-grained float8 on a device; it may ask the hub."""
    from transformers.integrations.finegrained_fp8 import load_finegrained_fp8_kernel

    if device.type != "cuda" or torch.get_device_module(device).get_device_capability(device) < (8, 9):
        return False
    try:
        load_finegrained_fp8_kernel()
    except ImportError:
        return False
    return True


def fp8_unpacked(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a linear layer in fine-grained float8 as transformers would have unpacked it."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    found: torch.Tensor = Fp8Dequantize(None)._dequantize_one(module.weight, module.weight_scale_inv, dtype)
    return found


# -- experts in mxfp4, of which the file has the packed stacks ---------------------------------------------------------


def _keep_mxfp4(
    op: Any, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **kwargs: Any
) -> dict[str, Any]:
    """Replaces the function that unpacks experts: their module gets the packed tensors, by their names in the file."""
    from transformers.quantizers.quantizers_utils import get_module_from_name

    module, name = get_module_from_name(model, full_layer_name)
    leaves: dict[str, torch.nn.Parameter] = {}
    for suffix in MXFP4.suffixes:
        found = input_dict[name + suffix]
        leaves[name + suffix] = torch.nn.Parameter(found[0] if isinstance(found, list) else found, requires_grad=False)
        setattr(leaves[name + suffix], LOADED, True)
    hold_packed(module, name, MXFP4, leaves)
    setattr(module, LOADED, True)
    if kwargs.get("missing_keys") is not None:
        kwargs["missing_keys"].discard(full_layer_name)
    return {}


def _mxfp4_matrices(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """From blocks (rows, N, groups, 16) and scales (rows, N, groups): matrices (rows, 32 * groups, N)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: torch.Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return found


MXFP4 = PackedFormat(name="mxfp4", suffixes=("_blocks", "_scales"), unpack=_mxfp4_matrices, kernel="mxfp4")


# -- experts of which the file has one matrix each, with its scales ----------------------------------------------------

# By method: what may follow `weight` in a tensor's name. A stack's leaf has the name that transformers gives it in its
# own modules for float8, and in its copies of converters: that of the stack and the same ending. So the weights
# themselves have the name of the stack, also in layers that a checkpoint leaves unquantised.
_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp8": ("", "_scale_inv"),
        "compressed-tensors": ("", "_packed", "_scale", "_shape", "_zero_point", "_global_scale", "_g_idx"),
    }
)

_PART_ENDS = r"(?!\w)"

_SHAPE = "_shape"  # of each matrix: saved with it, but the stack has the same shape

_LOAD_ELSEWHERE = "to dequantise it at load, load it with transformers and pass the model to weightstream.offload()"

PackedExperts = Mapping[str, Mapping[str, "ExpertLeaves"]]  # by the path of their module and the name of a stack


class ExpertLeaves(NamedTuple):
    """A stack of experts.

    Attributes:
        format: how it is packed.
        leaves: its leaves on meta, by name.
        others: tensors that are only saved with it, on meta, by name.
        plain: the unpacked stack that transformers would make, on meta.
    """

    format: PackedFormat
    leaves: Mapping[str, torch.Tensor]
    others: Mapping[str, torch.Tensor]
    plain: torch.Tensor


def _fp8_matrices(weights: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """From float8 (rows, N, K) and scales of blocks (rows, n, k): matrices (rows, N, K)."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    found: torch.Tensor = Fp8Dequantize(None)._dequantize_one(weights, scales, dtype)
    return found


def _compressed_float8_matrices(weights: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """From float8 (rows, N, K) and scales (rows, N, 1), or one for each N / n columns (rows, n): matrices.

    The arithmetic of transformers' `CompressedTensorsDequantize`, which has no function for it.
    """
    if scales.ndim == 2:
        scales = scales.repeat_interleave(weights.shape[1] // scales.shape[1], 1).unsqueeze(2)
    return (weights.to(torch.float32) * scales.to(torch.float32)).to(dtype)


def _compressed_int_matrices(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, num_bits: int, group_size: int | None
) -> torch.Tensor:
    """From words (rows, N, K * num_bits / 32) and scales (rows, N, groups): matrices (rows, N, K), in the dtype of the
    scales, whatever the model's is: transformers does not cast them."""
    from compressed_tensors.compressors import BaseCompressor

    rows, height, words = packed.shape
    shape = torch.Size((rows * height, words * 32 // num_bits))
    tensors = {"weight_packed": packed.flatten(0, 1), "weight_scale": scales.flatten(0, 1), "weight_shape": shape}
    decompress = BaseCompressor.get_value_from_registry("pack-quantized").decompress
    found: torch.Tensor = decompress(tensors, _int_scheme(num_bits, group_size))["weight"]
    return found.view(rows, height, -1)


@cache
def _int_scheme(num_bits: int, group_size: int | None) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = "channel" if group_size is None else "group"
    weights = QuantizationArgs(num_bits=num_bits, type="int", strategy=strategy, group_size=group_size, symmetric=True)
    return QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")


FP8_BLOCKS = PackedFormat(name="block float8", suffixes=("", "_scale_inv"), unpack=_fp8_matrices, kernel="float8")

# of other floats, such as DeepSeek-V4's float4, two in a byte, which the same function unpacks
OTHER_BLOCKS = dataclasses.replace(FP8_BLOCKS, name="floats in blocks", kernel=None)

COMPRESSED_FLOAT8 = PackedFormat(
    name="compressed-tensors float8", suffixes=("", "_scale"), unpack=_compressed_float8_matrices, kernel="float8"
)

COMPRESSED_INT = PackedFormat(
    name="compressed-tensors int", suffixes=("_packed", "_scale"), unpack=_compressed_int_matrices
)


def _packed_format(quantizer: Any, parts: Mapping[str, torch.dtype]) -> PackedFormat:
    """The format of experts whose tensors in the file end in these parts, and have these dtypes.

    Raises `UnsupportedError` with the reason where transformers does not make their matrices, or other ones.
    """
    if quantizer.quantization_config.quant_method == "fp8":
        return FP8_BLOCKS if parts.get("") == torch.float8_e4m3fn else OTHER_BLOCKS
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationStrategy
    from transformers.integrations.compressed_tensors import get_experts_scheme

    config = quantizer.compressor.quantization_config
    scheme = get_experts_scheme(config)
    weights, packing = scheme.weights, CompressionFormat(scheme.format or config.format).value
    is_float8, strategy = (
        weights.type == "float" and weights.num_bits == 8,
        QuantizationStrategy(weights.strategy).value,
    )
    if is_float8 and strategy in ("channel", "tensor"):
        return COMPRESSED_FLOAT8
    if is_float8:
        reason = f"with a scale for each {strategy}: transformers multiplies experts by scales of rows only"
    elif weights.type == "float":
        reason = "transformers unpacks experts without their global scale, so to other values"
    elif "_g_idx" in parts:
        reason = "with actorder: transformers unpacks experts without weight_g_idx, so to other values"
    elif not weights.symmetric:
        reason = "asymmetric: transformers does not pass the zero points of experts on"
    elif packing != "pack-quantized" or 32 % weights.num_bits or strategy not in ("channel", "group"):
        reason = f"{weights.num_bits} bits, with a scale for each {strategy}: transformers does not unpack such experts"
    else:
        kernel = "int4" if weights.num_bits == 4 else None
        return dataclasses.replace(COMPRESSED_INT, settings=(weights.num_bits, weights.group_size), kernel=kernel)
    raise UnsupportedError(f"experts in compressed-tensors' {packing}, {reason}")


def packed_experts(
    model: Any, quantizer: Any, tensors: Mapping[str, torch.Tensor], mapping: Mapping[str, str] | None = None
) -> PackedExperts:
    """The experts of an unquantised model on meta for which a checkpoint, of these tensors on meta, has packed ones.

    transformers' own converters merge the tensors. Raises `UnsupportedError` for a format that cannot stay packed, and
    `CheckpointError` where the checkpoint has more or fewer matrices than the model.
    """
    from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming, rename_source_key

    parts = _PARTS[quantizer.quantization_config.quant_method]
    with _merging_parts(), set_inside(model, "hf_quantizer", quantizer):
        transforms = conversions_of(model, mapping)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    stacks = {name: param for name, param in model.named_parameters() if param.ndim == 3}
    state = model.state_dict() | {name + part: param for name, param in stacks.items() for part in parts}
    sources: dict[str, dict[str, str | None]] = {}  # of each place: patterns by the names of tensors
    for name in tensors:
        place, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if place in state:
            sources.setdefault(place, {})[name] = pattern
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def refuse_other_numbers(place: str, num: int) -> None:
        for pattern, found in Counter(sources[place].values()).items():
            operations = [] if pattern is None else by_pattern[pattern].operations
            if found != num and any(isinstance(op, MergeModulelist) for op in operations):
                name = str(pattern).removesuffix(_PART_ENDS)
                raise CheckpointError(f"{place}: the checkpoint has {found} tensors {name} for {num} experts")

    def merged(place: str) -> torch.Tensor:
        patterns = sources[place]
        (first, pattern), *_ = patterns.items()
        if len(dtypes := {tensors[name].dtype for name in patterns}) > 1:
            raise ValueError(f"tensors have unlike dtypes: {', '.join(sorted(map(str, dtypes)))}")
        if pattern is None:
            return tensors[first]
        converter = copy.deepcopy(by_pattern[pattern])
        for name, each in patterns.items():
            converter.add_tensor(place, name, each, tensors[name])
        found: torch.Tensor = converter.convert(place, model=model, config=model.config)[place]
        return found

    def dequantises(pattern: str | None) -> bool:
        operations = [] if pattern is None else by_pattern[pattern].operations
        return any(getattr(op, "hf_quantizer", None) is not None for op in operations)

    experts: dict[str, dict[str, ExpertLeaves]] = {}
    for full, plain in stacks.items():
        found = {part: tensors[next(iter(sources[full + part]))].dtype for part in parts if full + part in sources}
        if found.keys() <= {""}:
            if any(_is_float8(tensors[n]) and not dequantises(by) for n, by in sources.get(full, {}).items()):
                raise UnsupportedError(f"{full}: transformers finds no scales for its float8; {_LOAD_ELSEWHERE}")
            continue
        path, _, name = full.rpartition(".")
        packed_format = _packed_format(quantizer, found)
        for part in sorted(found):
            refuse_other_numbers(full + part, len(plain))
        try:
            leaves = {name + suffix: merged(full + suffix) for suffix in packed_format.suffixes}
            unpacked = packed_format.unpacked(tuple(leaves.values()), plain.dtype)
        except (IndexError, KeyError, RuntimeError, ValueError) as error:
            raise UnsupportedError(
                f"{full}: its {packed_format.name} does not merge into a stack ({error}); {_LOAD_ELSEWHERE}"
            ) from error
        if unpacked.shape != plain.shape:
            raise UnsupportedError(
                f"{full}: its {packed_format.name} unpacks to {tuple(unpacked.shape)}, not {tuple(plain.shape)}; "
                f"{_LOAD_ELSEWHERE}"
            )
        others = {name + _SHAPE: merged(full + _SHAPE)} if _SHAPE in found else {}
        experts.setdefault(path, {})[name] = ExpertLeaves(packed_format, leaves, others, unpacked)
    return experts


@contextlib.contextmanager
def _merging_parts() -> Iterator[None]:
    """Inside, each converter that merges the weights of experts has one copy for each of their parts."""
    with contextlib.ExitStack() as stack:
        for kind in _packing_quantizers():
            update = kind.update_weight_conversions

            def updated(self: Any, conversions: Any, *args: Any, plain: Any = update) -> Any:
                parts, (merges, others) = _PARTS[self.quantization_config.quant_method], _split(conversions)
                return [*(_of_part(each, part) for each in merges for part in parts), *plain(self, others, *args)]

            stack.enter_context(set_inside(kind, "update_weight_conversions", updated))
        yield


@contextlib.contextmanager
def _holding(experts: PackedExperts) -> Iterator[None]:
    """Inside, the plain modules of experts stay in a model, and these hold their stacks as leaves on meta."""
    with contextlib.ExitStack() as stack:
        for kind in _packing_quantizers():
            before = kind._process_model_before_weight_loading

            def process(self: Any, model: Any, *args: Any, plain: Any = before, **kwargs: Any) -> Any:
                modules = dict(model.named_modules())
                result = plain(self, model, *args, **kwargs)
                replaced = [path for path, module in model.named_modules() if fp8_use(module).are_experts]
                for path in replaced:
                    model.set_submodule(path, modules[path])
                for path, stacks in experts.items():
                    _hold(modules[path], stacks)
                return result

            stack.enter_context(set_inside(kind, "_process_model_before_weight_loading", process))
        yield


def _hold(module: torch.nn.Module, stacks: Mapping[str, ExpertLeaves]) -> None:
    for name, (packed_format, leaves, others, plain) in stacks.items():
        module._parameters[name] = torch.nn.Parameter(plain, requires_grad=False)
        parameters = {leaf: torch.nn.Parameter(tensor, requires_grad=False) for leaf, tensor in leaves.items()}
        hold_packed(module, name, packed_format, parameters)
        for other, tensor in others.items():
            module.register_buffer(other, tensor)
    setattr(module, LOADED, True)  # a stack that is no parameter cannot be initialised


def _is_float8(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 1


def _packing_quantizers() -> tuple[Any, ...]:
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    return FineGrainedFP8HfQuantizer, CompressedTensorsHfQuantizer


def _split(conversions: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The conversions that merge weights of experts by whole rows, and the others."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    merges: list[Any] = []
    others: list[Any] = []
    for each in conversions:
        operations = getattr(each, "operations", ())
        by_rows = all(isinstance(op, MergeModulelist | Concatenate) for op in operations)
        is_merge = by_rows and any(isinstance(op, MergeModulelist) for op in operations)
        are_weights = all(re.search(r"\.weight\$?$", pattern) for pattern in each._original_source_patterns)
        (merges if is_merge and are_weights else others).append(each)
    return merges, others


def _of_part(converter: Any, part: str) -> Any:
    """A converter that does with a part of weights what this one does with weights."""
    end = part + _PART_ENDS  # transformers takes it away where a pattern is replaced by another one
    sources, targets = (
        [pattern.removesuffix("$") + end for pattern in patterns]
        for patterns in (converter._original_source_patterns, converter._original_target_patterns)
    )
    copied = type(converter)(sources, targets, operations=list(converter.operations))
    copied.scope_prefix, copied.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    return copied
