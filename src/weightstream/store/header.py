"""The header of a safetensors file: the facts about each tensor, all checked before use.

A file is 8 bytes of little-endian header length, the header (JSON: name -> dtype, shape, data_offsets), and the data,
which the tensors fill without gap or overlap. The safetensors library checks that when it opens the file. This module
checks in addition what the library lets pass, such as names that occur twice, dtypes that torch lacks, and shapes too
large for torch.

A compressed tensor is stored as bytes under its own name. The metadata of the file has one JSON text, under the key
`CODED`, that describes all compressed tensors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from weightstream.codec.format import VERSION, Layout, UnknownCodeError, layout_of
from weightstream.errors import CheckpointError, StoreError
from weightstream.store.mapping import FileMapping

_HEADER_LIMIT = 100_000_000
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
IS_LFS_POINTER = "is a pointer of git-lfs, not the file: run `git lfs pull` in its folder"
CODED = "weightstream"  # the key in the metadata of the text about compressed tensors
_FIELDS = frozenset(("dtype", "shape", "bits", "escapes", "crc32"))
_MOST_CRC32 = 2**32 - 1
_TOO_MANY = 2**63  # bytes or weights of a tensor: torch's int64 would overflow
_PACK_AGAIN = "write it again from the uncompressed model with `weightstream pack`"
REMEDY = f"damaged: download it again, or {_PACK_AGAIN}"
_OLD_REMEDY = f"{_PACK_AGAIN}, or use the version of weightstream that wrote it"
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

    For a compressed tensor, dtype and shape are those of the weights; range and checksum are of its compressed bytes.
    """

    name: str
    mapping: FileMapping
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    layout: Layout | None = None
    crc32: int | None = None

    @property
    def path(self) -> Path:
        return self.mapping.path

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice!r} occurs twice")
    return unique


def read_json(mapping: FileMapping, begin: int, end: int) -> dict[str, Any]:
    """Parse the JSON object in bytes [begin, end) of a file; raises `CheckpointError`, `StoreError`."""
    if end - begin > _HEADER_LIMIT:
        raise CheckpointError(f"{mapping.path}: {end - begin} bytes of JSON, over the limit of {_HEADER_LIMIT}")
    return _parsed(mapping.populated(begin, end).numpy().tobytes(), f"{mapping.path}: bytes [{begin}, {end})")


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; raises `CheckpointError`, which begins with `where`."""
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if rb"\ud" in text.lower():
            json.dumps(parsed, ensure_ascii=False).encode()  # fails for a lone surrogate, which is no text
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} are not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: JSON holds a {type(parsed).__name__}, not an object")
    return parsed


class Header(NamedTuple):
    """The tensors of a file by name, and its metadata."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file has not been downloaded by git-lfs."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def read_header(mapping: FileMapping) -> Header:
    """Read and check the header of a file; raises `CheckpointError`, `StoreError`."""
    start = mapping.populated(0, min(mapping.nbytes, len(_LFS_POINTER))).numpy().tobytes()
    if not start:
        raise CheckpointError(f"{mapping.path} is empty: download it again")
    if start == _LFS_POINTER:
        raise CheckpointError(f"{mapping.path} {IS_LFS_POINTER}")
    data_begin = 8 + int.from_bytes(start[:8], "little")
    if data_begin > mapping.nbytes:
        raise CheckpointError(
            f"{mapping.path}: truncated, damaged or not safetensors: its header would end at byte {data_begin}, and "
            f"the file has {mapping.nbytes}"
        )
    header = read_json(mapping, 8, data_begin)
    try:
        with safe_open(mapping.path, "np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{mapping.path}: truncated, damaged or not safetensors: {error}; download it again"
        ) from error
    mapping.check()  # the library may have opened another file under this path
    metadata = header.pop("__metadata__", None) or {}
    entries = {name: _entry(mapping, name, facts, data_begin) for name, facts in header.items()}
    text = metadata.pop(CODED, None)
    return Header(entries | (_coded_entries(mapping.path, entries, text) if text is not None else {}), metadata)


def _entry(mapping: FileMapping, name: str, facts: Any, data_begin: int) -> TensorEntry:
    where = f"{mapping.path}: tensor {name!r}"
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: needs exactly dtype, shape and data_offsets, has {str(facts)[:80]}")
    code, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if code not in DTYPES:
        raise CheckpointError(f"{where}: dtype {code!r} is not supported; known: {', '.join(DTYPES)}")
    if _nbytes_of(shape, torch_dtype(DTYPES[code]).itemsize) >= _TOO_MANY:
        raise CheckpointError(f"{where}: {code} {str(shape)[:80]} is more than torch can hold")
    begin, end = (data_begin + offset for offset in offsets)
    return TensorEntry(name=name, mapping=mapping, dtype=DTYPES[code], shape=tuple(shape), begin=begin, end=end)


