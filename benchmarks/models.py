"""Models of several kinds at full size, resident and at device budgets, each output bitwise the resident model's.

    python benchmarks/models.py [--models flux,vit,whisper,t5,sdxl] [--peers block leaf] [--graphs] [--load [NAME]]

All in one process. A model is made on the GPU with fresh random weights, timed there after clocks have settled, moved
to host memory and then offloaded under one budget after the other. `ms` counts every step from the third on: only the
first two are warm-up, so later learning of the streamer counts. Steps follow each other without a pause; `host_ms`, the
time until a call returns, is of later steps that find the device idle.

predicted_ms   of the plan that the first step ran with, before any measured time
refined_ms     the same after ten steps, corrected by measured times
x_predicted    predicted_ms over ms; x_refined: refined_ms over ms
beside_nbytes  the allocator's peak, without its memory before and without the plan's weights
link_gbps      the rate of the plan's copies back to back, in the same run
x_bound        ms over the least time that any schedule has: bound.py has the arithmetic

--graphs: each case also in a CUDA graph, after its eager steps; `x_bound` then uses the resident graph.
--peers: group offloading of diffusers, at these levels, over the same weights of flux, in its fastest form. --load: the
predictions for NAME (llama) with a profile of an idle machine while another process copies and multiplies during the
steps, and vice versa. `ms` is then of 30 steps after the tenth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kinds
import rows
import systems
import timing
import torch
from bench import GIB, show
from bound import Bound, bounds_of
from kinds import KINDS, Inputs
from steps import REFINED, Step, call_of, is_repeatable, timed

import weightstream
from weightstream import Plan, Streamer
from weightstream.measure.bench import copies_s, private_backend
from weightstream.measure.profile import profile_for

SETTLE_S = 1.0  # of a resident model under full load, until clocks are stable
LINK_S = 0.5
BULK = [64 << 20] * 8  # copies for the link's rate if a plan has none
LOADED_STEPS = 30
STATES = (("idle", "idle"), ("idle", "loaded"), ("loaded", "idle"))  # of the machine: when profiled, when measured
GRAPH = "CUDA graph"
SHOWN = ("x_bound", "x_predicted", "x_refined", "first_s", "peak_gib", "equal", "error")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Inputs of one batch, with outputs and time of the resident model; `graph_s`: its time in a graph, or None."""

    model: str
    batch: int
    inputs: Inputs
    want: torch.Tensor
    resident_s: float
    graph_s: float

    @property
    def name(self) -> str:
        return self.model if len(KINDS[self.model].batches) == 1 else f"{self.model}, batch {self.batch}"


