"""Several tokens a pass of Llama-3.1-8B's shape in 6 GiB, through `weightstream.generate`, with a scripted draft.

    python benchmarks/speculation.py [--smoke] [--folder FOLDER] [--budget 6GiB] [--limit SECONDS] [--out FILE]

A scripted draft proposes the text that is known from a plain run, each token wrong with a set chance, so that random
weights show any acceptance; it keeps the device busy for `draft_ms` a token, as a model would. `ms` of a pass: the time
of a long generation less that of a short one, by passes; `x_plain` compares it with a step of plain decoding, and
`tokens_x_plain` tokens per second. `equal`: text, and scores where they are compared, have the bits of the plain run;
`equal_resident`: of the resident model in passes of the same width. Rows with `speculate` are whole texts with a pace.
Rows go to results/speculation.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint
import rows
import torch

import weightstream
from weightstream.adapters.generation.row_split import plans
from weightstream.adapters.generation.row_trial import RowTrial

PROMPT, TEXT, SHORT, LONG = 61, 256, 12, 40
WIDTHS = (8, 16, 4, 64, 256)
COMPARED = (4, 8, 16)
WRONG = 0.0


class ScriptedDraft:
    """A candidate generator that knows the text. Each token is wrong with chance 1 - `acceptance`."""

    requires_model_outputs = False

    def __init__(self, text: list[int], acceptance: float, num: int, draft_cycles: int) -> None:
        self._text = text
        self._acceptance = acceptance
        self._num = num
        self._cycles = draft_cycles  # of the device's clock, for each token
        self._chance = torch.Generator().manual_seed(3)

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        begin = input_ids.shape[1] - PROMPT
        known = self._text[begin : begin + self._num]
        if input_ids.is_cuda and self._cycles:
            torch.cuda._sleep(self._cycles * self._num)
        right = torch.rand(len(known), generator=self._chance) < self._acceptance
        drafted = [token if ok else (token + 1) % 1000 for token, ok in zip(known, right.tolist(), strict=True)]
        return torch.cat([input_ids, input_ids.new_tensor([drafted])], 1), None

    def update_candidate_strategy(self, *_: Any) -> None:
        pass


@contextmanager
def scripted(model: Any, draft: ScriptedDraft) -> Iterator[None]:
    model.__dict__["_get_candidate_generator"] = lambda *_, **__: draft
    try:
        yield
    finally:
        del model.__dict__["_get_candidate_generator"]


class Bench:
    def __init__(self, model: Any, ids: torch.Tensor, write: Any) -> None:
        self.model, self.ids, self.write = model, ids, write
        self.text: list[int] = []
        self.scores: dict[int, torch.Tensor] = {}

    @classmethod
    def like(cls, other: Bench, write: Any) -> Bench:
        """The same model and text, with rows of another system."""
        bench = cls(other.model, other.ids, write)
        bench.text = other.text
        return bench

    def run(self, num: int, width: int = 1, acceptance: float = WRONG, cycles: int = 0, **more: Any) -> Any:
        """Generate `num` tokens. Returns seconds, the report and the output of `generate`."""
        found: list[Any] = []
        options = {"max_new_tokens": num, "do_sample": False, "pad_token_id": 0, "on_decoding": found.append} | more
        if width > 1:  # the cache is as long as that of the plain run, as its length may decide which kernels run
            options |= {"max_new_tokens": TEXT, "stopping_criteria": [partial(_is_long, PROMPT + num)]}
            options["prompt_lookup_num_tokens"] = width - 1
        draft = ScriptedDraft(self.text, acceptance, width - 1, cycles)
        self._wait()
        started = time.perf_counter()
        with scripted(self.model, draft):
            output = weightstream.generate(self.model, self.ids, **options)
        self._wait()
        return time.perf_counter() - started, found[0], output

    def plain(self, lengths: tuple[int, int]) -> float:
        """Seconds of a step of plain decoding."""
        self.run(SHORT)  # the order of the units is learned
        short_s, _, _ = self.run(lengths[0])
        long_s, report, output = self.run(lengths[1])
        self.text = output[0, PROMPT:].tolist()
        step_s = float(long_s - short_s) / (lengths[1] - lengths[0])
        self.write(width=1, ms=1e3 * step_s, total_s=long_s, decoding=str(report))
        self.total_s = long_s
        return step_s

    def width(self, width: int, plain_s: float, **more: Any) -> None:
        """Passes of this width in which nothing is accepted."""
        before = self._unplanned()
        keeps = width in COMPARED
        self.run(3, width, **more)  # a first run tries rows out
        short_s, _, _ = self.run(SHORT, width, **more)
        long_s, report, output = self.run(LONG, width, **more)
        pass_s = (long_s - short_s) / (LONG - SHORT)
        kept = {"return_dict_in_generate": True, "output_scores": True} if keeps else {}
        equal = self.starts_as(output)
        if keeps:
            output = self.run(SHORT, width, **more, **kept)[2]
            self.scores[width] = torch.cat(list(output.scores)[:SHORT]).cpu()
        self.write(
            width=width,
            ms=1e3 * pass_s,
            x_plain=pass_s / plain_s,
            equal=equal,
            unplanned=self._unplanned() - before,
            **_said(report),
        )

    def accepted(self, width: int, tau: float, num: int, plain_s: float, cycles: int, draft_ms: float) -> None:
        """A draft with so many tokens per pass on average."""
        acceptance = _acceptance(tau, width)
        before = self._unplanned()
        short_s, first, first_text = self.run(SHORT, width, acceptance, cycles)
        long_s, report, output = self.run(num, width, acceptance, cycles)
        speculation = report.speculation
        passes = speculation.passes - first.speculation.passes
        tokens_s = (output.shape[1] - len(first_text[0])) / (long_s - short_s)
        self.write(
            width=width,
            tau=tau,
            ms=1e3 * (long_s - short_s) / passes,
            draft_ms=draft_ms,
            tokens_s=tokens_s,
            tokens_x_plain=tokens_s * plain_s,
            equal=self.starts_as(output),
            unplanned=self._unplanned() - before,
            **_said(report),
        )

    def paced(self, acceptance: float) -> None:
        """A whole text with `speculate="auto"`, in passes of the width that the plan chooses."""
        before = self._unplanned()
        self.run(SHORT, 16, acceptance, speculate="auto")  # the plan of passes is made
        total_s, report, output = self.run(TEXT, 16, acceptance, speculate="auto")
        self.write(
            speculate="auto",
            acceptance=acceptance,
            width=report.speculation.width,
            singles=report.speculation.singles,
            total_s=total_s,
            x_plain=total_s / self.total_s,
            equal=self.starts_as(output),
            unplanned=self._unplanned() - before,
            **_said(report),
        )

    def starts_as(self, output: Any) -> bool:
        """Whether the text is that of the plain run, as far as it goes."""
        tokens = output[0, PROMPT:].tolist()
        return bool(tokens == self.text[: len(tokens)])

    def _unplanned(self) -> int:
        streamer = getattr(self.model, "weightstream", None)
        return 0 if streamer is None else int(streamer.stats().unplanned_fills)

    def _wait(self) -> None:
        if self.ids.is_cuda:
            torch.cuda.synchronize()


def _is_long(num: int, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    return torch.full((len(ids),), ids.shape[1] >= num, device=ids.device)


def _said(report: Any) -> dict[str, Any]:
    found = report.speculation
    return {
        "passes": found.passes,
        "tokens_per_pass": found.tokens_per_pass,
        "bits": found.bits,
        "rows": found.rows,
        "replays": report.replays,
        "reason": report.reason,
    }


def _acceptance(tau: float, width: int) -> float:
    """The chance of a right token by which a pass of `width` gives `tau` tokens on average, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**n for n in range(width)) < tau else (low, middle)
    return low


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/weightstream-8b"))
    parser.add_argument("--budget", default="6GiB")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no part begins")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "speculation.jsonl")
    args = parser.parse_args()
    begun, common = time.perf_counter(), rows.environment()
    device = torch.device("cpu") if args.smoke else torch.device("cuda")
    checkpoint.make(args.folder, checkpoint.TINY if args.smoke else checkpoint.LLAMA)

    def write(system: str, **fields: Any) -> None:
        found = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
        print({"system": system, **found}, flush=True)
        rows.append(args.out, [{"system": system, **found}], common)

    is_late = lambda: time.perf_counter() - begun > args.limit  # noqa: E731
    ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(5)).to(device)
    model = weightstream.from_pretrained(args.folder, device=device, device_budget=args.budget, progress=False)
    bench = Bench(model, ids, partial(write, f"weightstream, {args.budget}"))
    plain_s = bench.plain((32, TEXT))
    for width in WIDTHS:
        if not is_late():
            bench.width(width, plain_s)
    if not is_late():
        total_s, report, output = bench.run(TEXT, 8)
        equal = bench.starts_as(output)
        bench.write(width=8, tau=1, total_s=total_s, x_plain=total_s / bench.total_s, equal=equal, **_said(report))
    for acceptance in (0.0, 0.6):
        if not is_late():
            bench.paced(acceptance)
    cycles = 0 if args.smoke else _cycles(1.0)
    for width, tau in ((8, 2.5), (16, 6.0)):
        if not is_late():
            bench.accepted(width, tau, 220, plain_s, cycles, 1.0)
    if not is_late():
        split(Bench.like(bench, partial(write, f"weightstream, {args.budget}, all split")), plain_s)
    scores, text = bench.scores, bench.text
    model.weightstream.remove()
    del bench, model
    gc.collect()
    if is_late():
        return
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16, device_map=str(device))
    resident = Bench(model, ids, partial(write, "resident"))
    resident_s = resident.plain((32, TEXT))
    write("resident", width=1, equal=resident.text == text)
    resident.text = text
    for width, found in scores.items():
        resident.width(width, resident_s)
        write("resident", width=width, equal_resident=torch.equal(resident.scores[width], found))


if __name__ == "__main__":
    main()
