"""What a file tells of its coded tensors: as it is written, and as it is read, with every number checked.

A coded tensor stands under its own name as bytes. What these are is one text of the file's metadata.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightstream.codec.format import VERSION, Layout, layout_of
from weightstream.errors import CheckpointError, StoreError
from weightstream.store.header import CODES, DTYPES, TensorEntry, nbytes_of, parsed
from weightstream.store.mapping import FileMapping

KEY = "weightstream"
_FIELDS = frozenset(("dtype", "shape", "bits", "escapes", "crc32"))
_MOST_CRC32 = 2**32 - 1
_PIECE_NBYTES = 16 << 20
_REMEDY = "damaged: get or pack it again"


def text_of(layouts: Mapping[str, Layout], shapes: Mapping[str, Sequence[int]], sums: Mapping[str, int]) -> str:
    """The text for these tensors; of a checksum that is not known yet, the longest that it can be."""
    tensors = {
        name: {
            "dtype": CODES[layout.dtype],
            "shape": list(shapes[name]),
            **layout.record(),
            "crc32": sums.get(name, _MOST_CRC32),
        }
        for name, layout in layouts.items()
    }
    return json.dumps({"codec": VERSION, "tensors": tensors}, separators=(",", ":"))


def entries(path: Path, stored: Mapping[str, TensorEntry], text: str) -> dict[str, TensorEntry]:
    """What the coded ones of the `stored` tensors are; raises `CheckpointError`."""
    where = f"{path}: the text {KEY!r} of its metadata"
    found = parsed(text.encode(errors="surrogatepass"), where)
    version, tensors = found.get("codec"), found.get("tensors")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{where} is of codec {str(version)[:20]!r}, this version reads {VERSION}: update it, or pack again"
        )
    if found.keys() != {"codec", "tensors"} or not isinstance(tensors, dict):
        raise CheckpointError(f"{where} needs exactly codec and tensors, by name, has {str(found)[:80]}; {_REMEDY}")
    for name in tensors.keys() - stored.keys():
        raise CheckpointError(f"{where} tells of {name[:80]!r}, which the file does not hold; {_REMEDY}")
    try:
        return {name: _entry(stored[name], facts) for name, facts in tensors.items()}
    except StoreError as error:
        raise CheckpointError(f"{path}: coded tensor {error}; {_REMEDY}") from error


def _entry(stored: TensorEntry, facts: Any) -> TensorEntry:
    name, nbytes = repr(stored.name), stored.end - stored.begin
    if stored.dtype != "uint8" or stored.shape != (nbytes,):
        raise StoreError(f"{name} must be bytes in a row, is {stored.dtype} {list(stored.shape)}")
    if not isinstance(facts, dict) or facts.keys() != _FIELDS:
        raise StoreError(f"{name}: needs exactly {', '.join(sorted(_FIELDS))}, has {str(facts)[:80]}")
    code, shape, crc32 = facts["dtype"], facts["shape"], facts["crc32"]
    if not isinstance(code, str) or code not in DTYPES:
        raise StoreError(f"{name}: dtype {str(code)[:40]!r} is not known")
    is_shape = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not is_shape or (count := nbytes_of(shape, 1)) >= 2**63:
        raise StoreError(f"{name}: shape {str(shape)[:80]}: needs integers > 0, and a product below 2**63")
    if type(crc32) is not int or not 0 <= crc32 <= _MOST_CRC32:
        raise StoreError(f"{name}: crc32 {str(crc32)[:40]!r}: needs an integer of 32 bits")
    try:
        layout = layout_of(DTYPES[code], int(count), facts, nbytes)
    except StoreError as error:
        raise StoreError(f"{name}: shape {str(shape)[:80]}: {error}") from error
    return replace(stored, dtype=layout.dtype, shape=tuple(shape), layout=layout, crc32=crc32)


def verify(found: Sequence[tuple[TensorEntry, FileMapping]]) -> None:
    """Compares the checksums of those that are coded, with several threads; raises `CheckpointError`, `StoreError`."""
    parts = [(entry, mapping) for entry, mapping in found if entry.layout is not None]
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        for (entry, _), crc32 in zip(parts, pool.map(_crc32, parts), strict=True):
            if crc32 != entry.crc32:
                raise CheckpointError(
                    f"{entry.path}: tensor {entry.name!r}, bytes [{entry.begin}, {entry.end}): checksum {crc32:08x}, "
                    f"was {entry.crc32:08x} when it was packed; {_REMEDY}"
                )


def _crc32(part: tuple[TensorEntry, FileMapping]) -> int:
    entry, mapping = part
    crc32 = 0
    for begin in range(entry.begin, entry.end, _PIECE_NBYTES):
        end = min(begin + _PIECE_NBYTES, entry.end)
        mapping.populate(begin, end)
        piece: Any = mapping.bytes(begin, end).numpy()
        crc32 = zlib.crc32(piece, crc32)  # without the GIL
    return crc32
