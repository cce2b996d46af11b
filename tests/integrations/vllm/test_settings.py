"""Settings of an engine, in `additional_config` and in vLLM's own flags, and refusals before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from engines import group
from torch import distributed
from vllm.model_executor.model_loader import utils as loader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.offloader import base as theirs

from weightstream.api.offloaders import PrefetchOffloader
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.integrations.vllm import memory as room_of
from weightstream.integrations.vllm import plugin as host
from weightstream.integrations.vllm.loading import processed_on_host
from weightstream.integrations.vllm.plugin import settings_of, why_refused

FLAGS: dict[str, Any] = {"offload_group_size": 0, "offload_num_in_group": 1, "offload_prefetch_step": 1}


def config(settings: Any, *, gib: float = 0.0, backend: str = "auto", **flags: Any) -> Any:
    """The part of vLLM's configuration that weightstream reads, with vLLM's classes if it is installed."""
    from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

    offload = OffloadConfig(
        offload_backend=backend,
        prefetch=PrefetchOffloadConfig(**{**FLAGS, **flags}),
        uva=UVAOffloadConfig(cpu_offload_gb=gib),
    )
    return SimpleNamespace(
        additional_config=settings,
        offload_config=offload,
        scheduler_config=SimpleNamespace(max_num_seqs=32),
        model_config=SimpleNamespace(max_model_len=8192),
        speculative_config=None,
    )


def asked(**settings: Any) -> Any:
    return {"weightstream": settings}


@pytest.mark.parametrize("settings", [None, {}, {"other": {}}])
def test_without_the_key_nothing_is_offloaded(settings: Any) -> None:
    assert settings_of(config(settings)) is None


def test_a_step_is_planned_for_the_largest_batch() -> None:
    found = settings_of(config(asked(device_budget="6GiB")))
    assert found is not None
    assert (found.batch, found.tokens, found.context, found.device_budget) == (32, 1, 8192, 6 << 30)
    found = settings_of(config(asked(device_budget="6GiB", batch=2, tokens=512)))
    assert found is not None
    assert (found.batch, found.tokens) == (2, 512)


@pytest.mark.parametrize(("settings", "tokens"), [({}, 6), ({"tokens": 2}, 2)])
def test_a_step_is_planned_for_the_drafts_that_it_verifies(settings: dict[str, Any], tokens: int) -> None:
    configuration = config(asked(device_budget="6GiB", **settings))
    configuration.speculative_config = SimpleNamespace(num_speculative_tokens=5)
    found = settings_of(configuration)
    assert found is not None
    assert (found.batch, found.tokens) == (32, tokens)


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        (group(2, 4, 2), "prefetch"),
        ({"gib": 3.0}, "uva"),
        ({}, "none"),
        (group(1) | {"gib": 1.0}, "prefetch"),
        (group(1) | {"gib": 1.0, "backend": "uva"}, "uva"),
        (group(1) | {"gib": 1.0, "backend": "prefetch"}, "prefetch"),
    ],
)
def test_vllms_flags_apply_if_no_other_setting_is_chosen(flags: dict[str, Any], backend: str) -> None:
    for settings in (asked(), asked(codec="none")):
        found = settings_of(config(settings, **flags))
        assert found is not None
        assert found.backend == backend
        if backend == "prefetch":
            assert found.prefetch.offload_group_size == flags["offload_group_size"]


def test_own_settings_override_vllms_flags() -> None:
    found = settings_of(config(asked(device_budget="6GiB"), **group(2, 4, 2)))
    assert found is not None
    assert found.backend == "none"
    found = settings_of(config(asked(offload_group_size=1), **group(2, 4, 2)))
    assert found is not None
    assert (found.prefetch.offload_group_size, found.prefetch.offload_num_in_group) == (1, 1)
    found = settings_of(config(asked(offload_prefetch_step=2, tokens=None), **group(1, 4, 2)))
    assert found is not None
    assert found.prefetch.model_dump(exclude={"offload_params"}) == group(2, 4, 2)


@pytest.mark.parametrize("settings", [{"offload_prefetch_step": 2}, {"cpu_offload_params": ["mlp"]}])
def test_a_backend_without_an_amount_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="offload_group_size or cpu_offload_gb"):
        settings_of(config(asked(**settings)))


def test_keys_of_the_plan_are_not_settings() -> None:
    assert settings_of(config(asked(device_budget="6GiB", units="0123"))) is not None


@pytest.mark.parametrize(
    ("settings", "text"),
    [(asked(device_budgt="6GiB"), "device_budgt.*device_budget"), ({"weightstream": "6GiB"}, "pass a map")],
)
def test_a_misspelt_setting_is_named(settings: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings_of(config(settings))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"enable_eplb": True}, "expert load balancing"),
        ({"enable_elastic_ep": True}, "elastic"),
        ({"use_ubatching": True}, "dual batch overlap"),
        ({"weight_transfer_config": object()}, "weight transfer"),
        ({"data_parallel_size": 2}, "data parallelism"),
    ],
)
def test_unsupported_configurations_are_refused_with_the_reason(changes: dict[str, Any], text: str | None) -> None:
    parallel = {"enable_eplb": False, "enable_elastic_ep": False, "use_ubatching": False, "data_parallel_size": 1}
    configuration = SimpleNamespace(**{"weight_transfer_config": None, **changes})
    configuration.parallel_config = SimpleNamespace(**{**parallel, **changes})
    found = why_refused(configuration)
    assert found is None if text is None else text in (found or "")


def _learns(rank: int, steps: int, file: str) -> None:
    """A rank of two that learns for a number of steps, each of which waits for a step of the other rank."""
    store = distributed.FileStore(file, 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    world = SimpleNamespace(world_size=2, cpu_group=distributed.group.WORLD)
    host.get_world_group = lambda: world  # type: ignore[attr-defined]
    engine = object.__new__(host.VllmWorker)
    engine._worker = SimpleNamespace(device=torch.device("cpu"))
    engine._profile = distributed.barrier  # type: ignore[method-assign]
    for _ in range(steps):
        engine._step(None)
    engine._follow()
    distributed.barrier()
    os._exit(0)  # threads of gloo may abort an interpreter that ends


def _fails(rank: int, file: str) -> None:
    """A rank of two. The second one fails after a step."""
    store = distributed.FileStore(file, 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    world = SimpleNamespace(world_size=2, cpu_group=distributed.group.WORLD)
    host.get_world_group = lambda: world  # type: ignore[attr-defined]
    engine = object.__new__(host.VllmWorker)
    engine._worker = SimpleNamespace(device=torch.device("cpu"), model_runner=None)
    engine._profile = distributed.barrier  # type: ignore[method-assign]

    def stream() -> None:
        engine._step(None)
        if rank:
            raise ConfigError("this rank has had enough")

    engine._stream = stream  # type: ignore[assignment, method-assign]
    with pytest.raises(ConfigError, match="this rank has had enough" if rank else "rank 1 refused: this rank has"):
        engine.take_over()
    os._exit(0)


def test_a_failing_rank_reports_to_the_others(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_fails, args=(rank, str(tmp_path / "store"))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]


@pytest.mark.parametrize("steps", [(1, 3), (2, 0)])
def test_ranks_with_different_numbers_of_learning_steps_wait_for_each_other(
    tmp_path: Path, steps: tuple[int, int]
) -> None:
    context = torch.multiprocessing.get_context("spawn")
    file = str(tmp_path / "store")
    ranks = [context.Process(target=_learns, args=(rank, num, file)) for rank, num in enumerate(steps)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]


class Streaming:
    streamer = object()


@pytest.fixture
def ours() -> Iterator[Any]:
    """Our offloader instead of vLLM's, with an engine that streams."""
    engine, offloader = Streaming(), host.Offloader()
    offloader._engines = [ref(engine)]  # type: ignore[list-item]
    theirs.set_offloader(offloader)
    yield offloader
    theirs.set_offloader(theirs.NoopOffloader())
    del engine


