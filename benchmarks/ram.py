"""Memory beside time: peak host and GPU memory of one checkpoint under several systems, and the time of a token.

    python benchmarks/ram.py [--systems NAME,NAME] [--budget 6GiB] [--tokens 16] [--folder FOLDER] [--smoke]
    python benchmarks/ram.py --one NAME      what it starts for each system

Llama-3.1-8B's shape with random weights (checkpoint.py), loaded as each system's documentation does it. vLLM and
diffusers' pipelines have rows with the same figures in vllm.jsonl and pipelines.jsonl.

resident      transformers, on the GPU
accelerate    `device_map="auto"` with the budget as `max_memory`
diffusers     group offloading by blocks with a copy stream; diffusers-leaf: by leaves; -low: `low_cpu_mem_usage`
flextensor    with the budget as a share of the GPU's memory
ours          `weightstream.from_pretrained` and `weightstream.generate`, compressed; ours-none: uncompressed

host_gib      anonymous and pinned memory of the process, above that before loading: the peak of all, and at the end
rss_gib       the same for all memory of the process, with pages of files that are mapped
device_gib    the peak of torch's allocated memory
load_s        until the model is ready; first_s: until the first token after that; ms: of later tokens
same          the tokens of the resident model
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import host
import rows
import torch

GIB = 2**30
NUM_PROMPT, SETTLING = 128, 4  # tokens of the prompt, and of the text before the timed ones
SYSTEMS = ("resident", "accelerate", "diffusers", "diffusers-low", "diffusers-leaf", "flextensor", "ours", "ours-none")

Generate = Callable[[torch.Tensor, int, Callable[[], None]], list[int]]  # calls the function after each token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--one", choices=SYSTEMS)
    parser.add_argument("--budget", default="6GiB")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--limit", type=float, default=120, help="seconds for each system")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, also on a CPU")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "ram.jsonl")
    args = parser.parse_args()
    args.folder = args.folder or checkpoint.default_folder(args.smoke, False)
    (one if args.one else every)(args)


def every(args: argparse.Namespace) -> None:
    """Measure each system in a process of its own, and append its row."""
    checkpoint.make(args.folder, checkpoint.TINY if args.smoke else checkpoint.LLAMA)
    host.warm(checkpoint.files(args.folder))
    common, wanted = rows.environment() | {"bench": "ram"}, None
    for name in args.systems.split(","):
        options = [f"--{key}={getattr(args, key)}" for key in ("budget", "tokens", "folder")]
        command = [sys.executable, __file__, "--one", name, *options, *(["--smoke"] if args.smoke else [])]
        row: dict[str, Any] = {"system": name, "budget": None if name == "resident" else args.budget}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit, check=True)
            row |= json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            row["error"] = f"more than {args.limit:g} s"
        except subprocess.CalledProcessError as error:
            row["error"] = error.stderr.strip().splitlines()[-1][:500]
        tokens = row.pop("generated", None)
        if name == "resident":
            wanted = tokens
        elif tokens and wanted:
            row["same"] = tokens == wanted
        rows.append(args.out, [row], common)
        print(json.dumps(row), flush=True)


def one(args: argparse.Namespace) -> None:
    """Load the checkpoint, generate a text, and print the figures as the last line."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = nbytes_of(args.budget)
    imported(args.one)
    torch.zeros(1, device=device)
    before = host.held_nbytes(), host.rss_nbytes()
    with host.Peak(host.held_nbytes) as held, host.Peak(host.rss_nbytes) as rss:
        started = time.perf_counter()
        generate = LOADERS[args.one](args.folder, device, budget)
        loaded = time.perf_counter()
        prompt = torch.randint(10, 1000, (1, NUM_PROMPT), generator=torch.Generator().manual_seed(7)).to(device)
        times = [time.perf_counter()]
        tokens = generate(prompt, SETTLING + args.tokens, lambda: times.append(time.perf_counter()))
        now = host.held_nbytes(), host.rss_nbytes()
    steps = [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]
    found = {
        "load_s": round(loaded - started, 2),
        "first_s": round(steps[0] / 1e3, 3),
        "ms": rows.percentiles(steps[SETTLING:]),
        "host_gib": [round((nbytes - before[0]) / GIB, 3) for nbytes in (held.nbytes, now[0])],
        "rss_gib": [round((nbytes - before[1]) / GIB, 3) for nbytes in (rss.nbytes, now[1])],
        "device_gib": round(torch.cuda.max_memory_allocated() / GIB, 3) if device.type == "cuda" else None,
        "weights_gib": round(checkpoint.weights_nbytes(args.folder) / GIB, 3),
    }
    print(json.dumps(found | {"generated": tokens}))


