"""The rival of planes.py: 4-bit weights with a scale and a zero for each 64 of a row, and their product with one token.

Written with the same care as the kernel of the library, so that the comparison is one of formats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUP = 64
SHAPE = {"ROWS": 4, "TILES": 16, "STAGES": 2, "num_warps": 1}
MAGIC = 0x43004300  # two bfloat16 of 128: a code in the lowest bits adds to it


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of eight weights, and for each group its scale and zero, two float16."""
    words, steps = zip(*[_quantised(part) for part in weight.split(4096)], strict=True)
    return torch.cat(words), torch.cat(steps)


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    least, most = groups.aminmax(dim=2, keepdim=True)
    scale = ((most - least) / 15).clamp(min=1e-7).half()
    zero = (-least / scale.float()).half()
    codes = (groups / scale.float() + zero.float()).round().clamp(0, 15).to(torch.int32).unflatten(2, (8, 8))
    words = torch.zeros_like(codes[:, :, 0])
    for k in range(8):
        words |= codes[:, :, k] << 4 * k
    return words, torch.cat([scale, zero], 2)


def dequantise(words: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([words >> 4 * k & 15 for k in range(8)], 2).flatten(2)
    return ((codes - steps[..., 1:].float()) * steps[..., :1].float()).flatten(1).bfloat16()


def multiply(x: torch.Tensor, words: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    rows, row_tiles, _ = words.shape
    out = x.new_empty(1, rows)
    _multiply[(triton.cdiv(rows, SHAPE["ROWS"]),)](x, words, steps, out, rows, row_tiles, MAGIC, **SHAPE)
    return out


@triton.jit(do_not_specialize=["rows", "row_tiles", "magic"])
def _multiply(
    x,
    words,
    steps,
    out,
    rows,
    row_tiles,
    magic,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS
    words, steps = words.to(tl.pointer_type(tl.uint32)), steps.to(tl.pointer_type(tl.uint32))
    half, word = tl.arange(0, 2 * TILES), tl.arange(0, 4)[None, :]
    magic = magic.to(tl.uint32)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros([2 * TILES], tl.float32),)
    for begin in tl.range(0, row_tiles, TILES, num_stages=STAGES):
        inside = half // 2 + begin < row_tiles
        tile_1d = tl.minimum(half // 2 + begin, row_tiles - 1)
        tile, second_half = tile_1d[:, None], (half % 2)[:, None]
        xs = ()
        sum_x = tl.zeros([2 * TILES, 4], tl.float32)
        for k in tl.static_range(8):
            xs += (tl.load(x + (tile * 64 + second_half * 4 + word) + 8 * k).to(tl.float32),)
            sum_x += xs[k]
        sum_1d = tl.sum(sum_x, 1)
        new = ()
        for r in tl.static_range(ROWS):
            at = tl.minimum(first_row + r, rows - 1).to(tl.int64) * row_tiles
            codes = tl.load(words + at * 8 + (tile * 8 + second_half * 4 + word))
            products = tl.zeros([2 * TILES, 4], tl.float32)
            for k in tl.static_range(4):
                both = ((codes if k == 0 else codes >> (4 * k)) & 0x000F000F) ^ magic
                products += (both << 16).to(tl.float32, bitcast=True) * xs[k]
                products += (both & 0xFFFF0000).to(tl.float32, bitcast=True) * xs[k + 4]
            step = tl.load(steps + at + tile_1d)
            scale = (step & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            zero = (step >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            product = (tl.sum(products, 1) - (zero + 128.0) * sum_1d) * scale
            new += (sums[r] + tl.where(inside, product, 0.0),)
        sums = new
    for r in tl.static_range(ROWS):
        total = tl.sum(sums[r], 0)
        if first_row + r < rows:
            tl.store(out + first_row + r, total.to(out.dtype.element_ty))
