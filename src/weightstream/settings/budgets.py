"""Budgets as they are given: bytes, sizes and shares of a memory, and maps of memories to these."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

# Strict: else pydantic reads `true` as 1, one byte.
_BYTE_SIZE = TypeAdapter(ByteSize, config={"strict": True})
_SIZE = re.compile(r"\s*\d*\.?\d+\s*[A-Za-z]*\s*")  # all of it: pydantic takes 6 bytes out of "6,5GiB"
_SHARE = re.compile(r"\s*(\d*\.?\d+)\s*%\s*")
_MEMORY = re.compile(r"cpu|(?:cuda:)?(\d+)")


def nbytes_of(budget: int | str | None, total_nbytes: int) -> int | None:
    """The bytes of a budget in a memory of `total_nbytes`."""
    if not isinstance(budget, str):
        return budget
    return math.floor(total_nbytes * float(budget.removesuffix("%")) / 100)


def checked(value: Any, least: int = 0) -> int | str:
    """A budget of so many bytes at least, as a number of bytes or a share; a `ValueError` says what it is not."""
    if isinstance(value, str) and (share := _SHARE.fullmatch(value)):
        if not 0 < float(share[1]) <= 100:
            raise ValueError("not a share over 0 and up to 100 %")
        return f"{float(share[1]):g}%"
    is_size = not isinstance(value, str) or _SIZE.fullmatch(value)
    with contextlib.suppress(ValidationError):  # whose words are of pydantic's types
        if is_size and (nbytes := _BYTE_SIZE.validate_python(value)) >= least:
            return nbytes
    raise ValueError(f"not a number of bytes >= {least}")


def checked_map(value: Any) -> tuple[tuple[str, int | str], ...]:
    """Pairs of "0", the index of the device, and "cpu", sorted, with their budgets."""
    if not isinstance(value, Mapping | None):
        raise ValueError("not a map of memories")
    budgets: dict[str, int | str] = {}
    for key, given in (value or {}).items():
        name = _memory(key)
        if name in budgets:
            raise ValueError(f"{key!r}: two budgets for one memory")
        try:
            budgets[name] = checked(given, least=int(name != "cpu"))
        except ValueError as error:
            raise ValueError(f"{key!r}: {given!r}: {error}") from None
    return tuple(sorted(budgets.items(), key=lambda entry: (len(entry[0]), entry[0])))  # 2 before 10


def _memory(key: Any) -> str:
    if key == "disk":
        raise ValueError("the disk takes what the others leave, without a bound: leave it out, name an offload_folder")
    match = _MEMORY.fullmatch(str(key))
    if match is None:
        raise ValueError(f"{key!r} is no memory that weightstream uses")
    return str(int(match[1])) if match[1] else "cpu"
