"""`weightstream run` and `trace`: generate text while the model's weights stream, and report times and traffic."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightstream.cli import pipelines
from weightstream.cli.chat import Conversation, converse
from weightstream.cli.jsonl import answer_lines, read_lines
from weightstream.cli.messages import is_quiet, shows_bars
from weightstream.cli.terminal import (
    NOT_REPRODUCIBLE,
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
    check_writable,
    expert_line,
    numbers_of,
    prediction_text,
    print_labelled,
    require,
    speculation_line,
    takes_model,
)
from weightstream.errors import ConfigError, OffloadError
from weightstream.measure.progress import announced, lasting
from weightstream.plan.plan import Plan
from weightstream.plan.units import human, milliseconds, per_second
from weightstream.runtime.trace import Trace, total

if TYPE_CHECKING:
    from weightstream.plan.multi_device import AnyPlan
    from weightstream.runtime.streamer.stats import Stats
    from weightstream.text.engine import Inputs, Messages, TextModel
    from weightstream.text.sampling import Sampling
    from weightstream.text.stream import Answer, Piece

DEFAULT_PROMPT = "The sky is blue because"
_MOST_WAITS = 5
_MOST_ECHOED, _MOST_QUOTED = 500, 80  # characters of a prompt that are shown on a terminal, and in a pipe
_FEWEST_TIMED = 8  # tokens: the speed of fewer says little
_BUSY = 5  # times as slow as predicted: other programs use the CPU
_TEXT = "Text"


@takes_model("batch", "tokens")
def run(
    model: Model,
    loading: Loading,
    *,
    prompt: Annotated[str | None, typer.Option(help="Text to continue, or the prompt of a pipeline.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat: --prompt, or each line of stdin, is a user's message.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System prompt of a chat.", rich_help_panel=_TEXT, show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to generate at most. Default: 64.", rich_help_panel=_TEXT)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Draw tokens at this temperature. Default: 0.", rich_help_panel=_TEXT)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Draw from the likeliest tokens of this share.", rich_help_panel=_TEXT),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of drawn tokens, or of a pipeline's noise. Default of a pipeline: 0.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the text before this string. May be given several times.", rich_help_panel=_TEXT),
    ] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON object per line, with prompt or messages, and any of max_new_tokens, temperature, "
            "top_p, seed and stop. An object per answer goes to stdout. - is stdin.",
            rich_help_panel=_TEXT,
            allow_dash=True,
        ),
    ] = None,
    speculate: SpeculateMode = None,
    draft: DraftOption = None,
    out: Annotated[Path | None, typer.Option(help="File for a pipeline. Default: image.png or video.gif.")] = None,
    height: Height = None,
    width: Width = None,
    steps: Steps = None,
    frames: Frames = None,
    variant: Variant = None,
    verify: Annotated[bool, typer.Option("--verify", help="Also run without offloading, and compare.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text with MODEL, or an image or video with a pipeline, while weights stream.

    Text continues --prompt, or the text of a pipe, or else "The sky is blue because". The most likely
    tokens are taken, unless --temperature or --top-p is given. With --chat and no --prompt it is a
    conversation: each line of stdin is a message, and /help lists commands.

    The text goes to stdout, the report to stderr.
    """
    if jsonl is not None and (prompt is not None or chat or verify or as_json):
        raise ConfigError("--jsonl has prompts and prints objects: leave out --prompt, --chat, --verify and --json")
    if system is not None and not chat and jsonl is None:
        raise ConfigError("--system is for --chat and --jsonl: a text to continue has no system prompt")
    of_text: dict[str, Any] = {"system": system, "temperature": temperature, "top_p": top_p, "stop": stop or None}
    if pipelines.is_diffusers(model):
        of_text |= {"chat": chat, "max_new_tokens": max_new_tokens, "jsonl": jsonl}
        pipelines.refuse_options(model, **of_text, speculate=speculate, draft=draft)
        from weightstream.text.sampling import check_seed

        check_seed(seed)
        call = pipelines.call_of(height, width, steps, frames, prompt=prompt or _piped() or pipelines.PROMPT)
        identical = pipelines.run_pipeline(
            model, loading, call, variant=variant, out=out, seed=seed or 0, verify=verify, as_json=as_json
        )
        raise typer.Exit(1 if identical is False else 0)
    pipelines.refuse_options(model, out=out, height=height, width=width, steps=steps, frames=frames, variant=variant)
    from weightstream.text.sampling import Sampling

    given = Sampling(
        max_new_tokens=max_new_tokens or 64,
        temperature=temperature,
        top_p=top_p,
        seed=secrets.randbits(63) if verify and seed is None else seed,  # both models draw from it
        stop=tuple(map(as_text, filter(None, stop or ()))),
    )
    sampling = given.greedy_by_default()
    text_model = opened(model, loading, "weightstream run")
    options: dict[str, Any] = {**loading, "speculate": speculate, "draft": draft}
    if chat and not text_model.has_chat_template:
        raise ConfigError(f"{model} has no chat template: leave out --chat")
    if jsonl is not None:
        _answer_file(text_model, options, jsonl, given, system)
    elif chat and prompt is None and not verify and not as_json:
        _converse(text_model, options, sampling, system)
    else:
        text = as_text(prompt) if prompt is not None else _piped() or DEFAULT_PROMPT
        messages = [*_opening(system), {"role": "user", "content": text}] if chat else None
        _answer_once(text_model, options, messages or text, sampling, verify=verify, as_json=as_json)


