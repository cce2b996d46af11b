"""Budget: how much of a memory weights may take, in bytes or as a share of it, and accelerate's map of two of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, PlainSerializer, TypeAdapter, ValidationError

# Strict: else pydantic reads `true` as 1, one byte.
_BYTE_SIZE = TypeAdapter(ByteSize, config={"strict": True})
_SIZE = re.compile(r"\s*\d*\.?\d+\s*[A-Za-z]*\s*")
_SHARE = re.compile(r"\s*(\d*\.?\d+)\s*%\s*")
_MEMORY = re.compile(r"cpu|(?:cuda:)?(\d+)")


def nbytes_of(budget: int | str | None, total_nbytes: int) -> int | None:
    """The bytes of a budget in a memory of `total_nbytes`."""
    if not isinstance(budget, str):
        return budget
    return math.floor(total_nbytes * float(budget.removesuffix("%")) / 100)


def _checked(value: Any, least: int = 0) -> int | str:
    if isinstance(value, str) and (share := _SHARE.fullmatch(value)):
        if not 0 < float(share[1]) <= 100:
            raise ValueError("not a share over 0 and up to 100 %")
        return f"{float(share[1]):g}%"
    if isinstance(value, str) and not _SIZE.fullmatch(value):
        raise ValueError("not a number of bytes with a unit")  # pydantic reads a beginning: "6,5GiB" as 6 bytes
    if (nbytes := _BYTE_SIZE.validate_python(value)) < least:
        raise ValueError("not greater than 0")
    return nbytes


def _checked_map(value: Any) -> tuple[tuple[str, int | str], ...]:
    """Pairs of "0", the index of the device, and "cpu", sorted, with their budgets."""
    if not isinstance(value, Mapping | None):
        raise ValueError("not a map of memories")
    budgets: dict[str, int | str] = {}
    for key, given in (value or {}).items():
        name = _memory(key)
        if name in budgets or (name != "cpu" and budgets.keys() - {"cpu"}):
            raise ValueError("more than one device: weightstream computes on one, with the whole model")
        try:
            budgets[name] = _checked(given, least=name != "cpu")
        except ValueError as error:
            cause = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise ValueError(f"{key!r}: {given!r}: {cause}") from None
    return tuple(sorted(budgets.items()))


def _memory(key: Any) -> str:
    if key == "disk":
        raise ValueError("the disk takes what the others leave, without a bound: leave it out, name an offload_folder")
    match = _MEMORY.fullmatch(str(key))
    if match is None:
        raise ValueError(f"{key!r} is no memory that weightstream uses")
    return str(int(match[1])) if match[1] else "cpu"


_Size = 'bytes, a size such as "12GiB", or a share such as "80%"'  # what an error tells the user to give
Budget = Annotated[int | str | None, BeforeValidator(lambda v: None if v is None else _checked(v)), _Size]
BudgetOverZero = Annotated[int | str | None, BeforeValidator(lambda v: None if v is None else _checked(v, 1)), _Size]
MaxMemory = Annotated[
    tuple[tuple[str, int | str], ...],  # hashable
    BeforeValidator(_checked_map),
    PlainSerializer(dict, return_type=dict[str, int | str]),
    'the budget of one device and of the host, such as {0: "10GiB", "cpu": "30GiB"}',
]
