"""The log of a program that configures no logging: Python's last resort shows warnings, but not whose they are."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

_NAME = "weightstream"


class _LastResort(logging.Handler):
    """Writes lines to stderr with the name of the library if no other handler gets them."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or self._is_shown(record.name):
            return
        with suppress(OSError, ValueError):  # stderr was closed
            print(f"{_NAME}: {self.format(record)}", file=sys.stderr)

    def _is_shown(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


_LAST_RESORT = _LastResort()  # one, as two would take each other for the program's


def prefix_last_resort() -> None:
    """Make lines of the log begin with the name of the library where nothing else shows them."""
    logging.getLogger(_NAME).addHandler(_LAST_RESORT)
