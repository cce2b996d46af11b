"""A bench: measures one system after another on the same weights and inputs. A failure is a row, and the next runs.

Each row is written at once, so that an interrupted run keeps its rows. Each system gets a fresh model with this run's
weights; its locals must die with the function that measures it, or `base_gib` will show their memory.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import timing
import torch
from model import TINY, Decoder, Shape, build, wrap
from rich.console import Console
from rich.table import Table
from rows import RESULTS, append, environment, guarded, percentiles
from systems import graphed
from timing import Run

import weightstream
from weightstream import Streamer

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Inputs of one length and the resident model's outputs for them, all in host memory."""

    tokens: int
    x: tuple[torch.Tensor, ...]
    want: tuple[torch.Tensor, ...]
    resident_ms: float


class Bench:
    """Builds models, times systems and keeps the rows of one benchmark."""

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        shape: Shape | None = None,
        *,
        suffix: str = "",
        floor_steps: int = 10,
    ) -> None:
        """`suffix` distinguishes the rows of another shape in the same file."""
        self.name = name
        self.args = args
        self.suffix = suffix
        self.device = torch.device("cpu" if args.smoke else "cuda")
        self.shape = shape or (TINY if args.smoke else replace(Shape(), layers=args.layers))
        self.rows: list[dict[str, Any]] = []
        self._seed = time.time_ns() % 2**31
        self._common = environment()
        self._started = time.perf_counter()
        self._host: list[torch.Tensor] = []
        self.fresh()
        layer = build(replace(self.shape, layers=1), self.device, 0).layers[0]
        self.layer_nbytes = sum(p.nbytes for p in layer.parameters())
        self.nbytes = self.shape.layers * self.layer_nbytes
        ms = percentiles(timing.floor_ms(self.shape.layers, self.layer_nbytes, self.device, floor_steps))
        self.floor_ms = ms["p50"]
        gbps = round(self.nbytes / ms["p50"] / 1e6, 2)
        self.add("link floor", ms=ms, nbytes=self.nbytes, layer_nbytes=self.layer_nbytes, gbps=gbps)

    def model(self) -> Decoder:
        """A model with this run's weights, on the device."""
        self.fresh()
        return build(self.shape, self.device, self._seed)

    def host_model(self) -> Decoder:
        """The same in host memory."""
        if not self._host:
            self._host = [p.data.cpu() for p in self.model().parameters()]
        self.fresh()
        return wrap(self.shape, iter(self._host))

    def forget_host_model(self) -> None:
        self._host.clear()

    def fresh(self) -> None:
        """Begin with another system: later allocations and the set-up time are its own."""
        self._base_nbytes = timing.clear(self.device)
        self._rss_nbytes = psutil.Process().memory_info().rss
        self._setup_s: float | None = None
        self._setup_from = time.perf_counter()

    def guarded(self, system: str, **fields: Any) -> AbstractContextManager[None]:
        """Turn an error into a row. Nests: if a part fails, the others run."""
        return guarded(self.add, system, **fields)

    def ring_budget(self) -> int:
        """The budget for a ring of at most 0.45 GiB, 1.107 layers of the full shape, and the norms."""
        norms = (2 * self.shape.layers + 1) * 2 * self.shape.hidden
        return int(1.107 * self.layer_nbytes) + norms

    @contextmanager
    def streamed(self, **settings: Any) -> Iterator[tuple[Decoder, Streamer]]:
        """The model, offloaded with these settings only."""
        model = self.model()
        self._setup_from = time.perf_counter()
        with weightstream.offload(model, device=self.device, **{"codec": "none"} | settings) as streamer:
            timing.synchronize(self.device)
            self._setup_s = time.perf_counter() - self._setup_from
            yield model, streamer

    def resident(self, tokens: int, modes: Mapping[str, Callable[..., Any]] | None = None) -> Case:
        """The plain model: references for fresh inputs, and its own time, eager and in other `modes`."""
        model = self.model()
        x = [
            torch.randn(1, tokens, self.shape.hidden, device=self.device, dtype=torch.bfloat16).cpu() for _ in range(3)
        ]
        want = [model(value.to(self.device)).cpu() for value in x]
        case = Case(tokens=tokens, x=tuple(x), want=tuple(want), resident_ms=0.0)
        ms = self.measure("resident, eager", model, case)
        case = replace(case, resident_ms=ms)
        for mode, enter in (modes or {}).items() if self.device.type == "cuda" else ():
            with self.guarded(f"resident, {mode}", tokens=tokens), enter(model, case.x[0].to(self.device)) as run:
                self.measure(f"resident, {mode}", run, case)
        return case

    def ours(
        self,
        case: Case,
        system: str,
        *,
        graph: bool = False,
        facts: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Measure weightstream with these settings, eager and with `graph` in a CUDA graph; rows get `facts`."""
        with self.guarded(system, tokens=case.tokens):
            self.offloaded(case, system, graph=graph, facts=facts, **settings)

    def offloaded(
        self, case: Case, system: str, *, graph: bool, facts: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        """The same, but errors of the eager model are raised."""
        with self.streamed(**settings) as (model, streamer):
            fields: dict[str, Any] = {"streamer": streamer, "settings": settings, **(facts or {})}
            self.measure(f"{system}, eager", model, case, **fields)
            if graph and self.device.type == "cuda":
                name = f"{system}, CUDA graph"
                with (
                    self.guarded(name, tokens=case.tokens),
                    graphed(model, case.x[0].to(self.device), streamer) as run,
                ):
                    self.measure(name, run, case, **fields)

    def peer(self, case: Case, system: str, enter: Callable[..., Any], **settings: Any) -> None:
        """Another system over the same weights."""
        with (
            self.guarded(system, tokens=case.tokens),
            enter(self.host_model(), case.x[0], self.device, **settings) as run,
        ):
            self.measure(system, run, case, settings=settings)

    def measure(
        self,
        system: str,
        run: Run,
        case: Case,
        *,
        streamer: Streamer | None = None,
        want: tuple[torch.Tensor, ...] | None = None,
        **fields: Any,
    ) -> float:
        """Time `run`, compare its outputs with the resident model's (or with `want`), add the row; returns the p50."""
        x = case.x[0].to(self.device)
        run(x)
        timing.synchronize(self.device)
        if self._setup_s is None:
            self._setup_s = time.perf_counter() - self._setup_from
        run(x)
        num = max(5, min(self.args.steps, int(1e3 * self.args.seconds / timing.once_ms(run, x))))
        before = streamer.stats() if streamer else None
        timing.reset_peak(self.device)
        ms = percentiles(timing.steps_ms(run, x, num))
        peak = timing.peak_nbytes(self.device)
        fields |= {"steps": num, "peak_gib": round(peak / GIB, 3), "taken_nbytes": peak - self._base_nbytes}
        if streamer and before:
            fields |= self._streaming(streamer, before, num + timing.SETTLING)
            fields["beside_nbytes"] = fields["taken_nbytes"] - streamer.plan.device_nbytes
            fields["allocated_nbytes"] = timing.allocated_nbytes(self.device) - self._base_nbytes
        del x
        same = self._outputs_equal(run, case, case.want)
        if want is not None:
            fields["equal_eager"], same = same, self._outputs_equal(run, case, want)
        self.add(system, tokens=case.tokens, ms=ms, equal=same, resident_ms=case.resident_ms or ms["p50"], **fields)
        return ms["p50"]

    def _outputs_equal(self, run: Run, case: Case, want: tuple[torch.Tensor, ...]) -> bool:
        """Compare bitwise, over inputs without a pause in between, so that the ring wraps."""
        inputs = [x.to(self.device) for x in (*case.x, case.x[0])]
        got = [run(x).clone() for x in inputs]
        return all(torch.equal(y.cpu(), w) for y, w in zip(got, (*want, want[0]), strict=True))

    def _streaming(self, streamer: Streamer, before: weightstream.Stats, steps: int) -> dict[str, Any]:
        plan, stats = streamer.plan, streamer.stats()
        found = {
            "plan": plan.summary(),
            "ring_gib": round(plan.ring_nbytes / GIB, 4),
            "buffer_gib": round(plan.buffer_nbytes / GIB, 4),
            "plan_device_nbytes": plan.device_nbytes,
            "coded_share": round(plan.manifest.nbytes / plan.manifest.decoded_nbytes, 5),
            "device_gib": round(stats.held_nbytes["device"] / GIB, 3),
            "host_nbytes": stats.held_nbytes["host"],
            "host_gib": round(stats.held_nbytes["host"] / GIB, 4),
            "model_nbytes": stats.model_nbytes,
            "step_nbytes": plan.step_nbytes,
            "moved_nbytes": (stats.filled_nbytes - before.filled_nbytes) // steps,
            "unplanned_fills": stats.unplanned_fills,
            "stall_ms": round(1e3 * (stats.stall_s - before.stall_s) / steps, 2),
            "predicted_ms": round(1e3 * plan.step_s, 2),
        }
        if plan.step_nbytes:
            found["copy_ms"] = round(self.floor_ms * plan.step_nbytes / self.nbytes, 4)
        return found

    def add(self, system: str, **fields: Any) -> None:
        """Write a row and show it."""
        system += self.suffix
        row: dict[str, Any] = {"bench": self.name, "system": system, "layers": self.shape.layers} | fields
        if "ms" in fields:
            ms = fields["ms"]["p50"]
            row["x_floor"] = round(ms / self.floor_ms, 4) if self.rows else 1.0
            if fields.get("resident_ms"):
                row["x_resident"] = round(ms / fields["resident_ms"], 4)
            if fields.get("than_ms"):
                row["times_faster"] = round(fields["than_ms"] / ms, 4)
            if "copy_ms" in fields:
                row["x_copies"] = round(ms / fields["copy_ms"], 4)
                row["limit_ms"] = max(fields["copy_ms"], fields["resident_ms"])
                row["x_limit"] = round(ms / row["limit_ms"], 4)
        row |= {"setup_s": round(self._setup_s, 2) if self._setup_s else None}
        row |= {"base_gib": round(self._base_nbytes / GIB, 3)}
        row |= {"rss_growth_gib": round((psutil.Process().memory_info().rss - self._rss_nbytes) / GIB, 3)}
        self.rows.append(row)
        append(self.args.out, [row], self._common)
        shown = fields.get("error") or (f"{fields['ms']['p50']:.3f} ms" if "ms" in fields else "")
        print(
            f"{time.perf_counter() - self._started:6.1f} s  {system}, {fields.get('tokens', '')}: {shown}", flush=True
        )

    def finish(self) -> None:
        show(self.rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Show the table; a wrong output of ours, or an error of ours, is a failure."""
    Console(width=240).print(table(rows))
    ours = [row for row in rows if row["system"].startswith(("weightstream", "resident"))]
    wrong = [row["system"] for row in ours if "error" in row or not row.get("equal", True)]
    if wrong:
        raise SystemExit(f"{len(wrong)} failed or differ from the resident model: {'; '.join(wrong)}")


COLUMNS = {
    "x_floor": "x floor",
    "x_copies": "x copies",
    "x_resident": "x resident",
    "x_limit": "x limit",
    "times_faster": "times faster",
    "ring_gib": "ring GiB",
    "buffer_gib": "buffer GiB",
    "peak_gib": "peak GiB",
    "base_gib": "base GiB",
    "host_gib": "host GiB",
    "rss_growth_gib": "RSS growth",
    "stall_ms": "stall ms",
    "graphs": "graphs",
    "graph_breaks": "breaks",
    "device_s": "device s",
    "load_s": "load s",
    "first_s": "first s",
    "total_s": "total s",
    "seconds": "s",
    "read_gbps": "GB/s",
    "x_direct": "x direct",
    "x_predicted": "predicted",
    "x_refined": "refined",
    "x_bound": "x bound",
    "x_host": "x host",
    "x_arena": "x arena",
    "used_share": "used share",
    "anon_peak_growth_gib": "anon GiB",
    "equal": "equal",
    "equal_eager": "= eager",
}


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title=rows[0]["bench"], title_justify="left", box=None, pad_edge=False)
    columns = {key: heading for key, heading in COLUMNS.items() if any(row.get(key) not in (None, 0.0) for row in rows)}
    for heading in ("system", "tokens", "p20 ms", "p50 ms", "p80 ms", *columns.values()):
        found.add_column(heading, no_wrap=True)
    for row in rows:
        ms = ("failed",) if "error" in row else (f"{value:.2f}" for value in row.get("ms", {}).values())
        shown = (row.get(key, "") for key in columns)
        cells = (str(value.get("p50", "") if isinstance(value, dict) else value) for value in shown)
        found.add_row(row["system"], str(row.get("tokens", "")), *itertools.islice((*ms, "", "", ""), 3), *cells)
    return found


Group = Callable[[Bench, list[Case]], None]


def main(
    name: str,
    doc: str,
    groups: Mapping[str, Group],
    *,
    seconds: float,
    tokens: tuple[int, ...],
    modes: Mapping[str, Callable[..., Any]] | None = None,
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Parse the command line, and measure the resident model for each length, then the chosen groups."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--only", default=",".join(groups), help=f"of {', '.join(groups)}; others are ignored")
    parser.add_argument("--seconds", type=float, default=seconds, help="seconds to time a system, for at least 5 steps")
    parser.add_argument("--steps", type=int, default=100, help="most steps to time of a system")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", default=",".join(map(str, tokens)))
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, to check that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.jsonl")
    options(parser)
    args = parser.parse_args()
    args.tokens = [min(int(n), 64) if args.smoke else int(n) for n in args.tokens.split(",")]
    wanted = [group for group in groups if group in args.only.split(",")]
    if not wanted:
        return
    with torch.no_grad():
        bench = Bench(name, args)
        cases = [bench.resident(n, modes) for n in args.tokens]
        for group in wanted:
            groups[group](bench, cases)
        bench.finish()
