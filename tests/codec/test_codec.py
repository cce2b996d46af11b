"""The reference codec: exact on every bit pattern, of the documented form and size, and safe with damaged bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patterns import PATTERNS, SIZES, flat, gaussian, noise, spread
from repeats import examples, only, thinned
from weightstream.codec import reference
from weightstream.codec.format import ELEMENTS, Layout, UnknownCodeError, layout_of
from weightstream.errors import StoreError

DOCS = (Path(__file__).parent / "golden.md").read_text(encoding="utf-8")
GOLDEN = re.findall(
    r"^(hashed|peaked) (\w+) escapes=(\d+) nbytes=(\d+)\n"
    r"  sha256  (\w{64})\n  head    (\w{128})\n  symbols (\w{64})\n  tail    (\w{64})$",
    DOCS,
    re.M,
)
GUARD = 77
TILE_NBYTES = 6656  # of bfloat16, after the symbols, at most
kinds = pytest.mark.parametrize("dtype", ELEMENTS)
COUNTED = ["float16", "float8_e4m3fn"]  # their escapes are a byte each


def documented() -> dict[str, Callable[..., Any]]:
    """The functions that golden.md defines."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", DOCS, re.M | re.S):
        exec(block, names)
    return names


def decoded(coded: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The reference's output. Checks that nothing next to it is written."""
    whole = torch.full((layout.raw_nbytes + 128,), GUARD, dtype=torch.uint8)
    reference.decode(coded, layout, whole[64:-64])
    assert (whole[:64] == GUARD).all()
    assert (whole[-64:] == GUARD).all()
    return whole[64:-64]


def assert_exact(data: torch.Tensor, dtype: str) -> Layout:
    layout, coded = reference.encode(data, dtype)
    assert layout.raw_nbytes == data.numel()
    assert coded.numel() == layout.nbytes
    assert torch.equal(decoded(coded, layout), data)
    assert not coded[layout.escapes_at + layout.num_escapes :].any()
    record = {"bits": layout.element.symbol_bits, "escapes": layout.num_escapes}
    assert layout_of(dtype, layout.count, record, layout.nbytes) == layout
    return layout


@pytest.mark.parametrize(("dtype", "pattern"), thinned(ELEMENTS, PATTERNS))
def test_every_bit_is_restored(dtype: str, pattern: str) -> None:
    assert_exact(PATTERNS[pattern](dtype), dtype)


@pytest.mark.parametrize(("dtype", "count"), thinned(ELEMENTS, SIZES))
def test_any_number_of_weights(dtype: str, count: int) -> None:
    assert_exact(gaussian(dtype, count), dtype)
    assert_exact(noise(dtype, count), dtype)


@examples(60)
@given(
    dtype=st.sampled_from(list(ELEMENTS)),
    count=st.integers(1, 13_000),
    centre=st.floats(0, 1),
    width=st.sampled_from([0.0, 0.4, 1.0, 2.0, 6.0, 40.0]),
    seed=st.integers(0, 2**31),
)
def test_any_distribution(dtype: str, count: int, centre: float, width: float, seed: int) -> None:
    assert_exact(spread(dtype, count, centre, width, seed), dtype)


@kinds
def test_encoding_is_deterministic(dtype: str) -> None:
    data = gaussian(dtype, 9000)
    (layout, coded), (again, coded_again) = (reference.encode(data.clone(), dtype) for _ in range(2))
    assert layout == again
    assert torch.equal(coded, coded_again)


MOST_BITS = {"bfloat16": 10.8, "float16": 14.4, "float8_e4m3fn": 7.4}


@pytest.mark.few(6)
@kinds
@pytest.mark.parametrize("scale", [1.0, 1.2, 1.41, 1.7, 64.0])
def test_gaussian_weights_take_few_bits(dtype: str, scale: float) -> None:
    layout = assert_exact(gaussian(dtype, 512 * 1024, scale), dtype)
    assert 8 * layout.nbytes / layout.count < MOST_BITS[dtype]


# The format, as docs/codec.md describes it.


@pytest.mark.parametrize(("dtype", "pattern"), thinned(ELEMENTS, ["random bits", "wide"]))
def test_the_documented_decoder(dtype: str, pattern: str) -> None:
    data = PATTERNS[pattern](dtype)
    layout, coded = reference.encode(data, dtype)
    values = documented()["decode"](bytes(coded.tolist()), dtype, layout.count, layout.num_escapes)
    assert torch.equal(flat(torch.tensor(values), dtype), data)


@pytest.mark.parametrize(
    ("name", "dtype", "escapes", "nbytes", "sha256", "head", "symbols", "tail"),
    GOLDEN,
    ids=[f"{name}-{dtype}" for name, dtype, *_ in GOLDEN],
)
def test_golden_vectors(
    name: str, dtype: str, escapes: str, nbytes: str, sha256: str, head: str, symbols: str, tail: str
) -> None:
    pattern = documented()[name]
    data = flat(torch.tensor([pattern(dtype, i) for i in range(5000)]), dtype)
    layout, coded = reference.encode(data, dtype)
    content = bytes(coded.tolist())
    symbols_at = 512 * layout.element.raw_bits
    assert (layout.num_escapes, len(content)) == (int(escapes), int(nbytes))
    assert content[:64].hex() == head
    assert content[symbols_at : symbols_at + 32].hex() == symbols
    assert content[layout.starts_at : layout.starts_at + 32].hex() == tail
    assert hashlib.sha256(content).hexdigest() == sha256


def test_golden_vectors_of_every_kind_exist() -> None:
    found = sorted((name, dtype) for name, dtype, *_ in GOLDEN)
    assert found == sorted((name, dtype) for dtype in ELEMENTS for name in ("hashed", "peaked"))


# Layouts


@pytest.mark.parametrize(
    ("dtype", "count", "num_escapes", "expected"),
    [
        # (tiles, tile_nbytes, starts_at, bases_at, escapes_at, nbytes)
        ("float16", 0, 0, (0, 7168, 0, 4, 4, 512)),
        ("float16", 1, 1, (1, 7168, 7168, 7176, 7177, 7680)),
        ("float16", 4096, 0, (1, 7168, 7168, 7176, 7177, 7680)),
        ("float16", 4097, 503, (2, 7168, 14336, 14348, 14350, 15360)),
        ("float16", 4097, 1010, (2, 7168, 14336, 14348, 14350, 15360)),
        ("float16", 4097, 1011, (2, 7168, 14336, 14348, 14350, 15872)),
        ("bfloat16", 0, 0, (0, 5120, 0, 4, 4, 512)),
        ("bfloat16", 1, 0, (1, 5120, 5120, 5128, 5132, 5632)),
        ("bfloat16", 4 * 4096, 500, (4, 5120, 20480, 20500, 20504, 21504)),
        ("bfloat16", 5 * 4096, 496, (5, 5120, 25600, 25624, 25632, 26624)),
        ("float8_e4m3fn", 8192, 5, (2, 3584, 7168, 7180, 7182, 7680)),
        (
            "float16",
            2**40,
            2**31,
            (2**28, 7168, 7168 << 28, (7168 << 28) + 2**30 + 4, 7173 * 2**28 + 4, 7181 * 2**28 + 512),
        ),
    ],
)
def test_layouts(dtype: str, count: int, num_escapes: int, expected: tuple[int, ...]) -> None:
    layout = Layout(dtype=dtype, count=count, num_escapes=num_escapes)
    places = (layout.starts_at, layout.bases_at, layout.escapes_at)
    assert (layout.num_tiles, layout.tile_nbytes, *places, layout.nbytes) == expected
    assert layout.raw_nbytes == count * ELEMENTS[dtype].nbytes


@pytest.mark.parametrize("dtype", [*ELEMENTS, "float32", "float8_e5m2", "int8", ""])
def test_there_is_one_code_for_each_dtype(dtype: str) -> None:
    known = {"bfloat16": 2, "float16": 3, "float8_e4m3fn": 3}
    for bits in range(-1, 9):
        layout = reference.encode(gaussian(dtype, 5000), dtype)[0] if bits == known.get(dtype) else None
        if layout is not None:
            assert layout_of(dtype, 5000, record(bits, layout.num_escapes)["record"], layout.nbytes) == layout
            continue
        with pytest.raises(UnknownCodeError, match=f"'{bits}' bits for each exponent of {dtype}: this version"):
            layout_of(dtype, 5000, record(bits)["record"], 11776)


GOOD: dict[str, Any] = {"dtype": "float16", "count": 5000, "record": {"bits": 3, "escapes": 39}, "nbytes": 14848}


def test_a_true_record_is_accepted() -> None:
    assert layout_of(**GOOD) == Layout(dtype="float16", count=5000, num_escapes=39)


def record(bits: object = 3, escapes: object = 39) -> dict[str, Any]:
    return {"record": {"bits": bits, "escapes": escapes}}


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (record(bits=1), "'1' bits for each exponent of float16: this version reads 2 for bfloat16, 3 for float16, 3"),
        ({"dtype": "bfloat16", **record(bits=2)}, "39 bytes of escapes are no whole words"),
        ({"dtype": "bfloat16", **record(bits=2, escapes=13316)}, "'13316' escapes among 5000 weights"),
        (
            {"dtype": "bfloat16", **record(bits=2, escapes=13312)},
            "with 13312 escapes take 24064 bytes, the file",
        ),
        (record(bits=2), "'2' bits for each exponent of float16"),
        (record(bits=5), "'5' bits for each exponent of float16"),
        (record(bits=0), "'0' bits"),
        (record(bits=-3), "'-3' bits"),
        (record(bits=3.0), "'3.0' bits"),
        (record(bits=True), "'True' bits"),
        (record(bits="3"), "'3' bits"),
        (record(bits=None), "'None' bits"),
        (record(bits="x" * 10_000), f"'{'x' * 20}' bits"),
        ({"record": {}}, "'None' bits"),
        ({"dtype": "float32"}, "'3' bits for each exponent of float32"),
        ({"dtype": "float8_e4m3fn", **record(bits=4)}, "'4' bits for each exponent of float8_e4m3fn"),
        (record(escapes=-1), "'-1' escapes among 5000 weights"),
        (record(escapes=5001), "'5001' escapes among 5000 weights"),
        (record(escapes=2**64), "'18446744073709551616' escapes among 5000 weights"),
        (record(escapes=39.0), "'39.0' escapes"),
        (record(escapes=False), "'False' escapes"),
        (record(escapes="39"), "'39' escapes"),
        (record(escapes=None), "'None' escapes"),
        ({"record": {"bits": 3}}, "'None' escapes"),
        ({"count": 2**40, **record(escapes=2**32)}, "'4294967296' escapes among 1099511627776 weights"),
        (record(escapes=600), "with 600 escapes take 15360 bytes, the file has 14848"),
        (
            {"dtype": "float8_e4m3fn"},
            "5000 weights of float8_e4m3fn with 39 escapes take 7680 bytes, the file",
        ),
        ({"count": 9000}, "9000 weights of float16 with 39 escapes take 22016 bytes, the file has 14848"),
        ({"nbytes": 14847}, "take 14848 bytes, the file has 14847"),
        ({"nbytes": 15360}, "take 14848 bytes, the file has 15360"),
        ({"nbytes": 0}, "take 14848 bytes, the file has 0"),
    ],
)
def test_a_false_record_is_refused(lie: dict[str, Any], text: str) -> None:
    with pytest.raises(StoreError, match=re.escape(text)):
        layout_of(**GOOD | lie)


