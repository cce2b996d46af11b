"""Tiny pipelines of diffusers, built in code: random weights, a tokenizer of one word per id, no download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from models import randomise
from words import tokenizer

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

PROMPT = "w5 w9 w23"
TEXT = MappingProxyType(
    {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)


def words(length: int) -> Any:
    found = tokenizer()
    found.model_max_length = length
    return found


def clip(seed: int, *, projected: bool = False) -> Any:
    config = transformers.CLIPTextConfig(**TEXT | {"projection_dim": 32, "hidden_act": "gelu"})
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return randomise(kind(config), seed)


def t5(seed: int, kind: str = "T5") -> Any:
    options = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    config = getattr(transformers, f"{kind}Config")(**options, pad_token_id=0, eos_token_id=2, bos_token_id=1)
    return randomise(getattr(transformers, f"{kind}EncoderModel")(config), seed)


def vae(seed: int, channels: int = 4) -> Any:
    made = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=channels,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=1.5,
    )
    return randomise(made, seed)


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(1),
        text_encoder=clip(2),
        tokenizer=words(77),
        text_encoder_2=t5(3),
        tokenizer_2=words(48),
        transformer=randomise(transformer, 4),
    )


def sd3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        pos_embed_max_size=16,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(1),
        text_encoder=clip(2, projected=True),
        tokenizer=words(77),
        text_encoder_2=clip(3, projected=True),
        tokenizer_2=words(77),
        text_encoder_3=t5(5),
        tokenizer_3=words(77),
        transformer=randomise(transformer, 4),
    )


def unet(seed: int) -> Any:
    made = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=32,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
        norm_num_groups=8,
    )
    return randomise(made, seed)


def sdxl_parts() -> dict[str, Any]:
    return {
        "scheduler": diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, timestep_spacing="leading"),
        "vae": vae(1),
        "text_encoder": clip(2),
        "tokenizer": words(77),
        "text_encoder_2": clip(3, projected=True),
        "tokenizer_2": words(77),
        "unet": unet(4),
    }


def sdxl() -> Any:
    return diffusers.StableDiffusionXLPipeline(**sdxl_parts())


def controlnet() -> Any:
    net = diffusers.ControlNetModel.from_unet(unet(6), conditioning_embedding_out_channels=(16, 32))
    return diffusers.StableDiffusionXLControlNetPipeline(**sdxl_parts(), controlnet=randomise(net, 7))


def wan() -> Any:
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=4,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    made = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.WanPipeline(
        transformer=randomise(transformer, 4),
        vae=randomise(made, 1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder=t5(2, "UMT5"),
        tokenizer=words(77),
    )


def qwen() -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    z = 4
    made = diffusers.AutoencoderKLQwenImage(
        base_dim=z * 6,
        z_dim=z,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * z,
        latents_std=[1.0] * z,
    )
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
            "vocab_size": 128,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
        hidden_size=16,
        vocab_size=128,
        vision_end_token_id=4,
        vision_start_token_id=3,
        vision_token_id=5,
    )
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return diffusers.QwenImagePipeline(
        transformer=randomise(transformer, 4),
        vae=randomise(made, 1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=randomise(encoder, 2),
        tokenizer=words(1024),
    )


def upcast() -> Any:
    """SDXL in float16, whose VAE is cast to float32 around its calls."""
    made = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=32,
        scaling_factor=1.5,
        force_upcast=True,
    )
    return diffusers.StableDiffusionXLPipeline(**sdxl_parts() | {"vae": randomise(made, 1)}).to(torch.float16)


def svd() -> Any:
    """Image to video in float16: the VAE encodes in float32, and decodes in float16."""
    unet = diffusers.UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 32),
        layers_per_block=1,
        sample_size=32,
        in_channels=8,
        out_channels=4,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=32,
        num_attention_heads=8,
        projection_class_embeddings_input_dim=96,
        addition_time_embed_dim=32,
    )
    vae = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32),
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        latent_channels=4,
        force_upcast=True,
    )
    encoder = transformers.CLIPVisionModelWithProjection(_vision())
    pipe = diffusers.StableVideoDiffusionPipeline(
        vae=randomise(vae, 1),
        image_encoder=randomise(encoder, 2),
        unet=randomise(unet, 3),
        scheduler=diffusers.EulerDiscreteScheduler(),
        feature_extractor=transformers.CLIPImageProcessor(crop_size=32, size=32),
    )
    return pipe.to(torch.float16)


def _vision() -> Any:
    return transformers.CLIPVisionConfig(
        hidden_size=32,
        image_size=32,
        projection_dim=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_channels=3,
        num_hidden_layers=3,
        patch_size=16,
    )


def checked() -> Any:
    """Stable Diffusion with a safety checker, whose forward reads values that it computes."""
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker

    small = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    text = {**TEXT, "hidden_act": "gelu"}
    config = transformers.CLIPConfig(text_config=text, vision_config=_vision().to_dict(), projection_dim=32)
    return diffusers.StableDiffusionPipeline(
        vae=vae(1),
        text_encoder=clip(2),
        tokenizer=words(77),
        unet=randomise(small, 4),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=randomise(StableDiffusionSafetyChecker(config), 5),
        feature_extractor=transformers.CLIPImageProcessor(crop_size=32, size=32),
    )


def combined() -> Any:
    """Two pipelines in one: Kandinsky's prior, and its decoder."""
    encoder = transformers.CLIPTextConfig(**TEXT | {"projection_dim": 32, "hidden_act": "gelu"})
    unet = diffusers.UNet2DConditionModel(
        in_channels=4,
        out_channels=8,
        addition_embed_type="image",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(32, 64),
        layers_per_block=1,
        encoder_hid_dim=32,
        encoder_hid_dim_type="image_proj",
        cross_attention_dim=32,
        attention_head_dim=4,
        resnet_time_scale_shift="scale_shift",
    )
    movq = diffusers.VQModel(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
        in_channels=3,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=8,
        norm_type="spatial",
        num_vq_embeddings=12,
        out_channels=3,
        up_block_types=["AttnUpDecoderBlock2D", "UpDecoderBlock2D"],
        vq_embed_dim=4,
    )
    prior = diffusers.PriorTransformer(num_attention_heads=2, attention_head_dim=12, embedding_dim=32, num_layers=2)
    return diffusers.KandinskyV22CombinedPipeline(
        unet=randomise(unet, 1),
        scheduler=diffusers.DDIMScheduler(),
        movq=randomise(movq, 2),
        prior_prior=randomise(prior, 3),
        prior_image_encoder=randomise(transformers.CLIPVisionModelWithProjection(_vision()), 4),
        prior_text_encoder=randomise(transformers.CLIPTextModelWithProjection(encoder), 5),
        prior_tokenizer=words(77),
        prior_scheduler=diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log",
            prediction_type="sample",
            num_train_timesteps=1000,
            clip_sample=True,
            clip_sample_range=5.0,
        ),
        prior_image_processor=transformers.CLIPImageProcessor(size=32, crop_size=32),
    )


