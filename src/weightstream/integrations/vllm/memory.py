"""The device memory of an engine: its limit, and the part that its KV cache leaves for weights."""

from __future__ import annotations

import gc
from typing import Any

from weightstream.plan.units import human
from weightstream.runtime.devices import cuda

# Memory that stays free for CUDA graphs and late allocations: a 50th of the device, and 512 MiB at least.
_RESERVE_DIVISOR, _RESERVE_NBYTES = 50, 512 << 20


class Room:
    """The device memory that vLLM may use, which `gpu_memory_utilization` limits, and what is left of it."""

    def __init__(self, worker: Any, plain_nbytes: int) -> None:
        self._worker = worker
        self._plain_nbytes = plain_nbytes  # allocated before weights of layers came to the device
        config = worker.vllm_config
        configured_nbytes = config.cache_config.kv_cache_memory_bytes
        specs = worker.get_kv_cache_spec().values()
        self.cache_nbytes = int(configured_nbytes or sum(spec.max_memory_usage_bytes(config) for spec in specs))

    def left(self, activation_nbytes: int) -> int:
        """The bytes that are left for the KV cache, after everything on the device now, activations, and a reserve for
        CUDA graphs."""
        gc.collect()
        cuda.give_back(workspaces=False)
        free, total = cuda.memory(self._worker.device)
        used = int(self._worker.init_snapshot.free_memory) - free
        reserve_nbytes = max(total // _RESERVE_DIVISOR, _RESERVE_NBYTES)
        return int(self._worker.requested_memory) - used - activation_nbytes - reserve_nbytes

    def nbytes(self, activation_nbytes: int) -> int:
        """The bytes that weights of layers may take, so that the wanted KV cache fits as well."""
        held_nbytes = allocated(self._worker.device) - self._plain_nbytes  # weights of layers that are on the device
        return self.left(activation_nbytes) + held_nbytes - self.cache_nbytes

    def arithmetic(self, activation_nbytes: int) -> str:
        """The arithmetic of the memory for weights of layers, and the remedy, for an error."""
        utilization = self._worker.vllm_config.cache_config.gpu_memory_utilization
        left = human(max(0, self.nbytes(activation_nbytes)))
        return (
            f"gpu_memory_utilization = {utilization} leaves {left} for layers, after {human(self.cache_nbytes)} of KV "
            f"cache and {human(activation_nbytes)} of activations: raise it, or lower max_model_len, max_num_seqs or "
            "max_num_batched_tokens, or pass a device_budget"
        )


def is_cuda(device: Any) -> bool:
    return getattr(device, "type", "cpu") == "cuda"


def allocated(device: Any) -> int:
    return cuda.allocated_nbytes(device) if is_cuda(device) else 0
