"""The libraries' functions that unpack packed matrices, by the names that codec/unpacking.py gives the formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def by_transformers(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """mxfp4."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    found: torch.Tensor = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return found


def by_fp8_dequantize(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *block: int) -> torch.Tensor:
    """float8, also of each channel."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    found: torch.Tensor = finegrained.Fp8Dequantize(None)._dequantize_one(weight, scales, dtype)
    return found


def by_compressed_tensors(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, columns: int | None = None
) -> torch.Tensor:
    """int4, symmetric."""
    columns = 8 * packed.shape[2] if columns is None else columns
    num = scales.shape[2]
    args: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True}
    args |= {"strategy": "channel"} if num == 1 else {"strategy": "group", "group_size": columns // num}
    stored = [
        {"weight_packed": row, "weight_scale": scale, "weight_shape": torch.Size((row.shape[0], columns))}
        for row, scale in zip(packed, scales, strict=True)
    ]
    return _decompressed("pack-quantized", stored, args).to(dtype)


def by_compressed_tensors_float8(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float8 of each channel."""
    stored = [{"weight": row, "weight_scale": scale} for row, scale in zip(weight, scales, strict=True)]
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    return _decompressed("float-quantized", stored, args).to(dtype)


def _decompressed(name: str, stored: list[dict[str, Any]], args: dict[str, Any]) -> torch.Tensor:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**args), format=name
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(name)
    return torch.stack([compressor.decompress(each, scheme)["weight"] for each in stored])


REFERENCES = {"mxfp4": by_transformers, "float8": by_fp8_dequantize, "int4": by_compressed_tensors}


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Any NaN equals another one, as functions of torch do not agree on its bits."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    word = torch.int16 if found.dtype.itemsize == 2 else torch.int32
    differ = (found.view(word) != expected.view(word)) & ~(found.isnan() & expected.isnan())
    assert not differ.any(), (differ.nonzero()[:4], found[differ][:4], expected[differ][:4])
