"""Prompts of a JSONL file, and answers as JSON lines on stdout: the batch form of `weightstream run`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

from weightstream.cli.chat import Conversation
from weightstream.errors import ConfigError
from weightstream.measure.progress import announced, say

if TYPE_CHECKING:
    from weightstream.text.engine import Inputs, TextModel
    from weightstream.text.sampling import Sampling

_QUIET_S = 2.0  # seconds after which a line on stderr says how far it is


class _Request(BaseModel):
    """A line of the file. Names are those of the flags, which hold where a line has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None


class RequestLine(NamedTuple):
    """A prompt as the model takes it, and how it is to be answered."""

    inputs: Inputs
    sampling: Sampling

    @property
    def num_positions(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.inputs["input_ids"].shape[1] + self.sampling.max_new_tokens


def read_lines(path: Path, model: TextModel, sampling: Sampling, opening: Conversation) -> list[RequestLine]:
    """The requests of a file; `-` is stdin. Raises `ConfigError` with the number of a line that is none.

    `sampling` holds where a line says nothing; `opening` comes before the messages of a line.
    """
    try:
        if str(path) == "-":
            with announced("reading --jsonl from stdin, up to its end"):
                text = sys.stdin.read()
        else:
            text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--jsonl {path}: {getattr(error, 'strerror', None) or error}") from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): JSON may hold U+2028 as it is
        if line.strip():
            try:
                found.append(_read(line, model, sampling, opening))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = "".join(f"{part}: " for part in first["loc"][:1])
                raise ConfigError(f"--jsonl {path}, line {number}: {where}{first['msg']}") from None
            except ConfigError as error:
                raise ConfigError(f"--jsonl {path}, line {number}: {error}") from None
    if not found:
        raise ConfigError(f"--jsonl {path}: it has no lines")
    return found


def _read(line: str, model: TextModel, sampling: Sampling, opening: Conversation) -> RequestLine:
    request = _Request.model_validate_json(line)
    given = request.model_dump(exclude={"prompt", "messages"}, exclude_none=True)
    if "stop" in given:
        given["stop"] = tuple(filter(None, given["stop"]))
    if (request.prompt is None) is (request.messages is None):
        raise ConfigError("it needs either prompt or messages")
    if request.prompt is not None:
        inputs = model.encode(request.prompt)
    else:
        inputs = model.encode_chat([*opening, *(request.messages or ())])
    sampling = dataclasses.replace(sampling, **given).greedy_by_default()
    return RequestLine(inputs, model.limited(inputs, sampling))


def answer_lines(model: TextModel, lines: list[RequestLine], cache_length: int) -> None:
    """Print a JSON object for each line, in their order, as soon as it is answered.

    With one `cache_length` for all, an answer does not depend on the lines before it.
    """
    said_at = time.monotonic()
    for number, line in enumerate(lines):
        answer = model.generate(line.inputs, line.sampling, cache_length=cache_length)
        found = {
            "index": number,
            "text": answer.text,
            "finish": answer.finish,
            "num_prompt_tokens": line.inputs["input_ids"].shape[1],
            "num_tokens": len(answer.ids),
            "seconds": answer.seconds,
        }
        typer.echo(json.dumps(found, ensure_ascii=False))
        sys.stdout.flush()
        if time.monotonic() - said_at > _QUIET_S:
            said_at = time.monotonic()
            say(f"{number + 1} of {len(lines)} lines are answered")
