"""A whole pipeline at true size, random weights: seconds and GPU memory of an image, plain, ours, and diffusers' own.

    python benchmarks/pipelines.py [--model flux|wan] [--tiny] [--steps 28] [--size 1024] [--images 3]
                                   [--budgets 2,6,12] [--only resident,ours,block,leaf] [--codec auto]
                                   [--save FOLDER | --load FOLDER] [--reference FILE]
                                   [--out benchmarks/results/pipelines.jsonl]

flux is FLUX.1: T5-XXL (4.8 billion weights), CLIP-L, a transformer of 11.9 billion, and the VAE, in bfloat16. wan is a
transformer of Wan 2.2 with 14 billion weights and its VAE, after a text encoder of one layer: 480 x 832, 33 frames.
Every image is compared with that of the resident pipeline. `bound_s` is the sum over components of the longer of
compute (with decoding) and copies, as planned; `told_gib` the planned activations and workspaces, and `activations_gib`
the allocator's peak without the weights. `--save` writes the pipeline to a folder and ends; `--load` loads it from
there, and `host_gib` is the growth of the process: all memory, anonymous memory, and the peak of all. `--reference`
keeps the image of the resident pipeline for a later process, which then need not hold that pipeline.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from host import anon_nbytes
from rows import RESULTS, append, environment, guarded, percentiles
from torch import nn

import weightstream

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import pipelines as tiny

GIB = 2**30
PROMPT = " ".join(f"w{3 + i % 120}" for i in range(40))


def flux() -> Any:
    """FLUX.1-dev's shapes, on meta."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    text = {"vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    sizes = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64, "vocab_size": 32128}
    with torch.device("meta"):
        parts = {
            "vae": AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(128, 256, 512, 512),
                layers_per_block=2,
                latent_channels=16,
                sample_size=1024,
                use_quant_conv=False,
                use_post_quant_conv=False,
                scaling_factor=0.3611,
                shift_factor=0.1159,
            ),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**text, num_attention_heads=12, projection_dim=768)),
            "text_encoder_2": T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu")),
            "transformer": FluxTransformer2DModel(guidance_embeds=True),
        }
    for part in parts.values():
        part.to(torch.bfloat16)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        tokenizer=tiny.words(77),
        tokenizer_2=tiny.words(512),
        **parts,
    )