def wrapper_of(settings: Any) -> Any:
    return SimpleNamespace(vllm_config=config(settings))


def test_an_ending_engine_leaves_the_others_their_offloader(ours: Any) -> None:
    """Runners of vLLM 0.32 do not set an offloader when they end."""
    host._shutdown(ours, lambda: theirs.set_offloader(theirs.NoopOffloader()), wrapper_of(asked()))
    assert theirs.get_offloader() is ours
    ours._engines = []
    host._shutdown(ours, lambda: None, wrapper_of(asked()))
    assert isinstance(theirs.get_offloader(), theirs.NoopOffloader)


def test_an_engine_without_offload_leaves_the_others_their_offloader(ours: Any) -> None:
    assert host._load_model(ours, lambda: theirs.set_offloader(theirs.NoopOffloader()), wrapper_of({})) is None
    assert theirs.get_offloader() is ours

    def fails() -> None:
        theirs.set_offloader(theirs.NoopOffloader())
        raise ValueError("of this test")

    with pytest.raises(ValueError, match="of this test"):
        host._standing_by(ours, partial(host._load_model, ours, fails, wrapper_of({})), None)
    assert theirs.get_offloader() is ours


@pytest.mark.parametrize("is_loading", [False, True])
@pytest.mark.parametrize("settings", [{}, asked(device_budgt=1), asked(device_budget="1GiB")])
def test_a_failed_start_leaves_the_other_engines_their_offloader(ours: Any, is_loading: bool, settings: Any) -> None:
    theirs.set_offloader(theirs.NoopOffloader())  # as its runner did when it was made

    def fails() -> None:
        raise ConfigError("of this test")

    wrapper = wrapper_of(settings)
    wrapper.vllm_config.parallel_config = SimpleNamespace(enable_eplb=True)
    with pytest.raises((ConfigError, UnsupportedError)):
        host._standing_by(ours, partial(host._load_model, ours, fails, wrapper) if is_loading else fails, wrapper)
    assert theirs.get_offloader() is ours


