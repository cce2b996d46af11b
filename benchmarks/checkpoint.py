"""A checkpoint of Llama-3.1-8B's shape with random weights: 16.06 GB of bf16 in shards of 5 GB. Made once, then reused.

    python benchmarks/checkpoint.py [--smoke] [--nf4] [--folder FOLDER]

Weights are drawn one tensor at a time, on the GPU if there is one: the model is never whole in RAM. `--nf4`: with its
layers as bitsandbytes saves them, 6.03 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
TINY = LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
SMALL = LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}  # 1.5 billion weights
_DTYPES = {torch.bfloat16: "BF16", torch.uint8: "U8"}

Tensors = dict[str, torch.Tensor]  # on meta


def default_folder(tiny: bool, nf4: bool) -> Path:
    return Path(tempfile.gettempdir()) / f"weightstream-llama-{'tiny' if tiny else '8b'}{'-nf4' if nf4 else ''}"


def files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def weights_nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def make(folder: Path, settings: dict[str, Any], nf4: bool = False) -> None:
    """Write the checkpoint, unless it exists; an interrupted run leaves no folder of that name."""
    if (folder / INDEX).exists():
        print(f"{folder}: there already, {weights_nbytes(folder) / 1e9:.2f} GB", flush=True)
        return
    started, growing = time.perf_counter(), begun(folder)
    shards = _shards(_config(growing, settings, nf4), limit_nbytes=16_000_000 if settings is TINY else 5_000_000_000)
    total = finish(folder, shards, _write_nf4 if nf4 else _write)
    print(f"{folder}: {total / 1e9:.2f} GB written in {time.perf_counter() - started:.1f} s", flush=True)


def begun(folder: Path) -> Path:
    """The temporary folder in which the checkpoint of a folder is written."""
    growing = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(growing, ignore_errors=True)
    growing.mkdir(parents=True)
    return growing


def finish(
    folder: Path, shards: list[Tensors], write: Callable[[Path, Tensors, int], Iterable[str]] | None = None
) -> int:
    """Write these shards and the index in the temporary folder, and rename it; returns the bytes."""
    growing = folder.with_name(f"{folder.name}.partial")
    names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(4) as pool:
        paths = [growing / name for name in names]
        held = list(pool.map(write or _write, paths, shards, range(len(shards))))
    weight_map = {tensor: name for name, tensors in zip(names, held, strict=True) for tensor in tensors}
    total = sum(path.stat().st_size for path in paths)
    (growing / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    growing.rename(folder)
    return total


def _config(folder: Path, settings: dict[str, Any], nf4: bool) -> Any:
    from transformers import BitsAndBytesConfig, LlamaConfig

    no_stop = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # no token ends a generation early
    config = LlamaConfig(**settings, **no_stop, tie_word_embeddings=False, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    if nf4:
        kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, **kind).to_dict()
    config.save_pretrained(folder)
    return config


def _shards(config: Any, limit_nbytes: int) -> list[Tensors]:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return cut({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}, limit_nbytes)


def cut(tensors: Tensors, limit_nbytes: int) -> list[Tensors]:
    """Split these, in order, into files of so many bytes."""
    shards: list[Tensors] = [{}]
    held_nbytes = 0
    for name, tensor in tensors.items():
        if held_nbytes + tensor.nbytes > limit_nbytes and shards[-1]:
            shards.append({})
            held_nbytes = 0
        shards[-1][name] = tensor
        held_nbytes += tensor.nbytes
    return shards


def _drawn(tensors: Tensors, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in tensors.items():
        weight = torch.empty_like(tensor, device=device)
        if tensor.dtype != torch.uint8:
            weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.02, generator=generator)
        elif name.endswith("_scales"):  # exponents of two
            weight.random_(117, 122, generator=generator)
        else:
            weight.random_(256, generator=generator)
        yield name, weight


def _write(path: Path, tensors: Tensors, seed: int) -> Iterable[str]:
    """Returns the names of the tensors in the file."""
    with path.open("wb", buffering=0) as file:
        file.write(_header(tensors))
        for _, weight in _drawn(tensors, seed):
            left = memoryview(weight.view(torch.uint8).cpu().numpy()).cast("B")
            while left:  # one call writes 2 GiB at most
                left = left[file.write(left) :]
        os.fsync(file.fileno())  # dirty pages cannot leave the page cache
    return tensors


def _write_nf4(path: Path, tensors: Tensors, seed: int) -> Iterable[str]:
    """The same, with linear layers as bitsandbytes saves them, except the head."""
    from bitsandbytes.functional import quantize_4bit
    from safetensors.torch import save_file

    saved = {}
    for name, weight in _drawn(tensors, seed):
        if "_proj." in name:
            packed, state = quantize_4bit(weight, quant_type="nf4")
            saved[name] = packed.cpu()
            saved |= {f"{name}.{key}": value.cpu() for key, value in state.as_dict(packed=True).items()}
        else:
            saved[name] = weight.cpu()
    save_file(saved, path, {"format": "pt"})
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return saved


def _header(tensors: Tensors) -> bytes:
    facts: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        facts[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(facts).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny shape")
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    make(args.folder or default_folder(args.smoke, args.nf4), TINY if args.smoke else LLAMA, args.nf4)
