"""`weightstream run`: generates text while the model's weights stream, then says what that took."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from weightstream.errors import CheckpointError, ConfigError, OffloadError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from weightstream.adapters.decoder import Decoding
    from weightstream.runtime.streamer import Stats, Streamer

DEFAULT_PROMPT = "The sky is blue because"
COLUMNS = 100
DType = Literal["auto", "bfloat16", "float16", "float32"]
OffloadBackend = Literal["auto", "uva", "prefetch"]


def _switch(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text)


def _classic(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Classic flags, instead of a budget")


def run(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its repository id on the hub.")],
    prompt: Annotated[str | None, typer.Option(help="What to go on from. Read from a pipe if there is one.")] = None,
    chat: Annotated[bool, _switch("--chat", "Give the prompt as a user's message in a chat.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    verify: Annotated[bool, _switch("--verify", "Generate without offloading too, and compare the tokens.")] = False,
    as_json: Annotated[bool, _switch("--json", "Print one JSON object, and nothing else.")] = False,
    dtype: Annotated[DType, typer.Option(help="Of the weights; auto is the checkpoint's own.")] = "auto",
    trust_remote_code: Annotated[bool, _switch("--trust-remote-code", "Run code that the checkpoint brings.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; cuda if there is one.")] = None,
    device_budget: Annotated[str | None, typer.Option(help="Device memory for weights, such as 96MiB.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory for weights, such as 8GiB.")] = None,
    offload_folder: Annotated[Path | None, typer.Option(help="Where to keep weights that need converting.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; flags win over it.")] = None,
    zero_copy_params: Annotated[list[str] | None, typer.Option(help="Read matching weights from host memory.")] = None,
    offload_backend: Annotated[OffloadBackend | None, _classic("Default: by which flags are set.")] = None,
    offload_group_size: Annotated[int | None, _classic("Layers in a group; 0 is off.")] = None,
    offload_num_in_group: Annotated[int | None, _classic("How many of a group's last layers to offload.")] = None,
    offload_prefetch_step: Annotated[int | None, _classic("How many offloaded layers ahead to copy.")] = None,
    offload_params: Annotated[list[str] | None, _classic("Offload only parameters with this name segment.")] = None,
    cpu_offload_gb: Annotated[float | None, _classic("GiB of weights to place on the host.")] = None,
    cpu_offload_params: Annotated[list[str] | None, _classic("Place only parameters with this name segment.")] = None,
) -> None:
    """Generate text with MODEL, greedily, while its weights stream through the device."""
    from weightstream.config import OffloadConfig

    flags: dict[str, Any] = {
        "device_budget": device_budget,
        "host_budget": host_budget,
        "offload_folder": offload_folder,
        "zero_copy_params": zero_copy_params or None,
        "offload_backend": offload_backend,
        "offload_group_size": offload_group_size,
        "offload_num_in_group": offload_num_in_group,
        "offload_prefetch_step": offload_prefetch_step,
        "offload_params": offload_params or None,
        "cpu_offload_gb": cpu_offload_gb,
        "cpu_offload_params": cpu_offload_params or None,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    settings = OffloadConfig.from_toml(config, **given) if config else OffloadConfig.from_kwargs(**given)
    session = Session.open(
        model,
        config=settings,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        progress=sys.stderr.isatty() and not as_json,
    )
    inputs = session.encode(prompt if prompt is not None else _piped() or DEFAULT_PROMPT, chat=chat)
    tokens = session.generate(inputs, max_new_tokens, show=not as_json)
    report = session.report(inputs, tokens)
    if not as_json:
        _print(report.lines())
    difference = _first_difference(tokens.ids, session.plain(inputs, max_new_tokens)) if verify else None
    if as_json:
        verdict = {"identical": difference is None if verify else None, "first_difference": difference}
        typer.echo(json.dumps(dataclasses.asdict(report) | verdict))
    elif verify:
        found = "yes" if difference is None else f"no (first difference at token {difference})"
        _print({"identical": found})
    raise typer.Exit(0 if difference is None else 1)


class Tokens:
    """The tokens that `generate` makes, and the time of each; `text`, a transformers streamer, gets them too."""

    def __init__(self, text: Any = None) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self.decoding: Decoding | None = None  # set at the end
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
        from weightstream.plan.plan import human

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
        if stats.unplanned_fills:
            lines["unplanned"] = f"{stats.unplanned_fills} of {stats.fills} fills"
        return lines


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A model that streams, and its tokenizer."""

    name: str
    model: Any
    streamer: Streamer
    tokenizer: Any

    @classmethod
    def open(cls, name: str, *, trust_remote_code: bool, **options: Any) -> Session:
        """Load from the checkpoint `name`; `options` go to `from_pretrained`."""
        try:
            import transformers
        except ModuleNotFoundError as error:
            remedy = "pip install 'weightstream[transformers]'"
            raise UnsupportedError(f"weightstream run needs the package {error.name}: {remedy}") from error
        from weightstream import from_pretrained

        model = from_pretrained(name, trust_remote_code=trust_remote_code, **options)
        transformers.logging.set_verbosity_error()  # no advice on generation settings: they are not the user's
        if not model.can_generate():
            raise UnsupportedError(f"{name}: {type(model).__name__} does not generate text")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except Exception as error:  # whatever transformers makes of the files
            raise CheckpointError(f"{name}: no tokenizer that can be read: {error}") from error
        return cls(name=name, model=model, streamer=model.weightstream, tokenizer=tokenizer)

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

    def generate(self, inputs: dict[str, torch.Tensor], max_new_tokens: int, *, show: bool = False) -> Tokens:
        from transformers import TextStreamer

        from weightstream.adapters.generation import generate

        text = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if show else None
        tokens = Tokens(text)
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
            model=self.name,
            device=str(self.streamer.device),
            plan=self.streamer.plan.summary(),
            num_prompt_tokens=inputs["input_ids"].shape[1],
            tokens=tokens.ids,
            text=self.tokenizer.decode(tokens.ids, skip_special_tokens=True),
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


def _print(lines: dict[str, str]) -> None:
    """Labels right-aligned, so that columns line up though a label and its value stand one space apart."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for label, value in lines.items():
        folded = textwrap.fill(value, COLUMNS - 11, subsequent_indent=" " * 11)
        console.print(Text.assemble((f"{label:>9}:", "bold"), " ", folded))
