"""Loading of a transformers model whose parameters view mapped files. Knows transformers, not plans or devices.

transformers loads the model by its own `from_pretrained`, with the name that the caller gave, but gets mapped tensors
instead of reading files. So it does all else that it does with a folder: generation settings, adapters, a class's own
`from_pretrained`. There are three kinds of tensors:

- Those that transformers keeps unchanged stay views of the checkpoint.
- Those that it would stack or join from whole parts of files (fused experts) are passed to it joined: as memory that
  holds nothing until it is read, and whose bytes have a known place in the files.
- Those that it makes anyway (transposed projections, another dtype) are caught one by one as it registers them. Each is
  written to the offload folder and replaced by a view of that file, so that one at a time is in memory.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from weightstream.adapters.hf import private, private_quantised, surplus, tensor_parallel
from weightstream.adapters.hf.checkpoint_ranges import Decoded, GatheredTensors, as_they_are, gather
from weightstream.adapters.hf.file_backing import Homing
from weightstream.adapters.hf.hub import (
    DESCRIBING,
    ModelSource,
    build,
    check_dtype,
    config_and_class,
    dtype_of,
    find,
    is_quantised,
    is_whole,
    names_pipeline,
    refuse_quantised,
    refused_as_checkpoint,
    skeleton,
)
from weightstream.adapters.hf.lazy_dequant import unpack_late
from weightstream.errors import CheckpointError, ConfigError, UnsupportedError
from weightstream.plan.units import human, some
from weightstream.settings.config import OffloadConfig, no_such_option
from weightstream.store import malloc
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.folder import OffloadFolder
from weightstream.store.header import torch_dtype
from weightstream.store.lazy import LazyMemory
from weightstream.store.mapping import FileMapping, Memory

_LOGGER = logging.getLogger("weightstream")
# Reentrant, as code of a model may load another one. The registration hook and the replaced functions of transformers
# are global to the process.
_LOADING = threading.RLock()
_OF_THE_HUB = ("revision", "local_files_only", "token", "cache_dir", "force_download", "subfolder")
_CPU = torch.device("cpu")
_ON_THE_FLY = frozenset(("bitsandbytes", "torchao"))
_DECIDED = "weightstream decides this itself; leave it out"
_ADAPTER = "load the model without it, then call model.load_adapter(folder), which takes it"
_REFUSED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("state_dict", "device_map", "max_memory", "tp_plan", "tp_size"), _DECIDED)
    | dict.fromkeys(("adapter_name", "adapter_kwargs"), _ADAPTER)
    | {
        "gguf_file": "weightstream reads only safetensors; leave it out",
        "variant": "give the path of the file instead of the folder's: model.<variant>.safetensors, or its index, "
        "model.safetensors.index.<variant>.json",
        "output_loading_info": "only the model is returned, and missing weights are an error; leave it out",
        "code_revision": "code is loaded from the revision of the weights: leave it out, or give a folder",
    }
)
_PASSED_ON = frozenset(  # keywords of transformers that mean the same here
    (
        *("attn_implementation", "experts_implementation", "generation_config", "ignore_mismatched_sizes"),
        *("key_mapping", "kernel_config", "low_cpu_mem_usage", "quantization_config", "use_kernels", "use_safetensors"),
        "weights_only",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode, the files that its parameters view, and the folder that must outlive it.

    Parameters that are compressed in the file, or lie in several parts of it, view `lazy`, and hold zeros until that is
    populated.
    """

    model: Any
    checkpoint: Checkpoint
    mappings: tuple[FileMapping, ...]
    lazy: tuple[LazyMemory, ...]
    folder: OffloadFolder | None


