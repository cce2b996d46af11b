"""Amounts and names as text for people: bytes, rates and seconds, and the first of many names."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from pydantic import ByteSize


def human(nbytes: float) -> str:
    """Bytes: `96.0MiB`."""
    return ByteSize(round(nbytes)).human_readable()


def exact(nbytes: int) -> str:
    """Bytes without rounding, in the largest unit that divides them: `3392MiB`."""
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    unit, size = next((each for each in units if nbytes and nbytes % each[1] == 0), ("", 1))
    return f"{nbytes // size}{unit}"


def scale(nbytes: float) -> tuple[str, int]:
    """The largest unit of which an amount is at least one, and its bytes: for a column with one heading."""
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next((unit for unit in units if nbytes >= unit[1]), units[-1])


def per_second(number: float, unit: str = "B") -> str:
    """A rate: `55.2 GB/s`, `684.0 TFLOP/s`."""
    return ByteSize(round(number)).human_readable(decimal=True, separator=" ")[:-1] + f"{unit}/s"


def milliseconds(seconds: float) -> str:
    """Seconds: `12.5 ms`, from 10 s on `13.9 s`."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 or not seconds else f"{1e6 * seconds:.3g} us"


def roughly(number: float) -> str:
    """A number that is known roughly, with two digits: `~1.6`, `~620`, `~12,000`."""
    digits = float(f"{number:.2g}")
    return f"~{digits:,.0f}" if digits >= 10 else f"~{digits:g}" if number else "0"


def rough_seconds(seconds: float) -> str:
    """Seconds that are known roughly: `~620 ms`, `~1.2 s`."""
    digits = float(f"{seconds:.2g}")
    size, unit = (1.0, "s") if digits >= 1 else (1e-3, "ms") if digits >= 1e-3 or not digits else (1e-6, "us")
    return f"{roughly(seconds / size)} {unit}"


def short(number: float) -> str:
    """A number with three digits: `0.12`, `4.56`, `78.9`, `1234`."""
    return f"{number:.{sum(number < limit for limit in (10, 100))}f}"


def rate(number: float) -> str:
    """A number per second with at least three digits, however small: `0.0123`, `4.56`, `1,234`."""
    return f"{number:.3g}" if number < 1 else short(number) if number < 1000 else f"{number:,.0f}"


def some(names: Collection[str], most: int = 4) -> str:
    """The first `most` names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(islice(names, most)) + more