def opened(model: str, loading: Loading, what: str) -> TextModel:
    """A model whose tokenizer is loaded, for the command `what`."""
    with lasting("loading libraries"):
        require("transformers", "transformers", what)
        from weightstream.text.engine import TextModel

    is_here = os.path.exists(os.path.expanduser(model))
    with lasting("loading the tokenizer") if is_here else nullcontext():  # a download has lines of its own
        return TextModel(model, loading["trust_remote_code"])


def _opening(system: str | None) -> Conversation:
    return [] if system is None else [{"role": "system", "content": as_text(system)}]


def _answer_once(
    model: TextModel,
    options: dict[str, Any],
    prompt: str | Messages,
    sampling: Sampling,
    *,
    verify: bool,
    as_json: bool,
) -> None:
    """Answer one prompt, and report. Exits with 1 if the plain model's tokens differ."""
    inputs = model.encode(prompt) if isinstance(prompt, str) else model.encode_chat(prompt)
    sampling = model.limited(inputs, sampling)
    context = inputs["input_ids"].shape[1] + sampling.max_new_tokens
    model.load(progress=shows_bars() and not as_json, **_planned_for(context, options))
    planned = model.streamer.plan  # measured steps correct it from now on
    if isinstance(prompt, str) and not as_json and not is_quiet():
        _show_prompt(prompt)
    answer = model.generate(inputs, sampling, on_piece=None if as_json else _show)
    if not as_json:
        typer.echo()
    report = report_of(model, inputs, answer, planned)
    if not as_json and not is_quiet():
        print_labelled(report_lines(report, answer), err=True)
    found = dict.fromkeys(("identical", "first_difference", "plain_tokens", "plain_text"))
    if verify:
        found = _verified(model, inputs, sampling, answer)
        if not as_json:
            print_labelled(_verdict_lines(found), err=True)
    if as_json:
        typer.echo(json.dumps(report | found))
    raise typer.Exit(1 if found["identical"] is False else 0)


def _verified(model: TextModel, inputs: Inputs, sampling: Sampling, answer: Answer) -> dict[str, Any]:
    """Compare the answer with the plain model's. Returns values of `--json`.

    `identical` is None if the plain model does not repeat its own tokens, or cannot have the same bits.
    """
    from weightstream.measure.comparison import verdict_of

    speculation = None if answer.decoding is None else answer.decoding.speculation
    options: dict[str, Any] = {}
    if speculation is not None and speculation.bits == "rows":  # those of passes of this width, whatever is drafted
        options = {"prompt_lookup_num_tokens": speculation.width - 1, "bits": "rows"}
    elif speculation is not None and model.streamer.device.type == "cpu":
        # there only passes of several tokens have a static KV cache, in which attention adds in another order
        options = {"cache_implementation": "static", "disable_compile": True}
    plain = _plain(model, inputs, sampling, options)
    equal, difference = verdict_of(answer.ids, plain.ids, lambda: model.generate(inputs, sampling, **options).ids)
    if equal is False and "bits" in options and speculation is not None and speculation.singles:
        equal = None  # passes of one token, which came when drafts did not pay, have other bits
    return {
        "identical": equal,
        "first_difference": difference,
        "plain_tokens": None if equal else plain.ids,
        "plain_text": None if equal else plain.text,
    }


def _verdict_lines(found: dict[str, Any]) -> dict[str, str]:
    """The verdict of `--verify`, and the text of the plain model if it differs."""
    identical, difference = found["identical"], found["first_difference"]
    if identical:
        return {"identical": "yes"}
    if difference is None:
        return {"identical": NOT_REPRODUCIBLE}
    where = f"first difference at token {difference}"
    verdict = f"no ({where})" if identical is False else f'not known: bits="rows" in passes of two widths ({where})'
    return {"identical": verdict, "plain": found["plain_text"]}


