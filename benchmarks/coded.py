"""Compressed weights below the raw link floor: 8B and 70B shapes, FlexTensor at equal memory, a prompt, host memory.

    python benchmarks/coded.py [--only a,peers,b,c,d,e,llama,pack] [--seconds 3.5] [--out FILE]

a: one token, all layers offloaded, in at most 0.9 GiB. peers: the same by accelerate and diffusers. b: the same in as
much device memory as FlexTensor takes. `chart.py` draws these three, of one run, for the README. c: a 70B shape in 80
GiB. d: a prompt of 16,384 tokens; llama: the same with a model of transformers. e: bytes in host memory. pack: bytes of
a packed checkpoint. Every output is compared with the plain model's, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import decoder
import host
import prefill
import systems
import torch
from bench import GIB, Bench, Case, main
from model import TINY, Decoder, Shape, empty
from systems import graphed

import weightstream
from weightstream import PlanError, Streamer

SMALL_GIB = 0.9
LADDER_GIB = (0.45, 0.6, 0.75, SMALL_GIB)
LARGE = Shape(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8)
LARGE_GIB = 80
BESIDE_GIB = 1 / 8  # of these, for the memory of a step of one token besides the weights
HOST_LAYERS = (0, 24)  # if the whole model leaves no room to compress it on the GPU, its last layers start on the host
PROMPT = 16384
GPU_GIB = 140  # for FlexTensor's settings if it is not installed
FRACTIONS = ((0.02, 1.7), (0.04, 2.2), (0.06, 4.5))  # share of the GPU in its memory mode; wanted speed-up
PACK_TIMEOUT_S = 400


def all_offloaded(bench: Bench, cases: list[Case]) -> None:
    """In the least memory of the ladder that has a plan, raw and compressed; and in all allowed memory."""
    budget = _least(bench, cases[0])
    if budget is None:
        return
    bench.ours(cases[0], f"weightstream, {_gib(budget)}, codec none", graph=True, device_budget=budget, codec="none")
    if budget != (most := _share(bench, SMALL_GIB)):
        _coded(bench, cases[0], most, graph=False)
    for row in _last(bench, 6):
        if "codec none" not in row["system"] and "plan_device_nbytes" in row:
            planned, found = row["plan_device_nbytes"] / GIB, row["allocated_nbytes"] / GIB
            taken = f"device GiB planned {planned:.3f}, allocated {found:.3f} (at most {SMALL_GIB})"
            _tell("a", row, "x_floor", "at most 0.71", f"of the raw link floor; {taken}")


def peers(bench: Bench, cases: list[Case]) -> None:
    decoder.accelerate(bench, cases)
    decoder.diffusers(bench, cases)


def same_memory(bench: Bench, cases: list[Case]) -> None:
    """FlexTensor, then ours with a budget that gives the same growth of the allocator's peak."""
    case = cases[0]
    for fraction, wanted in bench.args.fractions:
        peer = f"FlexTensor, memory mode, {100 * fraction:g} %"
        bench.peer(case, peer, systems.flextensor, max_gpu_mem_fraction=fraction)
        found = bench.rows[-1]
        taken = found.get("taken_nbytes") or _share(bench, fraction * GPU_GIB)
        facts = {"than": peer, "than_ms": found["ms"]["p50"], "than_taken_nbytes": taken} if "ms" in found else {}
        budget = taken - _beside_nbytes(bench, case)
        for codec, graph in ((_auto(bench), True), ("none", False)):
            system = f"weightstream, in the memory of {100 * fraction:g} %, codec {codec}"
            bench.ours(case, system, graph=graph, facts=facts, device_budget=budget, codec=codec)
        for row in _last(bench, 3):
            memory = f"{row.get('taken_nbytes', 0) / GIB:.3f} GiB taken, FlexTensor {taken / GIB:.3f}"
            _tell("b", row, "times_faster", f"at least {wanted}", f"times FlexTensor's speed; {memory}")


def large(bench: Bench, cases: list[Case]) -> None:
    """A model of which far more streams raw than compressed. The plain one just fits the GPU, and is the reference."""
    bench.forget_host_model()
    shape = replace(TINY, layers=10) if bench.args.smoke else LARGE
    with bench.guarded("weightstream, 70B shape"):
        found = Large("coded", bench.args, shape, suffix=", 70B shape", floor_steps=3)
        try:
            found.compare()
        finally:
            bench.rows += found.rows


