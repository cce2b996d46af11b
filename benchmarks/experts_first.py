"""A mixture of experts from a checkpoint in the page cache: seconds from the call to the first token of `generate`.

    python benchmarks/experts.py --first [--layers 48, at least 5] [--folder /dev/shm/…] [--tiny] [--out FILE]

The checkpoint has Qwen3-30B-A3B's shape and random weights, a matrix for each expert, in shards of 4 GB, each in the
order of names; it is written once, and stays. The budget is a quarter of the experts' bytes, and the other weights.
Each load is timed in a process of its own, whose clock starts after all imports, before anything is initialised. The
row is of the second process, as the first one (`cold_s`) may measure the machine and compile kernels. `host_nbytes` is
the growth of anonymous memory, without that of initialising the device; `scaled_s` the seconds of 57 GiB, if all of
them grow with the bytes.
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
WHOLE_NBYTES = 57 * host.GIB
SHARE = 0.25  # of the experts' bytes
PROMPT_TOKENS = 64


def config_of(layers: int, *, tiny: bool = False) -> Any:
    shape = SHAPES["qwen3"]
    config = shape._replace(sizes=dict(shape.sizes) | (TINY if tiny else {})).config(layers)
    config.pad_token_id, config.eos_token_id = 0, None
    return config


def make(folder: Path, layers: int, *, tiny: bool) -> None:
    """Write the checkpoint, unless it exists."""
    if (folder / checkpoint.INDEX).exists():
        return
    growing, config = checkpoint.begun(folder), config_of(layers, tiny=tiny)
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], torch.bfloat16
    config.save_pretrained(growing)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes: checkpoint.Shapes = {}
    for name, tensor in model.state_dict().items():
        shapes |= one_by_one(name, tuple(tensor.shape))
    shards = checkpoint.cut(shapes, 4_000_000 if tiny else 4_000_000_000)
    checkpoint.finish(folder, [dict(sorted(shard.items())) for shard in shards])  # sorted by name, as safetensors does


def one_by_one(name: str, shape: tuple[int, ...]) -> checkpoint.Shapes:
    """A tensor of the model as in a checkpoint: the matrices of a stack one by one."""
    module, _, stack = name.rpartition(".")
    if not module.endswith("experts"):
        return {name: shape}
    num, height, width = shape
    kinds = ("gate_proj", "up_proj") if stack == "gate_up_proj" else (stack,)
    matrix = height // len(kinds), width
    return {f"{module}.{expert}.{kind}.weight": matrix for expert in range(num) for kind in kinds}


def run(layers: int, folder: Path | None, out: Path, *, tiny: bool) -> None:
    """Write a row of one load in a fresh process."""
    folder = folder or Path(f"/dev/shm/weightstream-qwen3-moe-{layers}{'-tiny' if tiny else ''}")
    make(folder, layers, tiny=tiny)
    files = checkpoint.files(folder)
    share = host.warm(files)
    cold, found = (fresh(folder) for _ in range(2))
    nbytes = checkpoint.weights_nbytes(folder)
    row = {
        "bench": "experts",
        "system": f"from_pretrained to the first token, experts {SHARE:.0%}, codec none{', tiny' if tiny else ''}",
        "layers": layers,
        "nbytes": nbytes,
        "files": len(files),
        "cached_share": share,
        "scaled_s": round(found["total_s"] * WHOLE_NBYTES / nbytes, 2),
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
    for name in ("AutoConfig", "AutoModelForCausalLM", "GenerationConfig", "Qwen3MoeForCausalLM"):
        getattr(transformers, name)  # transformers imports a module on first access
    for name in ("weightstream.adapters.hf.load", "weightstream.api.offload", "transformers.conversion_mapping"):
        importlib.import_module(name)
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    import_everything()
    print(json.dumps(loaded(Path(sys.argv[1]))))
