"""Packed matrices: pick some rows of stacks and unpack them, in one kernel. Knows no library, no module and no cache.

A stack of matrices is held as some tensors, its *leaves*. The first dimension of each counts rows: a row is a matrix.

| format   | leaves                                                     | matrix                                   |
|----------|------------------------------------------------------------|------------------------------------------|
| `mxfp4`  | blocks (E, N, G, 16) and scales (E, N, G), both of uint8   | (32 G, N): float4_e2m1 * 2 ** (scale-127)|
| `float8` | weight (E, N, K) of float8_e4m3fn, scales (E, n, k)        | (N, K): float32 products, rounded once   |
| `int4`   | packed (E, N, ceil(K / 8)) of int32, scales (E, N, k)      | (N, K): (nibble - 8) * scale             |

A byte of mxfp4 and a word of int4 hold the first weight in their lowest bits. A scale of float8 and of int4 is that of
a block: settings of float8 are the outputs and the columns of a block. Without them, and for int4, whose settings are
not used, the scales divide the matrix evenly. Scales with k = 1 may be (E, n). Those of float8 are float32, float16,
bfloat16, or exponents of two (uint8, float8_e8m0fnu). Products of int4 are rounded to the dtype of the scales before
the dtype of the matrix, as compressed-tensors does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from weightstream.codec.device import on
from weightstream.errors import InvariantError

Leaves = Sequence[torch.Tensor]
Unpack = Callable[..., torch.Tensor]

_MOST_ALIGNED = 16  # bytes that a thread reads or writes at once
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernel(name: str, dtype: torch.dtype) -> bool:
    """Whether a kernel unpacks this format to this dtype."""
    return name in _WORK and dtype in _DTYPES


def unpack_rows(
    name: str,
    settings: tuple[Any, ...],
    leaves: Leaves,
    rows: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of a stack as new, contiguous matrices of shape (len(rows), *shape).

    Everything is on the device, and the host does not wait: the call may be captured in a CUDA graph.

    Args:
        name: of the format; the module has a table.
        settings: of the format.
        leaves: of the stack. Rows are contiguous, and may be apart: in the slots of a cache, for instance.
        rows: int64; negative ones count from the end. They are not checked.
        shape: of a matrix.
        dtype: of a matrix: bfloat16, float16 or float32.

    Raises:
        InvariantError: if leaves, matrices and format do not fit together.
    """
    return unpack_stacks(name, settings, [leaves], rows, [shape], dtype)[0]