class Large(Bench):
    """The 70B shape. `host_layers` of it are in plain host memory when it is offloaded."""

    host_layers = 0

    def model(self) -> Decoder:
        model = super().model()
        for layer in model.layers[len(model.layers) - self.host_layers :]:
            layer.to("cpu")
        return model

    def compare(self) -> None:
        case = self.resident(1)
        budget = _share(self, LARGE_GIB - BESIDE_GIB, of=LARGE)
        raw_ms = self._offloaded(case, "none", budget, {})
        than = {"than": "weightstream, codec none", "than_ms": raw_ms}
        self._offloaded(case, _auto(self), budget, than)
        _tell("c", self.rows[-1], "times_faster", "at least 3", f"times the raw plan's speed; {LARGE_GIB} GiB")

    def _offloaded(self, case: Case, codec: str, budget: int, facts: dict[str, Any]) -> float:
        """The p50; if compression finds no room on the device, with layers that start in host memory."""
        system = f"weightstream, {LARGE_GIB} GiB, codec {codec}"
        for host_layers in HOST_LAYERS:
            self.host_layers = host_layers
            num_rows = len(self.rows)
            fields = {"host_layers": host_layers, **facts}
            try:
                self.offloaded(case, system, graph=False, facts=fields, device_budget=budget, codec=codec)
            except torch.OutOfMemoryError as error:
                print(f"c: out of memory, {host_layers} layers started on the host: {str(error)[:300]}", flush=True)
            if len(self.rows) > num_rows:  # else it failed before it was measured, not during removal
                print(f"c: {self.rows[-1]['plan']}", flush=True)
                return float(self.rows[-1]["ms"]["p50"])
        raise RuntimeError(f"{system}: out of device memory, however many layers start on the host")


def prompt(bench: Bench, cases: list[Case]) -> None:
    """In turns with the resident model, as in `prefill.py`."""
    tokens, budget = _prompt_tokens(bench), _share(bench, bench.args.prompt_gib)
    case = bench.resident(tokens)
    settings = {"device_budget": budget, "codec": _auto(bench), "tokens": tokens, "context": tokens}
    prefill.paired(bench, case, f"weightstream, prompt, {_gib(budget)}, codec {_auto(bench)}", **settings)
    _tell("d", bench.rows[-1], "x_resident_turns", "at most 1.003", "x resident")


def llama(bench: Bench, cases: list[Case]) -> None:
    """The same with a model of transformers, whose work the planner knows."""
    tokens, budget = _prompt_tokens(bench), 130 << 20 if bench.args.smoke else int(bench.args.prompt_gib * GIB)
    system = f"weightstream, Llama, prompt, {_gib(budget)}, codec {_auto(bench)}"
    with bench.guarded(system, tokens=tokens):
        case, plain, offloaded = _llamas(bench, tokens)
        settings: dict[str, Any] = {"tokens": tokens, "context": tokens, "codec": _auto(bench), "device_budget": budget}
        with weightstream.offload(offloaded, device=bench.device, **settings) as streamer:
            run = partial(_logits, offloaded)
            bench.measure(f"{system}, eager", run, case, streamer=streamer, settings=settings)
            prefill.in_turns(bench, case, system, run, resident=partial(_logits, plain))
        _tell("llama", bench.rows[-1], "x_resident_turns", "at most 1.003", "x resident")


class Llamas(NamedTuple):
    """Two equal models on the device, one to be offloaded, and the case with the outputs of the plain one."""

    case: Case
    plain: Any
    offloaded: Any


def _llamas(bench: Bench, tokens: int) -> Llamas:
    """Make the models, and add the resident model's row."""
    import cells

    torch.manual_seed(time.time_ns() % 2**31)
    bench.fresh()
    plain, offloaded = (cells.build("tiny" if bench.args.smoke else "8b", bench.device) for _ in range(2))
    offloaded.load_state_dict(plain.state_dict())
    ids = [torch.randint(plain.config.vocab_size, (1, tokens)) for _ in range(2)]
    want = tuple(_logits(plain, x.to(bench.device)).cpu() for x in ids)
    case = Case(tokens=tokens, x=tuple(ids), want=want, resident_ms=0.0)
    ms = bench.measure("resident, Llama, eager", partial(_logits, plain), case)
    return Llamas(replace(case, resident_ms=ms), plain, offloaded)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=1).logits
    return logits


def host_memory(bench: Bench, cases: list[Case]) -> None:
    """Host memory of a model that comes from the GPU: by the plan, pinned, and by the growth of the process."""
    for codec in (_auto(bench), "none"):
        system, before = f"weightstream, host memory, codec {codec}", host.anon_nbytes()
        with (
            bench.guarded(system),
            host.Peak() as peak,
            bench.streamed(device_budget=_share(bench, SMALL_GIB), codec=codec) as (model, streamer),
        ):
            grown = {"anon_growth_nbytes": host.anon_nbytes() - before, "anon_peak_nbytes": peak.nbytes - before}
            got = [model(x.to(bench.device)).cpu() for x in cases[0].x]
            equal = all(map(torch.equal, got, cases[0].want))
            bench.add(system, equal=equal, **grown, **_host_fields(streamer, max(grown["anon_growth_nbytes"], 0)))
            if codec != "none":
                _tell("e", bench.rows[-1], "x_host", "at most 0.72", "of their bf16 bytes, the weights on the host")


