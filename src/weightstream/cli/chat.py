"""A conversation with a model: each line of a terminal or a pipe is a turn. It does not know how answers are made."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import typer

from weightstream.cli.messages import forget_interrupts
from weightstream.measure.progress import announced

Conversation = list[dict[str, str]]
_COMMAND = re.compile(r"/\w+")  # a path has more, and is a message

_HELP = """/clear  start over, with the same system prompt
/exit   end, as does Ctrl-D
/help   show this
Ctrl-C  stop an answer, or drop a line; pressed again, end"""


def converse(answer: Callable[[Conversation, Callable[[], bool]], str | None], opening: Conversation) -> None:
    """Answer each line of stdin, with the conversation so far, up to its end or /exit. Lines with / are commands.

    `answer(messages, is_stopped)` returns the text that it has shown, or None where an answer has no room. `opening`
    are the messages before the first line.
    """
    messages = opening
    for line in input_lines():
        if line == "/exit":
            return
        if line == "/clear":
            messages = opening
            continue
        if line == "/help":
            typer.echo(_HELP, err=True)
            continue
        if _COMMAND.fullmatch(line):
            typer.echo(f"{line} is no command: /help lists them", err=True)
            continue
        with_question = [*messages, {"role": "user", "content": line}]
        with _stoppable() as is_stopped:
            text = answer(with_question, is_stopped)
            if is_stopped():
                typer.echo("[stopped]", err=True)
        if text is not None:
            messages = [*with_question, {"role": "assistant", "content": text}]


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed. A second Ctrl-C raises `KeyboardInterrupt`."""
    pressed: list[int] = []

    def note(number: int, _: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def input_lines() -> Iterator[str]:
    """The lines of stdin that are not empty; a terminal shows a prompt for each."""
    lines: Iterable[str] = ()
    if sys.stdin is not None:
        lines = _typed() if sys.stdin.isatty() else _piped()
    yield from (line.strip() for line in lines if line.strip())


def _piped() -> Iterator[str]:
    with announced("reading messages from stdin, one in each line"):
        first = sys.stdin.readline()
    yield first
    yield from sys.stdin


def _typed() -> Iterator[str]:
    import readline  # noqa: F401  so that `input` takes arrow keys

    typer.echo("/help lists commands, /exit or Ctrl-D ends", err=True)
    is_dropped = False  # the line before, by Ctrl-C
    while True:
        try:
            line = input("> ")
        except EOFError:
            typer.echo(err=True)
            return
        except KeyboardInterrupt:
            if is_dropped:
                raise
            forget_interrupts()
            typer.echo("\nCtrl-C again ends", err=True)
            is_dropped = True
        else:
            is_dropped = False
            yield line
