"""A prompt of 16,384 tokens through a decoder of Llama-3.1-8B's shape, all layers offloaded: time and peak memory.

    python benchmarks/prefill.py [--only ring,two,…] [--tokens 16384] [--out benchmarks/results/prefill.jsonl]

Compute takes longer than the copies here, so a system is judged by how it hides copies, and by its memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import systems
import timing
import torch
from bench import Bench, Case, main
from model import build
from rows import percentiles
from timing import Run

ROUNDS = 6


def ring(bench: Bench, cases: list[Case]) -> None:
    paired(bench, cases[0], "weightstream, groups 1/1, step 1", offload_group_size=1)
    paired(bench, cases[0], "weightstream, budget of 0.45 GiB", device_budget=bench.ring_budget())


def beside(bench: Bench, cases: list[Case]) -> None:
    """The resident model during equal copies that it does not wait for: the cost of sharing the device."""
    source = torch.empty(bench.layer_nbytes, dtype=torch.uint8).random_(0, 256)
    if bench.device.type != "cuda":
        return
    source, side = source.pin_memory(), torch.cuda.Stream()
    model = bench.model()
    target = torch.empty(bench.layer_nbytes, dtype=torch.uint8, device=bench.device)

    def run(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(bench.shape.layers):
                target.copy_(source, non_blocking=True)
        return model(x)

    in_turns(bench, cases[0], "resident, beside copies of all layers", run)


def two(bench: Bench, cases: list[Case]) -> None:
    paired(bench, cases[0], "weightstream, groups 1/1, step 2", offload_group_size=1, offload_prefetch_step=2)


def paired(bench: Bench, case: Case, system: str, **settings: Any) -> None:
    """Ours, then in turns with the resident model: the clocks of a GPU under full load drift by more than the
    difference of both."""
    with bench.guarded(system, tokens=case.tokens), bench.streamed(**settings) as (model, streamer):
        bench.measure(f"{system}, eager", model, case, streamer=streamer, settings=settings)
        in_turns(bench, case, system, model)


def in_turns(bench: Bench, case: Case, system: str, run: Run, resident: Run | None = None) -> None:
    """Measure in turns with `resident`, by default the plain decoder."""
    resident = build(bench.shape, bench.device, 0) if resident is None else resident
    x = case.x[0].to(bench.device)
    turns = [[timing.steps_ms(each, x, 2) for each in (resident, run)] for _ in range(ROUNDS)]
    ratios = [sum(ours) / sum(plain) for plain, ours in turns]
    ms, resident_ms = ([statistics.median(turn[side]) for turn in turns] for side in (1, 0))
    bench.add(
        f"{system}, in turns with the resident model",
        tokens=case.tokens,
        ms=percentiles(ms),
        resident_ms=statistics.median(resident_ms),
        x_resident_turns=percentiles(ratios),
    )


def diffusers(bench: Bench, cases: list[Case]) -> None:
    for level in ("block", "leaf"):
        peer(bench, cases[0], f"diffusers group offload, {level}", systems.diffusers, leaf=level == "leaf")


def flextensor(bench: Bench, cases: list[Case]) -> None:
    """FlexTensor with its defaults, and in its smallest memory mode."""
    peer(bench, cases[0], "FlexTensor, latency mode", systems.flextensor)
    smallest = {"max_gpu_mem_fraction": 0.02, "num_blocks": 2, "min_blocks": 2}
    peer(bench, cases[0], "FlexTensor, memory mode, 2 blocks", systems.flextensor, **smallest)


def peer(bench: Bench, case: Case, system: str, enter: Callable[..., Any], **settings: Any) -> None:
    model = bench.host_model()
    with bench.guarded(system, tokens=case.tokens), enter(model, case.x[0], bench.device, **settings) as run:
        bench.measure(system, run, case, settings=settings)
        in_turns(bench, case, system, run)


GROUPS = {"ring": ring, "beside": beside, "two": two, "diffusers": diffusers, "flextensor": flextensor}

if __name__ == "__main__":
    main("prefill", __doc__, GROUPS, seconds=5, tokens=(16384,))
