"""vLLM's loader, with layers on the host: it processes quantised weights one module at a time on the device.

It moves the module's weights to the device, and back by their names. So weights that get a new name while they are
processed (NVFP4's `weight_packed` becomes `weight`) would stay, layer after layer, in memory that the model as a whole
does not fit in. vLLM 0.33 also moves them back to memory that torch pins, which it rounds up to powers of two and never
returns; weightstream pins the final weights once, without rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from vllm.model_executor.model_loader import utils as loader

from weightstream.api.offloaders import StreamingOffloader


@contextmanager
def processed_on_host(offloader: StreamingOffloader) -> Iterator[None]:
    """Inside, modules whose weights vLLM moves from the host to process them are on the host again afterwards."""
    theirs, can_pin = loader.device_loading_context, loader.is_pin_memory_available

    @contextmanager
    def ours(module: nn.Module, target_device: torch.device) -> Iterator[nn.Module]:
        was_on_host = any(parameter.device.type == "cpu" for parameter in module.parameters())
        with theirs(module, target_device):
            yield module
        if was_on_host:
            offloader.hold_on_host(module)

    loader.device_loading_context, loader.is_pin_memory_available = ours, lambda: False
    try:
        yield
    finally:
        loader.device_loading_context, loader.is_pin_memory_available = theirs, can_pin
