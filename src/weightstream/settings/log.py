"""The log of a program that configures no logging: Python's last resort shows warnings, but not whose they are."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

_NAME = "weightstream"


class _LastResort(logging.Handler):
    """Writes lines to stderr with the name of the library, as long as there is no other handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers or logging.getLogger(_NAME).handlers != [self] or sys.stderr is None:
            return
        with suppress(OSError, ValueError):  # stderr was closed
            print(f"{_NAME}: {self.format(record)}", file=sys.stderr)


def prefix_last_resort() -> None:
    """Make lines of the log begin with the name of the library where nothing else shows them."""
    logging.getLogger(_NAME).addHandler(_LastResort())
