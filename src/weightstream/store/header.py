"""The header of a safetensors file: what it tells of each tensor, and nothing believed before it is checked.

A file is 8 bytes of little-endian header length, the header (JSON: name -> dtype, shape, data_offsets), and the data,
which the tensors fill without gap or overlap. The safetensors library checks that; what is checked here it takes. A
coded tensor stands under its own name as bytes. What these are is one text of the file's metadata.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weightstream.codec.format import VERSION, Layout, UnknownCodeError, layout_of
from weightstream.errors import CheckpointError, StoreError
from weightstream.store.mapping import FileMapping

_HEADER_LIMIT = 100_000_000
CODED = "weightstream"  # the name of that text
_FIELDS = frozenset(("dtype", "shape", "bits", "escapes", "crc32"))
_MOST_CRC32 = 2**32 - 1
_TOO_MANY = 2**63  # torch would overflow
REMEDY = "damaged: get or pack it again"
_OLD_REMEDY = "write it again from the plain model with `weightstream pack`, or use an older version of weightstream"
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
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice!r} occurs twice")
    return found


def read_json(mapping: FileMapping, begin: int, end: int) -> dict[str, Any]:
    """The object in these bytes of a file; raises `CheckpointError`, `StoreError`."""
    if end - begin > _HEADER_LIMIT:
        raise CheckpointError(f"{mapping.path}: {end - begin} bytes of JSON, over the limit of {_HEADER_LIMIT}")
    return _parsed(mapping.populated(begin, end).numpy().tobytes(), f"{mapping.path}: bytes [{begin}, {end})")


def _parsed(text: bytes, where: str) -> dict[str, Any]:
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
    """The tensors of a file, and its metadata; raises `CheckpointError`, `StoreError`."""
    data_begin = 8 + int.from_bytes(mapping.populated(0, 8).numpy().tobytes(), "little")
    header = read_json(mapping, 8, data_begin)
    try:
        with safe_open(mapping.path, "np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{mapping.path}: truncated, damaged or not safetensors: {error}") from error
    mapping.check()  # else it is another file that the library has looked at
    metadata = header.pop("__metadata__", None) or {}
    entries = {name: _entry(mapping, name, facts, data_begin) for name, facts in header.items()}
    text = metadata.pop(CODED, None)
    return entries | (_coded_entries(mapping.path, entries, text) if text is not None else {}), metadata


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
    """What the coded ones of the `stored` tensors are; raises `CheckpointError`."""
    where = f"{path}: the text {CODED!r} of its metadata"
    found = _parsed(text.encode(errors="surrogatepass"), where)
    version, tensors = found.get("codec"), found.get("tensors")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{where} is of codec {str(version)[:20]!r}, this version reads {VERSION}: update it, or pack again"
        )
    if found.keys() != {"codec", "tensors"} or not isinstance(tensors, dict):
        raise CheckpointError(f"{where} needs exactly codec and tensors, by name, has {str(found)[:80]}; {REMEDY}")
    for name in tensors.keys() - stored.keys():
        raise CheckpointError(f"{where} tells of {name[:80]!r}, which the file does not hold; {REMEDY}")
    try:
        return {name: _coded_entry(stored[name], facts) for name, facts in tensors.items()}
    except UnknownCodeError as error:
        raise CheckpointError(f"{path}: compressed tensor {error}; {_OLD_REMEDY}") from error
    except StoreError as error:
        raise CheckpointError(f"{path}: coded tensor {error}; {REMEDY}") from error


def _coded_entry(stored: TensorEntry, facts: Any) -> TensorEntry:
    name, nbytes = repr(stored.name), stored.nbytes
    if stored.dtype != "uint8" or stored.shape != (nbytes,):
        raise StoreError(f"{name} must be bytes in a row, is {stored.dtype} {list(stored.shape)}")
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
    """The text for these coded tensors; of a checksum that is not known yet, the longest that it can be."""
    tensors = {}
    for name, layout in layouts.items():
        facts = {"dtype": CODES[layout.dtype], "shape": list(shapes[name]), "bits": layout.element.symbol_bits}
        tensors[name] = facts | {"escapes": layout.num_escapes, "crc32": sums.get(name, _MOST_CRC32)}
    return json.dumps({"codec": VERSION, "tensors": tensors}, separators=(",", ":"))


def _nbytes_of(shape: list[int], itemsize: int) -> int:
    """Returns the bytes of a tensor, zeros counted as ones, as torch does in strides; too many are not counted on."""
    count = itemsize
    for size in shape:
        if (count := count * max(size, 1)) >= _TOO_MANY:
            break
    return count


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch's name for it."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name for the dtype of a tensor."""
    return str(tensor.dtype).removeprefix("torch.")
