"""The command line: one typer application, A command imports what is heavy once it runs."""

from __future__ import annotations

import io
import logging
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer import rich_utils
from typer.core import TyperGroup

from weightstream import __version__
from weightstream.cli.bench import bench
from weightstream.cli.doctor import doctor
from weightstream.cli.pack import pack
from weightstream.cli.plan import plan
from weightstream.cli.run import run, trace
from weightstream.cli.terminal import tell
from weightstream.errors import WeightstreamError

__all__ = ["app"]

# `name=value`, or a name of several words that is to be given
_END = r"(?![\w/\\]|[.~+-]\w)"  # no part of a path follows
_KEYWORD = re.compile(
    rf"(?<![\w/\\.~+='\"-])(?P<name>[a-z_]+)=(?P<value>'[^']*'|\"[^\"]*\"|\w+)?{_END}"
    rf"|(?P<verb>\b(?:pass|give|set|raise|leave out)(?: another)? )(?P<verb_name>[a-z]+(?:_[a-z]+)+){_END}(?!=)"
)
_LINES = re.compile(r"\s*\n\s*")
_PYTHON = re.compile(r"\bpass [a-z_]+=")
_QUOTES, _BARE = "'\"", (None, "True")
_TALKATIVE = ("torchao", "torch.utils._pytree")  # of kernels that they do not find, while transformers imports them


class _Lines(logging.Handler):
    """Shows what takes seconds as a line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # stderr was closed
            tell(f"weightstream: {record.getMessage()}")


@contextmanager
def _lines_of_progress() -> Iterator[None]:
    """Inside, what takes seconds is said wherever stderr goes; commands show bars on a terminal alone."""
    logger, shown = logging.getLogger("weightstream.progress"), _Lines()
    before = logger.level, logger.propagate
    logger.addHandler(shown)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(shown)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class Commands(TyperGroup):
    """Shows weightstream's errors and warnings as plain text on stderr; an error exits with 2."""

    def invoke(self, ctx: Any) -> Any:
        with suppress(ValueError):  # in the main thread alone
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which removes temporary files
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a name that it cannot encode ends no command
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # nor do bytes that are no text
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        with _lines_of_progress(), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: tell(f"warning: {message}")
            try:
                return super().invoke(ctx)
            except WeightstreamError as error:
                tell(f"error: {self._in_flags(_LINES.sub(' ', str(error).strip()), ctx)}")
                raise typer.Exit(2) from None

    def _in_flags(self, text: str, ctx: Any) -> str:
        """What an error says of keywords, in flags of the command, and that the others are of Python."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        flags = {param.name: param.opts[0] for param in command.params if param.opts} if command else {}

        def flag(match: re.Match[str]) -> str:
            name, value = match["name"] or match["verb_name"], match["value"]
            if name not in flags:
                return match[0]
            given = f" {shlex.quote(value.strip(_QUOTES))}" if value not in _BARE else ""
            return f"{match['verb'] or ''}{flags[name]}{given}"

        text = _KEYWORD.sub(flag, text)
        return f"{text} (of weightstream.from_pretrained, in Python)" if _PYTHON.search(text) else text


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weightstream {__version__}")
        raise typer.Exit


# dim is hard to read on light and on dark
rich_utils.STYLE_HELPTEXT = rich_utils.STYLE_OPTION_DEFAULT = rich_utils.STYLE_ERRORS_SUGGESTION = ""
rich_utils.STYLE_REQUIRED_LONG = "red"
app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (bench, doctor, pack, plan, run, trace):
    app.command()(command)


@app.callback()
def _weightstream(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run a PyTorch model bigger than your GPU, faster than the link that feeds it, bit for bit."""
