"""Checkpoints loaded by transformers and by `weightstream.from_pretrained` are equal, or refused by name.

The table lists kinds of folders: each is a tiny checkpoint with a file or setting that transformers uses as it loads.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

import weightstream  # noqa: E402
from models import EXPERTS, GQA, START_ID, T5, TEXT, TOKEN_IDS, TWO_STACKS, VISION, randomise  # noqa: E402
from weightstream.adapters.hf import hub  # noqa: E402
from weightstream.api import pack  # noqa: E402
from weightstream.errors import CheckpointError, PlanError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_loading_bars", "few_plans")

SMALL = TEXT | {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 96, "num_key_value_heads": 2}
IDS = torch.tensor([[3, 17, 40, 5, 99, 23]])
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
COMMIT = "0123456789" * 4


def generated(model: Any) -> list[torch.Tensor]:
    """Text by the model's settings, of at most 8 tokens if they have no length, and its logits."""
    settings = model.generation_config
    length = {} if settings.max_length or settings.max_new_tokens else {"max_new_tokens": 8}
    found = model.generate(IDS, return_dict_in_generate=True, output_logits=True, **length)
    return [found.sequences, *found.logits]


def diffused(model: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.as_tensor(model.generate(IDS, max_new_tokens=8).sequences)]


def forward(model: Any) -> list[torch.Tensor]:
    return [found for found in model(input_ids=IDS).to_tuple() if isinstance(found, torch.Tensor)]


def seen(model: Any) -> list[torch.Tensor]:
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    ids = torch.cat([torch.full((1, 16), 127), IDS], dim=1)
    return [model.generate(ids, pixel_values=pixels, max_new_tokens=6), model(ids, pixel_values=pixels).logits]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A folder, and how it is loaded.

    `build(folder)` fills it, and may return another path to load. `auto` is the class that loads it in transformers.
    `says`
    is the text of one of our warnings; with `refused`, loading is refused with this text. `where` selects a part of the
    model.
    """

    build: Callable[[Path], Any]
    auto: str = "AutoModelForCausalLM"
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[[Any], list[torch.Tensor]] = generated
    says: str | None = None
    refused: str | None = None
    also: Callable[[Any], Any] = lambda model: None


# -- folders -----------------------------------------------------------------------------------------------------------


def save(folder: Path, kind: str, config: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Save a model with random weights."""
    torch.manual_seed(0)
    model = randomise(getattr(transformers, kind)(config), 0).to(dtype)
    model.save_pretrained(folder, **options)
    return model


def llama(folder: Path, kind: str = "LlamaForCausalLM", config: Mapping[str, Any] = {}, **options: Any) -> Any:
    return save(folder, kind, transformers.LlamaConfig(**SMALL | config), **options)


def edit(path: Path, drop: tuple[str, ...] = (), **facts: Any) -> None:
    found = {**json.loads(path.read_text()), **facts} if path.exists() else facts
    path.write_text(json.dumps({key: value for key, value in found.items() if key not in drop}))


def rewrite(path: Path, change: Callable[[str, torch.Tensor], torch.Tensor], to: Path | None = None) -> None:
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(path).items()}
    save_file(tensors, to or path, metadata={"format": "pt"})


