"""Private names of diffusers, which may change: how it reads files, assigns weights, and identifies single files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.loaders import single_file_utils
from diffusers.models import model_loading_utils, modeling_utils
from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFParameter
from diffusers.utils import logging
from torch.overrides import TorchFunctionMode

from weightstream.errors import CheckpointError, UnsupportedError
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.header import TensorEntry
from weightstream.store.mapping import FileMapping

_SETTER: Any = model_loading_utils
_READERS: tuple[Any, ...] = (modeling_utils, model_loading_utils, single_file_utils)
_single_file: Any = single_file_utils
_Quantised: Any = GGUFParameter


@contextmanager
def loading(
    read: Callable[[Path], dict[str, Any] | None], home: Callable[[str, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Inside, diffusers reads `read(path)` instead of a file, unless that is None, and assigns `home(name, tensor)`
    instead of a tensor; parts that it cuts from a tensor stay views."""
    read_file, set_tensor = _SETTER.load_state_dict, _SETTER.set_module_tensor_to_device

    def load_state_dict(checkpoint_file: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = None if isinstance(checkpoint_file, dict) else read(Path(checkpoint_file))
        return read_file(checkpoint_file, *args, **kwargs) if tensors is None else tensors

    def set_module_tensor(module: Any, name: str, device: Any, value: Any = None, **kwargs: Any) -> None:
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"
        set_tensor(module, name, device, value=home(name, value) if is_plain else value, **kwargs)

    for module in _READERS:
        module.load_state_dict = load_state_dict
    _SETTER.set_module_tensor_to_device = set_module_tensor
    try:
        with _Views():
            yield
    finally:
        for module in _READERS:
            module.load_state_dict = read_file
        _SETTER.set_module_tensor_to_device = set_tensor


class _Views(TorchFunctionMode):
    """Inside, `torch.cat` of one tensor makes no copy: diffusers calls it for each part of a projection."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat and not kwargs and len(args) == 1 and len(args[0]) == 1:
            return args[0][0]
        return func(*args, **(kwargs or {}))


@contextmanager
def progress_bars(wanted: bool | None) -> Iterator[None]:
    """Inside, diffusers shows progress bars or not; None changes nothing."""
    before = logging.is_progress_bar_enabled()
    if wanted is not None:
        (logging.enable_progress_bar if wanted else logging.disable_progress_bar)()
    try:
        yield
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def is_kept_in_float32(kind: Any, name: str) -> bool:
    """Whether a model of this class keeps the weight in float32, whatever dtype it is loaded in."""
    kept = getattr(kind, "_keep_in_fp32_modules", None) or ()
    return any(part in name.split(".") for part in ([kept] if isinstance(kept, str) else kept))


def pipeline_of(entries: Mapping[str, TensorEntry], path: Path, base: str | Path | None) -> tuple[Any, str]:
    """The class of the pipeline in a single file, and the folder or repository of its configs.

    They come from `base`, else from the names and shapes of the weights. Raises `CheckpointError`.
    """
    if base is None:
        facts = _single_file.fetch_diffusers_config(dict(entries))
        base = facts["pretrained_model_name_or_path"]
    try:
        name = diffusers.DiffusionPipeline.load_config(str(base))["_class_name"]
    except OSError as error:
        raise CheckpointError(
            f"{path}: its configs, those of {base}, cannot be loaded: {error}; pass base=, the folder or repository of "
            "such a pipeline"
        ) from error
    kind = getattr(diffusers, name, None)
    if not hasattr(kind, "from_single_file"):
        raise UnsupportedError(f"{path}: {name} cannot be loaded from a single file")
    return kind, str(base)


class GgufFile(Checkpoint):
    """A mapped GGUF file; diffusers dequantises its quantised tensors when it computes."""

    def __init__(self, path: Path) -> None:
        """Raises `UnsupportedError`, `CheckpointError`."""
        try:
            import gguf
        except ImportError as error:
            raise UnsupportedError(f"{path}: a GGUF file needs pip install gguf") from error
        mapping = FileMapping(path)
        plain = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        self._types: dict[str, Any] = {}
        entries: dict[str, TensorEntry] = {}
        for tensor in gguf.GGUFReader(path).tensors:
            if tensor.tensor_type not in plain:
                if tensor.tensor_type not in SUPPORTED_GGUF_QUANT_TYPES:
                    kind = tensor.tensor_type.name
                    raise UnsupportedError(f"{path}: {tensor.name} is {kind}, which diffusers does not read")
                self._types[tensor.name] = tensor.tensor_type
            begin = int(tensor.data_offset)
            entries[tensor.name] = TensorEntry(
                name=tensor.name,
                mapping=mapping,
                dtype=str(tensor.data.dtype),
                shape=tuple(tensor.data.shape),
                begin=begin,
                end=begin + int(tensor.n_bytes),
            )
        super().__init__([mapping], entries, {})

    def tensor(self, name: str) -> torch.Tensor:
        """As for any checkpoint; a quantised tensor is one of diffusers' class."""
        tensor = super().tensor(name)
        return _Quantised(tensor, quant_type=self._types[name]) if name in self._types else tensor
