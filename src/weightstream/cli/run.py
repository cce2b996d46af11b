"""`weightstream run` and `trace`: generate text while the model's weights stream, and report times and traffic."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightstream.cli import pipelines
from weightstream.cli.chat import Messages, converse
from weightstream.cli.terminal import (
    AsJson,
    DraftOption,
    Frames,
    Height,
    Loading,
    Model,
    SpeculateMode,
    Steps,
    Variant,
    Width,
    expert_line,
    numbers_of,
    prediction_lines,
    print_labelled,
    require,
    speculation_line,
    takes_model,
)
from weightstream.errors import CheckpointError, ConfigError, OffloadError, UnsupportedError
from weightstream.plan.units import human, milliseconds, per_second
from weightstream.runtime.trace import Trace, total

if TYPE_CHECKING:
    import torch

    from weightstream.adapters.generation.decoder import DecodeReport
    from weightstream.runtime.streamer.streamer import Streamer

DEFAULT_PROMPT = "The sky is blue because"
_MOST_WAITS = 5


@takes_model("batch", "tokens")
def run(
    model: Model,
    loading: Loading,
    *,
    prompt: Annotated[str | None, typer.Option(help="Text to continue, or the prompt of a pipeline.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat: --prompt, or each line of stdin, is a user's message.")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to generate at most. Default: 64.")] = None,
    speculate: SpeculateMode = None,
    draft: DraftOption = None,
    out: Annotated[Path | None, typer.Option(help="File for a pipeline. Default: image.png or video.gif.")] = None,
    height: Height = None,
    width: Width = None,
    steps: Steps = None,
    frames: Frames = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a pipeline's noise. Default: 0.")] = None,
    variant: Variant = None,
    verify: Annotated[bool, typer.Option("--verify", help="Also run without offloading, and compare.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text with MODEL, greedily, or an image or video with a pipeline, while weights stream.

    Text continues --prompt, or the text of a pipe, or else "The sky is blue because". With --chat and
    no --prompt it is a conversation: each line of stdin is a message, /clear starts over, Ctrl-C stops
    an answer, and the end of the input or /exit ends it.
    """
    from weightstream.api.plan_model import is_pipeline_checkpoint

    if is_pipeline_checkpoint(model):
        pipelines.refuse_options(model, chat=chat, max_new_tokens=max_new_tokens, speculate=speculate, draft=draft)
        call = pipelines.call_of(height, width, steps, frames, prompt=prompt or _piped() or pipelines.PROMPT)
        identical = pipelines.run_pipeline(
            model, loading, call, variant=variant, out=out, seed=seed or 0, verify=verify, as_json=as_json
        )
        raise typer.Exit(1 if identical is False else 0)
    pipelines.refuse_options(
        model, out=out, seed=seed, height=height, width=width, steps=steps, frames=frames, variant=variant
    )
    max_new_tokens = max_new_tokens or 64
    from weightstream.measure.comparison import first_difference

    session = ModelSession(model, loading["trust_remote_code"])
    drafts = {"speculate": speculate, "draft": draft}
    if chat and prompt is None and not verify and not as_json:
        _converse(session, {**loading, **drafts}, max_new_tokens)
        return
    text = _text(prompt) if prompt is not None else _piped() or DEFAULT_PROMPT
    inputs = session.encode([{"role": "user", "content": text}] if chat else text)
    if loading["config"].context is None:
        context = inputs["input_ids"].shape[1] + max_new_tokens
        loading["config"] = loading["config"].model_copy(update={"context": context})
    session.load(progress=sys.stderr.isatty() and not as_json, **loading, **drafts)
    tokens = session.generate(inputs, max_new_tokens, show=not as_json)
    report = session.report(inputs, tokens)
    if not as_json:
        print_labelled(_lines(report, tokens))
    difference = first_difference(tokens.ids, session.plain(inputs, max_new_tokens)) if verify else None
    if as_json:
        verdict = {"identical": difference is None if verify else None, "first_difference": difference}
        typer.echo(json.dumps(report | verdict))
    elif verify:
        print_labelled({"identical": "yes" if difference is None else f"no (first difference at token {difference})"})
    raise typer.Exit(0 if difference is None else 1)


