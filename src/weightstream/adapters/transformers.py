"""LoadedModel: a transformers model whose parameters view mapped files. It knows transformers, not plans or devices.

transformers builds the model on meta and fills it from a state dict of mapped tensors. Those it keeps as they are stay
views of the checkpoint. Those it makes (experts fused, projections split, another dtype) are caught one by one, as it
registers them: each is written to the offload folder and replaced by a view of that file, one at a time in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from torch.nn.modules.module import register_module_parameter_registration_hook

from weightstream.errors import CheckpointError, ConfigError, StoreError, UnsupportedError, WeightstreamError
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.decoded import DecodedMemory
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import FileMapping

_LOGGER = logging.getLogger("weightstream")
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"  # else transformers converts ahead of the hook, in threads, without bound
_LOADING = threading.Lock()  # that variable and the hook are of the process
_TRIM_NBYTES = 32 << 20
_HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*")
_HUB_SPARED = ("*/*.safetensors", "consolidated*.safetensors")  # second copies of the same weights
_REFUSED = frozenset(
    "config state_dict device_map max_memory quantization_config gguf_file tp_plan tp_size".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode, the files its parameters view, and the folder that must outlive it.

    Parameters that are coded in the file view `decoded`, and hold zeros until that is populated.
    """

    model: Any
    checkpoint: Checkpoint
    mappings: tuple[FileMapping, ...]
    decoded: tuple[DecodedMemory, ...]
    folder: OffloadFolder | None


def load_pretrained(
    path_or_repo_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    offload_folder: Path | None = None,
    model_class: type | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    progress: bool | None = None,
    verify_checksums: bool = True,
    decode: bool = False,
    **kwargs: Any,
) -> LoadedModel:
    """Loads a transformers model without a second copy of its weights in memory.

    Weights that transformers converts are written to `offload_folder`, and reused from there by later loads; None is
    a temporary folder. With `decode` so are those that the file holds coded. Other keywords go to transformers. Raises
    `CheckpointError`, `UnsupportedError`, `StoreError`.
    """
    check_dtype(dtype)
    if refused := sorted(_REFUSED & kwargs.keys()):
        raise ConfigError(f"{', '.join(refused)}: weightstream decides this itself; leave it out")
    hub = {name: kwargs.pop(name) for name in ("token", "cache_dir") if name in kwargs}
    path = local_path(path_or_repo_id, trust_remote_code, revision=revision, local_files_only=local_files_only, **hub)
    folder = path if path.is_dir() else path.parent
    checkpoint = Checkpoint.open(path)
    if verify_checksums:
        checkpoint.verify()
    offload = OffloadFolder(offload_folder)
    try:
        config, cls = config_and_class(folder, model_class, trust_remote_code)
        options = {"config": config, "dtype": dtype, **kwargs}
        with _LOADING, offload.lock(), _progress_bar(progress):
            model = _Load(checkpoint, offload, cls, options, decode).run()
        _finish(model, folder, str(path_or_repo_id), kwargs)
    except (WeightstreamError, MemoryError):
        raise
    except Exception as error:  # whatever transformers makes of a config or a keyword that it cannot use
        kind = type(error).__name__
        raise CheckpointError(f"{path_or_repo_id}: transformers cannot load it: {kind}: {error}") from error
    if not offload.mappings:
        offload.close()
    return LoadedModel(
        model=model,
        checkpoint=checkpoint,
        mappings=checkpoint.mappings + offload.mappings,
        decoded=tuple(checkpoint.decoded.values()),
        folder=offload if offload.mappings else None,
    )


