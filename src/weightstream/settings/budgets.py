"""Budgets as users write them: a number of bytes, a size, a share of a memory, or a map from memories to budgets."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ByteSize, TypeAdapter, ValidationError

# Strict: else pydantic reads `true` as 1, one byte.
_BYTE_SIZE = TypeAdapter(ByteSize, config={"strict": True})
_SIZE = re.compile(r"\s*\d*\.?\d+\s*[A-Za-z]*\s*")  # must match the whole text: pydantic reads "6,5GiB" as 6 bytes
_SHARE = re.compile(r"\s*(\d*\.?\d+)\s*%\s*")
_MEMORY = re.compile(r"cpu|(?:cuda:)?(\d+)")


def budget_nbytes(budget: int | str | None, total_nbytes: int) -> int | None:
    """The bytes of a budget from `checked`: text is a share of the `total_nbytes` of a memory. None: no budget."""
    if not isinstance(budget, str):
        return budget
    return math.floor(total_nbytes * float(budget.removesuffix("%")) / 100)


def checked(value: Any, least: int = 0) -> int | str:
    """Parse a budget of at least `least` bytes into a number of bytes or a share; raises `ValueError`."""
    if isinstance(value, str) and (share := _SHARE.fullmatch(value)):
        if not 0 < float(share[1]) <= 100:
            raise ValueError("not a share over 0 and up to 100 %")
        return f"{float(share[1]):g}%"
    is_size = not isinstance(value, str) or _SIZE.fullmatch(value)
    with contextlib.suppress(ValidationError):  # the text of pydantic's error is about its types
        if is_size and (nbytes := _BYTE_SIZE.validate_python(value)) >= least:
            return nbytes
    raise ValueError(f"not a number of bytes >= {least}")


class MemoryBudget(NamedTuple):
    """A memory, "cpu" or the index of a GPU such as "0", and its budget in bytes or as a share such as "80%"."""

    memory: str
    budget: int | str


def checked_map(value: Any) -> tuple[MemoryBudget, ...]:
    """Parse a map of memories to budgets: sorted by memory, which is the index of a GPU or "cpu"."""
    if not isinstance(value, Mapping | None):
        raise ValueError("not a map of memories")
    budgets: dict[str, int | str] = {}
    for key, budget in (value or {}).items():
        name = _memory(key)
        if name in budgets:
            raise ValueError(f"{key!r}: two budgets for one memory")
        try:
            budgets[name] = checked(budget, least=int(name != "cpu"))
        except ValueError as error:
            raise ValueError(f"{key!r}: {budget!r}: {error}") from None
    entries = itertools.starmap(MemoryBudget, budgets.items())
    return tuple(sorted(entries, key=lambda entry: (len(entry.memory), entry.memory)))  # 2 before 10


def _memory(key: Any) -> str:
    if key == "disk":
        raise ValueError("the disk takes the rest, without a bound: leave it out, and set offload_folder")
    match = _MEMORY.fullmatch(str(key))
    if match is None:
        raise ValueError(f"{key!r} is no memory that weightstream uses: name the index of a GPU, or cpu")
    return str(int(match[1])) if match[1] else "cpu"
