"""A draft that needs no second model, at equal device memory: the high parts of all weights, against 4-bit copies.

    python benchmarks/self_draft.py [--budget 6GiB] [--bits 2] [--folder FOLDER] [--out FILE] [--smoke]

Llama-3.1-8B's shape with random weights, through `weightstream.generate`. Rows of self_draft.jsonl:

plain        one token a pass, in the whole budget
high parts   `draft="self"`. The draft really runs; what it proposes is replaced by the text that the passes make, and
             a pass keeps `tau` tokens of it, as of random weights none would be accepted
4-bit copies the rival: copies of the blocks that stream, in 4.25 bits, which draft together with the resident blocks.
             Passes are those of plain decoding in the budget that the copies leave. A drafted token takes as long as
             with high parts, with products of a 4-bit kernel (`int4.py`) in place of theirs
`tokens_s`   measured with high parts; `model_s` is tau / (pass_ms + k draft_ms), all that there is of the rival
`tau`        by the acceptance of SmolLM2 with noise of half a step, the mean of six prompts in acceptance.jsonl; of
             4-bit copies that of every other block, which flatters copies of more than half of the blocks
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint
import numpy as np
import planes
import rows
import timing
import torch
from speculation import PROMPT, SETTLING, Bench, ScriptedDraft, timed

import weightstream
from weightstream.adapters.generation.self_drafts import SelfDrafts
from weightstream.api.plan_model import planner_inputs_of
from weightstream.plan.speculation import tokens_per_pass
from weightstream.settings.config import OffloadConfig

NUM_TOKENS, SMOKE_TOKENS = 96, 20
SMOKE = checkpoint.TINY | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 1024}
ACCEPTED = {1: 0.73, 2: 0.86, 3: 0.94}  # share of drafted tokens, by bits of each mantissa
COPY_ACCEPTED, COPY_BITS = 0.82, 4.25
FOUND = 0.9  # of the tokens per second that acceptance and times make


class Timed(NamedTuple):
    """Milliseconds of the rounds of a text, of a drafted token, and of the passes."""

    rounds: list[float]
    draft_ms: float
    passes: list[float]
    num_tokens: int
    output: Any
    report: Any


@contextmanager
def corrected(script: ScriptedDraft, device: torch.device) -> Iterator[list[tuple[Any, Any, int]]]:
    """Inside, drafts run, and propose what the script knows. Yields the marks around each, and its number of tokens."""
    plain, marks = SelfDrafts.get_candidates, list[tuple[Any, Any, int]]()

    def get_candidates(self: SelfDrafts, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        begin = timing.mark(device)
        num = plain(self, input_ids, **kwargs)[0].shape[1] - input_ids.shape[1]
        marks.append((begin, timing.mark(device), num))
        known, _ = script.get_candidates(input_ids)
        return known[:, : input_ids.shape[1] + num], None

    SelfDrafts.get_candidates = get_candidates  # type: ignore[method-assign, assignment]
    try:
        yield marks
    finally:
        SelfDrafts.get_candidates = plain  # type: ignore[method-assign]


def drafted(bench: Bench, known: list[int], tau: float, num: int) -> Timed:
    """A text with the model's own drafts, of which passes keep `tau` tokens on average."""
    found: list[Any] = []
    script = ScriptedDraft(known, 1.0, 16, 0, tau)
    device = bench.ids.device
    options = {"max_new_tokens": num, "do_sample": False, "pad_token_id": 0, "speculate": "draft"}
    with corrected(script, device) as marks, timed(bench.model, device) as passes:
        output = weightstream.generate(bench.model, bench.ids, on_decoding=found.append, **options)
    timing.synchronize(device)
    drafts = [timing.between_ms(begin, end) / num for begin, end, num in marks[SETTLING:] if num]
    starts = [each.begin for each in passes[SETTLING:]]
    return Timed(
        [timing.between_ms(one, other) for one, other in itertools.pairwise(starts)],
        float(np.median(drafts)) if drafts else 0.0,
        [timing.between_ms(each.begin, each.end) for each in passes[SETTLING:]],
        script.lengths[-1] - script.lengths[SETTLING],
        output,
        found[0],
    )


