"""One canary for each private name of transformers that is used: it shows which one a new version has lost."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import itertools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import cache_utils, core_model_loading  # noqa: E402
from transformers.generation import candidate_generator  # noqa: E402

from models import TEXT  # noqa: E402
from weightstream.adapters.generation import deferred_stop, drafts  # noqa: E402
from weightstream.adapters.hf import private, private_quantised  # noqa: E402
from weightstream.adapters.hf.packed_formats import packed_stacks  # noqa: E402
from weightstream.adapters.steps import croppable_cache, static_cache  # noqa: E402

SMALL = TEXT | {"num_hidden_layers": 2, "num_key_value_heads": 2}


class Strict(transformers.LlamaForCausalLM):
    _keep_in_fp32_modules_strict = ("input_layernorm",)


def lost(name: str) -> str:
    return f"transformers {transformers.__version__} has no {name}, or uses it otherwise: mend adapters/hf/private*.py"


@contextlib.contextmanager
def needs(name: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        pytest.fail(f"{lost(name)} ({type(error).__name__}: {error})", pytrace=False)


def on_meta(cls: Any = transformers.LlamaForCausalLM, **config: Any) -> Any:
    with needs("get_init_context, ContextManagers"):
        return private.build_on_meta(cls, transformers.LlamaConfig(**SMALL, **config), torch.bfloat16)


def saved(folder: Any, **config: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **config)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return dict(model.state_dict())


class Traced:
    """A tensor of a checkpoint that records the threads that read it."""

    def __init__(self, tensor: torch.Tensor, threads: set[int]) -> None:
        self._tensor, self._threads = tensor, threads

    def __getitem__(self, key: Any) -> torch.Tensor:
        self._threads.add(threading.get_ident())
        return self._tensor[key]


def converted(tensors: dict[str, torch.Tensor]) -> tuple[Any, set[int]]:
    model, threads = on_meta(), set[int]()
    with needs("convert_and_load_state_dict_in_model, LoadStateDictConfig, get_model_conversion_mapping"):
        private.convert_into(model, {name: Traced(t, threads) for name, t in tensors.items()}, torch.bfloat16)
    return model, threads


def test_conversion_fills_a_model_on_meta(tmp_path: Any) -> None:
    tensors = saved(tmp_path)
    missing = tensors.pop("model.norm.weight")
    model, _ = converted(tensors | {"lm_head.weight": torch.zeros(3, 3), "unknown": missing})
    state = model.state_dict()
    kept = [name for name, tensor in state.items() if tensor.is_meta]
    assert kept == ["model.norm.weight", "lm_head.weight"], lost("convert_and_load_state_dict_in_model")
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items() if name not in kept)


def test_a_converter_is_copied_once_for_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies it for each tensor that it collects, of which there may be tens of thousands."""
    num, copied = [0], copy.copy

    def counting(found: Any) -> Any:
        num[0] += isinstance(found, core_model_loading.WeightConverter)
        return copied(found)

    config = transformers.MixtralConfig(**SMALL, num_local_experts=8)
    model = private.build_on_meta(transformers.MixtralForCausalLM, config, torch.bfloat16)
    _, twice, hidden = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"].shape
    shapes = {"w1": (twice // 2, hidden), "w2": (hidden, twice // 2), "w3": (twice // 2, hidden)}
    tensors = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight": torch.full(shape, expert + 1.0)
        for layer, expert, (name, shape) in itertools.product(range(2), range(8), shapes.items())
    }
    monkeypatch.setattr(copy, "copy", counting)
    private.convert_into(model, tensors, torch.bfloat16)
    assert num[0] == 4 + 2, lost("deepcopy")  # one more copy of each converter waits for another parameter
    for name, stack in model.state_dict().items():
        if "experts" in name:
            assert stack.mean((1, 2)).tolist() == [expert + 1.0 for expert in range(8)], name
    assert "__deepcopy__" not in vars(core_model_loading.WeightConverter)


def test_loading_is_sequential(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = saved(tmp_path)
    assert converted(tensors)[1] == {threading.get_ident()}, lost(private.SEQUENTIAL)
    monkeypatch.setattr(private, "SEQUENTIAL", "ANOTHER")
    if converted(tensors)[1] == {threading.get_ident()}:
        pytest.fail(f"transformers {transformers.__version__} loads in sequence anyway: {private.SEQUENTIAL} can go")


def test_loaded_parameters_are_marked(tmp_path: Any) -> None:
    tensors = saved(tmp_path)
    del tensors["lm_head.weight"]
    model, _ = converted(tensors)
    marked = [name for name, param in model.named_parameters() if private.is_loaded(param)]
    assert marked == list(tensors), lost(private.LOADED)


def test_new_names_of_weights() -> None:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2)
    model = private.build_on_meta(transformers.MixtralForCausalLM, config, torch.bfloat16)
    experts = "model.layers.1.mlp.experts"
    with needs("WeightConverter, WeightRenaming, rename_source_key"):
        names = ["norm.weight", "model.other.weight", "b", "model.layers.1.block_sparse_moe.experts.0.w1.weight"]
        found, _ = private.places(model, [*names, f"{experts}.gate_up_proj"])
        assert private.unused_names(model, found) == ["b", "model.other.weight"]
    assert found == {
        "norm.weight": ("model.norm.weight", False),
        "model.other.weight": (None, False),
        "b": (None, False),
        "model.layers.1.block_sparse_moe.experts.0.w1.weight": (f"{experts}.gate_up_proj", True),
        f"{experts}.gate_up_proj": (f"{experts}.gate_up_proj", False),
    }, lost("rename_source_key")


def test_conversions_are_remembered() -> None:
    """They are stored on the model, for `save_pretrained` to revert."""
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2)
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    for names, num in (([name], 1), (["model.norm.weight"], 0)):
        model = private.build_on_meta(transformers.MixtralForCausalLM, config, torch.bfloat16)
        with needs("was_used"):
            private.remember_conversions(model, private.places(model, names)[1])
        found = [t for t in model._weight_conversions if type(t).__name__ == "WeightConverter"]
        assert len(found) == num, lost("was_used")
    assert "_weight_conversions" in inspect.getsource(core_model_loading.revert_weight_conversion), lost(
        "the attribute"
    )