def test_vllms_own_offloader_besides_ours_is_refused(ours: Any) -> None:
    class Own(theirs.NoopOffloader.__base__):  # type: ignore[misc,name-defined]
        def wrap_modules(self, modules_generator: Any, prefix: str = "") -> Any:
            return list(modules_generator)

    with pytest.raises(UnsupportedError, match="vLLM's own offloader"):
        host._load_model(ours, lambda: theirs.set_offloader(Own()), wrapper_of({}))
    assert theirs.get_offloader() is ours
    ours._engines = []
    host._load_model(ours, lambda: theirs.set_offloader(Own()), wrapper_of({}))
    assert isinstance(theirs.get_offloader(), Own)  # ours does not run
    host._shutdown(ours, lambda: None, wrapper_of({}))
    assert isinstance(theirs.get_offloader(), Own)


def test_a_cache_may_be_discarded_but_weights_may_not() -> None:
    gone: list[Any] = []
    host._discard(gone.append, wrapper_of(asked()), ("kv_cache",))
    with pytest.raises(UnsupportedError, match="weights"):
        host._discard(gone.append, wrapper_of(asked()), ("weights", "kv_cache"))
    host._discard(gone.append, wrapper_of({}), ("weights",))
    assert gone == [("kv_cache",), ("weights",)]


GIB = 1 << 30