def high_parts(bench: Bench, bits: int, plain_s: float, plain_text: list[int]) -> tuple[float, int]:
    """The row of the model as its own draft. Returns milliseconds of a drafted token, and drafted tokens of a pass."""
    # nothing is accepted: the text of these passes
    first = drafted(bench, [0] * bench.num_tokens, 1.0, bench.num_tokens)
    known = first.output[0, PROMPT:].tolist()
    num = first.report.speculation.width - 1
    tau = tokens_per_pass([ACCEPTED[bits]] * num)
    found = drafted(bench, known, tau, bench.num_tokens)
    pass_ms = float(np.median(found.passes))
    tokens_s = 1e3 * found.num_tokens / sum(found.rounds)
    model_s = 1e3 * tau / (pass_ms + num * found.draft_ms)
    stats = bench.model.weightstream.stats()
    predicted = {each.tokens: 1e3 * each.graph_s for each in bench.model.weightstream.pass_seconds()}
    bench.write(
        bits=bits,
        tau=tau,
        drafted=num,
        ms=rows.percentiles(found.rounds),
        pass_ms=pass_ms,
        predicted_ms=predicted.get(num + 1),
        draft_ms=found.draft_ms,
        tokens_s=tokens_s,
        model_s=model_s,
        x_model=tokens_s / model_s,
        is_as_modelled=tokens_s >= FOUND * model_s,
        tokens_x_plain=tokens_s * plain_s,
        tokens_per_pass=found.report.speculation.tokens_per_pass,
        equal=known == plain_text[: len(known)],
        equal_drafted=found.output[0, PROMPT:].tolist() == known,
        decoding=str(found.report),
        plan=str(bench.model.weightstream.plan).partition("\n")[0],
        held_nbytes=stats.held_nbytes["device"],
        unplanned=stats.unplanned_fills,
    )
    return found.draft_ms, num


def products_us(bits: int, device: torch.device) -> dict[str, float]:
    """Microseconds of all products of a token: with high parts, and with 4-bit copies."""
    shapes = planes.BLOCK | {"head": planes.HEAD}
    weights = {name: torch.randn(shape, device=device, dtype=torch.bfloat16) for name, shape in shapes.items()}
    found = {}
    for system in planes.systems():
        if system.name in (f"planes, m = {bits}", "int4"):
            measured = planes.measure(system, weights, Namespace(device=device, depth=planes.DEPTH))
            found[system.name.partition(",")[0]] = measured[-1]["us"]["p50"]
    return found


def left_by_copies(folder: Path, device: torch.device, budget: int) -> int:
    """The budget that 4-bit copies of all that streams leave."""
    left, inputs = budget, planner_inputs_of(folder, OffloadConfig(device_budget=budget, context=512), device=device)
    for _ in range(6):  # less budget streams more, which needs more copies
        plan = inputs.plan_at(left)
        assert plan is not None
        streamed = {alias for alias in plan.manifest.aliases if alias not in plan.resident | plan.mapped}
        plain = sum(nbytes for alias, nbytes in plan.manifest.plain().aliases.items() if alias in streamed)
        left = budget - int(plain * COPY_BITS / 16)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--budget", default="6GiB")
    parser.add_argument("--bits", type=int, default=2, help="of each mantissa that fit into the budget, for the rival")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/weightstream-8b"))
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "self_draft.jsonl")
    args = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)
    common = rows.environment() | {"cudnn_attention": False, "budget": args.budget}
    device, begun = torch.device("cpu" if args.smoke else "cuda"), time.perf_counter()
    checkpoint.make(args.folder, SMOKE if args.smoke else checkpoint.LLAMA)
    budget = weightstream.OffloadConfig(device_budget=args.budget).device_budget
    ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(5)).to(device)

    def write(system: str, **fields: Any) -> None:
        found = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
        print(f"{time.perf_counter() - begun:6.1f} s ", {"system": system, **found}, flush=True)
        rows.append(args.out, [{"bench": "self_draft", "system": system, **found}], common)

    def loaded(system: str, **more: Any) -> Bench:
        options = {"device": device, "progress": False, "context": 512, **more}
        model = weightstream.from_pretrained(args.folder, **options)
        return Bench(model, ids, SMOKE_TOKENS if args.smoke else NUM_TOKENS, partial(write, system))

    products = dict.fromkeys(("planes", "int4"), 0.0) if args.smoke else products_us(args.bits, device)
    timing.clear(device)
    bench = loaded("plain", device_budget=budget)
    plain_s, text = bench.plain(), bench.text
    bench.model.weightstream.remove()
    del bench
    gc.collect()
    bench = loaded("high parts", device_budget=budget, draft="self", speculate="draft")
    draft_ms, num = high_parts(bench, args.bits, plain_s, text)
    bench.model.weightstream.remove()
    del bench
    gc.collect()
    left = left_by_copies(args.folder, device, budget)
    bench = loaded("4-bit copies, their passes", device_budget=left)
    pass_s = bench.plain()
    own_ms = draft_ms + (products["int4"] - products["planes"]) / 1e3
    tau = tokens_per_pass([COPY_ACCEPTED] * num)
    write(
        "4-bit copies",
        tau=tau,
        drafted=num,
        pass_ms=1e3 * pass_s,
        draft_ms=own_ms,
        model_s=tau / (pass_s + num * own_ms / 1e3),
        tokens_x_plain=tau / (pass_s + num * own_ms / 1e3) * plain_s,
        left_nbytes=left,
        products_us=products,
    )


if __name__ == "__main__":
    main()
