"""One token through a decoder of Llama-3.1-8B's shape: step time against the link's floor.

    python benchmarks/decoder.py [--only ring,two,…] [--seconds 3] [--out benchmarks/results/decoder.jsonl]

Every system runs the same weights in the same process and must give the bits of the resident model. The floor is
measured in the same run: the same bytes, in copies of one layer each, back to back.
"""

from __future__ import annotations

import systems
import timing
import torch
from bench import GIB, Bench, Case, main
from systems import COMPILE, graphed
from torch._dynamo.utils import counters

SCOPES = ("model", "blocks")


def ring(bench: Bench, cases: list[Case]) -> None:
    bench.ours(cases[0], "weightstream, ring of 0.45 GiB", graph=True, device_budget=bench.ring_budget())


def two(bench: Bench, cases: list[Case]) -> None:
    budget = 2 * bench.layer_nbytes + GIB // 64
    bench.ours(cases[0], "weightstream, budget of two layers", graph=True, device_budget=budget)


def classic(bench: Bench, cases: list[Case]) -> None:
    for step in (1, 2):
        bench.ours(
            cases[0],
            f"weightstream, groups 1/1, step {step}",
            offload_group_size=1,
            offload_prefetch_step=step,
        )


def budget(bench: Bench, cases: list[Case]) -> None:
    """Half the bytes, and a quarter, which is about the memory of FlexTensor's row."""
    for share, name in (2, "half"), (4, "a quarter of"):
        bench.ours(cases[0], f"weightstream, budget of {name} the bytes", device_budget=bench.nbytes // share)


def zero_copy(bench: Bench, cases: list[Case]) -> None:
    nbytes = bench.nbytes + 2 * bench.shape.hidden
    bench.ours(cases[0], "weightstream, zero-copy, all", graph=True, cpu_offload_gb=nbytes / GIB)
    large = {"zero_copy_params": ["q", "o", "gate", "up", "down"], "offload_group_size": 1}
    bench.ours(cases[0], "weightstream, zero-copy, small matrices stream", graph=True, **large)


def compiled(bench: Bench, cases: list[Case]) -> None:
    for scope in SCOPES:
        want = _compiled_resident(bench, cases[0], scope)
        _compiled_ours(bench, cases[0], scope, want)


def accelerate(bench: Bench, cases: list[Case]) -> None:
    bench.peer(cases[0], "accelerate cpu_offload", systems.accelerate)


def diffusers(bench: Bench, cases: list[Case]) -> None:
    for level in ("block", "leaf"):
        bench.peer(cases[0], f"diffusers group offload, {level}", systems.diffusers, leaf=level == "leaf")


def flextensor(bench: Bench, cases: list[Case]) -> None:
    bench.peer(cases[0], "FlexTensor, memory mode, 2 %", systems.flextensor, max_gpu_mem_fraction=0.02)


def _compiled_resident(bench: Bench, case: Case, scope: str) -> tuple[torch.Tensor, ...] | None:
    """The compiler's own outputs: it rounds differently from eager kernels, and ours must equal it."""
    system, want = f"resident, compiled, {scope}", None
    _forget_compiled()
    with bench.guarded(system, tokens=case.tokens):
        run = systems.compiled(bench.model(), scope)
        first_s = timing.once_ms(run, case.x[0].to(bench.device)) / 1e3
        want = tuple(run(x.to(bench.device)).cpu() for x in case.x)
        bench.measure(system, run, case, want=want, first_s=round(first_s, 1), **_compilations())
    return want


def _compiled_ours(bench: Bench, case: Case, scope: str, want: tuple[torch.Tensor, ...] | None) -> None:
    system = f"weightstream, ring of 0.45 GiB, compiled, {scope}"
    _forget_compiled()
    with (
        bench.guarded(system, tokens=case.tokens),
        bench.streamed(device_budget=bench.ring_budget()) as (model, streamer),
    ):
        model(case.x[0].to(bench.device))  # the order of units is learned
        streamer.compile(scope, **COMPILE)
        first_s = timing.once_ms(model, case.x[0].to(bench.device)) / 1e3
        for x in case.x:
            model(x.to(bench.device))
        fields = {"streamer": streamer, "first_s": round(first_s, 1)} | _compilations()
        bench.measure(system, model, case, want=want, **fields)


def _forget_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()


def _compilations() -> dict[str, int]:
    return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values())}


GROUPS = {
    "ring": ring,
    "two": two,
    "classic": classic,
    "budget": budget,
    "zero_copy": zero_copy,
    "compiled": compiled,
    "accelerate": accelerate,
    "diffusers": diffusers,
    "flextensor": flextensor,
}

if __name__ == "__main__":
    main("decoder", __doc__, GROUPS, seconds=3, tokens=(1,), modes={"CUDA graph": graphed})