def unpack_stacks(
    name: str,
    settings: tuple[Any, ...],
    stacks: Sequence[Leaves],
    rows: torch.Tensor,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """As `unpack_rows`, the same rows of several stacks: in one launch for two, where one kernel fits both.

    The last stack is unpacked last: the device's caches hold more of its matrices than of the others.
    """
    outs = [torch.empty(len(rows), *shape, dtype=dtype, device=rows.device) for shape in shapes]
    unpack_stacks_into(name, settings, stacks, rows, outs)
    return outs


def unpack_rows_into(
    name: str, settings: tuple[Any, ...], leaves: Leaves, rows: torch.Tensor, out: torch.Tensor
) -> None:
    """As `unpack_rows`, into contiguous memory that is given."""
    unpack_stacks_into(name, settings, [leaves], rows, [out])


def unpack_stacks_into(
    name: str, settings: tuple[Any, ...], stacks: Sequence[Leaves], rows: torch.Tensor, outs: Sequence[torch.Tensor]
) -> None:
    """As `unpack_stacks`, into contiguous memory that is given."""
    _check("rows are int64, in one dimension", (rows.dtype, rows.dim()) == (torch.int64, 1), rows)
    work: list[_Work] = []
    for leaves, out in zip(stacks, outs, strict=True):
        if not has_kernel(name, out.dtype):
            raise InvariantError(f"no kernel unpacks {name} to {out.dtype}; formats are {', '.join(_WORK)}")
        fits = out.is_contiguous() and len(out) == len(rows)
        _check("the matrices are contiguous, one for each row", fits, out, rows)
        for leaf in leaves:
            _check("each row of a leaf is contiguous", leaf[0].is_contiguous(), leaf)
        if out.numel():
            work.append(_WORK[name](settings, leaves, out))
    while work:
        first, *work = work
        second = work.pop(0) if work and work[0].is_like(first) else None
        with on(rows.device):
            _launch(rows, first, second)


def unpacks_equally(
    name: str, settings: tuple[Any, ...], leaves: Leaves, shape: Sequence[int], dtype: torch.dtype, unpack: Unpack
) -> bool:
    """Whether the kernel gives the bits of a library's function, tried with every byte under every scale.

    Of scales in floating point some are tried: each exponent, also subnormal, infinite and NaN. Any NaN equals another
    one. Exponent 255 of mxfp4 is left out: it is NaN in the format, and functions differ. The host waits for the
    result, which belongs to the device, the dtypes and the format.

    Args:
        name: of the format.
        settings: of the format.
        leaves: of a stack, of which only dtypes, device, and sizes of blocks are used.
        shape: of one of its matrices.
        dtype: of its matrices.
        unpack: the function: from leaves, dtype and settings, it makes all matrices.
    """
    if not has_kernel(name, dtype):
        return False
    settings, trial, matrix = _TRIALS[name](settings, leaves, shape)
    expected = unpack(*trial, dtype, *settings)
    rows = torch.arange(len(trial[0]), device=trial[0].device)
    found = unpack_rows(name, settings, trial, rows, matrix, dtype)
    return _same_bits(found, expected)


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    word = torch.int16 if found.dtype.itemsize == 2 else torch.int32
    same = (found.view(word) == expected.view(word)) | (found.isnan() & expected.isnan())
    return bool(same.all())


def _check(fact: str, holds: bool, *tensors: torch.Tensor) -> None:
    """Kernels go by addresses, and would read or write what follows."""
    if not holds:
        found = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} by {t.stride()}" for t in tensors)
        raise InvariantError(f"{fact}: found {found}")


# Launches


class _Work(NamedTuple):
    """The part of a launch for one stack.

    Attributes:
        kernel: its name in unpack_kernels.py.
        tensors: the leaves and the matrices.
        numbers: the other arguments, without the last one.
        length: the last argument, which the kernel takes in units.
        tiles: the programs for each row.
        align: bytes of which the addresses of all rows are multiples.
        constants: of the kernel, besides.
    """

    kernel: str
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    length: int
    tiles: int
    align: int
    constants: dict[str, Any]

    def is_like(self, other: _Work) -> bool:
        """Whether one launch can do both."""
        ours, theirs = (
            (work.kernel, work.constants, work.num_rows, [tensor.dtype for tensor in work.tensors])
            for work in (self, other)
        )
        return ours == theirs

    @property
    def num_rows(self) -> int:
        """The rows of the stack."""
        return len(self.tensors[0])

    def arguments(self, unit: int) -> tuple[Any, ...]:
        return *self.tensors, *self.numbers, self.length // unit


def _launch(rows: torch.Tensor, first: _Work, second: _Work | None) -> None:
    from weightstream.codec import unpack_kernels

    both = (first,) if second is None else (first, second)
    unit = math.gcd(8, *(work.length for work in both))
    unit = unit if unit == 8 else 1
    num_first, *rest = (work.tiles * len(rows) for work in both)
    getattr(unpack_kernels, first.kernel)[(num_first + sum(rest),)](
        rows,
        first.num_rows,
        num_first,
        *first.arguments(unit),
        *both[-1].arguments(unit),  # not used if there is one
        ALIGN=math.gcd(*(work.align for work in both)),
        UNIT=unit,
        **first.constants,
    )


def _alignment(leaf: torch.Tensor) -> int:
    """Bytes of which the address of each row is a multiple."""
    return math.gcd(_MOST_ALIGNED, leaf.data_ptr(), leaf.stride(0) * leaf.element_size())


