"""A quarter and a half of the layers offloaded by the classic flags: step time against max(compute, copies).

    python benchmarks/classic.py [--only 4/1,2/1] [--tokens 1,1024,…] [--out benchmarks/results/classic.jsonl]

The more tokens, the more a step computes: from copies only, over about equal times, to compute that hides copies.
"""

from __future__ import annotations

from functools import partial

from bench import Bench, Case, main


def groups_of(size: int, bench: Bench, cases: list[Case]) -> None:
    for step in (1, 2):
        _one(bench, cases, size, step)


def _one(bench: Bench, cases: list[Case], size: int, step: int) -> None:
    system = f"weightstream, groups {size}/1, step {step}"
    settings = {"offload_group_size": size, "offload_num_in_group": 1, "offload_prefetch_step": step}
    with bench.guarded(system), bench.streamed(**settings) as (model, streamer):
        for case in cases:
            with bench.guarded(system, tokens=case.tokens):
                bench.measure(system, model, case, streamer=streamer, settings=settings)


GROUPS = {"4/1": partial(groups_of, 4), "2/1": partial(groups_of, 2)}

if __name__ == "__main__":
    main("classic", __doc__, GROUPS, seconds=1.5, tokens=(1, 1024, 2048, 4096, 16384))
