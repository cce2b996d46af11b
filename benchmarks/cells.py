"""Predicted against measured steps: budgets from 5 % of a model's bytes to all of them, three workloads each.

    python benchmarks/cells.py [--shapes 8b,32b] [--budgets 5,25,50,75,95] [--classic 25,75] [--prefill 10,25] [--out …]

Models of transformers with random weights. A step is predicted before anything runs, from the profile of the machine
and from shapes, and again by the streamer after the first steps that it timed. The same run measures the link alone
with the plan's copies, and the resident model. Of the classic settings, rows have those that are predicted to be best
in the same memory; they are measured, too, at the budgets of `--classic`. Plans are for decoding; those of `--prefill`
are for the prompt.

`equal`: the outputs of four steps are bitwise those of the resident model in a run of its own. cuDNN attention is off:
with it the resident model itself gives different bits from call to call at batch 32.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import rows
import torch
import transformers

import weightstream
from weightstream import OffloadConfig, Plan, PlanError, PrefetchOffloadConfig
from weightstream.adapters.steps.decode_steps import CACHES, DecodeSteps, takes_ids
from weightstream.inputs.gathering import sketch_of
from weightstream.inputs.machine import dtypes_of, machine_with_rates
from weightstream.measure.bench import copies_s, rounds_s
from weightstream.plan.manifest import Workload
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.search import place_layers
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.devices.cuda import CudaBackend

SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40},
}
WORKLOADS = {
    "decode, batch 1": Workload(batch=1, tokens=1, context=1024),
    "decode, batch 32": Workload(batch=32, tokens=1, context=1024),
    "prefill of 8192": Workload(batch=1, tokens=8192, context=8192),
}
PERCENTS = ("budgets", "classic", "prefill")
NUM_COMPARED = 4  # steps whose outputs are compared
CLASSIC = [(g, n, k) for g in (1, 2, 3, 4, 8) for n in (1, 2) for k in (1, 2, 3) if n <= g][:30]
CLASSIC += [(6, 3, 2), (8, 4, 2), (16, 1, 1)]


def build(shape: str, device: torch.device) -> Any:
    """A causal language model with random weights on the device."""
    config = transformers.LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device=device)
    with device:  # its buffers are computed
        model.model.rotary_emb = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return model.eval()


def inputs_of(model: Any, config: OffloadConfig, machine: Any) -> dict[str, PlannerInputs]:
    """The planner's inputs of each workload."""
    found = {}
    for name, workload in WORKLOADS.items():
        over = {"batch": workload.batch, "tokens": workload.tokens, "context": workload.context}
        found[name] = sketch_of(model, None, config.merged(**over), machine).inputs
    return found


def priced(plan: Plan, inputs: PlannerInputs) -> Plan:
    """The plan as it is predicted for another workload."""
    planner = next(
        p for grain, p in zip(inputs.grains, inputs.planners, strict=True) if grain.units == plan.manifest.units
    )
    return planner.priced(plan)


class BestClassic(NamedTuple):
    """Classic settings (group size, number in a group, prefetch step) with the least predicted step.

    `num` settings fit the memory; the others are None if none does.
    """

    settings: tuple[int, int, int] | None
    step_s: float | None
    num: int


class Timed(NamedTuple):
    """Seconds of each step, and the allocator's peak besides the memory before."""

    seconds: list[float]
    beside_nbytes: int


def best_classic(inputs: PlannerInputs, plan: Plan) -> BestClassic:
    """The classic settings, of those that need no more device memory, that are predicted to be fastest."""
    manifest, planner = inputs.grains[0], inputs.planner(0)
    found = []
    for group_size, num_in_group, step in CLASSIC:
        prefetch = PrefetchOffloadConfig(
            offload_group_size=group_size, offload_num_in_group=num_in_group, offload_prefetch_step=step
        )
        classic = place_layers(manifest, prefetch, profile=planner.profile(manifest))
        if classic.device_nbytes <= max(plan.device_nbytes, plan.budget or 0):
            found.append((classic.step_s, (group_size, num_in_group, step)))
    step_s, settings = min(found, default=(None, None))
    return BestClassic(settings, step_s, len(found))


def first_outputs(steps: DecodeSteps) -> list[torch.Tensor]:
    """The outputs of the first steps, which differ: each has other tokens. Back to back, so that the ring wraps."""
    return [steps() for _ in range(NUM_COMPARED)]