def _work_of_mxfp4(settings: tuple[Any, ...], leaves: Leaves, out: torch.Tensor) -> _Work:
    from weightstream.codec import unpack_kernels

    blocks, scales = leaves
    _, outputs, groups = scales.shape
    fits = blocks.shape[1:] == (outputs, groups, 16) and out.shape[1:] == (32 * groups, outputs)
    _check("blocks (E, N, G, 16) and scales (E, N, G) give (32 G, N)", fits, blocks, scales, out)
    _check("leaves are bytes", blocks.dtype == scales.dtype == torch.uint8, blocks, scales)
    align = _alignment(blocks)
    _check("blocks are read in words of 4 bytes", align % 4 == 0, blocks)
    shape = unpack_kernels.MXFP4_SHAPE
    return _Work(
        kernel="unpack_mxfp4",
        tensors=(blocks, scales, out),
        numbers=(blocks.stride(0), scales.stride(0), groups),
        length=outputs,
        tiles=math.ceil(outputs / (8 * shape["TILES"])) * math.ceil(groups / shape["GROUPS"]),
        align=align,
        constants=dict(shape),
    )


def _in_a_grid(scales: torch.Tensor) -> torch.Tensor:
    """Scales as (E, n, k)."""
    return scales.reshape(*scales.shape, *(1,) * (3 - scales.dim()))