# Windows


def best_window(counts: list[int], num_symbols: int) -> tuple[int, int]:
    """Base and escapes, by trying all."""
    places = range(len(counts) - num_symbols + 1)
    base = min(places, key=lambda base: (-sum(counts[base : base + num_symbols]), base))
    return base, sum(counts) - sum(counts[base : base + num_symbols])


@examples(100)
@given(
    dtype=st.sampled_from(COUNTED),
    most=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_windows_are_the_smallest_with_the_fewest_escapes(dtype: str, most: int, seed: int) -> None:
    shape = 6, 2 ** ELEMENTS[dtype].exponent_bits
    counts = torch.randint(0, most + 1, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    bases, escapes = reference.windows(counts, dtype)
    expected = [best_window(row, 7) for row in counts.tolist()]
    assert list(zip(bases.tolist(), escapes.tolist(), strict=True)) == expected


def dense_nbytes(counts: list[int], base: int) -> int:
    """The part of a tile after its symbols."""
    first = [base + 3, base - 1, base - 2]
    second = [base + 4, *range(base - 8, base - 2)]
    left = {exponent: count for exponent, count in enumerate(counts) if not base <= exponent <= base + 2}
    num_bits = 2 * sum(left.values())
    num_bits += 3 * sum(count for exponent, count in left.items() if exponent not in first)
    num_bits += 8 * sum(count for exponent, count in left.items() if exponent not in first + second)
    return -(-num_bits // 32) * 4


@examples(60)
@given(
    width=st.sampled_from([1, 3, 8, 20, 256]),
    first=st.integers(0, 255),
    most=st.sampled_from([1, 4, 400]),
    seed=st.integers(0, 2**31),
)
def test_bases_of_bfloat16_are_the_smallest_with_the_fewest_bytes(width: int, first: int, most: int, seed: int) -> None:
    counts = torch.zeros(2, 256, dtype=torch.int32)
    there = counts[:, first : first + width]
    there += torch.randint(0, most + 1, there.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    bases, nbytes = reference.windows(counts, "bfloat16")
    expected = []
    for row in counts.tolist():
        every = [dense_nbytes(row, base) for base in range(254)]
        expected.append((every.index(min(every)), min(every)))
    assert list(zip(bases.tolist(), nbytes.tolist(), strict=True)) == expected


@kinds
def test_histograms_count_every_weight_once(dtype: str) -> None:
    element, data = ELEMENTS[dtype], spread(dtype, 9001, 0.3, 3.0, seed=3)
    values = data.view({1: torch.uint8, 2: torch.int16}[element.nbytes]).tolist()
    exponents = [value >> element.mantissa_bits & 2**element.exponent_bits - 1 for value in values]
    counts = reference.histograms(data, dtype).tolist()
    tiles = [exponents[at : at + 4096] for at in (0, 4096, 8192)]
    assert counts == [[tile.count(value) for value in range(2**element.exponent_bits)] for tile in tiles]


# Damage


@kinds
@pytest.mark.parametrize("seed", only(range(20), *range(6)))
def test_damaged_bytes_give_wrong_weights_and_no_error(dtype: str, seed: int) -> None:
    data = spread(dtype, 9000, 0.5, 2.5, seed)
    layout, coded = reference.encode(data, dtype)
    for begin, end in [(0, layout.starts_at), (layout.starts_at, layout.bases_at), (layout.bases_at, layout.nbytes)]:
        damaged = coded.clone()
        damaged[begin:end] = noise("float8_e4m3fn", end - begin, seed)
        decoded(damaged, layout)  # indexes are checked: a read out of bounds raises
    planes = noise("float8_e4m3fn", layout.nbytes, seed)
    assert not torch.equal(decoded(planes, layout), data)
    decoded(torch.full_like(coded, 255), layout)


@pytest.mark.few(1)
@kinds
def test_a_flipped_bit_changes_exactly_the_affected_weights(dtype: str) -> None:
    """Every bit of sign, mantissa and symbols counts: if it is flipped, one weight changes, or those that share its
    escapes."""
    data = spread(dtype, 4096, 0.5, 0.5, 0)  # nearly no escapes
    layout, coded = reference.encode(data, dtype)
    source = torch.Generator().manual_seed(3)
    for place in torch.randint(0, 8 * layout.starts_at, (200,), generator=source).tolist():
        damaged = coded.clone()
        damaged[place // 8] ^= 1 << place % 8
        assert not torch.equal(decoded(damaged, layout), data)


def starts_of(coded: torch.Tensor, layout: Layout) -> torch.Tensor:
    return coded[layout.starts_at : layout.bases_at].view(torch.int32)


@pytest.mark.stress
@examples(200)
@given(start=st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-10, 2000)), dtype=st.sampled_from(COUNTED))
def test_escapes_are_read_at_their_place(start: int, dtype: str) -> None:
    """As docs/codec.md says: a start with too few bytes after it is read as the last one with enough."""
    layout, coded = reference.encode(spread(dtype, 8192, 0.5, 3.0, 1), dtype)
    total = layout.num_escapes - int(starts_of(coded, layout)[1])  # of the second tile
    assert 0 < total < layout.num_escapes < 8192
    sound = max(0, min(start, layout.num_escapes - total))
    starts_of(coded, layout)[1] = start
    found = decoded(coded, layout)
    starts_of(coded, layout)[1] = sound
    assert torch.equal(found, decoded(coded, layout))


@examples(60)
@given(start=st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-10, 12_000)))
def test_the_part_of_bfloat16_after_the_symbols_is_read_at_its_place(start: int) -> None:
    """A start out of bounds counts as the nearest word, and bytes out of bounds as zeros."""
    layout, coded = reference.encode(spread("bfloat16", 8192, 0.5, 3.0, 1), "bfloat16")
    starts_of(coded, layout)[1] = start
    found = decoded(coded, layout)
    begin = max(0, min(start // 4 * 4, layout.num_escapes))
    rest = coded[layout.escapes_at + begin :][: layout.num_escapes - begin]
    alone = Layout(dtype="bfloat16", count=4096, num_escapes=TILE_NBYTES)
    tile = torch.zeros(alone.nbytes, dtype=torch.uint8)
    tile[: alone.starts_at] = coded[alone.starts_at : 2 * alone.starts_at]
    tile[alone.bases_at] = coded[layout.bases_at + 1]
    tile[alone.escapes_at :][: min(len(rest), TILE_NBYTES)] = rest[:TILE_NBYTES]
    assert torch.equal(found[8192:], decoded(tile, alone))


@pytest.mark.parametrize("dtype", COUNTED)
def test_more_escape_symbols_than_escapes_read_none(dtype: str) -> None:
    layout, coded = reference.encode(spread(dtype, 4096, 0.5, 3.0, 1), dtype)
    coded[512 * layout.element.raw_bits : layout.starts_at] = 255  # all are escape symbols
    assert 0 < layout.num_escapes < 4096
    found = decoded(coded, layout)
    coded[layout.escapes_at :] = 0
    assert torch.equal(found, decoded(coded, layout))
