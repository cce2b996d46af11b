"""`weightstream run` and `trace`: generate text while the model's weights stream, and say what that took, and when."""

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
    Frames,
    Height,
    Loading,
    Model,
    Steps,
    Variant,
    Width,
    counted,
    foretold,
    numbers_of,
    print_labelled,
    require,
    takes_model,
)
from weightstream.errors import CheckpointError, ConfigError, OffloadError, UnsupportedError
from weightstream.plan.units import human, milliseconds, per_second
from weightstream.runtime.trace import Trace, total

if TYPE_CHECKING:
    import torch

    from weightstream.adapters.hf.generation import DecodeReport
    from weightstream.runtime.streamer.streamer import Streamer

DEFAULT_PROMPT = "The sky is blue because"
_MOST_WAITS = 5


@takes_model("batch", "tokens")
def run(
    model: Model,
    loading: Loading,
    *,
    prompt: Annotated[str | None, typer.Option(help="What to go on from, or what a picture is to show.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Talk: --prompt, or each line that comes in, is a user's message.")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to generate at most; default: 64.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where a pipeline writes; default: image.png or video.gif.")] = None,
    height: Height = None,
    width: Width = None,
    steps: Steps = None,
    frames: Frames = None,
    seed: Annotated[int | None, typer.Option(help="Of a pipeline's noise; default: 0.")] = None,
    variant: Variant = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run it without offloading too, and compare.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text with MODEL, greedily, or an image or video with a pipeline, while weights stream.

    Text goes on from --prompt, or from what comes in by a pipe, or else from "The sky is blue because". With --chat and
    no --prompt it is a conversation, of a turn per line, up to the end of what comes in or /exit; /clear begins another
    one, and Ctrl-C stops an answer.
    """
    from weightstream.api.plan_model import is_pipeline_checkpoint

    if is_pipeline_checkpoint(model):
        pipelines.refuse_options(model, chat=chat, max_new_tokens=max_new_tokens)
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
    if chat and prompt is None and not verify and not as_json:
        _converse(session, loading, max_new_tokens)
        return
    text = _text(prompt) if prompt is not None else _piped() or DEFAULT_PROMPT
    inputs = session.encode([{"role": "user", "content": text}] if chat else text)
    if loading["config"].context is None:
        context = inputs["input_ids"].shape[1] + max_new_tokens
        loading["config"] = loading["config"].model_copy(update={"context": context})
    session.load(progress=sys.stderr.isatty() and not as_json, **loading)
    tokens = session.generate(inputs, max_new_tokens, show=not as_json)
    found = session.report(inputs, tokens)
    if not as_json:
        print_labelled(_lines(found, tokens))
    difference = first_difference(tokens.ids, session.plain(inputs, max_new_tokens)) if verify else None
    if as_json:
        verdict = {"identical": difference is None if verify else None, "first_difference": difference}
        typer.echo(json.dumps(found | verdict))
    elif verify:
        print_labelled({"identical": "yes" if difference is None else f"no (first difference at token {difference})"})
    raise typer.Exit(0 if difference is None else 1)


def _converse(session: ModelSession, loading: Loading, max_new_tokens: int) -> None:
    session.check_chat()
    session.load(progress=sys.stderr.isatty(), **loading)
    converse(functools.partial(session.answer, max_new_tokens))


class Tokens:
    """The tokens that `generate` makes, and the time of each; `text`, a transformers streamer, gets them too."""

    def __init__(self, text: Any) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self.decoding: DecodeReport | None = None  # set at the end, as is the next
        self.is_cut = False  # more would have come
        self._text = text

    def put(self, ids: torch.Tensor) -> None:
        if self.times:  # the first call brings the prompt
            self.ids += ids.flatten().tolist()
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
        """The rate after the first token, which is the prompt's; of that one when there is no other."""
        first = min(1, len(self.times) - 2)
        return (len(self.times) - 1 - first) / (self.times[-1] - self.times[first])


def _lines(found: dict[str, Any], tokens: Tokens) -> dict[str, str]:
    """A report for a person."""
    stats, speed = found["stats"], f"{tokens.per_second:.1f} tokens/s ({len(tokens.ids)} generated"
    speed += ", cut by --max-new-tokens" if tokens.is_cut else ""
    held = f"{human(stats['held_nbytes']['device'])} held on {found['device']}"
    lines = {
        "plan": found["plan"],
        "speed": f"{speed}, the first after {found['first_token_s']:.2f} s)",
        "decode": str(tokens.decoding),
        "device": f"{held}, of the model's {human(stats['model_nbytes'])}",
        "streamed": f"{human(stats['filled_nbytes'] / stats['steps'])} per step ({stats['steps']} steps)",
        "waited": f"{stats['stall_s']:.2f} s of {found['seconds']:.2f} s",
    }
    if found["experts"] is not None:
        lines["experts"] = counted(found["experts"])
    measured_s, predicted_s = stats["step_s"], stats["predicted_step_s"]
    if measured_s is not None and predicted_s:
        lines |= foretold(predicted_s, measured_s)
    if stats["unplanned_fills"]:
        lines["unplanned"] = f"{stats['unplanned_fills']} of {stats['fills']} fills"
    return lines


class ModelSession:
    """A model that streams, and its tokenizer: that comes first, so that a bad prompt is told before all is loaded."""

    def __init__(self, name: str, trust_remote_code: bool) -> None:
        transformers = require("transformers", "transformers", "weightstream run")
        from weightstream.adapters.hf.hub import config_and_class, find, refused_as_checkpoint, weights_named
        from weightstream.store.checkpoint import Checkpoint

        source = find(name, trust_remote_code)
        Checkpoint.open(
            source.path, weights_named(source.path, None)
        )  # headers alone; what is wrong with the weights is not to be told of the tokenizer
        with refused_as_checkpoint(name, "load"):
            config_and_class(source, None, trust_remote_code)
        folder = source.folder
        if source.adapter is not None and (source.adapter / "tokenizer_config.json").is_file():
            folder = source.adapter
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # whatever transformers makes of the files
            raise CheckpointError(f"{name}: no tokenizer that can be read: {error}") from error
        self.name = name

    def encode(self, prompt: str | Messages) -> dict[str, torch.Tensor]:
        """The model's inputs, each of shape (1, tokens), of a text or of a chat."""
        text = prompt if isinstance(prompt, str) else self._templated(prompt)
        encoded = self.tokenizer(text, add_special_tokens=isinstance(prompt, str), return_tensors="pt")
        if not encoded["input_ids"].numel():
            raise ConfigError(f"the prompt {text!r} has no tokens: give one with --prompt")
        return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}

    def _templated(self, messages: Messages) -> str:
        self.check_chat()
        try:
            text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program
            raise CheckpointError(f"{self.name}: its chat template cannot be used: {error}") from error
        return text

    def check_chat(self) -> None:
        """Raises `ConfigError` where there is no chat template."""
        if not self.tokenizer.chat_template:
            raise ConfigError(f"{self.name} has no chat template: leave out --chat")

    def load(self, **options: Any) -> None:
        """Load the model; `options` go to `from_pretrained`."""
        import transformers

        from weightstream import from_pretrained

        self.model = from_pretrained(self.name, **options)
        self.streamer: Streamer = self.model.weightstream
        transformers.logging.set_verbosity_error()  # no advice on generation settings: they are not the user's
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
        """Generate greedily, and print the text meanwhile if it is to `show`; `is_stopped` is asked at each token."""
        import torch
        from transformers import TextStreamer

        from weightstream.adapters.hf.generation import generate

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
        """The answer to the last message, shown on stdout as far as it came, what is to be said of it on stderr."""
        inputs = self.encode(messages)
        num = inputs["input_ids"].shape[1]
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and num + max_new_tokens > positions:
            need = f"{num} tokens so far + {max_new_tokens} of --max-new-tokens > {positions} that the model takes"
            typer.echo(f"[{need}: /clear begins another conversation]", err=True)
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
        """The tokens of the same model without offloading, which it leaves for good."""
        import torch

        self.streamer.remove()
        try:
            self.model.to(self.streamer.device)
            return self.generate(inputs, max_new_tokens).ids
        except torch.OutOfMemoryError as error:
            raise OffloadError(
                f"--verify needs all of the model on the device, where it does not fit: {error}"
            ) from error

    def report(self, inputs: dict[str, torch.Tensor], tokens: Tokens) -> dict[str, Any]:
        """What a run took."""
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
    """An argument of the command line, in which bytes that are no text are replaced."""
    return os.fsencode(argument).decode(errors="replace")


def _piped() -> str:
    return "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()


@takes_model("batch", "tokens")
def trace(
    model: Model,
    loading: Loading,
    *,
    out: Annotated[Path, typer.Option(help="Write the trace here.")] = Path("trace.json"),
    steps: Annotated[int, typer.Option(min=1, help="Tokens to decode, one a step, behind the prompt's step.")] = 4,
    prompt: Annotated[str, typer.Option(help="What to go on from.")] = DEFAULT_PROMPT,
) -> None:
    """Record when each of MODEL's units is copied, waited for and computed, while it reads a prompt and decodes.

    Opens in https://ui.perfetto.dev or chrome://tracing: a row for the host, one for compute and one for copies. The
    steps run eager, as a graph does not show its units.
    """
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    from weightstream.api.plan_model import is_pipeline_checkpoint

    if is_pipeline_checkpoint(model):
        raise ConfigError(f"{model} is a pipeline of diffusers: trace() of a component's streamer records its steps")
    session = ModelSession(model, loading["trust_remote_code"])
    inputs = session.encode(_text(prompt))
    session.load(progress=sys.stderr.isatty(), **loading)
    greedy = session.greedy(inputs)
    session.model.generate(**greedy, max_new_tokens=2)  # teaches the order of the units
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
        **foretold(session.streamer.plan.step_s, decoded_s),
        "compute": f"{milliseconds(ran_s - waited_s)}, and {milliseconds(waited_s)} of waiting for copies",
    }
    if fills:
        lines["copies"] = (
            f"{milliseconds(copied_s)}, {human(nbytes)} ({nbytes} bytes) at {per_second(nbytes / copied_s)}"
        )
    if recorded.experts:
        experts = total(recorded.experts.values())
        ahead = f", {experts.ahead} ahead, of which {experts.ahead_used} were used" if experts.ahead else ""
        fetched = f"{experts.fetched} fetched{ahead} ({human(experts.fetched_nbytes)})"
        lines["experts"] = f"{experts.found} found in slots, {fetched}"
    if waited_s:
        longest = sorted(waited, key=lambda name: waited[name], reverse=True)[:_MOST_WAITS]
        named = (f"{name or '(root)'} ({milliseconds(waited[name])})" for name in longest)
        lines["waits"] = f"longest for {', '.join(named)}"
    lines["trace"] = f"{out} ({len(recorded.spans)} spans); open it in https://ui.perfetto.dev"
    print_labelled(lines)
