"""vLLM's loader, with layers on the host: it processes quantised weights one module at a time on the device.

It moves the module's weights to the device, and back by their names. So weights that get a new name while they are
processed (NVFP4's `weight_packed` becomes `weight`) would stay, layer after layer, in memory that the model as a whole
does not fit in. So would weights that vLLM itself quantises: they do not exist before they are loaded.

vLLM 0.33 also moves weights back to memory that torch pins, which it rounds up to powers of two and never returns.
weightstream pins the final weights once, without rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader import utils as loader
from vllm.model_executor.model_loader.reload import layerwise

from weightstream.api.offloaders import StreamingOffloader


@contextmanager
def processed_on_host(offloader: StreamingOffloader) -> Iterator[None]:
    """Inside, modules of layers whose weights vLLM processes on the device are on the host afterwards."""
    loading, process = loader.device_loading_context, layerwise._layerwise_process
    parts: set[int] = set()

    def is_part(module: nn.Module) -> bool:
        """Whether it is a module of a layer. Others, such as embeddings that stay on the host, are vLLM's own."""
        if not parts:  # vLLM processes weights once all layers are built
            parts.update(id(part) for layer in offloader.layers.values() for part in layer.modules())
        return id(module) in parts

    @contextmanager
    def device_loading_context(module: nn.Module, target_device: torch.device) -> Iterator[nn.Module]:
        was_on_host = is_part(module) and any(parameter.device.type == "cpu" for parameter in module.parameters())
        with loading(module, target_device):
            yield module
        if was_on_host:
            offloader.hold_on_host(module)

    def layerwise_process(module: nn.Module, *args: Any) -> None:
        process(module, *args)
        if is_part(module):
            offloader.hold_on_host(module)

    with ExitStack() as stack:
        _replace(stack, loader, "device_loading_context", device_loading_context)
        _replace(stack, loader, "is_pin_memory_available", lambda: False)
        _replace(stack, layerwise, "_layerwise_process", layerwise_process)
        yield


def _replace(stack: ExitStack, module: Any, name: str, value: Any) -> None:
    stack.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)