def settings_in_config(save_model: Callable[[Path], Any], **settings: Any) -> Callable[[Path], None]:
    """A checkpoint from before there was a generation_config.json."""

    def build(folder: Path) -> None:
        save_model(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        edit(folder / "config.json", **settings)

    return build


def bart(folder: Path) -> None:
    save(folder, "BartForConditionalGeneration", transformers.BartConfig(**START_ID, **TWO_STACKS), torch.float32)


def t5(folder: Path) -> None:
    config = transformers.T5Config(**START_ID, **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    save(folder, "T5ForConditionalGeneration", config, torch.float16)


def two_berts(folder: Path) -> None:
    sizes = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    bert = transformers.BertConfig(**sizes)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, copy.deepcopy(bert))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    save(folder, "EncoderDecoderModel", config, torch.float32)


def adapter(folder: Path, base: Path) -> None:
    """Write an adapter of the model in `base`."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    about = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    peft.get_peft_model(model, about).save_pretrained(folder)


def adapter_in_it(folder: Path) -> None:
    llama(folder)
    adapter(folder, folder)


def adapter_alone(folder: Path) -> None:
    llama(folder / "base")
    adapter(folder, folder / "base")


def other_weights(name: str) -> Callable[[Path], None]:
    """config.json names the file, and the default file has another model's weights."""

    def build(folder: Path) -> None:
        llama(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".index.json"):
            for number, (key, tensor) in enumerate(load_file(folder / FILE).items()):
                save_file({key: tensor * 0.5}, folder / f"s{number}.safetensors", metadata={"format": "pt"})
            shards = {key: f"s{number}.safetensors" for number, key in enumerate(load_file(folder / FILE))}
            (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
        else:
            rewrite(folder / FILE, lambda _, tensor: tensor * 0.5, folder / name)
        edit(folder / "config.json", transformers_weights=name)

    return build


def no_dtype(change: Callable[[str, torch.Tensor], torch.Tensor], **options: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        llama(folder, **options)
        for file in folder.glob("*.safetensors"):
            rewrite(file, change)
        edit(folder / "config.json", drop=("dtype",))

    return build


def norms_in_float32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if "norm" in name else tensor


def first_in_float8(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """By name lm_head comes first, then embed_tokens."""
    return tensor.to(torch.float8_e4m3fn) if "lm_head" in name else tensor.half() if "embed" in name else tensor


def dtype_in_index(folder: Path) -> None:
    no_dtype(lambda _, tensor: tensor, max_shard_size="20KB")(folder)
    index = json.loads((folder / INDEX).read_text())
    edit(folder / INDEX, metadata=index["metadata"] | {"dtype": "float16"})


def dtype_of_a_part(folder: Path) -> None:
    llava(folder)
    facts = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", ("dtype",), text_config=facts["text_config"] | {"dtype": "float32"})


def llava(folder: Path) -> None:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION | {"num_hidden_layers": 2}),
        text_config=transformers.LlamaConfig(**SMALL),
        image_token_index=127,
        vision_feature_select_strategy="default",
    )
    save(folder, "LlavaForConditionalGeneration", config)


CODE = """
import json, os
from transformers import LlamaConfig, LlamaForCausalLM
class TinyConfig(LlamaConfig):
    model_type = "tiny-llama"
class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        {init}
    {more}
def read(folder):
    with open(os.path.join(folder, "facts.json")) as file:
        return json.load(file)
"""
OWN_LOAD = """@classmethod
    def from_pretrained(cls, path, *args, **kwargs):
        model = super().from_pretrained(path, *args, **kwargs)
        model.facts = read(path)
        return model
"""
TRUSTED, CACHED = {"trust_remote_code": True}, {"local_files_only": True}


def code(init: str = "pass", more: str = "") -> Callable[[Path], None]:
    """A model whose code is in the folder, and a file that this code reads."""

    def build(folder: Path) -> None:
        llama(folder)
        (folder / "modeling_tiny.py").write_text(CODE.format(init=init, more=more))
        (folder / "facts.json").write_text('{"scale": 3}')
        modules = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
        edit(folder / "config.json", model_type="tiny-llama", architectures=["TinyForCausalLM"], auto_map=modules)

    return build


def facts(model: Any) -> Any:
    return model.facts


def own_generate(folder: Path) -> None:
    llama(folder)
    (folder / "custom_generate").mkdir()
    text = "def generate(model, input_ids, **kwargs):\n    return model(input_ids).logits.cumsum(-1)\n"
    (folder / "custom_generate" / "generate.py").write_text(text)


def omni(folder: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 2, 4], "rope_theta": 10000.0}
    text = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **heads}
    audio = {"num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    audio |= {"d_model": 32, "max_source_positions": 64, "n_window": 8, "output_dim": 64}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 8, "fullatt_block_indexes": [1]}
    thinker = {"audio_config": audio, "vision_config": vision, "text_config": text | {"rope_parameters": rope}}
    config = transformers.Qwen2_5OmniConfig(thinker_config=thinker | {"pad_token_id": 0}, enable_audio_output=False)
    save(folder, "Qwen2_5OmniForConditionalGeneration", config)
    torch.save({"Chelsie": {"bos_token": 3}}, folder / "spk_dict.pt")


def thought(model: Any) -> list[torch.Tensor]:
    return [model.thinker(input_ids=IDS).logits, torch.tensor(list(model.speaker_map["Chelsie"].values()))]


def overlaid(name: str) -> Callable[[Path], None]:
    """The index lists a tensor in a file of its own, and its shard still has an old one."""

    def build(folder: Path) -> None:
        model = llama(folder, max_shard_size="40KB")
        tensor = model.lm_head.weight.detach() * 2
        save_file({"lm_head.weight": tensor}, folder / name, metadata={"format": "pt"})
        index = json.loads((folder / INDEX).read_text())
        edit(folder / INDEX, weight_map=index["weight_map"] | {"lm_head.weight": name})

    return build


def stale(change: Callable[[dict[str, str]], dict[str, str]]) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        llama(folder, max_shard_size="40KB")
        index = json.loads((folder / INDEX).read_text())
        edit(folder / INDEX, weight_map=change(index["weight_map"]))

    return build


def cached(folder: Path, blobs: str, save_model: Callable[[Path], Any] = llama) -> Path:
    """A repository in the Hub's cache. All of its blobs, each of them, or its snapshots are on another disk."""
    repo, other = folder / "models--o--m", folder / "other"
    for inside in ("refs", f"snapshots/{COMMIT}"):
        (repo / inside).mkdir(parents=True)
    other.mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    if blobs == "is a link":
        (repo / "blobs").symlink_to(other)
    else:
        (repo / "blobs").mkdir()
    (folder / "saved").mkdir()
    save_model(folder / "saved")
    for file in (folder / "saved").iterdir():
        shutil.move(file, other / f"{file.name}-")
        if blobs == "are links":
            (repo / "blobs" / f"{file.name}-").symlink_to(other / f"{file.name}-")
        elif blobs == "are there":
            shutil.move(other / f"{file.name}-", repo / "blobs")
        (repo / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{file.name}-")
    return repo / "snapshots" / COMMIT


def by_name(save_model: Callable[[Path], Any]) -> Callable[[Path], str]:
    def build(folder: Path) -> str:
        cached(folder, "is a link", save_model)
        return "o/m"

    return build


def links(folder: Path) -> Path:
    llama(folder / "shared")
    (folder / "model").mkdir()
    for file in (folder / "shared").iterdir():
        (folder / "model" / file.name).symlink_to(file)
    return folder / "model"


def names(change: Callable[[str], str], kind: str = "LlamaForCausalLM", **config: Any) -> Callable[[Path], None]:
    """The files have other names for weights than the model."""

    def build(folder: Path) -> None:
        llama(folder, kind, config)
        tensors = {change(name): tensor for name, tensor in load_file(folder / FILE).items()}
        save_file(tensors, folder / FILE, metadata={"format": "pt"})
        edit(folder / "config.json", architectures=["LlamaForCausalLM"])

    return build


def fewer_layers(folder: Path) -> None:
    llama(folder)
    edit(folder / "config.json", num_hidden_layers=2)


def a_head_is_missing(folder: Path) -> None:
    llama(folder)
    edit(folder / "config.json", architectures=["LlamaForSequenceClassification"])


def unknown(folder: Path) -> None:
    llama(folder)
    edit(folder / "config.json", architectures=["LlamaForCausalLMEagle3"])


def in_a_subfolder(folder: Path) -> None:
    llama(folder / "text" / "model")


def more_files(folder: Path) -> None:
    """The class is named by the config."""
    config = transformers.JevConfig(hidden_size=32, num_verbalizers=6, text_config=transformers.LlamaConfig(**SMALL))
    save(folder, "JevForDecision", config)
    tensors = load_file(folder / FILE)
    head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("proj.")}
    for name, part in ((FILE, tensors), ("head.safetensors", head)):
        save_file(part, folder / name, metadata={"format": "pt"})


def judged(model: Any) -> list[torch.Tensor]:
    return [model.proj(model.model(input_ids=IDS).last_hidden_state)]


def diffusion_gemma(folder: Path) -> None:
    sizes = SMALL | {"head_dim": 16, "sliding_window": 8, "global_head_dim": 16, "num_global_key_value_heads": 2}
    sizes |= {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
    text = transformers.DiffusionGemmaTextConfig(**sizes)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2}
    tokens = {"boi_token_id": 125, "eoi_token_id": 126, "image_token_id": 127}
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=8, **tokens)
    save(folder, "DiffusionGemmaForBlockDiffusion", config, torch.float32)


