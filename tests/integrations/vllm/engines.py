"""Engines of vLLM for tests: how they are made, asked for tokens, and ended."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PROMPTS = torch.randint(10, 1000, (4, 24), generator=torch.Generator().manual_seed(7)).tolist()
NUM_TOKENS = 24


def group(step: int, size: int = 1, num: int = 1) -> dict[str, int]:
    return {"offload_group_size": size, "offload_num_in_group": num, "offload_prefetch_step": step}


def asked(**settings: Any) -> dict[str, Any]:
    """Arguments of an engine with weightstream."""
    return {"additional_config": {"weightstream": settings}}


@contextmanager
def engine(folder: Path, *, compiled: bool = False, is_last: bool = True, **settings: Any) -> Iterator[Any]:
    """An engine. `is_last`: no other engine of this process is alive when it ends."""
    from vllm import LLM
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    options: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "seed": 0,
        "enforce_eager": not compiled,
        "disable_log_stats": True,
    }
    if torch.cuda.is_available():
        set_cudagraph_capturing_enabled(True)  # vLLM 0.24's V1 runner leaves it off, its V2 runner never turns it on
        options |= {"kv_cache_memory_bytes": 128 << 20, "gpu_memory_utilization": 0.3}
        if compiled:  # what Inductor times has other bits each time; what it combines depends on operators between
            fixed = {"deterministic": True, "combo_kernels": False, "benchmark_combo_kernel": False}
            options["compilation_config"] = {"inductor_compile_config": fixed}
    elif compiled:  # the default on a GPU
        options["compilation_config"] = {"mode": 3}
    llm = LLM(**options | settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        if is_last:
            cleanup_dist_env_and_memory()
            # cuBLAS keeps a workspace in the pool of the graphs, and torch captures into no pool whose graphs are gone
            type(current_platform)._global_graph_pool = None
        gc.collect()


def tokens(llm: Any, num: int = NUM_TOKENS, **options: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


def scored(llm: Any) -> list[list[Any]]:
    """Tokens, and the log-probabilities of the likely ones, in all digits."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=5)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    likely = [[{key: p.logprob for key, p in step.items()} for step in output.logprobs] for output in found]
    return [[list(output.token_ids), steps] for output, steps in zip(found, likely, strict=True)]


def streamer() -> Any:
    """The offloader of the latest engine of this process."""
    from vllm.model_executor.offloader.base import get_offloader

    return get_offloader().streamers[-1]