def _block(settings: tuple[Any, ...], matrix: Sequence[int], grid: Sequence[int]) -> tuple[int, int]:
    """Outputs and columns of which each has one scale."""
    rows, columns = settings or (size // max(num, 1) for size, num in zip(matrix, grid, strict=True))
    if tuple(grid) != (math.ceil(matrix[0] / rows), math.ceil(matrix[1] / columns)):
        raise InvariantError(f"scales {tuple(grid)} are not those of blocks of {rows} x {columns} in {tuple(matrix)}")
    return rows, columns


def _tiles(shape: Mapping[str, int], matrix: Sequence[int]) -> int:
    return math.ceil(matrix[0] / (shape["ROWS"] * shape["STEPS"])) * math.ceil(matrix[1] / (8 * shape["WORDS"]))


_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def _work_of_float8(settings: tuple[Any, ...], leaves: Leaves, out: torch.Tensor) -> _Work:
    from weightstream.codec import unpack_kernels

    weight, scales = leaves[0], _in_a_grid(leaves[1])
    _check("weights are float8_e4m3fn", weight.dtype == torch.float8_e4m3fn, weight)
    _check("scales are floats or exponents of two", scales.dtype in _DTYPES + _EXPONENTS, scales)
    _check("the weight gives a matrix of its shape", weight.shape[1:] == out.shape[1:], weight, out)
    outputs_per_scale, per_scale = _block(settings, weight.shape[1:], scales.shape[1:])
    shape = unpack_kernels.UNPACK_SHAPE
    constants = {
        "NAN": scales.dtype == torch.float8_e8m0fnu,
        "OUTPUTS_PER_SCALE": outputs_per_scale,
        "PER_SCALE": 0 if scales.shape[2] == 1 else per_scale,
    }
    return _Work(
        kernel="unpack_float8",
        tensors=(weight.view(torch.uint8), scales.view(torch.uint8) if scales.dtype in _EXPONENTS else scales, out),
        numbers=(weight.stride(0), scales.stride(0), weight.shape[1], scales.shape[2]),
        length=weight.shape[2],
        tiles=_tiles(shape, weight.shape[1:]),
        align=_alignment(weight),
        constants=constants | dict(shape),
    )


def _work_of_int4(settings: tuple[Any, ...], leaves: Leaves, out: torch.Tensor) -> _Work:
    from weightstream.codec import unpack_kernels

    packed, scales = leaves[0], _in_a_grid(leaves[1])
    _, outputs, columns = out.shape
    _check("packed weights are int32", packed.dtype == torch.int32, packed)
    _check("scales are floats", scales.dtype in _DTYPES, scales)
    _check("a word holds 8 columns", packed.shape[1:] == (outputs, math.ceil(columns / 8)), packed, out)
    rows_of_block, per_scale = _block((), out.shape[1:], scales.shape[1:])
    _check("each output has its scales", rows_of_block == 1, scales, out)
    shape = unpack_kernels.UNPACK_SHAPE
    return _Work(
        kernel="unpack_int4",
        tensors=(packed, scales, out),
        numbers=(packed.stride(0), scales.stride(0), outputs, scales.shape[2]),
        length=columns,
        tiles=_tiles(shape, out.shape[1:]),
        align=packed.element_size(),  # a thread reads a word
        constants={"PER_SCALE": 0 if scales.shape[2] == 1 else per_scale, **shape},
    )


_WORK: Mapping[str, Callable[[tuple[Any, ...], Leaves, torch.Tensor], _Work]] = MappingProxyType(
    {"mxfp4": _work_of_mxfp4, "float8": _work_of_float8, "int4": _work_of_int4}
)
FORMATS = tuple(_WORK)


# Trials: settings, leaves with every byte under every scale, and the shape of their matrices

_Trial = tuple[tuple[Any, ...], Leaves, tuple[int, ...]]
_HEIGHT, _WIDTH = 128, 256  # of the largest blocks that are tried as they are


def _trial_of_mxfp4(settings: tuple[Any, ...], leaves: Leaves, shape: Sequence[int]) -> _Trial:
    every = torch.arange(256, dtype=torch.uint8, device=leaves[0].device)
    scales = every.clamp(max=254).view(1, 256, 1).repeat(1, 1, 16)
    return settings, (every.view(1, 1, 16, 16).repeat(1, 256, 1, 1), scales), (512, 256)


def _trial_of_float8(settings: tuple[Any, ...], leaves: Leaves, shape: Sequence[int]) -> _Trial:
    weight, scales = leaves[0], _in_a_grid(leaves[1])
    height, width = _block(settings, shape, scales.shape[1:])
    block = min(height, _HEIGHT), _trial_width(width, scales)
    values, under = _in_blocks(256, block, scales)
    _check("a matrix has a list or a grid of scales", leaves[1].dim() > 1, leaves[1])
    trial = values.to(torch.uint8).view(weight.dtype), under.flatten(leaves[1].dim() - 1)
    return block if settings else (), trial, tuple(values.shape[1:])


def _trial_of_int4(settings: tuple[Any, ...], leaves: Leaves, shape: Sequence[int]) -> _Trial:
    packed, scales = leaves[0], _in_a_grid(leaves[1])
    _, width = _block((), shape, scales.shape[1:])
    values, under = _in_blocks(16, (1, _trial_width(width, scales)), scales)
    words = torch.nn.functional.pad(values, (0, -values.shape[2] % 8)).unflatten(2, (-1, 8))
    places = 4 * torch.arange(8, device=packed.device)
    return settings, ((words << places).sum(3).to(torch.int32), under), tuple(values.shape[1:])


def _trial_width(width: int, scales: torch.Tensor) -> int:
    """The columns of a block; fewer if it has all."""
    return min(width, _WIDTH) if scales.shape[2] == 1 else width


def _in_blocks(num: int, block: tuple[int, int], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values below `num`, as int64 (E, N, K), and scales (E, n, k): each value under each scale. An output has one
    scale, or some if it has several in `like`."""
    height, width = block
    scales = _trial_scales(like).view(1, -1, 1 if like.shape[2] == 1 else max(2, 8 // math.gcd(8, width)))
    _, down, across = scales.shape
    rows = math.ceil(num / (height * width))
    values = torch.arange(rows * height * width, device=like.device).view(rows, height, width) % num
    return values.repeat(1, down, across), scales.repeat(rows, 1, 1)


def _trial_scales(like: torch.Tensor) -> torch.Tensor:
    """All values of the dtype if it has 8 bits; else one for each value of the first 9 bits, the sign and exponent."""
    device = like.device
    if like.element_size() == 1:
        return torch.arange(256, device=device).to(torch.uint8).view(like.dtype)
    num_rest = 8 * like.element_size() - 9
    first = torch.arange(512, device=device)
    bits = first << num_rest | first * 104729 % (1 << num_rest)
    return bits.to(torch.int16 if num_rest == 7 else torch.int32).view(like.dtype)


_TRIALS: Mapping[str, Callable[[tuple[Any, ...], Leaves, Sequence[int]], _Trial]] = MappingProxyType(
    {"mxfp4": _trial_of_mxfp4, "float8": _trial_of_float8, "int4": _trial_of_int4}
)