def _coded_entries(path: Path, stored: Mapping[str, TensorEntry], text: str) -> dict[str, TensorEntry]:
    """The entries of the compressed tensors among the `stored` ones; raises `CheckpointError`."""
    where = f"{path}: the text {CODED!r} of its metadata"
    record = _parsed(text.encode(errors="surrogatepass"), where)
    version, tensors = record.get("codec"), record.get("tensors")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"{where} is of codec {str(version)[:20]!r}, this version reads {VERSION}: {_OLD_REMEDY}")
    if record.keys() != {"codec", "tensors"} or not isinstance(tensors, dict):
        raise CheckpointError(f"{where} needs exactly codec and tensors, by name, has {str(record)[:80]}; {REMEDY}")
    for name in tensors.keys() - stored.keys():
        raise CheckpointError(f"{where} describes {name[:80]!r}, which the file does not hold; {REMEDY}")
    try:
        return {name: _coded_entry(stored[name], facts) for name, facts in tensors.items()}
    except UnknownCodeError as error:
        raise CheckpointError(f"{path}: compressed tensor {error}; {_OLD_REMEDY}") from error
    except StoreError as error:
        raise CheckpointError(f"{path}: compressed tensor {error}; {REMEDY}") from error


def _coded_entry(stored: TensorEntry, facts: Any) -> TensorEntry:
    name, nbytes = repr(stored.name), stored.nbytes
    if stored.dtype != "uint8" or stored.shape != (nbytes,):
        raise StoreError(f"{name} must be flat bytes, is {stored.dtype} {list(stored.shape)}")
    if not isinstance(facts, dict) or facts.keys() != _FIELDS:
        raise StoreError(f"{name}: needs exactly {', '.join(sorted(_FIELDS))}, has {str(facts)[:80]}")
    code, shape, crc32 = facts["dtype"], facts["shape"], facts["crc32"]
    if not isinstance(code, str) or code not in DTYPES:
        raise StoreError(f"{name}: dtype {str(code)[:40]!r} is not known")
    is_shape = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not is_shape or (count := _nbytes_of(shape, 1)) >= _TOO_MANY:
        raise StoreError(f"{name}: shape {str(shape)[:80]}: needs integers > 0, and a product below 2**63")
    if type(crc32) is not int or not 0 <= crc32 <= _MOST_CRC32:
        raise StoreError(f"{name}: crc32 {str(crc32)[:40]!r}: needs an integer of 32 bits")
    try:
        layout = layout_of(DTYPES[code], count, facts, nbytes)
    except UnknownCodeError as error:
        raise UnknownCodeError(f"{name}: {error}") from error
    except StoreError as error:
        raise StoreError(f"{name}: shape {str(shape)[:80]}: {error}") from error
    return replace(stored, dtype=layout.dtype, shape=tuple(shape), layout=layout, crc32=crc32)


def coded_text(layouts: Mapping[str, Layout], shapes: Mapping[str, Sequence[int]], sums: Mapping[str, int]) -> str:
    """The text that describes these compressed tensors.

    A checksum that `sums` lacks is written as the largest one, so that the size of the header is known before any
    weight is compressed.
    """
    tensors = {}
    for name, layout in layouts.items():
        facts = {"dtype": CODES[layout.dtype], "shape": list(shapes[name]), "bits": layout.element.symbol_bits}
        tensors[name] = facts | {"escapes": layout.num_escapes, "crc32": sums.get(name, _MOST_CRC32)}
    return json.dumps({"codec": VERSION, "tensors": tensors}, separators=(",", ":"))


def _nbytes_of(shape: list[int], itemsize: int) -> int:
    """Bytes of a tensor; stops counting at `_TOO_MANY`.

    A size of 0 counts as 1: torch computes strides like that, and they could overflow even if a tensor has no elements.
    """
    count = itemsize
    for size in shape:
        if (count := count * max(size, 1)) >= _TOO_MANY:
            break
    return count


def torch_dtype(name: str) -> torch.dtype:
    """The dtype with this name in torch."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(tensor: torch.Tensor) -> str:
    """The name in torch of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")