class Models:
    """Measures one model after the other, and writes rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.backend = private_backend(self.device)
        self.rows = []
        self.common = rows.environment()
        self._started = time.perf_counter()
        self.random = torch.Generator(self.device).manual_seed(time.time_ns() % 2**31)
        print(profile_for(self.backend), flush=True)

    def measure(self, name: str) -> None:
        """Measure a model resident, offloaded under each budget and, on request, with its peers."""
        model, cases = self.made(name)
        budgets = self.budgets(name, model)
        bounds = bounds_of(model, budgets.values(), self.backend)
        for budget_name, budget in budgets.items():
            for case in cases:
                with rows.guarded(self.write, f"weightstream, {case.name}, {budget_name}"):
                    self.offloaded(model, case, budget_name, bounds[budget])
        if name == "flux" and self.device.type == "cuda":
            for level in self.args.peers:
                with rows.guarded(self.write, f"diffusers group offload, {name}, {level}"):
                    self.peer(model, cases[0], level)

    def made(self, name: str) -> tuple[Any, list[Case]]:
        """A model in host memory, and the cases that it was timed with on the device."""
        kind, base = KINDS[name], timing.clear(self.device)
        model, draw = kind.made(self.args.tiny, self.device, self.random), kinds.draw_with(self.random)
        most = 2 if self.args.tiny else max(kind.batches)
        inputs = {batch: kind.inputs(model, min(batch, most), draw) for batch in kind.batches}
        torch.backends.cuda.enable_cudnn_sdp(True)  # with it some plain models give different bits from call to call
        torch.backends.cuda.enable_cudnn_sdp(all(is_repeatable(call_of(model, x)) for x in inputs.values()))
        cases = [self.resident(model, name, batch, x, base) for batch, x in inputs.items()]
        return model.to("cpu"), cases

    def resident(self, model: Any, name: str, batch: int, inputs: Inputs, base: int) -> Case:
        run = call_of(model, inputs)
        want = run()
        if not want.isfinite().all():
            raise ValueError(f"{name}: not all of its output is finite, so that equal bits say nothing")
        until = time.perf_counter() + (0.0 if self.args.tiny else SETTLE_S)
        while time.perf_counter() < until:
            run()
            timing.synchronize(self.device)
        found = timed(run, want)
        resident_s = found["ms"]["p50"] / 1e3
        case = Case(model=name, batch=batch, inputs=inputs, want=want, resident_s=resident_s, graph_s=resident_s)
        self.add("resident", case, base, found, nbytes=nbytes_of(model))
        with rows.guarded(self.write, f"resident, {case.name}, {GRAPH}"):
            if in_graph := self.in_graph(run, want):
                self.add("resident", case, base, in_graph, GRAPH)
                case = replace(case, graph_s=in_graph["ms"]["p50"] / 1e3)
        return case

    def offloaded(self, model: Any, case: Case, budget_name: str, bound: Bound) -> None:
        base, started = timing.clear(self.device), time.perf_counter()
        with weightstream.offload(model, device=self.device, device_budget=bound.budget) as streamer:
            setup_s = time.perf_counter() - started
            run = call_of(model, case.inputs)
            found = timed(run, case.want, streamer)
            link, of_plan = self.link_bytes_per_s(streamer.plan), facts(streamer.plan)
            found |= bound.row(case.resident_s, link) | of_plan
            self.add("weightstream", case, base, found, budget_name, setup_s=round(setup_s, 2))
            if in_graph := self.in_graph(run, case.want, streamer):
                in_graph |= bound.row(case.graph_s, link) | of_plan
                self.add("weightstream", case, base, in_graph, f"{budget_name}, {GRAPH}")

    def in_graph(self, run: Step, want: torch.Tensor, streamer: Streamer | None = None) -> Row:
        """The times of launches of a graph, if requested."""
        if not self.args.graphs or self.device.type != "cuda":
            return {}
        with systems.captured(run, streamer) as launch:
            return timed(launch, want)

    def budgets(self, name: str, model: Any) -> dict[str, int]:
        return KINDS[name].budgets(self.args.tiny, nbytes_of(model))

    def link_bytes_per_s(self, plan: Plan) -> float:
        """The rate of a step's copies of this plan, back to back."""
        sizes = [plan.unit_nbytes[unit] for fills in plan.after for unit in fills] or BULK
        return sum(sizes) / statistics.median(copies_s(self.backend, sizes, LINK_S))

    def peer(self, model: Any, case: Case, level: str) -> None:
        """Measure a peer over the same host memory; memory that diffusers allocates is freed with the twin."""
        twin = KINDS[case.model].empty(self.args.tiny)
        twin.load_state_dict(model.state_dict(), assign=True)
        base, started = timing.clear(self.device), time.perf_counter()
        with systems.diffusers(twin, case.want, self.device, leaf=level == "leaf") as run:  # type: ignore[arg-type]
            setup_s = time.perf_counter() - started
            found = timed(call_of(run, case.inputs), case.want)
        self.add("diffusers group offload", case, base, found, level, setup_s=round(setup_s, 2))

    def load(self, name: str) -> None:
        """Measure a model under each pair of `STATES`, with profiles in a temporary folder."""
        model, (case, *_) = self.made(name)
        budgets = list(self.budgets(name, model).items())
        budget_name, budget = budgets[len(budgets) // 2]
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
            for profiled, measured in STATES:
                about = f"{budget_name}, profile {profiled}, steps {measured}"
                with rows.guarded(self.write, f"weightstream, {case.name}, {about}"):
                    with self.state(profiled):
                        print(profile_for(self.backend, anew=True), flush=True)
                    with self.state(measured):
                        base = timing.clear(self.device)
                        with weightstream.offload(model, device=self.device, device_budget=budget) as streamer:
                            run = call_of(model, case.inputs)
                            found = timed(run, case.want, streamer, num=LOADED_STEPS, settled=REFINED)
                            found |= facts(streamer.plan) | {"budget_nbytes": budget}
                    self.add("weightstream", case, base, found, about, profiled=profiled, measured=measured)

    def state(self, of: str) -> Any:
        return loaded(self.args) if of == "loaded" else nullcontext()

    def add(self, system: str, case: Case, base: int, found: Row, about: str = "", **fields: Any) -> None:
        """Add a row of times; `base`: the bytes that were allocated before the set-up of the system."""
        name = ", ".join(filter(None, (system, case.name, about)))
        row: Row = {"system": name, "model": case.model, "batch": case.batch} | found | fields
        row["taken_nbytes"] = row["peak_nbytes"] - base
        row["peak_gib"] = round(row["peak_nbytes"] / GIB, 3)
        if "device_nbytes" in row:
            row["beside_nbytes"] = row["taken_nbytes"] - row["device_nbytes"]
        p50 = row["ms"]["p50"]
        row |= {f"x_{of}": round(row[f"{of}_ms"] / p50, 4) for of in ("predicted", "refined") if f"{of}_ms" in row}
        row |= {"x_bound": round(p50 / row["bound_ms"], 4)} if "bound_ms" in row else {}
        self.write(**row, cudnn_attention=torch.backends.cuda.cudnn_sdp_enabled())

    def write(self, **row: Any) -> None:
        """Write a row and show it."""
        row = {"bench": "models", "tiny": self.args.tiny} | row
        self.rows.append(row)
        rows.append(self.args.out, [row], self.common)
        shown = {key: row[key] for key in SHOWN if key in row}
        ms = f"{row['ms']['p50']:.2f} ms " if "ms" in row else ""
        print(f"{time.perf_counter() - self._started:6.1f} s  {row['system']}: {ms}{shown}", flush=True)


def nbytes_of(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters())


def facts(plan: Plan) -> Row:
    return {
        "plan": plan.summary(),
        "units": len(plan.manifest.units),
        "limit": plan.limit,
        "compressed_nbytes": sum(plan.manifest.codes.values()),
        "step_nbytes": plan.step_nbytes,
        "device_nbytes": plan.device_nbytes,
        "ring_gib": round(plan.ring_nbytes / GIB, 4),
        "buffer_gib": round(plan.buffer_nbytes / GIB, 4),
        "compute_ms": round(1e3 * plan.compute_s, 3),
        "copy_ms": round(1e3 * plan.copy_s, 3),
        "decode_ms": round(1e3 * plan.decode_s, 3),
    }


@contextmanager
def loaded(args: argparse.Namespace) -> Iterator[None]:
    """Inside, another process keeps the device and its link busy."""
    command = [sys.executable, __file__, "--busy", str(os.getpid()), "--device", args.device]
    with subprocess.Popen([*command, *(["--tiny"] if args.tiny else [])], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it has started
            yield
            if process.poll() is not None:
                raise RuntimeError(f"the load ended by itself: exit status {process.returncode}")
        finally:
            process.kill()


def keep_busy(args: argparse.Namespace) -> None:
    """Copy to the device and multiply there until the parent process ends."""
    device, nbytes, width = torch.device(args.device), *((1 << 20, 256) if args.tiny else (1 << 30, 8192))
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    factor = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    print(flush=True)
    while os.getppid() == args.busy:
        target.copy_(source, non_blocking=True)
        torch.mm(factor, factor)
        timing.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="flux,vit,whisper,t5,sdxl", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--peers", nargs="+", choices=("block", "leaf"), default=[], help="peers of flux")
    parser.add_argument("--graphs", action="store_true", help="each also in a CUDA graph")
    parser.add_argument("--load", nargs="?", const="llama", metavar="NAME", help="only this")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check that they run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "models.jsonl")
    parser.add_argument("--busy", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    with torch.no_grad():
        if args.busy:
            keep_busy(args)
            return
        models = Models(args)
        for name in [args.load] if args.load else args.models.split(","):
            with rows.guarded(models.write, f"weightstream, {name}"):
                (models.load if args.load else models.measure)(name)
        models.backend.close()
        show(models.rows)


if __name__ == "__main__":
    main()
