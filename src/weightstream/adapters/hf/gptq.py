"""Modules of gptqmodel: those that cannot be streamed, the caches they must not keep, the tensor order of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from weightstream.errors import UnsupportedError
from weightstream.runtime.streamer import forward_patch


def is_of_gptqmodel(module: nn.Module) -> bool:
    """Whether a module computes with weights of GPTQ or AWQ."""
    return type(module).__module__.startswith("gptqmodel.")


def refuse_kernels(model: nn.Module, device: torch.device) -> None:
    """Raise `UnsupportedError` for modules that hold addresses of their weights, or that repack their weights in memory
    in their first forward."""
    for module in filter(is_of_gptqmodel, model.modules()):
        if "exllama" in type(module).__module__ or (device.type == "cpu" and hasattr(module, "transform_cpu")):
            raise UnsupportedError(
                f"{type(module).__name__} of gptqmodel keeps weights where they cannot be moved from: choose another "
                "kernel, such as 'torch', by `backend` in the quantization_config of config.json"
            )


def without_caches(module: Any) -> Callable[[], None] | None:
    """Have a module keep no unpacked weights for its next forward, which would be memory outside of the budget."""
    if not is_of_gptqmodel(module) or not hasattr(module, "clear_weight_cache"):
        return None
    module.clear_weight_cache()
    return forward_patch.wrap_forward(module, _run_and_clear)


def _run_and_clear(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return forward(*args, **kwargs)
    finally:
        module.clear_weight_cache()


def ordered_on(
    device: torch.device,
    plain: Callable[..., Any],
    loaded: Mapping[nn.Module, Mapping[str, torch.Tensor]],
    then: Callable[[nn.Module], None],
) -> Callable[..., Any]:
    """`post_init` of a module of gptqmodel, run on the device.

    A tensor that is equal afterwards is replaced by the loaded one, which views a file.
    """

    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.to(device)
        plain(self, *args, **kwargs)
        for name, tensor in loaded[self].items():
            now = self._buffers.get(name)
            if now is None or now is tensor or (now.dtype, now.shape) != (tensor.dtype, tensor.shape):
                continue
            if torch.equal(now, tensor.to(now.device)):
                self._buffers[name] = tensor
        then(self)

    return post_init