def mamba(folder: Path) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3, "pad_token_id": 0}
    save(folder, "MambaForCausalLM", transformers.MambaConfig(**sizes), torch.float32)


def lfm2(folder: Path) -> None:
    kinds = {"layer_types": ["conv", "full_attention", "conv"]}
    save(folder, "Lfm2ForCausalLM", transformers.Lfm2Config(**SMALL, **kinds), torch.float32)


def gpt2(folder: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}
    save(folder, "GPT2LMHeadModel", transformers.GPT2Config(**TOKEN_IDS, **sizes))


def mixtral(folder: Path) -> None:
    save(folder, "MixtralForCausalLM", transformers.MixtralConfig(**SMALL, num_local_experts=4))


def qwen3_moe(folder: Path) -> None:
    sizes = {**SMALL, **EXPERTS, "head_dim": GQA["head_dim"]}
    save(folder, "Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(**sizes), max_shard_size="60KB")


def bert(folder: Path) -> None:
    sizes = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    save(folder, "BertModel", transformers.BertConfig(**sizes), torch.float32)


BEAMS = {"num_beams": 3, "forced_bos_token_id": 5, "no_repeat_ngram_size": 3, "min_length": 6, "max_length": 12}
CASES = {
    # generation settings
    "settings in a file": Case(build=lambda folder: (llama(folder), edit(folder / "generation_config.json", **BEAMS))),
    "BART, settings in config.json": Case(build=settings_in_config(bart, **BEAMS), auto="AutoModelForSeq2SeqLM"),
    "T5 in float16, settings in config.json": Case(
        build=settings_in_config(t5, num_beams=2, max_length=9, repetition_penalty=1.3), auto="AutoModelForSeq2SeqLM"
    ),
    "Llama, settings in config.json": Case(build=settings_in_config(llama, suppress_tokens=[4, 9], max_length=14)),
    "no settings": Case(build=settings_in_config(llama)),
    "two stacks": Case(build=two_berts, auto="AutoModelForSeq2SeqLM"),
    "generates by its own config and ties by patterns": Case(
        build=diffusion_gemma, auto="DiffusionGemmaForBlockDiffusion", run=diffused
    ),
    "custom_generate": Case(
        build=own_generate, options=TRUSTED, run=lambda model: [model.generate(input_ids=IDS), model(IDS).logits]
    ),
    "custom_generate that is not trusted": Case(build=own_generate),
    # other files of the folder
    "adapter": Case(build=adapter_in_it, also=lambda model: sorted(model.peft_config)),
    "adapter alone": Case(build=adapter_alone, also=lambda model: sorted(model.peft_config)),
    "transformers_weights": Case(build=other_weights("hf.safetensors")),
    "transformers_weights in a folder": Case(build=other_weights("weights/hf.safetensors")),
    "transformers_weights is an index": Case(build=other_weights("hf.safetensors.index.json")),
    "more files": Case(build=more_files, auto="JevForDecision", run=judged),
    # dtype
    "norms in float32": Case(build=no_dtype(norms_in_float32)),
    "norms in float32, sharded": Case(build=no_dtype(norms_in_float32, max_shard_size="20KB")),
    "first in float8": Case(build=no_dtype(first_in_float8)),
    "first in float8, and a dtype": Case(
        build=lambda folder: (llama(folder), rewrite(folder / FILE, first_in_float8), None)[-1]
    ),
    "dtype in the index": Case(build=dtype_in_index),
    "dtype of a part": Case(build=dtype_of_a_part, auto="AutoModelForImageTextToText", run=seen),
    # its place
    "code that reads a file": Case(build=code("self.facts = read(config._name_or_path)"), options=TRUSTED, also=facts),
    "code with its own from_pretrained": Case(build=code(more=OWN_LOAD), options=TRUSTED, also=facts),
    "from_pretrained of the class": Case(build=omni, auto="Qwen2_5OmniForConditionalGeneration", run=thought),
    "in a subfolder": Case(build=in_a_subfolder, options={"subfolder": "text/model"}),
    "blobs is a link": Case(build=lambda folder: cached(folder, "is a link")),
    "blobs are links": Case(build=lambda folder: cached(folder, "are links")),
    "by its name": Case(build=by_name(llama), options=CACHED),
    "by its name, with code": Case(
        build=by_name(code("self.facts = config._name_or_path")), options=TRUSTED | CACHED, also=facts
    ),
    "links that leave the folder": Case(build=links, refused=r"outside the model folder; refused.*cp -L"),
    # index
    "sharded": Case(build=lambda folder: llama(folder, max_shard_size="20KB") and None),
    "overlaid, the last one": Case(
        build=overlaid("model-overlay.safetensors"), says=r"1 tensors are in several files.*not from model-0000"
    ),
    "overlaid, the first one": Case(build=overlaid("a.safetensors"), says="though the index lists it in a.safetensors"),
    "stale": Case(
        build=stale(lambda names: names | {"old.inv_freq": names["lm_head.weight"]}), says="stale: 1 tensors .* no file"
    ),
    "another shard": Case(
        build=stale(lambda names: names | {"lm_head.weight": min(names.values())}), says="stale.* it is in model"
    ),
    # class and names
    "unknown architecture": Case(build=unknown, refused=r"the architecture 'LlamaForCausalLMEagle3', and transformers"),
    "names of the base": Case(build=names(str, "LlamaModel", tie_word_embeddings=True)),
    "key_mapping": Case(build=names(lambda name: f"module.{name}"), options={"key_mapping": {r"^module\.": ""}}),
    "tied": Case(build=lambda folder: llama(folder, config={"tie_word_embeddings": True}) and None),
    "fewer layers": Case(build=fewer_layers, says="layers that the config does not have are left out: model.layers.2"),
    "a head is missing": Case(
        build=a_head_is_missing,
        auto="LlamaForSequenceClassification",
        ours={"allow_missing": True},
        run=forward,
        says="random values",
    ),
    "a classifier": Case(
        build=lambda folder: llama(folder, "LlamaForSequenceClassification", {"num_labels": 3}) and None,
        auto="AutoModelForSequenceClassification",
        run=forward,
    ),
    "embeddings": Case(build=bert, auto="AutoModel", run=forward),
    # families
    "Mixtral": Case(build=mixtral),
    "Qwen3 MoE, sharded": Case(build=qwen3_moe),
    "Mamba": Case(build=mamba),
    "LFM2": Case(build=lfm2),
    "GPT-2": Case(build=gpt2),
    "LLaVA": Case(build=llava, auto="AutoModelForImageTextToText", run=seen),
}
SLOW = ("Mamba",)  # slow to import


# -- comparison --------------------------------------------------------------------------------------------------------


def streaming(where: Any, nbytes: int, **options: Any) -> Any:
    """Our model, with a budget of a part of its bytes."""
    for share in (0.6, 0.75, 0.9):
        torch.manual_seed(7)  # missing weights are random
        try:
            model = weightstream.from_pretrained(where, device="cpu", device_budget=int(share * nbytes), **options)
        except PlanError:
            continue
        assert model.weightstream.plan.host_nbytes > 0
        return model
    raise AssertionError("no budget below the whole model has a plan")


def described(model: Any) -> dict[str, Any]:
    """Everything that has to be equal except weights."""
    config = model.config.to_dict()
    shared: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        shared.setdefault(id(tensor), []).append(name)
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": config,
        "name": (model.name_or_path, model.config._name_or_path),
        "generation": model.generation_config.to_dict() if model.can_generate() else None,
        "generation class": type(model.generation_config) if model.can_generate() else None,
        "tied": sorted(names for names in shared.values() if len(names) > 1),
        "dtype": model.dtype,
        "training": [name for name, module in model.named_modules() if module.training],
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
    }