def _converse(session: ModelSession, options: dict[str, Any], max_new_tokens: int) -> None:
    session.check_chat()
    session.load(progress=sys.stderr.isatty(), **options)
    converse(functools.partial(session.answer, max_new_tokens))


class Tokens:
    """The tokens that `generate` makes, and the times at which they came, several at once where they were drafted. They
    are passed on to `text`, a transformers streamer."""

    def __init__(self, text: Any) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self.decoding: DecodeReport | None = None  # set when generation ends, as is `is_cut`
        self.is_cut = False  # by the limit of tokens
        self._text = text
        self._num_first = 0  # tokens that came first

    def put(self, ids: torch.Tensor) -> None:
        if self.times:  # the first call brings the prompt
            self.ids += ids.flatten().tolist()
        if len(self.times) == 1:
            self._num_first = len(self.ids)
        self.times.append(time.perf_counter())
        if self._text:
            self._text.put(ids)

    def end(self) -> None:
        if self._text:
            self._text.end()

    def set_decoding(self, decoding: DecodeReport) -> None:
        self.decoding = decoding

    @property
    def per_second(self) -> float:
        """The rate of the tokens after the first, whose step reads the prompt; with one token, the rate of that one."""
        first = min(1, len(self.times) - 2)
        num_before = self._num_first if first else 0
        return (len(self.ids) - num_before) / (self.times[-1] - self.times[first])


def _lines(report: dict[str, Any], tokens: Tokens) -> dict[str, str]:
    """A report, as labelled lines."""
    stats, speed = report["stats"], f"{tokens.per_second:.1f} tokens/s ({len(tokens.ids)} generated"
    speed += ", cut by --max-new-tokens" if tokens.is_cut else ""
    held = f"{human(stats['held_nbytes']['device'])} held on {report['device']}"
    lines = {
        "plan": report["plan"],
        "speed": f"{speed}, the first after {report['first_token_s']:.2f} s)",
        "decode": str(tokens.decoding),
        "device": f"{held}, of the model's {human(stats['model_nbytes'])}",
        "streamed": f"{human(stats['filled_nbytes'] / stats['steps'])} per step ({stats['steps']} steps)",
        "waited": f"{stats['stall_s']:.2f} s of {report['seconds']:.2f} s",
    }
    if stats["speculation"] is not None:
        lines["drafts"] = speculation_line(stats["speculation"], tokens.per_second)
    if report["experts"] is not None:
        lines["experts"] = expert_line(report["experts"])
    measured_s, predicted_s = stats["step_s"], stats["predicted_step_s"]
    if measured_s is not None and predicted_s:
        lines |= prediction_lines(predicted_s, measured_s)
    if stats["unplanned_fills"]:
        lines["unplanned"] = f"{stats['unplanned_fills']} of {stats['fills']} fills"
    return lines


