"""Several tokens a pass of Llama's shapes through `weightstream.generate`, with a scripted draft.

    python benchmarks/speculation.py [--parts widths,auto,tau,split,resident] [--budget 6GiB] [--limit SECONDS]
    python benchmarks/speculation.py --shape 70b --budget 40GiB [--limit SECONDS]
    python benchmarks/speculation.py --smoke --folder FOLDER

A scripted draft proposes the text that is known from a plain run, or from passes of its width where rows have other
bits, and is wrong as often as it is told to be, so that random weights show any acceptance. It keeps the device busy
for `draft_ms` a token, as a model would. Rows go to results/speculation.jsonl:

ms            from the start of a pass to the start of the next one, by the device's clock, over the replayed passes of
              one text; the first row is plain decoding
pass_ms       of this, from the start of a pass to its end
round_ms      the rest, without the draft: from the end of a pass to the start of the next one
predicted_ms  of a pass in a graph, by the plan
x_plain       ms over that of plain decoding; tokens_x_plain: tokens per second over those of plain decoding
equal         text, and scores where they are compared, have the bits of the plain run; equal_resident: of the resident
              model in passes of the same width; equal_drafted: the text is the one that the draft proposes

Rows with `speculate` are whole texts with a pace. The plain text is always measured, as the draft proposes it.

8b: loaded from a checkpoint. 70b: 141 GB in bfloat16 do not fit into host memory, so weights are drawn on the GPU, and
compressed there. 8 GiB of its budget stay free for a draft, of which a token takes 9 ms. A run measures one budget and
ends without `remove()`, which would bring all weights back to the GPU. It takes about two minutes at 40 GiB.

cuDNN attention is off unless `--cudnn` is given, as in cells.py: with it the resident model itself can give different
bits from call to call. Rows have `cudnn_attention`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint
import model as models
import numpy as np
import rows
import timing
import torch

import weightstream
from weightstream.adapters.steps.row_split import plans
from weightstream.adapters.steps.row_trial import RowTrial

PROMPT, SHORT, LONG = 61, 12, 40
WIDTHS = (8, 16, 4, 64, 256)
COMPARED = (4, 8, 16)
WRONG = 0.0
SETTLING = 3  # forwards of a text before the first replay: the prompt, a watched pass and a captured one
PARTS = ("widths", "auto", "tau", "split", "resident")
GIB = 2**30
BESIDE_GIB = 8  # of the budget of the 70B shape: for a draft with its cache
HOST_LAYERS = (0, 24)  # if the whole model leaves no room to compress it on the GPU, its last layers start on the host
LARGE = checkpoint.LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


class Drafted(NamedTuple):
    """A scripted draft: passes of `width`, of which `tau` tokens are kept on average, and its time for a token."""

    width: int
    tau: float
    draft_ms: float
    num_texts: int = 1


class Shape(NamedTuple):
    budget: str
    num_tokens: int  # of a text
    parts: tuple[str, ...]
    drafts: tuple[Drafted, ...]


SHAPES = {
    "8b": Shape("6GiB", 256, PARTS, (Drafted(4, 2.5, 1.0), Drafted(8, 6.0, 1.0))),
    "70b": Shape("40GiB", 36, ("tau",), (Drafted(10, 8.0, 9.0, num_texts=2),)),
}


class ScriptedDraft:
    """A candidate generator that knows the text. Passes keep `tau` tokens on average, nearly the same number each; or
    each token is wrong with chance 1 - `acceptance`."""

    requires_model_outputs = False

    def __init__(self, text: list[int], acceptance: float, num: int, draft_cycles: int, tau: float | None) -> None:
        self._text = text
        self._acceptance = acceptance
        self._tau = tau
        self._num = num
        self._cycles = draft_cycles  # of the device's clock, for each token
        self._chance = torch.Generator().manual_seed(3)
        self.lengths: list[int] = []  # of the text before each pass

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        self.lengths.append(input_ids.shape[1])
        begin = input_ids.shape[1] - PROMPT
        known = self._text[begin : begin + self._num]
        if input_ids.is_cuda and self._cycles:
            torch.cuda._sleep(self._cycles * self._num)
        drafted = [token if ok else (token + 1) % 1000 for token, ok in zip(known, self._right(known), strict=True)]
        return torch.cat([input_ids, input_ids.new_tensor([drafted])], 1), None

    def _right(self, known: list[int]) -> list[bool]:
        if self._tau is None:
            right: list[bool] = (torch.rand(len(known), generator=self._chance) < self._acceptance).tolist()
            return right
        num = len(self.lengths)
        num_kept = int((num + 1) * self._tau) - int(num * self._tau)
        return [index < num_kept - 1 for index in range(len(known))]

    def update_candidate_strategy(self, *_: Any) -> None:
        pass


@contextmanager
def scripted(model: Any, draft: ScriptedDraft) -> Iterator[None]:
    model.__dict__["_get_candidate_generator"] = lambda *_, **__: draft
    try:
        yield
    finally:
        del model.__dict__["_get_candidate_generator"]


class Pass(NamedTuple):
    begin: Any
    end: Any


@contextmanager
def timed(model: Any, device: torch.device) -> Iterator[list[Pass]]:
    """Inside, each forward of `generate` is marked. A replay calls no forward of the model, but `generate` calls the
    model, so its class is changed."""
    kind, passes = type(model), list[Pass]()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = timing.mark(device)
        output = torch.nn.Module.__call__(self, *args, **kwargs)
        passes.append(Pass(begin, timing.mark(device)))
        return output

    kind.__call__ = call
    try:
        yield passes
    finally:
        del kind.__call__


class Run(NamedTuple):
    seconds: float
    report: Any
    output: Any
    passes: list[Pass]
    lengths: list[int]

    def times(self) -> Times:
        rounds = list(itertools.pairwise(self.passes[SETTLING:]))
        return Times(
            [timing.between_ms(one.begin, other.begin) for one, other in rounds],
            [timing.between_ms(one.begin, one.end) for one, _ in rounds],
            [timing.between_ms(one.end, other.begin) for one, other in rounds],
            self.lengths[-1] - self.lengths[SETTLING] if len(self.lengths) == len(self.passes) else len(rounds),
        )


class Times(NamedTuple):
    """Milliseconds of the replayed rounds of one text, and the tokens that they added."""

    rounds: list[float]
    passes: list[float]
    between: list[float]
    num_tokens: int

    def __add__(self, other: Times) -> Times:  # type: ignore[override]
        return Times(*(one + another for one, another in zip(self, other, strict=True)))

    def row(self, draft_ms: float = 0.0) -> dict[str, Any]:
        """`draft_ms`: of the draft of a round."""
        return {
            "ms": rows.percentiles(self.rounds),
            "pass_ms": float(np.median(self.passes)),
            "round_ms": float(np.median(self.between)) - draft_ms,
            "num_rounds": len(self.rounds),
        }

    @property
    def round_s(self) -> float:
        return float(np.median(self.rounds)) / 1e3

    @property
    def tokens_s(self) -> float:
        return 1e3 * self.num_tokens / sum(self.rounds)


class Bench:
    def __init__(self, model: Any, ids: torch.Tensor, num_tokens: int, write: Any) -> None:
        self.model, self.ids, self.num_tokens, self.write = model, ids, num_tokens, write
        self.text: list[int] = []
        self.scores: dict[int, torch.Tensor] = {}

    @classmethod
    def like(cls, other: Bench, write: Any) -> Bench:
        """The same model and text, with rows of another system."""
        bench = cls(other.model, other.ids, other.num_tokens, write)
        bench.text = other.text
        return bench

    def run(
        self,
        num: int,
        width: int = 1,
        acceptance: float = WRONG,
        draft: Drafted | None = None,
        known: list[int] | None = None,
        **more: Any,
    ) -> Run:
        """Generate `num` tokens. The draft proposes the `known` text; None: that of the plain run."""
        found: list[Any] = []
        options = {"max_new_tokens": num, "do_sample": False, "pad_token_id": 0, "on_decoding": found.append} | more
        if width > 1:
            if num < self.num_tokens:  # the cache is as long as that of the plain run, which may decide the kernels
                options |= {"max_new_tokens": self.num_tokens, "stopping_criteria": [partial(_is_long, PROMPT + num)]}
            options["prompt_lookup_num_tokens"] = width - 1
        cycles = 0 if draft is None or not self.ids.is_cuda else _cycles(draft.draft_ms)
        script = ScriptedDraft(known or self.text, acceptance, width - 1, cycles, None if draft is None else draft.tau)
        self._wait()
        started = time.perf_counter()
        with scripted(self.model, script), timed(self.model, self.ids.device) as passes:
            output = weightstream.generate(self.model, self.ids, **options)
        self._wait()
        return Run(time.perf_counter() - started, found[0], output, passes, script.lengths)

    def plain(self) -> float:
        """Seconds of a step of plain decoding."""
        self.run(4)  # the order of the units is learned
        found = self.run(self.num_tokens)
        self.text, self.total_s = found.output[0, PROMPT:].tolist(), found.seconds
        times = found.times()
        self.write(
            width=1,
            **times.row(),
            predicted_ms=self._predicted_ms(1),
            tokens_s=times.tokens_s,
            total_s=found.seconds,
            decoding=str(found.report),
        )
        return times.round_s

    def width(self, width: int, plain_s: float, **more: Any) -> None:
        """Passes of this width in which nothing is accepted."""
        before = self._unplanned()
        keeps = width in COMPARED
        self.run(SHORT, width, **more)  # rows are tried out in the first passes
        found = self.run(LONG, width, **more)
        if keeps:
            output = self.run(SHORT, width, **more, return_dict_in_generate=True, output_scores=True).output
            self.scores[width] = torch.cat(list(output.scores)[:SHORT]).cpu()
        times = found.times()
        self.write(
            **times.row(),
            predicted_ms=self._predicted_ms(width),
            x_plain=times.round_s / plain_s,
            equal=self.starts_as(found.output),
            unplanned=self._unplanned() - before,
            **_said(found.report),
        )

    def whole(self, width: int) -> None:
        """A whole text in which nothing is accepted."""
        found = self.run(self.num_tokens, width)
        x_plain, equal = found.seconds / self.total_s, self.starts_as(found.output)
        self.write(tau=1, total_s=found.seconds, x_plain=x_plain, equal=equal, **_said(found.report))

    def accepted(self, draft: Drafted, plain_s: float) -> None:
        """A draft with so many tokens per pass on average."""
        before, width, known = self._unplanned(), draft.width, self.text
        tried = self.run(2 * SHORT, width, draft=draft)  # rows are tried out in the first passes
        if not self.starts_as(tried.output):  # the rows of a pass have other bits: the draft has to know their text
            known = self.run(self.num_tokens, width).output[0, PROMPT:].tolist()
        texts = [self.run(self.num_tokens, width, draft=draft, known=known) for _ in range(draft.num_texts)]
        first, *others = (text.times() for text in texts)
        times = sum(others, start=first)
        self.write(
            tau=draft.tau,
            **times.row(draft.draft_ms * (width - 1) if self.ids.is_cuda else 0.0),
            draft_ms=draft.draft_ms,
            predicted_ms=self._predicted_ms(width),
            x_plain=times.round_s / plain_s,
            tokens_s=times.tokens_s,
            tokens_x_plain=times.tokens_s * plain_s,
            equal=all(self.starts_as(text.output) for text in texts),
            equal_drafted=all(text.output[0, PROMPT:].tolist() == known for text in texts),
            unplanned=self._unplanned() - before,
            **_said(texts[-1].report),
        )

    def paced(self, acceptance: float) -> None:
        """A whole text with `speculate="auto"`, in passes of the width that the plan chooses."""
        before = self._unplanned()
        self.run(SHORT, 16, acceptance, speculate="auto")  # the plan of passes is made
        found = self.run(self.num_tokens, 16, acceptance, speculate="auto")
        self.write(
            speculate="auto",
            acceptance=acceptance,
            total_s=found.seconds,
            x_plain=found.seconds / self.total_s,
            equal=self.starts_as(found.output),
            unplanned=self._unplanned() - before,
            **_said(found.report),
        )

    def starts_as(self, output: Any) -> bool:
        """Whether the text is that of the plain run, as far as it goes."""
        tokens = output[0, PROMPT:].tolist()
        return bool(tokens == self.text[: len(tokens)])

    def _unplanned(self) -> int:
        streamer = getattr(self.model, "weightstream", None)
        return 0 if streamer is None else int(streamer.stats().unplanned_fills)

    def _predicted_ms(self, num: int) -> float | None:
        """Of a pass of so many tokens in a graph; None: there is no plan."""
        streamer = getattr(self.model, "weightstream", None)
        seconds = () if streamer is None else streamer.pass_seconds()
        return next((1e3 * each.graph_s for each in seconds if each.tokens == num), None)

    def _wait(self) -> None:
        timing.synchronize(self.ids.device)


def _is_long(num: int, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    return torch.full((len(ids),), ids.shape[1] >= num, device=ids.device)


def _said(report: Any) -> dict[str, Any]:
    found = report.speculation
    names = ("width", "passes", "singles", "tokens_per_pass", "bits", "rows") if found is not None else ()
    return {name: getattr(found, name) for name in names} | {"replays": report.replays, "reason": report.reason}


def _cycles(ms: float) -> int:
    """Cycles of the device's clock in so many milliseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    torch.cuda.synchronize()
    return int(50_000_000 / begin.elapsed_time(end) * ms)