def test_a_computed_budget_leaves_memory_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may use 72 of 80 GiB; 10 are in use, 6 of them by the layers that exist."""
    allocated = [4 * GIB]
    monkeypatch.setattr(room_of, "allocated", lambda device: allocated[0])
    monkeypatch.setattr(room_of.cuda, "give_back", lambda workspaces: None)
    monkeypatch.setattr(room_of.cuda, "memory", lambda device: (69 * GIB, 80 * GIB))
    cache = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
    worker = SimpleNamespace(
        device=torch.device("cuda"),
        vllm_config=SimpleNamespace(cache_config=cache),
        get_kv_cache_spec=lambda: {str(i): SimpleNamespace(max_memory_usage_bytes=lambda _: GIB) for i in range(4)},
        init_snapshot=SimpleNamespace(free_memory=79 * GIB),
        requested_memory=72 * GIB,
    )
    room = room_of.Room(worker, 4 * GIB)
    assert room.cache_nbytes == 4 * GIB
    allocated[0] = 10 * GIB
    kept = 80 * GIB // 50  # for graphs
    assert room.left(3 * GIB) == (72 - 10 - 3) * GIB - kept
    assert room.nbytes(3 * GIB) == (72 - 10 - 3 + 6 - 4) * GIB - kept
    assert "leaves 0B for layers, after 4.0GiB of KV cache and 80.0GiB of activations" in room.arithmetic(80 * GIB)
    cache.kv_cache_memory_bytes = 7 * GIB
    assert room_of.Room(worker, 4 * GIB).cache_nbytes == 7 * GIB


@pytest.mark.parametrize(("is_on_host", "is_layer"), [(True, True), (False, True), (True, False)])
def test_processed_weights_with_a_new_name_are_moved_to_the_host(
    monkeypatch: pytest.MonkeyPatch, is_on_host: bool, is_layer: bool
) -> None:
    """vLLM moves weights back by their names, and pins them if it can. Outside of layers it has the last word."""
    said: list[Any] = []

    @contextmanager
    def theirs(module: torch.nn.Module, device: torch.device) -> Iterator[torch.nn.Module]:
        said.append("to the device")
        yield module
        said.append(("back", loader.is_pin_memory_available()))

    offloader = PrefetchOffloader(1, 1, 1)
    monkeypatch.setattr(offloader, "hold_on_host", lambda module: said.append([*dict(module.named_parameters())]))
    monkeypatch.setattr(loader, "device_loading_context", theirs)
    monkeypatch.setattr(loader, "is_pin_memory_available", lambda: True)
    module = torch.nn.Linear(4, 4, bias=False, device=None if is_on_host else "meta")
    offloader.wrap_modules([module if is_layer else torch.nn.Linear(4, 4)])
    with (
        processed_on_host(offloader),
        loader.device_loading_context(module, torch.device("cuda")),
    ):
        module.renamed = module.weight
        del module.weight
    assert said == ["to the device", ("back", False), *([["renamed"]] if is_on_host and is_layer else [])]
    assert loader.device_loading_context is theirs
    assert loader.is_pin_memory_available()


def test_weights_that_vllm_quantises_are_moved_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on no device until they are loaded; modules outside of layers stay."""
    said: list[Any] = []

    def process(module: torch.nn.Module, info: str) -> None:
        said.append(info)

    offloader = PrefetchOffloader(1, 1, 1)
    layer, head = torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta")), torch.nn.Linear(4, 4)
    monkeypatch.setattr(offloader, "hold_on_host", said.append)
    monkeypatch.setattr(layerwise, "_layerwise_process", process)
    with processed_on_host(offloader):
        offloader.wrap_modules([layer])
        for module, info in ((head, "head"), (layer[0], "layer")):
            layerwise._layerwise_process(module, info)
    assert said == ["head", "layer", layer[0]]
    assert layerwise._layerwise_process is process


def test_tensors_of_adapters_follow_to_the_device() -> None:
    """LoRA creates them where the weights of their layer are, which is then the host."""
    layer = torch.nn.Linear(4, 4)
    layer.lora_a_stacked = (torch.ones(2), torch.ones(3))
    layer.other = torch.ones(1)
    layer.scale = 2.0
    host._move_adapters([torch.nn.Sequential(layer)], torch.device("meta"))
    assert {t.device.type for t in (*layer.lora_a_stacked, layer.other)} == {"meta"}
    assert layer.weight.device.type == "cpu"


def test_a_watched_step_leaves_modules_as_they_were() -> None:
    """A table that a step casts, a flag that says so, and a buffer; also if the step fails."""

    class Rotations(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.rand(4, dtype=torch.float32), persistent=False)
            self.first, self.scales = True, torch.rand(2)

    model = torch.nn.Sequential(Rotations(), torch.nn.Linear(2, 2))
    rotations, weight = model[0], model[1].weight
    table, scales = rotations.table, rotations.scales

    def profile_run() -> None:
        rotations.table, rotations.scales, rotations.first = table.bfloat16(), scales.half(), False
        rotations.added = 1
        raise ValueError("a step that fails")

    runner = SimpleNamespace(get_model=lambda: model, profile_run=profile_run)
    engine = host.VllmWorker(SimpleNamespace(model_runner=runner), host.OffloadConfig())
    with pytest.raises(ValueError, match="fails"):
        engine._profile()
    assert (rotations.table is table, rotations.scales is scales, rotations.first) == (True, True, True)
    assert model[1].weight is weight