def wan() -> Any:
    """The shapes of one of Wan 2.2's two transformers, and of its VAE, on meta."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {"d_model": 4096, "d_ff": 1024, "d_kv": 64, "num_layers": 1, "num_heads": 64, "vocab_size": 1024}
    with torch.device("meta"):
        parts = {
            "transformer": WanTransformer3DModel(ffn_dim=13824, num_layers=40, text_dim=4096),
            "vae": AutoencoderKLWan(),
            "text_encoder": UMT5EncoderModel(UMT5Config(**sizes, feed_forward_proj="gated-gelu")),
        }
    for part in parts.values():
        part.to(torch.bfloat16)
    return WanPipeline(scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0), tokenizer=tiny.words(512), **parts)


def with_weights(pipe: Any, device: torch.device) -> Any:
    """Random weights in host memory, made on the device; buffers as the classes make them."""
    generator = torch.Generator(device).manual_seed(11)
    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        part.to_empty(device="cpu")
        for key, tensor in part.named_buffers():
            if key.endswith("position_ids"):
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))
        for tensor in part.parameters():
            fan_in = tensor[0].numel() if tensor.dim() > 1 else 4
            values = torch.randn(tensor.shape, device=device, generator=generator, dtype=torch.bfloat16)
            tensor.data.copy_(values * fan_in**-0.5 * (0.7 if tensor.dim() > 1 else 0.2))
        part.eval()
        print(f"{name}: {sum(t.nbytes for t in part.parameters()) / GIB:.2f} GiB", flush=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Run:
    """Images of one pipeline, and rows with their times and memory."""

    def __init__(self, pipe: Any, arguments: argparse.Namespace, device: torch.device) -> None:
        self.pipe = pipe
        self.arguments = arguments
        self.device = device
        kept = arguments.reference
        self.want: torch.Tensor | None = torch.load(kept) if kept is not None and kept.exists() else None
        self.rows: list[dict[str, Any]] = []
        size = {"height": arguments.size, "width": arguments.size}
        if arguments.model == "wan":
            size = {"num_frames": 5, **size} if arguments.tiny else {"num_frames": 33, "height": 480, "width": 832}
        length = 48 if arguments.tiny else 512
        self.call = {"num_inference_steps": arguments.steps, "max_sequence_length": length, **size}

    def image(self) -> tuple[torch.Tensor, float]:
        self.synchronize()
        began = time.perf_counter()
        generator = torch.Generator("cpu").manual_seed(5)
        output = self.pipe(PROMPT, generator=generator, output_type="pt", **self.call)
        self.synchronize()
        found = output.frames if self.arguments.model == "wan" else output.images
        return found.cpu(), time.perf_counter() - began

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, system: str, **fields: Any) -> dict[str, Any]:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        images, seconds = zip(*(self.image() for _ in range(self.arguments.images)), strict=True)
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        if self.want is None:
            self.want = images[0]
            if self.arguments.reference is not None:
                torch.save(self.want, self.arguments.reference)
        later = list(seconds[1:] or seconds)
        row = {
            "bench": "pipelines",
            "model": self.arguments.model,
            "system": system,
            "steps": self.arguments.steps,
            "size": self.arguments.size,
            "equal": all(torch.equal(image, self.want) for image in images),
            "finite": bool(torch.isfinite(images[0]).all()),
            "first_s": round(seconds[0], 3),
            "s": percentiles(later),
            "peak_gib": round(peak / GIB, 3),
            "rss_gib": round(psutil.Process().memory_info().rss / GIB, 2),
            **fields,
        }
        self.rows.append(row)
        print({key: row[key] for key in row if key not in ("bench",)}, flush=True)
        return row


def resident(run: Run) -> None:
    run.pipe.to(run.device)
    run.measure("resident")
    run.pipe.to("cpu")
    if run.arguments.load is not None:  # the next systems load it again
        run.pipe = None
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def ours(run: Run, budget: float) -> None:
    example = {"prompt": PROMPT, **run.call}
    options = {"device": run.device, "device_budget": int(budget * GIB), "codec": run.arguments.codec}
    torch.zeros(1, device=run.device)  # so that CUDA is initialised before
    before = rss(), anon_nbytes()
    began = time.perf_counter()
    if run.arguments.load is None:
        weightstream.offload_pipeline(run.pipe, example_inputs=example, **options)
    else:
        run.pipe = weightstream.pipeline_from_pretrained(run.arguments.load, example_inputs=example, **options)
        run.pipe.set_progress_bar_config(disable=True)
    setup_s = time.perf_counter() - began
    try:
        plan = run.pipe.weightstream.plan(**example)
        print(plan, flush=True)
        row = run.measure(
            f"weightstream, {budget:g} GiB",
            budget_gib=budget,
            codec=run.arguments.codec,
            setup_s=round(setup_s, 2),
            predicted_s=round(plan.seconds, 3),
            bound_s=round(plan.bound_s, 3),
            device_gib=round(plan.device_nbytes / GIB, 3),
            told_gib=round((plan.activation_nbytes + plan.workspace_nbytes) / GIB, 3),
            copied_gib=round(plan.copied_nbytes / GIB, 2),
        )
        if run.arguments.load is not None:
            held = rss() - before[0], anon_nbytes() - before[1], peak_rss() - before[0]
            files = sum(path.stat().st_size for path in run.arguments.load.rglob("*.safetensors"))
            row["host_gib"] = [round(nbytes / GIB, 2) for nbytes in held]
            row["files_gib"], row["x_files"] = round(files / GIB, 2), [round(nbytes / files, 3) for nbytes in held]
        row["activations_gib"] = round(row["peak_gib"] - plan.device_nbytes / GIB, 3)
        row["x_bound"] = round(row["s"]["p50"] / plan.bound_s, 3) if plan.bound_s else None
        row["x_predicted"] = round(row["s"]["p50"] / plan.seconds, 3)
        again = run.pipe.weightstream.plan(**example)
        row["bound_after_s"], row["predicted_after_s"] = round(again.bound_s, 3), round(again.seconds, 3)
        for name, stats in run.pipe.weightstream.stats().components.items():
            step = None if stats.step_s is None else round(stats.step_s, 4)
            row[name] = {"step_s": step, "predicted_s": round(stats.predicted_step_s, 4)}
            row[name] |= {"steps": stats.steps, "unplanned": stats.unplanned_fills, "stall_s": round(stats.stall_s, 2)}
        prefixes = ("x_", "act", "bound", "host")
        print({key: row[key] for key in row if key in run.pipe.components or key.startswith(prefixes)}, flush=True)
    finally:
        run.pipe.weightstream.remove()
        if run.arguments.load is not None:
            run.pipe = None
            gc.collect()


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """The peak memory of the process so far."""
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) << 10


def peer(run: Run, level: str) -> None:
    """diffusers' group offloading of every component, with a copy stream, in its fastest form."""
    options = {"num_blocks_per_group": 1} if level == "block_level" else {}
    began = time.perf_counter()
    run.pipe.enable_group_offload(
        run.device,
        offload_type=level,
        use_stream=run.device.type == "cuda",
        record_stream=run.device.type == "cuda",
        **options,
    )
    run.measure(f"diffusers group offload, {level}", setup_s=round(time.perf_counter() - began, 2))


def loaded(folder: Path) -> Any:
    """The pipeline as diffusers loads it, in the dtype of its files."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flux", "wan"), default="flux")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--images", type=int, default=3)
    parser.add_argument("--budgets", default="2,6,12")
    parser.add_argument("--only", default="resident,ours,block")
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "pipelines.jsonl")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    common = environment()
    if arguments.tiny:
        arguments.size = 32
        pipe = tiny.build(arguments.model)
    elif arguments.load is not None:  # from_pretrained loads it
        pipe = loaded(arguments.load) if {"resident", "block", "leaf"} & set(arguments.only.split(",")) else None
    else:
        pipe = with_weights(flux() if arguments.model == "flux" else wan(), device)
    if arguments.save is not None:
        pipe.save_pretrained(arguments.save)
        return
    run, systems = Run(pipe, arguments, device), arguments.only.split(",")
    del pipe
    todo: list[tuple[str, Callable[[], None]]] = []
    if "resident" in systems:
        todo.append(("resident", lambda: resident(run)))
    if "ours" in systems:
        for text in arguments.budgets.split(","):
            todo.append((f"weightstream, {text} GiB", lambda text=text: ours(run, float(text))))  # type: ignore[misc]
    if {"block", "leaf"} <= set(systems):
        parser.error("--only: one of block and leaf in a run, as hooks of diffusers stay")
    for level in ("block", "leaf"):  # at the end, as its hooks stay
        if level in systems:
            todo.append((f"diffusers group offload, {level}_level", lambda level=level: peer(run, f"{level}_level")))  # type: ignore[misc]
    for system, measure in todo:
        with guarded(lambda **row: run.rows.append({"bench": "pipelines", **row}), system), torch.no_grad():
            measure()
    append(arguments.out, run.rows, common)


if __name__ == "__main__":
    main()
