"""Loading transformers models: equal to transformers' own loading, mapped, and without memory of their own."""

from __future__ import annotations

import ast
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import weightstream
from models import TEXT
from weightstream.adapters.hf import surplus
from weightstream.adapters.hf.load import LoadedModel, load_pretrained
from weightstream.api import pack
from weightstream.errors import CheckpointError, ConfigError, StoreError, UnsupportedError
from weightstream.plan.units import human
from weightstream.store.folder import OffloadFolder

pytestmark = pytest.mark.usefixtures("no_loading_bars")

SMALL = TEXT | {"num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 1000}


def saved(folder: Path, model_class: Any, config: Any, **options: Any) -> Path:
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder, **options)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    return saved(tmp_path / "llama", transformers.LlamaForCausalLM, config)


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    return saved(tmp_path / "mixtral", transformers.MixtralForCausalLM, config)


def populated(loaded: LoadedModel) -> LoadedModel:
    for memory in loaded.lazy:
        memory.populate(0, memory.nbytes)
    return loaded


def assert_same(loaded: LoadedModel, reference: Any) -> None:
    """Compare every parameter and buffer, including non-persistent ones, and the outputs."""
    model = populated(loaded).model
    assert type(model) is type(reference)
    for kind in ("named_parameters", "named_buffers"):
        found = dict(getattr(model, kind)(remove_duplicate=False))
        expected = dict(getattr(reference, kind)(remove_duplicate=False))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride()), name
            assert torch.equal(found[name], tensor), name
            assert found[name].requires_grad == tensor.requires_grad, name
    assert not model.training
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model(ids)[0], reference(ids)[0])


def homes(loaded: LoadedModel) -> dict[str, str | None]:
    """The memory that each parameter views: "checkpoint", "folder", "parts" of the checkpoint, or None."""
    found: dict[str, str | None] = {}
    for name, param in loaded.model.named_parameters():
        memories = [m for m in (*loaded.mappings, *loaded.lazy) if m.locate(param.data_ptr()) is not None]
        assert len(memories) <= 1
        if not memories or memories[0] in loaded.lazy:
            found[name] = "parts" if memories else None
        else:
            inside = loaded.folder is not None and memories[0].path.parent == loaded.folder.path
            found[name] = "folder" if inside else "checkpoint"
    return found


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    write = OffloadFolder.write

    def counted(self: OffloadFolder, name: str, tensor: torch.Tensor) -> torch.Tensor:
        names.append(name)
        return write(self, name, tensor)

    monkeypatch.setattr(OffloadFolder, "write", counted)
    return names