def test_matrices_of_experts_and_their_scales_have_a_converter_each() -> None:
    """Converters that merge experts are copied, and the module that a quantizer replaces stays the plain one."""
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2)
    about = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    model = private.build_on_meta(transformers.MixtralForCausalLM, config, torch.bfloat16)
    stacks = {n: p.shape for n, p in model.named_parameters() if n.startswith("model.layers.1.mlp.experts")}
    _, twice, hidden = stacks["model.layers.1.mlp.experts.gate_up_proj"]
    shapes = {"w1": (twice // 2, hidden), "w2": (hidden, twice // 2), "w3": (twice // 2, hidden)}
    tensors: dict[str, torch.Tensor] = {}
    for expert, (name, (rows, columns)) in itertools.product(range(2), shapes.items()):
        weight = f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"
        tensors[weight] = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")
        tensors[f"{weight}_scale_inv"] = torch.empty(rows // 8, columns // 8, device="meta")
    with needs("AutoHfQuantizer.from_config, validate_environment"):
        quantizer = private_quantised.packing_quantizer(about)
    with needs("update_weight_conversions, MergeModulelist, _original_source_patterns, add_tensor"):
        experts = private_quantised.packed_experts(model, quantizer, tensors)
    leaves = {name: stack.leaves for name, stack in experts["model.layers.1.mlp.experts"].items()}
    assert len(experts) == 1
    assert leaves["gate_up_proj"]["gate_up_proj"].shape == (2, twice, hidden), lost("update_weight_conversions")
    assert leaves["gate_up_proj"]["gate_up_proj_scale_inv"].shape == (2, twice // 8, hidden // 8)
    assert leaves["down_proj"]["down_proj"].dtype is torch.float8_e4m3fn
    kinds = [type(layer.mlp.experts) for layer in model.model.layers]
    with needs("_process_model_before_weight_loading"), private_quantised.keeping_quantised({}, experts):
        private_quantised.use_quantizer(model, quantizer, torch.bfloat16)
    assert [type(layer.mlp.experts) for layer in model.model.layers] == kinds, lost(
        "_process_model_before_weight_loading"
    )
    assert [len(packed_stacks(layer.mlp.experts)) for layer in model.model.layers] == [0, 2]


def test_names_of_quantizers_are_restored() -> None:
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    before = dict(vars(FineGrainedFP8HfQuantizer))
    with private_quantised.keeping_quantised({}, {}):
        assert dict(vars(FineGrainedFP8HfQuantizer)) != before
    assert dict(vars(FineGrainedFP8HfQuantizer)) == before


def test_a_model_is_built_on_meta_in_its_dtype() -> None:
    model = on_meta(tie_word_embeddings=True)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}, lost(
        "get_init_context"
    )
    assert model.lm_head.weight is not model.model.embed_tokens.weight, lost("no_tie_weights of get_init_context")
    with needs("tie_weights(recompute_mapping=)"):
        private.tie(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight, lost("tie_weights")


def test_dtypes_that_stay() -> None:
    with needs("_get_dtype_plan, build_glob_alternation"):
        plain = private.kept_dtype(on_meta(), torch.bfloat16)
        strict = private.kept_dtype(on_meta(Strict), torch.bfloat16)
    name = "model.layers.0.input_layernorm.weight"
    assert (plain(name), strict(name)) == (None, torch.float32), lost("_keep_in_fp32_modules_strict")
    assert strict("model.norm.weight") is None, lost("build_glob_alternation")


def test_the_dtype_of_a_load() -> None:
    config = transformers.LlamaConfig(**SMALL)
    config.dtype = None
    first = {"a": torch.int64, "b": torch.float8_e4m3fn, "c": torch.float16, "d": torch.float32}
    with needs("_get_dtype"):
        assert private.loaded_dtype("bfloat16", config, None, first) is torch.bfloat16
        assert private.loaded_dtype("auto", config, None, first) is torch.float16, lost("get_state_dict_dtype")
        assert private.loaded_dtype("auto", config, {"dtype": "float64"}, first) is torch.float64, lost("_get_dtype")
        assert private.loaded_dtype("auto", config, {}, {}) is torch.float32
    assert config.dtype is None, "the caller's config does not change"
    config.dtype = torch.bfloat16
    assert private.loaded_dtype("auto", config, {"dtype": "float64"}, first) is torch.bfloat16, lost("_get_dtype")


def test_the_class_behind_an_auto_class() -> None:
    config = transformers.LlamaConfig(**SMALL)
    with needs("_get_model_class, _model_mapping"):
        for auto, kind in (("AutoModel", "LlamaModel"), ("AutoModelForCausalLM", "LlamaForCausalLM")):
            found = private.class_behind(getattr(transformers, auto), config, None)
            assert found is getattr(transformers, kind), lost("_get_model_class")
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            private.class_behind(transformers.AutoModelForSeq2SeqLM, config, None)


def test_tensors_stand_in_for_files(tmp_path: Any) -> None:
    """Also without any files: transformers never looks for them."""
    tensors = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    del tensors["model.norm.weight"]
    tensors["more"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(3, 3)
    names = "_get_resolved_checkpoint_files", "_load_pretrained_model", "_finalize_model_loading"
    with needs(", ".join(names)):
        reading = private.StandInLoad(
            str(tmp_path), "", None, ["nowhere.safetensors"], None, remaining := dict(tensors)
        )
        with reading():
            model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert reading.info is not None, lost("_finalize_model_loading")
        found = (
            reading.info.missing_keys,
            reading.info.unexpected_keys,
            [key for key, *_ in reading.info.mismatched_keys],
        )
    assert found == ({"model.norm.weight"}, {"more"}, ["lm_head.weight"]), lost("loading_info")
    assert not remaining
    layer = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[layer], tensors[layer]), lost("_load_pretrained_model")
    with pytest.raises(OSError, match="no file named"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_warnings_are_collected_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("transformers")
    before = logger.level, list(logger.handlers)
    logger.setLevel(logging.ERROR)
    try:
        with private.warnings_of_transformers() as report:
            transformers.utils.logging.get_logger("transformers.modeling_utils").warning("\x1b[1mbold\x1b[0m")
    finally:
        logger.setLevel(before[0])
    assert report == ["bold"], lost("logger 'transformers'")
    assert capfd.readouterr().err == ""
    assert (logger.level, logger.handlers) == before


def test_a_handler_gets_the_warnings_of_its_level() -> None:
    logger, shown = logging.getLogger("transformers"), list[str]()
    handlers = [logging.Handler(level) for level in (logging.WARNING, logging.ERROR)]
    for handler in handlers:
        handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
    try:
        with private.warnings_of_transformers():
            logger.warning("once")
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
    assert shown == ["once"]


def test_static_caches() -> None:
    with needs("cache_utils.StaticCache, StaticLayer, StaticSlidingWindowLayer"):
        cache = cache_utils.StaticCache(config=transformers.LlamaConfig(**SMALL), max_cache_len=4)
        window = cache_utils.StaticSlidingWindowLayer(max_cache_len=4, sliding_window=4)
        assert static_cache.is_static(cache), lost("StaticCache")
        assert not static_cache.is_static(cache_utils.DynamicCache())
        for layer in (*cache.layers, window):
            assert (layer.is_initialized, layer.max_cache_len) == (False, 4), lost("is_initialized, max_cache_len")
            assert callable(layer.update), lost("update")
            assert callable(layer.get_seq_length), lost("get_seq_length")
            assert callable(layer.get_mask_sizes), lost("get_mask_sizes")
    assert vars(window)[private.STATIC_WINDOW_COUNT] == 0, lost(private.STATIC_WINDOW_COUNT)
    states, one = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 1, 2)
    window.update(states, states)
    before = {name: value for name, value in vars(window).items() if not torch.is_tensor(value)}
    window.update(one, one)
    changed = {name for name, value in before.items() if vars(window)[name] != value}
    assert changed == {private.STATIC_WINDOW_COUNT}, (
        f"a static window counts in {changed}: adapt adapters/hf/private.py"
    )
    assert vars(window)[private.STATIC_WINDOW_COUNT] == 4, lost(private.STATIC_WINDOW_COUNT)


def test_a_static_cache_replaces_a_dynamic_one() -> None:
    config = transformers.MistralConfig(**SMALL, sliding_window=4)
    with torch.device("meta"):
        model = transformers.MistralForCausalLM(config)
        cache, states = cache_utils.DynamicCache(config=config), torch.ones(1, 2, 3, 16)
        for index in range(config.num_hidden_layers):
            cache.update(states, states, index)
    found = static_cache.static(model, cache, 16, 12)
    assert static_cache.is_static(found), lost("StaticCache")
    for layer in found.layers:
        assert layer.keys.shape == layer.values.shape == (1, 2, 4, 16), lost("update")
        assert vars(layer)[private.STATIC_WINDOW_COUNT] == 12
    assert static_cache.static(model, found, 16, 12) is None
    assert static_cache.static(on_meta(), cache_utils.DynamicCache(), 16, 12) is not None


def test_models_that_work_with_a_static_cache() -> None:
    assert static_cache.unsuited(on_meta()) is None, lost("_can_compile_fullgraph")
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64)
    with torch.device("meta"):
        reason = static_cache.unsuited(transformers.MambaForCausalLM(config))
    assert reason is not None, lost("_can_compile_fullgraph")


def test_growing_caches() -> None:
    states = torch.ones(1, 1, 3, 2)
    window = cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
    window.update(states, states)
    assert vars(window)[private.WINDOW_COUNT] == 3, lost(private.WINDOW_COUNT)
    text = inspect.getsource(cache_utils)
    is_old = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17)
    for name in private.BY_POSITION:
        assert f"self.{name}" in text or (is_old and name == "indexer_keys"), lost(f"{name} of a cache's layer")
    assert {name for name, v in vars(window).items() if torch.is_tensor(v) and v.dim() > 1} == {"keys", "values"}


def test_the_operator_of_experts() -> None:
    importlib.import_module("transformers.integrations.moe")  # registers it
    namespace, _, name = private.GROUPED_MM.partition("::")
    assert hasattr(getattr(torch.ops, namespace), name), lost(private.GROUPED_MM)


def test_the_progress_bar_setting_is_restored() -> None:
    control = transformers.utils.logging
    before = control.is_progress_bar_enabled()
    for wanted, shown in ((None, before), (False, False), (True, True)):
        with private.progress_bar(wanted):
            assert control.is_progress_bar_enabled() == shown, lost("utils.logging")
        assert control.is_progress_bar_enabled() == before


def test_a_loop_that_checks_a_step_late() -> None:
    with needs(f"generation.utils.{deferred_stop.NAME}"):
        late = getattr(importlib.import_module("transformers.generation.utils"), deferred_stop.NAME)
        asked = (None, False)
        supported = [late.is_supported(torch.device(kind), *asked, is_assistant=False) for kind in ("mps", "cpu")]
    assert supported == [True, False], lost("is_supported of mps alone")
    assert {"__call__", "finish"} <= vars(late).keys(), lost("finish, which reports the steps to undo")


def test_patched_names_always_exist() -> None:
    """Another thread may look them up."""

    class Kept(type):
        def __delattr__(cls, name: str) -> None:
            raise AssertionError(f"{name} is gone for a moment")

    class Owner(metaclass=Kept):
        there = 1

    with private.set_inside(Owner, "there", 2):
        assert Owner.there == 2
    assert Owner.there == 1

    bare = type("Bare", (), {})
    with private.set_inside(bare, "new", 3):
        assert bare.new == 3  # type: ignore[attr-defined]
    assert not hasattr(bare, "new")


# -- several tokens a pass ---------------------------------------------------------------------------------------------


def tiny() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()


def looked_up(model: Any, **more: Any) -> Any:
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    chosen = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None} | more
    return model.generate(ids, pad_token_id=0, **chosen)


def test_candidates_and_the_cache_are_made_by_methods_of_the_model() -> None:
    """What `private.generating` replaces, and the arguments with which it is called."""
    model, calls = tiny(), list[Any]()
    make, put = private.candidate_generator_method(model), model._prepare_cache_for_generation

    def made(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, set(kwargs)))
        return make(*args, **kwargs)

    def put_cache(config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, length: int) -> None:
        calls.append((config.max_length, batch, length))
        put(config, model_kwargs, mode, batch, length)
        assert private.cache_argument() in model_kwargs, lost("the name of the cache's argument")

    with needs("_get_candidate_generator, _prepare_cache_for_generation"):
        with private.generating(model, make_candidates=made, put_cache=put_cache):
            looked_up(model)
        (length, batch, num_positions), (args, names) = calls
    assert (length, batch, num_positions) == (11, 1, 10), lost("_prepare_cache_for_generation")
    assert not args, lost("_get_candidate_generator")
    assert "generation_config" in names, lost("_get_candidate_generator")
    assert not {"_get_candidate_generator", "_prepare_cache_for_generation"} & set(vars(model))


