"""Weights in two parts: exact on every bit pattern, a draft of known error, and kernels that agree with plain torch.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter
from torch._subclasses.fake_tensor import FakeTensorMode

from repeats import only
from triton_counting import COMPILES_NOTHING, PRINTS_COUNTS
from watching import Watch
from weightstream.codec import plane_kernels, planes
from weightstream.codec.planes import PlaneLayout, Planes
from weightstream.errors import InvariantError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = [1, 2, 3]
all_bits = pytest.mark.parametrize("bits", BITS)
GUARD = 77


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(rows: int = 37, columns: int = 192, scale: float = 0.02) -> torch.Tensor:
    return (scale * torch.randn(rows, columns, generator=source())).bfloat16()


def patterns(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Integers of 16 bits as a matrix of bfloat16."""
    return values.to(torch.int16).view(torch.bfloat16).view(-1, columns)


def every_value() -> torch.Tensor:
    return patterns(torch.randperm(65536, generator=source()), 1024)


def ascending() -> torch.Tensor:
    """Every value, neighbours in one tile: all exponents are the largest of a tile."""
    return patterns(torch.arange(65536), 1024)


def with_outliers() -> torch.Tensor:
    weight = gaussian(33, 320)
    weight[::5, 7] = 60.0
    weight[3] *= 2.0**90
    weight[4] *= 2.0**-120
    return weight


def with_specials() -> torch.Tensor:
    weight = gaussian(20, 128)
    weight[1, 3], weight[2, 70], weight[3, 0], weight[4] = torch.inf, -torch.inf, torch.nan, -torch.inf
    weight[5], weight[6, ::2] = -0.0, 0.0
    return weight


def all_escapes() -> torch.Tensor:
    """A largest weight in each tile, of which the others are a tiny share; in the last rows these are subnormal."""
    weight = gaussian(6, 128) * 1e-6
    weight[4:] *= 1e-34
    weight[:, ::64] = 1.0
    return weight


WEIGHTS = {
    "Gaussian": gaussian,
    "one row": lambda: gaussian(1, 64),
    "several rounds of the join": lambda: gaussian(3, 2048 + 192),
    "every value": every_value,
    "ascending": ascending,
    "zeros": lambda: torch.zeros(5, 64, dtype=torch.bfloat16),
    "negative zeros": lambda: -torch.zeros(5, 64, dtype=torch.bfloat16),
    "outliers": with_outliers,
    "inf and NaN": with_specials,
    "all are escapes": all_escapes,
    "subnormal": lambda: patterns(torch.arange(256) - 128, 128),
}
all_weights = pytest.mark.parametrize("name", WEIGHTS)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu().view(torch.int16), expected.cpu().view(torch.int16))


def joined_by_kernel(parts: Planes) -> torch.Tensor:
    """Checks that nothing next to the matrix is written."""
    high, low, layout = parts
    count = layout.rows * layout.columns
    whole = torch.full((count + 512,), GUARD, dtype=torch.bfloat16, device=DEVICE)
    out = whole[256:-256].view(layout.rows, layout.columns)
    planes.launch_join(high.to(DEVICE), low.to(DEVICE), layout, out)
    assert (whole[:256] == GUARD).all()
    assert (whole[-256:] == GUARD).all()
    return out.cpu()


@all_bits
@all_weights
def test_parts_joined_are_the_matrix(name: str, bits: int) -> None:
    weight = WEIGHTS[name]()
    high, low, layout = planes.split(weight, bits)
    assert layout == PlaneLayout(*weight.shape, bits)
    assert_same_bits(planes.join_planes(high, low, layout), weight)
    out = torch.zeros_like(weight)
    assert planes.join_planes(high, low, layout, out) is out
    assert_same_bits(out, weight)


@pytest.mark.few(4)
@all_bits
@all_weights
def test_the_kernel_joins(name: str, bits: int) -> None:
    weight = WEIGHTS[name]()
    assert_same_bits(joined_by_kernel(planes.split(weight, bits)), weight)