def assert_equal_weights(model: Any, reference: Any) -> None:
    found, expected = model.state_dict(), reference.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture(scope="module", autouse=True)
def _modules_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give transformers another folder for the code of checkpoints, which it copies before it imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def built(case: Case, folder: Path) -> Path | str:
    """The path to load."""
    if not hasattr(transformers, case.auto):
        pytest.skip(f"transformers {transformers.__version__} has no {case.auto}")
    folder.mkdir()
    found = case.build(folder)
    return found if isinstance(found, str | Path) else folder


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore")  # transformers warns about settings
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.stress] * (n in SLOW)) for n in CASES])
def test_as_transformers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    where = built(case, tmp_path / "model")
    options = dict(case.options) | ({"cache_dir": str(tmp_path / "model")} if isinstance(where, str) else {})
    torch.manual_seed(7)
    reference = getattr(transformers, case.auto).from_pretrained(where, **options)
    for parameter in reference.parameters():  # the address of a matrix changes bits in MKL
        parameter.data = parameter.data.clone()
    nbytes = sum(tensor.nbytes for tensor in reference.parameters())
    if case.refused is not None:
        with pytest.raises(CheckpointError, match=case.refused):
            streaming(where, nbytes, **options)
        return
    caplog.clear()
    model = streaming(where, nbytes, **options, **case.ours)
    warned = "\n".join(record.getMessage() for record in caplog.records if record.name == "weightstream")
    assert case.says is None or re.search(case.says, warned), warned
    assert described(model) == described(reference)
    assert case.also(model) == case.also(reference)
    with torch.no_grad():
        expected = case.run(reference)
        for _ in range(2):  # so that the ring wraps
            found = case.run(model)
            assert len(found) == len(expected) > 0
            assert all(map(torch.equal, found, expected))
    assert_equal_weights(model, reference)
    model.weightstream.remove()
    assert_equal_weights(model, reference)


