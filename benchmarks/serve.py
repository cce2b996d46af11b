"""The server against `weightstream.generate` in the same process: seconds to the first token, and tokens per second.

    python benchmarks/serve.py [--budget 6GiB] [--folder FOLDER] [--rounds 5] [--out FILE] [--smoke]

Llama-3.1-8B's shape with random weights, one text at a time, in turns. Rows of serve.jsonl:

generate     `weightstream.generate`, which shows tokens to a streamer
serve        /v1/completions as a stream, over a socket, by a client in a process of its own
`first_s`    from the call, or the request, to the first token or event
`tokens_s`   of the tokens after the first
`x_generate` how many times as long as `generate` it takes: to the first token, and for each token

cuDNN attention is off, as in cells.py: with it `generate` itself can give other tokens from call to call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint
import rows
import tokenizers
import torch
import transformers

import weightstream
from weightstream.serving.app import ServedModel
from weightstream.serving.server import bound_socket, serve_forever
from weightstream.text.engine import TextModel

CLIENT = Path(__file__).with_name("serve_client.py")
NUM_PROMPT, NUM_TOKENS, CONTEXT = 512, 96, 1024
SMOKE_PROMPT, SMOKE_TOKENS, SMOKE_CONTEXT = 16, 24, 64


class Timed(NamedTuple):
    """One text."""

    first_s: float
    tokens_s: float
    ids: list[int]


class Times:
    """A streamer of transformers, which notes when tokens come."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.ids: list[int] = []

    def put(self, ids: torch.Tensor) -> None:
        if self.at:  # the first call brings the prompt
            self.ids += ids.flatten().tolist()
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def save_words(folder: Path, num_words: int) -> None:
    """A tokenizer with a word for each token."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(num_words)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def by_generate(model: TextModel, prompt: list[int], num_tokens: int, context: int) -> Timed:
    times, options = Times(), dict[str, Any](model.placed(model.encode_ids(prompt)))
    options |= {"max_cache_len": context, "min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
    started = time.perf_counter()
    weightstream.generate(model.model, **options, do_sample=False, streamer=times, on_decoding=lambda _: None)
    seconds = times.at[-1] - times.at[1]
    return Timed(times.at[1] - started, (num_tokens - 1) / seconds, times.ids)


def by_server(client: subprocess.Popen[str], body: dict[str, Any]) -> Timed:
    assert client.stdin is not None
    assert client.stdout is not None
    print(json.dumps(body), file=client.stdin, flush=True)
    found = json.loads(client.stdout.readline())
    first, last = found["seconds"][0], found["seconds"][-1]
    ids = [int(word[1:]) for word in found["text"].split()]
    return Timed(first, (len(ids) - 1) / (last - first), ids)


def in_turns(systems: dict[str, Callable[[], Timed]], num_rounds: int) -> dict[str, list[Timed]]:
    """The texts of each system, after one that is not counted. All have to be equal."""
    found: dict[str, list[Timed]] = {name: [] for name in systems}
    for number in range(num_rounds + 1):
        for name, run in systems.items():
            text = run()
            if number:
                found[name].append(text)
    answers = {name: {tuple(text.ids) for text in texts} for name, texts in found.items()}
    counts = ", ".join(f"{len(answers[name])} of {name} in {num_rounds}" for name in systems)
    assert len(set.union(*answers.values())) == 1, f"the answers differ: {counts}"
    return found


def rows_of(found: dict[str, list[Timed]]) -> list[dict[str, Any]]:
    base = {field: statistics.median(getattr(text, field) for text in found["generate"]) for field in Timed._fields[:2]}
    made = []
    for system, texts in found.items():
        first, speed = (rows.percentiles([getattr(text, field) for text in texts]) for field in Timed._fields[:2])
        ratios = {"first": round(first["p50"] / base["first_s"], 3), "token": round(base["tokens_s"] / speed["p50"], 3)}
        made.append({"bench": "serve", "system": system, "first_s": first, "tokens_s": speed, "x_generate": ratios})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="6GiB")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/weightstream-serve"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "serve.jsonl")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    args = parser.parse_args()
    settings = checkpoint.TINY if args.smoke else checkpoint.LLAMA
    sizes = (SMOKE_PROMPT, SMOKE_TOKENS, SMOKE_CONTEXT) if args.smoke else (NUM_PROMPT, NUM_TOKENS, CONTEXT)
    num_prompt, num_tokens, context = sizes
    checkpoint.make(args.folder, settings)
    num_words = int(settings["vocab_size"])
    save_words(args.folder, num_words)
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = TextModel(str(args.folder))
    model.load(device="cpu" if args.smoke else None, device_budget=args.budget, context=context)
    model.model.generation_config.eos_token_id = None  # random weights may end a text anywhere
    served = ServedModel(model=model, name="model", context=context, drafts=model.exact_drafts(context))
    torch.manual_seed(0)
    prompt = torch.randint(1, num_words, (num_prompt,)).tolist()
    is_up = threading.Event()
    body = {"model": served.name, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    with bound_socket("127.0.0.1", 0) as bound:
        command = [sys.executable, str(CLIENT), str(bound.getsockname()[1])]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=serve_forever, args=(served, bound, 4, is_up.set), daemon=True).start()
        is_up.wait()
        systems = {
            "generate": lambda: by_generate(model, prompt, num_tokens, context),
            "serve": lambda: by_server(client, body),
        }
        with client:
            found = rows_of(in_turns(systems, args.rounds))
    common = {
        "plan": model.streamer.plan.summary(),
        "budget": args.budget,
        "tokens": num_tokens,
        "prompt": num_prompt,
        "cudnn_attention": False,
    }
    for row in found:
        print(json.dumps(row), flush=True)
    rows.append(args.out, [row | common for row in found])


if __name__ == "__main__":
    main()