def _host_fields(streamer: Streamer, grown: int) -> dict[str, Any]:
    plan, pinned = streamer.plan, getattr(streamer._homes._arena, "nbytes", 0)
    left = {t.alias: t.decoded_nbytes or t.nbytes for t in plan.manifest.tensors() if t.alias not in plan.resident}
    return {
        "host_nbytes": plan.host_nbytes,
        "arena_nbytes": pinned,
        "decoded_host_nbytes": sum(left.values()),
        "decoded_nbytes": plan.manifest.decoded_nbytes,
        "x_host": round(max(plan.host_nbytes, pinned) / sum(left.values()), 5),
        "x_host_grown": round(max(plan.host_nbytes, pinned, grown) / sum(left.values()), 5),
    }


def packed(bench: Bench, cases: list[Case]) -> None:
    """`weightstream pack --codec auto` of a checkpoint of transformers with 1.5 billion weights."""
    import checkpoint

    with bench.guarded("weightstream, packed"), tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "source"), Path(folder, "packed")
        checkpoint.make(source, checkpoint.TINY if bench.args.smoke else checkpoint.SMALL)
        command = ["-m", "weightstream", "pack", str(source), str(out), "--codec", "auto", "--verify"]
        started = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, timeout=PACK_TIMEOUT_S)
        sizes = {"source_nbytes": checkpoint.weights_nbytes(source), "nbytes": checkpoint.weights_nbytes(out)}
        share = round(sizes["nbytes"] / sizes["source_nbytes"], 5)
        bench.add("weightstream, packed", pack_s=round(time.perf_counter() - started, 2), x_file=share, **sizes)
        _tell("pack", bench.rows[-1], "x_file", "at most 0.72", "of the checkpoint's bytes")


def _least(bench: Bench, case: Case) -> int | None:
    """Measure compressed in the least memory of the ladder that has a plan, and return it."""
    for budget in (_share(bench, gib) for gib in LADDER_GIB):
        with bench.guarded("weightstream, all offloaded", tokens=case.tokens), contextlib.suppress(PlanError):
            _coded(bench, case, budget, guarded=False)
            return budget
    print(f"a: no plan in {LADDER_GIB} GiB", flush=True)
    return None


def _coded(bench: Bench, case: Case, budget: int, *, guarded: bool = True, graph: bool = True) -> None:
    measure = bench.ours if guarded else bench.offloaded
    system = f"weightstream, {_gib(budget)}, codec {_auto(bench)}"
    measure(case, system, graph=graph, device_budget=budget, codec=_auto(bench))


def _beside_nbytes(bench: Bench, case: Case) -> int:
    """The most bytes of steps of one token besides the plan's, eager or in a graph."""
    if not any(_steps_alone(case, bench.rows)):
        _coded(bench, case, _share(bench, SMALL_GIB))
    return max(0, *_steps_alone(case, bench.rows))


def _steps_alone(case: Case, rows: list[dict[str, Any]]) -> Iterator[int]:
    return (row["beside_nbytes"] for row in rows if row.get("tokens") == case.tokens and "beside_nbytes" in row)


def _prompt_tokens(bench: Bench) -> int:
    return 64 if bench.args.smoke else PROMPT


def _auto(bench: Bench) -> str:
    return "auto" if bench.device.type == "cuda" else "compressed"  # on a CPU "auto" compresses nothing


def _share(bench: Bench, gib: float, of: Shape | None = None) -> int:
    """So many GiB of the full shape, scaled to the bytes of the measured one."""
    full = sum(p.nbytes for p in empty(replace(of or Shape(), layers=1)).layers.parameters()) * (of or Shape()).layers
    return int(gib * GIB * min(1.0, bench.nbytes / full))


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _last(bench: Bench, num: int) -> list[dict[str, Any]]:
    return [row for row in bench.rows[-num:] if row["system"].startswith("weightstream") and "ms" in row]


def _tell(part: str, row: dict[str, Any], key: str, wanted: str, what: str) -> None:
    value = row.get(key)
    value = value["p50"] if isinstance(value, dict) else value
    if value is not None:
        print(f"{part}: {value:.4f} {what}; wanted {wanted}; equal {row.get('equal')}; {row['system']}", flush=True)


def options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(steps=20)
    parser.add_argument("--fractions", type=_fractions, default=FRACTIONS, help="of the GPU, for FlexTensor: 0.02,0.04")
    parser.add_argument("--prompt-gib", type=float, default=SMALL_GIB, help="device budget of d and llama")


def _fractions(text: str) -> list[tuple[float, float]]:
    wanted = dict(FRACTIONS)
    return [(float(each), wanted.get(float(each), 1.0)) for each in text.split(",")]


GROUPS = {
    "a": all_offloaded,
    "peers": peers,
    "b": same_memory,
    "d": prompt,
    "llama": llama,
    "e": host_memory,
    "c": large,
    "pack": packed,
}

if __name__ == "__main__":
    main("coded", __doc__, GROUPS, seconds=3.5, tokens=(1,), modes={"CUDA graph": graphed}, options=options)
