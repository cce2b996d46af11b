"""All names of transformers that it does not promise to keep; no other file spells one. Knows no weights or plans.

A test of each name (tests/adapters/hf/test_private.py) fails where a new version has lost it. transformers is imported
inside of functions, as the import takes seconds.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from weightstream.adapters.hf import gptq
from weightstream.adapters.hf.packed_formats import PackedFormat, hold_packed
from weightstream.errors import CheckpointError, UnsupportedError
from weightstream.runtime.tensors.undo import Undo

SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"  # an environment variable
LOADED = "_is_hf_initialized"  # an attribute of a parameter that has its values from the file
GROUPED_MM = "transformers::grouped_mm_fallback"  # an operator
WINDOW_COUNT = "cumulative_length"  # of a cache's layer: the positions that it has seen; a tensor if it is static
STATIC_WINDOW_COUNT = "cumulative_length_int"  # the same number: all that a static layer keeps in Python
FP8 = "transformers.integrations.finegrained_fp8"
MXFP4_MODULE = "transformers.integrations.mxfp4"
BY_POSITION = ("keys", "values", "indexer_keys")  # of a cache's layer: tensors that grow with the positions


class LoadTarget(NamedTuple):
    """The place of a checkpoint's tensor in a model: the name of the model's tensor, if any, and whether transformers
    converts it."""

    place: str | None
    is_converted: bool


class LoadTargets(NamedTuple):
    """The targets of a checkpoint's tensors, by name, and the conversions and renamings of transformers that apply."""

    by_name: dict[str, LoadTarget]
    conversions: list[Any]


class CodeSource(NamedTuple):
    """The folder or repository with the code of a model, and keywords of the hub for it.

    transformers names the modules of its classes after the folder or the repository.
    """

    name: str
    hub: Mapping[str, Any]


class Fp8Use(NamedTuple):
    """Whether a module is a linear layer of fine-grained float8, and whether it is experts of that."""

    is_linear: bool
    are_experts: bool


def is_loaded(param: torch.nn.Parameter) -> bool:
    """Whether a parameter has its values from the file; one that the file lacks gets random values later."""
    return bool(getattr(param, LOADED, False))


@contextlib.contextmanager
def undone() -> Iterator[Undo]:
    """Yields an `Undo` that runs at the end, to its own end even if an interrupt cuts it short."""
    undo = Undo()
    try:
        try:
            yield undo
        finally:
            undo()
    finally:
        undo()  # the rest, if an interrupt came


@contextlib.contextmanager
def sequential_loading() -> Iterator[None]:
    """Inside, transformers makes one tensor at a time; by default threads make any number of tensors ahead."""
    before = {key: value for key, value in os.environ.items() if key == SEQUENTIAL}
    with undone() as undo:
        undo.add(os.environ.update, before)
        undo.add(os.environ.pop, SEQUENTIAL, None)
        os.environ[SEQUENTIAL] = "1"
        yield


