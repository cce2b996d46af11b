"""Mixtures of experts in vLLM, with single experts in slots, compared with the same engine without offload.

    python benchmarks/vllm/mixtures.py verify --shapes qwen3,gpt-oss --layers 6 [--mode eager] [--cases a,again,x]
    python benchmarks/vllm/mixtures.py speed --shapes qwen3-fp8,gpt-oss [--limit 280] [--total 560]
    python benchmarks/vllm/mixtures.py one --shape qwen3-fp8 --case x          what both start for each

Cases: a nothing is offloaded; again the same in another process; x experts in slots: half of their bytes, or 24 GiB for
all layers of gpt-oss. verify also calls each layer of experts with random input.
Shapes: qwen3 Qwen3-30B-A3B in bfloat16 (Triton's kernel), and in other formats: -fp8 and -deepgemm float8 with a scale
for each block (Triton, DeepGEMM), -channel float8 with a scale for each channel (CUTLASS), -int4, -awq and -nvfp4 4
bits as GPTQ, AWQ and NVFP4 store them (Marlin); gpt-oss gpt-oss-120b in mxfp4 (Marlin).

Weights are noise, the same in all processes, and made in place: a checkpoint would not fit on the disk. `--routing`
names the model whose hit rates the ids have, drawn as in experts_shapes.py; `own`: the ids of the routers.

ms           of decode steps of one sequence, from one output to the next, once the slots are warm (step_ms_8: of 8)
found        the share of experts that were in a slot; fetched: those that were not, per step
bound_ms     that of case a, plus the bytes of these at 48 GB/s, plus 0.6
same         tokens and their log-probabilities as in case a, by batch; repeats: the engine gave the same tokens twice
same_layers  each layer of experts gives the same for random input, by batch; layers_repeat: it does in two calls
first_other  the first token, and the first log-probability of all sequences, that are others than in case a
slots_differ calls of case x whose outputs from slots and from whole stacks differ

DeepGEMM is off, except for its shape, where it does not warm up: that would take 80 s.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS), str(Path(__file__).parent)]

import torch  # noqa: E402
from engine_process import EngineProcess, passed, wait_while_starting  # noqa: E402
from experts_shapes import HITS, SHAPES, Shape, drawn  # noqa: E402
from rows import append, environment, percentiles  # noqa: E402
from run import FIXED, GIB, PROFILE  # noqa: E402

TEMPORARY = Path(os.environ.get("VLLM_BENCH", tempfile.gettempdir()))
_NOISE = 1 << 25  # weights that are drawn; others repeat these
_WARM, _TIMED = 96, 64  # steps before the timed ones, and these
_LINK_BYTES_PER_S, _BESIDES_MS = 48e9, 0.6  # of the bound
_NUM_STEPS = 512  # of a table of ids; then it begins again
_APART = 61  # steps between the places of two sequences in it
_MOST_TOKENS = 512
_TRIALS, _MANY = 16, 256  # inputs of each layer and batch, and the size of another batch, as of a prompt


class Mixture(NamedTuple):
    """A shape in one format, the kernel that runs it, and the memory of case x for all layers; `experts_share`: of its
    experts. `weight_nbytes`: bytes of a weight with its part of the scales.

    `num_prompt`: tokens of a prompt. Prompts of one token for Marlin: once an expert has more tokens than fit into one
    block, its bits depend on the block that each token is in, and vLLM fills blocks in any order.
    """

    shape: Shape
    quantization: Mapping[str, Any] | None
    backend: str
    weight_nbytes: float = 2.0
    budget: int = 0
    experts_share: float = 0.0
    curve: str = "Qwen3-30B-A3B"
    num_prompt: int = 32


MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "dynamic": {"-:.*mlp\\.gate$": {}},
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
AWQ |= {"modules_to_not_convert": ["mlp.gate"]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*mlp.gate"]}
TINY = Shape(
    kind="Qwen3Moe",
    num_layers=4,
    num_experts=16,
    top_k=2,
    sizes=dict(SHAPES["qwen3"].sizes)
    | {"hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 64, "num_experts": 16, "vocab_size": 1024, "intermediate_size": 512},
)
MIXTURES = {
    "qwen3": Mixture(SHAPES["qwen3"], None, "triton", experts_share=0.5),
    "qwen3-fp8": Mixture(SHAPES["qwen3"], FP8, "triton", 1.001, experts_share=0.5),
    "qwen3-deepgemm": Mixture(SHAPES["qwen3"], FP8, "deep_gemm", 1.001, experts_share=0.5),
    "qwen3-channel": Mixture(SHAPES["qwen3"], CHANNEL, "cutlass", 1.003, experts_share=0.5),
    "qwen3-int4": Mixture(SHAPES["qwen3"], GPTQ, "marlin", 0.516, experts_share=0.5, num_prompt=1),
    "qwen3-awq": Mixture(SHAPES["qwen3"], AWQ, "marlin", 0.52, experts_share=0.5, num_prompt=1),
    "qwen3-nvfp4": Mixture(SHAPES["qwen3"], NVFP4, "marlin", 0.563, experts_share=0.5, num_prompt=1),
    "gpt-oss": Mixture(SHAPES["gpt_oss"], MXFP4, "marlin", budget=24 * GIB, curve="gpt-oss-120b", num_prompt=1),
    "tiny": Mixture(TINY, None, "auto", experts_share=0.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["one", "verify", "speed"])
    parser.add_argument("--shape", default="qwen3-fp8", choices=list(MIXTURES))
    parser.add_argument("--shapes", default="qwen3-fp8,gpt-oss", help="SHAPE/CASE for one case of it")
    parser.add_argument("--case", default="x", choices=["a", "again", "x"])
    parser.add_argument("--cases", default="a,x")
    parser.add_argument("--mode", default="default", choices=["default", "compiled", "eager"])
    parser.add_argument("--layers", type=int, default=0, help="default: all")
    parser.add_argument("--check", action="store_true", help="of one: call each layer of experts with random input")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--routing", default="", help="a model of plan/hit_curves.py, or own; default: the shape's own")
    parser.add_argument("--together", type=int, default=2)
    parser.add_argument("--limit", type=float, default=280, help="seconds for engines that are started together")
    parser.add_argument("--total", type=float, default=560)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "vllm_experts.jsonl")
    args = parser.parse_args()
    (one if args.what == "one" else write)(args)


# -- an engine ---------------------------------------------------------------------------------------------------------


def folder_of(name: str, layers: int) -> Path:
    """A folder with the config of the model, and no weights."""
    mixture = MIXTURES[name]
    folder = TEMPORARY / "vmixtures" / f"{name}-{layers}"
    config = mixture.shape.config(layers)
    config.architectures = [f"{mixture.shape.kind}ForCausalLM"]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    if mixture.quantization is not None:
        settings["quantization_config"] = dict(mixture.quantization)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def budget_of(name: str, layers: int) -> str:
    """The device memory of case x: a share of the experts, whole stacks of one layer, and all other weights."""
    mixture = MIXTURES[name]
    if mixture.budget:
        return str(mixture.budget * layers // mixture.shape.num_layers)
    sizes, nbytes = mixture.shape.sizes, mixture.weight_nbytes
    hidden, heads, head = sizes["hidden_size"], sizes["num_attention_heads"], sizes["head_dim"]
    inner = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
    stacks = mixture.shape.num_experts * 3 * hidden * inner * nbytes
    attention = 2 * hidden * head * (heads + sizes["num_key_value_heads"]) * nbytes
    dense = layers * (attention + 2 * hidden * (mixture.shape.num_experts + 4))
    return str(int(1.02 * (dense + stacks + mixture.experts_share * layers * stacks) + (64 << 20)))


def register_noise() -> None:
    """Register the load format "noise": weights that depend only on their name's place, dtype and shape."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("noise")
    class Noise(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            fill = Filling()
            with torch.no_grad():
                for index, (name, parameter) in enumerate(model.named_parameters()):
                    fill(index, name, parameter.data)


class Filling:
    """Fills weights with parts of tables that were drawn once, each from another place."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        normal = torch.randn(_NOISE, generator=generator)
        even = torch.randint(0, 256, (_NOISE,), generator=generator, dtype=torch.int32).to(torch.uint8)
        self._tables: dict[tuple[str, str], torch.Tensor] = {
            ("normal", "cpu"): normal.to(torch.bfloat16),
            ("float8", "cpu"): (48 * normal).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8),
            ("float8 scales", "cpu"): (32 + even.float() / 4).to(torch.float8_e4m3fn).view(torch.uint8),
            ("bytes", "cpu"): even,
            ("exponents", "cpu"): 117 + even % 5,  # of mxfp4
            ("even", "cpu"): (even.float() / 256).to(torch.bfloat16),
        }

    def _table(self, kind: str, device: torch.device) -> torch.Tensor:
        key = kind, device.type
        if key not in self._tables:
            self._tables[key] = self._tables[kind, "cpu"].to(device)
        return self._tables[key]

    def __call__(self, index: int, name: str, weight: torch.Tensor) -> None:
        factor, shift, flat = 1.0, 0.0, weight.view(-1)
        if "g_idx" in name:  # an order of columns, which these formats do not use
            weight.zero_()
            return
        if weight.dtype == torch.uint8:
            kind = "exponents" if "scale" in name else "bytes"
        elif weight.dtype == torch.int32:
            kind, flat = "bytes", flat.view(torch.uint8)
        elif weight.dtype == torch.float8_e4m3fn:
            kind, flat = "float8 scales" if "scale" in name else "float8", flat.view(torch.uint8)
        elif "scale" in name:
            kind, factor, shift = "even", 2**-12, 2**-12
        elif name.endswith(("bias", "sinks")):
            kind, factor = "normal", 2**-6
        elif weight.dim() < 2:
            kind, shift = "even", 0.5
        else:  # a power of two: a product with it is exact on any device
            kind, factor = "normal", 2.0 ** -round(0.5 * torch.tensor(float(weight.shape[-1])).log2().item())
        table, begin = self._table(kind, weight.device), index * 7919 % _NOISE
        while flat.numel():
            part = table[begin : begin + flat.numel()]
            flat[: part.numel()].copy_(part)
            if (factor, shift) != (1.0, 0.0):
                flat[: part.numel()].mul_(factor).add_(shift)
            flat, begin = flat[part.numel() :], 0


class SetIds:
    """Replaces the ids that routers choose by those of a table, the next row in each step."""

    def __init__(self, mixture: Mixture, layers: int, curve: str) -> None:
        shape, device = mixture.shape, "cuda" if torch.cuda.is_available() else "cpu"
        rows = [drawn(HITS[curve], shape, _NUM_STEPS, 1000 * layer) for layer in range(layers)]
        self._table = torch.tensor(rows, dtype=torch.int32, device=device)  # layer, step, k
        self._apart = torch.arange(_MOST_TOKENS, device=device) * _APART
        self._at, self._step = torch.zeros_like(self._apart), torch.zeros_like(self._apart[:1])
        self._layers: dict[int, int] = {}  # by the router

    def reset(self) -> None:
        self._step.zero_()

    def install(self) -> None:
        from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

        inner = FusedMoERouter.select_experts

        def select(router: Any, *args: Any, **kwargs: Any) -> Any:
            scores, ids = inner(router, *args, **kwargs)
            return scores, self._named(self._layers.setdefault(id(router), len(self._layers)), ids)

        FusedMoERouter.select_experts = select

    def _named(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        at = self._at[: len(ids)]
        if layer == 0:
            self._step.add_(1)
            torch.add(self._apart[: len(ids)], self._step, out=at).remainder_(_NUM_STEPS)
        return self._table[layer].index_select(0, at).to(ids.dtype)


def settings_of(args: argparse.Namespace, layers: int) -> dict[str, Any]:
    batch = max(map(int, args.batches.split(",")))
    settings: dict[str, Any] = {
        "model": str(folder_of(args.shape, layers)),
        "load_format": "noise",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": MIXTURES[args.shape].num_prompt + _WARM + _TIMED + 16,
        "max_num_seqs": batch,
        "max_num_batched_tokens": _MOST_TOKENS,
        "seed": 0,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "enforce_eager": args.mode == "eager",
        "gpu_memory_utilization": 0.8 / args.together,
        "kv_cache_memory_bytes": GIB,
        "moe_backend": MIXTURES[args.shape].backend,
    }
    if args.mode == "compiled":
        settings["compilation_config"] = {"cudagraph_mode": "NONE", "inductor_compile_config": FIXED}
    if args.mode == "default":
        sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= batch]
        settings["compilation_config"] = {"cudagraph_capture_sizes": sizes, "inductor_compile_config": FIXED}
    if args.case == "x":
        asked = {"device_budget": budget_of(args.shape, layers), "codec": "none", "batch": 1}
        settings["additional_config"] = {"weightstream": asked}
    return settings


class Counted(NamedTuple):
    """Experts so far: in slots, and fetched."""

    found: int = 0
    fetched: int = 0

    @classmethod
    def now(cls) -> Counted:
        from vllm.model_executor.offloader.base import get_offloader

        streamers = getattr(get_offloader(), "streamers", [])
        experts = streamers[-1].stats().experts if streamers else None
        return cls() if experts is None else cls(experts.found, experts.fetched)


class Run(NamedTuple):
    """The tokens of each sequence, their log-probabilities as hexadecimals, the times of the timed steps, and the
    experts of these."""

    tokens: list[list[int]]
    scores: list[str]
    times_ms: list[float]
    counted: Counted


def run(llm: Any, prompts: Sequence[list[int]], new: int, *, is_scored: bool) -> Run:
    from vllm import SamplingParams

    scored = 0 if is_scored else None
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=scored)
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    times: list[float] = []
    done: dict[int, Any] = {}
    before = Counted()
    while llm.llm_engine.has_unfinished_requests():
        if len(times) == _WARM:
            before = Counted.now()
        start = time.perf_counter()
        outputs = llm.llm_engine.step()
        times.append(1e3 * (time.perf_counter() - start))
        done |= {int(output.request_id): output.outputs[0] for output in outputs if output.finished}
    after = Counted.now()
    counted = Counted(after.found - before.found, after.fetched - before.fetched)
    texts = [done[index] for index in range(len(prompts))]
    scores = [score.hex() for text in texts for score in _scores(text)] if is_scored else []
    return Run([list(text.token_ids) for text in texts], scores, times[_WARM:], counted)


def _scores(text: Any) -> Iterator[float]:
    for token, known in zip(text.token_ids, text.logprobs, strict=True):
        yield known[token].logprob


class Layers(NamedTuple):
    """Digests of what the layers of experts give for random input, by batch; whether they give that twice; and the
    number of calls of case x whose outputs from slots and from whole stacks differ."""

    digests: dict[str, list[str]]
    repeat: dict[str, bool]
    num_different: int


def outputs_of_layers(llm: Any, batches: Iterable[int]) -> Layers:
    from weightstream.integrations.vllm.experts import RoutedPicks

    by_slots, digests, repeat, num_different = RoutedPicks.forward, dict[str, list[str]](), dict[str, bool](), 0
    for batch in batches:
        found = digests[str(batch)] = []
        repeat[str(batch)] = True
        for layer, module in enumerate(routed_of(llm)):
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            draw = partial(torch.rand, generator=torch.Generator(device).manual_seed(layer), device=device)
            for _ in range(_TRIALS):
                states = draw(batch, module.moe_config.hidden_dim).sub_(0.5).mul_(2).bfloat16()
                scores, ids = draw(batch, module.global_num_experts).topk(module.top_k)
                arguments = states, scores, ids.to(torch.int32)
                given, again = (called(module, *arguments) for _ in range(2))
                RoutedPicks.forward = lambda *_: None
                try:
                    whole = called(module, *arguments)
                finally:
                    RoutedPicks.forward = by_slots
                repeat[str(batch)] &= torch.equal(given, again)
                num_different += repeat[str(batch)] and not torch.equal(given, whole)
                found.append(hashlib.sha256(given.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:8])
    return Layers(digests, repeat, num_different)


@torch.inference_mode()
def called(module: Any, *arguments: torch.Tensor) -> torch.Tensor:
    return module.forward_modular(*map(torch.clone, arguments)).clone()


def routed_of(llm: Any) -> list[Any]:
    """The layers of experts."""
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()
    return [module for module in model.modules() if hasattr(module, "forward_modular")]


def one(args: argparse.Namespace) -> None:
    mixture = MIXTURES[args.shape]
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ |= {"VLLM_USE_DEEP_GEMM": str(int(mixture.backend == "deep_gemm")), "VLLM_DEEP_GEMM_WARMUP": "skip"}
    from vllm import LLM

    layers, start = args.layers or mixture.shape.num_layers, time.time()
    register_noise()
    table = None
    if args.routing != "own":
        table = SetIds(mixture, layers, args.routing or mixture.curve)
        table.install()
    llm = LLM(**settings_of(args, layers))
    found: dict[str, Any] = {"start_s": round(time.time() - start, 1), **kernels(llm)}
    print("READY", flush=True)
    if not sys.stdin.readline():  # the process that started this one has ended
        return
    generator = torch.Generator().manual_seed(7)
    vocab = mixture.shape.sizes["vocab_size"]
    tokens: dict[str, list[list[int]]] = {}
    scores: dict[str, list[str]] = {}
    for batch in map(int, args.batches.split(",")):
        prompts = torch.randint(10, vocab, (batch, mixture.num_prompt), generator=generator).tolist()
        runs = []
        for is_scored in (True, False):
            if table is not None:
                table.reset()
            runs.append(run(llm, prompts, _WARM + _TIMED, is_scored=is_scored))
        again, last = runs
        tokens[str(batch)], scores[str(batch)] = last.tokens, again.scores
        found[f"step_ms_{batch}"] = percentiles(last.times_ms)
        found.setdefault("repeats", {})[str(batch)] = again.tokens == last.tokens
        if total := sum(last.counted):
            steps = len(last.times_ms)
            found[f"found_{batch}"] = round(last.counted.found / total, 4)
            found[f"fetched_{batch}"] = round(last.counted.fetched / steps, 2)
    print("RESULT " + json.dumps(found | {"tokens": tokens, "scores": scores, "layers": {}}), flush=True)
    if args.check:
        layers = outputs_of_layers(llm, [*map(int, args.batches.split(",")), _MANY])
        found |= {"slots_differ": layers.num_different, "layers_repeat": layers.repeat}
        print(
            "RESULT " + json.dumps(found | {"tokens": tokens, "scores": scores, "layers": layers.digests}), flush=True
        )
    os._exit(0)  # no time for shutdown


def kernels(llm: Any) -> dict[str, Any]:
    """The kernels that ran, and the plan."""
    from vllm.model_executor.offloader.base import get_offloader

    routed = routed_of(llm)
    experts = [getattr(module.quant_method.moe_kernel, "fused_experts", None) for module in routed]
    num = routed[0].local_num_experts
    expert_nbytes = sum(p.nbytes // num for p in routed[0].parameters() if p.dim() and len(p) == num)
    found = {"kernel": type(experts[0]).__name__, "expert_nbytes": expert_nbytes}
    if not (streamers := getattr(get_offloader(), "streamers", [])):
        return found
    plan = streamers[-1].plan
    planned = {"num_slots": plan.num_slots, "cached": len(plan.cached), "predicted_ms": round(1e3 * plan.step_s, 3)}
    held = {name: round(nbytes / GIB, 3) for name, nbytes in streamers[-1].stats().held_nbytes.items()}
    return found | planned | {"predicted_found": round(plan.found_share, 3), "held_gib": held}


# -- many engines ------------------------------------------------------------------------------------------------------


class Case:
    """One engine, in a process of its own."""

    def __init__(self, args: argparse.Namespace, shape: str, case: str, mode: str) -> None:
        self.shape, self.case, self.mode = shape, case, mode
        name = f"{shape}-{case}-{mode}-{args.routing or 'set'}"
        arguments = ["--shape", shape, "--case", case, "--mode", mode]
        arguments += passed(vars(args), ("layers", "batches", "routing", "together"))
        arguments += ["--check"] if args.what == "verify" else []
        log, cache = args.out.parent / f"{name}.log", TEMPORARY / "cache" / name
        self.process = EngineProcess(__file__, arguments, log, cache)

    def measured(self, until: float) -> dict[str, Any] | None:
        """The result; None if it failed, with the errors on the screen."""
        code, lines, result = self.process.ended(until)
        said = [line[line.index("weightstream") :] for line in lines if "weightstream: " in line or "each step" in line]
        print(self.shape, self.case, self.mode, *said[-2:], flush=True)
        if result is None:
            errors = [line for line in lines if "Error" in line][-6:] or lines[-6:]
            print(f"code {code}:", *errors, sep="\n  ", flush=True)
            return None
        self.process.log.unlink()
        return result


def measured(args: argparse.Namespace, cases: Sequence[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    """The rows of these cases, `--together` of them up at a time."""
    subprocess.run([sys.executable, "-c", PROFILE], check=True)  # the machine's profile, while it is idle
    (args.out.parent).mkdir(parents=True, exist_ok=True)
    end, plain = time.time() + args.total, dict[tuple[str, str], dict[str, Any]]()
    for begin in range(0, len(cases), args.together):
        started = [Case(args, *case) for case in cases[begin : begin + args.together]]
        until = min(end, time.time() + args.limit)
        wait_while_starting([case.process for case in started], until)
        for case in started:
            if (found := case.measured(until)) is None:
                continue
            outputs = {name: found.pop(name) for name in ("tokens", "scores", "layers")}
            key = case.shape, case.mode
            row = {"system": f"{case.shape} {case.case} {case.mode}", "case": case.case, "mode": case.mode}
            row |= {"shape": case.shape, "layers": args.layers or MIXTURES[case.shape].shape.num_layers}
            row |= {"routing": args.routing or MIXTURES[case.shape].curve, "together": args.together, **found}
            if case.case == "a":
                plain[key] = outputs | found
            elif key in plain:
                row |= compared(plain[key], outputs)
                for batch in outputs["tokens"]:
                    if f"fetched_{batch}" in found:
                        fetch_ms = 1e3 * found[f"fetched_{batch}"] * found["expert_nbytes"] / _LINK_BYTES_PER_S
                        plain_ms = plain[key][f"step_ms_{batch}"]["p50"]
                        row[f"bound_ms_{batch}"] = round(plain_ms + fetch_ms + _BESIDES_MS, 3)
            row["ms"] = row.pop("step_ms_1", None)
            print(json.dumps(row), flush=True)
            yield row


def first_difference(some: Sequence[Any], others: Sequence[Any]) -> int | None:
    """The first place at which they differ; None: they are equal."""
    return next((at for at, (one, two) in enumerate(zip(some, others, strict=True)) if one != two), None)


def compared(plain: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """Whether the outputs are those of case a, by batch, and where the first differences are."""
    row: dict[str, Any] = {"same": {}, "first_other_score": {}, "first_other_token": {}}
    for batch, texts in outputs["tokens"].items():
        known, scores, known_scores = plain["tokens"][batch], outputs["scores"][batch], plain["scores"][batch]
        row["same"][batch] = texts == known and scores == known_scores
        row["first_other_score"][batch] = first_difference(scores, known_scores)
        row["first_other_token"] |= {
            f"{batch}.{index}": first_difference(*pair)
            for index, pair in enumerate(zip(texts, known, strict=True))
            if pair[0] != pair[1]
        }
    if outputs["layers"]:
        row["same_layers"] = {batch: found == plain["layers"][batch] for batch, found in outputs["layers"].items()}
    return row


def write(args: argparse.Namespace) -> None:
    """Append the row of each case when it is there."""
    common = environment()
    cases = list[tuple[str, str, str]]()
    for named in args.shapes.split(","):
        shape, _, one_case = named.partition("/")
        cases += [(shape, case, args.mode) for case in (one_case or args.cases).split(",")]
    for row in measured(args, cases):
        append(args.out, [row], common)


if __name__ == "__main__":
    main()
