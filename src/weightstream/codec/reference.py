"""The codec in plain torch, on any device: the reference for the kernels, and the fallback where they do not run."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch

from weightstream.codec import digits
from weightstream.codec.format import ELEMENTS, LANES, TILE, Layout

_TILES = 4096  # tiles for which all bases are compared at once
_WORDS = MappingProxyType({1: torch.uint8, 2: torch.int16})


class CodedPart(NamedTuple):
    """Compressed bytes, their layout, and memory for the decoded weights."""

    coded: torch.Tensor
    layout: Layout
    out: torch.Tensor


class Encoded(NamedTuple):
    """The compressed form of weights: its layout and its bytes."""

    layout: Layout
    coded: torch.Tensor


class Windows(NamedTuple):
    """For each tile the base of its symbols, and the bytes of its escapes: int32, (tiles,)."""

    bases: torch.Tensor
    num_escapes: torch.Tensor


def histograms(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """Counts of each exponent in each tile of flat bytes: int32 of shape (tiles, exponents)."""
    element = ELEMENTS[dtype]
    values, num = data.view(_WORDS[element.nbytes]), 2**element.exponent_bits
    num_tiles, whole = -(-len(values) // TILE), len(values) // TILE
    # the exponent of each weight, then its place in an array of all histograms, one after another
    places = (values >> element.mantissa_bits & num - 1).to(torch.int32)
    begins = torch.arange(0, num * num_tiles, num, dtype=torch.int32, device=data.device)
    places[: whole * TILE].view(whole, TILE).add_(begins[:whole, None])
    places[whole * TILE :].add_(begins[whole:])
    return torch.bincount(places, minlength=num_tiles * num).view(num_tiles, num).to(torch.int32)


def windows(counts: torch.Tensor, dtype: str) -> Windows:
    """The base of each tile, the least with the fewest bytes of escapes, and the number of these bytes."""
    element = ELEMENTS[dtype]
    if element.is_dense:
        found = [_least(digits.nbytes(part)) for part in counts.split(_TILES)]
        bases, nbytes = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Windows(bases.to(torch.int32), nbytes)
    sums = torch.nn.functional.pad(counts.cumsum(1, dtype=torch.int32), (1, 0))
    num_symbols = 2**element.symbol_bits - 1
    bases, outside = _least(sums[:, :-num_symbols] - sums[:, num_symbols:])
    return Windows(bases.to(torch.int32), sums[:, -1] + outside)


def _least(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index of the smallest number in each row, and that number."""
    least = numbers.amin(1)
    return (numbers == least[:, None]).to(torch.uint8).argmax(1), least


def prepared(counts: torch.Tensor, dtype: str, count: int) -> Encoded:
    """The compressed form of weights with these histograms, in which only starts and bases are written yet."""
    bases, num_escapes = windows(counts, dtype)
    starts = torch.nn.functional.pad(num_escapes.cumsum(0), (1, 0))
    layout = Layout(dtype=dtype, count=count, num_escapes=int(starts[-1]))
    layout.check()
    coded = torch.empty(layout.nbytes, dtype=torch.uint8, device=counts.device)
    coded[layout.starts_at : layout.bases_at] = starts.to(torch.int32).view(torch.uint8)
    coded[layout.bases_at :] = 0
    coded[layout.bases_at :][: len(bases)] = bases.to(torch.uint8)
    return Encoded(layout, coded)


