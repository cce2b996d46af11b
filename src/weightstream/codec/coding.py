"""The codec on a device: Triton kernels where they run, plain torch elsewhere. Chooses; knows no model and no plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from weightstream.codec import chunks, reference
from weightstream.codec.format import Layout

logger = logging.getLogger("weightstream")

Part = tuple[torch.Tensor, Layout, torch.Tensor]  # coded bytes, their layout, memory for the weights
_TRIED = 3 * 4096 + 5


@cache
def available(device: torch.device) -> bool:
    """Whether weights can be decoded on a device as fast as it takes; says once why not."""
    reason = why_not(device)
    if reason is not None:
        logger.warning("weights are not coded on %s, and move as they are: %s", device, reason)
    return reason is None


def why_not(device: torch.device) -> str | None:
    """What keeps the kernels from running on a device, in words; None: they ran, and every bit was right."""
    if device.type != "cuda":
        return "the kernels need a CUDA GPU"
    try:
        from weightstream.codec import triton_codec

        numbers = torch.arange(_TRIED, dtype=torch.int32, device="cpu")
        data = numbers.mul_(40503).to(torch.int16).view(torch.uint8)
        expected = reference.encode(data, "bfloat16", 3)
        with torch.get_device_module(device).device(device):  # Triton launches on the current one
            layout, coded = triton_codec.encode(data.to(device), "bfloat16", 3)
            out = torch.zeros(2 * _TRIED + 2, dtype=torch.uint8, device=device)  # in whole words
            triton_codec.Decoding([(coded, layout, out)])()
            right = layout == expected[0] and torch.equal(coded.cpu(), expected[1])
            right = right and torch.equal(out[: data.numel()].cpu(), data)
    except ImportError as error:
        return f"Triton is missing ({error}): pip install triton"
    except Exception as error:  # whatever a compiler or a driver thinks of: nothing depends on this
        return f"its kernels do not run here ({type(error).__name__}: {str(error).strip()[-200:]})"
    return None if right else "a trial gave other bits"


def encode(data: torch.Tensor, dtype: str, bits: int) -> tuple[Layout, torch.Tensor]:
    """The coded form of flat bytes, where they are."""
    if data.device.type == "cpu" or not available(data.device):
        coder = chunks.Coder(device=str(data.device))
        (layout,) = coder.layouts(data, dtype, [bits])
        return layout, torch.cat([piece.to(data.device) for piece in coder.pieces(data, layout)])
    from weightstream.codec import triton_codec

    return triton_codec.encode(data, dtype, bits)


def decode(coded: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    """Write the weights' bytes to `out`, on the same device; on a GPU it has room for whole words of 4 bytes."""
    decoding([(coded, layout, out)])()


def decoding(parts: Sequence[Part]) -> Callable[[], None]:
    """What decodes all of these at once, any number of times, from the same bytes into the same memory."""
    if not parts or parts[0][0].device.type == "cpu" or not available(parts[0][0].device):
        return partial(_each, [partial(chunks.decode, *part) for part in parts])
    from weightstream.codec import triton_codec

    kinds = {(layout.dtype, layout.bits) for _, layout, _ in parts}
    found = [triton_codec.Decoding(p for p in parts if (p[1].dtype, p[1].bits) == kind) for kind in sorted(kinds)]
    return found[0] if len(found) == 1 else partial(_each, found)


def _each(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()
