"""Models of several kinds at their true sizes, with fresh random weights, and inputs. Knows no system and no clock.

Configs are spelled out here, instead of read from a config.json: a machine with a GPU may have no network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from model import TINY, Decoder, Shape
from torch import nn

GIB = 2**30
PERCENTS = (25, 50)
Draw = Callable[..., torch.Tensor]  # makes a random tensor of a shape, in bf16
Inputs = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A model with full and tiny sizes, and the inputs of a step of so many samples.

    Its device budgets are in GiB, or shares of its bytes, `PERCENTS`.
    """

    build: Callable[..., nn.Module]
    full: dict[str, Any]
    tiny: dict[str, Any]
    inputs: Callable[[Any, int, Draw], Inputs]
    batches: tuple[int, ...] = (1,)
    budgets_gib: tuple[int, ...] = ()

    def empty(self, tiny: bool) -> nn.Module:
        """The model without weights."""
        with torch.device("meta"):
            model = self.build(**(self.tiny if tiny else self.full))
        if buffers := [name for name, _ in model.named_buffers()]:
            raise ValueError(f"{type(model).__name__} has to compute {', '.join(buffers)}: on meta it cannot")
        return model.to(torch.bfloat16).eval().requires_grad_(False)

    def made(self, tiny: bool, device: torch.device, random: torch.Generator) -> nn.Module:
        """The model with random weights, drawn on the device."""
        model = self.empty(tiny).to_empty(device=device)
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # to_empty unties weights
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("weight"):  # a norm's
                parameter.uniform_(0.5, 1.5, generator=random)
            else:
                parameter.normal_(0, 0.02, generator=random)
        return model

    def budgets(self, tiny: bool, nbytes: int) -> dict[str, int]:
        """Name -> bytes."""
        if self.budgets_gib and not tiny:
            return {f"{gib} GiB": gib * GIB for gib in self.budgets_gib}
        return {f"{percent} %": nbytes * percent // 100 for percent in PERCENTS}


def draw_with(random: torch.Generator) -> Draw:
    return partial(torch.randn, generator=random, device=random.device, dtype=torch.bfloat16)


def flux(**sizes: Any) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(patch_size=1, guidance_embeds=True, **sizes)


def flux_inputs(model: Any, batch: int, draw: Draw) -> Inputs:
    """A step of a guided image: 4,096 tokens of 1024 x 1024 pixels and 512 of text."""
    side, num_text = (64, 512) if model.config.num_layers > 4 else (4, 8)  # its config does not say whether it is tiny
    places = torch.zeros_like(draw(side * side, 3))
    index = torch.arange(side * side, device=places.device)
    places[:, 1], places[:, 2] = index // side, index % side
    return {
        "hidden_states": draw(batch, side * side, model.config.in_channels),
        "encoder_hidden_states": draw(batch, num_text, model.config.joint_attention_dim),
        "pooled_projections": draw(batch, model.config.pooled_projection_dim),
        "timestep": torch.full_like(draw(batch), 0.5),
        "guidance": torch.full_like(draw(batch), 3.5),
        "img_ids": places,
        "txt_ids": torch.zeros_like(draw(num_text, 3)),
        "return_dict": False,
    }


def vit(**sizes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(patch_size=16, **sizes))


def vit_inputs(model: Any, batch: int, draw: Draw) -> Inputs:
    return {"pixel_values": draw(batch, 3, *2 * [model.config.image_size])}


def whisper(**sizes: Any) -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(WhisperConfig(**sizes))


def whisper_inputs(model: Any, batch: int, draw: Draw) -> Inputs:
    """Windows of 30 s: two frames to a position."""
    return {"input_features": draw(batch, model.config.num_mel_bins, 2 * model.config.max_source_positions)}


def t5(**sizes: Any) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", **sizes))


def t5_inputs(model: Any, batch: int, draw: Draw) -> Inputs:
    ids = draw(batch, 512).abs().mul(model.config.vocab_size / 8).long()
    return {"input_ids": ids.clamp(max=model.config.vocab_size - 1)}


def sdxl(**sizes: Any) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time",
        use_linear_projection=True,
        **sizes,
    )


def sdxl_inputs(model: Any, batch: int, draw: Draw) -> Inputs:
    """A step of an image with guidance: one sample with the prompt, one without."""
    config = model.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "sample": draw(batch, 4, config.sample_size, config.sample_size),
        "timestep": torch.full_like(draw(1), 500),
        "encoder_hidden_states": draw(batch, 77, config.cross_attention_dim),
        "added_cond_kwargs": {"text_embeds": draw(batch, pooled), "time_ids": draw(batch, 6).abs().mul(500).round()},
        "return_dict": False,
    }


def llama(shape: Shape) -> nn.Module:
    return Decoder(shape)


def llama_inputs(model: Any, batch: int, draw: Draw) -> Inputs:
    return {"x": draw(batch, 1, model.norm.weight.numel())}


KINDS = {
    "flux": Kind(  # FLUX.1-dev's transformer
        build=flux,
        full={
            "num_layers": 19,
            "num_single_layers": 38,
            "num_attention_heads": 24,
            "attention_head_dim": 128,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "in_channels": 64,
            "axes_dims_rope": (16, 56, 56),
        },
        tiny={
            "num_layers": 4,
            "num_single_layers": 8,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 32,
            "in_channels": 16,
            "axes_dims_rope": (4, 6, 6),
        },
        inputs=flux_inputs,
        budgets_gib=(1, 4, 8, 12, 16),
    ),
    "vit": Kind(  # ViT-L/16
        build=vit,
        full={"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        tiny={
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "image_size": 32,
        },
        inputs=vit_inputs,
        batches=(64,),
    ),
    "whisper": Kind(  # the encoder of Whisper-large-v3
        build=whisper,
        full={
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "num_mel_bins": 128,
        },
        tiny={
            "d_model": 64,
            "encoder_layers": 8,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "num_mel_bins": 16,
            "max_source_positions": 50,
        },
        inputs=whisper_inputs,
        batches=(1, 8),
    ),
    "t5": Kind(  # the encoder of T5-XXL v1.1
        build=t5,
        full={"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128},
        tiny={"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 8, "num_heads": 4, "vocab_size": 128},
        inputs=t5_inputs,
    ),
    "sdxl": Kind(  # SDXL's UNet, 1024 x 1024
        build=sdxl,
        full={
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        tiny={
            "sample_size": 16,
            "block_out_channels": (32, 64, 64),
            "transformer_layers_per_block": (1, 1, 2),
            "attention_head_dim": (2, 4, 4),
            "cross_attention_dim": 64,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
        },
        inputs=sdxl_inputs,
        batches=(2,),
    ),
    "llama": Kind(build=llama, full={"shape": Shape()}, tiny={"shape": TINY}, inputs=llama_inputs),
}
