"""The Triton kernels that pick rows of packed matrices and unpack them. unpacking.py has the formats and the launches.

A thread writes eight consecutive weights, 16 bytes of a 16-bit dtype, and reads the packed weights of these itself: no
layout is changed through shared memory. A tile has as many threads as a program, so that Triton gives each thread one
place of each load. All loads come before all stores, which the compiler must assume to change what is read.

Arithmetic is that of the libraries' functions: products in float32. Floats are decoded and bfloat16 is rounded by
integers: no GPU older than sm_89 converts float8, and Triton's interpreter does not round to the nearest.

A launch unpacks the same rows of one stack or of two, such as both of a mixture's layer. Programs from `num_first` on
are for the second stack, whose arguments end in 2; a launch for one stack has none of them.

`ALIGN`: bytes of which the addresses of all rows are multiples. `UNIT`: 8 if lengths that are counted in units are
multiples of 8, else 1. So what is read and written at once does not depend on how Triton specialises integers, and few
kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import triton
import triton.language as tl

# Of the programs. Threads are TILES * GROUPS, and ROWS * WORDS: those of a warp write lines of 128 bytes. Programs of
# mxfp4 are small, because a token has so few that the last of larger ones leave most of a GPU idle.
MXFP4_SHAPE: Mapping[str, int] = MappingProxyType({"TILES": 8, "GROUPS": 4, "num_warps": 1})
UNPACK_SHAPE: Mapping[str, int] = MappingProxyType({"ROWS": 2, "WORDS": 64, "STEPS": 8, "num_warps": 4})


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """A float32 as one of another dtype, to the nearest, ties to even."""
    if dtype == tl.bfloat16:
        bits = tl.where(x != x, 0x7FFF0000, x.to(tl.uint32, bitcast=True))  # a NaN could become zero
        near = bits + 0x7FFF + ((bits >> 16) & 1)
        found = (near >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        found = x.to(dtype)
    return found


@triton.jit
def _cut(x, dtype: tl.constexpr):
    """As `_rounded`, of numbers that bfloat16 has."""
    if dtype == tl.bfloat16:
        found = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        found = x.to(dtype)
    return found


@triton.jit
def _power_of_two(exponent, NAN: tl.constexpr):
    """2 ** (exponent - 127) of a byte; 255 is NaN or infinity."""
    bits = exponent.to(tl.uint32) << 23
    bits = tl.where(exponent == 0, 0x00400000, bits)
    if NAN:
        bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _row(rows, nth, num_rows):
    """The row to unpack, of so many; negative ones count from the end, as in an index of a tensor."""
    row = tl.load(rows + nth)
    return tl.where(row < 0, row + num_rows, row)


@triton.jit
def _place(leaf, row, stride, ALIGN: tl.constexpr):
    """The address of a row of a leaf."""
    return tl.multiple_of(leaf + row * stride, ALIGN)


@triton.jit
def _joined(a, b, c, d, e, f, g, h):
    """Tensors as one with three more axes of two, the first of which is the highest bit of the tensor's number."""
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))


