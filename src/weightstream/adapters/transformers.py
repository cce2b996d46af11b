"""LoadedModel: a transformers model whose parameters view mapped files. It knows transformers, not plans or devices.

transformers builds the model on meta and fills it from a state dict of mapped tensors. Those it keeps as they are stay
views of the checkpoint. Those it makes (experts fused, projections split, another dtype) are caught one by one, as it
registers them: each is written to the offload folder and replaced by a view of that file, one at a time in memory.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.modules.module import register_module_parameter_registration_hook

from weightstream.adapters import hf_private
from weightstream.adapters.hub import check_dtype, config_and_class, local_path, refused_as_checkpoint
from weightstream.adapters.skeleton import build
from weightstream.errors import CheckpointError, ConfigError, StoreError
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.decoded import DecodedMemory
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import FileMapping

_LOGGER = logging.getLogger("weightstream")
_LOADING = threading.Lock()  # the hook, and what transformers is told for a load, are of the process
_TRIM_NBYTES = 32 << 20
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
    with refused_as_checkpoint(path_or_repo_id, "load"):
        config, cls = config_and_class(folder, model_class, trust_remote_code)
        options = {"config": config, "dtype": dtype, **kwargs}
        with _LOADING, offload.lock(), hf_private.progress_bar(progress):
            model = _Load(checkpoint, offload, cls, options, decode).run()
        _finish(model, folder, str(path_or_repo_id), kwargs)
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
        elif self._coded:
            self._decode_what_is_converted()
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
            self._populate(name)
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

    def _decode_what_is_converted(self) -> None:
        """What transformers casts, makes something of, or compares with what it may be tied to must hold its values."""
        config = copy.deepcopy(self._options["config"])
        model = build(self._cls, config, self._options["dtype"], self._checkpoint)
        state, places = model.state_dict(keep_vars=True), hf_private.places(model, self._checkpoint.entries)
        sources = Counter(id(state[place]) for place, _ in places.values() if place is not None)
        for name, layout in self._coded.items():
            place, is_converted = places[name]
            if place is not None:
                is_cast = str(state[place].dtype) != f"torch.{layout.dtype}"
                if is_cast or is_converted or sources[id(state[place])] > 1:
                    self._populate(name)

    def _populate(self, name: str) -> None:
        memory = self._checkpoint.memory(name)
        memory.populate(0, memory.nbytes)

    def _build(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, set[str]]:
        allowed = self._options.get("ignore_mismatched_sizes", False)
        options = {**self._options, "ignore_mismatched_sizes": True, "output_loading_info": True}
        with hf_private.sequential_loading(), hf_private.warnings_of_transformers() as report:
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
        if not hf_private.is_loaded(param):
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


def _finish(model: Any, folder: Path, name: str, kwargs: dict[str, Any]) -> None:
    model.name_or_path = model.config.name_or_path = name
    model.eval()
    if model.can_generate() and kwargs.get("generation_config") is None:
        with contextlib.suppress(OSError):  # without the file, the one made of the model's config stays
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