PIPELINES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"flux": flux, "sd3": sd3, "sdxl": sdxl, "controlnet": controlnet, "wan": wan, "qwen": qwen}
)
# pipelines that treat their components in special ways
SPECIAL: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"upcast": upcast, "svd": svd, "combined": combined, "checked": checked}
)
_CALLS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "flux": {"max_sequence_length": 48, "guidance_scale": 3.5},
        "sd3": {"max_sequence_length": 77},
        "controlnet": {"image": torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)},
        "combined": {"prior_num_inference_steps": 2},
        "upcast": {"num_inference_steps": 2},  # float16 is slow on a CPU
        "svd": {
            "image": torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32),
            "num_frames": 2,
            "num_inference_steps": 2,
        },
        "wan": {"num_frames": 5, "max_sequence_length": 16},
        # the words of its template, of which the first 34 are dropped, are not in the tokenizer
        "qwen": {
            "prompt": " ".join(f"w{i}" for i in range(10, 50)),
            "negative_prompt": " ".join(f"w{i}" for i in range(20, 60)),
            "max_sequence_length": 32,
            "true_cfg_scale": 2.0,
        },
    }
)


def build(name: str, device: str = "cpu") -> Any:
    """A new pipeline, always the same, that shows no bars."""
    pipe = {**PIPELINES, **SPECIAL}[name]()
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments(name: str, *, steps: int = 3, size: int = 32) -> dict[str, Any]:
    """Arguments of a call, except the generator."""
    arguments = {"prompt": PROMPT, "num_inference_steps": steps, "height": size, "width": size}
    if name == "svd":
        del arguments["prompt"]
    return arguments | _CALLS.get(name, {})


def image(pipe: Any, name: str, *, seed: int = 5, **call: Any) -> torch.Tensor:
    """Output of a call, with noise from a generator on the CPU."""
    output = pipe(**arguments(name) | call, generator=torch.Generator("cpu").manual_seed(seed), output_type="pt")
    found = output.frames if name in ("wan", "svd") else output.images
    return found.detach().cpu()
