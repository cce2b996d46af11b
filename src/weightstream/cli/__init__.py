"""The command line: one typer application. A command imports heavy libraries when it runs, so that help is quick."""

from __future__ import annotations

import inspect
import io
import re
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer import rich_utils
from typer.core import TyperArgument, TyperGroup

from weightstream import __version__
from weightstream.cli.bench import bench
from weightstream.cli.doctor import doctor
from weightstream.cli.messages import with_messages
from weightstream.cli.pack import pack
from weightstream.cli.plan import plan
from weightstream.cli.profiles import profiles
from weightstream.cli.run import run, trace
from weightstream.cli.serve import serve
from weightstream.cli.terminal import print_message
from weightstream.errors import WeightstreamError

__all__ = ["app"]

# `name=value`, or a name of several words after a verb such as "pass"
_END = r"(?![\w/\\]|[.~+-]\w)"  # no part of a path follows
_KEYWORD = re.compile(
    rf"(?<![\w/\\.~+='\"-])(?P<name>[a-z_]+)=(?P<value>'[^']*'|\"[^\"]*\"|\w+)?{_END}"
    rf"|(?P<verb>\b(?:pass|give|set|raise|leave out)(?: another)? )(?P<verb_name>[a-z]+(?:_[a-z]+)+){_END}(?!=)"
)
_LINES = re.compile(r"\s*\n\s*")
_PYTHON = re.compile(r"\bpass [a-z_]+=")
_QUOTES, _BARE = "'\"", (None, "True")


class Commands(TyperGroup):
    """Shows weightstream's errors as plain text on stderr; an error exits with 2."""

    def invoke(self, ctx: Any) -> Any:
        with suppress(ValueError):  # outside of the main thread
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exit removes temporary files
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a name that stdout cannot encode ends no command
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # nor do bytes that are not text
        try:
            return super().invoke(ctx)
        except WeightstreamError as error:
            print_message(f"error: {self._in_flags(_LINES.sub(' ', str(error).strip()), ctx)}")
            raise typer.Exit(2) from None

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command, whose help shows MODEL in capitals as its text does, and no value for a flag that takes none."""
        command = super().get_command(ctx, name)
        params: list[Any] = [] if command is None else [*command.params, command.get_help_option(ctx)]
        for param in params:
            if isinstance(param, TyperArgument):
                param.metavar = str(param.name).upper()
            elif param.is_flag or param.count:
                param.metavar = ""
            elif param.multiple:
                param.metavar = "<str>"
        return command

    def _in_flags(self, text: str, ctx: Any) -> str:
        """The text of an error with keywords replaced by flags of the command; others are marked as Python's."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        flags = {param.name: param.opts[0] for param in command.params if param.opts} if command else {}

        def flag(match: re.Match[str]) -> str:
            name, value = match["name"] or match["verb_name"], match["value"]
            if name not in flags:
                return match[0]
            argument = f" {shlex.quote(value.strip(_QUOTES))}" if value not in _BARE else ""
            return f"{match['verb'] or ''}{flags[name]}{argument}"

        text = _KEYWORD.sub(flag, text)
        return f"{text} (of weightstream.from_pretrained, in Python)" if _PYTHON.search(text) else text


def _reflowed(command: Callable[..., None]) -> str:
    """The docstring of a command, whose paragraphs a terminal of any width can break."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(re.sub(r"\n\s*", " ", paragraph) for paragraph in paragraphs)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weightstream {__version__}")
        raise typer.Exit


# dim is hard to read on light and on dark
rich_utils.STYLE_HELPTEXT = rich_utils.STYLE_OPTION_DEFAULT = rich_utils.STYLE_ERRORS_SUGGESTION = ""
rich_utils.STYLE_REQUIRED_LONG = "red"
app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)
for command in (bench, doctor, pack, plan, profiles, run, serve, trace):
    app.command(help=_reflowed(command))(with_messages(command))


@app.callback()
def _weightstream(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run a PyTorch model bigger than your GPU, faster than the link that feeds it, bit for bit."""