def imported(system: str) -> None:
    """Import what the system needs, before the clock and the first sample."""
    import transformers.models.llama.modeling_llama

    transformers.utils.logging.set_verbosity_error()
    name = system.split("-")[0]
    modules = {"ours": "weightstream.api.offload", "resident": "transformers", "diffusers": "diffusers.hooks"}
    importlib.import_module(modules.get(name, name))


def nbytes_of(budget: str) -> int:
    from weightstream import OffloadConfig

    nbytes = OffloadConfig(device_budget=budget).device_budget
    assert isinstance(nbytes, int)
    return nbytes


# -- the systems -------------------------------------------------------------------------------------------------------


def pretrained(folder: Path, **settings: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **settings)


def greedy(model: Callable[..., Any]) -> Generate:
    """A loop over calls, which every peer supports."""

    @torch.inference_mode()
    def generate(ids: torch.Tensor, num: int, at_token: Callable[[], None]) -> list[int]:
        tokens: list[int] = []
        cache = None
        for _ in range(num):
            output = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            tokens.append(int(ids))
            ids = ids.to(output.logits.device)
            at_token()
        return tokens

    return generate


def resident(folder: Path, device: torch.device, _: int) -> Generate:
    return greedy(pretrained(folder, device_map={"": str(device)}))


def accelerate(folder: Path, device: torch.device, budget: int) -> Generate:
    limits = {0 if device.type == "cuda" else "cpu": budget, "cpu": 1 << 40}
    return greedy(pretrained(folder, device_map="auto", max_memory=limits))


def diffusers(level: str, *, is_low: bool = False) -> Callable[[Path, torch.device, int], Generate]:
    def load(folder: Path, device: torch.device, _: int) -> Generate:
        from diffusers.hooks import apply_group_offloading

        model = pretrained(folder)
        settings: dict[str, Any] = {"num_blocks_per_group": 1} if level == "block_level" else {}
        if device.type == "cuda":
            settings |= {"use_stream": True, "record_stream": True, "low_cpu_mem_usage": is_low}
        cpu = torch.device("cpu")
        apply_group_offloading(model, onload_device=device, offload_device=cpu, offload_type=level, **settings)
        return greedy(model)

    return load


def flextensor(folder: Path, device: torch.device, budget: int) -> Generate:
    import flextensor

    share = budget / torch.cuda.get_device_properties(device).total_memory
    config = flextensor.OffloadConfig(include_patterns=["model.layers.*"], max_gpu_mem_fraction=share)
    proxy = flextensor.offload(pretrained(folder), config)
    for _ in range(flextensor.get_offload_manager().iters_before_inference + 1):
        with torch.inference_mode():
            proxy(input_ids=torch.ones(1, NUM_PROMPT, dtype=torch.int64, device=device), use_cache=False)
    return greedy(proxy)


def ours(codec: str) -> Callable[[Path, torch.device, int], Generate]:
    def load(folder: Path, device: torch.device, budget: int) -> Generate:
        import transformers

        import weightstream

        class Streamer(transformers.generation.streamers.BaseStreamer):
            """Tells when a token is there; the prompt comes first."""

            def __init__(self, at_token: Callable[[], None]) -> None:
                self._at_token, self._is_prompt = at_token, True

            def put(self, _: torch.Tensor) -> None:
                if not self._is_prompt:
                    self._at_token()
                self._is_prompt = False

            def end(self) -> None:
                """Nothing is buffered."""

        config = weightstream.OffloadConfig(device_budget=budget, codec=codec, context=256)
        model = weightstream.from_pretrained(folder, config=config, dtype=torch.bfloat16, device=device.type)

        def generate(ids: torch.Tensor, num: int, at_token: Callable[[], None]) -> list[int]:
            settings: dict[str, Any] = {"do_sample": False, "min_new_tokens": num, "max_new_tokens": num}
            output = weightstream.generate(model, ids, streamer=Streamer(at_token), **settings)
            return list(map(int, output[0, ids.shape[1] :]))

        return generate

    return load


LOADERS: dict[str, Callable[[Path, torch.device, int], Generate]] = {
    "resident": resident,
    "accelerate": accelerate,
    "diffusers": diffusers("block_level"),
    "diffusers-low": diffusers("block_level", is_low=True),
    "diffusers-leaf": diffusers("leaf_level"),
    "flextensor": flextensor,
    "ours": ours("auto"),
    "ours-none": ours("none"),
}

if __name__ == "__main__":
    main()
