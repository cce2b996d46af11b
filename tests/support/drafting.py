"""Models that draft for others, and runs of `generate` with their drafts on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_cuda import FakeCuda
from generating import MODELS, STATIC, WINDOW
from models import TEXT, cache_name, randomise
from weightstream.adapters.generation.decoder import DecodeReport
from weightstream.adapters.generation.drafted import speculate_with

transformers = pytest.importorskip("transformers")

NUM = 24  # tokens of a text
LENGTH = 9  # of a prompt: with NUM - 1 a multiple of 16, where attention on the CPU is the same in each process
WIDTH = 6
LOOKUP = {"prompt_lookup_num_tokens": WIDTH - 1}
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 3}
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
WIDE = 64  # a window that is longer than the texts
CACHE = cache_name(transformers.LlamaForCausalLM)


def build(name: str, layers: int = 2, window: int = WIDE) -> Any:
    config = MODELS[name]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    if getattr(config, "sliding_window", None) == WINDOW:
        config.sliding_window = window
    model = randomise(transformers.AutoModelForCausalLM.from_config(config), seed=11)
    if name == "qwen3-moe":
        model.set_experts_implementation("batched_mm")  # as transformers decodes on a GPU
    return model


def prompt(length: int = LENGTH, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(length))


def options(**more: Any) -> dict[str, Any]:
    chosen = {"max_new_tokens": NUM, "pad_token_id": 0, "eos_token_id": None, "do_sample": False} | OUTPUTS | more
    return {name: value for name, value in chosen.items() if value is not ...}


def drafts(assistant: Any, num: int = WIDTH - 1) -> dict[str, Any]:
    """Options by which this model drafts `num` tokens a pass."""
    assistant.generation_config.update(
        num_assistant_tokens=num, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0
    )
    return {"assistant_model": assistant}


@torch.no_grad()
def noised(model: Any, share: float = 0.02) -> Any:
    made, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    for param in made.parameters():
        param += torch.randn(param.shape, generator=generator) * param.std() * share
    return made


class Scripted(transformers.LlamaForCausalLM):
    """A model that says a known text, whatever it is given."""

    text: Sequence[int] = ()

    def forward(  # type: ignore[override]
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        first = int(kwargs[CACHE].get_seq_length())
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        end = first + input_ids.shape[1]
        said = [self.text[min(position + 1, len(self.text) - 1)] for position in range(first, end)]
        hot = torch.nn.functional.one_hot(torch.tensor(said), output.logits.shape[-1])
        output.logits = 50.0 * hot[None, -output.logits.shape[1] :].float()
        return output


def scripted(text: Sequence[int]) -> Any:
    config = MODELS["llama"]()
    config.num_hidden_layers = 1
    made = Scripted(config).eval()
    made.text = text
    return made


class MtpModel(transformers.Glm4MoeForCausalLM):
    """A model whose third layer is one that predicts a further token."""

    _keys_to_ignore_on_load_unexpected = (r"model\.layers\.2.*",)


def save_mtp(folder: Path) -> Path:
    """Save an `MtpModel` whose next token depends on the last one only, so that its further layer predicts it."""
    from safetensors.torch import load_file, save_file

    sizes = TEXT | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    config = transformers.Glm4MoeConfig(**sizes, **experts, first_k_dense_replace=2)
    model = randomise(transformers.Glm4MoeForCausalLM(config), 3)
    for name, param in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            param.data.zero_()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    ones, layer = torch.ones(64), "model.layers.2"
    tensors |= {f"{layer}.enorm.weight": ones, f"{layer}.hnorm.weight": ones.clone()}
    tensors[f"{layer}.eh_proj.weight"] = torch.cat([torch.eye(64), torch.zeros(64, 64)], 1)
    tensors[f"{layer}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.num_hidden_layers = 2
    config.save_pretrained(folder)
    return folder


def dflash() -> dict[str, Any]:
    """Options by which a tiny model drafts a block at once, from two layers of a model of four."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 64}
    drafted = {"block_size": WIDTH, "mask_token_id": 127, "target_layer_ids": [0, 2]}
    config = transformers.MuseGlimmerAssistantConfig(**sizes, **drafted, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return {"assistant_model": randomise(transformers.AutoModel.from_config(config), 3), "speculation_type": "dflash"}


def plainly(model: Any, ids: torch.Tensor, seed: int = 3, **more: Any) -> Any:
    """The text of one token a pass, on a static cache."""
    torch.manual_seed(seed)
    return model.generate(ids, **options(**more), **STATIC)


def drafted(
    model: Any, ids: torch.Tensor, bits: Any = "token", cuda: Any = None, seed: int = 3, **more: Any
) -> tuple[Any, DecodeReport]:
    """The text of passes that verify drafted tokens; `cuda`: a recorder of graphs, or something that has one."""
    torch.manual_seed(seed)
    recorder = cuda.recorder if isinstance(cuda, FakeCuda) else cuda
    return speculate_with(model, ids, options(**more), recorder, bits)


def assert_equal(got: Any, want: Any) -> None:
    """Tokens, scores and logits, bit for bit."""
    assert got.sequences.tolist() == want.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = torch.stack(getattr(got, name)), torch.stack(getattr(want, name))
        assert torch.equal(ours, theirs), f"{name} differ at {(ours != theirs).flatten(1).any(1).nonzero().tolist()}"
