"""Kernels that pick rows of packed matrices and unpack them: the bits of the libraries' functions, from rows anywhere.

Without a GPU they run in Triton's interpreter, with tiles of other sizes: a program takes it some 10 ms.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter

from packed_rig import CASES as PACKED
from repeats import only, thinned
from triton_counting import COMPILES_NOTHING, PRINTS_COUNTS
from unpack_launches import launches_from_now
from unpack_references import REFERENCES, assert_same_bits, by_compressed_tensors, by_compressed_tensors_float8
from watching import Watch
from weightstream.codec import unpack_kernels, unpacking
from weightstream.codec.unpacking import unpack_rows, unpack_rows_into, unpack_stacks, unpacks_equally
from weightstream.errors import InvariantError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
STEPS = unpack_kernels.UNPACK_SHAPE["STEPS"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FLOAT8_SCALES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, E8M0]
Leaves = tuple[torch.Tensor, ...]
interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter's accesses can be watched")


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fewer programs for the interpreter, which computes with NumPy."""
    if DEVICE == "cpu":
        monkeypatch.setattr(unpack_kernels, "MXFP4_SHAPE", {"TILES": 32, "GROUPS": 16, "num_warps": 4})
        monkeypatch.setattr(unpack_kernels, "UNPACK_SHAPE", {"ROWS": 64, "WORDS": 32, "STEPS": 2, "num_warps": 4})
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def small_tiles(large_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for a small matrix, and parts of tiles."""
    if DEVICE == "cpu":
        monkeypatch.setattr(unpack_kernels, "MXFP4_SHAPE", {"TILES": 4, "GROUPS": 2, "num_warps": 4})
        monkeypatch.setattr(unpack_kernels, "UNPACK_SHAPE", {"ROWS": 8, "WORDS": 4, "STEPS": 2, "num_warps": 4})


with_small_tiles = pytest.mark.usefixtures("small_tiles")


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=source(seed), dtype=torch.uint8)


def random_scales(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    if dtype in (torch.uint8, E8M0):
        return torch.randint(0, 255, shape, generator=source(seed)).to(torch.uint8).view(dtype)
    return (torch.randn(shape, generator=source(seed)) * 0.01).to(dtype)


def mxfp4(rows: int, outputs: int, groups: int) -> Leaves:
    return random_bytes(rows, outputs, groups, 16), random_scales(rows, outputs, groups, dtype=torch.uint8)


def float8(rows: int, outputs: int, columns: int, block: tuple[int, int], scales: torch.dtype) -> Leaves:
    grid = (-(-outputs // block[0]), -(-columns // block[1]))
    return random_bytes(rows, outputs, columns).view(E4M3), random_scales(rows, *grid, dtype=scales)


def int4(rows: int, outputs: int, columns: int, group: int, scales: torch.dtype) -> Leaves:
    packed = random_bytes(rows, outputs, 4 * -(-columns // 8)).view(torch.int32)
    return packed, random_scales(rows, outputs, columns // group, dtype=scales)


def spaced(leaf: torch.Tensor, more_nbytes: int) -> torch.Tensor:
    """The rows of a leaf with poison between them, and before and after them, on the device."""
    row = leaf[0].nbytes
    whole = torch.full((len(leaf) + 2, (row + 7) // 8 * 8 + more_nbytes), 0x7F, dtype=torch.uint8, device=DEVICE)
    inside = whole[1:-1, :row]
    inside.copy_(leaf.contiguous().view(torch.uint8).view(len(leaf), row))
    size = leaf.element_size()
    strides = (whole.stride(0) // size, *leaf.contiguous().stride()[1:])
    return torch.as_strided(whole.view(leaf.dtype), leaf.shape, strides, whole.stride(0) // size)


def picked(name: str, leaves: Leaves, rows: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Checks that nothing next to the matrices is written."""
    count = len(rows) * shape[0] * shape[1]
    whole = torch.full((count + 64,), 77.0, dtype=dtype, device=DEVICE)
    out = whole[32:-32].view(len(rows), *shape)
    unpack_rows_into(name, (), tuple(leaf.to(DEVICE) for leaf in leaves), torch.tensor(rows, device=DEVICE), out)
    assert (whole[:32] == 77).all()
    assert (whole[-32:] == 77).all()
    return out.cpu()


# Every byte under every scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_unpacks_every_byte_under_every_scale(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    expected = REFERENCES["mxfp4"](blocks, scales, dtype)
    found = picked("mxfp4", (blocks, scales), [0], (512, 255), dtype)
    assert_same_bits(found, expected)
    assert found.isinf().any()
    assert ((found != 0) & (found.abs() < torch.finfo(dtype).tiny)).any(), "subnormal ones, too"


@pytest.mark.parametrize(("dtype", "scales"), thinned(DTYPES, FLOAT8_SCALES))
def test_float8_unpacks_every_byte_under_scales_of_each_kind(dtype: torch.dtype, scales: torch.dtype) -> None:
    """Scales of each sign and exponent: subnormal, infinite and NaN, too."""
    under = unpacking._trial_scales(torch.empty(0, dtype=scales))
    weight = torch.arange(256, dtype=torch.uint8).expand(1, len(under), 256).contiguous().view(E4M3)
    leaves = weight, under.view(1, -1, 1)
    expected = REFERENCES["float8"](*leaves, dtype)
    found = picked("float8", leaves, [0], expected.shape[1:], dtype)
    assert_same_bits(found, expected)
    assert found.isnan().any()
    subnormal = (found != 0) & (found.abs() < torch.finfo(dtype).tiny)
    assert bool(subnormal.any()) is not (scales == torch.float16 != dtype), "none is that small"


@pytest.mark.parametrize(("dtype", "scales"), thinned(DTYPES, DTYPES))
def test_int4_unpacks_all_nibbles_under_scales_of_each_kind(dtype: torch.dtype, scales: torch.dtype) -> None:
    """Each nibble is at each of the eight places of a word."""
    under = unpacking._trial_scales(torch.empty(0, dtype=scales))
    word = sum((torch.arange(16) + place) % 16 << 4 * place for place in range(8))
    leaves = word.to(torch.int32).expand(1, len(under), 16).contiguous(), under.view(1, -1, 1)
    expected = REFERENCES["int4"](*leaves, dtype)
    assert_same_bits(picked("int4", leaves, [0], expected.shape[1:], dtype), expected)


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
def test_float8_of_each_channel_is_that_of_compressed_tensors(scales: torch.dtype) -> None:
    """In the dtype of the scales, where it rounds."""
    leaves = float8(3, 40, 72, (1, 72), scales)
    expected = by_compressed_tensors_float8(*leaves, scales)
    assert_same_bits(picked("float8", leaves, [2, 0], (40, 72), scales), expected[[2, 0]])


# Rows, from anywhere, of any size

ROWS = [3, 0, -1, -3]
MXFP4_SIZES = [(1, 1), (8, 2), (40, 3), (23, 5), (64, 1)]
FLOAT8_SIZES = [
    ((48, 96), (16, 32)),
    ((33, 70), (1, 70)),
    ((40, 136), (8, 8)),
    ((27, 45), (9, 5)),
    ((24, 100), (24, 100)),
    ((1, 32), (1, 32)),
    ((6, 64), (1, 32)),
]
INT4_SIZES = [(16, 96, 32), (37, 64, 64), (5, 128, 16), (9, 36, 36), (7, 40, 4), (1, 24, 8)]


@with_small_tiles
@pytest.mark.parametrize(("outputs", "groups", "apart"), thinned(MXFP4_SIZES, [0, 8]))
def test_rows_of_mxfp4(outputs: int, groups: int, apart: int) -> None:
    leaves = mxfp4(4, outputs, groups)
    expected = REFERENCES["mxfp4"](*leaves, torch.bfloat16)
    there = tuple(spaced(leaf, apart) for leaf in leaves)
    found = picked("mxfp4", there, ROWS, (32 * groups, outputs), torch.bfloat16)
    assert_same_bits(found, expected[ROWS])
    assert found.is_contiguous()
    assert expected.is_contiguous()


@pytest.mark.few(2)
@with_small_tiles
@pytest.mark.parametrize(("size", "block", "apart"), thinned(FLOAT8_SIZES, [0, 8]))
def test_rows_of_float8(size: tuple[int, int], block: tuple[int, int], apart: int) -> None:
    leaves = float8(4, *size, block, torch.float32)
    expected = REFERENCES["float8"](*leaves, torch.bfloat16)
    there = tuple(spaced(leaf, apart) for leaf in leaves)
    assert_same_bits(picked("float8", there, ROWS, size, torch.bfloat16), expected[ROWS])


@with_small_tiles
@pytest.mark.parametrize(("outputs", "columns", "group", "apart"), thinned(INT4_SIZES, [0, 8]))
def test_rows_of_int4(outputs: int, columns: int, group: int, apart: int) -> None:
    leaves = int4(4, outputs, columns, group, torch.bfloat16)
    expected = by_compressed_tensors(*leaves, torch.bfloat16, columns)
    there = tuple(spaced(leaf, apart) for leaf in leaves)
    assert_same_bits(picked("int4", there, ROWS, (outputs, columns), torch.bfloat16), expected[ROWS])


@with_small_tiles
def test_blocks_of_float8_may_exceed_the_matrix() -> None:
    """As settings say, since the scales alone do not."""
    weight, scales = float8(2, 40, 70, (16, 32), torch.float32)
    padded = torch.nn.functional.pad(weight.view(torch.uint8), (0, 26, 0, 8)).view(E4M3)
    expected = REFERENCES["float8"](padded, scales, torch.bfloat16)[:, :40, :70]
    leaves = weight.to(DEVICE), scales.to(DEVICE)
    found = unpack_rows("float8", (16, 32), leaves, torch.tensor([1, 0], device=DEVICE), (40, 70), torch.bfloat16)
    assert_same_bits(found.cpu(), expected[[1, 0]])
    with pytest.raises(InvariantError, match=r"scales \(3, 3\) are not those of blocks of 13 x 23 in \(40, 70\)"):
        unpack_rows("float8", (), leaves, torch.tensor([1], device=DEVICE), (40, 70), torch.bfloat16)


@with_small_tiles
def test_float8_with_a_scale_for_each_part_of_a_matrix() -> None:
    """Or for the whole matrix: such scales have fewer dimensions."""
    weight, scales = float8(3, 40, 72, (20, 72), torch.float32)
    for its in (scales.flatten(1), scales[:, 0, 0].contiguous()):
        leaves = weight, its[(..., *(None,) * (3 - its.dim()))]
        expected = REFERENCES["float8"](*leaves, torch.bfloat16)
        there = weight, spaced(its, 8)
        assert_same_bits(picked("float8", there, [2, 0], (40, 72), torch.bfloat16), expected[[2, 0]])


CASES = {
    "mxfp4": (mxfp4(3, 24, 3), (96, 24)),
    "float8": (float8(3, 24, 64, (8, 32), torch.float32), (24, 64)),
    "int4": (int4(3, 24, 64, 32, torch.bfloat16), (24, 64)),
}
all_formats = pytest.mark.parametrize("name", CASES)


@all_formats
def test_no_rows(name: str) -> None:
    leaves, shape = CASES[name]
    rows = torch.empty(0, dtype=torch.int64, device=DEVICE)
    found = unpack_rows(name, (), tuple(leaf.to(DEVICE) for leaf in leaves), rows, shape, torch.bfloat16)
    assert found.shape == (0, *shape)


@interpreted
@with_small_tiles
@pytest.mark.parametrize(("name", "apart"), thinned(CASES, [0, 8]))
def test_only_the_rows_are_read(name: str, apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles exceed the matrices here, also by whole places of a thread."""
    leaves, shape = CASES[name]
    there = tuple(spaced(leaf, apart) for leaf in leaves)
    rows = torch.tensor([2, 0])
    out = torch.empty(2, *shape, dtype=torch.bfloat16)
    seen = Watch([rows, *(leaf[row] for leaf in there for row in (2, 0))], [out])
    monkeypatch.setattr(triton.runtime.interpreter, "_interpreter", seen)
    unpack_rows_into(name, (), there, rows, out)
    assert seen.num > out.numel()
    assert_same_bits(out, REFERENCES[name](*leaves, torch.bfloat16)[[2, 0]])


# Several stacks in a launch

# three stacks, with their shapes: sizes differ, also in whether they are multiples of 8
PAIRS = {
    "mxfp4": [(mxfp4(4, 40, 3), (96, 40)), (mxfp4(4, 23, 2), (64, 23)), (mxfp4(4, 16, 1), (32, 16))],
    "float8": [
        (float8(4, 48, 120, (16, 24), torch.float32), (48, 120)),
        (float8(4, 32, 48, (16, 24), torch.float32), (32, 48)),
        (float8(4, 16, 72, (16, 24), torch.float32), (16, 72)),
    ],
    "float8 by channel": [
        (float8(4, 24, 70, (1, 70), torch.bfloat16), (24, 70)),
        (float8(4, 33, 40, (1, 40), torch.bfloat16), (33, 40)),
        (float8(4, 8, 8, (1, 8), torch.bfloat16), (8, 8)),
    ],
    "int4": [
        (int4(4, 24, 96, 16, torch.bfloat16), (24, 96)),
        (int4(4, 37, 32, 16, torch.bfloat16), (37, 32)),
        (int4(4, 8, 64, 16, torch.bfloat16), (8, 64)),
    ],
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of stacks of each launch."""
    return launches_from_now(monkeypatch)


@pytest.mark.few(2)
@with_small_tiles
@pytest.mark.parametrize(("case", "order"), thinned(PAIRS, [1, -1]))
def test_one_launch_for_two_stacks(case: str, order: int, launches: list[int]) -> None:
    name = case.split()[0]
    stacks = PAIRS[case][::order]
    there = [tuple(spaced(leaf, 8) for leaf in leaves) for leaves, _ in stacks]
    rows = torch.tensor(ROWS, device=DEVICE)
    found = unpack_stacks(name, (), there, rows, [shape for _, shape in stacks], torch.bfloat16)
    for matrices, (leaves, shape) in zip(found, stacks, strict=True):
        assert matrices.shape == (len(ROWS), *shape)
        assert_same_bits(matrices.cpu(), REFERENCES[name](*leaves, torch.bfloat16)[ROWS])
    assert launches == [2, 1]


@interpreted
@with_small_tiles
@pytest.mark.parametrize("case", PAIRS)
def test_only_the_rows_of_two_stacks_are_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = PAIRS[case][:2]
    there = [tuple(spaced(leaf, 8) for leaf in leaves) for leaves, _ in stacks]
    rows = torch.tensor([2, 0])
    outs = [torch.empty(2, *shape, dtype=torch.bfloat16) for _, shape in stacks]
    seen = Watch([rows, *(leaf[row] for leaves in there for leaf in leaves for row in (2, 0))], outs)
    monkeypatch.setattr(triton.runtime.interpreter, "_interpreter", seen)
    unpacking.unpack_stacks_into(case.split()[0], (), there, rows, outs)
    assert seen.num > sum(out.numel() for out in outs)
    for out, (leaves, _) in zip(outs, stacks, strict=True):
        assert_same_bits(out, REFERENCES[case.split()[0]](*leaves, torch.bfloat16)[[2, 0]])


UNLIKE = {
    "scales": (float8(3, 16, 64, (8, 32), torch.float32), float8(3, 16, 64, (8, 32), torch.bfloat16)),
    "blocks": (float8(3, 16, 64, (8, 32), torch.float32), float8(3, 16, 64, (16, 32), torch.float32)),
    "groups": (int4(3, 16, 64, 32, torch.bfloat16), int4(3, 16, 64, 64, torch.bfloat16)),
}


@pytest.mark.parametrize("difference", UNLIKE)
def test_stacks_that_take_other_kernels_have_launches_of_their_own(difference: str, launches: list[int]) -> None:
    name = "int4" if difference == "groups" else "float8"
    there = [tuple(leaf.to(DEVICE) for leaf in leaves) for leaves in UNLIKE[difference]]
    rows = torch.tensor([2, 0], device=DEVICE)
    found = unpack_stacks(name, (), there, rows, [(16, 64)] * 2, torch.bfloat16)
    for matrices, leaves in zip(found, UNLIKE[difference], strict=True):
        assert_same_bits(matrices.cpu(), REFERENCES[name](*leaves, torch.bfloat16)[[2, 0]])
    assert launches == [1, 1]


# What does not fit


@all_formats
def test_what_does_not_fit_is_refused(name: str) -> None:
    (packed, scales), shape = CASES[name]
    rows = torch.tensor([0])
    out = torch.empty(1, *shape, dtype=torch.bfloat16)
    wrong: list[tuple[Leaves, torch.Tensor, torch.Tensor]] = [
        ((packed, scales), rows.int(), out),
        ((packed, scales), rows, out[:, 1:]),
        ((packed, scales), rows, out.mT),
        ((packed, scales), rows, out.expand(2, *shape)),
        ((packed, scales), rows, torch.empty(1, *shape[:-1], shape[-1] + 8, dtype=torch.bfloat16)),
        ((packed[:, 1:], scales), rows, out),
        ((packed.transpose(1, 2), scales), rows, out),
        ((packed, torch.cat([scales] * 2, 1)[:, :5].contiguous()), rows, out),
        ((packed, scales.double()), rows, out),
        ((packed.float(), scales), rows, out),
    ]
    for leaves, its, target in wrong:
        with pytest.raises(InvariantError, match=r"found|not those of"):
            unpack_rows_into(name, (), leaves, its, target)
    with pytest.raises(InvariantError, match="no kernel unpacks"):
        unpack_rows(name, (), (packed, scales), rows, shape, torch.float64)
    with pytest.raises(InvariantError, match="no kernel unpacks"):
        unpack_rows("nf4", (), (packed, scales), rows, shape, torch.bfloat16)


# Trials


@pytest.mark.parametrize(("name", "dtype"), thinned(CASES, DTYPES))
def test_a_trial_finds_the_kernel_equal(name: str, dtype: torch.dtype) -> None:
    leaves, shape = CASES[name]
    there = tuple(leaf.to(DEVICE) for leaf in leaves)
    assert unpacks_equally(name, (), there, shape, dtype, REFERENCES[name])


def test_a_trial_of_blocks_by_settings() -> None:
    leaves = tuple(leaf.to(DEVICE) for leaf in float8(2, 24, 40, (16, 32), torch.bfloat16))
    assert unpacks_equally("float8", (16, 32), leaves, (24, 40), torch.bfloat16, REFERENCES["float8"])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PACKED)
def test_trials_suit_the_function_of_each_format(name: str) -> None:
    """Scales have as many dimensions as those of the format, which its function goes by."""
    case = PACKED[name]
    shape = (2, 64, 64) if case.mixture == "gpt_oss" else (2, 128, 64)
    leaves = tuple(leaf.to(DEVICE) for leaf in case.leaves(shape, torch.Generator().manual_seed(3)))

    def unpack(*args: Any) -> torch.Tensor:
        *trial, dtype = args
        return case.format.unpacked(tuple(trial), dtype)

    assert case.format.kernel is not None
    assert unpacks_equally(case.format.kernel, (), leaves, shape[1:], torch.bfloat16, unpack)


def test_a_trial_needs_scales_of_a_matrix() -> None:
    weight, scales = (leaf.to(DEVICE) for leaf in float8(2, 8, 32, (8, 32), torch.float32))
    with pytest.raises(InvariantError, match="a list or a grid of scales"):
        unpacks_equally("float8", (), (weight, scales[:, 0, 0]), (8, 32), torch.bfloat16, REFERENCES["float8"])


def test_int4_needs_no_settings() -> None:
    """A library's function may have some: here bits and the size of groups."""
    leaves, shape = CASES["int4"]
    there = tuple(leaf.to(DEVICE) for leaf in leaves)

    def unpack(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *settings: int) -> torch.Tensor:
        assert settings == (4, 32)
        return REFERENCES["int4"](packed, scales, dtype)

    assert unpacks_equally("int4", (4, 32), there, shape, torch.bfloat16, unpack)


@all_formats
def test_a_trial_finds_a_difference(name: str) -> None:
    """Of one bit, of one weight; or of the sign of zero; or of dtype."""
    leaves, shape = CASES[name]
    there = tuple(leaf.to(DEVICE) for leaf in leaves)

    def by_one_bit(*args: Any) -> torch.Tensor:
        found = REFERENCES[name](*args)
        found.view(torch.int16)[0, 0, 0] ^= 1
        return found

    def of_zeros(*args: Any) -> torch.Tensor:
        return REFERENCES[name](*args) + 0.0

    def of_dtype(*args: Any) -> torch.Tensor:
        return REFERENCES[name](*args).float()

    for unpack in (by_one_bit, of_zeros, of_dtype):
        assert not unpacks_equally(name, (), there, shape, torch.bfloat16, unpack)
    assert not unpacks_equally("nf4", (), there, shape, torch.bfloat16, REFERENCES[name])
    assert not unpacks_equally(name, (), there, shape, torch.float64, REFERENCES[name])


def test_scales_of_trials_have_each_exponent() -> None:
    for dtype, shift in ((torch.float32, 23), (torch.bfloat16, 7)):
        bits = unpacking._trial_scales(torch.empty(0, dtype=dtype)).view(torch.int32 if shift == 23 else torch.int16)
        assert (bits.long() >> shift & 511).unique().tolist() == list(range(512))
    assert unpacking._trial_scales(torch.empty(0, dtype=E8M0)).view(torch.uint8).tolist() == list(range(256))


# Kernels as they are compiled for a GPU

COMPILING = """
import json, os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weightstream.codec import unpack_kernels as kernels

CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


def compiled(kernel, leaves, constants, capability):
    options = {"num_warps": constants["num_warps"]}
    of_stack = leaves | {"out": "*bf16"}
    pointers = {"rows": "*i64"} | of_stack | {name + "2": kind for name, kind in of_stack.items()}
    names = kernel.arg_names
    kinds = {name: pointers.get(name, "i64" if "stride" in name else "i32") for name in names if name not in constants}
    facts = {(names.index(name),): value for name, value in constants.items() if name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers if "scales" not in name}
    source = ASTSource(kernel, {name: kinds.get(name, "constexpr") for name in names}, facts, aligned)
    asm = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = {name: int(num) for name, num in re.findall(r"(REG|STACK|SHARED|LOCAL):([0-9]+)", usage)}
    kinds = ("ld.global.v4", "ld.global.v2.b32", "st.global.v4", "shfl", ".ftz")
    return found | {name: asm["ptx"].count(name) for name in kinds}


CASES = {
    "mxfp4": (kernels.unpack_mxfp4, {"blocks": "*u8", "scales": "*u8"}, kernels.MXFP4_SHAPE | {"ALIGN": 16}),
    "float8": (
        kernels.unpack_float8,
        {"weight": "*u8", "scales": "*fp32"},
        kernels.UNPACK_SHAPE | {"ALIGN": 16, "NAN": False, "OUTPUTS_PER_SCALE": 128, "PER_SCALE": 128},
    ),
    "int4": (
        kernels.unpack_int4,
        {"packed": "*i32", "scales": "*bf16"},
        kernels.UNPACK_SHAPE | {"ALIGN": 4, "PER_SCALE": 32},
    ),
}
capabilities = [int(each) for each in sys.argv[1:]]
print(json.dumps([
    [name, compiled(kernel, leaves, constants | {"UNIT": 8}, capability)]
    for name, (kernel, leaves, constants) in CASES.items() for capability in capabilities
]))
"""

COUNTING = f"""{COMPILES_NOTHING}
from weightstream.codec.unpacking import unpack_rows, unpack_stacks

bytes_of = lambda *shape: torch.zeros(shape, dtype=torch.uint8)
for num, apart in ((1, 0), (2, 0), (16, 0), (40, 16), (3, 48)):
    rows = torch.zeros(num, dtype=torch.int64)
    for outputs, groups in ((8, 1), (16, 2), (128, 5), (2880, 90)):
        blocks = bytes_of(2, outputs * groups * 16 + apart)[:, : outputs * groups * 16].view(2, outputs, groups, 16)
        unpack_rows("mxfp4", (), (blocks, bytes_of(2, outputs, groups)), rows, (32 * groups, outputs), torch.bfloat16)
    for outputs, columns in ((1, 32), (2, 64), (128, 48), (7168, 2048)):
        weight = bytes_of(2, outputs * columns + apart)[:, : outputs * columns].view(torch.float8_e4m3fn)
        weight, scales = weight.view(2, outputs, columns), torch.zeros(2, outputs, 1)
        unpack_rows("float8", (), (weight, scales), rows, (outputs, columns), torch.bfloat16)
        packed, scales = torch.zeros(2, outputs, columns // 8, dtype=torch.int32), scales.bfloat16()
        unpack_rows("int4", (), (packed, scales), rows, (outputs, columns), torch.bfloat16)
        unpack_stacks("int4", (), [(packed, scales)] * 2, rows, [(outputs, columns)] * 2, torch.bfloat16)
{PRINTS_COUNTS}"""


def without_interpreter(code: str, folder: Path, *args: str) -> Any:
    """What the code prints as JSON, where Triton compiles for a GPU."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-c", code, *args]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("capability", only([80, 89, 90, 120], 80))
def test_compiled_kernels_read_and_write_whole_vectors_and_spill_nothing(capability: int, tmp_path: Path) -> None:
    """Threads exchange nothing. The vectors of float8 have 8 bytes, as those of its matrices have 16."""
    for name, found in without_interpreter(COMPILING, tmp_path, str(capability)):
        assert found["STACK"] == found["LOCAL"] == found["SHARED"] == found["shfl"] == found[".ftz"] == 0, name
        assert found["REG"] <= 128, name
        assert found["st.global.v4"] == (32 if name == "mxfp4" else STEPS), name
        assert found["ld.global.v4"] == (8 if name == "mxfp4" else 0), name
        assert found["ld.global.v2.b32"] == (STEPS if name == "float8" else 0), name


@pytest.mark.stress
def test_kernels_are_compiled_once_for_all_shapes(tmp_path: Path) -> None:
    counts = without_interpreter(COUNTING, tmp_path)
    assert counts == {"unpack_mxfp4": 1, "unpack_float8": 1, "unpack_int4": 1}