@all_bits
def test_many_chunks_give_the_bytes_of_one(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = with_outliers()
    whole = planes.split(weight, bits)
    draft = planes.drafted(whole.high, whole.layout)
    monkeypatch.setattr(planes, "_CHUNK", 2 * weight.shape[1])
    parts = planes.split(weight, bits)
    assert torch.equal(parts.high, whole.high)
    assert torch.equal(parts.low, whole.low)
    assert_same_bits(planes.join_planes(*parts), weight)
    assert_same_bits(planes.drafted(parts.high, parts.layout), draft)


@all_bits
def test_places_of_the_format(bits: int) -> None:
    """Each field of each weight, read from the bytes as the module describes them."""
    weight = gaussian(3, 128)
    weight[0, 5], weight[2, 100] = 0.0, 1e-9
    high, low, layout = planes.split(weight, bits)
    words = weight.view(torch.int16).numpy().astype(np.int64) & 0xFFFF
    exponents = words >> 7 & 255
    sizes = {4: 32 * 6, 2: 16 * 6, 1: 8 * 6}

    def of(part: torch.Tensor, at: int, width: int, row: int, column: int, place: Any = None, ones: int = 15) -> Any:
        plane = part[at : at + sizes[width]].view(torch.int32).numpy().astype(np.int64) & 0xFFFFFFFF
        tile, i = divmod(128 * row + column, 64)
        word, k = plane[tile * 2 * width + i % (2 * width)], i // (2 * width)
        bit = (width * k if place is None else place(k)) % 32
        return (word >> bit | word << 32 - bit) & ones & 2**width - 1

    def in_bits_2(k: int) -> int:
        return 4 * (k // 2) + k % 2 + 1

    escapes, starts = [], [0]
    in_order = [64 * tile + word + 8 * place for tile in range(2) for word in range(8) for place in range(8)]
    for row in range(3):
        for column in in_order:
            base = max(exponents[row, column // 64 * 64 : column // 64 * 64 + 64].max() - 7, 0)
            assert high[layout.bases_at + 2 * row + column // 64] == base
            exponent, mantissa, sign = exponents[row, column], words[row, column] & 127, words[row, column] >> 15
            if exponent <= base:
                escapes.append(exponent)
            code = max(exponent - base, 0)
            assert of(high, 0, 4, row, column, lambda k: 4 * k + 2) == (code << 1 | mantissa >> 6)
            if bits == 1:
                assert of(high, sizes[4], 1, row, column, lambda k: k + 11) == sign
            elif bits == 2:
                assert of(high, sizes[4], 2, row, column, in_bits_2, 1) == mantissa >> 5 & 1
                assert of(high, sizes[4], 2, row, column, lambda k: in_bits_2(k) + 10, 1) == sign
            else:
                assert of(high, sizes[4], 2, row, column) == mantissa >> 4 & 3
                assert of(high, sizes[4] + sizes[2], 1, row, column, lambda k: k + 11) == sign
            assert of(low, 0, 4, row, column) == mantissa & 15
            if bits < 3:
                rest = mantissa >> 4 & 2 ** (3 - bits) - 1
                assert of(low, sizes[4], 3 - bits, row, column) == rest
        starts.append(len(escapes))
    assert low[layout.starts_at :][:16].view(torch.int32).tolist() == starts
    assert low[layout.escapes_at :][: len(escapes)].tolist() == escapes
    assert not low[layout.escapes_at + len(escapes) :].any()
    assert len(high) == layout.high_nbytes
    assert len(low) == layout.low_nbytes(len(escapes))


@all_bits
def test_bits_of_gaussian_weights(bits: int) -> None:
    weight = gaussian(512, 512)
    high, low, layout = planes.split(weight, bits)
    assert 8 * len(high) == (4 + bits + 0.125) * weight.numel()
    escapes = len(low) - layout.escapes_at
    assert 0.85 < escapes / (planes.GAUSSIAN_ESCAPES * weight.numel()) < 1.01
    meta = planes.split(weight.to("meta"), bits)
    assert meta.layout == layout
    assert len(meta.high) == len(high)
    assert len(meta.low) == pytest.approx(len(low), rel=0.01)


# The draft


@all_bits
@all_weights
def test_the_error_of_the_draft_is_half_a_step(name: str, bits: int) -> None:
    """Of weights that are no escapes. Escapes are less than twice the least power of two of the others."""
    weight = WEIGHTS[name]()
    draft = planes.drafted(*planes.split(weight, bits)[::2])
    exponents = (weight.view(torch.int16).int() >> 7 & 255).view(len(weight), -1, 64)
    bases = (exponents.amax(2, keepdim=True) - 7).clamp(min=0)
    escapes, fit = (exponents <= bases).flatten(1), (bases < 248).expand_as(exponents).flatten(1)
    exact, found = weight.double(), draft.double()
    plain = ~escapes & fit
    step = 2.0 ** (exponents.flatten(1).double() - 127 - bits)
    assert ((found - exact).abs()[plain] <= step[plain] / 2).all()
    least = 2.0 ** (bases.expand_as(exponents).flatten(1).double() - 127)
    assert (found.abs()[escapes & fit] < 2 * least[escapes & fit]).all()
    assert torch.equal(found.signbit(), exact.signbit())
    assert draft.isfinite().all()


@pytest.mark.parametrize(("bits", "most"), [(1, 0.115), (2, 0.058), (3, 0.029)])
def test_the_draft_of_gaussian_weights(bits: int, most: float) -> None:
    weight = gaussian(128, 512)
    draft = planes.drafted(*planes.split(weight, bits)[::2])
    assert (draft.float() - weight.float()).norm() < most * weight.float().norm()


@all_bits
def test_rows_of_the_draft(bits: int) -> None:
    high, _, layout = planes.split(with_outliers(), bits)
    ids = torch.tensor([[3, 32], [0, 3]])
    expected = torch.nn.functional.embedding(ids, planes.drafted(high, layout))
    assert_same_bits(planes.drafted_rows(ids, high, layout), expected)


def products(x: torch.Tensor, parts: Planes, bias: torch.Tensor | None) -> torch.Tensor:
    """By the kernel."""
    found = planes.launch_draft_linear(
        x.to(DEVICE), parts.high.to(DEVICE), parts.layout, None if bias is None else bias.to(DEVICE)
    )
    return found.cpu()


@pytest.mark.few(2)
@all_bits
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),  # rows and tiles that fill no program, and several rounds of one
    [(1, 64, torch.bfloat16), (10, 192, torch.bfloat16), (6, 2048 + 128, torch.float32)],
)
def test_the_product_with_the_draft(
    bits: int, rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_kernels, "PROGRAMS", 1)
    parts = planes.split(gaussian(rows, columns), bits)
    x = torch.randn(2, 1, columns, generator=source(1)).to(dtype)
    bias = torch.randn(rows, generator=source(2)).to(dtype) if rows > 1 else None
    expected = torch.nn.functional.linear(
        x.double(), planes.drafted(parts.high, parts.layout).double(), None if bias is None else bias.double()
    )
    for found in (products(x, parts, bias), planes.draft_linear(x, parts.high, parts.layout, bias)):
        assert (found.dtype, found.shape) == (dtype, (2, 1, rows))
        torch.testing.assert_close(found.double(), expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", only(BITS, 3))
def test_products_do_not_depend_on_the_outputs_of_a_program(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, x, found = planes.split(gaussian(11, 192), bits), torch.randn(2, 192, generator=source(1)), {}
    for programs in (1, 3, 6):
        monkeypatch.setattr(plane_kernels, "PROGRAMS", programs)
        found[plane_kernels.shape_of_product(11)["ROWS"]] = products(x, parts, None)
    assert list(found) == [4, 2, 1]
    assert torch.equal(found[4], found[1])
    assert torch.equal(found[2], found[1])


@pytest.mark.few(2)
@all_bits
def test_the_kernel_has_the_draft_of_the_reference(bits: int) -> None:
    """Bit for bit: rows of a unit matrix give columns of the draft."""
    high, low, layout = planes.split(ascending()[20:24, 640:768], bits)
    columns = [0, 7, 28, 32, 63, 64, 101, 127]
    x = torch.eye(128, dtype=torch.bfloat16)[columns]
    assert_same_bits(products(x, Planes(high, low, layout), None).T, planes.drafted(high, layout)[:, columns])


def test_no_rows_of_x() -> None:
    high, _, layout = planes.split(gaussian(), 2)
    for product in (planes.launch_draft_linear, planes.draft_linear):
        found = product(torch.empty(0, 192, dtype=torch.bfloat16, device=DEVICE), high.to(DEVICE), layout)
        assert found.shape == (0, 37)


# Damaged bytes


@pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter's accesses can be watched")
@all_bits
@pytest.mark.few(5)
@pytest.mark.parametrize("fill", [None, 0, 255, 127])
@pytest.mark.parametrize("with_escapes", [True, False])
def test_damaged_parts_are_read_inside(
    bits: int, fill: int | None, with_escapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_kernels, "PROGRAMS", 1)
    weight = gaussian(5, 192) if with_escapes else torch.ones(5, 192, dtype=torch.bfloat16)
    high, low, layout = planes.split(weight, bits)
    assert (len(low) > layout.escapes_at) is with_escapes
    for part in (high, low):
        part.copy_(torch.randint(0, 256, part.shape, generator=source(3)) if fill is None else torch.tensor(fill))
    out, x = torch.empty_like(weight), torch.full((2, 192), 2.0**-20)
    with monkeypatch.context() as patch:
        seen = Watch([high, low], [out])
        patch.setattr(triton.runtime.interpreter, "_interpreter", seen)
        planes.launch_join(high, low, layout, out)
        assert seen.num > out.numel()
    assert_same_bits(planes.join_planes(high, low, layout), out)
    made: list[torch.Tensor] = []
    new_empty = torch.Tensor.new_empty

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(new_empty(*args, **kwargs))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", recorded)
        seen = Watch([high, x], made)
        patch.setattr(triton.runtime.interpreter, "_interpreter", seen)
        found = planes.launch_draft_linear(x, high, layout)
        assert seen.num > out.numel() // 8
    assert found.isfinite().all()


# Kernels as they are compiled for a GPU

COMPILING = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weightstream.codec import plane_kernels


def compiled(kernel, signature, constants):
    options = {"num_warps": constants.pop("num_warps")}
    names = kernel.arg_names
    signature = {name: kind for name, kind in signature.items() if name in names}
    facts = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if "*" in kind}
    source = ASTSource(kernel, {name: signature.get(name, "constexpr") for name in names}, facts, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


parts, bits = {"high": "*u8", "low": "*u8", "out": "*bf16"}, int(sys.argv[1])
numbers = dict.fromkeys(("rows", "row_tiles", "room", "num", "middle"), "i32")
names = parts | numbers | {"x": "*bf16"}
multiply = compiled(plane_kernels.multiply_draft, names, {"BITS": bits, "bias": None} | plane_kernels.SHAPE)
join = compiled(plane_kernels.join_rows, names, {"BITS": bits} | plane_kernels.JOIN_SHAPE)
counted = [join.count(each) for each in ("ld.global.v4", "st.global.v4", "shfl.sync")]
print(json.dumps([multiply.count("ld.global.v4"), *counted]))
"""

COUNTING = f"""{COMPILES_NOTHING}
from weightstream.codec import planes

high, low = torch.zeros(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
for rows, columns in [(1, 64), (2, 64), (16, 128), (37, 1024), (4095, 64), (4096, 64), (8191, 64), (8192, 64)]:
    layout = planes.PlaneLayout(rows, columns, 2)
    planes.launch_join(high, low, layout, torch.empty(rows, columns, dtype=torch.bfloat16))
    for num in (1, 3, 16):
        planes.launch_draft_linear(torch.empty(num, columns, dtype=torch.bfloat16), high, layout)
{PRINTS_COUNTS}"""


def without_interpreter(code: str, folder: Path, *args: str) -> Any:
    """What the code prints as JSON, where Triton compiles for a GPU."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, *args]
    environment["TRITON_CACHE_DIR"] = str(folder)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("bits", only(BITS, 2))
def test_compiled_kernels_read_whole_vectors(bits: int, tmp_path: Path) -> None:
    """The join writes them, too, and threads exchange nothing but a prefix sum."""
    of_product, of_join, stores, shuffles = without_interpreter(COMPILING, tmp_path, str(bits))
    assert of_product >= 4  # a row each
    assert of_join == 3  # the planes of 4 bits, and one of 2
    assert stores == 4
    assert shuffles == 6


@pytest.mark.stress
def test_kernels_are_compiled_once_for_all_shapes(tmp_path: Path) -> None:
    """The product for three numbers of outputs of a program."""
    assert without_interpreter(COUNTING, tmp_path) == {"join_rows": 1, "multiply_draft": 3}


def test_parts_that_are_too_small_are_refused() -> None:
    high, low, layout = planes.split(gaussian(), 2)
    out, x = torch.empty(37, 192, dtype=torch.bfloat16), torch.empty(1, 192)
    for parts in ((high[:-16], low, out), (high, low[: layout.escapes_at - 16], out), (high, low, out[1:])):
        with pytest.raises(InvariantError, match=r"has \d+ elements, its layout needs \d+"):
            planes.launch_join(*parts[:2], layout, parts[2])
    for product in ((x, high[:-16]), (x[:, :128], high)):
        with pytest.raises(InvariantError, match=r"has \d+ elements, its layout needs \d+"):
            planes.launch_draft_linear(*product, layout)


# What can be split, and the operators


@pytest.mark.parametrize(
    ("shape", "dtype", "can"),
    [
        ((3, 64), torch.bfloat16, True),
        ((3, 96), torch.bfloat16, False),
        ((64,), torch.bfloat16, False),
        ((2, 3, 64), torch.bfloat16, False),
        ((0, 64), torch.bfloat16, False),
        ((3, 0), torch.bfloat16, False),
        ((3, 64), torch.float16, False),
        ((1 << 20, 1 << 13), torch.bfloat16, False),
    ],
)
def test_what_can_be_split(shape: tuple[int, ...], dtype: torch.dtype, can: bool) -> None:
    assert planes.can_split(shape, dtype) is can


def test_a_view_can_be_split() -> None:
    weight = gaussian(192, 128).T
    assert_same_bits(planes.join_planes(*planes.split(weight, 3)), weight.contiguous())


def test_operators_have_shapes_without_values() -> None:
    weight = gaussian()
    parts = planes.split(weight, 2)
    for context, move in ((torch.device("meta"), lambda t: t.to("meta")), (FakeTensorMode(), lambda t: t)):
        with context as mode:
            high, low = (
                mode.from_tensor(part) if isinstance(mode, FakeTensorMode) else move(part) for part in parts[:2]
            )
            x = torch.empty(2, 3, 192, dtype=torch.bfloat16)
            joined, found = planes.join_planes(high, low, parts.layout), planes.draft_linear(x, high, parts.layout)
        assert (joined.shape, joined.dtype) == (weight.shape, weight.dtype)
        assert (found.shape, found.dtype) == ((2, 3, 37), torch.bfloat16)


@pytest.mark.skipif(DEVICE != "cpu", reason="inputs are on the CPU")
def test_operators_are_sound() -> None:
    """Schemas, fake results and dispatch agree."""
    weight = gaussian(4, 64)
    parts = planes.split(weight, 1)
    operators, x = torch.ops.weightstream, torch.randn(2, 64)
    torch.library.opcheck(operators.join_planes, (*parts[:2], *parts.layout))
    torch.library.opcheck(operators.join_planes_out, (*parts[:2], *parts.layout, torch.empty_like(weight)))
    torch.library.opcheck(operators.draft_linear, (x, parts.high, *parts.layout, torch.randn(4)))


def test_operators_are_defined_before_those_of_the_streamer() -> None:
    """In the other tests they come later."""
    code = "import weightstream.codec.planes, weightstream.runtime.streamer.custom_ops, torch\n"
    code += "torch.ops.weightstream.join_planes, torch.ops.weightstream.wait"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