def load_pretrained(
    path_or_repo_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    offload_folder: Path | None = None,
    model_class: type | None = None,
    trust_remote_code: bool = False,
    progress: bool | None = None,
    verify_checksums: bool = True,
    expect: Callable[[torch.dtype, int], object] = lambda dtype, nbytes: None,
    decode: Callable[[Collection[str]], bool] = lambda dtypes: False,
    device: torch.device = _CPU,
    may_write: bool = True,
    is_kept: bool = False,
    model_config: Any = None,
    allow_missing: bool = False,
    distributed_config: Any = None,
    **kwargs: Any,
) -> LoadedModel:
    """Load a transformers model without a second copy of its weights in memory.

    Args:
        expect: called with the model's dtype and bytes before any weight is read.
        offload_folder: where a folder is made for weights that transformers converts, that are decompressed, or that a
            `quantization_config` quantises, one by one on `device`; None: the directory of temporary files.
        decode: called with the dtypes of compressed weights; True: they are written to the folder decompressed.
        may_write: without it the model is only described: a tensor that would need the folder has no values.
        is_kept: the caller keeps what is written to the folder, and what the model lacks: no warnings say otherwise.
        model_config: used instead of config.json.
        allow_missing: weights that the checkpoint lacks get random values.
        distributed_config: the model has the shards of this process.
        kwargs: for the hub, the config or transformers.

    Raises:
        CheckpointError, UnsupportedError, StoreError.
    """
    check_dtype(dtype)
    _refuse(kwargs)
    if (quantization := kwargs.get("quantization_config")) is not None:
        refuse_quantised("quantization_config", quantization, _ON_THE_FLY)
    hub = {name: kwargs.pop(name) for name in _OF_THE_HUB if name in kwargs}
    source = find(path_or_repo_id, trust_remote_code, progress=progress, **hub)
    path = source.path
    if path.is_dir() and names_pipeline(path):
        raise CheckpointError(f"{path} is a pipeline of diffusers: weightstream.pipeline_from_pretrained loads it")
    checkpoint = source.checkpoint(model_config)  # its errors are raised before those of the config
    offload = OffloadFolder(offload_folder)
    with refused_as_checkpoint(path_or_repo_id, "load"):
        requested = dict(kwargs)  # `config_and_class` takes those of the config from `kwargs`
        config, cls = config_and_class(source, model_class, trust_remote_code, model_config, kwargs)
        _refuse_unknown(cls, kwargs)
        if source.files_of(config) != source.files_of(model_config):
            checkpoint = source.checkpoint(config)
        if verify_checksums:
            checkpoint.verify()
        loaded = dtype_of(dtype, config, checkpoint, path)
        expect(loaded, checkpoint.plain_nbytes)
        options = {"config": config, "dtype": loaded, **kwargs, **source.hub}
        options |= {} if distributed_config is None else {"distributed_config": distributed_config}
        options |= {"trust_remote_code": True} if trust_remote_code else {}
        # a concrete class passes all keywords on to the generation settings; an Auto class drops those of the config
        is_concrete = model_config is None and hasattr(model_class, "config_class")
        of_generation = {key: requested[key] for key in requested.keys() - kwargs.keys()} if is_concrete else {}
        load = _Load(
            source,
            checkpoint,
            offload,
            cls,
            options,
            for_generation=of_generation,
            may_write=may_write,
            is_kept=is_kept,
            allow_missing=allow_missing,
        )
        with _LOADING, private.progress_bar(progress):
            token = _INNERMOST.set(load)
            try:
                model = load.run(decode, device)
            finally:
                _INNERMOST.reset(token)
        model.eval()
    mappings, lazy = (*checkpoint.mappings, *offload.mappings), tuple(checkpoint.lazy.values())
    kept = offload if offload.mappings else None
    if kept is None:
        offload.close()
    return LoadedModel(model=model, checkpoint=checkpoint, mappings=mappings, lazy=lazy, folder=kept)


def described(
    path_or_repo_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    model_config: Any = None,
    distributed_config: Any = None,
) -> tuple[Any, Checkpoint | None]:
    """The result of `hub.skeleton`; for a quantised checkpoint the loaded model, whose files are not read.

    Only the library of a quantised checkpoint knows the tensors that it makes. Raises as `hub.skeleton` and
    `load_pretrained`, and `UnsupportedError` where a quantised checkpoint is not on this machine.
    """
    source = find(path_or_repo_id, trust_remote_code, files=DESCRIBING)
    if not is_quantised(source.folder):
        return skeleton(
            path_or_repo_id,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            model_config=model_config,
            distributed_config=distributed_config,
        )
    _refuse_shards(path_or_repo_id, distributed_config is not None)
    if not is_whole(source.path):
        raise UnsupportedError(f"{path_or_repo_id}: the plan of a quantised model needs its files: get them first")
    model = load_pretrained(
        source.path,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        model_config=model_config,
        progress=False,
        verify_checksums=False,
        may_write=False,
    ).model
    unpack_late(model, torch.device("meta"))  # meta: no tensor is brought into the order of a device
    return model, None