def split(bench: Bench, plain_s: float) -> None:
    """Operators row by row, as on a device where all operators that add have other bits for rows at once."""
    plain = RowTrial._probe

    def never_equal(trial: RowTrial, probe: Any, wide: Any, *_: Any) -> str:
        return f"{wide} differs"

    RowTrial._probe = never_equal  # type: ignore[method-assign]
    plans(bench.model).clear()
    try:
        for width in (4, 8):
            bench.width(width, plain_s, bits="token")
    finally:
        RowTrial._probe = plain  # type: ignore[method-assign]
        plans(bench.model).clear()


def drawn(settings: dict[str, Any], device: torch.device, host_layers: int) -> Any:
    """A model with random weights, made on the device; its last layers are moved to the host."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    no_stop = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(**settings, **no_stop, tie_word_embeddings=False, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers = list(model.model.layers)
    for seed, part in enumerate([*layers, model.model.embed_tokens, model.model.norm, model.lm_head]):
        models.draw(part, device, seed)
        if len(layers) - host_layers <= seed < len(layers):
            part.to("cpu")
    with device:  # its buffers are computed
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval().requires_grad_(False)


def offloaded(settings: dict[str, Any], device: torch.device, budget: int) -> Any:
    """Such a model, compressed; it may be larger than host memory."""
    codec = "auto" if device.type == "cuda" else "compressed"
    for host_layers in HOST_LAYERS:
        model = drawn(settings, device, host_layers)
        try:
            weightstream.offload(model, device=device, device_budget=budget, codec=codec)
        except torch.OutOfMemoryError as error:
            print(f"out of memory, {host_layers} layers started on the host: {str(error)[:300]}", flush=True)
        else:
            return model
        del model
        timing.clear(device)
    raise RuntimeError("out of device memory, however many layers start on the host")


class Limit:
    """The parts to run, until a time has passed."""

    def __init__(self, parts: tuple[str, ...], seconds: float) -> None:
        self._parts, self._end_s = parts, time.perf_counter() + seconds

    def allows(self, part: str) -> bool:
        return part in self._parts and time.perf_counter() < self._end_s


def measure(bench: Bench, shape: Shape, limit: Limit) -> float:
    """Rows of an offloaded model. Returns the seconds of a plain step."""
    plain_s = bench.plain()
    for width in WIDTHS:
        if limit.allows("widths"):
            bench.width(width, plain_s)
    if limit.allows("widths"):
        bench.whole(8)
    for acceptance in (0.0, 0.6):
        if limit.allows("auto"):
            bench.paced(acceptance)
    for draft in shape.drafts:
        if limit.allows("tau"):
            bench.accepted(draft, plain_s)
    return plain_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/weightstream-8b"), help="of the 8B checkpoint")
    parser.add_argument("--budget", help="of device memory; by default 6GiB, and 40GiB for 70b with 8 GiB for a draft")
    parser.add_argument("--parts", help=f"of {','.join(PARTS)}; plain: none of them. By default all, and tau for 70b")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no part begins")
    parser.add_argument("--cudnn", action="store_true", help="leave cuDNN attention on")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "speculation.jsonl")
    args = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(args.cudnn)
    common = rows.environment() | {"cudnn_attention": args.cudnn}
    shape, device = SHAPES[args.shape], torch.device("cpu" if args.smoke else "cuda")
    limit = Limit(shape.parts if args.parts is None else tuple(args.parts.split(",")), args.limit)
    budget = args.budget or shape.budget
    begun = time.perf_counter()

    def write(system: str, **fields: Any) -> None:
        found = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
        print(f"{time.perf_counter() - begun:6.1f} s ", {"system": system, **found}, flush=True)
        rows.append(args.out, [{"system": system, **found}], common)

    ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(5)).to(device)
    settings = checkpoint.TINY if args.smoke else LARGE if args.shape == "70b" else checkpoint.LLAMA
    if args.shape == "70b":
        beside_nbytes = 0 if args.smoke else BESIDE_GIB * GIB
        model = offloaded(
            settings, device, weightstream.OffloadConfig(device_budget=budget).device_budget - beside_nbytes
        )
        facts = {"setup_s": time.perf_counter() - begun, "plan": model.weightstream.plan.summary()}
        name = f"weightstream, 70B shape, {budget}"
        write(name, **facts)
        measure(Bench(model, ids, shape.num_tokens, partial(write, name)), shape, limit)
        return
    checkpoint.make(args.folder, settings)
    model = weightstream.from_pretrained(args.folder, device=device, device_budget=budget, progress=False)
    bench = Bench(model, ids, shape.num_tokens, partial(write, f"weightstream, {budget}"))
    plain_s = measure(bench, shape, limit)
    if limit.allows("split"):
        split(Bench.like(bench, partial(write, f"weightstream, {budget}, all split")), plain_s)
    scores, text = bench.scores, bench.text
    model.weightstream.remove()
    del bench, model
    gc.collect()
    if not limit.allows("resident"):
        return
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16, device_map=str(device))
    resident = Bench(model, ids, shape.num_tokens, partial(write, "resident"))
    resident_s = resident.plain()
    write("resident", width=1, equal=resident.text == text)
    resident.text = text
    for width, found in scores.items():
        resident.width(width, resident_s)
        write("resident", width=width, equal_resident=torch.equal(resident.scores[width], found))


if __name__ == "__main__":
    main()
