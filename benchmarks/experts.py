"""Mixtures of experts: decoding with compressed or cached experts on the device, compared with the plain model.

    python benchmarks/experts.py [--shape qwen3] [--layers N] [--shares coded,50,25,10] [--batch 1] [--hits NAME]
        [--recalls 0.66,0.85] [--aheads 0,1,2] [--ring] [--packed mxfp4|float8] [--prompt 64,1024] [--only-prompt]
    python benchmarks/experts.py --first [--shape qwen3] [--layers N] [--folder …] [--tiny]     see experts_first.py

A shape (experts_shapes.py) with random weights, in `weightstream.generate`, which replays steps from CUDA graphs for
both. A share is the device memory for experts, in percent of their bytes, besides the other weights, or such as 24GiB
for all weights; "coded" is 42/57 of all, compressed. `graph_ms` is the time of a graph on the device: between two
graphs `generate` has more work for the host. Ids come from a table on the device, for the plain model too: with
--hits so that an LRU cache has the hit rates that were measured on the named models, by default on the one with the
most similar routing. A row names it as `routing`; its `lru_hits` are the rates of the table by the number of slots.
`prompt_s` is the time of a prompt and its first token; `experts_link_s` that of copying all experts once, at the rate
of the link in the profile. Logits of 24 tokens are compared bit by bit. A model that does not fit the device is built
in host memory, and its plans are compared with the first one. With a recall, guesses for the next layer are drawn of
which this share is right. With --ring no plan has a cache.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import experts_first
import rows
import torch
from experts_shapes import HITS, PACKED, SHAPES, Table, build, experts_of, nbytes_of, unpacked

import weightstream
from weightstream.measure.profile import load_profile
from weightstream.plan.hit_curves import HitCurve, curve_of
from weightstream.plan.planner import Planner

REPEATS = 3
PROMPT = 64
LAUNCH_CYCLES = 4_000_000  # 2 ms
SLOW_S = 0.1  # per token: slower models are timed for fewer tokens
ROOM_NBYTES = 3 << 30  # besides the weights, for the cache, activations and libraries


class Reference(NamedTuple):
    """What later systems are compared with; `plain_ms`: per token, of the plain model, if it is one."""

    name: str
    logits: list[torch.Tensor]
    plain_ms: float | None


class Decoding:
    def __init__(self, model: Any, batch: int, prompt: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._model = model
        self.how = ""
        self._ids = torch.randint(1000, (batch, prompt), generator=generator).cuda()

    def run(self, tokens: int, **more: Any) -> Any:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return weightstream.generate(self._model, self._ids, on_decoding=self._tell, **options, **more)

    def _tell(self, decoding: Any) -> None:
        self.how = str(decoding)

    def seconds(self) -> list[float]:
        """Seconds per token, in several runs."""
        many, few = self._numbers
        return [(self._taken(many) - self._taken(few)) / (many - few) for _ in range(REPEATS)]

    def graph_ms(self) -> dict[str, float] | None:
        """Milliseconds of a graph of these tokens on the device, which is kept busy while the host launches it; None if
        no step is captured."""
        spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        replay = torch.cuda.CUDAGraph.replay

        def timed(graph: torch.cuda.CUDAGraph) -> None:
            span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(LAUNCH_CYCLES)
            span[0].record()
            replay(graph)
            span[1].record()
            spans.append(span)

        many, few = self._numbers
        with patch.object(torch.cuda.CUDAGraph, "replay", timed):
            self._taken(many)
        ms = [begin.elapsed_time(end) for begin, end in spans[few - many :]]
        return rows.percentiles(ms) if ms else None

    @cached_property
    def _numbers(self) -> tuple[int, int]:
        """Tokens of two runs whose difference is timed."""
        self._taken(8)
        is_slow = self._taken(8) - self._taken(1) > 7 * SLOW_S
        return (24, 8) if is_slow else (128, 32)

    def prompt_seconds(self) -> list[float]:
        """Seconds of the prompt and its token, in several runs."""
        self._taken(1)
        return [self._taken(1) for _ in range(REPEATS)]

    def _taken(self, tokens: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.run(tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def logits(self) -> list[torch.Tensor]:
        # transformers keeps the cache length of a longer run, and kernels would add in another order
        self._model._previous_max_cache_length = -1
        return [x.cpu() for x in self.run(24, output_logits=True, return_dict_in_generate=True).logits]


def same(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    """Whether the bits are the same."""
    return all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def predicted(plan: Any) -> dict[str, Any]:
    """The predictions for a step of `model.generate`, and for one in a CUDA graph, which is measured; of a cache also
    the hit rate, and the model on which that was measured."""
    found = {"predicted_ms": round(1e3 * plan.step_s, 2), "predicted_graph_ms": round(1e3 * plan.graph_s, 2)}
    hits = {"predicted_found": round(plan.found_share, 3), "hit_curve": plan.hit_curve}
    return found | (hits if plan.cached else {})


def predicted_resident(model: Any, nbytes: int, batch: int) -> dict[str, Any]:
    """The same for the plain model, from its config only."""
    with tempfile.TemporaryDirectory() as folder:
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        return predicted(weightstream.plan_model(folder, device_budget=nbytes + 2**30, batch=batch, context=256))


def prompted(streamer: Any, decoding: Decoding, equal: bool | None) -> dict[str, Any]:
    """The fields of a row for the prompts of one plan."""
    return {
        "prompt_s": rows.percentiles(decoding.prompt_seconds()),
        "equal": equal,
        "num_slots": streamer.plan.num_slots,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "plan": streamer.plan.summary(),
    }


def measured(
    streamer: Any, decoding: Decoding, equal: bool | None, plain_ms: float | None, batch: int
) -> dict[str, Any]:
    """The fields of a row for one plan."""
    before = streamer.stats().experts
    ms = rows.percentiles([1e3 * s for s in decoding.seconds()])
    plan, stats = streamer.plan, streamer.stats()  # graphs that are timed apart do not count
    graph_ms = decoding.graph_ms()
    names = ("found", "fetched", "ahead", "ahead_used")
    found, fetched, ahead, used = (getattr(stats.experts, name) - getattr(before, name) for name in names)
    return prompted(streamer, decoding, equal) | {
        "ms": ms,
        "graph_ms": graph_ms,
        "x_resident": round(plain_ms / ms["p50"], 3) if plain_ms else None,
        "tokens_per_s": round(1e3 * batch / ms["p50"], 1),
        "found": round(found / (found + fetched), 3) if found + fetched else None,
        "ahead": plan.ahead,
        "ahead_fetched": ahead,
        "ahead_used": round(used / ahead, 3) if ahead else None,
        "fetched_mib": round(plan.fetched_nbytes / 2**20, 1),
        "device_gib": round(stats.held_nbytes["device"] / 2**30, 2),
        "host_gib": round(stats.held_nbytes["host"] / 2**30, 2),
        "decoding": decoding.how,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--shares", default="coded,50,25,10")
    parser.add_argument("--codecs", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--recalls", default="", help="share of right guesses for the next layer; default: those of the routers"
    )
    parser.add_argument("--aheads", default="", help="rows to prefetch, instead of the number in the plan")
    parser.add_argument("--hits", help=f"draw ids with the hit rates of these models: {', '.join(HITS)}")
    parser.add_argument("--packed", choices=PACKED, help="the format of the experts; default: bfloat16")
    parser.add_argument("--prompt", default=str(PROMPT), help="tokens of the prompt, or of several prompts")
    parser.add_argument("--only-prompt", action="store_true", help="time no tokens")
    parser.add_argument("--ring", action="store_true", help="experts stream, without a cache")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "experts.jsonl")
    parser.add_argument("--first", action="store_true", help="time a load, to the first token")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint, which is written if it is missing")
    parser.add_argument("--tiny", action="store_true", help="with --first: matrices of 8 KiB")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    layers = args.layers or shape.num_layers
    if args.first:
        experts_first.run(args.shape, layers, args.folder, args.out, tiny=args.tiny)
        return
    plain_nbytes, expert_nbytes = nbytes_of(shape, layers)
    copied_nbytes = args.batch * shape.top_k * expert_nbytes  # by batched_mm
    total_nbytes = torch.cuda.mem_get_info()[1]
    has_plain = plain_nbytes + copied_nbytes + ROOM_NBYTES < total_nbytes * (0.6 if args.packed else 1.0)
    fits = has_plain or args.packed is not None
    model = build(shape, layers, "cuda" if fits else "cpu", args.packed)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    names = args.hits.split(",") if args.hits else []
    curves = [HITS[name] for name in names] or [curve_of(shape.num_experts, shape.top_k)]
    table = Table(model, shape, args.batch, "cuda", curves[0])
    prompts = [int(length) for length in args.prompt.split(",")]
    experts = sum(p.nbytes for module in experts_of(model) for p in module.parameters(recurse=False) if p.ndim > 2)
    common = rows.environment()
    about = {"shape": args.shape, "layers": layers, "batch": args.batch, "packed": args.packed}
    packing = f" in {args.packed}" if args.packed else ""

    def what(curve: HitCurve, length: int) -> str:
        prompt = f", prompt {length}" * (length != PROMPT)
        return f"{args.shape}{packing}, ids as {curve.name}, batch {args.batch}{prompt}"

    def write(**row: Any) -> None:
        rows.append(args.out, [row | about], common)
        print({name: value for name, value in row.items() if name != "plan"}, flush=True)

    def name_of(share: str, codec: str, recall: str, most: str) -> str:
        guess = f", recall {recall}" * bool(recall) + f", {most} ahead" * bool(most)
        return f"experts {share}, codec {codec}{', ring' * args.ring}{guess}"

    def budget_of(share: str) -> int:
        if share == "coded":
            return nbytes * 42 // 57
        if share.endswith("GiB"):
            return int(float(share.removesuffix("GiB")) * 2**30)
        return int(nbytes - experts + experts * float(share) / 100)

    @contextmanager
    def offloaded(share: str, codec: str, recall: str, most: str) -> Iterator[Any]:
        options = {"codec": codec, "batch": args.batch, "context": max(prompts) + 192}
        with (
            table.guessed(float(recall)) if recall else nullcontext(),
            weightstream.offload(model, device_budget=budget_of(share), **options) as streamer,
        ):
            if most:
                streamer.switch(replace(streamer.plan, ahead=int(most)))
            yield streamer

    if args.ring:
        Planner._cache = lambda *_: None  # type: ignore[method-assign]
    wanted: dict[str, Reference] = {}  # by the ids and the prompt
    if has_plain:
        plain = unpacked(model) if args.packed else model
        plain_table = Table(plain, shape, args.batch, "cuda", curves[0]) if args.packed else table
        reference = Decoding(plain, args.batch, prompts[0])
        predictions = predicted_resident(plain, plain_nbytes, args.batch)
        for curve in curves:
            plain_table.draw(curve)
            name, want = f"resident, plain, {what(curve, prompts[0])}", reference.logits()
            ms = rows.percentiles([1e3 * s for s in reference.seconds()])
            found = {"ms": ms, "tokens_per_s": round(1e3 * args.batch / ms["p50"], 1), "nbytes": plain_nbytes}
            found |= {"graph_ms": reference.graph_ms()}
            found |= {"prompt_s": rows.percentiles(reference.prompt_seconds()), **predictions}
            found |= {"routing": curve.name, "lru_hits": plain_table.hits}
            write(system=name, repeats=same(want, reference.logits()), prompt=prompts[0], **found)
            wanted[what(curve, prompts[0])] = Reference(name, want, ms["p50"])
        del plain, reference, plain_table
    cells = (args.shares, args.codecs, args.recalls, args.aheads)
    for cell in product(*(values.split(",") for values in cells)):
        name, began = name_of(*cell), time.perf_counter()
        with rows.guarded(write, name), offloaded(*cell) as streamer:
            load_s, predictions = round(time.perf_counter() - began, 1), predicted(streamer.plan)  # before any step ran
            profile = load_profile(torch.device("cuda"))
            torch.cuda.reset_peak_memory_stats()
            for curve, length in product(curves if streamer.plan.cached or not cell[3] else (), prompts):
                table.draw(curve)
                decoding, system = Decoding(model, args.batch, length), f"{name}, {what(curve, length)}"
                logits = decoding.logits()
                known = wanted.setdefault(what(curve, length), Reference(system, logits, None))
                equal = None if known.logits is logits else same(known.logits, logits)
                if not streamer.plan.cached and curve is not curves[0]:
                    continue  # its time does not depend on the ids
                if args.only_prompt:
                    found = prompted(streamer, decoding, equal)
                else:
                    found = measured(streamer, decoding, equal, known.plain_ms, args.batch)
                found |= {"equal_to": known.name if equal is not None else None, **predictions, "prompt": length}
                found |= {"experts_link_s": round(experts / profile.link_bytes_per_s, 3) if profile else None}
                found |= {"routing": curve.name, "lru_hits": table.hits, "load_s": load_s, "nbytes": nbytes}
                budget_gib = round((streamer.plan.budget or 0) / 2**30, 2)
                write(system=system, budget_gib=budget_gib, **found)


if __name__ == "__main__":
    main()
