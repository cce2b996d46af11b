"""Loading pipelines: from a folder or a single file of diffusers; the weights view the files.

diffusers and transformers build each component and assign its tensors. They read views of the mapped files. Tensors
that they compute (in another dtype, or a projection split in three) are written to the offload folder as they are
assigned, so that one at a time is in memory. A skeleton is the same pipeline with shapes instead of weights. Knows no
plan and no device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from torch import nn

from weightstream.adapters.diffusers import private
from weightstream.adapters.diffusers.folder import (
    around,
    check_keywords,
    check_variant,
    common_dtype,
    folder_of,
    load_dtype,
    open_checkpoints,
    required,
    skeleton_of,
    specs_of,
)
from weightstream.adapters.hf.file_backing import Homing
from weightstream.adapters.hf.hub import (
    DESCRIBING,
    check_dtype,
    is_quantised,
    local_path,
    refused_as_checkpoint,
    skeleton,
)
from weightstream.adapters.hf.load import LoadedModel, load_pretrained
from weightstream.errors import CheckpointError, ConfigError, UnsupportedError
from weightstream.plan.units import some
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import Memory

_LOGGER = logging.getLogger("weightstream")
_LOADING = threading.RLock()  # a load replaces functions of diffusers, for the whole process
_OF_THE_HUB = ("revision", "local_files_only", "token", "cache_dir")
_AS_IT_IS = ("low_cpu_mem_usage", "use_safetensors")
_SKETCHED = (*DESCRIBING, "*.txt", "*.model", "*.jinja")
_CPU = torch.device("cpu")
_Gguf: Any = diffusers.GGUFQuantizationConfig


@dataclass(kw_only=True, slots=True)
class LoadedPipeline:
    """A pipeline whose components are in evaluation mode.

    `memories`: those that weights view, by component; of the key "" for all that have no entry. `folders` must outlive
    the pipeline.
    """

    pipe: Any = None
    memories: dict[str, tuple[Memory, ...]] = field(default_factory=dict)
    folders: list[OffloadFolder] = field(default_factory=list)

    def of(self, component: str) -> tuple[Memory, ...]:
        """The memories that the weights of a component may view."""
        return self.memories.get(component, self.memories.get("", ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """Options of a load, for all components."""

    dtype: str | torch.dtype
    variant: str | None
    offload_folder: Path | None
    verify: bool
    decode: Callable[[Collection[str]], bool]
    device: torch.device
    may_write: bool


def load_pipeline(
    path_or_repo_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    variant: str | None = None,
    base: str | Path | None = None,
    offload_folder: Path | None = None,
    progress: bool | None = None,
    verify_checksums: bool = True,
    expect: Callable[[torch.dtype, int], object] = lambda dtype, nbytes: None,
    decode: Callable[[Collection[str]], bool] = lambda dtypes: False,
    device: torch.device = _CPU,
    may_write: bool = True,
    **kwargs: Any,
) -> LoadedPipeline:
    """Load a pipeline without a second copy of its weights in memory.

    Arguments are those of `load_pretrained`, and of `weightstream.pipeline_from_pretrained`. `expect` is called once,
    with the dtype that most components have and the bytes of all. Raises `CheckpointError`, `ConfigError`,
    `UnsupportedError`, `StoreError`.
    """
    check_dtype(dtype)
    options = _Options(
        dtype=dtype,
        variant=variant,
        offload_folder=offload_folder,
        verify=verify_checksums,
        decode=decode,
        device=device,
        may_write=may_write,
    )
    kwargs = {name: value for name, value in kwargs.items() if not (name in _AS_IT_IS and value)}
    hub = {name: kwargs.pop(name) for name in _OF_THE_HUB if name in kwargs}
    path = Path(path_or_repo_id).expanduser()
    with refused_as_checkpoint(path_or_repo_id, "load", "diffusers"), private.progress_bars(progress):
        if path.is_file():
            if path.suffix == ".safetensors":
                checkpoint = Checkpoint.open(path)
                expect(load_dtype(dtype, checkpoint), checkpoint.plain_nbytes)
            return _single_file(path, base, options, hub | kwargs)
        if base is not None:
            raise ConfigError("base goes with a single file; a folder or repository is complete")
        folder = folder_of(path_or_repo_id, variant, progress, **hub)
        check_keywords(folder, kwargs)
        check_variant(folder, specs := specs_of(folder), variant)
        checkpoints = open_checkpoints(folder, specs, variant)
        common = common_dtype(folder, checkpoints) if dtype == "auto" else load_dtype(dtype, None)
        expect(common, sum(checkpoint.plain_nbytes for checkpoint in checkpoints.values() if checkpoint is not None))
        return _assembled(folder, specs, options, kwargs, checkpoints)


class PipelineSkeleton(NamedTuple):
    """A pipeline with shapes instead of weights, and the checkpoints of its components.

    A checkpoint is None where the files are not on this machine, and for a quantised component.
    """

    pipe: Any
    checkpoints: dict[str, Checkpoint | None]


def sketch_components(
    path_or_repo_id: str | Path, *, dtype: str | torch.dtype = "auto", variant: str | None = None
) -> PipelineSkeleton:
    """The pipeline that `load_pipeline` would load, without its weights. Raises as `load_pipeline`."""
    check_dtype(dtype)
    path = Path(path_or_repo_id).expanduser()
    _, folder = local_path(path_or_repo_id, remote_code=False, files=_SKETCHED)
    if path.is_file():
        raise UnsupportedError(f"{path}: a single file cannot be planned unloaded: pass the pipeline's folder")
    components: dict[str, Any] = {}
    with refused_as_checkpoint(path_or_repo_id, "build", "diffusers"), private.progress_bars(False):
        specs = specs_of(folder)
        check_variant(folder, specs, variant)
        checkpoints = open_checkpoints(folder, specs, variant)
        common = common_dtype(folder, checkpoints) if dtype == "auto" else load_dtype(dtype, None)
        for name, kind in specs.items():
            inside, checkpoint = folder / name, checkpoints[name]
            if is_quantised(inside):
                if checkpoint is None:
                    raise UnsupportedError(f"{inside}: the plan of a quantised model needs its files: get them first")
                options = _Options(
                    dtype=dtype,
                    variant=variant,
                    offload_folder=None,
                    verify=False,
                    decode=lambda dtypes: False,
                    device=_CPU,
                    may_write=False,
                )
                components[name] = _component(kind, inside, options, opened=checkpoint).model
                checkpoints[name] = None
                continue
            wanted = common if checkpoint is None else load_dtype(dtype, checkpoint)
            if issubclass(kind, transformers.PreTrainedModel):
                place = inside if checkpoint is None else required(inside, variant)
                components[name], checkpoints[name] = skeleton(place, dtype=wanted, model_class=kind)
            else:
                is_own = checkpoint is not None or dtype != "auto"
                components[name] = skeleton_of(kind, inside, wanted, is_own=is_own)
        return PipelineSkeleton(around(folder, components), checkpoints)


# -- loading -----------------------------------------------------------------------------------------------------------


def load_component(
    kind: Any, folder: Path, offload_folder: Path, *, variant: str | None = None, may_write: bool = True
) -> LoadedModel:
    """One component, in the dtype of its files. Raises as `load_pipeline`."""
    options = _Options(
        dtype="auto",
        variant=variant,
        offload_folder=offload_folder,
        verify=True,
        decode=lambda dtypes: False,
        device=_CPU,
        may_write=may_write,
    )
    with refused_as_checkpoint(folder, "load", "diffusers"), private.progress_bars(False):
        return _component(kind, folder, options)


def _assembled(
    folder: Path,
    specs: Mapping[str, Any],
    options: _Options,
    kwargs: dict[str, Any],
    checkpoints: Mapping[str, Checkpoint | None],
) -> LoadedPipeline:
    """Load the components of a folder one by one, and make the pipeline."""
    keywords = {name: folder / name for name in specs} | kwargs
    opened = {name: checkpoint for name, checkpoint in checkpoints.items() if name not in kwargs}
    with _components(specs, keywords, options, folder, opened) as components:
        components.loaded.pipe = around(folder, components.keywords)
    return components.loaded


class _Components(NamedTuple):
    """The keywords that make a pipeline, and what the components among them view."""

    keywords: dict[str, Any]
    loaded: LoadedPipeline


@contextmanager
def _components(
    specs: Mapping[str, Any],
    keywords: Mapping[str, Any],
    options: _Options,
    folder: Path,
    opened: Mapping[str, Checkpoint | None],
) -> Iterator[_Components]:
    """Load the components whose keyword is a path. `opened`: checkpoints whose headers are read already."""
    components = _Components(dict(keywords), LoadedPipeline())
    with ExitStack() as on_failure:
        for name, kind in specs.items():
            if isinstance(place := components.keywords.get(name), str | Path):
                part = _component(kind, Path(place), options, folder / name, opened.get(name))
                components.keywords[name] = part.model
                components.loaded.memories[name] = (*part.mappings, *part.lazy)
                if part.folder is not None:
                    components.loaded.folders.append(part.folder)
                    on_failure.callback(part.folder.close)
        yield components
        on_failure.pop_all()


def _component(
    kind: Any, place: Path, options: _Options, described: Path | None = None, opened: Checkpoint | None = None
) -> LoadedModel:
    """Load a component from a folder, or from a single file with its config in the folder `described`.

    `opened`: the checkpoint in the folder, if its headers are read already.
    """
    if issubclass(kind, transformers.PreTrainedModel) and place.is_dir():
        file, dtype = required(place, options.variant), options.dtype
        if dtype == "auto" and not is_quantised(place):
            dtype = load_dtype(dtype, opened or Checkpoint.open(file))  # transformers would take that of its config
        return load_pretrained(
            file,
            model_class=kind,
            dtype=dtype,
            offload_folder=options.offload_folder,
            verify_checksums=options.verify,
            decode=options.decode,
            device=options.device,
            may_write=options.may_write,
        )
    keywords: dict[str, Any]
    if place.is_dir():
        file, make = required(place, options.variant), kind.from_pretrained
        variant = options.variant if f".{options.variant}." in file.name else None
        keywords = {"variant": variant, "use_safetensors": True, "local_files_only": True}
    elif not hasattr(kind, "from_single_file"):
        raise UnsupportedError(f"{place}: {kind.__name__} cannot be loaded from a single file")
    else:
        file, make, keywords = place, kind.from_single_file, {"config": str(described)}
    load = _Load(file, options, kind, opened)
    with load.viewing():
        model = make(str(place), **keywords, **load.options)
        load.finish(model)
    return load.loaded(model)


def _single_file(path: Path, base: str | Path | None, options: _Options, kwargs: dict[str, Any]) -> LoadedPipeline:
    """Load a pipeline from one file; components that it lacks are in `kwargs`."""
    load = _Load(path, options, None)
    kind, config = private.pipeline_of(load.checkpoint.entries, path, base)
    folder = Path(config)
    if folder.is_dir():
        check_keywords(folder, kwargs.keys() - set(_OF_THE_HUB))
    specs = specs_of(folder) if folder.is_dir() else {}
    with _components(specs, kwargs, options, folder, {}) as components, load.viewing():
        loaded = components.loaded
        loaded.pipe = kind.from_single_file(str(path), config=config, **components.keywords, **load.options)
        for name, part in loaded.pipe.components.items():
            if isinstance(part, nn.Module) and name not in loaded.memories:
                load.finish(part)
    of_file = load.loaded(loaded.pipe)
    loaded.memories[""] = *of_file.mappings, *of_file.lazy
    loaded.folders += [of_file.folder] if of_file.folder else []
    return loaded


class _Load:
    """The load of a model of diffusers, or of a whole pipeline in one file."""

    def __init__(self, file: Path, options: _Options, kind: Any, opened: Checkpoint | None = None) -> None:
        self._options = options
        self._kind = kind
        self._file = file
        is_gguf = file.suffix == ".gguf"
        self.checkpoint = opened or (private.GgufFile(file) if is_gguf else Checkpoint.open(file))
        for note in self.checkpoint.notes:
            _LOGGER.warning("%s", note)
        if options.verify:
            self.checkpoint.verify()
        self._folder = OffloadFolder(options.offload_folder) if options.may_write else None
        self._homing = Homing(self._memories, self._folder)
        # tensors of a GGUF file that are not quantised are in float32 to lose nothing; the model has them in this dtype
        self._dtype = load_dtype(options.dtype, None if is_gguf else self.checkpoint)
        coded = [entry.layout for entry in self.checkpoint.entries.values() if entry.layout is not None]
        is_cast = any(getattr(torch, layout.dtype) is not self._dtype for layout in coded)
        self._decodes = bool(coded) and (is_cast or kind is None or options.decode({layout.dtype for layout in coded}))

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of diffusers' own load."""
        keywords: dict[str, Any] = {"torch_dtype": self._dtype}
        if self._file.suffix == ".gguf":
            keywords["quantization_config"] = _Gguf(compute_dtype=self._dtype)
        elif self._kind is not None and self._file.parent.is_dir() and is_quantised(self._file.parent):
            keywords["device_map"] = {"": str(self._options.device)}  # where its library makes the weights
        return keywords

    def loaded(self, model: Any) -> LoadedModel:
        """The model with the memories that it views, and the folder if anything was written there."""
        folder = self._folder if self._folder is not None and self._folder.mappings else None
        return LoadedModel(
            model=model,
            checkpoint=self.checkpoint,
            mappings=(*self.checkpoint.mappings, *(folder.mappings if folder else ())),
            lazy=tuple(self.checkpoint.lazy.values()),
            folder=folder,
        )

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Inside, diffusers reads views of files and assigns tensors that view files. One load at a time."""
        with _LOADING:
            try:
                with private.loading(self._read, self._set):
                    yield
            except BaseException:
                if self._folder is not None:
                    self._folder.close()
                raise
        if self._folder is not None and not self._folder.mappings:
            self._folder.close()

    def _memories(self) -> tuple[Memory, ...]:
        return *self.checkpoint.mappings, *self.checkpoint.lazy.values()

    def _read(self, path: Path) -> dict[str, torch.Tensor] | None:
        """The tensors of a file of this load; None for any other file."""
        mapping = {mapping.path.resolve(): mapping for mapping in self.checkpoint.mappings}.get(path.resolve())
        if mapping is None or not self._homing.is_of_this_thread:
            return None
        return {name: self._tensor(name) for name, entry in self.checkpoint.entries.items() if entry.mapping is mapping}

    def _set(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._homing.home(name, tensor) if self._homing.is_of_this_thread else tensor

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self.checkpoint.tensor(name)
        if self.checkpoint.entries[name].layout is None:
            return tensor
        if self._decodes or private.is_kept_in_float32(self._kind, name):
            memory = self.checkpoint.lazy.pop(name)  # freed with the tensor
            memory.populate(0, memory.nbytes)
            return self._homing.home(name, tensor)
        return tensor

    def finish(self, model: Any) -> None:
        """Check that each weight has a value, and let it view a file. Raises `CheckpointError`."""
        if missing := [name for name, param in model.named_parameters() if param.is_meta]:
            raise CheckpointError(f"{self._file}: {len(missing)} tensors got no value, such as {some(missing)}")
        for module in model.modules():
            if isinstance(model, transformers.PreTrainedModel) or getattr(model, "hf_quantizer", None):
                self._homing.take_all(module)
        for memory in self.checkpoint.lazy.values():
            memory.forget()
        model.eval()
