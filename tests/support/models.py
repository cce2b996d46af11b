"""The models that the value tests stream: tiny, seeded, every weight random. Nothing here imports the streamer.

`MODELS` maps a name to a function that builds a `Model`. Building twice gives bitwise the same model. That is how a
test gets its reference, since a deepcopy would separate views of one storage.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import fixtures_structure
import fixtures_weights
from weightstream.adapters.steps.decode_steps import CACHES

Inputs = Callable[[int], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A module in eval mode, and `inputs(seed)`, the keyword arguments of one step on the CPU."""

    module: nn.Module
    inputs: Inputs


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Overwrite every floating parameter and buffer, since a weight of zeros or ones could hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            values = torch.randn(tensor.shape, generator=generator)
            fan_in = tensor[0].numel() if tensor.dim() > 1 and len(tensor) else 4
            values *= max(fan_in, 1) ** -0.5
            # running_var: a variance must be positive
            tensor.copy_(values.abs() + 0.5 if name.endswith("running_var") else values)
    return module.eval()


def tokens(seed: int, *, length: int = 7) -> torch.Tensor:
    """Two rows of token ids. The length grows with the seed, so that steps also differ in shape."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, 128, (2, length + seed), generator=generator)


def floats(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2000 + seed))


def token_inputs(seed: int) -> dict[str, Any]:
    return {"input_ids": tokens(seed)}


def seq2seq_inputs(seed: int) -> dict[str, Any]:
    return {"input_ids": tokens(seed), "decoder_input_ids": tokens(seed + 50, length=-46)}


def pixel_inputs(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"pixel_values": floats(seed, 2, 3, 32, 32).to(dtype)}


def clip_inputs(seed: int) -> dict[str, Any]:
    return token_inputs(seed) | pixel_inputs(seed, torch.float32)


def whisper_inputs(seed: int) -> dict[str, Any]:
    return {"input_features": floats(seed, 2, 20, 32), "decoder_input_ids": tokens(seed, length=4)}


BLOCKLESS = frozenset({"NoModuleList", "BareParameters", "LinearBatchNormLinear", "Recurrent"})  # no repeated blocks
TEXT = MappingProxyType(
    {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)
VISION = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
)
GQA = MappingProxyType({"num_key_value_heads": 2, "head_dim": 16})
EXPERTS = MappingProxyType({"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 6})
T5 = MappingProxyType({"d_model": 64, "d_ff": 160, "d_kv": 16, "num_layers": 4, "num_heads": 4})
TWO_STACKS = MappingProxyType(
    {
        "d_model": 64,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 160,
        "decoder_ffn_dim": 160,
    }
)
TOKEN_IDS = MappingProxyType({"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
START_ID = MappingProxyType({"decoder_start_token_id": 0, **TOKEN_IDS})


def build_transformers(
    name: str, inputs: Inputs, dtype: torch.dtype = torch.float32, **config: object
) -> Callable[[], Model]:
    """A builder of the transformers class `name`. Its configuration class has the same name without the head."""

    def build() -> Model:
        transformers = pytest.importorskip("transformers")
        model_class = getattr(transformers, name)
        module = model_class(model_class.config_class(**config)).to(dtype)
        return Model(module=randomise(module, zlib.crc32(name.encode())), inputs=inputs)

    return build


def text(name: str, dtype: torch.dtype = torch.float32, **config: object) -> Callable[[], Model]:
    return build_transformers(name, token_inputs, dtype, **{**TEXT, **config})


def cache_name(model: Any) -> str:
    """Name of the cache argument of a forward, in the installed version of transformers."""
    takes = inspect.signature(model.forward).parameters
    return next(name for name in CACHES if name in takes)


def llama_tensors(folder: Path, **sizes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Write the configuration of a bf16 Llama to a folder, and return its tensors: parts of one random block."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in transformers.LlamaForCausalLM(config).named_parameters()}
    most = max(shape.numel() for shape in shapes.values()) + 4096 * len(shapes)
    block = (torch.randn(most, generator=torch.Generator().manual_seed(0)) * 0.03).bfloat16()
    for index, (name, shape) in enumerate(shapes.items()):
        values = block[index * 4096 : index * 4096 + shape.numel()].view(shape).clone()
        yield name, values + 1 if len(shape) == 1 else values


def vision(name: str, dtype: torch.dtype = torch.float32, **config: object) -> Callable[[], Model]:
    return build_transformers(name, functools.partial(pixel_inputs, dtype=dtype), dtype, **config)


def siglip_or_clip(name: str) -> Callable[[], Model]:
    return build_transformers(
        name,
        clip_inputs,
        text_config={**TEXT, "projection_dim": 64},
        vision_config={**VISION, "projection_dim": 64},
        projection_dim=64,
    )


def build_vae() -> Model:
    """The tiny convolutional autoencoder of a latent diffusion model."""
    diffusers = pytest.importorskip("diffusers")
    module = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=2,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=16,
    )
    return Model(module=randomise(module, 7), inputs=lambda seed: {"sample": floats(seed, 2, 3, 16, 16)})


def build_fixture(fixture: type[nn.Module]) -> Callable[[], Model]:
    """A builder of a fixture class: `x` of 32 features. The seed switches the class's branch, if it has one."""

    def inputs(seed: int) -> dict[str, Any]:
        extra = {"branch": seed % 2 == 1} if fixture in fixtures_structure.BRANCHING else {}
        return {"x": floats(seed, 3 + seed, 32), **extra}

    def build() -> Model:
        torch.manual_seed(0)
        return Model(module=randomise(fixture(), zlib.crc32(fixture.__name__.encode())), inputs=inputs)

    return build