def _jit(*sizes: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile once for all sizes, strides and places of scales, of which each thread reads one at a time."""
    numbers = ("num_rows", "num_first", *sizes)
    return triton.jit(
        do_not_specialize=[*numbers, *(f"{name}2" for name in sizes)],
        do_not_specialize_on_alignment=["scales", "scales2"],
    )


@_jit("blocks_stride", "scales_stride", "groups", "outputs")
def unpack_mxfp4(
    rows,
    num_rows,
    num_first,
    blocks,
    scales,
    out,
    blocks_stride: tl.int64,
    scales_stride: tl.int64,
    groups,
    outputs,
    blocks2,
    scales2,
    out2,
    blocks_stride2: tl.int64,
    scales_stride2: tl.int64,
    groups2,
    outputs2,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Unpack GROUPS groups of 32 inputs, for 8 * TILES outputs. `outputs` are counted in units; strides are bytes.

    A thread has one group of eight outputs. It reads 16 bytes of each output, and writes 32 times all outputs of an
    input.
    """
    program = tl.program_id(0)
    if program >= num_first:
        program -= num_first
        blocks, scales, out = blocks2, scales2, out2
        blocks_stride, scales_stride = blocks_stride2, scales_stride2
        groups, outputs = groups2, outputs2
    outputs *= UNIT
    output_tiles = tl.cdiv(outputs, 8 * TILES)
    tiles = output_tiles * tl.cdiv(groups, GROUPS)
    nth, tile = (program // tiles).to(tl.int64), program % tiles
    row = _row(rows, nth, num_rows)
    blocks = _place(blocks, row, blocks_stride, ALIGN).to(tl.pointer_type(tl.uint32))
    scales += row * scales_stride
    thread = tl.arange(0, TILES * GROUPS)
    first = tile % output_tiles * (8 * TILES) + thread // GROUPS * 8
    group = tile // output_tiles * GROUPS + thread % GROUPS
    at = first * groups + group
    words, exponents = (), ()
    for k in tl.static_range(8):
        inside = (first + k < outputs) & (group < groups)
        place = (blocks + k * 4 * groups) + (4 * at[:, None] + tl.arange(0, 4)[None, :])
        words += (tl.load(place, mask=inside[:, None], other=0),)
        exponents += (tl.load((scales + k * groups) + at, mask=inside, other=127),)
    exponent = tl.reshape(_joined(*exponents), [TILES * GROUPS, 8]).to(tl.uint32)
    # 2 ** (exponent - 1) as two factors, as it may be too large for one. It is exact: also of exponent 0
    scale = ((tl.minimum(exponent, 128) + 126) << 23).to(tl.float32, bitcast=True)
    more = ((tl.maximum(exponent, 128) - 1) << 23).to(tl.float32, bitcast=True)
    by_output = tl.permute(tl.reshape(_joined(*words), [TILES * GROUPS, 2, 2, 8]), (0, 3, 1, 2))
    even, odd = tl.split(by_output)
    word0, word2 = tl.split(even)
    word1, word3 = tl.split(odd)
    in_order = (word0, word1, word2, word3)

    output = first[:, None] + tl.arange(0, 8)[None, :]
    inside = (output < outputs) & (group[:, None] < groups)
    at = group[:, None] * (32 * outputs) + output
    out += nth * (32 * outputs * groups.to(tl.int64))
    for word in tl.static_range(4):
        for k in tl.static_range(8):
            bits = in_order[word] >> (4 * k)
            # as a float32 this is the weight times 2 ** -126: also of exponent 0, where both are subnormal
            bits = ((bits << 22) & 0x01C00000) | ((bits << 28) & 0x80000000)
            weight = bits.to(tl.float32, bitcast=True) * scale * more
            tl.store((out + (8 * word + k) * outputs) + at, _cut(weight, out.dtype.element_ty), mask=inside)


@triton.jit
def _e4m3(byte):
    """float8_e4m3fn as float32."""
    top = byte.to(tl.uint32) << 24
    size = (top >> 4) & 0x07F00000
    weight = (size | (top & 0x80000000)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where(size == 0x07F00000, float("nan"), weight)


@triton.jit
def _tile(program, outputs, columns, ROWS: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr):
    """Of a program: the place in the rows to unpack, the first outputs of a step, the first columns of eight."""
    column_tiles = tl.cdiv(columns, 8 * WORDS)
    tiles = column_tiles * tl.cdiv(outputs, ROWS * STEPS)
    nth, tile = (program // tiles).to(tl.int64), program % tiles
    thread = tl.arange(0, ROWS * WORDS)[:, None]
    output = tile // column_tiles * (ROWS * STEPS) + thread // WORDS
    return nth, output, tile % column_tiles * (8 * WORDS) + thread % WORDS * 8


@triton.jit
def _scale_column(eight, column, PER_SCALE: tl.constexpr):
    """The column of the scales for columns, once for each eight if possible. PER_SCALE: 0 if there is one."""
    if PER_SCALE == 0:
        found = eight * 0
    elif PER_SCALE % 8 == 0:
        found = eight // PER_SCALE
    else:
        found = column // PER_SCALE
    return found


@_jit("weight_stride", "scales_stride", "outputs", "scale_columns", "columns")
def unpack_float8(
    rows,
    num_rows,
    num_first,
    weight,
    scales,
    out,
    weight_stride: tl.int64,
    scales_stride: tl.int64,
    outputs,
    scale_columns,
    columns,
    weight2,
    scales2,
    out2,
    weight_stride2: tl.int64,
    scales_stride2: tl.int64,
    outputs2,
    scale_columns2,
    columns2,
    NAN: tl.constexpr,
    OUTPUTS_PER_SCALE: tl.constexpr,
    PER_SCALE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Unpack ROWS * STEPS outputs of 8 * WORDS columns. `columns` are counted in units; strides are elements.

    Scales are floats, or bytes: exponents of two, of which 255 is NaN or infinity.
    """
    program = tl.program_id(0)
    if program >= num_first:
        program -= num_first
        weight, scales, out = weight2, scales2, out2
        weight_stride, scales_stride = weight_stride2, scales_stride2
        outputs, scale_columns, columns = outputs2, scale_columns2, columns2
    columns *= UNIT
    nth, output, eight = _tile(program, outputs, columns, ROWS, WORDS, STEPS)
    row = _row(rows, nth, num_rows)
    weight, scales = _place(weight, row, weight_stride, ALIGN), scales + row * scales_stride
    column = eight + tl.arange(0, 8)[None, :]
    at = output * columns + column
    scale_column = _scale_column(eight, column, PER_SCALE)
    loaded, scaling = (), ()
    for step in tl.static_range(STEPS):
        its = output + step * ROWS
        loaded += (tl.load((weight + step * ROWS * columns) + at, mask=(its < outputs) & (column < columns), other=0),)
        place = scales + (its // OUTPUTS_PER_SCALE * scale_columns + scale_column)
        scaling += (tl.load(place, mask=(its < outputs) & (column < columns if PER_SCALE % 8 else eight < columns)),)
    out += nth * (outputs.to(tl.int64) * columns)
    for step in tl.static_range(STEPS):
        scale = scaling[step]
        scale = _power_of_two(scale, NAN) if scale.dtype == tl.uint8 else scale.to(tl.float32)
        value = _rounded(_e4m3(loaded[step]) * scale, out.dtype.element_ty)
        mask = (output + step * ROWS < outputs) & (column < columns)
        tl.store((out + step * ROWS * columns) + at, value, mask=mask)


@_jit("packed_stride", "scales_stride", "outputs", "scale_columns", "columns")
def unpack_int4(
    rows,
    num_rows,
    num_first,
    packed,
    scales,
    out,
    packed_stride: tl.int64,
    scales_stride: tl.int64,
    outputs,
    scale_columns,
    columns,
    packed2,
    scales2,
    out2,
    packed_stride2: tl.int64,
    scales_stride2: tl.int64,
    outputs2,
    scale_columns2,
    columns2,
    PER_SCALE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Unpack ROWS * STEPS outputs of 8 * WORDS columns. `columns` are counted in units; strides are elements."""
    program = tl.program_id(0)
    if program >= num_first:
        program -= num_first
        packed, scales, out = packed2, scales2, out2
        packed_stride, scales_stride = packed_stride2, scales_stride2
        outputs, scale_columns, columns = outputs2, scale_columns2, columns2
    columns *= UNIT
    nth, output, eight = _tile(program, outputs, columns, ROWS, WORDS, STEPS)
    row = _row(rows, nth, num_rows)
    packed, scales = _place(packed, row, packed_stride, ALIGN), scales + row * scales_stride
    nibble = tl.arange(0, 8)[None, :]
    column = eight + nibble
    word_at, at = output * tl.cdiv(columns, 8) + eight // 8, output * columns + column
    scale_column = _scale_column(eight, column, PER_SCALE)
    loaded, scaling = (), ()
    for step in tl.static_range(STEPS):
        its = output + step * ROWS
        inside = (its < outputs) & (eight < columns)
        loaded += (tl.load((packed + step * ROWS * tl.cdiv(columns, 8)) + word_at, mask=inside, other=0),)
        place = scales + (its * scale_columns + scale_column)
        scaling += (tl.load(place, mask=(its < outputs) & (column < columns) if PER_SCALE % 8 else inside),)
    out += nth * (outputs.to(tl.int64) * columns)
    for step in tl.static_range(STEPS):
        field = ((loaded[step].to(tl.uint64) << 4) >> (4 * nibble)).to(tl.uint32) & 0xF0
        number = (field | 0x49000000).to(tl.float32, bitcast=True) - 524296.0  # 2 ** 19 + nibble, less 2 ** 19 + 8
        weight = _rounded(number * scaling[step].to(tl.float32), scales.dtype.element_ty)
        if out.dtype.element_ty != scales.dtype.element_ty:
            weight = _rounded(weight.to(tl.float32), out.dtype.element_ty)
        mask = (output + step * ROWS < outputs) & (column < columns)
        tl.store((out + step * ROWS * columns) + at, weight, mask=mask)
