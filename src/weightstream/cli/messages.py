"""What commands write to stderr besides errors: progress, warnings, and the log at the level that flags choose."""

from __future__ import annotations

import errno
import functools
import inspect
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import Parameter
from threading import current_thread, main_thread
from types import FrameType
from typing import Annotated, Any

import typer

from weightstream.cli.terminal import print_message
from weightstream.errors import WeightstreamError
from weightstream.measure.progress import say

_Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, help="Show the log, too. -vv: all that a plan depends on.", show_default=False
    ),
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, no warnings and no report.")]
_LOGGER = "weightstream"
_NO_BARS = "TQDM_DISABLE"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota, a limit of file size
_TALKATIVE = (  # they log missing kernels while transformers imports them
    "torchao",
    "torch.utils._pytree",
)


class _Lines(logging.Handler):
    """Shows log records as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # stderr was closed
            print_message(f"weightstream: {record.getMessage()}")
            if record.exc_info:
                print_message(logging.Formatter().formatException(record.exc_info))


def is_quiet() -> bool:
    """Whether stderr gets errors only."""
    return not logging.getLogger(_LOGGER).isEnabledFor(logging.WARNING)


def shows_bars() -> bool:
    """Whether stderr is a terminal that may show bars."""
    return sys.stderr.isatty() and not is_quiet()


@contextmanager
def messages(level: int) -> Iterator[None]:
    """Inside, the log of weightstream goes to stderr from this level on, and progress where warnings do.

    Progress comes as lines, also into a pipe or file; bars are shown on a terminal only, also those of libraries.
    """
    logger, progress = logging.getLogger(_LOGGER), logging.getLogger(f"{_LOGGER}.progress")
    before = [(each, each.level, each.propagate) for each in (logger, progress)]
    shown = _Lines(level if level > logging.WARNING else min(level, logging.INFO))
    logger.addHandler(shown)
    progress.addHandler(shown)
    logger.setLevel(level)
    progress.setLevel(logging.INFO)  # else lines of progress are printed
    progress.propagate = False
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    bars = os.environ.get(_NO_BARS)
    if level > logging.WARNING or not sys.stderr.isatty():
        os.environ[_NO_BARS] = "1"
    try:
        with warnings.catch_warnings():
            if level > logging.WARNING:
                warnings.simplefilter("ignore")
            warnings.showwarning = lambda message, *_, **__: print_message(f"warning: {message}")
            yield
    finally:
        if bars is None:
            os.environ.pop(_NO_BARS, None)
        else:
            os.environ[_NO_BARS] = bars
        for each, old_level, propagates in before:
            each.removeHandler(shown)
            each.setLevel(old_level)
            each.propagate = propagates


class _Interrupts:
    """Handles SIGINT as Python does, and remembers it."""

    def __init__(self) -> None:
        self.are_pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.are_pending = True
        signal.default_int_handler(number, frame)


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for any error after Ctrl-C: modules that load may turn one into the other."""
    # a job in the background ignores it, and another thread cannot change it
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts = _Interrupts()
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        if interrupts.are_pending:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_interrupts() -> None:
    """Later errors have nothing to do with the Ctrl-C so far, which did not mean to end the command."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Interrupts):
        handler.are_pending = False


def with_messages(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the flags -q and -v. It says at once that it loads libraries. Only -v shows tracebacks."""
    signature = inspect.signature(command, eval_str=True)
    flags = [
        Parameter("quiet", Parameter.KEYWORD_ONLY, default=False, annotation=_Quiet),
        Parameter("verbose", Parameter.KEYWORD_ONLY, default=0, annotation=_Verbose),
    ]

    @functools.wraps(command)
    def run(*args: Any, quiet: bool, verbose: int, **values: Any) -> None:
        levels = (logging.WARNING, logging.INFO, logging.DEBUG)
        with messages(logging.ERROR if quiet else levels[min(verbose, 2)]):
            if "torch" not in sys.modules:  # the import takes a second, or half a minute on a busy machine
                say("loading libraries")
            try:
                with _interrupts_kept():
                    command(*args, **values)
            except (WeightstreamError, typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
                raise
            except Exception as error:  # of a library, or a defect
                if verbose:
                    raise
                if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
                    print_message(f"error: cannot write: {os.strerror(error.errno)}")
                    raise typer.Exit(1) from None
                what = str(error).strip().partition("\n")[0]
                print_message(f"error: {type(error).__name__}: {what}; with -v this shows where, for a report")
                raise typer.Exit(1) from None

    given = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=[*given, *flags])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run
