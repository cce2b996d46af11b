"""A mixture of experts from a checkpoint in the page cache: seconds from the call to the first token of `generate`.

    python benchmarks/experts.py --first [--shape qwen3|gpt_oss] [--layers N, at least 5] [--folder …] [--tiny]

The checkpoint has random weights: Qwen3-30B-A3B's shape in bfloat16, a matrix for each expert, or gpt-oss-120b's with
experts in mxfp4, as stacks. Its shards of 4 GB are each in the order of names; it is written once, and stays. The
budget is a quarter of the experts' bytes, and the other weights. Each load is timed in a process of its own, whose
clock starts after all imports, before anything is initialised. The row is of the second process, as the first one
(`cold_s`) may measure the machine and compile kernels. `host_nbytes` is the growth of anonymous memory, without that of
initialising the device; `scaled_s` the seconds of the whole model, if all of them grow with the bytes.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoint
import host
import rows
import timing
import torch
import transformers
from experts_shapes import SHAPES

import weightstream
from weightstream.store.checkpoint import Checkpoint

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
# as in the checkpoints of gpt-oss
NOT_PACKED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
SHARE = 0.25  # of the experts' bytes
PROMPT_TOKENS = 64


def config_of(name: str, layers: int, *, tiny: bool = False) -> Any:
    shape = SHAPES[name]
    shrunk = {key: size for key, size in TINY.items() if key in shape.sizes} if tiny else {}
    config = shape._replace(sizes=dict(shape.sizes) | shrunk).config(layers)
    config.pad_token_id, config.eos_token_id, config.dtype = 0, None, torch.bfloat16
    config.architectures = [f"{shape.kind}ForCausalLM"]
    if name == "gpt_oss":
        config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_PACKED}
    return config


def tensors_of(name: str, layers: int, *, tiny: bool = False) -> checkpoint.Tensors:
    """The tensors of the checkpoint, on meta."""
    config = config_of(name, layers, tiny=tiny)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors: checkpoint.Tensors = {}
    for key, tensor in model.state_dict().items():
        tensors |= in_mxfp4(key, tensor) if name == "gpt_oss" else one_by_one(key, tensor)
    return tensors


def make(folder: Path, name: str, layers: int, *, tiny: bool) -> None:
    """Write the checkpoint, unless it exists."""
    if (folder / checkpoint.INDEX).exists():
        return
    growing = checkpoint.begun(folder)
    config_of(name, layers, tiny=tiny).save_pretrained(growing)
    shards = checkpoint.cut(tensors_of(name, layers, tiny=tiny), 4_000_000 if tiny else 4_000_000_000)
    checkpoint.finish(folder, [dict(sorted(shard.items())) for shard in shards])  # sorted by name, as safetensors does


def one_by_one(name: str, tensor: torch.Tensor) -> checkpoint.Tensors:
    """A tensor of the model as in a checkpoint: the matrices of a stack one by one."""
    module, _, stack = name.rpartition(".")
    if not module.endswith("experts"):
        return {name: tensor}
    kinds = ("gate_proj", "up_proj") if stack == "gate_up_proj" else (stack,)
    matrices = {kind: tensor.chunk(len(kinds), 1)[0][0] for kind in kinds}
    return {
        f"{module}.{expert}.{kind}.weight": matrix for expert in range(len(tensor)) for kind, matrix in matrices.items()
    }


def in_mxfp4(name: str, tensor: torch.Tensor) -> checkpoint.Tensors:
    """A tensor of the model as in a checkpoint of gpt-oss: stacks as two tensors of bytes."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, inputs, outputs = tensor.shape
    groups = torch.empty(experts, outputs, inputs // 32, dtype=torch.uint8, device="meta")
    return {f"{name}_blocks": groups[..., None].expand(-1, -1, -1, 16).contiguous(), f"{name}_scales": groups}


def run(name: str, layers: int, folder: Path | None, out: Path, *, tiny: bool) -> None:
    """Write a row of one load in a fresh process."""
    folder = folder or Path(f"/dev/shm/weightstream-{name}-{layers}{'-tiny' if tiny else ''}")
    make(folder, name, layers, tiny=tiny)
    files = checkpoint.files(folder)
    share = host.warm(files)
    cold, found = (fresh(folder) for _ in range(2))
    nbytes = checkpoint.weights_nbytes(folder)
    whole_nbytes = sum(tensor.nbytes for tensor in tensors_of(name, SHAPES[name].num_layers, tiny=tiny).values())
    what = f"experts {SHARE:.0%}, codec none{f', {name}' * (name != 'qwen3')}{', tiny' * tiny}"
    row = {
        "bench": "experts",
        "system": f"from_pretrained to the first token, {what}",
        "layers": layers,
        "nbytes": nbytes,
        "files": len(files),
        "cached_share": share,
        "scaled_s": round(found["total_s"] * whole_nbytes / nbytes, 2),
        "cold_s": cold["total_s"],
        **found,
    }
    rows.append(out, [row])
    print(row, flush=True)


def fresh(folder: Path) -> dict[str, Any]:
    """The figures of a load in a fresh process."""
    done = subprocess.run([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def loaded(folder: Path) -> dict[str, Any]:
    """The timed load."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {name: entry.nbytes for name, entry in Checkpoint.open(folder).entries.items()}
    experts = sum(nbytes for name, nbytes in sizes.items() if ".experts." in name)
    budget = int(sum(sizes.values()) - experts + SHARE * experts)
    ids = torch.randint(0, 500, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    anon = host.anon_nbytes()
    laps = [time.perf_counter()]
    torch.zeros(1, device=device)
    timing.synchronize(device)
    laps.append(time.perf_counter())
    anon_device = host.anon_nbytes() - anon
    model = weightstream.from_pretrained(
        folder, device=device, device_budget=budget, codec="none", context=256, progress=False
    )
    laps.append(time.perf_counter())
    options = {"max_new_tokens": 1, "min_new_tokens": 1, "do_sample": False}
    tokens = weightstream.generate(model, ids.to(device), **options)
    token = int(tokens[0, -1])  # waits for the device
    laps.append(time.perf_counter())
    plan, stats = model.weightstream.plan, model.weightstream.stats()
    return {
        "device": device.type,
        "budget_gib": round(budget / host.GIB, 3),
        **dict(zip(("device_s", "load_s", "first_s"), (round(b - a, 3) for a, b in pairwise(laps)), strict=True)),
        "total_s": round(laps[-1] - laps[0], 3),
        "host_nbytes": host.anon_nbytes() - anon - anon_device,
        "device_gib": round(stats.held_nbytes["device"] / host.GIB, 3),
        "num_slots": plan.num_slots,
        "plan": plan.summary(),
        "token": token,
    }


def import_everything() -> None:
    for name in ("AutoConfig", "AutoModelForCausalLM", "GenerationConfig", "Qwen3MoeForCausalLM", "GptOssForCausalLM"):
        getattr(transformers, name)  # transformers imports a module on first access
    for name in ("weightstream.adapters.hf.load", "weightstream.api.offload", "transformers.conversion_mapping"):
        importlib.import_module(name)
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    import_everything()
    print(json.dumps(loaded(Path(sys.argv[1]))))