def _refuse_shards(where: object, is_sharded: bool) -> None:
    """Raise `UnsupportedError` for shards of a quantised model."""
    if is_sharded:
        raise UnsupportedError(f"{where}: a quantised model is not sharded: leave out distributed_config")


def _refuse(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for keywords of transformers that are not supported, with the reason and the remedy."""
    reasons = {name: _REFUSED[name] for name in sorted(given.keys() & _REFUSED.keys())}
    if given.get("use_safetensors") is False:
        reasons["use_safetensors"] = "weightstream reads only safetensors; leave it out"
    if reasons:
        named = {reason: [name for name in reasons if reasons[name] == reason] for reason in reasons.values()}
        raise ConfigError("; ".join(f"{', '.join(names)}: {reason}" for reason, names in named.items()))


def _refuse_unknown(cls: Any, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for keywords that neither transformers nor the model's class takes."""
    parameters = inspect.signature(cls.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    takes = parameters.keys() | _PASSED_ON
    for name, value in given.items():
        if name in ("load_in_8bit", "load_in_4bit"):
            raise ConfigError(f"{name}: pass quantization_config=BitsAndBytesConfig({name}={value!r})")
        if name not in takes:
            known = sorted({*OffloadConfig.names(), *takes} - {"self", "config"})
            raise ConfigError(no_such_option(name, value, dict(zip(known, known, strict=True))))


_INNERMOST: ContextVar[_Load | None] = ContextVar("innermost load of this thread", default=None)


class _ReadEarly(Exception):
    """Code read weights that had no values yet."""


class _PackedTensors(NamedTuple):
    """Experts that stay packed, tensors that transformers joins for them and for others, and its conversions."""

    experts: private_quantised.PackedExperts | None
    gathered: GatheredTensors
    conversions: list[Any]


class _Load:
    """One load, in which tensors that transformers makes go to the folder."""

    def __init__(
        self,
        source: ModelSource,
        checkpoint: Checkpoint,
        folder: OffloadFolder,
        cls: Any,
        options: dict[str, Any],
        *,
        for_generation: Mapping[str, Any],
        may_write: bool,
        is_kept: bool,
        allow_missing: bool,
    ) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._folder = folder
        self._cls = cls
        self._options = options
        self._for_generation = for_generation
        self._is_kept = is_kept
        self._allow_missing = allow_missing
        # weights may be read during the load, by an adapter that is injected or by a class's own `from_pretrained`
        self._is_read = source.adapter is not None or private.has_own_load(cls)
        self._reading: private.StandInLoad | None = None
        self._coded = {name: entry.layout for name, entry in checkpoint.entries.items() if entry.layout is not None}
        self._homing = Homing(self._memories, folder if may_write else None)

    def run(self, wants_plain: Callable[[Collection[str]], bool], device: torch.device) -> Any:
        """The model. Compressed weights are written decompressed to the folder where `wants_plain` says so of their
        dtypes, or where code reads weights while the model is made."""
        try:
            return self._make(wants_plain, device)
        except _ReadEarly:  # it read zeros: make the model again, from weights that have their values
            self._is_read = True
            self._checkpoint.lazy.clear()
        return self._make(wants_plain, device)

    def _make(self, wants_plain: Callable[[Collection[str]], bool], device: torch.device) -> Any:
        is_sharded = "distributed_config" in self._options
        if self._options.get("quantization_config") or getattr(self._options["config"], "quantization_config", None):
            _refuse_shards(self._where, is_sharded)
            return self._quantised(device)
        if is_sharded:
            return self._sharded()
        dtypes = {layout.dtype for layout in self._coded.values()}
        decode = bool(self._coded) and (self._is_read or wants_plain(dtypes))
        checkpoint, config = self._checkpoint, copy.deepcopy(self._options["config"])
        skeleton = build(self._cls, config, self._options["dtype"])
        mapping = self._options.get("key_mapping")
        targets = private.places(skeleton, checkpoint.entries, mapping)
        gathered, used = self._gather(skeleton, targets.by_name)
        stacks = {name: gathered[name][...] for name in skeleton.state_dict() if name in gathered}
        if decode:
            self._warn_of_decompression()
        elif self._coded:
            self._populate_what_is_read(skeleton, targets.by_name)
        sources = {name: self._tensor(name, decode=decode) for name in checkpoint.entries if name not in used}
        try:
            with register_module_parameter_registration_hook(self._on_parameter):
                sources |= stacks
                stacks.clear()
                model = self._build(sources)
        finally:
            malloc.trim()
        if self._homing.num_without_values:
            raise UnsupportedError(
                f"{self._where}: config.json names a quantisation that transformers does not apply: its weights would "
                "be converted, so it is neither planned nor packed; load it"
            )
        if used:
            private.remember_conversions(model, targets.conversions)
        for memory in checkpoint.lazy.values():
            memory.forget()  # free what was populated for the load; the next read fills it again
        # decompressed tensors were written, too: `_warn_of_decompression` reports them
        if (num := self._homing.num_written - len(self._coded) * decode) > 0 and not self._is_kept:
            _LOGGER.warning(
                "transformers converted %d tensors: %s written to %s for this process only; "
                "`weightstream pack` keeps what it converts, in the dtype of config.json",
                *(num, human(self._folder.nbytes), self._folder.path),
            )
        return model

    def _sharded(self) -> Any:
        """The model with the shards of one rank.

        Shards that consist of rows or columns of tensors in the file are not copied, also where tensors are joined.
        Shards of compressed tensors, or of computed ones, are written to the folder one by one.
        """
        checkpoint, config = self._checkpoint, copy.deepcopy(self._options["config"])
        skeleton = build(self._cls, config, self._options["dtype"])
        mapping = self._options.get("key_mapping")
        targets = private.places(skeleton, checkpoint.entries, mapping)
        gathered, used = self._gather(skeleton, targets.by_name)
        names = [name for name in checkpoint.entries if name not in used and name not in self._coded]
        tensors: dict[str, Any] = {name: checkpoint.tensor(name) for name in names}
        tensors |= {name: Decoded(checkpoint, name) for name in self._coded} | gathered
        tensors |= {} if self._is_read else as_they_are(skeleton, checkpoint, targets.by_name)
        try:
            with (
                tensor_parallel.on_host(self._cls),
                register_module_parameter_registration_hook(self._on_parameter),
            ):
                model = self._build(tensors)
        finally:
            malloc.trim()
        if used:
            private.remember_conversions(model, targets.conversions)
        if num := self._homing.num_written:
            _LOGGER.warning(
                "%d shards lie in no file as they are: %s written to %s for this process only",
                num,
                human(self._folder.nbytes),
                self._folder.path,
            )
        return model

    def _quantised(self, device: torch.device) -> Any:
        """The model of a quantised checkpoint, whose library makes its tensors of views of the file; or of one that is
        not quantised, of which the library quantises each weight on the device.
        """
        if self._coded:
            raise CheckpointError(f"{self._where}: a quantised checkpoint that is compressed as well is not supported")
        self._options["device_map"] = {"": "cpu"}  # else its weights would go to a GPU
        packed = self._gathered_packed()
        names = sorted(self._checkpoint.entries.keys() - packed.gathered.used)
        sources = {name: self._tensor(name, decode=False) for name in names}
        take_tensors = self._homing.take_all if self._homing.may_write else lambda module: None
        with (
            register_module_parameter_registration_hook(self._on_parameter),
            private_quantised.keeping_quantised(self._checkpoint.metadata, packed.experts),
            private_quantised.quantising_on(device, take_tensors),
            private_quantised.kernels_for(device, take_tensors),
        ):
            sources |= {name: tensor[...] for name, tensor in packed.gathered.tensors.items()}
            model = self._build(sources)
        if packed.gathered.used:
            private.remember_conversions(model, packed.conversions)
        if num := self._homing.num_written:
            _LOGGER.warning(
                "%d tensors were quantised, cast, or brought into the order of a kernel: %s written to %s for this "
                "process only; save_pretrained keeps them",
                *(num, human(self._folder.nbytes), self._folder.path),
            )
        method, experts = private_quantised.only_linear(model), private_quantised.plain_experts(model)
        if method is not None and experts:
            _LOGGER.warning(
                "%s: transformers quantises linear layers only with %s: %s stay as they are",
                *(self._where, method, some(experts, 1)),
            )
        return model

    def _gathered_packed(self) -> _PackedTensors:
        """As `gather`, for the experts of a checkpoint that stay packed: single matrices in the file, and scales."""
        config, entries = copy.deepcopy(self._options["config"]), self._checkpoint.entries
        requantises = self._options.get("quantization_config")
        if requantises or (quantizer := private_quantised.packing_quantizer(config.quantization_config)) is None:
            return _PackedTensors(None, GatheredTensors({}, set()), [])
        skeleton = build(self._cls, config, self._options["dtype"])
        mapping = self._options.get("key_mapping")
        shown = {e.name: torch.empty(e.shape, dtype=torch_dtype(e.dtype), device="meta") for e in entries.values()}
        experts = private_quantised.packed_experts(skeleton, quantizer, shown, mapping)
        with private_quantised.keeping_quantised(self._checkpoint.metadata, experts):
            private_quantised.use_quantizer(skeleton, quantizer, skeleton.dtype)
            targets = private.places(skeleton, entries, mapping)
            return _PackedTensors(experts, self._gather(skeleton, targets.by_name), targets.conversions)

    def _gather(self, skeleton: Any, places: Mapping[str, private.LoadTarget]) -> GatheredTensors:
        """As `gather`; nothing is gathered where weights may be read during the load."""
        if self._is_read:
            return GatheredTensors({}, set())
        return gather(skeleton, self._checkpoint, places, self._options.get("key_mapping"))

    def _tensor(self, name: str, *, decode: bool) -> torch.Tensor:
        """A tensor of the checkpoint for transformers."""
        tensor = self._checkpoint.tensor(name)
        if decode and name in self._coded:
            memory = self._checkpoint.lazy.pop(name)  # it is freed with the tensor
            memory.populate(0, memory.nbytes)
        return self._homing.home(name, tensor)

    def _warn_of_decompression(self) -> None:
        _LOGGER.warning(
            "%s: compressed weights are decompressed into %s for this process only (%s instead of %s), since %s",
            *(self._where, self._folder.path),
            human(sum(layout.raw_nbytes for layout in self._coded.values())),
            human(sum(layout.nbytes for layout in self._coded.values())),
            "an adapter is loaded with them"
            if self._source.adapter is not None
            else "code of the model may read them while it is loaded"
            if self._is_read
            else "doing that when they are needed takes a CUDA GPU with Triton, or codec='compressed' on a CPU",
        )

    def _populate_what_is_read(self, skeleton: Any, places: Mapping[str, private.LoadTarget]) -> None:
        """Populate compressed tensors that transformers casts, converts, or compares with others for the same
        parameter."""
        state = skeleton.state_dict(keep_vars=True)
        sources = Counter(id(state[place]) for place, _ in places.values() if place is not None)
        for name, layout in self._coded.items():
            place, is_converted = places[name]
            if place is not None:
                is_cast = str(state[place].dtype) != f"torch.{layout.dtype}"
                self._checkpoint.tensor(name)
                if is_cast or is_converted or sources[id(state[place])] > 1:
                    memory = self._checkpoint.lazy[name]
                    memory.populate(0, memory.nbytes)

    def _build(self, tensors: dict[str, Any]) -> Any:
        """Have transformers make the model of these tensors; the dict is empty afterwards."""
        allowed = self._options.get("ignore_mismatched_sizes", False)
        index = self._checkpoint.index
        self._reading = reading = private.StandInLoad(
            self._source.base,
            self._source.subfolder,
            getattr(self._options["config"], "transformers_weights", None),
            [str(mapping.path) for mapping in self._checkpoint.mappings],
            None if not index else {**(index.get("metadata") or {}), "weight_map": dict(index["weight_map"])},
            tensors,
        )
        try:
            model = self._loaded(reading)
        except Exception as error:
            self._refuse_zeros(error)
            raise
        self._refuse_zeros()
        named = [*model.named_parameters(), *model.named_buffers()]
        if empty := [name for name, tensor in named if tensor.is_meta]:
            raise CheckpointError(f"{self._where}: {len(empty)} tensors got no value, such as {some(empty)}")
        info = reading.info
        if info is None:  # the class reads its files itself
            return model
        method = private_quantised.only_linear_in_checkpoint(model)
        stacks = {name: p for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name}
        others = {*info.missing_keys, *(key for key, *_ in info.mismatched_keys)}
        others |= {name for name, stack in stacks.items() if not stack.is_floating_point()}
        # torchao quantises any parameters by their names
        if method not in (None, "torchao") and stacks.keys() & others:
            raise UnsupportedError(
                f"{self._where}: transformers loads no experts in {method}: it quantises linear layers only with it, "
                "and the checkpoint has other tensors than those of plain experts. Take one in mxfp4, float8 or "
                "compressed-tensors"
            )
        if info.mismatched_keys and not allowed:
            shapes = [f"{key}: file {tuple(a)}, model {tuple(b)}" for key, a, b in sorted(info.mismatched_keys)]
            raise CheckpointError(
                f"{self._where}: {len(shapes)} shapes differ: {'; '.join(shapes[:8])}; "
                "the config is of another model, or pass ignore_mismatched_sizes=True"
            )
        if layers := surplus.layers(model.state_dict(), info.unexpected_keys):
            _LOGGER.warning("%s: %s", self._where, layers)
        elif info.unexpected_keys and (self._allow_missing or not info.missing_keys) and not self._is_kept:
            unused = some(sorted(info.unexpected_keys))
            _LOGGER.warning(
                "%s: weights that %s does not have are left out: %s", self._where, self._cls.__name__, unused
            )
        if info.mismatched_keys:
            random = some(sorted(key for key, *_ in info.mismatched_keys))
            _LOGGER.warning("%s: weights of other shapes are left out, and have random values: %s", self._where, random)
        if missing := sorted(info.missing_keys):
            names = some(missing)
            text = f"{self._where}: the checkpoint lacks {len(missing)} weights of {self._cls.__name__}: {names}"
            if not self._allow_missing:
                prefix = self._cls.base_model_prefix
                buffers, is_mapped = {*dict(model.named_buffers())}, bool(self._options.get("key_mapping"))
                unexpected = sorted(info.unexpected_keys)
                advice = surplus.remedy(missing, unexpected, prefix, buffers=buffers, is_mapped=is_mapped)
                raise CheckpointError(f"{text}; {advice}")
            _LOGGER.warning("%s: they have random values", text)
        return model

    def _loaded(self, reading: private.StandInLoad) -> Any:
        """The return value of the class's `from_pretrained`."""
        with (
            private.sequential_loading(),
            private.warnings_of_transformers() as report,
            private.set_generation(self._cls, self._for_generation),
            reading(),
        ):
            try:
                return self._cls.from_pretrained(self._source.name, **self._options)
            except UnsupportedError:
                raise
            except RuntimeError as error:
                raise CheckpointError(f"{self._where}: transformers: {error}\n{''.join(report)}") from error

    def _refuse_zeros(self, error: Exception | None = None) -> None:
        """Raise `_ReadEarly` where code read weights that had no values yet, or wrote to them."""
        if not self._is_read and any(memory.was_read_early for memory in self._checkpoint.lazy.values()):
            raise _ReadEarly from error

    def _on_parameter(self, module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        is_elsewhere = self._reading is None or self._reading.is_elsewhere or _INNERMOST.get() is not self
        if param is not None and not is_elsewhere and not param.is_meta and private.is_loaded(param):
            self._homing.take(name, param)

    def _memories(self) -> tuple[Memory, ...]:
        return *self._checkpoint.mappings, *self._checkpoint.lazy.values()

    @property
    def _where(self) -> Path:
        return self._checkpoint.mappings[0].path.parent