def test_a_generator_of_candidates() -> None:
    model, calls = tiny(), list[Any]()

    class Watched:
        requires_model_outputs = False

        def get_candidates(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
            calls.append(ids.shape[1])
            return torch.cat([ids, ids[:, :2]], 1) if len(calls) > 1 else ids, None

        def update_candidate_strategy(self, ids: torch.Tensor, scores: torch.Tensor, num_matches: Any) -> None:
            calls.append((ids.shape[1], scores.shape[1], int(num_matches)))

    put = model._prepare_cache_for_generation
    with private.generating(model, make_candidates=lambda **_: Watched(), put_cache=put):
        looked_up(model)
    for before, (after, num_rows, matches) in zip(calls[::2], calls[1::2], strict=True):
        assert after == before + matches + 1, lost("get_candidates, update_candidate_strategy")
        assert num_rows == (1 if before == 5 else 3), lost("scores of all candidates, and of one token more")


def test_a_subclass_of_the_static_cache_may_be_cropped() -> None:
    """5.17 refuses a `StaticCache` by its exact type. 5.24 refuses none; the cache of drafts is a subclass in both."""
    model, want = tiny(), looked_up(tiny())
    made: list[Any] = []

    def put_cache(config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, length: int) -> None:
        made.append(croppable_cache.croppable(model, length, 4).cache)
        model_kwargs[private.cache_argument()] = made[0]

    with needs("Cache.crop, StaticLayer.lazy_initialization"), private.generating(model, put_cache=put_cache):
        assert torch.equal(looked_up(model), want)
    assert type(made[0]) is not cache_utils.StaticCache
    assert isinstance(made[0], cache_utils.StaticCache)
    layer = made[0].layers[0]
    assert int(layer.cumulative_length) == want.shape[1] - 1, lost("crop by a negative number")
    assert (layer.max_cache_len, layer.keys.shape[2]) == (10, 14), lost("StaticLayer.lazy_initialization")


def test_the_length_of_a_static_cache_is_kept() -> None:
    model, config = tiny(), transformers.GenerationConfig()
    chosen = {"cache_implementation": "static", "disable_compile": True, "pad_token_id": 0, "do_sample": False}
    ids = torch.tensor([[5, 6, 7]])
    assert private.static_cache_length(model, config, 4) == 4
    for num, length in ((9, 11), (3, 11)):
        out = model.generate(ids, max_new_tokens=num, eos_token_id=None, return_dict_in_generate=True, **chosen)
        found = out.get(private.cache_argument()).layers[0].max_cache_len
        assert found == private.static_cache_length(model, config, 3 + num - 1) == length, lost(
            "_previous_max_cache_length"
        )
    if hasattr(config, "max_cache_len"):
        config.max_cache_len = 20
        assert private.static_cache_length(model, config, 4) == 20


def test_stopping_criteria_are_made_by_a_method_of_the_model() -> None:
    model, calls = tiny(), list[int]()

    def wrap(criteria: Any) -> Any:
        assert {type(each).__name__ for each in criteria} <= {"MaxLengthCriteria", "EosTokenCriteria"}, lost(
            "MaxLengthCriteria, EosTokenCriteria"
        )
        return lambda ids, scores, **_: [calls.append(ids.shape[1]), criteria(ids, scores)][1]

    with needs("_get_stopping_criteria"), private.stopping_by(model, wrap):
        ids = looked_up(model, eos_token_id=2)
    assert calls[-1] == ids.shape[1]
    assert "_get_stopping_criteria" not in vars(model)


def test_settings_of_a_draft() -> None:
    """`drafts` reads and sets these by name."""
    config = transformers.GenerationConfig()
    for name in (*drafts._OF_SAMPLING, "do_sample", "stop_strings", "num_assistant_tokens"):
        assert hasattr(config, name), lost(name)
    source = inspect.getsource(candidate_generator)
    for name in ("self.mtp_model", "self.device", "self.main_model_output_embeddings", "self.probs"):
        assert name in source, lost(name)
    assert "_eos_token_tensor" in inspect.getsource(transformers.generation.utils), lost("_eos_token_tensor")
    assert "torch.multinomial(probs[0, :, :]" in inspect.getsource(transformers.GenerationMixin._assisted_decoding), (
        lost("the draw of all tokens of a pass")
    )


# -- interrupts --------------------------------------------------------------------------------------------------------


class Plain:
    there = 1


CHANGES: dict[str, tuple[Any, str]] = {
    "an environment variable": (private.sequential_loading, "sequential_loading"),
    "handlers and a level": (private.warnings_of_transformers, "warnings_of_transformers"),
    "bars": (lambda: private.progress_bar(False), "progress_bar"),
    "an attribute": (lambda: private.set_inside(Plain, "there", 2), "set_inside"),
    "a new attribute": (lambda: private.set_inside(Plain, "new", 2), "set_inside"),
}


def process_wide() -> Any:
    logger, control = logging.getLogger("transformers"), transformers.utils.logging
    held = {key: value for key, value in vars(Plain).items() if not key.startswith("__")}
    return dict(os.environ), list(logger.handlers), logger.level, control.is_progress_bar_enabled(), held


@pytest.mark.parametrize("change", CHANGES)
def test_an_interrupt_on_any_line_restores_the_patches(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(private.SEQUENTIAL, raising=False)
    transformers.utils.logging.enable_progress_bar()
    make, name = CHANGES[change]
    names = (name, "put_back")
    before, tracing, num_lines = process_wide(), sys.gettrace(), 0
    for wanted in itertools.count(1):
        lines: list[int] = []

        def on_line(frame: Any, event: str, _: Any, wanted: int = wanted, lines: list[int] = lines) -> Any:
            if event == "line":
                lines.append(frame.f_lineno)
                if len(lines) == wanted:
                    raise KeyboardInterrupt
            return on_line

        sys.settrace(lambda frame, *_, on_line=on_line: on_line if frame.f_code.co_name in names else None)
        try:
            with make():
                pass
        except KeyboardInterrupt:
            num_lines += 1
        finally:
            sys.settrace(tracing)
        assert process_wide() == before
        if len(lines) < wanted:
            break
    assert num_lines >= 4