class _Load:
    """One load: what transformers makes goes to the folder, and an index remembers where each parameter is."""

    def __init__(
        self, checkpoint: Checkpoint, folder: OffloadFolder, cls: Any, options: dict[str, Any], decode: bool
    ) -> None:
        self._checkpoint, self._folder, self._cls, self._options = checkpoint, folder, cls, options
        self._coded = {name: entry.layout for name, entry in checkpoint.entries.items() if entry.layout is not None}
        self._decode = decode and bool(self._coded)
        hidden = [] if decode else [checkpoint.memory(name) for name in self._coded]
        self._files: list[FileMapping | DecodedMemory] = [*checkpoint.mappings, *hidden]  # that tensors can view
        facts = {**options, "config": options["config"].to_json_string()}
        versions = [transformers.__version__, torch.__version__, f"{cls.__module__}.{cls.__qualname__}"]
        versions += ["decoded"] * self._decode
        text = json.dumps([checkpoint.fingerprint(), versions, sorted((k, str(v)) for k, v in facts.items())])
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._written: dict[int, str] = {}  # address -> name in the folder
        self._thread = threading.get_ident()
        self._freed_nbytes = 0

    def run(self) -> Any:
        index = None if self._folder.is_private else self._folder.load_index(self._key)
        if index is not None and (model := self._reuse(index)) is not None:
            return model
        if self._decode:
            self._tell_of_decoding()
        else:
            self._decode_what_is_cast()
        model, missing = self._convert()
        if not self._decode and (consumed := self._consumed(model)):
            _LOGGER.info("%s: transformers converts %d coded tensors: loading again", self._where, len(consumed))
            shapes = {self._checkpoint.entries[name].shape for name in consumed}
            self._populate(name for name in self._coded if self._checkpoint.entries[name].shape in shapes)
            model, missing = self._convert()
        for memory in self._checkpoint.decoded.values():
            memory.forget()
        if (num := len(self._written) - len(self._coded) * self._decode) > 0 and self._folder.is_private:
            _LOGGER.warning(
                "transformers converted %d tensors: %d bytes written to %s for this process only; "
                "pass offload_folder= to keep them for the next load",
                *(num, self._folder.nbytes, self._folder.path),
            )
        elif self._written and not self._folder.is_private:
            self._folder.save_index(self._key, self._places(model, missing))
        return model

    def _convert(self) -> tuple[Any, set[str]]:
        """Has transformers make the model, and gives what it makes a home."""
        for title in self._written.values():
            self._folder.remove(title)
        self._written.clear()
        sources = {name: self._home(name, self._tensor(name)) for name in self._checkpoint.entries}
        hook = register_module_parameter_registration_hook(self._on_parameter)
        try:
            return self._build(sources)
        finally:
            hook.remove()
            _trim_heap()

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        if self._decode and name in self._coded:
            self._populate([name])
            del self._checkpoint.decoded[name]  # the memory goes with the tensor
        return tensor

    def _tell_of_decoding(self) -> None:
        _LOGGER.warning(
            "%s: %d coded tensors are decoded into %s%s: %d bytes on disk and on every way from there in place of %d, "
            "since they cannot be decoded as they are needed (that takes a CUDA GPU with Triton, or on the CPU "
            "codec='3bit' or '4bit'; and neither codec='none' nor uva)",
            *(self._where, len(self._coded), self._folder.path),
            " for this process only (offload_folder= keeps them)" if self._folder.is_private else "",
            sum(layout.raw_nbytes for layout in self._coded.values()),
            sum(layout.nbytes for layout in self._coded.values()),
        )

    def _decode_what_is_cast(self) -> None:
        """What transformers is told to cast must hold its values."""
        if (dtype := self._options["dtype"]) != "auto":
            wanted = str(dtype).removeprefix("torch.")
            self._populate(name for name, layout in self._coded.items() if layout.dtype != wanted)

    def _populate(self, names: Iterable[str]) -> None:
        for memory in map(self._checkpoint.memory, names):
            memory.populate(0, memory.nbytes)

    def _consumed(self, model: Any) -> list[str]:
        """Coded tensors that are not decoded, and that the model has something made of in place of them."""
        shown = {(t.data_ptr(), t.nbytes) for t in model.state_dict().values()}
        memories = {name: self._checkpoint.memory(name) for name in self._coded}
        hidden = [name for name, m in memories.items() if not m.is_decoded and (m.address, m.nbytes) not in shown]
        unused = set(unused_names(model, hidden)) if hidden else set()
        return [name for name in hidden if name not in unused]

    def _build(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, set[str]]:
        allowed = self._options.get("ignore_mismatched_sizes", False)
        options = {**self._options, "ignore_mismatched_sizes": True, "output_loading_info": True}
        with _sequential_loading(), _warnings_of_transformers() as report:
            try:
                model, info = self._cls.from_pretrained(None, state_dict=dict(tensors), **options)
            except RuntimeError as error:
                raise CheckpointError(f"{self._where}: transformers: {error}\n{''.join(report)}") from error
        if info["mismatched_keys"] and not allowed:
            shapes = [f"{key}: file {tuple(a)}, model {tuple(b)}" for key, a, b in sorted(info["mismatched_keys"])]
            raise CheckpointError(
                f"{self._where}: {len(shapes)} shapes differ: {'; '.join(shapes[:8])}; "
                "the config is of another model, or pass ignore_mismatched_sizes=True"
            )
        named = [*model.named_parameters(), *model.named_buffers()]
        if left := [name for name, tensor in named if tensor.is_meta]:
            raise CheckpointError(f"{self._where}: {len(left)} tensors got no value, such as {', '.join(left[:4])}")
        if missing := sorted(info["missing_keys"]):
            _LOGGER.warning(
                "%s: %d weights of %s are not in the checkpoint and have random values, such as %s",
                *(self._where, len(missing), self._cls.__name__, ", ".join(missing[:4])),
            )
        return model, set(info["missing_keys"]) | {key for key, *_ in info["mismatched_keys"]}

    def _on_parameter(self, module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> Any:
        if param is None or param.is_meta or threading.get_ident() != self._thread:
            return None
        if not getattr(param, "_is_hf_initialized", False):  # missing in the file: random values are yet to come
            return None
        home = self._home(name, param.detach())
        if home.data_ptr() == param.data_ptr():
            return None
        homed = torch.nn.Parameter(home, requires_grad=param.requires_grad)
        homed.__dict__.update(param.__dict__)
        return homed

    def _home(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor` where it views a file already, else an equal one that views a file of the folder."""
        is_homed = tensor.data_ptr() in self._written or self._place(tensor) is not None
        if not tensor.numel() or (tensor.is_contiguous() and is_homed):
            return tensor
        title = f"{self._key}.{len(self._written):06d}.{name}"
        self._freed_nbytes += tensor.numel() * tensor.element_size()
        if self._freed_nbytes >= _TRIM_NBYTES:
            _trim_heap()
            self._freed_nbytes = 0
        home = self._folder.write(title, tensor)
        self._written[home.data_ptr()] = title
        return home

    def _place(self, tensor: torch.Tensor) -> list[Any] | None:
        for number, mapping in enumerate(self._files):
            if (offset := mapping.locate(tensor.data_ptr())) is not None:
                return [number, offset, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        return None

    def _places(self, model: Any, missing: set[str]) -> dict[str, Any]:
        """Returns, for every tensor that was loaded, its name in the folder or its place in the checkpoint."""
        places: dict[int, tuple[str, Any]] = {}
        for name, tensor in model.state_dict().items():
            if name not in missing and tensor.numel():
                address = self._home(name, tensor).data_ptr()
                # Ties: the first name is enough, and with two transformers would compare all their bytes.
                places.setdefault(address, (name, self._written.get(address) or self._place(tensor)))
        return dict(places.values())

    def _reuse(self, index: dict[str, Any]) -> Any | None:
        """Builds the model from the places of an earlier load; None when transformers did not keep them all."""
        try:
            tensors = {name: self._at(place) for name, place in index.items()}
            model, _ = self._build(tensors)
        except (CheckpointError, StoreError) as error:
            _LOGGER.warning("%s: converting again: %s", self._folder.path, error)
            return None
        state = model.state_dict()
        if not all(name in state and self._is_same(state[name], tensor) for name, tensor in tensors.items()):
            _LOGGER.info("%s: converting again: transformers changed what was converted before", self._folder.path)
            return None
        return model

    def _is_same(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        if found.data_ptr() == expected.data_ptr():
            return True
        if any(memory.locate(expected.data_ptr()) is not None for memory in self._checkpoint.decoded.values()):
            return False  # nobody knows yet what it holds
        return found.dtype == expected.dtype and torch.equal(found, expected)  # a bias that transformers pads anew

    def _at(self, place: str | list[Any]) -> torch.Tensor:
        if isinstance(place, str):
            return self._folder.read(place)
        number, offset, name, shape = place
        dtype: torch.dtype = getattr(torch, name)
        size = torch.Size(shape)
        data: torch.Tensor = self._files[number].bytes(offset, offset + dtype.itemsize * size.numel())
        return data.view(dtype).view(size)

    @property
    def _where(self) -> Path:
        return self._checkpoint.mappings[0].path.parent


def _trim_heap() -> None:
    # glibc keeps freed tensors between small live blocks: without this, memory grew by half of what was converted
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def unused_names(model: Any, names: Iterable[str]) -> list[str]:
    """Those names of a checkpoint, sorted, that transformers gives no place in the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state, transforms = model.state_dict(), get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    prefix = model.base_model_prefix
    placed = {name: rename_source_key(name, renamings, converters, prefix, state)[0] for name in sorted(names)}
    return [name for name, place in placed.items() if place not in state and name not in state]


def check_dtype(dtype: str | torch.dtype) -> None:
    """Raises `ConfigError` for a name that is no dtype's."""
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"dtype = {dtype!r}: give 'auto' or the name of a torch dtype, such as 'bfloat16'")


def local_path(path_or_repo_id: str | Path, remote_code: bool, *, weights: bool = True, **hub: Any) -> Path:
    """The folder or file of a checkpoint, got from the hub where it is no path; raises `CheckpointError`.

    Without `weights` only its JSON files are got.
    """
    path = Path(path_or_repo_id).expanduser()
    if path.exists():
        return path
    if isinstance(path_or_repo_id, Path) or path.is_absolute() or str(path_or_repo_id).startswith((".", "~")):
        raise CheckpointError(f"{path}: no such file or folder")
    files = [*(_HUB_FILES if weights else ["*.json"]), *(["*.py"] if remote_code else [])]
    try:
        found = huggingface_hub.snapshot_download(
            path_or_repo_id, allow_patterns=files, ignore_patterns=list(_HUB_SPARED), **hub
        )
    except (OSError, ValueError) as error:  # the hub's errors are of these kinds
        raise CheckpointError(
            f"{path_or_repo_id!r} is no local folder, and getting it from the hub failed: {error}; "
            "check the name, the network and `hf auth login`, or pass a folder"
        ) from error
    return Path(found)


def config_and_class(folder: Path, model_class: Any, remote_code: bool) -> tuple[Any, Any]:
    """The config of a folder and the class of the model that it describes; raises as `load_pretrained`."""
    config = _read_config(folder, remote_code)
    cls = _class_of(config, model_class, remote_code)
    return config if isinstance(config, cls.config_class or object) else config.get_text_config(), cls


def _read_config(folder: Path, remote_code: bool) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: cannot read config.json: {error}") from error
    quantization = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if quantization is not None:
        facts = quantization if isinstance(quantization, dict) else quantization.to_dict()
        method = facts.get("quant_method", "unknown")
        raise UnsupportedError(f"{folder}: quantised with {method}, which is not supported; use the unquantised model")
    return config


def _class_of(config: Any, model_class: Any, remote_code: bool) -> Any:
    names = config.architectures or []
    if model_class is None and not names:
        raise CheckpointError(f"{config.name_or_path}: config.json names no architectures; pass model_class=")
    if model_class is None and not (remote_code and getattr(config, "auto_map", None)):
        model_class = getattr(transformers, names[0], transformers.AutoModel)
    if model_class is None:
        ours = (auto for auto, reference in config.auto_map.items() if str(reference).endswith(f".{names[0]}"))
        model_class = getattr(transformers, next(ours, "AutoModel"))
    if hasattr(model_class, "config_class"):
        return model_class
    with torch.device("meta"):  # an Auto class: a model without weights tells which class it stands for
        return type(model_class.from_config(config, trust_remote_code=remote_code))


def _finish(model: Any, folder: Path, name: str, kwargs: dict[str, Any]) -> None:
    model.name_or_path = model.config.name_or_path = name
    model.eval()
    if model.can_generate() and kwargs.get("generation_config") is None:
        with contextlib.suppress(OSError):  # without the file, the one made of the model's config stays
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)


@contextlib.contextmanager
def _sequential_loading() -> Iterator[None]:
    before = {key: value for key, value in os.environ.items() if key == _SEQUENTIAL}
    os.environ[_SEQUENTIAL] = "1"
    try:
        yield
    finally:
        del os.environ[_SEQUENTIAL]
        os.environ.update(before)


@contextlib.contextmanager
def _warnings_of_transformers() -> Iterator[list[str]]:
    """Collects what transformers logs: its load report alone names the keys it could not convert."""
    report: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: report.append(re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    handlers, level = logger.handlers, logger.level
    logger.handlers = [*(handlers if level <= logging.WARNING else []), handler]  # silenced stays silent
    logger.setLevel(min(level, logging.WARNING))
    try:
        yield report
    finally:
        logger.handlers = handlers
        logger.setLevel(level)


@contextlib.contextmanager
def _progress_bar(wanted: bool | None) -> Iterator[None]:
    control = transformers.utils.logging
    switch = {None: lambda: None, True: control.enable_progress_bar, False: control.disable_progress_bar}
    before = control.is_progress_bar_enabled()
    switch[wanted]()
    try:
        yield
    finally:
        switch[before]()