class Cells:
    """The cells of one model."""

    def __init__(self, shape: str, device: torch.device, seconds: float) -> None:
        self.shape = shape
        self.device = device
        self.seconds = seconds
        self.model = build(shape, device)
        self.nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.backend = CudaBackend(device) if device.type == "cuda" else CpuBackend()
        machine = machine_with_rates(self.backend, OffloadConfig(), dtypes_of(self.model))
        print(machine.profile, flush=True)
        self.inputs = inputs_of(self.model, OffloadConfig(), replace(machine, free_nbytes=self.nbytes * 2))
        self.resident: dict[str, float] = {}
        self.want: dict[str, list[torch.Tensor]] = {}  # by workload: the resident model's outputs
        self.equal = False

    def timed(self, name: str) -> Timed:
        workload = WORKLOADS[name]
        if name not in self.want:  # a run of its own, so that the resident model is compared with itself
            self.want[name] = first_outputs(DecodeSteps(self.model, workload, self.device))
        steps = DecodeSteps(self.model, workload, self.device)
        self.equal = all(map(torch.equal, first_outputs(steps), self.want[name]))
        seconds = rounds_s(self.backend, steps, self.seconds)
        del steps
        return Timed(seconds, self.beside_nbytes(workload))

    @torch.no_grad()
    def beside_nbytes(self, workload: Workload) -> int:
        """The most that the allocator holds besides the memory before: in a prompt, and three steps on its cache."""
        self.collect()
        before, past = self.allocated(), workload.context - workload.tokens
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ids = torch.zeros(workload.batch, max(past, workload.tokens), dtype=torch.long, device=self.device)
        name = next(name for name in CACHES if name in takes_ids(self.model))
        cache = self.model(input_ids=ids, use_cache=True, logits_to_keep=1)[name]
        for _ in range(3 if past else 0):
            self.model(input_ids=ids[:, : workload.tokens], logits_to_keep=1, **{name: cache})
        return torch.cuda.max_memory_allocated() - before if self.device.type == "cuda" else 0

    def all_resident(self) -> Iterator[dict[str, Any]]:
        for name in WORKLOADS:
            seconds, peak = self.timed(name)
            ms = rows.percentiles([1e3 * s for s in seconds])
            self.resident[name] = ms["p50"] / 1e3
            plan = priced(self.inputs[name].at_budget(2 * self.nbytes).plan()[1], self.inputs[name])
            yield self.row(name, 100, plan, ms, peak) | {"refined_ms": None}

    def at(self, percent: int, first: str = "decode, batch 1") -> Iterator[dict[str, Any]]:
        """All workloads in a plan for the `first`; if that is the prompt, only that one."""
        budget, workload = self.nbytes * percent // 100, WORKLOADS[first]
        over = {"batch": workload.batch, "tokens": workload.tokens, "context": workload.context}
        try:
            streamer = weightstream.offload(self.model, device=self.device, device_budget=budget, codec="none", **over)
        except PlanError as error:
            print(f"{self.shape} {percent} %: {error}", flush=True)
            return
        with streamer:
            planned = streamer.plan
            floor_ms = self.floor_ms(planned, streamer.stats().read_in_place)
            for name in WORKLOADS if workload.tokens == 1 else [first]:
                seconds, peak = self.timed(name)
                ms = rows.percentiles([1e3 * s for s in seconds])
                plan = planned if name == first else priced(planned, self.inputs[name])
                classic = best_classic(self.inputs[name], plan)
                refined = streamer.stats()
                bound_ms = max(floor_ms, 1e3 * self.resident[name])
                yield self.row(name, percent, plan, ms, peak) | {
                    "planned_for": first,
                    "floor_ms": floor_ms,
                    "x_bound": round(ms["p50"] / bound_ms, 4),
                    "refined_ms": round(1e3 * refined.predicted_step_s, 3),
                    "stats_ms": round(1e3 * (refined.step_s or 0), 3),
                    "unit_sums_ms": {
                        what: round(1e3 * sum(getattr(unit, what) for unit in refined.units), 2)
                        for what in ("compute_s", "wait_s", "copy_s")
                    },
                    "classic": classic.settings,
                    "classic_predicted_ms": classic.step_s and round(1e3 * classic.step_s, 3),
                    "num_classic": classic.num,
                }

    def classic(self, percent: int, name: str = "decode, batch 1") -> Iterator[dict[str, Any]]:
        """The classic settings of no more device memory that are predicted to be best, measured."""
        plan = self.inputs[name].at_budget(self.nbytes * percent // 100).plan()[1]
        best = best_classic(self.inputs[name], plan)
        if best.settings is None:
            return
        keys = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step")
        over = {"context": WORKLOADS[name].context, **dict(zip(keys, best.settings, strict=True))}
        with weightstream.offload(self.model, device=self.device, codec="none", **over) as streamer:
            seconds, peak = self.timed(name)
            ms = rows.percentiles([1e3 * s for s in seconds])
            row = self.row(name, percent, streamer.plan, ms, peak)
            system = f"{row['system']}, classic {best.settings}"
            yield row | {"system": system, "classic": best.settings, "num_classic": best.num}

    def floor_ms(self, plan: Plan, read: tuple[int, ...]) -> float:
        """The plan's copies back to back, and what kernels read from host memory at the same rate."""
        sizes = [*(plan.unit_nbytes[u] for fills in plan.after for u in fills), *read]
        return rows.percentiles([1e3 * s for s in copies_s(self.backend, sizes, 1.0)])["p50"] if sizes else 0.0

    def row(self, name: str, percent: int, plan: Plan, ms: dict[str, float], peak: int) -> dict[str, Any]:
        return {
            "system": f"{self.shape}, {percent} %, {name}",
            "shape": self.shape,
            "percent": percent,
            "workload": name,
            "ms": ms,
            "predicted_ms": round(1e3 * plan.step_s, 3),
            "compute_ms": round(1e3 * plan.compute_s, 3),
            "copy_ms": round(1e3 * plan.copy_s, 3),
            "resident_ms": round(1e3 * self.resident.get(name, 0.0), 3),
            "x_predicted": round(1e3 * plan.step_s / ms["p50"], 4),
            "limit": plan.limit,
            "units": len(plan.manifest.units),
            "device_nbytes": plan.device_nbytes,
            "activation_nbytes": plan.activation_nbytes,
            "cache_nbytes": plan.cache_nbytes,
            "beside_nbytes": peak,
            "equal": self.equal,
            "plan": plan.summary(),
        }

    def collect(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


def show(row: dict[str, Any]) -> None:
    ms, refined = row["ms"], row.get("refined_ms")
    off = "" if not refined else f"  refined {refined:9.2f} x {refined / ms['p50']:.3f} (stats {row['stats_ms']:.2f})"
    beside = (row["activation_nbytes"] + row["cache_nbytes"]) / 2**20
    print(
        f"{row['system']:30} {ms['p20']:9.2f} {ms['p50']:9.2f} {ms['p80']:9.2f}  predicted {row['predicted_ms']:9.2f} "
        f"x {row['x_predicted']:.3f}{off}  bound x {row.get('x_bound')}  beside {row['beside_nbytes'] / 2**20:.0f} of "
        f"{beside:.0f} MiB  equal {row['equal']}  classic {row.get('classic')} {row.get('classic_predicted_ms')}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8b,32b")
    parser.add_argument("--budgets", default="5,25,50,75,95")
    parser.add_argument("--classic", default="25,75")
    parser.add_argument("--prefill", default="10,25")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "cells.jsonl")
    options = parser.parse_args()
    device, common = torch.device("cuda" if torch.cuda.is_available() else "cpu"), rows.environment()
    torch.backends.cuda.enable_cudnn_sdp(False)
    percents = {name: [int(p) for p in getattr(options, name).split(",") if p] for name in PERCENTS}
    for shape in options.shapes.split(","):
        cells = Cells(shape, device, options.seconds)
        at_prefill = (cells.at(percent, "prefill of 8192") for percent in percents["prefill"])
        decoding = map(cells.at, percents["budgets"])
        for made in (cells.all_resident(), *decoding, *at_prefill, *map(cells.classic, percents["classic"])):
            for row in made:
                show(row)
                rows.append(options.out, [row], common)
        cells.backend.close()
        del cells
        gc.collect()


if __name__ == "__main__":
    main()