@contextlib.contextmanager
def warnings_of_transformers() -> Iterator[list[str]]:
    """Collects the warnings of transformers: only its load report names the keys that it could not convert."""
    report: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: report.append(re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    handlers, level = logger.handlers, logger.level
    with undone() as undo:
        undo.add(setattr, logger, "handlers", handlers)
        undo.add(logger.setLevel, level)
        logger.handlers = [*(handlers if level <= logging.WARNING else []), handler]  # a silenced log stays silent
        logger.setLevel(min(level, logging.WARNING))
        yield report


@contextlib.contextmanager
def progress_bar(wanted: bool | None) -> Iterator[None]:
    """Inside, transformers draws progress bars or does not; None: as it is set."""
    from transformers.utils import logging as control

    shown = control.is_progress_bar_enabled()
    switch = {False: control.disable_progress_bar, True: control.enable_progress_bar}
    with undone() as undo:
        undo.add(switch[shown])
        switch[shown if wanted is None else wanted]()
        yield


def places(model: Any, names: Iterable[str], mapping: Mapping[str, str] | None = None) -> LoadTargets:
    """The targets of these tensors of a checkpoint."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state, transforms = model.state_dict(), _conversions(model, mapping)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    found: dict[str, LoadTarget] = {}
    for name in sorted(names):
        place, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if place in state:
            found[name] = LoadTarget(place, is_converted=pattern is not None)
        else:
            found[name] = LoadTarget(name if name in state else None, is_converted=False)
    return LoadTargets(found, [transform for transform in transforms if transform.was_used()])


def remember_conversions(model: Any, conversions: list[Any]) -> None:
    """Have `save_pretrained` undo these conversions, as for a model that transformers has loaded itself."""
    model._weight_conversions = conversions


def _conversions(model: Any, mapping: Mapping[str, str] | None = None) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    quantizer = getattr(model, "hf_quantizer", None)
    conversions: list[Any] = get_model_conversion_mapping(model, key_mapping=mapping, hf_quantizer=quantizer)
    return conversions


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
def set_inside(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, the attribute `name` of a class or an object has this value. Afterwards the earlier value is restored."""
    before = {key: found for key, found in vars(owner).items() if key == name}

    def put_back() -> None:
        for found in before.values():
            setattr(owner, name, found)
        if not before and name in vars(owner):
            delattr(owner, name)

    with undone() as undo:
        undo.add(put_back)
        setattr(owner, name, value)
        yield


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


def is_grouped_product(func: Any) -> bool:
    """Whether this is a function by which grouped_mm multiplies groups of rows by their matrices."""
    return getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm", GROUPED_MM.rpartition("::")[2])


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
COMPRESSED_FLOAT8 = PackedFormat(
    name="compressed-tensors float8", suffixes=("", "_scale"), unpack=_compressed_float8_matrices, kernel="float8"
)
COMPRESSED_INT = PackedFormat(
    name="compressed-tensors int", suffixes=("_packed", "_scale"), unpack=_compressed_int_matrices
)


def _packed_format(quantizer: Any, parts: Collection[str]) -> PackedFormat:
    """The format of experts whose tensors in the file end in these parts.

    Raises `UnsupportedError` with the reason where transformers does not make their matrices, or other ones.
    """
    if quantizer.quantization_config.quant_method == "fp8":
        return FP8_BLOCKS
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
        transforms = _conversions(model, mapping)
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
        found = {part for part in parts if full + part in sources}
        if found <= {""}:
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


def unused_names(model: Any, names: Iterable[str]) -> list[str]:
    """The names of a checkpoint, sorted, that have no place in the model."""
    return [name for name, target in places(model, names).by_name.items() if target.place is None]


def unexpected_names(model: Any, names: Iterable[str]) -> list[str]:
    """The unused names that transformers reports as unexpected: a class may know names that it leaves out."""
    known = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return [name for name in unused_names(model, names) if not any(pattern.search(name) for pattern in known)]


def convert_into(
    model: Any, tensors: Mapping[str, Any], dtype: torch.dtype, mapping: Mapping[str, str] | None = None
) -> None:
    """Have transformers set these tensors of a checkpoint in a model on meta, converted where it converts them.

    A tensor may be any object that returns one for `[...]`. A parameter whose tensor cannot be made, or has another
    shape, stays as it was.
    """
    from transformers.core_model_loading import WeightConverter, convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(dtype=dtype, weight_mapping=_conversions(model, mapping))
    takes = inspect.signature(convert_and_load_state_dict_in_model).parameters
    more: dict[str, Any] = {"tp_plan": None} if "tp_plan" in takes else {}  # up to 5.16
    # transformers copies a converter for each tensor, but keeps one for each parameter only, such as 96 copies for
    # 18,432 matrices of experts; `_sparing` makes the other copies cheap
    with sequential_loading(), progress_bar(False), set_inside(WeightConverter, "__deepcopy__", _sparing()):
        convert_and_load_state_dict_in_model(model, dict(tensors), config, **more)


def _sparing() -> Callable[[Any, Any], Any]:
    """A `__deepcopy__` for converters that returns the last copy again as long as that has collected no tensors: then
    transformers did not keep it."""
    spares: dict[int, Any] = {}

    def copied(converter: Any, memo: Any) -> Any:
        spare = spares.get(id(converter))
        if spare is None or spare.collected_tensors:
            spare = spares[id(converter)] = copy.copy(converter)
            for name in ("collected_tensors", "layer_targets", "operations"):
                setattr(spare, name, copy.deepcopy(getattr(converter, name), memo))
        return spare

    return copied


def build_on_meta(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model on meta, as `from_pretrained` builds it before it loads tensors."""
    from transformers.utils import ContextManagers

    config.dtype = dtype
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            part.dtype = dtype
    with ContextManagers(cls.get_init_context(dtype, False, False, None)):
        return cls(config)


def loaded_dtype(
    dtype: str | torch.dtype, config: Any, index: Mapping[str, Any] | None, first: Mapping[str, torch.dtype]
) -> torch.dtype:
    """The dtype in which `from_pretrained` loads a model.

    `index`: the metadata of an index, if there is one. `first`: the dtypes of the first file, in the order in which
    transformers reads it.
    """
    from transformers.modeling_utils import _get_dtype

    tensors = {name: torch.empty(0, dtype=kind, device="meta") for name, kind in first.items()}
    found: torch.dtype = _get_dtype(dtype, None, copy.deepcopy(config), index, tensors, True)[1]
    return found


def class_behind(auto: Any, config: Any, code: CodeSource | None) -> Any:
    """The class that an Auto class loads for a config. `code`: the code that is trusted; None: none."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto import auto_factory

    is_known = type(config) in auto._model_mapping
    own = auto_factory._get_model_class(config, auto._model_mapping) if is_known else None
    reference = (getattr(config, "auto_map", None) or {}).get(auto.__name__)
    if reference and code is not None and (own is None or own.__module__.startswith("transformers.")):
        cls = get_class_from_dynamic_module(reference, code.name, **code.hub)
        if own is None:
            auto.register(type(config), cls, exist_ok=True)
        cls.register_for_auto_class(auto_class=auto)
        return auto_factory.add_generation_mixin_to_remote_model(cls)
    if own is not None:
        return own
    with torch.device("meta"):  # raises for a config that is unknown, or whose code is not trusted
        return type(auto.from_config(config, trust_remote_code=code is not None))


def add_adapter(model: Any, folder: Any, dtype: torch.dtype) -> None:
    """Add to a model on meta, in this dtype, the modules of the adapter in a folder."""
    from peft import PeftConfig, inject_adapter_in_model

    before = {id(param) for param in model.parameters()}
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    inject_adapter_in_model(config, model, "default", low_cpu_mem_usage=True)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and id(param) not in before:
                cast = torch.empty(param.shape, dtype=dtype, device="meta")
                module._parameters[name] = torch.nn.Parameter(cast, requires_grad=False)


class StandInLoad:
    """One load of transformers by this thread that gets `tensors` instead of reading the files of a checkpoint.

    Where transformers looks for the files of `name`, in `subfolder`, or for the file `named` by the config, it gets
    `files` and `index`, the metadata of their index. `info` is transformers' report of the load, and None where a class
    reads its files itself. `is_elsewhere` is true while other files are loaded, such as those of an adapter.
    """

    def __init__(
        self,
        name: str,
        subfolder: str,
        named: str | None,
        files: list[str],
        index: Mapping[str, Any] | None,
        tensors: dict[str, Any],
    ) -> None:
        self.info: Any = None
        self.is_elsewhere = False
        self._folder = _folder(name, subfolder)
        self._named = named
        self._files = files
        self._index = index
        self._tensors = tensors
        self._model: Any = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, transformers gets the tensors."""
        from transformers import modeling_utils

        thread, kind = threading.get_ident(), modeling_utils.PreTrainedModel
        find, load, finish = (
            modeling_utils._get_resolved_checkpoint_files,
            kind._load_pretrained_model,
            kind._finalize_model_loading,
        )

        def found(*args: Any, **kwargs: Any) -> Any:
            folder = _folder(
                str(kwargs.get("pretrained_model_name_or_path")),
                (kwargs.get("download_kwargs") or {}).get("subfolder") or "",
            )
            is_same = folder == self._folder and kwargs.get("transformers_explicit_filename") == self._named
            # a class's own `from_pretrained` may load other files of the folder
            is_other = kwargs.get("variant") or kwargs.get("gguf_file") or kwargs.get("use_safetensors") is False
            is_ours = threading.get_ident() == thread and is_same and not is_other
            return (self._files, self._index) if is_ours else find(*args, **kwargs)

        def loaded(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return load(model, state_dict, checkpoint_files, load_config, **kwargs)
            if checkpoint_files is self._files:
                self._model = model
                return load(model, self._tensors, checkpoint_files, _reporting(load_config), **kwargs)
            before, self.is_elsewhere = self.is_elsewhere, True
            try:
                return load(model, state_dict, checkpoint_files, load_config, **kwargs)
            finally:
                self.is_elsewhere = before

        def finished(model: Any, load_config: Any, loading_info: Any) -> Any:
            if model is not self._model:
                return finish(model, load_config, loading_info)
            self.info = finish(model, _reporting(load_config), loading_info)
            return self.info

        with (
            set_inside(modeling_utils, "_get_resolved_checkpoint_files", found),
            set_inside(kind, "_load_pretrained_model", staticmethod(loaded)),
            set_inside(kind, "_finalize_model_loading", staticmethod(finished)),
        ):
            try:
                yield
            finally:
                # A library may keep an exception, such as that of a failed import, with the frames that led to it. They
                # hold this object.
                self._tensors.clear()
                self._model = None


def _folder(name: str, subfolder: str) -> str:
    """The resolved path of a folder, or the name of a repository."""
    path = os.path.join(name, subfolder)
    return os.path.realpath(path) if os.path.isdir(path) else path


def _reporting(load_config: Any) -> Any:
    """The config with mismatched shapes reported, not raised: our own error names all of them."""
    return dataclasses.replace(load_config, ignore_mismatched_sizes=True)


def kept_dtype(model: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """A function from a parameter's name to the dtype in which transformers always loads it, or None."""
    from transformers.core_model_loading import build_glob_alternation

    kept: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    if not kept:
        return lambda name: None
    pattern, _, of_group = build_glob_alternation(list(kept))

    def dtype_of_name(name: str) -> torch.dtype | None:
        match = pattern.search(name)
        return kept[of_group[match.lastgroup]] if match else None

    return dtype_of_name


def has_own_load(cls: Any) -> bool:
    """Whether a class has a `from_pretrained` of its own."""
    from transformers import PreTrainedModel

    return getattr(cls.from_pretrained, "__func__", None) is not PreTrainedModel.from_pretrained.__func__


@contextlib.contextmanager
def set_generation(cls: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a model of this class that is loaded gets these options in its generation settings, too."""
    adjust = getattr(cls, "adjust_generation_fn", None)
    if not options or adjust is None:
        yield
        return

    def adjusted(model: Any, *args: Any, **kwargs: Any) -> Any:
        return adjust(model, *args, **{**options, **kwargs})

    with set_inside(cls, "adjust_generation_fn", adjusted):
        yield


def tie(model: Any) -> None:
    """Make tied parameters one object, as at the end of a load."""
    model.tie_weights(recompute_mapping=False)


def decode_step(model: Any, num_tokens: int) -> AbstractContextManager[None]:
    """The context in which `generate` runs a step of `num_tokens`: experts compute one token by another function."""
    enter = getattr(model, "_optimize_model_for_decode", nullcontext) if num_tokens == 1 else nullcontext
    found: AbstractContextManager[None] = enter()
    return found


def forget_hooks(module: torch.nn.Module) -> None:
    """Have transformers install its hooks for hidden states again, on a copy of a module without hooks."""
    vars(module).pop("_output_capturing_hooks_installed", None)


def prefill(model: Any, ids: Any, config: Any, model_kwargs: dict[str, Any]) -> Any:
    """The output of the prompt's forward, or of the last one where settings cut the prompt into parts."""
    return model._prefill(ids, config, model_kwargs)


def candidate_generator_method(model: Any) -> Callable[..., Any]:
    """The method of `generate` that makes the generator of drafted tokens."""
    found: Callable[..., Any] = model._get_candidate_generator
    return found


def prepares_as_all_do(model: Any) -> bool:
    """Whether a model makes the arguments of its forwards by transformers' common method."""
    from transformers import GenerationMixin

    name = GenerationMixin.prepare_inputs_for_generation.__name__
    return name not in vars(model) and getattr(type(model), name) is getattr(GenerationMixin, name)


@contextlib.contextmanager
def generating(
    model: Any,
    *,
    put_cache: Callable[[Any, dict[str, Any], Any, int, int], None],
    make_candidates: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Inside, `generate` makes its cache, and its generator of drafted tokens, with these functions.

    `put_cache` gets the settings, the arguments of the model, the kind of loop, the batch, and the length of the cache.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_inside(model, "_prepare_cache_for_generation", put_cache))
        if make_candidates is not None:
            stack.enter_context(set_inside(model, "_get_candidate_generator", make_candidates))
        yield


def remedy_of_experts(model: Any) -> str:
    """What to do, in an error, where operators of experts compute all tokens that meet at one together."""
    chosen = getattr(model.config.get_text_config(), "_experts_implementation", None)
    if chosen == "batched_mm" or not model._can_set_experts_implementation():
        return ""
    return '; model.set_experts_implementation("batched_mm") runs experts token by token'


@cache
def cache_argument() -> str:
    """The name of the argument by which models get a cache: it has another one since transformers 5.24."""
    from transformers import LlamaForCausalLM

    return "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def static_cache_length(model: Any, config: Any, length: int) -> int:
    """The length of the static cache that `generate` would make for a text of `length` positions.

    It is that of the longest text so far, and a shorter one runs other kernels. So it is kept for later texts, too.
    """
    length = max(length, getattr(config, "max_cache_len", None) or 0, getattr(model, "_previous_max_cache_length", 0))
    model._previous_max_cache_length = length
    return length


@contextlib.contextmanager
def stopping_by(model: Any, wrap: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Inside, `generate` asks what `wrap` makes of its stopping criteria."""
    made = model._get_stopping_criteria
    with set_inside(model, "_get_stopping_criteria", lambda *args, **kwargs: wrap(made(*args, **kwargs))):
        yield