def test_few_folders_of_the_table_are_refused() -> None:
    assert len(CASES) >= 30
    assert sum(case.refused is not None for case in CASES.values()) <= 4


# -- packs and plans, which take a path but no keywords of a load
# --------------------------------------------------------

BY_PATH = [name for name, case in CASES.items() if not case.options.keys() & {"subfolder", "local_files_only"}]
ADAPTERS = [name for name in BY_PATH if name.startswith("adapter")]
WHOLE = [name for name in BY_PATH if not CASES[name].ours and not CASES[name].options.keys() & {"key_mapping"}]


@pytest.mark.few(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in WHOLE if n not in ADAPTERS and CASES[n].refused is None])
def test_transformers_reads_a_pack_as_its_folder(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    where = built(case, tmp_path / "model")
    pack.pack(str(where), tmp_path / "pack", trust_remote_code="trust_remote_code" in case.options)
    load = getattr(transformers, case.auto).from_pretrained
    found, expected = (load(path, **case.options) for path in (tmp_path / "pack", where))
    assert_equal_weights(found, expected)
    was, messages = described(found), described(expected)
    for facts in (was, messages):
        for key in ("transformers_weights", "_name_or_path"):
            facts["config"].pop(key, None)
        facts["name"] = None
        facts["class"] = facts["class"].rpartition(".")[2]  # the module of code in a folder has the folder's name
    assert was == messages
    assert case.also(found) == case.also(expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_not_packed(name: str, tmp_path: Path) -> None:
    where = built(CASES[name], tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"adapter_config\.json belongs to an adapter, .*merge_and_unload"):
        pack.pack(str(where), tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


@pytest.mark.few(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BY_PATH)
def test_a_plan_is_for_the_model_that_transformers_loads(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    where = built(case, tmp_path / "model")
    trusted = "trust_remote_code" in case.options
    if case.refused is not None:
        with pytest.raises(CheckpointError, match=case.refused):
            hub.skeleton(where, trust_remote_code=trusted)
        return
    planned, _ = hub.skeleton(where, trust_remote_code=trusted)
    loaded = getattr(transformers, case.auto).from_pretrained(where, **case.options)
    found, expected = ({n: (t.shape, t.dtype) for n, t in m.state_dict().items()} for m in (planned, loaded))
    assert found == expected
    for key in ("class", "name", "tied", "dtype"):
        assert described(planned)[key] == described(loaded)[key]
