"""The command `weightstream`, also as `python -m weightstream`."""

import os
import signal
from threading import current_thread, main_thread
from types import FrameType

_INTERRUPTED = 128 + signal.SIGINT  # as when Ctrl-C ends a command that runs


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback even while its modules load."""
    # a job in the background ignores it, and another thread cannot change it
    is_default = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _leave)
    from typer.main import get_command

    from weightstream.cli import app

    command = get_command(app)
    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command(prog_name="weightstream")


def _leave(*_: int | FrameType | None) -> None:
    os._exit(_INTERRUPTED)  # an exception could be lost in an import, or raised again as another one


if __name__ == "__main__":
    main()