def _planned_for(context: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a load, for texts of this length unless --context says another."""
    config = options["config"]
    return options if config.context else {**options, "config": config.model_copy(update={"context": context})}


def _show_prompt(prompt: str) -> None:
    """Show what the text continues: right before it on a terminal, else on stderr, as stdout gets only new text."""
    if sys.stdout.isatty():
        cut = len(prompt) > _MOST_ECHOED
        typer.secho("… " * cut + prompt[-_MOST_ECHOED:], bold=True, nl=False)
    else:
        print_labelled({"prompt": textwrap.shorten(prompt, _MOST_QUOTED, placeholder=" …")}, err=True)


def _show(piece: Piece) -> None:
    typer.echo(piece.text, nl=False)


def _plain(model: TextModel, inputs: Inputs, sampling: Sampling, options: dict[str, Any]) -> Answer:
    """Stop offloading for good, and return the answer of the model on the device."""
    import torch

    model.streamer.remove()
    try:
        model.model.to(model.streamer.device)
        return model.generate(inputs, sampling, **options)
    except torch.OutOfMemoryError as error:
        raise OffloadError(f"--verify needs the whole model on the device, where it does not fit: {error}") from error


def _converse(model: TextModel, options: dict[str, Any], sampling: Sampling, system: str | None) -> None:
    model.encode_chat([*_opening(system), {"role": "user", "content": "?"}])  # some templates refuse system prompts
    model.load(progress=shows_bars(), **options)
    converse(functools.partial(_reply, model, sampling), _opening(system))


def _reply(model: TextModel, sampling: Sampling, messages: Messages, is_stopped: Callable[[], bool]) -> str | None:
    """Print the answer to the last message on stdout, and notes on it on stderr. None: it has no room."""
    inputs, most = model.encode_chat(messages), sampling.max_new_tokens
    num, positions = inputs["input_ids"].shape[1], model.num_positions
    if positions is not None and num + most > positions:
        need = f"{num} tokens so far + {most} of --max-new-tokens > {positions} of the model"
        typer.echo(f"[{need}: /clear starts over]", err=True)
        return None
    answer = model.generate(inputs, sampling, on_piece=_show, is_cancelled=is_stopped)
    typer.echo()
    if answer.finish == "length":
        typer.echo(f"[cut at {most} tokens: raise --max-new-tokens]", err=True)
    return answer.text


def _answer_file(model: TextModel, options: dict[str, Any], path: Path, sampling: Sampling, system: str | None) -> None:
    """Answer each line of a file. All lines are checked before the model is loaded."""
    lines = read_lines(path, model, sampling, _opening(system))
    longest = max(line.num_positions for line in lines)
    model.load(progress=shows_bars(), **_planned_for(longest, options))
    answer_lines(model, lines, longest)


def report_lines(report: dict[str, Any], answer: Answer) -> dict[str, str]:
    """A report, as labelled lines."""
    stats, num = report["stats"], len(answer.ids)
    cut = ", cut by --max-new-tokens" if answer.finish == "length" else ""
    made = f"{num} generated{cut}, the first after {report['first_token_s']:.2f} s"
    speed = f"{answer.tokens_per_s:.1f} tokens/s ({made})" if num >= _FEWEST_TIMED else f"{made}: too few for a speed"
    lines = {"plan": report["plan"], "speed": speed}
    if report["device"] != "cpu" or (answer.decoding and answer.decoding.speculation):  # on a CPU all steps are eager
        lines["decode"] = str(answer.decoding)
    held = f"{human(stats['held_nbytes']['device'])} on {report['device']}"
    waited = f"waited for {stats['stall_s']:.2f} s of {report['seconds']:.2f} s"
    moved = (
        f"{human(stats['filled_nbytes'] / stats['steps'])} per step through {held} ({stats['steps']} steps), {waited}"
    )
    lines["streamed"] = moved if stats["filled_nbytes"] else f"nothing: all weights are in {held}"
    if stats["speculation"] is not None:
        lines["drafts"] = speculation_line(stats["speculation"], answer.tokens_per_s)
    if report["experts"] is not None:
        lines["experts"] = expert_line(report["experts"])
    measured_s, predicted_s = stats["step_s"], report["predicted_s"]
    if measured_s is not None and predicted_s:
        lines["predicted"] = prediction_text(predicted_s, measured_s, is_rough=report["is_rough"], step=report["step"])
        if report["device"] == "cpu" and measured_s > _BUSY * predicted_s and (remedy := _against_spinning()):
            lines["hint"] = f"if other programs use the CPU, {remedy} can make this faster"
    if stats["unplanned_fills"]:
        lines["unplanned"] = f"{stats['unplanned_fills']} of {stats['fills']} fills"
    return lines


def _against_spinning() -> str:
    """The remedy for compute threads that spin while they wait; empty if none does."""
    import torch

    from weightstream.measure import machine

    return machine.NO_SPINNING if machine.threads_may_spin(torch.get_num_threads()) else ""


def report_of(model: TextModel, inputs: Inputs, answer: Answer, planned: AnyPlan) -> dict[str, Any]:
    """The values of `--json`. `planned` is the plan from before the run."""
    from weightstream.runtime.streamer.stats import of_cache

    streamer, stats = model.streamer, model.streamer.stats()
    return {
        "model": model.name,
        "device": str(streamer.device),
        "plan": streamer.plan.summary(),
        "step": str(planned.workload or ""),
        "predicted_s": _predicted_s(planned, answer, stats),
        "is_rough": planned.is_rough,
        "num_prompt_tokens": inputs["input_ids"].shape[1],
        "tokens": answer.ids,
        "text": answer.text,
        "finish": answer.finish,
        "seconds": answer.seconds,
        "first_token_s": answer.first_token_s,
        "tokens_per_s": answer.tokens_per_s,
        "decoding": answer.decoding and dataclasses.asdict(answer.decoding),
        "experts": of_cache(streamer.plan, stats.experts, len(answer.ids)),
        "stats": numbers_of(stats),
    }


def _predicted_s(planned: AnyPlan, answer: Answer, stats: Stats) -> float | None:
    """Seconds of a step by the plan from before the run; None if passes of several tokens were among its steps."""
    if stats.speculation is not None:
        return None
    is_captured = answer.decoding is not None and answer.decoding.replays > 0
    return planned.run_s if is_captured and isinstance(planned, Plan) else planned.step_s


def as_text(argument: str) -> str:
    """An argument of the command line, with undecodable bytes replaced."""
    return os.fsencode(argument).decode(errors="replace")


def _piped() -> str:
    """The text of a pipe; empty on a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    with announced("reading the prompt from stdin, up to its end; with --prompt it is not read"):
        return sys.stdin.read().strip()


@takes_model("batch", "tokens")
def trace(
    model: Model,
    loading: Loading,
    *,
    out: Annotated[Path, typer.Option(help="Write the trace here.")] = Path("trace.json"),
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate, one in each step.")] = 5,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = DEFAULT_PROMPT,
) -> None:
    """Record when each of MODEL's units is copied, waited for and computed, while it reads a prompt and decodes.

    The trace opens in https://ui.perfetto.dev or chrome://tracing: a row for the host, one for compute
    and one for copies. Steps run eager, as a CUDA graph does not show its units.
    """
    check_writable("--out", out)
    if pipelines.is_diffusers(model):
        raise ConfigError(f"{model} is a pipeline of diffusers: trace() of a component's streamer records its steps")
    text_model = opened(model, loading, "weightstream trace")
    inputs = text_model.encode(as_text(prompt))
    text_model.load(progress=shows_bars(), **loading)
    greedy = {**text_model.placed(inputs), "do_sample": False, "num_beams": 1}
    text_model.model.generate(**greedy, max_new_tokens=2)  # the order of the units is learned
    with text_model.streamer.trace() as recorded:
        text_model.model.generate(**greedy, max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens)
    recorded.save(out)
    _show_trace(text_model, recorded, out)


def _show_trace(model: TextModel, recorded: Trace, out: Path) -> None:
    on_device = [span for span in recorded.spans if span.row != "host"]
    steps, waits, fills = ([span for span in on_device if span.kind == kind] for kind in ("step", "wait", "fill"))
    waited: defaultdict[str, float] = defaultdict(float)  # seconds, by unit
    for wait in waits:
        waited[wait.name] += wait.seconds
    ran_s, waited_s = sum(step.seconds for step in steps), sum(waited.values())
    copied_s, nbytes = sum(fill.seconds for fill in fills), sum(fill.nbytes for fill in fills)
    decoded_s = median(step.seconds for step in steps[1:])
    lines = {
        "plan": model.streamer.plan.summary(),
        "prompt": f"1 step of {milliseconds(steps[0].seconds)}",
        "decode": f"{len(steps) - 1} steps of {milliseconds(decoded_s)} each (median)",
        "predicted": prediction_text(model.streamer.plan.step_s, decoded_s, is_rough=model.streamer.plan.is_rough),
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
