"""Tensor parallelism of transformers, its shards streamed: Llama in the shapes of 8B and 70B, under torchrun.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--only 8b,prompt,70b,405b] [--layers 63]
                                                              [--device cpu --tiny]

The checkpoint has random weights and is in the page cache. Every output is compared bit for bit with that of the same
model as transformers loads it, in the same processes. Inputs are new in every step.

ms            of a step, from its end to the next one's, on the first rank
predicted_ms  before any measured time, as predicted_token_ms: of a step in a graph
link_nbytes   that each link moves in a step; link_gbps: over ms
floor_ms      the largest of these over the rate of its link while all links copied, in the same run
host_x        host bytes of weights of all ranks, over the bytes of the model that stream
grown_x       the same for the growth of the processes' private memory
token_ms      of `weightstream.generate`, captured in a CUDA graph where its report says so
nccl_proto    NCCL_PROTO in the environment, if set
load_s        from the call of from_pretrained to the end of the first step
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import host
import huge
import rows
import timing
import torch
import transformers
from safetensors.torch import save_file
from torch import distributed

import weightstream
from weightstream.adapters.hf.ranks import join
from weightstream.measure import multi_gpu_links as links
from weightstream.measure.bench import private_backend
from weightstream.plan.plan import Plan

GIB = 2**30
SMALL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 256,
}
COMMON = {"num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 16384, "dtype": "bfloat16"}
STEPS, SETTLED, INPUTS = 12, 6, 3
PROMPT = 8192


class Ranks:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.common = rows.environment()
        self.rank = int(os.environ["RANK"])
        self.num = int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", self.rank)
        self.sharded = {"distributed_config": transformers.distributed.DistributedConfig(tp_size=self.num)}
        self.ranks = join(self.sharded["distributed_config"], weightstream.OffloadConfig())
        self.together = [0.0] * self.num
        self.texts: dict[str, Any] = {}  # of each model, as transformers loads it
        self.text: Any = None

    def write(self, **row: Any) -> None:
        if self.rank == 0:
            row = {"bench": "tensor_parallel", "gpus": self.num, "nccl_proto": os.environ.get("NCCL_PROTO")} | row
            rows.append(self.args.out, [row], self.common)
            print({key: value for key, value in row.items() if key not in ("plan", "bench")}, flush=True)

    def links(self) -> None:
        with closing(private_backend(self.device)) as backend:
            distributed.barrier()
            rate = links.rates([backend], 0.01 if self.args.tiny else 0.5)[0]
        self.together = [round(each / 1e9, 2) for each in self.ranks.gather(rate)]
        self.write(system="links", together_gbps=self.together)

    @contextmanager
    def checkpoint(self, shape: dict[str, int]) -> Iterator[Path]:
        """Files of random weights, one for each layer, which the ranks write together."""
        folder = self.args.files / "weightstream-tp"
        config = transformers.LlamaConfig(**COMMON | (TINY if self.args.tiny else shape))
        config.architectures = ["LlamaForCausalLM"]
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        named = dict(model.named_parameters())
        groups: dict[str, list[str]] = {}
        for name in named:
            groups.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)

        def write(index: int, group: str) -> None:
            random = torch.Generator(self.device).manual_seed(index)
            drawn = {}
            for name in groups[group]:
                made = torch.randn(named[name].shape, generator=random, device=self.device, dtype=torch.bfloat16)
                drawn[name] = (made.mul_(0.02) if made.dim() > 1 else made.mul_(0.1).add_(1)).cpu()
            save_file(drawn, folder / f"{group}.safetensors", metadata={"format": "pt"})

        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            config.save_pretrained(folder)
            total = sum(param.nbytes for param in named.values())
            index = {name: f"{group}.safetensors" for group, names in groups.items() for name in names}
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": {"total_size": total}, "weight_map": index})
            )
        distributed.barrier()
        mine = [(index, group) for index, group in enumerate(groups) if index % self.num == self.rank]
        with ThreadPoolExecutor(4) as pool:
            for written in [pool.submit(write, *each) for each in mine]:
                written.result()
        timing.clear(self.device)
        distributed.barrier()
        try:
            yield folder
        finally:
            distributed.barrier()
            if self.rank == 0:
                shutil.rmtree(folder)

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(5)
        vocabulary = 256 if self.args.tiny else COMMON["vocab_size"]
        return [torch.randint(vocabulary, (1, tokens), generator=random).to(self.device) for _ in range(INPUTS)]

    def timed(self, run: Callable[[torch.Tensor], torch.Tensor], inputs: list[torch.Tensor], want: Any) -> Any:
        """Milliseconds of steps, and whether all compared outputs are the wanted ones."""
        marks, is_equal = [], True
        distributed.barrier()
        for step in range(STEPS + SETTLED + 1):
            y = run(inputs[step % INPUTS])
            marks.append(timing.mark(self.device))
            if step < SETTLED or step >= STEPS + SETTLED - INPUTS:  # outside of the timed steps
                is_equal &= torch.equal(y, want[step % INPUTS])
        timing.synchronize(self.device)
        return [timing.between_ms(a, b) for a, b in itertools.pairwise(marks)][SETTLED:-INPUTS], is_equal

    @torch.no_grad()
    def resident(self, name: str, folder: Path, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of the model as transformers loads it."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **self.sharded)
        run = last(model)
        want = [run(x) for x in inputs]
        if not all(y.isfinite().all() for y in want):
            raise ValueError(f"{name}: its outputs are not finite")
        ms, is_equal = self.timed(run, inputs, want)
        generation = {} if "prompt" in name else self.generated(model)
        self.texts[name] = generation.pop("text", None)
        self.write(system=f"{name}, resident", ms=rows.percentiles(ms), equal=is_equal, **generation)
        return want

    def generated(
        self, model: Any, planned: Plan | None = None, few: int = 16, many: int = 48, rounds: int = 5
    ) -> dict[str, Any]:
        """Milliseconds of each further token of a text, how its steps ran, and what the plan predicted."""
        prompt = torch.arange(2, 34, device=self.device).view(1, -1)
        found: list[Any] = []

        def seconds(num: int) -> float:
            timing.synchronize(self.device)
            distributed.barrier()
            started = time.perf_counter()
            options = {"max_new_tokens": num, "min_new_tokens": num, "do_sample": False, "pad_token_id": 0}
            self.text = weightstream.generate(model, prompt, on_decoding=found.append, **options).tolist()
            timing.synchronize(self.device)
            return time.perf_counter() - started

        seconds(few)
        ms = [1e3 * (seconds(many) - seconds(few)) / (many - few) for _ in range(rounds)]
        seconds(many)
        generation = {"token_ms": rows.percentiles(ms), "decoding": str(found[-1]), "text": self.text}
        if planned is None:
            return generation
        predicted = 1e3 * planned.graph_s
        x_predicted = round(predicted / generation["token_ms"]["p50"], 3)
        return generation | {"predicted_token_ms": round(predicted, 2), "x_predicted_token": x_predicted}

    @torch.no_grad()
    def cell(
        self,
        system: str,
        folder: Path,
        inputs: list[torch.Tensor],
        want: Any,
        *,
        is_last: bool = False,
        **settings: Any,
    ) -> None:
        timing.clear(self.device)
        distributed.barrier()
        before, started = host.anon_nbytes(), time.perf_counter()
        model = weightstream.from_pretrained(folder, device=self.device, progress=False, **self.sharded, **settings)
        run, streamer = last(model), model.weightstream
        run(inputs[0])
        timing.synchronize(self.device)
        load_s = time.perf_counter() - started
        planned = streamer.plan
        ms, is_equal = self.timed(run, inputs, want)
        plan = streamer.plan
        held, grown = streamer.stats().held_nbytes["host"], host.anon_nbytes() - before
        generation = {} if "prompt" in system else self.generated(model, planned)
        is_equal &= generation.pop("text", None) == self.texts.get(system.partition(", ")[0] if generation else "")
        found = self.ranks.gather((plan.step_nbytes, held, grown, plan.offloaded_nbytes, is_equal, load_s))
        p50 = rows.percentiles(ms)["p50"]
        nbytes = [each[0] for each in found]
        floor = max(n / rate / 1e6 for n, rate in zip(nbytes, self.together, strict=True))
        streams = sum(each[3] for each in found)
        self.write(
            system=system,
            ms=rows.percentiles(ms),
            predicted_ms=round(1e3 * planned.step_s, 2),
            x_predicted=round(1e3 * planned.step_s / p50, 3),
            link_nbytes=nbytes,
            link_gbps=[round(n / p50 / 1e6, 1) for n in nbytes],
            floor_ms=round(floor, 2),
            x_floor=round(p50 / floor, 3) if floor else None,
            host_x=round(sum(each[1] for each in found) / streams, 3) if streams else None,
            grown_x=round(sum(each[2] for each in found) / streams, 3) if streams else None,
            equal=all(each[4] for each in found),
            load_s=round(max(each[5] for each in found), 2),
            unplanned_fills=streamer.stats().unplanned_fills,
            **generation,
            plan=plan.summary(),
        )
        del run
        if not is_last:  # removal of a large model takes long
            streamer.remove()
        del model, streamer
        gc.collect()

    def budget(self, gib: float, folder: Path, of_gib: float) -> int:
        """So many GiB of a model of `of_gib`; of a tiny one the same share."""
        nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return int(gib * nbytes / of_gib) if self.args.tiny else int(gib * GIB)

    def run_8b(self) -> None:
        with self.checkpoint(SMALL) as folder:
            inputs = self.inputs(1)
            want = self.resident("8b", folder, inputs)
            budget = self.budget(0.9, folder, 13.5)
            for codec in ("none", "auto"):
                settings = {"device_budget": budget, "codec": codec}
                self.cell(f"8b, 0.90 GiB each, codec {codec}", folder, inputs, want, **settings)

    def run_prompt(self) -> None:
        with self.checkpoint(SMALL) as folder:
            self.prompt(folder, self.budget(0.9, folder, 13.5))

    @torch.no_grad()
    def prompt(self, folder: Path, budget: int) -> None:
        """A long prompt, on all GPUs and on one of them."""
        inputs = self.inputs(64 if self.args.tiny else PROMPT)
        want = self.resident("8b, prompt", folder, inputs)
        settings: dict[str, Any] = {"device_budget": budget, "codec": "none"}
        self.cell("8b, prompt, 0.90 GiB each, codec none", folder, inputs, want, tokens=inputs[0].shape[1], **settings)
        timing.clear(self.device)
        if self.rank == 0:
            model = weightstream.from_pretrained(folder, device=self.device, progress=False, **settings)
            run, marks = last(model), []
            for step in range(STEPS + SETTLED):
                run(inputs[step % INPUTS])
                marks.append(timing.mark(self.device))
            timing.synchronize(self.device)
            ms = [timing.between_ms(a, b) for a, b in itertools.pairwise(marks)][SETTLED:]
            self.write(system="8b, prompt, one GPU, 0.90 GiB, codec none", ms=rows.percentiles(ms))
            model.weightstream.remove()
            del model, run
            gc.collect()
        distributed.barrier()

    def run_70b(self) -> None:
        with self.checkpoint(LARGE) as folder:
            inputs = self.inputs(1)
            want = self.resident("70b", folder, inputs)
            settings = {"device_budget": self.budget(80 / self.num, folder, 128.5), "codec": "auto"}
            self.cell(f"70b, {80 / self.num:.0f} GiB each, codec auto", folder, inputs, want, is_last=True, **settings)

    @torch.no_grad()
    def run_405b(self) -> None:
        """Without a checkpoint or a resident model to compare with: outputs must be the same in every pass."""
        shape = TINY | {"num_hidden_layers": 8} if self.args.tiny else huge.SHAPE
        layers = self.args.layers or shape["num_hidden_layers"]
        config = transformers.LlamaConfig(**COMMON | shape | {"num_hidden_layers": layers})
        file = self.args.files / f"weightstream-405b-{self.rank}"
        model, given = huge.drawn(config, self.sharded["distributed_config"], self.device, file)
        nbytes = sum(huge.here(param).nbytes for param in model.parameters())
        budget = int(0.4 * nbytes) if self.args.tiny else None  # None: the free memory
        settings = weightstream.OffloadConfig(
            device_budget=budget, host_budget=self.num * nbytes, context=256, codec=huge.CODEC
        )
        inputs, run = self.inputs(1), last(model)
        try:
            given = replace(given, ranks=self.ranks)
            with huge.streamed(model, given, self.device, settings, removes=self.args.tiny) as streamer:
                want = [run(x) for x in inputs]
                planned = streamer.plan
                ms, is_equal = self.timed(run, inputs, want)
                generation, plan = self.generated(model, planned, 6, 12, 9), streamer.plan
                is_equal &= all(y.isfinite().all() for y in want)
                del generation["text"]  # there is no reference
                every = self.ranks.gather((plan.step_nbytes, bool(is_equal)))
                floor = max(n / rate / 1e6 for (n, _), rate in zip(every, self.together, strict=True))
                p50 = rows.percentiles(ms)["p50"]
                self.write(
                    system=f"405b, {layers} layers share the bytes of {huge.DISTINCT}, codec {huge.CODEC}",
                    ms=rows.percentiles(ms),
                    predicted_ms=round(1e3 * planned.step_s, 2),
                    x_predicted=round(1e3 * planned.step_s / p50, 3),
                    link_nbytes=[n for n, _ in every],
                    floor_ms=round(floor, 2),
                    equal=all(same for _, same in every),
                    **generation,
                    plan=plan.summary(),
                )
            if self.args.tiny:
                self.write(
                    system="405b, decoded", equal=all(torch.equal(run(x), y) for x, y in zip(inputs, want, strict=True))
                )
        finally:
            file.unlink()


def last(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step of the model: the logits of the last token."""
    return lambda x: model(x, use_cache=False, logits_to_keep=1).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="8b,prompt,70b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, help="of 405b; with 63 of 126 two GPUs hold the bytes of four")
    parser.add_argument("--files", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "tensor_parallel.jsonl")
    ranks = Ranks(parser.parse_args())
    ranks.links()
    for name in ranks.args.only.split(","):
        getattr(ranks, f"run_{name}")()
        timing.clear(ranks.device)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
