"""Skeletons: the plan of a model that was not loaded equals that of the loaded one, weight for weight."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import models
from repeats import thinned
from weightstream.adapters.hf.hub import skeleton
from weightstream.adapters.hf.load import load_pretrained
from weightstream.adapters.modules.partition import Grain, find_units
from weightstream.cli import app
from weightstream.errors import CheckpointError, ConfigError, WeightstreamError
from weightstream.plan.manifest import Manifest
from weightstream.runtime.weights.alias_groups import groups, manifest, merge_tied
from weightstream.store.checkpoint import Checkpoint

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("no_loading_bars")

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def saved(name: str, folder: Path, **options: Any) -> Path:
    models.ARCHITECTURES[name]().module.save_pretrained(folder, **options)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved("llama", tmp_path / "llama")


def manifests(model: Any) -> list[Manifest]:
    by_alias = groups(model, allow_meta=True)
    return [manifest(merge_tied(find_units(model, grain), by_alias), by_alias) for grain in get_args(Grain)]


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "weightstream" and r.levelno >= logging.WARNING]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", thinned(sorted(models.ARCHITECTURES)))
def test_the_manifest_equals_that_of_the_loaded_model(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(name, tmp_path)
    with monkeypatch.context() as patch:
        patch.delattr(Checkpoint, "tensor")  # headers only
        model, checkpoint = skeleton(folder)
    assert warnings_of(caplog) == []
    loaded = load_pretrained(folder)
    assert manifests(model) == manifests(loaded.model)
    assert type(model) is type(loaded.model)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    assert not any(module.training for module in model.modules())
    assert checkpoint is not None
    assert checkpoint.entries.keys() == loaded.checkpoint.entries.keys()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["llama-bf16", "t5", "mixtral", "bert"])
def test_manifest_in_another_dtype(name: str, tmp_path: Path) -> None:
    """transformers keeps some weights of t5 in float32."""
    folder = saved(name, tmp_path)
    found = manifests(skeleton(folder, dtype="float16")[0])
    assert found == manifests(load_pretrained(folder, dtype="float16").model)
    kinds = {tensor.dtype for unit in found[0].units for tensor in unit.tensors if tensor.dtype.startswith("float")}
    assert kinds == ({"float16", "float32"} if name in ("t5", "llama-bf16", "mixtral") else {"float16"})


@pytest.mark.parametrize("name", ["llama-bf16", "mixtral", "gpt2"])
def test_config_alone_is_enough(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "whole")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((folder / "config.json").read_bytes())
    model, checkpoint = skeleton(str(alone))
    assert checkpoint is None
    assert manifests(model) == manifests(skeleton(folder)[0])


def test_ties_are_one_parameter(tmp_path: Path) -> None:
    model = skeleton(saved("llama-bf16", tmp_path))[0]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_shards_and_index(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path, max_shard_size="100KB")
    whole, checkpoint = skeleton(folder)
    assert checkpoint is not None
    assert len(checkpoint.mappings) > 3
    next(folder.glob("model-00002*")).unlink()
    model, checkpoint = skeleton(folder)
    assert checkpoint is None
    assert manifests(model) == manifests(whole)
    index = folder / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="not an object"):
        skeleton(folder)


def test_packed_folder(llama: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pack", str(llama), str(tmp_path / "packed")])
    assert result.exit_code == 0, result.output
    model, checkpoint = skeleton(tmp_path / "packed")
    assert checkpoint is not None
    assert checkpoint.entries.keys() == Checkpoint.open(llama).entries.keys()
    assert manifests(model) == manifests(load_pretrained(tmp_path / "packed").model)


def test_the_dtype_of_the_file_if_the_config_has_none(llama: Path) -> None:
    file = llama / "model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    config = {key: value for key, value in config_of(llama).items() if key not in ("dtype", "torch_dtype")}
    (llama / "config.json").write_text(json.dumps(config))
    model, _ = skeleton(llama)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert manifests(model) == manifests(load_pretrained(llama).model)


def test_headers_of_another_model_are_reported(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = skeleton(llama)
    held = sum(p.numel() for p in model.parameters())
    (llama / "config.json").write_text(json.dumps(config_of(llama) | {"num_hidden_layers": 7}))
    assert warnings_of(caplog) == []
    wanted = sum(p.numel() for p in skeleton(llama)[0].parameters())
    (message,) = warnings_of(caplog)
    assert f"hold {held} weights" in message
    assert f"it has {wanted}" in message


def broken(kind: str, folder: Path) -> Path:
    config = folder / "config.json"
    if kind == "no config":
        config.unlink()
    elif kind == "bad JSON":
        config.write_text("{")
    elif kind == "unknown type":
        config.write_text('{"model_type": "nothing"}')
    elif kind == "quantised":
        config.write_text(json.dumps(config_of(folder) | {"quantization_config": {"quant_method": "aqlm"}}))
    elif kind == "no class":
        config.write_text(json.dumps(config_of(folder) | {"architectures": None}))
    elif kind == "pickle":
        os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")
    else:
        os.truncate(folder / "model.safetensors", 100)
    return folder


@pytest.mark.parametrize(
    "kind", ["no config", "bad JSON", "unknown type", "quantised", "no class", "pickle", "truncated"]
)
def test_errors_are_those_of_loading(kind: str, llama: Path) -> None:
    folder = broken(kind, llama)
    with pytest.raises(WeightstreamError) as expected:
        load_pretrained(folder)
    with pytest.raises(type(expected.value)) as found:
        skeleton(folder)
    assert str(found.value) == str(expected.value)


def test_wrong_arguments(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype = 'bfloat17'"):
        skeleton(llama, dtype="bfloat17")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        skeleton(tmp_path / "absent")
    (llama / "config.json").write_text(json.dumps(config_of(llama) | {"hidden_act": "nothing"}))
    with pytest.raises(CheckpointError, match=r"transformers cannot build it: KeyError: .*nothing"):
        skeleton(llama)


def test_only_json_is_downloaded_from_the_hub(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.append((name, allow_patterns, sorted(options)))
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model, _ = skeleton("somebody/model")
    assert asked == [("somebody/model", ["*.json"], ["ignore_patterns"])]
    assert model.name_or_path == "somebody/model"


_PLAN = """
import sys, time
import torch, transformers
from weightstream.adapters.tracing.footprint import observe
from weightstream.adapters.hf.hub import skeleton
from weightstream.plan.manifest import Workload
skeleton(sys.argv[1])
begin = time.perf_counter()
model, _ = skeleton(sys.argv[1])
observe(model, Workload(context=4096))
seconds = time.perf_counter() - begin
status = dict(line.split(":") for line in open("/proc/self/status"))  # ru_maxrss would count the parent's memory
print(sum(p.numel() for p in model.parameters()), seconds, status["VmHWM"].split()[0])
"""


@pytest.mark.stress  # CI makes a plan of it
def test_405b_in_seconds_and_in_little_memory(tmp_path: Path) -> None:
    """0.6 s and 0.36 GiB on two idle cores; the limits leave room for busy ones."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    result = subprocess.run(
        [sys.executable, "-c", _PLAN, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert result.returncode == 0, result.stderr
    num_weights, seconds, peak_kib = map(float, result.stdout.split())
    assert num_weights == 405_853_388_800
    assert seconds < 10
    assert peak_kib < 1 << 20
