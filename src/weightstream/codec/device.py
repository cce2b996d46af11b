"""The device on which Triton launches kernels."""

from __future__ import annotations

import torch


def on(device: torch.device) -> torch.accelerator.device_index:
    """Make the device current: Triton launches on the current device, whatever device its arguments are on."""
    return torch.accelerator.device_index(device.index)
