"""A conversation with a model, a turn per line of a terminal or a pipe. It does not know how answers are made."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

Messages = list[dict[str, str]]


def converse(answer: Callable[[Messages, Callable[[], bool]], str | None]) -> None:
    """Answer each line that comes in, knowing those before, up to the end or /exit. /clear forgets them.

    `answer(messages, is_stopped)` gives what it has shown; None: there is no room for an answer.
    """
    messages: Messages = []
    for line in said():
        if line == "/exit":
            return
        if line == "/clear":
            messages = []
            continue
        asked = [*messages, {"role": "user", "content": line}]
        with _stoppable() as is_stopped:
            found = answer(asked, is_stopped)
            if is_stopped():
                typer.echo("[stopped]", err=True)
        if found is not None:
            messages = [*asked, {"role": "assistant", "content": found}]


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: once stops the answer after its token, which is kept; twice raises."""
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


def said() -> Iterator[str]:
    """The lines that come in and are not empty; a terminal shows that it waits for one."""
    lines = _typed() if sys.stdin.isatty() else sys.stdin
    yield from (line.strip() for line in lines if line.strip())


def _typed() -> Iterator[str]:
    import readline  # noqa: F401  arrow keys, in `input`

    typer.echo("/exit or Ctrl-D ends, /clear begins anew, Ctrl-C stops an answer", err=True)
    while True:
        try:
            yield input("> ")
        except EOFError:
            typer.echo(err=True)
            return
        except KeyboardInterrupt:
            typer.echo(err=True)  # what was typed is dropped