class ModelSession:
    """A model that streams, and its tokenizer, which is loaded first: a bad prompt is an error before a long load."""

    def __init__(self, name: str, trust_remote_code: bool) -> None:
        transformers = require("transformers", "transformers", "weightstream run")
        from weightstream.adapters.hf.hub import config_and_class, find, refused_as_checkpoint, weights_named
        from weightstream.store.checkpoint import Checkpoint

        source = find(name, trust_remote_code)
        Checkpoint.open(
            source.path, weights_named(source.path, None)
        )  # headers only, so that an error of the weights is not reported as one of the tokenizer
        with refused_as_checkpoint(name, "load"):
            config_and_class(source, None, trust_remote_code)
        folder = source.folder
        if source.adapter is not None and (source.adapter / "tokenizer_config.json").is_file():
            folder = source.adapter
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # of any class, depending on the files
            raise CheckpointError(f"{name}: its tokenizer cannot be loaded: {error}") from error
        self.name = name

    def encode(self, prompt: str | Messages) -> dict[str, torch.Tensor]:
        """The model's inputs for a text or a chat, each of shape (1, tokens)."""
        text = prompt if isinstance(prompt, str) else self._templated(prompt)
        encoded = self.tokenizer(text, add_special_tokens=isinstance(prompt, str), return_tensors="pt")
        if not encoded["input_ids"].numel():
            raise ConfigError(f"the prompt {text!r} has no tokens: pass another --prompt")
        return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}

    def _templated(self, messages: Messages) -> str:
        self.check_chat()
        try:
            text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program
            raise CheckpointError(f"{self.name}: its chat template cannot be used: {error}") from error
        return text

    def check_chat(self) -> None:
        """Raise `ConfigError` if the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise ConfigError(f"{self.name} has no chat template: leave out --chat")

    def load(self, **options: Any) -> None:
        """Load the model; `options` go to `from_pretrained`."""
        import transformers

        from weightstream import from_pretrained

        self.model = from_pretrained(self.name, **options)
        self.streamer: Streamer = self.model.weightstream
        transformers.logging.set_verbosity_error()  # no advice on generation settings, which the user did not choose
        if not self.model.can_generate():
            raise UnsupportedError(f"{self.name}: {type(self.model).__name__} does not generate text")

    def generate(
        self,
        inputs: dict[str, torch.Tensor],
        max_new_tokens: int,
        *,
        show: bool = False,
        is_stopped: Callable[[], bool] | None = None,
    ) -> Tokens:
        """Generate greedily. `show` prints the text meanwhile; generation ends when `is_stopped()` after a token."""
        import torch
        from transformers import TextStreamer

        from weightstream.adapters.generation.generation import generate

        text = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if show else None
        tokens = Tokens(text)
        options = self.greedy(inputs) | {"max_new_tokens": max_new_tokens, "streamer": tokens}
        if is_stopped is not None:
            options["stopping_criteria"] = [lambda ids, _: torch.full((len(ids),), is_stopped(), device=ids.device)]
        generate(self.model, **options, on_decoding=tokens.set_decoding)
        ends = self.model.generation_config.eos_token_id
        has_ended = tokens.ids[-1] in (ends if isinstance(ends, list) else [ends])
        tokens.is_cut = len(tokens.ids) == max_new_tokens and not has_ended
        return tokens

    def answer(self, max_new_tokens: int, messages: Messages, is_stopped: Callable[[], bool]) -> str | None:
        """Print the answer to the last message on stdout, and notes on it on stderr. None: it has no room."""
        inputs = self.encode(messages)
        num = inputs["input_ids"].shape[1]
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and num + max_new_tokens > positions:
            need = f"{num} tokens so far + {max_new_tokens} of --max-new-tokens > {positions} of the model"
            typer.echo(f"[{need}: /clear starts over]", err=True)
            return None
        tokens = self.generate(inputs, max_new_tokens, show=True, is_stopped=is_stopped)
        if tokens.is_cut and not is_stopped():
            typer.echo(f"[cut at {max_new_tokens} tokens: raise --max-new-tokens]", err=True)
        text: str = self.tokenizer.decode(tokens.ids, skip_special_tokens=True)
        return text

    def greedy(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The arguments of `generate`: the inputs on the device, and no sampling."""
        placed = {name: value.to(self.streamer.device) for name, value in inputs.items()}
        return {**placed, "do_sample": False, "num_beams": 1}

    def plain(self, inputs: dict[str, torch.Tensor], max_new_tokens: int) -> list[int]:
        """Stop offloading for good, and return the tokens of the model on the device."""
        import torch

        self.streamer.remove()
        try:
            self.model.to(self.streamer.device)
            return self.generate(inputs, max_new_tokens).ids
        except torch.OutOfMemoryError as error:
            raise OffloadError(
                f"--verify needs the whole model on the device, where it does not fit: {error}"
            ) from error

    def report(self, inputs: dict[str, torch.Tensor], tokens: Tokens) -> dict[str, Any]:
        """The values of `--json`."""
        from weightstream.runtime.streamer.stats import of_cache

        stats = self.streamer.stats()
        return {
            "model": self.name,
            "device": str(self.streamer.device),
            "plan": self.streamer.plan.summary(),
            "num_prompt_tokens": inputs["input_ids"].shape[1],
            "tokens": tokens.ids,
            "text": self.tokenizer.decode(tokens.ids, skip_special_tokens=True),
            "seconds": tokens.times[-1] - tokens.times[0],
            "first_token_s": tokens.times[1] - tokens.times[0],
            "tokens_per_s": tokens.per_second,
            "decoding": tokens.decoding and dataclasses.asdict(tokens.decoding),
            "experts": of_cache(self.streamer.plan, stats.experts, len(tokens.ids)),
            "stats": numbers_of(stats),
        }


