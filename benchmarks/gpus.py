"""One model over several GPUs: links alone and together, an 8B and a 70B shape, FLUX's transformer.

    python benchmarks/gpus.py [--only links,8b,alone,flux,text,70b] [--gpus 2] [--brief] [--device cpu --tiny]

Every output is compared with the plain model's on the first GPU, bit for bit. Inputs are new in every step.

ms            of a step, from its end to the next one's
predicted_ms  before any measured time: after the first call showed the work
link_nbytes   that each link moves in a step; link_gbps: over ms
floor_ms      the largest of these over the rate of its link while all links copied, in the same run
token_ms      of `weightstream.generate`, captured in a CUDA graph where `decoding` says so; eager_token_ms: of
              `model.generate`, with the same cache
layout        striped: that of `offload`; contiguous: neighbours together, for comparison
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import checkpoint
import kinds
import model as models
import rows
import timing
import torch
import transformers

import weightstream
from weightstream.measure import multi_gpu_links as links
from weightstream.measure.bench import HostMemory, host_memory, private_backend
from weightstream.plan import multi_device
from weightstream.runtime.devices import cuda
from weightstream.store import numa
from weightstream.store.arena import Arena
from weightstream.store.mapping import FileMapping
from weightstream.store.pages import PageCache

GIB = 2**30
LARGE = models.Shape(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8)
STEPS, SETTLED, INPUTS = 12, 6, 3
FEW, MANY, ROUNDS = 8, 32, 4  # tokens: the difference of two texts gives the time of a token
LINKS_S = 0.5
Step = Callable[[int, torch.device], torch.Tensor]  # the number of the inputs, and their device


class Gpus:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.common = rows.environment()
        self.devices = [
            torch.device(args.device, k) if args.device == "cuda" else torch.device("cpu") for k in range(args.gpus)
        ]
        self.home = self.devices[0]
        self.together: list[float] = []  # GB/s of each link while all copy
        self.random = torch.Generator(self.home).manual_seed(11)

    def write(self, **row: Any) -> None:
        row = {"bench": "gpus", "gpus": len(self.devices)} | row
        rows.append(self.args.out, [row], self.common)
        print({key: value for key, value in row.items() if key not in ("plan", "bench")}, flush=True)

    # -- links -------------------------------------------------------------------------------------------------------

    def links(self) -> None:
        """Copies to each GPU by itself, and to the first 2, 4 and so on at once, from each kind of host memory.

        Also hops from one GPU to another.
        """
        seconds = 0.01 if self.args.tiny else LINKS_S
        is_cuda, num = self.home.type == "cuda", len(self.devices)
        counts = sorted({n for n in (2, 4, 8) if n < num} | {num})
        with ExitStack() as stack:
            backends = [stack.enter_context(closing(private_backend(device))) for device in self.devices]
            about = {"nodes": [numa.node_of(cuda.facts(d).pci) if is_cuda else None for d in self.devices]}
            for kind, memory in memories(self.args.files):
                about |= {"memory": kind, "alone_gbps": [gbps(links.rates([b], seconds, memory)[0]) for b in backends]}
                for n in counts:
                    rates = [gbps(rate) for rate in links.rates(backends[:n], seconds, memory)]
                    system = "links" if (kind, n) == ("pinned", num) else f"links, {kind}, {n} at once"
                    self.write(system=system, together_gbps=rates, sum_gbps=round(sum(rates), 1), **about)
                self.together = self.together or rates
            if self.home.type == "cuda" and len(self.devices) > 1:
                hops = [1e3 * taken_s for taken_s in links.hops_s(backends[0], self.devices[1], seconds)]
                there = torch.cuda.can_device_access_peer(0, 1)
                self.write(system="hop", peers=there, hop_ms=rows.percentiles(hops))

    # -- models ------------------------------------------------------------------------------------------------------

    def decoder(self, shape: models.Shape, spread: bool = False) -> tuple[Any, Step]:
        made = models.empty(shape)
        for index, layer in enumerate(made.layers):
            device = self.devices[index * len(self.devices) // len(made.layers) if spread else 0]
            models.draw(layer, device, seed=index)
        models.draw(made.norm, self.home, seed=3)
        inputs = [torch.randn(1, 1, shape.hidden, device=self.home, dtype=torch.bfloat16) for _ in range(INPUTS)]
        return made, lambda k, device: made(inputs[k % INPUTS].to(device))

    def flux(self) -> tuple[Any, Step]:
        kind = kinds.KINDS["flux"]
        made, draw = kind.made(self.args.tiny, self.home, self.random), kinds.draw_with(self.random)
        inputs = [kind.inputs(made, 1, draw) for _ in range(INPUTS)]
        return made, lambda k, _: made(**inputs[k % INPUTS])[0]

    @torch.no_grad()
    def measure(self, name: str, made: Any, run: Step, cells: list[dict[str, Any]]) -> None:
        """Measure the resident model, and each cell: its layout, budgets of the GPUs, and settings."""
        with following(made):
            want = [run(k, self.home) for k in range(INPUTS)]
            if not all(torch.equal(run(k, self.home), want[k]) for k in range(INPUTS)) or not all(
                y.isfinite().all() for y in want
            ):
                raise ValueError(f"{name}: its outputs are not finite, or not the same from call to call")
            ms, _ = self.timed(run, want)
        self.write(system=f"{name}, resident", ms=rows.percentiles(ms))
        with ThreadPoolExecutor() as pool:  # one model has 137 GB
            list(pool.map(lambda module: module.to("cpu"), [m for m in made.modules() if not list(m.children())]))
        made.to("cpu")
        timing.clear(self.home)
        for cell in cells:
            if self.args.brief and (len(cell["budgets"]) == 1 or cell["layout"] == "contiguous"):
                continue
            settings = {key: value for key, value in cell.items() if key not in ("layout", "budgets")}
            system = f"{name}, {cell['layout']}, {'+'.join(f'{b / GIB:.2f}' for b in cell['budgets'].values())} GiB, "
            system += ", ".join(f"{key} {value}" for key, value in settings.items())
            with rows.guarded(self.write, system), laid_out(cell["layout"]):
                self.cell(system, made, run, want, cell["budgets"], settings)
            gc.collect()
            timing.clear(self.home)

    def cell(
        self, system: str, made: Any, run: Step, want: list[torch.Tensor], budgets: dict[int, int], settings: Any
    ) -> None:
        (index, budget), *others = budgets.items()
        where = (
            {"device_budget": budgets} if others else {"device": f"{self.home.type}:{index}", "device_budget": budget}
        )
        if self.home.type == "cpu":
            where["device"] = "cpu"
        inputs = want if index == 0 or self.home.type == "cpu" else [y.to(f"cuda:{index}") for y in want]
        with weightstream.offload(made, **where, **settings) as streamer:
            run(0, inputs[0].device)
            planned = streamer.plan
            predicted_ms = 1e3 * planned.step_s
            ms, is_equal = self.timed(run, inputs)
            now = streamer.plan
            plans = list(now.plans.values()) if others else [now]
            nbytes = [plan.step_nbytes for plan in plans]
            p50 = rows.percentiles(ms)["p50"]
            rates = self.together if others else self.together[index : index + 1]
            floors = [n / rate / 1e6 for n, rate in zip(nbytes, rates, strict=False)]
            floor = {"floor_ms": round(max(floors), 2), "x_floor": round(p50 / max(floors), 3)} if any(floors) else {}
            self.write(
                system=system,
                ms=rows.percentiles(ms),
                predicted_ms=round(predicted_ms, 2),
                x_predicted=round(predicted_ms / p50, 3),
                link_nbytes=nbytes,
                link_gbps=[round(n / p50 / 1e6, 1) for n in nbytes],
                **floor,
                equal=is_equal,
                unplanned_fills=streamer.stats().unplanned_fills,
                moved=[
                    a.summary() != b.summary()
                    for a, b in zip(plans, getattr(planned, "plans", {0: planned}).values(), strict=True)
                ],
                plan=now.summary(),
            )
        made.to("cpu")

    def timed(self, run: Step, want: list[torch.Tensor]) -> tuple[list[float], bool]:
        device, is_equal, marks = want[0].device, True, []
        for step in range(STEPS + SETTLED + 1):
            y = run(step, device)
            marks.append(timing.mark(device))
            if step < SETTLED or step >= STEPS + SETTLED - INPUTS:  # outside of the timed steps
                is_equal &= torch.equal(y.to(device), want[step % INPUTS])
        timing.synchronize(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return [timing.between_ms(a, b) for a, b in itertools.pairwise(marks)][SETTLED:-INPUTS], is_equal

    # -- cells -------------------------------------------------------------------------------------------------------

    def share(self, gib: float, made: Any, of_gib: float) -> int:
        """So many GiB of a model of `of_gib`; of a tiny one the same share."""
        return self.share_of(sum(p.nbytes for p in made.parameters()), gib, of_gib)

    def run_8b(self) -> None:
        made, run = self.decoder(models.TINY if self.args.tiny else models.Shape())
        ring = self.share(0.9, made, 13.0)
        each = dict.fromkeys(range(len(self.devices)), ring)
        cells = [{"layout": "striped", "budgets": {0: ring}, "codec": codec} for codec in ("none", "auto")]
        cells += [{"layout": "striped", "budgets": each, "codec": codec} for codec in ("none", "auto")]
        cells += [{"layout": "contiguous", "budgets": each, "codec": "none"}]
        half = dict.fromkeys(each, self.share(5.0, made, 13.0))
        whole = dict.fromkeys(each, self.share(10.0, made, 13.0))
        cells += [{"layout": "striped", "budgets": b, "codec": "none"} for b in (half, whole)]
        self.measure("8b", made, run, cells)

    def run_alone(self) -> None:
        """The last GPU alone, which is not the current one."""
        made, run = self.decoder(models.TINY if self.args.tiny else models.Shape(layers=8))
        index = len(self.devices) - 1
        budget = self.share(0.9, made, 3.25)
        cells = [{"layout": "alone", "budgets": {index: budget}, "codec": codec} for codec in ("none", "auto")]
        self.measure("8 layers of 8b", made, run, cells)

    def run_flux(self) -> None:
        made, run = self.flux()
        torch.backends.cuda.enable_cudnn_sdp(False)
        each = dict.fromkeys(range(len(self.devices)), self.share(4.0, made, 22.2))
        cells = [{"layout": "striped", "budgets": {0: each[0]}, "codec": codec} for codec in ("none", "auto")]
        cells += [{"layout": "striped", "budgets": each, "codec": codec} for codec in ("none", "auto")]
        self.measure("flux", made, run, cells)

    def run_text(self) -> None:
        """Tokens of a Llama in the shape of 8B: steps launched one by one, and from a graph."""
        folder = self.args.files / "weightstream-gpus"
        checkpoint.make(folder, checkpoint.TINY if self.args.tiny else checkpoint.LLAMA)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(self.home)
            want = self.text("text, resident on one", model)
            del model
            share = partial(self.share_of, checkpoint.weights_nbytes(folder))
            least = {0: share(2.9), **dict.fromkeys(range(1, len(self.devices)), share(0.9))}
            cells = [(dict.fromkeys(least, share(9.0)), "none"), (least, "auto"), (least, "none")]
            for budgets, codec in cells:
                timing.clear(self.home)
                system = f"text, {'+'.join(f'{b / GIB:.2f}' for b in budgets.values())} GiB, codec {codec}"
                device = {"device": "cpu"} if self.home.type == "cpu" else {}
                with rows.guarded(self.write, system):
                    model = weightstream.from_pretrained(
                        folder, device_budget=budgets, codec=codec, progress=False, **device
                    )
                    self.text(system, model, want)
                    model.weightstream.remove()
                    del model
                gc.collect()
        finally:
            shutil.rmtree(folder)

    def share_of(self, nbytes: int, gib: float, of_gib: float = 14.96) -> int:
        return int(gib * nbytes / of_gib) if self.args.tiny else int(gib * GIB)

    def text(self, system: str, model: Any, want: Any = None) -> Any:
        """Time each further token, launched one by one and from a graph, in turns; returns the tokens."""
        ids = torch.arange(2, 34, device=self.home).view(1, -1)
        reports: list[Any] = []
        planned = getattr(model, "weightstream", None) and model.weightstream.plan
        static = {"cache_implementation": "static", "disable_compile": True}
        graph = partial(weightstream.generate, model, on_decoding=reports.append)
        ways = {"eager": partial(model.generate, **static), "graph": graph}

        def seconds(way: str, num: int) -> float:
            nonlocal found
            started = time.perf_counter()
            tokens = ways[way](ids, max_new_tokens=num, min_new_tokens=num, do_sample=False, pad_token_id=0)
            timing.synchronize(self.home)
            taken = time.perf_counter() - started
            if num == MANY:
                found = tokens if found is None else found
                same.append(torch.equal(found, tokens))
            return taken

        found, same = want, list[bool]()
        for way in ways:
            seconds(way, FEW)
        ms: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way in ways:
                ms[way].append(1e3 * (seconds(way, MANY) - seconds(way, FEW)) / (MANY - FEW))
        row = {"token_ms": rows.percentiles(ms["graph"]), "eager_token_ms": rows.percentiles(ms["eager"])}
        row |= {"decoding": str(reports[-1]), "equal": all(same)}
        if planned is not None:
            predicted = {"token": 1e3 * planned.graph_s, "eager_token": 1e3 * planned.step_s}
            row |= {f"predicted_{name}_ms": round(value, 2) for name, value in predicted.items()}
            row |= {f"x_predicted_{name}": round(v / row[f"{name}_ms"]["p50"], 3) for name, v in predicted.items()}
            row |= {"link_nbytes": [plan.step_nbytes for plan in planned.every], "plan": planned.summary()}
        self.write(system=system, **row)
        return found

    def run_70b(self) -> None:
        """The plain model is on all GPUs, neighbours together, as it does not fit one."""
        made, run = self.decoder(models.TINY if self.args.tiny else LARGE, spread=True)
        each = dict.fromkeys(range(len(self.devices)), self.share(80.0 / len(self.devices) - 1 / 8, made, 127.5))
        self.measure("70b", made, run, [{"layout": "striped", "budgets": each, "codec": "auto"}])


def memories(folder: Path) -> Iterator[tuple[str, HostMemory]]:
    """Kinds of host memory that copies start from. Pinned memory is on the GPU's NUMA node; on a host with several
    nodes also on each node for all GPUs."""

    block = os.urandom(1 << 20)

    @contextmanager
    def pages(device: torch.device, nbytes: int) -> Iterator[torch.Tensor]:
        with NamedTemporaryFile(dir=folder) as file:
            there = cuda.node(device) if device.type == "cuda" else None
            with nullcontext() if there is None else there.first():
                for _ in range(-(-nbytes // len(block))):
                    file.write(block)
                file.flush()
            mapping = FileMapping(Path(file.name))
            pin = partial(cuda.pin_in_place, device=device, read_only=True)
            is_cuda = device.type == "cuda"
            with closing(PageCache(pin, cuda.unregister, there) if is_cuda else PageCache()) as cache:
                (held,) = cache.hold([(mapping, 0, nbytes)], lambda error: print(error, flush=True))
                pinned = held.source(0, nbytes)
                yield mapping.populated(0, nbytes) if pinned is None else pinned

    @contextmanager
    def at(index: int, device: torch.device, nbytes: int) -> Iterator[torch.Tensor]:
        node = numa.Node(index, numa.cores_of(index))
        pins = (partial(cuda.pin_in_place, device=device), cuda.unregister) if device.type == "cuda" else (None, None)
        with closing(Arena(*pins, node)) as arena:
            memory = arena.take(nbytes).fill_(1)
            arena.pin(memory)
            yield memory

    yield "pinned", host_memory
    yield "pages of the page cache", pages
    nodes = sorted(int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    for index in nodes if len(nodes) > 1 else ():
        yield f"pinned at node {index}", partial(at, index)


def gbps(bytes_per_s: float) -> float:
    return round(bytes_per_s / 1e9, 2)


@contextmanager
def following(made: Any) -> Iterator[None]:
    """Inside, arguments of layers move to the device of their weights."""

    def move(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(arg.to(next(layer.parameters()).device) for arg in args)

    layers = [*made.layers, made.norm] if isinstance(made, models.Decoder) else []
    hooks = [layer.register_forward_pre_hook(move) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def laid_out(layout: str) -> Iterator[None]:
    """Inside, blocks go to devices in this layout."""
    if layout != "contiguous":
        yield
        return

    def whose(nbytes: Any, budgets: Any, rates: Any, beside: int = 0) -> list[list[int]]:
        return [[k * len(budgets) // len(nbytes) for k in range(len(nbytes))]]

    with patch.object(multi_device, "whose", whose):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="links,8b,alone,flux,text,70b")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--brief", action="store_true", help="without one GPU and without neighbours together")
    parser.add_argument("--files", type=Path, default=Path("/dev/shm"), help="folder for the file of the links")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "gpus.jsonl")
    gpus = Gpus(parser.parse_args())
    for name in gpus.args.only.split(","):
        with rows.guarded(gpus.write, name):
            gpus.links() if name == "links" else getattr(gpus, f"run_{name}")()
        gc.collect()
        timing.clear(gpus.home)


if __name__ == "__main__":
    main()
