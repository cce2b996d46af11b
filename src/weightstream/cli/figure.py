"""A figure: axes on white, readable in a light page and in a dark one, and its file. Knows nothing of what is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightstream.errors import ConfigError, UnsupportedError


def require_matplotlib() -> None:
    """Raise `UnsupportedError` with the remedy, before anything that takes time."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnsupportedError("--plot needs matplotlib: pip install 'weightstream[plot]'") from error


def new_figure(width: float = 8, height: float = 4.5) -> tuple[Any, Any]:
    """A figure of inches, and its axes. No window, and no state outside of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    return figure, figure.add_subplot()


def save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # a folder that is not there, an ending that is no picture's
        raise ConfigError(f"--plot {path}: {error}; name a .png file that can be written") from error