def _text(argument: str) -> str:
    """An argument of the command line, with undecodable bytes replaced."""
    return os.fsencode(argument).decode(errors="replace")


def _piped() -> str:
    return "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()


@takes_model("batch", "tokens")
def trace(
    model: Model,
    loading: Loading,
    *,
    out: Annotated[Path, typer.Option(help="Write the trace here.")] = Path("trace.json"),
    steps: Annotated[int, typer.Option(min=1, help="Tokens to decode after the prompt, one in each step.")] = 4,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = DEFAULT_PROMPT,
) -> None:
    """Record when each of MODEL's units is copied, waited for and computed, while it reads a prompt and decodes.

    The trace opens in https://ui.perfetto.dev or chrome://tracing: a row for the host, one for compute
    and one for copies. Steps run eager, as a CUDA graph does not show its units.
    """
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist")
    from weightstream.api.plan_model import is_pipeline_checkpoint

    if is_pipeline_checkpoint(model):
        raise ConfigError(f"{model} is a pipeline of diffusers: trace() of a component's streamer records its steps")
    session = ModelSession(model, loading["trust_remote_code"])
    inputs = session.encode(_text(prompt))
    session.load(progress=sys.stderr.isatty(), **loading)
    greedy = session.greedy(inputs)
    session.model.generate(**greedy, max_new_tokens=2)  # the order of the units is learned
    with session.streamer.trace() as recorded:
        session.model.generate(**greedy, max_new_tokens=steps + 1, min_new_tokens=steps + 1)
    recorded.save(out)
    _show(session, recorded, out)


def _show(session: ModelSession, recorded: Trace, out: Path) -> None:
    on_device = [span for span in recorded.spans if span.row != "host"]
    steps, waits, fills = ([span for span in on_device if span.kind == kind] for kind in ("step", "wait", "fill"))
    waited: defaultdict[str, float] = defaultdict(float)  # seconds, by unit
    for wait in waits:
        waited[wait.name] += wait.seconds
    ran_s, waited_s = sum(step.seconds for step in steps), sum(waited.values())
    copied_s, nbytes = sum(fill.seconds for fill in fills), sum(fill.nbytes for fill in fills)
    decoded_s = median(step.seconds for step in steps[1:])
    lines = {
        "plan": session.streamer.plan.summary(),
        "prompt": f"1 step of {milliseconds(steps[0].seconds)}",
        "decode": f"{len(steps) - 1} steps of {milliseconds(decoded_s)} each (median)",
        **prediction_lines(session.streamer.plan.step_s, decoded_s),
        "compute": f"{milliseconds(ran_s - waited_s)}, and {milliseconds(waited_s)} of waiting for copies",
    }
    if fills:
        lines["copies"] = (
            f"{milliseconds(copied_s)}, {human(nbytes)} ({nbytes} bytes) at {per_second(nbytes / copied_s)}"
        )
    if recorded.experts:
        experts = total(recorded.experts.values())
        ahead = f", {experts.ahead} prefetched, of which {experts.ahead_used} were used" if experts.ahead else ""
        lines["experts"] = f"{experts.found} hits, {experts.fetched} fetched{ahead} ({human(experts.fetched_nbytes)})"
    if waited_s:
        longest = sorted(waited, key=lambda name: waited[name], reverse=True)[:_MOST_WAITS]
        named = (f"{name or '(root)'} ({milliseconds(waited[name])})" for name in longest)
        lines["waits"] = f"longest for {', '.join(named)}"
    lines["trace"] = f"{out} ({len(recorded.spans)} spans); open it in https://ui.perfetto.dev"
    print_labelled(lines)
