"""Mixtures of experts: decoding with experts that are coded on the device, or in a cache of it, beside the plain model.

    python benchmarks/experts.py [--layers 48] [--shares coded,50,25,10] [--batch 1] [--uniform] [--out …]
    python benchmarks/experts.py --first [--layers 48] [--folder …] [--tiny]     see experts_first.py

A shape of Qwen3-30B-A3B with random weights, in `weightstream.generate`, which replays steps from CUDA graphs for both.
A share is what the device may take for experts, in percent of their bytes, beside the other weights; "coded" is 42/57
of all. Ids come from a table on the device, for the plain model too: of stack distances under which least recently used
rows in 12, 32 and 64 of 128 slots are found as often as others measured of the real model; or uniform. Logits of 24
tokens are compared bit by bit.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import experts_first
import rows
import torch
import transformers
from experts_first import NUM_EXPERTS, TOP_K

import weightstream
from weightstream.runtime.slots import Lru

WANTED = {12: 0.46, 32: 0.77, 64: 0.92}
DEPTHS = ((12, 0.52), (20, 0.285), (32, 0.13), (64, 0.065))  # of the stack: so many positions, drawn so often
NUM_STEPS = 512
REPEATS = 3


def drawn(num_steps: int, seed: int, *, uniform: bool) -> list[list[int]]:
    """The experts of a token, step by step, by their places in the stack of those that were used last."""
    rng, stack, found = random.Random(seed), list(range(NUM_EXPERTS)), []
    weights = [share / num for num, share in DEPTHS for _ in range(num)]
    rng.shuffle(stack)
    for _ in range(num_steps):
        places = set(rng.sample(range(NUM_EXPERTS), TOP_K) if uniform else ())
        while len(places) < TOP_K:
            places.update(rng.choices(range(NUM_EXPERTS), weights))
        used = [stack[place] for place in places]
        rng.shuffle(used)
        stack = used + [expert for place, expert in enumerate(stack) if place not in places]
        found.append(used)
    return found


def hits(steps: Sequence[Sequence[int]], num_slots: int) -> float:
    """What a plain LRU finds of these."""
    table = Lru(num_slots)
    for used in steps:
        table.resolve(used)
    return table.hits / (table.hits + table.misses)


def build(layers: int, device: str) -> Any:
    config = experts_first.config_of(layers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device=device)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model.eval()


class Router:
    """Gives ids from a table in place of a model's routers, the next row in each step."""

    def __init__(self, model: Any, batch: int, *, uniform: bool) -> None:
        gates = [layer.mlp.gate for layer in model.model.layers]
        tables = [
            [drawn(NUM_STEPS, 1000 * layer + b, uniform=uniform) for b in range(batch)] for layer in range(len(gates))
        ]
        self.hits = {num: hits(tables[0][0], num) for num in WANTED}
        self._table = torch.tensor(tables, device="cuda").transpose(1, 2).contiguous()  # layer, step, sequence, k
        self._step = torch.zeros(1, dtype=torch.long, device="cuda")
        layers = {id(gate): layer for layer, gate in enumerate(gates)}
        kind = type(gates[0])
        natural = kind.forward

        def forward(gate: Any, hidden: torch.Tensor) -> Any:  # a copy on meta, which tells shapes, routes by itself
            return self._route(layers[id(gate)], hidden) if id(gate) in layers else natural(gate, hidden)

        kind.forward = forward

    def reset(self) -> None:
        self._step.zero_()

    def _route(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table = self._table[layer]
        num_tokens, batch = hidden.shape[0], table.shape[1]
        if layer == 0 and num_tokens == batch:
            self._step.add_(1).remainder_(NUM_STEPS)
        elif layer == 0:  # a prompt; what a streamer is taught by before it does not count
            self._step.zero_()
        ids = table.index_select(0, self._step)[0]  # sequence, k
        if num_tokens != batch:  # a prompt: any will do
            ids = table.reshape(-1, TOP_K)[torch.arange(num_tokens, device=hidden.device) % NUM_STEPS]
        scores = torch.full(ids.shape, 1 / TOP_K, dtype=hidden.dtype, device=hidden.device)
        return hidden, scores, ids


class Decoding:
    def __init__(self, model: Any, router: Router, batch: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._model, self._router, self.how = model, router, ""
        self._ids = torch.randint(1000, (batch, 64), generator=generator).cuda()

    def run(self, tokens: int, **more: Any) -> Any:
        self._router.reset()
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return weightstream.generate(self._model, self._ids, on_decoding=self._tell, **options, **more)

    def _tell(self, decoding: Any) -> None:
        self.how = str(decoding)

    def seconds(self) -> list[float]:
        """Of a token, in several runs."""

        def taken(tokens: int) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.run(tokens)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        taken(8)
        return [(taken(128) - taken(32)) / 96 for _ in range(REPEATS)]

    def logits(self) -> list[torch.Tensor]:
        return [x.cpu() for x in self.run(24, output_logits=True, return_dict_in_generate=True).logits]


def same(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def foretold(plan: Any) -> dict[str, float]:
    """What a plan predicts of a step of `model.generate`, and of one in a CUDA graph, which is what is measured."""
    return {"predicted_ms": round(1e3 * plan.step_s, 2), "predicted_graph_ms": round(1e3 * plan.graph_s, 2)}


def foretold_resident(model: Any, nbytes: int, batch: int) -> dict[str, float]:
    """The same of the plain model, as its config alone tells it."""
    with tempfile.TemporaryDirectory() as folder:
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        return foretold(weightstream.plan_model(folder, device_budget=nbytes + 2**30, batch=batch, context=256))


def measured(
    streamer: Any, decoding: Decoding, want: list[torch.Tensor], plain_ms: float, batch: int
) -> dict[str, Any]:
    """What a row says of one plan."""
    torch.cuda.synchronize()
    equal = same(want, decoding.logits())
    ms = rows.percentiles([1e3 * s for s in decoding.seconds()])
    plan, stats = streamer.plan, streamer.stats()
    asked = stats.experts_found + stats.experts_fetched
    return {
        "ms": ms,
        "x_resident": round(plain_ms / ms["p50"], 3),
        "tokens_per_s": round(1e3 * batch / ms["p50"], 1),
        "equal": equal,
        "found": round(stats.experts_found / asked, 3) if asked else None,
        "num_slots": plan.num_slots,
        "fetched_mib": round(plan.fetched_nbytes / 2**20, 1),
        "device_gib": round(stats.held_nbytes["device"] / 2**30, 2),
        "plan": plan.summary(),
        "decoding": decoding.how,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--shares", default="coded,50,25,10")
    parser.add_argument("--codecs", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--uniform", action="store_true")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "experts.jsonl")
    parser.add_argument("--first", action="store_true", help="time a load, to the first token")
    parser.add_argument("--folder", type=Path, help="of the checkpoint that is loaded; written where it is not there")
    parser.add_argument("--tiny", action="store_true", help="with --first: matrices of 8 KiB")
    args = parser.parse_args()
    if args.first:
        experts_first.run(args.layers, args.folder, args.out, tiny=args.tiny)
        return
    model = build(args.layers, "cuda")
    router = Router(model, args.batch, uniform=args.uniform)
    decoding = Decoding(model, router, args.batch)
    experts = sum(p.nbytes for n, p in model.named_parameters() if "experts" in n)
    nbytes = sum(p.nbytes for p in model.parameters())
    common, routing = rows.environment(), "uniform" if args.uniform else "typical"
    about = {"layers": args.layers, "batch": args.batch, "routing": routing, "lru_hits": router.hits}

    def write(**row: Any) -> None:
        rows.append(args.out, [row | about], common)
        print({name: value for name, value in row.items() if name != "plan"}, flush=True)

    want = decoding.logits()  # before longer runs: on an H100 a batch of 8 differs from itself behind one of 128 tokens
    repeats = same(want, decoding.logits())
    plain = decoding.seconds()
    ms = rows.percentiles([1e3 * s for s in plain])
    rate = round(1e3 * args.batch / ms["p50"], 1)
    told = foretold_resident(model, nbytes, args.batch)
    write(
        system=f"resident, plain, {routing}, batch {args.batch}",
        ms=ms,
        tokens_per_s=rate,
        nbytes=nbytes,
        repeats=repeats,
        **told,
    )
    for share, codec in product(args.shares.split(","), args.codecs.split(",")):
        budget = nbytes * 42 // 57 if share == "coded" else int(nbytes - experts + experts * float(share) / 100)
        name = f"experts {share}, codec {codec}, {routing}, batch {args.batch}"
        with rows.guarded(write, name):
            began = time.perf_counter()
            with weightstream.offload(model, device_budget=budget, codec=codec, batch=args.batch, context=256) as s:
                load_s, told = round(time.perf_counter() - began, 1), foretold(s.plan)  # before any step ran
                found = measured(s, decoding, want, ms["p50"], args.batch)
                write(system=name, budget_gib=round(budget / 2**30, 2), load_s=load_s, **told, **found)


if __name__ == "__main__":
    main()