ARCHITECTURES: Mapping[str, Callable[[], Model]] = MappingProxyType(
    {
        "llama": text("LlamaForCausalLM", **GQA),
        "llama-bf16": text("LlamaForCausalLM", torch.bfloat16, **GQA, tie_word_embeddings=True),
        "qwen2": text("Qwen2ForCausalLM", num_key_value_heads=2),
        "qwen3-bf16": text("Qwen3ForCausalLM", torch.bfloat16, **GQA),
        "mistral": text("MistralForCausalLM", **GQA, sliding_window=4),
        "gemma2": text("Gemma2ForCausalLM", **GQA, sliding_window=4),
        "gemma3-bf16": text(
            "Gemma3ForCausalLM",
            torch.bfloat16,
            **GQA,
            sliding_window=4,
            layer_types=[*["sliding_attention"] * 3, "full_attention"],
        ),
        "gpt2": text("GPT2LMHeadModel", n_inner=160),
        "gpt_neox": text("GPTNeoXForCausalLM"),
        "opt": text("OPTForCausalLM", ffn_dim=160, word_embed_proj_dim=64),
        "phi": text("PhiForCausalLM"),
        "phi3-bf16": text("Phi3ForCausalLM", torch.bfloat16, num_key_value_heads=2),
        "olmo2": text("Olmo2ForCausalLM", num_key_value_heads=2),
        "smollm3": text("SmolLM3ForCausalLM", num_key_value_heads=2),
        "falcon-bf16": text("FalconForCausalLM", torch.bfloat16, ffn_hidden_size=160),
        "bloom": text("BloomForCausalLM"),
        "bert": text("BertForMaskedLM"),
        "roberta": text("RobertaModel"),
        "modernbert": text("ModernBertModel", cls_token_id=1, sep_token_id=2),
        "albert": text("AlbertModel", embedding_size=32, num_hidden_groups=2),
        "t5": build_transformers("T5ForConditionalGeneration", seq2seq_inputs, **T5, **START_ID),
        "bart-bf16": build_transformers(
            "BartForConditionalGeneration", seq2seq_inputs, torch.bfloat16, **TWO_STACKS, **START_ID
        ),
        "whisper": build_transformers(
            "WhisperModel",
            whisper_inputs,
            **TWO_STACKS,
            **START_ID,
            num_mel_bins=20,
            max_source_positions=16,
            max_target_positions=32,
        ),
        "vit": vision("ViTModel", **VISION),
        "clip": siglip_or_clip("CLIPModel"),
        "siglip": siglip_or_clip("SiglipModel"),
        "swin": vision(
            "SwinModel", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2, 2], num_heads=[2, 2, 4], window_size=4
        ),
        "convnext-bf16": vision(
            "ConvNextModel", torch.bfloat16, image_size=32, hidden_sizes=[16, 32, 64, 64], depths=[2, 2, 2, 2]
        ),
        "mamba": text("MambaForCausalLM", state_size=8),
        "mamba2": text("Mamba2ForCausalLM", num_heads=8, head_dim=16, n_groups=2, state_size=8, chunk_size=8),
        "jamba": text(
            "JambaForCausalLM",
            num_hidden_layers=6,  # attention or a state space, with experts or without
            num_key_value_heads=2,
            num_experts=4,
            mamba_d_state=8,
            mamba_dt_rank=4,
            attn_layer_period=3,
            attn_layer_offset=1,
        ),
        "mixtral": text("MixtralForCausalLM", **GQA, num_local_experts=4),
        "qwen2_moe": text("Qwen2MoeForCausalLM", num_key_value_heads=2, **EXPERTS, shared_expert_intermediate_size=64),
        "qwen3_moe-bf16": text("Qwen3MoeForCausalLM", torch.bfloat16, **GQA, **EXPERTS),
    }
)

FIXTURES: Mapping[str, Callable[[], Model]] = MappingProxyType(
    {fixture.__name__: build_fixture(fixture) for fixture in (*fixtures_structure.FIXTURES, *fixtures_weights.FIXTURES)}
    | {"AutoencoderKL": build_vae}
)

MODELS: Mapping[str, Callable[[], Model]] = MappingProxyType({**ARCHITECTURES, **FIXTURES})


def to_device(value: Any, device: str) -> Any:
    """Keyword arguments of a step, moved to a device."""
    return {key: item.to(device) if isinstance(item, torch.Tensor) else item for key, item in value.items()}


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of an output: in nested containers, dataclasses, and objects such as key-value caches."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_of(vars(value))


def step(module: nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Copies of the tensors that one forward returns: a later step cannot change them."""
    with torch.no_grad():
        return [tensor.detach().clone() for tensor in tensors_of(module(**inputs))]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Compare bitwise, tensor by tensor. A NaN or a constant is an error, since the comparison could not fail."""
    assert expected, "the model returned no tensor"
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype, f"tensor {index}: {a.dtype}, not {b.dtype}"
        assert a.device == b.device, f"tensor {index}: on {a.device}, not {b.device}"
        assert torch.equal(a, b), f"tensor {index} of shape {tuple(b.shape)} differs"


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under each of its names, including non-persistent buffers and ties."""
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def model_nbytes(module: nn.Module) -> int:
    """Bytes that the weights span. Each storage counts once, however many ties and views it has."""
    spans: dict[int, tuple[int, int]] = {}
    for tensor in weights(module).values():
        if tensor.numel():
            key = tensor.untyped_storage().data_ptr()
            extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            low, high = spans.get(key, (tensor.data_ptr(), 0))
            end = tensor.data_ptr() + extent * tensor.element_size()
            spans[key] = (min(low, tensor.data_ptr()), max(high, end))
    return sum(high - low for low, high in spans.values())
