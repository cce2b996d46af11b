"""The header of a safetensors file: what it tells of each tensor, and nothing believed before it is checked.

A file is 8 bytes of little-endian header length, the header (JSON: name -> dtype, shape, data_offsets), and the data,
which the tensors fill without gap or overlap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from weightstream.codec.format import Layout
from weightstream.errors import CheckpointError, StoreError
from weightstream.store.mapping import FileMapping

_HEADER_LIMIT = 100_000_000
# fmt: off
DTYPES = MappingProxyType({
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
})
# fmt: on
CODES = MappingProxyType({name: code for code, name in DTYPES.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file; `begin` and `end` are absolute file offsets, `dtype` is torch's name.

    Of a coded one, dtype and shape are those of the weights, and the bytes are the coded ones, with their checksum.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    layout: Layout | None = None
    crc32: int | None = None


def _read(mapping: FileMapping, begin: int, end: int) -> bytes:
    try:
        mapping.populate(begin, end)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    return mapping.bytes(begin, end).numpy().tobytes()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} occurs twice")
    return found


def read_json(mapping: FileMapping, begin: int, end: int) -> dict[str, Any]:
    """The object in these bytes of a file; raises `CheckpointError`."""
    if end - begin > _HEADER_LIMIT:
        raise CheckpointError(f"{mapping.path}: {end - begin} bytes of JSON, over the limit of {_HEADER_LIMIT}")
    return parsed(_read(mapping, begin, end), f"{mapping.path}: bytes [{begin}, {end})")


def parsed(text: bytes, where: str) -> dict[str, Any]:
    """The object that is this JSON; raises `CheckpointError`."""
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if rb"\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()  # an escaped lone surrogate is no text
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} are not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: JSON holds a {type(found).__name__}, not an object")
    return found


def read_header(mapping: FileMapping) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a file, and its metadata; raises `CheckpointError`."""
    if mapping.nbytes < 8:
        raise CheckpointError(f"{mapping.path}: {mapping.nbytes} bytes, a safetensors file has at least 8")
    length = int.from_bytes(_read(mapping, 0, 8), "little")
    data_begin = 8 + length
    if data_begin > mapping.nbytes:
        raise CheckpointError(
            f"{mapping.path}: header length {length} + 8 > {mapping.nbytes} bytes of file: truncated or not safetensors"
        )
    header = read_json(mapping, 8, data_begin)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{mapping.path}: __metadata__ must hold texts, is {str(metadata)[:80]}")
    entries = {name: _entry(mapping, name, facts, data_begin) for name, facts in header.items()}
    _check_layout(mapping, entries, data_begin)
    return entries, metadata


def _check_layout(mapping: FileMapping, entries: Mapping[str, TensorEntry], data_begin: int) -> None:
    end, previous = data_begin, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            kind = "overlaps" if entry.begin < end else "leaves a gap after"
            raise CheckpointError(
                f"{mapping.path}: {entry.name!r} begins at byte {entry.begin} and {kind} {previous!r}, ending at {end}"
            )
        end, previous = entry.end, entry.name
    if end != mapping.nbytes:
        raise CheckpointError(f"{mapping.path}: tensors end at byte {end}, the file at {mapping.nbytes}")


def _entry(mapping: FileMapping, name: str, facts: Any, data_begin: int) -> TensorEntry:
    where = f"{mapping.path}: tensor {name!r}"
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: needs exactly dtype, shape and data_offsets, has {str(facts)[:80]}")
    code, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES or not hasattr(torch, DTYPES[code]):
        raise CheckpointError(f"{where}: dtype {str(code)[:40]!r} is not supported; known: {', '.join(DTYPES)}")
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: shape {str(shape)[:80]}, offsets {str(offsets)[:80]}: need integers >= 0")
    begin, end = data_begin + offsets[0], data_begin + offsets[1]
    if not begin <= end <= mapping.nbytes:
        raise CheckpointError(f"{where}: bytes [{begin}, {end}) of a file of {mapping.nbytes} bytes; truncated?")
    nbytes = nbytes_of(shape, torch_dtype(DTYPES[code]).itemsize)
    if nbytes != end - begin:
        raise CheckpointError(f"{where}: {code} {str(shape)[:80]} is {nbytes} bytes, the header gives {end - begin}")
    return TensorEntry(name=name, path=mapping.path, dtype=DTYPES[code], shape=tuple(shape), begin=begin, end=end)


def are_sizes(values: Any) -> bool:
    """Whether this is a list of integers that sizes can be."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def nbytes_of(shape: list[int], itemsize: int) -> float:
    """Returns the bytes of a tensor; infinity where torch, which counts zeros as ones in strides, would overflow."""
    count = itemsize
    for size in shape:
        count *= max(size, 1)
        if count >= 2**63:
            return float("inf")
    return 0 if 0 in shape else count


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch's name for it."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
