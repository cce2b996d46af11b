"""One token through a decoder of Llama-3.1-8B's shape, all layers offloaded: step time against the link floor.

    python benchmarks/decoder.py [--steps 20] [--layers 32] [--peers] [--out benchmarks/results/decoder.jsonl]

Every system runs the same layers in the same process, on fresh random weights, and must give the bits of the resident
model. The floor is measured in the same run: the same bytes, in copies of one layer each, back to back.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rows import RESULTS, append, percentiles
from torch import nn
from torch.nn import functional as F

import weightstream

GIB = 2**30
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 4096, 14336, 32, 8


class Block(nn.Module):
    """A pre-norm decoder layer: grouped-query attention without positions, then a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        head = HIDDEN // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, -1, HIDDEN // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, HIDDEN))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """The layers alone: no embedding, no head, no cache, so that every system does the same work."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(num_layers: int, device: str = "cuda") -> Decoder:
    """Fresh random weights, drawn on the device."""
    with torch.device("meta"):
        model = Decoder(num_layers).bfloat16()
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02 if parameter.dim() > 1 else 1)
    return model.eval()


def steps_ms(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, num: int) -> list[float]:
    """Wall time of each step by events between steps: no synchronisation inside, as in decoding."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num + 1)]
    marks[0].record()
    for mark in marks[1:]:
        model(x)
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def floor_ms(num_layers: int, layer_nbytes: int, num: int) -> list[float]:
    """The same bytes over the link: one pinned source and one target per slot, copies of one layer back to back."""
    source = [torch.empty(layer_nbytes, dtype=torch.uint8).random_(0, 256).pin_memory() for _ in range(2)]
    target = [torch.empty(layer_nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]

    def once(_: torch.Tensor) -> torch.Tensor:
        for layer in range(num_layers):
            target[layer % 2].copy_(source[layer % 2], non_blocking=True)
        return target[0]

    return steps_ms(once, target[0], num + 2)[2:]


class Bench:
    """Runs one system after another on the same input and collects their rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[dict[str, Any]] = []
        torch.manual_seed(int(time.time()))
        self.model = build(args.layers)
        self.layer_nbytes = sum(p.nbytes for p in self.model.layers[0].parameters())
        self.inputs = [torch.randn(1, 1, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        self.want = [self.model(x) for x in self.inputs]
        self.floor = percentiles(floor_ms(args.layers, self.layer_nbytes, args.steps))
        self.add("link floor", self.floor, nbytes=args.layers * self.layer_nbytes)
        self.add("resident, eager", percentiles(steps_ms(self.model, self.inputs[0], args.steps + 3)[3:]))

    def add(self, system: str, ms: dict[str, float], **extra: Any) -> None:
        ratio = round(ms["p50"] / self.floor["p50"], 4)
        self.rows.append(
            {"bench": "decoder", "system": system, "layers": self.args.layers, "ms": ms, "x_floor": ratio} | extra
        )

    def measure(self, system: str, num: int, **extra: Any) -> None:
        """Time the model as it is now, and compare its outputs with the resident model's."""
        for _ in range(3):
            self.model(self.inputs[0])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        ms = percentiles(steps_ms(self.model, self.inputs[0], num))
        peak = torch.cuda.max_memory_allocated()
        equal = all(torch.equal(self.model(x), w) for x, w in zip(self.inputs * 2, self.want * 2, strict=True))
        self.add(system, ms, peak_gib=round(peak / GIB, 3), equal=equal, **extra)

    def ours(self, system: str, **settings: Any) -> None:
        started = time.perf_counter()
        with weightstream.offload(self.model, device="cuda", **settings) as streamer:
            torch.cuda.synchronize()
            setup_s = round(time.perf_counter() - started, 2)
            before = streamer.stats()
            self.measure(system, self.args.steps, settings=settings, setup_s=setup_s, plan=streamer.plan.summary())
            stats = streamer.stats()
            steps = stats.steps - before.steps
            self.rows[-1] |= {
                "ring_layers": round(streamer.plan.ring_nbytes / self.layer_nbytes, 3),
                "device_gib": round(stats.held_nbytes["device"] / GIB, 3),
                "host_gib": round(stats.held_nbytes["host"] / GIB, 3),
                "step_nbytes": (stats.filled_nbytes - before.filled_nbytes) // steps,
                "unplanned_fills": stats.unplanned_fills,
                "stall_ms": round(1e3 * (stats.stall_s - before.stall_s) / steps, 2),
            }

    def accelerate(self) -> None:
        """The most used hook library. Last: it leaves the model on the host."""
        from accelerate import cpu_offload

        self.model.cpu()
        gc.collect()
        torch.cuda.empty_cache()
        started = time.perf_counter()
        cpu_offload(self.model, execution_device="cuda")
        self.measure("accelerate cpu_offload", 3, setup_s=round(time.perf_counter() - started, 2))


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="one token, batch 1", title_justify="left")
    for heading in ("system", "p20 ms", "p50 ms", "p80 ms", "x floor", "ring", "peak GiB", "stall ms", "equal"):
        found.add_column(heading)
    for row in rows:
        ms = row["ms"]
        rest = [str(row.get(k, "")) for k in ("ring_layers", "peak_gib", "stall_ms", "equal")]
        found.add_row(row["system"], *(f"{ms[p]:.2f}" for p in ("p20", "p50", "p80")), f"{row['x_floor']:.4f}", *rest)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--peers", action="store_true", help="also run accelerate's cpu_offload")
    parser.add_argument("--out", type=Path, default=RESULTS / "decoder.jsonl")
    args = parser.parse_args()
    bench = Bench(args)
    bench.ours("weightstream, budget of 2 layers", device_budget=2 * bench.layer_nbytes + GIB // 64)
    bench.ours("weightstream, groups 1/1, step 2", offload_group_size=1, offload_prefetch_step=2)
    bench.ours("weightstream, groups 1/1, step 1", offload_group_size=1, offload_prefetch_step=1)
    bench.ours(
        "weightstream, groups 4/2, step 2", offload_group_size=4, offload_num_in_group=2, offload_prefetch_step=2
    )
    bench.ours("weightstream, half the bytes", device_budget=bench.args.layers * bench.layer_nbytes // 2)
    if args.peers:
        bench.accelerate()
    Console(width=120).print(table(bench.rows))
    append(args.out, bench.rows)
    if not all(row.get("equal", True) for row in bench.rows):
        raise SystemExit("outputs differ from the resident model's")


if __name__ == "__main__":
    main()
