"""Streams a small Flux pipeline of diffusers, of random weights, in 0.4 of its bytes: the image is the same."""

import logging
import warnings

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

warnings.simplefilter("ignore")  # from libraries that diffusers imports
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel  # noqa: E402
from transformers import (  # noqa: E402
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

import weightstream  # noqa: E402

SIZE = 64
words = {word: index for index, word in enumerate(["<pad>", "<eos>", "a", "photo", "of", "cat", "on", "the", "moon"])}
text = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
text.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def tokenizer(length: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=text, pad_token="<pad>", eos_token="<eos>", model_max_length=length)


def build() -> FluxPipeline:
    torch.manual_seed(1)
    clip = CLIPTextConfig(vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, eos_token_id=1)
    t5 = T5Config(vocab_size=64, d_model=256, d_ff=512, d_kv=32, num_layers=4, num_heads=8)
    sizes = {"num_layers": 3, "num_single_layers": 4, "attention_head_dim": 64, "num_attention_heads": 4}
    transformer = FluxTransformer2DModel(
        in_channels=16, joint_attention_dim=256, pooled_projection_dim=256, axes_dims_rope=(16, 24, 24), **sizes
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 64),
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=1.5,
    )
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=CLIPTextModel(clip).eval(),
        tokenizer=tokenizer(77),
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=tokenizer(64),
        transformer=transformer.eval(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: FluxPipeline) -> torch.Tensor:
    call = {"height": SIZE, "width": SIZE, "num_inference_steps": 4, "max_sequence_length": 64, "output_type": "pt"}
    return pipe("a photo of a cat on the moon", generator=torch.Generator().manual_seed(3), **call).images


logging.basicConfig(level=logging.ERROR)
pipe = build()
plain = image(pipe)
parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
nbytes = sum(tensor.nbytes for part in parts for tensor in part.parameters())
pipe = weightstream.offload_pipeline(pipe, device="cpu", device_budget=2 * nbytes // 5)
print(f"{nbytes / 2**20:.1f} MiB of weights")
print(pipe.weightstream.plan(steps=4, height=SIZE, width=SIZE, max_sequence_length=64))
images = [image(pipe) for _ in range(2)]
print(f"{pipe.weightstream.stats().held_nbytes['device'] / 2**20:.1f} MiB of them on the device")
pipe.weightstream.remove()
images.append(image(pipe))
print("identical:", all(torch.equal(found, plain) for found in images))
