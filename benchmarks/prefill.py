"""A prompt of 16,384 tokens through a decoder of Llama-3.1-8B's shape, all layers offloaded: time and peak memory.

    python benchmarks/prefill.py [--only ring,two,…] [--tokens 16384] [--out benchmarks/results/prefill.jsonl]

Compute takes longer than the copies here, so a system is as good as it hides them, and as it is small.
"""

from __future__ import annotations

import systems
from bench import GIB, Bench, Case, main


def ring(bench: Bench, cases: list[Case]) -> None:
    bench.ours(cases[0], "weightstream, ring of 0.45 GiB", device_budget=bench.ring_budget())


def two(bench: Bench, cases: list[Case]) -> None:
    budget = 2 * bench.layer_nbytes + GIB // 64
    bench.ours(cases[0], "weightstream, budget of two layers", device_budget=budget)


def diffusers(bench: Bench, cases: list[Case]) -> None:
    for level in ("block", "leaf"):
        bench.peer(cases[0], f"diffusers group offload, {level}", systems.diffusers, leaf=level == "leaf")


def flextensor(bench: Bench, cases: list[Case]) -> None:
    """Its defaults, and the smallest that it can be told to be."""
    bench.peer(cases[0], "FlexTensor, latency mode", systems.flextensor)
    smallest = {"max_gpu_mem_fraction": 0.02, "num_blocks": 2, "min_blocks": 2}
    bench.peer(cases[0], "FlexTensor, memory mode, 2 blocks", systems.flextensor, **smallest)


GROUPS = {"ring": ring, "two": two, "diffusers": diffusers, "flextensor": flextensor}

if __name__ == "__main__":
    main("prefill", __doc__, GROUPS, seconds=5, tokens=(16384,))
