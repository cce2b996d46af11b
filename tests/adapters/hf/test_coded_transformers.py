"""Whole transformers models with compressed weights, from plain checkpoints and packs: the plain model's tokens and
bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weightstream
from coded_rig import built, code_all, exact, warned
from mapped import rss_nbytes
from models import assert_same, floats, step, tokens, weights
from repeats import thinned
from streaming import least_budget
from weightstream.cli import app
from weightstream.errors import CheckpointError, PlanError
from weightstream.store import pack

__all__ = ["code_all", "warned"]

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("no_loading_bars", "few_plans")

TEXT = MappingProxyType(
    {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)
EXPERTS = MappingProxyType({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128})
VISION = MappingProxyType(
    {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
)
NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", {**TEXT, "tie_word_embeddings": False}),
        "llama tied": ("LlamaForCausalLM", {**TEXT, "tie_word_embeddings": True}),
        "qwen3 moe": ("Qwen3MoeForCausalLM", {**TEXT, **EXPERTS}),
        "vit": ("ViTModel", VISION),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The checkpoint of a name, plain or packed. Each is written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def made(name: str, codec: str = "plain") -> Path:
        path: Path = root / f"{name} {codec}"
        if path.exists():
            return path
        if codec != "plain":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pack, "_LEAST_CODED", 8192)
                result = CliRunner().invoke(app, ["pack", str(made(name)), str(path), "--codec", codec])
            assert result.exit_code == 0, result.output
            return path
        torch.manual_seed(0)
        model_class, settings = NAMES[name]
        kind = getattr(transformers, model_class)
        kind(kind.config_class(**settings)).to(torch.bfloat16).save_pretrained(path)
        return path

    return made


def plain(path: Path, name: str, **options: Any) -> Any:
    return getattr(transformers, NAMES[name][0]).from_pretrained(path, **{"dtype": "auto", **options}).eval()


def inputs(name: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {"pixel_values": floats(seed, 2, 3, 32, 32).to(dtype)} if name == "vit" else {"input_ids": tokens(seed)}


_BUDGETS: dict[tuple[Any, ...], int] = {}  # found so far


def open_coded(path: Path, share: float = 0.4, **options: Any) -> Any:
    """The model with a share of the bytes of all compressed weights, or with the least budget that plans."""
    key, options = (
        (path, share, *options.items()),
        options | {"device": "cpu", "codec": "compressed", "progress": False},
    )
    if key in _BUDGETS:
        return weightstream.from_pretrained(path, device_budget=_BUDGETS[key], **options)
    model = weightstream.from_pretrained(path, device_budget=1 << 30, **options)
    most = model.weightstream.plan.device_nbytes
    model.weightstream.remove()
    for twentieths in range(int(20 * share), 21):
        try:
            model = weightstream.from_pretrained(path, device_budget=most * twentieths // 20, **options)
        except PlanError:
            continue
        _BUDGETS[key] = most * twentieths // 20
        return model
    raise AssertionError("no plan")


def assert_equal_for_a_while(model: Any, reference: Any, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
    for seed in range(2):
        batch = inputs(name, seed, dtype)
        assert_same(step(model, batch), step(reference, batch))
    if name != "vit":
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert torch.equal(model.generate(tokens(1), **options), reference.generate(tokens(1), **options))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_plain_checkpoint_is_compressed_at_load(name: str, folder: Any, warned: list[str]) -> None:
    reference = plain(folder(name), name)
    model = open_coded(folder(name))
    streamer = model.weightstream
    assert streamer.plan.manifest.codes
    assert streamer.plan.step_nbytes > 0
    assert_equal_for_a_while(model, reference, name)
    held = streamer.stats().held_nbytes
    assert held["device"] == streamer.plan.device_nbytes
    update_every_other(model, reference)
    assert_equal_for_a_while(model, reference, name)
    streamer.remove()
    assert values(model) == values(reference)
    assert_equal_for_a_while(model, reference, name)
    assert [line for line in warned if "converted" not in line] == []


def test_pages_of_compressed_weights_are_not_held(tmp_path: Path) -> None:
    settings = {**TEXT, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_hidden_layers": 2}
    kind = transformers.LlamaForCausalLM
    kind(transformers.LlamaConfig(**settings)).to(torch.bfloat16).save_pretrained(tmp_path)
    shares = []
    for codec in ("compressed", "none"):
        options = {"device": "cpu", "codec": codec, "progress": False}
        with weightstream.from_pretrained(tmp_path, device_budget="5MiB", **options).weightstream as streamer:
            (file,) = streamer._homes.files
            shares.append(rss_nbytes(file) / file.nbytes)
    assert shares[0] < 0.1 < 0.7 < shares[1]


@torch.no_grad()
def update_every_other(*models: Any) -> None:
    for model in models:
        for index, parameter in enumerate(model.parameters()):
            if index % 2:
                parameter.mul_(1.25)


def values(model: Any) -> dict[str, Any]:
    """Everything except the place of the memory: tensors of a mapped file share a storage."""
    return {name: (kind, *facts[1:-2], facts[-1]) for name, (kind, *facts) in exact(model).items()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        *((name, "compressed") for name in NAMES),
        *(pytest.param(name, "auto", marks=[pytest.mark.stress] * (i != 2)) for i, name in enumerate(NAMES)),
    ],
)
def test_a_compressed_pack_streams_unchanged(name: str, packed: str, folder: Any, warned: list[str]) -> None:
    reference = plain(folder(name), name)
    model = open_coded(folder(name, packed))
    streamer = model.weightstream
    codes = streamer.plan.manifest.codes
    assert codes
    coded = [alias for alias in codes if alias not in streamer.plan.resident]
    assert coded
    assert all(streamer._homes.homes[alias].coded is None for alias in coded), "it is in the file"
    assert_equal_for_a_while(model, reference, name)
    assert all(streamer._homes.homes[alias].is_undecoded for alias in coded), "nothing has read them"
    update_every_other(model, reference)
    assert_equal_for_a_while(model, reference, name)
    streamer.remove()
    assert values(model) == values(reference)
    assert [line for line in warned if "converted" not in line] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama tied", "vit"])
@pytest.mark.parametrize("codec", ["auto", "none"])
def test_a_compressed_pack_is_decoded_if_nothing_is_compressed(
    name: str, codec: str, folder: Any, warned: list[str]
) -> None:
    reference = plain(folder(name), name)
    nbytes = sum(tensor.nbytes for tensor in reference.parameters())
    model = weightstream.from_pretrained(
        folder(name, "compressed"), device="cpu", device_budget=nbytes * 3 // 4, codec=codec, progress=False
    )
    assert not model.weightstream.plan.manifest.codes
    assert model.weightstream.plan.step_nbytes > 0
    assert len(warned) == 1, list(warned)
    assert_equal_for_a_while(model, reference, name)
    model.weightstream.remove()
    assert values(model) == values(reference)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "codec"), thinned(["plain", "compressed"], ["compressed", "none", "auto"]))
def test_a_cast_at_load_equals_the_cast_of_the_plain_weights(kind: str, codec: str, folder: Any) -> None:
    reference = plain(folder("llama"), "llama", dtype=torch.float16)
    model = weightstream.from_pretrained(
        folder("llama", kind), device="cpu", device_budget="1MiB", codec=codec, dtype=torch.float16, progress=False
    )
    assert bool(model.weightstream.plan.manifest.codes) is (codec == "compressed")
    assert all(parameter.dtype is torch.float16 for parameter in model.parameters())
    assert_equal_for_a_while(model, reference, "llama", torch.float16)
    model.weightstream.remove()
    for mine, theirs in zip(weights(model).values(), weights(reference).values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_damaged_pack_is_refused_or_gives_other_weights(folder: Any, tmp_path: Path) -> None:
    source = folder("llama", "compressed")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    file = next(tmp_path.glob("*.safetensors"))
    damaged = bytearray(file.read_bytes())
    at = len(damaged) - 300_000
    damaged[at : at + 200_000] = bytes(255 - byte for byte in damaged[at : at + 200_000])
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="checksum"):
        open_coded(tmp_path)
    model = open_coded(tmp_path, verify_checksums=False)
    (found,) = step(model, {"input_ids": tokens(0), "use_cache": False})
    (expected,) = step(plain(folder("llama"), "llama"), {"input_ids": tokens(0), "use_cache": False})
    assert found.shape == expected.shape
    assert not torch.equal(found, expected)


def test_reads_and_saves_of_a_compressed_pack_are_plain(folder: Any, tmp_path: Path) -> None:
    reference = plain(folder("llama tied"), "llama tied")
    model = open_coded(folder("llama tied", "compressed"))
    assert model.num_parameters() == reference.num_parameters()
    assert model.get_memory_footprint() == reference.get_memory_footprint()
    assert model.dtype is torch.bfloat16
    assert torch.equal(model.lm_head.weight.float(), reference.lm_head.weight.float())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "again")
    again = plain(tmp_path / "again", "llama tied")
    assert values(again) == values(reference)
    assert_equal_for_a_while(model, reference, "llama tied")


@pytest.mark.stress
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["plain", "compressed"])
def test_a_small_host_budget_leaves_compressed_weights_in_the_file(kind: str, folder: Any, tmp_path: Path) -> None:
    reference = plain(folder("llama"), "llama")
    options = {"host_budget": "300KiB"} | ({"offload_folder": tmp_path} if kind == "plain" else {})
    model = open_coded(folder("llama", kind), 0.65, **options)
    streamer = model.weightstream
    assert streamer.stats().held_nbytes["host"] <= 300 << 10
    if kind == "compressed":
        assert streamer.plan.disk
        assert streamer.plan.disk & streamer.plan.manifest.codes.keys()
    assert_equal_for_a_while(model, reference, "llama")
    with torch.no_grad():
        for one in (model, reference):
            one.model.layers[1].mlp.up_proj.weight.mul_(1.25)
    assert_equal_for_a_while(model, reference, "llama")


@pytest.mark.stress
@pytest.mark.parametrize("host_budget", [None, "250KiB"])
def test_a_pack_whose_weights_get_a_new_unit(host_budget: str | None, folder: Any) -> None:
    reference = plain(folder("llama"), "llama")
    model = open_coded(folder("llama", "compressed"), 0.6, host_budget=host_budget)
    streamer = model.weightstream
    assert (len(streamer.plan.disk) > 0) is (host_budget is not None)
    for one in (model, reference):
        read = one.model.layers[1].mlp.up_proj

        def hook(module: Any, args: Any, read: Any = read) -> Any:
            return (args[0] * read.weight.float().norm().to(args[0].dtype),)

        one.lm_head.register_forward_pre_hook(hook)
    assert_equal_for_a_while(model, reference, "llama")
    assert streamer.stats().unplanned_fills > 0
    homes = streamer._homes.homes
    streamed = streamer.plan.manifest.codes.keys() - streamer.plan.resident - {"model.layers.1.mlp.up_proj.weight"}
    assert streamed
    assert all(homes[alias].coded is None for alias in streamed), "copied from the file, not from RAM"
    streamer.remove()
    assert values(model) == values(reference)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    ["t5", "mamba"]
    + [
        pytest.param(name, marks=pytest.mark.stress)
        for name in ("mistral", "gpt2", "clip", "mixtral", "albert", "gemma2", "bart-bf16", "opt")
    ],
)
@pytest.mark.usefixtures("code_all")
def test_an_architecture_offloaded_in_place(name: str) -> None:
    model, reference = built(name), built(name)
    budget = least_budget(model.module, "cpu", codec="compressed")
    with weightstream.offload(model.module, device="cpu", device_budget=budget, codec="compressed") as streamer:
        assert streamer.plan.manifest.codes
        for seed in range(3):
            assert_same(step(model.module, model.inputs(seed)), step(reference.module, reference.inputs(seed)))
    assert exact(model.module) == exact(reference.module)