def encode(data: torch.Tensor, dtype: str) -> Encoded:
    """The compressed form of flat bytes."""
    element = ELEMENTS[dtype]
    bits, escape = element.symbol_bits, 2**element.symbol_bits - 1
    exponents, raw = _fields(data, dtype)
    layout, coded = prepared(histograms(data, dtype), dtype, data.numel() // element.nbytes)
    rest = exponents - coded[layout.bases_at :][: layout.num_tiles].to(torch.int32)[:, None]
    rest.view(-1)[layout.count :] = 0
    escapes = (rest < 0) | (rest >= escape)
    symbols = torch.where(escapes, escape, rest)
    packed = _packed_dense if element.is_dense else _packed
    words = [packed(raw, dtype, element.raw_bits), packed(symbols, dtype, bits)]
    coded[: layout.starts_at] = torch.cat(words, 1).to(torch.int32).view(torch.uint8).view(-1)
    written = coded[layout.escapes_at : layout.escapes_at + layout.num_escapes]
    if element.is_dense:
        starts = coded[layout.starts_at : layout.bases_at].view(torch.int32)[:-1]
        digits.write_rests(_in_order(rest, dtype), starts, written)
    else:
        escaped = _in_order(rest - escape, dtype)[_in_order(escapes, dtype)] & 2**element.exponent_bits - 1
        written.copy_(escaped.to(torch.uint8))
    return Encoded(layout, coded)


def decode(coded: torch.Tensor, layout: Layout, out: torch.Tensor, first: int = 0, last: int | None = None) -> None:
    """Decode to flat `out`: all weights, or those of tiles [first, last) to their places in it.

    Damaged bytes give wrong weights.
    """
    element, bits = layout.element, layout.element.symbol_bits
    last = layout.num_tiles if last is None else last
    words = coded[first * layout.tile_nbytes : last * layout.tile_nbytes].view(torch.int32).to(torch.int64)
    words = words.view(last - first, -1, LANES)
    starts = coded[layout.starts_at : layout.bases_at].view(torch.int32)[first:last]
    bases = coded[layout.bases_at + first : layout.bases_at + last].to(torch.int32)
    rests = coded[layout.escapes_at : layout.escapes_at + layout.num_escapes]
    unpacked = _unpacked_dense if element.is_dense else _unpacked
    symbols = _in_order(unpacked(words[:, element.raw_bits :], layout.dtype, bits), layout.dtype)
    exponents, found = symbols + bases[:, None], symbols == 2**bits - 1
    if element.is_dense:
        exponents += digits.read_rests(found, starts, rests) - 3 * found.to(torch.int32)
    else:
        totals = found.sum(1, dtype=torch.int32)
        begins = torch.minimum(starts, layout.num_escapes - totals).clamp(min=0)
        ranks = begins[:, None] + found.cumsum(1, dtype=torch.int32) - 1
        found &= (totals <= layout.num_escapes)[:, None]
        exponents[found] += rests[ranks[found]].to(torch.int32)
    exponents = _by_weight(exponents & 2**element.exponent_bits - 1, layout.dtype)
    raw = unpacked(words[:, : element.raw_bits], layout.dtype, element.raw_bits)
    mantissa = raw & 2**element.mantissa_bits - 1
    sign = raw >> element.mantissa_bits
    values = mantissa | exponents << element.mantissa_bits | sign << 8 * element.nbytes - 1
    target = out[: layout.raw_nbytes][first * TILE * element.nbytes : last * TILE * element.nbytes]
    target.copy_(values.to(_WORDS[element.nbytes]).view(torch.uint8).view(-1)[: target.numel()])


def _fields(data: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents, and mantissa with the sign above it, in whole tiles: int32, (tiles, 4096), zeros at the end."""
    element = ELEMENTS[dtype]
    count = data.numel() // element.nbytes
    values = torch.zeros(-(-count // TILE) * TILE, dtype=torch.int32, device=data.device)
    values[:count] = data.view(_WORDS[element.nbytes]).to(torch.int32) & 2 ** (8 * element.nbytes) - 1
    values = values.view(-1, TILE)
    exponents = values >> element.mantissa_bits & 2**element.exponent_bits - 1
    sign = values >> 8 * element.nbytes - 1
    return exponents, values & 2**element.mantissa_bits - 1 | sign << element.mantissa_bits


def _shape(dtype: str) -> tuple[int, int]:
    """Words of a lane in a tile of weights, and weights in a word."""
    nbytes = ELEMENTS[dtype].nbytes
    return 8 * nbytes, 4 // nbytes


def _in_order(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Permute (tiles, 4096) from the order of weights to the order of escapes."""
    num, per = _shape(dtype)
    if ELEMENTS[dtype].is_dense:
        return values.view(-1, num, LANES, per).permute(0, 2, 3, 1).reshape(values.shape)
    return values.view(-1, num, LANES, per).transpose(1, 2).reshape(values.shape)


def _by_weight(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """The inverse of `_in_order`."""
    num, per = _shape(dtype)
    if ELEMENTS[dtype].is_dense:
        return values.view(-1, LANES, per, num).permute(0, 3, 1, 2).reshape(values.shape)
    return values.view(-1, LANES, num, per).transpose(1, 2).reshape(values.shape)


def _shifts(dtype: str, bits: int, device: torch.device) -> torch.Tensor:
    """Bit offsets of fields in a word that several words of weights share: (words, 1, weights in a word)."""
    num, weights = _shape(dtype)
    return bits * torch.arange(num // bits, device=device)[:, None, None] + num * torch.arange(weights, device=device)


def _plane(values: torch.Tensor, dtype: str, bits: int) -> torch.Tensor:
    """Pack fields of 1, 2, 4 or 8 bits, those of several words of weights in one: int64, (tiles, words, lanes)."""
    num, weights = _shape(dtype)
    shaped = values.to(torch.int64).view(-1, bits, num // bits, LANES, weights)
    return (shaped << _shifts(dtype, bits, values.device)).sum((2, 4))


def _values(words: torch.Tensor, dtype: str, bits: int, mask: int) -> torch.Tensor:
    """The fields of a plane, (tiles, 4096) in the order of weights."""
    fields = words[:, :, None, :, None] >> _shifts(dtype, bits, words.device) & mask
    return fields.to(torch.int32).reshape(len(words), -1)


def _packed(values: torch.Tensor, dtype: str, bits: int) -> torch.Tensor:
    """Pack symbols or raw bits into words: of 11 bits the low 8 first, of 3 bits the low 2."""
    if bits > 8:
        return torch.cat([_packed(values & 255, dtype, 8), _packed(values >> 8, dtype, bits - 8)], 1)
    if bits != 3:
        return _plane(values, dtype, bits)
    high = _plane(values >> 2, dtype, 2)
    return torch.cat([_plane(values & 3, dtype, 2), high[:, :1] | high[:, 1:] << 1], 1)


def _unpacked(words: torch.Tensor, dtype: str, bits: int) -> torch.Tensor:
    if bits > 8:
        return _unpacked(words[:, :8], dtype, 8) | _unpacked(words[:, 8:], dtype, bits - 8) << 8
    if bits != 3:
        return _values(words, dtype, bits, 2**bits - 1)
    high = torch.cat([words[:, 2:], words[:, 2:] >> 1], 1)
    return _values(words[:, :2], dtype, 2, 3) | _values(high, dtype, 2, 1) << 2


def _packed_dense(values: torch.Tensor, dtype: str, bits: int) -> torch.Tensor:
    """Pack the raw bits of two words into one: mantissa and sign of the first at their places in a weight, those of the
    second in between. Symbols are packed into planes, one bit of each weight of a lane."""
    if bits == 2:
        return torch.cat([_plane(values & 1, dtype, 1), _plane(values >> 1, dtype, 1)], 1)
    words = values.to(torch.int64).view(len(values), -1, 2, LANES, 2)
    first, second = words[:, :, 0], words[:, :, 1]
    both = first & 127 | (first & 128) << 8 | second << 7
    return both[..., 0] | both[..., 1] << 16


def _unpacked_dense(words: torch.Tensor, dtype: str, bits: int) -> torch.Tensor:
    if bits == 2:
        return _values(words[:, :1], dtype, 1, 1) | _values(words[:, 1:], dtype, 1, 1) << 1
    both = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1)
    first, second = both & 127 | both >> 8 & 128, both >> 7 & 255
    return torch.stack([first, second], 2).to(torch.int32).reshape(len(words), -1)