def test_plain_checkpoint_is_viewed_not_copied(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_pretrained(llama)
    assert_same(loaded, transformers.LlamaForCausalLM.from_pretrained(llama))
    assert set(homes(loaded).values()) == {"checkpoint"}
    assert loaded.folder is None
    assert [m.path for m in loaded.mappings] == [llama / "model.safetensors"]
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.model.name_or_path == loaded.model.config.name_or_path == str(llama)
    assert not [r for r in caplog.records if r.name == "weightstream"]


def test_path_of_the_file_loads_its_folder(llama: Path) -> None:
    loaded = load_pretrained(str(llama / "model.safetensors"))
    assert_same(loaded, transformers.LlamaForCausalLM.from_pretrained(llama))


def test_sharded_index(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)
    folder = saved(tmp_path, transformers.LlamaForCausalLM, config, max_shard_size="100KB")
    loaded = load_pretrained(folder)
    assert len(loaded.mappings) == len(list(folder.glob("*.safetensors"))) > 3
    assert_same(loaded, transformers.LlamaForCausalLM.from_pretrained(folder))
    assert set(homes(loaded).values()) == {"checkpoint"}


@pytest.mark.parametrize("folder", [None, "offload"])
def test_dtype_change_is_written(
    folder: str | None, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offload_folder = folder and tmp_path / folder
    loaded = load_pretrained(llama, dtype="bfloat16", offload_folder=offload_folder)
    assert_same(loaded, transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16))
    assert set(homes(loaded).values()) == {"folder"}
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    (record,) = [r for r in caplog.records if r.name == "weightstream"]
    assert loaded.folder is not None
    assert f"{human(loaded.folder.nbytes)} written to {loaded.folder.path} for this process" in record.getMessage()
    assert offload_folder is None or loaded.folder.path.parent == offload_folder
    loaded.folder.close()
    assert offload_folder is None or list(offload_folder.iterdir()) == []


def parts_of(loaded: LoadedModel) -> dict[str, list[torch.Tensor]]:
    """For each parameter, the tensors of the file that it consists of."""
    names = {param.data_ptr(): name for name, param in loaded.model.named_parameters()}
    return {names[m.address]: [extent.bytes() for extent in m.extents] for m in loaded.lazy}


def test_fused_experts_stay_in_the_file(mixtral: Path, tmp_path: Path) -> None:
    tensors = load_file(mixtral / "model.safetensors")
    assert any("experts.3." in name for name in tensors)  # the file has them one by one
    loaded = load_pretrained(mixtral, offload_folder=tmp_path / "offload")
    for name, home in homes(loaded).items():
        assert home == ("parts" if ".experts." in name else "checkpoint"), name
    assert loaded.folder is None
    assert list((tmp_path / "offload").iterdir()) == []
    assert not any(memory.is_filled for memory in loaded.lazy)
    parts = parts_of(loaded)
    assert len(parts) == 4
    for name, found in parts.items():
        layer, kinds = name.split(".")[2], ("w1", "w3") if "gate_up" in name else ("w2",)
        where = f"model.layers.{layer}.block_sparse_moe.experts"
        expected = [tensors[f"{where}.{expert}.{kind}.weight"] for expert in range(4) for kind in kinds]
        assert torch.equal(torch.cat(found), torch.cat([t.reshape(-1) for t in expected]).view(torch.uint8)), name
    assert_same(loaded, transformers.MixtralForCausalLM.from_pretrained(mixtral))


def test_parts_of_several_shards(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    folder = saved(tmp_path, transformers.MixtralForCausalLM, config, max_shard_size="100KB")
    loaded = load_pretrained(folder)
    assert loaded.folder is None
    assert max(len({extent.mapping.path for extent in memory.extents}) for memory in loaded.lazy) > 1
    assert_same(loaded, transformers.MixtralForCausalLM.from_pretrained(folder))


def test_only_casted_weights_are_written(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = mixtral / "model.safetensors"
    tensors = {n: t.bfloat16() if "layers.1." in n and ".w2." in n else t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    names = count_writes(monkeypatch)
    loaded = load_pretrained(mixtral, dtype="float32")
    assert_same(loaded, transformers.MixtralForCausalLM.from_pretrained(mixtral, dtype=torch.float32))
    found, cast = homes(loaded), "model.layers.1.mlp.experts"
    assert found[f"{cast}.down_proj"] == "folder"
    assert found[f"{cast}.gate_up_proj"] == "checkpoint"  # safetensors sorts by dtype, so they are adjacent now
    for name in found.keys() - {f"{cast}.down_proj", f"{cast}.gate_up_proj"}:
        assert found[name] == ("parts" if ".experts." in name else "checkpoint"), name
    assert names == ["down_proj"]


def test_fused_experts_of_a_file_are_viewed(mixtral: Path, tmp_path: Path) -> None:
    """Nothing is converted, though the names are those after transformers' conversion."""
    expected = transformers.MixtralForCausalLM.from_pretrained(mixtral)
    save_file(expected.state_dict(), mixtral / "model.safetensors", metadata={"format": "pt"})
    loaded = load_pretrained(mixtral)
    assert set(homes(loaded).values()) == {"checkpoint"}
    assert_same(loaded, expected)


def test_gathered_weights_are_saved_as_transformers_saves_them(mixtral: Path, tmp_path: Path) -> None:
    populated(load_pretrained(mixtral)).model.save_pretrained(tmp_path / "again")
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", mixtral))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "bert"])
def test_a_second_load_into_the_folder(kind: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "bert":  # transformers pads one of its biases at every load
        sizes = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
        folder = saved(tmp_path / "bert", transformers.BertForMaskedLM, transformers.BertConfig(**sizes))
    else:
        folder = request.getfixturevalue(kind)
    first, second = (load_pretrained(folder, dtype=dtype, offload_folder=tmp_path / "offload") for _ in range(2))
    assert {loaded.folder is not None for loaded in (first, second)} == {dtype == "bfloat16"}
    assert_same(second, populated(first).model)
    assert homes(second) == homes(first)
    assert_same(second, type(first.model).from_pretrained(folder, dtype=dtype))


def test_unexpected_and_missing_keys(llama: Path) -> None:
    file = llama / "model.safetensors"
    tensors = load_file(file)
    missing = "model.layers.1.mlp.up_proj.weight"
    tensors["surplus.weight"] = tensors.pop(missing)
    save_file(tensors, file, metadata={"format": "pt"})
    advice = "the files have 1 weights that it does not .*surplus.weight: pass key_mapping= .* else allow_missing"
    with pytest.raises(CheckpointError, match=rf"lacks 1 weights of LlamaForCausalLM: {missing}; {advice}"):
        load_pretrained(llama)
    loaded = load_pretrained(llama, allow_missing=True)
    assert homes(loaded).pop(missing) is None
    assert sum(home is None for home in homes(loaded).values()) == 1
    param = loaded.model.get_parameter(missing)
    assert not param.is_meta
    assert 0 < param.std() < 1  # initialised, not the old content of memory
    assert not [name for name, _ in loaded.model.named_parameters() if "surplus" in name]


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"device_budgett": "1GiB"}, "device_budgett = '1GiB': there is no such option; did you mean device_budget"),
        ({"attn_implementatio": "sdpa"}, "did you mean attn_implementation"),
        ({"load_in_8bit": True}, r"quantization_config=BitsAndBytesConfig\(load_in_8bit=True\)"),
        ({"zzz": 1}, "zzz = 1: there is no such option; the options are .*quantization_config"),
        ({"variant": "fp16"}, r"variant: give the path of the file .*model\.safetensors\.index\.<variant>\.json"),
        ({"state_dict": {}}, "state_dict: weightstream decides this itself"),
        ({"use_safetensors": False}, "use_safetensors: weightstream reads only safetensors; leave it out"),
        ({"output_loading_info": True}, "output_loading_info: only the model is returned"),
        ({"code_revision": "dev"}, "code_revision: code is loaded from the revision of the weights"),
        ({"adapter_name": "x"}, r"adapter_name: load the model without it, then call model\.load_adapter"),
        ({"dtype": "float16", "torch_dtype": "float16"}, "are the same setting"),
        ({"config": 3}, "config is a int, not an OffloadConfig"),
    ],
)
def test_unknown_keywords(keywords: dict[str, Any], text: str, llama: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        weightstream.from_pretrained(llama, device="cpu", device_budget="1MiB", progress=False, **keywords)


def test_keywords_of_the_config(llama: Path) -> None:
    """They are set in the config, as in transformers. A transformers config replaces config.json."""
    options = {"device": "cpu", "device_budget": "1MiB", "progress": False}
    for keywords in ({"num_hidden_layers": 1, "use_cache": False}, {}):
        config = transformers.AutoConfig.from_pretrained(llama)
        if not keywords:
            config.num_hidden_layers = 1
            config.use_cache = False
        model = weightstream.from_pretrained(llama, **options, **keywords or {"config": config})
        assert (len(model.model.layers), model.config.use_cache) == (1, False)
        reference = transformers.LlamaForCausalLM.from_pretrained(llama, num_hidden_layers=1, use_cache=False)
        got, want = (dict(m.named_parameters()) for m in (model, reference.eval()))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
        model.weightstream.remove()
        assert config.num_hidden_layers == (2 if keywords else 1), "the caller's config does not change"
    planned = weightstream.plan_model(llama, device="cpu", device_budget="1MiB", config=config)
    assert sum("layers.1." in tensor.name for tensor in planned.manifest.tensors()) == 0
    with pytest.raises(ConfigError, match="config is a LlamaConfig, not an OffloadConfig"):
        weightstream.offload(reference, config=config)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_torch_dtype_is_an_alias_of_dtype(name: str, llama: Path) -> None:
    options = {"device": "cpu", "device_budget": "1MiB", name: torch.float16}
    model = weightstream.from_pretrained(llama, progress=False, **options)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    model.weightstream.remove()
    planned = weightstream.plan_model(llama, **options)
    assert {t.dtype for t in planned.manifest.tensors() if t.name.endswith("weight")} == {"float16"}


def test_a_subfolder(llama: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    shutil.copytree(llama, outer / "text")
    options = {"device": "cpu", "device_budget": "1MiB", "progress": False}
    weightstream.from_pretrained(outer, subfolder="text", **options).weightstream.remove()
    for name in ("txt", "../outer/..", "/"):
        with pytest.raises(CheckpointError, match="no folder"):
            weightstream.from_pretrained(outer, subfolder=name, **options)


def test_folders_of_diffusers_are_named(llama: Path, tmp_path: Path) -> None:
    edit_config(llama, _class_name="FluxTransformer2DModel", model_type=None)
    with pytest.raises(CheckpointError, match=r"FluxTransformer2DModel: weightstream\.pipeline_from_pretrained loads"):
        load_pretrained(llama)
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json there. A single file with a pipeline of diffusers"):
        load_pretrained(llama / "model.safetensors")


def test_misaligned_tensors_get_a_home(llama: Path) -> None:
    file = llama / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length] + b" "
    file.write_bytes((length + 1).to_bytes(8, "little") + header + raw[8 + length :])
    loaded = load_pretrained(llama)
    assert set(homes(loaded).values()) == {"folder"}
    assert_same(loaded, transformers.LlamaForCausalLM.from_pretrained(llama))


def test_other_classes(llama: Path) -> None:
    for model_class, expected in [
        (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM),
        (transformers.AutoModel, transformers.LlamaModel),
        (transformers.LlamaModel, transformers.LlamaModel),
    ]:
        loaded = load_pretrained(llama, model_class=model_class)
        assert_same(loaded, expected.from_pretrained(llama))
        assert set(homes(loaded).values()) == {"checkpoint"}


def test_the_generation_config_is_that_of_the_file(llama: Path) -> None:
    facts = json.loads((llama / "generation_config.json").read_text())
    (llama / "generation_config.json").write_text(json.dumps({**facts, "max_new_tokens": 7, "eos_token_id": 42}))
    config = load_pretrained(llama).model.generation_config
    assert (config.max_new_tokens, config.eos_token_id) == (7, 42)
    (llama / "generation_config.json").unlink()
    assert load_pretrained(llama).model.generation_config.max_new_tokens is None


def test_keywords_reach_transformers(llama: Path) -> None:
    assert load_pretrained(llama, attn_implementation="eager").model.config._attn_implementation == "eager"


def test_writes_do_not_reach_the_file(llama: Path) -> None:
    before = (llama / "model.safetensors").read_bytes()
    with torch.no_grad():
        for param in load_pretrained(llama).model.parameters():
            param.zero_()
    assert (llama / "model.safetensors").read_bytes() == before


def test_process_state_is_restored(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = transformers.utils.logging
    for value in (None, "0"):
        if value is None:
            monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
        else:
            monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", value)
        control.enable_progress_bar()
        handlers = list(logging.getLogger("transformers").handlers)
        names = count_writes(monkeypatch)
        load_pretrained(llama, progress=False)
        assert control.is_progress_bar_enabled()
        assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == value
        assert logging.getLogger("transformers").handlers == handlers
        torch.nn.Linear(300, 300)  # the hook has been removed
        assert names == []


def test_progress_bar(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_pretrained(llama, progress=True)
    assert "Loading weights" in capfd.readouterr().err
    load_pretrained(llama, progress=False)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("asked", [None, True])
def test_a_bar_is_drawn_into_a_file_only_if_asked_for(
    llama: Path, asked: bool | None, capfd: pytest.CaptureFixture[str]
) -> None:
    weightstream.from_pretrained(llama, device="cpu", progress=asked).weightstream.remove()
    assert ("Loading weights" in capfd.readouterr().err) is bool(asked)


def edit_config(folder: Path, **facts: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def test_mismatched_shapes_name_key_and_shapes(llama: Path) -> None:
    edit_config(llama, vocab_size=999)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: file \(1000, 64\), model \(999, 64\)"):
        load_pretrained(llama)
    loaded = load_pretrained(llama, ignore_mismatched_sizes=True)
    assert loaded.model.model.embed_tokens.weight.shape == (999, 64)


def test_conversion_errors_name_the_key(mixtral: Path) -> None:
    file = mixtral / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1." in name and "experts.2.w1" in name)
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        load_pretrained(mixtral)


def test_refused_by_name(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device_map"):
        load_pretrained(llama, device_map="auto")
    edit_config(llama, architectures=None)
    with pytest.raises(CheckpointError, match="no architectures; pass model_class="):
        load_pretrained(llama)
    assert type(load_pretrained(llama, model_class=transformers.LlamaModel).model) is transformers.LlamaModel
    edit_config(llama, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(UnsupportedError, match="quantised with aqlm"):
        load_pretrained(llama)
    (llama / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON: .* line 1 column 2"):
        load_pretrained(llama)
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="PyTorch pickle"):
        load_pretrained(llama)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_pretrained(tmp_path / "none")


def test_a_name_that_is_not_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'nobody/nothing' is no local folder.*hub failed"):
        load_pretrained("nobody/nothing", local_files_only=True, cache_dir=tmp_path)


def test_a_repository_in_the_cache_loads(llama: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "models--o--m"
    for folder in ("refs", "blobs", "snapshots/abc"):
        (cache / folder).mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    for file in llama.iterdir():
        file.rename(cache / "blobs" / file.name)
        (cache / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/{file.name}")
    loaded = load_pretrained("o/m", local_files_only=True, cache_dir=tmp_path / "cache")
    assert loaded.model.name_or_path == "o/m"
    assert set(homes(loaded).values()) == {"checkpoint"}


OUT_OF_REACH = {
    "no connection": huggingface_hub.errors.HfHubHTTPError.__bases__[0]("Connection refused"),  # of the HTTP library
    "offline": huggingface_hub.errors.LocalEntryNotFoundError("cannot find\nthe files"),
    "timeout": TimeoutError("timed out"),
}


@pytest.fixture(params=OUT_OF_REACH)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OUT_OF_REACH[request.param]

    for name in ("snapshot_download", "file_exists"):
        monkeypatch.setattr(huggingface_hub, name, fails)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_cached_snapshot_is_used(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a snapshot with only the files that transformers downloaded."""
    commit = "0123456789" * 4
    snapshot = tmp_path / "cache" / "models--o--m" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(llama / name, snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    loaded = load_pretrained("o/m", cache_dir=tmp_path / "cache")
    assert_same(loaded, transformers.LlamaForCausalLM.from_pretrained(llama))
    assert loaded.model.name_or_path == "o/m"
    assert weightstream.plan_model("o/m", device="cpu", device_budget="300KiB").host_nbytes > 0
    with pytest.raises(CheckpointError, match="'o/m' is no local folder"):
        load_pretrained("o/m", cache_dir=tmp_path / "cache", revision="other")


@pytest.mark.usefixtures("no_network")
def test_without_a_network_a_name_is_one_line() -> None:
    for use in (weightstream.from_pretrained, weightstream.plan_model):
        with pytest.raises(CheckpointError, match=r"'o/m' is no local folder.*; check the name, the network") as error:
            use("o/m", device="cpu", device_budget="1MiB")
        assert len(str(error.value).splitlines()) == 1
    from weightstream.cli import app

    for command in ("plan", "run"):
        result = CliRunner().invoke(app, [command, "o/m", "--device-budget", "1MiB", "--device", "cpu"])
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("error: 'o/m' is no local folder")


def rename(folder: Path, change: Any) -> None:
    tensors = {change(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return saved(tmp_path / "untied", transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "a.b.c."])
def test_the_error_names_the_key_mapping_that_removes_a_prefix(prefix: str, untied: Path) -> None:
    expected = transformers.LlamaForCausalLM.from_pretrained(untied)
    rename(untied, lambda name: prefix + name)
    with pytest.raises(CheckpointError, match="their names differ by a prefix: pass key_mapping=") as error:
        load_pretrained(untied)
    assert "allow_missing" not in str(error.value)
    mapping = ast.literal_eval(str(error.value).rpartition("key_mapping=")[2])
    assert_same(load_pretrained(untied, key_mapping=mapping), expected)


def test_a_prefix_that_the_file_lacks(tmp_path: Path) -> None:
    """Such a prefix is one that the model's own base lacks, too."""

    class Wrapped(transformers.LlamaPreTrainedModel):
        base_model_prefix = "text"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inner = transformers.LlamaModel(config)
            self.post_init()

        def forward(self, ids: Any) -> Any:
            return self.inner(ids)

    folder = saved(tmp_path / "base", transformers.LlamaModel, transformers.LlamaConfig(**SMALL))
    with pytest.raises(CheckpointError, match=r"pass key_mapping=\{'\^': 'inner\.'\}"):
        load_pretrained(folder, model_class=Wrapped)
    loaded = load_pretrained(folder, model_class=Wrapped, key_mapping={"^": "inner."})
    expected = transformers.LlamaModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded.model.inner.state_dict()[name], tensor) for name, tensor in expected.items())


def test_advice_if_the_head_is_missing(untied: Path) -> None:
    tensors = load_file(untied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, untied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"pass model_class=transformers\.AutoModel for .* without its head"):
        load_pretrained(untied)
    assert_same(
        load_pretrained(untied, model_class=transformers.AutoModel), transformers.AutoModel.from_pretrained(untied)
    )


with_adapters = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft


def adapter_of(base: Path, folder: Path, **more: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    about = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **more)
    model = peft.get_peft_model(model, about)
    model.save_pretrained(folder)
    return model


@with_adapters
def test_weights_of_a_model_with_an_adapter_in_it(untied: Path, tmp_path: Path) -> None:
    model = adapter_of(untied, tmp_path / "adapter")
    save_file(dict(model.state_dict()), untied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"with an adapter of peft in it: .*merge_and_unload") as error:
        load_pretrained(untied)
    assert "allow_missing" not in str(error.value)


@with_adapters
def test_a_folder_with_only_an_adapter_and_a_config(untied: Path, tmp_path: Path) -> None:
    adapter_of(untied, tmp_path / "adapter")
    shutil.copy(untied / "config.json", tmp_path / "adapter")
    for use in (load_pretrained, weightstream.plan_model):
        with pytest.raises(CheckpointError, match=rf"no weights.*: load the model that it belongs to, {untied}, then"):
            use(
                tmp_path / "adapter",
                **({"device": "cpu", "device_budget": "1MiB"} if use is not load_pretrained else {}),
            )


@with_adapters
def test_an_adapter_without_peft(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter_of(untied, tmp_path / "adapter")
    adapter_of(untied, untied)
    for place in ("transformers.utils", "transformers.integrations.peft"):
        monkeypatch.setattr(f"{place}.is_peft_available", lambda: False)
    assert_same(load_pretrained(untied), transformers.LlamaForCausalLM.from_pretrained(untied))
    assert "its adapter is not loaded, and transformers would not load it either: pip install peft" in caplog.text
    with pytest.raises(CheckpointError, match=rf"is an adapter of {untied}: pip install peft"):
        load_pretrained(tmp_path / "adapter")


@with_adapters
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_plan_has_the_adapter(is_alone: bool, untied: Path, tmp_path: Path) -> None:
    place = tmp_path / "adapter" if is_alone else untied
    adapter_of(untied, place)
    options = {"device": "cpu", "device_budget": "400KiB"}
    model = weightstream.from_pretrained(place, progress=False, **options)
    planned, found = weightstream.plan_model(place, **options), model.weightstream.plan
    assert [unit.tensors for unit in planned.manifest.units] == [unit.tensors for unit in found.manifest.units]
    assert sum("lora" in tensor.name for tensor in found.manifest.tensors()) == 4
    assert planned.host_nbytes == found.host_nbytes > 0
    model.weightstream.remove()


@with_adapters
def test_an_adapter_is_in_memory_and_its_model_in_the_files(untied: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter_of(untied, untied)
    loaded = load_pretrained(untied)
    found = homes(loaded)
    assert {home for name, home in found.items() if "lora" in name} == {None}
    assert {home for name, home in found.items() if "lora" not in name} == {"checkpoint"}
    assert loaded.folder is None
    assert not [record for record in caplog.records if record.name == "weightstream"]


@with_adapters
def test_an_adapter_finds_coded_weights_decoded(tmp_path: Path) -> None:
    """DoRA computes with these weights when its adapter is added."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model, folder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | sizes)), tmp_path / "base"
    model.bfloat16().save_pretrained(folder)
    pack.pack(str(folder), tmp_path / "pack", codec="compressed")
    adapter_of(folder, folder, use_dora=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / name, tmp_path / "pack")
    torch.manual_seed(1)  # transformers leaves a part of it random
    reference = transformers.LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    loaded = load_pretrained(tmp_path / "pack")
    assert "folder" in homes(loaded).values()
    assert_same(loaded, reference)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"architectures": ["LLaMAForCausalLM"]}, r"architecture 'LLaMAForCausalLM', and transformers .* no class of"),
        ({"architectures": ["A", "B"]}, "architecture 'A', 'B', and"),
        (
            {"architectures": ["MistralForCausalLM"]},
            "'llama', and its architecture MistralForCausalLM is of 'mistral'",
        ),
        (
            {"architectures": ["X"], "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
            "pass trust_remote_code=True to run the code with it that has X, or model_class=",
        ),
    ],
)
def test_an_unknown_architecture(facts: dict[str, Any], text: str, llama: Path) -> None:
    edit_config(llama, **facts)
    with pytest.raises(CheckpointError, match=text):
        load_pretrained(llama)
    with pytest.raises(CheckpointError, match=text):
        weightstream.plan_model(llama, device="cpu", device_budget="1MiB")
    model = load_pretrained(llama, model_class=transformers.AutoModelForCausalLM)
    assert_same(model, transformers.AutoModelForCausalLM.from_pretrained(llama))


def test_the_first_known_architecture_is_used(llama: Path) -> None:
    edit_config(llama, architectures=["LlamaForCausalLMEagle3", "LlamaForCausalLM"])
    assert type(load_pretrained(llama).model) is transformers.LlamaForCausalLM


def test_a_config_of_another_kind_is_read_as_its_class_does(llama: Path) -> None:
    edit_config(llama, model_type="mistral", architectures=["MistralForCausalLM"])
    loaded = load_pretrained(llama, model_class=transformers.LlamaForCausalLM)
    assert type(loaded.model.config) is transformers.LlamaConfig
    assert_same(loaded, transformers.LlamaForCausalLM.from_pretrained(llama))


def test_changes_by_a_class_as_it_loads_stay(llama: Path) -> None:
    class Louder(transformers.LlamaForCausalLM):
        @classmethod
        def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
            model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
            assert not info["missing_keys"]
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight *= 2
                model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 3)
            model.extra = torch.nn.Parameter(torch.ones(3))
            return model

    before = (llama / "model.safetensors").read_bytes()
    reference = Louder.from_pretrained(llama).eval()
    model = weightstream.from_pretrained(
        llama, device="cpu", device_budget="300KiB", model_class=Louder, progress=False
    )
    assert model.weightstream.plan.host_nbytes > 0
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(ids).logits, reference(ids).logits)
    assert (llama / "model.safetensors").read_bytes() == before


def test_a_stored_exception_keeps_no_weights(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """gptqmodel stores an exception of an import, which refers to the frames of the load."""
    kept: list[Exception] = []

    class Keeping(transformers.LlamaForCausalLM):
        @classmethod
        def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                raise ValueError
            except ValueError as error:
                kept.append(error)
            return super().from_pretrained(path, *args, **kwargs)

    options = {"device": "cpu", "device_budget": "300KiB", "progress": False}
    with weightstream.from_pretrained(llama, model_class=Keeping, **options).weightstream:
        assert "is also used by" not in caplog.text
    assert kept


def test_a_class_that_writes_the_path_differently(llama: Path) -> None:
    class Spelled(transformers.LlamaForCausalLM):
        @classmethod
        def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
            return super().from_pretrained(Path(path).parent / "." / "x" / ".." / Path(path).name, *args, **kwargs)

    (llama.parent / "x").mkdir()
    loaded = load_pretrained(llama, model_class=Spelled)
    assert_same(loaded, Spelled.from_pretrained(llama))
    assert set(homes(loaded).values()) == {"checkpoint"}


def test_a_class_that_reads_its_files_itself(llama: Path) -> None:
    class Own(transformers.LlamaForCausalLM):
        @classmethod
        def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
            model = cls(kwargs["config"])
            model.load_state_dict(load_file(Path(path) / "model.safetensors"), strict=False)
            model.tie_weights()
            return model

    assert_same(
        load_pretrained(llama, model_class=Own),
        Own.from_pretrained(llama, config=transformers.AutoConfig.from_pretrained(llama)).eval(),
    )


def test_another_model_loaded_meanwhile_is_separate(llama: Path, untied: Path, tmp_path: Path) -> None:
    """Loaded by the same thread, as a part of the model, and by another thread from the same files."""
    found: list[Any] = []

    class Outer(transformers.LlamaForCausalLM):
        @classmethod
        def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
            model = super().from_pretrained(path, *args, **kwargs)
            model.__dict__["draft"] = transformers.LlamaForCausalLM.from_pretrained(untied)
            load = transformers.LlamaForCausalLM.from_pretrained
            thread = threading.Thread(target=lambda: found.append(load(path)))
            thread.start()
            thread.join()
            return model

    loaded = load_pretrained(llama, model_class=Outer, offload_folder=tmp_path / "offload")
    assert loaded.folder is None
    assert_same(loaded, Outer.from_pretrained(llama))
    draft = transformers.LlamaForCausalLM.from_pretrained(untied)
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.draft.parameters(), draft.parameters(), strict=True))
    addresses = {parameter.data_ptr() for parameter in loaded.model.parameters()}
    assert not addresses & {parameter.data_ptr() for parameter in found[0].parameters()}


@pytest.mark.parametrize("name", ["relative", "./relative", "relative/", Path("relative")])
def test_the_name_of_a_model_is_the_argument(name: Any, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama.rename(llama.parent / "relative")
    monkeypatch.chdir(llama.parent)
    reference = transformers.LlamaForCausalLM.from_pretrained(name)
    loaded = load_pretrained(name)
    assert loaded.model.name_or_path == reference.name_or_path
    assert loaded.model.config._name_or_path == reference.config._name_or_path


def test_layers_that_the_config_lacks_are_named(mixtral: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_config(mixtral, num_hidden_layers=1)
    load_pretrained(mixtral)
    weightstream.plan_model(mixtral, device="cpu", device_budget="1MiB")
    messages = "layers that the config does not have are left out: model.layers.1"
    records = [record.getMessage() for record in caplog.records if record.name == "weightstream"]
    assert [message.endswith(messages) for message in records] == [True, True]


def test_weights_that_the_model_lacks_are_one_line(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In place of the table of transformers."""
    tensors = load_file(llama / "model.safetensors")
    save_file({**tensors, "model.extra.weight": torch.randn(3)}, llama / "model.safetensors", {"format": "pt"})
    shown: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("transformers")
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        load_pretrained(llama)
    finally:
        logger.removeHandler(handler)
    assert not shown
    (line,) = [record.getMessage() for record in caplog.records if record.name == "weightstream"]
    left_out = "weights that LlamaForCausalLM does not have are left out: model.extra.weight"
    assert line.endswith(left_out)
    caplog.clear()
    tensors.pop("model.norm.weight")
    save_file({**tensors, "model.extra.weight": torch.randn(3)}, llama / "model.safetensors", {"format": "pt"})
    load_pretrained(llama, allow_missing=True)
    assert left_out in caplog.text


def test_a_full_disk_stops_the_load_cleanly(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5})())
    with pytest.raises(StoreError, match="5B are free"):
        load_pretrained(llama, dtype="bfloat16")
    names = count_writes(monkeypatch)
    torch.nn.Linear(300, 300)
    assert names == []


MEMORY = """
import sys
import threading
from pathlib import Path
import torch, transformers
import transformers.models.{kind}.modeling_{kind}
from weightstream.adapters.hf.load import load_pretrained
def anonymous():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024
before = anonymous()
peak = before
from weightstream.store.folder import OffloadFolder
write = OffloadFolder.write
def watched(self, name, tensor):
    global peak
    peak = max(peak, anonymous())
    return write(self, name, tensor)
OffloadFolder.write = watched
loaded = load_pretrained(sys.argv[1], dtype=sys.argv[2], progress=False)
nbytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
print(nbytes / 2**20, max(peak, anonymous()) - before, anonymous() - before)
"""


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [pytest.param("llama", "auto", marks=pytest.mark.stress), ("llama", "bfloat16"), ("mixtral", "auto")],
)
def test_memory_does_not_grow_with_the_model(kind: str, dtype: str, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8000, "hidden_size": 512}
    with torch.device("meta"):  # drawing all of the weights would take seconds
        if kind == "llama":
            config = transformers.LlamaConfig(**sizes, intermediate_size=2048, num_hidden_layers=18)
            model = transformers.LlamaForCausalLM(config)
        else:
            more = {"intermediate_size": 512, "num_hidden_layers": 16, "num_local_experts": 4}
            model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more))
    model.to_empty(device="cpu").save_pretrained(tmp_path)
    code = MEMORY.format(kind=kind)
    done = subprocess.run([sys.executable, "-c", code, tmp_path, dtype], capture_output=True, text=True, check=True)
    model_mib, peak_mib, kept_mib = map(float, done.stdout.split())
    assert model_mib > (150 if dtype == "bfloat16" else 270)
    assert peak_mib < 0.2 * model_mib, done.stdout
    assert kept_mib < 0.1 * model_mib, done.stdout


def assert_equal_states(model: Any, expected: Any) -> None:
    found, wanted = model.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    assert not [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]


# -- code that reads weights while the model is loaded -----------------------------------------------------------------


class Halved(transformers.MixtralForCausalLM):
    """Reads weights in its own load."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return super().from_pretrained(*args, **kwargs).half()


class Written(transformers.MixtralForCausalLM):
    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().from_pretrained(*args, **kwargs)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        return model


class Summed(transformers.MixtralForCausalLM):
    """Reads weights in a method that transformers calls once they are loaded."""

    def set_use_kernels(self, *args: Any, **kwargs: Any) -> Any:
        norms = torch.stack([param.float().norm() for param in self.parameters()])
        self.register_buffer("norms", norms, persistent=False)
        return super().set_use_kernels(*args, **kwargs)


class Checked(transformers.MixtralForCausalLM):
    def eval(self) -> Any:
        if not all(param.any() for param in self.parameters()):
            raise ValueError("zeros")
        return super().eval()


class Quiet(transformers.MixtralForCausalLM):
    """Reads no weights."""


class QuietLoad(transformers.LlamaForCausalLM):
    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return super().from_pretrained(*args, **kwargs)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = SMALL | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": False}
    config = transformers.MixtralConfig(**sizes, num_local_experts=4, dtype=torch.bfloat16)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("read") / "experts"
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    pack.pack(str(folder), folder.parent / "pack", codec="compressed")
    return folder


@pytest.mark.parametrize("place", ["experts", "pack"])
@pytest.mark.parametrize("kind", [Halved, Written, Summed, Checked, Quiet])
def test_code_that_reads_weights_during_a_load(
    kind: Any, place: str, experts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = kind.from_pretrained(experts)
    caplog.clear()
    loaded = load_pretrained(experts.parent / place, model_class=kind)
    assert ("are decompressed into" in caplog.text) == (place == "pack" and kind is not Quiet)
    assert bool(loaded.lazy) == (kind is Quiet)
    assert_same(populated(loaded), expected)
    found = dict(loaded.model.named_buffers())
    assert all(torch.equal(buffer, found[name]) for name, buffer in expected.named_buffers())


@pytest.mark.filterwarnings("ignore")  # peft warns about transformers
def test_the_adapter_in_the_folder_of_a_file(tmp_path: Path, experts: Path) -> None:
    """transformers loads it, and it may read the weights that it is added to."""
    peft = pytest.importorskip("peft")
    folder = shutil.copytree(experts.parent / "pack", tmp_path / "pack")
    about = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, use_dora=True)
    peft.get_peft_model(transformers.MixtralForCausalLM.from_pretrained(experts), about).save_pretrained(folder)
    shutil.copytree(experts, tmp_path / "plain")
    for file in folder.glob("adapter*"):
        shutil.copy(file, tmp_path / "plain")
    torch.manual_seed(3)  # norms of the weights plus a random product
    expected = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "plain")
    (file,) = (file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter"))
    torch.manual_seed(3)
    loaded = load_pretrained(file, model_class=transformers.MixtralForCausalLM)
    assert sorted(loaded.model.peft_config) == ["default"]
    assert_equal_states(loaded.model, expected)


class OtherFiles(transformers.LlamaForCausalLM):
    asked: dict[str, Any]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return super().from_pretrained(*args, **kwargs | cls.asked)


@pytest.mark.parametrize("asked", [{"variant": "fp16"}, {"use_safetensors": False}])
def test_a_load_in_a_class_that_requests_other_files(asked: dict[str, Any], untied: Path) -> None:
    halves = {name: tensor / 2 for name, tensor in load_file(untied / "model.safetensors").items()}
    save_file(halves, untied / "model.fp16.safetensors", metadata={"format": "pt"})
    torch.save(halves, untied / "pytorch_model.bin")
    OtherFiles.asked = asked
    loaded = load_pretrained(untied, model_class=OtherFiles).model.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in halves.items())


class Drafts(transformers.LlamaForCausalLM):
    """Loads another model as it is loaded, also by weightstream."""

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
        model = super().from_pretrained(path, *args, **kwargs)
        model.draft = [weightstream.from_pretrained(path, device="cpu", device_budget="2MiB", dtype="float16")]
        return model


@pytest.mark.usefixtures("few_plans")
def test_a_load_in_a_load(untied: Path) -> None:
    expected = QuietLoad.from_pretrained(untied)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(load_pretrained(untied, model_class=Drafts)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "deadlock"
    (loaded,) = found
    assert_equal_states(loaded.model, expected)
    assert loaded.folder is None  # no weight of the inner one is in it
    (draft,) = loaded.model.draft
    assert all(torch.equal(p.half(), draft.get_parameter(name)) for name, p in expected.named_parameters())


@pytest.mark.parametrize("keywords", [{"eos_token_id": 9}, {"pad_token_id": 8, "bos_token_id": 4, "use_cache": False}])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "AutoModelForCausalLM"])
def test_keywords_of_config_and_generation(kind: str, keywords: dict[str, Any], untied: Path) -> None:
    cls = getattr(transformers, kind)
    expected, found = (
        cls.from_pretrained(untied, **keywords),
        load_pretrained(untied, model_class=cls, **keywords).model,
    )
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    assert found.config.to_dict() == expected.config.to_dict()


class WithBuffer(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.ones(3))


def test_advice_for_buffers_and_mapped_names(untied: Path) -> None:
    with pytest.raises(CheckpointError, match="buffers that the code adds: pass allow_missing=True") as error:
        load_pretrained(untied, model_class=WithBuffer)
    assert "AutoModel" not in str(error.value)
    rename(untied, lambda name: "module." + name)
    with pytest.raises(CheckpointError, match=r"by key_mapping the files have .*: mend key_mapping, else") as error:
        load_pretrained(untied, key_mapping={"^module": "inner"})
    assert "pass key_mapping=" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "is_adapter"),
    [
        ("model.mm_soft_emb_norm.weight", False),
        ("layers.0.explora_gate.weight", False),
        ("layers.0.q_proj.oft_r.default", True),
        ("layers.0.q_proj.lora_A.weight", True),
        ("q_proj.base_layer.weight", True),
        ("modules_to_save.default.weight", True),
    ],
)
def test_an_adapter_is_recognised_by_whole_parts_of_names(name: str, is_adapter: bool) -> None:
    assert ("merge_and_unload" in surplus.remedy(["a.weight"], [name], "model")) == is_adapter
