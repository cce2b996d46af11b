"""Names of transformers that it does not promise to keep; only this file and private_quantised.py spell any.

A test of each name (tests/adapters/hf/test_private.py) fails where a new version has lost it. transformers is imported
inside of functions, as the import takes seconds. Knows no weights or plans.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from weightstream.runtime.tensors.undo import Undo

SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"  # an environment variable
LOADED = "_is_hf_initialized"  # an attribute of a parameter that has its values from the file
GROUPED_MM = "transformers::grouped_mm_fallback"  # an operator
WINDOW_COUNT = "cumulative_length"  # of a cache's layer: the positions that it has seen; a tensor if it is static
STATIC_WINDOW_COUNT = "cumulative_length_int"  # the same number: all that a static layer keeps in Python
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
    """Collects the warnings of transformers: only its load report names the keys that it could not convert.

    All but the report, a table of missing and unexpected keys, are shown, too: the caller writes a line about these.
    """
    report: list[str] = []
    logger = logging.getLogger("transformers")
    handlers, level = logger.handlers, logger.level

    def collect(record: logging.LogRecord) -> None:
        report.append(re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()))
        if level <= logging.WARNING and "LOAD REPORT" not in report[-1]:  # a silenced log stays silent
            for each in handlers:
                if record.levelno >= each.level:
                    each.handle(record)

    handler = logging.Handler(logging.WARNING)
    handler.emit = collect  # type: ignore[method-assign]
    with undone() as undo:
        undo.add(setattr, logger, "handlers", handlers)
        undo.add(logger.setLevel, level)
        logger.handlers = [handler]
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

    state, transforms = model.state_dict(), conversions_of(model, mapping)
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


def conversions_of(model: Any, mapping: Mapping[str, str] | None = None) -> list[Any]:
    """The conversions that transformers applies to the tensors of a checkpoint for this model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    quantizer = getattr(model, "hf_quantizer", None)
    conversions: list[Any] = get_model_conversion_mapping(model, key_mapping=mapping, hf_quantizer=quantizer)
    return conversions


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


def is_grouped_product(func: Any) -> bool:
    """Whether this is a function by which grouped_mm multiplies groups of rows by their matrices."""
    return getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm", GROUPED_MM.rpartition("::")[2])


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

    config = LoadStateDictConfig(dtype=dtype, weight_mapping=conversions_of(model, mapping))
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
