"""Values of the host on a device, without a wait."""

from __future__ import annotations

from typing import Any

import torch


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of these values, such as a list of lists.

    The host waits for the device in a copy of pageable memory, and not in one of pinned memory, which PyTorch reuses
    only after the copies from it.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
