"""`weightstream run`: generates text while the model's weights stream, then says what that took."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightstream.cli.options import Chosen, switch, takes_model
from weightstream.cli.screen import print_labelled
from weightstream.errors import CheckpointError, ConfigError, OffloadError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from weightstream.adapters.decoder import Decoding
    from weightstream.plan.plan import Plan
    from weightstream.runtime.streamer import Stats, Streamer

DEFAULT_PROMPT = "The sky is blue because"


@takes_model("context", "plan_file")
def run(
    chosen: Chosen,
    *,
    prompt: Annotated[str | None, typer.Option(help="What to go on from. Read from a pipe if there is one.")] = None,
    chat: Annotated[bool, switch("--chat", "Give the prompt as a user's message in a chat.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    verify: Annotated[bool, switch("--verify", "Generate without offloading too, and compare the tokens.")] = False,
    as_json: Annotated[bool, switch("--json", "Print one JSON object, and nothing else.")] = False,
) -> None:
    """Generate text with MODEL, greedily, while its weights stream through the device."""
    words = Words.open(chosen.model, chosen.trust_remote_code)
    inputs = words.encode(prompt if prompt is not None else _piped() or DEFAULT_PROMPT, chat=chat)
    config = chosen.config
    if config.context is None:
        config = config.model_copy(update={"context": inputs["input_ids"].shape[1] + max_new_tokens})
    watched = sys.stderr.isatty() and not as_json
    session = Session.open(words, progress=watched, **chosen.loading | {"config": config})
    with _waiting(session.streamer.plan, watched) as on_token:
        tokens = session.generate(inputs, max_new_tokens, show=not as_json, on_token=on_token)
    report = session.report(inputs, tokens)
    if not as_json:
        print_labelled(report.lines())
    difference = _first_difference(tokens.ids, session.plain(inputs, max_new_tokens)) if verify else None
    if as_json:
        verdict = {"identical": difference is None if verify else None, "first_difference": difference}
        typer.echo(json.dumps(dataclasses.asdict(report) | verdict))
    elif verify:
        found = "yes" if difference is None else f"no (first difference at token {difference})"
        print_labelled({"identical": found})
    raise typer.Exit(0 if difference is None else 1)


class Tokens:
    """The tokens that `generate` makes, and the time of each; `text`, a transformers streamer, gets them too."""

    def __init__(self, text: Any = None, on_token: Callable[[], None] = lambda: None) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self.decoding: Decoding | None = None  # set at the end
        self._text = text
        self._on_token = on_token

    def put(self, ids: torch.Tensor) -> None:
        if self.times:  # the first call brings the prompt
            self.ids += ids.flatten().tolist()
            self._on_token()
        self.times.append(time.perf_counter())
        if self._text:
            self._text.put(ids)

    def end(self) -> None:
        if self._text:
            self._text.end()

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def per_second(self) -> float:
        """The rate after the first token, which is the prompt's; of that one when there is no other."""
        first = min(1, len(self.times) - 2)
        return (len(self.times) - 1 - first) / (self.times[-1] - self.times[first])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run took."""

    model: str
    device: str
    plan: str
    num_prompt_tokens: int
    tokens: list[int]
    text: str
    seconds: float
    first_token_s: float
    tokens_per_s: float
    decoding: Decoding | None
    stats: Stats

    def lines(self) -> dict[str, str]:
        from weightstream.plan.shown import human, milliseconds

        stats, num = self.stats, len(self.tokens)
        lines = {
            "plan": self.plan,
            "speed": f"{self.tokens_per_s:.1f} tokens/s ({num} generated, the first after {self.first_token_s:.2f} s)",
            "decode": str(self.decoding),
            "device": f"{human(stats.held_nbytes['device'])} held on {self.device}, of the model's "
            f"{human(stats.model_nbytes)}",
            "streamed": f"{human(stats.filled_nbytes / stats.steps)} per step ({stats.steps} steps)",
            "waited": f"{stats.stall_s:.2f} s of {self.seconds:.2f} s",
        }
        if stats.step_s is not None and stats.predicted_step_s:
            error = stats.predicted_step_s / stats.step_s - 1
            lines["predicted"] = (
                f"{milliseconds(stats.predicted_step_s)} per step; measured {milliseconds(stats.step_s)} ({error:+.0%})"
            )
        if stats.unplanned_fills:
            lines["unplanned"] = f"{stats.unplanned_fills} of {stats.fills} fills"
        return lines


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A checkpoint's tokenizer."""

    name: str
    tokenizer: Any

    @classmethod
    def open(cls, name: str, trust_remote_code: bool) -> Words:
        try:
            import transformers
        except ModuleNotFoundError as error:
            remedy = "pip install 'weightstream[transformers]'"
            raise UnsupportedError(f"weightstream run needs the package {error.name}: {remedy}") from error
        from weightstream.adapters.transformers import local_path

        path = local_path(name, trust_remote_code)
        folder = path if path.is_dir() else path.parent
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # whatever transformers makes of the files
            raise CheckpointError(f"{name}: no tokenizer that can be read: {error}") from error
        return cls(name=name, tokenizer=tokenizer)

    def encode(self, prompt: str, *, chat: bool) -> dict[str, torch.Tensor]:
        """The model's inputs, each of shape (1, tokens)."""
        if chat and not self.tokenizer.chat_template:
            raise ConfigError(f"{self.name} has no chat template: leave out --chat")
        if chat:
            messages = [{"role": "user", "content": prompt}]
            try:
                prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # a template is a program
                raise CheckpointError(f"{self.name}: its chat template cannot be used: {error}") from error
        encoded = self.tokenizer(prompt, add_special_tokens=not chat, return_tensors="pt")
        if not encoded["input_ids"].numel():
            raise ConfigError(f"the prompt {prompt!r} has no tokens: give one with --prompt")
        return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A model that streams, and its tokenizer."""

    words: Words
    model: Any
    streamer: Streamer

    @classmethod
    def open(cls, words: Words, **options: Any) -> Session:
        """Load the model of these words; `options` go to `from_pretrained`."""
        import transformers

        from weightstream import from_pretrained

        model = from_pretrained(words.name, **options)
        transformers.logging.set_verbosity_error()  # no advice on generation settings: they are not the user's
        if not model.can_generate():
            raise UnsupportedError(f"{words.name}: {type(model).__name__} does not generate text")
        return cls(words=words, model=model, streamer=model.weightstream)

    def generate(
        self,
        inputs: dict[str, torch.Tensor],
        max_new_tokens: int,
        *,
        show: bool = False,
        on_token: Callable[[], None] = lambda: None,
    ) -> Tokens:
        from transformers import TextStreamer

        from weightstream.adapters.generation import generate

        text = TextStreamer(self.words.tokenizer, skip_prompt=True, skip_special_tokens=True) if show else None
        tokens = Tokens(text, on_token)
        placed = {name: value.to(self.streamer.device) for name, value in inputs.items()}
        options = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1, "streamer": tokens}
        generate(self.model, **placed, **options, on_decoding=partial(setattr, tokens, "decoding"))
        return tokens

    def plain(self, inputs: dict[str, torch.Tensor], max_new_tokens: int) -> list[int]:
        """The tokens of the same model without offloading, which it leaves for good."""
        import torch

        self.streamer.remove()
        try:
            self.model.to(self.streamer.device)
            return self.generate(inputs, max_new_tokens).ids
        except torch.OutOfMemoryError as error:
            raise OffloadError(
                f"--verify needs the whole model on {self.streamer.device}, where it does not fit: {error}"
            ) from error

    def report(self, inputs: dict[str, torch.Tensor], tokens: Tokens) -> Report:
        return Report(
            model=self.words.name,
            device=str(self.streamer.device),
            plan=self.streamer.plan.summary(),
            num_prompt_tokens=inputs["input_ids"].shape[1],
            tokens=tokens.ids,
            text=self.words.tokenizer.decode(tokens.ids, skip_special_tokens=True),
            seconds=tokens.seconds,
            first_token_s=tokens.times[1] - tokens.times[0],
            tokens_per_s=tokens.per_second,
            decoding=tokens.decoding,
            stats=self.streamer.stats(),
        )


def _piped() -> str:
    return "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()


def _first_difference(streamed: Sequence[int], plain: Sequence[int]) -> int | None:
    """The 1-based place of the first token that differs."""
    pairs = itertools.zip_longest(streamed, plain)
    return next((place for place, (ours, theirs) in enumerate(pairs, 1) if ours != theirs), None)


@contextmanager
def _waiting(plan: Plan, shown: bool) -> Iterator[Callable[[], None]]:
    """Says on stderr what is waited for, and for about how long, until what it gives is called."""
    from rich.console import Console

    from weightstream.plan.shown import milliseconds

    if not shown:
        yield lambda: None
        return
    text = f"waiting for the first token; a step is predicted to take {milliseconds(plan.step_s)}"
    with Console(stderr=True).status(text) as status:
        yield status.stop
